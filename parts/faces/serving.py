"""The protocols that an app implements for its faces."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Protocol

import msgspec

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.challenges import Challenges
from asyncgate.parts.model.connection import Headers, Scope, Send
from asyncgate.parts.model.console import BegunSession
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.spans import Tracing
from asyncgate.parts.process.turns import LoopTurns


class Doorkeeper(Protocol):
    """Resolves requests to callers, counts their calls and audits refusals."""

    enforced: bool          # whether every request is counted
    turns: LoopTurns

    async def resolve(self, scope: Scope, op: Operation | None = None, headers: Headers | None = None) -> Caller:
        """Return the caller of a request; count the call if its operation is known."""

    async def admit(self, scope: Scope, caller: Caller, op: Operation) -> None:
        """Let a caller in whose credential was checked before, and count the call."""

    async def known(self, headers: Headers) -> Caller:
        """Return the caller of a credential without counting a call."""

    async def meter(self, scope: Scope, caller: Caller, op: Operation | None) -> None:
        """Count a call; `op` is None if it calls no operation; raises RateLimitExceeded."""

    async def passing(self, scope: Scope) -> errors.GateError | None:
        """Count a request that no operation has counted; return the refusal if it is one too many."""

    async def sign_in(self, scope: Scope, credential: str) -> BegunSession:
        """Begin a session of the console with a credential."""

    async def sign_out(self, scope: Scope, everywhere: bool) -> Headers:
        """End the session of a request, or all sessions of its credential; return what drops the cookie."""

    def refused(self, scope: Scope, refusal: errors.GateError, ask: wire.Ask | None = None) -> None:
        """Audit the refusal of a request if it concerns security."""

    def refused_call(self, caller: Caller, refusal: errors.GateError, operation: str,
                     ask: wire.Ask | None = None) -> None:
        """Audit the refusal of one call in a request that may contain several."""


class Meter(Protocol):
    """Counts what the faces answer."""

    def note_call(self, face: str, operation: str, begun: float, reply: Any, refusal: errors.GateError | None) -> None:
        """Count a call that was answered with a reply or a refusal; `begun` is a time of `perf_counter`."""

    def note_refusal(self, face: str, refusal: errors.GateError) -> None:
        """Count a request that was refused before its operation was known, unless that is counted already."""


class TypedTools(Protocol):
    """Knows the tools that stand for declared types: a call of one is `run_task` with its arguments as the payload."""

    async def list_tools(self, caller: Caller) -> list[msgspec.Raw]:
        """Return the tools that a caller may use, in JSON."""

    async def find_arguments(self, caller: Caller, name: str, arguments: msgspec.Raw) -> msgspec.Raw | None:
        """Return the arguments of `run_task` that a call of a tool means; None if there is no such tool."""


class Serving(Protocol):
    """A running gate, as its faces see it."""

    settings: Settings
    engine: Engine
    operations: dict[str, Operation]
    meter: Meter | None         # None: nothing is counted
    tracing: Tracing | None     # None: nobody takes spans
    challenges: Challenges | None       # None: there is no authorization server
    typed_tools: TypedTools | None      # None: nothing declares types

    @property
    def guard(self) -> Doorkeeper:
        """Return the guard that authenticates requests."""

    async def send(self, send: Send, scope: Scope, status: int, body: bytes, more: Iterable[tuple[bytes, bytes]] = (),
                   type: tuple[bytes, bytes] = ...) -> None:
        """Send a complete answer with the security headers."""

    def describe_refusal(self, scope: Scope, refusal: errors.GateError) -> Headers:
        """Return the additional HTTP headers of a refusal."""

    def safety(self, scope: Scope, own: Set[bytes]) -> Headers:
        """Return the security headers of an answer, except those in `own`, which it sets itself."""
