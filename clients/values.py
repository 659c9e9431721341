"""Which Python values JSON can express, and how a JSON value becomes one; models of pydantic too.

Pydantic is never imported here: a program that has a model has imported it.
"""

from __future__ import annotations

import collections.abc
import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec
from msgspec import inspect as shapes

MOST_FLAWS = 10     # of a payload, that an error names
WRITABLE = "plain JSON values, a dataclass, a msgspec.Struct or a pydantic model"


def dump_model(value: Any) -> Any:
    """Return a pydantic model as JSON values, under its aliases; raises TypeError for what JSON cannot express."""
    if not is_model(type(value)):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON; give {WRITABLE}")
    return find_adapter(type(value)).dump_python(value, mode="json", by_alias=True)


def make_reader(type: Any) -> Callable[[Any], Any]:
    """Return what converts JSON values into a type and raises ValueError if they do not fit; TypeError if none can."""
    if type in (Any, object):
        return lambda value: value
    if mentions_model(type):
        return make_model_reader(type)
    msgspec.json.Decoder(type, dec_hook=read_model)     # raises TypeError, where `convert` would only at the first task
    if opaque := find_opaque(type):
        raise TypeError(f"JSON has no {opaque.__name__}; declare {WRITABLE}")
    return lambda value: msgspec.convert(value, type, str_keys=True, dec_hook=read_model)


def check_result(type: Any) -> None:
    """Raise TypeError if the declared type of a result is a class that JSON cannot express."""
    if get_origin(type) in (collections.abc.Awaitable, collections.abc.Coroutine):
        type = get_args(type)[-1]
    if (opaque := find_opaque(type)) and not inspect.isabstract(opaque) and not getattr(opaque, "_is_protocol", False):
        raise TypeError(f"its result, {opaque.__name__}, cannot be written as JSON; return {WRITABLE}")


# Pydantic.


def is_model(type: Any) -> bool:
    """Whether a class is pydantic's: a model, or a type that pydantic reads and writes."""
    return inspect.isclass(type) and "pydantic" in sys.modules and (
        hasattr(type, "__pydantic_serializer__") or type.__module__.partition(".")[0].startswith("pydantic"))


def mentions_model(type: Any) -> bool:
    """Whether pydantic must read an annotation as a whole: with unions and constraints that only pydantic knows."""
    described = type.__class__.__module__.startswith("pydantic")       # such as Field() in Annotated
    return described or is_model(type) or any(mentions_model(inner) for inner in get_args(type))


def find_adapter(type: Any) -> Any:
    """Return pydantic's reader and writer of a type; raises TypeError."""
    pydantic = sys.modules["pydantic"]
    try:
        return pydantic.TypeAdapter(type)
    except AttributeError:
        raise TypeError("models need pydantic 2") from None
    except pydantic.errors.PydanticUserError as wrong:
        raise TypeError(str(wrong).partition("\n")[0]) from None


def make_model_reader(type: Any) -> Callable[[Any], Any]:
    """Return what lets pydantic validate JSON values; its errors name members, never what they hold."""
    adapter = find_adapter(type)

    def read(value: Any) -> Any:
        try:
            return adapter.validate_json(msgspec.json.encode(value))
        except sys.modules["pydantic"].ValidationError as wrong:
            flaws = wrong.errors(include_url=False, include_input=False, include_context=False)
            texts = [f"{flaw['msg']} - at `{'.'.join(map(str, ['$', *flaw['loc']]))}`" for flaw in flaws[:MOST_FLAWS]]
            raise ValueError("; ".join(texts)) from None
    return read


def read_model(type: Any, value: Any) -> Any:
    """Convert a value inside a msgspec type into a model."""
    return make_model_reader(type)(value) if mentions_model(type) else value


# Types.


def find_opaque(type: Any, seen: tuple[Any, ...] = ()) -> type[Any] | None:
    """Return a class that an annotation names and JSON has nothing for, or None."""
    if type in seen or type in (Any, object) or mentions_model(type):
        return None
    try:
        return find_custom(shapes.type_info(type), [])
    except TypeError:       # a union that msgspec cannot read, though it may write each of its members
        return next((opaque for inner in get_args(type) if (opaque := find_opaque(inner, (*seen, type)))), None)


def find_custom(shape: Any, seen: list[Any]) -> type[Any] | None:
    """Return the first class in a shape that neither msgspec nor pydantic knows."""
    if isinstance(shape, shapes.CustomType):
        return None if shape.cls is object or is_model(shape.cls) else shape.cls
    if any(shape is earlier for earlier in seen):
        return None
    seen.append(shape)
    inner = [getattr(shape, name, None) for name in ("item_type", "key_type", "value_type", "type")]
    inner += [*getattr(shape, "types", ()), *getattr(shape, "item_types", ()),
              *[field.type for field in getattr(shape, "fields", ())]]
    return next((custom for part in inner if isinstance(part, shapes.Type) and (custom := find_custom(part, seen))),
                None)
