"""Files that must be there, and whole, after the power fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


def open_private(path: str, flags: int) -> int:
    """Open a file; if it is new, only its owner may read it."""
    return os.open(path, flags, 0o600)


@contextmanager
def replacing(path: str, beside: str) -> Iterator[IO[bytes]]:
    """Write a new file beside a path; when it is whole and on the disk, it takes that name."""
    with open(beside, "w+b", opener=open_private) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    fsync_folder(os.path.dirname(os.path.abspath(path)))


def fsync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
