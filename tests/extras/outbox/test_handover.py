"""Work that is handed over in an application's own transaction: it comes if that commits, and it comes once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from asyncgate.clients.http import Http, Refusal
from asyncgate.clients.testing import Gate
from asyncgate.conformance.postgres_server import Cluster
from asyncgate.extras import outbox
from asyncgate.extras.outbox.relay import NoOutbox, OutboxRelay, open_outbox
from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"


def tasks_of(url: str) -> list[Any]:
    with Http(url, TOKEN) as gate:
        return [task["payload"] for page in gate.pages("list_tasks", limit=200) for task in page["tasks"]]


def rows_of(path: Path) -> list[tuple[str, str | None]]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT request, problem FROM asyncgate_outbox ORDER BY id").fetchall()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """Return the database of an application."""
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        outbox.create_table(db)
        db.commit()
        yield path, db


def order(db: sqlite3.Connection, number: int) -> None:
    with db:
        db.execute("INSERT INTO orders VALUES (?)", (number,))
        outbox.enqueue(db, "order.ship", {"order": number}, priority=number)


def test_a_row_is_there_if_and_only_if_the_transaction_commits(shop: Any) -> None:
    path, db = shop
    with contextlib.suppress(RuntimeError), db:
        outbox.enqueue(db, "order.ship", {"order": 1})
        raise RuntimeError
    order(db, 2)

    assert len(rows_of(path)) == 1


def test_the_relay_moves_each_row_once_and_parks_what_is_refused_for_good(shop: Any, live: Any) -> None:
    path, db = shop
    for number in range(3):
        order(db, number)
    with db:
        outbox.enqueue(db, "order.ship", {"order": 0}, key="again")
        outbox.enqueue(db, "", "refused")
        db.execute("INSERT INTO asyncgate_outbox (id, request, created_at) VALUES ('broken', '{', 0)")

    for _ in range(2):
        with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(f"sqlite:///{path}")) as table:
            relay = OutboxRelay(table, gate, {"agent_id": "shop"})
            relay.run(once=True)

    assert sorted(task["order"] for task in tasks_of(live.url)) == [0, 0, 1, 2]
    problems = [problem for _, problem in rows_of(path)]
    assert len(problems) == 2
    assert any("not JSON" in (problem or "") for problem in problems)
    assert any("invalid_request" in (problem or "") for problem in problems)


def test_rows_that_are_too_large_together_become_tasks_and_one_that_is_too_large_alone_is_parked(
        shop: Any) -> None:
    path, db = shop
    with db:
        outbox.enqueue(db, "large", "x" * 6_000_000)
        outbox.enqueue(db, "many", [1] * 150_000)       # few bytes, and more values than a request may have
        for number in range(60):
            outbox.enqueue(db, "order.ship", "é" * 50_000, priority=number)

    with Gate(port=0) as gate, Http(gate.url, gate.token) as http, contextlib.closing(open_outbox(str(path))) as table:
        relay = OutboxRelay(table, http, {"agent_id": "shop"})
        relay.run(once=True)
        tasks = [task for page in http.pages("list_tasks", limit=200) for task in page["tasks"]]

    assert sorted(task["priority"] for task in tasks) == [*range(60)]
    assert [(problem or "").partition(":")[0] for _, problem in rows_of(path)] == ["payload_too_large"] * 2
    assert (relay.moved, relay.parked) == (60, 2)


def test_the_problem_of_a_row_names_no_place_in_a_call_that_its_application_has_not_made(shop: Any, live: Any) -> None:
    path, db = shop
    with db:
        outbox.enqueue(db, "t", 1)
        outbox.enqueue(db, "t", "a\0b")
        outbox.enqueue(db, "t", {"deep": ["\0"]})
        outbox.enqueue(db, "", 1)
    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(str(path))) as table:
        OutboxRelay(table, gate, {"agent_id": "shop"}).run(once=True)

    assert sorted((problem or "").removeprefix("invalid_request: ") for _, problem in rows_of(path)) == [
        "Expected `str` of length >= 1 - at `$.type`", "payload.deep[0]: strings may not contain the NUL character",
        "payload: strings may not contain the NUL character"]


@pytest.mark.parametrize(("token", "agent"), [(TOKEN, ""), ("another", "shop")])
def test_a_call_that_is_refused_whatever_its_rows_are_ends_the_relay_and_parks_none(
        shop: Any, live: Any, token: str, agent: str) -> None:
    path, db = shop
    order(db, 1)

    with Http(live.url, token) as gate, contextlib.closing(open_outbox(str(path))) as table, pytest.raises(Refusal):
        OutboxRelay(table, gate, {"agent_id": agent}).run(once=True)

    assert [problem for _, problem in rows_of(path)] == [None]


def test_a_row_that_is_handed_over_again_makes_no_second_task(shop: Any, live: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    path, db = shop
    order(db, 1)

    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(str(path))) as table:
        # A relay that is killed between the gate's answer and its own note.
        monkeypatch.setattr(table, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            OutboxRelay(table, gate, {"agent_id": "shop"}).run(once=True)
        monkeypatch.undo()
        OutboxRelay(table, gate, {"agent_id": "shop"}).run(once=True)

    assert tasks_of(live.url) == [{"order": 1}]
    assert rows_of(path) == []


def test_no_order_is_lost_or_doubled_while_relay_and_gate_are_killed(shop: Any, start: Any, tmp_path: Path) -> None:
    path, db = shop
    database, port, most = f"sqlite:///{tmp_path}/gate.db", 0, 60
    gate = start(database=database)
    port = int(gate.url.rpartition(":")[2])
    surroundings = {**os.environ, "ASYNCGATE_API_KEY": TOKEN, "ASYNCGATE_URL": gate.url}

    def relay() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "asyncgate", "relay", f"sqlite:///{path}", "--as", "shop"],
                                env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    chance, moving = random.Random(7), relay()
    for number in range(most):
        order(db, number)
        if number in (20, 40):
            moving.kill()
            moving.wait()
            moving = relay()
        if number == 30:
            gate.kill()
            gate = start(database=database, port=port)
        time.sleep(chance.random() * 0.05)
    until = time.monotonic() + PATIENCE_SECONDS
    while rows_of(path) and time.monotonic() < until:
        time.sleep(0.1)
    moving.terminate()
    moving.wait()

    assert rows_of(path) == []
    assert sorted(task["order"] for task in tasks_of(gate.url)) == [*range(most)]


def test_enqueue_returns_the_key_that_the_task_has(shop: Any, live: Any) -> None:
    path, db = shop
    with db:
        keys = [outbox.enqueue(db, "t", number, **terms) for number, terms in enumerate((
            {}, {"key": "a"}, {"idempotency_key": "b"}, {"key": "c", "idempotency_key": "d"}))]
    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(str(path))) as table:
        OutboxRelay(table, gate, {"agent_id": "shop"}).run(once=True)
        for number, key in enumerate(keys):
            gate.call("create_task", type="t", payload=number, idempotency_key=key, agent_id="shop")

    assert keys[1:] == ["a", "b", "d"]
    assert sorted(tasks_of(live.url)) == [0, 1, 2, 3]


def test_what_json_cannot_express_is_refused_in_the_transaction_by_its_path(shop: Any) -> None:
    path, db = shop
    for payload, flaw in (({"x": [1, float("nan")]}, r"payload\.x\[1\] is nan"), (float("-inf"), "payload is -inf")):
        with pytest.raises(ValueError, match=f"^{flaw}: JSON has no such number$"):
            outbox.enqueue(db, "t", payload)

    assert rows_of(path) == []


def test_other_libraries_get_the_statement_as_they_want_it() -> None:
    class Cursor:
        def __init__(self, heard: list[Any]) -> None:
            self.heard = heard

        def __enter__(self) -> Cursor:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def execute(self, sql: str, values: Any) -> None:
            self.heard.append((sql, values))

    class Other:
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def cursor(self) -> Cursor:
            return Cursor(self.heard)

    connection = Other()
    key = outbox.enqueue(connection, "t", 1)

    [(sql, values)] = connection.heard
    assert sql.endswith("VALUES (%s, %s, %s)")
    assert values[0] == key
    with pytest.raises(TypeError, match="not a connection"):
        outbox.enqueue(object(), "t", 1)
    with pytest.raises(ValueError, match="characters"):
        outbox.enqueue(connection, "t", 1, key="x" * 201)


@pytest.mark.parametrize(("content", "problem"), [
    (None, "is not a database of an application: unable to open database file"),
    (b"no database" * 100, "the database cannot be used: file is not a database"),
    (b"", "the table asyncgate_outbox cannot be read: no such table: asyncgate_outbox; outbox.create_table makes it")])
def test_once_a_wrong_database_is_an_error_and_no_file_is_made(
        tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "shop%3f#1.db"
    if content is not None:
        path.write_bytes(content)

    told = subprocess.run([sys.executable, "-m", "asyncgate", "relay", "--once", f"sqlite:///{path}"],
                          capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)

    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("Error: ")
    assert told.stderr.endswith(f"{problem}\n")
    assert path.exists() == (content is not None)


def test_a_relay_waits_for_a_table_that_is_not_there_yet(
        tmp_path: Path, live: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "shop.db"
    path.touch()
    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(str(path))) as table:
        relay = OutboxRelay(table, gate, {"agent_id": "shop"})
        running = threading.Thread(target=relay.run)
        running.start()
        while "no such table" not in caplog.text and running.is_alive():
            time.sleep(0.05)
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            outbox.create_table(db)
            outbox.enqueue(db, "t", 1)
        while not relay.moved and running.is_alive():
            time.sleep(0.05)
        relay.stopping.set()
        running.join()

    assert tasks_of(live.url) == [1]


def test_a_postgres_without_the_table_is_an_error_once(cluster: Cluster, live: Any) -> None:
    asyncio.run(cluster.create_database("shop"))
    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(cluster.admin_url("shop"))) as table, \
            pytest.raises(NoOutbox, match='relation "asyncgate_outbox" does not exist'):
        OutboxRelay(table, gate, {}).run(once=True)


def test_it_works_on_postgres_with_psycopg(cluster: Cluster, live: Any) -> None:
    asyncio.run(cluster.create_database("shop"))
    url = cluster.admin_url("shop")

    with psycopg.connect(url) as db:
        outbox.create_table(db)
        outbox.enqueue(db, "order.ship", {"order": 7})
        db.commit()
        with contextlib.suppress(RuntimeError), db.transaction():
            outbox.enqueue(db, "order.ship", {"order": 8})
            raise RuntimeError
        db.commit()

    with Http(live.url, TOKEN) as gate, contextlib.closing(open_outbox(url)) as table:
        OutboxRelay(table, gate, {"agent_id": "shop"}).run(once=True)

    assert tasks_of(live.url) == [{"order": 7}]


def test_it_works_with_sqlalchemy(tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session

    path = tmp_path / "shop.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        outbox.create_table(connection)
        outbox.enqueue(connection, "t", 1)
    with Session(engine) as session:
        outbox.enqueue(session, "t", 2)
        session.rollback()
        outbox.enqueue(session, "t", 3)
        session.commit()
    engine.dispose()

    assert [request.partition('"payload":')[2][0] for request, _ in rows_of(path)] == ["1", "3"]


def test_it_works_with_django(tmp_path: Path) -> None:
    django = pytest.importorskip("django")
    from django import db as django_db
    from django.conf import settings

    path = tmp_path / "shop.db"
    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}})
    django.setup()
    connection = django_db.connection
    outbox.create_table(connection)
    with django_db.transaction.atomic():
        outbox.enqueue(connection, "t", 1)
    with contextlib.suppress(RuntimeError), django_db.transaction.atomic():
        outbox.enqueue(connection, "t", 2)
        raise RuntimeError
    connection.close()

    assert len(rows_of(path)) == 1
