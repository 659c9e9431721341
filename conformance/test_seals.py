"""Seals cover every receipt exactly once, also during concurrent writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate
from asyncgate.conformance.verify_ledger import Sealed, verify_ledger
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.walking import walk
from asyncgate.parts.receipts.sealing import seal

pytestmark = pytest.mark.anyio


class Only:
    """A backend with only the tenant of this test, because tests may share a database."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.record, self.page = gate, gate.backend.record, gate.backend.page

    async def tenants(self) -> list[str]:
        """Return the tenant of the test."""
        return [self.gate.tenant_id]


async def checked(gate: Gate) -> Sealed:
    return await verify_ledger(Only(gate))


async def test_a_receipt_whose_body_was_taken_away_is_named_because_sealing_stops_there(gate: Gate) -> None:
    await gate.finished()
    await gate.as_admin().seal_receipts()
    await gate.finished()
    bare = (await gate.receipts())[4].receipt_id

    class Robbed(Only):
        def __init__(self) -> None:
            super().__init__(gate)
            self.page = self.read

        async def read(self, tenant_id: str, query: Any) -> list[Any]:
            rows = await gate.backend.page(tenant_id, query)
            return [replace(row, body="") if isinstance(row, stored.Receipt) and row.receipt_id == bare else row
                    for row in rows]

    assert (await verify_ledger(Robbed())).stopped == {gate.tenant_id: bare}
    assert (await checked(gate)).stopped == {}


async def test_seals_cover_all_receipts_up_to_the_youngest(gate: Gate) -> None:
    await gate.finished()
    end = await gate.as_admin().seal_receipts()
    await gate.create()

    report = await checked(gate)

    assert (report.problems, report.seals, report.receipts, report.unsealed) == ([], 1, 5, 1)
    assert end.last_receipt_id == (await gate.receipts())[-2].receipt_id


async def test_nothing_new_is_not_sealed_again(gate: Gate) -> None:
    await gate.create()

    ends = [await gate.as_admin().seal_receipts() for _ in range(2)]

    assert ends[0] == ends[1]
    assert ends[0].number == 1


async def test_no_receipt_slips_in_under_a_seal_while_others_write(gate: Gate) -> None:
    begun = asyncio.Event()

    async def write(times: int) -> None:
        for _ in range(times):
            await gate.create()
        await begun.wait()      # a busy machine seals late
        await gate.create()

    async def keep_sealing(beside: Gate) -> None:
        while True:
            if (await seal(beside.engine, beside.tenant_id)).number:
                begun.set()
            await asyncio.sleep(0)      # with the memory backend nothing else yields to the writers

    sealers = [asyncio.create_task(keep_sealing(peer)) for peer in (gate, gate.beside())]
    await asyncio.gather(*[write(14) for _ in range(8)])
    for sealer in sealers:
        sealer.cancel()
    await asyncio.gather(*sealers, return_exceptions=True)
    await gate.engine.batches.wait_for_all()
    await seal(gate.engine, gate.tenant_id)

    report = await checked(gate)

    assert (report.problems, report.receipts, report.unsealed) == ([], 120, 0)
    assert report.seals > 1


async def test_seals_are_listed_oldest_first_and_page_by_page(gate: Gate) -> None:
    for _ in range(3):
        await gate.create()
        await gate.as_admin().seal_receipts()

    first = await gate.as_admin().list_seals(limit=2)
    second = await gate.as_admin().list_seals(limit=2, cursor=first.next_cursor)

    assert [row.number for row in (*first.seals, *second.seals)] == [1, 2, 3]
    assert second.next_cursor is None
    head = await gate.backend.record(gate.tenant_id, stored.SealHead)
    assert head is not None
    assert second.seals[-1].hash == head.hash


async def test_the_last_seals_can_be_asked_for(gate: Gate) -> None:
    for _ in range(3):
        await gate.create()
        await gate.as_admin().seal_receipts()

    assert [row.number for row in (await gate.as_admin().list_seals(last=2)).seals] == [2, 3]
    assert [row.number for row in (await gate.as_admin().list_seals(last=9)).seals] == [1, 2, 3]
    assert [row.number for row in (await gate.as_admin().list_seals(last=3, after=2)).seals] == [3]


async def test_the_seals_of_a_tenant_are_its_own(gate: Gate) -> None:
    await gate.create()
    await gate.as_admin().seal_receipts()
    other = gate.stranger()

    assert (await other.as_admin().list_seals()).seals == []
    assert (await other.as_admin().seal_receipts()).number == 0


async def test_a_write_that_is_refused_leaves_the_chain_as_it_is(gate: Gate) -> None:
    await gate.create()
    await gate.as_admin().seal_receipts()
    with pytest.raises(errors.GateError):
        await gate.as_agent().cancel_task(task_id="none")

    assert [len(page) async for page in walk(gate.backend, gate.tenant_id, queries.Rows(stored.Receipt))] == [1]
    assert (await checked(gate)).problems == []
