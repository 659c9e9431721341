"""What the gate stores of persons: every field of every stored row, declared once.

An export, an erasure and the data map (docs/data-map.md) read this table; `tests/test_personal.py` holds it against the
rows, so that no field is stored of which nobody has said what it is.

A principal may be a person, a program that acts for one, or neither: the gate cannot know.  So it treats every
principal's id as personal.
"""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.stored import (
    Account,
    Archived,
    Audit,
    AuditHead,
    Bulk,
    Entry,
    Erased,
    Erasure,
    Event,
    Key,
    Lease,
    LedgerMark,
    Meter,
    Obligation,
    Outgoing,
    Pauses,
    Presence,
    Progress,
    Receipt,
    Schedule,
    Seal,
    SealHead,
    Task,
    Traffic,
    Usage,
    UsageEvent,
    UsageHead,
)
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


class Declared(Struct, frozen=True):
    """What the fields of one kind of row are; each field stands in one of these lists, as names between blanks."""

    purpose: str                # why the gate keeps such rows
    person: str = ""            # names a principal or a person
    content: str = ""           # what callers have written: it may say anything about anybody
    place: str = ""             # says where somebody was: a network, a process
    proof: str = ""             # proves who somebody is; never exported, not even as a hash
    plain: str = ""             # says nothing of a person by itself

    def list_fields(self) -> list[str]:
        """Return all declared fields."""
        return " ".join([self.person, self.content, self.place, self.proof, self.plain]).split()

    @property
    def is_personal(self) -> bool:
        """Whether such a row may be about a person."""
        return bool(self.person or self.content or self.place or self.proof)


DECLARED: dict[type[Struct], Declared] = {
    Task: Declared(
        "the work that was handed over, and its result",
        person="owner_kind owner_id principal_ai lost_to",
        content="type payload payload_pointer requirements terms idempotency_key held outcome artifacts handed",
        plain="task_id lane priority max_attempts retry_backoff_seconds max_expiries created_at duty fingerprint "
              "asyncgate_instance updated_at status attempt fence expiries owed next_eligible_at deadline_at "
              "started_at completed_at"),
    Lease: Declared(
        "who works on a task, until when", person="worker_kind worker_id claim_id",
        place="worker_instance resumed_by",
        plain="task_id lease_id fence acquired_at expires_at renewals accepted ending ttl_seconds resumptions"),
    Progress: Declared(
        "how far a task is, for the next worker", content="progress",
        plain="task_id sequence fence updated_at"),
    Receipt: Declared(
        "the proof of who owes what to whom",
        person="receipt_key from_kind from_id to_kind to_id", content="body schedule_id",
        plain="receipt_id receipt_type created_at task_id lease_id asyncgate_instance hash salt parents delivered_at"),
    Archived: Declared(
        "where an archived receipt is",
        plain="receipt_id task_id receipt_type segment line digest chain tasks"),
    Event: Declared(
        "what happened to a task beside its receipts", content="payload",
        plain="event_id task_id event_type created_at"),
    Obligation: Declared(
        "the index of what is owed", person="to_kind to_id", plain="receipt_id"),
    Schedule: Declared(
        "the last report of a scheduler", person="owner_kind owner_id scheduler_kind scheduler_id",
        content="schedule_id details", plain="created enabled next_run_at interval_seconds late_at"),
    Presence: Declared(
        "since when a principal has called, and what a worker offers",
        person="kind id", content="claims",
        place="instance_id",
        plain="first_seen_at last_seen_at sessions claimed_at leased completed failed expired released"),
    Account: Declared(
        "the terms of a tenant", person="name", content="exempt_why stricter_why",
        plain="created_at tier suspended_at exempt_until stricter_calls stricter_tasks stricter_until tokens_since "
              "budgets max_payload_bytes max_lease_ttl_seconds"),
    Key: Declared(
        "which credentials are valid",
        person="name principal_kind principal_id created_by", place="principal_instance_id places", proof="hash",
        plain="key_id role scopes capabilities task_types not_before expires_at revoked_at rotated_to version "
              "created_at last_used_at"),
    Audit: Declared(
        "who did what with which credential", content="body",
        plain="audit_id number at event severity hash"),
    AuditHead: Declared("where the audit log ends", plain="number hash"),
    Usage: Declared(
        "what a tenant uses of its quotas", plain="active leases receipt_bytes terminal"),
    Meter: Declared(
        "what a tenant uses, until it is in a usage event",
        plain="period slot tasks leases lease_ms receipt_bytes receipt_moments payload_bytes payload_moments reads "
              "writes heartbeats"),
    UsageHead: Declared("where the usage events end", plain="until leases receipt_bytes payload_bytes"),
    UsageEvent: Declared(
        "what a tenant used, for bills and budgets",
        plain="period usage_event_id begins ends tasks lease_ms receipt_byte_seconds payload_byte_seconds reads writes "
              "heartbeats"),
    Traffic: Declared("rates of the queues", plain="minute process counts"),
    Pauses: Declared("what is paused, by whom and why", content="listed"),
    Bulk: Declared(
        "what was done to many tasks at once",
        person="by_kind by_id", content="asked problem",
        plain="bulk_id action matches at_least begun_at updated_at position done skipped refused ended_at"),
    Outgoing: Declared(
        "receipts on their way to the ledger", content="content reason",
        plain="receipt_id task_id posted_at state tries"),
    Entry: Declared(
        "receipts that others store here, if this gate is a ledger",
        person="from_kind from_id to_kind to_id stated_kind stated_id", content="receipt_id content",
        plain="arrival receipt_type task_id asyncgate_instance digest stated_role"),
    LedgerMark: Declared("how far a ledger was read", plain="name receipt_id"),
    Seal: Declared(
        "proof that no receipt was rewritten",
        plain="seal_id number last_id count digest marks late sealed_at hash"),
    SealHead: Declared("where the seals end", plain="number last_id hash imports"),
    OAuthClient: Declared(
        "programs that may ask people for access",
        person="name created_by", content="document redirect_uris", proof="secret_hash",
        plain="client_id origin scopes auth_method tenant trusted pinned access_days created_at updated_at "
              "last_used_at disabled_at"),
    User: Declared(
        "people who may sign in",
        person="user_id issuer subject email name principal_kind principal_id admitted_by accepted_as",
        plain="tenant role scopes access_days created_at last_seen_at disabled_at"),
    Consent: Declared(
        "what people let programs do",
        person="user_id", content="redirect_uri", plain="client_id scopes given_at"),
    Grant: Declared(
        "sessions of people with programs",
        person="user_id principal_kind principal_id", content="redirect_uri resource", place="place",
        proof="code_hash refresh_hash previous_hash seed challenge",
        plain="grant_id client_id tenant role scopes code_until access_seconds created_at ends_at code_used_at "
              "rotated_at rotations last_used_at ended_at ended_why"),
    SignInLink: Declared(
        "one-time links that sign somebody in",
        person="principal_kind principal_id", proof="link_hash",
        plain="tenant role scopes created_at ends_at used_at"),
    Revocation: Declared(
        "access tokens that are refused before they expire",
        person="subject revoked_by", content="reason", plain="revocation_id number kind since expires_at revoked_at"),
    RevocationHead: Declared("where the revocations end", plain="number"),
    Erasure: Declared(
        "the evidence of erasures", person="principal_kind principal_id names", proof="key",
        plain="erasure_id of_tenant step segments counts begun_at ended_at digest proof"),
    Erased: Declared(
        "which rows an erasure has changed", plain="source row_id erasure_id before kept"),
    Webhook: Declared(
        "where a tenant is told of its events",
        person="principals created_by", content="url description reason", proof="secret_id previous_id",
        plain="webhook_id types previous_until position state created_at updated_at "
              "failing_since noticed_at succeeded_at reached"),
    WebhookHead: Declared("how many such endpoints a tenant has", plain="number"),
    WebhookDelivery: Declared(
        "what became of each event that was posted", content="reason",
        plain="webhook_id delivery_id type task_id state tries first_at last_at next_at http_status took_ms "
              "of_tenant"),
}
