"""Graphs of LangGraph: checkpoints are steps of the task, and `interrupt()` asks at the gate.

    @worker.task("clerk")
    async def clerk(given: dict, job: Job) -> dict:
        graph = builder.compile(checkpointer=await open_saver(job))
        return await run_graph(graph, given, job, to="human:boss")
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from asyncgate.clients.finite import to_json_value
from asyncgate.clients.worker import Answer, Job, Question
from asyncgate.extras.agents.approvals import REASON, ask_for_approval, describe_refusal


class StepSaver(InMemorySaver):
    """Keeps checkpoints in memory, and each as a step of the task; a later run reads them from there."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """Record a checkpoint."""
        given = (config, checkpoint, metadata, new_versions)
        await self.job.step("checkpoint", self._write, given)
        return InMemorySaver.put(self, *given)

    async def aput_writes(self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str,
                          task_path: str = "") -> None:
        """Record what a node has written."""
        given = (config, list(writes), task_id, task_path)
        await self.job.step("writes", self._write, given)
        InMemorySaver.put_writes(self, *given)

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """Record a checkpoint, of a graph that is not run by `ainvoke`."""
        given = (config, checkpoint, metadata, new_versions)
        self.job.step("checkpoint", self._write, given)
        return super().put(*given)

    def put_writes(self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        """Record what a node has written, of a graph that is not run by `ainvoke`."""
        given = (config, list(writes), task_id, task_path)
        self.job.step("writes", self._write, given)
        super().put_writes(*given)

    def take(self, name: str, value: Any) -> None:
        """Take back what an earlier run has recorded."""
        config, *given = self._read(value)
        if name == "checkpoint":
            InMemorySaver.put(self, config, *given)
        else:
            InMemorySaver.put_writes(self, config, *given)

    def _write(self, given: tuple[Any, ...]) -> list[str]:
        config, *rest = given
        kind, text = self.serde.dumps_typed([{"configurable": {
            name: value for name, value in config["configurable"].items() if not name.startswith("__")}}, *rest])
        return [kind, base64.b64encode(text).decode()]

    def _read(self, value: list[str]) -> Any:
        return self.serde.loads_typed((value[0], base64.b64decode(value[1])))


async def open_saver(job: Job) -> StepSaver:
    """Return the checkpointer of a task, with what earlier runs have recorded."""
    saver = StepSaver(job)
    for name, value in await job.recall():
        saver.take(name, value)
    return saver


async def run_graph(graph: Any, given: Any, job: Job, *, to: str | None = None) -> Any:
    """Run a graph to its end; where it interrupts itself, the task waits, and goes on in any process.

    `interrupt(value)` asks the value: a text, or an object with `message` and `schema`.  It returns an object with the
    `action` of the answer and its `content`.  A node interrupts itself once.  What LangChain's middleware for people in
    the loop wants to have approved is one question, and its answer the decision about all of it.
    """
    config = {"configurable": {"thread_id": job.task_id}}
    state = await graph.aget_state(config)
    while not (state.created_at and not state.next):
        command = None if state.created_at else given
        if state.interrupts:
            questions = {interrupt.id: ask_interrupt(interrupt, to) for interrupt in state.interrupts}
            answers = await job.ask_all(*questions.values())
            command = Command(resume={interrupt.id: tell_answer(interrupt, answers[questions[interrupt.id].key])
                                      for interrupt in state.interrupts})
        await graph.ainvoke(command, config, durability="sync")
        state = await graph.aget_state(config)
    return state.values


def ask_interrupt(interrupt: Any, to: str | None) -> Question:
    """Return the question of an interrupt; what it asks is a part of its key."""
    value = interrupt.value if isinstance(interrupt.value, dict) else {"message": interrupt.value}
    text = msgspec.json.encode(to_json_value(interrupt.value, "interrupt"), order="sorted")
    message = value["message"] if isinstance(value.get("message"), str) else text.decode()
    if requests := list_requests(value):
        message = "; ".join(ask_for_approval("", call["name"], call["args"], to).message for call in requests)
    return Question(key=f"{interrupt.id} {hashlib.sha256(text).hexdigest()[:16]}", message=message,
                    schema=REASON if requests else value.get("schema"), to=to)


def tell_answer(interrupt: Any, answer: Answer) -> dict[str, Any]:
    """Return what an interrupt is resumed with."""
    if not (requests := list_requests(interrupt.value)):
        return {"action": answer.action, "content": answer.content}
    decision = {"type": "approve"} if answer.accepted else {"type": "reject", "message": describe_refusal(answer)}
    return {"decisions": [decision] * len(requests)}


def list_requests(value: Any) -> list[Any]:
    """Return the calls that LangChain's middleware wants to have approved; empty if this is another interrupt."""
    return list(value.get("action_requests", ())) if isinstance(value, dict) else []
