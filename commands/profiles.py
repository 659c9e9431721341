"""Gates that one has logged in to, by name, so that no credential has to stand on a command line.

They are in ~/.config/asyncgate/profiles.json, readable by their owner alone.  A profile is an address and a credential
together: neither is ever used with the other half of something else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

DEFAULT_PROFILE = "default"


class StoredProfile(msgspec.Struct, omit_defaults=True):
    """One gate, and the credential for it."""

    url: str
    token: str = ""
    plain_http: bool = False        # its owner has said that the credential may go there unencrypted


class Connection(NamedTuple):
    """Where a gate is and what lets one in; None is what the environment says."""

    url: str | None
    token: str | None


def profiles_file() -> Path:
    """Return where the profiles are kept."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "asyncgate" / "profiles.json"


def read_profiles() -> dict[str, StoredProfile]:
    """Read the profiles; raises ValueError for a file that is none, or that others may read."""
    path = profiles_file()
    try:
        found = path.stat().st_mode
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if found & 0o077:
        raise ValueError(f"{path} holds credentials, and others may read it: chmod 600 {path}")
    try:
        return msgspec.json.decode(text, type=dict[str, StoredProfile])
    except msgspec.DecodeError as wrong:
        raise ValueError(f"{path} is no file of profiles ({wrong}): remove it and run `asyncgate login`") from None


def write_profiles(profiles: dict[str, StoredProfile]) -> None:
    """Write the profiles, for their owner alone."""
    path = profiles_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(profiles), indent=2))
    fresh.replace(path)


def choose_connection(name: str | None, url: str | None, token: str | None) -> Connection:
    """Return where to go: what stands on the command line, else a profile, else what the environment says.

    The profile is the one that is named, on the command line or as ASYNCGATE_PROFILE; where nothing at all is said,
    the one called default.  Raises ValueError.
    """
    if name and (url or token):
        raise ValueError("a profile is an address and a credential: give --profile, or --url and --token")
    if url or token:
        return Connection(url, token)
    said = name or os.environ.get("ASYNCGATE_PROFILE")
    if not said and (os.environ.get("ASYNCGATE_URL") or os.environ.get("ASYNCGATE_API_KEY")
                     or os.environ.get("ASYNCGATE_API_KEY_FILE")):
        return Connection(None, None)
    kept = read_profiles()
    if said and said not in kept:
        raise ValueError(f"there is no profile {said!r}{format_others(kept)}; "
                         f"make it: asyncgate login --profile {said}")
    profile = kept.get(said or DEFAULT_PROFILE)
    if profile is None:
        return Connection(None, None)
    if profile.plain_http:
        os.environ["ASYNCGATE_PLAIN_HTTP"] = "true"
    return Connection(profile.url, profile.token)


def format_others(kept: dict[str, StoredProfile]) -> str:
    """Name the profiles that there are."""
    return f" among {', '.join(sorted(kept))}" if kept else ""
