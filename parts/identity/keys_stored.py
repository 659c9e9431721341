"""The form of issued keys: the text that the holder has, and the row that the gate stores (spec 21.2.2).

    aga_ | key id, 12 | secret, 43 | CRC32 of all that, 6           base62, 65 characters in all

Of that text, the database has only the key id and an Argon2id hash of the secret.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from math import inf
from typing import Protocol
from zlib import crc32

import msgspec
from msgspec.structs import replace

from asyncgate import SCOPES
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import ApiKeys

LONGEST_OVERLAP = 30 * DAY_SECONDS

# The text of a key.

KEY_PREFIX, ID_LENGTH, SECRET_LENGTH, LENGTH = "aga_", 12, 43, 65
ID_START, ID_END, SECRET_END = len(KEY_PREFIX), len(KEY_PREFIX) + ID_LENGTH, len(KEY_PREFIX) + ID_LENGTH + SECRET_LENGTH
BASE62_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
PAIRS = [high + low for high in BASE62_DIGITS for low in BASE62_DIGITS]


def generate() -> str:
    """Return the text of a new key: 71 bits of id, which are not secret, and 256 bits of secret."""
    start = KEY_PREFIX + "".join([secrets.choice(BASE62_DIGITS) for _ in range(ID_LENGTH + SECRET_LENGTH)])
    return start + checksum(start)


def parse(token: str) -> tuple[str, str] | None:
    """Return the key id and the secret; None if the text is not a key."""
    if len(token) != LENGTH or not token.startswith(KEY_PREFIX) or not token.isascii():
        return None
    if not token[ID_START:].isalnum() or token[SECRET_END:] != checksum(token[:SECRET_END]):
        return None
    return token[ID_START:ID_END], token[ID_END:SECRET_END]


def checksum(text: str) -> str:
    """Return the CRC32 of a text in six base62 digits."""
    crc, size = crc32(text.encode()), len(PAIRS)
    return PAIRS[crc // size // size] + PAIRS[crc // size % size] + PAIRS[crc % size]


class KeyStore(Protocol):
    """The database methods that issued keys need."""

    async def find_key(self, key_id: str) -> tuple[str, bool, stored.Key] | None:
        """Return a key's tenant, whether the tenant is suspended, and the key: the only read before a tenant is known.

        Must see every change committed before the call, so it must not read from a lagging replica.  Raises
        DatabaseUnavailable if the database does not answer in time.
        """

    async def touch_key(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        """Store that a key was used: keep the later of two times, and add a place to the known ones."""


def encode_names(names: Iterable[str] | None) -> str | None:
    """Encode scopes, capabilities or task types for the database."""
    return None if names is None else msgspec.json.encode(sorted(names)).decode()


def decode_names(text: str) -> frozenset[str]:
    """Decode what `encode_names` has encoded."""
    return msgspec.json.decode(text, type=frozenset[str])


def default_role(kind: wire.Kind) -> wire.Role:
    """Return the role of a credential that names none, by the kind of its principal."""
    return "worker" if kind == "worker" else "agent"


def default_scopes(role: wire.Role) -> frozenset[str]:
    """Return the scopes of a credential that names none (spec 21.8.3); an admin gets all that concern its tenant."""
    return {"agent": frozenset({"tasks:read", "tasks:write", "receipts:read", "receipts:ack"}),
            "worker": frozenset({"tasks:lease", "receipts:read"}),
            "admin": SCOPES - {"metrics:read"}}.get(role, frozenset())


def is_good(key: stored.Key, now: float) -> bool:
    """Whether a key is valid, or will be; one that was replaced is valid for a while only, and no longer good."""
    return key.revoked_at is None and key.rotated_to is None and (key.expires_at is None or key.expires_at > now)


def retire_key(key: stored.Key, successor: str, now: float, overlap_seconds: float = DAY_SECONDS) -> stored.Key:
    """Return a rotated key: valid for the overlap, 30 days at most, and no longer than before."""
    end = now + min(overlap_seconds, LONGEST_OVERLAP)
    return replace(key, rotated_to=successor, expires_at=min(end, inf if key.expires_at is None else key.expires_at))


def hash_secret(secret: str, costs: ApiKeys) -> str:
    """Return the hash of a secret as it is stored; with the default costs it takes 0.1 s and 64 MiB."""
    from argon2 import PasswordHasher

    return PasswordHasher(costs.hash_time_cost, costs.hash_memory_cost, costs.hash_parallelism).hash(secret)


def proves_secret(secret: str, hash: str) -> bool:
    """Whether a hash belongs to a secret; the hash names its own costs."""
    from argon2 import PasswordHasher
    from argon2.exceptions import VerifyMismatchError

    try:
        return PasswordHasher().verify(hash, secret)
    except VerifyMismatchError:
        return False
