"""What becomes of a request for work whose key another task holds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from asyncgate import AMENDED, Engine, Extension, Task, Work
from asyncgate.parts.model import errors, stored, stored_unique, wire
from asyncgate.parts.model.content import decode_json, sha256, to_canonical
from asyncgate.parts.model.families import keep_family, read_family
from asyncgate.parts.model.unique import has_begun, hash_key, holds_key
from asyncgate.parts.model.views import decode_terms, note_repeats

MOST_JOINED = 32        # requests of a key that are known when they are repeated
AMENDABLE = (*wire.Terms.__struct_fields__, "payload_pointer", "payload_sha256", "payload_bytes")


class UniqueWork(Extension):
    """Lets at most one task at a time hold a key."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def settle_unique(self, work: Work, ask: wire.CreateTask, task: Task,
                      contract: dict[str, Any]) -> Task | wire.Created:
        """Return the task to create, which now holds the key or waits for it; or the answer, where another one does."""
        assert ask.unique is not None
        key, conflict = hash_key(task.owner, task.type, ask.unique.key), ask.unique.on_conflict
        row = work.find_record(stored_unique.UniqueKey, key)
        if row is not None and (joined := find_joined(work, row, ask)) is not None:
            return answer_joined(ask, joined, task)
        holders = [] if row is None else [held for held in list_holders(work, row)
                                          if held.task_id != getattr(ask, "rerun_of", None)]
        if row is None or not holders:
            return self._begin(work, row or stored_unique.UniqueKey(key, "", work.now), ask, task, contract)
        last = holders[-1]
        begun = has_begun(last, work.leases.get(last.task_id))
        if conflict == "refuse" or (conflict == "replace" and begun):
            raise make_conflict(last, ask.unique.key, begun)
        if conflict in ("return", "replace"):
            return self._join(work, ask, row, last, task, contract)
        at_work = (held for held in holders if has_begun(held, work.leases.get(held.task_id))
                   and held.status not in stored.TERMINAL)
        waits_for = next(at_work, None) if conflict == "keep_latest" else None
        ends = [held for held in reversed(holders) if held is not waits_for and held.status not in stored.TERMINAL]
        with expect_child(work, task.parent_task_id):
            for held in ends:       # the one that waits first: the end of the other would offer it
                self.engine.cancel(work, held, task.owner, superseded_by=task.task_id)
                keep_successor(work, held.task_id, task.task_id)
        return self._begin(work, row, ask, task, contract, work.now if begun else row.since, waits_for, ends)

    def _begin(self, work: Work, row: stored_unique.UniqueKey, ask: wire.CreateTask, task: Task,
               contract: dict[str, Any], since: float | None = None, waits_for: Task | None = None,
               ends: list[Task] | None = None) -> Task:
        """Let a new task hold the key, or wait for the end of another one."""
        since = work.now if since is None else since
        if ends:
            contract["supersedes"] = ends[-1].task_id
            task = replace(task, terms=replace_terms(task.terms, task.terms, supersedes=ends[-1].task_id))
        if ask.debounce is not None:
            task = replace(task, next_eligible_at=find_due(ask.debounce, work.now, since))
        if waits_for is None:
            work.keep_record(replace(row, task_id=task.task_id, since=since, next_id=None))
            return task
        keep_successor(work, waits_for.task_id, task.task_id)
        work.keep_record(replace(row, task_id=waits_for.task_id, since=since, next_id=task.task_id))
        return replace(task, held=stored.KEY_TAKEN)

    def _join(self, work: Work, ask: wire.CreateTask, row: stored_unique.UniqueKey, held: Task, task: Task,
              contract: dict[str, Any]) -> wire.Created:
        """Answer with the task that holds the key, which may get the new contract, and be put off."""
        assert ask.unique is not None
        before = held
        if ask.unique.on_conflict == "replace":
            held = self._replace(work, held, task, contract)
        # What a worker has had waits for something else: a retry, the end of a park, an answer, its children.
        begun = has_begun(held, work.leases.get(held.task_id))
        if ask.debounce is not None and not begun and (held.next_eligible_at or 0.0) > work.now:
            held = work.change_task(held, next_eligible_at=find_due(ask.debounce, work.now, row.since))
        if ask.idempotency_key is not None:
            known = [*row.joined.split(), f"{sha256(ask.idempotency_key)}:{held.task_id}"][-MOST_JOINED:]
            work.keep_record(replace(row, joined=" ".join(known)))
        return answer_joined(ask, before, task)

    def _replace(self, work: Work, held: Task, task: Task, contract: dict[str, Any]) -> Task:
        """Give a task that no worker has had another payload; the receipt of it has the hashes of both."""
        before, known, wanted = digest(held), decode_terms(held.terms), decode_terms(task.terms)
        if (before, held.payload_pointer) == (contract["payload_sha256"], task.payload_pointer) and all(
                getattr(known, name) == getattr(wanted, name) for name in wire.Terms.__struct_fields__):
            return held     # the same again
        number = known.amendments + 1
        held = work.amend_task(held, payload=task.payload, payload_pointer=task.payload_pointer,
                               terms=replace_terms(held.terms, task.terms, amendments=number),
                               deadline_at=task.deadline_at if task.deadline_at is not None else held.deadline_at)
        for check_payload in self.engine.on.check_payload:
            check_payload(work, held)
        told = {name: contract[name] for name in AMENDABLE if name in contract}
        self.engine.write_receipt(work, AMENDED, held, {
            **told, "payload_sha256_before": before, "amendments": number}, by=held.owner, discriminator=str(number))
        return held


@contextlib.contextmanager
def expect_child(work: Work, parent_id: str | None) -> Iterator[None]:
    """Count a child before it is added, so that its parent does not go on at the end of the one that it replaces."""
    def count(more: int) -> None:
        if parent_id is not None and (family := read_family(work.progress.get(parent_id))) is not None:
            keep_family(work, work.require_task(parent_id), replace(family, open=family.open + more))

    count(1)
    yield
    count(-1)


def find_joined(work: Work, row: stored_unique.UniqueKey, ask: wire.CreateTask) -> Task | None:
    """Return the task with which a request was answered before: to repeat it changes nothing, whatever came since."""
    known = dict(pair.split(":") for pair in row.joined.split())
    if ask.idempotency_key is None or (task_id := known.get(sha256(ask.idempotency_key))) is None:
        return None
    if work.lacks(task_id):
        raise errors.Unloaded(task_id)
    return work.tasks.get(task_id)


def answer_joined(ask: wire.CreateTask, held: Task, task: Task) -> wire.Created:
    """Answer a request with the task that held its key."""
    assert ask.unique is not None
    replaces = ask.unique.on_conflict == "replace"
    return note_repeats(wire.Created(held.task_id, held.status, payload_differs=held.payload != task.payload
                                     and not replaces, unique="replaced" if replaces else "returned"), 1)


def list_holders(work: Work, row: stored_unique.UniqueKey) -> list[Task]:
    """Return the task that holds a key now, and the one that waits for its end; neither where it is free."""
    ids = [task_id for task_id in (row.task_id, row.next_id) if task_id is not None]
    if any(work.lacks(task_id) for task_id in ids):
        rows = [known for (kind, _), known in work.records.items()      # of a list of tasks all at once
                if kind is stored_unique.UniqueKey and known is not None]
        raise errors.Unloaded(*{task_id for known in rows for task_id in (known.task_id, known.next_id)
                                if task_id is not None})
    tasks = [work.tasks[task_id] for task_id in ids if task_id in work.tasks]
    return [task for task in tasks if holds_key(task, work.leases.get(task.task_id), work.now)]


def keep_successor(work: Work, task_id: str, successor: str) -> None:
    """Note of a task which one waits for its end, or has superseded it."""
    work.keep_progress(replace(work.find_progress(task_id), successor=successor))


def find_due(debounce: wire.Debounce, now: float, since: float) -> float | None:
    """Return when a task is due that is put off once more; None if that is now."""
    most = debounce.at_most_seconds
    due = now + debounce.seconds if most is None else min(now + debounce.seconds, since + most)
    return due if due > now else None


def replace_terms(before: str, wanted: str, **more: Any) -> str:
    """Return terms of which the words of the creator are replaced, and what the gate has noted is not."""
    words = frozenset(wire.Terms.__struct_fields__)
    noted = {name: value for name, value in decode_json(before).items() if name not in words}
    return to_canonical({**noted, **{name: value for name, value in decode_json(wanted).items() if name in words},
                         **more}).decode()


def digest(task: Task) -> str:
    """Return the hash of a payload, as receipts have it."""
    return hashlib.sha256(to_canonical(decode_json(task.payload))).hexdigest()


def make_conflict(held: Task, key: str, begun: bool) -> errors.UniqueConflict:
    """Return the refusal where another task holds the key."""
    way = ("a worker has had it, so its payload stays; on_conflict supersede cancels it, keep_latest waits for its end"
           if begun else "on_conflict return gives that task, replace gives it the new payload, supersede cancels it")
    return errors.UniqueConflict(f"task {held.task_id} holds the key {key} and is {held.status} (get_task shows it): "
                                 f"{way}", task_id=held.task_id, status=held.status)
