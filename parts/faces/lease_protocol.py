"""The lease protocol: `POST /lease` and `POST /lease/{lease_id}/heartbeat`, for workers that implement it.

A thin translation: `lease_next` grants an offer, a heartbeat renews it, and the engine decides permissions, limits and
refusals.  A poll offers one task, on a lease of 900 seconds, or answers 204.  An unused offer expires.  The gate does
not enforce the protocol's pause of 30 seconds before the next offer.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, ClassVar

from msgspec import Raw, Struct, field

from asyncgate import Caller, Engine, Operation, its_lease
from asyncgate.parts.model import errors, examples, wire

LEASE_SECONDS = 900
# {type}.{instance}: at least one dot, no dot at an end, only visible ASCII.
WORKER_ID = r"^[!-\-/-~]+(\.[!-\-/-~]+)+$(?!\n)"
LONGEST_WORKER_ID = 200
is_worker_id = re.compile(WORKER_ID).fullmatch

WorkerId = Annotated[str, wire.says("the worker, as {type}.{instance}; stable across its restarts", pattern=WORKER_ID,
                                    maxLength=LONGEST_WORKER_ID)]


def check_worker_id(worker_id: str | None) -> None:
    """Refuse a worker id that does not have the protocol's form."""
    if worker_id is not None and (len(worker_id) > LONGEST_WORKER_ID or not is_worker_id(worker_id)):
        raise errors.InvalidWorkerId("worker_id must match pattern {type}.{instance}, in "
                                     f"{LONGEST_WORKER_ID} characters at most")


class PollForTask(wire.AsWorker, kw_only=True):
    """Ask for the next task in the lease protocol."""

    needed: ClassVar[tuple[str, ...]] = ("worker_id",)
    example = ({"worker_id": "worker.reader-1", "capabilities": ["web.read"], "max_tasks": 1}, {
        "lease_id": examples.LEASE, "lease_expires_at": examples.LATER, "task": {
            "task_id": examples.TASK_ID, "principal_ai": "ada", "task_type": "page.summarize",
            "task_summary": "page.summarize",
            "task_body": None, "payload_pointer": None, "inputs": examples.WORK["payload"],
            "expected_outcome_kind": None,
            "expected_artifact_mime": None, "attempt": 0, "fence": 1, "caused_by_receipt_id": examples.DUTY}})
    refusals = (errors.InvalidWorkerId,)
    worker_id: WorkerId = ""
    capabilities: wire.Capabilities | None = None
    preferred_kinds: Annotated[wire.Types | None,
                               wire.says("types that are offered first; other types still follow")] = None
    max_tasks: Annotated[wire.Whole | None, wire.says("ignored: one task is offered")] = None

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)


class Heartbeat(wire.AsWorker, kw_only=True):
    """Report that work on a lease continues."""

    needed: ClassVar[tuple[str, ...]] = ("lease_id",)
    example = ({"lease_id": examples.LEASE, "worker_id": "worker.reader-1"},
               {"lease_id": examples.LEASE, "lease_expires_at": examples.LATER})
    refusals = (errors.InvalidWorkerId, *wire.RenewLease.refusals)
    lease_id: wire.Name = ""
    worker_id: WorkerId | None = None

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)


class OfferedTask(Struct):
    """A task in the lease protocol."""

    task_id: str
    principal_ai: str
    task_type: str
    task_summary: str
    task_body: str | None
    payload_pointer: str | None
    inputs: wire.AnyJson
    expected_outcome_kind: str | None
    expected_artifact_mime: str | None
    attempt: int
    fence: int
    caused_by_receipt_id: str
    progress: Annotated[wire.AnyJson,
                        wire.says("the last progress of an earlier lease")] = field(default_factory=wire.nothing)


class TaskOffer(Struct):
    """One leased task."""

    lease_id: str
    lease_expires_at: datetime
    task: OfferedTask


class LeaseExtended(Struct):
    """The new end of a renewed lease."""

    lease_id: str
    lease_expires_at: datetime


class Polled(wire.LeaseNext, kw_only=True):
    """A claim by the lease protocol; its worker stores the acceptance receipt in the ledger itself."""

    accepts_itself: ClassVar[bool] = True


async def offer_task(engine: Engine, caller: Caller, ask: PollForTask) -> TaskOffer | None:
    """Offer the next task that this worker can do, on a lease of 15 minutes; 204 if there is none.

    The lease protocol's form of lease_next.  Renew the lease with its heartbeat, then complete or fail the task with
    its lease_id.  An unused offer expires and costs nothing.
    """
    wanted = Polled(worker_id=ask.worker_id, worker_kind=ask.worker_kind, capabilities=ask.capabilities,
                    worker_instance_id=ask.worker_instance_id, preferred_kinds=ask.preferred_kinds, max_tasks=1,
                    lease_ttl_seconds=LEASE_SECONDS)
    offers: wire.Offers = await engine.lease_next(caller, wanted)
    return show_task_offer(offers.tasks[0]) if offers.tasks else None


def show_task_offer(offer: wire.Offer) -> TaskOffer:
    """Show an offer in the form of the protocol."""
    inputs = offer.payload if bytes(offer.payload) != bytes(wire.JSON_NULL) else Raw(b"{}")
    return TaskOffer(offer.lease_id, offer.expires_at, OfferedTask(
        offer.task_id, offer.principal_ai, offer.type, offer.task_summary or offer.type, offer.instructions,
        offer.payload_pointer, inputs, offer.expected_outcome_kind, offer.expected_artifact_mime, offer.attempt,
        offer.fence, offer.caused_by_receipt_id, offer.progress))


async def extend_lease(engine: Engine, caller: Caller, ask: Heartbeat) -> LeaseExtended:
    """Renew a live lease; it then lasts 15 minutes from now.

    The lease protocol's form of renew_lease.
    """
    renewal = wire.RenewLease(lease_id=ask.lease_id, worker_id=ask.worker_id, worker_kind=ask.worker_kind,
                              worker_instance_id=ask.worker_instance_id, extend_by_seconds=LEASE_SECONDS)
    renewed: wire.Renewed = await engine.write(Engine.renew_lease, its_lease, caller, renewal)
    return LeaseExtended(ask.lease_id, renewed.expires_at)


# Not in the table of operations: both call operations of the table, so they need no tool and no command.
LEASE_PROTOCOL: tuple[Operation, ...] = (
    Operation(offer_task, "POST /lease", "w A", "tasks:lease", "W", nothing="No task for this worker is available."),
    Operation(extend_lease, "POST /lease/{lease_id}/heartbeat", "w A", "tasks:lease", "W", heartbeat=True))
