"""Run the conformance suite from wherever the gate is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

UNTESTED = 2


def run(urls: Sequence[str], args: Sequence[str] = ()) -> int:
    """Run the suite on these backends, with these further arguments for pytest; return the exit status."""
    if find_spec("pytest") is None:
        print("the conformance suite runs on pytest, which is not installed: pip install 'asyncgate[test]'",
              file=sys.stderr)
        return UNTESTED
    import pytest
    # No configuration of the folder that this happens to be started in counts, and nothing is written where it lies.
    chosen = [option for url in urls for option in ("--backend", url)]
    return int(pytest.main(["--pyargs", "asyncgate.conformance", "-c", os.devnull, "--rootdir",
                            str(Path(__file__).parent), "-p", "asyncgate.conformance.plugin", "-p", "no:cacheprovider",
                            "--import-mode=importlib", "-W", "ignore:Module already imported", *chosen, *args]))
