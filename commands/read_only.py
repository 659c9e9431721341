"""A database file that may only be read, such as a backup on a read-only mount: commands open a copy of it.

SQLite keeps a log and locks beside a file, also to read it, and a killed gate's log has to be taken over first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from asyncgate.backends.sqlite import refuse_left_log
from asyncgate.parts.model import errors

LOGS = ("", "-wal")     # what belongs to a file; the newest work is in the log


@contextmanager
def open_for_reading(url: str, beside: str | None = None) -> Iterator[str]:
    """Return the URL of a database that can be opened: this one, or that of a copy which goes at the end.

    The copy is made in the folder `beside`, by default in that for temporary files.
    """
    path = os.path.realpath(url.removeprefix("sqlite:///"))
    if not url.startswith("sqlite:///") or not os.path.isfile(path) or is_writable(path):
        yield url
        return
    refuse_left_log(path)
    with tempfile.TemporaryDirectory(prefix=".asyncgate-read-", dir=beside) as own:
        yield f"sqlite:///{copy_still(path, os.path.join(own, 'gate.db'))}"


def is_writable(path: str) -> bool:
    """Whether this user may write a file, and others beside it; on a read-only mount root may not either."""
    return os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK | os.X_OK)


def copy_still(path: str, target: str) -> str:
    """Copy a file with its log; raises NotNow if somebody writes them, elsewhere where they can be written."""
    before = read_states(path)
    try:
        for end in before:
            shutil.copyfile(path + end, target + end)
            os.chmod(target + end, 0o600)
        if read_states(path) == before:
            return target
    except OSError as error:
        raise errors.NotNow(f"{path} may only be read, and cannot be copied to {os.path.dirname(target)}: "
                            f"{error.strerror or error}; TMPDIR names another folder") from None
    raise errors.NotNow(f"{path} is being written; stop its gate, or use its file where it can be written")


def read_states(path: str) -> dict[str, tuple[int, int, int]]:
    """Return which files there are, with what changes when they are written."""
    stats = {end: os.stat(path + end) for end in LOGS if os.path.exists(path + end)}
    return {end: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for end, stat in stats.items()}
