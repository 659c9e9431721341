"""From a credential to a caller, and what that caller may use: keys, tokens, limits, audit, administration."""

from __future__ import annotations

from typing import Protocol

from asyncgate import Caller


class WayIn(Protocol):
    """One kind of credential; issued keys and OAuth tokens are further ones."""

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return who shows this token, from where, or None if it is not of this kind or not good.

        Raises InvalidToken for what can be of no other kind.
        """
