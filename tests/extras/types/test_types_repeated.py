"""What a call says of a type that only warns, when it is repeated or tried again."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under
from asyncgate.parts.model import errors

pytestmark = pytest.mark.anyio
WARNING = ["result is not of type string, as is declared of the type ocr"]
WHERE: dict[str, Any] = {"artifacts": ["file:///out"]}


async def leased(gate: Gate, on_mismatch: str = "warn") -> Any:
    await gate.as_worker().declare_type(type="ocr", result_schema={"type": "string"})
    await gate.as_admin().set_type_policy(on_mismatch=on_mismatch)
    return await gate.leased(type="ocr")


async def test_a_repeated_completion_is_warned_as_the_first_one_was_also_by_another_process(gate: Gate) -> None:
    offer, there = await leased(gate), gate.beside()
    await there.as_agent().list_types()     # so it knows them
    ask = under(offer, result=5, **WHERE)

    first = await gate.as_worker().complete(**ask)
    again = [await each.as_worker().complete(**ask) for each in (gate, there)]
    listed = await gate.as_worker().complete_tasks(tasks=[ask])

    assert (first.warnings, again, listed.warnings) == (WARNING, [first, first], WARNING)


async def test_a_repetition_that_tells_no_result_is_not_warned(gate: Gate) -> None:
    offer = await leased(gate)
    await gate.as_worker().complete(**under(offer, result="text"))

    located = await gate.as_worker().complete(**under(offer, **WHERE))
    bare = await gate.as_worker().complete(**under(offer))

    assert not located.warnings
    assert not bare.warnings


async def test_a_completion_that_was_taken_is_not_refused_when_it_is_repeated(gate: Gate) -> None:
    offer = await leased(gate)
    ask = under(offer, result=5, **WHERE)
    await gate.as_worker().complete(**ask)
    await gate.as_admin().set_type_policy(on_mismatch="refuse")

    assert (await gate.as_worker().complete(**ask)).ok


async def test_a_result_that_fits_is_not_warned_of_one_that_was_refused_before(gate: Gate) -> None:
    strict = gate.beside(locatability="strict")
    offer = await leased(strict)
    with pytest.raises(errors.NotLocatable):
        await strict.as_worker().complete(**under(offer, result=5))

    assert not (await strict.as_worker().complete(**under(offer, result="text", **WHERE))).warnings
