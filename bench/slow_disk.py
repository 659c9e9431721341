"""The value of shared commits: `asyncgate bench --slow-disk MS`.

The benchmark starts a server on a SQLite file whose commits take MS milliseconds longer, like a disk in a cloud.  A
single client pays one commit per request; many clients share commits.  The result is how much more they complete.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from asyncgate.commands.bench.load import COMPLETIONS
from asyncgate.commands.bench.rounds import Figures, count_clients
from asyncgate.commands.dev import watch_lifeline
from asyncgate.commands.main import main


class SlowConnection(sqlite3.Connection):
    """A connection whose commits take longer."""

    pause_seconds = 0.0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run a statement, a COMMIT after a pause."""
        if sql == "COMMIT":
            time.sleep(self.pause_seconds)
        return super().execute(sql, parameters)


def name_program(pause_ms: float) -> tuple[str, ...]:
    """Return the module and the argument that serve slowly."""
    return __name__, f"{pause_ms:g}"


def compare_clients(rows: list[Figures]) -> Iterator[str]:
    """Compare the completed tasks of several clients with those of the fewest."""
    ends = sorted((row for row in rows if row.operation in COMPLETIONS),
                  key=lambda figures: (figures.mode, figures.clients))
    for figures in ends:
        fewest = next(other for other in ends if other.mode == figures.mode)
        if figures is not fewest:
            yield (f"{figures.mode}, {count_clients(figures.clients)}: "
                   f"{figures.tasks_per_second / fewest.tasks_per_second:.1f} × "
                   f"the cycles/s of {count_clients(fewest.clients)}")


def serve_slowly(pause_ms: str, *arguments: str) -> None:
    """Serve a gate whose SQLite file is slow to commit."""
    SlowConnection.pause_seconds = float(pause_ms) / 1000
    sqlite3.connect = partial(sqlite3.connect, factory=SlowConnection)      # type: ignore[assignment]
    main(["bench-server", *arguments])


if __name__ == "__main__":
    watch_lifeline()
    serve_slowly(*sys.argv[1:])
