"""A gate whose receipts go to a ReceiptGate: every story in both dialects, and a ledger that comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from asyncgate import Needs, Work
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger import comparing, find_ledger
from asyncgate.extras.ledger.comparing import Comparer
from asyncgate.extras.ledger.mending import Mender
from asyncgate.extras.ledger.noticing import Noticer
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.reading import Reading
from asyncgate.extras.ledger.reconcile import compare_all
from asyncgate.extras.ledger.strict import REPEAT_SECONDS, Strict
from asyncgate.parts.app import Gate
from asyncgate.parts.model.errors import DatabaseUnavailable, outcome_unknown
from asyncgate.parts.model.settings import (
    ArchiveSettings,
    CircuitBreaker,
    EmissionRetry,
    EscalationSettings,
    EscalationTarget,
    LedgerSettings,
)
from asyncgate.parts.model.stored import Outgoing
from tests.conftest import TOKEN, Live, Served
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiptgate_stand_in import KEY, StandIn, problems, served

pytestmark = pytest.mark.anyio

Serving = Callable[..., Any]
FILE = [{"type": "file", "uri": "file:///out/a.md"}]
TO_FALLBACK = EscalationSettings(enabled=True, targets=(
    EscalationTarget(escalation_class=1, to_kind="worker", to_id="fallback"),))


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[StandIn, str]]:
    ledger = StandIn()
    with served(ledger) as url:
        yield ledger, url


@pytest.fixture
def standing(host: tuple[StandIn, str]) -> tuple[StandIn, str]:
    """Return the ledger at an address of this test alone."""
    host[0].test += 1
    return host[0], f"{host[1]}/{host[0].test}"


@pytest.fixture(params=["1.0", "1.1"])
def ledger(request: pytest.FixtureRequest, standing: tuple[StandIn, str]) -> StandIn:
    standing[0].begin(request.param)
    return standing[0]


@pytest.fixture
async def serving(backend_url: str, standing: tuple[StandIn, str]) -> AsyncIterator[Serving]:
    """Return what starts a gate over an empty database that sends its receipts to the ledger."""
    async with contextlib.AsyncExitStack() as running:
        async def serving(**more: Any) -> Served:
            settings = {
                "api_key": TOKEN, "lease_sweep_interval_seconds": 3600.0, "expiry_jitter_seconds": 0.0,
                "receipt_mode": "receiptgate_integrated", "ledger": LedgerSettings(
                    url=standing[1], auth_token=KEY, timeout_ms=20_000, emission_retry=EmissionRetry(
                        retry_interval_seconds=0.05), circuit_breaker=CircuitBreaker(timeout_seconds=0.05)), **more}
            gate = Gate(settings_for_tests(**settings), await open_backend(backend_url))
            await running.enter_async_context(gate.app.router.lifespan_context(gate.app))
            return Served(gate)

        yield serving


def patient(url: str) -> LedgerSettings:
    """A ledger of our tenant, and a circuit that does not open."""
    return LedgerSettings(url=url, auth_token=KEY, timeout_ms=20_000, tenant_id="default",
                          emission_retry=EmissionRetry(retry_interval_seconds=0.05),
                          circuit_breaker=CircuitBreaker(failure_threshold=100, timeout_seconds=0.05))


async def settled(gate: Served) -> None:
    """Wait until nothing waits for the ledger any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await gate.backend.lag(gate.tenant_id)).waiting:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.01)


def chains_are_whole(ledger: StandIn) -> None:
    """See that each receipt there was caused by another one there, up to the acceptance that nothing there caused."""
    for receipt in ledger.receipts.values():
        if receipt["caused_by_receipt_id"] != "NA":
            assert receipt["caused_by_receipt_id"] in ledger.receipts, receipt
        else:
            assert receipt["metadata"]["receipt_type"] == "task.accepted", receipt


def phases(ledger: StandIn, task_id: str) -> list[tuple[str, str]]:
    return [(receipt["phase"], receipt["status"]) for receipt in ledger.receipts.values()
            if receipt["task_id"] == task_id]


async def complete(gate: Served, offer: dict[str, Any], worker: str = "w1", **more: Any) -> None:
    held = {"worker_id": worker, "lease_id": offer["lease_id"]}
    await gate.post(f"/v1/tasks/{offer['task_id']}/complete", {**held, "result": {"ok": True}, **more})


async def claim(gate: Served, worker: str) -> dict[str, Any]:
    (offer,) = (await gate.post("/v1/leases/claim", {"worker_id": worker}))["tasks"]
    return dict(offer)


async def lost(gate: Served, offer: dict[str, Any]) -> None:
    gate.backend.skew += 301
    await gate.gate.upkeep.once("sweep")


async def test_receipts_stay_whole_so_they_are_sealed_and_archived_and_go_out_only_once(
        ledger: StandIn, serving: Serving, tmp_path: Path) -> None:
    gate = await serving(archive=ArchiveSettings(directory=str(tmp_path)))
    task_id = (await gate.post("/v1/tasks", {"type": "t", "payload": None, "principal_id": "ada"}))["task_id"]
    await complete(gate, await claim(gate, "w1"), artifacts=FILE)
    await settled(gate)
    sent = len(ledger.submitted)
    gate.backend.skew += 31 * 86_400

    assert "seal" in gate.gate.upkeep.duties
    assert (await gate.post("/v1/archive/run", {}))["receipts"] == 4
    assert (await gate.post(f"/v1/archive/{task_id}/restore", {}))["receipts"] == 4

    await settled(gate)
    assert len(ledger.submitted) == sent


async def test_every_story_ends_at_the_ledger_as_it_ends_here(ledger: StandIn, serving: Serving) -> None:
    gate = await serving(escalation=TO_FALLBACK)
    told: dict[str, list[tuple[str, str]]] = {}
    keeps_custody = ledger.dialect == "1.1"
    again_accepted = ("escalate" if keeps_custody else "accepted", "NA")
    given_back = [("escalate", "NA")] * keeps_custody

    done = await gate.leased()
    await complete(gate, done, artifacts=FILE)
    told[done["task_id"]] = [("accepted", "NA"), ("complete", "success")]

    for artifacts in ({"pointers": [{"sink_id": "n", "uri": "sink://n"}]}, {"output_path": "/o", "content_type": "a"}):
        shaped = await gate.leased()
        await complete(gate, shaped, artifacts=artifacts)
        told[shaped["task_id"]] = told[done["task_id"]]

    inline = await gate.leased(result_delivery="inline")
    await complete(gate, inline)
    told[inline["task_id"]] = told[done["task_id"]]

    for way in ("again", "attach"):
        vague = await gate.leased()
        await complete(gate, vague)
        if way == "again":
            await complete(gate, vague, artifacts=FILE)
        else:
            await gate.post(f"/v1/tasks/{vague['task_id']}/artifacts", {"agent_id": "ada", "artifacts": FILE})
        told[vague["task_id"]] = told[done["task_id"]]

    tried = await gate.leased(max_attempts=2, retry_backoff_seconds=0)
    fail = {"worker_id": "w1", "error": {"code": "boom"}, "retryable": True}
    await gate.post(f"/v1/tasks/{tried['task_id']}/fail", {**fail, "lease_id": tried["lease_id"]})
    again = await claim(gate, "w1")
    await gate.post(f"/v1/tasks/{tried['task_id']}/fail", {**fail, "lease_id": again["lease_id"]})
    told[tried["task_id"]] = [
        ("accepted", "NA"), *given_back, again_accepted, ("escalate", "NA"), ("complete", "failure")]

    dropped = await gate.leased()
    await lost(gate, dropped)
    taken = await claim(gate, "fallback")
    await complete(gate, taken, "fallback", delivery_proof={"mode": "push", "status": "succeeded"})
    told[dropped["task_id"]] = [
        ("accepted", "NA"), *given_back, ("escalate", "NA"), again_accepted, ("complete", "success")]

    canceled = await gate.leased()
    await gate.post(f"/v1/tasks/{canceled['task_id']}/cancel", {"agent_id": "ada"})
    told[canceled["task_id"]] = [("accepted", "NA"), ("complete", "canceled")]

    unheard = await gate.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    await gate.post(f"/v1/tasks/{unheard['task_id']}/cancel", {"agent_id": "ada"})
    told[unheard["task_id"]] = []

    await settled(gate)
    assert {task_id: phases(ledger, task_id) for task_id in told} == told
    chains_are_whole(ledger)
    assert ledger.list_inbox("ada")["count"] == 0
    assert (await gate.get("/v1/obligations/open?principal_id=ada"))["open_obligations"] == []
    assert {problem for receipt in ledger.receipts.values() for problem in problems(receipt, ledger.dialect)} == set()
    assert set(ledger.refusals) == ({"validation_failed"} if ledger.dialect == "1.0" else set())    # to find that out
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


async def test_an_obligation_that_is_open_here_is_open_there(ledger: StandIn, serving: Serving) -> None:
    gate = await serving()
    vague = await gate.leased()
    await complete(gate, vague)
    await settled(gate)

    assert phases(ledger, vague["task_id"]) == [("accepted", "NA")]
    assert ledger.list_inbox("ada")["count"] == 1
    assert len((await gate.get("/v1/obligations/open?principal_id=ada"))["open_obligations"]) == 1


async def test_a_ledger_that_comes_and_goes_gets_everything_once(ledger: StandIn, serving: Serving) -> None:
    gate, offers = await serving(), []
    for number in range(12):
        ledger.status = (0, 503, 401)[number % 3]
        ledger.lose_replies = number % 2
        offers.append(await gate.leased())
        await complete(gate, offers[-1], artifacts=FILE)
    ledger.status = 0

    await settled(gate)
    whole = [("accepted", "NA"), ("complete", "success")]
    assert [phases(ledger, offer["task_id"]) for offer in offers] == [whole] * 12
    assert "RECEIPT_ID_COLLISION" not in ledger.refusals
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


async def test_what_the_ledger_refuses_is_parked_and_told_and_the_rest_goes_on(
        ledger: StandIn, serving: Serving) -> None:
    gate, ledger.code = await serving(), "OBLIGATION_ALREADY_TERMINATED"
    refused = [await gate.leased() for _ in range(7)]       # more than open the circuit when they are outages
    await settled(gate)
    ledger.code = ""
    good = await gate.leased()
    await settled(gate)

    assert [phases(ledger, offer["task_id"]) for offer in refused] == [[]] * 7
    assert phases(ledger, good["task_id"]) == [("accepted", "NA")]
    assert (await gate.backend.lag(gate.tenant_id)).parked == 7
    anomalies = await gate.get("/v1/receipts?to_id=ada&receipt_type=system.anomaly")
    assert [(receipt["body"]["kind"], receipt["body"]["details"]["receipt_type"])
            for receipt in anomalies["receipts"]] == [
        ("receipt_refused", "task.accepted")] * 7


async def test_a_strict_gate_leases_nothing_that_the_ledger_does_not_know_of(
        ledger: StandIn, serving: Serving) -> None:
    gate = await serving(receipt_consistency_mode="strict")
    made = await gate.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    ledger.status = 503

    away = await gate.call("POST", "/v1/leases/claim", {"worker_id": "w1"})
    ledger.status = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = away
        while answer.status == 503:
            answer = await gate.call("POST", "/v1/leases/claim", {"worker_id": "w1"})

    assert (away.status, away.json()["error"]) == (503, "receipt_ledger_unavailable")
    (offer,) = answer.json()["tasks"]
    assert phases(ledger, made["task_id"]) == [("accepted", "NA")]
    await complete(gate, offer, artifacts=FILE)
    assert phases(ledger, made["task_id"]) == [("accepted", "NA"), ("complete", "success")]


async def test_a_notary_follows_custody_to_the_end(standing: tuple[StandIn, str], serving: Serving) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(ledger=LedgerSettings(url=standing[1], auth_token=KEY, timeout_ms=20_000, tenant_id="default"))

    done, canceled, vague = [await gate.leased() for _ in range(3)]
    await complete(gate, done, artifacts=FILE)
    await gate.post(f"/v1/tasks/{canceled['task_id']}/cancel", {"agent_id": "ada"})
    await complete(gate, vague)
    await gate.post(f"/v1/tasks/{vague['task_id']}/artifacts", {"agent_id": "ada", "artifacts": FILE})
    await settled(gate)

    assert ledger.refusals == []
    assert set(ledger.custody) == {offer["obligation_receipt_id"] for offer in (done, canceled, vague)}
    assert all(custody.closed for custody in ledger.custody.values())


async def fail(gate: Served, offer: dict[str, Any], worker: str, *, retryable: bool) -> None:
    await gate.post(f"/v1/tasks/{offer['task_id']}/fail", {
        "worker_id": worker, "lease_id": offer["lease_id"], "error": {"code": "boom"}, "retryable": retryable})


@pytest.mark.parametrize("escalation", [EscalationSettings(), TO_FALLBACK], ids=["no inboxes", "to an inbox"])
async def test_a_notary_hands_on_what_a_lost_worker_had_and_the_next_one_ends_it(
        standing: tuple[StandIn, str], serving: Serving, escalation: EscalationSettings) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(escalation=escalation, ledger=LedgerSettings(
        url=standing[1], auth_token=KEY, timeout_ms=20_000, tenant_id="default"))
    for way in ("lost", "released", "failed", "lost twice"):
        offer = await gate.leased(retry_backoff_seconds=0, payload={"way": way})
        if way.startswith("lost"):
            await lost(gate, offer)
        elif way == "released":
            await gate.post("/v1/leases/release", {"worker_id": "w1", "task_id": offer["task_id"],
                                                   "lease_id": offer["lease_id"]})
        else:
            await fail(gate, offer, "w1", retryable=True)
        again = await claim(gate, "w2")
        if way == "lost twice":
            await lost(gate, again)
            again = await claim(gate, "fallback")
        worker = "fallback" if way == "lost twice" else "w2"
        await settled(gate)
        assert ledger.custody[offer["obligation_receipt_id"]].custodian == worker
        await complete(gate, again, worker, artifacts=FILE)

    spent = await gate.leased(max_attempts=1)
    await fail(gate, spent, "w1", retryable=True)
    dropped = await gate.leased()
    await lost(gate, dropped)
    await gate.post(f"/v1/tasks/{dropped['task_id']}/cancel", {"agent_id": "ada"})
    await settled(gate)

    assert ledger.refusals == []
    assert len(ledger.custody) == 6
    assert all(custody.closed for custody in ledger.custody.values())
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0
    chains_are_whole(ledger)


async def test_a_notary_that_never_saw_the_first_lease_accepts_the_second_one(
        standing: tuple[StandIn, str], serving: Serving) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(ledger=LedgerSettings(url=standing[1], auth_token=KEY, timeout_ms=20_000, tenant_id="default"))
    offer = await gate.leased()
    await settled(gate)
    ledger.begin("1.1", notary=True)        # it has forgotten everything
    await lost(gate, offer)
    again = await claim(gate, "w2")
    await complete(gate, again, "w2", artifacts=FILE)
    await settled(gate)

    assert phases(ledger, offer["task_id"]) == [("accepted", "NA"), ("complete", "success")]
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


async def test_a_cause_in_the_payload_goes_to_the_worker_and_to_the_ledger(ledger: StandIn, serving: Serving) -> None:
    gate = await serving()

    offer = await gate.leased(payload={"caused_by_receipt_id": "plan-7"})

    assert offer["caused_by_receipt_id"] == "plan-7"
    await settled(gate)
    (accepted,) = ledger.receipts.values()
    assert accepted["caused_by_receipt_id"] == "plan-7"


STRANDED = {"1.0": [("accepted", "NA"), ("complete", "canceled")], "1.1": [("accepted", "NA"), ("escalate", "NA")]}


async def test_the_ledger_holds_nobody_to_a_lease_that_was_never_granted(ledger: StandIn, serving: Serving) -> None:
    """A submission that was not answered was stored: what is taken back here is taken back there."""
    gate = await serving(receipt_consistency_mode="strict")
    made = await gate.post("/v1/tasks", {"type": "demo", "agent_id": "ada", "payload": {}})
    ledger.lose_replies = 1

    answer = await gate.call("POST", "/v1/leases/claim", {"worker_id": "w1"})

    assert (answer.status, answer.json()["error"]) == (503, "receipt_ledger_unavailable")
    await settled(gate)
    assert phases(ledger, made["task_id"]) == STRANDED[ledger.dialect]
    assert ledger.list_inbox("ada")["count"] == 0
    chains_are_whole(ledger)


@pytest.mark.parametrize("dialect", ["1.0", "1.1"])
async def test_who_claims_at_once_at_a_slow_ledger_holds_there_what_it_was_granted_here(
        standing: tuple[StandIn, str], serving: Serving, dialect: str) -> None:
    """A dozen workers, a call at a time there, and less patience than that takes (strict mode, spec 20.10)."""
    ledger = standing[0]
    ledger.begin(dialect, notary=dialect == "1.1")
    hasty = msgspec.structs.replace(patient(standing[1]), timeout_ms=150, parallel=16)
    gate = await serving(receipt_consistency_mode="strict", ledger=hasty)
    for _ in range(12):
        await gate.post("/v1/tasks", {"type": "demo", "agent_id": "ada", "payload": {}})
    ledger.serial_seconds = 0.04
    strict = gate.engine.find_extension(Strict)
    assert strict
    strict.wires.limit = 16.0

    await asyncio.gather(*(gate.call("POST", "/v1/leases/claim", {"worker_id": f"w{n}"}) for n in range(12)))
    ledger.serial_seconds = 0.0
    await settled(gate)

    leases = {lease.task_id: lease.worker_id for lease in (await gate.stored())["Lease"] if lease.ending == "live"}
    if dialect == "1.1":
        tasks = {task.duty: task.task_id for task in (await gate.stored())["Task"]}
        held = {tasks[id]: custody.custodian for id, custody in ledger.custody.items()
                if custody.custodian != "asyncgate"}
    else:
        held = {receipt["task_id"]: leases.get(receipt["task_id"], "nobody")
                for receipt in ledger.list_inbox("ada")["receipts"]}
    assert held == leases
    assert ledger.denied == [] or dialect == "1.0"
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


@pytest.mark.parametrize("then", ["another works", "canceled"])
async def test_a_notary_lets_the_next_worker_have_what_was_never_granted(
        standing: tuple[StandIn, str], serving: Serving, then: str) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(receipt_consistency_mode="strict", ledger=patient(standing[1]))
    made = await gate.post("/v1/tasks", {"type": "demo", "agent_id": "ada", "payload": {}})
    ledger.lose_replies = 1
    assert (await gate.call("POST", "/v1/leases/claim", {"worker_id": "w1"})).status == 503
    await settled(gate)

    if then == "canceled":
        await gate.post(f"/v1/tasks/{made['task_id']}/cancel", {"agent_id": "ada"})
    else:
        await complete(gate, await claim(gate, "w2"), "w2", artifacts=FILE)

    assert ledger.refusals == []
    assert [custody.closed for custody in ledger.custody.values()] == [True]


async def test_an_end_that_was_not_answered_is_offered_again_as_it_was(
        standing: tuple[StandIn, str], serving: Serving) -> None:
    """A notary ends an obligation once: another receipt of the same end would be refused for ever."""
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(receipt_consistency_mode="strict", ledger=patient(standing[1]))
    offer = await gate.leased()
    ledger.lose_replies = 1
    held = {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"ok": True}, "artifacts": FILE}
    lost = await gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", held)
    gate.backend.skew += 1.0

    again = await gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", held)

    assert (lost.status, again.status) == (503, 200)
    assert phases(ledger, offer["task_id"]) == [("accepted", "NA"), ("complete", "success")]
    assert ledger.refusals == []
    ended = next(receipt for receipt in (await gate.stored())["Receipt"] if receipt.receipt_type == "task.completed")
    assert ended.receipt_id in ledger.receipts


@pytest.mark.parametrize("dialect", ["1.0", "1.1"])
@pytest.mark.parametrize("end", ["complete", "fail", "fail for now", "release"])
@pytest.mark.parametrize("then", ["nothing", "expiry", "cancel"])
async def test_an_end_whose_answer_was_lost_is_adopted_and_wedges_nothing(
        standing: tuple[StandIn, str], serving: Serving, dialect: str, end: str, then: str) -> None:
    """A notary that has closed an obligation, or moved its custody, lets nobody end it once more."""
    ledger = standing[0]
    ledger.begin(dialect, notary=dialect == "1.1")
    gate = await serving(receipt_consistency_mode="strict", ledger=patient(standing[1]))
    strict = gate.engine.find_extension(Strict)
    assert strict
    offer = await gate.leased()
    task, held = f"/v1/tasks/{offer['task_id']}", {"worker_id": "w1", "lease_id": offer["lease_id"]}
    ends: dict[str, tuple[str, dict[str, Any]]] = {
        "complete": (f"{task}/complete", {"result": {"ok": True}, "artifacts": FILE}),
        "fail": (f"{task}/fail", {"error": {"message": "no"}}),
        "fail for now": (f"{task}/fail", {"error": "later", "retryable": True}),
        "release": ("/v1/leases/release", {"task_id": offer["task_id"]})}
    path, more = ends[end]
    ledger.lose_replies = 1
    lost = await gate.call("POST", path, {**held, **more})
    ledger.lose_replies = 0
    gate.backend.skew += 6.0 if then != "expiry" else 3600.0
    told = (await gate.get("/v1/health"))["receipt_ledger_lag"]["unsettled"]

    if then == "expiry":
        await gate.gate.upkeep.sweep()
    elif then == "cancel":
        await gate.post(f"{task}/cancel", {"agent_id": "ada"})
    gate.backend.skew += REPEAT_SECONDS + 900.0
    await strict.look()
    await settled(gate)

    stays = dialect == "1.0" and end in ("fail for now", "release")     # which 1.0 has no receipt for
    assert (lost.status, told) == ((503, 1) if not stays else (200, 0))
    after = "canceled" if then == "cancel" else "queued"
    status = {"complete": "succeeded", "fail": "failed"}.get(end, after)
    assert (await gate.get(f"{task}?agent_id=ada"))["status"] == status
    if status == "queued":
        await complete(gate, await claim(gate, "w2"), "w2", artifacts=FILE)
    assert set(ledger.denied) <= ({"validation_failed"} if dialect == "1.0" else set())     # the dialect is tried
    assert (await gate.get("/v1/health"))["receipt_ledger_lag"]["unsettled"] == 0
    assert sum(phase == "complete" for phase, _ in phases(ledger, offer["task_id"])) == 1


@pytest.mark.parametrize("error", [DatabaseUnavailable("nothing was stored"), outcome_unknown(), OSError("gone")],
                         ids=["not stored", "unknown", "broken"])
async def test_an_end_that_the_database_did_not_take_is_offered_again_as_it_was(
        standing: tuple[StandIn, str], serving: Serving, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(receipt_consistency_mode="strict", ledger=patient(standing[1]))
    offer = await gate.leased()
    strict = gate.engine.find_extension(Strict)
    assert strict
    real = strict.within

    async def break_commit(tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        def decide_in_vain(work: Work) -> None:
            decide(work)
            if work.written:
                raise error
        await real(tenant_id, needs, decide_in_vain)
    monkeypatch.setattr(strict, "within", break_commit)
    held = {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"ok": True}, "artifacts": FILE}
    lost = await gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", held)
    monkeypatch.undo()
    gate.backend.skew += 1.0

    again = await gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", held)

    assert (lost.status, again.status) == (503, 200)
    assert phases(ledger, offer["task_id"]) == [("accepted", "NA"), ("complete", "success")]
    assert ledger.refusals == []


async def ends_itself(url: str, accepted: dict[str, Any], key: str, worker: str = "w1", **more: Any) -> Any:
    """Let a worker end what it has accepted, at the ledger, with a key of its own."""
    ended = {**accepted, "receipt_id": f"end-by-{worker}", "phase": "complete", "status": "success",
             "source_system": worker, "from_principal": "w1", "for_principal": "w1", "metadata": {},
             "completed_at": accepted["created_at"], "outcome_kind": "mixed", "outcome_text": "done",
             "artifact_pointer": "s3://b/a.md", "artifact_location": "s3", "artifact_mime": "text/markdown",
             "body": {"result": {"n": 1}}, **more}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "receiptgate.submit_receipt", "arguments": {"receipt": ended}}}
    async with httpx2.AsyncClient(trust_env=False) as http:
        return (await http.post(f"{url}/mcp", json=call, headers={"authorization": f"Bearer {key}"})).json()


def ledger_of(gate: Served) -> Ledger:
    """Return the ledger of a gate, which it must have."""
    ledger = find_ledger(gate.engine)
    assert ledger
    return ledger


async def looked(gate: Served) -> None:
    """Look once for what workers state at the ledger."""
    ledger = ledger_of(gate)
    await Noticer(gate.engine, Reading(gate.engine, ledger.sink, ledger.reading_breaker)).poll()


async def test_a_notary_lets_a_worker_end_its_task_itself(standing: tuple[StandIn, str], serving: Serving) -> None:
    """Lease protocol, Lifecycle 4: the worker states its completion, and the gate detects it."""
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    ledger.keys["key of w1"] = "w1"
    gate = await serving(ledger=patient(standing[1]))
    offer = await gate.leased()
    await settled(gate)
    (accepted,) = ledger.receipts.values()

    assert "result" in await ends_itself(standing[1], accepted, "key of w1")
    await looked(gate)
    await settled(gate)

    task = await gate.get(f"/v1/tasks/{offer['task_id']}")
    assert (task["status"], task["result"]["result"], task["obligation_open"]) == ("succeeded", {"n": 1}, False)
    assert task["result"]["artifacts"][0]["artifact_pointer"] == "s3://b/a.md"
    assert phases(ledger, offer["task_id"]) == [("accepted", "NA"), ("complete", "success")]
    assert ledger.refusals == []
    history = await gate.get(f"/v1/tasks/{offer['task_id']}/history")
    assert [event["payload"]["receipt_id"] for event in history["events"] if event["event_type"] == "task.adopted"] == [
        "end-by-w1"]
    assert (await gate.get("/v1/config"))["worker_completion"] == "gate_or_ledger"
    assert (await verify(gate.backend)).problems == []


async def test_a_task_that_the_ledger_does_not_show_holds_up_no_other_one(
        standing: tuple[StandIn, str], serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    ledger.keys["key of w1"] = "w1"
    gate = await serving(ledger=patient(standing[1]))
    ended, hidden = await gate.leased(), await gate.leased()       # newer tasks are looked at first
    await settled(gate)
    (accepted,) = [receipt for receipt in ledger.receipts.values() if receipt["task_id"] == ended["task_id"]]
    show = ledger.list_task_receipts

    def show_all_but_one(task_id: str, **more: Any) -> Any:
        return {"receipts": 5} if task_id == hidden["task_id"] else show(task_id, **more)
    monkeypatch.setattr(ledger, "list_task_receipts", show_all_but_one)

    assert "result" in await ends_itself(standing[1], accepted, "key of w1")
    await looked(gate)

    statuses = [(await gate.get(f"/v1/tasks/{offer['task_id']}"))["status"] for offer in (ended, hidden)]
    assert statuses == ["succeeded", "leased"]


async def test_nothing_is_taken_from_a_ledger_that_does_not_bind_who_states_it(
        standing: tuple[StandIn, str], serving: Serving) -> None:
    ledger = standing[0]
    ledger.begin("1.0")
    gate = await serving(ledger=patient(standing[1]))
    offer = await gate.leased()
    await settled(gate)
    (accepted,) = ledger.receipts.values()

    assert "result" in await ends_itself(standing[1], accepted, KEY)
    await looked(gate)

    assert (await gate.get(f"/v1/tasks/{offer['task_id']}"))["status"] == "leased"
    assert (await gate.get("/v1/config"))["worker_completion"] == "gate"


@pytest.mark.parametrize("wrong", [{"source_system": "w2"}, {"from_principal": "w2", "source_system": "w2"},
                                   {"obligation_id": "another"}, {"metadata": {"lease_id": "another"}}])
async def test_what_a_notary_does_not_ascribe_to_the_holder_of_the_lease_ends_nothing(
        standing: tuple[StandIn, str], serving: Serving, wrong: dict[str, Any]) -> None:
    ledger = standing[0]
    ledger.begin("1.1")
    gate = await serving(ledger=patient(standing[1]))
    offer = await gate.leased()
    await settled(gate)
    (accepted,) = ledger.receipts.values()

    assert "result" in await ends_itself(standing[1], accepted, KEY, **wrong)
    await looked(gate)
    await looked(gate)

    assert (await gate.get(f"/v1/tasks/{offer['task_id']}"))["status"] == "leased"
    anomalies = await gate.get("/v1/receipts?to_id=ada&receipt_type=system.anomaly&to_kind=agent")
    assert [receipt["body"]["kind"] for receipt in anomalies["receipts"]] == ["ledger_receipt_rejected"]


async def kinds(gate: Served, mend: Any = None) -> dict[str, int]:
    """Compare the gate with its ledger."""
    sink = ledger_of(gate).sink
    compared = await compare_all(gate.backend, sink, (), lambda rows: None, [gate.tenant_id], mend)
    with contextlib.closing(compared) as findings:
        return dict(findings.counts)


async def test_reconcile_reads_the_ledger_task_by_task_and_mends_what_it_safely_can(
        ledger: StandIn, standing: tuple[StandIn, str], serving: Serving) -> None:
    gate = await serving()
    done = await gate.leased()
    await settled(gate)
    (accepted,) = ledger.receipts.values()
    await complete(gate, done, artifacts=FILE)
    other = await gate.post("/v1/tasks", {"type": "demo", "agent_id": "ada", "payload": {}})
    await settled(gate)
    assert await kinds(gate) == {}

    lost = next(receipt["receipt_id"] for receipt in ledger.receipts.values() if receipt["phase"] == "complete")
    del ledger.receipts[lost], ledger.hashes[lost]
    duty = (await gate.get(f"/v1/tasks/{other['task_id']}"))["obligation_receipt_id"]
    stray = {**accepted, "receipt_id": "stray", "task_id": other["task_id"],
             **({"obligation_id": duty} if ledger.dialect == "1.1" else {})}
    ledger.submit_receipt(stray)

    assert await kinds(gate) == {"missing_at_ledger": 1, "never_granted": 1}
    mender = Mender(gate.engine, ledger_of(gate))
    await kinds(gate, mender)
    ledger_of(gate).sender.call(gate.tenant_id)
    await settled(gate)

    assert dict(mender.done) == {"missing_at_ledger": 1, "never_granted": 1}
    assert await kinds(gate) == {}
    assert lost in ledger.receipts
    assert phases(ledger, other["task_id"]) == STRANDED[ledger.dialect]
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


async def test_upkeep_sends_again_what_the_ledger_lost_and_only_tells_what_else_differs(
        ledger: StandIn, standing: tuple[StandIn, str], serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "TASKS_PER_LOOK", 2)
    gate = await serving()
    for _ in range(3):
        await complete(gate, await gate.leased(), artifacts=FILE)
    await settled(gate)
    first, *_, last = [receipt for receipt in ledger.receipts.values() if receipt["phase"] == "complete"]
    del ledger.receipts[last["receipt_id"]], ledger.hashes[last["receipt_id"]]
    first["metadata"]["hash"] = "another"
    gate.backend.skew += comparing.SETTLED_SECONDS + 1

    await Comparer(gate.engine).compare()

    await settled(gate)
    assert last["receipt_id"] in ledger.receipts
    told = (await gate.get("/v1/health"))["ledger_comparison"]
    assert (told["differences"], told["sent_again"]) == ({"missing_at_ledger": 1, "tampered": 1}, 1)
    assert await kinds(gate) == {"tampered": 1}
    [line] = [line for line in (await gate.get("/v1/audit"))["lines"] if line["event"] == "ledger_differs"]
    assert line["severity"] == "critical"


async def test_reconcile_names_what_the_ledger_has_otherwise(ledger: StandIn, serving: Serving) -> None:
    gate = await serving()
    offer = await gate.leased()
    await settled(gate)
    (accepted,) = ledger.receipts.values()
    accepted["metadata"]["hash"] = "another"
    ledger.receipts["end"] = {**accepted, "receipt_id": "end", "phase": "complete", "status": "success",
                              "metadata": {"receipt_type": "task.completed"}}

    assert await kinds(gate) == {"tampered": 1, "ended_there": 1}
    assert (await gate.get(f"/v1/tasks/{offer['task_id']}"))["status"] == "leased"


@pytest.mark.parametrize("dialect", ["1.0", "1.1"])
async def test_an_end_that_an_earlier_release_left_at_the_ledger_is_noted_by_a_repair_and_adopted(
        standing: tuple[StandIn, str], serving: Serving, dialect: str) -> None:
    ledger = standing[0]
    ledger.begin(dialect, notary=dialect == "1.1")
    gate = await serving(receipt_consistency_mode="strict", ledger=patient(standing[1]))
    strict = gate.engine.find_extension(Strict)
    assert strict
    offer = await gate.leased()
    ledger.lose_replies = 1
    held = {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"ok": True}, "artifacts": FILE}
    assert (await gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", held)).status == 503
    [left] = await strict.find_offered(gate.tenant_id)
    await gate.backend.transact(gate.tenant_id, Needs(),
                                lambda work: work.drop_record(Outgoing, left.row.receipt_id))
    assert await kinds(gate) == {"ended_there": 1}

    mender = Mender(gate.engine, ledger_of(gate))
    await kinds(gate, mender)
    gate.backend.skew += REPEAT_SECONDS + 900.0
    await strict.look()
    await settled(gate)

    assert dict(mender.done) == {"ended_there": 1}
    assert (await gate.get(f"/v1/tasks/{offer['task_id']}?agent_id=ada"))["status"] == "succeeded"
    assert await kinds(gate) == {}


async def test_another_end_of_an_ended_task_is_restated_as_overtaken(ledger: StandIn, serving: Serving) -> None:
    gate = await serving()
    offer = await gate.leased()
    await complete(gate, offer, artifacts=FILE)
    await settled(gate)
    real = next(receipt for receipt in ledger.receipts.values() if receipt["phase"] == "complete")
    ledger.receipts["other"] = {**real, "receipt_id": "other", "status": "failure"}
    before = phases(ledger, offer["task_id"])
    assert await kinds(gate) == {"ended_twice": 1}

    await kinds(gate, Mender(gate.engine, ledger_of(gate)))

    assert await kinds(gate) == {}
    anomalies = await gate.get("/v1/receipts?to_id=ada&receipt_type=system.anomaly")
    assert [receipt["body"]["details"]["receipt_id"] for receipt in anomalies["receipts"]] == ["other"]
    await settled(gate)
    assert phases(ledger, offer["task_id"]) == before       # it has no form for this


async def test_an_acceptance_by_the_lease_protocol_is_the_workers_and_nothing_names_ours(
        ledger: StandIn, serving: Serving) -> None:
    """Lease protocol, Worker Acceptance; a cause is a receipt that is there, or NA."""
    gate, worker = await serving(), "worker.one"
    made = await gate.post("/v1/tasks", {"type": "demo", "agent_id": "ada", "payload": {}})
    first = await gate.post("/lease", {"worker_id": worker})
    await settled(gate)
    assert phases(ledger, made["task_id"]) == []
    gate.backend.skew += 901
    await gate.gate.upkeep.once("sweep")
    second = await gate.post("/lease", {"worker_id": worker})

    assert second["lease_id"] != first["lease_id"]
    await complete(gate, {"task_id": made["task_id"], "lease_id": second["lease_id"]}, worker, artifacts=FILE)
    await settled(gate)

    for receipt in ledger.receipts.values():
        assert receipt["caused_by_receipt_id"] in {"NA", *ledger.receipts}, receipt
    assert [receipt["from_principal"] for receipt in ledger.receipts.values()
            if receipt["phase"] == "complete"] == [worker]
    assert (await gate.backend.lag(gate.tenant_id)).parked == 0


async def test_a_worker_is_told_where_receipts_go_and_gets_no_key(ledger: StandIn, serving: Serving) -> None:
    """20.5; a ReceiptGate issues no keys."""
    gate = await serving()

    packet = await gate.get("/v1/bootstrap?principal_kind=worker&principal_id=w1")

    url = gate.gate.settings.ledger.url
    assert packet["receipt_routing"] == {
        "mode": "receiptgate_integrated", "memorygate_url": url, "emit_receipts_to": "receiptgate",
        "worker_must_emit_to_memorygate": False}


async def test_a_token_of_another_name_needs_the_source_system(
        standing: tuple[StandIn, str], serving: Serving) -> None:
    ledger = standing[0]
    ledger.begin("1.1", notary=True)
    gate = await serving(ledger=LedgerSettings(
        url=standing[1], auth_token=KEY, timeout_ms=20_000, source_system="somebody"))
    await gate.leased()
    await settled(gate)

    assert ledger.refusals == ["IDENTITY_MISMATCH"]


def test_what_a_killed_gate_had_not_sent_is_sent_by_the_next_one(
        ledger: StandIn, standing: tuple[StandIn, str], start: Callable[..., Live], tmp_path: Path) -> None:
    sets = ("receipt_mode=receiptgate_integrated", f"ledger.url={standing[1]}", f"ledger.auth_token={KEY}",
            "ledger.timeout_ms=20000", "ledger.emission_retry.retry_interval_seconds=0.1",
            "ledger.circuit_breaker.timeout_seconds=0.1")
    database = f"sqlite:///{tmp_path / 'gate.db'}"
    ledger.status, tasks = 503, []
    first = start(*sets, database=database)
    with httpx2.Client(base_url=first.url, trust_env=False, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        for _ in range(3):
            made = http.post("/v1/tasks", json={"type": "demo", "payload": None, "agent_id": "ada"}).json()["task_id"]
            (offer,) = http.post("/v1/leases/claim", json={"worker_id": "w1"}).json()["tasks"]
            held = {"worker_id": "w1", "lease_id": offer["lease_id"], "artifacts": FILE}
            assert http.post(f"/v1/tasks/{made}/complete", json=held).status_code == 200
            tasks.append(made)
    first.kill()
    assert ledger.receipts == {}

    ledger.status = 0
    second = start(*sets, database=database)
    with httpx2.Client(base_url=second.url, trust_env=False, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        arrived_all(ledger, tasks, http)
    assert [phases(ledger, task_id) for task_id in tasks] == [[("accepted", "NA"), ("complete", "success")]] * 3


def arrived_all(ledger: StandIn, tasks: list[str], http: Any) -> None:
    """Wait until the ledger has the ends of all these tasks."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(len(phases(ledger, task_id)) for task_id in tasks) < 2 * len(tasks):
        assert time.monotonic() < deadline, [phases(ledger, task_id) for task_id in tasks]
        assert http.get("/v1/health").status_code == 200
