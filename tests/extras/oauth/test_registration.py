"""Clients that register themselves: only where a setting says so, bounded, and forgotten when nobody uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.extras.oauth import registration
from asyncgate.extras.oauth.clients import authenticate_client, note_sign_in
from asyncgate.extras.oauth.registration import (
    LEFT_SECONDS,
    MOST_UNUSED,
    PER_NETWORK,
    REGISTER_PATH,
    forget_clients,
    is_left,
    prune_clients,
)
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.wire import Request
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.stored_oauth import OAuthClient
from tests.conftest import Answer, Served
from tests.support.identity_tools import House

pytestmark = pytest.mark.anyio

UNUSED_SECONDS = 7 * DAY_SECONDS     # by default
CLAUDE: dict[str, Any] = {
    "client_name": "Claude", "redirect_uris": ["https://claude.ai/api/mcp/auth_callback"], "response_types": ["code"],
    "grant_types": ["authorization_code", "refresh_token"], "token_endpoint_auth_method": "none",
    "scope": "tasks:read,openid offline_access"}
CODEX: dict[str, Any] = {
    "client_name": "Codex", "redirect_uris": ["http://127.0.0.1:37819/callback/x"], "application_type": "native",
    "grant_types": ["authorization_code", "refresh_token", "urn:example:unknown"], "response_types": ["code"],
    "token_endpoint_auth_method": "client_secret_post", "software_id": "s", "logo_uri": "https://x.example/l.png"}


class Registering:
    """A gate at which clients register themselves."""

    def __init__(self, gate: Served) -> None:
        self.gate = gate
        self.server: AuthorizationServer = gate.gate.joined["oauth"]

    async def send(self, document: Any, **more: Any) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return await self.gate.call("POST", REGISTER_PATH, body, token=None, **more)

    async def register(self, **changed: Any) -> dict[str, Any]:
        document = {name: value for name, value in {**CLAUDE, **changed}.items() if value is not ...}
        answer = await self.send(document)
        assert answer.status == 201, answer
        made: dict[str, Any] = answer.json()
        return made

    async def ids(self) -> set[str]:
        clients, after = set[str](), ""
        while page := await self.server.directory.page(OAuthClient, after):
            clients, after = clients | {row.client_id for row in page}, page[-1].client_id
        return clients

    async def store(self, *rows: OAuthClient) -> None:
        def store(work: Any) -> None:
            for row in rows:
                work.keep_record(row)
        await self.server.directory.change(store)

    def now(self) -> float:
        return float(self.server.engine.backend.now())

    def row(self, id: str, created: float = 0.0, **more: Any) -> OAuthClient:
        """A client that was registered so many seconds ago."""
        then = self.now() - created
        return replace(OAuthClient(id, "dynamic", "n", "[]", None, "none", None, None, None, False, False, None, then,
                                   "itself", then), **more)


@pytest.fixture
async def registering(serve_oauth: Callable[..., Any]) -> Registering:
    return Registering(await serve_oauth(oauth={"dynamic_registration": True}))


@pytest.mark.one_store
async def test_it_is_off_unless_a_setting_turns_it_on(oauth_gate: Served) -> None:
    answer = await oauth_gate.call("POST", REGISTER_PATH, CLAUDE, token=None)

    assert answer.status == 404


async def test_a_program_registers_itself_and_is_told_what_it_is(registering: Registering) -> None:
    answer = await registering.send(CLAUDE)
    made = answer.json()

    assert (answer.status, answer.headers["cache-control"]) == (201, "no-store")
    assert made == {
        "client_id": made["client_id"], "client_id_issued_at": made["client_id_issued_at"], "client_name": "Claude",
        "redirect_uris": CLAUDE["redirect_uris"], "token_endpoint_auth_method": "none", "response_types": ["code"],
        "grant_types": ["authorization_code", "refresh_token"], "scope": "tasks:read"}
    row = await registering.server.directory.find(OAuthClient, made["client_id"])
    assert row is not None
    assert (row.origin, row.scopes, row.tenant, bool(row.trusted), row.secret_hash) == (
        "dynamic", None, None, False, None)
    (line,) = await House(registering.gate).audit(event="client_registered")
    assert (line["severity"], line["details"]["about_client"], line["ip"]) == (
        "info", made["client_id"], "127.0.0.1")


async def test_a_program_with_a_secret_gets_one_that_is_good(registering: Registering) -> None:
    for document in (CODEX, {"redirect_uris": ["https://app.example/cb"]}):     # RFC 7591: without a word it is basic
        made = (await registering.send(document)).json()
        scope: Any = {"method": "POST", "path": "/oauth/token", "query_string": b"", "headers": []}
        form = {"client_id": made["client_id"], "client_secret": made["client_secret"]}

        assert made["client_secret_expires_at"] == 0
        assert (await authenticate_client(registering.server, Request(scope, b"", "127.0.0.1"), form)).client_id == (
            made["client_id"])
    assert made["token_endpoint_auth_method"] == "client_secret_basic"
    assert made["client_name"] == "app.example"


REFUSED: list[tuple[str, Any]] = [
    ("invalid_redirect_uri", {**CLAUDE, "redirect_uris": uris}) for uris in (
        [], ["http://evil.example/cb"], ["javascript:alert(1)"], ["https://a.example/#f"], ["https://*.example/"],
        ["myapp:/cb"], [f"https://a.example/{n}" for n in range(21)], ["https://a.example/" + "a" * 2048], "x", [5],
        None)] + [
    ("invalid_client_metadata", {**CLAUDE, "token_endpoint_auth_method": "private_key_jwt"}),
    ("invalid_client_metadata", {**CLAUDE, "grant_types": ["client_credentials"]}),
    ("invalid_client_metadata", {**CLAUDE, "grant_types": ["password"]}),
    ("invalid_client_metadata", {**CLAUDE, "response_types": ["token"]}),
    ("invalid_client_metadata", {**CLAUDE, "client_name": 5}),
    ("invalid_redirect_uri", {"client_name": "x"}),
    ("invalid_client_metadata", b"{"), ("invalid_client_metadata", b"[]"), ("invalid_client_metadata", b"\xff"),
    ("invalid_client_metadata", b"[" * 5000)]


@pytest.mark.one_store
async def test_what_a_program_may_not_be_is_refused_in_the_words_of_the_standard(registering: Registering) -> None:
    for code, document in REFUSED:
        answer = await registering.send(document)
        assert (answer.status, answer.json()["error"]) == (400, code), document
    form = await registering.send(b"client_name=x", headers=[("content-type", "application/x-www-form-urlencoded")])
    assert (form.status, form.json()["error"]) == (400, "invalid_client_metadata")
    assert (await registering.gate.call("GET", REGISTER_PATH, token=None)).status == 405
    assert (await registering.send({**CLAUDE, "x": "x" * 70_000})).status == 413
    assert await registering.ids() == set()


@pytest.mark.one_store
async def test_a_name_with_html_and_odd_characters_is_kept_for_the_pages_to_escape(registering: Registering) -> None:
    assert (await registering.register(client_name="<b>\u202e\0</b>"))["client_name"] == "<b>\u202e</b>"
    assert len((await registering.register(client_name="x" * 999))["client_name"]) == 200


async def test_a_network_registers_so_many_in_an_hour(registering: Registering) -> None:
    for _ in range(PER_NETWORK):
        await registering.register()
    answer = await registering.send(CLAUDE)

    assert (answer.status, answer.json()["error"], answer.headers["retry-after"]) == (
        429, "temporarily_unavailable", "3600")
    assert len(await registering.ids()) == PER_NETWORK


async def test_there_are_only_so_many_that_nobody_has_used(registering: Registering) -> None:
    await registering.store(*[registering.row(f"new{number}") for number in range(MOST_UNUSED - 1)],
                            registering.row("used", last_used_at=1e12))
    made = await registering.register()
    answer = await registering.send(CLAUDE)
    assert (answer.status, answer.json()["error"]) == (503, "temporarily_unavailable")
    # What is an hour old makes room.
    await registering.store(registering.row("new0", registration.CROWDED_SECONDS + 60))
    other = await registering.register()

    ids = await registering.ids()
    assert {made["client_id"], other["client_id"], "used"} <= ids
    assert "new0" not in ids


async def test_what_nobody_uses_is_forgotten_but_nothing_that_an_admin_has_touched(registering: Registering) -> None:
    old, long_ago = UNUSED_SECONDS + 60, registering.now() - LEFT_SECONDS - 60
    gone = [registering.row("unused", old), registering.row("left", 1e9, last_used_at=long_ago),
            registering.row("https://app.example/c", 1e9, origin="document", last_used_at=long_ago)]
    kept = [registering.row("new", UNUSED_SECONDS - 60), registering.row("in use", 1e9, last_used_at=long_ago + 120),
            *[registering.row(f"touched{at}", 1e9, **{name: value}) for at, (name, value) in enumerate({
                "pinned": True, "trusted": True, "disabled_at": 1.0, "tenant": "t", "scopes": "[]",
                "access_days": 5, "origin": "registered"}.items())]]
    await registering.gate.end_loops()      # the gate forgets clients by itself, too
    await registering.store(*gone, *kept)

    assert [row for row in (*gone, *kept) if is_left(row, registering.now(), UNUSED_SECONDS)] == gone
    assert await prune_clients(registering.server.engine) == len(gone)
    assert await registering.ids() == {row.client_id for row in kept}


async def test_one_that_somebody_signs_in_with_meanwhile_stays(registering: Registering) -> None:
    row = registering.row("c1", UNUSED_SECONDS + 60)
    await registering.store(row)
    await registering.server.directory.change(lambda work: note_sign_in(work, row), (OAuthClient, ("c1",)))

    assert await forget_clients(registering.server.engine, UNUSED_SECONDS) == 0
    assert await registering.ids() == {"c1"}
