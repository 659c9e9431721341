"""The gate as a resource server: what a refusal tells a client, and whose tokens are accepted for what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from asyncgate import SCOPES
from asyncgate.parts.app import Gate
from asyncgate.parts.identity.signing import KEYS_STALE_SECONDS, SigningKeys, rotate_key_file
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import Settings, TrustedIssuer
from tests.conftest import Served
from tests.extras.oauth.conftest import mint, oauth_settings, write_signing_key
from tests.support.identity_tools import FACADES, HOME, OTHER, House, mcp_call

pytestmark = pytest.mark.anyio

COMMON = "receipts:ack receipts:read tasks:lease tasks:read tasks:write"
WELL_KNOWN = "http://localhost/.well-known/oauth-protected-resource"
DAY = 86_400


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about the claims of a token, which no database has.

    What one has of them, revocations, test_revocations tries on both.
    """
    return sqlite_url


def challenge(mount: str, error: str = "", scope: str = COMMON) -> str:
    return f'Bearer {error}resource_metadata="{WELL_KNOWN}{mount}", scope="{scope}"'


async def told(gate: Served, path: str, token: str | None) -> tuple[int, str]:
    """Return the challenge of a refused call, over REST or MCP."""
    mcp = "mcp" in path
    _, _, body, headers = mcp_call("list_tasks", {}, "modern")
    answer = await gate.call("POST" if mcp else "GET", path, body if mcp else None, token=token, headers=headers)
    return answer.status, answer.headers["www-authenticate"]


@pytest.mark.parametrize(("path", "mount"), [
    ("/v1/tasks", ""), ("/mcp", "/mcp"), ("/mcp/u", "/mcp/u"), ("/v1/receipts/stream", "")])
async def test_a_401_names_the_metadata_of_the_mount_and_what_is_commonly_needed(
        oauth_gate: Served, path: str, mount: str) -> None:
    assert await told(oauth_gate, path, None) == (401, challenge(mount))
    assert await told(oauth_gate, path, "wrong") == (401, challenge(mount, 'error="invalid_token", '))


async def test_the_metadata_that_a_401_names_is_there(oauth_gate: Served) -> None:
    for path in ("/v1/tasks", "/mcp", "/mcp/u"):
        _, header = await told(oauth_gate, path, None)
        target = header.partition('resource_metadata="http://localhost')[2].partition('"')[0]
        metadata = await oauth_gate.get(target, token=None)
        assert metadata["resource"] == "http://localhost" + path.removeprefix("/v1/tasks")


@pytest.mark.parametrize("path", ["/v1/tasks", "/mcp", "/mcp/u"])
async def test_a_403_names_all_scopes_that_a_new_token_needs(oauth_gate: Served, path: str) -> None:
    token = mint(oauth_gate, scope="receipts:read")

    answer = await told(oauth_gate, path, token)

    mount = path.removeprefix("/v1/tasks")
    assert answer == (403, challenge(mount, 'error="insufficient_scope", ', "receipts:read tasks:read"))


async def test_what_another_token_cannot_change_has_no_challenge(oauth_gate: Served) -> None:
    """An issued key gets no more scopes, and no scope makes an agent an admin."""
    house = House(oauth_gate)
    key = await house.key("agent", "ada", scopes=["receipts:read"])

    by_key = await oauth_gate.call("GET", "/v1/tasks", token=key)
    by_role = await oauth_gate.call("GET", "/v1/tenants", token=mint(oauth_gate))

    assert [(answer.status, "www-authenticate" in answer.headers) for answer in (by_key, by_role)] == [(403, False)] * 2


async def test_while_oauth_is_off_nothing_is_said_of_it(serve: Any) -> None:
    gate = await serve()

    assert await told(gate, "/v1/tasks", None) == (401, "Bearer")
    assert (await gate.call("GET", "/.well-known/oauth-protected-resource", token=None)).status == 404


@pytest.mark.parametrize("path", ["/v1/tasks", "/mcp"])
async def test_a_token_in_a_query_is_refused_also_beside_a_good_one(oauth_gate: Served, path: str) -> None:
    token = mint(oauth_gate)

    for beside in (None, token):
        status, header = await told(oauth_gate, f"{path}?access_token={token}", beside)
        assert (status, 'error="invalid_request"' in header) == (401, True)


@pytest.mark.parametrize("facade", FACADES)
async def test_an_own_token_is_good_over_every_facade(oauth_gate: Served, facade: str) -> None:
    house, token = House(oauth_gate), mint(oauth_gate)

    made = await house.good("create_task", {"type": "demo", "payload": None}, token=token, facade=facade)
    task = await house.good("get_task", {"task_id": made["task_id"]}, token=token, facade=facade)

    assert (task["created_by"]["kind"], task["created_by"]["id"]) == ("human", "ada")


@pytest.mark.parametrize("changed", [
    {"aud": ["asyncgate-api", "https://elsewhere.example/mcp"]}, {"iss": "http://localhost/"}, {"iss": "asyncgate"},
    {"tenant_id": OTHER}, {"role": "system"}, {"exp": time.time() + 91 * DAY}])
async def test_an_own_token_for_something_else_is_refused(oauth_gate: Served, changed: dict[str, Any]) -> None:
    assert (await oauth_gate.call("GET", "/v1/tasks", token=mint(oauth_gate, **changed))).status == 401


async def test_a_token_is_good_as_soon_as_its_tenant_exists(oauth_gate: Served) -> None:
    token = mint(oauth_gate, tenant_id=OTHER)
    before = await oauth_gate.call("GET", "/v1/tasks", token=token)
    [line] = await House(oauth_gate).audit(event="auth_failure")

    await oauth_gate.post("/v1/tenants", {"tenant": OTHER, "name": "ours"})

    assert (before.status, line["reason"]) == (401, "token_tenant")
    assert (await oauth_gate.call("GET", "/v1/tasks", token=token)).status == 200


async def test_an_admins_token_without_scopes_has_what_an_admins_key_without_scopes_has(oauth_gate: Served) -> None:
    tokens = oauth_gate.gate.identity.tokens
    assert tokens is not None

    caller = await tokens.caller(mint(oauth_gate, role="admin", scope=None))

    assert caller is not None
    assert caller.scopes == SCOPES - {"metrics:read"}


async def test_a_running_gate_follows_a_rotation_of_its_keys_without_a_restart(
        serve_oauth: Callable[..., Any], tmp_path: Path) -> None:
    path = str(write_signing_key(tmp_path / "signing.pem"))
    gate = await serve_oauth(jwt={"private_key_path": path})
    old = mint(gate)

    async def ask(token: str) -> int:
        return int((await gate.call("GET", "/v1/tasks", token=token)).status)
    assert await ask(old) == 200
    rotate_key_file(path, time.time(), bits=2048)
    fresh = mint(gate, SigningKeys(path))       # by another gate, which begins with the new key
    assert [await ask(fresh), await ask(old)] == [200, 200]

    rotate_key_file(path, time.time(), overlap_seconds=0.0, bits=2048)
    keys = gate.gate.joined["oauth"].keys
    keys.clock = lambda: keys.looked_at + KEYS_STALE_SECONDS

    assert [await ask(fresh), await ask(old)] == [401, 200]     # the first one keeps its overlap


class Others:
    """Another issuer, with its key in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, folder / f"{name.rpartition('/')[2]}.json"
        self.key = RSAKey.import_key(write_signing_key(folder / f"{name.rpartition('/')[2]}.pem").read_bytes())
        self.key.ensure_kid()
        self.path.write_text(json.dumps({"keys": [self.key.as_dict(private=False)]}))

    def trusted(self, **limits: Any) -> TrustedIssuer:
        return TrustedIssuer(issuer=self.name, jwks=str(self.path), **limits)

    def sign(self, **changed: Any) -> str:
        now = time.time()
        claims = {"iss": self.name, "aud": "asyncgate-api", "sub": "ada", "tenant_id": HOME, "principal_kind": "agent",
                  "iat": now, "exp": now + DAY, "scope": "tasks:read tasks:write receipts:read", **changed}
        return jwt.encode({"alg": "RS256", "typ": "at+jwt", "kid": self.key.kid}, claims, self.key)


@pytest.fixture
def issuer(tmp_path: Path) -> Others:
    """An issuer that the gate trusts."""
    return Others(tmp_path, "https://issuer.example/one")


@pytest.fixture
def second(tmp_path: Path) -> Others:
    """Another one."""
    return Others(tmp_path, "https://issuer.example/two")


async def test_own_and_other_issuers_are_accepted_side_by_side(
        serve_oauth: Callable[..., Any], issuer: Others, second: Others) -> None:
    gate = await serve_oauth(jwt={"issuers": (issuer.trusted(),), "issuer": second.name, "jwks": str(second.path)})

    for token in (mint(gate), issuer.sign(), second.sign()):
        assert (await gate.call("GET", "/v1/tasks", token=token)).status == 200


async def test_no_issuer_speaks_for_another(serve_oauth: Callable[..., Any], issuer: Others, second: Others) -> None:
    gate = await serve_oauth(jwt={"issuers": (issuer.trusted(), second.trusted())})

    for token in (issuer.sign(iss=second.name), second.sign(iss=issuer.name), issuer.sign(iss="http://localhost"),
                  mint(gate, iss=issuer.name), issuer.sign(iss=issuer.name + "/")):
        assert (await gate.call("GET", "/v1/tasks", token=token)).status == 401


@pytest.mark.parametrize(("limits", "bad"), [
    ({"tenants": (HOME,)}, {"tenant_id": OTHER}), ({"roles": ("agent",)}, {"role": "worker"}), ({}, {"role": "admin"}),
    ({"audience": ("ours",)}, {"aud": "asyncgate-api"}),
    ({"max_lifetime_days": 1}, {"exp": time.time() + 2 * DAY})])
async def test_an_issuer_asserts_no_more_than_it_may(
        serve_oauth: Callable[..., Any], issuer: Others, limits: dict[str, Any], bad: dict[str, Any]) -> None:
    gate = await serve_oauth(jwt={"issuers": (issuer.trusted(**limits),)})
    await gate.post("/v1/tenants", {"tenant": OTHER, "name": "ours"})
    good = {"aud": "ours"} if "audience" in limits else {}

    assert (await gate.call("GET", "/v1/tasks", token=issuer.sign(**good))).status == 200
    assert (await gate.call("GET", "/v1/tasks", token=issuer.sign(**{**good, **bad}))).status == 401


async def test_an_issuer_gives_no_scope_that_it_may_not_give(serve_oauth: Callable[..., Any], issuer: Others) -> None:
    gate = await serve_oauth(jwt={"issuers": (issuer.trusted(scopes=("tasks:read",)),)})

    for token in (issuer.sign(), issuer.sign(scope=None)):
        assert (await gate.call("GET", "/v1/tasks", token=token)).status == 200
        assert (await gate.call("GET", "/v1/receipts", token=token)).status == 403


@pytest.mark.parametrize("name", ["http://localhost", "https://issuer.example/one"])
def test_two_issuers_of_one_name_refuse_the_start(signing_key_path: Path, issuer: Others, name: str) -> None:
    twin = TrustedIssuer(issuer=name, jwks=str(issuer.path))

    with pytest.raises(StartupError, match="must all differ"):
        Gate(Settings(**oauth_settings(signing_key_path, jwt={"issuers": (issuer.trusted(), twin)})))


def test_with_oauth_the_signing_key_verifies_own_tokens_only(signing_key_path: Path) -> None:
    """The issuer of security.jwt may have other limits, so it has other keys."""
    tokens = Gate(Settings(**oauth_settings(signing_key_path))).identity.tokens

    assert tokens is not None
    assert {*tokens.issuers} == {"http://localhost"}
