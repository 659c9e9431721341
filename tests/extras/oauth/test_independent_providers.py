"""People sign in at OpenID providers that others wrote, and the client gets a token that the gate accepts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import httpx2
import pytest

from asyncgate.parts.model.settings import AdmissionRule, IdentityProvider, Jwt, OAuth, Outgoing, SecuritySettings
from tests.conftest import Node, Served, tools_of_npm
from tests.extras.oauth.conftest import PUBLIC_URL
from tests.support.browser import FORM, VERIFIER, Browser, Page, Program
from tests.support.programs import read_address

pytestmark = pytest.mark.anyio

CALLBACK = f"{PUBLIC_URL}/oauth/callback/id"
SECRET = "s e/c:ret"


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about what clients of others answer over HTTP.

    What is kept of a sign-in test_tokens tries on both.
    """
    return sqlite_url


def run_program(*command: str, **more: Any) -> Iterator[str]:
    """Run a provider in a process of its own; yield its address, the first that it prints."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    assert running.stdout
    yield read_address(running, running.stdout)
    running.kill()
    running.communicate()


@pytest.fixture(scope="module")
def mock_provider() -> Iterator[str]:
    """Run the provider of PyPI."""
    yield from run_program(sys.executable, "-m", "oidc_provider_mock", "--port", "0",
                           env={**os.environ, "PYTHONUNBUFFERED": "1"})


@pytest.fixture(scope="module")
def strict_provider(tools_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the provider of npm."""
    node = Node(Node.install(tools_of_npm(tools_cache), ("oidc-provider@9.13.3",)), tmp_path_factory.mktemp("home"))
    program = shutil.which("node", path=node.environment["PATH"]) or "node"
    script = Path(__file__).parents[2] / "support/oidc_provider.mjs"
    yield from run_program(program, str(script), CALLBACK, cwd=node.folder, env=node.environment)


async def begin(serve: Any, key: Path, provider: str) -> tuple[Served, Program, Browser]:
    """Serve a gate whose people sign in at a provider, and send a browser there."""
    trusted = IdentityProvider(name="id", client_id="gate", client_secret=SECRET, discovery_url=provider)
    security = SecuritySettings(
        oauth=OAuth(enabled=True, providers=(trusted,), admit=(AdmissionRule(email_domain="example.com"),)),
        jwt=Jwt(private_key_path=str(key)), outgoing=Outgoing(allow=("127.0.0.1", "localhost")))
    served = await serve(public_url=PUBLIC_URL, security=security)
    program, browser = await Program(served).register(), Browser(served)
    page = await browser.get(program.url(prompt="login"))
    await browser.get(page.links["Continue with Id"])
    return served, program, browser


async def exchange(served: Served, program: Program, browser: Browser) -> dict[str, Any]:
    """Exchange the code for an access token; return whom the gate takes its bearer for."""
    form = {"grant_type": "authorization_code", "code": browser.told["code"], "redirect_uri": program.back,
            "client_id": program.client_id, "code_verifier": VERIFIER}
    answer = await served.send("POST", "/oauth/token", urlencode(form).encode(), headers=[FORM])
    assert answer is not None
    assert answer.status == 200, answer
    who: dict[str, Any] = await served.get("/v1/whoami", token=answer.json()["access_token"])
    return who


async def finish(served: Served, program: Program, browser: Browser, back: str) -> tuple[Page, dict[str, Any]]:
    """Come back from the provider, allow the client in, and let it ask who it is."""
    assert back.startswith(f"{CALLBACK}?"), back
    consent = await browser.get(back)
    await browser.submit(consent, "allow")
    return consent, await exchange(served, program, browser)


async def test_the_provider_of_pypi_signs_somebody_in(
        serve: Callable[..., Any], signing_key_path: Path, mock_provider: str) -> None:
    served, program, browser = await begin(serve, signing_key_path, mock_provider)
    async with httpx2.AsyncClient(trust_env=False) as http:
        claims = {"email": "ada@example.com", "email_verified": True, "name": "Ada Lovelace"}
        assert (await http.put(f"{mock_provider}/users/ada", json=claims)).is_success
        sent = await http.post(browser.address, data={"sub": "ada"})

    consent, who = await finish(served, program, browser, sent.headers["location"])

    assert "Ada Lovelace" in consent.text
    assert (who["principal_kind"], who["principal_id"], who["role"], who["scopes"]) == (
        "human", "ada@example.com", "agent", ["tasks:read"])


async def test_the_provider_of_npm_signs_somebody_in(
        serve: Callable[..., Any], signing_key_path: Path, strict_provider: str) -> None:
    served, program, browser = await begin(serve, signing_key_path, strict_provider)
    async with httpx2.AsyncClient(trust_env=False) as http:
        answer = await http.get(browser.address)
        for _ in range(12):     # its pages ask for a login, then for consent
            if (target := answer.headers.get("location", "")).startswith(CALLBACK):
                break
            if target:
                answer = await http.get(urljoin(str(answer.url), target))
                continue
            action = re.search(r'<form[^>]*action="([^"]+)"', answer.text)
            prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)
            assert action, answer.text
            assert prompt, answer.text
            answer = await http.post(urljoin(str(answer.url), action[1]),
                                     data={"prompt": prompt[1], "login": "ada", "password": "any"})

    consent, who = await finish(served, program, browser, target)

    assert "Ada Lovelace" in consent.text
    assert who["principal_id"] == "ada@example.com"
    assert urlsplit(target).query.count("iss=") == 1
