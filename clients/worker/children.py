"""Protect a worker from the programs that it runs: hide its credential, and kill the processes they leave behind.

A program of the same user could read the worker's environment and memory, and a child that leaves its process group
would outlive the lease.  Linux can prevent both; on other systems these functions are no-ops.
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
ROUNDS = 100                        # of one sweep: a program may fork faster than the sweep kills


def hide_credential() -> None:
    """Remove the credential from the environment and /proc, and forbid other processes to read this one's memory."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    for name in CREDENTIALS:
        if library is not None and name in os.environ:
            library.getenv.restype = ctypes.c_void_p
            place = library.getenv(name.encode())       # /proc/PID/environ shows this memory
            if place:
                ctypes.memset(place, 0, len(os.environb[name.encode()]))
        os.environ.pop(name, None)
    if library is not None:
        library.prctl(DUMPABLE, 0, 0, 0, 0)


class Children:
    """The running programs, and the sweep for processes that they leave behind."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.lock = threading.Lock()        # no sweep between the start of a program and its entry in `running`
        self.adopts = False

    def adopt(self) -> None:
        """Become the parent of orphaned descendants, in place of the init process."""
        if sys.platform.startswith("linux"):
            self.adopts = ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0

    def sweep(self, lease_id: str) -> None:
        """Kill the processes that an ended program left running, even in a session of their own."""
        for _ in range(ROUNDS if self.adopts else 0):
            with self.lock:
                parents = find_parents()
                left = [pid for pid, parent in parents.items() if parent == os.getpid() and pid not in self.running
                        and self._is_of(pid, lease_id)]
                for pid in add_descendants(left, parents):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)
            if not left:
                return

    def _is_of(self, pid: int, lease_id: str) -> bool:
        """Whether an orphan belongs to a run; one without a readable environment belongs to the last run that ends."""
        try:
            surroundings = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            surroundings = b""
        return f"ASYNCGATE_LEASE_ID={lease_id}".encode() in surroundings.split(b"\0") or not self.running


def find_parents() -> dict[int, int]:
    """Return the parent's id of each process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in brackets, may hold any character; after it come the state and the parent.
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def add_descendants(pids: list[int], parents: dict[int, int]) -> list[int]:
    """Return processes and all their descendants."""
    found = list(pids)
    for pid in found:       # `found` grows in the loop
        found += [child for child, parent in parents.items() if parent == pid]
    return found
