"""Rebuild a gate from its receipts after a disaster: the work of `asyncgate rebuild` (spec 20.4).

Receipts are not meant as a source of reconstruction (H.12), so each rebuilt task is marked.  Obligations that were open
are open again.  Tasks have their statuses, and results as far as receipts hold them.  An event `task.rebuilt` of each
task names the fields that its receipts do not hold.  An open task is put on hold: its payload is lost, its worker may
still be at work, and only its owner can decide how it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Raw, Struct, field
from msgspec.structs import replace

import asyncgate
from asyncgate import Engine, Needs, Work, receipt_key
from asyncgate.extras.ledger import restated
from asyncgate.extras.ledger.collected import Collected
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.content import find_location, needs_of
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.walking import batches
from asyncgate.parts.receipts.erased_elsewhere import list_as_erased
from asyncgate.parts.receipts.incoming import computed_hash

if TYPE_CHECKING:
    from asyncgate import Contract
    from asyncgate.backends import Backend
    from asyncgate.parts.model.settings import Settings

REBUILT = "rebuilt"
TASKS_PER_BATCH, RECEIPTS_PER_BATCH = 100, 500          # how many one transaction writes
SHOWN = 10                          # how many damaged receipts a message names
WITHIN = {"status", "completion_metadata", "schema_version"}    # members that task.result_ready does not repeat


class NotEmpty(errors.Conflicting):
    """The database is not empty: rebuilt rows would mix with its rows."""


class Damaged(errors.Conflicting):
    """The hash of some receipts does not match their content."""


class SeveralGates(errors.Conflicting):
    """More than one gate wrote the receipts, and no option says which gates to rebuild."""


class RebuildFailed(errors.Stopped):
    """The database refused a write."""


class RebuildTally(Struct):
    """How many rows of each kind a rebuild wrote."""

    tasks: int = 0
    held: int = 0
    receipts: int = 0
    erased: int = 0                     # receipts whose content another gate has erased
    obligations: int = 0
    schedules: int = 0
    proven: int = 0                     # completed tasks whose steps are lost, and proven by a digest
    resumed: int = 0                    # unfinished tasks that a worker had, which may have recorded steps
    told: int = 0                       # how many lost task.result_ready were written again
    problems: list[str] = field(default_factory=list)


async def require_empty(backend: Backend) -> None:
    """Refuse a database that is not empty; raises NotEmpty."""
    if tenants := await backend.tenants():
        raise NotEmpty(f"the database is in use: it has rows of tenant {tenants[0]}.  Use an empty one, and delete a "
                       "database that an interrupted rebuild has left")


def choose(collected: Collected, instances: frozenset[str] | None) -> None:
    """Keep only the chosen gates' receipts, and the workers' statements that these gates adopted.

    Raises SeveralGates if no gate is chosen and several wrote the receipts.
    """
    counts = collected.instances()
    if instances is None and len(counts) > 1:
        listed = ", ".join(f"{name or 'nameless'} ({count})" for name, count in counts.items())
        raise SeveralGates(f"several instances wrote these receipts: {listed}.  Name this gate's instances with "
                           "--instance, or give --all-instances")
    collected.keep_only(instances if instances is not None else frozenset(counts))
    for statement in [receipt for receipt in collected.all() if not receipt.receipt_key]:
        if (taken := find_adopted(collected, statement)) is None:
            collected.forget(statement.receipt_id)
        else:
            collected.replace(taken)


def find_adopted(collected: Collected, statement: stored.Receipt) -> stored.Receipt | None:
    """Return a worker's statement in the form in which a gate that adopted it stores it; None if no gate did."""
    ends: tuple[Contract, ...] = (asyncgate.COMPLETED, asyncgate.FAILED)
    contract = next((end for end in ends if end.type == statement.receipt_type), None)
    ready = collected.children(statement.receipt_id, asyncgate.RESULT_READY.type)
    if contract is None or not ready:
        return None
    told = collected.get(ready)[ready[0]]
    duties = [receipt for receipt in collected.of_task(statement.task_id) if receipt.receipt_type == "task.assigned"]
    body = restated.body_of(told)
    located = contract is asyncgate.FAILED or bool(
        find_location(body.get("artifacts") or [], body.get("delivery_proof")))
    parents = (duties[0].receipt_id,) if duties and located else ()
    mark = "located" if located and contract is asyncgate.COMPLETED else ""
    key = receipt_key(contract, statement.task_id, statement.sender, statement.lease_id, parents, mark)
    kept = replace(statement, receipt_key=key, parents=parents, asyncgate_instance=told.asyncgate_instance,
                   to_kind=told.from_kind, to_id=told.from_id)
    return replace(kept, hash=computed_hash(kept))


def require_undamaged(collected: Collected, skip: bool) -> list[str]:
    """Check a file's format and the hash of each receipt; raises Damaged.

    With `skip`, leave damaged receipts out instead; return the problems found.
    """
    damaged = [receipt.receipt_id for receipt in collected.unsound()]
    if damaged and not skip:
        more = f" and {len(damaged) - SHOWN} more" if len(damaged) > SHOWN else ""
        raise Damaged(f"the hash of {len(damaged)} receipts does not match their content: "
                      f"{', '.join(damaged[:SHOWN])}{more}.  --skip-damaged leaves them out")
    if collected.problems and not skip:
        more = f" (and {len(collected.problems) - 1} more)" if collected.problems[1:] else ""
        raise Damaged(f"the file is damaged: {collected.problems[0]}{more}; `asyncgate receipts verify` lists all "
                      "problems.  --skip-damaged uses the undamaged receipts")
    for receipt_id in damaged:
        collected.forget(receipt_id)
    return [*collected.problems, *(f"receipt {receipt_id} was left out: its hash does not match its content"
                                   for receipt_id in damaged)]


class Rebuild:
    """Writes the state of one tenant; with `skeletons`, the bodies of receipts stay in the ledger."""

    def __init__(self, backend: Backend, settings: Settings, tenant_id: str, collected: Collected, *, skeletons: bool,
                 count: Callable[[int], None]) -> None:
        self.backend, self.settings, self.tenant_id, self.collected = backend, settings, tenant_id, collected
        self.skeletons, self.count, self.tally = skeletons, count, RebuildTally()
        self.engine = Engine(backend, settings)
        if skeletons:
            self.engine.extend(Ledger(self.engine))

    async def run(self) -> RebuildTally:
        """Write tasks, then receipts with their obligations and schedules, then the lost task.result_ready."""
        late: list[tuple[str, stored.Receipt]] = []
        self.backend.ids.after(self.collected.last())       # where clocks differ, new ids could seem older
        for page in batches(self._stories(), TASKS_PER_BATCH):
            await self._write(partial(put_tasks, self.settings, [story for _, story in page]))
            self.tally.tasks += len(page)
            self.tally.held += sum(not story.ends for _, story in page)
            self.tally.proven += sum(story.steps for _, story in page)
            self.tally.resumed += sum(not story.ends and bool(story.accepted) for _, story in page)
            late += [(task_id, end) for task_id, story in page for end in story.unready]
            self.count(len(page))
        for receipts in batches(self.collected.all(), RECEIPTS_PER_BATCH):
            opened = [receipt for receipt in receipts if receipt.receipt_type in asyncgate.TERMINATES
                      and not self.collected.answered(receipt)]
            schedules = [stored.Schedule(receipt.schedule_id or "", receipt.to_kind, receipt.to_id, receipt.from_kind,
                                         receipt.from_id, receipt.receipt_id)   # its scheduler reports the rest later
                         for receipt in opened if receipt.receipt_type == asyncgate.SCHEDULED.type]
            await self._write(partial(self._put_receipts, receipts, opened, schedules))
            self.tally.receipts += len(receipts)
            self.tally.erased += sum(read_note(receipt.body) is not None for receipt in receipts)
            self.tally.obligations += len(opened)
            self.tally.schedules += len(schedules)
            self.count(len(receipts))
        for ends in batches(late, TASKS_PER_BATCH):
            await self._announce(ends)
        if (ledger := self.engine.find_extension(Ledger)) is not None:
            await ledger.sink.close()
        return self.tally

    def _stories(self) -> Iterator[tuple[str, restated.Story]]:
        """Yield the tasks that can be rebuilt; note each other task as a problem."""
        for task_id in self.collected.tasks():
            told = self.collected.of_task(task_id)
            for receipt_id in restated.list_overtaken(told, restated.list_ready(told)):
                self.collected.forget(receipt_id)       # an end that never happened
            story = restated.story_of(told)
            if story.duty is not None and read_note(story.duty.body) is not None:
                continue        # the task went with its owner
            if story.duty is None:
                self.tally.problems.append(f"task {task_id} has receipts, but no task.assigned: it was not rebuilt")
                continue
            if story.contradicts:
                self.tally.problems.append(f"task {task_id} has several different ends; the first one counts")
            yield task_id, story

    async def _write(self, decide: Callable[[Work], None]) -> None:
        try:
            await self.backend.transact(self.tenant_id, Needs(), decide)
        except Exception as error:      # whatever a database may raise
            raise RebuildFailed(f"the database refused a write: {error}") from error

    def _put_receipts(self, receipts: list[stored.Receipt], opened: list[stored.Receipt],
                      schedules: list[stored.Schedule], work: Work) -> None:
        for receipt in receipts if self.skeletons else list_as_erased(work, receipts):
            bare = {"body": ""} if self.skeletons else {}
            work.written[receipt.receipt_id] = replace(receipt, delivered_at=None, **bare)
        work.opened.update((receipt.receipt_id, receipt.to) for receipt in opened)
        for schedule in schedules:
            work.keep_record(schedule)

    async def _announce(self, ends: list[tuple[str, stored.Receipt]]) -> None:
        """Write the task.result_ready that were lost with the old gate: their owners may wait for them."""
        try:
            await self.engine.change(self.tenant_id, partial(announce, self.engine, ends), tasks=[id for id, _ in ends])
        except errors.GateError as error:
            raise RebuildFailed(f"the database refused a write: {error}") from error
        self.tally.told += len(ends)


def put_tasks(settings: Settings, stories: list[restated.Story], work: Work) -> None:
    """Add rebuilt tasks to the unit of work without checking the rules, with events that say where they come from."""
    for story in stories:
        task = restated.restate_task(story, settings, REBUILT)
        open_fences = 0 if story.ends else asyncgate.FENCES_SKIPPED
        work.add_task(replace(task, fence=task.fence + open_fences), needs_of(Raw(task.requirements.encode())))
        if (lease := restated.restate_lease(story)) is not None:
            work.set_lease(lease)
        if (progress := restated.restate_progress(story)) is not None and not story.ends:
            work.progress[task.task_id] = work.progressed[task.task_id] = progress
        if earlier := story.fence - len(story.accepted):    # the old gate was moved or rebuilt before
            work.add_event(task.task_id, "task.moved", fences_skipped=earlier)
        work.add_event(task.task_id, "task.rebuilt", fences_skipped=open_fences, unknown=restated.unknown_fields(story))


def announce(engine: Engine, ends: list[tuple[str, stored.Receipt]], work: Work) -> None:
    """Write the task.result_ready of ended tasks to their owners."""
    for task_id, end in ends:
        fields = {name: value for name, value in restated.body_of(end).items() if name not in WITHIN}
        if end.receipt_type not in (asyncgate.COMPLETED.type, asyncgate.FAILED.type):
            fields = {}
        if end.receipt_type == asyncgate.FAILED.type:
            fields = {name: fields[name] for name in fields if name.startswith("error") or name == "how_to_retrieve"}
        engine.announce_end(work, work.require_task(task_id), end, fields)
