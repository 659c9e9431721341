"""How an erasure goes: step after step, each of which begins again where it was interrupted.

First the credentials go, so that nobody adds anything.  Then work in flight and open obligations end, each with its
receipt.  What the archive has comes back to the database, and its files go.  Then each row is judged by the rules, and
what changes is written a few hundred rows at a time, each batch with its counts in one transaction.  A last look makes
sure that nothing is left.  At the end the key of the pseudonyms is destroyed.

While an erasure is open, and only then, the database lets it change rows that never change otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import CANCELED, INPUT_EXPIRED, TERMINATES, UNSCHEDULED, Caller, Engine, Work, its_end
from asyncgate.extras.privacy import rules
from asyncgate.extras.privacy.whom import Whom
from asyncgate.parts.identity.audit import add_line, visit
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.identity.revocations import LONGEST_VALID_SECONDS, REVOCATION_KEYS, revoke
from asyncgate.parts.model import errors, queries, stored, stored_oauth, wire
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.counted import measure_text
from asyncgate.parts.model.erased import digest_of_kept, digest_of_list, place_of_row
from asyncgate.parts.model.walking import batches
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.seals import entry_digest, receipt_digest

T = TypeVar("T")

ROWS_PER_BATCH = 200
MOST_ROUNDS = 3             # last looks of one call that find something again
UNTIL_NOTED_SECONDS = 330.0      # after which no other process still writes what it noted before the credentials went
LIVE = ("queued", "leased", "running")
WHY = "erased"              # the reason in the receipts that end work
# Rows that a batch loads with their task, because work on it changes them.
OF_WORK: dict[type[Struct], str] = {stored.Task: "tasks", stored.Lease: "leases", stored.Progress: "progress"}

decode_list = msgspec.json.Decoder(list[str]).decode
Counts = dict[str, dict[str, int]]      # by table: how many rows were changed and deleted
decode_counts = msgspec.json.Decoder(Counts).decode


def places(engine: Engine, whom: Whom) -> list[tuple[str, type[Struct]]]:
    """Return the tenants and kinds of rows that an erasure looks at, in its order."""
    own, operator = whom.tenant_id, engine.settings.default_tenant_id
    apart = (*rules.OF_OPERATOR, *(rules.WITH_TASK if whom.principal is None else ()))
    kinds = [kind for kind in rules.ERASE_RULES if kind not in apart]
    pairs = [(own, kind) for kind in kinds] + [(operator, kind) for kind in rules.OF_OPERATOR]
    return pairs + ([(operator, stored.Audit)] if operator != own and whom.names else [])


def here_or_there(whom: Whom, tenant_id: str) -> Whom:
    """Return whom an erasure is of, as the rows of a tenant name them."""
    return whom if tenant_id == whom.tenant_id else replace(whom, here=False)


class Eraser:
    """Carries out one erasure."""

    def __init__(self, engine: Engine, erasure: stored.Erasure) -> None:
        self.engine, self.erasure, self.tenant_id = engine, erasure, erasure.of_tenant
        self.operator = engine.settings.default_tenant_id
        self.whom = Whom.of(erasure, erasure.of_tenant)
        self.owned = set[str]()         # tasks of whom it is, as far as their receipts were read

    async def run(self) -> stored.Erasure:
        """Go on until the erasure has ended, or has to wait; return how far it is."""
        rounds, steps = 0, {"credentials": self.end_credentials, "work": self.end_work, "archive": self.empty_archive,
                            "rows": self.erase_rows}
        order = [*steps, "check", "end"]
        while self.erasure.ended_at is None and self.erasure.step != "end":
            if self.erasure.step in steps:
                await steps[self.erasure.step]()
                await self.move(order[order.index(self.erasure.step) + 1])
                continue
            # Another process may still write what it noted before the credentials went.
            if not self.engine.is_alone() and self.engine.backend.now() <= self.erasure.begun_at + UNTIL_NOTED_SECONDS:
                return self.erasure
            if await self.is_clean():
                await self.move("end")
            elif (rounds := rounds + 1) > MOST_ROUNDS:
                return self.erasure
            else:
                await self.move("credentials")
        return self.erasure

    # What is written.

    async def write(self, tenant_id: str, run: Callable[[Work], T], *records: tuple[type[Struct], tuple[str, ...]],
                    tasks: Iterable[str] = (), receipts: Iterable[str] = (), alone: bool = False) -> T:
        """Let `run` change rows of a tenant in its next batch, with this erasure locked."""
        return await self.engine.change(tenant_id, run, (stored.Erasure, (self.erasure.erasure_id,)),
                                        (stored.AuditHead, ()), *records, tasks=tasks, receipts=receipts, alone=alone)

    async def keep(self, change: Callable[[Work, stored.Erasure], stored.Erasure],
                   tenant_id: str | None = None) -> None:
        """Change how far the erasure is."""
        def go(work: Work) -> stored.Erasure:
            now = work.find_record(stored.Erasure, self.erasure.erasure_id)
            assert now is not None
            if now.ended_at is None:
                work.keep_record(now := change(work, now))
            return now
        kept = await self.write(tenant_id or self.tenant_id, go)
        if tenant_id in (None, self.tenant_id):
            self.erasure = kept

    async def move(self, step: str) -> None:
        """Note which step is next."""
        await self.keep(lambda work, now: replace(now, step=step))

    # Credentials.

    async def end_credentials(self) -> None:
        """Suspend the tenant, or revoke the keys of the principal; end the sessions of the people who act as it."""
        if self.whom.principal is None:
            await self.write(self.tenant_id, self.suspend, (stored.Account, ()))
        keys = [key async for key in read_rows(self.engine, self.tenant_id, stored.Key)
                if key.revoked_at is None and rules.judge(self.whom, key, self.owned) is None]
        for part in batches(keys, ROWS_PER_BATCH):
            await self.write(self.tenant_id, lambda work,
                             part=part: self.revoke_keys(work, part),   # type: ignore[misc]
                             *((stored.Key, stored.key_of(key)) for key in part))
        there = here_or_there(self.whom, self.operator)
        grants = [grant async for grant in read_rows(self.engine, self.operator, stored_oauth.Grant)
                  if grant.ended_at is None and rules.judge(there, grant, self.owned) is None]
        for some in batches(grants, ROWS_PER_BATCH):
            await self.write(self.operator, lambda work,
                             some=some: self.end_sessions(work, some),   # type: ignore[misc]
                             *REVOCATION_KEYS, *((stored_oauth.Grant, stored.key_of(grant)) for grant in some))
        refused = {row.subject async for row in read_rows(self.engine, self.operator, stored_oauth.Revocation)
                   if row.kind == "user" and row.since >= self.erasure.begun_at}
        if users := sorted(self.whom.users - refused):
            await self.write(self.operator, lambda work: self.refuse_tokens(work, users), *REVOCATION_KEYS)

    def suspend(self, work: Work) -> None:
        """Refuse everybody of the tenant from now on."""
        account = work.find_record(stored.Account) or stored.Account("", work.now)
        if account.suspended_at is None:
            work.keep_record(replace(account, suspended_at=work.now))

    def revoke_keys(self, work: Work, keys: list[stored.Key]) -> None:
        """Refuse keys from now on."""
        for key in keys:
            if (row := work.find_record(stored.Key, key.key_id)) is not None and row.revoked_at is None:
                work.keep_record(replace(row, revoked_at=work.now))

    def end_sessions(self, work: Work, grants: list[stored_oauth.Grant]) -> None:
        """End sessions, and refuse their access tokens; the rows of revocations name the session alone."""
        for grant in grants:
            if (row := work.find_record(stored_oauth.Grant, grant.grant_id)) is not None and row.ended_at is None:
                work.keep_record(replace(row, ended_at=work.now, ended_why=WHY))
                revoke(work, "session", row.grant_id, work.now + LONGEST_VALID_SECONDS, str(self.engine.gate), WHY)

    def refuse_tokens(self, work: Work, users: list[str]) -> None:
        """Refuse all access tokens of people, by their user ids."""
        for user in users:
            revoke(work, "user", user, work.now + LONGEST_VALID_SECONDS, str(self.engine.gate), WHY)

    # Work in flight, and what is owed.

    async def end_work(self) -> None:
        """Give back leases, cancel tasks, end schedules, and close what is still owed to whom is erased."""
        if self.whom.principal is not None:
            for lease, _ in await self.engine.backend.page(self.tenant_id, queries.LeaseFilter(self.whom.principal)):
                await self.give_back(lease)
        for status in LIVE:
            async for tasks in self.tasks_in(status):
                await self.write(self.tenant_id, lambda work,
                                 tasks=tasks: self.cancel(work, tasks),  # type: ignore[misc]
                                 tasks=[task.task_id for task in tasks])
        schedules = [row async for row in read_rows(self.engine, self.tenant_id, stored.Schedule)
                     if rules.judge(self.whom, row, self.owned) is None]
        for schedule in schedules:
            await self.close_obligation(schedule.created, schedule)
        after: str | None = None
        while owed := await self.engine.backend.page(
                self.tenant_id, queries.ObligationFilter(self.whom.principal, after, ROWS_PER_BATCH)):
            for receipt in owed:
                await self.close_obligation(receipt.receipt_id)
            after = owed[-1].receipt_id

    async def give_back(self, lease: stored.Lease) -> None:
        """Release a lease of the principal: the task waits for another worker."""
        assert self.whom.principal is not None
        worker = Caller(self.tenant_id, self.whom.principal, "worker", frozenset())
        ask = wire.ReleaseLease(task_id=lease.task_id, lease_id=lease.lease_id)

        def release(engine: Engine, work: Work, caller: Caller, ask: wire.ReleaseLease) -> None:
            with contextlib.suppress(errors.GateError), work.undo_on_error():      # it has ended meanwhile
                engine.release_lease(work, caller, ask)
        await self.engine.write(release, its_end, worker, ask)

    async def tasks_in(self, status: str) -> AsyncIterator[list[stored.Task]]:
        """Yield the tasks in a state, newest first."""
        before: str | None = None
        while rows := await self.engine.backend.page(
                self.tenant_id, queries.TaskFilter(self.whom.principal, status, None, before, ROWS_PER_BATCH)):
            yield [task for task, *_ in rows]
            before = rows[-1][0].task_id

    def cancel(self, work: Work, tasks: list[stored.Task]) -> None:
        """Cancel tasks with their receipts."""
        own = self.engine.make_own_caller(self.tenant_id)
        for task in tasks:
            if task.task_id in work.tasks:
                self.engine.cancel_task(work, own, wire.CancelTask(task_id=task.task_id, reason=WHY))

    async def close_obligation(self, receipt_id: str, schedule: stored.Schedule | None = None) -> None:
        """Write the receipt that discharges an obligation, and close it."""
        opened = await self.engine.backend.receipt(self.tenant_id, receipt_id)
        tasks = [opened.task_id] if opened and opened.task_id else []
        records = [(stored.Schedule, (schedule.schedule_id,))] if schedule else []

        def close(work: Work) -> None:
            if (receipt := work.receipts.get(receipt_id)) is not None:
                self.discharge(work, receipt)
            if schedule is not None:
                work.drop_record(stored.Schedule, schedule.schedule_id)
        await self.write(self.tenant_id, close, *records, tasks=tasks, receipts=[receipt_id])

    def discharge(self, work: Work, opened: stored.Receipt) -> None:
        """Discharge an obligation, unless a receipt has done so."""
        ends = TERMINATES[opened.receipt_type]
        if any(receipt.receipt_type in ends and opened.receipt_id in receipt.parents
               for receipt in work.receipts.values()):
            return work.close_obligation(opened.receipt_id, opened.to)
        gate, body = self.engine.gate, {"reason": WHY}
        contract = next(end for end in (CANCELED, UNSCHEDULED, INPUT_EXPIRED) if end.type in ends)
        self.engine.write_receipt(work, contract, None, body, by=gate, to=opened.to, task_id=opened.task_id,
                                  schedule_id=opened.schedule_id, parents=(opened.receipt_id,), discriminator=WHY)
        work.close_obligation(opened.receipt_id, opened.to)
        task = work.tasks.get(opened.task_id)
        if task is not None and task.duty == opened.receipt_id and task.owed:
            work.change_task(task, owed=False)
        elif task is not None:
            self.engine.look_after(work, task)      # which may wait for an answer of whoever is erased

    # The archive.

    async def empty_archive(self) -> None:
        """Bring back every segment of the archive that has anything to erase, and delete its file."""
        segments = await self.find_segments()
        named = to_canonical(sorted({*decode_list(self.erasure.segments), *segments})).decode()
        if named != self.erasure.segments:      # before anything comes back: whoever goes on must know the files
            await self.keep(lambda work, now: replace(now, segments=named))
        for pointers in segments.values():
            chains: defaultdict[str, list[stored.Archived]] = defaultdict(list)
            for pointer in pointers:
                chains[pointer.chain].append(pointer)
            for chain in chains.values():
                await archive.write_chain_back(self.engine, self.tenant_id, chain)
        if left := decode_list(self.erasure.segments):
            await self.delete_files(left)

    async def find_segments(self) -> dict[str, list[stored.Archived]]:
        """Return the segments that have anything to erase, with their pointers.

        Files to which nothing points have it, too: of receipts that were restored, or of a run that was interrupted.
        """
        named: defaultdict[str, list[stored.Archived]] = defaultdict(list)
        async for row in read_rows(self.engine, self.tenant_id, stored.Archived):
            named[row.segment].append(row)
        segments = {}
        for segment, pointers in named.items():
            path = archive.archive_folder(self.engine.settings) / segment
            rows = await asyncio.to_thread(archive.read_segment, str(path), path.stat().st_mtime)
            if any(rules.judge(self.whom, row, self.owned) != row for row in rows if row is not None):
                segments[segment] = pointers
        left_over = [name for name in archive.list_files(self.engine.settings, self.tenant_id) if name not in named]
        return segments | {segment: [] for segment in left_over if await self.must_go(segment)}

    async def must_go(self, segment: str) -> bool:
        """Whether a file to which nothing points has anything to erase; one of another database is not ours."""
        path = archive.archive_folder(self.engine.settings) / segment
        rows = await asyncio.to_thread(archive.read_left_over, str(path))
        ours = next((row for row in rows if rules.judge(self.whom, row, self.owned) != row), None)
        return ours is not None and (
            await self.engine.backend.receipt(self.tenant_id, ours.receipt_id) is not None
            or await self.engine.backend.record(self.tenant_id, stored.Archived, ours.receipt_id) is not None)

    async def delete_files(self, segments: list[str]) -> None:
        """Delete files of the archive to which nothing points any more."""
        used = {row.segment async for row in read_rows(self.engine, self.tenant_id, stored.Archived)}
        folder = archive.archive_folder(self.engine.settings)
        for segment in segments:
            if segment not in used:
                (folder / segment).unlink(missing_ok=True)
        archive.read_segment.cache_clear()

    # Rows.

    async def erase_rows(self) -> None:
        """Judge each row, and write what changes."""
        await self.forget_noted()
        for tenant_id, kind in places(self.engine, self.whom):
            whom = here_or_there(self.whom, tenant_id)
            async for rows in self.find_changes(tenant_id, whom, kind):
                for part in batches(rows, ROWS_PER_BATCH):
                    await self.erase(tenant_id, whom, kind, part)
        await self.engine.backend.drop_lanes(self.tenant_id)

    async def find_changes(self, tenant_id: str, whom: Whom, kind: type[Struct]) -> AsyncIterator[list[Any]]:
        """Yield the rows that the rules change, some hundred at a time."""
        structs = []
        async for row in read_rows(self.engine, tenant_id, kind):
            if rules.judge(whom, row, self.owned) != row:
                structs.append(row)
            if len(structs) >= ROWS_PER_BATCH * 5:
                yield structs
                structs = []
        if structs:
            yield structs

    async def erase(self, tenant_id: str, whom: Whom, kind: type[Struct], rows: list[Any]) -> None:
        """Change rows of one kind in one transaction, with the counts."""
        records = [(kind, stored.key_of(row)) for row in rows] if kind in stored.RECORDS else []
        notes = [(stored.Erased, place_of_row(row)) for row in rows] if kind in (stored.Receipt, stored.Audit,
                                                                                 stored.Entry) else []
        tasks = [row.task_id for row in rows] if kind in OF_WORK else []

        def change(work: Work) -> None:
            now = work.find_record(stored.Erasure, whom.erasure_id)
            if now is None or now.ended_at is not None:
                return      # somebody else has ended it
            done = [self.change_row(work, whom, current) for row in rows
                    if (current := find_current(work, kind, row)) is not None]
            work.keep_record(replace(now, counts=add_counts(now.counts, stored.TABLES[kind], done)))
        # Alone: what another call makes of the task in the same batch would be overwritten by what is judged here.
        await self.write(tenant_id, change, *records, *notes, tasks=tasks, alone=bool(tasks))

    def change_row(self, work: Work, whom: Whom, row: Any) -> str:
        """Carry out what the rules say of one row; return what was done."""
        after = rules.judge(whom, row, self.owned)
        if after == row or (after is None and must_end_first(row)):
            return ""
        if after is None:
            work.drop_record(type(row), *stored.key_of(row))
            if isinstance(row, stored.Task):
                work.count_usage(terminal=-1, step_bytes=-work.find_progress(row.task_id).step_bytes)
            return "deleted"
        if not CARDS[type(row)].erasable:
            work.keep_record(after)
            return "changed"
        if isinstance(row, stored.Receipt | stored.Audit | stored.Entry):
            note_erased(work, whom, row)
        freed = measure_text(row.body) - measure_text(after.body) if isinstance(
            row, stored.Receipt) and isinstance(after, stored.Receipt) else 0
        work.erase_row(after, freed)
        return "changed"

    async def forget_noted(self) -> None:
        """Write the audit lines that this process has noted, so that they are erased too, and forget sightings."""
        if (guard := self.engine.find_extension(Guard)) is not None:
            visitor = visit.get()
            for _ in range(2):      # the first counts what was repeated, the second forgets who did
                guard.auditor.count()
            visit.set(visitor)
            await guard.auditor.flush()
        self.engine.sightings.forget(self.tenant_id, self.whom.principal)

    # The end.

    async def is_clean(self) -> bool:
        """Whether nothing is left to erase."""
        await self.forget_noted()
        for tenant_id, kind in places(self.engine, self.whom):
            async for _ in self.find_changes(tenant_id, here_or_there(self.whom, tenant_id), kind):
                return False
        return not await self.find_segments()

    async def end(self, sign: Callable[[dict[str, Any]], str | None], details: dict[str, Any]) -> stored.Erasure:
        """Destroy the key and the name, and keep the proof; the rows in the operator's tenant come first."""
        if self.operator != self.tenant_id and await self.engine.backend.record(
                self.operator, stored.Erasure, self.erasure.erasure_id):
            await self.close(self.operator, sign, details)
        await self.close(self.tenant_id, sign, details)
        return self.erasure

    async def close(self, tenant_id: str, sign: Callable[[dict[str, Any]], str | None],
                    details: dict[str, Any]) -> None:
        """End the erasure in one tenant."""
        who, id = self.whom.principal, self.erasure.erasure_id
        digest = digest_of_list([row async for row in read_rows(self.engine, tenant_id, stored.Erased)
                                 if row.erasure_id == id])
        pseudonym = self.whom.pseudonym(*((who.kind, who.id) if who else ("tenant", self.tenant_id)))

        def finish(work: Work, now: stored.Erasure) -> stored.Erasure:
            ended = {**details, "erasure_id": id, "tenant_id": tenant_id, "of": pseudonym, "digest": digest,
                     "counts": decode_counts(now.counts), "begun_at": now.begun_at, "ended_at": work.now}
            add_line(work, "erasure_ended", "critical", to_canonical(
                {"erasure_id": id, "digest": digest, "counts": ended["counts"]}))
            return replace(now, principal_id=pseudonym, names="[]", key="", step="ended", segments="[]",
                           ended_at=work.now, digest=digest, proof=sign(ended))
        await self.keep(finish, tenant_id)


def must_end_first(row: Any) -> bool:
    """Whether a row may not go yet, because it came while the erasure was under way; another round ends it first."""
    if isinstance(row, stored.Task):
        return row.status not in stored.TERMINAL or bool(row.owed)
    return isinstance(row, stored.Key) and row.revoked_at is None


def find_current(work: Work, kind: type[Struct], row: Any) -> Any:
    """Return a row as it is now; rows that never change otherwise are as they were read."""
    if kind is stored.Entry:
        return row
    if kind in stored.RECORDS:
        return work.find_record(kind, *stored.key_of(row))
    return getattr(work, OF_WORK[kind]).get(row.task_id) if kind in OF_WORK else row


def note_erased(work: Work, whom: Whom, row: stored.Receipt | stored.Audit | stored.Entry) -> None:
    """Note that a row is erased, with the digest that others have of it; once for each row."""
    source, row_id = place_of_row(row)
    if work.find_record(stored.Erased, source, row_id) is not None:
        return
    before = row.hash if isinstance(row, stored.Audit) else (
        receipt_digest(row) if isinstance(row, stored.Receipt) else entry_digest(row)).hex()
    work.keep_record(stored.Erased(source, row_id, whom.erasure_id, before, digest_of_kept(row)))


def add_counts(counts: str, table: str, done: list[str]) -> str:
    """Add what was done to rows of a table to the counts."""
    total = decode_counts(counts)
    for what in filter(None, done):
        of = total.setdefault(table, {})
        of[what] = of.get(what, 0) + 1
    return to_canonical(total).decode()
