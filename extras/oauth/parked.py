"""A sign-in under way: it is kept in a sealed cookie of the browser that began it, not in a table.

So strangers cannot fill a table, a link to the middle of somebody else's sign-in is worth nothing, and every gate with
the same signing key can go on with it.  Each step seals a new cookie; what the step before had put in, such as the
state of the identity provider, is good once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from joserfc.util import urlsafe_b64decode, urlsafe_b64encode
from msgspec import Struct

from asyncgate.extras.oauth.requests import AuthorizationRequest, BadRequestPage
from asyncgate.extras.oauth.wire import Request

if TYPE_CHECKING:
    from asyncgate.extras.oauth.server import AuthorizationServer

PARKED_SECONDS = 600
MOST_COOKIE_BYTES = 3800        # browsers drop a cookie of more than 4,096 bytes with its name and attributes
MOST_PARKED = 4                 # sign-ins of one browser: together they have to fit the headers of a request
SIGN_IN_ID = re.compile(r"[0-9a-f]{32}\Z")
NONCE_BYTES = 12


class Parked(Struct):
    """A sign-in under way."""

    id: str
    begun_at: float
    asked: AuthorizationRequest
    prompt: str = ""                # what the client wants to be asked: login, consent, select_account
    # On the way to an identity provider and back:
    provider: str = ""
    state: str = ""
    nonce: str = ""
    verifier: str = ""
    # When it is known who the person is:
    user_id: str = ""
    csrf: str = ""                  # of the consent page
    shown: frozenset[str] = frozenset()     # the scopes on it


def park(server: AuthorizationServer, request: Request, parked: Parked) -> list[tuple[bytes, bytes]]:
    """Return the headers that keep a sign-in in the browser, and drop the oldest of too many."""
    name = name_cookie(server, parked.id)
    nonce = secrets.token_bytes(NONCE_BYTES)
    sealed = nonce + make_cipher(server).encrypt(nonce, msgspec.msgpack.encode(parked), name.encode())
    value = urlsafe_b64encode(sealed).decode()
    if len(name) + len(value) > MOST_COOKIE_BYTES:
        raise BadRequestPage("the request is too long for a sign-in: its state, redirect_uri and client_id together")
    others = sorted((other for other in list_parked(server, request) if other.id != parked.id),
                    key=lambda parked: parked.begun_at)
    known = {name_cookie(server, other.id) for other in others[-(MOST_PARKED - 1):]} | {name}
    stale = [other for other in request.cookies() if is_sign_in(server, other) and other not in known]
    return [set_cookie(server, name, value, PARKED_SECONDS), *(set_cookie(server, other, "", 0) for other in stale)]


def drop_parked(server: AuthorizationServer, parked: Parked) -> tuple[bytes, bytes]:
    """Return the header that ends a sign-in."""
    return set_cookie(server, name_cookie(server, parked.id), "", 0)


def find_parked(server: AuthorizationServer, request: Request, id: str) -> Parked | None:
    """Return a sign-in that this browser has begun, unless it is too old."""
    if not SIGN_IN_ID.match(id):
        return None
    name = name_cookie(server, id)
    return open_parked(server, name, request.cookies().get(name, ""))


def find_newest(server: AuthorizationServer, request: Request) -> Parked | None:
    """Return the newest sign-in of this browser in which nobody has signed in yet."""
    waiting = [parked for parked in list_parked(server, request) if not parked.user_id]
    return max(waiting, key=lambda parked: parked.begun_at, default=None)


def list_parked(server: AuthorizationServer, request: Request) -> Iterator[Parked]:
    """Yield the sign-ins of this browser."""
    for name, value in request.cookies().items():
        if is_sign_in(server, name) and (parked := open_parked(server, name, value)):
            yield parked


def open_parked(server: AuthorizationServer, name: str, value: str) -> Parked | None:
    """Unseal a cookie; None if it is not a sign-in of this gate, or is too old."""
    try:
        sealed = urlsafe_b64decode(value.encode("ascii"))
        text = make_cipher(server).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        parked = msgspec.msgpack.decode(text, type=Parked)
    except (ValueError, InvalidTag):        # a wrong alphabet, a wrong length, another key, another release's form
        return None
    age = server.engine.backend.now() - parked.begun_at
    return parked if age < PARKED_SECONDS else None


def make_cipher(server: AuthorizationServer) -> AESGCM:
    """Return the cipher of the cookies."""
    return AESGCM(server.keys.secret("sign-in"))


def name_cookie(server: AuthorizationServer, id: str) -> str:
    """Return the name of a sign-in's cookie; browsers take __Host- from this host over TLS alone."""
    return f"{'__Host-' if server.secure else ''}asyncgate-sign-in-{id}"


def is_sign_in(server: AuthorizationServer, name: str) -> bool:
    """Whether a cookie has the name of a sign-in's cookie."""
    beginning = name_cookie(server, "")
    return name.startswith(beginning) and SIGN_IN_ID.match(name.removeprefix(beginning)) is not None


def set_cookie(server: AuthorizationServer, name: str, value: str, seconds: int) -> tuple[bytes, bytes]:
    """Return the header that sets a cookie; Lax, because the identity provider leads back by a link."""
    secure = "; Secure" if server.secure else ""
    return b"set-cookie", f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}".encode("ascii")
