"""Kill or stop a real server at a moment that matters, and compare its clients' records with the database."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import aclosing
from datetime import datetime
from typing import Any

import pytest

from asyncgate.backends import is_lasting
from asyncgate.conformance.load import HASTY_GATE, Load, own_tenant, serving
from asyncgate.conformance.torture import wrong_with

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]
RACERS, RACES_PER_ROUND = 64, 3


async def test_a_worker_may_finish_what_it_did_while_no_gate_served(database: str) -> None:
    patient: dict[str, Any] = {"restart_grace_seconds": 60}     # a busy machine is late with the completion, too
    async with serving(database, **HASTY_GATE, **patient, **own_tenant()) as server, aclosing(Load(server, 0)) as load:
        worker = load.client("w1")
        await load.client("a1").ask("create_task", type="demo", payload=None)
        claim = await worker.ask("lease_next", lease_ttl_seconds=3)       # not over before the kill
        assert claim.reply is not None
        [offer] = claim.reply["tasks"]
        await server.stop(signal.SIGKILL)
        await asyncio.sleep(max(datetime.fromisoformat(offer["expires_at"]).timestamp() - time.time(), 0.0))
        await server.start()

        under = {name: offer[name] for name in ("task_id", "lease_id", "fence")}
        done = await worker.ask("complete", **under, result={"n": 1}, artifacts=[{"uri": "file:///out"}])

        assert done.error is None
        await server.stop(signal.SIGTERM)
        assert await wrong_with(database, load) == []


async def test_of_64_clients_that_race_for_one_task_exactly_one_gets_it(database: str, rounds: int) -> None:
    async with serving(database, **own_tenant()) as server, aclosing(Load(server, 0)) as load:
        racers, agent = [load.client(f"w{n}") for n in range(RACERS)], load.client("a1")
        for _ in range(rounds * RACES_PER_ROUND):
            await agent.ask("create_task", type="demo", payload=None)
            claims = await asyncio.gather(*(racer.ask("lease_next", max_tasks=2) for racer in racers))

            assert [claim.error for claim in claims if claim.reply is None] == []
            assert sum(len(claim.reply["tasks"]) for claim in claims if claim.reply) == 1
        await server.stop(signal.SIGTERM)
        assert await wrong_with(database, load) == []


async def test_sigterm_under_load_answers_the_waiting_keeps_the_acknowledged_and_exits_with_0(database: str) -> None:
    async with serving(database, **HASTY_GATE, **own_tenant()) as server, aclosing(Load(server, 1)) as load:
        idle = [load.client(f"w-idle{n}") for n in range(10)]
        async with load.running():
            polls = [asyncio.create_task(client.ask("lease_next", wait_seconds=30, accept_types=["none of these"]))
                     for client in idle]
            await load.grown(500)
            load.stopping = True
            status = await server.stop(signal.SIGTERM)
            answers = await asyncio.gather(*polls)
            await server.start()    # for clients that retry until they get an answer

        assert status == 0
        # The load pauses things, sometimes the whole tenant: an answer may warn of it.
        assert [answer.reply and answer.reply["tasks"] for answer in answers] == [[]] * len(idle)
        assert await server.stop(signal.SIGTERM) == 0
        assert await wrong_with(database, load) == []
