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
SAME_TABLES: dict[str, str] = {}


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
