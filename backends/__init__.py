"""Databases, any of which can be swapped for another: the gate imports none of them statically.

How to write a backend.  Make a module with `async def open_backend(url, *, serving=False, settings=None)` that returns
an object of the shape of `Backend` below, name the class of that object `BACKEND`, and register the module in your
package under the entry-point group `asyncgate.backends`, named like the scheme of its URLs.  `settings` is the group
`database` of the settings (pool size, time limits); without it the defaults hold.  A backend decides nothing:
`transact` loads what `Needs` names into a `Work`, calls `decide`, and saves what `Work` then holds; everything else is
a plain read.  `memory.py` is the shortest complete one, `sqlite.py` the one to read for a real database.  Then run the
suite against it: `asyncgate conformance yours://...`.

What only some databases can do is in parts/model/database.py, for each kind the methods that it has besides.  The suite
kills the processes of a `LastingBackend`, and lets several serve one database of a `SharedBackend`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from asyncgate.parts.model.database import ArchivingBackend, Around, FileBackend, LastingBackend, SharedBackend
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.queries import (
    ANY_KIND,
    ArchivedFilter,
    EntryFilter,
    EventFilter,
    LeaseFilter,
    ObligationFilter,
    OutboxFilter,
    OutboxOf,
    Query,
    ReceiptFilter,
    Row,
    Rows,
    TaskFilter,
    wanted_is,
)

if TYPE_CHECKING:
    from asyncgate import Needs, Work
    from asyncgate.parts.model.ids import Ids
    from asyncgate.parts.model.settings import DatabaseSettings
    from asyncgate.parts.model.stored import Key, Lag, Receipt

__all__ = ["ANY_KIND", "ArchivedFilter", "ArchivingBackend", "Around", "Backend", "EntryFilter", "EventFilter",
           "FileBackend", "LastingBackend", "LeaseFilter", "ObligationFilter", "OutboxFilter", "OutboxOf", "Query",
           "ReceiptFilter", "Row", "Rows", "SharedBackend", "TaskFilter", "is_lasting", "is_shared", "migrate",
           "migration_sql", "open_backend", "wanted_is"]

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
BUILT_IN_BACKENDS = frozenset({"memory", "postgres", "sqlite"})


class Backend(Protocol):
    """What a database must give.  It knows no rule, and keeps nothing of a batch that it refused."""

    ids: Ids
    instance: str               # how a process calls itself that was given no name
    skew: float                 # seconds that tests add to the clock
    secret: bytes               # signs cursors; as durable as the data
    parallel: int               # batches that may be under way at once
    parallel_per_tenant: int

    def now(self) -> float:
        """Return the database's time, or the best guess at it."""

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """In one transaction load and lock what `needs` names, call `decide`, save what it changed, commit.

        Calls `decide` once for each attempt: after the database took the whole transaction back (a deadlock, a lost
        race for a key) it may begin again with a fresh Work, and the last attempt counts.  A claimable task that
        another transaction has locked is left out; every other row is waited for.  `decide` may run on any thread.
        What is dropped goes with all that belongs to it: a Receipt with its edges and telemetry, a Task with its
        lease, progress and events; lines of the audit log are dropped oldest first.  Rules drop a receipt only
        together with keeping its Archived, and the other way round; a database that can should see to it.
        Raises Refused when the database would not take the batch and nothing of it was kept; any other exception
        means that the outcome may be unknown.
        """

    async def task(self, tenant_id: str, task_id: str) -> Row | None:
        """Return a task with its latest lease and progress."""

    async def page(self, tenant_id: str, query: Query[T]) -> list[T]:
        """Return the rows that a query asks for; its class says which they are, and in what order."""

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt with its parents."""

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a receipt of a type in `by` has `receipt_id` among its parents: evidence, not the index (PH.1.4)."""

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one of the RECORDS, by its key."""

    async def unsent(self) -> list[str]:
        """Return the tenants with receipts that the ledger does not have, waiting or parked."""

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait for the ledger, how many are parked, and since when the oldest waits."""

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return the tenant of an issued key, whether that is suspended, and the key: before any tenant is known.

        It sees every change committed before the call; raises DatabaseUnavailable when the database does not answer.
        """

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return tenants with ids of tasks and schedules that upkeep must look at: at most `limit` of each kind.

        On a database that several processes share it leaves out the tasks of other instances that live.
        """

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases run out, from a time on, with tenant and task; the soonest come first.

        The time may lie before the end of a renewed lease, never behind it; tasks without a lease may be named too.
        """

    async def drop_lanes(self) -> int:
        """Forget the lanes in which no task waits; return how many.

        A batch that is being decided relies on those that its Work knows: take turns with it.
        """

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task of a tenant may be leased."""

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""

    async def alive(self) -> None:
        """Return when the database has answered; raise if it does not."""

    async def keep_secret(self, secret: bytes) -> None:
        """Make this the `secret`, durably, while nobody serves: a copy honours the cursors that its source gave."""

    async def close(self) -> None:
        """Finish what is under way and let go of the database."""


class BackendModule(Protocol):
    """What an entry point names."""

    BACKEND: type[Backend]          # of what open_backend returns

    async def open_backend(
            self, url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Backend:
        """Open the database that a URL names."""


@runtime_checkable
class MigratedModule(Protocol):
    """A backend that has a schema to bring up to date before a server opens it, or an older one to carry over."""

    async def migrate_database(self, url: str) -> list[str]:
        """Bring the schema up to date; return what was applied."""


@runtime_checkable
class ScriptedModule(Protocol):
    """A backend whose schema somebody may bring up to date by hand."""

    def migration_sql(self, after: int) -> str:
        """Return the SQL that a database with a schema of that number lacks."""


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Backend:
    """Open the backend that the scheme of `url` names; `serving` claims the database where only one server may."""
    return await _module(url).open_backend(url, serving=serving, settings=settings)


async def migrate(url: str, settings: DatabaseSettings | None = None) -> list[str]:
    """Create a database or bring its schema up to date; return what was applied, where the backend says so."""
    if isinstance(module := _module(url), MigratedModule):
        return await module.migrate_database(url)
    await (await open_backend(url, settings=settings)).close()      # it migrates whenever it is opened
    return []


def migration_sql(url: str, after: int) -> str:
    """Return the SQL that `migrate` would run behind schema number `after`, for people who run it themselves."""
    if isinstance(module := _module(url), ScriptedModule):
        return module.migration_sql(after)
    raise StartupError("this backend migrates whenever it is opened; there is nothing to run by hand")


def is_lasting(url: str) -> bool:
    """Whether what a backend stores outlives the process."""
    return issubclass(_module(url).BACKEND, LastingBackend)


def is_shared(url: str) -> bool:
    """Whether several processes may use one database of a backend at once."""
    return issubclass(_module(url).BACKEND, SharedBackend)


def _module(url: str) -> BackendModule:
    """Find the module of a backend: another package's under its entry point, or one of ours."""
    scheme = url.partition(":")[0].replace("postgresql", "postgres")
    if not re.fullmatch("[a-z][a-z0-9_]*", scheme):
        raise StartupError(f"database.url must begin with a scheme such as sqlite:///gate.db, not {scheme!r}")
    for point in _registered().select(name=scheme):
        theirs: BackendModule = point.load()
        if not hasattr(theirs, "BACKEND"):
            raise StartupError(f"{point.value} does not name BACKEND, the class of what its open_backend returns")
        return theirs
    if scheme in BUILT_IN_BACKENDS:
        ours: BackendModule = import_module(f"asyncgate.backends.{scheme}")
        return ours
    raise StartupError(f"no backend for {scheme}:; sqlite:, postgresql: and memory: come with the gate, others "
                       "register under the entry-point group asyncgate.backends")


@cache
def _registered() -> EntryPoints:
    """Return the backends of other packages: to look through what is installed takes milliseconds."""
    return entry_points(group="asyncgate.backends")
