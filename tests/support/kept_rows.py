"""Rows of the extras, for tests of what happens to every table."""

from __future__ import annotations

from asyncgate import Work
from asyncgate.parts.model import stored, stored_oauth, stored_webhooks
from asyncgate.parts.model.erased import digest_of_list

ISSUER = "https://id.example.com"
REDIRECT = "https://app.example.com/callback"
WEBHOOK_ID = "webhook"
ERASURE_ID = "01000000-0000-7000-8000-00000000e7a5"


def keep_sign_ins(work: Work, mark: str) -> None:
    """Store a row of each kind: a program, a person, a session, and what was revoked."""
    tenant, now = work.tenant_id, work.now
    work.keep_record(stored_oauth.OAuthClient(
        "client", "registered", mark, f'["{REDIRECT}"]', None, "none", None, None, None, False, False, None, now, mark,
        now))
    work.keep_record(stored_oauth.User("user", ISSUER, "1", "ada@example.com", mark, tenant, "human", "ada", "agent",
                                       None, None,
                                       mark, now))
    work.keep_record(stored_oauth.Consent("user", "client", '["tasks:read"]', REDIRECT, now))
    work.keep_record(stored_oauth.Grant(
        "grant", "user", "client", tenant, "human", "ada", "agent", '["tasks:read"]', "https://gate.example.com/mcp",
        REDIRECT, mark, mark, now, 3600, now, now + 3600))
    work.keep_record(stored_oauth.SignInLink("link", tenant, "human", "ada", "agent", None, now, now + 600))
    work.keep_record(stored_oauth.Revocation("00000001", 1, "session", "grant", now, now + 3600, now, mark, None))
    work.keep_record(stored_oauth.RevocationHead(1))


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


def keep_erasure(work: Work, mark: str) -> None:
    """Store an erasure and a row that it has changed."""
    row = stored.Erased("receipts", "a receipt that is gone", ERASURE_ID, mark, mark)
    work.keep_record(row)
    work.keep_record(stored.Erasure(ERASURE_ID, work.tenant_id, "agent", "erased-0", "[]", "", "ended", "[]", "{}",
                                    work.now,
                                    work.now, digest_of_list([row]), mark))
