"""From a credential to a caller: every kind of credential is a way in, and all faces ask the same ones."""

from __future__ import annotations

from asyncgate import Caller
from asyncgate.parts.identity import WayIn, shared_token
from asyncgate.parts.identity.keys import IssuedKeys
from asyncgate.parts.identity.keys_stored import KEY_PREFIX
from asyncgate.parts.model.connection import Headers, read_token
from asyncgate.parts.model.errors import InvalidToken, Unauthenticated
from asyncgate.parts.model.settings import Settings


class Identity:
    """Turns credentials into callers, the same way for every façade."""

    def __init__(self, settings: Settings) -> None:
        self.ways: list[WayIn] = [*access_tokens(settings), *shared_token.ways(settings)]

    def prefer(self, way: WayIn) -> None:
        """Add a way in that is asked before the others."""
        self.ways.insert(0, way)

    async def caller(self, headers: Headers, address: str | None = None) -> Caller:
        """Return who a request comes from."""
        token = read_token(headers)
        for way in self.ways:
            if (caller := await way.caller(token, address)) is not None:
                return caller
        if token:
            raise InvalidToken("this credential is not known here")
        raise Unauthenticated("a credential is needed: Authorization: Bearer <token>, or X-API-Key: <token>")


class Keys:
    """The way in for issued keys: what looks like one is never taken for another kind of credential."""

    def __init__(self, keys: IssuedKeys) -> None:
        self.keys = keys

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return whom a key stands for."""
        caller = await self.keys.caller(token, address)
        if caller is None and token is not None and token.startswith(KEY_PREFIX):
            raise InvalidToken("this credential is not good")
        return caller


def access_tokens(settings: Settings) -> list[WayIn]:
    """Return the way in for JWTs, if there are keys for them; the library that checks them is large."""
    if not settings.security.jwt.has_keys:
        return []
    from asyncgate.parts.identity import jwt
    return jwt.ways(settings)
