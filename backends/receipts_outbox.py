"""The outbox: each receipt is rendered and kept in the transaction of its change, and sent after the commit.

State > Receipt > Delivery (spec 20.12): nothing that a caller waits for waits for the ledger, and nothing is lost
between the commit and the moment when the ledger has answered, whichever process dies in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any

from asyncgate import Caller, Outgoing
from asyncgate.backends.receipts_sinks import open_sink

if TYPE_CHECKING:
    from asyncgate import Engine, Work


class Ledger:
    """What a gate in integrated mode has beside its database."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sink = engine, open_sink(engine.settings)

    def posting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Let a write method also put the receipts that it writes on their way."""
        @wraps(run)
        def posted(engine: Engine, work: Work, caller: Caller, ask: Any) -> Any:
            before = len(work.written)
            reply = run(engine, work, caller, ask)
            for receipt in tuple(islice(work.written.values(), before, None)):
                task, lease = work.tasks.get(receipt.task_id), work.leases.get(receipt.task_id)
                content = self.sink.render(work.tenant_id, receipt, task, lease)
                if content is not None:
                    row = Outgoing(receipt.receipt_id, receipt.task_id, content.decode(), work.now)
                    work.post(row, skeleton=self.sink.reads)
            return reply
        return posted
