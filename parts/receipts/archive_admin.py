"""The archive over the wire: run it, list it, restore from it (H.11)."""

from __future__ import annotations

from asyncgate import ACCEPTED, ASSIGNED, Caller, Engine, Operation, forbid
from asyncgate.parts.identity.admin import operates
from asyncgate.parts.model import errors, queries, stored, wire, wire_receipts
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.views import show_receipt
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import require_bodies


async def run_archive(engine: Engine, caller: Caller, ask: wire_receipts.RunArchive) -> wire_receipts.ArchiveRun:
    """Move old receipts to the archive, and prune tasks that ended long ago; the operator does it for all tenants.

    With archive.enabled upkeep does it every hour.  Call again while the answer has more.  Spec H.11.
    """
    require_bodies(engine)
    if not engine.settings.archive.directory:
        raise errors.InvalidRequest("this gate has no archive; set archive.directory to a folder for it")
    total, everybody = archive.ArchiveTally(), operates(engine, caller)
    for tenant_id in await engine.backend.tenants() if everybody else [caller.tenant_id]:
        done = await archive.archive_receipts(engine, tenant_id, ask.most - total.receipts)
        total.receipts, total.segments = total.receipts + done.receipts, total.segments + done.segments
        total.pruned, total.more = total.pruned + done.pruned, total.more or done.more
        if total.more:
            break
    if ask.vacuum and not total.more and everybody and isinstance(engine.backend, FileBackend):
        await engine.backend.compact()
    return wire_receipts.ArchiveRun(total.receipts, total.segments, total.pruned, total.more)


async def list_archived_receipts(engine: Engine, caller: Caller,
                                 ask: wire_receipts.ListArchivedReceipts) -> wire.Receipts:
    """List archived receipts, oldest first: of a task, one by its id, or all; no other list shows them.

    Whoever could read a receipt before can read it here: the owner of its task, the worker that had its last lease, its
    sender and its recipient, and an admin, who alone may list all.  Spec H.11.
    """
    if not caller.sees_all and ask.task_id is None and ask.receipt_id is None:
        raise forbid(caller, "only an admin may list the whole archive; name a task_id or a receipt_id")
    mark = ("archive", ask.task_id, ask.receipt_id)
    after, limit = engine.open_cursor(caller, ask.cursor, *mark) or "", engine.limit_page(ask.limit)
    pointers = await find_pointers(engine, caller.tenant_id, ask, after)
    places = [pointer.receipt_id for pointer in pointers]
    if caller.sees_all:
        rows = await archive.load_archived(engine, pointers[:limit])
    else:       # the receipts of one task at most, so all are read before the page is cut
        ours = pointers != [] and await is_party_of_task(engine, caller, pointers[0].task_id)
        rows = [row for row in await archive.load_archived(engine, pointers)
                if ours or row.to.same(caller.principal) or row.sender.same(caller.principal)]
        places = [row.receipt_id for row in rows]
    ends = engine.seal_cursors(caller, places, limit, ask.cursor, *mark)
    return wire.Receipts([show_receipt(caller.tenant_id, row) for row in rows[:limit]], *ends)


async def is_party_of_task(engine: Engine, caller: Caller, task_id: str) -> bool:
    """Whether the caller owns a task or had its last lease, as the archived receipts prove: the task may be pruned."""
    pointers = await engine.backend.page(caller.tenant_id, queries.ArchivedFilter(task_id)) if task_id else []
    rows = await archive.load_archived(
        engine, [pointer for pointer in pointers if pointer.receipt_type in (ASSIGNED.type, ACCEPTED.type)])
    owners = [row.to for row in rows if row.receipt_type == ASSIGNED.type]
    holders = [row.sender for row in rows if row.receipt_type == ACCEPTED.type]
    return any(principal.same(caller.principal) for principal in (*owners, *holders[-1:]))


async def find_pointers(engine: Engine, tenant_id: str, ask: wire_receipts.ListArchivedReceipts,
                        after: str) -> list[stored.Archived]:
    """Return the pointers to the requested receipts."""
    if ask.receipt_id is not None:
        pointer = await engine.backend.record(tenant_id, stored.Archived, ask.receipt_id)
        return [pointer] if pointer and pointer.receipt_id > after and ask.task_id in (None, pointer.task_id) else []
    if ask.task_id is not None:
        about = await engine.backend.page(tenant_id, queries.ArchivedFilter(ask.task_id))
        return [pointer for pointer in about if pointer.receipt_id > after]
    return await engine.backend.page(tenant_id, queries.Rows(stored.Archived, after))


async def restore_archive(engine: Engine, caller: Caller, ask: wire_receipts.RestoreArchive) -> wire_receipts.Restored:
    """Restore a task's receipts from the archive, byte for byte, with those of the tasks joined to it.

    They stay in the database until the archive runs again.  One transaction.  Spec H.11.
    """
    return wire_receipts.Restored(*await archive.restore_chain(engine, caller.tenant_id, ask.task_id))


OPERATIONS = [
    Operation(run_archive, "POST /v1/archive/run", "A", "admin:write", "W"),
    Operation(list_archived_receipts, "GET /v1/archive/receipts", "a w A", "receipts:read", "R"),
    Operation(restore_archive, "POST /v1/archive/{task_id}/restore", "A", "admin:write", "W"),
]
