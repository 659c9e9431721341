"""Children that are forked without exec, as multiprocessing does: they obey signals as a new process does.

A child inherits the handlers of its parent and the pipe by which these wake the event loop.  So it would hand its own
SIGTERM to its parent, which stops, and not end itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

_closed_in_children = set[int]()
_forking = threading.local()


def obey_signals(stop: Callable[[], object]) -> None:
    """Call `stop` on this thread's event loop at SIGTERM and SIGINT; children do not inherit that."""
    release_children()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop)


def clean_up_on_signals() -> None:
    """Turn the signals that end a program into an exit, so that what it started ends with it."""
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda number, _: sys.exit(128 + number))


@cache
def release_children() -> None:
    """From now on, give forked children the default handling of signals."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)


def close_in_children(file: int) -> None:
    """Close a file in forked children: one that they held open would keep its lock beyond this process."""
    release_children()
    _closed_in_children.add(file)


def keep_in_children(file: int) -> None:
    """Forget a file that this process closes itself, before its number belongs to another."""
    _closed_in_children.discard(file)


def _block() -> None:
    """Let no signal reach the child before its handlers are reset."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset() -> None:
    signal.set_wakeup_fd(-1)
    for sign in SIGNALS:
        if callable(signal.getsignal(sign)):        # what is ignored or default stays so
            signal.signal(sign, signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL)
    for file in _closed_in_children:
        with contextlib.suppress(OSError):
            os.close(file)
    _closed_in_children.clear()
    _unblock()
