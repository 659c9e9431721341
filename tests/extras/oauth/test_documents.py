"""Clients that are named by their metadata documents: what is read, how often, what is kept, and who can cause it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc.jwk import RSAKey
from msgspec.structs import replace

from asyncgate.extras.oauth import documents as shelf
from asyncgate.extras.oauth.clients import (
    ASSERTION_TYPE,
    authenticate_client,
    find_client,
    look_up_client,
    note_sign_in,
)
from asyncgate.extras.oauth.documents import (
    LONGEST_SECONDS,
    MOST_DOCUMENT_BYTES,
    PER_HOST,
    SHORTEST_SECONDS,
    STALE_SECONDS,
    UnusableDocument,
    read_document,
    read_lifetime,
)
from asyncgate.extras.oauth.grants import make_grant
from asyncgate.extras.oauth.requests import AuthorizationRequest
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.wire import OAuthError, Request
from asyncgate.parts.model.settings import Jwt, OAuth, Outgoing, SecuritySettings
from asyncgate.parts.model.stored_oauth import Grant, OAuthClient, User
from asyncgate.parts.process.outgoing import make_client
from tests.conftest import Serve, Served
from tests.extras.oauth.test_clients import assertion
from tests.support.browser import FORM, VERIFIER, Browser, Program
from tests.support.browser import sign_in as sign_in_with
from tests.support.identity_tools import HOME

pytestmark = pytest.mark.anyio

FIRST, SECOND = [RSAKey.import_key(rsa.generate_private_key(public_exponent=65537, key_size=2048), {"kid": kid})
                 for kid in ("first", "second")]
CLAUDE_CODE: dict[str, Any] = {
    "client_id": "https://claude.ai/oauth/claude-code-client-metadata", "client_name": "Claude Code",
    "client_uri": "https://claude.ai", "redirect_uris": ["http://localhost/callback", "http://127.0.0.1/callback"],
    "grant_types": ["authorization_code", "refresh_token"], "response_types": ["code"],
    "token_endpoint_auth_method": "none"}
CHATGPT: dict[str, Any] = {
    "client_id": "https://chatgpt.com/oauth/kDmjx77UnKOM/client.json", "client_uri": "https://chatgpt.com/",
    "redirect_uris": ["https://chatgpt.com/connector/oauth/kDmjx77UnKOM"], "client_name": "ChatGPT",
    "grant_types": ["authorization_code", "refresh_token"], "response_types": ["code"],
    "token_endpoint_auth_method": "private_key_jwt", "token_endpoint_auth_methods_supported": [
        "private_key_jwt", "none"],
    "token_endpoint_auth_signing_alg": "RS256", "jwks_uri": "https://chatgpt.com/oauth/jwks.json"}
VSCODE: dict[str, Any] = {
    "client_id": "https://vscode.dev/oauth/client-metadata.json", "client_name": "Visual Studio Code",
    "application_type": "native", "redirect_uris": [
        "http://127.0.0.1/", "http://127.0.0.1:33418/", "http://localhost/", "https://vscode.dev/redirect",
        "https://insiders.vscode.dev/redirect", "cursor://anysphere.cursor-mcp/oauth/callback"],
    "grant_types": ["authorization_code", "refresh_token", "urn:ietf:params:oauth:grant-type:device_code"],
    "token_endpoint_auth_method": "none"}


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about what is fetched when.

    Clients are kept as those of test_clients, which tries both.
    """
    return sqlite_url


def read(document: dict[str, Any], **changed: Any) -> OAuthClient:
    """Read a document as it would come from its own URL."""
    whole = {name: value for name, value in {**document, **changed}.items() if value is not ...}
    return read_document(document["client_id"], json.dumps(whole).encode(), 1.0)


# What a document says.


@pytest.mark.parametrize(("document", "method"), [
    (CLAUDE_CODE, "none"), (CHATGPT, "private_key_jwt"), (VSCODE, "none")], ids=["Claude Code", "ChatGPT", "VS Code"])
def test_the_documents_of_real_programs_are_good(document: dict[str, Any], method: str) -> None:
    client = read(document)

    assert (client.client_id, client.name, client.auth_method, client.origin) == (
        document["client_id"], document["client_name"], method, "document")
    assert json.loads(client.redirect_uris) == document["redirect_uris"]
    assert (client.trusted, client.pinned, client.tenant, client.secret_hash) == (False, False, None, None)


@pytest.mark.parametrize(("changed", "methods"), [
    ({}, ["private_key_jwt", "none"]),
    ({"token_endpoint_auth_methods_supported": ...}, ["private_key_jwt"]),
    ({"token_endpoint_auth_method": ...}, ["private_key_jwt", "none"]),
    ({"token_endpoint_auth_method": ..., "token_endpoint_auth_methods_supported": ...}, ["none"]),
    ({"token_endpoint_auth_method": "tls_client_auth"}, ["private_key_jwt", "none"]),
    ({"token_endpoint_auth_signing_alg": "PS256"}, ["none"]), ({"token_endpoint_auth_signing_alg": "ES256"}, [
        "private_key_jwt", "none"]), ({"jwks_uri": ...}, ["none"])])
def test_the_ways_of_both_sides_are_negotiated(changed: dict[str, Any], methods: list[str]) -> None:
    assert shelf.list_methods(read(CHATGPT, **changed)) == methods


@pytest.mark.parametrize("changed", [
    {"client_id": "https://evil.example/client.json"}, {"client_id": CLAUDE_CODE["client_id"] + "/"},
    {"client_id": ...},
    {"redirect_uris": ...}, {"redirect_uris": []}, {"redirect_uris": ["http://app.example/cb"]},
    {"redirect_uris": ["javascript:alert(1)"]}, {"redirect_uris": "https://claude.ai/cb"},
    {"redirect_uris": [f"https://claude.ai/{n}" for n in range(21)]}, {"client_secret": "s"}, {"client_name": 5},
    {"token_endpoint_auth_method": "client_secret_basic"}, {"token_endpoint_auth_method": "private_key_jwt"},
    {"jwks_uri": "http://localhost/jwks"}, {"jwks_uri": "file:///etc/passwd"}])
def test_a_document_that_is_no_good_names_no_program(changed: dict[str, Any]) -> None:
    with pytest.raises(UnusableDocument):
        read(CLAUDE_CODE, **changed)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"<html>", b'{"client_id":"\xff"}', b"[" * 5000])
def test_nor_does_what_is_no_document(text: bytes) -> None:
    with pytest.raises(UnusableDocument):
        read_document("https://app.example/client.json", text, 1.0)


def test_a_name_that_would_deceive_is_kept_for_the_pages_to_escape_and_is_short() -> None:
    assert read(CLAUDE_CODE, client_name="<b>\u202eevil\0</b>").name == "<b>\u202eevil</b>"
    assert read(CLAUDE_CODE, client_name=...).name == "claude.ai"
    assert len(read(CLAUDE_CODE, client_name="x" * 5000).name) == 200


@pytest.mark.parametrize(("header", "seconds"), [
    ("", 86_400.0), ("max-age=3600", 3600.0), ("public, max-age=3600, immutable", 3600.0), ("max-age=0", 300.0),
    ("max-age=99999999", LONGEST_SECONDS), ("no-store", 300.0), ("max-age=3600, no-cache", 300.0),
    ("s-maxage=5", 86_400.0), ("max-age=-1", 86_400.0), ("max-age=x", 86_400.0)])
def test_it_is_fresh_for_as_long_as_its_source_says_within_bounds(header: str, seconds: float) -> None:
    assert read_lifetime(header) == seconds


# A source on this machine.


class Source:
    """An HTTPS server that has one document at each path, and counts who asks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.more = ""
        self.go, self.heard = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.port = 0

    def url(self, path: str = "/client.json") -> str:
        """Return the URL of a path."""
        return f"https://localhost:{self.port}{path}"

    def publish(self, path: str = "/client.json", status: str = "200 OK", type: str = "application/json",
                **fields: Any) -> str:
        """Publish the document of a path; return its URL."""
        url = self.url(path)
        whole = {"client_id": url, "client_name": "App", "redirect_uris": ["http://localhost/cb"], **fields}
        self.answers[path] = f"{status}\r\ncontent-type: {type}", json.dumps(whole).encode()
        return url

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.asked.append(path)
            self.heard.set()
            await self.go.wait()
            head, body = self.answers.get(path, ("404 Not Found", b""))
            writer.write(f"HTTP/1.1 {head}\r\n{self.more}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def source(authority: trustme.CA) -> AsyncIterator[Source]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    source = Source()
    running = await asyncio.start_server(source.hear, "127.0.0.1", 0, ssl=context)
    source.port = running.sockets[0].getsockname()[1]
    yield source
    source.go.set()
    running.close()


def security(path: Path, allow: tuple[str, ...] = ("localhost",), **oauth: Any) -> SecuritySettings:
    return SecuritySettings(oauth=OAuth(enabled=True, **oauth), jwt=Jwt(private_key_path=str(path)),
                            outgoing=Outgoing(allow=allow))


def trust(gate: Served, authority: trustme.CA) -> AuthorizationServer:
    """Let a gate trust the authority of these tests; all else is by its settings."""
    server: AuthorizationServer = gate.gate.joined["oauth"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    server.documents.http = make_client(allow=server.settings.security.outgoing.allow, timeout_seconds=30.0,
                                        most_bytes=MOST_DOCUMENT_BYTES, tls=context)
    return server


@pytest.fixture
async def server(serve: Serve, signing_key_path: Path, authority: trustme.CA) -> AuthorizationServer:
    gate = await serve(public_url="http://localhost", security=security(signing_key_path))
    return trust(gate, authority)


async def sign_in(server: AuthorizationServer, client: OAuthClient) -> bool:
    """Let somebody sign in with a client."""
    return await server.directory.change(lambda work: note_sign_in(work, client), (OAuthClient, (client.client_id,)))


async def age(server: AuthorizationServer, url: str, seconds: float) -> None:
    """Let a row be so old, and this process know nothing of it."""
    def change(work: Any) -> None:
        row = work.find_record(OAuthClient, url)
        work.keep_record(replace(row, updated_at=work.now - seconds))
    await server.directory.change(change, (OAuthClient, (url,)))
    server.documents.known.clear()
    server.documents.failed.clear()


async def row_of(server: AuthorizationServer, url: str) -> OAuthClient | None:
    return await server.directory.find(OAuthClient, url)


async def test_a_document_is_a_program_and_a_row_only_when_somebody_has_signed_in(
        server: AuthorizationServer, source: Source) -> None:
    url = source.publish()
    client = await look_up_client(server, url)

    assert client is not None
    assert await row_of(server, url) is None
    assert await sign_in(server, client)
    row = await row_of(server, url)
    assert row is not None
    assert row.last_used_at is not None
    assert await look_up_client(server, url) == row
    assert source.asked == ["/client.json"]


async def test_all_who_wait_share_one_fetch(server: AuthorizationServer, source: Source) -> None:
    url = source.publish()
    source.go.clear()
    waiting = [asyncio.create_task(find_client(server, url)) for _ in range(20)]
    await source.heard.wait()
    waiting[0].cancel()     # whoever began it may go; the others still get it
    source.go.set()

    clients = await asyncio.gather(*waiting[1:])

    assert len(source.asked) == 1
    assert {client.client_id for client in clients if client} == {url}
    assert server.documents.flights.under_way == {}


@pytest.mark.parametrize("wrong", [
    {"status": "404 Not Found"}, {"status": "500 Oops"}, {"status": "302 Found\r\nlocation: /other.json"},
    {"type": "text/html"}, {"type": "text/plain"}, {"client_id": "https://localhost/other.json"},
    {"client_name": "x" * MOST_DOCUMENT_BYTES}, {"redirect_uris": ["http://evil.example/"]}])
async def test_a_failure_is_remembered_for_a_minute(
        server: AuthorizationServer, source: Source, wrong: dict[str, Any]) -> None:
    source.publish("/other.json")
    url = source.publish(**wrong)
    moment = server.documents.clock()
    server.documents.clock = lambda: moment
    for _ in range(5):
        assert await find_client(server, url) is None
    assert source.asked == ["/client.json"]
    source.publish()
    moment += 61.0

    assert await find_client(server, url) is not None


async def test_strangers_cannot_make_the_gate_fetch_in_a_loop(server: AuthorizationServer, source: Source) -> None:
    urls = [source.publish(f"/{number}.json") for number in range(PER_HOST + 5)]
    moment = server.documents.clock()
    server.documents.clock = lambda: moment
    clients = [await find_client(server, url) for url in urls]

    assert len(source.asked) == PER_HOST
    assert [client is not None for client in clients] == [True] * PER_HOST + [False] * 5
    assert await find_client(server, urls[0]) is not None, "what is known costs nothing"
    moment += 61.0
    assert await find_client(server, urls[-1]) is not None


async def test_what_strangers_name_fills_no_memory(server: AuthorizationServer, source: Source) -> None:
    assert (server.documents.known.most, server.documents.failed.most) == (shelf.MOST_KNOWN, shelf.MOST_KNOWN)


@pytest.mark.parametrize("client_id", [
    "http://localhost:1/client.json", "https://localhost", "https://localhost/", "https://u@localhost/c",
    "https://localhost/a/../c", "https://localhost/a/%2e%2e/c",
    "https://localhost/a/.%2E/c", "https://localhost/a%5Cc",
    "https://localhost/c#f", "https://localhost/c?q", "file:///etc/passwd", "//localhost/c",
    "https://localhost/a b", "https://localhost\\@evil/c", "HTTPS://localhost/c", "https://localhost/" + "x" * 500])
async def test_what_is_no_url_of_a_document_is_not_called(server: AuthorizationServer, client_id: str) -> None:
    async def no(*_: Any, **__: Any) -> None:
        raise AssertionError("it was called")
    server.documents.read = no     # type: ignore[method-assign,assignment]

    assert await look_up_client(server, client_id) is None


async def test_a_private_host_is_not_called(
        serve: Serve, signing_key_path: Path, authority: trustme.CA, source: Source) -> None:
    gate = await serve(public_url="http://localhost", security=security(signing_key_path, allow=()))
    server = trust(gate, authority)

    assert await find_client(server, source.publish()) is None
    assert source.asked == []


async def test_a_setting_turns_documents_off_but_for_pinned_ones(
        serve: Serve, signing_key_path: Path, authority: trustme.CA, source: Source) -> None:
    gate = await serve(public_url="http://localhost", security=security(signing_key_path, client_documents=False))
    server, url = trust(gate, authority), source.publish()
    assert await find_client(server, url) is None
    await gate.post("/v1/clients", {"client_id": url, "client_name": "App", "redirect_uris": ["http://localhost/cb"]})

    assert await find_client(server, url) is not None
    assert source.asked == []


# What is kept.


@pytest.fixture
async def used(server: AuthorizationServer, source: Source) -> str:
    """A client that somebody has signed in with."""
    url = source.publish()
    client = await find_client(server, url)
    assert client is not None
    assert await sign_in(server, client)
    source.asked.clear()
    return url


async def test_a_row_is_read_again_after_a_while_and_takes_over_what_changed(
        server: AuthorizationServer, source: Source, used: str) -> None:
    source.publish(client_name="New", redirect_uris=["http://localhost/new"])
    await age(server, used, SHORTEST_SECONDS - 60)
    assert (await find_client(server, used)).name == "App"      # type: ignore[union-attr]
    await age(server, used, SHORTEST_SECONDS + 60)
    client = await find_client(server, used)

    assert client is not None
    assert (client.name, client.redirect_uris, source.asked) == ("New", '["http://localhost/new"]', ["/client.json"])
    assert client == await row_of(server, used)
    assert client.last_used_at is not None


@pytest.mark.parametrize(("status", "good_for"), [("500 Oops", STALE_SECONDS), ("404 Not Found", LONGEST_SECONDS)])
async def test_while_its_source_is_down_a_row_stays_good_for_a_while(
        server: AuthorizationServer, source: Source, used: str, status: str, good_for: float) -> None:
    source.publish(status=status)
    await age(server, used, good_for - 60)
    assert await find_client(server, used) == await row_of(server, used)
    await age(server, used, good_for + 60)

    assert await find_client(server, used) is None


async def test_a_pinned_row_is_never_read_again(
        server: AuthorizationServer, source: Source, used: str) -> None:
    def pin(work: Any) -> None:
        work.keep_record(replace(work.find_record(OAuthClient, used), pinned=True))
    await server.directory.change(pin, (OAuthClient, (used,)))
    await age(server, used, 10 * STALE_SECONDS)

    assert await find_client(server, used) is not None
    assert source.asked == []


async def test_a_disabled_program_is_not_read_and_not_let_in(
        server: AuthorizationServer, source: Source, used: str) -> None:
    client = await row_of(server, used)
    assert client is not None

    def disable(work: Any) -> None:
        work.keep_record(replace(work.find_record(OAuthClient, used), disabled_at=work.now))
    await server.directory.change(disable, (OAuthClient, (used,)))
    await age(server, used, STALE_SECONDS)

    assert await find_client(server, used) is None
    assert not await sign_in(server, client)
    assert source.asked == []


async def test_whoever_signs_in_with_a_program_that_was_removed_meanwhile_does_not(oauth_gate: Served) -> None:
    server = oauth_gate.gate.joined["oauth"]
    made = await oauth_gate.post("/v1/clients", {"client_name": "App", "redirect_uris": ["http://localhost/cb"]})
    client = await find_client(server, made["client_id"])
    assert client is not None
    assert await sign_in(server, client)
    await oauth_gate.post(f"/v1/clients/{made['client_id']}/remove")

    assert not await sign_in(server, client)
    assert await find_client(server, made["client_id"]) is None
    asked = AuthorizationRequest(client.client_id, "http://localhost/cb", None, frozenset({"tasks:read"}),
                                 "http://localhost/mcp", "c" * 43)
    person = User("u1", "", "", "", "Ada", HOME, "human", "ada", "agent", None, None, "an admin", 1.0)
    with pytest.raises(OAuthError) as error:
        await make_grant(server, client, asked, person, asked.scopes)
    assert error.value.code == "access_denied"
    assert await server.directory.page(Grant) == []


async def test_a_person_allows_a_program_in_that_is_named_by_its_document(
        serve: Serve, signing_key_path: Path, authority: trustme.CA, source: Source) -> None:
    gate = await serve(public_url="http://localhost", security=security(signing_key_path))
    server, url = trust(gate, authority), source.publish(client_name="<b>Bank</b>")
    program = Program(gate, "http://localhost:4711/cb")
    program.client_id = url
    browser = Browser(gate)
    consent = await sign_in_with(browser, program)

    assert "localhost" in consent.text
    assert "<b>Bank</b>" in consent.text        # as text: the page has no such element
    assert await row_of(server, url) is None
    await browser.submit(consent, "allow")
    assert browser.address.startswith("http://localhost:4711/cb?")
    assert await row_of(server, url) is not None
    form = urlencode({"grant_type": "authorization_code", "code": browser.told["code"], "client_id": url,
                      "redirect_uri": program.back, "code_verifier": VERIFIER}).encode()
    answer = await gate.call("POST", "/oauth/token", form, headers=[FORM], token=None)
    assert answer.status == 200, answer
    told = answer.json()
    assert (await gate.call("GET", "/v1/tasks", token=told["access_token"])).status == 200
    await gate.post(f"/v1/clients/{quote(url, safe='')}", {"disabled": True})
    refresh = urlencode({"grant_type": "refresh_token", "refresh_token": told["refresh_token"],
                         "client_id": url}).encode()
    refused = await gate.call("POST", "/oauth/token", refresh, headers=[FORM], token=None)
    assert (refused.status, refused.json()["error"]) == (401, "invalid_client")
    assert (await gate.call("GET", "/v1/tasks", token=told["access_token"])).status == 401
    assert (await browser.get(program.url())).status == 400


# The keys of clients that sign.


async def test_the_keys_of_a_program_are_read_again_for_an_unknown_one_and_stay_while_their_source_is_down(
        server: AuthorizationServer, source: Source) -> None:
    moment = server.documents.clock()
    server.documents.clock = lambda: moment
    url = source.publish(token_endpoint_auth_method="private_key_jwt", jwks_uri=source.url("/jwks.json"))

    async def ask(key: Any) -> str:
        text = assertion(key, iss=url, sub=url, jti=str(uuid.uuid4()))
        scope: Any = {"method": "POST", "path": "/oauth/token", "query_string": b"", "headers": []}
        form = {"client_assertion": text, "client_assertion_type": ASSERTION_TYPE}
        return (await authenticate_client(server, Request(scope, b"", "127.0.0.1"), form)).client_id

    def show(*keys: Any) -> None:
        body = json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()
        source.answers["/jwks.json"] = "200 OK", body
    show(FIRST)
    assert await ask(FIRST) == url
    show(SECOND)
    with pytest.raises(OAuthError):
        await ask(SECOND)       # a minute has not passed
    assert source.asked.count("/jwks.json") == 1
    moment += 61.0
    assert await ask(SECOND) == url
    with pytest.raises(OAuthError):
        await ask(FIRST)        # it was withdrawn
    source.answers["/jwks.json"] = "500 Oops", b""
    moment += 601.0
    assert await ask(SECOND) == url
    assert source.asked.count("/jwks.json") == 3
