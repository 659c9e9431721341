"""What makes the faults of `asyncgate torture`: each comes, where it is meant to."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from asyncgate.commands.torture import FAULTS as NAMES
from asyncgate.conformance.between import BreakingWire
from asyncgate.conformance.faults import FAULTS, open_site
from asyncgate.conformance.plugin import MISSING, POSTGRES
from asyncgate.conformance.postgres_server import find_programs
from asyncgate.conformance.proxy import Proxy
from asyncgate.conformance.torture import TorturePlan, plan_faults, run_round
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
REQUEST, ANSWER = b"what is asked", b"what is answered"


def test_the_command_names_every_fault() -> None:
    assert NAMES.split(", ") == [*FAULTS]


@pytest.mark.parametrize("turns", range(6))
async def test_nobody_who_came_just_before_a_door_is_closed_stays_inside(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with Proxy(server.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_SECONDS) as client:
                for _ in range(turns):      # so far has the loop come with letting it in
                    await asyncio.sleep(0)
                proxy.close_door()

                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(client.recv, 1) == b""


async def test_the_faults_of_postgres_that_no_other_test_has_lose_and_repeat_nothing_together(
        record_property: Any) -> None:
    if find_programs() is None:
        pytest.skip(MISSING)
    usual = ("kill", "pause", "worker", "ledger", "reset", "restart", "commit")
    faults = tuple(fault for fault in plan_faults(POSTGRES, ("all",), 1) if fault not in usual)
    plan = TorturePlan(POSTGRES, faults, random.randrange(2**32), strikes=len(faults), calls=20)
    async with open_site(POSTGRES, faults) as site:
        done = await run_round(plan, site, 1)

    record_property("torture", done.describe())
    print(done.describe())
    assert done.violations == [], f"seed {plan.seed}"
    assert done.faults.keys() == set(faults)


@dataclass
class Target:
    """What a wire leads to."""

    port: int
    up: asyncio.Event
    tenant: str = ""


def answer_once(door: socket.socket) -> int:
    """Answer one request when it is whole; return how much of it came."""
    connection, _ = door.accept()
    with connection:
        got = read_all(connection, len(REQUEST))
        with contextlib.suppress(ConnectionError):
            connection.sendall(ANSWER * (got == len(REQUEST)))
            connection.recv(1)
    return got


def ask_once(port: int) -> int:
    """Ask, and return how much of an answer came before the connection was reset."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(REQUEST)
        return read_all(connection, len(ANSWER) + 1)


def read_all(connection: socket.socket, most: int) -> int:
    """Return how many bytes came, at most so many."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while count < most and connection.recv(1):
            count += 1
    return count


async def test_a_wire_breaks_behind_each_byte_of_a_request_and_of_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        async with BreakingWire(Target(door.getsockname()[1], asyncio.Event()), 0) as wire:
            async def carry(way: int, most: int) -> tuple[int, int]:
                wire.number = 2 * most + way
                asked, answered = await asyncio.gather(asyncio.to_thread(answer_once, door),
                                                       asyncio.to_thread(ask_once, wire.port))
                return asked, answered

            requests = [await carry(0, most) for most in range(len(REQUEST))]
            answers = [await carry(1, most) for most in range(len(ANSWER) + 1)]

    assert requests == [(most, 0) for most in range(len(REQUEST))]
    assert answers == [(len(REQUEST), most) for most in range(len(ANSWER) + 1)]
    assert wire.caught == len(requests) + len(answers)
