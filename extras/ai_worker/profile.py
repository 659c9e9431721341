"""The profile of an AI worker: its instructions, model, tools and limits.

A profile is a YAML file without secrets.  It names the environment variables that hold the secrets.  For a secret in a
file, the variable with _FILE at its end names that file.
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
NameText = Annotated[str, Meta(min_length=1, max_length=100)]
Short = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[int, Meta(ge=200, le=2**24)]
LimitSeconds = Annotated[float, Meta(gt=0, le=86_400)]
LEAST_SECRET = 8        # characters; hiding a shorter one would hide ordinary words too
SET_BY_PROGRAM = frozenset({"messages", "model", "n", "stream", "stream_options", "tools"})   # set by this program


class ProfileError(ValueError):
    """The profile is invalid, so the worker does not start; the one-line text names the field and the reason."""


class JobLimits(Struct, forbid_unknown_fields=True, frozen=True):
    """The limits of one task; steps, tokens and seconds add up over all its workers."""

    steps: PositiveInt = 20                       # answers of the model
    tokens: PositiveInt = 200_000                 # as the endpoint counts them, prompts and answers
    seconds: LimitSeconds = 900.0
    start_seconds: LimitSeconds = 60.0           # for the start of an MCP server
    tool_seconds: LimitSeconds = 60.0            # for one call of a tool
    tool_result_bytes: Bytes = 16 * 2**10   # of one tool's result; the rest is cut off
    payload_bytes: Bytes = 64 * 2**10       # of the task's payload; a larger one fails the task
    result_bytes: Bytes = 256 * 2**10       # of the final answer
    checkpoint_bytes: Bytes = 48 * 2**10    # of the conversation in a progress report
    answer_seconds: LimitSeconds = 120.0         # for one answer of the model
    answer_tries: PositiveInt = 5
    retry_seconds: LimitSeconds = 1.0            # before the second try; each next one waits twice as long
    longest_wait_seconds: LimitSeconds = 60.0    # of one wait that the endpoint asks for; above it, release the task


class ServerProfile(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One MCP server: a program to start, or a URL; and its tools that the model may use."""

    tools: Annotated[list[NameText], Meta(min_length=1)]    # names; "*" matches any characters
    command: Annotated[list[Text], Meta(min_length=1)] | None = None
    cwd: Text | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[NameText] = field(default_factory=list)   # variables of this environment that the program gets
    url: Text | None = None
    token_env: NameText | None = None                       # the variable with the bearer token

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
    """All fields of a profile."""

    instructions: Text
    model: NameText
    endpoint: Text                                      # without /chat/completions
    types: Annotated[list[NameText], Meta(min_length=1)]    # of the tasks that it takes
    name: Short = "ai"
    capabilities: list[NameText] = field(default_factory=list)
    api_key_env: NameText | None = None                     # the variable with the key of the endpoint
    checkpoint_key_env: NameText | None = None              # with the key that seals checkpoints; default: api_key_env
    parameters: dict[str, Any] = field(default_factory=dict)    # sent to the endpoint unchanged
    finish_tool: bool = True                            # whether the model may end by calling `finish`
    servers: dict[str, ServerProfile] = field(default_factory=dict)
    limits: JobLimits = field(default_factory=JobLimits)

    def __post_init__(self) -> None:
        web_address(self.endpoint, bool(self.api_key_env))
        if taken := sorted(SET_BY_PROGRAM & set(self.parameters)):
            raise ValueError(f"parameters: {taken[0]!r} is set by the worker itself; remove it")


def web_address(url: str, with_secret: bool) -> None:
    """Check that a URL is valid and that its secret is encrypted on the network."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"{url!r} is not an http or https URL")
    if where.username or where.password or where.query or where.fragment:
        raise ValueError("a URL here must have no user, query or fragment: they may hold secrets, and URLs are logged")
    if with_secret and where.scheme == "http" and not is_loopback(where.hostname):
        raise ValueError(f"plain http would show the key to the network on its way to {where.hostname}; use https")


def load_profile(path: str) -> Profile:
    """Read a profile; raises ProfileError, which names the invalid field."""
    try:
        tree = read_yaml(path)
    except SettingsError as wrong:
        raise ProfileError(str(wrong)) from None
    if not isinstance(tree, dict):
        raise ProfileError(f"a profile must be a mapping of fields (file {path})")
    try:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem).strip("-_")[:32] or "ai"
        return convert_profile({"name": name, **tree})
    except ProfileError as wrong:
        raise ProfileError(f"{wrong} (file {path})") from None


def convert_profile(tree: Mapping[str, Any]) -> Profile:
    """Convert the content of a file into a profile."""
    fields = dict(tree)
    servers = fields.pop("servers", None) or {}
    if not isinstance(servers, dict):
        raise ProfileError("servers: must be a mapping of names to servers")
    for name in servers:
        shaped(Short, name, f"servers: the name {name!r}")
    limits = shaped(JobLimits, fields.pop("limits", None) or {}, "limits")
    profile: Profile = shaped(Profile, fields, "")
    return replace(profile, limits=limits,
                   servers={name: shaped(ServerProfile, server, f"servers.{name}") for name, server in servers.items()})


def shaped(kind: Any, tree: Any, where: str) -> Any:
    """Convert a part of a profile; raises ProfileError, which names the invalid field."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as wrong:
        text, _, at = str(wrong).partition(" - at `$")
        if missing := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text):
            at, text = f".{missing[2]}", "is required" if missing[1][0] == "m" else "is not a field of a profile"
        place = f"{where}{at.rstrip('`')}".strip(".")
        raise ProfileError(f"{place}: {text}" if place else text) from None


# Secrets.


class Secrets:
    """The secrets that a profile names: their values, and how to hide them in all that this worker writes."""

    def __init__(self, profile: Profile, environ: Mapping[str, str]) -> None:
        names = {name: "api_key_env" for name in [profile.api_key_env] if name}
        names |= {name: "checkpoint_key_env" for name in [profile.checkpoint_key_env] if name}
        for server, settings in profile.servers.items():
            names |= dict.fromkeys(settings.secrets, f"servers.{server}.secrets")
            names |= {name: f"servers.{server}.token_env" for name in [settings.token_env] if name}
        self.values = {name: read_secret(name, where, environ) for name, where in names.items()}
        own = environ.get("ASYNCGATE_API_KEY", "")
        secrets = {*self.values.values(), *([own] if len(own) >= LEAST_SECRET else [])}
        spelled = secrets | {msgspec.json.encode(value).decode()[1:-1] for value in secrets}
        longest_first = sorted(spelled, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def sealing_key(self, profile: Profile) -> bytes:
        """Return the key that seals checkpoints: only workers with this profile's secret have it."""
        name = profile.checkpoint_key_env or profile.api_key_env
        secret = self.values[name].encode() if name else token_bytes(32)        # then only this process can resume
        return hmac.digest(secret, b"asyncgate checkpoint " + profile.name.encode(), "sha256")

    def hidden(self, told: T) -> T:
        """Return a text or a JSON value with every secret replaced, and without NUL, which no gate accepts."""
        if isinstance(told, str):
            return self._pattern.sub("[secret]", told).replace("\0", "\ufffd")  # type: ignore[return-value]
        if isinstance(told, dict):
            return {self.hidden(key): self.hidden(value) for key, value in told.items()}  # type: ignore[return-value]
        return [self.hidden(part) for part in told] if isinstance(told, list) else told  # type: ignore[return-value]


def read_secret(name: str, where: str, environ: Mapping[str, str]) -> str:
    """Read a secret from a variable, or from the file that the variable with _FILE names."""
    given, path = environ.get(name), environ.get(f"{name}_FILE")
    if given is not None and path is not None:
        raise ProfileError(f"{where}: {name} and {name}_FILE are both set; unset one of them")
    if given is None and path is None:
        raise ProfileError(f"{where}: neither {name} nor {name}_FILE is set in the environment")
    try:
        value = given if path is None else read_text(path, f"environment {name}_FILE")
    except SettingsError as wrong:
        raise ProfileError(f"{where}: {wrong}") from None
    value = (value or "").strip()
    if len(value) < LEAST_SECRET:
        raise ProfileError(f"{where}: {name} is shorter than {LEAST_SECRET} characters: this worker hides secrets in "
                           "all that it writes, and hiding so short a text would hide ordinary words too; for an "
                           "endpoint without a key leave out api_key_env")
    if not value.isascii() or not value.isprintable():
        raise ProfileError(f"{where}: {name} holds characters that no HTTP header can")
    return value
