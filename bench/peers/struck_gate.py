"""A gate under `asyncgate.bench.peers.strikes`: its own client and its own worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from asyncgate.bench.peers.struck import Act, StruckPeer, take_part
from asyncgate.clients import Worker
from asyncgate.clients.http import AsyncHttp

STRUCK_LEASE_SECONDS = 5
STRIKE, NOT_ENDED = "strike", ("queued", "leased", "running")


async def _install(url: str) -> None:
    """Have nothing to install: the database was migrated."""


@contextlib.asynccontextmanager
async def _open_client(url: str) -> AsyncIterator[Act]:
    """Yield what submits a task under a key."""
    async with AsyncHttp(url, os.environ["ASYNCGATE_API_KEY"]) as gate:
        yield lambda job: gate.call("create_task", type=STRIKE, payload=job, idempotency_key=job, agent_id="client")


async def _work(url: str, do: Act) -> None:
    """Be a worker."""
    worker = Worker(url, f"w{os.getpid()}", concurrency=4, ttl_seconds=STRUCK_LEASE_SECONDS, state=None)

    @worker.task(STRIKE)
    async def run(job: str) -> str:
        await do(job)
        return job

    await worker.serve()


async def _list_left(url: str) -> list[str]:
    """Return the tasks that have not ended."""
    async with AsyncHttp(url, os.environ["ASYNCGATE_API_KEY"]) as gate:
        left, cursor = list[str](), None
        while True:
            page = await gate.call("list_tasks", type=STRIKE, limit=200, cursor=cursor)
            left += [task["idempotency_key"] for task in page["tasks"] if task["status"] in NOT_ENDED]
            if not (cursor := page["next_cursor"]):
                return left


if __name__ == "__main__":
    take_part(StruckPeer(_install, _open_client, _work, _list_left))
