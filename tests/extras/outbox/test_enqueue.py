"""asyncgate.enqueue: an application in the gate's own Postgres hands work over in its own transaction."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import Cluster
from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"
HOME, AWAY = "00000000-0000-0000-0000-000000000000", "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def house(cluster: Cluster) -> Cluster:
    """Return a Postgres with a gate's database, where `shop` has a table and may hand work over."""
    asyncio.run(cluster.migrated_database("gate"))
    with psycopg.connect(cluster.admin_url("gate")) as db:
        db.execute("CREATE ROLE shop LOGIN; CREATE ROLE mail LOGIN; CREATE ROLE stranger LOGIN")
        db.execute("CREATE TABLE orders (number int PRIMARY KEY); GRANT ALL ON orders TO shop")
        db.execute("SELECT asyncgate.allow_enqueue('shop', %s, 'agent', 'shop')", (HOME,))
        db.execute("SELECT asyncgate.allow_enqueue('mail', %s, 'agent', 'mail')", (AWAY,))
    return cluster


def connect(house: Cluster, role: str = "shop") -> Any:
    return psycopg.connect(house.url("gate", role))


def enqueue(db: Any, request: Any) -> Any:
    return db.execute("SELECT asyncgate.enqueue(%s::jsonb)", (msgspec.json.encode(request).decode(),)).fetchone()[0]


def order(db: Any, number: int) -> None:
    """Store an order, and hand over its task, in one transaction."""
    with db.transaction():
        db.execute("INSERT INTO orders VALUES (%s)", (number,))
        enqueue(db, {"type": "order.ship", "payload": {"order": number}})


def tasks_of(gate: Any) -> list[Any]:
    with Http(gate.url, TOKEN) as http:
        return [task for page in http.pages("list_tasks", limit=200) for task in page["tasks"]]


def wait_for(has_come: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not has_come():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.05)


def listed(db: Any) -> list[Any]:
    """Return the type and the problem of what a role has handed over."""
    return [*db.execute("SELECT request ->> 'type', problem FROM asyncgate.list_handovers()")]


def test_a_task_comes_if_and_only_if_the_transaction_commits(house: Cluster, start: Any) -> None:
    gate = start(database=house.url("gate"))
    with connect(house) as db:
        order(db, 1)
        with contextlib.suppress(RuntimeError), db.transaction():
            order(db, 2)
            raise RuntimeError
        with db.transaction():
            key = enqueue(db, {"type": "order.ship", "payload": 3, "idempotency_key": "order-3"})
            assert [type for type, _ in listed(db)][-1:] == ["order.ship"]

        wait_for(lambda: len(tasks_of(gate)) == 2)

        wait_for(lambda: listed(db) == [])
    assert key == "order-3"
    tasks = tasks_of(gate)
    assert sorted(str(task["payload"]) for task in tasks) == ["3", "{'order': 1}"]
    assert {task["created_by"]["id"] for task in tasks} == {"shop"}
    with Http(gate.url, TOKEN) as http:
        receipts = http.call("list_receipts", principal_kind="agent", principal_id="shop")["receipts"]
        assert [row["receipt_type"] for row in receipts] == ["task.assigned"] * 2


def test_a_refused_request_is_shown_mended_and_dropped_by_its_role_alone(house: Cluster, start: Any) -> None:
    gate = start(database=house.url("gate"))
    with connect(house) as db, connect(house, "mail") as other:
        db.autocommit = other.autocommit = True
        for type, more in (("", {}), ("bad", {"priority": "x"}), ("good", {})):
            enqueue(db, {"type": type, "payload": 1, **more})
        wait_for(lambda: len(tasks_of(gate)) == 1)
        wait_for(lambda: sum(problem is not None for _, problem in listed(db)) == 2)

        rows = db.execute("SELECT handover_id, problem FROM asyncgate.list_handovers()").fetchall()
        assert all("invalid_request" in problem for _, problem in rows)
        assert listed(other) == []
        (empty, _), (bad, _) = rows
        changes = ("SELECT asyncgate.retry_handover(%s, '{\"type\": \"x\"}')", "SELECT asyncgate.drop_handover(%s)")
        assert [other.execute(change, (bad,)).fetchone()[0] for change in changes] == [False, False]
        assert db.execute(changes[1], (empty,)).fetchone()[0]
        mended = '{"type": "mended", "payload": 1}'
        assert db.execute("SELECT asyncgate.retry_handover(%s, %s::jsonb)", (bad, mended)).fetchone()[0]
        wait_for(lambda: listed(db) == [])

    wait_for(lambda: sorted(task["type"] for task in tasks_of(gate)) == ["good", "mended"])


def test_the_role_of_the_session_decides_for_whom_work_is_handed_over(house: Cluster) -> None:
    with psycopg.connect(house.admin_url("gate"), autocommit=True) as admin:
        admin.execute("GRANT shop TO mail")
        with connect(house, "mail") as db:
            db.execute("SET ROLE shop")
            db.execute("SELECT set_config('app.tenant_id', %s, true)", (HOME,))
            enqueue(db, {"type": "t", "payload": 1})

        assert admin.execute("SELECT tenant_id::text, owner_id FROM asyncgate.handovers").fetchall() == [(AWAY, "mail")]


@pytest.mark.parametrize("statement", [
    "SELECT * FROM asyncgate.handovers", "SELECT * FROM asyncgate.enqueuers", "SELECT * FROM asyncgate.tasks",
    "DELETE FROM asyncgate.handovers", "INSERT INTO asyncgate.enqueuers VALUES ('stranger', "
    "'00000000-0000-0000-0000-000000000000', 'agent', 'a')", "SELECT asyncgate.handover_tenants()",
    "SELECT asyncgate.find_key('x')", "SELECT asyncgate.allow_enqueue('stranger', "
    "'00000000-0000-0000-0000-000000000000', 'agent', 'root')"])
def test_a_role_that_hands_work_over_may_do_nothing_else(house: Cluster, statement: str) -> None:
    with connect(house) as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
        db.execute(statement)


def test_what_can_be_refused_at_once_is_refused_in_the_transaction(house: Cluster) -> None:
    with connect(house, "stranger") as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
        enqueue(db, {"type": "t"})
    with psycopg.connect(house.admin_url("gate"), autocommit=True) as admin:
        admin.execute("GRANT USAGE ON SCHEMA asyncgate TO stranger")
        admin.execute("GRANT EXECUTE ON FUNCTION asyncgate.enqueue(jsonb) TO stranger")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="an agent, a worker, a service or a human"):
            admin.execute("SELECT asyncgate.allow_enqueue('shop', %s, 'asyncgate', 'root')", (HOME,))
    with connect(house, "stranger") as db, pytest.raises(psycopg.errors.InsufficientPrivilege, match="allow_enqueue"):
        enqueue(db, {"type": "t"})
    with connect(house) as db:
        db.autocommit = True
        wrong: list[Any] = [None, [], "x", {"payload": 1}, {"type": 7}]
        for request in wrong:
            with pytest.raises(psycopg.errors.InvalidParameterValue, match="create_task"):
                enqueue(db, request)
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="1048576"):
            enqueue(db, {"type": "t", "payload": "x" * 1_048_576})
        assert listed(db) == []


def test_six_rounds_of_kills_lose_and_double_nothing(house: Cluster, start: Any) -> None:
    """Of the gate, of the application within its transaction, and of the database."""
    chance, number = random.Random(7), 0
    gate = start("database.timeout_seconds=5", database=house.url("gate"))
    for kill in ("gate", "application", "database", "gate", "application", "gate"):
        for at in range(8):
            number += 1
            with contextlib.suppress(psycopg.OperationalError), connect(house) as db, db.transaction():
                order(db, number)
                if kill == "application" and at == 5:
                    with psycopg.connect(house.admin_url("gate"), autocommit=True) as admin:
                        admin.execute("SELECT pg_terminate_backend(%s)", (db.info.backend_pid,))
            if at == 5 and kill == "gate":
                gate.kill()
            if at == 5 and kill == "database":
                house.restart("immediate")
            time.sleep(chance.random() * 0.05)
        if kill == "gate":
            gate = start("database.timeout_seconds=5", database=house.url("gate"), port=gate.port)
    with psycopg.connect(house.admin_url("gate"), autocommit=True) as admin:
        committed = [row[0] for row in admin.execute("SELECT number FROM orders ORDER BY number").fetchall()]
        wait_for(lambda: admin.execute("SELECT count(*) FROM asyncgate.handovers").fetchone() == (0,))

    assert sorted(task["payload"]["order"] for task in tasks_of(gate)) == committed
    assert len(committed) == number - 2
