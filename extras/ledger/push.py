"""Push stored receipts to a ledger, for `asyncgate receipts push` (spec 20.9).

Receipts are sent in the order of their ids, many per call if the ledger accepts that.  A push writes nothing to the
gate's database.  Sending a receipt again is a no-op at the ledger, so an interrupted push can simply be repeated.  For
a receipt in the outbox, the bytes stored there are sent.  For a receipt without a body here, the push checks that the
ledger has it.  A receipt that was erased goes as what is left of it: its ids, type, time, task and parents, with a note
that names the erasure in place of its content.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from asyncgate import Engine
from asyncgate.extras.ledger.collected import as_stored
from asyncgate.extras.ledger.pacing import Wires, pace_of
from asyncgate.extras.ledger.reconcile import differing_facts
from asyncgate.extras.ledger.sinks import Outage, Refusal, Singly
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.walking import batches
from asyncgate.parts.receipts.carry import as_stored_receipt, export_page
from asyncgate.parts.receipts.files import Reading

if TYPE_CHECKING:
    from asyncgate.parts.model import stored
    from asyncgate.parts.model.settings import Settings

log = logging.getLogger("asyncgate.ledger")

RECEIPTS_PER_CALL, CALL_BYTES = 250, 2 * 2**20
STILL_THERE = "; it was erased here: if the ledger still has its content, ask who runs it to erase that"
FIRST_RETRY_SECONDS = 0.1          # the pause before the first retry; each further pause is twice as long


class LedgerAway(errors.NoAnswer):
    """The ledger does not answer, after all retries."""


class Ready(Struct, frozen=True):
    """A receipt, and the bytes to send; no bytes if its body is at a ledger already."""

    receipt: stored.Receipt
    content: bytes | None


class PushTally(Struct):
    """The counts of a push so far."""

    taken: int = 0
    refused: int = 0
    lost: int = 0           # only a hash is left, here and at the ledger
    passed_over: int = 0    # this kind of ledger does not store them
    erased: int = 0         # sent without content, which an erasure has taken away
    after: str = ""         # TENANT:RECEIPT, the last one that was sent


class Push:
    """Sends receipts to one ledger; calls `refused` with each refused receipt and the reason."""

    def __init__(self, sink: Any, settings: Settings, tally: PushTally, count: Callable[[int], None],
                 refused: Callable[[str, str], None]) -> None:
        self.sink, self.tally, self.count, self.refused = sink, tally, count, refused
        self.retry, self.wires = settings.ledger.emission_retry, Wires(pace_of(settings))
        self.singly = False

    async def send(self, tenant_id: str, pages: AsyncIterator[list[Ready]]) -> None:
        """Send all receipts of a tenant; raises LedgerAway."""
        async for page in pages:
            for batch in batches(page, RECEIPTS_PER_CALL, CALL_BYTES, lambda entry: len(entry.content or b"")):
                await self._send(tenant_id, batch)
                self.tally.after = f"{tenant_id}:{batch[-1].receipt.receipt_id}"
                self.count(len(batch))

    async def _send(self, tenant_id: str, batch: list[Ready]) -> None:
        await self._look_up(tenant_id, [entry.receipt for entry in batch if entry.content is None])
        whole = [entry for entry in batch if entry.content is not None]
        if whole and not await self._send_many(tenant_id, whole):
            chains = defaultdict[str, list[Ready]](list)
            for entry in whole:
                chains[entry.receipt.task_id or entry.receipt.receipt_id].append(entry)
            await send_chains(self._send_chain(tenant_id, chain) for chain in chains.values())

    async def _look_up(self, tenant_id: str, bare: list[stored.Receipt]) -> None:
        """Check that the ledger has the receipts of which this gate keeps only a hash."""
        theirs = await self._fetch(tenant_id, [row.receipt_id for row in bare]) if bare else {}
        for receipt in bare:
            if receipt.receipt_id not in theirs:
                self.tally.lost += 1
                self.refused(receipt.receipt_id, "only its hash is here, and the ledger does not have it")
            elif wrong := differing_facts(receipt, theirs[receipt.receipt_id]):
                self._refuse(receipt, f"the ledger has another receipt under this id: it differs in {', '.join(wrong)}")
            else:
                self.tally.taken += 1

    async def _send_many(self, tenant_id: str, batch: list[Ready]) -> bool:
        """Send receipts in one call; tell whether the ledger accepts several at once."""
        if self.singly or (send_many := getattr(self.sink, "send_many", None)) is None:
            return False
        try:
            refusals = await self._ask(lambda: send_many(tenant_id, [entry.content for entry in batch]))
        except Singly as why:
            self.singly = len(batch) == 1       # else the size alone may be the reason
            log.info("the ledger does not take %d receipts in one call: %s", len(batch), why)
            return False
        for entry, refusal in zip(batch, refusals, strict=True):
            await self._count_answer(tenant_id, entry.receipt, refusal)
        return True

    async def _send_chain(self, tenant_id: str, chain: list[Ready]) -> None:
        """Send the receipts of one task, one after another."""
        for entry in chain:
            async with self.wires:
                refusal: Refusal | None = None
                try:
                    await self._ask(partial(self.wires.send, self.sink, tenant_id, entry.content or b""))
                except Refusal as refused:
                    refusal = refused
                await self._count_answer(tenant_id, entry.receipt, refusal)

    async def _count_answer(self, tenant_id: str, receipt: stored.Receipt, refusal: Refusal | None) -> None:
        """Count an answer; a refused receipt counts as taken if the ledger has the worker's own statement of it."""
        erased = read_note(receipt.body) is not None
        if refusal is not None:
            theirs = (await self._fetch(tenant_id, [receipt.receipt_id])).get(receipt.receipt_id)
            if theirs is None or differing_facts(receipt, theirs):
                return self._refuse(receipt, f"{refusal}{STILL_THERE * erased}")
        self.tally.taken += 1
        self.tally.erased += erased

    async def _fetch(self, tenant_id: str, receipt_ids: list[str]) -> dict[str, stored.Receipt]:
        """Return the ledger's copies of some receipts."""
        try:
            receipts = await self._ask(lambda: self.sink.fetch(tenant_id, receipt_ids))
        except (Refusal, msgspec.MsgspecError, UnicodeError) as wrong:
            raise LedgerAway(f"the ledger cannot be read: {wrong}") from None
        return {receipt.receipt_id: as_stored(receipt) for receipt in receipts}

    def _refuse(self, receipt: stored.Receipt, why: str) -> None:
        self.tally.refused += 1
        self.refused(receipt.receipt_id, why)

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        """Ask the ledger, with the retries of the settings; raises LedgerAway."""
        tries = 0
        while True:
            try:
                return await ask()
            except Outage as away:
                tries += 1
                if tries > self.retry.max_retries:
                    raise LedgerAway(f"the ledger does not answer: {away}") from None
                pause = min(FIRST_RETRY_SECONDS * 2 ** (tries - 1), self.retry.retry_interval_seconds)
                await asyncio.sleep(max(pause, away.retry_after))


async def send_chains(sending: Iterable[Any]) -> None:
    """Send chains concurrently; the first failure stops all."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in sending:
                group.create_task(coroutine)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


# Where receipts are read from.


class FromDatabase:
    """Reads the receipts of a gate: from its table, its archive and its outbox."""

    def __init__(self, engine: Engine, push: Push) -> None:
        self.engine, self.push = engine, push

    async def pages(self, tenant_id: str, after: str) -> AsyncIterator[list[Ready]]:
        """Yield a tenant's receipts in the order of their ids, after a given one."""
        while exported := (await export_page(self.engine, tenant_id, after or None)).receipts:
            page = [as_stored_receipt(receipt) for receipt in exported]
            after = page[-1].receipt_id
            yield await self._ready(tenant_id, page)

    async def _ready(self, tenant_id: str, page: list[stored.Receipt]) -> list[Ready]:
        backend, ready = self.engine.backend, list[Ready]()
        outbox = {row.receipt_id: row.content.encode()
                  for row in await backend.page(tenant_id, queries.OutboxOf(tuple([row.receipt_id for row in page])))}
        tasks = {} if self.push.sink.reads else {
            task_id: await backend.task(tenant_id, task_id) for task_id in {row.task_id for row in page} - {""}}
        for receipt in page:
            content = outbox.get(receipt.receipt_id)
            if content is None and receipt.body:
                content = self._render(tenant_id, receipt, tasks.get(receipt.task_id))
                if content is None:
                    self.push.tally.passed_over += 1
                    continue
            ready.append(Ready(receipt, content))
        return ready

    def _render(self, tenant_id: str, receipt: stored.Receipt, snapshot: Any) -> bytes | None:
        if not self.push.sink.reads and read_note(receipt.body) is not None:
            return None         # a ReceiptGate has receipts in a form of its own, and none for what was erased
        task: stored.Task | None
        lease: stored.Lease | None
        task, lease = snapshot[:2] if snapshot else (None, None)
        content: bytes | None = self.push.sink.render(tenant_id, receipt, task, lease)
        return content


async def read_exported(push: Push, tenant_id: str, path: str, after: str) -> AsyncIterator[list[Ready]]:
    """Yield the receipts of an exported file, after a given one; the file was verified before."""
    for batch in batches(Reading(path).rows(), RECEIPTS_PER_CALL):
        yield [Ready(receipt, push.sink.render(tenant_id, receipt, None)) for receipt in batch
               if receipt.receipt_id > after]
