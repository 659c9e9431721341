"""Seals: whatever is done to a sealed receipt behind the gate's back is found and named."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, refused
from asyncgate.conformance.verify_ledger import Sealed, verify_ledger
from asyncgate.parts.model.erased import write_note
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Entry, Receipt, Seal, SealHead
from asyncgate.parts.receipts.sealing import seal
from asyncgate.parts.receipts.seals import START, SealChain, entry_digest, make_seal, receipt_digest, seal_head
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
TENANT = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.db"


@pytest.fixture
async def gate(path: Path) -> AsyncIterator[Gate]:
    backend = await open_backend(f"sqlite:///{path}")
    yield Gate(Engine(backend, Settings()), TENANT)
    await backend.close()


async def checked(path: Path, *anchors: str) -> Sealed:
    backend = await open_backend(f"sqlite:///{path}")
    try:
        return await verify_ledger(backend, anchors=anchors)
    finally:
        await backend.close()


def damage(path: Path, sql: str, **given: Any) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        changed = db.execute(sql, given).rowcount
        db.commit()
    return changed


@pytest.fixture
async def ids(gate: Gate) -> list[str]:
    """Receipts of two sealed stretches, and one that is not sealed yet."""
    await gate.finished()
    await gate.as_admin().seal_receipts()
    await gate.finished()
    await gate.as_admin().seal_receipts()
    await gate.create()
    return [receipt.receipt_id for receipt in await gate.receipts()]


async def test_what_nobody_has_touched_is_as_it_was_sealed(path: Path, ids: list[str]) -> None:
    report = await checked(path)

    assert (report.problems, report.seals, report.receipts, report.unsealed) == ([], 2, 9, 1)


COLUMNS = [name for name in Receipt.__struct_fields__ if name not in ("receipt_id", "parents", "delivered_at")]


@pytest.mark.parametrize("column", [*COLUMNS, "parent_id"])
async def test_a_change_to_any_part_of_a_receipt_is_found_and_the_receipt_is_named(
        path: Path, ids: list[str], column: str) -> None:
    value = f"{column} + 1" if column == "created_at" else f"coalesce({column}, '') || 'x'"
    assert damage(path, f"UPDATE receipts SET {column} = {value} WHERE receipt_id = :id", id=ids[5]) == 1

    assert (await checked(path)).problems == [f"tenant {TENANT}: receipt {ids[5]} is not what was sealed (seal 2)"]


async def test_a_further_parent_is_part_of_it(path: Path, ids: list[str]) -> None:
    damage(path, "INSERT INTO edges VALUES (:tenant, :id, :parent)", tenant=TENANT, id=ids[3], parent=ids[0])

    assert (await checked(path)).problems == [f"tenant {TENANT}: receipt {ids[3]} is not what was sealed (seal 1)"]


async def test_a_gap_is_found_and_its_neighbours_are_named(path: Path, ids: list[str]) -> None:
    damage(path, "DELETE FROM receipts WHERE receipt_id IN (:first, :second)", first=ids[5], second=ids[6])

    assert (await checked(path)).problems == [
        f"tenant {TENANT}: 2 receipts are missing between {ids[4]} and {ids[7]} (seal 2)"]


async def test_a_receipt_that_is_slipped_in_is_named(path: Path, ids: list[str]) -> None:
    new = f"{ids[2]}0"
    damage(path, f"""INSERT INTO receipts SELECT tenant_id, :new, 'new', {', '.join(COLUMNS[1:])}, parent_id
                     FROM receipts WHERE receipt_id = :id""", id=ids[2], new=new)

    assert (await checked(path)).problems == [
        f"tenant {TENANT}: receipt {new} was not there when its time was sealed (seal 1)"]


async def test_two_receipts_that_change_places_are_both_named(path: Path, ids: list[str]) -> None:
    for old, new in ((ids[1], "-"), (ids[2], ids[1]), ("-", ids[2])):
        damage(path, "UPDATE receipts SET receipt_id = :new WHERE receipt_id = :old", old=old, new=new)

    assert (await checked(path)).problems == [
        f"tenant {TENANT}: receipt {id} is not what was sealed (seal 1)" for id in ids[1:3]]


@pytest.mark.parametrize("column", ["last_id", "count", "digest", "marks", "sealed_at", "hash", "late"])
async def test_a_change_to_a_seal_is_found(path: Path, ids: list[str], column: str) -> None:
    value = f"{column} + 1" if column in ("count", "sealed_at") else f"{column} || 'x'"
    damage(path, f"UPDATE seals SET {column} = {value} WHERE number = 1")

    assert f"tenant {TENANT}: seal 1 was changed after it was written" in (await checked(path)).problems


@pytest.mark.parametrize(("gone", "says"), [
    (1, ["seal 1 is missing: the next one is number 2"]),
    (2, ["the seals end with number 1, {first}, but number 2, {second}, was the last one written"])])
async def test_a_seal_that_is_taken_away_is_missed(
        gate: Gate, path: Path, ids: list[str], gone: int, says: list[str]) -> None:
    hashes = [row.hash[:16] for row in await gate.backend.page(TENANT, Rows(Seal))]
    damage(path, "DELETE FROM seals WHERE number = :gone", gone=gone)

    problems = (await checked(path)).problems

    for template in says:
        assert f"tenant {TENANT}: " + template.format(first=hashes[0], second=hashes[1]) in problems


async def test_a_whole_new_chain_over_other_receipts_is_found_by_a_seal_that_was_noted(
        gate: Gate, path: Path, ids: list[str]) -> None:
    noted = await gate.as_admin().seal_receipts()
    anchor = f"{noted.number}:{noted.hash}"
    assert (await checked(path, anchor)).problems == []

    damage(path, "UPDATE receipts SET from_id = 'eve' WHERE receipt_id = :id", id=ids[1])
    for table in ("seals", "seal_heads"):
        damage(path, f"DELETE FROM {table}")
    await seal(Engine(gate.backend), TENANT)

    assert (await checked(path)).problems == []
    assert (await checked(path, anchor)).problems == [
        f"the recorded seal {anchor} is missing: its receipts were rewritten"]


async def test_the_command_names_what_is_wrong_and_prints_the_last_seal(path: Path, ids: list[str]) -> None:
    command = ["verify", "--ledger", "--database", f"sqlite:///{path}"]
    sound = await asyncio.to_thread(CliRunner().invoke, main, command)
    damage(path, "UPDATE receipts SET created_at = 0 WHERE receipt_id = :id", id=ids[0])
    wrong = await asyncio.to_thread(CliRunner().invoke, main, command)

    assert (sound.exit_code, wrong.exit_code) == (0, 1), sound.output + wrong.output
    assert f"tenant {TENANT}: the last seal is 2:" in sound.output
    assert "ledger: 9 receipts, 2 seals; 1 receipt since the last seal" in sound.output
    assert f"receipt {ids[0]} is not what was sealed (seal 1)" in wrong.output


# When it happens.


async def test_upkeep_seals_what_is_new_and_then_has_nothing_to_do(gate: Gate) -> None:
    upkeep = Upkeep(gate.engine)
    await gate.create()
    done = []
    for _ in range(2):
        await upkeep.once("seal")
        done.append(upkeep.duties["seal"].last_done)
    await gate.create()
    await upkeep.once("seal")

    assert upkeep.duties["seal"].failures == 0
    assert [*done, upkeep.duties["seal"].last_done] == [1, 0, 1]
    head = await gate.backend.record(TENANT, SealHead)
    assert head is not None
    assert (head.number, head.last_id) == (2, (await gate.receipts())[-1].receipt_id)


async def test_a_gate_whose_receipts_another_ledger_keeps_seals_none(gate: Gate) -> None:
    assert "seal" not in Upkeep(Engine(gate.backend, Settings(receipt_mode="memorygate_integrated"))).duties


async def test_of_two_who_seal_at_once_one_does(gate: Gate) -> None:
    await gate.create()
    head = await gate.backend.record(TENANT, SealHead)

    ends = await asyncio.gather(seal(gate.engine, TENANT), seal(gate.engine, TENANT))

    assert head is None
    assert [end.number for end in ends] == [1, 1]


async def test_a_seal_is_never_written_over(gate: Gate, path: Path, ids: list[str]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in ("UPDATE seals SET hash = ''", "DELETE FROM seals",
                          "INSERT OR REPLACE INTO seals SELECT * FROM seals"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)


# The chain by itself.


def receipt(number: int, **more: Any) -> Receipt:
    return replace(Receipt(f"{number:04d}", f"key {number}", "task.assigned", float(number), "agent", "a", "agent", "b",
                           "t", None, None, "here", "hash", "{}"), **more)


def chained(rows: list[Receipt], size: int) -> list[Seal]:
    head, seals = START, []
    for at in range(0, len(rows), size):
        part = rows[at:at + size]
        seals.append(make_seal(head, [receipt_digest(row) for row in part], part[-1].receipt_id, 1.0))
        head = seal_head(seals[-1])
    return seals


def problems(rows: list[Receipt], seals: list[Seal]) -> list[str]:
    chain = SealChain()
    for row in seals:
        chain.add(row)
    for receipt in rows:
        chain.see(receipt.receipt_id, receipt_digest(receipt))
    return chain.close()


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_any_rows_that_are_not_those_that_were_sealed_are_a_problem(count: int, size: int, data: Any) -> None:
    rows = [receipt(number) for number in range(count)]
    seals = chained(rows, size)
    kept = data.draw(st.lists(st.sampled_from(rows), unique=True))
    changed = data.draw(st.sets(st.sampled_from(range(len(kept)))) if kept else st.just(set()))
    kept = [replace(row, body="{ }") if at in changed else row for at, row in enumerate(kept)]

    assert problems(rows, seals) == []
    assert (problems(kept, seals) == []) is (kept == rows)


async def test_the_time_of_delivery_is_no_part_of_a_receipt() -> None:
    assert receipt_digest(receipt(1)) == receipt_digest(receipt(1, delivered_at=5.0))


async def test_a_gate_with_skeletons_seals_exports_and_imports_nothing(gate: Gate) -> None:
    await gate.create()
    bare = Gate(Engine(gate.backend, Settings(receipt_mode="memorygate_integrated")), TENANT).as_admin()

    for operation in ("seal_receipts", "export_receipts", "run_archive"):
        with refused("invalid_request"):
            await getattr(bare, operation)()
    with refused("invalid_request"):
        await bare.import_receipts(receipts=(await gate.as_admin().export_receipts()).receipts)


# The chain itself.


def digest_of(receipt_id: str) -> bytes:
    return hashlib.sha256(receipt_id.encode()).digest()


@pytest.mark.parametrize(("changed", "lost", "problems"), [
    ("", "", []),
    ("2", "", ["receipt 2 is not what was sealed (seal 2)"]),
    ("", "4", ["receipt 4 is missing: seal 3 lists it"]),
    ("1", "2", ["receipt 1 is not what was sealed (seal 1)", "receipt 2 is missing: seal 2 lists it"]),
    ("5", "3", ["1 receipt is missing between 1 and 3 (seal 1)", "receipt 5 is not what was sealed (seal 4)"])])
def test_receipts_that_came_late_are_compared_with_the_seals_that_list_them(
        changed: str, lost: str, problems: list[str]) -> None:
    chain, head = SealChain(), START
    for covered, last, late in (("13", "3", ""), ("02", "3", "02"), ("4", "3", "4"), ("5", "5", "")):
        chain.add(sealed := make_seal(head, [*map(digest_of, covered)], last, 1.0, late))
        head = seal_head(sealed)

    for receipt_id in "01234567":
        if receipt_id != lost:
            chain.see(receipt_id, digest_of("x" if receipt_id == changed else receipt_id))
    chain.ends(head)

    assert chain.close() == problems
    assert (chain.seen, chain.unsealed) == (8 - bool(lost), 2)


def test_a_seal_whose_marks_cannot_be_read_tells_of_other_receipts_nevertheless() -> None:
    row = receipt(1)
    [sealed] = chained([row], 1)

    assert problems([replace(row, body="{ }")], [replace(sealed, marks="x")]) == [
        "seal 1 was changed after it was written",
        "receipt 0001 was not there when its time was sealed (seal 1)"]


def test_a_receipt_that_comes_twice_is_out_of_order() -> None:
    chain = SealChain()
    for receipt_id in "11":
        chain.see(receipt_id, digest_of(receipt_id))

    assert chain.close() == ["receipt 1 stands behind 1, which is out of order"]


def test_a_receipt_of_an_older_release_is_hashed_without_a_salt() -> None:
    *facts, _, parents, _ = astuple(old := receipt(1, parents=("0000",)))

    assert receipt_digest(old).hex() == hashlib.sha256(msgspec.json.encode((*facts, parents))).hexdigest()
    assert receipt_digest(replace(old, salt="s")).hex() == hashlib.sha256(
        msgspec.json.encode((*facts, parents, "s"))).hexdigest()


def test_what_is_erased_has_the_digest_that_it_had() -> None:
    row, entry = receipt(1), Entry("r", "a", "plan.made", "", "service", "s", "agent", "ada", "", "d", "{}")
    of_row, of_entry = (write_note(TENANT, digest.hex()) for digest in (receipt_digest(row), entry_digest(entry)))

    assert receipt_digest(replace(row, body=of_row, from_id="erased-1")) == receipt_digest(row)
    assert entry_digest(replace(entry, content=of_entry, from_id="erased-1")) == entry_digest(entry)


def test_an_entry_of_an_older_release_is_hashed_without_an_author() -> None:
    old = Entry("r", "a", "plan.made", "", "service", "s", "agent", "ada", "", "d", "{}")
    new = replace(old, stated_kind="service", stated_id="s", stated_role="agent")

    assert entry_digest(old).hex() == hashlib.sha256(msgspec.json.encode(astuple(old)[:-3])).hexdigest()
    assert entry_digest(new).hex() == hashlib.sha256(msgspec.json.encode(astuple(new))).hexdigest()
