"""The receiver of docs/webhooks.md takes what a gate sends; the database cannot matter here."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import httpx2
import pytest

from asyncgate.conformance.postgres_server import free_port
from asyncgate.extras.webhooks.events import render_test, show_secret, sign
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "webhooks.md"
SECRET = b"the secret of a receiver in tests"


async def test_the_receiver_of_the_page_takes_an_event_of_test_webhook() -> None:
    [script] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    port, now = free_port(), time.time()
    body = render_test("t", "w", now)
    receiver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script.replace("9000", str(port)), env={"WEBHOOK_SECRET": show_secret(SECRET)},
        stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(retries=8), timeout=20.0) as http:     # until it listens
            answer = await http.post(f"http://127.0.0.1:{port}/", content=body, headers=sign([SECRET], "e1", now, body))
    finally:
        receiver.terminate()
        await receiver.wait()

    assert answer.status_code == 204
