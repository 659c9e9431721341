"""Where receipts go: the one small protocol of every sink, and what a ledger may answer.

A sink is a module of this folder, or of another package under the entry-point group `asyncgate.sinks`, with
`open_sink(settings)`; `ledger.profile` names it.  It renders a receipt once, when its batch is
saved, and sends the same bytes as often as it takes.  It decides nothing and keeps nothing: the outbox does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from msgspec import Raw, Struct, field

from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.queries import EntryFilter
from asyncgate.parts.model.wire import JSON_NULL, Principal, ReceiptRecord

if TYPE_CHECKING:
    from asyncgate.parts.model.settings import Settings
    from asyncgate.parts.model.stored import Lease, Receipt, Task


class Refusal(Exception):
    """The ledger understood the receipt and will never store it, so it is parked and not sent again."""


class Outage(Exception):
    """No answer, or one that says nothing about the receipt; the receipt is sent again until it is stored."""

    def __init__(self, reason: str, retry_after: float = 0.0, *, untaken: bool = False) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.untaken = untaken      # the ledger has not taken it; else that is not known


class Unanswered(Outage):
    """No answer in time; the ledger may have stored the receipt, or may store it yet."""


class Garbled(Outage):
    """A live ledger gave an invalid answer; the circuit breaker stays closed."""


class Missing(Garbled):
    """The ledger has no such receipt."""


class Singly(Exception):
    """The ledger accepts only one receipt per call."""


class Filed(ReceiptRecord, kw_only=True):
    """A receipt as a ledger gives it back; those that others wrote may lack what only a gate knows."""

    tenant_id: str = ""
    task_id: str | None = None
    lease_id: str | None = None
    schedule_id: str | None = None
    parents: list[str] = field(default_factory=list)
    asyncgate_instance: str = ""
    body: Raw = JSON_NULL
    hash: str = ""
    receipt_key: str = ""       # only a gate gives it one
    stated_by: Principal | None = None      # as the ledger says, never as the receipt does

    def shown(self) -> ReceiptRecord:
        """Return it as a gate shows a receipt."""
        return ReceiptRecord(**{name: getattr(self, name) for name in ReceiptRecord.__struct_fields__})


class LedgerPage(Struct):
    """What a ledger lists, in the order of arrival, and where its next page begins."""

    receipts: list[Filed]
    cursor: str | None = None


class Sink(Protocol):
    """One kind of ledger."""

    reads: bool     # what it took can be read back here, so the body of a receipt goes there and does not stay

    @property
    def binds(self) -> bool | None:
        """Whether it says who has stated a receipt, so that one may count here; None while that is not known."""

    def render(self, tenant_id: str, receipt: Receipt, task: Task | None, lease: Lease | None = None) -> bytes | None:
        """Return the bytes that are sent for a receipt, valid UTF-8; None for one that the ledger is not to have.

        A pure function: called once, inside the transaction that writes the receipt, perhaps on another thread.
        `task` is as the operation leaves it, with its duty, attempt, outcome and artifacts, and `lease` its latest one.
        """

    def handed(self, receipt: Receipt, task: Task, lease: Lease | None = None, by_worker: bool = False) -> str | None:
        """Return what `Task.handed` becomes by a receipt, for a ledger that keeps custody; None leaves it as it is."""

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Return the receipt that undoes an acceptance whose lease was never granted; None for all else.

        For a ledger that holds somebody to what it was told.
        """

    def taken_back(self, receipt_id: str, task: Task, lease: Lease | None = None) -> str | None:
        """Return what `Task.handed` becomes by such a receipt."""

    def handover(self, content: bytes) -> bytes | None:
        """Return what is left to send of an acceptance that its worker states there itself; None is nothing."""

    def body(self, content: bytes) -> bytes:
        """Return the body of the receipt that these bytes were rendered from."""

    async def send(self, tenant_id: str, content: bytes) -> None:
        """Let the ledger take what was rendered; to have taken it before is well, too.  Raises Refusal and Outage."""

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Whether the ledger has just what was rendered; asked when `send` was Unanswered.  Raises Outage."""

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[Filed]:
        """Return those of some receipts that the ledger has; raises Outage.  Never called unless it `reads`."""

    async def page(self, tenant_id: str, of: EntryFilter) -> LedgerPage:
        """Return what the ledger has, in the order of arrival, from behind a cursor of its own; raises Outage."""

    async def token(self, tenant_id: str, who: Principal, until: float) -> str | None:
        """Have the ledger issue a key that is good for one principal of a tenant; None where it issues none.

        Raises Refusal and Outage.
        """

    async def close(self) -> None:
        """Let the connections go."""


class Bulk(Protocol):
    """Optional for a sink: send many receipts in one call."""

    async def send_many(self, tenant_id: str, contents: list[bytes]) -> list[Refusal | None]:
        """Let the ledger take receipts in this order; return what it refuses.  Raises Outage, and Singly."""


BUILT_IN_SINKS = {"standalone", "memorygate", "receiptgate"}


def ledger_profile(settings: Settings) -> str:
    """Return the profile of the ledger in the settings."""
    if settings.receipt_mode == "standalone":
        return "standalone"
    return "receiptgate" if settings.receipt_mode == "receiptgate_integrated" else settings.ledger.profile.lower()


def require_address(settings: Settings) -> None:
    """Refuse settings without the ledger's address; raises StartupError."""
    ours = settings.ledger
    if ours.auth_token_env and not (ours.auth_token or os.environ.get(ours.auth_token_env)):
        raise StartupError(f"ledger.auth_token_env names the variable {ours.auth_token_env}, which is not set: set "
                           "it to the ledger's token, or unset the setting")
    if not ours.url:
        raise StartupError(f"receipt_mode {settings.receipt_mode} needs ledger.url: where is the ledger?")
    try:
        at = urlsplit(ours.url)
    except ValueError as wrong:
        raise StartupError(f"ledger.url: {wrong}") from None
    if at.scheme not in ("http", "https") or not at.hostname:
        raise StartupError("ledger.url is no address of a ledger: it begins with http:// or https:// and a host")


def open_sink(settings: Settings) -> Sink:
    """Open the sink of the settings; raises StartupError for incomplete settings."""
    profile = ledger_profile(settings)
    if profile not in BUILT_IN_SINKS:
        return open_other_sink(profile, settings)
    if profile != "standalone":
        require_address(settings)
    sink: Sink = import_module(f"asyncgate.parts.receipts.sinks.{profile}").open_sink(settings)
    return sink


def open_other_sink(profile: str, settings: Settings) -> Sink:
    """Open the sink that another package has registered."""
    points = entry_points(group="asyncgate.sinks")
    if profile not in points.names:
        known = ", ".join(sorted({"memorygate", "receiptgate", *points.names}))
        raise StartupError(f"ledger.profile: there is no sink {profile!r}; there are {known}; others register under "
                           "the entry-point group asyncgate.sinks")
    sink: Sink = points[profile].load().open_sink(settings)
    if sink.reads:      # seals and the archive hold what is here whole
        raise StartupError(f"ledger.profile: the sink {profile!r} has reads = True; a sink of another package must "
                           "have reads = False")
    return sink
