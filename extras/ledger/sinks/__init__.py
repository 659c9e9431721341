"""The protocol of a sink (the adapter to one kind of ledger), and the errors of a ledger.

A sink is a module with `open_sink(settings)`, in this folder or in another package under the entry-point group
`asyncgate.sinks`; the setting `ledger.profile` names it.  A receipt is rendered once, in the transaction of its batch,
and each retry sends the same bytes.  The outbox keeps receipts and decides when to send; a sink does neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct, field

from asyncgate.parts.model import errors, queries, wire
from asyncgate.parts.receipts.sealing import ledger_profile

if TYPE_CHECKING:
    from asyncgate.parts.model import stored
    from asyncgate.parts.model.settings import Settings


class Refusal(Exception):
    """The ledger understood the receipt and will never store it, so the receipt is parked and not sent again."""


class Outage(Exception):
    """The ledger gave no answer, or none about the receipt; the receipt is sent again until it is stored."""

    def __init__(self, reason: str, retry_after: float = 0.0, *, untaken: bool = False) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.untaken = untaken      # True: the ledger surely did not store it; False: unknown


class Unanswered(Outage):
    """The ledger did not answer in time; it may have stored the receipt, or may still store it."""


class Garbled(Outage):
    """A live ledger gave an invalid answer; the circuit breaker stays closed."""


class Missing(Garbled):
    """The ledger has no such receipt."""


class Singly(Exception):
    """The ledger accepts only one receipt per call."""


class Filed(wire.ReceiptRecord, kw_only=True):
    """A receipt as a ledger returns it; receipts that no gate wrote may lack fields that only a gate sets."""

    tenant_id: str = ""
    task_id: str | None = None
    lease_id: str | None = None
    schedule_id: str | None = None
    parents: list[str] = field(default_factory=list)
    asyncgate_instance: str = ""
    body: Raw = wire.JSON_NULL
    hash: str = ""
    receipt_key: str = ""       # only gates set it
    stated_by: wire.Principal | None = None      # the author by the ledger's word, never by the receipt's own

    def __post_init__(self) -> None:
        if self.created_at.tzinfo is None:      # as Python's isoformat writes UTC; no such time sorts among others
            self.created_at = self.created_at.replace(tzinfo=UTC)

    def shown(self) -> wire.ReceiptRecord:
        """Return the fields that a gate shows of a receipt."""
        return wire.ReceiptRecord(**{name: getattr(self, name) for name in wire.ReceiptRecord.__struct_fields__})


class LedgerPage(Struct):
    """A page of a ledger's receipts in the order of arrival, and the cursor of the next page."""

    receipts: list[Filed]
    cursor: str | None = None
    unread: int = 0             # how many receipts on it could not be read


def read_filed(content: bytes | Raw) -> Filed:
    """Decode a ledger's receipt, where null means absent; raises msgspec's errors.

    Whatever it says of its own author has no meaning, so that need not be readable.
    """
    try:
        return decode_filed(content)
    except msgspec.ValidationError:
        members = {name: part for name, part in decode_members(content).items()
                   if name != "stated_by" and bytes(part).strip() != b"null"}
        return decode_filed(msgspec.json.encode(members))


decode_filed = msgspec.json.Decoder(Filed).decode
decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Sink(Protocol):
    """An adapter to one kind of ledger."""

    reads: bool     # receipts can be read back, so the gate keeps only skeletons and the bodies are in the ledger

    @property
    def binds(self) -> bool | None:
        """Whether the ledger says who stored a receipt, so that the gate can adopt it; None if not known yet."""

    def render(self, tenant_id: str, receipt: stored.Receipt, task: stored.Task | None,
               lease: stored.Lease | None = None) -> bytes | None:
        """Return the bytes to send for a receipt, valid UTF-8; None if this ledger does not get the receipt.

        Must be a pure function: it is called once, inside the transaction that writes the receipt, perhaps on another
        thread.  `task` is the task after the operation; `lease` is the task's latest lease.
        """

    def handed(self, receipt: stored.Receipt, task: stored.Task, lease: stored.Lease | None = None,
               by_worker: bool = False) -> str | None:
        """Return the new `Task.handed` after a receipt, for a ledger that keeps custody; None leaves it unchanged."""

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Return the receipt that undoes an acceptance whose lease was never granted; None for other receipts.

        Only a ledger that keeps custody, or that closes obligations itself, needs such a receipt.
        """

    def taken_back(self, receipt_id: str, task: stored.Task, lease: stored.Lease | None = None) -> str | None:
        """Return the new `Task.handed` after the receipt that `undone` returned."""

    def handover(self, content: bytes) -> bytes | None:
        """Return the bytes to send for an acceptance that the worker itself stores at the ledger; None if nothing."""

    def body(self, content: bytes) -> bytes:
        """Return the body of the receipt from its rendered bytes."""

    async def send(self, tenant_id: str, content: bytes) -> None:
        """Store a rendered receipt in the ledger; a no-op if the ledger has it.  Raises Refusal and Outage."""

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Whether the ledger has exactly this receipt; called after `send` raised Unanswered.  Raises Outage."""

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[Filed]:
        """Return the receipts with these ids that the ledger has; raises Outage.  Called only if `reads` is true."""

    async def page(self, tenant_id: str, of: queries.EntryFilter) -> LedgerPage:
        """Return a page of the ledger's receipts in the order of arrival, after its own cursor; raises Outage."""

    async def token(self, tenant_id: str, who: wire.Principal, until: float) -> str | None:
        """Have the ledger issue a key for one principal of a tenant; None if this ledger issues no keys.

        Raises Refusal and Outage.
        """

    async def close(self) -> None:
        """Close the connections."""


class Bulk(Protocol):
    """Optional for a sink: send many receipts in one call."""

    async def send_many(self, tenant_id: str, contents: list[bytes]) -> list[Refusal | None]:
        """Store receipts in this order; return None or the refusal of each.  Raises Outage, and Singly."""


BUILT_IN_SINKS = {"standalone", "memorygate", "receiptgate"}


def require_address(settings: Settings) -> None:
    """Refuse settings without the ledger's address; raises StartupError."""
    ours = settings.ledger
    if ours.auth_token_env and not (ours.auth_token or os.environ.get(ours.auth_token_env)):
        raise errors.StartupError(
            f"ledger.auth_token_env names the variable {ours.auth_token_env}, which is not set: set "
            "it to the ledger's token, or unset the setting")
    if not ours.url:
        raise errors.StartupError(
            f"receipt_mode {settings.receipt_mode} needs ledger.url: set it to the ledger's address")
    try:
        at = urlsplit(ours.url)
    except ValueError as wrong:
        raise errors.StartupError(f"ledger.url: {wrong}") from None
    if at.scheme not in ("http", "https") or not at.hostname:
        raise errors.StartupError("ledger.url is invalid: it must begin with http:// or https:// and a host")


def open_sink(settings: Settings) -> Sink:
    """Open the sink of the settings; raises StartupError for incomplete settings."""
    profile = ledger_profile(settings)
    if profile not in BUILT_IN_SINKS:
        return open_other_sink(profile, settings)
    if profile != "standalone":
        require_address(settings)
    sink: Sink = import_module(f"asyncgate.extras.ledger.sinks.{profile}").open_sink(settings)
    return sink


def open_other_sink(profile: str, settings: Settings) -> Sink:
    """Open the sink that another package has registered."""
    points = entry_points(group="asyncgate.sinks")
    if profile not in points.names:
        known = ", ".join(sorted({"memorygate", "receiptgate", *points.names}))
        raise errors.StartupError(
            f"ledger.profile: there is no sink {profile!r}; choose one of {known}, or install a package "
            "with that sink (entry-point group asyncgate.sinks)")
    sink: Sink = points[profile].load().open_sink(settings)
    if sink.reads:      # seals and the archive need the bodies of receipts, which such a sink would take away
        raise errors.StartupError(
            f"ledger.profile: the sink {profile!r} has reads = True; a sink of another package must "
            "have reads = False")
    return sink
