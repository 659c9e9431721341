"""What every face says of `count_events`, which tests/heart/test_adding_an_operation.py adds to a copy of the house."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import asyncgate
from asyncgate import OPERATIONS, SyncGate
from asyncgate.commands.main import main
from asyncgate.commands.tables import make_operations_table
from tests.commands.test_cli import GATE, KEY, clean
from tests.commands.test_cli import served as address_in
from tests.conftest import Served
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
ONCE = {"events": [{"event_type": "task.assigned", "number": 1}]}


@pytest.fixture
async def task_id(served: Served) -> str:
    """A task of ada's."""
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    return str(made["task_id"])


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gate in a process of its own."""
    folder = tmp_path_factory.mktemp("gate")
    command = [*GATE, "serve", "--port", "0", "--database", f"sqlite:///{folder / 'gate.db'}"]
    log = folder / "server.log"
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=clean(ASYNCGATE_API_KEY=KEY)) as server:
        try:
            yield address_in(log, server)
        finally:
            server.terminate()
            assert server.wait(PATIENCE_SECONDS) == 0


async def rpc(served: Served, method: str, params: dict[str, Any]) -> Any:
    """Speak MCP in the plain dialect."""
    return (await served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))["result"]


def test_this_is_the_copy() -> None:
    assert Path(asyncgate.__file__) == ROOT / "asyncgate.py"
    assert "count_events" in OPERATIONS


async def test_rest_answers_it(served: Served, task_id: str) -> None:
    assert await served.get(f"/v1/tasks/{task_id}/counts") == ONCE
    assert (await served.call("GET", "/v1/tasks/none/counts")).json()["error"] == "task_not_found"


async def test_mcp_answers_it_by_the_name_of_its_tool(served: Served, task_id: str) -> None:
    answer = await rpc(served, "tools/call", {"name": "asyncgate.count_events", "arguments": {"task_id": task_id}})

    assert answer["structuredContent"] == ONCE


async def test_mcp_lists_it_with_what_may_follow(served: Served) -> None:
    tools = {tool["name"]: tool for tool in (await rpc(served, "tools/list", {}))["tools"]}

    tool = tools["asyncgate.count_events"]
    assert tool["description"].endswith("by the type of event. Next: get_task_history shows each of them.")
    assert tool["annotations"]["readOnlyHint"] is True


async def test_openapi_describes_it_with_its_example_and_its_refusals(served: Served) -> None:
    told = (await served.get("/openapi.json"))["paths"]["/v1/tasks/{task_id}/counts"]["get"]

    assert told["responses"]["200"]["content"]["application/json"]["example"] == ONCE
    assert told["responses"]["404"]["$ref"].endswith("TaskNotFound")
    assert told["x-scopes"] == ["tasks:lease", "tasks:read"]


async def test_whoami_names_it(served: Served) -> None:
    assert "count_events" in (await served.get("/v1/whoami"))["operations"]


def test_the_python_client_has_it_as_a_typed_method(far: str) -> None:
    with SyncGate(far, KEY, agent_id="ada") as gate:
        counts = gate.count_events(gate.create_task("demo", payload=None).task_id)  # type: ignore[attr-defined]

    assert [(event.event_type, event.number) for event in counts.events] == [("task.assigned", 1)]


def test_the_command_line_has_it_with_a_table_of_its_columns(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCGATE_URL", far)
    monkeypatch.setenv("ASYNCGATE_API_KEY", KEY)
    with SyncGate(far, KEY, agent_id="ada") as gate:
        task_id = gate.create_task("demo", payload=None).task_id

    done = CliRunner().invoke(main, ["count-events", task_id])

    assert done.output.splitlines() == ["EVENT_TYPE     NUMBER", "task.assigned  1"]


def test_the_reference_has_a_row_of_it() -> None:
    row = make_operations_table([OPERATIONS["count_events"]]).splitlines()[2]

    assert row in (ROOT / "docs/reference.md").read_text().splitlines()
