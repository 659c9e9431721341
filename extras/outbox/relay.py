"""The relay: moves rows of an application's outbox to a gate, at least once each, and the gate takes each once."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncgate.clients import http
from asyncgate.extras.outbox.refusals import FINAL_STATUSES, is_final, word_refusal
from asyncgate.parts.model import errors

ROWS_A_CALL = 100           # rows that one call hands over
BYTES_A_CALL = 1_000_000    # of its rows, unless one alone has more: many proxies take a mebibyte, a gate four
ENDING_STATUSES = FINAL_STATUSES | {401}        # of a call that is refused whatever its rows are
IDLE_SECONDS = 0.5      # between two looks at an empty table

log = logging.getLogger("asyncgate.relay")


class NoOutbox(Exception):
    """The database answers, and does not have the table, or does not let this role read it."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(f"the table asyncgate_outbox cannot be read: {problem}; outbox.create_table makes it")


class AnyOutbox(Protocol):
    """The outbox of an application."""

    def read(self) -> list[tuple[str, str]]:
        """Return the next rows that wait: id and request, in the order of their ids.  Raises NoOutbox."""

    def finish(self, done: list[str], parked: dict[str, str]) -> None:
        """Delete rows that are handed over, and note why others never will be."""

    def close(self) -> None:
        """Close the connection."""


READ_ROWS = "SELECT id, request FROM asyncgate_outbox WHERE problem IS NULL ORDER BY created_at, id LIMIT {}"
DELETE_ROW = "DELETE FROM asyncgate_outbox WHERE id = {}"
PARK_ROW = "UPDATE asyncgate_outbox SET problem = {} WHERE id = {}"


class SqliteOutbox:
    """The outbox in a SQLite file."""

    def __init__(self, path: str) -> None:
        address = f"{Path(path).absolute().as_uri()}?mode=rw"       # which makes no file of a mistyped name
        try:
            self.db = sqlite3.connect(address, timeout=30.0, isolation_level=None, check_same_thread=False, uri=True)
        except sqlite3.OperationalError as wrong:
            raise errors.StartupError(f"{path} is not a database of an application: {wrong}") from None

    def read(self) -> list[tuple[str, str]]:
        """Return the next rows."""
        try:
            return self.db.execute(READ_ROWS.format("?"), (ROWS_A_CALL,)).fetchall()
        except sqlite3.OperationalError as wrong:
            raise NoOutbox(wrong) if wrong.sqlite_errorcode == sqlite3.SQLITE_ERROR else wrong from None

    def finish(self, done: list[str], parked: dict[str, str]) -> None:
        """Note what became of rows."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self.db.executemany(DELETE_ROW.format("?"), [(id,) for id in done])
            self.db.executemany(PARK_ROW.format("?", "?"), [(problem, id) for id, problem in parked.items()])
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self.db.close()


class PostgresOutbox:
    """The outbox in a Postgres database; a lost connection is made again."""

    def __init__(self, dsn: str) -> None:
        import psycopg

        self.dsn, self.db = dsn, psycopg.connect(dsn, autocommit=True)

    def _connect(self) -> Any:
        import psycopg

        if self.db.closed:
            self.db = psycopg.connect(self.dsn, autocommit=True)
        return self.db

    def read(self) -> list[tuple[str, str]]:
        """Return the next rows."""
        import psycopg

        try:
            rows: list[tuple[str, str]] = self._connect().execute(READ_ROWS.format("%s"), (ROWS_A_CALL,)).fetchall()
        except psycopg.ProgrammingError as wrong:
            raise NoOutbox(wrong) from None
        return rows

    def finish(self, done: list[str], parked: dict[str, str]) -> None:
        """Note what became of rows."""
        with self._connect().transaction(), self.db.cursor() as cursor:
            cursor.executemany(DELETE_ROW.format("%s"), [(id,) for id in done])
            cursor.executemany(PARK_ROW.format("%s", "%s"), [(problem, id) for id, problem in parked.items()])

    def close(self) -> None:
        """Close the connection."""
        self.db.close()


def open_outbox(dsn: str) -> AnyOutbox:
    """Open the outbox at an address: sqlite:///FILE, postgresql://…, or the path of a SQLite file."""
    if dsn.startswith(("postgresql://", "postgres://")):
        return PostgresOutbox(dsn)
    path = dsn.removeprefix("sqlite://")
    path = path.removeprefix("/") if dsn.startswith("sqlite:///") else path
    if "://" in path:
        raise errors.StartupError(f"{dsn.partition('://')[0]} is not a database that the relay reads: sqlite:///FILE "
                                  "or postgresql://…")
    return SqliteOutbox(path)


class OutboxRelay:
    """Moves rows until it is stopped; several may do so at once."""

    def __init__(self, table: AnyOutbox, gate: http.Http, principal: dict[str, str]) -> None:
        self.table, self.gate, self.principal = table, gate, principal
        self.stopping = threading.Event()
        self.moved = self.parked = 0

    def run(self, once: bool = False) -> None:
        """Move what waits, and go on when there is more; with `once` until nothing waits."""
        failures = 0
        away: tuple[type[Exception], ...] = (http.Unreachable, NoOutbox, sqlite3.OperationalError,
                                             *find_errors("OperationalError", "InterfaceError"))
        while not self.stopping.is_set():
            try:
                rows = self.table.read()
                if rows:
                    self._move(rows)
                elif once:
                    return
                failures = 0
            except away as problem:
                if once and isinstance(problem, NoOutbox):
                    raise
                failures += 1
                log.warning("%s; trying again", problem)
            except http.Refusal as refusal:
                if refusal.status in ENDING_STATUSES:
                    raise
                failures += 1
                log.warning("%s; trying again", refusal)
            if failures or not rows:
                self.stopping.wait(http.pause_after(failures, IDLE_SECONDS) if failures else IDLE_SECONDS)

    def _move(self, rows: list[tuple[str, str]]) -> None:
        """Hand rows over, and note what became of them."""
        before = self.moved + self.parked
        for call in split_rows(rows):
            items = dict[str, Any]()
            for id, request in call:
                try:
                    item = msgspec.json.decode(request, type=dict[str, Any])
                    items[id] = {**item, "idempotency_key": item.get("idempotency_key") or id}
                except (msgspec.DecodeError, RecursionError) as wrong:
                    self._settle([], {id: f"the request is not JSON: {wrong}"})
            if items:
                self._hand_over(items)
        if self.moved + self.parked - before < len(rows):     # quotas and the like: what is left comes later
            self.stopping.wait(IDLE_SECONDS)

    def _hand_over(self, items: dict[str, Any]) -> None:
        """Create the tasks of some rows; a relay that dies before its note hands them over again."""
        try:
            results = self._create([*items.values()])
        except http.Refusal as refusal:
            if refusal.status not in FINAL_STATUSES:
                raise
            self._create([{}])      # raises if not the rows are the reason; the item alone is refused otherwise
            if len(items) == 1:
                return self._settle([], dict.fromkeys(items, word_refusal(refusal.code, str(refusal))))
            rows = iter(items.items())
            first = dict(islice(rows, len(items) // 2))
            self._hand_over(first)
            return self._hand_over(dict(rows))
        done = [id for id, result in zip(items, results, strict=True) if "error" not in result]
        refused = {id: result["error"] for id, result in zip(items, results, strict=True) if "error" in result}
        self._settle(done, {id: word_refusal(error["error"], error["message"]) for id, error in refused.items()
                            if is_final(error["error"])})

    def _create(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self.gate.call("create_tasks", tasks=items, **self.principal)["results"]
        return results

    def _settle(self, done: list[str], parked: dict[str, str]) -> None:
        self.table.finish(done, parked)
        self.moved, self.parked = self.moved + len(done), self.parked + len(parked)
        for id, problem in parked.items():
            log.error("row %s is parked: %s", id, problem)


def split_rows(rows: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Split rows into those of one call each; a row that is larger than a call should be has one of its own."""
    call, size = list[tuple[str, str]](), 0
    for row in rows:
        size += len(row[1].encode())
        if call and size > BYTES_A_CALL:
            yield call
            call, size = [], len(row[1].encode())
        call.append(row)
    if call:
        yield call


def find_errors(*names: str) -> tuple[type[Exception], ...]:
    """Return errors of psycopg by their names, if it is installed."""
    with contextlib.suppress(ImportError):
        import psycopg
        return tuple(getattr(psycopg, name) for name in names)
    return ()
