"""Any sequence of uses of refresh tokens, against a model of a family in ten lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncgate.backends import open_backend
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import Jwt, OAuth, SecuritySettings
from tests.conftest import TOKEN, Served
from tests.extras.oauth.conftest import PUBLIC_URL
from tests.extras.oauth.granting import Program, program_of

GRACE_SECONDS = 30
NEAR, FAR = "192.0.2.7", "198.51.100.7"
STEPS = st.lists(st.tuples(st.sampled_from(["here", "here", "elsewhere", "other client", "later"]),
                           st.integers(0, 3)), max_size=12)


class Family:
    """What a family of refresh tokens must do; tokens are numbered from the newest, which is 0."""

    def __init__(self, first: str) -> None:
        self.tokens, self.ended, self.in_grace, self.place = [first], False, False, NEAR

    def use(self, how: str, token: str) -> str | None:
        """Return what a use gives: "" for a new token, the successor that it gives again, or None for a refusal."""
        age, place = self.tokens.index(token), FAR if how == "elsewhere" else NEAR
        if self.ended or (age == 0 and how == "other client"):
            return None
        if age == 0:
            self.in_grace, self.place = True, place
            return ""
        if age == 1 and self.in_grace and place == self.place and how != "other client":
            return self.tokens[0]
        self.ended = True
        return None


async def follow(program: Program, other: Program, steps: list[tuple[str, int]]) -> None:
    """Take the steps at the gate and in the model."""
    family = Family((await program.begin())["refresh_token"])
    for how, age in steps:
        if how == "later":
            await let_grace_end(program, family)
            continue
        token = family.tokens[min(age, len(family.tokens) - 1)]
        by = other if how == "other client" else program
        answer = await by.refresh(token, FAR if how == "elsewhere" else NEAR)
        expected = family.use(how, token)
        assert (answer.status == 200) is (expected is not None), (how, age, answer)
        if expected is not None:
            given = answer.json()["refresh_token"]
            assert given == expected if expected else given not in family.tokens
            family.tokens = family.tokens if expected else [given, *family.tokens]
    assert (await program.grant(family.tokens[0])).ended_at is None or family.ended


async def let_grace_end(program: Program, family: Family) -> None:
    """Move the last rotation into the past."""
    grant, oauth = await program.grant(family.tokens[0]), program.served.gate.joined["oauth"]
    assert oauth is not None
    if grant.rotated_at is not None:
        aged = replace(grant, rotated_at=grant.rotated_at - GRACE_SECONDS)
        await oauth.directory.change(lambda work: work.keep_record(aged))
    family.in_grace = False


def test_a_family_of_refresh_tokens_does_what_its_model_does(signing_key_path: Path) -> None:
    security = SecuritySettings(oauth=OAuth(enabled=True, refresh_grace_seconds=GRACE_SECONDS),
                                jwt=Jwt(private_key_path=str(signing_key_path)))

    async def begin() -> tuple[Program, Program]:
        gate = Gate(settings_for_tests(api_key=TOKEN, public_url=PUBLIC_URL, security=security,
                                       trusted_proxies=("127.0.0.1",)), await open_backend("memory:"))
        lives.append(gate.app.router.lifespan_context(gate.app))
        await lives[0].__aenter__()
        return await program_of(Served(gate)), await program_of(Served(gate), "other")

    lives: list[Any] = []
    with asyncio.Runner() as runner:
        program, other = runner.run(begin())

        @settings(max_examples=60, deadline=None)
        @given(STEPS)
        def agree(steps: list[tuple[str, int]]) -> None:
            runner.run(follow(program, other, steps))

        agree()
        runner.run(lives[0].__aexit__(None, None, None))
