"""The stored rows: one Struct for each table that rules work on.

They hold scalars in column order, so `Task(*row)` loads and `astuple(task)` saves on any database.  Times are Unix
seconds inside and RFC 3339 outside; JSON that the gate does not read stays the original text.  The tenant is not a
field: it is the first part of each key.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from asyncgate.parts.model.stored_oauth import (
    Consent,
    Grant,
    OAuthClient,
    Revocation,
    RevocationHead,
    SignInLink,
    User,
)
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery, WebhookHead
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
    priority: int                       # an admin may change it
    max_attempts: int
    retry_backoff_seconds: int
    max_expiries: int
    created_at: float
    duty: str                           # the task.assigned receipt that the end of the task discharges
    idempotency_key: str | None
    fingerprint: str | None             # hash of the request that carried the key
    asyncgate_instance: str             # from here on: fields that may change
    updated_at: float
    status: Status = "queued"
    attempt: int = 0
    fence: int = 0
    expiries: int = 0
    owed: bool = True                   # whether the duty is not discharged yet
    held: str | None = None             # why a queued task is on hold
    lost_to: str = "[]"                 # workers whose lease ran out, for the anomaly of a task on hold
    next_eligible_at: float | None = None
    deadline_at: float | None = None    # None after it has been reported
    started_at: float | None = None
    completed_at: float | None = None
    outcome: str | None = None          # the result or the error, as JSON
    artifacts: str | None = None
    handed: str | None = None           # how custody was last handed back to the ledger, as JSON

    @property
    def owner(self) -> Principal:
        """Return the principal that owns the task for ever (H.1)."""
        return Principal(self.owner_kind, self.owner_id)

    def offerable(self, now: float) -> bool:
        """Whether a queued task may be offered now."""
        return self.held is None and (self.next_eligible_at is None or self.next_eligible_at <= now)


class KeptTerms(Terms):
    """The stored terms of a task."""

    principal_instance_id: str | None = None    # the creator's session (spec 18.2)
    rerun_of: str | None = None                 # the ended task whose contract it has
    traceparent: str | None = None              # the trace of its creator; no receipt has it
    tracestate: str | None = None
    trace_link: str | None = None               # the trace of the task that it runs again


class Lease(Struct, frozen=True):
    """The latest lease of a task; it is kept after its end, so that repeated and late calls get a true answer."""

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
    ttl_seconds: int | None = None      # granted length; None: granted by a release without this field
    resumed_by: str | None = None       # the instance that resumed it last; "" if it gave no name
    resumptions: int = 0                # known number of resumptions

    @property
    def worker(self) -> Principal:
        """Return the principal that holds or held the lease."""
        return Principal(self.worker_kind, self.worker_id, self.worker_instance)


class Progress(Struct, frozen=True):
    """The last progress of a task; the next worker gets it as a checkpoint."""

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
    salt: str = ""                      # random, and gone when erased: so the digest of a seal confirms no guess
    parents: tuple[str, ...] = ()
    delivered_at: float | None = None   # telemetry, kept elsewhere

    @property
    def sender(self) -> Principal:
        """Return the sender."""
        return Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> Principal:
        """Return the recipient, in whose inbox it is."""
        return Principal(self.to_kind, self.to_id)


class Event(Struct, frozen=True):
    """Something that happened to a task and needs no receipt (spec 3)."""

    event_id: str
    task_id: str
    event_type: str
    payload: str
    created_at: float


class ScheduleDetails(Struct, frozen=True, omit_defaults=True):
    """What a scheduler says of a schedule beside its next run."""

    name: str | None = None
    task_type: str | None = None
    cron_expr: str | None = None
    timezone: str | None = None
    next_runs: list[float] = []
    late_after_seconds: float | None = None
    last_run_at: float | None = None
    last_status: str | None = None
    last_task_id: str | None = None


read_details = msgspec.json.Decoder(ScheduleDetails).decode


class Schedule(Struct, frozen=True):
    """The last report of a scheduler about one of its schedules."""

    schedule_id: str
    owner_kind: str
    owner_id: str
    scheduler_kind: str
    scheduler_id: str
    created: str                        # the schedule.created receipt
    enabled: bool = False
    next_run_at: float | None = None
    interval_seconds: float | None = None
    late_at: float | None = None        # when silence becomes an anomaly; None after the report
    details: str = "{}"                 # JSON of ScheduleDetails

    @property
    def late_after(self) -> float | None:
        """Return when silence about the next run means that it is late: by H.7.4, or as its scheduler said."""
        if self.next_run_at is None or not self.enabled:
            return None
        patience = read_details(self.details).late_after_seconds
        if patience is None and self.interval_seconds is not None:
            patience = 2 * self.interval_seconds
        return None if patience is None else self.next_run_at + patience

    @property
    def scheduler(self) -> Principal:
        """Return the principal that runs the schedule."""
        return Principal(self.scheduler_kind, self.scheduler_id)


class Presence(Struct, frozen=True):
    """Since when, and in how many sessions, a principal has been talking to the gate; of a worker also its work."""

    kind: str
    id: str
    instance_id: str | None
    first_seen_at: float
    last_seen_at: float
    sessions: int
    claims: str = "[]"                  # JSON array of Claimed, one for each of a few profiles, the latest first
    claimed_at: float | None = None     # when it last claimed
    leased: int = 0                     # leases that it was granted; the next four are how these ended
    completed: int = 0
    failed: int = 0
    expired: int = 0
    released: int = 0


class Claimed(Struct, frozen=True):
    """The last claim that a worker made with one profile."""

    at: float
    types: list[str]                    # accepted types, sorted; empty: any
    capabilities: list[str]             # sorted
    given: int = 0                      # number of tasks that it got
    why: str | None = None              # why it got none, if it was told
    process: str | None = None          # where the worker runs, as it said: its host and pid
    gone_at: float | None = None        # when it hung up while a claim waited, or lost a lease, and has not asked since

    def asks(self, since: float) -> bool:
        """Whether the worker has asked since a time, and is not known to be gone."""
        return self.at > since and self.gone_at is None

    @property
    def profile(self) -> tuple[list[str], list[str]]:
        """Return what decides which tasks it may get."""
        return self.types, self.capabilities

    @property
    def letters(self) -> int:
        """Return about how large it is."""
        return 50 + len(self.process or "") + sum(len(name) + 3 for names in self.profile for name in names)


class Holding(Struct, frozen=True):
    """How many leases a worker has that have not ended, counted up to a limit."""

    kind: str
    id: str
    leases: int


class Instance(Struct, frozen=True):
    """A gate process, as the processes that share its database know it."""

    instance_id: str
    last_beat_at: float | None          # its last sign of life; None: nothing is kept
    serves: bool                        # whether it lives now


class Queue(Struct, frozen=True):
    """What a lane has now: counted with each batch, and summed over the processes that count."""

    lane: int
    type: str
    capabilities: str                   # JSON, a sorted array
    queued: int                         # tasks that may be claimed, now or later
    held: int                           # queued tasks that are on hold
    leased: int                         # leased and running ones
    delayed: int = 0                    # of the queued ones, as far as they were counted
    more_delayed: bool = False          # whether not all of the tenant's delayed tasks were counted
    oldest_at: float | None = None      # since when the oldest task that may be claimed now has been waiting


class Depth(Struct, frozen=True):
    """What the queues of one type have now, over all tenants."""

    type: str
    queued: int
    held: int
    leased: int
    oldest_at: float | None             # since when the oldest claimable task has been waiting


class Obligation(Struct, frozen=True):
    """An open obligation: an index entry for the receipt that opened it."""

    receipt_id: str
    to_kind: str
    to_id: str


class Outgoing(Struct, frozen=True):
    """A receipt on its way to the ledger: every try sends the same text."""

    receipt_id: str
    task_id: str                        # receipts of one task are sent in order
    content: str
    posted_at: float
    # parked: the ledger refused it; no more tries.  offered: a strict gate has not committed it yet.
    state: Literal["waiting", "parked", "offered"] = "waiting"
    reason: str | None = None           # the ledger's last answer; of an offered one, what settling it needs
    tries: int = 0                      # tries without an answer


class Entry(Struct, frozen=True):
    """A receipt that somebody stored here, when the gate itself is the ledger; append-only."""

    receipt_id: str                     # chosen by the author: any text
    arrival: str                        # UUIDv7: the order in which readers get them
    receipt_type: str
    task_id: str                        # empty when it belongs to no task
    from_kind: str
    from_id: str
    to_kind: str
    to_id: str
    asyncgate_instance: str             # which gate wrote it; empty when none did
    digest: str                         # of the content: one id cannot have two contents
    content: str                        # the original text
    stated_kind: str = ""               # kind of the principal whose credential stored it; empty: older release
    stated_id: str = ""                 # and its id
    stated_role: str = ""               # and the role of the credential

    @property
    def stated_by(self) -> Principal | None:
        """Return the principal that stored it, if known; `sender` is the one that the receipt names."""
        return Principal(self.stated_kind, self.stated_id) if self.stated_kind else None

    @property
    def sender(self) -> Principal:
        """Return the sender that the receipt names."""
        return Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> Principal:
        """Return the recipient, in whose inbox it is."""
        return Principal(self.to_kind, self.to_id)


class LedgerMark(Struct, frozen=True):
    """How far the ledger was searched for the receipts that workers store there themselves."""

    name: str                           # name of the search
    receipt_id: str                     # the last one seen


class Lag(Struct, frozen=True):
    """How far the ledger is behind a tenant's receipts."""

    waiting: int = 0
    parked: int = 0
    oldest_at: float | None = None      # when the oldest waiting receipt was written


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
    capabilities: str | None            # capabilities that it may claim tasks for; None is any
    task_types: str | None
    not_before: float
    expires_at: float | None
    revoked_at: float | None
    rotated_to: str | None              # id of the key that replaces it
    version: int                        # of the hash
    created_at: float
    created_by: str
    last_used_at: float | None = None
    places: str | None = None           # JSON array: the networks that it was used from, the latest first

    def __repr__(self) -> str:
        return f"<Key {self.key_id}>"   # the hash stays out of logs and tracebacks


class Account(Struct, frozen=True):
    """The terms of a tenant; a tenant without an account has the default tier and no name."""

    name: str
    created_at: float
    tier: str = ""                      # empty is the default
    suspended_at: float | None = None   # since when all its credentials are refused
    exempt_until: float | None = None   # from rate limits and quotas (spec 21.4.5)
    exempt_why: str | None = None
    stricter_calls: int | None = None   # calls an hour until stricter_until (spec 21.9.2)
    stricter_tasks: int | None = None   # new tasks an hour until then
    stricter_until: float | None = None
    stricter_why: str | None = None
    tokens_since: float | None = None       # access tokens issued before are refused
    budgets: str = "{}"                 # what may be used in a month, by quantity: JSON
    max_payload_bytes: int | None = None    # of a task (spec 21.6.1); None: as the settings say
    max_lease_ttl_seconds: int | None = None    # of a lease (spec 21.6.2)


class Usage(Struct, frozen=True):
    """A tenant's use of its quotas; kept exactly while limits are enforced (spec 21.6)."""

    active: int = 0                     # tasks that have not ended
    leases: int = 0                     # live leases
    receipt_bytes: int = 0              # of receipt bodies
    terminal: int = 0                   # tasks that have ended


class Meter(Struct, frozen=True):
    """What some batches have added to a tenant's usage in five minutes; batches add to it, and never read it.

    Of what is stored or leased it has the change, and the change times how long after the beginning it came.
    """

    period: str                         # number of the five minutes in Unix time, written so that it sorts
    slot: str                           # where a batch counts, apart from other batches; only the sum of all counts
    tasks: int = 0                      # created
    leases: int = 0                     # by how many the live ones have changed
    lease_ms: int = 0                   # each such change times the milliseconds at which it came
    receipt_bytes: int = 0              # of the stored bodies of receipts
    receipt_moments: int = 0            # each change times the seconds at which it came
    payload_bytes: int = 0              # of the stored payloads and outcomes of tasks
    payload_moments: int = 0
    reads: int = 0                      # calls
    writes: int = 0                     # calls that are no heartbeats
    heartbeats: int = 0


class UsageHead(Struct, frozen=True):
    """Until when a tenant's usage is in events, and what is stored and leased at that moment."""

    until: int                          # Unix time
    leases: int = 0
    receipt_bytes: int = 0
    payload_bytes: int = 0


class UsageEvent(Struct, frozen=True):
    """What a tenant used in five minutes, or in a longer time in which nothing changed; never changed."""

    period: str                         # number of its first five minutes in Unix time, written so that it sorts
    usage_event_id: str                 # derived from the tenant and the period
    begins: int                         # Unix time
    ends: int
    tasks: int = 0                      # created
    lease_ms: int = 0                   # milliseconds of all leases
    receipt_byte_seconds: int = 0       # bodies of receipts, bytes times seconds
    payload_byte_seconds: int = 0       # payloads and outcomes of tasks, bytes times seconds
    reads: int = 0                      # calls
    writes: int = 0                     # calls that are no heartbeats
    heartbeats: int = 0


class Traffic(Struct, frozen=True):
    """What one process has done in each queue in one minute; kept for an hour."""

    minute: str                         # of Unix time, written so that it sorts
    process: str                        # a name by chance: after a restart it is another one
    counts: str                         # JSON: by lane, leases granted, tasks ended, attempts failed, leases expired


class Pauses(Struct, frozen=True):
    """What an admin has paused in a tenant; loaded with every claim, so it is one row."""

    listed: str                         # JSON, an array of Pause


class Bulk(Struct, frozen=True):
    """One thing that is done to many tasks, and how far it is."""

    bulk_id: str
    action: str
    asked: str                          # the request for its preview, as JSON
    by_kind: str
    by_id: str
    matches: int                        # tasks that the preview has counted
    at_least: bool                      # whether there may be more
    begun_at: float
    updated_at: float
    position: str                       # the last task that was looked at; newest first
    done: int = 0
    skipped: int = 0                    # tasks that had changed in between
    refused: int = 0
    problem: str | None = None          # why the last one was refused
    ended_at: float | None = None


class Audit(Struct, frozen=True):
    """One line of a tenant's audit log, chained to the one before by its hash (spec 21.7.4)."""

    audit_id: str                       # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    at: float
    event: str
    severity: str
    body: str                           # canonical JSON: who, from where, why
    hash: str                           # over all fields and the hash of the previous line


class AuditHead(Struct, frozen=True):
    """Where a tenant's audit log ends."""

    number: int
    hash: str


class Seal(Struct, frozen=True):
    """A hash over some receipts of a tenant, chained to the previous seal.

    It covers the receipts after those of the previous seal, up to `last_id`; or only those in `late`, if it has any.
    """

    seal_id: str                        # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    last_id: str                        # the last receipt that is covered
    count: int
    digest: str                         # SHA-256 over the digests of its receipts, in the order of their ids
    marks: str                          # the first bytes of each digest, base64: they show which receipt was changed
    late: str                           # JSON array of receipts written after younger ones were sealed, or ""
    sealed_at: float
    hash: str                           # over all fields and the hash of the previous seal


class SealHead(Struct, frozen=True):
    """Where a tenant's seals end."""

    number: int = 0
    last_id: str = ""
    hash: str = ""
    imports: int = 0                    # how often receipts that may be older than others were imported or restored


class Archived(Struct, frozen=True):
    """Where an archived receipt is (H.11); a receipt is in its table or has this pointer, never both."""

    receipt_id: str
    task_id: str
    receipt_type: str
    segment: str                        # the file, within the archive's folder
    line: int                           # in the segment, from 1
    digest: str                         # of every byte of the receipt, so that seals still hold
    chain: str                          # the oldest receipt of all that moved together
    tasks: str                          # JSON array: the tasks of all that moved together


class Erasure(Struct, frozen=True):
    """An erasure of what is kept of a principal or of a whole tenant: how far it is, and at the end its proof."""

    erasure_id: str
    of_tenant: str                      # whose data; in the operator's tenant it may be another one
    principal_kind: str                 # whose data; empty: of the whole tenant
    principal_id: str                   # the same; at the end its pseudonym
    names: str                          # JSON array: what else names the principal; empty at the end
    key: str                            # that makes the pseudonyms, in hex; empty at the end
    step: str                           # what is done now
    segments: str                       # JSON array: files of the archive to delete
    counts: str                         # JSON: by table, how many rows were changed and deleted
    begun_at: float
    ended_at: float | None = None       # when its key was destroyed
    digest: str = ""                    # SHA-256 over the rows that were changed and whose digests others have
    proof: str | None = None            # a signature over all of that (JWS), if the gate has a key that signs

    def __repr__(self) -> str:
        return f"<Erasure {self.erasure_id}>"   # the key stays out of logs and tracebacks


class Erased(Struct, frozen=True):
    """A row whose content an erasure has taken away, with the digest that seals or the audit log's chain have of it."""

    source: str                         # receipts, audit or ledger
    row_id: str                         # the receipt, the line or the arrival
    erasure_id: str                     # the first one that has changed it
    before: str
    kept: str                           # SHA-256 over the fields that no erasure changes


# What is loaded and saved by its key alone, and in which table: a batch may keep such a record or drop it.
RECORDS: dict[type[Struct], str] = {
    Schedule: "schedules", Presence: "presences", Account: "accounts", Key: "api_keys", AuditHead: "audit_heads",
    Usage: "usage", Outgoing: "outbox", Entry: "ledger", LedgerMark: "ledger_marks", Seal: "seals",
    SealHead: "seal_heads", Archived: "archived", Traffic: "traffic", Pauses: "pauses",
    Meter: "meters", UsageHead: "usage_heads", UsageEvent: "usage_events",
    Bulk: "bulks", OAuthClient: "oauth_clients", User: "oauth_users", Consent: "oauth_consents", Grant: "oauth_grants",
    SignInLink: "oauth_links", Revocation: "revocations", RevocationHead: "revocation_heads",
    Webhook: "webhooks", WebhookHead: "webhook_heads", WebhookDelivery: "webhook_deliveries",
    Erasure: "erasures", Erased: "erased"}

# Every table of rows.
TABLES: dict[type[Struct], str] = {
    Task: "tasks", Lease: "leases", Progress: "progress", Receipt: "receipts", Event: "events",
    Obligation: "obligations", Audit: "audit", **RECORDS}

# Of these a row is never kept a second time.
APPEND_ONLY: frozenset[type[Struct]] = frozenset({Entry, Seal, Archived, Revocation, Erased, UsageEvent})

# What an erasure may change of rows that never change otherwise, or of those that only their own steps change: which
# fields, and by which key the row is found.
ERASABLE: dict[type[Struct], tuple[tuple[str, ...], tuple[str, ...]]] = {
    Receipt: (("receipt_key", "from_id", "to_id", "schedule_id", "hash", "body", "salt"), ("receipt_id",)),
    Event: (("payload",), ("task_id", "event_id")), Audit: (("body",), ("audit_id",)),
    Entry: (("receipt_id", "from_id", "to_id", "stated_id", "digest", "content"), ("arrival",)),
    Task: (("lost_to",), ("task_id",)),
    Lease: (("worker_id", "worker_instance", "claim_id", "resumed_by"), ("task_id",))}

# What the primary key of a table has behind the tenant, where that is more than the first field.
EXPORT_ORDER: dict[type[Struct], tuple[str, ...]] = {
    Event: ("task_id", "event_id"), Obligation: ("to_kind", "to_id", "receipt_id"), Presence: ("kind", "id"),
    Traffic: ("minute", "process"), Meter: ("period", "slot"), Consent: ("user_id", "client_id"),
    WebhookDelivery: ("webhook_id", "delivery_id"), Erased: ("source", "row_id"),
    Account: (), AuditHead: (), Usage: (), UsageHead: (), SealHead: (), Pauses: (), RevocationHead: (), WebhookHead: ()}


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
