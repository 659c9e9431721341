"""Database backends: the gate finds the one to use by the scheme of a URL.

How to write a backend.  Make a module with `async def open_backend(url, *, serving=False, settings=None)` that returns
an object with the methods of `Backend` below.  Name the class of that object `BACKEND`.  Register the module in your
package under the entry-point group `asyncgate.backends`, with the scheme of its URLs as the name.  `settings` is the
group `database` of the settings (pool size, timeouts); without it use the defaults.  A backend decides nothing:
`transact` loads the rows that `Needs` names into a `Work`, calls `decide`, and saves the changes in `Work`; every other
method is a plain read.  `sqlite_tables.py` and `sqlite.py` are the ones to read.  Then run the test
suite against yours: `asyncgate conformance yours://...`.

parts/model/database.py has protocols for abilities that only some databases have.  The suite kills the processes of a
`LastingBackend`, and lets several processes serve one database of a `SharedBackend`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from asyncgate.parts.model import errors, queries, stored_limits
from asyncgate.parts.model.database import ArchivingBackend, Around, FileBackend, LastingBackend, SharedBackend

if TYPE_CHECKING:
    from asyncgate import Needs, Work
    from asyncgate.parts.model import stored
    from asyncgate.parts.model.findings import Finding
    from asyncgate.parts.model.ids import Ids
    from asyncgate.parts.model.settings import DatabaseSettings, Settings

__all__ = ["ANY_KIND", "ArchivedFilter", "ArchivingBackend", "Around", "Backend", "DeliveryFilter", "EntryFilter",
           "EventFilter", "FileBackend", "LastingBackend", "LeaseCount", "LeaseFilter", "ObligationFilter",
           "OutboxFilter", "OutboxOf", "Query", "QueueFilter", "ReceiptFilter", "Row", "Rows", "ScheduleFilter",
           "SharedBackend", "TaskFilter", "is_lasting", "is_shared", "look_into", "migrate", "migration_sql",
           "open_backend", "wanted_is"]

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
BUILT_IN_BACKENDS = frozenset({"memory", "postgres", "sqlite"})


class Backend(Protocol):
    """The methods of every database.  A backend knows no rule, and keeps nothing of a batch that it refused."""

    ids: Ids
    instance: str               # the default name of this process
    skew: float                 # seconds that tests add to the clock
    secret: bytes               # signs cursors; as durable as the data
    parallel: int               # batches that may run concurrently
    parallel_per_tenant: int

    def now(self) -> float:
        """Return the database's time, or the best estimate of it."""

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """In one transaction, load and lock the rows that `needs` names, call `decide`, save its changes, and commit.

        `decide` is called once per attempt and may run on any thread.  After the database rolled back the transaction
        (a deadlock, a lost race for a key), a backend may try again with a new Work; the last attempt counts.  Skip a
        claimable task that another transaction has locked; wait for every other locked row.
        With claims, load the tenant's Pauses, and search no lane that is paused (`Lanes.groups`).  A batch that is to
        be `alone` waits until no other batch of the tenant is under way, and the others for it.
        A dropped row takes its dependents with it: a Receipt its edges and delivery time, a Task its lease, progress
        and events.  Lines of the audit log are dropped oldest first.  The rules drop a Receipt only in the batch that
        keeps its Archived, and the reverse; a database that can check this should.
        A row in `erased` is changed last, in the fields that its card calls erasable and no others; a database that can
        check it lets that pass in an open Erasure only, and a Task with receipts go, too.
        Raises Refused if the database refused the batch and nothing of it was kept.  After any other exception the
        outcome may be unknown.
        """

    async def task(self, tenant_id: str, task_id: str) -> queries.Row | None:
        """Return a task with its latest lease and progress."""

    async def page(self, tenant_id: str, query: queries.Query[T]) -> list[T]:
        """Return a page of rows; the class of the query says which rows, and in which order."""

    async def receipt(self, tenant_id: str, receipt_id: str) -> stored.Receipt | None:
        """Return one receipt with its parents."""

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a receipt of a type in `by` names `receipt_id` as parent; read receipts, not the index (PH.1.4)."""

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one row of a table in RECORDS by its key, or None."""

    async def unsent(self) -> list[str]:
        """Return the tenants whose outbox has receipts, waiting or parked."""

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants that have endpoints for webhooks."""

    async def lag(self, tenant_id: str) -> stored.Lag:
        """Return how many receipts wait for the ledger, how many are parked, and when the oldest waiting one came."""

    async def find_key(self, key_id: str) -> tuple[str, bool, stored.Key] | None:
        """Return an issued key's tenant, whether the tenant is suspended, and the key: the only read without a tenant.

        Must see every change committed before the call.  Raises DatabaseUnavailable if the database does not answer.
        """

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return tenants with the ids of tasks and schedules that upkeep must check: at most `limit` of each kind.

        In a shared database, leave out the tasks of other instances that are alive.
        """

    async def depths(self, now: float) -> list[stored.Depth]:
        """Return what the queues of all tenants have by type, in time that does not depend on the number of tasks.

        Of delayed tasks whose time has come it looks at DUE_LOOKED_AT of a tenant, for the oldest one.
        """

    async def count_overdue(self, before: float) -> int:
        """Return how many live leases have expired before a time, over all tenants, at most OVERDUE_COUNTED."""

    async def count_unanswered(self) -> tuple[int, float | None]:
        """Return how many tasks are on hold for an answer, over all tenants, and since when the first of them is.

        It counts UNANSWERED_COUNTED at most of all tenants together.
        """

    async def limit_depths(self) -> list[stored_limits.LimitDepth]:
        """Return what the limits of all tenants have by name, and in one row what waits for those that nobody has set.

        Of each limit HOLDS_COUNTED leases are counted at most.
        """

    async def cut_cascades(self, before: float, limit: int) -> list[tuple[str, str]]:
        """Return tenants and tasks of cascades that began before a time and are not finished, over all tenants."""

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases expire, from `since` on, with tenant and task; the earliest first.

        A returned time may be earlier than the real end of a renewed lease, never later.  Tasks without a lease may be
        returned too.
        """

    async def drop_lanes(self, tenant_id: str | None = None) -> int:
        """Delete the lanes in which no task waits, their turns, and the numbers of empty queues; return how many lanes.

        The numbers are kept for an hour, unless a tenant is named: then they go at once, of that tenant alone.

        Must not run during `decide`, because a batch relies on the lanes that its Work knows.
        """

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task of a tenant may be leased, or a turn that waits for its time; or None."""

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""

    async def alive(self) -> None:
        """Return if the database answers; raise an exception if it does not."""

    async def keep_secret(self, secret: bytes) -> None:
        """Replace `secret`, durably, so that a copied database accepts its source's cursors; no gate may be serving."""

    async def close(self) -> None:
        """Finish running work and close the database."""


class BackendModule(Protocol):
    """The module that an entry point names."""

    BACKEND: type[Backend]          # the class of the object that open_backend returns

    async def open_backend(
            self, url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Backend:
        """Open the database that a URL names."""


@runtime_checkable
class MigratedModule(Protocol):
    """A backend whose schema must be migrated before a gate opens it."""

    async def migrate_database(self, url: str) -> list[str]:
        """Migrate the schema; return the names of the applied migrations."""


@runtime_checkable
class ScriptedModule(Protocol):
    """A backend whose schema an operator may migrate by hand."""

    def migration_sql(self, after: int) -> str:
        """Return the SQL of all migrations after a schema number."""


@runtime_checkable
class ExaminedModule(Protocol):
    """A backend that can be looked into without being opened."""

    def examine_database(self, settings: Settings, clock: Callable[[], float]) -> AsyncIterator[Finding]:
        """Yield what is wrong with the database of the settings, and change nothing; `clock` is this machine's."""


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Backend:
    """Open the backend for the scheme of `url`; `serving` reserves the database if only one process may serve it."""
    return await _module(url).open_backend(url, serving=serving, settings=settings)


async def migrate(url: str, settings: DatabaseSettings | None = None) -> list[str]:
    """Create a database or migrate its schema; return the applied migrations, if the backend names them."""
    if isinstance(module := _module(url), MigratedModule):
        return await module.migrate_database(url)
    await (await open_backend(url, settings=settings)).close()      # such a backend migrates when it is opened
    return []


def migration_sql(url: str, after: int) -> str:
    """Return the SQL that `migrate` would run after schema number `after`, for operators who run it themselves."""
    if isinstance(module := _module(url), ScriptedModule):
        return module.migration_sql(after)
    raise errors.StartupError("this backend migrates its schema when it is opened; there is no SQL to run by hand")


def look_into(settings: Settings, clock: Callable[[], float]) -> AsyncIterator[Finding]:
    """Yield what a database says of itself; nothing where its backend cannot be asked."""
    module = _module(settings.database.url)
    return module.examine_database(settings, clock) if isinstance(module, ExaminedModule) else nothing_found()


async def nothing_found() -> AsyncIterator[Finding]:
    """Yield nothing."""
    none: tuple[Finding, ...] = ()
    for finding in none:
        yield finding


def is_lasting(url: str) -> bool:
    """Whether a backend's data outlives the process."""
    return issubclass(_module(url).BACKEND, LastingBackend)


def is_shared(url: str) -> bool:
    """Whether several processes may use one database of a backend concurrently."""
    return issubclass(_module(url).BACKEND, SharedBackend)


def _module(url: str) -> BackendModule:
    """Return the module of a backend: another package's by its entry point, or one of this package."""
    scheme = url.partition(":")[0].replace("postgresql", "postgres")
    if not re.fullmatch("[a-z][a-z0-9_]*", scheme):
        raise errors.StartupError(f"database.url must begin with a scheme such as sqlite:///gate.db, not {scheme!r}")
    for point in _registered().select(name=scheme):
        theirs: BackendModule = point.load()
        if not hasattr(theirs, "BACKEND"):
            raise errors.StartupError(
                f"{point.value} has no BACKEND; set it to the class of the object that open_backend "
                "returns")
        return theirs
    if scheme in BUILT_IN_BACKENDS:
        ours: BackendModule = import_module(f"asyncgate.backends.{scheme}")
        return ours
    raise errors.StartupError(
        f"there is no backend for {scheme}:; use sqlite:, postgresql: or memory:, or install a package "
        "with that backend (entry-point group asyncgate.backends)")


@cache
def _registered() -> EntryPoints:
    """Return the backends of other packages; cached, because searching installed packages takes milliseconds."""
    return entry_points(group="asyncgate.backends")
