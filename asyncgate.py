"""AsyncGate: a durable task gate for agents that forget.

An agent hands work over, any worker leases it, a crash loses nothing, and one call tells a principal what it is owed,
with the proof.  This file is the heart: the rules, and the engine that applies them.  Read it from top to bottom.
It imports words (parts/model) and the tools of a process (parts/process); all the rest imports it:

    backends/        databases, found by the scheme of a URL
    parts/identity   from a credential to a caller, and what that caller may use
    parts/receipts   what happens to receipts: emitting, seals, archive, import; parts/metrics counts for Prometheus
    parts/faces      REST, MCP, OpenAPI, the lease protocol, the HTTP server
    parts/           what joins these rooms: the app, the table of all operations, upkeep
    clients/         programs that reach a gate over the wire; they know the words only
    commands/        the program `asyncgate`: one file for each command or group
    conformance/     the suite that every backend must pass
    extras/          what a gate can do without, a folder each: ledger, OAuth, console, webhooks, erasure, scheduler

A request walks through the rooms:

    bytes           REST route, MCP tool or command: one Operation, found by path or name        parts/faces
    caller          the credential says which tenant, principal, role and scopes                 parts/identity
    ask             msgspec decodes the body into the operation's request Struct                 parts/model/wire.py
    admit           role, scope, ownership                                                       ENGINE
    batch           a write joins the tenant's next batch, a read goes straight to the backend   BATCHES
    decide          in one transaction: rows loaded, every operation decided in plain Python     LAW, WORK, ENGINE
    save            all changes and receipts written in bulk, one commit                         backends/
    after commit    waiting claims wake, waiting readers learn the outcome                       BATCHES
    reply           a Struct, shown as the world sees it, then bytes                             parts/model/views.py

What holds at every moment (the conformance suite checks each; `asyncgate verify` checks a stored gate):

    I1   an acknowledged task is never lost              I7   a terminal status never changes
    I2   a task has at most one live lease               I8   each step of a task wrote exactly its receipts (EMISSION)
    I3   fences rise by one with every lease             I9   open obligations = created - discharged
    I4   only the holder of the live lease moves a task  I10  one task per (tenant, creator, idempotency key)
    I5   an expired lease can do nothing                 I11  no tenant sees a byte of another
    I6   attempts rise on failure only, never on expiry  I12  a reader that follows a cursor sees each receipt once

Rules are pure: a write method of the Engine never awaits, never sees SQL and never reads a clock.  A backend knows no
rule: it loads, locks, saves.  So each rule is written once and means the same on every database.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):      # noqa: UP036  # an older one would fail at some import, and say nothing of this
    sys.exit(f"AsyncGate needs Python 3.11 or newer, and this is {sys.version.split()[0]}")

import asyncio
import base64
import contextlib
import hashlib
import hmac
import inspect
import logging
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import accumulate, islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, TypeVarTuple, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

if "__path__" not in globals():  # a bare checkout: its folders are this module's parts, as they are in the wheel
    __path__ = [os.path.dirname(os.path.abspath(__file__))]

from asyncgate.parts.model.caller import Caller, forbid as forbid, forbid_scope, forbid_type, keep_within, NOBODY
from asyncgate.parts.model.content import (
    check_size, decode_json, enclose_digest, enclose_whole, find_location, find_ordered_types, find_summary,
    needs_of, parse_json, read_artifacts, sha256, tells_another, to_canonical)
from asyncgate.parts.model.database import LastingBackend, SharedBackend
from asyncgate.parts.model.errors import (
    DatabaseUnavailable, GateError, IdempotencyConflict, InvalidCursor, InvalidRequest, InvalidTransition,
    LeaseInvalid, LeaseLifetimeLimit, LeaseRenewalLimit, log_fault, no_task, NotLocatable, NotNow, outcome_unknown,
    ReceiptNotFound, ReceiptTooLarge, Refused, StartupError, TaskNotFound, TenantMismatch, TooManyArtifacts,
    TooManyParents, Unloaded)
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.families import add_child, end_child, end_wait, note_told, park_for_children
from asyncgate.parts.model.granted import GrantedLeases
from asyncgate.parts.model.identities import check_identities, check_needed, lower_id, lower_ids
from asyncgate.parts.model.ids import Ids, make_salt, mark_of
from asyncgate.parts.model.limiting import (
    find_pattern, find_type_limits, lane_of as lane_of, Limiting, read_limits, STOPPED_SECONDS, TurnQueue, write_limits)
from asyncgate.parts.model.members import Reader, Unreadable
from asyncgate.parts.model.naming import list_completions, list_creations, make_filter, read_instance_id, read_principal
from asyncgate.parts.model.news import News
from asyncgate.parts.model.overdue import alive, backoff, is_late, is_lost, is_spent, is_stuck, jitter, lost
from asyncgate.parts.model.parking import answer_return, describe_park, find_park_end, GIVEN_BACK, why_parked_out
from asyncgate.parts.model.resuming import (
    add_loss, is_new_process, is_resumption, MOST_RESUMED, name_process, would_hold)
from asyncgate.parts.model.pausing import find_pauses
from asyncgate.parts.model.queries import (
    EntryFilter, EventFilter, LeaseFilter, ObligationFilter, ReceiptFilter, TaskFilter, wanted_is)
from asyncgate.parts.model.queue_changes import Change, QueueChanges, ReadQueue
from asyncgate.parts.model.quotas import check_kinds
from asyncgate.parts.model import families, stored_limits, stored_unique
from asyncgate.parts.model.settings import DatabaseSettings, Settings, load_settings
from asyncgate.parts.model.stored import (
    ACTIVE, AWAITING, FENCES_SKIPPED as FENCES_SKIPPED, INPUT_REQUIRED, KEY_TAKEN, QUEUED, TERMINAL, Account, Archived,
    Audit, Entry, Event, Key, key_of, Lag, Lease, Outgoing, Pauses, Presence, Progress, Receipt, Schedule, Task, Usage)
from asyncgate.parts.model.unique import hash_key, offer_successor, settle_unique, tell_outcome
from asyncgate.parts.model.views import (
    answer_success, decode_terms, describe_steps, LOCATE, measure_task, note_repeats, refuse_item, show_lease,
    show_offer, show_receipt, show_task, to_raw, to_utc, to_utc_or_none)
from asyncgate.parts.model.wire import (
    AckReceipt, AsEither, Ask, AttachArtifacts, Attention, Bootstrap, CancelTask, CheckTerminator, Complete,
    CompleteTasks, Created, CreateTask, CreateTasks, Fail, GateConfig, GetConfig, GetReceipt, GetTask, GetTaskHistory,
    Health, Healthy, History, HistoryEvent, Item, Items, JSON_NULL, LatestReceipt, LeaseAsk, LeaseNext, Leases,
    ListLeases, ListOpenObligations, ListReceipts, Obligations, Offer, Offers, Ok, Principal, ReceiptRecord, Receipts,
    Relationship, Released, ReleaseHold, ReleaseLease, Renewed, RenewLease, ReportProgress, Role, RunTask, Server,
    StartTask, Status, TaskAsk, TaskRecord, Terminator, Welcome)
from asyncgate.parts.model.clock import elapsed, instant
from asyncgate.parts.process.hooks import first_answer, Hooks
from asyncgate.parts.process.outages import OFTEN
from asyncgate.parts.process.polls import Polls
from asyncgate.parts.process.presence import MOST_CALLS, Sightings
from asyncgate.parts.process.readers import Readers, wait_until, Waits, Wants
from asyncgate.parts.process.telling import news_of
from asyncgate.parts.process.turns import SliceTurns
from asyncgate.parts.process.waiting import Waiting

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.clients import AsyncGate, Handle, Refusal, SyncGate, TaskCanceled, TaskFailed, Unreachable, Worker
    from asyncgate.commands.main import main
    from asyncgate.parts.app import Gate, serve_forever
    from asyncgate.parts.operations import OPERATIONS

__version__ = "0.1.0"

# What is promised to users; everything else may change with any release.
__all__ = [
    "AsyncGate", "Handle", "Refusal", "SyncGate", "TaskCanceled", "TaskFailed", "Unreachable", "Worker",    # clients
    "Gate", "OPERATIONS", "Settings", "load_settings", "main", "serve_forever",                             # a gate
    "Account", "Archived", "Audit", "Backend", "Caller", "DatabaseSettings", "Engine", "Entry", "EntryFilter", "Event",
    "Extension", "Key", "Lag", "Lease", "Needs", "News", "Operation", "Outgoing", "Principal", "Progress", "Receipt",
    "ReceiptFilter", "Schedule", "Task", "TaskFilter", "Usage", "Work",                                     # a backend
    "DatabaseUnavailable", "GateError", "NotNow", "Refused", "StartupError", "__version__"]

if not TYPE_CHECKING:
    ELSEWHERE = {
        **dict.fromkeys(("AsyncGate", "Handle", "Refusal", "SyncGate", "TaskCanceled", "TaskFailed", "Unreachable",
                         "Worker"), "clients"),
        "Backend": "backends", "Gate": "parts.app", "OPERATIONS": "parts.operations", "main": "commands.main",
        "serve_forever": "parts.app"}

    def __getattr__(name: str) -> Any:
        """Import what lies above the heart when somebody asks for it; the heart itself never does."""
        if name not in ELSEWHERE:
            raise AttributeError(f"module 'asyncgate' has no attribute {name!r}")
        return getattr(import_module(f"asyncgate.{ELSEWHERE[name]}"), name)

log = logging.getLogger("asyncgate")


# VOCABULARY ###########################################################################################################


class Needs(Struct):
    """What a batch loads and locks; each request adds its needs before the transaction begins."""

    tasks: set[str] = set()                            # with lease and progress
    leases: set[str] = set()                           # live lease ids, whose tasks are meant
    keys: set[tuple[str, str, str]] = set()            # creator kind and id, idempotency key
    repeats: set[tuple[str, str, str]] = set()         # worker kind and id, claim_id
    claims: list[LeaseNext] = []                       # and what is paused
    granted: set[str] = set()                          # of `tasks`, those that no claim finds: with what limits count
    receipts: set[str] = set()                         # with their children
    endings: set[tuple[str, str]] = set()              # task_id, lease_id: the receipts under that lease
    stated: set[tuple[str, str]] = set()               # task_id, receipt_key: the receipt that states it
    records: set[tuple[type[Struct], tuple[str, ...]]] = set()     # kind and key
    recount: bool = False                              # load a Usage as it is, not as it was kept
    calls: int = 0                                     # how much it writes, in single calls
    tally: bool = False                                # and how many receipts each task has that Work is `about`
    alone: bool = False                                # no other call of the tenant may be decided at the same time

    def add(self, more: Needs | Unloaded) -> None:
        """Load also these tasks and records."""
        self.tasks |= more.tasks
        self.records |= more.records

    def cover(self, kind: type[Struct], key: tuple[str, ...]) -> bool:
        """Whether a record is loaded, if it is stored: claims load some without naming them."""
        return (kind, key) in self.records or (bool(self.claims or self.granted) and kind in READ_BY_CLAIMS)


class Sweep(Ask, kw_only=True):
    """Upkeep's own request: look after these tasks and schedules."""

    tasks: list[str] = []
    schedules: list[str] = []


class Resumed(Ask, kw_only=True):
    """The gate's own request: this worker has asked for the leases that it holds of these tasks."""

    tasks: list[str]
    worker: Principal
    resumption_id: str | None


class Delivered(Ask, kw_only=True):
    """The gate's own request: these receipts have been delivered."""

    receipts: list[str] = []


# LAW ##################################################################################################################


class Step(Struct, frozen=True):
    """One edge of the state machine (spec 5)."""

    name: str
    since: frozenset[str]
    to: Status


CLAIM = Step("claim", QUEUED, "leased")
START = Step("start", frozenset({"leased"}), "running")
SUCCEED = Step("succeed", ACTIVE, "succeeded")
FAIL = Step("fail", ACTIVE, "failed")
RETRY = Step("retry", ACTIVE, "queued")             # PH.4: costs an attempt
EXPIRE = Step("expire", ACTIVE, "queued")           # PH.4: costs none
CANCEL = Step("cancel", QUEUED | ACTIVE, "canceled")
ASK = Step("ask", ACTIVE, "queued")                 # costs neither
GIVE_UP = Step("give_up", QUEUED, "failed")         # an answer that the worker needs has not come
STEPS = (CLAIM, START, SUCCEED, FAIL, RETRY, EXPIRE, CANCEL, ASK, GIVE_UP)


class Contract(Struct, frozen=True):
    """One type of receipt: who states it to whom, and which receipt it answers."""

    type: str
    sender: Literal["owner", "worker", "caller", "asyncgate"]
    to: Literal["owner", "asyncgate", "target"]
    answers: Literal["nothing", "duty", "accepted", "given"]
    once: bool = False      # H.3: one per task, sender and lease; for other types parents and discriminator count too


ASSIGNED = Contract("task.assigned", "owner", "owner", "nothing")
ACCEPTED = Contract("task.accepted", "worker", "asyncgate", "duty", once=True)
PROGRESSED = Contract("task.progress", "worker", "asyncgate", "accepted")
COMPLETED = Contract("task.completed", "worker", "asyncgate", "duty", once=True)
FAILED = Contract("task.failed", "worker", "asyncgate", "duty", once=True)
REQUEUED = Contract("task.failed", "worker", "asyncgate", "accepted", once=True)
CANCELED = Contract("task.canceled", "caller", "asyncgate", "duty")
RESULT_READY = Contract("task.result_ready", "asyncgate", "owner", "given")
EXPIRED = Contract("lease.expired", "asyncgate", "owner", "accepted")
ESCALATED = Contract("task.escalated", "asyncgate", "target", "duty")     # proposes; opens, closes and moves nothing
ANOMALY = Contract("system.anomaly", "asyncgate", "owner", "given")
ACKNOWLEDGED = Contract("receipt.acknowledged", "caller", "asyncgate", "given")
SCHEDULED = Contract("schedule.created", "caller", "owner", "given")
UNSCHEDULED = Contract("schedule.deleted", "caller", "owner", "given")
INPUT_REQUESTED = Contract("input.requested", "worker", "target", "accepted")
INPUT_ANSWERED = Contract("input.answered", "caller", "asyncgate", "given")
INPUT_EXPIRED = Contract("input.expired", "asyncgate", "target", "given")       # not answered in time, or task ended
GIVEN_UP = Contract("task.failed", "asyncgate", "asyncgate", "duty")
AMENDED = Contract("task.amended", "caller", "asyncgate", "duty")       # another payload, before any lease

# What a step writes; every terminal one is followed by RESULT_READY, and EXPIRED and FAILED perhaps by ESCALATED.
EMISSION = {"create": ASSIGNED, CLAIM.name: ACCEPTED, SUCCEED.name: COMPLETED, FAIL.name: FAILED, RETRY.name: REQUEUED,
            EXPIRE.name: EXPIRED, CANCEL.name: CANCELED, ASK.name: INPUT_REQUESTED, GIVE_UP.name: GIVEN_UP}

# Which receipts open an obligation, and which discharge it (PH.1.3).
TERMINATES = {
    "task.assigned": frozenset({"task.completed", "task.failed", "task.canceled"}),
    "schedule.created": frozenset({"schedule.deleted"}),
    "input.requested": frozenset({"input.answered", "input.expired"})}
DISCHARGING = frozenset().union(*TERMINATES.values())
RECEIPT_TYPES = tuple(sorted({kind.type for kind in (
    ASSIGNED, ACCEPTED, PROGRESSED, COMPLETED, FAILED, CANCELED, RESULT_READY, EXPIRED, ESCALATED, ANOMALY,
    ACKNOWLEDGED, SCHEDULED, UNSCHEDULED, INPUT_REQUESTED, INPUT_ANSWERED, INPUT_EXPIRED, AMENDED)}))

SCOPES = frozenset({"tasks:read", "tasks:write", "tasks:lease", "receipts:read", "receipts:ack",
                    "admin:read", "admin:write", "metrics:read"})
SCHEMA_VERSION = "1"            # of receipt bodies (spec 19.9)
STUCK_EXPIRIES, STUCK_RENEWALS = 3, 10      # H.7.2, H.7.3: more requeues, or renewals, are an anomaly
MOST_PAGE_BYTES = 2**22         # of the tasks in a list or a claim, after which it ends early
TASKS_AT_ONCE = 16              # that a list reads before it knows how large they are

R = TypeVar("R", bound=Struct)


def receipt_key(contract: Contract, task_id: str, sender: Principal, lease_id: str | None, parents: tuple[str, ...],
                discriminator: str) -> str:
    """Identify a logical receipt, so that repeating it is a no-op (H.3; other types add parents and discriminator)."""
    more = (discriminator,) if contract.once else (parents, discriminator)
    return sha256(contract.type, task_id, sender.kind, sender.id, lease_id, more)


def receipt_hash(type: str, sender: Principal, to: Principal, task_id: str, lease_id: str | None,
                 schedule_id: str | None, parents: tuple[str, ...], body: bytes) -> str:
    """Hash what a receipt says, without its id, its times and the gate that wrote it (Clarification B)."""
    by, reader = (None if side.kind == "asyncgate" else side.id for side in (sender, to))
    return sha256(type, (sender.kind, by), (to.kind, reader), task_id, lease_id, schedule_id, parents, Raw(body))


def matches(type: str, needed: frozenset[str], ask: LeaseNext) -> bool:
    """Whether a worker may be offered such a task: needed capabilities are a subset of its own (spec 7)."""
    return (not ask.accept_types or type in ask.accept_types) and needed <= (ask.capabilities or frozenset())


def rank(ask: LeaseNext, at: Task | Change) -> tuple[bool, float, str]:
    """The order in which a claim gets tasks: preferred types, then highest priority first, then oldest."""
    return at.type not in (ask.preferred_kinds or ()), -at.priority, at.task_id


def speaker(caller: Caller, ask: Ask) -> Principal:
    """Return who acts: the credential's principal, or with an unbound credential the one that the request names."""
    if (named := read_principal(ask)) is None:
        if (instance := read_instance_id(ask)) is None:
            return caller.principal
        if not caller.bound:
            raise InvalidRequest("an instance alone names nobody: send worker_id or principal_id too")
        return replace(caller.principal, instance_id=instance)
    if named.kind in ("system", "asyncgate") and ask.acts:
        raise forbid(caller, f"nobody outside the gate may act as {named.kind}")
    if caller.bound and not named.same(caller.principal) and not (caller.unlimited if ask.acts else caller.sees_all):
        raise forbid(caller, f"this credential belongs to {caller.principal}, not to {named}")
    return named


# WORK #################################################################################################################


READ_BY_CLAIMS = frozenset({Pauses, stored_limits.Limit, stored_limits.RateUse, stored_limits.Turn})
USAGE = Usage, ()               # its kind and key


class Work:
    """The unit of work of one tenant's batch: rows loaded for it, one fixed `now`, and the changes made.

    Every change goes through `_set`, which keeps a journal, and stored Structs are frozen: so an operation that fails
    takes back its own changes and the rest of the batch never sees them.
    """

    def __init__(self, tenant_id: str, now: float, ids: Ids, known: Mapping[int, tuple[str, frozenset[str]]],
                 needs: Needs) -> None:
        self.tenant_id, self.now, self.ids, self.known, self.needs = tenant_id, now, ids, known, needs
        self._mark = mark_of(tenant_id)
        # Loaded, and as changed so far:
        self.tasks: dict[str, Task] = {}
        self.before: dict[str, Task] = {}                               # as loaded, for those who count what has moved
        self.leases: dict[str, Lease] = {}                              # by task
        self.holders: dict[str, str] = {}                               # task by live lease id, as far as asked for
        self.keys: dict[tuple[str, str, str], str] = {}                 # task by creator and idempotency key
        self.repeats: dict[tuple[str, str, str], tuple[str, ...]] = {}  # tasks by worker and claim_id
        self.progress: dict[str, Progress] = {}
        self.ready: dict[int, ReadQueue] = {}                           # claimable by lane
        self.queue_changes = QueueChanges(self._set)
        self.receipts: dict[str, Receipt] = {}
        self.recorded: dict[tuple[str, str], str] = {}                  # receipt by task and key
        self.tallies: dict[str, int] = {}                               # receipts by task, as far as asked for
        self.records: dict[tuple[type[Struct], tuple[str, ...]], Any] = {}
        # To be saved:
        self.lanes: dict[int, tuple[str, frozenset[str], str | None]] = {}
        self.added: dict[str, Task] = {}
        self.moved: dict[str, Task] = {}
        self.amended: dict[str, Task] = {}                              # of them those that got another contract
        self.leased: dict[str, Lease] = {}
        self.progressed: dict[str, Progress] = {}
        self.written: dict[str, Receipt] = {}
        self.posted: dict[str, Outgoing] = {}                           # kept with its receipt, if that is new
        self.events: dict[str, Event] = {}
        self.audited: dict[str, Audit] = {}
        self.opened: dict[str, Principal] = {}                          # whose obligation, by receipt
        self.closed: dict[str, Principal] = {}
        self.kept: dict[tuple[type[Struct], tuple[str, ...]], Any] = {}     # None: dropped
        self.delivered: dict[str, float] = {}
        self.erased: dict[tuple[type[Struct], tuple[str, ...]], Struct] = {}    # by `erased_by` of its card
        self.freed: dict[Struct, int] = {}                              # bytes that their bodies have got shorter
        self.called: dict[str, int] = {}                                # calls of the tenant, by kind
        self.before_change: Callable[[Task], None] | None = None        # acts on a task that is about to change
        self.metered = True                                             # False: rows come with what was counted of them
        self._undo: list[tuple[dict[Any, Any], Any, Any]] = []
        self.limiting = Limiting(self, self._set)

    # What a backend calls.

    def load_task(self, task: Task, lease: Lease | None = None, progress: Progress | None = None) -> None:
        """Take in a task that `Needs` names, with its latest lease and progress."""
        self.tasks[task.task_id] = self.before[task.task_id] = task
        if task.idempotency_key is not None:
            self.keys[task.owner_kind, task.owner_id, task.idempotency_key] = task.task_id
        if progress is not None:
            self.progress[task.task_id] = progress
        if lease is not None:
            self.leases[task.task_id] = lease
            self.holders[lease.lease_id] = task.task_id if lease.ending == "live" else ""
            self._note_claim(lease)

    def add_claimable(self, task: Task, progress: Progress | None = None) -> None:
        """Take in a claimable task; the best task of a lane comes first."""
        if task.task_id not in self.tasks:
            self.load_task(task, progress=progress)
        if task.lane not in self.ready:
            self.ready[task.lane] = ReadQueue(self.tasks, self._set)
        self.ready[task.lane].ids.append(task.task_id)

    def load_record(self, row: Struct) -> None:
        """Take in a record that `Needs` names."""
        self.records[type(row), key_of(row)] = row

    def load_receipt(self, receipt: Receipt) -> None:
        """Take in a receipt that `Needs` names, or one of its children."""
        self.receipts[receipt.receipt_id] = receipt
        self.recorded[receipt.task_id, receipt.receipt_key] = receipt.receipt_id

    def list_named_tasks(self, needs: Needs) -> list[str]:
        """Return the tasks that a batch names, or answers a receipt of."""
        held = {self.holders[lease_id] for lease_id in needs.leases & self.holders.keys()}
        return list(needs.tasks | held | {receipt.task_id for receipt in self.receipts.values()} - {""})

    # What the rules read.

    def require_task(self, task_id: str) -> Task:
        """Return a task of this tenant."""
        if (task := self.tasks.get(task_id)) is None:
            raise TaskNotFound(f"no task {task_id}; list_tasks shows the tasks there are")
        return task

    def reach_task(self, task_id: str) -> Task | None:
        """Return a task that the request does not name, if there is one; Unloaded, and the next batch loads it."""
        if self.lacks(task_id):
            raise Unloaded(task_id)
        return self.tasks.get(task_id)

    def lacks(self, task_id: str) -> bool:
        """Whether a task is not loaded whole: what a claim may get comes without its last lease, and would lose it."""
        task = self.tasks.get(task_id)
        return task_id not in self.needs.tasks and (task is None or (task.fence > 0 and task_id not in self.leases))

    def find_record(self, kind: type[R], *key: str) -> R | None:
        """Return a record, if there is one; of one that was not read nobody knows that: Unloaded, as for a task."""
        row: R | None = self.records.get((kind, key))
        if row is None and (kind, key) not in self.records and not self.needs.cover(kind, key):
            raise Unloaded(records=frozenset({(kind, key)}))
        return row

    def find_loaded(self, kind: type[R], *key: str) -> R | None:
        """Return a record if this batch happens to have it; None says nothing of what is stored."""
        row: R | None = self.records.get((kind, key))
        return row

    def find_claimable(self, ask: LeaseNext) -> Iterator[Task]:
        """Yield the tasks that `ask` should get, the best first; each is leased before the next is asked for."""
        pauses, changes = find_pauses(self.find_record(Pauses), self.now), self.queue_changes

        def may_serve(lane: int) -> bool:
            kind = self.known.get(lane) or self.lanes[lane][:2]     # or it is new
            return matches(*kind, ask) and not any(pause.stops_lane(*kind) for pause in pauses)
        lanes: dict[int, ReadQueue | TurnQueue] = {**self.ready, **self.limiting.queues}
        queues = [queue for lane, queue in lanes.items() if may_serve(lane)]
        changed = min((rank(ask, at) for lane, at in changes.before.items() if may_serve(lane)), default=None)
        while heads := [head for queue in queues if (head := queue.find_head()) is not None]:
            head = min(heads, key=partial(rank, ask))
            if changed is not None and changed < rank(ask, head):
                break
            yield head
        if changed is not None or (changes.freed and any(may_serve(lane) for lane in self.limiting.patterns)):
            raise Unloaded      # the next batch reads what is there now

    # What the rules change.

    def add_task(self, task: Task, needed: frozenset[str]) -> None:
        """Add a new task to its lane."""
        self._ensure_lane(task, needed)
        if task.idempotency_key is not None:
            self._set(self.keys, (task.owner_kind, task.owner_id, task.idempotency_key), task.task_id)
        self.queue_changes.note(None, task, self.now)
        self._change(self.tasks, self.added, task.task_id, task)
        self.count_usage(active=task.status not in TERMINAL, terminal=task.status in TERMINAL)

    def move_task(self, task: Task, step: Step, **changes: Any) -> Task:
        """Take one step of the state machine; a step that is not in STEPS is refused."""
        task = self.tasks.get(task.task_id, task)
        if task.status not in step.since:
            needs = " or ".join(sorted(step.since))
            raise InvalidTransition(f"task {task.task_id} is {task.status}; {step.name} needs it {needs}",
                                    status=task.status)
        if step.to in TERMINAL:
            self.count_usage(active=-1, terminal=1)
        return self.change_task(task, status=step.to, **changes)

    def change_task(self, task: Task, **changes: Any) -> Task:
        """Change a task without moving it; what a caller read earlier may have changed in this batch."""
        task = self.tasks.get(task.task_id, task)
        if self.before_change is not None:
            self.before_change(task)
        if changes.get("status") in TERMINAL and task.status not in TERMINAL:
            end_child(self, task, changes["status"])
            offer_successor(self, task)
        task = replace(before := task, updated_at=self.now, **changes)
        self.queue_changes.note(before, task, self.now)
        if task.status == "queued" and task.lane not in self.known:     # what waits again needs its lane again
            self._ensure_lane(task, needs_of(to_raw(task.requirements)))
        self._change(self.tasks, self.added if task.task_id in self.added else self.moved, task.task_id, task)
        return task

    def amend_task(self, task: Task, **contract: Any) -> Task:
        """Change the contract of a task that no worker has had."""
        task = self.change_task(task, **contract)
        if task.task_id in self.moved:
            self._set(self.amended, task.task_id, task)
        return task

    def _ensure_lane(self, task: Task, needed: frozenset[str]) -> None:
        """Ensure that a task's lane exists: an empty lane may be dropped, but not while this batch is decided."""
        if task.lane not in self.known and task.lane not in self.lanes:
            self._set(self.lanes, task.lane, (task.type, needed, find_pattern(task.limits)))

    def set_lease(self, lease: Lease, cost: float | None = None) -> None:
        """Store the latest lease of a task, in whatever state; at its end perhaps with its true cost."""
        before = self.leases.get(lease.task_id)
        more = (lease.ending == "live") - (before is not None and before.ending == "live")
        self.count_usage(leases=more)
        self.limiting.change_lease(self.tasks[lease.task_id], more, cost)
        self._change(self.leases, self.leased, lease.task_id, lease)
        self._set(self.holders, lease.lease_id, lease.task_id if lease.ending == "live" else "")
        self._note_claim(lease)

    def _note_claim(self, lease: Lease) -> None:
        if lease.claim_id is not None:
            key = (lease.worker_kind, lease.worker_id, lease.claim_id)
            if lease.task_id not in (tasks := self.repeats.get(key, ())):
                self._set(self.repeats, key, (*tasks, lease.task_id))

    def set_progress(self, task: Task, **changes: Any) -> Progress:
        """Change what a leased task keeps for its next worker."""
        return self.keep_progress(replace(self.find_progress(task.task_id), fence=self.leases[task.task_id].fence,
                                          updated_at=self.now, **changes))

    def find_progress(self, task_id: str) -> Progress:
        """Return what a task keeps for its next worker, which may be nothing yet."""
        return self.progress.get(task_id) or Progress(task_id, "null", 0, 0, self.now)

    def keep_progress(self, progress: Progress) -> Progress:
        """Store the progress of a task, with a higher number: a database knows by it which row is the latest."""
        new = replace(progress, sequence=progress.sequence + 1)
        self.count_usage(step_bytes=new.step_bytes - self.find_progress(new.task_id).step_bytes)
        self._change(self.progress, self.progressed, new.task_id, new)
        return new

    def add_receipt(self, receipt: Receipt) -> Receipt:
        """Write a receipt once, and open or close the obligations that it stands for."""
        mine = (receipt.task_id, receipt.receipt_key)
        if first := self.recorded.get(mine):
            return self.receipts[first]
        self._set(self.recorded, mine, receipt.receipt_id)
        self._change(self.receipts, self.written, receipt.receipt_id, receipt)
        self.count_usage(receipt_bytes=len(receipt.body.encode()))
        if receipt.task_id in self.tallies:
            self._set(self.tallies, receipt.task_id, self.tallies[receipt.task_id] + 1)
        if receipt.receipt_type in TERMINATES:
            self._set(self.opened, receipt.receipt_id, receipt.to)
        return receipt

    def post_receipt(self, row: Outgoing, skeleton: bool) -> None:
        """Put a new receipt into the outbox; with `skeleton` its body is kept there only."""
        self._set(self.posted, row.receipt_id, row)
        if skeleton:
            self.keep_skeleton(self.written[row.receipt_id])

    def keep_skeleton(self, receipt: Receipt) -> None:
        """Keep only the skeleton of a new receipt: the ledger has its body."""
        self.count_usage(receipt_bytes=-len(receipt.body.encode()))
        self._set(self.written, receipt.receipt_id, replace(receipt, body=""))

    def rename_receipt(self, receipt_id: str, to: str) -> None:
        """Store a receipt just written under another id than others know it by."""
        receipt = replace(self.written.pop(receipt_id), receipt_id=to)
        self.receipts.pop(receipt_id, None)
        self._change(self.receipts, self.written, to, receipt)
        self._set(self.recorded, (receipt.task_id, receipt.receipt_key), to)

    def close_obligation(self, receipt_id: str, to: Principal) -> None:
        """Close the obligation that `receipt_id` opened in the inbox of `to`."""
        self._set(self.closed, receipt_id, to)

    def add_event(self, task_id: str, event_type: str, *, event_id: str | None = None, **payload: Any) -> None:
        """Write an event for the task's history; without an id it gets the next one."""
        event = Event(event_id or self.new_id(), task_id, event_type, to_canonical(payload).decode(), self.now)
        self._set(self.events, event.event_id, event)

    def keep_record(self, row: Struct) -> None:
        """Store a record, in place of the one with its key."""
        self._change(self.records, self.kept, (type(row), key_of(row)), row)

    def count_usage(self, **more: int) -> None:
        """Add to the tenant's counted usage, if usage is counted."""
        if (usage := self.records.get(USAGE)) is not None and any(more.values()):
            self.keep_record(replace(usage, **{name: getattr(usage, name) + number for name, number in more.items()}))

    def count_calls(self, calls: Mapping[str, int]) -> None:
        """Add calls to what the tenant has used."""
        for kind, number in calls.items():
            self._set(self.called, kind, self.called.get(kind, 0) + number)

    def drop_record(self, kind: type[Struct], *key: str) -> None:
        """Forget a record."""
        self._change(self.records, self.kept, (kind, key), None)

    def erase_row(self, row: Struct, freed_bytes: int = 0) -> None:
        """Put a row in place of the one that it is found by, whose other fields stay; only an erasure may.

        `freed_bytes` is by how much the body of a receipt gets shorter.
        """
        self.count_usage(receipt_bytes=-freed_bytes)
        self._set(self.freed, row, freed_bytes)
        self._set(self.erased, (type(row), tuple([getattr(row, name) for name in CARDS[type(row)].erased_by])), row)

    def add_audit(self, line: Audit) -> None:
        """Add a line to the audit log."""
        self._set(self.audited, line.audit_id, line)

    def stamp_delivery(self, receipt_id: str) -> None:
        """Stamp a receipt as delivered, for telemetry."""
        self._set(self.delivered, receipt_id, self.now)

    def new_id(self, name: object = None) -> str:
        """Return an id that sorts after all earlier ones; a batch that is decided again gets the same for a name."""
        return self.ids.new(self.now, self._mark, name)

    def replay(self, ids: Ids, now: float) -> None:
        """Take ids from another source, and the time of another moment, from now on: to decide again as before."""
        self.ids, self.now = ids, now

    def new_lease_id(self, name: object = None) -> str:
        """Return an id that nobody can guess."""
        return self.ids.lease(self._mark, name)

    def _set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._undo.append((table, key, table.get(key, UNSET)))
        table[key] = value

    def _change(self, loaded: dict[Any, Any], saved: dict[Any, Any], key: Any, value: Any) -> None:
        self._undo += ((loaded, key, loaded.get(key, UNSET)), (saved, key, saved.get(key, UNSET)))
        loaded[key] = saved[key] = value

    # What the batch calls around each operation.

    @contextlib.contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Undo every change made inside if the block fails."""
        savepoint = self.savepoint()
        try:
            yield
        except BaseException:
            self.take_back(savepoint)
            raise

    def savepoint(self) -> int:
        """Return where the journal stands."""
        return len(self._undo)

    def take_back(self, savepoint: int) -> None:
        """Undo what was changed since the journal stood there."""
        while len(self._undo) > savepoint:
            table, key, old = self._undo.pop()
            table.pop(key, None) if old is UNSET else table.__setitem__(key, old)


# ENGINE ###############################################################################################################


T = TypeVar("T", bound=Ask)
E = TypeVar("E", bound="Extension")
V = TypeVar("V")
A = TypeVarTuple("A")
Transact = Callable[[str, Needs, Callable[[Work], None]], Coroutine[Any, Any, None]]
Instead = Callable[..., Awaitable[Any]]


class Extension:
    """What works beside the rules: an engine calls the methods that a subclass overrides, the others cost nothing.

    What happens inside a batch never awaits, as the rules do not; what happens after its commit must not fail.
    """

    # Inside a batch.

    def name_needs(self, needs: Needs, caller: Caller, ask: Ask) -> None:
        """Name what a write needs loaded besides what its operation names."""

    def after_decision(self, work: Work, ask: Ask, receipts: tuple[Receipt, ...]) -> None:
        """Add to what an operation has changed, or raise to refuse it; `receipts` are those that it wrote."""

    def settle_unique(self, work: Work, ask: CreateTask, task: Task, contract: dict[str, Any]) -> Task | Created | None:
        """Return the task to create under a key, or what to answer instead; raise to refuse it."""

    def check_new_task(self, work: Work) -> None:
        """Raise to refuse the task that was just added."""

    def check_payload(self, work: Work, task: Task) -> None:
        """Raise to refuse the payload that a task was just given."""

    def check_result(self, work: Work, task: Task, ask: Complete) -> None:
        """Raise to refuse the result of a task, whose lease lives on; one that has ended repeats its completion."""

    def check_optional_receipt(self, work: Work, task_id: str) -> None:
        """Raise to refuse the receipt that was just written about a task, which can end without it."""

    def why_no_lease(self, work: Work, worker: Principal) -> str | None:
        """Say why a worker gets no further lease now; None if it may have one."""

    def limit_lease(self, work: Work) -> int:
        """Return how many seconds a lease of the tenant may last; the least of all answers counts."""
        return sys.maxsize

    def why_no_task(self, work: Work, ask: LeaseNext) -> str | None:
        """Say why a claim finds no task, if it would find some otherwise."""

    def why_hold(self, work: Work, task: Task) -> str | None:
        """Say why a task is put on hold when its lease ends; None if it is offered again."""

    def report_loss(self, work: Work, task: Task, lease: Lease, reason: str) -> None:
        """Act on a task whose lease has run out (`lease_expired`), or whose last attempt has failed."""

    def look_after(self, work: Work, task: Task) -> None:
        """Act on a task that has asked something, when it has ended, was put on hold, or is swept."""

    def begin_cascade(self, work: Work, task: Task, ask: CancelTask, by: Principal) -> None:
        """Note that the descendants of a task are to be canceled as well, and see to it after the call."""

    # Around a batch.

    def wrap_transact(self, transact: Transact) -> Transact:
        """Return what carries out a batch instead of `transact`, by means of it."""
        return transact

    # After a commit.

    def after_commit(self, work: Work) -> None:
        """Act on a batch of this process that has been committed."""

    def after_grant(self, tenant_id: str, first_end: float) -> None:
        """Act on live leases that a batch of this process has stored; the first of them runs out at `first_end`."""

    def after_record_change(self, work: Work) -> None:
        """Act on records that a batch of this process has kept or dropped."""

    def note_pauses(self, work: Work) -> None:
        """Act on a batch of this process that has read or changed what is paused in its tenant."""

    def hear_news(self, news: News) -> None:
        """Act on a batch that another process has committed."""

    # Around a call.

    async def charge(self, caller: Caller, op: Operation, more: int) -> None:
        """Count a call with many items as so many more calls, or raise to refuse it."""

    async def count_creation(self, caller: Caller, ask: Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Create tasks by means of `create`, which then answers for all of them, or raise to refuse them.

        A caller with `no_new_tasks` gets what repeats a creation, and that refusal for anything new.
        """

    async def before_call(self, op: Operation, caller: Caller, ask: Ask) -> None:
        """Act on an operation before it is carried out, or raise to refuse it."""

    async def after_call(self, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
        """Act on an operation that was carried out, before it is answered."""

    def substitutes(self) -> Mapping[str, Instead]:
        """Return what carries out operations instead of the engine's own methods, by their names."""
        return {}

    async def list_warnings(self, caller: Caller) -> list[str]:
        """Return what a caller should know at the beginning of its session."""
        return []

    async def check_caller(self, caller: Caller) -> None:
        """Refuse to go on with a call that waited, when its caller would not be admitted any more."""

    async def describe_health(self, health: Healthy) -> None:
        """Add to what `health` answers."""


class Engine:
    """The operations: a write is a plain function over Work, a read is a coroutine over the backend."""

    def __init__(self, backend: Backend, settings: Settings | None = None,
                 extensions: Iterable[Extension] = ()) -> None:
        self.backend, self.settings = backend, settings or Settings()
        self.lasting = backend if isinstance(backend, LastingBackend) else None
        self.shared = backend if isinstance(backend, SharedBackend) else None
        self.instance = self.settings.instance_id or backend.instance
        self.gate = Principal("asyncgate", self.instance)
        self.born, self.longest_wait = time.monotonic(), self.settings.max_wait_seconds
        self.batches = Batches(backend, self.settings.batch_size, self._after_commit)
        self.waiting = Waiting(self, matches)
        self.polls, self.granted = Polls(self.settings), GrantedLeases()
        self.readers = Readers(self.settings.max_waiting_readers)
        self.sightings = Sightings(backend)
        self.extensions: tuple[Extension, ...] = ()
        self.extend(*extensions)

    def extend(self, *more: Extension) -> None:
        """Add extensions; their hooks are called behind those of the extensions that are there already."""
        self._set_extensions((*self.extensions, *(extension for extension in more if extension not in self.extensions)))

    def withdraw(self, *these: Extension) -> None:
        """Remove extensions, if they are there."""
        self._set_extensions(tuple(extension for extension in self.extensions if extension not in these))

    def _set_extensions(self, extensions: tuple[Extension, ...]) -> None:
        self.extensions, self.on = extensions, Hooks(Extension, extensions)
        self.batches.transact = self.on.wrap_all(self.backend.transact)

    def find_extension(self, kind: type[E]) -> E | None:
        """Return the extension of this kind, if there is one."""
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)

    async def perform(self, op: Operation, caller: Caller, ask: Ask) -> Any:
        """Carry out one operation: the one way in, for every façade and every test (H.9)."""
        self.check_request(op, caller, ask)     # first: who may not create cannot use up what others may
        if ask.items and (more := ask.weigh() - 1) > 0:
            for charge in self.on.charge:
                await charge(caller, op, more)
        for before_call in self.on.before_call:
            await before_call(op, caller, ask)
        run = partial(self._carry_out, op, ask)
        reply = await (self.create(caller, ask, run) if ask.creates else run(caller))
        for after_call in self.on.after_call:
            await after_call(op, caller, ask, reply)
        return reply

    async def create(self, caller: Caller, ask: Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Create tasks by means of `create`, if all who count them let it."""
        for count_creation in self.on.count_creation:
            create = partial(count_creation, ask=ask, create=create)
        return await create(caller)

    async def _carry_out(self, op: Operation, ask: Ask, caller: Caller) -> Any:
        if not op.open:
            self._note_caller(caller, ask)
        if getattr(ask, "wait_seconds", 0) > 0:
            with self.polls.place(caller.tenant_id, speaker(caller, ask)):
                if isinstance(ask, ListReceipts | ListOpenObligations):
                    return await self._wait_for_items(op, caller, ask)
                return await self._run_now(op, caller, ask)
        return await self._run_now(op, caller, ask)

    def _run_now(self, op: Operation, caller: Caller, ask: Ask) -> Awaitable[Any]:
        if (other := self.on.substitutes.get(op.name)) is not None:
            return other(self, caller, ask)
        if op.direct:
            run: Callable[..., Awaitable[Any]] = op.run
            return run(self, caller, ask)
        return self._write_slices(op, caller, ask) if ask.items else self.write(op.run, op.loads, caller, ask)

    async def _write_slices(self, op: Operation, caller: Caller, ask: Ask) -> Any:
        """Carry out a call with many items in slices that others may pass, in small ones while others are about."""
        done, items = None, getattr(ask, ask.items)
        while items or done is None:
            some, items = items[:(size := self.batches.find_slice_size())], items[size:]
            try:
                async with self.batches.take_slice(caller.tenant_id):
                    reply = await self.write(op.run, op.loads, caller, replace(ask, **{ask.items: some}))
            except GateError as refusal:
                if not isinstance(done, Items):     # nothing is done yet, or a repetition finds what is done
                    raise
                return done + Items([refuse_item(item, refusal) for item in some + items])
            done = done + reply if done is not None else reply
        return done

    def make_own_caller(self, tenant_id: str) -> Caller:
        """Return the gate itself as a caller, for what it does in a tenant without being asked."""
        return Caller(tenant_id, self.gate, "system", frozenset())

    def write(self, run: Callable[..., Any], loads: Loads | None, caller: Caller, ask: Ask) -> asyncio.Future[Any]:
        """Run a write method in the tenant's next batch; its reply comes when the batch is durable."""
        decide = partial(self.decide_write, run) if self.on.after_decision else partial(run, self)
        loads = partial(self.name_needs, loads) if self.on.name_needs else loads
        return self.batches.join(caller.tenant_id, Job(decide, loads, caller, ask))

    async def change(self, tenant_id: str, run: Callable[[Work], V], *records: tuple[type[Struct], tuple[str, ...]],
                     tasks: Iterable[str] = (), receipts: Iterable[str] = (),
                     stated: Iterable[tuple[str, str]] = (), alone: bool = False) -> V:
        """Let `run` change these rows of a tenant in its next batch, as the gate itself; it may be called again."""
        tasks, receipts, stated = {*tasks}, {*receipts}, {*stated}

        def load(needs: Needs, caller: Caller, ask: Ask) -> None:
            needs.records.update(records)
            needs.tasks.update(tasks)
            needs.receipts.update(receipts)
            needs.stated.update(stated)
            needs.alone |= alone
        own = self.make_own_caller(tenant_id)
        reply: V = await self.write(lambda engine, work, caller, ask: run(work), load, own, Ask())
        return reply

    def name_needs(self, loads: Loads | None, needs: Needs, caller: Caller, ask: Ask) -> None:
        """Name what a write needs loaded, also by those who count what it writes."""
        for name_needs in self.on.name_needs:   # first: what the operation itself needs may be refused
            name_needs(needs, caller, ask)
        if loads is not None:
            loads(needs, caller, ask)

    def decide_write(self, run: Callable[..., Any], work: Work, caller: Caller, ask: Ask) -> Any:
        """Run a write method, and what extensions do behind it."""
        before = len(work.written)
        reply = run(self, work, caller, ask)
        receipts = tuple(islice(work.written.values(), before, None))
        for after_decision in self.on.after_decision:
            after_decision(work, ask, receipts)
        return reply

    def check_request(self, op: Operation, caller: Caller, ask: Ask) -> None:
        """Refuse a caller without the role, scope or tenant; the batch checks who owns a task."""
        self.permit(op, caller)
        check_needed(ask)
        check_identities(ask)
        lower_ids(ask)
        if not op.open and ask.tenant_id is not None:
            self.check_tenant(caller, ask.tenant_id)

    def permit(self, op: Operation, caller: Caller) -> None:
        """Refuse a caller without the role or scope, before a façade reads the body."""
        if op.fits(caller):
            return
        if caller.role not in op.roles:
            roles = " or ".join([role for role in op.roles if role != "system"])      # which nobody outside can have
            raise forbid(caller, f"a credential with the role {caller.role} cannot {op.name}", roles)
        scope = " or ".join(sorted(op.scopes))
        refusal = forbid_scope(caller, f"{op.name} needs the scope {scope}", scope)
        refusal.scopes = op.scopes
        raise refusal

    def check_tenant(self, caller: Caller, tenant_id: str) -> None:
        """Accept a request that names the credential's own tenant, and refuse any other tenant (21.3.1)."""
        own = {caller.tenant_id, "default" if caller.tenant_id == self.settings.default_tenant_id else ""}
        if caller is not NOBODY and lower_id(tenant_id) not in own:
            raise TenantMismatch("this credential belongs to another tenant than the request says")

    def _note_caller(self, caller: Caller, ask: Ask) -> None:
        """Note the principal that calls, not the one it asks about; upkeep stores it every half minute."""
        who = speaker(caller, ask)
        if ask.asks_about() or (caller.bound and not who.same(caller.principal)):
            who = caller.principal
        self.sightings.calls.append((caller.tenant_id, who, elapsed() + self.backend.skew))
        if len(self.sightings.calls) >= MOST_CALLS:
            self.sightings.count()

    # Creating and watching tasks.

    def create_task(self, work: Work, caller: Caller, ask: CreateTask, parents: tuple[str, ...] = ()) -> Created:
        """Queue one task for any worker that has the capabilities it requires.

        The same idempotency key from the same creator again returns the first task and writes nothing.  Next:
        get_task with wait_seconds, or list_open_obligations later.  One transaction.  Spec 6.1, 14.1, PH.6.
        """
        task, needed, contract = self._draft_task(work, caller, speaker(caller, ask), ask)
        key = (task.owner_kind, task.owner_id, ask.idempotency_key or "")
        if ask.idempotency_key is not None and (first := work.keys.get(key)):
            return self._repeat_creation(work.tasks[first], task)
        if ask.unique is not None:
            settled = settle_unique(self.on.settle_unique, work, ask, task, contract)
            if isinstance(settled, Created):
                return settled
            task = settled
        if caller.no_new_tasks is not None:
            raise caller.no_new_tasks
        if task.parent_task_id is not None:
            add_child(work, caller, task, self.settings.lease_grace_seconds)
        duty = self.write_receipt(work, EMISSION["create"], task, contract, parents=parents)
        work.add_task(replace(task, duty=duty.receipt_id), needed)
        if work.lanes:
            check_kinds(self.settings.max_lanes, len(work.known) + len(work.lanes))
        for check_new_task in self.on.check_new_task:
            check_new_task(work)
        for check_payload in self.on.check_payload:
            check_payload(work, task)
        return Created(task.task_id, "queued", unique=tell_outcome(task))

    @contextlib.contextmanager
    def check_optional_receipts(self, work: Work, task_id: str) -> Iterator[None]:
        """Let extensions refuse the receipts that are written inside: their task can end without them (21.6.3)."""
        before = len(work.written)
        yield
        if len(work.written) > before:
            for check_optional_receipt in self.on.check_optional_receipt:
                check_optional_receipt(work, task_id)

    def _repeat_creation(self, task: Task, again: Task) -> Created:
        differs = task.fingerprint != again.fingerprint
        if differs and self.settings.idempotency_mismatch == "refuse":
            raise IdempotencyConflict(f"this idempotency key made task {task.task_id} from another body",
                                      task_id=task.task_id)
        return note_repeats(Created(task.task_id, task.status, payload_differs=differs, unique=tell_outcome(task)), 1)

    def _draft_task(self, work: Work, caller: Caller, creator: Principal,
                    ask: CreateTask) -> tuple[Task, frozenset[str], dict[str, Any]]:
        """Make a task from its request, and the body of its `task.assigned` receipt."""
        limits, payload = self.settings, bytes(ask.payload) or b"null"
        check_size(payload, limits.max_payload_bytes, "payload")
        value, needed = parse_json(payload, "payload"), needs_of(ask.requirements)
        held_to = write_limits(find_type_limits(limits.type_limits, ask.type) if ask.limits is None else ask.limits)
        if caller.task_types is not None and not find_ordered_types(ask.type, value) <= caller.task_types:
            raise forbid_type(caller)
        if not bytes(ask.payload) and ask.payload_pointer is None:
            raise InvalidRequest("create_task needs payload or payload_pointer; if neither applies, say payload: null")
        terms = {name: held for name in ask.kept if (held := getattr(ask, name)) is not None}
        session = {"principal_instance_id": creator.instance_id} if creator.instance_id else {}
        delay, deadline = ask.delay_seconds or 0.0, instant(ask.timeouts.deadline if ask.timeouts else None)
        traced = caller.trace.members if caller.trace else {}       # in no receipt: a trace belongs to one request
        request = (ask.type, payload) if ask.idempotency_key is None else (ask.idempotency_key,)
        task = Task(
            task_id=work.new_id((creator.kind, creator.id, *request)), type=ask.type,
            lane=lane_of(ask.type, needed, find_pattern(held_to)), payload=payload.decode(),
            payload_pointer=ask.payload_pointer, requirements=bytes(ask.requirements).decode(),
            terms=to_canonical({**terms, **session, **traced}).decode(), owner_kind=creator.kind, owner_id=creator.id,
            principal_ai=ask.principal_ai or creator.id,
            priority=limits.default_priority if ask.priority is None else ask.priority,
            max_attempts=ask.max_attempts or limits.default_max_attempts,
            retry_backoff_seconds=(limits.default_retry_backoff_seconds if ask.retry_backoff_seconds is None
                                   else ask.retry_backoff_seconds),
            max_expiries=limits.max_expiries if ask.max_expiries is None else ask.max_expiries,
            created_at=work.now, duty="", idempotency_key=ask.idempotency_key, fingerprint=None,
            parent_task_id=ask.parent_task_id, asyncgate_instance=self.instance, updated_at=work.now,
            next_eligible_at=work.now + delay if delay > 0 else None,
            deadline_at=deadline, limits=held_to)
        digest = hashlib.sha256(to_canonical(value)).hexdigest()
        wanted = parse_json(bytes(ask.requirements), "requirements")
        contract = {**terms, "type": task.type, "requirements": wanted, "payload_pointer": task.payload_pointer,
                    "payload_sha256": digest, "payload_bytes": len(payload),
                    **({"limits": dict(read_limits(held_to))} if held_to else {}),
                    **({"parent_task_id": ask.parent_task_id} if ask.parent_task_id else {})}
        if ask.idempotency_key is not None:
            terms = {**contract, "payload_bytes": 0, "requirements": wanted or None}   # white space makes no difference
            task = replace(task, fingerprint=sha256(terms, task.principal_ai, task.priority, task.max_attempts,
                                                    task.retry_backoff_seconds, task.max_expiries, delay))
        return task, needed, {**contract, **session}

    def create_tasks(self, work: Work, caller: Caller, ask: CreateTasks) -> Items:
        """Queue up to 500 tasks; each is created or refused by itself, and the answer says which.

        When the call answers, every task without an error is durable.  Without an answer, repeat the call with the
        same idempotency keys.
        """
        repeats = list[int]()

        def create(item: CreateTask) -> Item:
            made = self.create_task(work, caller, item)
            repeats.append(made.repeats)
            return Item(made.task_id, made.status, made.payload_differs, unique=made.unique)
        items = Items([self._run_item(work, caller, create, item) for item in list_creations(ask)])
        return note_repeats(items, sum(repeats))

    def _run_item(self, work: Work, caller: Caller, run: Callable[[T], Item], item: T) -> Item:
        """Carry out one item of a batch; its error is its answer and leaves the other items unaffected."""
        savepoint = work.savepoint()
        try:
            if isinstance(item, Unreadable):
                raise item.problem
            check_needed(item)
            check_identities(item)
            lower_ids(item)
            if item.tenant_id:
                self.check_tenant(caller, item.tenant_id)
            return run(item)
        except Exception as wrong:      # a bug in one item must spare the others too
            work.take_back(savepoint)
            return refuse_item(item, wrong if isinstance(wrong, GateError) else log_fault(type(item).__name__, wrong))

    async def run_task(self, caller: Caller, ask: RunTask) -> TaskRecord:
        """Queue one task and wait up to wait_seconds (30 at most) for its outcome.

        The answer is the task's record; when its status is not terminal yet, go on with get_task.
        """
        made = await self.write(Engine.create_task, its_key, caller, ask)
        record = await self.get_task(caller, GetTask(task_id=made.task_id, wait_seconds=ask.wait_seconds))
        return note_repeats(record, made.repeats)

    async def get_task(self, caller: Caller, ask: GetTask) -> TaskRecord:
        """Return the full record of a task, with its result or error once it has ended.

        With wait_seconds the answer comes when the task ends or the time is over, whichever is first.
        """
        async def read() -> TaskRecord:
            return show_task(caller.tenant_id, *await self.read_task(caller, ask.task_id))
        if ask.wait_seconds <= 0:
            return await read()
        if caller.note_wait is not None:
            caller.note_wait(ask.task_id)
        return await self.wait_to_read(caller, ask, Wants((ask.task_id,)), read,
                                        lambda record: record.status in TERMINAL)

    async def wait_to_read(self, caller: Caller, ask: Waits, wants: Wants, read: Callable[[], Awaitable[R]],
                            has_come: Callable[[R], Any]) -> R:
        """Read again and again until what is wanted has come; costs nothing between two reads."""
        begun = asyncio.get_running_loop().time()
        with self.readers.take_seat(caller.tenant_id, wants) as seat:
            while True:     # the seat is ready before the read, or what is committed in between would be missed
                seat.begin_look()
                reply = await read()
                if has_come(reply) or not await self.wait_for_call(seat.plan_look(), self._limit_wait(begun, ask)):
                    return reply
                await self.check_caller(caller)

    async def _wait_for_items(self, op: Operation, caller: Caller, ask: ListReceipts | ListOpenObligations) -> Any:
        """Read a page of receipts or obligations; while it is empty, wait for a receipt that would be on it."""
        rows, wants = ("receipts", await self.find_wants(caller, ask)) if isinstance(ask, ListReceipts) else (
            "open_obligations", Wants(to=self.require_subject(caller, ask), types=frozenset(TERMINATES)))
        return await self.wait_to_read(caller, ask, wants, partial(self._run_now, op, caller, ask),
                                        attrgetter(rows))

    async def find_wants(self, caller: Caller, ask: ListReceipts) -> Wants:
        """Return which receipts a reader of a list waits for."""
        types = None if ask.receipt_type is None else frozenset((ask.receipt_type,))
        return Wants((), await self.choose_inbox(caller, ask), ask.task_id, types)

    def is_alone(self) -> bool:
        """Whether no other process is known to use the database."""
        return self.shared is None or self.shared.is_alone()

    async def leads(self, job: str) -> bool:
        """Whether this process is the one, of all that share the database, that does a job."""
        return self.shared is None or await self.shared.lead(job)

    async def check_caller(self, caller: Caller) -> None:
        """Refuse a caller whose credential is no longer valid; asked when a waiting call goes on."""
        for check_caller in self.on.check_caller:
            await check_caller(caller)

    async def wait_for_call(self, call: asyncio.Future[None], until: float) -> bool:
        """Wait for a call until a time of the loop's clock; return whether to look again before that time.

        News of other processes may be lost, so beside others everybody looks now and then without being called.
        """
        poll = asyncio.get_running_loop().time() + self.settings.database.poll_seconds
        if self.is_alone() or until <= poll:
            return await wait_until(call, until)
        await wait_until(call, poll)
        return True

    def _limit_wait(self, begun: float, ask: Waits) -> float:
        return begun + float(min(ask.wait_seconds, self.longest_wait))

    async def read_task(self, caller: Caller, task_id: str) -> tuple[Task, Lease | None, Progress | None]:
        """Return a task that the caller may read: its own or one it has or had, their children; any for an admin."""
        if (snapshot := await self.backend.task(caller.tenant_id, task_id)) is None:
            raise no_task(task_id)
        task, lease, _ = snapshot
        if not (caller.sees_all or task.owner.same(caller.principal) or (
                lease is not None and lease.worker.same(caller.principal))):
            try:        # who may read a parent may read its children
                await self.read_task(caller, task.parent_task_id or "")
            except GateError:
                raise forbid(caller, f"task {task_id} belongs to another principal") from None
        return snapshot

    def require_self(self, caller: Caller, named: Principal | None) -> Principal:
        """Return the caller, which is who was named, if anybody; raises Forbidden."""
        if not wanted_is(named, caller.principal):
            raise forbid(caller, f"this credential sees only what belongs to {caller.principal}")
        return caller.principal

    async def get_task_history(self, caller: Caller, ask: GetTaskHistory) -> History:
        """Return what happened to a task, oldest first: its receipts, and the events that have none."""
        await self.read_task(caller, ask.task_id)
        tenant, limit, filters = caller.tenant_id, self.limit_page(ask.limit), ("history", ask.task_id)
        place = self.open_cursor(caller, ask.cursor, *filters) or ""
        # A place in each: a receipt may become visible after an event.
        after_receipt, _, after_event = place.partition(" ")
        receipts = await self.backend.page(tenant, ReceiptFilter(None, ask.task_id, None, after_receipt, limit + 1))
        events = [HistoryEvent(r.receipt_id, r.receipt_type, to_utc(r.created_at), receipt=show_receipt(tenant, r))
                  for r in receipts]
        events += [HistoryEvent(e.event_id, e.event_type, to_utc(e.created_at), to_raw(e.payload))
                   for e in await self.backend.page(tenant, EventFilter(
                       ask.task_id, after_event or after_receipt, limit + 1))]
        events.sort(key=lambda event: event.event_id)
        for event in events[:limit]:
            after_event = (after_event or after_receipt) if event.receipt else event.event_id
            after_receipt = event.event_id if event.receipt else after_receipt
        cursor = self.seal_cursor(caller, f"{after_receipt} {after_event}", *filters) if events else ask.cursor
        return History(ask.task_id, events[:limit], cursor if len(events) > limit else None, cursor)

    def cancel_task(self, work: Work, caller: Caller, ask: CancelTask) -> Ok:
        """Cancel a task; its worker learns of it from its next call.

        For the owner, or an admin; with cascade also its children, and theirs.  A task that has ended stays as it is:
        the answer is `ok: false` with its status, or the first answer again if it was canceled.
        """
        task, by = self._require_own(work, caller, ask), speaker(caller, ask)
        if ask.cascade and not self.on.begin_cascade:
            raise InvalidRequest("cascade needs the extra families, which this gate does not have: cancel each task")
        for begin_cascade in self.on.begin_cascade if ask.cascade else ():
            begin_cascade(work, task, ask, by)
        if task.status in TERMINAL:     # the first answer may have been lost, and this is the repetition
            return Ok(task.status == "canceled", task.status)
        self.cancel(work, task, by, reason=ask.reason)
        return Ok(True, "canceled")

    def cancel(self, work: Work, task: Task, by: Principal, **why: Any) -> None:
        """Cancel a task that has not ended."""
        if (lease := work.leases.get(task.task_id)) and lease.ending == "live":
            work.set_lease(replace(lease, ending="canceled"))
        body = {"canceled_by": {"kind": by.kind, "id": by.id}, **why}
        task = self.discharge_duty(work, work.move_task(task, CANCEL, completed_at=work.now, held=None))
        self.announce_end(work, task, self.write_receipt(work, EMISSION["cancel"], task, body, by=by), body)

    def _require_own(self, work: Work, caller: Caller, ask: TaskAsk) -> Task:
        """Return a task that the caller owns, or any for an admin with admin:write."""
        task = work.require_task(ask.task_id)
        if not caller.unlimited and not task.owner.same(speaker(caller, ask)):
            raise forbid(caller, f"task {task.task_id} belongs to another principal")
        return task

    def release_hold(self, work: Work, caller: Caller, ask: ReleaseHold) -> Ok:
        """Offer a task that is on hold again; the count of its lost leases starts at zero.

        A task with an open question waits for the answer.  One that has ended stays as it is: the answer is `ok: false`
        with its status.
        """
        task = self._require_own(work, caller, ask)
        if task.status in TERMINAL:
            return Ok(False, task.status)
        if task.held == KEY_TAKEN:
            raise InvalidTransition(f"task {task.task_id} waits for another task with its key to end; explain_task "
                                    "names that one, and cancel_task ends either", status=task.status)
        if task.held == INPUT_REQUIRED:
            raise InvalidTransition(f"task {task.task_id} waits for an answer; list_inputs shows the question, "
                                    "answer_input answers it, cancel_task ends the task", status=task.status)
        if task.held is not None:
            work.add_event(task.task_id, "task.hold_released", held=task.held, expiries=task.expiries)
            held = INPUT_REQUIRED if any(why(work, task) == INPUT_REQUIRED for why in self.on.why_hold) else None
            task = work.change_task(task, held=held, expiries=0, lost_to="[]", next_eligible_at=None)
            if work.find_progress(task.task_id).parks:
                work.set_progress(task, parks=0)
            self.look_after(work, task)     # its question has a time, or is over
        return Ok(True, work.tasks[task.task_id].status)

    def attach_artifacts(self, work: Work, caller: Caller, ask: AttachArtifacts) -> Ok:
        """Say where the result of a succeeded task lies, which discharges its obligation (PH.3).

        For the owner, the worker that completed it, or an admin.  Writes nothing when nothing is owed any more.
        """
        task, by = work.require_task(ask.task_id), speaker(caller, ask)
        lease = work.leases.get(task.task_id)
        if not caller.unlimited and not task.owner.same(by) and not (lease and lease.worker.same(by)):
            raise forbid(caller, f"task {task.task_id} belongs to another principal")
        if task.status != "succeeded":
            raise InvalidTransition(f"task {task.task_id} is {task.status}; artifacts are attached to a succeeded one",
                                    status=task.status)
        if not (located := self._find_result(ask.artifacts, ask.delivery_proof)):
            raise NotLocatable("attach_artifacts needs artifacts with a pointer (a uri, path or id), or a "
                               "delivery_proof whose status is succeeded (PH.3)")
        if task.owed:
            self._locate_result(work, task, lease, by, located)
        return answer_success(work.require_task(ask.task_id))

    # Leasing tasks and working on them.

    async def lease_next(self, caller: Caller, ask: LeaseNext) -> Offers:
        """Lease the next tasks that this worker can do: highest priority first, then oldest.

        Always answers with a list, empty when there is nothing; wait_seconds keeps the call open until work arrives.
        A lease runs out after lease_ttl_seconds: renew it every renew_every_seconds, then complete, fail or release it.
        Each lease is exclusive and atomic.  Spec 6.2, 18.8.
        """
        ask.max_tasks = min(ask.max_tasks or 1, self.settings.max_claim_tasks)
        keep_within(caller, ask)
        if ask.wait_seconds <= 0:
            return await self._claim_once(caller, ask)
        begun = asyncio.get_running_loop().time()
        worker = speaker(caller, ask)
        seen = self.sightings.watch_claim(caller.tenant_id, worker)
        with seen, self.waiting.take_place(caller.tenant_id, ask, worker.id) as place:
            while True:     # the place is taken before the claim, or a task created in between would be missed
                offers = await self._claim_once(caller, ask)
                place.leave_rest(offers.tasks)
                if offers.tasks or not await place.wait_for_call(self._limit_wait(begun, ask)):
                    return offers
                await self.check_caller(caller)

    async def _claim_once(self, caller: Caller, ask: LeaseNext) -> Offers:
        offers: Offers = await self.write(Engine._claim_tasks, its_claim, caller, ask)
        while not offers.tasks and offers.unread:       # the turns that were read are full, and blocked now
            offers = await self.write(Engine._claim_tasks, its_claim, caller, ask)
        self.sightings.note_claim(caller.tenant_id, speaker(caller, ask), ask, offers)
        return offers

    def _claim_tasks(self, work: Work, caller: Caller, ask: LeaseNext) -> Offers:
        worker = speaker(caller, ask)
        work.queue_changes.begin_claim(work.limiting.freed)
        if ask.worker_id is None and not caller.bound:
            raise InvalidRequest("lease_next needs worker_id: a name for the worker that stays across its restarts")
        if ask.claim_id is not None and (again := self._repeat_offers(work, worker, ask)):
            return Offers(again)
        offers: list[Offer] = []
        most, size, full = ask.max_tasks or 1, 0, first_answer(self.on.why_no_lease, work, worker)
        for task in work.find_claimable(ask) if full is None else ():
            offers.append(self.lease_task(work, worker, ask, task))
            size += measure_task(task, None, work.progress.get(task.task_id))
            if len(offers) == most or size > MOST_PAGE_BYTES:
                return Offers(offers)
            if (full := first_answer(self.on.why_no_lease, work, worker)) is not None:
                break
        if not offers and full is None:
            full = first_answer(self.on.why_no_task, work, ask)
        reply = Offers(offers, UNSET if full is None else [full])
        vars(reply)["unread"] = work.limiting.unread
        return reply

    def _repeat_offers(self, work: Work, worker: Principal, ask: LeaseNext) -> list[Offer]:
        """Return the live offers of an earlier claim with the same claim_id, whose reply was lost."""
        key, grace = (worker.kind, worker.id, ask.claim_id or ""), self.settings.lease_grace_seconds
        leases = [lease for id in work.repeats.get(key, ()) if alive(lease := work.leases[id], work.now, grace)
                  and (lease.worker_kind, lease.worker_id, lease.claim_id) == key]      # it may be a later one
        # A process that has renewed a lease had its offer: one that claims it again is another process.
        live = [work.tasks[lease.task_id] for lease in leases
                if not lease.renewals or self._resume_lease(work, lease, worker, None)]
        return [self._make_offer(work, work.leases[task.task_id]) for task in sorted(live, key=partial(rank, ask))]

    def lease_task(self, work: Work, worker: Principal, ask: LeaseNext, task: Task) -> Offer:
        """Lease a task to a worker."""
        timeouts = decode_terms(task.terms).timeouts
        # A worker's wish comes before that of the task's creator.
        wished = ask.lease_ttl_seconds or (timeouts.lease_ttl_seconds if timeouts else None)
        task = work.move_task(task, CLAIM, fence=task.fence + 1)
        note_told(work, task)
        lease_id = work.new_lease_id((task.task_id, task.fence))
        body = {"worker_capabilities": sorted(ask.capabilities or ()), "attempt": task.attempt, "fence": task.fence}
        accepted = self.write_receipt(work, EMISSION["claim"], task, body, by=worker, lease_id=lease_id)
        ttl = self._choose_lease_length(work, wished)
        end = self._find_lease_end(work, work.now, ttl)
        lease = Lease(task.task_id, lease_id, worker.kind, worker.id, worker.instance_id, task.fence, work.now, end, 0,
                      accepted.receipt_id, ask.claim_id, ttl_seconds=ttl)
        work.set_lease(lease)
        return self._make_offer(work, lease)

    def _make_offer(self, work: Work, lease: Lease) -> Offer:
        return show_offer(work.tenant_id, work.tasks[lease.task_id], lease, work.progress.get(lease.task_id), work.now)

    def renew_lease(self, work: Work, caller: Caller, ask: RenewLease) -> Renewed:
        """Keep a lease that is still alive; it runs extend_by_seconds from now, or as long as it was granted for.

        A renewal never shortens a lease: release_lease gives it back.  A lease that has run out cannot be renewed, even
        before the sweep has seen it (H.4).
        """
        if not (task_id := ask.task_id or work.holders.get(ask.lease_id, "")):
            raise LeaseInvalid(f"no live lease {ask.lease_id}; drop the work, lease_next gives more", reason="unknown")
        ask = replace(ask, task_id=task_id)     # a copy: the ask may be decided once more
        task, lease = self.require_lease(work, caller, ask)
        self._check_renewal(task, lease)
        until = self._find_lease_end(work, lease.acquired_at, ask.extend_by_seconds or lease.ttl_seconds)
        until = max(until, lease.expires_at)
        lease = replace(lease, expires_at=until, renewals=lease.renewals + 1)
        work.set_lease(lease)
        if lease.renewals == STUCK_RENEWALS + 1:
            noted = work.progress.get(task.task_id)
            self._write_anomaly(work, task, "lease_renewed_often", lease=lease, renewals=lease.renewals,
                                progress_reported=bool(noted and noted.fence == lease.fence),
                                recommended_action="Ask the worker for progress, or cancel the task.")
        self.look_after(work, task)     # for a kept lease may wait for an answer
        return Renewed(to_utc(until), (until - work.now) / 3)

    def _check_renewal(self, task: Task, lease: Lease) -> None:
        if lease.resumptions and would_hold(task, 0):    # so it runs out, and its task is held
            raise LeaseInvalid(f"lease {lease.lease_id} was resumed by as many processes as its task may lose "
                               f"({task.max_expiries}, max_expiries); drop the work, lease_next gives more",
                               reason="expired")
        often, long = self.settings.max_lease_renewals, self.settings.max_lease_lifetime_seconds
        if often and lease.renewals >= often:
            raise LeaseRenewalLimit(f"lease {lease.lease_id} was renewed {often} times, which is the limit")
        if long and lease.expires_at >= lease.acquired_at + long:
            raise LeaseLifetimeLimit(f"lease {lease.lease_id} lives {long} seconds, which is the limit")

    def release_lease(self, work: Work, caller: Caller, ask: ReleaseLease) -> Released:
        """Give a task back unfinished: it is offered again at once, or parked until a time or the end of its children.

        Neither costs an attempt or an expiry; a task that was parked max_parks times is on hold.
        """
        if self._find_repeat(work, caller, ask, "released"):
            return answer_return(work, ask.task_id)
        if self._is_told(work, caller, ask, EXPIRED):
            return Released(True, "queued", True)
        until = find_park_end(ask, work.now)
        task, lease = self.require_lease(work, caller, ask)
        if bytes(ask.checkpoint) != b"null":
            self._keep_progress(work, task, lease, ask.checkpoint, "checkpoint")
        held, parks = first_answer(self.on.why_hold, work, task), 0
        if until is not None or ask.until_children is not None:
            work.set_progress(task, parks=(parks := work.find_progress(task.task_id).parks + 1))
            waits, until = park_for_children(work, task, ask.until_children, until)
            held = why_parked_out(task, parks, self.settings.max_parks) or held or waits
        work.set_lease(replace(lease, ending="released"))
        task = work.move_task(task, EXPIRE, next_eligible_at=until, started_at=None, held=held)
        body = {**self.describe_expiry(task, lease, "parked" if parks else "released"),
                **describe_park(ask, until, parks)}
        self.write_receipt(work, EMISSION["expire"], task, body, lease=lease, discriminator="released")
        self._tell_hold(work, task, lease)      # one that waits for an answer has its time, or is over
        return answer_return(work, task.task_id)

    async def list_leases(self, caller: Caller, ask: ListLeases) -> Leases:
        """List the live leases of a worker, so that it can go on after a restart.

        Asking is resuming, unless resume is false: each process that resumes a lease counts as a loss of the one before
        it, and after max_expiries losses the task is on hold.  A repeated resumption_id counts once.
        """
        worker, grace = self.read_subject(caller, ask, "worker_id"), self.settings.lease_grace_seconds
        now, gone = self.backend.now(), set[str]()
        rows = await self.backend.page(caller.tenant_id, LeaseFilter(worker))
        mine = ask.resume and (not caller.bound or worker.same(caller.principal))
        # In the order of their tasks: leases of one moment come in any order, and the history shall not depend on it.
        fresh = sorted(lease.task_id for lease, _ in rows if mine and alive(lease, now, grace)
                       and is_resumption(lease, name_process(lease, worker, ask.resumption_id)))
        for at in range(0, len(fresh), TASKS_AT_ONCE):      # a batch loads its tasks with their payloads
            some = Resumed(tasks=fresh[at:at + TASKS_AT_ONCE], worker=worker, resumption_id=ask.resumption_id)
            gone.update(await self.write(Engine._resume_leases, its_tasks, caller, some))
        return Leases([show_lease(lease, type, now) for lease, type in rows
                       if alive(lease, now, grace) and lease.lease_id not in gone])

    def _resume_leases(self, work: Work, caller: Caller, ask: Resumed) -> list[str]:
        """Note who resumes these leases; return those that ended by it."""
        held = [lease for task_id in ask.tasks if (lease := work.leases.get(task_id)) and lost(
            lease, ask.worker, LeaseAsk(lease_id=lease.lease_id), work.now, self.settings.lease_grace_seconds) is None]
        return [lease.lease_id for lease in held if not self._resume_lease(work, lease, ask.worker, ask.resumption_id)]

    def _resume_lease(self, work: Work, lease: Lease, worker: Principal, resumption_id: str | None) -> bool:
        """Note who resumes a lease, and return True; or end it, if that is the last loss its task may have."""
        process, task = name_process(lease, worker, resumption_id), work.tasks[lease.task_id]
        if not is_resumption(lease, process):
            return True
        if ends := is_new_process(process) and would_hold(task):
            self._expire_lease(work, task, lease, 1)
        self._note_resumption(work, work.leases[lease.task_id], worker, process, is_loss=not ends)
        return not ends

    def _note_resumption(self, work: Work, lease: Lease, worker: Principal, process: str, *, is_loss: bool) -> Lease:
        """Write into the history that a process resumed its worker's lease, and count the loss of the one before."""
        work.set_lease(lease := replace(lease, resumed_by=process, resumptions=lease.resumptions + 1))
        if is_loss and is_new_process(process):
            task = work.tasks[lease.task_id]
            self._warn_of_losses(work, work.change_task(task, **add_loss(task, lease)))
        if lease.resumptions <= MOST_RESUMED:
            work.add_event(lease.task_id, "lease.resumed", lease_id=lease.lease_id, fence=lease.fence,
                           worker_kind=worker.kind, worker_id=worker.id, worker_instance_id=worker.instance_id,
                           expiries=work.tasks[lease.task_id].expiries)
        return lease

    def start_task(self, work: Work, caller: Caller, ask: StartTask) -> Ok:
        """Say that work on a leased task has begun; optional."""
        task, _ = self.require_lease(work, caller, ask)
        task = self.start_work(work, task)
        return Ok(True, "running", to_utc_or_none(task.started_at))

    def start_work(self, work: Work, task: Task) -> Task:
        """Mark a leased task as running."""
        if task.status == "running":
            return task
        work.add_event(task.task_id, "task.started", fence=work.leases[task.task_id].fence)
        return work.move_task(task, START, started_at=work.now)

    def report_progress(self, work: Work, caller: Caller, ask: ReportProgress) -> Ok:
        """Report progress; if this worker is lost, the next one is handed it as a checkpoint."""
        task, lease = self.require_lease(work, caller, ask)
        self._keep_progress(work, self.start_work(work, task), lease, ask.progress, "progress")
        return Ok(True, "running")

    def _keep_progress(self, work: Work, task: Task, lease: Lease, text: Raw, name: str) -> None:
        check_size(bytes(text), self.settings.max_progress_bytes, name)
        progress = parse_json(bytes(text), name)
        noted = work.set_progress(task, progress=bytes(text).decode())
        if self.settings.progress_receipts:
            with self.check_optional_receipts(work, task.task_id):
                self.write_receipt(work, PROGRESSED, task, {"progress": progress, "sequence": noted.sequence},
                                   by=lease.worker, lease=lease, discriminator=str(noted.sequence))

    def complete(self, work: Work, caller: Caller, ask: Complete, receipt_id: str | None = None) -> Ok:
        """Complete a task, with its result and where it can be found.

        Give artifacts or delivery_proof (or create the task with result_delivery: inline): without them the task
        succeeds but its obligation stays open, and strict gates refuse.  The same call again returns the same answer.
        """
        located, body = self._read_result(ask)
        again = self._find_repeat(work, caller, ask, "completed")
        task, lease = (work.tasks[ask.task_id], again) if again else self.require_lease(work, caller, ask)
        for check_result in self.on.check_result:       # also of a repeated call, which is warned as the first one was
            check_result(work, task, ask)
        if again:
            if located and task.owed:
                self._locate_result(work, task, lease, lease.worker, located, receipt_id)
            return answer_success(work.tasks[ask.task_id], tells_another(ask.result, task.outcome))
        located = located or self._find_inline(task, ask)
        if not located and self.settings.locatability == "strict":
            raise NotLocatable(f"task {task.task_id} needs artifacts with a pointer, or a delivery_proof whose "
                               "status is succeeded (PH.3); the lease lives on, complete it again with them")
        where = located.get("artifacts")
        work.set_lease(replace(lease, ending="completed"), ask.cost)
        task = work.move_task(task, SUCCEED, completed_at=work.now, outcome=bytes(ask.result).decode(), held=None,
                              artifacts=to_canonical(where).decode() if where else None,
                              owed=task.owed and not located)
        if located:
            work.close_obligation(task.duty, task.owner)
        noted = describe_steps(work.progress.get(task.task_id))
        ended = self.write_receipt(work, EMISSION["succeed"], task, {**body, **located, **noted}, by=lease.worker,
                                   lease=lease, parents=(task.duty,) if located else (),
                                   discriminator="located" if located else "", receipt_id=receipt_id)
        self.announce_end(work, task, ended, {**body, "completion_metadata": None, **located})     # None is not told
        if not located:     # PH.3.3: the success stands, but it discharges nothing
            self._write_anomaly(work, task, "success_without_locatability", lease=lease, recommended_action=LOCATE,
                                worker_id=lease.worker_id, receipt_id=ended.receipt_id, obligation_receipt_id=task.duty,
                                result_delivery=decode_terms(task.terms).result_delivery)
        return answer_success(task)

    def _read_result(self, ask: Complete) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return where the result is, and what the receipt says of it."""
        result = bytes(ask.result)
        check_size(result, self.settings.max_result_bytes, "result")
        value = parse_json(result, "result")
        summary = ask.result_summary or find_summary(value)
        located, proof = self._find_result(ask.artifacts, ask.delivery_proof), ask.delivery_proof or None
        body = {"result_summary": summary, "completion_metadata": ask.completion_metadata, "delivery_proof": proof,
                **self._enclose_json("result", value, result, ask.task_id)}
        return located, body

    def _find_result(self, artifacts: Any, proof: dict[str, Any] | None) -> dict[str, Any]:
        return find_location(self.check_artifacts(artifacts), proof)

    def check_artifacts(self, artifacts: Any) -> list[Any]:
        """Return the artifacts that a request names; raises TooManyArtifacts."""
        pointers, most = read_artifacts(artifacts), self.settings.receipts.max_artifacts
        if len(pointers) > most:
            raise TooManyArtifacts(f"{len(pointers)} artifacts; a receipt carries {most} at most (PH.5)")
        return pointers

    def _enclose_json(self, name: str, value: Any, text: bytes, task_id: str,
                      most: int | None = None) -> dict[str, Any]:
        """Enclose a small value in a receipt; of a large one enclose its hash, size and how to fetch it."""
        if value is None:
            return {}
        if len(text) <= (self.settings.inline_result_bytes if most is None else most):
            return enclose_whole(name, value)
        return enclose_digest(name, value, len(text), task_id)

    def _find_inline(self, task: Task, ask: Complete) -> dict[str, Any]:
        """PH.3 way out (c): the creator asked for the result in the task record, and there it is."""
        if decode_terms(task.terms).result_delivery != "inline" or decode_json(ask.result) in (None, "", [], {}):
            return {}
        return {"artifacts": [{"type": "asyncgate", "uri": f"asyncgate://{self.instance}/tasks/{task.task_id}/result"}]}

    def _locate_result(self, work: Work, task: Task, lease: Lease | None, by: Principal, located: dict[str, Any],
                       receipt_id: str | None = None) -> None:
        """Discharge the duty of a task that succeeded without telling where (PH.3 ways out a and b)."""
        where = located.get("artifacts")
        task = work.change_task(task, artifacts=to_canonical(where).decode() if where else None)
        task = self.discharge_duty(work, task)
        ended = self.write_receipt(work, COMPLETED, task, located, by=by, lease=lease, discriminator="located",
                                   receipt_id=receipt_id)
        self.announce_end(work, task, ended, located)

    def complete_tasks(self, work: Work, caller: Caller, ask: CompleteTasks) -> Items:
        """Complete up to 500 tasks; each is completed or refused by itself, and the answer says which.

        When the call answers, every end without an error is durable.
        """
        def end(item: Complete) -> Item:
            done = self.complete(work, caller, item)
            return Item(item.task_id, done.status, obligation=done.obligation, next=done.next,
                        result_differs=done.result_differs)
        return Items([self._run_item(work, caller, end, item) for item in list_completions(ask)])

    def fail(self, work: Work, caller: Caller, ask: Fail, receipt_id: str | None = None) -> Released:
        """End an attempt that failed: the task is offered again later if retryable and attempts remain, else it fails.

        The first retry waits retry_backoff_seconds, each further one twice as long, up to 15 minutes.
        """
        error = bytes(ask.error)
        check_size(error, self.settings.max_result_bytes, "error")
        value = parse_json(error, "error")
        if lease := self._find_repeat(work, caller, ask, "failed"):
            ends = [(end.receipt_type, end.parents) for end in self._list_under_lease(work, ask)]
            retried = (FAILED.type, (lease.accepted,)) in ends      # its error is not kept, and has not ended the task
            return answer_return(work, ask.task_id, JSON_NULL if retried else ask.error)
        if self._is_told(work, caller, ask, FAILED):   # and leased again since, so it was requeued
            return Released(True, "queued", True)
        task, lease = self.require_lease(work, caller, ask)
        again = bool(ask.retryable) and not is_spent(task, task.attempt + 1)
        body = {**self._enclose_json("error", value, error, task.task_id), "attempt": task.attempt, "requeued": again,
                "retry_recommended": bool(ask.retryable), "retry_after_seconds": ask.retry_after_seconds}
        work.set_lease(replace(lease, ending="failed"), ask.cost)
        if ask.stop_limit is not None:
            until = work.now + (STOPPED_SECONDS if ask.retry_after_seconds is None else ask.retry_after_seconds)
            work.limiting.stop(ask.stop_limit, until, task)
        if again:
            return self._retry_task(work, task, lease, ask.retry_after_seconds, body, receipt_id)
        task = work.move_task(task, FAIL, completed_at=work.now, outcome=error.decode())
        if ask.retryable:       # before the end: a ledger that keeps custody hands nothing on that is closed
            self._report_loss(work, task, lease, "max_retries_exceeded")
        task = self.discharge_duty(work, task)
        ended = self.write_receipt(work, EMISSION["fail"], task, body, by=lease.worker, lease=lease,
                                   receipt_id=receipt_id)
        self.announce_end(work, task, ended, self._enclose_json("error", value, error, task.task_id))
        return Released(True, "failed", False)

    def _retry_task(self, work: Work, task: Task, lease: Lease, wished: float | None, body: dict[str, Any],
                    receipt_id: str | None) -> Released:
        attempt, most = task.attempt + 1, self.settings.max_retry_backoff_seconds
        pause = backoff(task.retry_backoff_seconds, attempt, most) if wished is None else min(wished, float(most))
        task = work.move_task(task, RETRY, attempt=attempt, next_eligible_at=work.now + pause, started_at=None,
                              held=first_answer(self.on.why_hold, work, task))
        self.write_receipt(work, EMISSION["retry"], task, body, by=lease.worker, lease=lease, receipt_id=receipt_id)
        self._tell_hold(work, task, lease)
        return answer_return(work, task.task_id)

    # Who holds a lease, and how its end is told.

    def require_lease(self, work: Work, caller: Caller, ask: LeaseAsk) -> tuple[Task, Lease]:
        """Return the task and its lease if the caller holds it, inside the transaction (spec 4.2)."""
        task, lease = work.require_task(ask.task_id), work.leases.get(ask.task_id)
        holder = self._find_holder(caller, ask, lease)
        if reason := lost(lease, holder, ask, work.now, self.settings.lease_grace_seconds):
            # How the task is doing is for those who had this lease, or own the task.
            had = lease is not None and lease.lease_id == ask.lease_id and lease.worker.same(holder)
            had = had or (isinstance(ask, Fail | ReleaseLease) and self._has_accepted(work, ask, holder))
            more = {"status": task.status} if had or caller.unlimited or task.owner.same(caller.principal) else {}
            raise LeaseInvalid(f"task {task.task_id} is not leased to this worker under {ask.lease_id} ({reason}); "
                               "drop the work, lease_next gives more", reason=reason, **more)
        assert lease is not None
        # Granted to a process that gave no name, and used by one that does.
        if holder.instance_id and lease.worker_instance is None and (
                (lease.resumed_by or "").rpartition("@")[0] != holder.instance_id):
            lease = self._note_resumption(work, lease, holder, f"{holder.instance_id}@", is_loss=True)
            task = work.tasks[ask.task_id]
        return task, lease

    def _find_holder(self, caller: Caller, ask: LeaseAsk, lease: Lease | None) -> Principal:
        """Return the worker that asks; a heartbeat that names only the lease acts for its holder."""
        if ask.worker_id is None and not caller.bound and isinstance(ask, RenewLease) and lease is not None:
            return lease.worker
        return speaker(caller, ask)

    def _find_repeat(self, work: Work, caller: Caller, ask: LeaseAsk, ending: str) -> Lease | None:
        """Return the lease if the same call of the same worker ended it: then the first outcome stands (H.3)."""
        work.require_task(ask.task_id)
        lease = work.leases.get(ask.task_id)
        again = lease is not None and (lease.lease_id, lease.ending) == (ask.lease_id, ending)
        return lease if lease and again and lease.worker.same(self._find_holder(caller, ask, lease)) else None

    def _is_told(self, work: Work, caller: Caller, ask: LeaseAsk, contract: Contract) -> bool:
        """Whether an earlier lease of this worker has a receipt of its end; a later lease has overwritten its row."""
        lease = work.leases.get(ask.task_id)
        if lease is None or lease.lease_id == ask.lease_id:
            return False
        return self._has_accepted(work, ask, speaker(caller, ask)) and any(
            end.receipt_type == contract.type and self._is_by_worker(end) for end in self._list_under_lease(work, ask))

    def _has_accepted(self, work: Work, ask: LeaseAsk, worker: Principal) -> bool:
        """Whether a worker has had a lease; known where the ask loads the receipts under the lease (its_end)."""
        receipts = self._list_under_lease(work, ask)
        return any(row.receipt_type == ACCEPTED.type and row.sender.same(worker) for row in receipts)

    def _list_under_lease(self, work: Work, ask: LeaseAsk) -> list[Receipt]:
        return [receipt for receipt in work.receipts.values()
                if (receipt.task_id, receipt.lease_id) == (ask.task_id, ask.lease_id)]

    def _is_by_worker(self, ended: Receipt) -> bool:
        """Whether the worker itself ended the lease; the body may be in the ledger only, so the key decides first."""
        mine = receipt_key(EXPIRED, ended.task_id, ended.sender, ended.lease_id, ended.parents, "released")
        return ended.receipt_type != EXPIRED.type or ended.receipt_key == mine or (
            ended.body != "" and decode_json(ended.body)["reason"] in GIVEN_BACK)

    def _find_lease_end(self, work: Work, acquired: float, wished: int | None) -> float:
        """Return when a lease runs out: its length from now, but never past its longest lifetime."""
        until = work.now + self._choose_lease_length(work, wished)
        longest = self.settings.max_lease_lifetime_seconds
        return min(until, acquired + longest) if longest else until

    def _choose_lease_length(self, work: Work, wished: int | None) -> int:
        """Return how many seconds a lease lasts: as wished, else the default, and never more than the maximum."""
        longest: int = min((self.settings.max_lease_ttl_seconds, *(limit(work) for limit in self.on.limit_lease)))
        return min(wished or self.settings.default_lease_ttl_seconds, longest)

    def discharge_duty(self, work: Work, task: Task) -> Task:
        """Close the obligation of a task, whose end is told next."""
        work.close_obligation(task.duty, task.owner)
        return work.change_task(task, owed=False)

    def announce_end(self, work: Work, task: Task, ended: Receipt, news: dict[str, Any]) -> None:
        """Tell the owner that the task has come to its end."""
        self.look_after(work, task)
        self.write_receipt(work, RESULT_READY, task, {"status": task.status, **news}, parents=(ended.receipt_id,))

    def look_after(self, work: Work, task: Task) -> None:
        """Let extensions act on a task that has asked something, and has ended, was put on hold, or is swept."""
        end_wait(work, task)
        if (row := work.progress.get(task.task_id)) is not None and row.inputs is not None:
            for look_after in self.on.look_after:
                look_after(work, task)

    def _write_anomaly(self, work: Work, task: Task, kind: str, *, lease: Lease | None = None, discriminator: str = "",
                       recommended_action: str, **details: Any) -> None:
        """Tell the owner that something looks wrong (H.7); this changes nothing, and each cause is told once."""
        body = {"kind": kind, "details": details, "recommended_action": recommended_action}
        self.write_receipt(work, ANOMALY, task, body, lease=lease, discriminator=f"{kind} {discriminator}")

    def _report_loss(self, work: Work, task: Task, lease: Lease, reason: str) -> None:
        for report_loss in self.on.report_loss:
            report_loss(work, task, lease, reason)

    def write_receipt(self, work: Work, contract: Contract, task: Task | None, body: Mapping[str, Any], *,
                      by: Principal | None = None, to: Principal | None = None, lease: Lease | None = None,
                      lease_id: str | None = None, schedule_id: str | None = None, task_id: str = "",
                      parents: tuple[str, ...] | None = None, discriminator: str = "",
                      receipt_id: str | None = None) -> Receipt:
        """Write the receipt that a contract describes; an adopted receipt keeps the id that is given."""
        owner = task.owner if task else to
        ends = {"owner": owner, "asyncgate": self.gate, "worker": by, "caller": by, "target": to}
        sender, to = ends[contract.sender], ends[contract.to]
        assert sender is not None
        assert to is not None
        if parents is None:
            answers = {"duty": task.duty if task else "", "accepted": lease.accepted if lease else ""}
            parents = (answers[contract.answers],) if contract.answers in answers else ()
        lease_id = lease.lease_id if lease else lease_id
        task_id = task.task_id if task else task_id
        fields = {name: value for name, value in body.items() if value is not None}
        if by is not None and by.instance_id is not None:
            fields["principal_instance_id"] = by.instance_id
        fields["schema_version"] = SCHEMA_VERSION
        text = to_canonical(fields)
        self._check_receipt(text, parents)
        parents = tuple(sorted(parents))
        key = receipt_key(contract, task_id, sender, lease_id, parents, discriminator)
        return work.add_receipt(Receipt(
            receipt_id or work.new_id(key), key, contract.type, work.now, sender.kind, sender.id, to.kind, to.id,
            task_id, lease_id, schedule_id, self.instance,
            receipt_hash(contract.type, sender, to, task_id, lease_id, schedule_id, parents, text),
            text.decode(), make_salt(), parents))

    def _check_receipt(self, body: bytes, parents: tuple[str, ...]) -> None:
        """Refuse a receipt that is too large, before anything is written (PH.5)."""
        limits = self.settings.receipts
        if len(body) > limits.max_body_size_bytes:
            raise ReceiptTooLarge(f"the receipt's body would be {len(body)} bytes, {limits.max_body_size_bytes} is the "
                                  "most.  Receipt bodies are contracts, not chat messages.")
        self.check_parents(parents)

    def check_parents(self, parents: tuple[str, ...]) -> None:
        """Refuse more parents than a receipt may have."""
        if len(parents) > (most := self.settings.receipts.max_parents):
            raise TooManyParents(f"{len(parents)} parents; a receipt has {most} at most (PH.5)")

    # Receipts and obligations.

    async def list_receipts(self, caller: Caller, ask: ListReceipts) -> Receipts:
        """List receipts, oldest first: an inbox, or those of one task.

        Without a recipient it is the caller's own inbox, for an admin the whole tenant's.  Follow next_cursor, or
        since_receipt_id later on: every receipt comes exactly once.
        """
        alone = self.settings.receipt_mode == "standalone"      # in a ledger there are types of others
        if alone and ask.receipt_type not in (None, *RECEIPT_TYPES):
            raise InvalidRequest(f"no receipt has the type {ask.receipt_type}: there are {', '.join(RECEIPT_TYPES)}")
        to = await self.choose_inbox(caller, ask)
        filters = ("receipts", to, ask.task_id, ask.receipt_type)
        after = await self._open_since(caller, ask.since_receipt_id or ask.cursor, *filters)
        limit = self.limit_page(ask.limit)
        query = ReceiptFilter(to, ask.task_id, ask.receipt_type, after, limit + (not ask.newest), ask.newest,
                              settled=not ask.newest)
        rows = settled = await self.backend.page(caller.tenant_id, query)
        if ask.newest and self.settings.receipt_consistency_mode == "strict":   # a reader goes on where nothing is open
            settled = await self.backend.page(caller.tenant_id, replace(query, limit=1, settled=True))
        given = ask.since_receipt_id or ask.cursor
        ends = self.seal_cursors(caller, [row.receipt_id for row in settled], limit, given, *filters)
        return Receipts([show_receipt(caller.tenant_id, row) for row in rows[:limit]], *ends)

    async def choose_inbox(self, caller: Caller, ask: ListReceipts) -> Principal | None:
        """Return whose receipts are meant; None is everybody's, of a task or of the tenant."""
        to = make_filter("to_kind", ask.to_kind, "to_id", ask.to_id) or read_principal(ask)
        if ask.task_id is not None and to is None:
            await self._check_chain(caller, ask.task_id)
        elif not caller.sees_all:
            to = self.require_self(caller, to)
        return to

    async def _check_chain(self, caller: Caller, task_id: str) -> None:
        """Refuse a caller that may not read a task's receipts; an admin may, even if the task is not stored here."""
        try:
            await self.read_task(caller, task_id)
        except TaskNotFound:
            if not caller.sees_all or not await self.backend.page(
                    caller.tenant_id, ReceiptFilter(None, task_id, None, None, 1)):
                raise

    async def get_receipt(self, caller: Caller, ask: GetReceipt) -> ReceiptRecord:
        """Return one receipt."""
        if (receipt := await self.backend.receipt(caller.tenant_id, ask.receipt_id)) is None:
            raise ReceiptNotFound(f"no receipt {ask.receipt_id}; list_receipts shows the receipts there are, and "
                                  "list_archived_receipts those in the archive")
        self.check_party(caller, caller.principal, receipt, caller.sees_all)
        return show_receipt(caller.tenant_id, receipt)

    def check_party(self, caller: Caller, who: Principal, receipt: Receipt | ReceiptRecord, anybody: bool) -> None:
        """Refuse a caller that neither sent nor received a receipt, unless `anybody` may read it."""
        if not anybody and not (receipt.to.same(who) or receipt.sender.same(who)):
            raise forbid(caller, f"receipt {receipt.receipt_id} is between others")

    def ack_receipt(self, work: Work, caller: Caller, ask: AckReceipt) -> Ok:
        """Acknowledge a receipt: writes a receipt.acknowledged, changes and discharges nothing (H.8)."""
        if (receipt := work.receipts.get(ask.receipt_id)) is None:
            raise ReceiptNotFound(f"no receipt {ask.receipt_id}; list_receipts shows the receipts there are")
        by = speaker(caller, ask)
        if not caller.unlimited and not receipt.to.same(by):
            raise forbid(caller, f"receipt {receipt.receipt_id} is addressed to another principal")
        with self.check_optional_receipts(work, receipt.task_id):
            acked = self.write_receipt(work, ACKNOWLEDGED, None, {"receipt_id": receipt.receipt_id}, by=by,
                                       parents=(receipt.receipt_id,), task_id=receipt.task_id)
        return Ok(True, receipt_id=acked.receipt_id)

    async def check_terminator(self, caller: Caller, ask: CheckTerminator) -> Terminator:
        """Tell whether an obligation is discharged, as the receipts prove it."""
        parent = await self.backend.receipt(caller.tenant_id, ask.parent_receipt_id)
        by = TERMINATES.get(parent.receipt_type) if parent else None
        done = by is not None and await self.backend.terminated(caller.tenant_id, ask.parent_receipt_id, by)
        if parent is None and (away := await self.backend.record(caller.tenant_id, Archived, ask.parent_receipt_id)):
            done = away.receipt_type in TERMINATES      # only what is discharged moves to the archive
        return Terminator(ask.parent_receipt_id, done)

    async def list_open_obligations(self, caller: Caller, ask: ListOpenObligations) -> Obligations:
        """List what is still owed to a principal: obligations that no receipt has discharged, oldest first.

        This is the call to begin with after forgetting everything.  Go on with cursor as since_receipt_id.  PH.6.
        """
        who = self.require_subject(caller, ask)
        after = await self._open_since(caller, ask.since_receipt_id, "obligations", who)
        rows = await self.backend.page(caller.tenant_id, ObligationFilter(
            who, after, self.limit_page(ask.limit), settled=True))
        return Obligations(self._describe_server(), await self._read_relationship(caller, who),
                           [show_receipt(caller.tenant_id, row) for row in rows],
                           rows[-1].receipt_id if rows else ask.since_receipt_id)

    def require_subject(self, caller: Caller, ask: AsEither) -> Principal:
        """Return the principal that is asked about; only an admin may ask about another."""
        named = self.read_subject(caller, ask, "principal_kind and principal_id")
        return named if caller.sees_all else self.require_self(caller, named)

    def read_subject(self, caller: Caller, ask: Ask, name: str) -> Principal:
        """Return whom a read is about; a credential that stands for everybody must name somebody."""
        if not caller.bound and read_principal(ask) is None:
            raise InvalidRequest(f"this credential stands for everybody: send {name} of whoever is meant")
        return speaker(caller, ask)

    async def bootstrap(self, caller: Caller, ask: Bootstrap) -> Welcome:
        """Begin a session with the receipts in one's inbox; deprecated, call list_open_obligations instead (PH.6.3).

        Without a cursor these are the most recent ones, oldest first (13).
        """
        who, most = self.require_subject(caller, ask), self.settings.max_bootstrap_max_items
        wished = ask.max_items or ask.limit or self.settings.default_bootstrap_max_items
        after = await self._open_since(caller, ask.since_receipt_id, "bootstrap", who)
        rows = await self.backend.page(caller.tenant_id, ReceiptFilter(who, None, None, after, min(wished, most),
                                                                           newest=after is None))
        log.warning("deprecated: bootstrap was called by %s; list_open_obligations supersedes it", who)
        if fresh := [row.receipt_id for row in rows if row.delivered_at is None]:
            await self.write(Engine._stamp_deliveries, None, caller, Delivered(receipts=fresh))
        warnings = [warning for list_warnings in self.on.list_warnings for warning in await list_warnings(caller)]
        return Welcome(self._describe_server(), await self._read_relationship(caller, who),
                       Attention([show_receipt(caller.tenant_id, row) for row in rows]),
                       LatestReceipt(rows[-1].receipt_id if rows else ask.since_receipt_id), self.settings.environment,
                       warnings=warnings)

    def _stamp_deliveries(self, work: Work, caller: Caller, ask: Delivered) -> None:
        for receipt_id in ask.receipts:
            work.stamp_delivery(receipt_id)

    def _describe_server(self) -> Server:
        return Server("AsyncGate", __version__, self.instance, self.settings.environment, self._count_uptime())

    def _count_uptime(self) -> int:
        return int(time.monotonic() - self.born)

    async def _read_relationship(self, caller: Caller, who: Principal) -> Relationship:
        stored = await self.backend.record(caller.tenant_id, Presence, who.kind, who.id)
        known = self.sightings.known(caller.tenant_id, who, stored, self.backend.now())
        return Relationship(who.kind, who.id, who.instance_id or known.instance_id, to_utc(known.first_seen_at),
                            to_utc(known.last_seen_at), known.sessions)

    # About the gate itself.

    async def get_config(self, caller: Caller, ask: GetConfig) -> GateConfig:
        """Return how this gate is set up: receipt mode, instance, version and what it can do."""
        url = self.settings.ledger.address if self.settings.receipt_mode != "standalone" else None
        return GateConfig(self.settings.receipt_mode, url, self.instance,
                             ["lease_based_execution", "receipt_emission", "open_obligations", "batch_operations"],
                             __version__, max_progress_bytes=self.settings.max_progress_bytes)

    async def health(self, caller: Caller, ask: Health) -> Healthy:
        """Tell whether the gate works: its database answers, and its upkeep jobs run."""
        try:
            await self.backend.alive()
            database: Literal["ok", "unavailable"] = "ok"
        except Exception:
            log.exception("the database does not answer")
            database = "unavailable"
        reply = Healthy("healthy" if database == "ok" else "unhealthy", "AsyncGate", __version__, self.instance,
                        self._count_uptime(), database, {})
        for describe_health in self.on.describe_health:
            await describe_health(reply)
        if reply.status != "healthy":
            raise DatabaseUnavailable("the database does not answer", retry_after=1, **msgspec.to_builtins(reply))
        return reply

    # Upkeep's own writes.

    def sweep(self, work: Work, caller: Caller, ask: Sweep) -> None:
        """Take back tasks whose lease ran out; report deadlines and spent attempts (H.7)."""
        for task_id in ask.tasks:
            with contextlib.suppress(TaskNotFound), work.undo_on_error():
                self._sweep_task(work, work.require_task(task_id), len(ask.tasks))

    def _sweep_task(self, work: Work, task: Task, crowd: int) -> None:
        lease = work.leases.get(task.task_id)
        if lease and is_lost(task, lease, work.now, self.settings.lease_grace_seconds):
            self._expire_lease(work, task, lease, crowd)
            task = work.tasks[task.task_id]     # a question that has run out may have ended it
        if is_late(task, work.now):
            task = work.change_task(task, deadline_at=None)
            self._write_anomaly(work, task, "deadline_passed", status=task.status,
                                recommended_action="Wait for the result, or cancel the task.")
        if is_stuck(task):
            self._write_anomaly(work, task, "attempts_spent_but_queued", attempt=task.attempt,
                                recommended_action="Cancel the task, or report this as a defect of the gate.")
        self.look_after(work, work.tasks[task.task_id])

    def _expire_lease(self, work: Work, task: Task, lease: Lease, crowd: int) -> None:
        """Requeue a task whose lease was lost, which is not a failure (PH.4); put it on hold after too many losses."""
        held = "lease_expiries" if would_hold(task) else first_answer(self.on.why_hold, work, task)
        pause = jitter(lease.lease_id, self.settings.expiry_jitter_seconds, crowd)
        work.set_lease(replace(lease, ending="expired"))
        # Clarification C: only a task's own instance sweeps it, so this one takes it over first (docs/design.md).
        task = work.move_task(task, EXPIRE, held=held, started_at=None, asyncgate_instance=self.instance,
                              next_eligible_at=work.now + pause if pause else None, **add_loss(task, lease))
        self.write_receipt(work, EMISSION["expire"], task, self.describe_expiry(task, lease, "expired"), lease=lease)
        self._report_loss(work, task, lease, "lease_expired")
        self._warn_of_losses(work, task)
        self._tell_hold(work, task, lease)

    def _warn_of_losses(self, work: Work, task: Task) -> None:
        if task.expiries == STUCK_EXPIRIES + 1:
            self._write_anomaly(work, task, "lease_expired_often", expiries=task.expiries,
                                recommended_action="Look at the workers of this type.")

    def _tell_hold(self, work: Work, task: Task, lease: Lease) -> None:
        """Tell the owner of a task that is on hold, unless it waits for an answer or its children."""
        if task.held in AWAITING:
            self.look_after(work, task)
        elif task.held:
            work.add_event(task.task_id, "task.held", held=task.held, expiries=task.expiries)
            text = progress.progress.encode() if (progress := work.progress.get(task.task_id)) else b"null"
            # A receipt that is too large is refused, and the lease could never be taken back.  Numbers may get four
            # times as long: 1e15 is told as 1000000000000000.0.
            most = min(self.settings.inline_result_bytes, self.settings.receipts.max_body_size_bytes // 4)
            last = self._enclose_json("last_progress", decode_json(text), text, task.task_id, most)
            self._write_anomaly(work, task, "task_held", lease=lease, expiries=task.expiries,
                                workers=sorted(set(decode_json(task.lost_to))), held=task.held,
                                **(last or {"last_progress": None}),
                                recommended_action="Call release_hold to offer it again, or cancel_task.")

    def describe_expiry(self, task: Task, lease: Lease, reason: str) -> dict[str, Any]:
        """Return the body of a lease.expired."""
        return {"task_id": task.task_id, "previous_worker_id": lease.worker_id, "attempt": task.attempt,
                "requeued": task.held is None, "reason": reason}

    # What happens after a commit, and small things.

    def _after_commit(self, work: Work) -> None:
        """Wake the calls that wait for this batch's changes; nobody may learn of them before the commit."""
        for task in (changed := (*work.added.values(), *work.moved.values())):
            if task.status == "queued":
                self.waiting.offer_task(work.tenant_id, task, work.now)
        if work.tenant_id in self.readers.seats:
            self.readers.announce(work.tenant_id, changed, work.written.values())
        if self.shared and not self.shared.is_alone() and (news := news_of(work)):
            self.shared.tell(news)
        if work.leased:
            self.sightings.leases.append((work.tenant_id, work.leased.values(), work.now))
            if len(self.sightings.leases) >= MOST_CALLS:
                self.sightings.count()
        if (first_end := self.granted.note(work.leased, work.now)) is not None:
            for after_grant in self.on.after_grant:
                after_grant(work.tenant_id, first_end)
        for note_pauses in self.on.note_pauses if work.find_loaded(Pauses) is not None else ():
            note_pauses(work)
        for after_commit in self.on.after_commit:
            after_commit(work)
        for after_record_change in self.on.after_record_change if work.kept else ():
            after_record_change(work)

    def hear_news(self, news: News) -> None:
        """Wake the calls that wait for another process's changes."""
        for hear_news in self.on.hear_news:
            hear_news(news)
        self.waiting.hear_news(news)
        self.readers.hear(news)

    def drain(self, longest_wait: float = 0.0) -> None:
        """Answer each call that waits for longer than this, now and from here on: the server is about to stop."""
        self.longest_wait = longest_wait
        self.waiting.wake_all()
        self.readers.wake_all()

    def limit_page(self, wished: int | None) -> int:
        """Return how many rows a page has."""
        return min(wished or self.settings.default_list_limit, self.settings.max_list_limit)

    def seal_cursor(self, caller: Caller, position: str, *query: Any) -> str:
        """Seal a position for this tenant and this query, so that nobody can make one up."""
        seal = hmac.digest(self.backend.secret, to_canonical((caller.tenant_id, query, position)), "sha256")[:12]
        return base64.urlsafe_b64encode(seal + position.encode()).decode().rstrip("=")

    def seal_cursors(self, caller: Caller, places: list[str], limit: int, given: str | None,
                     *query: Any) -> tuple[str | None, str | None]:
        """Return next_cursor (null at the end) and cursor: the last place seen, or the given one if none was (17).

        `places` are the places of a page, and one more where there is more.
        """
        cursor = self.seal_cursor(caller, places[:limit][-1], *query) if places else given
        return (cursor if len(places) > limit else None), cursor

    def open_cursor(self, caller: Caller, cursor: str | None, *query: Any) -> str | None:
        """Open a cursor that `cursor` made for the same tenant and query."""
        if cursor is None:
            return None
        with contextlib.suppress(ValueError):
            position = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))[12:].decode()
            if hmac.compare_digest(cursor.encode(), self.seal_cursor(caller, position, *query).encode()):
                return position
        raise InvalidCursor("this cursor was not given for this list; begin again without one")

    async def _open_since(self, caller: Caller, cursor: str | None, *query: Any) -> str | None:
        """Open a cursor, or take a receipt of this tenant for one."""
        if cursor is not None and await self.has_receipt(caller, cursor):
            return cursor
        return self.open_cursor(caller, cursor, *query)

    async def has_receipt(self, caller: Caller, receipt_id: str) -> bool:
        """Whether the tenant has a receipt, perhaps in the archive: its reader went on from there before it moved."""
        return await self.backend.receipt(caller.tenant_id, receipt_id) is not None or (
            await self.backend.record(caller.tenant_id, Archived, receipt_id) is not None)


# BATCHES ##############################################################################################################


SLICE_SECONDS = 0.05        # that deciding a batch may take; what is left over waits until other tenants had their turn


class Job:
    """One write on its way through a batch."""

    def __init__(self, run: Callable[[Work, Caller, Any], Any], loads: Loads | None, caller: Caller, ask: Ask) -> None:
        self.run, self.loads, self.caller, self.ask = run, loads, caller, ask
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.reply: Any = None
        self.error: Exception | None = None
        self.left = False           # for the next batch: this one has taken long enough, or has not loaded all
        self.sought = Needs()       # tasks and records that it turned out to need

    def decide(self, work: Work) -> None:
        """Run the operation; if it fails, leave `work` as if it had never been asked."""
        if self.answer.cancelled():
            return  # the client has gone: what nobody waits for is not started
        savepoint = work.savepoint()
        try:
            self.reply, self.error = self.run(work, self.caller, self.ask), None
        except Unloaded as unloaded:
            work.take_back(savepoint)
            self.left = True
            self.sought.add(unloaded)
        except Exception as problem:     # a bug in one operation must spare the others too
            work.take_back(savepoint)
            self.error = problem if isinstance(problem, GateError) else log_fault(type(self.ask).__name__, problem)

    def settle(self, error: Exception | None = None) -> None:
        """Answer the waiting caller, if it is still there."""
        if self.answer.done():
            return
        if problem := error or self.error:
            self.answer.set_exception(problem)
        else:
            self.answer.set_result(self.reply)


class Batches:
    """The writes under way: one queue per tenant, tenants take turns, one list per event-loop tick.

    While several tenants are about, batches are small, by what they do: a single write waits for another's batch under
    way.
    """

    MIXED_SIZE, MIXED_SECONDS = 8, 1.0
    LARGE, LARGEST_SLICE = 50, 100      # a list that shares no commit; of one call, for somebody may come meanwhile

    def __init__(self, backend: Backend, size: int, after_commit: Callable[[Work], None]) -> None:
        self.backend, self.size, self.after_commit = backend, size, after_commit
        self.transact: Transact = backend.transact      # or what an extension puts around it
        self.waiting: dict[str, list[Job]] = {}         # in the order of the tenants' turns
        self.under_way: defaultdict[str, list[int]] = defaultdict(list)     # sizes
        self.flights: set[asyncio.Task[None]] = set()
        self.called, self.running, self.slices = False, 0, SliceTurns()     # a departure is planned; batches under way
        self.last, self.mixed_until = "", 0.0           # who came last, and how long several tenants are about

    def join(self, tenant_id: str, job: Job) -> asyncio.Future[Any]:
        """Put a job into the tenant's next batch; its answer comes when the batch is durable."""
        if tenant_id != self.last:
            self.mixed_until = time.monotonic() + self.MIXED_SECONDS if self.last else 0.0
            self.last = tenant_id
        self.waiting.setdefault(tenant_id, []).append(job)
        if self._may_launch(tenant_id):
            self._plan_departure()
        return job.answer

    def find_slice_size(self, most: int = LARGEST_SLICE) -> int:
        """Return how many items of a call may be decided together now."""
        return min(most, self.MIXED_SIZE) if self._is_mixed() else most

    def take_slice(self, tenant_id: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a block in which a call may write one of its slices."""
        return self.slices.take(tenant_id, self._is_mixed())

    def _is_mixed(self) -> bool:
        return time.monotonic() <= self.mixed_until

    async def wait_for_all(self) -> None:
        """Wait until nothing is under way."""
        while self.flights or self.waiting:
            await asyncio.sleep(0) if not self.flights else await asyncio.wait(self.flights)

    def _may_launch(self, tenant_id: str) -> bool:
        """Whether another batch may start: beside a running one only if it is as large, or large enough."""
        sizes, waiting = self.under_way.get(tenant_id, ()), self.waiting[tenant_id]
        return (self.running < self.backend.parallel and len(sizes) < self.backend.parallel_per_tenant
                and (len(waiting) >= sum(sizes) or waiting[0].ask.weigh() >= self.LARGE))

    def _plan_departure(self) -> None:
        if not self.called:     # not at once: what else arrives in this tick shall share the commit
            self.called = True
            self._start_flight(self._launch_batches())

    def _start_flight(self, work: Coroutine[Any, Any, None]) -> None:
        self.flights.add(flight := asyncio.get_running_loop().create_task(work))
        flight.add_done_callback(self.flights.discard)

    async def _launch_batches(self) -> None:
        """Carry out what waits; a single batch in this task, because that saves making another one."""
        self.called = False
        leaving = [(tenant_id, self._take_batch(tenant_id)) for tenant_id in list(self.waiting)
                   if self._may_launch(tenant_id)]
        if len(leaving) == 1:
            return await self._run_batch(*leaving[0])
        for tenant_id, jobs in leaving:
            self._start_flight(self._run_batch(tenant_id, jobs))

    def _take_batch(self, tenant_id: str) -> list[Job]:
        """Take the jobs of a tenant's next batch out of its queue."""
        waiting, size = self.waiting.pop(tenant_id), self.size
        if self._is_mixed():
            room = min(size, self.MIXED_SIZE)
            costs = accumulate(job.ask.weigh() for job in waiting)
            size = max(1, sum(1 for _ in takewhile(lambda cost: cost <= room, costs)))
        jobs, later = waiting[:size], waiting[size:]
        if later:
            self.waiting[tenant_id] = later             # at the end: the others' turn comes first
        self.under_way[tenant_id].append(len(jobs))
        self.running += 1
        return jobs

    async def _run_batch(self, tenant_id: str, jobs: list[Job]) -> None:
        try:
            await self._carry_out(tenant_id, jobs)
        finally:
            self.running -= 1
            self.under_way[tenant_id].remove(len(jobs))
            if not self.under_way[tenant_id]:
                del self.under_way[tenant_id]
            if self.waiting:
                self._plan_departure()

    async def _carry_out(self, tenant_id: str, jobs: list[Job]) -> None:
        decided, needs = list[Work](), gather_needs(jobs)
        if needs.alone and len(jobs) > 1:       # the others would go by what was before that one
            await self._carry_out(tenant_id, jobs[:len(jobs) // 2])
            return await self._carry_out(tenant_id, jobs[len(jobs) // 2:])
        try:
            await self.transact(tenant_id, needs, partial(decide, jobs, decided))
            error: Exception | None = None
        except Refused as refused:
            if len(jobs) > 1:
                return await self._carry_out_alone(tenant_id, jobs)
            why = refused.__cause__
            error = why if isinstance(why, GateError) else log_fault(type(jobs[0].ask).__name__, refused)
        except GateError as refusal:
            error = refusal
        except Exception as broken:
            log.error("nobody knows what became of a batch of %d", len(jobs), exc_info=broken, extra=OFTEN)
            error = outcome_unknown()
        if error is None and (left := [job for job in jobs if job.left]):
            self.waiting[tenant_id] = left + self.waiting.pop(tenant_id, [])    # at the end: others come first
            jobs = [job for job in jobs if not job.left]
        for job in jobs:
            job.settle(error)       # whoever waits goes on in the next tick
        if error is None:
            self.after_commit(*decided)

    async def _carry_out_alone(self, tenant_id: str, jobs: list[Job]) -> None:
        """Run each job of a refused batch alone, so that only the one at fault fails."""
        for job in jobs:
            await self._carry_out(tenant_id, [job])


def gather_needs(jobs: list[Job]) -> Needs:
    """Gather what the jobs of a batch need loaded."""
    needs = Needs(calls=sum(job.ask.weigh() for job in jobs))
    for job in jobs:
        needs.add(job.sought)
        try:
            if job.loads is not None:
                job.loads(needs, job.caller, job.ask)
        except GateError:
            continue    # it is refused when it is decided
    return needs


def decide(jobs: list[Job], decided: list[Work], work: Work) -> None:
    """Decide a batch, one operation after another; a repeated attempt starts from nothing."""
    until = time.monotonic() + SLICE_SECONDS
    for number, job in enumerate(jobs):
        if not decided:         # else it is decided once more, and the same are left over
            job.left = number > 0 and time.monotonic() > until
        if not job.left:
            job.decide(work)
    decided[:] = [work]


# OPERATIONS ###########################################################################################################

# What an ask wants loaded, said before the transaction begins.

Loads = Callable[[Needs, Caller, Any], None]


def its_task(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load the task that the ask names, with its lease and progress."""
    needs.tasks.add(ask.task_id)


def its_tasks(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load the tasks that the ask lists."""
    needs.tasks.update(ask.tasks)


def its_end(needs: Needs, caller: Caller, ask: LeaseAsk) -> None:
    """Load the task and the receipts under the lease: an end may be repeated after a later lease."""
    its_task(needs, caller, ask)
    needs.endings.add((ask.task_id, ask.lease_id))


def its_failure(needs: Needs, caller: Caller, ask: Fail) -> None:
    """Load also the limit that is stopped."""
    its_end(needs, caller, ask)
    if ask.stop_limit is not None:
        needs.records.add((stored_limits.Limit, (ask.stop_limit,)))


def its_lease(needs: Needs, caller: Caller, ask: RenewLease) -> None:
    """Load the task that the ask names, or the one behind the lease."""
    (needs.tasks if ask.task_id else needs.leases).add(ask.task_id or ask.lease_id)


def its_key(needs: Needs, caller: Caller, ask: CreateTask) -> None:
    """Load the task that the same creator made under the same idempotency key, the parent, and who holds its key."""
    if ask.parent_task_id is not None:
        needs.tasks.add(lower_id(ask.parent_task_id))
    if ask.idempotency_key is not None:
        creator = speaker(caller, ask)
        needs.keys.add((creator.kind, creator.id, ask.idempotency_key))
    if ask.unique is not None:
        needs.records.add((stored_unique.UniqueKey, (hash_key(speaker(caller, ask), ask.type, ask.unique.key),)))


def its_claim(needs: Needs, caller: Caller, ask: LeaseNext) -> None:
    """Load claimable tasks, and what the same claim got before."""
    needs.claims.append(ask)
    if ask.claim_id is not None:
        worker = speaker(caller, ask)
        needs.repeats.add((worker.kind, worker.id, ask.claim_id))


def its_receipt(needs: Needs, caller: Caller, ask: AckReceipt) -> None:
    """Load the receipt, with its children."""
    needs.receipts.add(ask.receipt_id)


def of_each(loads: Loads, items: Callable[[Any], Iterable[Any]]) -> Loads:
    """Load what every item of a batch needs."""
    def load(needs: Needs, caller: Caller, ask: Any) -> None:
        for item in items(ask):
            try:
                if not isinstance(item, Unreadable):
                    loads(needs, caller, item)
            except GateError:
                continue        # it is refused when it is decided, the others are not
    return load


ADMIN_SCOPES = {"W": ["admin:write"], "R": ["admin:read", "admin:write"], "B": []}      # spec 21.8.3


class Operation:
    """One thing the gate can do: an Engine method, what it loads, and where the world finds it.

    The line in the table says who may do it and how it behaves.  The request Struct says what it takes, gives an
    example and names its refusals; the reply Struct says how a table shows it.  Every face is made from these.
    """

    ROLES: ClassVar[dict[str, Role]] = {"a": "agent", "w": "worker", "A": "admin", "s": "system"}

    def __init__(self, run: Callable[..., Any], rest: str, roles: str, scopes: str, kind: Literal["W", "R", "B"],
                 loads: Loads | None = None, *, idempotent: bool = False, heartbeat: bool = False,
                 ends_leases: bool = False, successor: str = "", nothing: str = "") -> None:
        hints = get_type_hints(run)
        self.run, self.name, self.kind, self.loads = run, run.__name__, kind, loads
        self.rest = [(way.split()[0], way.split()[1]) for way in rest.split(", ")]
        self.roles = tuple(self.ROLES[letter] for letter in roles.split())
        self.scopes = frozenset(scopes.split() + (ADMIN_SCOPES[kind] if scopes else []))
        self.scope = scopes             # what the table says; an admin's scopes are good for all
        self.open = not roles           # no credential needed
        self.idempotent = idempotent or kind != "W"         # what MCP is told of it
        self.heartbeat = heartbeat      # it keeps a lease, and is counted apart from other calls
        self.ends_leases = ends_leases  # it is counted, but no limit of calls refuses it: finished work would be lost
        self.successor, self.nothing = successor, nothing   # what to call instead; what no answer means (204)
        self.takes: type[Ask] = hints["ask"]
        self.gives: type[Struct] = next(kind for kind in (*get_args(hints["return"]), hints["return"])
                                        if kind is not type(None))
        self.columns: list[str] = getattr(self.gives, "columns", "").split()
        self.direct = inspect.iscoroutinefunction(run)
        self.reader: Reader[Ask] = Reader(self.takes, self.takes.filters or self.roles == ("admin",))
        self.summary, _, self.text = (inspect.getdoc(run) or "").partition("\n")

    def fits(self, caller: Caller) -> bool:
        """Whether a credential may ask this at all, by its role and one of its scopes."""
        return self.open or (caller.role in self.roles and not (self.scopes and self.scopes.isdisjoint(caller.scopes)))


EVERYONE = "a w A"
CORE_OPERATIONS = {op.name: op for op in (
    Operation(Engine.lease_next, "POST /v1/leases/claim", "w A", "tasks:lease", "W", its_claim),
    Operation(Engine.create_task, "POST /v1/tasks", "a A s", "tasks:write", "W", its_key),
    Operation(Engine.complete, "POST /v1/tasks/{task_id}/complete", "w A", "tasks:lease", "W", its_task,
              idempotent=True, ends_leases=True),
    Operation(Engine.get_task, "GET /v1/tasks/{task_id}", "a w A s", "tasks:read tasks:lease", "R"),
    Operation(Engine.renew_lease, "POST /v1/leases/renew, POST /v1/leases/{lease_id}/extend", "w A", "tasks:lease", "W",
              its_lease, idempotent=True, heartbeat=True),
    Operation(Engine.report_progress, "POST /v1/tasks/{task_id}/progress", "w A", "tasks:lease", "W", its_task,
              heartbeat=True),
    Operation(Engine.fail, "POST /v1/tasks/{task_id}/fail", "w A", "tasks:lease", "W", its_failure,
              idempotent=True, ends_leases=True),
    Operation(Engine.create_tasks, "POST /v1/tasks/batch", "a A", "tasks:write", "W", of_each(its_key, list_creations)),
    Operation(Engine.complete_tasks, "POST /v1/tasks/complete-batch", "w A", "tasks:lease", "W",
              of_each(its_task, list_completions), idempotent=True, ends_leases=True),
    Operation(Engine.run_task, "POST /v1/tasks/run", "a A", "tasks:write", "W", its_key),
    Operation(Engine.get_task_history, "GET /v1/tasks/{task_id}/history", EVERYONE, "tasks:read tasks:lease", "R"),
    Operation(Engine.cancel_task, "POST /v1/tasks/{task_id}/cancel", "a A s", "tasks:write", "W", families.its_cascade,
              idempotent=True),
    Operation(Engine.attach_artifacts, "POST /v1/tasks/{task_id}/artifacts", EVERYONE, "tasks:write tasks:lease", "W",
              its_task, idempotent=True),
    Operation(Engine.release_hold, "POST /v1/tasks/{task_id}/release", "a A", "tasks:write", "W", its_task),
    Operation(Engine.start_task, "POST /v1/tasks/{task_id}/running", "w A", "tasks:lease", "W", its_task,
              idempotent=True),
    Operation(Engine.release_lease, "POST /v1/leases/release", "w A", "tasks:lease", "W", its_end, idempotent=True,
              ends_leases=True),
    Operation(Engine.list_leases, "GET /v1/leases", "w A", "tasks:lease", "R"),
    Operation(Engine.list_receipts, "GET /v1/receipts", "a w A s", "receipts:read", "R"),
    Operation(Engine.get_receipt, "GET /v1/receipts/{receipt_id}", EVERYONE, "receipts:read", "R"),
    Operation(Engine.ack_receipt, "POST /v1/receipts/{receipt_id}/ack", EVERYONE, "receipts:ack", "W", its_receipt,
              idempotent=True),
    Operation(Engine.check_terminator, "POST /v1/receipts/check-terminator", EVERYONE, "receipts:read", "R"),
    Operation(Engine.list_open_obligations, "GET /v1/obligations/open", EVERYONE, "receipts:read", "R"),
    Operation(Engine.bootstrap, "GET /v1/bootstrap", EVERYONE, "receipts:read", "W", idempotent=True,
              successor="list_open_obligations"),
    Operation(Engine.get_config, "GET /v1/config", EVERYONE, "", "B"),
    Operation(Engine.health, "GET /v1/health, GET /health", "", "", "B"),
)}


if __name__ == "__main__":
    from asyncgate.commands.main import main as only    # one copy of every class: the parts import `asyncgate`

    sys.exit(only())
