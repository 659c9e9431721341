"""The courier of an endpoint for all tenants: it gathers the usage events of each (spec 21.6.4).

Ids of different tenants are not in the order of commits, so it has a position in the usage of each tenant; a tenant
that was created later has none and is read from the beginning.  A commit of usage events in this process says in which
tenant to look.  What another process has committed is found by a look at all tenants, once in each five minutes: so
often there is a new event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncgate.extras.webhooks.sending import PAGE, Courier
from asyncgate.extras.webhooks.sources import Happened, read_usage
from asyncgate.parts.model import stored_webhooks
from asyncgate.parts.model.counted import PERIOD_SECONDS

MOST_TENANTS = 200      # of one page


class Gatherer(Courier):
    """Delivers the usage events of all tenants to one endpoint."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.pages: dict[str, list[str]] = {}       # by tenant, the events behind its position, as last read
        self.unread: dict[str, None] = {}           # the tenants to look at, in their order
        self.all_at = 0.0                           # when to look at all

    def hear(self, tenant_id: str) -> None:
        """Look at a tenant."""
        self.unread[tenant_id] = None
        self.call()

    def _take_over(self, webhook: stored_webhooks.Webhook) -> None:
        super()._take_over(webhook)
        if self.reached is None:
            self.reached, self.all_at = msgspec.json.decode(webhook.reached or "{}", type=dict[str, str]), 0.0

    def _begin_at(self, position: str) -> None:
        super()._begin_at(position)
        self.reached, self.pages = None, {}

    async def _read_page(self) -> list[Happened]:
        """Read what is new in some tenants; those that are left have their turn next."""
        self.unread.update(dict.fromkeys(self.pages))       # what was not delivered is read again
        if (now := self.engine.backend.now()) >= self.all_at:
            self.unread.update(dict.fromkeys(await self.engine.backend.tenants()))
            self.all_at = now + PERIOD_SECONDS
        self.pages, happened = {}, list[Happened]()
        for tenant_id in list(self.unread)[:MOST_TENANTS]:
            if (most := PAGE - len(happened)) == 0:
                break
            del self.unread[tenant_id]      # before it is read: what is committed meanwhile is heard of
            place = (self.reached or {}).get(tenant_id, "")
            events = await read_usage(self.engine, tenant_id, self.webhook.position, place, most)
            if len(events) == most:
                self.unread[tenant_id] = None
            if events:
                self.pages[tenant_id] = [event.event_id for event in events]
            happened += events
        self.called |= bool(self.unread)
        return happened

    def _advance(self) -> None:
        """Move each tenant's position past what is settled."""
        for tenant_id, page in self.pages.items():
            if self.reached is not None and (place := self._take_settled(page)) is not None:
                self.reached[tenant_id] = place
        self.pages = {tenant_id: page for tenant_id, page in self.pages.items() if page}
