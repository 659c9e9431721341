"""A2A 0.3 over JSON-RPC: the same methods and members under other names."""

from __future__ import annotations

from typing import Any

OLD_NAMES = {
    "message/send": "SendMessage", "message/stream": "SendStreamingMessage", "tasks/get": "GetTask",
    "tasks/cancel": "CancelTask", "tasks/resubscribe": "SubscribeToTask",
    "agent/getAuthenticatedExtendedCard": "GetExtendedAgentCard",
    "tasks/pushNotificationConfig/set": "CreateTaskPushNotificationConfig",
    "tasks/pushNotificationConfig/get": "GetTaskPushNotificationConfig",
    "tasks/pushNotificationConfig/list": "ListTaskPushNotificationConfigs",
    "tasks/pushNotificationConfig/delete": "DeleteTaskPushNotificationConfig"}
LAST = frozenset({"completed", "failed", "canceled", "rejected", "input-required", "auth-required"})
FILE = (("mimeType", "mediaType"), ("name", "filename"))
Members = dict[str, Any]


def read_params(params: Any) -> Any:
    """Return what a request asks, as 1.0 asks it; what is not as it must be stays, and is refused there."""
    if not isinstance(params, dict) or not isinstance(message := params.get("message"), dict):
        return params
    how = params.get("configuration")
    how = dict(how) if isinstance(how, dict) else {}
    how["returnImmediately"] = how.pop("blocking", None) is False
    if (push := how.pop("pushNotificationConfig", None)) is not None:
        how["taskPushNotificationConfig"] = push
    parts = message.get("parts")
    return {**params, "configuration": how, "message": {
        **message, "role": "ROLE_USER" if message.get("role") == "user" else "",
        "parts": [read_part(part) for part in parts] if isinstance(parts, list) else parts}}


def read_part(part: Any) -> Any:
    """Return a part of 0.3 as one of 1.0."""
    if not isinstance(part, dict):
        return part
    kind, file = part.get("kind"), part.get("file")
    more = {"metadata": part["metadata"]} if part.get("metadata") else {}
    if kind == "file" and isinstance(file, dict):
        named = {new: file[old] for old, new in FILE if file.get(old)}
        held = {"raw": file["bytes"]} if "bytes" in file else {"url": file.get("uri")}
        return {**held, **named, **more}
    return {kind: part[kind], **more} if kind in ("text", "data") and kind in part else {}


def show_result(result: Members) -> Members:
    """Return an answer or an event as 0.3 has it."""
    if "supportedInterfaces" in result:
        return show_card(result)
    match result:
        case {"task": task}:
            return show_old_task(task)
        case {"statusUpdate": event}:
            status = show_status(event["status"])
            return {**event, "kind": "status-update", "status": status, "final": status["state"] in LAST}
        case {"artifactUpdate": event}:
            return {**event, "kind": "artifact-update", "artifact": show_artifact(event["artifact"])}
    return show_old_task(result)


def show_old_task(task: Members) -> Members:
    """Show a task."""
    return {**task, "kind": "task", "status": show_status(task["status"]),
            "history": [show_message(message) for message in task.get("history", ())],
            "artifacts": [show_artifact(artifact) for artifact in task.get("artifacts", ())]}


def show_status(status: Members) -> Members:
    """Show a state, and what is said of it."""
    shown = {**status, "state": status["state"].removeprefix("TASK_STATE_").lower().replace("_", "-")}
    return {**shown, "message": show_message(status["message"])} if "message" in status else shown


def show_message(message: Members) -> Members:
    """Show a message."""
    return {**message, "kind": "message", "role": "user" if message["role"] == "ROLE_USER" else "agent",
            "parts": [show_part(part) for part in message["parts"]]}


def show_artifact(artifact: Members) -> Members:
    """Show an artifact."""
    return {**artifact, "parts": [show_part(part) for part in artifact["parts"]]}


def show_part(part: Members) -> Members:
    """Show a part; data is an object in 0.3."""
    more = {"metadata": part["metadata"]} if part.get("metadata") else {}
    if "text" in part:
        return {"kind": "text", "text": part["text"], **more}
    if "data" in part:
        value = part["data"]
        return {"kind": "data", "data": value if isinstance(value, dict) else {"value": value}, **more}
    held = {"bytes": part["raw"]} if "raw" in part else {"uri": part["url"]}
    named = {old: part[new] for old, new in FILE if part.get(new)}
    return {"kind": "file", "file": {**held, **named}, **more}


def show_card(card: Members) -> Members:
    """Return the card of 0.3: the schema of 1.0 is closed, and clients of 0.3 refuse a card without these members."""
    at = next(way["url"] for way in card["supportedInterfaces"] if way["protocolBinding"] == "JSONRPC")
    same = ("name", "description", "version", "defaultInputModes", "defaultOutputModes", "skills")
    capabilities = {name: card["capabilities"][name] for name in ("streaming", "pushNotifications")}
    return {**{name: card[name] for name in same}, "url": at, "preferredTransport": "JSONRPC",
            "protocolVersion": "0.3.0", "capabilities": capabilities, "supportsAuthenticatedExtendedCard": True,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}, "security": [{"bearer": []}]}
