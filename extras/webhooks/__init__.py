"""Webhooks: a tenant is told of its events by HTTP, at least once, in order per task, signed as Standard Webhooks say.

An admin adds endpoints for the events of the tenant (`admin.py`), whoever may read a task those for this one task
(`of_tasks.py`).

**Nothing is written when an event happens.**  Receipts and usage events never change, and readers get them in the order
of commits, so each endpoint has a cursor over them, its `position`, and an event costs its transaction nothing.
Every event up to the position is settled: it is not wanted, it is delivered, or it has a row in `webhook_deliveries`
that waits for its next attempt.  The position and the rows are stored together, after the attempts.  So a process that
is killed at any moment has lost nothing; the next one may deliver again what was not stored yet, under the same id.

**One process of many delivers** (`Engine.leads`); when it dies, another takes over.  Each endpoint has a courier
(`sending.py`) of its own with places of its own, so one that hangs delays no other.  The outbox of the ledger, which
looks alike, has a row for each receipt because it also keeps their bodies, and one receiver for all tenants.

**A failure** keeps its event as a waiting row, and the later events of its task behind it; other tasks go on.  After
MOST_FAILURES failures in a row the circuit of an endpoint is open: only its oldest event is tried, with growing pauses,
until one succeeds.  An endpoint that fails for days is parked, and the admins of its tenant are told.

**Every connection** goes through the guard of outgoing calls (`parts/process/outgoing.py`): it looks the host up each
time, and calls no private address.  No redirect is followed, and no answer is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from asyncgate import Engine, Extension, News
from asyncgate.extras.webhooks.sources import has_event, has_usage
from asyncgate.parts.model import queries, stored, stored_webhooks
from asyncgate.parts.model.walking import walk_rows

if TYPE_CHECKING:
    from asyncgate import Work
    from asyncgate.extras.webhooks.following import Followers
    from asyncgate.extras.webhooks.post import Post
    from asyncgate.extras.webhooks.sending import Courier, Places

log = logging.getLogger("asyncgate.webhooks")
JOB = "webhooks"            # which one process of many does
ALONE_SECONDS = 30.0        # between looks of a process that hears of every commit itself
TENANTS_A_SECOND = 20       # that a look may call
STOP_SECONDS = 5.0          # how long a stopping gate waits for answers


Couriers = defaultdict[str, "dict[str, Courier]"]       # by tenant and endpoint


Render = Callable[[str, stored.Receipt], Awaitable["bytes | None"]]     # of a tenant; None: its task is gone


class Forms(Extension):
    """What another extra posts of the events of a task, by the form that a webhook asks for."""

    def __init__(self, renders: dict[str, Render]) -> None:
        self.renders = renders


class Bell(Extension):
    """Calls the couriers of a tenant when it has new events; a gate without couriers has no bell."""

    def __init__(self, couriers: Couriers, followers: dict[str, Followers], operator: str) -> None:
        self.couriers, self.followers, self.operator = couriers, followers, operator

    def after_commit(self, work: Work) -> None:
        """Call the couriers that want an event of a batch."""
        for courier in self.couriers.get(work.tenant_id, {}).values():
            if has_event(work, courier.webhook):
                courier.hear(work.tenant_id)
        if (followers := self.followers.get(work.tenant_id)) is not None:
            followers.hear(work.written.values())
        theirs = self.couriers.get(self.operator)
        if theirs is not None and work.tenant_id != self.operator and has_usage(work):
            for courier in theirs.values():
                if courier.webhook.reached is not None:
                    courier.hear(work.tenant_id)

    def hear_news(self, news: News) -> None:
        """Call the couriers of a tenant in which another process has committed something."""
        for courier in self.couriers.get(news.tenant_id, {}).values():
            courier.call()
        if (followers := self.followers.get(news.tenant_id)) is not None:
            followers.scout.call()


class Webhooks(Extension):
    """Has a courier for each endpoint, while this process delivers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.couriers, self.followers = Couriers(dict), dict[str, "Followers"]()
        self.bell: Bell | None = None
        self.looking: asyncio.Task[None] | None = None
        self.looks: set[asyncio.Task[None]] = set()
        self.turns = asyncio.Lock()
        self.post: Post | None = None
        self.places: Places | None = None

    async def __aenter__(self) -> Webhooks:
        self.engine.extend(self)
        self.looking = asyncio.create_task(self._look_again_and_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.withdraw(self)
        running = [task for task in (self.looking, *self.looks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._stop(STOP_SECONDS)
        if self.post is not None:
            await self.post.close()

    # When to deliver.

    def open_post(self) -> Post:
        """Return what sends events from this process."""
        if self.post is None:
            from asyncgate.extras.webhooks.post import Post
            self.post = Post(self.engine.settings)
        return self.post

    def look_soon(self, tenant_id: str) -> None:
        """Look at a tenant's endpoints again: an admin has changed them or their deliveries."""
        self.looks.add(look := asyncio.create_task(self._look_once(tenant_id)))
        look.add_done_callback(self.looks.discard)

    async def _look_once(self, tenant_id: str) -> None:
        with contextlib.suppress(Exception):    # the database is away: already logged, and the next look comes
            if await self.engine.leads(JOB):
                await self._look(tenant_id)

    async def _look_again_and_again(self) -> None:
        """Look for endpoints and events that nobody has told of: at first, of a dead process, of other processes."""
        while True:
            tenants: list[str] = []
            with contextlib.suppress(Exception):
                if not await self.engine.leads(JOB):
                    await self._stop(0.0)
                else:
                    tenants = await self.engine.backend.webhook_tenants()
                    for tenant_id in {*tenants, *self.couriers, *self.followers}:
                        await self._look(tenant_id)
            poll = ALONE_SECONDS if self.engine.is_alone() else self.engine.settings.database.poll_seconds
            await asyncio.sleep(max(poll, len(tenants) / TENANTS_A_SECOND))

    async def _stop(self, seconds: float) -> None:
        """Stop all couriers: this process ends, or another one delivers."""
        couriers = [courier for theirs in self.couriers.values() for courier in theirs.values()]
        followers = list(self.followers.values())
        self.couriers.clear()
        self.followers.clear()
        self._hang_bell()
        await asyncio.gather(*(courier.close(seconds) for courier in couriers),
                             *(theirs.close(seconds) for theirs in followers))

    async def _look(self, tenant_id: str) -> None:
        """Have a courier for each endpoint of a tenant, and call it."""
        from asyncgate.extras.webhooks.gathering import Gatherer  # the HTTP client is large, and few gates need it
        from asyncgate.extras.webhooks.sending import Courier, Places

        # Order: one look after the other.  One that reads before an endpoint is added, and goes on when another one has
        # given it a courier, would take that away.
        async with self.turns:
            # Security: where another tenant was the operator's before, its endpoints are told of other tenants no more.
            operator = self.engine.settings.default_tenant_id
            rows = [row async for row in walk_rows(self.engine.backend, tenant_id, queries.OpenWebhooks())
                    if row.reached is None or tenant_id == operator]
            webhooks = {row.webhook_id: row for row in rows if not row.task_id}
            post, self.places = self.open_post(), self.places or Places()
            await self._follow_tasks(tenant_id, [row for row in rows if row.task_id], post, self.places)
            theirs = self.couriers[tenant_id]
            for webhook_id, row in webhooks.items():
                if webhook_id not in theirs:
                    kind = Courier if row.reached is None else Gatherer
                    theirs[webhook_id] = kind(self.engine, post, self.places, tenant_id, row)
                theirs[webhook_id].call()
            for webhook_id in theirs.keys() - webhooks.keys():
                await theirs.pop(webhook_id).close(0.0)
            if not theirs:
                del self.couriers[tenant_id]
            self._hang_bell()

    async def _follow_tasks(self, tenant_id: str, rows: list[stored_webhooks.Webhook], post: Post,
                            places: Places) -> None:
        """Have a courier for each webhook of a task."""
        from asyncgate.extras.webhooks.following import Followers

        followers = self.followers.get(tenant_id)
        if followers is None and rows:
            followers = self.followers[tenant_id] = Followers(self.engine, post, places, tenant_id)
        if followers is not None:
            await followers.take_over(rows)
            if not rows:
                await self.followers.pop(tenant_id).close(0.0)
            elif not self.engine.is_alone():
                followers.scout.call()

    def _hang_bell(self) -> None:
        """Have a bell while there are couriers."""
        has_couriers = bool(self.couriers or self.followers)
        if self.bell is None and has_couriers:
            bell = Bell(self.couriers, self.followers, self.engine.settings.default_tenant_id)
            self.engine.extend(bell)
            self.bell = bell
        elif self.bell is not None and not has_couriers:
            self.engine.withdraw(self.bell)
            self.bell = None
