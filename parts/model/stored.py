"""The stored rows: one Struct for each table that rules work on.

They hold scalars in column order, so `Task(*row)` loads and `astuple(task)` saves on any database.  Times are Unix
seconds inside and RFC 3339 outside; JSON that the gate does not read stays the original text.  The tenant is not a
field: it is the first part of each key.  The kinds are copied and exported in the order in which they stand here, and
then those of the other modules: each task before its events, and receipts before those that move into the archive.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from asyncgate.parts.model import (
    stored_families,
    stored_handover,
    stored_journal,
    stored_limits,
    stored_oauth,
    stored_output,
    stored_types,
    stored_unique,
    stored_webhooks,
    wire,
)
from asyncgate.parts.model.cards import (
    CARDS,
    OF_ARCHIVE,
    OF_TASK,
    OF_TENANT,
    SOMETIMES,
    WITH_IT,
    Actor,
    Content,
    Elsewhere,
    IdText,
    Json,
    Location,
    Person,
    Plain,
    Proof,
    stored,
)

# The states of a task (spec 5): before a lease, under one, at the end.
QUEUED, ACTIVE, TERMINAL = frozenset({"queued"}), frozenset({"leased", "running"}), frozenset(
    {"succeeded", "failed", "canceled"})
INPUT_REQUIRED = "input_required"       # why a task is on hold that has asked somebody
FENCES_SKIPPED = 1000           # by a task that moves to another gate or comes back: no old lease can outrank it
RAISING = frozenset({"task.moved", "task.rebuilt", "task.reconciled"})
CHILDREN_OPEN = "children_open"         # and one that waits for its children
KEY_TAKEN = "key_taken"                 # and one that waits for the end of another one with its key
AWAITING = frozenset({INPUT_REQUIRED, CHILDREN_OPEN, KEY_TAKEN})    # holds that end when what is awaited comes


@stored("tasks", "the work that was handed over, and its result", "`task_retention_days` after its end",
        "the archive run, once its receipts are archived; without an archive nobody", record=False, erasable="lost_to",
        by_hand=True)
class Task(Struct, frozen=True):
    """One piece of work, from its creation to its end."""

    task_id: IdText                     # UUIDv7: its order is the order of creation
    lane: int                           # its queue
    type: Content[IdText]               # what kind of work it is
    payload: Content[Json]              # JSON, unchanged
    payload_pointer: Content[str | None]  # where the payload is stored instead
    requirements: Content[Json]         # JSON, unchanged
    terms: Content[Json]                # the rest of the contract, a KeptTerms as JSON
    owner_kind: Actor[IdText]           # the creator, for ever (H.1)
    owner_id: Actor[IdText]             # the creator's id
    principal_ai: Actor[str]            # a label for other systems
    priority: int                       # an admin may change it
    max_attempts: int                   # how often it may fail
    retry_backoff_seconds: int          # the pause before the first retry
    max_expiries: int                   # leases it may lose before it is put on hold; 0: any number
    created_at: float                   # by the database's clock
    duty: IdText                        # the task.assigned receipt that the end of the task discharges
    idempotency_key: Content[IdText | None]  # of the creator
    fingerprint: Plain[str | None]      # hash of the request that carried the key
    parent_task_id: IdText | None       # the task whose child it is
    # What stands before this field never changes: both databases split the row here.
    asyncgate_instance: IdText          # the gate that looks after it
    updated_at: float                   # of the last change
    status: wire.Status = "queued"      # queued leased running succeeded failed canceled
    attempt: int = 0                    # failures so far
    fence: int = 0                      # leases so far, plus numbers that a move between databases skipped
    expiries: int = 0                   # leases lost so far
    owed: bool = True                   # whether the duty is not discharged yet
    held: Content[str | None] = None    # why a queued task is on hold
    lost_to: Actor[Json] = "[]"         # workers whose lease ran out, for the anomaly of a task on hold
    next_eligible_at: float | None = None  # no lease before this time; or when what it waits for is late
    deadline_at: float | None = None    # None after it has been reported
    started_at: float | None = None     # when its worker began
    completed_at: float | None = None   # when it ended
    outcome: Content[Json | None] = None  # the result or the error, as JSON
    artifacts: Content[Json | None] = None  # JSON array: where the result is
    handed: Content[Json | None] = None  # how custody was last handed back to the ledger, as JSON
    limits: Content[IdText | None] = None  # JSON: the key of the task under each of its limits

    @property
    def owner(self) -> wire.Principal:
        """Return the principal that owns the task for ever (H.1)."""
        return wire.Principal(self.owner_kind, self.owner_id)

    def offerable(self, now: float) -> bool:
        """Whether a queued task may be offered now."""
        return self.held is None and (self.next_eligible_at is None or self.next_eligible_at <= now)

    def claimable(self, now: float) -> bool:
        """Whether a claim may get it now."""
        return self.status == "queued" and self.offerable(now)


class KeptTerms(wire.Terms):
    """The stored terms of a task."""

    principal_instance_id: str | None = None  # the creator's session (spec 18.2)
    rerun_of: str | None = None         # the ended task whose contract it has
    unique: wire.Unique | None = None   # under which key it is the only one
    debounce: wire.Debounce | None = None
    supersedes: str | None = None       # the task that was canceled for it
    amendments: int = 0                 # how often its payload was replaced
    traceparent: str | None = None      # the trace of its creator; no receipt has it
    tracestate: str | None = None
    trace_link: str | None = None       # the trace of the task that it runs again


@stored("leases", "who works on a task, until when", OF_TASK, WITH_IT, record=False,
        erasable="worker_id worker_instance claim_id resumed_by", by_hand=True)
class Lease(Struct, frozen=True):
    """The latest lease of a task; it is kept after its end, so that repeated and late calls get a true answer."""

    task_id: IdText
    lease_id: IdText                    # random: only the holder knows it
    worker_kind: Actor[IdText]          # of the holder
    worker_id: Actor[IdText]            # of the holder
    worker_instance: Location[str | None]  # of the holder, if given
    fence: int                          # the number of this lease among the leases of the task
    acquired_at: float                  # when it was granted
    expires_at: float                   # when it expires
    renewals: int                       # how often it was renewed
    accepted: Plain[str]                # the task.accepted receipt
    claim_id: Person[IdText | None] = None  # the claim's id, if it had one
    ending: Plain[str] = "live"         # or completed, failed, expired, released, asked, canceled, withdrawn
    ttl_seconds: int | None = None      # granted length; None: granted by a release without this field
    resumed_by: Location[str | None] = None  # the instance that resumed it last; "" if it gave no name
    resumptions: int = 0                # known number of resumptions

    @property
    def worker(self) -> wire.Principal:
        """Return the principal that holds or held the lease."""
        return wire.Principal(self.worker_kind, self.worker_id, self.worker_instance)


@stored("progress", "how far a task is, for the next worker", OF_TASK, WITH_IT, record=False, erasable="inputs",
        defaults="parks steps step_bytes outputs chunks output_bytes")
class Progress(Struct, frozen=True):
    """What a task keeps for its next worker: its last progress, which is a checkpoint, what it asked and counted."""

    task_id: IdText                     # of the task
    progress: Content[Json]             # JSON
    sequence: int                       # changes of this row so far
    fence: int                          # the lease it was changed under
    updated_at: float                   # when it was changed
    parks: int = 0                      # times that a worker has parked the task
    steps: int = 0                      # steps that are recorded
    step_bytes: int = 0                 # bytes of their values
    steps_sha256: Plain[str | None] = None  # digest of the last one, which covers them all
    inputs: Content[Json | None] = None  # JSON array of Question: what was asked, and the answers
    family: Plain[Json | None] = None   # JSON of Family: how many children it has, and how the last of them ended
    outputs: int = 0                    # entries of its output
    chunks: int = 0                     # of them chunks
    output_bytes: int = 0               # bytes of the chunks
    output_sha256: Plain[str | None] = None  # digest of the last chunk, which covers them all
    output_state: Plain[str | None] = None  # the last state that is an entry
    successor: IdText | None = None     # the task that waits for the end of this one, or has superseded it


class Question(Struct, frozen=True, omit_defaults=True):
    """What a task has asked somebody, until and after the answer."""

    key: str                            # unique for the life of the task
    receipt_id: str                     # the input.requested
    lease_id: str                       # under which it was asked
    to: wire.Principal                  # who is asked
    asked_by: wire.Principal            # the worker
    asked_at: float
    digest: str                         # of the request, to tell a repetition from another question
    message: str
    schema: msgspec.Raw = msgspec.Raw(b"null")      # of the content of an answer, while the question is open
    expires_at: float | None = None
    on_expiry: wire.OnExpiry = "resume"
    state: wire.InputState = "open"
    content: msgspec.Raw = msgspec.Raw(b"null")     # of the answer; so are the others
    answered_by: wire.Principal | None = None
    answer_id: str | None = None        # the input.answered or input.expired
    answered_at: float | None = None


decode_questions = msgspec.json.Decoder(list[Question]).decode


STEPS_LOST = "lost"        # for the digest of steps, of a task that was rebuilt from receipts, which have none


def read_questions(progress: Progress | None) -> dict[str, Question]:
    """Return what a task has asked, by key, in the order of asking."""
    if progress is None or progress.inputs is None:
        return {}
    return {question.key: question for question in decode_questions(progress.inputs)}


def list_open(questions: dict[str, Question]) -> list[Question]:
    """Return those that nobody has answered yet."""
    return [question for question in questions.values() if question.state == "open"]


@stored("receipts", "the proof of who owes what to whom",
        "`receipt_retention_days`, and `archive.terminal_days` after its task's end; then in the archive",
        "the archive run; without an archive nobody: they are the evidence", record=False,
        erasable="receipt_key from_id to_id schedule_id hash body salt", by_hand=True)
class Receipt(Struct, frozen=True):
    """One fact, never changed."""

    receipt_id: IdText                  # UUIDv7: its order is the order of age
    receipt_key: Person[IdText]         # of the logical receipt (H.3)
    receipt_type: Plain[str]            # its type
    created_at: float                   # by the database's clock
    from_kind: Actor[str]               # the sender
    from_id: Actor[str]                 # the sender's id
    to_kind: Actor[IdText]              # the recipient, in whose inbox it is
    to_id: Actor[IdText]                # the recipient's id
    task_id: IdText                     # empty when it belongs to no task
    lease_id: Plain[str | None]         # the lease under which it was stated, if any
    schedule_id: Content[str | None]    # the schedule that it is about, if any
    asyncgate_instance: Plain[str]      # the gate that wrote it (20.7)
    hash: Plain[str]                    # of its content (Clarification B)
    body: Content[Json]                 # canonical JSON
    salt: Plain[str] = ""               # random, and gone when erased: so the digest of a seal confirms no guess
    parents: Elsewhere[tuple[str, ...]] = ()
    delivered_at: Elsewhere[float | None] = None  # telemetry

    @property
    def sender(self) -> wire.Principal:
        """Return the sender."""
        return wire.Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> wire.Principal:
        """Return the recipient, in whose inbox it is."""
        return wire.Principal(self.to_kind, self.to_id)


@stored("events", "what happened to a task beside its receipts", OF_TASK, WITH_IT, key="task_id event_id", record=False,
        erasable="payload")
class Event(Struct, frozen=True):
    """Something that happened to a task and needs no receipt (spec 3)."""

    event_id: IdText                    # UUIDv7
    task_id: IdText                     # of the task
    event_type: Plain[str]              # what happened
    payload: Content[Json]              # JSON
    created_at: float                   # when


def fences_skipped(event: Event) -> int:
    """Return by how much an event raised its task's fence; leases raise it by one each, and are not counted here."""
    return int(msgspec.json.decode(event.payload).get("fences_skipped", 0)) if event.event_type in RAISING else 0


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


@stored("schedules", "the last report of a scheduler", "until it is deleted",
        "the transaction of its `schedule.deleted`", defaults="details")
class Schedule(Struct, frozen=True):
    """The last report of a scheduler about one of its schedules."""

    schedule_id: Content[IdText]        # the scheduler's id of it
    owner_kind: Actor[str]              # the principal that requested it
    owner_id: Actor[str]                # the owner's id
    scheduler_kind: Actor[str]          # the scheduler that runs it
    scheduler_id: Actor[str]            # the scheduler's id
    created: Plain[str]                 # the schedule.created receipt
    enabled: bool = False               # whether it runs at all
    next_run_at: float | None = None    # its next run
    interval_seconds: float | None = None  # between two runs
    late_at: float | None = None        # when silence becomes an anomaly; None after the report
    details: Content[str] = "{}"        # JSON of ScheduleDetails

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
    def scheduler(self) -> wire.Principal:
        """Return the principal that runs the schedule."""
        return wire.Principal(self.scheduler_kind, self.scheduler_id)


@stored("presences", "since when a principal has called, and what a worker offers",
        "`presence_retention_days` after its last call", SOMETIMES, key="kind id", last_moment="last_seen_at",
        defaults="claims leased completed failed expired released",
        indexes=("presences_worker (tenant_id, kind, id) WHERE claimed_at IS NOT NULL",
                 "presences_claimed (tenant_id, claimed_at) WHERE claimed_at IS NOT NULL"))
class Presence(Struct, frozen=True):
    """Since when, and in how many sessions, a principal has been talking to the gate; of a worker also its work."""

    kind: Actor[IdText]                 # of the principal
    id: Actor[IdText]                   # of the principal
    instance_id: Location[str | None]   # the last instance seen
    first_seen_at: float                # when it first called
    last_seen_at: float                 # when it last called, within half a minute
    sessions: int                       # how many sessions it began
    claims: Content[Json] = "[]"        # JSON array of Claimed, one for each of a few profiles, the latest first
    claimed_at: float | None = None     # when it last claimed
    leased: int = 0                     # leases that it was granted; the next four are how these ended
    completed: int = 0                  # how many of them it completed
    failed: int = 0                     # how many of them it failed
    expired: int = 0                    # how many of them expired
    released: int = 0                   # how many of them it released


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


@stored("obligations", "the index of what is owed", "until it is discharged", "the transaction that discharges it",
        key="to_kind to_id receipt_id", record=False, left_alone="closed before, with a receipt",
        indexes=("obligations_age (tenant_id, receipt_id)",))
class Obligation(Struct, frozen=True):
    """An open obligation: an index entry for the receipt that opened it."""

    to_kind: Actor[IdText]              # the creditor
    to_id: Actor[IdText]                # the creditor's id
    receipt_id: IdText                  # the receipt that opened it


@stored("outbox", "receipts on their way to the ledger", "until the ledger has stored it", "the sender of receipts",
        rowid=True, indexes=("outbox_waiting (tenant_id, receipt_id) WHERE state = 'waiting'",
                             "outbox_offered (tenant_id, receipt_id) WHERE state = 'offered'"))
class Outgoing(Struct, frozen=True):
    """A receipt on its way to the ledger: every try sends the same text."""

    receipt_id: IdText                  # the receipt; its skeleton without a body is in receipts
    task_id: IdText                     # receipts of one task are sent in order
    content: Content[Json]              # the bytes to send, the same at each attempt
    posted_at: float                    # since when it has been waiting
    # offered: a strict gate has not committed it yet.
    state: Literal["waiting", "parked", "offered"] = "waiting"  # parked: the ledger refused it; no more tries
    # Of an offered one it is JSON, with the `receipt` itself.
    reason: Content[str | None] = None  # the ledger's last answer; of an offered one, what settling it needs
    tries: int = 0                      # tries without an answer


@stored("ledger", "receipts that others store here, if this gate is a ledger", OF_TENANT,
        "nobody: it is the evidence of other gates, which rebuild from it", append_only=True, protected=True,
        erasable="receipt_id from_id to_id stated_id digest content", erased_by="arrival", rowid=True,
        defaults="stated_kind stated_id stated_role",
        indexes=("UNIQUE ledger_arrival (tenant_id, arrival)", "ledger_to (tenant_id, to_kind, to_id, arrival)",
                 "ledger_task (tenant_id, task_id, arrival)",
                 "ledger_instance (tenant_id, asyncgate_instance, arrival)"))
class Entry(Struct, frozen=True):
    """A receipt that somebody stored here, when the gate itself is the ledger; append-only."""

    receipt_id: Content[IdText]         # chosen by the author: any text
    arrival: IdText                     # UUIDv7: the order in which readers get them
    receipt_type: Plain[str]            # its type
    task_id: IdText                     # empty when it belongs to no task
    from_kind: Actor[str]               # the sender
    from_id: Actor[str]                 # the sender's id
    to_kind: Actor[IdText]              # the recipient, in whose inbox it is
    to_id: Actor[IdText]                # the recipient's id
    asyncgate_instance: IdText          # which gate wrote it; empty when none did
    digest: Plain[str]                  # of the content: one id cannot have two contents
    content: Content[Json]              # the original text
    stated_kind: Actor[str] = ""        # kind of the principal whose credential stored it; empty: older release
    stated_id: Actor[str] = ""          # and its id
    stated_role: Plain[str] = ""        # and the role of the credential

    @property
    def stated_by(self) -> wire.Principal | None:
        """Return the principal that stored it, if known; `sender` is the one that the receipt names."""
        return wire.Principal(self.stated_kind, self.stated_id) if self.stated_kind else None

    @property
    def sender(self) -> wire.Principal:
        """Return the sender that the receipt names."""
        return wire.Principal(self.from_kind, self.from_id)

    @property
    def to(self) -> wire.Principal:
        """Return the recipient, in whose inbox it is."""
        return wire.Principal(self.to_kind, self.to_id)


@stored("ledger_marks", "how far a ledger was read", OF_TENANT, "nobody: reading goes on there", protected=True,
        left_alone="how far a ledger was read")
class LedgerMark(Struct, frozen=True):
    """How far the ledger was searched for the receipts that workers store there themselves."""

    name: IdText                        # name of the search
    receipt_id: IdText                  # the last one seen


class Lag(Struct, frozen=True):
    """How far the ledger is behind a tenant's receipts."""

    waiting: int = 0
    parked: int = 0
    oldest_at: float | None = None      # when the oldest waiting receipt was written


@stored("api_keys", "which credentials are valid", OF_TENANT,
        "an erasure; else nobody: the audit log names keys, and revoked ones stay refused", protected=True)
class Key(Struct, frozen=True):
    """An issued key as it is stored; the tenant is beside it."""

    key_id: IdText                      # part of the key's text; not secret
    hash: Proof[str]                    # Argon2id of the secret, as a PHC string
    name: Person[str]                   # a name for people
    principal_kind: Actor[wire.Kind]    # for whom it stands
    principal_id: Actor[str]            # for whom it stands
    principal_instance_id: Location[str | None]  # the principal's instance, if given
    role: wire.Role                     # agent worker admin
    scopes: Plain[Json]                 # JSON, a sorted array; so are the next two
    capabilities: Plain[Json | None]    # capabilities that it may claim tasks for; None is any
    task_types: Plain[Json | None]      # JSON array: those it may create and claim; NULL is any
    not_before: float                   # when it becomes valid
    expires_at: float | None            # when it expires
    revoked_at: float | None            # when it was revoked
    rotated_to: Plain[str | None]       # id of the key that replaces it
    version: int                        # of the hash
    created_at: float                   # when it was issued
    created_by: Actor[str]              # who issued it
    last_used_at: float | None = None   # within a minute
    places: Location[Json | None] = None  # JSON array: the networks that it was used from, the latest first

    def __repr__(self) -> str:
        return f"<Key {self.key_id}>"   # the hash stays out of logs and tracebacks


@stored("accounts", "the terms of a tenant", OF_TENANT,
        "nobody: a suspended tenant must stay suspended; an erasure takes its name away", single=True,
        defaults="budgets")
class Account(Struct, frozen=True):
    """The terms of a tenant; a tenant without an account has the default tier and no name."""

    name: Person[str]                   # a name for people
    created_at: float                   # when it was made
    tier: Plain[str] = ""               # empty is the default
    suspended_at: float | None = None   # since when all its credentials are refused
    exempt_until: float | None = None   # from rate limits and quotas (spec 21.4.5)
    exempt_why: Content[str | None] = None  # the reason for the exemption
    stricter_calls: int | None = None   # calls an hour until stricter_until (spec 21.9.2)
    stricter_tasks: int | None = None   # new tasks an hour until then
    stricter_until: float | None = None  # when the temporary limits end
    stricter_why: Content[str | None] = None  # the reason for the temporary limits
    tokens_since: float | None = None   # access tokens issued before are refused
    budgets: Plain[Json] = "{}"         # what may be used in a month, by quantity: JSON
    max_payload_bytes: int | None = None  # of a task (spec 21.6.1); None: as the settings say
    max_lease_ttl_seconds: int | None = None  # of a lease (spec 21.6.2)


@stored("usage", "what a tenant uses of its quotas", OF_TENANT, "nobody: it is one row of counts", single=True,
        copied=False, left_alone="counts")
class Usage(Struct, frozen=True):
    """A tenant's use of its quotas; kept exactly while limits are enforced (spec 21.6)."""

    active: int = 0                     # tasks that have not ended
    leases: int = 0                     # live leases
    receipt_bytes: int = 0              # of receipt bodies
    terminal: int = 0                   # tasks that have ended
    step_bytes: int = 0                 # of the values of recorded steps


@stored("meters", "what a tenant uses, until it is in a usage event", "until they are in a usage event, some minutes",
        "upkeep, with that event", key="period slot", left_alone="numbers")
class Meter(Struct, frozen=True):
    """What some batches have added to a tenant's usage in five minutes; batches add to it, and never read it.

    Of what is stored or leased it has the change, and the change times how long after the beginning it came.
    """

    period: IdText                      # number of the five minutes in Unix time, written so that it sorts
    slot: IdText                        # where a batch counts, apart from other batches; only the sum of all counts
    tasks: int = 0                      # created
    leases: int = 0                     # by how many the live ones have changed
    lease_ms: int = 0                   # each such change times the milliseconds at which it came
    receipt_bytes: int = 0              # of the stored bodies of receipts
    receipt_moments: int = 0            # each change times the seconds at which it came
    payload_bytes: int = 0              # of the stored payloads, outcomes and steps of tasks
    payload_moments: int = 0            # as of receipts
    reads: int = 0                      # calls
    writes: int = 0                     # calls that are not heartbeats
    heartbeats: int = 0                 # calls that keep a lease


@stored("usage_heads", "where the usage events end", OF_TENANT, "nobody: the next event begins there", single=True,
        left_alone="numbers")
class UsageHead(Struct, frozen=True):
    """Until when a tenant's usage is in events, and what is stored and leased at that moment."""

    until: int                          # Unix time
    leases: int = 0                     # live ones
    receipt_bytes: int = 0              # of stored bodies
    payload_bytes: int = 0              # of stored payloads, outcomes and steps


@stored("usage_events", "what a tenant used, for bills and budgets", "`usage_retention_days`", "upkeep, daily",
        append_only=True, left_alone="numbers, which bills rest on", rowid=True)
class UsageEvent(Struct, frozen=True):
    """What a tenant used in five minutes, or in a longer time in which nothing changed; never changed."""

    period: IdText                      # number of its first five minutes in Unix time, written so that it sorts
    usage_event_id: IdText              # derived from the tenant and the period
    begins: int                         # Unix time
    ends: int                           # Unix time
    tasks: int = 0                      # created
    lease_ms: int = 0                   # milliseconds of all leases
    receipt_byte_seconds: int = 0       # bodies of receipts, bytes times seconds
    payload_byte_seconds: int = 0       # payloads, outcomes and steps of tasks, bytes times seconds
    reads: int = 0                      # calls
    writes: int = 0                     # calls that are not heartbeats
    heartbeats: int = 0                 # calls that keep a lease


@stored("traffic", "rates of the queues", "a day", "the process that stores newer rows of the tenant",
        key="minute process", copied=False, left_alone="counts")
class Traffic(Struct, frozen=True):
    """What one process has done in each queue in one minute, or all in five; the latter is kept for a day."""

    minute: IdText                      # of Unix time, written so that it sorts
    process: IdText                     # a name by chance: after a restart it is another one; empty: all, five minutes
    counts: Plain[Json]                 # JSON: by lane, leases granted, tasks ended, attempts failed, leases expired, …


@stored("pauses", "what is paused, by whom and why", "until the pause ends", "whoever pauses or resumes next",
        single=True)
class Pauses(Struct, frozen=True):
    """What an admin has paused in a tenant; loaded with every claim, so it is one row."""

    listed: Content[Json]               # JSON, an array of Pause


@stored("bulks", "what was done to many tasks at once", "`bulk_retention_days` after its end", SOMETIMES,
        last_moment="ended_at", rowid=True)
class Bulk(Struct, frozen=True):
    """One thing that is done to many tasks, and how far it is."""

    bulk_id: IdText                     # one confirmation, one bulk
    action: Plain[str]                  # cancel, release, prioritize, rerun
    asked: Content[Json]                # the request for its preview, as JSON
    by_kind: Actor[str]                 # the principal that does it
    by_id: Actor[str]                   # its id
    matches: int                        # tasks that the preview has counted
    at_least: bool                      # whether there may be more
    begun_at: float                     # when
    updated_at: float                   # when it last went on
    position: IdText                    # the last task that was looked at; newest first
    done: int = 0                       # tasks
    skipped: int = 0                    # tasks that had changed in between
    refused: int = 0                    # tasks that the rules refused
    problem: Content[str | None] = None  # why the last one was refused
    ended_at: float | None = None       # when it was complete


@stored("audit", "who did what with which credential", "`security.audit_logging.retention_days`, 90 at least",
        "upkeep, hourly; a new line of the chain has number and hash of the last one that went", record=False,
        erasable="body")
class Audit(Struct, frozen=True):
    """One line of a tenant's audit log, chained to the one before by its hash (spec 21.7.4)."""

    audit_id: IdText                    # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    at: float                           # when it happened
    event: Plain[str]                   # what happened
    severity: Plain[str]                # info warning critical
    body: Content[Json]                 # canonical JSON: who, from where, why
    hash: Plain[str]                    # over all fields and the hash of the previous line


@stored("audit_heads", "where the audit log ends", OF_TENANT, "nobody: it proves where the log ends", single=True,
        left_alone="a number and a hash")
class AuditHead(Struct, frozen=True):
    """Where a tenant's audit log ends."""

    number: int                         # of the last line
    hash: Plain[str]                    # of the last line


@stored("seals", "proof that no receipt was rewritten", OF_TENANT, "nobody: each one covers the one before",
        append_only=True, protected=True, left_alone="digests", rowid=True)
class Seal(Struct, frozen=True):
    """A hash over some receipts of a tenant, chained to the previous seal.

    It covers the receipts after those of the previous seal, up to `last_id`; or only those in `late`, if it has any.
    """

    seal_id: IdText                     # the number, written so that it sorts
    number: int                         # 1, 2, 3, … in each tenant
    last_id: IdText                     # the last receipt that is covered
    count: int                          # number of receipts
    digest: Plain[str]                  # SHA-256 over the digests of its receipts, in the order of their ids
    marks: Plain[str]                   # the first bytes of each digest, base64: they show which receipt was changed
    late: Plain[Json]                   # JSON array of receipts written after younger ones were sealed, or ""
    sealed_at: float                    # when
    hash: Plain[str]                    # over all fields and the hash of the previous seal


@stored("seal_heads", "where the seals end", OF_TENANT, "nobody: the next seal begins there", single=True,
        left_alone="a number and a hash")
class SealHead(Struct, frozen=True):
    """Where a tenant's seals end."""

    number: int = 0                     # of the last seal
    last_id: Plain[str] = ""            # of the last seal
    hash: Plain[str] = ""               # of the last seal
    imports: int = 0                    # how often receipts that may be older than others were imported or restored


@stored("archived", "where an archived receipt is", OF_ARCHIVE,
        "whoever restores the receipt; else nobody: it is found by this row", append_only=True, protected=True,
        left_alone="points to a receipt that is brought back before, and names nobody",
        indexes=("archived_task (tenant_id, task_id, receipt_id)",))
class Archived(Struct, frozen=True):
    """Where an archived receipt is (H.11); a receipt is in its table or has this pointer, never both."""

    receipt_id: IdText                  # the archived receipt
    task_id: IdText                     # of that receipt
    receipt_type: Plain[str]            # of that receipt
    segment: Plain[str]                 # the file, within the archive's folder
    line: int                           # in the segment, from 1
    digest: Plain[str]                  # of every byte of the receipt, so that seals still hold
    chain: Plain[str]                   # the oldest receipt of all that moved together
    tasks: Plain[Json]                  # JSON array: the tasks of all that moved together


@stored("erasures", "the evidence of erasures", OF_TENANT, "nobody: they are evidence", protected=True,
        left_alone="the evidence of the erasure; the principal's name and the key go at its end")
class Erasure(Struct, frozen=True):
    """An erasure of what is kept of a principal or of a whole tenant: how far it is, and at the end its proof."""

    erasure_id: IdText                  # UUIDv7
    of_tenant: Plain[str]               # whose data; in the operator's tenant it may be another one
    principal_kind: Actor[str]          # whose data; empty: of the whole tenant
    principal_id: Actor[str]            # the same; at the end its pseudonym
    names: Actor[str]                   # JSON array: what else names the principal; empty at the end
    key: Proof[str]                     # that makes the pseudonyms, in hex; empty at the end
    step: Plain[str]                    # what is done now
    segments: Plain[str]                # JSON array: files of the archive to delete
    counts: Plain[str]                  # JSON: by table, how many rows were changed and deleted
    begun_at: float                     # when
    ended_at: float | None = None       # when its key was destroyed
    digest: Plain[str] = ""             # SHA-256 over the rows that were changed and whose digests others have
    proof: Plain[str | None] = None     # a signature over all of that (JWS), if the gate has a key that signs

    def __repr__(self) -> str:
        return f"<Erasure {self.erasure_id}>"   # the key stays out of logs and tracebacks


@stored("erased", "which rows an erasure has changed", OF_TENANT, "nobody: erased rows are verified by it",
        key="source row_id", append_only=True, protected=True, left_alone="the evidence of the erasure: digests alone")
class Erased(Struct, frozen=True):
    """A row whose content an erasure has taken away, with the digest that seals or the audit log's chain have of it."""

    source: IdText                      # receipts, audit or ledger
    row_id: IdText                      # the receipt, the line or the arrival
    erasure_id: IdText                  # the first one that has changed it
    before: Plain[str]                  # the digest that seals, or the chain of the audit log, have of it
    kept: Plain[str]                    # SHA-256 over the fields that no erasure changes


# A module with further kinds stands here, too.
KIND_MODULES = [__name__, *(module.__name__ for module in (
    stored_families, stored_handover, stored_journal, stored_limits, stored_oauth, stored_output, stored_types,
    stored_unique, stored_webhooks))]
TABLES: dict[type[Struct], str] = {kind: card.table for kind, card in sorted(
    CARDS.items(), key=lambda dealt: KIND_MODULES.index(dealt[0].__module__))}
RECORDS = {kind: table for kind, table in TABLES.items() if CARDS[kind].record}


def export_order(table: type[Struct]) -> tuple[str, ...]:
    """Return the fields in whose order a table is exported."""
    return CARDS[table].key


def key_of(row: Struct) -> tuple[str, ...]:
    """Return the primary key of a stored row, without the tenant."""
    return tuple([getattr(row, name) for name in export_order(type(row))])


def export_key(row: Struct) -> str:
    """Return where a row stands in the export of its table: keys sort as their fields do, for no id has a NUL.

    The only row that a tenant has of a kind stands at "-".
    """
    return "\0".join(key_of(row)) or "-"
