"""What a refusal tells a program about where and for what to get an access token (RFC 6750, RFC 9728)."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from asyncgate.parts.model import errors
from asyncgate.parts.model.caller import Caller
from asyncgate.parts.model.connection import Headers, Scope

RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
MOUNTS = ("", "/mcp", "/mcp/u")         # of the resources: REST, and MCP twice
# What agents and workers commonly need.  Programs ask for it at once, because nobody relies on asking for more later.
COMMON_SCOPES = ("receipts:ack", "receipts:read", "tasks:lease", "tasks:read", "tasks:write")


class Challenges:
    """Makes the WWW-Authenticate headers of a gate that has an authorization server."""

    def __init__(self, issuer: str) -> None:
        parts = urlsplit(issuer)
        self.metadata = f"{parts.scheme}://{parts.netloc}{RESOURCE_METADATA}{parts.path}"

    def make(self, scope: Scope, refusal: errors.GateError) -> Headers:
        """Return the challenge of a refusal, if it has one."""
        caller: Caller | None = scope.get("asyncgate.caller")
        if isinstance(refusal, errors.Unauthenticated):     # it names an error only if a credential was sent
            error = f"{refusal.challenge}," if "=" in refusal.challenge else refusal.challenge
            return [(b"www-authenticate", f"{error} {self._about(scope, COMMON_SCOPES)}".encode())]
        if lacks_scopes(refusal, caller):
            assert caller is not None
            named = self._about(scope, sorted(caller.scopes | find_least_scopes(refusal)))
            return [(b"www-authenticate", f'Bearer error="insufficient_scope", {named}'.encode())]
        return []

    def _about(self, scope: Scope, scopes: Iterable[str]) -> str:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        mount = path if path in MOUNTS else ""
        return f'resource_metadata="{self.metadata}{mount}", scope="{" ".join(scopes)}"'


def lacks_scopes(refusal: errors.GateError, caller: Caller | None) -> bool:
    """Whether a caller with an access token could go on with another one; an issued key gets no more scopes."""
    has_token = caller is not None and caller.token is not None
    return has_token and isinstance(refusal, errors.Forbidden) and bool(refusal.scopes)


def find_least_scopes(refusal: errors.GateError) -> frozenset[str]:
    """Return what a refused operation needs, without the rights of an admin where it can be had without them.

    With the scopes that the token has, this is the list of a new one: some programs ask only for what they are told.
    """
    wanted = refusal.scopes if isinstance(refusal, errors.Forbidden) else frozenset()
    return wanted.intersection(COMMON_SCOPES) or wanted & {"admin:read"} or wanted
