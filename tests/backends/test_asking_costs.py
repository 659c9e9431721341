"""A gate whose tasks ask nothing pays nothing for questions and steps: the same statements, the same rows."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import Backend, open_backend
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres import Queues
from asyncgate.backends.postgres.pipeline import Connection
from asyncgate.conformance.harness import Gate, settings_for_tests, under
from asyncgate.extras.asking.rules import Asking

pytestmark = pytest.mark.anyio
VALUE = re.compile(r"'[^']*'|\b\d[\w.+-]*")


@pytest.fixture(params=["memory", "postgres"])
async def backend(request: pytest.FixtureRequest, fresh: Callable[..., Any]) -> AsyncIterator[Backend]:
    """Return an empty database of each kind."""
    opened = Memory() if request.param == "memory" else await open_backend(await fresh("postgres"))
    yield opened
    await opened.close()


def make_gate(backend: Backend, *, asks: bool) -> Gate:
    """Return the gate of a tenant of its own, with the extra that looks after questions or without."""
    engine = Engine(backend, settings_for_tests())
    if asks:
        engine.extend(Asking(engine))
    return Gate(engine, str(uuid.uuid4()))


@pytest.fixture
def sent(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts of all statements that the database is sent from now on."""
    texts: list[str] = []
    if isinstance(backend, Memory):
        backend.db.set_trace_callback(lambda text: texts.append(VALUE.sub("?", text)))      # they are written out
        return texts
    run = Connection.run

    async def noted(db: Connection) -> None:
        texts.extend(text for text, *_ in db.added)
        await run(db)
    monkeypatch.setattr(Connection, "run", noted)
    monkeypatch.setattr(Queues, "SLOW_SECONDS", math.inf)   # a busy machine would search the next queue in another way
    return texts


async def live(gate: Gate, sent: list[str]) -> tuple[list[str], dict[str, int]]:
    """Create, claim, lose and complete tasks; return what the database was sent, and how many rows there are."""
    await gate.create()         # the first of a tenant adds a lane
    sent.clear()
    await gate.create()
    offer = await gate.claim("w1")
    assert offer is not None
    await gate.as_worker("w1").report_progress(**under(offer), progress=1)
    await gate.as_worker("w1").release_lease(**under(offer))
    again = await gate.claim("w2")
    assert again is not None
    await gate.as_worker("w2").complete(**under(again), artifacts=[{"uri": "file:///out"}])
    texts = list(sent)
    return texts, {kind: len(rows) for kind, rows in (await gate.everything()).items()}


async def test_a_task_that_asks_nothing_costs_no_statement_and_no_row_more(backend: Backend, sent: list[str]) -> None:
    without = await live(make_gate(backend, asks=False), sent)
    with_questions = await live(make_gate(backend, asks=True), sent)

    assert len(without[0]) > 5
    assert with_questions == without
