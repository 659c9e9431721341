"""What an engine calls of its extensions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

T = TypeVar("T")
A = TypeVarTuple("A")


class Hooks:
    """The hooks that the extensions of an engine have: by each name of Extension, those that some class defines."""

    substitutes: dict[str, Callable[..., Awaitable[Any]]]       # by operation

    def __init__(self, base: type, extensions: Iterable[Any]) -> None:
        for name, default in vars(base).items():
            if not name.startswith("_"):
                setattr(self, name, tuple(getattr(extension, name) for extension in extensions
                                          if getattr(type(extension), name) is not default))
        self.substitutes = {name: other for hook in vars(self)["substitutes"] for name, other in hook().items()}

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            """Tell a type checker of the names that the loop sets."""

    def wrap_all(self, transact: T) -> T:
        """Return what carries out a batch; what was added last is outermost."""
        for wrap_transact in vars(self)["wrap_transact"]:
            transact = wrap_transact(transact)
        return transact


def first_answer(hooks: Iterable[Callable[[*A], str | None]], *asked: *A) -> str | None:
    """Return the first answer that is not None."""
    for hook in hooks:
        if (answer := hook(*asked)) is not None:
            return answer
    return None
