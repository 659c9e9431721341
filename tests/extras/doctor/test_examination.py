"""What a running gate finds in itself: upkeep that fails or hangs, a ledger that is away, lost limits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec.structs import replace

from asyncgate.backends import open_backend
from asyncgate.extras.doctor import examine
from asyncgate.extras.doctor.installation import Installation
from asyncgate.extras.doctor.machine import BAD_FLUSH_MS, SLOW_FLUSH_MS, judge_flush
from asyncgate.extras.doctor.running import RUNNING
from asyncgate.extras.doctor.tls import check_certificates
from asyncgate.extras.ledger import find_ledger
from asyncgate.parts.app import Gate
from asyncgate.parts.model.findings import Finding
from asyncgate.parts.model.settings import (
    CircuitBreaker,
    LedgerSettings,
    RateLimiting,
    SecuritySettings,
    Settings,
    Tls,
)
from tests.conftest import Serve, Served
from tests.support.stub_ledger import StubLedger

pytestmark = pytest.mark.anyio

DAY = 86_400.0


async def found_in(served: Served, later: float = 0.0) -> list[Finding]:
    """Return what a gate finds in itself, as if so many seconds later."""
    at = Installation(served.gate.settings, clock=lambda: time.time() + later, running=served.engine)
    return await examine(at, RUNNING)


async def test_a_running_gate_answers_its_operator(served: Served) -> None:
    told = await served.get("/v1/examination")

    assert {finding["check"] for finding in told["findings"]} >= {"settings", "versions", "clock", "upkeep"}
    assert [finding for finding in told["findings"] if finding["severity"] != "ok" and not finding["cure"]] == []
    assert told["severity"] in ("ok", "note", "warning", "error")


async def test_nobody_but_the_operator_may_examine_a_gate(served: Served) -> None:
    await served.post("/v1/tenants", {"name": "theirs"})
    keys = [(await served.post("/v1/keys", {"name": role, "principal_kind": kind, "principal_id": role, "role": role,
                                            **more}))["api_key"]
            for role, kind, more in (("agent", "agent", {}), ("worker", "worker", {}),
                                     ("admin", "human", {"tenant": "theirs"}))]

    assert [(await served.call("GET", "/v1/examination", token=key)).status for key in keys] == [403, 403, 403]


async def test_a_healthy_gate_has_no_finding(served: Served) -> None:
    assert [(finding.check, finding.severity) for finding in await found_in(served)] == [
        ("service", "ok"), ("upkeep", "ok")]


async def test_a_job_that_fails_is_found(tmp_path: Path) -> None:
    file = tmp_path / "gate.db"
    gate = Gate(Settings(api_key="a", lease_sweep_interval_seconds=3600.0), await open_backend(f"sqlite:///{file}"))
    async with gate.app.router.lifespan_context(gate.app):
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.execute("ALTER TABLE leases RENAME TO lost")

        await gate.upkeep.once("sweep")
        [finding] = [finding for finding in await found_in(Served(gate)) if "job sweep" in finding.seen]

    assert (finding.check, finding.severity) == ("upkeep", "error")
    assert "the last run of the job sweep failed with DatabaseUnavailable (" in finding.seen
    assert "`upkeep: sweep failed` in the gate's log" in finding.cure


async def test_jobs_that_hang_are_found(served: Served) -> None:
    findings = [finding for finding in await found_in(served, later=DAY) if finding.check == "upkeep"]

    assert {finding.severity for finding in findings} == {"error"}
    assert {finding.seen.split()[2] for finding in findings} >= {"sweep", "beat", "presence"}
    assert all("restart the gate" in finding.cure for finding in findings)


async def test_a_gate_that_drains_says_so(served: Served) -> None:
    await served.post("/v1/gate/drain")

    [finding] = [finding for finding in await found_in(served) if finding.check == "service"]

    assert (finding.severity, "asyncgate resume-gate" in finding.cure) == ("note", True)


async def test_an_open_circuit_breaker_is_found(serve: Serve) -> None:
    async with StubLedger() as stub:
        stub.answer = lambda receipt: (503, {}, "{}")
        ledger = LedgerSettings(url=stub.url, circuit_breaker=CircuitBreaker(failure_threshold=1, timeout_seconds=3600))
        served = await serve(receipt_mode="memorygate_integrated", ledger=ledger)
        await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
        await stub.until(lambda: bool(stub.sent))
        sending = find_ledger(served.engine)
        assert sending is not None
        rounds = sending.sender.rounds.values()
        await asyncio.gather(*(tenant.running for tenant in rounds if tenant.running))

        [finding] = [finding for finding in await found_in(served) if finding.check == "sending"]

    assert (finding.severity, "circuit breaker of the ledger is open" in finding.seen) == ("warning", True)
    assert "the breaker closes" in finding.cure


async def test_a_lost_store_of_the_limits_is_found(serve: Serve) -> None:
    limiting = RateLimiting(enabled=True, storage="redis", redis_url="redis://127.0.0.1:9")
    served = await serve(security=SecuritySettings(rate_limiting=limiting))

    before = [finding for finding in await found_in(served) if finding.check == "counting"]
    await served.call("GET", "/v1/whoami")
    after = [finding for finding in await found_in(served) if finding.check == "counting"]

    assert [finding.severity for finding in (*before, *after)] == ["ok", "warning"]
    assert "start the store" in after[0].cure


async def test_a_certificate_that_was_renewed_under_a_running_gate_is_found(tmp_path: Path, served: Served) -> None:
    path = tmp_path / "gate.pem"
    trustme.CA().issue_cert("gate.example").private_key_and_cert_chain_pem.write_to_path(path)
    os.utime(path, (time.time() + 60, time.time() + 60))
    settings = Settings(security=SecuritySettings(tls=Tls(certificate_path=str(path))))

    findings = await examine(Installation(settings, running=served.engine), {"tls": check_certificates})

    [changed] = [finding for finding in findings if "after this gate had read it" in finding.seen]
    assert (changed.severity, changed.cure) == ("warning", "restart the gate")


@pytest.mark.parametrize(("waited", "severity"), [(1.0, "ok"), (SLOW_FLUSH_MS, "note"), (BAD_FLUSH_MS, "warning")])
async def test_a_slow_disk_is_told_by_how_slow_it_is(waited: float, severity: str) -> None:
    [finding] = judge_flush(waited)

    assert finding.severity == severity
    assert bool(finding.cure) == (severity != "ok")


async def test_a_check_that_breaks_is_a_finding_and_stops_no_other(served: Served) -> None:
    def breaks(at: Installation) -> Any:
        raise RuntimeError("no hands")

    findings = await examine(Installation(Settings()), {"broken": breaks, **RUNNING, "again": breaks})

    assert [(finding.check, finding.severity) for finding in findings] == [("broken", "error"), ("again", "error")]
    assert "RuntimeError: no hands" in findings[0].seen


# Questions.


async def ask(served: Served, *who: str) -> None:
    """Let a task ask each of these humans something."""
    await served.leased()
    [task] = (await served.get("/v1/tasks?status=leased"))["tasks"]
    [lease] = (await served.get("/v1/leases?worker_id=w1"))["leases"]
    for at, name in enumerate(who, 1):
        await served.post(f"/v1/tasks/{task['task_id']}/inputs", {
            "worker_id": "w1", "lease_id": lease["lease_id"], "key": name, "message": "May I?",
            "to": {"kind": "human", "id": name}, "keep_lease": at < len(who)})


async def questions(served: Served) -> list[Finding]:
    return [finding for finding in await found_in(served) if finding.check == "questions"]


async def test_questions_that_nobody_has_seen_yet_are_counted_and_then_found(served: Served) -> None:
    assert await questions(served) == []
    await ask(served, "boss")

    [fresh] = await questions(served)
    served.backend.skew += 7200
    [old] = await questions(served)

    assert fresh.severity == "ok"
    assert fresh.seen.startswith("1 task on hold for an answer, the first for ")
    assert old.severity == "note"       # whoever has the shared token can answer
    assert "the first for 2 h; not seen since: human:boss of tenant " in old.seen
    assert "asyncgate inbox --as" in old.cure


async def test_a_question_to_somebody_without_a_credential_is_found_until_there_is_one(serve: Serve) -> None:
    served = await serve()
    root = (await served.post("/v1/keys", {"name": "root", "principal_kind": "human", "principal_id": "root",
                                           "role": "admin"}))["api_key"]
    await ask(served, "boss", "root")
    served.backend.skew += 7200
    closed = Served(served.gate)        # as a gate without the shared token finds it
    closed.engine = engine = copy.copy(served.engine)
    engine.settings = replace(served.engine.settings, api_key="")

    locked_out, away = await questions(closed)
    key = (await served.post("/v1/keys", {"name": "boss", "principal_kind": "human", "principal_id": "boss",
                                          "role": "agent"}, token=root))["api_key"]
    await served.get("/v1/obligations/open", token=key)
    seen = await questions(closed)

    assert (locked_out.severity, away.severity) == ("warning", "note")
    assert "nobody can answer as human:boss of tenant " in locked_out.seen
    assert "asyncgate issue-key" in locked_out.cure
    assert "human:root" in away.seen
    assert [finding.severity for finding in seen] == ["ok"]     # both have called since
