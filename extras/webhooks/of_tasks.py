"""Webhooks of one task: whoever may read it has its events posted, with headers that only the receiver is to see.

They are endpoints among the others, so sender, signature, retries, parking, address rules and deliveries are the same.
The id of one is that of its task and a number below `webhooks.max_per_task`, so callers at the same moment take no more
places than there are.  One ends when its task has ended and all of it is delivered; upkeep deletes it later.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from msgspec.structs import replace

from asyncgate import Caller, Engine, Operation, Work, speaker
from asyncgate.extras.webhooks import Forms, admin, events, sealing, wire_webhooks
from asyncgate.extras.webhooks.sources import find_position
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.model import errors, queries, stored_webhooks, wire

MOST_PLACES = 100       # of a task
is_header_name = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}").fullmatch
is_header_value = re.compile(r"[!-~](?:[\t -~]{0,3998}[!-~])?").fullmatch
# Those that say how a request is read, and those that the gate signs.
OWN_HEADERS = frozenset({"connection", "content-encoding", "content-length", "content-type", "expect", "host",
                         "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer",
                         "transfer-encoding", "upgrade", "user-agent"})


async def create_task_webhook(engine: Engine, caller: Caller,
                              ask: wire_webhooks.CreateTaskWebhook) -> wire_webhooks.CreatedWebhook:
    """Have the events of a task posted to an endpoint until it ends; only this answer shows the secret.

    It tells what has happened since the task was created, so nothing is missed.  The headers are for the receiver:
    they are sealed, and nobody is shown them again.  A webhook of the same name by the same caller is replaced.
    """
    task, *_ = await engine.read_task(caller, ask.task_id)
    check_request(engine, ask)
    whom, tenant_id = str(speaker(caller, ask)), caller.tenant_id
    position = task.duty if ask.past else await find_position(engine, tenant_id, frozenset())
    places = [f"{task.task_id}.{place}" for place in range(engine.settings.webhooks.max_per_task)]

    def create(work: Work) -> stored_webhooks.Webhook:
        head = work.find_record(stored_webhooks.WebhookHead) or stored_webhooks.WebhookHead(0)
        rows = {id: work.find_record(stored_webhooks.Webhook, id) for id in places}
        old = next((row for row in rows.values() if row is not None and ask.name and row.state != "removing" and (
            row.description, row.created_by) == (ask.name, whom)), None)
        webhook_id = old.webhook_id if old is not None else choose_place(rows)
        goes_on = old is not None and old.state == "active" and old.position
        new = stored_webhooks.Webhook(
            webhook_id, ask.endpoint, ask.name or "", admin.encode(ask.types), "[]", secrets.token_hex(16), None, None,
            goes_on or position, "active", None, work.now, whom, work.now, task_id=task.task_id,
            headers=sealing.seal_headers(engine.backend.secret, tenant_id, webhook_id, ask.headers), form=ask.form)
        if old is None or old.state == "ended":
            check_room(engine, head)
            work.keep_record(replace(head, tasks=head.tasks + 1))
        work.keep_record(new)
        audit_change(engine, work, "webhook_created", "info", caller, webhook_id=webhook_id, endpoint=new.url,
                     task_id=task.task_id)
        return new
    new = await admin.change_rows(engine, caller, tenant_id, [
        (stored_webhooks.WebhookHead, ()), *((stored_webhooks.Webhook, (id,)) for id in places)], create)
    admin.look_soon(engine, tenant_id)
    return wire_webhooks.CreatedWebhook(admin.secret_of(engine, tenant_id, new), show(engine, tenant_id, new))


async def list_task_webhooks(engine: Engine, caller: Caller,
                             ask: wire_webhooks.ListTaskWebhooks) -> wire_webhooks.Webhooks:
    """List the webhooks of a task, without their secrets and headers: all of them for its owner, else one's own."""
    rows = await read_own(engine, caller, ask.task_id, ask)
    return wire_webhooks.Webhooks([show(engine, caller.tenant_id, row) for row in rows])


async def remove_task_webhook(engine: Engine, caller: Caller, ask: wire_webhooks.RemoveTaskWebhook) -> wire.Ok:
    """Remove a webhook of a task, with its headers and its deliveries; a request on its way may still arrive."""
    task_id = ask.webhook_id.rpartition(".")[0]
    if ask.webhook_id not in {row.webhook_id for row in await read_own(engine, caller, task_id, ask)}:
        raise errors.WebhookNotFound(f"no webhook {ask.webhook_id} of yours; list_task_webhooks shows those of a task")

    def stop(work: Work) -> None:
        admin.begin_removal(work, old := admin.require_webhook(work, ask.webhook_id))
        audit_change(engine, work, "webhook_removed", "info", caller, webhook_id=old.webhook_id, endpoint=old.url,
                     task_id=old.task_id)
    await admin.change_rows(engine, caller, caller.tenant_id, admin.keys_of(ask.webhook_id), stop)
    await admin.finish_removal(engine, caller.tenant_id, ask.webhook_id)
    admin.look_soon(engine, caller.tenant_id)
    return wire.Ok(True)


# What they share.


async def read_own(engine: Engine, caller: Caller, task_id: str, ask: wire.Ask) -> list[stored_webhooks.Webhook]:
    """Return the webhooks of a task that the caller may see: all for its owner and for an admin, else its own."""
    task, *_ = await engine.read_task(caller, task_id)
    whom, first = speaker(caller, ask), f"{task.task_id}."
    sees_all = caller.sees_all or task.owner.same(whom)
    rows = await engine.backend.page(caller.tenant_id, queries.Rows(stored_webhooks.Webhook, first, MOST_PLACES))
    return [row for row in rows if row.webhook_id.startswith(first) and row.state != "removing"
            and (sees_all or row.created_by == str(whom))]


def check_room(engine: Engine, head: stored_webhooks.WebhookHead) -> None:
    """Refuse more webhooks of tasks than a tenant may have."""
    most = engine.settings.webhooks.max_of_tasks
    if head.tasks >= most:
        raise errors.QuotaExceeded(
            f"{head.tasks} webhooks of this tenant's tasks have not ended, and the limit is {most}; one ends with its "
            "task, and remove_task_webhook removes one", quota="task_webhooks", limit=most)


def choose_place(rows: Mapping[str, stored_webhooks.Webhook | None]) -> str:
    """Return a free place of a task; raises QuotaExceeded."""
    if (free := next((id for id, row in rows.items() if row is None), None)) is None:
        raise errors.QuotaExceeded(f"this task has {len(rows)} webhooks, which is the limit; remove_task_webhook "
                                   "removes one", quota="webhooks_of_task", limit=len(rows))
    return free


def check_request(engine: Engine, ask: wire_webhooks.CreateTaskWebhook) -> None:
    """Refuse an endpoint that could never be called, events that no task has, and headers that the gate itself sets."""
    if events.USAGE in ask.types:
        raise errors.InvalidRequest(f"types: {events.USAGE} is not an event of a task; create_webhook tells of usage")
    admin.check_endpoint(engine, ask.endpoint, ask.types)
    forms = engine.find_extension(Forms)
    if ask.form != events.AS_RECEIPT and (forms is None or ask.form not in forms.renders):
        known = [events.AS_RECEIPT, *(forms.renders if forms is not None else ())]
        raise errors.InvalidRequest(f"form: events are posted as {' or '.join(known)}")
    names = [name.lower() for name in ask.headers]
    for name, value in ask.headers.items():     # Security: no error shows a value
        if not is_header_name(name) or not is_header_value(value):
            raise errors.InvalidRequest("headers: a name consists of letters, digits and hyphens, and a value of 1 to "
                                        "4000 printable ASCII characters, without line ends")
        if name.lower() in OWN_HEADERS or name.lower().startswith("webhook-"):
            raise errors.InvalidRequest(f"headers: the gate itself sets {name.lower()}; leave it out")
    if len(set(names)) < len(names):
        raise errors.InvalidRequest("headers: a name appears twice; upper and lower case are the same")


def show(engine: Engine, tenant_id: str, row: stored_webhooks.Webhook) -> wire_webhooks.WebhookRecord:
    """Show a webhook of a task; of its headers only the names, and how the receiver is authorized."""
    record = admin.as_webhook_record(tenant_id, row)
    headers = sealing.open_headers(engine.backend.secret, tenant_id, row) or {}
    scheme, blank, _ = headers.get("authorization", "").partition(" ")
    record.task_id, record.form, record.headers = row.task_id, row.form, sorted(headers)
    record.authorization_scheme = scheme if blank else None
    return record


READERS, SCOPES = "a w A", "tasks:write tasks:lease"
OPERATIONS = [
    Operation(create_task_webhook, "POST /v1/tasks/{task_id}/webhooks", READERS, SCOPES, "W"),
    Operation(list_task_webhooks, "GET /v1/tasks/{task_id}/webhooks", READERS, "tasks:read tasks:lease", "R"),
    Operation(remove_task_webhook, "POST /v1/task-webhooks/{webhook_id}/remove", READERS, SCOPES, "W"),
]
