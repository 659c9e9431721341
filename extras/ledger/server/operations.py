"""The ledger server: the operations that `asyncgate ledger` serves (spec 20.12, 20.13).

A ledger stores receipts exactly as their authors wrote them and lists them in the order of arrival.  Storing is
idempotent by receipt_id: the same id with different content is refused.  A ledger has no tasks and no rules about
tasks, and it never deletes a receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs, Operation, Work, __version__, forbid
from asyncgate.extras.ledger.server import wire_ledger
from asyncgate.parts.identity import admin
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.content import decode_json, sha256
from asyncgate.parts.model.members import find_marked
from asyncgate.parts.model.naming import make_filter
from asyncgate.parts.model.screening import MAX_DEPTH
from asyncgate.parts.model.views import to_utc

MOST_AT_ONCE = 500          # receipts of one call
LONGEST_CHAIN = 2048        # receipts of one chain
STORED_DEPTH = MAX_DEPTH + 8        # the deepest body that a gate accepts, inside a receipt, inside a list
ENTRIES_PER_PAGE, LOOKS = 200, 5        # how many receipts of a task are searched for one principal: 5 pages of 200
OF_GATES = {"admin", "system"}      # the roles of credentials that store receipts for others
CAPABILITIES = ["receipt_storage", "receipt_chains", "receipt_seals", "stated_by", "key_issuing"]
NOT_SAID = ("tenant_id", "stored_at", "delivered_at")       # added by the gate or ledger that stores, not by the author

decode_arriving = msgspec.json.Decoder(wire_ledger.Arriving).decode
decode_linked = msgspec.json.Decoder(wire_ledger.Linked).decode
list_of = msgspec.json.Decoder(list[Raw]).decode


class FiledReceipts(wire.Ask, kw_only=True):
    """Receipts to store in one tenant's ledger, and an error in the place of each invalid one."""

    entries: list[stored.Entry | errors.GateError]


async def store_receipt(engine: Engine, caller: Caller,
                        ask: wire_ledger.StoreReceipts) -> wire_ledger.Stored | wire_ledger.StoredAll:
    """Store one receipt unchanged, or up to 500 receipts of one tenant; storing a receipt again is a no-op.

    Each is stored or refused by itself.  The same receipt_id with different content is 409 receipt_id_collision.
    """
    if not 1 <= len(ask.receipts) <= MOST_AT_ONCE:
        raise errors.InvalidRequest(f"{len(ask.receipts)} receipts; one call stores 1 to {MOST_AT_ONCE}")
    named, entries = dict[str | None, str](), list[stored.Entry | errors.GateError]()
    for at, content in enumerate(ask.receipts):
        try:
            name, entry = parse_receipt(engine, caller, bytes(content), "receipt" if ask.alone else f"receipts[{at}]")
            if name not in named:
                named[name] = await find_tenant(engine, caller, name)
            entries.append(entry)
        except errors.GateError as refusal:
            entries.append(refusal)
    if len(tenants := set(named.values())) > 1:
        raise errors.InvalidRequest("all receipts of one call must belong to one tenant; send one call for each tenant")
    into = replace(caller, tenant_id=tenants.pop() if tenants else caller.tenant_id)
    results: list[wire_ledger.Stored | errors.GateError] = await engine.write(
        store_entries, load_entries, into, FiledReceipts(entries=entries))
    if not ask.alone:
        return wire_ledger.StoredAll([stored_problem(ask, at, outcome) if isinstance(outcome, errors.GateError)
                                      else outcome
                                      for at, outcome in enumerate(results)])
    if isinstance(results[0], errors.GateError):
        raise results[0]
    return results[0]


def stored_problem(ask: wire_ledger.StoreReceipts, at: int, refusal: errors.GateError) -> wire_ledger.Stored:
    """Return the error of one receipt of many, with its receipt_id if that is readable."""
    try:
        receipt_id = decode_json(ask.receipts[at])["receipt_id"]
    except (msgspec.DecodeError, KeyError, TypeError):
        receipt_id = None
    return wire_ledger.Stored(receipt_id if isinstance(receipt_id, str) else None,
                              error=wire.Problem(refusal.code, str(refusal), str(refusal)))


def parse_receipt(engine: Engine, caller: Caller, content: bytes, place: str) -> tuple[str | None, stored.Entry]:
    """Parse and check a receipt; return the tenant that it names, and the row to store."""
    if refusal := find_marked(content, place):
        raise refusal
    try:
        receipt, whole = decode_arriving(content), decode_json(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as wrong:
        raise errors.InvalidRequest(f"{place}: {wrong}") from None
    limits = engine.settings.receipts
    if len(bytes(receipt.body)) > limits.max_body_size_bytes:
        raise errors.ReceiptTooLarge(
            f"the body has {len(bytes(receipt.body))} bytes; at most {limits.max_body_size_bytes} are allowed")
    if (parents := len(receipt.parents or ())) > limits.max_parents:
        raise errors.TooManyParents(f"{parents} parents; a receipt may have at most {limits.max_parents} (PH.5)")
    sender = wire.Principal(receipt.sender.kind, receipt.sender.id)
    if caller.bound and not caller.unlimited and not sender.same(caller.principal):
        raise forbid(caller, f"this credential may store only receipts from {caller.principal}")
    digest = sha256({name: value for name, value in whole.items() if name not in NOT_SAID})
    return receipt.tenant_id, stored.Entry(
        receipt.receipt_id, "", receipt.receipt_type, receipt.task_id or "", sender.kind, sender.id, receipt.to.kind,
        receipt.to.id, receipt.asyncgate_instance or "", digest, content.decode(),
        caller.principal.kind, caller.principal.id, caller.role)


async def find_tenant(engine: Engine, caller: Caller, named: str | None) -> str:
    """Return the id of the tenant that is named, by its id or its name; only the operator may name a foreign one."""
    at_home = caller.tenant_id == engine.settings.default_tenant_id
    if named in (None, caller.tenant_id, admin.DEFAULT_TENANT if at_home else None):
        return caller.tenant_id
    if admin.operates(engine, caller):
        return await admin.tenant_of(engine, named)
    account = None if admin.UUID_TEXT.match(named) else await engine.backend.record(caller.tenant_id, stored.Account)
    if account is None or account.name != named:
        raise errors.TenantMismatch("this credential belongs to another tenant than the request names")
    return caller.tenant_id


def load_entries(needs: Needs, caller: Caller, ask: FiledReceipts) -> None:
    """Load the receipts that are already stored under the same ids."""
    needs.records.update((stored.Entry, (entry.receipt_id,)) for entry in ask.entries
                         if isinstance(entry, stored.Entry))


def store_entries(engine: Engine, work: Work, caller: Caller,
                  ask: FiledReceipts) -> list[wire_ledger.Stored | errors.GateError]:
    """Store the new receipts; pass the errors through in their places."""
    return [entry if isinstance(entry, errors.GateError) else store_entry(work, entry) for entry in ask.entries]


def store_entry(work: Work, entry: stored.Entry) -> wire_ledger.Stored | errors.GateError:
    """Store one receipt; a no-op if the same receipt is stored already."""
    if (first := work.find_record(stored.Entry, entry.receipt_id)) is None:
        work.keep_record(replace(entry, arrival=work.new_id()))
        return wire_ledger.Stored(entry.receipt_id, work.tenant_id, to_utc(work.now))
    if first.digest != entry.digest:
        return errors.ReceiptIdCollision(f"another receipt is stored as {entry.receipt_id}, and receipts never change; "
                                         "use a new receipt_id", receipt_id=entry.receipt_id)
    return wire_ledger.Stored(entry.receipt_id, work.tenant_id, replay=True)


async def list_receipts(engine: Engine, caller: Caller, ask: wire_ledger.ListFiled) -> wire_ledger.Filed:
    """List receipts unchanged, in the order of arrival: an inbox, a task, the receipts of one gate, or all.

    Pass the reply's cursor as since_receipt_id: every receipt is listed exactly once.  An admin may list everything.
    Others may list their own inbox, and with task_id all receipts of a task that they take part in.  Spec 20.13.
    """
    tenant_id = await find_tenant(engine, caller, ask.tenant)
    to = make_filter("to_kind", ask.to_kind, "to_id", ask.to_id)
    if not caller.sees_all:
        if not queries.wanted_is(to, caller.principal):
            raise forbid(caller, f"this credential may list only receipts to {caller.principal}")
        if to is not None or ask.task_id is None or not await takes_part(engine, tenant_id, caller, ask.task_id):
            to = caller.principal
    after = await arrival_of(engine, tenant_id, ask.since_receipt_id) if ask.since_receipt_id else None
    limit = engine.limit_page(ask.limit)
    rows = await engine.backend.page(tenant_id, queries.EntryFilter(
        to, ask.task_id, ask.receipt_type, ask.asyncgate_instance, after, limit + 1))
    last = rows[:limit][-1].receipt_id if rows else ask.since_receipt_id
    return wire_ledger.Filed([Raw(row.content.encode()) for row in rows[:limit]], last if len(rows) > limit else None,
                             last, [row.stated_by for row in rows[:limit]])


async def takes_part(engine: Engine, tenant_id: str, caller: Caller, task_id: str) -> bool:
    """Whether a gate stored a receipt of the task that is from or to the caller.

    Security: receipts stored by anybody else do not count.  Anybody can name any task in a receipt, and would give
    itself access to that task.
    """
    after = None
    for _ in range(LOOKS):
        rows = await engine.backend.page(tenant_id,
                                         queries.EntryFilter(None, task_id, None, None, after, ENTRIES_PER_PAGE))
        if any(row.stated_role in OF_GATES and caller.principal.same(end)
               for row in rows for end in (row.sender, row.to)):
            return True
        if len(rows) < ENTRIES_PER_PAGE:
            break
        after = rows[-1].arrival
    return False


async def arrival_of(engine: Engine, tenant_id: str, receipt_id: str) -> str:
    """Return the arrival id of a stored receipt, by which receipts are listed in order."""
    if (entry := await engine.backend.record(tenant_id, stored.Entry, receipt_id)) is None:
        raise errors.InvalidCursor(f"no receipt {receipt_id} is stored here; start again without since_receipt_id")
    return entry.arrival


async def get_receipt(engine: Engine, caller: Caller, ask: wire_ledger.GetFiled) -> Raw:
    """Return one receipt unchanged."""
    return Raw((await readable_entry(engine, caller, ask)).content.encode())


async def readable_entry(engine: Engine, caller: Caller, ask: wire_ledger.GetFiled) -> stored.Entry:
    """Return a stored receipt; raises an error if the caller may not read it."""
    tenant_id = await find_tenant(engine, caller, ask.tenant)
    if (entry := await engine.backend.record(tenant_id, stored.Entry, ask.receipt_id)) is None:
        raise errors.ReceiptNotFound(f"no receipt {ask.receipt_id} is stored here")
    if not caller.sees_all and not (entry.to.same(caller.principal) or entry.sender.same(caller.principal)):
        raise forbid(caller, f"receipt {ask.receipt_id} is neither from {caller.principal} nor to {caller.principal}")
    return entry


async def get_receipt_chain(engine: Engine, caller: Caller, ask: wire_ledger.GetChain) -> wire_ledger.Chain:
    """Return a receipt and all its ancestors: its parents, their parents, and so on (spec 20.13)."""
    tenant_id, first = await find_tenant(engine, caller, ask.tenant), await readable_entry(engine, caller, ask)
    chain, seen, missing = [first], {first.receipt_id}, list[str]()
    for entry in chain:         # the loop appends to the list
        for parent in decode_linked(entry.content.encode()).parents or ():
            if parent in seen or len(seen) >= LONGEST_CHAIN:
                continue
            seen.add(parent)
            above = await engine.backend.record(tenant_id, stored.Entry, parent)
            missing += [] if above else [parent]
            chain += [above] if above else []
    return wire_ledger.Chain(first.receipt_id, [Raw(entry.content.encode()) for entry in chain], missing)


async def get_config(engine: Engine, caller: Caller, ask: wire.GetConfig) -> wire.GateConfig:
    """Return that this server is a ledger, with its name, version and capabilities."""
    return wire.GateConfig("ledger", None, engine.instance, CAPABILITIES, __version__)


async def store_receipt_of_tool(engine: Engine, caller: Caller, ask: wire_ledger.StoreReceipt) -> wire_ledger.StoredAll:
    """Store one receipt unchanged, or up to 500; storing a receipt again is a no-op.

    The same receipt_id with different content gives an error receipt_id_collision in its place.  One transaction.
    """
    receipts = [*([ask.receipt] if bytes(ask.receipt) != b"null" else []), *ask.receipts]
    reply = await store_receipt(engine, caller, wire_ledger.StoreReceipts(receipts=receipts))
    assert isinstance(reply, wire_ledger.StoredAll)
    return reply


def operation(run: Callable[..., Any], rest: str, scopes: str) -> Operation:
    """Declare an operation of a ledger."""
    return Operation(run, rest, "a w A s", scopes, "R")


STORE = operation(store_receipt, "POST /v1/receipts", "receipts:ack tasks:lease")
SURFACE = (STORE, operation(list_receipts, "GET /v1/receipts", "receipts:read"),
           operation(get_receipt, "GET /v1/receipts/{receipt_id}", "receipts:read"),
           operation(get_receipt_chain, "GET /v1/receipts/{receipt_id}/chain", "receipts:read"),
           Operation(get_config, "GET /v1/config", "a w A", "", "B"))
TOOLS = {op.name: op for op in (operation(store_receipt_of_tool, "POST /mcp", "receipts:ack tasks:lease"),
                                *SURFACE[1:2], *SURFACE[3:4])}
TOOLS["store_receipt"] = TOOLS.pop("store_receipt_of_tool")
TOOLS["store_receipt"].name = "store_receipt"
