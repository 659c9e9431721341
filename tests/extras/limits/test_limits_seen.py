"""What operators and creators are told of limits: numbers for Prometheus, findings of the doctor, warnings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncgate.parts.model.settings import MetricsSettings

pytestmark = pytest.mark.anyio
LATER, NEVER = "2100-01-01T00:00:00Z", "2000-01-01T00:00:00Z"


async def create(served: Any, **limits: str) -> Any:
    """Create a task with limits."""
    return await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada", "limits": limits})


async def scrape(served: Any) -> dict[str, float]:
    """Return what the page of metrics says of limits."""
    await served.gate.meter.look_at_queues()
    text = (await served.call("GET", "/metrics")).content.decode()
    return {name: float(number) for name, number in re.findall(r"^asyncgate_limit_(\S+) (\S+)$", text, re.M)}


async def examine(served: Any) -> dict[str, str]:
    """Return what the doctor finds of limits of tasks, by severity."""
    findings = (await served.get("/v1/examination"))["findings"]
    return {row["severity"]: row["seen"] for row in findings if row["check"] == "task limits"}


async def test_metrics_show_what_is_in_use_what_waits_and_what_is_stopped(serve: Any) -> None:
    served = await serve(metrics=MetricsSettings(enabled=True))
    for name, more in (("openai", {"concurrency_total": 2}), ("quiet", {"stopped_until": LATER})):
        await served.post("/v1/task-limits", {"name": name, **more})
    for _ in range(3):
        await create(served, openai="", misspelt="x")
    await served.post("/v1/leases/claim", {"worker_id": "w1", "max_tasks": 3})

    told = await scrape(served)

    assert told == {
        'leases{limit="openai"}': 2, 'leases{limit="quiet"}': 0, 'waiting_tasks{limit="openai"}': 1,
        'waiting_tasks{limit="quiet"}': 0, 'stopped{limit="openai"}': 0, 'stopped{limit="quiet"}': 1, "unset_tasks": 1}


async def test_limits_that_come_later_share_one_line_and_names_nobody_has_set_get_none(serve: Any) -> None:
    served = await serve(metrics=MetricsSettings(enabled=True, most_types=2))
    for number in range(5):
        await served.post("/v1/task-limits", {"name": f"l{number}", "stopped_until": LATER})
        await create(served, **{f"nobody{number}": ""})

    told = await scrape(served)

    assert {name for name in told if name.startswith("stopped")} == {
        'stopped{limit="l0"}', 'stopped{limit="l1"}', 'stopped{limit="other"}'}
    assert (told['stopped{limit="other"}'], told["unset_tasks"]) == (3, 5)


async def test_the_doctor_tells_of_stopped_limits_and_of_names_that_nobody_has_set(serve: Any) -> None:
    served = await serve()
    nothing = await examine(served)
    await served.post("/v1/task-limits", {"name": "openai"})
    well = await examine(served)
    await served.post("/v1/task-limits", {"name": "openai", "stopped_until": LATER})
    await create(served, openai="")
    await create(served, opnai="")

    told = await examine(served)

    assert (nothing, well) == ({}, {"ok": "limits of tasks: 1, none of which is stopped"})
    assert told["warning"].startswith("the limit openai is stopped for ")
    assert told["note"].startswith("tasks that wait and name a limit which nobody has set, such as opnai: 1")


async def test_whoever_creates_a_task_is_warned_of_a_limit_that_nobody_has_set(serve: Any) -> None:
    served = await serve()
    await served.post("/v1/task-limits", {"name": "openai"})

    fine, misspelt = await create(served, openai=""), await create(served, openai="", opnai="")
    many = await served.post("/v1/tasks/batch", {"agent_id": "ada", "tasks": [
        {"type": "demo", "payload": None, "limits": {"a": ""}}, {"type": "demo", "payload": None}]})

    assert "warnings" not in fine
    assert misspelt["warnings"] == ["nobody has set the limit opnai: it keeps nothing, until an admin calls set_limit"]
    assert many["warnings"] == ["nobody has set the limit a: it keeps nothing, until an admin calls set_limit"]
