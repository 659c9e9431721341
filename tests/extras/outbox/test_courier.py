"""The courier: what applications have handed over in SQL becomes tasks, each once, whatever stands before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from asyncgate import Extension
from asyncgate.conformance import harness
from asyncgate.extras.outbox.courier import ROWS_AT_ONCE, Courier
from asyncgate.parts.model import errors, queries
from asyncgate.parts.model.stored_handover import Handover

pytestmark = pytest.mark.anyio


def courier_of(gate: harness.Gate) -> Courier:
    return Courier(gate.engine, Mock())     # it is told the tenant, and asks no database for it


async def hand_over(gate: harness.Gate, *requests: Any, by: str = "shop") -> None:
    """Let rows be committed, as asyncgate.enqueue does."""
    before = len(await rows_of(gate))

    def keep(work: Any) -> None:
        for number, request in enumerate(requests, before):
            text = request if isinstance(request, str) else msgspec.json.encode(request).decode()
            work.keep_record(Handover("waiting", "agent", by, f"{number:05d}", text, 0.0))
    await gate.engine.change(gate.tenant_id, keep)


async def rows_of(gate: harness.Gate) -> list[Handover]:
    return await gate.backend.page(gate.tenant_id, queries.Rows(Handover))


async def payloads(gate: harness.Gate, by: str = "shop") -> list[Any]:
    """Return the payloads of the tasks of somebody, in the order of their creation."""
    page = await gate.as_agent(by).list_tasks(limit=200)
    return [msgspec.json.decode(task.payload) for task in reversed(page.tasks)]


async def test_rows_become_tasks_of_who_handed_them_over_in_their_order(gate: harness.Gate) -> None:
    most = 2 * ROWS_AT_ONCE + 3
    await hand_over(gate, *({"type": "t", "payload": number, "priority": 1} for number in range(most)))

    assert await courier_of(gate).move(gate.tenant_id) == most

    assert await payloads(gate) == [*range(most)]
    assert await rows_of(gate) == []


async def test_a_courier_that_dies_before_its_note_makes_no_second_task(
        gate: harness.Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    await hand_over(gate, {"type": "t", "payload": 1})
    dying = courier_of(gate)
    monkeypatch.setattr(dying, "_settle", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        await dying.move(gate.tenant_id)
    assert len(await rows_of(gate)) == 1

    assert await courier_of(gate).move(gate.tenant_id) == 1

    assert (await payloads(gate), await rows_of(gate)) == ([1], [])


async def test_what_is_refused_for_good_is_kept_told_and_keeps_nothing_behind_it(gate: harness.Gate) -> None:
    bad: list[Any] = [{"type": ""}, {"type": "t"}, {"type": "t", "payload": 1, "agent_id": "eve"},
                      {"type": "t", "payload": 1, "tenant_id": "elsewhere"}, "[1]", "{", '{"type": "t", "payload": '
                      + "[" * 50_000 + "]" * 50_000 + "}"]
    await hand_over(gate, *bad, {"type": "t", "payload": "good"})

    assert await courier_of(gate).move(gate.tenant_id) == 1

    assert await payloads(gate) == ["good"]
    rows = await rows_of(gate)
    assert [(row.stage, row.handover_id) for row in rows] == [("refused", f"{at:05d}") for at in range(len(bad))]
    assert all(row.problem for row in rows), rows
    told = (await gate.as_agent("shop").list_receipts(receipt_type="system.anomaly")).receipts
    bodies = [msgspec.json.decode(receipt.body) for receipt in told]
    assert sorted(body["details"]["handover_id"] for body in bodies) == [row.handover_id for row in rows]
    async with gate.unchanged():
        assert await courier_of(gate).move(gate.tenant_id) == 0


async def test_a_key_of_the_application_is_the_key_of_the_task(gate: harness.Gate) -> None:
    made = await gate.as_agent("shop").create_task(type="t", payload=1, idempotency_key="order-7")
    await hand_over(gate, {"type": "t", "payload": 1, "idempotency_key": "order-7"},
                    {"type": "t", "payload": 1, "idempotency_key": "order-8"})

    await courier_of(gate).move(gate.tenant_id)

    tasks = (await gate.as_agent("shop").list_tasks()).tasks
    assert (len(tasks), made.task_id in {task.task_id for task in tasks}, await rows_of(gate)) == (2, True, [])


async def test_who_may_create_nothing_now_keeps_no_other_waiting_and_goes_on_later(
        make_gate: Callable[..., harness.Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = make_gate()
    courier, perform, full = courier_of(gate), gate.engine.perform, True

    async def refuse(op: Any, caller: Any, ask: Any) -> Any:
        if full and caller.principal.id == "a":
            raise errors.QuotaExceeded("no room", quota="active_tasks", limit=1, retry_after=5)
        return await perform(op, caller, ask)
    monkeypatch.setattr(gate.engine, "perform", refuse)
    await hand_over(gate, *({"type": "t", "payload": number} for number in range(ROWS_AT_ONCE + 1)), by="a")
    await hand_over(gate, {"type": "t", "payload": "b"}, by="b")

    assert await courier.move(gate.tenant_id) == 1
    full = False
    assert await courier.move(gate.tenant_id) == ROWS_AT_ONCE + 1

    assert (await payloads(gate, "b"), await payloads(gate, "a")) == (["b"], [*range(ROWS_AT_ONCE + 1)])


class Suspended(Extension):
    """Admits nobody, as a gate does in a suspended tenant."""

    async def check_caller(self, caller: Any) -> None:
        raise errors.InvalidToken("this tenant is suspended")


async def test_nothing_of_a_suspended_tenant_is_moved_or_refused(gate: harness.Gate) -> None:
    gate.engine.extend(suspended := Suspended())
    await hand_over(gate, {"type": "t", "payload": 1})
    assert await courier_of(gate).move(gate.tenant_id) == 0
    assert [row.stage for row in await rows_of(gate)] == ["waiting"]
    gate.engine.withdraw(suspended)

    assert await courier_of(gate).move(gate.tenant_id) == 1
