"""Several processes on one port: a parent starts them, looks after them, and replaces each one that ends.

Each process is a gate of its own, with its own instance id, on the same database.  Each has a listening socket of its
own, among which the system spreads new connections (SO_REUSEPORT).  The parent keeps all of them open: a connection
that came to a process that was killed waits for the one that takes its place.  A process stops in order when the parent
closes its standard input, which also happens when the parent is killed.  It tells the parent in systemd's protocol that
it serves, and that its event loop turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncgate import __version__
from asyncgate.backends import is_shared
from asyncgate.parts.faces import server
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.forks import release_children
from asyncgate.parts.process.notify import Notifier

log = logging.getLogger("asyncgate")

FROZEN_SECONDS = 60.0       # without a beat, after which a process is killed
WATCH_SECONDS = 1.0         # between looks at the beats
YOUNG_SECONDS = 10.0        # a process that ends sooner is replaced later and later
SHORTEST_WAIT, LONGEST_WAIT = 0.5, 30.0
HELD_SECONDS = 2.0          # that a connection may wait for the next process of its place, before others get it
LAST_PORT = 65535
LEASH = 0                   # the file descriptor that a process watches: its standard input


def require_several(settings: Settings, number: int) -> None:
    """Refuse several processes where they cannot share a database, or an address."""
    if not is_shared(settings.database.url):
        raise errors.StartupError(
            "--processes needs a database that several processes share: Postgres; one process serves a "
            "SQLite file")
    if sys.platform != "linux":
        raise errors.StartupError(
            "--processes needs Linux, where the system spreads connections among processes; start "
            "several gates on ports of their own, behind a load balancer")
    if settings.metrics.port + number - 1 > LAST_PORT:
        raise errors.StartupError(
            f"{number} processes show their metrics at {number} ports from metrics.port on, so set "
            f"metrics.port to {LAST_PORT + 1 - number} at most")
    limiting = settings.security.rate_limiting
    if limiting.enabled and limiting.storage == "memory":
        log.warning("each process counts rate limits separately: set security.rate_limiting.storage to redis")
    if settings.metrics.enabled and not settings.metrics.port:
        log.warning("each process has its own metrics, and a scrape of /metrics reaches any one of them: set "
                    "metrics.port, and each process shows its own there or at one of the ports that follow")


def serve_as_one_of_several(settings: Settings, handed: str) -> int:
    """Serve at the sockets that the parent handed over, until it says stop or has died; return the exit status."""
    from asyncgate.parts.app import serve_forever
    sockets = [socket.socket(fileno=int(number)) for number in handed.split(",")]
    return serve_forever(settings, lambda url: log.info("process %d is at %s", os.getpid(), url), handed=sockets,
                         leash=LEASH)


def serve_several(settings: Settings, number: int) -> int:
    """Serve with so many processes until a signal comes; return the exit status."""
    require_several(settings, number)
    try:
        tried = server.bind_sockets(settings.host, settings.port)       # alone: nobody else may have the port
    except OSError as error:
        return server.report_bind_failure(settings.host, settings.port, error)
    port = tried[0].getsockname()[1]
    close_all(tried)
    return asyncio.run(Parent(settings, port, number).run())


def close_all(sockets: list[socket.socket]) -> None:
    """Close sockets."""
    for sock in sockets:
        sock.close()


class Slot:
    """One of the processes, whichever it is now, and what outlives it: its sockets and its name."""

    def __init__(self, number: int, settings: Settings, port: int, of: int) -> None:
        self.number, self.settings, self.port, self.of = number, settings, port, of
        self.sockets: list[socket.socket] = []
        self.process: asyncio.subprocess.Process | None = None
        self.ready, self.replaced, self.beat_at, self.pause = asyncio.Event(), False, 0.0, 0.0

    def listen_for_messages(self, folder: str) -> None:
        """Take the messages of the process at a socket of this place."""
        self.address = str(Path(folder, str(self.number)))
        self.messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.messages.setblocking(False)
        self.messages.bind(self.address)
        asyncio.get_running_loop().add_reader(self.messages, self._hear)

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            lines = self.messages.recv(4096).decode(errors="replace").splitlines()
            self.beat_at = asyncio.get_running_loop().time()
            if "READY=1" in lines:
                self.ready.set()

    async def start(self) -> None:
        """Start a process; one that the machine has no room for counts as one that has ended."""
        self.ready.clear()
        self.begun_at = self.beat_at = asyncio.get_running_loop().time()
        try:
            self.sockets = self.sockets or server.bind_sockets(self.settings.host, self.port, shared=True)
            files = [sock.fileno() for sock in self.sockets]
            self.process = await asyncio.create_subprocess_exec(
                *self.command(files), stdin=asyncio.subprocess.PIPE, pass_fds=files, env=self.environment(),
                start_new_session=True)     # Ctrl-C is for the parent
        except OSError as error:
            log.error("process %d cannot be started: %s", self.number, error)

    async def end(self) -> int:
        """Wait for the end of the process; return its status, which is negative after a signal."""
        status = await self.process.wait() if self.process is not None else 1
        old = asyncio.get_running_loop().time() - self.begun_at > YOUNG_SECONDS or self.replaced
        self.pause = 0.0 if old else min(max(2 * self.pause, SHORTEST_WAIT), LONGEST_WAIT)
        self.process = None
        return status

    def command(self, files: list[int]) -> list[str]:
        """Return the parent's own command, with what belongs to this place."""
        gates = self.settings.security.rate_limiting.gates * self.of
        name = f"{self.settings.instance_id}-{self.number}" if self.settings.instance_id else ""
        metrics = self.settings.metrics.port and self.settings.metrics.port + self.number - 1
        return [sys.executable, *sys.orig_argv[1:], "--sockets", ",".join(map(str, files)),
                "--set", f"security.rate_limiting.gates={gates}", *(["--set", f"instance_id={name}"] if name else []),
                *(["--set", f"metrics.port={metrics}"] if metrics else [])]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process, whose service manager is the parent."""
        own = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"}
        return {**own, "NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(int(FROZEN_SECONDS * 1e6))}

    def let_go(self) -> None:
        """Have the process stop in order."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def close(self) -> None:
        """Let the system give new connections to others; those of the process itself go on."""
        close_all(self.sockets)
        self.sockets = []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def is_frozen(self) -> bool:
        """Whether the event loop of a process that serves has stopped turning."""
        silent = asyncio.get_running_loop().time() - self.beat_at
        return self.process is not None and self.ready.is_set() and silent > FROZEN_SECONDS


class Parent:
    """Starts the processes, replaces those that end, and stops them all."""

    def __init__(self, settings: Settings, port: int, number: int) -> None:
        self.places = [Slot(n, settings, port, number) for n in range(1, number + 1)]
        self.where = f"{settings.host}:{port}"
        self.manager, self.begun, self.status = Notifier(), False, 0
        self.restarting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal comes; return the exit status."""
        self.stopping = asyncio.Event()
        with TemporaryDirectory(prefix="asyncgate-") as folder:
            for place in self.places:
                place.listen_for_messages(folder)
            release_children()
            loop = asyncio.get_running_loop()
            ends = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if sys.stdin.isatty() else []))
            loop.add_signal_handler(signal.SIGHUP, self._restart)
            for sign in ends:       # the end of a terminal is not an order to begin anew
                loop.add_signal_handler(sign, self._stop)
            beside = [asyncio.create_task(self._announce()), asyncio.create_task(self._watch())]
            await asyncio.gather(*(self._keep(place) for place in self.places))
            for task in filter(None, (*beside, self.restarting)):
                task.cancel()
        return self.status

    async def _announce(self) -> None:
        """Tell when all serve."""
        for place in self.places:
            await place.ready.wait()
        self.begun = True
        log.info("asyncgate %s serves %s with %d processes", __version__, self.where, len(self.places))
        self.manager.begin(f"{len(self.places)} processes serve {self.where}")

    async def _keep(self, place: Slot) -> None:
        """Have a process in a place until the gate stops."""
        while True:
            await place.start()
            if self.stopping.is_set():
                place.let_go()
            status = await place.end()
            if self.stopping.is_set():
                self.status = self.status or int(status != 0)
                return
            if not self.begun:      # what is wrong for one is wrong for all, and it has said what
                return self._stop(max(status, 1))
            if not place.replaced:
                log.error("process %d ended with status %d; another one takes its place in %.1f s", place.number,
                          status, place.pause)
            place.replaced = False
            if place.pause > HELD_SECONDS:
                place.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), place.pause or 0.001)
                return

    async def _watch(self) -> None:
        """Kill what is frozen; another process takes its place."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for place in self.places:
                if place.is_frozen():
                    log.error("process %d gave no sign for %.0f s; it is killed", place.number, FROZEN_SECONDS)
                    place.signal(signal.SIGKILL)

    def _restart(self) -> None:
        """Replace one process after the other; each new one reads the settings anew."""
        if self.begun and (self.restarting is None or self.restarting.done()):
            self.restarting = asyncio.create_task(self._replace_all())

    async def _replace_all(self) -> None:
        self.manager.reload()
        for place in self.places:
            place.replaced = True
            place.ready.clear()
            place.let_go()
            await place.ready.wait()
        log.info("all processes have been replaced")
        self.manager.begin(f"{len(self.places)} processes serve {self.where}")

    def _stop(self, status: int = 0) -> None:
        """Stop all processes in order; the second time, at once."""
        again, self.status = self.stopping.is_set(), self.status or status
        if not again:
            settings = self.places[0].settings
            self.manager.end(settings.drain_seconds + settings.shutdown_seconds + 5)
        self.stopping.set()
        for place in self.places:
            place.close()       # or new connections would wait for somebody who never comes
            place.signal(signal.SIGTERM) if again else place.let_go()
