"""The client of a2a-sdk 0.3 against a gate: python a2a_old_client.py URL TOKEN RECEIVER.

It prints {"kill": true} when everything is to be killed, reads a line when that is done, and prints what it saw.
"""

# mypy: ignore-errors
# It runs with another version of the SDK than the one that is installed.

import asyncio
import json
import sys
import uuid

import httpx
from a2a.client import ClientConfig, ClientFactory
from a2a.client.errors import A2AClientJSONRPCError
from a2a.types import (
    Message,
    Part,
    PushNotificationAuthenticationInfo,
    PushNotificationConfig,
    Role,
    Task,
    TaskIdParams,
    TaskPushNotificationConfig,
    TaskQueryParams,
    TextPart,
)

url, token, receiver = sys.argv[1:]


def message(words, **more):
    return Message(role=Role.user, message_id=uuid.uuid4().hex, parts=[Part(root=TextPart(text=words))], **more)


def words_of(parts):
    return " ".join(part.root.text for part in parts if isinstance(part.root, TextPart))


def show(task):
    return {"id": task.id, "context": task.context_id, "state": task.status.state.value,
            "says": words_of(task.status.message.parts) if task.status.message else "",
            "gave": [words_of(artifact.parts) for artifact in task.artifacts or ()]}


async def refused(call):
    try:
        await call
    except A2AClientJSONRPCError as error:
        return error.error.code
    return 0


async def stream(events):
    told = []
    async for task, event in events:
        told.append(task.status.state.value if event is None or event.kind == "status-update" else words_of(
            event.artifact.parts))
    return told


async def main():
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=120, trust_env=False) as http:
        async def connect(**how):
            return await ClientFactory.connect(f"{url}/0.3", ClientConfig(httpx_client=http, **how))

        agent, polling = await connect(streaming=False), await connect(streaming=False, polling=True)
        streaming = await connect(streaming=True)

        async def send(by, words, **more):
            [(task, _)] = [event async for event in by.send_message(message(words, **more))]
            return show(task)

        async def reach(id, state):
            while True:
                try:
                    task = await agent.get_task(TaskQueryParams(id=id))
                    if task.status.state.value == state:
                        return show(task)
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.05)

        card = await agent.get_card()
        read = await send(agent, "read", context_id="talk-1")
        asking = await send(agent, "ask", context_id="talk-1")
        history = await agent.get_task(TaskQueryParams(id=read["id"], history_length=1))
        answered = await send(agent, "7", task_id=asking["id"])
        failed = await send(agent, "fail")
        errors = [await refused(call) for call in (
            agent.get_task(TaskQueryParams(id="none")), agent.cancel_task(TaskIdParams(id=read["id"])),
            send(agent, "again", task_id=read["id"]), send(agent, "7", task_id="none"))]
        streamed = await stream(streaming.send_message(message("read")))
        asked = await stream(streaming.send_message(message("ask")))
        canceled = await send(agent, "ask")
        gone = show(await agent.cancel_task(TaskIdParams(id=canceled["id"])))

        waiting, slow = await send(polling, "ask"), await send(polling, "slow")
        push = PushNotificationConfig(id="c-1", url=receiver, token="t-1",
                                      authentication=PushNotificationAuthenticationInfo(
                                          schemes=["Bearer"], credentials="s3cr3t"))
        kept = await agent.set_task_callback(TaskPushNotificationConfig(
            task_id=slow["id"], push_notification_config=push))
        print(json.dumps({"kill": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await reach(waiting["id"], "input-required")
        late = await send(agent, "9", task_id=waiting["id"])
        back = streaming.resubscribe(TaskIdParams(id=slow["id"]))
        await anext(back)
        print(json.dumps({"go": True}), flush=True)
        rest = await stream(back)
        done = await reach(slow["id"], "completed")
        assert isinstance(history, Task)
        print(json.dumps({
            "name": card.name, "read": read, "asking": asking,
            "history": [words_of(row.parts) for row in history.history],
            "answered": answered, "failed": failed, "errors": errors, "streamed": streamed, "asked": asked,
            "gone": gone, "configs": [kept.push_notification_config.id], "late": late, "rest": rest, "done": done}))


asyncio.run(main())
