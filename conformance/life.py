"""A model of one task's life, small enough to be explored whole: lease, fence, expiry, adoption and outbox.

`take_step` is the law.  `explore` visits every state that two gates, two workers, a ledger and a network between them
can come to, within bounds: messages are repeated, come late or never, gates die at any moment, time passes at any
moment.  In each state what is stored must be what the receipts tell, and from each state the task can still come to its
end.  `replay` holds the model to the code: the receipts of a real task must be a walk of the law, and lead to the row
that is stored.  `python -m asyncgate.conformance.life FENCES CALLS` explores more than the tests do.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from asyncgate.conformance.history import Stored, body
from asyncgate.parts.model import stored

LIVE, CANCEL = "live", "the owner cancels"
GIVEN_BACK = ("released", "asked")      # as leases say it
LEASE_ENDS = {"complete": "completed", "fail": "failed", "give back": "released", "expire": "expired"}     # of a lease


class LifeEvent(NamedTuple):
    """A step in the life of a task, as a receipt tells it."""

    kind: str
    fence: int = 0          # of the lease; 0: of none
    by: str = ""            # the worker
    final: bool = True      # of a failure: whether it is the end of the task; of a completion: whether it says where


class Life(NamedTuple):
    """What is stored of a task."""

    status: str = "queued"
    fence: int = 0          # of the latest lease
    holder: str = ""
    ending: str = ""        # of the latest lease
    owed: bool = True


def take_step(life: Life, event: LifeEvent) -> Life | None:
    """Return what a step makes of a task; None if the law forbids it (spec 4)."""
    if event.kind == "accept":
        is_next = life.status == "queued" and event.fence == life.fence + 1
        return life._replace(status="leased", fence=event.fence, holder=event.by, ending=LIVE) if is_next else None
    if event.kind == "locate":      # the second completion, which says where the result is
        return life._replace(owed=False) if (life.status, life.owed) == ("succeeded", True) else None
    if life.status in stored.TERMINAL:
        return None
    if event.kind == "cancel":
        return life._replace(status="canceled", ending="canceled" if life.ending == LIVE else life.ending, owed=False)
    if event.kind == "give up":     # the gate, about a task that nobody holds
        return life._replace(status="failed", owed=False) if life.ending != LIVE else None
    if (life.fence, life.ending) != (event.fence, LIVE) or (event.kind != "expire" and event.by != life.holder):
        return None
    status = {"complete": "succeeded", "fail": "failed"}.get(event.kind, "queued") if event.final else "queued"
    if event.kind == "complete":
        return life._replace(status="succeeded", ending="completed", owed=not event.final)
    return life._replace(status=status, ending=LEASE_ENDS[event.kind], owed=status == "queued")


def replay(told: Iterable[LifeEvent]) -> Life | str:
    """Return the task that steps lead to, or what is wrong with them."""
    life = Life()
    for event in told:
        if (after := take_step(life, event)) is None:
            return f"{event} is told of {life}"
        life = after
    return life


# The model.


class Guards(NamedTuple):
    """What a gate does to keep the law; the explorer shows that each of these is needed."""

    raises_fence: bool = True
    compares_fence: bool = True
    compares_time: bool = True      # an expired lease does nothing, whether or not it was swept
    looks_again: bool = True        # a sweep reads the lease once more under its lock
    reads_status: bool = True       # of what it offers
    writes_receipt: bool = True     # in the transaction of its step
    keeps_outbox: bool = True       # until the ledger has answered
    adopts: bool = True             # the leases of a gate that is dead


class Bounds(NamedTuple):
    """How much is explored."""

    fences: int = 2
    calls: int = 2                  # on their way at once
    outbox: bool = False            # whether receipts leave; nothing else depends on it
    workers: tuple[str, ...] = ("w1", "w2")


class World(NamedTuple):
    """A state of gates, workers, ledger, and the network between them."""

    life: Life = Life()
    told: tuple[LifeEvent, ...] = ()            # the receipts behind the first
    late: bool = False                      # the time of the latest lease is over
    owner: int = 0                          # the gate that granted the lease, or has taken it over
    alive: tuple[bool, ...] = (True, True)
    seen: tuple[int, ...] = (0, 0)          # by gate, the fence of a lease that it has read and found late
    believed: tuple[int, ...] = (0, 0)      # by worker, the fence of the lease that it thinks it holds
    calls: frozenset[LifeEvent] = frozenset()   # they may be carried out again and again, or never
    sent: int = 0                           # receipts that have left the outbox
    kept: int = 0                           # receipts that the ledger has
    broken: str = ""                        # what a step did that time forbids

    def at(self, name: str, number: int, value: int | bool) -> World:
        """Return it with another value of one gate or worker."""
        values = getattr(self, name)
        changed: dict[str, Any] = {name: (*values[:number], value, *values[number + 1:])}
        return self._replace(**changed)


class Moves:
    """All steps that a world can take."""

    def __init__(self, rules: Guards | None = None, bounds: Bounds | None = None) -> None:
        self.rules, self.bounds = rules or Guards(), bounds or Bounds()

    def list_moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield each step that may be next, by its name."""
        for number, worker in enumerate(self.bounds.workers):
            yield from self._let_work(world, number, worker)
        for gate in (0, 1):
            yield from self._let_sweep(world, gate)
        for call in world.calls:
            yield f"{call.kind} {call.fence} of {call.by} is lost", world._replace(calls=world.calls - {call})
            yield from self._end_lease(world, call)
        if world.life.ending == LIVE and not world.late:
            yield "time passes", world._replace(late=True)
        yield from self._change(world, CANCEL, LifeEvent("cancel"))
        if not self.bounds.outbox:
            return
        if world.kept < len(world.told) and world.kept <= world.sent:
            yield "the ledger stores a receipt", world._replace(kept=world.kept + 1)
        if world.sent < (world.kept if self.rules.keeps_outbox else len(world.told)):
            yield "a receipt leaves the outbox", world._replace(sent=world.sent + 1)

    def _let_work(self, world: World, number: int, worker: str) -> Iterator[tuple[str, World]]:
        life, fence = world.life, world.believed[number]
        if not fence and life.fence < self.bounds.fences and any(world.alive):
            granting = world._replace(late=False, owner=world.alive.index(True))    # gates have no names
            accept = LifeEvent("accept", life.fence + 1, worker)
            for name, granted in self._change(granting, f"{worker} claims", accept):
                yield f"{name}, and the answer is lost", granted
                yield name, granted.at("believed", number, granted.life.fence)
        if not fence and (life.holder, life.ending) == (worker, LIVE) and not world.late:
            yield f"{worker} repeats its claim", world.at("believed", number, life.fence)
        if fence and (life.fence, life.ending) != (fence, LIVE):
            yield f"{worker} learns that it holds nothing", world.at("believed", number, 0)
        if fence and len(world.calls) < self.bounds.calls:
            for event in (LifeEvent("complete", fence, worker), LifeEvent("fail", fence, worker, final=False),
                          LifeEvent("give back", fence, worker)):
                if event not in world.calls:
                    yield f"{worker} sends {event.kind} {fence}", world._replace(calls=world.calls | {event})

    def _let_sweep(self, world: World, gate: int) -> Iterator[tuple[str, World]]:
        others = world.alive[1 - gate]
        if not world.alive[gate]:
            # The leases that it granted get some time again: nobody could renew them.
            back = world._replace(late=world.late and world.owner != gate)
            yield f"gate {gate} starts", back.at("alive", gate, True)
            return
        if others:
            yield f"gate {gate} dies", world.at("alive", gate, False).at("seen", gate, 0)
        is_own = world.owner == gate or (self.rules.adopts and not others)
        if world.life.ending == LIVE and world.late and is_own and not world.seen[gate]:
            yield f"gate {gate} finds a late lease", world.at("seen", gate, world.life.fence)
        if fence := world.seen[gate]:
            is_late = world.late and fence == world.life.fence
            before = world.at("seen", gate, 0)
            if self.rules.looks_again and not (is_late and world.life.ending == LIVE):
                yield f"gate {gate} looks again", before
                return
            before = before._replace(owner=gate, broken="" if is_late else "a lease was swept before its time")
            yield from self._change(before, f"gate {gate} sweeps", LifeEvent("expire", world.life.fence))

    def _end_lease(self, world: World, call: LifeEvent) -> Iterator[tuple[str, World]]:
        if not any(world.alive) or (world.late and self.rules.compares_time):
            return
        event = call if self.rules.compares_fence else call._replace(fence=world.life.fence, by=world.life.holder)
        before = world._replace(broken="an expired lease did something" if world.late else "")
        yield from self._change(before, f"{call.kind} {call.fence} of {call.by} is carried out", event, call)

    def _change(self, world: World, name: str, event: LifeEvent,
                told: LifeEvent | None = None) -> Iterator[tuple[str, World]]:
        """Yield the world after a step of the task, if the gate lets it happen."""
        life = world.life
        if event.kind == "accept" and not self.rules.reads_status and life.ending != LIVE:
            life = life._replace(status="queued")
        if (after := take_step(life, event)) is None:
            return
        if event.kind == "accept" and not self.rules.raises_fence:
            after = after._replace(fence=max(world.life.fence, 1))
        yield name, world._replace(life=after, told=(*world.told, told or event))
        if not self.rules.writes_receipt:
            yield f"{name}, without its receipt", world._replace(life=after)


def find_violation(world: World) -> str:
    """Return what is wrong with a state; nothing if it is right."""
    told = replay(world.told)
    if isinstance(told, str):
        return told
    if told != world.life:
        return f"{world.life} is stored, and the receipts tell of {told}"
    return world.broken or ("a receipt has left the outbox that the ledger has not" if world.sent > world.kept else "")


class Explored(NamedTuple):
    """What an exploration came to."""

    states: int
    violation: str = ""
    path: tuple[str, ...] = ()      # the shortest one to it


def explore(model: Moves | None = None) -> Explored:
    """Visit every state within the bounds, the nearest first; stop at the first violation."""
    model, start = model or Moves(), World()
    came: dict[World, tuple[World, str] | None] = {start: None}
    before, waiting = defaultdict[World, list[World]](list), deque([start])
    while waiting:
        world = waiting.popleft()
        if violation := find_violation(world):
            return Explored(len(came), violation, trace(came, world))
        for name, after in model.list_moves(world):
            if not (name.endswith("starts") or name == CANCEL):     # it must end without the dead gate, and by itself
                before[after].append(world)
            if after not in came:
                came[after] = world, name
                waiting.append(after)
    ended = deque(world for world in came if is_over(world, model.bounds))
    good = set(ended)
    while ended:
        for world in before[ended.popleft()]:
            if world not in good:
                good.add(world)
                ended.append(world)
    stuck = next((world for world in came if world not in good), None)
    return Explored(len(came)) if stuck is None else Explored(len(came), "the task can never end", trace(came, stuck))


def is_over(world: World, bounds: Bounds) -> bool:
    """Whether a task has ended, or the bounds end here; and the ledger has everything."""
    ended = world.life.status in stored.TERMINAL or (world.life.fence, world.life.status) == (bounds.fences, "queued")
    return ended and (not bounds.outbox or world.sent == world.kept == len(world.told))


def trace(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    """Return the steps that led to a state."""
    names = list[str]()
    while (step_before := came[world]) is not None:
        world, name = step_before
        names.append(name)
    return tuple(reversed(names))


# What really happened.


def read_walk(receipts: Iterable[stored.Receipt]) -> Iterator[LifeEvent]:
    """Yield the steps of a task that its receipts tell; `locate` is a completion behind the first one."""
    fences, completed = dict[str | None, int](), False
    for receipt in receipts:
        told = body(receipt)
        fence, worker = fences.get(receipt.lease_id, 0), receipt.from_id
        match receipt.receipt_type:
            case "task.accepted":
                fences[receipt.lease_id] = fence = told["fence"]
                yield LifeEvent("accept", fence, worker)
            case "lease.expired":
                kind = "expire" if told.get("reason", "expired") == "expired" else "give back"
                yield LifeEvent(kind, fence, "" if kind == "expire" else told["previous_worker_id"])
            case "task.completed":
                yield LifeEvent("locate") if completed else LifeEvent("complete", fence, worker, bool(receipt.parents))
                completed = True
            case "task.failed" if receipt.lease_id is None:
                yield LifeEvent("give up")
            case "task.failed":
                yield LifeEvent("fail", fence, worker, final=not told["requeued"])
            case "task.canceled":
                yield LifeEvent("cancel")
            case "input.requested" if told["lease_ended"]:
                yield LifeEvent("give back", fence, worker)


def find_strays(final: Mapping[str, Stored]) -> list[str]:
    """Return which tasks have not lived by the law; those that moved to another gate, and skip fences, are left out."""
    return [f"LIFE: {wrong}" for end in final.values() for task in end.tasks.values()
            if task.fence == len(end.of(task.task_id, "task.accepted"))
            and (wrong := compare(task, end.leases.get(task.task_id), end.chains.get(task.task_id, [])))]


def compare(task: stored.Task, lease: stored.Lease | None, receipts: list[stored.Receipt]) -> str:
    """Return how a stored task differs from what its receipts tell; nothing if it does not."""
    told = replay(read_walk(receipts))
    if isinstance(told, str):
        return f"task {task.task_id}: {told}"
    status = "leased" if task.status in stored.ACTIVE else task.status
    ending = "" if lease is None else lease.ending
    row = Life(status, task.fence, "" if lease is None else lease.worker.id, ending, task.owed)
    told = told._replace(ending=ending if told.ending == "released" and ending in GIVEN_BACK else told.ending)
    return "" if row == told else f"task {task.task_id}: {row} is stored, and its receipts tell of {told}"


if __name__ == "__main__":
    wanted = Bounds(int(sys.argv[1]), int(sys.argv[2]))
    print(wanted, explore(Moves(bounds=wanted)))
