"""Audit lines for administrators: admin operations, and access to what belongs to other principals.

Spec 21.7.4 wants every admin operation in the audit log.  Operations that change credentials and rights write their
line in their own transaction; all others are noted here, after the request.  Repeated reads are noted once and then
counted, so that an admin who reads the log all day does not fill it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.identity.audit import Auditor, describe_caller, visit
from asyncgate.parts.model import queries, wire
from asyncgate.parts.model.naming import make_filter, read_principal

TOLD = "asyncgate.told"         # member of the ASGI scope: the operation has written its own audit line
OF_A_RECEIPT = ("receipt_id",), ("parent_receipt_id",)
A_TASK = ("task_id",)           # the required fields of a request about a task; a lease holder's also names the lease


def mark_as_audited() -> None:
    """Note that the running operation writes its own audit line."""
    if (scope := visit.get()) is not None:
        scope[TOLD] = True


async def oversee(auditor: Auditor, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
    """Note an admin's operation, unless it was about the admin's own things or wrote its own line."""
    if op.roles == ("admin",):
        return note_admin_operation(auditor, op, caller, ask, reply)
    named = read_principal(ask)
    # Whoever only asks about somebody stays itself; the shared token is whomever a request names.
    me = caller.principal if caller.bound and not (ask.acts and named) else named
    if me is None:      # the shared token without a named principal: nothing is the caller's own
        return
    if ask.acts and caller.bound and not me.same(caller.principal):
        auditor.tally(caller, "admin_operation", "info", operation=op.name, acts_as=str(me))
    owner = await owner_of_result(auditor.engine, op, caller.tenant_id, me, ask, reply)
    if owner is not None and not owner.same(me):
        ids = ("task_id", "receipt_id", "parent_receipt_id")
        facts = {name: given for name in ids if (given := getattr(ask, name, None))}
        event = "admin_operation" if op.kind == "W" else "admin_read"
        auditor.tally(caller, event, "info", operation=op.name, belongs_to=str(owner), **facts)
    elif ask.lists and caller.bound:
        of = owner_of_list(ask) or (caller.principal if ask.lists == "own" else None)
        if of is None or not queries.wanted_is(of, me):
            auditor.tally(caller, "admin_read", "info", operation=op.name, belongs_to=describe_list_owner(of))


def describe_list_owner(of: wire.Principal | None) -> str:
    """Name the principal whose things were listed; a filter may name an id without its kind."""
    if of is None:
        return "anybody"
    return str(of) if of.kind else f"anybody with the id {of.id}"


def note_admin_operation(auditor: Auditor, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
    """Note an operation that only admins may call."""
    if op.kind == "R" or ask.paged:
        named = getattr(ask, "tenant", None)
        auditor.tally(caller, "admin_read" if op.kind == "R" else "admin_operation", "info", operation=op.name,
                      about_tenant=named)
    elif not (visit.get() or {}).get(TOLD):
        # key_id in a line is always the caller's own key
        facts = {name: given for field, name in (("task_id", "task_id"), ("key_id", "about_key"))
                 if (given := getattr(ask, field, None))}
        shown = msgspec.to_builtins(reply)
        counts = {name: value for name, value in shown.items() if isinstance(value, int)} if isinstance(
            shown, dict) else {}
        auditor.note(caller.tenant_id, "admin_operation", "info", **describe_caller(caller), operation=op.name,
                     **facts, answer=counts)


async def owner_of_result(engine: Engine, op: Operation, tenant_id: str, me: wire.Principal, ask: Any,
                          reply: Any) -> wire.Principal | None:
    """Return the owner of the one thing that an operation was about; None if there is none or it is the caller's."""
    if isinstance(reply, wire.TaskRecord):
        return None if reply.leased_to and reply.leased_to.same(me) else reply.created_by
    if isinstance(reply, wire.ReceiptRecord):
        return None if me.same(reply.to) or me.same(reply.sender) else reply.to
    if ask.needed in OF_A_RECEIPT:
        receipt = await engine.backend.receipt(tenant_id, getattr(ask, ask.needed[0]))
        return None if receipt is None or me.same(receipt.to) or me.same(receipt.sender) else receipt.to
    if ask.needed == A_TASK and (snapshot := await engine.backend.task(tenant_id, ask.task_id)):
        return None if snapshot[1] and snapshot[1].worker.same(me) else snapshot[0].owner
    return None


def owner_of_list(ask: wire.Ask) -> wire.Principal | None:
    """Return the principal whose list was asked for; None is everybody."""
    if by := getattr(ask, "created_by", None):
        return make_filter("created_by_kind", getattr(ask, "created_by_kind", None), "created_by", str(by))
    if to := getattr(ask, "to_id", None):
        return make_filter("to_kind", getattr(ask, "to_kind", None), "to_id", to)
    return read_principal(ask)
