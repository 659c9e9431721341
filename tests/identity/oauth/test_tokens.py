"""The token endpoint: what a code and a refresh token give, and what they do not (notes of threats D2 to D10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.parts.model.durations import DAY_SECONDS
from tests.conftest import Served
from tests.identity.oauth.conftest import PUBLIC_URL
from tests.identity.oauth.granting import (
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
    """A program that Ada allows in."""
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

    found = {str(changed): refusal(await program.exchange(**{"code": code, **changed})) for changed, _ in WRONG}

    assert found == {str(changed): error for changed, error in WRONG}
    assert tokens(await program.exchange(code, resource=RESOURCE + "/"))


@pytest.mark.parametrize("length", [43, 128])
async def test_a_verifier_has_43_to_128_characters(program: Program, length: int) -> None:
    verifier = "~" * length
    code = await program.code(challenge=challenge_of(verifier))

    assert tokens(await program.exchange(code, code_verifier=verifier))


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

    assert len({one["refresh_token"] for one in (first, second, third)}) == 3
    assert len({claims_of(one["access_token"])["jti"] for one in (first, second, third)}) == 3
    assert len({claims_of(one["access_token"])["sid"] for one in (first, second, third)}) == 1


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
