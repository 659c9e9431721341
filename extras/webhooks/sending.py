"""The courier of an endpoint: it reads what is new, delivers it, and stores what became of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs
from asyncgate.extras.webhooks.events import secrets_of, sign
from asyncgate.extras.webhooks.post import STATUS_GONE, Attempt, Post
from asyncgate.extras.webhooks.sources import Happened, find_event, read_behind
from asyncgate.parts.identity.notices import list_admins, tell_admins
from asyncgate.parts.model import queries, stored, stored_webhooks, wire
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.process.rounds import Rounds, store_meanwhile

if TYPE_CHECKING:
    from asyncgate import Work

log = logging.getLogger("asyncgate.webhooks")
PAGE = 100                  # receipts that are read, delivered and settled together
MOST_KEPT = 1000         # failed events of an endpoint; with more of them it gets no new ones
MOST_FAILURES = 5           # in a row; then only the oldest event is tried, until it succeeds
MOST_OF_TENANT, MOST_OF_ALL = 32, 256       # deliveries on their way at once
LOOK_REST_SECONDS = 0.05         # between two looks at new receipts: what comes meanwhile shares the next one
RESULTS_SECONDS = 1.0        # how often results are stored while others are still on their way
KEEP_SECONDS = 60.0         # how often a position is stored that has passed only events that are not wanted
BROKEN_SECONDS = 5.0        # until the next look when the database has not answered

# What an admin decides of an endpoint, and the courier obeys in the middle of a page, too.
read_orders = attrgetter("state", "url", "types", "principals", "secret_id", "previous_id", "previous_until", "headers",
                         "form")


class Results(Struct):
    """What became of some events since it was last stored."""

    rows: dict[str, stored_webhooks.WebhookDelivery] = field(default_factory=dict)
    succeeded_at: float | None = None
    gone: bool = False              # the receiver wants no more

    def take(self) -> Results:
        """Remove and return it, to be stored."""
        taken = replace(self)
        self.rows, self.succeeded_at, self.gone = {}, None, False
        return taken


class Settled(wire.Ask, kw_only=True):
    """Internal request of a courier: store what became of some events."""

    webhook_id: str
    url: str                        # that was called
    expected: str                   # the stored position, unless an admin has changed it meanwhile
    position: str
    outcome: Results
    failing_since: float | None
    known_failing_since: float | None   # as the courier last read or stored it
    reason: str | None              # of the last failure
    reached: dict[str, str] | None  # the positions by tenant, of an endpoint for all
    park: bool
    whom: list[wire.Principal]           # whom to tell if the endpoint or an event is given up


class Places:
    """How many deliveries of a tenant, and of all, may be on their way at once."""

    def __init__(self) -> None:
        self.of_all = asyncio.Semaphore(MOST_OF_ALL)
        self.of_tenant: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOST_OF_TENANT))


class Courier(Rounds):
    """Delivers the events of one endpoint, one page of receipts after another."""

    def __init__(self, engine: Engine, post: Post, places: Places, tenant_id: str,
                 webhook: stored_webhooks.Webhook) -> None:
        super().__init__(self._deliver, LOOK_REST_SECONDS)
        self.engine, self.post, self.tenant_id, self.webhook = engine, post, tenant_id, webhook
        self.ours, self.all_places = engine.settings.webhooks, places
        self.places = asyncio.Semaphore(self.ours.parallel)
        self.stored = self.position = webhook.position      # as stored, and as far as this process is
        self.stored_at = engine.backend.now()
        self.page: list[str] = []                           # the receipts behind the position, as last read
        self.settled: set[str] = set()                      # those of them that are delivered, kept or not wanted
        self.reached: dict[str, str] | None = None          # of an endpoint for all tenants: how far it is in each
        self.fresh: dict[str, Happened] = {}                 # those of them that are to be delivered
        self.failing_since, self.reason = webhook.failing_since, webhook.reason
        self.failures = 0 if webhook.failing_since is None else MOST_FAILURES       # in a row
        self.outcome = Results()
        self.eager = False          # whether to try again now all that waits

    # When it runs.

    def hear(self, tenant_id: str) -> None:
        """Run now, because a tenant has new events."""
        self.call()

    async def _deliver(self) -> None:
        try:
            await self._deliver_page()
        except Exception:
            log.exception("events of tenant %s are not delivered now: the database does not answer", self.tenant_id)
            self._begin_at(self.stored)     # what is not stored is delivered again
            self.called = False
            self.call_later(BROKEN_SECONDS)

    # One page.

    @property
    def is_down(self) -> bool:
        """Whether the circuit is open: only the oldest event is tried."""
        return self.failures >= MOST_FAILURES

    async def _deliver_page(self) -> bool:
        """Deliver what waits and is due, and what is new; plan the next run; return whether nothing is left."""
        webhook = await self._find_endpoint()
        if webhook is None:
            return False
        self._take_over(webhook)
        rows = await self.engine.backend.page(
            self.tenant_id, queries.DeliveryFilter(webhook.webhook_id, "waiting", None, MOST_KEPT))
        if not (rows and self.is_down) and len(rows) < MOST_KEPT:
            rows += await self._read_new({row.delivery_id for row in rows})
        left = {row.delivery_id: row for row in rows}
        await self._send_and_settle(rows[:1] if self.is_down else rows, left)
        if (pause := self._find_pause(left.values())) is not None:
            self.call_later(pause)
        return pause is None and not self.page

    async def _find_endpoint(self) -> stored_webhooks.Webhook | None:
        """Return the endpoint; None if nothing is delivered to it now."""
        webhook = await self.engine.backend.record(self.tenant_id, stored_webhooks.Webhook, self.webhook.webhook_id)
        account = await self.engine.backend.record(self.tenant_id, stored.Account)
        is_suspended = account is not None and account.suspended_at is not None
        return None if webhook is None or webhook.state != "active" or is_suspended else webhook

    async def _is_unchanged(self) -> bool:
        """Whether the page may go on: if the endpoint is not as the page began with it, the next page begins."""
        webhook = await self._find_endpoint()
        if webhook is not None and read_orders(webhook) == read_orders(self.webhook):
            return True
        self.called = True
        return False

    def _take_over(self, webhook: stored_webhooks.Webhook) -> None:
        """Take over what an admin has changed: a new position is where to go on, and a reset ends the failures."""
        self.webhook = webhook
        if webhook.position != self.stored:
            self._begin_at(webhook.position)
        if webhook.failing_since is None and self.failing_since is not None:
            self._end_failures()

    def _end_failures(self) -> None:
        """Try again now all that waits: an admin has said so."""
        self.failures, self.failing_since, self.reason, self.eager = 0, None, None, True

    def _begin_at(self, position: str) -> None:
        self.stored = self.position = position
        self.outcome = Results()
        self.settled.clear()
        self.page, self.fresh = [], {}

    async def _read_new(self, waiting: set[str]) -> list[stored_webhooks.WebhookDelivery]:
        """Read the next page of events; return a new row for each that is to be delivered."""
        events, now = await self._read_page(), self.engine.backend.now()
        # Order: behind the events.  What happens after an admin's change is wanted, or not, as the change says.
        if not await self._is_unchanged():
            return []
        self.settled |= {event.event_id for event in events if event.event_id in waiting or not event.wanted}
        self.fresh = {event.event_id: event for event in events if event.event_id not in self.settled}
        return [stored_webhooks.WebhookDelivery(self.webhook.webhook_id, event.event_id, event.type, event.task_id,
                                                "waiting",
                                                0, now, None,
                                                now,
                                                of_tenant=None if event.tenant_id == self.tenant_id
                                                else event.tenant_id)
                for event in self.fresh.values()]

    async def _read_page(self) -> list[Happened]:
        events = await read_behind(self.engine, self.tenant_id, self.webhook, self.position, PAGE)
        self.called |= len(events) == PAGE
        self.page = [event.event_id for event in events]
        return events

    def _find_pause(self, left: Iterable[stored_webhooks.WebhookDelivery]) -> float | None:
        """Return in how many seconds an event that waits is due."""
        heads: dict[str, stored_webhooks.WebhookDelivery] = {}
        for row in left:
            if row.state == "waiting" and (row.tries or row.delivery_id not in self.fresh):
                heads.setdefault(chain_of(row), row)
        due = [row.next_at or 0.0 for row in heads.values()][:1 if self.is_down else None]
        if self.eager and due:
            return 0.0
        return max(min(due) - self.engine.backend.now(), 0.01) if due else None

    # Sending.

    async def _send_and_settle(self, rows: list[stored_webhooks.WebhookDelivery],
                               left: dict[str, stored_webhooks.WebhookDelivery]) -> None:
        """Deliver rows, those of one task in order; store the results every second."""
        chains = defaultdict[str, list[stored_webhooks.WebhookDelivery]](list)
        for row in rows:
            chains[chain_of(row)].append(row)
        await store_meanwhile(self._send_chains(list(chains.values()), left), self._settle, RESULTS_SECONDS)

    async def _send_chains(self, chains: list[list[stored_webhooks.WebhookDelivery]],
                           left: dict[str, stored_webhooks.WebhookDelivery]) -> None:
        eager, self.eager = self.eager, False
        async with asyncio.TaskGroup() as tasks:
            for chain in chains:
                tasks.create_task(self._send_chain(chain, left, eager, self.is_down))

    async def _send_chain(
            self, rows: list[stored_webhooks.WebhookDelivery], left: dict[str, stored_webhooks.WebhookDelivery],
            eager: bool, probes: bool) -> None:
        """Deliver the events of one task, until one of them must wait; new ones are kept behind it."""
        # Clock: the database's time is estimated, and a later estimate may be earlier.  If a new event had to wait for
        # its own time, those behind it, which are kept, would pass it.
        due = eager or rows[0].tries == 0 or (rows[0].next_at or 0.0) <= self.engine.backend.now()
        for at, row in enumerate(rows):
            async with self.places, self.all_places.of_tenant[self.tenant_id], self.all_places.of_all:
                if self.closed or (self.is_down and not probes):
                    return              # not settled: the position stays before it
                # Security: at each attempt, for a page may take minutes.  A withdrawn secret signs no more, and an
                # endpoint that was paused, moved or removed gets no more.
                if due and not await self._is_unchanged():
                    return
                done = left[row.delivery_id] = await self._try(row) if due else row
            if due:
                self._keep(done)
            if done.state == "waiting":
                for delivery in rows[at + 1:]:
                    if delivery.delivery_id in self.fresh:
                        self._keep(delivery)
                return

    def _keep(self, row: stored_webhooks.WebhookDelivery) -> None:
        """Have the row of an event stored."""
        self.outcome.rows[row.delivery_id] = row
        self.settled.add(row.delivery_id)

    async def _try(self, row: stored_webhooks.WebhookDelivery) -> stored_webhooks.WebhookDelivery:
        """Try to deliver an event once; return its row as it is then."""
        event = self.fresh.get(row.delivery_id) or await find_event(self.engine, self.tenant_id, row)
        if event is None or (body := await self._render(event)) is None:
            return replace(row, state="parked", next_at=None, reason="the event is archived or pruned",
                           last_at=self.engine.backend.now())
        now = self.engine.backend.now()
        secrets = secrets_of(self.engine.backend.secret, self.tenant_id, self.webhook, now)
        headers = sign(secrets, row.delivery_id, now, body)
        return self._note(row, await self._send(headers, body))

    async def _render(self, event: Happened) -> bytes | None:
        """Return what is posted of an event; None if it cannot be told any more."""
        return event.render()

    async def _send(self, headers: dict[str, str], body: bytes) -> Attempt:
        return await self.post.send(self.webhook.url, headers, body, self.tenant_id)

    async def _list_concerned(self) -> list[wire.Principal]:
        """Return who is told when the endpoint or an event is given up."""
        return await list_admins(self.engine, self.tenant_id)

    def _note(self, row: stored_webhooks.WebhookDelivery, attempt: Attempt) -> stored_webhooks.WebhookDelivery:
        """Note the result of an attempt; return the row of its event."""
        now = self.engine.backend.now()
        row = replace(row, tries=row.tries + 1, last_at=now, http_status=attempt.status, reason=attempt.reason,
                      took_ms=attempt.took_ms)
        if attempt.reason is None:
            if self.is_down:
                self.eager = self.called = True
            self.failures, self.failing_since, self.reason, self.outcome.succeeded_at = 0, None, None, now
            return replace(row, state="delivered", next_at=None)
        self.failures, self.reason = self.failures + 1, attempt.reason
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.outcome.gone |= attempt.status == STATUS_GONE
        log.info("webhook %s of tenant %s did not take event %s (attempt %d): %s", row.webhook_id, self.tenant_id,
                 row.delivery_id, row.tries, attempt.reason)
        if now - row.first_at >= self.ours.park_after_days * DAY_SECONDS:
            return replace(row, state="parked", next_at=None)
        pause = min(self.ours.retry_seconds * 2 ** min(row.tries - 1, 30), self.ours.max_retry_seconds)
        pause *= random.uniform(0.75, 1.25)     # no secret
        return replace(row, next_at=now + max(pause, attempt.retry_after))

    # Results.

    async def _settle(self) -> None:
        """Store what became of events since the last time, and how far all of them are settled."""
        self._advance()
        part, now = self.outcome.take(), self.engine.backend.now()
        if not part.rows and (self.position == self.stored or now - self.stored_at < KEEP_SECONDS):
            return
        park = self.is_down and now - (self.failing_since or now) >= self.ours.park_after_days * DAY_SECONDS
        gives_up = park or part.gone or any(row.state == "parked" for row in part.rows.values())
        ask = Settled(webhook_id=self.webhook.webhook_id, url=self.webhook.url, expected=self.stored,
                      position=self.position, outcome=part,
                      failing_since=self.failing_since, known_failing_since=self.webhook.failing_since,
                      reason=self.reason, park=park, reached=self.reached,
                      whom=await self._list_concerned() if gives_up else [])
        caller = self.engine.make_own_caller(self.tenant_id)
        stored: stored_webhooks.Webhook | None = await self.engine.write(store_results, load_webhook, caller, ask)
        if stored is None:
            return
        if stored.position == ask.position:
            self.stored, self.stored_at = ask.position, now
        self.webhook = replace(self.webhook, failing_since=stored.failing_since)
        if ask.failing_since is not None and stored.failing_since is None:
            self._end_failures()

    def _advance(self) -> None:
        """Move the position past the receipts that are settled, up to the first that is not."""
        self.position = self._take_settled(self.page) or self.position

    def _take_settled(self, page: list[str]) -> str | None:
        """Take what is settled from the front of a page; return the last one."""
        number = next((at for at, id in enumerate(page) if id not in self.settled), len(page))
        taken = page[:number]
        self.settled.difference_update(taken)
        del page[:number]
        return taken[-1] if taken else None


def chain_of(row: stored_webhooks.WebhookDelivery) -> str:
    """Return what is delivered in order: the events of a task, or one without a task."""
    return row.task_id or row.delivery_id


def load_webhook(needs: Needs, caller: Caller, ask: Settled) -> None:
    """Load the endpoint."""
    needs.records.add((stored_webhooks.Webhook, (ask.webhook_id,)))


def store_results(engine: Engine, work: Work, caller: Caller, ask: Settled) -> stored_webhooks.Webhook | None:
    """Store what became of events; tell admins of an endpoint, or of events, that are given up."""
    webhook = work.find_record(stored_webhooks.Webhook, ask.webhook_id)
    if webhook is None or webhook.state == "removing":
        return None
    for row in ask.outcome.rows.values():
        work.keep_record(row)
    position = ask.position if webhook.position == ask.expected else webhook.position
    gone = ask.outcome.gone and webhook.url == ask.url      # not if an admin has changed the URL meanwhile
    # An admin has ended the failures while an attempt was on its way: that attempt does not begin them again.
    was_reset = (webhook.failing_since is None and ask.known_failing_since is not None) and not gone
    new = replace(webhook, position=position, failing_since=None if was_reset else ask.failing_since,
                  succeeded_at=ask.outcome.succeeded_at or webhook.succeeded_at,
                  reason=ask.reason if webhook.state == "active" and not was_reset else webhook.reason,
                  reached=webhook.reached if ask.reached is None else move_on(webhook.reached, ask.reached))
    parked = [row for row in ask.outcome.rows.values() if row.state == "parked"]
    if webhook.state == "active" and (gone or (ask.park and not was_reset)):
        new = replace(new, state="disabled" if gone else "parked")
        give_up(engine, work, ask.whom, "webhook_gone" if gone else "webhook_parked", new)
    elif parked and work.now - (webhook.noticed_at or 0.0) >= DAY_SECONDS:      # not for each of many
        new = replace(new, noticed_at=work.now)
        give_up(engine, work, ask.whom, "delivery_parked", new, delivery_id=parked[0].delivery_id)
    work.keep_record(new)
    return new


def move_on(old: str | None, new: dict[str, str]) -> str:
    """Return the positions by tenant as they are stored; none goes back, whatever a process that was late says."""
    there = msgspec.json.decode(old or "{}", type=dict[str, str])
    return msgspec.json.encode({**there, **{id: max(place, there.get(id, "")) for id, place in new.items()}}).decode()


def give_up(engine: Engine, work: Work, whom: list[wire.Principal], kind: str, webhook: stored_webhooks.Webhook,
            **more: str) -> None:
    """Tell the admins of a tenant, or else the fallback owner, that something is not delivered any more."""
    settings = engine.settings
    nobody = wire.Principal(settings.default_fallback_owner_kind, settings.default_fallback_owner_id)
    tell_admins(engine, work, whom or [nobody], kind, webhook_id=webhook.webhook_id, endpoint=webhook.url,
                reason=webhook.reason, **more)
