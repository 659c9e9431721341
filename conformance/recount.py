"""Usage, counted again from receipts and tasks alone: it must be what the meters say (spec 21.6.4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import chain, pairwise

from msgspec import Struct
from msgspec.structs import astuple

from asyncgate import Engine, Receipt, Task
from asyncgate.parts.identity.metering import floor_to
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.identity.usage import read_use
from asyncgate.parts.model import stored, stored_journal
from asyncgate.parts.model.content import decode_json

END_TYPES = ("task.completed", "task.failed", "task.canceled", "lease.expired")


class Used(Struct):
    """What a tenant used until a moment."""

    tasks: int = 0
    lease_ms: int = 0
    receipt_byte_seconds: int = 0
    payload_byte_seconds: int = 0


async def wrong_usage(engine: Engine, tenant_id: str) -> list[str]:
    """Return how the usage events differ from what receipts and tasks say, and from each other."""
    events = [*chain(*await read_use(engine, tenant_id, 0))]
    until = events[-1].ends if events else 0
    counted = Used(*(sum(amounts) for amounts in zip(*(astuple(event)[4:8] for event in events), strict=True)))
    there = await recount(engine, tenant_id, until)
    wrong = [f"usage is {counted} until {until}, and counted again {there}"] if counted != there else []
    wrong += [f"{earlier} and {later} do not follow each other" for earlier, later in pairwise(events)
              if earlier.ends > later.begins or earlier.period >= later.period]
    return wrong + [f"{event} crosses midnight" for event in events
                    if event.ends > floor_to(event.begins, 86_400) + 86_400]


async def wrong_levels(engine: Engine, tenant_id: str) -> list[str]:
    """Return how far leases and stored bytes, as they are metered now, are from what is there; also with an archive."""
    head = await engine.backend.record(tenant_id, stored.UsageHead) or stored.UsageHead(0)
    meters = [row async for row in read_rows(engine, tenant_id, stored.Meter)]
    tasks = [task async for task in read_rows(engine, tenant_id, Task)]
    counted = [sum(getattr(struct, name) for struct in (head, *meters))
               for name in stored.UsageHead.__struct_fields__[1:]]
    there = [sum(task.status in stored.ACTIVE for task in tasks),
             sum([len(receipt.body.encode()) async for receipt in list_receipts(engine, tenant_id)]),
             sum(len((text or "").encode()) for task in tasks for text in (task.payload, task.outcome))
             + sum([len(step.value.encode())
                    async for step in read_rows(engine, tenant_id, stored_journal.RecordedStep)])]
    return [f"metered are {counted} leases, bytes of receipts and of payloads, but there are {there}"] * (
        counted != there)


async def recount(engine: Engine, tenant_id: str, until: int) -> Used:
    """Count the usage of a tenant that has no archive."""
    used, begun, sizes = Used(), dict[str, int](), dict[str, int]()     # of payloads, by task
    async for receipt in list_receipts(engine, tenant_id):
        at = int(receipt.created_at * 1000)
        used.receipt_byte_seconds += len(receipt.body.encode()) * (until - at // 1000)
        used.tasks += receipt.receipt_type == "task.assigned"
        if receipt.receipt_type in ("task.assigned", "task.amended"):
            size = decode_json(receipt.body)["payload_bytes"]
            used.payload_byte_seconds += (size - sizes.get(receipt.task_id, 0)) * (until - at // 1000)
            sizes[receipt.task_id] = size
        if receipt.receipt_type == "task.accepted":
            begun[receipt.task_id] = at
        elif receipt.task_id in begun and (receipt.receipt_type in END_TYPES or (
                receipt.receipt_type == "input.requested" and decode_json(receipt.body)["lease_ended"])):
            used.lease_ms += at - begun.pop(receipt.task_id)
    used.lease_ms += sum(until * 1000 - at for at in begun.values())
    async for task in read_rows(engine, tenant_id, Task):
        if task.outcome and task.completed_at:
            used.payload_byte_seconds += len(task.outcome.encode()) * (until - int(task.completed_at * 1000) // 1000)
    async for step in read_rows(engine, tenant_id, stored_journal.RecordedStep):
        used.payload_byte_seconds += len(step.value.encode()) * (until - int(step.recorded_at))
    return used


async def list_receipts(engine: Engine, tenant_id: str) -> AsyncIterator[Receipt]:
    """Yield all receipts, oldest first."""
    async for row in read_rows(engine, tenant_id, Receipt):
        yield row
