"""Hand work over in the transaction of your own database: the task exists if, and only if, the transaction commits.

    from asyncgate.extras import outbox

    with connection:                                    # of sqlite3, psycopg, SQLAlchemy or Django
        connection.execute("INSERT INTO orders …")
        outbox.enqueue(connection, "order.ship", {"order": 7})

`enqueue` writes one row into the table asyncgate_outbox of your database, and calls nobody.  `asyncgate relay DSN`
moves the rows to a gate, each of them once: the id of a row is the idempotency key of its task.  `create_table` makes
the table; `CREATE_TABLE` is its statement, for your own migrations.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from asyncgate.clients.finite import encode_finite

CREATE_TABLE = """CREATE TABLE IF NOT EXISTS asyncgate_outbox (
    id VARCHAR(64) PRIMARY KEY,
    request TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    problem TEXT
)"""
INSERT_ROW = "INSERT INTO asyncgate_outbox (id, request, created_at) VALUES ({})"
LONGEST_KEY = 200


def create_table(connection: Any) -> None:
    """Create the table, if there is none; inside the caller's transaction."""
    carry_out(connection, CREATE_TABLE, ())


def enqueue(connection: Any, type: str, payload: Any = None, *, key: str | None = None, **terms: Any) -> str:
    """Hand over a task within the transaction of this connection; return the idempotency key of the task.

    `terms` are further fields of create_task, such as requirements or priority.  A `key` of your own makes the same
    task also for whoever else uses it; the row then has it as its id.  An `idempotency_key` is that of the task alone.
    Raises ValueError for what JSON cannot express.
    """
    sql, values = write_row(type, payload, key=key, **terms)
    carry_out(connection, sql, values)
    return str(terms.get("idempotency_key") or values[0])


async def enqueue_async(connection: Any, type: str, payload: Any = None, *, key: str | None = None,
                        **terms: Any) -> str:
    """Do the same with an asynchronous connection: of psycopg, or a connection or session of SQLAlchemy."""
    sql, values = write_row(type, payload, key=key, **terms)
    statement, given = adapt_statement(connection, sql, values)
    await connection.execute(statement, given)
    return str(terms.get("idempotency_key") or values[0])


def write_row(type: str, payload: Any = None, *, key: str | None = None, **terms: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the statement and its values, with {} for each placeholder, for a database library that is not known here.

    The ids of rows rise with time, so tasks are created in the order of their rows.
    """
    now = time.time()
    id = key if key is not None else f"{int(now * 1000):013x}-{uuid.uuid4().hex}"
    if not 0 < len(id) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} characters, and this one has {len(id)}")
    request = {"type": type, "payload": payload, "idempotency_key": id, **{
        name: value for name, value in terms.items() if value is not None}}
    return INSERT_ROW, (id, encode_finite(request).decode(), now)


def carry_out(connection: Any, sql: str, values: tuple[Any, ...]) -> None:
    """Carry out a statement with a connection of one of the known libraries."""
    statement, given = adapt_statement(connection, sql, values)
    if find_library(connection) in ("sqlite3", "sqlalchemy", "psycopg"):
        connection.execute(statement, given)
    else:
        with connection.cursor() as cursor:
            cursor.execute(statement, given)


def adapt_statement(connection: Any, sql: str, values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a statement and its values as a library wants them."""
    library = find_library(connection)
    if library == "sqlalchemy":
        import sqlalchemy

        names = [f"value_{at}" for at in range(len(values))]
        return (sqlalchemy.text(sql.format(", ".join(f":{name}" for name in names))),
                dict(zip(names, values, strict=True)))
    mark = "?" if library == "sqlite3" else "%s"
    return sql.format(", ".join([mark] * len(values))), values


def find_library(connection: Any) -> str:
    """Return which library a connection is of; of a subclass that of what it is made from."""
    for kind in type(connection).__mro__:
        if (name := kind.__module__.partition(".")[0]) in ("sqlite3", "sqlalchemy", "psycopg", "psycopg2", "django"):
            return name
    proxied = type(getattr(connection, "_connections", None)).__module__        # django.db.connection is a proxy
    if proxied.startswith("django"):
        return "django"
    if hasattr(connection, "cursor"):
        return "other"
    raise TypeError(f"{type(connection).__name__} is not a connection of sqlite3, psycopg, SQLAlchemy or Django; "
                    "write_row returns what to insert")
