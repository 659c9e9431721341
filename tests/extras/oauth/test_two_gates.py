"""Two gates on one database: what one of them grants, the other one knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.plugin import database_of
from tests.extras.oauth.granting import Program, program_of, refusal, tokens

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a database that several gates may share."""
    return database_of("postgres:", request.config, tmp_path)


@pytest.fixture
async def programs(serve_oauth: Callable[..., Any]) -> list[Program]:
    """One client, as it talks to each of two gates."""
    program = await program_of(await serve_oauth(instance_id="one"))
    return [program, program.at(await serve_oauth(instance_id="two"))]


async def test_a_code_of_one_gate_is_exchanged_at_the_other_and_only_once(programs: list[Program]) -> None:
    here, there = programs
    code = await here.code()

    answers = await asyncio.gather(*(program.exchange(code) for program in [there, here] * 2))

    [got] = [tokens(answer) for answer in answers if answer.status == 200]
    assert refusal(await here.refresh(got["refresh_token"])) == "invalid_grant"      # the code was in two hands
    got = tokens(await there.exchange(await here.code()))
    assert [await program.works(got["access_token"]) for program in programs] == [True, True]


async def test_a_refresh_token_at_both_gates_at_once_has_one_successor(programs: list[Program]) -> None:
    here, there = programs
    got = await here.begin()

    answers = await asyncio.gather(*(program.refresh(got["refresh_token"]) for program in [here, there] * 3))

    [successor] = {tokens(answer)["refresh_token"] for answer in answers}
    assert (await there.grant(successor)).rotations == 1
    assert tokens(await there.refresh(successor))


async def test_a_session_that_ends_at_one_gate_gives_nothing_at_the_other(programs: list[Program]) -> None:
    here, there = programs
    got = await here.begin()

    await there.post("/oauth/revoke", {"token": got["refresh_token"], "client_id": "app"})

    assert refusal(await here.refresh(got["refresh_token"])) == "invalid_grant"
