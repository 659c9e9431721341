"""Export and import of receipts, as they are stored (spec 20.9).

An import trusts nobody.  It checks the hash of each receipt, that its parents are stored, that its id is not in the
future, and that it contradicts no task of this gate.  A stored receipt is never changed, whatever is offered under its
id.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from asyncgate import COMPLETED, RECEIPT_TYPES, TERMINATES, Caller, Engine, Needs, Work, receipt_hash
from asyncgate.parts.model import errors, queries, stored, wire_receipts
from asyncgate.parts.model.content import parse_json
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.members import Unreadable
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.receipts import archive, seals
from asyncgate.parts.receipts.erased_elsewhere import list_as_erased
from asyncgate.parts.receipts.incoming import broken_rule as may_not
from asyncgate.parts.receipts.incoming import discharges
from asyncgate.parts.receipts.sealing import load_head, require_bodies

RECEIPTS_PER_EXPORT, PAGE_BYTES = 1000, 4 * 2**20


async def export_receipts(engine: Engine, caller: Caller, ask: wire_receipts.ExportReceipts) -> wire_receipts.Exported:
    """Export the tenant's receipts as they are stored, oldest first, up to 1,000 at a time.

    `asyncgate receipts export FILE` writes all of them into a file, with their seals.  Spec 20.9.
    """
    require_bodies(engine)
    limit = min(ask.limit or RECEIPTS_PER_EXPORT, RECEIPTS_PER_EXPORT)
    if ask.after is not None and not await engine.has_receipt(caller, ask.after):
        raise errors.InvalidCursor("after is not the id of a receipt of this tenant; begin again without it")
    return await export_page(engine, caller.tenant_id, ask.after, limit)


async def export_page(engine: Engine, tenant_id: str, after: str | None,
                      limit: int = RECEIPTS_PER_EXPORT) -> wire_receipts.Exported:
    """Return a page of receipts as they are stored, also those without a body."""
    while True:
        returns = await archive.count_returns(engine, tenant_id)
        page = await read_both_tables(engine, tenant_id, after, limit)
        if returns == await archive.count_returns(engine, tenant_id):
            return page     # else a receipt may have come back between the two reads


async def read_both_tables(engine: Engine, tenant_id: str, after: str | None, limit: int) -> wire_receipts.Exported:
    """Read a page of receipts, then of the archive, so that one that moves there meanwhile is not missed."""
    rows = await engine.backend.page(tenant_id, queries.ReceiptFilter(None, None, None, after, limit))
    last = rows[-1].receipt_id if len(rows) == limit else None
    away = [pointer for pointer in await engine.backend.page(tenant_id, queries.Rows(stored.Archived, after or ""))
            if last is None or pointer.receipt_id < last][:limit]
    loaded = await archive.load_archived(engine, away)
    receipts = {row.receipt_id: row for row in (*loaded, *rows)}     # a receipt may have moved since the first read
    return wire_receipts.Exported([as_wire(row) for row in cut_page([receipts[id] for id in sorted(receipts)][:limit])])


def cut_page(rows: list[stored.Receipt]) -> list[stored.Receipt]:
    """Cut a page where its bodies become too large together; at least one row stays."""
    size, kept = 0, list[stored.Receipt]()
    for row in rows:
        if kept and (size := size + len(row.body)) > PAGE_BYTES:
            break
        kept.append(row)
    return kept


def as_wire(receipt: stored.Receipt) -> wire_receipts.StoredReceipt:
    """Show a receipt as it is stored."""
    return wire_receipts.StoredReceipt(**{**asdict(receipt), "parents": list(receipt.parents)})


def as_stored_receipt(receipt: wire_receipts.StoredReceipt) -> stored.Receipt:
    """Return a receipt that came over the wire as it is stored."""
    return stored.Receipt(**{**asdict(receipt), "parents": tuple(sorted(receipt.parents))})


def load_import(needs: Needs, caller: Caller, ask: wire_receipts.ImportReceipts) -> None:
    """Load stored receipts with the same ids or keys, the parents with their children, and the tasks."""
    load_head(needs, caller, ask)
    items: list[wire_receipts.StoredReceipt | Unreadable] = [*ask.receipts]
    for receipt in items:
        if isinstance(receipt, Unreadable):
            continue
        needs.receipts |= {receipt.receipt_id, *receipt.parents}
        needs.stated.add((receipt.task_id, receipt.receipt_key))
        needs.records.update((stored.Archived, (id,)) for id in (receipt.receipt_id, *receipt.parents))
        needs.tasks.update([receipt.task_id] if receipt.task_id else [])


def import_receipts(engine: Engine, work: Work, caller: Caller,
                    ask: wire_receipts.ImportReceipts) -> wire_receipts.Imported:
    """Import up to 250 receipts of another gate unchanged, and open and close their obligations.

    Each is stored or refused by itself.  A repeated import is a no-op: a stored receipt stays, and one that differs is
    reported.  Parents must come before the receipts that answer them.  `asyncgate receipts import FILE` sends a whole
    file.  Spec 20.9.
    """
    require_bodies(engine)
    now, present, written, refused = work.new_id(), 0, dict[str, stored.Receipt](), list[wire_receipts.NotImported]()
    items: list[wire_receipts.StoredReceipt | Unreadable] = [*ask.receipts]
    for item in items:
        if isinstance(item, Unreadable):
            refused.append(wire_receipts.NotImported(item.receipt_id, "invalid", str(item.problem)))
            continue
        receipt = as_stored_receipt(item)
        if problem := find_problem(engine.settings, work, receipt, written, now):
            refused.append(wire_receipts.NotImported(receipt.receipt_id, *problem))
        elif receipt.receipt_id in (work.receipts.keys() | written.keys()) or work.find_record(
                stored.Archived, receipt.receipt_id):
            present += 1
        else:
            written[receipt.receipt_id] = receipt
    if written:
        written = {row.receipt_id: row for row in list_as_erased(work, written.values())}
        write_receipts(work, written)
        seal_late_receipts(work, sorted(written.values(), key=lambda row: row.receipt_id))
    return wire_receipts.Imported(len(written), present, refused)


Problem = tuple[str, str]


def find_problem(settings: Settings, work: Work, receipt: stored.Receipt, written: dict[str, stored.Receipt],
                 now: str) -> Problem | None:
    """Return why a receipt cannot be imported; None if it can."""
    there = work.receipts.get(receipt.receipt_id) or written.get(receipt.receipt_id)
    if there is not None:
        return None if seals.receipt_digest(there) == seals.receipt_digest(receipt) else (
            "differs", "another receipt already has this id here, and stays")
    if (away := work.find_record(stored.Archived, receipt.receipt_id)) is not None:
        return None if away.digest == seals.receipt_digest(receipt).hex() else (
            "differs", "another receipt already has this id in the archive here")
    same = (receipt.task_id, receipt.receipt_key)
    other = work.recorded.get(same) or next(
        (row.receipt_id for row in written.values() if (row.task_id, row.receipt_key) == same), None)
    if other is not None:
        return "stated_already", f"receipt {other} states the same here"
    if receipt.receipt_id >= now:
        return "too_young", "its id is in the future of this gate's clock, so readers would miss earlier receipts"
    if missing := [parent for parent in receipt.parents if parent not in work.receipts and parent not in written
                   and not work.find_record(stored.Archived, parent)]:
        return "parent_missing", f"its parent {missing[0]} is not here; import that receipt first"
    return find_flaw(settings, receipt) or find_contradiction(work, receipt) or find_earlier_end(work, receipt, written)


def find_flaw(settings: Settings, receipt: stored.Receipt) -> Problem | None:
    """Return what is wrong with a receipt on its own; None if it is valid."""
    limits, body = settings.receipts, receipt.body.encode()
    if len(body) > limits.max_body_size_bytes or len(receipt.parents) > limits.max_parents:
        return "too_large", (f"its body may have at most {limits.max_body_size_bytes} bytes, and it may have at most "
                             f"{limits.max_parents} parents")
    try:
        parse_json(body, "body")
        digest = receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                              receipt.schedule_id, receipt.parents, body)
    except (errors.GateError, UnicodeEncodeError) as refusal:
        return "wrong_hash", f"its body is not JSON: {refusal}"
    # Security: no content is left that the hash of an erased receipt could fit; its sender is as free as with content,
    # whose hash anybody can compute.  An admin vouches for both.
    is_true = digest == receipt.hash or read_note(receipt.body) is not None
    if not is_true or len(set(receipt.parents)) < len(receipt.parents) or "\0" in receipt.body:
        return "wrong_hash", "its hash does not match its content"
    return None


def find_contradiction(work: Work, receipt: stored.Receipt) -> Problem | None:
    """Return how a receipt contradicts this gate's tasks: the state machine is authoritative (H.12)."""
    known = [work.receipts[parent] for parent in receipt.parents if parent in work.receipts]
    if receipt.receipt_type in TERMINATES["task.assigned"] and any(
            parent.task_id != receipt.task_id for parent in known):
        return "contradicts_task", "it ends a task but answers a receipt of another task"
    if receipt.receipt_type in RECEIPT_TYPES and (why := may_not("imported", receipt, known)):
        return "contradicts_receipt", why
    task = work.tasks.get(receipt.task_id)
    if task is None:
        return None
    if receipt.receipt_type == "task.assigned" and receipt.receipt_id != task.duty:
        return "contradicts_task", f"task {task.task_id} was assigned by {task.duty}"
    if receipt.receipt_type == COMPLETED.type and task.status != "succeeded":
        return "contradicts_task", f"task {task.task_id} is {task.status} here; its own steps write what ends it (H.2)"
    if task.owed and task.duty in receipt.parents and receipt.receipt_type in TERMINATES["task.assigned"]:
        return "contradicts_task", f"task {task.task_id} is still owed here; its own steps write what ends it (H.2)"
    return None


def find_earlier_end(work: Work, receipt: stored.Receipt, written: dict[str, stored.Receipt]) -> Problem | None:
    """Return which receipt has discharged the same obligation before; each is discharged once (PH.1.3)."""
    family = {**work.receipts, **written}
    for parent in receipt.parents:
        opened, away = family.get(parent), work.find_record(stored.Archived, parent)
        if opened is not None and discharges(receipt, opened):
            first = next((other.receipt_id for other in family.values()
                          if other.receipt_id != receipt.receipt_id and discharges(other, opened)), None)
            if first is not None:
                return "discharged_already", f"receipt {first} has discharged obligation {parent} here"
        # Only what is discharged moves to the archive.
        elif away is not None and receipt.receipt_type in TERMINATES.get(away.receipt_type, ()):
            return "discharged_already", f"obligation {parent} is in the archive here, discharged"
    return None


def write_receipts(work: Work, written: dict[str, stored.Receipt]) -> None:
    """Write receipts, and open and close their obligations; nothing here can fail."""
    family = {**work.receipts, **written}
    discharged = {parent for child in family.values() for parent in child.parents
                  if parent in family and discharges(child, family[parent])}
    for receipt_id, receipt in written.items():
        work.written[receipt_id] = work.receipts[receipt_id] = replace(receipt, delivered_at=None)
        work.recorded[receipt.task_id, receipt.receipt_key] = receipt_id
        work.count_usage(receipt_bytes=len(receipt.body.encode()))
        if receipt.delivered_at is not None:
            work.delivered[receipt_id] = receipt.delivered_at
        if receipt.receipt_type in TERMINATES and receipt_id not in discharged:
            work.opened[receipt_id] = receipt.to
    ended = {parent for child in written.values() for parent in child.parents if parent in discharged}
    for parent in ended - written.keys():
        work.close_obligation(parent, family[parent].to)


def seal_late_receipts(work: Work, rows: list[stored.Receipt]) -> None:
    """Seal receipts older than the last seal at once; the next seal covers the others, made again if under way."""
    head = work.find_record(stored.SealHead) or seals.START
    late = [row for row in rows if row.receipt_id <= head.last_id]
    if late:
        made = seals.make_seal(head, [seals.receipt_digest(row) for row in late], head.last_id, round(work.now, 3),
                               [row.receipt_id for row in late])
        work.keep_record(made)
        head = seals.seal_head(made, head.imports)
    work.keep_record(replace(head, imports=head.imports + 1))
