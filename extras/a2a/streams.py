"""Streams: what happens to a task, read from its receipts.

They stand in one order, so every stream of a task has the same events, at each gate and after each restart.  A stream
begins with the whole task, and ends when the task ends or begins to ask: clients read one to its end.  One that began
with a message shows the task as it was behind that message, however much has happened since.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from asyncgate import speaker
from asyncgate.extras.a2a import calls, requests, view
from asyncgate.extras.a2a.calls import Visit
from asyncgate.extras.a2a.refusals import A2AError
from asyncgate.parts.faces.stream import CHECK_SECONDS
from asyncgate.parts.model import wire
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.process.readers import Seat, Wants

Event = dict[str, Any]
EVERYTHING = 2**31


class TaskStream:
    """Where one stream stands."""

    seen: view.Seen

    def __init__(self, visit: Visit, task_id: str, since: str | None = None, history: int | None = None) -> None:
        self.visit, self.task_id, self.since = visit, task_id, since     # `since`: the receipt of a message
        self.history, self.place = history, dict[str, str]()
        self.open: dict[str, wire.ReceiptRecord] = {}       # what the client is asked
        self.fence, self.chunks = 0, list[Any]()        # of the lease that is told of; what waits to be told
        self.offset, self.begun = 0, set[str]()      # artifacts of the output that are told of

    async def follow(self) -> AsyncIterator[Event | None]:
        """Yield events, and now and then None while the stream is quiet."""
        engine, caller, clock = self.visit.gate.engine, self.visit.caller, asyncio.get_running_loop().time
        with (engine.polls.place(caller.tenant_id, speaker(caller, wire.GetTask(task_id=self.task_id))),
              engine.readers.take_seat(caller.tenant_id, Wants(task_id=self.task_id)) as seat,
              engine.readers.take_seat(caller.tenant_id, Wants(output_of=self.task_id)) as output):
            seat.begin_look()
            output.begin_look()
            task, receipts, over = await self._begin()
            yield {"task": task}
            while not over and engine.longest_wait >= engine.settings.max_wait_seconds:     # else the gate stops
                receipts += await self.visit.read_receipts(self.task_id, self.place)
                await self._read_output()       # behind them: what a lease has given is there when its end is
                for receipt in receipts:
                    for event in self._tell_output():
                        yield event
                    events, over = await self._show(receipt)
                    for event in events:
                        yield event
                    if over:
                        return
                for event in self._tell_output():
                    yield event
                receipts = []
                await self._wait(seat, output, clock() + CHECK_SECONDS)
                seat.begin_look()
                output.begin_look()
                await engine.check_caller(caller)
                yield None

    async def _wait(self, seat: Seat, output: Seat, until: float) -> None:
        """Wait for a receipt, for output, or for a time."""
        calls = asyncio.ensure_future(asyncio.wait((seat.plan_look(), output.plan_look()),
                                                   return_when=asyncio.FIRST_COMPLETED))
        try:
            await self.visit.gate.engine.wait_for_call(calls, until)    # type: ignore[arg-type]  # of nothing
        finally:
            calls.cancel()

    async def _read_output(self) -> None:
        """Read the output that has come."""
        fresh = await self.visit.read_chunks(self.task_id, EVERYTHING, self.offset)
        self.chunks += fresh
        self.offset = fresh[-1].offset if fresh else self.offset

    def _tell_output(self) -> list[Event]:
        """Return the events of chunks of the leases that were told of; one of a later lease waits for its receipt."""
        events = list[Event]()
        while self.chunks and self.chunks[0].fence <= self.fence:
            chunk = self.chunks.pop(0)
            if (spoken := view.show_spoken(self.seen, chunk)) is not None:
                events.append(self._tell("statusUpdate", status=view.make_status("WORKING", chunk.at, spoken)))
                continue
            [artifact] = view.show_outputs([chunk])
            id, _, append = view.read_chunk(decode_json(bytes(chunk.chunk)))
            events.append(self._tell("artifactUpdate", artifact=artifact, append=append and id in self.begun))
            self.begun.add(id)
        return events

    async def _begin(self) -> tuple[Event, list[wire.ReceiptRecord], bool]:
        """Return the task as it was behind the message, the receipts behind that, and whether that is all to tell.

        Without a message it is the task behind the last receipt that was read, so that nothing is lost in between.
        """
        past = await self.visit.read_receipts(self.task_id, self.place)
        later, is_behind = list[wire.ReceiptRecord](), True
        while is_behind:
            self.seen = await self.visit.read(self.task_id)
            past += (receipts := await self.visit.read_receipts(self.task_id, self.place))
            is_behind = bool(receipts)
        await self._read_output()
        if (at := next((n for n, receipt in enumerate(past) if receipt.receipt_id == self.since), None)) is not None:
            past, later = past[:at + 1], past[at + 1:]
        for receipt in past:
            self._note(receipt)
        told = [chunk for chunk in self.chunks if at is None or chunk.fence <= self.fence]
        self.chunks, self.seen.chunks, outputs = self.chunks[len(told):], told, view.show_outputs(told)
        self.begun = {artifact["artifactId"] for artifact in outputs}
        task = view.show_task(self.seen, self.history)
        if at is None:
            return task, later, self.seen.state in view.ENDED_STATES
        task["artifacts"] = outputs
        task["status"] = view.follow_status(self.seen, past[-1], self.open.values())
        return task, later, asks(task["status"])

    def _note(self, receipt: wire.ReceiptRecord) -> None:
        """Note whose lease it is, and what the client is asked."""
        if receipt.receipt_type == "task.accepted":
            self.fence = max(self.fence, int(view.read_receipt_body(self.seen, receipt).get("fence", self.fence + 1)))
        if receipt.receipt_type == "input.requested":
            self.open[receipt.receipt_id] = receipt
        if receipt.receipt_type in ("input.answered", "input.expired"):
            for parent in receipt.parents:
                self.open.pop(parent, None)

    async def _show(self, receipt: wire.ReceiptRecord) -> tuple[list[Event], bool]:
        """Return the events of a receipt, and whether the stream ends with them."""
        self._note(receipt)
        body = view.read_receipt_body(self.seen, receipt)
        if not body or (receipt.receipt_type in view.MAY_END and not body.get("requeued")):
            self.seen = await self.visit.read(self.task_id)
            if receipt.receipt_type in view.MAY_END and self.seen.state in view.ENDED_STATES:
                artifacts = [self._tell("artifactUpdate", artifact=artifact, lastChunk=True)
                             for artifact in view.show_results(self.seen.record, bool(self.begun))]
                return [*artifacts, self._tell("statusUpdate", status=view.show_status(self.seen))], True
        if receipt.receipt_type not in view.GOES_ON | view.MAY_END or body.get("reason") == "task_ended":
            return [], False
        status = view.follow_status(self.seen, receipt, self.open.values())
        return [self._tell("statusUpdate", status=status)], asks(status)

    def _tell(self, kind: str, **members: Any) -> Event:
        return {kind: {"taskId": self.task_id, "contextId": self.seen.context_id, **members}}


def asks(status: Event) -> bool:
    """Whether a status asks the client."""
    return status["state"].removeprefix("TASK_STATE_") in view.ASKS


async def stream_message(visit: Visit, params: requests.Sending) -> AsyncIterator[Event | None]:
    """Take a message, and stream what becomes of it."""
    return TaskStream(visit, *await calls.take_message(visit, params), params.configuration.history_length).follow()


async def subscribe(visit: Visit, params: requests.OfTask) -> AsyncIterator[Event | None]:
    """Stream what happens to a task from now on."""
    seen = await visit.read(params.id)
    if seen.state in view.ENDED_STATES:
        raise A2AError("UNSUPPORTED_OPERATION", f"task {params.id} has ended; GetTask has its outcome",
                       taskId=params.id)
    return TaskStream(visit, params.id).follow()
