"""Permissions: roles, scopes, ownership, and calls on behalf of others (spec 21.5.2)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from asyncgate import SCOPES, Caller
from asyncgate.conformance import harness
from asyncgate.parts.model import errors, wire
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio

# The roles and scopes of each operation, from spec 21.5.2 if it has a row; one of the scopes is enough.
MATRIX: dict[str, tuple[str, str]] = {
    "create_task": ("agent admin", "tasks:write"), "create_tasks": ("agent admin", "tasks:write"),
    "run_task": ("agent admin", "tasks:write"), "cancel_task": ("agent admin", "tasks:write"),
    "release_hold": ("agent admin", "tasks:write"), "rerun_task": ("agent admin", "tasks:write"),
    "list_tasks": ("agent admin", "tasks:read"),
    "get_task": ("agent worker admin", "tasks:read tasks:lease"),
    "get_task_history": ("agent worker admin", "tasks:read tasks:lease"),
    "attach_artifacts": ("agent worker admin", "tasks:write tasks:lease"),
    "request_input": ("worker admin", "tasks:lease"),
    "answer_input": ("agent worker admin", "tasks:write tasks:lease"),
    "list_inputs": ("agent worker admin", "tasks:read tasks:lease"),
    "lease_next": ("worker admin", "tasks:lease"), "renew_lease": ("worker admin", "tasks:lease"),
    "release_lease": ("worker admin", "tasks:lease"), "list_leases": ("worker admin", "tasks:lease"),
    "start_task": ("worker admin", "tasks:lease"), "report_progress": ("worker admin", "tasks:lease"),
    "complete": ("worker admin", "tasks:lease"), "complete_tasks": ("worker admin", "tasks:lease"),
    "fail": ("worker admin", "tasks:lease"), "report_schedule": ("worker admin", "tasks:lease"),
    "list_receipts": ("agent worker admin", "receipts:read"), "get_receipt": ("agent worker admin", "receipts:read"),
    "ack_receipt": ("agent worker admin", "receipts:ack"),
    "emit_receipt": ("agent worker admin", "receipts:ack tasks:lease"),
    "check_terminator": ("agent worker admin", "receipts:read"),
    "list_open_obligations": ("agent worker admin", "receipts:read"),
    "bootstrap": ("agent worker admin", "receipts:read"),
    "create_tenant": ("admin", "admin:write"), "list_tenants": ("admin", "admin:read"),
    "suspend_tenant": ("admin", "admin:write"), "get_limits": ("admin", "admin:read"),
    "set_limits": ("admin", "admin:write"), "issue_key": ("admin", "admin:write"), "list_keys": ("admin", "admin:read"),
    "rotate_key": ("admin", "admin:write"), "revoke_key": ("admin", "admin:write"),
    "list_audit": ("admin", "admin:read"), "get_usage": ("admin", "admin:read"),
    "set_budget": ("admin", "admin:write"), "get_budgets": ("admin", "admin:read"),
    "rotate_credentials": ("admin", "admin:write"),
    "seal_receipts": ("admin", "admin:write"), "list_seals": ("admin", "admin:read"),
    "export_receipts": ("admin", "admin:read"), "import_receipts": ("admin", "admin:write"),
    "drain_gate": ("admin", "admin:write"), "resume_gate": ("admin", "admin:write"),
    "examine_gate": ("admin", "admin:read"),
    "run_archive": ("admin", "admin:write"), "restore_archive": ("admin", "admin:write"),
    "list_schedules": ("agent admin", "tasks:read"), "list_obligations": ("admin", "admin:read"),
    "list_workers": ("admin", "admin:read"), "explain_task": ("agent admin", "tasks:read"),
    "list_types": ("agent admin", "tasks:read"), "declare_type": ("worker admin", "tasks:lease"),
    "remove_type": ("worker admin", "tasks:lease"), "set_type_policy": ("admin", "admin:write"),
    "list_queues": ("admin", "admin:read"), "get_queue": ("admin", "admin:read"),
    "get_traffic": ("admin", "admin:read"),
    "list_archived_receipts": ("agent worker admin", "receipts:read"),
    "pause_work": ("admin", "admin:write"), "drain_work": ("admin", "admin:write"),
    "resume_work": ("admin", "admin:write"), "list_pauses": ("admin", "admin:read"),
    "preview_bulk": ("admin", "admin:read"), "run_bulk": ("admin", "admin:write"),
    "get_bulk": ("admin", "admin:read"),
    "register_client": ("admin", "admin:write"), "list_clients": ("admin", "admin:read"),
    "change_client": ("admin", "admin:write"), "remove_client": ("admin", "admin:write"),
    "list_users": ("admin", "admin:read"), "invite_user": ("admin", "admin:write"),
    "change_user": ("admin", "admin:write"), "remove_user": ("admin", "admin:write"),
    "make_sign_in_link": ("admin", "admin:write"),
    "erase_principal": ("admin", "admin:write"), "erase_tenant": ("admin", "admin:write"),
    "list_erasures": ("admin", "admin:read"),
    "create_webhook": ("admin", "admin:write"), "list_webhooks": ("admin", "admin:read"),
    "change_webhook": ("admin", "admin:write"), "remove_webhook": ("admin", "admin:write"),
    "rotate_webhook_secret": ("admin", "admin:write"), "test_webhook": ("admin", "admin:write"),
    "list_deliveries": ("admin", "admin:read"), "replay_deliveries": ("admin", "admin:write"),
    "wait_tasks": ("agent worker admin", "tasks:read tasks:lease"),
    "append_output": ("worker admin", "tasks:lease"),
    "create_task_webhook": ("agent worker admin", "tasks:write tasks:lease"),
    "list_task_webhooks": ("agent worker admin", "tasks:read tasks:lease"),
    "remove_task_webhook": ("agent worker admin", "tasks:write tasks:lease"),
    "read_output": ("agent worker admin", "tasks:read tasks:lease"),
    "record_step": ("worker admin", "tasks:lease"), "list_steps": ("agent worker admin", "tasks:read tasks:lease"),
    "export_tenant": ("admin", "admin:read"), "export_principal": ("agent worker admin", "admin:read"),
}
OTHER = "00000000-0000-4000-8000-000000000000"
MORE: dict[str, dict[str, Any]] = {
    "run_task": {"wait_seconds": 0}, "issue_key": {"scopes": frozenset()}, "invite_user": {"scopes": frozenset()},
    "make_sign_in_link": {"scopes": frozenset()},
    "erase_principal": {"plan": True}, "erase_tenant": {"plan": True},
    "export_tenant": {"tenant": None}, "export_principal": {"tenant": None},
    "list_archived_receipts": {"task_id": "none"}, "revoke_token": {"token_id": "none"},
    "pause_work": {"worker": "none"}, "drain_work": {"worker": "none"}, "resume_work": {"worker": "none"}}
# Callers with the role and one of the scopes may call it.
GUARDED = {name: op for name, op in OPERATIONS.items() if op.scope}
# spec 21.5.2: what the role `system` may and may not call.
SYSTEM = {"create_task": True, "get_task": True, "list_tasks": True, "cancel_task": True, "list_receipts": True,
          "lease_next": False, "renew_lease": False, "complete": False, "fail": False}


@pytest.fixture
def operator(gate: harness.Gate) -> harness.Gate:
    """Return the gate of the default tenant, whose admins manage all tenants."""
    return gate.beside(default_tenant_id=gate.tenant_id)


def filled(operation: str) -> dict[str, Any]:
    """Fill in the fields of an operation."""
    tenant = {"tenant": OTHER} if "tenant" in OPERATIONS[operation].takes.__struct_fields__ else {}
    return {**harness.least(operation), **tenant, **MORE.get(operation, {})}


async def admitted(view: harness.View, operation: str, **more: Any) -> bool:
    """Whether a caller passes the checks of role and scope; later refusals do not count."""
    try:
        await getattr(view, operation)(**filled(operation) | more)
    except errors.GateError as refusal:
        return refusal.code not in ("forbidden", "tenant_not_found")
    return True


def test_the_table_says_what_the_matrix_says() -> None:
    declared = {name: ({*OPERATIONS[name].roles} - {"system"}, {*OPERATIONS[name].scope.split()})
                for name in harness.are_here(MATRIX)}

    assert declared == {name: ({*MATRIX[name][0].split()}, {*MATRIX[name][1].split()}) for name in declared}


OWN_SESSIONS = harness.are_here([
    "list_sessions", "end_session", "sign_out_everywhere", "list_consents", "withdraw_consent"])


def test_no_operation_but_these_is_for_everybody() -> None:
    assert OPERATIONS.keys() - GUARDED.keys() == {"get_config", "health", "ready", "whoami", *OWN_SESSIONS}


@pytest.mark.one_store
@pytest.mark.parametrize("role", ["agent", "worker", "admin"])
async def test_an_operation_is_for_its_roles(operator: harness.Gate, role: str) -> None:
    view = operator.as_caller("agent" if role == "agent" else "worker", "x", role)

    assert [name for name in GUARDED if await admitted(view, name)] == [
        name for name, op in GUARDED.items() if role in op.roles]


@pytest.mark.one_store
async def test_the_role_system_may_what_spec_21_5_2_says(gate: harness.Gate) -> None:
    view = gate.as_caller("service", "x", "system")

    assert {name: await admitted(view, name) for name in SYSTEM} == SYSTEM


@pytest.mark.one_store
async def test_an_operation_needs_one_of_its_scopes(operator: harness.Gate) -> None:
    def with_scopes(scopes: frozenset[str] | set[str]) -> harness.View:
        return operator.as_caller("human", "x", "admin", scopes=frozenset(scopes))

    for name, op in GUARDED.items():
        needed = {*op.scope.split()}
        for scope in needed:
            assert await admitted(with_scopes({scope}), name), (name, scope)
        assert not await admitted(with_scopes(SCOPES - needed - {"admin:read", "admin:write"}), name), name
        assert not await admitted(with_scopes(set()), name), name


@pytest.mark.one_store
async def test_who_may_only_read_as_an_admin_changes_nothing(operator: harness.Gate) -> None:
    reader = operator.as_caller("human", "x", "admin", scopes=SCOPES - {"admin:write"})

    async with operator.unchanged():
        for name in [name for name, op in GUARDED.items() if op.scope == "admin:write"]:
            assert not await admitted(reader, name), name


async def test_a_credential_learns_who_it_stands_for_and_what_it_may_do(gate: harness.Gate) -> None:
    """21.5.2: callers can read their own roles and scopes."""
    w1 = await gate.as_worker("w1", "here").whoami()
    limited = await gate.as_caller("human", "eve", "admin", scopes=frozenset({"tasks:read"})).whoami()
    anybody = await gate.whoami()

    assert (w1.bound, w1.role, w1.principal_kind, w1.principal_id, w1.principal_instance_id, w1.tenant_id) == (
        True, "worker", "worker", "w1", "here", gate.tenant_id)
    assert {"lease_next", "complete", "whoami", "health"} <= set(w1.operations)
    assert not {"create_task", "issue_key"} & set(w1.operations)
    assert ("list_tasks" in limited.operations, "create_task" in limited.operations) == (True, False)
    assert (anybody.bound, anybody.principal_kind, anybody.principal_id) == (False, None, None)
    for told in (w1, limited, anybody):
        assert {"get_config", "health", "whoami"} <= set(told.operations)


async def test_health_needs_no_role_and_config_no_scope(gate: harness.Gate) -> None:
    nobody = gate.as_caller("system", "nobody", "agent", scopes=frozenset())

    assert (await nobody.health()).status == "healthy"
    assert (await nobody.get_config()).receipt_mode == "standalone"


@pytest.mark.one_store
async def test_a_refusal_names_the_role_that_is_needed(gate: harness.Gate) -> None:
    for name in [name for name, op in GUARDED.items() if "agent" not in op.roles]:
        needed = " or ".join(role for role in GUARDED[name].roles if role != "system")

        with harness.refused("forbidden", your_role="agent", required_role=needed):
            await getattr(gate.as_agent(), name)(**filled(name))


OPERATORS = harness.are_here(["create_tenant", "list_tenants", "suspend_tenant", "set_limits", "erase_tenant"])
NAMING = harness.are_here([
    "get_limits", "issue_key", "list_keys", "rotate_key", "rotate_credentials", "revoke_key", "list_audit", "get_usage",
    "set_budget", "get_budgets", "pause_work", "drain_work", "resume_work", "list_pauses", "register_client",
    "list_clients", "list_users", "invite_user", "make_sign_in_link", "revoke_token", "create_webhook", "list_webhooks",
    "change_webhook", "remove_webhook", "rotate_webhook_secret", "test_webhook", "list_deliveries", "replay_deliveries",
    "export_tenant", "export_principal", "erase_principal", "list_erasures", "set_limit", "get_limit", "list_limits",
    "remove_limit"])


def test_each_operation_on_tenants_is_the_operators_or_names_one() -> None:
    naming = {name for name, op in OPERATIONS.items() if "tenant" in op.takes.__struct_fields__}

    assert naming | {"list_tenants"} == {*OPERATORS, *NAMING}


@pytest.mark.one_store
async def test_only_an_admin_of_the_default_tenant_looks_after_tenants(gate: harness.Gate) -> None:
    async with gate.unchanged():
        for name in OPERATORS:
            for tenant_id in (gate.tenant_id, OTHER):
                with harness.refused("forbidden", your_role="admin"):
                    named = {"tenant": tenant_id} if name != "list_tenants" else {}
                    await getattr(gate.as_admin(), name)(**filled(name) | named)


@pytest.mark.one_store
async def test_for_every_other_admin_there_is_only_the_own_tenant(gate: harness.Gate) -> None:
    async with gate.unchanged():
        for name in NAMING:
            with harness.refused("tenant_not_found"):
                await getattr(gate.as_admin(), name)(**filled(name) | {"tenant": OTHER})
    assert [name for name in NAMING if not await admitted(gate.as_admin(), name, tenant=gate.tenant_id)] == []


@pytest.mark.one_store
@pytest.mark.parametrize("operation", [
    "get_task", "explain_task", "get_task_history", "cancel_task", "release_hold", "attach_artifacts"])
async def test_an_agent_touches_its_own_tasks_only(gate: harness.Gate, operation: str) -> None:
    task_id = await gate.create(by="ada")

    async with gate.unchanged():
        with harness.refused("forbidden"):
            more = {"artifacts": [{"uri": "x"}]} if operation == "attach_artifacts" else {}
            await getattr(gate.as_agent("bob"), operation)(task_id=task_id, **more)


async def test_an_owner_is_kind_and_id(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")

    with harness.refused("forbidden"):
        await gate.as_caller("human", "ada", "agent").get_task(task_id=task_id)


async def test_a_worker_reads_the_task_that_it_holds_or_held(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    with harness.refused("forbidden"):
        await gate.as_worker("w2").get_task(task_id=offer.task_id)
    assert (await gate.as_worker("w1").get_task(task_id=offer.task_id)).status == "leased"

    await gate.as_worker("w1").complete(**harness.under(offer))

    assert (await gate.as_worker("w1").get_task(task_id=offer.task_id)).status == "succeeded"
    assert (await gate.as_worker("w1").get_task_history(task_id=offer.task_id)).events


async def test_an_agent_lists_its_own_tasks_and_an_admin_all(gate: harness.Gate) -> None:
    mine, theirs = await gate.create(by="ada"), await gate.create(by="bob")

    async def listed(view: harness.View, **ask: Any) -> list[str]:
        return [task.task_id for task in (await view.list_tasks(**ask)).tasks]

    assert await listed(gate.as_agent("ada")) == [mine]
    assert await listed(gate.as_admin()) == [theirs, mine]
    assert await listed(gate.as_admin(), created_by="bob") == [theirs]
    with harness.refused("forbidden"):
        await listed(gate.as_agent("ada"), created_by="bob")


@pytest.mark.one_store
@pytest.mark.parametrize("operation", ["list_receipts", "list_open_obligations", "bootstrap"])
async def test_only_an_admin_asks_about_another_principal(gate: harness.Gate, operation: str) -> None:
    with harness.refused("forbidden"):
        await getattr(gate.as_agent("ada"), operation)(principal_kind="agent", principal_id="bob")

    assert await getattr(gate.as_admin(), operation)(principal_kind="agent", principal_id="bob")


async def test_receipts_are_for_their_two_parties_and_admins(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    accepted = await gate.receipt(offer.task_id, "task.accepted")

    assert await gate.as_worker("w1").get_receipt(receipt_id=accepted.receipt_id) == accepted
    for view in (gate.as_worker("w2"), gate.as_agent("bob")):
        with harness.refused("forbidden"):
            await view.get_receipt(receipt_id=accepted.receipt_id)


async def test_an_agent_reads_all_receipts_of_its_own_task(gate: harness.Gate) -> None:
    offer = await gate.finished()

    assert len((await gate.as_agent("ada").list_receipts(task_id=offer.task_id)).receipts) == 4
    with harness.refused("forbidden"):
        await gate.as_agent("bob").list_receipts(task_id=offer.task_id)


@pytest.mark.one_store
@pytest.mark.parametrize("claim", [
    {"principal_id": "bob"}, {"agent_id": "bob"}, {"principal_kind": "human", "principal_id": "ada"},
    {"created_by": {"id": "bob"}}, {"created_by": {"principal_kind": "agent", "principal_id": "bob"}}], ids=range(5))
async def test_a_bound_credential_creates_in_its_own_name_only(gate: harness.Gate, claim: dict[str, Any]) -> None:
    async with gate.unchanged():
        with harness.refused("forbidden"):
            await gate.as_agent("ada").create_task(type="demo", payload=None, **claim)


async def test_a_bound_worker_claims_in_its_own_name_only(gate: harness.Gate) -> None:
    await gate.create()

    async with gate.unchanged():
        with harness.refused("forbidden"):
            await gate.as_worker("w1").lease_next(worker_id="w2")

    assert (await gate.as_worker("w1").lease_next(worker_id="w1")).tasks


async def test_a_bound_worker_acts_in_its_own_name_only(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    for verb in ("renew_lease", "start_task", "report_progress", "complete", "fail", "release_lease"):
        async with gate.unchanged():
            with harness.refused("forbidden"):
                await getattr(gate.as_worker("w2"), verb)(**harness.NEEDED.get(verb, {}),
                                                          **harness.under(offer, worker_id="w1"))


async def test_an_admin_may_act_for_another(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    assert (await gate.as_admin().complete(**harness.under(offer, worker_id="w1", artifacts=[{"uri": "x"}]))).ok
    assert str((await gate.receipt(offer.task_id, "task.completed")).sender) == "worker w1"


def scoped(gate: harness.Gate, *scopes: str) -> harness.View:
    """Return the gate for an admin with only these scopes."""
    return gate.as_caller("human", "root", "admin", scopes=frozenset(scopes))


READING = {"get_task": "task_id", "explain_task": "task_id", "get_task_history": "task_id", "list_receipts": "task_id",
           "get_receipt": "receipt_id"}


@pytest.mark.one_store
@pytest.mark.parametrize(("scopes", "reads"), [
    (["tasks:read", "tasks:lease", "receipts:read"], False), (["admin:read"], True), (["admin:write"], True),
    (["tasks:read", "receipts:read", "admin:read"], True)])
async def test_an_admin_reads_what_belongs_to_others_by_an_admin_scope_only(
        gate: harness.Gate, scopes: list[str], reads: bool) -> None:
    """By spec 21.5.2 an admin may read any task; by 21.8.3 tasks:read covers own tasks, admin:read all: both apply.

    So a key limited to tasks:read cannot read the whole tenant, even if its role is admin.
    """
    root, offer = scoped(gate, *scopes), await gate.leased("w1")
    named = {"task_id": offer.task_id, "receipt_id": offer.obligation_receipt_id}

    for operation, field in READING.items():
        with nullcontext() if reads else harness.refused("forbidden"):
            await getattr(root, operation)(**{field: named[field]})
    for operation, whose in (("list_open_obligations", {"principal_id": "ada"}), ("list_tasks", {"created_by": "ada"}),
                             ("list_leases", {"worker_id": "w1"}),
                             ("list_receipts", {"to_id": "ada"})):
        with nullcontext() if reads else harness.refused("forbidden"):
            await getattr(root, operation)(**whose)
    assert [task.task_id for task in (await root.list_tasks()).tasks] == [offer.task_id] * reads


@pytest.mark.one_store
@pytest.mark.parametrize("scopes", [["tasks:write", "tasks:lease", "receipts:ack"],
                                    ["tasks:write", "tasks:lease", "receipts:ack", "admin:read"]])
async def test_an_admin_changes_what_belongs_to_others_by_admin_write_only(gate: harness.Gate,
                                                                           scopes: list[str]) -> None:
    """Spec 21.8.3: admin:write modifies all tenant data; without it an admin has the rights of agents and workers."""
    root, offer = scoped(gate, *scopes), await gate.leased("w1")
    mine = (await root.create_task(type="demo", payload=None)).task_id

    async with gate.unchanged():
        for operation, ask in (("cancel_task", {"task_id": offer.task_id}),
                               ("release_hold", {"task_id": offer.task_id}),
                               ("ack_receipt", {"receipt_id": offer.obligation_receipt_id}),
                               ("complete", harness.under(offer, worker_id="w1")), ("lease_next", {"worker_id": "w1"}),
                               ("create_task", {"type": "demo", "payload": None, "created_by": {"id": "ada"}})):
            with harness.refused("forbidden"):
                await getattr(root, operation)(**ask)
    assert (await root.cancel_task(task_id=mine)).ok
    assert (await scoped(gate, "admin:write").cancel_task(task_id=offer.task_id)).ok


@pytest.mark.one_store
@pytest.mark.parametrize("kind", ["system", "asyncgate"])
async def test_nobody_acts_as_the_system_or_the_gate_from_outside(gate: harness.Gate, kind: str) -> None:
    await gate.create()

    async with gate.unchanged():
        for view in (gate, gate.as_admin(), gate.as_agent(), gate.as_worker()):
            creator = {"principal_kind": kind, "principal_id": "asyncgate-1"}
            for operation, ask in (("create_task", {"type": "x", "payload": None, **creator}),
                                   ("lease_next", {"worker_kind": kind, "worker_id": "asyncgate-1"})):
                with harness.refused("forbidden"):
                    await getattr(view, operation)(**ask)


async def test_an_unbound_credential_stands_for_its_fallback_until_the_request_says_who_it_is(
    gate: harness.Gate) -> None:
    shared = harness.View(gate.engine,
                          Caller(gate.tenant_id, wire.Principal("system", "asyncgate"), "admin", SCOPES, bound=False))

    made = await shared.create_task(type="demo", payload=None)

    assert str((await gate.task(made.task_id)).created_by) == "system asyncgate"
