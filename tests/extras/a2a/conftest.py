"""A gate with an agent, and a client that speaks JSON-RPC or HTTP+JSON with it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.parts.model.settings import A2ASettings
from tests.conftest import TOKEN, Answer, Serve, Served

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
        detail = error["data"][0]
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
