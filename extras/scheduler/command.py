"""`asyncgate scheduler`: create tasks at the times that agents order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3

import click

from asyncgate.clients.http import AsyncHttp, read_token, read_token_file
from asyncgate.commands.calling import CREDENTIAL
from asyncgate.extras.scheduler.loop import Scheduler
from asyncgate.extras.scheduler.store import Store, StoreError
from asyncgate.parts.process.forks import obey_signals


def find_key(variable: str, given: str | None) -> str:
    """Return a credential: from the option, the environment, or the file that the environment names."""
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
    """Name the caller, unless the credential does: an issued key or an access token does."""
    says_itself = key.startswith("aga_") or key.count(".") == 2
    return {} if says_itself and not given else {field: given or "scheduler"}


@click.command()
@click.option("--url", help="URL of the gate; default ASYNCGATE_URL, else http://127.0.0.1:8080.")
@click.option("--file", "path", default="asyncgate-schedules.db", show_default=True, type=click.Path(dir_okay=False),
              help="SQLite file of the schedules; created if missing.")
@click.option("--worker-key", type=CREDENTIAL, metavar="TOKEN | @FILE",
              help="Credential of the worker; default ASYNCGATE_WORKER_KEY, else ASYNCGATE_API_KEY.")
@click.option("--agent-key", type=CREDENTIAL, metavar="TOKEN | @FILE",
              help="Credential of the agent; default ASYNCGATE_AGENT_KEY, else ASYNCGATE_API_KEY.")
@click.option("--worker-id", help="Id of the worker, if its credential does not name one; default scheduler.")
@click.option("--agent-id", help="Id of the agent, if its credential does not name one; default scheduler.")
def scheduler(url: str | None, path: str, worker_key: str | None, agent_key: str | None, worker_id: str | None,
              agent_id: str | None) -> None:
    """Create tasks at the times that agents order: at intervals, or by a cron expression.

    Agents create tasks of the types schedule.create, schedule.pause, schedule.resume, schedule.delete and
    schedule.status.  The scheduler leases them as a worker, stores the schedules in its own SQLite file, and creates
    the due tasks as an agent.  So it needs two credentials, because only an admin's may do both; the shared token
    alone is enough.

    On a machine with other users, pass the keys in ASYNCGATE_WORKER_KEY and ASYNCGATE_AGENT_KEY, or in files named by
    ASYNCGATE_WORKER_KEY_FILE and ASYNCGATE_AGENT_KEY_FILE, not on the command line.

    Run one scheduler per tenant; its file is locked while it runs.  It may be killed and restarted at any time: the
    misfire policy of each schedule decides about missed runs, and no task is created twice.
    """
    worker_key, agent_key = find_key("ASYNCGATE_WORKER_KEY", worker_key), find_key("ASYNCGATE_AGENT_KEY", agent_key)
    if bool(worker_key) != bool(agent_key):
        raise click.UsageError("give the keys of both worker and agent, or ASYNCGATE_API_KEY for both")
    who = name_caller("worker_id", worker_id, worker_key), name_caller("agent_id", agent_id, agent_key)
    try:
        with contextlib.closing(Store(path)) as store:
            asyncio.run(serve_scheduler(store, url, (worker_key, agent_key), who))
    except StoreError as wrong:
        raise click.ClickException(str(wrong)) from None
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    except sqlite3.Error as error:      # such as a full disk: exit, so that it is restarted
        raise click.ClickException(f"cannot use {path}: {error}") from None


async def serve_scheduler(store: Store, url: str | None, keys: tuple[str, str],
                          who: tuple[dict[str, str], ...]) -> None:
    """Run a scheduler until SIGTERM or SIGINT."""
    def say(text: str) -> None:
        click.echo(f"scheduler: {text}", err=True)

    async with AsyncHttp(url, keys[0]) as worker, AsyncHttp(url, keys[1]) as agent:
        served = Scheduler(store, worker, agent, as_worker=who[0], as_agent=who[1], say=say)
        working = asyncio.ensure_future(served.run())
        obey_signals(working.cancel)
        say(f"{len(store.live())} schedules, at {worker.url}")
        with contextlib.suppress(asyncio.CancelledError):
            await working
