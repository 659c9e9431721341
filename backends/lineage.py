"""The check that a database began with this version's first migration.

Until the first release all migrations are one file, which may still change, so a schema's number does not identify its
tables.  Each database therefore stores the digest of its first migration, and a gate refuses any other digest.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache

from asyncgate.parts.model import errors

FIRST = "first_migration"           # the name of the digest in the table `meta`
ANOTHER = "this database was made by an unreleased version with another first migration"
HOW_TO_MOVE = ("go on with that version, or move the receipts: run `asyncgate receipts export` with that version, and "
               "`asyncgate rebuild --file` with this one, into an empty database")

# First migrations of the past, and the one of today that makes the same tables from another text.
SAME_TABLES = {
    "2e0eb1e86d599fafa8c55f4313fbcdd6544a5d5658e16c166b34ed560e782b3b":
        "d3c47353de0b93432c1462593530a4f8f5f27c91b20cd5024ce9ca2aa1ad520a",     # SQLite, each wall written out
    "6f135cd629914a7cca30c9ee526e5fa6a088dee4d584acaa91f348f08106a9f0":
        "d3c47353de0b93432c1462593530a4f8f5f27c91b20cd5024ce9ca2aa1ad520a",     # SQLite, each table written out
    "b288ba25636b504c0c01058485be8deeee3d9c253a3eb931a55bca1d8ad614ce":
        "65c741198633e88dac375f30534ebf45ff5dc85e4abb15dc82d76160af73be76",     # Postgres, the same
}


@cache      # it takes half of the time that an empty database needs to open
def digest(sql: str) -> str:
    """Return the digest of a migration's statements, ignoring comments and white space."""
    return hashlib.sha256(" ".join(re.sub(r"--.*", "", sql).split()).encode()).hexdigest()


def is_same(kept: str | None, ours: str) -> bool:
    """Whether a database that began with a first migration has the tables of ours."""
    return SAME_TABLES.get(kept or "", kept) == ours


def require_lineage(kept: str | None, ours: str) -> None:
    """Refuse a database that began with another first migration, or before they were told apart."""
    if not is_same(kept, ours):
        raise errors.StartupError(f"{ANOTHER}: {HOW_TO_MOVE}")
