"""Administration of tenants, keys, limits and the audit log: over every façade, and by whom (spec 21.2.2, 21.9)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey
from msgspec.structs import replace

from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import are_here
from asyncgate.conformance.plugin import POSTGRES, database_of, urls
from asyncgate.parts.app import Gate
from asyncgate.parts.identity import admin as identity_admin
from asyncgate.parts.identity import guard as identity_guard
from asyncgate.parts.identity import keys_stored
from asyncgate.parts.identity.keys_stored import hash_secret
from asyncgate.parts.model.settings import DatabaseSettings, Jwt, Settings
from asyncgate.parts.operations import OPERATIONS
from tests.conftest import Live, Served
from tests.support.identity_tools import FACADES, HOME, OTHER, THIRD, House, security
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KEY_FIELDS = {"name": "a key", "principal_kind": "worker", "principal_id": "w1", "capabilities": ["gpu"],
              "task_types": ["draw"], "scopes": ["tasks:lease"]}
# What each operation is asked by an admin about another tenant's things.
ABROAD: dict[str, dict[str, Any]] = {
    "get_limits": {"tenant": THIRD}, "list_keys": {"tenant": THIRD}, "list_audit": {"tenant": THIRD},
    "issue_key": {"tenant": THIRD, **KEY_FIELDS}, "rotate_key": {"tenant": THIRD}, "revoke_key": {"tenant": THIRD}}
OPERATORS: dict[str, dict[str, Any]] = {
    "create_tenant": {"name": "mine"}, "list_tenants": {}, "suspend_tenant": {"tenant": OTHER},
    "set_limits": {"tenant": OTHER, "tier": "enterprise"}}


# Over every façade.


@pytest.mark.parametrize("name", are_here(["issue_key", "invite_user", "change_user", "make_sign_in_link"]))
def test_no_schema_offers_a_role_or_a_kind_that_is_reserved_for_the_gate(name: str) -> None:
    offered = {word for words in find_choices(msgspec.json.schema(OPERATIONS[name].takes)) for word in words}

    assert "agent" in offered
    assert offered.isdisjoint({"system", "asyncgate"})


def find_choices(schema: Any) -> list[list[str]]:
    """Return all lists of words in a schema."""
    if isinstance(schema, dict):
        return [schema.get("enum", [])] + [choice for part in schema.values() for choice in find_choices(part)]
    return [choice for part in schema for choice in find_choices(part)] if isinstance(schema, list) else []


def test_every_administrative_operation_is_asked_here() -> None:
    assert {op.run.__name__ for op in identity_admin.OPERATIONS} == ABROAD.keys() | OPERATORS.keys()


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenants_unique_name_is_good_wherever_its_id_is(house: House, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade}
    made = await house.good("create_tenant", {"name": "team-01", "tier": "paid"}, **ask)
    given = await house.good("create_tenant", {"tenant": OTHER, "name": "team-02"}, **ask)

    assert await house.good("create_tenant", {"name": "team-01"}, **ask) == made, "the second answers the first"
    assert await house.good("create_tenant", {"name": "team-02", "tier": "paid"}, **ask) == given
    taken = await house.ask("create_tenant", {"tenant": THIRD, "name": "team-01"}, **ask)
    idlike = await house.ask("create_tenant", {"name": THIRD}, **ask)
    assert (taken.code, idlike.code) == ("invalid_request", "invalid_request")
    for name, id in (("team-01", made["tenant"]), ("team-02", OTHER), (OTHER, OTHER), ("default", HOME)):
        assert (await house.good("get_limits", {"tenant": name}, **ask))["tenant"] == id
        key = await house.good("issue_key", {"tenant": name, **KEY_FIELDS}, **ask)
        assert key["key"]["tenant"] == id
        assert (await house.good("set_limits", {"tenant": name, "tier": "enterprise"}, **ask))["tenant"] == id
        new = await house.good("rotate_key", {"tenant": name, "key_id": key["key"]["key_id"]}, **ask)
        assert new["key"]["tenant"] == id
        assert len((await house.good("list_keys", {"tenant": name}, **ask))["keys"]) >= 2
        assert (await house.good("list_audit", {"tenant": name}, **ask))["lines"]
    assert (await house.good("suspend_tenant", {"tenant": "team-01"}, **ask))["suspended_at"]
    for operation in ("get_limits", "set_limits", "suspend_tenant", "list_keys"):
        assert (await house.ask(operation, {"tenant": "nobody"}, **ask)).code == "tenant_not_found"


async def test_an_admin_may_call_its_own_tenant_by_name_and_no_other(house: House) -> None:
    for name in ("team-01", "team-02"):
        await house.good("create_tenant", {"name": name})
    fields = {"tenant": "team-01", "name": "root", "principal_id": "root", "role": "admin"}
    mine = (await house.good("issue_key", fields))["api_key"]

    own = await house.ask("get_limits", {"tenant": "team-01"}, token=mine)
    other = await house.ask("get_limits", {"tenant": "team-02"}, token=mine)
    nowhere = await house.ask("get_limits", {"tenant": "nobody"}, token=mine)

    assert (own.code, other.code, nowhere.code) == ("", "tenant_not_found", "tenant_not_found")


@pytest.mark.parametrize("facade", FACADES)
async def test_tenants_are_made_listed_suspended_and_let_in_again(house: House, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade}

    made = await house.good("create_tenant", {"tenant": OTHER, "name": "ours", "tier": "paid"}, **ask)
    again = await house.good("create_tenant", {"tenant": OTHER, "name": "another name"}, **ask)
    unnamed = await house.good("create_tenant", {"name": "free"}, **ask)
    barred = await house.good("suspend_tenant", {"tenant": OTHER, "reason": "misuse"}, **ask)
    listed = await house.good("list_tenants", **ask)
    free = await house.good("suspend_tenant", {"tenant": OTHER, "suspended": False}, **ask)

    assert (made["tenant"], made["name"], made["tier"], "created_at" in made) == (OTHER, "ours", "paid", True)
    assert again == made
    assert unnamed["tier"] == "free"
    assert unnamed["tenant"] not in (OTHER, HOME)
    assert "suspended_at" in barred
    assert {tenant["tenant"]: tenant for tenant in listed["tenants"]}[OTHER] == barred
    assert free == made


@pytest.mark.parametrize("facade", FACADES)
async def test_keys_are_issued_listed_rotated_and_revoked(house: House, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade}

    issued = await house.good("issue_key", KEY_FIELDS, **ask)
    rotated = await house.good("rotate_key", {"key_id": issued["key"]["key_id"], "overlap_seconds": 60}, **ask)
    revoked = await house.good("revoke_key", {"key_id": rotated["key"]["key_id"], "reason": "leaked"}, **ask)
    listed = await house.good("list_keys", **ask)

    assert {name: issued["key"][name] for name in KEY_FIELDS} == KEY_FIELDS
    assert {name: rotated["key"][name] for name in KEY_FIELDS} == KEY_FIELDS
    assert (issued["key"]["role"], issued["key"]["tenant"], revoked) == ("worker", HOME, {"ok": True})
    by_id = {key["key_id"]: key for key in listed["keys"]}
    assert by_id[issued["key"]["key_id"]]["rotated_to"] == rotated["key"]["key_id"]
    assert "expires_at" in by_id[issued["key"]["key_id"]]
    assert "revoked_at" in by_id[rotated["key"]["key_id"]]
    assert [name for key in listed["keys"] for name in key if name in ("hash", "api_key", "secret")] == []


@pytest.mark.parametrize("facade", FACADES)
async def test_limits_are_shown_and_set(house: House, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade}

    before = await house.good("get_limits", {"tenant": OTHER}, **ask)
    after = await house.good("set_limits", {"tenant": OTHER, "tier": "paid"}, **ask)
    exempt = await house.good("set_limits", {"tenant": OTHER, "exempt_until": "2030-01-01T00:00:00Z",
                                             "reason": "contract 3.2"}, **ask)
    unsaid = await house.ask("set_limits", {"tenant": OTHER, "exempt_until": "2030-01-01T00:00:00Z"}, **ask)

    assert (before["tier"], before["tasks_per_hour"], before["api_calls_per_hour"]) == ("free", 100, 1000)
    assert (after["tier"], after["tasks_per_hour"], after["concurrent_leases"]) == ("paid", 10_000, 100)
    assert (exempt["exempt_until"], exempt["tier"]) == ("2030-01-01T00:00:00Z", "paid")
    assert unsaid.code == "invalid_request"


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_has_limits_of_its_own_for_payloads_and_leases(
        serve: Any, facade: str, enforced: bool) -> None:
    """21.6.1, 21.6.2."""
    house = House(await serve(security=security(limits=enforced)))
    key = await house.admin_of(OTHER)
    ask: dict[str, Any] = {"token": key, "facade": facade}
    task = {"type": "demo", "payload": "x" * 50}

    told = await house.good("set_limits", {"tenant": OTHER, "max_payload_bytes": 20, "max_lease_ttl_seconds": 60},
                            facade=facade)
    refused = await house.ask("create_task", task, **ask)
    await house.good("create_task", {**task, "payload": "x"}, **ask)
    [offer] = (await house.good("lease_next", {"worker_id": "w1", "lease_ttl_seconds": 600}, **ask))["tasks"]
    above = await house.ask("set_limits", {"tenant": OTHER, "max_payload_bytes": 2**30}, facade=facade)

    assert (told["max_payload_bytes"], told["max_lease_ttl_seconds"]) == (20, 60)
    assert (refused.code, refused.body["quota"], refused.body["limit"]) == (
        "payload_too_large", "max_payload_bytes", 20)
    assert offer["renew_every_seconds"] == pytest.approx(20)
    assert above.code == "invalid_request"
    assert "from 1 to 1048576" in above.body["message"]
    await house.good("create_task", task, facade=facade)


@pytest.mark.parametrize("facade", FACADES)
async def test_the_audit_log_is_read_in_pages_and_by_event_and_severity(house: House, facade: str) -> None:
    keys = [await house.key("worker", f"w{n}") for n in range(5)]
    await house.good("revoke_key", {"key_id": house.ids[keys[0]]})
    await house.audit()

    ask: dict[str, Any] = {"facade": facade}
    first = await house.good("list_audit", {"limit": 2, "event": "key_issued"}, **ask)
    second = await house.good("list_audit", {"limit": 2, "event": "key_issued", "cursor": first["next_cursor"]}, **ask)
    warned = await house.good("list_audit", {"severity": "warning"}, **ask)
    other_list = await house.ask("list_audit", {"limit": 2, "cursor": first["next_cursor"]}, **ask)

    issued = [line["details"]["issued"] for line in (*first["lines"], *second["lines"])]
    assert issued == [house.ids[key] for key in keys[:4]]
    assert [line["event"] for line in warned["lines"]] == ["key_revoked"]
    assert other_list.code == "invalid_cursor"


@pytest.mark.parametrize(("fields", "why"), [
    ({"principal_kind": "system"}, "one of agent, worker, service, human"),
    ({"principal_kind": "asyncgate"}, "one of agent, worker, service, human"),
    ({"role": "system"}, "one of agent, worker, admin"),
    ({"scopes": ["tasks:all"]}, "no scope"), ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
    ({"not_before": "2031-01-01T00:00:00Z", "expires_at": "2030-01-01T00:00:00Z"}, "expires_at")])
async def test_a_key_that_makes_no_sense_is_not_issued(house: House, fields: dict[str, Any], why: str) -> None:
    refused = await house.ask("issue_key", {**KEY_FIELDS, **fields})

    assert (refused.code, why in refused.body["message"]) == ("invalid_request", True)
    assert (await house.good("list_keys"))["keys"] == []


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_has_so_many_valid_keys(serve: Any, facade: str) -> None:
    given = security()
    house = House(await serve(security=replace(given, api_keys=replace(given.api_keys, keys_per_tenant=3))))
    root = await house.admin_of(OTHER)

    async def issue(token: str | None = root, **more: Any) -> Any:
        return await house.ask("issue_key", {**KEY_FIELDS, **more}, token=token, facade=facade)

    told = await asyncio.gather(*(issue() for _ in range(6)))
    kept = [answer.body["key"]["key_id"] for answer in told if not answer.code]
    [refused, *_] = [answer for answer in told if answer.code]
    rotated = await house.ask("rotate_key", {"key_id": kept[0]}, token=root, facade=facade)
    still = await issue(token=None, tenant=OTHER)
    elsewhere = await issue(token=None)
    await house.good("revoke_key", {"key_id": kept[1]}, token=root)
    room = await issue()

    assert len(kept) == 2, "and root's own"
    assert (refused.code, refused.body["quota"], refused.body["limit"]) == ("quota_exceeded", "keys_per_tenant", 3)
    assert "this tenant has 3 valid keys, and the limit is 3: revoke_key" in refused.body["message"]
    assert [answer.code for answer in (rotated, still, elsewhere, room)] == ["", "quota_exceeded", "", ""]


async def test_new_keys_are_hashed_two_at_a_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def hash_slowly(secret: str, costs: Any) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return hash_secret(secret, costs)
    monkeypatch.setattr(keys_stored, "hash_secret", hash_slowly)

    await asyncio.gather(*(house.key(id=f"agent-{at}") for at in range(12)))

    assert most == 2


async def test_a_limited_key_cannot_issue_or_rotate_one_that_may_do_more(house: House) -> None:
    limited = await house.key("admin", "root", task_types=["draw"])

    issued = await house.ask("issue_key", {**KEY_FIELDS, "role": "admin"}, token=limited)
    rotated = await house.ask("rotate_key", {"key_id": house.ids[limited]}, token=limited)

    assert (issued.code, rotated.code) == ("forbidden", "forbidden")
    assert len((await house.good("list_keys"))["keys"]) == 1


async def test_an_admin_cannot_issue_or_rotate_a_key_with_scopes_that_it_has_not(house: House) -> None:
    clerk = await house.key("admin", "clerk", scopes=["admin:write", "tasks:lease"])
    mighty = await house.key("admin", "root")

    issued = await house.ask("issue_key", {**KEY_FIELDS, "scopes": ["tasks:lease", "tasks:write"]}, token=clerk)
    rotated = await house.ask("rotate_key", {"key_id": house.ids[mighty]}, token=clerk)
    within = await house.good("issue_key", {**KEY_FIELDS, "scopes": ["tasks:lease"]}, token=clerk)

    assert (issued.code, rotated.code) == ("forbidden", "forbidden")
    assert "tasks:write" in issued.body["message"]
    assert within["key"]["scopes"] == ["tasks:lease"]


# Operator, and admin of another tenant (B12).


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("operation", ABROAD)
async def test_another_tenant_is_not_there_for_its_neighbours_admin(house: House, operation: str, facade: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)
    about = {"key_id": house.ids[victim]} if operation in ("rotate_key", "revoke_key") else {}
    fields = {**about, **ABROAD[operation]}
    before = await house.good("list_keys", {"tenant": THIRD})

    named = await house.ask(operation, fields, token=root, facade=facade)
    nowhere = await house.ask(operation, {**fields, "tenant": "6f1c2b9e-0000-4000-8000-00000000ffff"}, token=root,
                              facade=facade)

    assert (named.code, nowhere.code) == ("tenant_not_found", "tenant_not_found")
    assert named.content.replace(THIRD.encode(), b"") == nowhere.content.replace(
        b"6f1c2b9e-0000-4000-8000-00000000ffff", b"")
    assert (await house.good("list_keys", {"tenant": THIRD})) == before


@pytest.mark.parametrize("operation", ["rotate_key", "revoke_key"])
async def test_a_neighbours_key_is_answered_like_one_that_there_is_not(house: House, operation: str) -> None:
    root, victim = await house.admin_of(OTHER), await house.admin_of(THIRD)

    foreign = await house.ask(operation, {"key_id": house.ids[victim]}, token=root)
    unknown = await house.ask(operation, {"key_id": "0" * 12}, token=root)

    assert (foreign.status, foreign.code) == (unknown.status, unknown.code) == (404, "key_not_found")
    assert foreign.content.replace(house.ids[victim].encode(), b"") == unknown.content.replace(b"0" * 12, b"")
    assert not (await house.ask("get_limits", token=victim)).code


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("operation", OPERATORS)
async def test_only_the_operator_looks_after_tenants(house: House, operation: str, facade: str) -> None:
    root = await house.admin_of(OTHER)

    refused = await house.ask(operation, OPERATORS[operation], token=root, facade=facade)

    assert refused.code == "forbidden"
    assert (await house.good("get_limits", {"tenant": OTHER}))["tier"] == "free"


async def test_an_admin_administers_its_own_tenant(house: House) -> None:
    root = await house.admin_of(OTHER)

    key = await house.key("worker", "w1", by=root)
    rotated = await house.good("rotate_key", {"key_id": house.ids[key], "tenant": OTHER}, token=root)
    await house.good("revoke_key", {"key_id": rotated["key"]["key_id"]}, token=root)

    assert (await house.good("get_limits", token=root))["tenant"] == OTHER
    assert {key["principal_id"] for key in (await house.good("list_keys", token=root))["keys"]} == {"root", "w1"}
    events = [line["event"] for line in await house.audit(OTHER)]
    assert {"tenant_created", "key_issued", "key_rotated", "key_revoked"} <= set(events)


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("operation", ["revoke_key", "rotate_key", "rotate_credentials"])
async def test_a_limited_admin_takes_no_key_back_that_it_could_not_issue(
        house: House, operation: str, facade: str) -> None:
    root = await house.admin_of(OTHER)
    scopes = ["admin:read", "admin:write"]
    limited, equal = [await house.key("admin", name, by=root, scopes=scopes) for name in ("limited", "equal")]
    ada = await house.key("agent", "ada", by=root)

    told = [await house.ask(operation, {"key_id": house.ids[key]} if operation != "rotate_credentials" else {},
                            token=limited, facade=facade) for key in (root, ada)]

    assert [answer.code for answer in told] == ["forbidden", "forbidden"]
    assert "no scope" in json.dumps(told[0].body)
    for token in (root, ada, equal):
        assert not (await house.ask("whoami", token=token)).code


@pytest.mark.parametrize("facade", FACADES)
async def test_a_limited_admin_takes_back_its_equals_and_itself(house: House, facade: str) -> None:
    root = await house.admin_of(OTHER)
    scopes = ["admin:read", "admin:write"]
    limited, equal = [await house.key("admin", name, by=root, scopes=scopes) for name in ("limited", "equal")]

    for key in (equal, limited):
        await house.good("revoke_key", {"key_id": house.ids[key]}, token=limited, facade=facade)

    for token in (equal, limited):
        assert (await house.ask("whoami", token=token)).code == "unauthenticated"


async def test_an_admin_of_the_default_tenant_is_the_operator_with_an_issued_key_too(house: House) -> None:
    operator = await house.key("admin", "root")

    assert not (await house.ask("list_tenants", token=operator)).code
    assert not (await house.ask("issue_key", {**KEY_FIELDS, "tenant": OTHER}, token=operator)).code


# Suspension.


PEM = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def token_for(tenant: str) -> str:
    """Return an access token of a trusted issuer."""
    private = PEM.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                serialization.NoEncryption())
    now = int(time.time())
    claims = {"iss": "asyncgate", "aud": "asyncgate-api", "sub": "eve", "tenant_id": tenant, "principal_kind": "agent",
              "principal_id": "eve", "jti": "1", "iat": now, "nbf": now, "exp": now + 3600,
              "scope": "tasks:read tasks:write"}
    return str(jwt.encode({"alg": "RS256", "typ": "at+jwt"}, claims, RSAKey.import_key(private)))


@pytest.fixture
async def trusting(serve: Any, tmp_path: Path) -> House:
    """A gate that takes access tokens too."""
    path = tmp_path / "public.pem"
    path.write_bytes(PEM.public_key().public_bytes(serialization.Encoding.PEM,
                                                   serialization.PublicFormat.SubjectPublicKeyInfo))
    return House(await serve(security=replace(security(), jwt=Jwt(public_key_path=str(path)))))


@pytest.mark.parametrize("facade", FACADES)
async def test_a_suspended_tenant_is_out_at_once_here_and_back_when_it_may(trusting: House, facade: str) -> None:
    house = trusting
    key, eve = await house.admin_of(OTHER), token_for(OTHER)
    task = await house.good("create_task", {"type": "demo", "payload": None}, token=eve)
    assert not (await house.ask("list_tasks", token=key, facade=facade)).code

    await house.good("suspend_tenant", {"tenant": OTHER})
    out = [await house.ask("list_tasks", token=token, facade=facade) for token in (key, eve)]
    await house.good("suspend_tenant", {"tenant": OTHER, "suspended": False})
    back = [await house.ask("list_tasks", token=token, facade=facade) for token in (key, eve)]

    status = 200 if facade in ("modern", "legacy") else 401     # no other credential would help
    assert [(answer.status, answer.code) for answer in out] == [(status, "unauthenticated")] * 2
    assert [answer.code for answer in back] == ["", ""]
    assert (await house.good("get_task", {"task_id": task["task_id"]}, token=eve))["status"] == "queued"


async def test_the_operators_own_tenant_and_with_it_the_shared_token_cannot_be_suspended(house: House) -> None:
    refused = await house.ask("suspend_tenant", {"tenant": HOME})

    assert refused.code == "forbidden"
    assert not (await house.ask("list_tenants")).code


@contextlib.asynccontextmanager
async def another(of: House, settings: Settings | None = None) -> AsyncIterator[House]:
    """A second gate over the same database, as another process would be, that hears no news."""
    gate = Gate(settings or of.served.gate.settings, of.served.backend)
    async with gate.app.router.lifespan_context(gate.app):
        yield House(Served(gate))


async def test_a_gate_that_hears_nothing_bars_a_suspended_tenant_after_five_seconds(trusting: House) -> None:
    house = trusting
    key, eve = await house.admin_of(OTHER), token_for(OTHER)
    async with another(house) as elsewhere:
        frozen = house.served.backend.now()
        elsewhere.guard.keys.clock = lambda: frozen
        for token in (key, eve):
            await elsewhere.good("list_tasks", token=token)
        await asyncio.gather(*elsewhere.guard.keys.tasks)   # it writes down that the key was used, and reads it again
        await elsewhere.good("list_tasks", token=key)
        await house.good("suspend_tenant", {"tenant": OTHER})

        still = [await elsewhere.ask("list_tasks", token=token) for token in (key, eve)]
        at, account = elsewhere.guard.accounts.read[OTHER]
        elsewhere.guard.accounts.read[OTHER] = at - 5.0, account
        elsewhere.guard.keys.clock = lambda: frozen + 5.0
        after = [await elsewhere.ask("list_tasks", token=token) for token in (key, eve)]

    assert [answer.code for answer in still] == ["", ""], "that it hears nothing is the point of this test"
    assert [answer.code for answer in after] == ["unauthenticated"] * 2


async def test_a_gate_that_hears_nothing_goes_by_the_limits_of_a_tenant_after_five_seconds(house: House) -> None:
    key, task = await house.admin_of(OTHER), {"type": "demo", "payload": "x" * 50}
    async with another(house) as elsewhere:
        await elsewhere.good("create_task", task, token=key)
        await house.good("set_limits", {"tenant": OTHER, "max_payload_bytes": 20})

        still = await elsewhere.ask("create_task", task, token=key)
        at, account = elsewhere.guard.accounts.read[OTHER]
        elsewhere.guard.accounts.read[OTHER] = at - 5.0, account
        after = await elsewhere.ask("create_task", task, token=key)

    assert (still.code, after.code) == ("", "payload_too_large"), "that it hears nothing is the point of this test"


async def test_the_account_of_a_tenant_is_read_once_for_many_calls(
        house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits cost no call a further read."""
    monkeypatch.setattr(identity_guard, "STATUS_SECONDS", 1e9)
    key, read = await house.admin_of(OTHER), list[str]()
    await house.good("set_limits", {"tenant": OTHER, "max_payload_bytes": 1000, "max_lease_ttl_seconds": 60})

    async def count(tenant_id: str, kind: Any) -> Any:
        read.append(tenant_id)
        return await house.served.backend.record(tenant_id, kind)

    monkeypatch.setattr(house.guard.accounts, "engine", SimpleNamespace(backend=SimpleNamespace(record=count)))
    for _ in range(5):
        await house.good("create_task", {"type": "demo", "payload": None}, token=key)
        await house.good("lease_next", {"worker_id": "w1"}, token=key)

    assert read == [OTHER]


async def test_an_account_that_was_read_before_the_suspension_does_not_count_after_it(house: House) -> None:
    key, accounts = await house.admin_of(OTHER), house.guard.accounts
    accounts.forget(OTHER)
    record, go, asked = house.served.backend.record, asyncio.Event(), asyncio.Event()

    async def slow(*which: Any) -> Any:
        row = await record(*which)
        asked.set()
        await go.wait()
        return row

    house.served.backend.record = slow
    reading = asyncio.ensure_future(accounts.of(OTHER))
    await asked.wait()
    house.served.backend.record = record
    await house.good("suspend_tenant", {"tenant": OTHER})
    go.set()

    assert (await reading).suspended_at is None, "the reading is from before"
    assert (await house.ask("list_tasks", token=key)).code == "unauthenticated"
    assert (await accounts.of(OTHER)).suspended_at is not None


# Rotation and revocation.


@pytest.mark.parametrize("facade", FACADES)
async def test_both_keys_are_good_during_the_overlap_and_the_new_one_after_it(house: House, facade: str) -> None:
    old = await house.key("agent", "ada")
    await house.good("list_tasks", token=old)

    new = (await house.good("rotate_key", {"key_id": house.ids[old], "overlap_seconds": 3600}))["api_key"]
    both = [(await house.ask("list_tasks", token=token, facade=facade)).code for token in (old, new)]
    now = house.served.backend.now()
    house.guard.keys.clock = lambda: now + 3601
    later = [(await house.ask("list_tasks", token=token, facade=facade)).code for token in (old, new)]

    assert both == ["", ""]
    assert later == ["unauthenticated", ""]


async def test_without_overlap_the_old_key_ends_at_once(house: House) -> None:
    old = await house.key("agent", "ada")
    await house.good("list_tasks", token=old)

    await house.good("rotate_key", {"key_id": house.ids[old], "overlap_seconds": 0})

    assert (await house.ask("list_tasks", token=old)).code == "unauthenticated"
    assert (await house.ask("rotate_key", {"key_id": house.ids[old]})).code == "invalid_state_transition"


@pytest.mark.parametrize("facade", FACADES)
async def test_a_hot_key_is_refused_at_once_when_it_is_revoked_here(house: House, facade: str) -> None:
    key = await house.key("agent", "ada")
    assert not (await house.ask("list_tasks", token=key, facade=facade)).code

    await house.good("revoke_key", {"key_id": house.ids[key]})
    again = await house.good("revoke_key", {"key_id": house.ids[key]})

    assert (await house.ask("list_tasks", token=key, facade=facade)).code == "unauthenticated"
    assert again == {"ok": True}
    assert (await house.ask("rotate_key", {"key_id": house.ids[key]})).code == "invalid_state_transition"
    assert len(await house.audit(event="key_revoked")) == 1
    [again_too] = [line["details"] for line in await house.audit(event="admin_operation")]
    assert (again_too["operation"], again_too["about_key"]) == ("revoke_key", house.ids[key])


# Calls that wait meanwhile.


async def waiting(house: House, *, readers: bool) -> None:
    """Wait until a call waits, and has looked."""
    engine = house.served.engine
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (engine.readers.count if readers else engine.waiting.count) or engine.batches.flights:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize("what", ["revoke", "suspend", "nothing", "nothing, and forgotten"])
@pytest.mark.parametrize("facade", FACADES)
async def test_a_claim_that_waits_gets_no_work_once_its_key_is_barred(house: House, facade: str, what: str) -> None:
    root = await house.admin_of(OTHER)
    worker = await house.key("worker", "w1", tenant=OTHER)
    fields = {"wait_seconds": 30}
    claim = asyncio.ensure_future(house.ask("lease_next", fields, token=worker, facade=facade))
    await waiting(house, readers=False)

    if what == "revoke":
        await house.good("revoke_key", {"key_id": house.ids[worker]}, token=root)
    if "forgotten" in what:
        house.guard.keys.proven.clear()
    task = await house.good("create_task", {"type": "demo", "payload": None}, token=root) if what != "suspend" else None
    if what == "suspend":
        await house.good("suspend_tenant", {"tenant": OTHER})
        house.served.engine.waiting._wake_places(OTHER, None)

    told = await asyncio.wait_for(claim, PATIENCE_SECONDS)
    assert told.code == ("" if "nothing" in what else "unauthenticated")
    if task is not None:
        status = (await house.good("get_task", {"task_id": task["task_id"]}, token=root))["status"]
        assert status == ("leased" if "nothing" in what else "queued")


@pytest.mark.parametrize("facade", FACADES)
async def test_a_reader_that_waits_learns_nothing_once_its_key_is_revoked(house: House, facade: str) -> None:
    ada = await house.key("agent", "ada")
    task = (await house.good("create_task", {"type": "demo", "payload": None}, token=ada))["task_id"]
    fields = {"task_id": task, "wait_seconds": 30}
    read = asyncio.ensure_future(house.ask("get_task", fields, token=ada, facade=facade))
    await waiting(house, readers=True)

    await house.good("revoke_key", {"key_id": house.ids[ada]})
    await house.good("cancel_task", {"task_id": task})

    assert (await asyncio.wait_for(read, PATIENCE_SECONDS)).code == "unauthenticated"
    assert [line["details"]["principal_id"] for line in await house.audit(event="auth_failure")] == ["ada"]


@pytest.mark.parametrize("operation", ["list_receipts", "list_open_obligations"])
@pytest.mark.parametrize("facade", FACADES)
async def test_a_list_that_waits_shows_nothing_once_its_key_is_revoked(
        house: House, facade: str, operation: str) -> None:
    ada = await house.key("agent", "ada")
    read = asyncio.ensure_future(house.ask(operation, {"wait_seconds": 30}, token=ada, facade=facade))
    await waiting(house, readers=True)

    await house.good("revoke_key", {"key_id": house.ids[ada]})
    await house.good("create_task", {"type": "demo", "payload": None, "agent_id": "ada"})

    assert (await asyncio.wait_for(read, PATIENCE_SECONDS)).code == "unauthenticated"


# Two gates on one Postgres.


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)


@pytest.fixture
async def pair(postgres: str) -> AsyncIterator[tuple[House, House]]:
    """Two gates on one Postgres."""
    database = DatabaseSettings(url=postgres)
    async with contextlib.AsyncExitStack() as running:
        houses = []
        for name in ("gate-1", "gate-2"):
            settings = Settings(api_key="a-token-for-tests", instance_id=name, database=database, security=security())
            gate = Gate(settings, await open_backend(database.url, serving=True, settings=database))
            await running.enter_async_context(gate.app.router.lifespan_context(gate.app))
            houses.append(House(Served(gate)))
        yield houses[0], houses[1]


def freeze(house: House) -> None:
    """Let no key's status grow old."""
    frozen = house.served.backend.now()
    house.guard.keys.clock = lambda: frozen


async def until_refused(house: House, token: str) -> None:
    """Wait until a credential is no good any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await house.ask("list_tasks", token=token)).code != "unauthenticated":  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0.001)


async def test_news_of_a_revocation_reach_the_other_gate(pair: tuple[House, House]) -> None:
    here, there = pair
    key, kept = await here.key("agent", "ada"), await here.key("agent", "bob")
    freeze(there)
    for token in (key, kept):
        await there.good("list_tasks", token=token)

    await here.good("revoke_key", {"key_id": here.ids[key]})

    await until_refused(there, key)
    assert not (await there.ask("list_tasks", token=kept)).code


async def test_news_of_a_suspension_reach_the_other_gate(
        pair: tuple[House, House], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    monkeypatch.setattr("asyncgate.parts.identity.guard.STATUS_SECONDS", 1e9)    # it does not look by itself
    key = await here.admin_of(OTHER)
    freeze(there)
    await there.good("list_tasks", token=key)

    await here.good("suspend_tenant", {"tenant": OTHER})

    await until_refused(there, key)


async def test_two_gates_write_one_chain(pair: tuple[House, House]) -> None:
    async def some(house: House, name: str) -> None:
        for n in range(20):
            await house.key("worker", f"{name}{n}")

    await asyncio.gather(some(pair[0], "a"), some(pair[1], "b"))

    lines = await pair[0].audit()
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
    assert len([line for line in lines if line["event"] == "key_issued"]) == 40


# The command line.


GATE = [sys.executable, "-m", "asyncgate"]
Run = Callable[..., Result]


def run(*arguments: str, **environment: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, arguments, env=environment, prog_name="asyncgate")


def first_key(database: str, *more: str) -> str:
    """Issue a key beside the gate."""
    made = run("keys", "issue", "--database", database, "--role", "admin", "--name", "first", "--principal-id", "me",
               *more)
    assert made.exit_code == 0, made.output
    return made.stdout.strip()


def test_serve_says_how_to_issue_the_first_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCGATE_API_KEY", raising=False)

    done = subprocess.run([*GATE, "serve", "--port", "0", "--database", f"sqlite:///{tmp_path / 'gate.db'}"],
                          capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)

    assert done.returncode == 2
    assert "asyncgate keys issue --role admin" in done.stderr
    assert "ASYNCGATE_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gate in a process of its own whose only way in is the key that was issued beside it."""
    monkeypatch.delenv("ASYNCGATE_API_KEY", raising=False)
    database = f"sqlite:///{tmp_path / 'gate.db'}"
    key = first_key(database)

    with monkeypatch.context() as patched:
        patched.setattr("tests.conftest.TOKEN", "")
        live = Live(database=database)
    yield live, key
    live.kill()


def test_the_first_key_administers_the_gate_from_the_command_line(alone: tuple[Live, str]) -> None:
    live, key = alone

    def asked(*arguments: str) -> Any:
        result = run(*arguments, "--json", ASYNCGATE_URL=live.url, ASYNCGATE_API_KEY=key)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    tenant = asked("create-tenant", "--name", "ours", "--tenant", OTHER)["tenant"]
    issued = asked("issue-key", "--tenant", tenant, "--name", "k", "--principal-id", "w1", "--principal-kind", "worker",
                   "--task-types", "draw")
    rotated = asked("rotate-key", issued["key"]["key_id"], "--tenant", tenant)
    asked("revoke-key", rotated["key"]["key_id"], "--tenant", tenant, "--reason", "tried")
    assert asked("set-limits", tenant, "--tier", "paid")["tasks_per_hour"] == 10_000
    assert asked("get-limits", "--tenant", tenant)["tier"] == "paid"
    assert "suspended_at" in asked("suspend-tenant", tenant, "--reason", "tried")
    assert [row["name"] for row in asked("list-tenants")["tenants"]] == ["", "ours"]
    assert [row["key_id"] for row in asked("list-keys", "--tenant", tenant)["keys"]] == sorted(
        [issued["key"]["key_id"], rotated["key"]["key_id"]])
    events = [line["event"] for line in asked("list-audit", "--tenant", tenant)["lines"]]
    assert events == ["tenant_created", "key_issued", "key_rotated", "key_revoked", "tier_changed", "tenant_suspended"]
    assert {"create_tenant", "issue_key", "rotate_key", "revoke_key", "set_limits", "get_limits", "suspend_tenant",
            "list_tenants", "list_keys", "list_audit"} <= OPERATIONS.keys()

    wrong = run("list-tenants", ASYNCGATE_URL=live.url, ASYNCGATE_API_KEY=issued["api_key"])
    assert wrong.exit_code == 3     # revoked, and of a suspended tenant


def test_a_key_beside_the_gate_is_not_issued_while_it_serves(alone: tuple[Live, str], tmp_path: Path) -> None:
    made = run("keys", "issue", "--database", f"sqlite:///{tmp_path / 'gate.db'}", "--role", "admin", "--name", "2nd",
               "--principal-id", "me")

    assert made.exit_code == 1
    assert "aga_" not in made.output


@pytest.mark.parametrize(("option", "message"), [
    (("--role", "system"), "'system' is not one of 'admin', 'agent', 'worker'"),
    (("--principal-kind", "system"), "'system' is not one of 'agent', 'human', 'service', 'worker'")])
def test_a_key_beside_the_gate_is_held_to_the_rules(tmp_path: Path, option: tuple[str, str], message: str) -> None:
    made = run("keys", "issue", "--database", f"sqlite:///{tmp_path / 'gate.db'}", *option, "--name", "x",
               "--principal-id", "me")

    assert made.exit_code == 2
    assert message in made.output
