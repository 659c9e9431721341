"""Run a test for each of many values as one item: its fixtures are made once, and every failure still has its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., Any]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Return a decorator like `pytest.mark.parametrize` whose values share one item, and so its fixtures.

    `names` is one argument, or several, separated by commas, for which each value is a tuple.
    """
    arguments, values = [name.strip() for name in names.split(",")], list(values)

    def bind(value: Any) -> tuple[str, dict[str, Any]]:
        parts = [value] if len(arguments) == 1 else [*value]
        return ascii(parts)[1:-1], dict(zip(arguments, parts, strict=True))

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):
            async def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
                for value in values:
                    text, given = bind(value)
                    with subtests.test(text):
                        await test(**given, **fixtures)
        else:
            def run(subtests: pytest.Subtests, **fixtures: Any) -> None:  # type: ignore[misc]
                for value in values:
                    text, given = bind(value)
                    with subtests.test(text):
                        test(**given, **fixtures)

        wanted = inspect.signature(test).parameters
        fixtures = [wanted[name] for name in wanted if name not in arguments]
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        wrapped = functools.wraps(test)(run)
        wrapped.__signature__ = inspect.Signature([*fixtures, subtests])  # type: ignore[attr-defined]
        return wrapped

    return decorate
