"""The audit log: what is written, with what, and that nobody can take it back (spec 21.7.4; B11 of the threats)."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.backends import Backend, open_backend
from asyncgate.conformance.plugin import POSTGRES, database_of, urls
from asyncgate.parts.app import Gate
from asyncgate.parts.identity.audit import (
    COUNTED_SECONDS,
    FLUSH_SECONDS,
    LINES_OF_PLACE,
    LINES_OF_STRANGERS,
    MOST_NOTED,
    SUSPECTS,
    Strangers,
    add_line,
    find_break,
)
from asyncgate.parts.identity.keys import DELAY_SECONDS
from asyncgate.parts.identity.keys_stored import checksum, generate
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.ids import Ids, mark_of
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import ArchiveSettings, Settings
from asyncgate.parts.model.stored import Audit, AuditHead
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.logs import JsonLines
from tests.conftest import Live, Served
from tests.support.identity_tools import FACADES, HOME, OTHER, THIRD, House, mcp_call, security, tiers
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

AGENT = ("user-agent", "tests/1.0")
FIELDS = {"audit_id", "number", "tenant_id", "timestamp", "event", "severity", "principal_id", "ip", "user_agent",
          "reason", "details", "hash"}


@pytest.fixture(params=["memory:", "sqlite:"], ids=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each test runs on both: one decides in the event loop, the other in a thread of its own."""
    return database_of(request.param, request.config, tmp_path)


@pytest.fixture
async def limited(serve: Any) -> House:
    """A gate that counts, and whose free tenants may call five times an hour."""
    limits = security(limits=True, default_tier="paid")
    house = House(await serve(security=limits, rate_limits=tiers(calls=5, tasks=3)))
    house.counting()
    return house


def of(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Return the lines of one event."""
    return [line for line in lines if line["event"] == event]


def the(lines: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """Return the one line of an event."""
    [line] = of(lines, event)
    return line


def times(lines: list[dict[str, Any]]) -> int:
    """Count what is written down; what is equal within a second is one line, and a busy machine takes several."""
    return sum(line["details"].get("times", 1) for line in lines)


def has(line: dict[str, Any], severity: str, **details: Any) -> None:
    """Insist on the fields of spec 21.7.4, and on these values."""
    assert line.keys() == FIELDS
    assert (line["severity"], line["ip"]) == (severity, "127.0.0.1")
    assert {name: line["details"].get(name) for name in details} == details
    top = ("principal_id", "ip", "user_agent", "reason")
    assert {name: line[name] for name in top} == {name: line["details"].get(name) for name in top}


# Every event of the spec, over every façade.


ABOUT_BOB: list[tuple[str, dict[str, Any]]] = [
    ("list_open_obligations", {"principal_kind": "agent", "principal_id": "bob"}),
    ("bootstrap", {"principal_kind": "agent", "principal_id": "bob"}), ("list_leases", {"worker_id": "w1"}),
    ("check_terminator", {"parent_receipt_id": "RECEIPT"}), ("ack_receipt", {"receipt_id": "RECEIPT"})]


@pytest.mark.parametrize("facade", FACADES)
async def test_what_an_admin_asks_about_somebody_else_is_written_down(house: House, facade: str) -> None:
    root, bob = await house.key("admin", "root"), await house.key("agent", "bob")
    await house.good("create_task", {"type": "demo", "payload": 1}, token=bob)
    (owed,) = (await house.good("list_open_obligations", token=bob))["open_obligations"]

    for name, fields in ABOUT_BOB:
        told = {key: owed["receipt_id"] if value == "RECEIPT" else value for key, value in fields.items()}
        await house.good(name, told, token=root, facade=facade)
    for name in ("list_open_obligations", "bootstrap"):
        await house.good(name, token=root, facade=facade)

    lines = [line for line in await house.audit() if line["event"] in ("admin_read", "admin_operation")
             and line["principal_id"] == "root"]
    assert [(line["event"], line["details"]["operation"], line["details"]["belongs_to"]) for line in lines] == [
        ("admin_read", "list_open_obligations", "agent bob"), ("admin_read", "bootstrap", "agent bob"),
        ("admin_read", "list_leases", "worker w1"), ("admin_read", "check_terminator", "agent bob"),
        ("admin_operation", "ack_receipt", "agent bob")]


async def test_that_a_tenant_has_reached_its_leases_is_written_down(serve: Any) -> None:
    house = House(await serve(security=security(limits=True, default_tier="paid"),
                              rate_limits=tiers(concurrent_leases=1)))
    worker = await house.key("worker", "w1")
    await house.good("create_tasks", {"tasks": [{"type": "demo", "payload": 1}] * 2})

    for _ in range(3):
        await house.good("lease_next", token=worker)

    line = of(await house.audit(), "quota_exceeded")[0]
    has(line, "warning", quota="concurrent_leases", operation="lease_next", principal_id="w1")


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_that_is_refused_is_written_down_at_its_tenant_with_the_real_reason(
        house: House, facade: str) -> None:
    root = await house.admin_of(OTHER)
    revoked, ada = [await house.key("agent", "ada", tenant=OTHER) for _ in range(2)]
    await house.good("revoke_key", {"key_id": house.ids[revoked]}, token=root)
    misspelt, wrong = ada[:20] + ("0" if ada[20] != "0" else "1") + ada[21:], ada[:16] + generate()[16:]

    for token in (misspelt, wrong[:59] + checksum(wrong[:59]), revoked):
        assert (await house.ask("list_tasks", token=token, facade=facade)).code == "unauthenticated"
    await house.good("suspend_tenant", {"tenant": OTHER})
    assert (await house.ask("list_tasks", token=ada, facade=facade)).code == "unauthenticated"

    lines = of(await house.audit(OTHER), "auth_failure")
    assert {(line["reason"], line["details"]["about_key"]) for line in lines} == {
        ("wrong_secret", house.ids[ada]), ("key_revoked", house.ids[revoked]), ("tenant_suspended", house.ids[ada])}
    assert sum(line["details"].get("times", 1) for line in lines if line["reason"] == "wrong_secret") == 2




@pytest.mark.parametrize("facade", FACADES)
async def test_who_is_not_let_in_is_written_down(house: House, facade: str) -> None:
    for token in (generate(), "no credential of ours"):
        await house.ask("list_tasks", token=token, facade=facade, headers=[AGENT])

    lines = of(await house.audit(), "auth_failure")
    assert len(lines) == 2
    for line in lines:
        has(line, "warning", reason="unauthenticated", user_agent="tests/1.0")
        assert line["tenant_id"] == HOME


@pytest.mark.parametrize("facade", FACADES)
async def test_the_first_use_of_a_credential_is_written_down_and_then_they_are_counted(
        house: House, facade: str) -> None:
    key = await house.key("agent", "ada")
    asked: dict[str, Any] = {"token": key, "facade": facade, "headers": [AGENT]}

    for _ in range(4):
        await house.good("list_tasks", **asked)
    first = [line for line in of(await house.audit(), "auth_success") if line["details"]["principal_id"] == "ada"]
    house.guard.auditor.count()
    counted = [line for line in of(await house.audit(), "auth_success") if line["details"]["principal_id"] == "ada"]

    has(first[0], "info", principal_kind="agent", key_id=house.ids[key], role="agent", user_agent="tests/1.0")
    assert len(first) == 1
    assert counted[1]["details"]["uses"] >= 3
    assert COUNTED_SECONDS == 300.0


@pytest.mark.parametrize("facade", FACADES)
async def test_who_lacks_role_scope_or_ownership_is_written_down(house: House, facade: str) -> None:
    worker, reader = await house.key("worker", "w1"), await house.key("agent", "bob", scopes=["tasks:read"])
    task = await house.good("create_task", {"type": "demo", "payload": None, "agent_id": "ada"})

    await house.ask("cancel_task", {"task_id": task["task_id"]}, token=worker, facade=facade, headers=[AGENT])
    await house.ask("create_task", {"type": "demo", "payload": None}, token=reader, facade=facade)
    await house.ask("get_task", {"task_id": task["task_id"]}, token=reader, facade=facade)

    lines = of(await house.audit(), "authorization_failure")
    has(lines[0], "warning", reason="forbidden", principal_id="w1", operation="cancel_task", user_agent="tests/1.0")
    assert [line["details"]["operation"] for line in lines] == ["cancel_task", "create_task", "get_task"]


@pytest.mark.parametrize("facade", FACADES)
async def test_who_asks_too_often_is_written_down(limited: House, facade: str) -> None:
    root = await limited.admin_of(OTHER)
    await limited.good("set_limits", {"tenant": OTHER, "tier": "free"})

    told = [await limited.ask("list_tasks", token=root, facade=facade, headers=[AGENT]) for _ in range(7)]

    assert [answer.code for answer in told] == [""] * 5 + ["rate_limit_exceeded"] * 2
    lines = of(await limited.audit(OTHER), "rate_limit_exceeded")
    assert times(lines) == 2
    for line in lines:
        has(line, "warning", reason="rate_limit_exceeded", principal_id="root", operation="list_tasks")


@pytest.mark.parametrize("facade", FACADES)
async def test_who_creates_too_many_tasks_is_written_down(limited: House, facade: str) -> None:
    root = await limited.admin_of(OTHER)
    await limited.good("set_limits", {"tenant": OTHER, "tier": "free"})

    told = await limited.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 4}, token=root,
                             facade=facade)

    assert told.code == "rate_limit_exceeded"
    has(the(await limited.audit(OTHER), "rate_limit_exceeded"), "warning", operation="create_tasks")


@pytest.mark.parametrize("facade", FACADES)
async def test_who_shows_too_many_wrong_keys_is_written_down(house: House, facade: str) -> None:
    for _ in range(10):
        await house.ask("list_tasks", token=generate(), facade=facade)
    await asyncio.gather(*[house.ask("list_tasks", token=generate(), facade=facade) for _ in range(2)])

    lines = await house.audit()
    assert times(of(lines, "auth_failure")) == 10
    refused = of(lines, "rate_limit_exceeded")
    assert times(refused) == 2
    for line in refused:
        has(line, "warning")


@pytest.mark.parametrize("facade", FACADES)
async def test_what_administrators_do_is_written_down_where_it_is_done(house: House, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade, "headers": [AGENT]}
    await house.good("create_tenant", {"tenant": OTHER, "name": "ours"}, **ask)
    wanted = {"tenant": OTHER, "name": "k", "principal_id": "root", "role": "admin"}
    issued = await house.good("issue_key", wanted, **ask)
    key_id = issued["key"]["key_id"]
    rotated = await house.good("rotate_key", {"tenant": OTHER, "key_id": key_id}, **ask)
    await house.good("revoke_key", {"tenant": OTHER, "key_id": key_id, "reason": "leaked"}, **ask)
    await house.good("set_limits", {"tenant": OTHER, "tier": "paid"}, **ask)
    for until, reason in (("2030-01-01T00:00:00Z", "clause 3.2"), ("2020-01-01T00:00:00Z", "over")):
        await house.good("set_limits", {"tenant": OTHER, "exempt_until": until, "reason": reason}, **ask)
    await house.good("suspend_tenant", {"tenant": OTHER, "reason": "misuse"}, **ask)
    await house.good("suspend_tenant", {"tenant": OTHER, "suspended": False}, **ask)

    lines = await house.audit(OTHER)
    by = {"principal_id": "asyncgate", "user_agent": "tests/1.0"}
    has(the(lines, "tenant_created"), "info", name="ours", **by)
    has(the(lines, "key_issued"), "info", issued=key_id, issued_to="root", issued_role="admin", **by)
    has(the(lines, "key_rotated"), "info", rotated=key_id, rotated_to=rotated["key"]["key_id"], **by)
    has(the(lines, "key_revoked"), "warning", revoked=key_id, reason="leaked", **by)
    has(the(lines, "tier_changed"), "warning", tier="paid", **by)
    has(the(lines, "rate_limit_bypass_granted"), "warning", reason="clause 3.2", approved_by="asyncgate",
        expires_at="2030-01-01T00:00:00Z", **by)
    has(the(lines, "rate_limit_bypass_ended"), "warning", reason="over", **by)
    has(the(lines, "tenant_suspended"), "critical", reason="misuse", **by)
    has(the(lines, "tenant_resumed"), "critical", **by)
    assert {line["tenant_id"] for line in lines} == {OTHER}


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_that_is_named_but_not_ones_own_is_a_critical_event(house: House, facade: str) -> None:
    root = await house.admin_of(OTHER)

    in_body = await house.ask("create_task", {"type": "demo", "payload": None, "tenant_id": THIRD}, token=root,
                              facade=facade)
    in_header = await house.ask("list_tasks", token=root, facade=facade, headers=[("x-tenant-id", THIRD)])
    batch = {"tasks": [{"type": "a", "payload": None, "tenant_id": THIRD}, {"type": "b", "payload": None}]}
    in_item = await house.good("create_tasks", batch, token=root, facade=facade)
    about = await house.ask("list_keys", {"tenant": THIRD}, token=root, facade=facade)

    assert (in_body.code, in_header.code, about.code) == ("tenant_mismatch", "tenant_mismatch", "tenant_not_found")
    assert [item.get("error", {}).get("error") for item in in_item["results"]] == ["tenant_mismatch", None]
    lines = of(await house.audit(OTHER), "cross_tenant_attempt")
    assert {line["severity"] for line in lines} == {"critical"}
    operations = [line["details"]["operation"] for line in lines]
    assert operations == ["create_task", "list_tasks", "create_tasks", "list_keys"]


@pytest.mark.parametrize("facade", FACADES)
async def test_an_id_of_another_tenant_is_a_404_and_a_critical_event(house: House, facade: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=victim))["task_id"]
    receipt = (await house.good("list_receipts", token=victim))["receipts"][0]["receipt_id"]
    asked: dict[str, Any] = {"token": root, "facade": facade, "headers": [AGENT]}
    held = {"task_id": task, "lease_id": "x", "worker_id": "w1"}

    told = [await house.ask("get_task", {"task_id": task}, **asked),
            await house.ask("cancel_task", {"task_id": task}, **asked),
            await house.ask("complete", held, **asked),
            await house.ask("get_receipt", {"receipt_id": receipt}, **asked),
            await house.ask("revoke_key", {"key_id": house.ids[victim]}, **asked),
            await house.ask("emit_receipt", {"receipt_type": "schedule.deleted", "parents": [receipt]}, **asked)]
    batch = await house.good("complete_tasks", {"tasks": [held]}, **asked)
    await house.ask("get_task", {"task_id": "one that nobody has"}, **asked)

    assert [answer.code for answer in told] == ["task_not_found"] * 3 + [
        "receipt_not_found", "key_not_found", "parent_not_found"]
    assert batch["results"][0]["error"]["error"] == "task_not_found"
    lines = of(await house.audit(OTHER), "cross_tenant_attempt")
    assert times(lines) == 7
    for line in lines:
        has(line, "critical", principal_id="root", user_agent="tests/1.0")
    named = [next(value for name, value in line["details"].items() if name.startswith("foreign_")) for line in lines]
    assert set(named) == {task, receipt, house.ids[victim]}
    assert of(await house.audit(THIRD), "cross_tenant_attempt") == []


@pytest.mark.parametrize("facade", FACADES)
async def test_a_foreign_lease_and_a_foreign_obligation_are_critical_events(house: House, facade: str) -> None:
    """21.9.3, of the calls whose answers do not name a thing that is missing."""
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    duty = (await house.good("create_task", {"type": "demo", "payload": None}, token=victim))["task_id"]
    parent = (await house.good("get_task", {"task_id": duty}, token=victim))["obligation_receipt_id"]
    [offer] = (await house.good("lease_next", {"worker_id": "w1"}, token=victim))["tasks"]
    asked: dict[str, Any] = {"token": root, "facade": facade}

    extended = await house.ask("renew_lease", {"lease_id": offer["lease_id"]}, **asked)
    answer = await house.good("check_terminator", {"parent_receipt_id": parent}, **asked)

    assert (extended.code, answer["has_terminator"]) == ("lease_invalid_or_expired", False)
    lines = of(await house.audit(OTHER), "cross_tenant_attempt")
    assert [line["severity"] for line in lines] == ["critical"] * 2
    assert {line["details"].get("foreign_lease_id") for line in lines} == {offer["lease_id"], None}
    assert {line["details"].get("foreign_receipt_id") for line in lines} == {parent, None}


@pytest.mark.parametrize("tenants", [10, 200])
async def test_looking_for_whose_an_id_is_asks_no_tenant_in_vain(
        house: House, monkeypatch: pytest.MonkeyPatch, tenants: int) -> None:
    """The work for an unknown id does not grow with the tenants that there are."""
    root, auditor = await house.admin_of(OTHER), house.guard.auditor
    await house.audit()
    auditor.tenants |= {f"6f1c2b9e-0000-4000-9000-{n:012x}" for n in range(tenants)}
    reads: list[str] = []

    async def task(tenant_id: str, task_id: str) -> None:
        reads.append(tenant_id)
    monkeypatch.setattr(house.served.backend, "task", task)
    ids = Ids()
    for n in range(50):
        await house.ask("get_task", {"task_id": ids.new(n, mark_of(THIRD) ^ n)}, token=root)
    del reads[:]
    await house.audit(OTHER)

    assert len(reads) <= 2, "but for a mark that two tenants share"


# What administrators do beyond their credentials (21.7.4, "Admin operations").


@pytest.mark.parametrize("facade", FACADES)
async def test_what_moves_a_tenants_receipts_is_written_down(serve: Any, tmp_path: Path, facade: str) -> None:
    archive = ArchiveSettings(directory=str(tmp_path))
    house = House(await serve(security=security(), archive=archive))
    root = await house.key("admin", "root")
    ask: dict[str, Any] = {"token": root, "facade": facade, "headers": [AGENT]}

    await house.good("import_receipts", {"receipts": []}, **ask)
    await house.good("export_receipts", **ask)
    await house.good("run_archive", **ask)
    await house.good("seal_receipts", **ask)
    await house.ask("restore_archive", {"task_id": "none"}, **ask)
    await house.good("list_keys", **ask)

    lines = [line for line in await house.audit() if line["event"] in ("admin_operation", "admin_read")
             and line["principal_id"] == "root"]
    assert {line["details"]["operation"] for line in lines} >= {
        "import_receipts", "export_receipts", "run_archive", "seal_receipts", "list_keys"}
    for line in lines:
        has(line, "info", user_agent="tests/1.0", role="admin")
    [run] = [line for line in lines if line["details"]["operation"] == "run_archive"]
    assert run["details"]["answer"] == {"receipts": 0, "segments": 0, "tasks_pruned": 0, "more": False}


@pytest.mark.parametrize("facade", FACADES)
async def test_an_admin_at_another_agents_task_is_written_down(house: House, facade: str) -> None:
    root, ada = await house.key("admin", "root"), await house.key("agent", "ada")
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=ada))["task_id"]
    own = (await house.good("create_task", {"type": "demo", "payload": None}, token=root))["task_id"]
    ask: dict[str, Any] = {"token": root, "facade": facade}

    for _ in range(3):
        await house.good("get_task", {"task_id": task}, **ask)
    for name in ("get_task", "get_task_history", "cancel_task"):
        await house.good(name, {"task_id": own}, **ask)
    for name in ("get_task_history", "cancel_task"):
        await house.good(name, {"task_id": task}, **ask)
    await house.good("list_tasks", {"created_by": "ada"}, **ask)
    await house.good("list_open_obligations", **ask)
    for name in ("get_task", "cancel_task"):
        await house.good(name, {"task_id": task}, token=ada, facade=facade)
    house.guard.auditor.count()

    lines = [line for line in await house.audit() if line["event"] in ("admin_operation", "admin_read")
             and line["principal_id"] in ("root", "ada")]
    told = [(line["event"], line["details"]["operation"], line["details"].get("task_id"),
             line["details"].get("uses")) for line in lines]
    assert told == [
        ("admin_read", "get_task", task, None), ("admin_read", "get_task_history", task, None),
        ("admin_operation", "cancel_task", task, None), ("admin_read", "list_tasks", None, None),
        ("admin_read", "get_task", task, 2)]
    whose = {line["details"]["operation"]: line["details"]["belongs_to"] for line in lines}
    assert whose.pop("list_tasks") == "anybody with the id ada", "created_by alone is an id of any kind"
    assert set(whose.values()) == {"agent ada"}


@pytest.mark.parametrize("facade", FACADES)
async def test_an_admin_who_acts_for_another_is_written_down(house: House, facade: str) -> None:
    root = await house.key("admin", "root")

    await house.good("create_task", {"type": "demo", "payload": None, "agent_id": "ada"}, token=root, facade=facade)

    line = the(await house.audit(), "admin_operation")
    has(line, "info", operation="create_task", acts_as="agent ada", principal_id="root")


# What reaches the process's own log.


async def test_what_is_critical_reaches_the_log_as_critical(house: House, caplog: pytest.LogCaptureFixture) -> None:
    root = await house.admin_of(OTHER)

    await house.ask("list_keys", {"tenant": THIRD}, token=root)

    [told] = [record for record in caplog.records if " cross_tenant_attempt " in record.getMessage()]
    assert told.levelno == logging.CRITICAL


async def test_a_line_of_a_json_log_has_its_fields_at_the_top_level(
        house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Spec 21.7.4's own example, member by member."""
    await house.ask("list_tasks", token=generate(), headers=[AGENT])

    [told] = [record for record in caplog.records if " auth_failure " in record.getMessage()]
    line = json.loads(JsonLines().format(told))
    wanted = {"event": "auth_failure", "tenant_id": HOME, "ip": "127.0.0.1", "user_agent": "tests/1.0",
              "severity": "warning", "level": "warning"}
    assert wanted.items() <= line.items()
    assert {"timestamp", "reason"} <= line.keys()


async def test_a_foreign_id_is_looked_for_without_anybody_asking(house: House) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=victim))["task_id"]

    await house.ask("get_task", {"task_id": task}, token=root)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await house.good("list_audit", {"tenant": OTHER, "severity": "critical"}))["lines"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("facade", FACADES)
async def test_a_lease_of_another_worker_is_written_down(house: House, facade: str) -> None:
    w1, w2 = await house.key("worker", "w1"), await house.key("worker", "w2")
    await house.good("create_task", {"type": "demo", "payload": None})
    [offer] = (await house.good("lease_next", token=w1))["tasks"]

    await house.ask("complete", {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}, token=w2, facade=facade)

    has(the(await house.audit(), "lease_refused"), "warning", principal_id="w2", operation="complete",
        reason="lease_invalid_or_expired")


async def test_a_page_of_another_site_is_written_down(house: House) -> None:
    told = await house.ask("list_tasks", headers=[("origin", "https://evil.example")])

    assert told.code == "forbidden"
    has(the(await house.audit(), "authorization_failure"), "warning", reason="forbidden")


@pytest.mark.parametrize("facade", ["rest", "modern"])
async def test_what_is_merely_wrong_is_no_event(house: House, facade: str) -> None:
    key = await house.key("agent", "ada")
    await house.good("list_tasks", token=key)
    await house.audit()
    before = len(await house.audit())

    await house.ask("create_task", {"type": ""}, facade=facade, token=key)
    await house.ask("get_task", {"task_id": "nobody's"}, facade=facade, token=key)
    await house.ask("list_tasks", {"cursor": "made up"}, facade=facade, token=key)

    assert len(await house.audit()) == before


# From where.


@pytest.fixture
async def proxied(serve: Any) -> House:
    """A gate behind a proxy, which says who its client is."""
    return House(await serve(security=security(), trusted_proxies=("127.0.0.1",)))


async def test_those_who_share_a_batch_do_not_share_an_address(proxied: House) -> None:
    async def issue(n: int) -> None:
        await proxied.good("issue_key", {"name": "k", "principal_id": f"p{n}"},
                           headers=[("x-forwarded-for", f"192.0.2.{n}")])

    await asyncio.gather(*(issue(n) for n in range(1, 17)))     # as many as may wait for their hashes

    lines = of(await proxied.audit(), "key_issued")
    assert {(line["details"]["issued_to"], line["details"]["ip"]) for line in lines} == {
        (f"p{n}", f"192.0.2.{n}") for n in range(1, 17)}


async def test_a_made_up_address_is_not_believed(house: House) -> None:
    await house.ask("list_tasks", token=generate(), headers=[("x-forwarded-for", "192.0.2.1")])

    has(the(await house.audit(), "auth_failure"), "warning")


# Floods.


async def test_equal_refusals_are_one_line_with_a_count(house: House) -> None:
    worker = await house.key("worker", "w1")

    for _ in range(500):
        await house.ask("create_task", {"type": "demo", "payload": None}, token=worker)

    assert len(house.guard.auditor.noted[HOME]) <= MOST_NOTED
    lines = of(await house.audit(), "authorization_failure")
    assert times(lines) == 500
    assert len(lines) < 20


async def test_a_flood_of_different_refusals_is_counted_and_fills_no_memory(house: House) -> None:
    worker, root = await house.key("worker", "w1"), await house.admin_of(OTHER)
    await house.audit()
    auditor = house.guard.auditor
    for loop in auditor.loops:
        loop.cancel()       # all of it falls into one second

    for n in range(3 * MOST_NOTED):
        await house.ask("create_task", {"type": "demo", "payload": None}, token=worker, headers=[("user-agent",
                                                                                                  f"{n}")])
    await house.ask("list_tenants", token=root)
    assert {tenant: len(lines) for tenant, lines in auditor.noted.items()} == {HOME: MOST_NOTED, OTHER: 2}

    lines = await house.audit()
    written = times(of(lines, "authorization_failure"))
    missed = sum(line["details"]["times"]["authorization_failure"] for line in of(lines, "audit_overflow"))
    assert written + missed == 3 * MOST_NOTED
    assert the(lines, "audit_overflow")["severity"] == "critical"
    assert the(await house.audit(OTHER), "authorization_failure"), "another tenant's flood pushes nothing out"


async def test_a_flood_of_unknown_ids_is_counted_and_fills_no_memory(house: House) -> None:
    root = await house.admin_of(OTHER)
    auditor = house.guard.auditor
    for loop in auditor.loops:
        loop.cancel()

    ids = Ids()
    for n in range(2 * SUSPECTS):
        await house.ask("get_task", {"task_id": ids.new(n, mark_of(THIRD))}, token=root)
        await house.ask("get_task", {"task_id": f"nobody's {n}"}, token=root)
        await house.ask("get_task", {"task_id": ids.new(n, mark_of(OTHER))}, token=root)

    assert auditor.suspects.qsize() == SUSPECTS, "what bears the mark of no other tenant is not looked for"
    assert the(await house.audit(OTHER), "audit_overflow")["details"]["times"] == {"unknown_id": SUSPECTS}


async def test_strangers_fill_no_disk(house: House) -> None:
    """Who has no credential causes so many lines a minute and no more, whatever names and addresses it has."""
    for n in range(3 * LINES_OF_PLACE):
        await house.ask("list_tasks", token=f"wrong {n}", headers=[("user-agent", f"{n}")])
    house.guard.auditor.tell_strangers()
    lines = await house.audit()

    told = of(lines, "auth_failure")
    assert len(told) <= 2 * LINES_OF_PLACE, "a minute may have begun meanwhile"
    untold = sum(line["details"]["times"]["auth_failure"] for line in of(lines, "strangers_refused"))
    assert times(told) + untold == 3 * LINES_OF_PLACE


@pytest.mark.parametrize("facade", FACADES)
async def test_who_guesses_the_shared_token_is_slowed_down_and_who_has_it_is_not(house: House, facade: str) -> None:
    for n in range(15):
        assert (await house.ask("list_tasks", token=f"guess {n}", facade=facade)).code == "unauthenticated"
    held = list(house.holds)
    await house.good("list_tasks", facade=facade)

    assert held == house.holds == [DELAY_SECONDS] * 5


def test_strangers_from_everywhere_share_a_budget() -> None:
    now = [0.0]
    strangers = Strangers(lambda: now[0])

    first = [strangers.take_line(f"192.0.2.{n % 200}", "auth_failure") for n in range(1000)]
    now[0] = 60.0
    again = [strangers.take_line("192.0.2.1", "auth_failure") for _ in range(1000)]

    assert (sum(first), sum(again)) == (LINES_OF_STRANGERS, LINES_OF_PLACE)
    assert strangers.untold == {"auth_failure": 2000 - LINES_OF_STRANGERS - LINES_OF_PLACE}
    assert len(strangers.told) <= LINES_OF_STRANGERS


async def test_a_flood_of_strangers_with_names_of_their_own_fills_no_memory(house: House) -> None:
    auditor = house.guard.auditor
    for n in range(3 * MOST_NOTED):
        await house.ask("list_tasks", token=f"wrong {n}", headers=[("user-agent", "x" * 10_000 + str(n))])

    assert len(auditor.noted[HOME]) <= MOST_NOTED
    assert all(len(line[2]) < 1000 for line in auditor.noted[HOME])


# Secrets.


async def test_the_value_of_a_sensitive_field_is_not_written_down(serve: Any) -> None:
    """Spec 21.10.1, audit_logging.sensitive_fields; an operator may name further ones."""
    settings = security()
    logging_of = replace(settings.audit_logging, sensitive_fields=("password", "pin"))
    house = House(await serve(security=replace(settings, audit_logging=logging_of)))
    told = 'they sent {"PIN": "12 34"} and password=hunter2'

    await house.good("create_tenant", {"tenant": OTHER, "name": "acme"})
    await house.good("suspend_tenant", {"tenant": OTHER, "reason": told}, headers=[("user-agent", "x?pin=1234")])

    details = the(await house.audit(OTHER), "tenant_suspended")["details"]
    assert details["reason"] == 'they sent {"PIN": ***} and password=***'
    assert details["user_agent"] == "x?pin=***"


async def test_no_secret_is_ever_written_down(serve: Any, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    house = House(await serve(security=security(), api_key="the-shared-secret-of-this-test"),
                  "the-shared-secret-of-this-test")
    answers = []
    ada, root = await house.key("agent", "ada"), await house.admin_of(OTHER)
    rotated = await house.good("rotate_key", {"key_id": house.ids[ada]})
    house.secrets.append(rotated["api_key"])
    wrong = generate()
    for facade in FACADES:
        for token in (ada, root, wrong, rotated["api_key"], "the-shared-secret-of-this-tesT"):
            misplaced = [("user-agent", f"client {token}"), ("x-forwarded-for", token)]
            for name, fields in (("list_tasks", {}), ("create_tenant", {"name": "x"}), ("list_keys", {}),
                                 ("list_audit", {}), ("get_task", {"task_id": "x"}), ("lease_next", {})):
                answers.append(await house.ask(name, fields, token=token, facade=facade, headers=misplaced))
    answers.append(await house.ask("revoke_key", {"key_id": house.ids[ada], "reason": f"{ada} leaked"}))
    await house.audit()
    answers.append(await house.ask("list_audit", {"limit": 200}))
    await house.guard.auditor.close()

    kept = b"".join(path.read_bytes() for path in Path(url.removeprefix("sqlite:///")).parent.glob("gate.db*")
                    ) if url.startswith("sqlite") else b""
    text = caplog.text + kept.decode("latin-1") + "".join(str(answer.content) for answer in answers)
    parts = [secret[16:59] if secret.startswith("aga_") else secret for secret in (*house.secrets, wrong)]
    assert [part for part in parts if part in text] == []
    assert "aga_" not in caplog.text
    assert "key_issued" in caplog.text


# The chain.


async def chain(house: House) -> list[Audit]:
    """Write some lines, and return them as they are stored."""
    for n in range(5):
        await house.key("worker", f"w{n}")
    await house.audit()
    rows: list[Audit] = []
    while more := await house.served.backend.page(HOME, Rows(Audit, rows[-1].audit_id if rows else "")):
        rows += more
    return rows


START = AuditHead(0, "")


async def test_the_chain_is_whole_and_its_head_is_the_last_line(house: House) -> None:
    lines = await chain(house)

    assert find_break(lines, START) is None
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert await house.served.backend.record(HOME, AuditHead) == AuditHead(len(lines), lines[-1].hash)


CHANGES: dict[str, Callable[[Audit], Audit]] = {
    "time": lambda line: replace(line, at=line.at + 1), "event": lambda line: replace(line, event="auth_success"),
    "severity": lambda line: replace(line, severity="critical"), "id": lambda line: replace(line, audit_id="x"),
    "body": lambda line: replace(line, body=line.body.replace("127.0.0.1", "127.0.0.2")),
    "hash": lambda line: replace(line, hash="0" * 64)}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_changed_line_breaks_the_chain(house: House, name: str) -> None:
    lines = await chain(house)
    changed = CHANGES[name](lines[2])
    assert changed != lines[2]

    flaw = find_break([*lines[:2], changed, *lines[3:]], START)

    assert flaw is not None
    assert "is not what was written" in flaw


async def test_a_missing_added_or_moved_line_breaks_the_chain(house: House) -> None:
    lines = await chain(house)

    assert "missing" in (find_break([*lines[:2], *lines[3:]], START) or "")
    assert find_break([lines[0], lines[2], lines[1], *lines[3:]], START)
    assert find_break([*lines[:3], replace(lines[2], number=4), *lines[3:]], START)
    assert find_break(lines[1:], START)
    assert find_break(lines[1:], AuditHead(1, lines[0].hash)) is None, "it may be checked piece by piece"


async def test_a_line_that_was_chained_anew_breaks_the_one_behind_it(house: House) -> None:
    from asyncgate.parts.identity.audit import link_line

    lines = await chain(house)
    forged = link_line(AuditHead(2, lines[1].hash), replace(lines[2], event="nothing"))

    assert find_break([*lines[:2], forged], START) is None
    assert find_break([*lines[:2], forged, *lines[3:]], START)


async def test_the_last_lines_can_be_asked_for(house: House) -> None:
    lines = await chain(house)

    page = await house.good("list_audit", {"last": 2})

    assert [line["number"] for line in page["lines"]][:2] == [lines[-1].number - 1, lines[-1].number]
    assert page["broken"] is None


async def test_a_list_tells_where_the_chain_of_its_lines_is_broken(house: House, url: str) -> None:
    if not url.startswith("sqlite"):
        pytest.skip("nobody can change what is in memory")
    lines = await chain(house)
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    walls = other.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'").fetchall()
    for (name,) in walls:
        other.execute(f"DROP TRIGGER {name}")
    other.execute("UPDATE audit SET event = 'nothing' WHERE number = ?", (lines[2].number,))
    other.close()

    page = await house.good("list_audit", {"limit": 200})

    assert f"line {lines[2].number} of the audit log" in page["broken"]


async def test_tenants_have_chains_of_their_own(house: House) -> None:
    await house.admin_of(OTHER)
    await house.admin_of(THIRD)

    assert [line["number"] for line in await house.audit(OTHER)][:2] == [1, 2]
    assert [line["number"] for line in await house.audit(THIRD)][:2] == [1, 2]


# Append-only (B11).


def test_no_operation_changes_the_log() -> None:
    assert [name for name in OPERATIONS if "audit" in name] == ["list_audit"]
    assert OPERATIONS["list_audit"].kind == "R"


@pytest.mark.parametrize("facade", FACADES)
async def test_only_an_admin_reads_the_log_and_only_its_own(house: House, facade: str) -> None:
    ada, w1, root = await house.key("agent"), await house.key("worker", "w1"), await house.admin_of(OTHER)
    scopes = sorted(["tasks:read", "tasks:write", "tasks:lease", "receipts:read", "receipts:ack"])
    narrow = await house.key("admin", "narrow", scopes=scopes)

    refused = [(await house.ask("list_audit", token=token, facade=facade)).code for token in (ada, w1, narrow)]
    foreign = await house.ask("list_audit", {"tenant": HOME}, token=root, facade=facade)
    own = await house.good("list_audit", token=root, facade=facade)

    assert refused == ["forbidden"] * 3
    assert foreign.code == "tenant_not_found"
    assert {line["tenant_id"] for line in own["lines"]} == {OTHER}


@pytest.mark.parametrize("statement", ["UPDATE audit SET body = '{}'", "DELETE FROM audit",
                                       "UPDATE audit SET number = number + 1 WHERE number = 1",
                                       "INSERT OR REPLACE INTO audit SELECT * FROM audit LIMIT 1"])
async def test_sqlite_refuses_to_change_or_delete_a_line(house: House, url: str, statement: str) -> None:
    if not url.startswith("sqlite"):
        pytest.skip("of the SQLite backend")
    await chain(house)

    other = sqlite3.connect(url.removeprefix("sqlite:///"))
    with pytest.raises(sqlite3.Error):
        other.execute(statement)
    other.close()


async def aged(backend: Backend, *days: float) -> None:
    """Write lines that are so many days old."""
    def decide(work: Work) -> None:
        for number, age in enumerate(days):
            add_line(work, f"event {number}", "info", b"{}", work.now - age * 86_400)
    needs = Needs(records={(AuditHead, ())})
    await backend.transact(THIRD, needs, decide)


async def shortened(backend: Backend, *numbers: int) -> set[int]:
    """Try to let lines go as the gate itself does, and return the numbers of those that are left."""
    def decide(work: Work) -> None:
        for number in numbers:
            work.drop_record(Audit, f"{number:012d}")
    try:
        await backend.transact(THIRD, Needs(), decide)
    except Exception as refusal:  # of any database
        print(f"refused: {refusal!r}")
    return {line.number for line in await backend.page(THIRD, Rows(Audit))}


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, as the role of the gate sees it."""
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)


@pytest.fixture
async def on_postgres(postgres: str) -> AsyncIterator[House]:
    """A gate over Postgres."""
    gate = Gate(Settings(api_key="a-token-for-tests", security=security()), await open_backend(postgres))
    async with gate.app.router.lifespan_context(gate.app):
        yield House(Served(gate))


@pytest.fixture(params=["sqlite", POSTGRES])
def walled_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that has walls."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'walled.db'}"
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)


@pytest.fixture
async def walled(walled_url: str) -> AsyncIterator[Backend]:
    """A database that has walls, without a gate: its upkeep would delete old lines, too."""
    backend = await open_backend(walled_url)
    yield backend
    await backend.close()


@pytest.mark.parametrize(("days", "numbers", "left"), [
    ((89, 200), (1,), {1, 2}), ((200, 200), (2,), {1, 2}), ((200, 200, 1), (1, 2), {3}), ((200, 1), (1, 2), None)])
async def test_the_database_lets_no_line_go_that_is_young_or_not_the_oldest(
        walled: Backend, days: tuple[float, ...], numbers: tuple[int, ...], left: set[int] | None) -> None:
    """Whoever has the gate's own access cannot shorten the log (threat B11), but for what is 90 days old (21.7.4)."""
    await aged(walled, *days)

    survivors = await shortened(walled, *numbers)

    if left is None:
        assert 2 in survivors
    else:
        assert survivors == left


@pytest.mark.parametrize("statement", ["UPDATE asyncgate.audit SET body = '{}'", "DELETE FROM asyncgate.audit",
                                       "TRUNCATE asyncgate.audit", "DROP TABLE asyncgate.audit",
                                       "DELETE FROM asyncgate.audit_heads"])
async def test_postgres_grants_the_gate_no_way_to_change_or_delete_a_line(
        on_postgres: House, postgres: str, statement: str) -> None:
    lines = await chain(on_postgres)
    assert find_break(lines, START) is None
    connection = await asyncpg.connect(postgres)
    try:
        async with connection.transaction():
            await connection.execute(f"SELECT set_config('app.tenant_id', '{HOME}', true)")
            assert await connection.fetchval("SELECT count(*) FROM asyncgate.audit") == len(lines)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with connection.transaction():
                    await connection.execute(statement)
    finally:
        await connection.close()


# When the process or the database goes.


async def test_what_is_noted_is_written_within_a_second_by_itself(house: House) -> None:
    await house.ask("list_tasks", token=generate())

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await house.good("list_audit", {"event": "auth_failure"}))["lines"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert FLUSH_SECONDS <= 1.0


async def test_a_gate_that_stops_writes_down_all_that_it_has_noted(serve: Any, url: str) -> None:
    if not url.startswith("sqlite"):
        pytest.skip("memory ends with its gate")
    backend = await open_backend(url)
    gate = Gate(Settings(api_key="a-token-for-tests", security=security()), backend)
    async with gate.app.router.lifespan_context(gate.app):
        house = House(Served(gate))
        root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
        task = (await house.good("create_task", {"type": "demo", "payload": None}, token=victim))["task_id"]
        for n in range(20):
            await house.ask("list_tasks", token=f"wrong {n}")
        await house.ask("get_task", {"task_id": task}, token=root)

    again = House(await serve(security=security()))
    assert times(of(await again.audit(), "auth_failure")) == 20
    assert the(await again.audit(OTHER), "cross_tenant_attempt")["severity"] == "critical"


def test_what_is_written_outlives_the_death_of_the_process(tmp_path: Path, start: Callable[..., Live]) -> None:
    import httpx2

    database = f"sqlite:///{tmp_path / 'gate.db'}"
    first = start(database=database)
    with httpx2.Client(base_url=first.url, trust_env=False, timeout=PATIENCE_SECONDS) as client:
        headers = {"authorization": "Bearer a-token-for-tests"}
        client.get("/v1/tasks", headers={"authorization": "Bearer wrong"})
        while not client.get("/v1/audit", params={"event": "auth_failure"}, headers=headers).json()["lines"]:
            assert first.process.poll() is None
    first.kill()
    second = start(database=database)
    lines = httpx2.get(f"{second.url}/v1/audit", params={"event": "auth_failure"}, headers=headers, trust_env=False)

    assert [line["details"]["reason"] for line in lines.json()["lines"]] == ["unauthenticated"]


async def test_what_the_database_does_not_take_is_written_later(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    transact, down = house.served.engine.batches.transact, [True]

    async def failing(*given: Any) -> None:
        if down:
            raise DatabaseUnavailable("it is away")
        await transact(*given)

    monkeypatch.setattr(house.served.engine.batches, "transact", failing)
    for _ in range(3):
        await house.ask("list_tasks", token="wrong")
    await house.guard.auditor.flush()
    await house.ask("list_tasks", token="wrong")
    await house.guard.auditor.flush()
    down.clear()

    line = the(await house.audit(), "auth_failure")
    assert line["details"]["times"] == 4


# The setting.


async def test_a_log_that_is_turned_off_keeps_nothing_and_the_process_still_tells(
        serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    house = House(await serve(security=security(audit=False)))
    key = await house.key("agent", "ada")

    await house.ask("list_tasks", token=generate())
    await house.ask("lease_next", token=key)

    assert await house.audit() == []
    await house.guard.auditor.flush()
    assert not house.guard.auditor.noted
    assert {"key_issued", "auth_failure", "authorization_failure"} <= {
        record.getMessage().split()[1] for record in caplog.records if record.name == "asyncgate.audit"}


def test_the_log_is_on_unless_it_is_turned_off_and_kept_for_90_days_at_least() -> None:
    assert Settings().security.audit_logging.enabled
    assert Settings().security.audit_logging.retention_days == 90


async def test_a_line_of_the_process_s_log_is_json_behind_its_names(
        house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    await house.ask("list_tasks", token=generate(), headers=[("user-agent", "a\x1b[31m\u0085b")])

    [told] = [record.getMessage() for record in caplog.records if " auth_failure " in record.getMessage()]
    assert json.loads(told.partition(f"tenant={HOME} ")[2])["reason"] == "unauthenticated"


async def test_a_call_over_mcp_that_is_refused_before_it_is_read_is_written_down(limited: House) -> None:
    root = await limited.admin_of(OTHER)
    await limited.good("set_limits", {"tenant": OTHER, "tier": "free"})
    method, target, body, headers = mcp_call("list_tasks", {}, "modern")
    body["method"] = "tools/list"
    headers = [*headers[:2], ("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/list")]

    answers = [await limited.served.call(method, target, body, headers=headers, token=root) for _ in range(7)]

    codes = [answer.json().get("error", {}).get("data", {}).get("code") for answer in answers]
    assert codes == [None] * 5 + ["rate_limit_exceeded"] * 2
    lines = of(await limited.audit(OTHER), "rate_limit_exceeded")
    assert times(lines) == 2
    for line in lines:
        has(line, "warning")
