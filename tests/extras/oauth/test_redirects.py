"""Redirect URIs: D1 and D8 of the threats, and the lists that real clients have."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncgate.extras.oauth.redirects import (
    MOST_REDIRECT_LENGTH,
    MOST_REDIRECTS,
    check_redirects,
    find_redirect_flaw,
    is_same_redirect,
)

CLAUDE = "https://claude.ai/api/mcp/auth_callback"
REAL = [
    CLAUDE, "https://claude.com/api/mcp/auth_callback", "https://chatgpt.com/connector/oauth/kDmjx77UnKOM",
    "http://localhost:6274/oauth/callback", "http://127.0.0.1:6276/oauth/callback", "http://localhost:8787/callback",
    "cursor://anysphere.cursor-retrieval/oauth/user-mcp/callback", "cursor://anysphere.cursor-mcp/oauth/callback",
    "https://vscode.dev/redirect", "https://insiders.vscode.dev/redirect", "http://127.0.0.1/", "http://127.0.0.1:33418/",
    "http://localhost/", "http://localhost/callback", "http://127.0.0.1/callback", "http://[::1]:4711/callback",
    "vscode://dynamicauthprovider", "com.example.app:/oauth", "com.raycast:/oauth?package_name=Extension",
    "https://xn--mnchen-3ya.example/cb?keep=1", "http://127.0.0.1:19876/mcp/oauth/callback"]
LOOPBACK = ["http://localhost:1/cb", "http://127.0.0.1/cb", "http://[::1]:65535/cb"]


@pytest.mark.parametrize("uri", REAL)
def test_what_real_programs_register_is_good(uri: str) -> None:
    assert find_redirect_flaw(uri) is None
    assert is_same_redirect(uri, uri)


@pytest.mark.parametrize("uri", [
    "", "cb", "/cb", "//app.example/cb", "https:", "https:/app.example", "https:app.example/cb", "https:///cb",
    "https://app.example/cb#", "https://app.example/cb#x", "https://*.app.example/cb", "https://app.example/*",
    "https://u@app.example/cb", "https://u:p@app.example/cb", "https://app.example\\@evil.example/cb",
    "https://app.example/a b", "https://app.example/\r\nx", "https://app.example/\tcb", " https://app.example/cb",
    "https://app.example/cb\n", "https://app.example/cb\0", "https://\uff41pp.example/cb", "https://app.example/é",
    "HTTPS://app.example/cb", "Https://app.example/cb", "https://app.example:x/cb", "https://app.example:99999/cb",
    "https://[::1/cb", "https://app.example/<script>", 'https://app.example/"', "https://app.example/{x}",
    "http://app.example/cb", "http://127.0.0.2/cb", "http://127.1/cb", "http://2130706433/cb", "http://localhost./cb",
    "http://localhost.evil.example/cb", "http://localhost@evil.example/cb", "http://localhost:1@evil.example/cb",
    "http://LOCALHOST/cb", "http://[::ffff:127.0.0.1]/cb", "http://0.0.0.0/cb", "http://localhost?x",
    "javascript:alert(1)", "javascript://app.example/%0aalert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd",
    "blob:https://app.example/1", "about:blank", "view-source:x", "mailto:a@example.org", "ftp://app.example/cb",
    "ws://app.example/cb", "myapp:/cb", "myapp://cb", "intent://x", "cursor://u@host/cb", "Cursor://x/cb",
    "com.example.app:/cb#f", "1com.example:/cb", "https://app.example/" + "a" * MOST_REDIRECT_LENGTH])
def test_what_could_lead_elsewhere_is_refused(uri: str) -> None:
    assert find_redirect_flaw(uri) is not None


def test_a_program_has_one_to_twenty() -> None:
    many = [f"https://app.example/{number}" for number in range(MOST_REDIRECTS + 1)]

    assert check_redirects(many[1:]) is None
    assert check_redirects(many) == check_redirects([]) == "a client has 1 to 20 redirect URIs"


@pytest.mark.parametrize("registered", LOOPBACK)
@pytest.mark.parametrize("port", ["", ":80", ":3000", ":65535"])
def test_a_program_on_the_persons_machine_may_use_any_port(registered: str, port: str) -> None:
    asked = re.sub(r"^(http://(?:\[.*\]|[^:/]*))(:\d+)?", rf"\1{port}", registered)

    assert is_same_redirect(asked, registered)


@pytest.mark.parametrize("asked", [
    "http://localhost:1/cb/", "http://localhost:1/CB", "http://localhost:1/cb?", "http://localhost:1/cb?x=1",
    "http://localhost:1/cb#", "http://localhost:1/cb#f", "http://localhost:1/c%62", "http://localhost:1/a/../cb",
    "http://localhost:1//cb", "http://localhost:/cb", "http://localhost:65536/cb", "http://localhost:-1/cb",
    "http://localhost:0x1/cb", "http://localhost:\uff11/cb", "https://localhost:1/cb", "http://127.0.0.1:1/cb",
    "http://[::1]:1/cb", "http://LOCALHOST:1/cb", "http://localhost.:1/cb", "http://u@localhost:1/cb",
    "http://localhost:1@evil.example/cb", "http://localhost:1\\@evil.example/cb", "http://localhost:1/cb\r\n",
    "http://localhost:1/cb ", " http://localhost:1/cb", "http://localhost:1", "http:localhost:1/cb"])
def test_but_nothing_else_may_differ(asked: str) -> None:
    assert not is_same_redirect(asked, "http://localhost:9/cb")


@pytest.mark.parametrize("asked", [
    CLAUDE + "/", CLAUDE + "?", CLAUDE + "?x=1", CLAUDE + "#", CLAUDE + "#f", CLAUDE.replace("ai/", "ai:443/"),
    CLAUDE.replace("ai/", "ai:8443/"), CLAUDE.replace("claude.ai", "Claude.ai"), CLAUDE.replace("https", "HTTPS"),
    CLAUDE.replace("https", "http"), CLAUDE.replace("api", "a/../api"), CLAUDE.replace("api", "%61pi"),
    CLAUDE.replace("//", "//u@"), CLAUDE.replace("//", "//u:p@"), CLAUDE.replace("claude", "\uff43laude"),
    CLAUDE.replace("/mcp", "/\tmcp"), CLAUDE + "\r\nx: y", CLAUDE + "%0d%0a", CLAUDE + "\\@evil.example",
    CLAUDE.replace("claude.ai", "claude.ai.evil.example"), CLAUDE.replace("claude.ai", "evil.example"), CLAUDE[:-1],
    CLAUDE.replace("api/", "api//"), "", "https://claude.ai"])
def test_of_another_place_not_a_letter_may_differ(asked: str) -> None:
    assert not is_same_redirect(asked, CLAUDE)


PIECES = st.lists(st.sampled_from([
    "http://", "https://", "localhost", "127.0.0.1", "[::1]", "app.example", "evil.example", ":1", ":80", ":65535",
    ":70000", "/", "/cb", "@", "\\", "?", "?x=1", "#", "#f", "%2f", "..", ".", "\r\n", "\t", " ", "*", "a", "é",
    "cursor://", "javascript:", "\uff11"]), max_size=8).map("".join)


@given(PIECES, PIECES)
@example("http://localhost:5/cb", "http://localhost/cb")
def test_whatever_is_accepted_equals_a_registered_one_but_for_the_loopback_port(asked: str, registered: str) -> None:
    if find_redirect_flaw(registered) is None and is_same_redirect(asked, registered):
        def without_port(uri: str) -> str:
            return re.sub(r"\A(http://(?:localhost|127\.0\.0\.1|\[::1\])):[0-9]+(?=/|\Z)", r"\1", uri)
        assert without_port(asked) == without_port(registered)
        assert asked == registered or registered.startswith(("http://localhost", "http://127.0.0.1", "http://[::1]"))
