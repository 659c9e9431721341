"""The table of the methods of A2A, which both bindings share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from asyncgate.extras.a2a import calls, push, streams
from asyncgate.extras.a2a.calls import Params, Visit


class Method(Struct, frozen=True):
    """A method, and the operation that counts as its call."""

    run: Callable[[Visit, Params], Awaitable[Any]]
    operation: str


METHODS = {
    "SendMessage": Method(calls.send_message, "create_task"),
    "SendStreamingMessage": Method(streams.stream_message, "create_task"),
    "GetTask": Method(calls.get_task, "get_task"),
    "ListTasks": Method(calls.list_tasks, "list_tasks"),
    "CancelTask": Method(calls.cancel_task, "cancel_task"),
    "SubscribeToTask": Method(streams.subscribe, "get_task"),
    "CreateTaskPushNotificationConfig": Method(push.create_config, "create_task_webhook"),
    "GetTaskPushNotificationConfig": Method(push.get_config, "list_task_webhooks"),
    "ListTaskPushNotificationConfigs": Method(push.list_configs, "list_task_webhooks"),
    "DeleteTaskPushNotificationConfig": Method(push.delete_config, "remove_task_webhook"),
    "GetExtendedAgentCard": Method(calls.get_card, "get_task"),
}
