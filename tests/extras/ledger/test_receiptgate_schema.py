"""What ReceiptGate is sent: each of our receipts fits both dialects of its schema, or is rightly not sent."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncgate.extras.ledger.sinks.receiptgate_schema import (
    Handed,
    first_located,
    in_dialect_1_0,
    in_dialect_1_1,
    ledger_receipt,
)
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.settings import EscalationSettings, EscalationTarget
from asyncgate.parts.model.stored import Lease, Receipt, Task
from tests.conftest import Served
from tests.support.receiptgate_stand_in import problems

TENANT = "00000000-0000-0000-0000-000000000000"
ROOT = ("human", "root")
FILE = [{"type": "file", "uri": "file:///out/a.md"}]
TASK = Task(
    task_id="t1", lane=1, type="demo", payload='{"n":1}', payload_pointer=None, requirements="null", terms="{}",
    owner_kind="agent", owner_id="ada", principal_ai="ada", priority=0, max_attempts=3, retry_backoff_seconds=30,
    max_expiries=10, created_at=1_800_000_000.0, duty="r0", idempotency_key=None, fingerprint=None,
    parent_task_id=None, asyncgate_instance="asyncgate-1", updated_at=1_800_000_000.0, fence=1, status="succeeded")
RECEIPT = Receipt(
    receipt_id="r1", receipt_key="k1", receipt_type="task.completed", created_at=1_800_000_001.5, from_kind="worker",
    from_id="w1", to_kind="asyncgate", to_id="asyncgate-1", task_id="t1", lease_id="l1", schedule_id=None,
    asyncgate_instance="asyncgate-1", hash="h1", body="{}", parents=("r0",))
ESCALATED = {"escalation_class": 1, "escalation_reason": "lease_expired", "previous_worker_id": "w1", "attempt": 0,
             "escalation_to": {"kind": "worker", "id": "fallback"}}


def told(receipt: Receipt, task: Task = TASK, lease: Lease | None = None, **more: Any) -> dict[str, Any]:
    """What the ledger is told, once it has been found good in both dialects."""
    kept = ledger_receipt(TENANT, receipt, task, lease, **more)
    assert kept is not None
    assert problems(json.loads(in_dialect_1_1(kept)), "1.1") == []
    if (older := in_dialect_1_0(kept)) is not None:
        assert problems(json.loads(older), "1.0") == []
    assert len(kept) < 262_144 - 500
    assert ledger_receipt(TENANT, receipt, task, lease, **more) == kept
    read: dict[str, Any] = json.loads(in_dialect_1_1(kept))
    return read


def completed(**body: Any) -> Receipt:
    return replace(RECEIPT, body=to_canonical(body).decode())


# Stories, as the gate itself writes them.

pytestmark = pytest.mark.anyio


async def chain(served: Served) -> list[tuple[str, dict[str, Any] | None]]:
    """Every receipt of the tenant, and what the ledger is told of it."""
    stored = await served.stored()
    tasks: dict[str, Task] = {task.task_id: task for task in stored["Task"]}
    leases: dict[str, Lease] = {lease.task_id: lease for lease in stored["Lease"]}
    rows = []
    for receipt in stored["Receipt"]:
        task, lease = tasks.get(receipt.task_id), leases.get(receipt.task_id)
        is_sent = ledger_receipt(TENANT, receipt, task, lease) is not None
        rows.append((receipt.receipt_type, told(receipt, tasks[receipt.task_id], lease) if is_sent else None))
    return rows


async def test_a_finished_task_is_accepted_and_completed_and_nothing_else_is_told(served: Served) -> None:
    offer = await served.leased(payload={"pages": 3}, instructions="read them", task_summary="reading")
    held = {"worker_id": "w1", "lease_id": offer["lease_id"]}
    await served.post(f"/v1/tasks/{offer['task_id']}/progress", {**held, "progress": {"page": 2}})
    await served.post(f"/v1/tasks/{offer['task_id']}/complete", {**held, "result": {"ok": 1}, "artifacts": FILE})

    rows = await chain(served)

    assert [type for type, sent in rows if sent is None] == ["task.assigned", "task.result_ready"]
    accepted, ended = [sent for _, sent in rows if sent]
    assert (accepted["phase"], accepted["from_principal"], accepted["for_principal"]) == ("accepted", "ada", "w1")
    assert (ended["phase"], ended["status"], ended["from_principal"]) == ("complete", "success", "w1")
    assert accepted["obligation_id"] == ended["obligation_id"] == offer["obligation_receipt_id"]
    assert accepted["caused_by_receipt_id"] == "NA"
    assert ended["caused_by_receipt_id"] == accepted["receipt_id"]
    assert (ended["outcome_kind"], ended["artifact_pointer"], ended["artifact_location"], ended["artifact_mime"]) == (
        "mixed", "file:///out/a.md", "file", "text/markdown")
    assert (accepted["task_body"], accepted["task_summary"]) == ("read them", "reading")
    assert accepted["inputs"] == {"payload": {"pages": 3}}
    assert accepted["recipient_ai"] == ended["recipient_ai"] == "ada"


async def test_a_failure_that_is_tried_again_gives_custody_back_and_the_last_one_ends_it(served: Served) -> None:
    offer = await served.leased(max_attempts=2, retry_backoff_seconds=0)
    fail = {"worker_id": "w1", "error": {"code": "boom"}, "retryable": True}
    await served.post(f"/v1/tasks/{offer['task_id']}/fail", {**fail, "lease_id": offer["lease_id"]})
    (again,) = (await served.post("/v1/leases/claim", {"worker_id": "w1"}))["tasks"]
    await served.post(f"/v1/tasks/{offer['task_id']}/fail", {**fail, "lease_id": again["lease_id"]})

    rows = await chain(served)

    assert [sent and (sent["phase"], sent["status"]) for type, sent in rows if type == "task.failed"] == [
        ("escalate", "NA"), ("complete", "failure")]
    (last,) = [sent for _, sent in rows if sent and sent["phase"] == "complete"]
    assert (last["outcome_kind"], last["outcome_text"], last["attempt"]) == (
        "response_text", '{"error":{"code":"boom"}}', 1)


async def test_a_success_that_cannot_be_found_is_told_when_it_can(served: Served) -> None:
    offer = await served.leased()
    held = {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"summary": "well"}}
    await served.post(f"/v1/tasks/{offer['task_id']}/complete", held)
    before = await chain(served)
    await served.post(f"/v1/tasks/{offer['task_id']}/artifacts", {"agent_id": "ada", "artifacts": ["s3://b/a.pdf"]})

    rows = await chain(served)

    assert [sent for type, sent in before if type == "task.completed"] == [None]
    (ended,) = [sent for type, sent in rows if type == "task.completed" and sent]
    assert (ended["artifact_pointer"], ended["artifact_location"], ended["artifact_mime"]) == (
        "s3://b/a.pdf", "s3", "application/pdf")
    assert ended["from_principal"] == "w1"      # on whose behalf the owner speaks: the custodian ends it


async def test_a_cancel_ends_what_was_accepted_and_is_not_told_of_what_never_was(served: Served) -> None:
    offer = await served.leased()
    untouched = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    for task_id in (offer["task_id"], untouched["task_id"]):
        await served.post(f"/v1/tasks/{task_id}/cancel", {"agent_id": "ada", "reason": "no longer needed"})

    rows = await chain(served)

    (ended, nothing) = [sent for type, sent in rows if type == "task.canceled"]
    assert nothing is None
    assert ended is not None
    assert (ended["status"], ended["outcome_text"], ended["from_principal"]) == ("canceled", "no longer needed", "w1")


async def test_a_lost_worker_is_told_as_an_escalation_of_what_it_had_accepted(serve: Any) -> None:
    target = EscalationTarget(escalation_class=1, to_kind="worker", to_id="fallback")
    served = await serve(escalation=EscalationSettings(enabled=True, targets=(target,)), expiry_jitter_seconds=0.0)
    await served.leased()
    served.backend.skew += 301
    await served.gate.upkeep.once("sweep")

    rows = await chain(served)

    assert [(type, sent and sent["phase"]) for type, sent in rows] == [
        ("task.assigned", None), ("task.accepted", "accepted"), ("lease.expired", "escalate"),
        ("task.escalated", "escalate")]
    accepted, expired, escalated = [sent for _, sent in rows if sent]
    assert escalated["obligation_id"] == accepted["obligation_id"] == expired["obligation_id"]
    assert expired["caused_by_receipt_id"] == escalated["caused_by_receipt_id"] == accepted["receipt_id"]
    assert (escalated["from_principal"], escalated["recipient_ai"]) == ("w1", "fallback")


async def test_what_is_not_of_a_task_is_not_told() -> None:
    for type in ("receipt.acknowledged", "schedule.created", "system.anomaly"):
        assert ledger_receipt(TENANT, replace(RECEIPT, receipt_type=type), None) is None


def test_every_type_that_opens_and_closes_nothing_is_not_told() -> None:
    silent = ("task.assigned", "task.progress", "task.result_ready", "system.anomaly",
              "receipt.acknowledged", "schedule.created", "schedule.deleted")

    assert [ledger_receipt(TENANT, replace(RECEIPT, receipt_type=type), TASK) for type in silent] == [None] * 7


LEASE = Lease("t1", "l2", "worker", "w2", None, 2, 0.0, 900.0, 0, "r2")
LOST = replace(RECEIPT, receipt_id="x1", receipt_type="lease.expired", from_kind="asyncgate", from_id="asyncgate-1",
               to_kind="agent", to_id="ada", parents=("r1",), body='{"reason":"expired","previous_worker_id":"w1"}')


@pytest.mark.parametrize("reason", ["expired", "released"])
def test_the_end_of_a_lease_gives_custody_back_to_the_gate_and_is_nothing_to_dialect_1_0(reason: str) -> None:
    lost = replace(LOST, body=to_canonical({"reason": reason}).decode())
    back = told(lost, lease=replace(LEASE, worker_id="w1", fence=1, accepted="r1"), source="svc:gate")

    assert (back["phase"], back["escalation_reason"]) == ("escalate", f"lease_{reason}")
    assert (back["from_principal"], back["escalation_to"], back["recipient_ai"]) == ("w1", "svc:gate", "svc:gate")
    assert back["caused_by_receipt_id"] == "r1"
    assert in_dialect_1_0(ledger_receipt(TENANT, lost, TASK) or b"") is None


def test_the_second_lease_is_a_hand_over_in_1_1_and_an_acceptance_in_1_0() -> None:
    accepted = replace(RECEIPT, receipt_id="r2", receipt_type="task.accepted", from_id="w2", body='{"attempt":0}')
    task = replace(TASK, fence=2, status="leased", handed=Handed(1, "x1", None).text)

    newer = told(accepted, task, LEASE)
    older = json.loads(in_dialect_1_0(ledger_receipt(TENANT, accepted, task, LEASE) or b"") or b"")

    assert (newer["phase"], newer["from_principal"], newer["escalation_to"]) == ("escalate", "asyncgate", "w2")
    assert newer["caused_by_receipt_id"] == "x1"
    assert (older["phase"], older["from_principal"], older["for_principal"]) == ("accepted", "ada", "w2")
    assert older["caused_by_receipt_id"] == "NA"        # 1.0 has no receipt of the lease that was lost
    assert (older["escalation_to"], older["recipient_ai"]) == ("NA", "ada")


@pytest.mark.parametrize(("payload", "named"), [
    ({"caused_by_receipt_id": "plan-7"}, "plan-7"), ({"caused_by_receipt_id": "NA"}, "x1"),
    ({"caused_by_receipt_id": 7}, "x1"), (["caused_by_receipt_id"], "x1"),
    ({"inner": {"caused_by_receipt_id": "plan-7"}}, "x1")])
def test_an_acceptance_names_the_cause_in_the_payload_or_else_the_escalation(payload: Any, named: str) -> None:
    accepted = replace(RECEIPT, receipt_id="r2", receipt_type="task.accepted", from_id="w2", body='{"attempt":0}')
    task = replace(TASK, fence=2, payload=json.dumps(payload), handed=Handed(1, "x1", "fallback").text)

    newer = told(accepted, task, LEASE)
    older = json.loads(in_dialect_1_0(ledger_receipt(TENANT, accepted, task, LEASE) or b"") or b"")

    assert newer["caused_by_receipt_id"] == older["caused_by_receipt_id"] == named
    assert newer["from_principal"] == "fallback"        # custody had gone to whom the task was proposed to


def test_with_digests_no_content_is_told() -> None:
    task = replace(TASK, payload='{"secret":"payload"}', handed=Handed(0, "x0", None).text)
    ended = completed(result_payload={"secret": 1}, result_summary="secret", error="secret",
                      artifacts=[{"note": "secret"}], delivery_proof={"secret": True}, attempt=0)
    kept = [ledger_receipt(TENANT, receipt, task, LEASE, digests=True) or b"" for receipt in (
        ended, replace(ended, receipt_type="task.accepted"), replace(ended, receipt_type="task.failed"))]

    assert b"secret" not in b"".join(kept)
    told(ended, task, LEASE, digests=True)
    outcome = json.loads(json.loads(kept[0])["outcome_text"])
    assert set(outcome["result_payload"]) == {"truncated", "sha256", "bytes"}
    assert json.loads(kept[0])["inputs"]["payload"]["sha256"] == hashlib.sha256(task.payload.encode()).hexdigest()


def test_an_escalation_goes_to_its_target_on_behalf_of_the_worker_that_was_lost() -> None:
    sent = told(replace(RECEIPT, receipt_type="task.escalated", from_kind="asyncgate", from_id="asyncgate-1",
                        body=to_canonical(ESCALATED).decode()))

    assert (sent["phase"], sent["escalation_class"], sent["escalation_reason"]) == (
        "escalate", "policy", "lease_expired")
    assert sent["recipient_ai"] == sent["escalation_to"] == "fallback"
    assert sent["from_principal"] == sent["for_principal"] == "w1"
    assert sent["outcome_kind"] == "NA"
    assert sent["completed_at"] is None


# Artifacts, in every shape that peers were seen to send.

SHAPES: list[tuple[str, Any, tuple[str, str, str]]] = [
    ("list of demo", [{"type": "s3", "uri": "s3://b/a.csv", "mime": "text/x-own", "size_bytes": 7, "checksum": "c",
                       "location": "eu"}], ("s3://b/a.csv", "s3", "text/x-own")),
    ("pointers of CogniGate", {"pointers": [{"sink_id": "notes", "uri": "sink://n/1", "metadata": {}}]},
     ("sink://n/1", "notes", "application/octet-stream")),
    ("pointers without a list", {"pointers": {"sink_id": "notes", "uri": "sink://n/1.json"}},
     ("sink://n/1.json", "notes", "application/json")),
    ("command executor", {"output_path": "/out/log.txt", "content_type": "text/plain", "description": "log"},
     ("/out/log.txt", "file", "text/plain")),
    ("url only", [{"url": "https://h/x/y.png?v=1"}], ("https://h/x/y.png?v=1", "https", "image/png")),
    ("plain text", ["depotgate://artifact/7"], ("depotgate://artifact/7", "depotgate", "application/octet-stream")),
    ("depot", {"artifact_id": "7", "location": "file:///d/7", "size_bytes": 3, "content_hash": "h"},
     ("file:///d/7", "file", "application/octet-stream")),
    ("artifact fields", {"artifact_pointer": "p", "artifact_location": "l", "artifact_mime": "m/m"}, ("p", "l", "m/m")),
    ("type is the mime", [{"type": "text/css", "uri": "a.css"}], ("a.css", "file", "text/css")),
    ("mime in metadata", [{"uri": "a.b", "metadata": {"mime": "x/y"}}], ("a.b", "file", "x/y")),
    ("the second one", [{"note": "none"}, None, 7, {"uri": "ftp://x"}], ("ftp://x", "ftp", "application/octet-stream")),
    ("says NA", [{"uri": "NA"}, {"uri": "a.md", "mime": "NA", "type": "TBD"}], ("a.md", "file", "text/markdown")),
    ("nested", {"artifacts": {"items": [{"href": "h:1"}]}}, ("h:1", "file", "application/octet-stream"))]


@pytest.mark.parametrize(("artifacts", "wanted"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_an_artifact_is_found_in_the_shape_of_every_peer(artifacts: Any, wanted: tuple[str, str, str]) -> None:
    sent = told(completed(artifacts=artifacts))

    assert (sent["artifact_pointer"], sent["artifact_location"], sent["artifact_mime"]) == wanted
    assert sent["outcome_kind"] == "artifact_pointer"
    assert sent["outcome_text"] == "NA"


def test_checksum_and_size_are_told_when_they_are_given() -> None:
    pointer = first_located([{"uri": "a", "etag": "e", "bytes": "12"}])

    assert pointer is not None
    assert (pointer.checksum, pointer.size) == ("e", 12)


@pytest.mark.parametrize("artifacts", [[{"note": "in the drawer"}], [7], [{"uri": ""}], [{"uri": 5}], [["NA"]],
                                       [{"uri": "x" * 5000}]])
def test_what_does_not_say_where_it_lies_becomes_text(artifacts: Any) -> None:
    sent = told(completed(artifacts=artifacts))

    assert sent["outcome_kind"] == "response_text"
    assert sent["artifact_pointer"] == "NA"
    assert json.loads(sent["outcome_text"]) == {"artifacts": artifacts}


def test_a_proof_of_delivery_is_told_as_text() -> None:
    assert told(completed(delivery_proof={"mode": "push"}))["outcome_kind"] == "response_text"


def test_an_end_with_nothing_to_say_has_no_outcome() -> None:
    sent = told(completed())

    assert (sent["outcome_kind"], sent["outcome_text"]) == ("none", "NA")


# Sizes, and words that mean something else to the ledger.


def test_what_is_too_large_is_cut_and_leaves_its_hash() -> None:
    long = json.dumps({"text": "ü" * 300_000})
    sent = told(completed(result_payload="ö" * 90_000, completion_metadata={"x": "y" * 70_000}),
                replace(TASK, payload=long))

    assert sent["inputs"]["payload"]["truncated"] is True
    assert sent["inputs"]["payload"]["bytes"] == len(long.encode())
    assert "[cut: 180000 bytes, sha256 " in sent["outcome_text"]
    assert f"[cut: {len(long.encode())} bytes, sha256 " in sent["task_body"]
    assert sent["body"]["truncated"] is True


@pytest.mark.parametrize("size", [10_000, 30_000, 49_000, 60_000, 65_000, 99_000, 101_000, 103_000])
def test_the_whole_receipt_is_never_larger_than_a_ledger_reads(size: int) -> None:
    told(completed(result_payload="x" * size, completion_metadata="z" * (64_000 - min(size, 60_000))),
         replace(TASK, payload=json.dumps("y" * size)))


@pytest.mark.parametrize("word", ["NA", "TBD", " ", "", "plain"])
def test_no_word_of_ours_is_taken_for_a_sentinel(word: str) -> None:
    task = replace(TASK, type=word or "x", terms=json.dumps({"task_summary": word, "instructions": word,
                                                            "expected_outcome_kind": word.strip() or "x"}))
    accepted = told(replace(RECEIPT, receipt_type="task.accepted", body='{"attempt":0}'), task)
    ended = told(completed(result_payload=word), task)

    assert accepted["task_summary"].strip() not in ("", "NA", "TBD")
    assert ended["outcome_text"].strip() not in ("", "NA", "TBD")


def test_numbers_that_no_reader_holds_are_told_by_their_hash() -> None:
    sent = told(RECEIPT, replace(TASK, payload="1" * 4301))

    assert sent["inputs"]["payload"]["bytes"] == 4301


# Whatever workers and agents send.

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
numbers = st.integers(-2**80, 2**80) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | words
json_values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    words, inner, max_size=4), max_leaves=8)
names = st.sampled_from(["uri", "url", "output_path", "pointer", "pointers", "artifacts", "items", "location", "type",
                         "store", "sink_id", "mime", "content_type", "etag", "size_bytes", "bytes", "metadata", "path"])
told_values = leaves | st.sampled_from(["NA", "TBD", "", "s3://b/a.txt", "/out/a", "text/html", "12"])
odd_artifacts = st.recursive(told_values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    names, inner, max_size=5), max_leaves=10)
labels = st.sampled_from(["NA", "TBD", "mixed", "text/html"]) | st.text("abü/-", min_size=1, max_size=9)
bodies = st.dictionaries(st.sampled_from([
    "result_summary", "result_payload", "error", "delivery_proof", "reason", "completion_metadata"]), json_values)
types = st.sampled_from(["task.accepted", "task.completed", "task.failed", "task.canceled", "task.escalated"])


@settings(max_examples=400, deadline=None)
@given(type=types, body=bodies, artifacts=odd_artifacts, payload=json_values, summary=words, kind=labels,
       names=st.lists(labels, min_size=4, max_size=4))
def test_nothing_that_anybody_sends_makes_a_receipt_that_is_refused(
        type: str, body: dict[str, Any], artifacts: Any, payload: Any, summary: str, kind: str,
        names: list[str]) -> None:
    task = replace(TASK, payload=json.dumps(payload), type=names[0], principal_ai=names[1], owner_id=names[2],
                   terms=json.dumps({"task_summary": summary, "instructions": summary, "expected_outcome_kind": kind,
                                     "expected_artifact_mime": kind}))
    more = ESCALATED if type == "task.escalated" else {"attempt": 0}

    told(replace(RECEIPT, receipt_type=type, from_id=names[3],
                 body=to_canonical({**body, "artifacts": artifacts, **more}).decode()), task)
