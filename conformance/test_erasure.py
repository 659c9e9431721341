"""Erasure (spec 21.12.1): what is kept of a principal or a tenant goes; seals, chains and others stay as they are."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.test_seals import Only
from asyncgate.conformance.verify import verify
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.receipts.seals import receipt_digest

pytest.importorskip("asyncgate.extras.privacy", reason="what it tries is an extra, and none is installed")
pytestmark = pytest.mark.anyio
MARK = "zq-marked"


async def live(gate: Gate) -> None:
    """Let ada own work, and work for bob; each word of hers has the mark."""
    ada = {"by": MARK}
    await gate.finished()
    done = await gate.create(type=f"{MARK}-type", payload={"text": MARK}, task_summary=MARK, instructions=MARK,
                             idempotency_key=MARK, requirements={"capabilities": [MARK]}, **ada)
    offer = await gate.claim(capabilities=[MARK])
    assert offer is not None
    assert offer.task_id == done
    await gate.as_worker().report_progress(**under(offer), progress={"at": MARK})
    await gate.as_worker().complete(**under(offer), result={"text": MARK}, artifacts=[{"uri": f"file:///{MARK}"}])
    await gate.create(type=f"{MARK}-waits", payload=MARK, **ada)
    theirs = await gate.create(by="bob", payload="bob's")
    offer = await gate.claim(MARK, accept_types=["demo"])
    assert offer is not None
    assert offer.task_id == theirs
    await gate.as_admin().issue_key(name="a key", principal_kind="agent", principal_id=MARK)
    await gate.as_admin().seal_receipts()


async def text_of(gate: Gate) -> str:
    return encode_json(await gate.everything()).decode()


async def problems_of(gate: Gate) -> list[str]:
    return [*(await verify(Only(gate))).problems, *(await verify_ledger(Only(gate))).problems]


async def erase(gate: Gate, **more: Any) -> Any:
    for kind in ("agent", "worker"):
        report = await gate.as_admin().erase_principal(principal_kind=kind, principal_id=MARK, confirm=MARK, **more)
    return report


async def test_nothing_names_the_principal_any_more_and_all_still_verifies(gate: Gate) -> None:
    await live(gate)
    planned = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, plan=True)
    assert (planned.state, planned.in_flight, planned.obligations) == ("planned", 1, 1)

    report = await erase(gate)

    assert report.state == "erased"
    assert MARK not in await text_of(gate)
    await gate.as_admin().seal_receipts()
    assert await problems_of(gate) == []


async def test_to_do_it_again_changes_nothing(gate: Gate) -> None:
    await live(gate)
    await erase(gate)

    async with gate.unchanged():
        report = await erase(gate)

    assert (report.state, report.erasure_id, report.changes) == ("nothing", None, [])


async def test_nobody_can_confirm_a_guess_of_what_a_receipt_said(gate: Gate) -> None:
    """Who knows what stays, and guesses right what has gone, finds no hash that says so."""
    await live(gate)
    former = {row.receipt_id: row for row in (await gate.everything())["Receipt"]}
    await erase(gate)

    after = {row.receipt_id: row for row in (await gate.everything())["Receipt"]}
    gone = [row for id, row in former.items() if after[id].body != row.body]
    text = await text_of(gate)

    assert len(gone) > 5
    assert len({row.salt for row in former.values()}) == len(former)
    for row in gone:
        guessed = receipt_digest(replace(row, salt="")).hex()
        assert [word for word in (row.salt, row.hash, row.receipt_key, guessed, guessed[:16]) if word in text] == []


async def test_a_plan_that_takes_long_says_that_it_may_be_more_and_the_erasure_is_whole(
        gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.gather(*(gate.as_agent(MARK).create_task(type="demo", payload=None) for _ in range(5)))
    whole = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, plan=True)
    monkeypatch.setattr("asyncgate.extras.privacy.erasure.PLAN_SECONDS", -1.0)
    part = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, plan=True)
    done = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, confirm=MARK)

    assert (whole.at_least, part.at_least, done.state) == (False, True, "erased")
    assert sum(row.changed + row.deleted for row in part.changes) <= 1
    assert (part.in_flight, part.obligations) == (5, 5)


async def test_a_plan_reads_few_megabytes_at_a_time(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncgate.parts.identity.notices.MOST_PAGE_BYTES", 1000)
    monkeypatch.setattr("asyncgate.extras.privacy.erasure.COUNTED_TOGETHER", 2)
    for number in range(20):
        await gate.create(payload=f"{number}" * 600)
    read, page = list[int](), gate.backend.page

    async def watch(tenant_id: str, of: Any) -> Any:
        rows = await page(tenant_id, of)
        tasks = [row[0] if isinstance(of, queries.TaskFilter) else row for row in rows
                 if isinstance(of, queries.TaskFilter)
                 or of.table is stored.Task] if isinstance(of, queries.TaskFilter | queries.Rows) else []
        read.append(len(tasks))
        return rows
    monkeypatch.setattr(gate.backend, "page", watch)

    planned = await gate.as_admin().erase_principal(principal_kind="agent", principal_id="ada", plan=True)

    assert planned.in_flight == 20
    assert (max(read), sum(read)) == (8, 40)        # the first page is read without knowing what tasks have
    assert read.count(1) >= 12


async def test_a_plan_changes_nothing_and_without_confirmation_nothing_goes(gate: Gate) -> None:
    await live(gate)

    async with gate.unchanged():
        await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, plan=True)
        for confirm in (None, "another"):
            with refused("invalid_confirmation"):
                await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, confirm=confirm)


async def test_a_tenant_goes_as_a_whole_and_its_neighbour_stays_as_it_is(gate: Gate) -> None:
    operator, other = gate.beside(default_tenant_id=gate.tenant_id).as_admin(), gate.stranger()
    neighbour = gate.stranger()
    for peer in (other, neighbour):
        await live(peer)
        await operator.create_tenant(tenant=peer.tenant_id, name=f"{MARK} {peer.tenant_id}")
    before = await neighbour.everything()

    report = await operator.erase_tenant(tenant=other.tenant_id, confirm=other.tenant_id)

    assert report.state == "erased"
    text = await text_of(other)
    # As whole words: the hexadecimal text of a digest may begin with "ada".
    assert not [name for name in (MARK, "bob", "w1", "root", "ada") if re.search(rf'"{name}\b', text)]
    assert await neighbour.everything() == before
    assert await problems_of(other) == []
    async with other.unchanged():
        again = await operator.erase_tenant(tenant=other.tenant_id, confirm=other.tenant_id)
    assert again.changes == []
