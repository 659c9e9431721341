"""What makes the faults of `asyncgate torture`: each comes, where it is meant to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from asyncgate.commands.torture import FAULTS as NAMED
from asyncgate.conformance import scheduled
from asyncgate.conformance.between import BreakingWire, Witness
from asyncgate.conformance.clocks import READING, MachineClock
from asyncgate.conformance.disks import compile_shim, find_compiler
from asyncgate.conformance.faults import FAULTS, NAMES, Site, Stage, open_site, silence
from asyncgate.conformance.history import Call, violations
from asyncgate.conformance.ledgers import LYING, PROCESS_SECONDS, LedgerServer
from asyncgate.conformance.load import GateServer, Load
from asyncgate.conformance.plugin import MISSING, POSTGRES
from asyncgate.conformance.postgres_server import connected, find_programs
from asyncgate.conformance.proxy import Proxy, reset
from asyncgate.conformance.scheduled import TICK, ScheduledRuns
from asyncgate.conformance.torture import TorturePlan, is_missing, plan_faults, run_round
from asyncgate.parts.model import stored
from tests.support.patience import PATIENCE_SECONDS, poll

pytestmark = pytest.mark.anyio
REQUEST, ANSWER = b"what is asked", b"what is answered"
ASKED, ANSWERED = b"GET /v1/config HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
LOOK_UP = """
import os, socket, threading
known = threading.Thread(target=lambda: (socket.getaddrinfo("localhost", 1), print("localhost")))
known.start()
socket.getaddrinfo("127.0.0.1", 1)
print("127.0.0.1")
known.join(0.3)
print("removed")
os.unlink(os.environ["HUNG_NAMES"])
known.join()
"""
SLOW = """
import os, sys, time
from asyncgate.conformance.disks import Did, FaultRule, Harm, Shim
(shim := Shim()).watch(sys.argv[1], sys.argv[1] + ".trace", False)
shim.set_rules([FaultRule(1 << Did.SYNC, "", 0, 1, Harm.SLOW, 0)])
file = os.open(sys.argv[1] + "/file", os.O_WRONLY | os.O_CREAT)
os.write(file, b"written")
began = time.monotonic()
os.fsync(file)
print(time.monotonic() - began >= 0.1, shim.failures)
"""


def test_the_command_names_every_fault() -> None:
    assert NAMED.split(", ") == [*FAULTS]


@pytest.mark.parametrize("turns", range(6))
async def test_nobody_who_came_just_before_a_door_is_closed_stays_inside(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with Proxy(server.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_SECONDS) as client:
                for _ in range(turns):      # so far has the loop come with letting it in
                    await asyncio.sleep(0)
                proxy.close_door()

                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(client.recv, 1) == b""


async def test_the_faults_of_postgres_that_no_other_test_has_lose_and_repeat_nothing_together(
        record_property: Any) -> None:
    if find_programs() is None:
        pytest.skip(MISSING)
    usual = ("kill", "pause", "worker", "scheduler", "ledger", "reset", "restart", "commit")
    faults = tuple(fault for fault in plan_faults(POSTGRES, ("all",), 1) if fault not in usual)
    plan = TorturePlan(POSTGRES, faults, random.randrange(2**32), strikes=len(faults), calls=20)
    async with open_site(POSTGRES, faults) as site:
        done = await run_round(plan, site, 1)

    record_property("torture", done.describe())
    print(done.describe())
    assert done.violations == [], f"seed {plan.seed}"
    assert done.faults.keys() == set(faults)


@pytest.mark.parametrize("wanted", ["clock,kill", "lies,kill", "names,limits,kill"])
async def test_a_gate_on_sqlite_loses_and_repeats_nothing_when_what_is_around_it_misleads_it(
        wanted: str, tmp_path: Path, record_property: Any) -> None:
    faults = tuple(name for name in wanted.split(",") if not is_missing(name))
    plan = TorturePlan("sqlite:", faults, random.randrange(2**32), strikes=4, calls=60)
    done = await run_round(plan, Site("sqlite:", tmp_path), 1)

    record_property("torture", done.describe())
    assert done.violations == [], f"seed {plan.seed}"
    assert done.faults.keys() == set(faults)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_gate_whose_start_is_given_up_ends(begun: bool) -> None:
    server = GateServer("memory://", first="import time; time.sleep(600)")
    starting = asyncio.create_task(server.start())
    await asyncio.to_thread(poll, lambda: not begun or "process" in vars(server))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert await server.ended() == -signal.SIGKILL


def test_a_ledger_contradicts_itself_for_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    (lying := tmp_path / "lying").touch()
    code = LYING.format(file=str(lying), refusals=0.5)
    with LedgerServer(f"sqlite:///{tmp_path}/ledger.db", first=code) as ledger:
        ids = [f"r{number}" for number in range(60)]
        stored_ids = [id for id in ids if is_answered(partial(ledger.call, "POST", "/v1/receipts", stated(id)))]
        shown_ids = [id for id in ids if is_answered(partial(ledger.call, "GET", f"/v1/receipts/{id}"))]
        lengths = {len(ledger.call("GET", "/v1/receipts", limit=100)["receipts"]) for _ in range(20)}
        lying.unlink()
        whole = [receipt["receipt_id"] for receipt in ledger.call("GET", "/v1/receipts", limit=100)["receipts"]]

    assert 0 < len(stored_ids) < 60
    assert 0 < len(shown_ids) < 60
    assert len(lengths) > 1
    assert whole == ids


def is_answered(call: Callable[[], Any]) -> bool:
    """Whether a ledger does not refuse a call."""
    try:
        call()
    except HTTPError:
        return False
    return True


def stated(id: str) -> dict[str, Any]:
    """A receipt that somebody states."""
    return {"receipt_id": id, "receipt_type": "plan.made", "created_at": "2026-11-28T07:00:00Z", "body": {},
            "from": {"kind": "agent", "id": "ada"}, "to": {"kind": "agent", "id": "bob"}}


def test_nobody_learns_where_a_host_is_while_its_name_server_hangs(tmp_path: Path) -> None:
    if missing := is_missing("names"):
        pytest.skip(missing)
    (hung := tmp_path / "hung").touch()
    preloaded = {"LD_PRELOAD": str(compile_shim(tmp_path, NAMES)), "HUNG_NAMES": str(hung)}
    done = subprocess.run([sys.executable, "-c", LOOK_UP], check=True, env={**os.environ, **preloaded}, text=True,
                          capture_output=True)

    assert done.stdout.split() == ["127.0.0.1", "removed", "localhost"]


def test_a_disk_that_is_slow_does_what_it_is_asked(tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("there is no C compiler")
    (folder := tmp_path / "slow").mkdir()
    done = subprocess.run([sys.executable, "-c", SLOW, folder], check=True, text=True, capture_output=True,
                          env={**os.environ, "LD_PRELOAD": str(compile_shim(tmp_path))})

    assert done.stdout.split() == ["True", "1"]
    assert (folder / "file").read_bytes() == b"written"


async def test_the_reply_to_a_commit_gets_through_late_when_it_is_there() -> None:
    if find_programs() is None:
        pytest.skip(MISSING)
    async with open_site(POSTGRES, ()) as site:
        assert site.cluster is not None
        assert site.proxy is not None
        async with connected(site.proxy.url(site.cluster.admin_url())) as db:
            for statement in ("CREATE TABLE kept (n int)", "BEGIN", "INSERT INTO kept VALUES (1)"):
                await db.fetch(statement)
            trap, began = site.proxy.delay_reply(late=0.5), time.monotonic()
            await db.fetch("COMMIT")
            late = time.monotonic() - began
            for statement in ("BEGIN", "COMMIT"):       # which nobody delays
                await db.fetch(statement)

            assert late >= 0.5
            assert await db.fetchval("SELECT count(*) FROM kept") == trap.caught == 1


async def test_a_database_notices_in_the_end_that_a_path_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy answers its probes, which nobody would: a name that a killed gate had stayed taken."""
    if find_programs() is None:
        pytest.skip(MISSING)
    monkeypatch.setattr("asyncgate.conformance.faults.NOTICED_SECONDS", 0.1)
    async with open_site(POSTGRES, ()) as site:
        assert site.cluster is not None
        assert site.proxy is not None
        async with (connected(site.proxy.url(site.cluster.admin_url())) as db,
                    connected(site.cluster.admin_url()) as outside, asyncio.timeout(PATIENCE_SECONDS)):
            await silence(Stage(site, random.Random(0)))
            session = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1"
            while await outside.fetchval(session, db.get_server_pid()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            db.terminate()


def test_the_clock_of_a_machine_drifts_from_when_it_was_set(tmp_path: Path) -> None:
    machine = MachineClock(tmp_path)
    machine.set(100.0, 0.5)
    _, since, _ = struct.unpack("ddd", machine.setting.read_bytes())
    told = subprocess.run([sys.executable, "-c", f"{machine.first}\nprint(real(), time.time(), real())"], check=True,
                          text=True, capture_output=True)
    before, ahead, after = [float(number) - since for number in told.stdout.split()]

    assert before > 0.0
    assert 100.0 + 1.5 * before <= ahead <= 100.0 + 1.5 * after


def test_calls_are_told_by_the_clock_of_the_gate(tmp_path: Path) -> None:
    machine = MachineClock(tmp_path)
    # Between the seconds 112 and 113 another process has begun, a little before what the first one had read last.
    readings = [(110.0, 3610.0), (111.0, 3611.0), (112.0, 3612.0), (113.0, 3611.5), (114.0, 3612.5)]
    machine.readings.write_bytes(b"".join(READING.pack(*reading) for reading in readings))

    def translate(started: float, ended: float) -> tuple[float, float]:
        call = Call(tenant="t", operation="health", ask={}, started=started, ended=ended)
        machine.translate([call])
        return call.started, call.ended

    assert translate(109.5, 111.5) == (3610.0, 3611.0)
    assert translate(111.5, 113.5) == (3611.0, 3612.0)
    assert translate(114.25, 114.5) == (3612.5, 3613.0)      # it asked for nothing that has a time
    assert translate(109.0, 109.5) == (3610.0, 3610.0)


def test_calls_that_overlap_still_do_when_they_are_told_by_the_clock_of_the_gate(tmp_path: Path) -> None:
    """A read needs no clock: what others read meanwhile does not say that it began behind a cancellation."""
    machine = MachineClock(tmp_path)
    machine.readings.write_bytes(b"".join(READING.pack(*pair) for pair in [(1.0, 101.0), (2.0, 102.0), (6.0, 106.0)]))
    canceled = Call(tenant="t", operation="cancel_task", ask={"task_id": "a"}, started=0.5, ended=5.0,
                    reply={"ok": True, "status": "canceled"})
    read = Call(tenant="t", operation="get_task", ask={"task_id": "a"}, started=4.0, ended=7.0,
                reply={"status": "leased"})

    machine.translate([canceled, read])

    assert violations([canceled, read], {}, {"I7"}) == []
    assert read.started <= canceled.ended


def format_time(second: int) -> str:
    """Format a time as a scheduler does."""
    return datetime.fromtimestamp(second, UTC).isoformat()


def test_runs_of_a_scheduler_that_are_missing_there_twice_or_early_are_found(tmp_path: Path) -> None:
    plain: dict[str, Any] = dict.fromkeys(stored.Task.__struct_fields__)
    keys = [f"schedule:{name}:{format_time(second)}" for name, seconds in (("s2", 2), ("s3", 3))
            for second in range(100, 112, seconds)]
    answer = {"schedule_id": "s3", "next_run_at": format_time(100)}
    order = stored.Task(**{**plain, "task_id": "t", "type": "schedule.create", "status": "succeeded",
                           "outcome": json.dumps(answer), "payload": json.dumps({"interval_seconds": 3})})
    runs = ScheduledRuns(Load(Target(0, asyncio.Event()), 0), 0, tmp_path)
    runs.ordered, runs.until = {"s2": (100, 2)}, 111

    def judge(*keys: str) -> list[str]:
        return runs.judge([order, *(stored.Task(**{**plain, "task_id": key, "type": TICK, "idempotency_key": key})
                                         for key in keys)])
    assert judge(*keys) == []
    assert judge(*keys[1:]) == ["SCHEDULER: run 100 of s2 has no task"]
    assert judge(*keys[:5], *keys[6:]) == ["SCHEDULER: run 110 of s2 has no task"]      # which was due, too
    assert judge(*keys[:7], *keys[8:]) == ["SCHEDULER: run 103 of s3 has no task"]
    assert judge(*keys[:-1]) == []      # an order that was run again: nobody waited for its last runs
    assert judge(*keys, keys[0]) == ["SCHEDULER: run 100 of s2 has 2 tasks"]
    assert judge(*keys, f"schedule:s2:{format_time(101)}") == ["SCHEDULER: run 101 of s2 was never due"]
    assert judge(*keys, f"schedule:s4:{format_time(101)}") == ["SCHEDULER: s4 has runs, and nobody has ordered it"]
    assert judge(*keys[6:]) == ["SCHEDULER: s2 has never run"]


async def test_a_scheduler_that_makes_up_for_its_runs_is_waited_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, listed = [0.0], list[dict[str, str]]()

    async def list_tasks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer, rather late each time, with one more run."""
        while await reader.read(2**16):     # a request
            passed[0] += 0.8 * PROCESS_SECONDS
            listed.append({"idempotency_key": f"schedule:s:{format_time(100 + len(listed))}"})
            page = json.dumps({"tasks": listed}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
        writer.close()

    async with await asyncio.start_server(list_tasks, "127.0.0.1", 0) as server:
        gates = Target(server.sockets[0].getsockname()[1], asyncio.Event())
        runs = ScheduledRuns(Load(gates, 0), 0, tmp_path)
        runs.ordered = {"s": (100, 1)}
        runs.log.touch()
        runs.process = await asyncio.to_thread(
            subprocess.Popen, [sys.executable, "-c", "import signal; signal.pause()"])
        monkeypatch.setattr(scheduled, "time", SimpleNamespace(time=lambda: 104.0, monotonic=lambda: passed[0]))
        problems = await runs.finish(gates)

    assert [problem for problem in problems if "late" in problem] == []
    assert len(listed) == 5


@dataclass
class Target:
    """What a wire leads to."""

    port: int
    up: asyncio.Event
    tenant: str = ""


def answer_once(door: socket.socket) -> int:
    """Answer one request when it is whole; return how much of it came."""
    connection, _ = door.accept()
    with connection:
        got = read_all(connection, len(REQUEST))
        with contextlib.suppress(ConnectionError):
            connection.sendall(ANSWER * (got == len(REQUEST)))
            connection.recv(1)
    return got


def ask_once(port: int) -> int:
    """Ask, and return how much of an answer came before the connection was reset."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(REQUEST)
        return read_all(connection, len(ANSWER) + 1)


def read_all(connection: socket.socket, most: int) -> int:
    """Return how many bytes came, at most so many."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while count < most and connection.recv(1):
            count += 1
    return count


async def test_a_wire_that_has_ended_meanwhile_is_not_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        reader, writer = await asyncio.open_connection(*door.getsockname())
        writer.transport.abort()
        assert await reader.read() == b""       # the loop has closed it by now

        reset(writer)


async def test_a_proxy_resets_also_a_client_that_has_just_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        reader, writer = await asyncio.open_connection(*door.getsockname())
        writer.transport.abort()
        assert await reader.read() == b""
        proxy = Proxy(0)
        proxy.clients.add(writer)

        proxy.reset()


async def test_a_witness_ends_a_connection_whose_gate_has_left() -> None:
    calls: list[Call] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        async with Witness(Target(door.getsockname()[1], asyncio.Event()), calls.append) as witness:
            reader, writer = await asyncio.open_connection("127.0.0.1", witness.port)
            writer.write(ASKED)
            gate, _ = await asyncio.to_thread(door.accept)
            gate.sendall(ANSWERED)
            assert await reader.readexactly(len(ANSWERED)) == ANSWERED
            gate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gate.close()
            await asyncio.to_thread(time.sleep, 0.1)

            writer.write(ASKED)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()

    assert [(call.operation, call.reply) for call in calls] == [("get_config", {})]


async def test_a_wire_breaks_behind_each_byte_of_a_request_and_of_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        async with BreakingWire(Target(door.getsockname()[1], asyncio.Event()), 0) as wire:
            wire.armed = True

            async def carry(way: int, most: int) -> tuple[int, int]:
                wire.number = 2 * most + way
                asked, answered = await asyncio.gather(asyncio.to_thread(answer_once, door),
                                                       asyncio.to_thread(ask_once, wire.port))
                return asked, answered

            requests = [await carry(0, most) for most in range(len(REQUEST))]
            answers = [await carry(1, most) for most in range(len(ANSWER) + 1)]

    assert requests == [(most, 0) for most in range(len(REQUEST))]
    assert answers == [(len(REQUEST), most) for most in range(len(ANSWER) + 1)]
    assert wire.caught == len(requests) + len(answers)
