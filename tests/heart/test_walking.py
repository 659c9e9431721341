"""The walk through stored rows, one side alone and several in step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.walking import batches, merge, walk, walk_rows

pytestmark = pytest.mark.anyio


class Shelf:
    """Rows in the order of their keys, of which one more may be added while somebody reads."""

    def __init__(self, *keys: str) -> None:
        self.keys, self.asked = list(keys), list[str]()

    async def page(self, tenant_id: str, query: Any) -> list[Any]:
        self.asked.append(query.after)
        behind = sorted(key for key in self.keys if key > (query.after or ""))
        return [stored.LedgerMark(key, "") for key in behind][:query.limit]

    async def by_key(self, limit: int) -> AsyncIterator[dict[str, str]]:
        async for page in walk(self, "t", queries.Rows(stored.LedgerMark, limit=limit)):
            yield {row.name: row.name for row in page}


async def test_a_walk_begins_where_its_query_says_and_ends_with_an_empty_page() -> None:
    shelf = Shelf(*"abcde")

    rows = [row.name async for row in walk_rows(shelf, "t", queries.Rows(stored.LedgerMark, "a", 2))]

    assert (rows, shelf.asked) == ([*"bcde"], ["a", "c", "e"])


def test_a_ledgers_entries_are_walked_through_by_arrival() -> None:
    entry = stored.Entry("receipt", "arrival", "", "", "", "", "", "", "", "", "")

    assert queries.EntryFilter(None, None, None, None, None, 1).place(entry) == "arrival"
    assert queries.Rows(stored.Entry).place(entry) == "receipt"


async def test_sides_are_read_in_step_and_each_row_comes_once() -> None:
    parts = [part async for part in merge(Shelf(*"abcdg").by_key(3), Shelf(*"bdef").by_key(2), Shelf().by_key(1))]

    assert ["".join(key for part in parts for key in part[side]) for side in range(3)] == ["abcdg", "bdef", ""]
    keys = [{key for rows in part for key in rows} for part in parts]
    assert all(max(before) < min(behind) for before, behind in pairwise(keys))


async def test_what_is_written_within_a_stretch_does_not_come_back() -> None:
    target = Shelf("b")

    for_target = list[str]()
    async for rows, there in merge(Shelf(*"abcdef").by_key(2), target.by_key(2)):
        for_target += there
        target.keys += [key for key in rows if key not in there]

    assert (for_target, sorted(target.keys)) == (["b"], [*"abcdef"])


def test_batches_have_at_most_so_many_rows_of_so_much_weight() -> None:
    assert [*batches("abcde", 2)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [*batches([], 2)] == []
    assert [*batches(["a", "bb", "cccc", "d", "e", "f"], 2, 3, len)] == [["a", "bb"], ["cccc"], ["d", "e"], ["f"]]
