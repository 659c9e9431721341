"""The app: join the engine, the guard, upkeep and the faces into one server over one backend."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.routing import Route

from asyncgate import Engine, Operation, __version__
from asyncgate.backends import Backend, open_backend
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.extras import find_extras, list_families
from asyncgate.parts.faces import server
from asyncgate.parts.faces.changes import Changes
from asyncgate.parts.faces.front import Front
from asyncgate.parts.faces.traffic import Traffic
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.startup import settle_limits
from asyncgate.parts.identity.ways import Identity, Keys
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.metrics.page import METRICS_PATH, MetricsPage
from asyncgate.parts.metrics.shown import Sources
from asyncgate.parts.model import errors
from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.notify import Notifier
from asyncgate.parts.receipts.archive import free_storage
from asyncgate.parts.service import Service
from asyncgate.parts.upkeep import Upkeep

log = logging.getLogger("asyncgate")


class Gate(Front):
    """The server over one backend: the front, and behind it the engine, the guard and the upkeep."""

    guard: Guard
    upkeep: Upkeep
    service: Service

    def __init__(self, settings: Settings, backend: Backend | None = None,
                 operations: dict[str, Operation] = OPERATIONS) -> None:
        self.backend, self.identity = backend, Identity(settings)
        self.traffic = Traffic()
        super().__init__(settings, operations, self._life)
        self.when_opened: list[Callable[[Engine, Guard], None]] = []
        self.joined: dict[str, Any] = {}        # what extras keep at a gate, by their names
        for setting, extra, asked in (("security.oauth.enabled", "oauth", settings.security.oauth.enabled),
                                      ("receipt_mode", "ledger", settings.receipt_mode != "standalone"),
                                      ("a2a.agents", "a2a", bool(settings.a2a.agents))):
            if asked and extra not in find_extras():
                raise errors.StartupError(f"{setting} needs the extra {extra}, which this installation lacks")
        self.app.router.routes.extend(route for extra in find_extras().values() for route in extra.routes(self))
        self.counting: Metrics | None = None    # if the settings ask for it
        if settings.metrics.enabled and not settings.metrics.port:
            self.app.router.routes.append(Route(METRICS_PATH, MetricsPage(self, self._find_sources)))

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        database = self.settings.database
        async with contextlib.AsyncExitStack() as opened:   # on a failure, everything opened so far is closed
            backend = self.backend or await open_backend(database.url, serving=True, settings=database)
            opened.push_async_callback(backend.close)
            self.settings = settle_limits(self.settings, len(await backend.tenants()))
            self._add_parts(engine_over(backend, self.settings))
            opened.push_async_callback(self.engine.batches.wait_for_all)
            opened.push_async_callback(self.mcp.close)
            beats, lasting = self.settings.lease_sweep_interval_seconds, self.engine.lasting
            sign = await lasting.join(self.engine.instance, beats, self.engine.hear_news) if lasting else None
            await self.upkeep.begin(sign)
            nothing = contextlib.nullcontext()
            counting = self.counting or nothing
            async with self.guard, self.upkeep, counting, contextlib.AsyncExitStack() as extras:
                for extra in find_extras().values():
                    if extra.beside is not None:
                        await extras.enter_async_context(extra.beside(self.engine))
                await extras.enter_async_context(self._beside())
                yield

    def _add_parts(self, engine: Engine) -> None:
        """Add the guard, upkeep and the extras to the engine; raises StartupError for contradictory settings."""
        if self.settings.metrics.enabled:
            self.meter = self.counting = Metrics(engine)
            engine.extend(self.counting)        # before a ledger, so that it measures the database alone
        self.upkeep = Upkeep(engine)
        engine.extend(self.upkeep)      # before a ledger too: how long that takes is not a silence of the database
        self.service = Service(engine, self.traffic, self.mcp.drain)
        engine.extend(self.service, Changes(engine))
        self.engine, self.guard = engine, Guard(engine, free_storage, self.identity)
        for begin in self.when_opened:
            begin(engine, self.guard)
        self.identity.prefer(Keys(self.guard.keys))
        self.opened = True

    def _beside(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the second listener, if there is one; off loopback it speaks TLS if the gate does."""
        metrics = self.settings.metrics
        if not (metrics.enabled and metrics.port):
            return contextlib.nullcontext()
        if self.settings.allow_insecure_dev:
            raise errors.StartupError(
                "metrics.port is for gates with credentials; with allow_insecure_dev set it to 0, and "
                f"{METRICS_PATH} is where everything else is")
        there = replace(self.settings, host=metrics.host, port=metrics.port)
        page = MetricsPage(self, self._find_sources)
        return server.listen_beside(page, there, None if is_loopback(metrics.host) else self.settings.security.tls)

    def _find_sources(self) -> Sources:
        assert self.counting is not None
        return Sources(list_families(), self.counting, self.engine, self.guard.limits, self.upkeep.duties)

    def leave(self) -> float:
        """Take no new callers; return for how many seconds the server goes on, so that load balancers notice."""
        return self.service.left_seconds() if self.opened else 0.0

    def drain(self) -> None:
        """Answer all waiting calls, because the server is about to stop."""
        if self.opened:
            self.engine.drain()
            self.mcp.drain()


def serve_forever(settings: Settings, ready: Callable[[str], None] | None = None, beside: Iterable[Route] = (),
                  kind: type[Gate] = Gate, handed: list[socket.socket] | None = None, leash: int | None = None) -> int:
    """Serve the gate, and the routes in `beside`, until a signal stops it; return the exit status.

    A parent process has `handed` over the sockets, and holds the `leash`: see `server.run_server`.
    """
    gate = kind(settings)
    gate.app.router.routes.extend(beside)
    tell = ready or (lambda url: log.info("asyncgate %s serves %s", __version__, url))

    manager = Notifier()

    def announce(url: str) -> None:
        if isinstance(backend := gate.engine.backend, FileBackend):
            backend.announce(url)
        tell(url)
        manager.begin(f"serves {url}")

    def leave() -> float:
        seconds = gate.leave()
        manager.end(seconds + settings.shutdown_seconds + 5)
        return seconds

    return server.run_server(gate, settings, drain=gate.drain, ready=announce, leave=leave,
                             traffic=gate.traffic, handed=handed, leash=leash)
