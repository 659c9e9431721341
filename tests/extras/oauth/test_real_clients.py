"""Clients that nobody here wrote sign a person in at a running gate, call it, refresh, and end their session.

The SDKs of MCP for Python and TypeScript, oauth4webapi and Authlib as strict clients of OAuth, the Inspector's command
line, mcp-remote, and the official conformance suite.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
import trustme

from asyncgate.conformance.postgres_server import free_port
from tests.conftest import TOKEN, Live, Node
from tests.support.patience import PATIENCE_SECONDS
from tests.support.person import Person

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).parents[2] / "support" / "oauth_client.mjs"
REDIRECT = "http://127.0.0.1:6276/oauth/callback"


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about what clients of others say over HTTP.

    The statements behind that test_tokens tries on both.
    """
    return sqlite_url


class OAuthLive(Live):
    """A gate in a process of its own, with its authorization server on."""

    def __init__(self, key_path: Path, database: str) -> None:
        port, self.people = free_port(), list[Person]()
        super().__init__(
            f"public_url=http://127.0.0.1:{port}", f"security.jwt.private_key_path={key_path}",
            "security.oauth.enabled=true", "security.oauth.dynamic_registration=true",
            "security.outgoing.allow=localhost", port=port, database=database)

    def ask(self, verb: str, path: str, **fields: Any) -> dict[str, Any]:
        """Call the gate as its operator."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        response = httpx2.request(verb, self.url + path, headers=headers, json=fields, trust_env=False)
        assert response.is_success, response.text
        return dict(response.json())

    def person(self, role: str = "agent") -> Person:
        """Return a person who has a new sign-in link each time."""
        def ask_code() -> str:
            return str(self.ask("POST", "/v1/sign-in-links", principal_id="ada", role=role)["sign_in_code"])
        self.people.append(Person(self.url, ask_code))
        return self.people[-1]

    def register(self, *redirects: str) -> str:
        """Register a client; return its client id."""
        made = self.ask("POST", "/admin/oauth/clients", client_name="a test", redirect_uris=[*redirects])
        return str(made["client_id"])


@pytest.fixture
def gate(url: str, signing_key_path: Path) -> Iterator[OAuthLive]:
    """Return a gate at a port of its own, on each database."""
    running = OAuthLive(signing_key_path, url)
    yield running
    for person in running.people:
        person.browser.close()
    running.kill()


def converse(node: Node, person: Person, *arguments: str) -> dict[str, Any]:
    """Run the client of `oauth_client.mjs`; open in a browser what it asks for."""
    command = ["node", "--input-type=module", "--eval", SCRIPT.read_text(encoding="utf-8"), "--", *arguments]
    with subprocess.Popen(command, cwd=node.folder, env=node.environment, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        message: dict[str, Any] = {}
        for line in program.stdout:
            message = json.loads(line)
            if "open" in message:
                program.stdin.write(person.visit(message["open"]) + "\n")
                program.stdin.flush()
        assert program.wait() == 0, program.stderr and program.stderr.read()
    return message


@pytest.mark.parametrize("library", ["v2", "v1"])
def test_the_sdk_for_typescript_signs_a_person_in_and_refreshes(node: Node, gate: OAuthLive, library: str) -> None:
    report = converse(node, gate.person(), library, f"{gate.url}/mcp", gate.url, REDIRECT, "register")

    assert report["refused"] in ("UnauthorizedError", "Error")       # one of them is minified
    assert (report["who"]["principal_kind"], report["who"]["principal_id"]) == ("human", "ada")
    assert report["still"] == report["who"]
    assert report["rotated"]


def test_a_strict_client_finds_nothing_against_the_standards(node: Node, gate: OAuthLive) -> None:
    client_id = gate.register(REDIRECT)

    report = converse(node, gate.person(), "strict", f"{gate.url}/mcp", gate.url, REDIRECT, client_id)

    assert report["who"]["principal_id"] == "ada"
    assert report["rotated"]
    assert report["refused"] == ["invalid_token"]


class Kept:
    """Where the SDK for Python keeps what it learns."""

    def __init__(self) -> None:
        self.tokens: Any = None
        self.client: Any = None

    async def get_tokens(self) -> Any:
        """Return the tokens."""
        return self.tokens

    async def set_tokens(self, tokens: Any) -> None:
        """Keep the tokens."""
        self.tokens = tokens

    async def get_client_info(self) -> Any:
        """Return what the gate knows the client as."""
        return self.client

    async def set_client_info(self, client_info: Any) -> None:
        """Keep what the gate knows the client as."""
        self.client = client_info


def make_provider(url: str, person: Person, kept: Kept) -> Any:
    """Return the SDK's own way to authenticate, with a person in place of its browser."""
    from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
    from mcp.shared.auth import OAuthClientMetadata
    from pydantic import AnyUrl

    came_to: list[str] = []

    async def open_browser(address: str) -> None:
        came_to.append(person.visit(address))

    async def wait_for_browser() -> AuthorizationCodeResult:
        params = httpx2.URL(came_to[-1]).params
        return AuthorizationCodeResult(code=params["code"], state=params["state"], iss=params["iss"])

    metadata = OAuthClientMetadata(client_name="a test", redirect_uris=[AnyUrl(REDIRECT)],
                                   token_endpoint_auth_method="none")
    return OAuthClientProvider(url, metadata, kept, open_browser, wait_for_browser)


async def test_the_sdk_for_python_signs_a_person_in_and_refreshes(gate: OAuthLive) -> None:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    kept, url = Kept(), f"{gate.url}/mcp"
    provider = make_provider(url, gate.person(), kept)

    async def tell_who() -> Any:
        async with (httpx2.AsyncClient(auth=provider, trust_env=False, timeout=PATIENCE_SECONDS) as http,
                    Client(streamable_http_client(url, http_client=http)) as client):
            return (await client.call_tool("asyncgate.whoami", {})).structured_content

    first = await tell_who()
    token = kept.tokens.access_token
    provider.context.token_expiry_time = 1.0        # the SDK then takes its token for expired, and refreshes
    again = await tell_who()

    assert (first["principal_kind"], first["principal_id"]) == ("human", "ada")
    assert again == first
    assert kept.tokens.access_token != token


async def test_the_sdk_for_python_asks_again_for_a_scope_that_a_call_needs(gate: OAuthLive) -> None:
    """The lists of tools hide what a token may not call, so this is a client that knows the tool already."""
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    person, url = gate.person("admin"), f"{gate.url}/mcp"
    provider = make_provider(url, person, Kept())
    async with (httpx2.AsyncClient(auth=provider, trust_env=False, timeout=PATIENCE_SECONDS) as http,
                Client(streamable_http_client(url, http_client=http)) as client):
        answer = await client.call_tool("asyncgate.list_keys", {})

    assert answer.structured_content == {"keys": [], "next_cursor": None, "cursor": None}
    assert len([page for page in person.seen if "It may:" in page]) == 2


def test_authlib_exchanges_refreshes_and_revokes(gate: OAuthLive) -> None:
    from authlib.integrations.requests_client import OAuth2Session

    client_id, person = gate.register(REDIRECT), gate.person()
    with OAuth2Session(client_id, redirect_uri=REDIRECT, scope="tasks:read", code_challenge_method="S256",
                       token_endpoint_auth_method="none", revocation_endpoint_auth_method="none") as session:
        session.trust_env = False
        verifier = "v" * 48
        address, state = session.create_authorization_url(f"{gate.url}/oauth/authorize", code_verifier=verifier)
        token = session.fetch_token(f"{gate.url}/oauth/token", authorization_response=person.visit(address),
                                    state=state, code_verifier=verifier)
        who = session.get(f"{gate.url}/v1/whoami").json()
        fresh = session.refresh_token(f"{gate.url}/oauth/token", refresh_token=token["refresh_token"])
        session.revoke_token(f"{gate.url}/oauth/revoke", fresh["refresh_token"], token_type_hint="refresh_token")
        gone = session.get(f"{gate.url}/v1/whoami")

    assert (who["principal_id"], who["scopes"], token["scope"]) == ("ada", ["tasks:read"], "tasks:read")
    assert fresh["refresh_token"] != token["refresh_token"]
    assert gone.status_code == 401


def run_beside(node: Node, person: Person, *command: str) -> tuple[int, str]:
    """Run a client that prints an address for a browser and listens for its answer; return how it ended."""
    path = str(node.folder / "node_modules/.bin" / command[0])
    environment = {**node.environment, "MCP_AUTO_OPEN_ENABLED": "true"}    # the Inspector asks for a terminal otherwise
    with subprocess.Popen([path, *command[1:]], cwd=node.folder, env=environment, text=True, bufsize=1,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as program:
        assert program.stdout is not None
        output = ""
        for line in program.stdout:
            output += line
            if match := re.search(r"https?://\S+/oauth/authorize\?\S+", line):
                person.come_back(match[0])
        return program.wait(), output


def test_the_inspector_signs_a_person_in(node: Node, gate: OAuthLive) -> None:
    client_id = gate.register(REDIRECT)

    status, output = run_beside(
        node, gate.person(), "mcp-inspector", "--cli", "--server-url", f"{gate.url}/mcp", "--transport", "http",
        "--client-id", client_id, "--method", "tools/call", "--tool-name", "asyncgate.whoami", "--format", "json")

    assert status == 0, output
    assert '"ada"' in output


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of the Inspector's metadata document, at an HTTPS server that the gate of the test trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    files = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://localhost:{server.server_port}/client.json"
        (tmp_path / "client.json").write_text(json.dumps({
            "client_id": url, "client_name": "Inspector", "redirect_uris": [REDIRECT],
            "token_endpoint_auth_method": "none"}))
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield url
        server.shutdown()


# The document first: the gate takes over the authority when it starts.
def test_the_inspector_names_itself_by_its_metadata_document(node: Node, document: str, gate: OAuthLive) -> None:
    status, output = run_beside(
        node, person := gate.person(), "mcp-inspector", "--cli", "--server-url", f"{gate.url}/mcp", "--transport",
        "http", "--client-metadata-url", document, "--method", "tools/call", "--tool-name", "asyncgate.whoami",
        "--format", "json")

    assert status == 0, output
    assert '"ada"' in output
    assert "localhost" in person.seen[-1]


def test_the_official_suite_finds_that_the_authorization_server_conforms(
        node: Node, gate: OAuthLive, tmp_path: Path) -> None:
    port = free_port()
    client_id = gate.register(f"http://127.0.0.1:{port}/callback")

    status, output = run_beside(
        node, gate.person(), "conformance", "authorization", "--url", gate.url, "--client-id", client_id,
        "--port", str(port), "--resource", f"{gate.url}/mcp", "--spec-version", "2026-07-28", "-o", str(tmp_path))
    checks = [check for path in tmp_path.glob("*/checks.json") for check in json.loads(path.read_text())]

    assert status == 0, output
    assert {check["id"]: check["status"] for check in checks} == dict.fromkeys(
        ("authorization-code-grant", "authorization-server-metadata", "authorization-server-metadata-cimd"), "SUCCESS")


def test_mcp_remote_signs_a_person_in_for_a_program_that_knows_only_local_servers(
        node: Node, gate: OAuthLive, tmp_path: Path) -> None:
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a-test", "version": "1"}}
    messages: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": hello}, {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "asyncgate.whoami", "arguments": {}}}]
    person, path = gate.person(), str(node.folder / "node_modules/.bin/mcp-remote")
    environment = {**node.environment, "MCP_REMOTE_CONFIG_DIR": str(tmp_path)}

    with subprocess.Popen([path, f"{gate.url}/mcp", str(free_port()), "--transport", "http-only"], text=True, bufsize=1,
                          cwd=node.folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        for message in messages:
            program.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        address = ""
        for line in program.stderr:     # it tells the address before it listens for the answer
            address = match[0] if (match := re.search(r"https?://\S+/oauth/authorize\?\S+", line)) else address
            if "Waiting for authorization" in line:
                break
        person.come_back(address)
        answers = (json.loads(line) for line in program.stdout)
        who = next(answer for answer in answers if answer.get("id") == 2)
        program.kill()

    assert who["result"]["structuredContent"]["principal_id"] == "ada"
