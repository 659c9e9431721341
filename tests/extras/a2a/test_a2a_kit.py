"""The conformance kit of A2A, where it can be had; and the agent whose tasks it wants, which runs everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conftest import Live

pb = pytest.importorskip("a2a.types.a2a_pb2", reason="a2a-sdk is not installed: pip install 'asyncgate[test]'")
protobuf = pytest.importorskip("google.protobuf.json_format")
KIT = "ASYNCGATE_TEST_A2A_TCK"
KIT_SECONDS = 600
# What an agent may do and this one does not (3.1.1): it answers with a task always, and never with a message instead.
NOT_DONE = {"DM-MSG-001"}
is_requirement = re.compile(r"\b[A-Z][A-Z0-9_]*(?:-[A-Z0-9_]+)*-\d{3}[a-z]?\b")
# What each message wants is told by the beginning of its id.
AGENT = """
import sys, time
from asyncgate.clients import Done, Fail, Worker
worker = Worker(sys.argv[1], "kit", token="", state=None, concurrency=8)
FILE = {"filename": "output.txt", "mediaType": "text/plain"}
GIVEN = {
    "tck-complete-task": "Hello from TCK", "tck-artifact-text": "Generated text content",
    "tck-artifact-file-url": {"parts": [{"url": "https://example.com/output.txt", **FILE}]},
    "tck-artifact-file": {"parts": [{"raw": "b3V0cHV0", **FILE}]},
    "tck-artifact-data": {"key": "value", "count": 42}, "tck-message-response": "Direct message response",
    "tck-delayed-complete": "Done after delay"}

@worker.task("kit")
def work(payload, job):
    wanted = payload.get("message_id", "")
    if wanted.startswith("tck-reject-task"):
        raise Fail("rejected", code="rejected")
    if wanted.startswith("tck-auth-required"):
        return job.ask("auth", "What now?").content
    for number in range(10 if wanted.startswith("tck-input-required") else 0):
        if "history message" not in str(answer := job.ask(f"input {number}", "What now?").content):
            return answer
    if wanted.startswith("tck-delayed-complete"):
        time.sleep(2)
    if wanted.startswith("tck-stream"):
        job.artifact("one", name="streamed")
        job.artifact("two", name="streamed", append=True)
    return next((value for name, value in GIVEN.items() if wanted.startswith(name)), "done")

worker.run()
"""


@pytest.fixture
def address(start: Callable[..., Live]) -> Iterator[str]:
    """Return the address of the agent, which lets everybody in."""
    gate = start("a2a.agents=kit", "a2a.root=kit", "api_key=", "allow_insecure_dev=true", "webhooks.allow=127.0.0.1")
    with subprocess.Popen([sys.executable, "-c", AGENT, gate.url],
                          env={**os.environ, "ASYNCGATE_API_KEY": ""}) as worker:
        yield gate.url
        worker.kill()


@pytest.mark.parametrize(("wanted", "state", "held"), [
    ("complete-task", "COMPLETED", "text"), ("artifact-text", "COMPLETED", "text"),
    ("artifact-file", "COMPLETED", "raw"), ("artifact-file-url", "COMPLETED", "url"),
    ("artifact-data", "COMPLETED", "data"), ("input-required", "INPUT_REQUIRED", ""),
    ("auth-required", "AUTH_REQUIRED", ""), ("reject-task", "REJECTED", "")])
def test_the_agent_does_what_the_kit_wants(address: str, wanted: str, state: str, held: str) -> None:
    message = {"messageId": f"tck-{wanted}-1", "role": "ROLE_USER", "parts": [{"text": "go"}]}
    answer = httpx2.post(f"{address}/a2a/kit/v1/message:send", json={"message": message}, trust_env=False, timeout=60)
    protobuf.ParseDict(answer.json(), pb.SendMessageResponse())
    task: dict[str, Any] = answer.json()["task"]
    artifacts = task.get("artifacts", [])

    assert task["status"]["state"] == f"TASK_STATE_{state}"
    assert [held in artifact["parts"][0] for artifact in artifacts] == [True] * bool(held)


def test_each_answer_and_each_event_is_as_the_protocol_defines_it(address: str) -> None:
    def check(path: str, kind: Any, **body: Any) -> Any:
        answer = gate.post(path, json=body) if body else gate.get(path)
        protobuf.ParseDict(answer.json(), kind)
        return answer.json()

    def follow(path: str, **body: Any) -> list[Any]:
        with gate.stream("POST", path, json=body) as answer:
            events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]
        for event in events:
            protobuf.ParseDict(event.get("result", event), pb.StreamResponse())
        return [next(iter(event.get("result", event))) for event in events]

    message = {"messageId": "tck-stream-1", "role": "ROLE_USER", "metadata": {"a": [1]},
               "parts": [{"data": None}, {"raw": "aGk", "filename": "x"}]}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": {"message": message}}
    with httpx2.Client(base_url=f"{address}/a2a/kit", trust_env=False, timeout=60) as gate:
        check("/.well-known/agent-card.json", pb.AgentCard())
        check("/v1/extendedAgentCard", pb.AgentCard())
        whole = ["task", "statusUpdate", "artifactUpdate", "artifactUpdate", "artifactUpdate", "statusUpdate"]
        assert (follow("/v1/message:stream", message=message), follow("/rpc", **rpc)) == (whole, whole)
        task_id = check("/v1/tasks?includeArtifacts=true", pb.ListTasksResponse())["tasks"][0]["id"]
        check(f"/v1/tasks/{task_id}", pb.Task())
        configs = f"/v1/tasks/{task_id}/pushNotificationConfigs"
        check(configs, pb.TaskPushNotificationConfig(), id="c", url="https://example.com/", authentication={
            "scheme": "Bearer", "credentials": "x"})
        check(configs, pb.ListTaskPushNotificationConfigsResponse())
        check(f"{configs}/c", pb.TaskPushNotificationConfig())


def test_the_kit_finds_nothing_but_what_an_agent_need_not_do(address: str) -> None:
    if (kit := os.environ.get(KIT)) is None:
        pytest.skip(f"the conformance kit of A2A is in no registry: {KIT} names a checkout of a2aproject/a2a-tck, "
                    "for A2A 1.0, whose packages are installed in its .venv or here")
    own = Path(kit, ".venv", "bin", "python")
    ran = subprocess.run([own if own.exists() else sys.executable, "run_tck.py", "--sut-host", address, "--transport",
                          "jsonrpc,http_json"], cwd=kit, capture_output=True, text=True, timeout=KIT_SECONDS,
                         env={**os.environ, "COLUMNS": "1000"})     # else pytest cuts the ids off its summary
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]

    assert re.search(r"\b1\d\d passed", ran.stdout), ran.stdout[-4000:] + ran.stderr[-2000:]
    assert [line for line in failed if not NOT_DONE.intersection(is_requirement.findall(line))] == []
