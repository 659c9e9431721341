"""What was acknowledged survives the fail-overs of Patroni, after which a demoted primary comes back and follows."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from asyncgate.conformance.load import Load, serving
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import find_programs
from asyncgate.conformance.torture import wrong_with
from tests.backends.test_postgres_faults import HASTY, codes, first_success
from tests.support.patroni import PatroniPair, find_missing

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def pair() -> Iterator[PatroniPair]:
    """Servers of these tests alone."""
    if missing := find_missing() or (find_programs() is None and MISSING):
        pytest.skip(missing)
    with PatroniPair("") as running:
        yield running


async def test_fail_overs_of_patroni_under_load_lose_and_repeat_nothing(
        pair: PatroniPair, record_property: Any) -> None:
    """Once the leader's machine dies, once its server alone; the first one comes back and has to follow."""
    database, seed = await pair.migrated_database("gate"), random.randrange(2**32)
    async with serving(database, **HASTY) as server, aclosing(Load(server, seed)) as load:
        async with load.running():
            await load.grown(200)
            old = await asyncio.to_thread(pair.await_standby)
            old.kill()
            await asyncio.to_thread(pair.await_other_leader, old)
            old.start()     # strictly synchronous: without it nothing is written
            await first_success(load, time.time())
            await load.grown(200)

            leader = await asyncio.to_thread(pair.await_standby)
            leader.kill_server()
            await first_success(load, time.time())
            await load.grown(200)
        assert server.process.poll() is None
        status = await server.stop(signal.SIGTERM)

    numbers = f"{len(load.calls)} operations, {len(load.made)} tasks"
    record_property("patroni", numbers)
    print(numbers)
    assert await wrong_with(database, load) == [], f"seed {seed}"
    assert codes(load.calls) <= {"database_unavailable", "outcome_unknown"}
    assert status == 0
