"""One task of a worker: what its function gets, may return, and may raise."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from operator import itemgetter
from typing import Any, Literal, get_type_hints

import msgspec

from asyncgate.clients.finite import to_json_value
from asyncgate.clients.values import check_result, make_reader
from asyncgate.clients.worker import logs
from asyncgate.clients.worker.asking import ASKED, Answer, Inquiry, Question
from asyncgate.clients.worker.declaring import describe_function
from asyncgate.clients.worker.heart import Heart, Pulse
from asyncgate.clients.worker.journal import Journal, Recorder, StepsLost, TooLarge, is_in_loop
from asyncgate.clients.worker.output import Printer, clean_text, stream_async, stream_plain, to_part
from asyncgate.parts.process.spans import TaskRun

CHECKPOINT = "checkpoint"       # the field of the progress from which the next worker resumes
MESSAGE_LENGTH, MOST_CAUSES = 4000, 5
MOST_FRAMES = 20                # of a traceback
# No further attempt can end otherwise.
HOPELESS = (NameError, SyntaxError, NotImplementedError, StepsLost, TooLarge)
LOG_BYTES = 100_000             # of log lines that one run may keep
PROGRESS_BYTES = 65_536         # that a gate takes which does not say it
# A future refuses the first; the others would stop the event loop.
UNSPEAKABLE = (StopIteration, asyncio.CancelledError, SystemExit, KeyboardInterrupt)

log = logging.getLogger("asyncgate.worker")


class Retry(Exception):
    """Raise it in a task function: this attempt failed, another may succeed, at the earliest `after` seconds.

    `stop_limit` names a limit of the task of which nobody gets anything for so long, as after a provider's 429.
    """

    def __init__(self, message: str = "try again", *, after: float | None = None, code: str = "retry",
                 stop_limit: str | None = None) -> None:
        super().__init__(message)
        self.after, self.code, self.stop_limit = after, code, stop_limit


class Park(Exception):
    """Raise it in a task function that has to wait: the task is offered again `after` seconds, or `until` a time.

    Or it waits for its `children`, until "all" have ended, or "any" more; with a time, until that at most.  It costs no
    attempt, and the lease is given back meanwhile.  `checkpoint` is for the next worker, as `job.save`.
    """

    def __init__(self, message: str | None = None, *, after: float | None = None, until: datetime | None = None,
                 children: Literal["all", "any"] | None = None, checkpoint: Any = None) -> None:
        if (after is not None and until is not None) or (after, until, children) == (None, None, None):
            raise TypeError('Park takes after (seconds) or until (a datetime), or children ("all" or "any")')
        super().__init__(message or "parked")
        self.reason, self.after, self.children, self.checkpoint = message, after, children, checkpoint
        self.until = None if until is None else until.astimezone().isoformat()


class Fail(Exception):
    """Raise it in a task function: the task failed, and another attempt would fail too."""

    def __init__(self, message: str = "failed", *, code: str = "failed", detail: Any = None) -> None:
        super().__init__(message)
        self.code, self.detail = code, detail


class Lost(Exception):
    """The lease is gone: `reason` is canceled, expired, superseded, stopping or unknown, or as the worker ended it.

    That is completed, failed, released (also parked) or asked; with a ledger it may also be withdrawn.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the lease is lost: {reason}")
        self.reason = reason


class Done(msgspec.Struct, rename={"summary": "result_summary"}):
    """What a task function returns if it has more than its result: artifacts, a delivery proof, a summary.

    Without artifacts and proof, the result counts as delivered inline, in the task.
    """

    result: Any = None
    artifacts: Any = None
    delivery_proof: dict[str, Any] | None = None
    summary: str | None = None


class Job:
    """A task on lease, as its function sees it.  All of it may be used from any thread."""

    def __init__(self, offer: dict[str, Any], heart: Heart, lost: Callable[[Job], None], recorder: Recorder,
                 progress_bytes: int = PROGRESS_BYTES) -> None:
        self.offer, self.progress_bytes = offer, progress_bytes
        self.task_id, self.lease_id, self.fence = offer["task_id"], offer["lease_id"], offer["fence"]
        self.type, self.attempt = offer["type"], offer["attempt"]
        self.progress = offer.get("progress")       # the latest of an earlier lease
        self.checkpoint = self.progress.get(CHECKPOINT) if isinstance(self.progress, dict) else None
        # How each of its children has ended, by id; None while it has none.
        family = offer.get("children")
        self.children = None if family is None else {end["task_id"]: end["status"] for end in family["ends"]}
        self.lost, self.reason = threading.Event(), ""
        self.under = {"task_id": self.task_id, "lease_id": self.lease_id, "fence": self.fence}
        self.pulse = Pulse(self.under, offer["renew_every_seconds"], self.lose)
        self._heart, self._tell, self._report = heart, lost, {}
        self._journal = Journal(self, recorder, offer.get("steps") or 0, lost=bool(offer.get("steps_lost")))
        self._printer = Printer(self, recorder, offer.get("chunks") or 0)

    work: asyncio.Future[Any]
    can_cancel = False              # whether its function is awaited now, and so can be stopped
    span: TaskRun | None = None     # if this process has a provider of spans
    _report: dict[str, Any]
    _log_left = LOG_BYTES

    def __str__(self) -> str:
        return f"task {self.task_id} ({self.type})"

    def report(self, progress: Any) -> None:
        """Report progress.  It returns at once; newer progress replaces older that is not sent yet.  Raises Lost."""
        progress = to_json_value(progress, "progress")
        try:
            self._send(progress if isinstance(progress, dict) else {"progress": progress}, self.checkpoint)
        except TooLarge as flaw:        # it is for people, and must not take the checkpoint with it
            self.pulse.refused = flaw
            log.warning("%s: its progress is not sent: %s", self, flaw)

    def save(self, checkpoint: Any) -> None:
        """Save a checkpoint from which the next worker can resume if this worker dies.  Raises Lost, or TooLarge.

        It returns at once; `flush` waits until the gate has stored the checkpoint.  A checkpoint replaces the one
        before; what grows with the work is kept by `step`.
        """
        self._send(self._report, to_json_value(checkpoint, "checkpoint"))

    def _send(self, report: dict[str, Any], checkpoint: Any) -> None:
        self.check()
        self._heart.tell(self.pulse, self.note(report, checkpoint))

    def note(self, report: dict[str, Any], checkpoint: Any) -> dict[str, Any]:
        """Note a report and a checkpoint, and return the progress that both are; raises TooLarge."""
        progress = report if checkpoint is None else {**report, CHECKPOINT: checkpoint}
        if (size := len(msgspec.json.encode(progress))) > self.progress_bytes:
            raise TooLarge(f"report and checkpoint of {self} have {size} bytes, and the gate takes "
                           f"{self.progress_bytes} (max_progress_bytes): record what is done by job.step, or save a "
                           "pointer")
        self._report, self.checkpoint = report, checkpoint
        return progress

    def step(self, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a function unless an earlier run of the task has done so, and return what it gave: `step("fetch", get)`.

        The gate keeps what each step gave, as JSON, in the order in which the steps were begun; the task function must
        take the same steps in the same order each time.  In an async task function await it.  A worker that dies
        between a step and its record does that step again.  Raises StepMismatch if another step was recorded, and Lost.
        """
        return self._journal.step(name, function, *given, **named)

    def recall(self) -> Any:
        """Return name and value of each step of earlier runs; the next step comes behind them.

        For a function that keeps a log in its steps, instead of taking the same ones again.  In an async task function
        await it.
        """
        return run_in_thread(self._journal.recall) if is_in_loop() else self._journal.recall()

    def ask(self, key: str, message: str, *, schema: Mapping[str, Any] | None = None,
            to: str | Mapping[str, str] | None = None, expires_in_seconds: float | None = None,
            on_expiry: Literal["resume", "fail"] = "resume", checkpoint: Any = None,
            keep_lease: bool | float = False) -> Any:
        """Ask somebody a question and return the Answer: `job.ask("deploy", "Deploy version 7?", to="human:boss")`.

        While there is none, this ends the function: the lease is given back, and the task is offered again with the
        answer; its function then comes to the same question, and gets it.  `keep_lease`: wait under the lease instead,
        or a number, so many seconds.  `key` names the question once in the life of the task.  `checkpoint` is as for
        `save`.  In an async task function await it.  Raises Refusal if the gate refuses the question, and Lost.
        """
        question = Question(key=key, message=message, schema=schema, to=to, expires_in_seconds=expires_in_seconds,
                            on_expiry=on_expiry)
        return self._ask((question,), checkpoint, keep_lease, itemgetter(key))

    def ask_all(self, *questions: Question, checkpoint: Any = None, keep_lease: bool | float = False) -> Any:
        """Ask several questions at once, as `ask` does, and return a dict of their Answers by key."""
        return self._ask(questions, checkpoint, keep_lease, dict)

    def _ask(self, questions: tuple[Question, ...], checkpoint: Any, keep_lease: bool | float,
             pick: Callable[[dict[str, Answer]], Any]) -> Any:
        asking = Inquiry(self, questions)
        if checkpoint is not None:
            self.save(checkpoint)

        def ask() -> Any:
            if self.has_printed:
                self._printer.flush()       # the question may end the lease
            return pick(asking.ask(keep_lease))
        return run_in_thread(ask) if is_in_loop() else ask()

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print to the output of the task, which others can follow while it is worked on.  Raises Lost.

        It returns at once, unless the gate is slow; what is printed within a moment is sent together.
        """
        self._printer.print(sep.join(map(str, values)) + end)

    def log(self, text: str) -> None:
        """Keep a line of a log with the task, beside its output: 100 KB in one run; what comes after is left out."""
        if self._log_left > 0 and not self.lost.is_set():
            self._log_left -= len(text.encode(errors="replace")) + 1
            left_out = "" if self._log_left > 0 else "(further lines of this run are not kept)\n"
            self._printer.print(f"{text}\n{left_out}", stream="log")

    def stream(self, chunks: Any) -> Any:
        """Append each chunk of an iterable to the output of the task, and yield it: `for token in job.stream(tokens)`.

        A chunk is a text or anything that JSON can say.  Of an asynchronous iterable it is `async for`.
        """
        return (stream_async if hasattr(chunks, "__aiter__") else stream_plain)(self._printer, chunks)

    def message(self, *parts: Any) -> None:
        """Say something to whoever follows the task, as a message of its own in A2A.  Raises Lost.

        A part is a text, a part as A2A has it, or anything else that JSON can say.
        """
        self._printer.append({"role": "ROLE_AGENT", "parts": [to_part(part) for part in parts]})

    def artifact(self, *parts: Any, name: str = "artifact", append: bool = False) -> None:
        """Give an artifact of this name while the task is worked on, or append to it; without append it is replaced."""
        self._printer.append({"artifactId": name, "append": append, "parts": [to_part(part) for part in parts]})

    def end_output(self) -> None:
        """Wait until what was printed is at the gate, so that it stands before the end of the task."""
        if not self._printer.flush():
            log.warning("%s: some of its output could not be sent in time", self)
        self._printer.close()

    @property
    def has_printed(self) -> bool:
        """Whether the function has given output."""
        return self._printer.thread is not None

    def park(self, parked: Park) -> dict[str, Any]:
        """Return the fields of the `release_lease` request that parks the task; raises TooLarge, or TypeError."""
        if parked.checkpoint is not None:
            self.note(self._report, to_json_value(parked.checkpoint, "checkpoint"))
        return {**self.describe_checkpoint(), "after_seconds": parked.after, "until": parked.until,
                "reason": parked.reason, "until_children": parked.children}

    def describe_checkpoint(self) -> dict[str, Any]:
        """Return what a call that ends the lease says of the progress: what may not be sent yet, if there is any."""
        if self.checkpoint is None and not self._report:
            return {}
        return {"checkpoint": self.note(self._report, self.checkpoint)}

    def call(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Call an operation as this worker until the gate answers; raises Refusal, and Lost."""
        return dict(self._journal.insist(lambda gate: gate.call(operation, **self._journal.recorder.me, **fields)))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until the gate has answered all reports; return whether it has the newest, which it may have refused.

        It blocks: in async code, use a thread.
        """
        heard = self.pulse.silent.wait(timeout_seconds)
        self.check()
        return heard and self.pulse.refused is None

    @property
    def trace(self) -> dict[str, str]:
        """The W3C trace context to pass on (`traceparent`, `tracestate`): this run's, or without a provider the task's.

        Without a provider and without a creator's trace it is empty.
        """
        if self.span is not None:
            return self.span.headers()
        return {name: self.offer[name] for name in ("traceparent", "tracestate") if name in self.offer}

    def note_end(self, report: dict[str, Any] | None) -> None:
        """Note in the span how the run has ended: by a report, or without one because the lease is lost."""
        if self.span is not None and report is None and self.reason != ASKED:
            self.span.note_failure(self.reason or "lost")
        elif self.span is not None and report is not None and "error" in report:
            self.span.note_failure(str(report["error"].get("code", "failed")))

    def check(self) -> None:
        """Raise Lost if the lease is gone."""
        if self.lost.is_set():
            raise Lost(self.reason)

    def lose(self, reason: str) -> None:
        """Mark the lease as lost, and stop the function."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            self._tell(self)

    def end(self, reason: str) -> None:
        """Mark the lease as ended by the function itself, which is not stopped."""
        self._heart.drop(self.pulse)
        self.reason = reason
        self.lost.set()


class TaskFunction:
    """A task function: what it takes, how it runs, which of its errors allow another attempt."""

    def __init__(self, function: Callable[..., Any], retry: tuple[type[BaseException], ...], payload: Any,
                 description: str | None = None) -> None:
        self.function, self.retry = function, retry
        core = function
        while isinstance(core, functools.partial):
            core = core.func
        body = core if inspect.isroutine(core) else type(core).__call__
        self.is_async = inspect.iscoroutinefunction(body)       # another may still return what can be awaited
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise TypeError(f"{function!r} yields: return a list, and report progress with job.report")
        names = [parameter for parameter in inspect.signature(function).parameters.values()
                 if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                 and parameter.default is parameter.empty]
        if len(names) not in (1, 2):
            raise TypeError(f"{function!r} must take one argument (the payload) or two (the payload and the job); a "
                            "decorator shows those of its function by functools.wraps")
        self.takes_job = len(names) == 2
        declared = find_annotations(body, names[0].name)
        takes, gives = declared.get(names[0].name, Any) if payload is None else payload, declared.get("return", Any)
        try:
            self.read = make_reader(takes)
            check_result(gives)
        except TypeError as wrong:
            raise TypeError(f"{function!r} cannot be a task function: {wrong}") from None
        self.declaration = describe_function(core, takes, Any if gives is Done else gives, description)

    def decoded(self, payload: Any) -> Any:
        """Convert the payload into the function's type; raises Fail if that is impossible."""
        try:
            return self.read(payload)
        except ValueError as wrong:
            raise Fail(f"the payload is invalid for this task: {wrong}", code="invalid_payload") from None

    async def run(self, job: Job) -> Any:
        """Call the function, a plain one in its own thread, and await what it returns if that can be awaited."""
        logs.running.set(job)
        given = [self.decoded(job.offer["payload"]), *([job] if self.takes_job else [])]
        try:
            value = await (self.function(*given) if self.is_async else run_in_thread(self.function, *given))
            while inspect.isawaitable(value):
                job.can_cancel = True
                if job.lost.is_set() and inspect.iscoroutine(value):
                    value.close()
                job.check()
                value = await value
            return value
        except (SystemExit, KeyboardInterrupt) as error:    # they would stop the event loop, and so the worker
            raise RuntimeError(f"the function ended with {error!r}") from error

    def failure(self, error: BaseException, *, traced: bool = False) -> dict[str, Any]:
        """Return the fields of the `fail` request for an error."""
        code = getattr(error, "code", None) if isinstance(error, Retry | Fail) else type(error).__name__
        report: dict[str, Any] = {"code": clean_text(str(code), MESSAGE_LENGTH), "message": describe_error(error)}
        if isinstance(error, Fail):
            with contextlib.suppress(TypeError, ValueError, RecursionError):    # leave out a detail that is not JSON
                report |= {} if error.detail is None else {"detail": to_json_value(error.detail)}
            return {"error": report, "retryable": False}
        if isinstance(error, Retry):
            after = error.after if isinstance(error.after, int | float) and 0 <= error.after < math.inf else None
            stops = {} if error.stop_limit is None else {"stop_limit": error.stop_limit}
            return {"error": report, "retryable": True, "retry_after_seconds": after, **stops}
        if traced and (trace := describe_traceback(error)):
            report["traceback"] = trace
        return {"error": report, "retryable": isinstance(error, self.retry) and not isinstance(error, HOPELESS)}


def describe_error(error: BaseException, depth: int = 0) -> str:
    """Return the text of an error and of its causes; the class of one whose text is empty or raises."""
    try:
        text = clean_text(str(error), MESSAGE_LENGTH) or type(error).__name__
    except Exception as worse:
        text = f"{type(error).__name__}, and its text raised {type(worse).__name__}"
    cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    more = "" if cause is None or depth >= MOST_CAUSES else describe_error(cause, depth + 1)
    return text if more in text else clean_text(f"{text}: {more}", MESSAGE_LENGTH)


def describe_traceback(error: BaseException) -> str:
    """Return the end of an error's traceback, from the function's own first line on; empty if it did not run."""
    frame = error.__traceback__
    while frame is not None and os.path.dirname(frame.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        frame = frame.tb_next
    if frame is None:
        return ""
    text = "".join(traceback.format_exception(type(error), error, frame, limit=-MOST_FRAMES)).rstrip()
    return clean_text(text if len(text) <= MESSAGE_LENGTH else f"…{text[1 - MESSAGE_LENGTH:]}")


def find_annotations(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the annotated types of a function, of which the parameter with this name matters."""
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as unknown:
        raise TypeError(f"the type of {name!r} is unknown ({unknown}); pass it to task() as payload=") from None


async def run_in_thread(function: Callable[..., Any], *given: Any) -> Any:
    """Run a function in a daemon thread, which does not keep the process alive."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(value) if error is None else done.set_exception(error)

    def run() -> None:
        value: Any = None
        wrong: BaseException | None = None
        try:
            value = context.run(function, *given)
        except UNSPEAKABLE as error:
            wrong = RuntimeError(f"the function ended with {error!r}")
        except BaseException as error:      # every error: else the caller would wait for ever
            wrong = error
        with contextlib.suppress(RuntimeError):     # the worker's loop may have ended
            loop.call_soon_threadsafe(settle, value, wrong)

    threading.Thread(target=run, name=getattr(function, "__name__", "task"), daemon=True).start()
    return await done
