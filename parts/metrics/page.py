"""The page /metrics: for credentials with the scope metrics:read, wherever it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncgate.parts.faces.serving import Serving
from asyncgate.parts.metrics.shown import Shown, Sources
from asyncgate.parts.model import errors
from asyncgate.parts.model.caller import forbid_scope
from asyncgate.parts.model.connection import Receive, Scope, Send
from asyncgate.parts.model.content import encode_json

METRICS_PATH, METRICS_SCOPE = "/metrics", "metrics:read"


class MetricsPage:
    """Shows the numbers of a gate as text; as an application of its own it serves nothing else."""

    def __init__(self, gate: Serving, find_sources: Callable[[], Sources]) -> None:
        self.gate, self.find_sources = gate, find_sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            body, type = await self._show(scope)
            await self.gate.send(send, scope, 200, body, type=(b"content-type", type))
        except errors.GateError as refusal:
            self.gate.guard.refused(scope, refusal)
            await self.gate.send(send, scope, refusal.status, encode_json(refusal.body()),
                                 self.gate.describe_refusal(scope, refusal))
        except Exception as bug:
            await self.gate.send(send, scope, 500, encode_json(errors.log_fault(scope["path"], bug).body()))

    async def _show(self, scope: Scope) -> tuple[bytes, bytes]:
        if scope["path"].removeprefix(scope.get("root_path", "")) != METRICS_PATH:
            raise errors.NotFound(f"this listener serves {METRICS_PATH} alone")
        if scope["method"] not in ("GET", "HEAD"):
            raise errors.MethodNotAllowed(f"{METRICS_PATH} does not support {scope['method']}", allow=["GET", "HEAD"])
        caller = await self.gate.guard.resolve(scope)
        await self.gate.guard.meter(scope, caller, None)
        if METRICS_SCOPE not in caller.scopes:
            raise forbid_scope(caller, f"{METRICS_PATH} needs the scope {METRICS_SCOPE}, which no role has by itself; "
                               "the operator issues it: asyncgate keys issue --name prometheus --principal-kind "
                               f"service --principal-id prometheus --scopes {METRICS_SCOPE}", METRICS_SCOPE)
        wanted = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
        families = list(Shown(self.find_sources()).collect())
        return await asyncio.to_thread(write_text, families, wanted)     # a thousand lines are some milliseconds


def write_text(families: list[Any], wanted: str) -> tuple[bytes, bytes]:
    """Return the families as text, and its type: OpenMetrics for whoever asks for it."""
    from prometheus_client.exposition import choose_encoder
    write, type = choose_encoder(wanted)
    return write(Collected(families)), type.encode()


class Collected:
    """Families that were collected already, as the library wants them."""

    def __init__(self, families: list[Any]) -> None:
        self.families = families

    def collect(self) -> list[Any]:
        """Return them."""
        return self.families
