"""The benchmark, run for a moment against a real server: that it measures what it says, never how fast."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from asyncgate import main
from asyncgate.bench.bad import make_bad_key
from asyncgate.bench.hostile import BODIES
from asyncgate.commands.bench.servers import read_number
from asyncgate.commands.bench.wire import LoadGate
from asyncgate.parts.identity.keys_stored import ID_END, generate, parse
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS, poll

WRITTEN = "/proc/self/io", "\nwrite_bytes:"
SERVE = "from asyncgate import main; main()"
SOME_BODIES = f"""from asyncgate.bench import hostile as part; part.BODIES = {{name: part.BODIES[name] for name in %r}}
{SERVE}"""


class Gate:
    """A bench-server on a database of its own, which can be looked into."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.file = folder / "gate.db"
        asked = [sys.executable, "-c", SERVE, "bench-server", "--port", "0", "--database", f"sqlite:///{self.file}"]
        asked += [f"--set={setting}" for setting in settings]
        environment = {**os.environ, "ASYNCGATE_API_KEY": "secret"}
        self.process = subprocess.Popen(asked, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        matches = (re.search(r"serves (http://\S+)", line) for line in self.process.stderr)
        self.url = next(line[1] for line in matches if line)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the database itself."""
        with contextlib.closing(sqlite3.connect(self.file, timeout=PATIENCE_SECONDS)) as connection:
            return connection.execute(query).fetchall()

    def tasks(self) -> dict[tuple[str, str], int]:
        """Count the tasks by type and status."""
        return {(kind, status): count for kind, status, count in self.rows(
            "SELECT type, status, count(*) FROM tasks GROUP BY type, status")}


@contextlib.contextmanager
def serving(folder: Path, *settings: str) -> Iterator[Gate]:
    """Serve meanwhile."""
    gate = Gate(folder, *settings)
    try:
        yield gate
    finally:
        gate.process.terminate()
        gate.process.communicate()
    assert gate.process.returncode == 0


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with serving(tmp_path_factory.mktemp("bench")) as gate:
        yield gate


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Gate]:
    with serving(tmp_path) as gate:
        yield gate


FEW = ("--count", "3", "--rounds", "1", "--warm-up", "0")
SHORT = ("--seconds", "0.2", "--rounds", "1", "--warm-up", "0")


def bench(url: str, *arguments: str, token: str = "secret") -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-c", SERVE, "bench", "--url", url, "--token", token, *arguments]
    return subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def counts(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    return {(row["mode"], row["operation"]): row["requests"] for row in rows}


def measure(gate: Gate, *arguments: str) -> list[dict[str, Any]]:
    return rows_of(bench(gate.url, "--json", *arguments))


MODES = ("cycle", "limits", "create", "drain", "batch", "claim-empty", "long-poll", "obligations", "explain", "mcp")


def test_every_mode_takes_as_many_steps_as_it_was_told_and_the_database_agrees(fresh: Gate) -> None:
    modes = [part for mode in MODES for part in ("--mode", mode)]

    rows = measure(fresh, "--echo", *modes, "--clients", "2", "--count", "6", "--rounds", "1", "--warm-up", "0")

    assert counts(rows) == {
        ("cycle", "create"): 6, ("cycle", "claim"): 6, ("cycle", "complete"): 6, ("cycle", "all"): 18,
        ("limits", "create"): 6, ("limits", "claim"): 6, ("limits", "complete"): 6, ("limits", "all"): 18,
        ("drain", "claim"): 6, ("drain", "complete"): 6, ("drain", "all"): 12,
        ("batch", "create 100"): 6, ("batch", "claim 100"): 6, ("batch", "complete 100"): 6, ("batch", "all"): 18,
        ("create", "create"): 6, ("claim-empty", "claim"): 6, ("long-poll", "wake"): 6, ("obligations", "list"): 6,
        ("explain", "explain"): 6,
        ("mcp", "create over MCP"): 6, ("echo", "echo"): 6}
    tasks = fresh.tasks()
    assert tasks.pop(("bench.task", "succeeded")) == 6 + 6 + 600
    assert tasks.pop(("bench.limited", "succeeded")) == 6
    assert tasks.pop(("bench.task", "queued")) == 1              # explained
    assert tasks.pop(("bench.left", "queued")) == 6 + 6 + 20     # created, over MCP too, and owed
    assert {status for _, status in tasks} == {"succeeded"}
    assert sum(tasks.values()) == 6                             # what the waiting claims were woken with
    assert fresh.rows("SELECT count(*) FROM tasks WHERE owner_id = 'bench.owed'") == [(20,)]


def test_the_numbers_of_a_timed_run_are_those_of_the_database(fresh: Gate) -> None:
    rows = measure(fresh, "--mode", "cycle", "--mode", "batch", "--mode", "create", "--clients", "1,3", *SHORT)

    def requests(mode: str, operation: str) -> int:
        return sum(row["requests"] for row in rows if (row["mode"], row["operation"]) == (mode, operation))

    assert fresh.tasks() == {
        ("bench.task", "succeeded"): requests("cycle", "complete") + 100 * requests("batch", "complete 100"),
        ("bench.left", "queued"): requests("create", "create")}
    assert {row["clients"] for row in rows} == {1, 3}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["p999_ms"] for row in rows)
    assert all(0 < row["requests_per_second"] <= row["requests"] / 0.2 for row in rows)
    batch = next(row for row in rows if row["operation"] == "complete 100")
    assert batch["tasks_per_second"] == pytest.approx(100 * batch["requests_per_second"], abs=5.1)   # of 0.05 requests


def test_rounds_are_added_up_and_a_warm_up_is_not_counted(fresh: Gate) -> None:
    rows = measure(fresh, "--mode", "create", "--clients", "2", "--count", "5", "--rounds", "3", "--warm-up", "0.1")

    assert counts(rows) == {("create", "create"): 15}
    assert fresh.tasks()["bench.left", "queued"] > 15


def test_a_drain_ends_tasks_that_were_created_before_and_no_others(fresh: Gate) -> None:
    rows = measure(fresh, "--mode", "drain", "--clients", "2", *SHORT)

    drained = counts(rows)["drain", "complete"]
    left = {("bench.task", "queued"): 1000 - drained} if drained < 1000 else {}
    assert fresh.tasks() == {("bench.task", "succeeded"): drained, **left}


def test_the_table_shows_rates_as_a_part_of_the_echos_and_cycles(gate: Gate) -> None:
    done = bench(gate.url, "--mode", "cycle", "--mode", "create", "--echo", "--clients", "2", *SHORT)

    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["mode", "clients", "operation"]
    assert re.search(r"^create +2 +create +[\d,]+ +\d\.\d\d ", done.stdout, re.M)
    assert re.search(r"^cycle +2 +all +[\d,]+ +\d\.\d\d ", done.stdout, re.M)
    assert re.search(r"^echo +2 +echo +[\d,]+ +1\.00 ", done.stdout, re.M)
    assert re.search(r"^cycle, 2 clients: [\d,]+ cycles/s$", done.stdout, re.M)


def test_mcp_is_measured_beside_rest(gate: Gate) -> None:
    rows = measure(gate, "--mcp", "--clients", "1", *SHORT)

    assert {row["operation"] for row in rows} == {"create", "create over MCP"}


def test_a_terminal_sees_what_is_measured_how_fast_and_how_long_it_will_take(gate: Gate) -> None:
    mine, its = pty.openpty()
    asked = [sys.executable, "-c", SERVE, "bench", "--url", gate.url, "--token", "secret", "--mode", "claim-empty",
             "--clients", "1", "--seconds", "0.8", "--rounds", "1", "--warm-up", "0.1"]
    with subprocess.Popen(asked, stderr=its, stdout=subprocess.DEVNULL) as process:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):      # the end of a terminal is an error
            while more := os.read(mine, 4096):
                seen += more
    os.close(mine)

    assert process.returncode == 0
    assert b"warming up: claim-empty" in seen
    assert re.search(rb"round 1 of 1: claim-empty, 1 client: [\d,]+ requests/s, \d s left", seen)


# Filling.

STATES = {
    "terminal": ("SELECT count(*) FROM tasks WHERE status = 'succeeded' AND NOT owed", 1203),
    "queued": ("SELECT count(*) FROM tasks WHERE status = 'queued' AND type = 'bench.task' AND "
               "requirements NOT LIKE '%foreign%' AND next_eligible_at IS NULL", 1203),
    "foreign": ("SELECT count(*) FROM tasks WHERE status = 'queued' AND requirements LIKE '%bench.foreign%'", 1203),
    "lanes": ("SELECT count(*) FROM tasks WHERE status = 'queued' AND type LIKE 'bench.lane.%'", 1203),
    "delayed": ("SELECT count(*) FROM tasks WHERE status = 'queued' AND next_eligible_at > created_at + 86000", 1203),
}


def test_a_fill_makes_exactly_so_many_tasks_in_each_state_and_measures_nothing(fresh: Gate) -> None:
    states = [part for state in STATES for part in ("--fill-state", state)]

    done = bench(fresh.url, "--fill", "1203", *states)

    assert (done.returncode, done.stdout) == (0, "")
    assert {state: fresh.rows(query)[0][0] for state, (query, _) in STATES.items()} == {
        state: wanted for state, (_, wanted) in STATES.items()}
    assert fresh.rows("SELECT count(*) FROM tasks") == [(5 * 1203,)]
    assert fresh.rows("SELECT count(DISTINCT type) FROM tasks WHERE type LIKE 'bench.lane.%'") == [(1000,)]


def test_a_full_gate_is_measured_when_a_mode_is_named(fresh: Gate) -> None:
    rows = measure(fresh, "--fill", "30", "--fill-state", "foreign", "--mode", "cycle", "--clients", "2", *SHORT)

    done = counts(rows)["cycle", "complete"]
    assert fresh.tasks() == {("bench.task", "queued"): 30, ("bench.task", "succeeded"): done}


def test_many_tenants_need_a_credential_that_may_name_them(gate: Gate) -> None:
    before = gate.tasks()

    done = bench(gate.url, "--fill", "10", "--fill-state", "tenants")

    assert done.returncode == 3
    assert "tenant_mismatch" in done.stderr
    assert gate.tasks() == before


# What goes on beside.


def test_waiting_claims_stay_open_beside_a_measurement(gate: Gate) -> None:
    rows = measure(gate, "--idle", "150", "--mode", "claim-empty", "--clients", "2", *SHORT)

    assert counts(rows)["claim-empty", "claim"] > 0


def test_more_waiting_claims_than_the_gate_lets_wait_are_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "max_waiting_claims=5") as narrow:
        fits, not_so = (bench(narrow.url, "--idle", number, "--mode", "claim-empty", "--clients", "1", *SHORT)
                        for number in ("5", "6"))

    assert fits.returncode == 0, fits.stderr
    assert not_so.returncode == 6
    assert "a waiting claim ended" in not_so.stderr


@pytest.mark.parametrize(("number", "kind"), [("3", "create"), ("450", "create"), ("3", "claim")])
def test_a_rival_is_there_for_half_of_the_measurements(gate: Gate, number: str, kind: str) -> None:
    rivals = "SELECT count(*) FROM tasks WHERE type = 'bench.rival' AND owner_id = 'bench.rival'"
    [(before,)] = gate.rows(rivals)

    done = bench(gate.url, "--rival", number, "--rival-kind", kind, "--mode", "create", "--clients", "1", "--json",
                 *SHORT)

    assert [row["rival"] for row in rows_of(done)] == [0, int(number)]
    [(after,)] = gate.rows(rivals)
    assert (after > before) == (kind == "create")


def test_the_table_tells_how_much_slower_a_rival_makes_it(gate: Gate) -> None:
    done = bench(gate.url, "--rival", "2", "--mode", "create", "--clients", "1", *SHORT)

    assert re.search(r"^create, 1 client, create: p50 [\d.]+ ×, p99 [\d.]+ × beside 2$", done.stdout, re.M)


def test_a_rival_that_is_refused_ends_the_benchmark(gate: Gate) -> None:
    done = bench(gate.url, "--rival", "2", "--rival-token", "wrong", "--mode", "create", "--clients", "1", *SHORT)

    assert done.returncode == 1
    assert "the rival ended: unauthenticated (401)" in done.stderr


def test_a_rival_whose_batches_are_refused_ends_the_benchmark(gate: Gate) -> None:
    key = httpx2.post(f"{gate.url}/v1/keys", headers={"authorization": "Bearer secret"}, json={
        "name": "not the rival's", "principal_kind": "agent", "principal_id": "ada"}).json()["api_key"]

    told = bench(gate.url, "--mode", "claim-empty", "--clients", "1", "--rival", "201", "--rival-token", key, *SHORT)

    assert told.returncode != 0
    assert "belongs to agent ada, not to agent bench.rival" in told.stderr


# Credentials.


def test_two_credentials_are_measured_in_turns_and_compared(gate: Gate) -> None:
    with httpx2.Client(base_url=gate.url, headers={"authorization": "Bearer secret"}) as client:
        fields = {"name": "hot", "principal_kind": "human", "principal_id": "root", "role": "admin"}
        key = client.post("/v1/keys", json=fields).json()["api_key"]

    both = ("--token", key, "--mode", "cycle", "--clients", "1", "--count", "3", "--rounds", "1", "--warm-up", "0")
    rows, told = measure(gate, *both), bench(gate.url, *both)

    assert {row["database"]: row["requests"] for row in rows if row["operation"] == "all"} == {
        "credential 1": 9, "credential 2": 9}
    assert gate.rows("SELECT last_used_at IS NOT NULL FROM api_keys WHERE name = 'hot'") == [(1,)]
    assert re.search(r"^cycle \(credential 2\), 1 client, all: [\d.]+ × the rate with credential 1$", told.stdout, re.M)


def test_two_gates_are_measured_in_turns_and_compared(gate: Gate) -> None:
    other = gate.url.replace("127.0.0.1", "localhost")

    told = bench(gate.url, "--url", other, "--mode", "cycle", "--clients", "1", "--count", "3", "--rounds", "2",
                 "--warm-up", "0").stdout

    first, second = (url.partition("//")[2] for url in (gate.url, other))
    assert re.search(rf"^cycle \({re.escape(second)}\), 1 client, all: [\d.]+ × the rate with {re.escape(first)}$",
                     told, re.M)


def test_clients_of_many_tenants_are_measured_beside_those_of_one(tmp_path: Path) -> None:
    with serving(tmp_path, "security.rate_limiting.enabled=false") as gate:
        told = bench(gate.url, "--tenants", "3", "--mode", "cycle", "--clients", "2", "--count", "6", "--rounds", "1",
                     "--warm-up", "0").stdout

        assert re.search(r"^cycle \(3 tenants\), 2 clients, all: [\d.]+ × the rate with one tenant$", told, re.M)
        assert gate.rows("SELECT count(DISTINCT tenant_id), count(*) FROM tasks") == [(4, 12)]


def test_a_flood_of_bad_keys_is_measured_by_the_health_of_a_server_and_its_memory(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SERVE, "bench", "--bad-keys", "5", "--clients", "1", *SHORT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run([*asked, "--json"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
    told = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)

    report = json.loads(done.stdout)
    assert [(row["mode"], row["rival"]) for row in report["rows"]] == [("health", 0), ("health", 5)]
    assert all(row["requests"] for row in report["rows"])
    assert 0 < report["memory"]["before"] <= report["memory"]["most"] >= report["memory"]["after"] > 0
    assert "health beside 5" in told.stdout
    assert re.search(r"^the server's memory: [\d.]+ MiB before, [\d.]+ MiB after 5 at once", told.stdout, re.M)
    assert list(tmp_path.iterdir()) == []


def test_the_worst_bodies_are_measured_by_the_health_of_a_server(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SERVE, "bench", "--bad-bodies", "1", "--clients", "1", *SHORT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run([*asked, "--json"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)

    report = json.loads(done.stdout)
    assert (report["kind"], [(row["mode"], row["rival"]) for row in report["rows"]]) == (
        "bad-body", [("health", 0), ("health", 1)])
    assert all(row["requests"] for row in report["rows"])


@each("body", BODIES)
def test_each_of_the_worst_bodies_is_a_request_again_and_again(body: str) -> None:
    first, *others = islice(BODIES[body](LoadGate("http://127.0.0.1:9", generate())), 30)

    for request in (first, *others):
        head, _, content = request.partition(b"\r\n\r\n")
        assert re.match(rb"(GET|POST) /\S+ HTTP/1.1\r\n", head)
        assert b"content-length: %d" % len(content) in head.lower() or not content


# Each body is measured with a program of its own and needs a second of a processor, twice.
def test_a_hostile_tenant_is_measured_by_the_creations_of_another(tmp_path: Path, rounds: int) -> None:
    bodies = random.sample([*BODIES], min(rounds, len(BODIES)))
    asked = [sys.executable, "-c", SOME_BODIES % bodies, "bench", "--hostile", "--clients", "1", *FEW]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)

    assert done.returncode == 0, done.stderr
    for place in ("a hostile tenant at its rate limit", "a hostile tenant below its rate limit", *bodies):
        assert re.search(rf"^beside {place}: p50 [\d.]+ × \(goal: 2\), p99 [\d.]+ ×", done.stdout, re.M)


def test_a_slow_disk_shows_how_many_clients_share_a_commit(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SERVE, "bench", "--slow-disk", "20", "--clients", "1,8", *SHORT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)

    assert done.returncode == 0, done.stderr
    assert min(float(line.split()[-3]) for line in done.stdout.splitlines() if " all " in line) >= 20
    assert re.search(r"^cycle, 8 clients: [\d.]+ × the cycles/s of 1 client$", done.stdout, re.M)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(4))
def test_a_bad_key_is_well_formed_and_half_of_them_have_the_id_of_a_good_one(number: int) -> None:
    known = generate()

    bad, worse = make_bad_key(known, number), make_bad_key(known, number)

    assert parse(bad) is not None
    assert (bad[:ID_END] == known[:ID_END]) is (number % 2 == 0)
    assert len({bad, worse, known}) == 3


# By itself.


def by_itself(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    asked = [sys.executable, "-c", SERVE, "bench", "--self", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(asked, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def are_writes_counted(folder: Path) -> bool:
    """Whether the system counts what a process writes to a folder: not in memory, as /tmp is on some machines."""
    before, probe = read_number(*WRITTEN), folder / "probe"
    with probe.open("wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    probe.unlink()
    return before is not None and (read_number(*WRITTEN) or 0) > before


def test_by_itself_it_prints_the_table_for_each_database(tmp_path: Path) -> None:
    with by_itself(tmp_path, "--database", "memory://", "--mode", "cycle", "--mode", "long-poll", "--mode", "batch",
                   "--clients", "1,2", *SHORT) as process:
        told, wrong = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 0, wrong
    lines = told.splitlines()
    assert lines[0] == ("| mode | clients | SQLite: of the echo's rate | p50 ms | p99 ms | KiB a cycle "
                        "| memory: of the echo's rate | p50 ms | p99 ms | KiB a cycle |")
    assert [line.split(" | ")[:2] for line in lines[2:8]] == [
        [f"| {mode}", clients] for mode in ("cycle", "batch", "long-poll") for clients in ("1", "2")]
    written = r"\d+\.\d" if are_writes_counted(tmp_path) else "–"
    rate = r"\d\.\d\d \| [\d.]+ \| [\d.]+"
    assert re.search(rf"^\| cycle \| 1 \| {rate} \| {written} \| {rate} \| – \|$", told, re.M)
    assert re.search(r"^AsyncGate \S+, Python .* cores; one round of 0\.2 s", told, re.M)
    assert list(tmp_path.iterdir()) == []


def test_by_itself_it_tells_what_waiting_claims_cost_the_server(tmp_path: Path) -> None:
    with by_itself(tmp_path, "--idle", "50", "--mode", "claim-empty", "--clients", "1", "--json", *SHORT) as process:
        whole = json.loads(process.communicate(timeout=PATIENCE_SECONDS)[0])

    assert set(whole) == {"method", "idle", "rows"}
    [rest] = whole["idle"]
    assert (rest["database"], rest["claims"]) == ("SQLite", 50)
    if sys.platform == "linux":
        assert rest["core_percent"] >= 0
        assert -1000 < rest["resident_kib_each"] < 10_000


def test_a_database_that_cannot_be_served_is_one_clear_line(tmp_path: Path) -> None:
    with by_itself(tmp_path, "--database", "postgresql://u:hidden@127.0.0.1:9/none", *SHORT) as process:
        told, wrong = process.communicate(timeout=PATIENCE_SECONDS)

    assert (process.returncode, told) == (1, "")
    assert re.fullmatch(r"Error: the server on postgresql://u:\*+@127\.0\.0\.1:9/none did not start: .+\n", wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_neither_servers_nor_files(tmp_path: Path, sign: signal.Signals) -> None:
    with by_itself(tmp_path, "--seconds", "60") as process:
        log = poll(lambda: next(tmp_path.glob("*/server-0.log"), None))
        port = poll(lambda: re.search(r"serves http://\S+:(\d+)\n", log.read_text()))[1]
        process.send_signal(sign)
        process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode not in (0, None)
    assert list(tmp_path.iterdir()) == []
    gone = bench(f"http://127.0.0.1:{port}", "--mode", "create", *SHORT)
    assert gone.returncode == 7


# What goes wrong.


def test_a_wrong_token_is_refused_and_told_what_to_do(gate: Gate) -> None:
    done = bench(gate.url, "--mode", "create", token="wrong")

    assert done.returncode == 3
    assert "unauthenticated (401)" in done.stderr
    assert "--token" in done.stderr


def test_no_gate_is_one_clear_line() -> None:
    done = bench("http://127.0.0.1:9", "--mode", "create")

    assert done.returncode == 7
    assert done.stderr == "Error: no gate answers at http://127.0.0.1:9; start one with `asyncgate bench-server`\n"


def test_a_gate_without_an_echo_is_told_apart(start: Callable[..., Any]) -> None:
    done = bench(start().url, "--echo", token="a-token-for-tests")

    assert done.returncode == 4
    assert "`asyncgate bench-server`" in done.stderr


def test_a_gate_that_ends_in_the_middle_is_one_clear_line(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    asked = [sys.executable, "-c", SERVE, "bench", "--url", gate.url, "--token", "secret", "--mode", "create",
             "--clients", "2", "--seconds", "60", "--warm-up", "0"]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        poll(lambda: gate.tasks() if gate.file.exists() else None)
        gate.process.kill()
        gate.process.communicate()
        wrong = process.communicate(timeout=PATIENCE_SECONDS)[1]

    assert (process.returncode, wrong) == (1, "Error: the gate closed the connection\n")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--clients", "none"], "none is not a list of numbers"), (["--clients", "0"], "at least one client"),
    (["--clients", "1,"], "not a list of numbers"), (["--mode", "fly"], "'fly' is not one of"),
    (["--seconds", "1", "--count", "2"], "exclude each other"), (["--fill-state", "lanes"], "needs --fill"),
    (["--database", "sqlite:///x.db"], "--database needs --self"), (["--self"], "omit --url and --token"),
    (["--rival-token", "x"], "need --rival"), (["--bad-keys", "2"], "omit --url and --token"),
    (["--bad-keys", "2", "--hostile"], "exclude each other"),
    (["--slow-disk", "4"], "omit --url and --token"),
    (["--rival", "2001", "--rival-kind", "claim"], "at most 2000 claims"),
    (["--tenants", "3", "--mode", "drain"], "measures only the modes cycle"), (["--tenants", "1"], "not in the range"),
    (["--url", "ftp://gate"], "a gate's URL is like"), (["--token", "two words"], "printable ASCII")])
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", "--url", "http://127.0.0.1:9", "--token", "secret", *arguments])

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
