"""Add the ledger to the reply of bootstrap: its address, its lag, and a key of its own for a worker (spec 20.5).

The ledger itself issues a worker's key, for one principal of one tenant and for an hour, so every receipt that the
worker stores with it is bound to the worker.  If the ledger issues no keys, the worker gets none.  The gate never hands
out its own token.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asyncgate import Caller, Engine, Extension
from asyncgate.extras.ledger.sinks import Outage, Refusal
from asyncgate.parts.model import wire
from asyncgate.parts.process.kit import Bounded
from asyncgate.parts.receipts.sealing import ledger_profile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncgate import Instead
    from asyncgate.extras.ledger.sinks import Sink

log = logging.getLogger("asyncgate.ledger")

GOOD_SECONDS, RENEW_SECONDS = 3600.0, 1800.0    # lifetime of a key; minimum left of a cached key that is given again

Holder = tuple[str, str, str]       # tenant, kind and id


class Routes(Extension):
    """Adds to the reply of bootstrap what a caller must know of the ledger."""

    def __init__(self, engine: Engine, sink: Sink, lag: Callable[[str], Awaitable[wire.LedgerLag]]) -> None:
        self.engine, self.sink, self.lag = engine, sink, lag
        self.tokens: Bounded[Holder, tuple[str, float]] = Bounded()     # and until when each is good

    def substitutes(self) -> Mapping[str, Instead]:
        """Return the operation that tells of the ledger."""
        return {"bootstrap": self.bootstrap}

    async def bootstrap(self, engine: Engine, caller: Caller, ask: wire.Bootstrap) -> wire.Welcome:
        """Begin a session; tell where receipts are sent and how far the ledger lags."""
        reply = await Engine.bootstrap(engine, caller, ask)
        await self.add_routing(caller, engine.require_subject(caller, ask), reply)
        return reply

    async def add_routing(self, caller: Caller, who: wire.Principal, reply: wire.Welcome) -> None:
        """Add the ledger's lag, its address and a worker's key to a reply of bootstrap (20.5, 20.10)."""
        lag = await self.lag(caller.tenant_id)
        behind = lag.waiting or lag.parked or lag.unsettled or lag.circuit != "closed"
        reply.receipt_ledger_lag = lag if behind else None
        settings = self.engine.settings
        if settings.worker_bootstrap.include_memorygate_routing:
            reply.receipt_routing = wire.Routing(settings.receipt_mode, settings.ledger.address,
                                                 ledger_profile(settings), False, await self._token(caller, who))

    async def _token(self, caller: Caller, who: wire.Principal) -> str | None:
        """Return a worker's own key for the ledger; a caller never gets another worker's key."""
        its_own = caller.principal.same(who) or not caller.bound
        if who.kind != "worker" or not its_own or not self.engine.settings.ledger.worker_tokens:
            return None
        holder, now = (caller.tenant_id, who.kind, who.id), self.engine.backend.now()
        if (cached := self.tokens.get(holder)) is not None and cached[1] - now > RENEW_SECONDS:
            return cached[0]
        try:
            token = await self.sink.token(caller.tenant_id, who, now + GOOD_SECONDS)
        except (Outage, Refusal) as refusal:
            log.warning("the ledger issued no key for %s: %s", who, refusal)
            return None
        if token is not None:
            self.tokens.put(holder, (token, now + GOOD_SECONDS))
        return token
