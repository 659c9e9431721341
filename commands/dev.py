"""`asyncgate dev`: a gate for development.  Also starts child processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

import asyncgate
from asyncgate.clients.http import DEFAULT_URL
from asyncgate.parts.app import serve_forever
from asyncgate.parts.identity.startup import require_safe_start, warn_of_idle_settings
from asyncgate.parts.model.settings import Configured, Settings, strip_settings
from asyncgate.parts.process.logs import start_logging

DATABASE = "sqlite:///asyncgate-dev.db"
CHILD_STOP_SECONDS = 3.0      # for a child to end by itself
READY = """\
AsyncGate {version} is ready at {url}
No credential is needed; only this machine has access.  The database is {database}

Create a task:

  curl -s {url}/v1/tasks -H 'content-type: application/json' -d '{body}'

Next steps{where}:

{hints}

Ctrl-C stops the gate; the database remains.
"""
BODY = '{"type": "echo", "payload": {"hello": "world"}, "result_delivery": "inline", "agent_id": "me"}'
LOOK = {"asyncgate list-tasks": "all tasks with their status",
        "asyncgate get-task TASK_ID": "one task, with its result",
        "asyncgate list-open-obligations --agent-id me": "what is still owed to you"}
WITH_WORKER = {"asyncgate run-task --type echo --payload '{\"again\": true}'": "create a task and wait for its result"}
ALONE = {"asyncgate lease-next --worker-id me --accept-types echo": "act as a worker: lease the task",
         "asyncgate complete TASK_ID --lease-id LEASE_ID --worker-id me --result '\"done\"'": "complete the task"}


def run_dev(configured: Configured, *, worker: bool) -> int:
    """Serve until a signal stops it, with an optional echo worker; return the exit status."""
    settings = adjust_settings(configured)
    start_logging(settings)
    require_safe_start(settings)
    warn_of_idle_settings(configured)
    children: list[subprocess.Popen[Any]] = []

    def ready(url: str) -> None:
        click.echo(format_banner(settings, url, worker))
        if worker:
            children.append(start_program("asyncgate", "worker", "echo", "--forget", "--lifeline", url=url,
                                  token=settings.api_key))

    try:
        return serve_forever(settings, ready)
    finally:
        stop_children(*children)


def adjust_settings(configured: Configured) -> Settings:
    """Replace defaults by those of a development gate; keep the values that the user set."""
    settings, origins = configured.settings, configured.origins
    settings = replace(settings, allow_insecure_dev=True)
    if origins["console.enabled"] == "default":
        settings = replace(settings, console=replace(settings.console, enabled=True))
    if origins["database.url"] == "default":
        settings = replace(settings, database=replace(settings.database, url=DATABASE))
    return replace(settings, log_level="warning") if origins["log_level"] == "default" else settings


def format_banner(settings: Settings, url: str, worker: bool) -> str:
    """Return the address of the gate, and commands to try."""
    hints = LOOK | (WITH_WORKER if worker else ALONE) | {f"{url}/docs": "all operations, in a browser"}
    if settings.console.enabled:
        hints[f"{url}/console"] = "what is owed, where it is, and why it waits, in a browser"
    wide = max(map(len, hints))
    return READY.format(version=asyncgate.__version__, url=url, database=settings.database.url, body=BODY,
                        where="" if url == DEFAULT_URL else f" (first: export ASYNCGATE_URL={url})",
                        hints="\n".join(f"  {hint:{wide}}  {says}" for hint, says in hints.items()))


def start_program(module: str, *arguments: str, url: str = "", token: str = "",
                  **options: Any) -> subprocess.Popen[Any]:
    """Start a program of this package; it ends when this process closes its standard input."""
    command = [sys.executable, "-P", "-m", module, *arguments]     # -P: do not import from the user's folder
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=make_child_environment(url, token), **options)


def make_child_environment(url: str, token: str) -> dict[str, str]:
    """Return an environment for a child: this package, URL and token, and no other settings."""
    kept = strip_settings(os.environ)
    home = Path(asyncgate.__file__).resolve()
    if home.name == "asyncgate.py":     # a checkout that is not installed is not on the path of other processes
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home.parent), kept.get("PYTHONPATH")]))
    given = {"ASYNCGATE_URL": url, "ASYNCGATE_API_KEY": token}
    return kept | {name: value for name, value in given.items() if value}


def watch_lifeline() -> None:
    """Stop this process when its standard input closes, so that it never outlives its parent."""
    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def stop_children(*children: subprocess.Popen[Any]) -> None:
    """End children: send SIGTERM to all, then kill those that remain."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(CHILD_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin:
            child.stdin.close()
