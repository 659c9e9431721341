"""Agents of smolagents: each answer of the model and each call of a tool is a step of the task.

    @worker.task("clerk")
    def clerk(prompt: str, job: Job) -> str:
        tools = [durable_tool(deploy, job, to="human:boss")]
        return str(ToolCallingAgent(tools, DurableModel(model, job), max_tool_threads=1).run(prompt))
"""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import msgspec
from smolagents import ChatMessage, Model, Tool
from smolagents.monitoring import TokenUsage

from asyncgate.clients.worker import Job
from asyncgate.extras.agents.approvals import REASON, ask_for_approval, describe_refusal


class DurableModel(Model):  # type: ignore[misc]
    """Asks another model, unless an earlier run of the task has its answer."""

    def __init__(self, model: Model, job: Job) -> None:
        super().__init__(model_id=model.model_id)
        self.model, self.job = model, job

    def generate(self, *given: Any, **named: Any) -> ChatMessage:
        """Return the answer of the model."""
        def think() -> Any:
            message = self.model.generate(*given, **named)
            return {"message": msgspec.json.decode(message.model_dump_json()),
                    "usage": message.token_usage and [message.token_usage.input_tokens,
                                                      message.token_usage.output_tokens]}
        told = self.job.step("model", think)
        return ChatMessage.from_dict(told["message"], token_usage=told["usage"] and TokenUsage(*told["usage"]))


def durable_tool(tool: Tool, job: Job, *, to: str | None = None) -> Tool:
    """Return a tool whose calls are steps; `to` names who has to approve each of them.

    Give the agent `max_tool_threads=1`, so that its calls come in the same order each time.
    """
    durable, numbers = copy.copy(tool), count(1)

    def call(*given: Any, **named: Any) -> Any:
        if to is not None:
            question = ask_for_approval(f"{tool.name} {next(numbers)}", tool.name, named or given, to)
            answer = job.ask(question.key, question.message, schema=REASON, to=to)
            if not answer.accepted:
                return describe_refusal(answer)
        return job.step(tool.name, tool.forward, *given, **named)
    durable.forward = call
    return durable
