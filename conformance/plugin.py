"""The pytest plugin of the conformance suite: which backends to run on, and a gate over each.

Load it with `-p asyncgate.conformance.plugin`.  A test that asks for `gate` (or `make_gate`, or `backend_url`) runs
once per backend; a coroutine needs the mark `anyio` and runs on asyncio.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine, Settings
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, OwnTenants

DEFAULT = ("memory:", "sqlite:")
ROUNDS = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line name the backends."""
    group = parser.getgroup("asyncgate", "AsyncGate's conformance suite")
    group.addoption("--backend", action="append", metavar="URL", dest="asyncgate_backends",
                    help="database to run on, may be repeated; {tmp} in it is a fresh folder for each test, and a bare "
                         "sqlite: a fresh file; default memory: and sqlite:")
    group.addoption("--rounds", type=int, default=ROUNDS, metavar="N", dest="asyncgate_rounds",
                    help=f"rounds of each crash test, default {ROUNDS}")


def urls(config: pytest.Config) -> list[str]:
    """Return the backends that this session runs on."""
    return list(config.getoption("asyncgate_backends") or DEFAULT)


def pytest_report_header(config: pytest.Config) -> str:
    """Begin the output with the backends; a password in a URL stays out of it."""
    return "asyncgate backends: " + ", ".join(re.sub(r"//[^@/]*@", "//***@", url) for url in urls(config))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on every backend, and coroutines on asyncio only, which is what the gate runs on."""
    if "backend_url" in metafunc.fixturenames:
        given = urls(metafunc.config)
        names = [url.partition(":")[0] for url in given]
        ids = names if len(set(names)) == len(names) else [f"{name}{at}" for at, name in enumerate(names)]
        metafunc.parametrize("backend_url", given, ids=ids, indirect=True)
        if "anyio_backend" in metafunc.fixturenames:
            # As a mark, because only that keeps pytest from adding what anyio's own fixture would run on.
            only = pytest.param("asyncio", id=pytest.HIDDEN_PARAM)
            metafunc.definition.add_marker(pytest.mark.parametrize("anyio_backend", [only]))


@pytest.fixture
def backend_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the database of this test."""
    url = "sqlite:///{tmp}/gate.db" if request.param == "sqlite:" else request.param
    return str(url.replace("{tmp}", str(tmp_path)))


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> int:
    """Return how often a crash test crashes."""
    return int(pytestconfig.getoption("asyncgate_rounds"))


@pytest.fixture
async def make_gate(backend_url: str) -> AsyncIterator[Callable[..., Gate]]:
    """Return what makes gates over one backend, each a new engine with these settings and a tenant of its own."""
    backend: Any = OwnTenants(await open_backend(backend_url))     # Any: it forwards all that a Backend has
    engines: list[Engine] = []

    def make(**settings: Any) -> Gate:
        engines.append(Engine(backend, Settings(**{"instance_id": "asyncgate-1", **settings})))
        return Gate(engines[-1], str(uuid.uuid4()))

    async with contextlib.aclosing(backend):
        yield make
        for engine in engines:
            engine.drain()
            await engine.batches.landed()


@pytest.fixture
def gate(make_gate: Callable[..., Gate]) -> Gate:
    """Return a gate with the default settings."""
    return make_gate()
