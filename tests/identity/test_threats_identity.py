"""The threats to identity, tenancy and leases by their numbers: A1-A12, B1-B12, C1-C7.

PROVEN says which tests prove a number; what none of them does is tested here.  And for the central guards: without the
guard the check of it fails, so the check is one.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import asyncgate
from asyncgate import Caller, Engine
from asyncgate.parts.identity import admin as identity_admin
from asyncgate.parts.identity import audit as identity_audit
from asyncgate.parts.identity import keys_stored
from asyncgate.parts.identity.audit import Auditor, find_break
from asyncgate.parts.identity.guard import Accounts, Guard
from asyncgate.parts.identity.keys import Proven
from asyncgate.parts.identity.keys_stored import checksum, generate, parse
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.naming import read_principal
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored import Audit, AuditHead
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.kit import Rate
from tests.support.each import each
from tests.support.identity_tools import FACADES, HOME, JSON, OTHER, THIRD, House, security, tiers

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
HERE = "tests/identity/test_threats_identity.py"
PROVEN: dict[str, list[str]] = {
    "A1": ["tests/identity/test_jwt.py::test_a_token_that_is_taken_back_is_refused_at_once_also_when_remembered",
           "tests/identity/test_admin.py::test_a_gate_that_hears_nothing_bars_a_suspended_tenant_after_five_seconds"],
    "A2": ["tests/identity/test_jwt.py::test_a_remembered_token_expires_to_the_second",
           "tests/identity/test_jwt.py::test_the_leeway_is_a_setting"],
    "A3": ["tests/identity/test_jwt.py::test_a_token_with_a_flaw_stands_for_nobody",
           "tests/identity/test_jwt.py::test_over_both_facades_a_flaw_is_a_401_that_says_invalid_token"],
    "A4": ["tests/identity/test_jwt.py::test_over_both_facades_a_flaw_is_a_401_that_says_invalid_token",
           "tests/identity/test_jwt.py::test_the_id_token_of_an_independent_provider_is_no_access_token"],
    "A5": ["tests/identity/test_jwt.py::test_over_both_facades_a_flaw_is_a_401_that_says_invalid_token"],
    "A6": ["tests/identity/test_jwt.py::test_a_token_comes_once_and_in_a_header",
           "tests/identity/test_jwt.py::test_a_token_in_the_query_is_no_credential",
           f"{HERE}::test_a6_a_token_of_100_kb_or_in_the_query_lets_nobody_in_and_is_not_logged"],
    "A7": ["tests/identity/test_keys.py::test_a_key_with_one_wrong_character_is_no_key",
           f"{HERE}::test_a7_every_wrong_key_gets_one_answer"],
    "A8": ["tests/identity/test_keys.py::test_both_keys_of_a_rotation_are_good_until_the_second_when_the_old_one_ends",
           "tests/identity/test_admin.py::test_both_keys_are_good_during_the_overlap_and_the_new_one_after_it"],
    "A9": ["tests/identity/test_admin.py::test_a_hot_key_is_refused_at_once_when_it_is_revoked_here",
           "tests/identity/test_keys.py::test_a_revoked_key_is_refused_at_once_here_and_within_five_seconds_elsewhere",
           "tests/identity/test_admin.py::test_news_of_a_revocation_reach_the_other_gate"],
    "A10": ["tests/identity/test_keys.py::test_of_200_wrong_keys_at_once_two_are_hashed_at_a_time_and_most_not_at_all",
            "tests/identity/test_keys.py::test_a_gate_that_is_asked_for_too_much_argon2_still_tells_its_health",
            "tests/identity/test_keys.py::test_a_flood_of_made_up_keys_does_not_fill_the_memory"],
    "A11": ["tests/identity/test_keys.py::test_a_wrong_secret_and_a_barred_key_cost_and_count_the_same",
            f"{HERE}::test_a7_every_wrong_key_gets_one_answer"],
    "A12": ["tests/identity/test_keys.py::test_no_secret_and_no_hash_is_ever_told",
            "tests/identity/test_audit.py::test_no_secret_is_ever_written_down",
            "tests/identity/test_admin.py::test_keys_are_issued_listed_rotated_and_revoked"],
    "B1": ["tests/faces/test_rest.py::test_another_tenant_is_refused_wherever_it_is_named",
           "tests/faces/test_rest.py::test_the_own_tenant_is_tolerated_wherever_it_is_named",
           f"{HERE}::test_b1_a_tenant_in_arguments_or_bootstrap_is_refused_and_in_a_payload_means_nothing"],
    "B2": ["conformance/test_tenants.py::test_a_foreign_id_is_answered_like_an_unknown_one",
           "tests/backends/test_postgres_walls.py::test_what_only_the_neighbour_has_is_answered_like_what_nobody_has",
           "tests/identity/test_admin.py::test_a_neighbours_key_is_answered_like_one_that_there_is_not",
           f"{HERE}::test_b2_what_a_neighbour_has_is_answered_like_what_nobody_has"],
    "B3": ["tests/identity/test_permissions_matrix.py::test_an_agent_cannot_create_in_the_name_of_another",
           "tests/identity/test_permissions_matrix.py::test_a_worker_cannot_work_in_the_name_of_another",
           "tests/identity/test_permissions_matrix.py::test_an_inbox_of_another_is_not_shown",
           "tests/identity/test_permissions_matrix.py::test_the_lease_of_another_worker_is_of_no_use",
           "tests/identity/test_audit.py::test_a_lease_of_another_worker_is_written_down"],
    "B4": ["tests/identity/test_permissions_matrix.py::test_every_cell_of_the_matrix",
           "tests/identity/test_permissions_matrix.py::test_admin_read_reads_all_and_writes_nothing"],
    "B7": ["tests/identity/test_admin.py::test_a_key_that_makes_no_sense_is_not_issued",
           "tests/identity/test_permissions_matrix.py::test_a_key_that_stands_for_the_system_opens_nothing_even_if_it_is_stored",
           "tests/faces/test_bad_input.py::test_nobody_acts_as_the_system_or_the_gate_from_outside"],
    "B8": ["tests/faces/test_bad_input.py::test_what_only_the_gate_may_say_is_ignored",
           "tests/faces/test_bad_input.py::test_parents_of_an_offered_receipt_are_checked",
           f"{HERE}::test_b8_parents_of_a_neighbour_are_no_parents"],
    "B9": ["conformance/test_create.py::test_equal_keys_of_two_creators_are_two_tasks",
           "conformance/test_create.py::test_the_same_key_with_another_body_says_so_and_writes_nothing",
           "conformance/test_tenants.py::test_equal_keys_in_two_tenants_are_two_tasks"],
    "B10": ["conformance/test_tenants.py::test_equal_ids_in_two_tenants_are_two_of_everything",
            "conformance/test_tenants.py::test_a_schedule_id_belongs_to_one_tenant",
            f"{HERE}::test_b9_b10_equal_keys_of_two_tenants_tell_nobody_of_each_other"],
    "B11": ["tests/identity/test_audit.py::test_only_an_admin_reads_the_log_and_only_its_own",
            "tests/identity/test_audit.py::test_sqlite_refuses_to_change_or_delete_a_line",
            "tests/identity/test_audit.py::test_postgres_grants_the_gate_no_way_to_change_or_delete_a_line"],
    "B12": ["tests/identity/test_admin.py::test_another_tenant_is_not_there_for_its_neighbours_admin",
            "tests/identity/test_admin.py::test_a_neighbours_key_is_answered_like_one_that_there_is_not",
            "tests/identity/test_admin.py::test_only_the_operator_looks_after_tenants"],
    "C1": ["conformance/test_leases.py::test_a_lease_id_that_nobody_has_is_unknown",
           "conformance/test_leases.py::test_a_superseded_lease_can_do_nothing",
           "conformance/test_tenants.py::test_a_foreign_lease_is_not_renewed_by_its_id_alone"],
    "C2": ["conformance/test_leases.py::test_a_lease_that_has_run_out_can_do_nothing_before_the_sweep",
           "conformance/test_leases.py::test_a_lease_that_has_run_out_can_do_nothing_after_the_sweep"],
    "C3": ["conformance/test_leases.py::test_a_renewal_is_clamped",
           "conformance/test_leases.py::test_a_renewal_by_nonsense_is_refused"],
    "C4": ["conformance/test_claim.py::test_a_claim_that_asks_for_nonsense_is_refused",
           "conformance/test_claim.py::test_a_claim_of_too_many_is_clamped"],
    "C5": ["tests/faces/test_bad_input.py::test_a_list_of_names_is_held_to_its_limits",
           f"{HERE}::test_c5_a_million_capabilities_are_refused"],
    "C6": ["conformance/test_quotas.py::test_claims_at_once_never_pass_the_limit"],
    "C7": ["tests/identity/test_keys.py::test_a_clock_that_leaps_lets_no_revoked_key_in_for_longer",
           "tests/backends/test_postgres_batches.py::test_the_time_of_a_batch_is_later_than_its_last_lock_also_when_it_looks_twice"],
}
LATER = {"B5": "refresh tokens come with OAuth", "B6": "clients come with OAuth"}


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_number_has_its_tests() -> None:
    numbers = [f"{letter}{n}" for letter, last in (("A", 12), ("B", 12), ("C", 7)) for n in range(1, last + 1)]

    assert sorted(PROVEN.keys() | LATER.keys()) == sorted(numbers)
    assert not PROVEN.keys() & LATER.keys()


@each("id", sorted({id for ids in PROVEN.values() for id in ids}))
def test_a_named_test_exists(id: str) -> None:
    path, _, name = id.partition("::")

    assert name in names_in(path)


# What no other test proves.


@pytest.mark.parametrize("facade", FACADES)
async def test_a6_a_token_of_100_kb_or_in_the_query_lets_nobody_in_and_is_not_logged(
        house: House, facade: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = await house.key("agent", "ada")

    for token in (key + "x" * 100_000, "Bearer" * 20_000, key.lower(), f"{key} {key}", "\u00e9" * 65):
        assert (await house.ask("list_tasks", token=token, facade=facade)).code == "unauthenticated"
    method, path = ("POST", "/mcp") if facade != "rest" else ("GET", "/v1/tasks")
    for name in ("token", "api_key", "access_token", "key", "auth_token"):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"} if method == "POST" else None
        answer = await house.served.call(method, f"{path}?{name}={key}", body, headers=[JSON], token=None)
        assert answer.status == 401

    assert key not in caplog.text
    assert key[16:59] not in str(await house.audit())


def wrong_keys(key: str) -> dict[str, str]:
    """Return what is nearly a key."""
    def signed(text: str) -> str:
        return text + checksum(text)
    start, secret, other = key[:16], key[16:59], generate()
    return {
        "wrong checksum": key[:-1] + ("0" if key[-1] != "0" else "1"), "wrong secret": signed(start + other[16:59]),
        "the secret of one, the id of another": signed(other[:16] + secret), "in lower case": key.lower(),
        "a blank inside": f"{key[:30]} {key[30:]}", "a no-break space behind": f"{key}\u00a0",
        "another line's end behind": f"{key}\u0085", "fewer": key[:-1], "more": key + "0",
        "another prefix": "agb_" + key[4:], "no prefix": key[4:], "unicode digits": key[:20] + "\u00b9" + key[21:]}


@pytest.mark.parametrize("name", wrong_keys(generate()))
@pytest.mark.parametrize("facade", FACADES)
async def test_a7_a_key_that_is_nearly_right_is_wrong(house: House, facade: str, name: str) -> None:
    key = await house.key("agent", "ada")
    assert not (await house.ask("list_tasks", token=key, facade=facade)).code

    told = await house.ask("list_tasks", token=wrong_keys(key)[name], facade=facade)

    assert (told.status, told.code) == (401, "unauthenticated")
    assert not (await house.ask("list_tasks", token=key, facade=facade)).code


@pytest.mark.parametrize("facade", FACADES)
async def test_a7_every_wrong_key_gets_one_answer(house: House, facade: str) -> None:
    expired = await house.key("agent", "ada", expires_at="2099-01-01T00:00:00Z")
    early = await house.key("agent", "ada", not_before="2098-01-01T00:00:00Z")
    revoked, kept = await house.key("agent", "ada"), await house.key("agent", "ada")
    await house.good("revoke_key", {"key_id": house.ids[revoked]})
    now = house.served.backend.now()
    wrong = wrong_keys(kept)
    near = [early, revoked, *(wrong[name] for name in (
        "wrong checksum", "wrong secret", "the secret of one, the id of another"))]

    told = [await house.ask("list_tasks", token=token, facade=facade) for token in near]
    house.guard.keys.clock = lambda: now + 100 * 365 * 86_400
    told.append(await house.ask("list_tasks", token=expired, facade=facade))

    assert {answer.status for answer in told} == {401}
    assert len({answer.content for answer in told}) == 1
    assert {answer.headers["www-authenticate"] for answer in told} == {'Bearer error="invalid_token"'}


@pytest.mark.parametrize("facade", FACADES)
async def test_b1_a_tenant_in_arguments_or_bootstrap_is_refused_and_in_a_payload_means_nothing(
        house: House, facade: str) -> None:
    root = await house.admin_of(OTHER)
    ask = {"token": root, "facade": facade}

    for name, fields in (("bootstrap", {}), ("list_open_obligations", {}), ("lease_next", {"worker_id": "w"})):
        assert (await house.ask(name, {**fields, "tenant_id": THIRD}, **ask)).code == "tenant_mismatch"
        assert not (await house.ask(name, {**fields, "tenant_id": OTHER}, **ask)).code
    made = await house.good("create_task", {"type": "demo", "payload": {"tenant_id": THIRD}}, **ask)

    assert (await house.good("get_task", {"task_id": made["task_id"]}, **ask))["tenant_id"] == OTHER


@pytest.mark.parametrize("facade", FACADES)
async def test_b2_what_a_neighbour_has_is_answered_like_what_nobody_has(house: House, facade: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=victim))["task_id"]
    [offer] = (await house.good("lease_next", {"worker_id": "w1"}, token=victim))["tasks"]
    receipt = (await house.good("list_receipts", token=victim))["receipts"][0]["receipt_id"]
    await house.good("create_task", {"type": "demo", "payload": None}, token=victim)
    cursor = (await house.good("list_tasks", {"limit": 1}, token=victim))["next_cursor"]
    whole: dict[str, Any] = {"task_id": task, "lease_id": offer["lease_id"], "receipt_id": receipt, "worker_id": "w1",
                             "parent_receipt_id": receipt, "key_id": house.ids[victim], "progress": 1,
                             "artifacts": [{"uri": "x"}]}
    asked = 0

    for op in OPERATIONS.values():
        names = [name for name in ("task_id", "lease_id", "receipt_id", "parent_receipt_id", "key_id")
                 if name in op.takes.__struct_fields__]
        if not names or op.name in ("emit_receipt", "list_receipts"):
            continue
        fields = {name: value for name, value in whole.items() if name in op.takes.__struct_fields__}
        made_up: dict[str, Any] = {**fields}
        made_up |= {name: "0" * len(fields[name]) for name in names}
        foreign, unknown = [await house.ask(op.name, arguments, token=root, facade=facade)
                            for arguments in (fields, made_up)]
        hidden = foreign.content
        for name in names:
            hidden = hidden.replace(fields[name].encode(), made_up[name].encode())
        assert (foreign.status, hidden) == (unknown.status, unknown.content), op.name
        asked += 1

    assert asked >= 15
    assert (await house.ask("list_tasks", {"limit": 1, "cursor": cursor}, token=root, facade=facade)
            ).code == "invalid_cursor"
    assert (await house.good("get_task", {"task_id": task}, token=victim))["status"] == "leased"


@pytest.mark.parametrize("facade", FACADES)
async def test_b8_parents_of_a_neighbour_are_no_parents(house: House, facade: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    await house.good("create_task", {"type": "schedule.create", "payload": None}, token=victim)
    receipt = (await house.good("list_receipts", token=victim))["receipts"][0]["receipt_id"]

    fields = {"receipt_type": "schedule.deleted", "schedule_id": "s", "parents": [receipt]}

    told = await house.ask("emit_receipt", fields, token=root, facade=facade)

    assert told.code == "parent_not_found"


@pytest.mark.parametrize("facade", FACADES)
async def test_b9_b10_equal_keys_of_two_tenants_tell_nobody_of_each_other(house: House, facade: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    await house.good("create_task", {"type": "first", "payload": None, "idempotency_key": "k"}, token=victim)

    told = await house.good("create_task", {"type": "second", "payload": None, "idempotency_key": "k"}, token=root,
                            facade=facade)

    assert not told.get("payload_differs")
    assert (await house.good("get_task", {"task_id": told["task_id"]}, token=root))["type"] == "second"


@pytest.mark.parametrize("facade", FACADES)
async def test_c5_a_million_capabilities_are_refused(house: House, facade: str) -> None:
    worker = await house.key("worker", "w1")

    for wrong in ([str(n) for n in range(1_000_000)], [1], [None], "gpu", {"gpu": True}):
        told = await house.ask("lease_next", {"capabilities": wrong}, token=worker, facade=facade)
        # So many values are not a request at all; a few wrong ones are a wrong field.
        assert told.code == ("payload_too_large" if len(wrong) > 10 else "invalid_request")


# The guards, and what is left without them.


Check = Callable[[House], Awaitable[bool]]


async def refuses(house: House, code: str, name: str, fields: dict[str, Any] | None = None, **more: Any) -> bool:
    """Whether the operation is refused so."""
    return bool((await house.ask(name, fields, **more)).code == code)


def no_longer(**changes: Any) -> Any:
    """Return a `Proven.take` that reads the row with these changes."""
    take = Proven.take

    def changed(self: Proven, tenant_id: str, suspended: bool, key: Any, read_at: float) -> None:
        take(self, tenant_id, suspended, replace(key, **changes), read_at)
    return changed


async def nothing(*_: Any, **__: Any) -> None:
    """Do not look."""


def ignore(*_: Any, **__: Any) -> None:
    """Do not look."""


async def any_home(engine: Engine, caller: Caller, named: str | None) -> str:
    """Believe whoever names a tenant."""
    return named or caller.tenant_id


async def the_checksum(house: House) -> bool:
    asked: list[str] = []
    find = house.guard.keys.store.find_key

    async def noted(key_id: str) -> Any:
        asked.append(key_id)
        return await find(key_id)

    house.guard.keys.store.find_key = noted
    await house.ask("list_tasks", token=wrong_keys(generate())["wrong checksum"])
    return not asked


async def the_secret(house: House) -> bool:
    key = await house.key()
    return await refuses(house, "unauthenticated", "list_tasks", token=wrong_keys(key)["wrong secret"])


async def the_expiry(house: House) -> bool:
    key, now = await house.key(expires_at="2099-01-01T00:00:00Z"), house.served.backend.now()
    house.guard.keys.clock = lambda: now + 100 * 365 * 86_400
    return await refuses(house, "unauthenticated", "list_tasks", token=key)


async def the_revocation(house: House) -> bool:
    key = await house.key()
    await house.good("list_tasks", token=key)
    await house.good("revoke_key", {"key_id": house.ids[key]})
    return await refuses(house, "unauthenticated", "list_tasks", token=key)


class Named:
    """A way in that knows nothing of suspension, as that of access tokens."""

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Let one token in."""
        known = Caller(OTHER, Principal("agent", "eve"), "agent", frozenset({"tasks:read"}))
        return known if token == "eve" else None


async def the_suspension(house: House) -> bool:
    house.served.gate.identity.ways.append(Named())
    await house.good("suspend_tenant", {"tenant": OTHER})
    return await refuses(house, "unauthenticated", "list_tasks", token="eve")


async def the_failures(house: House) -> bool:
    for _ in range(11):
        told = await house.ask("list_tasks", token=generate())
    return bool(told.status == 429)


async def the_role(house: House) -> bool:
    return await refuses(house, "forbidden", "create_task", {"type": "x", "payload": None},
                         token=await house.key("worker", "w1", scopes=["tasks:write"]))


async def the_scope(house: House) -> bool:
    return await refuses(house, "forbidden", "create_task", {"type": "x", "payload": None},
                         token=await house.key(scopes=["tasks:read"]))


async def the_tenant(house: House) -> bool:
    return await refuses(house, "tenant_mismatch", "create_task", {"type": "x", "payload": None, "tenant_id": THIRD},
                         token=await house.key())


async def the_speaker(house: House) -> bool:
    return await refuses(house, "forbidden", "create_task", {"type": "x", "payload": None, "agent_id": "bob"},
                         token=await house.key())


async def the_owner(house: House) -> bool:
    task = await house.good("create_task", {"type": "x", "payload": None, "agent_id": "bob"})
    return await refuses(house, "forbidden", "cancel_task", {"task_id": task["task_id"]}, token=await house.key())


async def the_holder(house: House) -> bool:
    await house.good("create_task", {"type": "x", "payload": None})
    [offer] = (await house.good("lease_next", {"worker_id": "w1"}))["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
    return await refuses(house, "lease_invalid_or_expired", "complete", held, token=await house.key("worker", "w2"))


async def the_operator(house: House) -> bool:
    return await refuses(house, "forbidden", "list_tenants", token=await house.admin_of(OTHER))


async def the_home(house: House) -> bool:
    root = await house.admin_of(OTHER)
    return await refuses(house, "tenant_not_found", "list_keys", {"tenant": THIRD}, token=root)


async def the_limits_of_a_key(house: House) -> bool:
    await house.good("create_tasks", {"tasks": [{"type": "write", "payload": None},
                                                {"type": "draw", "payload": None,
                                                 "requirements": {"capabilities": ["gpu"]}}]})
    worker = await house.key("worker", "w1", task_types=["draw"], capabilities=[])
    fields = {"capabilities": ["gpu"], "max_tasks": 9}
    return not (await house.good("lease_next", fields, token=worker))["tasks"]


async def the_issuer(house: House) -> bool:
    limited = await house.key("admin", "root", task_types=["draw"])
    return await refuses(house, "forbidden", "issue_key", {"name": "x", "principal_id": "x"}, token=limited)


async def the_limit_of_calls(house: House) -> bool:
    key = await house.key(tenant=OTHER)
    return 429 in [(await house.ask("list_tasks", token=key)).status for _ in range(6)]


async def the_limit_of_tasks(house: House) -> bool:
    batch = {"tasks": [{"type": "x", "payload": None}] * 5}
    return await refuses(house, "rate_limit_exceeded", "create_tasks", batch, token=await house.key(tenant=OTHER))


async def the_limit_of_strangers(house: House) -> bool:
    return 429 in [(await house.served.call("GET", "/v1/none", token=None)).status for _ in range(5)]


async def noted(house: House, event: str, tenant: str = HOME) -> bool:
    """Whether there is a line of an event."""
    return any(line["event"] == event for line in await house.audit(tenant))


async def the_audit_of_refusals(house: House) -> bool:
    await house.ask("create_task", {"type": "x", "payload": None}, token=await house.key("worker", "w1"))
    return await noted(house, "authorization_failure")


async def the_audit_of_items(house: House) -> bool:
    await house.ask("create_tasks", {"tasks": [{"type": "x", "payload": None, "tenant_id": THIRD}]},
                    token=await house.key())
    return await noted(house, "cross_tenant_attempt")


async def the_audit_of_strangers(house: House) -> bool:
    await house.ask("list_tasks", token="nobody's")
    return await noted(house, "auth_failure")


async def the_audit_of_foreign_ids(house: House) -> bool:
    task = await house.good("create_task", {"type": "x", "payload": None})
    await house.ask("get_task", {"task_id": task["task_id"]}, token=await house.admin_of(OTHER))
    return await noted(house, "cross_tenant_attempt", OTHER)


async def the_audit_of_administration(house: House) -> bool:
    await house.key()
    return await noted(house, "key_issued")


async def the_chain(house: House) -> bool:
    await house.key()
    await house.audit()
    first, *rest = await house.served.backend.page(HOME, Rows(Audit))
    return find_break([replace(first, event="nothing"), *rest], AuditHead(0, "")) is not None


async def the_redaction(house: House) -> bool:
    key = await house.key()
    await house.ask("list_tasks", token="nobody's", headers=[("user-agent", key)])
    return key not in str(await house.audit())


LINK = identity_audit.link_line
GUARDS: dict[str, tuple[Check, Any, str, Any]] = {
    "checksum": (the_checksum, keys_stored, "parse", lambda token: (token[4:16], token[16:59])),
    "secret": (the_secret, keys_stored, "proves_secret", lambda secret, hash: True),
    "expiry": (the_expiry, Proven, "take", no_longer(expires_at=None)),
    "revocation": (the_revocation, Proven, "take", no_longer(revoked_at=None)),
    "suspension": (the_suspension, Accounts, "require_active", nothing),
    "failures": (the_failures, Rate, "over", ignore),
    "role": (the_role, OPERATIONS["create_task"], "roles", ("agent", "worker", "admin")),
    "scope": (the_scope, OPERATIONS["create_task"], "scopes", frozenset()),
    "tenant": (the_tenant, Engine, "check_tenant", ignore),
    "speaker": (the_speaker, asyncgate, "speaker", lambda caller, ask: read_principal(ask) or caller.principal),
    "owner": (the_owner, Engine, "_require_own", lambda self, work, caller, ask: work.require_task(ask.task_id)),
    "holder": (the_holder, asyncgate, "lost", ignore),
    "operator": (the_operator, identity_admin, "require_operator", ignore),
    "home": (the_home, identity_admin, "target_tenant", any_home),
    "limits of a key": (the_limits_of_a_key, asyncgate, "keep_within", ignore),
    "issuer": (the_issuer, identity_admin, "tenant_to_issue_for", identity_admin.target_tenant),
    "limit of calls": (the_limit_of_calls, Guard, "_draw", nothing),
    "limit of tasks": (the_limit_of_tasks, Guard, "_find_limits", nothing),     # the engine holds the hook
    "limit of strangers": (the_limit_of_strangers, Guard, "passing", nothing),
    "audit of refusals": (the_audit_of_refusals, Auditor, "note_refusal", ignore),
    "audit of items": (the_audit_of_items, Auditor, "note_refused_items", ignore),
    "audit of strangers": (the_audit_of_strangers, Auditor, "note_stranger", ignore),
    "audit of foreign ids": (the_audit_of_foreign_ids, Auditor, "suspect", ignore),
    "audit of administration": (the_audit_of_administration, identity_admin, "audit_change", ignore),
    "chain": (the_chain, identity_audit, "link_line", lambda head, line: replace(LINK(head, line), hash="")),
    "redaction": (the_redaction, identity_audit, "body_of_line", lambda settings, details: to_canonical(details)),
}


@pytest.fixture
async def house_of(request: pytest.FixtureRequest, serve: Any) -> House:
    """The gate that a check needs."""
    if not request.node.callspec.params["name"].startswith("limit of"):
        return House(await serve(security=security()))
    limits = security(limits=True, default_tier="enterprise", anonymous_calls_per_minute=3)
    house = House(await serve(security=limits, rate_limits=tiers(calls=5, tasks=4)))
    await house.good("create_tenant", {"tenant": OTHER, "name": "free", "tier": "free"})
    house.counting()
    return house


@pytest.mark.parametrize("name", GUARDS)
async def test_the_guard_holds(house_of: House, name: str) -> None:
    assert await GUARDS[name][0](house_of)


@pytest.mark.parametrize("name", GUARDS)
async def test_without_the_guard_its_check_fails(
        house_of: House, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, where, what, instead = GUARDS[name]
    monkeypatch.setattr(where, what, instead)

    assert not await check(house_of)


def test_the_keys_of_the_tests_are_keys() -> None:
    assert parse(generate())
    assert [name for name, wrong in wrong_keys(generate()).items() if parse(wrong) is not None] == [
        "wrong secret", "the secret of one, the id of another"]
