"""The driver of DBOS: a workflow that runs at once in the process that has started it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from dbos import DBOS

from asyncgate.bench.peers import child

MOST_CONNECTIONS = 20        # at most, of its pool


@contextlib.asynccontextmanager
async def open_peer(url: str, clients: int) -> AsyncIterator[child.Modes]:
    """Install its tables in an empty database, and launch it."""
    DBOS(config={"name": "bench", "system_database_url": url, "sys_db_pool_size": min(clients + 2, MOST_CONNECTIONS),
                 "log_level": "ERROR"})

    async def run(payload: Any) -> dict[str, bool]:
        return {"ok": True}

    work = DBOS.workflow()(run)
    DBOS.launch()
    payload = json.loads(child.PAYLOAD)

    async def cycle(client: int) -> AsyncIterator[str]:
        handle = await DBOS.start_workflow_async(work, payload)
        yield child.CREATE
        await handle.get_result()
        yield child.COMPLETE

    try:
        yield {"cycle": cycle}
    finally:
        DBOS.destroy()
