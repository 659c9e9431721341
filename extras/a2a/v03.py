"""A2A 0.3 over JSON-RPC: the same methods and members under other names."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncgate.extras.a2a.requests import Members

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


def read_params(params: Members, is_push: bool = False) -> Members:
    """Return what a request asks, as 1.0 asks it; what is not as it must be stays, and is refused there."""
    if is_push:
        task_id = params.get("taskId", params.get("id"))
        if "pushNotificationConfig" in params:      # one without an id has that of its task
            return {"id": task_id, **read_push(params["pushNotificationConfig"]), "taskId": task_id}
        return {"taskId": task_id, "id": params.get("pushNotificationConfigId", task_id)}
    if not isinstance(message := params.get("message"), dict):
        return params
    how = params.get("configuration")
    how = dict(how) if isinstance(how, dict) else {}
    how["returnImmediately"] = how.pop("blocking", None) is False
    if (push := how.pop("pushNotificationConfig", None)) is not None:
        how["taskPushNotificationConfig"] = read_push(push)
    return {**params, "configuration": how, "message": {"role": "", **read_nested(message)}}


def read_nested(value: Members) -> Members:
    """Return a task, a status, a message or an artifact of 0.3 as 1.0 has it, and what of these is in it."""
    held = {**value}
    for name in ("status", "message"):
        if isinstance(inner := value.get(name), dict):
            held[name] = read_nested(inner)
    for name in ("history", "artifacts"):
        if isinstance(rows := value.get(name), list):
            held[name] = [read_nested(row) for row in rows if isinstance(row, dict)]
    if isinstance(parts := value.get("parts"), list):
        held["parts"] = [read_part(part) for part in parts]
    if "role" in value:
        held["role"] = {"user": "ROLE_USER", "agent": "ROLE_AGENT"}.get(str(value["role"]), "")
    if "state" in value:
        held["state"] = "TASK_STATE_" + str(value["state"]).upper().replace("-", "_")
    return held


def read_push(config: Any) -> Members:
    """Return a push configuration of 0.3 as one of 1.0; where it names several schemes, the first counts."""
    match config:
        case {"authentication": {"schemes": [scheme, *_]} as how}:
            return {**config, "authentication": {**how, "scheme": scheme}}
    return config if isinstance(config, dict) else {}


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


def show_result(result: Members) -> Any:
    """Return an answer or an event as 0.3 has it."""
    result = msgspec.to_builtins(result)
    if "supportedInterfaces" in result:
        return show_card(result)
    match result:
        case {"configs": configs}:
            return [show_push(config) for config in configs]
        case {"url": _}:
            return show_push(result)
        case _ if not result:
            return None     # a configuration is deleted
        case {"statusUpdate": event}:
            shown = show_nested(event)
            return {**shown, "kind": "status-update", "final": shown["status"]["state"] in LAST}
        case {"artifactUpdate": event}:
            return {**show_nested(event), "kind": "artifact-update"}
    return {"history": [], "artifacts": [], **show_nested(result.get("task", result)), "kind": "task"}


def show_push(config: Members) -> Members:
    """Show a push configuration."""
    shown = {"id": config["id"], "url": config["url"]}
    if "authentication" in config:
        shown["authentication"] = {"schemes": [config["authentication"]["scheme"]]}
    return {"taskId": config["taskId"], "pushNotificationConfig": shown}


def show_nested(value: Members) -> Members:
    """Show a task, a status, a message or an artifact, and what of these is in it."""
    shown = {**value}
    for name in ("status", "message", "artifact"):
        if name in value:
            shown[name] = show_nested(value[name])
    for name in ("history", "artifacts"):
        if name in value:
            shown[name] = [show_nested(row) for row in value[name]]
    if "parts" in value:
        shown["parts"] = [show_part(part) for part in value["parts"]]
    if "role" in value:
        shown |= {"kind": "message", "role": "user" if value["role"] == "ROLE_USER" else "agent"}
    if "state" in value:
        shown["state"] = value["state"].removeprefix("TASK_STATE_").lower().replace("_", "-")
    return shown


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
