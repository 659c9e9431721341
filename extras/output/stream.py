"""`GET /v1/tasks/{task_id}/output` as server-sent events: the output of a task as it comes.

An event of type `output` is a chunk, one of type `log` a chunk of the log, one of type `state` a change of the task's
state; the `id` of all is the offset.  A client that comes back with it as Last-Event-ID goes on behind it, at any gate.
Behind the last entry of a task that has ended comes `end`, and the stream is closed; a client that comes back once more
gets 204, which ends an EventSource.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from msgspec import UNSET

from asyncgate import EVERYONE, Caller, Engine, Operation, speaker
from asyncgate.extras.output import wire_output
from asyncgate.parts.faces.http import read_query
from asyncgate.parts.faces.rest import Endpoint
from asyncgate.parts.faces.stream import CHECK_SECONDS, STREAM_HEADERS, ReceiptStream, write_line
from asyncgate.parts.faces.tickets import open_ticket
from asyncgate.parts.model import errors
from asyncgate.parts.model.connection import Receive, Scope, Send
from asyncgate.parts.process.readers import Wants

PATH = "/v1/tasks/{task_id}/output"


async def follow_output(engine: Engine, caller: Caller, ask: wire_output.FollowOutput) -> wire_output.Output:
    """Send the output of a task as server-sent events, until the task has ended."""
    raise NotImplementedError       # `OutputStream` answers: a stream is not a reply


FOLLOW = Operation(follow_output, f"GET {PATH}", EVERYONE, "tasks:read tasks:lease", "R")


class OutputStream(ReceiptStream):
    """The endpoint of the output of a task: a stream for those who accept one, else its two operations."""

    heads = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        streams = scope["method"] == "GET" and any(
            name == b"accept" and b"text/event-stream" in value.lower() for name, value in scope["headers"])
        if streams:
            return await super().__call__(scope, receive, send)
        await Endpoint.__call__(self, scope, receive, send)

    async def _open(self, scope: Scope, receive: Receive, send: Send, begun: list[bool]) -> None:
        engine, bound_to = self.gate.engine, None
        if ticket := read_query(scope["query_string"]).get("ticket"):
            caller, bound_to = open_ticket(engine, ticket)
            await self.gate.guard.admit(scope, caller, FOLLOW)
        else:
            caller = await self.gate.guard.resolve(scope, FOLLOW)
        ask = await self._ask(FOLLOW, caller, scope, receive)
        assert isinstance(ask, wire_output.FollowOutput)
        if bound_to not in (None, ask.task_id):
            raise errors.Forbidden("this ticket is good for the stream of another task")
        scope["asyncgate.ask"] = ask
        engine.check_request(FOLLOW, caller, ask)
        last = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"), "")
        if last:
            if not last.isdecimal() or len(last) > 10:
                raise errors.InvalidCursor("Last-Event-ID is not an offset; begin again without it")
            ask.after = int(last)
        with contextlib.ExitStack() as places:
            places.enter_context(engine.polls.place(caller.tenant_id, speaker(caller, ask)))
            seat = places.enter_context(engine.readers.take_seat(caller.tenant_id, Wants(output_of=ask.task_id)))
            await self._send_entries(caller, ask, seat, scope, send, begun)

    async def _send_entries(self, caller: Caller, ask: wire_output.FollowOutput, seat: Any, scope: Scope, send: Send,
                            begun: list[bool]) -> None:
        engine, clock, quiet_since = self.gate.engine, asyncio.get_running_loop().time, 0.0
        while engine.longest_wait >= engine.settings.max_wait_seconds:      # less: the gate is about to stop
            seat.begin_look()
            page: wire_output.Output = await engine.perform(
                self.gate.operations["read_output"], caller,
                wire_output.ReadOutput(task_id=ask.task_id, after=ask.after))
            if not begun and page.ended and not page.entries:
                begun.append(True)
                headers = self.gate.safety(scope, set())
                return await send({"type": "http.response.start", "status": 204, "headers": headers})
            if not begun:
                headers = [*STREAM_HEADERS, *self.gate.safety(scope, {name for name, _ in STREAM_HEADERS})]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun.append(True)
            ask.after = page.after
            events = b"".join(map(write_entry, page.entries)) + (b"event: end\ndata: {}\n\n" if page.ended else b"")
            if events or clock() - quiet_since >= CHECK_SECONDS:
                await send({"type": "http.response.body", "body": events or b":\n\n", "more_body": True})
                quiet_since = clock()
            if page.ended:
                return
            if not page.entries:
                await engine.wait_for_call(seat.plan_look(), quiet_since + CHECK_SECONDS)
            await engine.check_caller(caller)


def write_entry(entry: wire_output.EntryRecord) -> bytes:
    """Write one entry as an event."""
    kind = b"state" if entry.chunk is UNSET else b"log" if entry.stream == "log" else b"output"
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (entry.offset, kind, write_line(entry))
