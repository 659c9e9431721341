"""What was acknowledged survives a fail-over to a synchronous standby, and one hung host stops nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from asyncgate.backends import open_backend
from asyncgate.backends.postgres.hosts import Hosts, address, one_by_one
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.load import Load, serving
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import FOLLOWS, Cluster, Standby, connected, find_programs, free_port
from asyncgate.conformance.proxy import Proxy
from asyncgate.conformance.torture import wrong_with
from asyncgate.parts.model.database import LastingBackend
from asyncgate.parts.model.errors import DatabaseUnavailable, NotNow
from asyncgate.parts.model.settings import DatabaseSettings
from tests.backends.test_postgres_faults import HASTY, SOON, codes, first_success, opened, until

pytestmark = pytest.mark.anyio
WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
WAITS = f"SELECT backend_xid::text {WAITING}"
OF_GATES = "FROM pg_stat_activity WHERE state = 'idle' AND query LIKE '%pg_control_system%'"
BURN = "SELECT pg_current_xact_id()::text::bigint"


@pytest.fixture
def primary() -> Iterator[Cluster]:
    """A server of this test alone, with a database in it."""
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        asyncio.run(running.migrated_database("gate"))
        yield running


@pytest.fixture
def standby(primary: Cluster) -> Iterator[Standby]:
    """A standby that each COMMIT of the primary waits for."""
    with Standby(primary) as running:
        asyncio.run(running.demand())
        yield running


async def value(server: Cluster, question: str) -> Any:
    async with connected(server.admin_url()) as db:
        return await db.fetchval(question)


@pytest.fixture
async def proxy(primary: Cluster) -> AsyncIterator[Proxy]:
    async with Proxy(primary.port) as running:
        yield running


async def fail_over(primary: Cluster, standby: Standby, proxy: Proxy) -> None:
    """While a COMMIT waits for the standby: the primary dies, and the standby, which never heard of it, takes over.

    The number of the transaction goes to somebody else there.
    """
    lost = int(await value(primary, WAITS))
    proxy.swallow()                     # nobody hears of the end before the other one is there
    await asyncio.to_thread(primary.stop, "immediate")
    await asyncio.to_thread(standby.start)
    await standby.promote()
    while await value(standby, BURN) < lost:
        pass
    proxy.target = standby.port
    await proxy.restore()


async def test_a_create_that_only_the_dead_primary_had_is_made_again_after_the_fail_over(
        primary: Cluster, standby: Standby, proxy: Proxy) -> None:
    """A transaction number proves nothing on another timeline: I1, an acknowledged task is never lost."""
    async with opened(proxy.url(primary.url("gate")), timeout_seconds=60) as gate:
        first = await gate.create()
        await asyncio.to_thread(standby.stop)
        create = asyncio.create_task(gate.create())
        await until(lambda: value(primary, WAITS))

        await fail_over(primary, standby, proxy)
        second = await create

        assert {task.task_id for task in (await gate.everything())["Task"]} == {first, second}


async def test_a_renewal_that_only_the_dead_primary_had_is_not_acknowledged(
        primary: Cluster, standby: Standby, proxy: Proxy) -> None:
    """It writes no row that is only its own, so nobody can tell: a 503 says so, and a renewal may be repeated."""
    async with opened(proxy.url(primary.url("gate")), timeout_seconds=60) as gate:
        offer = await gate.leased()
        await asyncio.to_thread(standby.stop)
        renewal = asyncio.create_task(renewed(gate, offer))
        await until(lambda: value(primary, WAITS))

        await fail_over(primary, standby, proxy)
        with pytest.raises(DatabaseUnavailable):
            await renewal

        assert await renewed(gate, offer) > offer.expires_at


async def renewed(gate: Gate, offer: Any) -> Any:
    """Renew a lease; return until when it lives."""
    return (await gate.as_worker().renew_lease(task_id=offer.task_id, lease_id=offer.lease_id,
                                               extend_by_seconds=600)).expires_at


async def test_a_commit_that_no_standby_has_confirmed_is_not_acknowledged(primary: Cluster, standby: Standby) -> None:
    """A client's time limit ends the wait for the standby on the server: what was committed is there only."""
    async with opened(primary.url("gate"), timeout_seconds=SOON) as gate:
        await gate.create()
        await asyncio.to_thread(standby.stop)

        with pytest.raises(DatabaseUnavailable):
            await gate.create()

        await asyncio.to_thread(standby.start)
        await until(lambda: value(primary, FOLLOWS))
        await gate.create()


async def test_a_commit_whose_wait_for_the_standby_an_operator_ends_is_not_acknowledged_before_a_standby_has_it(
        primary: Cluster, standby: Standby) -> None:
    """pg_cancel_backend makes COMMIT answer as if all were well, with a warning beside it."""
    async with opened(primary.url("gate"), timeout_seconds=60) as gate:
        await gate.create()
        await asyncio.to_thread(standby.stop)
        create = asyncio.create_task(gate.create())
        await until(lambda: value(primary, WAITS))
        await value(primary, f"SELECT pg_cancel_backend(pid) {WAITING}")
        await until(lambda: value(primary, WAITS))      # it waits again, with what makes sure
        assert not create.done()

        await asyncio.to_thread(standby.start)
        made = await create

        assert (await gate.task(made)).status == "queued"


async def test_a_repeat_whose_wait_for_the_standby_an_operator_ends_is_answered_when_a_standby_has_what_it_read(
        primary: Cluster, standby: Standby) -> None:
    """It saves nothing, but its row lock is committed, and waits like a change."""
    async with opened(primary.url("gate"), timeout_seconds=60) as gate:
        made = await gate.create(idempotency_key="k")
        await asyncio.to_thread(standby.stop)
        repeat = asyncio.create_task(gate.create(idempotency_key="k"))
        await until(lambda: value(primary, WAITS))
        await value(primary, f"SELECT pg_cancel_backend(pid) {WAITING}")
        await until(lambda: value(primary, WAITS))      # it waits again
        assert not repeat.done()

        await asyncio.to_thread(standby.start)

        assert await repeat == made


async def test_a_fail_over_under_load_loses_nothing_that_was_acknowledged(
        primary: Cluster, standby: Standby, record_property: Any) -> None:
    seed = random.randrange(2**32)
    async with serving(both(primary, standby), **HASTY) as server, aclosing(Load(server, seed)) as load:
        async with load.running():
            await load.grown(200)
            await asyncio.to_thread(primary.stop, "immediate")
            died = time.time()
            await standby.promote()
            promoted = time.time()
            took = await first_success(load, promoted)
            await load.grown(200)
        assert await server.stop(signal.SIGTERM) == 0

    numbers = f"promoted {promoted - died:.2f} s after the primary's end, first success {took - promoted:.2f} s later"
    record_property("fail-over", numbers)
    print(numbers)
    assert await wrong_with(standby.url("gate"), load) == [], f"seed {seed}"
    assert codes(load.calls) <= {"database_unavailable"}


# Several hosts in one URL.


def both(first: Cluster | Proxy, second: Cluster | Proxy) -> str:
    """Return the URL of a database on one of two hosts."""
    return f"postgresql://asyncgate_app@127.0.0.1:{first.port},127.0.0.1:{second.port}/gate"


async def test_a_host_that_hangs_before_the_good_one_stops_nobody(primary: Cluster, proxy: Proxy) -> None:
    """A stopped server takes connections, and says nothing: each host has a time limit of its own."""
    proxy.swallow()
    async with opened(both(proxy, primary), timeout_seconds=SOON) as gate:
        task_id = await gate.create()

        assert (await gate.task(task_id)).status == "queued"


async def test_the_host_that_worked_last_is_tried_first(primary: Cluster, proxy: Proxy) -> None:
    hosts = Hosts(both(proxy, primary), SOON)
    proxy.swallow()
    for _ in range(2):
        (await hosts.connect()).terminate()
    assert [address(url) for url in hosts.urls] == [f"127.0.0.1:{server.port}" for server in (primary, proxy)]

    await proxy.restore()
    (await hosts.connect()).terminate()
    assert address(hosts.urls[0]) == f"127.0.0.1:{primary.port}"


async def test_a_primary_that_hangs_gives_way_to_the_standby_that_took_over(
        primary: Cluster, standby: Standby, proxy: Proxy) -> None:
    """Writers, readers and the connection that holds the lock: all go on elsewhere."""
    async with opened(both(proxy, standby), timeout_seconds=SOON) as gate:
        lasting = gate.backend
        assert isinstance(lasting, LastingBackend)
        await lasting.join("gate-1", 10.0, gate.engine.hear_news)
        await gate.create()
        proxy.swallow()
        await standby.promote()

        await until(lambda: works(gate.create))
        await until(lambda: works(lasting.beat))


async def works(call: Any) -> bool:
    """Try something that the database may not answer yet."""
    with contextlib.suppress(DatabaseUnavailable):
        await call()
        return True
    return False


async def test_a_standby_among_the_hosts_is_passed_over(primary: Cluster, standby: Standby) -> None:
    async with opened(both(standby, primary), timeout_seconds=10) as gate:
        assert (await gate.task(await gate.create())).status == "queued"


@pytest.fixture
async def replaced(primary: Cluster, standby: Standby) -> Cluster:
    """A primary that came back as it was after its standby had taken over; it waits for no standby."""
    await asyncio.to_thread(primary.stop, "immediate")
    await standby.promote()
    await asyncio.to_thread(primary.start)
    async with connected(primary.admin_url()) as db:
        await db.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await db.execute("SELECT pg_reload_conf()")
        while await db.fetchval("SHOW synchronous_standby_names"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return primary


async def test_a_gate_that_starts_beside_an_old_primary_takes_the_one_that_took_over(
        replaced: Cluster, standby: Standby) -> None:
    """The old one takes writes as before, and may come first in the URL."""
    async with opened(both(replaced, standby), timeout_seconds=10) as gate:
        made = await gate.create()

    async with opened(standby.url("gate")) as gate:
        assert {task.task_id for task in (await gate.everything())["Task"]} == {made}


async def test_a_gate_that_has_seen_the_new_primary_never_goes_back_to_the_old_one(
        replaced: Cluster, standby: Standby, proxy: Proxy) -> None:
    """One address that leads to the old primary again: no call is answered there, not even one that reads."""
    proxy.target = standby.port
    async with opened(proxy.url(replaced.url("gate")), timeout_seconds=10) as gate:
        made = await gate.create()
        proxy.target = replaced.port
        proxy.cut()

        with pytest.raises(DatabaseUnavailable):
            await gate.create()
        with pytest.raises(DatabaseUnavailable):
            await gate.task(made)

        proxy.target = standby.port
        assert (await gate.task(made)).status == "queued"


async def test_connections_to_an_old_primary_end_when_the_new_one_is_seen(
        replaced: Cluster, standby: Standby, proxy: Proxy) -> None:
    """Nothing else would end them: the old one answers."""
    nobody = Proxy(standby.port)
    hosts = Hosts(both(proxy, nobody), SOON)
    old = await hosts.connect()
    async with nobody:
        new = await hosts.connect()

        assert old.is_closed()
        assert await new.fetchval("SHOW port") == str(standby.port)
        new.terminate()


async def test_a_connection_that_is_lost_while_another_host_is_waited_for_is_not_used(
        primary: Cluster, proxy: Proxy) -> None:
    """What is made of it says so as an outage, and nobody reads from it what only a live one knows."""
    proxy.swallow()
    hosts = Hosts(both(primary, proxy), SOON)

    async def end_first() -> None:
        await until(lambda: value(primary, f"SELECT count(*) = 1 {OF_GATES}"))
        await value(primary, f"SELECT pg_terminate_backend(pid) {OF_GATES}")

    with pytest.raises(ConnectionError):
        await asyncio.gather(hosts.open_pipeline({}, True), end_first())


async def test_a_host_that_was_silent_is_asked_again_when_no_other_answers(primary: Cluster, proxy: Proxy) -> None:
    nobody = free_port()
    hosts = Hosts(both(proxy, primary), SOON)
    proxy.swallow()
    (await hosts.connect()).terminate()
    await proxy.restore()
    hosts.urls = [url.replace(str(primary.port), str(nobody)) for url in hosts.urls]

    (await hosts.connect()).terminate()

    assert address(hosts.urls[0]) == f"127.0.0.1:{proxy.port}"


async def test_no_host_of_several_is_one_error_that_names_them_all(primary: Cluster, proxy: Proxy) -> None:
    proxy.swallow()
    nobody = free_port()
    message = f"127.0.0.1:{proxy.port}: no answer in time; 127.0.0.1:{nobody}: Connection refused"
    with pytest.raises(NotNow, match=message):
        await open_backend(f"postgresql://a@127.0.0.1:{proxy.port},127.0.0.1:{nobody}/gate",
                           settings=DatabaseSettings(timeout_seconds=1))


@pytest.mark.parametrize(("url", "addresses"), [
    ("postgresql://h/d", ["h:5432"]),
    ("postgresql://a:p%40w@h1,h2:5433/d?sslmode=require", ["h1:5432", "h2:5433"]),
    ("postgresql://a@[::1],[fe80::1]:5433/d", ["[::1]:5432", "[fe80::1]:5433"]),
    ("postgresql:///d?host=/run/postgresql", ["the host of its settings"]),
])
def test_hosts_are_read_from_a_url_as_postgres_reads_them(url: str, addresses: list[str]) -> None:
    assert [address(host) for host in one_by_one(url)] == addresses
