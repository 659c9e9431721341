"""The archive (H.11): old receipts move to compressed, checksummed segment files.

A whole chain moves together: all receipts of a task, and of every task that a parent joins to it.  A chain moves when
its youngest receipt is `receipt_retention_days` old, its tasks ended `archive.terminal_days` ago, none of its
obligations is open and all of it is sealed.  So no open obligation loses its evidence.

A crash at any point loses nothing: the segment is written, synced and renamed; then one transaction checks everything
again, stores pointers and deletes the receipts.  A segment without pointers is harmless.  Pointers keep the digest of
their receipts, so the chain of seals still verifies, with the segments or without.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from asyncgate import TERMINATES, Engine, Work
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.database import ArchivingBackend
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.quotas import GIGABYTE, find_allowance
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.walking import batches, walk, walk_rows
from asyncgate.parts.process.folders import fsync_folder, replacing
from asyncgate.parts.receipts.files import Header, Reading, pack_receipts
from asyncgate.parts.receipts.incoming import discharges
from asyncgate.parts.receipts.sealing import seal
from asyncgate.parts.receipts.seals import START, receipt_digest

RECEIPTS_PER_PAGE = 250
RECEIPTS_PER_SEGMENT = 2000          # about: reading one receipt reads the whole file
RECEIPTS_PER_TRANSACTION = 200       # about: each of them is locked
MOST_RECEIPTS_PER_CHAIN = 5000       # a larger chain is not archived

decode_tasks = msgspec.json.Decoder(list[str]).decode


class ReceiptChain(Struct):
    """Receipts and tasks that move together."""

    receipts: dict[str, stored.Receipt] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)

    @property
    def first(self) -> str:
        """Return the id of the oldest receipt; it names the chain."""
        return min(self.receipts)


class Ages(Struct, frozen=True):
    """The times after which something is too young to move, the last sealed receipt, and how often some came back."""

    receipt: float
    ended: float
    pruned: float
    sealed: str
    imports: int = 0

    @classmethod
    def of(cls, settings: Settings, now: float, head: stored.SealHead) -> Ages:
        """Compute the times from the settings."""
        return cls(now - settings.receipt_retention_days * DAY_SECONDS,
                   now - settings.archive.terminal_days * DAY_SECONDS,
                   now - settings.task_retention_days * DAY_SECONDS, head.last_id, head.imports)


class ArchiveTally(Struct):
    """The counts of one run."""

    receipts: int = 0
    segments: int = 0
    pruned: int = 0
    more: bool = False


# A run.


async def free_storage(engine: Engine, tenant_id: str) -> int:
    """Archive a tenant's oldest settled receipts, whatever their age, until a tenth of its storage is free (21.6.3)."""
    moved = 0
    while await is_storage_full(engine, tenant_id):
        done = await archive_receipts(engine, tenant_id, RECEIPTS_PER_SEGMENT, urgent=True)
        moved += done.receipts
        if not done.receipts:
            break       # the remaining receipts are owed, or their tasks have not ended
    return moved


async def is_storage_full(engine: Engine, tenant_id: str) -> bool:
    """Whether a tenant's receipts use nine tenths of its storage."""
    usage = await engine.backend.record(tenant_id, stored.Usage)
    account = await engine.backend.record(tenant_id, stored.Account)
    most = find_allowance(engine.settings, account, engine.backend.now()).receipt_storage_gb * GIGABYTE
    return usage is not None and 0 <= 0.9 * most <= usage.receipt_bytes


async def archive_receipts(engine: Engine, tenant_id: str, most: int, *, urgent: bool = False) -> ArchiveTally:
    """Archive about `most` receipts of a tenant that are old enough, and prune old tasks.

    An urgent run takes every settled receipt as old enough.
    """
    archive_folder(engine.settings)
    head = await seal(engine, tenant_id)        # first: an erasure that begins after the next look changes it
    erasures = walk_rows(engine.backend, tenant_id, queries.Rows(stored.Erasure))
    if [row async for row in erasures if row.ended_at is None]:
        return ArchiveTally()       # what the erasure has brought back must not go again
    ages, done = Ages.of(engine.settings, engine.backend.now(), head), ArchiveTally()
    if urgent:
        ages = replace(ages, receipt=engine.backend.now(), ended=engine.backend.now())
    waiting: list[ReceiptChain] = []
    async for chain in old_chains(engine, tenant_id, ages):
        waiting.append(chain)
        if count_receipts(waiting) >= min(RECEIPTS_PER_SEGMENT, most - done.receipts):
            await move_chains(engine, tenant_id, ages, waiting, done)
            waiting = []
        if done.more or done.receipts >= most:
            return replace(done, more=True)
    if waiting:
        await move_chains(engine, tenant_id, ages, waiting, done)
    done.pruned = await prune_tasks(engine, tenant_id, ages)
    return done


def archive_folder(settings: Settings) -> Path:
    """Return the folder of the archive."""
    if not settings.archive.directory:
        raise errors.ArchiveUnavailable("archive.directory is not set; set it to the folder of the archive")
    return Path(settings.archive.directory)


def count_receipts(chains: Iterable[ReceiptChain]) -> int:
    """Count the receipts."""
    return sum(len(chain.receipts) for chain in chains)


# Choosing chains.


async def old_chains(engine: Engine, tenant_id: str, ages: Ages) -> Any:
    """Yield the chains that may move, oldest first; the transaction checks each one again."""
    seen = set[str]()
    oldest = queries.ReceiptFilter(None, None, None, None, RECEIPTS_PER_PAGE)
    async for row in walk_rows(engine.backend, tenant_id, oldest):
        if row.created_at > ages.receipt:
            return
        if row.receipt_id in seen or (row.task_id and row.task_id in seen):
            continue
        chain = await gather_chain(engine, tenant_id, row)
        seen |= {*(chain.tasks if chain else {row.task_id} - {""}),
                 *([id for id, receipt in chain.receipts.items() if not receipt.task_id] if chain else ())}
        if chain and may_move(chain, ages) and not await has_open_obligation(engine, tenant_id, chain):
            yield chain


async def gather_chain(engine: Engine, tenant_id: str, row: stored.Receipt) -> ReceiptChain | None:
    """Return the chain of a receipt: all joined by tasks, parents and children; None if it is too large."""
    chain, wanted, asked = ReceiptChain(), {row.receipt_id}, set[str]()
    while wanted:
        for receipt_id in wanted:
            if (receipt := await engine.backend.receipt(tenant_id, receipt_id)) is not None:
                await add_to_chain(engine, tenant_id, chain, receipt)
        if count_receipts([chain]) > MOST_RECEIPTS_PER_CHAIN:
            return None
        new = chain.receipts.keys() - asked
        asked |= new
        parents = {parent for id in new for parent in chain.receipts[id].parents}
        wanted = (parents | await find_answers(engine, tenant_id, new)) - chain.receipts.keys() - asked
        asked |= wanted      # a missing receipt is in the archive, or was never here
    return chain


async def add_to_chain(engine: Engine, tenant_id: str, chain: ReceiptChain, receipt: stored.Receipt) -> None:
    """Add a receipt to a chain, and with it all receipts of its task."""
    if not receipt.task_id:
        chain.receipts[receipt.receipt_id] = receipt
    if not receipt.task_id or receipt.task_id in chain.tasks:
        return
    chain.tasks.add(receipt.task_id)
    of_task = queries.ReceiptFilter(None, receipt.task_id, None, None, RECEIPTS_PER_PAGE)
    async for page in walk(engine.backend, tenant_id, of_task):
        chain.receipts |= {receipt.receipt_id: receipt for receipt in page}
        if count_receipts([chain]) > MOST_RECEIPTS_PER_CHAIN:
            break


async def find_answers(engine: Engine, tenant_id: str, ids: Iterable[str]) -> set[str]:
    """Return the receipts that answer any of these."""
    answers: set[str] = set()
    for part in batches(sorted(ids), RECEIPTS_PER_TRANSACTION):
        answers |= await engine.change(tenant_id, partial(list_family, {*part}), receipts=part)
    return answers


def list_family(ids: set[str], work: Work) -> set[str]:
    """Return which of these receipts there are, and those that answer them; a batch has loaded others, too."""
    return {id for id, receipt in work.receipts.items() if id in ids or not ids.isdisjoint(receipt.parents)}


def may_move(chain: ReceiptChain, ages: Ages) -> bool:
    """Whether all receipts of a chain are old and sealed, and the chain closes every obligation that it opens."""
    closed = {parent for receipt in chain.receipts.values() for parent in receipt.parents
              if parent in chain.receipts and discharges(receipt, chain.receipts[parent])}
    return all(receipt.created_at <= ages.receipt and receipt.receipt_id <= ages.sealed and receipt.body
               and (receipt.receipt_type not in TERMINATES or receipt.receipt_id in closed)
               for receipt in chain.receipts.values())


async def has_open_obligation(engine: Engine, tenant_id: str, chain: ReceiptChain) -> bool:
    """Whether the index shows an obligation of a chain as open, whatever the receipts say."""
    for receipt in chain.receipts.values():
        if receipt.receipt_type in TERMINATES:
            # so the next row is this one, if open
            before = receipt.receipt_id[:-1] + chr(ord(receipt.receipt_id[-1]) - 1)
            receipts = await engine.backend.page(tenant_id, queries.ObligationFilter(receipt.to, before, 1))
            if [row.receipt_id for row in receipts] == [receipt.receipt_id]:
                return True
    return False


# Moving chains.


async def move_chains(engine: Engine, tenant_id: str, ages: Ages, chains: list[ReceiptChain],
                      done: ArchiveTally) -> None:
    """Write chains to a segment, then replace those that are unchanged by pointers.

    It stops when receipts have come back or an erasure has begun: what was read may have been erased since.
    """
    rows = [receipt for chain in chains for _, receipt in sorted(chain.receipts.items())]
    name = await asyncio.to_thread(write_segment, archive_folder(engine.settings), tenant_id, rows)
    if isinstance(engine.backend, ArchivingBackend):
        await engine.backend.register_segment(tenant_id, name)
    lines = {receipt.receipt_id: at for at, receipt in enumerate(rows, 2)}      # behind the header
    moved, batch = 0, list[ReceiptChain]()
    for at, chain in enumerate(chains, 1):
        batch.append(chain)
        if at == len(chains) or count_receipts(batch) >= RECEIPTS_PER_TRANSACTION:
            went = await replace_by_pointers(engine, tenant_id, ages, batch, name, lines)
            if went is None:
                done.more = True
                break
            moved, batch = moved + went, []
    done.receipts, done.segments = done.receipts + moved, done.segments + bool(moved)


def write_segment(directory: Path, tenant_id: str, rows: list[stored.Receipt]) -> str:
    """Write a segment file atomically; return its name in the archive."""
    text = pack_receipts(Header("asyncgate-archive", tenant_id), rows)
    digest = hashlib.sha256(b"".join(map(receipt_digest, rows))).hexdigest()[:16]   # equal receipts make an equal name
    name = f"{tenant_id}/{rows[0].receipt_id}-{digest}.jsonl.gz"
    path = directory / name
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_dead_partials(path.parent)
        with replacing(str(path), str(partial)) as file:
            with contextlib.suppress(OSError):      # a disk without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)        # so nobody takes it for that of a dead process
            file.write(text)
        fsync_folder(str(directory))
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)     # on a full disk each further run would leave another one
        raise errors.ArchiveUnavailable(f"the archive cannot write a segment: {error.strerror or error}") from error
    return name


def remove_dead_partials(folder: Path) -> None:
    """Remove what killed processes have left unfinished: the system has released their locks."""
    for path in folder.glob("*.partial"):
        with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


async def replace_by_pointers(engine: Engine, tenant_id: str, ages: Ages, chains: list[ReceiptChain], segment: str,
                              lines: dict[str, int]) -> int | None:
    """Replace the receipts of unchanged chains by pointers; return how many moved, or None if the run has to stop."""
    def go(work: Work) -> int | None:
        if (work.find_record(stored.SealHead) or START).imports != ages.imports:
            return None     # an erased receipt still has the digest that it had, so is_unchanged does not see it
        return sum(replace_chain(work, chain, segment, lines) for chain in chains if is_unchanged(work, chain, ages))

    return await engine.change(
        tenant_id, go, (stored.SealHead, ()), tasks={task_id for chain in chains for task_id in chain.tasks},
        receipts={receipt_id for chain in chains for receipt_id in chain.receipts}, alone=True)


def is_unchanged(work: Work, chain: ReceiptChain, ages: Ages) -> bool:
    """Whether a chain still equals its copy in the segment, has no new receipt, and its tasks have ended."""
    for receipt_id, receipt in chain.receipts.items():
        there = work.receipts.get(receipt_id)
        if there is None or receipt_digest(there) != receipt_digest(receipt):
            return False
    if any(row.receipt_id not in chain.receipts and (row.task_id in chain.tasks or not chain.receipts.keys().isdisjoint(
            row.parents)) for row in work.receipts.values()):
        return False
    return all(is_over(work.tasks.get(task_id), ages.ended) for task_id in chain.tasks)


def is_over(task: stored.Task | None, ended: float) -> bool:
    """Whether a task ended by a time and is not owed; true for a task that is not stored here."""
    return task is None or (task.status in stored.TERMINAL and not task.owed and (task.completed_at or 0.0) <= ended)


def replace_chain(work: Work, chain: ReceiptChain, segment: str, lines: dict[str, int]) -> int:
    """Replace the receipts of a chain by pointers; return how many."""
    first, tasks = chain.first, to_canonical(sorted(chain.tasks)).decode()
    for receipt_id, receipt in chain.receipts.items():
        work.keep_record(stored.Archived(receipt_id, receipt.task_id, receipt.receipt_type, segment, lines[receipt_id],
                                         receipt_digest(receipt).hex(), first, tasks))
        work.count_usage(receipt_bytes=-len(receipt.body.encode()))
    for receipt_id in chain.receipts:
        work.drop_record(stored.Receipt, receipt_id)
    return len(chain.receipts)


# Tasks.


async def prune_tasks(engine: Engine, tenant_id: str, ages: Ages) -> int:
    """Delete tasks that ended long ago and whose receipts are all in the archive; return how many."""
    pruned = 0
    async for rows in walk(engine.backend, tenant_id, queries.Rows(stored.Task)):
        old = [task.task_id for task in rows if task.created_at <= ages.pruned and is_over(task, ages.pruned)
               and task.status in stored.TERMINAL and await is_archived(engine, tenant_id, task.task_id)]
        for part in batches(old, RECEIPTS_PER_TRANSACTION):
            pruned += await drop_tasks(engine, tenant_id, ages, part)
        if rows[-1].created_at > ages.pruned:
            break
    return pruned


async def is_archived(engine: Engine, tenant_id: str, task_id: str) -> bool:
    """Whether a task has receipts in the archive and nowhere else."""
    return bool(await engine.backend.page(tenant_id,
                                          queries.ArchivedFilter(task_id))) and not await engine.backend.page(
        tenant_id, queries.ReceiptFilter(None, task_id, None, None, 1))


async def drop_tasks(engine: Engine, tenant_id: str, ages: Ages, ids: list[str]) -> int:
    """Delete tasks, with their leases, progress and events."""
    def go(work: Work) -> int:
        over = [task_id for task_id in ids if task_id in work.tasks and is_over(work.tasks[task_id], ages.pruned)]
        for task_id in over:
            work.drop_record(stored.Task, task_id)
            work.count_usage(terminal=-1, step_bytes=-work.find_progress(task_id).step_bytes)
        return len(over)

    return await engine.change(tenant_id, go, tasks=ids, alone=True)     # who has loaded one would go by it


# Reading and bringing back.


def list_files(settings: Settings, tenant_id: str) -> list[str]:
    """Return the names of all files that the archive has of a tenant, also of those that were never finished."""
    if not settings.archive.directory:
        return []
    return sorted(f"{tenant_id}/{path.name}" for path in (archive_folder(settings) / tenant_id).glob("*.jsonl*"))


def read_left_over(path: str) -> list[stored.Receipt]:
    """Return the receipts of a file to which nothing points, as far as it can be read."""
    try:
        return list(Reading(path).rows())
    except OSError:
        return []


@lru_cache(4)
def read_segment(path: str, written: float) -> tuple[stored.Receipt | None, ...]:
    """Return the receipts of a segment by line, None for the header; raises ArchiveUnavailable if it is damaged."""
    reading = Reading(path)
    rows = tuple([line.receipt for line in reading.lines()])
    if reading.problems:
        raise errors.ArchiveUnavailable(
            f"segment {os.path.basename(path)} of the archive is damaged: {reading.problems[0]}")
    return rows


def read_archived(directory: Path, pointers: list[stored.Archived]) -> list[stored.Receipt]:
    """Return the receipts of pointers, byte for byte as they were archived."""
    receipts = []
    for pointer in pointers:
        path = directory / pointer.segment
        try:
            rows = read_segment(str(path), path.stat().st_mtime)
        except OSError as error:
            raise errors.ArchiveUnavailable(f"segment {path.name} of the archive cannot be read: "
                                            f"{error.strerror or error}") from error
        row = rows[pointer.line - 1] if pointer.line <= len(rows) else None
        if row is None or row.receipt_id != pointer.receipt_id or receipt_digest(row).hex() != pointer.digest:
            raise errors.ArchiveUnavailable(f"line {pointer.line} of segment {path.name} is not the archived receipt "
                                            f"{pointer.receipt_id}")
        receipts.append(row)
    return receipts


async def load_archived(engine: Engine, pointers: list[stored.Archived]) -> list[stored.Receipt]:
    """Read archived receipts, on a thread."""
    return await asyncio.to_thread(read_archived, archive_folder(engine.settings), pointers) if pointers else []


async def restore_chain(engine: Engine, tenant_id: str, task_id: str) -> tuple[list[str], int]:
    """Restore the chain of a task to the database; return its tasks, and how many receipts it has."""
    chains = defaultdict[str, list[stored.Archived]](list)
    for pointer in await engine.backend.page(tenant_id, queries.ArchivedFilter(task_id)):
        chains[pointer.chain].append(pointer)
    if not chains:
        raise errors.ReceiptNotFound(f"the archive has no receipts of task {task_id}")
    tasks, count = set[str](), 0
    for chain, (pointer, *_) in chains.items():
        tasks |= {*decode_tasks(pointer.tasks)}
        pointers = [row for id in (*decode_tasks(pointer.tasks), "")
                    for row in await engine.backend.page(tenant_id, queries.ArchivedFilter(id)) if row.chain == chain]
        count += await write_chain_back(engine, tenant_id, pointers)
    return sorted(tasks), count


def note_return(work: Work) -> None:
    """Note that receipts return, or that an erasure goes on: readers begin again, and no run of the archive goes on."""
    head = work.find_record(stored.SealHead) or START
    work.keep_record(replace(head, imports=head.imports + 1))


async def count_returns(engine: Engine, tenant_id: str) -> int:
    """Return how often receipts were imported or restored: each time some may stand behind a reader's cursor."""
    head = await engine.backend.record(tenant_id, stored.SealHead) or START
    return head.imports


async def write_chain_back(engine: Engine, tenant_id: str, pointers: list[stored.Archived]) -> int:
    """Write the receipts of a chain back, delete its pointers and count the return, in one transaction."""
    rows = await load_archived(engine, pointers)

    def write(work: Work) -> int:
        back = [row for row in rows if work.find_record(stored.Archived, row.receipt_id)]
        for receipt in back:
            work.written[receipt.receipt_id] = replace(receipt, delivered_at=None)
            work.count_usage(receipt_bytes=len(receipt.body.encode()))
            if receipt.delivered_at is not None:
                work.delivered[receipt.receipt_id] = receipt.delivered_at
        for receipt in back:
            work.drop_record(stored.Archived, receipt.receipt_id)
        if back:
            note_return(work)
        return len(back)

    return await engine.change(tenant_id, write, (stored.SealHead, ()),
                               *((stored.Archived, (pointer.receipt_id,)) for pointer in pointers))
