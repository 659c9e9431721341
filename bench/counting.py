"""What counting for Prometheus costs: `python -m asyncgate.bench.counting`.

Two gates of this process, one that counts and one that does not, do the same cycles in turns, without sockets: so the
share that is printed is larger than that of a served gate, which also reads and writes HTTP.  CPU is counted, not time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

import msgspec

from asyncgate.backends import open_backend
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import MetricsSettings, Settings

TOKEN = "bench"     # noqa: S105  # of two gates that nobody else reaches
MEASURED_TURNS, CYCLES, WARM_UP = 300, 10, 200


async def send(gate: Gate, method: str, path: str, body: Any = None) -> Any:
    """Send one request and return what it answers."""
    given = [(b"host", b"localhost"), (b"authorization", b"Bearer " + TOKEN.encode()),
             (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "scheme": "http", "path": path, "raw_path": path.encode(),
             "query_string": b"", "headers": given, "client": ("127.0.0.1", 1), "root_path": ""}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}

    async def keep(message: Any) -> None:
        sent.append(message)
    await gate(scope, receive, keep)
    if sent[0]["status"] != 200:
        raise SystemExit(f"{method} {path}: {sent}")
    return None if path == "/metrics" else msgspec.json.decode(sent[1]["body"])


async def run_cycles(gate: Gate, number: int) -> float:
    """Create, claim and complete tasks one after another; return the CPU seconds of one cycle."""
    since = time.process_time()
    for _ in range(number):
        await send(gate, "POST", "/v1/tasks", {"type": "demo", "payload": None, "agent_id": "bench"})
        [offer] = (await send(gate, "POST", "/v1/leases/claim", {"worker_id": "w1"}))["tasks"]
        await send(gate, "POST", f"/v1/tasks/{offer['task_id']}/complete", {
            "lease_id": offer["lease_id"], "worker_id": "w1", "result": {}, "artifacts": [{"uri": "file:///out"}]})
    return (time.process_time() - since) / number


@contextlib.asynccontextmanager
async def open_gate(folder: str, enabled: bool) -> AsyncIterator[Gate]:
    """Open a gate over a new file."""
    settings = Settings(api_key=TOKEN, metrics=MetricsSettings(enabled=enabled))
    gate = Gate(settings, await open_backend(f"sqlite:///{folder}/{enabled}.db"))
    async with gate.app.router.lifespan_context(gate.app):
        await run_cycles(gate, WARM_UP)
        yield gate


async def measure_scrape(gate: Gate, number: int = 50) -> float:
    """Return the CPU seconds of one scrape."""
    since = time.process_time()
    for _ in range(number):
        await send(gate, "GET", "/metrics")
    return (time.process_time() - since) / number


async def main() -> None:
    """Run both in turns, the one that goes first by turns too, and print the medians."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_gate(folder, False) as off, open_gate(folder, True) as on:
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(MEASURED_TURNS):
                for enabled in (False, True) if number % 2 else (True, False):
                    times[enabled].append(await run_cycles(on if enabled else off, CYCLES))
            scrape = await measure_scrape(on)
    shares = [counting / plain for plain, counting in zip(times[False], times[True], strict=True)]
    sys.stdout.write(f"CPU of a cycle: {median(times[False]) * 1e6:.0f} µs without metrics, "
                     f"{median(times[True]) * 1e6:.0f} µs with them; median ratio of {MEASURED_TURNS} turns "
                     f"{median(shares):.3f}, of the least of each {min(times[True]) / min(times[False]):.3f}\n"
                     f"CPU of a scrape: {scrape * 1e3:.1f} ms\n")


if __name__ == "__main__":
    asyncio.run(main())
