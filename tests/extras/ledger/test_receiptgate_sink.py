"""The way to a ReceiptGate: its dialect is found out, a refusal is told from an outage, nothing comes twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.extras.ledger import sinks as receipts_sinks
from asyncgate.extras.ledger.sinks import Outage, Refusal
from asyncgate.extras.ledger.sinks.receiptgate import ReceiptGate, open_sink
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import LedgerSettings, Settings
from tests.extras.ledger.test_receiptgate_schema import RECEIPT, TASK, TENANT, completed
from tests.support.receiptgate_stand_in import KEY, StandIn, served

pytestmark = pytest.mark.anyio

Open = Callable[..., ReceiptGate]
TENANT_THERE = "default"


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[StandIn, str]]:
    ledger = StandIn()
    with served(ledger) as url:
        yield ledger, url


@pytest.fixture(params=["1.0", "1.1"])
def ledger(request: pytest.FixtureRequest, standing: tuple[StandIn, str]) -> StandIn:
    standing[0].begin(request.param)
    return standing[0]


@pytest.fixture
def url(standing: tuple[StandIn, str]) -> str:
    return standing[1]


@pytest.fixture
async def sink_to() -> AsyncIterator[Open]:
    opened: list[ReceiptGate] = []

    def sink_to(url: str, *, token: str = KEY, dialect: Any = "auto", timeout_ms: int = 20_000) -> ReceiptGate:
        opened.append(open_sink(Settings(
            receipt_mode="receiptgate_integrated", ledger=LedgerSettings(
                dialect=dialect, url=url, auth_token=token, timeout_ms=timeout_ms, tenant_id=TENANT_THERE))))
        return opened[-1]

    yield sink_to
    for sink in opened:
        await sink.close()


def rendered(sink: ReceiptGate, number: int = 1, **body: Any) -> bytes:
    content = sink.render(TENANT, replace(completed(**body), receipt_id=f"r{number}"), TASK)
    assert content is not None
    return content


async def test_the_dialect_is_found_out_once_and_remembered(ledger: StandIn, url: str, sink_to: Open) -> None:
    sink = sink_to(url)

    for number in range(3):
        await sink.send(TENANT, rendered(sink, number))

    assert list(ledger.receipts) == ["r0", "r1", "r2"]
    assert sink.dialect == ledger.dialect
    assert len(ledger.submitted) == (4 if ledger.dialect == "1.0" else 3)
    assert {"obligation_id" in receipt for receipt in ledger.receipts.values()} == {ledger.dialect == "1.1"}


async def test_a_ledger_that_changes_its_dialect_is_followed(ledger: StandIn, url: str, sink_to: Open) -> None:
    sink = sink_to(url)
    await sink.send(TENANT, rendered(sink, 1))

    ledger.dialect = "1.0" if ledger.dialect == "1.1" else "1.1"
    await sink.send(TENANT, rendered(sink, 2))

    assert (sink.dialect, list(ledger.receipts)) == (ledger.dialect, ["r1", "r2"])


async def test_a_dialect_that_is_set_is_not_left(ledger: StandIn, url: str, sink_to: Open) -> None:
    good, bad = sink_to(url, dialect=ledger.dialect), sink_to(url, dialect={"1.0": "1.1", "1.1": "1.0"}[ledger.dialect])

    await good.send(TENANT, rendered(good))
    with pytest.raises(Refusal, match="obligation_id"):
        await bad.send(TENANT, rendered(bad, 2))

    assert list(ledger.receipts) == ["r1"]


async def test_what_was_stored_and_not_answered_is_the_same_when_it_comes_again(
        ledger: StandIn, url: str, sink_to: Open) -> None:
    sink, ledger.lose_replies = sink_to(url), 1

    with pytest.raises(Outage):
        await sink.send(TENANT, rendered(sink))
    again = sink_to(url)            # as after a restart: what was found out is forgotten
    await again.send(TENANT, rendered(again))

    assert list(ledger.receipts) == ["r1"]
    assert "RECEIPT_ID_COLLISION" not in ledger.refusals


async def test_other_content_under_the_same_id_is_a_refusal(ledger: StandIn, url: str, sink_to: Open) -> None:
    sink = sink_to(url)
    await sink.send(TENANT, rendered(sink))

    with pytest.raises(Refusal, match="RECEIPT_ID_COLLISION"):
        await sink.send(TENANT, rendered(sink, result_summary="something else"))


async def test_a_broken_receipt_is_refused_in_the_dialect_of_the_ledger(
        ledger: StandIn, url: str, sink_to: Open) -> None:
    sink = sink_to(url)
    broken = json.dumps({**json.loads(rendered(sink)), "task_body": ""}).encode()

    with pytest.raises(Refusal, match="validation_failed"):
        await sink.send(TENANT, broken)

    await sink.send(TENANT, rendered(sink))
    assert list(ledger.receipts) == ["r1"]


@pytest.mark.parametrize("status", [401, 403, 404, 408, 429, 500, 502, 503, 504, 302])
async def test_an_answer_about_the_ledger_is_an_outage(
        ledger: StandIn, url: str, sink_to: Open, status: int) -> None:
    sink, ledger.status = sink_to(url), status

    with pytest.raises(Outage):
        await sink.send(TENANT, rendered(sink))


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_an_answer_about_the_receipt_is_a_refusal(ledger: StandIn, url: str, sink_to: Open, status: int) -> None:
    sink, ledger.status = sink_to(url), status

    with pytest.raises(Refusal):
        await sink.send(TENANT, rendered(sink))


@pytest.mark.parametrize("code", ["validation_failed", "OBLIGATION_ALREADY_TERMINATED", "COMPLETE_WITHOUT_ACCEPT",
                                  "ACTOR_NOT_CUSTODIAN", "IDENTITY_MISMATCH", "TENANT_MISMATCH", "NOT_VISIBLE"])
async def test_what_is_refused_by_rule_is_a_refusal(ledger: StandIn, url: str, sink_to: Open, code: str) -> None:
    sink, ledger.code = sink_to(url), code

    with pytest.raises(Refusal, match=code):
        await sink.send(TENANT, rendered(sink))


@pytest.mark.parametrize("code", ["UNAUTHORIZED", "rate_limit_exceeded", "internal_error", "unknown_tool"])
async def test_trouble_of_the_ledger_is_an_outage(ledger: StandIn, url: str, sink_to: Open, code: str) -> None:
    sink, ledger.code = sink_to(url), code

    with pytest.raises(Outage):
        await sink.send(TENANT, rendered(sink))


@pytest.mark.usefixtures("ledger")
async def test_a_wrong_key_and_a_ledger_that_is_not_there_are_outages(url: str, sink_to: Open) -> None:
    stranger, nowhere = sink_to(url, token="wrong"), sink_to("http://127.0.0.1:9")

    for sink in (stranger, nowhere):
        with pytest.raises(Outage):
            await sink.send(TENANT, rendered(sink))


async def test_the_address_may_name_the_endpoint(ledger: StandIn, url: str, sink_to: Open) -> None:
    sink = sink_to(url + "/mcp/")

    await sink.send(TENANT, rendered(sink))

    assert list(ledger.receipts) == ["r1"]


async def test_the_body_of_ours_is_in_what_is_sent(sink_to: Open) -> None:
    sink = sink_to("http://ledger")

    assert sink.body(rendered(sink, result_summary="ü")) == '{"result_summary":"ü"}'.encode()
    assert sink.render(TENANT, replace(RECEIPT, receipt_type="task.assigned"), TASK) is None
    assert json.loads(rendered(sink))["tenant_id"] == TENANT_THERE


def test_a_ledger_needs_an_address() -> None:
    with pytest.raises(StartupError, match=r"ledger\.url"):
        receipts_sinks.open_sink(Settings(receipt_mode="receiptgate_integrated"))
