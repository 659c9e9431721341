"""Push notifications: webhooks of one task, which tell in the words of A2A what has happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.parts.model.settings import A2ASettings, WebhookSettings
from tests.conftest import Live, Serve
from tests.extras.a2a.conftest import AGENT, Agent, Programs, begun, looks, said
from tests.extras.a2a.test_a2a_sdk import BINDINGS, connected, message, pb
from tests.support.receiver import OK, Came, Receiver, Reply

pytestmark = pytest.mark.anyio
HASTY = WebhookSettings(allow=("127.0.0.1",), retry_seconds=0.01, max_retry_seconds=0.05)
LIVE = ("webhooks.allow=127.0.0.1", "webhooks.retry_seconds=0.05", "webhooks.max_retry_seconds=0.2")


@pytest.fixture
async def agent(serve: Serve) -> Agent:
    """Return an agent of a gate that may call receivers on loopback."""
    return Agent(await serve(a2a=A2ASettings(agents=(AGENT, "other")), webhooks=HASTY))


def config(receiver: Receiver, **more: Any) -> dict[str, Any]:
    """Return a configuration."""
    return {"id": "c-1", "url": receiver.url, "token": "t-1", **more,
            "authentication": {"scheme": "Bearer", "credentials": "s3cr3t"}}


def states(came: list[Came]) -> list[str]:
    """Return the states that requests tell, as 1.0 spells them; each is one StreamResponse."""
    told = [next(iter(request.said.items())) for request in came if len(request.said) == 1]
    return [value["status"]["state"].removeprefix("TASK_STATE_") for _, value in told]


async def test_a_message_with_a_configuration_is_followed_from_the_first_lease_to_the_whole_task(agent: Agent) -> None:
    async with Receiver() as receiver:
        how = {"returnImmediately": True, "taskPushNotificationConfig": config(receiver)}
        task = (await agent.good("SendMessage", {"message": said(), "configuration": how}))["task"]
        lease = await agent.lease()
        await agent.ask(lease)
        await receiver.until(lambda: len(receiver.taken) == 2)
        answer = asyncio.ensure_future(agent.good("SendMessage", {"message": said("yes", taskId=task["id"])}))
        await agent.under(await agent.lease(), "complete", result="done")
        await answer
        await receiver.until(lambda: len(receiver.taken) == 5)

    assert states(receiver.taken) == ["WORKING", "INPUT_REQUIRED", "WORKING", "WORKING", "COMPLETED"]
    asked, ended = receiver.taken[1].said["statusUpdate"], receiver.taken[-1].said["task"]
    assert asked["status"]["message"]["parts"][0]["text"] == "Deploy?"
    assert (asked["taskId"], asked["contextId"]) == (task["id"], task["contextId"])
    assert ended == await agent.task(task["id"])
    assert {(request.headers["authorization"], request.headers["x-a2a-notification-token"])
            for request in receiver.taken} == {("Bearer s3cr3t", "t-1")}


async def test_a_configuration_is_kept_shown_without_its_secrets_replaced_and_deleted(agent: Agent) -> None:
    async with Receiver() as receiver:
        task = await agent.begin()
        path = f"tasks/{task['id']}/pushNotificationConfigs"
        made = await agent.good("CreateTaskPushNotificationConfig", {"taskId": task["id"], **config(receiver)})
        again = (await agent.http("POST", path, config(receiver, url=f"{receiver.url}/2"))).json()
        nameless = (await agent.http("POST", path, {"url": receiver.url})).json()
        shown_first = await agent.good("GetTaskPushNotificationConfig", {"taskId": task["id"], "id": "c-1"})
        listed = (await agent.http("GET", path)).json()
        over_http = (await agent.http("GET", f"{path}/{nameless['id']}")).json()
        for _ in range(2):
            assert (await agent.http("DELETE", f"{path}/c-1")).status == 200
        left = await agent.good("ListTaskPushNotificationConfigs", {"taskId": task["id"]})
        none = await agent.refused("GetTaskPushNotificationConfig", {"taskId": task["id"], "id": "c-1"})

        slashed = (await agent.http("POST", path, {"id": "a/b", "url": receiver.url})).json()
        read = (await agent.http("GET", f"{path}/a%2Fb")).json()
        await agent.http("DELETE", f"{path}/a%2Fb")
        without = await agent.good("ListTaskPushNotificationConfigs", {"taskId": task["id"]})

    assert (read, without) == (slashed, left)
    shown = {"id": "c-1", "taskId": task["id"], "url": receiver.url, "authentication": {"scheme": "Bearer"}}
    assert made == shown
    assert again == shown_first == {**shown, "url": f"{receiver.url}/2"}
    assert over_http == nameless
    assert listed == {"configs": [shown_first, nameless], "nextPageToken": ""}
    assert left["configs"] == [nameless]
    assert none == (-32001, "TASK_NOT_FOUND")


async def test_a_client_of_0_3_is_posted_the_task(agent: Agent) -> None:
    old = {"messageId": "m-1", "role": "user", "parts": [{"kind": "text", "text": "hello"}]}
    async with Receiver() as receiver:
        push = {"id": "c-1", "url": receiver.url, "token": "t-1",
                "authentication": {"schemes": ["Bearer"], "credentials": "s3cr3t"}}
        sent = {"message": old, "configuration": {"blocking": False, "pushNotificationConfig": push}}
        task = await agent.good("message/send", sent)
        named = {"id": task["id"], "pushNotificationConfigId": "c-1"}
        shown_first = await agent.good("tasks/pushNotificationConfig/get", named)
        also = await agent.good("tasks/pushNotificationConfig/set", {
            "taskId": task["id"], "pushNotificationConfig": {"id": "c-2", "url": f"{receiver.url}/2"}})
        listed = await agent.good("tasks/pushNotificationConfig/list", {"id": task["id"]})
        gone = await agent.good("tasks/pushNotificationConfig/delete", {**named, "pushNotificationConfigId": "c-2"})
        await agent.under(await agent.lease(), "complete", result="done")
        await receiver.until(lambda: len(receiver.taken) == 2)
        ended = await agent.good("tasks/get", {"id": task["id"]})

    assert shown_first == {"taskId": task["id"], "pushNotificationConfig": {
        "id": "c-1", "url": receiver.url, "authentication": {"schemes": ["Bearer"]}}}
    assert listed == [shown_first, also]
    assert gone is None
    assert (receiver.taken[-1].said, ended["status"]["state"]) == (ended, "completed")
    assert receiver.taken[-1].headers["authorization"] == "Bearer s3cr3t"


async def test_in_0_3_a_configuration_without_an_id_has_that_of_its_task(agent: Agent) -> None:
    task, where = await agent.begin(), {"url": "http://127.0.0.1:9/"}
    kept = await agent.good("tasks/pushNotificationConfig/set", {"taskId": task["id"], "pushNotificationConfig": where})
    read = await agent.good("tasks/pushNotificationConfig/get", {"id": task["id"]})

    assert kept == read == {"taskId": task["id"], "pushNotificationConfig": {"id": task["id"], **where}}


@pytest.mark.parametrize("wrong", [
    {"token": "a\r\nx-evil: 1"}, {"authentication": {"scheme": "Bearer\r\nx-evil: 1", "credentials": "a"}},
    {"authentication": {"scheme": "Bearer", "credentials": "a\nb"}}, {"url": "http://10.0.0.1/"}, {"url": ""},
    {"url": "http://169.254.169.254/latest"}, {"token": "a" * 5000}, {"authentication": "Bearer"}, {"url": "file:///x"},
    {"url": "http://127.0.0.1:1/#x"}, {"id": "a" * 300}])
async def test_a_configuration_that_could_do_harm_is_refused_and_makes_no_task(
        agent: Agent, wrong: dict[str, Any]) -> None:
    good = {"id": "c-1", "url": "http://127.0.0.1:9/"}
    task = await agent.begin()
    async with agent.served.unchanged():
        code, field = await agent.refused("CreateTaskPushNotificationConfig", {"taskId": task["id"], **good, **wrong})
        sent = {"message": said(), "configuration": {"taskPushNotificationConfig": {**good, **wrong}}}
        first, where = await agent.refused("SendMessage", sent)

    assert (code, first) == (-32602, -32602)
    assert "onfig" in where or "url" in where
    assert field


async def test_the_card_says_whether_there_are_notifications(agent: Agent, serve: Serve) -> None:
    without = Agent(await serve(a2a=A2ASettings(agents=(AGENT,)), webhooks=WebhookSettings(max_per_task=0)))
    cards = [(await there.served.call("GET", f"{there.path}/.well-known/agent-card.json")).json()
             for there in (agent, without)]
    sent = {"message": said(), "configuration": {"taskPushNotificationConfig": {"url": "https://example.com/"}}}

    assert [card["capabilities"]["pushNotifications"] for card in cards] == [True, False]
    assert await without.refused("SendMessage", sent) == (-32003, "PUSH_NOTIFICATION_NOT_SUPPORTED")


@pytest.fixture
def pushing(start: Callable[..., Live], tmp_path: Path) -> Iterator[Programs]:
    """Return a gate that may call receivers on loopback, and its worker."""
    running = Programs(lambda *settings, **more: start(*settings, *LIVE, **more), tmp_path)
    yield running
    running.kill_worker()


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_end_is_pushed_behind_a_kill_of_the_gate_to_a_receiver_that_was_away(
        pushing: Programs, binding: str) -> None:
    is_away = True

    def answer(came: Came) -> Reply:
        return (503, {}) if is_away else OK

    pushing.work()
    async with Receiver(answer) as receiver:
        push = pb.TaskPushNotificationConfig(
            id="c-1", url=receiver.url, token="t-1",  # of a test
            authentication=pb.AuthenticationInfo(scheme="Bearer", credentials="s3cr3t"))
        async with connected(pushing, binding, polling=True) as sdk:
            request = message("slow")
            request.configuration.task_push_notification_config.CopyFrom(push)
            [first] = [event async for event in sdk.send_message(request)]
            await begun(pushing)
            pushing.go()
            async for _ in looks():
                if (await sdk.get_task(pb.GetTaskRequest(id=first.task.id))).status.state == pb.TASK_STATE_COMPLETED:
                    break
            pushing.kill_gate()
        is_away = False
        async with connected(pushing, binding, polling=True) as sdk:
            kept = await sdk.get_task_push_notification_config(
                pb.GetTaskPushNotificationConfigRequest(task_id=first.task.id, id="c-1"))
        await receiver.until(lambda: bool(receiver.taken) and "task" in receiver.taken[-1].said)

    assert (kept.url, kept.token, kept.authentication.credentials) == (receiver.url, "", "")
    assert states(receiver.taken)[-1] == "COMPLETED"
    ends = {request.id for request in receiver.taken if "task" in request.said}
    assert len(ends) == 1
    assert {request.headers["authorization"] for request in receiver.came} == {"Bearer s3cr3t"}
