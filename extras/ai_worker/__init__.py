"""An AI worker: it does tasks with a language model and MCP tools (`asyncgate worker --ai profile.yaml`).

Executor is the JobExecutor of the lease-to-receipt flow.  A job is a conversation.  In each step the model answers
and the worker carries out its tool calls, until the model ends the task or a limit ends it.  After each step the worker
saves the conversation in the gate, so that another worker can resume it; work since the last save may run twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from msgspec import to_builtins
from msgspec.structs import replace

from asyncgate.clients.worker.job import Done, Lost
from asyncgate.extras.ai_worker import model, talk, tools
from asyncgate.extras.ai_worker.profile import Profile, Secrets
from asyncgate.parts.model.connection import is_loopback

log = logging.getLogger("asyncgate.worker.ai")
Report = Callable[[dict[str, Any]], Awaitable[None]]
MOST_CALLS = 32             # the most tool calls in one answer; further calls get an error
LEAST_CHECKPOINT = 1000     # bytes; a smaller checkpoint keeps only the counts


class ReportTooLarge(Exception):
    """The gate refused progress of this size."""


class Executor:
    """Does jobs with one profile; all jobs share the model's connections and the MCP servers."""

    def __init__(self, profile: Profile, environ: Mapping[str, str] | None = None) -> None:
        self.profile = profile
        self.secrets = Secrets(profile, os.environ if environ is None else environ)
        self.sealing_key = self.secrets.sealing_key(profile)
        self.toolbox = tools.Toolbox(profile, self.secrets, taken=[talk.FINISH_NAME] if profile.finish_tool else [])

    async def __aenter__(self) -> Executor:
        import httpx2

        self._open = AsyncExitStack()
        self._open.push_async_callback(self.toolbox.close)
        here = is_loopback(urlsplit(self.profile.endpoint).hostname or "")
        http = await self._open.enter_async_context(httpx2.AsyncClient(timeout=None, trust_env=not here))
        self.model = model.Model(self.profile, self.secrets, http)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def execute(self, offer: talk.Offer, report: Report, is_cancelled: Callable[[], bool]) -> Done:
        """Do one task; raises JobFailed if it fails, Lost if it is no longer wanted.

        `report` sends progress.  `is_cancelled` is checked between steps.  To stop within a step, cancel the asyncio
        task: that aborts the request to the model, and cancels a running tool at its server.
        """
        try:
            done = await Conversation(self, offer, report, is_cancelled).run()
        except model.JobFailed as failed:
            failed.message = self.secrets.hidden(failed.message)
            failed.args = (failed.message,)
            log.warning("task %s: %s (%s)", offer.get("task_id"), failed.message, failed.code)
            raise
        content: dict[str, Any] = self.secrets.hidden(to_builtins(done))
        return Done(content["result"], artifacts=content["artifacts"], summary=content["result_summary"])


class Conversation:
    """The conversation that does one task."""

    def __init__(self, executor: Executor, offer: talk.Offer, report: Report, is_cancelled: Callable[[], bool]) -> None:
        self.executor, self.profile, self.limits = executor, executor.profile, executor.profile.limits
        self.offer, self.report, self.is_cancelled = offer, report, is_cancelled
        self.task_id, self.key = str(offer.get("task_id")), executor.sealing_key
        self.spent = talk.checkpoint_in(offer.get("progress"), self.profile, self.task_id, self.key)
        self.began = time.monotonic()
        self.checkpoint_bytes = self.limits.checkpoint_bytes
        self.tools: dict[str, tuple[tools.McpServer, tools.Tool]] = {}

    async def run(self) -> Done:
        """Run the conversation to its end."""
        first = talk.make_opening(self.profile, self.offer, self._earlier())
        if self.spent.steps:
            log.info("task %s: resuming after step %d", self.offer.get("task_id"), self.spent.steps)
        left = self.limits.seconds - self.spent.seconds
        try:
            async with asyncio.timeout(max(left, 0.0)) as limit:
                self.tools = await self.executor.toolbox.open()
                while True:
                    if done := await self._step(first):
                        return done
        except TimeoutError:
            if not limit.expired():
                raise
            why = f"the task was not done in {self.limits.seconds:g} s (limits.seconds)"
            raise model.JobFailed("time_limit", why) from None

    def _earlier(self) -> str:
        """Return another worker's checkpoint as text, if a worker of this profile did not seal it."""
        answer = talk.claimed_checkpoint(progress := self.offer.get("progress"))
        if answer is None or talk.is_genuine(progress, self.task_id, self.key):
            return ""
        log.warning("task %s: no worker of this profile sealed its checkpoint: the model sees it as data",
                    self.task_id)
        return talk.as_text(answer).encode()[:self.limits.tool_result_bytes].decode(errors="ignore")

    async def _step(self, first: list[model.ChatMessage]) -> Done | None:
        """Let the model answer once, carry out its tool calls, and report progress."""
        self._look()
        functions = [
            {"type": "function", "function": {"name": name, "description": tool.description, "parameters": tool.schema}}
            for name, (_, tool) in self.tools.items()]
        answer = await self.executor.model.ask([*first, *self.spent.messages],
                                               [*functions, *([talk.FINISH] if self.profile.finish_tool else [])])
        self.spent.steps += 1
        self.spent.tokens += answer.tokens
        if not answer.calls:
            return self._done(talk.read_ending(answer.text))
        told, ending = await self._carried_out(answer)
        if ending:
            return self._done(ending)
        self.spent.messages += [answer.message, *told]
        await self._tell(answer.calls)
        return None

    def _look(self) -> None:
        """Check whether another step is allowed."""
        if self.is_cancelled():
            raise Lost("canceled")
        if self.spent.steps >= self.limits.steps:
            raise model.JobFailed("step_limit", f"the task was not done in {self.limits.steps} steps (limits.steps)")
        if self.spent.tokens >= self.limits.tokens:
            raise model.JobFailed("token_limit", f"the task was not done with {self.limits.tokens} tokens "
                                           f"(limits.tokens; {self.spent.tokens} were used)")

    async def _carried_out(self, answer: model.ModelAnswer) -> tuple[list[model.ChatMessage], talk.Ending | None]:
        """Call the tools of an answer one after another; `finish` is valid only as the single call."""
        told, alone = [], len(answer.calls) == 1
        for at, call in enumerate(answer.calls):
            if self.is_cancelled():
                raise Lost("canceled")
            if self.profile.finish_tool and call.name == talk.FINISH_NAME:
                not_alone = tools.ToolResult("call finish alone, after all results", failed=True)
                result = self._finished(call) if alone else not_alone
                if isinstance(result, talk.Ending):
                    return [], result
                log.warning("task %s: the model's call of finish was refused: %s", self.task_id, result.text)
            else:
                too_many = tools.ToolResult(f"at most {MOST_CALLS} calls at once", failed=True)
                result = await self._called(call) if at < MOST_CALLS else too_many
            told.append({"role": "tool", "tool_call_id": call.id,
                         "content": f"error: {result.text}" if result.failed else result.text})
        return told, None

    def _finished(self, call: model.ToolRequest) -> talk.Ending | tools.ToolResult:
        try:
            return tools.ToolResult(call.wrong, True) if call.wrong else talk.read_finish_arguments(call.arguments,
                                                                                                    self.limits)
        except ValueError as wrong:
            return tools.ToolResult(str(wrong), failed=True)

    async def _called(self, call: model.ToolRequest) -> tools.ToolResult:
        """Call a tool; the model gets any error as the result."""
        if call.wrong:
            return tools.ToolResult(call.wrong, failed=True)
        if call.name not in self.tools:
            there_are = ", ".join(self.tools) or "none"
            return tools.ToolResult(f"there is no tool {call.name[:100]!r}; there are: {there_are}", failed=True)
        began = time.monotonic()
        told = await self.executor.toolbox.call(*self.tools[call.name], call.arguments)
        log.info("task %s, step %d: %s %s after %.1f s", self.offer.get("task_id"), self.spent.steps, call.name,
                 "failed" if told.failed else "answered", time.monotonic() - began)
        return told

    async def _tell(self, calls: list[model.ToolRequest]) -> None:
        """Report the step, with a checkpoint from which another worker can resume."""
        names = ", ".join(call.name[:100] for call in calls)
        report = {"status": "running",
                  "summary": f"step {self.spent.steps} of {self.limits.steps}: {names}"[:talk.SUMMARY],
                  "step": self.spent.steps, "tokens": self.spent.tokens}
        while True:
            try:
                spent = to_builtins(replace(
                    self.spent, seconds=round(self.spent.seconds + time.monotonic() - self.began, 3),
                    messages=talk.shrink_messages(self.spent.messages, self.checkpoint_bytes)))
                hidden = self.executor.secrets.hidden       # hide secrets before sealing: the seal covers every word
                checkpoint = talk.add_seal(hidden(spent), self.task_id, self.key)
                await self.report({**hidden(report), "checkpoint": checkpoint})
                return
            except ReportTooLarge:      # this gate's limit is lower than the profile's
                if not self.checkpoint_bytes:
                    return log.warning("task %s: the gate refuses its progress, whatever the size", self.task_id)
                self.checkpoint_bytes = self.checkpoint_bytes // 2 if self.checkpoint_bytes > LEAST_CHECKPOINT else 0

    def _done(self, ending: talk.Ending) -> Done:
        """Turn the end of a conversation into the task's result, or raise JobFailed."""
        summary = (ending.summary.strip() or talk.as_text(ending.result))[:talk.SUMMARY]
        if ending.outcome == "failed":
            raise model.JobFailed("gave_up", summary or "the model gave up")
        result = {"summary": summary, "result": ending.result, "model": self.profile.model,
                  "steps": self.spent.steps, "tokens": self.spent.tokens}
        if talk.count_json_bytes(result) + talk.count_json_bytes(ending.artifacts) > self.limits.result_bytes:
            raise model.JobFailed("result_too_large", f"the result is larger than {self.limits.result_bytes} bytes")
        return Done(result, artifacts=ending.artifacts or None, summary=summary)
