"""The connections of the HTTP server, as the app sees them; the server itself is imported when it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from uvicorn.server import ServerState


class Traffic:
    """Tells the app of the running requests, and lets it close connections so that clients reconnect elsewhere."""

    def __init__(self) -> None:
        self.leaving = False
        self.state: ServerState | None = None   # of the server, once it exists

    def count(self) -> int:
        """Return the number of running requests."""
        return len(self.state.tasks) if self.state else 0

    def leave(self) -> None:
        """From now on, close each connection after its next answer."""
        self.leaving = True
        for connection in self.state.connections if self.state else ():
            cycle = cast(Any, connection).cycle
            if cycle is not None and not cycle.response_started:
                cycle.keep_alive = False

    def stay(self) -> None:
        """Keep connections open again."""
        self.leaving = False
