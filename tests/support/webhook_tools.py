"""What the tests of webhooks share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asyncgate.conformance.harness import Gate
from asyncgate.extras.webhooks import Webhooks
from asyncgate.parts.model.settings import WebhookSettings
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiver import Came, Receiver

STORY = ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]
Told = Callable[..., Any]


def make_told(make_gate: Callable[..., Gate]) -> Told:
    """Return what makes a gate that delivers to receivers on loopback, for the time of a block."""
    @contextlib.asynccontextmanager
    async def make(**more: Any) -> AsyncIterator[Gate]:
        hasty = {"allow": ("127.0.0.1",), "retry_seconds": 0.01, "max_retry_seconds": 0.05, "timeout_seconds": 30.0}
        gate = make_gate(webhooks=WebhookSettings(**{**hasty, **more}))
        async with Webhooks(gate.engine):
            yield gate
    return make


async def add(gate: Gate, receiver: Receiver | str, **more: Any) -> tuple[str, str]:
    """Add an endpoint; return its id and its secret."""
    url = receiver if isinstance(receiver, str) else receiver.url
    made = await gate.as_admin().create_webhook(endpoint=url, **more)
    return made.webhook.webhook_id, made.secret


async def deliveries(gate: Gate, webhook_id: str, **more: Any) -> list[Any]:
    """Return what became of the events of an endpoint, oldest first."""
    return list((await gate.as_admin().list_deliveries(webhook_id=webhook_id, limit=200, **more)).deliveries)[::-1]


async def until(holds: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until something stored holds: who stores it tells nobody."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (outcome := await holds()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return outcome


async def settled(gate: Gate, webhook_id: str, number: int, state: str = "delivered") -> list[Any]:
    """Wait until so many deliveries are stored in a state."""
    async def enough() -> list[Any]:
        rows = await deliveries(gate, webhook_id, state=state)
        return rows if len(rows) >= number else []
    reached: list[Any] = await until(enough)
    return reached


async def state_of(gate: Gate, webhook_id: str) -> Any:
    """Return an endpoint as list_webhooks shows it."""
    return next(webhook for webhook in (await gate.as_admin().list_webhooks()).webhooks
                if webhook.webhook_id == webhook_id)


def types(came: list[Came]) -> list[str]:
    """Return the types of events."""
    return [request.type for request in came]
