"""Models of pydantic, and other values of Python: through the client, the worker and the testing kit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
import pytest

from asyncgate.clients import AsyncGate
from asyncgate.clients.testing import Gate
from asyncgate.clients.worker import Done, Job, Worker

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What a worker runs on."""
    return "asyncio"


class Page(pydantic.BaseModel):
    number: Annotated[int, pydantic.Field(ge=1)]
    text: str = pydantic.Field(default="", alias="content")
    secret: str = "hidden"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


@dataclass
class Book:
    pages: list[Page]


class Opaque:
    """Nothing that JSON has a word for."""


async def run(gate: AsyncGate, worker: Worker, payload: Any, **more: Any) -> Any:
    """Run one task by a worker; return the whole task."""
    import asyncio

    handle = await gate.submit("t", payload, max_attempts=1, **more)
    working = asyncio.ensure_future(worker.serve())
    try:
        return await handle.ended(60)
    finally:
        worker.stop()
        await working


def doubled(page: Page) -> Page:
    return Page(number=2 * page.number, content=page.text)


def first(pages: list[Page] | None) -> Any:
    return pages[0] if pages else None


def kind(pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]) -> str:
    return type(pet).__name__


def count(book: Book) -> Done:
    return Done({"pages": book.pages}, artifacts=[book.pages[0]])


def reports(page: Page, job: Job) -> int:
    job.save(page)
    job.report({"at": page})
    return page.number


async def doubled_later(page: Page) -> Page:
    return doubled(page)


CONTENT = {"number": 2, "content": "a", "secret": "hidden"}


@pytest.mark.parametrize(("function", "payload", "result"), [
    (doubled, Page(number=1, content="a"), CONTENT), (doubled_later, {"number": 1, "content": "a"}, CONTENT),
    (first, [Page(number=2, content="a")], CONTENT), (kind, Cat(kind="cat", lives=9), "Cat"),
    (count, Book([Page(number=2, content="a")]), {"pages": [CONTENT]}), (reports, Page(number=2), 2)])
async def test_models_are_validated_on_the_way_in_and_dumped_on_the_way_out(
        function: Any, payload: Any, result: Any) -> None:
    async with Gate(port=0) as gate:
        worker = Worker(gate, "w", state=None, declare=False)
        worker.task("t")(function)

        task = await run(gate, worker, payload)

        assert task.result.result == result, task.result.error
        if function is doubled:
            assert await gate.handle(task.task_id).result(type=Page) == Page(number=2, content="a")


async def test_a_payload_that_is_not_valid_for_a_model_fails_its_task_and_the_error_does_not_repeat_it() -> None:
    async with Gate(port=0) as gate:
        worker = Worker(gate, "w", state=None, declare=False)
        worker.task("t")(first)

        task = await run(gate, worker, [{"number": -4711, "content": "a"}])

        assert task.result.error["code"] == "invalid_payload"
        assert "$.0.number" in task.result.error["message"]
        assert "4711" not in task.result.error["message"]


@pytest.mark.parametrize("via", ["rest", "mcp"])
async def test_the_client_sends_models_wherever_json_is_expected_and_refuses_at_the_call_what_it_cannot_send(
        via: Any) -> None:
    async with Gate(port=0) as gate, AsyncGate(gate.url, gate.token, agent_id="ada", via=via) as client:
        made = await client.create_tasks(tasks=[{"type": "t", "payload": Page(number=3)}])
        assert (await client.get_task(str(made.results[0].task_id))).payload["number"] == 3

        opaque: list[Any] = [Opaque(), {"a": [Opaque()]}]
        for payload in opaque:
            with pytest.raises(TypeError, match="Opaque cannot be written as JSON"):
                await client.submit("t", payload)
        with pytest.raises(ValueError, match="JSON has no such number"):
            await client.submit("t", {"page": Page(number=1), "x": float("nan")})
        assert len((await client.list_tasks()).tasks) == 1


def test_models_go_through_the_blocking_client() -> None:
    with Gate() as gate:
        handle = gate.submit("t", Page(number=3))
        assert handle.task().payload["number"] == 3


def test_a_program_without_models_does_not_import_pydantic() -> None:
    script = '''if True:
        import sys
        from asyncgate.clients import SyncGate, Worker
        Worker("http://127.0.0.1:9", "w", state=None).task("t")(lambda payload: payload)
        SyncGate("http://127.0.0.1:9")
        assert "pydantic" not in sys.modules
    '''
    subprocess.run([sys.executable, "-c", script], check=True)
