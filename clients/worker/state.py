"""What a worker keeps on disk: its instance id, and the results that it could not deliver yet.

Both outlive the process.  To the gate a restarted worker is the same instance: it first delivers the kept results, and
then resumes the leases that it still holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from asyncgate.parts.process.folders import fsync_folder
from asyncgate.parts.process.forks import close_in_children, keep_in_children

LETTERS = ".letters"
LONGEST_FILE_NAME = 150      # without the file's suffixes
INSTANCE_ID = re.compile("[0-9a-f]{32}")

log = logging.getLogger("asyncgate.worker")


class StateError(OSError):
    """The worker's state folder cannot be used; the text says why, and what to do."""


class Letter(msgspec.Struct, frozen=True):
    """An undelivered result: the operation, its request, and why it could not be delivered."""

    operation: str
    fields: dict[str, Any]
    why: str = "the worker was stopped"


def default_folder(url: str) -> Path:
    """Return the state folder for one gate's workers; each gate has its own, because letters are for one gate."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise StateError(f"there is no home directory for a worker's state; {ELSE}") from None
    return Path(state) / "asyncgate" / make_file_name(url)


ELSE = "name a folder for it (state=, --state), or keep nothing (state=None, --forget)"


def make_file_name(text: str) -> str:
    """Turn any text into a file name; different texts get different names."""
    name = quote(text, safe="")
    return name if len(name) <= LONGEST_FILE_NAME else name[:60] + "-" + hashlib.sha256(text.encode()).hexdigest()[:32]


class Place:
    """The state of one worker process: an instance id, and the file of its undelivered results (letters).

    Several processes may share a worker id.  Each takes the first free place and holds it by a file lock; the system
    releases the lock when the process ends, however it ends.
    """

    def __init__(self, path: Path | None = None, lock: int = -1) -> None:
        self.path, self.lock = path, lock
        self.file = None if path is None else path.with_name(path.name + LETTERS)
        self.unwritten: list[Letter] = []       # letters that are only in memory: no folder, or a full disk
        self.instance_id = uuid.uuid4().hex if path is None else read_instance_id(lock, path)

    def abandoned(self) -> Iterator[Place]:
        """Yield the other places of this worker that hold letters and no process; each is locked meanwhile."""
        folder, name = (self.path.parent, self.path.stem) if self.path else (Path(), "")
        for letters in sorted(folder.glob(f"{glob.escape(name)}.*{LETTERS}")) if name else ():
            path = letters.with_name(letters.name.removesuffix(LETTERS))
            if path != self.path and path.stem == name and (lock := lock_file(path)) is not None:
                place = Place(path, lock)
                try:
                    yield place
                finally:
                    place.close()

    def close(self) -> None:
        """Release the place for the next process."""
        for letter in self.unwritten:
            log.error("task %s: its result is lost: %s", letter.fields.get("task_id"), letter.why)
        if self.lock >= 0:
            keep_in_children(self.lock)
            os.close(self.lock)
            self.lock = -1

    def keep(self, letter: Letter) -> str:
        """Keep a letter on disk, synced, so that it survives a power cut, or in memory; return where."""
        flaw = ""
        if self.file is not None:
            try:
                rewrite_lines(self.file, [*(line for line, _ in self._lines()), msgspec.json.encode(letter)])
                return str(self.file)
            except OSError as error:    # a full disk, say
                flaw = f" ({error})"
        self.unwritten.append(letter)
        return f"memory only{flaw}"

    def letters(self) -> list[Letter]:
        """Return the letters, oldest first."""
        return [*(letter for _, letter in self._lines()), *self.unwritten]

    def _lines(self) -> Iterator[tuple[bytes, Letter]]:
        with contextlib.suppress(FileNotFoundError):
            for line in (self.file.read_bytes() if self.file else b"").splitlines():
                try:
                    yield line, msgspec.json.decode(line, type=Letter)
                except (msgspec.DecodeError, UnicodeDecodeError):   # a crash while the line was written
                    log.error("%s has an invalid line; it is ignored", self.file)

    def forget(self, delivered: Letter) -> bool:
        """Remove a letter, and with the last letter its file; return whether it is removed."""
        if delivered in self.unwritten:
            self.unwritten.remove(delivered)
        elif self.file is not None:
            try:
                rewrite_lines(self.file, [line for line, letter in self._lines() if letter != delivered])
            except OSError as error:
                log.error("%s: a delivered result cannot be removed: %s", self.file, error)
                return False
        return True


def take_place(folder: Path | None, worker_id: str) -> Place:
    """Take a worker's first free place in a folder; without a folder, nothing outlives the process."""
    if folder is None:
        return Place()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = (folder / f"{make_file_name(worker_id)}.{number}" for number in count(1))
        return next(Place(path, lock) for path in paths if (lock := lock_file(path)) is not None)
    except OSError as error:
        raise StateError(f"a worker's state cannot be kept in {folder}: {error.strerror or error}; {ELSE}") from None


def lock_file(path: Path) -> int | None:
    """Open a file and lock it; return None if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    close_in_children(lock)     # a child that outlives a killed worker would keep its place
    return lock


def read_instance_id(lock: int, path: Path) -> str:
    """Return the instance id in a file; write a new one into an empty or damaged file."""
    known = os.read(lock, 100).decode("ascii", "replace").strip()
    if INSTANCE_ID.fullmatch(known):
        return known
    if known:
        log.warning("%s holds no instance id; this worker begins as a new instance", path)
    fresh = uuid.uuid4().hex
    os.ftruncate(lock, 0)
    os.pwrite(lock, fresh.encode(), 0)
    os.fsync(lock)
    return fresh


def rewrite_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Replace the lines of a file atomically."""
    if lines:
        beside = path.with_name(path.name + ".new")
        write_file(beside, b"".join(line + b"\n" for line in lines))
        beside.replace(path)
    else:
        path.unlink(missing_ok=True)
    fsync_folder(str(path.parent))


def write_file(path: Path, text: bytes) -> None:
    """Write a file that only its owner may read, and sync it to disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(text)
        os.fsync(file)
    finally:
        os.close(file)
