"""Whole jobs of stock workers on a real socket: every call that they make, in their order, as they spell it.

What the single bodies mean is tested in test_peers.py and test_peers_jsonrpc.py; here nothing stands between the
programs and the server, and a call only counts when the next one can go on from its answer.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"
NIL = "00000000-0000-0000-0000-000000000000"
HEADERS = {"content-type": "application/json", "accept": "*/*", "user-agent": "python-httpx/0.27.0",
           "authorization": f"Bearer {TOKEN}"}
STATUS = {"status": "running", "summary": "", "artifact_pointers": [], "timestamp": "2026-02-20T10:00:00+00:00"}
RESULT = {"summary": "done", "artifact_pointers": []}
POINTERS = {"pointers": [{"sink_id": "local", "uri": "file:///out/1.md", "metadata": {}}]}
REFUSED = {"code": "EXECUTION_FAILED", "message": "the tool said no"}
FLAT = {"output_path": "/tmp/out.txt", "content_type": "text/plain", "description": "Command output"}
COMMAND = {"type": "command.execute", "payload": {"command": "date", "output_path": "/tmp/out.txt"},
           "requirements": {"capabilities": ["command.execute"]}}


class Wire:
    """One connection, kept open as these programs keep theirs."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] = HEADERS) -> Any:
        """Send a request; the answer must be 200 with an object, nothing else is success to all of them."""
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.connection.getresponse()
        reply = json.loads(answer.read())
        assert (answer.status, type(reply)) == (200, dict), reply
        return reply

    def tool(self, name: str, **arguments: Any) -> Any:
        """Call a tool as the later generations do: the id is always 1, an `error` is a failure, `result` is raw."""
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": f"asyncgate.{name}", "arguments": arguments}}
        answer = self.send("POST", "/mcp", call)
        assert "error" not in answer, answer
        return answer["result"]


@pytest.fixture
def wire(live_for_all: Any) -> Iterator[Wire]:
    """A connection to a gate in a process of its own."""
    wire = Wire(live_for_all.port)
    yield wire
    wire.connection.close()


def made(wire: Wire, **task: Any) -> str:
    """Create a task as the demo client does, with its nulls."""
    nulls = {"payload_pointer": None, "expected_outcome_kind": None, "expected_artifact_mime": None}
    asks = {"type": "demo", "payload": {"profile": "default"}, **nulls, "agent_id": "ada", "principal_ai": "ada",
            "tenant_id": NIL, **task}
    return str(wire.tool("create_task", **asks)["task_id"])


def ended(wire: Wire, task_id: str) -> tuple[str, bool]:
    task = wire.send("GET", f"/v1/tasks/{task_id}")
    return task["status"], task["obligation_open"]


Job = Callable[[Wire, str, bool], None]


def first_generation(wire: Wire, worker: str, good: bool) -> None:
    """REST with nothing but what is needed; heartbeats without a body."""
    [task] = wire.send("POST", "/v1/leases/claim", {"worker_id": worker, "max_tasks": 1})["tasks"]
    path, who = f"/v1/tasks/{task['task_id']}", {"worker_kind": "worker", "worker_id": worker,
                                                 "lease_id": task["lease_id"]}
    wire.send("POST", f"{path}/progress", {**who, "progress": STATUS})
    wire.send("POST", f"/v1/leases/{task['lease_id']}/extend")
    if good:
        wire.send("POST", f"{path}/complete", {**who, "result": RESULT, "artifacts": POINTERS})
    else:
        wire.send("POST", f"{path}/fail", {**who, "error": REFUSED, "retryable": False})


def second_generation_rest(wire: Wire, worker: str, good: bool) -> None:
    """REST that names task and tenant in every body."""
    tenant = {"tenant_id": NIL}
    [task] = wire.send("POST", "/v1/leases/claim", {"worker_id": worker, "max_tasks": 1, **tenant})["tasks"]
    who = {"worker_id": worker, "task_id": task["task_id"], "lease_id": task["lease_id"]}
    path = f"/v1/tasks/{task['task_id']}"
    wire.send("POST", f"{path}/progress", {**who, "progress": STATUS, **tenant})
    wire.send("POST", f"/v1/leases/{task['lease_id']}/extend", {**who, "extend_by_seconds": None, **tenant})
    if good:
        wire.send("POST", f"{path}/complete", {**who, "result": RESULT, "artifacts": POINTERS, **tenant})
    else:
        wire.send("POST", f"{path}/fail", {**who, "error": REFUSED, "retryable": False, **tenant})


def json_rpc(wire: Wire, worker: str, good: bool) -> None:
    """Bare JSON-RPC; a heartbeat knows its task, or only its lease."""
    tenant = {"tenant_id": NIL}
    assert wire.tool("health")["status"] == "healthy"
    [task] = wire.tool("lease_next", worker_id=worker, max_tasks=1, **tenant)["tasks"]
    who = {"worker_id": worker, "task_id": task["task_id"], "lease_id": task["lease_id"]}
    wire.tool("report_progress", **who, progress=STATUS, **tenant)
    for named in (who, {**who, "task_id": None}):
        wire.tool("renew_lease", **named, extend_by_seconds=None, **tenant)
    if good:
        wire.tool("complete", **who, result=RESULT, artifacts=POINTERS, **tenant)
    else:
        wire.tool("fail", **who, error=REFUSED, retryable=False, **tenant)


def executor(wire: Wire, worker: str, good: bool) -> None:
    """The worker that runs commands: it says when it begins, and its artifacts are one flat object."""
    claim = {"worker_id": worker, "capabilities": ["command.execute"], "max_tasks": 1}
    [task] = wire.send("POST", "/v1/leases/claim", claim)["tasks"]
    path, who = f"/v1/tasks/{task['task_id']}", {"worker_id": worker, "lease_id": task["lease_id"]}
    wire.send("POST", f"{path}/running", who)
    if good:
        done = {"exit_code": 0, "output_path": task["payload"]["output_path"]}
        wire.send("POST", f"{path}/complete", {**who, "result": done, "artifacts": FLAT})
    else:
        wire.send("POST", f"{path}/fail", {**who, "error": {"message": "exit 1"}, "retryable": False})


def later_executor(wire: Wire, worker: str, good: bool) -> None:
    """The same over JSON-RPC: progress instead of a start, and a tenant that is not a UUID."""
    tenant = {"tenant_id": "default"}
    [task] = wire.tool("lease_next", worker_id=worker, capabilities=["command.execute"], max_tasks=1, **tenant)["tasks"]
    who = {"worker_id": worker, "task_id": task["task_id"], "lease_id": task["lease_id"]}
    wire.tool("report_progress", **who, progress={"status": "running"}, **tenant)
    if good:
        wire.tool("complete", **who, result={"exit_code": 0}, artifacts=FLAT, **tenant)
    else:
        wire.tool("fail", **who, error={"message": "exit 1"}, retryable=False, **tenant)


JOBS = [(first_generation, {}), (second_generation_rest, {}), (json_rpc, {}), (executor, COMMAND),
        (later_executor, COMMAND)]


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize(("job", "task"), JOBS, ids=[job.__name__ for job, _ in JOBS])
def test_a_stock_worker_does_a_whole_job(wire: Wire, job: Job, task: dict[str, Any], good: bool) -> None:
    task_id = made(wire, **task)

    job(wire, f"{job.__name__}-1", good)

    assert ended(wire, task_id) == (("succeeded" if good else "failed"), False)


def test_a_stock_worker_that_finds_nothing_polls_again_on_the_same_connection(wire: Wire) -> None:
    for _ in range(3):
        assert wire.send("POST", "/v1/leases/claim", {"worker_id": "idle", "max_tasks": 1}) == {"tasks": []}
        assert wire.tool("lease_next", worker_id="idle", max_tasks=1, tenant_id=NIL)["tasks"] == []


def test_the_probe_of_a_stock_worker_needs_no_credential(wire: Wire) -> None:
    assert wire.send("GET", "/health", headers={"accept": "*/*"})["status"] == "healthy"


def test_the_demo_drivers_lease_again_as_the_fallback_worker_when_the_first_was_lost(start: Any) -> None:
    wire = Wire(start("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0").port)
    task_id = made(wire)
    nulls: dict[str, Any] = {"capabilities": [], "accept_types": None, "tenant_id": NIL}
    [lost] = wire.tool("lease_next", worker_id="first-worker", lease_ttl_seconds=1, **nulls)["tasks"]

    offers: list[Any] = []
    while not offers:
        offers = wire.tool("lease_next", worker_id="fallback-worker", lease_ttl_seconds=None, wait_seconds=5,
                           **nulls)["tasks"]
    [offer] = offers
    wire.tool("complete", worker_id="fallback-worker", task_id=task_id, lease_id=offer["lease_id"],
              result={"ok": True}, artifacts=[{"type": "file", "uri": "file:///x", "mime": "text/plain",
                                               "size_bytes": 1, "checksum": "sha256:0", "location": "local"}])

    assert (lost["task_id"], offer["task_id"], offer["fence"]) == (task_id, task_id, 2)
    assert ended(wire, task_id) == ("succeeded", False)
    wire.connection.close()
