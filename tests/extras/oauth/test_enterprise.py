"""A company's identity provider vouches for people (ID-JAG): clients come in without a browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from joserfc import jwt

from asyncgate.extras.oauth.enterprise import JWT_BEARER
from asyncgate.parts.model.settings import AdmissionRule, IdentityProvider, Jwt, OAuth, Outgoing, SecuritySettings
from tests.conftest import Served
from tests.extras.oauth.conftest import PUBLIC_URL
from tests.support.browser import FORM
from tests.support.identity_tools import OTHER
from tests.support.provider_stand_in import GOOD, StandIn, make_key, run_stand_in

pytestmark = pytest.mark.anyio

RESOURCE = f"{PUBLIC_URL}/mcp"
RULES = (AdmissionRule(email_domain="example.com"),)


@pytest.fixture
def company() -> Iterator[StandIn]:
    """The identity provider of a company."""
    with run_stand_in() as running:
        yield running


class Office:
    """A gate that believes a company's provider, and a client of that company."""

    def __init__(self, served: Served, company: StandIn, client: dict[str, Any]) -> None:
        self.served, self.company = served, company
        self.client_id, self.secret = client["client_id"], client.get("client_secret", "")
        self.count = 0

    def vouch(self, header: dict[str, Any] | None = None, **changed: Any) -> str:
        """Sign an assertion; ... leaves a claim out, and a timedelta is a time from now."""
        self.count += 1
        now = time.time()
        payload = {**GOOD, "iss": self.company.url, "aud": PUBLIC_URL, "client_id": self.client_id, "iat": now,
                   "exp": now + 300, "jti": f"assertion-{self.count}", "resource": RESOURCE, "scope": "tasks:read",
                   **changed}
        claims = {name: now + value.total_seconds() if isinstance(value, timedelta) else value
                  for name, value in payload.items() if value is not ...}
        return jwt.encode({"alg": "RS256", "kid": self.company.key.kid, "typ": "oauth-id-jag+jwt", **(header or {})},
                          claims, self.company.signer, algorithms=["RS256", "PS256"])

    async def exchange(self, assertion: str | None, **changed: str | None) -> tuple[int, dict[str, Any]]:
        """Send an assertion to the token endpoint."""
        form = {"grant_type": JWT_BEARER, "assertion": assertion, "client_id": self.client_id,
                "client_secret": self.secret, **changed}
        body = urlencode({name: value for name, value in form.items() if value})
        answer = await self.served.send("POST", "/oauth/token", body.encode(), headers=[FORM])
        assert answer is not None
        return answer.status, answer.json()

    async def refusal(self, assertion: str | None, **changed: str | None) -> tuple[int, str]:
        """Return how an assertion is refused."""
        status, body = await self.exchange(assertion, **changed)
        return status, body.get("error", "")


Open = Callable[..., Awaitable[Office]]


@pytest.fixture
def open_office(serve: Any, signing_key_path: Any, company: StandIn) -> Open:
    """Return what starts a gate with a company's provider."""
    async def open_office(managed: bool = True, secret: bool = True, **oauth: Any) -> Office:
        provider = IdentityProvider(name="id", client_id="gate", discovery_url=company.url, enterprise_managed=managed)
        security = SecuritySettings(
            oauth=OAuth(enabled=True, **{"providers": (provider,), "admit": RULES, **oauth}),
            jwt=Jwt(private_key_path=str(signing_key_path)), outgoing=Outgoing(allow=("127.0.0.1",)))
        served = await serve(public_url=PUBLIC_URL, security=security)
        made = await served.post("/v1/clients", {"client_name": "Office", "with_secret": secret,
                                                 "redirect_uris": ["https://office.example.com/callback"]})
        return Office(served, company, made)

    return open_office


@pytest.fixture
async def office(open_office: Open) -> Office:
    """A gate that believes the company."""
    return await open_office()


async def test_a_program_comes_in_for_a_person_for_whom_the_provider_vouches(office: Office) -> None:
    status, got = await office.exchange(office.vouch())

    assert (status, got["token_type"], got["scope"]) == (200, "Bearer", "tasks:read")
    assert "refresh_token" not in got
    who = await office.served.get("/v1/whoami", token=got["access_token"])
    assert (who["principal_kind"], who["principal_id"], who["scopes"]) == ("human", "ada@example.com", ["tasks:read"])
    [session] = (await office.served.get("/v1/sessions"))["sessions"]
    assert session["principal_id"] == "ada@example.com"


async def test_an_assertion_begins_one_session_whoever_sends_it_how_often(office: Office) -> None:
    assertion = office.vouch()

    answers = await asyncio.gather(*(office.exchange(assertion) for _ in range(4)))

    assert sorted(status for status, _ in answers) == [200, 400, 400, 400]
    assert await office.refusal(assertion) == (400, "invalid_grant")
    assert (await office.exchange(office.vouch()))[0] == 200


WRONG: list[dict[str, Any]] = [
    {"aud": "https://elsewhere.example.com"}, {"aud": [PUBLIC_URL, "https://elsewhere.example.com"]}, {"aud": ...},
    {"aud": f"{PUBLIC_URL}/oauth/token"}, {"iss": "https://elsewhere.example.com"}, {"iss": ...}, {"sub": ...},
    {"sub": ""},
    {"client_id": "another"}, {"client_id": ...}, {"jti": ...}, {"jti": ""}, {"exp": ...}, {"exp": 1.0},
    {"exp": timedelta(days=1)}, {"iat": timedelta(hours=1), "exp": timedelta(hours=1, seconds=100)},
    {"cnf": {"jkt": "x"}},
    {"authorization_details": [{"type": "x"}]}, {"email": "eve@elsewhere.example.com"}, {"email_verified": False},
]


@pytest.mark.one_store
async def test_an_assertion_that_is_not_for_here_and_now_lets_nobody_in(office: Office) -> None:
    refusals = {str(changed): await office.refusal(office.vouch(**changed)) for changed in WRONG}

    assert refusals == dict.fromkeys(map(str, WRONG), (400, "invalid_grant"))


FORMS: list[dict[str, Any]] = [
    {"typ": "JWT"}, {"typ": "at+jwt"}, {"alg": "PS256"}, {"kid": "unknown"}, {"jku": "https://elsewhere.example.com"}]


@pytest.mark.one_store
async def test_an_assertion_of_another_form_lets_nobody_in(office: Office) -> None:
    refusals = {str(header): await office.refusal(office.vouch(header)) for header in FORMS}

    assert refusals == dict.fromkeys(map(str, FORMS), (400, "invalid_grant"))


@pytest.mark.one_store
async def test_an_assertion_that_another_key_signed_lets_nobody_in(office: Office) -> None:
    office.company.signer = make_key("two")

    assert await office.refusal(office.vouch()) == (400, "invalid_grant")
    assert await office.refusal("no.jwt.here") == (400, "invalid_grant")
    assert await office.refusal(None) == (400, "invalid_request")


@pytest.mark.one_store
async def test_scopes_and_resource_are_those_of_the_assertion_or_fewer(office: Office) -> None:
    more: dict[str, Any] = {"scope": "tasks:read tasks:write admin:write", "resource": f"{PUBLIC_URL}/"}

    _, got = await office.exchange(office.vouch(**more))
    _, fewer = await office.exchange(office.vouch(**more), scope="tasks:write receipts:read")

    assert (got["scope"], fewer["scope"]) == ("tasks:read tasks:write", "tasks:write")
    assert await office.refusal(office.vouch(scope="admin:write")) == (400, "invalid_scope")
    assert await office.refusal(office.vouch(), resource=PUBLIC_URL) == (400, "invalid_target")
    assert await office.refusal(office.vouch(resource="https://elsewhere.example.com")) == (400, "invalid_target")


@pytest.mark.one_store
async def test_only_a_program_that_proves_itself_may_use_it(office: Office, open_office: Open) -> None:
    assert await office.refusal(office.vouch(), client_secret="wrong") == (401, "invalid_client")

    bare = await open_office(secret=False)

    assert await bare.refusal(bare.vouch()) == (400, "unauthorized_client")


@pytest.mark.one_store
async def test_it_is_off_unless_the_provider_is_marked(open_office: Open) -> None:
    office = await open_office(managed=False)
    described = await office.served.get("/.well-known/oauth-authorization-server")

    assert await office.refusal(office.vouch()) == (400, "unsupported_grant_type")
    assert JWT_BEARER not in described["grant_types_supported"]


@pytest.mark.one_store
async def test_only_a_provider_that_is_marked_is_believed(open_office: Open, company: StandIn) -> None:
    office = await open_office(providers=(
        IdentityProvider(name="id", client_id="gate", discovery_url=company.url),
        IdentityProvider(name="boss", client_id="gate", discovery_url="https://boss.example.com",
                         enterprise_managed=True)))

    assert await office.refusal(office.vouch()) == (400, "invalid_grant")


async def test_nobody_comes_into_a_tenant_that_is_not_there(open_office: Open) -> None:
    office = await open_office(admit=(AdmissionRule(email_domain="example.com", tenant=OTHER),))

    assert await office.refusal(office.vouch()) == (400, "invalid_grant")


@pytest.mark.one_store
async def test_programs_learn_that_it_is_on(office: Office) -> None:
    described = await office.served.get("/.well-known/oauth-authorization-server")

    assert JWT_BEARER in described["grant_types_supported"]
    assert described["authorization_grant_profiles_supported"] == ["urn:ietf:params:oauth:grant-profile:id-jag"]


async def test_a_disabled_person_does_not_come_in(office: Office) -> None:
    await office.exchange(office.vouch())
    [person] = (await office.served.get("/v1/users"))["users"]
    await office.served.post(f"/v1/users/{person['user_id']}", {"disabled": True})

    assert await office.refusal(office.vouch()) == (400, "invalid_grant")
