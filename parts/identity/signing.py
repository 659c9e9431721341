"""The keys that sign access tokens: the current one, and retired ones that still verify.

The current key is the PEM file of `security.jwt.private_key_path`.  The public halves of retired keys stand beside it
in a JWKS file, each with the time until which it verifies.  Several gates share the files: each looks at them when it
signs and verifies, so that nobody has to restart them after `asyncgate keys signing rotate`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from joserfc import jwt
from joserfc.jwk import RSAKey
from msgspec import Struct

from asyncgate.parts.identity.jwt import UNFIT, Flaw, JwkSet, decode_strictly, import_key, public_half, read_key_file
from asyncgate.parts.model import errors
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Settings, mask_credentials

log = logging.getLogger("asyncgate")

KEYS_STALE_SECONDS = 5.0      # the longest time until a gate notices that a file has changed
MOST_RETIRED = 100
BITS = 3072             # of a new key
OVERLAP_DAYS = 90       # for which a retired key verifies: the longest life of an access token (spec 21.2.1)


class SigningKey(Struct, frozen=True):
    """One key, and from when until when it signs or verifies."""

    key: RSAKey                     # of a retired one only the public half
    public: RSAKey                  # its public half
    since: float                    # when it began to sign
    until: float | None = None      # of a retired one: when it ceases to verify


class SigningKeys:
    """The signing keys of a running gate; they follow the files."""

    def __init__(self, path: str, *, now: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.now, self.clock = path, now, clock
        self.changed: list[Callable[[], None]] = []     # called after the keys have changed
        self.seen, self.looked_at = stamp_files(path), clock()
        self.known = read_signing_keys(path)

    @classmethod
    def load(cls, settings: Settings) -> SigningKeys:
        """Load the keys that the settings name; raises StartupError for an unsafe one."""
        path = settings.security.jwt.private_key_path
        if not path:
            raise errors.StartupError(
                "security.oauth.enabled needs security.jwt.private_key_path, the key that signs access "
                "tokens: `asyncgate keys signing make --file signing.pem` makes one")
        return load_signing_keys(path)

    def sign(self, claims: dict[str, Any]) -> str:
        """Return an access token with these claims."""
        key = self.current.key
        return jwt.encode({"alg": "RS256", "typ": "at+jwt", "kid": key.kid}, claims, key)

    def jwks(self) -> dict[str, Any]:
        """Return the public keys as a key set (RFC 7517)."""
        return {"keys": [describe_key(key) for key in self.public_keys()]}

    def public_keys(self) -> list[RSAKey]:
        """Return the keys that verify now, the current one first."""
        return [key.public for key in self.in_force()]

    def secret(self, purpose: str) -> bytes:
        """Return 32 secret bytes for one purpose, the same in every gate with the same signing key."""
        private = self.current.key.private_key
        assert private is not None
        text = private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        return HKDF(hashes.SHA256(), 32, None, b"asyncgate " + purpose.encode()).derive(text)

    @property
    def current(self) -> SigningKey:
        """Return the key that signs now."""
        return self.in_force()[0]

    def in_force(self) -> list[SigningKey]:
        """Return the keys that sign or verify now, the current one first."""
        self.freshen()
        return [key for key in self.known if is_in_force(key, self.now())]

    async def find(self, kid: str | None) -> RSAKey:
        """Return the key that a token names; raises Flaw for an unknown one.

        It may have come a moment ago, so the gate looks at the files at once.
        """
        key = self._find_known(kid)
        if key is None:
            self.look()
            key = self._find_known(kid)
        if key is None:
            raise Flaw("kid is unknown", "token_key")
        return key

    def _find_known(self, kid: str | None) -> RSAKey | None:
        return next((key.public for key in self.in_force() if key.key.kid == kid), None)

    def freshen(self) -> None:
        """Look for changed files, if the last look is too old."""
        self.look(KEYS_STALE_SECONDS)

    def look(self, after_seconds: float = 0.0) -> None:
        """Read the files again if they have changed, unless the last look was less than `after_seconds` ago."""
        if self.clock() - self.looked_at < after_seconds:
            return
        self.looked_at = self.clock()
        if (stamp := stamp_files(self.path)) == self.seen:
            return
        self.seen = stamp       # also of files that cannot be used: they are read again when they change again
        try:
            self.known = read_signing_keys(self.path)
        except (OSError, *UNFIT) as error:
            return log.error("the signing keys have changed but cannot be used; the last ones stay: %s", error)
        for tell in self.changed:
            tell()


def load_signing_keys(path: str) -> SigningKeys:
    """Load the keys of a file and of the list beside it; raises StartupError for an unsafe one."""
    try:
        return SigningKeys(path)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except UNFIT as error:
        why = f"is invalid: {error}"
    raise errors.StartupError(
        f"security.jwt.private_key_path: {mask_credentials(path)!r} or its list of retired keys {why}")


def name_retired(path: str) -> str:
    """Return the path of the list of retired keys."""
    return f"{path}.retired.json"


def stamp_files(path: str) -> list[tuple[int, int, int] | None]:
    """Return what tells whether a file has changed; None for one that is not there."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (path, name_retired(path)):
        try:
            stat = os.stat(name)
            stamps.append((stat.st_ino, stat.st_ctime_ns, stat.st_size))     # a chmod changes the ctime alone
        except OSError:
            stamps.append(None)
    return stamps


def read_signing_keys(path: str) -> list[SigningKey]:
    """Read both files: the current key first, then the retired ones, the youngest first."""
    [key] = read_key_file(path, "private_key_path")
    retired = [old for old in read_retired(path) if old.key.kid != key.kid]     # a rotation may just be under way
    return [SigningKey(key, public_half(key), os.stat(path).st_mtime), *sorted(retired, key=lambda key: -key.since)]


def read_retired(path: str) -> list[SigningKey]:
    """Read the list of retired keys; there may be none."""
    try:
        with open(name_retired(path), "rb") as file:
            listed = decode_strictly(file.read(), JwkSet).keys
    except FileNotFoundError:
        return []
    return [read_retired_key(jwk) for jwk in listed[:MOST_RETIRED]]


def read_retired_key(jwk: dict[str, Any]) -> SigningKey:
    """Read one entry of the list; its members `iat` and `exp` are those of OpenID Federation."""
    key, since, until = import_key(jwk), jwk.get("iat", 0), jwk.get("exp")
    if key.is_private or not isinstance(until, int | float) or not isinstance(since, int | float):
        raise Flaw("the list of retired keys may hold public keys only, each with the members iat and exp")
    return SigningKey(key, key, float(since), float(until))


def describe_key(key: RSAKey) -> dict[str, Any]:
    """Return a public key as a member of a key set."""
    return {**public_half(key).as_dict(private=False), "kid": key.kid, "use": "sig", "alg": "RS256"}


# For whoever looks after the files: `asyncgate keys signing`.


def generate_pem(bits: int = BITS) -> str:
    """Return a new private key as the text of its file."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def rotate_key_file(path: str, now: float, overlap_seconds: float = OVERLAP_DAYS * DAY_SECONDS,
                    bits: int = BITS) -> SigningKey:
    """Put a new key in the place of the current one, which verifies for the overlap; return the new one.

    Order: first the old key is listed as retired, then the new one takes its place, each in one step.  Whatever is
    interrupted leaves files with which every token that was issued verifies.  Raises OSError and errors of UNFIT.
    """
    owner = os.stat(path)
    with replacing(path, 0o600, owner) as write:       # from its beginning on, so that no other rotation runs meanwhile
        current, *retired = read_signing_keys(path)
        kept = [SigningKey(current.public, current.public, current.since, now + overlap_seconds), *retired]
        with replacing(name_retired(path), 0o644, owner) as list_retired:
            entries = [{**describe_key(key.key), "iat": key.since, "exp": key.until} for key in kept
                       if is_in_force(key, now)]
            list_retired(encode_json({"keys": entries}))
        write(generate_pem(bits).encode())
    return read_signing_keys(path)[0]


@contextmanager
def replacing(path: str, mode: int, owner: os.stat_result) -> Iterator[Callable[[bytes], object]]:
    """Let a block write a file that then takes the place of another in one step.

    Raises FileExistsError while somebody else does the same.
    """
    beside = f"{path}.new"
    file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with os.fdopen(file, "wb") as opened:
            yield opened.write
            opened.flush()
            os.fsync(file)
            if os.name == "posix" and os.geteuid() == 0:    # the gate runs as another user than root
                os.fchown(file, owner.st_uid, owner.st_gid)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def is_in_force(key: SigningKey, now: float) -> bool:
    """Whether a key signs or verifies at a time."""
    return key.until is None or now < key.until
