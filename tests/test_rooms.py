"""The rooms of the house and the arrows between them: every import points one way, also one in a function or a text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from tests.support.source import nodes, tree

ROOT = Path(__file__).parents[1]

# From the bottom to the top; a room knows those that are named, and itself.
BELOW = ("model", "process", "heart")
PARTS = (*BELOW, "identity", "receipts", "operating", "faces", "metrics", "backends", "joint", "app")
KNOWS = {
    "model": (),
    "process": ("model",),
    "heart": ("model", "process"),
    "backends": BELOW,
    "identity": BELOW,
    "receipts": (*BELOW, "identity"),
    "operating": (*BELOW, "identity"),
    "joint": (*BELOW, "identity", "faces", "metrics", "extras"),     # how an extra joins
    "extras": (),
    "faces": BELOW,
    "metrics": (*BELOW, "identity", "faces"),
    "app": PARTS,
    "clients": ("model", "process"),
    "conformance": (*PARTS, "clients"),
    "commands": (*PARTS, "clients", "conformance"),
    "bench": (*PARTS, "clients", "conformance", "commands"),
}
# What each extra knows of the core; none is known by it.
EXTRAS = {
    "agents": ("model", "process", "clients"),
    "a2a": (*BELOW, "faces", "joint", "webhooks"),
    "a2a_worker": ("model", "process", "clients", "a2a"),
    "ai_worker": ("model", "process", "clients"),
    "asking": (*BELOW, "clients", "commands", "joint", "metrics"),
    "celery": ("model", "process", "clients"),
    "console": (*BELOW, "faces", "joint"),
    "doctor": (*PARTS, "clients", "commands", "ledger"),
    "limits": (*BELOW, "identity", "operating", "commands", "clients", "joint", "metrics"),
    "families": (*BELOW, "joint"),
    "journal": (*BELOW, "identity", "joint"),
    "ledger": (*PARTS, "commands"),
    "oauth": (*BELOW, "identity", "joint"),
    "payloads": ("model", "clients", "commands", "joint"),
    "outbox": (*BELOW, "clients", "commands", "joint", "metrics"),
    "output": (*BELOW, "operating", "faces", "joint"),
    "privacy": (*BELOW, "identity", "receipts", "joint"),
    "scheduler": ("model", "process", "clients", "commands", "joint"),
    "starvation": (*BELOW, "operating", "joint"),
    "types": (*BELOW, "identity", "operating", "faces", "joint"),
    "unique": (*BELOW, "identity", "operating", "joint"),
    "webhooks": (*BELOW, "identity", "joint"),
}
KNOWS |= EXTRAS
# The one command that does more where an extra is installed, and says so where it is not.
MORE_WITH_AN_EXTRA = {("asyncgate.commands.cli", f"asyncgate.extras.{extra}.command")
                      for extra in ("ai_worker", "a2a_worker")}
# What a client says and hears: made of the whole table of operations, so it names the words of extras, too.
OF_EVERY_OPERATION = "asyncgate.clients.operations"
# The contract of a database is named by whoever is given one; a type costs no import.
CONTRACT = "asyncgate.backends"
# A user's tests get a gate in their own process: that one client opens what it talks to.
OPENS_A_GATE = "asyncgate.clients.testing"
# The command runs what measures more than a gate, where the source is: the wheel does not have it.
RUNS_THE_BENCH = "asyncgate.commands.bench."
# What lies above the heart and is public: `asyncgate.Gate` imports it when somebody asks.
PUBLIC = {"clients", "commands", "app"}


def files() -> dict[str, Path]:
    """Every module of the package, by its name."""
    paths = {"asyncgate": ROOT / "asyncgate.py"}
    for folder in ("parts", "backends", "clients", "commands", "conformance", "bench", "extras"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            paths[f"asyncgate.{name}"] = path
    return paths


MODULES = files()


def room(module: str) -> str:
    """Where a module lives; what stands in parts/ itself joins the rooms, and is the app."""
    if module == "asyncgate":
        return "heart"
    _, first, *rest = module.split(".")
    if first == "extras" and rest:
        return rest[0]
    if module == "asyncgate.parts.extras":
        return "joint"
    if first != "parts":
        return first
    return rest[0] if rest and rest[0] in KNOWS else "app"


Kind = Literal["at import", "types", "in a function"]


@cache
def imports(module: str) -> list[tuple[str, Kind]]:
    """What a module imports, and when."""
    return list(walk(tree(MODULES[module]), "at import"))


def walk(node: ast.AST, kind: Kind) -> Iterator[tuple[str, Kind]]:
    for child in ast.iter_child_nodes(node):
        yield from ((name, kind_of(child, kind)) for name in named(child) if name in MODULES)
        yield from walk(child, kind_of(child, kind))


def kind_of(node: ast.AST, kind: Kind) -> Kind:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return "types"
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    return "in a function" if inside and kind == "at import" else kind


def named(node: ast.AST) -> list[str]:
    """The modules that one statement or text names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [module if module in MODULES else node.module for module in inner]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "asyncgate":
        return [node.value.rstrip(".")]
    return []


def arrows() -> set[tuple[str, str]]:
    """Who imports whom, the contract of a database left out where it is a type."""
    return {(module, name) for module in MODULES for name, kind in imports(module)
            if name != module and (kind, name) != ("types", CONTRACT)}


def allowed(module: str, name: str) -> bool:
    here, there = room(module), room(name)
    if (module, name) in MORE_WITH_AN_EXTRA:
        return True
    if there in EXTRAS and (here == "conformance" or module == OF_EVERY_OPERATION):
        return True
    return here == there or there in KNOWS[here] or module == OPENS_A_GATE or (
        module == "asyncgate" and there in PUBLIC) or (there == "bench" and module.startswith(RUNS_THE_BENCH))


def test_no_import_points_against_the_order_of_the_rooms() -> None:
    assert sorted(f"{module} -> {name}" for module, name in arrows() if not allowed(module, name)) == []


def test_the_heart_imports_what_lies_above_it_only_for_its_public_names() -> None:
    above = {name for name, kind in imports("asyncgate") if kind == "at import" and room(name) not in KNOWS["heart"]}

    assert above == {"asyncgate.commands.main"}     # of `python asyncgate.py`


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert [(room, other) for room in KNOWS for other in KNOWS[room] if room != other and room in KNOWS[other]] == []


def test_the_search_for_imports_sees_those_in_functions_and_in_texts() -> None:
    told = ast.parse("def f():\n    from asyncgate.backends import sqlite\n    g('asyncgate.parts.app')")

    assert set(walk(told, "at import")) == {
        ("asyncgate.backends.sqlite", "in a function"), ("asyncgate.parts.app", "in a function")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """At import; what a function imports has its reason there, and only the heart's users know the heart."""
    below = {module: {name for name, kind in imports(module) if kind == "at import" and name != module}
             for module in MODULES if module != "asyncgate"}

    assert circle(below) == []


def circle(below: dict[str, set[str]]) -> list[str]:
    """The modules that are left when those that know no other one are taken away, again and again."""
    left = {module: set(names) for module, names in below.items()}
    while done := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in done}
    return sorted(left)


def test_no_import_takes_everything() -> None:
    stars = [module for module, path in MODULES.items() for node in nodes(path)
             if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]

    assert stars == []


# Why each of these is needed: a name of the package that is imported on demand (heart, clients), a database by the
# scheme of its URL, commands by their names, sinks and limits by a setting, extras by
# their folders.
BY_NAME = 9


def test_few_modules_are_imported_by_their_name() -> None:
    calls = [f"{module}:{node.lineno}" for module, path in MODULES.items()
             for node in nodes(path)
             if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")]

    assert len(calls) <= BY_NAME, calls
