"""Connect a remote agent to a gate: `asyncgate worker --a2a CARD_URL --type TYPE`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from asyncgate.clients import http
from asyncgate.clients.worker import Job, Worker
from asyncgate.clients.worker.program import start_logging
from asyncgate.extras.a2a_worker.errand import Errand
from asyncgate.extras.a2a_worker.open_tasks import OpenTasks
from asyncgate.extras.a2a_worker.remote import Away, Refused, open_agent
from asyncgate.parts.process.forks import obey_signals

LARGEST_ANSWER = 16 * 2**20
AGENT_KEY, KEY_FILE = "ASYNCGATE_A2A_KEY", "ASYNCGATE_A2A_KEY_FILE"

log = logging.getLogger("asyncgate.worker.a2a")


def run_a2a_worker(address: str, *, types: Sequence[str], allow: Sequence[str], plain_http: bool,
                   timeout_seconds: float, quiet: bool, url: str | None, **about: Any) -> None:
    """Run a worker of a remote agent until it is stopped; raises ValueError if there is no agent."""
    start_logging(logging.WARNING if quiet else logging.INFO)
    key, path = os.environ.pop(AGENT_KEY, ""), os.environ.pop(KEY_FILE, "")
    if key and path:
        raise ValueError(f"{AGENT_KEY} and {KEY_FILE} are both set; unset one of them")
    key = http.read_token_file(path, KEY_FILE) if path else key
    if not http.fits_header(key):
        raise ValueError(f"{AGENT_KEY} holds a character that no HTTP header can")
    worker = Worker(url, **about)
    try:
        asyncio.run(serve_agent(worker, address, types, key, allow, plain_http, timeout_seconds))
    except (Refused, Away) as error:
        raise ValueError(f"no agent at {address}: {error}") from None


async def serve_agent(worker: Worker, address: str, types: Sequence[str], key: str, allow: Sequence[str],
                      plain_http: bool, timeout_seconds: float) -> None:
    """Work until SIGTERM or SIGINT.

    The host that the operator names may be of a private network, and called over plain HTTP; another one that the card
    leads to only with `allow`.
    """
    from asyncgate.parts.model.errors import StartupError
    from asyncgate.parts.process import outgoing

    host = urlsplit(address).hostname or ""
    try:
        client = outgoing.make_client(allow=[*allow, host], plain=plain_http, timeout_seconds=timeout_seconds,
                                      most_bytes=LARGEST_ANSWER, setting="--allow")
    except StartupError as wrong:
        raise ValueError(str(wrong)) from None
    async with client:
        remote = await open_agent(client, address, key, allow)
        tasks = OpenTasks(worker, remote)

        async def work(payload: Any, job: Job) -> Any:
            return await Errand(remote, job, payload, tasks).run()

        worker.task(*types, description=remote.words or None)(work)
        obey_signals(worker.stop)
        log.info("%s takes %s of %s; the agent is %s at %s", worker.worker_id or "this worker", ", ".join(types),
                 worker.gate.url, remote.name, remote.way.url)
        watching = asyncio.ensure_future(tasks.watch())
        try:
            await worker.serve()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
