"""The ledger that the others are tested against is as strict as it must be, or their tests would prove nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from asyncgate.extras.ledger.sinks.receiptgate_schema import in_dialect_1_0, ledger_receipt
from asyncgate.parts.model.content import to_canonical
from tests.extras.ledger.test_receiptgate_schema import ESCALATED, RECEIPT, TASK, completed
from tests.support.receiptgate_stand_in import FIELDS, KEY, StandIn, problems, served

FILE = [{"uri": "file:///a"}]
ACCEPTED = replace(RECEIPT, receipt_type="task.accepted", receipt_id="a1", body='{"attempt":0}')
TO_FALLBACK = replace(
    RECEIPT, receipt_type="task.escalated", receipt_id="e1", body=to_canonical(ESCALATED).decode())
GOOD = {"accepted": ACCEPTED, "complete": completed(artifacts=FILE), "escalate": TO_FALLBACK}


def sent(phase: str = "complete", dialect: str = "1.1", **changed: Any) -> dict[str, Any]:
    """A good receipt, as it is sent, with something changed."""
    whole = ledger_receipt("default", GOOD[phase], TASK)
    assert whole is not None
    return {**json.loads(whole if dialect == "1.1" else in_dialect_1_0(whole) or b""), **changed}


@pytest.mark.parametrize("dialect", ["1.0", "1.1"])
@pytest.mark.parametrize("phase", GOOD)
def test_each_of_the_required_fields_is_required_and_no_other_is_known(phase: str, dialect: str) -> None:
    good = sent(phase, dialect)

    assert problems(good, dialect) == []
    assert set(good) == {*FIELDS, *(["obligation_id"] if dialect == "1.1" else [])}
    for name in good:
        assert problems({key: value for key, value in good.items() if key != name}, dialect) != []
    assert problems({**good, "colour": "red"}, dialect) != []


def test_the_dialects_exclude_each_other() -> None:
    assert any("obligation_id" in problem for problem in problems(sent(dialect="1.1"), "1.0"))
    assert any("obligation_id" in problem for problem in problems(sent(dialect="1.0"), "1.1"))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("accepted", {"status": "success"}), ("accepted", {"completed_at": "2026-01-01T00:00:00Z"}),
    ("accepted", {"task_summary": "TBD"}), ("accepted", {"outcome_kind": "none"}), ("accepted", {"outcome_text": "x"}),
    ("accepted", {"artifact_size_bytes": 1}), ("accepted", {"escalation_class": "owner"}),
    ("accepted", {"retry_requested": True}), ("complete", {"status": "NA"}), ("complete", {"completed_at": None}),
    ("complete", {"outcome_kind": "NA"}), ("complete", {"artifact_mime": "NA"}),
    ("complete", {"artifact_pointer": "NA"}),
    ("complete", {"artifact_location": "NA"}), ("complete", {"task_body": ""}), ("complete", {"attempt": -1}),
    ("complete", {"created_at": "yesterday"}), ("complete", {"inputs": {"x": "y" * 65_536}}),
    ("complete", {"outcome_text": "y" * 102_400}), ("complete", {"schema_version": "1.1"}),
    ("escalate", {"escalation_class": "NA"}), ("escalate", {"escalation_reason": "TBD"}),
    ("escalate", {"recipient_ai": "somebody"}), ("escalate", {"status": "failure"})]


@pytest.mark.parametrize(("phase", "changed"), BAD)
def test_every_condition_of_the_schema_is_checked(phase: str, changed: dict[str, Any]) -> None:
    for dialect in ("1.0", "1.1"):
        assert problems(sent(phase, dialect, **changed), dialect) != []


def test_the_newer_dialect_is_stricter_about_escalations() -> None:
    nobody = {"escalation_to": "NA", "recipient_ai": "NA"}

    assert problems(sent("escalate", "1.0", **nobody), "1.0") == []
    assert problems(sent("escalate", "1.1", **nobody), "1.1") != []
    assert problems(sent("complete", "1.1", escalation_class="owner"), "1.1") != []


def test_a_receipt_is_stored_once_and_never_with_other_content() -> None:
    ledger = StandIn("1.1")

    first, again = ledger.submit_receipt(sent()), ledger.submit_receipt(sent())
    other = ledger.replied({"method": "tools/call", "params": {
        "name": "receiptgate.submit_receipt", "arguments": {"receipt": sent(created_at="2026-01-01T00:00:00Z")}}})

    assert (first["idempotent_replay"], again["idempotent_replay"]) == (False, True)
    assert other["error"]["code"] == "RECEIPT_ID_COLLISION"
    assert set(other["error"]["details"]) == {"receipt_id", "existing_hash", "incoming_hash"}


def test_it_answers_over_http_as_the_real_one_does() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "receiptgate.nothing"}}
    with served(StandIn()) as url, httpx2.Client(base_url=url, trust_env=False) as http:
        def post(body: Any, key: str = KEY) -> tuple[int, Any]:
            answer = http.post("/mcp", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, answer.json()

        assert post(call, "wrong")[0] == 401
        assert http.post("/mcp", json=call, headers={"x-api-key": KEY}).status_code == 200
        assert post(call)[1]["error"]["code"] == "unknown_tool"
        assert post({**call, "method": "initialize"})[1]["error"]["code"] == -32601
        assert post({**call, "params": {}})[1]["error"]["code"] == -32602
        assert post({"jsonrpc": "2.0"})[0] == 422
        assert post({**call, "params": "x" * 262_144})[0] == 413
        assert post({**call, "params": {"name": "receiptgate.health"}})[1]["result"]["status"] == "healthy"


def test_a_notary_keeps_custody() -> None:
    clock = [0.0]
    ledger = StandIn("1.1", notary=True, now=lambda: clock[0])

    def submit(phase: str, **changed: Any) -> Any:
        call = {"name": "receiptgate.submit_receipt", "arguments": {"receipt": sent(phase, **changed)}}
        told = ledger.replied({"method": "tools/call", "params": call})
        return told["error"]["code"] if "error" in told else "stored"

    assert submit("complete") == "COMPLETE_WITHOUT_ACCEPT"
    assert submit("escalate") == "ESCALATE_WITHOUT_ACCEPT"
    assert submit("accepted", source_system="somebody") == "IDENTITY_MISMATCH"
    assert submit("accepted", tenant_id="other") == "TENANT_MISMATCH"
    assert submit("accepted") == "stored"
    assert submit("accepted", receipt_id="a2") == "OBLIGATION_ALREADY_ACCEPTED"
    assert submit("complete", from_principal="w2") == "ACTOR_NOT_CUSTODIAN"
    assert submit("escalate", from_principal="w2") == "OBLIGATION_NOT_RECOVERABLE"
    assert ledger.list_inbox("w1")["receipts"] == [{"obligation_id": "r0", "state": "OPEN"}]
    clock[0] = 901.0
    assert ledger.list_inbox("w1")["receipts"] == [{"obligation_id": "r0", "state": "OVERDUE"}]
    assert submit("escalate", from_principal="w2") == "stored"
    assert ledger.list_inbox("fallback")["count"] == 1
    assert submit("complete", from_principal="fallback") == "stored"
    assert submit("complete", from_principal="fallback", receipt_id="c2") == "OBLIGATION_ALREADY_TERMINATED"
    assert ledger.list_inbox("fallback")["count"] == 0
