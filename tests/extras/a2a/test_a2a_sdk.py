"""The client of a2a-sdk, over both bindings, with a gate and a worker that are killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.conftest import TOKEN, Live
from tests.extras.a2a.conftest import Programs, begun, looks
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_SECONDS

client = pytest.importorskip("a2a.client", reason="a2a-sdk is not installed: pip install 'asyncgate[test]'")
errors = pytest.importorskip("a2a.utils.errors")
httpx = pytest.importorskip("httpx")
pb = pytest.importorskip("a2a.types.a2a_pb2")
pytestmark = pytest.mark.anyio
BINDINGS = ["JSONRPC", "HTTP+JSON"]
@contextlib.asynccontextmanager
async def connected(programs: Programs, binding: str, polling: bool = False, streaming: bool = False, card: str = "",
                    ) -> AsyncIterator[Any]:
    """Connect a client of the SDK, which reads the card first."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_SECONDS, trust_env=False) as http:
        config = client.ClientConfig(httpx_client=http, supported_protocol_bindings=[binding], polling=polling,
                                     streaming=streaming, use_client_preference=True)
        yield await client.create_client(f"{programs.gate.url}/a2a/scan{card}", config)


def message(text: str, **more: Any) -> Any:
    """Return a request with a message of words."""
    return pb.SendMessageRequest(message=pb.Message(
        message_id=str(uuid.uuid4()), role=pb.Role.ROLE_USER, parts=[pb.Part(text=text)], **more))


async def send(agent: Any, text: str, **more: Any) -> Any:
    """Send a message, as a stream unless the client polls; return the task as it is then."""
    events = [event async for event in agent.send_message(message(text, **more))]
    return await agent.get_task(pb.GetTaskRequest(id=events[0].task.id))


async def reach(agent: Any, task_id: str, state: int) -> Any:
    """Return a task when it has come to a state."""
    async for _ in looks():
        if (task := await agent.get_task(pb.GetTaskRequest(id=task_id))).status.state == state:
            return task


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_sdk_sends_asks_lists_and_cancels(programs: Programs, binding: str) -> None:
    programs.work()
    async with connected(programs, binding) as agent:
        done = await send(agent, "read", context_id="talk-1")
        asking = await send(agent, "ask", context_id="talk-1")
        answered = await send(agent, "7", task_id=asking.id)
        failed = await send(agent, "fail")
        read = await agent.get_task(pb.GetTaskRequest(id=done.id, history_length=1))
        listed = await agent.list_tasks(pb.ListTasksRequest(context_id="talk-1", include_artifacts=True))
        card = await agent.get_extended_agent_card(pb.GetExtendedAgentCardRequest())
        with pytest.raises(errors.TaskNotFoundError):
            await agent.get_task(pb.GetTaskRequest(id="none"))
        with pytest.raises(errors.TaskNotCancelableError):
            await agent.cancel_task(pb.CancelTaskRequest(id=done.id))
        with pytest.raises(errors.InvalidParamsError, match="pageToken must be the nextPageToken"):
            await agent.list_tasks(pb.ListTasksRequest(page_token="x"))
        with pytest.raises(errors.UnsupportedOperationError):
            await send(agent, "again", task_id=done.id)

    assert (done.status.state, done.artifacts[0].parts[0].text) == (pb.TASK_STATE_COMPLETED, "READ")
    assert (asking.status.state, asking.status.message.parts[0].text) == (pb.TASK_STATE_INPUT_REQUIRED, "Which page?")
    assert (answered.id, answered.artifacts[0].parts[0].text) == (asking.id, "page 7")
    assert (failed.status.state, failed.status.message.parts[0].text) == (pb.TASK_STATE_FAILED, "no paper")
    assert [part.text for part in read.history[0].parts] == ["read"]
    assert ([task.id for task in listed.tasks], listed.total_size) == ([asking.id, done.id], 2)
    assert card.name == "scan"


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_task_outlives_its_gate_and_its_worker(programs: Programs, binding: str) -> None:
    programs.work()
    async with connected(programs, binding, polling=True) as agent:
        slow = await send(agent, "slow")
        await begun(programs)
        asking = await send(agent, "ask")
        programs.kill_worker()
        programs.kill_gate()
        programs.work()
        programs.go()
    async with connected(programs, binding) as agent:
        await reach(agent, asking.id, pb.TASK_STATE_INPUT_REQUIRED)
        answered = await send(agent, "9", task_id=asking.id)
        done = await reach(agent, slow.id, pb.TASK_STATE_COMPLETED)
        listed = await agent.list_tasks(pb.ListTasksRequest())

    assert (done.artifacts[0].parts[0].text, answered.artifacts[0].parts[0].text) == ("SLOW", "page 9")
    assert {task.id for task in listed.tasks} == {slow.id, asking.id}


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_sdk_streams_and_comes_back_behind_a_kill(programs: Programs, binding: str) -> None:
    programs.work()
    async with connected(programs, binding, streaming=True) as agent:
        whole = [event async for event in agent.send_message(message("read"))]
        asking = [event async for event in agent.send_message(message("ask"))]
        task_id = ""
        with contextlib.suppress(Exception):        # whatever the SDK raises when its gate is gone
            async for event in agent.send_message(message("slow")):
                if not task_id:
                    task_id = event.task.id
                    await begun(programs)
                    programs.kill_worker()
                    programs.kill_gate()
        programs.work()
        back = agent.subscribe(pb.SubscribeToTaskRequest(id=task_id))
        first = await anext(back)
        programs.go()
        rest = [event async for event in back]

    assert whole[0].HasField("task")
    assert whole[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
    assert whole[-2].artifact_update.artifact.parts[0].text == "READ"
    assert asking[-1].status_update.status.state == pb.TASK_STATE_INPUT_REQUIRED
    assert first.task.id == task_id
    assert rest[-2].artifact_update.artifact.parts[0].text == "SLOW"
    assert rest[-1].status_update.status.state == pb.TASK_STATE_COMPLETED


async def test_a_client_of_0_3_does_the_same(programs: Programs) -> None:
    programs.work()
    async with connected(programs, "JSONRPC", card="/0.3") as agent:
        done = await send(agent, "read", context_id="talk-1")
        asking = await send(agent, "ask")
        answered = await send(agent, "7", task_id=asking.id)
        with pytest.raises(errors.TaskNotCancelableError):
            await agent.cancel_task(pb.CancelTaskRequest(id=done.id))
    async with connected(programs, "JSONRPC", card="/0.3", streaming=True) as agent:
        streamed = [event async for event in agent.send_message(message("fail"))]

    assert (done.context_id, done.artifacts[0].parts[0].text) == ("talk-1", "READ")
    assert (asking.status.state, asking.status.message.parts[0].text) == (pb.TASK_STATE_INPUT_REQUIRED, "Which page?")
    assert (answered.id, answered.artifacts[0].parts[0].text) == (asking.id, "page 7")
    assert streamed[0].task.status.state == pb.TASK_STATE_SUBMITTED
    assert streamed[-1].status_update.status.state == pb.TASK_STATE_FAILED


async def test_a_client_that_goes_while_it_waits_ends_nothing(programs: Programs) -> None:
    async with connected(programs, "JSONRPC") as agent:
        sending = asyncio.ensure_future(send(agent, "read"))
        async for _ in looks():
            if (listed := await agent.list_tasks(pb.ListTasksRequest())).tasks:
                break
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        programs.work()
        await reach(agent, listed.tasks[0].id, pb.TASK_STATE_COMPLETED)


def test_the_page_shows_a_client_that_runs(start: Callable[..., Live]) -> None:
    gate = start("a2a.agents=scan", "api_key=", "allow_insecure_dev=true")
    [shown], [works] = blocks("python", mark="a2a:client"), [
        block for block in blocks("python", mark="worker:run") if '"scan"' in block.text]
    around = {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": ""}
    with subprocess.Popen([sys.executable, "-c", works.text], env=around) as worker:
        try:
            ran = subprocess.run([sys.executable, "-c", shown.text.replace("http://127.0.0.1:8080", gate.url)],
                                  capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        finally:
            worker.kill()

    assert ran.stdout == "page 1: hello\n", ran.stderr
