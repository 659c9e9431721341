"""Databases, any of which can be swapped for another: the gate imports none of them statically.

How to write a backend.  Make a module with `async def open_backend(url, *, serving=False, settings=None)` that returns
an object of the shape of `Backend` below, and register it in your package under the entry-point group
`asyncgate.backends`, named like the scheme of its URLs.  `settings` is the group `database` of the settings (pool size,
time limits); without it the defaults hold.  It decides nothing: `transact` loads what `Needs` names into a `Work`,
calls `decide`, and saves what `Work` then holds; everything else is a plain read.  `memory.py` is the shortest complete
one, `sqlite.py` the one to read for a real database.  Then run the suite against it:
`asyncgate conformance yours://...`.

The suite kills processes, and lets several serve one database.  A module whose backend is not made for that says so:
`LASTING = False` (what it stores ends with its process), `SHARED = False` (one process at a time uses it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from asyncgate import Needs, News, Work
    from asyncgate.parts.model.ids import Ids
    from asyncgate.parts.model.settings import DatabaseSettings
    from asyncgate.parts.model.stored import (
        Archived,
        Entry,
        EntryFilter,
        Event,
        Key,
        Lag,
        Lease,
        Outgoing,
        Progress,
        Receipt,
        ReceiptFilter,
        Task,
        TaskFilter,
    )
    from asyncgate.parts.model.wire import Principal

R = TypeVar("R", bound=Struct)


class Backend(Protocol):
    """What a database must give.  It knows no rule, and keeps nothing of a batch that it refused."""

    ids: Ids
    instance: str               # how a process calls itself that was given no name
    skew: float                 # seconds that tests add to the clock
    secret: bytes               # signs cursors; as durable as the data
    parallel: int               # batches that may be under way at once
    parallel_per_tenant: int

    @property
    def alone(self) -> bool:
        """Whether no other process can be writing to the database."""

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Take part under a name; raises StartupError when a living process has it.

        `hear` is told, on the event loop, what other processes have committed.  `close` leaves again.
        Returns the last sign of life of any process, None if one lives now or there never was one.  Who joins next
        waits until this process has given its first sign: leases may get time back before.
        """

    async def beat(self) -> None:
        """Give a sign of life; upkeep does so every `beat_seconds`."""

    def tell(self, news: News) -> None:
        """Let other processes know, soon and at most once; it may be lost."""

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

    async def task(self, tenant_id: str, task_id: str) -> tuple[Task, Lease | None, Progress | None] | None:
        """Return a task with its latest lease and progress."""

    async def tasks(self, tenant_id: str, of: TaskFilter) -> list[tuple[Task, Lease | None, Progress | None]]:
        """Return a page of tasks; filters apply before the limit, and an owner of ANY_KIND is whoever has that id."""

    async def leases(self, tenant_id: str, worker: Principal) -> list[tuple[Task, Lease]]:
        """Return the live leases of a worker (of one instance, if it names one), oldest first."""

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt with its parents."""

    async def receipts(self, tenant_id: str, of: ReceiptFilter) -> list[Receipt]:
        """Return a page of receipts that no later commit can add to; filters apply before the limit.

        Of the `newest` come the last ones, still oldest first; an inbox of ANY_KIND is that of whoever has the id.
        """

    async def events(self, tenant_id: str, task_id: str, after: str | None, limit: int) -> list[Event]:
        """Return a page of a task's events, oldest first."""

    async def obligations(self, tenant_id: str, to: Principal, after: str | None, limit: int) -> list[Receipt]:
        """Return a page of the open obligations addressed to `to`, oldest first, in time independent of history."""

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a receipt of a type in `by` has `receipt_id` among its parents: evidence, not the index (PH.1.4)."""

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one of the RECORDS, by its key."""

    async def unsent(self) -> list[str]:
        """Return the tenants with receipts that the ledger does not have, waiting or parked."""

    async def outbox(self, tenant_id: str, since: str, limit: int) -> list[Outgoing]:
        """Return a page of the receipts of a tenant that wait for the ledger, oldest first, from behind an id."""

    async def outgoing(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[Outgoing]:
        """Return those of some receipts that the ledger does not have yet, waiting or parked."""

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait for the ledger, how many are parked, and since when the oldest waits."""

    async def entries(self, tenant_id: str, of: EntryFilter) -> list[Entry]:
        """Return a page of what others have stored here, by arrival; no later commit can add to it."""

    async def lead(self, job: str) -> bool:
        """Whether this process is the one, of all that share the database, that does a job; it stays so while it lives.

        When that one dies, another one that asks becomes it.
        """

    async def archived(self, tenant_id: str, task_id: str) -> list[Archived]:
        """Return where the archived receipts of a task are, oldest first."""

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

    async def export(self, table: type[Struct], tenant_id: str, after: str) -> list[Any]:
        """Return up to 1,000 stored Structs of a tenant, from behind `after`: the `export_key` of the last one, or "".

        They come in the order of their `export_order`, byte by byte; receipts with their parents and telemetry.
        Of a table whose order is empty a tenant has one row.
        """

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""

    async def alive(self) -> None:
        """Return when the database has answered; raise if it does not."""

    async def keep_secret(self, secret: bytes) -> None:
        """Make this the `secret`, durably, while nobody serves: a copy honours the cursors that its source gave."""

    async def close(self) -> None:
        """Finish what is under way and let go of the database."""


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Backend:
    """Open the backend that the scheme of `url` names; `serving` claims the database where only one server may."""
    backend: Backend = await _module(url).open_backend(url, serving=serving, settings=settings)
    return backend


async def migrate(url: str, settings: DatabaseSettings | None = None) -> list[str]:
    """Create a database or bring its schema up to date; return what was applied, where the backend says so."""
    if migrate_database := getattr(_module(url), "migrate_database", None):
        applied: list[str] = await migrate_database(url)
        return applied
    await (await open_backend(url, settings=settings)).close()      # it migrates whenever it is opened
    return []


def migration_sql(url: str, after: int) -> str:
    """Return the SQL that `migrate` would run behind schema number `after`, for people who run it themselves."""
    from asyncgate.parts.model.errors import StartupError
    if script := getattr(_module(url), "migration_sql", None):
        return str(script(after))
    raise StartupError("this backend migrates whenever it is opened; there is nothing to run by hand")


def is_lasting(url: str) -> bool:
    """Whether what a backend stores outlives the process."""
    return bool(getattr(_module(url), "LASTING", True))


def is_shared(url: str) -> bool:
    """Whether several processes may use one database of a backend at once."""
    return is_lasting(url) and bool(getattr(_module(url), "SHARED", True))


def _module(url: str) -> Any:
    """Find the module of a backend: another package's under its entry point, or one of ours."""
    from asyncgate.parts.model.errors import StartupError
    scheme = url.partition(":")[0].replace("postgresql", "postgres")
    if not re.fullmatch("[a-z][a-z0-9_]*", scheme):
        raise StartupError(f"database.url must begin with a scheme such as sqlite:///gate.db, not {scheme!r}")
    for point in _registered().select(name=scheme):
        return point.load()
    try:
        module = import_module(f"asyncgate.backends.{scheme}")
    except ModuleNotFoundError as missing:
        if missing.name != f"asyncgate.backends.{scheme}":
            raise
    else:
        if hasattr(module, "open_backend"):
            return module
    raise StartupError(f"no backend for {scheme}:; sqlite:, postgresql: and memory: come with the gate, others "
                       "register under the entry-point group asyncgate.backends")


@cache
def _registered() -> EntryPoints:
    """Return the backends of other packages: to look through what is installed takes milliseconds."""
    return entry_points(group="asyncgate.backends")
