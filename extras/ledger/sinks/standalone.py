"""The sink of standalone mode: a no-op, because receipts stay in the gate's own database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncgate.extras.ledger.sinks import Filed, LedgerPage

if TYPE_CHECKING:
    from asyncgate.extras.ledger.sinks import Sink
    from asyncgate.parts.model import queries, stored, wire
    from asyncgate.parts.model.settings import Settings


class NoCustody:
    """The custody methods of a sink whose ledger keeps no custody."""

    def handed(self, receipt: stored.Receipt, task: stored.Task, lease: stored.Lease | None = None,
               by_worker: bool = False) -> str | None:
        """Return nothing: this ledger keeps no custody."""
        return None

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Return nothing: at this ledger an acceptance binds nobody."""
        return None

    def taken_back(self, receipt_id: str, task: stored.Task, lease: stored.Lease | None = None) -> str | None:
        """Return nothing: this ledger keeps no custody."""
        return None

    def handover(self, content: bytes) -> bytes | None:
        """Return nothing: the worker stores its acceptance itself."""
        return None


class Standalone(NoCustody):
    """Sends nothing: receipts stay in the database."""

    reads = binds = False

    def render(self, tenant_id: str, receipt: stored.Receipt, task: stored.Task | None,
               lease: stored.Lease | None = None) -> bytes | None:
        """Return None: no receipt is sent."""
        return None

    def body(self, content: bytes) -> bytes:
        """Return the content unchanged."""
        return content

    async def send(self, tenant_id: str, content: bytes) -> None:
        """No-op."""

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Return False: there is no ledger."""
        return False

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[Filed]:
        """Return an empty list: there is no ledger."""
        return []

    async def page(self, tenant_id: str, of: queries.EntryFilter) -> LedgerPage:
        """Return an empty page: there is no ledger."""
        return LedgerPage([])

    async def token(self, tenant_id: str, who: wire.Principal, until: float) -> str | None:
        """Return None: there is no ledger."""
        return None

    async def close(self) -> None:
        """No-op."""


def open_sink(settings: Settings) -> Standalone:
    """Return the sink of standalone mode."""
    return Standalone()


if TYPE_CHECKING:
    _: type[Sink] = Standalone
