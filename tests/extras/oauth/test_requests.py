"""What clients ask for at /oauth/authorize: D1, D2, D6 and D10 of the threats."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from asyncgate.extras.oauth.requests import (
    AuthorizationRequest,
    BadRequestPage,
    RefusedRequest,
    read_request,
    redirect_back,
)
from asyncgate.extras.oauth.server import AuthorizationServer
from tests.conftest import Served

pytestmark = pytest.mark.anyio

ISSUER, BACK = "http://localhost", "https://app.example/cb"
CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"
AGENT = {"tasks:read", "tasks:write", "receipts:read", "receipts:ack"}


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about how a request is read, before anything is looked up."""
    return sqlite_url


class Asking:
    """A gate with a registered client, and what the client asks for."""

    def __init__(self, gate: Served, client_id: str = "") -> None:
        self.gate, self.client_id = gate, client_id
        self.server: AuthorizationServer = gate.gate.joined["oauth"]

    async def register(self, *redirect_uris: str, **more: Any) -> Asking:
        """Register another client."""
        made = await self.gate.post("/v1/clients", {
            "client_name": "App", "redirect_uris": redirect_uris or (BACK,), **more})
        return Asking(self.gate, made["client_id"])

    async def ask(self, **changed: Any) -> AuthorizationRequest:
        """Ask for what is good, but for what is changed; `...` leaves a parameter out."""
        parameters = {"response_type": "code", "client_id": self.client_id, "redirect_uri": BACK, "state": "xyz",
                      "code_challenge": CHALLENGE, "code_challenge_method": "S256", "scope": "tasks:read", **changed}
        client, asked = await read_request(self.server, {k: v for k, v in parameters.items() if v is not ...})
        assert client.client_id == asked.client_id
        return asked

    async def refusal(self, **changed: Any) -> dict[str, list[str]]:
        """Ask for something that is refused; return what the client is told."""
        with pytest.raises(RefusedRequest) as refused:
            await self.ask(**changed)
        answer = redirect_back(self.server, refused.value.asked, **refused.value.parameters())
        url = dict(answer.headers)[b"location"].decode()
        assert answer.status == 303
        assert url.startswith(BACK + "?")
        return parse_qs(urlsplit(url).query, keep_blank_values=True, strict_parsing=True)


@pytest.fixture
async def asking(oauth_gate: Served) -> Asking:
    """A gate with OAuth on, and a client."""
    return await Asking(oauth_gate).register(BACK, "http://localhost/cb")


async def test_a_good_request_is_read_and_answered_with_its_state_to_the_byte(asking: Asking) -> None:
    asked = await asking.ask(resource=f"{ISSUER}/mcp/u/", state="ü &=\r\n+%2B")

    url = dict(redirect_back(asking.server, asked, code="a b+").headers)[b"location"].decode()

    assert asked == AuthorizationRequest(asking.client_id, BACK, "ü &=\r\n+%2B", frozenset({"tasks:read"}),
                                         f"{ISSUER}/mcp/u", CHALLENGE)
    assert url == f"{BACK}?code=a%20b%2B&state=%C3%BC%20%26%3D%0D%0A%2B%252B&iss=http%3A%2F%2Flocalhost"


async def test_a_program_need_not_send_a_state(asking: Asking) -> None:
    """The TypeScript SDK sends none unless its user makes one; the challenge protects the client (RFC 9700 2.1)."""
    assert (await asking.ask(state=...)).state is None
    assert "state" not in await asking.refusal(state=..., response_type="token")


async def test_the_query_of_a_redirect_uri_stays(asking: Asking) -> None:
    other = await asking.register(f"{BACK}?keep=1")
    asked = await other.ask(redirect_uri=f"{BACK}?keep=1", state=...)

    answer = redirect_back(asking.server, asked, code="c")

    assert dict(answer.headers)[b"location"] == b"https://app.example/cb?keep=1&code=c&iss=http%3A%2F%2Flocalhost"


NOWHERE: list[dict[str, Any]] = [
    {"client_id": ...}, {"client_id": ""}, {"client_id": "8d1f6f0a-5b7c-4f6e-9a53-2f0c7e4b9d11"}, {"client_id": "é"},
    {"client_id": "x" * 5000}, {"client_id": "a b"}, {"redirect_uri": ...}, {"redirect_uri": ""},
    {"redirect_uri": BACK + "/"}, {"redirect_uri": BACK + "?"}, {"redirect_uri": "HTTPS://app.example/cb"},
    {"redirect_uri": "https://app.example:443/cb"}, {"redirect_uri": "https://evil.example/cb"},
    {"redirect_uri": "http://localhost:1/cb/"}, {"redirect_uri": "http://127.0.0.1:1/cb"}, {"state": "x" * 1025}]


async def test_an_unproven_request_redirects_nowhere(asking: Asking) -> None:
    """Whatever else is wrong with it: the client and the redirect URI are looked at first."""
    for changed in NOWHERE:
        for wrong in ({}, {"response_type": "token"}):
            with pytest.raises(BadRequestPage):
                await asking.ask(**{**wrong, **changed})


async def test_a_native_program_may_use_any_port(asking: Asking) -> None:
    assert (await asking.ask(redirect_uri="http://localhost:49152/cb")).redirect_uri == "http://localhost:49152/cb"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_type": ...}, "invalid_request"), ({"response_type": "token"}, "unsupported_response_type"),
    ({"response_type": "id_token"}, "unsupported_response_type"),
    ({"response_type": "code id_token"}, "unsupported_response_type"),
    ({"response_mode": "fragment"}, "invalid_request"), ({"response_mode": "form_post"}, "invalid_request"),
    ({"code_challenge": ...}, "invalid_request"), ({"code_challenge_method": ...}, "invalid_request"),
    ({"code_challenge_method": "plain"}, "invalid_request"), ({"code_challenge_method": "s256"}, "invalid_request"),
    ({"code_challenge": CHALLENGE[1:]}, "invalid_request"), ({"code_challenge": "a" * 129}, "invalid_request"),
    ({"code_challenge": CHALLENGE[:-1] + "="}, "invalid_request"),
    ({"code_challenge": CHALLENGE + "\n"}, "invalid_request"),
    ({"request": "eyJ"}, "request_not_supported"), ({"request_uri": "urn:x"}, "request_uri_not_supported"),
    ({"resource": "https://other.example/mcp"}, "invalid_target"), ({"resource": f"{ISSUER}/v1"}, "invalid_target"),
    ({"resource": f"{ISSUER}/mcp//"}, "invalid_target"), ({"resource": f"{ISSUER}/mcp?x"}, "invalid_target")]


async def test_what_the_gate_does_not_do_is_told_the_program(asking: Asking) -> None:
    for changed, error in REFUSED:
        told = await asking.refusal(**changed)

        assert (told["error"], told["state"], told["iss"]) == ([error], ["xyz"], [ISSUER]), changed
        assert told["error_description"][0]


async def test_parameters_that_it_does_not_know_are_ignored(asking: Asking) -> None:
    plain = await asking.ask()

    assert await asking.ask(response_mode="query") == plain
    assert await asking.ask(prompt="consent", nonce="n", unknown="x", login_hint="ada") == plain


async def test_a_resource_may_have_the_tools_that_the_address_of_its_host_picks(asking: Asking) -> None:
    assert (await asking.ask(resource=f"{ISSUER}/mcp?tools=delegate,work")).resource == f"{ISSUER}/mcp"


async def test_a_resource_is_one_of_the_gates(asking: Asking) -> None:
    named = {...: "/mcp", "": "/mcp", ISSUER: "", ISSUER + "/": "", ISSUER + "/mcp": "/mcp", ISSUER + "/mcp/": "/mcp",
             ISSUER + "/mcp/u": "/mcp/u"}

    assert {resource: (await asking.ask(resource=resource)).resource for resource in named} == {
        resource: ISSUER + path for resource, path in named.items()}


SCOPES: list[tuple[Any, set[str]]] = [
    ("tasks:read,tasks:write", {"tasks:read", "tasks:write"}),
    ("tasks:read tasks:write", {"tasks:read", "tasks:write"}),
    ("openid tasks:read offline_access", {"tasks:read"}), ("openid offline_access", AGENT), ("", AGENT), (..., AGENT)]


async def test_scopes_are_split_by_blanks_or_commas_and_strange_ones_ignored(asking: Asking) -> None:
    for scope, expected in SCOPES:
        assert (await asking.ask(scope=scope)).scopes == expected, scope


async def test_a_program_gets_no_scope_beyond_its_own(asking: Asking) -> None:
    reader = await asking.register(scopes=["tasks:read", "receipts:read"])

    assert (await reader.ask(scope="tasks:read tasks:write admin:write")).scopes == {"tasks:read"}
    assert (await reader.ask(scope="openid")).scopes == {"tasks:read", "receipts:read"}
    assert (await reader.refusal(scope="admin:write"))["error"] == ["invalid_scope"]


# The same over HTTP: what a browser sees.


def target(asking: Asking, **changed: Any) -> str:
    parameters = {"response_type": "code", "client_id": asking.client_id, "redirect_uri": BACK, "state": "xyz",
                  "code_challenge": CHALLENGE, "code_challenge_method": "S256", "scope": "tasks:read", **changed}
    return "/oauth/authorize?" + urlencode({name: value for name, value in parameters.items() if value is not ...})


async def test_a_browser_is_shown_a_page_and_led_nowhere(asking: Asking) -> None:
    """D1 and D6; a page that redirected would be an open redirector, or hand out a code."""
    good = target(asking)
    raw = [good + f"&{name}=x" for name in ("client_id", "redirect_uri", "state", "scope", "code_challenge")]
    raw += [good.replace("xyz", "x%00"), good.replace("xyz", "%ff"), good.replace("https%3A", "https%253A")]
    raw += ["/oauth/authorize?unknown=1&unknown=2", "/oauth/authorize"]
    for url in [*[target(asking, **changed) for changed in NOWHERE], *raw]:
        answer = await asking.gate.call("GET", url, token=None)
        assert answer.status == 400, url
        assert "location" not in answer.headers
        assert answer.headers["content-type"].startswith("text/html")
        assert b"evil.example" not in answer.content


async def test_a_browser_is_led_back_with_an_error_when_the_program_is_proven(asking: Asking) -> None:
    """D2 and D10."""
    for changed, error in REFUSED:
        answer = await asking.gate.call("GET", target(asking, **changed), token=None)
        told = parse_qs(urlsplit(answer.headers["location"]).query)
        assert (answer.status, answer.headers["location"].partition("?")[0]) == (303, BACK)
        assert (told["error"], told["state"], told["iss"]) == ([error], ["xyz"], [ISSUER]), changed


async def test_other_ways_to_ask_for_a_token_are_not_there(asking: Asking) -> None:
    """D6 and D10: form only, POST only, no secret in the URL, neither password nor client_credentials."""
    form = [("content-type", "application/x-www-form-urlencoded")]
    call, path = asking.gate.call, "/oauth/token"

    async def ask(body: bytes, headers: Any = form, url: str = path) -> tuple[int, str]:
        answer = await call("POST", url, body, headers=headers, token=None)
        return answer.status, answer.json()["error"]
    client = f"client_id={asking.client_id}".encode()
    for kind in (b"password", b"client_credentials", b"implicit", b"urn:ietf:params:oauth:grant-type:device_code"):
        assert await ask(client + b"&grant_type=" + kind) == (400, "unsupported_grant_type")
    assert await ask(client + b"&grant_type=authorization_code&code=a&code=b") == (400, "invalid_request")
    assert await ask(b'{"grant_type":"authorization_code"}', [("content-type", "application/json")]) == (
        400, "invalid_request")
    for query in ("client_secret=x", "client_assertion=x"):
        assert (await ask(client + b"&grant_type=authorization_code&code=a&redirect_uri=b&code_verifier=" + b"c" * 43,
                          url=f"{path}?{query}")) == (400, "invalid_request")
    assert (await call("GET", f"{path}?grant_type=authorization_code", token=None)).status == 405
