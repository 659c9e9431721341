"""A ledger that is slow, and takes one receipt after another, gets what it can take, and everything once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.pacing import Pace, Wires, pace_of
from asyncgate.extras.ledger.sinks import Outage, Refusal, Unanswered
from asyncgate.parts.model.settings import CircuitBreaker, EmissionRetry, LedgerSettings, Settings
from tests.support.ledger_tools import emptied
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiptgate_stand_in import KEY, SUBMITS, StandIn, served
from tests.support.stub_ledger import StubLedger

pytestmark = pytest.mark.anyio
NEVER_AGAIN = CircuitBreaker(timeout_seconds=3600)      # so a circuit that opens is seen: nothing arrives any more


@contextlib.asynccontextmanager
async def sending(make_gate: Callable[..., Gate], mode: str, url: str, **more: Any) -> AsyncIterator[Gate]:
    """A gate that sends its receipts to a ledger."""
    gate = make_gate(receipt_mode=mode, ledger=LedgerSettings(
        url=url, auth_token=KEY, circuit_breaker=NEVER_AGAIN, emission_retry=EmissionRetry(retry_interval_seconds=0.2),
        **more))
    gate.engine.extend(Ledger(gate.engine))
    async with gate.ledger:
        yield gate


async def test_a_slow_and_serial_receiptgate_gets_each_receipt_once_over_few_wires(
        make_gate: Callable[..., Gate]) -> None:
    ledger = StandIn("1.1")
    ledger.serial_seconds = 0.04
    with served(ledger) as url:
        async with sending(make_gate, "receiptgate_integrated", url, timeout_ms=60_000) as gate:
            for _ in range(12):
                await gate.finished()
            await emptied(gate)

    sent = [body for body in ledger.submitted if SUBMITS in body]       # a comparison may ask meanwhile
    assert len(ledger.receipts) == len(sent) == 24
    assert ledger.most_at_once <= 4


async def test_a_gate_that_sends_too_much_at_once_finds_out_without_opening_the_circuit(
        make_gate: Callable[..., Gate]) -> None:
    ledger = StandIn("1.1")
    ledger.serial_seconds = 0.04
    with served(ledger) as url:
        async with sending(make_gate, "receiptgate_integrated", url, timeout_ms=250, parallel=16) as gate:
            wires = gate.ledger.sender.wires
            wires.limit = 16.0      # as a gate began with, and 16 x 40 ms is more than it waits for an answer
            for _ in range(20):
                await gate.finished()
            await emptied(gate)

    assert len(ledger.receipts) == 40
    assert wires.limit < 16
    assert ledger.denied == []


async def test_what_waits_counts_down_while_a_page_is_on_its_way(make_gate: Callable[..., Gate]) -> None:
    held = asyncio.Event()
    async with StubLedger() as stub:
        stub.answer = lambda receipt: answered(stub, held)
        async with sending(make_gate, "memorygate_integrated", stub.url, timeout_ms=60_000) as gate:
            for _ in range(20):
                await gate.create()
            await stub.until(lambda: len(stub.taken) >= 4)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await gate.backend.lag(gate.tenant_id)).waiting > 16:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            held.set()
            await emptied(gate)
    assert len(stub.taken) == 20


async def answered(stub: StubLedger, held: asyncio.Event) -> Any:
    """Answer four receipts at once, and the others when they are let go."""
    if len(stub.sent) > 4:
        await held.wait()
    return 200, {}, "{}"


# The wires by themselves.

CONTENT = b'{"receipt_id": "r1"}'


class Slow:
    """A ledger that does as it is told: what `send` and `holds` do, in order."""

    def __init__(self, *does: Any) -> None:
        self.does, self.asked = list(does), list[str]()

    async def send(self, tenant_id: str, content: bytes) -> None:
        self._next("send")

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        return bool(self._next("holds"))

    def _next(self, what: str) -> Any:
        self.asked.append(what)
        if isinstance(does := self.does.pop(0), Exception):
            raise does
        return does


def wires(first: int = 8, most: int = 8) -> tuple[Wires, list[float]]:
    now = [0.0]
    return Wires(Pace(1.0, most, first), lambda: now[0]), now


async def test_what_was_not_answered_and_is_there_was_taken() -> None:
    ours, ledger = wires()[0], Slow(Unanswered("late"), True)

    await ours.send(ledger, "t", CONTENT)       # type: ignore[arg-type]

    assert ledger.asked == ["send", "holds"]
    assert ours.limit == 4


@pytest.mark.parametrize(("does", "says"), [
    ((Unanswered("late"), False), Unanswered), ((Unanswered("late"), Outage("away")), Outage),
    ((Outage("no connection"),), Outage), ((Refusal("no"),), Refusal)])
async def test_what_else_may_come_of_a_call_is_told_apart(does: tuple[Any, ...], says: type[Exception]) -> None:
    with pytest.raises(Outage if says is not Refusal else Refusal) as told:
        await wires()[0].send(Slow(*does), "t", CONTENT)        # type: ignore[arg-type]

    assert type(told.value) is says


async def test_a_receipt_may_have_been_taken_though_the_look_for_it_finds_no_ledger() -> None:
    with pytest.raises(Outage) as told:
        await wires()[0].send(Slow(Unanswered("late"), Outage("no connection", untaken=True)),  # type: ignore[arg-type]
                              "t", CONTENT)

    assert not told.value.untaken


async def test_a_look_that_gets_no_answer_speaks_for_those_who_wait_to_look() -> None:
    ours, now = wires()
    ledger = Slow(Unanswered("late"), Unanswered("late"), Unanswered("late"))

    async def away(tenant_id: str, content: bytes) -> bool:
        ledger.asked.append("holds")
        await asyncio.sleep(0)
        now[0] += 10
        raise Outage("away")

    ledger.holds = away     # type: ignore[method-assign]
    told = await asyncio.gather(*(ours.send(ledger, "t", CONTENT) for _ in range(3)),   # type: ignore[arg-type]
                                return_exceptions=True)

    assert [type(outcome) for outcome in told] == [Outage] * 3
    assert sorted(ledger.asked) == ["holds", "send", "send", "send"]


async def test_wires_grow_by_one_a_round_and_are_halved_once_for_all_that_were_on_the_way() -> None:
    ours, now = wires(first=1)
    for _ in range(3):
        ours.in_time(now[0])
    grown = ours.limit
    now[0] = 5.0
    for _ in range(4):
        ours.late(began=4.5)
    halved = ours.limit
    now[0] = 6.0
    ours.late(began=5.5)

    assert 2.0 < grown <= 3.0
    assert (halved, ours.limit) == (grown / 2, 1.0)


async def test_an_answer_that_takes_half_of_the_time_earns_no_wire() -> None:
    ours, now = wires(first=2)
    now[0] = 0.6

    ours.in_time(began=0.0)

    assert ours.limit == 2.0


async def test_no_more_are_on_the_way_than_there_are_wires() -> None:
    ours, _ = wires(first=2)
    inside, most, let_go = 0, 0, asyncio.Event()

    async def use() -> None:
        nonlocal inside, most
        async with ours:
            inside += 1
            most = max(most, inside)
            await let_go.wait()
            inside -= 1

    using: list[Awaitable[None]] = [asyncio.create_task(use()) for _ in range(9)]
    await asyncio.sleep(0)
    let_go.set()
    await asyncio.gather(*using)

    assert (most, ours.busy) == (2, 0)


@pytest.mark.parametrize(("profile", "fields", "pace"), [
    ("memorygate", {}, Pace(0.5, 16, 16)), ("receiptgate", {}, Pace(10.0, 4, 1)),
    ("receiptgate", {"timeout_ms": 700, "parallel": 2}, Pace(0.7, 2, 1)),
    ("memorygate", {"timeout_ms": 700, "parallel": 2}, Pace(0.7, 2, 2))])
def test_the_profile_says_how_a_ledger_is_called_where_the_settings_do_not(
        profile: Any, fields: dict[str, Any], pace: Pace) -> None:
    ledger = LedgerSettings(profile=profile, **fields)
    assert pace_of(Settings(receipt_mode="memorygate_integrated", ledger=ledger)) == pace
