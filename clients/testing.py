"""A gate for your own tests: the real one, in this process, with a clock that you can advance.

    async with Gate() as gate:                          # an AsyncGate, over a gate in memory
        handle = await gate.submit("ocr.page", {"page": 3})
        await gate.advance(60)                          # leases run out, delayed tasks become due
        assert await handle.status() == "queued"

`with Gate() as gate` gives the same as a SyncGate.  Nothing listens on a port unless you name one: `Gate(port=0)` also
serves HTTP, at `gate.url`, for the programs that your test starts.  pytest is not needed; with it, load the fixtures
by `pytest_plugins = ["asyncgate.clients.pytest_fixtures"]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from asyncgate import News
from asyncgate.clients.client import AsyncGate
from asyncgate.clients.sync import Aside, SyncGate
from asyncgate.parts.model.settings import DatabaseSettings, Settings

HERE = "http://localhost"
# What is left to chance or takes long in production has no place in a test; every setting may be given, too.
DEFAULTS: dict[str, Any] = {"expiry_jitter_seconds": 0.0, "shutdown_seconds": 5.0}


class Running:
    """A gate that runs on this event loop, and its clock."""

    def __init__(self, settings: Settings, port: int | None) -> None:
        self.settings, self.port = settings, port
        from asyncgate.parts.app import Gate  # with all that a server is made of
        self.server, self.url = Gate(settings), HERE

    async def __aenter__(self) -> Running:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.server.app.router.lifespan_context(self.server.app))
            if self.port is not None:
                self.url = await stack.enter_async_context(self._listening(self.port))
            self.stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.server.drain()
        await self.stack.aclose()

    @contextlib.asynccontextmanager
    async def _listening(self, port: int) -> AsyncIterator[str]:
        import uvicorn

        sock = socket.create_server(("127.0.0.1", port))        # from here on connections are taken, or wait
        http = uvicorn.Server(uvicorn.Config(self.server, lifespan="off", log_config=None, ws="none",
                                             timeout_graceful_shutdown=int(self.settings.shutdown_seconds)))
        serving = asyncio.create_task(http.serve([sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            http.should_exit = True
            await serving

    def now(self) -> datetime:
        """Return the gate's time."""
        return datetime.fromtimestamp(self.server.engine.backend.now(), UTC)

    async def advance(self, seconds: float) -> None:
        """Let time pass for the gate, and let its upkeep do what is due by then."""
        if seconds < 0:
            raise ValueError("time goes forward only")
        engine = self.server.engine
        engine.backend.skew += seconds
        await self.server.upkeep.duties["sweep"].run()
        for tenant_id in list(engine.waiting.places):      # a delayed task may be due, and nobody else will say so
            engine.hear(News(tenant_id, many=True))

    def client(self, agent_id: str | None) -> AsyncTestGate:
        """Return a client of this gate: through its port if it has one, else straight into it."""
        from asyncgate.clients.in_process import InProcess

        transport = InProcess(self.server) if self.port is None else None
        return AsyncTestGate(self.url, self.settings.api_key, agent_id=agent_id, transport=transport)


class AsyncTestGate(AsyncGate):
    """A client of a gate that belongs to a test: an AsyncGate whose gate's clock can be advanced."""

    running: Running
    aside: Aside[Running] | None = None     # where the gate runs, if not here

    @property
    def url(self) -> str:
        """Return where the gate is; other programs reach it only if it was given a port."""
        return self.running.url

    @property
    def token(self) -> str:
        """Return the credential that it takes: that of an admin."""
        return self.running.settings.api_key

    def now(self) -> datetime:
        """Return the gate's time."""
        return self.running.now()

    async def advance(self, seconds: float) -> None:
        """Let time pass for the gate: leases run out, delayed tasks become due, upkeep does its work."""
        if self.aside is None:
            return await self.running.advance(seconds)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.running.advance(seconds), self.aside.loop))


class SyncTestGate(SyncGate):
    """The same for tests that do not await."""

    def __init__(self, aside: Aside[AsyncTestGate], gate: AsyncTestGate) -> None:
        self.aside, self.gate, self.running = aside, gate, gate.running
        self.url, self.token = gate.url, gate.token

    def now(self) -> datetime:
        """Return the gate's time."""
        return self.running.now()

    def advance(self, seconds: float) -> None:
        """Let time pass for the gate: leases run out, delayed tasks become due, upkeep does its work."""
        self.aside.run(self.running.advance(seconds))


class Gate:
    """A gate for one test: enter it, with `async with` or with `with`, for a client of it.

    The gate is in memory unless `database` names a file or a server; further arguments are settings of the gate.
    """

    def __init__(self, database: str = "memory:", *, port: int | None = None, agent_id: str | None = "tester",
                 **settings: Any) -> None:
        settings = {**DEFAULTS, "api_key": secrets.token_urlsafe(24), "database": DatabaseSettings(url=database),
                    **settings}
        self.settings, self.port, self.agent_id = Settings(**settings), port, agent_id

    async def __aenter__(self) -> AsyncTestGate:
        self.opened = self._here() if self.port is None else self._aside()
        return await self.opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.opened.__aexit__(kind, error, at)

    def __enter__(self) -> SyncTestGate:
        self.aside = Aside(self._here())
        return SyncTestGate(self.aside, self.aside.__enter__())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.aside.__exit__(kind, error, at)

    @contextlib.asynccontextmanager
    async def _here(self) -> AsyncIterator[AsyncTestGate]:
        """Run the gate on this loop."""
        async with Running(self.settings, self.port) as running, running.client(self.agent_id) as client:
            client.running = running
            yield client
            running.server.drain()      # or the client would wait for its own long polls

    @contextlib.asynccontextmanager
    async def _aside(self) -> AsyncIterator[AsyncTestGate]:
        """Run the gate on a thread of its own: a worker that blocks this loop blocks no gate in production either."""
        aside = Aside(Running(self.settings, self.port))
        with aside as running:
            async with running.client(self.agent_id) as client:
                client.running, client.aside = running, aside
                yield client
