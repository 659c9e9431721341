"""Sessions of the console: a credential that is sealed into a cookie, while the page has the key.

    the cookie      the credential and when the session began, sealed with AES-GCM; no script of the page can read it
    the page        the id of the session and 256 random bits, where only pages of the gate's own port can read them
    the gate        the secret of its database: the key is made of it and of what the page has

Browsers send a cookie to every port of a host, so the cookie alone is worth nothing.  What the page has is worth
nothing without the browser, and another site's page cannot send it.  Both together are a session and never the
credential, because the gate alone can unseal it.  Nothing is stored, so every process takes every session; what ends a
credential ends its sessions.  Signing out is a revocation, which all processes know within five seconds.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Work
from asyncgate.parts.identity import revocations
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.directory import Directory, audit_in_tenant
from asyncgate.parts.identity.session_rows import end_grants, find_grants, is_about_self
from asyncgate.parts.model import connection, errors, stored_oauth
from asyncgate.parts.model.caller import ShownSession
from asyncgate.parts.model.console import CONSOLE_CLIENT, SESSION_HEADER, BegunSession

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SESSION_TEXT = re.compile(r"(?P<id>[0-9a-f]{32})\.(?P<key>[A-Za-z0-9_-]{43})\Z")
CREDENTIAL_TEXT = re.compile(r"[!-~]([ -~]*[!-~])?\Z")      # visible ASCII; a shared token may have blanks inside
NONCE_BYTES, KEY_BYTES = 12, 32
MOST_CREDENTIAL_LENGTH = 2700   # sealed and encoded, it fits the 4,096 bytes that browsers allow a cookie
MOST_SESSIONS = 4               # of one browser: with sign-ins under way they have to fit the headers of a request
MOST_LIKE = 4                   # cookies of one name that are tried: a server on another port may have added some


class Sealed(Struct):
    """What a cookie says."""

    credential: str
    begun_at: float


class Opened(Struct):
    """The session of a request, and its headers with the credential in the place of the session."""

    shown: ShownSession
    headers: connection.Headers


class ConsoleSessions:
    """Begins, opens and ends the sessions of the console."""

    def __init__(self, engine: Engine, revocations: revocations.RevocationSet) -> None:
        self.engine, self.revocations = engine, revocations
        self.seconds = engine.settings.console.session_seconds
        parts = urlsplit(engine.settings.public_url)
        self.public_origin = f"{parts.scheme}://{parts.netloc}".lower()

    # Beginning.

    def read_credential(self, scope: connection.Scope, text: str) -> connection.Headers:
        """Return the headers of a sign-in as if they had shown the credential; raises InvalidRequest or Forbidden."""
        require_own_page(scope, self.public_origin)
        text = text.strip()
        if not CREDENTIAL_TEXT.match(text):
            raise errors.InvalidRequest(
                "credential: send the key or token itself, which has visible ASCII characters only")
        if len(text) > MOST_CREDENTIAL_LENGTH:
            raise errors.InvalidRequest(f"credential: it has {len(text)} characters; a session holds at most "
                                        f"{MOST_CREDENTIAL_LENGTH}, so sign in with an issued key")
        return show_credential(scope["headers"], text)

    async def begin(self, scope: connection.Scope, caller: Caller, credential: str) -> BegunSession:
        """Seal the credential of a caller who has proven it; return both halves of the session."""
        now = self.engine.backend.now()
        id, half = f"{int(now):08x}{secrets.token_hex(12)}", secrets.token_bytes(KEY_BYTES)
        ends_at = min(now + self.seconds, await self._find_end(caller, credential))
        name, nonce = name_cookie(scope, id), secrets.token_bytes(NONCE_BYTES)
        sealed = nonce + self._make_cipher(half).encrypt(
            nonce, msgspec.msgpack.encode(Sealed(credential, now)), name.encode())
        kept = set_cookie(scope, name, encode(sealed), max(1, round(ends_at - now)))
        return BegunSession(f"{id}.{encode(half)}", ends_at, [kept, *drop_oldest(scope)])

    async def _find_end(self, caller: Caller, credential: str) -> float:
        """Return when a proven credential expires; infinity if it does not, or does not say."""
        if caller.key_id is not None:
            row = await self.engine.backend.find_key(caller.key_id)
            return float("inf") if row is None or row[2].expires_at is None else row[2].expires_at
        if caller.token is None:
            return float("inf")
        payload = credential.split(".")[1]
        return msgspec.json.decode(decode(payload), type=Expiring).exp

    def _make_cipher(self, half: bytes) -> AESGCM:
        """Return the cipher of one session: whoever has both halves still needs the secret of the database."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # large, and most processes never need it

        return AESGCM(hmac.digest(self.engine.backend.secret, b"asyncgate console session\0" + half, "sha256"))

    # Every request.

    def open(self, scope: connection.Scope, headers: connection.Headers, accepted: bool) -> Opened | None:
        """Return the session that a request shows, None if it shows none; raises InvalidToken and its like.

        `accepted` says whether the path takes sessions.
        """
        texts = [value.decode("latin-1") for name, value in headers if name == SESSION_HEADER]
        if not texts:
            return None
        if len(texts) > 1 or connection.read_token(headers) is not None:
            raise errors.TwoCredentials(
                "two credentials in one request; show the session of the console alone, or another "
                "credential without it")
        if not accepted:
            raise errors.InvalidToken(
                "a session of the console is for the operations of REST alone; show another credential")
        require_own_page(scope, self.public_origin)
        if (shown := SESSION_TEXT.match(texts[0])) is None:
            raise refuse_session("session_malformed", "the header is not a session")
        sealed = self._unseal(scope, shown["id"], decode(shown["key"]))
        return Opened(ShownSession(shown["id"], sealed.begun_at), show_credential(headers, sealed.credential))

    def _unseal(self, scope: connection.Scope, id: str, half: bytes) -> Sealed:
        from cryptography.exceptions import InvalidTag

        name, values = name_cookie(scope, id), list(list_values(scope, name_cookie(scope, id)))
        for value in values[:MOST_LIKE]:
            try:
                sealed = decode(value)
                text = self._make_cipher(half).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
                return msgspec.msgpack.decode(text, type=Sealed)
            except (ValueError, InvalidTag):    # a wrong alphabet, a wrong length, another key
                continue
        raise refuse_session("session_unsealable" if values else "session_without_cookie",
                             "the cookie is not that of the session" if values else "the browser sent no cookie of it")

    async def require_current(self, caller: Caller) -> None:
        """Refuse a session that is too old or was signed out; raises InvalidToken, and DatabaseUnavailable."""
        if (shown := caller.console) is None:
            return
        if self.engine.backend.now() - shown.begun_at >= self.seconds:
            raise refuse_session("session_expired", "console.session_seconds have passed since the session began")
        if not self.revocations.is_fresh():
            await self.revocations.freshen()
        if any(self.revocations.was_ended("console", name, shown.begun_at)
               for name in (revocations.name_console_session(shown.id), revocations.name_credential(caller))):
            raise refuse_session("session_signed_out", "somebody signed out")

    # Ending.

    async def end(self, scope: connection.Scope, caller: Caller, everywhere: bool) -> connection.Headers:
        """End the session of a request, or all sessions of its credential; return the header that drops the cookie."""
        assert caller.console is not None
        event = "console_signed_out_everywhere" if everywhere else "console_signed_out"
        grants = await self._find_own_grants(caller, everywhere)
        if grants:
            await end_grants(self.engine, caller, grants, event, None)

        def sign_out(work: Work) -> None:
            revocations.end_console_sessions(work, caller, everywhere)
            audit_change(self.engine, work, event, "info", caller, of_tenant=caller.tenant_id)
        await Directory(self.engine).change(sign_out, *revocations.REVOCATION_KEYS)
        await audit_in_tenant(self.engine, caller, caller.tenant_id, event, "info")
        return [set_cookie(scope, name_cookie(scope, caller.console.id), "", 0)]

    async def _find_own_grants(self, caller: Caller, everywhere: bool) -> list[stored_oauth.Grant]:
        """Return the sessions at the authorization server that the console itself has begun, for this person."""
        if caller.token is None or caller.token.client_id != CONSOLE_CLIENT:
            return []
        session_id = caller.token.session_id
        return await find_grants(self.engine, lambda grant: (
            grant.client_id == CONSOLE_CLIENT and is_about_self(caller, grant)
            and (everywhere or grant.grant_id == session_id)))


class Expiring(Struct):
    """What a token says of its end."""

    exp: float


def refuse_session(code: str, why: str) -> errors.InvalidToken:
    """Refuse a session; the reason is only for the audit log."""
    refusal = errors.InvalidToken("this session of the console has ended; sign in again")
    refusal.because = code, why
    return refusal


def require_own_page(scope: connection.Scope, public_origin: str) -> None:
    """Refuse a request of another page than the gate's own, as far as the browser says; raises Forbidden.

    Pages of other ports of this host count as others, though browsers send them its cookies.
    """
    headers: connection.Headers = scope["headers"]
    host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1").lower()
    for name, value in headers:
        text = value.decode("latin-1").lower()
        if name == b"sec-fetch-site" and text != "same-origin":
            raise errors.Forbidden(
                "a session of the console works only in the console of this gate, not in other pages")
        if name == b"origin" and text not in (f"http://{host}", f"https://{host}", public_origin):
            raise errors.Forbidden(
                "a session of the console works only in the console of this gate, which is another Origin; "
                "behind a proxy that changes Host, set public_url")


def show_credential(headers: connection.Headers, credential: str) -> connection.Headers:
    """Return headers that show this credential and no other one."""
    others = [(name, value) for name, value in headers if name not in (b"authorization", b"x-api-key", SESSION_HEADER)]
    return [*others, (b"authorization", b"Bearer " + credential.encode())]


# The cookies.


def name_cookie(scope: connection.Scope, id: str) -> str:
    """Return the name of a session's cookie; browsers take __Host- from this host over TLS alone."""
    return f"{'__Host-' if scope['scheme'] == 'https' else ''}asyncgate-console-{id}"


def set_cookie(scope: connection.Scope, name: str, value: str, seconds: int) -> tuple[bytes, bytes]:
    """Return the header that sets a cookie, or drops it after 0 seconds."""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return b"set-cookie", f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}".encode()


def list_values(scope: connection.Scope, name: str) -> Iterator[str]:
    """Yield the values of the cookies with a name."""
    return (value for cookie, value in connection.list_cookies(scope["headers"]) if cookie == name)


def drop_oldest(scope: connection.Scope) -> connection.Headers:
    """Return the headers that drop the oldest sessions of a browser that has too many; ids begin with their time."""
    beginning = name_cookie(scope, "")
    known = sorted({name for name, _ in connection.list_cookies(scope["headers"])
                    if name.startswith(beginning) and re.fullmatch("[0-9a-f]{32}", name.removeprefix(beginning))})
    return [set_cookie(scope, name, "", 0) for name in known[:max(0, len(known) - MOST_SESSIONS + 1)]]


def encode(text: bytes) -> str:
    """Encode bytes as base64url without padding."""
    return urlsafe_b64encode(text).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Decode base64url without padding; raises ValueError."""
    return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
