"""Walk through stored rows in the order of their keys, page by page: one side alone, or several side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from msgspec.structs import replace

from asyncgate.parts.model import queries

R = TypeVar("R")


class Pages(Protocol):
    """What has pages of rows: a backend, or something around one."""

    async def page(self, tenant_id: str, query: queries.Query[R]) -> list[R]:
        """Return the next rows of a query."""


def batches(rows: Iterable[R], size: int, most: int = 0,
            weigh: Callable[[R], int] = lambda row: 0) -> Iterator[list[R]]:
    """Yield rows in lists of at most so many, which together weigh at most `most`; a heavier row is alone."""
    batch, weight = list[R](), 0
    for row in rows:
        added = weigh(row)
        if len(batch) == size or (batch and weight + added > most):
            yield batch
            batch, weight = [], 0
        batch.append(row)
        weight += added
    if batch:
        yield batch


async def walk(side: Pages, tenant_id: str, query: queries.Query[R]) -> AsyncIterator[list[R]]:
    """Yield what a query asks for from its `after` on, page by page; no page is empty."""
    while page := await side.page(tenant_id, query):
        yield page
        query = replace(query, after=query.place(page[-1]))


async def walk_rows(side: Pages, tenant_id: str, query: queries.Query[R]) -> AsyncIterator[R]:
    """Yield what a query asks for from its `after` on, row by row."""
    async for page in walk(side, tenant_id, query):
        for row in page:
            yield row


async def merge(*sides: AsyncIterator[dict[str, R]]) -> AsyncIterator[list[dict[str, R]]]:
    """Walk through several sides in step; each yields rows by their keys, in order, and never none.

    Yield what each side has of one stretch of keys.  Every side has been read that far then, so what is written within
    the stretch does not come back.
    """
    ahead: list[dict[str, R]] = [{} for _ in sides]
    while any(ahead := [rows or await anext(side, {}) for rows, side in zip(ahead, sides, strict=True)]):
        last = min(next(reversed(rows)) for rows in ahead if rows)
        yield [{key: row for key, row in rows.items() if key <= last} for rows in ahead]
        ahead = [{key: row for key, row in rows.items() if key > last} for rows in ahead]
