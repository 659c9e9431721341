"""What a worker keeps from the programs that it runs, and what it does not let them leave behind.

A program of the same user could read the worker's environment and memory, and a child that leaves its process group
would outlive the lease.  Linux has the means against both; elsewhere these do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

CREDENTIALS = ("ASYNCGATE_API_KEY", "ASYNCGATE_API_KEY_FILE")
DUMPABLE, SUBREAPER = 4, 36         # of prctl(2)
ROUNDS = 100                        # of a search: a program may fork faster than it is found


def hide_credential() -> None:
    """Take the credential out of the environment, where it began too, and let no other process look in here."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    for name in CREDENTIALS:
        if library is not None and name in os.environ:
            library.getenv.restype = ctypes.c_void_p
            place = library.getenv(name.encode())       # what /proc shows of a process is this very memory
            if place:
                ctypes.memset(place, 0, len(os.environb[name.encode()]))
        os.environ.pop(name, None)
    if library is not None:
        library.prctl(DUMPABLE, 0, 0, 0, 0)


class Children:
    """The programs that run, and the search for what they have left behind."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.lock = threading.Lock()        # between the start of a program and its being known nobody searches
        self.adopts = False

    def adopt(self) -> None:
        """Become the parent of whatever loses its own, instead of the system's first process."""
        if sys.platform.startswith("linux"):
            self.adopts = ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0

    def sweep(self, lease_id: str) -> None:
        """End what a program that has ended left running: in a session of its own, or without a parent."""
        for _ in range(ROUNDS if self.adopts else 0):
            with self.lock:
                parents = all_parents()
                left = [pid for pid, parent in parents.items() if parent == os.getpid() and pid not in self.running
                        and self._is_of(pid, lease_id)]
                for pid in with_children(left, parents):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)
            if not left:
                return

    def _is_of(self, pid: int, lease_id: str) -> bool:
        """Whether an orphan is of a run; one that hides where it is from is of the last run that ends."""
        try:
            surroundings = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            surroundings = b""
        return f"ASYNCGATE_LEASE_ID={lease_id}".encode() in surroundings.split(b"\0") or not self.running


def all_parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in brackets, may hold anything; behind it come the state and the parent.
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def with_children(pids: list[int], parents: dict[int, int]) -> list[int]:
    """Return processes and all that descends from them."""
    found = list(pids)
    for pid in found:       # which grows
        found += [child for child, parent in parents.items() if parent == pid]
    return found
