"""What a service manager is told, in the protocol of systemd (sd_notify(3)), where one listens."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate")
BEATS = 3       # in the time after which a silent process counts as frozen


class Notifier:
    """Sends messages to the socket that NOTIFY_SOCKET names; without it nothing happens."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        named = environ.get("NOTIFY_SOCKET", "")
        self.address = f"\0{named[1:]}" if named.startswith("@") else named if named.startswith("/") else ""
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environ.get("WATCHDOG_USEC", "") if mine else ""
        self.watched_seconds = int(microseconds) / 1e6 if microseconds.isdecimal() else 0.0
        self.beating: asyncio.Task[None] | None = None

    def tell(self, *lines: str) -> None:
        """Send one message; a manager that does not listen is none."""
        if not self.address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)     # its queue may be full, and the event loop must go on
                sock.sendto("\n".join(lines).encode(), self.address)
        except OSError as error:
            log.warning("the service manager cannot be notified of %s: %s", lines[0], error, extra=OFTEN)

    def begin(self, status: str) -> None:
        """Tell that the process serves, and from now on that its event loop turns; call it in that loop."""
        self.tell("READY=1", f"STATUS={status}")
        if self.address and self.watched_seconds and self.beating is None:
            self.beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:     # until the loop ends
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watched_seconds / BEATS)

    def end(self, seconds: float) -> None:
        """Tell that the process stops, which may take so long."""
        self.tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def reload(self) -> None:
        """Tell that settings are read anew; `begin` says when that is done."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
