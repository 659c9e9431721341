"""An AI worker at a gate: `asyncgate worker --ai profile.yaml`, or `task(executor)` for a Worker of one's own."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncgate.clients.ai_worker import Executor, ReportTooLarge
from asyncgate.clients.ai_worker.model import JobFailed
from asyncgate.clients.ai_worker.profile import ProfileError, Secrets, load_profile
from asyncgate.clients.worker import Done, Fail, Job, Retry, Worker
from asyncgate.clients.worker.children import hide_credential
from asyncgate.clients.worker.program import start_logging

log = logging.getLogger("asyncgate.worker.ai")
HEARD_SECONDS = 2.0         # that a step waits for the gate to hear of the one before; a gate that is away hears later
LONGEST_PAUSE = 3600.0      # before another attempt, whatever an endpoint asks for


def task(executor: Executor) -> Callable[[Any, Job], Awaitable[Done]]:
    """Return the task function of an executor that is open."""
    async def work(payload: Any, job: Job) -> Done:
        async def report(progress: dict[str, Any]) -> None:
            job.checkpoint = progress.pop("checkpoint")     # the report carries it along
            job.report(progress)
            await asyncio.to_thread(job.flush, HEARD_SECONDS)
            if job.pulse.refused:
                raise ReportTooLarge

        try:
            return await executor.execute(job.offer, report, job.lost.is_set)
        except JobFailed as failed:
            raise ending_of(failed) from None

    return work


def ending_of(failed: JobFailed) -> Retry | Fail:
    """Say to the worker how a job failed."""
    if not failed.retryable:
        return Fail(failed.message, code=failed.code)
    after = None if failed.retry_after is None else min(failed.retry_after, LONGEST_PAUSE)
    return Retry(failed.message, after=after, code=failed.code)


def run(path: str, *, types: Sequence[str], capabilities: Sequence[str], quiet: bool, url: str | None,
        **about: Any) -> None:
    """Be an AI worker until told to stop; raises ProfileError when its profile or its tools are not in order."""
    start_logging(logging.WARNING if quiet else logging.INFO)
    profile = load_profile(path)
    executor, worker = Executor(profile), Worker(url, capabilities=[*profile.capabilities, *capabilities], **about)
    hide_credential()       # from the servers of its tools
    for handler in logging.getLogger().handlers:
        handler.addFilter(Discreet(executor.secrets))
    try:
        asyncio.run(serve(worker, executor, types or profile.types))
    except JobFailed as failed:
        raise ProfileError(f"{failed.message} (file {path})") from None


class Discreet(logging.Filter):
    """Keeps secrets out of the log, whoever writes to it: the SDK of MCP logs what a server said and could not mean."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self.secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        """Blot out the secrets of a record."""
        record.msg, record.args = self.secrets.hidden(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = self.secrets.hidden(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True


async def serve(worker: Worker, executor: Executor, types: Sequence[str]) -> None:
    """Work until SIGTERM or SIGINT; tools that do not work at the start are a mistake, later they are a misfortune."""
    async with executor:
        tools = await executor.toolbox.open()
        worker.task(*types)(task(executor))
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, worker.stop)
        log.info("%s takes %s of %s; %s with %d tools", worker.worker_id or "this worker", ", ".join(types),
                 worker.gate.url, executor.profile.model, len(tools))
        await worker.serve()
