"""The archive: settled old receipts move there, needed ones stay, and all can be restored unchanged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs, Work
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.recount import wrong_levels
from asyncgate.conformance.test_carry import exported
from asyncgate.conformance.test_seals import Only
from asyncgate.conformance.verify import verify
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.settings import ArchiveSettings
from asyncgate.parts.receipts import archive

pytestmark = pytest.mark.anyio
DAY = 86_400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def gate(make_gate: Callable[..., Gate], folder: Path) -> Gate:
    """Return a gate with an archive."""
    return make_gate(archive=ArchiveSettings(directory=str(folder)))


async def list_stored(gate: Gate) -> list[stored.Receipt]:
    """Return the receipts in the database."""
    rows: list[stored.Receipt] = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Receipt))
    return rows


async def away(gate: Gate) -> list[stored.Archived]:
    """Return the pointers to archived receipts."""
    rows: list[stored.Archived] = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Archived))
    return rows


async def sound(gate: Gate, folder: Path) -> None:
    """Check that the database, its seals and its segments have no problems."""
    verdict = await verify(Only(gate))
    held = await verify_ledger(Only(gate), directory=str(folder))
    assert (verdict.problems, held.problems) == ([], [])
    assert await wrong_levels(gate.engine, gate.tenant_id) == []


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def run(gate: Gate, **more: Any) -> tuple[int, int, bool]:
    done = await gate.as_admin().run_archive(**more)
    return done.receipts, done.tasks_pruned, done.more


# Moving receipts.


@pytest.mark.parametrize(("days", "moves"), [(29.9, False), (30.1, True)])
async def test_a_chain_moves_when_its_youngest_receipt_is_old_enough(
        gate: Gate, folder: Path, days: float, moves: bool) -> None:
    await gate.create()     # open, so it stays
    offer = await gate.claim()
    assert offer is not None
    gate.skip(20 * DAY)
    late = await gate.finished("w2")
    gate.skip(days * DAY)

    assert (await run(gate))[0] == (4 if moves else 0)
    assert {row.task_id for row in await list_stored(gate)} == {offer.task_id} | ({late.task_id} if not moves
                                                                                  else set())
    await sound(gate, folder)


@pytest.mark.parametrize(("days", "moves"), [(6.9, False), (7.1, True)])
async def test_and_when_its_task_ended_long_enough_ago(
        make_gate: Callable[..., Gate], folder: Path, days: float, moves: bool) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(folder)), receipt_retention_days=1)
    await gate.finished()
    gate.skip(days * DAY)

    assert (await run(gate))[0] == (4 if moves else 0)


async def owed(gate: Gate) -> None:
    await gate.create()


async def leased(gate: Gate) -> None:
    await gate.leased(timeouts={"lease_ttl_seconds": 1800})


async def unlocated(gate: Gate) -> None:
    await gate.as_worker().complete(**under(await gate.leased()), result={})


async def scheduled(gate: Gate) -> None:
    """Create a live schedule from an ended task; its receipt names another task's receipt."""
    done = await gate.finished()
    offer = await gate.leased("cron", type="schedule.create")
    await gate.emit_receipt(**under(offer, worker_id="cron"), receipt_type="schedule.created", schedule_id="nightly",
                            parents=[done.obligation_receipt_id])     # by an admin, who may answer every receipt
    await gate.as_worker("cron").complete(**under(offer), result={}, artifacts=[{"uri": "x"}])


async def acknowledged_lately(gate: Gate) -> None:
    done = await gate.finished()
    gate.skip(35 * DAY)
    await gate.as_agent().ack_receipt(receipt_id=done.obligation_receipt_id)
    gate.skip(-35 * DAY)


NEEDED = [owed, leased, unlocated, scheduled, acknowledged_lately]


@pytest.mark.parametrize("story", NEEDED)
async def test_what_an_open_obligation_needs_stays_whole(
        gate: Gate, folder: Path, story: Callable[[Gate], Any]) -> None:
    await story(gate)
    before = await list_stored(gate)
    gate.skip(40 * DAY)

    assert await run(gate) == (0, 0, False)
    assert await list_stored(gate) == before
    await sound(gate, folder)


async def test_what_parents_join_moves_together(gate: Gate, folder: Path) -> None:
    await scheduled(gate)
    created = await gate.receipt(None, "schedule.created")
    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[created.receipt_id],
                                              schedule_id="nightly")
    count = len(await list_stored(gate))
    gate.skip(40 * DAY)

    assert (await run(gate))[0] == count
    assert await list_stored(gate) == []
    assert len({pointer.chain for pointer in await away(gate)}) == 1
    assert count == (await gate.as_admin().restore_archive(task_id=created.task_id)).receipts
    await sound(gate, folder)


async def test_a_task_whose_end_is_archived_is_run_again_and_linked_to_it(
        make_gate: Callable[..., Gate], folder: Path) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(folder)), task_retention_days=90)
    offer = await gate.finished()
    end = await gate.receipt(offer.task_id, "task.completed")
    gate.skip(40 * DAY)
    await gate.as_admin().run_archive()
    assert await gate.receipts(offer.task_id) == []         # only its receipts have moved

    made = await gate.as_agent().rerun_task(task_id=offer.task_id)

    assert (await gate.receipt(made.task_id, "task.assigned")).parents == [end.receipt_id]
    await sound(gate, folder)


async def test_what_cannot_move_keeps_nothing_else_from_it(gate: Gate, folder: Path) -> None:
    for story in (unlocated, leased, owed, acknowledged_lately):
        await gate.finished()
        await story(gate)
        await gate.claim()
    stay = len(await list_stored(gate)) - 4 * 4
    gate.skip(40 * DAY)

    assert (await run(gate))[0] == 16
    assert len(await list_stored(gate)) == stay
    await sound(gate, folder)


async def test_a_run_is_bounded_and_says_that_there_is_more(gate: Gate, folder: Path) -> None:
    for _ in range(5):
        await gate.finished()
    gate.skip(40 * DAY)

    assert await run(gate, most=8) == (8, 0, True)
    assert (await run(gate))[0] == 12
    await sound(gate, folder)


async def test_the_archive_is_no_bigger_for_running_again(gate: Gate, folder: Path) -> None:
    await gate.finished()
    gate.skip(31 * DAY)
    await run(gate)
    there = files(folder)

    assert (await run(gate))[0] == 0
    assert files(folder) == there
    assert [path.suffix for path in there if path.is_file()] == [".gz"]


# Reading the archive.


@pytest.fixture
async def moved(gate: Gate) -> dict[str, Any]:
    """Return the receipts of a chain that has moved to the archive."""
    offer = await gate.finished()
    await gate.as_agent().ack_receipt(receipt_id=offer.obligation_receipt_id)
    await gate.as_agent().bootstrap()
    before, shown = await list_stored(gate), await gate.receipts(offer.task_id)
    gate.skip(31 * DAY)
    assert (await run(gate))[0] == 5
    return {"task_id": offer.task_id, "duty": offer.obligation_receipt_id, "before": before, "shown": shown}


async def test_what_is_archived_is_in_no_list(gate: Gate, moved: dict[str, Any]) -> None:
    assert (await gate.as_agent().bootstrap()).attention.inbox_receipts == []
    assert await gate.receipts() == []
    assert await gate.owed() == []
    with refused("receipt_not_found"):
        await gate.as_agent().get_receipt(receipt_id=moved["duty"])


async def test_the_archive_shows_it_as_it_was(gate: Gate, moved: dict[str, Any]) -> None:
    by_task = (await gate.as_admin().list_archived_receipts(task_id=moved["task_id"])).receipts
    whole = (await gate.as_admin().list_archived_receipts()).receipts
    receipts = (await gate.as_admin().list_archived_receipts(receipt_id=moved["duty"])).receipts

    assert encode_json(by_task) == encode_json(moved["shown"])
    assert encode_json(whole) == encode_json(by_task)
    assert [row.receipt_id for row in receipts] == [moved["duty"]]


async def test_the_archive_is_listed_page_by_page(gate: Gate, moved: dict[str, Any]) -> None:
    first = await gate.as_admin().list_archived_receipts(limit=3)
    second = await gate.as_admin().list_archived_receipts(limit=3, cursor=first.next_cursor)

    assert [row.receipt_id for row in (*first.receipts, *second.receipts)] == [
        row.receipt_id for row in moved["before"]]
    assert second.next_cursor is None


@pytest.mark.parametrize("pruned", [False, True])
async def test_who_could_read_a_receipt_before_can_read_it_in_the_archive(
        make_gate: Callable[..., Gate], folder: Path, pruned: bool) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(folder)), task_retention_days=10 if pruned else 3650)
    task_id = await gate.create()
    lost = await gate.claim("w1")
    assert lost is not None
    await gate.as_worker("w1").release_lease(**under(lost))
    last = await gate.claim("w2")
    assert last is not None
    await gate.as_worker("w2").complete(**under(last), artifacts=[{"uri": "file:///out"}])
    shown = encode_json(await gate.receipts(task_id))
    gate.skip(31 * DAY)
    await run(gate)

    for reader in (gate.as_agent(), gate.as_worker("w2"), gate.as_admin()):
        assert encode_json((await reader.list_archived_receipts(task_id=task_id)).receipts) == shown
    for parent in (last.obligation_receipt_id, lost.obligation_receipt_id):
        assert (await gate.as_worker("w2").list_archived_receipts(receipt_id=parent)).receipts
    mine = (await gate.as_worker("w1").list_archived_receipts(task_id=task_id)).receipts
    assert [row.receipt_type for row in mine] == ["task.accepted"]
    assert (await gate.as_worker("w3").list_archived_receipts(task_id=task_id)).receipts == []
    assert (await gate.as_agent("bob").list_archived_receipts(task_id=task_id)).receipts == []
    with refused("forbidden"):
        await gate.as_agent().list_archived_receipts()


async def test_a_page_of_theirs_is_full_while_more_remains(gate: Gate, moved: dict[str, Any]) -> None:
    worker, seen, cursor = gate.as_worker("w1"), [], None
    for _ in range(4):
        page = await worker.list_archived_receipts(task_id=moved["task_id"], limit=1, cursor=cursor)
        seen += [row.receipt_id for row in page.receipts]
        cursor = page.next_cursor

    assert seen == [row.receipt_id for row in moved["shown"]][:4]
    assert cursor is not None


async def test_another_tenant_has_none_of_it(gate: Gate, moved: dict[str, Any]) -> None:
    other = gate.stranger().as_admin()

    assert (await other.list_archived_receipts()).receipts == []
    assert (await other.list_archived_receipts(receipt_id=moved["duty"])).receipts == []
    with refused("receipt_not_found"):
        await other.restore_archive(task_id=moved["task_id"])


async def test_an_archived_obligation_is_discharged(gate: Gate, moved: dict[str, Any]) -> None:
    answers = [await gate.as_admin().check_terminator(parent_receipt_id=row.receipt_id) for row in moved["before"]]

    assert [answer.has_terminator for answer in answers] == [True, False, False, False, False]


async def test_a_reader_goes_on_from_a_receipt_that_has_moved(gate: Gate, moved: dict[str, Any]) -> None:
    fresh = await gate.create()

    receipts = await gate.as_admin().list_receipts(since_receipt_id=moved["duty"])

    assert [row.task_id for row in receipts.receipts] == [fresh]
    with refused("invalid_cursor"):
        await gate.stranger().as_admin().list_receipts(since_receipt_id=moved["duty"])


# Restoring.


async def test_what_comes_back_is_byte_for_byte_what_went(gate: Gate, moved: dict[str, Any], folder: Path) -> None:
    back = await gate.as_admin().restore_archive(task_id=moved["task_id"])

    assert (back.task_ids, back.receipts) == ([moved["task_id"]], 5)
    assert await list_stored(gate) == moved["before"]
    assert {row.delivered_at is None for row in moved["before"]} == {True, False}
    assert await away(gate) == []
    await sound(gate, folder)


async def test_it_can_go_and_come_again_and_again(gate: Gate, moved: dict[str, Any], folder: Path) -> None:
    for _ in range(2):
        await gate.as_admin().restore_archive(task_id=moved["task_id"])
        assert (await run(gate))[0] == 5

    await sound(gate, folder)
    with refused("receipt_not_found"):
        await gate.as_admin().restore_archive(task_id="none")


async def test_an_export_has_what_is_archived_too(gate: Gate, moved: dict[str, Any]) -> None:
    await gate.create()

    receipts = await exported(gate, 2)

    assert [row.receipt_id for row in receipts] == [row.receipt_id
                                                    for row in (*moved["before"], *await list_stored(gate))]


# Tasks.


async def test_a_task_goes_when_its_time_has_come_and_its_key_is_free_again(gate: Gate, folder: Path) -> None:
    offer = await gate.finished(idempotency_key="once")
    await gate.create(type="stays")
    gate.skip(29 * DAY)
    assert (await run(gate))[1] == 0
    gate.skip(1.1 * DAY)

    assert await run(gate) == (4, 1, False)
    with refused("task_not_found"):
        await gate.as_agent().get_task(task_id=offer.task_id)
    assert await gate.create(idempotency_key="once") != offer.task_id
    await sound(gate, folder)


async def test_the_chain_of_a_task_that_has_gone_comes_back_without_it(gate: Gate, folder: Path) -> None:
    offer = await gate.finished()
    gate.skip(31 * DAY)
    assert (await run(gate))[1] == 1

    assert (await gate.as_admin().restore_archive(task_id=offer.task_id)).receipts == 4
    await sound(gate, folder)
    assert len((await gate.as_admin().list_receipts(task_id=offer.task_id)).receipts) == 4
    with refused("task_not_found"):
        await gate.as_agent().list_receipts(task_id=offer.task_id)
    assert (await run(gate))[0] == 4
    with refused("task_not_found"):
        await gate.as_admin().list_receipts(task_id=offer.task_id)


# Failures.


async def test_without_a_folder_there_is_no_archive(make_gate: Callable[..., Gate]) -> None:
    with refused("invalid_request"):
        await make_gate().as_admin().run_archive()


async def test_a_damaged_segment_is_named_and_gives_nothing_back(
        gate: Gate, moved: dict[str, Any], folder: Path) -> None:
    [segment] = [path for path in files(folder) if path.is_file()]
    text = bytearray(segment.read_bytes())
    text[len(text) // 2] ^= 1
    segment.write_bytes(text)

    held = await verify_ledger(Only(gate), directory=str(folder))

    assert held.problems
    assert all(segment.name in problem for problem in held.problems)
    with refused("archive_unavailable"):
        await gate.as_admin().restore_archive(task_id=moved["task_id"])
    assert await list_stored(gate) == []


async def test_pointers_are_not_believed_where_nobody_says_where_the_archive_is(
        gate: Gate, moved: dict[str, Any]) -> None:
    """The writer of a pointer could also have deleted the receipt."""
    [problem] = (await verify_ledger(Only(gate))).problems

    assert "set its folder (archive.directory)" in problem


@pytest.mark.parametrize("segment", ["invented.jsonl", "../elsewhere.jsonl", "/etc/hostname", ""])
async def test_a_pointer_to_what_is_not_in_the_archive_is_found(
        gate: Gate, moved: dict[str, Any], folder: Path, segment: str) -> None:
    """The attack: a forged pointer replaces a deleted receipt; its digest matches the seals."""
    forged = await forge(gate, segment=segment or None)

    held = await verify_ledger(Only(gate), directory=str(folder))

    assert held.problems
    assert any(forged.receipt_id in problem or forged.segment in problem for problem in held.problems)


async def forge(gate: Gate, segment: str | None) -> stored.Archived:
    """Write a pointer for a receipt of a new task, as the database role may; None reuses another pointer's line."""
    [true, *_] = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Archived))
    task_id = await gate.create()
    [receipt] = await gate.receipts(task_id)
    forged: stored.Archived = replace(true, receipt_id=receipt.receipt_id, task_id=task_id,
                                      segment=segment or true.segment,
                     digest=hashlib.sha256(b"whatever fits").hexdigest())

    def write(work: Work) -> None:
        work.keep_record(forged)
    await gate.backend.transact(gate.tenant_id, Needs(), write)
    return forged


async def test_a_segment_that_is_gone_is_named(gate: Gate, moved: dict[str, Any], folder: Path) -> None:
    [segment] = [path for path in files(folder) if path.is_file()]
    segment.unlink()

    assert segment.name in (await verify_ledger(Only(gate), directory=str(folder))).problems[0]
    with refused("archive_unavailable"):
        await gate.as_admin().list_archived_receipts()


async def test_a_full_disk_is_told_and_no_unfinished_file_stays(
        gate: Gate, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await gate.finished()
    gate.skip(31 * DAY)

    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with refused("archive_unavailable"):
            await archive.archive_receipts(gate.engine, gate.tenant_id, 1000)

    assert [path for path in files(folder) if path.suffix] == []
    assert (await archive.archive_receipts(gate.engine, gate.tenant_id, 1000)).receipts == 4


async def test_what_changed_while_its_segment_was_written_stays(
        gate: Gate, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = await gate.finished()
    gate.skip(31 * DAY)
    ages = archive.Ages.of(gate.engine.settings, gate.now(), stored.SealHead(last_id="f"))
    [chain] = [old async for old in archive.old_chains(gate.engine, gate.tenant_id, ages)]
    await gate.as_agent().ack_receipt(receipt_id=offer.obligation_receipt_id)

    await archive.move_chains(gate.engine, gate.tenant_id, ages, [chain], done := archive.ArchiveTally())

    assert (done.receipts, await away(gate)) == (0, [])
    assert len(await list_stored(gate)) == 5


async def test_a_crash_behind_the_segment_loses_nothing_and_the_next_run_finishes(
        gate: Gate, folder: Path) -> None:
    await gate.finished()
    gate.skip(31 * DAY)
    ages = archive.Ages.of(gate.engine.settings, gate.now(), stored.SealHead(last_id="f"))
    [chain] = [old async for old in archive.old_chains(gate.engine, gate.tenant_id, ages)]
    rows = [receipt for _, receipt in sorted(chain.receipts.items())]
    name = archive.write_segment(folder, gate.tenant_id, rows)      # the process dies here

    assert len(await list_stored(gate)) == 4
    await run(gate)

    assert {pointer.segment for pointer in await away(gate)} == {name}
    await sound(gate, folder)


async def test_the_database_lets_no_receipt_go_that_has_no_pointer(gate: Gate) -> None:
    await gate.finished()
    [first, *_] = before = await list_stored(gate)

    def drop(engine: Engine, work: Work, caller: Caller, ask: wire.Ask) -> None:
        work.drop_record(stored.Receipt, first.receipt_id)

    def load(needs: Needs, caller: Caller, ask: wire.Ask) -> None:
        needs.receipts.add(first.receipt_id)

    if type(getattr(gate.backend, "backend", gate.backend)).__name__ == "Memory":
        pytest.skip("memory trusts the rules")
    with contextlib.suppress(errors.GateError):     # SQLite refuses the batch, Postgres leaves the row
        await gate.engine.write(drop, load, gate.engine.make_own_caller(gate.tenant_id), wire.Ask())
    assert await list_stored(gate) == before
