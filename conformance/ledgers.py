"""A ledger for gates in integrated mode: `asyncgate ledger` in a separate process, which tests may kill."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

from asyncgate.conformance.forks import ForkingPopen
from asyncgate.parts.model.settings import CircuitBreaker, EmissionRetry, LedgerSettings, strip_settings

PROCESS_SECONDS = 60.0      # for another process to start, answer or stop
LEDGER = "from asyncgate import main; main()"
# What a ledger runs first that contradicts itself as long as a file is there: now and then it denies what it has, as a
# receipt and as a cursor, lists an earlier state, or says that it refuses what it has just stored.
LYING = """
import os, random
from asyncgate.backends.sqlite import Sqlite
from asyncgate.extras.ledger.server import operations
from asyncgate.parts.model import errors, queries, stored
def lies(share):
    return os.path.exists({file!r}) and random.random() < share
record, page, store_entry = Sqlite.record, Sqlite.page, operations.store_entry
async def deny(self, tenant_id, kind, *key):
    return None if kind is stored.Entry and lies(0.3) else await record(self, tenant_id, kind, *key)
async def list_earlier(self, tenant_id, query):
    rows = await page(self, tenant_id, query)
    return rows[:random.randrange(len(rows))] if rows and isinstance(query, queries.EntryFilter) and lies(0.3) else rows
def store_and_refuse(work, entry):
    stored_now = store_entry(work, entry)
    return errors.ReceiptIdCollision("a lie", receipt_id=entry.receipt_id) if lies({refusals}) else stored_now
Sqlite.record, Sqlite.page, operations.store_entry = deny, list_earlier, store_and_refuse
"""
# Tests check a ledger at once and retry without a pause.
HASTY: dict[str, Any] = {
    "emission_retry": EmissionRetry(retry_interval_seconds=0.2, max_retries=3), "timeout_ms": 10_000,
    "circuit_breaker": CircuitBreaker(timeout_seconds=0.1)}


class Drain:
    """Reads and discards the stderr of a process, because a full pipe would block the process."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.reading = threading.Thread(target=lambda: deque(process.stderr or (), maxlen=0))
        self.reading.start()

    def kill(self) -> None:
        """End the process and the reader."""
        self.process.kill()
        self.process.wait()
        self.reading.join()
        if self.process.stderr:
            self.process.stderr.close()


class Program:
    """What runs in a process of its own, and can be killed and started again in the same place."""

    process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class LedgerServer(Program):
    """A ledger and its operator's token."""

    def __init__(self, database: str = "memory://", port: int = 0, token: str = "", first: str = "") -> None:
        self.database, self.port, self.token = database, port, token or secrets.token_hex(16)
        self.url, self.first = "", first        # Python that it runs before it serves

    def start(self) -> None:
        command = [sys.executable, "-c", self.first + LEDGER, "ledger", "--port", str(self.port),
                   "--database", self.database, "--set", "log_level=info",
                   "--set", "security.api_keys.hash_time_cost=1",
                   "--set", "security.api_keys.hash_memory_cost=8"]     # by default a hash takes 0.1 s
        surroundings = {**strip_settings(os.environ), "ASYNCGATE_API_KEY": self.token}
        self.process = ForkingPopen(command, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                    stderr=subprocess.PIPE, bufsize=0)
        try:
            self.url = self._address()
        except BaseException:
            self.process.kill()
            raise
        self.port = int(self.url.rpartition(":")[2])
        self.drain = Drain(self.process)        # one ledger serves many tests

    def _address(self) -> str:
        assert self.process.stderr
        deadline, text = time.monotonic() + PROCESS_SECONDS, ""
        while not (match := re.search(r" serves (http://\S+:\d+)", text)):
            ready = select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0.0))[0]
            if not ready or not (piece := os.read(self.process.stderr.fileno(), 4096)):
                raise RuntimeError(f"the ledger did not start: {text}")
            text += piece.decode()
        return match[1]

    def kill(self) -> None:
        self.drain.kill()

    def settings(self, **more: Any) -> LedgerSettings:
        """Return the settings of a gate that sends its receipts here."""
        return LedgerSettings(**{"url": self.url, "auth_token": self.token, **HASTY, **more})

    def call(self, verb: str, path: str, body: Any = None, token: str = "", **query: Any) -> Any:
        """Make one call, with the operator's token by default; return the decoded answer."""
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        headers = {"authorization": f"Bearer {token or self.token}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        asked = Request(url, data, headers, method=verb)
        with build_opener(ProxyHandler({})).open(asked, timeout=PROCESS_SECONDS) as answer:
            return json.loads(answer.read())

    def key_of(self, tenant_id: str, worker: str = "w1") -> str:
        """Issue a key for a worker."""
        asked = {"tenant": tenant_id, "name": worker, "principal_kind": "worker", "principal_id": worker}
        key: str = self.call("POST", "/v1/keys", {**asked, "scopes": ["receipts:ack", "receipts:read"]})["api_key"]
        return key

    def receipts(self, tenant_id: str, **query: Any) -> list[dict[str, Any]]:
        """Return all receipts of a tenant in order of arrival."""
        receipts: list[dict[str, Any]] = []
        while True:
            page = self.call("GET", "/v1/receipts", tenant=tenant_id, limit=200, **query)
            receipts += page["receipts"]
            if page["next_cursor"] is None:
                return receipts
            query["since_receipt_id"] = page["next_cursor"]
