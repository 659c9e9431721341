"""The skill that teaches agents to use the gate: what it names is there, what it shows runs, and it installs itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from asyncgate.commands.main import main
from asyncgate.parts.model import errors
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.jsonrpc import spell_tool_name
from asyncgate.parts.operations import OPERATIONS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "skills" / "asyncgate" / "SKILL.md"
TEXT = FILE.read_text()
_, FRONT, BODY = TEXT.split("---\n", 2)
CODES = {kind.code: kind.status for kind in vars(errors).values()
         if isinstance(kind, type) and issubclass(kind, GateError)}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["skill", *arguments], prog_name="asyncgate")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", BODY, re.S | re.M)


def quoted() -> set[str]:
    """Everything between single backquotes outside of the examples."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", BODY, flags=re.S | re.M)))


def command_lines() -> Iterator[list[str]]:
    """Every command line that is shown, in the examples and in the text."""
    shown = [line for example in examples("sh") for line in example.splitlines()]
    for line in [*shown,
                 *(command for command in quoted() if command.startswith("asyncgate ") and "COMMAND" not in command)]:
        yield shlex.split(line, comments=True)


def members(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Name the members of a request or a reply, and those of what it holds."""
    info = msgspec.inspect.type_info(kind)
    pending = [info]
    while pending:
        type_ = pending.pop()
        if isinstance(type_, msgspec.inspect.StructType) and type_.cls not in seen:
            seen.add(type_.cls)
            yield from (field.encode_name for field in type_.fields)
            pending += [field.type for field in type_.fields]
        pending += [inner for name in ("type", "item_type", "value_type") if (inner := getattr(type_, name, None))]
        pending += list(getattr(type_, "types", ()))


def known_names() -> set[str]:
    """Name every operation, every member of a request or a reply, and every code."""
    seen: set[Any] = set()
    fields = {name for op in OPERATIONS.values() for kind in (op.takes, op.gives) for name in members(kind, seen)}
    return {*OPERATIONS, *fields, *CODES, "renew_every_seconds"}


def test_it_has_the_form_that_agents_read() -> None:
    front = yaml.safe_load(FRONT)

    assert front["name"] == FILE.parent.name == "asyncgate"
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert 200 < len(front["description"]) <= 1024
    assert len(front["compatibility"]) <= 500
    assert front.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert len(TEXT.splitlines()) < 500


def test_every_name_in_it_is_one_of_the_gate() -> None:
    names = {part for text in quoted() for part in re.findall(r"(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/-])", text)}

    assert len(names) > 40
    assert names - known_names() - {spell_tool_name(name)[1] for name in OPERATIONS} == set()


def test_every_tool_in_it_is_one_of_the_gate() -> None:
    tools = {name for name in quoted() if re.match(r"asyncgate[._](?!clients)\w+$", name)}

    assert len(tools) == 2
    assert tools <= {name for operation in OPERATIONS for name in spell_tool_name(operation)}


def test_every_operation_of_agents_and_workers_that_matters_is_told() -> None:
    told = quoted()

    assert {"list_open_obligations", "create_task", "create_tasks", "run_task", "get_task", "attach_artifacts",
            "cancel_task", "lease_next", "renew_lease", "report_progress", "complete", "fail", "release_lease",
            "list_leases", "whoami"} <= told


def test_an_agent_or_a_worker_may_call_what_it_tells_them_to_call() -> None:
    told = [OPERATIONS[name] for name in quoted() & OPERATIONS.keys()]

    assert {op.name for op in told if not {"agent", "worker"} & {*op.roles}} == {"get_limits"}  # of admins, it says


def test_every_command_line_in_it_is_understood() -> None:
    lines = list(command_lines())

    assert len(lines) > 10
    for program, name, *arguments in lines:
        assert program == "asyncgate"
        with click.Context(main) as group:
            command = main.get_command(group, name)
            assert command, name
            command.make_context(name, arguments, parent=group)


def test_the_table_of_refusals_has_the_codes_and_statuses_of_the_gate() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", BODY, re.M))

    assert len(rows) > 10
    assert {code: CODES.get(code) for code in rows} == {code: int(status) for code, status in rows.items()}


@pytest.mark.parametrize(("at", "name"), [(0, "create_task"), (1, "attach_artifacts"), (2, "complete")])
def test_every_request_in_it_is_one_that_the_gate_reads(at: int, name: str) -> None:
    shown = examples("json")[at]

    request = msgspec.json.decode(shown, type=OPERATIONS[name].takes)

    assert json.loads(shown).keys() <= {field.encode_name for field in msgspec.structs.fields(request)}
    assert len(examples("json")) == 3


def test_its_python_example_prints_the_result(start: Callable[..., Any]) -> None:
    [example] = examples("python")
    around = {**os.environ, "ASYNCGATE_URL": start().url, "ASYNCGATE_API_KEY": "a-token-for-tests"}
    worker = subprocess.Popen([sys.executable, "-m", "asyncgate", "worker", "echo", "--forget"], env=around)
    try:
        ran = subprocess.run([sys.executable, "-W", "error", "-c", example], env=around, capture_output=True, text=True)
    finally:
        worker.terminate()
        worker.wait()

    assert (ran.stdout, ran.stderr) == ("{'page': 3}\n", "")


# Installing it.


def test_it_is_printed_as_it_is() -> None:
    assert run().stdout == TEXT


@pytest.mark.parametrize(("arguments", "place"), [
    ((), "project/.claude/skills"), (("--user",), "home/.claude/skills"),
    (("--dir", ".agents/skills"), "project/.agents/skills")])
def test_it_is_installed_where_agents_look(
    arguments: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    first, again = run("--install", *arguments), run("--install", *arguments)

    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / place / "asyncgate" / "SKILL.md"]
    assert (tmp_path / place / "asyncgate" / "SKILL.md").read_text() == TEXT
    assert "is up to date" in again.stdout


def test_a_skill_that_somebody_has_changed_is_overwritten_only_by_force(tmp_path: Path) -> None:
    file = tmp_path / "asyncgate" / "SKILL.md"
    file.parent.mkdir()
    file.write_text("mine")

    refused = run("--install", "--dir", str(tmp_path))
    kept = file.read_text()
    forced = run("--install", "--dir", str(tmp_path), "--force")

    assert (refused.exit_code, kept) == (5, "mine")
    assert "--force overwrites it" in refused.stderr
    assert (forced.exit_code, file.read_text()) == (0, TEXT)


@pytest.mark.parametrize("arguments", [
    ("--user",), ("--force",), ("--dir", "."), ("--install", "--user", "--dir", ".")])
def test_options_that_say_nothing_or_two_things_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    told = run("--install", "--dir", str(tmp_path / "file" / "below"))

    assert told.exit_code == 1
    assert "cannot write" in told.stderr
