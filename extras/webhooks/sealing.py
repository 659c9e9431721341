"""Headers for the receivers of webhooks, as they are stored: sealed, with a key that is in no row."""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from asyncgate.parts.model import stored_webhooks

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE = 12


def make_cipher(gate_secret: bytes, tenant_id: str, webhook_id: str) -> AESGCM:
    """Return the cipher of the headers of one webhook: a row, or a copy of all rows, does not have its key."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # large, and few gates need it

    return AESGCM(hmac.digest(gate_secret, f"webhook-headers\0{tenant_id}\0{webhook_id}".encode(), "sha256"))


def seal_headers(gate_secret: bytes, tenant_id: str, webhook_id: str, headers: Mapping[str, str]) -> str | None:
    """Return headers as they are stored; None if there are none."""
    if not headers:
        return None
    nonce, text = secrets.token_bytes(NONCE), {name.lower(): value for name, value in headers.items()}
    sealed = make_cipher(gate_secret, tenant_id, webhook_id).encrypt(nonce, msgspec.json.encode(text), None)
    return base64.b64encode(nonce + sealed).decode()


def open_headers(gate_secret: bytes, tenant_id: str, row: stored_webhooks.Webhook) -> dict[str, str] | None:
    """Return the headers of a webhook; None if another gate's secret has sealed them."""
    if row.headers is None:
        return {}
    from cryptography.exceptions import InvalidTag

    sealed = base64.b64decode(row.headers)
    try:
        text = make_cipher(gate_secret, tenant_id, row.webhook_id).decrypt(sealed[:NONCE], sealed[NONCE:],
                                                                           None)
    except InvalidTag:
        return None
    return msgspec.json.decode(text, type=dict[str, str])
