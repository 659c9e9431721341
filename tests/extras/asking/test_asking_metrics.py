"""How many tasks wait for an answer, and how long, as Prometheus reads it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncgate.parts.model.settings import MetricsSettings

pytestmark = pytest.mark.anyio
ASKED = {"key": "may", "message": "May I?", "to": {"kind": "human", "id": "boss"}}


async def scrape(served: Any) -> list[float]:
    """Return the tasks that wait for an answer, and for how many seconds the first of them does."""
    await served.gate.meter.look_at_queues()
    text = (await served.call("GET", "/metrics")).content.decode()
    return [float(number) for number in re.findall(r"^asyncgate_unanswered_\w+ (\S+)$", text, re.M)]


async def ask(served: Any) -> str:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    (offer,) = (await served.post("/v1/leases/claim", {"worker_id": "w1"}))["tasks"]
    under = {"worker_id": "w1", "lease_id": offer["lease_id"]}
    await served.post(f"/v1/tasks/{made['task_id']}/inputs", {**under, **ASKED})
    return str(made["task_id"])


async def test_tasks_that_wait_for_an_answer_are_shown_with_how_long_the_first_waits(serve: Any) -> None:
    served = await serve(metrics=MetricsSettings(enabled=True))
    nobody = await scrape(served)
    first = await ask(served)
    served.backend.skew += 100
    second = await ask(served)
    both = await scrape(served)
    boss = {"principal_kind": "human", "principal_id": "boss", "key": "may", "action": "accept"}
    for task_id in (first, second):
        await served.post(f"/v1/tasks/{task_id}/inputs/answer", boss)

    assert nobody == [0, 0]
    assert both == [2, pytest.approx(100, abs=20)]
    assert await scrape(served) == [0, 0]
