"""procrastinate under `asyncgate.bench.peers.strikes`: its App as a client, and as workers that retry stalled jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg
from procrastinate import App, PsycopgConnector
from procrastinate.exceptions import AlreadyEnqueued

from asyncgate.bench.peers.struck import Act, StruckPeer, take_part

HEARTBEAT_SECONDS, STALLED_SECONDS, RETRY_SECONDS = 1.0, 5.0, 2.0


def open_app(url: str) -> App:
    """Return its app on a pool."""
    return App(connector=PsycopgConnector(conninfo=url, min_size=1, max_size=4))


async def _install(url: str) -> None:
    """Install its tables."""
    async with open_app(url).open_async() as app:
        await app.schema_manager.apply_schema_async()


@contextlib.asynccontextmanager
async def _open_client(url: str) -> AsyncIterator[Act]:
    """Yield what submits a job: its lock is known while the job waits."""
    async with open_app(url).open_async() as app:
        async def submit(job: str) -> None:
            with contextlib.suppress(AlreadyEnqueued):
                await app.configure_task("strike", queue="strikes", queueing_lock=job).defer_async(job=job)
        yield submit


async def _work(url: str, do: Act) -> None:
    """Be a worker, and retry the jobs of dead ones, as its documentation advises."""
    async with open_app(url).open_async() as app:
        @app.task(name="strike", queue="strikes")   # type: ignore[untyped-decorator, unused-ignore]
        async def run(job: str) -> None:
            await do(job)

        async def retry_stalled() -> None:
            while True:
                await asyncio.sleep(RETRY_SECONDS)
                with contextlib.suppress(Exception):        # the database is away: later
                    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=STALLED_SECONDS):
                        await app.job_manager.retry_job(job)

        retrying = asyncio.create_task(retry_stalled())
        await app.run_worker_async(queues=["strikes"], concurrency=4, fetch_job_polling_interval=1.0,
                                   update_heartbeat_interval=HEARTBEAT_SECONDS,
                                   stalled_worker_timeout=STALLED_SECONDS)
        retrying.cancel()


async def _list_left(url: str) -> list[str]:
    """Return the jobs that wait or are under way, as its table has it."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        rows = await connection.execute(
            "SELECT args->>'job' FROM procrastinate_jobs WHERE status NOT IN ('succeeded', 'failed', 'cancelled')")
        return [job for [job] in await rows.fetchall()]


if __name__ == "__main__":
    take_part(StruckPeer(_install, _open_client, _work, _list_left))
