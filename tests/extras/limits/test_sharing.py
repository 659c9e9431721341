"""Calls that share a batch give what they give when each has a batch of its own, in the same order.

A program of random calls runs on two gates with the same clock and the same ids.  On the first one the calls of a round
share a batch; what that leaves over shares the next one.  On the second one each is decided alone, in the order in
which the first one decided them.  All replies and all that is stored must be equal.

Not compared: whose turn it is under a limit, which is decided by what was read, and what happens to be counted
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

import asyncgate
from asyncgate import Job, Sweep, Work
from asyncgate.backends import open_backend
from asyncgate.backends.postgres import hosts
from asyncgate.conformance import harness
from asyncgate.conformance.load import BULKS, LIMITED, TARGETS, UNIQUE
from asyncgate.conformance.plugin import SHARED
from asyncgate.conformance.postgres_server import connected
from asyncgate.extras.limits.pruning import TurnPruner
from asyncgate.extras.unique.pruning import KeyPruner
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors
from asyncgate.parts.model.queue_changes import QueueChanges
from asyncgate.parts.model.settings import RateLimiting, RateLimits, SecuritySettings, Tier
from asyncgate.parts.receipts.schedules import load_overdue, sweep

pytestmark = pytest.mark.anyio

TENANT, EPOCH = "11111111-1111-4111-8111-111111111111", 1_800_000_000.0
ROUNDS = 30
number_of_call: contextvars.ContextVar[int] = contextvars.ContextVar("number_of_call")
Call = tuple[str, str, str, dict[str, Any]]     # kind and id of the caller, operation, its fields
Place = tuple[int, int]                         # a call of a round, and which of its writes


class Side:
    """A gate whose writes wait until somebody decides which of them share a batch."""

    def __init__(self, backend: Any, **settings: Any) -> None:
        self.backend = backend
        backend.ids, backend.secret, backend.skew = harness.Numbered(), b"secret", 0.0
        backend.clock = lambda: EPOCH + backend.skew
        backend.now = backend.clock         # a process guesses it between two answers of its database
        self.engine = engine_over(harness.OwnTenants(backend), harness.settings_for_tests(
            instance_id="gate", default_tenant_id=TENANT, **settings))
        self.gate = harness.Gate(self.engine, TENANT)
        self.batches = self.engine.batches
        self.batches.join = self._join      # type: ignore[method-assign]
        self.waiting: dict[Place, Job] = {}
        self.writes: dict[int, int] = {}
        self.decided: list[Place] = []
        if (outputs := next((ext for ext in self.engine.extensions if hasattr(ext, "batches")), None)) is not None:
            outputs.batches.join = self._join

    def _join(self, tenant_id: str, job: Job) -> asyncio.Future[Any]:
        number = number_of_call.get()
        self.writes[number] = nth = self.writes.get(number, -1) + 1
        self.waiting[number, nth] = job
        decide, ids = job.decide, self.backend.ids

        def decide_and_note(work: Work) -> None:
            before = ids.given
            decide(work)
            if job.left:
                ids.given = before
            else:
                self.decided.append((number, nth))
        job.decide = decide_and_note        # type: ignore[method-assign]
        return job.answer

    async def begin(self, calls: list[Call]) -> None:
        """Begin the calls of a round, one after the other; each goes on until it wants to write."""
        self.writes.clear()
        self.calls = []
        for number, call in enumerate(calls):
            context = contextvars.copy_context()
            context.run(number_of_call.set, number)
            self.calls.append(asyncio.get_running_loop().create_task(self.answer(call), context=context))
            await self.settle()

    async def answer(self, call: Call) -> Any:
        """Make a call; return what a client reads."""
        kind, id, name, fields = call
        try:
            if name == "sweep":
                caller = self.engine.make_own_caller(TENANT)
                return await self.engine.write(sweep, load_overdue, caller, Sweep(**fields))
            if name == "prune":
                await TurnPruner(self.engine).run()
                return None
            if name == "prune_keys":
                return await KeyPruner(self.engine).run()
            role = {"worker": "worker", "agent": "agent", "human": "admin"}[kind]
            reply = await getattr(self.gate.as_caller(kind, id, role), name)(**fields)
            return msgspec.json.decode(msgspec.json.encode(reply))
        except errors.GateError as refusal:
            return refusal.code, str(refusal), refusal.more

    async def settle(self) -> None:
        """Let all calls go on until they want to write, or have their answers."""
        while True:
            for _ in range(30):
                await asyncio.sleep(0)
            if len(self.waiting) >= sum(not call.done() for call in self.calls):
                return

    async def carry_out(self, places: list[Place]) -> None:
        """Decide writes in one batch; nobody learns of it yet."""
        jobs = [self.waiting[place] for place in places]
        for job in jobs:
            job.left = False
        await self.batches._carry_out(TENANT, jobs)
        left = self.batches.waiting.pop(TENANT, [])
        for place, job in zip(places, jobs, strict=True):
            if job not in left:
                del self.waiting[place]


async def read_rows(side: Side) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a file by table."""
    db = side.backend.db
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    tables = {name: db.execute(f"SELECT * FROM {name}") for name in names if not name.startswith("sqlite_")}
    return {name: [{column: value for (column, *_), value in zip(cursor.description, row, strict=True)}
                   for row in cursor] for name, cursor in tables.items()}


Read = Callable[[Side], Coroutine[Any, Any, dict[str, list[dict[str, Any]]]]]


async def compare(seed: int, make: Callable[[], Coroutine[Any, Any, Any]], read: Read = read_rows) -> None:
    """Run a program on two gates and compare what they answer and store."""
    program = Program(seed)
    shared, alone = [Side(await make(), **program.settings) for _ in range(2)]
    try:
        for number in range(ROUNDS):
            calls = program.make_round()
            passed = program.draw.choice([0, 0, 0, 1, 1, 5, 31])
            for side in (shared, alone):
                side.backend.skew += passed
                await side.begin(calls)
                side.decided.clear()
            while shared.waiting or alone.waiting:
                assert sorted(shared.waiting) == sorted(alone.waiting), (seed, number, calls)
                shared.decided.clear()
                with late_answers():
                    await shared.carry_out(sorted(shared.waiting) if not program.draw.random() < 0.1 else
                                           program.draw.sample(sorted(shared.waiting), len(shared.waiting)))
                order = [*shared.decided]
                alone.decided.clear()
                with late_answers():
                    for place in order:
                        while place in alone.waiting:       # what it turns out to need is loaded then
                            await alone.carry_out([place])
                assert alone.decided == order, (seed, number, calls)
                await shared.settle()
                await alone.settle()
            answers = [[await call for call in side.calls] for side in (shared, alone)]
            for call, shared_answer, answer in zip(calls, *answers, strict=True):
                assert shared_answer == answer, (seed, number, call, [*zip(calls, answers[0], strict=True)])
            rows = [await everything(side, read) for side in (shared, alone)]
            for kind, shared_rows in rows[0].items():
                assert shared_rows == rows[1][kind], (seed, number, kind, [*zip(calls, answers[0], strict=True)])
            program.learn(calls, answers[0])
    finally:
        for side in (shared, alone):
            await side.backend.close()


@contextlib.contextmanager
def late_answers() -> Iterator[None]:
    """Answer no call inside: what comes after its first write is read when all others are written, too."""
    late: list[tuple[Job, Any]] = []
    settle = Job.settle
    Job.settle = lambda job, error=None: late.append((job, error))      # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Job.settle = settle     # type: ignore[method-assign]
        for job, error in late:
            job.settle(error)


LEFT_OUT = {"audit", "turns", "traffic", "presences", "deliveries", "meters", "audit_heads", "calls", "meta"}


async def everything(side: Side, read: Read) -> dict[str, Any]:
    """Return all rows that are compared."""
    rows = {name: sorted(rows, key=repr) for name, rows in (await read(side)).items() if name not in LEFT_OUT}
    counts = Counter[Any]()         # a batch counts in any slot
    for row in rows["queues"]:
        counts.update({(row["lane"], name): row[name] for name in ("queued", "held", "leased")})
    return {**rows, "queues": sorted((*place, number) for place, number in counts.items() if number)}


ENDS = {"complete", "fail", "release_lease", "request_input"}
SMALL = Tier(active_tasks=12, terminal_tasks=60, concurrent_leases=4, receipts_per_task=8)


class Program:
    """Makes random calls."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        # Whose turn it is under a limit is decided by what was read: so all tasks have it, and wait in one queue.
        self.limits = {"shared": ""} if seed % 3 == 0 else None
        self.settings: dict[str, Any] = {"security": SecuritySettings(rate_limiting=RateLimiting(enabled=True)),
                                         "rate_limits": RateLimits(free_tier=SMALL)} if seed % 4 == 1 else {}
        self.tasks: list[str] = []
        self.leases: list[tuple[str, str, str]] = []        # worker, task, lease
        self.questions: list[tuple[str, str]] = []          # task, key
        self.receipts: list[str] = []
        self.bulks: list[str] = []

    def learn(self, calls: list[Call], answers: list[Any]) -> None:
        for (_, id, name, fields), answer in zip(calls, answers, strict=True):
            lease = id, fields.get("task_id", ""), fields.get("lease_id", "")
            over = isinstance(answer, tuple) and answer[0] == "lease_invalid_or_expired"
            if (over or name in ENDS) and lease in self.leases and self.draw.random() < 0.8:
                self.leases.remove(lease)       # most calls are made under leases that live
            if isinstance(answer, tuple) or answer is None:
                continue
            if name == "request_input":
                self.questions.append((fields["task_id"], fields["key"]))
            if name in ("create_task", "rerun_task"):
                self.tasks.append(answer["task_id"])
            elif name == "create_tasks":
                self.tasks += [item["task_id"] for item in answer["results"] if "task_id" in item]
            elif name == "lease_next":
                self.leases += [(id, offer["task_id"], offer["lease_id"]) for offer in answer["tasks"]]
            elif name == "preview_bulk":
                self.bulks.append(answer["confirmation"])
            elif name == "list_receipts":
                self.receipts += [receipt["receipt_id"] for receipt in answer["receipts"]]

    def pick(self, some: list[Any]) -> Any:
        return self.draw.choice(some[-4:] if self.draw.random() < 0.8 else some)

    def make_round(self) -> list[Call]:
        return [self.make_call() for _ in range(self.draw.choice([1, 2, 3, 5, 8]))]

    def make_call(self) -> Call:
        draw = self.draw
        kinds = [self.create] * 5 + [self.create_many] + [self.claim] * 5 + [self.resume] + [self.operate] * 2
        if self.tasks:
            kinds += [self.end_task] * 3
        if self.questions:
            kinds += [self.answer] * 2
        if self.leases:
            kinds += [self.work] * 9 + [self.complete_many] + [self.schedule]
        return draw.choice(kinds)()

    def create(self) -> Call:
        draw = self.draw
        fields: dict[str, Any] = {
            "type": "demo" if self.limits else draw.choice(["demo", "demo", "demo", "rare", "rare", "schedule.create"]),
            "payload": draw.choice([None, {"n": 1}, {"n": 2}]),
            "priority": draw.choice([None, None, None, 1, -1]),
            "requirements": {} if self.limits else draw.choice([{}, {}, {"capabilities": ["gpu"]}]),
            "limits": self.limits, "max_attempts": draw.choice([None, 1, 2]),
            "max_expiries": draw.choice([None, 0, 1]), "retry_backoff_seconds": draw.choice([None, 0, 1]),
            "delay_seconds": draw.choice([None, None, None, 1, 30]), "max_parks": draw.choice([None, 1])}
        if draw.random() < 0.2:
            fields["idempotency_key"] = draw.choice("abc")
        elif draw.random() < 0.4:
            fields["unique"] = {"key": draw.choice("ab"), **draw.choice(UNIQUE)}
            if draw.random() < 0.3:
                fields["debounce"] = {"seconds": 1}
                fields["delay_seconds"] = None
        if self.tasks and draw.random() < 0.4:
            fields["parent_task_id"] = self.pick(self.tasks)
        return "agent", draw.choice(["ada", "ada", "ada", "bob"]), "create_task", {
            name: value for name, value in fields.items() if value is not None or name == "payload"}

    def create_many(self) -> Call:
        made = [self.create() for _ in range(self.draw.choice([1, 2, 3]))]
        return *made[0][:2], "create_tasks", {"tasks": [fields for *_, fields in made]}

    def complete_many(self) -> Call:
        worker, *_ = self.pick(self.leases)
        mine = [under for who, *under in self.leases[-8:] if who == worker]
        some = self.draw.sample(mine, min(len(mine), 2))
        return "worker", worker, "complete_tasks", {"tasks": [
            {"task_id": task_id, "lease_id": lease_id, "result": 1, "artifacts": [{"uri": "x"}]}
            for task_id, lease_id in some]}

    def resume(self) -> Call:
        return "worker", self.draw.choice(["w0", "w1"]), "list_leases", {
            "resumption_id": self.draw.choice([None, "r1", "r2"])}

    def schedule(self) -> Call:
        draw, (worker, task_id, lease_id) = self.draw, self.pick(self.leases)
        choice: list[tuple[str, dict[str, Any]]] = [
            ("emit_receipt", {"receipt_type": "schedule.created", "task_id": task_id, "lease_id": lease_id,
                              "schedule_id": draw.choice(["s1", "s2"])})] * 2 + [
            ("emit_receipt", {"receipt_type": "schedule.deleted", "parents": [receipt]})
            for receipt in self.receipts[-1:]] + [
            ("report_schedule", {"schedules": [{"schedule_id": draw.choice(["s1", "s2"]),
                                                "next_run_at": "2027-01-15T08:00:10Z"}]})]
        return "worker", worker, *draw.choice(choice)

    def claim(self) -> Call:
        draw = self.draw
        return "worker", draw.choice(["w0", "w1"]), "lease_next", {
            "capabilities": draw.choice([["gpu"], ["gpu"], []]), "accept_types": draw.choice([[], [], ["rare"]]),
            "max_tasks": draw.choice([1, 1, 2, 4]), "claim_id": draw.choice([None, None, "c1", "c2"]),
            "lease_ttl_seconds": draw.choice([None, None, 10, 60])}

    def end_task(self) -> Call:
        draw, task_id = self.draw, self.pick(self.tasks)
        choice: list[tuple[str, dict[str, Any]]] = [
            ("cancel_task", {"cascade": True}), ("cancel_task", {}), ("cancel_task", {}), ("release_hold", {}),
            ("rerun_task", {}), ("attach_artifacts", {"artifacts": [{"uri": "x"}]}), ("get_task", {})]
        name, fields = draw.choice(choice)
        return "human", "root", name, {"task_id": task_id, **fields}

    def answer(self) -> Call:
        task_id, key = self.pick(self.questions)
        return "human", "root", "answer_input", {"task_id": task_id, "key": key, **self.draw.choice([
            {"action": "accept", "content": 1}, {"action": "decline"}])}

    def work(self) -> Call:
        draw, (worker, task_id, lease_id) = self.draw, self.pick(self.leases)
        under = {"task_id": task_id, "lease_id": lease_id}
        choice: list[tuple[str, dict[str, Any]]] = [
            ("complete", {"result": 1, "artifacts": [{"uri": "x"}]}), ("complete", {"result": 2}),
            ("complete", {"result": 1, "artifacts": [{"uri": "x"}], "cost": draw.choice([0.5, 3])}),
            ("fail", {"error": "e", "retryable": True}), ("fail", {"error": "e", "retryable": False}),
            ("fail", {"error": "e", "retryable": True, "retry_after_seconds": 0}),
            ("fail", {"error": "e", "retryable": True, "stop_limit": draw.choice(["shared", "each"])}),
            ("release_lease", {}), ("release_lease", {"after_seconds": 30}),
            ("release_lease", {"until_children": draw.choice(["all", "any"])}),
            ("release_lease", {"until_children": "all", "after_seconds": 30}),
            ("append_output", {"chunks": ["a", "b"][:draw.choice([1, 2])], "position": draw.choice([None, 0, 1, 2])}),
            ("append_output", {"chunks": ["a"], "stream": draw.choice(["log", "output"])}),
            ("renew_lease", {"extend_by_seconds": 100}), ("start_task", {}), ("report_progress", {"progress": 1}),
            ("record_step", {"seq": draw.choice([1, 2]), "name": "s", "value": draw.choice([1, 2])}),
            ("request_input", {"key": draw.choice(["q1", "q2"]), "message": "?",
                               "keep_lease": draw.choice([True, False]),
                               "expires_in_seconds": draw.choice([None, 10]),
                               "on_expiry": draw.choice(["resume", "fail"])})]
        name, fields = draw.choice(choice)
        if name == "renew_lease" and draw.random() < 0.5:
            del under["task_id"]
        return "worker", worker, name, {**under, **fields}

    def operate(self) -> Call:
        draw = self.draw
        choice = draw.randrange(10)
        if choice == 0:
            return "human", "root", "set_limit", draw.choice([*LIMITED, {"name": "shared", "rate": {
                "count": 2, "seconds": 60}}, {"name": "each", "rate": {"count": 3, "seconds": 30}}])
        if choice == 1:
            return "human", "root", "remove_limit", {"name": draw.choice(["shared", "each"])}
        if choice == 2:
            return "human", "root", draw.choice(["pause_work", "resume_work", "resume_work"]), draw.choice(TARGETS)
        if choice == 3:
            bulk = draw.choice(BULKS)
            return "human", "root", "preview_bulk", {
                **bulk, **({"priority": draw.choice([0, 3])} if bulk["action"] == "prioritize" else {})}
        if choice == 4 and self.bulks:
            return "human", "root", "run_bulk", {"confirmation": self.bulks[-1]}
        if choice == 5:
            return "", "", "sweep", {"tasks": self.draw.sample(self.tasks, min(3, len(self.tasks))),
                                     "schedules": ["s1", "s2"]}
        if choice == 6:
            return "", "", draw.choice(["prune", "prune_keys"]), {}
        if choice == 8:
            settings: list[tuple[str, dict[str, Any]]] = [
                ("set_limits", {"tenant": TENANT, "max_payload_bytes": draw.choice([5, 1024])}),
                ("set_limits", {"tenant": TENANT, "max_lease_ttl_seconds": draw.choice([20, 100])}),
                ("set_limits", {"tenant": TENANT, "tier": draw.choice(["free", "paid"])}),
                ("declare_type", {"type": "demo", "payload_schema": {"type": draw.choice(["object", "null"])}}),
                ("set_type_policy", {"on_mismatch": draw.choice(["warn", "refuse"])}),
                ("remove_type", {"type": "demo"}), ("drain_work", {"worker": "w0"}),
                ("pause_schedule", {"schedule_id": "s1"}), ("run_schedule", {"schedule_id": "s1"})]
            return "human", "root", *draw.choice(settings)
        if choice == 7 and self.receipts:
            return "human", "root", "ack_receipt", {"receipt_id": self.pick(self.receipts)}
        return "human", "root", "list_receipts", {"newest": True, "limit": 5}


@pytest.mark.parametrize(("scheme", "seeds"), [("memory", range(12)), ("sqlite", range(12, 15))])
async def test_calls_of_one_batch_give_what_they_give_alone(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, seeds: range) -> None:
    monkeypatch.setattr(asyncgate, "make_salt", lambda: "salt")
    monkeypatch.setattr(asyncgate, "SLICE_SECONDS", 1e9)
    numbers = count()
    for seed in seeds:
        await compare(seed, lambda: open_backend(f"{scheme}:///{tmp_path}/{next(numbers)}.db"))


# A clock that only moves with the gate: it is asked within statements, too.
STOP_CLOCK = f"""
CREATE SCHEMA stopped;
GRANT USAGE ON SCHEMA stopped TO PUBLIC;
CREATE FUNCTION stopped.clock_timestamp() RETURNS timestamptz RETURN to_timestamp({EPOCH});
CREATE FUNCTION stopped.statement_timestamp() RETURNS timestamptz RETURN to_timestamp({EPOCH})"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'asyncgate' ORDER BY tablename"


async def test_calls_of_one_batch_give_what_they_give_alone_on_postgres(
        monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, fresh: Any) -> None:
    monkeypatch.setattr(asyncgate, "make_salt", lambda: "salt")
    monkeypatch.setattr(asyncgate, "SLICE_SECONDS", 1e9)
    monkeypatch.setitem(hosts.PINNED, "search_path", "stopped, pg_catalog, pg_temp")

    def administer(url: str) -> Any:
        server: Any = pytestconfig.stash[SHARED].server
        return connected(server.admin_url(url.rpartition("/")[2]))

    async def stop_clock(url: str) -> None:
        async with administer(url) as db:
            await db.execute(STOP_CLOCK)

    async def read_tables(side: Side) -> dict[str, list[dict[str, Any]]]:
        async with administer(side.backend.url) as db:
            tables = {name: list[dict[str, Any]]() for (name,) in await db.fetch(TABLES)}
            for name, row in await db.fetch(" UNION ALL ".join(
                    f"SELECT '{name}', to_jsonb(t) FROM asyncgate.{name} AS t" for name in tables)):
                tables[name].append(json.loads(row))
        return tables

    async def make() -> Any:
        return await open_backend(await fresh("postgres", stop_clock))
    for seed in range(15, 18):
        await compare(seed, make, read_tables)


async def test_a_claim_that_goes_by_what_its_batch_has_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(asyncgate, "make_salt", lambda: "salt")
    monkeypatch.setattr(QueueChanges, "begin_claim", lambda self, freed: None)
    seed = 1
    with pytest.raises(AssertionError, match="lease_next"):
        await compare(seed, lambda: open_backend("memory://"))
