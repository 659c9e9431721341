"""Progress of waiting calls: a client that names a progress token is told what the worker reports while it waits.

The SDK answers with JSON, and goes on to: the stream begins with the first notification, and the answer is its last
event.  A call that is answered before is answered like that of any other client.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from asyncgate.parts.faces.changes import Changes
from asyncgate.parts.faces.mcp.tasks import MOST_PROGRESS
from asyncgate.parts.faces.stream import STREAM_HEADERS
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.connection import AsgiMessage, Send
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.process.changes import Follower
from asyncgate.parts.process.readers import Wants

if TYPE_CHECKING:
    from asyncgate import Caller, Engine

FIRST_SIGN_SECONDS, SIGN_SECONDS = 1.0, 5.0     # before the first notification, and between two, if nothing changes
SIGN_PAUSE_SECONDS = 0.1    # between two notifications: each reads the task
LEAST_RISE = 0.001          # by which progress rises where the worker names no higher number
MOST_AMOUNT = 1e9           # of higher numbers a float would not rise by a step
AMOUNTS = ("progress", "done", "current", "completed", "percent")       # members of a report that say how far it is


class ProgressMeter:
    """Turns what a worker reports into the progress of MCP, which must rise with every notification."""

    def __init__(self) -> None:
        self.amount = -LEAST_RISE
        self.told: Any = None       # when the report was made that was told last

    def measure(self, report: Any, at: Any) -> dict[str, Any]:
        """Return progress, total and message for a worker's report of some time."""
        amount, total = read_amount(report)
        if amount is None and at != self.told:
            amount = math.floor(self.amount) + 1.0
        self.told = at
        return self.rise(describe_report(report), amount, total)

    def rise(self, message: str, amount: float | None = None, total: float | None = None) -> dict[str, Any]:
        """Return progress that is higher than before, by a step or as much as is named."""
        least = round(self.amount + LEAST_RISE, 3)
        self.amount = least if amount is None else max(amount, least)
        named = {} if total is None else {"total": max(total, self.amount)}
        return {"progress": self.amount, **named, "message": message[:MOST_PROGRESS]}


def read_amount(report: Any) -> tuple[float | None, float | None]:
    """Return how far a worker has come, and of how much, as far as its report says so in numbers."""
    if not isinstance(report, dict):
        return to_amount(report), None
    total, amounts = to_amount(report.get("total")), [to_amount(report.get(name)) for name in AMOUNTS]
    if total is None and amounts[-1] is not None:
        return amounts[-1], 100.0
    others = [to_amount(value) for name, value in report.items() if name != "total"] if total is not None else []
    return next((amount for amount in (*amounts, *others) if amount is not None), None), total


def to_amount(value: Any) -> float | None:
    """Return a number that progress can be counted in; None if a value is not such a number."""
    counts = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_AMOUNT
    return float(value) if counts else None


def describe_report(report: Any) -> str:
    """Return a worker's report as text: its own words if it has some, else its JSON without the checkpoint."""
    if isinstance(report, dict):
        words = next((report[name] for name in ("message", "progress") if isinstance(report.get(name), str)), None)
        report = words or {name: value for name, value in report.items() if name != "checkpoint"}
    return report if isinstance(report, str) else encode_json(report).decode()


class ProgressStream:
    """The answer to one waiting call, with what is told before it."""

    def __init__(self, engine: Engine, caller: Caller, token: str | int, send: Send) -> None:
        self.engine, self.caller, self.token, self._send = engine, caller, token, send
        self.meter, self.task_id = ProgressMeter(), ""
        self.follower = Follower(Wants(task_id=""), False)      # of no task yet
        self.places = contextlib.ExitStack()
        self.begun = self.answered = False
        self.turn = asyncio.Lock()      # to send: an answer must not come between two parts of a notification
        self.answer = b""

    def note_wait(self, task_id: str) -> None:
        """Follow the task whose end the call waits for."""
        self.task_id, self.follower.wants = task_id, Wants(task_id=task_id)
        if (changes := self.engine.find_extension(Changes)) is not None:
            self.places.enter_context(changes.follow(self.caller.tenant_id, self.follower))

    async def run(self, work: Awaitable[None]) -> None:
        """Await the work, which sends its answer by `send`; tell about progress meanwhile."""
        watch = asyncio.create_task(self._watch())
        try:
            await work
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self.places.close()

    async def send(self, message: AsgiMessage) -> None:
        """Send a part of the answer: as it is, or as the last event of a stream that has begun."""
        async with self.turn:
            self.answered = True
            if not self.begun:
                return await self._send(message)
            if message["type"] != "http.response.body":
                return      # status and headers went out with the first notification
            self.answer += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_event(self.answer, more=False)

    async def _watch(self) -> None:
        try:
            pause = FIRST_SIGN_SECONDS
            while not self.answered:
                await asyncio.wait([self.follower.call], timeout=pause)
                await self._tell()
                await asyncio.sleep(SIGN_PAUSE_SECONDS)
                pause = SIGN_SECONDS
        except errors.GateError:
            return      # the call itself tells it
        except Exception as bug:
            errors.log_fault("notifications/progress", bug)

    async def _tell(self) -> None:
        """Tell what there is to tell now, unless the task has ended: the answer says that."""
        self.follower.take()
        await self.engine.check_caller(self.caller)
        record = None
        if self.task_id:
            if (changes := self.engine.find_extension(Changes)) is not None:
                changes.followers.announce(self.caller.tenant_id)
            record = await self.engine.get_task(self.caller, wire.GetTask(task_id=self.task_id))
            if record.status in stored.TERMINAL:
                return
        async with self.turn:
            if self.answered:
                return
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            params = {"progressToken": self.token, **self._measure(record)}
            await self._send_event(
                encode_json({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}), more=True)

    def _measure(self, record: wire.TaskRecord | None) -> dict[str, Any]:
        if record is None:
            return self.meter.rise("waiting")
        report = decode_json(bytes(record.progress))
        if report is None or record.status == "queued":
            return self.meter.rise(f"waiting: {record.held or record.status}")
        return self.meter.measure(report, record.progress_at)

    async def _send_event(self, message: bytes, *, more: bool) -> None:
        line = message.replace(b"\n", b" ").replace(b"\r", b" ")
        await self._send({"type": "http.response.body", "body": b"event: message\ndata: %b\n\n" % line,
                          "more_body": more})
