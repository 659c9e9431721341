"""Workers: functions that do the tasks of a gate.

    from asyncgate.clients.worker import Worker

    worker = Worker("http://127.0.0.1:8080")

    @worker.task("greet")
    def greet(name: str) -> str:
        return f"hello {name}"

    worker.run()

A worker leases tasks, keeps their leases, runs a function for each, and reports how it ended until the gate has heard
it.  What a function needs to know of that is its `Job`.  Work may run twice (a worker that dies after the work and
before the report makes it run again), so its effect should depend on the task and not on the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from asyncgate.clients.http import FIRST_PAUSE, AsyncHttp, Refusal, Unreachable, WrongAddress, pause_after
from asyncgate.clients.worker.heart import Heart, passing
from asyncgate.clients.worker.job import Done, Fail, Job, Lost, Retry, Task, told, words
from asyncgate.clients.worker.state import Letter, Place, default_folder, take

__all__ = ["Done", "Fail", "Job", "Lost", "Retry", "Worker"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
WAIT_SECONDS = 25.0         # that an empty claim stays open
SOON_SECONDS = 1.0          # the same while an end waits to be told
QUIET_SECONDS = 1.0         # that a gate may be away before it is worth a word
TRIES = 50                  # to deliver an ending, some twenty seconds in all
CANCEL_SECONDS = 10.0       # that an async function has to end when it is canceled
NOTICE_SECONDS = 1.0        # that a plain one has, which cannot be canceled
DEFAULT: Any = object()
ME = ("worker_id", "worker_kind", "worker_instance_id")

log = logging.getLogger("asyncgate.worker")


def named(capabilities: Sequence[str]) -> list[str]:
    """Return capabilities one by one; a text names them with commas between."""
    return [name.strip() for name in capabilities.split(",")] if isinstance(capabilities, str) else list(capabilities)


class Worker:
    """Leases the tasks that it has functions for, and works on them until it is told to stop."""

    def __init__(
            self, gate: Any = None, worker_id: str | None = None, *, token: str | None = None,
            worker_kind: str | None = None, capabilities: Sequence[str] = (), concurrency: int = 1,
            ttl_seconds: int | None = None, state: str | Path | None = DEFAULT, drain_seconds: float = 20.0,
            delivery_tries: int = TRIES) -> None:
        """Make a worker of the gate at a URL, or of the one that a client speaks with.

        Without `worker_id` it is the principal of the issued key, or else the host's name.  `state` is a folder for
        what must outlive the process, by default one of the user's; None keeps nothing.  `ttl_seconds` is how long a
        lost worker's task waits; without it the task or the gate decides.
        """
        way = getattr(gate, "way", gate)        # how an AsyncGate speaks
        if getattr(way, "settings", {}).get("transport") is not None:
            raise ValueError("a worker speaks HTTP, from two threads; a test's gate needs a port: Gate(port=0)")
        self.gate = AsyncHttp(getattr(way, "url", way), getattr(way, "token", None) if token is None else token)
        self.worker_id = worker_id or ""        # until the gate has said whose the credential is
        self.worker_kind, self.capabilities, self.concurrency = worker_kind, named(capabilities), concurrency
        self.ttl_seconds, self.drain_seconds, self.delivery_tries = ttl_seconds, drain_seconds, delivery_tries
        self.state = default_folder(self.gate.url) if state is DEFAULT else None if state is None else Path(state)
        self.tasks: dict[str | None, Task] = {}
        self.jobs: dict[str, asyncio.Task[None]] = {}       # by lease
        self.unfinished: set[str] = set()                   # leases of functions that do not end
        self.running = False

    def task(self, *types: str, payload: Any = None, retry: tuple[type[BaseException], ...] = (OSError,),
             ) -> Callable[[F], F]:
        """Declare the function that does tasks of these types, or of all types when none is named.

        The function takes the payload, decoded into the type that it declares, and the job if it wants that too.
        What it returns is the result.  An error of the classes in `retry` costs an attempt, any other one the task.
        """
        def declare(function: F) -> F:
            for type in types or (None,):
                self.tasks[type] = Task(function, retry, payload)
            return function
        return declare

    def run(self) -> None:
        """Work until SIGTERM or SIGINT comes: then take no more tasks, finish those under way, give back the rest."""
        asyncio.run(self._until_told())

    async def _until_told(self) -> None:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.stop)
        await self.serve()

    def stop(self) -> None:
        """Take no more tasks and end what is under way, within `drain_seconds`; the second time, at once."""
        if self.running:
            (self.hurried if self.stopping.is_set() else self.stopping).set()

    async def serve(self) -> None:
        """Work until `stop`; canceled, it gives back at once what it holds."""
        self.stopping, self.hurried, self.loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        self.kept = asyncio.Event()     # an end that could not be told
        self.instance, self.claim_id, self.away_since, self.known = "", uuid.uuid4().hex, 0.0, False
        self.warned: list[str] = []
        self.running = True
        async with self.gate:
            try:
                await self._unless(self.stopping, self._insist(self._be_named))
            finally:
                self.running = bool(self.worker_id)
            if self.running:
                await self._live()

    async def _be_named(self) -> None:
        """Learn from the gate whose the credential is; one that stands for everybody leaves the host's name."""
        if self.worker_id and self.worker_kind:
            return
        try:
            you = await self.gate.call("whoami")
        except Refusal as no:
            if no.status != 404:        # a gate that does not know the question yet
                raise
            you = {}
        if you.get("principal_id") and self.worker_id in ("", you["principal_id"]):
            self.worker_id, self.worker_kind = you["principal_id"], self.worker_kind or you["principal_kind"]
        self.worker_id = self.worker_id or socket.gethostname()

    async def _live(self) -> None:
        """Work under a name."""
        self.place = take(self.state, self.worker_id)
        self.me = {"worker_id": self.worker_id, "worker_kind": self.worker_kind,
                   "worker_instance_id": self.place.instance_id}
        self.heart = Heart(self.gate.url, self.gate.token, self.me, self.ttl_seconds)
        self.known = False
        self.heart.start()
        try:
            await self._unless(self.stopping, self._insist(self._come_back))
            while not self.stopping.is_set():
                await self._unless(self.stopping, self._turn())
            await self._drain()
        finally:
            self.running = False
            await self._leave()

    async def _unless(self, event: asyncio.Event, doing: Awaitable[T]) -> T | None:
        """Do something until it is done or an event is set; None if it was given up."""
        work, told = asyncio.ensure_future(doing), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([work, told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
            told.cancel()
            await asyncio.wait([work, told])
        return None if work.cancelled() else work.result()

    # Taking tasks.

    async def _come_back(self) -> None:
        """Say what could not be said before, and go on with what is still held from an earlier life."""
        self.instance = (await self.gate.call("get_config"))["instance_id"]
        for place in (self.place, *self.place.abandoned()):
            await self._replay(place)
        for lease in await self._held(resume=True):
            if lease["lease_id"] not in self.jobs:
                await self._resume(lease)

    async def _held(self, resume: bool) -> list[dict[str, Any]]:
        """Return the leases that this worker holds, without those whose end only waits to be delivered."""
        told = {letter.fields["lease_id"] for letter in self.place.letters()}
        leases = (await self.gate.call("list_leases", **self.me, resume=resume))["leases"]
        return [lease for lease in leases if lease["lease_id"] not in told]

    async def _resume(self, lease: dict[str, Any]) -> None:
        if lease["type"] not in self.tasks and None not in self.tasks:
            return await self._release(lease)
        try:
            task = await self.gate.call("get_task", **self.me, task_id=lease["task_id"])
        except Refusal as no:
            return log.warning("task %s: cannot go on under its lease: %s", lease["task_id"], no)
        log.info("task %s: going on under the lease of an earlier life", lease["task_id"])
        self._begin({**task, **lease})

    async def _turn(self) -> None:
        """Wait for room, then for tasks."""
        while len(self.jobs) >= self.concurrency:
            await asyncio.wait(self.jobs.values(), return_when=asyncio.FIRST_COMPLETED)
        await self._insist(self._claim)

    async def _claim(self) -> None:
        self.kept.clear()
        left = await self._replay(self.place)
        asked = time.monotonic()
        # A claim that waits is given up when an end could not be told: the lease of that may run out before.
        reply = await self._unless(self.kept, self.gate.call(
            "lease_next", **self.me, accept_types=None if None in self.tasks else list(self.tasks),
            capabilities=self.capabilities, max_tasks=self.concurrency - len(self.jobs),
            lease_ttl_seconds=self.ttl_seconds, wait_seconds=SOON_SECONDS if left else WAIT_SECONDS,
            claim_id=self.claim_id))
        if reply is None:
            return      # the next claim has the same id
        self.claim_id = uuid.uuid4().hex    # had the answer been lost, the same claim would have got the same leases
        self._warn(reply.get("warnings") or [])
        for offer in reply["tasks"]:
            self._begin(offer)
        if not reply["tasks"] and time.monotonic() - asked < FIRST_PAUSE:
            await asyncio.sleep(FIRST_PAUSE)    # a gate that stops answers waiting claims at once

    def _warn(self, texts: list[str]) -> None:
        """Say what the gate warns of, once for as long as it does."""
        for text in texts:
            if text not in self.warned:
                log.warning("%s: %s", self.worker_id, text)
        self.warned = texts

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call until it is answered; a gate that has refused this worker from the start is not asked again."""
        for failures in count(1):
            asked = time.monotonic()
            try:
                await call()
                self.away_since, self.known = 0.0, True
                return
            except (Unreachable, Refusal) as error:
                if not self.known and hopeless(error):
                    raise
                self._tell(error)
                if failures == 1 and isinstance(error, Unreachable) and time.monotonic() - asked > FIRST_PAUSE:
                    continue        # a call that waited was cut off: whoever cut it off may be back already
                await asyncio.sleep(max(pause_after(failures, 0.5), getattr(error, "retry_after", None) or 0.0))

    def _tell(self, error: Exception) -> None:
        """Say what is wrong, but not about a gate that is only being restarted, and only once while it is away."""
        now = time.monotonic()
        if not isinstance(error, Unreachable):
            log.warning("%s: %s", self.worker_id or "worker", error)
        elif not self.away_since:
            self.away_since = now
        elif now - self.away_since > QUIET_SECONDS:
            log.warning("%s: %s; trying on", self.worker_id or "worker", error)
            self.away_since = float("inf")

    # Working on them.

    def _begin(self, offer: dict[str, Any]) -> None:
        lease_id = offer["lease_id"]
        if lease_id not in self.jobs:
            job = Job(offer, self.heart, self._lost)
            job.work = asyncio.ensure_future(self._task(job).run(job))
            self.heart.keep(job.pulse)
            self.jobs[lease_id] = doing = asyncio.ensure_future(self._do(job))
            doing.add_done_callback(lambda _: self.jobs.pop(lease_id, None))

    def _task(self, job: Job) -> Task:
        return self.tasks.get(job.type) or self.tasks[None]

    async def _do(self, job: Job) -> None:
        """Do one task and report its end."""
        try:
            await self._deliver(job, await self._worked(job))
        except Exception:
            log.exception("%s: this worker has a fault; the lease will run out", job)
        finally:
            self.heart.drop(job.pulse)

    async def _worked(self, job: Job) -> Letter | None:
        """Run the function; return what reports its end, None if there is nothing to report."""
        try:
            await asyncio.wait([job.work])
        except asyncio.CancelledError:
            await self._stopped(job)
            raise
        if job.lost.is_set():
            log.warning("%s: dropped, the lease is lost (%s)", job, job.reason)
            if not job.work.cancelled():
                job.work.exception()    # looked at, so that asyncio does not complain; it is about nothing any more
            return None
        return self._ending(job, self._task(job), job.work)

    async def _stopped(self, job: Job) -> None:
        """Take the work away from a function, because this worker stops."""
        job.lose("stopping")
        await asyncio.wait([job.work], timeout=CANCEL_SECONDS if self._task(job).is_async else NOTICE_SECONDS)
        if not job.work.done():     # whoever is given the task now would do it at the same time
            self.unfinished.add(job.lease_id)
            log.warning("%s: its function does not end; its lease is not given back", job)

    def _lost(self, job: Job) -> None:
        """Called from any thread: stop an async function; a plain one looks at `job.lost`, or reports and is told."""
        if self._task(job).is_async:
            with contextlib.suppress(RuntimeError):     # the loop may have ended
                self.loop.call_soon_threadsafe(job.work.cancel)

    def _ending(self, job: Job, task: Task, work: asyncio.Future[Any]) -> Letter:
        error: BaseException | None = Retry("it was canceled from within") if work.cancelled() else work.exception()
        try:
            if error is None:
                return self._letter(job, "complete", **self._result(job, work.result()))
        except Fail as unfit:
            error = unfit
        expected = isinstance(error, Retry | Fail)
        log.warning("%s: failed: %s", job, words(error), exc_info=None if expected else error)
        return self._letter(job, "fail", **task.failure(error))

    def _result(self, job: Job, value: Any) -> dict[str, Any]:
        done = value if isinstance(value, Done) else Done(value)
        if done.artifacts is None and done.delivery_proof is None:
            where = f"asyncgate://{self.instance}/tasks/{job.task_id}/result"
            done = msgspec.structs.replace(done, artifacts=[{"type": "inline", "uri": where}])
        return plain(done)

    def _letter(self, job: Job, operation: str, **fields: Any) -> Letter:
        return Letter(operation, {**self.me, **job.under, **fields})

    # Reporting their ends.

    async def _deliver(self, job: Job, letter: Letter | None) -> None:
        """Report an end, again and again while the gate is away; then keep it on disk."""
        tried = 0
        try:
            while letter and tried < self.delivery_tries and not self._superseded(job):
                letter, wait = await self._send(letter)
                tried += 1
                if letter and tried < self.delivery_tries:
                    await asyncio.sleep(max(wait, pause_after(tried, 0.75)))
        finally:    # also when this worker is stopped meanwhile
            if letter and not self._superseded(job):
                self.place.keep(letter)
                self.kept.set()

    def _superseded(self, job: Job) -> bool:
        """Whether nobody wants to hear of it any more; that it was heard already is no reason to give up."""
        # That it ran out is a matter of clocks, which the gate decides; that it was completed may be our own doing.
        gone = job.lost.is_set() and job.reason not in ("completed", "expired", "stopping")
        if gone:
            log.warning("%s: its end is dropped, the lease is lost (%s)", job, job.reason)
        return gone

    async def _send(self, letter: Letter) -> tuple[Letter | None, float]:
        """Send a letter; return what is left to be sent, and after how many seconds."""
        try:
            await self.gate.call(letter.operation, **letter.fields)
        except Unreachable as none:
            return replace(letter, why=str(none)), 0.0
        except Refusal as no:
            if passing(no):
                return replace(letter, why=str(no)), no.retry_after or 0.0
            if no.status in (400, 413) and (changed := unfit(letter, no)) != letter:
                return changed, 0.0
            log.warning("task %s: its end is dropped: %s (%s)", letter.fields["task_id"], no,
                        no.more.get("reason", no.code))
        return None, 0.0

    async def _replay(self, place: Place) -> bool:
        """Send what earlier tries could not, each under the lease that it was done under; tell whether any is left."""
        while letters := place.letters():
            left, _ = await self._send(letters[0])
            if left and replace(left, why="") == replace(letters[0], why=""):
                return True     # later, then
            if left:
                place.keep(left)
            if not place.forget(letters[0]):
                return True
        return False

    # Stopping.

    async def _drain(self) -> None:
        """Wait for what is under way, then take it away from its functions."""
        if self.jobs:
            log.info("%s: stopping; %d under way", self.worker_id, len(self.jobs))
        hurried, until = asyncio.ensure_future(self.hurried.wait()), self.loop.time() + self.drain_seconds
        while self.jobs and not hurried.done() and (left := until - self.loop.time()) > 0:
            await asyncio.wait([hurried, *self.jobs.values()], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()

    async def _leave(self) -> None:
        """End what is under way, and give back all that is held, also what a claim got whose answer was never read."""
        doing = list(self.jobs.values())
        for one in doing:
            one.cancel()
        await asyncio.gather(*doing, return_exceptions=True)
        await asyncio.to_thread(self.heart.stop)
        with contextlib.suppress(Unreachable, Refusal):
            await self._replay(self.place)
            for lease in await self._held(resume=False):
                if lease["lease_id"] not in self.unfinished:
                    await self._release(lease)
        self.place.close()

    async def _release(self, lease: dict[str, Any]) -> None:
        await self.gate.call("release_lease", **self.me, task_id=lease["task_id"], lease_id=lease["lease_id"])


def hopeless(error: Exception) -> bool:
    """Whether a first answer says that no further one will be better."""
    if isinstance(error, Refusal):
        return error.status < 500 and error.status != 429
    return isinstance(error, WrongAddress)


def unfit(letter: Letter, no: Refusal) -> Letter:
    """Make of an end that the gate can never take a failure that says so."""
    kept = {name: letter.fields[name] for name in (*ME, "task_id", "lease_id", "fence", "retryable")
            if name in letter.fields}
    what = "result" if letter.operation == "complete" else "error"
    said = {"code": no.code, "message": f"the gate does not take the {what}: {no}"}
    return Letter("fail", {"retryable": False, **kept, "error": said}, letter.why)


def plain(done: Done) -> dict[str, Any]:
    """Return the fields of a completion as JSON has them; raises Fail where JSON has nothing like it."""
    try:
        return dict(told(done))
    except (TypeError, ValueError, RecursionError) as wrong:
        raise Fail(f"the result is nothing that JSON can say: {wrong}", code="invalid_result") from None
