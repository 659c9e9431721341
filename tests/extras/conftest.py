"""The tests of an extra are collected where it is installed."""

from __future__ import annotations

from pathlib import Path

import asyncgate

collect_ignore = [path.name for path in Path(__file__).parent.iterdir()
                  if path.is_dir() and not Path(asyncgate.__path__[0], "extras", path.name).is_dir()]
