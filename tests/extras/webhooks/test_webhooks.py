"""Tenants are told of their events by HTTP: signed, at least once, in order per task; on every database."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import astuple
from standardwebhooks import Webhook as StandardWebhook
from standardwebhooks import WebhookVerificationError

from asyncgate.conformance.harness import Gate, View, refused
from asyncgate.extras.webhooks import Webhooks, sending
from asyncgate.extras.webhooks.events import derive_secret, show_secret
from asyncgate.extras.webhooks.pruning import DeliveryPruner
from asyncgate.extras.webhooks.sources import read_behind
from asyncgate.parts.identity.metering import Closer, floor_to
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model.counted import PERIOD_SECONDS
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import WebhookSettings
from asyncgate.parts.model.stored import UsageEvent
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery
from tests.support.receiver import CUT, HANG, OK, Came, Receiver
from tests.support.webhook_tools import STORY, Told, add, deliveries, make_told, settled, state_of, types, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def told(make_gate: Callable[..., Gate]) -> Told:
    """Return what makes a gate that delivers to receivers on loopback."""
    return make_told(make_gate)


async def test_another_verifier_accepts_each_delivery_and_its_data_is_the_receipt(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        await gate.finished()       # before there is an endpoint: nobody is told of it
        _, secret = await add(gate, receiver)
        offer = await gate.finished()
        await receiver.until(lambda: len(receiver.taken) == 4)
        there = await gate.receipts(offer.task_id)

    for request in receiver.came:
        request.verify(secret)
        with pytest.raises(WebhookVerificationError):
            Came(request.path, request.headers, request.body + b" ").verify(secret)
    assert types(receiver.taken) == STORY
    assert [request.id for request in receiver.taken] == [receipt.receipt_id for receipt in there]
    assert [request.said["data"]["receipt_id"] for request in receiver.taken] == [request.id
                                                                                  for request in receiver.taken]
    assert [request.said["data"]["body"] for request in receiver.taken] == [json.loads(bytes(receipt.body))
                                                                            for receipt in there]
    assert {request.said["data"]["tenant_id"] for request in receiver.taken} == {gate.tenant_id}
    assert {request.headers["content-type"] for request in receiver.taken} == {"application/json"}


async def test_a_rotated_secret_signs_beside_the_new_one_for_as_long_as_was_said(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        id, first = await add(gate, receiver)
        second = (await gate.as_admin().rotate_webhook_secret(webhook_id=id)).secret
        await gate.create()
        await receiver.until(lambda: len(receiver.taken) == 1)
        third = (await gate.as_admin().rotate_webhook_secret(webhook_id=id, overlap_seconds=0)).secret
        await gate.create()
        await receiver.until(lambda: len(receiver.taken) == 2)
        rows = [str(astuple(row)) for table in (Webhook, WebhookDelivery)
                for row in await gate.backend.page(gate.tenant_id, Rows(table))]

    both, alone = receiver.taken
    both.verify(first)
    both.verify(second)
    alone.verify(third)
    for gone in (first, second):
        with pytest.raises(WebhookVerificationError):
            alone.verify(gone)
    assert len({first, second, third}) == 3
    assert not [row for row in rows for secret in (first, second, third) if secret.removeprefix("whsec_") in row]


def signs(secrets: list[str], request: Came) -> list[int]:
    """Return which of some secrets have signed a request, by their numbers; its clock may be ahead of the real one."""
    at, signatures = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]),
                                            UTC), request.headers["webhook-signature"]
    return [number for number, secret in enumerate(secrets)
            if StandardWebhook(secret).sign(request.id, at, request.body.decode()) in signatures.split()]


async def test_each_secret_that_is_rotated_away_signs_until_its_own_overlap_is_over(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        id, first = await add(gate, receiver)
        secrets, until_when = [first], []

        async def rotate(seconds: float) -> None:
            made = await gate.as_admin().rotate_webhook_secret(webhook_id=id, overlap_seconds=seconds)
            secrets.append(made.secret)
            until_when.append(made.webhook.previous_secret_until.timestamp() - gate.backend.now()
                              if made.webhook.previous_secret_until else None)

        async def deliver() -> list[int]:
            before = len(receiver.taken)
            await gate.create()
            await receiver.until(lambda: len(receiver.taken) > before)
            return signs(secrets, receiver.taken[-1])

        await rotate(86_400)
        await rotate(3_600)
        assert await deliver() == [0, 1, 2]
        gate.skip(3_601)
        assert await deliver() == [0, 2]            # the second one went, the first one has its day
        await rotate(7_200)
        assert await deliver() == [0, 2, 3]
        gate.skip(7_201)
        assert await deliver() == [0, 3]
        gate.skip(86_400)
        assert await deliver() == [3]
        for _ in range(4):
            await rotate(86_400)
        assert await deliver() == [4, 5, 6, 7]      # three beside the newest one; the oldest one went
        row = await gate.backend.record(gate.tenant_id, Webhook, id)
        before = derive_secret(gate.backend.secret, gate.tenant_id, id, row.previous_id)
        assert [secrets.index(show_secret(secret)) for secret in (
            derive_secret(gate.backend.secret, gate.tenant_id, id, row.secret_id), before)] == [7, 6]   # as ever
        await rotate(0)
        assert await deliver() == [8]               # a leak withdraws all of them
        rows = [str(astuple(row)) for row in await gate.backend.page(gate.tenant_id, Rows(Webhook))]

    assert until_when == [pytest.approx(seconds, abs=60) if seconds else None for seconds in (
        86_400, 86_400, 86_400 - 3_601, 86_400, 86_400, 86_400, 86_400, 0)]
    raw = [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets]
    assert not [secret for secret in raw for text in [*rows, str(astuple(row))]
                if secret.hex() in text or base64.b64encode(secret).decode() in text]


@pytest.mark.parametrize("change", ["another secret", "another URL", "another type", "paused", "removed"])
async def test_what_an_admin_changes_while_events_are_being_read_holds_for_them(
        told: Told, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    changed = asyncio.Event()
    secret = ""

    async def change_first(engine: Any, *which: Any) -> Any:
        nonlocal secret
        if not changed.is_set():
            changed.set()
            admin = gate.as_admin()
            match change:
                case "another secret":
                    secret = (await admin.rotate_webhook_secret(webhook_id=id, overlap_seconds=0)).secret
                case "another URL":
                    await admin.change_webhook(webhook_id=id, endpoint=other.url)
                case "another type":
                    await admin.change_webhook(webhook_id=id, types=["task.assigned"])
                case "paused":
                    await admin.change_webhook(webhook_id=id, active=False)
                case "removed":
                    await admin.remove_webhook(webhook_id=id)
            await gate.create()
        return await read_behind(engine, *which)

    async with told() as gate, Receiver() as receiver, Receiver() as other:
        id, secret = await add(gate, receiver, types=["task.completed"] if change == "another type" else [])
        monkeypatch.setattr(sending, "read_behind", change_first)
        await gate.create()
        await changed.wait()
        if change in ("paused", "removed"):
            await gate.create()
            await asyncio.sleep(0.3)        # nothing comes, however long one waits
            assert receiver.came == []
            return
        right, wrong = (other, receiver) if change == "another URL" else (receiver, other)
        await right.until(lambda: len(right.taken) == 2)

    assert wrong.came == []
    for request in right.came:
        request.verify(secret)


async def test_what_an_admin_changes_while_a_receiver_is_slow_holds_for_all_that_is_still_to_be_sent(
        told: Told) -> None:
    async with told(parallel=1) as gate, Receiver(lambda came: HANG) as receiver, Receiver() as other:
        id, first = await add(gate, receiver)
        for _ in range(5):
            await gate.create()
        await receiver.until(lambda: len(receiver.came) == 1)
        second = (await gate.as_admin().rotate_webhook_secret(webhook_id=id, overlap_seconds=0)).secret
        await gate.as_admin().change_webhook(webhook_id=id, endpoint=other.url)
        receiver.ended.set()
        rows = await settled(gate, id, 5)

    assert len(receiver.came) == 1
    receiver.came[0].verify(first)
    for request in other.came:
        request.verify(second)
    assert {request.id for request in other.taken} == {row.delivery_id for row in rows}


async def test_events_of_a_task_arrive_in_their_order_and_each_retry_has_the_same_id_and_bytes(told: Told) -> None:
    ways = itertools.cycle([CUT, OK, (503, {}), OK, (429, {"retry-after": "0"}), OK])
    async with told() as gate, Receiver(lambda came: next(ways)) as receiver:
        id, secret = await add(gate, receiver)
        offers = [await gate.finished() for _ in range(5)]
        await receiver.until(lambda: len(receiver.taken) == 20)
        rows = await settled(gate, id, 20)

    for offer in offers:
        assert types([request for request in receiver.taken if request.task_id == offer.task_id]) == STORY
    assert len({request.id for request in receiver.taken}) == 20 < len(receiver.came)
    assert len({(request.id, request.body) for request in receiver.came}) == 20
    for request in receiver.came:
        request.verify(secret)
    assert sum(row.tries for row in rows) == len(receiver.came)


async def test_events_of_a_task_arrive_in_their_order_though_the_estimated_time_of_the_database_goes_back(
        told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    async with told() as gate, Receiver() as receiver:
        estimate, behind = gate.backend.now, itertools.cycle([0.0, 0.02, 0.04, 0.01, 0.03])
        await add(gate, receiver)
        # A slow answer of the database makes the estimate of its time fall back.
        monkeypatch.setattr(gate.backend, "now", lambda: estimate() - next(behind))
        offers = [await gate.finished() for _ in range(5)]
        await receiver.until(lambda: len({request.id for request in receiver.taken}) == 20)

    for offer in offers:
        assert types([request for request in receiver.taken if request.task_id == offer.task_id]) == STORY


async def test_an_endpoint_that_fails_again_and_again_is_only_probed_until_it_is_well(told: Told) -> None:
    well = asyncio.Event()
    async with told(retry_seconds=0.05, max_retry_seconds=0.1) as gate, (
            Receiver(lambda came: OK if well.is_set() else (500, {}))) as receiver:
        id, _ = await add(gate, receiver)
        offers = [await gate.finished() for _ in range(40)]
        await receiver.until(lambda: len(receiver.came) >= 15)
        tried = {request.id for request in receiver.came}
        failing = await state_of(gate, id)
        well.set()
        await receiver.until(lambda: len(receiver.taken) == 160)

        assert len(tried) <= 12         # those that were on their way when it had failed five times
        assert (failing.state, failing.reason, failing.failing_since is None) == ("active", "500: not a success", False)
        assert len({request.id for request in receiver.taken}) == 160
        for offer in offers:
            assert types([request for request in receiver.taken if request.task_id == offer.task_id]) == STORY
        await settled(gate, id, 160)
        assert (await state_of(gate, id)).failing_since is None


async def test_an_endpoint_that_fails_for_days_is_parked_its_admins_are_told_and_nothing_is_lost(told: Told) -> None:
    well = asyncio.Event()
    async with told(park_after_days=0.0) as gate, (
            Receiver(lambda came: OK if well.is_set() else (500, {}))) as receiver:
        await gate.as_admin().issue_key(name="root", principal_kind="human", principal_id="boss", role="admin")
        id, _ = await add(gate, receiver)
        offers = [await gate.finished() for _ in range(3)]

        async def parked() -> bool:
            return bool((await state_of(gate, id)).state == "parked")
        await until(parked)
        [notice, *_] = [anomaly for anomaly in await gate.anomalies() if anomaly["kind"] == "webhook_parked"]
        with refused("invalid_state_transition"):
            await gate.as_admin().replay_deliveries(webhook_id=id)
        well.set()
        await gate.as_admin().change_webhook(webhook_id=id, active=True)

        async def are_told() -> bool:
            await gate.as_admin().replay_deliveries(webhook_id=id)      # also what was on its way when it was parked
            return len({request.id for request in receiver.taken if request.type in STORY}) >= 12
        await until(are_told)

    assert notice["details"]["webhook_id"] == id
    assert {request.task_id for request in receiver.taken if request.type in STORY} == {offer.task_id
                                                                                        for offer in offers}


async def test_deliveries_are_replayed_by_id_by_time_and_when_they_are_parked(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        id, _ = await add(gate, receiver)
        root = gate.as_admin()
        await gate.finished()
        first = await settled(gate, id, 4)
        assert (await root.replay_deliveries(webhook_id=id, delivery_ids=[first[1].delivery_id])).replayed == 1
        await receiver.until(lambda: len(receiver.taken) == 5)
        await root.replay_deliveries(webhook_id=id, since=(first[0].first_at - timedelta(minutes=1)).isoformat())
        await receiver.until(lambda: len(receiver.taken) == 9)
        with refused("invalid_request"):
            await root.replay_deliveries(webhook_id=id, delivery_ids=["never"])
        await root.change_webhook(webhook_id=id, active=False)
        await gate.finished()
        await root.change_webhook(webhook_id=id, active=True, skip_missed=True)
        await gate.create()
        await receiver.until(lambda: len(receiver.taken) == 10)

    assert types(receiver.taken) == [*STORY, "task.accepted", *STORY, "task.assigned"]
    assert len({request.id for request in receiver.taken}) == 5


async def test_each_usage_event_is_posted_once_found_again_and_sums_up_to_the_usage(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        closer = Closer(gate.engine)
        await gate.create()
        gate.skip(PERIOD_SECONDS)
        await closer.close(gate.tenant_id, floor_to(gate.now(), PERIOD_SECONDS))     # before there is an endpoint
        id, _ = await add(gate, receiver, types=["usage.recorded"])
        for number in (1, 2, 3):
            for _ in range(number):
                await gate.create()
            gate.skip(PERIOD_SECONDS)
            await closer.close(gate.tenant_id, floor_to(gate.now(), PERIOD_SECONDS))
        stored = [row async for row in read_rows(gate.engine, gate.tenant_id, UsageEvent)][1:]
        await receiver.until(lambda: len(receiver.taken) == len(stored))
        rows = await settled(gate, id, len(stored))
        await gate.as_admin().replay_deliveries(webhook_id=id, delivery_ids=[rows[0].delivery_id])
        await receiver.until(lambda: len(receiver.taken) == len(stored) + 1)
        with refused("invalid_request"):
            await add(gate, receiver, types=["usage.recorded", "task.failed"])
        with refused("invalid_request"):
            await gate.as_admin().change_webhook(webhook_id=id, principals=["ada"])

    *once, again = receiver.taken
    assert sorted(request.id for request in once) == [event.usage_event_id for event in stored] == [row.delivery_id
                                                                                                    for row in rows]
    assert {request.type for request in once} == {"usage.recorded"}
    assert {request.said["data"]["tenant_id"] for request in once} == {gate.tenant_id}
    assert sum(request.said["data"]["tasks"] for request in once) == 6
    assert again.body in [request.body for request in once if request.id == stored[0].usage_event_id]


async def test_one_endpoint_of_the_operator_is_told_of_the_usage_of_all_tenants_also_after_a_restart(
        make_gate: Callable[..., Gate]) -> None:
    operator_id = str(uuid.uuid4())
    ours: dict[str, Any] = {"default_tenant_id": operator_id, "webhooks": WebhookSettings(
        allow=("127.0.0.1",), retry_seconds=0.01, max_retry_seconds=0.05, timeout_seconds=30.0)}
    first = make_gate(**ours)
    operator = Gate(first.engine, operator_id)
    refusing = asyncio.Event()

    async def use(*gates: Gate) -> None:
        for gate in gates:
            await gate.create()
        first.skip(PERIOD_SECONDS)
        for gate in gates:
            await Closer(first.engine).close(gate.tenant_id, floor_to(first.now(), PERIOD_SECONDS))

    async with Receiver(lambda came: (503, {}) if refusing.is_set() else OK) as receiver:
        await use(first)            # before there is an endpoint
        id, _ = await add(operator, receiver, types=["usage.recorded"], all_tenants=True)
        with refused("forbidden"):
            await add(first, receiver, types=["usage.recorded"], all_tenants=True)
        for filters in ({}, {"types": ["task.failed"]}, {"types": ["usage.recorded"], "principals": ["ada"]}):
            with refused("invalid_request"):
                await add(operator, receiver, all_tenants=True, **filters)
        with refused("invalid_request"):
            await add(operator, receiver, types=["usage.recorded"], all_tenants=True, tenant=first.tenant_id)
        with refused("invalid_request"):
            await operator.as_admin().change_webhook(webhook_id=id, types=["task.failed"])
        await use(first)            # while nobody delivers
        async with Webhooks(first.engine):
            await receiver.until(lambda: len(receiver.taken) == 1)
            later = first.stranger()
            await use(first, later)
            await settled(operator, id, 3)
            refusing.set()
            await use(later, first)
            await settled(operator, id, 2, "waiting")
        refusing.clear()
        await use(first, first.stranger(), later)
        async with Webhooks(first.beside(**ours).engine):
            rows = await settled(operator, id, 8)

    stored = {gate.tenant_id: [row async for row in read_rows(first.engine, gate.tenant_id, UsageEvent)]
              for gate in (first, later)}
    told = {request.id: request.said["data"]["tenant_id"] for request in receiver.taken}
    assert len(receiver.taken) == len(told) == 8
    assert {row.delivery_id: row.tenant for row in rows} == told
    for tenant_id, events in stored.items():
        expected = [event.usage_event_id for event in events][tenant_id == first.tenant_id:]
        assert sorted(id for id, of in told.items() if of == tenant_id) == expected


async def test_a_tenant_has_no_more_endpoints_than_its_quota_however_many_are_added_at_once(told: Told) -> None:
    async with told(max_per_tenant=3) as gate:
        root, url = gate.as_admin(), "https://hooks.example.com/"
        made = await asyncio.gather(*(root.create_webhook(endpoint=url) for _ in range(12)), return_exceptions=True)
        there = [webhook.webhook_id for webhook in (await root.list_webhooks()).webhooks]
        await root.remove_webhook(webhook_id=there[0])
        await add(gate, url)
        with refused("quota_exceeded", quota="webhooks", limit=3):
            await add(gate, url)
        await add(gate.stranger(), url)

    assert sum(isinstance(outcome, Exception) for outcome in made) == 9
    assert len(there) == 3


async def test_no_tenant_sees_changes_or_is_told_of_what_is_anothers(told: Told) -> None:
    async with told() as gate, Receiver() as ours, Receiver() as theirs:
        other = gate.stranger()
        id, _ = await add(gate, ours)
        await add(other, theirs)
        root: View = other.as_admin()
        for call, more in [(root.change_webhook, {"active": False}), (root.remove_webhook, {}),
                           (root.rotate_webhook_secret, {}), (root.test_webhook, {}), (root.list_deliveries, {}),
                           (root.replay_deliveries, {})]:
            with refused("webhook_not_found"):
                await call(webhook_id=id, **more)
        mine, yours = await gate.finished(), await other.finished()
        await ours.until(lambda: len(ours.taken) == 4)
        await theirs.until(lambda: len(theirs.taken) == 4)

        assert id not in [webhook.webhook_id for webhook in (await root.list_webhooks()).webhooks]
    assert {request.task_id for request in ours.came} == {mine.task_id}
    assert {request.task_id for request in theirs.came} == {yours.task_id}


async def test_a_removed_endpoint_leaves_nothing_and_old_deliveries_are_forgotten(told: Told) -> None:
    async with told(log_days=1) as gate, Receiver() as receiver:
        id, _ = await add(gate, receiver)
        gone, _ = await add(gate, receiver)
        await gate.finished()
        await settled(gate, id, 4)
        await settled(gate, gone, 4)
        await gate.as_admin().remove_webhook(webhook_id=gone)
        with refused("webhook_not_found"):
            await gate.as_admin().list_deliveries(webhook_id=gone)
        assert {row.webhook_id for row in await gate.backend.page(gate.tenant_id, Rows(WebhookDelivery))} == {id}
        assert await DeliveryPruner(gate.engine).run() == 0
        gate.skip(2 * 86_400)
        assert await DeliveryPruner(gate.engine).run() == 4

        assert await deliveries(gate, id) == []
