"""What a database is asked for in pages: one Struct for each kind of rows, which says what they are.

`await backend.page(tenant_id, TaskFilter(...))` gives a list of the rows R that `TaskFilter` is a `Query` of.  Filters
apply before limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar, get_args

from msgspec import Struct

from asyncgate.parts.model import stored, stored_webhooks, wire
from asyncgate.parts.model.ids import HIGHEST

R = TypeVar("R")
S = TypeVar("S", bound=Struct)
Row = tuple[stored.Task, stored.Lease | None, stored.Progress | None]
ANY_KIND = ""       # of a principal in a filter: whoever has that id
DELAYED_COUNTED, MOST_PRIORITIES = 10_000, 100
OVERDUE_COUNTED, UNANSWERED_COUNTED, DUE_LOOKED_AT = 10_000, 10_000, 100
QUEUE_KEPT_SECONDS = 3600.0     # an empty queue is kept so long after its last change


class Query(Struct, Generic[R], frozen=True):
    """What a page of rows R is asked with: one of the following."""

    def place(self, row: R) -> str:
        """Return the `after` of the page behind a row, for a query that has one."""
        return stored.export_key(row)      # type: ignore[arg-type]  # such a query is about stored rows


class TaskFilter(Query[Row], frozen=True):
    """Tasks with their latest leases and progress, newest first; an owner of ANY_KIND is whoever has that id."""

    owner: wire.Principal | None
    status: str | None
    type: str | None
    before: str | None          # a task_id
    limit: int
    since: str | None = None    # a task_id, or what one begins with; it is listed itself
    held: bool | None = None    # whether it is on hold
    type_prefix: str | None = None
    summary_prefix: str | None = None       # SUMMARY_LETTERS at most
    parent_task_id: str | None = None
    by_change: bool = False     # the latest change first, and of one moment the newest task
    changed_since: float | None = None
    changed_before: float | None = None
    behind: tuple[float, str] | None = None     # by_change: the last change and the task_id of the row before


class TaskCount(Query[tuple[int, bool]], frozen=True):
    """How many tasks pass, in one row, and whether there may be more: of an index at most `most` are looked at."""

    of: TaskFilter
    most: int


class Settled(Query[float], frozen=True):
    """Before which moment no change of a task is missing, in one row: none that is still to be committed is earlier."""


class LeaseFilter(Query[tuple[stored.Lease, str]], frozen=True):
    """All live leases of a worker (of one instance, if it names one), oldest first, each with the type of its task.

    Nothing else of the tasks is read, above all no payload: a worker may hold many large tasks.
    """

    worker: wire.Principal


class LeaseCount(Query[int], frozen=True):
    """How many leases are live, in one row: of a type, of a lane, of whoever has this id, or all of the tenant."""

    type: str | None = None
    lane: int | None = None
    worker_id: str | None = None


class EventFilter(Query[stored.Event], frozen=True):
    """What happened to a task, oldest first."""

    task_id: str
    after: str | None           # an event_id
    limit: int


class ReceiptFilter(Query[stored.Receipt], frozen=True):
    """Receipts, oldest first, and none that a later commit can still add one before."""

    to: wire.Principal | None        # of ANY_KIND: whoever has that id
    task_id: str | None
    receipt_type: str | None
    after: str | None           # a receipt_id
    limit: int
    newest: bool = False        # the last ones; still oldest first
    # Not those behind what a strict gate has offered and may commit later.  A task settles that before it goes on, so
    # its own receipts are never held back.
    settled: bool = True


class OpenWebhooks(Query[stored_webhooks.Webhook], frozen=True):
    """Endpoints of a tenant and of its tasks that have not ended, by their ids."""

    after: str = ""             # a webhook_id
    limit: int = 200


class IdFilter(Query[str], frozen=True):
    """Ids of tasks or receipts that begin with a text, or end with it among the newest `searched`; in any order."""

    table: type[stored.Task] | type[stored.Receipt]
    part: str
    limit: int
    searched: int


class ObligationFilter(Query[stored.Receipt], frozen=True):
    """What is owed to somebody, or to anybody, oldest first, in time that does not depend on history."""

    to: wire.Principal | None
    after: str | None           # a receipt_id
    limit: int
    settled: bool = False       # nothing that a later commit can still add something before: for readers with a cursor


class ScheduleFilter(Query[stored.Schedule], frozen=True):
    """Schedules of an owner, or of anybody, in the order of their ids."""

    owner: wire.Principal | None
    after: str | None           # a schedule_id
    limit: int


class WorkerFilter(Query[stored.Presence], frozen=True):
    """Who has claimed tasks, in the order of kind and id, byte by byte; or the last who did, the latest first."""

    after: tuple[str, str]      # kind and id
    limit: int
    latest: bool = False        # without `after`


class HoldingsOf(Query[stored.Holding], frozen=True):
    """How many leases some workers have, each counted up to `most`; in any order."""

    workers: tuple[wire.Principal, ...]
    most: int


class AheadOf(Query[int], frozen=True):
    """How many claimable tasks of a lane come before a task, counted up to `most`: one row.

    With limits only those count that have the same, as they are served by turns.
    """

    lane: int
    priority: int
    task_id: str
    most: int
    limits: str | None = None


class Head(Struct, frozen=True):
    """The oldest claimable task of a priority in a lane."""

    lane: int
    task_id: str
    fence: int
    since: float                # since when it may be claimed


class Heads(Query[Head], frozen=True):
    """The oldest claimable task of each priority of some lanes, MOST_PRIORITIES of a lane; in any order."""

    lanes: tuple[int, ...]


HOLDS_COUNTED = 10_000      # of each limit, for metrics


class LimitUse(Query[tuple[int, int]], frozen=True):
    """How many leases count against a limit, or one of its keys, up to `most`, and how many tasks that have it wait."""

    name: str
    most: int
    key: str | None = None


class InstanceOf(Query[stored.Instance], frozen=True):
    """The gate process of a name, if the database knows it; a database of one process knows none."""

    instance_id: str


class UnsentOf(Query[stored.Outgoing], frozen=True):
    """Receipts of a task that the ledger does not have yet, waiting or parked, in any order."""

    task_id: str
    limit: int


class QueueFilter(Query[stored.Queue], frozen=True):
    """The lanes whose numbers have changed in the last hour or are not zero, by type.

    The time that it takes does not depend on how many tasks they have.
    A database counts at most DELAYED_COUNTED delayed tasks, and looks at the oldest tasks of MOST_PRIORITIES priorities
    of a lane.
    """

    type: str | None
    lane: int | None
    after: tuple[str, int] | None       # type and lane
    limit: int


class OutboxFilter(Query[stored.Outgoing], frozen=True):
    """Receipts that wait for the ledger, oldest first; or those that a strict gate has offered and not committed."""

    after: str                  # a receipt_id
    limit: int
    state: Literal["waiting", "offered"] = "waiting"


class OutboxOf(Query[stored.Outgoing], frozen=True):
    """Those of some receipts that the ledger does not have yet, waiting or parked, in any order."""

    receipt_ids: tuple[str, ...]


class EntryFilter(Query[stored.Entry], frozen=True):
    """What others have stored here, by arrival, and nothing that a later commit can still add something before."""

    to: wire.Principal | None        # of ANY_KIND: whoever has that id
    task_id: str | None
    receipt_type: str | None
    instance: str | None
    after: str | None           # an arrival
    limit: int

    def place(self, row: stored.Entry) -> str:
        """Return the arrival."""
        return row.arrival


class ArchivedFilter(Query[stored.Archived], frozen=True):
    """Where the archived receipts of a task are, oldest first."""

    task_id: str


class DeliveryFilter(Query[stored_webhooks.WebhookDelivery], frozen=True):
    """What became of the events of an endpoint, in the order of the events or the newest first."""

    webhook_id: str
    state: str | None
    after: str | None           # a delivery_id
    limit: int
    newest: bool = False

    def place(self, row: stored_webhooks.WebhookDelivery) -> str:
        """Return the id of the delivery."""
        return row.delivery_id


class Rows(Query[S], Generic[S], frozen=True):
    """The next rows of a table, in the order of its `export_order`, byte by byte: all that are committed.

    Receipts come with their parents and telemetry.  Of a table whose order is empty a tenant has one row.
    """

    table: type[S]
    after: str = ""             # the `export_key` of the last row
    limit: int = 1000


# For those who answer.


def end_of(prefix: str) -> str:
    """Return what sorts behind every text with a prefix."""
    return prefix + HIGHEST


def wanted_is(wanted: wire.Principal | None, who: wire.Principal) -> bool:
    """Whether a filter lets somebody through."""
    return wanted is None or (wanted.id == who.id and wanted.kind in (ANY_KIND, who.kind))


def page_of(sql: str, wanted: wire.Principal | None, column: str, order: str, place: int, limit: int,
            given: Callable[[str], str]) -> str:
    """End a query with its order and limit; where a filter names any kind, read a range of the index for each.

    `column` holds the kind, `place` is where the query selects what it is ordered by, `given` takes a parameter and
    returns its name.
    """
    if wanted is None:
        return f"{sql} ORDER BY {order} LIMIT {limit:d}"
    parts = [f"{sql} AND {column} = {given(kind)} ORDER BY {order} LIMIT {limit:d}"
             for kind in ((wanted.kind,) if wanted.kind else get_args(wire.Kind))]
    return merge_parts(parts, limit, place, order.partition(" ")[2])


def merge_parts(parts: list[str], limit: int, place: int = 1, direction: str = "DESC") -> str:
    """Merge queries that are ordered and limited alike."""
    if len(parts) == 1:
        return parts[0]
    each = " UNION ALL ".join(f"SELECT * FROM ({part}) AS range_{at}" for at, part in enumerate(parts))
    return f"{each} ORDER BY {place} {direction} LIMIT {limit:d}"
