"""The command line as its users meet it: one command per operation, against a real server process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from asyncgate.clients.http import Refusal
from asyncgate.commands.calling import exit_on_refusal
from asyncgate.commands.main import main
from asyncgate.commands.new_file import hold_target
from asyncgate.commands.terminal import escape_text
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

KEY = "a-key-for-the-tests"
GATE = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())"]
ROOT = Path(__file__).parents[2]

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
    return str(answer(run("create-task", "--type", kind, "--payload", "null", "--json", *more))["task_id"])


def created_together(run: Run, kind: str, count: int) -> list[str]:
    """Create tasks in one call: their ids begin alike, as no others do.

    Between two calls the clock may carry, and then their ids share only what many others begin with.
    """
    tasks = json.dumps([{"type": kind, "payload": None}] * count)
    return [entry["task_id"] for entry in answer(run("create-tasks", "--tasks", tasks, "--json"))["results"]]


def shared_beginning(ids: list[str]) -> str:
    beginnings = (ids[0][:length] for length in range(len(ids[0]), 0, -1))
    return next(beginning for beginning in beginnings if all(id.startswith(beginning) for id in ids))


def leased(run: Run, kind: str) -> tuple[str, str]:
    [offer] = answer(run("lease-next", "--worker-id", "w1", "--accept-types", kind, "--json"))["tasks"]
    return offer["task_id"], offer["lease_id"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["docs", "list-tasks", "no-such-command"])
def test_a_standard_stream_that_is_closed_leads_nowhere(command: str, closed: str) -> None:
    program, environment = f'"$0" -m asyncgate {command}', clean(ASYNCGATE_URL="http://127.0.0.1:1")
    whole, cut = (subprocess.run(["sh", "-c", f"{program} {streams}", sys.executable], env=environment, text=True,
                                 stdin=subprocess.DEVNULL, capture_output=True) for streams in ("", closed))

    assert cut.returncode == whole.returncode
    assert cut.stdout == ("" if ">&-" in closed.split() else whole.stdout)
    assert cut.stderr == ("" if "2>&-" in closed else whole.stderr)


@each("name", OPERATIONS)
def test_every_operation_has_a_command_whose_help_tells_all_its_fields(name: str) -> None:
    op = OPERATIONS[name]

    told = CliRunner().invoke(main, [name.replace("_", "-"), "--help"])

    assert told.exit_code == 0
    assert " ".join(remove_clause_numbers(op.summary).split()) in " ".join(told.output.split())
    argument, options = op.takes.needed[:1], set(op.takes.__struct_fields__) - set(op.takes.needed[:1])
    assert [field for field in argument if field.upper() not in told.output] == []
    assert [field for field in options if "--" + field.replace("_", "-") not in told.output] == []


def list_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, those of groups included."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from list_commands(command, (*path, name))


def test_no_help_has_a_clause_number_of_the_specification() -> None:
    """Who asks for help does not have the specification."""
    told = {words: CliRunner().invoke(main, [*words, "--help"]).output for words in [(), *list_commands(main)]}

    assert len(told) > len(OPERATIONS)
    assert {" ".join(words): clauses for words, text in told.items() if (
        clauses := re.findall(r"\b(?:PH|H)\.\d\S*|[Ss]pec \d\S*|\(\d[\d.]*[,)]", text))} == {}


@pytest.mark.parametrize(("name", "fields"), [
    ("erase-principal", {"principal-id", "principal-kind"}), ("export-principal", {"principal-id", "principal-kind"}),
    ("issue-key", {"principal-id", "principal-kind", "principal-instance-id"}),
    ("make-sign-in-link", {"principal-id", "principal-kind"}), ("create-task", set()), ("list-tasks", set())])
def test_whom_an_operation_is_about_is_not_shown_as_its_caller(name: str, fields: set[str]) -> None:
    about, caller = CliRunner().invoke(main, [name, "--help"]).output.split("\nCaller, ")

    assert {*re.findall(r"--(principal-(?:id|kind|instance-id))", about.partition("\nFields:")[2])} == fields
    assert bool(re.search("--principal", caller.partition("\nOptions:")[0])) is not bool(fields)
    assert "--tenant-id" in caller


def test_an_operation_answers_to_its_name_with_underscores(run: Run, kind: str) -> None:
    assert answer(run("create_task", "--type", kind, "--payload", "1", "--json"))["status"] == "queued"


def test_the_help_shows_the_commands_in_sections() -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.splitlines()

    titles = [line.partition(" (")[0].rstrip(":") for line in lines if line[:1].strip() and line.endswith(":")]
    assert titles == [
        "Options", "Get started", "Documentation", "Run a gate", "Use a gate", "Do the work", "Maintain a gate",
        "Operations"]
    listed = {line.split()[0] for line in lines if line.startswith("  ") and line.strip()}
    assert {name.replace("_", "-") for name in OPERATIONS} | {"dev", "demo", "verify", "backup"} <= listed


@pytest.mark.parametrize("says", [
    "Pause a type, a lane, a worker, or the whole tenant",
    "Pause, and wait up to wait_seconds for what is leased to end",
    "Post an event of the type webhook.test to an endpoint now, once, and tell what became of it",
    "Replace all valid keys of a tenant, end all its sessions, and refuse access tokens issued before now"])
def test_a_line_of_the_help_breaks_off_no_list(says: str) -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=80).output.split())

    assert f" {says} " in shown


@pytest.mark.parametrize("name", ["receipts", "keys", "archive", "export", "bulk"])
def test_a_line_of_the_help_of_a_group_breaks_off_no_sentence(name: str) -> None:
    _, _, listed = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output.partition("Commands:")

    assert listed
    assert "..." not in listed


def test_migrations_after_the_newest_are_none_and_the_command_says_so() -> None:
    asked = ["migrate", "--print-sql", "--after", "999", "--database", "postgresql://nobody@nowhere.invalid/gate"]

    told = CliRunner().invoke(main, asked)

    assert (told.exit_code, told.stdout) == (0, "")
    assert "no migration after 999" in told.stderr


def test_without_a_ledger_a_rebuild_says_that_a_file_will_do(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["rebuild", "--database", f"sqlite:///{tmp_path}/new.db"])

    assert told.exit_code == 2
    assert "there is no ledger; --file names a file of `asyncgate receipts export`" in told.output


@pytest.mark.parametrize(("seconds", "delay"), [(456255.0, "5 d 6 h"), (90.0, "1 min 30 s"), (0.05, "50 ms")])
def test_a_refusal_says_when_to_try_again_as_people_do(
        capsys: pytest.CaptureFixture[str], seconds: float, delay: str) -> None:
    with pytest.raises(click.exceptions.Exit), exit_on_refusal():
        raise Refusal(429, {"error": "quota_exceeded", "message": "no more"}, seconds)

    assert capsys.readouterr().err == f"Error: quota_exceeded (429): no more (try again in {delay})\n"


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
        asked = ["--lease-id", lease_id, "--worker-id", "w1", "--error", '"no"', answer_, "--json"]
        failing = run("fail", task_id, *asked)
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

    cursor = history.stderr.split("later entries: --cursor ")[1].strip()
    leased(run, kind)

    assert [line.split()[1] for line in run("get-task-history", task_id, "--cursor", cursor).stdout.splitlines()] == [
        "EVENT_TYPE", "task.accepted"]


def test_what_a_reply_says_beside_its_list_is_printed(run: Run, kind: str) -> None:
    task_ids = [created(run, kind) for _ in range(2)]

    types = run("list-types", "--type", kind)
    waited = run("wait-tasks", *[word for task_id in task_ids for word in ("--ids", task_id)])

    assert "on_mismatch: refuse" in types.stderr.splitlines()
    assert [line.split() for line in waited.stdout.splitlines()] == [["done", "false"], ["open", "2"], ["ended", "[]"]]


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


def test_a_single_thing_is_names_and_values_and_a_pipe_gets_all_of_them(run: Run, kind: str) -> None:
    task_id = created(run, kind, "--payload", json.dumps({"x": "x" * 1000}))

    told = dict(line.split(maxsplit=1) for line in run("get-task", task_id).stdout.splitlines())

    assert told["task_id"] == task_id
    assert json.loads(told["payload"]) == {"x": "x" * 1000}
    assert "result" not in told     # null


def test_what_others_wrote_cannot_move_the_cursor_or_turn_text(run: Run, kind: str) -> None:
    evil = "a\x1b[2Jb\u202ec\x9bd\ne"
    task_id = created(run, kind, "--task-summary", evil)

    told = run("get-task", task_id).stdout

    assert "a\\x1b[2Jb\\u202ec\\x9bd\\ne" in told
    assert escape_text(evil) in told


@pytest.mark.parametrize(("arguments", "status", "word"), [
    (["get-task", "nope"], 4, "task_not_found (404)"),
    (["get-task"], 2, "get_task needs TASK_ID"),
    (["create-task"], 2, "create_task needs --type"),
    (["complete", "t"], 2, "complete needs --lease-id"),
    (["create-task", "--type", "t", "--max-attempts", "0"], 2, "invalid_request (400)"),
    (["create-task", "--type", "t", "--priority", "high"], 2, "'--priority': 'high' is not a valid integer"),
    (["create-task", "--type", "t", "--payload", "{no"], 2, "'--payload': this is not JSON"),
    (["create-task", "--type", "t", "--payload", "hello"], 2, "a string needs quotes"),
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


@pytest.mark.parametrize(("arguments", "near"), [
    (["list-task"], "Did you mean list-tasks"), (["receipts", "exprt"], "Did you mean export?"),
    (["lease_nxt"], "Did you mean lease-next"), (["archive", "restor"], "Did you mean restore?")])
def test_a_misspelt_command_is_told_the_near_ones(run: Run, arguments: list[str], near: str) -> None:
    result = run(*arguments)

    assert (result.exit_code, near in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("ending", ["/", "/v1", "/v1/", "/mcp", "/mcp/u", "/docs"])
def test_an_address_that_was_copied_with_a_path_of_the_gate_will_do(run: Run, url: str, ending: str) -> None:
    assert run("list-tasks", "--url", url + ending).exit_code == 0


def test_an_https_address_of_a_gate_without_tls_is_told_apart_from_no_gate(run: Run, url: str) -> None:
    result = run("list-tasks", "--url", url.replace("http", "https"))

    assert result.exit_code == 7
    assert result.stderr == f"Error: {url.replace('http', 'https')} does not speak TLS; is its address {url}?\n"


def test_a_moment_and_a_duration_are_written_as_people_write_them(run: Run, kind: str) -> None:
    asked = ["issue-key", "--name", kind, "--principal-id", kind, "--json"]
    key = answer(run(*asked, "--expires-at", "2099-12-31"))["key"]
    late = answer(run("create-task", "--type", kind, "--payload", "1", "--delay-seconds", "90m", "--json"))
    wrong = run(*asked, "--expires-at", "soon")

    assert key["expires_at"] == "2099-12-31T00:00:00Z"
    assert answer(run("rotate-key", key["key_id"], "--overlap-seconds", "1h", "--json"))["key"]["name"] == kind
    assert answer(run("get-task", late["task_id"], "--json"))["next_eligible_at"] is not None
    assert (wrong.exit_code, "use a date such as 2026-12-31" in wrong.stderr) == (2, True)


def test_a_duration_counts_back_where_a_filter_asks_what_has_happened(run: Run, kind: str) -> None:
    task_id = answer(run("create-task", "--type", kind, "--payload", "1", "--json"))["task_id"]

    lists = [answer(run("list-tasks", "--type", kind, option, "1h", "--json"))["tasks"]
             for option in ("--created-after", "--created-before")]

    made = answer(run("create-webhook", "--endpoint", "https://hooks.invalid/", "--types", "system.anomaly", "--json"))
    again = answer(run("replay-deliveries", made["webhook"]["webhook_id"], "--since", "1h", "--json"))

    assert [[task["task_id"] for task in tasks] for tasks in lists] == [[task_id], []]
    assert again["since"] < made["webhook"]["created_at"]


def test_run_task_says_the_id_at_once_and_ends_as_the_task_does(run: Run, kind: str) -> None:
    waits = run("run-task", "--type", kind, "--payload", "1", "--wait-seconds", "0", "--json", "--result-delivery",
                "inline")
    task_id, lease_id = leased(run, kind)
    first = waits.stderr.splitlines()[0]

    assert (waits.exit_code, first, json.loads(waits.stdout)["task_id"]) == (10, f"task {task_id}", task_id)
    assert "no worker has taken it yet" in waits.stderr
    assert f"asyncgate wait {task_id}" in waits.stderr
    assert run("wait", task_id, "--for", "0s").exit_code == 10
    run("complete", task_id, "--lease-id", lease_id, "--worker-id", "w1", "--result", "7")
    done = run("wait", task_id, "--json")
    assert (done.exit_code, json.loads(done.stdout)["result"]["result"]) == (0, 7)


def test_the_command_of_a_worker_is_one_for_a_shell_whatever_the_type_is_called(run: Run, kind: str) -> None:
    odd = f"{kind} a; touch $(b)"
    waits = run("run-task", "--type", odd, "--payload", "1", "--wait-seconds", "0", "--requirements",
                '{"capabilities": ["c d"]}')

    [command] = re.findall(r"`(.*)`", waits.stderr)
    assert shlex.split(command) == ["asyncgate", "worker", "--type", odd, "--capability", "c d", "--", "PROGRAM"]


def test_a_task_that_failed_and_one_that_was_canceled_are_told_apart(run: Run, kind: str) -> None:
    failed, canceled = created(run, kind), created(run, f"{kind}-2")
    _, lease_id = leased(run, kind)
    run("fail", failed, "--lease-id", lease_id, "--worker-id", "w1", "--error", '"no"', "--no-retryable")
    run("cancel-task", canceled)

    assert (run("wait", failed).exit_code, run("wait", canceled).exit_code) == (8, 9)
    assert run("wait", "nope").exit_code == 4


def test_ctrl_c_leaves_the_id_and_how_to_go_on(url: str, kind: str) -> None:
    asked = [*GATE, "run-task", "--type", kind, "--payload", "1", "--wait-seconds", "1h", "--url", url]

    with subprocess.Popen(asked, env=clean(ASYNCGATE_API_KEY=KEY), stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        task_id = running.stderr.readline().split()[1]
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()

    assert (running.returncode, f"asyncgate wait {task_id}" in rest) == (130, True), rest


@pytest.mark.parametrize("id", [".", ".."])
def test_an_id_that_would_lead_to_another_path_is_refused(run: Run, id: str) -> None:
    refused = run("get-task", id)

    assert (refused.exit_code, f"task_id is {id!r}, which is not an id" in refused.output) == (2, True), refused.output


@pytest.mark.parametrize("asked", [("create-task", "--type", "x", "--payload", '"\udcff"'),
                                   ("create-task", "--type", "\udcff", "--payload", "1"), ("get-task", "\udcff"),
                                   ("list-tasks", "--type", "\udcff"), ("tail", "--task", "\udcff")],
                         ids=["JSON", "a field", "a path", "a query", "a stream"])
def test_an_argument_that_is_not_utf_8_is_refused_in_words(run: Run, asked: tuple[str, ...]) -> None:
    refused = run(*asked)

    assert refused.exit_code == 2, refused.output
    assert "has a byte that is not UTF-8" in refused.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_under_the_output_is_one_line(url: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*GATE, "whoami", "--url", url], env=clean(ASYNCGATE_API_KEY=KEY), stdout=full,
                              stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (1, "Error: cannot use a file, or the output: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_full_disk_under_the_help_is_one_line(option: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*GATE, option], env=clean(), stdout=full, stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (1, "Error: cannot use a file, or the output: No space left on device\n")


@pytest.mark.parametrize("asked", [("list-tasks", "--watch"), ("wait", "t1", "--for"), ("top", "--every")],
                         ids=" ".join)
@pytest.mark.parametrize("duration", ["inf", "nan", "1e400", "99999999999999d"])
def test_a_duration_that_no_clock_can_count_is_refused(run: Run, asked: tuple[str, ...], duration: str) -> None:
    result = run(*asked, duration)

    assert result.exit_code == 2, result.output
    assert f"{duration!r} is not between " in result.stderr


@pytest.mark.parametrize("asked", [("list-tasks",), ("create-task", "--type", "x", "--payload", "1"),
                                   ("receipts", "tree", "x"), ("export", "tenant", "archive.zip")], ids=" ".join)
def test_ctrl_c_ends_every_command_with_the_same_exit_status(asked: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([*GATE, *asked, "--url", at], env=clean(), cwd=tmp_path, stderr=subprocess.PIPE,
                              text=True) as running, silent.accept()[0] as call:
            call.recv(1)        # it has asked, and waits for the answer
            running.send_signal(signal.SIGINT)
            output = running.communicate(timeout=PATIENCE_SECONDS)[1]

    assert running.returncode == 130, output
    assert "Traceback" not in output


@pytest.mark.parametrize("shorten", [lambda id: id[-12:], lambda id: id[:-4], lambda id: id[-12:].upper()])
def test_an_id_is_taken_as_short_as_a_table_shows_it_on_any_machine(
        run: Run, kind: str, shorten: Callable[[str], str]) -> None:
    task_id = created(run, kind)

    assert answer(run("get-task", shorten(task_id), "--json"))["task_id"] == task_id
    assert run("get-task-history", shorten(task_id)).exit_code == 0


def test_a_short_id_of_several_is_refused_with_those_that_are_meant(run: Run, kind: str) -> None:
    ids = created_together(run, kind, 2)

    refused = run("get-task", shared_beginning(ids))

    assert refused.exit_code == 2
    assert all(id in refused.output for id in ids)
    assert "task_not_found" in run("get-task", "0000deadbeef").output


def test_a_short_id_of_more_than_are_listed_does_not_say_how_many(run: Run, kind: str) -> None:
    ids = created_together(run, kind, 12)

    refused = run("get-task", shared_beginning(ids))

    assert refused.exit_code == 2
    assert "fits more than one task, such as " in refused.output


def test_usage_is_a_table_json_or_csv(run: Run, kind: str) -> None:
    created(run, kind)

    run("set-budget", "--quantity", "tasks", "--monthly", "1000")
    table, [head, *lines] = run("usage", "--period", "day"), run("usage", "--csv").output.splitlines()

    assert "% of the budget of 1,000 tasks" in table.output
    assert "lease hours" in table.output.lower().replace("_", " ")
    assert head == "tenant,begins,ends,tasks,lease_hours,receipt_byte_hours,payload_byte_hours,reads,writes,heartbeats"
    assert [line.count(",") for line in lines] == [head.count(",")]
    assert answer(run("usage", "--all-tenants", "--json"))["usage"][0]["tasks"] >= 1


# What goes on until it is stopped, or is another program's: pytest, MCP, a document that is JSON or Markdown already.
NO_ANSWER = {"bench-server", "conformance", "demo", "dev", "ledger", "mcp", "new", "openapi", "permission-prompt",
             "relay", "scheduler", "serve", "skill", "top", "torture", "worker"}


def test_every_command_that_answers_can_answer_in_json() -> None:
    commands = {" ".join(path): command for path, command in every_command(main, ())}

    without = {name for name, command in commands.items()
               if not any("--json" in param.opts for param in command.params)}
    assert without == NO_ANSWER


def every_command(group: click.Group, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every_command(command, (*above, name))
        else:
            yield (*above, name), command


def test_the_tools_answer_in_json(run: Run, kind: str, database: str, tmp_path: Path) -> None:
    created(run, kind)
    file, other = str(tmp_path / "gate.jsonl"), f"sqlite:///{tmp_path / 'copy.db'}"

    verdict = answer(run("verify", "--ledger", "--json", "--database", database))
    copy = answer(run("backup", "--json", "--database", database, str(tmp_path / "copy.db")))
    exported = answer(run("receipts", "export", "--json", file))
    told = answer(run("receipts", "verify", "--json", file))
    rebuilt = answer(run("rebuild", "--json", "--file", file, "--database", f"sqlite:///{tmp_path / 'new.db'}"))
    moved = answer(run("copy", "--json", other, f"sqlite:///{tmp_path / 'moved.db'}"))

    assert (verdict["sound"], verdict["ledger"]["sound"], copy["sound"], told["sound"]) == (True,) * 4
    assert exported["receipts"] == told["receipts"] > 0
    assert rebuilt["rebuilt"]["tasks"] == rebuilt["tasks"] > 0
    assert {row["table"]: row["source"] for row in moved["tables"]}["tasks"] == moved["tasks"]
    assert answer(run("migrate", "--json", "--database", other)) == {"applied": []}


@pytest.mark.parametrize(("seal", "says"), [
    ("1:abc123", "must have 64 digits"), ("1:", "must have 64 digits"), ("abc", "use NUMBER:HASH"),
    ("1:" + "Z" * 64, "use NUMBER:HASH")])
def test_a_seal_whose_hash_was_shortened_is_not_compared(run: Run, database: str, seal: str, says: str) -> None:
    result = run("verify", "--ledger", "--seal", seal, "--database", database)

    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_the_file_of_a_first_key_is_its_owners_alone(run: Run, tmp_path: Path) -> None:
    asked = ["keys", "issue", "--database", f"sqlite:///{tmp_path / 'gate.db'}", "--name", "first", "--principal-id",
             "me", "--role", "admin", "--out", str(tmp_path / "admin.key")]

    made, again = run(*asked), run(*asked)

    assert (made.exit_code, made.stdout) == (0, "")
    file = tmp_path / "admin.key"
    assert (file.stat().st_mode & 0o777, file.read_text().startswith("aga_")) == (0o600, True)
    assert (again.exit_code, "exists already" in again.stderr) == (5, True)


@pytest.mark.parametrize("arguments", [
    ["serve", "--set", "bogus=1"], ["serve", "--set", "port=x"], ["serve", "--config", "nowhere.yaml"],
    ["serve", "--database", "nonsense:x"], ["config", "--set", "bogus=1"], ["verify", "--database", "nonsense"],
    ["copy", "nonsense:x", "memory:"], ["receipts", "push", "--database", "sqlite:///none.db"],
    ["reconcile", "--database", "sqlite:///none.db"], ["rebuild", "--database", "nonsense:x"],
    ["receipts", "verify", "none"], ["receipts", "import", "none"], ["export", "verify", "none"],
    ["receipts", "push", "--file", "none"], ["rebuild", "--file", "none", "--database", "sqlite:///x.db"],
    ["receipts", "export", "no/folder"], ["export", "tenant", "no/folder"], ["restore", "none"],
    ["backup", "--database", "sqlite:///none.db", "copy.db"]], ids=" ".join)
def test_bad_configuration_is_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("setting", ["api_key", "console.enabled", ""])
def test_a_setting_without_a_value_is_refused_and_not_taken_for_empty(run: Run, setting: str) -> None:
    result = run("config", "--set", setting)

    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '--set': {setting!r} is not NAME=VALUE" in result.stderr


def test_a_first_key_is_asked_for_what_it_lacks_by_the_names_of_options(run: Run, tmp_path: Path) -> None:
    asked = ["keys", "issue", "--database", f"sqlite:///{tmp_path / 'gate.db'}", "--out", str(tmp_path / "key")]

    nameless, nobody = run(*asked), run(*asked, "--name", "first")

    assert (nameless.exit_code, nobody.exit_code, list(tmp_path.iterdir())) == (2, 2, [])
    assert "Error: issue_key needs --name\n" in nameless.stderr
    assert "Error: issue_key needs --principal-id\n" in nobody.stderr


def test_a_second_gate_on_a_file_is_told_who_has_it(url: str, database: str) -> None:
    asked = [*GATE, "serve", "--port", "0", "--database", database]

    done = subprocess.run(asked, env=clean(ASYNCGATE_API_KEY=KEY), capture_output=True, text=True)

    assert done.returncode == 1
    told = rf"another asyncgate is serving \S+: process \d+ at {re.escape(url)}; only one process"
    assert re.search(told, done.stderr)


@pytest.mark.parametrize("made", ["CREATE TABLE books (title)", "CREATE TABLE meta (name, value)"])
def test_a_file_of_another_program_is_left_as_it_is(run: Run, tmp_path: Path, made: str) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as other:
        other.execute(made)
    before = file.read_bytes()

    for asked in (["verify"], ["migrate"], ["keys", "issue", "--name", "n", "--principal-id", "p"]):
        result = run(*asked, "--database", f"sqlite:///{file}")
        assert (result.exit_code, "is a database of another program" in result.stderr) == (2, True), result.output
    assert file.read_bytes() == before


def test_a_program_that_cannot_be_run_is_told_apart_from_one_that_is_not_there(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "count.sh"
    program.write_text("#!/bin/sh\n")

    closed, missing = (run("worker", "--forget", "--type", "t", "--", str(path)) for path in (program, tmp_path / "no"))

    assert (closed.exit_code, f"chmod +x {program}" in closed.stderr) == (2, True), closed.output
    assert (missing.exit_code, "there is no program" in missing.stderr) == (2, True), missing.output


def test_a_conflict_is_5(run: Run, kind: str) -> None:
    task_id = created(run, kind)

    result = run("complete", task_id, "--lease-id", "not-mine", "--worker-id", "w1")

    assert result.exit_code == 5
    assert "lease_invalid_or_expired (409)" in result.stderr


def test_no_gate_is_7_and_the_line_says_how_to_start_one(run: Run) -> None:
    with socket.socket() as taken:      # it has the port for the whole test, and does not listen
        taken.bind(("127.0.0.1", 0))
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

    assert result.exit_code == 2
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

    assert (taken.exit_code, nowhere.exit_code) == (5, 2)
    assert "exists already" in taken.stderr
    assert "cannot write" in nowhere.stderr
    assert target.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("left", [b"", b"SQLite format 3\0, and then it was killed"], ids=["empty", "begun"])
def test_what_a_killed_backup_left_is_replaced(run: Run, kind: str, database: str, tmp_path: Path, left: bytes) -> None:
    created(run, kind)
    target = tmp_path / "copy.db"
    for end in ("", "-wal", "-shm", ".lock"):       # the lock file stays, and nobody holds it
        Path(f"{target}.partial{end}").write_bytes(left)

    result = run("backup", "--database", database, str(target))

    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == [target]


def test_a_backup_leaves_alone_what_another_one_is_writing_and_what_is_none(
        run: Run, database: str, tmp_path: Path) -> None:
    target, other = tmp_path / "copy.db", tmp_path / "receipts.jsonl"
    Path(f"{target}.partial").write_bytes(b"SQLite format 3\0")
    Path(f"{other}.partial").write_bytes(b"{}\n")       # an export can resume from it

    with hold_target(str(target)):
        busy = run("backup", "--database", database, str(target))
    foreign = run("backup", "--database", database, str(other))

    assert (busy.exit_code, foreign.exit_code) == (5, 5)
    assert f"another process is writing {target} now; wait until it has ended" in busy.stderr
    assert f"{other}.partial is not what a backup leaves; move it away" in foreign.stderr
    assert sorted(tmp_path.iterdir()) == [Path(f"{target}.partial"), Path(f"{other}.partial")]


def test_a_backend_that_makes_no_copies_says_so(run: Run, tmp_path: Path) -> None:
    result = run("backup", "--database", "memory://", str(tmp_path / "copy.db"))

    assert result.exit_code == 1
    assert "does not support backup" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_conformance_hands_what_stands_behind_the_dashes_to_pytest() -> None:
    done = subprocess.run([*GATE, "conformance", "--", "--version"], env=clean(), capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout.startswith("pytest ")


@pytest.mark.parametrize("command", ["serve", "dev", "ledger"])
def test_a_gate_warns_at_its_start_of_a_setting_that_decides_nothing(command: str) -> None:
    asked = [*GATE, command, "--port", "0", "--database", "nosuch://x", "--set", "database.leases=a.db"]

    done = subprocess.run(asked, env=clean(ASYNCGATE_API_KEY=KEY), capture_output=True, text=True)

    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and "INSECURE" not in line]
    assert [line.partition("database.leases decides nothing: ")[2] for line in warnings] == [
        "database.url says where leases are stored; remove it (flag --database.leases)"], done.stderr
