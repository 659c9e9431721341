"""What a face needs of the app that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Protocol

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model.connection import Headers, Scope, Send
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.wire import Ask


class Doorkeeper(Protocol):
    """Who says from whom a request comes, and writes down who was refused."""

    async def resolve(self, scope: Scope, op: Operation | None = None, headers: Headers | None = None) -> Caller:
        """Return who makes a request, and count the call if its operation is known."""

    async def known(self, headers: Headers) -> Caller:
        """Return whom a credential stands for, and count nothing."""

    async def meter(self, scope: Scope, caller: Caller, op: Operation | None) -> None:
        """Count a call, of an operation if it is one; raises RateLimitExceeded."""

    def refused(self, scope: Scope, no: GateError, ask: Ask | None = None) -> None:
        """Write down the refusal of a request, where that is a matter of security."""

    def refused_call(self, caller: Caller, no: GateError, operation: str, ask: Ask | None = None) -> None:
        """Write down the refusal of one call of a request that holds several."""


class Serving(Protocol):
    """An open gate, as its faces see it."""

    settings: Settings
    engine: Engine
    operations: dict[str, Operation]

    @property
    def guard(self) -> Doorkeeper:
        """Return who lets requests in."""

    async def perform(self, op: Operation, caller: Caller, ask: Ask) -> Any:
        """Carry out one operation."""

    async def send(self, send: Send, scope: Scope, status: int, body: bytes, more: Iterable[tuple[bytes, bytes]] = (),
                   type: tuple[bytes, bytes] = ...) -> None:
        """Send one complete answer with the headers that every answer carries."""

    def safety(self, scope: Scope, own: Set[bytes]) -> Headers:
        """Return the headers that every answer carries, but for those that it brings itself."""
