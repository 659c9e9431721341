"""Where events come from: the receipts of a tenant, or its usage events; an endpoint is told of one kind.

The ids of each kind are in the order of time, so a position is an id.  Another kind of event needs a branch in each
function of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from asyncgate.extras.webhooks.events import USAGE, render_receipt, render_usage, tells_usage, wants
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.counted import PERIOD_SECONDS, write_period
from asyncgate.parts.model.ids import first_id

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.parts.model import stored_webhooks
    from asyncgate.parts.model.settings import Settings

LONGEST_PERIODS = 86_400 // PERIOD_SECONDS     # of one event


class Happened(Struct, frozen=True):
    """An event of any kind."""

    tenant_id: str              # whose
    event_id: str
    type: str
    task_id: str                # empty: it has none
    what: stored.Receipt | stored.UsageEvent
    wanted: bool = True         # by the endpoint for which it was read
    console: str = ""           # the address of the console, if it is known

    def render(self) -> bytes:
        """Return the body that is posted."""
        if isinstance(self.what, stored.Receipt):
            return render_receipt(self.tenant_id, self.what, self.console)
        return render_usage(self.tenant_id, self.what)


async def read_behind(engine: Engine, tenant_id: str, webhook: stored_webhooks.Webhook, position: str,
                      limit: int) -> list[Happened]:
    """Return what has happened behind a position, the oldest first, wanted or not."""
    if not tells_usage(webhook):
        receipts = await engine.backend.page(tenant_id, queries.ReceiptFilter(
            None, webhook.task_id or None, None, position or None, limit))
        console = find_console(engine.settings)
        return [show_as_event(tenant_id, receipt, wants(webhook, receipt), console) for receipt in receipts]
    before = write_period(read_period(position) - 1) if position else ""     # a position may be the end of a period
    events = await engine.backend.page(tenant_id, queries.Rows(stored.UsageEvent, before))
    return [show_as_event(tenant_id, event) for event in events if event.usage_event_id > position][:limit]


async def read_usage(engine: Engine, tenant_id: str, since: str, position: str, limit: int) -> list[Happened]:
    """Return usage events of a tenant that end after a time and are behind a position, if there is one; oldest first.

    Not those that begin after the time: what was used when an endpoint was added may be in an event of a whole day.
    """
    first = read_period(position) if position else read_period(since) - LONGEST_PERIODS
    events = await engine.backend.page(tenant_id, queries.Rows(stored.UsageEvent, write_period(max(first - 1, 0))))
    return [show_as_event(tenant_id, event) for event in events
            if event.usage_event_id > position and first_id(event.ends) > since][:limit]


async def find_event(engine: Engine, tenant_id: str, row: stored_webhooks.WebhookDelivery) -> Happened | None:
    """Return the event of a delivery, unless it is not stored here any more."""
    event: stored.Receipt | stored.UsageEvent | None
    tenant_id = row.of_tenant or tenant_id
    if row.type == USAGE:
        event = await engine.backend.record(tenant_id, stored.UsageEvent, write_period(read_period(row.delivery_id)))
    else:
        event = await engine.backend.receipt(tenant_id, row.delivery_id)
    return None if event is None else show_as_event(tenant_id, event, console=find_console(engine.settings))


async def find_position(engine: Engine, tenant_id: str, types: frozenset[str]) -> str:
    """Return the position behind which all happens from now on."""
    if USAGE in types:
        head = await engine.backend.record(tenant_id, stored.UsageHead)
        return "" if head is None else first_id(head.until)
    receipts = await engine.backend.page(tenant_id, queries.ReceiptFilter(None, None, None, None, 1, newest=True))
    return receipts[-1].receipt_id if receipts else ""


def has_event(work: Work, webhook: stored_webhooks.Webhook) -> bool:
    """Whether a batch has an event that an endpoint wants."""
    if tells_usage(webhook):
        return has_usage(work)
    return any(wants(webhook, receipt) for receipt in work.written.values())


def has_usage(work: Work) -> bool:
    """Whether a batch has usage events."""
    return any(kind is stored.UsageEvent for kind, _ in work.kept)


def find_console(settings: Settings) -> str:
    """Return the address of the console, if the gate has one and knows its own address."""
    return f"{settings.public_url.rstrip('/')}/console" if settings.console.enabled and settings.public_url else ""


def show_as_event(tenant_id: str, what: stored.Receipt | stored.UsageEvent, wanted: bool = True,
                  console: str = "") -> Happened:
    """Return a row as an event."""
    if isinstance(what, stored.Receipt):
        return Happened(tenant_id, what.receipt_id, what.receipt_type, what.task_id, what, wanted, console)
    return Happened(tenant_id, what.usage_event_id, USAGE, "", what, wanted)


def read_period(id: str) -> int:
    """Return the number of the five minutes in which the event of an id begins."""
    return int(id[:8] + id[9:13], 16) // 1000 // PERIOD_SECONDS
