"""Declared types: what workers say of a type is held against payloads and results, and agents can see it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncgate.conformance import harness
from asyncgate.extras.types.schemas import SMALL_BYTES
from asyncgate.parts.model import errors

pytestmark = pytest.mark.anyio
OCR: dict[str, Any] = {"type": "object", "required": ["file"], "additionalProperties": False, "properties": {
    "file": {"type": "string"}, "dpi": {"type": "integer", "minimum": 1}, "pages": {"type": "array", "items": {
        "type": "integer"}}}}
TEXT = {"type": "string", "minLength": 1}


async def declare(gate: harness.Gate, **more: Any) -> Any:
    """Declare a type."""
    return await gate.as_worker("w1").declare_type(**{"type": "ocr", "payload_schema": OCR, "result_schema": TEXT,
                                                      "description": "Read a page.", **more})


async def test_a_payload_that_does_not_fit_is_refused_with_its_path_and_nothing_is_written(gate: harness.Gate) -> None:
    await declare(gate)

    for payload, path in (({}, "payload.file"), ({"file": "a", "dpi": 0}, "payload.dpi"),
                          ({"file": "a", "pages": [1, "x"]}, "payload.pages[1]"), ([], "payload"), (None, "payload"),
                          ({"file": "a", "more": 1}, "payload.more")):
        with pytest.raises(errors.PayloadInvalid) as refused:
            await gate.as_agent().create_task(type="ocr", payload=payload)
        assert refused.value.more["path"] == path

    assert (await gate.as_agent().list_tasks()).tasks == []
    assert (await gate.as_agent().create_task(type="ocr", payload={"file": "a", "dpi": 300})).status == "queued"
    assert (await gate.as_agent().create_task(type="other", payload={})).status == "queued"


@pytest.mark.one_store
async def test_an_error_says_nothing_of_what_a_payload_holds(gate: harness.Gate) -> None:
    await declare(gate, payload_schema={"properties": {
        "a": {"type": "integer"}, "b": {"enum": ["x"]}, "c": {"pattern": "^x$"}, "d": {"maxLength": 3},
        "e": {"maximum": 5}, "f": {"maxItems": 1}, "g": {"not": {}}, "h": {"anyOf": [{"const": 1}]},
        "i": {"prefixItems": [{}], "items": False}, "j": {"multipleOf": 2}, "k": {"contains": {"type": "null"}}}})

    for name, value in {"a": "secret", "b": "secret", "c": "secret", "d": "secret", "e": 987654321,
                        "f": ["secret", 987654321], "g": {"secret": "secret"}, "h": ["secret"],
                        "i": ["secret", 987654321], "j": 987654321, "k": ["secret"]}.items():
        with pytest.raises(errors.PayloadInvalid) as refused:
            await gate.as_agent().create_task(type="ocr", payload={name: value})
        assert "secret" not in str(refused.value)
        assert "987654321" not in str(refused.value)
        assert str(refused.value).startswith(f"payload.{name}")


@pytest.mark.one_store
async def test_each_task_of_a_batch_is_refused_by_itself(gate: harness.Gate) -> None:
    await declare(gate)

    made = await gate.as_agent().create_tasks(tasks=[
        {"type": "ocr", "payload": {"file": "a"}}, {"type": "ocr", "payload": {}}, {"type": "x", "payload": {}}])

    assert [item.error and (item.error.error, item.error.path) for item in made.results] == [
        None, ("payload_invalid", "payload.file"), None]


async def test_a_creation_that_is_repeated_returns_the_first_task_whatever_was_declared_since(
        gate: harness.Gate) -> None:
    first = await gate.as_agent().create_task(type="ocr", payload={"odd": 1}, idempotency_key="k")
    await declare(gate)

    assert (await gate.as_agent().create_task(type="ocr", payload={"odd": 1},
                                              idempotency_key="k")).task_id == first.task_id
    with pytest.raises(errors.PayloadInvalid):
        await gate.as_agent().create_task(type="ocr", payload={"odd": 1}, idempotency_key="k2")


async def test_a_task_that_is_run_again_keeps_its_payload(gate: harness.Gate) -> None:
    made = await gate.as_agent().create_task(type="ocr", payload={"odd": 1})
    await gate.as_agent().cancel_task(task_id=made.task_id)
    await declare(gate)

    assert (await gate.as_agent().rerun_task(task_id=made.task_id)).status == "queued"


async def test_a_payload_that_lies_elsewhere_is_not_looked_at(gate: harness.Gate) -> None:
    await declare(gate)

    assert (await gate.as_agent().create_task(type="ocr", payload_pointer="s3://a/b")).status == "queued"


async def test_a_result_that_does_not_fit_is_refused_and_the_lease_lives_on(gate: harness.Gate) -> None:
    await declare(gate)
    await gate.as_agent().create_task(type="ocr", payload={"file": "a"}, result_delivery="inline")
    offer = await gate.claim("w1")
    assert offer is not None

    for result in ("", 5, None):
        with pytest.raises(errors.ResultInvalid) as refused:
            await gate.as_worker("w1").complete(**harness.under(offer), result=result)
        assert refused.value.more["path"] == "result"

    assert (await gate.as_worker("w1").complete(**harness.under(offer), result="a text")).status == "succeeded"


async def test_no_result_fits_where_it_is_said_to_be_elsewhere(gate: harness.Gate) -> None:
    await declare(gate)
    await gate.as_agent().create_task(type="ocr", payload={"file": "a"})
    offer = await gate.claim("w1")
    assert offer is not None

    ended = await gate.as_worker("w1").complete(**harness.under(offer), artifacts=[{"uri": "s3://a/b"}])

    assert ended.status == "succeeded"


async def test_large_values_are_checked_too_alone_and_in_batches(gate: harness.Gate) -> None:
    await declare(gate, result_schema={"type": "array", "items": {"type": "integer"}})
    large = {"file": "a" * SMALL_BYTES, "pages": [*range(2000)]}
    wrong = {**large, "pages": [*range(2000), "x"]}

    with pytest.raises(errors.PayloadInvalid) as refused:
        await gate.as_agent().create_task(type="ocr", payload=wrong)
    assert refused.value.more["path"] == "payload.pages[2000]"
    items = (await gate.as_agent().create_tasks(tasks=[{"type": "ocr", "payload": payload, "result_delivery": "inline"}
                                                       for payload in (large, wrong)])).results
    assert [item.error is None for item in items] == [True, False]

    offer = await gate.claim("w1")
    assert offer is not None
    with pytest.raises(errors.ResultInvalid):
        await gate.as_worker("w1").complete(**harness.under(offer), result=[*range(3000), "x"])
    done = await gate.as_worker("w1").complete_tasks(tasks=[{**harness.under(offer), "result": [*range(3000)]}])
    assert done.results[0].status == "succeeded"


async def test_a_tenant_may_choose_to_be_warned(gate: harness.Gate) -> None:
    await declare(gate)
    with pytest.raises(errors.Forbidden):
        await gate.as_worker("w1").set_type_policy(on_mismatch="warn")
    await gate.as_admin().set_type_policy(on_mismatch="warn")

    made = await gate.as_agent().create_task(type="ocr", payload={}, result_delivery="inline")
    [warning] = made.warnings
    batch = await gate.as_agent().create_tasks(tasks=[{"type": "ocr", "payload": {}}])
    offer = await gate.claim("w1")
    assert offer is not None
    ended = await gate.as_worker("w1").complete(**harness.under(offer), result=5)

    assert warning == "payload.file is missing, as is declared of the type ocr"
    assert batch.warnings == [warning]
    assert ended.warnings == ["result is not of type string, as is declared of the type ocr"]
    assert (await gate.as_agent().list_types()).on_mismatch == "warn"


async def test_a_claim_declares_types_and_what_is_absent_stays(gate: harness.Gate) -> None:
    await gate.as_worker("w1").lease_next(types={"ocr": {"description": "Read.", "payload_schema": OCR},
                                                 "sum": {"description": "Add."}})
    await gate.as_worker("w1").lease_next(types={"ocr": {"result_schema": TEXT}})

    [ocr] = (await gate.as_agent().list_types(type="ocr")).types
    assert ocr.description == "Read."
    assert msgspec.json.decode(ocr.payload_schema) == OCR
    assert msgspec.json.decode(ocr.result_schema) == TEXT
    names = [(row.type, row.workers) for row in (await gate.as_agent().list_types()).types if row.type]
    assert names == [("ocr", 0), ("sum", 0)]
    with pytest.raises(errors.PayloadInvalid):
        await gate.as_agent().create_task(type="ocr", payload={})


async def test_what_is_declared_again_as_it_is_writes_nothing(gate: harness.Gate) -> None:
    first = await declare(gate)
    await gate.wait(60)

    assert (await declare(gate)).declared_at == first.declared_at
    assert (await declare(gate, description="Read it.")).declared_at > first.declared_at


async def test_what_is_removed_is_not_checked_any_more(gate: harness.Gate) -> None:
    await declare(gate)

    assert (await gate.as_worker("w1").remove_type(type="ocr")).ok

    assert (await gate.as_agent().create_task(type="ocr", payload={})).status == "queued"
    with pytest.raises(errors.TypeUnknown):
        await gate.as_worker("w1").remove_type(type="ocr")


async def test_a_key_for_some_types_declares_those_alone(gate: harness.Gate) -> None:
    limited = gate.as_worker("w1")
    limited.caller = replace(limited.caller, task_types=frozenset({"sum"}))

    await limited.declare_type(type="sum", description="Add.")

    for call in (limited.declare_type(type="ocr", description="x"), limited.remove_type(type="ocr"),
                 limited.lease_next(types={"ocr": {}})):
        with pytest.raises(errors.Forbidden):
            await call


async def test_another_tenant_sees_nothing_of_a_declaration(gate: harness.Gate) -> None:
    await declare(gate)
    other = gate.stranger()

    assert (await other.as_agent().list_types()).types == []
    assert (await other.as_agent().create_task(type="ocr", payload={})).status == "queued"


@pytest.mark.one_store
@pytest.mark.parametrize(("schema", "where"), [
    ([], "payload_schema is not an object"), ({"type": "strin"}, "payload_schema is not a JSON schema"),
    ({"$ref": "https://evil.example/x"}, "$ref leads outside"), ({"$id": "https://evil.example/x"}, "$id"),
    ({"properties": {"a": {"pattern": "(a+)+(?=b)"}}}, "payload_schema.properties.a.pattern"),
    ({"pattern": "((a{1000}){1000}){1000}"}, "pattern"), ({"patternProperties": {}}, "patternProperties"),
    ({"allOf": [{"unevaluatedProperties": False}]}, "payload_schema.allOf[0].unevaluatedProperties"),
    ({"$schema": "https://evil.example/schema"}, "$schema"), ({"allOf": [{}] * 2001}, "more than 2000 schemas")])
async def test_a_schema_that_reaches_outside_or_could_be_slow_is_refused(
        gate: harness.Gate, schema: Any, where: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        await declare(gate, payload_schema=schema)

    assert where in str(refused.value)


@pytest.mark.one_store
@pytest.mark.parametrize(("schema", "why"), [
    ({"$ref": "#"}, "payload_schema refers to itself for the same value"),
    ({"anyOf": [{"not": {"$ref": "#"}}]}, "refers to itself for the same value"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"if": {"$ref": "#/$defs/a"}}}}, "refers to itself"),
    ({"own": {"a/b": [{"$ref": "#/own/a~1b/0"}]}, "$ref": "#/own/a~1b/0"}, "payload_schema.$ref refers to itself"),
    ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "payload_schema.properties.a.$ref leads to no schema"),
    ({"$ref": "#/enum/0", "enum": ["x"]}, "leads to no schema"), ({"items": {"$ref": "#a"}}, "leads to no schema"),
    ({"$ref": "#/own", "own": {"pattern": "(?=b)"}}, "payload_schema.$ref.pattern")])
async def test_a_reference_that_no_check_could_follow_is_refused(gate: harness.Gate, schema: Any, why: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        await declare(gate, payload_schema=schema)

    assert why in str(refused.value)


@pytest.mark.one_store
@pytest.mark.parametrize("schema", [
    {"properties": {"next": {"$ref": "#"}}}, {"prefixItems": [{"$ref": "#"}]}, {"additionalProperties": {"$ref": "#"}},
    {"$defs": {"a%b": {"type": ["object", "integer"], "properties": {"next": {"anyOf": [{"$ref": "#/$defs/a%25b"}]}}}},
     "$ref": "#/$defs/a%25b"}, {"$ref": "#/$defs/a0", "$defs": {**{
         f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(40)}, "a40": {"type": ["object", "integer"]}}}])
async def test_a_schema_may_refer_to_itself_for_a_part_of_the_value(gate: harness.Gate, schema: Any) -> None:
    payloads: list[Any] = [1, {"next": {"next": {}}}]
    await declare(gate, payload_schema=schema)

    for payload in payloads:
        assert (await gate.as_agent().create_task(type="ocr", payload=payload)).status == "queued"


@pytest.mark.one_store
async def test_a_check_that_would_take_too_long_refuses_the_value(gate: harness.Gate) -> None:
    await declare(gate, payload_schema={"$ref": "#/$defs/a0", "$defs": {
        **{f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(40)}, "a40": {}}})

    for payload in (1, "x" * SMALL_BYTES):
        with pytest.raises(errors.PayloadInvalid):
            await gate.as_agent().create_task(type="ocr", payload=payload)


async def test_what_a_tenant_declares_is_bounded(gate: harness.Gate) -> None:
    schema = {"description": "x" * 60_000}
    for number in range(17):
        await declare(gate, type=f"t{number}", payload_schema=schema, result_schema={})

    with pytest.raises(errors.QuotaExceeded):
        await declare(gate, type="t17", payload_schema=schema, result_schema={})
