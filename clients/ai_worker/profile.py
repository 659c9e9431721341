"""The instruction profile of an AI worker: who it is, which model it asks, what tools it has, and how far it may go.

A profile is a YAML file without a secret in it.  It names the environment variables that hold secrets; a secret may
also be kept in a file, named by the same variable with _FILE at its end.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.model.settings import SettingsError, read_text, read_yaml

T = TypeVar("T")
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]
Short = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[int, Meta(ge=200, le=2**24)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
LEAST_SECRET = 8        # characters; a shorter one could not be told from ordinary text, and so not be kept out of it
OURS = frozenset({"messages", "model", "n", "stream", "stream_options", "tools"})   # what this program says to a model


class ProfileError(ValueError):
    """Says in one line which field of a profile is wrong, and why; the worker does not start."""


class Limits(Struct, forbid_unknown_fields=True, frozen=True):
    """How far one task may go; steps, tokens and seconds count over all workers that take turns at it."""

    steps: Count = 20                       # answers of the model
    tokens: Count = 200_000                 # as the endpoint counts them, questions and answers
    seconds: Seconds = 900.0
    start_seconds: Seconds = 60.0           # for the start of an MCP server
    tool_seconds: Seconds = 60.0            # for one call of a tool
    tool_result_bytes: Bytes = 16 * 2**10   # of one result that the model sees; the rest is cut off
    payload_bytes: Bytes = 64 * 2**10       # of the task's payload; a larger one fails the task
    result_bytes: Bytes = 256 * 2**10       # of the final answer
    checkpoint_bytes: Bytes = 48 * 2**10    # of the conversation in a progress report
    answer_seconds: Seconds = 120.0         # for one answer of the model
    answer_tries: Count = 5
    retry_seconds: Seconds = 1.0            # before the second try; each next one waits twice as long
    longest_wait_seconds: Seconds = 60.0    # that the model may ask to wait; for more the task goes back to the gate


class Server(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One MCP server: a program to start, or an address; and the tools of it that the model may use."""

    tools: Annotated[list[Name], Meta(min_length=1)]    # names; "*" stands for any characters
    command: Annotated[list[Text], Meta(min_length=1)] | None = None
    cwd: Text | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[Name] = field(default_factory=list)   # variables of this environment that the program is given
    url: Text | None = None
    token_env: Name | None = None                       # the variable with the bearer token

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (a program to start) or url (the address of a server)")
        if self.url is not None:
            web_address(self.url, bool(self.token_env))
        if self.url and (self.cwd or self.env or self.secrets):
            raise ValueError("cwd, env and secrets are for a server with a command")
        if self.command and self.token_env:
            raise ValueError("token_env is for a server with a url; a program gets its secrets by the name in secrets")


class Profile(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Everything that makes a worker of a model."""

    instructions: Text
    model: Name
    endpoint: Text                                      # without /chat/completions
    types: Annotated[list[Name], Meta(min_length=1)]    # of the tasks that it takes
    name: Short = "ai"
    capabilities: list[Name] = field(default_factory=list)
    api_key_env: Name | None = None                     # the variable with the key of the endpoint
    checkpoint_key_env: Name | None = None              # and with the one that seals checkpoints; default the same
    parameters: dict[str, Any] = field(default_factory=dict)    # handed to the endpoint as they are
    finish_tool: bool = True                            # whether the model may end by calling `finish`
    servers: dict[str, Server] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        web_address(self.endpoint, bool(self.api_key_env))
        if taken := sorted(OURS & set(self.parameters)):
            raise ValueError(f"parameters: {taken[0]!r} is the worker's own to say")


def web_address(url: str, with_secret: bool) -> None:
    """See that a URL can be called, and shows no secret to the network."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"{url!r} is no http or https URL")
    if where.username or where.password or where.query or where.fragment:
        raise ValueError("a URL here has no user, no query and no fragment: they may be secrets, and are logged")
    if with_secret and where.scheme == "http" and not is_loopback(where.hostname):
        raise ValueError(f"plain http would show the key to the network on its way to {where.hostname}; use https")


def load_profile(path: str) -> Profile:
    """Read a profile; raises ProfileError that names the field."""
    try:
        tree = read_yaml(path)
    except SettingsError as wrong:
        raise ProfileError(str(wrong)) from None
    if not isinstance(tree, dict):
        raise ProfileError(f"a profile is a mapping of fields (file {path})")
    try:
        return profile_of({"name": named_for(path), **tree})
    except ProfileError as wrong:
        raise ProfileError(f"{wrong} (file {path})") from None


def profile_of(tree: Mapping[str, Any]) -> Profile:
    """Make a profile of what a file says."""
    said = dict(tree)
    servers = said.pop("servers", None) or {}
    if not isinstance(servers, dict):
        raise ProfileError("servers: a mapping of names to servers")
    for name in servers:
        shaped(Short, name, f"servers: the name {name!r}")
    limits = shaped(Limits, said.pop("limits", None) or {}, "limits")
    profile: Profile = shaped(Profile, said, "")
    return replace(profile, limits=limits,
                   servers={name: shaped(Server, one, f"servers.{name}") for name, one in servers.items()})


def shaped(kind: Any, said: Any, where: str) -> Any:
    """Convert a part of a profile; what is wrong with it is said with the name of its field."""
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as wrong:
        text, _, at = str(wrong).partition(" - at `$")
        if missing := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text):
            at, text = f".{missing[2]}", "is needed" if missing[1][0] == "m" else "is no field of a profile"
        place = f"{where}{at.rstrip('`')}".strip(".")
        raise ProfileError(f"{place}: {text}" if place else text) from None


def named_for(path: str) -> str:
    """Make a name of the file's."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem).strip("-_")[:32] or "ai"


# Secrets.


class Secrets:
    """The secrets that a profile names: their values, and how to keep them out of what this worker tells."""

    def __init__(self, profile: Profile, environ: Mapping[str, str]) -> None:
        names = {name: "api_key_env" for name in [profile.api_key_env] if name}
        names |= {name: "checkpoint_key_env" for name in [profile.checkpoint_key_env] if name}
        for server, one in profile.servers.items():
            names |= dict.fromkeys(one.secrets, f"servers.{server}.secrets")
            names |= {name: f"servers.{server}.token_env" for name in [one.token_env] if name}
        self.values = {name: secret(name, where, environ) for name, where in names.items()}
        own = environ.get("ASYNCGATE_API_KEY", "")
        found = {*self.values.values(), *([own] if len(own) >= LEAST_SECRET else [])}
        spelled = found | {msgspec.json.encode(value).decode()[1:-1] for value in found}
        longest_first = sorted(spelled, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def sealing_key(self, profile: Profile) -> bytes:
        """Return the key that seals checkpoints: all workers of a profile have it, and nobody else of the tenant."""
        name = profile.checkpoint_key_env or profile.api_key_env
        secret = self.values[name].encode() if name else token_bytes(32)        # then only this process goes on
        return hmac.digest(secret, b"asyncgate checkpoint " + profile.name.encode(), "sha256")

    def hidden(self, told: T) -> T:
        """Return a text or a JSON value with every secret in it blotted out, and without what no gate takes."""
        if isinstance(told, str):
            return self._pattern.sub("[secret]", told).replace("\0", "\ufffd")  # type: ignore[return-value]
        if isinstance(told, dict):
            return {self.hidden(key): self.hidden(value) for key, value in told.items()}  # type: ignore[return-value]
        return [self.hidden(one) for one in told] if isinstance(told, list) else told  # type: ignore[return-value]


def secret(name: str, where: str, environ: Mapping[str, str]) -> str:
    """Read a secret from the environment, or from the file that the environment names."""
    given, path = environ.get(name), environ.get(f"{name}_FILE")
    if given is not None and path is not None:
        raise ProfileError(f"{where}: {name} is given twice, by itself and as {name}_FILE")
    if given is None and path is None:
        raise ProfileError(f"{where}: neither {name} nor {name}_FILE is set in the environment")
    try:
        value = given if path is None else read_text(path, f"environment {name}_FILE")
    except SettingsError as wrong:
        raise ProfileError(f"{where}: {wrong}") from None
    value = (value or "").strip()
    if len(value) < LEAST_SECRET:
        raise ProfileError(f"{where}: {name} is shorter than {LEAST_SECRET} characters: secrets are blotted out of all "
                           "that this worker says, and so short a one would be of ordinary words too; an endpoint "
                           "that wants no key needs no api_key_env")
    if not value.isascii() or not value.isprintable():
        raise ProfileError(f"{where}: {name} holds characters that no header can")
    return value
