"""The command line as its users meet it: one command per operation, against a real server process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncgate import OPERATIONS, main
from asyncgate.clients.cli import plain

KEY = "a-key-for-the-tests"
PATIENCE_SECONDS = 30.0
GATE = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())"]
ROOT = Path(__file__).parents[1]

Run = Callable[..., Result]


def clean(**more: str) -> dict[str, str]:
    """The environment without settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCGATE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def served(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Wait until the log names the address."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while " serves " not in (text := log.read_text()) or "\n" not in text.split(" serves ")[1]:
        assert server.poll() is None, text
        assert time.monotonic() < deadline, text
    return text.split(" serves ")[1].split()[0]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('gate') / 'gate.db'}"


@pytest.fixture(scope="module")
def url(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [*GATE, "serve", "--port", "0", "--database", database]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=clean(ASYNCGATE_API_KEY=KEY)) as server:
        try:
            yield served(log, server)
        finally:
            server.terminate()
            assert server.wait(PATIENCE_SECONDS) == 0


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, with the gate and its credential in the environment."""
    monkeypatch.setenv("ASYNCGATE_URL", url)
    monkeypatch.setenv("ASYNCGATE_API_KEY", KEY)

    def invoke(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(main, arguments, input=stdin, prog_name="asyncgate")

    return invoke


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """A type of task that belongs to one test alone."""
    return str(request.node.name)


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def created(run: Run, kind: str, *more: str) -> str:
    return str(answer(run("create-task", "--type", kind, "--json", *more))["task_id"])


def leased(run: Run, kind: str) -> tuple[str, str]:
    [offer] = answer(run("lease-next", "--worker-id", "w1", "--accept-types", kind, "--json"))["tasks"]
    return offer["task_id"], offer["lease_id"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_command_whose_help_tells_all_its_fields(name: str) -> None:
    op = OPERATIONS[name]

    told = CliRunner().invoke(main, [name.replace("_", "-"), "--help"])

    assert told.exit_code == 0
    assert " ".join(op.summary.split()) in " ".join(told.output.split())
    argument, options = op.takes.needed[:1], set(op.takes.__struct_fields__) - set(op.takes.needed[:1])
    assert [field for field in argument if field.upper() not in told.output] == []
    assert [field for field in options if "--" + field.replace("_", "-") not in told.output] == []


def test_an_operation_answers_to_its_name_with_underscores(run: Run, kind: str) -> None:
    assert answer(run("create_task", "--type", kind, "--json"))["status"] == "queued"


def test_the_help_shows_the_commands_in_sections() -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.splitlines()

    titles = [line.partition(" (")[0].rstrip(":") for line in lines if line[:1].strip() and line.endswith(":")]
    assert titles == ["Options", "Try it", "Run a gate", "Work for one", "Look after it", "Operations"]
    listed = {line.split()[0] for line in lines if line.startswith("  ") and line.strip()}
    assert {name.replace("_", "-") for name in OPERATIONS} | {"dev", "demo", "verify", "backup"} <= listed


def test_a_task_goes_from_creation_to_its_result(run: Run, kind: str) -> None:
    task_id = created(run, kind, "--payload", '{"n": 1}', "--priority", "7", "--result-delivery", "inline")
    offered = leased(run, kind)

    ended = run("complete", task_id, "--lease-id", offered[1], "--worker-id", "w1", "--result", '{"m": 2}')
    task = answer(run("get-task", task_id, "--json"))

    assert offered[0] == task_id
    assert ended.exit_code == 0, ended.output
    assert (task["status"], task["payload"], task["priority"]) == ("succeeded", {"n": 1}, 7)
    assert task["result"]["result"] == {"m": 2}


def test_json_goes_to_the_gate_as_it_was_written(run: Run, kind: str) -> None:
    written = '{"b": 1.50, "a": 123456789012345678901234567890}'

    task_id = created(run, kind, "--payload", written)

    assert f'"payload":{written}' in run("get-task", task_id, "--json").stdout


def test_json_comes_from_a_file_or_from_standard_input(run: Run, kind: str, tmp_path: Path) -> None:
    (tmp_path / "payload.json").write_text('{"from": "file"}')

    of_file = created(run, kind, "--payload", f"@{tmp_path / 'payload.json'}")
    piped = run("create-task", "--type", kind, "--payload", "-", "--json", stdin='{"from": "pipe"}')

    assert answer(run("get-task", of_file, "--json"))["payload"] == {"from": "file"}
    assert answer(run("get-task", answer(piped)["task_id"], "--json"))["payload"] == {"from": "pipe"}


def test_options_win_over_the_members_of_data(run: Run, kind: str) -> None:
    whole = json.dumps({"type": kind, "priority": 1, "payload": [1], "task_summary": "kept"})

    task_id = answer(run("create-task", "--data", "-", "--priority", "2", "--json", stdin=whole))["task_id"]

    task = answer(run("get-task", task_id, "--json"))
    assert (task["type"], task["priority"], task["payload"], task["task_summary"]) == (kind, 2, [1], "kept")


def test_data_also_fills_a_query_and_a_path(run: Run, kind: str) -> None:
    task_id = created(run, kind)

    listed = answer(run("list-tasks", "--data", json.dumps({"type": kind, "limit": 1}), "--json"))
    read = answer(run("get-task", "--data", json.dumps({"task_id": task_id}), "--json"))

    assert [task["task_id"] for task in listed["tasks"]] == [task_id]
    assert read["task_id"] == task_id


def test_a_list_is_given_by_repeating_its_option(run: Run, kind: str) -> None:
    task_id = created(run, kind, "--requirements", '{"capabilities": ["gpu", "ocr"]}')
    claim = ["lease-next", "--worker-id", "w1", "--accept-types", kind, "--json"]

    too_little = answer(run(*claim, "--capabilities", "gpu"))
    enough = answer(run(*claim, "--capabilities", "gpu", "--capabilities", "ocr"))

    assert too_little["tasks"] == []
    assert [offer["task_id"] for offer in enough["tasks"]] == [task_id]


def test_a_bool_has_an_option_for_each_answer(run: Run, kind: str) -> None:
    again, never = created(run, kind, "--priority", "1"), created(run, kind)

    states = []
    for task_id, answer_ in ((again, "--retryable"), (never, "--no-retryable")):
        held, lease_id = leased(run, kind)
        assert held == task_id
        failing = run("fail", task_id, "--lease-id", lease_id, "--worker-id", "w1", answer_, "--json")
        states.append(answer(failing)["status"])

    assert states == ["queued", "failed"]


def test_a_list_is_a_table_with_whole_ids_and_a_hint_for_the_next_page(run: Run, kind: str) -> None:
    older, newer = created(run, kind), created(run, kind)

    page = run("list-tasks", "--type", kind, "--limit", "1")
    cursor = page.stderr.split("--cursor ")[1].strip()
    rest = run("list-tasks", "--type", kind, "--limit", "1", "--cursor", cursor)

    head, row = page.stdout.splitlines()
    assert head.split()[:4] == ["TASK_ID", "TYPE", "STATUS", "PRIORITY"]
    assert row.split()[:3] == [newer, kind, "queued"]
    assert rest.stdout.splitlines()[1].split()[0] == older
    assert rest.stderr == ""


def test_a_list_says_what_to_go_on_from_after_its_last_page(run: Run, kind: str) -> None:
    task_id = created(run, kind)
    history = run("get-task-history", task_id)

    cursor = history.stderr.split("from here on: --cursor ")[1].strip()
    leased(run, kind)

    assert [line.split()[1] for line in run("get-task-history", task_id, "--cursor", cursor).stdout.splitlines()] == [
        "EVENT_TYPE", "task.accepted"]


def test_capabilities_are_named_with_commas_or_by_repeating_the_option(run: Run, kind: str) -> None:
    task_id = created(run, kind, "--requirements", '{"capabilities": ["ocr", "gpu"]}')

    for given in (["--capabilities", "ocr, gpu"], ["--capabilities", "ocr", "--capabilities", "gpu"]):
        offers = answer(run("lease-next", "--worker-id", "w1", "--accept-types", kind, *given, "--json"))["tasks"]
        assert [offer["task_id"] for offer in offers] == [task_id]
        run("release-lease", task_id, "--lease-id", offers[0]["lease_id"], "--worker-id", "w1")


def test_a_tenant_stands_as_an_argument_or_behind_its_option(run: Run, kind: str) -> None:
    made = answer(run("create-tenant", "--name", kind, "--json"))["tenant"]

    for place in ([kind], ["--tenant", kind], [made], ["--tenant", made]):
        assert answer(run("set-limits", *place, "--tier", "paid", "--json"))["tenant"] == made
        assert answer(run("get-limits", *place, "--json"))["tier"] == "paid"


def test_an_empty_list_says_so(run: Run, kind: str) -> None:
    assert run("list-tasks", "--type", kind).stdout == "nothing\n"


def test_a_history_is_a_table_of_events_and_receipts(run: Run, kind: str) -> None:
    task_id = created(run, kind)
    leased(run, kind)

    lines = run("get-task-history", task_id).stdout.splitlines()

    assert [line.split()[1] for line in lines] == ["EVENT_TYPE", "task.assigned", "task.accepted"]
    assert "worker w1" in lines[2]


def test_a_single_thing_is_names_and_values_with_long_json_cut(run: Run, kind: str) -> None:
    task_id = created(run, kind, "--payload", json.dumps({"x": "x" * 1000}))

    told = dict(line.split(maxsplit=1) for line in run("get-task", task_id).stdout.splitlines())

    assert told["task_id"] == task_id
    assert told["payload"].startswith('{"x":"xxx')
    assert told["payload"].endswith("x…")
    assert "result" not in told     # null


def test_what_others_wrote_cannot_move_the_cursor_or_turn_text(run: Run, kind: str) -> None:
    evil = "a\x1b[2Jb\u202ec\x9bd\ne"
    task_id = created(run, kind, "--task-summary", evil)

    told = run("get-task", task_id).stdout

    assert "a\\x1b[2Jb\\u202ec\\x9bd\\ne" in told
    assert plain(evil) in told


@pytest.mark.parametrize(("arguments", "status", "word"), [
    (["get-task", "nope"], 4, "task_not_found (404)"),
    (["get-task"], 2, "get_task needs TASK_ID"),
    (["create-task"], 2, "create_task needs --type"),
    (["complete", "t"], 2, "complete needs --lease-id"),
    (["create-task", "--type", "t", "--max-attempts", "0"], 2, "invalid_request (400)"),
    (["create-task", "--type", "t", "--priority", "high"], 2, "'--priority': 'high' is not a valid integer"),
    (["create-task", "--type", "t", "--payload", "{no"], 2, "'--payload': this is not JSON"),
    (["create-task", "--type", "t", "--payload", "hello"], 2, "a text needs its quotes"),
    (["create-task", "--type", "t", "--payload", "@no-such-file"], 2, "'no-such-file' cannot be read: No such file"),
    (["create-task", "--type", "t", "--payload", "-"], 2, "'--payload': this is not JSON"),
    (["create-task", "--data", "[1]"], 2, "'--data': it must be a JSON object"),
    (["create-task", "--data", '{"typo": 1}'], 2, "create_task has no field 'typo'"),
    (["list-tasks", "--status", "done"], 2, "'--status': 'done' is not one of"),
    (["list-tasks", "--cursor", "made-up"], 2, "invalid_cursor (400)"),
    (["list-tasks", "--tenant-id", "other"], 3, "tenant_mismatch (403)"),
    (["list-tasks", "--token", "wrong"], 3, "unauthenticated (401)"),
    (["list-tasks", "--url", "gate:8080"], 2, "a gate's URL is like http://127.0.0.1:8080"),
    (["no-such-command"], 2, "No such command 'no-such-command'"),
])
def test_a_refusal_says_why_and_its_class_is_the_exit_status(
    run: Run, arguments: list[str], status: int, word: str
) -> None:
    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (status, "")
    assert word in " ".join(result.stderr.split())


def test_a_conflict_is_5(run: Run, kind: str) -> None:
    task_id = created(run, kind)

    result = run("complete", task_id, "--lease-id", "not-mine", "--worker-id", "w1")

    assert result.exit_code == 5
    assert "lease_invalid_or_expired (409)" in result.stderr


def test_no_gate_is_7_and_the_line_says_how_to_start_one(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"

    result = run("list-tasks", "--url", nobody)

    assert result.exit_code == 7
    assert result.stderr == f"Error: no gate answers at {nobody}; start one with `asyncgate dev`\n"


def test_the_program_itself_ends_with_that_status(url: str) -> None:
    asked = [*GATE, "get-task", "nope", "--url", url, "--token", KEY]

    done = subprocess.run(asked, env=clean(), capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("Error: task_not_found (404): ")


def test_verify_checks_the_database_of_a_running_gate(run: Run, kind: str, database: str) -> None:
    created(run, kind)

    result = run("verify", "--database", database)

    assert result.exit_code == 0, result.output
    assert "obligations: " in result.stdout
    assert result.stdout.endswith(": sound\n")


def test_verify_makes_no_database_where_there_is_none(run: Run, tmp_path: Path) -> None:
    result = run("verify", "--database", f"sqlite:///{tmp_path / 'none.db'}")

    assert result.exit_code == 1
    assert "there is no database at" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_backup_copies_a_running_gate_and_the_copy_is_whole(
    run: Run, kind: str, database: str, tmp_path: Path
) -> None:
    task_id, target = created(run, kind), tmp_path / "copy.db"

    result = run("backup", "--database", database, str(target))

    assert result.exit_code == 0, result.output
    assert f"{target} ({target.stat().st_size:,} bytes): sound" in result.stdout
    assert task_id.encode() in target.read_bytes()
    assert (list(tmp_path.iterdir()), target.stat().st_mode & 0o777) == ([target], 0o600)
    assert run("verify", "--database", f"sqlite:///{target}").exit_code == 0


def test_backup_overwrites_nothing_and_leaves_nothing_behind(run: Run, database: str, tmp_path: Path) -> None:
    (target := tmp_path / "copy.db").write_text("precious")

    taken = run("backup", "--database", database, str(target))
    nowhere = run("backup", "--database", database, str(tmp_path / "no" / "folder.db"))

    assert (taken.exit_code, nowhere.exit_code) == (1, 1)
    assert "is there already" in taken.stderr
    assert "cannot write" in nowhere.stderr
    assert target.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [target]


def test_a_backend_that_makes_no_copies_says_so(run: Run, tmp_path: Path) -> None:
    result = run("backup", "--database", "memory://", str(tmp_path / "copy.db"))

    assert result.exit_code == 1
    assert "makes no copies" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_conformance_hands_what_stands_behind_the_dashes_to_pytest() -> None:
    done = subprocess.run([*GATE, "conformance", "--", "--version"], env=clean(), capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout.startswith("pytest ")
