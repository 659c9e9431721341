"""What the tests of integrated mode share."""

from __future__ import annotations

import asyncio

from asyncgate.conformance.harness import Gate
from tests.support.patience import PATIENCE_SECONDS


async def emptied(gate: Gate) -> None:
    """Wait until nothing waits for the ledger."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await gate.backend.lag(gate.tenant_id)).waiting:  # noqa: ASYNC110  # whoever empties it tells nobody
            await asyncio.sleep(0.01)
