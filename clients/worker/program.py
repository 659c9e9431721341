"""The task functions of `asyncgate worker`: three built-in ones, or any program.

A program reads the payload from standard input and writes the result to standard output.  Lines that it writes to file
descriptor 3 are progress.  Exit status 0 completes the task, 75 (EX_TEMPFAIL) fails this attempt, and any other status
fails the task.  The program runs without a shell, in its own process group, which is killed when the lease ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from asyncgate.clients.finite import find_infinite
from asyncgate.clients.http import read_retry_after
from asyncgate.clients.worker import Done, Fail, Job, Lost, Park, Retry, Worker
from asyncgate.clients.worker.children import Children, hide_credential
from asyncgate.clients.worker.job import run_in_thread
from asyncgate.parts.process import logs

if TYPE_CHECKING:
    import httpx2

RETRY_STATUS = os.EX_TEMPFAIL
PROGRESS_FD = 3
KILL_SECONDS = 5.0              # pause between SIGTERM and SIGKILL
MOST_OUTPUT_BYTES = 16 * 2**20         # the most standard output of a program; the gate's own limit is lower
TAIL_BYTES = 2000               # how much of standard error the task's error quotes
LINE_BYTES = 64 * 2**10         # the longest line of progress
LONGEST_SLEEP = 7 * 86400.0

log = logging.getLogger("asyncgate.worker")
CHILDREN = Children()


# Built-in tasks.


async def echo(payload: Any) -> Any:
    """Return the payload."""
    return payload


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """The payload: how long to sleep, and what to return then."""

    seconds: float = 1.0
    result: Any = None


async def sleep_then_return(payload: Sleep, job: Job) -> Any:
    """Sleep so many seconds, even if the worker restarts meanwhile, then return the payload's `result`."""
    loop = asyncio.get_running_loop()
    left = min(payload.seconds if job.checkpoint is None else float(job.checkpoint), LONGEST_SLEEP)
    until = loop.time() + left
    while (left := until - loop.time()) > 0:
        job.save(left)
        await asyncio.sleep(min(left, 1.0))
    return payload.result


class Get(msgspec.Struct, forbid_unknown_fields=True):
    """The payload: the URL to fetch, and request headers."""

    url: str
    headers: dict[str, str] = {}


def http_get(allow: Sequence[str], plain: bool, timeout_seconds: float) -> Callable[[Get], Awaitable[dict[str, Any]]]:
    """Return a task function that fetches URLs of public addresses and of the allowed hosts."""
    from asyncgate.parts.model.errors import StartupError
    from asyncgate.parts.process import outgoing

    try:
        client = outgoing.make_client(allow=allow, plain=plain, redirects=outgoing.MOST_REDIRECTS,
                                      timeout_seconds=timeout_seconds, setting="--allow")
    except StartupError as wrong:
        raise ValueError(str(wrong)) from None

    async def get(payload: Get) -> dict[str, Any]:
        import httpx2

        try:
            outgoing.check_headers(payload.headers)
            return describe_answer(await client.get(payload.url, headers=payload.headers))
        except (outgoing.Barred, outgoing.Oversized, httpx2.InvalidURL, httpx2.TooManyRedirects,
                httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
            raise Fail(str(error), code="barred" if isinstance(error, outgoing.Barred) else "not_fetched") from None
        except httpx2.TransportError as error:
            raise Retry(str(error) or type(error).__name__, code="unreachable") from None

    return get


def describe_answer(answer: httpx2.Response) -> dict[str, Any]:
    """Return an answer as a result; status 429 or 503 fails the attempt."""
    if answer.status_code in (429, 503):
        raise Retry(f"the server answered {answer.status_code}", code="later",
                    after=read_retry_after(answer.headers.get("retry-after")))
    facts = {"status": answer.status_code, "url": str(answer.url), "content_type": answer.headers.get("content-type")}
    try:
        return {**facts, "text": answer.content.decode(answer.charset_encoding or "utf-8").replace("\0", "\ufffd")}
    except (UnicodeDecodeError, LookupError):
        return {**facts, "base64": base64.b64encode(answer.content).decode()}


# Programs.


class Program:
    """Any program as a task function."""

    def __init__(self, command: Sequence[str], worker: Worker) -> None:
        path = shutil.which(command[0])
        if path is None and os.path.isfile(command[0]):
            raise ValueError(f"{command[0]!r} is not executable: run chmod +x {command[0]}, or name its interpreter")
        if path is None:
            raise ValueError(f"there is no program {command[0]!r}{' on the PATH' * ('/' not in command[0])}")
        self.path, self.command, self.worker = path, list(command), worker

    async def __call__(self, payload: Any, job: Job) -> Any:
        """Run the program for one task."""
        run = Run(job, keeps_log=self.worker.keep_logs is not None)
        CHILDREN.guardian.tell(job.lease_id, "begins")
        try:
            run.begin(self.path, self.command, self.surroundings(job))
            CHILDREN.guardian.tell(job.lease_id, str(run.pid))
            return run.outcome(self.command[0], await run.ended(msgspec.json.encode(payload)))
        finally:
            CHILDREN.guardian.tell(job.lease_id, "ended")

    def surroundings(self, job: Job) -> dict[str, str]:
        """Return the environment of the program: the worker's without its credential, and variables about the task."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCGATE_")}
        variables = {"URL": self.worker.gate.url, "WORKER_ID": self.worker.worker_id, "WORKER_PID": str(os.getpid()),
                     "TASK_ID": job.task_id, "TASK_TYPE": job.type, "LEASE_ID": job.lease_id,
                     "FENCE": str(job.fence), "ATTEMPT": str(job.attempt)}
        earlier = {"CHECKPOINT": job.checkpoint, "PROGRESS": job.progress}
        variables |= {name: msgspec.json.encode(value).decode() for name, value in earlier.items() if value is not None}
        traced = {name.upper(): value for name, value in job.trace.items()}     # as OpenTelemetry names them
        return kept | traced | {f"ASYNCGATE_{name}": value for name, value in variables.items()}


class Run:
    """One run of a program: its pipes, its output, its process group."""

    def __init__(self, job: Job, *, keeps_log: bool = False) -> None:
        self.job, self.keeps_log, self.pid = job, keeps_log, 0
        self.files: list[Any] = []      # our ends of the pipes
        self.out, self.tail, self.artifacts, self.parked = bytearray(), bytearray(), None, None
        self.complaints = LineSplitter(self._log)

    artifacts: Any
    parked: Park | None     # as its last line of progress with `park` says
    exit: asyncio.Future[int]

    @contextlib.contextmanager
    def pipes(self) -> Iterator[list[int]]:
        """Open a pipe for each of the descriptors 0 to 3, and close the program's ends after it was started."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ends: list[int] = []
            for number in range(PROGRESS_FD + 1):
                read, write = os.pipe()
                end, mine, mode = (read, write, "wb") if number == 0 else (write, read, "rb")
                self.files.append(ours.enter_context(os.fdopen(mine, mode, -1 if number == 0 else 0)))
                try:    # number the end above 0 to 3, so that no dup2 overwrites another end
                    ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, PROGRESS_FD + 1))
                finally:
                    os.close(end)
                theirs.callback(os.close, ends[-1])
            yield ends
            ours.pop_all()      # the program runs, so these stay open

    def begin(self, path: str, command: list[str], surroundings: dict[str, str]) -> None:
        """Start the program without a shell, and start to wait for its end."""
        with self.pipes() as ends, CHILDREN.lock:
            self.pid = os.posix_spawn(
                path, command, surroundings, setpgroup=0, setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
                file_actions=[(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends)])
            CHILDREN.running.add(self.pid)
        self.exit = asyncio.ensure_future(
            run_in_thread(lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])))

    async def ended(self, payload: bytes) -> int:
        """Write the payload and read the program's output until it ends; kill it if this call is cancelled."""
        heard = (self._result, self._complaint, LineSplitter(self._progress))
        threads = [run_in_thread(feed_pipe, self.files[0], payload),
                   *map(partial(run_in_thread, read_pipe), self.files[1:], heard)]
        talking = [asyncio.ensure_future(coroutine) for coroutine in threads]
        try:
            status = await asyncio.shield(self.exit)
        except asyncio.CancelledError:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self.exit], timeout=KILL_SECONDS)
            self._signal(signal.SIGKILL)
            await asyncio.wait([self.exit])
            raise
        finally:
            self._signal(signal.SIGKILL)        # children that it left running would hold the pipes open
            CHILDREN.running.discard(self.pid)
            await run_in_thread(CHILDREN.sweep, self.job.lease_id)
            done, _ = await asyncio.wait(talking, timeout=KILL_SECONDS)
            wrong = [error for job in done if (error := job.exception())]
        if wrong:
            raise wrong[0]
        return status

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sign)

    def _result(self, part: bytes) -> None:
        self.out += part
        if len(self.out) > MOST_OUTPUT_BYTES:
            self._signal(signal.SIGKILL)
            raise Fail(f"the program wrote more than {MOST_OUTPUT_BYTES} bytes", code="result_too_large")

    def _complaint(self, part: bytes) -> None:
        sys.stderr.buffer.write(part)
        sys.stderr.buffer.flush()
        self.tail = (self.tail + part)[-TAIL_BYTES:]
        if self.keeps_log:
            self.complaints(part)

    def _log(self, line: bytes) -> None:
        self.job.log(line.decode(errors="replace"))

    def _progress(self, line: bytes) -> None:
        progress = read_json_or_text(line, "progress")
        if isinstance(progress, dict) and "artifacts" in progress:
            self.artifacts = progress.pop("artifacts")
        if isinstance(progress, dict) and "park" in progress:
            self.parked = read_park(progress.pop("park"))
        if isinstance(progress, dict) and "checkpoint" in progress:
            self.job.save(progress.pop("checkpoint"))
        if progress not in ({}, ""):
            self.job.report(progress)

    def outcome(self, name: str, status: int) -> Done:
        """Return the result, or raise Retry or Fail, by the exit status."""
        if status == 0:
            result = read_json_or_text(bytes(self.out), "result") if self.out.strip() else None
            return Done(result, artifacts=self.artifacts)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        tail = self.tail.decode(errors="replace").replace("\0", "\ufffd").strip()
        message = f"{name} {how}" + (f": {tail}" if tail else "")
        if status == RETRY_STATUS and self.parked is not None:
            raise self.parked
        if status == RETRY_STATUS or status < 0:
            raise Retry(message, code=f"exit_{status}" if status > 0 else f"signal_{-status}")
        raise Fail(message, code=f"exit_{status}")


class LineSplitter:
    """Splits a stream of parts into lines."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.heard, self.rest = heard, b""

    def __call__(self, part: bytes) -> None:
        """Take a part; an empty part marks the end."""
        *lines, self.rest = (self.rest + part).split(b"\n")
        if not part or len(self.rest) > LINE_BYTES:
            lines, self.rest = [*lines, *filter(None, [self.rest])], b""
        for line in lines:
            self.heard(line)


def read_park(when: Any) -> Park:
    """Return what parks a task: so many seconds, or until a time; raises Fail for anything else."""
    try:
        return Park(until=datetime.fromisoformat(when)) if isinstance(when, str) else Park(after=float(when))
    except (TypeError, ValueError):
        raise Fail(f"park is {when!r}; it takes seconds, or a time such as 2026-12-24T18:00:00Z",
                   code="invalid_park") from None


def read_json_or_text(text: bytes, name: str) -> Any:
    """Decode JSON; return anything else as text.  Raises Fail for what would be JSON if a number were finite."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        with contextlib.suppress(ValueError, RecursionError):      # a word alone is a text
            if text.strip()[:1] in (b"{", b"[") and (flaw := find_infinite(json.loads(text), name)):
                raise Fail(f"{flaw}: JSON has no such number", code="invalid_result") from None
        return text.decode(errors="replace").replace("\0", "\ufffd").rstrip("\n")


def read_pipe(file: BinaryIO, heard: Callable[[bytes], None]) -> None:
    """Read a pipe to its end, which is an empty part; runs in its own thread."""
    with file, contextlib.suppress(Lost):       # a lost lease is reported elsewhere
        while part := file.read(2**16):
            heard(part)
        heard(b"")


def feed_pipe(file: BinaryIO, text: bytes) -> None:
    """Write to a pipe and close it; runs in its own thread.  The program may close the pipe without reading it."""
    with contextlib.suppress(BrokenPipeError), file:
        file.write(text)


# The command.


BUILT_IN_TASKS: dict[str, Callable[..., Any]] = {
    "echo": echo, "sleep_then_return": sleep_then_return, "http_get": http_get}


def run_worker(
        what: Sequence[str], command: Sequence[str], *, types: Sequence[str], allow: Sequence[str], plain_http: bool,
        timeout_seconds: float, quiet: bool, **about: Any) -> None:
    """Run a worker until it is stopped: of a program, or of built-in types, of which one may have other names."""
    start_logging(logging.WARNING if quiet else logging.INFO)
    worker = Worker(about.pop("url"), declare=False, **about)
    for name in what:
        task = http_get(allow, plain_http, timeout_seconds) if name == "http_get" else BUILT_IN_TASKS[name]
        worker.task(*(types or [name]))(task)
    if command:
        worker.task(*types)(Program(command, worker))
        hide_credential()
        CHILDREN.adopt()
    log.info("%s takes %s of %s", worker.worker_id or "this worker", ", ".join(types or what), worker.gate.url)
    worker.run()


def start_logging(level: int) -> None:
    """Log to stderr, one line per record."""
    handler = logging.StreamHandler()
    handler.setFormatter(logs.Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("httpx2").setLevel(logging.WARNING)       # at INFO it logs every request
    logging.basicConfig(level=level, handlers=[handler], force=True)
