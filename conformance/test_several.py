"""Several gate processes on one database: each may die at any moment, and its clients use another."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from asyncgate.backends import is_shared
from asyncgate.conformance.history import Call
from asyncgate.conformance.ledgers import PROCESS_SECONDS
from asyncgate.conformance.load import HASTY_GATE, Client, GateServer, Load, fleet, own_tenant, serving
from asyncgate.conformance.torture import wrong_with

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_shared)]
PROCESSES = 4


async def started(client: Client, call: Coroutine[Any, Any, Call]) -> asyncio.Task[Call]:
    """Start a waiting call; its server has received it once a later call was answered."""
    task = asyncio.create_task(call)
    async with aclosing(Client(client.server, "a9")) as other:
        await asyncio.sleep(0)
        await other.http("GET", "/v1/health", {})
        await other.http("GET", "/v1/health", {})
    return task


async def test_the_leases_of_processes_that_are_gone_for_good_are_taken_over_by_another(database: str) -> None:
    async with fleet(database, 0, PROCESSES, **HASTY_GATE) as gates, AsyncExitStack() as clients:
        held = []
        for number, server in enumerate(gates.servers):     # each grants one lease, so each owns one
            client = await clients.enter_async_context(aclosing(Client(server, f"w{number}")))
            await client.ask("create_task", type=f"of-{number}", payload=None, max_expiries=0)
            claim = await client.ask("lease_next", accept_types=[f"of-{number}"], lease_ttl_seconds=1)
            assert claim.reply is not None
            held.append(claim.reply["tasks"][0]["task_id"])
        for server in gates.servers[1:]:
            await server.stop(signal.SIGKILL)
        last = await clients.enter_async_context(aclosing(Client(gates.servers[0], "a0")))

        async with asyncio.timeout(PROCESS_SECONDS):
            for task_id in held:
                while (task := (await last.ask("get_task", task_id=task_id)).reply) and task["status"] != "queued":
                    await last.ask("lease_next", accept_types=["none of these"], wait_seconds=0.1)      # waits there


async def test_a_lease_that_another_process_granted_is_taken_back_when_it_runs_out(database: str) -> None:
    async with fleet(database, 0, PROCESSES, lease_sweep_interval_seconds=60) as gates, AsyncExitStack() as clients:
        agent, worker, heir = [await clients.enter_async_context(aclosing(Client(server, name)))
                               for server, name in zip(gates.servers, ("a1", "w1", "w2"), strict=False)]
        await agent.ask("create_task", type="demo", payload=None)
        claim = await worker.ask("lease_next", lease_ttl_seconds=1)
        assert claim.reply is not None

        async with asyncio.timeout(PROCESS_SECONDS):
            again = (await heir.ask("lease_next", wait_seconds=30)).reply

        assert again is not None
        assert [offer["task_id"] for offer in again["tasks"]] == [offer["task_id"] for offer in claim.reply["tasks"]]


async def test_what_one_process_does_wakes_who_waits_at_another(database: str) -> None:
    settings = {**HASTY_GATE, "database.poll_seconds": 3600}
    async with fleet(database, 0, PROCESSES, **settings) as gates, AsyncExitStack() as clients:
        agent, worker, reader, other = [await clients.enter_async_context(aclosing(Client(server, name)))
                                        for server, name in zip(gates.servers, ("a1", "w1", "a1", "a1"), strict=True)]
        claim = await started(worker, worker.ask("lease_next", wait_seconds=30))
        made = await agent.ask("create_task", type="demo", payload=None)
        assert made.reply is not None
        offers = (await claim).reply
        assert offers is not None
        [offer] = offers["tasks"]
        assert offer["task_id"] == made.reply["task_id"]

        result = await started(reader, reader.ask("get_task", task_id=offer["task_id"], wait_seconds=30))
        under = {name: offer[name] for name in ("task_id", "lease_id", "fence")}
        await worker.ask("complete", **under, result={"ok": True}, artifacts=[{"uri": "file:///out"}])

        task = (await result).reply
        assert task is not None
        assert task["status"] == "succeeded"

        lists = []
        for client, name in ((reader, "list_receipts"), (other, "list_open_obligations")):
            seen = (await client.ask(name, limit=200)).reply
            assert seen is not None
            lists.append(await started(client, client.ask(name, since_receipt_id=seen["cursor"], wait_seconds=30)))
        await agent.ask("create_task", type="demo", payload=None)
        inbox, owed = [(await job).reply for job in lists]
        assert inbox is not None
        assert owed is not None
        assert inbox["receipts"] == owed["open_obligations"] != []


@asynccontextmanager
async def two(database: str) -> AsyncIterator[tuple[Load, list[GateServer], list[Client]]]:
    """Serve from two processes; return also a client of each, that may do anything."""
    own = own_tenant()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(database, **HASTY_GATE, **own)) for _ in range(2)]
        load = await stack.enter_async_context(aclosing(Load(servers[0], 0)))
        yield load, servers, [await stack.enter_async_context(aclosing(Client(server, "w1", load.write)))
                              for server in servers]


async def answered(client: Client, operation: str, **ask: Any) -> dict[str, Any]:
    """Ask, and expect an answer."""
    call = await client.ask(operation, **ask)
    assert call.reply is not None, call
    return call.reply


@pytest.mark.parametrize("target", [{"type": "demo"}, {"type": "demo", "capabilities": []}, {"worker": "w1"},
                                    {"whole_tenant": True}])
async def test_a_pause_that_one_process_is_given_is_obeyed_by_the_next_claim_of_the_other(
        database: str, target: dict[str, Any]) -> None:
    async with two(database) as (load, _, (first, second)):
        for _ in range(2):
            await answered(first, "create_task", type="demo", payload=None)
        await answered(second, "lease_next")     # so that the other knows the lanes, and that nothing was paused
        for here, there in ((first, second), (second, first)):
            await answered(here, "pause_work", **target)
            told = await answered(there, "lease_next")
            assert told["tasks"] == []
            assert "paused until somebody resumes it" in told["warnings"][0]
            await answered(here, "resume_work", **target)
        assert len((await answered(first, "lease_next"))["tasks"]) == 1
        assert await wrong_with(database, load) == []


async def test_a_pause_outlives_the_process_that_was_given_it(database: str) -> None:
    async with two(database) as (load, servers, (restarted, survivor)):
        await answered(restarted, "create_task", type="demo", payload=None)
        await answered(restarted, "pause_work", type="demo")
        await servers[0].stop(signal.SIGKILL)

        assert (await answered(survivor, "lease_next"))["tasks"] == []
        await servers[0].start()
        restarted.close()
        assert (await answered(restarted, "lease_next"))["tasks"] == []
        await answered(survivor, "resume_work", type="demo")
        assert len((await answered(restarted, "lease_next"))["tasks"]) == 1
        assert await wrong_with(database, load) == []


async def test_a_drain_at_one_process_learns_of_a_lease_that_ends_at_the_other(database: str) -> None:
    async with two(database) as (load, _, (drainer, other)):
        await answered(other, "create_task", type="demo", payload=None)
        [offer] = (await answered(other, "lease_next"))["tasks"]
        assert (await answered(drainer, "drain_work", type="demo"))["leases_left"] == 1

        drained = await started(drainer, drainer.ask("drain_work", type="demo", wait_seconds=30))
        under = {name: offer[name] for name in ("task_id", "lease_id", "fence")}
        await answered(other, "complete", **under, result=1, artifacts=[{"uri": "file:///out"}])

        reply = (await drained).reply
        assert reply is not None
        assert reply["leases_left"] == 0
        assert await wrong_with(database, load) == []


@pytest.mark.parametrize("action", ["cancel", "prioritize", "rerun"])
async def test_a_bulk_that_begins_at_a_process_that_is_killed_goes_on_at_the_other(
        database: str, action: str) -> None:
    async with two(database) as (load, servers, (killed, survivor)):
        for _ in range(12):
            made = await answered(killed, "create_task", type="demo", payload=None)
            if action == "rerun":
                await answered(killed, "cancel_task", task_id=made["task_id"])
        more = {"priority": 7} if action == "prioritize" else {}
        preview = await answered(killed, "preview_bulk", action=action, type="demo", **more)
        begun = await answered(killed, "run_bulk", confirmation=preview["confirmation"], max_tasks=5)
        await servers[0].stop(signal.SIGKILL)

        record = await answered(survivor, "run_bulk", confirmation=preview["confirmation"])

        assert (begun["done"], begun["ended"]) == (5, False)
        assert (record["bulk_id"], record["done"], record["skipped"], record["ended"]) == (
            begun["bulk_id"], 12, 0, True)
        assert await answered(survivor, "run_bulk", confirmation=preview["confirmation"]) == record
        assert await wrong_with(database, load) == []


@pytest.mark.parametrize("notify", ["true", "false"])
async def test_with_and_without_wake_ups_every_waiting_claim_is_served(database: str, notify: str) -> None:
    settings = {**HASTY_GATE, "database.poll_seconds": 0.2, "database.notify": notify}
    async with fleet(database, 0, PROCESSES, **settings) as gates, AsyncExitStack() as clients:
        workers = [await clients.enter_async_context(aclosing(Client(gates.servers[n % PROCESSES], f"w{n}")))
                   for n in range(12)]
        agent = await clients.enter_async_context(aclosing(Client(gates.servers[0], "a1")))
        claims = [asyncio.create_task(worker.ask("lease_next", wait_seconds=30)) for worker in workers]
        made = [(await agent.ask("create_task", type="demo", payload=None)).reply for _ in workers]

        got = [(await claim).reply for claim in claims]

        assert sorted(offer["task_id"] for reply in got if reply for offer in reply["tasks"]) == sorted(
            reply["task_id"] for reply in made if reply)


async def test_a_living_name_is_refused_and_a_dead_one_is_not(database: str) -> None:
    name = f"gate-{uuid.uuid4().hex[:8]}"
    async with serving(database, instance_id=name, **HASTY_GATE, **own_tenant()) as first:
        twin = GateServer(database, instance_id=name, **HASTY_GATE)
        with pytest.raises(RuntimeError, match=f"another process runs as {name}"):
            await twin.start()
        async with aclosing(Client(first, "a1")) as client:
            assert (await client.ask("create_task", type="demo", payload=None)).reply is not None
        await first.stop(signal.SIGKILL)
        await first.start()
        assert await first.stop(signal.SIGTERM) == 0
