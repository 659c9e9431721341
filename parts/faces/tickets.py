"""Tickets for browsers: an EventSource sends no Authorization, so a page gets a ticket for the stream of one task.

A ticket is sealed and not stored, so each gate of a database takes it.  It opens the stream of its task alone, for
five minutes, because it stands in a URL; the credential behind it is checked as if it had been sent.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
from datetime import datetime
from typing import Annotated, ClassVar

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Operation, speaker
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.caller import ShownToken
from asyncgate.parts.model.examples import LATER, TASK_ID
from asyncgate.parts.model.views import to_utc

TICKET_SECONDS = 300
SEAL_BYTES, PURPOSE = 32, b"a ticket for the stream of a task\n"


class TicketAsk(wire.AsEither, kw_only=True):
    """Ask for a ticket."""

    acts: ClassVar[bool] = False
    needed: ClassVar[tuple[str, ...]] = ("task_id",)
    refusals: ClassVar[tuple[type[errors.GateError], ...]] = (errors.TaskNotFound,)
    example = ({"task_id": TASK_ID}, {"ticket": "mE0…", "path": "/v1/receipts/stream?ticket=mE0…", "expires_at": LATER})
    task_id: Annotated[wire.Name, wire.says("the task whose receipts the page will follow")] = ""


class Ticket(Struct):
    """A ticket, and where it is good: `new EventSource(gate + path)`."""

    ticket: str
    path: str
    expires_at: datetime


class SealedCaller(Struct, omit_defaults=True):
    """Who asked for a ticket, for which task, and until when it is good."""

    tenant_id: str
    principal: wire.Principal
    role: wire.Role
    scopes: frozenset[str]
    task_id: str
    until: float
    bound: bool = True
    key_id: str | None = None
    issued_at: float | None = None
    token: ShownToken | None = None


async def make_ticket(engine: Engine, caller: Caller, ask: TicketAsk) -> Ticket:
    """Return a ticket with which a browser's EventSource may follow one task, within the next five minutes."""
    await engine.get_task(caller, wire.GetTask(task_id=ask.task_id))      # may it read the task?
    until = engine.backend.now() + TICKET_SECONDS
    text = seal(engine, SealedCaller(caller.tenant_id, speaker(caller, ask), caller.role, caller.scopes, ask.task_id,
                                     until, caller.bound, caller.key_id, caller.issued_at, caller.token))
    return Ticket(text, f"/v1/receipts/stream?ticket={text}", to_utc(until))


def seal(engine: Engine, held: SealedCaller) -> str:
    """Seal a caller, so that nobody can make one up."""
    content = msgspec.json.encode(held)
    mark = hmac.digest(engine.backend.secret, PURPOSE + content, "sha256")
    return base64.urlsafe_b64encode(mark + content).decode().rstrip("=")


def open_ticket(engine: Engine, text: str) -> tuple[Caller, str]:
    """Return who asked for a ticket, and its task; raises InvalidToken."""
    with contextlib.suppress(ValueError, msgspec.DecodeError):
        whole = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        mark, content = whole[:SEAL_BYTES], whole[SEAL_BYTES:]
        if hmac.compare_digest(mark, hmac.digest(engine.backend.secret, PURPOSE + content, "sha256")):
            held = msgspec.json.decode(content, type=SealedCaller)
            if engine.backend.now() < held.until:
                return Caller(held.tenant_id, held.principal, held.role, held.scopes, held.bound, held.key_id,
                              issued_at=held.issued_at, token=held.token), held.task_id
    raise errors.InvalidToken("this ticket is not one of this gate, or it has expired: ask for another one")


TICKET = Operation(make_ticket, "POST /v1/receipts/stream/ticket", "a w A", "receipts:read", "R")
