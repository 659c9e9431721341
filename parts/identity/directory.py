"""The rows of the authorization server, which stand in the default tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from msgspec import Struct

from asyncgate import Caller, Engine, Needs, Work
from asyncgate.parts.identity.admin import audit_change, write_audited
from asyncgate.parts.identity.audit import load_head
from asyncgate.parts.model import queries, stored, wire_admin
from asyncgate.parts.model.walking import walk_rows

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
RecordKey = tuple[type[Struct], tuple[str, ...]]
ROWS_CHANGED = 100          # of many rows, those that one transaction changes


class Directory:
    """Finds and changes the rows of the authorization server."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tenant_id = engine, engine.settings.default_tenant_id

    async def find(self, kind: type[R], *key: str) -> R | None:
        """Return a row, if there is one."""
        return await self.engine.backend.record(self.tenant_id, kind, *key)

    async def page(self, kind: type[R], after: str = "") -> list[R]:
        """Return the next rows of a kind, in the order of their keys."""
        return await self.engine.backend.page(self.tenant_id, queries.Rows(kind, after))

    def read(self, kind: type[R], after: str = "") -> AsyncIterator[R]:
        """Yield all rows of a kind behind a key, page by page, in the order of their keys."""
        return walk_rows(self.engine.backend, self.tenant_id, queries.Rows(kind, after))

    async def change(self, run: Callable[[Work], T], *keys: RecordKey) -> T:
        """Let `run` change the rows with these keys in one transaction; return its answer when that is durable.

        `run` may be called again when the transaction has to be repeated, so it must have no effect outside of it.
        """
        def load(needs: Needs, caller: Caller, ask: Any) -> None:
            needs.records.update(keys)
        own = self.engine.make_own_caller(self.tenant_id)
        return await write_audited(self.engine, own, self.tenant_id, load, run)

    async def drop(self, kind: type[R], is_over: Callable[[R, float], bool]) -> int:
        """Delete the rows of a kind that are over now; return how many."""
        return await self.change_all(kind, is_over, lambda work, row: work.drop_record(kind, *stored.key_of(row)))

    async def change_all(self, kind: type[R], is_wanted: Callable[[R, float], bool],
                         change: Callable[[Work, R], None]) -> int:
        """Change the rows of a kind that are wanted now, so many in each transaction; return how many."""
        now, done = self.engine.backend.now(), 0
        wanted = [stored.key_of(row) async for row in self.read(kind) if is_wanted(row, now)]
        for at in range(0, len(wanted), ROWS_CHANGED):
            keys = wanted[at:at + ROWS_CHANGED]

            def run(work: Work, keys: list[tuple[str, ...]] = keys) -> int:
                # A row may have changed since it was read: a person may just have given the consent again.
                rows = [row for key in keys if (row := work.find_record(kind, *key)) and is_wanted(row, work.now)]
                for row in rows:
                    change(work, row)
                return len(rows)
            done += await self.change(run, *((kind, key) for key in keys))
        return done


async def audit_in_tenant(engine: Engine, caller: Caller, tenant: str | None, event: str, severity: wire_admin.Severity,
                          /,
                          **details: Any) -> None:
    """Write a change of a row that is for another tenant into that tenant's audit log, too."""
    if tenant is None or tenant == engine.settings.default_tenant_id:
        return      # its line was written in the transaction of the change
    def note(work: Work) -> None:
        audit_change(engine, work, event, severity, caller, **details)
    await write_audited(engine, caller, tenant, load_head, note)
