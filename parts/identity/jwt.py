"""Access tokens: JWTs of the issuers that this gate trusts (spec 21.2.1, RFC 9068, RFC 8725).

A token is valid if a known key has signed it and its claims are for this gate and the present time.  Security: the
gate never follows anything in a token.  It looks `kid` up in memory, and refuses a header that contains or names a key.
Keys come from files, which must be valid or the gate does not start, and from the issuer's URL, which may be down.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from joserfc import jws
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError, SecurityWarning
from joserfc.jwk import Key, KeySet, RSAKey
from joserfc.util import urlsafe_b64decode
from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity.keys_stored import default_scopes
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.caller import ShownToken
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Jwt, Settings, TrustedIssuer, Uuid, mask_credentials
from asyncgate.parts.process.kit import Bounded, Refetch

if TYPE_CHECKING:
    import httpx2

JsonForm = TypeVar("JsonForm")

log = logging.getLogger("asyncgate")

MOST_TOKEN_BYTES = 8192         # the longest accepted token
KEY_BITS = range(2048, 8193)
MOST_KEYS = 100             # keys of a key set; the others are ignored
REFETCH_SECONDS = 60.0      # the shortest time between two fetches of the issuer's keys
FRESH_SECONDS = 600.0       # the longest time until the gate notices that the issuer withdrew a key
FETCH_SECONDS = 5.0
FOREIGN = {"jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"}     # headers that could change which key is trusted


class Claims(Struct, frozen=True):
    """The claims of a token; kinds and roles that only the gate itself has are invalid."""

    iss: str
    aud: str | list[str]
    sub: wire.Name
    iat: Annotated[float, Meta(ge=0)]
    exp: Annotated[float, Meta(ge=0)]
    tenant_id: Uuid
    principal_kind: Literal["agent", "worker", "service", "human"]
    nbf: Annotated[float, Meta(ge=0)] = 0.0
    principal_id: wire.Name | None = None            # default: sub
    principal_instance_id: wire.Name | None = None
    role: Literal["agent", "worker", "admin"] | None = None     # default: by the kind
    scope: str | None = None
    jti: wire.Name | None = None
    sid: wire.Name | None = None                     # the grant that the token came from
    client_id: wire.Name | None = None

    @property
    def principal(self) -> wire.Principal:
        """Return the principal that the claims name."""
        return wire.Principal(self.principal_kind, self.principal_id or self.sub, self.principal_instance_id)


class Revocations(Protocol):
    """Knows which tokens were revoked before they expired; its `version` differs after each new revocation."""

    version: int

    def is_fresh(self) -> bool:
        """Whether `find` may be asked now."""

    async def freshen(self) -> None:
        """Find out what was revoked meanwhile; raises DatabaseUnavailable."""

    def find(self, caller: Caller) -> str | None:
        """Return what of a caller's token was revoked; called on every request, so an implementation must not wait."""


class NoRevocations:
    """No token is ever revoked."""

    version = 0

    def is_fresh(self) -> bool:
        """Return True."""
        return True

    async def freshen(self) -> None:
        """Do nothing."""

    def find(self, caller: Caller) -> str | None:
        """Return None."""
        return None


class Verifying(Protocol):
    """The keys of one issuer."""

    def freshen(self) -> None:
        """Look for changed keys, if the last look is too old."""

    async def find(self, kid: str | None) -> RSAKey:
        """Return the key that a token names; raises Flaw."""


class Issuer(Struct, frozen=True):
    """An issuer whose tokens are accepted, its keys, and what it may assert; empty sets are any."""

    name: str
    keys: Verifying
    audience: frozenset[str]
    tenants: frozenset[str]
    roles: frozenset[str]
    scopes: frozenset[str]
    longest_seconds: float


class Flaw(Exception):
    """Why a token is invalid; for the audit log, never for the caller."""

    def __init__(self, why: str, code: str = "token_malformed") -> None:
        super().__init__(why)
        self.code = code


# Errors of reading a key or a token; a TypeError is a PEM that needs a password, msgspec's errors are ValueErrors.
UNFIT = (Flaw, JoseError, ValueError, TypeError, LookupError, RecursionError)


class ProvenToken(Struct):
    """A token that was verified: whose it is, until when, and the revocations among which it was not."""

    caller: Caller
    until: float
    version: int = -1


class AccessTokens:
    """Accepts access tokens of all trusted issuers.

    Security: `iss` chooses the issuer before anything is verified, by an exact match; from then on only that issuer's
    keys and limits count, so that no issuer can speak for another.
    """

    def __init__(self, settings: Settings, *, now: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic, http: httpx2.AsyncClient | None = None) -> None:
        self.leeway_seconds, self.now = settings.security.jwt.leeway_seconds, now
        self.revocations: Revocations = NoRevocations()
        self.note_revoked: Callable[[Caller, str], None] = lambda caller, kind: None
        self.proven: Bounded[bytes, ProvenToken] = Bounded()       # by digest: tokens are secret
        self.issuers: dict[str, Issuer] = {}
        for issuer in list_issuers(settings, http, self.proven.clear, clock):
            self.trust(issuer)

    def trust(self, issuer: Issuer) -> None:
        """Accept the tokens of one more issuer; raises StartupError for a name that is taken."""
        if issuer.name in self.issuers:
            raise errors.StartupError(f"two issuers of access tokens have the name {issuer.name}: public_url, "
                                      "security.jwt.issuer and security.jwt.issuers must all differ")
        self.issuers[issuer.name] = issuer

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a token; None for a text that is not a JWT; raises InvalidToken."""
        if token is None or not token.startswith("eyJ") or "." not in token:     # eyJ is {" in base64
            return None
        for issuer in self.issuers.values():
            issuer.keys.freshen()
        digest, taken = sha256(token.encode()).digest(), self.revocations
        known = self.proven.get(digest)
        if known is not None and known.version == taken.version and taken.is_fresh() and self.now() < known.until:
            self.proven.move_to_end(digest)
            return known.caller
        try:
            return await self._check(token, digest)
        except UNFIT as wrong:
            raise make_token_refusal(wrong) from None

    async def recheck(self, caller: Caller) -> None:
        """Refuse a waiting call whose token was revoked meanwhile; raises InvalidToken."""
        try:
            await self._require_unrevoked(caller)
        except Flaw as wrong:
            raise make_token_refusal(wrong) from None

    async def _check(self, token: str, digest: bytes) -> Caller:
        if len(token) > MOST_TOKEN_BYTES:
            raise Flaw(f"the token is longer than {MOST_TOKEN_BYTES} characters", "token_too_long")
        proven = self.proven.get(digest) or await self._prove(token, digest)
        if self.now() >= proven.until:
            self.proven.pop(digest, None)
            raise Flaw("exp has passed", "token_expired")
        proven.version = await self._require_unrevoked(proven.caller)
        return proven.caller

    async def _require_unrevoked(self, caller: Caller) -> int:
        """Refuse a token that was revoked; return the version of the revocations that it is not among.

        Raises Flaw, and DatabaseUnavailable if nobody can tell.  Order: after the proof, so that a text that nobody has
        signed never costs a look at the database.
        """
        if not self.revocations.is_fresh():
            await self.revocations.freshen()
        if (kind := self.revocations.find(caller)) is not None:
            self.note_revoked(caller, kind)
            raise Flaw(f"the {kind} of the token was revoked" if kind != "token" else "the token was revoked",
                       "token_revoked")
        return self.revocations.version

    async def _prove(self, token: str, digest: bytes) -> ProvenToken:
        kid = key_id(token)
        unproven = decode_strictly(urlsafe_b64decode(token.split(".", 2)[1].encode()), Unproven)
        if (issuer := self.issuers.get(unproven.iss)) is None:
            raise Flaw("iss is another issuer", "token_issuer")
        key = await issuer.keys.find(kid)
        # Order: no await from here on, so the keys cannot change between the check and its place in the cache.
        claims = decode_strictly(verify_signature(token, key), Claims)
        if wrong := find_flaw(claims, issuer, self.now(), self.leeway_seconds):
            raise Flaw(*wrong)
        proven = ProvenToken(caller_of_claims(claims, issuer), claims.exp + self.leeway_seconds)
        self.proven.put(digest, proven)
        return proven


def make_token_refusal(wrong: Exception) -> errors.InvalidToken:
    """Make the refusal of an access token; the reason is only for the audit log."""
    refusal = errors.InvalidToken(
        "this access token is invalid: it has expired, was revoked, or is not for this gate; get a new "
        "one from its issuer")
    refusal.because = reason_of(wrong)
    return refusal


class Unproven(Struct):
    """What is read of a token before its signature is verified."""

    iss: str


def list_issuers(settings: Settings, http: httpx2.AsyncClient | None, changed: Callable[[], None],
                 clock: Callable[[], float]) -> list[Issuer]:
    """Return the issuers that the settings name, with their keys; raises StartupError for unsafe ones."""
    jwt = settings.security.jwt
    named: list[tuple[str, Jwt | TrustedIssuer, list[RSAKey]]] = [
        (issuer.issuer, issuer, [] if "://" in issuer.jwks else
         [public_half(key) for key in require_key_file(issuer.jwks, "jwks")]) for issuer in jwt.issuers]
    # With OAuth the private key signs the gate's own tokens, whose issuer is public_url: see oauth/signing.py.
    without = replace(jwt, private_key_path="") if settings.security.oauth.enabled else jwt
    if without.private_key_path or jwt.public_key_path or jwt.jwks:
        paths = {"private_key_path": without.private_key_path, "public_key_path": jwt.public_key_path, "jwks": jwt.jwks}
        named.insert(0, (jwt.issuer, jwt, [
            public_half(key) for name, path in paths.items() if path and "://" not in path
            for key in require_key_file(path, name)]))
    issuers = []
    for name, limits, fixed in named:
        if not limits.audience:
            where = "security.jwt.audience" if limits is jwt else f"audience of the issuer {name}"
            raise errors.StartupError(f"{where} is empty, so the gate would refuse every access token; set it")
        url = limits.jwks if "://" in limits.jwks else ""
        http = http or (make_fetcher(settings) if url else None)
        keys = KeyRing(fixed, http if url else None, url, clock, changed)
        issuers.append(Issuer(name, keys, frozenset(limits.audience), frozenset(limits.tenants),
                              frozenset(limits.roles), frozenset(getattr(limits, "scopes", ())),
                              limits.max_lifetime_days * DAY_SECONDS))
    return issuers


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


def find_flaw(claims: Claims, issuer: Issuer, now: float, leeway_seconds: float) -> tuple[str, str] | None:
    """Return why claims are invalid now, in words and as a code; None if they are valid."""
    audience = {claims.aud} if isinstance(claims.aud, str) else {*claims.aud}
    wrong = {
        ("iss is another issuer", "token_issuer"): claims.iss != issuer.name,
        ("aud does not name this gate", "token_audience"): audience.isdisjoint(issuer.audience),
        ("nbf is in the future", "token_not_yet_valid"): claims.nbf > now + leeway_seconds,
        ("iat is in the future", "token_not_yet_valid"): claims.iat > now + leeway_seconds,
        ("the issuer may not speak for that tenant", "token_tenant"): bool(issuer.tenants) and (
            claims.tenant_id not in issuer.tenants),
        ("the issuer may not give that role", "token_role"): role_of(claims) not in issuer.roles,
        ("exp is too long after iat", "token_lifetime"): claims.exp - claims.iat > issuer.longest_seconds,
    }
    return next((what for what, is_so in wrong.items() if is_so), None)


def role_of(claims: Claims) -> Literal["agent", "worker", "admin"]:
    """Return the role that a token gives."""
    return claims.role or ("worker" if claims.principal_kind == "worker" else "agent")


def caller_of_claims(claims: Claims, issuer: Issuer) -> Caller:
    """Return the caller of valid claims; scopes that the gate does not know, such as openid, are ignored.

    Scopes that the issuer may not give are ignored, too.
    """
    role = role_of(claims)
    scopes = default_scopes(role) if claims.scope is None else SCOPES.intersection(re.split("[ ,]+", claims.scope))
    shown = ShownToken(claims.sub, claims.jti, claims.sid, claims.client_id)
    return Caller(claims.tenant_id, claims.principal, role, scopes & issuer.scopes if issuer.scopes else scopes,
                  issued_at=claims.iat, token=shown)


class KeyRing:
    """The keys that verify what somebody signs: those from files, and those at a URL.

    The keys at the URL are fetched again regularly; while they cannot be fetched, the last ones stay valid.
    """

    def __init__(self, fixed: Sequence[Key], http: httpx2.AsyncClient | None, url: str,
                 clock: Callable[[], float], changed: Callable[[], None] = lambda: None, *,
                 read: Callable[[bytes], Sequence[Key]] | None = None, whose: str = "the issuer") -> None:
        self.fixed, self.http, self.url, self.changed, self.whose = fixed, http, url, changed, whose
        self.read = read or partial(key_set, strict=False)
        self.known, self.away = KeySet([*fixed]), False
        self.source = Refetch(self._fetch, clock)

    async def find(self, kid: str | None) -> RSAKey:
        """Return a key by its id, or the only key for a token without one; fetches again for an unknown id."""
        key = self.get(kid)
        if key is None:
            self.freshen(REFETCH_SECONDS)
            await self.source.wait()
            key = self.get(kid)
        if key is None and self.away:
            wait = max(1, round(self.source.begun_at + REFETCH_SECONDS - self.source.clock()))
            raise errors.IssuerUnavailable(
                "the issuer's keys cannot be fetched, so this access token cannot be checked; "
                "try again later", retry_after=wait)
        if not isinstance(key, RSAKey):
            raise Flaw("kid is unknown", "token_key")
        return key

    def get(self, kid: str | None) -> Key | None:
        """Return a key that is known by its id, or the only one for no id."""
        try:
            return self.known.get_by_kid(kid)
        except InvalidKeyIdError:
            return None

    def freshen(self, after_seconds: float = FRESH_SECONDS) -> None:
        """Start to fetch the keys, unless the last fetch began less than `after_seconds` ago."""
        if self.http:
            self.source.begin(after_seconds)

    async def _fetch(self) -> None:
        import httpx2

        assert self.http is not None
        try:
            keys = self.read((await self.http.get(self.url)).raise_for_status().content)
        except (httpx2.HTTPError, httpx2.InvalidURL, *UNFIT) as error:
            self.away = True
            log.warning("cannot fetch the keys of %s; the last ones stay valid: %s: %s", self.whose,
                        type(error).__name__, error)
            return
        self.away, known = False, KeySet([*self.fixed, *keys])
        if known.as_dict() != self.known.as_dict():
            self.known = known
            self.changed()


class JwkSet(Struct):
    """A key set (RFC 7517 5)."""

    keys: list[dict[str, Any]]


def make_fetcher(settings: Settings) -> httpx2.AsyncClient:
    """Return the HTTP client that fetches the keys."""
    from asyncgate.parts.process.outgoing import make_client  # a large import, needed only with a URL

    outgoing = settings.security.outgoing
    return make_client(allow=outgoing.allow, deny=outgoing.deny, timeout_seconds=FETCH_SECONDS)


def require_key_file(path: str, name: str) -> list[RSAKey]:
    """Read the keys of the file that a setting names; raises StartupError for an unsafe one."""
    try:
        return read_key_file(path, name)
    except OSError as error:
        shown = mask_credentials(path)
        raise errors.StartupError(f"security.jwt.{name}: {shown!r} cannot be read: {error.strerror}") from None
    except UNFIT as error:
        raise errors.StartupError(f"security.jwt.{name}: {mask_credentials(path)!r} is invalid: {error}") from None


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
