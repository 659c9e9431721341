"""Agents of the OpenAI Agents SDK: each turn is a step, and approvals are asked at the gate.

    @worker.task("clerk")
    async def clerk(prompt: str, job: Job) -> str:
        return await run_agent(agent, prompt, job, to="human:boss")
"""

from __future__ import annotations

from itertools import count
from typing import Any

from agents import Agent, Runner, RunState

from asyncgate.clients.worker import Answer, Job
from asyncgate.extras.agents.approvals import ask_for_approval, describe_refusal


async def run_agent(agent: Agent[Any], prompt: Any, job: Job, *, to: str | None = None, **more: Any) -> Any:
    """Run an agent to its end; where it is interrupted for an approval, the task waits, and goes on in any process.

    What was done between two approvals is recorded, and not done again.  `more` is for `Runner.run`.
    """
    given: Any = prompt
    for number in count(1):
        async def advance(given: Any = given) -> dict[str, Any]:
            result = await Runner.run(agent, given, **more)
            state = result.to_state()
            return {"output": None if result.interruptions else result.final_output,
                    "state": state.to_string() if result.interruptions else None,
                    "calls": [[item.call_id, item.tool_name, item.arguments] for item in result.interruptions]}
        turn = await job.step(f"turn {number}", advance)
        if turn["state"] is None:
            return turn["output"]
        answers = await job.ask_all(*(ask_for_approval(id, tool, text, to) for id, tool, text in turn["calls"]))
        given = await resume(agent, turn["state"], answers)
    raise AssertionError("count never ends")


async def resume(agent: Agent[Any], text: str, answers: dict[str, Answer]) -> RunState[Any, Any]:
    """Return the state of a run with the answers in it."""
    state = await RunState.from_string(agent, text)
    for item in state.get_interruptions():
        answer = answers[f"approve {item.call_id}"]
        if answer.accepted:
            state.approve(item)
        else:
            state.reject(item, rejection_message=describe_refusal(answer))
    return state
