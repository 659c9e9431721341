"""Kill and cut off a gate and other queues on Postgres in the same way, and count what becomes of their jobs.

    python -m asyncgate.bench.peers.strikes pgqueuer,procrastinate --rounds 3 --json peers.json

Each queue serves one client and two workers of its own package.  While jobs come, a worker is killed and started again,
Postgres is ended and started again, and connections are cut before the reply to a statement gets through.  The client
repeats what was not acknowledged, with the key by which its queue knows a repetition; a supervisor starts whatever
ends.  Then all is quiet, and what was acknowledged has half a minute to be done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec

from asyncgate.backends.postgres.migrations import migrate_database
from asyncgate.conformance.postgres_server import Cluster, free_port
from asyncgate.conformance.proxy import Cut, Link, Proxy, send

JOBS, JOBS_PER_SECOND, STRUCK_WORKERS = 200, 25.0, 2
STRIKES = ("worker", "restart", "worker", "restart", "worker")
CUTS = 15
QUIET_SECONDS = 30.0
ENDED = re.compile(rb"C\0\0\0.(?:INSERT|UPDATE|DELETE|SELECT|COMMIT)")      # the reply to a statement
THIS_GATE = "gate"
PROMISES = {
    THIS_GATE: "At least once, and one end for each task: who comes late is refused. A repeated creation makes nothing "
               "new, for as long as the task is kept. A lease of 5 s is given back when a worker dies.",
    "pgqueuer": "At least once. A repeated creation makes nothing new while the job waits or runs. A job without a "
                "heartbeat for 5 s is taken again.",
    "procrastinate": "At most once by itself: its documentation has a task that retries what a dead worker held. Its "
                     "workers do that here every 2 s, for workers without a heartbeat for 5 s. A repeated creation "
                     "makes nothing new while the job waits."}


class Struck(msgspec.Struct):
    """What became of the jobs of a queue."""

    queue: str
    rounds: int = 0
    jobs: int = 0
    unknown: int = 0        # calls of the client without an answer, which it repeated
    lost: int = 0           # acknowledged, never done, and not there any more
    stuck: int = 0          # acknowledged, and not done half a minute after the last fault
    twice: int = 0          # done more than once
    ended: int = 0          # workers that ended by themselves
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0    # until all was done, after the last fault; the longest
    promise: str = ""

    def count(self, acknowledged: list[str], unknown: list[str], ends: list[str], held: set[str]) -> None:
        """Add what became of the jobs of a round; the queue says which it still holds."""
        undone = {*acknowledged} - {*ends}
        self.jobs, self.unknown = self.jobs + len({*acknowledged}), self.unknown + len(unknown)
        self.stuck, self.lost = self.stuck + len(undone & held), self.lost + len(undone - held)
        self.twice += sum(times > 1 for times in Counter(ends).values())


class CuttingLink(Link):
    """A connection that is cut before a reply gets through."""

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(self.proxy, CuttingProxy)
        while chunk := await self._read(reader):
            if self.proxy.armed and ENDED.search(chunk):
                self.proxy.armed, self.proxy.cuts = False, self.proxy.cuts + 1
                raise Cut
            send(writer, chunk)
            await writer.drain()


class CuttingProxy(Proxy):
    """A proxy that cuts the connection of the next statement that ends, when it is armed."""

    armed, cuts = False, 0

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(CuttingLink(self, (reader, writer)).run())
        self.links.add(link)
        self.clients.add(writer)
        link.add_done_callback(partial(self._over, writer))


def make_command(queue: str, role: str, url: str, folder: Path) -> list[str]:
    """Return the command of a client, of a worker, or of what looks at a queue."""
    return [sys.executable, "-m", f"asyncgate.bench.peers.struck_{queue}", role, url, str(folder)]


class Process:
    """A client or a worker in a process of its own, which a supervisor starts again."""

    def __init__(self, queue: str, role: str, url: str, folder: Path, name: str) -> None:
        self.command = make_command(queue, role, url, folder)
        self.log, self.ended, self.over = folder / f"{name}.log", 0, False
        self.begin()

    def begin(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it and start it again."""
        self.process.kill()
        self.process.wait()
        self.begin()

    def look(self) -> None:
        """Start it again if it has ended by itself."""
        if self.process.poll() is not None and not self.over:
            self.ended += 1
            self.begin()

    def stop(self) -> None:
        """End it for good."""
        self.over = True
        self.process.kill()
        self.process.wait()


async def supervise(processes: list[Process]) -> None:
    """Be the supervisor."""
    while True:
        for process in processes:
            process.look()
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def open_queue(queue: str, cluster: Cluster, cutter: CuttingProxy, number: int,
                     folder: Path) -> AsyncIterator[str]:
    """Make a database for a queue, and yield the URL by which its clients and workers reach it."""
    name = f"{queue}_{number}"
    await cluster.create_database(name)
    if queue != THIS_GATE:
        yield cutter.url(cluster.admin_url(name))
        return
    await migrate_database(cluster.admin_url(name))
    port = free_port()
    command = [sys.executable, "-c", "from asyncgate import main; main()", "serve", "--port", str(port), "--database",
               cutter.url(cluster.url(name)), "--set", "lease_sweep_interval_seconds=1"]
    with (folder / "gate.log").open("wb") as log, \
            await asyncio.to_thread(subprocess.Popen, command, stdin=subprocess.DEVNULL, stderr=log) as gate:
        try:
            yield f"http://127.0.0.1:{port}"        # clients repeat until it is there
        finally:
            gate.kill()


async def run_round(queue: str, cluster: Cluster, number: int, seed: int, sums: Struck) -> None:
    """Run one round of a queue, and add up what came of it."""
    draw = random.Random(f"{seed} {number}")        # the same for each queue
    with tempfile.TemporaryDirectory(prefix="asyncgate-strikes-") as name:
        folder = Path(name)
        async with CuttingProxy(cluster.port) as cutter, open_queue(queue, cluster, cutter, number, folder) as url:
            await asyncio.to_thread(subprocess.run, make_command(queue, "install", url, folder), check=True)
            workers = [Process(queue, "work", url, folder, f"w{index}") for index in range(STRUCK_WORKERS)]
            client = Process(queue, "submit", url, folder, "client")
            watching = asyncio.create_task(supervise([*workers, client]))
            try:
                sums.faults += await strike_all(cluster, cutter, workers, draw, folder)
                sums.seconds = max(sums.seconds, await wait_for(folder, "end", JOBS, QUIET_SECONDS))
            finally:
                watching.cancel()
                for process in (*workers, client):
                    process.stop()
            held = await list_held(queue, url, folder)
            sums.ended += sum(worker.ended for worker in workers)
            sums.rounds += 1
            sums.count(read_lines(folder, "ack"), read_lines(folder, "unknown"), read_lines(folder, "end"), held)


async def strike_all(cluster: Cluster, cutter: CuttingProxy, workers: list[Process], draw: random.Random,
                     folder: Path) -> Counter[str]:
    """Let the faults come, evenly over the time in which jobs do; return how often each came."""
    done, moments = Counter[str](), sorted(draw.uniform(0.1, 0.9) * JOBS for _ in STRIKES)
    await wait_for(folder, "end", STRUCK_WORKERS, 3 * QUIET_SECONDS)      # everybody has begun
    cutting = asyncio.create_task(cut_often(cutter))
    for what, moment in zip(draw.sample(STRIKES, len(STRIKES)), moments, strict=True):
        await wait_for(folder, "ack", moment, 3 * QUIET_SECONDS)
        if what == "worker":
            await asyncio.to_thread(draw.choice(workers).kill)
        else:
            await asyncio.to_thread(cluster.restart, draw.choice(["fast", "immediate"]))
        done[what] += 1
    await wait_for(folder, "ack", JOBS, 3 * QUIET_SECONDS)
    cutting.cancel()
    cutter.armed = False
    return done + Counter({"reply": cutter.cuts})


async def wait_for(folder: Path, event: str, jobs: float, seconds: float) -> float:
    """Wait until something has come of so many jobs, but not for ever; return how long that took."""
    begun = now = time.monotonic()
    while now < begun + seconds:
        if len(read_ids(folder, event)) >= jobs:
            break
        await asyncio.sleep(0.1)
        now = time.monotonic()
    return now - begun


async def cut_often(cutter: CuttingProxy) -> None:
    """Arm the proxy again and again."""
    while cutter.cuts < CUTS:
        await asyncio.sleep(JOBS / JOBS_PER_SECOND / CUTS)
        cutter.armed = True


async def list_held(queue: str, url: str, folder: Path) -> set[str]:
    """Return the jobs that a queue still has to do, as it says itself."""
    done = await asyncio.to_thread(subprocess.run, make_command(queue, "left", url, folder), check=True)
    assert done.returncode == 0
    return read_ids(folder, "left")


def read_lines(folder: Path, event: str) -> list[str]:
    """Return the ids of what was noted in a round."""
    path = folder / "events"
    words = [line.split() for line in (path.read_text().splitlines() if path.exists() else [])]
    return [word[1] for word in words if word[0] == event]


def read_ids(folder: Path, event: str) -> set[str]:
    """Return the ids of what was noted in a round, each once."""
    return {*read_lines(folder, event)}


def format_table(rows: list[Struck]) -> str:
    """Return a table of Markdown."""
    heads = ("queue", "rounds", "jobs", "faults", "unknown", "lost", "stuck", "done twice", "workers that ended",
             "all done after")
    lines = [f"| {' | '.join(heads)} |", "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(row.faults.items()))
        cells = (row.queue, row.rounds, f"{row.jobs:,}", faults, row.unknown, row.lost, row.stuck, row.twice, row.ended,
                 f"{row.seconds:.1f} s")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *(f"- **{row.queue}**: {row.promise}" for row in rows)])


async def main() -> None:
    """Run rounds of each queue in turns, and print a table."""
    assert __doc__
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m asyncgate.bench.peers.strikes", description=about)
    parser.add_argument("queues", help=f"beside the gate: {', '.join(set(PROMISES) - {THIS_GATE})}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=20261127)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    asked = parser.parse_args()
    rows = {queue: Struck(queue, promise=PROMISES[queue]) for queue in (THIS_GATE, *asked.queues.split(","))}
    os.environ["ASYNCGATE_API_KEY"] = secrets.token_hex(16)
    with Cluster() as cluster:
        for number in range(1, asked.rounds + 1):
            for queue, sums in rows.items():
                await run_round(queue, cluster, number, asked.seed, sums)
                print(msgspec.json.encode(sums).decode(), file=sys.stderr, flush=True)
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode([*rows.values()]))
    print(format_table([*rows.values()]))


if __name__ == "__main__":
    asyncio.run(main())
