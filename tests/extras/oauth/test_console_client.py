"""The console is a client of the gate's own authorization server: known to it, asked for no consent, and only here."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import ConsoleSettings
from asyncgate.parts.model.stored_oauth import Consent, Grant, OAuthClient
from tests.conftest import Served
from tests.extras.oauth.conftest import mint
from tests.support.browser import FORM, VERIFIER, Browser, Page, Program, make_code
from tests.support.console_page import ConsolePage

pytestmark = pytest.mark.anyio


@pytest.fixture
async def gate(serve_oauth: Callable[..., Any]) -> Served:
    """A gate with OAuth and a console."""
    running: Served = await serve_oauth(console=ConsoleSettings(enabled=True))
    return running


async def about(served: Served) -> dict[str, str]:
    """Return what the page is told of OAuth."""
    told: dict[str, str] = (await served.get("/console/about", token=None))["sign_in"]["oauth"]
    return told


async def allow(served: Served, browser: Browser) -> str:
    """Sign somebody in as the console's page asks for it; return the code."""
    told = await about(served)
    asking = Program(served, told["redirect_uri"])
    asking.client_id = told["client_id"]
    page = await browser.get(asking.url(scope=told["scope"], resource=told["resource"]))
    await browser.submit(page, code=await make_code(served))
    back = browser.visited[-1]
    assert back.startswith(f"{told['redirect_uri']}?")
    return parse_qs(urlsplit(back).query)["code"][0]


async def exchange(served: Served, code: str, **changed: str) -> Any:
    """Exchange a code, as the page does."""
    from urllib.parse import urlencode
    told = await about(served)
    form = {"grant_type": "authorization_code", "code": code, "client_id": told["client_id"],
            "redirect_uri": told["redirect_uri"], "code_verifier": VERIFIER, "resource": told["resource"], **changed}
    return await served.call("POST", "/oauth/token", urlencode(form).encode(), headers=[FORM], token=None)


async def signed_in(served: Served) -> ConsolePage:
    """Sign somebody in to the console."""
    page = ConsolePage(served)
    got = (await exchange(served, await allow(served, Browser(served)))).json()
    answer = await page.sign_in(got["access_token"])
    assert answer.status == 200, answer
    return page


@pytest.mark.one_store
async def test_the_sign_in_page_of_the_console_names_it_and_promises_no_consent(gate: Served) -> None:
    told = await about(gate)
    asking = Program(gate, told["redirect_uri"])
    asking.client_id = told["client_id"]

    login = await Browser(gate).get(asking.url(scope=told["scope"], resource=told["resource"]))

    text = " ".join(login.text.split())
    assert "AsyncGate console at localhost asks you to sign in. It is trusted here" in text
    assert "decide" not in text


async def test_a_person_signs_in_to_the_console_without_consent_and_with_all_its_rights(gate: Served) -> None:
    page = await signed_in(gate)

    who = (await page.call("GET", "/v1/whoami")).json()
    assert (who["principal_id"], who["role"]) == ("ada", "agent")
    assert {"tasks:read", "tasks:write", "receipts:read"} <= {*who["scopes"]}
    assert "admin:write" not in who["scopes"]       # the console asks for every scope, and the person has not all
    assert list(await gate.backend.page(gate.tenant_id, Rows(Consent))) == []
    assert await page.works()


@pytest.mark.parametrize("everywhere", [False, True])
async def test_signing_out_ends_the_grants_of_the_console(gate: Served, everywhere: bool) -> None:
    page, other = await signed_in(gate), await signed_in(gate)

    assert (await page.sign_out(everywhere)).status == 200

    assert [await page.works(), await other.works()] == [False, not everywhere]
    grants = [grant for grant in await gate.backend.page(gate.tenant_id, Rows(Grant)) if grant.code_used_at]
    assert sum(grant.ended_at is None for grant in grants) == (0 if everywhere else 1)


@pytest.mark.one_store
async def test_a_session_ends_with_its_access_token(gate: Served) -> None:
    page, soon = ConsolePage(gate), time.time() + 3600

    assert (await page.sign_in(mint(gate, exp=soon))).status == 200

    assert abs(datetime.fromisoformat(page.ends_at).timestamp() - soon) < 1


@pytest.mark.one_store
async def test_only_the_page_of_this_gate_gets_the_codes_of_the_console(serve_oauth: Callable[..., Any]) -> None:
    """Another port of this machine is another client, and nobody is asked for consent."""
    gate = await serve_oauth(console=ConsoleSettings(enabled=True), public_url="http://127.0.0.1:8080",
                             allowed_hosts=("localhost",))
    told = await about(gate)
    asking = Program(gate)
    asking.client_id = told["client_id"]

    for back in ("http://127.0.0.1:9999/console/", "http://127.0.0.1:8080/console", "http://localhost:8080/console/",
                 "https://evil.example/console/"):
        answer = await gate.call("GET", asking.url(redirect_uri=back), token=None)
        assert (answer.status, "location" in answer.headers) == (400, False)
        assert "not one that this client has registered" in Page(answer).text


async def test_the_console_is_no_program_while_it_is_off_and_an_admin_may_disable_it(
        gate: Served, serve_oauth: Callable[..., Any]) -> None:
    off = await serve_oauth(instance_id="off") if "postgres" in type(gate.backend).__module__ else None
    code = await allow(gate, Browser(gate))
    [row] = await gate.backend.page(gate.tenant_id, Rows(OAuthClient))

    if off is not None:
        answer = await off.call("GET", Program(off).url(client_id="asyncgate-console"), token=None)
        assert (answer.status, "no client with this client_id" in Page(answer).text) == (400, True)
    await gate.post(f"/v1/clients/{row.client_id}", {"disabled": True, "reason": "a test"})

    assert (row.client_id, (await exchange(gate, code)).status) == ("asyncgate-console", 401)


@pytest.mark.one_store
async def test_the_page_is_told_nothing_of_oauth_where_there_is_none(serve: Any) -> None:
    served = await serve(console=ConsoleSettings(enabled=True))
    answer = await served.call("GET", "/console/about", token=None)
    dev = await serve(console=ConsoleSettings(enabled=True), api_key="", allow_insecure_dev=True, instance_id="dev")

    assert answer.json().keys() == {"version", "open", "sign_in"}
    assert (answer.json()["open"], answer.json()["sign_in"]) == (False, {"credential": True, "oauth": None})
    assert (await dev.call("GET", "/console/about", token=None)).json()["open"] is True
