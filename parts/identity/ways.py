"""From a credential to a caller: the list of accepted kinds of credential, which all façades share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncgate import Caller
from asyncgate.parts.identity import WayIn, shared_token
from asyncgate.parts.identity.keys import IssuedKeys
from asyncgate.parts.identity.keys_stored import KEY_PREFIX
from asyncgate.parts.model import errors
from asyncgate.parts.model.connection import Headers, read_token
from asyncgate.parts.model.settings import Settings

if TYPE_CHECKING:
    from asyncgate.parts.identity.jwt import AccessTokens


class Identity:
    """Turns credentials into callers, with the same rules for every façade."""

    def __init__(self, settings: Settings) -> None:
        self.tokens = open_access_tokens(settings)
        self.ways: list[WayIn] = [*([self.tokens] if self.tokens else []), *shared_token.ways(settings)]

    def prefer(self, way: WayIn) -> None:
        """Add a kind of credential that is tried before the others."""
        self.ways.insert(0, way)

    async def caller(self, headers: Headers, address: str | None = None) -> Caller:
        """Return the caller of a request; raises InvalidToken or Unauthenticated."""
        token = read_token(headers)
        for way in self.ways:
            if (caller := await way.caller(token, address)) is not None:
                return caller
        if token:
            raise errors.InvalidToken("this credential is unknown")
        raise errors.Unauthenticated("a credential is needed: Authorization: Bearer <token>, or X-API-Key: <token>")


class Keys:
    """Accepts issued keys; a token that looks like an issued key is never tried as another kind of credential."""

    def __init__(self, keys: IssuedKeys) -> None:
        self.keys = keys

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a key; raises InvalidToken for an invalid key."""
        caller = await self.keys.caller(token, address)
        if caller is None and token is not None and token.startswith(KEY_PREFIX):
            refusal = errors.InvalidToken("this credential is invalid")
            refusal.whose, refusal.because = self.keys.explain_refusal(token)
            raise refusal
        return caller


def open_access_tokens(settings: Settings) -> AccessTokens | None:
    """Return the check for JWTs if the settings name keys for them; else its large library is not imported."""
    if not settings.security.jwt.has_keys:
        return None
    from asyncgate.parts.identity.jwt import AccessTokens
    return AccessTokens(settings)
