"""A worker declares what its functions take and give, and a caller says it in Python, too."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest

from asyncgate.clients.client import AsyncGate
from asyncgate.clients.http import Refusal
from asyncgate.clients.types import TaskType
from asyncgate.clients.worker import Done, Job, Worker
from asyncgate.clients.worker.job import TaskFunction
from asyncgate.extras.types.schemas import Checker, Looks, check_declared_schema
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
TOKEN = "a-token-for-tests"


@dataclasses.dataclass
class Scan:
    file: str
    dpi: int = 300


class Named(TypedDict):
    file: str


class Page(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=1)]
    next: Page | None = None


class Model(pydantic.BaseModel):
    file: str = pydantic.Field(alias="from", pattern="^[a-z]+$")


def of_dataclass(payload: Scan) -> str:
    """Read the text
    of a scanned page.

    Slowly.
    """
    return payload.file


def of_dict(payload: Named, job: Job) -> list[Page]:
    return []


async def of_struct(payload: Page) -> Model:
    return Model.model_validate({"from": "a"})


def of_model(payload: Model) -> Done:
    return Done(1)


def of_nothing(payload: Any) -> Any:
    """Anything."""
    return payload


def declared(function: Any, **more: Any) -> dict[str, Any]:
    return TaskFunction(function, (), None, **more).declaration


@pytest.mark.parametrize(("function", "good", "bad"), [
    (of_dataclass, {"file": "a"}, {"dpi": 1}), (of_dict, {"file": "a"}, {}),
    (of_struct, {"number": 1, "next": {"number": 2}}, {"number": 1, "next": {"number": 0}}),
    (of_model, {"from": "a"}, {"from": "A"})], ids=["dataclass", "TypedDict", "Struct", "pydantic"])
def test_a_schema_is_derived_that_a_gate_takes_and_that_says_what_the_function_takes(
        function: Any, good: Any, bad: Any) -> None:
    schema = msgspec.json.encode(declared(function)["payload_schema"])

    check_declared_schema(schema, "payload_schema")

    checker = Checker(schema.decode())
    assert checker.find_flaw(msgspec.json.encode(good), "payload", Looks(1000)) is None
    assert checker.find_flaw(msgspec.json.encode(bad), "payload", Looks(1000)) is not None
    assert declared(function)["payload_schema"]["type"] == "object"


def test_description_and_result_come_from_the_function_and_nothing_from_one_that_says_nothing() -> None:
    assert declared(of_dataclass)["description"] == "Read the text of a scanned page."
    assert declared(of_dataclass, description="Read.")["description"] == "Read."
    assert declared(of_dataclass)["result_schema"] == {"type": "string"}
    assert "result_schema" not in declared(of_model)
    assert declared(of_nothing) == {}


@contextlib.asynccontextmanager
async def at_work(worker: Worker) -> Any:
    working = asyncio.create_task(worker.serve())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_worker_declares_and_a_caller_has_the_types_in_python(live: Any, caplog: Any) -> None:
    worker = Worker(live.url, "w", token=TOKEN, state=None)
    worker.task("ocr.scan")(of_dataclass)
    worker.task("odd")(lambda payload: payload)
    scan: TaskType[Scan, str] = TaskType("ocr.scan", payload=Scan, result=str)

    async with asyncio.timeout(PATIENCE_SECONDS), AsyncGate(live.url, TOKEN, agent_id="ada") as gate, at_work(worker):
        while not (shown := (await gate.list_types(type="ocr.scan")).types) or not shown[0].description:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await scan.run(gate, Scan("a.png")) == "a.png"
        with pytest.raises(Refusal) as refused:
            await gate.submit("ocr.scan", {"dpi": 3})

    assert (refused.value.code, refused.value.more["path"]) == ("payload_invalid", "payload.file")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
