"""Agents of frameworks that call a gate over A2A: python a2a_frameworks.py FRAMEWORK URL TOKEN OTHER_TOKEN RECEIVER.

The story is the same for each, and each leaves out what it has no words for.  It prints {"kill": true} when everything
is to be killed, reads a line when that is done, and prints what it saw.
"""

# mypy: ignore-errors
# It runs with the packages of a framework, which are not installed beside the gate.

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import httpx

framework, url, token, other_token, receiver = sys.argv[1:]


@asynccontextmanager
async def connect(bearer=token):
    """Give an agent of the framework with a client of HTTP."""
    headers = {"authorization": f"Bearer {bearer}"}
    async with httpx.AsyncClient(headers=headers, timeout=120, trust_env=False) as http:
        yield {"adk": Adk, "microsoft": Microsoft, "strands": Strands}[framework](http)


class Adk:
    """Google ADK: a remote agent under a runner, whose sessions remember what was asked."""

    cannot = {"got", "listed", "history", "canceled", "back"}

    def __init__(self, http):
        from google.adk.sessions import InMemorySessionService

        self.http, self.sessions = http, InMemorySessionService()
        self.use(None)

    def use(self, push):
        from a2a.client import ClientConfig, ClientFactory
        from google.adk.agents.remote_a2a_agent import RemoteA2aAgent
        from google.adk.runners import Runner

        factory = ClientFactory(ClientConfig(httpx_client=self.http, push_notification_config=push))
        self.agent = RemoteA2aAgent(name="scan", agent_card=f"{url}/.well-known/agent-card.json",
                                    a2a_client_factory=factory)
        self.runner = Runner(app_name="it", agent=self.agent, session_service=self.sessions)

    async def card(self):
        return self.agent.description

    async def begin(self):
        self.use(make_push())
        try:
            return await self.say("slow", "five")
        finally:
            self.use(None)

    async def say(self, words, talk):
        from google.genai import types

        if await self.sessions.get_session(app_name="it", user_id="ada", session_id=talk) is None:
            await self.sessions.create_session(app_name="it", user_id="ada", session_id=talk)
        told = []
        message = types.Content(role="user", parts=[types.Part(text=words)])
        async for event in self.runner.run_async(user_id="ada", session_id=talk, new_message=message):
            for part in event.content.parts or () if event.content else ():
                if part.function_call:      # a question
                    told.append(json.dumps(part.function_call.args))
                elif part.inline_data:      # data
                    told.append(part.inline_data.data.decode())
                elif part.text and not part.thought:
                    told.append(part.text)
            told += [event.error_message] if event.error_message else []
        return told

    stream = say


class Microsoft:
    """Microsoft Agent Framework: its sessions remember what was asked, and a token takes a task up again."""

    cannot = set()

    def __init__(self, http):
        self.http, self.agent, self.sessions, self.token = http, None, {}, None

    async def card(self):
        from a2a.client import A2ACardResolver
        from agent_framework_a2a import A2AAgent

        card = await A2ACardResolver(self.http, url).get_agent_card()
        self.agent = A2AAgent(agent_card=card, http_client=self.http)
        return self.agent.description

    async def say(self, words, talk):
        session = self.sessions.setdefault(talk, self.agent.create_session())
        return [(await self.agent.run(words, session=session)).text]

    async def stream(self, words, talk):
        return [update.text async for update in self.agent.run(words, stream=True) if update.text]

    async def begin(self):
        self.token = (await self.agent.run("slow", background=True)).continuation_token
        config = make_push()
        config.task_id = self.token["task_id"]
        await self.agent.client.create_task_push_notification_config(config)

    async def manage(self):
        from a2a.types import CancelTaskRequest, GetTaskRequest, ListTasksRequest, TaskState

        client = self.agent.client
        begun = (await self.agent.run("ask me", background=True)).continuation_token
        polled = await self.agent.poll_task(begun)
        task = await client.get_task(GetTaskRequest(id=begun["task_id"], history_length=1))
        listed = await client.list_tasks(ListTasksRequest(context_id=begun["context_id"]))
        canceled = await client.cancel_task(CancelTaskRequest(id=begun["task_id"]))
        return {"got": (polled.continuation_token or {}).get("task_id") == begun["task_id"],
                "listed": [task.id for task in listed.tasks] == [begun["task_id"]],
                "history": [part.text for row in task.history for part in row.parts],
                "canceled": TaskState.Name(canceled.status.state)}

    async def come_back(self):
        followed = asyncio.Event()

        async def note(answer):
            if answer.headers["content-type"].startswith("text/event-stream"):
                followed.set()
        self.http.event_hooks = {"response": [note]}
        back = asyncio.ensure_future(self.agent.run(continuation_token=self.token))
        await followed.wait()       # a task that has ended has no stream, and the framework does not read it otherwise
        return back


class Strands:
    """Strands: an agent of 0.3 that remembers nothing, so that others answer what it is asked."""

    cannot = {"data", "answered", "got", "listed", "history", "canceled", "foreign", "late", "back"}

    def __init__(self, http):
        self.http = http
        self.agent = self.make()

    def make(self, *pushes):
        from a2a.client import ClientConfig
        from strands.agent.a2a_agent import A2AAgent

        return A2AAgent(endpoint=f"{url}/0.3", client_config=ClientConfig(
            httpx_client=self.http, push_notification_configs=list(pushes)))

    async def card(self):
        return (await self.agent.get_agent_card()).description

    async def say(self, words, talk, agent=None):
        result = await (agent or self.agent).invoke_async(words)
        return [block["text"] for block in result.message["content"] if "text" in block]

    async def begin(self):
        from a2a.types import PushNotificationAuthenticationInfo, PushNotificationConfig

        who = PushNotificationAuthenticationInfo(schemes=["Bearer"], credentials="s3cr3t")
        return await self.say("slow", "five", self.make(PushNotificationConfig(
            id="c-1", url=receiver, token="t-1", authentication=who)))

    async def stream(self, words, talk):
        told = []
        async for event in self.agent.stream_async(words):
            _, update = event.get("event", (None, None))
            if update is not None and update.kind == "artifact-update":
                told += [part.root.text for part in update.artifact.parts]
        return told


def make_push():
    """Return a push configuration of 1.0."""
    from a2a.types import AuthenticationInfo, TaskPushNotificationConfig

    return TaskPushNotificationConfig(id="c-1", url=receiver, token="t-1", authentication=AuthenticationInfo(
        scheme="Bearer", credentials="s3cr3t"))


async def attempt(call):
    """Return what an agent says, or what its framework raises."""
    try:
        return await call
    except Exception as error:      # each framework has its own
        return [f"{error} {error.__cause__}"]


async def tell(agent, seen):
    """Make the statements before the kill."""
    seen["read"] = await agent.say("read", "one")
    seen["again"] = await agent.say("read it", "one")
    seen["umlauts"] = await agent.say("lies über ☃", "one")
    seen["streamed"] = await agent.stream("print", "stream")
    seen["asking"] = await agent.say("ask", "two")
    seen["failed"] = await agent.say("fail", "three")
    seen["rejected"] = await agent.say("reject", "rejected")
    seen["left"], seen["right"] = await asyncio.gather(agent.say("left", "left"), agent.say("right", "right"))
    if "data" not in agent.cannot:
        seen["data"] = await agent.say("data", "data")
    if "answered" not in agent.cannot:
        seen["answered"] = await agent.say("7", "two")
    if "got" not in agent.cannot:
        seen |= await agent.manage()
    await resend(agent, seen)
    async with connect("none") as stranger:
        await stranger.card()       # it is public
        seen["stranger"] = await attempt(stranger.say("stranger", "x"))
    if "foreign" not in agent.cannot:
        await agent.say("ask mine", "mine")
        agent.http.headers["authorization"] = f"Bearer {other_token}"
        seen["foreign"] = await attempt(agent.say("8", "mine"))
        agent.http.headers["authorization"] = f"Bearer {token}"
    seen["waiting"] = await agent.say("ask later", "four")


async def resend(agent, seen):
    """Send a message three times under one key, at last with another content."""
    agent.http.headers["idempotency-key"] = "k-1"
    seen["once"] = [*await agent.say("once", "once-1"), *await agent.say("once", "once-2")]
    seen["conflict"] = await attempt(agent.say("twice", "once-3"))
    del agent.http.headers["idempotency-key"]


async def main():
    async with connect() as agent:
        seen = {"card": await agent.card()}
        await tell(agent, seen)
        if framework == "adk":      # which reads the card with the first message
            seen["card"] = await agent.card()
        slow = asyncio.ensure_future(agent.begin())
        if "back" not in agent.cannot:
            await slow      # it does not wait for the task, and the push configuration must stand before the kill
        print(json.dumps({"kill": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(slow, return_exceptions=True)      # whatever it says when its gate is gone
        back = None if "back" in agent.cannot else await agent.come_back()
        print(json.dumps({"go": True}), flush=True)
        if "late" not in agent.cannot:
            seen["late"] = await agent.say("9", "four")
        if back is not None:
            seen["back"] = (await back).text
        seen["after"] = await agent.say("read more", "six")
        print(json.dumps({"seen": {name: " ".join(value) if isinstance(value, list) else value
                                   for name, value in seen.items()}, "cannot": sorted(agent.cannot)}), flush=True)


asyncio.run(main())
