"""The machine: space and speed of the disk, the clock, Python and the packages."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from asyncgate import __version__
from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import findings

MIB = 2**20
LITTLE_BYTES, LEAST_BYTES = 1024 * MIB, 128 * MIB       # of free space: soon there is none, there is none
LEAST_FILES = 1000
FLUSHES = 5
SLOW_FLUSH_MS, BAD_FLUSH_MS = 25.0, 250.0
TESTED_SQLITE = (3, 40)         # the oldest one that the tests run on


def check_disk(at: Installation) -> Iterator[findings.Finding]:
    """Look at the space of the folders that the gate writes to, and at the time that a commit waits for the disk."""
    file = at.database_file
    if file and file.parent.is_dir():
        size = file.stat().st_size if file.exists() else 0
        yield from judge_space("the database", file.parent, size)
        yield from examine_flush(file.parent)
    if (archive := at.settings.archive.directory) and Path(archive).is_dir():
        yield from judge_space("the archive", Path(archive), 0)


def judge_space(whose: str, folder: Path, size: int) -> Iterator[findings.Finding]:
    """Yield how much space a folder has left; `size` is what a copy of the database takes."""
    left, cure = shutil.disk_usage(folder).free, f"free space in the file system of {folder.resolve()}"
    seen = f"the disk of {whose} has {left // MIB:,} MiB left"
    if left < LEAST_BYTES:
        yield findings.alarm(f"{seen}: the gate will soon refuse every write", cure)
    elif left < LITTLE_BYTES:
        yield findings.warn(seen, cure)
    elif left < size:
        yield findings.note(f"{seen}, and the database has {size // MIB:,}: a backup beside it does not fit",
                            "make backups on another disk")
    else:
        yield findings.all_well(seen)
    files = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if files and files.f_files and files.f_favail < LEAST_FILES:
        yield findings.alarm(f"the file system of {whose} takes {files.f_favail} more files", cure)


def examine_flush(folder: Path) -> Iterator[findings.Finding]:
    """Yield how long a commit waits for the disk, or why none can be written, such as on a full disk."""
    try:
        yield from judge_flush(measure_flush_ms(folder))
    except PermissionError:
        yield findings.note("how long a commit waits for the disk is not measured: this user may not write there",
                            "run this as the gate's user")
    except OSError as error:
        yield findings.alarm(f"the disk of the database takes no write: {error.strerror}",
                             f"make the file system of {folder.resolve()} writable, and free space in it")


def measure_flush_ms(folder: Path) -> float:
    """Write to a file without a name in a folder, wait until it is on the disk, and return the shortest wait."""
    waits = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(FLUSHES):
            file.write(bytes(4096))
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            waits.append(time.perf_counter() - begun)
    return min(waits) * 1000


def judge_flush(shortest_ms: float) -> Iterator[findings.Finding]:
    """Yield what the wait for the disk means."""
    seen = f"a commit waits {shortest_ms:.1f} ms for the disk of the database"
    if shortest_ms >= BAD_FLUSH_MS:
        yield findings.warn(f"{seen}: so every call that writes waits", "move the database to a local SSD")
    elif shortest_ms >= SLOW_FLUSH_MS:
        yield findings.note(f"{seen}: at most {1000 / shortest_ms:.0f} commits a second, each for many calls",
                            "move the database to a local SSD, if calls are too slow")
    else:
        yield findings.all_well(seen)


def check_clock(at: Installation) -> Iterator[findings.Finding]:
    """Look whether the clock of this machine can be right: it is not before this program was installed."""
    now, installed = at.clock(), Path(__file__).stat().st_mtime
    if now < installed - 86_400:
        yield findings.alarm(
            f"the clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC, which is before this "
            "program was installed", "set the clock, and keep it right: `timedatectl set-ntp true`")
    else:
        yield findings.all_well(f"the clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC")


def check_packages(at: Installation) -> Iterator[findings.Finding]:
    """Look for packages below the versions that the tests ran on."""
    try:
        wanted = requires("asyncgate") or []
    except PackageNotFoundError:        # a bare checkout
        wanted = []
    old = list(find_old_packages(wanted))
    yield from (findings.warn(f"{name} is {has}, and the gate was tested with {least} or newer",
                              f"pip install --upgrade '{name}>={least}'") for name, has, least in old)
    if at.database_file and sqlite3.sqlite_version_info < TESTED_SQLITE:
        yield findings.warn(f"SQLite is {sqlite3.sqlite_version}, and the gate was tested with 3.40 or newer",
                            "run the gate with a Python whose SQLite is newer")
    elif not old:
        yield findings.all_well(f"asyncgate {__version__}, Python {platform.python_version()}, "
                                f"SQLite {sqlite3.sqlite_version}, packages as tested")


def find_old_packages(wanted: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and least version of each package that is older than it should be, or missing."""
    for requirement in wanted:
        asked = re.match(r"([\w.-]+)(?:\[.*?\])?>=([0-9.]+)(.*)", requirement)
        if not asked or "extra ==" in asked[3]:
            continue
        try:
            has = version(asked[1])
        except PackageNotFoundError:
            if not asked[3]:
                yield asked[1], "missing", asked[2]
            continue
        if numbers_of(has) < numbers_of(asked[2]):
            yield asked[1], has, asked[2]


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
