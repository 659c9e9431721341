"""What the page of the console asks for besides operations: how to sign in here, and to sign in and out.

A session is the same for every operation of REST: its page shows `X-AsyncGate-Session`, and its browser the cookie.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import SCOPES, __version__
from asyncgate.parts.faces.http import read_body
from asyncgate.parts.model import connection, errors
from asyncgate.parts.model.console import CONSOLE, CONSOLE_CLIENT
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.members import describe_problem
from asyncgate.parts.model.views import to_utc

if TYPE_CHECKING:
    from asyncgate.parts.faces.serving import Serving

A = TypeVar("A", bound=Struct)
MOST_BYTES = 16 * 2**10
Reply = tuple[Any, connection.Headers]


class SignIn(Struct, forbid_unknown_fields=True):
    """The credential with which a person begins a session."""

    credential: str

    def __repr__(self) -> str:
        return "<SignIn>"       # the credential stays out of logs and tracebacks


class SignOut(Struct, forbid_unknown_fields=True):
    """Whether all sessions of the credential end, or the one that asks."""

    everywhere: bool = False


class Call(Generic[A]):
    """One path that takes a small JSON object by POST."""

    def __init__(self, gate: Serving, form: type[A], answer: Callable[[connection.Scope, A], Awaitable[Reply]]) -> None:
        self.gate, self.answer, self.form = gate, answer, form
        self.settings = replace(gate.settings, max_request_bytes=min(MOST_BYTES, gate.settings.max_request_bytes))

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer one request."""
        try:
            if scope["method"] != "POST":
                raise errors.MethodNotAllowed(f"{scope['path']} does not support {scope['method']}", allow=["POST"])
            reply, more = await self.answer(scope, self._read(await read_body(scope, receive, self.settings)))
            status, body = 200, encode_json(reply)
        except errors.GateError as refusal:
            self.gate.guard.refused(scope, refusal)
            status, body, more = refusal.status, encode_json(refusal.body()), self.gate.describe_refusal(scope, refusal)
        except Exception as bug:
            status, body, more = 500, encode_json(errors.log_fault(scope["path"], bug).body()), []
        await self.gate.send(send, scope, status, body, more)

    def _read(self, body: bytes) -> A:
        try:
            return msgspec.json.decode(body or b"{}", type=self.form)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            raise errors.InvalidRequest(describe_problem(wrong, self.form)) from None


def make_calls(gate: Serving) -> dict[str, Any]:
    """Return what answers at the paths of the console that are not files."""
    async def sign_in(scope: connection.Scope, ask: SignIn) -> Reply:
        begun = await gate.guard.sign_in(scope, ask.credential)
        return {"session": begun.text, "ends_at": to_utc(begun.ends_at)}, begun.cookies

    async def sign_out(scope: connection.Scope, ask: SignOut) -> Reply:
        return {"ok": True}, await gate.guard.sign_out(scope, ask.everywhere)

    return {f"{CONSOLE}/sign-in": Call(gate, SignIn, sign_in), f"{CONSOLE}/sign-out": Call(gate, SignOut, sign_out)}


def describe_console(gate: Serving) -> dict[str, Any]:
    """Return what the page has to know before anybody has signed in; nothing of it is secret."""
    return {"version": __version__, "open": gate.settings.allow_insecure_dev,
            "sign_in": {"credential": True, "oauth": describe_oauth(gate)}}


def describe_oauth(gate: Serving) -> dict[str, str] | None:
    """Return where the page asks for an access token by code and PKCE; None without an authorization server.

    The console asks for every scope: a person's own rights are the limit.
    """
    if not gate.settings.security.oauth.enabled:
        return None
    issuer = gate.settings.public_url.rstrip("/")
    return {"client_id": CONSOLE_CLIENT, "authorize": f"{issuer}/oauth/authorize", "token": f"{issuer}/oauth/token",
            "redirect_uri": f"{issuer}{CONSOLE}/", "scope": " ".join(sorted(SCOPES)), "resource": issuer}
