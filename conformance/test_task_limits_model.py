"""Random programs with limits, beside the simplest account of them: what is leased may be, and what may be is leased.

Which of several turns comes next is not compared, except that each key gets its share.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored_limits, wire

pytestmark = pytest.mark.anyio

NAMES: dict[str, dict[str, Any]] = {
    "total": {"concurrency_total": 3}, "both": {"concurrency_total": 4, "concurrency_per_key": 2},
    "key": {"concurrency_per_key": 1, "overrides": {"b": {"concurrency_per_key": 2, "weight": 2}}}}
KEYS = ("a", "b", "c")
TYPES = ("x", "y")


class Account:
    """What a gate has been told, and what follows from it for its limits."""

    def __init__(self) -> None:
        self.limits: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, tuple[str, dict[str, str], int]] = {}     # type, limits, priority
        self.waiting: dict[str, None] = {}
        self.held: dict[str, wire.Offer | None] = {}       # None: nobody knows the lease

    def count(self, name: str, key: str | None) -> int:
        """Return how many leases count against a limit, or one of its keys."""
        keys = [self.tasks[task_id][1].get(name) for task_id in self.held]
        return sum(held is not None and key in (None, held) for held in keys)

    def allows(self, task_id: str) -> bool:
        """Whether every limit of a task has room for it."""
        for name, key in self.tasks[task_id][1].items():
            rules = self.limits.get(name, {})
            own = rules.get("overrides", {}).get(key, {})
            most = own.get("concurrency_per_key", rules.get("concurrency_per_key"))
            total = rules.get("concurrency_total")
            if most is not None and self.count(name, key) >= most:
                return False
            if total is not None and self.count(name, None) >= total:
                return False
        return True

    def list_claimable(self, types: list[str]) -> list[str]:
        """Return the waiting tasks that a claim may get."""
        return [task_id for task_id in self.waiting if self.tasks[task_id][0] in types and self.allows(task_id)]

    def grant(self, offer: wire.Offer, types: list[str]) -> None:
        """Note a lease; it must be allowed, and of the first task that has the same limits."""
        task_id = offer.task_id
        assert task_id in self.list_claimable(types), "a limit is exceeded"
        alike = [other for other in self.waiting if self.tasks[other][:2] == self.tasks[task_id][:2]]
        assert task_id == min(alike, key=lambda other: (-self.tasks[other][2], other)), "another one is before it"
        del self.waiting[task_id]
        self.held[task_id] = offer


class Program:
    """A random program against one tenant, through several gates."""

    def __init__(self, gate: harness.Gate, seed: int) -> None:
        self.gates = [gate, gate.beside()]
        self.random, self.account = random.Random(seed), Account()

    @property
    def gate(self) -> harness.Gate:
        """Return one of the gates."""
        return self.random.choice(self.gates)

    async def run(self, steps: int) -> None:
        """Do some steps, then look at what is stored, and finish everything."""
        for _ in range(steps):
            step = self.random.choices(
                (self.create, self.claim, self.end, self.change, self.kill), (6, 6, 5, 1, 1))[0]
            await step()
            await self.compare()
        await self.finish()

    async def create(self) -> None:
        """Create a task with some limits."""
        names = self.random.sample(sorted(NAMES), self.random.randint(0, 3))
        limits = {name: "" if name == "total" else self.random.choice(KEYS) for name in names}
        type, priority = self.random.choice(TYPES), self.random.randint(0, 1)
        task_id = await self.gate.create(type=type, limits=limits, priority=priority)
        self.account.tasks[task_id] = (type, limits, priority)
        self.account.waiting[task_id] = None

    async def claim(self) -> None:
        """Claim; a claim that gets nothing is right only where nothing may be leased."""
        types = self.random.choice((["x"], ["y"], ["x", "y"]))
        most = self.random.randint(1, 4)
        offers = (await self.gate.as_worker().lease_next(max_tasks=most, accept_types=types)).tasks
        claimable = self.account.list_claimable(types)
        assert offers or not claimable, "a task that may be leased is not"
        for offer in offers:
            self.account.grant(offer, types)

    async def end(self) -> None:
        """End a lease in one of many ways."""
        if not self.account.held:
            return
        task_id = self.random.choice(sorted(self.account.held))
        offer, worker = self.account.held.pop(task_id), self.gate.as_worker()
        assert offer is not None
        way = self.random.choice(("complete", "fail", "release", "cancel", "lose"))
        if way == "complete":
            await worker.complete(**harness.under(offer, artifacts=["x"]))
        elif way == "fail":
            await worker.fail(**harness.under(offer, error="x"))
        elif way == "release":
            await worker.release_lease(**harness.under(offer))
            self.account.waiting[task_id] = None
        elif way == "cancel":
            await self.gate.cancel_task(task_id=task_id)
        else:
            self.account.held[task_id] = offer
            await self.lose()

    async def lose(self) -> None:
        """Let all leases run out; none of the tasks is on hold by it."""
        gate = self.gates[0]
        gate.skip(400)
        await gate.sweep()
        gate.skip(10)
        for task_id in list(self.account.held):
            del self.account.held[task_id]
            record = await gate.task(task_id)
            assert record.status == "queued"
            if record.held is None:
                self.account.waiting[task_id] = None

    async def change(self) -> None:
        """Set a limit, or remove it."""
        name = self.random.choice(sorted(NAMES))
        if self.random.random() < 0.3:
            await self.gate.as_admin().remove_limit(name=name)
            self.account.limits.pop(name, None)
        else:
            await self.gate.as_admin().set_limit(name=name, **NAMES[name])
            self.account.limits[name] = NAMES[name]

    async def kill(self) -> None:
        """Break off a claim whose outcome nobody learns; another gate goes on, and leases that nobody has run out."""
        claim = self.gates[1].as_worker("lost").lease_next(max_tasks=2, accept_types=list(TYPES))
        self.gates[1] = await harness.break_off(claim, self.gates[1], 2)
        for task_id in list(self.account.waiting):
            record = await self.gates[0].task(task_id)
            if record.status == "leased":
                self.account.held[task_id] = None
                del self.account.waiting[task_id]
        await self.lose()

    async def compare(self) -> None:
        """Compare what counts with the leases that live."""
        rows = await self.gates[0].backend.page(self.gates[0].tenant_id, queries.Rows(stored_limits.Hold, "", 1000))
        held = [(name, key, task_id) for task_id in self.account.held
                for name, key in self.account.tasks[task_id][1].items()]
        assert sorted((row.limit_name, row.limit_key, row.task_id) for row in rows) == sorted(held)

    async def finish(self) -> None:
        """Complete everything: nothing is starved."""
        while self.account.waiting or self.account.held:
            for task_id in list(self.account.held):
                offer = self.account.held.pop(task_id)
                assert offer is not None
                await self.gate.as_worker().complete(**harness.under(offer, artifacts=["x"]))
            offers = (await self.gate.as_worker().lease_next(max_tasks=4, accept_types=list(TYPES))).tasks
            assert offers or not self.account.waiting, "what waits is never leased"
            for offer in offers:
                self.account.grant(offer, list(TYPES))
        await self.compare()


@pytest.mark.parametrize("seed", range(6))
async def test_a_random_program_never_sees_a_limit_exceeded_a_slot_leaked_or_a_key_starved(
        make_gate: Any, seed: int) -> None:
    gate = make_gate(max_expiries=0, expiry_jitter_seconds=0.0)

    await Program(gate, seed).run(70)


class Deal:
    """Whose turn it is among keys with weights, as the page on limits says it: who has got least is next."""

    def __init__(self, weights: dict[str, float], most: int) -> None:
        self.weights, self.most = weights, most
        self.waiting, self.held = Counter[str](), Counter[str]()
        self.served: dict[str, float] = {}
        self.stages: dict[str, str] = {}
        self.passed = Counter[str]()        # leases of others since a key had a task and room

    def find_level(self) -> float:
        """Return how much the open turn has got that has got least."""
        return min((self.served[key] for key, stage in self.stages.items() if stage == "open"), default=0.0)

    def begin(self, key: str) -> None:
        """Open the turn of a key, level with the one that is next."""
        self.served[key] = max(self.served.get(key, 0.0), self.find_level())
        self.stages[key] = "open"

    def create(self, key: str) -> None:
        """Let a task of a key wait."""
        self.waiting[key] += 1
        if self.stages.get(key, "idle") == "idle":
            self.begin(key)

    def claim(self) -> str | None:
        """Return the key whose task a claim gets."""
        able = [key for key in self.waiting if self.waiting[key] and self.held[key] < self.most]
        for key in sorted((key for key in self.stages if self.stages[key] == "open"),
                          key=lambda key: (self.served[key], key)):
            if not self.waiting[key]:
                self.stages[key] = "idle"
            elif self.held[key] >= self.most:
                self.stages[key] = "blocked"
            else:
                self.waiting[key] -= 1
                self.held[key] += 1
                self.served[key] += 1 / self.weights[key]
                self.passed = Counter({other: self.passed[other] + 1 for other in able if other != key})
                return key
        assert not able, "a key is starved"
        return None

    def end(self, key: str) -> None:
        """End a lease of a key."""
        self.held[key] -= 1
        if self.stages[key] == "blocked":
            self.begin(key)

    def list_starved(self) -> list[str]:
        """Return keys that had a task and room while others got more than their weights give them."""
        whole = sum(self.weights.values())
        return [key for key, number in self.passed.items()
                if number > whole / self.weights[key] + len(self.weights)]


@pytest.mark.parametrize("seed", range(4))
async def test_turns_come_in_the_order_that_weights_give_them_and_no_key_starves(
        gate: harness.Gate, seed: int) -> None:
    choice = random.Random(seed)
    weights = {"a": 1.0, "b": 3.0, "c": 0.5, "d": 1.0}
    deal, most, held = Deal(weights, choice.randint(1, 3)), 0, list[tuple[str, wire.Offer]]()
    keys: dict[str, str] = {}       # by task
    await gate.as_admin().set_limit(name="key", concurrency_per_key=deal.most, overrides={
        key: {"weight": weight} for key, weight in weights.items()})

    for _ in range(150):
        step = choice.choices(("create", "claim", "end"), (4, 5, 3))[0]
        if step == "create":
            key = choice.choice(sorted(weights))
            keys[await gate.create(limits={"key": key})] = key
            deal.create(key)
        elif step == "claim":
            offers = (await gate.as_worker().lease_next(max_tasks=1)).tasks
            expected = deal.claim()
            assert [keys[offer.task_id] for offer in offers] == ([] if expected is None else [expected])
            held += [(keys[offer.task_id], offer) for offer in offers]
            most += len(offers)
        elif held:
            key, offer = held.pop(choice.randrange(len(held)))
            await gate.as_worker().complete(**harness.under(offer, artifacts=["x"]))
            deal.end(key)
        assert deal.list_starved() == []
    assert most > 20
