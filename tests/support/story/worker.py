"""The worker of the story in the Python client: argv is its name and, as JSON, its options."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from asyncgate.clients import Done, Fail, Job, Park, Retry, SyncGate, Worker

NAMES = {"drainSeconds": "drain_seconds", "ttlSeconds": "ttl_seconds"}
name, options, diary = sys.argv[1:]
logging.disable()
told = {NAMES.get(key, key): value for key, value in json.loads(options).items()}
worker = Worker(worker_id=name, **{"ttl_seconds": 30, **told})


def note(*words: Any, value: Any = None) -> Any:
    """Leave a line; return a value."""
    with Path(diary).open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")
    return value


@worker.task("echo")
def echo(payload: Any) -> Any:
    return payload


@worker.task("stored")
def stored(payload: Any) -> Done:
    return Done({"pages": 3}, artifacts=[{"type": "file", "uri": "file:///x"}], summary="three pages")


@worker.task("fail")
def fail(payload: Any) -> None:
    raise Fail("no way", code="nope", detail={"page": 3})


@worker.task("error")
def error(payload: Any, job: Job) -> None:
    note("error", job.attempt)
    raise RuntimeError("broken")


@worker.task("second")
def second(payload: Any, job: Job) -> int:
    if job.attempt == 0:
        raise Retry("not yet", after=0.1, code="later")
    return int(job.attempt)


@worker.task("typed")
def typed(payload: date) -> int:
    return payload.day


@worker.task("infinite")
def infinite(payload: Any) -> float:
    return float("inf")


@worker.task("large")
def large(payload: Any, job: Job) -> None:
    job.save("x" * 100_000)


@worker.task("progress")
def progress(payload: Any, job: Job) -> None:
    job.report({"done": 0.5})
    job.save({"page": 3})
    job.flush()
    note("saved")
    job.lost.wait()
    note("lost", job.reason)


@worker.task("steps")
def steps(payload: Any, job: Job) -> list[Any]:
    first = job.step("first", lambda: note("first", value={"a": 1}))
    if job.attempt == 0:
        raise Retry("again", after=0)
    return [first, job.step("second", lambda: note("second"))]


@worker.task("mismatch")
def mismatch(payload: Any, job: Job) -> None:
    job.step(f"step {job.attempt}", lambda: 1)
    raise Retry("again", after=0)


@worker.task("park")
def park(payload: Any, job: Job) -> list[Any]:
    if job.checkpoint is None:
        raise Park(after=0.2, checkpoint={"seen": 1})
    return [job.checkpoint, job.attempt]


@worker.task("talk")
def talk(payload: Any, job: Job) -> str:
    job.print("thinking about", payload)
    text = "".join(job.stream(["a ", "fox"]))
    note("talks", payload)
    while payload == "on" and not Path(f"{diary}.go").exists():
        job.lost.wait(0.02)
    job.print("😀" * 9000)
    return text


@worker.task("family")
def family(numbers: Any, job: Job) -> Any:
    if job.children is not None:
        return sorted(job.children.values())
    with SyncGate(agent_id="ada") as gate:
        for number in numbers:
            gate.submit("echo" if number else "fail", number, key=f"{job.task_id} {number}", parent_task_id=job.task_id)
    raise Park(children="all")


@dataclass
class Page:
    number: int


@worker.task("declared")
def declared(page: Page) -> int:
    """Read a page."""
    return page.number


@worker.task("ask")
def ask(payload: Any, job: Job) -> list[Any]:
    answer = job.ask("go", "Go on?", to="human:boss")
    return [answer.action, answer.content]


@worker.task("slow")
async def slow(seconds: float) -> str:
    note("began")
    await asyncio.sleep(seconds)
    note("slept")
    return "slept"


@worker.task("crash")
async def crash(payload: Any, job: Job) -> list[Any]:
    done = await job.step("once", lambda: note("once", value="kept"))
    if job.checkpoint is None:
        job.save({"page": 7})
        await asyncio.to_thread(job.flush)
        note("ready")
        await asyncio.sleep(60)
    return [done, job.checkpoint, job.attempt, job.fence]


worker.run()
