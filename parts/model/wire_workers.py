"""What goes over the wire about workers, and about what a task waits for."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Struct

from asyncgate.parts.model import examples, wire


class ListWorkers(wire.PageAsk, kw_only=True):
    """List those who claim tasks."""

    example = ({"limit": 20}, {"workers": [{
        "worker": {**examples.WORKER, "instance_id": "host-1"}, "first_seen_at": examples.NOW,
        "last_seen_at": examples.LATER, "sessions": 2,
        "last_claim_at": examples.LATER, "holding": 1, "leased": 42, "completed": 40, "failed": 1, "expired": 0,
        "released": 0,
        "claims": [{"claimed_at": examples.LATER, "accept_types": [], "capabilities": ["web.read"], "tasks": 0,
                    "why_none": None, "process": "web-3:4711", "gone_at": None}],
        "state": "working", "process": "web-3:4711"}]})
    next_step = "explain_task tells why a task is not leased by any of them."
    lists = "all"


# working: it holds leases and gives signs of life; idle: it asks for tasks; silent: neither.
WorkerState = Literal["working", "idle", "silent"]


class LastClaim(Struct):
    """The last claim that a worker made with one profile: the types it accepts, and what it can do."""

    claimed_at: datetime
    accept_types: list[str]             # empty: any
    capabilities: list[str]
    tasks: int                          # that it got
    why_none: str | None                # why it got none, if it was told
    process: str | None                 # where it ran, as it said: host and pid
    gone_at: datetime | None            # when it hung up or lost a lease; null if it has asked since


class WorkerRecord(Struct):
    """A worker: when it was here, what it offers, what it holds, and what it did."""

    worker: wire.Principal                   # with the instance that was seen last
    first_seen_at: datetime
    last_seen_at: datetime
    sessions: int
    last_claim_at: datetime
    holding: int                        # live leases, counted up to 1000
    leased: int                         # leases that it was ever granted
    completed: int
    failed: int
    expired: int
    released: int
    claims: list[LastClaim]             # its last profiles, the latest first
    state: WorkerState
    process: str | None                 # of its latest claim


class Workers(Struct):
    """A page of workers, in the order of their kinds and ids."""

    columns = "worker state process last_seen_at last_claim_at holding leased completed failed expired released"
    workers: list[WorkerRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class ExplainTask(wire.TaskAsk, kw_only=True):
    """Tell why a task is not done."""

    acts = False
    example = ({"task_id": examples.TASK_ID, **examples.ASKER}, {
        "task_id": examples.TASK_ID, "status": "queued", "cause": "no_worker", "as_of": examples.LATER,
        "origin": "agent ada",
        "summary": "No worker that can take page.summarize, which requires web.read, has asked for work: web.read is "
        "missing.",
        "evidence": {"type": "page.summarize", "needed": ["web.read"], "missing": ["web.read"], "workers": [{
            "worker": examples.WORKER, "asked_at": examples.NOW, "accept_types": [], "capabilities": ["pdf.read"]}]},
        "next": {"operation": "cancel_task", "arguments": {"task_id": examples.TASK_ID},
                 "why": "end it, or start a worker that can do it"}, "also": []})
    next_step = "Make the call that `next` names, or act on the evidence and ask again."


CauseName = Literal[
    "leased", "instance_gone", "lease_overdue", "input_required", "children_open", "key_taken", "on_hold", "paused",
    "tenant_suspended", "delay", "backoff", "parked", "jitter", "limit_reached", "lease_quota", "no_worker",
    "waiting_too_long", "behind", "workers_busy", "claimable", "owed", "ledger_parked", "ledger_waiting", "ended"]


class WorkerFact(Struct, omit_defaults=True):
    """What is known of a worker that matters to a task."""

    worker: wire.Principal
    asked_at: datetime | None = None        # its last claim
    accept_types: list[str] | None = None   # with that claim; empty: any
    capabilities: list[str] | None = None
    holding: int | None = None              # live leases, counted up to 1000
    last_seen_at: datetime | None = None    # its last call of any kind


class Evidence(Struct, omit_defaults=True):
    """The facts behind a cause; those that do not matter to it are absent."""

    since: datetime | None = None           # when the cause began, or was last not so
    until: datetime | None = None           # when it ends by itself
    attempt: int | None = None              # failed attempts
    max_attempts: int | None = None
    held: str | None = None                 # why it is on hold
    expiries: int | None = None             # leases lost
    lost_to: list[str] | None = None        # workers that lost them
    type: str | None = None                 # what a worker must accept
    needed: list[str] | None = None         # capabilities that a worker must have
    missing: list[str] | None = None        # what the nearest worker lacks: capabilities, or the type
    searched: int | None = None             # workers looked at, the last that asked; all, if absent
    workers: list[WorkerFact] | None = None
    ahead: int | None = None                # tasks before it, counted up to 1000
    usual_seconds: float | None = None      # what others of its queue had waited that were leased in the last hour
    in_use: int | None = None               # leases of the tenant, or under the limit
    limit: int | None = None                # leases that it may have
    limit_name: str | None = None           # the limit that keeps the task
    limit_key: str | None = None            # and the key, if it is the key that is full
    holders: list[str] | None = None        # tasks that count against it, the first few; or the one that has the key
    unique_key: str | None = None           # the key that another task has
    lease_id: str | None = None
    renewals: int | None = None
    instance_id: str | None = None          # the gate that sweeps the task
    last_beat_at: datetime | None = None    # of that gate
    swept_at: datetime | None = None        # when this gate last swept
    sweep_error: str | None = None          # of that sweep
    receipt_ids: list[str] | None = None
    reason: str | None = None               # the error; or what the ledger, or who paused or canceled, says
    by: wire.Principal | None = None             # who paused or canceled
    tries: int | None = None
    children: dict[str, int] | None = None      # how many are open, succeeded, failed, canceled


class NextCall(Struct):
    """A call that helps, and that the caller may make."""

    operation: str
    arguments: dict[str, Any]
    why: str


class Cause(Struct):
    """One cause: its name, a sentence, its evidence, and what to call next."""

    cause: CauseName
    summary: str
    evidence: Evidence
    next: NextCall


class Explanation(Struct):
    """Why a task is not done: the first cause, and others that also apply."""

    task_id: str
    status: wire.Status
    cause: CauseName
    summary: str
    evidence: Evidence
    next: NextCall
    also: list[Cause]
    as_of: datetime
    origin: Annotated[str, wire.says("who has created the task, and in which context if it came over A2A")]
