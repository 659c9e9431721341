"""What a database keeps: one Struct for each table that rules work on.

They hold scalars in column order, so `Task(*row)` loads and `astuple(task)` saves on any database.  Times are Unix
seconds inside and RFC 3339 outside; JSON that the gate does not read stays the text it came as.  The tenant is beside
them: it leads each key.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from asyncgate.parts.model.wire import Kind, Principal, Role, Status, Terms

# The states of a task (spec 5): before a lease, under one, at the end.
QUEUED, ACTIVE, TERMINAL = frozenset({"queued"}), frozenset({"leased", "running"}), frozenset(
    {"succeeded", "failed", "canceled"})


class Task(Struct, frozen=True):
    """One piece of work, from its creation to its end."""

    task_id: str
    lane: int
    type: str
    payload: str
    payload_pointer: str | None
    requirements: str
    terms: str                          # the rest of the contract, a KeptTerms as JSON
    owner_kind: str
    owner_id: str
    principal_ai: str
    priority: int
    max_attempts: int
    retry_backoff_seconds: int
    max_expiries: int
    created_at: float
    duty: str                           # the task.assigned receipt that the end of the task discharges
    idempotency_key: str | None
    fingerprint: str | None             # of the request that carried the key
    asyncgate_instance: str             # from here on: what may change
    updated_at: float
    status: Status = "queued"
    attempt: int = 0
    fence: int = 0
    expiries: int = 0
    owed: bool = True                   # the duty is not discharged yet
    held: str | None = None             # why a queued task is not offered
    lost_to: str = "[]"                 # workers whose lease ran out, for the anomaly of a held task
    next_eligible_at: float | None = None
    deadline_at: float | None = None    # until it has been reported
    started_at: float | None = None
    completed_at: float | None = None
    outcome: str | None = None          # the result or the error, as JSON
    artifacts: str | None = None
    handed: str | None = None           # how a ledger that keeps custody was last given it back, as JSON

    @property
    def owner(self) -> Principal:
        """Return the principal that the task belongs to, for ever (H.1)."""
        return Principal(self.owner_kind, self.owner_id)

    def offerable(self, now: float) -> bool:
        """Whether the queue may offer it, if it is queued."""
        return self.held is None and (self.next_eligible_at is None or self.next_eligible_at <= now)


class KeptTerms(Terms):
    """What is stored of a task's terms."""

    principal_instance_id: str | None = None    # in which session it was created (spec 18.2)


class Lease(Struct, frozen=True):
    """The latest claim on a task; it stays after its end, so that replays and latecomers get a true answer."""

    task_id: str
    lease_id: str
    worker_kind: str
    worker_id: str
    worker_instance: str | None
    fence: int
    acquired_at: float
    expires_at: float
    renewals: int
    accepted: str                       # the task.accepted receipt
    claim_id: str | None = None
    ending: str = "live"                # or completed, failed, expired, released, canceled
    ttl_seconds: int | None = None      # how long it was granted for; None: by a release that did not write it down
    resumed_by: str | None = None       # the instance that took it up again last, "" if that gave no name
    resumptions: int = 0                # how often it was taken up again, as far as that is told

    @property
    def worker(self) -> Principal:
        """Return the principal that holds or held the lease."""
        return Principal(self.worker_kind, self.worker_id, self.worker_instance)


class Progress(Struct, frozen=True):
    """The last progress of a task; the next worker is handed it as a checkpoint."""

    task_id: str
    progress: str
    sequence: int
    fence: int
    updated_at: float


class Receipt(Struct, frozen=True):
    """One fact, never changed."""

    receipt_id: str
    receipt_key: str
    receipt_type: str
    created_at: float
    from_kind: str
    from_id: str
    to_kind: str
    to_id: str
    task_id: str                        # empty when it belongs to no task
    lease_id: str | None
    schedule_id: str | None
    asyncgate_instance: str
    hash: str
    body: str
    parents: tuple[str, ...] = ()
    delivered_at: float | None = None   # telemetry, kept elsewhere

    @property
    def sender(self) -> Principal:
        """Return who states the fact."""
        return Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> Principal:
        """Return whose inbox it lies in."""
        return Principal(self.to_kind, self.to_id)


class Event(Struct, frozen=True):
    """Something that happened to a task and is no contract, so has no receipt (spec 3)."""

    event_id: str
    task_id: str
    event_type: str
    payload: str
    created_at: float


class Schedule(Struct, frozen=True):
    """What a scheduler last said of one of its schedules."""

    schedule_id: str
    owner_kind: str
    owner_id: str
    scheduler_kind: str
    scheduler_id: str
    created: str                        # the schedule.created receipt
    enabled: bool = False
    next_run_at: float | None = None
    interval_seconds: float | None = None
    late_at: float | None = None        # when its silence becomes an anomaly, until that is reported

    @property
    def scheduler(self) -> Principal:
        """Return who runs it."""
        return Principal(self.scheduler_kind, self.scheduler_id)


class Presence(Struct, frozen=True):
    """Since when, and in how many sessions, a principal has been talking to the gate."""

    kind: str
    id: str
    instance_id: str | None
    first_seen_at: float
    last_seen_at: float
    sessions: int


class Obligation(Struct, frozen=True):
    """An open obligation: the index entry beside the receipt that opened it."""

    receipt_id: str
    to_kind: str
    to_id: str


class Outgoing(Struct, frozen=True):
    """A receipt on its way to the ledger, as the text that is sent, however often."""

    receipt_id: str
    task_id: str                        # receipts of one task are sent in their order
    content: str
    posted_at: float
    state: Literal["waiting", "parked"] = "waiting"     # parked: the ledger refuses it, and will not be asked again
    reason: str | None = None           # what the ledger said last
    tries: int = 0                      # that brought no answer


class Entry(Struct, frozen=True):
    """A receipt that somebody has stored here, where the gate plays the ledger: append-only."""

    receipt_id: str                     # the author's: any text
    arrival: str                        # UUIDv7: the order in which readers get them
    receipt_type: str
    task_id: str                        # empty when it belongs to no task
    from_kind: str
    from_id: str
    to_kind: str
    to_id: str
    asyncgate_instance: str             # which gate wrote it; empty when none did
    digest: str                         # of what it says: the same id may not say something else
    content: str                        # as it came
    stated_kind: str = ""               # of the principal whose credential it came with; empty: by an older release
    stated_id: str = ""                 # and its id
    stated_role: str = ""               # and the role of the credential

    @property
    def stated_by(self) -> Principal | None:
        """Return who has stated it, as far as that is known; `sender` is who it says it is from."""
        return Principal(self.stated_kind, self.stated_id) if self.stated_kind else None

    @property
    def sender(self) -> Principal:
        """Return who states it."""
        return Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> Principal:
        """Return whose inbox it lies in."""
        return Principal(self.to_kind, self.to_id)


class LedgerMark(Struct, frozen=True):
    """How far the ledger was looked through for what workers state there themselves."""

    name: str                           # of what is looked for
    receipt_id: str                     # the last one seen


class Lag(Struct, frozen=True):
    """How far the ledger is behind what a tenant has done."""

    waiting: int = 0
    parked: int = 0
    oldest_at: float | None = None      # since when the first one has been waiting


class Key(Struct, frozen=True):
    """An issued key as it is stored; the tenant is beside it."""

    key_id: str
    hash: str                           # Argon2id of the secret, as a PHC string
    name: str
    principal_kind: Kind
    principal_id: str
    principal_instance_id: str | None
    role: Role
    scopes: str                         # JSON, a sorted array; so are the next two
    capabilities: str | None            # those that it may claim tasks for; None is any
    task_types: str | None
    not_before: float
    expires_at: float | None
    revoked_at: float | None
    rotated_to: str | None              # the key that takes its place
    version: int                        # of the hash
    created_at: float
    created_by: str
    last_used_at: float | None = None
    places: str | None = None           # JSON, an array: the networks that it was used from, the last first

    def __repr__(self) -> str:
        return f"<Key {self.key_id}>"   # the hash stays out of logs and tracebacks


class Account(Struct, frozen=True):
    """What is agreed with a tenant: without one it has the default tier and no name."""

    name: str
    created_at: float
    tier: str = ""                      # empty is the default
    suspended_at: float | None = None   # since when none of its credentials is good
    exempt_until: float | None = None   # from rate limits and quotas (spec 21.4.5)
    exempt_why: str | None = None
    stricter_calls: int | None = None   # an hour, which is all that it may make until a time (spec 21.9.2)
    stricter_tasks: int | None = None   # the same of new tasks
    stricter_until: float | None = None
    stricter_why: str | None = None
    tokens_since: float | None = None       # since when an access token must have been issued to be good


class Usage(Struct, frozen=True):
    """What a tenant has of what its tier limits; kept exactly while limits are enforced (spec 21.6)."""

    active: int = 0                     # tasks that have not ended
    leases: int = 0                     # that are live
    receipt_bytes: int = 0              # of their bodies
    terminal: int = 0                   # tasks that have ended


class Audit(Struct, frozen=True):
    """One line of a tenant's audit log, chained to the one before by its hash (spec 21.7.4)."""

    audit_id: str                       # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    at: float
    event: str
    severity: str
    body: str                           # canonical JSON: who, from where, why
    hash: str                           # over all of this and the hash of the line before


class AuditHead(Struct, frozen=True):
    """Where a tenant's audit log ends."""

    number: int
    hash: str


class Seal(Struct, frozen=True):
    """What some receipts of a tenant were when it was made, chained to the seal before by its hash.

    It covers the receipts behind those of the seal before, up to `last_id`; or, when `late` lists any, those alone.
    """

    seal_id: str                        # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    last_id: str                        # up to which receipt all are covered
    count: int
    digest: str                         # SHA-256 over the digests of its receipts, in the order of their ids
    marks: str                          # the first bytes of each of them, base64: they tell which one was changed
    late: str                           # JSON array: receipts that came when younger ones were sealed already, or ""
    sealed_at: float
    hash: str                           # over all of this and the hash of the seal before


class SealHead(Struct, frozen=True):
    """Where a tenant's seals end."""

    number: int = 0
    last_id: str = ""
    hash: str = ""
    imports: int = 0                    # how often receipts were written that may be older than ones already there


class Archived(Struct, frozen=True):
    """Where a receipt is that has moved to the archive (H.11); it is in its table or has a pointer, never both."""

    receipt_id: str
    task_id: str
    receipt_type: str
    segment: str                        # the file, within the archive's folder
    line: int                           # in it, from 1
    digest: str                         # of every byte of the receipt, so that seals still hold
    chain: str                          # the oldest receipt of all that moved together
    tasks: str                          # JSON array: the tasks of all that moved together


# What is loaded and saved by its key alone, and in which table: a batch may keep such a record or drop it.
RECORDS: dict[type[Struct], str] = {
    Schedule: "schedules", Presence: "presences", Account: "accounts", Key: "api_keys", AuditHead: "audit_heads",
    Usage: "usage", Outgoing: "outbox", Entry: "ledger", LedgerMark: "ledger_marks", Seal: "seals",
    SealHead: "seal_heads", Archived: "archived"}

# Of these a row is never kept a second time.
APPEND_ONLY: frozenset[type[Struct]] = frozenset({Entry, Seal, Archived})

# What the primary key of a table has behind the tenant, where that is more than the first field.
EXPORT_ORDER: dict[type[Struct], tuple[str, ...]] = {
    Event: ("task_id", "event_id"), Obligation: ("to_kind", "to_id", "receipt_id"), Presence: ("kind", "id"),
    Account: (), AuditHead: (), Usage: (), SealHead: ()}


def export_order(table: type[Struct]) -> tuple[str, ...]:
    """Return the fields in whose order a table is exported."""
    return EXPORT_ORDER.get(table, table.__struct_fields__[:1])


def key_of(row: Struct) -> tuple[str, ...]:
    """Return the primary key of a stored row, without the tenant."""
    return tuple([getattr(row, name) for name in export_order(type(row))])


def export_key(row: Struct) -> str:
    """Return where a row stands in the export of its table: keys sort as their fields do, for no id has a NUL.

    The only row that a tenant has of a kind stands at "-".
    """
    return "\0".join(key_of(row)) or "-"
