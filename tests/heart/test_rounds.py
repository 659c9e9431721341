"""Rounds of a courier: no call is missed, no two rounds run at once, and what ended is stored."""

from __future__ import annotations

import asyncio

import pytest

from asyncgate.parts.process.rounds import Rounds, store_meanwhile

pytestmark = pytest.mark.anyio
SOON = 0.01


class Work:
    """Counts its rounds; each lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.let_go, self.done = asyncio.Event(), asyncio.Event()
        self.rounds = Rounds(self.carry_out)

    async def carry_out(self) -> None:
        """Last until it is let go."""
        self.begun += 1
        await self.let_go.wait()
        self.ended += 1
        self.done.set()


@pytest.fixture
def work() -> Work:
    return Work()


async def turns() -> None:
    """Let everything that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_during_a_round_are_one_more_round(work: Work) -> None:
    work.rounds.call()
    await turns()
    for _ in range(3):
        work.rounds.call()
    await turns()
    assert work.begun == 1

    work.let_go.set()
    await turns()

    assert (work.begun, work.ended, work.rounds.running) == (2, 2, None)
    work.rounds.call()
    await turns()
    assert work.ended == 3


async def test_a_planned_round_takes_the_place_of_the_one_before(work: Work) -> None:
    work.let_go.set()
    work.rounds.call_later(3600.0)
    work.rounds.call_later(SOON)
    await work.done.wait()
    assert work.ended == 1

    work.rounds.call_later(0.0)
    work.rounds.call_later(3600.0)
    await turns()
    assert work.ended == 1
    await work.rounds.close(0.0)


async def test_a_close_waits_a_moment_and_begins_nothing_more(work: Work) -> None:
    work.rounds.call()
    await turns()
    work.rounds.call()
    closing = asyncio.create_task(work.rounds.close(60.0))
    await turns()
    assert not closing.done()

    work.let_go.set()
    await closing
    work.rounds.call()
    work.rounds.call_later(0.0)
    await turns()

    assert (work.begun, work.ended) == (1, 1)


async def test_a_close_breaks_off_a_round_that_takes_longer(work: Work) -> None:
    work.rounds.call()
    await turns()

    await work.rounds.close(SOON)

    assert (work.begun, work.ended, work.rounds.running) == (1, 0, None)


async def test_what_ends_while_the_rest_is_stored_is_stored_too() -> None:
    ended, stored = list[int](), list[int]()
    storing = asyncio.Event()

    async def send() -> None:
        ended.append(1)
        await storing.wait()
        ended.append(2)

    async def store() -> None:
        part = [*ended]
        ended.clear()
        storing.set()
        await turns()
        stored.extend(part)

    await store_meanwhile(send(), store, SOON)

    assert (ended, stored) == ([], [1, 2])


async def test_nothing_is_sent_on_where_results_cannot_be_stored() -> None:
    canceled = asyncio.Event()

    async def send() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()

    async def store() -> None:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await store_meanwhile(send(), store, SOON)

    await turns()
    assert canceled.is_set()
