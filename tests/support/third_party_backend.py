"""A backend in somebody else's package: the gate in memory, and every receipt in a file that others can follow.

Its pyproject.toml says:    [project.entry-points."asyncgate.backends"]
                            third = "third_party_backend"
and so `third:///var/log/receipts.jsonl` is a database URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncgate import DatabaseSettings, Needs, Work
from asyncgate.backends.memory import Memory


class Followed(Memory):
    """Memory that writes down what each batch has proved, before the batch is acknowledged."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch and append its receipts."""
        def remember(work: Work) -> None:
            decide(work)
            self.batch = work
        await super().transact(tenant_id, needs, remember)
        with self.path.open("ab") as file:
            file.writelines(msgspec.json.encode(receipt) + b"\n" for receipt in self.batch.written.values())


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Followed:
    """Open the file that the URL names."""
    return Followed(Path(url.removeprefix("third://")))


BACKEND = Followed      # which, like Memory, is not a LastingBackend: the suite kills no process
