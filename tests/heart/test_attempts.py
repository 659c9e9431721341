"""A database may take a whole batch back and have it decided once more: the last attempt counts, nothing else shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from asyncgate import Engine, Extension, Needs, Work
from asyncgate.backends.memory import Memory
from asyncgate.backends.sqlite_tables import REFUSALS
from asyncgate.conformance.harness import Gate, Numbered, refused
from asyncgate.conformance.test_programs import InOrder, OnTwoBackends, Run, budget, run, run_programs
from asyncgate.parts.model.settings import Settings

__all__ = ["run"]   # a fixture


class Hesitant(Memory):
    """Memory that takes every batch back once, as a database does after a deadlock."""

    taken_back = 0

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch at the second attempt; what others do in between happens in `meanwhile`."""
        given = getattr(self.ids, "given", 0)
        self._begin()
        with suppress(*REFUSALS):
            self._decide(tenant_id, needs, decide)
        self._roll_back()
        self.taken_back += 1
        self.meanwhile(tenant_id)
        self.ids.given = given  # type: ignore[attr-defined]  # Numbered counts anew, so that the ids are equal
        await super().transact(tenant_id, needs, decide)

    def meanwhile(self, tenant_id: str) -> None:
        """Change what is stored between the attempts."""


def test_programs_end_equal_whether_or_not_each_batch_is_decided_twice(run: Run) -> None:
    hesitant = Hesitant()

    run_programs(partial(OnTwoBackends, run, [InOrder(Memory()), InOrder(hesitant)]), budget(1))

    assert hesitant.taken_back > 100


class Told(Extension):
    """Keeps what was committed."""

    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def after_commit(self, work: Work) -> None:
        """Keep a batch."""
        self.works.append(work)


@pytest.mark.anyio
async def test_after_the_commit_only_the_last_attempt_is_told() -> None:
    backend = Hesitant()
    backend.ids = Numbered()
    gate, told = Gate(Engine(backend, Settings()), "t"), list[Work]()
    gate.engine.extend(Told(told))

    task_id = await gate.create()

    assert [set(work.added) for work in told] == [{task_id}]
    assert backend.db.execute("SELECT task_id FROM tasks").fetchall() == [(task_id,)]


@pytest.mark.anyio
async def test_a_second_attempt_answers_by_what_it_finds() -> None:
    class EndsLeases(Hesitant):
        def meanwhile(self, tenant_id: str) -> None:
            self.db.execute("DELETE FROM leases")
    backend = EndsLeases()
    gate = Gate(Engine(backend, Settings()), "t")
    backend.ids = Numbered()
    await gate.create()
    offer = await gate.claim()
    assert offer is not None

    with refused("lease_invalid_or_expired", reason="unknown"):
        await gate.as_worker("w1").renew_lease(lease_id=offer.lease_id)
