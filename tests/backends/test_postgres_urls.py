"""What a URL of Postgres says holds for asyncpg and for libpq, which read it each in its own way."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from asyncgate.backends.postgres import open_backend
from asyncgate.conformance.plugin import POSTGRES, database_of, urls
from asyncgate.parts.model.errors import NotNow

pytestmark = pytest.mark.anyio
ASKS_FOR_TLS = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
SETTINGS = ("SELECT current_setting('application_name'), current_setting('work_mem'), current_setting('enable_sort'), "
            "current_setting('TimeZone')")


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(2**16):
            writer.write(chunk)
        writer.close()


@contextlib.asynccontextmanager
async def encrypting(target: str, authority: trustme.CA) -> AsyncIterator[tuple[str, list[bool]]]:
    """A server before another that offers TLS; give its URL, and which connections have used it."""
    context, used = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), list[bool]()
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection(urlsplit(target).hostname, urlsplit(target).port)
        first = await reader.readexactly(8)
        used.append(first == ASKS_FOR_TLS)
        if used[-1]:
            writer.write(b"S")
            try:
                await writer.start_tls(context)
            except OSError:     # the other side does not want it
                return ahead.close()
        else:
            ahead.write(first)
        await asyncio.gather(carry(reader, ahead), carry(behind, writer))

    door = await asyncio.start_server(serve, "127.0.0.1")
    try:
        yield target.replace(str(urlsplit(target).port), str(door.sockets[0].getsockname()[1])), used
    finally:
        door.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("mode", "encrypted"), [
    ("", True), ("sslmode=disable", False), ("sslmode=prefer", True), ("sslmode=require", True),
    ("sslmode=verify-full&sslrootcert={ours}", True)])
async def test_a_connection_is_encrypted_as_its_url_says(
        url: str, tmp_path: Path, mode: str, encrypted: bool) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ours.pem"))
    async with encrypting(url, authority) as (place, used):
        backend = await open_backend(f"{place}?{mode.format(ours=tmp_path / 'ours.pem')}")
        await backend.alive()
        await backend.close()

    assert used == [encrypted] * 2


async def test_a_server_that_another_authority_vouches_for_is_refused(url: str, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "others.pem"))
    async with encrypting(url, trustme.CA()) as (place, _):
        with pytest.raises(NotNow, match="certificate verify failed"):
            await open_backend(f"{place}?sslmode=verify-full&sslrootcert={tmp_path / 'others.pem'}")


@pytest.mark.parametrize(("query", "settings"), [
    ("", ("asyncgate", "4MB", "on", "UTC")),
    ("application_name=x&work_mem=8MB&TimeZone=Asia/Tokyo", ("asyncgate", "8MB", "on", "UTC")),
    ("options=-c%20enable_sort%3Doff", ("asyncgate", "4MB", "off", "UTC"))])
async def test_a_url_may_have_settings_of_the_session_and_the_gates_own_win(
        url: str, query: str, settings: tuple[str, ...]) -> None:
    backend = await open_backend(f"{url}?{query}")
    try:
        assert await backend._ask(SETTINGS) == [settings]
    finally:
        await backend.close()


@pytest.mark.parametrize("form", ["postgresql://{host}:{port}/{name}?user={user}",
                                  "postgresql:///{name}?host={host}&port={port}&user={user}",
                                  "postgres://{user}@nowhere.invalid,{host}:{port}/{name}",
                                  "postgresql://{user}@{host}:{port}?database={name}"])
async def test_a_host_a_user_and_a_database_may_stand_in_any_part_of_a_url(url: str, form: str) -> None:
    parts = urlsplit(url)
    given: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username, "name": parts.path[1:]}
    backend = await open_backend(form.format_map(given))
    try:
        await backend.alive()
    finally:
        await backend.close()
