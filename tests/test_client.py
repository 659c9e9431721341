"""The Python client: its methods are the table's, and what it was asked for comes, whatever happens on the way."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import msgspec
import pytest

from asyncgate import OPERATIONS
from asyncgate.clients import operations as made
from asyncgate.clients.declare import FILE, holds_json, source
from asyncgate.clients.operations import AsyncOperations, SyncOperations
from asyncgate.parts.openapi import EXAMPLES

both = pytest.mark.parametrize("kind", [AsyncOperations, SyncOperations])
every = pytest.mark.parametrize("name", sorted(OPERATIONS))


# The methods.


def test_the_methods_are_those_of_the_table() -> None:
    assert FILE.read_text() == source(), "run: python -m asyncgate.clients.declare"


@every
@both
def test_a_method_takes_the_fields_of_its_request_and_gives_its_reply(kind: type[Any], name: str) -> None:
    method, op = getattr(kind, name), OPERATIONS[name]

    assert inspect.signature(method).parameters.keys() - {"self"} == {*op.takes.__struct_fields__}
    assert get_type_hints(method)["return"].__name__ == op.gives.__name__


@every
def test_a_reply_says_what_the_gate_says(name: str) -> None:
    op = OPERATIONS[name]
    shown = getattr(made, op.gives.__name__)

    assert (shown is op.gives) != holds_json(op.gives)
    reply, again = EXAMPLES[name][1], msgspec.to_builtins(msgspec.convert(EXAMPLES[name][1], shown, strict=False))
    assert {field: again[field] for field in reply}.keys() == reply.keys()
