"""Retention: what nobody needs any more is forgotten after the days that its setting says, and nothing else is."""

from __future__ import annotations

import pytest

from asyncgate.conformance.harness import Gate, refused
from asyncgate.conformance.test_seals import Only
from asyncgate.conformance.verify import verify
from asyncgate.parts.identity.audit import PRUNED, prune_lines
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored
from asyncgate.parts.model.erased import is_erased_line
from asyncgate.parts.operating.retention import KEPT, RowPruner
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
DAY = 86_400


async def prune(gate: Gate) -> int:
    """Delete what is old of this tenant."""
    return sum([await RowPruner(gate.engine).prune(gate.tenant_id, kept) for kept in KEPT])


async def test_a_principal_that_does_not_call_for_long_is_forgotten(gate: Gate) -> None:
    await gate.as_worker("old").lease_next()
    await gate.as_worker("new").lease_next()
    await Upkeep(gate.engine).once("presence")
    gate.skip(399 * DAY)
    await gate.as_worker("new").lease_next()
    await Upkeep(gate.engine).once("presence")
    assert await prune(gate) == 0
    gate.skip(2 * DAY)

    assert await prune(gate) == 1
    assert [row.id async for row in read_rows(gate.engine, gate.tenant_id, stored.Presence)] == ["new"]


async def test_a_bulk_is_forgotten_days_after_its_end(gate: Gate) -> None:
    await gate.create()
    preview = await gate.as_admin().preview_bulk(action="cancel", type="demo")
    while not (bulk := await gate.as_admin().run_bulk(confirmation=preview.confirmation)).ended:
        pass
    gate.skip(89 * DAY)
    assert await prune(gate) == 0
    gate.skip(2 * DAY)

    assert await prune(gate) == 1
    with refused("bulk_not_found"):
        await gate.as_admin().get_bulk(bulk_id=bulk.bulk_id)
    assert [row async for row in read_rows(gate.engine, gate.tenant_id, stored.Bulk)] == []


async def test_lines_of_the_audit_log_that_an_erasure_has_changed_go_like_others(gate: Gate) -> None:
    gate.skip(-92 * DAY)        # the database itself deletes no line that is younger by its own clock
    for of in ("first", "second"):
        await gate.as_admin().issue_key(name=of, role="agent", principal_kind="agent", principal_id=of)
    await gate.as_admin().erase_principal(principal_kind="agent", principal_id="first", confirm="first")
    lines = [row async for row in read_rows(gate.engine, gate.tenant_id, stored.Audit)]
    assert any(is_erased_line(line) for line in lines)
    gate.skip(92 * DAY)

    assert await prune_lines(gate.engine, gate.tenant_id) == len(lines)

    [left] = [row async for row in read_rows(gate.engine, gate.tenant_id, stored.Audit)]
    assert (left.event, left.number) == (PRUNED, len(lines) + 1)
    assert (await verify(Only(gate))).problems == []
