"""What the tests of identity share: a gate that issues keys, one way to ask over each façade, and its audit log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from asyncgate.clients.http import Exchange
from asyncgate.parts.identity.limits.memory import MemoryLimits
from asyncgate.parts.model.settings import (
    ApiKeys,
    AuditLogging,
    RateLimiting,
    RateLimits,
    SecuritySettings,
    Settings,
    Tier,
)
from asyncgate.parts.operations import OPERATIONS

HOST = "http://localhost"
HOME = "00000000-0000-0000-0000-000000000000"
OTHER, THIRD = "6f1c2b9e-0000-4000-8000-00000000000a", "6f1c2b9e-0000-4000-8000-00000000000b"
MODERN, LEGACY = "2026-07-28", "2025-11-25"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
JSON = ("content-type", "application/json")
EVENTS = ("accept", "application/json, text/event-stream")
FACADES = ("rest", "modern", "legacy", "bare")
HOUR_MS = 3_600_000
START = 490_000 * HOUR_MS       # a window begins here
STATUSES = {"rate_limit_exceeded": 429, "unauthenticated": 401, "invalid_request": 400, "lease_invalid_or_expired": 409}


def security(*, limits: bool | None = False, audit: bool = True, **limiting: Any) -> SecuritySettings:
    """Settings under which a key costs next to nothing to prove."""
    return SecuritySettings(api_keys=ApiKeys(hash_time_cost=1, hash_memory_cost=8),
                            rate_limiting=RateLimiting(enabled=limits, **{"principal_percent": 100, **limiting}),
                            audit_logging=AuditLogging(enabled=audit))


def tiers(calls: int = -1, tasks: int = -1, **paid: int) -> RateLimits:
    """Limits of the free tier, small enough to be reached."""
    return RateLimits(free_tier=Tier(api_calls_per_hour=calls, tasks_per_hour=tasks),
                      paid_tier=replace(Settings().rate_limits.paid_tier, **paid))


class Clock:
    """A clock of milliseconds that stands until it is moved."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now


class Told(Struct):
    """What a façade answered: nothing wrong (an empty code) or which refusal, and all of the answer."""

    code: str
    body: dict[str, Any]
    status: int
    headers: dict[str, str]
    content: bytes


class House:
    """A served gate, its operator, the keys that it issued, and what it wrote down."""

    def __init__(self, served: Any, token: str = "a-token-for-tests") -> None:
        self.served, self.guard, self.operator = served, served.gate.guard, token
        self.secrets = [token]
        self.guard.keys.sleep = self.hold
        self.holds: list[float] = []        # for which callers were held back, in no time at all
        self.ids: dict[str, str] = {}

    async def hold(self, seconds: float) -> None:
        """Take the place of the sleep that slows down who guesses."""
        self.holds.append(seconds)

    async def ask(self, name: str, fields: Mapping[str, Any] | None = None, *, token: str | None = None,
                  facade: str = "rest", **more: Any) -> Told:
        """Ask for an operation with a credential, by default the operator's."""
        call = rest_call(name, fields or {}) if facade == "rest" else mcp_call(name, fields or {}, facade)
        method, target, body, headers = call
        given = [*headers, *more.pop("headers", ())]
        answer = await self.served.call(method, target, body, headers=given, token=token or self.operator, **more)
        return told(answer, facade)

    async def good(self, name: str, fields: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Ask, and insist on a good answer."""
        answer = await self.ask(name, fields, **more)
        assert not answer.code, (name, answer.content)
        return answer.body

    async def key(self, role: str = "agent", id: str = "ada", *, by: str | None = None, **more: Any) -> str:
        """Issue a key."""
        kind = {"worker": "worker", "admin": "human"}.get(role, "agent")
        fields = {"name": f"{id}'s", "principal_kind": kind, "principal_id": id, "role": role, **more}
        issued = await self.good("issue_key", fields, token=by)
        self.secrets.append(issued["api_key"])
        self.ids[issued["api_key"]] = issued["key"]["key_id"]
        return str(issued["api_key"])

    async def admin_of(self, tenant: str, id: str = "root", **more: Any) -> str:
        """Make a tenant and issue it a key of an admin."""
        await self.good("create_tenant", {"tenant": tenant, "name": f"of {id}, {tenant}"})
        return await self.key("admin", id, tenant=tenant, **more)

    async def audit(self, tenant: str = HOME, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of a tenant's log, with all that is noted by now."""
        auditor = self.guard.auditor
        await auditor.look_up_all()
        if auditor.flushing is not None:
            await asyncio.wait([auditor.flushing])      # what it has taken is not among the notes any more
        await auditor.flush()
        lines: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = await self.good("list_audit", {"tenant": tenant, "limit": 200, "cursor": cursor, "event": event})
            lines += page["lines"]
            if (cursor := page["next_cursor"]) is None:
                return lines

    def counting(self) -> Clock:
        """Let the limits go by a clock that the test moves."""
        clock = Clock()
        self.guard.limits = MemoryLimits(clock)
        return clock


def rest_call(name: str, fields: Mapping[str, Any]) -> tuple[str, str, Any, list[tuple[str, str]]]:
    """Return the request that asks for an operation over REST."""
    path = OPERATIONS[name].rest[0][1]
    parts = ("task_id", "receipt_id", "key_id", "tenant", "lease_id", "user_id", "webhook_id")
    held = {part: "none" for part in parts if f"{{{part}}}" in path}
    request = Exchange(HOST, "").request(name, {**held, **fields})
    target = request["url"].removeprefix(HOST)
    query = urlencode(request.get("params", {}))
    return request["method"], f"{target}?{query}" if query else target, request.get("content"), [JSON]


def mcp_call(name: str, fields: Mapping[str, Any], facade: str) -> tuple[str, str, Any, list[tuple[str, str]]]:
    """Return the request that asks for an operation over MCP, or in the dialect of peers."""
    arguments = {field: value for field, value in fields.items() if value is not None or field == "payload"}
    params: dict[str, Any] = {"name": f"asyncgate.{name}", "arguments": arguments}
    headers = [JSON]
    if facade == "modern":
        params["_meta"] = META
        headers += [EVENTS, ("mcp-protocol-version", MODERN), ("mcp-method", "tools/call"),
                    ("mcp-name", f"asyncgate.{name}")]
    elif facade == "legacy":
        headers += [EVENTS, ("mcp-protocol-version", LEGACY)]
    return "POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers


def told(answer: Any, facade: str) -> Told:
    """Read an answer: every façade has its own place for a refusal."""
    body = json.loads(answer.content)
    if facade != "rest" and "jsonrpc" in body:
        result = body.get("result")
        body = json.loads(result["content"][0]["text"]) if result else body["error"].get("data") or body["error"]
    refused = body.get("error", body.get("code", "")) if isinstance(body, dict) else ""
    code = refused if isinstance(refused, str) else ""
    return Told(code, body, answer.status, answer.headers, answer.content)
