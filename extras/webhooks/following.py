"""Couriers of the webhooks of tasks, and what calls them.

A tenant may have hundreds, so no batch is shown to each: the task of a receipt tells which of them to call.  What other
processes commit is found by reading the receipts of the tenant, once for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

from asyncgate import Engine, Work
from asyncgate.extras.webhooks import Forms, events
from asyncgate.extras.webhooks.admin import end_of_task, keys_of
from asyncgate.extras.webhooks.post import Attempt, Post
from asyncgate.extras.webhooks.sealing import open_headers
from asyncgate.extras.webhooks.sending import BROKEN_SECONDS, LOOK_REST_SECONDS, PAGE, Courier, Places, read_orders
from asyncgate.extras.webhooks.sources import Happened, find_position
from asyncgate.parts.model import queries, stored, stored_webhooks, wire
from asyncgate.parts.process.rounds import Rounds

log = logging.getLogger("asyncgate.webhooks")
THE_END = "task.result_ready"       # the last receipt of a task that somebody waits for
SEALED_ELSEWHERE = "not sent: its headers were sealed in another database; make it again"


class TaskCourier(Courier):
    """Delivers the events of one task, until it has ended and all of them are delivered."""

    async def _deliver_page(self) -> bool:
        is_idle = await super()._deliver_page()
        if is_idle and await self._has_told_the_end():
            await self.engine.change(self.tenant_id, self._end, *keys_of(self.webhook.webhook_id))
        return is_idle

    async def _has_told_the_end(self) -> bool:
        """Whether the position is behind everything that somebody waits for."""
        if await self.engine.backend.task(self.tenant_id, self.webhook.task_id) is None:
            return True
        last = await self.engine.backend.page(self.tenant_id, queries.ReceiptFilter(
            None, self.webhook.task_id, THE_END, None, 1, newest=True))
        return bool(last) and last[0].receipt_id <= self.position

    def _end(self, work: Work) -> None:
        row = work.find_record(stored_webhooks.Webhook, self.webhook.webhook_id)
        if row is not None and row.state == "active" and row.position <= self.position:     # else it was made again
            end_of_task(work, row, "ended")

    async def _list_concerned(self) -> list[wire.Principal]:
        """Return who made the webhook."""
        kind, _, id = self.webhook.created_by.partition(" ")
        return [wire.Principal(kind, id)]

    async def _render(self, event: Happened) -> bytes | None:
        if self.webhook.form == events.AS_RECEIPT or not isinstance(event.what, stored.Receipt):
            return event.render()
        forms = self.engine.find_extension(Forms)
        render = forms.renders.get(self.webhook.form) if forms is not None else None
        return None if render is None else await render(self.tenant_id, event.what)

    async def _send(self, headers: dict[str, str], body: bytes) -> Attempt:
        own = open_headers(self.engine.backend.secret, self.tenant_id, self.webhook)
        return Attempt(None, SEALED_ELSEWHERE) if own is None else await super()._send({**own, **headers}, body)


class Followers:
    """The couriers of the tasks of one tenant."""

    def __init__(self, engine: Engine, post: Post, places: Places, tenant_id: str) -> None:
        self.engine, self.post, self.places, self.tenant_id = engine, post, places, tenant_id
        self.by_task = defaultdict[str, dict[str, TaskCourier]](dict)
        self.position = ""      # the last receipt of which the couriers were told
        self.scout = Rounds(self._scout, LOOK_REST_SECONDS)

    async def take_over(self, rows: Iterable[stored_webhooks.Webhook]) -> None:
        """Have a courier for each webhook, and call those that are new or changed."""
        self.position = self.position or await find_position(self.engine, self.tenant_id, frozenset())
        gone = {id: courier for couriers in self.by_task.values() for id, courier in couriers.items()}
        for row in rows:
            courier = gone.pop(row.webhook_id, None)
            if courier is None:
                courier = self.by_task[row.task_id][row.webhook_id] = TaskCourier(
                    self.engine, self.post, self.places, self.tenant_id, row)
                courier.call()
            elif read_orders(row) != read_orders(courier.webhook):
                courier.call()
        for id, courier in gone.items():
            theirs = self.by_task[courier.webhook.task_id]
            await theirs.pop(id).close(0.0)
            if not theirs:
                del self.by_task[courier.webhook.task_id]

    def hear(self, receipts: Iterable[stored.Receipt]) -> None:
        """Call the couriers of the tasks of some receipts."""
        for task_id in {receipt.task_id for receipt in receipts} & self.by_task.keys():
            for courier in self.by_task[task_id].values():
                courier.call()

    async def _scout(self) -> None:
        """Look for what other processes have committed."""
        try:
            receipts = await self.engine.backend.page(
                self.tenant_id, queries.ReceiptFilter(None, None, None, self.position or None, PAGE))
        except Exception:
            log.exception("events of tasks of tenant %s are not looked for now", self.tenant_id)
            self.scout.call_later(BROKEN_SECONDS)
            return
        self.hear(receipts)
        if receipts:
            self.position = receipts[-1].receipt_id
            self.scout.called = True

    async def close(self, seconds: float) -> None:
        """Stop all couriers."""
        await self.scout.close(0.0)
        couriers = [courier for theirs in self.by_task.values() for courier in theirs.values()]
        await asyncio.gather(*(courier.close(seconds) for courier in couriers))
