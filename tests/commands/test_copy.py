"""`asyncgate copy`: a whole gate in another database, whatever happens on the way; see WAYS for from where to where."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import astuple, replace

from asyncgate import Engine, Needs, Work
from asyncgate.backends import Around, open_backend
from asyncgate.backends.memory import Memory
from asyncgate.commands import copy
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, refused, settings_for_tests, under
from asyncgate.conformance.history import read_stored, violations
from asyncgate.conformance.test_bulk import done
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.metering import Closer, floor_to
from asyncgate.parts.model.errors import Refused
from asyncgate.parts.model.news import News
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import ArchiveSettings, LedgerSettings, Settings
from asyncgate.parts.model.stored import (
    RECORDS,
    Entry,
    LedgerMark,
    Task,
    Traffic,
    Usage,
    UsageEvent,
    UsageHead,
    export_key,
)
from asyncgate.parts.model.stored_families import Cascade
from asyncgate.parts.model.stored_handover import Handover
from asyncgate.parts.model.stored_unique import UniqueKey
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import seal
from asyncgate.parts.upkeep import Upkeep
from tests.support.kept_rows import keep_erasure, keep_sign_ins, keep_webhooks
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
# A copy knows no database, so between two of a kind it is tried where all rows are compared, or a process is killed.
WAYS = [("sqlite", "postgres"), ("postgres", "sqlite")]
WITHIN = [("sqlite", "sqlite"), ("postgres", "postgres")]
HOME, AWAY, VISITED = (f"{number:08}-0000-0000-0000-000000000000" for number in range(3))
ODD = "\U0001f600 \ue000 e\u0301 \"\\"          # as a name
WILD = f"\x01\u202e\x7f\n{ODD}"                # as a text
UNFINISHED = ("queued", "leased", "running")

New = Callable[[], Awaitable[str]]
Fill = Callable[[str], Awaitable[None]]


def by_way(*ways: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test on these ways: on one, if what it tells is judged before a database decides anything."""
    return pytest.mark.parametrize("way", ways, ids=" to ".join, indirect=True)


@pytest.fixture(params=WAYS, ids=" to ".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture
def new_source(way: tuple[str, str], fresh: Callable[[str], Awaitable[str]]) -> New:
    return partial(fresh, way[0])


@pytest.fixture
def new_target(way: tuple[str, str], fresh: Callable[[str], Awaitable[str]]) -> New:
    return partial(fresh, way[1])


@pytest.fixture
async def source(way: tuple[str, str], fresh: Callable[..., Awaitable[str]]) -> str:
    """A gate in which everything has happened."""
    return await fresh(way[0], fill_at)


@pytest.fixture
async def target(new_target: New) -> str:
    return await new_target()


FIRST_COPIES: dict[tuple[str, str], Fill] = {}


@pytest.fixture
async def moved(way: tuple[str, str], source: str, fresh: Callable[..., Awaitable[str]]) -> str:
    """What `asyncgate copy` has made of the source: once, and each test has it to itself."""
    async def copy_source(url: str) -> None:
        await good(source, url)

    return await fresh(way[1], FIRST_COPIES.setdefault(way, copy_source))


@asynccontextmanager
async def opened(url: str) -> Any:
    backend = await open_backend(url, serving=True)
    try:
        yield backend
    finally:
        await backend.close()


def gate_on(backend: Any, tenant_id: str = HOME, **settings: Any) -> Gate:
    return Gate(Engine(backend, settings_for_tests(expiry_jitter_seconds=0.0, **settings)), tenant_id)


async def fill(backend: Any) -> None:
    gate = gate_on(backend)
    await live(gate)
    await live(gate_on(backend, AWAY))
    visited = gate_on(backend, VISITED)
    await visited.as_agent("passer-by").list_tasks()
    await Upkeep(visited.engine).once("presence")


async def fill_at(url: str) -> None:
    async with opened(url) as backend:
        await fill(backend)


async def keep_books(gate: Gate) -> None:
    """Leave a receipt that waits for a ledger, one that somebody has stored here, and the place of a reader."""
    gate.engine.extend(Ledger(Engine(gate.backend, Settings(
        receipt_mode="memorygate_integrated", ledger=LedgerSettings(url="http://127.0.0.1:9")))))
    told = await gate.create(type="told elsewhere")
    await gate.as_agent().cancel_task(task_id=told)
    gate.engine.withdraw(gate.ledger)

    def store(work: Work) -> None:
        work.keep_record(Entry("r-1", work.new_id(), "plan.made", "", "agent", "ada", "agent", "bob", "", "d", "{}"))
        work.keep_record(LedgerMark("task.completed", "r-1"))
        keep_sign_ins(work, WILD)
        keep_erasure(work, WILD)
        keep_webhooks(work, WILD)
        work.keep_record(Cascade(told, "agent", "ada", WILD, work.now))
        work.keep_record(UniqueKey("d", told, work.now))
        work.keep_record(Handover("refused", "agent", f"ada {ODD}", "h", "{}", work.now, WILD))
        work.keep_record(UsageHead(300))
        work.keep_record(UsageEvent("000000000000", WILD, 0, 300, tasks=1))
    await gate.backend.transact(gate.tenant_id, Needs(), store)


async def live(gate: Gate) -> None:
    """Let everything happen that leaves a row."""
    await end_tasks(gate)
    await make_schedules(gate)
    held = await gate.leased(max_expiries=1, timeouts={"lease_ttl_seconds": 1})
    await gate.wait(2)
    assert (await gate.task(held.task_id)).held
    retried = await gate.leased(retry_backoff_seconds=600)
    await gate.as_worker().fail(**under(retried), error={"why": WILD}, retryable=True)
    await gate.create(type="delayed", delay_seconds=3600)
    running = await gate.leased(type="long", timeouts={"lease_ttl_seconds": 1800})
    await gate.as_worker().report_progress(**under(running), progress={"at": WILD})
    await gate.as_worker().record_step(**under(running), seq=1, name="wild", value={"at": WILD})
    await gate.as_worker().append_output(**under(running), chunks=[{"at": WILD}])
    await gate.as_worker().declare_type(type="wild", description=WILD, payload_schema={"title": WILD})
    await gate.as_admin().set_type_policy(on_mismatch="warn")
    leased = await gate.leased("w2", type="leased", timeouts={"lease_ttl_seconds": 1800})
    await gate.as_worker("w2").renew_lease(**under(leased))
    await gate.create(type=f"odd {ODD}", payload={"text": WILD, "n": 1.0}, requirements={"capabilities": ["gpu", ODD]},
                      idempotency_key=ODD, by=f"ada {ODD}", priority=9, instructions=WILD)
    await gate.as_agent().bootstrap(max_items=3)
    await administer(gate)
    await limit(gate)
    for kind, id in [("agent", "ada"), ("worker", "ada"), ("human", ODD)]:
        await gate.as_caller(kind, id, "admin", instance="i1").list_tasks()
    await Upkeep(gate.engine).once("presence")
    await archive_one(gate)
    await keep_books(gate)      # at last: behind a receipt whose body is elsewhere nothing is sealed


async def limit(gate: Gate) -> None:
    """Let a task count against a limit and use a rate, and another one wait for its turn."""
    await gate.as_admin().set_limit(name=ODD, concurrency_per_key=1, rate={"count": 9, "seconds": 3600})
    for _ in range(2):
        await gate.create(type="limited", limits={ODD: ODD}, timeouts={"lease_ttl_seconds": 1800})
    assert await gate.claim("w3", accept_types=["limited"])
    assert await gate.claim("w3", accept_types=["limited"]) is None


async def archive_one(gate: Gate) -> None:
    """Let a task go, and its receipts to an archive, whose files stay where they are."""
    task_id = await gate.create(type="old")
    await gate.as_admin().seal_receipts()
    await gate.as_agent().cancel_task(task_id=task_id)
    duty = (await gate.receipts(task_id, "task.assigned"))[0].receipt_id
    with tempfile.TemporaryDirectory() as folder:
        beside = gate.beside(archive=ArchiveSettings(directory=folder)).engine
        ages, moved = archive.Ages(math.inf, math.inf, math.inf, "g"), archive.ArchiveTally()
        first = await gate.backend.receipt(gate.tenant_id, duty)
        assert first is not None
        chain = await archive.gather_chain(beside, gate.tenant_id, first)
        assert chain is not None
        head = await seal(beside, gate.tenant_id)
        assert head.last_id >= max(chain.receipts)      # what is not sealed, no database lets go
        await archive.move_chains(beside, gate.tenant_id, ages, [chain], moved)
        assert await archive.drop_tasks(beside, gate.tenant_id, ages, [task_id]) == 1
    assert moved.receipts == 3


async def administer(gate: Gate) -> None:
    operator, tenant = gate_on(gate.backend, HOME).as_admin(), {"tenant": gate.tenant_id}
    await operator.create_tenant(**tenant, name=f"{ODD} {gate.tenant_id}")      # names are unique
    await operator.set_limits(**tenant, tier="paid", exempt_until="2100-01-01T00:00:00Z", reason=WILD)
    limited = {"capabilities": ["gpu", ODD], "task_types": ["odd"], "expires_at": "2100-01-01T00:00:00Z"}
    made = await operator.issue_key(**tenant, name=ODD, principal_id=ODD, principal_instance_id="i1", **limited)
    made = await operator.rotate_key(**tenant, key_id=made.key.key_id)
    await operator.revoke_key(**tenant, key_id=made.key.key_id, reason=WILD)
    await gate.as_admin().pause_work(type=ODD, reason=WILD)
    await gate.create(type="many")
    await done(gate.as_admin(), action="cancel", type="many")
    if gate.tenant_id != HOME:
        await operator.suspend_tenant(**tenant, reason=WILD)


async def end_tasks(gate: Gate) -> None:
    done = await gate.finished()
    failed = await gate.create(max_attempts=2, retry_backoff_seconds=0)
    for _ in range(2):
        offer = await gate.claim()
        assert offer is not None
        await gate.as_worker().fail(**under(offer), error="broken", retryable=True)
    assert (await gate.task(failed)).status == "failed"
    for ended in ("unlocated", "located later"):
        offer = await gate.leased()
        await gate.as_worker().complete(**under(offer), result={"n": 1})
        if ended != "unlocated":
            await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=[{"uri": "file:///out"}])
    canceled = await gate.leased()
    await gate.as_agent().cancel_task(task_id=canceled.task_id, reason=WILD)
    ready = await gate.receipt(done.task_id, "task.result_ready")
    await gate.as_agent().ack_receipt(receipt_id=ready.receipt_id)


async def make_schedules(gate: Gate) -> None:
    for name in ("kept", "deleted"):
        offer = await gate.leased("cron", type="schedule.create")
        parents = [receipt.receipt_id for receipt in await gate.receipts(offer.task_id)]
        made = await gate.as_worker("cron").emit_receipt(**under(offer), receipt_type="schedule.created",
                                                         schedule_id=name, parents=parents)
        await gate.as_worker("cron").complete(**under(offer), artifacts=[{"schedule_id": name}])
    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[made.receipt_id])
    state = {"schedule_id": "kept", "next_run_at": "2100-01-01T00:00:00Z", "interval_seconds": 60}
    await gate.as_worker("cron").report_schedule(schedules=[state])


def files(folder: Path) -> list[str]:
    """The databases in a folder, and what else is there but for the locks on them."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


async def everything(backend: Any) -> dict[str, dict[str, list[Any]]]:
    """Every row of every tenant, by table."""
    tenants: dict[str, dict[str, list[Any]]] = {}
    for tenant_id in await backend.tenants():
        for table, name in copy.COPIED_TABLES.items():
            rows = tenants.setdefault(tenant_id, {}).setdefault(name, [])
            while page := await backend.page(tenant_id, Rows(table, export_key(rows[-1]) if rows else "")):
                rows += page
    return tenants


async def rows_at(url: str) -> dict[str, dict[str, list[Any]]]:
    async with opened(url) as backend:
        return await everything(backend)


def assert_is_copy(new: dict[str, dict[str, list[Any]]], old: dict[str, dict[str, list[Any]]]) -> None:
    """All is there as it was, but for the fences of unfinished tasks, each with its event."""
    assert sorted(new) == sorted(old)
    for tenant_id, tables in old.items():
        unfinished = Counter(task.task_id for task in tables["tasks"] if task.status in UNFINISHED)
        known = {event.event_id for event in tables["events"]}
        more = [event for event in new[tenant_id]["events"] if event.event_id not in known]
        assert Counter(event.task_id for event in more) == unfinished
        assert {(event.event_type, event.payload) for event in more} <= {("task.moved", '{"fences_skipped":1000}')}
        newest = {receipt.task_id: receipt.receipt_id for receipt in tables["receipts"]}
        assert [event for event in more if event.event_id < newest[event.task_id]] == []
        expected = {**tables, "tasks": [replace(task, fence=task.fence + 1000) if task.task_id in unfinished else task
                                        for task in tables["tasks"]]}
        there = {**new[tenant_id], "events": [event for event in new[tenant_id]["events"] if event.event_id in known]}
        assert there == expected
        assert [astuple(row) for row in there["receipts"]] == [astuple(row) for row in expected["receipts"]]


async def wrong_at(url: str) -> list[str]:
    """What verify and the history checker find wrong."""
    async with opened(url) as backend:
        broken = violations([], await read_stored(backend))
        # The checker knows no schedules, so obligations are left to verify.
        return (await verify(backend)).problems + [wrong for wrong in broken if not wrong.startswith("I9:")]


async def command(*arguments: str) -> Result:
    """Run `asyncgate copy` beside this loop."""
    return await asyncio.to_thread(CliRunner().invoke, main, ["copy", *arguments], prog_name="asyncgate")


async def good(*arguments: str) -> Result:
    result = await command(*arguments)
    assert result.exit_code == 0, result.output
    return result


async def copied(source: Any, target: Any) -> None:
    """Copy between two open backends."""
    await copy.join(target)
    for step in (copy.traverse, partial(copy.traverse, write=True), copy.prove):
        await step(source, target, lambda rows: None)


def test_every_kind_of_record_comes_along_but_for_what_is_counted_anew() -> None:
    assert RECORDS.keys() - copy.COPIED_TABLES.keys() == {Usage, Traffic}


@by_way(WITHIN[0])
async def test_the_gate_that_is_copied_here_has_rows_of_every_kind(source: str) -> None:
    tables = (await rows_at(source))[HOME]

    assert {name for name, rows in tables.items() if not rows} == set()
    assert {task.status for task in tables["tasks"]} == {*UNFINISHED, "succeeded", "failed", "canceled"}
    assert any(task.status == "succeeded" and task.owed for task in tables["tasks"])
    assert any(task.held for task in tables["tasks"])
    assert any(len(receipt.parents) > 1 for receipt in tables["receipts"])
    assert {receipt.delivered_at is None for receipt in tables["receipts"]} == {True, False}
    assert len({presence.kind for presence in tables["presences"]}) < len(tables["presences"])
    assert {key.revoked_at is None for key in tables["api_keys"]} == {True, False}
    assert [line.number for line in tables["audit"]] == [*range(1, tables["audit_heads"][0].number + 1)]


@by_way(*WITHIN, *WAYS)
async def test_a_whole_gate_comes_along_row_by_row(source: str, target: str) -> None:
    before = await rows_at(source)

    result = await good(source, target)

    assert await rows_at(source) == before
    assert_is_copy(await rows_at(target), before)
    assert await wrong_at(target) == []
    assert result.stdout.endswith(": sound\n")


@by_way(WAYS[0])
async def test_the_command_prints_how_many_rows_each_side_has_and_one_hash_for_both(source: str, target: str) -> None:
    rows = [table for tables in (await rows_at(source)).values() for table in tables.items()]

    lines = (await good(source, target)).stdout.splitlines()

    assert lines[0].split() == ["TABLE", "SOURCE", "TARGET", "SOURCE_SHA256", "TARGET_SHA256"]
    for line, name in zip(lines[1:], copy.COPIED_TABLES.values(), strict=False):
        there = str(sum(len(held) for table, held in rows if table == name))
        table, *numbers, old, new = line.split()
        assert (table, numbers) == (name, [there, there])
        assert old == new
        assert len(old) == 16
    moved = sum(task.status in UNFINISHED for name, held in rows if name == "tasks" for task in held)
    assert lines[len(copy.COPIED_TABLES) + 1].startswith(f"raised the fences of {moved} unfinished tasks by 1,000")


@by_way(WITHIN[0])
async def test_a_dry_run_counts_and_writes_nothing(source: str, target: str, tmp_path: Path) -> None:
    before = files(tmp_path)

    result = await good(source, target, "--dry-run")

    assert result.stdout.splitlines()[0].split() == ["TABLE", "SOURCE", "TARGET", "MISSING"]
    assert result.stdout.splitlines()[1].split()[0::2] == ["tasks", "0"]
    assert result.stdout.endswith("nothing was written\n")
    assert files(tmp_path) == before


@by_way(WAYS[0])
async def test_a_copy_that_is_complete_is_proved_again_and_changes_nothing(source: str, target: str) -> None:
    await good(source, target)
    before = await rows_at(target)

    again = await good(source, target)
    dry = await good(source, target, "--dry-run")

    assert await rows_at(target) == before
    assert "copying" not in again.stderr
    assert {line.split()[3] for line in dry.stdout.splitlines()[1:len(copy.COPIED_TABLES) + 1]} == {"0"}


# What was going on goes on.


async def test_a_worker_completes_at_the_new_gate_under_the_lease_of_the_old_one(moved: str) -> None:
    async with opened(moved) as backend:
        gate = gate_on(backend)
        [lease] = (await gate.as_worker("w1").list_leases()).leases
        held = {"task_id": lease.task_id, "lease_id": lease.lease_id, "fence": lease.fence}
        assert (await gate.task(lease.task_id)).fence == lease.fence == 1

        before = [row.sequence for row in (await everything(backend))[HOME]["progress"] if row.task_id == lease.task_id]
        await gate.as_worker("w1").renew_lease(**held)
        await gate.as_worker("w1").report_progress(**held, progress={"at": 2})
        progress = [row for row in (await everything(backend))[HOME]["progress"] if row.task_id == lease.task_id]
        done = await gate.as_worker("w1").complete(**held, artifacts=[{"uri": "file:///out"}])

    assert done.status == "succeeded"
    assert [(row.fence, row.sequence) for row in progress] == [(1, before[0] + 1)]
    assert await wrong_at(moved) == []


async def test_what_starts_at_the_new_gate_under_an_old_lease_tells_that_fence(moved: str) -> None:
    async with opened(moved) as backend:
        gate = gate_on(backend)
        [lease] = (await gate.as_worker("w2").list_leases()).leases

        await gate.as_worker("w2").start_task(task_id=lease.task_id, lease_id=lease.lease_id)

        [started] = [event for event in (await everything(backend))[HOME]["events"]
                     if (event.task_id, event.event_type) == (lease.task_id, "task.started")]
        assert started.payload == '{"fence":1}'


async def test_no_lease_of_the_old_gate_outranks_the_next_one_of_the_new(source: str, moved: str) -> None:
    fences = []
    for url in (source, moved):
        async with opened(url) as backend:
            gate = gate_on(backend)
            [lease] = (await gate.as_worker("w2").list_leases()).leases
            await gate.as_worker("w2").release_lease(task_id=lease.task_id, lease_id=lease.lease_id)
            offer = await gate.claim("w3", accept_types=["leased"])
            assert offer is not None
            fences.append(offer.fence)
            with refused("lease_invalid_or_expired", reason="superseded"):
                await gate.as_worker("w2").complete(task_id=lease.task_id, lease_id=lease.lease_id, fence=lease.fence)

    assert fences == [2, 1002]
    assert await wrong_at(moved) == []


async def test_a_cursor_of_the_old_gate_goes_on_at_the_new_one(source: str, moved: str) -> None:
    async with opened(source) as backend:
        gate = gate_on(backend)
        whole = [receipt.receipt_id for receipt in await gate.receipts()]
        first = await gate.as_admin().list_receipts(limit=5)

    async with opened(moved) as backend:
        rest = await gate_on(backend).receipts(cursor=first.next_cursor)
        assert [receipt.receipt_id for receipt in (*first.receipts, *rest)] == whole


async def test_the_new_gate_gives_ids_behind_those_of_the_old_one(source: str, moved: str) -> None:
    newest = max(receipt.receipt_id for receipt in (await rows_at(source))[HOME]["receipts"])

    async with opened(moved) as backend:
        assert await gate_on(backend).create() > newest


async def test_a_key_of_the_old_gate_lets_in_at_the_new_one_and_the_log_goes_on(source: str, target: str) -> None:
    async with opened(source) as backend:
        made = await gate_on(backend).as_admin().issue_key(name="w", principal_kind="worker", principal_id="w1")
        last = (await everything(backend))[HOME]["audit_heads"][0]

    await good(source, target)

    async with opened(target) as backend:
        # Of what has happened in the source, the clocks of databases were ahead of this machine's.
        gate_on(backend).skip(max(0.0, made.key.not_before.timestamp() - backend.now()))
        guard = Guard(gate_on(backend).engine)
        caller = await guard.keys.caller(made.api_key)
        await guard.keys.close()
        assert caller is not None
        assert (caller.tenant_id, caller.principal, caller.key_id) == (HOME, Principal("worker", "w1"), made.key.key_id)
        await gate_on(backend).as_admin().revoke_key(key_id=made.key.key_id)
        line = (await everything(backend))[HOME]["audit"][-1]
        assert (line.number, line.event) == (last.number + 1, "key_revoked")
    assert await wrong_at(target) == []


async def test_what_was_queued_is_offered_to_whom_it_fits(moved: str) -> None:
    async with opened(moved) as backend:
        gate = gate_on(backend)
        assert await gate.claim("w9", accept_types=["delayed"]) is None
        assert await gate.claim("w9", accept_types=[f"odd {ODD}"]) is None
        offer = await gate.claim("w9", capabilities=["gpu", ODD])
        assert offer is not None
        assert (offer.type, offer.fence) == (f"odd {ODD}", 1001)
        again = await gate.as_agent(f"ada {ODD}").create_task(type="other", payload=None, idempotency_key=ODD)
        assert again.task_id == offer.task_id


async def test_a_gate_can_move_on_and_on(source: str, target: str, new_source: New) -> None:
    back = await new_source()
    await good(source, target)
    async with opened(target) as backend:
        await gate_on(backend).create(type="in between")
    between = await rows_at(target)

    await good(target, back)

    assert_is_copy(await rows_at(back), between)
    assert await wrong_at(back) == []
    async with opened(back) as backend:
        [lease] = (await gate_on(backend).as_worker("w1").list_leases()).leases
        assert (await gate_on(backend).as_worker("w1").complete(
            task_id=lease.task_id, lease_id=lease.lease_id, fence=1, artifacts=[{"uri": "x"}])).ok
    assert await wrong_at(back) == []


@pytest.mark.parametrize("backwards", [False, True], ids=["from memory", "to memory"])
async def test_memory_is_a_side_like_any_other(target: str, backwards: bool) -> None:
    async with opened("memory:") as memory, opened(target) as database:
        sides = [database, memory] if backwards else [memory, database]
        await fill(sides[0])

        await copied(*sides)

        assert_is_copy(await everything(sides[1]), await everything(sides[0]))
        assert sides[0].secret == sides[1].secret


# Stopped in the middle.


class Dying(Around):
    """A target that dies after so many transactions."""

    def __init__(self, backend: Any, lives: int) -> None:
        super().__init__(backend)
        self.lives = lives

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        if self.lives == 0:
            raise OSError("no space left")
        self.lives -= 1
        await self.backend.transact(tenant_id, needs, decide)


TRANSACTIONS = 2 * len(copy.COPIED_TABLES) + 1      # of a copy: VISITED has presences, the others all


async def test_a_copy_goes_on_wherever_it_was_stopped(rounds: int) -> None:
    # A copy knows no database, so the moments are tried where a transaction costs least: each third, all in long runs.
    async with opened("memory:") as old:
        await fill(old)
        before = await everything(old)
        for stop in range(0, TRANSACTIONS, max(1, 4 - rounds)):
            async with opened("memory:") as new:
                with pytest.raises(copy.CopyFailed, match="no space left"):
                    await copied(old, Dying(new, stop))
                await copied(old, new)

                assert_is_copy(await everything(new), before)
        async with opened("memory:") as new:
            await copied(old, Dying(new, TRANSACTIONS))


async def test_a_copy_goes_on_in_a_database_that_was_closed_and_opened_again(
        source: str, new_target: New, way: tuple[str, str], rounds: int) -> None:
    before, apart = await rows_at(source), max(1, TRANSACTIONS // (2 * rounds))
    async with opened(source) as old:
        for stop in range(WAYS.index(way) + 1, TRANSACTIONS, apart):
            target = await new_target()
            async with opened(target) as new:
                with pytest.raises(copy.CopyFailed, match="no space left"):
                    await copied(old, Dying(new, stop))
            async with opened(target) as new:
                await copied(old, new)

                assert_is_copy(await everything(new), before)


async def grow(url: str) -> None:
    async with opened(url) as backend:
        gate = gate_on(backend)
        for _ in range(10):
            await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 500)


# A kill concerns the target alone, Ctrl-C the connections of both.
@pytest.mark.parametrize(("way", "by"), [
    (WITHIN[0], signal.SIGKILL), (WAYS[0], signal.SIGKILL), (WAYS[0], signal.SIGINT), (WAYS[1], signal.SIGINT)],
    ids=lambda value: " to ".join(value) if isinstance(value, tuple) else value.name, indirect=["way"])
async def test_the_same_command_goes_on_after_a_kill_and_after_ctrl_c(
        way: tuple[str, str], fresh: Callable[..., Awaitable[str]], target: str, by: signal.Signals) -> None:
    source, deadline = await fresh(way[0], grow), time.monotonic() + PATIENCE_SECONDS
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncgate", "copy", source, target, stdout=PIPE, stderr=PIPE)
    backend = await open_backend(target)
    while not await backend.page(HOME, Rows(Task)):
        assert process.returncode is None, await process.communicate()
        assert time.monotonic() < deadline

    process.send_signal(by)     # before anything that takes time: the copy may end meanwhile

    await backend.close()
    out, err = await process.communicate()
    assert (process.returncode, out) == (-by if by == signal.SIGKILL else 130, b"")
    assert by == signal.SIGKILL or err.endswith(b"Error: interrupted; run the same command to resume\n")
    await good(source, target)
    assert_is_copy(await rows_at(target), await rows_at(source))


# Refused.


async def meddle(url: str) -> None:
    async with opened(url) as backend:
        await gate_on(backend).create(type="meddled")


async def settle_in(url: str) -> None:
    async with opened(url) as backend:
        visitor = gate_on(backend, "99999999-0000-0000-0000-000000000000")
        await visitor.as_agent().list_tasks()
        await Upkeep(visitor.engine).once("presence")


async def claim(url: str) -> None:
    async with opened(url) as backend:
        assert await gate_on(backend).claim(capabilities=["gpu", ODD])


USES = {
    "another gate is there": ((), "target", meddle, "is not in the source"),
    "another tenant is there": ((), "target", settle_in, "is not in the source"),
    "the target has a new task": (("copy",), "target", meddle, "is not in the source"),
    "the target has leased a task": (("copy",), "target", claim, "differs from the source"),
    "the source has leased a task": (("copy",), "source", claim, "differs from the source"),
}


@by_way(WITHIN[0])
@pytest.mark.parametrize(("first", "side", "use", "why"), USES.values(), ids=USES)
async def test_a_target_that_was_used_is_refused_and_stays_as_it_is(
        source: str, target: str, first: tuple[str, ...], side: str, use: Any, why: str) -> None:
    if first:
        await good(source, target)
    await use({"source": source, "target": target}[side])
    before = await rows_at(target)

    for more in ((), ("--dry-run",)):
        result = await command(source, target, *more)

        assert (result.exit_code, result.stdout) == (5, "")
        assert "the target is in use; choose an empty database" in result.stderr
        assert why in result.stderr
    assert await rows_at(target) == before


@by_way(WAYS[1])
async def test_the_source_may_have_got_more_since_the_copy_stopped(source: str, target: str) -> None:
    await good(source, target)
    await meddle(source)
    async with opened(source) as backend:       # and what it counted is in events
        await Closer(gate_on(backend).engine).close(HOME, floor_to(backend.now(), 300) + 300)

    await good(source, target)

    assert_is_copy(await rows_at(target), await rows_at(source))
    assert await wrong_at(target) == []


@pytest.mark.parametrize("side", ["source", "target"])
async def test_neither_side_may_be_served_meanwhile(source: str, target: str, start: Any, side: str) -> None:
    start(database=source if side == "source" else target)

    result = await command(source, target)

    assert (result.exit_code, result.stdout) == (1, "")
    assert f"cannot open the {side} for exclusive use: another " in result.stderr


@pytest.mark.parametrize(("source_url", "target_url", "told"), [
    ("sqlite:///{tmp}/none.db", "sqlite:///{tmp}/b.db", "there is no database at"),
    ("sqlite:///{tmp}/a.db", "sqlite:///{tmp}/../{name}/a.db", "source and target are the same database"),
    ("sqlite:///{tmp}/a.db", "nonsense://somebody:hush@there/gate",
     "cannot open the target for exclusive use: there is no"),
    ("sqlite:///{tmp}/a.db", "sqlite:///{tmp}/no/folder.db", "cannot open the target for exclusive use: cannot open"),
])
async def test_what_cannot_be_copied_is_said_in_a_line_and_leaves_nothing_behind(
        tmp_path: Path, source_url: str, target_url: str, told: str) -> None:
    async with opened(f"sqlite:///{tmp_path}/a.db"):
        pass
    before = files(tmp_path)

    result = await command(*(url.format(tmp=tmp_path, name=tmp_path.name) for url in (source_url, target_url)))

    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert "hush" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert files(tmp_path) == before


class Shared(Memory):
    """A database that another process comes to, sooner or later."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> None:
        """Take part."""

    async def beat(self) -> None:
        self.looks -= 1

    def is_alone(self) -> bool:
        """Whether nobody has come yet."""
        return self.looks > 0

    def tell(self, news: News) -> None:
        """Tell nobody."""

    async def lead(self, job: str) -> bool:
        """Do everything."""
        return True


@pytest.mark.parametrize("looks", [1, 2, 4])
async def test_a_copy_stops_when_somebody_else_comes(looks: int) -> None:
    async with opened("memory:") as source:
        await fill(source)
        shared = Shared(looks)

        with pytest.raises(copy.Served, match="another process uses it"):
            await copied(source, shared)


class DropsParents(Memory):
    """Stores receipts without what they answer."""

    def _save(self, work: Work) -> None:
        work.written = {id: replace(receipt, parents=()) for id, receipt in work.written.items()}
        super()._save(work)


class LosesReceipts(Memory):
    """Acknowledges receipts and keeps none."""

    def _save(self, work: Work) -> None:
        work.written = {}
        super()._save(work)


class RefusesEvents(Memory):
    """Takes no event."""

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        def strict(work: Work) -> None:
            decide(work)
            if work.events:
                raise Refused("no events here")
        await super().transact(tenant_id, needs, strict)


@pytest.mark.parametrize(("kind", "told"), [
    (DropsParents, "the target returned a different row than was written: receipts row"),
    (LosesReceipts, "the target lost rows of receipts: "),
    (RefusesEvents, "the target refuses these tasks: no events here"),
])
async def test_a_target_that_does_not_keep_what_it_was_given_fails_the_copy(kind: Any, told: str) -> None:
    async with opened("memory:") as source:
        await fill(source)

        with pytest.raises(copy.CopyFailed, match=told):
            await copied(source, kind())


async def test_what_is_wrong_with_the_source_is_wrong_with_the_copy_and_verify_says_so(
        source: str, target: str) -> None:
    def open_nothing(work: Work) -> None:
        work.opened["no receipt"] = Principal("agent", "ada")

    async with opened(source) as backend:
        await backend.transact(HOME, Needs(), open_nothing)

    result = await command(source, target)

    assert result.exit_code == 1
    assert "obligation no receipt is in the index, but no such receipt exists" in result.stdout
    assert_is_copy(await rows_at(target), await rows_at(source))
