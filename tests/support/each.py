"""Run a test for each of many values as one item: its fixtures are made once, and every failure still has its name.

`TESTS_EACH=text pytest -k for_each` runs such tests alone, for the values that have the text.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., Any]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Return a decorator like `pytest.mark.parametrize` whose values share one item, and so its fixtures.

    `names` is one argument, or several, separated by commas, for which each value is a tuple.
    """
    arguments, wanted_text = [name.strip() for name in names.split(",")], os.environ.get("TESTS_EACH", "")
    values = [value for value in values if wanted_text in str(value)]

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
        wrapped.for_each = True     # type: ignore[attr-defined]  # a word for -k
        wrapped.__signature__ = inspect.Signature([*fixtures, subtests])  # type: ignore[attr-defined]
        return wrapped

    return decorate
