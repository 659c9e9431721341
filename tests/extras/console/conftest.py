"""The console in a real browser: one browser per process, a context per test, and gates that have seen three days."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.ledgers import Drain
from tests.conftest import FILLED, TOKEN, Live, Node, tools_of_npm
from tests.support.chromium import AXE, Chromium, Screen, find_program, read_axe
from tests.support.console import Console
from tests.support.elsewhere import Elsewhere, serve_elsewhere
from tests.support.filled_gate import Filled, fill_gate

GUARDED = ("console.enabled=true", "security.rate_limiting.enabled=false")
OPEN = (*GUARDED, "allow_insecure_dev=true")        # callers of this machine need no credential; SQLite only


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that has a browser in the browser's thread."""
    chromium = pyfuncitem.funcargs.get("chromium")
    if not isinstance(chromium, Chromium):
        return None
    chromium.run(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    return True


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """Return the browser of this process."""
    find_program()
    running = Chromium()
    yield running
    running.close()


@pytest.fixture(scope="session")
def axe(tools_cache: Path) -> Callable[[], str]:
    """Return what reads the source of axe, where npm can install it."""
    return lambda: read_axe(Node.install(tools_of_npm(tools_cache), (AXE,), run=False))


Show = Callable[..., Screen]


@pytest.fixture
def show(chromium: Chromium, axe: Callable[[], str]) -> Iterator[Show]:
    """Return what opens a browser window on a gate, or on any address; each has cookies and storage of its own."""
    shown: list[Screen] = []

    def show(home: str, **more: Any) -> Screen:
        shown.append(Screen(chromium, axe, home, **more))
        return shown[-1]

    yield show
    for screen in shown:
        chromium.run(screen.close)


OpenConsole = Callable[..., Console]


@pytest.fixture
def open_console(chromium: Chromium, axe: Callable[[], str]) -> Iterator[OpenConsole]:
    """Return what opens the console of a gate in a window of its own."""
    opened: list[Console] = []

    def open_console(gate: Filled, credential: str = TOKEN, **more: Any) -> Console:
        opened.append(chromium.run(Console, chromium, axe, gate.url, **more))
        if gate.guarded:
            chromium.run(opened[-1].sign_in, credential)
        return opened[-1]

    yield open_console
    for console in opened:
        chromium.run(console.close)


@pytest.fixture(scope="session")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file that is filled once per process."""
    path = tmp_path_factory.mktemp("filled") / "gate.db"
    asyncio.run(fill_gate(f"sqlite:///{path}"))
    FILLED["sqlite", fill_gate] = str(path)
    return path


def serve_copy(file: Path, folder: Path, settings: tuple[str, ...]) -> Iterator[Filled]:
    """Serve a copy of a filled file."""
    path = folder / "gate.db"
    shutil.copyfile(file, path)
    running = Live(*settings, database=f"sqlite:///{path}")
    drain = Drain(running.process)
    yield Filled(running, guarded=settings == GUARDED)
    drain.kill()


@pytest.fixture(scope="session")
def gate_to_read(filled_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """Return a filled gate that all tests of this process share: no test changes it."""
    yield from serve_copy(filled_file, tmp_path_factory.mktemp("read"), OPEN)


@pytest.fixture
async def gate_to_change(request: pytest.FixtureRequest, filled_file: Path, fresh: Callable[..., Any],
                         start: Callable[..., Live], anyio_backend: str) -> Filled:
    """Return a filled gate of the test's own, on the database that its parameter names."""
    database = await fresh(getattr(request, "param", "sqlite"), fill_gate)
    guarded = database.startswith("postgres")
    return Filled(start(*(GUARDED if guarded else OPEN), database=database), guarded=guarded)


@pytest.fixture(scope="session")
def guarded_gate(filled_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """Return a filled gate that asks everybody for a credential; no test changes it."""
    yield from serve_copy(filled_file, tmp_path_factory.mktemp("guarded"), GUARDED)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """Return a site of somebody else."""
    with serve_elsewhere() as site:
        yield site
