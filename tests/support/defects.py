"""Gates that are broken on purpose, one rule each: what the checker is worth is how fast it finds them.

    await try_defect("fence_not_raised", seed)      # a gate in this process, with lost replies
    break_for_good("fence_not_raised")              # the gates of a process, such as the `first` of a TorturePlan
    await run_broken_round("fence_not_raised", seed, 1, folder)     # such gates, in a round of torture

Each patches the engine, an extra, or the tables of SQLite; its decorator names the checks that must find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

import asyncgate
from asyncgate import CLAIM, EXPIRE, Engine, Needs, Task, Work
from asyncgate.backends import lanes, sqlite
from asyncgate.backends.memory import Memory
from asyncgate.backends.sqlite_tables import KEYED, SqliteTables
from asyncgate.conformance.faults import Site
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.conformance.history import read_checked_rows
from asyncgate.conformance.load import HASTY_GATE, TENANT, StraightLoad, finish_cascades
from asyncgate.conformance.recording import Recorded
from asyncgate.conformance.torture import Round, TorturePlan, run_round
from asyncgate.conformance.verify import verify
from asyncgate.extras.asking import wire_asking
from asyncgate.extras.families import rules as families
from asyncgate.extras.output import rules as output
from asyncgate.extras.unique import rules as unique
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import clock, stored, stored_journal, wire
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.limiting import Limiting
from asyncgate.parts.model.overdue import alive
from asyncgate.parts.operating import rerun
from asyncgate.parts.upkeep import Upkeep

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
OUTSIDE_SECONDS = 0.01
NEAR = 10.0             # seconds before its end in which a lease is swept too early
CALLS = 500             # of a trial
LOST_REPLIES, SWEPT = 0.04, 0.4        # the shares of replies that get lost, and of moments at which it is swept
LONGEST = 30.0          # seconds of a trial: a broken gate may never answer
ROUND_CALLS = 200       # between two faults of a round of torture, at most
BREAK = "from tests.support.defects import break_for_good; break_for_good({name!r})"


class Patches(contextlib.ExitStack):
    """Changes of classes and modules, which are taken back."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put another value in the place of an attribute."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def change(self, owner: Any, name: str, make: Make) -> None:
        """Put another function in the place of a function."""
        real = getattr(owner, name)
        self.set(owner, name, functools.wraps(real)(make(real)))

    def save(self, before: Callable[[Any, Work], object]) -> None:
        """Change a batch before it is saved."""
        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def save(backend: Any, work: Work) -> None:
                before(backend, work)
                real(backend, work)
            return save
        self.change(SqliteTables, "_save", make)

    def decide(self, kind: type[Any], before: Callable[[Work, Any, Callable[[Any], Any]], object]) -> None:
        """Do something before a request of a kind is decided; it may have another one decided."""
        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def write(engine: Engine, run: Any, loads: Any, caller: Any, ask: Any) -> Any:
                def decide(engine: Engine, work: Work, caller: Any, ask: Any) -> Any:
                    before(work, ask, lambda other: run(engine, work, caller, other))
                    return run(engine, work, caller, ask)
                return real(engine, decide if isinstance(ask, kind) else run, loads, caller, ask)
            return write
        self.change(Engine, "write", make)


class Defect(NamedTuple):
    """What is broken, which checks must find it, and the fault that it needs for that."""

    break_gate: Callable[[Patches], None]
    found_by: frozenset[str]
    fault: str      # of torture; without it lost replies are enough, in a gate in this process


DEFECTS: dict[str, Defect] = {}


def defect(*found_by: str, fault: str = "") -> Callable[[Callable[[Patches], None]], Callable[[Patches], None]]:
    """Register a defect under the name of its function."""
    def register(break_gate: Callable[[Patches], None]) -> Callable[[Patches], None]:
        DEFECTS[break_gate.__name__] = Defect(break_gate, frozenset(found_by), fault)
        return break_gate
    return register


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Have the gates of this process broken during a block."""
    with Patches() as patches:
        DEFECTS[name].break_gate(patches)
        yield


def break_for_good(name: str) -> None:
    """Have the gates of this process broken until it ends."""
    DEFECTS[name].break_gate(Patches())


class Sometimes:
    """True at every nth call."""

    def __init__(self, nth: int) -> None:
        self.nth, self.number = nth, 0

    def __call__(self) -> bool:
        self.number += 1
        return self.number % self.nth == 0


# Leases and their fences.


@defect("I3")
def fence_not_raised(patches: Patches) -> None:
    """A lease gets the fence of the one before."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(work: Work, task: Task, step: Any, **changes: Any) -> Any:
            return real(work, task, step, **changes | ({"fence": max(task.fence, 1)} if step is CLAIM else {}))
        return move
    patches.change(Work, "move_task", make)


@defect("I2", "I3", "I8")
def lease_read_outside_the_lock(patches: Patches) -> None:
    """A batch is decided on what was there a moment before its transaction."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        async def transact(backend: Any, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
            loaded = list[Work]()
            await real(backend, tenant_id, needs, loaded.append)
            await asyncio.sleep(OUTSIDE_SECONDS)
            backend._load, load = (lambda *named: loaded[-1]), backend._load
            try:
                await real(backend, tenant_id, needs, decide)
            finally:
                backend._load = load
        return transact
    patches.change(Memory, "transact", make)
    for name in ("parallel", "parallel_per_tenant"):
        patches.set(Memory, name, 4)


@defect("I2", "I5")
def live_lease_swept(patches: Patches) -> None:
    """The sweep takes leases back some seconds before they end."""
    def is_lost(task: Task, lease: Any, now: float, grace: float) -> bool:
        return task.status in stored.ACTIVE and lease is not None and not alive(lease, now + NEAR, grace)

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        async def overdue(backend: Any, now: float, grace: float, limit: int) -> Any:
            return await real(backend, now + NEAR, grace, limit)
        return overdue
    patches.change(asyncgate, "is_lost", lambda real: is_lost)
    patches.change(SqliteTables, "overdue", make)


@defect("I5")
def expired_lease_used(patches: Patches) -> None:
    """A lease that has run out is good until the sweep has seen it."""
    patches.change(asyncgate, "lost", lambda real: lambda lease, holder, ask, now, grace: real(
        lease, holder, ask, 0.0, grace))


@defect("I4")
def lease_used_by_a_stranger(patches: Patches) -> None:
    """Whoever knows the id of a lease may use it."""
    patches.change(asyncgate, "lost", lambda real: lambda lease, holder, ask, now, grace: real(
        lease, holder if lease is None else lease.worker, ask, now, grace))


@defect("I1", "I2")
def renewal_not_stored(patches: Patches) -> None:
    """The first state of a lease is stored, and no renewal."""
    def drop(backend: Any, work: Work) -> None:
        work.leased = {id: lease for id, lease in work.leased.items() if lease.ending != "live" or not lease.renewals}
    patches.save(drop)


@defect("I6")
def attempt_spent_by_an_expiry(patches: Patches) -> None:
    """A lost lease counts as a failure."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(work: Work, task: Task, step: Any, **changes: Any) -> Any:
            return real(work, task, step, **changes | ({"attempt": task.attempt + 1} if step is EXPIRE else {}))
        return move
    patches.change(Work, "move_task", make)


@defect("PARKS")
def park_ends_at_once(patches: Patches) -> None:
    """A task that is parked until a time is offered before."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(work: Work, task: Task, step: Any, **changes: Any) -> Any:
            return real(work, task, step, **changes | ({"next_eligible_at": None} if step is EXPIRE else {}))
        return move
    patches.change(Work, "move_task", make)


@defect("PAUSES")
def pause_overlooked(patches: Patches) -> None:
    """Claims do not look at what is paused."""
    for owner in (asyncgate, lanes):
        patches.change(owner, "find_pauses", lambda real: lambda row, now: ())


@defect("ORDER")
def priority_overlooked(patches: Patches) -> None:
    """The oldest task is offered first, whatever its priority."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def heads(backend: Any, tenant_id: str, lanes: Any, enough: int) -> Iterator[Any]:
            yield from sorted(real(backend, tenant_id, lanes, 1000), key=lambda row: row[1])
        return heads
    patches.change(SqliteTables, "_heads", make)
    patches.change(asyncgate, "rank", lambda real: lambda ask, at: (False, 0, at.task_id))


# Commits.


@defect("I1")
def acknowledged_before_the_commit(patches: Patches) -> None:
    """A batch is answered, and now and then it is not there."""
    is_lost = Sometimes(9)
    patches.change(SqliteTables, "_save", lambda real: lambda backend, work: is_lost() or real(backend, work))


@defect("I1", fault="power")
def ack_before_fsync(patches: Patches) -> None:
    """A batch is answered when it is committed, and synced some time later."""
    patches.set(sqlite, "PRAGMAS", sqlite.PRAGMAS.replace("synchronous = FULL", "synchronous = NORMAL"))


@defect("I7", fault="clock")
def clock_followed(patches: Patches) -> None:
    """The clock of a gate jumps with that of its machine."""
    patches.set(clock, "SLEW", 1e9)


@defect("LEDGER", fault="ledger")
def outbox_row_dropped(patches: Patches) -> None:
    """A receipt is stored, and now and then the outbox has no row that would bring it to the ledger."""
    is_lost = Sometimes(20)

    def drop(backend: Any, work: Work) -> None:
        if work.posted and is_lost():
            work.posted = {}
    patches.save(drop)


@defect("I1", "I8")
def receipt_without_its_state(patches: Patches) -> None:
    """The end of a task is told, and not stored with the task."""
    is_lost = Sometimes(5)

    def drop(backend: Any, work: Work) -> None:
        if any(task.status in stored.TERMINAL for task in work.moved.values()) and is_lost():
            work.moved = {}
    patches.save(drop)


@defect("I8")
def state_without_its_receipt(patches: Patches) -> None:
    """The end of a task is stored, and its owner is not told."""
    is_lost = Sometimes(5)

    def drop(backend: Any, work: Work) -> None:
        if is_lost():
            work.written = {id: row for id, row in work.written.items() if row.receipt_type != "task.result_ready"}
    patches.save(drop)


@defect("I12")
def cursor_past_an_open_commit(patches: Patches) -> None:
    """A receipt is there only after later ones, and whoever follows a cursor has gone past it."""
    held, is_late, number = dict[str, Any](), Sometimes(3), itertools.count()

    def delay(backend: Any, work: Work) -> None:
        late, due = {}, {id: row for id, row in held.items() if row[0] == work.tenant_id}
        if is_late():
            late = {id: row for id, row in work.written.items() if row.receipt_type == "task.result_ready"}
        work.written = {id: row for id, row in work.written.items() if id not in late}
        work.written.update((id, held.pop(id)[1]) for id in (due if next(number) % 40 == 0 else ()))
        held.update((id, (work.tenant_id, row)) for id, row in late.items())
    patches.save(delay)


@defect("I9")
def obligation_not_discharged(patches: Patches) -> None:
    """What is discharged stays in the index of what is owed."""
    is_left = Sometimes(5)

    def leave(backend: Any, work: Work) -> None:
        if is_left():
            work.closed = {}
    patches.save(leave)


@defect("I7")
def stale_read(patches: Patches) -> None:
    """A task is shown as it was when it was first read."""
    seen: dict[Any, Any] = {}

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        async def read(backend: Any, tenant_id: str, task_id: str) -> Any:
            if (row := await real(backend, tenant_id, task_id)) is not None:
                return seen.setdefault((id(backend), task_id), row)
            return row
        return read
    patches.change(SqliteTables, "task", make)


# Requests that are repeated.


@defect("I10")
def key_not_looked_up(patches: Patches) -> None:
    """A creation that is repeated makes another task."""
    def forget(backend: Any, work: Work) -> None:
        for id, task in work.added.items():
            named = (work.tenant_id, task.owner_kind, task.owner_id, task.idempotency_key)
            if task.idempotency_key and backend.db.execute(KEYED, named).fetchone():
                work.added[id] = replace(task, idempotency_key=None)

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(backend: Any, tenant_id: str, needs: Needs) -> Work:
            needs.keys = set()
            return real(backend, tenant_id, needs)  # type: ignore[no-any-return]
        return load
    patches.change(SqliteTables, "_load", make)
    patches.save(forget)


@defect("CREATIONS")
def key_checked_after_the_insert(patches: Patches) -> None:
    """A creation that is repeated is answered with the first task, and has made another one."""
    def insert(work: Work, ask: wire.CreateTask, decide: Callable[[Any], Any]) -> None:
        if ask.idempotency_key and any(key[2] == ask.idempotency_key for key in work.keys):
            decide(replace(ask, idempotency_key=None, unique=None))
    patches.decide(wire.CreateTask, insert)


@defect("QUESTIONS", "ANSWERS")
def answer_accepted_twice(patches: Patches) -> None:
    """A question may be answered again, otherwise."""
    def reopen(work: Work, ask: Any, decide: Callable[[Any], Any]) -> None:
        if (row := work.progress.get(ask.task_id)) is None:
            return
        questions = [replace(question, answer_id=None, state="open") if question.key == ask.key
                     and question.state in ("accept", "decline") else question
                     for question in stored.read_questions(row).values()]
        work.progress[ask.task_id] = replace(row, inputs=encode_json(questions).decode())
    patches.decide(wire_asking.AnswerInput, reopen)


@defect("STEPS")
def step_not_stored(patches: Patches) -> None:
    """A step is acknowledged, and now and then it is not there."""
    is_lost = Sometimes(5)

    def drop(backend: Any, work: Work) -> None:
        work.kept = {place: row for place, row in work.kept.items()
                     if place[0] is not stored_journal.RecordedStep or not is_lost()}
    patches.save(drop)


@defect("OUTPUTS")
def chunk_stored_twice(patches: Patches) -> None:
    """Chunks that are appended again are there twice."""
    patches.change(output, "count_known", lambda real: lambda task, before, ask: 0)


@defect("UNIQUE")
def unique_key_held_twice(patches: Patches) -> None:
    """Who holds a key is not looked up."""
    patches.change(unique, "list_holders", lambda real: lambda work, row: [])


@defect("I1", "I7", "I8")
def ended_task_canceled(patches: Patches) -> None:
    """A task that has succeeded can still be canceled."""
    def reopen(work: Work, ask: wire.CancelTask, decide: Callable[[Any], Any]) -> None:
        if (task := work.tasks.get(ask.task_id)) and task.status == "succeeded":
            work.tasks[ask.task_id] = replace(task, status="queued")
    patches.decide(wire.CancelTask, reopen)


# What belongs together.


@defect("LIMITS")
def limit_counted_by_position(patches: Patches) -> None:
    """A limit counts the leases of one batch, not those that live."""
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(backend: Any, work: Work, *named: str) -> None:
            real(backend, work, *named)
            work.limiting.held.update(dict.fromkeys(work.limiting.held, 0))
        return load
    for name in ("_load_limit", "_load_key"):
        patches.change(SqliteTables, name, make)


@defect("LIMITS")
def slot_not_given_back(patches: Patches) -> None:
    """A lease that has ended goes on to count against its limits, now and then."""
    is_left = Sometimes(4)
    patches.change(Limiting, "end_lease", lambda real: lambda limiting, task: is_left() or real(limiting, task))


@defect("FAMILIES")
def end_of_a_child_not_counted(patches: Patches) -> None:
    """The end of every third child is not told to its parent."""
    is_lost = Sometimes(3)
    patches.change(asyncgate, "end_child", lambda real: lambda work, child, status: (
        child.parent_task_id is not None and is_lost()) or real(work, child, status))


@defect("CASCADES")
def cascade_stops_early(patches: Patches) -> None:
    """A cascade leaves the last child of each piece."""
    patches.change(families, "cancel_children", lambda real: lambda engine, tenant_id, ids, parent, cascade: real(
        engine, tenant_id, ids[:-1], parent, cascade))


@defect("RERUNS")
def rerun_not_linked(patches: Patches) -> None:
    """A task that runs another one again does not answer its end."""
    patches.change(rerun, "carry_out_rerun", lambda real: lambda engine, work, plan, by: real(
        engine, work, replace(plan, parents=()), by))


# Trying them.


async def try_defect(name: str, seed: int, calls: int = CALLS) -> Recorded:
    """Serve clients from a gate in this process that is broken so, or from a sound one (``); return its history."""
    with broken(name) if name else contextlib.nullcontext():
        backend = Memory()
        engine = engine_over(backend, settings_for_tests(instance_id="asyncgate-1", **HASTY_GATE))
        load = StraightLoad(Gate(engine, TENANT), seed, agents=2, workers=4)
        load.losing = LOST_REPLIES
        passing = asyncio.create_task(pass_time(load, engine))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST), load.running():
                await load.grown(calls)
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
    await finish_cascades(backend)
    rows = {kind.__name__: of_kind for kind, of_kind in (await read_checked_rows(backend, TENANT)).items()}
    others = [f"VERIFY: {problem}" for problem in (await verify(backend)).problems]
    await backend.close()
    return Recorded({"defect": name, "seed": seed}, TENANT, load.calls, [], rows, others)


async def run_broken_round(name: str, seed: int, number: int, folder: Path) -> Round:
    """Run a round of torture whose gates are broken so, with the fault that shows it."""
    plan = TorturePlan("sqlite:", (DEFECTS[name].fault or "kill",), seed, calls=ROUND_CALLS,
                       first=BREAK.format(name=name))
    return await run_round(plan, Site("sqlite:", folder), number)


async def pass_time(load: StraightLoad, engine: Engine) -> None:
    """Let time pass faster than it does, so that leases run out, and sweep."""
    while True:
        load.gate.skip(load.random.choice([0.02, 0.02, 0.1, 0.7]))
        await asyncio.sleep(0.01)
        if load.random.random() < SWEPT:
            await Upkeep(engine).once("sweep")
