"""What a caller knows of a type of tasks: what its payload and its result are in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asyncgate.clients.values import make_reader

if TYPE_CHECKING:
    from asyncgate.clients.client import AsyncGate, Handle

P = TypeVar("P")
R = TypeVar("R")


class TaskType(Generic[P, R]):
    """A type of tasks with the types of its payload and its result, for a type checker and for the reader.

    The gate checks payloads against what the type's workers declare; this class only says it in Python, too.
    """

    def __init__(self, name: str, *, payload: type[P] | Any = Any, result: type[R] | Any = Any) -> None:
        self.name, self.payload, self.result_type = name, payload, result
        make_reader(result)     # raises TypeError now, not at the first result

    def __repr__(self) -> str:
        return f"<task type {self.name}>"

    async def submit(self, gate: AsyncGate, payload: P, **terms: Any) -> Handle:
        """Create a task of this type; the other arguments are those of `AsyncGate.submit`."""
        return await gate.submit(self.name, payload, **terms)

    async def result(self, handle: Handle, timeout: float | None = None) -> R:  # noqa: ASYNC109  # as Handle.result
        """Wait until a task has ended, and return its result."""
        result: R = await handle.result(timeout, type=self.result_type)
        return result

    async def run(self, gate: AsyncGate, payload: P, **terms: Any) -> R:
        """Create a task of this type, and return its result."""
        return await self.result(await self.submit(gate, payload, **terms))
