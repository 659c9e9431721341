"""pgqueuer under `asyncgate.bench.peers.strikes`: its queries as a client, its QueueManager as a worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.queries import Queries

from asyncgate.bench.peers.struck import Act, StruckPeer, take_part

STRUCK_ENTRYPOINT = "strike"
HEARTBEAT, LOOKS = timedelta(seconds=5), timedelta(seconds=1)


async def _install(url: str) -> None:
    """Install its tables."""
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
        await Queries(AsyncpgPoolDriver(pool)).install()


@contextlib.asynccontextmanager
async def _open_client(url: str) -> AsyncIterator[Act]:
    """Yield what submits a job: its key is known while the job is in the queue."""
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        queries: Any = Queries(AsyncpgPoolDriver(pool))
        yield lambda job: queries.enqueue(STRUCK_ENTRYPOINT, job.encode(), dedupe_key=job, on_conflict="skip")


async def _work(url: str, do: Act) -> None:
    """Be a worker, as its documentation has it."""
    connection = await asyncpg.connect(url)
    queue: Any = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint(STRUCK_ENTRYPOINT)    # type: ignore[untyped-decorator, unused-ignore]
    async def run(job: Any) -> None:
        await do(job.payload.decode())

    await queue.qm.run(dequeue_timeout=LOOKS, heartbeat_timeout=HEARTBEAT, shutdown_on_listener_failure=True)


async def _list_left(url: str) -> list[str]:
    """Return the jobs that are in its queue."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetch("SELECT payload FROM pgqueuer WHERE entrypoint = $1", STRUCK_ENTRYPOINT)
    return [row["payload"].decode() for row in rows]


if __name__ == "__main__":
    take_part(StruckPeer(_install, _open_client, _work, _list_left))
