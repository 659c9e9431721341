"""What bootstrap says of the ledger: where it is, and for a worker a key of its own there (spec 20.5).

A worker's key is issued by the ledger itself, for one principal of one tenant and an hour, so what the worker states
there is bound to it.  A ledger that issues no keys gives workers none, and the gate's own token is nobody else's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from asyncgate import Caller, Engine, Extension
from asyncgate.parts.model.wire import Bootstrap, LedgerLag, Principal, Routing, Welcome
from asyncgate.parts.receipts.sinks import Outage, Refusal, ledger_profile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncgate import Instead
    from asyncgate.parts.receipts.sinks import Sink

log = logging.getLogger("asyncgate.ledger")

GOOD_SECONDS, RENEW_SECONDS = 3600.0, 1800.0    # that a key lives, and that must be left of one that is given again
MOST_TOKENS = 10_000           # keys; who comes after that long is issued another one

Holder = tuple[str, str, str]       # tenant, kind and id


class Routes(Extension):
    """Tells callers of bootstrap about the ledger."""

    def __init__(self, engine: Engine, sink: Sink, lag: Callable[[str], Awaitable[LedgerLag]]) -> None:
        self.engine, self.sink, self.lag = engine, sink, lag
        self.tokens: OrderedDict[Holder, tuple[str, float]] = OrderedDict()     # and until when each is good

    def instead(self) -> Mapping[str, Instead]:
        """Return what tells of the ledger."""
        return {"bootstrap": self.bootstrap}

    async def bootstrap(self, engine: Engine, caller: Caller, ask: Bootstrap) -> Welcome:
        """Begin a session, and say where receipts go and how far they lag, where they stay here as well."""
        reply = await Engine.bootstrap(engine, caller, ask)
        await self.tell(caller, engine.whose(caller, ask), reply)
        return reply

    async def tell(self, caller: Caller, who: Principal, reply: Welcome) -> None:
        """Add to a bootstrap packet what integrated mode has to say (20.5, 20.10)."""
        lag = await self.lag(caller.tenant_id)
        reply.receipt_ledger_lag = lag if lag.waiting or lag.parked or lag.circuit != "closed" else None
        settings = self.engine.settings
        if settings.worker_bootstrap.include_memorygate_routing:
            reply.receipt_routing = Routing(settings.receipt_mode, settings.ledger.url, ledger_profile(settings),
                                            False, await self._token(caller, who))

    async def _token(self, caller: Caller, who: Principal) -> str | None:
        """Return a worker's own key at the ledger; nobody gets another's."""
        its_own = caller.principal.same(who) or not caller.bound
        if who.kind != "worker" or not its_own or not self.engine.settings.ledger.worker_tokens:
            return None
        holder, now = (caller.tenant_id, who.kind, who.id), self.engine.backend.now()
        if (held := self.tokens.get(holder)) is not None and held[1] - now > RENEW_SECONDS:
            return held[0]
        try:
            token = await self.sink.token(caller.tenant_id, who, now + GOOD_SECONDS)
        except (Outage, Refusal) as no:
            log.warning("the ledger issues no key for %s: %s", who, no)
            return None
        if token is not None:
            self.tokens[holder] = (token, now + GOOD_SECONDS)
            self.tokens.move_to_end(holder)
            while len(self.tokens) > MOST_TOKENS:
                self.tokens.popitem(last=False)
        return token
