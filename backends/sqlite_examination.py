"""What a SQLite file tells an examination, which only reads it: whether it is ours, its schema, who serves it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asyncgate.backends import judged, sqlite
from asyncgate.backends.lineage import ANOTHER, HOW_TO_MOVE, is_same
from asyncgate.backends.sqlite_tables import LAST_SIGN
from asyncgate.parts.model import errors, findings
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.words import say_length

LARGE_WAL_BYTES = 64 * 2**20        # four times the size at which it is written back
AHEAD_SECONDS = 5.0                 # by which the file may be ahead of the clock
OLDEST_LEASE = """
    SELECT min(expires_at) FROM tenants CROSS JOIN leases USING (tenant_id) WHERE ending = 'live' AND expires_at <= ?"""
OUTBOX = """
    SELECT count(*) FILTER (WHERE state = 'waiting'), count(*) FILTER (WHERE state = 'parked'),
           min(posted_at) FILTER (WHERE state = 'waiting') FROM outbox"""


class Holder(NamedTuple):
    """The process that serves a file, by what it wrote into the lock."""

    pid: int
    url: str
    lives: bool


def read_holder(path: str) -> Holder | None:
    """Return who serves a file; the lock itself is not touched, or a gate that starts now would be refused."""
    try:
        content = Path(f"{path}.lock").read_text()
    except (OSError, ValueError):
        return None
    match = re.match(r"(\d{1,10}) ?(https?://[\w.:\[\]-]*)?", content)
    return Holder(int(match[1]), match[2] or "", is_alive(int(match[1]))) if match else None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:         # it is somebody else's
        return True
    return True


def open_to_read(path: str) -> sqlite3.Connection:
    """Open a file so that nothing is changed: beside its log if it has one, else as a file that nobody writes."""
    logged = all(os.path.exists(path + ending) for ending in ("-wal", "-shm"))
    how = "mode=ro" if logged else "immutable=1"
    return sqlite3.connect(f"{Path(path).absolute().as_uri()}?{how}", uri=True, timeout=5)


def examine_file(path: str, settings: Settings, now: float) -> Iterator[findings.Finding]:
    """Yield what is wrong with a file."""
    if path == ":memory:":
        yield findings.note("the database is in memory: a restart forgets everything", "set database.url to a file")
        return
    if not os.path.exists(path):
        yield findings.warn(f"there is no database at {os.path.abspath(path)} yet",
                            "name the gate's own with --database or "
                            "ASYNCGATE_DATABASE_URL; where it is a new one, `asyncgate serve` makes it")
        return
    holder = read_holder(path)
    yield from judge_holder(path, holder)
    yield from judge_log(path)
    try:
        sqlite.refuse_left_log(path)
    except errors.StartupError as left:
        yield findings.alarm(str(left), "docs/operating.md says more under Upgrade")
    try:
        with contextlib.closing(open_to_read(path)) as db:
            sqlite.require_ours(db, path)
            yield from judge_schema(db, path)
            yield from judge_rows(db, settings, now, holder)
    except errors.StartupError as wrong:
        yield findings.alarm(str(wrong), "set database.url to the file of the gate")
    except sqlite3.Error as error:
        yield findings.alarm(f"{path} cannot be read as a database: {error}",
                             "asyncgate verify says how much of it is whole; docs/recovery.md how to restore it")


def judge_holder(path: str, holder: Holder | None) -> Iterator[findings.Finding]:
    """Yield who serves the file."""
    if holder is None:
        yield findings.all_well(f"no gate serves {path} now")
    elif holder.lives:
        yield findings.all_well(f"process {holder.pid} serves {path}" + (f" at {holder.url}" if holder.url else ""))
    else:
        yield findings.note(
            f"process {holder.pid} served {path} and ended without closing it; nothing is lost by that: the "
            f"next start reads {path}-wal, too", "start the gate again: `asyncgate serve`")


def judge_log(path: str) -> Iterator[findings.Finding]:
    """Yield what the size of the write-ahead log means."""
    size = os.path.getsize(f"{path}-wal") if os.path.exists(f"{path}-wal") else 0
    if size > LARGE_WAL_BYTES:
        yield findings.warn(
            f"the write-ahead log of {path} has {size // 2**20:,} MiB, because something reads for long, or "
            "because a gate was killed",
            "end what reads the file (a backup, a sqlite3 shell), then restart the "
            "gate: it writes the log back")


def judge_schema(db: sqlite3.Connection, path: str) -> Iterator[findings.Finding]:
    """Yield what the schema of a file means for this release."""
    number, kept = sqlite.beginning(db)
    files = sqlite.migrations()
    if number == 0:
        yield findings.alarm(f"{path} has no schema of the gate", sqlite.HOW_TO_MIGRATE)
        return
    if not is_same(kept, sqlite.first_digest()):
        yield findings.alarm(ANOTHER, HOW_TO_MOVE)
    elif number > len(files):
        yield findings.alarm(f"{path} has schema {number}, and this release knows {len(files)}",
                             "run the newer release")
    elif number < len(files):
        yield findings.warn(f"{path} has schema {number}, and this release has {len(files)}",
                            f"make a backup, then {sqlite.HOW_TO_MIGRATE}; `asyncgate serve` does it too")
    else:
        yield findings.all_well(f"{path} has schema {number}, as this release")


def judge_rows(db: sqlite3.Connection, settings: Settings, now: float,
               holder: Holder | None) -> Iterator[findings.Finding]:
    """Yield what the rows say of clock, upkeep, outbox and keys."""
    if (last := db.execute(LAST_SIGN).fetchone()[0]) is not None and last > now + AHEAD_SECONDS:
        yield findings.alarm(
            f"the file was written {say_length(last - now)} in the future: the clock was set back, and a "
            "gate goes on from there", "set the clock, and keep it right: `timedatectl set-ntp true`")
    (oldest,) = db.execute(OLDEST_LEASE, (now,)).fetchone()
    serving = f"process {holder.pid}" if holder and holder.lives else ""
    yield from judged.judge_overdue(None if oldest is None else now - oldest, "a lease", serving, settings)
    waiting, parked, since = db.execute(OUTBOX).fetchone()
    yield from judged.judge_outbox(waiting, parked, 0.0 if since is None else now - since, settings)
    yield from judged.judge_sharing(db.execute("SELECT count(*) FROM tenants").fetchone()[0], settings)
    if not serving and judged.needs_issued_key(settings) and not db.execute("SELECT 1 FROM api_keys LIMIT 1").fetchone(
        ):
        yield judged.NO_WAY_IN
