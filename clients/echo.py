"""A worker that answers every task with its own payload: `python -m asyncgate.clients.echo`.

It shows all that a worker must do: wait for work, renew the lease in time, complete, let go on SIGTERM, and come back
when the gate was away.  Other workers here are made of it: `Worker.work` is the only part that is about echoing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from asyncgate.clients.http import AsyncHttp, Refusal, Unreachable

WAIT_SECONDS = 25.0         # that an empty claim stays open
LONGEST_PAUSE = 5.0         # between two tries to reach a gate that is away
QUIET_SECONDS = 1.0         # that a gate may be away before it is worth a word


class Worker:
    """Leases tasks of some types, one at a time, and works on them until it is told to stop."""

    def __init__(self, gate: AsyncHttp, worker_id: str, *, types: Sequence[str] = (), capabilities: Sequence[str] = (),
                 ttl_seconds: int = 30) -> None:
        self.gate, self.ttl_seconds = gate, ttl_seconds
        self.me = {"worker_id": worker_id, "worker_instance_id": uuid.uuid4().hex}
        self.wants = {"accept_types": list(types) or None, "capabilities": list(capabilities)}
        self.away_since: float | None = None
        self.instance = ""

    async def work(self, offer: dict[str, Any]) -> tuple[Any, Any]:
        """Do the task; return its result, and artifacts that say where the result is."""
        return offer["payload"], await self.in_the_record(offer["task_id"])

    async def in_the_record(self, task_id: str) -> list[dict[str, str]]:
        """Return the artifact that says: the result lies in the task's own record."""
        if not self.instance:
            self.instance = (await self.gate.call("get_config"))["instance_id"]
        return [{"type": "inline", "uri": f"asyncgate://{self.instance}/tasks/{task_id}/result"}]

    async def run(self) -> None:
        """Work until cancelled; then give back what is held."""
        pause = 0.1
        try:
            while True:
                try:
                    await self._turn()
                    pause, self.away_since = 0.1, None
                except (Unreachable, Refusal) as error:
                    self._tell(error)
                    await asyncio.sleep(max(pause, getattr(error, "retry_after", None) or 0))
                    pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            await self._let_go()

    async def _turn(self) -> None:
        asked = time.monotonic()
        reply = await self.gate.call("lease_next", **self.me, **self.wants, lease_ttl_seconds=self.ttl_seconds,
                                     wait_seconds=WAIT_SECONDS)
        for offer in reply["tasks"]:
            await self._do(offer)
        if not reply["tasks"] and time.monotonic() - asked < 0.1:
            await asyncio.sleep(0.1)    # a gate that stops answers waiting claims at once

    async def _do(self, offer: dict[str, Any]) -> None:
        mine = {**self.me, "task_id": offer["task_id"], "lease_id": offer["lease_id"], "fence": offer["fence"]}
        try:
            result, artifacts = await self._kept({**offer, "mine": mine})
            await self.gate.call("complete", **mine, result=result, artifacts=artifacts)
        except Refusal as no:
            if no.code != "lease_invalid_or_expired":
                raise
            self._tell(no)      # somebody else has the task now, or it was canceled: drop it

    async def _kept(self, offer: dict[str, Any]) -> tuple[Any, Any]:
        """Do the task while its lease is renewed as often as the gate says; a lost lease ends the work."""
        working = asyncio.ensure_future(self.work(offer))
        renewing = asyncio.ensure_future(self._renew(offer["lease_id"], offer["renew_every_seconds"]))
        try:
            await asyncio.wait([working, renewing], return_when=asyncio.FIRST_COMPLETED)
            return await (working if working.done() else renewing)
        finally:
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)

    async def _renew(self, lease_id: str, every_seconds: float) -> NoReturn:
        while True:
            await asyncio.sleep(every_seconds)
            with contextlib.suppress(Unreachable):      # the next one may come through before the lease runs out
                await self.gate.call("renew_lease", **self.me, lease_id=lease_id, extend_by_seconds=self.ttl_seconds)

    async def _let_go(self) -> None:
        """Give back all that is held, also what a claim got whose answer was never read."""
        with contextlib.suppress(Unreachable, Refusal):
            for lease in (await self.gate.call("list_leases", **self.me))["leases"]:
                await self.gate.call("release_lease", **self.me, task_id=lease["task_id"], lease_id=lease["lease_id"])

    def _tell(self, error: Exception) -> None:
        """Say what is wrong, but not about a gate that is only being restarted, and only once while it is away."""
        now = time.monotonic()
        if not isinstance(error, Unreachable):
            click.echo(f"{self.me['worker_id']}: {error}", err=True)
        elif self.away_since is None:
            self.away_since = now
        elif now - self.away_since > QUIET_SECONDS:
            click.echo(f"{self.me['worker_id']}: {error}; trying on", err=True)
            self.away_since = float("inf")


async def until_told(worker: Worker) -> None:
    """Run a worker until SIGTERM or SIGINT comes."""
    loop, working = asyncio.get_running_loop(), asyncio.ensure_future(worker.run())
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working


def lifeline() -> None:
    """Stop this process when its standard input closes: so it never outlives the one that started it."""
    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()


@click.command()
@click.option("--url", help="Where the gate is; default ASYNCGATE_URL, else http://127.0.0.1:8080.")
@click.option("--worker-id", default="echo", show_default=True, help="The worker's name.")
@click.option("--type", "types", multiple=True, default=["echo"], show_default=True, help="Type of task to take.")
@click.option("--lifeline", "tied", is_flag=True, help="Stop when standard input closes.")
def main(url: str | None, worker_id: str, types: Sequence[str], tied: bool) -> None:
    """Answer every task of type echo with its own payload, until told to stop."""
    async def echo() -> None:
        async with AsyncHttp(url) as gate:
            await until_told(Worker(gate, worker_id, types=types))
    if tied:
        lifeline()
    asyncio.run(echo())


if __name__ == "__main__":
    sys.exit(main())
