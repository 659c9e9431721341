"""What systemd is told, by a real `asyncgate serve`, at a socket of the test's own; and the unit file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from asyncgate.parts.model.settings import Settings, list_settings
from asyncgate.parts.process.notify import Notifier
from tests.conftest import Live
from tests.support.patience import PATIENCE_SECONDS

UNIT = Path(__file__).parents[1] / "deploy" / "asyncgate.service"


class Manager:
    """Listens as systemd does."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(address)
        self.sock.settimeout(PATIENCE_SECONDS)

    def hear(self) -> dict[str, str]:
        """Return the next message."""
        return dict(line.split("=", 1) for line in self.sock.recv(4096).decode().splitlines())

    def hear_until(self, name: str) -> dict[str, str]:
        """Return the next message that says something of a name."""
        while name not in (message := self.hear()):
            pass
        return message


@pytest.fixture
def folder() -> Iterator[str]:
    """Return a folder whose path is short enough for the address of a socket."""
    with TemporaryDirectory() as path:
        yield path


Manage = Callable[..., Manager]


@pytest.fixture
def manage(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manage]:
    """Return what listens, and has the programs that are started from now on speak to it."""
    with contextlib.ExitStack() as opened:
        def manage(seconds: float = 0.0, **more: str) -> Manager:
            path = f"{folder}/notify"
            monkeypatch.setenv("NOTIFY_SOCKET", path)
            for name, value in {"WATCHDOG_USEC": str(int(seconds * 1e6)), **more}.items():
                monkeypatch.setenv(name, value)
            manager = Manager(path)
            opened.enter_context(contextlib.closing(manager.sock))
            return manager

        yield manage


def ended(live: Live) -> int:
    """Wait for the end of a process; return its status."""
    status = live.process.wait(PATIENCE_SECONDS)
    live.kill()     # which closes what it wrote to
    return status


def test_a_gate_tells_when_it_serves_and_when_it_stops(manage: Manage, start: Callable[..., Live]) -> None:
    manager = manage()
    live = start("drain_seconds=1", "shutdown_seconds=2")

    first = manager.hear()
    live.process.send_signal(signal.SIGTERM)
    last = manager.hear()

    assert first == {"READY": "1", "STATUS": f"serves {live.url}"}
    assert last["STOPPING"] == "1"
    assert 7_500_000 <= int(last["EXTEND_TIMEOUT_USEC"]) <= 8_000_000
    assert ended(live) == 0


def test_the_watchdog_hears_the_event_loop_and_misses_it_when_it_is_frozen(
        manage: Manage, start: Callable[..., Live]) -> None:
    manager = manage(0.5)
    live = start(program=("-c", FREEZE))
    for _ in range(3):
        assert manager.hear_until("WATCHDOG") == {"WATCHDOG": "1"}

    live.process.send_signal(signal.SIGUSR1)        # the loop stands still, the process lives

    assert live.process.stderr is not None
    while "frozen" not in live.process.stderr.readline():
        pass
    manager.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):      # what it said before
        while manager.hear():
            pass
    manager.sock.settimeout(2.0)
    with pytest.raises(TimeoutError):
        manager.hear()
    assert live.process.poll() is None


# A handler of Python's runs in the main thread, between two steps of the event loop.
FREEZE = """
import signal, sys, time
from asyncgate import main
def freeze(*_):
    print("frozen", file=sys.stderr, flush=True)
    time.sleep(3600)
signal.signal(signal.SIGUSR1, freeze)
sys.exit(main())
"""


def test_a_watchdog_of_another_process_is_none_of_ours(manage: Manage, start: Callable[..., Live]) -> None:
    manager = manage(0.05, WATCHDOG_PID="1")
    live = start()

    assert "READY" in manager.hear()
    live.process.send_signal(signal.SIGTERM)
    assert "STOPPING" in manager.hear()


def test_without_a_manager_nothing_is_sent_and_a_deaf_one_stops_nobody(
        folder: str, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({}).tell("READY=1")
    assert not caplog.records

    Notifier({"NOTIFY_SOCKET": f"{folder}/gone"}).tell("READY=1")

    assert "cannot be notified of READY=1" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="names without a file are Linux's")
def test_a_socket_without_a_file_hears_as_well(folder: str) -> None:
    name = f"asyncgate-test-{os.getpid()}"
    with contextlib.closing((manager := Manager(f"\0{name}")).sock):
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1", "STATUS=here")

        assert manager.hear() == {"READY": "1", "STATUS": "here"}


# The unit file.


def directives() -> list[tuple[str, str]]:
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def test_the_unit_speaks_the_protocol_and_waits_longer_than_a_stop_takes() -> None:
    unit, settings = dict(directives()), Settings()

    assert (unit["Type"], unit["NotifyAccess"], unit["KillMode"]) == ("notify", "main", "mixed")
    assert int(unit["WatchdogSec"]) > 0
    assert int(unit["TimeoutStopSec"]) > settings.drain_seconds + settings.shutdown_seconds + 5


def test_every_variable_of_the_unit_is_a_setting() -> None:
    named = {value.partition("=")[0] for name, value in directives() if name == "Environment"}

    assert named
    assert named <= {setting.environment for setting in list_settings(Settings)}
    assert re.search(r"KEY|TOKEN|SECRET|PASSWORD", " ".join(named)) is None


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit_and_finds_it_well_shut_in(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    program = re.sub(r"/opt/asyncgate/bin/asyncgate", shutil.which("true") or "", UNIT.read_text())
    unit.write_text(program)

    read = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    judged = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=20", unit],
                            capture_output=True, text=True)

    assert (read.returncode, read.stderr) == (0, "")
    assert judged.returncode == 0, judged.stdout
