"""Upkeep's job for webhooks: deletes what is listed long enough, with webhooks of ended tasks, and ends removals."""

from __future__ import annotations

from functools import partial

from asyncgate import Engine, Work
from asyncgate.extras.webhooks.admin import AT_ONCE, begin_removal, change_rows, finish_removal, keys_of
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import queries, stored, stored_webhooks
from asyncgate.parts.model.durations import DAY_SECONDS


class DeliveryPruner:
    """Deletes the rows of deliveries that ended webhooks.log_days ago."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Go through the endpoints of all tenants; return how many rows were deleted."""
        if not await self.engine.leads("webhook-log"):
            return 0        # another process does
        done = 0
        for tenant_id in await self.engine.backend.tenants():
            async for webhook in read_rows(self.engine, tenant_id, stored_webhooks.Webhook):
                if webhook.state == "removing" or (webhook.task_id and await self._is_over(tenant_id, webhook)):
                    await self.engine.change(tenant_id, partial(self._begin, webhook.webhook_id),
                                             *keys_of(webhook.webhook_id))
                    await finish_removal(self.engine, tenant_id, webhook.webhook_id)
                else:
                    done += await self._prune(tenant_id, webhook.webhook_id)
        return done

    async def _is_over(self, tenant_id: str, webhook: stored_webhooks.Webhook) -> bool:
        """Whether the webhook of a task is to go: it has ended long enough ago, or its task is gone."""
        if (snapshot := await self.engine.backend.task(tenant_id, webhook.task_id)) is None:
            return True
        is_still = webhook.state == "ended" or (webhook.state != "active" and snapshot[0].completed_at is not None)
        return is_still and max(webhook.updated_at, snapshot[0].completed_at or 0.0) < self._until

    def _begin(self, webhook_id: str, work: Work) -> None:
        row = work.find_record(stored_webhooks.Webhook, webhook_id)
        if row is not None and row.state != "removing":
            begin_removal(work, row)

    @property
    def _until(self) -> float:
        return self.engine.backend.now() - self.engine.settings.webhooks.log_days * DAY_SECONDS

    async def _prune(self, tenant_id: str, webhook_id: str) -> int:
        """Delete old rows of an endpoint; rows are in the order of events, so the old ones come first."""
        done, until = 0, self._until
        for state in ("delivered", "parked"):
            while rows := await self._find_old(tenant_id, webhook_id, state, until):
                await self._drop(tenant_id, rows, until)
                done += len(rows)
        return done

    async def _find_old(self, tenant_id: str, webhook_id: str, state: str,
                        until: float) -> list[stored_webhooks.WebhookDelivery]:
        rows = await self.engine.backend.page(tenant_id, queries.DeliveryFilter(webhook_id, state, None, AT_ONCE))
        return [row for row in rows if row.last_at is not None and row.last_at < until]

    async def _drop(self, tenant_id: str, rows: list[stored_webhooks.WebhookDelivery], until: float) -> None:
        def drop(work: Work) -> None:
            for row in rows:
                now = work.find_record(stored_webhooks.WebhookDelivery, *stored.key_of(row))
                if now is not None and now.last_at == row.last_at:      # it may have been replayed meanwhile
                    work.drop_record(stored_webhooks.WebhookDelivery, *stored.key_of(row))
        caller = self.engine.make_own_caller(tenant_id)
        await change_rows(self.engine, caller, tenant_id,
                          [(stored_webhooks.WebhookDelivery, stored.key_of(row)) for row in rows], drop)
