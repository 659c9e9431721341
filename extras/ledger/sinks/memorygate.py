"""The sink of the memorygate profile: it stores receipts over REST with `POST /v1/receipts` (spec 20.12, H.6).

A receipt is sent in the form in which the gate shows it, with its key.  The ledger returns receipts unchanged, so
`asyncgate receipts home` can copy them back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

import asyncgate
from asyncgate import receipt_hash
from asyncgate.extras.ledger import calls, sinks
from asyncgate.extras.ledger.pacing import LOOK_SECONDS, pace_of
from asyncgate.extras.ledger.sinks.standalone import NoCustody
from asyncgate.parts.model import wire
from asyncgate.parts.model.content import encode_json, sha256, to_canonical
from asyncgate.parts.model.views import show_receipt, to_utc
from asyncgate.parts.receipts.ledger_marks import WITHDRAWN

if TYPE_CHECKING:
    from asyncgate.extras.ledger.sinks import Bulk, Sink
    from asyncgate.parts.model import queries, stored
    from asyncgate.parts.model.settings import Settings

log = logging.getLogger("asyncgate.ledger")

# These codes are about the gate's credential and settings, not about the receipt.
NO_REFUSALS = {"forbidden", "tenant_mismatch", "tenant_not_found"}
MOST_AT_ONCE = 16            # receipts that are fetched concurrently
# What undoes a receipt whose change was never committed.
UNDOING = {asyncgate.ASSIGNED.type: asyncgate.CANCELED.type, asyncgate.ACCEPTED.type: asyncgate.EXPIRED.type,
           asyncgate.SCHEDULED.type: asyncgate.UNSCHEDULED.type,
           asyncgate.INPUT_REQUESTED.type: asyncgate.INPUT_EXPIRED.type}
# Ids that are safe in a path.  Security: another id is never requested, because a server could read it as another path.
PLAIN_ID = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._:@~-]{0,199}\Z")


class Sent(wire.ReceiptRecord, kw_only=True):
    """A receipt as it is sent."""

    receipt_key: str = ""


class Rendered(Struct):
    """The part of a rendered receipt that its skeleton lacks."""

    body: msgspec.Raw


class Listed(Struct):
    """A page in a ledger's answer; some ledgers give no cursor."""

    receipts: list[msgspec.Raw]
    next_cursor: str | None = None
    stated_by: list[wire.Principal | None] = []      # the author of each receipt, if the ledger knows it


class Named(Struct):
    """The id of a receipt, whatever else it has."""

    receipt_id: str


class Issued(Struct):
    """A key that the ledger has issued."""

    api_key: str


class Answered(Struct):
    """The answer for one receipt of many."""

    error: wire.Problem | None = None


class AllAnswered(Struct):
    """The answers for all receipts of a call."""

    results: list[Answered]


T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
decode_issued = msgspec.json.Decoder(Issued).decode
decode_answers = msgspec.json.Decoder(AllAnswered).decode
decode_confirmed = msgspec.json.Decoder(dict[str, Any]).decode
decode_page = msgspec.json.Decoder(Listed).decode
decode_named = msgspec.json.Decoder(Named).decode
decode_rendered = msgspec.json.Decoder(Rendered).decode


class MemoryGate(NoCustody):
    """The adapter to a ledger that speaks REST."""

    reads = True
    binds: bool | None = True       # until the ledger returns a list without authors

    def __init__(self, settings: Settings) -> None:
        ours = settings.ledger
        self.url = ours.address + "/v1/receipts"
        self.home, self.filed_under = settings.default_tenant_id, ours.tenant_id
        token = ours.auth_token or os.environ.get(ours.auth_token_env, "")
        self.pace = pace_of(settings)
        self.calls, self.fetching = calls.Calls(token, self.pace.most + MOST_AT_ONCE), asyncio.Semaphore(MOST_AT_ONCE)
        self.weight = settings.receipts.max_body_size_bytes + calls.BESIDE_BODY       # the largest size of a receipt

    def tenant(self, tenant_id: str) -> str:
        """Return the ledger's id of a tenant: ledger.tenant_id for the default tenant, else the same id."""
        return self.filed_under if self.filed_under and tenant_id == self.home else tenant_id

    def render(self, tenant_id: str, receipt: stored.Receipt, task: stored.Task | None,
               lease: stored.Lease | None = None) -> bytes | None:
        """Return the receipt in the form in which the gate shows it, with its key."""
        view = show_receipt(self.tenant(tenant_id), receipt)
        facts = {name: getattr(view, name) for name in wire.ReceiptRecord.__struct_fields__ if name != "delivered_at"}
        return encode_json(Sent(**facts, receipt_key=receipt.receipt_key))

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Return the receipt that ends a lease, a task or a schedule that was never committed."""
        return withdraw_receipt(sinks.read_filed(content), receipt_id, at)

    def body(self, content: bytes) -> bytes:
        """Return the body of a rendered receipt."""
        return bytes(decode_rendered(content).body)

    async def send(self, tenant_id: str, content: bytes) -> None:
        """Store one receipt; raises Garbled if what answered is not a ledger, because that has stored nothing."""
        require_confirmation(await self._ask("POST", "", content=content), content)

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Whether the ledger has a receipt, by its hash."""
        ours = sinks.read_filed(content)
        receipt = await self._fetch(tenant_id, ours.receipt_id, patience=LOOK_SECONDS)
        return receipt is not None and receipt.hash == ours.hash

    async def send_many(self, tenant_id: str, contents: list[bytes]) -> list[sinks.Refusal | None]:
        """Store many receipts in one call; raises Singly if the ledger accepts no list (20.9)."""
        try:
            results = decode_answers(await self._ask("POST", "", content=b"[" + b",".join(contents) + b"]")).results
        except (sinks.Refusal, *UNREADABLE) as refusal:
            raise sinks.Singly(str(refusal)) from None
        if len(results) != len(contents):
            raise sinks.Singly(f"{len(results)} answers to {len(contents)} receipts")
        if away := [answer.error.error for answer in results if answer.error and answer.error.error in NO_REFUSALS]:
            raise sinks.Outage(away[0])
        return [sinks.Refusal(f"{answer.error.error}: {answer.error.message}"[:calls.MOST_TOLD]) if answer.error
                else None
                for answer in results]

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[sinks.Filed]:
        """Fetch receipts one by one, several at a time."""
        receipts = await asyncio.gather(*(self._fetch(tenant_id, receipt_id) for receipt_id in receipt_ids))
        return [receipt for receipt in receipts if receipt is not None]

    async def _fetch(self, tenant_id: str, receipt_id: str, **more: Any) -> sinks.Filed | None:
        if not PLAIN_ID.match(receipt_id):
            return None
        about = {"tenant": self.tenant(tenant_id)}
        async with self.fetching:
            try:
                text = await self._ask(
                    "GET", f"/{path_segment(receipt_id)}", params=about, most_bytes=self.weight, **more)
            except sinks.Missing:
                return None
        receipt = decode_with(sinks.read_filed, text)
        if receipt.receipt_id != receipt_id:
            raise sinks.Garbled("the ledger answered with another receipt than the requested one")
        receipt.stated_by = None      # here it comes from the receipt itself, which proves nothing
        return self._ours(tenant_id, receipt)

    async def page(self, tenant_id: str, of: queries.EntryFilter) -> sinks.LedgerPage:
        """List receipts in the order of their arrival."""
        given = {"tenant": self.tenant(tenant_id), "limit": str(of.limit), **inbox_query(of.to), "task_id": of.task_id,
                 "receipt_type": of.receipt_type, "asyncgate_instance": of.instance, "since_receipt_id": of.after}
        listed = decode_with(decode_page, await self._ask(
            "GET", "", params={name: value for name, value in given.items() if value is not None},
            most_bytes=of.limit * self.weight))
        if listed.receipts:
            self.binds = len(listed.stated_by) == len(listed.receipts)
        receipts = read_receipts(listed)
        ours = [self._ours(tenant_id, receipt) for receipt in receipts]
        return sinks.LedgerPage([receipt for receipt in ours if receipt is not None],
                                listed.next_cursor or find_last(listed), len(listed.receipts) - len(receipts))

    def _ours(self, tenant_id: str, receipt: sinks.Filed) -> sinks.Filed | None:
        """Return a receipt only if it belongs to the tenant, whatever the ledger answered."""
        if receipt.tenant_id not in (self.tenant(tenant_id), ""):
            return None
        receipt.tenant_id = tenant_id
        return receipt

    async def token(self, tenant_id: str, who: wire.Principal, until: float) -> str | None:
        """Have the ledger issue a key that stores and reads receipts as one principal; None if it issues no keys."""
        about = {"tenant": self.tenant(tenant_id), "name": f"{who.id} by way of its gate"[:200],
                 "principal_kind": who.kind, "principal_id": who.id, "role": "worker",
                 "scopes": ["receipts:ack", "receipts:read"], "expires_at": to_utc(until)}
        keys = self.url.removesuffix("/receipts") + "/keys"
        try:
            return decode_issued(await self._ask("POST", "", at=keys, content=encode_json(about))).api_key
        except msgspec.DecodeError:
            return None

    async def _ask(self, verb: str, path: str, *, patience: float = 0.0, at: str = "", **more: Any) -> bytes:
        """Make one call; return the content of a successful answer."""
        seconds = max(self.pace.timeout_seconds, patience)
        answer = await self.calls.ask(verb, (at or self.url) + path, seconds=seconds, **more)
        if answer.status_code == 200 or (answer.status_code in (201, 202, 204) and verb == "POST"):
            return answer.content
        raise calls.answer_error(verb, answer)

    async def close(self) -> None:
        """Close the connections."""
        await self.calls.close()


def decode_with(decode: Callable[[bytes], T], text: bytes) -> T:
    """Decode an answer of the ledger; raises Garbled if it is invalid."""
    try:
        return decode(text)
    except UNREADABLE as wrong:
        raise sinks.Garbled(f"the ledger's answer cannot be read: {wrong}"[:calls.MOST_TOLD]) from None


def withdraw_receipt(begun: sinks.Filed, receipt_id: str, at: float) -> bytes | None:
    """Return the receipt that ends what another one has begun, and that says so; None if that one begins nothing."""
    if (receipt_type := UNDOING.get(begun.receipt_type)) is None:
        return None
    gate = wire.Principal("asyncgate", begun.asyncgate_instance)
    body = to_canonical({"reason": WITHDRAWN, "schema_version": asyncgate.SCHEMA_VERSION})
    digest = receipt_hash(receipt_type, gate, begun.to, begun.task_id or "", begun.lease_id, begun.schedule_id,
                          (begun.receipt_id,), body)
    return encode_json(Sent(
        receipt_id, begun.tenant_id, receipt_type, to_utc(at), gate, begun.to, begun.task_id, begun.lease_id,
        begun.schedule_id, [begun.receipt_id], begun.asyncgate_instance, msgspec.Raw(body), digest,
        receipt_key=sha256(WITHDRAWN, begun.receipt_id)))


def require_confirmation(answer: bytes, content: bytes) -> None:
    """Check that a ledger has answered, not a portal before it: with nothing, or with the receipt's id (20.12)."""
    confirmation = decode_with(decode_confirmed, answer) if answer else {}
    if confirmation and confirmation.get("receipt_id") != sinks.read_filed(content).receipt_id:
        raise sinks.Garbled("what answers for the ledger does not name the receipt that it was sent")


def read_receipts(page: Listed) -> list[sinks.Filed]:
    """Read the receipts of a page, each with its author by the ledger's attribution, never by its own word.

    Security: one that cannot be read is skipped.  Whoever stated it would else hide what others stated after it.
    """
    known = page.stated_by if len(page.stated_by) == len(page.receipts) else [None] * len(page.receipts)
    receipts = []
    for content, by in zip(page.receipts, known, strict=True):
        try:
            receipts.append(receipt := sinks.read_filed(content))
            receipt.stated_by = by
        except UNREADABLE as wrong:
            named = (find_id(content) or "without an id")[:calls.MOST_TOLD]
            log.warning("receipt %s in the ledger cannot be read and is skipped: %s", named, wrong)
    return receipts


def find_id(content: msgspec.Raw) -> str | None:
    """Return the id of a receipt that may be invalid otherwise."""
    try:
        return decode_named(content).receipt_id
    except UNREADABLE:
        return None


def find_last(page: Listed) -> str | None:
    """Return the id of a page's last receipt that has one."""
    return next(filter(None, map(find_id, reversed(page.receipts))), None)


def inbox_query(to: wire.Principal | None) -> dict[str, str]:
    """Return the query parameters of an inbox."""
    return {"to_id": to.id, **({"to_kind": to.kind} if to.kind else {})} if to else {}


def path_segment(receipt_id: str) -> str:
    """Quote an id as one segment of a path."""
    from urllib.parse import quote
    return quote(receipt_id, safe="")


def open_sink(settings: Settings) -> MemoryGate:
    """Open the ledger that the settings name."""
    return MemoryGate(settings)


if TYPE_CHECKING:
    _: type[Sink] = MemoryGate
    __: type[Bulk] = MemoryGate
