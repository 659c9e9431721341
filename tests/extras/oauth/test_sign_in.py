"""People sign in with links and allow a client in: D5, D7, D9 of the threats as far as no provider is involved."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored_oauth import Consent, Grant, OAuthClient, SignInLink, User
from tests.conftest import Served
from tests.support.browser import Browser, Page, Program, make_code, sign_in

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about pages, forms and cookies.

    What is kept of a sign-in test_tokens and test_sessions try on both.
    """
    return sqlite_url


async def rows(served: Served, kind: Any) -> list[Any]:
    """Return the rows of a kind."""
    return list(await served.backend.page(served.tenant_id, Rows(kind)))


async def keep(served: Served, row: Any) -> None:
    """Change a row as nobody can over the wire."""
    await served.gate.joined["oauth"].directory.change(lambda work: work.keep_record(row))


async def events(served: Served, event: str, tenant: str | None = None) -> list[Any]:
    """Return the details of the lines of an event in the audit log."""
    await served.gate.guard.auditor.flush()
    page = await served.get(f"/v1/audit?event={event}&limit=200" + (f"&tenant={tenant}" if tenant else ""))
    return [line["details"] for line in page["lines"]]


@pytest.fixture
async def program(oauth_gate: Served) -> Program:
    """A client that is registered."""
    return await Program(oauth_gate).register()


@pytest.fixture
async def browser(oauth_gate: Served) -> Browser:
    """A browser that has no cookie yet."""
    return Browser(oauth_gate)


async def test_a_person_signs_in_with_a_code_and_allows_a_program(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    login = await browser.get(program.url(scope="tasks:read receipts:read"))
    consent = await browser.submit(login, code=await make_code(oauth_gate))
    await browser.submit(consent, "allow")

    assert "Reader at app.example" in " ".join(login.text.split())
    assert "You are ada , in tenant default" in " ".join(consent.text.split())
    assert "See tasks and their results" in consent.text
    assert browser.address.startswith(f"{program.back}?")
    assert browser.told["state"] == "its-state"
    assert browser.told["iss"] == "http://localhost"
    assert browser.told["code"].startswith("agc_")
    assert browser.cookies == {}        # the sign-in has ended
    [grant] = await rows(oauth_gate, Grant)
    assert (grant.principal_kind, grant.principal_id, grant.role, grant.client_id) == (
        "human", "ada", "agent", program.client_id)
    [user] = await rows(oauth_gate, User)
    assert user.last_seen_at is not None
    [line] = await events(oauth_gate, "user_signed_in")
    assert line["principal_id"] == "ada"
    [line] = await events(oauth_gate, "consent_given")
    assert line["client_id"] == program.client_id


async def test_nothing_of_a_strangers_request_is_stored(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    async with oauth_gate.unchanged():
        await browser.get(program.url())

    assert len(browser.cookies) == 1
    assert all([await rows(oauth_gate, kind) == [] for kind in (User, Grant, Consent, SignInLink)])


async def test_looking_at_a_link_does_not_spend_it(oauth_gate: Served, program: Program, browser: Browser) -> None:
    await browser.get(program.url())
    path = f"/oauth/link?code={await make_code(oauth_gate)}"
    for preview in (Browser(oauth_gate), browser, browser):
        page = await preview.get(path)
    assert await rows(oauth_gate, User) == []

    assert "Allow Reader?" in (await browser.submit(page)).text


async def test_a_link_in_a_browser_without_a_sign_in_says_where_to_begin(oauth_gate: Served, browser: Browser) -> None:
    page = await browser.get(f"/oauth/link?code={await make_code(oauth_gate)}")

    assert "Connect from your client first" in page.text
    assert page.forms == []


async def test_of_two_parallel_uses_of_a_code_one_signs_in(oauth_gate: Served, program: Program) -> None:
    code, browsers = await make_code(oauth_gate), [Browser(oauth_gate) for _ in range(5)]
    logins = [await browser.get(program.url()) for browser in browsers]

    pages = await asyncio.gather(*(browser.submit(page, code=code)
                                   for browser, page in zip(browsers, logins, strict=True)))

    assert sorted("Allow Reader?" in page.text for page in pages) == [False] * 4 + [True]
    assert await rows(oauth_gate, Grant) == []


async def test_a_code_is_read_as_people_type_it_and_its_hash_alone_is_stored(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    code = await make_code(oauth_gate)
    [link] = await rows(oauth_gate, SignInLink)
    assert code.replace("-", "") not in str([getattr(link, name) for name in link.__struct_fields__])

    page = await browser.submit(await browser.get(program.url()), code=f" {code.replace('-', '').lower()} ")

    assert "Allow Reader?" in page.text


@pytest.mark.parametrize("wrong", ["", "AAAAA-AAAAA-AAAAA-AAAAA", "x" * 5000, "'; DROP TABLE oauth_links; --"])
async def test_a_wrong_code_signs_nobody_in(
        oauth_gate: Served, program: Program, browser: Browser, wrong: str) -> None:
    page = await browser.submit(await browser.get(program.url()), code=wrong)

    assert page.status == 403
    assert "This code is not good" in page.text
    assert page.forms       # to try again
    assert await rows(oauth_gate, User) == []
    [line] = await events(oauth_gate, "sign_in_refused")
    assert line["reason"] == "no such sign-in link"


async def test_a_code_that_was_used_or_has_expired_signs_nobody_in(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    used, old = await make_code(oauth_gate), await make_code(oauth_gate, "bob")
    await browser.submit(await browser.get(program.url()), code=used)
    again = await browser.submit(await browser.get(program.url()), code=used)
    link = next(row for row in await rows(oauth_gate, SignInLink) if row.used_at is None)
    await keep(oauth_gate, replace(link, ends_at=link.created_at))
    late = await browser.submit(await browser.get(program.url()), code=old)

    assert (again.status, late.status) == (403, 403)


async def test_a_link_of_a_disabled_person_signs_nobody_in(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    await sign_in(browser, program)
    [user] = (await oauth_gate.get("/v1/users"))["users"]
    await oauth_gate.post(f"/v1/users/{user['user_id']}", {"disabled": True})

    page = await sign_in(browser, program)

    assert "disabled" in page.text
    assert page.status == 403


# Consent.


async def test_a_denial_goes_back_to_the_program(oauth_gate: Served, program: Program, browser: Browser) -> None:
    await browser.submit(await sign_in(browser, program), "deny")

    assert browser.told["error"] == "access_denied"
    assert browser.told["state"] == "its-state"
    assert (await rows(oauth_gate, Grant), await rows(oauth_gate, Consent)) == ([], [])
    assert await events(oauth_gate, "consent_denied")


async def test_consent_is_remembered_and_asked_again_for_more(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    await browser.submit(await sign_in(browser, program), "allow")
    same = await sign_in(browser, program)
    more = await sign_in(browser, program, scope="tasks:read tasks:write")
    await browser.submit(more, "allow")
    both = await sign_in(browser, program, scope="tasks:write")
    asked = await sign_in(browser, program, prompt="consent")

    assert [page.status for page in (same, more, both, asked)] == [303, 200, 303, 200]
    assert "Create, change and cancel tasks" in more.text


async def test_consent_is_asked_again_for_another_place(oauth_gate: Served, browser: Browser) -> None:
    places = ["https://one.example/cb", "https://two.example/cb", "http://127.0.0.1/cb"]
    program = await Program(oauth_gate).register(redirect_uris=places)
    asked = []
    for place in (places[0], places[0], places[1], "http://127.0.0.1:5001/cb", "http://127.0.0.1:5002/cb"):
        page = await sign_in(browser, program, redirect_uri=place)
        asked.append(page.status)
        if page.status == 200:
            await browser.submit(page, "allow")

    assert asked == [200, 303, 200, 200, 200]


@pytest.mark.parametrize("back", ["http://127.0.0.1:5001/cb", "http://localhost:8787/cb", "cursor://anysphere/oauth",
                                  "com.example.app:/cb"])
@pytest.mark.parametrize(("secret", "again"), [(False, 200), (True, 303)])
async def test_a_program_that_any_other_of_the_machine_can_pose_as_is_asked_about_each_time(
        oauth_gate: Served, browser: Browser, back: str, secret: bool, again: int) -> None:
    program = await Program(oauth_gate, back).register(with_secret=secret)
    await browser.submit(await sign_in(browser, program), "allow")

    assert (await sign_in(browser, program)).status == again
    await oauth_gate.post(f"/v1/clients/{program.client_id}", {"trusted": True})
    assert (await sign_in(browser, program)).status == 303


async def test_consent_is_of_one_person_and_one_program(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    await browser.submit(await sign_in(browser, program), "allow")

    assert (await sign_in(browser, program, "bob")).status == 200
    assert (await sign_in(browser, await Program(oauth_gate).register())).status == 200


async def test_nobody_is_asked_about_a_trusted_program(oauth_gate: Served, browser: Browser) -> None:
    await sign_in(browser, await Program(oauth_gate).register(trusted=True))

    assert "code" in browser.told


@pytest.mark.parametrize(("trusted", "told"), [
    (True, "It is trusted here, and may act for you as soon as you have signed in."),
    (False, "Unless you have allowed it before, you then see what it may do, and decide.")])
async def test_the_sign_in_page_promises_a_question_only_where_one_may_come(
        oauth_gate: Served, browser: Browser, trusted: bool, told: str) -> None:
    program = await Program(oauth_gate).register(trusted=trusted)

    login = await browser.get(program.url())

    assert f"asks you to sign in. {told}" in " ".join(login.text.split())


async def test_consent_warns_of_a_program_on_this_machine(oauth_gate: Served, browser: Browser) -> None:
    here = await Program(oauth_gate, "http://localhost:8787/callback").register()
    app = await Program(oauth_gate, "cursor://anysphere.cursor-retrieval/oauth").register()

    page, other = await sign_in(browser, here), await sign_in(browser, app)

    assert "goes to a client on this machine" in page.text
    assert "cursor://anysphere.cursor-retrieval" in other.text
    assert "form-action 'self' http://localhost:8787;" in page.headers["content-security-policy"]
    assert "form-action 'self' cursor:;" in other.headers["content-security-policy"]


async def test_not_you_leads_to_the_login_page_again(oauth_gate: Served, program: Program, browser: Browser) -> None:
    page = await sign_in(browser, program)
    login = await browser.get(page.links["Not you?"])
    forged = await browser.submit(page, "allow")        # the consent page of before

    assert login.forms[0]["action"] == "/oauth/link"
    assert forged.status == 403
    assert "bob" in (await browser.submit(login, code=await make_code(oauth_gate, "bob"))).text


async def test_prompt_none_is_answered_with_login_required(program: Program, browser: Browser) -> None:
    await browser.get(program.url(prompt="none"))

    assert browser.told["error"] == "login_required"


async def test_a_person_grants_no_more_than_its_own_scopes(oauth_gate: Served, program: Program, browser: Browser
                                                           ) -> None:
    page = await sign_in(browser, program, link={"scopes": ["tasks:read"]}, scope="tasks:read tasks:write admin:write")
    assert "Administer" not in page.text
    await browser.submit(page, "allow")
    refused = await sign_in(browser, program, link={"scopes": ["tasks:read"]}, scope="tasks:write")

    [grant] = await rows(oauth_gate, Grant)
    assert grant.scopes == '["tasks:read"]'
    assert "none of the rights" in refused.text
    assert "error=invalid_scope" in refused.links["Back to Reader"]


# D5, D7, D9.


@pytest.mark.parametrize("foreign", [
    'settings={"theme":"dark"}', "words=a b", 'quote="', "name=J\xfcrgen", "asyncgate-sign-in-\xfc=1"])
async def test_a_cookie_of_another_program_at_this_host_hides_no_sign_in(
        oauth_gate: Served, program: Program, browser: Browser, foreign: str) -> None:
    name, _, value = foreign.partition("=")
    browser.cookies[name] = value       # before that of the gate, as an older cookie is

    login = await browser.get(program.url())
    consent = await browser.submit(login, code=await make_code(oauth_gate))

    assert "Allow Reader?" in consent.text


async def test_a_sign_in_needs_the_browser_that_began_it(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    consent = await sign_in(browser, program)
    strangers = [await Browser(oauth_gate).submit(consent, "allow"),
                 await Browser(oauth_gate).get(browser.visited[-1])]

    assert [page.status for page in strangers] == [403, 403]
    assert await rows(oauth_gate, Grant) == []


@pytest.mark.parametrize("csrf", ["", "x", None])
async def test_consent_without_the_token_of_the_page_is_refused(
        oauth_gate: Served, program: Program, browser: Browser, csrf: str | None) -> None:
    page = await sign_in(browser, program)
    fields = {**page.forms[0]["fields"], "answer": "allow", "csrf": csrf}

    answer = await browser.post("/oauth/consent", {name: value for name, value in fields.items() if value is not None})

    assert answer.status == 403
    assert await rows(oauth_gate, Grant) == []


async def test_the_token_of_one_sign_in_is_not_good_for_another(
        oauth_gate: Served, program: Program, browser: Browser) -> None:
    first, second = await sign_in(browser, program), await sign_in(browser, program)
    fields = {**first.forms[0]["fields"], "csrf": second.forms[0]["fields"]["csrf"], "answer": "allow"}

    assert (await browser.post("/oauth/consent", fields)).status == 403


async def test_a_sealed_sign_in_cannot_be_changed_renamed_or_kept(
        oauth_gate: Served, program: Program, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    page = await sign_in(browser, program)
    [(name, value)] = browser.cookies.items()
    changed = value[:40] + ("A" if value[40] != "A" else "B") + value[41:]
    other = name[:-1] + ("0" if name[-1] != "0" else "1")

    statuses = []
    for cookies, id in (({name: changed}, name[-32:]), ({other: value}, other[-32:]), ({name: "é"}, name[-32:])):
        browser.cookies = cookies
        fields = {**page.forms[0]["fields"], "sign_in": id, "answer": "allow"}
        statuses.append((await browser.post("/oauth/consent", fields)).status)
    browser.cookies = {name: value}
    later = oauth_gate.backend.now() + 601
    monkeypatch.setattr(oauth_gate.backend, "now", lambda: later)
    statuses.append((await browser.submit(page, "allow")).status)

    assert statuses == [403] * 4


async def test_a_browser_keeps_few_sign_ins(program: Program, browser: Browser) -> None:
    for _ in range(7):
        page = await browser.get(program.url())

    assert len(browser.cookies) == 4
    assert f"asyncgate-sign-in-{page.forms[0]['fields']['sign_in']}" in browser.cookies


async def test_pages_cannot_be_framed_scripted_or_cached(program: Program, browser: Browser) -> None:
    pages = [await browser.get(program.url()), await sign_in(browser, program), await browser.get("/oauth/authorize"),
             await browser.get("/oauth/consent?sign_in=x"), await browser.get("/oauth/link?code=x")]

    for page in pages:
        policy = page.headers["content-security-policy"]
        assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[^']+'; form-action 'self'( https://app.example)?; "
                            r"frame-ancestors 'none'; base-uri 'none'", policy)
        assert page.headers["cache-control"] == "no-store"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "same-origin"
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert not {"script", "iframe", "img", "link", "object", "base", "meta http-equiv"} & {*page.elements}


async def test_cookies_are_bound_to_the_host_and_to_tls(serve_oauth: Callable[..., Any]) -> None:
    served = await serve_oauth(public_url="https://gate.example", allowed_hosts=("gate.example", "localhost"))
    program = await Program(served).register()
    page = await Browser(served, "https://gate.example").get(program.url())
    [line] = [value for name, value in page.pairs if name == "set-cookie"]

    assert line.startswith("__Host-asyncgate-sign-in-")
    assert line.endswith("; Path=/; Max-Age=600; HttpOnly; SameSite=Lax; Secure")


async def rename(served: Served, program: Program, name: str) -> None:
    """Give a client a name that register_client would refuse."""
    [client] = [row for row in await rows(served, OAuthClient) if row.client_id == program.client_id]
    await keep(served, replace(client, name=name))


HOSTILE = "<script>alert(1)</script>\"'&\u202egnp.exe\u2066\u200b\u0007"


async def test_what_comes_from_outside_is_text_on_every_page(oauth_gate: Served, browser: Browser) -> None:
    program = await Program(oauth_gate).register()
    await rename(oauth_gate, program, HOSTILE)      # as a metadata document may call it
    login = await browser.get(program.url(state=HOSTILE))
    consent = await browser.submit(login, code=await make_code(oauth_gate, "<b>ada</b>"))
    link = await browser.get(program.url())
    pages = [login, consent, link, await browser.get("/oauth/link?code=%22%3E%3Cscript%3E"),
             await browser.get("/oauth/authorize?client_id=%3Cscript%3E"),
             await browser.get("/oauth/authorize?%3Cscript%3E=1&%3Cscript%3E=2"),
             await browser.post("/oauth/link", {"sign_in": "<script>", "code": HOSTILE}),
             await browser.get("/oauth/callback/%3Cscript%3E?state=%3Cscript%3E&error=%3Cscript%3E")]

    for page in pages:
        assert "script" not in page.elements
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\u0007]", page.html.decode())
    assert "[U+202E]" in consent.text
    assert "b" not in consent.elements


@pytest.mark.parametrize("name", ["next", "return_to", "redirect", "url", "RelayState"])
async def test_no_parameter_leads_elsewhere(program: Program, browser: Browser, name: str) -> None:
    evil = "https://evil.example/"
    asked: dict[str, Any] = {name: evil}
    page = await sign_in(browser, program, **asked)
    pages: list[Page] = [page, await browser.get(f"/oauth/sign-in?{name}={evil}"),
                         await browser.get(f"/oauth/link?code=x&{name}={evil}")]
    await browser.submit(page, "allow")

    assert all("evil.example" not in page.html.decode() for page in pages)
    assert browser.address.startswith(program.back)


async def test_a_forged_host_changes_no_address(oauth_gate: Served, program: Program) -> None:
    forged = [("host", "evil.example"), ("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "https"),
              ("forwarded", "host=evil.example")]
    for headers in (forged, [("host", "localhost"), *forged[1:]]):
        answer = await oauth_gate.send("GET", program.url(prompt="none"), headers=headers)
        assert answer is not None
        assert b"evil" not in answer.content
        assert "evil" not in answer.headers.get("location", "")
