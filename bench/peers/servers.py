"""The servers of `asyncgate bench --beside`: new ones, on free ports of this machine, which sync what they store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import msgspec

from asyncgate.backends.postgres.migrations import migrate_database
from asyncgate.bench.peers.known import BEANSTALKD, RESTATE, VALKEY, find_server
from asyncgate.commands.bench.servers import START_SECONDS
from asyncgate.commands.bench.wire import Failed, T
from asyncgate.conformance import postgres_server
from asyncgate.parts.model.settings import mask_credentials

SERVER_STOP_SECONDS = 10.0
TRIPS = 500
# The server ends when this process does, in whatever way: the input of the shell ends then.
GUARD = 'exec 3<&0; "$@" </dev/null & server=$!; { cat <&3 >/dev/null; kill "$server"; } & wait "$server"'


class Address(msgspec.Struct, frozen=True):
    """Where a server is, and its version."""

    url: str
    version: str


@contextlib.contextmanager
def serve_peer(kind: str, folder: Path) -> Iterator[Address]:
    """Run a server in a folder of its own; it ends with this process."""
    program, port, admin, inner = find_server(kind, ""), *(postgres_server.free_port() for _ in range(3))
    if program is None:
        raise Failed(f"the program of {kind} is gone")
    folder.mkdir()
    log = folder / "log"
    with log.open("wb") as file:
        flags = make_flags(kind, folder, port, admin, inner)
        process = subprocess.Popen(["/bin/sh", "-c", GUARD, "sh", program, *flags], stdin=subprocess.PIPE, stdout=file,
                                   stderr=file, cwd=folder, start_new_session=True)
    try:
        wait_for_port(process, kind, port, log)
        yield Address(f"{kind.lower()}://127.0.0.1:{port}" + (f"/{admin}" if kind == RESTATE else ""),
                      ask_version(program, kind))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=SERVER_STOP_SECONDS)
        process.kill()


def make_flags(kind: str, folder: Path, port: int, admin: int, inner: int) -> list[str]:
    """Return the arguments of a server that answers for nothing that is not on disk."""
    if kind == VALKEY:
        return ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "", "--appendonly", "yes",
                "--appendfsync", "always"]
    if kind == BEANSTALKD:
        return ["-l", "127.0.0.1", "-p", str(port), "-b", str(folder), "-f", "0"]
    if kind == RESTATE:     # it syncs its log by default
        config = folder / "restate.toml"
        config.write_text(f'''base-dir = "{folder}"\nlisten-mode = "tcp"\nbind-address = "127.0.0.1:{inner}"
disable-telemetry = true\n[ingress]\nbind-address = "127.0.0.1:{port}"\n[admin]\nbind-address = "127.0.0.1:{admin}"
''')
        return ["--config-file", str(config)]
    store = folder / "nats.conf"
    store.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}", sync_interval: always }}\n')
    return ["-c", str(store)]


def wait_for_port(process: subprocess.Popen[bytes], kind: str, port: int, log: Path) -> None:
    """Wait until a server accepts connections."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.03)
    raise Failed(f"the server of {kind} did not start: {last_line(log)}")


def last_line(log: Path) -> str:
    """Return the last line that a program wrote."""
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def ask_version(program: str, kind: str) -> str:
    """Return the version that a server's program tells, such as nats-server 2.15.1."""
    told = subprocess.run([program, "-v" if kind == BEANSTALKD else "--version"], capture_output=True, text=True,
                          timeout=START_SECONDS).stdout
    match = re.search(r"\d+(\.\d+)+", told)
    return f"{Path(program).name} {match[0] if match else ''}".strip()


class Databases:
    """New databases on one Postgres server, for gate and queues alike; they are dropped at the end."""

    def __init__(self, server: postgres_server.PostgresServer) -> None:
        self.server, self.prefix, self.made = server, f"asyncgate_bench_{secrets.token_hex(4)}", 0
        self.version = f"Postgres {self.wait(server.version())}"

    def make_empty(self) -> str:
        """Create a database; return its URL for its owner."""
        self.made += 1
        self.wait(self.server.create_database(f"{self.prefix}_{self.made}"))
        return self.server.admin_url(f"{self.prefix}_{self.made}")

    def make_for_gate(self) -> str:
        """Create a migrated database; return its URL for a role that the gate accepts."""
        owner, secret = self.make_empty(), secrets.token_hex(16)
        self.wait(migrate_database(owner))
        self.wait(self.run(f"CREATE ROLE {self.prefix} LOGIN PASSWORD '{secret}' IN ROLE {postgres_server.APP}"))
        parts = urlsplit(owner)
        return parts._replace(netloc=f"{self.prefix}:{secret}@{parts.netloc.rpartition('@')[2]}").geturl()

    def time_trip(self) -> float:
        """Return the median of what a round trip takes, in microseconds."""
        return self.wait(self._time_trips())

    async def _time_trips(self) -> float:
        times = list[float]()
        async with postgres_server.connected(self.server.admin_url()) as db:
            statement = await db.prepare("SELECT 1")
            for _ in range(TRIPS):
                begun = time.perf_counter()
                await statement.fetchval()
                times.append(time.perf_counter() - begun)
        return sorted(times)[TRIPS // 2] * 1e6

    def drop(self) -> None:
        """Drop what was made."""
        self.wait(self.server.drop_databases(f"{self.prefix}_"))
        self.wait(self.run(f"DROP ROLE IF EXISTS {self.prefix}"))

    async def run(self, statement: str) -> None:
        """Run a statement as the server's superuser."""
        async with postgres_server.connected(self.server.admin_url()) as db:
            await db.execute(statement)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the server; raise Failed if it cannot be done."""
        try:
            return asyncio.run(work)
        except (OSError, asyncpg.PostgresError) as error:
            raise Failed(f"the Postgres server at {mask_credentials(self.server.superuser)} cannot be used: "
                         f"{error or type(error).__name__}") from None


@contextlib.contextmanager
def open_databases(url: str) -> Iterator[Databases]:
    """Start a Postgres that syncs its commits, or use the one of a superuser's URL."""
    with contextlib.ExitStack() as stack:
        databases = Databases(postgres_server.PostgresServer(url) if url
                              else stack.enter_context(postgres_server.Cluster(durable=True)))
        stack.callback(databases.drop)
        yield databases
