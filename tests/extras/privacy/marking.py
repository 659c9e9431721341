"""Marks in every kind of field: numbered, so that a search can say which one is left."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.verify_erasures import read_all
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.stored import Bulk, Claimed, Entry, Key, Outgoing, Presence, Schedule
from asyncgate.parts.model.stored_handover import Handover
from asyncgate.parts.model.stored_oauth import Consent, Grant, OAuthClient, SignInLink, User
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookHead
from asyncgate.parts.receipts import archive
from asyncgate.parts.upkeep import Upkeep

ADA = "zq000zq"
MARKED = re.compile(rb"zq\d{3}zq")
DAY = 86_400


class Marks:
    """Gives a new mark each time; the first one is the principal's own name."""

    def __init__(self) -> None:
        self.given = count(1)

    def __str__(self) -> str:
        return f"zq{next(self.given):03d}zq"


async def leave_marks(gate: Gate, marks: Marks, operator: str) -> None:
    """Let ada do everything that leaves a row, and let others have rows that name her."""
    await archive_work(gate, marks)
    for ended in ("completed", "failed", "canceled", "unlocated", "waits", "held") * 3:
        await own_task(gate, marks, ended)
    await work_for_others(gate)
    await schedule(gate, marks)
    await administer(gate)
    await gate.as_caller("agent", ADA, "agent", instance=str(marks)).list_tasks()
    await Upkeep(gate.engine).once("presence")
    await gate.backend.transact(gate.tenant_id, Needs(), lambda work: keep_books(work, marks))
    await gate.backend.transact(operator, Needs(), lambda work: keep_people(work, marks, gate.tenant_id))


async def create(gate: Gate, marks: Marks, **more: Any) -> str:
    """Create a task of ada; its type is hers, and who claims it takes any type."""
    made = await gate.as_agent(ADA).create_task(
        type=f"type-{marks}", payload={"a": str(marks), str(marks): [str(marks)]}, idempotency_key=str(marks),
        task_summary=str(marks), instructions=str(marks), expectations=str(marks),
        payload_pointer=f"s3://bucket/{marks}", priority=1000, **more)
    return str(made.task_id)


async def own_task(gate: Gate, marks: Marks, ended: str) -> str:
    """Let a task of ada end, or wait."""
    if ended == "waits":
        return await create(gate, marks, requirements={"capabilities": [str(marks)]})
    task_id = await create(gate, marks, **({"max_expiries": 1} if ended == "held" else {}))
    offer = await gate.claim("w1")
    assert offer is not None
    assert offer.task_id == task_id
    worker = gate.as_worker("w1")
    await worker.report_progress(**under(offer), progress={"at": str(marks)})
    await worker.record_step(**under(offer), seq=1, name=f"read {marks}", value={"at": str(marks)})
    await worker.append_output(**under(offer), chunks=[{"at": str(marks)}])
    if ended == "completed":
        await worker.complete(**under(offer), result={"text": str(marks)}, artifacts=[{"uri": f"file:///{marks}"}])
        ready = await gate.receipt(task_id, "task.result_ready")
        await gate.as_agent(ADA).ack_receipt(receipt_id=ready.receipt_id)
    elif ended == "unlocated":
        await worker.complete(**under(offer), result={"text": str(marks)})
    elif ended == "failed":
        await worker.fail(**under(offer), error={"why": str(marks)}, retryable=False)
    elif ended == "held":
        await gate.lose(offer)
    else:
        await gate.as_agent(ADA).cancel_task(task_id=task_id, reason=str(marks))
    return task_id


async def work_for_others(gate: Gate) -> None:
    """Let ada, as an agent that works, hold, lose and end work of bob."""
    ada = gate.as_caller("agent", ADA, "worker", instance=ADA)
    for step in ("lost", "ended", "held"):
        await gate.create(by="bob", type=f"bobs-{step}")
        offer = (await ada.lease_next(accept_types=[f"bobs-{step}"], claim_id=f"{step}-{ADA}")).tasks[0]
        if step == "lost":
            await gate.lose(offer)
        elif step == "ended":
            await ada.complete(**under(offer), result={"n": 1}, artifacts=[{"uri": "file:///bobs"}])
    await gate.create(by="bob", type="bobs-asked")
    offer = (await ada.lease_next(accept_types=["bobs-asked"])).tasks[0]
    await ada.request_input(**under(offer), key="may", message=f"May {ADA} go on?", to={"kind": "agent", "id": "eve"})
    for step in ("answered", "open"):
        await gate.create(by="bob", type=f"bobs-{step}")
        offer = (await gate.as_worker("w9").lease_next(accept_types=[f"bobs-{step}"])).tasks[0]
        await gate.as_worker("w9").request_input(**under(offer), key="may", message="May I?",
                                                 to={"kind": "agent", "id": ADA})
        if step == "answered":
            await gate.as_agent(ADA).answer_input(task_id=offer.task_id, key="may", action="accept", content=ADA)
    await ada.list_leases(worker_kind="agent", worker_id=ADA, worker_instance_id=ADA)


async def schedule(gate: Gate, marks: Marks) -> None:
    """Let ada own a schedule."""
    await gate.as_agent(ADA).create_task(type="schedule.create", payload=str(marks))
    offer = await gate.claim("cron", accept_types=["schedule.create"])
    assert offer is not None
    cron, name = gate.as_worker("cron"), f"s-{marks}"
    made = await cron.emit_receipt(receipt_type="schedule.created", schedule_id=name, **under(offer))
    await cron.complete(**under(offer), result={"schedule_id": name}, artifacts=[{"receipt_id": made.receipt_id}])


async def administer(gate: Gate) -> None:
    """Let ada have keys, pause and cancel work, and let others act on her."""
    root, ada = gate.as_admin(), gate.as_caller("agent", ADA, "admin")
    await root.issue_key(name=ADA, principal_kind="agent", principal_id=ADA, principal_instance_id=ADA)
    [key] = await read_all(gate.backend, gate.tenant_id, Key)
    seen = replace(key, places=f'["{ADA}"]')
    await gate.backend.transact(gate.tenant_id, Needs(records={(Key, (key.key_id,))}),
                                lambda work: work.keep_record(seen))
    await ada.issue_key(name="bob's", principal_kind="agent", principal_id="bob")
    await ada.pause_work(type="nothing", reason=ADA)
    await ada.declare_type(type="declared", description=f"what {ADA} asks for", payload_schema={"title": ADA},
                           result_schema={"title": ADA})
    await ada.declare_type(type=f"declared-{ADA}")
    await ada.set_limit(name="nothing", overrides={ADA: {"weight": 2}, "bob": {"weight": 2}})
    preview = await root.preview_bulk(action="cancel", created_by=ADA, created_by_kind="agent", type="nothing")
    await root.run_bulk(confirmation=preview.confirmation)
    preview = await ada.preview_bulk(action="cancel", type="nothing", reason=ADA)
    await ada.run_bulk(confirmation=preview.confirmation)


async def archive_work(gate: Gate, marks: Marks) -> None:
    """Let a task of ada and one of bob go to one segment of the archive."""
    await own_task(gate, marks, "completed")
    await gate.finished("w2", by="bob")
    gate.skip(40 * DAY)
    done = await archive.archive_receipts(gate.engine, gate.tenant_id, 1000)
    assert done.receipts > 6


def keep_books(work: Work, marks: Marks) -> None:
    """Leave rows of a ledger."""
    work.keep_record(Entry(f"r-{marks}", work.new_id(), "plan.made", "", "agent", ADA, "agent", "bob", "", "d",
                           f'{{"text":"{marks}"}}', "agent", ADA, "agent"))
    work.keep_record(Entry(f"r-{marks}", work.new_id(), "plan.made", "", "agent", "bob", "agent", ADA, "", "d",
                           f'{{"text":"{marks}"}}', "agent", "bob", "agent"))
    work.keep_record(Outgoing("not-sent", "", f'{{"from":{{"kind":"agent","id":"{ADA}"}},"text":"{marks}"}}', 0.0,
                              reason=str(marks)))
    work.keep_record(Schedule(f"s-{marks}", "agent", "bob", "agent", ADA, "no receipt",
                              details=f'{{"name":"{marks}"}}'))
    work.keep_record(Bulk("bulk-1", "cancel", "{}", "agent", ADA, 1, False, work.now, work.now, "", problem=str(marks)))
    claims = [Claimed(work.now, [f"type-{marks}"], [str(marks)])]
    work.keep_record(Presence("agent", ADA, str(marks), work.now, work.now, 1, to_canonical(claims).decode(), work.now))
    work.keep_record(Webhook("webhook-1", f"https://example.com/{ADA}", f"for {ADA}", "[]", f'["{ADA}"]', "s", None,
                             None, "", "disabled", f"disabled by {ADA}", work.now, f"agent {ADA}", work.now))
    work.keep_record(Webhook("task-1.0", f"https://example.com/{marks}", str(marks), "[]", "[]", "s", None, None, "",
                             "active", str(marks), work.now, f"agent {ADA}", work.now, task_id="task-1",
                             headers=str(marks)))
    work.keep_record(WebhookHead(1, 1))
    work.keep_record(Handover("refused", "agent", ADA, "1", f'{{"type":"{marks}"}}', 0.0, "not a request"))


def keep_people(work: Work, marks: Marks, tenant: str) -> None:
    """Leave rows of a person who acts as ada."""
    now = work.now
    user = "user-1"
    work.keep_record(User(user, f"https://{marks}.example.com", str(marks), f"{marks}@example.com", f"Ada {marks}",
                          tenant, "agent", ADA, "agent", None, None, f"agent {ADA}", now))
    work.keep_record(User("invited-1", "", "", "", "", tenant, "agent", "eve", "agent", None, None, "root", now,
                          accepted_as=user))
    work.keep_record(OAuthClient("client", "registered", f"The program of {ADA}",
                                 f'["https://example.com/{ADA}"]', None, "none", None, None, tenant, False, False, None,
                                 now, f"agent {ADA}", now))
    work.keep_record(Consent(user, "client", "[]", f"https://{marks}.example.com", now))
    work.keep_record(Grant(f"grant-{tenant}", user, "client", tenant, "agent", ADA, "agent", "[]", f"https://{marks}",
                           f"https://{marks}.example.com", str(marks), str(marks), now, 3600, now, now + 3600,
                           refresh_hash=str(marks), previous_hash=str(marks), seed=str(marks), place=str(marks),
                           last_used_at=now))
    work.keep_record(SignInLink(f"link-{marks}", tenant, "agent", ADA, "agent", None, now, now + 600))
