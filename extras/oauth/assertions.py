"""private_key_jwt: a client proves itself by what it signs (RFC 7523 2.2, 3; OpenID Connect Core 9)."""

from __future__ import annotations

import contextlib
import warnings
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from joserfc import jws
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, Key, RSAKey
from joserfc.util import urlsafe_b64decode
from msgspec import Meta, Struct

from asyncgate.extras.oauth.documents import SIGNING_ALGORITHMS, ClientDocument, decode_document
from asyncgate.parts.identity import jwt
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.process.kit import Bounded

if TYPE_CHECKING:
    from asyncgate.extras.oauth.server import AuthorizationServer

MOST_ASSERTION_BYTES = 8192
LONGEST_ASSERTION_SECONDS = 600.0         # how long an assertion may live
ASSERTION_LEEWAY_SECONDS = 30.0
MOST_SETS, MOST_KEYS_IN_SET = 200, 20
ASSERTION_TYPES = ("", "jwt", "client-authentication+jwt", "application/client-authentication+jwt")


class AssertionClaims(Struct, frozen=True):
    """The claims of an assertion."""

    iss: str
    sub: str
    aud: str | list[str]
    exp: Annotated[float, Meta(ge=0)]
    iat: Annotated[float, Meta(ge=0)] = 0.0
    nbf: Annotated[float, Meta(ge=0)] = 0.0
    jti: Annotated[str, Meta(max_length=500)] = ""


class Assertions:
    """Checks what clients sign."""

    def __init__(self, server: AuthorizationServer) -> None:
        self.server = server
        self.rings: Bounded[str, jwt.KeyRing] = Bounded(MOST_SETS)
        self.used: Bounded[tuple[str, str], float] = Bounded()      # until when they are remembered

    async def find_flaw(self, client: stored_oauth.OAuthClient, text: str) -> str | None:
        """Return why an assertion does not prove that a request is from a client; None if it does."""
        try:
            header = read_header(text)
            key = await self._find_key(decode_document((client.document or "{}").encode()), header.get("kid"))
            # Order: from here on without an await, so that of two requests with one assertion one is refused.
            signed = jws.deserialize_compact(text, key, algorithms=list(SIGNING_ALGORITHMS)).payload
            return self._find_claim_flaw(client, jwt.decode_strictly(signed, AssertionClaims), text)
        except jwt.UNFIT as wrong:
            return f"its assertion: {wrong if isinstance(wrong, jwt.Flaw) else type(wrong).__name__}"

    def _find_claim_flaw(self, client: stored_oauth.OAuthClient, claims: AssertionClaims, text: str) -> str | None:
        now, named = self.server.engine.backend.now(), {claims.aud} if isinstance(claims.aud, str) else {*claims.aud}
        used = client.client_id, claims.jti or sha256(text.encode()).hexdigest()
        wrong = {
            "iss and sub of the assertion are not the client": {claims.iss, claims.sub} != {client.client_id},
            # Every one of them: an assertion that another server takes, too, can be sent on by that one.
            "aud of the assertion is not this server": not named or not named <= {
                self.server.issuer, f"{self.server.issuer}/oauth/token"},
            "the assertion has expired": claims.exp + ASSERTION_LEEWAY_SECONDS <= now,
            "the assertion lives too long": claims.exp > now + LONGEST_ASSERTION_SECONDS + ASSERTION_LEEWAY_SECONDS,
            "the assertion is not valid yet": max(claims.iat, claims.nbf) > now + ASSERTION_LEEWAY_SECONDS,
            "the assertion was used before": self.used.get(used, 0.0) > now,
        }
        if why := next((what for what, is_so in wrong.items() if is_so), None):
            return why
        self.used.put(used, claims.exp + ASSERTION_LEEWAY_SECONDS)
        return None

    async def _find_key(self, document: ClientDocument, kid: Any) -> Key:
        if not isinstance(kid, str | None):
            raise jwt.Flaw("kid is not a text")
        ring = jwt.KeyRing(import_keys(document.jwks or {"keys": []}), None, "", self.server.documents.clock)
        if not ring.fixed and document.jwks_uri is not None:
            ring = await self._freshen(document.jwks_uri, kid)
        if (key := ring.get(kid)) is None:
            raise jwt.Flaw("the client has no such key")
        return key

    async def _freshen(self, url: str, kid: str | None) -> jwt.KeyRing:
        """Return the keys at a URL; they are read again now and then, and for an unknown key once a minute."""
        documents = self.server.documents
        http = documents.fetcher()      # at each call: it notes for whom the host is looked up
        if (ring := self.rings.get(url)) is None:
            ring = jwt.KeyRing([], http, url, documents.clock, whose=f"a client at {url}",
                               read=lambda text: import_keys(msgspec.json.decode(text)))
        self.rings.put(url, ring)
        ring.freshen(jwt.REFETCH_SECONDS if ring.get(kid) is None else jwt.FRESH_SECONDS)
        await ring.source.wait()
        return ring


def read_header(text: str) -> dict[str, Any]:
    """Return the header of an assertion; raises Flaw for one that could change which key is trusted."""
    if len(text) > MOST_ASSERTION_BYTES:
        raise jwt.Flaw("it is too long")
    header = jwt.decode_strictly(urlsafe_b64decode(text.partition(".")[0].encode()), dict[str, Any])
    if header.get("alg") not in SIGNING_ALGORITHMS:
        raise jwt.Flaw(f"alg is not {' or '.join(SIGNING_ALGORITHMS)}")
    if str(header.get("typ", "")).lower() not in ASSERTION_TYPES:     # for example an access token of the same key
        raise jwt.Flaw("typ is that of another token")
    if jwt.FOREIGN & header.keys():
        raise jwt.Flaw("its header names a key or an extension")
    return header


def read_subject(text: str) -> str:
    """Return whom an assertion says it is from, which proves nothing yet; empty if it cannot be read."""
    try:
        return jwt.decode_strictly(urlsafe_b64decode(text.split(".")[1].encode()), AssertionClaims).sub
    except jwt.UNFIT:
        return ""


def import_keys(jwks: Any) -> list[Key]:
    """Return the signature keys of a key set; others are ignored."""
    keys = list[Key]()
    for jwk in msgspec.convert(jwks, jwt.JwkSet).keys[:MOST_KEYS_IN_SET]:
        with contextlib.suppress(*jwt.UNFIT):
            if jwk.get("use", "sig") == "sig" and "d" not in jwk:
                keys.append(import_signature_key(jwk))
    return keys


def import_signature_key(jwk: dict[str, Any]) -> RSAKey | ECKey:
    """Return the key of a JWK; raises one of UNFIT for a weak one, or one of another kind."""
    if jwk.get("kty") == "RSA":
        return jwt.import_key(jwk)
    if (jwk.get("kty"), jwk.get("crv")) != ("EC", "P-256"):
        raise jwt.Flaw("it is for other algorithms")
    with warnings.catch_warnings(action="ignore", category=SecurityWarning):
        key = ECKey.import_key(jwk)
    key.ensure_kid()
    return key
