"""Check what erasures have left: each row without content is on the list of its erasure, and the list is as proven.

Without that, who can write the database could take a receipt's content away and leave its digest, so that its seal
still fits.
"""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model import erased, queries, stored
from asyncgate.parts.model.walking import walk_rows

Listed = dict[tuple[str, str], stored.Erased]


async def read_erased(backend: Any, tenant_id: str) -> tuple[Listed, list[str]]:
    """Return the list of erased rows of a tenant, and what is wrong with it."""
    rows: list[stored.Erased] = await read_all(backend, tenant_id, stored.Erased)
    erasures: list[stored.Erasure] = await read_all(backend, tenant_id, stored.Erasure)
    problems = [f"erasure {erasure.erasure_id} does not fit its list of rows: its digest is {erasure.digest[:16]}…"
                for erasure in erasures if erasure.ended_at is not None
                and erased.digest_of_list([row for row in rows if row.erasure_id == erasure.erasure_id])
                != erasure.digest]
    known = {erasure.erasure_id for erasure in erasures}
    problems += [f"row {row.row_id} of {row.source} is listed under the erasure {row.erasure_id}, which does not exist"
                 for row in rows if row.erasure_id not in known]
    return {(row.source, row.row_id): row for row in rows}, problems


async def read_all(backend: Any, tenant_id: str, kind: type[Any]) -> list[Any]:
    """Return all rows of a kind."""
    return [row async for row in walk_rows(backend, tenant_id, queries.Rows(kind))]


def find_false_erasure(listed: Listed, row: stored.Receipt | stored.Audit | stored.Entry) -> str | None:
    """Return what is wrong with a row that says that it was erased; None if nothing is."""
    source, row_id = erased.place_of_row(row)
    if (entry := listed.get((source, row_id))) is None:
        return f"row {row_id} of {source} says that it was erased, but no erasure lists it"
    content = row.body if isinstance(row, stored.Receipt) else row.content if isinstance(row, stored.Entry) else ""
    note = erased.read_note(content)
    if erased.digest_of_kept(row) != entry.kept or (note is not None and (note.erasure_id, note.sealed) != (
            entry.erasure_id, entry.before)):
        return f"row {row_id} of {source} was changed after it was erased"
    return None
