"""From a credential to a caller, and what that caller may use: keys, tokens, limits, audit, administration."""

from __future__ import annotations

from typing import Protocol

from asyncgate import Caller


class WayIn(Protocol):
    """One kind of credential, such as the shared token, issued keys or access tokens."""

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a token; None if the token is invalid or of another kind.

        Raises InvalidToken for an invalid token that can only be of this kind.
        """
