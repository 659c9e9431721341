"""A client or a worker of a queue under `asyncgate.bench.peers.strikes`: it notes each event as a line of a file.

    python -m asyncgate.bench.peers.struck_QUEUE install|submit|work|left URL FOLDER
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

Act = Callable[[str], Awaitable[object]]        # submit a job, or do it
CALL_SECONDS, REPEAT_SECONDS = 10.0, 0.1


class StruckPeer(NamedTuple):
    """What a queue is asked for, by the URL of its database."""

    install: Callable[[str], Awaitable[None]]
    open_client: Callable[[str], AbstractAsyncContextManager[Act]]      # yields what submits a job
    work: Callable[[str, Act], Awaitable[None]]
    list_left: Callable[[str], Awaitable[list[str]]]


class Notes:
    """A file that several processes add lines to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events"
        self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, job: str) -> None:
        """Add a line, at once."""
        os.write(self.file, f"{event} {job}\n".encode())


async def submit_all(submit: Act, notes: Notes, jobs: int, rate: float) -> None:
    """Submit jobs at a steady rate; repeat what was not acknowledged."""
    known = {line.split()[1] for line in notes.path.read_text().splitlines() if line.startswith("ack ")}
    for job in (f"j{number}" for number in range(jobs)):
        while job not in known:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await submit(job)
                known.add(job)
                notes.write("ack", job)
            except Exception as error:
                print(f"{job}: {error!r}", flush=True)
                notes.write("unknown", job)
                await asyncio.sleep(REPEAT_SECONDS)
        await asyncio.sleep(1 / rate)
    await asyncio.Event().wait()


async def play(peer: StruckPeer, role: str, url: str, folder: Path) -> None:
    """Be what was asked for."""
    from asyncgate.bench.peers.strikes import JOBS, JOBS_PER_SECOND
    notes = Notes(folder)

    async def do(job: str) -> None:
        notes.write("start", job)
        await asyncio.sleep(random.uniform(0.02, 0.1))
        notes.write("end", job)

    if role == "install":
        await peer.install(url)
    elif role == "submit":
        async with peer.open_client(url) as submit:
            await submit_all(submit, notes, JOBS, JOBS_PER_SECOND)
    elif role == "work":
        await peer.work(url, do)
    else:
        for job in await peer.list_left(url):
            notes.write("left", job)


def take_part(peer: StruckPeer) -> None:
    """Be what the command line asks for."""
    role, url, folder = sys.argv[1:]
    asyncio.run(play(peer, role, url, Path(folder)))
