"""The shared token, and access without a token: the two ways that need no administration (spec 19.2)."""

from __future__ import annotations

import hmac

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity import WayIn
from asyncgate.parts.model import wire
from asyncgate.parts.model.settings import Settings


def ways(settings: Settings) -> list[WayIn]:
    """Return the kinds of credential that the settings allow."""
    ways_in: list[WayIn] = [SharedToken(settings)] if settings.api_key else []
    return [*ways_in, InsecureDev(settings)] if settings.allow_insecure_dev else ways_in


class SharedToken:
    """One secret for everybody (spec 19.2 mode A): an admin of the default tenant; each request names its principal."""

    def __init__(self, settings: Settings) -> None:
        self.secret, self.known = settings.api_key.encode(), unbound_caller(settings)

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller if the token is right; the comparison takes constant time."""
        return self.known if token and hmac.compare_digest(token.encode(), self.secret) else None


class InsecureDev:
    """No secret at all (spec 19.2 mode B); the gate allows it only on loopback."""

    def __init__(self, settings: Settings) -> None:
        self.known, self.guarded = unbound_caller(settings), bool(settings.api_key)

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller for any token or none; but if a shared token is set, refuse a wrong one."""
        return None if token and self.guarded else self.known


def unbound_caller(settings: Settings) -> Caller:
    """Return the caller of an unbound credential, before the request names its principal."""
    fallback = wire.Principal(settings.default_fallback_owner_kind, settings.default_fallback_owner_id)
    return Caller(settings.default_tenant_id, fallback, "admin", SCOPES, bound=False)
