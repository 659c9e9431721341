"""The remote tasks of a worker: one that nobody follows is canceled when the gate has ended its task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec

from asyncgate.clients import http
from asyncgate.clients.worker import Worker
from asyncgate.clients.worker.state import rewrite_lines
from asyncgate.extras.a2a_worker.remote import Away, Refused, Remote
from asyncgate.parts.model import stored

TURN_SECONDS = 2.0      # between two looks at all of them, or longer
LOOKS_PER_SECOND = 20

log = logging.getLogger("asyncgate.worker.a2a")


class OpenTasks:
    """Nobody follows a remote task whose question waits at the gate, or whose worker was killed or has lost its lease.

    They outlive the process in the folder of the worker, if it has one.
    """

    def __init__(self, worker: Worker, remote: Remote) -> None:
        self.worker, self.remote = worker, remote
        self.followed, self.left = set[str](), asyncio.Queue[str]()     # `left`: whom a job has just left

    @cached_property
    def rows(self) -> dict[str, str]:
        """The ids of remote tasks by those of their tasks."""
        with contextlib.suppress(OSError, ValueError):
            if self.file is not None:
                return dict(msgspec.json.decode(line, type=tuple[str, str])
                            for line in self.file.read_bytes().splitlines())
        return {}

    @property
    def file(self) -> Path | None:
        """Where they are kept."""
        path = self.worker.place.path
        return None if path is None else path.with_name(f"{path.name}.a2a")

    def note(self, task_id: str, remote_id: str) -> None:
        """Note what a task has become."""
        if self.rows.get(task_id) != remote_id:
            self.rows[task_id] = remote_id
            self._keep()

    def forget(self, task_id: str) -> None:
        """Forget a remote task, which has ended."""
        if self.rows.pop(task_id, None) is not None:
            self._keep()

    def _keep(self) -> None:
        if self.file is not None:
            try:
                rewrite_lines(self.file, [msgspec.json.encode(row) for row in self.rows.items()])
            except OSError as error:        # a full disk, say: they are known as long as this process lives
                log.warning("%s cannot be written: %s", self.file, error)

    @contextlib.contextmanager
    def follow(self, task_id: str) -> Iterator[None]:
        """Leave a task alone while a job follows it, and look at it at once behind that."""
        self.followed.add(task_id)
        try:
            yield
        finally:
            self.followed.discard(task_id)
            self.left.put_nowait(task_id)

    async def watch(self) -> None:
        """Look after them until canceled."""
        async with http.AsyncHttp(self.worker.gate.url, self.worker.gate.token) as gate:
            await asyncio.gather(self._look_behind(gate), self._look_around(gate))

    async def _look_behind(self, gate: http.AsyncHttp) -> None:
        while True:
            await self._look(gate, await self.left.get())

    async def _look_around(self, gate: http.AsyncHttp) -> None:
        while True:
            begun = hasattr(self.worker, "me")
            for task_id in [*self.rows] if begun else ():
                await self._look(gate, task_id)
            await asyncio.sleep(max(TURN_SECONDS, len(self.rows) / LOOKS_PER_SECOND if begun else 0.0))

    async def _look(self, gate: http.AsyncHttp, task_id: str) -> None:
        if (remote_id := self.rows.get(task_id)) is None or task_id in self.followed:
            return
        try:
            task = await gate.call("get_task", **self.worker.me, task_id=task_id)
            if task["status"] not in stored.TERMINAL or task_id in self.followed:
                return
            await self.remote.call("CancelTask", {"id": remote_id}, {})
            log.info("task %s has ended: the agent's task %s is canceled", task_id, remote_id)
        except http.Refusal as refusal:
            if refusal.status not in (403, 404):        # else another worker has it, or it is deleted
                return
        except Refused as refused:      # it has ended, or the agent does not cancel
            log.info("task %s has ended, and the agent's task %s is not canceled: %s", task_id, remote_id, refused)
        except (http.Unreachable, Away):
            return
        except Exception:       # the other tasks are looked after all the same
            return log.exception("task %s: the agent's task %s cannot be looked after now", task_id, remote_id)
        self.forget(task_id)
