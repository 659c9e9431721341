"""Run the conformance suite of the installed package."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from asyncgate.backends import is_shared, open_backend
from asyncgate.parts.model import errors

UNTESTED = 2


def try_databases(urls: Sequence[str]) -> None:
    """Open and close each database that has a place; raises StartupError for the first that cannot be used."""
    async def try_database(url: str) -> None:
        await (await open_backend(url)).close()

    with tempfile.TemporaryDirectory() as folder:
        for url in urls:
            is_shared(url)      # is there such a backend?
            if not url.endswith(":"):
                asyncio.run(try_database(url.replace("{tmp}", folder)))


def run(urls: Sequence[str], args: Sequence[str] = ()) -> int:
    """Run the suite on these backends with further arguments for pytest; return the exit status."""
    if find_spec("pytest") is None:
        print("the conformance suite runs on pytest, which is not installed: pip install 'asyncgate[test]'",
              file=sys.stderr)
        return UNTESTED
    import pytest
    try:
        try_databases(urls)
    except errors.StartupError as error:
        print(f"Error: {error}", file=sys.stderr)
        return UNTESTED
    # Ignore pytest configuration in the current folder, and write nothing into the package.
    chosen = [option for url in urls for option in ("--backend", url)]
    return int(pytest.main(["--pyargs", "asyncgate.conformance", "-c", os.devnull, "--rootdir",
                            str(Path(__file__).parent), "-p", "asyncgate.conformance.plugin", "-p", "no:cacheprovider",
                            "--import-mode=importlib", "-W", "ignore:Module already imported", *chosen, *args]))
