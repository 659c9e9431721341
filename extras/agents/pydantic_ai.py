"""A durable-execution engine for pydantic-ai: a task is the durable run, its steps are the journal.

    agent = Agent(model, name="clerk", capabilities=[AsyncGateDurability(), RequestInput(AskAtGate("human:boss"))])

    @worker.task("clerk")
    async def clerk(prompt: str, job: Job) -> str:
        with durable(job):
            return (await agent.run(prompt)).output
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import msgspec
from pydantic import TypeAdapter
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationId,
    ExternalEventError,
    ExternalEventWaiter,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    durable_unit_scope,
    external_event_scope,
)
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolDenied

from asyncgate.clients.worker import Answer, Job, Question
from asyncgate.extras.agents.approvals import ask_for_approval, describe_refusal

_job: ContextVar[Job | None] = ContextVar("asyncgate_job", default=None)
_questions: ContextVar[list[Question] | None] = ContextVar("asyncgate_questions", default=None)
_results = TypeAdapter(DeferredToolResults)


@contextmanager
def durable(job: Job) -> Iterator[None]:
    """Let the agents that run inside record their steps with a job, and wait by asking."""
    token = _job.set(job)
    try:
        with external_event_scope(Waiter(job)):
            yield
    finally:
        _job.reset(token)


class AskAtGate:
    """What RequestInput asks by: each pending call becomes a question at the gate, to its `to` or the task's owner."""

    def __init__(self, to: str | None = None) -> None:
        self.to = to

    async def __call__(self, ctx: Any, requests: DeferredToolRequests, token: str) -> None:
        """Note what is to be asked; the waiter asks it when this is recorded."""
        if (questions := _questions.get()) is None:
            raise RuntimeError("AskAtGate asks inside of durable(job)")
        questions += [ask_for_approval(call.tool_call_id, call.tool_name, call.args, self.to)
                      for call in requests.approvals]
        questions += [Question(key=f"result {call.tool_call_id}", message=f"What does {call.tool_name} give for "
                               f"{call.args}?", to=self.to) for call in requests.calls]


class Waiter(ExternalEventWaiter):
    """Waits by questions: the lease ends, and the task is offered again when all are answered."""

    def __init__(self, job: Job) -> None:
        self.job, self.number = job, 0

    async def wait(self, name: str, *, ask: Callable[[str], Awaitable[Any]],
                   timeout: timedelta | None) -> Any:  # noqa: ASYNC109  # the framework's
        """Hand over the token once, and return what was answered; the token is the task's id and a key.

        Without AskAtGate somebody else learns the token, and resolves it by answer_input with the payload as content.
        """
        self.number += 1
        key = f"{name} {self.number}"

        async def hand_over() -> dict[str, Any]:
            noted, asked = list[Question](), _questions.set(None)
            _questions.set(noted)
            try:
                with durable_unit_scope():
                    payload = await ask(f"{self.job.task_id} {key}")
            finally:
                _questions.reset(asked)
            return {"payload": payload, "questions": msgspec.to_builtins(noted)}
        handed = await self.job.step(f"ask {key}", hand_over)
        if handed["payload"] is not None:
            return handed["payload"]
        asked = msgspec.convert(handed["questions"], list[Question])
        seconds = None if timeout is None else timeout.total_seconds()
        questions = [msgspec.structs.replace(question, expires_in_seconds=seconds) for question in asked] or [
            Question(key=key, message=f"{name}: the answer to a token", expires_in_seconds=seconds)]
        answers: dict[str, Answer] = await self.job.ask_all(*questions)
        return to_results(answers) if asked else to_payload(answers[key])


def to_results(answers: dict[str, Answer]) -> Any:
    """Return the answers to pending calls as pydantic-ai takes them."""
    results = DeferredToolResults()
    for key, answer in answers.items():
        kind, _, call_id = key.partition(" ")
        if answer.action == "expired":
            raise ExternalEventError("nobody has answered in time")
        if kind == "approve":
            results.approvals[call_id] = True if answer.accepted else ToolDenied(describe_refusal(answer))
        else:
            results.calls[call_id] = answer.content if answer.accepted else describe_refusal(answer)
    return _results.dump_python(results, mode="json")


def to_payload(answer: Answer) -> Any:
    """Return what a token was resolved with."""
    if not answer.accepted:
        raise ExternalEventError(f"the question has ended: {answer.action}")
    return answer.content


class Backend(JournalCallableOperationBackend[Any]):
    """Runs each durable unit as a step."""

    async def execute(self, *, operation_id: DurableOperationId, name: str, body: Callable[[], Awaitable[Any]],
                      cache_key: Any, config: Any) -> Any:
        """Do a unit, or return what it gave before."""
        async def unit() -> Any:
            return await body()
        job = _job.get()
        return await (unit() if job is None else job.step(name, unit))


class AsyncGateDurability(BaseDurabilityCapability[Any]):
    """The capability of an agent that goes on after its worker was killed, inside of durable(job)."""

    engine_spec = DurabilityEngineSpec(
        engine_name="AsyncGate", durable_unit_noun="step", durable_container_noun="task", codec=JSON_CODEC,
        sequential_tools_in_durable_context=True)

    @property
    def in_durable_context(self) -> bool:
        """Whether a task runs the agent."""
        return _job.get() is not None

    def get_durable_operation_backend(self) -> Backend:
        """Return what runs the units."""
        return Backend(agent_name=self.name, default_model_id=self.default_model_id,
                       config=RoleBasedOperationConfig(model={}, event={}, capability={}, tool={}))
