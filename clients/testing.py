"""A gate for your own tests: a real gate, in this process, with a clock that you can advance.

    async with Gate() as gate:                          # an AsyncGate, over a gate in memory
        handle = await gate.submit("ocr.page", {"page": 3})
        await gate.advance(60)                          # leases run out, delayed tasks become due
        assert await handle.status() == "queued"

`with Gate() as gate` returns a SyncGate instead.  By default no port is open; `Gate(port=0)` also serves HTTP at
`gate.url`, for programs that your test starts.  pytest is optional; with pytest, load the fixtures by
`pytest_plugins = ["asyncgate.clients.pytest_fixtures"]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from asyncgate import News
from asyncgate.clients.client import AsyncGate
from asyncgate.clients.sync import LoopThread, SyncGate
from asyncgate.parts.model.settings import DatabaseSettings, Settings

HERE = "http://localhost"
# No random delays and no long shutdown in tests; the caller may override every setting.
DEFAULTS: dict[str, Any] = {"expiry_jitter_seconds": 0.0, "shutdown_seconds": 5.0}


class Running:
    """A gate that runs on this event loop, and its clock."""

    def __init__(self, settings: Settings, port: int | None) -> None:
        self.settings, self.port = settings, port
        from asyncgate.parts.app import Gate  # imported here, because it imports the whole server
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

        from asyncgate.parts.faces.server import bind_sockets
        # Not socket.create_server: it names no protocol, so asyncio leaves Nagle's algorithm on: 40 ms for each answer.
        [sock] = bind_sockets("127.0.0.1", port)
        sock.listen()       # connections wait in its backlog from here on
        http = uvicorn.Server(uvicorn.Config(self.server, lifespan="off", log_config=None, ws="none",
                                             timeout_graceful_shutdown=int(self.settings.shutdown_seconds)))
        serving = asyncio.create_task(http.serve([sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            http.should_exit = True
            await serving

    def now(self) -> datetime:
        """Return the gate's current time."""
        return datetime.fromtimestamp(self.server.engine.backend.now(), UTC)

    async def advance(self, seconds: float) -> None:
        """Advance the gate's clock, and run the upkeep that is due by then."""
        if seconds < 0:
            raise ValueError("seconds must not be negative: the clock only goes forward")
        engine = self.server.engine
        engine.backend.skew += seconds
        await self.server.upkeep.duties["sweep"].run()
        for tenant_id in list(engine.waiting.places):      # wake waiting claims: a delayed task may be due now
            engine.hear_news(News(tenant_id, many=True))

    def client(self, agent_id: str | None) -> AsyncTestGate:
        """Return a client of this gate: through its port if it has one, else in process."""
        from asyncgate.clients.in_process import InProcess

        transport = InProcess(self.server) if self.port is None else None
        return AsyncTestGate(self.url, self.settings.api_key, agent_id=agent_id, transport=transport)


class AsyncTestGate(AsyncGate):
    """The asyncio client of a test's gate; it can also advance the gate's clock."""

    running: Running
    loop_thread: LoopThread[Running] | None = None     # where the gate runs, if not on this loop

    @property
    def url(self) -> str:
        """Return the gate's URL; other programs reach it only if the gate was given a port."""
        return self.running.url

    @property
    def token(self) -> str:
        """Return the gate's credential, which has the admin role."""
        return self.running.settings.api_key

    def now(self) -> datetime:
        """Return the gate's current time."""
        return self.running.now()

    async def advance(self, seconds: float) -> None:
        """Advance the gate's clock: leases run out, delayed tasks become due, upkeep runs."""
        if self.loop_thread is None:
            return await self.running.advance(seconds)
        advancing = asyncio.run_coroutine_threadsafe(self.running.advance(seconds), self.loop_thread.loop)
        await asyncio.wrap_future(advancing)


class SyncTestGate(SyncGate):
    """The blocking client of a test's gate; it can also advance the gate's clock."""

    def __init__(self, loop_thread: LoopThread[AsyncTestGate], gate: AsyncTestGate) -> None:
        self.loop_thread, self.gate, self.running = loop_thread, gate, gate.running
        self.url, self.token = gate.url, gate.token

    def now(self) -> datetime:
        """Return the gate's current time."""
        return self.running.now()

    def advance(self, seconds: float) -> None:
        """Advance the gate's clock: leases run out, delayed tasks become due, upkeep runs."""
        self.loop_thread.run(self.running.advance(seconds))


class Gate:
    """A gate for one test: `async with` or `with` starts the gate and returns a client.

    The gate is in memory unless `database` names a file or a server; other arguments are settings of the gate.
    """

    def __init__(self, database: str = "memory:", *, port: int | None = None, agent_id: str | None = "tester",
                 **settings: Any) -> None:
        settings = {**DEFAULTS, "api_key": secrets.token_urlsafe(24), "database": DatabaseSettings(url=database),
                    **settings}
        self.settings, self.port, self.agent_id = Settings(**settings), port, agent_id

    async def __aenter__(self) -> AsyncTestGate:
        self.opened = self._here() if self.port is None else self._in_thread()
        return await self.opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.opened.__aexit__(kind, error, at)

    def __enter__(self) -> SyncTestGate:
        self.loop_thread = LoopThread(self._here())
        return SyncTestGate(self.loop_thread, self.loop_thread.__enter__())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.loop_thread.__exit__(kind, error, at)

    @contextlib.asynccontextmanager
    async def _here(self) -> AsyncIterator[AsyncTestGate]:
        """Run the gate on this loop."""
        async with Running(self.settings, self.port) as running, running.client(self.agent_id) as client:
            client.running = running
            yield client
            running.server.drain()      # else the client would wait for its own long polls

    @contextlib.asynccontextmanager
    async def _in_thread(self) -> AsyncIterator[AsyncTestGate]:
        """Run the gate in its own thread, so that a worker that blocks this loop does not block the gate."""
        loop_thread = LoopThread(Running(self.settings, self.port))
        with loop_thread as running:
            async with running.client(self.agent_id) as client:
                client.running, client.loop_thread = running, loop_thread
                yield client
