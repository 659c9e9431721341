"""Operations on access tokens and signing keys, and what a tenant's forced rotation ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.signing import SigningKeys
from asyncgate.parts.model.settings import Jwt, SecuritySettings, TrustedIssuer
from asyncgate.parts.model.stored_oauth import Grant
from tests.conftest import Served
from tests.extras.oauth.conftest import mint, write_signing_key
from tests.support.identity_tools import FACADES, HOME, OTHER, House

pytestmark = pytest.mark.anyio


async def status(served: Served, token: str) -> int:
    return (await served.call("GET", "/v1/tasks", token=token)).status


@pytest.fixture
async def house(oauth_gate: Served) -> House:
    """A gate with OAuth on, and another tenant with an admin."""
    return House(oauth_gate)


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("by", ["token_id", "token"])
async def test_an_admin_revokes_one_token_of_its_tenant(
        house: House, oauth_gate: Served, facade: str, by: str) -> None:
    root = await house.admin_of(OTHER)
    token, other = (mint(oauth_gate, tenant_id=OTHER, jti=jti) for jti in ("one", "two"))
    named = {"token_id": "one"} if by == "token_id" else {"access_token": token}

    done = await house.good("revoke_token", {**named, "reason": "found in a log"}, token=root, facade=facade)

    assert (done["token_id"], done["tenant"]) == ("one", OTHER)
    assert [await status(oauth_gate, credential) for credential in (token, other)] == [401, 200]
    for tenant in (HOME, OTHER):
        [line] = await house.audit(tenant, "token_revoked")
        assert (line["reason"], line["details"]["about_token"]) == ("found in a log", "one")
        assert token not in str(line)
    inbox = await house.good("list_receipts", {"to_kind": "human", "to_id": "root"}, token=root)
    assert "token_revoked" in {receipt["body"]["kind"] for receipt in inbox["receipts"]}


async def test_an_admin_revokes_no_token_of_another_tenant(house: House, oauth_gate: Served) -> None:
    root, token = await house.admin_of(OTHER), mint(oauth_gate)

    by_text = await house.ask("revoke_token", {"access_token": token}, token=root)
    by_name = await house.ask("revoke_token", {"token_id": "token-1", "tenant": HOME}, token=root)
    await house.good("revoke_token", {"token_id": "token-1"}, token=root)     # the id, in its own tenant

    assert (by_text.code, by_name.code) == ("tenant_not_found", "tenant_not_found")
    assert await status(oauth_gate, token) == 200


async def test_the_operator_revokes_a_token_of_any_tenant_by_its_text(house: House, oauth_gate: Served) -> None:
    await house.admin_of(OTHER)
    token = mint(oauth_gate, tenant_id=OTHER)

    assert (await house.good("revoke_token", {"access_token": token}))["tenant"] == OTHER
    assert await status(oauth_gate, token) == 401


async def test_a_token_of_another_issuer_is_revoked_also_while_oauth_is_off(
        serve: Any, tmp_path: Path) -> None:
    issuer = SigningKeys(str(write_signing_key(tmp_path / "issuer.pem")))
    (tmp_path / "issuer.json").write_text(json.dumps(issuer.jwks()))
    trusted = TrustedIssuer(issuer="https://issuer.example", jwks=str(tmp_path / "issuer.json"))
    served = await serve(security=SecuritySettings(jwt=Jwt(issuers=(trusted,))))
    now = time.time()
    claims = {"iss": trusted.issuer, "aud": "asyncgate-api", "sub": "ada", "tenant_id": HOME, "iat": now,
              "principal_kind": "agent", "exp": now + 3600}
    revoked, other = (issuer.sign({**claims, "jti": jti}) for jti in ("one", "other"))
    assert [await status(served, token) for token in (revoked, other)] == [200, 200]

    await House(served).good("revoke_token", {"access_token": revoked})

    assert [await status(served, token) for token in (revoked, other)] == [401, 200]


@pytest.mark.one_store
@pytest.mark.parametrize(("fields", "why"), [
    ({}, "either"), ({"token_id": "one", "access_token": "x"}, "either"), ({"access_token": "aga_x"}, "revoke_key"),
    ({"access_token": "no token"}, "JWT"), ({"access_token": "eyJ.e30.x"}, "jti"),
    ({"access_token": "eyJ.W10.x"}, "JWT")])
async def test_a_revocation_names_one_token(house: House, fields: dict[str, str], why: str) -> None:
    refused = await house.ask("revoke_token", fields)

    assert refused.code == "invalid_request"
    assert why in refused.body["message"]


@pytest.mark.one_store
async def test_the_signing_keys_are_shown_as_the_process_has_them(
        serve_oauth: Callable[..., Any], tmp_path: Path) -> None:
    path = write_signing_key(tmp_path / "signing.pem")
    house = House(await serve_oauth(jwt={"private_key_path": str(path)}))
    server = house.served.gate.joined["oauth"]

    [key] = (await house.good("list_signing_keys"))["keys"]

    assert (key["kid"], key["until"]) == (server.keys.current.key.kid, None)
    assert datetime.fromisoformat(key["since"]) < datetime.now(UTC)


@pytest.mark.one_store
async def test_without_an_authorization_server_there_are_no_signing_keys(serve: Any) -> None:
    assert await House(await serve()).good("list_signing_keys") == {"keys": []}


async def keep_grant(served: Served, name: str, tenant: str, used: bool = True) -> None:
    """Store a session for a tenant."""
    now = served.backend.now()
    grant = Grant(name, "user-1", "client-1", tenant, "human", "ada", "agent", "[]", "http://localhost/mcp",
                  "http://localhost/cb", "", f"hash of {name}", now, 3600, now, now + 3600,
                  last_used_at=now if used else None)
    await Directory(served.engine).change(lambda work: work.keep_record(grant))


async def test_a_forced_rotation_ends_all_sessions_of_the_tenant_and_no_other(
        house: House, oauth_gate: Served) -> None:
    await house.admin_of(OTHER)
    for name, tenant in (("one", OTHER), ("two", OTHER), ("ours", HOME)):
        await keep_grant(oauth_gate, name, tenant)
    late = oauth_gate.backend.now() + 20
    refreshed = mint(oauth_gate, tenant_id=OTHER, sid="one", iat=late)     # as if it was refreshed meanwhile
    assert await status(oauth_gate, refreshed) == 200

    reply = await house.good("rotate_credentials", {"tenant": OTHER, "reason": "leaked"})

    assert reply["sessions"] == 2
    rows = {row.grant_id: row for row in await Directory(oauth_gate.engine).page(Grant)}
    assert {name for name, row in rows.items() if row.ended_at is not None} == {"one", "two"}
    assert rows["one"].ended_why == "credentials_rotated"
    assert await status(oauth_gate, refreshed) == 401
    [line] = await house.audit(OTHER, "credentials_rotated")
    assert line["details"]["sessions"] == 2
