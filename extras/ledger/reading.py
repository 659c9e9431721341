"""Reads in integrated mode: an agent gets the same answers as in standalone mode (spec 20.8).

The gate stores skeletons of its own receipts: their order and addressees, without bodies.  The bodies are in the outbox
until the ledger has them, and then in the ledger.  After a gate's own receipts, lists show the receipts that others
stated in the same ledger.  If the ledger is unreadable, bodies and the receipts of others are missing from an answer,
but the gate still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from asyncgate import TERMINATES, Caller, Engine, Extension
from asyncgate.extras.ledger.routing import Routes
from asyncgate.extras.ledger.sinks import Filed, Garbled, Outage
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.receipts.ledger_marks import ADOPTED_PREFIX, STATED_PREFIX, UNDONE_PREFIX

if TYPE_CHECKING:
    from asyncgate import Instead
    from asyncgate.extras.ledger.outbox import Breaker
    from asyncgate.extras.ledger.sinks import Sink

T = TypeVar("T")
BODIES_PER_READ, MOST_READS = 200, 5        # one call reads at most 5 pages of 200 receipts that others stated
BODIES_BYTES = 8 * 2**20    # size of the cache of bodies
SHELF_BYTES, SHELVES_BYTES = 2**20, 8 * 2**20       # size of the cache of others' receipts: of one inbox, and of all
ANY_SIZE = 2**62
ROW_BYTES = 1000            # about the size of a receipt without its body
UNREADABLE = ("the receipt ledger cannot be read: this answer lacks the bodies stored there and the receipts that "
              "others stated")
MISSING = "the receipt ledger does not have {} of these receipts: `asyncgate reconcile` names them"


class Shelf(Struct):
    """A cache of the receipts that others stated to one principal or about one task, as far as the ledger was read."""

    after: str | None = None
    rows: dict[str, wire.ReceiptRecord] = field(default_factory=dict)       # in the order of arrival
    closed: set[str] = field(default_factory=set)      # ids of the discharged obligations among the rows
    size: int = ROW_BYTES
    most: int = SHELF_BYTES
    cut: bool = False       # the oldest rows were dropped; a reader behind the rest reads the ledger itself
    # When a row arrived, by the gate's own receipts that arrived before and after it: their times are by one clock.
    since: dict[str, datetime] = field(default_factory=dict)
    until: dict[str, datetime] = field(default_factory=dict)
    last_own: datetime | None = None
    latest: list[str] = field(default_factory=list)     # rows since the gate's last own receipt

    def pass_own(self, created_at: datetime) -> None:
        """Note that a receipt of the gate itself comes next in the order of arrival."""
        self.last_own = max(created_at, self.last_own or created_at)
        self.until.update(dict.fromkeys((id for id in self.latest if id in self.rows), self.last_own))
        self.latest.clear()

    def place(self, receipt: wire.ReceiptRecord) -> tuple[datetime, int]:
        """Return by what a receipt is sorted among the gate's own: its time, within the limits of its arrival.

        Its author may have any clock.  By that alone one receipt from the future would stand above all others for
        ever, and one from a slow clock would never be seen.
        """
        since, until = self.since.get(receipt.receipt_id), self.until.get(receipt.receipt_id)
        if until is not None and receipt.created_at >= until:
            return until, -1
        return (since, 1) if since is not None and receipt.created_at <= since else (receipt.created_at, 0)

    def add(self, receipt: wire.ReceiptRecord) -> None:
        """Append a receipt; drop the oldest rows if the cache is too large."""
        self.rows[receipt.receipt_id] = receipt
        self.latest.append(receipt.receipt_id)
        if self.last_own is not None:
            self.since[receipt.receipt_id] = self.last_own
        self.size += receipt_weight(receipt)
        while self.size > self.most and len(self.rows) > 1:
            oldest = self.rows.pop(next(iter(self.rows)))
            self.size, self.cut = self.size - receipt_weight(oldest), True
            self.closed.discard(oldest.receipt_id)
            self.since.pop(oldest.receipt_id, None)
            self.until.pop(oldest.receipt_id, None)
        if len(self.latest) > 2 * len(self.rows):       # most of them were dropped
            self.latest = [id for id in self.latest if id in self.rows]


Where = tuple[str, wire.Principal | None, str | None]       # tenant, inbox, task


class Reading(Extension):
    """Replaces the operations that read receipts, while a ledger holds the bodies of receipts."""

    def __init__(self, engine: Engine, sink: Sink, breaker: Breaker, routes: Routes | None = None) -> None:
        self.engine, self.sink, self.breaker, self.routes = engine, sink, breaker, routes
        self.bodies: OrderedDict[tuple[str, str], Raw] = OrderedDict()
        self.bodies_size = 0
        self.shelves: OrderedDict[Where, Shelf] = OrderedDict()
        self.ours = {engine.instance}       # instances whose receipts have skeletons here

    def substitutes(self) -> Mapping[str, Instead]:
        """Return the operations that also read the ledger."""
        return {name: getattr(self, name) for name in ("list_receipts", "get_receipt", "get_task_history",
                                                       "list_open_obligations", "bootstrap")}

    # The operations.

    async def list_receipts(self, engine: Engine, caller: Caller, ask: wire.ListReceipts) -> wire.Receipts:
        """List this gate's receipts, then those that others stated; a cursor holds the position in both lists."""
        where = (caller.tenant_id, to := await engine.choose_inbox(caller, ask), ask.task_id)
        seal = ("ledger", to, ask.task_id, ask.receipt_type)
        own, theirs = self._read_cursor(caller, ask.since_receipt_id or ask.cursor, where, *seal)
        reply = await Engine.list_receipts(engine, caller, replace(ask, cursor=own, since_receipt_id=None))
        warnings, own = await self._fill(caller.tenant_id, reply.receipts), reply.cursor
        room = engine.limit_page(ask.limit) - len(reply.receipts)
        more = reply.next_cursor is not None
        if not more:
            others = [receipt for receipt in await self._list_others(where, theirs, warnings)
                      if ask.receipt_type in (None, receipt.receipt_type)]
            reply.receipts += others[:room]
            theirs, more = others[:room][-1].receipt_id if others[:room] else theirs, len(others) > room
        if theirs or more:
            reply.cursor = engine.seal_cursor(caller, f"{own or ''} {theirs or ''}", *seal)
            reply.next_cursor = reply.cursor if more else None
        return add_warnings(reply, warnings)

    async def get_receipt(self, engine: Engine, caller: Caller, ask: wire.GetReceipt) -> wire.ReceiptRecord:
        """Return a receipt of this gate, or one that others stated."""
        try:
            record = await Engine.get_receipt(engine, caller, ask)
        except errors.ReceiptNotFound:
            record = await self._get_foreign(caller, ask.receipt_id)
            engine.check_party(caller, caller.principal, record, caller.sees_all)
            return record
        await self._fill(caller.tenant_id, [record])
        return record

    async def _get_foreign(self, caller: Caller, receipt_id: str) -> wire.ReceiptRecord:
        """Return a receipt that others stated; what a strict gate has only offered to the ledger is none yet."""
        receipts = list[Filed]()
        if not await self.engine.backend.page(caller.tenant_id, queries.OutboxOf((receipt_id,))):
            with contextlib.suppress(Outage):
                receipts = await self.ask_ledger(lambda: self.sink.fetch(caller.tenant_id, [receipt_id]))
        if not receipts:
            raise errors.ReceiptNotFound(f"no receipt {receipt_id}; list_receipts shows the receipts there are")
        return receipts[0].shown()

    async def get_task_history(self, engine: Engine, caller: Caller, ask: wire.GetTaskHistory) -> wire.History:
        """Return what happened to a task at this gate, with the bodies of its receipts."""
        reply = await Engine.get_task_history(engine, caller, ask)
        await self._fill(caller.tenant_id, [event.receipt for event in reply.events if event.receipt is not None])
        return reply

    async def list_open_obligations(self, engine: Engine, caller: Caller,
                                    ask: wire.ListOpenObligations) -> wire.Obligations:
        """List the obligations owed to a principal at this gate, then those that others opened in the ledger."""
        who = engine.require_subject(caller, ask)
        where, seal = (caller.tenant_id, who, None), ("ledger", who)
        own, theirs = self._read_cursor(caller, ask.since_receipt_id, where, *seal)
        reply = await Engine.list_open_obligations(engine, caller, replace(ask, since_receipt_id=own))
        warnings = await self._fill(caller.tenant_id, reply.open_obligations)
        room = engine.limit_page(ask.limit) - len(reply.open_obligations)
        others = await self._list_owed(where, theirs, room, warnings) if room else []
        if others or theirs:
            last = others[-1].receipt_id if others else theirs
            reply.cursor = engine.seal_cursor(caller, f"{reply.cursor or ''} {last}", *seal)
        reply.open_obligations += others
        if warnings:
            reply.beside = warnings     # type: ignore[attr-defined]  # not a member: PH.6.2 forbids other members
        return reply

    async def bootstrap(self, engine: Engine, caller: Caller, ask: wire.Bootstrap) -> wire.Welcome:
        """Begin a session; tell where the receipts are and how far the ledger lags (spec 20.5)."""
        who = engine.require_subject(caller, ask)
        where, seal = (caller.tenant_id, who, None), ("ledger", who)
        own, theirs = self._read_cursor(caller, ask.since_receipt_id, where, *seal)
        reply = await Engine.bootstrap(engine, caller, replace(ask, since_receipt_id=own))
        inbox, warnings = reply.attention.inbox_receipts, await self._fill(
            caller.tenant_id, reply.attention.inbox_receipts)
        wished = min(ask.max_items or ask.limit or engine.settings.default_bootstrap_max_items,
                     engine.settings.max_bootstrap_max_items)
        others = await self._list_others(where, theirs, warnings)
        others = others[:wished - len(inbox)] if ask.since_receipt_id else others[-wished:]
        inbox += others
        if not ask.since_receipt_id:        # the most recent receipts of both lists
            inbox[:] = sorted(inbox, key=self._shelf(where).place)[-wished:]
        if others or theirs:
            last = f"{reply.cursor.latest_receipt_id or ''} {others[-1].receipt_id if others else theirs}"
            reply.cursor.latest_receipt_id = engine.seal_cursor(caller, last, *seal)
        if self.routes is not None:
            await self.routes.add_routing(caller, who, reply)
        reply.warnings = [*reply.warnings, *warnings]
        return reply

    # Bodies.

    async def _fill(self, tenant_id: str, records: list[wire.ReceiptRecord]) -> list[str]:
        """Fill in the bodies of skeletons, from the outbox or the ledger; return warnings."""
        bare = {record.receipt_id: record for record in records if bytes(record.body) == b"null"}
        for row in await self.engine.backend.page(tenant_id, queries.OutboxOf(tuple(bare))) if bare else ():
            bare.pop(row.receipt_id).body = Raw(self.sink.body(row.content.encode()))
        for receipt_id in [id for id in bare if (tenant_id, id) in self.bodies]:
            bare.pop(receipt_id).body = self.bodies[tenant_id, receipt_id]
        if not bare:
            return []
        try:
            receipts = await self.ask_ledger(lambda: self.sink.fetch(tenant_id, list(bare)))
        except Outage:
            return [UNREADABLE]
        for receipt in receipts:
            if receipt.receipt_id in bare:
                bare.pop(receipt.receipt_id).body = receipt.body
            self._remember((tenant_id, receipt.receipt_id), receipt.body)
        if bare:
            await self._fill_stated(tenant_id, bare)
        return [MISSING.format(len(bare))] if bare else []

    async def _fill_stated(self, tenant_id: str, bare: dict[str, wire.ReceiptRecord]) -> None:
        """Fill in the bodies of receipts that workers stored under ids of their own; remove these from `bare`."""
        for receipt_id in list(bare):
            stated = await self.engine.backend.record(tenant_id, stored.LedgerMark, STATED_PREFIX + receipt_id)
            if stated is None:
                continue
            with contextlib.suppress(Outage):
                for receipt in await self.ask_ledger(
                    lambda id=stated.receipt_id: self.sink.fetch(tenant_id, [id])):  # type: ignore[misc]
                    bare.pop(receipt_id).body = receipt.body
                    self._remember((tenant_id, receipt_id), receipt.body)

    def _remember(self, key: tuple[str, str], body: Raw) -> None:
        """Cache a body; drop the oldest bodies if the cache is too large."""
        self.bodies_size += len(bytes(body)) + ROW_BYTES - self._forget(key)
        self.bodies[key] = body
        while self.bodies_size > BODIES_BYTES:
            self.bodies_size -= self._forget(next(iter(self.bodies)))

    def _forget(self, key: tuple[str, str]) -> int:
        body = self.bodies.pop(key, None)
        return 0 if body is None else len(bytes(body)) + ROW_BYTES

    async def ask_ledger(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a query to the ledger; raises Outage at once if the circuit breaker is open."""
        if not self.breaker.let_through():
            raise Outage("the circuit breaker of the ledger is open")
        try:
            answer = await ask()
        except asyncio.CancelledError:
            self.breaker.cancel_probe()
            raise
        except Exception as error:      # only an unresponsive ledger opens the circuit, not an invalid answer
            away = isinstance(error, Outage) and not isinstance(error, Garbled)
            self.breaker.note_outage() if away else self.breaker.note_answer()
            raise error if isinstance(error, Outage) else Outage(str(error)) from error
        self.breaker.note_answer()
        return answer

    # What others stated.

    def _read_cursor(self, caller: Caller, cursor: str | None, where: Where,
                     *seal: Any) -> tuple[str | None, str | None]:
        """Return a cursor's position in the gate's own receipts, and its position in those that others stated."""
        if cursor is None:
            return None, None
        if cursor in self._shelf(where).rows:       # a receipt id that somebody else stated
            return None, cursor
        try:
            own, _, theirs = (self.engine.open_cursor(caller, cursor, *seal) or "").partition(" ")
        except Exception:       # a receipt id, or a cursor with a position in one list only
            return cursor, None
        return own or None, theirs or None

    def _shelf(self, where: Where) -> Shelf:
        shelf = self.shelves.setdefault(where, Shelf())
        self.shelves.move_to_end(where)
        return shelf

    def _trim_cache(self) -> None:
        """Drop the least recently used inboxes if the cache is too large."""
        size = sum(shelf.size for shelf in self.shelves.values())
        while size > SHELVES_BYTES and len(self.shelves) > 1:
            size -= self.shelves.popitem(last=False)[1].size

    async def _list_others(self, where: Where, after: str | None, warnings: list[str]) -> list[wire.ReceiptRecord]:
        """Return the receipts that others stated, after one of them."""
        shelf = self._shelf(where)
        try:
            await self._read_new(where, shelf)
        except Outage:
            warnings += [UNREADABLE] if UNREADABLE not in warnings else []
        finally:
            self._trim_cache()
        if shelf.cut and after not in shelf.rows:
            return await self._list_uncached(where, after, warnings)
        rows = list(shelf.rows.values())
        places = {receipt.receipt_id: at for at, receipt in enumerate(rows, 1)}
        return rows[places.get(after or "", 0):]

    async def _list_uncached(self, where: Where, after: str | None, warnings: list[str]) -> list[wire.ReceiptRecord]:
        """Return others' receipts that are no longer in the cache, read from the ledger itself."""
        passing, before = Shelf(after, most=ANY_SIZE), ""
        try:
            while not passing.rows and passing.after != before:
                before = passing.after or ""
                await self._read_new(where, passing, pages=1)
        except Outage:
            warnings += [UNREADABLE] if UNREADABLE not in warnings else []
        return list(passing.rows.values())

    async def _read_new(self, where: Where, shelf: Shelf, pages: int = MOST_READS) -> None:
        """Read the receipts that the ledger got since the last read, and cache those of others."""
        tenant_id, to, task_id = where
        for _ in range(pages):
            of = queries.EntryFilter(to, task_id, None, None, shelf.after, BODIES_PER_READ)
            page = await self.ask_ledger(lambda of=of: self.sink.page(tenant_id, of))   # type: ignore[misc]
            pairs = [(receipt, await self._is_ours(tenant_id, receipt)) for receipt in page.receipts]
            if shelf.after != of.after:
                continue        # another call has read this page meanwhile: go on behind it
            for receipt, ours in pairs:
                shelf.pass_own(receipt.created_at) if ours else shelf.add(receipt.shown())
            if page.cursor in (None, of.after):
                return
            shelf.after = page.cursor

    async def _is_ours(self, tenant_id: str, receipt: Filed) -> bool:
        """Whether this gate has a skeleton of the receipt; it has all skeletons of an instance, or none.

        What another process of a strict gate has sent and not committed yet is only in the outbox: look there first.
        What it has sent and never committed has a mark.
        """
        if receipt.receipt_key and receipt.asyncgate_instance in self.ours:
            return True
        backend = self.engine.backend
        here = bool(await backend.page(tenant_id, queries.OutboxOf((receipt.receipt_id,)))) or (
            await backend.receipt(tenant_id, receipt.receipt_id) is not None) or (
            await backend.record(tenant_id, stored.Archived, receipt.receipt_id) is not None)
        if here and receipt.receipt_key:
            self.ours.add(receipt.asyncgate_instance)
        return here or any([await backend.record(tenant_id, stored.LedgerMark, prefix + receipt.receipt_id) is not None
                            for prefix in (ADOPTED_PREFIX, UNDONE_PREFIX)])

    async def _list_owed(self, where: Where, after: str | None, most: int,
                         warnings: list[str]) -> list[wire.ReceiptRecord]:
        """Return the obligations that others opened and that no receipt in the ledger discharges."""
        shelf, owed = self._shelf(where), list[wire.ReceiptRecord]()
        for receipt in await self._list_others(where, after, warnings):
            if receipt.receipt_type not in TERMINATES or receipt.receipt_id in shelf.closed:
                continue
            try:
                closed = await self._is_discharged(where[0], receipt)
            except Outage:
                return owed
            if closed:
                shelf.closed.add(receipt.receipt_id)
            elif len(owed) < most:
                owed.append(receipt)
        return owed

    async def _is_discharged(self, tenant_id: str, opened: wire.ReceiptRecord) -> bool:
        """Whether a receipt in the ledger discharges an obligation (PH.1.3)."""
        after, by = None, TERMINATES[opened.receipt_type]
        while True:
            of = queries.EntryFilter(None, opened.task_id, None, None, after, BODIES_PER_READ)
            page = await self.ask_ledger(lambda of=of: self.sink.page(tenant_id, of))   # type: ignore[misc]
            if any(receipt.receipt_type in by and opened.receipt_id in receipt.parents for receipt in page.receipts):
                return True
            if page.cursor in (None, after) or not page.receipts:
                return False
            after = page.cursor


def receipt_weight(receipt: wire.ReceiptRecord) -> int:
    """Estimate the size of a receipt in bytes."""
    return len(bytes(receipt.body)) + ROW_BYTES


def add_warnings(reply: T, warnings: Iterable[str]) -> T:
    """Add warnings to a reply, if there are any."""
    if warnings := list(warnings):
        reply.warnings = warnings       # type: ignore[attr-defined]
    return reply
