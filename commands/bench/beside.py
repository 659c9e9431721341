"""Background load during a measurement of `asyncgate bench`: waiting claims, and a rival that keeps the gate busy.

The rival is a separate process, so that it slows the gate and not the measuring clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import IO, cast

import click

from asyncgate.commands.bench import load, wire
from asyncgate.commands.dev import start_program, stop_children, watch_lifeline

NEVER = "bench.never"           # the task type of waiting claims
RIVAL = "bench.rival"
CONNECTS_AT_ONCE = 100                   # connections opened together
CONNECTIONS = 200               # of a rival; above that, it creates tasks in batches
BAD_KEY, BAD_BODY, HOSTILE = "bad-key", "bad-body", "hostile"
RIVALRIES = ("create", "claim", BAD_KEY, BAD_BODY, HOSTILE)
WAITERS_SETTLE_SECONDS = 0.3


def allow_files(number: int) -> None:
    """Raise the limit of open files for this process and its children, as far as possible."""
    with contextlib.suppress(ImportError):
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = number + 256
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))


class Waiters:
    """Claims that wait for tasks that never come; each is sent again when it ends."""

    def __init__(self) -> None:
        self.wires: list[wire.Wire] = []
        self.wrong: Exception | None = None

    async def open(self, gate: wire.LoadGate, number: int) -> None:
        """Open waiting claims; spread their ends over time, as if they had started one by one."""
        for at in range(0, number, CONNECTS_AT_ONCE):
            fresh = await asyncio.gather(*(gate.connect() for _ in range(min(CONNECTS_AT_ONCE, number - at))))
            self.wires += fresh
            for place, connection in enumerate(fresh, at):
                again = load.make_claim(gate, place, NEVER, 1, load.CLAIM_WAIT_SECONDS)
                connection.taken, connection.failed = partial(self.renew, connection, again), self.fail
                connection.send(load.make_claim(gate, place, NEVER, 1,
                                          1 + (load.CLAIM_WAIT_SECONDS - 1) * (place + 1) / number))

    def renew(self, connection: wire.Wire, request: bytes, answer: bytes) -> None:
        """Send the claim again."""
        connection.send(request)

    def fail(self, wrong: Exception) -> None:
        """Keep the first failure."""
        self.wrong = self.wrong or wrong

    def check(self) -> None:
        """Check that all claims are still waiting."""
        if self.wrong is not None:
            raise wire.Failed(f"a waiting claim ended: {self.wrong}", getattr(self.wrong, "status", 0))

    def close(self) -> None:
        """Close all connections."""
        for connection in self.wires:
            connection.close()


@contextlib.asynccontextmanager
async def keep_waiting(gates: Iterable[wire.LoadGate], number: int) -> AsyncIterator[None]:
    """Keep a number of claims waiting at each gate during a block."""
    waiters = Waiters()
    try:
        for gate in gates if number else ():
            await waiters.open(gate, number)
        if number:
            await asyncio.sleep(WAITERS_SETTLE_SECONDS)
        waiters.check()
        yield
        waiters.check()
    finally:
        waiters.close()


@contextlib.asynccontextmanager
async def run_rival(gate: wire.LoadGate, *, token: str, kind: str, number: int) -> AsyncIterator[None]:
    """Let another principal keep a number of creations or claims in flight during a block."""
    child = start_program("asyncgate.commands.bench.beside", kind, str(number), url=gate.url, token=token or gate.token,
                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        await require_line(child, "ready")
        yield
        if child.poll() is not None:
            await require_line(child, "")
    finally:
        stop_children(child)
        cast(IO[str], child.stdout).close()
    async with gate.connected(1) as [wire]:     # this is answered after the rival's remaining requests
        await wire.ask(load.Client(gate, 0).nothing)


async def require_line(child: subprocess.Popen[str], wanted: str) -> None:
    """Read a line from the rival; raise an error if it is not the expected one."""
    line = await asyncio.to_thread(cast(IO[str], child.stdout).readline)
    if line.strip() != wanted or not wanted:
        raise wire.Failed(f"the rival ended: {line.strip() or 'it was stopped'}")


async def keep_busy(gate: wire.LoadGate, kind: str, number: int) -> None:
    """Keep a number of creations or claims in flight until this process is stopped."""
    if kind.startswith(HOSTILE):
        from asyncgate.bench.hostile import keep_hostile  # imports this module
        return await keep_hostile(gate, number, kind.removeprefix(HOSTILE).strip())
    if kind in (BAD_KEY, BAD_BODY):
        from asyncgate.bench.bad import keep_trying  # imports this module
        return await keep_trying(gate, kind, number)
    each = math.ceil(number / CONNECTIONS) if kind == "create" else 1
    task = {**load.TASK_BODY, "type": RIVAL, "principal_id": RIVAL}
    body = load.make_create(gate, task) if kind == "create" else load.make_claim(gate, 0, RIVAL + ".nothing", 1)
    request = body if each == 1 else gate.post(b"/v1/tasks/batch",
                                               load.encoded({"tasks": [task] * min(each, load.TASKS_PER_FILL)}))
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(wrong: Exception) -> None:
        if not ended.done():
            ended.set_exception(wrong)

    async with gate.connected(math.ceil(number / each)) as wires:
        # Report a refused credential before measuring; a batch reports it in its items.
        load.require_sound(await wires[0].ask(request if kind == "create" else gate.get(b"/v1/config")))
        for wire in wires:
            wire.taken, wire.failed = partial(send_again, wire, request), fail
            wire.send(request)
        click.echo("ready")
        await ended


def send_again(wire: wire.Wire, request: bytes, answer: bytes) -> None:
    """Send the same request again."""
    wire.send(request)


@click.command()
@click.argument("kind")
@click.argument("number", type=click.IntRange(min=1))
def main(kind: str, number: int) -> None:
    """Keep a gate busy until standard input closes."""
    watch_lifeline()
    allow_files(number)
    gate = wire.LoadGate(os.environ["ASYNCGATE_URL"], os.environ.get("ASYNCGATE_API_KEY", ""))
    try:
        wire.run_on_fastest_loop(keep_busy(gate, kind, number))
    except wire.Failed as wrong:
        sys.exit(str(wrong))


if __name__ == "__main__":
    main()
