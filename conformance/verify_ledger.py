"""Hold the receipts of a stored gate against their seals.

It works beside a running server, as `verify` does: what looks wrong only because it was changed between two pages does
not look wrong a second time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from msgspec import Struct

from asyncgate import Receipt, Seal, SealHead, export_key
from asyncgate.parts.seals import Chain, digest

Told = Callable[[int], None]


class Sealed(Struct):
    """What was found: how far the seals of each tenant reach, and what is wrong."""

    seals: int = 0
    receipts: int = 0
    unsealed: int = 0           # since the last seal; the next one covers them
    heads: dict[str, SealHead] = {}
    problems: list[str] = []


async def verify_ledger(backend: Any, *, anchors: tuple[str, ...] = (), progress: Told | None = None) -> Sealed:
    """Check all seals of all tenants; `anchors` are seals that somebody has noted, as NUMBER:HASH."""
    found = await _once(backend, anchors, progress)
    if found.problems:
        again = await _once(backend, anchors, progress)
        again.problems = [problem for problem in again.problems if problem in set(found.problems)]
        return again
    return found


async def _once(backend: Any, anchors: tuple[str, ...], progress: Told | None) -> Sealed:
    found, noted = Sealed(), dict.fromkeys(anchors, False)
    for tenant_id in await backend.tenants():
        chain = Chain()
        try:
            async for rows in _held(backend, tenant_id, chain, noted):
                found.receipts += rows
                if progress is not None:
                    progress(found.receipts)
        except Exception as unreadable:     # a damaged file must not hide what was found before
            chain.problems.append(f"cannot be read to its end: {unreadable}")
        found.problems += [f"tenant {tenant_id}: {problem}" for problem in chain.close()]
        found.seals, found.unsealed = found.seals + chain.head.number, found.unsealed + chain.unsealed
        found.heads[tenant_id] = chain.head
    found.problems += [f"seal {anchor} was noted, and is not there: what it covers was rewritten"
                       for anchor, there in noted.items() if not there]
    return found


async def _held(backend: Any, tenant_id: str, chain: Chain, noted: dict[str, bool]) -> AsyncIterator[int]:
    """Hold one tenant's receipts against its seals; yield how many each page had."""
    head = await backend.record(tenant_id, SealHead)
    async for seals in pages(backend, Seal, tenant_id):
        for seal in seals:
            if head is None or seal.number <= head.number:      # else it was made since
                chain.add(seal)
            noted |= {name: True for name in noted if name == f"{seal.number}:{seal.hash}"}
    chain.ends(head)
    async for receipts in pages(backend, Receipt, tenant_id):
        for receipt in receipts:
            chain.see(receipt.receipt_id, digest(receipt))
        yield len(receipts)


async def pages(backend: Any, table: type[Struct], tenant_id: str) -> AsyncIterator[list[Any]]:
    """Yield the rows of a table, page by page."""
    after = ""
    while page := await backend.export(table, tenant_id, after):
        yield page
        after = export_key(page[-1])
