"""A gate that dies between two steps: no session is lost, and none is left half made."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.backends import open_backend
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.conformance.load import GateServer, serving
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import Jwt, OAuth, SecuritySettings
from tests.conftest import TOKEN, Served
from tests.extras.oauth.conftest import PUBLIC_URL
from tests.extras.oauth.granting import REDIRECT, VERIFIER, program_of

pytestmark = pytest.mark.anyio

# The process kills itself around the n-th change of rows: before its transaction, or when that is durable.
DIES = """
import os, signal
from asyncgate.parts.identity.directory import Directory
change, changes = Directory.change, []
async def change_and_die(self, run, *keys):
    changes.append(run)
    if ({n}, {after}) == (len(changes), False):
        os.kill(os.getpid(), signal.SIGKILL)
    done = await change(self, run, *keys)
    if ({n}, {after}) == (len(changes), True):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
Directory.change = change_and_die
"""


async def make_codes(url: str, signing_key_path: Path) -> list[str]:
    """Let somebody allow a client in, twice; return the codes."""
    security = SecuritySettings(oauth=OAuth(enabled=True), jwt=Jwt(private_key_path=str(signing_key_path)))
    gate = Gate(settings_for_tests(api_key=TOKEN, public_url=PUBLIC_URL, security=security), await open_backend(url))
    async with gate.app.router.lifespan_context(gate.app):
        program = await program_of(Served(gate))
        return [await program.code(), await program.code()]


@contextlib.asynccontextmanager
async def gate_that_dies(url: str, key: Path, n: int = 0, after: bool = False) -> AsyncIterator[Any]:
    """Serve the database in a process that may die; yield what asks it for tokens, None where it died."""
    sets: dict[str, Any] = {"security.oauth.enabled": "true", "security.jwt.private_key_path": key,
                            "public_url": PUBLIC_URL}
    async with serving(url, first=DIES.format(n=n, after=after), **sets) as server:
        yield lambda **form: ask(server, form)
        if n:
            assert await server.ended() == -signal.SIGKILL


async def ask(server: GateServer, form: dict[str, str]) -> dict[str, Any] | None:
    """Ask for tokens; return the answer, or None if the gate died."""
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as http:
        try:
            answer = await http.post("/oauth/token", data={"client_id": "app", **form})
        except httpx2.TransportError:
            return None
    body: dict[str, Any] = answer.json()
    return body


def exchange(code: str) -> dict[str, str]:
    return {"grant_type": "authorization_code", "code": code, "redirect_uri": REDIRECT, "code_verifier": VERIFIER}


def refresh(token: str) -> dict[str, str]:
    return {"grant_type": "refresh_token", "refresh_token": token}


async def test_a_gate_that_is_killed_between_any_two_steps_loses_no_session_and_leaves_none_half(
        url: str, signing_key_path: Path) -> None:
    first, second = await make_codes(url, signing_key_path)

    async with gate_that_dies(url, signing_key_path, 1) as ask:
        assert await ask(**exchange(first)) is None                 # before it is burnt: it is still good
    async with gate_that_dies(url, signing_key_path, 1, after=True) as ask:
        assert await ask(**exchange(first)) is None                 # burnt, and nobody has the tokens
    async with gate_that_dies(url, signing_key_path, 3) as ask:
        assert (await ask(**exchange(first)))["error"] == "invalid_grant"
        got = await ask(**exchange(second))
        assert await ask(**refresh(got["refresh_token"])) is None   # before it is rotated: it is still good
    async with gate_that_dies(url, signing_key_path, 1, after=True) as ask:
        assert await ask(**refresh(got["refresh_token"])) is None   # rotated, and the answer is lost
    async with gate_that_dies(url, signing_key_path) as ask:
        again = await ask(**refresh(got["refresh_token"]))
        assert again["refresh_token"] != got["refresh_token"]
        assert (await ask(**refresh(again["refresh_token"])))["access_token"]
