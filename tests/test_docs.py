"""The documentation says what the code says: a page of README.md and docs/ is covered as soon as it is there."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, dropwhile, pairwise
from pathlib import Path
from typing import Any

import click
import pytest

import asyncgate
from asyncgate import Contract, Extension
from asyncgate.clients.http import Http
from asyncgate.commands.main import main
from asyncgate.commands.tables import make_tables, replace_tables
from asyncgate.parts.model.settings import Settings, list_settings, load_settings
from tests.support.each import Test, each
from tests.support.pages import (
    PAGES,
    ROOT,
    ROOTS,
    Block,
    anchors_of,
    blocks,
    blocks_of,
    code_of,
    commands_in,
    links_of,
    prose_of,
)
from tests.support.patience import PATIENCE_SECONDS
from tests.support.programs import FEW_PLUGINS

# What a mark above a block promises, and where it is kept: here, or in the test that is named.
MARKS = {
    "client:run": "here", "client:pytest": "here", "mcp:run": "here", "prints": "here",
    "shell:run": "here", "worker:run": "here", "worker:sh": "here", "worker:ask": "here", "third-party": "here",
    "agent:run": "test_agents.py",      # Celery: test_celery.py; FastAPI: test_fastapi.py
    "setup:run": ".ci/run", "setup:test": ".ci/run",
    "ai-worker:start": "test_worker_ai_gate.py", "ai-worker:ask": "test_worker_ai_gate.py",
    "schedule:run": "test_scheduler_command.py", "schedule:plan": "test_scheduler_command.py",
    "worker:loop": "test_docs_workers.py", "worker:shell": "test_docs_workers.py",
    "worker:node": "test_docs_workers.py", "a2a:client": "test_a2a_sdk.py",
    "moment:settings": "test_postgres_moment.py", "moment:backup": "test_postgres_moment.py",
    "moment:restore": "test_postgres_moment.py", "moment:rest": "test_postgres_moment.py",
    "moment:start": "test_postgres_moment.py",
}
# MCP tools of the ledger, whose names look like settings.
TOOLS = {"memorygate.store_receipt", "memorygate.list_receipts", "memorygate.get_receipt_chain"}
each_page = each("page", PAGES)


# How docs/receipts.md calls what a contract of receipts says.
ENDS = {"asyncgate": "gate"}
ANSWERED = {"duty": "the `task.assigned`", "accepted": "the `task.accepted`", "nothing": "–"}


def test_the_page_of_receipts_says_who_states_each_type_to_whom_and_what_it_answers() -> None:
    text = (ROOT / "docs" / "receipts.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| (\w+) → (\w+) \| ([^|]+) \|$", text, re.M)
    contracts = [member for member in vars(asyncgate).values() if isinstance(member, Contract)]

    assert sorted((type, sender, to) for type, sender, to, _ in rows) == sorted(
        (contract.type, ENDS.get(contract.sender, contract.sender), ENDS.get(contract.to, contract.to))
        for contract in contracts)
    assert [contract for contract in contracts if contract.answers != "given" and not any(
        type == contract.type and parent.startswith(ANSWERED[contract.answers]) for type, _, _, parent in rows)] == []


def each_block(*languages: str, mark: str | None = None) -> Callable[[Test], Test]:
    """Run a test for each block of some languages, or for those under a mark, which are run and so are items."""
    examples = blocks(*languages, mark=mark)
    assert examples
    if mark is None:
        return each("block", examples)
    return pytest.mark.parametrize("block", examples, ids=[block.place for block in examples])


# Pages.


@each_page
def test_a_page_is_short_and_has_one_title(page: Path) -> None:
    lines = page.read_text().splitlines()

    assert lines[0].startswith("# ")
    assert len([line for line in prose_of(page).splitlines() if line.startswith("# ")]) == 1
    # The reference has a line for each operation, error and setting.
    most = {"AGENTS.md": 150, "reference.md": 570, "README.md": 220 if page.parent == ROOT else 450}
    assert len(lines) <= most.get(page.name, 450)


@each("page", PAGES[len(ROOTS):])
def test_a_page_begins_by_saying_for_whom_it_is(page: Path) -> None:
    assert page.read_text().splitlines()[2].startswith("For ")


@each_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page

        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index)}

    assert set(PAGES) - listed - {index} == set()


def test_the_generated_tables_are_those_of_the_code() -> None:
    made, pages = make_tables(), [ROOT / "docs" / f"{name}.md" for name in ("reference", "data-map", "monitoring")]
    texts = [page.read_text() for page in pages]

    for page, text in zip(pages, texts, strict=True):
        assert replace_tables(text, made) == text, f"run: python -m asyncgate.commands.tables docs/{page.name}"
    assert {name: sum(f"<!-- {name}:begin -->" in text for text in texts) for name in made} == dict.fromkeys(made, 1)


@each_page
def test_a_setting_that_a_page_names_exists(page: Path) -> None:
    names = [setting.name for setting in list_settings(Settings)]
    sections = {name.partition(".")[0] for name in names if "." in name}
    named = {code.partition("=")[0].partition(":")[0] for code in code_of(page)}
    dotted = {name for name in named if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)} - TOOLS

    assert [name for name in dotted if name.partition(".")[0] in sections and not name.endswith(".py")
            and not any(known == name or known.startswith(f"{name}.") for known in names)] == []


def test_the_glossary_names_code_that_exists() -> None:
    """Its third column: paths of files and folders, the rest below parts/, and names that the code has."""
    folders = ("parts", "extras", "backends", "clients", "commands", "conformance", "bench")
    code = "\n".join(path.read_text() for path in (ROOT / "asyncgate.py", *(
        path for folder in folders for path in (ROOT / folder).rglob("*.py"))))
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]

    assert len(named) > 100
    for name in named:
        here = (ROOT / name).exists() or (ROOT / "parts" / name).exists()
        assert here or all(re.search(rf"\b{part}\b", code) for part in name.split(".")), name


def test_the_glossary_names_every_hook_and_who_has_it() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text().partition("\n## Hooks\n")[2].partition("\n## ")[0]
    told = {hook: set(re.findall(r"`([A-Z]\w+)`", who))
            for hook, who in re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page, re.M)}
    hooks: dict[str, set[str]] = {name: set() for name in vars(Extension) if not name.startswith("_")}
    for path in chain((ROOT / "parts").rglob("*.py"), (ROOT / "extras").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "Extension" in map(ast.unparse, node.bases):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in hooks:
                        hooks[method.name].add(node.name)

    assert told == hooks


# Blocks.


def test_every_mark_is_one_that_a_test_keeps() -> None:
    used = {block.mark for page in PAGES for block in blocks_of(page) if block.mark}

    assert used == set(MARKS)


@each_block("yaml")
def test_every_yaml_example_loads(block: Block, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(block.text)

    named = re.findall(r"\$\{(\w+)\}", block.text)
    load_settings(str(tmp_path / "config.yaml"), environ=dict.fromkeys(["ASYNCGATE_API_KEY", *named], "secret"))


@each_block("json")
def test_every_json_example_is_json(block: Block) -> None:
    json.loads(block.text)


@each_block("python")
def test_a_python_example_imports_what_exists(block: Block) -> None:
    imports = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {name.partition(".")[0] for node in imports for name in (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    if block.mark == "agent:run" and not all(map(importlib.util.find_spec, roots)):
        return      # the test that runs the program is skipped, and names the framework

    for node in imports:
        exec(compile(ast.Module([node], []), block.place, "exec"), {})


def find_command(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """Return the command that a line of ours calls, and its arguments; no command, and the word that names none."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        if name.isupper() or name == "…":
            return None, [""]
        if (subcommand := command.get_command(click.Context(command), name)) is None:
            return None, [name]
        command = subcommand
    return command, words


def wrong(words: list[str]) -> str:
    """Return the word of a command line of ours that does not exist; empty if all is well."""
    command, words = find_command(words)
    if command is None:
        return words[0]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    given = [word.partition("=")[0] for word in words[:words.index("--") if "--" in words else None]]
    flags = {option for param in command.params if getattr(param, "is_flag", False) for option in param.opts}
    valued = [value for flag, value in pairwise(given) if flag in flags and value in ("true", "false")]
    return next((word for word in given if re.match(r"--?[a-z]", word) and word not in known), next(iter(valued), ""))


def misplaced(words: list[str]) -> str:
    """Return how a command refuses its arguments before it looks at their values; empty if it does not."""
    command, words = find_command(words)
    if command is None or "…" in words:
        return ""
    try:
        command.make_context(command.name, list(words))
    except click.UsageError as refusal:
        of_a_value = isinstance(refusal, click.BadParameter) and not isinstance(refusal, click.MissingParameter)
        return "" if of_a_value else refusal.format_message()
    except click.exceptions.Exit:       # --help, --version
        return ""
    return ""


def ours(words: list[str]) -> list[str] | None:
    """Return what follows `asyncgate` in a command, if that is what it runs."""
    program, *line = [*dropwhile(lambda word: re.match(r"\w+=", word), words), ""]
    return line[:-1] if program.rpartition("/")[2] == "asyncgate" else None


@pytest.mark.parametrize(("script", "says"), [
    ("asyncgate serve --port 1", [""]), ("A=1 .venv/bin/asyncgate serv && true", ["serv"]),
    ("export K=$(asyncgate issue-key --nam x | jq -r .api_key)", ["--nam"]), ("asyncgate archive rum TASK", ["rum"]),
    ("asyncgate serve \\\n  --prot 1 # --port\nasyncgate worker -- sh --any", ["--prot", ""]),
    ("asyncgate change-webhook ID --active true", ["true"]), ("asyncgate change-webhook ID --active", [""]),
    ("docker run asyncgate", [])])
def test_a_command_line_that_does_not_exist_is_found(script: str, says: list[str]) -> None:
    assert [wrong(line) for words in commands_in(script) if (line := ours(words)) is not None] == says


@each_block("sh", "console")
def test_a_shell_example_calls_commands_and_options_that_exist(block: Block) -> None:
    script = block.text if block.language == "sh" else typed(block.text)

    for words in commands_in(script):
        if (line := ours(words)) is not None:
            assert (wrong(line), misplaced(line)) == ("", ""), " ".join(words)


@each_page
def test_a_command_that_a_page_names_exists(page: Path) -> None:
    known = {*main.list_commands(click.Context(main))} - {"new"}        # with which JavaScript begins a line, too
    for code in code_of(page):
        first = code.partition(" ")[0]
        with contextlib.suppress(ValueError):       # what is not a shell, such as a quotation
            for words in commands_in(code) if first == "asyncgate" or first in known else ():
                line = words if first in known else ours(words)
                assert not line or wrong(line) == "", code


@each_page
def test_a_module_that_a_page_runs_exists(page: Path) -> None:
    for module in re.findall(r"python3? -m (asyncgate[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module), module


# Examples that run.


@pytest.fixture
def echoing(start: Callable[..., Any]) -> Iterator[dict[str, str]]:
    """Return the surroundings of a program that finds a gate, with the worker of `asyncgate dev`."""
    surroundings = {**os.environ, "ASYNCGATE_URL": start().url, "ASYNCGATE_API_KEY": "a-token-for-tests"}
    worker = subprocess.Popen([sys.executable, "-m", "asyncgate", "worker", "echo", "--forget"], env=surroundings)
    yield surroundings
    worker.terminate()
    worker.wait()


def printed_by(block: Block) -> str:
    """Return what a page says that its example prints: the next block, under the mark `prints`."""
    following = next(other for other in blocks_of(block.page) if other.line > block.line)
    assert following.mark == "prints"
    return following.text


@each_block("python", mark="client:run")
def test_an_example_of_the_client_prints_what_its_page_says(echoing: dict[str, str], block: Block) -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", block.text], env=echoing, capture_output=True, text=True,
                         timeout=PATIENCE_SECONDS)

    assert (ran.stdout, ran.stderr) == (printed_by(block), "")


@each_block("python", mark="mcp:run")
def test_an_example_of_mcp_creates_a_task(echoing: dict[str, str], block: Block) -> None:
    program = block.text.replace("http://127.0.0.1:8080", echoing["ASYNCGATE_URL"])
    program = program.replace("YOUR-TOKEN", echoing["ASYNCGATE_API_KEY"])

    ran = subprocess.run([sys.executable, "-c", program], env=echoing, capture_output=True, text=True,
                         timeout=PATIENCE_SECONDS)

    assert ran.returncode == 0, ran.stderr
    assert "task_id" in ran.stdout


def file_of(block: Block) -> str:
    """Name a file of tests after the place of an example."""
    return re.sub(r"\W", "_", f"test_{block.place}") + ".py"


@pytest.fixture(scope="module")
def kit_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Try all examples of the testing kit in one pytest: to import it takes longer than to run them."""
    folder = tmp_path_factory.mktemp("kit")
    for block in blocks("python", mark="client:pytest"):
        (folder / file_of(block)).write_text(block.text)
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rA", "-W", "error", "-p", "no:cacheprovider", folder],
                         cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
                         env={**os.environ, **FEW_PLUGINS})
    return ran.stdout + ran.stderr


@each_block("python", mark="client:pytest")
def test_an_example_of_the_testing_kit_passes(block: Block, kit_output: str) -> None:
    assert len(re.findall(rf"^PASSED {re.escape(file_of(block))}::", kit_output, re.M)) == 1, kit_output


@pytest.fixture
def working(start: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Http]]:
    """Start a worker with a gate of its own; return a client of it."""
    with contextlib.ExitStack() as stack:
        def work(*command: str) -> Http:
            gate = stack.enter_context(Http(start().url, "a-token-for-tests"))
            around = {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": gate.token,
                      "XDG_STATE_HOME": str(tmp_path)}
            worker = stack.enter_context(subprocess.Popen([sys.executable, *command], env=around))
            stack.callback(worker.kill)
            return gate
        yield work


@each_block("python", mark="worker:run")
def test_a_worker_does_what_its_mark_says(working: Callable[..., Http], block: Block) -> None:
    says = json.loads(block.more)
    gate = working("-W", "error", "-c", block.text)

    done = gate.call("run_task", **says["task"])

    assert (done["status"], done["result"]["result"]) == ("succeeded", says["result"])


@each_block("python", mark="worker:ask")
def test_a_worker_goes_on_when_its_question_is_answered(working: Callable[..., Http], block: Block) -> None:
    gate = working("-W", "error", "-c", block.text)
    boss = {"principal_kind": "human", "principal_id": "boss"}

    made = gate.call("create_task", type=block.more, payload=7)
    while not (asked := gate.call("list_open_obligations", **boss)["open_obligations"]):
        gate.call("get_task", task_id=made["task_id"], wait_seconds=1)
    gate.call("answer_input", **boss, task_id=made["task_id"], key=asked[0]["body"]["key"], action="accept",
              content={"window": "tonight"})
    done = gate.call("get_task", task_id=made["task_id"], wait_seconds=30)

    assert (done["status"], done["result"]["result"]) == ("succeeded", "version 7 is deployed tonight")


@each_block("sh", mark="worker:sh")
def test_the_program_of_the_workers_page_counts_words(
        working: Callable[..., Http], block: Block, tmp_path: Path) -> None:
    (tmp_path / "count.sh").write_text(block.text)
    (tmp_path / "count.sh").chmod(0o755)
    gate = working("-m", "asyncgate", "worker", "--type", "words.count", "--", str(tmp_path / "count.sh"))

    done = gate.call("run_task", type="words.count", payload="to be or not to be")

    assert (done["status"], done["result"]["result"]) == ("succeeded", 6)
    assert done["progress"] in (None, {"doing": "counting"})


# What stands for `asyncgate` while a page's commands run: a server is started behind them, and found where it says.
SHELL = """
asyncgate() {
  case $1 in
    serve | dev)
      exec 9< <(exec "$PYTHON" -m asyncgate "$@" --port 0 2>&1)
      while read -r line <&9; do
        case $line in *http://*) ASYNCGATE_URL=http://${line##*http://} && export ASYNCGATE_URL && return ;; esac
      done
      return 1 ;;
    *) "$PYTHON" -m asyncgate "$@" ;;
  esac
}
"""
SERVING = "export ASYNCGATE_API_KEY=a-token-for-tests; asyncgate serve --database sqlite:///gate.db\n"
RUNS = [page for page in PAGES if any(block.mark == "shell:run" for block in blocks_of(page))]


@pytest.mark.parametrize("page", RUNS, ids=[page.name for page in RUNS])
def test_the_commands_of_a_page_run_one_after_another(page: Path, tmp_path: Path) -> None:
    """Those under the mark `shell:run`, in one shell; of a console what is typed.

    Where the first mark says `beside gate.db`, a gate serves that file.
    """
    if not shutil.which("jq"):
        pytest.skip("jq is not installed: the commands of the documentation do not run")
    marked = [block for block in blocks_of(page) if block.mark == "shell:run"]
    lines = "\n".join(block.text if block.language == "sh" else typed(block.text) for block in marked)
    around = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCGATE_")}
    around |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    begun = SERVING if marked[0].more == "beside gate.db" else ""
    shell = subprocess.Popen(["bash", "-euo", "pipefail", "-c", SHELL + begun + lines], cwd=tmp_path, env=around,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = shell.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)

    assert shell.returncode == 0, output


def typed(console: str) -> str:
    """Return what somebody types in a console."""
    return "\n".join(re.findall(r"^\$ (.*)$", console, re.M))


def test_the_worker_of_the_readme_has_ten_lines() -> None:
    [worker] = [block for block in blocks("python", mark="worker:run") if block.page.name == "README.md"
                and block.page.parent == ROOT]

    assert len([line for line in worker.text.splitlines() if line]) <= 10


def test_the_backend_of_the_documentation_is_the_one_that_the_suite_runs_against() -> None:
    [shown] = blocks("python", mark="third-party")
    [kept] = (ROOT / "tests").rglob("third_party_backend.py")

    assert shown.text == kept.read_text()
