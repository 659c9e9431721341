"""The steps of a task: what is done already is taken from the gate, in the same order, and not done again."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from asyncgate.clients import http
from asyncgate.clients.finite import to_json_value
from asyncgate.clients.values import make_reader
from asyncgate.clients.worker.heart import GONE, is_temporary

if TYPE_CHECKING:
    from asyncgate.clients.worker.job import Job

FINAL = ("quota_exceeded", "self_answer")       # what no later call changes, whatever the status says
PAUSE_SECONDS = 0.5     # after which an unreachable gate is asked again, twice as long each time


class StepMismatch(Exception):
    """The next step of a function is not the one that an earlier run recorded under its number."""


class StepsLost(StepMismatch):
    """What an earlier run recorded is not there any more, because the gate was rebuilt from its receipts."""


class TooLarge(ValueError):
    """A checkpoint, a report or the value of a step is larger than the gate takes."""


class Recorder:
    """The connection over which the functions of one worker record their steps; it is opened for the first step."""

    def __init__(self, url: str, token: str, me: dict[str, Any]) -> None:
        self.url, self.token, self.me = url, token, me
        self.lock, self.gate = threading.Lock(), None

    gate: http.Http | None

    def open(self) -> http.Http:
        """Return the connection; any thread may use it."""
        with self.lock:
            if self.gate is None:
                self.gate = http.Http(self.url, self.token).__enter__()
            return self.gate

    def close(self) -> None:
        """Close the connection, if it was opened."""
        with self.lock:
            if self.gate is not None:
                self.gate.__exit__(None, None, None)
                self.gate = None


class Journal:
    """The recorded steps of one task, read when its function comes to the first step."""

    def __init__(self, job: Job, recorder: Recorder, recorded: int, *, lost: bool) -> None:
        self.job, self.recorder, self.numbers, self.lost = job, recorder, count(1), lost
        self.known: dict[int, tuple[str, Any]] | None = None if recorded else {}
        self.lock = threading.Lock()

    def step(self, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Do a step or replay it: at once, or inside a running loop when what this returns is awaited."""
        seq, read, do = next(self.numbers), reader_of(function), functools.partial(function, *given, **named)
        return self._run_async(seq, name, do, read) if is_in_loop() else self._run(seq, name, do, read)

    def _run(self, seq: int, name: str, do: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        if self.find(seq, name):
            return read(self.values()[seq][1])
        value = do()
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"step {name!r} is an async function: await job.step in an async task function")
        return read(self.record(seq, name, value))

    async def _run_async(self, seq: int, name: str, do: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        if await asyncio.to_thread(self.find, seq, name):
            return read(self.values()[seq][1])
        value = do()
        if inspect.isawaitable(value):
            value = await value
        return read(await asyncio.to_thread(self.record, seq, name, value))

    def find(self, seq: int, name: str) -> bool:
        """Whether a step was recorded; raises StepMismatch if that was another one."""
        self.job.check()
        recorded = self.values().get(seq)
        if recorded is not None and recorded[0] != name:
            raise StepMismatch(f"step {seq} of {self.job} was recorded as {recorded[0]!r}, and is {name!r} now: a "
                               "function takes its steps in the same order each time; let the code that began such "
                               "tasks end them, or cancel them")
        return recorded is not None

    def values(self) -> dict[int, tuple[str, Any]]:
        """Return the recorded steps by number, each with its name and value."""
        if self.lost:
            raise StepsLost(f"what an earlier run of {self.job} recorded is lost, because the gate was rebuilt from "
                            "its receipts: check what is done, and create a new task for the rest")
        with self.lock:
            if self.known is None:
                pages = self.insist(lambda gate: [*gate.pages(
                    "list_steps", **self.recorder.me, task_id=self.job.task_id)])
                self.known = {step["seq"]: (step["name"], step["value"]) for page in pages for step in page["steps"]}
            return self.known

    def recall(self) -> list[tuple[str, Any]]:
        """Return all recorded steps, and go on behind them."""
        self.job.check()
        known = self.values()
        self.numbers = count(max(known, default=0) + 1)
        return [known[seq] for seq in sorted(known)]

    def record(self, seq: int, name: str, value: Any) -> Any:
        """Record what a step gave; return it, or what was recorded first."""
        value = to_json_value(value, f"step {name}")
        reply = self.insist(lambda gate: gate.call("record_step", **self.recorder.me, **self.job.under, seq=seq,
                                                    name=name, value=value), f"what step {name} gave")
        return reply["value"] if reply.get("replayed") else value

    def insist(self, call: Callable[[http.Http], Any], what: str = "the request") -> Any:
        """Call until the gate answers, or the lease is lost."""
        for failures in count(1):
            self.job.check()
            try:
                return call(self.recorder.open())
            except http.Unreachable:
                pause = http.pause_after(failures, PAUSE_SECONDS)
            except http.Refusal as refusal:
                if refusal.code == GONE:
                    self.job.lose(str(refusal.more.get("reason", "unknown")))
                elif refusal.code == "step_conflict":
                    raise StepMismatch(str(refusal)) from None
                elif refusal.status == 413:
                    raise TooLarge(f"{what} is too large for the gate ({refusal}): keep it elsewhere, and give its "
                                   "address instead") from None
                elif not is_temporary(refusal) or refusal.code in FINAL:
                    raise
                pause = max(http.pause_after(failures, PAUSE_SECONDS), refusal.retry_after or 0.0)
            self.job.lost.wait(pause)
        raise AssertionError("count never ends")


def is_in_loop() -> bool:
    """Whether the caller is async code, which awaits what it gets."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def reader_of(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what makes a JSON value what a function is declared to return; raises TypeError if none can be that."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        declared = get_type_hints(inspect.unwrap(function), include_extras=True).get("return", Any)
    except (NameError, TypeError, AttributeError):      # an annotation that cannot be resolved here, or no function
        return make_reader(Any)
    while inspect.isclass(origin := get_origin(declared)) and issubclass(origin, Awaitable):
        declared = get_args(declared)[-1]
    return make_reader(declared)
