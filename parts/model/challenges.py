"""What a refusal tells a program about where to get an access token (RFC 6750, RFC 9728)."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from asyncgate.parts.model.connection import Scope
from asyncgate.parts.model.errors import Unauthenticated

RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
MOUNTS = ("", "/mcp", "/mcp/u")         # of the resources: REST, and MCP twice
# What agents and workers commonly need.  Programs ask for it at once, because nobody relies on asking for more later.
COMMON_SCOPES = ("receipts:ack", "receipts:read", "tasks:lease", "tasks:read", "tasks:write")


class Challenges:
    """Makes the WWW-Authenticate headers of a gate with this public URL."""

    def __init__(self, public_url: str) -> None:
        parts = urlsplit(public_url.rstrip("/"))
        self.metadata = f"{parts.scheme}://{parts.netloc}{RESOURCE_METADATA}{parts.path}"

    def for_missing(self, scope: Scope, no: Unauthenticated) -> bytes:
        """Return the challenge of a 401; it names an error only if a credential was sent."""
        return f'{no.challenge}{"," if "=" in no.challenge else ""} {self._about(scope, COMMON_SCOPES)}'.encode()

    def for_scopes(self, scope: Scope, missing: Iterable[str]) -> bytes:
        """Return the challenge of a 403 to a credential without these scopes."""
        return f'Bearer error="insufficient_scope", {self._about(scope, missing)}'.encode()

    def _about(self, scope: Scope, scopes: Iterable[str]) -> str:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        mount = path if path in MOUNTS else ""
        return f'resource_metadata="{self.metadata}{mount}", scope="{" ".join(scopes)}"'
