"""People sign in at identity providers: D5 of the threats, and who may come in as whom."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from asyncgate.extras.oauth.admission import Person, fits_person
from asyncgate.extras.oauth.providers import read_person
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.user_rows import id_of_email
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import (
    AdmissionRule,
    IdentityProvider,
    Jwt,
    OAuth,
    Outgoing,
    SecuritySettings,
    Settings,
)
from asyncgate.parts.model.stored_oauth import Grant, User
from tests.conftest import Served
from tests.extras.oauth.conftest import PUBLIC_URL
from tests.support.browser import Browser, Page, Program
from tests.support.identity_tools import HOME, OTHER
from tests.support.provider_stand_in import StandIn, make_key, run_stand_in

pytestmark = pytest.mark.anyio

EVERYBODY = (AdmissionRule(provider="id"), AdmissionRule(provider="github"), AdmissionRule(provider="other"))


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about what a provider answers and what a browser shows.

    Users and sign-ins are kept as in test_tokens, on both.
    """
    return sqlite_url


@pytest.fixture
def there() -> Iterator[StandIn]:
    """An identity provider."""
    with run_stand_in() as running:
        yield running


class Scene:
    """A gate with identity providers, a client that asks, and a browser."""

    def __init__(self, served: Served, program: Program, there: StandIn) -> None:
        self.served, self.program, self.there = served, program, there
        self.browser = Browser(served)

    async def leave(self, provider: str = "id", browser: Browser | None = None, **asked: Any) -> str:
        """Go from the client to a provider; return where the browser is."""
        browser = browser or self.browser
        page = await browser.get(self.program.url(**asked))
        await browser.get(page.links[{"id": "Continue with Id", "github": "Continue with GitHub",
                                      "other": "Continue with Other"}[provider]])
        return browser.address

    async def sign_in(self, provider: str = "id", asked: dict[str, Any] | None = None, **answer: str) -> Page:
        """Sign in at a provider, and come back."""
        there = await self.leave(provider, **(asked or {}))
        return await self.browser.get(self.there.authorize(there, **answer))

    async def refused(self, page: Page) -> str:
        """Insist that a page refuses to sign somebody in; return the real reason."""
        assert page.status == 403, page.text
        assert "You cannot sign in" in page.text
        assert not [row for row in await self.rows(User) if row.last_seen_at]
        await self.served.gate.guard.auditor.flush()
        [line, *_] = (await self.served.get("/v1/audit?event=sign_in_refused&limit=200"))["lines"][::-1]
        reason: str = line["details"]["reason"]
        return reason

    async def rows(self, kind: Any) -> list[Any]:
        """Return the rows of a kind."""
        return list(await self.served.backend.page(self.served.tenant_id, Rows(kind)))

    async def people(self) -> list[dict[str, Any]]:
        """Return the people that an admin sees."""
        users: list[dict[str, Any]] = (await self.served.get("/v1/users"))["users"]
        return users


@pytest.fixture
def set_scene(serve: Any, signing_key_path: Any, there: StandIn) -> Callable[..., Any]:
    """Return what makes a scene with these rules."""
    async def set_scene(*admit: AdmissionRule, **oauth: Any) -> Scene:
        providers = (
            IdentityProvider(name="id", client_id="gate", client_secret="s e/c:ret", discovery_url=there.url),
            IdentityProvider(name="github", client_id="gate", client_secret="secret", discovery_url=there.url,
                             kind="github"),
            IdentityProvider(name="other", client_id="gate", discovery_url=there.url))
        security = SecuritySettings(
            oauth=OAuth(enabled=True, **{"providers": providers, "admit": admit or EVERYBODY, **oauth}),
            jwt=Jwt(private_key_path=str(signing_key_path)), outgoing=Outgoing(allow=("127.0.0.1",)))
        served = await serve(public_url=PUBLIC_URL, security=security)
        return Scene(served, await Program(served).register(), there)

    return set_scene


@pytest.fixture
async def scene(set_scene: Callable[..., Any]) -> Scene:
    """A scene in which everybody may come in."""
    made: Scene = await set_scene()
    return made


async def test_a_person_signs_in_at_an_openid_provider(scene: Scene) -> None:
    consent = await scene.sign_in()
    await scene.browser.submit(consent, "allow")

    assert "You are Ada Lovelace , in tenant default" in " ".join(consent.text.split())
    assert "human ada@example.com" in consent.text
    assert scene.browser.told["code"].startswith("agc_")
    [person] = await scene.people()
    assert (person["issuer"], person["subject"], person["email"], person["principal_id"], person["admitted_by"]) == (
        scene.there.url, "24400320", "ada@example.com", "ada@example.com", "rule provider id")
    assert scene.there.headers[-2]["authorization"] == "Basic Z2F0ZTpzJTIwZSUyRmMlM0FyZXQ="


async def test_the_request_to_the_provider_is_bound_to_this_sign_in(scene: Scene) -> None:
    first, second = await scene.leave(), await scene.leave(prompt="login")

    for name in ("state", "nonce", "code_challenge"):
        values = [url.split(f"{name}=")[1].partition("&")[0] for url in (first, second)]
        assert values[0] != values[1]
        assert len(values[0]) >= 32
    assert "code_challenge_method=S256" in first
    assert f"redirect_uri={PUBLIC_URL.replace(':', '%3A').replace('/', '%2F')}%2Foauth%2Fcallback%2Fid" in first
    assert ("prompt=login" in first, "prompt=login" in second) == (False, True)


async def test_only_one_provider_and_no_links_lead_straight_on(set_scene: Callable[..., Any], there: StandIn) -> None:
    only = IdentityProvider(name="id", client_id="gate", discovery_url=there.url)
    scene = await set_scene(AdmissionRule(provider="id"), providers=(only,), login_links=False)
    await scene.browser.get(scene.program.url())

    assert scene.browser.address.startswith(f"{there.url}/authorize?")


async def test_a_person_signs_in_at_github(scene: Scene) -> None:
    await scene.browser.submit(await scene.sign_in("github"), "allow")

    [person] = await scene.people()
    assert (person["issuer"], person["subject"], person["email"], person["name"]) == (
        scene.there.url, "583231", "ada@example.com", "ada")
    assert "code" in scene.browser.told


async def test_what_the_id_token_does_not_say_is_asked_of_userinfo(scene: Scene) -> None:
    scene.there.claims = {"email": ..., "email_verified": ..., "groups": ...}
    scene.there.userinfo = {"sub": "24400320", "email": "ada@example.com", "email_verified": True, "iss": "evil"}
    await scene.sign_in()

    [person] = await scene.people()
    assert person["email"] == "ada@example.com"


async def test_userinfo_of_somebody_else_is_refused(scene: Scene) -> None:
    scene.there.claims = {"email": ...}
    scene.there.userinfo = {"sub": "other", "email": "root@example.com", "email_verified": True}

    assert await scene.refused(await scene.sign_in()) == "userinfo is about somebody else"


# D5: the callback.


async def test_a_callback_is_good_for_the_browser_that_was_sent_once(scene: Scene) -> None:
    back = scene.there.authorize(await scene.leave())
    stranger = await Browser(scene.served).get(back)
    await scene.refused(stranger)
    own = await scene.browser.get(back)
    again = await scene.browser.get(back)

    assert (own.status, again.status) == (200, 403)


@pytest.mark.parametrize("change", ["no state", "other state", "empty", "of another sign-in", "cut"])
async def test_a_callback_with_another_state_is_refused(scene: Scene, change: str) -> None:
    back, url = scene.there.authorize(await scene.leave()), await scene.leave()
    state = url.split("state=")[1].partition("&")[0]
    mine = back.split("state=")[1].partition("&")[0]
    told = {"no state": "", "other state": f"state={mine[:33]}{'x' * 32}", "empty": "state=",
            "of another sign-in": f"state={mine[:33]}{state[33:]}", "cut": f"state={mine[:40]}"}[change]
    code = back.split("code=")[1].partition("&")[0]

    await scene.refused(await scene.browser.get(f"/oauth/callback/id?{told}&code={code}"))
    assert "/token" not in scene.there.asked


async def test_a_code_of_one_provider_is_refused_at_the_callback_of_another(scene: Scene) -> None:
    back = scene.there.authorize(await scene.leave("id"))

    reason = await scene.refused(await scene.browser.get(back.replace("/callback/id", "/callback/other")))

    assert reason == "the callback is of other, but the sign-in went to id"
    assert "/token" not in scene.there.asked


@pytest.mark.parametrize("iss", ["https://evil.example", ""])
async def test_an_answer_of_another_issuer_is_refused(scene: Scene, iss: str) -> None:
    assert "iss" in await scene.refused(await scene.sign_in(iss=iss))
    assert "/token" not in scene.there.asked


async def test_an_answer_without_iss_is_refused_where_the_provider_says_that_it_sends_it(scene: Scene) -> None:
    scene.there.discovery = {"authorization_response_iss_parameter_supported": True}

    await scene.refused(await scene.sign_in())
    assert (await scene.sign_in(iss=scene.there.url)).status == 200


async def test_a_person_who_denies_at_the_provider_denies_the_program(scene: Scene) -> None:
    await scene.sign_in(error="access_denied")

    assert scene.browser.told["error"] == "access_denied"
    assert scene.browser.told["state"] == "its-state"
    assert scene.browser.cookies == {}


async def test_another_error_of_the_provider_is_a_page(scene: Scene) -> None:
    page = await scene.sign_in(error="server_error%3Cb%3E", error_description="secret")

    assert await scene.refused(page) == "id says server_error<b>"
    assert "secret" not in page.text
    assert page.links == {"Back to Reader": page.links["Back to Reader"]}


# D5: the ID token.

WRONG: list[dict[str, Any]] = [
    {"nonce": "other"}, {"nonce": ...}, {"sub": ""}, {"sub": ["24400320"]}, {"sub": "a\x00b"}, {"aud": "other"},
    {"aud": ["other"]}, {"azp": "other"}, {"aud": ["gate", "other"]}, {"iss": "https://evil.example"}, {"iss": ...},
    {"exp": time.time() - 31}, {"exp": ...}, {"exp": "never"}, {"iat": time.time() + 3600}]
HEADERS: list[dict[str, Any]] = [
    {"alg": "none"}, {"typ": "at+jwt"}, {"jku": "https://evil.example/jwks"}, {"kid": "unknown"}, {"jwk": {}}]


async def test_a_wrong_claim_or_header_is_refused(scene: Scene) -> None:
    for scene.there.claims in WRONG:
        assert (await scene.refused(await scene.sign_in())).startswith("the ID token is refused: ")
    scene.there.claims = {}
    for scene.there.header in HEADERS:
        assert (await scene.refused(await scene.sign_in())).startswith("the ID token is refused: ")
    scene.there.header = {}

    assert (await scene.sign_in()).status == 200


async def test_a_signature_of_another_key_is_refused(scene: Scene) -> None:
    scene.there.signer = make_key("other")
    assert "refused" in await scene.refused(await scene.sign_in())
    scene.there.header, scene.there.public_secret = {"alg": "HS256"}, True
    assert "alg is not RS256" in await scene.refused(await scene.sign_in())


async def test_an_unknown_key_costs_one_look_a_minute(scene: Scene) -> None:
    await scene.sign_in()
    scene.there.header = {"kid": "unknown"}
    looks = scene.there.asked.count("/jwks")
    for _ in range(3):
        await scene.browser.get(scene.there.authorize(await scene.leave()))

    assert scene.there.asked.count("/jwks") == looks <= 1
    assert scene.there.asked.count("/.well-known/openid-configuration") == 1


# D5: discovery.


async def test_a_discovery_document_that_does_not_fit_is_refused(scene: Scene) -> None:
    for change in ({"issuer": "https://evil.example"}, {"issuer": 5}, {"jwks_uri": "file:///etc/passwd"},
                   {"token_endpoint": ""}, {"authorization_endpoint": "javascript:alert(1)"}):
        scene.there.discovery = change
        page = await scene.browser.get(scene.program.url())
        await scene.refused(await scene.browser.get(page.links["Continue with Id"]))


async def test_a_hostile_answer_is_refused(scene: Scene) -> None:
    for status, body in ((200, b"x" * (2**20 + 1)), (200, b"[" * 100_000), (200, b'{"issuer": 1, "issuer": 2}'),
                         (500, b"{}"), (302, b"{}")):
        scene.there.status, scene.there.body = status, body
        page = await scene.browser.get(scene.program.url())
        await scene.refused(await scene.browser.get(page.links["Continue with Id"]))


async def test_a_private_provider_must_be_allowed(serve: Any, signing_key_path: Any, there: StandIn) -> None:
    provider = IdentityProvider(name="id", client_id="gate", discovery_url=there.url)
    security = SecuritySettings(oauth=OAuth(enabled=True, providers=(provider,), admit=EVERYBODY[:1]),
                                jwt=Jwt(private_key_path=str(signing_key_path)))
    served = await serve(public_url=PUBLIC_URL, security=security)
    browser = Browser(served)
    page = await browser.get((await Program(served).register()).url())

    assert (await browser.get(page.links["Continue with Id"])).status == 403
    assert there.asked == []


# Who may come in.


async def test_nobody_comes_in_without_a_rule_or_an_invitation(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(email_domain="other.example"))
    page = await scene.sign_in()

    assert "no invitation and no rule fits ada@example.com" in await scene.refused(page)
    assert "asyncgate invite-user" in page.text
    assert "error=access_denied" in page.links["Back to Reader"]


@pytest.mark.parametrize(("rule", "fits"), [
    (AdmissionRule(email_domain="example.com"), True), (AdmissionRule(email_domain="EXAMPLE.com"), True),
    (AdmissionRule(email_domain="ple.com"), False), (AdmissionRule(email="ada@example.com"), True),
    (AdmissionRule(email="eve@example.com"), False), (AdmissionRule(group="readers"), True),
    (AdmissionRule(group="writers"), False), (AdmissionRule(provider="id", group="readers"), True),
    (AdmissionRule(provider="github", group="readers"), False),
    (AdmissionRule(email_domain="example.com", group="writers"), False)])
def test_a_rule_fits_by_all_that_it_names(rule: AdmissionRule, fits: bool) -> None:
    ada = Person("id", "https://id.example", "1", "ada@example.com", "Ada", frozenset({"readers"}))

    assert fits_person(rule, ada) is fits


@pytest.mark.parametrize("claims", [
    {"email_verified": False}, {}, {"email_verified": 1}, {"email_verified": "yes"},
    {"email_verified": True, "email": "ada@example.com@evil.example"}, {"email_verified": True, "email": "ada"},
    {"email_verified": True, "email": "ada@\u0435xample.com"}, {"email_verified": True, "email": ["ada@example.com"]},
    {"email_verified": True, "email": "ada@example.com\n"}])
def test_an_address_that_is_not_verified_or_is_none_does_not_count(claims: dict[str, Any]) -> None:
    provider = IdentityProvider(name="id", client_id="gate")

    assert read_person(provider, "https://id.example", {"sub": "1", "email": "ada@example.com", **claims}).email == ""


async def test_an_address_that_is_not_verified_admits_nobody(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(email_domain="example.com"))
    scene.there.claims, scene.there.userinfo = {"email_verified": False}, {"sub": "24400320"}
    await scene.served.post("/v1/users", {"email": "ada@example.com"})

    await scene.refused(await scene.sign_in())


async def test_the_first_rule_that_fits_says_as_whom(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(group="readers", tenant=OTHER, role="worker", scopes=("tasks:lease",)),
                            AdmissionRule(provider="id", role="admin"))
    await scene.served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    page = await scene.sign_in(asked={"scope": "tasks:lease tasks:read"})
    await scene.browser.submit(page, "allow")

    assert "in tenant Reading Room" in " ".join(page.text.split())
    [grant] = await scene.rows(Grant)
    assert (grant.tenant, grant.role, grant.scopes) == (OTHER, "worker", '["tasks:lease"]')
    await scene.served.gate.guard.auditor.flush()
    lines = (await scene.served.get(f"/v1/audit?event=user_signed_in&tenant={OTHER}"))["lines"]
    assert [line["principal_id"] for line in lines] == ["ada@example.com"]


async def test_a_tenant_that_is_suspended_or_missing_lets_nobody_in(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(provider="id", tenant=OTHER))
    missing = await scene.sign_in()
    await scene.served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    assert (await scene.sign_in()).status == 200
    await scene.served.post(f"/v1/tenants/{OTHER}/suspend", {"reason": "trouble"})
    suspended = await scene.sign_in()

    assert (missing.status, suspended.status) == (403, 403)
    assert "suspended" in suspended.text


async def test_an_invitation_admits_once_and_says_as_whom(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(email="nobody@example.com"))
    await scene.served.post("/v1/users", {"email": "ADA@example.com", "role": "worker", "access_days": 7})
    [invited] = await scene.people()
    first = await scene.sign_in(asked={"scope": "tasks:lease"})
    [person] = await scene.people()
    other = await scene.sign_in("github", asked={"scope": "tasks:lease"})     # the same address, another person

    assert (invited["state"], person["state"]) == ("invited", "active")
    assert (person["role"], person["access_days"], person["principal_id"]) == ("worker", 7, "ada@example.com")
    assert first.status == 200
    assert other.status == 403


async def invite_before_the_rule(scene: Scene, tenant: str, **more: Any) -> None:
    """Keep an invitation of Ada that a tenant has made before the operator's rules said whose she is."""
    ada = "ada@example.com"
    row = User(id_of_email(ada), "", "", ada, "", tenant, "human", ada, "worker", None, None, "human root",
               scene.served.backend.now(), **more)
    await scene.served.gate.joined["oauth"].directory.change(lambda work: work.keep_record(row))


@pytest.mark.parametrize("more", [{}, {"disabled_at": 1.0}])
@pytest.mark.parametrize("rule", [AdmissionRule(email_domain="Example.com"), AdmissionRule(email="ada@example.com")])
async def test_the_operators_rule_for_a_domain_or_an_address_overrules_another_tenants_invitation(
        set_scene: Callable[..., Any], rule: AdmissionRule, more: dict[str, float]) -> None:
    """Else a tenant could invite a company's people first, and get them and their work, or keep them out."""
    scene = await set_scene(rule)
    await scene.served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    await invite_before_the_rule(scene, OTHER, **more)

    page = await scene.sign_in()
    again = await scene.sign_in("github")

    assert "in tenant default" in " ".join(page.text.split())
    people = await scene.people()
    assert {(person["tenant"], person["role"]) for person in people} == {(HOME, "agent")}
    assert sorted(person["principal_id"] for person in people) == ["ada@example.com", "github:583231"]
    assert again.status == 200


async def test_an_invitation_of_the_tenant_that_a_rule_names_decides_the_rights(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(email_domain="example.com", group="staff", tenant=OTHER),
                            AdmissionRule(email_domain="example.com", tenant=OTHER))
    await scene.served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    await scene.served.post("/v1/users", {"email": "ada@example.com", "role": "worker", "tenant": OTHER})

    page = await scene.sign_in(asked={"scope": "tasks:lease"})

    assert page.status == 200
    assert [(person["tenant"], person["role"]) for person in await scene.people()] == [(OTHER, "worker")]


async def test_a_rule_for_some_of_a_domain_keeps_other_tenants_from_the_others(set_scene: Callable[..., Any]) -> None:
    scene = await set_scene(AdmissionRule(email_domain="example.com", group="nobody"))
    await scene.served.post("/v1/tenants", {"tenant": OTHER, "name": "Reading Room"})
    await invite_before_the_rule(scene, OTHER)

    assert "no invitation and no rule fits" in await scene.refused(await scene.sign_in())


async def test_the_same_address_from_another_provider_is_another_principal(scene: Scene) -> None:
    await scene.sign_in()
    await scene.sign_in("github")

    people = await scene.people()
    assert sorted(person["principal_id"] for person in people) == ["ada@example.com", "github:583231"]


async def test_a_known_person_stays_the_same_whatever_its_address(scene: Scene) -> None:
    await scene.sign_in()
    scene.there.claims = {"email": "countess@example.com", "name": "Ada King"}
    await scene.sign_in()

    [person] = await scene.people()
    assert (person["principal_id"], person["email"], person["name"]) == (
        "ada@example.com", "countess@example.com", "Ada King")


async def test_a_disabled_person_does_not_come_in_by_another_way(scene: Scene) -> None:
    await scene.sign_in()
    [person] = await scene.people()
    await scene.served.post(f"/v1/users/{person['user_id']}", {"disabled": True})

    pages = [await scene.sign_in(), await scene.sign_in("github")]

    assert [page.status for page in pages] == [403, 403]
    assert "disabled" in pages[0].text


@pytest.mark.parametrize(("oauth", "why"), [
    ({"admit": [{"role": "admin"}]}, "names nobody"), ({"admit": [{"provider": "x"}]}, "provider 'x'"),
    ({"admit": [{"email": "a@b", "scopes": ["all"]}]}, "no scope all"),
    ({"providers": [{"name": "id", "client_id": "a"}]}, "needs discovery_url"),
    ({"providers": [{"name": "", "client_id": "a", "kind": "github"}]}, "a unique name"),
    ({"providers": [{"name": "a", "client_id": "a", "kind": "github"}] * 2}, "a unique name")])
def test_contradictory_settings_stop_the_start(signing_key_path: Any, oauth: dict[str, Any], why: str) -> None:
    tree = {"public_url": PUBLIC_URL, "security": {
        "jwt": {"private_key_path": str(signing_key_path)}, "oauth": {"enabled": True, **oauth}}}

    async def send(*_: Any, **__: Any) -> None:
        """Send nothing."""
    settings = msgspec.convert(json.loads(json.dumps(tree)), Settings)
    with pytest.raises(StartupError, match=why):
        AuthorizationServer(settings, send).routes()
