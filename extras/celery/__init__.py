"""A Celery application served by a gate, unchanged: without a broker and without a result backend.

    use_gate(app)                           # where work is handed over: delay, apply_async, chains
    serve(app, worker_id="shop-1")          # in a worker, instead of `celery -A shop worker`

A task's name is its type.  Signals, `on_failure`, `self.retry`, autoretry, links and chains work as they do with
Celery; arguments and results are JSON.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from celery import current_task, states
from celery.app.trace import build_tracer

from asyncgate.clients import SyncGate, SyncHandle
from asyncgate.clients.worker import Fail, Job, Retry, Worker

PASSED = {"link": "callbacks", "link_error": "errbacks", "chain": "chain"}      # from options of a call to the request
CELERY_STATES = {"queued": states.PENDING, "leased": states.RECEIVED, "running": states.STARTED,
                 "succeeded": states.SUCCESS, "failed": states.FAILURE, "canceled": states.REVOKED}
MOST_ATTEMPTS = 1000        # that a gate takes


class Result:
    """What `delay` gives: a task of the gate, with the members of Celery's AsyncResult that callers use."""

    def __init__(self, handle: SyncHandle) -> None:
        self.handle, self.id = handle, handle.task_id
        self.revoke = handle.cancel

    def get(self, timeout: float | None = None, **_: Any) -> Any:
        """Wait for the result; raises TaskFailed, TaskCanceled or TimeoutError."""
        return self.handle.result(timeout)

    @property
    def state(self) -> str:
        """How far the task is, in Celery's words."""
        return str(CELERY_STATES[self.handle.status()])


def use_gate(app: Any, gate: SyncGate | None = None) -> None:
    """Let an application hand its work to a gate: to that of the environment, by default."""
    app.send_task = partial(send_task, app, gate or SyncGate(agent_id="celery"))


def send_task(app: Any, gate: SyncGate, name: str, args: Any = (), kwargs: Any = None, countdown: float | None = None,
              eta: datetime | None = None, task_id: str | None = None, expires: Any = None, chord: Any = None,
              priority: int | None = None, **more: Any) -> Result | None:
    """Create a task in the gate."""
    if chord is not None:
        raise NotImplementedError("a chord needs a result backend: let a task wait for its children instead")
    if task_id and current_task and current_task.request.id == task_id:
        return None     # `retry` hands its own task over once more, and here the gate does that
    payload = {"id": task_id, "args": list(args or ()), "kwargs": kwargs or {},
               "expires": None if expires is None else time.time() + find_delay(expires),
               **{kept: more[option] for option, kept in PASSED.items() if more.get(option)}}
    most = getattr(app.tasks.get(name), "max_retries", 3)
    return Result(gate.submit(
        name, payload, key=task_id, priority=priority,
        delay_seconds=find_delay(eta if countdown is None else countdown),
        max_attempts=MOST_ATTEMPTS if most is None else min(most + 1, MOST_ATTEMPTS)))


def find_delay(when: Any) -> float:
    """Return how many seconds there are until a time, or are meant by a number."""
    if isinstance(when, datetime):
        return max(0.0, (when.astimezone() - datetime.now(UTC)).total_seconds())
    return float(when or 0)


def serve(app: Any, **options: Any) -> None:
    """Work on the tasks of an application until SIGTERM; the options are those of Worker."""
    use_gate(app)
    app.loader.import_default_modules()
    app.finalize()
    worker = Worker(**options)
    for name, task in app.tasks.items():
        if not name.startswith("celery."):
            worker.task(name, retry=())(partial(run, build_tracer(name, task, app=app, eager=True)))
    worker.run()


def run(tracer: Any, payload: Any, job: Job) -> Any:
    """Do one task as Celery's worker does it: an error is for good, unless the task asks for another try."""
    if payload.get("expires") and payload["expires"] < time.time():
        raise Fail("it expired before it was begun", code="expired")
    request = {"args": [], "kwargs": {}, **payload, "id": payload.get("id") or job.task_id, "retries": job.attempt,
               "is_eager": False, "delivery_info": {}}
    done = tracer(request["id"], request["args"], request["kwargs"], request)
    if done.info is not None and done.info.state == states.RETRY:
        raise Retry(str(done.info.retval.exc or "again"), after=find_delay(done.info.retval.when))
    if done.info is not None and done.info.state == states.FAILURE:
        raise done.info.retval
    return done.retval
