"""Strict mode: what others do while the ledger is asked counts when the batch is decided again, in limits above all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.ledgers import HASTY
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model.settings import LedgerSettings, RateLimiting, RateLimits, SecuritySettings, Tier
from tests.support.stub_ledger import CUT, Answer, StubLedger

pytestmark = pytest.mark.anyio
FINE: Answer = (200, {}, "{}")
RULES: dict[str, dict[str, Any]] = {
    "in total": {"concurrency_total": 1}, "per key": {"concurrency_per_key": 1},
    "in a time": {"rate": {"count": 1, "seconds": 600}}}


@pytest.fixture
async def stub() -> AsyncIterator[StubLedger]:
    async with StubLedger() as running:
        yield running


@pytest.fixture
async def gates(make_gate: Callable[..., Gate], stub: StubLedger) -> AsyncIterator[list[Gate]]:
    """Two strict gates of one tenant and database; each is another process."""
    strict = {"receipt_mode": "memorygate_integrated", "receipt_consistency_mode": "strict",
              "ledger": LedgerSettings(**{"url": stub.url, **HASTY}),
              "security": SecuritySettings(rate_limiting=RateLimiting(enabled=True)),
              "rate_limits": RateLimits(free_tier=Tier(concurrent_leases=2))}
    first = make_gate(**strict)
    second = first.beside(**strict, instance_id="asyncgate-2")
    async with AsyncExitStack() as running:
        for gate in (first, second):
            gate.engine.extend(Ledger(gate.engine))
            await running.enter_async_context(gate.ledger)
        yield [first, second]


@pytest.mark.parametrize("rules", RULES)
async def test_a_limit_that_another_process_fills_while_the_ledger_is_asked_is_not_exceeded(
        rules: str, gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    await gate.as_admin().set_limit(name="api", **RULES[rules])
    for type in ("first", "second"):
        await gate.create(type, limits={"api": "a"})
    taken = stub.do_meanwhile("task.accepted", lambda: other.claim("w2", accept_types=["second"]))

    offer = await gate.claim("w1", accept_types=["first"])

    assert taken[0] is not None
    assert offer is None
    await stub.until(lambda: "lease.expired" in [receipt["receipt_type"] for receipt in stub.taken])
    if rules != "in a time":
        await other.as_worker("w2").complete(**under(taken[0]), artifacts=[{"uri": "x"}])
        assert await gate.claim("w1", accept_types=["first"]) is not None


async def test_a_limit_that_is_lowered_while_the_ledger_is_asked_keeps_the_task(
        gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    await gate.as_admin().set_limit(name="api", concurrency_total=1)
    await gate.create(limits={"api": ""})

    async def meanwhile(receipt: dict[str, Any]) -> Answer:
        if receipt["receipt_type"] == "task.accepted":
            await other.as_admin().set_limit(name="api", concurrency_total=0)
        return FINE
    stub.answer = meanwhile

    assert await gate.claim() is None


async def test_a_claim_whose_task_was_given_up_gets_another_one(gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    await gate.as_admin().set_limit(name="api", concurrency_per_key=1)
    for key in ("a", "a", "b"):
        await gate.create(limits={"api": key})
    taken = stub.do_meanwhile("task.accepted", lambda: other.claim("w2", max_tasks=1))

    offer = await gate.claim("w1")

    assert offer is not None
    assert taken[0] is not None
    keys = [((await gate.task(task_id)).limits or {})["api"] for task_id in (taken[0].task_id, offer.task_id)]
    assert sorted(keys) == ["a", "b"]


@pytest.mark.parametrize("rules", RULES)
async def test_a_claim_that_is_repeated_when_its_limit_is_full_gets_nothing(
        rules: str, gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    await gate.as_admin().set_limit(name="api", **RULES[rules])
    for type in ("first", "second"):
        await gate.create(type, limits={"api": "a"})
    stub.answer = lambda receipt: CUT if receipt["receipt_type"] == "task.accepted" else FINE
    with refused("receipt_ledger_unavailable"):
        await gate.claim("w1", claim_id="c", accept_types=["first"])
    stub.answer = lambda receipt: FINE

    taken = await other.claim("w2", accept_types=["second"])
    again = await gate.claim("w1", claim_id="c", accept_types=["first"])

    assert taken is not None
    assert again is None


async def test_a_claim_gets_another_task_of_a_limit_than_the_one_that_another_process_is_about_to_lease(
        gates: list[Gate], stub: StubLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, other = gates
    for peer in gates:
        monkeypatch.setattr(peer.engine, "is_alone", lambda: False)
    await gate.as_admin().set_limit(name="api", concurrency_total=5)
    for _ in range(2):
        await gate.create(limits={"api": ""})
    taken = stub.do_meanwhile("task.accepted", lambda: other.claim("w2"))

    offer = await gate.claim("w1")

    assert offer is not None
    assert taken[0] is not None
    assert offer.task_id != taken[0].task_id


async def test_a_turn_does_not_rest_while_another_process_is_about_to_lease_its_only_task(
        gates: list[Gate], stub: StubLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, other = gates
    for peer in gates:
        monkeypatch.setattr(peer.engine, "is_alone", lambda: False)
    await gate.as_admin().set_limit(name="api", concurrency_total=5)
    task_id = await gate.create(limits={"api": ""})
    taken = list[Any]()

    async def meanwhile(receipt: dict[str, Any]) -> Answer:
        if receipt["receipt_type"] == "task.accepted" and not taken:
            taken.append(await other.claim("w2"))
            return 422, {}, "no"
        return FINE
    stub.answer = meanwhile

    with refused("receipt_ledger_unavailable"):
        await gate.claim("w1")
    offer = await other.claim("w2")

    assert taken == [None]
    assert offer is not None
    assert offer.task_id == task_id


async def test_a_quota_that_another_process_uses_up_while_the_ledger_is_asked_is_not_exceeded(
        gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    for type in ("first", "second", "third"):
        await gate.create(type)
    assert await gate.claim(accept_types=["third"]) is not None
    taken = stub.do_meanwhile("task.accepted", lambda: other.claim("w2", accept_types=["second"]))

    assert await gate.claim("w1", accept_types=["first"]) is None
    assert taken[0] is not None


async def test_a_unique_key_that_another_process_takes_while_the_ledger_is_asked_is_held_once(
        gates: list[Gate], stub: StubLedger) -> None:
    gate, other = gates
    ask = {"type": "demo", "unique": {"key": "k", "on_conflict": "refuse"}}
    taken = stub.do_meanwhile("task.assigned", lambda: other.as_agent().create_task(**ask, payload=2))

    with refused("unique_conflict"):
        await gate.as_agent().create_task(**ask, payload=1)
    assert [task.task_id for task in (await gate.as_admin().list_tasks()).tasks] == [taken[0].task_id]
