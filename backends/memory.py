"""Memory: SQLite's tables in this process alone, forgotten with it.

For demonstrations and tests: a batch is a function call without a thread, so nothing else runs meanwhile.
"""

from __future__ import annotations

import atexit
import sqlite3
import weakref
from collections.abc import Callable
from functools import cache

from asyncgate import Needs, Work
from asyncgate.backends import Backend
from asyncgate.backends.sqlite import FILE_PAGE, migrate_file
from asyncgate.backends.sqlite_tables import REFUSALS, SqliteTables
from asyncgate.parts.model import errors
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.settings import DatabaseSettings


class Memory(SqliteTables):
    """An empty database, until it is closed."""

    parallel = parallel_per_tenant = 1

    def __init__(self) -> None:
        super().__init__()
        self.db = make_empty()
        weakref.finalize(self, self.db.close)
        make_template().backup(self.db)
        migrate_file(self.db)       # gives this copy its own name and its own key for cursors
        self.db.execute("PRAGMA recursive_triggers = ON")
        self._load_caches()
        self.clock = SteadyClock()

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch."""
        self._begin()
        try:
            work = self._decide(tenant_id, needs, decide)
            self._end()
        except BaseException as error:
            self._roll_back()
            if isinstance(error, REFUSALS):
                raise errors.Refused(str(error)) from error
            raise
        self.known.add(work.tenant_id)
        for lane, kind in work.lanes.items():
            self.lanes[work.tenant_id].learn(lane, *kind)

    async def alive(self) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Forget everything."""
        self.db.close()


def make_empty() -> sqlite3.Connection:
    """Open a new database in memory, with explicit transactions."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=512)


@cache
def make_template() -> sqlite3.Connection:
    """Return a migrated database to copy: that takes a twentieth of the time of migrating one."""
    template = make_empty()
    atexit.register(template.close)
    template.execute(f"PRAGMA page_size = {FILE_PAGE}")
    migrate_file(template)
    template.execute("DELETE FROM meta WHERE name IN ('cursor_key', 'instance_id')")
    return template


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Memory:
    """Open a new, empty memory."""
    return Memory()


BACKEND: type[Backend] = Memory
