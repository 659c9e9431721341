"""The process of a Python queue under `asyncgate bench --beside`: it runs a turn for each line of its input.

    python -m asyncgate.bench.peers.child DRIVER URL CLIENTS

It prints `{"modes": [...]}` when it is ready, and for each `Order` one `OrderTime`.  It ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable

import click
import msgspec

from asyncgate.commands.bench import load
from asyncgate.commands.bench.wire import run_on_fastest_loop

PAYLOAD = msgspec.json.encode(load.TASK_BODY["payload"])
CREATE, CLAIM, COMPLETE = "create", "claim", "complete"
CREATE_MANY, CLAIM_MANY, COMPLETE_MANY = (f"{step} {load.TASKS_PER_BATCH}" for step in (CREATE, CLAIM, COMPLETE))

Steps = Callable[[int], AsyncIterator[str]]     # of a client, by its number; yields the name of each step that is done
Modes = dict[str, Steps]


class Order(msgspec.Struct):
    """A turn to run."""

    mode: str
    clients: int
    seconds: float
    count: int | None


class OrderTime(msgspec.Struct):
    """What a turn took: all of it in seconds, and each step by its name."""

    lasted: float
    took: dict[str, list[float]]


async def run_order(modes: Modes, order: Order) -> OrderTime:
    """Run one turn."""
    turn, steps = load.Turn(order.mode, order.clients, order.seconds, order.count), modes[order.mode]

    async def run_client(number: int) -> None:
        while turn.may_continue():
            sent = time.perf_counter()
            async for step in steps(number):
                now = time.perf_counter()
                turn.took[step].append(now - sent)
                sent = now

    turn.start()
    await load.run_together(*map(run_client, range(order.clients)))
    return OrderTime(time.perf_counter() - turn.begun, turn.took)


async def serve_orders(driver: str, url: str, clients: int) -> None:
    """Open the queue, and run turns until the input ends."""
    module = importlib.import_module(f"asyncgate.bench.peers.{driver}")
    async with module.open_peer(url, clients) as modes:
        click.echo(msgspec.json.encode({"modes": list(modes)}))
        while line := await asyncio.to_thread(sys.stdin.readline):
            click.echo(msgspec.json.encode(await run_order(modes, msgspec.json.decode(line, type=Order))))


@click.command()
@click.argument("driver")
@click.argument("url")
@click.argument("clients", type=int)
def main(driver: str, url: str, clients: int) -> None:
    """Measure one queue until standard input closes."""
    run_on_fastest_loop(serve_orders(driver, url, clients))


if __name__ == "__main__":
    main()
