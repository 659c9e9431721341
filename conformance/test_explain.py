"""explain_task: each cause is staged, and told right, also by a second process that shares the database."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncgate import Caller, Engine, Work
from asyncgate.backends import open_backend
from asyncgate.conformance import harness
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import settings, stored, wire, wire_workers
from asyncgate.parts.operating.explain import CAUSES, MOST_AHEAD
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
Ask = Callable[..., Awaitable[wire_workers.Explanation]]
SETTINGS: dict[str, Any] = {
    "instance_id": "asyncgate-1",
    "security": settings.SecuritySettings(rate_limiting=settings.RateLimiting(enabled=True)),
    "rate_limits": settings.RateLimits(free_tier=settings.Tier(concurrent_leases=3, receipts_per_task=8))}
FIVE = r"5 min( \d+ s)?"
IDLE = 200      # seconds after which a worker no longer counts as one that asks


@pytest.fixture
def gate(make_gate: Callable[..., harness.Gate]) -> harness.Gate:
    """A gate with limits."""
    return make_gate(**SETTINGS)


@pytest.fixture
async def ask(gate: harness.Gate, backend_url: str) -> AsyncIterator[Ask]:
    """Ask this process as the owner and as an admin, then another process; all must give the same causes."""
    backend: Any = gate.backend if backend_url == "memory:" else await open_backend(backend_url)
    other = harness.Gate(engine_over(backend, harness.settings_for_tests(**SETTINGS)), gate.tenant_id)

    async def told(task_id: str) -> wire_workers.Explanation:
        mine: wire_workers.Explanation = await gate.as_admin().explain_task(task_id=task_id)
        await Upkeep(gate.engine).store_presences()
        if backend is not gate.backend:
            backend.skew = gate.backend.skew
        for view in (gate.as_agent(), gate.as_admin(), other.as_admin()):
            theirs = await view.explain_task(task_id=task_id)
            assert names(theirs) == names(mine)
        for call in (mine.next, *(cause.next for cause in mine.also)):
            require_legal(call)
        return mine

    yield told
    if backend is not gate.backend:
        await backend.close()


def require_legal(call: wire_workers.NextCall) -> None:
    """Fail if a call does not exist, or does not take what it is given."""
    op = OPERATIONS[call.operation]
    assert set(op.takes.needed) <= set(call.arguments) <= {*op.reader.fields}


def names(told: wire_workers.Explanation) -> list[wire_workers.CauseName]:
    """Return the causes in order."""
    return [told.cause, *(cause.cause for cause in told.also)]


async def change(gate: harness.Gate, how: Callable[[Work], object], task_id: str | None = None) -> None:
    """Change stored rows as a test needs them."""
    def write(engine: Engine, work: Work, caller: Caller, ask: Any) -> None:
        how(work)

    def load(needs: Any, caller: Caller, ask: Any) -> None:
        needs.tasks.update({task_id} - {None})
    await gate.engine.write(write, load, gate.engine.make_own_caller(gate.tenant_id), wire.Ask())


async def post(gate: harness.Gate, task_id: str, state: Any, reason: str | None = None) -> None:
    """Put the first receipt of a task into the outbox."""
    receipt = (await gate.receipts(task_id))[0]
    row = stored.Outgoing(receipt.receipt_id, task_id, "{}", gate.now() - 60, state, reason, 3)
    await change(gate, lambda work: work.keep_record(row))


async def lose(gate: harness.Gate, offer: wire.Offer) -> None:
    """Let a lease run out without a sweep."""
    gate.skip(offer.expires_at.timestamp() - gate.now() + 1)


# Under a lease.


async def test_a_leased_task_names_its_worker_and_when_it_was_last_heard(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    gate.skip(20)

    told = await ask(offer.task_id)

    assert names(told) == ["leased"]
    [worker] = told.evidence.workers or []
    assert (str(worker.worker), told.evidence.until, told.evidence.lease_id) == (
        "worker w1", offer.expires_at, offer.lease_id)
    assert told.evidence.since is not None
    assert 15 < gate.now() - told.evidence.since.timestamp() < 60
    assert told.summary.startswith("Worker w1 has leased it but has not said that it began; its last sign of life ")
    assert (told.next.operation, told.next.arguments) == (
        "get_task", {"task_id": offer.task_id, "wait_seconds": 30})


async def test_progress_and_other_calls_of_its_worker_are_signs_of_life(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    gate.skip(20)
    await gate.as_worker().report_progress(**harness.under(offer), progress=1)

    told = await ask(offer.task_id)
    assert told.summary.startswith("Worker w1 works on it;")
    assert told.evidence.since is not None
    assert gate.now() - told.evidence.since.timestamp() < 10

    gate.skip(20)
    await gate.as_worker().list_leases()
    told = await ask(offer.task_id)
    assert told.evidence.since is not None
    assert gate.now() - told.evidence.since.timestamp() < 10


async def test_a_lease_that_ran_out_and_was_not_swept_is_overdue(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await lose(gate, offer)

    told = await ask(offer.task_id)

    assert names(told) == ["lease_overdue"]
    assert (told.evidence.since, told.evidence.instance_id) == (offer.expires_at, "asyncgate-1")


async def test_how_the_last_sweep_went_is_told(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await lose(gate, offer)
    gate.engine.extend(upkeep := Upkeep(gate.engine))
    upkeep.duties["sweep"].last_error = "DatabaseUnavailable"

    told = await gate.as_admin().explain_task(task_id=offer.task_id)

    assert told.evidence.sweep_error == "DatabaseUnavailable"
    assert "its last sweep failed (DatabaseUnavailable)" in told.summary


async def move_to(gate: harness.Gate, task_id: str, instance: str) -> None:
    """Let another gate look after a task."""
    await change(gate, lambda work: work.change_task(work.tasks[task_id], asyncgate_instance=instance), task_id)


async def test_the_gate_of_a_leased_task_is_gone_and_this_one_takes_it_over_when_the_lease_ends(
        gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await move_to(gate, offer.task_id, "asyncgate-9")

    told = await ask(offer.task_id)

    assert names(told) == ["leased", "instance_gone"]
    gone = told.also[0]
    assert (gone.evidence.instance_id, gone.evidence.until) == ("asyncgate-9", offer.expires_at)
    assert "gate asyncgate-1 takes it over in" in gone.summary


async def test_the_gate_is_gone_and_so_is_the_lease(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await move_to(gate, offer.task_id, "asyncgate-9")
    await lose(gate, offer)

    told = await ask(offer.task_id)

    assert names(told) == ["instance_gone"]
    assert told.summary.endswith("gate asyncgate-1 takes it over with its next sweep.")


async def test_a_gate_that_serves_is_not_gone(gate: harness.Gate, backend_url: str) -> None:
    if not backend_url.startswith("postgres"):
        pytest.skip("one process has this database for itself")
    offer = await gate.leased()
    await move_to(gate, offer.task_id, "asyncgate-9")
    there = await open_backend(backend_url)
    await there.join("asyncgate-9", 10.0, lambda news: None)    # type: ignore[attr-defined]

    alive = await gate.as_admin().explain_task(task_id=offer.task_id)
    await lose(gate, offer)
    overdue = await gate.as_admin().explain_task(task_id=offer.task_id)
    await there.close()
    gone = await gate.as_admin().explain_task(task_id=offer.task_id)

    assert (names(alive), names(overdue), names(gone)) == (["leased"], ["lease_overdue"], ["instance_gone"])
    assert overdue.evidence.instance_id == "asyncgate-9"
    assert gone.evidence.last_beat_at is not None


# Not to be offered.


async def test_a_parked_task_waits_for_its_time(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased("w1")
    await gate.as_worker("w1").release_lease(**harness.under(offer), after_seconds=3 * 3600, reason="no answer yet.")

    told = await ask(offer.task_id)

    assert told.cause == "parked"
    until = (await gate.task(offer.task_id)).next_eligible_at
    assert told.summary.startswith(f"Worker w1 parked it until {until:%Y-%m-%d %H:%M:%S} UTC: no answer yet; it is ")
    assert (told.evidence.until, told.evidence.reason) == (until, "no answer yet.")


async def test_a_task_is_on_hold_because_it_was_parked_too_often(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased("w1", max_parks=1)
    await gate.as_worker("w1").release_lease(**harness.under(offer), after_seconds=60)

    told = await ask(offer.task_id)

    assert names(told) == ["on_hold"]
    assert told.summary == "It is on hold: it was parked once, which is the limit (max_parks)."


async def test_a_task_is_on_hold_after_it_was_lost_too_often(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create(max_expiries=2)
    for worker in ("w1", "w2"):
        offer = await gate.claim(worker)
        assert offer is not None
        await gate.lose(offer)

    told = await ask(task_id)

    assert names(told) == ["on_hold"]
    assert (told.evidence.held, told.evidence.expiries, told.evidence.lost_to) == ("lease_expiries", 2, ["w1", "w2"])
    assert told.summary == "It is on hold: its lease was lost 2 times, by w1 and w2; its limit is 2."
    assert (told.next.operation, told.next.arguments) == ("release_hold", {"task_id": task_id})


async def test_a_task_is_on_hold_because_one_worker_lost_it(gate: harness.Gate) -> None:
    offer = await gate.leased(max_expiries=1)
    await gate.lose(offer)

    told = await gate.as_agent().explain_task(task_id=offer.task_id)

    assert told.summary == "It is on hold: w1 lost its lease once; its limit is 1."


async def test_a_task_is_on_hold_because_it_has_too_many_receipts(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create(max_expiries=0)
    while (offer := await gate.claim()) is not None:
        await gate.lose(offer)

    told = await ask(task_id)

    assert names(told) == ["on_hold"]
    assert "as many receipts as its tenant's quota allows" in told.summary


async def test_a_caller_that_may_not_write_is_not_told_to(gate: harness.Gate) -> None:
    offer = await gate.leased(max_expiries=1)
    await gate.lose(offer)
    reader = gate.as_caller("agent", "ada", "agent", scopes=frozenset({"tasks:read"}))

    told = await reader.explain_task(task_id=offer.task_id)

    assert (told.cause, told.next.operation) == ("on_hold", "get_task")


@pytest.mark.parametrize("target", [
    {"type": "demo"}, {"type": "demo", "capabilities": ["gpu"]}, {"whole_tenant": True}, {"worker": "w1"}])
async def test_what_does_the_task_is_paused(gate: harness.Gate, ask: Ask, target: dict[str, Any]) -> None:
    await gate.claim(capabilities=["gpu"])
    task_id = await gate.create(requirements={"capabilities": ["gpu"]})
    await gate.as_admin().pause_work(**target, reason="the model is down")

    told = await ask(task_id)

    assert names(told) == ["paused"]
    assert told.summary.endswith("is paused until somebody resumes it: the model is down.")
    assert (str(told.evidence.by), told.evidence.reason) == ("human root", "the model is down")
    assert (told.next.operation, told.next.arguments) == ("resume_work", {
        name: tuple(value) if isinstance(value, list) else value for name, value in target.items()})
    await gate.as_admin().resume_work(**target)
    assert names(await ask(task_id)) == ["claimable"]


async def test_one_of_two_workers_is_paused_and_the_other_one_gets_the_task(gate: harness.Gate, ask: Ask) -> None:
    for worker in ("w1", "w2"):
        await gate.claim(worker)
    task_id = await gate.create()
    await gate.as_admin().pause_work(worker="w1")

    told = await ask(task_id)

    assert names(told) == ["claimable"]
    assert [fact.worker.id for fact in told.evidence.workers or ()] == ["w2"]


async def test_a_delayed_task_is_paused_too_and_one_of_another_type_is_not(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim()
    delayed, other = await gate.create(delay_seconds=60), await gate.create("other")
    await gate.as_admin().pause_work(type="demo")

    assert names(await ask(delayed)) == ["paused", "delay"]
    assert names(await ask(other)) == ["claimable"]


async def test_the_tenant_of_a_task_is_suspended(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create()
    await gate.claim(accept_types=["other"])
    await change(gate, lambda work: work.keep_record(stored.Account("theirs", 0.0, suspended_at=work.now - 300)))

    told = await ask(task_id)

    assert names(told) == ["tenant_suspended", "no_worker"]
    assert re.fullmatch(rf"The tenant was suspended {FIVE} ago: none of its workers is let in\.", told.summary)


# Its time has not come.


async def test_a_task_was_created_to_begin_later(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim()
    task_id = await gate.create(delay_seconds=60)

    told = await ask(task_id)

    assert names(told) == ["delay"]
    assert told.evidence.until == (await gate.task(task_id)).next_eligible_at


async def test_a_failed_attempt_waits_before_the_next_one(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased(max_attempts=3, retry_backoff_seconds=600)
    await gate.as_worker().fail(**harness.under(offer), error={"message": "the page does not answer"}, retryable=True)

    told = await ask(offer.task_id)

    assert names(told) == ["backoff"]
    assert (told.evidence.attempt, told.evidence.max_attempts) == (1, 3)
    assert told.evidence.until == (await gate.task(offer.task_id)).next_eligible_at
    assert told.evidence.reason == "the page does not answer"
    assert re.fullmatch(r"Attempt 1 of 3 failed: the page does not answer; it is offered to workers again in "
                        r"(10 min|9 min \d+ s)\.", told.summary)


async def test_leases_that_ran_out_together_do_not_come_back_at_once(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await lose(gate, offer)
    await gate.sweep()
    await change(gate, lambda work: work.change_task(
        work.tasks[offer.task_id], next_eligible_at=work.now + 5), offer.task_id)
    await gate.claim()

    told = await ask(offer.task_id)

    assert names(told) == ["jitter"]
    assert told.evidence.expiries == 1


# In the queue.


async def test_the_tenant_has_all_the_leases_that_it_may_have(gate: harness.Gate, ask: Ask) -> None:
    for _ in range(3):
        await gate.leased()
    task_id = await gate.create()
    await gate.claim("w2")

    told = await ask(task_id)

    assert names(told) == ["lease_quota"]
    assert (told.evidence.in_use, told.evidence.limit) == (3, 3)
    assert told.next.operation == "get_limits"


async def test_no_worker_has_ever_asked(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create()

    told = await ask(task_id)

    assert names(told) == ["no_worker"]
    assert told.summary == "No worker has asked for work yet."
    assert (told.next.operation, told.evidence.workers) == ("list_workers", [])


async def test_those_who_ask_lack_a_capability(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create(requirements={"capabilities": ["gpu", "web"]})
    await gate.claim("w1", capabilities=["web"])
    gate.skip(5)
    await gate.claim("w2", capabilities=["pdf"])

    told = await ask(task_id)

    assert names(told) == ["no_worker"]
    assert (told.evidence.needed, told.evidence.missing) == (["gpu", "web"], ["gpu"])
    assert [(worker.worker.id, worker.capabilities) for worker in told.evidence.workers or ()] == [
        ("w2", ["pdf"]), ("w1", ["web"])]
    assert told.summary == ("No worker that can take demo, which requires gpu and web, has asked for work: gpu is "
                            "missing.")
    agent = await gate.as_agent().explain_task(task_id=task_id)
    assert (agent.evidence, agent.next.operation) == (told.evidence, "get_task")


async def test_those_who_ask_do_not_accept_the_type(gate: harness.Gate, ask: Ask) -> None:
    task_id = await gate.create("rare")
    await gate.claim(accept_types=["common"])

    told = await ask(task_id)

    assert names(told) == ["no_worker"]
    assert told.evidence.missing == ["rare"]
    assert told.summary == "No worker that can take rare has asked for work: those who ask take other types."
    assert told.evidence.workers is not None
    assert told.evidence.workers[0].accept_types == ["common"]


async def test_those_who_ask_lack_the_type_and_capabilities(gate: harness.Gate) -> None:
    task_id = await gate.create("rare", requirements={"capabilities": ["gpu", "ocr"]})
    await gate.claim(accept_types=["common"])

    told = await gate.as_agent().explain_task(task_id=task_id)

    assert told.summary == ("No worker that can take rare, which requires gpu and ocr, has asked for work: those who "
                            "ask take other types, and gpu and ocr are missing.")


async def test_the_worker_that_could_do_it_no_longer_asks(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim(accept_types=["demo"])
    asked = gate.now()
    gate.skip(IDLE)
    await gate.claim("w2", accept_types=["other"])
    task_id = await gate.create()

    told = await ask(task_id)

    assert names(told) == ["no_worker"]
    assert told.evidence.since is not None
    assert abs(told.evidence.since.timestamp() - asked) < 10
    assert [worker.worker.id for worker in told.evidence.workers or ()] == ["w1"]
    assert re.fullmatch(r"No worker that can take demo has asked for work for 3 min( \d+ s)?; the last one was worker "
                        r"w1\.", told.summary)


async def test_a_stall_is_the_first_cause_while_the_leases_of_silent_workers_last(gate: harness.Gate, ask: Ask) -> None:
    for worker in ("w1", "w2", "w3"):
        await gate.leased(worker, lease_ttl_seconds=3600)
    await gate.create()
    task_id = await gate.create()
    gate.skip(24 * 60)

    told = await ask(task_id)

    assert names(told) == ["no_worker", "lease_quota", "behind"]
    assert re.fullmatch(r"No worker that can take demo has asked for work for 2\d min; 3 leases are without a sign of "
                        r"life\.", told.summary)
    assert {(fact.worker.id, fact.holding) for fact in told.evidence.workers or ()} == {("w1", 1), ("w2", 1), ("w3", 1)}
    [queue] = (await gate.as_admin().list_queues()).queues
    assert queue.workers == 0

    await gate.as_worker("w1").list_leases()        # a sign of life: it works on something long

    assert names(await ask(task_id)) == ["lease_quota", "workers_busy", "behind"]
    [queue] = (await gate.as_admin().list_queues()).queues
    assert queue.workers == 1

async def test_tasks_of_higher_priority_and_older_ones_come_first(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim()
    made = [await gate.create(priority=priority) for priority in (0, 5, 0, 1, 0)]
    await gate.create(priority=9, delay_seconds=60)
    await gate.create("other", priority=9)

    assert [(await ask(task_id)).evidence.ahead for task_id in made] == [2, None, 3, 1, 4]
    told = await ask(made[2])
    assert names(told) == ["behind"]
    assert told.summary == "3 tasks come before it in its queue, by priority or age."
    assert (await ask(made[3])).summary == "1 task comes before it in its queue, by priority or age."
    assert names(await ask(made[1])) == ["claimable"]


async def test_tasks_before_it_are_counted_up_to_a_bound(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim()
    for _ in range(3):
        await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 400)
    task_id = await gate.create()

    told = await ask(task_id)

    assert (told.cause, told.evidence.ahead) == ("behind", MOST_AHEAD)
    assert told.summary.startswith("At least 1,000 tasks come before it")


async def test_those_who_can_do_it_are_busy(gate: harness.Gate, ask: Ask) -> None:
    for _ in range(2):
        await gate.leased(lease_ttl_seconds=None)
    gate.skip(IDLE)
    await gate.as_worker().list_leases()
    task_id = await gate.create()

    told = await ask(task_id)

    assert names(told) == ["workers_busy"]
    assert [(worker.worker.id, worker.holding) for worker in told.evidence.workers or ()] == [("w1", 2)]
    assert re.match(r"No worker that can take demo has asked for work for 3 min( \d+ s)?: 1 worker is busy with 2 "
                    r"leases; the last sign of life came ", told.summary)


async def test_nothing_keeps_a_task_that_the_next_claim_gets(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim()
    task_id = await gate.create()

    told = await ask(task_id)

    assert names(told) == ["claimable"]
    assert [worker.worker.id for worker in told.evidence.workers or ()] == ["w1"]
    assert await gate.claim() is not None


# After its end.


async def test_a_success_that_nobody_can_find_is_still_owed(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer), result={"ok": True})

    told = await ask(offer.task_id)

    assert names(told) == ["owed"]
    assert (told.next.operation, told.evidence.receipt_ids) == ("attach_artifacts", [offer.obligation_receipt_id])
    await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=[{"uri": "file:///out"}])
    assert names(await ask(offer.task_id)) == ["ended"]


async def test_a_success_whose_result_is_known_is_over(gate: harness.Gate, ask: Ask) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "file:///out"}])
    gate.skip(300)

    told = await ask(offer.task_id)

    assert (names(told), told.status) == (["ended"], "succeeded")
    assert re.fullmatch(rf"It succeeded {FIVE} ago, and nothing is owed\.", told.summary)


LONG_ERROR = f"line one\nline two {'x' * 300}"


@pytest.mark.parametrize(("error", "cause", "reason"), [
    ({"code": "Timeout", "message": "the page does not answer (3)."}, "the page does not answer (3)",
     "the page does not answer (3)."),
    ({"why": [1, 2]}, '{"why":[1,2]}', '{"why":[1,2]}'),
    (LONG_ERROR, f"line one line two {'x' * 181}…", LONG_ERROR),
    (None, "no error was given", None)], ids=["message", "no message", "long", "nothing"])
async def test_a_failed_task_says_after_how_many_attempts_and_why(
        gate: harness.Gate, error: Any, cause: str, reason: str | None) -> None:
    task_id = await gate.create(max_attempts=2, retry_backoff_seconds=0)
    for _ in range(2):
        offer = await gate.claim()
        assert offer is not None
        await gate.as_worker().fail(**harness.under(offer), error=error, retryable=True)
    gate.skip(300)

    told = await gate.as_agent().explain_task(task_id=task_id)

    assert (names(told), told.status, told.next.why) == (["ended"], "failed", "see the whole error")
    assert re.fullmatch(rf"It failed {FIVE} ago, after 2 of 2 attempts: {re.escape(cause)}\.", told.summary)
    assert (told.evidence.attempt, told.evidence.max_attempts, told.evidence.reason) == (2, 2, reason)
    assert [str(worker.worker) for worker in told.evidence.workers or ()] == ["worker w1"]


@pytest.mark.parametrize(("most", "reason"), [
    (1, "after its only attempt: no."), (3, "after 1 of 3 attempts; its worker asked for no other attempt: no.")])
async def test_a_task_that_failed_at_once_says_why_there_was_no_other_attempt(gate: harness.Gate, most: int,
                                                                              reason: str) -> None:
    offer = await gate.leased(max_attempts=most)
    await gate.as_worker().fail(**harness.under(offer), error="no")

    told = await gate.as_agent().explain_task(task_id=offer.task_id)

    assert told.summary.endswith(f" ago, {reason}")


@pytest.mark.parametrize(("reason", "ending"), [
    ("asked twice", ": asked twice."), (None, "; no reason was given.")], ids=["a reason", "no reason"])
async def test_a_canceled_task_says_who_canceled_it_and_why(
        gate: harness.Gate, ask: Ask, reason: str | None, ending: str) -> None:
    task_id = await gate.create()
    await gate.as_admin().cancel_task(task_id=task_id, reason=reason)
    gate.skip(300)

    told = await ask(task_id)

    assert (names(told), told.status, told.next.operation) == (["ended"], "canceled", "get_task_history")
    assert re.fullmatch(rf"It was canceled {FIVE} ago by human root{ending}", told.summary)
    assert (str(told.evidence.by), told.evidence.reason) == ("human root", reason)


# Beside a ledger.


@pytest.fixture
def beside_ledger(gate: harness.Gate) -> harness.Gate:
    """The same tenant through a gate that has a ledger."""
    return gate.beside(**{**SETTINGS, "receipt_mode": "memorygate_integrated",
                          "ledger": settings.LedgerSettings(url="http://127.0.0.1:1/")})


async def test_the_ledger_has_refused_a_receipt(gate: harness.Gate, beside_ledger: harness.Gate) -> None:
    offer = await gate.finished()
    await post(gate, offer.task_id, "parked", "no such tenant")

    told = await beside_ledger.as_admin().explain_task(task_id=offer.task_id)

    assert names(told) == ["ledger_parked", "ended"]
    assert (told.evidence.reason, told.evidence.tries) == ("no such tenant", 3)
    assert told.summary == ("The ledger refused 1 receipt of it: no such tenant. What it refused is kept here until an "
                            "operator offers it again.")


async def test_a_receipt_waits_for_the_ledger(gate: harness.Gate, beside_ledger: harness.Gate) -> None:
    offer = await gate.leased()
    await post(gate, offer.task_id, "waiting")

    told = await beside_ledger.as_admin().explain_task(task_id=offer.task_id)

    assert names(told) == ["leased", "ledger_waiting"]
    assert re.fullmatch(r"1 receipt of it has been waiting for the ledger for 1 min( \d+ s)?\.", told.also[0].summary)
    assert told.also[0].evidence.receipt_ids == [(await gate.receipts(offer.task_id))[0].receipt_id]


# Several at once.


async def test_a_delayed_task_that_nobody_could_do_either(gate: harness.Gate, ask: Ask) -> None:
    await gate.claim(accept_types=["other"])
    task_id = await gate.create(delay_seconds=60)

    assert names(await ask(task_id)) == ["delay", "no_worker"]


async def test_busy_workers_and_a_queue(gate: harness.Gate, ask: Ask) -> None:
    await gate.leased()
    gate.skip(IDLE)
    await gate.as_worker().list_leases()
    await gate.create()
    task_id = await gate.create()

    assert names(await ask(task_id)) == ["workers_busy", "behind"]


async def test_a_full_tenant_and_a_queue(gate: harness.Gate, ask: Ask) -> None:
    for _ in range(3):
        await gate.leased()
    await gate.create()
    task_id = await gate.create()

    assert names(await ask(task_id)) == ["lease_quota", "behind"]


async def test_a_success_that_is_owed_and_waits_for_the_ledger(gate: harness.Gate, beside_ledger: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer), result={"ok": True})
    await post(gate, offer.task_id, "waiting")

    assert names(await beside_ledger.as_admin().explain_task(task_id=offer.task_id)) == ["owed", "ledger_waiting"]


# Who may ask.


async def test_only_the_owner_and_admins_of_the_tenant_may_ask(gate: harness.Gate) -> None:
    task_id = await gate.create()

    with harness.refused("forbidden"):
        await gate.as_agent("bob").explain_task(task_id=task_id)
    with harness.refused("forbidden"):
        await gate.as_worker().explain_task(task_id=task_id)
    with harness.refused("task_not_found"):
        await gate.stranger().as_admin().explain_task(task_id=task_id)


async def test_asking_changes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        await gate.as_agent().explain_task(task_id=offer.task_id)


def test_each_cause_has_one_function() -> None:
    assert len(CAUSES) == len(wire_workers.CauseName.__args__)   # type: ignore[attr-defined]
