"""What some databases can do besides what every one must: a backend that can has the methods, and callers ask by
`isinstance`.

Every database gives what `asyncgate.backends.Backend` names.  What a backend is follows from the rest: one that is not
a `LastingBackend` forgets everything with its process, one that is not a `SharedBackend` is for one process at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from asyncgate.parts.model.news import News


@runtime_checkable
class LastingBackend(Protocol):
    """What it stores outlives its process."""

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Take part under a name; raises StartupError when a living process has it.

        `hear` is told, on the event loop, what other processes have committed.  `close` leaves again.
        Returns the last sign of life of any process, None if one lives now or there never was one.  Who joins next
        waits until this process has given its first sign: leases may get time back before.
        """

    async def beat(self) -> None:
        """Give a sign of life; upkeep does so every `beat_seconds`."""


@runtime_checkable
class SharedBackend(LastingBackend, Protocol):
    """Several processes may use the database at once."""

    def is_alone(self) -> bool:
        """Whether no other process is known to use the database now."""

    def tell(self, news: News) -> None:
        """Let other processes know, soon and at most once; it may be lost."""

    async def lead(self, job: str) -> bool:
        """Whether this process is the one, of all that share the database, that does a job; it stays so while it lives.

        When that one dies, another one that asks becomes it.
        """


@runtime_checkable
class VersionedBackend(Protocol):
    """Its schema can change while a process has it open."""

    async def is_current(self) -> bool:
        """Whether the schema, asked for now, is one that this process knows how to use."""


@runtime_checkable
class MemberBackend(Protocol):
    """A process can lose its place among those that share the database, and get it back."""

    def is_joined(self) -> bool:
        """Whether this process has its place now."""

    async def last_served(self) -> float:
        """Return the last sign of life of any other process, 0 if there is none."""


@runtime_checkable
class FileBackend(Protocol):
    """The database is a file beside the gate, which looks after it."""

    def announce(self, url: str) -> None:
        """Write down where this process answers, for another one that wants the file."""

    async def check(self) -> list[str]:
        """Return what is wrong with the file itself; nothing when it is sound."""

    async def compact(self) -> None:
        """Give free space back to the system; writes wait meanwhile.  Raises DatabaseUnavailable if it has no room."""

    async def backup(self, target: str, told: Callable[[int, int], None] | None = None) -> None:
        """Copy everything, as of one moment, to a new file while the gate goes on; `told` learns how far it is.

        Raises OSError if the copy cannot be written, or is damaged.
        """

    async def count_rows(self, tables: Iterable[type[Struct]]) -> int:
        """Return how many rows tables have, of all tenants: what a walk through them has before it."""


@runtime_checkable
class ArchivingBackend(Protocol):
    """A receipt leaves the database only after a second role has confirmed that its segment is written."""

    async def register_segment(self, tenant_id: str, segment: str) -> None:
        """Confirm as that role that a segment of the archive is written; raises ArchiveUnavailable."""


@runtime_checkable
class HandoverBackend(Protocol):
    """Applications hand work over in SQL, in a transaction of their own: rows of stored_handover.Handover."""

    async def handover_tenants(self) -> list[str]:
        """Return the tenants that have such rows, waiting or refused."""


class Around:
    """Stands before a backend and answers as it does, but for what a subclass defines itself."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:         # so that `isinstance` asks what the backend can do
        return self.backend.__class__
