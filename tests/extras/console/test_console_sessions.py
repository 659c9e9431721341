"""Sessions of the console: two halves of which neither is worth anything, and which end when the credential ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.plugin import database_of
from asyncgate.parts.identity.console import MOST_SESSIONS
from asyncgate.parts.identity.revocations import REVOCATIONS_SECONDS
from asyncgate.parts.model.settings import ConsoleSettings
from tests.conftest import TOKEN, Answer
from tests.support.console_page import SAME, Browser, ConsolePage
from tests.support.identity_tools import HOME, OTHER, House, mcp_call, security
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ON = ConsoleSettings(enabled=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name the database of a test: one that several processes may share, if it has two."""
    return database_of("postgres:" if "two" in request.fixturenames else "sqlite:", request.config, tmp_path)


@pytest.fixture
async def house(serve: Any) -> House:
    """A gate with a console, that issues keys."""
    return House(await serve(security=security(), console=ON))


async def signed_in(house: House, credential: str, browser: Browser | None = None, **more: Any) -> ConsolePage:
    """Sign in, and insist on it."""
    page = ConsolePage(house.served, browser, **more)
    answer = await page.sign_in(credential)
    assert answer.status == 200, answer
    return page


def ended(answer: Answer) -> None:
    """Insist on the one refusal of a session that is no good, whatever is wrong with it."""
    assert (answer.status, answer.json()["error"]) == (401, "unauthenticated")
    assert answer.json()["message"] == "this session of the console has ended; sign in again"


# Beginning.


async def test_a_key_begins_a_session_that_is_its_caller(house: House) -> None:
    key = await house.key("agent", "ada")
    page = await signed_in(house, f"  {key}\n")

    who = (await page.call("GET", "/v1/whoami")).json()
    made = await page.call("POST", "/v1/tasks", {"type": "demo", "payload": None})

    assert (who["principal_id"], who["role"], who["key_id"]) == ("ada", "agent", house.ids[key])
    assert made.status == 200
    assert key not in json.dumps(page.browser.set) + page.session
    assert [line["details"]["console_began"] for line in await house.audit(event="console_signed_in")] == [
        page.session.partition(".")[0]]
    assert key not in json.dumps(await house.audit())


@pytest.mark.parametrize(("scheme", "prefix", "secure"), [("http", "", ""), ("https", "__Host-", "; Secure")])
async def test_the_cookie_is_for_this_host_and_for_no_script(house: House, scheme: str, prefix: str,
                                                             secure: str) -> None:
    page = await signed_in(house, TOKEN, scheme=scheme)

    [line] = page.browser.set
    name, _, value = line.partition(";")[0].partition("=")
    assert name == f"{prefix}asyncgate-console-{page.session.partition('.')[0]}"
    assert line == f"{name}={value}; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict{secure}"
    assert await page.works()


@pytest.mark.parametrize(("body", "status"), [
    ({}, 400), ({"credential": ""}, 400), ({"credential": 1}, 400), ({"credential": "two\nlines"}, 400),
    ({"credential": "pässword"}, 400), ({"credential": "x" * 2701}, 400), ({"credential": TOKEN, "more": 1}, 400),
    ({"credential": "wrong"}, 401), (b"{", 400), ({"credential": "x" * 20_000}, 413)])
async def test_what_is_no_credential_begins_nothing(house: House, body: Any, status: int) -> None:
    answer = await house.served.call("POST", "/console/sign-in", body, token=None, headers=SAME)

    assert answer.status == status
    assert "set-cookie" not in answer.headers
    assert TOKEN not in answer.content.decode()


async def test_wrong_credentials_are_counted_and_slowed_down_as_in_any_call(house: House) -> None:
    page = ConsolePage(house.served)

    answers = [await page.sign_in(f"guess-{number}") for number in range(12)]

    assert {answer.status for answer in answers} == {401}
    assert house.holds == [1.0, 1.0]        # after ten
    assert len(await house.audit(event="auth_failure")) > 0


async def test_calls_by_session_count_against_the_limits_of_the_tenant(serve: Any) -> None:
    from tests.support.identity_tools import tiers
    house = House(await serve(security=security(limits=True), console=ON, rate_limits=tiers(calls=3)))
    house.counting()
    page = await signed_in(house, TOKEN)        # the first call

    answers = [await page.call("GET", "/v1/whoami") for _ in range(3)]

    assert [answer.status for answer in answers] == [200, 200, 429]


async def test_a_session_ends_with_its_credential_at_the_latest(house: House) -> None:
    from datetime import UTC, datetime, timedelta
    soon = datetime.now(UTC) + timedelta(hours=1)
    page = await signed_in(house, await house.key(expires_at=soon.isoformat()))

    assert abs(datetime.fromisoformat(page.ends_at) - soon) < timedelta(seconds=1)
    assert 3500 < int(page.browser.set[0].partition("Max-Age=")[2].partition(";")[0]) <= 3600


# Each half alone, and what is wrong with either.


async def test_each_half_alone_is_refused(house: House) -> None:
    page = await signed_in(house, TOKEN)

    cookie_alone = await page.call("GET", "/v1/whoami", session="")
    half_alone = await page.call("GET", "/v1/whoami", cookies=[])

    assert (cookie_alone.status, half_alone.status) == (401, 401)
    ended(half_alone)
    assert cookie_alone.json()["message"].startswith("a credential is needed")


async def test_wrong_halves_are_refused_alike(house: House) -> None:
    page, other = await signed_in(house, TOKEN), await signed_in(house, TOKEN)
    id, _, half = page.session.partition(".")
    [(name, value)] = page.browser.cookies.items()
    flipped = value[:40] + ("A" if value[40] != "A" else "B") + value[41:]

    for session in (f"{id}.{other.session.partition('.')[2]}", f"{other.session.partition('.')[0]}.{half}", id, half,
                    f"{id}.{half[:-1]}", f"{id}.{half}A", f"{id.upper()}.{half}", "é.x", "." * 76):
        ended(await page.call("GET", "/v1/whoami", session=session))
    for cookie in (flipped, value[:-8], value[:10], "", "%%%", f"{value}AAAA", other.browser.cookies.popitem()[1]):
        ended(await page.call("GET", "/v1/whoami", cookies=[("cookie", f"{name}={cookie}")]))
    assert await page.works()


async def test_nobody_but_the_gate_can_unseal_a_session_or_make_one(house: House) -> None:
    """Whoever has stolen both halves has a session that ends, and not the key that it stands for."""
    from base64 import urlsafe_b64decode

    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    page = await signed_in(house, TOKEN)
    [(name, value)] = page.browser.cookies.items()
    sealed, half = (urlsafe_b64decode(text + "=" * (-len(text) % 4)) for text in (
        value, page.session.partition(".")[2]))

    with pytest.raises(InvalidTag):
        AESGCM(half).decrypt(sealed[:12], sealed[12:], name.encode())
    house.served.backend.secret = bytes(32)     # as a gate with the same token over another database has another one
    ended(await page.call("GET", "/v1/whoami"))


async def test_a_cookie_that_another_port_has_put_in_front_ends_no_session(house: House) -> None:
    page = await signed_in(house, TOKEN)
    [(name, value)] = page.browser.cookies.items()

    answer = await page.call("GET", "/v1/whoami", cookies=[("cookie", f"{name}=tossed; a=b; {name}={value}")])

    assert answer.status == 200


async def test_two_sessions_in_one_browser_are_two_callers_and_the_oldest_of_too_many_goes(house: House) -> None:
    browser = Browser()
    ada = await signed_in(house, await house.key("agent", "ada"), browser)
    bob = await signed_in(house, await house.key("agent", "bob"), browser)

    assert [(await page.call("GET", "/v1/whoami")).json()["principal_id"] for page in (ada, bob)] == ["ada", "bob"]
    for _ in range(MOST_SESSIONS + 2):
        last = await signed_in(house, TOKEN, browser)
    assert len(browser.cookies) == MOST_SESSIONS
    assert await last.works()


# Other pages.


OTHERS = [
    [("origin", "http://localhost:9999"), ("sec-fetch-site", "same-site")], [("sec-fetch-site", "cross-site")],
    [("sec-fetch-site", "same-site")], [("sec-fetch-site", "none")], [("origin", "null")],
    [("origin", "https://evil.example")], [("origin", "http://127.0.0.1")], [("origin", "http://localhost:9999")],
    [("origin", "http://friend.example"), ("sec-fetch-site", "cross-site")]]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
async def test_no_other_page_uses_a_session_or_begins_or_ends_one(serve: Any, headers: Any) -> None:
    served = await serve(console=ON, security=security(), allowed_hosts=("localhost",),
                         allowed_origins=("http://friend.example", "http://localhost"))
    page = ConsolePage(served)
    assert (await page.sign_in(TOKEN)).status == 200

    answers = [await page.call("GET", "/v1/whoami", headers=headers),
               await page.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, headers=headers),
               await page.call("POST", "/console/sign-out", {}, headers=headers),
               await ConsolePage(served).sign_in(TOKEN, headers=headers)]

    assert [answer.json()["error"] for answer in answers] == ["forbidden"] * 4
    assert await page.works()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_a_form_begins_and_ends_no_session(house: House, kind: str | None) -> None:
    page = await signed_in(house, TOKEN)
    typed = [] if kind is None else [("content-type", kind)]

    for path, body in (("sign-in", {"credential": TOKEN}), ("sign-out", {"everywhere": True})):
        answer = await page.call("POST", f"/console/{path}", json.dumps(body).encode(), headers=[*SAME, *typed],
                                 typed=False)
        assert (answer.status, answer.json()["error"]) == (415, "unsupported_media_type")
    assert await page.works()


async def test_a_session_beside_another_credential_is_refused_and_so_is_one_shown_twice(house: House) -> None:
    page = await signed_in(house, TOKEN)

    for more in (("authorization", f"Bearer {TOKEN}"), ("x-api-key", TOKEN), ("x-asyncgate-session", page.session)):
        answer = await page.call("GET", "/v1/whoami", headers=[*SAME, more])
        assert (answer.status, "two" in answer.json()["message"]) == (401, True)


@pytest.mark.parametrize("facade", ["modern", "legacy", "bare"])
async def test_mcp_takes_no_session(house: House, facade: str) -> None:
    page = await signed_in(house, TOKEN)
    method, target, body, headers = mcp_call("whoami", {}, facade)

    answer = await page.call(method, target, body, headers=[*SAME, *headers])

    assert b"ada" not in answer.content
    assert b"unauthenticated" in answer.content or answer.status == 401


async def test_behind_a_proxy_that_changes_host_the_public_url_names_the_own_page(serve: Any) -> None:
    served = await serve(console=ON, security=security(), public_url="https://gate.example.com/tasks",
                         allowed_hosts=("localhost",), allowed_origins=("https://gate.example.com",))
    page, own = ConsolePage(served), [("origin", "https://gate.example.com"), ("sec-fetch-site", "same-origin")]

    assert (await page.sign_in(TOKEN, headers=own)).status == 200
    assert (await page.call("GET", "/v1/whoami", headers=own)).status == 200


async def test_a_stream_takes_a_session_and_ends_with_it(start: Any) -> None:
    """Over a socket: the gate ends the stream by itself."""
    import urllib.request
    live = start("console.enabled=true", "max_wait_seconds=0.2")

    def ask(path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(live.url + path, data=body, headers=headers)
        return urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)

    def follow() -> bytes:
        own = {"origin": live.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}
        with ask("/console/sign-in", json.dumps({"credential": TOKEN}).encode(), own) as answer:
            cookie = answer.headers["set-cookie"].partition(";")[0]
            shown = {**own, "cookie": cookie, "x-asyncgate-session": json.loads(answer.read())["session"]}
        stream = ask("/v1/receipts/stream", None, shown)
        assert stream.headers["content-type"] == "text/event-stream"
        ask("/console/sign-out", b"{}", shown).close()
        with stream:
            return bytes(stream.read())      # to its end

    following = asyncio.create_task(asyncio.to_thread(follow))
    done, _ = await asyncio.wait({following}, timeout=PATIENCE_SECONDS)
    if not done:
        live.kill()
    assert done, "the stream goes on"
    assert b"receipt" not in following.result()


# Ending.


async def test_signing_out_ends_this_session_here_and_in_a_copy(house: House) -> None:
    key = await house.key("agent", "ada")
    page, other = await signed_in(house, key), await signed_in(house, key)
    copy = dict(page.browser.cookies)

    answer = await page.sign_out()

    assert (answer.status, answer.json(), page.browser.cookies) == (200, {"ok": True}, {})
    page.browser.cookies = copy
    ended(await page.call("GET", "/v1/whoami"))
    assert await other.works()
    [line] = await house.audit(event="console_signed_out")
    assert line["details"]["console_session"] == page.session.partition(".")[0]


async def test_signing_out_everywhere_ends_the_sessions_of_this_credential_alone(house: House) -> None:
    key, another = await house.key("agent", "ada"), await house.key("agent", "ada")
    pages = [await signed_in(house, credential) for credential in (key, key, another, TOKEN)]

    assert (await pages[0].sign_out(everywhere=True)).status == 200

    assert [await page.works() for page in pages] == [False, False, True, True]
    await signed_in(house, key)     # the credential itself stays good
    assert len(await house.audit(event="console_signed_out_everywhere")) == 1
    assert (await pages[3].sign_out(everywhere=True)).status == 200
    assert [await page.works() for page in pages[2:]] == [True, False]


async def test_the_operation_that_signs_out_everywhere_ends_the_sessions_of_its_credential(house: House) -> None:
    key = await house.key("agent", "ada")
    page = await signed_in(house, key)

    await house.good("sign_out_everywhere", token=key)

    assert not await page.works()


async def test_what_ends_a_key_ends_its_sessions(house: House) -> None:
    revoked, rotated, kept = [await house.key("agent", name) for name in ("ada", "bob", "cyn")]
    pages = [await signed_in(house, key) for key in (revoked, rotated, kept)]

    await house.good("revoke_key", {"key_id": house.ids[revoked]})
    await house.good("rotate_key", {"key_id": house.ids[rotated], "overlap_seconds": 0})

    assert [await page.works() for page in pages] == [False, False, True]
    await house.good("rotate_credentials")
    assert not await pages[2].works()


async def test_a_suspended_tenant_has_no_sessions(house: House) -> None:
    page = await signed_in(house, await house.admin_of(OTHER))
    assert await page.works()

    await house.good("suspend_tenant", {"tenant": OTHER, "suspended": True, "reason": "a test"})

    assert not await page.works()


async def test_a_session_ends_after_its_time_also_while_its_page_goes_on_asking(house: House) -> None:
    page = await signed_in(house, TOKEN)
    backend = house.served.backend

    backend.skew += ON.session_seconds - 60
    assert await page.works()
    backend.skew += 61

    ended(await page.call("GET", "/v1/whoami"))


async def test_a_page_of_another_tenant_sees_nothing_of_this_one(house: House) -> None:
    made = await house.good("create_task", {"type": "demo", "payload": None, "agent_id": "ada"})
    page = await signed_in(house, await house.admin_of(OTHER))

    task = await page.call("GET", f"/v1/tasks/{made['task_id']}")
    listed = await page.call("GET", "/v1/tasks")
    claimed = await page.call("GET", "/v1/tasks", headers=[*SAME, ("x-tenant-id", HOME)])

    assert (task.status, listed.json()["tasks"], claimed.status) == (404, [], 403)


# Several processes.


@pytest.fixture
async def two(serve: Any) -> list[House]:
    """Two processes of a gate on one database."""
    return [House(await serve(security=security(), console=ON, instance_id=name)) for name in ("one", "two")]


async def test_every_process_takes_a_session_and_knows_within_five_seconds_that_it_ended(two: list[House]) -> None:
    house, other = two
    key = await house.key("agent", "ada")
    first, second = await signed_in(house, key), await signed_in(other, key)
    assert [await page.works() for page in (first.at(other.served), second.at(house.served))] == [True, True]

    assert (await first.sign_out(everywhere=True)).status == 200

    assert [await page.works() for page in (first.at(house.served), second.at(house.served))] == [False, False]
    later = other.guard.revocations.read_at + REVOCATIONS_SECONDS
    other.guard.revocations.clock = lambda: later
    assert not await second.at(other.served).works()
