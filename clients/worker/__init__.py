"""A worker: it runs your functions for the tasks of a gate.

    from asyncgate.clients.worker import Worker

    worker = Worker("http://127.0.0.1:8080")

    @worker.task("greet")
    def greet(name: str) -> str:
        return f"hello {name}"

    worker.run()

A worker leases tasks, renews their leases, runs a function for each task, and reports the result until the gate has
received it.  A function can use its `Job` to report progress and to learn that the lease is lost.  A task may run twice
(if a worker dies after the work and before the report), so make functions idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from asyncgate.clients import http
from asyncgate.clients.finite import to_json_value
from asyncgate.clients.worker import logs
from asyncgate.clients.worker.asking import ASKED, Answer, Question, Unanswered
from asyncgate.clients.worker.heart import Heart, is_temporary
from asyncgate.clients.worker.job import (
    PROGRESS_BYTES,
    Done,
    Fail,
    Job,
    Lost,
    Park,
    Retry,
    TaskFunction,
    describe_error,
)
from asyncgate.clients.worker.journal import Recorder, StepMismatch, StepsLost, TooLarge
from asyncgate.clients.worker.state import Letter, Place, default_folder, take_place
from asyncgate.parts.process.forks import obey_signals, release_children
from asyncgate.parts.process.kit import take_error
from asyncgate.parts.process.spans import Tracing, find_tracing

__all__ = ["Answer", "Done", "Fail", "Job", "Lost", "Park", "Question", "Retry", "StepMismatch", "StepsLost",
           "TooLarge", "Unanswered", "Worker"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
LEASE_SECONDS = 30          # short, because a worker renews by itself: so long a task waits if its worker is killed
OUTAGE_SECONDS = 300.0      # longer than restarts and fail-overs; who was only cut off works in vain so long
CLAIM_WAIT_SECONDS = 25.0         # how long a claim waits for a task
SHORT_WAIT_SECONDS = 1.0          # how long it waits while an undelivered result is kept
DELIVERY_TRIES = 50                  # attempts to deliver a result: about twenty seconds in all
SLOW_SECONDS = 1.0          # after which a result that the gate has not taken is on disk
AWAY_LOG_SECONDS = 600.0    # between two lines that say that the gate is still away
CANCEL_SECONDS = 10.0       # time for an async function to end after it is canceled
NOTICE_SECONDS = 1.0        # time for a plain function, which cannot be canceled
DEFAULT_STATE: Any = object()
ME = ("worker_id", "worker_kind", "worker_instance_id")

log = logging.getLogger("asyncgate.worker")


def split_capabilities(capabilities: Sequence[str]) -> list[str]:
    """Return a list of capabilities; a text holds several, separated by commas."""
    return [name.strip() for name in capabilities.split(",")] if isinstance(capabilities, str) else list(capabilities)


def require_counts(**numbers: float) -> None:
    """Refuse options that are not whole numbers of 1 or more."""
    for name, number in numbers.items():
        if not number >= 1 or number % 1:
            raise ValueError(f"{name} must be a whole number of 1 or more, not {number}")


def require_seconds(**numbers: float) -> None:
    """Refuse options that are not times of 0 or more; inf is for ever."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} must be 0 or more, not {number}")


class Worker:
    """Leases the tasks that it has functions for, and runs those functions until it is stopped."""

    def __init__(
            self, gate: Any = None, worker_id: str | None = None, *, token: str | None = None,
            worker_kind: str | None = None, capabilities: Sequence[str] = (), concurrency: int = 1,
            ttl_seconds: int = LEASE_SECONDS, state: str | Path | None = DEFAULT_STATE, drain_seconds: float = 20.0,
            delivery_tries: int = DELIVERY_TRIES, tracebacks: bool = True,
            outage_seconds: float = OUTAGE_SECONDS, declare: bool = True, payloads: Any = None,
            keep_logs: int | None = None) -> None:
        """Make a worker for the gate at a URL, or for the gate of an existing client.

        `worker_id` defaults to the principal of the issued key, or to the host's name.  `state` is the folder for data
        that must outlive the process; it defaults to a folder of the user, and None keeps nothing.  `ttl_seconds` is
        the length of a lease, renewed at a third of it: a task waits so long at most if its worker dies.
        `outage_seconds`: how long work goes on beyond its lease while the gate is away, which gives that time back.
        `tracebacks`: whether the error of a task tells where in your code it was raised.
        `declare`: whether the gate learns what your functions take and give, so that it refuses what does not fit.
        `payloads`: a store for large values, `asyncgate.extras.payloads.Payloads`; by default that of the client.
        `keep_logs`: a level of logging, such as logging.INFO: what a function logs from there on is kept with its task.
        """
        require_counts(concurrency=concurrency, ttl_seconds=ttl_seconds, delivery_tries=delivery_tries)
        require_seconds(drain_seconds=drain_seconds, outage_seconds=outage_seconds)
        gate = getattr(gate, "gate", gate)      # of a SyncGate
        self.payloads: Any = getattr(gate, "payloads", None) if payloads is None else payloads
        way = getattr(gate, "way", gate)        # an AsyncGate's transport
        if getattr(way, "settings", {}).get("transport") is not None:
            raise ValueError("a worker needs a gate on a port, because it calls from two threads: use Gate(port=0)")
        self.gate = http.AsyncHttp(getattr(way, "url", way), getattr(way, "token", None) if token is None else token)
        self.worker_id = worker_id or ""        # empty until the gate names the credential's principal
        self.worker_kind, self.capabilities = worker_kind, split_capabilities(capabilities)
        self.concurrency, self.keep_logs = concurrency, keep_logs
        self.ttl_seconds, self.drain_seconds, self.delivery_tries = ttl_seconds, drain_seconds, delivery_tries
        self.tracebacks, self.outage_seconds, self.declare = tracebacks, outage_seconds, declare
        self.state = default_folder(self.gate.url) if state is DEFAULT_STATE else None if state is None else Path(state)
        self.tasks: dict[str | None, TaskFunction] = {}
        self.jobs: dict[str, asyncio.Task[None]] = {}       # by lease
        self.unfinished: set[str] = set()                   # leases of functions that did not end in time
        self.running = False
        self.told_to_stop = False               # in this run, or before it began
        self.tracing: Tracing | None = None     # if there is a provider of spans when it begins

    def task(self, *types: str, payload: Any = None, retry: tuple[type[BaseException], ...] = (Exception,),
             description: str | None = None) -> Callable[[F], F]:
        """Register the function for tasks of these types, or of all types if none is named.

        The function takes the payload, decoded into its annotated type, and optionally the job.  Its return value is
        the result.  An error of a class in `retry` fails this attempt: by default all but Fail and what can never
        succeed, such as a NameError.  Any other error fails the task.  Raises TypeError if JSON cannot express a type.
        Agents learn the annotated types and the `description`, which defaults to the docstring's first paragraph.
        """
        def declare(function: F) -> F:
            for type in types or (None,):
                self.tasks[type] = TaskFunction(function, retry, payload, description)
            if self.running:
                with contextlib.suppress(RuntimeError):     # the loop has ended meanwhile
                    self.loop.call_soon_threadsafe(self.kept.set)       # the claim that waits is for the others
            return function
        return declare

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; then take no more tasks, finish the running ones, and release the rest.

        Outside the main thread, where no signals arrive, `stop` ends it; call it from any thread.
        """
        asyncio.run(self._until_told())

    async def _until_told(self) -> None:
        if threading.current_thread() is threading.main_thread():     # elsewhere no signals arrive: call stop()
            obey_signals(self.stop)
        await self.serve()

    def stop(self) -> None:
        """Take no more tasks and finish the running ones within `drain_seconds`; a second call stops at once.

        A worker that does not run ends its next run at once: a thread that runs it may not have come so far.
        """
        self.told_to_stop = True
        if self.running:
            with contextlib.suppress(RuntimeError):     # the loop has ended meanwhile
                self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        (self.hurried if self.stopping.is_set() else self.stopping).set()

    async def serve(self) -> None:
        """Work until `stop`; if canceled, release all leases at once."""
        if not self.tasks:
            raise ValueError("this worker has no function; register one with @worker.task(\"TYPE\")")
        release_children()      # from the signals of the program that serves, whoever handles them
        self.stopping, self.hurried, self.loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        self.kept = asyncio.Event()     # set when a result could not be delivered, or a function was registered
        self.instance, self.claim_id, self.resumption_id = "", uuid.uuid4().hex, uuid.uuid4().hex
        self.tell_at = 0.0      # when to log that the gate is away; 0 while it answers
        self.claimed = False    # whether the gate has ever answered a claim
        self.warned, self.declared = list[str](), set[str | None]()
        self.running, self.tracing = True, find_tracing()
        try:
            if not self.told_to_stop:       # `stop` says so before it looks whether this runs: none is lost
                await self._work()
        finally:
            self.running = self.told_to_stop = False

    async def _work(self) -> None:
        async with self.gate:
            await self._unless(self.stopping, self._insist(self._be_named))
            if self.worker_id:
                with logs.keep_logs(self.keep_logs):
                    await self._live()

    async def _be_named(self) -> None:
        """Ask the gate for the credential's principal; a shared token has none, so the host's name is used."""
        if self.worker_id and self.worker_kind:
            return
        you = await self.gate.call("whoami")
        if you.get("principal_id") and self.worker_id in ("", you["principal_id"]):
            self.worker_id, self.worker_kind = you["principal_id"], self.worker_kind or you["principal_kind"]
        self.worker_id = self.worker_id or socket.gethostname()

    async def _live(self) -> None:
        """Work until stopped, now that the worker has a name."""
        self.place = take_place(self.state, self.worker_id)
        self.me = {"worker_id": self.worker_id, "worker_kind": self.worker_kind,
                   "worker_instance_id": self.place.instance_id}
        self.heart = Heart(self.gate.url, self.gate.token, self.me, self.ttl_seconds, self.outage_seconds)
        self.recorder = Recorder(self.gate.url, self.gate.token, self.me)
        self.heart.start()
        try:
            await self._unless(self.stopping, self._insist(self._come_back))
            while not self.stopping.is_set():
                await self._unless(self.stopping, self._turn())
            await self._drain()
        finally:
            await self._leave()

    async def _unless(self, event: asyncio.Event, doing: Awaitable[T]) -> T | None:
        """Await something until it ends or the event is set; return None if the event came first."""
        work, alarm = asyncio.ensure_future(doing), asyncio.ensure_future(event.wait())
        work.add_done_callback(take_error)      # if this call is canceled, nobody asks how the work ended
        try:
            await asyncio.wait([work, alarm], return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()       # no effect if it is done
            alarm.cancel()
            await asyncio.wait([work, alarm])
        return None if work.cancelled() else work.result()

    # Taking tasks.

    async def _come_back(self) -> None:
        """Deliver results kept from earlier runs, and resume the leases of an earlier process."""
        config = await self.gate.call("get_config")
        self.instance, self.progress_bytes = config["instance_id"], config.get("max_progress_bytes", PROGRESS_BYTES)
        for place in (self.place, *self.place.abandoned()):
            await self._replay(place)
        for lease in await self._held(resume=True):
            if lease["lease_id"] not in self.jobs:
                await self._resume(lease)

    async def _declare(self, types: Sequence[str | None]) -> None:
        """Declare what the functions take and give; a gate that does not want to know it is served all the same."""
        for type in types:
            if type is not None and (declaration := self.tasks[type].declaration):
                try:
                    await self.gate.call("declare_type", **self.me, type=type, **declaration)
                except http.Refusal as refusal:
                    if not is_hopeless(refusal):
                        raise
                    log.warning("%s: the type %s is not declared: %s", self.worker_id, type, refusal)

    async def _held(self, resume: bool) -> list[dict[str, Any]]:
        """Return this worker's leases, except those whose result only waits to be delivered."""
        ended_ids = {letter.fields["lease_id"] for letter in self.place.letters()}
        who = {**self.me, "resumption_id": self.resumption_id if resume else None}
        leases = (await self.gate.call("list_leases", **who, resume=resume))["leases"]
        return [lease for lease in leases if lease["lease_id"] not in ended_ids]

    async def _resume(self, lease: dict[str, Any]) -> None:
        if lease["type"] not in self.tasks and None not in self.tasks:
            return await self._release(lease)
        try:
            task = await self.gate.call("get_task", **self.me, task_id=lease["task_id"])
        except http.Refusal as refusal:
            if not is_hopeless(refusal):
                raise       # for example at a rate limit: the lease would run out unused
            return log.warning("task %s: cannot resume its lease: %s", lease["task_id"], refusal)
        log.info("task %s: resuming the lease of an earlier process", lease["task_id"])
        self._begin({**task, **lease})

    async def _turn(self) -> None:
        """Wait until fewer than `concurrency` jobs run, then claim tasks."""
        while len(self.jobs) >= self.concurrency:
            await asyncio.wait(self.jobs.values(), return_when=asyncio.FIRST_COMPLETED)
        await self._insist(self._claim)

    async def _claim(self) -> None:
        self.kept.clear()
        if self.declare and (fresh := [type for type in self.tasks if type not in self.declared]):
            self.declared.update(fresh)     # beside the work: a gate that has not done so yet loads a library for it
            declare = self._unless(self.stopping, self._insist(lambda: self._declare(fresh)))
            asyncio.ensure_future(declare).add_done_callback(take_error)
        left = await self._replay(self.place)
        asked = time.monotonic()
        # An undelivered result interrupts a waiting claim, because its lease may run out before the claim returns.
        reply = await self._unless(self.kept, self.gate.call(
            "lease_next", **self.me, accept_types=None if None in self.tasks else list(self.tasks),
            capabilities=self.capabilities, max_tasks=self.concurrency - len(self.jobs),
            lease_ttl_seconds=self.ttl_seconds, wait_seconds=SHORT_WAIT_SECONDS if left else CLAIM_WAIT_SECONDS,
            claim_id=self.claim_id, process=http.name_process()))
        if reply is None:
            return      # the next claim repeats this one, with the same id
        self.claimed = True
        self.claim_id = uuid.uuid4().hex    # the answer has arrived; only a lost answer needs the same id again
        self._warn(reply.get("warnings") or [])
        for offer in reply["tasks"]:
            self._begin(offer)
        if not reply["tasks"] and time.monotonic() - asked < http.FIRST_PAUSE:
            await asyncio.sleep(http.FIRST_PAUSE)    # a gate that is stopping answers waiting claims at once

    def _warn(self, texts: list[str]) -> None:
        """Log each warning of the gate once, until it goes away."""
        for text in texts:
            if text not in self.warned:
                log.warning("%s: %s", self.worker_id, text)
        self.warned = texts

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call until the call succeeds; raise if no claim has succeeded yet, and this shows that none can."""
        for failures in count(1):
            asked = time.monotonic()
            try:
                await call()
                self.tell_at = 0.0
                return
            except (http.Unreachable, http.Refusal) as error:
                if is_hopeless(error) and not self.claimed:
                    raise
                self._tell(error)
                if failures == 1 and isinstance(error,
                                                http.Unreachable) and time.monotonic() - asked > http.FIRST_PAUSE:
                    continue        # a waiting call was cut off: the gate may be back already
                await asyncio.sleep(max(http.pause_after(failures, 0.5), getattr(error, "retry_after", None) or 0.0))

    def _tell(self, error: Exception) -> None:
        """Log an error; for an unreachable gate only if it stays away longer than a restart, and then seldom."""
        now = time.monotonic()
        if not isinstance(error, http.Unreachable):
            log.warning("%s: %s", self.worker_id or "worker", error)
        elif not self.tell_at:
            self.tell_at = now + http.QUIET_SECONDS
        elif now > self.tell_at:
            log.warning("%s: %s; retrying", self.worker_id or "worker", error)
            self.tell_at = now + AWAY_LOG_SECONDS

    # Working on them.

    def _begin(self, offer: dict[str, Any]) -> None:
        lease_id = offer["lease_id"]
        if lease_id not in self.jobs:
            job = Job(offer, self.heart, self._lost, self.recorder, self.progress_bytes)
            job.can_cancel = self._task(job).is_async
            job.span = self.tracing.begin_run(offer) if self.tracing else None
            with job.span.current() if job.span else contextlib.nullcontext():      # both tasks copy the context
                job.work = asyncio.ensure_future(self._run(job))
                job.work.add_done_callback(take_error)
                doing = asyncio.ensure_future(self._do(job))
            self.heart.keep(job.pulse)
            self.jobs[lease_id] = doing
            doing.add_done_callback(lambda _: self.jobs.pop(lease_id, None))

    async def _run(self, job: Job) -> Any:
        if self.payloads is not None:
            try:
                await self.payloads.fetch_payload(job.offer)
            except ValueError as damaged:
                raise Fail(str(damaged), code="payload_damaged") from None
            except Exception as error:      # of a library that this module does not know
                raise Retry(f"the store does not give the payload: {error}", code="payload_unavailable") from error
        return await self._task(job).run(job)

    async def _stow(self, job: Job, letter: Letter) -> Letter:
        """Put a large result into the store."""
        try:
            return Letter(letter.operation, dict(await self.payloads.stow_result(letter.fields)))
        except Exception as error:
            log.warning("%s: the store does not take its result: %s", job, error)
            refused = Retry(f"the store does not take the result: {error}", code="result_unavailable")
            return self._letter(job, "fail", **self._task(job).failure(refused))

    def _task(self, job: Job) -> TaskFunction:
        return self.tasks.get(job.type) or self.tasks[None]

    async def _do(self, job: Job) -> None:
        """Run one task and report its result."""
        try:
            letter = await self._worked(job)
            if letter is not None and letter.operation == "complete" and self.payloads is not None:
                letter = await self._stow(job, letter)
            if job.has_printed:
                await asyncio.to_thread(job.end_output)
            job.note_end(letter.fields if letter else None)
            await self._deliver(job, letter)
        except Exception as flaw:       # of the function's error, say, which may raise whatever is asked of it
            log.exception("%s: internal error of this worker", job)
            error = {"code": "internal_error", "message": f"internal error of the worker: {type(flaw).__name__}"}
            await self._deliver(job, self._letter(job, "fail", error=error, retryable=True))
        finally:
            self.heart.drop(job.pulse)
            if job.span is not None:
                job.span.end()

    async def _worked(self, job: Job) -> Letter | None:
        """Wait for the function; return the report of its result, or None if there is nothing to report."""
        try:
            await asyncio.wait([job.work])
        except asyncio.CancelledError:
            await self._stopped(job)
            raise
        if job.lost.is_set():
            if job.reason == ASKED:
                log.info("%s: waits for an answer", job)
            else:
                log.warning("%s: dropped, the lease is lost (%s)", job, job.reason)
            return None
        return self._ending(job, self._task(job), job.work)

    async def _stopped(self, job: Job) -> None:
        """Stop a function, because this worker stops."""
        job.lose("stopping")
        await asyncio.wait([job.work], timeout=CANCEL_SECONDS if job.can_cancel else NOTICE_SECONDS)
        if not job.work.done():     # another worker would run the task at the same time
            self.unfinished.add(job.lease_id)
            log.warning("%s: its function did not stop in time; the lease is kept until it runs out", job)

    def _lost(self, job: Job) -> None:
        """Called from any thread: stop an async function; a plain one learns it from `job.lost` or its next report."""
        if job.can_cancel:
            with contextlib.suppress(RuntimeError):     # the loop may have ended
                self.loop.call_soon_threadsafe(job.work.cancel)

    def _ending(self, job: Job, task: TaskFunction, work: asyncio.Future[Any]) -> Letter:
        error: BaseException | None = Retry("the function canceled itself") if work.cancelled() else work.exception()
        try:
            if error is None:
                return self._letter(job, "complete", **self._result(job, work.result()))
            if isinstance(error, Park):
                return self._letter(job, "release_lease", **job.park(error))
        except (Fail, TypeError, ValueError) as invalid:
            error = invalid
        fields = task.failure(error, traced=self.tracebacks)
        how = f"attempt {job.attempt + 1} failed" if fields["retryable"] else "failed for good"
        expected = isinstance(error, Retry | Fail)
        log.warning("%s: %s: %s", job, how, describe_error(error), exc_info=None if expected else error)
        return self._letter(job, "fail", **fields)

    def _result(self, job: Job, value: Any) -> dict[str, Any]:
        done = value if isinstance(value, Done) else Done(value)
        if not done.artifacts and not done.delivery_proof:
            where = f"asyncgate://{self.instance}/tasks/{job.task_id}/result"
            done = msgspec.structs.replace(done, artifacts=[{"type": "inline", "uri": where}])
        return encode_completion(done)

    def _letter(self, job: Job, operation: str, **fields: Any) -> Letter:
        return Letter(operation, {**self.me, **job.under, **fields})

    # Reporting their ends.

    async def _deliver(self, job: Job, letter: Letter | None) -> None:
        """Deliver a result, with retries while the gate is unreachable."""
        tried, where = 0, ""
        kept: Letter | None = None

        def keep(left: Letter | None) -> None:
            """Keep on disk what the gate does not take at once: else a worker killed meanwhile does the work again."""
            nonlocal kept, where
            if left is None or kept is None or left.fields is not kept.fields:
                before, kept = kept, left
                where = self.place.keep(left) if left else ""
                if before:
                    self.place.forget(before)
        try:
            while letter and tried < self.delivery_tries and not self._superseded(job):
                slow = self.loop.call_later(SLOW_SECONDS, keep, letter)
                try:
                    letter, wait = await self._send(letter)
                finally:
                    slow.cancel()
                tried += 1
                keep(letter)
                if letter and tried < self.delivery_tries:
                    await asyncio.sleep(max(wait, http.pause_after(tried, 0.75)))
        finally:    # also if this worker is stopped meanwhile
            keep(letter if letter and not self._superseded(job) else None)
            if letter and where:
                log.warning("%s: its result is kept in %s until the gate has it: %s", job, where, letter.why)
                self.kept.set()

    def _superseded(self, job: Job) -> bool:
        """Whether the lease was lost so that the result is no longer wanted."""
        # "expired": the gate's clock decides, so try.  An end: an earlier attempt may have done it.
        gone = job.lost.is_set() and job.reason not in ("completed", "expired", "failed", "released", "stopping")
        if gone:
            log.warning("%s: its result is dropped, the lease is lost (%s)", job, job.reason)
        return gone

    async def _send(self, letter: Letter) -> tuple[Letter | None, float]:
        """Send a letter; return what is left to send (None if nothing), and the seconds to wait before that."""
        try:
            reply = await self.gate.call(letter.operation, **letter.fields)
            if letter.fields.get("retryable") and reply["status"] == "failed":
                log.warning("task %s: that was its last attempt; it failed for good", letter.fields["task_id"])
        except http.Unreachable as none:
            return replace(letter, why=str(none)), 0.0
        except http.Refusal as refusal:
            if is_temporary(refusal):
                return replace(letter, why=str(refusal)), refusal.retry_after or 0.0
            # The lease lives on behind these, and nobody else would tell that this cannot be.
            is_wrong = refusal.status in (400, 413) or refusal.code == "invalid_state_transition"
            if is_wrong and (changed := make_failure(letter, refusal)) != letter:
                return changed, 0.0
            log.warning("task %s: its result is dropped: %s (%s)", letter.fields["task_id"], refusal,
                        refusal.more.get("reason", refusal.code))
        return None, 0.0

    async def _replay(self, place: Place) -> bool:
        """Send the kept letters, each under its own lease; return whether any is left."""
        # The letters of running jobs are being delivered.
        while letters := [letter for letter in place.letters() if letter.fields["lease_id"] not in self.jobs]:
            left, _ = await self._send(letters[0])
            if left and replace(left, why="") == replace(letters[0], why=""):
                return True     # try again later
            if left:
                place.keep(left)
            if not place.forget(letters[0]):
                return True
        return False

    # Stopping.

    async def _drain(self) -> None:
        """Wait for the running jobs, at most `drain_seconds`."""
        if self.jobs:
            log.info("%s: stopping; jobs running: %d", self.worker_id, len(self.jobs))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.drain_seconds):
                    await self._unless(self.hurried, asyncio.wait(self.jobs.values()))

    async def _leave(self) -> None:
        """Stop the running jobs and release all leases, including those of a claim whose answer was lost."""
        doing = list(self.jobs.values())
        for job in doing:
            job.cancel()
        await asyncio.gather(*doing, return_exceptions=True)
        await asyncio.to_thread(self.heart.stop)
        self.recorder.close()
        with contextlib.suppress(http.Unreachable, http.Refusal):
            await self._replay(self.place)
            for lease in await self._held(resume=False):
                if lease["lease_id"] not in self.unfinished:
                    with contextlib.suppress(http.Refusal):      # the others are released all the same
                        await self._release(lease)
        self.place.close()

    async def _release(self, lease: dict[str, Any]) -> None:
        """Give a lease back; one that has ended since it was listed keeps the others from nothing."""
        try:
            await self.gate.call("release_lease", **self.me, task_id=lease["task_id"], lease_id=lease["lease_id"])
        except http.Refusal as refusal:
            if not is_hopeless(refusal):
                raise
            log.info("task %s: its lease is not released: %s", lease["task_id"], refusal)


def is_hopeless(error: Exception) -> bool:
    """Whether an error shows that no further call can succeed."""
    if isinstance(error, http.Refusal):
        return error.status < 500 and error.status != 429
    return isinstance(error, http.WrongAddress | http.NotAGate)


def make_failure(letter: Letter, refusal: http.Refusal) -> Letter:
    """Turn a result that the gate refuses for good into a failure that says so."""
    kept = {name: letter.fields[name] for name in (*ME, "task_id", "lease_id", "fence", "retryable")
            if name in letter.fields}
    what = {"complete": "result", "fail": "error"}.get(letter.operation, "park")
    error = {"code": refusal.code, "message": f"the gate refused the {what}: {refusal}"}
    return Letter("fail", {"retryable": False, **kept, "error": error}, letter.why)


def encode_completion(done: Done) -> dict[str, Any]:
    """Return the fields of a completion as JSON values; raises Fail if JSON cannot express the result."""
    try:
        return dict(to_json_value(done))
    except (TypeError, ValueError, RecursionError) as wrong:
        raise Fail(f"the result cannot be written as JSON: {wrong}", code="invalid_result") from None
