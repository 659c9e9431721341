"""Connect an AI worker to a gate: `asyncgate worker --ai profile.yaml`, or `task(executor)` for your own Worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncgate.clients.worker import Done, Fail, Job, Retry, Worker
from asyncgate.clients.worker.children import hide_credential
from asyncgate.clients.worker.program import start_logging
from asyncgate.extras.ai_worker import Executor, ReportTooLarge
from asyncgate.extras.ai_worker.model import JobFailed
from asyncgate.extras.ai_worker.profile import ProfileError, Secrets, load_profile
from asyncgate.parts.process.forks import obey_signals

log = logging.getLogger("asyncgate.worker.ai")
HEARD_SECONDS = 2.0         # how long a step waits for the previous report; an unreachable gate gets the report later
LONGEST_PAUSE = 3600.0      # the most that an endpoint can delay the next attempt


def task(executor: Executor) -> Callable[[Any, Job], Awaitable[Done]]:
    """Return the task function of an open executor."""
    async def work(payload: Any, job: Job) -> Done:
        async def report(progress: dict[str, Any]) -> None:
            job.checkpoint = progress.pop("checkpoint")     # the next line sends it
            job.report(progress)
            await asyncio.to_thread(job.flush, HEARD_SECONDS)
            if job.pulse.refused:
                raise ReportTooLarge

        try:
            return await executor.execute(job.offer, report, job.lost.is_set)
        except JobFailed as failed:
            raise make_ending(failed) from None

    return work


def make_ending(failed: JobFailed) -> Retry | Fail:
    """Translate the failure of a job into the worker's Retry or Fail."""
    if not failed.retryable:
        return Fail(failed.message, code=failed.code)
    after = None if failed.retry_after is None else min(failed.retry_after, LONGEST_PAUSE)
    return Retry(failed.message, after=after, code=failed.code)


def run_ai_worker(path: str, *, types: Sequence[str], capabilities: Sequence[str], quiet: bool, url: str | None,
        **about: Any) -> None:
    """Run an AI worker until it is stopped; raises ProfileError if its profile is invalid or its tools do not start."""
    start_logging(logging.WARNING if quiet else logging.INFO)
    profile = load_profile(path)
    executor = Executor(profile)
    worker = Worker(url, capabilities=[*profile.capabilities, *capabilities], declare=False, **about)
    hide_credential()       # from the MCP servers that it starts
    for handler in logging.getLogger().handlers:
        handler.addFilter(Discreet(executor.secrets))
    try:
        asyncio.run(serve_ai_worker(worker, executor, types or profile.types))
    except JobFailed as failed:
        raise ProfileError(f"{failed.message} (file {path})") from None


class Discreet(logging.Filter):
    """Keeps secrets out of the log, also for other loggers: the MCP SDK logs a server's invalid messages."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self.secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the secrets in a record."""
        record.msg, record.args = self.secrets.hidden(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = self.secrets.hidden(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True


async def serve_ai_worker(worker: Worker, executor: Executor, types: Sequence[str]) -> None:
    """Work until SIGTERM or SIGINT.  Tools that fail at the start stop the worker; later they fail only the attempt."""
    async with executor:
        tools = await executor.toolbox.open()
        worker.task(*types)(task(executor))
        obey_signals(worker.stop)
        log.info("%s takes %s of %s; %s with %d tools", worker.worker_id or "this worker", ", ".join(types),
                 worker.gate.url, executor.profile.model, len(tools))
        await worker.serve()
