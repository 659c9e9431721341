"""Sessions of people with clients: who sees them, who ends them, and what is on record of them (spec 21.9.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.parts.model.console import CONSOLE_CLIENT
from asyncgate.parts.model.settings import ConsoleSettings
from asyncgate.parts.model.stored_oauth import Consent
from tests.conftest import TOKEN, Served
from tests.extras.oauth.granting import REDIRECT, Program, claims_of, program_of, refusal, tokens
from tests.support.console_page import ConsolePage
from tests.support.identity_tools import FACADES, House, Told

pytestmark = pytest.mark.anyio

ROOM = "6f1c2b9e-0000-4000-8000-00000000000a"


@pytest.fixture
async def program(serve_oauth: Callable[..., Any]) -> Program:
    """A client that Ada allows in, at a gate with the console."""
    return await program_of(await serve_oauth(console=ConsoleSettings(enabled=True)))


async def allow(program: Program) -> None:
    """Write down that the person lets the client in."""
    oauth = program.served.gate.joined["oauth"]
    consent = Consent(program.user.user_id, program.client.client_id, '["tasks:read"]', REDIRECT,
                      program.served.backend.now())
    await oauth.directory.change(lambda work: work.keep_record(consent))


async def another(program: Program, name: str, principal: str, **user: Any) -> Program:
    """Return another person with another client."""
    return await program_of(program.served, name, user={"principal_id": principal, **user})


async def ask(program: Program, method: str, path: str, token: str, body: Any = None) -> Any:
    """Ask for an operation with an access token; return the body, or the code of the refusal."""
    answer = await program.served.call(method, path, body, token=token)
    return answer.json() if answer.status == 200 else answer.json()["error"]


async def room(served: Served, role: str = "admin", **more: Any) -> str:
    """Make another tenant; return a key of its admin."""
    await served.post("/v1/tenants", {"tenant": ROOM, "name": "a room"})
    issued = await served.post("/v1/keys", {"name": "root", "principal_kind": "human", "principal_id": "root",
                                            "role": role, "tenant": ROOM, **more})
    return str(issued["api_key"])


async def in_console(program: Program) -> str:
    """Let the person of a client sign in to the console with the account; return the access token."""
    console = await program_of(program.served, CONSOLE_CLIENT, user={
        "user_id": program.user.user_id, "principal_id": program.user.principal_id})
    return str((await console.begin())["access_token"])


async def test_a_person_sees_and_ends_its_own_sessions_and_no_others(program: Program) -> None:
    ada, bob = await program.begin(), await (await another(program, "bobs", "bob")).begin()
    others, here = claims_of(bob["access_token"])["sid"], await in_console(program)

    listed = await ask(program, "GET", "/v1/sessions", here)
    foreign = await ask(program, "POST", "/v1/sessions/end", here, {"session_id": others})
    [mine] = [session for session in listed["sessions"] if session["session_id"] != claims_of(here)["sid"]]
    own = await ask(program, "POST", "/v1/sessions/end", here, {"session_id": mine["session_id"]})

    assert (mine["client_name"], mine["principal_id"]) == ("An app", "ada")
    assert mine["scopes"] == ["tasks:read", "tasks:write"]
    assert (foreign, own) == ("session_not_found", {"ok": True})
    assert not await program.works(ada["access_token"])
    assert refusal(await program.refresh(ada["refresh_token"])) == "invalid_grant"
    assert await program.works(bob["access_token"])


@pytest.mark.parametrize("facade", FACADES)
async def test_a_program_sees_and_ends_its_own_session_only(program: Program, facade: str) -> None:
    second = await program_of(program.served, "second", user={"user_id": program.user.user_id})
    house = House(program.served, TOKEN)
    narrow = (await program.begin(scopes=frozenset({"tasks:read"})))["access_token"]
    other, twin = [(await client.begin())["access_token"] for client in (second, program)]
    own, *others = [claims_of(token)["sid"] for token in (narrow, other, twin)]

    async def ask(name: str, **fields: Any) -> Told:
        told: Told = await house.ask(name, fields, token=narrow, facade=facade)
        return told

    listed = [await ask("list_sessions", **more) for more in ({}, {"user_id": program.user.user_id})]
    foreign = [await ask("end_session", session_id=session) for session in others]
    refused = [await ask(name, **about, **more) for name, about in [
        ("sign_out_everywhere", {}), ("list_consents", {}), ("withdraw_consent", {"client_id": "second"}),
        ("withdraw_consent", {"client_id": "app"})] for more in ({}, {"user_id": program.user.user_id})]
    left = [await program.works(token) for token in (narrow, other, twin)]
    mine = await ask("end_session", session_id=own)

    assert [[session["session_id"] for session in told.body["sessions"]] for told in listed] == [[own]] * 2
    assert [told.code for told in foreign] == ["session_not_found"] * 2
    assert [told.code for told in refused] == ["forbidden"] * 8
    assert left == [True] * 3
    assert mine.code == ""
    assert [await program.works(token) for token in (narrow, other, twin)] == [False, True, True]


async def test_a_session_of_the_console_that_a_program_has_begun_is_no_person(serve_oauth: Callable[..., Any]) -> None:
    program = await program_of(await serve_oauth(console=ConsoleSettings(enabled=True)))
    page = ConsolePage(program.served)
    await page.sign_in((await program.begin(scopes=frozenset({"tasks:read"})))["access_token"])
    other = (await program.begin())["access_token"]

    answers = [await page.call("POST", "/v1/sign-out", {}), await page.call("GET", "/v1/consents")]

    assert [answer.status for answer in answers] == [403, 403]
    assert await program.works(other)


async def test_a_program_with_the_scopes_of_an_admin_manages_sessions_as_an_admin(program: Program) -> None:
    boss = await another(program, "boss", "boss", role="admin")
    reader, root = [(await boss.begin(scopes=frozenset(scopes)))["access_token"] for scopes in (
        {"admin:read"}, {"admin:read", "admin:write"})]
    got = await program.begin()
    about = {"user_id": program.user.user_id}

    seen = [await ask(program, "GET", f"/v1/{name}?user_id={program.user.user_id}", reader)
            for name in ("sessions", "consents")]
    told = [await ask(program, "POST", "/v1/sign-out", token, about) for token in (reader, root)]

    assert [len(seen[0]["sessions"]), seen[1]["consents"]] == [1, []]
    assert told == ["forbidden", {"sessions_ended": 1}]
    assert not await program.works(got["access_token"])


async def test_an_admin_ends_the_sessions_of_its_own_tenant_only(program: Program) -> None:
    root, reader = await room(program.served), await room(program.served, scopes=["admin:read"])
    ours, theirs = await program.begin(), await (await another(program, "theirs", "eve", tenant=ROOM)).begin()
    sessions = [claims_of(session["access_token"])["sid"] for session in (ours, theirs)]

    seen = [session["session_id"] for session in (await ask(program, "GET", "/v1/sessions", root))["sessions"]]
    told = [await ask(program, "POST", "/v1/sessions/end", key, {"session_id": session, "reason": "she left"})
            for session in sessions for key in (reader, root)]
    everybody = [session["session_id"] for session in (await program.served.get("/v1/sessions"))["sessions"]]

    assert seen == sessions[1:]
    assert told == ["session_not_found", "session_not_found", "forbidden", {"ok": True}]
    assert sorted(everybody) == sorted(sessions)
    assert await program.works(ours["access_token"])
    assert not await program.works(theirs["access_token"])
    lines = (await ask(program, "GET", "/v1/audit?event=session_ended", root))["lines"]
    assert [(line["reason"], line["details"]["about_session"]) for line in lines] == [("she left", sessions[1])]


async def test_signing_out_everywhere_ends_all_sessions_of_a_person_and_a_new_sign_in_is_good(program: Program) -> None:
    second = await program_of(program.served, "second", user={"user_id": program.user.user_id})
    first, other = await program.begin(), await second.begin()
    bob = await (await another(program, "bobs", "bob")).begin()
    claims = {**claims_of(first["access_token"]), "sid": "no longer kept", "jti": "another"}
    loose = program.served.gate.joined["oauth"].keys.sign(claims)
    assert await program.works(loose)

    done = await ask(program, "POST", "/v1/sign-out", await in_console(program), {})
    again = await program.begin()

    assert done == {"sessions_ended": 3}
    assert not await program.works(loose)
    assert [await program.works(session["access_token"]) for session in (first, other, bob, again)] == [
        False, False, True, True]


async def test_an_admin_signs_a_user_out_and_a_stranger_does_not(program: Program) -> None:
    root, got = await room(program.served), await program.begin()
    user = {"user_id": program.user.user_id}

    foreign = await ask(program, "POST", "/v1/sign-out", root, user)
    unnamed = await program.served.call("POST", "/v1/sign-out", {})
    assert await program.works(got["access_token"])
    done = await program.served.post("/v1/sign-out", user)

    assert (foreign, unnamed.json()["error"], done) == ("user_not_found", "invalid_request", {"sessions_ended": 1})
    assert not await program.works(got["access_token"])


async def test_a_withdrawn_consent_is_gone_and_ends_the_sessions_with_that_program(program: Program) -> None:
    second = await program_of(program.served, "second", user={"user_id": program.user.user_id})
    for client in (program, second):
        await allow(client)
    await allow(await another(program, "bobs", "bob"))
    first, other = await program.begin(), await second.begin()

    here = await in_console(program)

    listed = await ask(program, "GET", "/v1/consents", here)
    done = await ask(program, "POST", "/v1/consents/withdraw", here, {"client_id": "app"})
    left = await ask(program, "GET", "/v1/consents", here)

    assert sorted(consent["client_id"] for consent in listed["consents"]) == ["app", "second"]
    assert (done, [consent["client_id"] for consent in left["consents"]]) == ({"sessions_ended": 1}, ["second"])
    assert [await program.works(session["access_token"]) for session in (first, other)] == [False, True]


async def test_what_was_done_with_a_token_and_in_a_session_is_on_record(program: Program) -> None:
    """21.9.1: list all operations made with one token or key."""
    got = await program.begin()
    more = tokens(await program.refresh(got["refresh_token"]))
    task = await program.served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, token=got["access_token"])
    await program.works(more["access_token"])
    program.served.gate.guard.auditor.count()
    await program.audit()
    claims = claims_of(got["access_token"])

    by_token = (await program.served.get(f"/v1/audit?token_id={claims['jti']}"))["lines"]
    by_session = (await program.served.get(f"/v1/audit?session_id={claims['sid']}&limit=100"))["lines"]

    [used] = [line["details"] for line in by_token if line["event"] == "token_used"]
    assert (used["operations"], used["tasks"]) == ({"create_task": 1}, [task.json()["task_id"]])
    assert {line["event"] for line in by_session} >= {
        "session_allowed", "session_begun", "token_refreshed", "auth_success", "token_used"}
    assert len([line for line in by_session if line["event"] == "token_used"]) == 2


async def test_a_program_gives_back_its_tokens(program: Program) -> None:
    """RFC 7009."""
    got, kept = await program.begin(), await program.begin()
    other = await program_of(program.served, "other")

    async def revoke(token: str, by: Program = program, **more: Any) -> int:
        answer = await by.post("/oauth/revoke", {"token": token, "client_id": by.client.client_id, **more})
        return answer.status

    assert [await revoke(token, by=other) for token in (got["refresh_token"], got["access_token"])] == [400, 400]
    assert await program.works(got["access_token"])
    invented = got["refresh_token"][:41] + "A" * 43 + got["refresh_token"][84:]
    assert [await revoke(token) for token in ("x", invented, "agr_", "eyJ.e30.x", got["access_token"] + "x")
            ] == [200] * 5
    assert await program.works(got["access_token"])
    assert await revoke(got["access_token"], token_type_hint="refresh_token") == 200
    assert not await program.works(got["access_token"])
    again = tokens(await program.refresh(got["refresh_token"]))
    assert await revoke(got["refresh_token"], token_type_hint="access_token") == 200      # also one that is used
    assert not await program.works(again["access_token"])
    assert refusal(await program.refresh(again["refresh_token"])) == "invalid_grant"
    assert await program.works(kept["access_token"])
    assert refusal(await program.post("/oauth/revoke", {"client_id": "app"})) == "invalid_request"


async def test_a_token_that_is_given_back_twice_is_one_revocation(program: Program) -> None:
    got = await program.begin()

    for _ in range(3):
        await program.post("/oauth/revoke", {"token": got["access_token"], "client_id": "app"})

    assert len(await program.audit("token_revoked")) == 1


async def test_no_secret_of_a_session_is_shown_or_logged(serve_oauth: Callable[..., Any],
                                                        caplog: pytest.LogCaptureFixture) -> None:
    program = await program_of(await serve_oauth({"refresh_grace_seconds": 0}))
    code = await program.code()
    got = tokens(await program.exchange(code))
    await program.refresh(got["refresh_token"])
    await program.refresh(got["refresh_token"])
    row = await program.grant(got["refresh_token"])

    text = str(await program.audit()) + str(await program.served.get("/v1/sessions")) + caplog.text + repr(row)

    for secret in (code, got["refresh_token"], got["access_token"], row.code_hash, row.refresh_hash, row.seed):
        assert secret
        assert secret not in text


async def test_the_admins_of_a_tenant_are_told_of_a_stolen_refresh_token(serve_oauth: Callable[..., Any]) -> None:
    """21.9.1: also admins who sign in and have no key."""
    served = await serve_oauth({"refresh_grace_seconds": 0})
    await room(served)
    theirs = await program_of(served, "theirs", user={"tenant": ROOM})
    boss = await program_of(served, "boss", user={
        "tenant": ROOM, "role": "admin", "principal_id": "boss", "last_seen_at": 1.0, "scopes": '["receipts:read"]'})
    admin = (await boss.begin(scopes=frozenset({"receipts:read"})))["access_token"]
    got = await theirs.begin()

    for _ in range(2):
        await theirs.refresh(got["refresh_token"])
    while served.gate.guard.auditor.telling:
        await asyncio.gather(*served.gate.guard.auditor.telling)

    inbox = await ask(boss, "GET", "/v1/receipts?to_kind=human&to_id=boss&receipt_type=system.anomaly", admin)
    [told] = [receipt["body"] for receipt in inbox["receipts"]]
    assert (told["kind"], told["details"]["principal"]) == ("refresh_replay", "human ada")
