"""Somebody else's ledger, which answers as a test wants: it refuses, breaks off, and counts what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.patience import PATIENCE_SECONDS

Answer = tuple[int, dict[str, Any], str]
CUT: Answer = (0, {}, "")       # the connection is broken after the receipt was read


class StubLedger:
    """A ledger on a port of its own; `answer` says what each receipt gets."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Any] = lambda receipt: (200, {}, "{}")
        self.show: Callable[[str], Answer] = self._shown
        self.sent: list[bytes] = []         # every body that came, answered or not
        self.taken: list[dict[str, Any]] = []
        self.came = asyncio.Event()

    async def __aenter__(self) -> StubLedger:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1]) if length else 0)
                verb, path, _ = head.split(" ", 2)
                status, headers, text = self.show(path) if verb == "GET" else await self._take(body)
                if not status:
                    break
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n{lines}\r\n"
                writer.write((head + text).encode("latin-1"))
        writer.close()

    def _shown(self, path: str) -> Answer:
        receipts = [receipt for receipt in self.taken if path.startswith(f"/v1/receipts/{receipt['receipt_id']}")]
        if "/v1/receipts?" in path:
            return 200, {}, json.dumps({"receipts": []})
        return (200, {}, json.dumps(receipts[0])) if receipts else (404, {}, "{}")

    async def _take(self, body: bytes) -> Answer:
        receipt = json.loads(body)
        if isinstance(receipt, list):
            return 400, {}, "one at a time"
        self.sent.append(body)
        outcome = self.answer(receipt)
        answer: Answer = await outcome if inspect.isawaitable(outcome) else outcome
        if answer[0] == 200 and receipt not in self.taken:
            self.taken.append(receipt)
        self.came.set()
        return answer

    def do_meanwhile(self, receipt_type: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Make a call while the first receipt of a type is stored; return where its answer will be."""
        taken = list[Any]()

        async def meanwhile(receipt: dict[str, Any]) -> Answer:
            if receipt["receipt_type"] == receipt_type and not taken:
                taken.append(None)
                taken[0] = await call()
            return 200, {}, "{}"
        self.answer = meanwhile
        return taken

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until what came is enough."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not enough():
                self.came.clear()
                await self.came.wait()
