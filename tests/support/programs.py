"""Programs that tests run beside themselves."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import IO, Any

import pytest

from tests.support.patience import PATIENCE_SECONDS

# For a pytest in a process of its own: the plugins that other packages bring are most of what its start costs.
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "anyio.pytest_plugin"}


@pytest.fixture
def anyio_backend() -> str:
    """Run on asyncio's own loop: uvloop starts programs by itself, so in no fork of one that has imported asyncgate."""
    return "asyncio"


def read_address(program: subprocess.Popen[Any], stream: IO[str], pattern: str = r"https?://\S+:\d+") -> str:
    """Read the lines of a program until one has its address; end the program if none comes.

    A watch that ends the program, and no `select` on the stream: two lines that come at once are read at once, and the
    second one would wait in the buffer where no `select` sees it.
    """
    watch = threading.Timer(PATIENCE_SECONDS, program.kill)
    watch.start()
    text = ""
    try:
        while not (match := re.search(pattern, text)):
            line = stream.readline()
            if not line:
                program.kill()
                program.wait()
                raise AssertionError(f"the program ended, or said no address in time: {text}")
            text += line
    finally:
        watch.cancel()
    return match[0]
