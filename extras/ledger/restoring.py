"""Restore the body of a receipt that the ledger has lost, from its task; the receipt's hash decides.

An integrated gate keeps no bodies, but most of what a body says is also in the task, in its lease, and in the task's
other receipts.  A restored body is used only if the receipt then has its own hash, so nothing else is ever sent than
what was lost.  What only the lost receipt said, such as the error of an attempt that was retried, cannot be restored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

import asyncgate
from asyncgate.extras.ledger.restated import body_of
from asyncgate.parts.model import content, stored
from asyncgate.parts.receipts.incoming import computed_hash
from asyncgate.parts.receipts.ledger_marks import STATED_PREFIX

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.extras.ledger.collected import Collected

MOST_DRAFTS = 500                   # bodies that are tried for one receipt
NOT_SAID = frozenset({"traceparent", "tracestate", "trace_link"})      # terms of a task that no receipt has
BESIDE = frozenset({"schema_version", "principal_instance_id", "status", "completion_metadata"})
OF_ERROR = ("error", "error_sha256", "error_bytes", "how_to_retrieve")

Draft = dict[str, Any]


class Evidence(Struct):
    """What is known about the task of a lost receipt."""

    task: stored.Task | None
    lease: stored.Lease | None
    others: dict[str, stored.Receipt]                  # receipts of the task at the ledger, by id
    capabilities: Sequence[list[str]] = ()      # of the worker, as it claims tasks


async def restore_bodies(backend: Backend, tenant_id: str, lost: Iterable[tuple[str, str]],
                         collected: Collected) -> dict[str, str]:
    """Return the bodies of lost receipts, given as task and receipt, as far as they can be restored, by id.

    What a worker stated itself is not restored: it is the worker's word, and not the gate's to say again.
    """
    by_task, bodies = defaultdict[str, list[str]](list), dict[str, str]()
    for task_id, receipt_id in lost:
        if await backend.record(tenant_id, stored.LedgerMark, STATED_PREFIX + receipt_id) is None:
            by_task[task_id].append(receipt_id)
    for task_id, ids in by_task.items():
        known = await gather_evidence(backend, tenant_id, task_id, collected)
        for receipt_id in ids:
            receipt = await backend.receipt(tenant_id, receipt_id)
            if receipt is not None and (body := await asyncio.to_thread(restore_body, receipt, known)) is not None:
                bodies[receipt_id] = body
                known.others[receipt_id] = replace(receipt, body=body)
    return bodies


async def gather_evidence(backend: Backend, tenant_id: str, task_id: str, collected: Collected) -> Evidence:
    """Return what the gate and its ledger have of a task."""
    task, lease, _ = await backend.task(tenant_id, task_id) or (None, None, None)
    others = {receipt.receipt_id: receipt for receipt in collected.of_task(task_id)}
    if lease is None:
        return Evidence(task, lease, others)
    presence = await backend.record(tenant_id, stored.Presence, lease.worker_kind, lease.worker_id)
    claims = msgspec.json.decode(presence.claims, type=list[stored.Claimed]) if presence else []
    return Evidence(task, lease, others, [claim.capabilities for claim in claims])


def restore_body(receipt: stored.Receipt, known: Evidence) -> str | None:
    """Return the body of a receipt; None if it cannot be restored."""
    draft = DRAFTS.get(receipt.receipt_type)
    for candidate in islice(draft(receipt, known), MOST_DRAFTS) if draft else ():
        whole = {name: value for name, value in candidate.items() if value is not None}
        whole["schema_version"] = asyncgate.SCHEMA_VERSION
        body = content.to_canonical(whole).decode()
        if computed_hash(replace(receipt, body=body)) == receipt.hash:
            return body
    return None


def _assigned(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    if (task := known.task) is None:
        return
    terms = {name: value for name, value in content.decode_json(task.terms).items() if name not in NOT_SAID}
    digest = hashlib.sha256(content.to_canonical(content.decode_json(task.payload))).hexdigest()
    yield {**terms, "type": task.type, "requirements": content.decode_json(task.requirements),
           "payload_pointer": task.payload_pointer, "payload_sha256": digest,
           "payload_bytes": len(task.payload.encode())}


def _accepted(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    if (task := known.task) is None:
        return
    needed = sorted(content.needs_of(Raw(task.requirements.encode())))
    fences: Iterable[int] = range(task.fence, 0, -1)
    if known.lease is not None and known.lease.accepted == receipt.receipt_id:
        fences = (known.lease.fence,)
    for can, fence, attempt in product((needed, *known.capabilities, []), fences, range(task.attempt + 1)):
        for session in _sessions(receipt, known):
            yield {"worker_capabilities": can, "attempt": attempt, "fence": fence, **session}


def _completed(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    bodies = [*_told(receipt, known), *_succeeded(known)]
    for body, session in product(bodies, _sessions(receipt, known)):
        yield {**body, **session}


def _failed(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    if (task := known.task) is None:
        return
    failures = [*_told(receipt, known), *_enclosed("error", task)]
    for error, again, session in product(failures, (True, False), _sessions(receipt, known)):
        yield {**error, "attempt": task.attempt, "requeued": False, "retry_recommended": again, **session}


def _canceled(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    yield from _told(receipt, known)
    yield {"canceled_by": {"kind": receipt.from_kind, "id": receipt.from_id}}


def _result_ready(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    if (task := known.task) is None:
        return
    for end in (known.others[id] for id in receipt.parents if id in known.others):
        body = {name: value for name, value in body_of(end).items() if name not in BESIDE}
        if end.receipt_type == asyncgate.FAILED.type:
            body = {name: value for name, value in body.items() if name in OF_ERROR}
        yield {"status": task.status, **body}
    for body in (*_succeeded(known), *_enclosed("error", task), {}):
        yield {"status": task.status, **body}


def _expired(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    if (task := known.task) is None:
        return
    accepted = [known.others[id] for id in receipt.parents if id in known.others]
    workers = [*(row.from_id for row in accepted), *([known.lease.worker_id] if known.lease else [])]
    for worker, attempt, again, reason in product(
            workers, range(task.attempt + 1), (True, False), ("expired", "released")):
        yield {"task_id": receipt.task_id, "previous_worker_id": worker, "attempt": attempt, "requeued": again,
               "reason": reason}


def _acknowledged(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    for parent in receipt.parents:
        yield {"receipt_id": parent}


DRAFTS: dict[str, Callable[[stored.Receipt, Evidence], Iterator[Draft]]] = {
    asyncgate.ASSIGNED.type: _assigned, asyncgate.ACCEPTED.type: _accepted, asyncgate.COMPLETED.type: _completed,
    asyncgate.FAILED.type: _failed, asyncgate.CANCELED.type: _canceled, asyncgate.RESULT_READY.type: _result_ready,
    asyncgate.EXPIRED.type: _expired, asyncgate.ACKNOWLEDGED.type: _acknowledged}


def _told(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    """Yield what the owner was told of an end."""
    for other in known.others.values():
        if other.receipt_type == asyncgate.RESULT_READY.type and receipt.receipt_id in other.parents:
            yield {name: value for name, value in body_of(other).items() if name not in BESIDE}


def _succeeded(known: Evidence) -> Iterator[Draft]:
    """Yield what a success says, as far as the task says it."""
    if (task := known.task) is None or task.outcome is None:
        return
    summary = content.find_summary(content.decode_json(task.outcome))
    located = {"artifacts": content.decode_json(task.artifacts)} if task.artifacts else {}
    for enclosed in _enclosed("result", task):
        yield {"result_summary": summary, **enclosed, **located}


def _enclosed(name: str, task: stored.Task) -> Iterator[Draft]:
    """Yield an outcome as receipts enclose it: itself, or as hash and size if it is large."""
    if task.outcome is None or (value := content.decode_json(task.outcome)) is None:
        yield {}
        return
    yield content.enclose_whole(name, value)
    yield content.enclose_digest(name, value, len(task.outcome.encode()), task.task_id)


def _sessions(receipt: stored.Receipt, known: Evidence) -> Iterator[Draft]:
    """Yield the instance of the worker, as its receipts name it, and none."""
    lease = known.lease
    if lease is not None and lease.worker_instance is not None and lease.lease_id == receipt.lease_id:
        yield {"principal_instance_id": lease.worker_instance}
    for other in known.others.values():
        if other.lease_id == receipt.lease_id and "principal_instance_id" in (body := body_of(other)):
            yield {"principal_instance_id": body["principal_instance_id"]}
    yield {}
