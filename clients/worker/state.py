"""What a worker keeps on disk: which instance it is, and the endings of tasks that no gate has heard of yet.

Both outlive the process.  A worker that is started again is the same one to the gate, so it goes on under the leases
that it still holds, and says first what it could not say before.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

LETTERS = ".letters"
LONGEST_NAME = 150      # of a file, before what is put behind it

log = logging.getLogger("asyncgate.worker")


class StateError(OSError):
    """The folder of a worker cannot be used; the text says why, and what to do."""


class Letter(msgspec.Struct, frozen=True):
    """An ending that the gate has not heard of: the operation, its request, and why it could not be delivered."""

    operation: str
    fields: dict[str, Any]
    why: str = "the worker was stopped"


def default_folder(url: str) -> Path:
    """Return the folder of the workers of one gate: letters to one say nothing to another."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise StateError(f"there is no home directory to keep a worker's state in; {ELSE}") from None
    return Path(state) / "asyncgate" / named(url)


ELSE = "name a folder for it (state=, --state), or keep nothing (state=None, --forget)"


def named(text: str) -> str:
    """Make a name of a file of any text, and of each text another one."""
    name = quote(text, safe="")
    return name if len(name) <= LONGEST_NAME else name[:60] + "-" + hashlib.sha256(text.encode()).hexdigest()[:32]


class Place:
    """The place of one worker process: an instance id, and the file of its dead letters.

    Several processes may be one worker.  Each takes the first place that is free and holds it by a lock, which the
    system takes away from a process that ends, however it ends.
    """

    def __init__(self, path: Path | None = None, lock: int = -1) -> None:
        self.path, self.lock = path, lock
        self.file = None if path is None else path.with_name(path.name + LETTERS)
        self.unwritten: list[Letter] = []       # what the disk does not take, or nobody wants there
        self.instance_id = uuid.uuid4().hex if path is None else settled(lock)

    def abandoned(self) -> Iterator[Place]:
        """Take in turn the other places of this worker that nobody holds, where letters were left."""
        folder, name = (self.path.parent, self.path.stem) if self.path else (Path(), "")
        for letters in sorted(folder.glob(f"{glob.escape(name)}.*{LETTERS}")) if name else ():
            path = letters.with_name(letters.name.removesuffix(LETTERS))
            if path != self.path and path.stem == name and (lock := taken(path)) is not None:
                place = Place(path, lock)
                try:
                    yield place
                finally:
                    place.close()

    def close(self) -> None:
        """Leave the place to the next process."""
        for letter in self.unwritten:
            log.error("task %s: its end is lost: %s", letter.fields.get("task_id"), letter.why)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def keep(self, letter: Letter) -> None:
        """Keep a letter, so that it outlives this process and a power cut; where no disk takes it, in memory."""
        where, line = "memory only", msgspec.json.encode(letter)
        if self.file is None:
            self.unwritten.append(letter)
        else:
            try:
                rewritten(self.file, [*(line for line, _ in self._lines()), line])
                where = str(self.file)
            except OSError as error:    # a full disk, say
                self.unwritten.append(letter)
                where = f"memory only ({error})"
        log.warning("task %s: its end is kept in %s until a gate hears of it: %s", letter.fields.get("task_id"), where,
                    letter.why)

    def letters(self) -> list[Letter]:
        """Return the letters, oldest first."""
        return [*(letter for _, letter in self._lines()), *self.unwritten]

    def _lines(self) -> Iterator[tuple[bytes, Letter]]:
        with contextlib.suppress(FileNotFoundError):
            for line in (self.file.read_bytes() if self.file else b"").splitlines():
                try:
                    yield line, msgspec.json.decode(line, type=Letter)
                except (msgspec.DecodeError, UnicodeDecodeError):   # a crash in the middle of writing it
                    log.error("%s has a line that is no letter; it is left out", self.file)

    def forget(self, delivered: Letter) -> bool:
        """Take away a letter that needs no delivery any more, with the last one the file; tell whether it is gone."""
        if delivered in self.unwritten:
            self.unwritten.remove(delivered)
        elif self.file is not None:
            try:
                rewritten(self.file, [line for line, letter in self._lines() if letter != delivered])
            except OSError as error:
                log.error("%s: a letter that was delivered cannot be taken away: %s", self.file, error)
                return False
        return True


def take(folder: Path | None, worker_id: str) -> Place:
    """Take the first place of a worker in a folder that is free; without a folder, nothing outlives the process."""
    if folder is None:
        return Place()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = (folder / f"{named(worker_id)}.{number}" for number in count(1))
        return next(Place(path, lock) for path in paths if (lock := taken(path)) is not None)
    except OSError as error:
        raise StateError(f"a worker's state cannot be kept in {folder}: {error.strerror or error}; {ELSE}") from None


def taken(path: Path) -> int | None:
    """Open a file and lock it; None if another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def settled(lock: int) -> str:
    """Return the instance id that a file holds; an empty one is given a fresh one."""
    if known := os.read(lock, 100).decode("ascii", "replace").strip():
        return known
    fresh = uuid.uuid4().hex
    os.write(lock, fresh.encode())
    os.fsync(lock)
    return fresh


def rewritten(path: Path, lines: Sequence[bytes]) -> None:
    """Put new lines into a file: whoever reads it finds the old ones or the new ones, never half of them."""
    if lines:
        beside = path.with_name(path.name + ".new")
        written(beside, b"".join(line + b"\n" for line in lines))
        beside.replace(path)
    else:
        path.unlink(missing_ok=True)
    synced(path.parent)


def written(path: Path, text: bytes) -> None:
    """Write a file that only its owner may read, down to the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(text)
        os.fsync(file)
    finally:
        os.close(file)


def synced(folder: Path) -> None:
    """Bring the names in a folder down to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
