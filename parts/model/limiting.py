"""Limits: how many tasks of something may run at once, how many may begin in a time, and whose turn it is.

A lane is a type, the capabilities that it needs and the names of its limits, so there are few lanes.  What is true of
all tasks of a lane (a total, a limit that is stopped, a limit without a key) closes the lane, as a pause does.  Within
a lane the tasks with the same keys are a turn.  A claim reads the first open turns and the first tasks of each; a turn
whose key is full is blocked, and the end of a lease under that key opens it again.  So a claim reads as much for one
key as for 100,000.

Only live leases count: each has a Hold for each of its limits, which begins and ends with it, in its transaction.

Some turn of a key that has room is always open: whoever blocks or empties an open turn opens another one under each of
its other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from math import inf, prod
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncgate.parts.model import errors, stored, stored_limits, wire
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.views import decode_terms

MOST_LIMITS = 4                     # of one task
MOST_LIMITS_BYTES = 1000            # of their names and keys: they are in an index
MOST_CONCURRENT = 10_000            # a claim counts up to it
STOPPED_SECONDS = 60.0                 # that a limit is stopped if its worker does not say how long
MOST_TURNS, SPARE_TURNS = 64, 4     # that a claim reads of a lane, and more than it needs: some may be full
Pair = tuple[str, str]              # name and key of a limit
Count = Annotated[int, Meta(ge=0, le=MOST_CONCURRENT)]


class Rate(Struct, frozen=True):
    """How much may begin in a time; a window begins with the first task, and the next one after its end."""

    count: Annotated[float, Meta(gt=0, le=wire.WIDEST), wire.says("tasks, or the sum of their costs")]
    seconds: Annotated[float, Meta(gt=0, le=wire.LONGEST_PAUSE_SECONDS), wire.says("the length of the window")]


class KeyRules(Struct, frozen=True, omit_defaults=True):
    """What differs for one key."""

    concurrency_per_key: Annotated[Count | None, wire.says("leases at once under this key")] = None
    rate: Annotated[Rate | None, wire.says("under this key")] = None
    weight: Annotated[Annotated[float, Meta(ge=0.001, le=1000)], wire.says(
        "how many turns it gets while others get one")] = 1.0


class Rules(Struct, frozen=True, omit_defaults=True):
    """What a limit allows."""

    concurrency_total: Count | None = None
    concurrency_per_key: Count | None = None
    rate: Rate | None = None
    overrides: dict[str, KeyRules] = {}

    def find_most(self, key: str) -> int | None:
        """Return how many leases a key may have at once; None is any number."""
        own = self.overrides.get(key)
        return self.concurrency_per_key if own is None or own.concurrency_per_key is None else own.concurrency_per_key

    def find_rate(self, key: str) -> Rate | None:
        """Return the rate of a key."""
        own = self.overrides.get(key)
        return self.rate if own is None or own.rate is None else own.rate

    def weigh(self, key: str) -> float:
        """Return the weight of a key."""
        return self.overrides[key].weight if key in self.overrides else 1.0


class Full(Struct, frozen=True):
    """Why a task with limits is not leased."""

    name: str
    key: str | None                     # None: all keys of the limit
    reason: str                         # concurrency_total, concurrency_per_key, rate, stopped
    most: float | None = None           # that is allowed
    until: float | None = None          # when that ends by itself


NO_RULES = Rules()


@lru_cache(1024)
def decode_rules(text: str) -> Rules:
    """Decode the stored rules of a limit."""
    return msgspec.json.decode(text, type=Rules)


# The limits of a task, as they are stored: canonical JSON, so that equal limits are equal texts.


def write_limits(limits: Mapping[str, str] | None) -> str | None:
    """Return the limits of a task as they are stored; None if it has none."""
    if not limits:
        return None
    if len(limits) > MOST_LIMITS:
        raise errors.InvalidRequest(f"a task has {MOST_LIMITS} limits at most, and this has {len(limits)}")
    text = to_canonical(dict(limits))
    if len(text) > MOST_LIMITS_BYTES:
        raise errors.InvalidRequest(f"the names and keys of a task's limits have {MOST_LIMITS_BYTES} bytes at most "
                                    f"together, and these have {len(text)}")
    return text.decode()


@lru_cache(1024)
def find_type_limits(listed: tuple[str, ...], type: str) -> dict[str, str]:
    """Return the limits of tasks of a type that name none, as the setting `type_limits` lists them."""
    pairs = [entry.partition("=")[2].partition(":") for entry in listed if entry.partition("=")[0] == type]
    return {name: key for name, _, key in pairs}


@lru_cache(8192)
def read_limits(text: str | None) -> tuple[Pair, ...]:
    """Return the limits of a task, in the order of their names."""
    return tuple(sorted(msgspec.json.decode(text, type=dict[str, str]).items())) if text else ()


@lru_cache(8192)
def find_pattern(limits: str | None) -> str | None:
    """Return what a lane knows of its tasks' limits: the names, and which of them have keys."""
    pairs = read_limits(limits)
    return to_canonical({name: key != "" for name, key in pairs}).decode() if pairs else None


@lru_cache(1024)
def read_pattern(pattern: str) -> tuple[tuple[str, bool], ...]:
    """Return the names of the limits of a lane, each with whether its tasks have keys."""
    return tuple(sorted(msgspec.json.decode(pattern, type=dict[str, bool]).items()))


@lru_cache(4096)
def lane_of(type: str, capabilities: frozenset[str], pattern: str | None = None) -> int:
    """Number a type with capabilities and limits; every process gets the same number without asking a database."""
    named = (type, sorted(capabilities)) if pattern is None else (type, sorted(capabilities), pattern)
    return int.from_bytes(hashlib.sha256(to_canonical(named)).digest()[:8], "big", signed=True)


def list_names(patterns: Iterable[str], *, unkeyed: bool = False) -> list[str]:
    """Return the names of the limits of some lanes, or of those that their tasks have without a key."""
    return sorted({name for pattern in patterns for name, keyed in read_pattern(pattern) if not (unkeyed and keyed)})


def read_cost(task: stored.Task) -> float:
    """Return how much a task uses of a rate."""
    cost = decode_terms(task.terms).cost if '"cost"' in task.terms else None
    return 1.0 if cost is None else cost


def list_opened(work: Any) -> list[tuple[str, str]]:
    """Return the turns that a batch opens, if they rest: those in which a task waits now."""
    if work.limiting.settled:
        return []
    # Postgres saves with the progress of a task that its time has come; then no claim opens its turn for that.
    saved = [work.tasks[task_id] for task_id in (*work.added, *work.moved, *work.progressed)]
    return list({(str(task.lane), task.limits): None for task in saved
                 if task.limits is not None and task.claimable(work.now)})


def list_granted(work: Any) -> list[stored.Task]:
    """Return the tasks with limits that a batch leases without finding them by a claim."""
    return [task for task_id in work.needs.granted if (task := work.tasks.get(task_id)) and task.limits is not None]


# What a batch knows of limits.


class Decided(Protocol):
    """The work of a batch, as far as limits need it."""

    now: float
    tasks: dict[str, stored.Task]

    def find_record(self, kind: type[Any], *key: str) -> Any:
        """Return a record, if there is one."""

    def find_loaded(self, kind: type[Any], *key: str) -> Any:
        """Return a record if it happens to be loaded."""

    def keep_record(self, row: Struct) -> None:
        """Store a record."""

    def drop_record(self, kind: type[Struct], *key: str) -> None:
        """Forget a record."""

    def load_record(self, row: Struct) -> None:
        """Take in a record."""


class Limiting:
    """The limits that a batch has loaded, what its leases change in them, and whose turn it is."""

    def __init__(self, work: Decided, change: Callable[[dict[Any, Any], Any, Any], None]) -> None:
        self.work, self.change = work, change               # a change that is undone with what it belongs to
        self.settled = False                                # True: rows come with their holds and turns
        self.patterns: Mapping[int, str] = {}               # of the lanes that have limits
        self.queues: dict[int, TurnQueue] = {}              # of the lanes that were read for claims
        self.held: dict[tuple[str, str | None], int] = {}   # leases by name and key, by name alone in total, if counted
        self.woken: dict[Pair, int] = {}                    # how many turns to open that wait for a key
        self.costs: dict[Pair, float] = {}                  # what was used of a rate beside what was told before
        self.changed: dict[str, bool] = {}                  # limits that were set or removed: all their turns open
        self.freed: dict[str, bool] = {}                    # limits of which a lease has ended
        self.until: float | None = None                     # when the first limit is open again that was met
        self.cut = set[int]()                               # lanes of which only some open turns were read
        self.unread = False                                 # whether others of them may have a task for a claim

    # What a database loads for claims.

    def find_most(self, name: str, key: str | None = None) -> int | None:
        """Return how many leases a limit may have at once, in total or under a key; None is any number."""
        rules = self.find_rules(name)
        return rules.concurrency_total if key is None else rules.find_most(key)

    def add_turn(self, turn: stored_limits.Turn, tasks: list[str], whole: bool) -> None:
        """Take in a turn and its first tasks; `whole`: those are all."""
        self.work.load_record(turn)
        queue = self.queues.setdefault(int(turn.lane), TurnQueue(self, int(turn.lane)))
        queue.tasks[turn.limits] = tasks
        if whole:
            queue.whole.add(turn.limits)

    def grant(self, task: stored.Task) -> None:
        """Offer a task that `Needs` grants: it is leased again, as far as its limits allow that still."""
        queue = self.queues.setdefault(task.lane, TurnQueue(self, task.lane))
        queue.tasks.setdefault(task.limits or "", []).append(task.task_id)

    # What keeps a task.

    def find_keeping(self, task: stored.Task) -> Full | None:
        """Return which limit keeps a task that `Needs` grants."""
        return None if task.limits is None else self.find_closed(task.lane) or self.find_full(task.limits)

    def stop(self, name: str, until: float, task: stored.Task) -> None:
        """Let nothing of a limit be leased for a while."""
        if name not in dict(read_limits(task.limits)):
            raise errors.InvalidRequest(f"task {task.task_id} has no limit {name}, so its worker cannot stop it; its "
                                        f"limits are {', '.join(dict(read_limits(task.limits))) or 'none'}")
        limit: stored_limits.Limit = self.work.find_record(stored_limits.Limit, name) or stored_limits.Limit(
            name, "{}", self.work.now, "asyncgate", "")
        if limit.stopped_until is None or limit.stopped_until < until:
            self.work.keep_record(replace(limit, stopped_until=until, stopped_by=task.task_id))

    def find_rules(self, name: str) -> Rules:
        """Return what a limit allows; one that nobody has set allows everything."""
        limit: stored_limits.Limit | None = self.work.find_record(stored_limits.Limit, name)
        return NO_RULES if limit is None else decode_rules(limit.rules)

    def find_closed(self, lane: int) -> Full | None:
        """Return what keeps all tasks of a lane."""
        for name, keyed in read_pattern(self.patterns[lane]):
            limit: stored_limits.Limit | None = self.work.find_record(stored_limits.Limit, name)
            if limit is None:
                continue
            if limit.stopped_until is not None and limit.stopped_until > self.work.now:
                return self.note(Full(name, None, "stopped", until=limit.stopped_until))
            most = decode_rules(limit.rules).concurrency_total
            if most is not None and self.held.get((name, None), 0) >= most:
                return Full(name, None, "concurrency_total", most)
            if not keyed and (full := self.find_full_key(name, "")) is not None:
                return self.note(full)
        return None

    def find_full(self, limits: str) -> Full | None:
        """Return which key keeps a task, of the limits that it has with a key."""
        full = (self.find_full_key(name, key) for name, key in read_limits(limits) if key)
        return next((self.note(why) for why in full if why is not None), None)

    def find_full_key(self, name: str, key: str) -> Full | None:
        """Return whether a key is full, or has used up its rate."""
        rules = self.find_rules(name)
        most, rate = rules.find_most(key), rules.find_rate(key)
        if most is not None and self.held.get((name, key), 0) >= most:
            return Full(name, key, "concurrency_per_key", most)
        if rate is not None and (use := self.find_use(name, key, rate)).used >= rate.count:
            return Full(name, key, "rate", rate.count, use.began + rate.seconds)
        return None

    def note(self, full: Full) -> Full:
        """Note when it is worth to look again."""
        if full.until is not None:
            self.until = min(full.until, inf if self.until is None else self.until)
        return full

    def find_use(self, name: str, key: str, rate: Rate) -> stored_limits.RateUse:
        """Return what a key has used of its rate in the window that runs; what is too much goes into the next one."""
        use: stored_limits.RateUse | None = self.work.find_record(stored_limits.RateUse, name, key)
        if use is None:
            return stored_limits.RateUse(name, key, self.work.now, 0.0)
        passed = int((self.work.now - use.began) // rate.seconds)
        if passed <= 0:
            return use
        debt = max(0.0, use.used - rate.count * passed)
        return stored_limits.RateUse(name, key, use.began + passed * rate.seconds if debt else self.work.now, debt)

    # What leases change.

    def change_lease(self, task: stored.Task, more: int, cost: float | None = None) -> None:
        """Let a lease of a task begin (1) or end (-1), perhaps with its true cost."""
        if more and task.limits is not None and not self.settled:
            self.begin_lease(task) if more > 0 else self.end_lease(task)
            self.correct_cost(task, cost)

    def begin_lease(self, task: stored.Task) -> None:
        """Let a task that is leased count against its limits, and its turn be over."""
        cost = read_cost(task)
        for name, key in read_limits(task.limits):
            self.work.keep_record(stored_limits.Hold(name, key, task.task_id, self.work.now))
            self.count(name, key, 1)
            self.use_rate(name, key, cost)
        turn: stored_limits.Turn | None = self.work.find_record(stored_limits.Turn, str(task.lane), task.limits or "")
        if turn is not None:
            self.work.keep_record(replace(turn, served=turn.served + 1 / self.weigh(turn.limits)))

    def end_lease(self, task: stored.Task) -> None:
        """Let a task not count any more whose lease has ended, and open a turn under each of its keys."""
        for name, key in read_limits(task.limits):
            self.work.drop_record(stored_limits.Hold, name, key, task.task_id)
            self.count(name, key, -1)
            self.change(self.freed, name, True)
            self.wake(name, key)

    def correct_cost(self, task: stored.Task, cost: float | None) -> None:
        """Correct what a task has used of the rates of its limits, if its worker tells what it was in truth."""
        if cost is not None and (more := cost - read_cost(task)):
            for pair in read_limits(task.limits):
                use: stored_limits.RateUse | None = self.work.find_loaded(stored_limits.RateUse, *pair)
                if use is not None:     # a claim of the same batch goes by it
                    self.work.keep_record(replace(use, used=max(0.0, use.used + more)))
                else:
                    self.change(self.costs, pair, self.costs.get(pair, 0.0) + more)

    def use_rate(self, name: str, key: str, cost: float) -> None:
        """Add to what a key has used of its rate, if it has one."""
        if (rate := self.find_rules(name).find_rate(key)) is not None:
            use = self.find_use(name, key, rate)
            self.work.keep_record(replace(use, used=max(0.0, use.used + cost)))
            if (name, key) in self.costs:       # of a window that is not there
                self.change(self.costs, (name, key), 0.0)

    def count(self, name: str, key: str, more: int) -> None:
        """Change the numbers of leases that were counted."""
        for place in ((name, key), (name, None)):
            if place in self.held:
                self.change(self.held, place, self.held[place] + more)

    def weigh(self, limits: str) -> float:
        """Return how many turns a turn gets while others get one."""
        return prod(self.find_rules(name).weigh(key) for name, key in read_limits(limits))

    # What claims change of turns.

    def wake(self, name: str, key: str) -> None:
        """Open one more of the turns that wait for a key."""
        if key:
            self.change(self.woken, (name, key), self.woken.get((name, key), 0) + 1)

    def wake_all(self, name: str) -> None:
        """Open all turns that wait for a limit."""
        self.change(self.changed, name, True)

    def block(self, turn: stored_limits.Turn, full: Full) -> None:
        """Let a turn wait until its key has room."""
        self.work.keep_record(replace(turn, stage="blocked", blocked_by=full.name,
                                                      blocked_key=full.key or "", until=full.until))
        self.pass_on(turn, full.name)

    def empty(self, turn: stored_limits.Turn) -> None:
        """Let a turn rest in which no task waits."""
        self.work.keep_record(replace(turn, stage="idle"))
        self.pass_on(turn, None)

    def pass_on(self, turn: stored_limits.Turn, but: str | None) -> None:
        """Open other turns under the keys of one that is not open any more."""
        for name, key in read_limits(turn.limits):
            if name != but and key and self.find_full_key(name, key) is None:
                self.wake(name, key)


class TurnQueue:
    """The waiting tasks of a lane with limits, as far as they were read."""

    def __init__(self, limiting: Limiting, lane: int) -> None:
        self.limiting, self.lane = limiting, lane
        self.tasks: dict[str, list[str]] = {}       # by limits
        self.whole: set[str] = set()                # turns of which all tasks were read
        self.hiding: set[str] = set()               # turns with tasks that no claim of this batch may get

    def __iter__(self) -> Iterator[str]:
        return (task_id for tasks in self.tasks.values() for task_id in tasks)

    def hide(self, tasks: Set[str]) -> None:
        """Let no claim get some tasks; their turns do not rest."""
        for limits, ids in self.tasks.items():
            if not tasks.isdisjoint(ids):
                self.tasks[limits] = [task_id for task_id in ids if task_id not in tasks]
                self.hiding.add(limits)

    def find_head(self) -> stored.Task | None:
        """Return the first task of the turn that is next, if no limit keeps it."""
        limiting = self.limiting
        if limiting.find_closed(self.lane) is not None:
            return None
        done = set[str]()
        while (turn := self.find_turn(done)) is not None:
            if (head := self.find_first(turn)) is None:
                if turn.limits in self.whole - self.hiding:
                    limiting.empty(turn)
                done.add(turn.limits)
            elif (full := limiting.find_full(turn.limits)) is not None:
                limiting.block(turn, full)
            else:
                return head
        cut = self.lane in limiting.cut and not self.hiding     # else the same turns would be read again
        limiting.unread |= cut or not done <= self.whole | self.hiding
        return None

    def find_turn(self, done: set[str]) -> stored_limits.Turn | None:
        """Return the open turn that has got least, but none of those that are done."""
        find, lane = self.limiting.work.find_record, str(self.lane)
        turns: Iterable[stored_limits.Turn | None] = (
            find(stored_limits.Turn, lane, limits) for limits in self.tasks if limits not in done)
        return min((turn for turn in turns if turn is not None and turn.stage == "open"),
                   key=lambda turn: (turn.served, turn.limits), default=None)

    def find_first(self, turn: stored_limits.Turn) -> stored.Task | None:
        """Return the first waiting task of a turn: highest priority first, then oldest."""
        tasks = (self.limiting.work.tasks[task_id] for task_id in self.tasks[turn.limits])
        return min((task for task in tasks if task.claimable(self.limiting.work.now)),
                   key=lambda task: (-task.priority, task.task_id), default=None)
