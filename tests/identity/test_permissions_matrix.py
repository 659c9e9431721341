"""Who may do what with an issued key: every operation, role, scope and façade, cell by cell (spec 21.5.2, 21.8.3)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncgate import SCOPES, Caller, Needs, Operation, Work
from asyncgate.conformance.harness import NEEDED, are_here, least
from asyncgate.parts.identity.keys_stored import generate, hash_secret, parse
from asyncgate.parts.model.stored import Key
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from tests.support.identity_tools import FACADES, HOME, OTHER, House, security

pytestmark = pytest.mark.anyio

# Spec 21.5.2, what `own` and `any` have in common: agent, worker, admin, system.
ROLES = {"create_task": "1011", "get_task": "1111", "list_tasks": "1011", "cancel_task": "1011", "lease_next": "0110",
         "renew_lease": "0110", "complete": "0110", "fail": "0110", "list_receipts": "1111"}
NAMED = ("agent", "worker", "admin", "system")
AUDITORS = {"list_audit": "0011"}       # view_audit_log; there is no way in for the system, so the table leaves it out
# Spec 21.8.3.
SCOPED = {"tasks:read": ["get_task", "list_tasks"], "tasks:write": ["create_task", "cancel_task"],
          "tasks:lease": ["lease_next", "renew_lease", "complete", "fail"],
          "receipts:read": ["list_receipts", "get_receipt"], "receipts:ack": ["ack_receipt"]}
ADMINISTRATION = {"create_tenant", "list_tenants", "suspend_tenant", "get_limits", "set_limits", "issue_key",
                  "list_keys", "rotate_key", "rotate_credentials", "revoke_key", "list_audit", "get_usage",
                  "set_budget", "get_budgets", "seal_receipts", "list_seals", "export_receipts", "import_receipts",
                  "run_archive", "restore_archive", "examine_gate", "drain_gate", "resume_gate", "list_obligations",
                  "list_workers", "list_queues", "get_queue", "get_traffic",
                  "pause_work", "drain_work", "resume_work", "list_pauses",
                  "set_limit", "get_limit", "list_limits", "remove_limit", "set_type_policy",
                  "preview_bulk", "run_bulk", "get_bulk",
                  "register_client", "list_clients", "change_client", "remove_client",
                  "revoke_token", "list_signing_keys", "erase_principal", "erase_tenant", "list_erasures",
                  "list_users", "invite_user", "change_user", "remove_user", "make_sign_in_link", "export_tenant",
                  "create_webhook", "list_webhooks", "change_webhook", "remove_webhook", "rotate_webhook_secret",
                  "test_webhook", "list_deliveries", "replay_deliveries"}
# For everybody with a scope of administration, about nobody but itself.
ABOUT_ONESELF = {"export_principal"}
MORE: dict[str, dict[str, Any]] = {
    "erase_principal": {"plan": True}, "erase_tenant": {"tenant": OTHER, "plan": True},
    "run_task": {"wait_seconds": 0}, "suspend_tenant": {"tenant": OTHER}, "set_limits": {"tenant": OTHER},
    "issue_key": {"scopes": []}, "invite_user": {"scopes": []}, "make_sign_in_link": {"scopes": []},
    "rotate_credentials": {"issued_before": "1970-01-02T00:00:00Z"},
    "list_archived_receipts": {"task_id": "none"}}
GUARDED = [op for op in OPERATIONS.values() if op.roles]


def filled(name: str) -> dict[str, Any]:
    """Say enough for an operation to get past who may ask it; what it then says does not matter."""
    return {**least(name), **MORE.get(name, {})}


# The table of operations says what the spec says.


@pytest.mark.parametrize("name", ROLES)
def test_an_operation_has_the_roles_of_the_spec(name: str) -> None:
    expected = {role for role, mark in zip(NAMED, ROLES[name], strict=True) if mark == "1"}

    assert set(OPERATIONS[name].roles) == expected


@pytest.mark.parametrize("scope", SCOPED)
def test_an_operation_has_the_scopes_of_the_spec(scope: str) -> None:
    admins = {"admin:write"}

    for name in SCOPED[scope]:
        op = OPERATIONS[name]
        assert scope in op.scopes
        assert op.scopes - {"tasks:lease"} == {scope, *admins, *(["admin:read"] if op.kind == "R" else [])} - {
            "tasks:lease"}, name


def test_administration_is_for_admins_with_a_scope_of_theirs() -> None:
    operations = {name: op for name, op in OPERATIONS.items() if op.scopes
                  and op.scopes <= {"admin:read", "admin:write"}}

    assert operations.keys() == {*are_here(ADMINISTRATION | ABOUT_ONESELF)}
    assert {op.roles for name, op in operations.items() if name in ADMINISTRATION} == {("admin",)}
    assert all("admin:read" not in op.scopes for op in operations.values() if op.kind == "W")
    assert [mark for role, mark in zip(NAMED, AUDITORS["list_audit"], strict=True) if role == "admin"] == ["1"]


# Every cell, over every façade.


def may(op: Operation, role: str, scopes: frozenset[str]) -> bool:
    """Role and scope are both needed."""
    return role in op.roles and (not op.scopes or bool(op.scopes & scopes))


@pytest.mark.parametrize("role", ["agent", "worker", "admin"])
@pytest.mark.parametrize("facade", FACADES)
async def test_every_cell_of_the_matrix(house: House, facade: str, role: str) -> None:
    wrong = []
    for scopes in (*(frozenset({scope}) for scope in sorted(SCOPES)), frozenset[str](), SCOPES):
        key = await house.key(role, "x", scopes=sorted(scopes))
        for op in GUARDED:
            told = await house.ask(op.name, filled(op.name), token=key, facade=facade)
            assert told.status < 500, told
            if (told.code != "forbidden") is not may(op, role, scopes):
                wrong.append((op.name, sorted(scopes), told.code))

    assert wrong == []


@pytest.mark.parametrize("facade", FACADES)
async def test_a_refused_role_is_told_which_one_it_takes(house: House, facade: str) -> None:
    worker = await house.key("worker", "w1")

    told = await house.ask("cancel_task", {"task_id": "none"}, token=worker, facade=facade)

    assert (told.code, told.body["required_role"], told.body["your_role"]) == ("forbidden", "agent or admin", "worker")


@pytest.mark.parametrize("facade", FACADES)
async def test_a_refusal_for_a_missing_scope_names_the_scope_and_no_role(house: House, facade: str) -> None:
    reader = await house.key("admin", "reader", scopes=["receipts:read"])
    issuer = await house.key("admin", "issuer", scopes=["admin:write"])
    beyond = {"name": "a key", "principal_id": "ada", "scopes": ["receipts:read", "tasks:read"]}

    told = [(await house.ask(name, fields, token=token, facade=facade)).body for name, fields, token in (
        ("lease_next", {"worker_id": "w1"}, reader), ("get_task", {"task_id": "none"}, reader),
        ("issue_key", beyond, issuer))]

    assert [(body["error"], body.get("required_scope"), body["your_role"]) for body in told] == [
        ("forbidden", " or ".join(sorted(OPERATIONS[name].scopes)), "admin") for name in ("lease_next", "get_task")] + [
        ("forbidden", "receipts:read and tasks:read", "admin")]
    assert [body for body in told if "required_role" in body] == []


async def test_a_refusal_names_no_role_that_its_caller_has(house: House) -> None:
    limited = await house.key("admin", "root", task_types=["demo"])
    reader = await house.key("admin", "reader", scopes=["admin:read", "tasks:write"])
    task = await house.good("create_task", {"type": "demo", "payload": None})

    told = [(await house.ask("issue_key", {"name": "a key", "principal_id": "ada"}, token=limited)).body,
            (await house.ask("cancel_task", {"task_id": task["task_id"]}, token=reader)).body]

    assert [(body["error"], body["your_role"], "required_role" in body) for body in told] == [
        ("forbidden", "admin", False)] * 2


@pytest.mark.parametrize("facade", FACADES)
async def test_admin_read_reads_all_and_writes_nothing(house: House, facade: str) -> None:
    ada, reader = await house.key("agent", "ada"), await house.key("admin", "root", scopes=["admin:read"])
    task = await house.good("create_task", {"type": "demo", "payload": None}, token=ada)

    read = await house.ask("get_task", task | {"status": None}, token=reader, facade=facade)
    async with house.served.unchanged():
        written = [await house.ask(op.name, filled(op.name), token=reader, facade=facade) for op in GUARDED
                   if op.kind == "W" and op.scopes and op.name != "bootstrap"]     # without: one's own sessions
        canceled = await house.ask("cancel_task", {"task_id": task["task_id"]}, token=reader, facade=facade)

    assert read.body["task_id"] == task["task_id"]
    assert {told.code for told in (*written, canceled)} == {"forbidden"}


# Own and any.


@pytest.mark.parametrize("facade", FACADES)
async def test_an_agent_has_its_own_tasks_and_receipts_and_an_admin_any(house: House, facade: str) -> None:
    ada, bob, root = await house.key("agent", "ada"), await house.key("agent", "bob"), await house.key("admin", "root")
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=ada))["task_id"]
    receipt = (await house.good("list_receipts", token=ada))["receipts"][0]["receipt_id"]
    own: dict[str, dict[str, Any]] = {
        "get_task": {"task_id": task}, "get_task_history": {"task_id": task}, "list_receipts": {"task_id": task},
        "explain_task": {"task_id": task},
        "get_receipt": {"receipt_id": receipt}, "ack_receipt": {"receipt_id": receipt},
        "release_hold": {"task_id": task}, "cancel_task": {"task_id": task}}

    for name, fields in own.items():
        assert (await house.ask(name, fields, token=bob, facade=facade)).code == "forbidden", name
    for name in ("list_tasks", "list_receipts"):
        listed = await house.good(name, token=bob, facade=facade)
        assert [rows for rows in listed.values() if isinstance(rows, list)] == [[]]
    for token in (ada, root):
        for name, fields in own.items():
            assert not (await house.ask(name, fields, token=token, facade=facade)).code, name
    assert [row["task_id"] for row in (await house.good("list_tasks", token=root, facade=facade))["tasks"]] == [task]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_worker_reads_the_task_that_it_holds_and_no_other(house: House, facade: str) -> None:
    await house.good("create_tasks", {"tasks": [{"type": "a", "payload": None}, {"type": "b", "payload": None}]})
    w1 = await house.key("worker", "w1")
    [held] = (await house.good("lease_next", token=w1, facade=facade))["tasks"]
    [free] = [task["task_id"] for task in (await house.good("list_tasks", {"status": "queued"}))["tasks"]]

    assert not (await house.ask("get_task", {"task_id": held["task_id"]}, token=w1, facade=facade)).code
    assert (await house.ask("get_task", {"task_id": free}, token=w1, facade=facade)).code == "forbidden"
    assert (await house.ask("list_tasks", token=w1, facade=facade)).code == "forbidden"


@pytest.mark.parametrize("verb", ["renew_lease", "start_task", "report_progress", "complete", "fail", "release_lease"])
@pytest.mark.parametrize("facade", FACADES)
async def test_the_lease_of_another_worker_is_of_no_use(house: House, facade: str, verb: str) -> None:
    w1, w2 = await house.key("worker", "w1"), await house.key("worker", "w2")
    await house.good("create_task", {"type": "demo", "payload": None})
    [offer] = (await house.good("lease_next", token=w1))["tasks"]
    more = NEEDED.get(verb, {})
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], **more}

    async with house.served.unchanged():
        told = await house.ask(verb, held, token=w2, facade=facade)

    assert (told.code, told.body["reason"]) == ("lease_invalid_or_expired", "unknown")


# In whose name.


@pytest.mark.parametrize("claim", [
    {"created_by": {"principal_kind": "agent", "principal_id": "bob"}}, {"principal_id": "bob"}, {"agent_id": "bob"},
    {"created_by": {"kind": "system", "id": "asyncgate"}}, {"principal_id": "ada", "principal_kind": "human"}])
@pytest.mark.parametrize("facade", FACADES)
async def test_an_agent_cannot_create_in_the_name_of_another(house: House, facade: str, claim: dict[str, Any]) -> None:
    ada = await house.key("agent", "ada")

    async with house.served.unchanged():
        for name, fields in (("create_task", filled("create_task")), ("run_task", filled("run_task"))):
            assert (await house.ask(name, {**fields, **claim}, token=ada, facade=facade)).code == "forbidden"
        batch = await house.good("create_tasks", {"tasks": [{"type": "demo", "payload": None, **claim}]}, token=ada,
                                 facade=facade)
    assert [item["error"]["error"] for item in batch["results"]] == ["forbidden"]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_worker_cannot_work_in_the_name_of_another(house: House, facade: str) -> None:
    w1, w2 = await house.key("worker", "w1"), await house.key("worker", "w2")
    await house.good("create_task", {"type": "demo", "payload": None})
    [offer] = (await house.good("lease_next", token=w1))["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}

    async with house.served.unchanged():
        claimed = await house.ask("lease_next", {"worker_id": "w1"}, token=w2, facade=facade)
        completed = await house.ask("complete", held, token=w2, facade=facade)
        batch = await house.good("complete_tasks", {"tasks": [held]}, token=w2, facade=facade)
        listed = await house.ask("list_leases", {"worker_id": "w1"}, token=w2, facade=facade)

    assert {told.code for told in (claimed, completed, listed)} == {"forbidden"}
    assert [item["error"]["error"] for item in batch["results"]] == ["forbidden"]


@pytest.mark.parametrize("operation", ["list_open_obligations", "bootstrap", "list_receipts", "list_tasks"])
@pytest.mark.parametrize("facade", FACADES)
async def test_an_inbox_of_another_is_not_shown(house: House, facade: str, operation: str) -> None:
    ada = await house.key("agent", "ada")
    named = {"list_receipts": {"to_kind": "agent", "to_id": "bob"}, "list_tasks": {"created_by": "bob"}}
    fields = named.get(operation, {"principal_kind": "agent", "principal_id": "bob"})

    assert (await house.ask(operation, fields, token=ada, facade=facade)).code == "forbidden"


@pytest.mark.parametrize("fields", [{"role": "system"}, {"principal_kind": "system"}, {"principal_kind": "asyncgate"}])
async def test_a_key_that_stands_for_the_system_opens_nothing_even_if_it_is_stored(
        house: House, fields: dict[str, Any]) -> None:
    text = generate()
    parts = parse(text)
    assert parts is not None
    key = Key(parts[0], hash_secret(parts[1], security().api_keys), "x", "agent", "ada", None, "agent",
              '["tasks:read"]', None, None, 0.0, None, None, None, 1, 0.0, "x")

    def keep(engine: Any, work: Work, caller: Any, ask: Any) -> None:
        work.keep_record(msgspec.structs.replace(key, **fields))

    def load(needs: Needs, caller: Any, ask: Any) -> None:
        needs.records.add((Key, (key.key_id,)))

    caller = Caller(HOME, Principal("system", "test"), "system", frozenset())
    await house.served.engine.write(keep, load, caller, OPERATIONS["get_config"].takes())

    for facade in FACADES:
        assert (await house.ask("list_tasks", token=text, facade=facade)).code == "unauthenticated"


# Keys that are good for some work only (21.2.2).


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_for_some_types_creates_no_others(house: House, facade: str) -> None:
    ada = await house.key("agent", "ada", task_types=["draw"])
    ask = {"token": ada, "facade": facade}

    async with house.served.unchanged():
        assert (await house.ask("create_task", {"type": "write", "payload": None}, **ask)).code == "forbidden"
        assert (await house.ask("run_task", {"type": "write", "payload": None, "wait_seconds": 0},
                                **ask)).code == "forbidden"
    batch = await house.good("create_tasks", {"tasks": [{"type": "draw", "payload": None}, {"type": "write",
                                                                                            "payload": None}]}, **ask)
    assert not (await house.ask("create_task", {"type": "draw", "payload": None}, **ask)).code
    assert not (await house.ask("run_task", {"type": "draw", "payload": None, "wait_seconds": 0}, **ask)).code

    assert [item.get("error", {}).get("error") for item in batch["results"]] == [None, "forbidden"]
    assert {task["type"] for task in (await house.good("list_tasks"))["tasks"]} == {"draw"}


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_for_some_types_orders_no_others_from_a_scheduler(house: House, facade: str) -> None:
    def order(*types: str) -> dict[str, Any]:
        plan: Any = None
        for type in reversed(types):
            plan = {"name": "n", "mode": "interval", "interval_seconds": 60,
                    "task_template": {"type": type, "payload_template": plan}}
        return {"type": "schedule.create", "payload": plan}

    ada = await house.key("agent", "ada", task_types=["draw", "schedule.create"])
    ask = {"token": ada, "facade": facade}

    async with house.served.unchanged():
        for types in (("write",), ("schedule.create", "write"), ("schedule.create", "{{name}}")):
            assert (await house.ask("create_task", order(*types), **ask)).code == "forbidden"
    for types in (("draw",), ("schedule.create", "draw")):
        assert not (await house.ask("create_task", order(*types), **ask)).code
    batch = await house.good("create_tasks", {"tasks": [order("draw"), order("write")]}, **ask)
    assert [item.get("error", {}).get("error") for item in batch["results"]] == [None, "forbidden"]
    assert not (await house.ask("create_task", order("write"), facade=facade)).code     # a key without such limits


@pytest.mark.parametrize("more", [{}, {"preferred_kinds": ["write"]}, {"accept_types": ["draw", "write"]},
                                  {"max_tasks": 100}, {"preferred_kinds": ["write"], "max_tasks": 100}])
@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_for_some_types_claims_no_others(house: House, facade: str, more: dict[str, Any]) -> None:
    w1 = await house.key("worker", "w1", task_types=["draw"])
    await house.good("create_tasks", {"tasks": [{"type": "write", "payload": None, "priority": 9}, {"type": "draw",
                                                                                                    "payload": None}]})

    offers = (await house.good("lease_next", more, token=w1, facade=facade))["tasks"]
    again = (await house.good("lease_next", more, token=w1, facade=facade))["tasks"]
    asked = await house.ask("lease_next", {"accept_types": ["write"]}, token=w1, facade=facade)

    assert ([offer["type"] for offer in offers], again, asked.code) == (["draw"], [], "forbidden")


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_for_some_capabilities_claims_only_what_needs_no_others(house: House, facade: str) -> None:
    w1 = await house.key("worker", "w1", capabilities=["gpu"])
    await house.good("create_tasks", {"tasks": [
        {"type": "both", "payload": None, "requirements": {"capabilities": ["gpu", "root"]}},
        {"type": "root", "payload": None, "requirements": {"capabilities": ["root"]}},
        {"type": "gpu", "payload": None, "requirements": {"capabilities": ["gpu"]}}, {"type": "plain",
                                                                                      "payload": None}]})

    fields = {"capabilities": ["gpu", "root"], "max_tasks": 10}
    offers = (await house.good("lease_next", fields, token=w1, facade=facade))["tasks"]

    assert sorted(offer["type"] for offer in offers) == ["gpu", "plain"]


async def test_a_key_for_no_capabilities_claims_what_needs_none(house: House) -> None:
    w1 = await house.key("worker", "w1", capabilities=[])
    await house.good("create_tasks", {"tasks": [
        {"type": "gpu", "payload": None, "requirements": {"capabilities": ["gpu"]}}, {"type": "plain",
                                                                                      "payload": None}]})

    offers = (await house.good("lease_next", {"capabilities": ["gpu"], "max_tasks": 10}, token=w1))["tasks"]

    assert [offer["type"] for offer in offers] == ["plain"]


async def test_the_tenant_of_a_path_is_held_to_its_form(house: House) -> None:
    before = await house.good("list_tenants")

    for operation in ("suspend_tenant", "set_limits"):
        for bad in ("a\nb", "a\x1b[31m", "\u202ea", "a" * 2001):
            assert (await house.ask(operation, {"tenant": bad})).code == "invalid_request", bad
        assert (await house.ask(operation, {"tenant": "none"})).code == "tenant_not_found"

    assert await house.good("list_tenants") == before
