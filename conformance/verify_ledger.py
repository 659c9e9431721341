"""Check the receipts in a database against their seals.

It also works beside a running server, as `verify` does: a problem counts only if it is found twice.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

from asyncgate.conformance.verify import Told
from asyncgate.conformance.verify_erasures import Listed, find_false_erasure, read_erased
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.walking import merge, walk, walk_rows
from asyncgate.parts.receipts.files import Reading
from asyncgate.parts.receipts.seals import SealChain, entry_digest, receipt_digest

ENTRIES_PER_READ = 1000


class Sealed(Struct):
    """The result: the last seal of each tenant, counts and problems."""

    seals: int = 0
    receipts: int = 0
    unsealed: int = 0           # receipts since the last seal
    segments: int = 0           # checked segments of the archive
    archived: int = 0           # receipts in these segments
    heads: dict[str, stored.SealHead] = {}
    stopped: dict[str, str] = {}    # by tenant, the receipt from which on nothing can be sealed: its body is not here
    problems: list[str] = []


async def verify_ledger(backend: Any, *, anchors: tuple[str, ...] = (), directory: str = "",
                        progress: Told | None = None) -> Sealed:
    """Check all seals of all tenants; `anchors` are seals recorded elsewhere, as NUMBER:HASH.

    A pointer proves nothing, because its writer may also delete the receipt.  So every segment with a pointer is read,
    and pointers are a problem if the archive's directory is not set.
    """
    report = await _once(backend, anchors, directory, progress)
    if report.problems:
        again = await _once(backend, anchors, directory, progress)
        again.problems = [problem for problem in again.problems if problem in set(report.problems)]
        return again
    return report


async def _once(backend: Any, anchors: tuple[str, ...], directory: str, progress: Told | None) -> Sealed:
    report, noted = Sealed(), dict.fromkeys(anchors, False)
    for tenant_id in await backend.tenants():
        chain = SealChain()
        try:
            async for rows in _held(backend, tenant_id, chain, noted):
                report.receipts += rows
                if progress is not None:
                    progress(report.receipts)
        except Exception as unreadable:     # a damaged file must not hide earlier findings
            chain.problems.append(f"cannot be read completely: {unreadable}")
        report.problems += [f"tenant {tenant_id}: {problem}" for problem in chain.close()]
        report.seals, report.unsealed = report.seals + chain.head.number, report.unsealed + chain.unsealed
        report.heads[tenant_id] = chain.head
        if chain.head.number and (bare := await find_bare(backend, tenant_id, chain.head.last_id)):
            report.stopped[tenant_id] = bare
    await check_segments(backend, directory, report, progress)
    report.problems += [f"the recorded seal {anchor} is missing: its receipts were rewritten"
                        for anchor, there in noted.items() if not there]
    return report


async def find_bare(backend: Any, tenant_id: str, sealed: str) -> str | None:
    """Return the receipt behind the last seal if its body is not here, so that sealing stopped there."""
    following = await backend.page(tenant_id, queries.ReceiptFilter(None, None, None, sealed, 1, settled=False))
    return next((row.receipt_id for row in following if not row.body), None)


async def _held(backend: Any, tenant_id: str, chain: SealChain, noted: dict[str, bool]) -> AsyncIterator[int]:
    """Check one tenant's receipts against its seals; yield the number of receipts of each page."""
    head = await backend.record(tenant_id, stored.SealHead)
    async for seal in walk_rows(backend, tenant_id, queries.Rows(stored.Seal)):
        if head is None or seal.number <= head.number:      # otherwise it was made since
            chain.add(seal)
        noted |= {name: True for name in noted if name == f"{seal.number}:{seal.hash}"}
    chain.ends(head)
    erased, problems = await read_erased(backend, tenant_id)
    chain.problems += problems
    async for part in all_digests(backend, tenant_id, erased):
        for receipt_id, digest in part:
            chain.see(receipt_id, digest)
        yield len(part)


Digests = list[tuple[str, bytes]]


async def all_digests(backend: Any, tenant_id: str, erased: Listed) -> AsyncIterator[Digests]:
    """Yield the digests of all receipts in order of ids, then of a ledger's entries in order of arrival."""
    async for parts in merge(here(backend, tenant_id, erased), away(backend, tenant_id),
                             filed(backend, tenant_id, erased)):
        yield sorted(pair for part in parts for pair in part.items())


async def here(backend: Any, tenant_id: str, erased: Listed) -> AsyncIterator[dict[str, bytes]]:
    """Yield the digests of the receipts in the database; one that only says that it was erased has none."""
    async for page in walk(backend, tenant_id, queries.Rows(stored.Receipt)):
        yield {row.receipt_id: b"" if is_falsely_erased(erased, row) else receipt_digest(row) for row in page}


def is_falsely_erased(erased: Listed, row: stored.Receipt | stored.Entry) -> bool:
    """Whether a row says that it was erased, and no erasure lists it so."""
    content = row.body if isinstance(row, stored.Receipt) else row.content
    return read_note(content) is not None and find_false_erasure(erased, row) is not None


async def away(backend: Any, tenant_id: str) -> AsyncIterator[dict[str, bytes]]:
    """Yield the digests of archived receipts."""
    async for pointers in walk(backend, tenant_id, queries.Rows(stored.Archived)):
        yield {pointer.receipt_id: as_bytes(pointer) for pointer in pointers}


async def filed(backend: Any, tenant_id: str, erased: Listed) -> AsyncIterator[dict[str, bytes]]:
    """Yield the digests of a ledger's entries, which other gates stored."""
    async for entries in walk(backend, tenant_id, queries.EntryFilter(None, None, None, None, None, ENTRIES_PER_READ)):
        yield {entry.arrival: b"" if is_falsely_erased(erased, entry) else entry_digest(entry) for entry in entries}


def as_bytes(pointer: stored.Archived) -> bytes:
    """Return the digest of an archived receipt; an invalid one matches no seal."""
    try:
        return bytes.fromhex(pointer.digest)
    except ValueError:
        return b""


async def check_segments(backend: Any, directory: str, report: Sealed, progress: Told | None = None) -> None:
    """Read every segment that has pointers, and check its lines against them."""
    for tenant_id in await backend.tenants():
        named: defaultdict[str, list[stored.Archived]] = defaultdict(list)
        async for pointer in walk_rows(backend, tenant_id, queries.Rows(stored.Archived)):
            named[pointer.segment].append(pointer)
        if (head := report.heads.get(tenant_id)) is not None:    # else the tenant is younger than this check
            report.problems += find_unsealed(tenant_id, named, head.last_id)
        if named and not directory:
            count = sum(map(len, named.values()))
            report.problems.append(f"tenant {tenant_id}: {count} receipts are in the archive, which was not "
                                   "checked: set its folder (archive.directory)")
            continue
        erased, _ = await read_erased(backend, tenant_id) if named else ({}, [])
        for segment, wanted in named.items():
            report.segments += 1
            report.archived += len(wanted)
            report.problems += [f"tenant {tenant_id}: segment {segment}: {problem}"
                                for problem in segment_problems(directory, segment, wanted, erased)]
            if progress is not None:
                progress(report.receipts + report.archived)


def find_unsealed(tenant_id: str, named: dict[str, list[stored.Archived]], sealed: str) -> list[str]:
    """Return whether receipts moved to the archive that no seal covers: only sealed ones do, so seals were removed."""
    unsealed = [pointer.receipt_id for pointers in named.values() for pointer in pointers
                if pointer.receipt_id > sealed]
    return [f"tenant {tenant_id}: {len(unsealed)} receipts up to {max(unsealed)} are in the archive, but no seal "
            "covers them: seals were removed"] if unsealed else []


def segment_problems(directory: str, segment: str, wanted: list[stored.Archived], erased: Listed) -> list[str]:
    """Yield the problems of one segment; of several pointers to one line at most one is valid."""
    folder, path = os.path.realpath(directory), os.path.realpath(os.path.join(directory, segment))
    if os.path.commonpath([folder, path]) != folder:
        return ["it is outside the archive's folder"]
    reading, left, problems = Reading(path), defaultdict[int, list[stored.Archived]](list), list[str]()
    for pointer in wanted:
        left[pointer.line].append(pointer)
    try:
        for number, line in enumerate(reading.lines(), 1):
            problems += [f"line {number} differs from the archived receipt {pointer.receipt_id}"
                         for pointer in left.pop(number, ())
                         if line.receipt is None or receipt_digest(line.receipt).hex() != pointer.digest
                         or is_falsely_erased(erased, line.receipt)]
    except OSError as error:
        return [f"it cannot be read: {error.strerror or error}"]
    return [*reading.problems, *problems, *(f"line {number}, receipt {pointer.receipt_id}, is missing"
                                            for number, pointers in left.items() for pointer in pointers)]
