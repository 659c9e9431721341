"""Identity in a backend: accounts, issued keys, and the audit log (spec 21.2.2, 21.7.4)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.verify import verify
from asyncgate.parts.identity import audit
from asyncgate.parts.model import queries, stored

pytestmark = pytest.mark.anyio

KEY = stored.Key("k1", "a hash", "a name", "worker", "w1", None, "worker", '["tasks:lease"]', None, None, 1.25, None,
                 None,
                 None, 1, 2.5, "human root")
FULL = replace(KEY, key_id="k2", principal_instance_id="i1", capabilities='["gpu"]', task_types='["a"]', expires_at=9.5,
               revoked_at=8.5, rotated_to="k3", version=7, last_used_at=3.5, places='["192.0.2.1"]')
ACCOUNT = stored.Account("a name", 1.5, "paid", 2.5, 3.5, "why", 10, 5, 4.5, "what it did", 6.5)


async def keep(gate: Gate, *rows: Any) -> None:
    """Store records unchanged."""
    def decide(work: Work) -> None:
        for row in rows:
            work.keep_record(row)
    await gate.backend.transact(gate.tenant_id, Needs(), decide)


async def lines_of(gate: Gate) -> list[stored.Audit]:
    """Read the whole audit log."""
    lines: list[stored.Audit] = []
    while page := await gate.backend.page(gate.tenant_id,
                                          queries.Rows(stored.Audit, stored.export_key(lines[-1]) if lines else "")):
        lines += page
    return lines


def unique(key: stored.Key) -> stored.Key:
    """Return a key with a unique id, because ids of keys are unique across tenants."""
    return replace(key, key_id=uuid.uuid4().hex[:12])


@pytest.mark.parametrize("key", [KEY, FULL], ids=["the least", "everything"])
async def test_a_key_comes_back_as_it_was_kept_and_as_it_was_changed(gate: Gate, key: stored.Key) -> None:
    for version in (first := unique(key), replace(first, revoked_at=10.5, last_used_at=11.5)):
        await keep(gate, version)

        assert await gate.backend.record(gate.tenant_id, stored.Key, version.key_id) == version
        assert await gate.backend.find_key(version.key_id) == (gate.tenant_id, False, version)
        assert await gate.backend.page(gate.tenant_id, queries.Rows(stored.Key)) == [version]


async def test_a_key_is_found_before_its_tenant_is_known_and_only_by_its_whole_id(gate: Gate) -> None:
    theirs, ours = gate.stranger(), unique(KEY)
    await keep(gate, ours)
    await keep(theirs, other := unique(FULL))

    assert await gate.backend.find_key(ours.key_id) == (gate.tenant_id, False, ours)
    assert await gate.backend.find_key(other.key_id) == (theirs.tenant_id, False, other)
    for name in ("", "%", "_" * 12, ours.key_id[:-1], ours.key_id.upper() + "x", uuid.uuid4().hex[:12]):
        assert await gate.backend.find_key(name) is None
    assert await gate.backend.record(gate.tenant_id, stored.Key, other.key_id) is None


async def test_a_key_tells_at_once_whether_its_tenant_is_suspended(gate: Gate) -> None:
    await keep(gate, key := unique(KEY))
    for suspended_at in (5.0, None):
        await keep(gate, replace(ACCOUNT, suspended_at=suspended_at))

        assert await gate.backend.find_key(key.key_id) == (gate.tenant_id, suspended_at is not None, key)


async def test_a_tenant_has_one_account_and_one_head_and_they_are_exported_once(gate: Gate) -> None:
    other = gate.stranger()
    for account in (stored.Account("", 1.0), ACCOUNT):
        await keep(gate, account, stored.AuditHead(3, "a hash"))

        assert await gate.backend.record(gate.tenant_id, stored.Account) == account
        for table, row in ((stored.Account, account), (stored.AuditHead, stored.AuditHead(3, "a hash"))):
            assert await gate.backend.page(gate.tenant_id, queries.Rows(table)) == [row]
            assert await gate.backend.page(gate.tenant_id, queries.Rows(table, stored.export_key(row))) == []
            assert await gate.backend.page(other.tenant_id, queries.Rows(table)) == []
    assert await gate.backend.record(other.tenant_id, stored.Account) is None
    assert gate.tenant_id in await gate.backend.tenants()


async def test_a_line_comes_back_as_it_was_written_and_in_its_place(gate: Gate) -> None:
    written: list[stored.Audit] = []

    def decide(work: Work) -> None:
        written.extend(audit.add_line(work, f"event {number}", "info", b'{"text":"\xc3\xa9 \\"\\u0001"}', number / 4)
                       for number in range(1500))
    needs = Needs()
    audit.load_head(needs, gate.caller, None)
    await gate.backend.transact(gate.tenant_id, needs, decide)

    assert await lines_of(gate) == written
    assert await gate.backend.record(gate.tenant_id, stored.AuditHead) == stored.AuditHead(1500, written[-1].hash)


async def test_a_log_is_one_chain_however_many_write_at_once(gate: Gate) -> None:
    operators = [gate.beside(default_tenant_id=gate.tenant_id).as_admin() for _ in range(3)]

    await asyncio.gather(*(operators[number % 3].set_limits(
        tenant=gate.tenant_id, tier="free" if number % 2 else "paid") for number in range(60)))

    lines = await lines_of(gate)
    assert [line.number for line in lines] == [*range(1, 61)]
    assert audit.find_break(lines, stored.AuditHead(0, "")) is None
    assert await gate.backend.record(gate.tenant_id, stored.AuditHead) == stored.AuditHead(60, lines[-1].hash)


async def write_lines(gate: Gate, ages: Iterable[float]) -> None:
    """Write lines of these ages in days."""
    def decide(work: Work) -> None:
        for number, age in enumerate(ages):
            audit.add_line(work, f"event {number}", "info", b"{}", work.now - age * 86_400)
    needs = Needs()
    audit.load_head(needs, gate.caller, None)
    await gate.backend.transact(gate.tenant_id, needs, decide)


async def problems(gate: Gate) -> list[str]:
    """Return the problems of the log."""
    return [problem for problem in (await verify(gate.backend)).problems if gate.tenant_id in problem]


async def test_old_lines_go_and_what_is_left_proves_where_it_begins(gate: Gate) -> None:
    """Spec 21.7.4: 90 days minimum."""
    await write_lines(gate, [95, 93, 92, 89, 94, 1])

    assert await audit.prune_lines(gate.engine, gate.tenant_id) == 3
    assert await audit.prune_lines(gate.engine, gate.tenant_id) == 0

    lines = await lines_of(gate)
    assert [line.number for line in lines] == [4, 5, 6, 7]
    begin = audit.last_pruned(lines[-1])
    assert begin is not None
    assert begin.number == 3
    assert audit.find_break(lines, begin) is None
    assert await problems(gate) == []


async def test_a_log_goes_on_behind_its_last_line_when_all_of_it_has_gone(gate: Gate) -> None:
    await write_lines(gate, [200] * 1200)

    assert [await audit.prune_lines(gate.engine, gate.tenant_id) for _ in range(3)] == [1000, 200, 0]

    lines = await lines_of(gate)
    assert [line.number for line in lines] == [1201, 1202]
    assert await problems(gate) == []


async def test_a_log_whose_beginning_was_cut_off_is_found(gate: Gate) -> None:
    """A line that claims another beginning is not accepted as the beginning."""
    await write_lines(gate, [200, 199, 1])

    def decide(work: Work) -> None:
        work.drop_record(stored.Audit, f"{1:012d}")
        audit.add_line(work, "audit_pruned", "info", b'{"hash":"made up","up_to":1}')
    needs = Needs()
    audit.load_head(needs, gate.caller, None)
    await gate.backend.transact(gate.tenant_id, needs, decide)

    [problem] = await problems(gate)
    assert "line 1 of the audit log is missing: 000000000002 is number 2" in problem


async def test_what_is_refused_is_not_in_the_log_of_what_was_done(gate: Gate) -> None:
    def decide(work: Work) -> None:
        audit.add_line(work, "an event", "info", b"{}")
        raise ZeroDivisionError

    needs = Needs()
    audit.load_head(needs, gate.caller, None)
    with pytest.raises(ZeroDivisionError):
        await gate.backend.transact(gate.tenant_id, needs, decide)

    assert await lines_of(gate) == []
    assert await gate.backend.record(gate.tenant_id, stored.AuditHead) is None
