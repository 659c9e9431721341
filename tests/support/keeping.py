"""What a program of somebody else makes of the same sources: it is made once, and kept beside the program."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory


def keep(cache: Path, name: str, sources: list[str], make: Callable[[Path], None]) -> Path:
    """Return the folder that was filled from these sources: now, by `make`, or earlier; what fails is not kept.

    The sources are all that the result depends on: what is read, how it is called, and which version reads it.
    """
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"lock-of-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as unfinished:
                (made := Path(unfinished, name)).mkdir()
                make(made)
                made.rename(folder)
    return folder
