"""Access tokens: JWTs of an issuer that this gate trusts (spec 21.2.1, RFC 9068, RFC 8725).

A token is good when a key that this gate already holds has signed it, and its claims are for this gate, now.  Nothing
in a token is ever followed: `kid` is looked up in memory, and a header that brings or names a key is refused.  The keys
come from files, which must be good or the gate does not start, and from the issuer's URL, which may be down for a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from joserfc import jws
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError, SecurityWarning
from joserfc.jwk import KeySet, RSAKey
from joserfc.util import urlsafe_b64decode
from msgspec import Meta, Struct

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity import WayIn
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.errors import InvalidToken, IssuerUnavailable, StartupError
from asyncgate.parts.model.settings import Jwt, Settings, Uuid, mask_credentials
from asyncgate.parts.model.wire import Name, Principal

if TYPE_CHECKING:
    import httpx2

JsonForm = TypeVar("JsonForm")

log = logging.getLogger("asyncgate")

MOST_TOKEN_BYTES = 8192              # characters of a token
MOST_TOKENS_REMEMBERED = 10_000         # tokens
KEY_BITS = range(2048, 8193)
MOST_KEYS = 100             # of a key set
REFETCH_SECONDS = 60.0        # at least, between two looks at the issuer's keys
FRESH_SECONDS = 600.0       # at most, until a key that the issuer withdrew is noticed
FETCH_SECONDS = 5.0
FOREIGN = {"jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"}     # headers that would change what is trusted
DEFAULT_SCOPES = {          # spec 21.8.3, of a token that has no scope; what an admin may do beyond it must be said
    "agent": frozenset({"tasks:read", "tasks:write", "receipts:read", "receipts:ack"}),
    "worker": frozenset({"tasks:lease", "receipts:read"}),
}
DEFAULT_SCOPES["admin"] = DEFAULT_SCOPES["agent"] | DEFAULT_SCOPES["worker"]


def ways(settings: Settings) -> list[WayIn]:
    """Return the kinds of credential that the settings allow; raises StartupError for unsafe keys."""
    return [AccessTokens(settings)] if settings.security.jwt.has_keys else []


class Claims(Struct, frozen=True):
    """The claims of a token; it cannot claim the kinds and roles that only the gate itself has."""

    iss: str
    aud: str | list[str]
    sub: Name
    iat: Annotated[float, Meta(ge=0)]
    exp: Annotated[float, Meta(ge=0)]
    tenant_id: Uuid
    principal_kind: Literal["agent", "worker", "service", "human"]
    nbf: Annotated[float, Meta(ge=0)] = 0.0
    principal_id: Name | None = None            # sub, if it is not given
    principal_instance_id: Name | None = None
    role: Literal["agent", "worker", "admin"] | None = None     # that of the kind, if it is not given
    scope: str | None = None
    jti: Name | None = None
    sid: Name | None = None                     # the grant that it came from
    client_id: Name | None = None

    @property
    def principal(self) -> Principal:
        """Return the principal that the claims name."""
        return Principal(self.principal_kind, self.principal_id or self.sub, self.principal_instance_id)


class Revocations(Protocol):
    """Knows which tokens were revoked before they expired."""

    def revoked(self, claims: Claims) -> bool:
        """Whether this token was revoked; asked on every request, so an implementation must not wait."""


class NoRevocations:
    """No token is ever revoked."""

    def revoked(self, claims: Claims) -> bool:
        """Say no."""
        return False


class Flaw(Exception):
    """Why a token is invalid; for the audit log, never for the caller."""

    def __init__(self, why: str, code: str = "token_malformed") -> None:
        super().__init__(why)
        self.code = code


# What reading a key or a token may raise; a TypeError is a PEM that wants a password, msgspec's errors are ValueErrors.
UNFIT = (Flaw, JoseError, ValueError, TypeError, LookupError, RecursionError)


class AccessTokens:
    """Accepts access tokens of the issuer."""

    def __init__(self, settings: Settings, *, now: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic, http: httpx2.AsyncClient | None = None) -> None:
        self.jwt, self.now = settings.security.jwt, now
        if not self.jwt.audience:
            raise StartupError("security.jwt.audience is empty, so the gate could accept no access token; set it")
        self.revocations: Revocations = NoRevocations()
        self.proven: OrderedDict[bytes, tuple[Caller, Claims]] = OrderedDict()     # by digest: the tokens are secrets
        url = self.jwt.jwks if "://" in self.jwt.jwks else ""
        http = http or (make_fetcher(settings) if url else None)
        self.keys = KeyRing(load_key_files(self.jwt), url, http, self.proven.clear, clock)

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a token; None for a text that does not look like a JWT."""
        if token is None or not token.startswith("eyJ") or "." not in token:     # eyJ is {" in base64
            return None
        self.keys.freshen()
        try:
            return await self._caller(token)
        except UNFIT as wrong:
            no = InvalidToken("this access token is invalid: it has expired, was revoked, or is not for this "
                              "gate; get a new one from its issuer")
            no.because = reason_of(wrong)
            raise no from None

    async def _caller(self, token: str) -> Caller:
        if len(token) > MOST_TOKEN_BYTES:
            raise Flaw(f"it is longer than {MOST_TOKEN_BYTES} characters", "token_too_long")
        digest = sha256(token.encode()).digest()
        caller, claims = self.proven.get(digest) or await self._prove(token, digest)
        if self.now() >= claims.exp + self.jwt.leeway_seconds:
            self.proven.pop(digest, None)
            raise Flaw("exp is over", "token_expired")
        if self.revocations.revoked(claims):
            raise Flaw("it was taken back", "token_revoked")
        self.proven.move_to_end(digest)
        return caller

    async def _prove(self, token: str, digest: bytes) -> tuple[Caller, Claims]:
        key = await self.keys.find(key_id(token))
        # Nothing is awaited from here on, so no change of keys comes between the proof and its place in memory.
        claims = decode_strictly(verify_signature(token, key), Claims)
        if wrong := find_flaw(claims, self.jwt, self.now()):
            raise Flaw(*wrong)
        self.proven[digest] = caller_of_claims(claims), claims
        if len(self.proven) > MOST_TOKENS_REMEMBERED:
            self.proven.popitem(last=False)
        return self.proven[digest]


def key_id(token: str) -> str | None:
    """Return which key a token says it is signed with; raises Flaw for a header that says more than it may."""
    header = decode_strictly(urlsafe_b64decode(token.partition(".")[0].encode()), dict[str, Any])
    if header.get("alg") != "RS256":
        raise Flaw("alg is not RS256", "token_algorithm")
    if str(header.get("typ")).lower() not in ("at+jwt", "application/at+jwt"):     # an ID token is no access token
        raise Flaw("typ is not at+jwt", "token_type")
    if foreign := FOREIGN & header.keys():
        raise Flaw(f"the header brings {', '.join(sorted(foreign))}", "token_header")
    kid = header.get("kid")
    if not isinstance(kid, str | None):
        raise Flaw("kid is no text")
    return kid


def verify_signature(token: str, key: RSAKey) -> bytes:
    """Return what the key has signed; raises JoseError if it has not."""
    return jws.deserialize_compact(token, key, algorithms=["RS256"]).payload


def decode_strictly(text: bytes, form: type[JsonForm]) -> JsonForm:
    """Decode JSON without repeated names, because readers differ in which value they take."""
    json.loads(text, object_pairs_hook=unique_members)
    return msgspec.json.decode(text, type=form)     # stricter about text and numbers than the other


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members."""
    if len(members := dict(pairs)) != len(pairs):
        raise Flaw("a name is said twice")
    return members


def reason_of(wrong: Exception) -> tuple[str, str]:
    """Return why a token was refused, as a code and in words; neither repeats the token's contents."""
    why = str(wrong) or type(wrong).__name__
    if isinstance(wrong, Flaw):
        return wrong.code, why
    if isinstance(wrong, BadSignatureError):
        return "token_signature", why
    if isinstance(wrong, msgspec.ValidationError):      # it names the claim, and not what stands there
        return ("token_tenant" if "tenant_id" in why else "token_claims"), why
    return "token_malformed", type(wrong).__name__


def find_flaw(claims: Claims, jwt: Jwt, now: float) -> tuple[str, str] | None:
    """Return what is wrong with claims now, in words and as a code; None if nothing is."""
    audience = {claims.aud} if isinstance(claims.aud, str) else {*claims.aud}
    wrong = {
        ("iss is another issuer", "token_issuer"): claims.iss != jwt.issuer,
        ("aud is for others", "token_audience"): audience.isdisjoint(jwt.audience),
        ("nbf is to come", "token_not_yet_valid"): claims.nbf > now + jwt.leeway_seconds,
        ("iat is to come", "token_not_yet_valid"): claims.iat > now + jwt.leeway_seconds,
        ("the issuer may not speak for that tenant", "token_tenant"): bool(jwt.tenants) and (
            claims.tenant_id not in jwt.tenants),
        ("the issuer may not give that role", "token_role"): role_of(claims) not in jwt.roles,
        ("exp is too long after iat", "token_lifetime"): claims.exp - claims.iat > jwt.max_lifetime_days * DAY_SECONDS,
    }
    return next((what for what, is_so in wrong.items() if is_so), None)


def role_of(claims: Claims) -> Literal["agent", "worker", "admin"]:
    """Return the role that a token gives."""
    return claims.role or ("worker" if claims.principal_kind == "worker" else "agent")


def caller_of_claims(claims: Claims) -> Caller:
    """Return the caller of valid claims; scopes that the gate does not know, such as openid, are ignored."""
    role = role_of(claims)
    scopes = DEFAULT_SCOPES[role] if claims.scope is None else SCOPES.intersection(re.split("[ ,]+", claims.scope))
    return Caller(claims.tenant_id, claims.principal, role, scopes, issued_at=claims.iat)


class KeyRing:
    """The keys that verify tokens: those of the files, and those that the issuer publishes.

    The issuer's keys are fetched again regularly; while the issuer is unreachable, its last keys stay valid.
    """

    def __init__(self, fixed: list[RSAKey], url: str, http: httpx2.AsyncClient | None, changed: Callable[[], None],
                 clock: Callable[[], float]) -> None:
        self.fixed, self.url, self.http, self.changed, self.clock = fixed, url, http, changed, clock
        self.known, self.looked_at, self.away = KeySet([*fixed]), float("-inf"), False
        self.looking: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> RSAKey:
        """Return a key by its id, or the only key for a token without one; fetches again for an unknown id."""
        key = self._held(kid)
        if key is None:
            self.freshen(REFETCH_SECONDS)
            if self.looking:
                await asyncio.shield(self.looking)      # others wait for the same look
            key = self._held(kid)
        if key is None and self.away:
            wait = max(1, round(self.looked_at + REFETCH_SECONDS - self.clock()))
            raise IssuerUnavailable("the issuer's keys cannot be fetched, so this access token cannot be checked; "
                                    "try again later", retry_after=wait)
        if key is None:
            raise Flaw("kid is not known", "token_key")
        return key

    def _held(self, kid: str | None) -> RSAKey | None:
        try:
            key = self.known.get_by_kid(kid)
        except InvalidKeyIdError:
            return None
        return key if isinstance(key, RSAKey) else None

    def freshen(self, after_seconds: float = FRESH_SECONDS) -> None:
        """Start to fetch the issuer's keys, if the last fetch started that long ago."""
        if self.http and self.looking is None and self.clock() - self.looked_at >= after_seconds:
            self.looked_at = self.clock()
            self.looking = asyncio.create_task(self._look(self.http))

    async def _look(self, http: httpx2.AsyncClient) -> None:
        import httpx2

        try:
            answer = (await http.get(self.url)).raise_for_status()
            keys = key_set(answer.content, strict=False)
        except (httpx2.HTTPError, httpx2.InvalidURL, *UNFIT) as error:
            self.away = True
            log.warning("cannot fetch the issuer's keys; the last ones stay: %s: %s", type(error).__name__, error)
        else:
            self.away = False
            self._take(KeySet([*self.fixed, *keys]))
        finally:
            self.looking = None

    def _take(self, keys: KeySet) -> None:
        if keys.as_dict() != self.known.as_dict():
            self.known = keys
            self.changed()


class JwkSet(Struct):
    """A key set (RFC 7517 5)."""

    keys: list[dict[str, Any]]


def make_fetcher(settings: Settings) -> httpx2.AsyncClient:
    """Return the client that fetches the keys."""
    from asyncgate.parts.process.outgoing import make_client  # only who has a URL pays for it

    outgoing = settings.security.outgoing
    return make_client(allow=outgoing.allow, deny=outgoing.deny, timeout_seconds=FETCH_SECONDS)


def load_key_files(jwt: Jwt) -> list[RSAKey]:
    """Load the keys that the settings name; raises StartupError for an unsafe one."""
    paths = {"private_key_path": jwt.private_key_path, "public_key_path": jwt.public_key_path,
             "jwks": "" if "://" in jwt.jwks else jwt.jwks}
    found: list[RSAKey] = []
    for name, path in paths.items():
        try:
            found += load_key_file(path, name) if path else []
        except OSError as error:
            shown = mask_credentials(path)
            raise StartupError(f"security.jwt.{name}: {shown!r} cannot be read: {error.strerror}") from None
        except UNFIT as error:
            raise StartupError(f"security.jwt.{name}: {mask_credentials(path)!r} is invalid: {error}") from None
    return found


def load_key_file(path: str, name: str) -> list[RSAKey]:
    """Load the public keys of one file."""
    with open(path, "rb") as file:
        text, others = file.read(), os.fstat(file.fileno()).st_mode & 0o077
    keys = key_set(text, strict=True) if name == "jwks" else [import_key(text)]
    if others and any(key.is_private for key in keys):
        raise Flaw("it holds a private key that others than its owner may use; chmod 600")
    if name == "private_key_path" and not keys[0].is_private:
        raise Flaw("it holds no private key")
    return [import_key(key.public_key, key.kid) for key in keys]


def key_set(text: bytes, *, strict: bool) -> list[RSAKey]:
    """Read the signature keys of a JWKS; any other key is an error if strict, else it is skipped."""
    keys: list[RSAKey] = []
    for jwk in decode_strictly(text, JwkSet).keys[:MOST_KEYS]:
        try:
            keys += [import_key(jwk)] if fits_signatures(jwk, strict) else []
        except UNFIT as error:
            if strict:
                raise
            log.warning("skip a key of the issuer: %s", error)
    if not keys:
        raise Flaw("it has no RS256 key")
    return keys


def fits_signatures(jwk: dict[str, Any], strict: bool) -> bool:
    """Whether a key verifies RS256 signatures; raises for a key that no key set may hold."""
    if jwk.get("use", "sig") != "sig" or "verify" not in jwk.get("key_ops", ["verify"]):
        return False
    if (jwk.get("kty"), jwk.get("alg", "RS256")) == ("RSA", "RS256"):
        if not strict and "d" in jwk:
            raise Flaw("it publishes a private key")
        return True
    if strict:
        raise Flaw("it has a key that is not for RS256")
    return False


def import_key(value: Any, kid: str | None = None) -> RSAKey:
    """Make a key from a PEM, a JWK or a library key; without an id it gets its thumbprint (RFC 7638)."""
    with warnings.catch_warnings(action="ignore", category=SecurityWarning):     # of small keys, which are refused here
        key = RSAKey.import_key(value, {"kid": kid} if kid else None)
    if key.public_key.key_size not in KEY_BITS:
        raise Flaw(f"an RSA key has {KEY_BITS[0]} to {KEY_BITS[-1]} bits, not {key.public_key.key_size}")
    key.ensure_kid()
    return key
