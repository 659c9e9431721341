"""A gate that dies while it delivers: no event is lost, and those of a task keep their order."""

from __future__ import annotations

import random
import signal
import uuid
from collections import defaultdict
from contextlib import aclosing
from typing import Any

import pytest

from asyncgate import Caller, Engine, Work
from asyncgate.backends import is_lasting, open_backend
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.conformance.load import Load, own_tenant, serving
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.identity.metering import derive_event_id, floor_to
from asyncgate.parts.model.counted import PERIOD_SECONDS, write_period
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import WebhookSettings
from asyncgate.parts.model.stored import Receipt, UsageEvent
from asyncgate.parts.model.wire import Ask
from tests.support.receiver import OK, Came, Receiver, Reply

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]
ROUNDS, PER_ROUND = 3, 40
TENANTS, EVENTS = 6, 60      # of the usage
HASTY: dict[str, Any] = {"webhooks.allow": "127.0.0.1", "webhooks.retry_seconds": 0.05,
                         "webhooks.max_retry_seconds": 0.2, "lease_sweep_interval_seconds": 0.2}


async def test_a_gate_that_is_killed_while_it_delivers_tells_of_every_event_in_the_order_of_its_task(
        database: str) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)

    def answer(came: Came) -> Reply:
        return (503, {}) if draw.random() < 0.05 else OK

    async with Receiver(answer) as receiver, serving(database, **HASTY, **own_tenant()) as server:
        async with aclosing(Load(server, seed, agents=1, workers=2)) as load:
            status, made = await load.client("root").http("POST", "/v1/webhooks", {"endpoint": receiver.url})
            assert status == 200, made
            async with load.running():
                for _ in range(ROUNDS):
                    enough = len(receiver.came) + PER_ROUND
                    await receiver.until(lambda enough=enough: len(receiver.came) >= enough)    # type: ignore[misc]
                    await server.stop(signal.SIGKILL)       # some answers are on their way, some results are not stored
                    await server.start()
        await server.stop(signal.SIGTERM)
        written = await read_receipts(database, server.tenant)
        await server.start()
        await receiver.until(lambda: {request.id for request in receiver.taken} >= set(written))
        await server.stop(signal.SIGTERM)
        there = await read_receipts(database, server.tenant)        # leases may have expired meanwhile

    firsts = {request.id: request for request in reversed(receiver.taken)}.values()
    told = defaultdict[str, list[str]](list)
    for request in sorted(firsts, key=receiver.taken.index):
        request.verify(made["secret"])
        told[request.task_id].append(request.id)
    assert set(written) <= {id for ids in told.values() for id in ids} <= set(there)
    assert {task_id: ids for task_id, ids in told.items() if task_id != "None" and ids != sorted(ids)} == {}, seed


async def test_a_gate_that_is_killed_while_it_delivers_tells_the_operator_of_every_usage_event_of_all_tenants(
        database: str) -> None:
    ours = own_tenant()
    async with Receiver() as receiver:
        written, secret = await write_usage(database, ours["default_tenant_id"], receiver.url)
        async with serving(database, **HASTY, **ours) as server:
            for part in (0.2, 0.5, 0.8):
                await receiver.until(lambda part=part: len(receiver.taken) >= part * len(written))  # type: ignore[misc]
                await server.stop(signal.SIGKILL)
                await server.start()
            await receiver.until(lambda: {request.id for request in receiver.taken} >= written.keys())

    assert {request.id: request.said["data"]["tenant_id"] for request in receiver.taken} == written
    for request in receiver.taken:
        request.verify(secret)


async def write_usage(database: str, operator_id: str, url: str) -> tuple[dict[str, str], str]:
    """Add the operator's endpoint, and then usage of many tenants; return whose each event is, and the secret."""
    backend, whose = await open_backend(database), dict[str, str]()
    settings = settings_for_tests(default_tenant_id=operator_id, webhooks=WebhookSettings(allow=("127.0.0.1",)))
    operator = Gate(engine_over(backend, settings), operator_id)
    made = await operator.as_admin().create_webhook(endpoint=url, types=["usage.recorded"], all_tenants=True)
    begins = floor_to(operator.now(), PERIOD_SECONDS) + PERIOD_SECONDS
    events = range(begins, begins + EVENTS * PERIOD_SECONDS, PERIOD_SECONDS)

    def write(engine: Engine, work: Work, caller: Caller, ask: Ask) -> None:
        for at in events:
            id = derive_event_id(work.tenant_id, at, at + PERIOD_SECONDS)
            work.keep_record(UsageEvent(write_period(at // PERIOD_SECONDS), id, at, at + PERIOD_SECONDS, tasks=1))
            whose[id] = work.tenant_id
    for _ in range(TENANTS):
        await operator.engine.write(write, None, operator.engine.make_own_caller(str(uuid.uuid4())), Ask())
    await operator.engine.batches.wait_for_all()
    await backend.close()
    return whose, made.secret


async def read_receipts(url: str, tenant_id: str) -> list[str]:
    """Return the ids of all receipts of a tenant."""
    backend, receipt_ids = await open_backend(url), list[str]()
    try:
        while page := await backend.page(tenant_id, Rows(Receipt, receipt_ids[-1] if receipt_ids else "")):
            receipt_ids += [receipt.receipt_id for receipt in page]
    finally:
        await backend.close()
    return receipt_ids
