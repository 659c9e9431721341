"""The sink of standalone mode: receipts stay in the gate's own database, whole, and go nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncgate.parts.receipts.sinks import Filed, LedgerPage

if TYPE_CHECKING:
    from asyncgate.parts.model.queries import EntryFilter
    from asyncgate.parts.model.settings import Settings
    from asyncgate.parts.model.stored import Lease, Receipt, Task
    from asyncgate.parts.model.wire import Principal
    from asyncgate.parts.receipts.sinks import Sink


class NoCustody:
    """The custody methods of a sink whose ledger keeps no custody."""

    def handed(self, receipt: Receipt, task: Task, lease: Lease | None = None, by_worker: bool = False) -> str | None:
        """Return nothing: this ledger keeps no custody."""
        return None

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Undo nothing: this ledger holds nobody to what it was told."""
        return None

    def taken_back(self, receipt_id: str, task: Task, lease: Lease | None = None) -> str | None:
        """Return nothing: this ledger keeps no custody."""
        return None

    def handover(self, content: bytes) -> bytes | None:
        """Leave it all to the worker."""
        return None


class Standalone(NoCustody):
    """Sends nothing: receipts stay in the database."""

    reads = binds = False

    def render(self, tenant_id: str, receipt: Receipt, task: Task | None, lease: Lease | None = None) -> bytes | None:
        """Send nothing."""
        return None

    def body(self, content: bytes) -> bytes:
        """Return what is there."""
        return content

    async def send(self, tenant_id: str, content: bytes) -> None:
        """Do nothing."""

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Find nothing."""
        return False

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[Filed]:
        """Find nothing."""
        return []

    async def page(self, tenant_id: str, of: EntryFilter) -> LedgerPage:
        """Find nothing."""
        return LedgerPage([])

    async def token(self, tenant_id: str, who: Principal, until: float) -> str | None:
        """Return none: this ledger issues no keys."""
        return None

    async def close(self) -> None:
        """Do nothing."""


def open_sink(settings: Settings) -> Standalone:
    """Open nothing."""
    return Standalone()


if TYPE_CHECKING:
    _: type[Sink] = Standalone
