"""Random programs with keys of unique work, beside the simplest account of them: no key is ever held twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from msgspec import UNSET

from asyncgate.conformance import harness
from asyncgate.parts.model import errors, queries, stored_unique, wire

pytestmark = pytest.mark.anyio
ENDED = ("succeeded", "failed", "canceled")
KEYS = ("a", "b")
wishes = st.tuples(st.sampled_from(KEYS), st.sampled_from(["unfinished", "unfinished", "queued", 100]),
                   st.sampled_from(["return", "refuse", "replace", "supersede", "keep_latest", "keep_latest"])).map(
    lambda wish: wish if wish[2] != "keep_latest" else (wish[0], "unfinished", wish[2]))
bounces = st.sampled_from([None, None, None, (20, None), (20, 30)])
steps = st.one_of(
    st.tuples(st.just("create"), st.integers(0, 1), wishes, st.integers(0, 3), bounces),
    st.tuples(st.just("create"), st.integers(0, 1), wishes, st.integers(0, 3), bounces),
    st.tuples(st.just("create_several"), st.integers(0, 1), st.lists(wishes, min_size=2, max_size=4)),
    st.tuples(st.just("claim"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 1), st.integers(0, 9), st.sampled_from(
        ["complete", "fail", "retry", "release", "cancel"])),
    st.tuples(st.just("cancel_waiting"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("skip"), st.sampled_from([5, 15, 60])),
    st.tuples(st.just("race"), wishes),
    st.tuples(st.just("kill"), wishes))


@dataclass
class Known:
    """A task, as the account knows it."""

    task_id: str
    key: str
    lasts: Any
    payload: int
    created_at: float
    status: str = "queued"
    begun: bool = False
    behind: str | None = None           # the task for whose end it waits
    due: float | None = None
    superseded_by: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.status not in ENDED

    def holds(self, now: float) -> bool:
        """Whether it holds its key."""
        if self.lasts == "queued":
            return self.is_open and not self.begun
        return self.is_open if self.lasts == "unfinished" else now < self.created_at + self.lasts


class Account:
    """What a gate has been told, and what follows from it for keys."""

    def __init__(self) -> None:
        self.tasks: dict[str, Known] = {}
        self.last: dict[str, list[str]] = {}        # by key: who took it last, and who waits for the end of that one
        self.since: dict[str, float] = {}

    def holders(self, key: str, now: float) -> list[Known]:
        """Return who holds a key, and who waits for it."""
        return [task for task in map(self.tasks.__getitem__, self.last.get(key, ())) if task.holds(now)]

    def create(self, wish: tuple[str, Any, str], payload: int, bounce: Any, now: float,
               reply: Any) -> None:
        """Note what a call was answered, which must be what follows from the account."""
        key, lasts, conflict = wish
        holders = self.holders(key, now)
        last = holders[-1] if holders else None
        if last is not None and (conflict == "refuse" or (conflict == "replace" and last.begun)):
            assert isinstance(reply, errors.UniqueConflict), reply
            assert reply.body()["task_id"] == last.task_id
            return
        assert isinstance(reply, wire.Created | wire.Item), reply
        task_id = str(reply.task_id)
        if last is not None and conflict in ("return", "replace"):
            assert (task_id, reply.unique) == (last.task_id, "returned" if conflict == "return" else "replaced")
            if conflict == "replace":
                last.payload = payload
            if bounce and not last.begun and (last.due or 0) > now:
                last.due = find_due(bounce, now, self.since[key])
            return
        assert task_id not in self.tasks, "an old task was given, and nothing holds the key"
        new = self.tasks[task_id] = Known(task_id, key, lasts, payload, now)
        self.since[key] = now if last is None or last.begun else self.since[key]
        new.due = find_due(bounce, now, self.since[key]) if bounce else None
        at_work = next((task for task in holders if task.begun and task.is_open), None)
        stays = at_work if conflict == "keep_latest" else None
        for task in holders:
            if task.is_open and task is not stays:
                self.finish(task, "canceled")
                task.superseded_by = task_id
        if stays is None:
            self.last[key] = [task_id]
        else:
            new.behind = stays.task_id
            self.last[key] = [stays.task_id, task_id]

    def finish(self, task: Known, status: str) -> None:
        """Let a task end; what waits for it is offered."""
        task.status, task.begun, task.behind = status, True, None
        for other in self.tasks.values():
            if other.behind == task.task_id:
                other.behind = None

    def list_claimable(self, now: float) -> list[Known]:
        """Return what a claim may get, the oldest first."""
        return sorted((task for task in self.tasks.values() if task.status == "queued" and task.behind is None
                       and (task.due or 0) <= now), key=lambda task: task.task_id)


def find_due(bounce: tuple[float, float | None], now: float, since: float) -> float | None:
    """Return until when a task is put off."""
    due = now + bounce[0] if bounce[1] is None else min(now + bounce[0], since + bounce[1])
    return due if due > now else None


class Program:
    """A program against one tenant, through two gates; time stands still within a step."""

    def __init__(self, gate: harness.Gate) -> None:
        self.gates, self.account = [gate, gate.beside()], Account()
        self.leases: dict[str, wire.Offer] = {}

    async def run(self, program: list[Any]) -> None:
        """Do each step, and compare; then finish everything."""
        for name, *values in program:
            await getattr(self, name)(*values)
            await self.compare()
        await self.skip(60)     # of what is put off all is due
        while self.account.list_claimable(float("inf")) or self.leases:
            await self.claim(0)
            for task_id in list(self.leases):
                await self.end(0, 0, "complete", task_id)
        await self.compare()
        assert not [task for task in self.account.tasks.values() if task.is_open], "what waits was never offered"

    def make_ask(self, wish: tuple[str, Any, str], payload: int, bounce: Any = None) -> dict[str, Any]:
        """Return the request for a task."""
        more = {} if bounce is None else {"debounce": {"seconds": bounce[0], "at_most_seconds": bounce[1]}}
        return {"type": "x", "payload": payload,
                "unique": {"key": wish[0], "while": wish[1], "on_conflict": wish[2]}, **more}

    async def ask(self, at: int, ask: dict[str, Any]) -> Any:
        """Create a task, or return the refusal."""
        try:
            return await self.gates[at].as_agent().create_task(**ask)
        except errors.GateError as refusal:
            return refusal

    async def when(self, reply: Any) -> float:
        """Return when a call was decided: the task that it made bears the time."""
        if isinstance(reply, errors.GateError) or reply.task_id in self.account.tasks:
            return self.gates[0].now()
        record = await self.gates[0].task(reply.task_id)
        return record.created_at.timestamp()

    async def create(self, at: int, wish: tuple[str, Any, str], payload: int, bounce: Any) -> None:
        """Create a task."""
        reply = await self.ask(at, self.make_ask(wish, payload, bounce))
        self.account.create(wish, payload, bounce, await self.when(reply), reply)

    async def create_several(self, at: int, listed: list[tuple[str, Any, str]]) -> None:
        """Create some tasks in one call."""
        tasks = [self.make_ask(wish, number) for number, wish in enumerate(listed)]
        done = await self.gates[at].as_agent().create_tasks(tasks=tasks)
        for number, (wish, item) in enumerate(zip(listed, done.results, strict=True)):
            reply = item if item.error is None else errors.UniqueConflict("", task_id=self.name_holder(wish[0]))
            assert item.error is None or item.error.error == "unique_conflict"
            self.account.create(wish, number, None, await self.when(reply), reply)

    def name_holder(self, key: str) -> str | None:
        """Return the task with which a refusal is about."""
        holders = self.account.holders(key, self.gates[0].now())
        return holders[-1].task_id if holders else None

    async def race(self, wish: tuple[str, Any, str]) -> None:
        """Ask two gates at once; one of the two orders explains the answers."""
        wish = (wish[0], wish[1], "return")
        replies = await asyncio.gather(*(self.ask(at, self.make_ask(wish, 7)) for at in (0, 1, 0, 1)))
        replies.sort(key=lambda reply: reply.unique is not UNSET)     # who made it comes first
        for reply in replies:
            self.account.create(wish, 7, None, await self.when(reply), reply)

    async def kill(self, wish: tuple[str, Any, str]) -> None:
        """Break off a call whose outcome nobody learns; another gate goes on, and a repetition is told."""
        ask = {**self.make_ask(wish, 9), "idempotency_key": f"{len(self.account.tasks)} {self.gates[0].now()}"}
        self.gates[1] = await harness.break_off(self.ask(1, ask), self.gates[1])
        reply = await self.ask(1, ask)
        self.account.create(wish, 9, None, await self.when(reply), reply)

    async def claim(self, at: int) -> None:
        """Claim a task."""
        [*offers] = (await self.gates[at].as_worker().lease_next()).tasks
        claimable = self.account.list_claimable(self.gates[0].now())
        assert [offer.task_id for offer in offers] == [task.task_id for task in claimable[:1]]
        for offer in offers:
            task = self.account.tasks[offer.task_id]
            task.status, task.begun, self.leases[task.task_id] = "leased", True, offer
            assert bytes(offer.payload) == b"%d" % task.payload

    async def end(self, at: int, number: int, how: str, task_id: str | None = None) -> None:
        """End a lease in one of many ways."""
        leased = [task for task in sorted(self.leases) if self.account.tasks[task].status == "leased"]
        self.leases = {task: self.leases[task] for task in leased}
        if not leased:
            return
        task_id = task_id if task_id in leased else leased[number % len(leased)]
        offer, task, worker = self.leases.pop(task_id), self.account.tasks[task_id], self.gates[at].as_worker()
        if how == "complete":
            await worker.complete(**harness.under(offer, artifacts=["x"]))
        elif how == "cancel":
            await self.gates[at].cancel_task(task_id=task_id)
        elif how == "release":
            await worker.release_lease(**harness.under(offer))
        else:
            released = await worker.fail(**harness.under(offer, error="x", retryable=how == "retry",
                                                         retry_after_seconds=0))
            how = "release" if released.requeued else how
        task.due = None if how == "release" else task.due
        if how == "release":
            task.status = "queued"
        else:
            self.account.finish(task, {"complete": "succeeded", "cancel": "canceled"}.get(how, "failed"))

    async def cancel_waiting(self, at: int, number: int) -> None:
        """Cancel a task that is queued."""
        queued = [task for task in self.account.tasks.values() if task.status == "queued"]
        if queued:
            task = queued[number % len(queued)]
            await self.gates[at].cancel_task(task_id=task.task_id)
            self.account.finish(task, "canceled")

    async def skip(self, seconds: float) -> None:
        """Let time pass, but no lease run out."""
        self.gates[0].skip(seconds)

    async def compare(self) -> None:
        """Compare each task with its record."""
        for task in self.account.tasks.values():
            record = await self.gates[0].task(task.task_id)
            assert (record.status, record.held == "key_taken", int(bytes(record.payload))) == (
                task.status, task.behind is not None, task.payload)
            assert task.superseded_by in (None, record.superseded_by)
        rows = await self.gates[0].backend.page(self.gates[0].tenant_id, queries.Rows(
            stored_unique.UniqueKey, "", 1000))
        assert len(rows) <= len(KEYS)


@settings(max_examples=int(os.environ.get("ASYNCGATE_UNIQUE_EXAMPLES", "25")), deadline=None, print_blob=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
@given(program=st.lists(steps, min_size=1, max_size=25))
async def test_a_random_program_never_sees_a_key_held_twice_or_work_that_is_never_offered(
        make_gate: Callable[..., harness.Gate], program: list[Any]) -> None:
    note(program)
    gate = make_gate(max_lease_ttl_seconds=10**6, default_lease_ttl_seconds=10**6)

    await Program(gate).run(program)
