"""Access tokens that are refused before they expire: seen by every gate within five seconds, and stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Caller
from asyncgate.backends import open_backend
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.revocations import (
    REVOCATION_KEYS,
    REVOCATIONS_SECONDS,
    RevocationSet,
    drop_expired,
    name_principal,
    name_token,
    revoke,
)
from asyncgate.parts.model.caller import ShownToken
from asyncgate.parts.model.errors import DatabaseUnavailable, GateError
from asyncgate.parts.model.stored_oauth import Revocation, RevocationHead
from asyncgate.parts.model.wire import Principal
from tests.conftest import Serve, Served
from tests.extras.oauth.conftest import mint
from tests.support.identity_tools import HOME, House

pytestmark = pytest.mark.anyio

DAY = 86_400


class Clock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watch(served: Served) -> tuple[RevocationSet, Clock]:
    """Let a gate look at revocations by a clock that the test moves."""
    known, clock = served.gate.guard.revocations, Clock()
    assert known is not None
    known.clock = clock
    return known, clock


async def take_back(served: Served, kind: Any, subject: str, life: float = DAY) -> Revocation:
    """Revoke at one gate."""
    until = served.backend.now() + life
    return await Directory(served.engine).change(
        lambda work: revoke(work, kind, subject, until, "the test", None), *REVOCATION_KEYS)


async def ask(served: Served, token: str, path: str = "/v1/tasks") -> int:
    return (await served.call("GET", path, token=token)).status


@pytest.fixture
async def neighbour(serve: Serve, oauth_gate: Served, url: str) -> AsyncIterator[Served]:
    """A second gate on the same database; a SQLite file has one gate, so there it shares the open file."""
    from asyncgate.parts.app import Gate

    backend = oauth_gate.backend if url.startswith("sqlite") else await open_backend(url)
    gate = Gate(oauth_gate.gate.settings, backend)
    if url.startswith("sqlite"):
        gate._add_parts(type(oauth_gate.engine)(backend, gate.settings))
        async with gate.guard:
            yield Served(gate)
    else:
        async with gate.app.router.lifespan_context(gate.app):
            yield Served(gate)


KINDS = {"token": "token-1", "session": "session-1", "client": "client-1", "user": "user-1",
         "principal": name_principal(HOME, "human", "ada")}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_one_gate_revokes_the_other_refuses_within_five_seconds(
        oauth_gate: Served, neighbour: Served, kind: str) -> None:
    token = mint(oauth_gate)
    _, clock = watch(neighbour)
    assert [await ask(gate, token) for gate in (oauth_gate, neighbour)] == [200, 200]

    await take_back(oauth_gate, kind, KINDS[kind])

    assert await ask(oauth_gate, token) == 401
    clock.now += REVOCATIONS_SECONDS
    assert await ask(neighbour, token) == 401


async def test_other_tokens_stay_good(oauth_gate: Served) -> None:
    for kind, subject in KINDS.items():
        await take_back(oauth_gate, kind, f"{subject}-of-others")

    assert await ask(oauth_gate, mint(oauth_gate)) == 200


async def test_a_revocation_in_one_tenant_ends_no_token_of_another(oauth_gate: Served) -> None:
    """Two issuers may use the same jti."""
    await take_back(oauth_gate, "token", name_token("6f1c2b9e-0000-4000-8000-00000000000a", "token-1"))
    assert await ask(oauth_gate, mint(oauth_gate)) == 200

    await take_back(oauth_gate, "token", name_token(HOME, "token-1"))
    assert await ask(oauth_gate, mint(oauth_gate)) == 401


@pytest.mark.parametrize(("kind", "later"), [("client", 200), ("user", 200), ("principal", 200), ("session", 401)])
async def test_who_signs_in_again_gets_good_tokens_but_an_ended_session_stays_ended(
        oauth_gate: Served, kind: str, later: int) -> None:
    row = await take_back(oauth_gate, kind, KINDS[kind])

    assert await ask(oauth_gate, mint(oauth_gate, iat=row.since - 0.001)) == 401
    assert await ask(oauth_gate, mint(oauth_gate, iat=row.since)) == later


async def test_without_the_database_no_token_is_accepted(oauth_gate: Served) -> None:
    token, (known, clock) = mint(oauth_gate), watch(oauth_gate)
    assert await ask(oauth_gate, token) == 200

    async def unreachable(*_: Any) -> Any:
        raise DatabaseUnavailable("the database does not answer")
    known.directory.page = unreachable      # type: ignore[method-assign, assignment]
    assert await ask(oauth_gate, token) == 200
    clock.now += REVOCATIONS_SECONDS

    refused = await oauth_gate.call("GET", "/v1/tasks", token=token)
    assert (refused.status, refused.json()["error"]) == (503, "database_unavailable")


async def test_all_who_wait_share_one_look_and_only_new_rows_are_read(oauth_gate: Served) -> None:
    known, clock = watch(oauth_gate)
    first = await take_back(oauth_gate, "token", "one")
    asked: list[str] = []
    page = known.directory.page

    async def counting(kind: Any, after: str = "") -> Any:
        asked.append(after)
        return await page(kind, after)
    known.directory.page = counting     # type: ignore[method-assign]

    clock.now += REVOCATIONS_SECONDS
    await asyncio.gather(*(known.freshen() for _ in range(20)))
    clock.now += REVOCATIONS_SECONDS
    await known.freshen()

    assert asked == ["", first.revocation_id, first.revocation_id]


async def test_a_waiting_call_is_refused_when_its_token_is_revoked_meanwhile(oauth_gate: Served) -> None:
    token = mint(oauth_gate)
    tokens = oauth_gate.gate.identity.tokens
    assert tokens is not None
    caller = await tokens.caller(token)
    assert caller is not None
    await oauth_gate.engine.check_caller(caller)

    await take_back(oauth_gate, "session", "session-1")

    with pytest.raises(GateError, match="revoked") as refused:
        await oauth_gate.engine.check_caller(caller)
    assert refused.value.status == 401


async def test_use_after_a_logout_is_on_record_in_the_tenant(oauth_gate: Served) -> None:
    house, token = House(oauth_gate), mint(oauth_gate)
    await take_back(oauth_gate, "session", "session-1")

    assert await ask(oauth_gate, token) == 401

    [line] = await house.audit(event="revoked_token_used")
    assert (line["severity"], line["principal_id"], line["details"]["revoked"]) == ("warning", "ada", "session")


async def test_expired_revocations_are_deleted_and_no_number_is_given_twice(oauth_gate: Served) -> None:
    directory = Directory(oauth_gate.engine)
    for subject in ("one", "two"):
        await take_back(oauth_gate, "token", subject, life=-1.0)
    await take_back(oauth_gate, "token", "three")

    await drop_expired(oauth_gate.engine)       # upkeep of the running gate may have been there before

    assert [row.subject for row in await directory.page(Revocation)] == ["three"]
    assert (await take_back(oauth_gate, "token", "four")).number == 4
    assert await directory.find(RevocationHead) == RevocationHead(4)


@pytest.mark.one_store
async def test_the_set_forgets_what_has_expired(oauth_gate: Served) -> None:
    known, clock = watch(oauth_gate)
    await take_back(oauth_gate, "token", "one", life=-1.0)
    await take_back(oauth_gate, "token", "two")

    clock.now += REVOCATIONS_SECONDS
    await known.freshen()

    assert {*known.known} == {("token", "two")}


@pytest.mark.one_store
async def test_who_has_shown_no_token_is_never_revoked(oauth_gate: Served) -> None:
    known, _ = watch(oauth_gate)
    await take_back(oauth_gate, "principal", KINDS["principal"])
    caller = Caller(HOME, Principal("human", "ada"), "agent", frozenset())

    assert known.find(caller) is None
    assert known.find(replace(caller, token=ShownToken("x", None, None, None))) == "principal"
