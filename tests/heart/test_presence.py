"""What a process notes of its callers, by a clock of the database's that it only estimates."""

from __future__ import annotations

import asyncio

import pytest

from asyncgate.parts.model import wire
from asyncgate.parts.model.clock import elapsed
from asyncgate.parts.process.presence import Sightings, decode_claims

TENANT, WORKER = "tenant", wire.Principal("worker", "w1")


class EstimatedClock:
    """A database's clock as a process knows it."""

    skew, ahead = 0.0, 1000.0

    def now(self) -> float:
        return elapsed() + self.ahead


def find_gone(sightings: Sightings) -> list[float | None]:
    """Return when a worker hung up, for each kind of its claims."""
    known = sightings.known(TENANT, WORKER, None, sightings.clock.now())
    return [claim.gone_at for claim in decode_claims(known.claims)]


def claim(sightings: Sightings) -> None:
    sightings.note_claim(TENANT, WORKER, wire.LeaseNext(worker_id="w1"), wire.Offers([]))


def hang_up(sightings: Sightings) -> None:
    with pytest.raises(asyncio.CancelledError), sightings.watch_claim(TENANT, WORKER):
        raise asyncio.CancelledError


@pytest.mark.parametrize("off", [-0.05, 0.0, 0.05])
def test_who_hangs_up_is_gone_and_who_asks_again_is_not_although_the_clock_is_told_anew(off: float) -> None:
    sightings = Sightings(clock := EstimatedClock())
    claim(sightings)
    states = [find_gone(sightings)]
    for act in (hang_up, claim, hang_up, claim):
        clock.ahead += off
        act(sightings)
        states.append(find_gone(sightings))

    assert [[gone is not None for gone in state] for state in states] == [[False], [True], [False], [True], [False]]


def test_a_clock_that_was_set_back_is_believed() -> None:
    sightings = Sightings(clock := EstimatedClock())
    claim(sightings)
    find_gone(sightings)
    clock.ahead -= 3600
    claim(sightings)

    assert sightings.claimants(TENANT)["worker", "w1"] <= clock.now()
