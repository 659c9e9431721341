"""Whoever may read a task has its events posted, with headers for the receiver that nobody sees again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import astuple, replace

from asyncgate import Work
from asyncgate.conformance.harness import Gate, refused
from asyncgate.extras.webhooks import Webhooks
from asyncgate.extras.webhooks.pruning import DeliveryPruner
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery, WebhookHead
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiver import HANG, OK, Came, Receiver, Reply
from tests.support.webhook_tools import STORY, Told, add, make_told, types, until

pytestmark = pytest.mark.anyio
SECRET = "Bearer s3cr3t-of-the-receiver"
DEAD = "http://127.0.0.1:9/"
WHERE = [{"type": "url", "uri": "https://example.com/1"}]


@pytest.fixture
def told(make_gate: Callable[..., Gate]) -> Told:
    """Return what makes a gate that delivers to receivers on loopback."""
    return make_told(make_gate)


async def follow(gate: Gate, task_id: str, url: str, by: str = "ada", **more: Any) -> Any:
    """Have a task's events posted."""
    return await gate.as_agent(by).create_task_webhook(task_id=task_id, endpoint=url, **more)


async def finish(gate: Gate, worker: str = "w1") -> None:
    """Lease the task that waits, and complete it."""
    offer = await gate.claim(worker)
    assert offer is not None
    await gate.as_worker(worker).complete(task_id=offer.task_id, lease_id=offer.lease_id, artifacts=WHERE)


async def rows_of(gate: Gate) -> list[Webhook]:
    """Return the stored endpoints."""
    return await gate.backend.page(gate.tenant_id, Rows(Webhook))


async def counted(gate: Gate) -> int:
    """Return how many webhooks of tasks count."""
    head = await gate.backend.record(gate.tenant_id, WebhookHead)
    return 0 if head is None else head.tasks


async def ended(gate: Gate, number: int = 1) -> None:
    """Wait until so many webhooks have ended with their tasks."""
    async def enough() -> bool:
        return sum(row.state == "ended" for row in await rows_of(gate)) >= number
    await until(enough)


async def test_the_owner_is_told_of_one_task_from_its_beginning_to_its_end(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        await gate.finished()           # nobody has asked to be told of this one
        offer = await gate.leased()
        task_id = offer.task_id
        made = await follow(gate, task_id, receiver.url, headers={"Authorization": SECRET})
        await gate.as_worker().complete(task_id=task_id, lease_id=offer.lease_id, artifacts=WHERE)
        await ended(gate)
        await gate.finished()
        [row] = await rows_of(gate)
        left = await counted(gate)

    assert types(receiver.taken) == STORY[1:]       # the first tells it nothing: it has created the task
    for request in receiver.taken:
        request.verify(made.secret)
        assert (request.task_id, request.headers["authorization"]) == (task_id, SECRET)
    assert (row.state, row.headers, left) == ("ended", None, 0)


async def test_nobody_is_shown_the_headers_again_and_no_row_has_them(told: Told) -> None:
    async with told() as gate:
        task_id = await gate.create()
        made = await follow(gate, task_id, DEAD, headers={"Authorization": SECRET, "X-Token": "abc-token"})
        shown = (await gate.as_admin().list_task_webhooks(task_id=task_id)).webhooks
        rows = [str(astuple(row)) for row in await rows_of(gate)]

    assert shown == [made.webhook]
    assert (shown[0].headers, shown[0].authorization_scheme) == (["authorization", "x-token"], "Bearer")
    assert "s3cr3t" not in str((made, rows))
    assert "abc-token" not in str((made, rows))
    assert rows


async def test_an_admin_cannot_have_the_headers_sent_to_another_endpoint(told: Told) -> None:
    async with told() as gate, Receiver() as receiver, Receiver() as other:
        task_id = await gate.create()
        made = await follow(gate, task_id, receiver.url, headers={"Authorization": SECRET})
        plain = await follow(gate, task_id, receiver.url)
        with refused("invalid_state_transition"):
            await gate.as_admin().change_webhook(webhook_id=made.webhook.webhook_id, endpoint=other.url)
        await gate.as_admin().change_webhook(webhook_id=made.webhook.webhook_id, endpoint=receiver.url, active=True)
        await gate.as_admin().change_webhook(webhook_id=plain.webhook.webhook_id, endpoint=other.url)
        await finish(gate)
        await ended(gate, 2)

    assert {request.headers.get("authorization") for request in receiver.taken} == {SECRET}
    assert {request.headers.get("authorization") for request in other.taken} == {None}


async def test_a_reader_has_webhooks_of_its_own_and_the_owner_sees_all(told: Told) -> None:
    async with told() as gate:
        offer = await gate.leased(worker="w1")
        await follow(gate, offer.task_id, DEAD)
        theirs = await gate.as_worker("w1").create_task_webhook(task_id=offer.task_id, endpoint=DEAD)
        seen = {name: [row.webhook_id for row in (await view.list_task_webhooks(task_id=offer.task_id)).webhooks]
                for name, view in (("owner", gate.as_agent("ada")), ("worker", gate.as_worker("w1")))}
        first, second = [row.webhook_id for row in await rows_of(gate)]
        with refused("webhook_not_found"):
            await gate.as_worker("w1").remove_task_webhook(webhook_id=first)
        with refused("forbidden"):
            await follow(gate, offer.task_id, DEAD, by="eve")
        with refused("forbidden"):
            await gate.as_agent("eve").list_task_webhooks(task_id=offer.task_id)
        with refused("task_not_found"):
            await follow(gate.stranger(), offer.task_id, DEAD)
        own = await gate.as_admin().list_webhooks()

    assert seen == {"owner": [first, second], "worker": [second]}
    assert theirs.webhook.webhook_id == second
    assert own.webhooks == []


async def test_a_name_replaces_the_webhook_of_that_name_and_loses_no_event(told: Told) -> None:
    async with told() as gate, Receiver(lambda came: (503, {})) as broken, Receiver() as whole:
        task_id = await gate.create()
        await follow(gate, task_id, broken.url, name="mine")
        await finish(gate)
        await broken.until(lambda: len(broken.came) > 2)
        again = await follow(gate, task_id, whole.url, name="mine", headers={"x-token": "2"})
        await ended(gate)
        rows = await rows_of(gate)

    assert [row.webhook_id for row in rows] == [again.webhook.webhook_id]
    assert types(whole.taken) == STORY[1:]
    assert {request.headers["x-token"] for request in whole.taken} == {"2"}


@pytest.mark.parametrize("headers", [
    {"x-a": "b\r\nx-evil: 1"}, {"x-a\r\nx-evil": "1"}, {"x-a": ""}, {"": "a"}, {"x a": "b"}, {"x-a": "é"},
    {"x-a": "a\0"}, {"Host": "evil.example"}, {"content-length": "0"}, {"Webhook-Signature": "v1,x"},
    {"x-a": "1", "X-A": "2"}, {"transfer-encoding": "chunked"}, {"x-a": " b"}, {"x-a": "b\n"}])
async def test_a_header_that_says_how_the_request_is_read_or_ends_its_line_is_refused(
        told: Told, headers: dict[str, str]) -> None:
    async with told() as gate:
        task_id = await gate.create()
        with refused("invalid_request") as refusal:
            await follow(gate, task_id, DEAD, headers=headers)
        left = await rows_of(gate)

    assert "evil" not in str(refusal.value)
    assert left == []


async def test_there_are_so_many_webhooks_of_a_task_and_of_a_tenant_however_many_ask_at_once(told: Told) -> None:
    async with told(max_per_task=2, max_of_tasks=3) as gate:
        task_id, other = await gate.create(), await gate.create()
        replies = await asyncio.gather(*[follow(gate, task_id, DEAD) for _ in range(5)], return_exceptions=True)
        await follow(gate, other, DEAD)
        with refused("quota_exceeded"):
            await follow(gate, other, DEAD)
        [first, *_] = await rows_of(gate)
        await gate.as_agent().remove_task_webhook(webhook_id=first.webhook_id)
        await follow(gate, other, DEAD)
        left = await counted(gate)

    assert sorted(getattr(reply, "code", "made") for reply in replies) == ["made"] * 2 + ["quota_exceeded"] * 3
    assert left == 3


async def test_an_address_that_the_gate_may_not_call_is_refused(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    task_id = await gate.create()
    for url in (DEAD, "https://10.0.0.1/", "ftp://example.com/", "https://a@example.com/", "https://example.com/#x"):
        with refused("invalid_request"):
            await follow(gate, task_id, url)
    with refused("invalid_request"):
        await follow(gate, task_id, "https://example.com/", types=["usage.recorded"])
    with refused("invalid_request"):
        await follow(gate, task_id, "https://example.com/", form="unheard-of")


async def test_one_that_asks_for_the_future_alone_is_told_of_nothing_else(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        offer = await gate.leased()
        await follow(gate, offer.task_id, receiver.url, past=False, types=["task.accepted", "task.completed"])
        await gate.as_worker().complete(task_id=offer.task_id, lease_id=offer.lease_id, artifacts=WHERE)
        await ended(gate)

    assert types(receiver.taken) == ["task.completed"]


async def test_a_receiver_that_is_gone_is_told_to_whoever_made_the_webhook(told: Told) -> None:
    async with told() as gate, Receiver(lambda came: (410, {})) as receiver:
        offer = await gate.finished()
        await follow(gate, offer.task_id, receiver.url)

        async def gone() -> bool:
            return [row.state for row in await rows_of(gate)] == ["disabled"]
        await until(gone)
        inbox = (await gate.as_agent().list_receipts(receipt_type="system.anomaly")).receipts

    assert [json.loads(bytes(receipt.body))["kind"] for receipt in inbox] == ["webhook_gone"]


async def test_what_has_ended_is_kept_for_a_while_and_then_deleted_with_its_deliveries(told: Told) -> None:
    async with told(log_days=2) as gate, Receiver() as receiver:
        offer = await gate.finished()
        await follow(gate, offer.task_id, receiver.url)
        await ended(gate)
        await DeliveryPruner(gate.engine).run()
        kept = await rows_of(gate)
        gate.skip(3 * DAY_SECONDS)
        await DeliveryPruner(gate.engine).run()
        left = [*await rows_of(gate), *await gate.backend.page(gate.tenant_id, Rows(WebhookDelivery))]

    assert len(kept) == 1
    assert left == []


async def test_a_webhook_whose_task_is_gone_goes_with_it(told: Told) -> None:
    async with told() as gate:
        task_id = await gate.create()
        await follow(gate, task_id, DEAD)
        [row] = await rows_of(gate)
        other = f"{task_id[:-1]}{'0' if task_id[-1] != '0' else '1'}"

        def forge(work: Work) -> None:
            work.keep_record(replace(row, webhook_id=f"{other}.0", task_id=other, state="disabled"))
        await gate.engine.change(gate.tenant_id, forge)
        await DeliveryPruner(gate.engine).run()
        left = await rows_of(gate)

    assert [row.task_id for row in left] == [task_id]


async def test_a_receiver_that_fails_delays_neither_other_tasks_nor_endpoints_of_the_tenant(told: Told) -> None:
    def answer(came: Came) -> Reply:
        return (503, {}) if came.path == "/bad" else OK

    async with told() as gate, Receiver(answer) as receiver:
        bad = (await gate.finished()).task_id
        await follow(gate, bad, receiver.url.replace("/hook", "/bad"))
        await add(gate, receiver, types=["task.result_ready"])
        offers = [await gate.finished() for _ in range(3)]
        for offer in offers[1:]:
            await follow(gate, offer.task_id, receiver.url)
        await ended(gate, 2)
        await receiver.until(lambda: len(receiver.taken) == 3 + 2 * 3)
        [row] = [row for row in await rows_of(gate) if row.task_id == bad]

    assert row.state == "active"


async def test_what_another_process_has_written_is_delivered_too(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        task_id = await gate.create()
        await follow(gate, task_id, receiver.url)
        sender = gate.engine.find_extension(Webhooks)
        assert sender is not None
        await until(lambda: asyncio.sleep(0, sender.bell))
        assert sender.bell is not None
        gate.engine.withdraw(sender.bell)       # as if the commits that follow were those of another process
        await finish(gate)
        sender.followers[gate.tenant_id].scout.call()
        await ended(gate)

    assert types(receiver.taken) == STORY[1:]


async def test_an_ended_webhook_is_not_made_active_again(told: Told) -> None:
    async with told() as gate, Receiver() as receiver:
        offer = await gate.finished()
        made = await follow(gate, offer.task_id, receiver.url)
        await ended(gate)
        with refused("invalid_state_transition"):
            await gate.as_admin().change_webhook(webhook_id=made.webhook.webhook_id, active=True)
        listed = await gate.as_admin().list_deliveries(webhook_id=made.webhook.webhook_id)

    assert [row.state for row in listed.deliveries] == ["delivered"] * 3


async def test_a_gate_that_stops_waits_for_all_receivers_of_tasks_at_the_same_time(told: Told) -> None:
    async with told() as gate, Receiver(lambda came: HANG) as receiver:
        for _ in range(3):
            await follow(gate, await gate.create(), receiver.url)
            await finish(gate)
        await receiver.until(lambda: len({request.task_id for request in receiver.came}) == 3)
        webhooks = gate.engine.find_extension(Webhooks)
        assert webhooks is not None
        followers = webhooks.followers[gate.tenant_id]
        couriers = [courier for theirs in followers.by_task.values() for courier in theirs.values()]
        stopping = asyncio.ensure_future(followers.close(PATIENCE_SECONDS))
        while not any(courier.closed for courier in couriers):  # noqa: ASYNC110
            await asyncio.sleep(0)
        told_to_stop = [courier.closed for courier in couriers]
        receiver.ended.set()
        await stopping

    assert told_to_stop == [True] * 3
