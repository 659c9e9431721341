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
from collections.abc import Collection
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


class Guardian:
    """A process that outlives a worker only to kill the programs of one that was killed: no worker can do that itself.

    It reads a pipe that ends with the worker, however the worker ends.
    """

    def __init__(self) -> None:
        self.pid, self.pipe = 0, -1

    def start(self) -> None:
        """Start the guardian: this file as a program, with nothing of the worker's memory, in a group of its own.

        So what ends the worker's group spares it.
        """
        read, self.pipe = os.pipe()
        try:
            self.pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", __file__, str(os.getpid())], {},
                                      setpgroup=0, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)])
        finally:
            os.close(read)

    def tell(self, lease_id: str, state: str) -> None:
        """Tell of a run: `begins`, the id of its process group, or `ended`."""
        with contextlib.suppress(OSError):      # somebody has killed the guardian: the work goes on
            os.write(self.pipe, f"{lease_id} {state}\n".encode())


def guard(pipe: int, worker: str) -> None:
    """Read which programs run until the worker, of this process id, is gone; then kill these."""
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    running: dict[str, str] = {}
    with open(pipe, encoding="utf-8") as lines:
        for line in lines:
            lease_id, state = line.split()
            running[lease_id] = state
            if state == "ended":
                del running[lease_id]
    for group in filter(str.isdecimal, running.values()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
    kill_runs(running, worker)


def kill_runs(lease_ids: Collection[str], worker: str = "") -> None:
    """Kill what runs for leases, in whatever session, as far as its environment tells; on Linux.

    A worker that was started again works under the same leases: `worker` is the process whose programs are meant.
    """
    for _ in range(ROUNDS if sys.platform.startswith("linux") and lease_ids else 0):
        left = [pid for pid in find_parents() if any(is_of(pid, lease_id, worker) for lease_id in lease_ids)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def is_of(pid: int, lease_id: str, worker: str = "") -> bool:
    """Whether a process runs for a lease, as far as its environment can be read."""
    marks = [f"ASYNCGATE_LEASE_ID={lease_id}", *([f"ASYNCGATE_WORKER_PID={worker}"] if worker else [])]
    try:
        return {mark.encode() for mark in marks} <= {*Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except OSError:
        return False


class Children:
    """The running programs, and the sweep for processes that they leave behind."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.lock = threading.Lock()        # no sweep between the start of a program and its entry in `running`
        self.adopts, self.guardian = False, Guardian()

    def adopt(self) -> None:
        """Adopt orphans, and start the guardian."""
        self.guardian.start()
        self.adopts = adopt_orphans()

    def sweep(self, lease_id: str) -> None:
        """Kill the processes that an ended program left running, even in a session of their own."""
        for _ in range(ROUNDS if self.adopts else 0):
            with self.lock:
                parents = find_parents()
                # An orphan without a readable environment belongs to the last run that ends.
                left = [pid for pid, parent in parents.items() if parent == os.getpid()
                        and pid not in {*self.running, self.guardian.pid}
                        and (is_of(pid, lease_id) or not self.running)]
                for pid in add_descendants(left, parents):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)
            if not left:
                return


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants, in place of the init process; tell whether the system can do that."""
    return sys.platform.startswith("linux") and not ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def find_parents() -> dict[int, int]:
    """Return the parent's id of each process."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in brackets, may hold any character; after it come the state and the parent.
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def add_descendants(pids: list[int], parents: dict[int, int]) -> list[int]:
    """Return processes and all their descendants."""
    family = list(pids)
    for pid in family:       # `family` grows in the loop
        family += [child for child, parent in parents.items() if parent == pid]
    return family


if __name__ == "__main__":
    guard(0, sys.argv[1])
