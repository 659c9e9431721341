"""The redo log of a SQLite file: one short append makes a small batch durable, before SQLite writes its pages.

A commit of SQLite writes each page that a batch touches, twice, and a small batch touches a dozen.  So the writer keeps
its transaction open for a moment, a generation, and appends what each batch changes to `FILE-redo`.  At the end of a
generation SQLite commits all of it, and the next generation overwrites the log from its beginning.  After a crash the
changes of the unfinished generation are made again.

    record      length (4 bytes), digest (16), generation (8), number (4), then in MessagePack: the newest receipt
                before the generation, and the changes

The digest is keyed with a random key that this file has since its last opening.  So no torn record counts, none of an
earlier generation, and none of another file.  The key and the last committed generation are the row `redo` of `meta`:
the transaction of a generation writes them too, so SQLite decides whether a generation is committed.  If the file has
a newer receipt than before the generation, a program that knows no redo log, such as an older release, has gone on with
it after a kill, and the log does not fit any more.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.process.folders import fsync_folder

Change = tuple[str, list[tuple[Any, ...]]]          # a statement, and the rows to run it with

SIZE = 2 << 20              # bytes of the file, so of all records of a generation
LARGEST = 256 << 10         # bytes of a record; a larger batch is cheaper to commit at once
MOST_ROWS = 2000            # of a record
BLOCK = 4096                # bytes
RECORD_HEAD = struct.Struct("<I16sQI")
STORE_MARK = "INSERT OR REPLACE INTO meta (name, value) VALUES ('redo', ?)"
FIND_NEWEST = "SELECT coalesce(max(rowid), 0) FROM receipts"
READ_MARK = "SELECT value FROM meta WHERE name = 'redo'"
sync = getattr(os, "fdatasync", os.fsync)       # not every system has fdatasync

encode_changes = msgspec.msgpack.Encoder().encode
decode_changes = msgspec.msgpack.Decoder(tuple[int, list[tuple[int | str, list[tuple[Any, ...]]]]]).decode


def log_of(path: str) -> str:
    """Return the path of the redo log of a database file."""
    return f"{path}-redo"


def is_replicated(path: str) -> bool:
    """Whether Litestream follows a database file: it then has a folder of its own beside it.

    It sends what SQLite has committed.  With a redo log the replica would lack what was acknowledged last when the gate
    dies, so such a file has none.
    """
    folder, name = os.path.split(path)
    return os.path.isdir(os.path.join(folder, f".{name}-litestream"))


class RedoLog:
    """The changes of the running generation, on the disk and in memory."""

    def __init__(self, path: str) -> None:
        self.path, self.key, self.generation = log_of(path), secrets.token_bytes(16), -1
        self.newest = 0         # the row of the newest receipt when the generation began
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.clear()
        fsync_folder(os.path.dirname(self.path))
        self.start_next()       # generation 0 has no changes: its mark stores the key

    @property
    def mark(self) -> str:
        """The row `redo` of `meta` once the running generation is committed."""
        return f"{self.key.hex()}:{self.generation}"

    def start_next(self) -> None:
        """Begin the next generation; the changes of this one are committed."""
        self.generation += 1
        self.position, self.number = 0, 0
        self.uncertain = False      # whether a record may be on the disk that is not pending
        self.pending: list[Change] = []
        self.statements: dict[str, int] = {}        # their text is written once in a generation

    def append(self, changes: list[Change]) -> bool:
        """Append the changes of a batch and wait for the disk; return False if there is no room; raises OSError."""
        if sum([len(rows) for _, rows in changes]) > MOST_ROWS:
            return False
        body = encode_changes((self.newest, [(self.statements.get(sql, sql), rows) for sql, rows in changes]))
        if len(body) > LARGEST or self.position + RECORD_HEAD.size + len(body) > SIZE:
            return False
        digest = digest_of(self.key, self.generation, self.number, body)
        record = RECORD_HEAD.pack(len(body), digest, self.generation, self.number) + body
        try:
            self._write(record)
        except OSError:
            self._take_back()
            raise
        for sql, _ in changes:
            self.statements.setdefault(sql, len(self.statements))
        self.pending += changes
        self.position, self.number = self.position + len(record), self.number + 1
        return True

    def _take_back(self) -> None:
        """Make sure that a record which could not be synced is not read back: its batch is committed or has failed."""
        try:
            self._write(bytes(RECORD_HEAD.size))
        except OSError:
            self.uncertain = True       # the next append overwrites it, or the next generation forgets it

    def _write(self, data: bytes) -> None:
        """Write where the next record begins, and wait for the disk; raises OSError."""
        if os.pwrite(self.file, data, self.position) < len(data):   # a full disk may take a part without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(self.file)

    def has_records(self) -> bool:
        """Whether the log may have records of the running generation."""
        return bool(self.pending) or self.uncertain

    def clear(self) -> None:
        """Overwrite the whole file with zeros.

        It keeps its size from then on: an append into blocks that are there needs no journal of the file system.
        Written by blocks, because the kernel caches what is written at once as one piece, and writes all of it back
        after each append.
        """
        os.lseek(self.file, 0, os.SEEK_SET)
        for _ in range(SIZE // BLOCK):
            os.write(self.file, bytes(BLOCK))
        os.fsync(self.file)

    def close(self) -> None:
        """Close the file; remove it if everything in it is committed."""
        os.close(self.file)
        if not self.pending:
            Path(self.path).unlink(missing_ok=True)


def replay(db: sqlite3.Connection, path: str, newest: int, changes: list[Change]) -> None:
    """Make the changes of a generation again in the running transaction.

    Raises StartupError if the file has a newer receipt than before the generation began: then they do not fit it.
    """
    if db.execute(FIND_NEWEST).fetchone()[0] != newest:
        raise StartupError(f"another program has changed {path} while the last changes of its gate were only in the "
                           f"redo log, so {log_of(path)} does not fit it any more: restore the file from before, or "
                           "move the log away and lose these changes")
    for sql, rows in changes:
        db.executemany(sql, rows)


def digest_of(key: bytes, generation: int, number: int, body: bytes) -> bytes:
    """Return the digest of a record."""
    place = struct.pack("<QI", generation, number)
    return hashlib.blake2b(body, digest_size=16, key=key, salt=place).digest()


def read_back(path: str, mark: str) -> tuple[int, list[Change]]:
    """Return what follows the mark of a database in its log: the newest receipt before, and all changes."""
    key, _, committed = mark.partition(":")
    with open(log_of(path), "rb") as file:
        log = file.read()
    newest, changes = 0, list[Change]()
    statements: list[str] = []
    for body in list_records(log, bytes.fromhex(key), int(committed) + 1):
        newest, logged = decode_changes(body)
        found = [(statements[sql] if isinstance(sql, int) else sql, rows) for sql, rows in logged]
        statements += dict.fromkeys(sql for sql, _ in found if sql not in statements)
        changes += found
    return newest, changes


def list_records(log: bytes, key: bytes, generation: int) -> Iterator[bytes]:
    """Yield the bodies of the records of a generation, up to the first that is not whole."""
    position, number = 0, 0
    while position + RECORD_HEAD.size <= len(log):
        length, digest, of, at = RECORD_HEAD.unpack_from(log, position)
        body = log[position + RECORD_HEAD.size:position + RECORD_HEAD.size + length]
        if (len(body), of, at) != (length, generation, number) or digest != digest_of(key, generation, number, body):
            return
        yield body
        position, number = position + RECORD_HEAD.size + length, number + 1


def recover(db: sqlite3.Connection, path: str) -> int:
    """Make the changes again that a killed process had in its redo log; return how many statements that were.

    It comes before migrations: the log has the statements of the release that wrote it.
    """
    if not os.path.exists(log_of(path)) or not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return 0
    mark = db.execute(READ_MARK).fetchone()
    newest, changes = read_back(path, mark[0]) if mark else (0, [])
    if changes:
        make_again(db, path, mark[0], newest, changes)
    os.unlink(log_of(path))     # after the commit: until then it is the only copy
    return len(changes)


def make_again(db: sqlite3.Connection, path: str, mark: str, newest: int, changes: list[Change]) -> None:
    """Make the changes of the generation that follows the mark, and commit them with the next mark."""
    key, _, committed = mark.partition(":")
    db.execute("BEGIN IMMEDIATE")
    try:
        replay(db, path, newest, changes)
        db.execute(STORE_MARK, (f"{key}:{int(committed) + 1}",))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
