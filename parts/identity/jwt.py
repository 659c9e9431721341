"""Access tokens: JWTs of an issuer that this gate trusts (spec 21.2.1, RFC 9068, RFC 8725).

A token is valid if a known key has signed it and its claims are for this gate and the present time.  Security: the
gate never follows anything in a token.  It looks `kid` up in memory, and refuses a header that contains or names a key.
Keys come from files, which must be valid or the gate does not start, and from the issuer's URL, which may be down.
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

MOST_TOKEN_BYTES = 8192         # the longest accepted token
MOST_TOKENS_REMEMBERED = 10_000
KEY_BITS = range(2048, 8193)
MOST_KEYS = 100             # keys of a key set; the others are ignored
REFETCH_SECONDS = 60.0      # the shortest time between two fetches of the issuer's keys
FRESH_SECONDS = 600.0       # the longest time until the gate notices that the issuer withdrew a key
FETCH_SECONDS = 5.0
FOREIGN = {"jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"}     # headers that could change which key is trusted
DEFAULT_SCOPES = {          # spec 21.8.3: of a token without a scope; admin scopes must be given explicitly
    "agent": frozenset({"tasks:read", "tasks:write", "receipts:read", "receipts:ack"}),
    "worker": frozenset({"tasks:lease", "receipts:read"}),
}
DEFAULT_SCOPES["admin"] = DEFAULT_SCOPES["agent"] | DEFAULT_SCOPES["worker"]


def ways(settings: Settings) -> list[WayIn]:
    """Return the kinds of credential that the settings allow; raises StartupError for unsafe keys."""
    return [AccessTokens(settings)] if settings.security.jwt.has_keys else []


class Claims(Struct, frozen=True):
    """The claims of a token; kinds and roles that only the gate itself has are invalid."""

    iss: str
    aud: str | list[str]
    sub: Name
    iat: Annotated[float, Meta(ge=0)]
    exp: Annotated[float, Meta(ge=0)]
    tenant_id: Uuid
    principal_kind: Literal["agent", "worker", "service", "human"]
    nbf: Annotated[float, Meta(ge=0)] = 0.0
    principal_id: Name | None = None            # default: sub
    principal_instance_id: Name | None = None
    role: Literal["agent", "worker", "admin"] | None = None     # default: by the kind
    scope: str | None = None
    jti: Name | None = None
    sid: Name | None = None                     # the grant that the token came from
    client_id: Name | None = None

    @property
    def principal(self) -> Principal:
        """Return the principal that the claims name."""
        return Principal(self.principal_kind, self.principal_id or self.sub, self.principal_instance_id)


class Revocations(Protocol):
    """Knows which tokens were revoked before they expired."""

    def revoked(self, claims: Claims) -> bool:
        """Whether this token was revoked; called on every request, so an implementation must not wait."""


class NoRevocations:
    """No token is ever revoked."""

    def revoked(self, claims: Claims) -> bool:
        """Return False."""
        return False


class Flaw(Exception):
    """Why a token is invalid; for the audit log, never for the caller."""

    def __init__(self, why: str, code: str = "token_malformed") -> None:
        super().__init__(why)
        self.code = code


# Errors of reading a key or a token; a TypeError is a PEM that needs a password, msgspec's errors are ValueErrors.
UNFIT = (Flaw, JoseError, ValueError, TypeError, LookupError, RecursionError)


class AccessTokens:
    """Accepts access tokens of the issuer."""

    def __init__(self, settings: Settings, *, now: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic, http: httpx2.AsyncClient | None = None) -> None:
        self.jwt, self.now = settings.security.jwt, now
        if not self.jwt.audience:
            raise StartupError("security.jwt.audience is empty, so the gate would refuse every access token; set it")
        self.revocations: Revocations = NoRevocations()
        self.proven: OrderedDict[bytes, tuple[Caller, Claims]] = OrderedDict()     # by digest: tokens are secret
        url = self.jwt.jwks if "://" in self.jwt.jwks else ""
        http = http or (make_fetcher(settings) if url else None)
        self.keys = KeyRing(load_key_files(self.jwt), url, http, self.proven.clear, clock)

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a token; None for a text that is not a JWT; raises InvalidToken."""
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
            raise Flaw(f"the token is longer than {MOST_TOKEN_BYTES} characters", "token_too_long")
        digest = sha256(token.encode()).digest()
        caller, claims = self.proven.get(digest) or await self._prove(token, digest)
        if self.now() >= claims.exp + self.jwt.leeway_seconds:
            self.proven.pop(digest, None)
            raise Flaw("exp has passed", "token_expired")
        if self.revocations.revoked(claims):
            raise Flaw("the token was revoked", "token_revoked")
        self.proven.move_to_end(digest)
        return caller

    async def _prove(self, token: str, digest: bytes) -> tuple[Caller, Claims]:
        key = await self.keys.find(key_id(token))
        # Order: no await from here on, so the keys cannot change between the check and its place in the cache.
        claims = decode_strictly(verify_signature(token, key), Claims)
        if wrong := find_flaw(claims, self.jwt, self.now()):
            raise Flaw(*wrong)
        self.proven[digest] = caller_of_claims(claims), claims
        if len(self.proven) > MOST_TOKENS_REMEMBERED:
            self.proven.popitem(last=False)
        return self.proven[digest]


def key_id(token: str) -> str | None:
    """Return the id of the key that a token's header names; raises Flaw for an invalid header."""
    header = decode_strictly(urlsafe_b64decode(token.partition(".")[0].encode()), dict[str, Any])
    if header.get("alg") != "RS256":
        raise Flaw("alg is not RS256", "token_algorithm")
    if str(header.get("typ")).lower() not in ("at+jwt", "application/at+jwt"):     # for example an ID token
        raise Flaw("typ is not at+jwt", "token_type")
    if foreign := FOREIGN & header.keys():
        raise Flaw(f"the header contains {', '.join(sorted(foreign))}", "token_header")
    kid = header.get("kid")
    if not isinstance(kid, str | None):
        raise Flaw("kid is not a text")
    return kid


def verify_signature(token: str, key: RSAKey) -> bytes:
    """Return the signed content of a token; raises JoseError if the key has not signed it."""
    return jws.deserialize_compact(token, key, algorithms=["RS256"]).payload


def decode_strictly(text: bytes, form: type[JsonForm]) -> JsonForm:
    """Decode JSON and refuse repeated names, because parsers differ in which value they take."""
    json.loads(text, object_pairs_hook=unique_members)
    return msgspec.json.decode(text, type=form)     # stricter than `json` about text and numbers


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members as a dict; raises Flaw for a repeated name."""
    if len(members := dict(pairs)) != len(pairs):
        raise Flaw("a name is repeated")
    return members


def reason_of(wrong: Exception) -> tuple[str, str]:
    """Return why a token was refused, as a code and in words; neither repeats the token's contents."""
    why = str(wrong) or type(wrong).__name__
    if isinstance(wrong, Flaw):
        return wrong.code, why
    if isinstance(wrong, BadSignatureError):
        return "token_signature", why
    if isinstance(wrong, msgspec.ValidationError):      # its text names the claim but not the value
        return ("token_tenant" if "tenant_id" in why else "token_claims"), why
    return "token_malformed", type(wrong).__name__


def find_flaw(claims: Claims, jwt: Jwt, now: float) -> tuple[str, str] | None:
    """Return why claims are invalid now, in words and as a code; None if they are valid."""
    audience = {claims.aud} if isinstance(claims.aud, str) else {*claims.aud}
    wrong = {
        ("iss is another issuer", "token_issuer"): claims.iss != jwt.issuer,
        ("aud does not name this gate", "token_audience"): audience.isdisjoint(jwt.audience),
        ("nbf is in the future", "token_not_yet_valid"): claims.nbf > now + jwt.leeway_seconds,
        ("iat is in the future", "token_not_yet_valid"): claims.iat > now + jwt.leeway_seconds,
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
    """The keys that verify tokens: those from files, and those that the issuer publishes.

    The issuer's keys are fetched again regularly; while the issuer is unreachable, its last keys stay valid.
    """

    def __init__(self, fixed: list[RSAKey], url: str, http: httpx2.AsyncClient | None, changed: Callable[[], None],
                 clock: Callable[[], float]) -> None:
        self.fixed, self.url, self.http, self.changed, self.clock = fixed, url, http, changed, clock
        self.known, self.fetched_at, self.away = KeySet([*fixed]), float("-inf"), False
        self.fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> RSAKey:
        """Return a key by its id, or the only key for a token without one; fetches again for an unknown id."""
        key = self._find_known(kid)
        if key is None:
            self.freshen(REFETCH_SECONDS)
            if self.fetching:
                await asyncio.shield(self.fetching)      # all waiting calls share one fetch
            key = self._find_known(kid)
        if key is None and self.away:
            wait = max(1, round(self.fetched_at + REFETCH_SECONDS - self.clock()))
            raise IssuerUnavailable("the issuer's keys cannot be fetched, so this access token cannot be checked; "
                                    "try again later", retry_after=wait)
        if key is None:
            raise Flaw("kid is unknown", "token_key")
        return key

    def _find_known(self, kid: str | None) -> RSAKey | None:
        try:
            key = self.known.get_by_kid(kid)
        except InvalidKeyIdError:
            return None
        return key if isinstance(key, RSAKey) else None

    def freshen(self, after_seconds: float = FRESH_SECONDS) -> None:
        """Start to fetch the issuer's keys, unless the last fetch began less than `after_seconds` ago."""
        if self.http and self.fetching is None and self.clock() - self.fetched_at >= after_seconds:
            self.fetched_at = self.clock()
            self.fetching = asyncio.create_task(self._fetch(self.http))

    async def _fetch(self, http: httpx2.AsyncClient) -> None:
        import httpx2

        try:
            answer = (await http.get(self.url)).raise_for_status()
            keys = key_set(answer.content, strict=False)
        except (httpx2.HTTPError, httpx2.InvalidURL, *UNFIT) as error:
            self.away = True
            log.warning("cannot fetch the issuer's keys; the last ones stay valid: %s: %s", type(error).__name__, error)
        else:
            self.away = False
            self._take(KeySet([*self.fixed, *keys]))
        finally:
            self.fetching = None

    def _take(self, keys: KeySet) -> None:
        if keys.as_dict() != self.known.as_dict():
            self.known = keys
            self.changed()


class JwkSet(Struct):
    """A key set (RFC 7517 5)."""

    keys: list[dict[str, Any]]


def make_fetcher(settings: Settings) -> httpx2.AsyncClient:
    """Return the HTTP client that fetches the keys."""
    from asyncgate.parts.process.outgoing import make_client  # a large import, needed only with a URL

    outgoing = settings.security.outgoing
    return make_client(allow=outgoing.allow, deny=outgoing.deny, timeout_seconds=FETCH_SECONDS)


def load_key_files(jwt: Jwt) -> list[RSAKey]:
    """Load the keys that the settings name; raises StartupError for an unsafe one."""
    paths = {"private_key_path": jwt.private_key_path, "public_key_path": jwt.public_key_path,
             "jwks": "" if "://" in jwt.jwks else jwt.jwks}
    return [public_half(key) for name, path in paths.items() if path for key in require_key_file(path, name)]


def require_key_file(path: str, name: str) -> list[RSAKey]:
    """Read the keys of the file that a setting names; raises StartupError for an unsafe one."""
    try:
        return read_key_file(path, name)
    except OSError as error:
        shown = mask_credentials(path)
        raise StartupError(f"security.jwt.{name}: {shown!r} cannot be read: {error.strerror}") from None
    except UNFIT as error:
        raise StartupError(f"security.jwt.{name}: {mask_credentials(path)!r} is invalid: {error}") from None


def read_key_file(path: str, name: str) -> list[RSAKey]:
    """Read the keys of one file, with their private halves; raises an error of UNFIT for an unsafe one."""
    with open(path, "rb") as file:
        text, others = file.read(), os.fstat(file.fileno()).st_mode & 0o077
    keys = key_set(text, strict=True) if name == "jwks" else [import_key(text)]
    if others and any(key.is_private for key in keys):
        raise Flaw("it holds a private key that other users can access; run chmod 600 on it")
    if name == "private_key_path" and not keys[0].is_private:
        raise Flaw("it has no private key")
    return keys


def public_half(key: RSAKey) -> RSAKey:
    """Return the key without its private half, if it has one."""
    return import_key(key.public_key, key.kid)


def key_set(text: bytes, *, strict: bool) -> list[RSAKey]:
    """Read the signature keys of a JWKS; any other key is an error if strict, else it is skipped."""
    keys: list[RSAKey] = []
    for jwk in decode_strictly(text, JwkSet).keys[:MOST_KEYS]:
        try:
            keys += [import_key(jwk)] if fits_signatures(jwk, strict) else []
        except UNFIT as error:
            if strict:
                raise
            log.warning("an invalid key of the issuer is ignored: %s", error)
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
    with warnings.catch_warnings(action="ignore", category=SecurityWarning):     # about small keys, refused below
        key = RSAKey.import_key(value, {"kid": kid} if kid else None)
    if key.public_key.key_size not in KEY_BITS:
        raise Flaw(f"an RSA key must have {KEY_BITS[0]} to {KEY_BITS[-1]} bits, not {key.public_key.key_size}")
    key.ensure_kid()
    return key
