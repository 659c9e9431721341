"""A scheduler that lives as often as it is told to, and dies where it is told to: a program for the crash test.

Each line of standard input is one life: {"now": …} is what its clock shows, {"dies_at": n} kills it at its n-th step (a
statement of SQL, or the beginning or the end of a call), {"dies_after": seconds} at any machine instruction.  A life
that is not cut short ends when there is nothing left to do.  For each the program prints whether it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

import cronsim  # noqa: F401  # what each life needs is imported once, before the first
import httpx2  # noqa: F401

from asyncgate.clients.http import AsyncHttp
from asyncgate.extras.scheduler.loop import Scheduler
from asyncgate.extras.scheduler.store import Store


class Doom:
    """Counts steps down to the last one."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def step(self, *_: Any) -> None:
        """Take one step."""
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Doomed:
    """A gate whose caller may die before or after each call; a claim that finds nothing is the last one."""

    def __init__(self, gate: AsyncHttp, doom: Doom, idle: asyncio.Event) -> None:
        self.gate, self.doom, self.idle = gate, doom, idle

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call the gate."""
        if operation == "lease_next":
            fields["wait_seconds"] = 0
        self.doom.step()
        reply = await self.gate.call(operation, **fields)
        self.doom.step()
        if operation == "lease_next" and not reply["tasks"]:
            self.idle.set()
            await asyncio.Event().wait()
        return reply


async def live(path: str, url: str, worker_key: str, agent_key: str, now: float, doom: Doom) -> None:
    """Live until there is nothing left to do."""
    idle = asyncio.Event()
    async with AsyncHttp(url, worker_key) as worker, AsyncHttp(url, agent_key) as agent:
        with contextlib.closing(Store(path)) as store:
            store.db.set_trace_callback(doom.step)
            scheduler = Scheduler(store, Doomed(worker, doom, idle), Doomed(agent, doom, idle), clock=lambda: now)
            living = asyncio.ensure_future(scheduler.run())
            claiming = asyncio.ensure_future(idle.wait())
            await asyncio.wait([living, claiming], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                await living
            while store.firings() or store.unanswered() or store.deleted() or (store.next_due_at() or now + 1) <= now:
                await scheduler.tick()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)


def main(path: str, url: str, worker_key: str, agent_key: str) -> None:
    """Live once for each line."""
    for line in sys.stdin:
        life = json.loads(line)
        if (child := os.fork()) == 0:
            if after := life.get("dies_after"):
                signal.setitimer(signal.ITIMER_REAL, after)     # nobody handles it: it ends the process at once
            asyncio.run(live(path, url, worker_key, agent_key, life["now"], Doom(life.get("dies_at"))))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM)
        print(json.dumps({"died": died, "status": status}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
