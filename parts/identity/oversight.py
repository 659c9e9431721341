"""What administrators do, for the audit log: operations that are theirs alone, and whatever is not their own.

Spec 21.7.4 wants every admin operation on record.  Those that change credentials and rights write their line in their
own transaction; all others are seen here, beside the request.  What an admin reads or repeats is noted when it first
happens and counted from then on, so that whoever reads the log all day does not fill it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.identity.audit import Auditor, visit, who
from asyncgate.parts.model.naming import read_principal
from asyncgate.parts.model.queries import ANY_KIND, wanted_is
from asyncgate.parts.model.wire import Ask, Principal, ReceiptRecord, TaskRecord

TOLD = "asyncgate.told"         # where the ASGI scope says that the operation has written its own line
A_TASK = ("task_id",)           # what a request needs that is about a task itself; a holder's names its lease too


def telling() -> None:
    """Note that the running operation writes its own line."""
    if (scope := visit.get()) is not None:
        scope[TOLD] = True


async def oversee(auditor: Auditor, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
    """Note what an admin has done, unless it was its own business or is on record already."""
    if op.roles == ("admin",):
        return administered(auditor, op, caller, ask, reply)
    me = read_principal(ask) or (caller.principal if caller.bound else None)
    if me is None:      # the shared token, and nobody named: nothing is anybody's own
        return
    if ask.acts and caller.bound and not me.same(caller.principal):
        auditor.tally(caller, "admin_operation", "info", operation=op.name, acts_as=str(me))
    if (owner := await whose(auditor.engine, op, caller.tenant_id, me, ask, reply)) is not None and not owner.same(me):
        said = {name: given for name in ("task_id", "receipt_id") if (given := getattr(ask, name, None))}
        event = "admin_operation" if op.kind == "W" else "admin_read"
        auditor.tally(caller, event, "info", operation=op.name, belongs_to=str(owner), **said)
    elif ask.lists and caller.bound:
        of = asked_for(ask) or (me if ask.lists == "own" else None)
        if of is None or not wanted_is(of, me):
            auditor.tally(caller, "admin_read", "info", operation=op.name, belongs_to=worded(of))


def worded(of: Principal | None) -> str:
    """Name whose things a list was asked for: a filter may name an id without its kind."""
    if of is None:
        return "anybody"
    return str(of) if of.kind else f"anybody with the id {of.id}"


def administered(auditor: Auditor, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
    """Note an operation that only admins have."""
    if op.kind == "R" or ask.paged:
        named = getattr(ask, "tenant", None)
        auditor.tally(caller, "admin_read" if op.kind == "R" else "admin_operation", "info", operation=op.name,
                      about_tenant=named)
    elif not (visit.get() or {}).get(TOLD):
        auditor.note(caller.tenant_id, "admin_operation", "info", **who(caller), operation=op.name, **about(ask),
                     answer=numbers(reply))


def about(ask: Ask) -> dict[str, Any]:
    """Return what a request is about; key_id in a line is the caller's own."""
    return {said: given for name, said in (("task_id", "task_id"), ("key_id", "about_key"))
            if (given := getattr(ask, name, None))}


def numbers(reply: Any) -> dict[str, Any]:
    """Return what a short answer counts."""
    said = msgspec.to_builtins(reply)
    return {name: value for name, value in said.items() if isinstance(value, int)} if isinstance(said, dict) else {}


async def whose(engine: Engine, op: Operation, tenant_id: str, me: Principal, ask: Any, reply: Any) -> Principal | None:
    """Return who owns the one thing that an operation was about; None where it is mine, or about no such thing."""
    if isinstance(reply, TaskRecord):
        return None if reply.leased_to and reply.leased_to.same(me) else reply.created_by
    if isinstance(reply, ReceiptRecord):
        return None if me.same(reply.to) or me.same(reply.sender) else reply.to
    if ask.needed == A_TASK and (found := await engine.backend.task(tenant_id, ask.task_id)):
        return None if found[1] and found[1].worker.same(me) else found[0].owner
    return None


def asked_for(ask: Ask) -> Principal | None:
    """Return whose list was asked for; None is everybody's."""
    if by := getattr(ask, "created_by", None):
        return Principal(getattr(ask, "created_by_kind", None) or ANY_KIND, str(by))
    if to := getattr(ask, "to_id", None):
        return Principal(getattr(ask, "to_kind", None) or ANY_KIND, to)
    return read_principal(ask)
