"""Export and import of receipts, as they are stored (spec 20.9).

An import trusts nobody.  It checks the hash of each receipt, that its parents are stored, that its id is not in the
future, and that it contradicts no task of this gate.  A stored receipt is never changed, whatever is offered under its
id.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from asyncgate import COMPLETED, RECEIPT_TYPES, TERMINATES, Caller, Engine, Needs, Work, receipt_hash
from asyncgate.parts.model.content import parse_json
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.errors import GateError, InvalidCursor
from asyncgate.parts.model.members import Unreadable
from asyncgate.parts.model.queries import ReceiptFilter, Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Archived, Receipt, SealHead
from asyncgate.parts.model.wire_receipts import (
    Exported,
    ExportReceipts,
    Imported,
    ImportReceipts,
    NotImported,
    StoredReceipt,
)
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.erased_elsewhere import list_as_erased
from asyncgate.parts.receipts.may import broken_rule as may_not
from asyncgate.parts.receipts.may import discharges
from asyncgate.parts.receipts.sealing import load_head, require_bodies
from asyncgate.parts.receipts.seals import START, make_seal, receipt_digest, seal_head

RECEIPTS_PER_EXPORT, PAGE_BYTES = 1000, 4 * 2**20


async def export_receipts(engine: Engine, caller: Caller, ask: ExportReceipts) -> Exported:
    """Export the tenant's receipts as they are stored, oldest first, up to 1,000 at a time.

    `asyncgate receipts export FILE` writes all of them into a file, with their seals.  Spec 20.9.
    """
    require_bodies(engine)
    limit = min(ask.limit or RECEIPTS_PER_EXPORT, RECEIPTS_PER_EXPORT)
    if ask.after is not None and not await engine.has_receipt(caller, ask.after):
        raise InvalidCursor("after is not the id of a receipt of this tenant; begin again without it")
    return await export_page(engine, caller.tenant_id, ask.after, limit)


async def export_page(engine: Engine, tenant_id: str, after: str | None, limit: int = RECEIPTS_PER_EXPORT) -> Exported:
    """Return a page of receipts as they are stored, also those without a body."""
    while True:
        returns = await archive.count_returns(engine, tenant_id)
        page = await read_both_tables(engine, tenant_id, after, limit)
        if returns == await archive.count_returns(engine, tenant_id):
            return page     # else a receipt may have come back between the two reads


async def read_both_tables(engine: Engine, tenant_id: str, after: str | None, limit: int) -> Exported:
    """Read a page of receipts, then of the archive, so that one that moves there meanwhile is not missed."""
    rows = await engine.backend.page(tenant_id, ReceiptFilter(None, None, None, after, limit))
    last = rows[-1].receipt_id if len(rows) == limit else None
    away = [one for one in await engine.backend.page(tenant_id, Rows(Archived, after or ""))
            if last is None or one.receipt_id < last][:limit]
    loaded = await archive.load_archived(engine, away)
    found = {row.receipt_id: row for row in (*loaded, *rows)}     # a receipt may have moved since the first read
    return Exported([as_wire(row) for row in cut_page([found[id] for id in sorted(found)][:limit])])


def cut_page(rows: list[Receipt]) -> list[Receipt]:
    """Cut a page where its bodies become too large together; at least one row stays."""
    size, kept = 0, list[Receipt]()
    for row in rows:
        if kept and (size := size + len(row.body)) > PAGE_BYTES:
            break
        kept.append(row)
    return kept


def as_wire(receipt: Receipt) -> StoredReceipt:
    """Show a receipt as it is stored."""
    return StoredReceipt(**{**asdict(receipt), "parents": list(receipt.parents)})


def as_stored_receipt(receipt: StoredReceipt) -> Receipt:
    """Return a receipt that came over the wire as it is stored."""
    return Receipt(**{**asdict(receipt), "parents": tuple(sorted(receipt.parents))})


def load_import(needs: Needs, caller: Caller, ask: ImportReceipts) -> None:
    """Load stored receipts with the same ids or keys, the parents with their children, and the tasks."""
    load_head(needs, caller, ask)
    items: list[StoredReceipt | Unreadable] = [*ask.receipts]
    for receipt in items:
        if isinstance(receipt, Unreadable):
            continue
        needs.receipts |= {receipt.receipt_id, *receipt.parents}
        needs.stated.add((receipt.task_id, receipt.receipt_key))
        needs.records.update((Archived, (id,)) for id in (receipt.receipt_id, *receipt.parents))
        needs.tasks.update([receipt.task_id] if receipt.task_id else [])


def import_receipts(engine: Engine, work: Work, caller: Caller, ask: ImportReceipts) -> Imported:
    """Import up to 250 receipts of another gate unchanged, and open and close their obligations.

    Each is stored or refused by itself.  A repeated import is a no-op: a stored receipt stays, and one that differs is
    reported.  Parents must come before the receipts that answer them.  `asyncgate receipts import FILE` sends a whole
    file.  Spec 20.9.
    """
    require_bodies(engine)
    now, present, written, refused = work.new_id(), 0, dict[str, Receipt](), list[NotImported]()
    items: list[StoredReceipt | Unreadable] = [*ask.receipts]
    for item in items:
        if isinstance(item, Unreadable):
            refused.append(NotImported(item.receipt_id, "invalid", str(item.problem)))
            continue
        receipt = as_stored_receipt(item)
        if problem := find_problem(engine.settings, work, receipt, written, now):
            refused.append(NotImported(receipt.receipt_id, *problem))
        elif receipt.receipt_id in (work.receipts.keys() | written.keys()) or work.find_record(
                Archived, receipt.receipt_id):
            present += 1
        else:
            written[receipt.receipt_id] = receipt
    if written:
        written = {row.receipt_id: row for row in list_as_erased(work, written.values())}
        write_receipts(work, written)
        seal_late_receipts(work, sorted(written.values(), key=lambda row: row.receipt_id))
    return Imported(len(written), present, refused)


Problem = tuple[str, str]


def find_problem(settings: Settings, work: Work, receipt: Receipt, written: dict[str, Receipt],
                 now: str) -> Problem | None:
    """Return why a receipt cannot be imported; None if it can."""
    there = work.receipts.get(receipt.receipt_id) or written.get(receipt.receipt_id)
    if there is not None:
        return None if receipt_digest(there) == receipt_digest(receipt) else (
            "differs", "another receipt already has this id here, and stays")
    if (away := work.find_record(Archived, receipt.receipt_id)) is not None:
        return None if away.digest == receipt_digest(receipt).hex() else (
            "differs", "another receipt already has this id in the archive here")
    if (other := find_same_statement(work, receipt, written)) is not None:
        return "stated_already", f"receipt {other} states the same here"
    if receipt.receipt_id >= now:
        return "too_young", "its id is in the future of this gate's clock, so readers would miss earlier receipts"
    if missing := [parent for parent in receipt.parents if parent not in work.receipts and parent not in written
                   and not work.find_record(Archived, parent)]:
        return "parent_missing", f"its parent {missing[0]} is not here; import that receipt first"
    return find_flaw(settings, receipt) or find_contradiction(work, receipt) or find_earlier_end(work, receipt, written)


def find_same_statement(work: Work, receipt: Receipt, written: dict[str, Receipt]) -> str | None:
    """Return the receipt with the same key, stored here or earlier in the same call."""
    mine = (receipt.task_id, receipt.receipt_key)
    return work.recorded.get(mine) or next(
        (one.receipt_id for one in written.values() if (one.task_id, one.receipt_key) == mine), None)


def find_flaw(settings: Settings, receipt: Receipt) -> Problem | None:
    """Return what is wrong with a receipt on its own; None if it is valid."""
    limits, body = settings.receipts, receipt.body.encode()
    if len(body) > limits.max_body_size_bytes or len(receipt.parents) > limits.max_parents:
        return "too_large", (f"its body may have at most {limits.max_body_size_bytes} bytes, and it may have at most "
                             f"{limits.max_parents} parents")
    try:
        parse_json(body, "body")
        said = receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                            receipt.schedule_id, receipt.parents, body)
    except (GateError, UnicodeEncodeError) as no:
        return "wrong_hash", f"its body is not JSON: {no}"
    # Security: no content is left that the hash of an erased receipt could fit; its sender is as free as with content,
    # whose hash anybody can compute.  An admin vouches for both.
    is_true = said == receipt.hash or read_note(receipt.body) is not None
    if not is_true or len(set(receipt.parents)) < len(receipt.parents) or "\0" in receipt.body:
        return "wrong_hash", "its hash does not match its content"
    return None


def find_contradiction(work: Work, receipt: Receipt) -> Problem | None:
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


def find_earlier_end(work: Work, receipt: Receipt, written: dict[str, Receipt]) -> Problem | None:
    """Return which receipt has discharged the same obligation before; each is discharged once (PH.1.3)."""
    family = {**work.receipts, **written}
    for parent in receipt.parents:
        opened, away = family.get(parent), work.find_record(Archived, parent)
        if opened is not None and discharges(receipt, opened):
            first = next((one.receipt_id for one in family.values()
                          if one.receipt_id != receipt.receipt_id and discharges(one, opened)), None)
            if first is not None:
                return "discharged_already", f"receipt {first} has discharged obligation {parent} here"
        # Only what is discharged moves to the archive.
        elif away is not None and receipt.receipt_type in TERMINATES.get(away.receipt_type, ()):
            return "discharged_already", f"obligation {parent} is in the archive here, discharged"
    return None


def write_receipts(work: Work, written: dict[str, Receipt]) -> None:
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


def seal_late_receipts(work: Work, rows: list[Receipt]) -> None:
    """Seal receipts older than the last seal at once; the next seal covers the others, made again if under way."""
    head = work.find_record(SealHead) or START
    late = [row for row in rows if row.receipt_id <= head.last_id]
    if late:
        made = make_seal(head, [receipt_digest(row) for row in late], head.last_id, round(work.now, 3),
                         [row.receipt_id for row in late])
        work.keep_record(made)
        head = seal_head(made, head.imports)
    work.keep_record(replace(head, imports=head.imports + 1))
