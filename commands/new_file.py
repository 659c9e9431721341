"""A new file that only one process writes: the lock beside it, and what is left of a process that was killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from asyncgate.parts.model import errors


class OtherRun(errors.Conflicting):
    """Another process writes the same file now."""


@contextmanager
def hold_target(target: str) -> Iterator[None]:
    """Keep every other process from writing a file; the system releases the lock if this process dies."""
    path = f"{target}.partial.lock"
    lock = lock_target(target, path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)     # before the release: who has opened it meanwhile sees that its file is gone
        os.close(lock)


def lock_target(target: str, path: str) -> int:
    """Open and lock the lock file of a target; raises OtherRun if another process holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_at(path, lock):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise OtherRun(f"another process is writing {target} now; wait until it has ended, or name another "
                           "file") from None
        os.close(lock)


def is_still_at(path: str, file: int) -> bool:
    """Whether an open file still has its name; the run before removes the lock file that it held."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def hold_new_file(path: str) -> Iterator[None]:
    """Let only this process write a new file; raises Conflicting if it exists, or if another process is writing it."""
    with hold_target(path):
        if os.path.lexists(path):
            raise errors.Conflicting(f"{path} exists already; name a new file")
        yield
