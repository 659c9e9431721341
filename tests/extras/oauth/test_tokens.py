"""The token endpoint: what a code and a refresh token give, and what they do not (notes of threats D2 to D10)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.extras.oauth.wire import OAuthError
from asyncgate.parts.identity.limits.memory import MemoryLimits
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import RateLimiting
from tests.conftest import Served
from tests.extras.oauth.conftest import PUBLIC_URL, oauth_settings, write_signing_key
from tests.extras.oauth.granting import (
    CHALLENGE,
    FORM,
    REDIRECT,
    RESOURCE,
    VERIFIER,
    Program,
    challenge_of,
    claims_of,
    program_of,
    refusal,
    tokens,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def program(oauth_gate: Served) -> Program:
    """A client that Ada allows in."""
    return await program_of(oauth_gate)


async def test_a_code_gives_an_access_token_and_a_refresh_token(program: Program) -> None:
    got = tokens(await program.exchange(await program.code()))

    assert got.keys() == {"access_token", "token_type", "expires_in", "refresh_token", "scope"}
    assert (got["token_type"], got["scope"], got["expires_in"]) == (
        "Bearer", "tasks:read tasks:write", 30 * DAY_SECONDS)
    claims = claims_of(got["access_token"])
    assert claims.keys() >= {"sub", "tenant_id", "principal_kind", "principal_id", "exp", "iat", "iss", "aud", "jti"}
    assert (claims["iss"], claims["aud"]) == (PUBLIC_URL, ["asyncgate-api", RESOURCE])
    assert (claims["sid"], claims["sub"]) == ((await program.grant(got["refresh_token"])).grant_id, "user-of-app")
    assert (claims["principal_id"], claims["role"], claims["client_id"]) == ("ada", "agent", "app")
    assert await program.works(got["access_token"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"code_verifier": None}, "invalid_request"), ({"redirect_uri": None}, "invalid_request"),
    ({"code": None}, "invalid_request"), ({"grant_type": None}, "invalid_request"),
    ({"code_verifier": VERIFIER[:-1] + "x"}, "invalid_grant"), ({"code_verifier": CHALLENGE}, "invalid_grant"),
    ({"code_verifier": VERIFIER[:42]}, "invalid_grant"), ({"code_verifier": "v" * 129}, "invalid_grant"),
    ({"code_verifier": VERIFIER + "\n"}, "invalid_grant"), ({"redirect_uri": REDIRECT + "/"}, "invalid_grant"),
    ({"redirect_uri": REDIRECT.upper()}, "invalid_grant"), ({"resource": f"{PUBLIC_URL}/mcp/u"}, "invalid_target"),
    ({"resource": "https://elsewhere.example.com"}, "invalid_target"),
    ({"grant_type": "password"}, "unsupported_grant_type"),
    ({"grant_type": "client_credentials"}, "unsupported_grant_type"),
]


async def test_what_binds_a_code_is_checked_before_the_code_is_burnt(program: Program) -> None:
    """D2, D3, D10."""
    code = await program.code()

    refusals = {str(changed): refusal(await program.exchange(**{"code": code, **changed})) for changed, _ in WRONG}

    assert refusals == {str(changed): error for changed, error in WRONG}
    assert tokens(await program.exchange(code, resource=RESOURCE + "/"))


@pytest.mark.one_store
@pytest.mark.parametrize("length", [43, 128])
async def test_a_verifier_has_43_to_128_characters(program: Program, length: int) -> None:
    verifier = "~" * length
    code = await program.code(challenge=challenge_of(verifier))

    assert tokens(await program.exchange(code, code_verifier=verifier))


@pytest.mark.one_store
@pytest.mark.parametrize("verifier", ["v" * 42, "v" * 129, "v" * 42 + "!", "v" * 43 + "\n", "\u00e4" * 43])
async def test_a_verifier_that_is_none_is_refused_even_if_it_fits_the_challenge(program: Program,
                                                                               verifier: str) -> None:
    code = await program.code(challenge=challenge_of(verifier))

    assert refusal(await program.exchange(code, code_verifier=verifier)) == "invalid_grant"


@pytest.mark.one_store
async def test_a_verifier_without_a_challenge_is_refused(program: Program) -> None:
    """D2: a downgrade, in which somebody took the challenge out of the request."""
    assert refusal(await program.exchange(await program.code(challenge=""))) == "invalid_grant"


async def test_a_code_is_for_the_program_that_asked(program: Program) -> None:
    other, code = await program_of(program.served, "other"), await program.code()

    assert refusal(await other.exchange(code)) == "invalid_grant"

    assert tokens(await program.exchange(code))


async def test_a_code_that_is_used_again_ends_the_session(program: Program) -> None:
    code = await program.code()
    got = tokens(await program.exchange(code))
    assert await program.works(got["access_token"])

    assert refusal(await program.exchange(code)) == "invalid_grant"

    assert not await program.works(got["access_token"])
    assert refusal(await program.refresh(got["refresh_token"])) == "invalid_grant"
    [line] = await program.audit("code_replay")
    assert (line["severity"], line["details"]["about_client"]) == ("critical", "app")


async def test_of_two_exchanges_of_a_code_at_once_one_succeeds(program: Program) -> None:
    code = await program.code()

    answers = await asyncio.gather(*(program.exchange(code) for _ in range(2)))

    assert sorted(answer.status for answer in answers) == [200, 400]


async def test_an_unknown_code_ends_nothing(program: Program) -> None:
    """The id in a code is not secret, so whoever knows it must not be able to end the session."""
    got = tokens(await program.exchange(code := await program.code()))

    for invented in (code[:41] + "A" * 43, code[:-1], "agc_", code.replace("agc_", "agr_"), "x", "agc_" + "0" * 79):
        assert refusal(await program.exchange(invented)) == "invalid_grant"

    assert tokens(await program.refresh(got["refresh_token"]))


async def test_a_refresh_token_gives_a_new_pair(program: Program) -> None:
    first = await program.begin()

    second = tokens(await program.refresh(first["refresh_token"], resource=RESOURCE))
    third = tokens(await program.refresh(second["refresh_token"]))

    assert len({pair["refresh_token"] for pair in (first, second, third)}) == 3
    assert len({claims_of(pair["access_token"])["jti"] for pair in (first, second, third)}) == 3
    assert len({claims_of(pair["access_token"])["sid"] for pair in (first, second, third)}) == 1


async def test_five_uses_of_one_refresh_token_at_once_give_one_successor(program: Program) -> None:
    got = await program.begin()

    answers = await asyncio.gather(*(program.refresh(got["refresh_token"]) for _ in range(5)))

    [successor] = {tokens(answer)["refresh_token"] for answer in answers}
    assert (await program.grant(successor)).rotations == 1
    assert tokens(await program.refresh(successor))


async def test_a_program_that_lost_the_answer_asks_again(program: Program) -> None:
    got = await program.begin()
    lost = await program.refresh(got["refresh_token"])

    again = tokens(await program.refresh(got["refresh_token"]))

    assert again["refresh_token"] == tokens(lost)["refresh_token"]


async def test_a_used_refresh_token_ends_the_family_after_the_grace(serve_oauth: Callable[..., Any]) -> None:
    program = await program_of(await serve_oauth({"refresh_grace_seconds": 0}))
    got = await program.begin()
    successor = tokens(await program.refresh(got["refresh_token"]))["refresh_token"]

    assert refusal(await program.refresh(got["refresh_token"])) == "invalid_grant"

    assert not await program.works(got["access_token"])
    assert refusal(await program.refresh(successor)) == "invalid_grant"
    [line] = await program.audit("refresh_replay")
    assert line["severity"] == "critical"
    assert (await program.grant(successor)).ended_why == "refresh_replay"


@pytest.mark.one_store
async def test_form_and_method_of_a_request(program: Program) -> None:
    """D6."""
    code, served = await program.code(), program.served
    twice = b"grant_type=authorization_code&grant_type=authorization_code"

    got = await served.call("GET", "/oauth/token", token=None)
    json = await served.call("POST", "/oauth/token", {"grant_type": "refresh_token"}, token=None)
    repeated = await served.call("POST", "/oauth/token", twice, token=None, headers=[FORM])
    in_url = await program.post(f"/oauth/token?code={code}", {"grant_type": "authorization_code"})

    assert got.status == 405
    assert [refusal(answer) for answer in (json, repeated, in_url)] == ["invalid_request"] * 3


BEHIND = ("127.0.0.1",)     # a proxy that says where its clients are


async def test_a_used_refresh_token_from_another_network_ends_the_family(serve_oauth: Callable[..., Any]) -> None:
    program = await program_of(await serve_oauth(trusted_proxies=BEHIND))
    got = await program.begin()
    successor = tokens(await program.refresh(got["refresh_token"], "192.0.2.7"))["refresh_token"]

    near = tokens(await program.refresh(got["refresh_token"], "192.0.2.99"))
    far = refusal(await program.refresh(got["refresh_token"], "198.51.100.7"))

    assert (near["refresh_token"], far) == (successor, "invalid_grant")
    assert (await program.grant(successor)).ended_why == "refresh_replay"
    assert len(await program.audit("unusual_address")) == 1


async def test_a_used_refresh_token_of_another_program_ends_the_family(program: Program) -> None:
    other, got = await program_of(program.served, "other"), await program.begin()

    assert refusal(await other.refresh(got["refresh_token"])) == "invalid_grant"      # in force: only refused
    successor = tokens(await program.refresh(got["refresh_token"]))["refresh_token"]
    assert refusal(await other.refresh(got["refresh_token"])) == "invalid_grant"

    assert (await program.grant(successor)).ended_why == "refresh_replay"


async def test_a_refresh_token_from_long_ago_ends_the_family(program: Program) -> None:
    """The gate has only the last two hashes: it knows older tokens by their mark."""
    first = (await program.begin())["refresh_token"]
    second = tokens(await program.refresh(first))["refresh_token"]
    third = tokens(await program.refresh(second))["refresh_token"]
    invented = [first[:41] + "A" * 43 + first[84:], first[:-1] + ("A" if first[-1] != "A" else "Q")]

    assert [refusal(await program.refresh(token)) for token in invented] == ["invalid_grant"] * 2
    fourth = tokens(await program.refresh(third))["refresh_token"]
    assert refusal(await program.refresh(first)) == "invalid_grant"

    assert (await program.grant(fourth)).ended_why == "refresh_replay"
    assert refusal(await program.refresh(fourth)) == "invalid_grant"


async def test_after_a_rotation_of_the_signing_key_a_used_token_ends_nothing(
        serve_oauth: Callable[..., Any], tmp_path: Path) -> None:
    path = write_signing_key(tmp_path / "own.pem")
    program = await program_of(await serve_oauth(jwt={"private_key_path": str(path)}))
    got = await program.begin()
    successor = tokens(await program.refresh(got["refresh_token"]))["refresh_token"]
    os.replace(write_signing_key(tmp_path / "next.pem"), path)
    program.served.gate.joined["oauth"].keys.look()

    assert refusal(await program.refresh(got["refresh_token"])) == "invalid_grant"

    assert tokens(await program.refresh(successor))


async def test_a_refresh_may_ask_for_fewer_scopes_and_never_for_more(program: Program) -> None:
    """B5."""
    got = await program.begin()

    more = await program.refresh(got["refresh_token"], scope="tasks:read admin:write")
    fewer = tokens(await program.refresh(got["refresh_token"], scope="tasks:read"))
    all_again = tokens(await program.refresh(fewer["refresh_token"]))

    assert refusal(more) == "invalid_scope"
    assert [pair["scope"] for pair in (fewer, all_again)] == ["tasks:read", "tasks:read tasks:write"]
    assert claims_of(fewer["access_token"])["scope"] == "tasks:read"


ENDS: list[dict[str, Any]] = [
    {"user": {"disabled_at": 1.0}}, {"user": {"role": "admin"}}, {"user": {"principal_id": "eve"}},
    {"user": {"tenant": "6f1c2b9e-0000-4000-8000-00000000000a"}}, {"user": {"scopes": '["receipts:read"]'}},
    {"client": {"disabled_at": 1.0}}, {"client": {"tenant": "6f1c2b9e-0000-4000-8000-00000000000b"}},
    {"client": {"scopes": '["receipts:read"]'}},
]


@pytest.mark.parametrize("changes", ENDS, ids=str)
async def test_a_session_gives_nothing_once_person_or_program_may_not(program: Program, changes: Any) -> None:
    """D4."""
    code, got = await program.code(), await program.begin()
    await program.keep(**changes)

    refused = [await program.refresh(got["refresh_token"]), await program.exchange(code)]

    assert all(answer.status in (400, 401) for answer in refused), refused
    assert {answer.json()["error"] for answer in refused} <= {"invalid_grant", "invalid_client", "invalid_scope"}


async def test_a_session_of_a_suspended_or_removed_tenant_gives_nothing(program: Program) -> None:
    tenant, served = "6f1c2b9e-0000-4000-8000-00000000000a", program.served
    await served.post("/v1/tenants", {"tenant": tenant, "name": "a room"})
    theirs = await program_of(served, "theirs", user={"tenant": tenant})
    nowhere = await program_of(served, "nowhere", user={"tenant": tenant[:-1] + "b"})
    got, code = await theirs.begin(), await nowhere.code()

    await served.post(f"/v1/tenants/{tenant}/suspend", {})
    suspended = await theirs.refresh(got["refresh_token"])
    await served.post(f"/v1/tenants/{tenant}/suspend", {"suspended": False})
    again = tokens(await theirs.refresh(got["refresh_token"]))
    await served.post("/v1/credentials/rotate", {"tenant": tenant})
    rotated = await theirs.refresh(again["refresh_token"])

    assert [refusal(answer) for answer in (suspended, rotated, await nowhere.exchange(code))] == ["invalid_grant"] * 3


async def test_a_code_expires_after_a_minute_and_a_session_at_its_end(program: Program) -> None:
    served, code, got = program.served, await program.code(), await program.begin()
    by_code, by_token = await program.grant(code), await program.grant(got["refresh_token"])
    now = served.backend.now()
    assert 0 < by_code.code_until - by_code.created_at <= 60
    assert by_token.ends_at - by_token.created_at == 90 * DAY_SECONDS

    def age(work: Any) -> None:
        work.keep_record(replace(by_code, code_until=now))
        work.keep_record(replace(by_token, ends_at=now))
    await served.gate.joined["oauth"].directory.change(age)

    assert refusal(await program.exchange(code)) == "invalid_grant"
    assert refusal(await program.refresh(got["refresh_token"])) == "invalid_grant"


async def test_no_token_outlives_its_session(serve_oauth: Callable[..., Any]) -> None:
    program = await program_of(await serve_oauth(jwt={"refresh_token_ttl_days": 1}))

    got = await program.begin()

    ends_at = (await program.grant(got["refresh_token"])).ends_at
    assert claims_of(got["access_token"])["exp"] == ends_at < program.served.backend.now() + DAY_SECONDS


@pytest.mark.one_store
@pytest.mark.parametrize(("client", "user", "days"), [(None, None, 30), (7, None, 7), (None, 9, 9), (60, 9, 9)])
async def test_the_life_of_an_access_token_is_the_programs_or_the_persons(
        program: Program, client: int | None, user: int | None, days: int) -> None:
    await program.keep(client={"access_days": client}, user={"access_days": user})

    assert (await program.begin())["expires_in"] == days * DAY_SECONDS


@pytest.mark.one_store
async def test_a_refresh_for_a_resource_that_is_not_served_any_more_is_refused(program: Program) -> None:
    got = await program.begin()
    row = replace(await program.grant(got["refresh_token"]), resource="http://localhost/elsewhere")
    await program.served.gate.joined["oauth"].directory.change(
        lambda work: work.keep_record(row))

    assert refusal(await program.refresh(got["refresh_token"])) == "invalid_grant"


@pytest.mark.one_store
async def test_a_program_gets_what_it_asked_for_and_no_more_than_person_and_program_have(program: Program) -> None:
    await program.keep(client={"scopes": '["tasks:read","tasks:lease"]'},
                       user={"scopes": '["tasks:read","admin:read"]'})

    got = await program.begin(scopes=frozenset({"tasks:read", "tasks:lease", "admin:read"}))

    assert got["scope"] == "tasks:read"
    with pytest.raises(OAuthError, match="nothing is left"):
        await program.code(scopes=frozenset({"tasks:lease"}))
    await program.keep(client={"tenant": "6f1c2b9e-0000-4000-8000-00000000000b"})
    with pytest.raises(OAuthError, match="another tenant"):
        await program.code()


@pytest.fixture
async def limited(serve_oauth: Callable[..., Any], signing_key_path: Path) -> Program:
    """A client of a gate where an address may make two calls a minute without a credential."""
    security = oauth_settings(signing_key_path)["security"]
    limits = RateLimiting(enabled=True, anonymous_calls_per_minute=2, default_tier="enterprise")
    return await program_of(await serve_oauth(security=replace(security, rate_limiting=limits)))


async def test_a_call_over_the_limit_spends_no_code_and_no_refresh_token(limited: Program) -> None:
    code, guard = await limited.code(), limited.served.gate.guard
    for _ in range(2):
        await limited.served.call("GET", "/nothing", token=None)

    over = await limited.exchange(code)
    guard.limits = MemoryLimits()       # a minute later
    got = tokens(await limited.exchange(code))
    await limited.served.call("GET", "/nothing", token=None)
    over_again = await limited.refresh(got["refresh_token"])
    guard.limits = MemoryLimits()

    assert (over.status, over_again.status) == (429, 429)
    assert over.headers["retry-after"]
    assert over.json()["error"] == "temporarily_unavailable"
    session = await limited.grant(got["refresh_token"])
    assert session.rotations == 0
    tokens(await limited.refresh(got["refresh_token"]))
