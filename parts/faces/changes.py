"""What a process tells those who follow a stream: progress, starts, holds, and that a worker was seen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncgate import Engine, Extension, Operation, Work, speaker
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.news import Change, News
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.process.changes import Follower, Followers

if TYPE_CHECKING:
    from asyncgate import Caller
    from asyncgate.parts.model import stored

CLAIMS = ("lease_next", "offer_task")


class ChangeRecord(Struct, omit_defaults=True):
    """A change of state that has no receipt; get_task shows the whole task."""

    change: str
    at: datetime | None = None
    task_id: str | None = None
    type: str | None = None
    status: str | None = None
    held: str | None = None
    worker: wire.Principal | None = None
    sequence: int | None = None         # of a progress
    number: int | None = None           # how many changes are left out


class Changes(Extension):
    """Knows who follows changes, here and in other processes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        shared, loop = engine.shared, asyncio.get_running_loop()
        self.followers = Followers(shared.tell if shared else None, loop.time)
        self.telling = Telling(self)

    @contextlib.contextmanager
    def follow(self, tenant_id: str, follower: Follower) -> Iterator[None]:
        """Tell a follower what changes meanwhile."""
        self.followers.join(tenant_id, follower)
        self.engine.extend(self.telling)
        try:
            yield
        finally:
            self.followers.leave(tenant_id, follower)

    def hear_news(self, news: News) -> None:
        """Tell what has changed in another process, or learn that somebody follows there."""
        if news.followed or news.changes:
            self.followers.hear(news)
        if news.followed:
            self.engine.extend(self.telling)


class Telling(Extension):
    """Tells what changes, and which workers ask; only among an engine's extensions while somebody follows."""

    def __init__(self, changes: Changes) -> None:
        self.changes, self.engine = changes, changes.engine

    def after_commit(self, work: Work) -> None:
        """Tell what a batch has changed."""
        followers = self.changes.followers
        if followers.is_followed(work.tenant_id) and (changes := list_changes(work)):
            followers.spread(work.tenant_id, changes)

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Tell of a worker that has asked for tasks."""
        followers = self.changes.followers
        if not followers.is_anybody_there():
            self.engine.withdraw(self)
        elif op.name in CLAIMS and followers.is_followed(caller.tenant_id):
            followers.see(caller.tenant_id, speaker(caller, ask), self.engine.backend.now())


def list_changes(work: Work) -> list[Change]:
    """Return what a batch has changed without a receipt: events of a task's history, progress, and what is paused."""
    changes = [describe_change(work, event.event_type, task) for event in work.events.values()
               if (task := work.tasks.get(event.task_id)) is not None]
    changes += [describe_change(work, "progress", work.tasks[progress.task_id], progress.sequence)
                for progress in work.progressed.values()]
    return [*changes, Change("work.pauses", work.now)] if (stored.Pauses, ()) in work.kept else changes


def describe_change(work: Work, change: str, task: stored.Task, number: int = 0) -> Change:
    """Describe a change of one task."""
    lease = work.leases.get(task.task_id)
    worker = (lease.worker_kind, lease.worker_id, lease.worker_instance or "") if lease else ("", "", "")
    return Change(change, work.now, task.task_id, task.type, task.status, task.held or "",
                  (task.owner_kind, task.owner_id), worker, number)


def show_change(change: Change) -> ChangeRecord:
    """Show a change."""
    kind, id, instance = change.worker
    progress = change.change == "progress"
    return ChangeRecord(
        change.change, to_utc(change.at) if change.at else None, change.task_id or None, change.type or None,
        change.status or None, change.held or None, wire.Principal(kind, id, instance or None) if kind else None,
        change.number if progress else None, None if progress else change.number or None)
