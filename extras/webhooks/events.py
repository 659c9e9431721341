"""What is told of an event: which endpoints want it, its body, and its signature (Standard Webhooks)."""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from asyncgate import INPUT_REQUESTED
from asyncgate.parts.model import stored, stored_webhooks
from asyncgate.parts.model.views import show_receipt, to_utc

MOST_EARLIER = 2            # secrets that still sign besides the newest one and the one before it
TEST = "webhook.test"       # the type of the event that test_webhook sends
AS_RECEIPT = "receipt"      # the form of an event that is a receipt as get_receipt shows it
USAGE = "usage.recorded"    # the type of usage events (spec 21.6.4)


class WebhookBody(Struct):
    """What is posted."""

    type: str
    timestamp: datetime     # of the event
    data: Any
    link: str | UnsetType = UNSET       # where a person answers a question


@lru_cache(1024)
def read_names(names: str) -> frozenset[str]:
    """Return the stored names of a filter."""
    return msgspec.json.decode(names, type=frozenset[str])


def wants(webhook: stored_webhooks.Webhook, receipt: stored.Receipt) -> bool:
    """Whether an endpoint is told of a receipt."""
    types, principals = read_names(webhook.types), read_names(webhook.principals)
    return (not types or receipt.receipt_type in types) and (not principals or receipt.to_id in principals)


def tells_usage(webhook: stored_webhooks.Webhook) -> bool:
    """Whether an endpoint is told of usage events instead of receipts."""
    return USAGE in read_names(webhook.types)


def render_usage(tenant_id: str, event: stored.UsageEvent) -> bytes:
    """Return the body for a usage event: what was used, in whole numbers, so that sums are exact."""
    data = {"tenant_id": tenant_id, **asdict(event), "begins": to_utc(event.begins), "ends": to_utc(event.ends)}
    del data["period"]
    return msgspec.json.encode(WebhookBody(USAGE, to_utc(event.ends), data))


def render_receipt(tenant_id: str, receipt: stored.Receipt, console: str = "") -> bytes:
    """Return the body for a receipt: the receipt as get_receipt shows it, without its telemetry, which changes.

    A question has a link to the inbox of the console, if the address of that is known.
    """
    link = f"{console}/#/inbox" if console and receipt.receipt_type == INPUT_REQUESTED.type else UNSET
    record = show_receipt(tenant_id, receipt)
    record.delivered_at = None
    return msgspec.json.encode(WebhookBody(receipt.receipt_type, to_utc(receipt.created_at), record, link))


def render_test(tenant_id: str, webhook_id: str, now: float) -> bytes:
    """Return the body of a test event."""
    return msgspec.json.encode(
        WebhookBody(TEST, to_utc(now), {"tenant_id": tenant_id, "webhook_id": webhook_id}))


def derive_secret(gate_secret: bytes, tenant_id: str, webhook_id: str, secret_id: str) -> bytes:
    """Return a signing secret.

    Security: an HMAC needs its secret, so a hash cannot be stored.  It is derived from the gate's own secret and a
    random id instead: whoever reads the rows of a tenant, an export of them or a copy of that table has no secret.
    """
    return hmac.digest(gate_secret, f"webhook\0{tenant_id}\0{webhook_id}\0{secret_id}".encode(), "sha256")


def show_secret(secret: bytes) -> str:
    """Return a signing secret as the libraries of Standard Webhooks take it."""
    return "whsec_" + base64.b64encode(secret).decode()


def secrets_of(gate_secret: bytes, tenant_id: str, webhook: stored_webhooks.Webhook, now: float) -> list[bytes]:
    """Return the secrets that sign now: the newest one, and each one before it until its own overlap is over."""
    newest = derive_secret(gate_secret, tenant_id, webhook.webhook_id, webhook.secret_id)
    return [newest, *(secret for secret, _ in find_previous(gate_secret, tenant_id, webhook, now))]


def find_previous(gate_secret: bytes, tenant_id: str, webhook: stored_webhooks.Webhook,
                  now: float) -> list[tuple[bytes, float]]:
    """Return the secrets before the newest one that still sign, newest first, each with the end of its overlap."""
    pairs: list[tuple[bytes, float]] = []
    if webhook.previous_id is not None and webhook.previous_until is not None:
        pairs.append((derive_secret(gate_secret, tenant_id, webhook.webhook_id, webhook.previous_id),
                      webhook.previous_until))
    own, *earlier = webhook.secret_id.split(";")
    for place, (covered, until) in enumerate(entry.split("@") for entry in earlier):
        pairs.append((cover(gate_secret, webhook.webhook_id, own, place, bytes.fromhex(covered)), float(until)))
    return [(secret, until) for secret, until in pairs if until > now]


def make_secret_id(gate_secret: bytes, webhook_id: str, earlier: list[tuple[bytes, float]]) -> str:
    """Return a new random id of a signing secret, which also keeps earlier secrets that still sign, covered.

    The newest secret is derived from this text as it stands, and the one before has a column.  A release that knows no
    earlier secrets therefore signs with these two.
    """
    own = secrets.token_hex(16)
    kept = [f"{cover(gate_secret, webhook_id, own, place, secret).hex()}@{until!r}"
            for place, (secret, until) in enumerate(earlier)]
    return ";".join([own, *kept])


def cover(gate_secret: bytes, webhook_id: str, own: str, place: int, secret: bytes) -> bytes:
    """Cover a signing secret, or uncover it.

    Security: the mask is an HMAC under the gate's own secret of an id that is random and used once, so no two secrets
    share a mask, and the row alone shows nothing.
    """
    mask = hmac.digest(gate_secret, f"webhook-earlier\0{webhook_id}\0{own}\0{place}".encode(), "sha256")
    return bytes(a ^ b for a, b in zip(secret, mask, strict=True))


def find_end_of_overlap(webhook: stored_webhooks.Webhook) -> float | None:
    """Return until when a secret before the newest one signs; None if none does since the last rotation."""
    ends = [float(entry.split("@")[1]) for entry in webhook.secret_id.split(";")[1:]]
    return max([*ends, webhook.previous_until], default=None) if webhook.previous_until is not None else None


def sign(keys: Iterable[bytes], event_id: str, now: float, body: bytes) -> dict[str, str]:
    """Return the headers of an attempt; their time is that of the attempt, so that an old one cannot be replayed."""
    signed = f"{event_id}.{int(now)}.".encode() + body
    seals = [base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in keys]
    return {"webhook-id": event_id, "webhook-timestamp": str(int(now)),
            "webhook-signature": " ".join([f"v1,{seal}" for seal in seals])}
