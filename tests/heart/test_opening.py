"""A gate that cannot open says why in one line, closes what it opened, and ends: 2 where its settings are wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import aiosqlite
import pytest

from asyncgate.backends import open_backend
from asyncgate.parts.app import Gate
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import ArchiveSettings, Settings
from tests.conftest import TOKEN

HANGING_SECONDS = 120       # a machine may be busy; a gate that hangs never ends
WRONG = {
    "a ledger without an address": {"receipt_mode": "memorygate_integrated"},
    "an address that is none": {"receipt_mode": "receiptgate_integrated", "ledger.url": "receiptgate:8000"},
    "an archive without a folder": {"archive.enabled": "true"},
    "Redis without an address": {"security.rate_limiting.enabled": "true", "security.rate_limiting.storage": "redis"},
    "an address of Redis that is none": {
        "security.rate_limiting.enabled": "true", "security.rate_limiting.storage": "redis",
        "security.rate_limiting.redis_url": "nowhere"},
    "a key set that is none": {"security.jwt.jwks": "missing.json"},
    "a certificate that is none": {"security.tls.certificate_path": "missing.pem"},
}


def ran(command: str, database: str, sets: Mapping[str, str], token: str = TOKEN) -> tuple[int, str]:
    """What a command ends with and says."""
    settings = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "asyncgate", command, "--port", "0", "--database", database, *settings], check=False,
        text=True, capture_output=True, timeout=HANGING_SECONDS, env={**os.environ, "ASYNCGATE_API_KEY": token})
    return done.returncode, done.stderr


@pytest.mark.parametrize("sets", WRONG.values(), ids=WRONG)
def test_a_gate_with_bad_settings_says_so_and_ends_with_2(sets: dict[str, str], tmp_path: Path) -> None:
    status, output = ran("serve", f"sqlite:///{tmp_path / 'gate.db'}", sets)

    assert status == 2, output
    assert "Traceback" not in output
    assert output.strip()


def test_a_gate_that_nobody_can_enter_ends_with_2(tmp_path: Path) -> None:
    status, output = ran("serve", f"sqlite:///{tmp_path / 'gate.db'}", {}, token="")

    assert (status, "ASYNCGATE_API_KEY" in output) == (2, True)


def test_a_ledger_with_bad_settings_ends_with_2(tmp_path: Path) -> None:
    status, output = ran("ledger", f"sqlite:///{tmp_path / 'gate.db'}", {"archive.enabled": "true"})

    assert status == 2, output


def test_what_does_not_answer_is_no_mistake_in_the_settings() -> None:
    status, output = ran("serve", "postgresql://nobody@127.0.0.1:9/none", {})

    assert status == 1, output


@pytest.mark.anyio
async def test_what_was_opened_before_the_failure_is_closed_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gate.db'}"
    gate = Gate(Settings(api_key=TOKEN, archive=ArchiveSettings(enabled=True)), await open_backend(url, serving=True))

    with pytest.raises(StartupError, match=r"archive\.directory"):
        async with gate.app.router.lifespan_context(gate.app):
            pass

    await (await open_backend(url, serving=True)).close()       # which one process at a time can


@pytest.mark.anyio
async def test_a_database_that_opens_halfway_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, opened, real = f"sqlite:///{tmp_path / 'gate.db'}", list[aiosqlite.Connection](), aiosqlite.connect

    async def one_only(*args: object, **more: object) -> aiosqlite.Connection:
        if opened:
            raise sqlite3.OperationalError("unable to open database file")
        opened.append(await real(*args, **more))        # type: ignore[arg-type]
        return opened[0]

    monkeypatch.setattr(aiosqlite, "connect", one_only)
    with pytest.raises(StartupError, match="cannot use"):
        await open_backend(url, serving=True)
    monkeypatch.undo()

    with pytest.raises(ValueError, match=r"no active connection|Connection closed"):
        await opened[0].execute("SELECT 1")
    await (await open_backend(url, serving=True)).close()
