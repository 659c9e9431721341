"""The history checker: check the observations of clients and the final state against the invariants I1 to I12.

A client records each call with its start, its end and its answer: a reply, a refusal, or nothing readable.  An
unanswered call may have been performed or not; both are allowed, but never a part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from msgspec import Struct, field

from asyncgate.parts.model import queries, stored, stored_journal, stored_limits, stored_output
from asyncgate.parts.model.content import sha256, to_canonical
from asyncgate.parts.model.families import count_children, read_family
from asyncgate.parts.model.ids import first_id
from asyncgate.parts.model.limiting import read_limits
from asyncgate.parts.model.unique import find_unique
from asyncgate.parts.model.walking import walk_rows

ENDING_RECEIPTS = {"succeeded": "task.completed", "failed": "task.failed", "canceled": "task.canceled"}
UNDER_LEASE = ("renew_lease", "start_task", "report_progress", "record_step", "append_output", "complete", "fail",
               "release_lease", "request_input")
ENDS_LEASE = {"complete", "fail", "release_lease", "request_input"}
# What succeeds under a live lease only, or ends it: a question or a step may be repeated after its lease.
SHOWS_LEASE = ("renew_lease", "start_task", "report_progress", "complete", "fail", "release_lease")
STORED: tuple[type[Struct], ...] = (stored.Task, stored.Lease, stored.Receipt, stored.Event, stored.Obligation,
                                    stored.Bulk, stored_journal.RecordedStep, stored.Progress, stored_limits.Hold,
                                    stored_output.OutputEntry)
READINGS = 20           # of all that is stored, until two in a row are the same
CLOCK_DIGIT = 1e-5      # of seconds, which answers round
CLOCKS_DIFFER = 0.005   # seconds, between what gates that share a database take for its time
TARGET = ("type", "capabilities", "worker", "whole_tenant")
QUESTION_ENDS = frozenset({"input.answered", "input.expired"})
OPENED_BY = {"task.assigned": frozenset(ENDING_RECEIPTS.values()),
             "schedule.created": frozenset({"schedule.deleted"}), "input.requested": QUESTION_ENDS}
JOINED = ("returned", "replaced")        # what a call is answered that has made no task
BULK_EVENTS = {"prioritize": "task.reprioritized", "rerun": "task.rerun"}


class Call(Struct, kw_only=True):
    """One request as its client saw it; `reply` and `error` are both None if no answer came."""

    tenant: str
    operation: str
    ask: dict[str, Any]
    started: float
    ended: float
    by: str = ""                            # the id of the worker or agent
    reply: dict[str, Any] | None = None
    error: str | None = None                # the code of a refusal

    @property
    def unknown(self) -> bool:
        """Whether the outcome is unknown."""
        return self.reply is None and self.error in (
            None, "database_unavailable", "internal_error", "receipt_ledger_unavailable")


class Stored(Struct):
    """The final state of a tenant."""

    tasks: dict[str, stored.Task] = field(default_factory=dict)
    leases: dict[str, stored.Lease] = field(default_factory=dict)          # by task
    receipts: dict[str, stored.Receipt] = field(default_factory=dict)      # oldest first
    events: list[stored.Event] = field(default_factory=list)
    obligations: set[str] = field(default_factory=set)
    bulks: dict[str, stored.Bulk] = field(default_factory=dict)
    steps: dict[str, dict[int, stored_journal.RecordedStep]] = field(default_factory=dict)      # by task and number
    progress: dict[str, stored.Progress] = field(default_factory=dict)     # by task
    holds: set[tuple[str, str, str]] = field(default_factory=set)       # name and key of a limit, and the task
    outputs: dict[str, list[stored_output.OutputEntry]] = field(default_factory=dict)       # by task, in their order

    def of(self, task_id: str, type: str) -> list[stored.Receipt]:
        """Return the receipts of one type of a task, oldest first."""
        return [receipt for receipt in self.chains.get(task_id, ()) if receipt.receipt_type == type]

    @property
    def chains(self) -> dict[str, list[stored.Receipt]]:
        """Return the receipts by task."""
        if not self._chains:
            for receipt in self.receipts.values():
                self._chains.setdefault(receipt.task_id, []).append(receipt)
        return self._chains

    _chains: dict[str, list[stored.Receipt]] = field(default_factory=dict)


async def read_stored(backend: Any) -> dict[str, Stored]:
    """Read everything in a backend, by tenant."""
    return {tenant_id: assemble(await read_checked_rows(backend, tenant_id)) for tenant_id in await backend.tenants()}


async def read_checked_rows(backend: Any, tenant_id: str) -> dict[type[Struct], list[Any]]:
    """Read everything of a tenant that is checked, by kind, as it was at one moment.

    Each page is a transaction of its own, and a gate may still be at work: so all is read until nothing has changed
    from one reading to the next.
    """
    rows, before = await _read_once(backend, tenant_id), None
    for _ in range(READINGS):
        if rows == before:
            return rows
        rows, before = await _read_once(backend, tenant_id), rows
    raise RuntimeError(f"somebody wrote to tenant {tenant_id} during each of {READINGS} readings: end its gates first")


async def _read_once(backend: Any, tenant_id: str) -> dict[type[Struct], list[Any]]:
    return {kind: [row async for row in walk_rows(backend, tenant_id, queries.Rows(kind))] for kind in STORED}


def assemble(rows: Mapping[type[Struct], list[Any]]) -> Stored:
    """Return the final state of a tenant with these rows."""
    return Stored(
        {row.task_id: row for row in rows[stored.Task]}, {row.task_id: row for row in rows[stored.Lease]},
        {row.receipt_id: row for row in rows[stored.Receipt]}, rows[stored.Event],
        {row.receipt_id for row in rows[stored.Obligation]},
        {row.bulk_id: row for row in rows[stored.Bulk]}, group_steps(rows[stored_journal.RecordedStep]),
        {row.task_id: row for row in rows[stored.Progress]},
        {(row.limit_name, row.limit_key, row.task_id) for row in rows[stored_limits.Hold]},
        group_entries(rows[stored_output.OutputEntry]))


def group_steps(rows: list[stored_journal.RecordedStep]) -> dict[str, dict[int, stored_journal.RecordedStep]]:
    """Return steps by task and number."""
    steps: dict[str, dict[int, stored_journal.RecordedStep]] = {}
    for row in rows:
        steps.setdefault(row.task_id, {})[int(row.step_id)] = row
    return steps


def group_entries(rows: list[stored_output.OutputEntry]) -> dict[str, list[stored_output.OutputEntry]]:
    """Return the entries of outputs by task."""
    entries: dict[str, list[stored_output.OutputEntry]] = {}
    for row in sorted(rows, key=lambda row: row.entry_id):
        entries.setdefault(row.task_id, []).append(row)
    return entries


def violations(calls: list[Call], final: dict[str, Stored], names: Set[str] = frozenset()) -> list[str]:
    """Describe each violation of an invariant by a history; of some invariants only, if they are named."""
    calls = sorted(calls, key=lambda call: call.ended)
    checks: tuple[Callable[[History], Iterator[str]], ...] = (
        History.i1_kept, History.i2_one_lease, History.i3_fences, History.i4_holders, History.i5_expired,
        History.i6_attempts, History.i7_terminal, History.i8_receipts, History.i9_obligations, History.i10_keys,
        History.i11_tenants, History.i12_readers, History.order_of_claims, History.reruns,
        History.pauses, History.limits, History.parks, History.steps, History.bulks, History.priorities,
        History.questions, History.answers, History.families, History.cascades, History.outputs,
        History.unique, History.creations)
    histories = [History(calls, final, tenant) for tenant in sorted({call.tenant for call in calls} | set(final))]
    return [f"{name}: {wrong}" for history in histories for check in checks
            if (name := check.__name__.partition("_")[0].upper()) in (names or {name}) for wrong in check(history)]


class Held(Struct):
    """One lease as clients saw it."""

    task_id: str
    lease_id: str
    worker: str
    fence: int
    granted: Call
    until: float                # as it was granted
    surely_until: float         # by the last answer, or if the unanswered renewals after it succeeded
    renewals: list[tuple[Call, float]]      # renewals that may have succeeded, and their ends
    prolonged: list[tuple[float, float]]    # when a starting gate prolonged it, and until when
    ended: float                # start of a call that may have ended it

    def maybe_until(self, call: Call) -> float:
        """Return the latest end of the lease, not counting this call."""
        changes = [(at, until, False) for at, until in self.prolonged if at < call.ended]
        changes += [(other.started, until, other.reply is not None and other.ended < call.started)
                    for other, until in self.renewals if other is not call and other.started < call.ended]
        latest = self.until
        for _, until, surely in sorted(changes):    # a renewal may also shorten a lease, and a gate prolong it again
            latest = until if surely else max(latest, until)
        return latest


class History:
    """The observations of one tenant's clients, and its final state."""

    def __init__(self, calls: list[Call], final: dict[str, Stored], tenant: str) -> None:
        self.calls = [call for call in calls if call.tenant == tenant]
        self.end, self.final, self.tenant = final.get(tenant, Stored()), final, tenant
        self.skipped: defaultdict[str, list[int]] = defaultdict(list)   # fences skipped by moves, oldest first
        for event in self.end.events:
            self.skipped[event.task_id] += filter(None, [stored.fences_skipped(event)])
        self.prolonged: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)     # by lease
        self.freed: defaultdict[str, list[float]] = defaultdict(list)   # when a task was released from a hold
        for event in self.end.events:
            if event.event_type == "task.hold_released":
                self.freed[event.task_id].append(event.created_at)
            if event.event_type == "lease.prolonged":
                told = json.loads(event.payload)
                self.prolonged[told["lease_id"]].append((event.created_at, seconds(told["expires_at"])))
        self.held: dict[str, Held] = {}
        self.by_task: defaultdict[str, list[Held]] = defaultdict(list)
        self.tried: defaultdict[tuple[str, str], list[float]] = defaultdict(list)   # times by verb and lease
        for held in self._grants():
            if self.held.setdefault(held.lease_id, held) is held:
                self.by_task[held.task_id].append(held)
        for call in self.calls:
            if call.reply is not None or call.unknown:
                self._ends(call)

    def _grants(self) -> Iterator[Held]:
        for call, offer in self.offers():
            until, prolonged = seconds(offer["expires_at"]), self.prolonged[offer["lease_id"]]
            surely = max([until, *(later for _, later in prolonged)])
            yield Held(offer["task_id"], offer["lease_id"], call.by, offer["fence"], call, until, surely, [],
                       prolonged, float("inf"))

    def _ends(self, call: Call) -> None:
        lease_id = call.ask.get("lease_id", "")
        self.tried[call.operation, lease_id].append(call.started)
        over = self.by_task[call.ask["task_id"]] if call.operation == "cancel_task" else []
        if held := self.held.get(lease_id):
            over = [held] if call.operation in ENDS_LEASE and not call.ask.get("keep_lease") else []
            if call.operation == "renew_lease":
                until = seconds(call.reply["expires_at"]) if call.reply else call.ended + call.ask["extend_by_seconds"]
                held.surely_until = max(held.surely_until, until if call.reply else 0.0)
                held.renewals.append((call, until))
        for lease in over:
            lease.ended = min(lease.ended, call.started)

    def offers(self) -> Iterator[tuple[Call, dict[str, Any]]]:
        """Yield every offer in the answers of claims."""
        return ((call, offer) for call in self.done("lease_next") for offer in said(call)["tasks"])

    def done(self, *operations: str) -> Iterator[Call]:
        """Yield the successful calls of some operations."""
        return (call for call in self.calls if call.operation in operations and call.reply is not None)

    # The invariants, in order.

    def i1_kept(self) -> Iterator[str]:
        """I1: acknowledged work is not lost."""
        for call in self.done("create_task", "rerun_task"):
            task_id = said(call)["task_id"]
            if task_id not in self.end.tasks:
                yield f"task {task_id} was acknowledged and is lost"
            elif not self.end.of(task_id, "task.assigned"):
                yield f"task {task_id} was acknowledged, but has no task.assigned"
        for call in self.done("complete", "fail", "cancel_task"):
            yield from self._kept(call)
        for call in self.done("renew_lease"):
            lease = self.end.leases.get(call.ask["task_id"])
            if lease is not None and lease.lease_id == call.ask["lease_id"] and (
                    lease.expires_at < seconds(said(call)["expires_at"]) - CLOCK_DIGIT):
                yield f"a renewal of lease {lease.lease_id} of task {lease.task_id} was acknowledged and is lost"

    def _kept(self, call: Call) -> Iterator[str]:
        task, reply = self.end.tasks.get(call.ask["task_id"]), said(call)
        wanted = reply.get("status")
        if task is None:
            yield f"{call.operation} of task {call.ask['task_id']} was acknowledged, and the task is lost"
        elif wanted in ENDING_RECEIPTS and reply.get("ok") and task.status != wanted:
            yield f"task {task.task_id} was acknowledged as {wanted} and is {task.status}"
        elif reply.get("requeued") and not any(r.lease_id == call.ask["lease_id"]
                                               for r in self.end.of(task.task_id, "task.failed")):
            yield f"a failure of task {task.task_id} was acknowledged and left no receipt"

    def i2_one_lease(self) -> Iterator[str]:
        """I2: a lease is granted only after the previous one has ended."""
        for task_id, leases in self.by_task.items():
            for old, new in pairwise(sorted(leases, key=lambda held: held.fence)):
                if new.granted.ended < min(old.surely_until, old.ended):
                    yield f"task {task_id} was leased to {new.worker} while {old.worker} held it"
        for task in self.end.tasks.values():
            lease = self.end.leases.get(task.task_id)
            live = lease is not None and lease.ending == "live"
            if live != (task.status in ("leased", "running")):
                yield f"task {task.task_id} is {task.status} and its lease is {'live' if live else 'not live'}"

    def i3_fences(self) -> Iterator[str]:
        """I3: each lease has the next fence, except for fences skipped by a move to another gate."""
        fences: dict[tuple[str, int], str] = {}
        for _, offer in self.offers():
            first = fences.setdefault((offer["task_id"], offer["fence"]), offer["lease_id"])
            if first != offer["lease_id"]:
                yield f"two leases of task {offer['task_id']} have fence {offer['fence']}"
        for task in self.end.tasks.values():
            granted = [body(receipt)["fence"] for receipt in self.end.of(task.task_id, "task.accepted")]
            if not in_turn([0, *granted, task.fence + 1], self.skipped[task.task_id]):
                yield f"task {task.task_id} has fence {task.fence}, but its leases had {granted}"

    def i4_holders(self) -> Iterator[str]:
        """I4: only the holder of the lease may act."""
        owners = {receipt.lease_id: (receipt.from_id, receipt.task_id)
                  for receipt in self.end.receipts.values() if receipt.receipt_type == "task.accepted"}
        for call in self.done(*UNDER_LEASE):
            if owners.get(call.ask["lease_id"]) != (call.by, call.ask["task_id"]):
                yield f"{call.operation} of task {call.ask['task_id']} was granted to {call.by}, who did not hold it"
        for task_id in self.end.tasks:
            for receipt in [*self.end.of(task_id, "task.completed")[:1], *self.end.of(task_id, "task.failed"),
                            *self.end.of(task_id, "input.requested")]:
                if owners.get(receipt.lease_id) != (receipt.from_id, task_id) and not self._is_given_up(receipt):
                    yield f"task {task_id} has a {receipt.receipt_type} by {receipt.from_id}, who did not hold it"

    def _is_given_up(self, failed: stored.Receipt) -> bool:
        """Whether the gate let a task fail because a question of it was not answered in time."""
        return (failed.receipt_type, failed.from_kind, failed.lease_id) == ("task.failed", "asyncgate", None) and any(
            body(receipt).get("reason") == "expired" for receipt in self.end.of(failed.task_id, "input.expired"))

    def i5_expired(self) -> Iterator[str]:
        """I5: an expired or ended lease cannot do anything."""
        for call in self.done(*UNDER_LEASE):
            held = self.held.get(call.ask["lease_id"])
            before = self.tried[call.operation, call.ask["lease_id"]]
            if call.operation in ENDS_LEASE and min(before) < call.started:
                continue        # a replay of a call that may have succeeded in time is allowed at any time
            if held is not None and call.started > held.maybe_until(call):
                yield f"{call.operation} of task {held.task_id} was granted to {call.by} after its lease had expired"
        for task_id in self.end.tasks:
            over = {receipt.lease_id: receipt.receipt_id for receipt in self.end.of(task_id, "lease.expired")}
            for receipt in self.end.of(task_id, "task.completed") + self.end.of(task_id, "task.failed"):
                if over.get(receipt.lease_id, receipt.receipt_id) < receipt.receipt_id:
                    yield f"task {task_id} was ended under lease {receipt.lease_id}, which had expired"

    def i6_attempts(self) -> Iterator[str]:
        """I6: attempts count the retried failures."""
        for task in self.end.tasks.values():
            retried = sum(body(receipt)["requeued"] for receipt in self.end.of(task.task_id, "task.failed"))
            if task.attempt != retried:
                yield f"task {task.task_id} has attempt {task.attempt} after {retried} retried failures"

    def i7_terminal(self) -> Iterator[str]:
        """I7: a terminal status never changes."""
        ended: dict[str, tuple[float, str]] = {}
        for call in self.done("get_task", "complete", "fail", "cancel_task"):
            task_id, status = call.ask["task_id"], said(call).get("status")
            first = ended.get(task_id)
            if first and first[0] < call.started and call.operation == "get_task" and status != first[1]:
                yield f"task {task_id} was {first[1]} and later {status}"
            if status in ENDING_RECEIPTS:
                ended.setdefault(task_id, (call.ended, status))
        for task_id, (_, status) in ended.items():
            if task_id in self.end.tasks and self.end.tasks[task_id].status != status:
                yield f"task {task_id} was {status} and is {self.end.tasks[task_id].status}"

    def i8_receipts(self) -> Iterator[str]:
        """I8: each step wrote exactly its receipts."""
        for task in self.end.tasks.values():
            for what, count, wanted in self._steps(task):
                if count != wanted:
                    yield f"task {task.task_id} ({task.status}) has {count} {what}, not {wanted}"

        for task in self.end.tasks.values():
            yield from self._escalations(task)

    def _escalations(self, task: stored.Task) -> Iterator[str]:
        """Check that each escalation belongs to one lost or finally failed lease, and answers the duty."""
        causes = {receipt.lease_id for receipt in self.end.of(task.task_id, "lease.expired")}
        causes |= {receipt.lease_id for receipt in self.end.of(task.task_id, "task.failed")
                   if receipt.parents == (task.duty,)}
        escalated = self.end.of(task.task_id, "task.escalated")
        for lease_id, count in Counter(receipt.lease_id for receipt in escalated).items():
            if count > 1 or lease_id not in causes:
                yield f"task {task.task_id} was escalated {count} times over lease {lease_id}"
        yield from (f"the escalation {receipt.receipt_id} does not name the duty of task {task.task_id}"
                    for receipt in escalated if receipt.parents != (task.duty,))

    def _steps(self, task: stored.Task) -> Iterator[tuple[str, int, int]]:
        count = Counter(receipt.receipt_type for receipt in self.end.chains.get(task.task_id, ()))
        lease = self.end.leases.get(task.task_id)
        completed, failed = self.end.of(task.task_id, "task.completed"), self.end.of(task.task_id, "task.failed")
        located_later = len(completed) == 2 and not completed[0].parents and completed[1].parents == (task.duty,)
        final = sum(not body(receipt)["requeued"] for receipt in failed)
        yield "task.assigned", count["task.assigned"], 1
        leased = task.fence - sum(self.skipped[task.task_id])
        yield "task.accepted", count["task.accepted"], leased
        yield "task.completed", len(completed) - located_later, int(task.status == "succeeded")
        yield "terminal task.failed", final, int(task.status == "failed")
        yield "task.canceled", count["task.canceled"], int(task.status == "canceled")
        yield "task.result_ready", count["task.result_ready"], len(completed) + final + count["task.canceled"]
        open_ended = lease is not None and lease.ending in ("live", "canceled")
        asked = sum(body(receipt)["lease_ended"] for receipt in self.end.of(task.task_id, "input.requested"))
        given_up = sum(receipt.from_kind == "asyncgate" and receipt.lease_id is None for receipt in failed)
        ends = len(completed) - located_later + len(failed) - given_up + count["lease.expired"] + asked + open_ended
        yield "ends of leases", ends, leased

    def i9_obligations(self) -> Iterator[str]:
        """I9: open obligations are those created and not discharged."""
        created = {receipt.receipt_id: receipt.receipt_type for receipt in self.end.receipts.values()
                   if receipt.receipt_type in OPENED_BY}
        discharged = {parent for receipt in self.end.receipts.values() for parent in receipt.parents
                      if receipt.receipt_type in OPENED_BY.get(created.get(parent, ""), ())}
        if self.end.obligations != created.keys() - discharged:
            yield (f"{len(created)} obligations were created and {len(discharged)} discharged, "
                   f"but {len(self.end.obligations)} are open")
        for task in self.end.tasks.values():
            if bool(task.owed) != (task.duty in self.end.obligations):
                yield f"task {task.task_id} has owed: {bool(task.owed)}, but the index of obligations differs"

    def i10_keys(self) -> Iterator[str]:
        """I10: one task per creator and idempotency key."""
        made: dict[tuple[str, str], str] = {}
        for call in self.done("create_task", "rerun_task"):
            if (key := call.ask.get("idempotency_key")) and said(call).get("unique") not in JOINED:
                first = made.setdefault((call.by, key), said(call)["task_id"])
                if first != said(call)["task_id"]:
                    yield f"key {key} of {call.by} made tasks {first} and {said(call)['task_id']}"
        keys = Counter((task.owner_kind, task.owner_id, task.idempotency_key)
                       for task in self.end.tasks.values() if task.idempotency_key)
        yield from (f"{count} tasks of {key[1]} have the key {key[2]}" for key, count in keys.items() if count > 1)

    def creations(self) -> Iterator[str]:
        """No task was created that nobody asked for; what bulks run again, they tell themselves."""
        if not self.calls:
            return      # only what is stored is judged, such as that of a copy
        calls = [call for call in self.calls if call.operation in ("create_task", "rerun_task")
                 and (call.reply is not None or call.unknown)]
        keys = Counter(call.ask.get("idempotency_key") or "" for call in calls)
        keyless = [task.task_id for task in self.end.tasks.values()
                   if not task.idempotency_key and "rerun_of" not in json.loads(task.terms or "{}")]
        yield from (f"task {task.task_id} has the key {task.idempotency_key}, which nobody gave"
                    for task in self.end.tasks.values() if task.idempotency_key and task.idempotency_key not in keys)
        if len(keyless) > keys[""]:
            yield f"{len(keyless)} tasks have no key, such as {keyless[-1]}, and {keys['']} were asked for"

    def i11_tenants(self) -> Iterator[str]:
        """I11: no answer or receipt refers to another tenant."""
        foreign = {id: name for name, other in self.final.items() if name != self.tenant
                   for id in (*other.tasks, *other.receipts)}
        for call in self.calls:
            for id in list_texts(call.reply):
                if id in foreign:
                    yield f"{call.operation} showed {id}, which belongs to tenant {foreign[id]}"
        for receipt in self.end.receipts.values():
            for id in (receipt.task_id, *receipt.parents):
                if id in foreign:
                    yield f"receipt {receipt.receipt_id} names {id}, which belongs to tenant {foreign[id]}"

    def i12_readers(self) -> Iterator[str]:
        """I12: a reader that follows the cursor sees each receipt exactly once."""
        seen: defaultdict[str, list[str]] = defaultdict(list)
        for call in self.done("list_receipts"):
            seen[call.by] += [receipt["receipt_id"] for receipt in said(call)["receipts"]]
        for reader, ids in seen.items():
            inbox = [id for id, receipt in self.end.receipts.items() if receipt.to_id == reader]
            if twice := [id for id, count in Counter(ids).items() if count > 1]:
                yield f"{reader} saw receipt {twice[0]} more than once"
            elif ids and ids != inbox[:len(ids)]:
                missed = set(inbox[:inbox.index(ids[-1])] if ids[-1] in inbox else inbox) - set(ids)
                yield f"{reader} missed {len(missed)} receipts, or saw them out of order"

    def order_of_claims(self) -> Iterator[str]:
        """Tasks are claimed by priority, then by age; left out are those with limits, which take turns.

        So is one that got another priority meanwhile.
        """
        changed = {event.task_id for event in self.end.events if event.event_type == "task.reprioritized"}
        for call in self.done("lease_next"):
            known = [self.end.tasks[offer["task_id"]] for offer in said(call)["tasks"]
                     if offer["task_id"] in self.end.tasks.keys() - changed]
            known = [task for task in known if task.limits is None]
            if known != sorted(known, key=lambda task: (-task.priority, task.task_id)):
                listing = ", ".join([f"{task.task_id} of priority {task.priority}" for task in known])
                yield f"a claim of {call.by} got its tasks out of order: {listing}"

    def reruns(self) -> Iterator[str]:
        """A task that runs another one again is linked to its end, and the history of that one says so, once."""
        noted = Counter((event.task_id, json.loads(event.payload)["rerun_as"]) for event in self.end.events
                        if event.event_type == "task.rerun")
        made = {(origin, task.task_id): task for task in self.end.tasks.values()
                if (origin := json.loads(task.terms or "{}").get("rerun_of"))}
        for (origin, task_id), task in made.items():
            first, ends = self.end.tasks.get(origin), self.end.chains.get(origin, ())
            linked = {receipt.parents for receipt in self.end.of(task_id, "task.assigned")}
            payload = task.payload if not self.end.of(task_id, "task.amended") or first is None else first.payload
            if first is None or (first.owner, first.type, first.payload) != (task.owner, task.type, payload):
                yield f"task {task_id} does not have the contract of task {origin}, which it runs again"
            elif not any({(receipt.receipt_id,)} == linked and receipt.receipt_type == ENDING_RECEIPTS.get(first.status)
                         for receipt in ends):
                yield f"task {task_id} is not linked to the end of task {origin}, which it runs again"
        yield from (f"task {origin} was noted {noted[origin, task_id]} times as run again by task {task_id}"
                    for origin, task_id in made.keys() | noted.keys()
                    if noted[origin, task_id] != 1 or (origin, task_id) not in made)
        for call in self.done("rerun_task"):
            if (call.ask["task_id"], said(call)["task_id"]) not in made and said(call).get("unique") not in JOINED:
                yield f"a rerun of task {call.ask['task_id']} was acknowledged and is lost"

    def pauses(self) -> Iterator[str]:
        """While something is surely paused, nobody gets a lease of it."""
        changes = [call for call in self.calls if call.operation in ("pause_work", "drain_work", "resume_work")
                   and (call.reply is not None or call.unknown)]
        granted = [(receipt, self.end.tasks[receipt.task_id]) for receipt in self.end.receipts.values()
                   if receipt.receipt_type == "task.accepted" and receipt.task_id in self.end.tasks]
        for call in changes:
            if call.reply is None or call.operation == "resume_work":
                continue
            until = min([other.started for other in changes if other is not call and other.ended > call.started
                         and target_of(other) == target_of(call)], default=float("inf"))
            if call.reply["until"] is not None:
                until = min(until, seconds(call.reply["until"]))
            for receipt, task in granted:
                if call.ended < receipt.created_at < until and is_meant(call.ask, task, receipt.from_id):
                    yield f"task {task.task_id} was leased to {receipt.from_id} while {target_of(call)} was paused"

    def limits(self) -> Iterator[str]:
        """No more leases live at once than a limit allows, and what counts at the end is what is leased."""
        live = {(*pair, task.task_id) for task in self.end.tasks.values() if task.status in ("leased", "running")
                for pair in read_limits(task.limits)}
        yield from (f"task {task_id} counts against limit {name} ({key}) and has no lease, or the other way round"
                    for name, key, task_id in sorted(live ^ self.end.holds))
        begun: dict[tuple[str, Any], float] = {}    # a claim, first tried: that may have granted what a repeat shows
        for call in (call for call in self.calls if call.operation == "lease_next"):
            place = call.by, call.ask.get("claim_id", id(call))
            begun[place] = min(call.started, begun.get(place, call.started))
        under: defaultdict[str, list[Held]] = defaultdict(list)
        for held in self.held.values():
            for name, _ in read_limits(self.end.tasks[held.task_id].limits) if held.task_id in self.end.tasks else ():
                under[name].append(held)
        for name, rules, since, until in self._limits_in_force():
            for held in (leases := under[name]):
                first = begun[held.granted.by, held.granted.ask.get("claim_id", id(held.granted))]
                if since <= first and held.granted.ended <= until:
                    yield from self._find_excess(name, rules, held, leases, first)

    def _limits_in_force(self) -> Iterator[tuple[str, dict[str, Any], float, float]]:
        """Yield a limit, what it allows, since when that surely holds, and until when."""
        changes = [call for call in self.calls
                   if call.operation in ("set_limit", "remove_limit") and (call.reply is not None or call.unknown)]
        for call in changes:
            others = [other for other in changes if other is not call and other.ask["name"] == call.ask["name"]]
            beside = any(other.started < call.ended and (other.unknown or other.ended > call.started)
                         for other in others)
            if call.operation == "set_limit" and call.reply is not None and not beside:
                later = (other.started for other in others if other.started >= call.ended)
                yield call.ask["name"], call.ask, call.ended, min(later, default=float("inf"))

    def _find_excess(self, name: str, rules: dict[str, Any], held: Held, leases: list[Held],
                     first: float) -> Iterator[str]:
        """Find that a lease was granted, at the first try or later, while others had taken all that a limit allows."""
        key = dict(read_limits(self.end.tasks[held.task_id].limits))[name]
        beside = [other for other in leases if other.granted is held.granted or (
            other.granted.ended <= first and self._find_sure_end(other) > held.granted.ended)]
        alike = [other for other in beside if (name, key) in read_limits(self.end.tasks[other.task_id].limits)]
        own = (rules.get("overrides") or {}).get(key, {})
        per_key = own.get("concurrency_per_key", rules.get("concurrency_per_key"))
        for most, number in ((rules.get("concurrency_total"), len(beside)), (per_key, len(alike))):
            if most is not None and number > most:
                yield f"task {held.task_id} was leased beside {number - 1} others; limit {name} ({key}) allows {most}"

    def _find_sure_end(self, held: Held) -> float:
        """Return until when a lease surely lived."""
        lease = self.end.leases.get(held.task_id)
        if lease is not None and (lease.lease_id, lease.ending) == (held.lease_id, "live"):
            return float("inf")
        return min(self._last_use.get(held.lease_id, held.granted.ended), held.ended)

    @cached_property
    def _last_use(self) -> dict[str, float]:
        """The begin of the last call that shows a lease to live, by lease; whoever looks for each lease needs it."""
        used: dict[str, float] = {}
        for call in self.done(*SHOWS_LEASE):
            used[call.ask["lease_id"]] = max(call.started, used.get(call.ask["lease_id"], 0.0))
        return used

    def parks(self) -> Iterator[str]:
        """A parked task is leased to nobody before its time, an answer or a release from a hold; parks are counted."""
        for task in self.end.tasks.values():
            until, parked, count, freed = 0.0, 0.0, 0, self.freed[task.task_id]
            for receipt in self.end.chains.get(task.task_id, ()):
                told = body(receipt) if receipt.receipt_type == "lease.expired" else {}
                until = 0.0 if receipt.receipt_type in QUESTION_ENDS else until
                early = receipt.receipt_type == "task.accepted" and receipt.created_at < until - CLOCKS_DIFFER
                if early and not any(parked <= moment <= receipt.created_at for moment in freed):
                    yield f"task {task.task_id} was parked, and leased {until - receipt.created_at:.3f} s too early"
                if told.get("reason") == "parked":
                    waits = "until_children" in told or "parked_until" not in told      # its children may end before
                    parked, until = receipt.created_at, 0.0 if waits else seconds(told["parked_until"])
                    count = 1 if any(moment <= parked for moment in freed) and told["parks"] == 1 else count + 1
                    if told["parks"] != count:
                        yield f"task {task.task_id} was parked {count} times, and its receipt says {told['parks']}"

    def steps(self) -> Iterator[str]:
        """A step that was acknowledged is kept with its first value, once; a completion has the digest of all."""
        for call in self.done("record_step"):
            kept = self.end.steps.get(call.ask["task_id"], {}).get(call.ask["seq"])
            value = said(call)["value"] if said(call).get("replayed") else call.ask["value"]
            if kept is None or (kept.name, json.loads(kept.value)) != (call.ask["name"], value):
                yield f"step {call.ask['seq']} of task {call.ask['task_id']} was acknowledged, and is not kept so"
        for task_id, steps in self.end.steps.items():
            digest = None
            for place, step in enumerate(sorted(steps.values(), key=lambda step: step.place), 1):
                digest = sha256(digest, int(step.step_id), step.name, hashlib.sha256(step.value.encode()).hexdigest())
                if (step.place, step.digest) != (place, digest):
                    yield f"step {int(step.step_id)} of task {task_id} is not the one in place {place}"
            for told in [body(receipt) for receipt in self.end.of(task_id, "task.completed")][:1]:
                if (told.get("steps"), told.get("steps_sha256")) != (len(steps), digest):
                    yield f"task {task_id} has {len(steps)} steps, and its completion tells of others"

    def bulks(self) -> Iterator[str]:
        """Each step of a bulk left its receipt or its event, once, and what was acknowledged is kept."""
        done: Counter[tuple[str, str]] = Counter()
        for bulk in self.end.bulks.values():
            done[bulk.action, bulk.by_id] += bulk.done
        for (action, by), count in done.items():
            marks = self._marks(action, by)
            if len(marks) != count:
                yield f"the bulks {action} of {by} did {count} tasks, and left {len(marks)} marks"
            if action == "rerun" and (twice := [task_id for task_id, times in Counter(marks).items() if times > 1]):
                yield f"bulks of {by} ran task {twice[0]} again more than once"
        seen: dict[str, dict[str, Any]] = {}
        for call in self.done("run_bulk", "get_bulk"):
            told, kept = said(call), self.end.bulks.get(said(call)["bulk_id"])
            before = seen.setdefault(told["bulk_id"], told)
            if kept is None or told["done"] > kept.done or (told["ended"] and told["done"] != kept.done):
                yield f"bulk {told['bulk_id']} was acknowledged to have done {told['done']}, and that is lost"
            elif before["ended"] and told != before:
                yield f"bulk {kept.bulk_id} had ended, and went on"
            seen[told["bulk_id"]] = told

    def _marks(self, action: str, by: str) -> list[str]:
        """Return the tasks to which somebody did something, by what was written down."""
        if action == "cancel":
            return [receipt.task_id for receipt in self.end.receipts.values()
                    if receipt.receipt_type == "task.canceled" and receipt.from_id == by]
        if action == "release":     # a single release does not say whose it was
            return [event.task_id for event in self.end.events if event.event_type == "task.hold_released"]
        return [event.task_id for event in self.end.events if event.event_type == BULK_EVENTS[action]
                and json.loads(event.payload)["by"]["id"] == by]

    def priorities(self) -> Iterator[str]:
        """A priority is the one that was asked for, and each change of it is told."""
        now: dict[str, int] = {}
        for call in self.done("create_task"):
            if said(call).get("unique") not in JOINED:
                now.setdefault(said(call)["task_id"], call.ask.get("priority") or 0)
        for event in sorted(self.end.events, key=lambda event: event.event_id):
            if event.event_type == "task.reprioritized":
                told = json.loads(event.payload)
                if now.get(event.task_id, told["before"]) != told["before"]:
                    yield f"task {event.task_id} had priority {now[event.task_id]}, and its history says {told}"
                now[event.task_id] = told["priority"]
        for task_id, priority in now.items():
            if task_id in self.end.tasks and self.end.tasks[task_id].priority != priority:
                yield f"task {task_id} has priority {self.end.tasks[task_id].priority}, not {priority}"


    def questions(self) -> Iterator[str]:
        """A question ends once, after it was asked; its task waits meanwhile, and leaves none open at its end."""
        for task in self.end.tasks.values():
            asked = self.end.of(task.task_id, "input.requested")
            ends = [end for type in sorted(QUESTION_ENDS) for end in self.end.of(task.task_id, type)]
            for request in asked:
                mine = [end for end in ends if request.receipt_id in end.parents]
                if len(mine) > 1:
                    yield f"question {request.receipt_id} of task {task.task_id} has {len(mine)} ends"
                elif mine and mine[0].receipt_id < request.receipt_id:
                    yield f"question {request.receipt_id} of task {task.task_id} ended before it was asked"
                yield from self._leased_while_open(task, request, mine)
            if len({body(request)["key"] for request in asked}) < len(asked):
                yield f"task {task.task_id} has asked two questions under one key"
            ids = {request.receipt_id for request in asked}
            yield from (f"{end.receipt_type} {end.receipt_id} answers no question of task {task.task_id}"
                        for end in ends if ids.isdisjoint(end.parents))
            is_open = not ids <= {parent for end in ends for parent in end.parents}
            if task.held == "input_required" and not is_open:
                yield f"task {task.task_id} waits for an answer, and has no open question"
            elif is_open and task.status in ENDING_RECEIPTS:
                yield f"task {task.task_id} is {task.status}, and has an open question"

    def _leased_while_open(self, task: stored.Task, request: stored.Receipt,
                           ends: list[stored.Receipt]) -> Iterator[str]:
        """Check that nobody got the task while its question was open, unless it was released from another hold."""
        until = ends[0].receipt_id if ends else "~"     # which sorts behind all ids
        for accepted in self.end.of(task.task_id, "task.accepted"):
            if request.receipt_id < accepted.receipt_id < until and not self.freed[task.task_id]:
                yield f"task {task.task_id} was leased to {accepted.from_id} while a question of it was open"

    def answers(self) -> Iterator[str]:
        """Who answers was asked, or says for whom; what was acknowledged is kept, and is what the worker gets."""
        given: dict[tuple[str, str], tuple[str, str]] = {}
        for answer in (receipt for receipt in self.end.receipts.values() if receipt.receipt_type == "input.answered"):
            request, terms = self.end.receipts.get(answer.parents[0] if answer.parents else ""), body(answer)
            if request is None:
                continue        # of which `questions` tells
            given[request.task_id, terms["key"]] = answer.receipt_id, terms["action"]
            place = terms.get("in_place_of") or {"kind": answer.from_kind, "id": answer.from_id}
            if (place["kind"], place["id"]) != (request.to_kind, request.to_id):
                yield f"question {request.receipt_id} was answered by {answer.from_id}, who was not asked"
            if (answer.from_kind, answer.from_id) == (request.from_kind, request.from_id):
                yield f"question {request.receipt_id} was answered by the worker that asked it"
        for call in self.done("request_input"):
            if said(call)["receipt_id"] not in self.end.receipts:
                yield f"a question of task {call.ask['task_id']} was acknowledged and is lost"
        for call in self.done("answer_input"):
            if given.get((call.ask["task_id"], call.ask["key"])) != (said(call)["receipt_id"], said(call)["action"]):
                yield f"an answer to {call.ask['key']} of task {call.ask['task_id']} was acknowledged and is lost"
        for _, offer in self.offers():
            for key, outcome in (offer.get("inputs") or {}).items():
                if outcome["action"] != "expired" and given.get((offer["task_id"], key)) != (
                        outcome["receipt_id"], outcome["action"]):
                    yield f"an offer of task {offer['task_id']} has an answer to {key} that nobody gave"

    def cascades(self) -> Iterator[str]:
        """A task that was canceled with its descendants leaves none of them open, though the call was cut off."""
        below: defaultdict[str, list[stored.Task]] = defaultdict(list)
        for task in self.end.tasks.values():
            below[task.parent_task_id or ""].append(task)
        plain = {call.ask["task_id"] for call in self.calls
                 if call.operation == "cancel_task" and not call.ask.get("cascade")}
        for call in self.calls:
            task_id = call.ask.get("task_id", "")
            if call.operation != "cancel_task" or not call.ask.get("cascade") or (call.reply is None and (
                    task_id in plain or not any(receipt.from_id == call.by
                                                for receipt in self.end.of(task_id, "task.canceled")))):
                continue        # an unanswered one that was not carried out
            left = list(below[task_id])
            while left:
                task = left.pop()
                left += below[task.task_id]
                if task.status not in ENDING_RECEIPTS:
                    yield f"task {task_id} was canceled with its descendants, and {task.task_id} below it is open"

    def outputs(self) -> Iterator[str]:
        """An output is stored in one order without gaps, has what was acknowledged once, and its end tells its hash."""
        for task_id, entries in self.end.outputs.items():
            known, chunks, digest = self.end.progress.get(task_id), 0, None
            for number, entry in enumerate(entries, 1):
                if int(entry.entry_id) != number:
                    yield f"entry {entry.entry_id} of task {task_id} stands at place {number}"
                if entry.kind in ("chunk", "log"):
                    chunks += 1
                    digest = sha256(digest, number, hashlib.sha256(entry.content.encode()).hexdigest())
            if any(new.fence < old.fence for old, new in pairwise(entries)):
                yield f"the output of task {task_id} has an entry of a lease behind one of a later lease"
            if known is None or (known.outputs, known.chunks, known.output_sha256) != (
                    len(entries), chunks, digest):
                yield f"the output of task {task_id} is not what the task says of it"
            for receipt in self.end.of(task_id, "task.completed")[:1]:
                if chunks and body(receipt).get("output_sha256") != digest:
                    yield f"the completion of task {task_id} does not tell the hash of its output"
        for call in self.done("append_output"):
            yield from self._appended(call)

    def _appended(self, call: Call) -> Iterator[str]:
        """Check that acknowledged chunks are stored once, one behind the other."""
        stored_chunks = [json.loads(entry.content) for entry in self.end.outputs.get(call.ask["task_id"], ())
                         if entry.kind in ("chunk", "log")]
        first = said(call)["chunks"] - len(call.ask["chunks"])
        if stored_chunks[first:first + len(call.ask["chunks"])] != call.ask["chunks"]:
            yield f"chunks of task {call.ask['task_id']} were acknowledged and are not where the answer says"
        elif any(stored_chunks.count(chunk) > 1 for chunk in call.ask["chunks"]):
            yield f"chunks of task {call.ask['task_id']} are stored twice"

    def families(self) -> Iterator[str]:
        """A parent knows how many of its children have ended and how, and does not wait for what has come."""
        children: defaultdict[str, list[stored.Task]] = defaultdict(list)
        for task in self.end.tasks.values():
            if task.parent_task_id is not None:
                children[task.parent_task_id].append(task)
        for task_id, family in children.items():
            if (parent := self.end.tasks.get(task_id)) is None:
                continue        # it was pruned
            known = read_family(self.end.progress.get(task_id))
            counts = Counter(child.status if child.status in ENDING_RECEIPTS else "open" for child in family)
            if known is None or any(number != counts[name] for name, number in count_children(known).items()):
                yield f"task {task_id} counts its children as {known}, and they are {dict(counts)}"
            elif parent.held == stored.CHILDREN_OPEN and known.has_come(known.until):
                yield f"task {task_id} waits for its children, and what it waits for has come"
            yield from self._leased_too_early(task_id, family)

    def _leased_too_early(self, task_id: str, family: list[stored.Task]) -> Iterator[str]:
        """Check that a parent which waits for all children without a time was not leased while one was open."""
        ends = {child.task_id: next((receipt.receipt_id for receipt in self.end.of(child.task_id, "task.result_ready")),
                                    "~") for child in family}
        begun = {child.task_id: receipt.receipt_id for child in family
                 for receipt in self.end.of(child.task_id, "task.assigned")}
        released = [event.event_id for event in self.end.events
                    if (event.task_id, event.event_type) == (task_id, "task.hold_released")]
        released += [receipt.receipt_id for type in QUESTION_ENDS for receipt in self.end.of(task_id, type)]
        for park in self.end.of(task_id, "lease.expired"):
            told = body(park)
            if told.get("until_children") != "all" or "parked_until" in told:
                continue
            after = next((receipt.receipt_id for receipt in self.end.of(task_id, "task.accepted")
                          if receipt.receipt_id > park.receipt_id), "")
            early = [child for child, end in ends.items() if begun.get(child, "~") < park.receipt_id < after < end]
            if early and not any(park.receipt_id < moment < after for moment in released):
                yield f"task {task_id} was leased while its child {early[0]} was open, for whose end it waited"

    def unique(self) -> Iterator[str]:
        """No key of unique work is held twice; what supersedes, replaces and waits says so, and is what was said."""
        keys: defaultdict[tuple[str, str, str], list[stored.Task]] = defaultdict(list)
        for task in self.end.tasks.values():
            if (unique := find_unique(task)) is not None:
                keys[task.owner_id, task.type, unique.key].append(task)
            yield from self._amendments(task)
        for (owner, _, key), tasks in keys.items():
            held = list[stored.Task]()      # those that may hold it when the next one begins
            for task in sorted(tasks, key=self._begin_of):
                begun = self._begin_of(task)
                held = [other for other in held if self._holds_until(other) > begun
                        and not self._gives_way(other, task)]
                for other in held:
                    if not self._may_begin_beside(task, other):
                        yield f"key {key} of {owner} was held by task {other.task_id} when task {task.task_id} began"
                # Whose time was not over when it had ended: it goes to the task that took the key over.
                held = [*(other for other in held if self._end_of(other) > begun), task]
            yield from self._superseded(owner, key, tasks)

    def _moment(self, task: stored.Task, *types: str) -> str:
        """Return the first receipt of some types; of none what sorts behind all ids."""
        return min([receipt.receipt_id for type in types for receipt in self.end.of(task.task_id, type)], default="~")

    def _begin_of(self, task: stored.Task) -> str:
        """Return the id from which on a task was there."""
        return first_id(task.created_at) if self._was_sent(task) else self._moment(task, "task.assigned")

    def _was_sent(self, task: stored.Task) -> bool:
        """Whether a strict gate has sent the first receipt of a task some time before the task was there."""
        return any(receipt.created_at < task.created_at for receipt in self.end.of(task.task_id, "task.assigned"))

    def _gives_way(self, task: stored.Task, other: stored.Task) -> bool:
        """Whether a task gave its key up in time for another one, the receipt of which is older: in the same batch."""
        until = self.end.receipts.get(self._holds_until(task))
        return self._was_sent(other) and until is not None and until.created_at <= other.created_at

    def _end_of(self, task: stored.Task) -> str:
        """Return the receipt that ended a task first; of an open one what sorts behind all ids."""
        ends = (receipt for type in ENDING_RECEIPTS.values() for receipt in self.end.of(task.task_id, type))
        return min([receipt.receipt_id for receipt in ends if not body(receipt).get("requeued")], default="~")

    def _holds_until(self, task: stored.Task) -> str:
        """Return the id up to which a task holds its key."""
        unique, end = find_unique(task), self._end_of(task)
        assert unique is not None
        if unique.lasts == "queued":
            return min(end, self._moment(task, "task.accepted"))
        if unique.lasts == "unfinished":
            return end
        late = first_id(task.created_at + unique.lasts)
        return end if end < late and self._successor(task) is not None else late

    def _may_begin_beside(self, task: stored.Task, other: stored.Task) -> bool:
        """Whether a task may be created while another one holds its key: it waits, or takes the key over."""
        unique, begun = find_unique(task), self._begin_of(task)
        assert unique is not None
        if self._end_of(other) < begun:     # it held the key for some seconds, whatever became of it
            return unique.on_conflict in ("supersede", "keep_latest") or (
                json.loads(task.terms).get("rerun_of") == other.task_id)
        return (unique.on_conflict == "keep_latest" and self._moment(other, "task.accepted") < begun
                and self._moment(task, "task.accepted") >= self._end_of(other))

    def _superseded(self, owner: str, key: str, tasks: list[stored.Task]) -> Iterator[str]:
        """Check that each task that was superseded was canceled by its owner, for another one under its key."""
        alike = {task.task_id: self._begin_of(task) for task in tasks}
        for task in tasks:
            for receipt in self.end.of(task.task_id, "task.canceled"):
                new = body(receipt).get("superseded_by")
                if new is not None and (new not in alike or receipt.from_id != owner or new == task.task_id
                                        or alike[new] < alike[task.task_id]):
                    yield f"task {task.task_id} was superseded by {new}, which has not the key {key} of {owner}"
            origin = json.loads(task.terms).get("supersedes")
            if origin is not None and not any(body(receipt).get("superseded_by") == task.task_id
                                              for receipt in self.end.of(origin, "task.canceled")):
                yield f"task {task.task_id} says that it supersedes {origin}, which was not canceled for it"
            if task.held == stored.KEY_TAKEN and not any(
                    other.status not in ENDING_RECEIPTS and self._successor(other) == task.task_id for other in tasks):
                yield f"task {task.task_id} waits for the end of a task under the key {key}, and there is none"

    def _successor(self, task: stored.Task) -> str | None:
        """Return the task that waits for the end of another one, or has superseded it."""
        row = self.end.progress.get(task.task_id)
        return None if row is None else row.successor

    def _amendments(self, task: stored.Task) -> Iterator[str]:
        """Check that receipts tell each payload that a task has had, the last of which is the one that it has."""
        told = [*self.end.of(task.task_id, "task.assigned"), *self.end.of(task.task_id, "task.amended")]
        hashes = [body(receipt).get("payload_sha256") for receipt in told]
        before = [body(receipt).get("payload_sha256_before") for receipt in told[1:]]
        if before and (before != hashes[:-1] or hashes[-1] != hashlib.sha256(
                to_canonical(json.loads(task.payload))).hexdigest()):
            yield f"task {task.task_id} had payloads {hashes}, and its receipts tell of {before}"
        leased = self._moment(task, "task.accepted")
        yield from (f"the payload of task {task.task_id} was replaced when a worker had had it"
                    for receipt in told[1:] if receipt.receipt_id > leased)


def target_of(call: Call) -> str:
    """Name what a call pauses or resumes."""
    return json.dumps({name: call.ask[name] for name in TARGET if call.ask.get(name)}, sort_keys=True)


def is_meant(ask: dict[str, Any], task: stored.Task, worker: str) -> bool:
    """Whether a pause is about a lease of a task for a worker."""
    if ask.get("worker"):
        return bool(ask["worker"] == worker)
    if ask.get("type") not in (None, task.type):
        return False
    needed = json.loads(task.requirements or "null") or {}
    return ask.get("capabilities") is None or set(ask["capabilities"]) == set(needed.get("capabilities") or ())


def in_turn(fences: list[int], skipped: list[int]) -> bool:
    """Whether fences rise by one, except for all of `skipped`, in order."""
    left = iter(skipped)
    for old, new in pairwise(fences):
        while new > old + 1 and (skip := next(left, None)):
            old += skip
        if new != old + 1:
            return False
    return next(left, None) is None


def said(call: Call) -> dict[str, Any]:
    """Return the reply of a call that has one."""
    assert call.reply is not None
    return call.reply


def body(receipt: stored.Receipt) -> dict[str, Any]:
    """Decode the body of a receipt."""
    read: dict[str, Any] = json.loads(receipt.body or "{}")
    return read


def seconds(moment: str) -> float:
    """Convert a time of an answer to Unix seconds."""
    return datetime.fromisoformat(moment).timestamp()


def list_texts(value: Any) -> Iterator[str]:
    """Yield every text in an answer."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from list_texts(inner)
