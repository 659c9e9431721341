"""Push notifications: each configuration is a webhook of its task, so it is sent, tried again and given up as those."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncgate.extras.a2a import requests, v03, view
from asyncgate.extras.a2a.refusals import A2AError, translate
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.views import show_receipt

if TYPE_CHECKING:
    from asyncgate import Engine
    from asyncgate.extras.a2a.calls import Visit
    from asyncgate.parts.faces.serving import Serving

NEW_FORM, OLD_FORM = "a2a", "a2a-0.3"       # what is posted of an event: a StreamResponse; the task
PUSHED = sorted((view.GOES_ON | view.MAY_END) - {"input.expired"})
NO_PUSH = "this gate sends no push notifications; SendMessage waits for the outcome, and GetTask reads it"


def can_push(gate: Serving) -> bool:
    """Whether the gate has webhooks, and lets tasks have some."""
    return "create_task_webhook" in gate.operations and gate.settings.webhooks.max_per_task > 0


def check_sent(visit: Visit, how: requests.How) -> requests.Config | None:
    """Return the configuration that comes with a message, and refuse it before the message has made a task."""
    if (config := how.task_push_notification_config) is None:
        return None
    if not can_push(visit.gate):
        raise A2AError("PUSH_NOTIFICATION_NOT_SUPPORTED", NO_PUSH)
    from asyncgate.extras.webhooks import of_tasks

    visit.permit("create_task_webhook")
    try:
        of_tasks.check_request(visit.gate.engine, visit.read_ask("create_task_webhook", task_id="new",
                                                                 **describe_webhook(config)))
    except errors.GateError as refusal:
        raise translate(refusal, field="configuration.taskPushNotificationConfig") from None
    return config


def describe_webhook(config: requests.Config) -> dict[str, Any]:
    """Return the fields of the webhook that a configuration is."""
    how = config.authentication
    headers = {"authorization": f"{how.scheme} {how.credentials}"} if how.credentials else {}
    if config.token:
        headers["x-a2a-notification-token"] = config.token
    return {"endpoint": config.url, "headers": headers, "name": config.id or None}


async def keep_config(visit: Visit, task_id: str, config: requests.Config, past: bool) -> dict[str, Any]:
    """Keep a configuration; with `past` it is told of what has happened since the task was created, too."""
    made = await visit.perform("create_task_webhook", task_id=task_id, types=PUSHED, past=past,
                               form=OLD_FORM if visit.is_old else NEW_FORM, **describe_webhook(config))
    return show_config(made.webhook)


def show_config(webhook: Any) -> dict[str, Any]:
    """Show a configuration without its credentials and its token."""
    shown = {"id": webhook.description or webhook.webhook_id, "taskId": webhook.task_id, "url": webhook.endpoint}
    scheme = webhook.authorization_scheme
    return {**shown, "authentication": {"scheme": scheme}} if scheme else shown


async def find_configs(visit: Visit, params: requests.OfConfigs) -> list[Any]:
    """Return the webhooks that are configurations of a task of this agent: those of an id, or all."""
    await visit.read(params.task_id)
    webhooks = (await visit.perform("list_task_webhooks", task_id=params.task_id)).webhooks
    id = getattr(params, "id", None)
    return [webhook for webhook in webhooks if webhook.form in (NEW_FORM, OLD_FORM) and (
        id in (None, webhook.description, webhook.webhook_id))]


# The methods.


async def create_config(visit: Visit, params: requests.Config) -> dict[str, Any]:
    """Have notifications of a task posted from now on."""
    await visit.read(params.task_id)
    return await keep_config(visit, params.task_id, params, past=False)


async def get_config(visit: Visit, params: requests.OfConfig) -> dict[str, Any]:
    """Show one configuration."""
    for webhook in await find_configs(visit, params):
        return show_config(webhook)
    raise A2AError("TASK_NOT_FOUND", f"task {params.task_id} has no push notification configuration {params.id}",
                   taskId=params.task_id)


async def list_configs(visit: Visit, params: requests.OfConfigs) -> dict[str, Any]:
    """List the configurations of a task."""
    return {"configs": [show_config(webhook) for webhook in await find_configs(visit, params)], "nextPageToken": ""}


async def delete_config(visit: Visit, params: requests.OfConfig) -> dict[str, Any]:
    """Delete a configuration; that it is not there is as good."""
    for webhook in (await find_configs(visit, params))[:1]:
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
    record = show_receipt(tenant_id, receipt)
    ends = seen.state in view.ENDED_STATES and receipt.receipt_type in view.MAY_END and not view.read_receipt_body(
        seen, record).get("requeued")
    if is_old or ends:
        told = {"task": view.show_task(seen)}
        return encode_json(v03.show_result(told) if is_old else told)
    asked = [record] if receipt.receipt_type == "input.requested" else []
    return encode_json({"statusUpdate": {"taskId": seen.record.task_id, "contextId": seen.context_id,
                                         "status": view.follow_status(seen, record, asked)}})
