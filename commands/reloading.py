"""`asyncgate worker --watch -- PROGRAM`: run a program that is a worker, and start it again when its code changes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from asyncgate.clients.worker.children import adopt_orphans
from asyncgate.commands.profiles import Connection

GLANCE_SECONDS = 0.25
CODE_SUFFIXES = {".cjs", ".env", ".go", ".js", ".json", ".jsx", ".mjs", ".py", ".rb", ".rs", ".sh", ".sql", ".toml",
                 ".ts", ".tsx", ".yaml", ".yml"}
LEFT_OUT = {"__pycache__", "build", "dist", "node_modules", "venv"}        # besides what is hidden


def look_at_code(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files of code below a folder, each with its time and size."""
    seen: dict[str, tuple[int, int]] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(".")]
        for name in files:
            if os.path.splitext(name)[1] in CODE_SUFFIXES:
                path = os.path.join(place, name)
                try:
                    facts = os.stat(path)
                except FileNotFoundError:       # an editor has replaced it just now
                    continue
                seen[path] = facts.st_mtime_ns, facts.st_size
    return seen


class Reloaded:
    """A program that is started again whenever its code changes."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], drain_seconds: float) -> None:
        self.command, self.folder, self.environment = [*command], folder, environment
        self.drain_seconds, self.stopped = drain_seconds, False

    def run(self) -> None:
        """Run until SIGTERM or Ctrl-C; a program that ends by itself is started again with the next change."""
        self.adopts = adopt_orphans()       # so that what a shell leaves running is known, and no zombie stays
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._stop)
        while not self.stopped:
            seen, program = look_at_code(self.folder), self._start()
            told = False
            while (now := look_at_code(self.folder)) == seen and not self.stopped:
                if program.poll() is not None and not told:
                    click.echo(f"{self.command[0]} ended with status {program.returncode}; it starts again when a file "
                               f"in {self.folder} changes", err=True)
                    told = True
                time.sleep(GLANCE_SECONDS)
            if not self.stopped:
                changed = min(path for path, _ in seen.items() ^ now.items())
                click.echo(f"{os.path.relpath(changed, self.folder)} has changed: starting again", err=True)
            self._end(program)

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _start(self) -> subprocess.Popen[bytes]:
        try:        # in a group of its own: Ctrl-C reaches it once, by way of this process
            return subprocess.Popen(self.command, env=self.environment, start_new_session=True)
        except OSError as error:
            raise click.ClickException(f"cannot start {self.command[0]}: {error.strerror}") from None

    def _end(self, program: subprocess.Popen[bytes]) -> None:
        """Tell the program to stop, then what it leaves running; what has not ended in time, its next start resumes."""
        until = time.monotonic() + self.drain_seconds
        program.terminate()         # alone: it may pass that on, and a worker that is told twice gives its tasks back
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(self.drain_seconds)
            self._signal(program.pid, signal.SIGTERM)
            while self._runs(program.pid) and time.monotonic() < until:
                time.sleep(GLANCE_SECONDS)
        self._signal(program.pid, signal.SIGKILL)
        program.wait()
        while self._runs(program.pid):
            time.sleep(GLANCE_SECONDS)

    def _signal(self, group: int, sign: signal.Signals) -> None:
        if self._runs(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, sign)

    def _runs(self, group: int) -> bool:
        """Whether anything of a process group runs; an id that is another group's by now is none of ours."""
        try:
            while self.adopts and os.waitpid(-group, os.WNOHANG)[0]:
                pass
            os.killpg(group, 0)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return False
        return True


def run_reloaded(command: Sequence[str], folder: str, at: Connection, drain_seconds: float) -> None:
    """Run a worker's program again whenever its code changes; it finds the gate in its environment."""
    given = {"ASYNCGATE_URL": at.url, "ASYNCGATE_API_KEY": at.token}
    environment = {**os.environ, **{name: value for name, value in given.items() if value}}
    Reloaded(command, Path(folder), environment, drain_seconds).run()
