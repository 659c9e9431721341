"""Admins look after people: invitations, rights, disabling, sign-in links, each within its own tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.extras.oauth.user_rows import id_of_email
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import AdmissionRule
from asyncgate.parts.model.stored_oauth import Consent, Grant, Revocation, User
from tests.conftest import TOKEN, Answer, Served
from tests.support.browser import Browser, Program, sign_in
from tests.support.identity_tools import FACADES, HOME, OTHER, House, Told

pytestmark = pytest.mark.anyio


async def rows_of(served: Served, kind: Any) -> list[Any]:
    """Return the rows of a kind."""
    return list(await served.backend.page(served.tenant_id, Rows(kind)))


async def make_admin(served: Served, **key: Any) -> str:
    """Return the key of an admin of another tenant."""
    await served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    made = await served.post("/v1/keys", {"tenant": OTHER, "name": "root", "principal_kind": "human",
                                          "principal_id": "root", "role": "admin", **key})
    text: str = made["api_key"]
    return text


async def code_of(answer: Answer) -> str:
    """Return the code of a refusal."""
    code: str = answer.json().get("error", "")
    return code


async def people(served: Served, **more: Any) -> list[str]:
    """Return the addresses that a caller sees."""
    return sorted(user["email"] for user in (await served.get("/v1/users", **more))["users"])


async def test_an_admin_sees_and_changes_its_own_people_only(oauth_gate: Served) -> None:
    admin = await make_admin(oauth_gate)
    ada = await oauth_gate.post("/v1/users", {"email": "ada@example.com"})
    bob = await oauth_gate.post("/v1/users", {"email": "bob@example.com"}, token=admin)
    foreign = [await oauth_gate.call("POST", path, body, token=admin) for path, body in (
        (f"/v1/users/{ada['user_id']}", {"disabled": True}), (f"/v1/users/{ada['user_id']}/remove", {}),
        (f"/v1/users/{'0' * 36}", {"disabled": True}))]

    assert await people(oauth_gate) == ["ada@example.com", "bob@example.com"]
    assert await people(oauth_gate, token=admin) == ["bob@example.com"]
    assert (await oauth_gate.get(f"/v1/users?tenant={OTHER}"))["users"] == [bob]
    assert [await code_of(answer) for answer in foreign] == ["user_not_found"] * 3
    assert (bob["tenant"], bob["state"]) == (OTHER, "invited")


async def test_an_address_that_another_tenant_has_invited_is_refused_without_a_word_of_it(oauth_gate: Served) -> None:
    admin = await make_admin(oauth_gate)
    await oauth_gate.post("/v1/users", {"email": "ada@example.com"})

    refused = await oauth_gate.call("POST", "/v1/users", {"email": "ada@example.com"}, token=admin)

    assert refused.json()["message"] == "ada@example.com cannot be invited here; ask the operator"


@pytest.mark.parametrize("facade", FACADES)
async def test_an_address_that_a_rule_gives_to_another_tenant_is_refused_in_the_same_words(
        serve_oauth: Callable[..., Any], facade: str) -> None:
    """Whoever invites does not learn whether the person is known here, nor to whom the domain belongs."""
    served = await serve_oauth({"admit": (AdmissionRule(email="eve@other.example", tenant=OTHER), AdmissionRule(
        email_domain="Example.com", group="staff"), AdmissionRule(email_domain="example.com"), AdmissionRule(
        email_domain="example.com", tenant=OTHER), AdmissionRule(email_domain="other.example"))})
    admin, house = await make_admin(served), House(served, TOKEN)
    await served.post("/v1/users", {"email": "known@example.com"})

    async def invite(email: str, token: str | None = None, **more: Any) -> Told:
        told: Told = await house.ask("invite_user", {"email": email, **more}, token=token, facade=facade)
        return told

    refused = [await invite(email, admin) for email in ("ada@EXAMPLE.com", "known@example.com", "bob@other.example")]
    own = [await invite("eve@other.example", admin), await invite("ada@sub.example.com", admin),
           await invite("ada@example.com"), await invite("bob@other.example")]
    operator = await invite("grace@example.com", tenant=OTHER)

    assert [(told.code, told.body["message"]) for told in refused] == [
        ("invalid_state_transition", f"{email} cannot be invited here; ask the operator")
        for email in ("ada@example.com", "known@example.com", "bob@other.example")]
    assert [told.code for told in own] == [""] * 4
    assert operator.body["message"] == (
        f"security.oauth.admit gives grace@example.com to the tenant {HOME}, so no other can invite it; put a rule for "
        "this address before the others, or name that tenant")


async def test_the_tenant_of_a_rule_takes_over_an_invitation_of_another(serve_oauth: Callable[..., Any]) -> None:
    served = await serve_oauth({"admit": (AdmissionRule(email_domain="example.com", tenant=OTHER),)})
    admin = await make_admin(served)
    ada = "ada@example.com"
    row = User(id_of_email(ada), "", "", ada, "", served.tenant_id, "human", ada, "agent", None, None, "before",
               served.backend.now())
    await served.gate.joined["oauth"].directory.change(lambda work: work.keep_record(row))

    invited = await served.post("/v1/users", {"email": "ada@example.com"}, token=admin)

    assert (invited["tenant"], invited["user_id"]) == (OTHER, row.user_id)


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_has_so_many_open_invitations(serve_oauth: Callable[..., Any], facade: str) -> None:
    served = await serve_oauth({"open_invitations": 2})
    admin, house = await make_admin(served), House(served, TOKEN)

    async def invite(name: str, token: str | None = admin, **more: Any) -> Told:
        fields = {"email": f"{name}@example.com", **more}
        told: Told = await house.ask("invite_user", fields, token=token, facade=facade)
        return told

    told = await asyncio.gather(*(invite(f"p{n}") for n in range(6)))
    kept = [answer.body["user_id"] for answer in told if not answer.code]
    [refused, *_] = [answer for answer in told if answer.code]
    again = await invite(next(answer.body["email"] for answer in told if not answer.code).partition("@")[0])
    others = await invite("eve", token=None)
    by_operator = await invite("late", token=None, tenant=OTHER)
    await served.post(f"/v1/users/{kept[0]}/remove", {}, token=admin)
    room = await invite("late")

    assert len(kept) == 2
    assert (refused.code, refused.body["quota"], refused.body["limit"]) == ("quota_exceeded", "open_invitations", 2)
    assert [answer.code for answer in (again, others, by_operator, room)] == ["", "", "quota_exceeded", ""]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_has_so_many_unused_sign_in_links(serve_oauth: Callable[..., Any], facade: str) -> None:
    served = await serve_oauth({"open_login_links": 2})
    admin, house = await make_admin(served), House(served, TOKEN)

    async def make(token: str | None = admin) -> Told:
        told: Told = await house.ask("make_sign_in_link", {"principal_id": "ada"}, token=token, facade=facade)
        return told

    told = await asyncio.gather(*(make() for _ in range(4)))
    [refused, *_] = [answer for answer in told if answer.code]
    elsewhere = await make(token=None)
    served.backend.skew += 601
    later = await make()

    assert sorted(answer.code for answer in told) == ["", "", "quota_exceeded", "quota_exceeded"]
    assert (refused.body["quota"], refused.body["limit"]) == ("open_login_links", 2)
    assert (elsewhere.code, later.code) == ("", "")


async def test_who_has_come_takes_the_place_of_no_invitation(serve_oauth: Callable[..., Any]) -> None:
    served = await serve_oauth({"open_invitations": 1})
    ada = await served.post("/v1/users", {"email": "ada@example.com"})
    row = await served.backend.record(served.tenant_id, User, ada["user_id"])
    came = [replace(row, user_id="ada", issuer="https://id.example.com", subject="1"), replace(row, accepted_as="ada")]

    full = await served.call("POST", "/v1/users", {"email": "bob@example.com"})
    await served.gate.joined["oauth"].directory.change(lambda work: [work.keep_record(record) for record in came])
    bob = await served.call("POST", "/v1/users", {"email": "bob@example.com"})

    assert (full.status, bob.status) == (429, 200)


async def test_an_invitation_can_be_repeated_until_it_is_accepted(oauth_gate: Served) -> None:
    first = await oauth_gate.post("/v1/users", {"email": "ada@example.com"})
    again = await oauth_gate.post("/v1/users", {"email": "ADA@example.com", "role": "worker"})

    assert (again["user_id"], again["role"]) == (first["user_id"], "worker")


@pytest.mark.one_store
@pytest.mark.parametrize("email", ["ada", "ada@", "@example.com", "a b@example.com", "ada@exam\u0440le.com", "a@b@c"])
async def test_only_an_address_can_be_invited(oauth_gate: Served, email: str) -> None:
    assert await code_of(await oauth_gate.call("POST", "/v1/users", {"email": email})) == "invalid_request"


@pytest.mark.one_store
async def test_nobody_gives_rights_that_it_does_not_have(oauth_gate: Served) -> None:
    admin = await make_admin(oauth_gate, scopes=["admin:read", "admin:write", "tasks:read"])
    limited = await make_admin(oauth_gate, task_types=["demo"])
    bob = await oauth_gate.post("/v1/users", {"email": "bob@example.com", "tenant": OTHER, "scopes": ["tasks:read"]})
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/users", {"email": "eve@example.com"}), ("/v1/users", {"email": "eve@example.com", "role": "admin"}),
        (f"/v1/users/{bob['user_id']}", {"role": "admin"}),
        (f"/v1/users/{bob['user_id']}", {"scopes": ["tasks:write"]}),
        ("/v1/sign-in-links", {"principal_id": "eve"}), ("/v1/sign-in-links", {"principal_id": "eve", "role": "admin"})]

    for path, body in asked:
        assert await code_of(await oauth_gate.call("POST", path, body, token=admin)) == "forbidden"
        body = {**body, "scopes": ["tasks:read"]}
        assert await code_of(await oauth_gate.call("POST", path, body, token=limited)) == "forbidden"
        assert (await oauth_gate.call("POST", path, body, token=admin)).status == 200


@pytest.mark.one_store
@pytest.mark.parametrize("body", [
    {"role": "system"}, {"scopes": ["everything"]}, {"principal_kind": "system"}, {"principal_kind": "asyncgate"}])
async def test_a_link_makes_nobody_the_gate_itself(oauth_gate: Served, body: dict[str, Any]) -> None:
    answer = await oauth_gate.call("POST", "/v1/sign-in-links", {"principal_id": "eve", **body})

    assert await code_of(answer) == "invalid_request"


@pytest.mark.one_store
async def test_links_can_be_turned_off(serve_oauth: Any) -> None:
    served = await serve_oauth({"login_links": False})
    page = await Browser(served).get((await Program(served).register()).url())

    assert await code_of(await served.call("POST", "/v1/sign-in-links", {"principal_id": "ada"})) == "invalid_request"
    assert page.forms == []
    assert "no way to sign in" in page.text


@pytest.mark.parametrize("change", [{"disabled": True}, {"role": "worker"}, {"scopes": ["tasks:read"]}, "remove"])
async def test_other_rights_end_the_sessions_of_a_person(oauth_gate: Served, change: Any) -> None:
    program, browser = await Program(oauth_gate).register(), Browser(oauth_gate)
    await browser.submit(await sign_in(browser, program), "allow")
    await browser.submit(await sign_in(browser, program, "bob"), "allow")
    ada = next(user for user in (await oauth_gate.get("/v1/users"))["users"] if user["principal_id"] == "ada")

    path = f"/v1/users/{ada['user_id']}" + ("/remove" if change == "remove" else "")
    await oauth_gate.post(path, {"reason": "trouble", **(change if isinstance(change, dict) else {})})

    assert {(grant.principal_id, grant.ended_at is not None) for grant in await rows_of(oauth_gate, Grant)} == {
        ("ada", True), ("bob", False)}
    assert ("user", ada["user_id"]) in {(row.kind, row.subject) for row in await rows_of(oauth_gate, Revocation)}
    consents = {row.user_id for row in await rows_of(oauth_gate, Consent)}
    assert (ada["user_id"] in consents, len(consents)) == ((False, 1) if change == "remove" else (True, 2))


async def test_a_change_that_takes_nothing_ends_nothing(oauth_gate: Served) -> None:
    program, browser = await Program(oauth_gate).register(), Browser(oauth_gate)
    await browser.submit(await sign_in(browser, program), "allow")
    [ada] = (await oauth_gate.get("/v1/users"))["users"]
    changed = await oauth_gate.post(f"/v1/users/{ada['user_id']}", {"access_days": 7, "role": "agent"})

    assert changed["access_days"] == 7
    assert [grant.ended_at for grant in await rows_of(oauth_gate, Grant)] == [None]
    assert await rows_of(oauth_gate, Revocation) == []


async def test_a_removed_person_is_unknown_and_a_disabled_one_can_come_back(oauth_gate: Served) -> None:
    ada = await oauth_gate.post("/v1/users", {"email": "ada@example.com"})
    path = f"/v1/users/{ada['user_id']}"
    states = [(await oauth_gate.post(path, {"disabled": disabled}))["state"] for disabled in (True, True, False)]
    await oauth_gate.post(f"{path}/remove")

    assert states == ["disabled", "disabled", "invited"]
    assert await code_of(await oauth_gate.call("POST", path, {"disabled": True})) == "user_not_found"
    assert await rows_of(oauth_gate, User) == []


async def test_changes_of_people_are_in_both_audit_logs(oauth_gate: Served) -> None:
    ada = await oauth_gate.post("/v1/users", {"email": "ada@example.com", "tenant": OTHER})
    await oauth_gate.post(f"/v1/users/{ada['user_id']}", {"role": "worker", "reason": "she asked"})
    await oauth_gate.post(f"/v1/users/{ada['user_id']}/remove", {"reason": "she left"})

    for tenant in (oauth_gate.tenant_id, OTHER):
        lines = (await oauth_gate.get(f"/v1/audit?tenant={tenant}"))["lines"]
        changes = [(line["event"], line["reason"]) for line in lines if line["event"].startswith("user_")]
        assert changes == [("user_invited", None), ("user_changed", "she asked"), ("user_removed", "she left")]


@pytest.mark.one_store
async def test_no_secret_of_a_link_is_in_the_log(oauth_gate: Served, caplog: pytest.LogCaptureFixture) -> None:
    browser, program = Browser(oauth_gate), await Program(oauth_gate).register()
    made = await oauth_gate.post("/v1/sign-in-links", {"principal_id": "ada"})
    await browser.get(program.url())
    page = await browser.get(made["link"])
    await browser.submit(page)
    await oauth_gate.gate.guard.auditor.flush()
    lines = (await oauth_gate.get("/v1/audit?limit=200"))["lines"]

    assert made["link"] == f"http://localhost/oauth/link?code={made['sign_in_code']}"
    for text in (str(lines), caplog.text):
        assert made["sign_in_code"] not in text
        assert made["sign_in_code"].replace("-", "") not in text
