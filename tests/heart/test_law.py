"""The law: pure functions and declared values that need no backend."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest
from msgspec import Struct
from msgspec.inspect import StructType, type_info
from msgspec.structs import replace

from asyncgate import ACCEPTED, ACKNOWLEDGED, ANOMALY, EMISSION, STEPS, TERMINATES, Needs, Step, Work, receipt_key
from asyncgate.backends.lanes import Lanes
from asyncgate.parts.model.errors import InvalidTransition, TaskNotFound, Unloaded
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.overdue import backoff, jitter, prolong_lease
from asyncgate.parts.model.stored import TERMINAL, Lease, Pauses, Task
from asyncgate.parts.model.stored_unique import UniqueKey
from asyncgate.parts.model.wire import CreateTask, LeaseNext, Principal, Terms
from tests.support.each import each

# Spec 5 and PH.4, written out: which status may become which.  A queued one fails when an answer does not come that it
# must have.
ALLOWED = {
    ("queued", "leased"), ("leased", "running"), ("leased", "succeeded"),
    ("running", "succeeded"), ("leased", "failed"), ("running", "failed"), ("leased", "queued"), ("running", "queued"),
    ("queued", "failed"), ("queued", "canceled"), ("leased", "canceled"), ("running", "canceled"),
}
STATUSES = ("queued", "leased", "running", "succeeded", "failed", "canceled")


CASES = list(itertools.product(STATUSES, STEPS))


def task(status: str) -> Task:
    return Task("t", 0, "demo", "null", None, "null", "{}", "agent", "ada", "ada", 0, 3, 30, 10, 0.0, "duty", None,
                None, None, "gate", 0.0, status)  # type: ignore[arg-type]


def test_the_steps_are_the_edges_of_the_specified_state_machine() -> None:
    assert {(since, step.to) for step in STEPS for since in step.since} == ALLOWED


@each("status, step", CASES)
def test_a_step_that_is_not_in_the_law_is_refused_and_changes_nothing(status: str, step: Step) -> None:
    work = Work("tenant", 1.0, Ids(), {}, Needs())
    work.load_task(task(status))

    if (status, step.to) in ALLOWED and status in step.since:
        assert work.move_task(work.require_task("t"), step).status == step.to
    else:
        with pytest.raises(InvalidTransition):
            work.move_task(work.require_task("t"), step)
        assert work.require_task("t").status == status
        assert not work.moved


def test_a_claim_waits_for_the_next_batch_if_a_task_got_another_priority_in_its_own() -> None:
    known = {0: ("demo", frozenset[str]()), 1: ("other", frozenset[str]())}
    work = Work("tenant", 1.0, Ids(), known, Needs(claims=[LeaseNext()]))
    for id, lane, priority in ("x", 0, 5), ("a", 0, 4), ("b", 1, 3):
        work.add_claimable(replace(task("queued"), task_id=id, lane=lane, priority=priority))
    lease = next(step for step in STEPS if step.name == "claim")

    work.change_task(work.require_task("x"), priority=0)
    work.queue_changes.begin_claim(())
    with pytest.raises(Unloaded):
        next(work.find_claimable(LeaseNext(worker_id="w1")))
    got = [work.move_task(row, lease).task_id
           for row in work.find_claimable(LeaseNext(worker_id="w1", accept_types=frozenset({"other"})))]

    assert got == ["b"]


def test_no_step_leads_out_of_a_terminal_status() -> None:
    assert not any(step.since & TERMINAL for step in STEPS)


def test_every_step_but_start_writes_a_receipt() -> None:
    assert {step.name for step in STEPS} - set(EMISSION) == {"start"}


def test_only_assignments_schedules_and_questions_open_obligations() -> None:
    assert {opener: set(closers) for opener, closers in TERMINATES.items()} == {
        "task.assigned": {"task.completed", "task.failed", "task.canceled"},
        "schedule.created": {"schedule.deleted"},
        "input.requested": {"input.answered", "input.expired"},
    }


def test_backoff_doubles_up_to_its_limit_however_many_attempts() -> None:
    assert [backoff(30, attempt, 900) for attempt in (1, 2, 3, 4, 5, 6, 1000)] == [30, 60, 120, 240, 480, 900, 900]
    assert backoff(0, 5, 900) == 0


def test_jitter_lies_between_nothing_and_its_spread_and_differs() -> None:
    spread = [jitter(str(uuid.UUID(int=number)), 5.0, crowd=200) for number in range(200)]

    assert min(spread) >= 0
    assert max(spread) < 5
    assert len(set(spread)) > 50


def test_jitter_grows_with_the_crowd_and_is_nothing_for_one() -> None:
    def longest(crowd: int) -> float:
        return max(jitter(str(uuid.UUID(int=number)), 5.0, crowd) for number in range(200))

    assert longest(1) == 0
    assert 0 < longest(2) < longest(50) < longest(100) == longest(1000)


def test_a_lease_gets_back_what_was_left_of_it_and_a_grace_period() -> None:
    lease = Lease("t", "l", "worker", "w1", None, 1, 100.0, 103.0, 0, "accepted", ttl_seconds=3)

    assert prolong_lease(lease, silent_since=102.0, now=110.0, grace=5.0) == 110.0 + 1.0 + 5.0


def test_a_lease_gets_back_no_more_than_its_own_length() -> None:
    """The last sign of life may be older than the lease, and a gate may die while it gives time back."""
    lease = Lease("t", "l", "worker", "w1", None, 1, 100.0, 103.0, 0, "accepted", ttl_seconds=3)

    assert prolong_lease(lease, silent_since=90.0, now=110.0, grace=5.0) == 110.0 + 3.0 + 5.0
    assert prolong_lease(lease, silent_since=90.0, now=90.5, grace=0.0) == 103.0


def test_ids_never_run_backwards_whatever_the_clock_does() -> None:
    ids = Ids()

    made = [ids.new(now) for now in (1000.0, 1000.0, 999.0, 5.0, 1000.001, 2000.0)]

    assert made == sorted(set(made))
    assert {uuid.UUID(id).version for id in made} == {7}


def test_ids_of_two_processes_on_one_clock_order_by_age_to_half_a_microsecond() -> None:
    first, second = Ids(), Ids()
    moments = [1_700_000_000.0 + tick / 2_000_000 for tick in range(1000)]

    made = [(first, second)[number % 2].new(now) for number, now in enumerate(moments)]

    assert made == sorted(made)


def test_an_id_begins_with_its_millisecond() -> None:
    made = uuid.UUID(Ids().new(1_700_000_000.123))

    assert made.int >> 80 == 1_700_000_000_123
    assert (made.int >> 64) & 0xFFF == 0


def test_ids_of_one_moment_lie_far_apart() -> None:
    ids = Ids()

    made = [uuid.UUID(ids.new(1.0)).int & (1 << 62) - 1 for _ in range(100)]

    gaps = {(later - earlier) % (1 << 62) for earlier, later in itertools.pairwise(made)}
    assert len(gaps) == 99
    assert max(gaps) > 1 << 40


def test_ids_go_on_behind_those_of_an_earlier_process() -> None:
    earlier, later = Ids(), Ids()
    last = earlier.new(2_000_000_000.0)
    later.after(last)
    later.after(None)

    assert later.new(1_000_000_000.0) > last


def test_lanes_remember_what_fits_a_claim_and_forget_when_there_are_too_many_claims() -> None:
    lanes = Lanes()
    lanes.learn(1, "demo", ["gpu"])
    lanes.learn(1, "demo", ["gpu"])
    lanes.learn(2, "demo", [])

    for number in range(1100):
        ask = LeaseNext(worker_id="w", capabilities=frozenset({"gpu", f"c{number}"}))
        assert lanes.groups([ask], 0.0) == {frozenset({1, 2})}
    assert lanes.groups([LeaseNext(worker_id="w")], 0.0) == {frozenset({2})}


def test_a_part_that_fails_takes_back_its_own_changes_and_no_others() -> None:
    work = Work("tenant", 1.0, Ids(), {}, Needs())
    work.load_task(task("queued"))
    work.close_obligation("r1", Principal("agent", "ada"))

    def fail_half_way() -> None:
        with work.undo_on_error():
            work.change_task(work.require_task("t"), priority=9)
            work.close_obligation("r2", Principal("agent", "ada"))
            work.require_task("unknown")

    with pytest.raises(TaskNotFound):
        fail_half_way()

    assert work.require_task("t").priority == 0
    assert set(work.closed) == {"r1"}
    assert not work.moved


def test_a_record_that_was_not_read_is_not_taken_for_one_that_is_not_there() -> None:
    work = Work("tenant", 1.0, Ids(), {}, Needs(records={(UniqueKey, ("free",))}))
    work.load_record(UniqueKey("held", "t", 1.0))
    claims = Work("tenant", 1.0, Ids(), {}, Needs(claims=[LeaseNext()]))

    assert work.find_record(UniqueKey, "free") is None
    assert work.find_record(UniqueKey, "held") is not None
    with pytest.raises(Unloaded) as unread:
        work.find_record(UniqueKey, "another")
    work.drop_record(UniqueKey, "another")

    (needs := Needs()).add(unread.value)
    assert needs.records == {(UniqueKey, ("another",))}
    assert work.find_record(UniqueKey, "another") is None
    assert claims.find_record(Pauses) is None       # which claims read without naming it


def test_a_request_for_a_task_has_the_terms_that_its_record_and_its_offer_show() -> None:
    """A Struct cannot inherit the fields of two others, so CreateTask repeats those of Terms."""
    def fields(kind: type[Struct]) -> dict[str, tuple[Any, Any]]:
        type_ = type_info(kind)
        assert isinstance(type_, StructType)
        # without a text
        return {field.name: (getattr(field.type, "type", field.type), field.default) for field in type_.fields}

    terms, asked = fields(Terms), fields(CreateTask)

    assert [(name, asked[name]) for name in asked if name in terms] == list(terms.items())


def test_whatever_makes_a_receipt_another_one_is_in_its_key() -> None:
    facts: dict[str, Any] = {
        "contract": ACKNOWLEDGED, "task_id": "t", "sender": Principal("agent", "ada"), "lease_id": "l",
        "parents": ("p",), "discriminator": "d"}
    other: dict[str, Any] = {
        "contract": ANOMALY, "task_id": "u", "sender": Principal("agent", "bob"), "lease_id": None,
        "parents": ("q",), "discriminator": "e"}
    asked = [facts, {**facts, "sender": Principal("worker", "ada")}, *({**facts, name: other[name]} for name in other)]

    assert len({receipt_key(**case) for case in asked}) == len(asked)
    once = {**facts, "contract": ACCEPTED}
    assert receipt_key(**once) == receipt_key(**{**once, "parents": ()})
