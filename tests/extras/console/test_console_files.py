"""The console's page and files: by whole names only, under strict headers, and only where the setting turns them on."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

import pytest

from asyncgate.commands.dev import adjust_settings
from asyncgate.extras.console import MEDIA, find_files
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import ConsoleSettings, load_settings
from tests.support.identity_tools import security

pytestmark = pytest.mark.anyio

ON = ConsoleSettings(enabled=True)
BROWSER = [("accept", "text/html,application/xhtml+xml")]
PAGE = dict(find_files(files("asyncgate.extras.console").joinpath("page")))
POLICY = {
    "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self'",
    "connect-src": "'self'", "form-action": "'none'", "base-uri": "'none'", "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'", "trusted-types": "'none'"}


async def test_the_files_of_the_console_cost_a_visitor_no_calls(serve: Any) -> None:
    served = await serve(security=security(limits=True, anonymous_calls_per_minute=1),
                         console=ON)

    told = [await served.call("GET", f"/console/{name}", token=None) for name in PAGE]

    assert len(told) > 20
    assert {answer.status for answer in told} == {200}
    lost = [await served.call("GET", "/console/nothing.js", token=None) for _ in range(2)]
    assert [answer.status for answer in lost] == [404, 429]


async def test_every_file_of_the_page_is_served_whole_and_under_the_strict_headers(serve: Any) -> None:
    served = await serve(console=ON)

    for name, file in PAGE.items():
        answer = await served.call("GET", f"/console/{name}", token=None)
        headed = await served.call("HEAD", f"/console/{name}", token=None)

        assert (answer.status, answer.content) == (200, file.read_bytes()), name
        assert (headed.status, headed.pairs, headed.content) == (200, answer.pairs, b"")
        assert answer.headers["content-type"].encode() == MEDIA["." + name.rpartition(".")[2]]
        assert dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")) == POLICY
        told = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache",
                "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin"}
        assert {header: answer.headers[header] for header in told} == told
        assert len(answer.pairs) == len(answer.headers), "a header is there twice"


async def test_a_file_that_the_browser_has_is_not_sent_again(serve: Any) -> None:
    served = await serve(console=ON)
    first = await served.call("GET", "/console/", token=None)
    tag = first.headers["etag"]

    assert tag == f'"{hashlib.sha256(first.content).hexdigest()[:32]}"'
    for known in (tag, f'"other", W/{tag}', "*"):
        again = await served.call("GET", "/console/", token=None, headers=[("if-none-match", known)])
        assert (again.status, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-length" not in again.headers
    other = await served.call("GET", "/console/", token=None, headers=[("if-none-match", '"other"')])
    assert (other.status, other.content) == (200, first.content)


@pytest.mark.parametrize("name", [
    "__init__.py", "../__init__.py", "..%2f__init__.py", "%2e%2e/__init__.py", "views/../index.html", "./index.html",
    "//index.html", "index.html/", "index.html%00", "INDEX.HTML", "views", "views/", "/etc/passwd", "%2fetc%2fpasswd",
    "..\\__init__.py", "page/index.html", "index.html;a", "a" * 3000])
async def test_only_the_whole_name_of_a_file_finds_one(serve: Any, name: str) -> None:
    served = await serve(console=ON)

    answer = await served.call("GET", f"/console/{name}", token=None)

    assert (answer.status, answer.json()["error"]) == (404, "not_found")
    assert b"import" not in answer.content


async def test_the_console_and_its_redirects_stay_below_the_prefix_of_a_proxy(serve: Any) -> None:
    served = await serve(console=ON)

    for path in ("/console", "/"):
        answer = await served.call("GET", path, token=None, headers=BROWSER)
        assert (answer.status, answer.headers["location"]) == (302, "console/")
    index = await served.call("GET", "/console/", token=None)
    assert b'="/' not in index.content


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/index.html"])
async def test_a_file_is_only_read(serve: Any, path: str) -> None:
    served = await serve(console=ON)

    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = await served.call(method, path)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/index.html", "/console/nothing"])
async def test_a_console_that_is_off_says_which_setting_turns_it_on_and_serves_nothing(served: Any, path: str) -> None:
    answer = await served.call("GET", path, token=None)

    assert answer.status == 404
    assert answer.json()["message"] == "the console of this gate is off; the setting console.enabled turns it on"
    home = await served.call("GET", "/", token=None, headers=BROWSER)
    assert home.headers["location"] == "docs"


def test_dev_has_the_console_unless_somebody_says_otherwise() -> None:
    assert not load_settings(environ={}).settings.console.enabled
    assert adjust_settings(load_settings(environ={})).console.enabled
    off = load_settings(environ={"ASYNCGATE_CONSOLE_ENABLED": "false"})
    assert not adjust_settings(off).console.enabled


async def test_a_file_that_is_gone_since_the_start_is_not_found(serve: Any, tmp_path: Any) -> None:
    from asyncgate.extras.console import Files
    (tmp_path / "index.html").write_text("<!doctype html>")
    served = await serve(console=ON)
    gate: Gate = served.gate
    (route,) = [route for route in gate.app.router.routes if getattr(route, "path", "") == "/console/{name:path}"]
    route.app = Files(gate, tmp_path)       # type: ignore[attr-defined]

    there = await served.call("GET", "/console/", token=None)
    (tmp_path / "index.html").unlink()
    gone = await served.call("GET", "/console/", token=None)

    assert (there.status, gone.status) == (200, 404)
