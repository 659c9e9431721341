"""Profiles: gates and their credentials by name, so that no credential is needed on a command line.

They are stored in ~/.config/asyncgate/profiles.json, which only its owner can read.  A profile is a URL and a
credential that belong together: neither is ever combined with a URL or a credential from elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

DEFAULT_PROFILE = "default"


class StoredProfile(msgspec.Struct, omit_defaults=True):
    """One gate and the credential for it."""

    url: str
    token: str = ""
    plain_http: bool = False        # the owner allows sending the credential unencrypted


class Connection(NamedTuple):
    """The URL of a gate and a credential; None means the value from the environment."""

    url: str | None
    token: str | None


def profiles_file() -> Path:
    """Return the path of the file of profiles."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "asyncgate" / "profiles.json"


def read_profiles() -> dict[str, StoredProfile]:
    """Read the profiles; raises ValueError if the file is invalid, or if others may read it."""
    path = profiles_file()
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ValueError(f"{path} contains credentials, and other users may read it: chmod 600 {path}")
    try:
        return msgspec.json.decode(text, type=dict[str, StoredProfile])
    except msgspec.DecodeError as wrong:
        raise ValueError(f"{path} is not a file of profiles ({wrong}): remove it and run `asyncgate login`") from None


def write_profiles(profiles: dict[str, StoredProfile]) -> None:
    """Write the profiles to a file that only its owner can read."""
    path = profiles_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(profiles), indent=2))
    fresh.replace(path)


def choose_connection(name: str | None, url: str | None, token: str | None) -> Connection:
    """Return the connection: from the command line, else from a profile, else from the environment.

    The command line or ASYNCGATE_PROFILE names the profile; the profile named default is used if nothing else is
    given.  Raises ValueError.
    """
    if name and (url or token):
        raise ValueError("a profile contains URL and credential: give --profile, or --url and --token")
    if url or token:
        return Connection(url, token)
    chosen = name or os.environ.get("ASYNCGATE_PROFILE")
    if not chosen and (os.environ.get("ASYNCGATE_URL") or os.environ.get("ASYNCGATE_API_KEY")
                       or os.environ.get("ASYNCGATE_API_KEY_FILE")):
        return Connection(None, None)
    kept = read_profiles()
    if chosen and chosen not in kept:
        raise ValueError(f"there is no profile {chosen!r}{format_others(kept)}; "
                         f"create it: asyncgate login --profile {chosen}")
    profile = kept.get(chosen or DEFAULT_PROFILE)
    if profile is None:
        return Connection(None, None)
    if profile.plain_http:
        os.environ["ASYNCGATE_PLAIN_HTTP"] = "true"
    return Connection(profile.url, profile.token)


def format_others(kept: dict[str, StoredProfile]) -> str:
    """List the names of the existing profiles."""
    return f" among {', '.join(sorted(kept))}" if kept else ""
