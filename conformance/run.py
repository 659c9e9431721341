"""Run the conformance suite of the installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

UNTESTED = 2


def run(urls: Sequence[str], args: Sequence[str] = ()) -> int:
    """Run the suite on these backends with further arguments for pytest; return the exit status."""
    if find_spec("pytest") is None:
        print("the conformance suite runs on pytest, which is not installed: pip install 'asyncgate[test]'",
              file=sys.stderr)
        return UNTESTED
    import pytest
    # Ignore pytest configuration in the current folder, and write nothing into the package.
    chosen = [option for url in urls for option in ("--backend", url)]
    return int(pytest.main(["--pyargs", "asyncgate.conformance", "-c", os.devnull, "--rootdir",
                            str(Path(__file__).parent), "-p", "asyncgate.conformance.plugin", "-p", "no:cacheprovider",
                            "--import-mode=importlib", "-W", "ignore:Module already imported", *chosen, *args]))
