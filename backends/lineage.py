"""Which first migration a database began with.

Until the first release all migrations are one file, which may still change, so the number of a schema does not say
which tables there are.  Each database therefore keeps the digest of its first migration; a gate refuses any other.
"""

from __future__ import annotations

import hashlib
import re

from asyncgate.parts.model.errors import StartupError

FIRST = "first_migration"           # the name of the digest in the table `meta`


def digest(sql: str) -> str:
    """Return the digest of a migration's statements; comments and white space do not count."""
    return hashlib.sha256(" ".join(re.sub(r"--.*", "", sql).split()).encode()).hexdigest()


def require_lineage(kept: str | None, ours: str, number: int, last: int, again: str) -> None:
    """Refuse a database that began with another first migration; `last` is the schema that can be carried over."""
    if kept == ours:
        return
    if kept is None and number == last:
        raise StartupError(f"this database has schema {number} of the numbering before the first release: stop its "
                           f"gates, then {again}, which carries it over with all its rows")
    if kept is None and number < last:
        raise StartupError(f"this database has schema {number} of the numbering before the first release: bring it to "
                           f"schema {last} with the last version that numbered so, then {again} of this one")
    raise StartupError("this database was made by a version with another first migration, which was never released: go "
                       "on with that version, or move the receipts: `asyncgate receipts export` there, "
                       "`asyncgate rebuild --file` here, into an empty database")
