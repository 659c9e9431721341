"""The driver of procrastinate: its job manager on a pool, as its own worker calls it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Status

from asyncgate.bench.peers import child


@contextlib.asynccontextmanager
async def open_peer(url: str, clients: int) -> AsyncIterator[child.Modes]:
    """Install its tables in an empty database."""
    app = App(connector=PsycopgConnector(conninfo=url, min_size=clients, max_size=clients))
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        manager, payload = app.job_manager, msgspec.json.decode(child.PAYLOAD)
        task, worker = app.configure_task("bench", queue="bench"), await app.job_manager.register_worker()

        async def cycle(client: int) -> AsyncIterator[str]:
            await task.defer_async(**payload)
            yield child.CREATE
            while not (job := await manager.fetch_job(["bench"], worker)):
                pass
            yield child.CLAIM
            await manager.finish_job(job, Status.SUCCEEDED, False)
            yield child.COMPLETE

        yield {"cycle": cycle}
