"""`asyncgate scheduler`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3

import click

from asyncgate.clients.http import AsyncHttp, read_token, read_token_file
from asyncgate.clients.scheduler import Scheduler
from asyncgate.clients.scheduler.store import Store, StoreError
from asyncgate.commands.calling import CREDENTIAL


def find_key(variable: str, given: str | None) -> str:
    """Return a credential: as given, or from the environment, or from the file that the environment names."""
    text, path = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if given:
        return given
    if text and path:
        raise click.UsageError(f"{variable} and {variable}_FILE are both set; unset one of them")
    try:
        return (read_token_file(path, f"{variable}_FILE") if path else text) or read_token()
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None


def name_caller(field: str, given: str | None, key: str) -> dict[str, str]:
    """Say who acts, where the credential does not: an issued key or an access token does."""
    says_itself = key.startswith("aga_") or key.count(".") == 2
    return {} if says_itself and not given else {field: given or "scheduler"}


@click.command()
@click.option("--url", help="Where the gate is; default ASYNCGATE_URL, else http://127.0.0.1:8080.")
@click.option("--file", "path", default="asyncgate-schedules.db", show_default=True, type=click.Path(dir_okay=False),
              help="Where the schedules are kept; made if it is not there.")
@click.option("--worker-key", type=CREDENTIAL, metavar="TOKEN | @FILE",
              help="The worker's credential; default ASYNCGATE_WORKER_KEY, else ASYNCGATE_API_KEY.")
@click.option("--agent-key", type=CREDENTIAL, metavar="TOKEN | @FILE",
              help="The agent's credential; default ASYNCGATE_AGENT_KEY, else ASYNCGATE_API_KEY.")
@click.option("--worker-id", help="The worker's name, if its credential does not say it; default scheduler.")
@click.option("--agent-id", help="The agent's name, if its credential does not say it; default scheduler.")
def scheduler(url: str | None, path: str, worker_key: str | None, agent_key: str | None, worker_id: str | None,
              agent_id: str | None) -> None:
    """Create tasks at the times that agents ask for: every so many seconds, or by a cron expression.

    Agents order with tasks of the types schedule.create, schedule.pause, schedule.resume, schedule.delete and
    schedule.status.  The scheduler leases them as a worker, keeps the schedules in a SQLite file of its own, and
    creates the tasks that are due as an agent, so it needs two credentials: no role but an admin's may do both.  With
    the shared token one is enough.

    On a machine with other users keep the keys out of the command line: ASYNCGATE_WORKER_KEY and ASYNCGATE_AGENT_KEY,
    or ASYNCGATE_WORKER_KEY_FILE and ASYNCGATE_AGENT_KEY_FILE, which name files.

    Run one scheduler per tenant; its file is locked while it runs.  It may be killed and started at any time: runs that
    were missed meanwhile are made up for as the misfire policy of each schedule says, and none is created twice.
    """
    worker_key, agent_key = find_key("ASYNCGATE_WORKER_KEY", worker_key), find_key("ASYNCGATE_AGENT_KEY", agent_key)
    if bool(worker_key) != bool(agent_key):
        raise click.UsageError("give both keys, the worker's and the agent's, or ASYNCGATE_API_KEY for both")
    who = name_caller("worker_id", worker_id, worker_key), name_caller("agent_id", agent_id, agent_key)
    try:
        with contextlib.closing(Store(path)) as store:
            asyncio.run(serve_scheduler(store, url, (worker_key, agent_key), who))
    except StoreError as wrong:
        raise click.ClickException(str(wrong)) from None
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    except sqlite3.Error as error:      # a full disk, say: better to end and be started again than to go on without it
        raise click.ClickException(f"{path} does not work: {error}") from None


async def serve_scheduler(store: Store, url: str | None, keys: tuple[str, str],
                          who: tuple[dict[str, str], ...]) -> None:
    """Run a scheduler until SIGTERM or SIGINT comes."""
    def say(text: str) -> None:
        click.echo(f"scheduler: {text}", err=True)

    async with AsyncHttp(url, keys[0]) as worker, AsyncHttp(url, keys[1]) as agent:
        served = Scheduler(store, worker, agent, as_worker=who[0], as_agent=who[1], say=say)
        working = asyncio.ensure_future(served.run())
        for sign in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sign, working.cancel)
        say(f"{len(store.live())} schedules, at {worker.url}")
        with contextlib.suppress(asyncio.CancelledError):
            await working
