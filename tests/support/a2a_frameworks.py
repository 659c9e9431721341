"""Agents of frameworks that call a gate over A2A: python a2a_frameworks.py FRAMEWORK URL TOKEN.

The story is the same for each.  It prints {"kill": true} when everything is to be killed, reads a line when that is
done, and prints what it saw.
"""

# mypy: ignore-errors
# It runs with the packages of a framework, which are not installed beside the gate.

import asyncio
import json
import sys

import httpx

framework, url, token = sys.argv[1:]


class Adk:
    """Google ADK: a remote agent under a runner, whose sessions remember what was asked."""

    answers = True

    def __init__(self, http):
        from google.adk.agents.remote_a2a_agent import RemoteA2aAgent
        from google.adk.runners import Runner
        from google.adk.sessions import InMemorySessionService
        from google.genai import types

        self.types, self.sessions = types, InMemorySessionService()
        agent = RemoteA2aAgent(name="scan", agent_card=f"{url}/.well-known/agent-card.json", httpx_client=http)
        self.runner = Runner(app_name="it", agent=agent, session_service=self.sessions)

    async def say(self, words, talk):
        if await self.sessions.get_session(app_name="it", user_id="ada", session_id=talk) is None:
            await self.sessions.create_session(app_name="it", user_id="ada", session_id=talk)
        told = []
        message = self.types.Content(role="user", parts=[self.types.Part(text=words)])
        async for event in self.runner.run_async(user_id="ada", session_id=talk, new_message=message):
            for part in event.content.parts or () if event.content else ():
                if part.function_call:      # a question
                    told.append(json.dumps(part.function_call.args))
                elif part.text and not part.thought:
                    told.append(part.text)
            told += [event.error_message] if event.error_message else []
        return told


class Microsoft:
    """Microsoft Agent Framework: its sessions remember what was asked, and a token takes a task up again."""

    answers = True

    def __init__(self, http):
        self.http, self.agent, self.sessions, self.token = http, None, {}, None

    async def connect(self):
        from a2a.client import A2ACardResolver
        from agent_framework_a2a import A2AAgent

        card = await A2ACardResolver(self.http, url).get_agent_card()
        self.agent = A2AAgent(agent_card=card, http_client=self.http)

    async def say(self, words, talk):
        if self.agent is None:
            await self.connect()
        if words == "slow":
            begun = await self.agent.run(words, background=True)
            self.token = begun.continuation_token
            return []
        session = self.sessions.setdefault(talk, self.agent.create_session())
        return [(await self.agent.run(words, session=session)).text]

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

    answers = False

    def __init__(self, http):
        from a2a.client import ClientConfig
        from strands.agent.a2a_agent import A2AAgent

        self.agent = A2AAgent(endpoint=f"{url}/0.3", client_config=ClientConfig(httpx_client=http))

    async def say(self, words, talk):
        result = await self.agent.invoke_async(words)
        return [block["text"] for block in result.message["content"] if "text" in block]


async def main():
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=120, trust_env=False) as http:
        agent = {"adk": Adk, "microsoft": Microsoft, "strands": Strands}[framework](http)
        seen = {"read": await agent.say("read", "one"), "again": await agent.say("read it", "one"),
                "asking": await agent.say("ask", "two")}
        if agent.answers:
            seen["answered"] = await agent.say("7", "two")
        seen["failed"] = await agent.say("fail", "three")
        seen["waiting"] = await agent.say("ask later", "four")
        slow = asyncio.ensure_future(agent.say("slow", "five"))
        print(json.dumps({"kill": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(slow, return_exceptions=True)      # whatever it says when its gate is gone
        back = await agent.come_back() if framework == "microsoft" else None
        print(json.dumps({"go": True}), flush=True)
        if agent.answers:
            seen["late"] = await agent.say("9", "four")
        if back is not None:
            seen["back"] = (await back).text
        seen["after"] = await agent.say("read more", "six")
        print(json.dumps({"seen": {name: " ".join(value) if isinstance(value, list) else value
                                   for name, value in seen.items()}}), flush=True)


asyncio.run(main())
