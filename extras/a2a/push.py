"""Push notifications: each configuration is a webhook of its task, so it is sent, tried again and given up as those."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncgate.extras.a2a import requests, v03, view
from asyncgate.extras.a2a.refusals import A2AError, translate
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.model.views import show_receipt

if TYPE_CHECKING:
    from asyncgate import Engine
    from asyncgate.extras.a2a.calls import Params, Visit
    from asyncgate.parts.faces.serving import Serving

NEW_FORM, OLD_FORM = "a2a", "a2a-0.3"       # what is posted of an event: a StreamResponse; the task
PUSHED = sorted((view.GOES_ON | view.MAY_END) - {"input.expired"})
NO_PUSH = "this gate sends no push notifications; SendMessage waits for the outcome, and GetTask reads it"
LONGEST_URL, LONGEST_SECRET = 2000, 3900


def can_push(gate: Serving) -> bool:
    """Whether the gate has webhooks, and lets tasks have some."""
    return "create_task_webhook" in gate.operations and gate.settings.webhooks.max_per_task > 0


def read_sent(visit: Visit, how: Params) -> dict[str, Any] | None:
    """Read the configuration that comes with a message, and refuse it before the message has made a task."""
    config = requests.take_object(how, "taskPushNotificationConfig", "configuration.")
    if not config:
        return None
    if not can_push(visit.gate):
        raise A2AError("PUSH_NOTIFICATION_NOT_SUPPORTED", NO_PUSH)
    from asyncgate.extras.webhooks import of_tasks

    visit.permit("create_task_webhook")
    fields = read_config(config, place := "configuration.taskPushNotificationConfig.")
    try:
        of_tasks.check_request(visit.gate.engine, visit.read_ask("create_task_webhook", task_id="new", **fields))
    except errors.GateError as refusal:
        raise translate(refusal, field=place.rstrip(".")) from None
    return fields


def read_config(params: Params, place: str = "") -> dict[str, Any]:
    """Read a configuration; return the fields of its webhook."""
    how, headers = requests.take_object(params, "authentication", place), dict[str, str]()
    url, token = [requests.take_text(params, name, place, most)
                  for name, most in (("url", LONGEST_URL), ("token", LONGEST_SECRET))]
    if url is None:
        raise requests.refuse(f"{place}url", "the address to which notifications are posted")
    scheme = requests.take_text(how, "scheme", f"{place}authentication.") or "Bearer"
    if credentials := requests.take_text(how, "credentials", f"{place}authentication.", LONGEST_SECRET):
        headers["authorization"] = f"{scheme} {credentials}"
    if token is not None:
        headers["x-a2a-notification-token"] = token
    return {"endpoint": url, "headers": headers, "name": requests.take_text(params, "id", place)}


async def keep_config(visit: Visit, task_id: str, config: dict[str, Any], past: bool) -> dict[str, Any]:
    """Keep a configuration; with `past` it is told of what has happened since the task was created, too."""
    made = await visit.perform("create_task_webhook", task_id=task_id, types=PUSHED, past=past,
                               form=OLD_FORM if visit.is_old else NEW_FORM, **config)
    return show_config(made.webhook)


def show_config(webhook: Any) -> dict[str, Any]:
    """Show a configuration without its credentials and its token."""
    shown = {"id": webhook.description or webhook.webhook_id, "taskId": webhook.task_id, "url": webhook.endpoint}
    scheme = webhook.authorization_scheme
    return {**shown, "authentication": {"scheme": scheme}} if scheme else shown


async def read_configs(visit: Visit, params: Params) -> tuple[str, list[Any]]:
    """Return a task of this agent, and the webhooks that are its configurations."""
    task_id = requests.require_id(params, "taskId")
    await visit.read(task_id)
    webhooks = (await visit.perform("list_task_webhooks", task_id=task_id)).webhooks
    return task_id, [webhook for webhook in webhooks if webhook.form in (NEW_FORM, OLD_FORM)]


def find_config(webhooks: list[Any], id: str) -> Any:
    """Return the configuration of an id, None if there is none."""
    return next((webhook for webhook in webhooks if id in (webhook.description, webhook.webhook_id)), None)


# The methods.


async def create_config(visit: Visit, params: Params) -> dict[str, Any]:
    """Have notifications of a task posted from now on."""
    config = read_config(params)
    task_id = requests.require_id(params, "taskId")
    await visit.read(task_id)
    return await keep_config(visit, task_id, config, past=False)


async def get_config(visit: Visit, params: Params) -> dict[str, Any]:
    """Show one configuration."""
    (task_id, webhooks), id = await read_configs(visit, params), requests.require_id(params)
    if (webhook := find_config(webhooks, id)) is None:
        raise A2AError("TASK_NOT_FOUND", f"task {task_id} has no push notification configuration {id}", taskId=task_id)
    return show_config(webhook)


async def list_configs(visit: Visit, params: Params) -> dict[str, Any]:
    """List the configurations of a task."""
    _, webhooks = await read_configs(visit, params)
    return {"configs": [show_config(webhook) for webhook in webhooks], "nextPageToken": ""}


async def delete_config(visit: Visit, params: Params) -> dict[str, Any]:
    """Delete a configuration; that it is not there is as good."""
    (_, webhooks), id = await read_configs(visit, params), requests.require_id(params)
    if (webhook := find_config(webhooks, id)) is not None:
        await visit.perform("remove_task_webhook", webhook_id=webhook.webhook_id)
    return {}


# What is posted.


def join_forms(gate: Serving, engine: Engine) -> None:
    """Let webhooks post what A2A makes of an event."""
    from asyncgate.extras.webhooks import Forms

    engine.extend(Forms({NEW_FORM: partial(render, gate, False), OLD_FORM: partial(render, gate, True)}))


async def render(gate: Serving, is_old: bool, tenant_id: str, receipt: stored.Receipt) -> bytes | None:
    """Return what is posted of a receipt: a StreamResponse of 1.0, or the task of 0.3; None if the task is gone.

    The end is told with the whole task, for it has the artifacts; what comes before it with the state that it led to.
    """
    from asyncgate.extras.a2a.calls import OwnVisit

    if (snapshot := await gate.engine.backend.task(tenant_id, receipt.task_id)) is None:
        return None
    visit = OwnVisit(gate, snapshot[0].type, gate.engine.make_own_caller(tenant_id))
    seen = await visit.read(receipt.task_id)
    if is_old:
        return encode_json(v03.show_whole(view.show_task(seen)))
    record = show_receipt(tenant_id, receipt)
    body = decode_json(bytes(record.body)) or {}
    if receipt.receipt_type in view.MAY_END and not body.get("requeued"):
        return encode_json({"task": view.show_task(seen)})
    asked = [record] if receipt.receipt_type == "input.requested" else []
    return encode_json({"statusUpdate": {"taskId": seen.record.task_id, "contextId": seen.context_id,
                                         "status": view.make_status(seen, record, asked)}})
