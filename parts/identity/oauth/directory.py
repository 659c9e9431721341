"""The rows of the authorization server, which stand in the default tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs, Work
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.audit import load_head
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored import export_key
from asyncgate.parts.model.wire import Ask
from asyncgate.parts.model.wire_admin import Severity

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
RecordKey = tuple[type[Struct], tuple[str, ...]]


class Directory:
    """Finds and changes the rows of the authorization server."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tenant_id = engine, engine.settings.default_tenant_id

    async def find(self, kind: type[R], *key: str) -> R | None:
        """Return a row, if there is one."""
        return await self.engine.backend.record(self.tenant_id, kind, *key)

    async def page(self, kind: type[R], after: str = "") -> list[R]:
        """Return the next rows of a kind, in the order of their keys."""
        return await self.engine.backend.page(self.tenant_id, Rows(kind, after))

    async def read(self, kind: type[R], after: str = "") -> AsyncIterator[R]:
        """Yield all rows of a kind behind a key, page by page, in the order of their keys."""
        while page := await self.page(kind, after):
            for row in page:
                yield row
            after = export_key(page[-1])

    async def change(self, run: Callable[[Work], T], *keys: RecordKey) -> T:
        """Let `run` change the rows with these keys in one transaction; return its answer when that is durable.

        `run` may be called again when the transaction has to be repeated, so it must have no effect outside of it.
        """
        context = copy_context()    # the batch is decided in another task, and the audit log needs the client's address

        def load(needs: Needs, caller: Caller, ask: Any) -> None:
            needs.records.update(keys)
            load_head(needs, caller, ask)

        def decide(engine: Engine, work: Work, caller: Caller, ask: Any) -> T:
            return context.run(run, work)
        own = self.engine.make_own_caller(self.tenant_id)
        done: T = await self.engine.write(decide, load, own, Ask())
        return done


async def audit_in_tenant(engine: Engine, caller: Caller, tenant: str | None, event: str, severity: Severity, /,
                          **said: Any) -> None:
    """Write a change of a row that is for another tenant into that tenant's audit log, too."""
    if tenant is None or tenant == engine.settings.default_tenant_id:
        return      # its line was written in the transaction of the change
    context = copy_context()

    def decide(engine: Engine, work: Work, caller: Caller, ask: Any) -> None:
        context.run(audit_change, engine, work, event, severity, caller, **said)
    await engine.write(decide, load_head, replace(caller, tenant_id=tenant), Ask())
