"""Agents of the Claude Agent SDK: a session goes on in the next process, and approvals are asked at the gate.

    @worker.task("clerk")
    async def clerk(prompt: str, job: Job) -> str:
        return await run_agent(prompt, job, ClaudeAgentOptions(allowed_tools=["Read"]), to="human:boss")

Claude Code is a program of its own, which outlives a worker that is killed.  So each call of a tool asks the gate under
the lease before it begins, and on Linux a guardian kills the program with all that it has started.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import re
from itertools import count
from typing import Any

import msgspec
from claude_agent_sdk import ClaudeAgentOptions, HookMatcher, ResultMessage, query

from asyncgate.clients.http import Refusal
from asyncgate.clients.worker import Answer, Job, Lost, Question
from asyncgate.clients.worker.children import CREDENTIALS, Guardian, kill_runs
from asyncgate.extras.agents.approvals import ask_for_approval, describe_refusal
from asyncgate.parts.process.kit import take_error

APPROVED = "Bash|Edit|Write|NotebookEdit|mcp__.*"
SESSION, CALL = "claude session", "claude call"         # what steps are called that are recorded here
UNKNOWN_SESSION = "No conversation found with session ID"     # what Claude Code says of one that it has not stored
GO_ON = "This session was interrupted. Go on, and repeat the call that was cut off if it is still wanted."
HOOK_SECONDS = 30 * 86400.0          # that Claude Code waits for the gate
GUARDIAN = Guardian()


async def run_agent(prompt: str, job: Job, options: ClaudeAgentOptions | None = None, *, to: str | None = None,
                    approve: str = APPROVED, keep_lease: float = 60.0) -> str:
    """Run an agent to its end and return its last words; a later process goes on in its session.

    `approve` is a pattern of the names of tools of which each call needs an approval, which is good for one call.  The
    session waits for it under the lease for `keep_lease` seconds; then it ends, and goes on when there is an answer.
    Other tools are as the options say.  Steps of the function's own go before this.
    """
    run = AgentRun(job, options or ClaudeAgentOptions(), to, re.compile(approve), keep_lease)
    for name, value in await job.recall():
        run.take(name, value)
    while (result := await run.advance(prompt)) is None:
        run.answers |= await job.ask_all(run.question)      # ends the function, unless the answer has come meanwhile
    return result


class AgentRun:
    """The session of a task in one process: which calls were begun, and which one waits without the lease."""

    def __init__(self, job: Job, options: ClaudeAgentOptions, to: str | None, approve: re.Pattern[str],
                 keep_lease: float) -> None:
        self.job, self.to, self.approve, self.keep_lease = job, to, approve, keep_lease
        self.session, self.begun, self.taken = "", set[str](), set[str]()
        self.answers = {key: msgspec.convert(given, Answer) for key, given in (job.offer.get("inputs") or {}).items()}
        self.options = copy.copy(options)
        hooks = options.hooks or {}
        mine = HookMatcher(hooks=[self.decide], timeout=HOOK_SECONDS, on_failure="block")
        self.options.hooks = {**hooks, "PreToolUse": [*hooks.get("PreToolUse", ()), mine]}
        # What runs for the lease is found by it, and does not get the worker's credential.
        self.options.env = {**dict.fromkeys(CREDENTIALS, ""), **options.env, "ASYNCGATE_LEASE_ID": job.lease_id,
                            "ASYNCGATE_WORKER_PID": str(os.getpid())}

    question: Question
    waits: asyncio.Future[None]

    def take(self, name: str, value: Any) -> None:
        """Take back what an earlier process has recorded."""
        if name == SESSION:
            self.session = value
        elif name == CALL:
            self.begun.add(value)

    async def advance(self, prompt: str) -> str | None:
        """Run the session to its end, or until a call has waited for so long; then return None."""
        self.waits, self.taken = asyncio.get_running_loop().create_future(), set(self.begun)
        self.options.resume = self.session or None
        await asyncio.to_thread(self._guard)
        reading = asyncio.ensure_future(self._read(prompt))
        reading.add_done_callback(take_error)
        try:
            futures: list[asyncio.Future[Any]] = [reading, self.waits]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            await asyncio.shield(asyncio.to_thread(self._clear))
            reading.cancel()
            await asyncio.wait([reading])

    def _guard(self) -> None:
        if not GUARDIAN.pid:
            GUARDIAN.start()
        kill_runs([self.job.lease_id])      # of an earlier process of this worker, if that lost its guardian, too
        GUARDIAN.tell(self.job.lease_id, "begins")

    def _clear(self) -> None:
        kill_runs([self.job.lease_id])
        GUARDIAN.tell(self.job.lease_id, "ended")

    async def _read(self, prompt: str) -> str:
        try:
            return await self._read_session(GO_ON if self.options.resume else prompt)
        except Exception as error:
            # Claude Code had been ended before it had stored anything of the session that its first hook named.
            if self.options.resume is None or UNKNOWN_SESSION not in str(error):
                raise
            self.options.resume = None
            return await self._read_session(prompt)

    async def _read_session(self, prompt: str) -> str:
        result = None
        async for message in query(prompt=prompt, options=self.options):
            if isinstance(message, ResultMessage):
                result = message
        if result is None or result.is_error:
            raise RuntimeError(f"the session has ended with {result and (result.result or result.subtype)}")
        return result.result or ""

    async def decide(self, given: Any, tool_use_id: str | None, context: Any) -> Any:
        """Answer Claude Code, which asks before each call of a tool; what fails here keeps it from the call."""
        try:
            if given["session_id"] != self.session:
                self.session = given["session_id"]
                await self.job.step(SESSION, lambda: given["session_id"])
            if self.approve.fullmatch(given["tool_name"]):
                refused = await self._ask(given["tool_name"], given["tool_input"])
                return say("deny", refused) if refused else say("allow")
            await asyncio.to_thread(self.job.call, "start_task", **self.job.under)
            return {}
        except (Lost, Refusal) as error:
            return say("deny", str(error))

    async def _ask(self, tool: str, given: Any) -> str:
        """Return why a call may not begin, or nothing if somebody has approved it; then it is recorded as begun."""
        digest = hashlib.sha256(msgspec.json.encode([tool, given], order="sorted")).hexdigest()[:32]
        keys = (f"{tool[:60]} {digest} {number}" for number in count(1))
        self.taken.add(key := next(key for key in keys if key not in self.taken))
        question = ask_for_approval(key, tool, given, self.to)
        answer = self.answers.get(question.key) or await self._wait_for_answer(question)
        await self.job.step(CALL, lambda: key)
        self.begun.add(key)
        return "" if answer.accepted else describe_refusal(answer)

    async def _wait_for_answer(self, question: Question) -> Answer:
        """Ask under the lease; if nobody has answered for so long, let the session end."""
        asking: asyncio.Future[Answer] = asyncio.ensure_future(self.job.ask(
            question.key, question.message, schema=question.schema, to=self.to, keep_lease=True))
        asking.add_done_callback(take_error)
        try:
            done, _ = await asyncio.wait([asking], timeout=self.keep_lease)
        finally:
            asking.cancel()     # no effect if it has ended
        if not done:
            if not self.waits.done():
                self.question = question
                self.waits.set_result(None)
            await asyncio.Future()      # until the session is ended
        return asking.result()


def say(decision: str, reason: str = "") -> dict[str, Any]:
    """Return what a hook of Claude Code says of a call."""
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": decision,
                                   "permissionDecisionReason": reason}}
