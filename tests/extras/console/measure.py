"""Measure the console with 100,000 tasks and 1,000 events a second: `python -m tests.extras.console.measure`.

It prints for each view how long its frames took, how soon it was there, and what it asked of the gate.
Nothing is judged here: a busy machine is slow.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncgate.clients.http import Http
from asyncgate.conformance.ledgers import Drain
from tests.conftest import TOKEN, Live
from tests.support.chromium import Chromium
from tests.support.console import VIEWS, Console

BATCH, PIECES = 500, 10      # tasks in a call that fills; calls in a second of load
LONG_MS = 100
FRAMES = """() => { window.__gaps = []; let last = performance.now();
  const look = now => { window.__gaps.push(now - last); last = now; requestAnimationFrame(look); };
  requestAnimationFrame(look); }"""
# When the view was painted with its content for the first time, by the page's own clock.
NOTE_FIRST = """new MutationObserver((seen, observer) => {
  if (!document.querySelector("#main .view")) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.__first = performance.now(); }));
}).observe(document, {childList: true, subtree: true})"""
FIRST = """() => new Promise(done => { const look = () => {
  const [page] = performance.getEntriesByType("navigation");
  if (window.__first) done(Math.round(window.__first - page.responseEnd)); else setTimeout(look, 50); }; look(); })"""


def make_tasks(first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks of twenty types and ten owners."""
    return [{"type": f"load.{number % 20}", "payload": {"number": number}, "agent_id": f"agent-{number % 10}",
             "task_summary": f"Load number {number}"} for number in range(first, first + count)]


def fill(url: str, tasks: int) -> None:
    """Create tasks."""
    with Http(url, TOKEN) as gate:
        for first in range(0, tasks, BATCH):
            gate.call("create_tasks", agent_id="ada", tasks=make_tasks(first, min(BATCH, tasks - first)))


@contextmanager
def load(url: str, rate: int) -> Iterator[list[int]]:
    """Create so many tasks a second meanwhile, each of which is an event; yields how many there were."""
    stop, made = threading.Event(), [0]

    def run() -> None:
        with Http(url, TOKEN) as gate:
            due = time.monotonic()
            while not stop.is_set():
                gate.call("create_tasks", agent_id="ada", tasks=make_tasks(made[0], rate // PIECES))
                made[0] += rate // PIECES
                due += 1 / PIECES
                stop.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=run)
    thread.start()
    yield made
    stop.set()
    thread.join()


def measure_view(console: Console, view: str, seconds: float, rate: int) -> None:
    """Show a view under load, and print what it did."""
    console.page.goto("about:blank")
    console.visit(view)
    first = console.page.evaluate(FIRST)
    console.watch.clear()
    with load(console.home, rate) as made:
        began = time.monotonic()
        console.page.evaluate(FRAMES)
        console.page.wait_for_timeout(seconds * 1000)
        gaps: list[float] = console.page.evaluate("() => window.__gaps")
        long = [frame for frame in console.seen("frames") if frame > LONG_MS]
        events, took = made[0], time.monotonic() - began
    print(f"{view:10} there after {first:4} ms   {events / took:5.0f} events/s   {len(gaps) / took:3.0f} frames/s   "
          f"longest gap {max(gaps):4.0f} ms   over {LONG_MS} ms: {len(long)} {[round(frame) for frame in long][:5]}   "
          f"{len(console.watch.requests) / took:.1f} requests/s   {len(console.faults())} faults")


def measure(arguments: argparse.Namespace) -> None:
    """Fill a gate, and measure each view."""
    with tempfile.TemporaryDirectory() as folder:
        live = Live("console.enabled=true", "allow_insecure_dev=true", "max_request_bytes=2000000",
                    database=f"sqlite:///{folder}/gate.db")
        drain, chromium = Drain(live.process), Chromium()
        try:
            fill(live.url, arguments.tasks)
            console = chromium.run(Console, chromium, str, live.url)
            chromium.run(console.page.add_init_script, NOTE_FIRST)
            for view in arguments.views:
                chromium.run(measure_view, console, view, arguments.seconds, arguments.rate)
            chromium.run(console.close)
        finally:
            chromium.close()
            drain.kill()


if __name__ == "__main__":
    reader = argparse.ArgumentParser(prog=f"python -m tests.extras.console.{Path(__file__).stem}", description=__doc__)
    reader.add_argument("views", nargs="*", default=list(VIEWS))
    reader.add_argument("--tasks", type=int, default=100_000)
    reader.add_argument("--rate", type=int, default=1000, help="events a second")
    reader.add_argument("--seconds", type=float, default=10.0, help="for each view")
    measure(reader.parse_args())
