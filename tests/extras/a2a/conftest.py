"""A gate with an agent, and a client that speaks JSON-RPC or HTTP+JSON with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.parts.model.settings import A2ASettings
from tests.conftest import TOKEN, Answer, Live, Serve, Served
from tests.support.patience import PATIENCE_SECONDS

AGENT = "scan"


def said(text: str = "hello", **more: Any) -> dict[str, Any]:
    """Return a message of a client."""
    return {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}], **more}


class Agent:
    """A gate whose type of tasks is an agent, as its clients and its workers see it."""

    def __init__(self, served: Served, name: str = AGENT, token: str | None = TOKEN) -> None:
        self.served, self.name, self.token = served, name, token
        self.path = f"/a2a/{name}"

    def known_as(self, token: str | None) -> Agent:
        """Return the same agent for another credential."""
        return Agent(self.served, self.name, token)

    async def rpc(self, method: str, params: Any = None, **more: Any) -> Answer:
        """Call a method over JSON-RPC."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {} if params is None else params}
        return await self.served.call("POST", f"{self.path}/rpc", body, token=self.token, **more)

    async def good(self, method: str, params: Any = None, **more: Any) -> Any:
        """Return the result of a call that is answered well."""
        answer = await self.rpc(method, params, **more)
        assert (answer.status, answer.json().get("error")) == (200, None), answer
        return answer.json()["result"]

    async def refused(self, method: str, params: Any = None, **more: Any) -> tuple[int, str]:
        """Return the code and the reason, or the field, of a call that is refused."""
        error = (await self.rpc(method, params, **more)).json()["error"]
        detail = error["data"][-1]      # that names the field, if one is to blame
        return error["code"], detail.get("reason") or detail["fieldViolations"][0]["field"]

    async def http(self, verb: str, path: str, body: Any = None, **more: Any) -> Answer:
        """Call a path of HTTP+JSON."""
        return await self.served.call(verb, f"{self.path}/v1/{path}", body, token=self.token, **more)

    async def begin(self, message: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Send a message without waiting; return the task."""
        sent = {"message": message or said(), "configuration": {"returnImmediately": True}}
        task: dict[str, Any] = (await self.good("SendMessage", sent, **more))["task"]
        return task

    async def task(self, task_id: str) -> dict[str, Any]:
        """Read a task."""
        task: dict[str, Any] = await self.good("GetTask", {"id": task_id})
        return task

    async def lease(self) -> dict[str, Any]:
        """Lease the next task, as a worker that knows nothing of A2A."""
        claim = {"worker_id": "w1", "accept_types": [self.name], "wait_seconds": 30}
        [offer] = (await self.served.post("/v1/leases/claim", claim))["tasks"]
        return {"worker_id": "w1", "task_id": offer["task_id"], "lease_id": offer["lease_id"], "offer": offer}

    async def under(self, lease: dict[str, Any], verb: str, **more: Any) -> Any:
        """Do something under a lease."""
        holder = {name: value for name, value in lease.items() if name != "offer"}
        return await self.served.post(f"/v1/tasks/{lease['task_id']}/{verb}", {**holder, **more})

    async def ask(self, lease: dict[str, Any], key: str = "deploy", message: str = "Deploy?", **more: Any) -> Any:
        """Ask a question."""
        return await self.under(lease, "inputs", key=key, message=message, **more)


@pytest.fixture
async def agent(serve: Serve) -> Agent:
    """Return a gate with an agent."""
    return Agent(await serve(a2a=A2ASettings(agents=(AGENT, "other"), root=AGENT)))


# Programs that are killed.

SETTINGS = ("a2a.agents=scan", "lease_sweep_interval_seconds=0.2", "expiry_jitter_seconds=0", "restart_grace_seconds=0",
            "webhooks.allow=127.0.0.1")
# It knows nothing of A2A.
WORKER = """
import pathlib, sys, time
from asyncgate.clients import Fail, Worker
url, token, folder = sys.argv[1:]
worker = Worker(url, "w", token=token, state=None, ttl_seconds=1, concurrency=2)

@worker.task("scan")
def scan(payload, job):
    if "slow" in payload["text"]:
        job.report({"message": "half of it"})
        (pathlib.Path(folder) / "begun").touch()
        while not (pathlib.Path(folder) / "go").exists():
            time.sleep(0.02)
    if "ask" in payload["text"]:
        return f"page {job.ask('page', 'Which page?').content['text']}"
    if "fail" in payload["text"]:
        raise Fail("no paper")
    if "reject" in payload["text"]:
        raise Fail("not my job", code="rejected")
    if "print" in payload["text"]:
        for page in "123":
            job.artifact(f"page {page};", name="pages", append=True)
    if payload["text"] == "data":
        return {"pages": [1, 2]}
    return payload["text"].upper()

worker.run()
"""


class Programs:
    """A gate over a database and a worker, each of which may be killed and started again at the same address."""

    def __init__(self, start: Callable[..., Live], folder: Path, database: str = "") -> None:
        self.start, self.folder, self.database = start, folder, database or f"sqlite:///{folder}/gate.db"
        self.gate = start(*SETTINGS, database=self.database)
        self.worker: subprocess.Popen[bytes] | None = None

    def work(self) -> None:
        """Start the worker."""
        self.worker = subprocess.Popen([sys.executable, "-c", WORKER, self.gate.url, TOKEN, str(self.folder)])

    def kill_worker(self) -> None:
        """Kill the worker at once."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()

    def kill_gate(self) -> None:
        """Kill the gate at once, and start another one at its address."""
        self.gate.kill()
        self.gate = self.start(*SETTINGS, database=self.database, port=self.gate.port)

    def begun(self) -> bool:
        """Whether the worker is in the middle of a slow task."""
        return (self.folder / "begun").exists()

    def go(self) -> None:
        """Let slow tasks end."""
        (self.folder / "go").touch()


@pytest.fixture
def programs(start: Callable[..., Live], tmp_path: Path) -> Iterator[Programs]:
    """Return a gate and its worker."""
    running = Programs(start, tmp_path)
    yield running
    running.kill_worker()


async def looks() -> AsyncIterator[None]:
    """Yield again and again, for whoever looks until it is so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            yield
            await asyncio.sleep(0.02)


async def begun(programs: Programs) -> None:
    """Wait until the worker is in the middle of a slow task."""
    async for _ in looks():
        if programs.begun():
            return
