"""File rights: the database, keys, the settings file, files with secrets, and the archive."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import findings
from asyncgate.parts.model.settings import Settings, list_settings, mask_credentials
from asyncgate.parts.model.words import say_count

DATABASE = "the database"


def check_rights(at: Installation) -> Iterator[findings.Finding]:
    """Look for files with secrets that others may read, and for folders in which others may replace them."""
    if os.name != "posix":
        yield findings.note("who may read the files is not looked at on this system")
        return
    looked, flaws = 0, list[findings.Finding]()
    for path, what in list_private_files(at):
        looked += 1
        flaws += judge_file(path, what)
        if what == DATABASE and os.access(path, os.R_OK) and not os.access(path, os.W_OK):
            flaws.append(findings.alarm(f"{DATABASE} {path} may not be written by this user",
                                        f"chmod u+w {path}, or run this as the gate's user"))
    if (file := at.database_file) and file.parent.is_dir():
        flaws += judge_folder(file.parent, "the folder of the database")
    yield from flaws
    if not flaws and looked:
        yield findings.all_well(f"{say_count(looked, 'private file')}, which only their owner may read")


def list_private_files(at: Installation) -> Iterator[tuple[Path, str]]:
    """Yield the files that only the gate's own user may read."""
    security = at.settings.security
    if file := at.database_file:
        for ending in ("", "-wal", "-shm", ".lock"):
            if (part := file.with_name(file.name + ending)).exists():
                yield part, DATABASE
    for path, what in ((security.tls.private_key_path or security.tls.certificate_path, "the key of TLS"),
                       (security.jwt.private_key_path, "the key that signs access tokens")):
        if path:
            yield Path(path), what
    yield from list_secret_sources(at)


def list_secret_sources(at: Installation) -> Iterator[tuple[Path, str]]:
    """Yield the files that settings with secrets come from."""
    sources: dict[str, str] = {}
    for setting in list_settings(Settings):
        kind, _, where = at.origins.get(setting.name, "").partition(" ")
        value = at.value(setting.name)
        if not value or not (setting.secret or (isinstance(value, str) and mask_credentials(value) != value)):
            continue
        if kind == "file":
            sources[where] = "the settings file, which holds secrets,"
        elif kind == "environment" and where.endswith("_FILE") and at.environ.get(where):
            sources[at.environ[where]] = f"the file of {where}"
    yield from ((Path(path), what) for path, what in sources.items())


def judge_file(path: Path, what: str) -> Iterator[findings.Finding]:
    """Yield what is wrong with the rights of a private file."""
    shown = mask_credentials(str(path))     # a secret may have been pasted in place of the path
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        yield findings.alarm(f"{what} {shown} cannot be read: {error.strerror}",
                             f"make {shown}, or correct the setting")
        return
    if path.is_dir():
        yield findings.alarm(f"{what} {shown} is a folder", "correct the setting, so that it names a file")
    elif mode & 0o007:
        yield findings.alarm(f"{what} {shown} is open to every user of this machine (mode {mode:o})",
                             f"chmod 600 {shown}")
    elif mode & 0o070:
        yield findings.warn(f"{what} {shown} is open to its group (mode {mode:o})", f"chmod 600 {shown}")
    if not os.access(path, os.R_OK):
        yield findings.alarm(f"{what} {shown} may not be read by this user",
                             f"run this as the gate's user, or chown {shown}")


def judge_folder(folder: Path, what: str) -> Iterator[findings.Finding]:
    """Yield what is wrong with the rights of a folder."""
    mode = folder.stat().st_mode
    if mode & 0o002 and not mode & stat.S_ISVTX:
        yield findings.alarm(f"{what} {folder.resolve()} lets every user put another file in the place of this one "
                             f"(mode {stat.S_IMODE(mode):o})", f"chmod 700 {folder.resolve()}")
    if not os.access(folder, os.W_OK | os.X_OK):
        yield findings.alarm(f"{what} {folder.resolve()} may not be written by this user",
                             f"run this as the gate's user, or chown {folder.resolve()}")


def check_archive(at: Installation) -> Iterator[findings.Finding]:
    """Look whether the archive can be written."""
    if not at.settings.archive.directory:
        return
    folder = Path(at.settings.archive.directory)
    if not folder.is_dir():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if folder.exists() or not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            yield findings.alarm(f"the archive cannot be written: {folder} is not a folder, and none can be made there",
                                 "set archive.directory to a folder that the gate's user may write")
        else:
            yield findings.note(f"the archive {folder} is not there yet; the first run makes it")
        return
    flaws = [*judge_folder(folder, "the archive")]
    if os.name == "posix" and folder.stat().st_mode & 0o007 and not flaws:
        flaws.append(findings.warn(f"the archive {folder} is open to every user of this machine",
                                   f"chmod 700 {folder}"))
    yield from flaws or [findings.all_well(f"the archive {folder} can be written")]
