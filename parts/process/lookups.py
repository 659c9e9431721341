"""Looking up hosts, such as those that strangers name: in threads of their own, and so many at once for whoever asks.

A name server that hangs holds a thread for as long as the system's resolver is patient.  The event loop has few threads
for look-ups, and who connects may need them: so a host whose name server may hang is looked up here first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import defaultdict
from contextvars import ContextVar

LOOKUP_THREADS = 128        # in all
LOOKUPS_OF_ASKER = 16       # who names many hosts whose name servers hang holds no more of the threads

asking: ContextVar[str] = ContextVar("asking", default="")      # the tenant, or the address, that named the host


class Lookups:
    """Looks hosts up, each once at a time; whoever asks meanwhile shares the look-up.  Callers set the deadline."""

    def __init__(self, most: int = LOOKUP_THREADS, of_asker: int = LOOKUPS_OF_ASKER) -> None:
        self.under_way: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        self.places = asyncio.Semaphore(most)
        self.own = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(of_asker))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host now."""
        if (host, port) not in self.under_way:
            with contextlib.ExitStack() as held:
                for place in (self.own[asking.get()], self.places):
                    await place.acquire()
                    held.callback(place.release)
                if (host, port) not in self.under_way:      # else it has begun while this caller waited
                    self._begin(host, port, held)
        return await asyncio.shield(self.under_way[host, port])      # another caller may still wait for it

    def _begin(self, host: str, port: int, held: contextlib.ExitStack) -> None:
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[list[str]] = loop.create_future()

        def end(addresses: list[str], error: Exception | None) -> None:
            kept.close()        # only now: nobody may wait for the thread any more, but it was still held
            del self.under_way[host, port]
            if error is None:
                begun.set_result(addresses)
            else:
                begun.set_exception(error)
                begun.exception()       # nobody may be left who asks for it

        def work() -> None:
            addresses, failed = list[str](), None
            try:
                addresses = look_up(host, port)
            except Exception as error:      # whoever waits must hear of it
                failed = error
            with contextlib.suppress(RuntimeError):     # the loop is closed: nobody waits
                loop.call_soon_threadsafe(end, addresses, failed)

        # A daemon, unlike the threads of a pool: a process that ends waits for no name server.
        threading.Thread(target=work, name="look-up", daemon=True).start()
        # Order: behind the start, which fails where the machine has no thread to spare.
        self.under_way[host, port], kept = begun, held.pop_all()


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host; it blocks for as long as the system's resolver likes."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in answers))
