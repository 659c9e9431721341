"""A clock that does not jump, and a heartbeat that tells for how long nobody was served."""

from __future__ import annotations

from math import inf

import pytest

from asyncgate.backends.memory import Memory
from asyncgate.parts.model.clock import MOST_AHEAD_SECONDS, SLEW, SteadyClock
from asyncgate.parts.model.heartbeat import SILENT_SECONDS, Heartbeat, Silence

HOUR = 3600.0


class Machine:
    """A machine whose time passes as a test says."""

    def __init__(self) -> None:
        self.wall, self.seconds = 1_000_000.0, 50.0

    def run(self, seconds: float) -> None:
        self.wall, self.seconds = self.wall + seconds, self.seconds + seconds

    def clock(self, after: float | None = None) -> SteadyClock:
        return SteadyClock(after, wall=lambda: self.wall, elapsed=lambda: self.seconds)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_that_is_set_is_followed_slowly_and_never_back(jump: float) -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock()
    machine.wall += jump

    assert clock() == before
    machine.run(60)
    assert clock() - before == pytest.approx(60 * (1 + (SLEW if jump > 0 else -SLEW)))
    for _ in range(100):
        machine.run(HOUR)
        assert clock() > before
    assert clock() == machine.wall


def test_a_gate_begins_no_earlier_than_the_last_one_ended_unless_that_was_far_ahead() -> None:
    machine = Machine()

    assert machine.clock(machine.wall + HOUR)() == machine.wall + HOUR
    assert machine.clock(machine.wall - HOUR)() == machine.wall
    assert machine.clock(machine.wall + MOST_AHEAD_SECONDS + 1)() == machine.wall


@pytest.mark.anyio
async def test_the_time_of_a_database_of_one_process_is_that_of_the_process() -> None:
    backend, machine = Memory(), Machine()
    backend.clock = machine.clock()

    assert backend.now() == machine.wall
    await backend.close()


def test_a_gap_in_the_heartbeat_is_measured_until_it_is_made_good() -> None:
    machine = Machine()
    heart = Heartbeat(lambda: machine.seconds)
    machine.run(SILENT_SECONDS)
    heart.beat()
    machine.run(60)

    heart.beat()            # too late: that would hide the gap

    assert heart.measure() == 60
    with pytest.raises(Silence):
        heart.require(inf)
    heart.resume()
    assert heart.measure() == 0
    heart.require(inf)


def test_a_database_that_does_not_answer_is_a_gap_from_the_first_call_that_failed() -> None:
    machine = Machine()
    heart = Heartbeat(lambda: machine.seconds)
    machine.run(10)
    heart.resume()
    for _ in range(10):     # it beats while the call waits, because nobody knows yet
        machine.run(1)
        heart.beat()

    heart.note_failure(begun=machine.seconds - 10)
    machine.run(1)
    heart.beat()

    assert heart.measure() == 11


def test_one_call_that_fails_beside_others_that_succeed_is_no_gap() -> None:
    machine = Machine()
    heart = Heartbeat(lambda: machine.seconds)
    for _ in range(10):
        machine.run(1)
        heart.beat()
        heart.note_commit()

    heart.note_failure(begun=machine.seconds - 10)

    assert heart.measure() == 0


def test_a_batch_that_waited_long_for_the_database_is_not_decided_before_leases_are_prolonged() -> None:
    machine = Machine()
    heart = Heartbeat(lambda: machine.seconds)
    for _ in range(5):
        machine.run(1)
        heart.beat()

    with pytest.raises(Silence):
        heart.require(begun=machine.seconds - 5)

    assert heart.measure() == 5
