"""`asyncgate bench --self`: start servers, measure them in turns, and format the table of docs/numbers.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncgate import __version__
from asyncgate.commands.bench import load
from asyncgate.commands.bench.beside import keep_waiting
from asyncgate.commands.bench.rounds import Figures, Plan, count_clients
from asyncgate.commands.bench.wire import Failed, LoadGate
from asyncgate.commands.dev import start_program, stop_children, watch_lifeline
from asyncgate.commands.main import main
from asyncgate.parts.model.settings import mask_credentials
from asyncgate.parts.process import forks

TOKEN = "bench-self"      # noqa: S105  # of temporary servers on loopback
START_SECONDS = 30.0
DATABASE_NAMES = {"sqlite": "SQLite", "postgresql": "Postgres", "postgres": "Postgres"}
ROOM = 1000         # connections besides the waiting claims
REST_SETTLE_SECONDS = 1.0


class BenchServer(msgspec.Struct):
    """A bench-server started by this process."""

    gate: LoadGate
    child: subprocess.Popen[Any]


class Rest(msgspec.Struct):
    """The cost of waiting claims on an idle server; None if the system does not report it."""

    database: str
    claims: int
    seconds: float
    core_percent: float | None
    resident_kib_each: float | None


@contextlib.contextmanager
def start_servers(databases: tuple[str, ...], idle: int, sets: tuple[str, ...] = (),
                  program: tuple[str, ...] = (__name__,)) -> Iterator[list[BenchServer]]:
    """Serve a new SQLite file and the databases; always remove servers and files at the end."""
    forks.clean_up_on_signals()
    folder, children = Path(tempfile.mkdtemp(prefix="asyncgate-bench-")), list[subprocess.Popen[Any]]()
    try:
        urls = [f"sqlite:///{folder / 'gate.db'}", *databases]
        logs = [folder / f"server-{at}.log" for at in range(len(urls))]
        for url, log in zip(urls, logs, strict=True):
            with log.open("wb") as file:
                children.append(start_program(*program, *make_arguments(url, idle, sets), token=TOKEN, stdout=file,
                                              stderr=file, cwd=folder))
        servers = [BenchServer(LoadGate(wait_for_address(child, log, url), TOKEN, name), child)
                   for child, log, url, name in zip(children, logs, urls, name_databases(urls), strict=True)]
        for server, url in zip(servers, urls, strict=True):
            server.gate.written = find_counter(url, server.child.pid)
        yield servers
    finally:
        stop_children(*children)
        shutil.rmtree(folder, ignore_errors=True)


def make_arguments(url: str, idle: int, sets: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of a bench-server."""
    most = [f"--set={name}={idle + ROOM}" for name in ("limit_concurrency", "max_waiting_claims")]
    return ["--port", "0", "--database", url, *(most if idle + ROOM > 4096 else ()),
            *(f"--set={setting}" for setting in sets)]


def wait_for_address(child: subprocess.Popen[Any], log: Path, url: str) -> str:
    """Wait until a server is ready; return its URL."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        _, separator, rest = text.partition(" serves ")
        if separator and "\n" in rest:
            return rest.split()[0]
        if child.poll() is not None:
            last = (text.strip().splitlines() or ["it said nothing"])[-1]
            raise Failed(f"the server on {mask_credentials(url)} did not start: {last.removeprefix('Error: ')}")
        time.sleep(0.03)
    raise Failed(f"the server on {mask_credentials(url)} did not start within {START_SECONDS:g} s")


def name_databases(urls: list[str]) -> list[str]:
    """Name databases by their kind; number several of a kind."""
    kinds = [DATABASE_NAMES.get(kind := url.partition(":")[0], kind) for url in urls]
    return [f"{kind} {kinds[:at + 1].count(kind)}" if kinds.count(kind) > 1 else kind for at, kind in enumerate(kinds)]


# At rest.


async def measure_at_rest(server: BenchServer, number: int, seconds: float) -> Rest:
    """Measure the cost of waiting claims on an idle server."""
    await load.run_turn(server.gate, load.Turn("cycle", 1, REST_SETTLE_SECONDS / 2, None))
    memory, pid = resident_kib(server.child.pid), server.child.pid
    async with keep_waiting([server.gate], number):
        await asyncio.sleep(REST_SETTLE_SECONDS)
        used, begun = cpu_seconds(pid), time.perf_counter()
        await asyncio.sleep(seconds)
        lasted, used_now, memory_now = time.perf_counter() - begun, cpu_seconds(pid), resident_kib(pid)
    share = None if used is None or used_now is None else round(100 * (used_now - used) / lasted, 2)
    each = None if memory is None or memory_now is None else round((memory_now - memory) / number, 1)
    return Rest(server.gate.name, number, round(lasted, 1), share, each)


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process with all its threads; None if /proc does not have it."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def resident_kib(pid: int) -> float | None:
    """Return the resident memory of a process in KiB; None if /proc does not have it."""
    return read_number(f"/proc/{pid}/status", "VmRSS:")


def read_number(path: str, name: str) -> float | None:
    """Return a number that a file of the system names; None if the file does not have it."""
    with contextlib.suppress(OSError, IndexError):
        return float(Path(path).read_text().partition(name)[2].split()[0])
    return None


# What is written to the disk.


def find_counter(url: str, pid: int) -> Callable[[], Awaitable[float | None]] | None:
    """Return what tells how many bytes a database has written; None if nothing does."""
    kind = DATABASE_NAMES.get(url.partition(":")[0])
    if kind == "SQLite":
        return partial(written_by_process, pid)
    return partial(written_ahead, url) if kind == "Postgres" else None


async def written_by_process(pid: int) -> float | None:
    """Return how many bytes a process has made the disk write; None if /proc does not have it."""
    return read_number(f"/proc/{pid}/io", "\nwrite_bytes:")


async def written_ahead(url: str) -> float | None:
    """Return the position of the write-ahead log of a Postgres server; None if it may not be asked."""
    import asyncpg
    try:
        db = await asyncpg.connect(url)
    except (OSError, asyncpg.PostgresError):
        return None
    try:
        return float(await db.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))
    finally:
        await db.close()


# The table of docs/numbers.md.


def describe_method(plan: Plan, rows: list[Figures]) -> dict[str, Any]:
    """Describe the method and the environment of the figures."""
    import sqlite3

    echo = {f"{row.database}, {count_clients(row.clients)}": row.requests_per_second
            for row in rows if row.mode == "echo"}
    return {"asyncgate": __version__, "python": platform.python_version(), "sqlite": sqlite3.sqlite_version,
            "cores": count_cores(), "rounds": plan.rounds, "seconds": None if plan.count is not None else plan.seconds,
            "count": plan.count, "echo_requests_per_second": echo, "temporary_folder": find_filesystem()}


def count_cores() -> int:
    """Return the number of cores that this process and its servers share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_filesystem() -> str:
    """Return the type of the temporary folder's file system; empty if unknown."""
    folder, best, kind = os.path.realpath(tempfile.gettempdir()), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, what, *_ = line.split()
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, what
    return kind


def format_markdown(rows: list[Figures], rests: list[Rest], method: dict[str, Any]) -> str:
    """Format the table: a row per mode and clients, columns per database; then a line about the method."""
    databases = list(dict.fromkeys(row.database for row in rows))
    groups = [part for name in databases for part in (f"{name}: of the echo's rate", "p50 ms", "p99 ms", "KiB a cycle")]
    lines = ["| " + " | ".join(["mode", "clients", *groups]) + " |", "| --- | ---: |" + " ---: |" * len(groups)]
    kinds = {(row.mode, row.clients) for row in rows if row.mode != "echo"}
    for mode, clients in sorted(kinds, key=lambda kind: (load.EVERY_MODE.index(kind[0]), kind[1])):
        cells = [cell for name in databases for cell in format_figures(rows, name, mode, clients)]
        lines.append("| " + " | ".join([mode, str(clients), *cells]) + " |")
    return "\n".join([*lines, "", format_method(method), *map(format_rest, rests)])


def format_figures(rows: list[Figures], database: str, mode: str, clients: int) -> list[str]:
    """Return the cells of one mode on one database; modes of batches show cycles instead of requests."""
    mine = [row for row in rows if (row.database, row.mode, row.clients) == (database, mode, clients)]
    whole = next((row for row in mine if row.operation == "all"), mine[0])
    echo = next(row.requests_per_second for row in rows
                if (row.database, row.mode, row.clients) == (database, "echo", clients))
    part = f"{whole.requests_per_second / echo:.2f}"
    if mode == "batch":
        part = f"{sum(row.tasks_per_second for row in mine if row.operation in load.COMPLETIONS):,.0f} cycles/s"
    return ["–" if mode == load.LONG_POLL else part, f"{whole.p50_ms:.2f}", f"{whole.p99_ms:.2f}",
            f"{whole.kib_written:.1f}" if whole.kib_written else "–"]


def format_method(method: dict[str, Any]) -> str:
    """Format the method in one line."""
    each = f"{method['count']:,} steps" if method["count"] is not None else f"{method['seconds']:g} s"
    rounds = f"medians of {method['rounds']} rounds" if method["rounds"] > 1 else "one round"
    echo = "; ".join(f"{where} {rate:,.0f}/s" for where, rate in method["echo_requests_per_second"].items())
    in_memory = method["temporary_folder"] in ("tmpfs", "ramfs")
    memory = " (in memory, so no disk was involved; set TMPDIR)" if in_memory else ""
    return (f"AsyncGate {method['asyncgate']}, Python {method['python']}, SQLite {method['sqlite']}{memory}; "
            f"client and servers share {method['cores']} cores; {rounds} of {each}, everything in turns. "
            f"The echo: {echo}. KiB a cycle: on SQLite what the gate's process has written to the disk, on Postgres "
            "its write-ahead log.")


def format_rest(rest: Rest) -> str:
    """Format the cost of waiting claims."""
    if rest.core_percent is None or rest.resident_kib_each is None:
        return f"{rest.claims:,} waiting claims at rest on {rest.database}: this system does not report their cost."
    return (f"{rest.claims:,} waiting claims at rest on {rest.database}: {rest.core_percent:g} % of one core, "
            f"{rest.resident_kib_each:g} KiB of resident memory each, over {rest.seconds:g} s.")


if __name__ == "__main__":
    watch_lifeline()
    main(["bench-server", *sys.argv[1:]])
