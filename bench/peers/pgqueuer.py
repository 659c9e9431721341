"""The driver of pgqueuer: its queries on a pool, as its own worker calls them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.queries import EntrypointExecutionParameter, Queries

from asyncgate.bench.peers import child
from asyncgate.commands.bench.load import TASKS_PER_BATCH

ENTRYPOINT = "bench"
HEARTBEAT_TIMEOUT = timedelta(minutes=5)


@contextlib.asynccontextmanager
async def open_peer(url: str, clients: int) -> AsyncIterator[child.Modes]:
    """Install its tables in an empty database."""
    async with asyncpg.create_pool(url, min_size=clients, max_size=clients) as pool:
        queries: Any = Queries(AsyncpgPoolDriver(pool))      # its types name each kind of id
        worker, unlimited = uuid.uuid4(), {ENTRYPOINT: EntrypointExecutionParameter(0)}
        await queries.install()

        async def take(most: int) -> list[tuple[Any, str, None]]:
            while not (jobs := await queries.dequeue(most, unlimited, worker, None, HEARTBEAT_TIMEOUT)):
                pass
            return [(job, "successful", None) for job in jobs]

        async def cycle(client: int) -> AsyncIterator[str]:
            await queries.enqueue(ENTRYPOINT, child.PAYLOAD)
            yield child.CREATE
            jobs = await take(1)
            yield child.CLAIM
            await queries.log_jobs(jobs)
            yield child.COMPLETE

        async def batch(client: int) -> AsyncIterator[str]:
            await queries.enqueue([ENTRYPOINT] * TASKS_PER_BATCH, [child.PAYLOAD] * TASKS_PER_BATCH,
                                  [0] * TASKS_PER_BATCH)
            yield child.CREATE_MANY
            jobs = await take(TASKS_PER_BATCH)
            yield child.CLAIM_MANY
            await queries.log_jobs(jobs)
            yield child.COMPLETE_MANY

        yield {"cycle": cycle, "batch": batch}
