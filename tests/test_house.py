"""The rules of the house: sizes, order, directions of import, words that may not appear."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

import pytest

from asyncgate.parts.model import stored
from tests.support.source import nodes, tree

ROOT = Path(__file__).parents[1]
GATE = ROOT / "asyncgate.py"
SWAPPABLE = ("backends", "clients", "commands", "conformance", "extras")
PRODUCT = ("backends", "clients", "commands", "extras", "parts")
PARTS = (*SWAPPABLE, "bench", "parts")
BESIDE = (
    ".ci/run",
    ".dockerignore",
    ".gitignore",
    "AGENTS.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "fly.toml",
    "hatch_build.py",
    "pyproject.toml",
    "server.json",
)
TEXT = {".cjs", ".css", ".html", ".js", ".json", ".md", ".py", ".service", ".sh", ".sql", ".tpl", ".yaml"}

BANNERS = [
    "VOCABULARY",
    "LAW",
    "WORK",
    "ENGINE",
    "BATCHES",
    "OPERATIONS",
]
# Lines.  Goals: all but conformance and bench 62,000; what a contributor must know of it 38,000.
CEILINGS = {
    "asyncgate.py": 2_400,
    "backends": 8_180,
    "bench": 2_640,
    "clients": 4_388,
    "clients/typescript": 2_540,
    "commands": 8_478,
    "conformance": 27_660,
    "extras/a2a": 1_741,
    "extras/a2a_worker": 745,
    "extras/agents": 581,
    "extras/ai_worker": 1_300,
    "extras/asking": 980,
    "extras/celery": 100,
    "extras/console": 7_765,
    "extras/doctor": 1_270,
    "extras/families": 175,
    "extras/journal": 190,
    "extras/ledger": 7_097,
    "extras/limits": 419,
    "extras/oauth": 4_906,
    "extras/outbox": 590,
    "extras/output": 478,
    "extras/payloads": 370,
    "extras/privacy": 2_020,
    "extras/scheduler": 1_280,
    "extras/starvation": 90,
    "extras/types": 1_118,
    "extras/unique": 229,
    "extras/webhooks": 2_140,
    "parts": 800,
    "parts/faces": 4_822,
    "parts/identity": 5_475,
    "parts/metrics": 580,
    "parts/model": 9_278,
    "parts/operating": 2_490,
    "parts/process": 2_260,
    "parts/receipts": 1_976,
}
# Words that say nothing of the value that they name, and how often one of them is bound.
NAMELESS = {"found": 1, "no": 0, "one": 0, "said": 0}       # `found` is a member of the reply of find_id
CODE = {".cjs", ".css", ".html", ".js", ".mjs", ".py", ".sql", ".ts"}
GENERATED = {"clients/operations.py", "clients/typescript/src/operations.ts"}
# What costs start-up time or is optional is imported at its point of use.
HEAVY = ["argon2", "asyncpg", "cronsim", "httpx2", "joserfc", "jsonschema", "mcp", "opentelemetry",
         "prometheus_client", "psycopg", "pydantic_core", "redis", "rich", "uvicorn", "yaml"]

SQL = re.compile(r"\b(SELECT\s.*\sFROM|INSERT\s(OR\s\w+\s)?INTO|UPDATE\s\w+\sSET|DELETE\sFROM|CREATE\sTABLE)\b", re.S)
# A class in brackets keeps these patterns from finding themselves.
MACHINE_PATH = re.compile(r"(?<![\w.:}-])/(?:work|root|home|Users)[/]\w|[A-Z]:\\\\[U]sers")
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b|^[<>]{7} \w")     # with the marks of a conflict

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lengths(path: Path) -> dict[str, int]:
    """The lines of each function of a file, its docstring among them."""
    functions = (node for node in nodes(path) if isinstance(node, Function))
    return {f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
            for node in functions}


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The dotted names that import statements ask for; `from a import b` asks for `a` and `a.b`."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but the bodies of functions, and what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        if not isinstance(child, Function | ast.Lambda):
            yield from at_import(child)


def under(names: set[str], *prefixes: str) -> set[str]:
    return {name for name in names for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")}


def strings(path: Path) -> Iterator[str]:
    """Every text in the code; the holes of an f-string are closed with a word."""
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "hole" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# What counts as public: anything without an underscore that a reader of the module can reach by name.


def definitions(node: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Every public class, function and method with its dotted name; what is local to a function is not public."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
            yield within + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{within}{child.name}.")


def speaks_for_itself(node: ast.ClassDef | Function) -> bool:
    """Whether the text is at most three lines, such as an error class, or a test, whose name is the rule."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or 0) - first < 3 or node.name.startswith("test_")


def documented_methods(paths: list[Path]) -> set[str]:
    """Names of methods that some class documents: others with that name implement or override it."""
    pairs = chain.from_iterable(definitions(tree(path)) for path in paths)
    return {name.rsplit(".", 1)[1] for name, node in pairs if "." in name and ast.get_docstring(node)}


def undocumented(path: Path, overridden: set[str]) -> list[str]:
    names = []
    for name, node in definitions(tree(path)):
        override = "." in name and name.rsplit(".", 1)[1] in overridden
        if not (ast.get_docstring(node) or override or speaks_for_itself(node)):
            names.append(f"{name_of(path)}:{node.lineno} {name}")
    return names


def house() -> list[Path]:
    """All text of the house."""
    parts = (path for part in (*PARTS, "deploy", "docs", "skills", "tests") for path in (ROOT / part).rglob("*"))
    return [GATE, *(ROOT / name for name in BESIDE), *sorted(path for path in parts if path.suffix in TEXT)]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    numbered = ((path, enumerate(path.read_text(encoding="utf-8").splitlines(), 1)) for path in house())
    return [f"{name_of(path)}:{at} {line}" for path, lines in numbered for at, line in lines if pattern.search(line)]


def lines_of(room: str) -> int:
    """The lines of a room, without those of the rooms within it that have a ceiling of their own."""
    paths = [ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*")
    within = [ROOT / other for other in CEILINGS if other.startswith(f"{room}/")]
    code = [path for path in paths if path.suffix in CODE and not {"dist", "node_modules"} & {*path.parts}
            and name_of(path) not in GENERATED
            and not any(path.is_relative_to(other) for other in within)]
    return sum(path.read_text(encoding="utf-8").count("\n") for path in code)


def test_no_room_outgrows_its_ceiling() -> None:
    """Size is a goal: what a room needs more, it gives up elsewhere, or its commit says why the ceiling rises."""
    assert {room: lines_of(room) for room, ceiling in CEILINGS.items() if lines_of(room) > ceiling} == {}


def test_a_ceiling_is_lowered_when_its_room_shrinks() -> None:
    assert {room: lines_of(room) for room, ceiling in CEILINGS.items() if lines_of(room) < 0.9 * ceiling} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    sizes = [lengths(path) for path in (GATE, ROOT / "hatch_build.py", *modules(*PARTS, "tests"))]

    assert {name: size for of_file in sizes for name, size in of_file.items() if size > 60} == {}


def test_the_banners_of_the_gate_stand_in_the_promised_order() -> None:
    lines = GATE.read_text(encoding="utf-8").splitlines()

    banners = [line for line in lines if re.fullmatch(r"# [A-Z][A-Z ]+ #{3,}", line)]

    assert [line.strip("# ") for line in banners] == BANNERS
    assert {len(line) for line in banners} == {120}


def test_an_older_python_reads_the_gate_as_far_as_it_says_which_one_it_needs() -> None:
    old = ast.parse(GATE.read_text(encoding="utf-8"), feature_version=(3, 8))

    doc, future, system, check = old.body[:4]
    assert isinstance(doc, ast.Expr)
    assert isinstance(future, ast.ImportFrom)
    assert isinstance(system, ast.Import)
    assert ast.unparse(check).startswith("if sys.version_info < (3, 11):\n    sys.exit(f'AsyncGate needs Python 3.11")


def test_there_is_no_sql_in_the_gate() -> None:
    assert [text for text in strings(GATE) if SQL.search(text)] == []


def test_the_search_for_sql_finds_that_of_the_sqlite_backend() -> None:
    assert any(SQL.search(text) for text in strings(ROOT / "backends" / "sqlite.py"))


@pytest.mark.parametrize("name", ["asyncgate", "asyncgate.parts.operations", "asyncgate.commands.main"])
def test_what_every_command_imports_imports_nothing_heavy(name: str) -> None:
    ask = f"import {name}, json, sys; print(json.dumps(sorted(sys.modules)))"

    told = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "asyncgate" in json.loads(told)
    assert under(set(json.loads(told)), *HEAVY) == set()


def test_the_words_of_the_model_are_named_with_their_module() -> None:
    """`wire.CreateTask`: a reader sees where a word comes from, and thirty of them are one line of import."""
    words = re.compile(r"asyncgate\.parts\.model\.(errors|queries|stored|wire)(_\w+)?")
    by_name = [f"{name_of(path)}:{node.lineno} {node.module}" for path in modules(*PARTS)
               if name_of(path) not in GENERATED for node in tree(path).body
               if isinstance(node, ast.ImportFrom) and words.fullmatch(node.module or "")]

    assert by_name == []


def bound_by(node: ast.AST) -> str | None:
    """Return the name that a node gives to a value: a variable, an argument, an attribute, a caught error."""
    match node:
        case (ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name)
              | ast.ExceptHandler(name=name)):
            return name
    return None


def test_a_value_is_called_by_its_noun() -> None:
    """`receipt`, `rows`, `refusal`: where `one`, `found`, `said` or `no` is bound, a reader looks for what it is."""
    bound = Counter(name for path in (GATE, *modules(*PARTS, "tests")) if name_of(path) not in GENERATED
                    for node in nodes(path) if (name := bound_by(node)))

    assert {name: bound[name] for name, most in NAMELESS.items() if bound[name] > most} == {}


def test_a_script_calls_a_value_by_its_noun_too() -> None:
    word = "|".join(NAMELESS)
    bound = re.compile(rf"\b(?:const|let) (?:{word})\b|\((?:{word})(?:, \w+)?\) =>|\bfunction \w+\((?:{word})\b")
    scripts = [path for part in PRODUCT for path in (ROOT / part).rglob("*")
               if path.suffix in {".js", ".mjs", ".ts"} and not {"dist", "node_modules"} & {*path.parts}]

    assert [f"{name_of(path)}: {match[0]}" for path in scripts for match in bound.finditer(path.read_text())] == []


def test_few_files_name_a_stored_kind() -> None:
    """What is said of a kind is on its card; else only those name it that work with its rows."""
    kinds, places = {kind.__name__ for kind in stored.TABLES}, dict[str, set[str]]()
    for path in (GATE, *(path for path in modules(*PARTS) if name_of(path).split("/")[0] in PRODUCT)):
        for node in nodes(path):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            if name in kinds:
                places.setdefault(name, set()).add(name_of(path))

    assert median(map(len, places.values())) <= 10


def test_everything_public_says_what_it_is_for() -> None:
    paths = [GATE, *(path for path in modules(*PARTS) if not path.name.startswith("test_"))]
    overridden = documented_methods(paths)

    assert [path for path in paths if not ast.get_docstring(tree(path))] == []
    assert [name for path in paths for name in undocumented(path, overridden)] == []


@pytest.mark.parametrize("name", ["asyncgate.py", *PARTS])
def test_mypy_sees_the_very_files_of_the_checkout(name: str) -> None:
    """A copy in place of a link would be checked, and grow old, without anybody's notice."""
    link = ROOT / ".ci" / "typed" / "asyncgate" / ("__init__.py" if name == "asyncgate.py" else name)

    assert link.is_symlink()
    assert link.resolve() == (ROOT / name).resolve()


@pytest.mark.parametrize("pattern", [MACHINE_PATH, UNFINISHED], ids=["machine path", "unfinished"])
def test_no_file_names_a_machine_or_leaves_work_open(pattern: re.Pattern[str]) -> None:
    assert lines_with(pattern) == []


def test_the_search_for_machine_paths_and_open_work_finds_them() -> None:
    assert MACHINE_PATH.search("see " + "/".join(["", "home", "ada", "gate.db"]))
    assert UNFINISHED.search("# " + "TO" + "DO: later")
    assert UNFINISHED.search("<" * 7 + " HEAD")


@pytest.mark.parametrize("database", ["postgres", "sqlite"])
def test_the_migrations_of_a_database_are_numbered_one_by_one(database: str) -> None:
    """Two branches may each add the next one: then one of them takes the number after."""
    names = sorted(file.name for file in (ROOT / "backends" / "schema" / database).glob("*.sql"))

    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1)), names


TYPE_VARIABLE = re.compile(r"(TypeVar|TypeVarTuple|ParamSpec)\(")


def top_level_names(path: Path) -> set[str]:
    """The public names that a module defines by itself; a type variable says nothing, so it does not count."""
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign) and not TYPE_VARIABLE.match(ast.unparse(node.value)):
            names |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith("_")}


# Names that several modules bear because each answers to them.
SHARED_NAMES = {
    "log": "a module's logger",
    "main": "what `python -m` runs",
    "OPERATIONS": "the operations that a module adds to the table",
    "EXTRA": "what an extra joins to the gate, found by its folder",
    "open_peer": "how a queue of the benchmark is opened, found by its name",
    "routes": "the paths that a part of the authorization server adds",
    "BACKEND": "the class of a database, found by its module",
    "open_backend": "how a database is opened, found by the scheme of a URL",
    "open_limits": "how counters are opened, found by a setting",
    "open_sink": "how a sink is opened, found by a setting",
    "Gate": "the product's own noun: the server, the one in a user's test, and one tenant's in the suite",
}


def test_no_public_name_stands_in_three_files() -> None:
    """A reader who searches for a name finds its one home; the Python client's methods are generated from the table."""
    places: dict[str, list[str]] = {}
    for path in (GATE, *modules(*PARTS)):
        if not path.name.startswith("test_") and name_of(path) != "clients/operations.py":
            for name in top_level_names(path):
                places.setdefault(name, []).append(name_of(path))

    often = {name: paths for name, paths in places.items() if len(paths) > 2}
    assert {name: paths for name, paths in often.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() <= often.keys(), "an exception that nothing needs any more"


def test_one_place_brings_the_address_of_a_client_into_the_audit_log() -> None:
    """A batch is decided in another task: who forgot that would write lines without the client's address."""
    binding = [name_of(path) for path in modules("parts", "extras")
               if "copy_context" in path.read_text(encoding="utf-8")]

    assert binding == ["parts/identity/admin.py"]


def test_no_two_test_files_have_one_name() -> None:
    """Documents may name a test by its file alone."""
    names = [path.name for path in modules("tests") if path.name.startswith("test_")]

    assert sorted(set(names)) == sorted(names)
