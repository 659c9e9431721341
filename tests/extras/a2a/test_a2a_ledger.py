"""A2A at a gate whose receipts a ledger has, which cannot be read: clients are told what they are told elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.parts.model.settings import A2ASettings, LedgerSettings
from tests.conftest import Live, Serve
from tests.extras.a2a.conftest import AGENT, Agent, said
from tests.extras.a2a.test_a2a_push import states as pushed_states
from tests.extras.a2a.test_a2a_streams import SETTINGS, Client, connect_to, count, states
from tests.support.receiver import Receiver
from tests.support.stub_ledger import CUT, StubLedger

pytestmark = pytest.mark.anyio
connect_to = connect_to


async def test_streams_and_notifications_tell_the_same(
        start: Callable[..., Live], connect_to: Callable[[Live], Client]) -> None:
    async with StubLedger() as ledger, Receiver() as receiver:
        ledger.show = lambda path: CUT
        gate = start(*SETTINGS, "webhooks.allow=127.0.0.1", "receipt_mode=memorygate_integrated",
                     f"ledger.url={ledger.url}", "ledger.auth_token=a-token")
        client = connect_to(gate)
        how = {"returnImmediately": True, "taskPushNotificationConfig": {"url": receiver.url}}
        task = (await client.call("/a2a/scan/v1/message:send", message=said(), configuration=how))["task"]
        lease = await client.lease()
        await ledger.until(lambda: len(ledger.taken) == 2)
        arrived, reading = client.gather("SubscribeToTask", {"id": task["id"]})
        await count(arrived, 1)
        await client.under(lease, "output", chunks=["page 1"])
        await count(arrived, 2)
        await client.under(lease, "fail", error={"message": "no paper"}, retryable=True, retry_after_seconds=0)
        lease = await client.lease()
        await client.under(lease, "inputs", key="auth", message="Log in?")
        await reading
        await receiver.until(lambda: len(receiver.taken) == 4)
        gate.kill()

    told = arrived[-1][1]["status"]
    assert states(arrived) == ["WORKING", "artifactUpdate", "WORKING", "WORKING", "AUTH_REQUIRED"]
    assert told["message"]["parts"][0]["text"] == "Log in?"
    assert pushed_states(receiver.taken) == ["WORKING", "WORKING", "WORKING", "AUTH_REQUIRED"]
    assert receiver.taken[-1].said["statusUpdate"]["status"] == told


async def test_an_answer_under_a_key_waits_for_the_ledger_where_only_that_knows_whether_it_was_given(
        serve: Serve) -> None:
    async with StubLedger() as ledger:
        agent = Agent(await serve(a2a=A2ASettings(agents=(AGENT,)), receipt_mode="memorygate_integrated",
                                  ledger=LedgerSettings(url=ledger.url)))
        task = await agent.begin()
        lease = await agent.lease()
        for key in ("first", "second"):
            await agent.ask(lease, key=key, keep_lease=True)
        keyed: dict[str, Any] = {"headers": [("idempotency-key", "answer-1")]}
        await agent.begin(said("yes", taskId=task["id"]), **keyed)
        ledger.show = lambda path: CUT
        answer = dict[str, Any]()
        while "error" not in answer:        # until the ledger has taken the answer
            answer = (await agent.rpc("SendMessage", {"message": said("yes", taskId=task["id"])}, **keyed)).json()

    assert answer["error"]["code"] == -32013
    assert "send the message again later" in answer["error"]["message"]
