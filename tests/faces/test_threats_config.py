"""Headers and configuration (threats H1 to H5): what every answer says, what none says, and what does not start.

    H1  test_rest.py::test_every_refusal_carries_the_headers_of_safety
        test_rest.py::test_over_a_socket_answers_are_whole_and_do_not_name_the_server
        test_rest.py::test_strict_transport_is_demanded_over_https_only
        test_mcp.py::test_answers_carry_the_headers_of_every_answer
        test_transport.py::test_a_refusal_carries_the_headers_that_every_answer_carries
        test_transport.py::test_no_answer_names_the_server
        test_threats_config.py::test_h1_over_tls_every_answer_carries_every_header_of_safety
        test_threats_config.py::test_h1_a_trusted_proxy_that_speaks_https_gets_strict_transport_on_every_answer
        test_threats_config.py::test_h1_nobody_else_is_believed_about_https
        test_threats_config.py::test_h1_over_plain_http_nothing_demands_strict_transport
    H2  test_threats_config.py::test_h2_a_database_that_breaks_shows_none_of_its_words
    H3  test_threats_config.py::test_h3_old_tls_and_weak_ciphers_are_refused
        test_threats_config.py::test_h3_a_certificate_that_is_no_good_is_one_line_and_nobody_is_asked_for_a_password
        test_threats_config.py::test_h3_a_private_key_that_others_may_use_stops_the_start
        test_threats_config.py::test_h3_a_private_key_with_its_password_is_good
        test_threats_config.py::test_h3_half_a_certificate_stops_the_start
        test_threats_config.py::test_h3_a_token_that_can_be_guessed_stops_the_start_off_loopback
        test_threats_config.py::test_h3_a_token_that_cannot_be_guessed_starts
        test_threats_config.py::test_h3_insecure_dev_is_refused_off_loopback_and_on_postgres
        test_threats_config.py::test_h3_the_program_does_not_start_with_a_placeholder
        test_threats_config.py::test_h3_plain_http_off_loopback_is_warned_of
        test_jwt.py::test_a_key_that_nobody_should_trust_stops_the_start
        test_settings.py::test_a_value_of_the_wrong_kind_is_refused_with_the_kind_it_takes
        test_postgres_walls.py::test_a_server_does_not_start_for
        (an issuer over plain http off loopback: security.jwt.jwks is refused, security.jwt.issuer is a name that is
        compared and never fetched; the gate's own issuer comes with the OAuth issue)
    H4  test_rest.py::test_insecure_dev_lets_everybody_in_and_marks_every_answer
        test_threats_config.py::test_h4_insecure_dev_warns_at_every_start
    H5  test_settings.py::test_a_secret_is_never_shown
        test_settings.py::test_a_refusal_does_not_repeat_a_secret
        test_settings.py::test_a_url_is_shown_without_its_password
        test_threats_config.py::test_h5_whatever_is_secret_or_holds_a_password_may_come_from_a_file
        test_threats_config.py::test_h5_every_secret_may_come_from_a_file
        test_threats_config.py::test_h5_a_secret_given_twice_is_refused_even_if_it_is_the_same
        test_threats_config.py::test_h5_one_newline_at_the_end_of_a_file_is_no_part_of_the_secret
        test_threats_config.py::test_h5_a_file_with_nothing_in_it_is_no_secret
        test_threats_config.py::test_h5_what_is_no_secret_does_not_come_from_a_file
        test_threats_config.py::test_h5_a_file_overrides_what_a_file_of_settings_says
        (a command provider is not there: files and ${VARIABLES} are what secret managers fill)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from asyncgate.backends.sqlite import connect
from asyncgate.conformance.plugin import SHARED
from asyncgate.conformance.postgres_server import connected
from asyncgate.parts.faces import openapi
from asyncgate.parts.identity.startup import require_safe_start
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import (
    DatabaseSettings,
    SecuritySettings,
    Settings,
    SettingsError,
    Tls,
    list_settings,
    list_values,
    load_settings,
)
from asyncgate.parts.model.wire import Name
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.folders import open_private
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
RANDOM = "0123456789abcdef0123456789abcdee"
SAFETY = {
    "x-content-type-options": "nosniff", "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer", "cache-control": "no-store", "x-asyncgate": "1"}
STRICT = "max-age=31536000; includeSubDomains"


@pytest.fixture
def url(backend_url: str) -> str:
    """Run what needs a store on every kind that keeps tables."""
    if backend_url.startswith("memory"):
        pytest.skip("there are no tables in memory")
    return backend_url


# A gate with a certificate, and a client that says exactly what it is told.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return who signs the certificates of these tests."""
    return trustme.CA()


@pytest.fixture(scope="module")
def pair(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the files of a certificate and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    for number, blob in enumerate(made.cert_chain_pems):
        blob.write_to_path(certificate, append=number > 0)
    key.touch(0o600)
    made.private_key_pem.write_to_path(key)
    return certificate, key


def named(pair: tuple[Path, Path], **more: str) -> list[str]:
    """Return the settings that name a certificate."""
    given = {"certificate_path": str(pair[0]), "private_key_path": str(pair[1]), **more}
    return [f"security.tls.{name}={value}" for name, value in given.items()]


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


def said(raw: bytes) -> tuple[int, dict[str, str]]:
    """Read status and headers of an answer."""
    head = raw.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    pairs = [line.split(": ", 1) for line in head[1:]]
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return int(head[0].split()[1]), {name.lower(): value for name, value in pairs}


def exchange(live: Any, request: str, context: ssl.SSLContext | None = None) -> tuple[int, dict[str, str]]:
    """Send one request as it is, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS) as plain:
        line = context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain
        with line:
            line.sendall(request.replace("\n", "\r\n").encode())
            return said(b"".join(iter(lambda: line.recv(65536), b"")))


AUTHORIZED = f"Host: localhost\nAuthorization: Bearer {TOKEN}\nConnection: close\n"
TYPED = "Content-Type: application/json\n"
MCP = "Content-Type: application/json\nAccept: application/json, text/event-stream\nMCP-Protocol-Version: 2025-11-25\n"
LISTED = '{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
REQUESTS = {
    "a good answer": (200, f"GET /v1/config HTTP/1.1\n{AUTHORIZED}\n"),
    "without a credential": (200, "GET /health HTTP/1.1\nHost: localhost\nConnection: close\n\n"),
    "a write": (200, f'POST /v1/tasks HTTP/1.1\n{AUTHORIZED}{TYPED}Content-Length: 24\n\n{{"type":"t","payload":0}}'),
    "the description": (200, f"GET /openapi.json HTTP/1.1\n{AUTHORIZED}\n"),
    "only the head": (200, f"HEAD /health HTTP/1.1\n{AUTHORIZED}\n"),
    "a tool": (200, f"POST /mcp HTTP/1.1\n{AUTHORIZED}{MCP}Content-Length: {len(LISTED)}\n\n{LISTED}"),
    "no JSON": (400, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}{TYPED}Content-Length: 1\n\n{{"),
    "nobody": (401, "GET /v1/tasks HTTP/1.1\nHost: localhost\nConnection: close\n\n"),
    "nobody at mcp": (401, f"POST /mcp HTTP/1.1\nHost: localhost\nConnection: close\n{MCP}Content-Length: 2\n\n{{}}"),
    "another page": (403, f"GET /health HTTP/1.1\n{AUTHORIZED}Origin: https://evil.example\n\n"),
    "nothing there": (404, f"GET /nothing HTTP/1.1\n{AUTHORIZED}\n"),
    "another method": (405, f"PUT /v1/tasks HTTP/1.1\n{AUTHORIZED}\n"),
    "too large": (413, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}Content-Length: 99999999\n\n"),
    "another type": (415, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}Content-Type: text/plain\nContent-Length: 2\n\n{{}}"),
    "another host": (421, "GET /health HTTP/1.1\nHost: evil.example\nConnection: close\n\n"),
    "a large head": (431, f"GET /health HTTP/1.1\n{AUTHORIZED}X-Large: {'a' * 40_000}\n\n"),
    "no HTTP": (400, "GET / HTTP/1.1\n\n"),
    "two lengths": (400, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}Content-Length: 1\nTransfer-Encoding: chunked\n\n"),
    "no chunk": (400, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}Transfer-Encoding: chunked\n\nnone\n"),
    "a slow body": (408, f"POST /v1/tasks HTTP/1.1\n{AUTHORIZED}Content-Length: 9\n\n{{"),
}


QUICK = "header_timeout_seconds=0.5", "body_timeout_seconds=0.5"


def test_h1_over_tls_every_answer_carries_every_header_of_safety(
    start: Any, pair: tuple[Path, Path], authority: trustme.CA
) -> None:
    live, context = start(*named(pair), *QUICK), trusting(authority)

    for what, (status, request) in REQUESTS.items():
        code, headers = exchange(live, request, context)
        assert code == status, (what, headers)
        # /docs and /openapi.json say themselves what their page may load.
        assert {name: headers.get(name) for name in SAFETY} == SAFETY, what
        assert headers["strict-transport-security"] == STRICT, what
        assert "server" not in headers


@pytest.mark.parametrize("proto", ["https", "HTTPS", "https, http", " https"])
def test_h1_a_trusted_proxy_that_speaks_https_gets_strict_transport_on_every_answer(start: Any, proto: str) -> None:
    live = start("trusted_proxies=10.0.0.0/8,127.0.0.0/8", *QUICK)

    for what, (status, request) in REQUESTS.items():
        code, headers = exchange(live, request.replace("\n", f"\nX-Forwarded-Proto: {proto}\n", 1))
        assert (code, headers.get("strict-transport-security")) == (status, STRICT), what


@pytest.mark.parametrize(("proxies", "proto"), [
    ((), "https"), (("10.0.0.0/8",), "https"), (("127.0.0.1",), "http"), (("127.0.0.1",), ""),
    (("127.0.0.1",), "http, https"), (("127.0.0.1",), "httpsx")])
@pytest.mark.parametrize("url", ["memory:"])
async def test_h1_nobody_else_is_believed_about_https(serve: Any, proxies: tuple[str, ...], proto: str) -> None:
    served = await serve(trusted_proxies=proxies)

    answer = await served.call("GET", "/health", headers=[("x-forwarded-proto", proto)])

    assert answer.status == 200
    assert "strict-transport-security" not in answer.headers


def test_h1_over_plain_http_nothing_demands_strict_transport(start: Any) -> None:
    live = start(*QUICK)

    for what, (status, request) in REQUESTS.items():
        code, headers = exchange(live, request)
        assert (code, headers.get("strict-transport-security")) == (status, None), what


# H2: what breaks inside stays inside.


WORDS = re.compile(r"relation|no such table|receipts|select|insert|sqlite|asyncpg|postgres|traceback|\.py|/", re.I)


@contextlib.asynccontextmanager
async def broken(url: str, config: pytest.Config) -> AsyncIterator[None]:
    """Take a table away from under a gate."""
    away = "ALTER TABLE {0}receipts RENAME TO away", "ALTER TABLE {0}away RENAME TO receipts"
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.partition("///")[2])) as file:
            file.execute(away[0].format(""))
        yield
        return
    server = config.stash[SHARED].started()
    assert server
    async with connected(server.admin_url(url.rpartition("/")[2])) as db:
        await db.execute(away[0].format("asyncgate."))
        try:
            yield
        finally:
            await db.execute(away[1].format("asyncgate."))


async def test_h2_a_database_that_breaks_shows_none_of_its_words(
    serve: Any, url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    task = await served.post("/v1/tasks", {"type": "demo", "payload": None})
    bare = {"method": "tools/call", "params": {"name": "asyncgate.list_receipts", "arguments": {}}}

    async with broken(url, request.config):
        answers = [await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}),
                   await served.call("GET", "/v1/receipts"),
                   await served.call("GET", f"/v1/tasks/{task['task_id']}/history"),
                   await served.call("POST", "/mcp", bare)]

    assert [answer.status // 100 for answer in answers] == [5, 5, 5, 2]
    for answer in answers:
        told = answer.json()["error"]["data"] if answer.status == 200 else answer.json()
        assert set(told) <= {"error", "code", "message", "detail", "retry_after", "retryable", "outcome"}, told
        assert not WORDS.search(told["message"].replace("receipt", "")), told
    assert "receipts" in caplog.text


# H3: what does not start.


def settings(host: str = "127.0.0.1", url: str = "memory:", **more: Any) -> Settings:
    return Settings(**{"api_key": RANDOM, "host": host, **more}, database=DatabaseSettings(url=url))


def test_h3_old_tls_and_weak_ciphers_are_refused(start: Any, pair: tuple[Path, Path], authority: trustme.CA) -> None:
    def greeted(live: Any, least: str, most: str, ciphers: str = "DEFAULT:@SECLEVEL=0") -> str:
        context = trusting(authority)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)     # of what this test tries
            context.minimum_version, context.maximum_version = ssl.TLSVersion[least], ssl.TLSVersion[most]
        context.set_ciphers(ciphers)
        with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as line:
                    return str(line.version())
            except (ssl.SSLError, ConnectionResetError):
                return "refused"

    live, strict = start(*named(pair)), start(*named(pair, minimum_version="TLSv1.3"))

    assert greeted(live, "TLSv1", "TLSv1") == greeted(live, "TLSv1", "TLSv1_1") == "refused"
    assert greeted(live, "TLSv1", "TLSv1_2") == "TLSv1.2"
    assert greeted(live, "TLSv1_2", "TLSv1_3") == greeted(strict, "TLSv1_2", "TLSv1_3") == "TLSv1.3"
    assert greeted(strict, "TLSv1", "TLSv1_2") == "refused"
    for weak in ("AES128-SHA", "AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384"):
        assert greeted(live, "TLSv1_2", "TLSv1_2", f"{weak}:@SECLEVEL=0") == "refused", weak
    for strong in ("ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305"):
        assert greeted(live, "TLSv1_2", "TLSv1_2", strong) == "TLSv1.2", strong


def served(*sets: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a gate that does not start; it has no terminal to ask on."""
    command = [sys.executable, "-m", "asyncgate", "serve", "--port", "0", "--database", "memory://"]
    command += [part for setting in sets for part in ("--set", setting)]
    return subprocess.run(command, env={**os.environ, "ASYNCGATE_API_KEY": RANDOM, **environ}, capture_output=True,
                          text=True, timeout=PATIENCE_SECONDS, stdin=subprocess.DEVNULL, start_new_session=True)


def written(path: Path, text: bytes) -> str:
    path.touch(0o600)
    path.write_bytes(text)
    return str(path)


def test_h3_a_certificate_that_is_no_good_is_one_line_and_nobody_is_asked_for_a_password(
    pair: tuple[Path, Path], authority: trustme.CA, tmp_path: Path
) -> None:
    key = load_pem_private_key(pair[1].read_bytes(), None)
    form = Encoding.PEM, PrivateFormat.PKCS8
    locked = written(tmp_path / "locked", key.private_bytes(*form, BestAvailableEncryption(b"open sesame")))
    other = written(tmp_path / "other", rsa.generate_private_key(65537, 2048).private_bytes(*form, NoEncryption()))
    noise = written(tmp_path / "noise", b"noise")
    asked = [named(pair, private_key_path=locked), named(pair, private_key_path=other),
             named(pair, private_key_path=locked, private_key_password="guess"), named(pair, private_key_path=noise),
             named(pair, certificate_path=noise), [f"security.tls.certificate_path={noise}"]]

    for sets in asked:
        ended = served(*sets)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
        assert ended.stderr.startswith("asyncgate: security.tls: "), ended.stderr
        assert "guess" not in ended.stderr


def test_h3_a_private_key_with_its_password_is_good(start: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    key = load_pem_private_key(pair[1].read_bytes(), None)
    locked = written(tmp_path / "locked", key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open sesame")))

    live = start(*named(pair, private_key_path=locked, private_key_password="open sesame"))

    assert live.url.startswith("https://")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
@pytest.mark.parametrize("name", ["private_key_path", "certificate_path"])
def test_h3_a_private_key_that_others_may_use_stops_the_start(tmp_path: Path, name: str, mode: int) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    for path in (certificate, key):
        written(path, b"")
    alone = name == "certificate_path"
    tls = Tls(certificate_path=str(certificate), private_key_path="" if alone else str(key))
    configured = settings(security=SecuritySettings(tls=tls))

    (certificate if alone else key).chmod(mode)
    with pytest.raises(StartupError, match=rf"^security\.tls\.{name}: .* other users can access; run chmod 600 on it"):
        require_safe_start(configured)

    (certificate if alone else key).chmod(0o600)
    require_safe_start(configured)


@pytest.mark.parametrize("tls", [
    Tls(private_key_path="key.pem"), Tls(private_key_password="a"), Tls(certificate_path="absent.pem"),
    Tls(certificate_path=__file__, private_key_path="absent.pem"), Tls(certificate_path="a\0b"),
    Tls(certificate_path="-----BEGIN PRIVATE KEY-----\nabc")])
def test_h3_half_a_certificate_stops_the_start(tls: Tls) -> None:
    with pytest.raises(StartupError, match=r"^security\.tls\.(certificate|private_key)_path") as error:
        require_safe_start(settings(security=SecuritySettings(tls=tls)))

    assert "abc" not in str(error.value)


GUESSED = ["changeme", "change-me", "CHANGE_ME_PLEASE_NOW", "change-this-in-production", "replace-with-a-secret",
           "secret", "my-secret-key", "your-api-key-here", "your_secret_token_1234", "password", "Password1234567890",
           "test", "super-secret-token", "asyncgate", "asyncgate-api-key", "admin-admin-admin-admin", "0123456789abcde",
           "a", "aaaaaaaaaaaaaaaaaaaaaaaa", "abc123abc123abc123abc123", "x" * 64, "example", "letmeinletmeinletmein"]
UNGUESSED = ["0123456789abcdee", "f3b1c8d97a604e52", "correct horse battery staple", "Tr0ub4dor&3-and-more", TOKEN,
             "9b2f0c71a6d84e3fb5e8c2d70f91a4b6"]


@each("token", GUESSED)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gate.local"])
def test_h3_a_token_that_can_be_guessed_stops_the_start_off_loopback(host: str, token: str) -> None:
    with pytest.raises(StartupError, match=r"^api_key is ") as error:
        require_safe_start(settings(host, api_key=token))

    assert len(token) < 3 or token not in str(error.value)
    require_safe_start(settings(api_key=token))


@each("token", UNGUESSED)
def test_h3_a_token_that_cannot_be_guessed_starts(token: str) -> None:
    require_safe_start(settings("0.0.0.0", api_key=token))


@pytest.mark.parametrize(("host", "url", "why"), [
    ("0.0.0.0", "sqlite:///gate.db", "loopback"), ("gate.local", "memory:", "loopback"), ("::", "memory:", "loopback"),
    ("127.0.0.1", "postgresql://db/gate", "Postgres"), ("localhost", "postgres://db/gate", "Postgres")])
@each("token", ["", RANDOM])
def test_h3_insecure_dev_is_refused_off_loopback_and_on_postgres(host: str, url: str, why: str, token: str) -> None:
    with pytest.raises(StartupError, match=rf"^allow_insecure_dev .*{why}"):
        require_safe_start(settings(host, url, allow_insecure_dev=True, api_key=token))


def test_h3_the_program_does_not_start_with_a_placeholder() -> None:
    ended = served("host=0.0.0.0", ASYNCGATE_API_KEY="changeme")

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Error: api_key is a placeholder, and others can reach 0.0.0.0" in ended.stderr
    assert "changeme" not in ended.stderr


@pytest.mark.parametrize(("more", "warned"), [
    ({}, True), ({"trusted_proxies": ("10.0.0.0/8",)}, False), ({"host": "127.0.0.1"}, False)])
def test_h3_plain_http_off_loopback_is_warned_of(
    more: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    require_safe_start(settings(**{"host": "0.0.0.0", **more}))

    assert ("plain HTTP on 0.0.0.0" in caplog.text) is warned


def test_h4_insecure_dev_warns_at_every_start(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        require_safe_start(settings(allow_insecure_dev=True))

    warned = [record for record in caplog.records if "INSECURE" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING] * 2


# H5: secrets come from files.


IN_FILE = [setting for setting in list_settings(Settings) if setting.in_file]


def test_h5_whatever_is_secret_or_holds_a_password_may_come_from_a_file() -> None:
    names = {setting.name for setting in IN_FILE}

    assert {setting.name for setting in list_settings(Settings) if setting.secret} <= names
    assert {"api_key", "database.url", "database.direct_url", "security.rate_limiting.redis_url",
            "security.tls.private_key_password"} <= names


@pytest.mark.parametrize("setting", IN_FILE, ids=lambda setting: setting.name)
def test_h5_every_secret_may_come_from_a_file(setting: Any, tmp_path: Path) -> None:
    secret = "https://ann:hunter2@example.test" if "://" in setting.kind else "hunter2"
    path = written(tmp_path / "secret", secret.encode() + b"\n")

    configured = load_settings(environ={f"{setting.environment}_FILE": path})

    assert attrgetter(setting.name)(configured.settings) == secret
    assert configured.origins[setting.name] == f"environment {setting.environment}_FILE"
    assert "hunter2" not in str(list_values(configured))


@pytest.mark.parametrize("setting", IN_FILE, ids=lambda setting: setting.name)
def test_h5_a_secret_given_twice_is_refused_even_if_it_is_the_same(setting: Any, tmp_path: Path) -> None:
    secret = "https://ann:hunter2@example.test"
    path = written(tmp_path / "secret", secret.encode())

    with pytest.raises(SettingsError, match=rf"^{re.escape(setting.name)}: given twice") as error:
        load_settings(environ={setting.environment: secret, f"{setting.environment}_FILE": path})

    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(("text", "secret"), [
    (b"open sesame", "open sesame"), (b"open sesame\n", "open sesame"), (b"open sesame\r\n", "open sesame"),
    (b" open sesame \n", " open sesame "), (b"open sesame\n\n", "open sesame\n"), (b"\nopen", "\nopen")])
def test_h5_one_newline_at_the_end_of_a_file_is_no_part_of_the_secret(
    text: bytes, secret: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "secret", text)

    assert load_settings(environ={"ASYNCGATE_API_KEY_FILE": path}).settings.api_key == secret


@pytest.mark.parametrize("text", [b"", b"\n"])
def test_h5_a_file_with_nothing_in_it_is_no_secret(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^api_key: .* is empty"):
        load_settings(environ={"ASYNCGATE_API_KEY_FILE": written(tmp_path / "secret", text)})


def test_h5_what_is_no_secret_does_not_come_from_a_file() -> None:
    with pytest.raises(SettingsError, match=r"'ASYNCGATE_PORT_FILE' is not a setting"):
        load_settings(environ={"ASYNCGATE_PORT_FILE": "port"})


def test_h5_a_file_overrides_what_a_file_of_settings_says(tmp_path: Path) -> None:
    config = written(tmp_path / "gate.yaml", json.dumps({"api_key": "from the settings"}).encode())
    path = written(tmp_path / "secret", b"from the secret")

    assert load_settings(config, {"ASYNCGATE_API_KEY_FILE": path}).settings.api_key == "from the secret"


# Who else may read what is stored.


def test_a_database_that_others_may_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gate.db"
    path.touch()
    path.chmod(0o666)

    connect(str(path)).close()

    assert f"{path} can be accessed by other users (mode 666)" in caplog.text


def test_nobody_is_told_to_close_a_folder_that_is_no_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(sqlite3.OperationalError):
        connect(str(tmp_path))

    assert "chmod" not in caplog.text


def test_an_export_is_for_its_owner_only(tmp_path: Path) -> None:
    with open(tmp_path / "receipts", "wb", opener=open_private):
        pass

    assert (tmp_path / "receipts").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("character", ["\u061c", "\u00ad", "\U000e0041", "\u200b", "\u202e", "\ufe0f", "\u3164"])
def test_a_name_holds_nothing_invisible(character: str) -> None:
    assert msgspec.convert("ada", Name) == "ada"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(f"a{character}da", Name)


def test_the_pattern_of_a_name_is_one_that_javascript_reads() -> None:
    pattern = openapi.build_schemas(list(OPERATIONS.values()))["Name"]["pattern"]

    assert not [character for character in pattern if ord(character) > 0xffff], "it reads no such range without a flag"
