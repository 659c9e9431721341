"""Workers that ask somebody: the lease ends with the question, and the function gets the answer when it runs again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients import Answer, Job, Question, Unanswered, Worker
from asyncgate.clients.http import AsyncHttp, Refusal
from tests.support import hasty
from tests.support.hasty import TOKEN, ended

pytestmark = pytest.mark.anyio
anyio_backend, gate = hasty.anyio_backend, hasty.gate
BOSS = {"principal_kind": "human", "principal_id": "boss"}
WINDOW = {"type": "object", "properties": {"window": {"enum": ["now", "tonight"]}}, "required": ["window"]}


@contextlib.asynccontextmanager
async def working(gate: AsyncHttp, function: Callable[..., Any], **more: Any) -> AsyncIterator[str]:
    """Run a worker with a function for one task, and name the task."""
    worker = Worker(gate.url, "w", token=TOKEN, state=None, ttl_seconds=2)
    worker.task("t")(function)
    made = await gate.call("create_task", type="t", payload=None, **{"max_attempts": 1, **more})
    serving = asyncio.create_task(worker.serve())
    try:
        yield made["task_id"]
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again until it is so."""
    while not await look():  # noqa: ASYNC110  # another program changes what is seen
        await asyncio.sleep(0.02)


async def asked(gate: AsyncHttp, *keys: str) -> None:
    """Wait until the boss is asked just these questions."""
    async def look() -> bool:
        owed = (await gate.call("list_open_obligations", **BOSS))["open_obligations"]
        return sorted(row["body"]["key"] for row in owed if row["receipt_type"] == "input.requested") == sorted(keys)
    await until(look)


async def answer(gate: AsyncHttp, task_id: str, key: str, action: str = "accept", **more: Any) -> dict[str, Any]:
    """Answer as the boss."""
    return dict(await gate.call("answer_input", **BOSS, task_id=task_id, key=key, action=action, **more))


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_a_function_that_asks_ends_and_gets_the_answer_when_it_runs_again(gate: AsyncHttp, plain: bool) -> None:
    runs, built = list[int](), list[str]()

    def build() -> str:
        built.append("7")
        return "version 7"

    async def work(payload: Any, job: Job) -> Any:
        runs.append(job.fence)
        version = await job.step("build", build)
        decision = await job.ask("deploy", f"Deploy {version}?", to="human:boss", schema=WINDOW, checkpoint={"at": 1})
        return [decision.accepted, decision.content, decision.by["id"], job.checkpoint]

    def work_plainly(payload: Any, job: Job) -> Any:
        runs.append(job.fence)
        version = job.step("build", build)
        decision = job.ask("deploy", f"Deploy {version}?", to="human:boss", schema=WINDOW, checkpoint={"at": 1})
        return [decision.accepted, decision.content, decision.by["id"], job.checkpoint]

    async with working(gate, work_plainly if plain else work) as task_id:
        await asked(gate, "deploy")
        waiting = await gate.call("get_task", task_id=task_id)
        given = await answer(gate, task_id, "deploy", content={"window": "tonight"})
        task = await ended(gate, task_id)

    assert (waiting["status"], waiting["held"], waiting["progress"]) == (
        "queued", "input_required", {"checkpoint": {"at": 1}})
    assert (task["status"], task["result"]["result"]) == (
        "succeeded", [True, {"window": "tonight"}, "boss", {"at": 1}])
    assert (task["attempt"], task["expiries"], runs, built) == (0, 0, [1, 2], ["7"])
    inputs = (await gate.call("list_inputs", task_id=task_id))["inputs"]
    assert [row["receipt_id"] for row in inputs] == [given["receipt_id"]]


async def test_the_end_of_the_run_that_has_asked_counts_for_nothing_whatever_the_function_does(gate: AsyncHttp) -> None:
    """A framework may catch everything, and go on."""
    async def work(payload: Any, job: Job) -> Any:
        try:
            return (await job.ask("deploy", "Deploy it?", to="human:boss")).action
        except Unanswered:
            return "swallowed"

    async with working(gate, work) as task_id:
        await asked(gate, "deploy")
        await answer(gate, task_id, "deploy", "decline")
        task = await ended(gate, task_id)

    assert (task["status"], task["result"]["result"]) == ("succeeded", "decline")


@pytest.mark.parametrize("keep", [False, True], ids=["without a lease", "with it"])
async def test_several_questions_are_open_at_once_and_all_answers_come_together(gate: AsyncHttp, keep: bool) -> None:
    runs = list[int]()

    def work(payload: Any, job: Job) -> Any:
        runs.append(job.fence)
        answers = job.ask_all(Question(key="a", message="A?", to={"kind": "human", "id": "boss"}),
                              Question(key="b", message="B?", to="human:boss"), keep_lease=keep)
        return {key: answer.content for key, answer in answers.items()}

    async with working(gate, work) as task_id:
        await asked(gate, "a", "b")
        await answer(gate, task_id, "b", content=2)
        await asked(gate, "a")
        waiting = await gate.call("get_task", task_id=task_id)
        await answer(gate, task_id, "a", content=1)
        task = await ended(gate, task_id)

    assert task["result"]["result"] == {"a": 1, "b": 2}
    assert [*task["result"]["result"]] == ["a", "b"]
    assert (waiting["held"], runs) == ((None, [1]) if keep else ("input_required", [1, 2]))


async def test_a_function_that_keeps_its_lease_waits_longer_than_the_lease_was_for(gate: AsyncHttp) -> None:
    async def work(payload: Any, job: Job) -> Any:
        return (await job.ask("deploy", "Deploy it?", to="human:boss", keep_lease=True)).content

    async def expiry() -> Any:
        return (await gate.call("list_leases", worker_id="w", resume=False))["leases"][0]["expires_at"]

    async def is_renewed(first: Any) -> bool:
        return bool(await expiry() > first)

    async with working(gate, work) as task_id:
        await asked(gate, "deploy")
        first = await expiry()
        await until(lambda: is_renewed(first))
        await answer(gate, task_id, "deploy", content="yes")
        task = await ended(gate, task_id)

    assert (task["result"]["result"], task["fence"], task["expiries"]) == ("yes", 1, 0)


async def test_a_lease_that_is_kept_for_some_time_is_given_back_then(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> Any:
        return job.ask("deploy", "Deploy it?", to="human:boss", keep_lease=0.2).content

    async def is_given_back() -> bool:
        return bool((await gate.call("get_task", task_id=task_id))["held"] == "input_required")

    async with working(gate, work) as task_id:
        await asked(gate, "deploy")
        await until(is_given_back)
        await answer(gate, task_id, "deploy", content="yes")
        task = await ended(gate, task_id)

    assert (task["result"]["result"], task["fence"], task["expiries"]) == ("yes", 2, 0)


async def test_a_question_that_nobody_has_answered_in_time_has_expired(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> Any:
        decision = job.ask("deploy", "Deploy it?", to="human:boss", expires_in_seconds=0.1)
        return [decision.action, decision.accepted, decision.content, decision.by]

    async with working(gate, work) as task_id:
        task = await ended(gate, task_id)

    assert task["result"]["result"] == ["expired", False, None, None]


async def test_another_question_under_the_same_key_does_not_get_the_answer_of_the_first(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> Any:
        return job.ask("deploy", f"Deploy version {job.fence}?", to="human:boss").content

    async with working(gate, work) as task_id:
        await asked(gate, "deploy")
        await answer(gate, task_id, "deploy", content="yes")
        task = await ended(gate, task_id)

    assert task["status"] == "failed"
    assert "deploy" in task["result"]["error"]["message"]


@pytest.mark.parametrize(("to", "error"), [("boss", "human:boss"), ("worker:w", "so it cannot answer")])
async def test_a_question_to_nobody_fails_the_attempt_with_the_reason(gate: AsyncHttp, to: str, error: str) -> None:
    def work(payload: Any, job: Job) -> Any:
        return job.ask("deploy", "Deploy it?", to=to)

    async with working(gate, work) as task_id:
        task = await ended(gate, task_id)

    assert task["status"] == "failed"
    assert error in task["result"]["error"]["message"]


async def test_two_questions_under_one_key_are_refused_at_the_call(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> Any:
        return job.ask_all(Question(key="a", message="A?"), Question(key="a", message="B?"))

    async with working(gate, work) as task_id:
        task = await ended(gate, task_id)

    assert task["result"]["error"]["code"] == "ValueError"
    with pytest.raises(Refusal, match="has not asked a"):
        await gate.call("answer_input", task_id=task_id, key="a", action="accept")


def test_an_answer_is_accepted_only_when_it_was_accepted() -> None:
    assert [Answer(action).accepted for action in ("accept", "decline", "cancel", "expired")] == [
        True, False, False, False]


CHILD = """
import os, pathlib, sys
from asyncgate.clients import Worker
from asyncgate.clients.worker.job import Job
out = pathlib.Path(sys.argv[2])
worker = Worker(sys.argv[1], "w", token=sys.argv[3], state=None, ttl_seconds=1)
call = Job.call

def killed(job, operation, **fields):
    reply = call(job, operation, **fields)
    if job.fence == 1:
        os.kill(os.getpid(), 9)         # the question is stored, and its worker has not heard of it
    return reply

Job.call = killed

@worker.task("t")
def work(payload, job):
    built = job.step("build", lambda: out.write_text(out.read_text() + "b"))
    return job.ask("deploy", "Deploy it?", to="human:boss").content

worker.run()
"""


async def test_a_worker_that_is_killed_when_it_has_asked_loses_neither_question_nor_answer(
        gate: AsyncHttp, tmp_path: Path) -> None:
    made, out = await gate.call("create_task", type="t", payload=None), tmp_path / "done"
    out.write_text("")

    def child() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, gate.url, str(out), TOKEN], env={**os.environ})

    with child() as first:
        assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    await asked(gate, "deploy")
    await answer(gate, made["task_id"], "deploy", content="yes")
    with child() as second:
        try:
            task = await ended(gate, made["task_id"])
        finally:
            second.terminate()

    assert (task["result"]["result"], out.read_text(), task["attempt"], task["expiries"]) == ("yes", "b", 0, 0)
