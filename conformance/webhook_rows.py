"""Rows of webhooks, for tests of what happens to every table."""

from __future__ import annotations

from asyncgate import Work
from asyncgate.parts.model import stored_webhooks

WEBHOOK_ID = "webhook"


def keep_webhooks(work: Work, mark: str, webhook_id: str = WEBHOOK_ID) -> None:
    """Store rows of each kind: an endpoint that is disabled, one of a task that is sealed, and two deliveries."""
    work.keep_record(stored_webhooks.Webhook(
        webhook_id, "https://hooks.invalid/", mark, '["task.failed"]', "[]", "secret", None, None, "", "disabled",
        mark, work.now, mark, work.now))
    work.keep_record(stored_webhooks.Webhook(
        f"{webhook_id}.0", "https://hooks.invalid/", mark, "[]", "[]", "secret", None, None, "", "disabled", mark,
        work.now, mark, work.now, task_id=webhook_id, headers="sealed", form="a2a"))
    work.keep_record(stored_webhooks.WebhookHead(1, 1))
    for id in ("delivery", "delivery-2"):
        work.keep_record(stored_webhooks.WebhookDelivery(webhook_id, id, "task.failed", "", "parked", 1, work.now,
                                                         work.now, None, 500,
                                                         mark, 1.5))
