"""What the rooms say to each other about the console: its names, and the session that a person has there."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.connection import Headers

CONSOLE = "/console"
CONSOLE_CLIENT = "asyncgate-console"        # the client id of the console at the gate's own authorization server
SESSION_HEADER = b"x-asyncgate-session"


class BegunSession(Struct):
    """A session that has just begun: the page's half of it, and the header that gives the browser the other half."""

    text: str
    ends_at: float
    cookies: Headers

    def __repr__(self) -> str:
        return "<BegunSession>"     # the halves stay out of logs and tracebacks
