"""`GET /v1/receipts/stream`: the receipts of a reader as server-sent events, for consoles and agents that listen.

An event of type `receipt` is one receipt, and its `id` is the reader's place: a client that sends it back as
`Last-Event-ID` goes on behind it, so every receipt comes exactly once, also across a reconnect.  The stream pulls
pages as fast as its client takes them; nothing piles up for a slow one.  It stands beside the table: a tool or a
command cannot hold a stream.

Events of other types are changes that have no receipt.  They have no `id`, come while they happen, and never again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Struct

from asyncgate import Caller, Engine, Operation, speaker
from asyncgate.parts.faces.changes import ChangeRecord, Changes, show_change
from asyncgate.parts.faces.http import read_query, run_while_connected
from asyncgate.parts.faces.rest import Endpoint
from asyncgate.parts.faces.tickets import open_ticket
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.connection import Receive, Scope, Send
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.examples import ASSIGNED
from asyncgate.parts.model.ids import first_id
from asyncgate.parts.model.news import Change
from asyncgate.parts.process.changes import Follower

if TYPE_CHECKING:
    from asyncgate.parts.process.readers import Seat

CHECK_SECONDS = 5.0         # between checks of the credential, and between comments that keep a quiet stream open
NOT_OF_A_PAGE = ("since_receipt_id", "created_after", "ticket")
EVENTS_AT_ONCE = 50         # receipts that are read at once, and so held for a slow client
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class FollowReceipts(wire.AsEither, kw_only=True):
    """Follow receipts as they come."""

    acts: ClassVar[bool] = False
    filters: ClassVar[bool] = True
    refusals = (errors.TaskNotFound,)
    example = ({"to_id": "ada"}, {"receipt": ASSIGNED})
    to_kind: Annotated[wire.Kind | None, wire.says("kind of to_id; default: any")] = None
    to_id: Annotated[wire.Name | None, wire.says("id of the recipient")] = None
    task_id: wire.Name | None = None
    receipt_type: wire.Name | None = None
    since_receipt_id: Annotated[wire.Cursor | None,
                                wire.says("where to begin; the header Last-Event-ID wins over it")] = None
    created_after: Annotated[
        wire.Moment | None, wire.says("where to begin if nothing else says it: receipts created then or later")] = None

    ticket: Annotated[str | None, wire.says("instead of a credential, for the stream of one task in a browser")] = None

    def make_page_ask(self, after: str | None, limit: int) -> wire.ListReceipts:
        """Return the request for the page behind a place."""
        same = {name: getattr(self, name) for name in self.__struct_fields__ if name not in NOT_OF_A_PAGE}
        return wire.ListReceipts(**same, since_receipt_id=after, limit=limit)


class ReceiptEvent(Struct, omit_defaults=True):
    """Server-sent events: the data of one of type `receipt` is a receipt, and its id is the place behind it.

    Other types say a change: it has no receipt and no id, and is not sent again to a client that comes back.
    """

    media: ClassVar[str] = "text/event-stream"
    receipt: wire.ReceiptRecord
    change: ChangeRecord | None = None


async def stream_receipts(engine: Engine, caller: Caller, ask: FollowReceipts) -> ReceiptEvent:
    """Send each receipt as a server-sent event as soon as it is there, and go on until the client leaves.

    The receipts are those that list_receipts shows.  A client that comes back with Last-Event-ID misses none and gets
    none twice.  Without receipt_type, changes that have no receipt come beside them, such as progress and holds; those
    are not sent again.  Comments keep a quiet stream open.  The stream ends when the credential is no longer valid, or
    when the gate stops.
    """
    raise NotImplementedError       # `ReceiptStream` answers: a stream is not a reply


STREAM = Operation(stream_receipts, "GET /v1/receipts/stream", "a w A", "receipts:read", "R")


class ReceiptStream(Endpoint):
    """The endpoint of the stream."""

    heads = False       # it has no end, so nobody can tell what its headers would be

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send receipts until the client goes, its credential ends, or the gate stops."""
        if scope["method"] != "GET":
            return await super().__call__(scope, receive, send)     # which refuses it
        begun: list[bool] = []
        try:
            await run_while_connected(self._open(scope, receive, send, begun), receive)
        except asyncio.CancelledError:
            return      # the client has disconnected
        except errors.GateError as refusal:
            if not begun:
                self.gate.guard.refused(scope, refusal, scope.get("asyncgate.ask"))
                more = self.gate.describe_refusal(scope, refusal)
                return await self.gate.send(send, scope, refusal.status, encode_json(refusal.body()), more)
        except Exception as bug:
            body = encode_json(errors.log_fault(scope["path"], bug).body())
            if not begun:
                return await self.gate.send(send, scope, 500, body)
        await send({"type": "http.response.body", "body": b""})

    async def _open(self, scope: Scope, receive: Receive, send: Send, begun: list[bool]) -> None:
        engine, task_id = self.gate.engine, None
        if ticket := read_query(scope["query_string"]).get("ticket"):
            caller, task_id = open_ticket(engine, ticket)
            await self.gate.guard.admit(scope, caller, STREAM)
        else:
            caller = await self.gate.guard.resolve(scope, STREAM)
        ask = await self._ask(STREAM, caller, scope, receive)
        assert isinstance(ask, FollowReceipts)
        ask.task_id, ask.ticket = task_id or ask.task_id, None
        scope["asyncgate.ask"] = ask
        engine.check_request(STREAM, caller, ask)
        last = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"), None)
        wants = await engine.find_wants(caller, ask.make_page_ask(None, 1))
        changes, follower = engine.find_extension(Changes), None
        with contextlib.ExitStack() as places:
            places.enter_context(engine.polls.place(caller.tenant_id, speaker(caller, ask)))
            seat = places.enter_context(engine.readers.take_seat(caller.tenant_id, wants))
            begin = last or ask.since_receipt_id or await self._find_beginning(caller, ask)
            if changes is not None and ask.receipt_type is None:
                follower = Follower(wants, caller.sees_all and wants.to is None and wants.task_id is None)
                places.enter_context(changes.follow(caller.tenant_id, follower))
            following = Following(self, caller, ask, begin, changes, follower)
            await self._follow(following, seat, scope, send, begun)

    async def _find_beginning(self, caller: Caller, ask: FollowReceipts) -> str | None:
        """Return the place before the first receipt of a time, or None for the very first one."""
        engine, page = self.gate.engine, ask.make_page_ask(None, 1)
        if (moment := instant(ask.created_after)) is None:
            return None
        if engine.settings.receipt_mode != "standalone":
            raise errors.InvalidRequest(
                "created_after: the receipts of this gate are in a ledger, which orders them by "
                "arrival; begin with since_receipt_id, or leave both out for the first receipt")
        to = await engine.choose_inbox(caller, page)
        return engine.seal_cursor(caller, first_id(moment), "receipts", to, page.task_id, page.receipt_type)

    async def _follow(self, following: Following, seat: Seat, scope: Scope, send: Send, begun: list[bool]) -> None:
        engine, clock, quiet_since = self.gate.engine, asyncio.get_running_loop().time, 0.0
        while engine.longest_wait >= engine.settings.max_wait_seconds:      # less: the gate is about to stop
            seat.begin_look()
            events, more = await following.read_events()
            if not begun:       # after the first page: what refuses it is an ordinary answer
                headers = [*STREAM_HEADERS, *self.gate.safety(scope, {name for name, _ in STREAM_HEADERS})]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun.append(True)
            if events or clock() - quiet_since >= CHECK_SECONDS:
                await send({"type": "http.response.body", "body": events or b":\n\n", "more_body": True})
                quiet_since = clock()
            await self._send_changes(following, send)
            if not more:
                await self._idle(following, seat, quiet_since + CHECK_SECONDS, send)
            await engine.check_caller(following.caller)

    async def _idle(self, following: Following, seat: Seat, until: float, send: Send) -> None:
        """Wait until a receipt may have come, or for a while; send changes meanwhile, without a look at receipts."""
        call: asyncio.Future[Any] = asyncio.ensure_future(self.gate.engine.wait_for_call(seat.plan_look(), until))
        try:
            while not call.done():
                await asyncio.wait((call, *following.list_calls()), return_when=asyncio.FIRST_COMPLETED)
                await self._send_changes(following, send)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _send_changes(self, following: Following, send: Send) -> None:
        if changes := following.take_changes():
            await self.gate.engine.check_caller(following.caller)
            await send({"type": "http.response.body", "body": changes, "more_body": True})


class Following:
    """Where one stream stands."""

    def __init__(self, stream: ReceiptStream, caller: Caller, ask: FollowReceipts, after: str | None,
                 changes: Changes | None, follower: Follower | None) -> None:
        self.gate, self.caller, self.ask, self.after = stream.gate, caller, ask, after
        self.changes, self.follower = changes, follower     # None: it follows receipts alone
        # In a ledger only a sealed cursor names a place among the receipts of others, and a page has one.
        self.alone = stream.gate.settings.receipt_mode == "standalone"

    def list_calls(self) -> list[asyncio.Future[None]]:
        """Return what is called when a change has come."""
        return [self.follower.call] if self.follower else []

    def take_changes(self) -> bytes:
        """Return the events of the changes that wait."""
        if self.follower is None or self.changes is None:
            return b""
        self.changes.followers.announce(self.caller.tenant_id)
        return b"".join(map(write_change, self.follower.take())) if self.follower.call.done() else b""

    async def read_events(self) -> tuple[bytes, bool]:
        """Return the events of the next page, and whether more wait behind it."""
        ask = self.ask.make_page_ask(self.after, EVENTS_AT_ONCE if self.alone else 1)
        page: Any = await self.gate.engine.perform(self.gate.operations["list_receipts"], self.caller, ask)
        places = [row.receipt_id for row in page.receipts] if self.alone else [page.cursor]
        self.after = places[-1] if page.receipts else self.after
        events = [b"id: %b\nevent: receipt\ndata: %b\n\n" % (place.encode(), write_line(row))
                  for place, row in zip(places, page.receipts, strict=False)]
        return b"".join(events), page.next_cursor is not None


def write_change(change: Change) -> bytes:
    """Write one change; without an id, so that a client comes back to its last receipt."""
    return b"event: %b\ndata: %b\n\n" % (change.change.encode(), write_line(show_change(change)))


def write_line(shown: Struct) -> bytes:
    """Write JSON on one line; line ends within it are blanks."""
    return encode_json(shown).replace(b"\n", b" ").replace(b"\r", b" ")
