"""What A2A calls the refusals of a gate."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncgate.parts.model import errors

DOMAIN = "a2a-protocol.org"


class RefusalKind(NamedTuple):
    """How a refusal is called in JSON-RPC, in HTTP, and by google.rpc."""

    code: int
    status: int
    rpc: str


KINDS = {
    "TASK_NOT_FOUND": RefusalKind(-32001, 404, "NOT_FOUND"),
    "TASK_NOT_CANCELABLE": RefusalKind(-32002, 400, "FAILED_PRECONDITION"),
    "PUSH_NOTIFICATION_NOT_SUPPORTED": RefusalKind(-32003, 400, "FAILED_PRECONDITION"),
    "UNSUPPORTED_OPERATION": RefusalKind(-32004, 400, "FAILED_PRECONDITION"),
    "CONTENT_TYPE_NOT_SUPPORTED": RefusalKind(-32005, 400, "INVALID_ARGUMENT"),
    "VERSION_NOT_SUPPORTED": RefusalKind(-32009, 400, "FAILED_PRECONDITION"),
    "INVALID_PARAMS": RefusalKind(-32602, 400, "INVALID_ARGUMENT"),
    "INVALID_REQUEST": RefusalKind(-32600, 400, "INVALID_ARGUMENT"),
    "PARSE_ERROR": RefusalKind(-32700, 400, "INVALID_ARGUMENT"),
    "METHOD_NOT_FOUND": RefusalKind(-32601, 404, "NOT_FOUND"),
    "METHOD_NOT_ALLOWED": RefusalKind(-32601, 405, "UNIMPLEMENTED"),
    "INTERNAL_ERROR": RefusalKind(-32603, 500, "INTERNAL"),
    # The protocol has no words for these.
    "UNAUTHENTICATED": RefusalKind(-32010, 401, "UNAUTHENTICATED"),
    "PERMISSION_DENIED": RefusalKind(-32011, 403, "PERMISSION_DENIED"),
    "RESOURCE_EXHAUSTED": RefusalKind(-32012, 429, "RESOURCE_EXHAUSTED"),
    "UNAVAILABLE": RefusalKind(-32013, 503, "UNAVAILABLE"),
    "REQUEST_TOO_LARGE": RefusalKind(-32014, 413, "INVALID_ARGUMENT"),
    "IDEMPOTENCY_CONFLICT": RefusalKind(-32015, 409, "ALREADY_EXISTS"),
}
BY_STATUS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "TASK_NOT_FOUND", 405: "METHOD_NOT_ALLOWED",
             408: "UNAVAILABLE", 409: "UNSUPPORTED_OPERATION", 413: "REQUEST_TOO_LARGE",
             415: "CONTENT_TYPE_NOT_SUPPORTED", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL_ERROR", 503: "UNAVAILABLE"}
BY_CODE = {"input_not_found": "UNSUPPORTED_OPERATION", "idempotency_conflict": "IDEMPOTENCY_CONFLICT"}
# What a client over JSON-RPC learns from the status, too: it tries again, or shows another credential.
TOLD_BY_STATUS = frozenset({401, 403, 405, 413, 429, 503})


class A2AError(Exception):
    """A refusal as A2A says it: a reason of KINDS, and the field of the request that is to blame, if one is."""

    def __init__(self, reason: str, text: str, field: str | None = None, **about: str) -> None:
        super().__init__(text)
        self.reason, self.kind, self.field, self.about = reason, KINDS[reason], field, about
        self.cause: errors.GateError | None = None

    def describe(self) -> list[dict[str, Any]]:
        """Return the details of the error, as google.rpc has them; clients know it by its reason."""
        blamed = [{"@type": "type.googleapis.com/google.rpc.BadRequest",
                   "fieldViolations": [{"field": self.field, "description": str(self)}]}] if self.field else []
        return [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": self.reason, "domain": DOMAIN,
                 "metadata": self.about}, *blamed]

    def to_rpc(self) -> dict[str, Any]:
        """Return the error of a JSON-RPC answer."""
        return {"code": self.kind.code, "message": str(self), "data": self.describe()}

    def to_http(self) -> dict[str, Any]:
        """Return the body of an HTTP answer."""
        return {"error": {"code": self.kind.status, "status": self.kind.rpc, "message": str(self),
                          "details": self.describe()}}


def translate(refusal: errors.GateError | A2AError, task_id: str | None = None, field: str = "message") -> A2AError:
    """Return a refusal as A2A says it.

    About a task, a caller without rights to it learns what one learns of a task that does not exist.
    """
    if isinstance(refusal, A2AError):
        return refusal.with_traceback(None)
    if task_id is not None and refusal.status in (403, 404) and refusal.code not in BY_CODE:
        translated = no_task(task_id)
    else:
        reason = BY_CODE.get(refusal.code) or BY_STATUS.get(refusal.status, "INVALID_PARAMS")
        place = refusal.more.get("path", field) if reason == "INVALID_PARAMS" else None
        translated = A2AError(reason, str(refusal), place, code=refusal.code)
    translated.cause = refusal
    return translated


def no_task(task_id: str) -> A2AError:
    """Return the refusal of a task that does not exist, or not for this caller, or not of this agent."""
    return A2AError("TASK_NOT_FOUND", f"this agent has no task {task_id}", taskId=task_id)
