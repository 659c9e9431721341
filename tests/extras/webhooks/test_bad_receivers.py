"""Whatever a receiver of webhooks does, it harms nobody else; the database cannot matter here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, OwnTenants, refused, settings_for_tests
from asyncgate.extras.doctor.installation import Installation
from asyncgate.extras.doctor.running import check_webhooks
from asyncgate.extras.webhooks import Webhooks
from asyncgate.extras.webhooks.post import UNREACHED, Post
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.model.database import Around
from asyncgate.parts.model.findings import Finding
from asyncgate.parts.model.queries import OpenWebhooks
from asyncgate.parts.model.settings import WebhookSettings
from asyncgate.parts.process import lookups
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiver import CUT, FLOOD, HANG, OK, TRICKLE, Came, Receiver, Reply
from tests.support.webhook_tools import STORY, Told, add, deliveries, make_told, settled, state_of, types, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def make_gate(tmp_path: Path) -> AsyncIterator[Callable[..., Gate]]:
    """Return what makes gates over one file, each with a tenant of its own."""
    backend: Any = OwnTenants(await open_backend(f"sqlite:///{tmp_path / 'gate.db'}"))

    def make(**settings: Any) -> Gate:
        return Gate(engine_over(backend, settings_for_tests(**settings)), str(uuid.uuid4()))
    async with contextlib.aclosing(backend):
        yield make


@pytest.fixture
def told(make_gate: Callable[..., Gate]) -> Told:
    """Return what makes a gate that delivers to receivers on loopback."""
    return make_told(make_gate)


@pytest.mark.parametrize("way", [(500, {}), CUT, HANG, FLOOD, TRICKLE, "redirects", "closed", "private"])
async def test_a_bad_receiver_delays_no_other_endpoint(told: Told, way: Any) -> None:
    async with told(timeout_seconds=1.0 if way in (HANG, TRICKLE) else 30.0) as gate, Receiver() as good, (
            Receiver()) as elsewhere, Receiver(host="127.0.0.2") as hidden:
        reply: Reply = (302, {"location": elsewhere.url}) if way == "redirects" else way
        other = gate.stranger()
        async with Receiver(lambda came: reply) as bad:
            target = {"closed": "http://127.0.0.1:9/", "private": "http://localhost:9/"}.get(str(way), bad.url)
            bad_id, _ = await add(gate, target)
            await add(gate, good)
            await add(other, good)
            for _ in range(3):
                await gate.finished()
                await other.finished()
            await good.until(lambda: len({request.id for request in good.taken}) == 24)
            rows = await settled(gate, bad_id, 1, "waiting")

            assert {row.reason is not None for row in rows if row.tries} == {True}
            assert elsewhere.came == hidden.came == []
            assert bad.sent_bytes < 2**25       # nobody reads what is too much
    firsts = dict[str, Any]()
    for request in good.taken:      # on a slow machine a good one may be late, and told again
        firsts.setdefault(request.id, request)
    for task_id in {delivery.task_id for delivery in firsts.values()}:
        assert types([delivery for delivery in firsts.values() if delivery.task_id == task_id]) == STORY


async def test_a_success_is_one_even_if_the_answer_is_compressed(told: Told) -> None:
    async with told() as gate, Receiver(lambda came: (200, {"content-encoding": "gzip"})) as receiver:
        id, _ = await add(gate, receiver, types=["task.assigned"])
        await gate.create()
        await receiver.until(lambda: len(receiver.came) == 1)

        async def is_tried() -> Any:
            return [row for row in await deliveries(gate, id) if row.tries]
        [row] = await until(is_tried)

    assert (row.state, row.status, row.reason) == ("delivered", 200, None)


class Slow(Receiver):
    """A receiver that answers when it may."""

    def __init__(self, answer: Callable[[Came], Reply]) -> None:
        super().__init__(answer)
        self.may = asyncio.Event()

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        await self.may.wait()
        await super()._reply(writer, reply)


async def test_what_is_gone_is_the_url_that_was_called_and_not_the_one_that_follows_it(told: Told) -> None:
    async with told() as gate, Receiver() as good, (gone := Slow(lambda came: (410, {}))):
        id, _ = await add(gate, gone, types=["task.assigned"])
        await gate.create()
        await gone.until(lambda: len(gone.came) == 1)
        await gate.as_admin().change_webhook(webhook_id=id, endpoint=good.url)
        gone.may.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            [row] = await settled(gate, id, 1)
        state = await state_of(gate, id)

    assert (row.tries, state.state, state.reason) == (2, "active", None)


@pytest.mark.parametrize("way", ["another URL", "replay"])
async def test_what_an_admin_does_while_an_attempt_hangs_is_not_undone_by_it(told: Told, way: str) -> None:
    well = asyncio.Event()
    async with told(retry_seconds=3600.0, max_retry_seconds=3600.0) as gate, Receiver() as good, (
            receiver := Slow(lambda came: OK if well.is_set() else (503, {}))):
        id, _ = await add(gate, receiver, types=["task.assigned"])
        receiver.may.set()
        await gate.create()
        await settled(gate, id, 1, "waiting")
        receiver.may.clear()
        await gate.create()
        await receiver.until(lambda: len(receiver.came) == 2)       # the second attempt hangs, and will fail
        well.set()
        if way == "replay":
            await gate.as_admin().replay_deliveries(webhook_id=id)
        else:
            await gate.as_admin().change_webhook(webhook_id=id, endpoint=good.url)
        receiver.may.set()
        async with asyncio.timeout(PATIENCE_SECONDS):       # not after an hour
            rows = await settled(gate, id, 2)
        state = await state_of(gate, id)

    assert [row.tries for row in rows] == [2, 2]
    assert (state.failing_since, state.reason) == (None, None)


async def test_a_receiver_that_is_gone_is_not_called_again(told: Told) -> None:
    async with told() as gate, Receiver(lambda came: (410, {})) as receiver:
        id, _ = await add(gate, receiver)
        await gate.create()

        async def disabled() -> bool:
            return bool((await state_of(gate, id)).state == "disabled")
        await until(disabled)
        calls = len(receiver.came)
        await gate.create()
        tested = await gate.as_admin().test_webhook(webhook_id=id)

    assert [anomaly["kind"] for anomaly in await gate.anomalies()] == ["webhook_gone"]
    assert (tested.delivered, tested.status, tested.reason) == (False, 410, "410: gone")
    assert calls + 1 == len(receiver.came)


async def test_an_endpoint_is_told_only_of_the_types_and_the_inboxes_that_it_asked_for(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        await add(gate, receiver, types=["task.result_ready"], principals=["bob"])
        for _ in range(30):
            await gate.finished()
        task_id = await gate.create(by="bob")
        claimed = await gate.claim()
        assert claimed is not None
        await gate.as_worker().complete(task_id=task_id, lease_id=claimed.lease_id, result={})
        await receiver.until(lambda: bool(receiver.taken))
        with refused("invalid_request"):
            await gate.as_admin().create_webhook(endpoint=receiver.url, types=["no.such"])

    assert [(request.type, request.task_id) for request in receiver.taken] == [("task.result_ready", task_id)]


@contextlib.asynccontextmanager
async def twins() -> AsyncIterator[tuple[Receiver, Receiver]]:
    """Have receivers on one port of two addresses: others may have the port that is free on the first."""
    async with contextlib.AsyncExitStack() as opened:
        while True:
            public = await opened.enter_async_context(Receiver(host="127.0.0.2"))
            try:
                private = await opened.enter_async_context(Receiver(port=public.port))
            except OSError:
                continue
            break
        yield public, private


async def test_a_host_that_moves_to_a_private_address_is_not_called_there(make_gate: Callable[..., Gate]) -> None:
    addresses = ["127.0.0.2"]

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)
    settings = WebhookSettings(allow=("127.0.0.2/32",), retry_seconds=0.01, max_retry_seconds=0.01)
    gate = make_gate(webhooks=settings)
    sender = Webhooks(gate.engine)
    sender.post = Post(gate.engine.settings, resolve)
    async with sender, twins() as (public, private):
        id, _ = await add(gate, f"http://hooks.example.com:{public.port}/")
        await gate.create()
        await public.until(lambda: len(public.taken) == 1)
        addresses[:] = ["127.0.0.1"]
        await gate.create()
        [row] = await settled(gate, id, 1, "waiting")
        tested = await gate.as_admin().test_webhook(webhook_id=id)

        assert private.came == []
        assert "webhooks.allow" in row.reason
        assert tested.delivered is False
        assert "127.0.0.1" not in row.reason + tested.reason        # nobody maps what is behind the gate
        addresses[:] = ["127.0.0.2"]
        await public.until(lambda: len(public.taken) == 2)


async def test_a_test_of_an_endpoint_tells_nothing_of_the_network_behind_the_gate(told: Told) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if (kind := host.partition(".")[0]) == "unknown":
            raise socket.gaierror
        return {"private": ["10.0.0.1"], "local": ["127.0.0.9"], "empty": [], "closed": ["127.0.0.2"],
                "wrong": ["x"]}[kind]

    async with told() as gate:
        sender = gate.engine.find_extension(Webhooks)
        settings = WebhookSettings(allow=("127.0.0.2/32",))
        sender.post = Post(replace(gate.engine.settings, webhooks=settings), resolve)
        tested = []
        for kind in ("unknown", "private", "local", "empty", "closed", "wrong"):
            id, _ = await add(gate, f"https://{kind}.example.com:1/")
            tested.append(await gate.as_admin().test_webhook(webhook_id=id))
        for kind in ("unknown", "private"):
            id, _ = await add(gate, f"http://{kind}.example.com/")
            tested.append(await gate.as_admin().test_webhook(webhook_id=id))

    assert {(outcome.delivered, outcome.status, outcome.reason, outcome.took_ms)
            for outcome in tested} == {(False, None, UNREACHED, None)}


async def test_a_tenant_whose_name_servers_hang_holds_the_look_ups_of_no_other(
        make_gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    asked: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        asked.append(host)
        if host.startswith("slow"):
            answer.wait(2 * PATIENCE_SECONDS)
        return ["10.0.0.1"]
    monkeypatch.setattr(lookups, "look_up", look_up)
    hasty = make_gate(webhooks=WebhookSettings(max_per_tenant=200, timeout_seconds=0.5))
    patient = make_gate(webhooks=WebhookSettings(timeout_seconds=PATIENCE_SECONDS))
    threads = lookups.Lookups()
    async with Webhooks(hasty.engine) as sender, Webhooks(patient.engine) as unhurried:
        sender.post = Post(hasty.engine.settings, threads.resolve)
        unhurried.post = Post(patient.engine.settings, threads.resolve)
        mine = [(await add(hasty, f"https://slow{at}.example.com/"))[0] for at in range(lookups.LOOKUP_THREADS + 20)]
        theirs, _ = await add(patient, "https://hooks.example.com/")
        try:
            hung = await asyncio.gather(*(hasty.as_admin().test_webhook(webhook_id=id) for id in mine))
            tested = await patient.as_admin().test_webhook(webhook_id=theirs)
        finally:
            answer.set()

        assert {outcome.reason for outcome in [*hung, tested]} == {UNREACHED}
        assert (asked.count("hooks.example.com"), len(asked)) == (1, lookups.LOOKUPS_OF_ASKER + 1)
        await Gate(patient.engine, hasty.tenant_id).as_admin().test_webhook(webhook_id=mine[-1])
        assert len(asked) > lookups.LOOKUPS_OF_ASKER + 1


@pytest.mark.parametrize("url", [
    "ftp://hooks.example.com/", "https://user:secret@hooks.example.com/", "http://hooks.example.com/", "https://",
    "https://10.0.0.1/", "https://[::1]/", "https://169.254.169.254/latest", "https://hooks.example.com/#part",
    "hooks.example.com", "https://[::ffff:127.0.0.1]/"])
async def test_a_url_that_could_never_be_called_is_refused(make_gate: Callable[..., Gate], url: str) -> None:
    gate = make_gate()
    with refused("invalid_request"):
        await gate.as_admin().create_webhook(endpoint=url)
    assert (await gate.as_admin().list_webhooks()).webhooks == []


async def test_a_suspended_tenant_is_told_nothing_until_its_suspension_ends(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        operator = gate.beside(default_tenant_id="00000000-0000-4000-8000-00000000000f")
        operator = Gate(operator.engine, "00000000-0000-4000-8000-00000000000f")
        other = gate.stranger()
        await add(gate, receiver)
        await operator.as_admin().suspend_tenant(tenant=gate.tenant_id)
        offer = await gate.finished()
        await add(other, receiver, types=["task.assigned"])
        await other.create()
        await receiver.until(lambda: len(receiver.came) == 1)
        await operator.as_admin().suspend_tenant(tenant=gate.tenant_id, suspended=False)
        await gate.create()
        await receiver.until(lambda: len(receiver.came) == 6)

    assert receiver.came[0].said["data"]["tenant_id"] == other.tenant_id
    assert types([request for request in receiver.came if request.task_id == offer.task_id]) == STORY


async def test_endpoints_that_fail_or_are_given_up_are_found_and_counted(told: Told) -> None:
    async with told() as gate, Receiver() as good, Receiver(lambda came: (500, {})) as bad:
        gate.engine.extend(metrics := Metrics(gate.engine))
        good_id, _ = await add(gate, good)
        await gate.create()
        await settled(gate, good_id, 1)
        [well] = await look(gate)
        bad_id, _ = await add(gate, bad)
        await gate.create()
        await settled(gate, bad_id, 1, "waiting")
        [failing] = await look(gate)
        await gate.as_admin().change_webhook(webhook_id=bad_id, active=False)

        assert [finding.severity for finding in await look(gate)] == ["ok"]
        assert (well.severity, failing.severity) == ("ok", "warning")
        assert f"webhooks that fail: {bad_id} of tenant {gate.tenant_id}" in failing.seen
        assert metrics.numbers.deliveries["delivered",] >= 1 <= metrics.numbers.deliveries["failed",]
        assert sum(metrics.numbers.delays[()].counts) == metrics.numbers.deliveries["delivered",]


async def look(gate: Gate) -> list[Finding]:
    """Return what the doctor finds of webhooks."""
    return [finding async for finding in check_webhooks(Installation(gate.engine.settings, running=gate.engine))]


class Held(Around):
    """A backend whose next commit, once that is asked, waits until it may go on."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.holds = False
        self.reached, self.let_go = asyncio.Event(), asyncio.Event()

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out a batch; the one that is held comes later."""
        if self.holds:
            self.holds = False
            self.reached.set()
            await self.let_go.wait()
        await self.backend.transact(tenant_id, needs, decide)


class Late(Around):
    """A backend whose next answer about endpoints, once that is asked, comes when it may."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.holds = False
        self.reached, self.let_go = asyncio.Event(), asyncio.Event()

    async def page(self, tenant_id: str, query: Any) -> list[Any]:
        """Read a page; the one that is held is handed over later."""
        rows: list[Any] = await self.backend.page(tenant_id, query)
        if self.holds and query == OpenWebhooks():
            self.holds = False
            self.reached.set()
            await self.let_go.wait()
        return rows


async def test_a_look_that_has_read_before_an_endpoint_was_added_leaves_that_its_courier(
        make_gate: Callable[..., Gate]) -> None:
    plain = make_gate(webhooks=WebhookSettings(allow=("127.0.0.1",)))
    gate = Gate(engine_over(late := Late(plain.backend), plain.engine.settings), plain.tenant_id)
    async with Webhooks(gate.engine) as sender, Receiver() as receiver:
        first, _ = await add(gate, receiver, types=["task.completed"])
        await asyncio.gather(*sender.looks)
        late.holds = True
        await gate.as_admin().change_webhook(webhook_id=first, description="looked at again")
        await asyncio.wait_for(late.reached.wait(), PATIENCE_SECONDS)
        second, _ = await add(gate, receiver, types=["task.assigned"])
        await asyncio.wait(sender.looks, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)
        late.let_go.set()
        await asyncio.gather(*sender.looks)

        assert sender.couriers[gate.tenant_id].keys() == {first, second}


class Recovering(Receiver):
    """A receiver that refuses two requests, answers the third at once, and those behind it when they may go on."""

    def __init__(self, held: Held) -> None:
        super().__init__(self._judge)
        self.held, self.let_go = held, asyncio.Event()

    def _judge(self, came: Came) -> Reply:
        self.held.holds |= len(self.came) == 3      # what is committed next is the result of the third
        return OK if len(self.came) > 2 else (503, {})

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if len(self.came) > 3:
            await self.let_go.wait()
        await super()._reply(writer, reply)


async def test_an_event_that_is_taken_while_the_result_before_it_is_stored_is_not_sent_again(
        make_gate: Callable[..., Gate]) -> None:
    plain = make_gate(webhooks=WebhookSettings(
        allow=("127.0.0.1",), timeout_seconds=30.0, parallel=1, retry_seconds=3600.0, max_retry_seconds=3600.0))
    gate = Gate(engine_over(held := Held(plain.backend), plain.engine.settings), plain.tenant_id)
    async with Webhooks(gate.engine) as sender, (receiver := Recovering(held)):
        id, _ = await add(gate, receiver, types=["task.assigned"])
        for _ in range(2):
            await gate.create()
        failed = [row.delivery_id for row in await settled(gate, id, 2, "waiting")]
        courier = sender.couriers[gate.tenant_id][id]

        async def is_taken() -> bool:
            return bool(courier.outcome.rows)

        async def let_the_second_pass() -> None:
            await held.reached.wait()
            receiver.let_go.set()
            await until(is_taken)       # of which the commit that is under way knows nothing
            held.let_go.set()
        await asyncio.gather(gate.as_admin().replay_deliveries(webhook_id=id, delivery_ids=failed),
                             let_the_second_pass())
        await gate.create()
        rows = await settled(gate, id, 3)

    assert sorted(request.id for request in receiver.came) == sorted([*failed, *(row.delivery_id for row in rows)])
    assert [row.tries for row in rows] == [1, 1, 1]
