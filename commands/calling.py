"""What every command that calls a gate shares: where the gate is, who calls, and how the program ends.

The exit status tells what kind of answer it was: 0 done, 1 something broke, 2 the request or the configuration is
wrong, 3 not allowed, 4 not there, 5 in conflict with the state of things, 6 too many requests, 7 no gate answers; of a
task that is waited for: 8 it failed, 9 it was canceled, 10 it has not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import click

from asyncgate.clients.http import DEFAULT_URL, Http, Refusal, Unreachable, read_token_file
from asyncgate.commands import profiles, remembered
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import escape_text
from asyncgate.parts.model import durations

F = TypeVar("F", bound=Callable[..., Any])

EXIT_BROKEN, EXIT_WRONG, EXIT_DENIED, EXIT_NOT_FOUND, EXIT_CONFLICT = range(1, 6)
EXIT_TOO_MANY, EXIT_NO_GATE, EXIT_FAILED, EXIT_CANCELED, EXIT_NOT_ENDED = range(6, 11)
EXIT_INTERRUPTED = 130       # by Ctrl-C, as a shell says it
EXIT_OF_STATUS = {400: EXIT_WRONG, 413: EXIT_WRONG, 415: EXIT_WRONG, 401: EXIT_DENIED, 403: EXIT_DENIED,
                  404: EXIT_NOT_FOUND, 409: EXIT_CONFLICT, 429: EXIT_TOO_MANY}
EXIT_STATUS = ("Exit status: 0 done, 1 broken, 2 wrong request or configuration, 3 not allowed, 4 not found, "
               "5 conflict, 6 too many, 7 no gate answers; run-task and wait: 8 failed, 9 canceled, 10 not ended.")


# Options.


class Id(click.ParamType[str]):
    """An id, whole or as short as a table on a terminal has shown it."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the whole id."""
        try:
            return remembered.expand_id(str(value))
        except remembered.Ambiguous as wrong:
            self.fail(str(wrong), param, ctx)


class Duration(click.ParamType[float]):
    """A number of seconds, or a duration with its unit."""

    name = "duration"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; whole ones as a whole number."""
        if isinstance(value, int | float):
            return value
        try:
            seconds = durations.parse_duration(str(value))
        except ValueError:
            self.fail(f"{value!r} is no duration: give seconds, or a number with ms, s, m, h, d or w, as in 90d or "
                      "1h30m", param, ctx)
        if not self.least <= seconds < float("inf"):
            self.fail(f"{value!r} is less than {self.least:g} seconds", param, ctx)
        return int(seconds) if seconds == int(seconds) else seconds


class Moment(click.ParamType[str]):
    """A day, a moment or a duration from now."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the moment as RFC 3339 writes it."""
        try:
            return durations.parse_moment(str(value).strip('"'), datetime.now(UTC)).isoformat()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no moment: give a day as in 2026-12-31, a time as in 2026-12-31T18:00 (UTC, "
                      "unless it ends with an offset), or how long from now, as in 90d", param, ctx)


class Credential(click.ParamType[str]):
    """A credential, or @FILE that holds it: what stands on a command line, all users of a machine can see."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read the file, if it is one."""
        if not str(value).startswith("@"):
            return str(value)
        try:
            return read_token_file(str(value)[1:], param.opts[0] if param else "the credential")
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


ID_TYPE, DURATION, MOMENT, CREDENTIAL = Id(), Duration(), Moment(), Credential()
GATE = [
    click.Option(["--url"], help=f"Where the gate is; default ASYNCGATE_URL, else {DEFAULT_URL}."),
    click.Option(["--token"], type=CREDENTIAL, metavar="TOKEN | @FILE",
                 help="The credential; default ASYNCGATE_API_KEY. Better kept by `asyncgate login`."),
    click.Option(["--profile"], metavar="NAME", help="A gate that `asyncgate login` knows, instead of both."),
]
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def at_gate(run: F) -> F:
    """Give a command the options that say where the gate is, and hand it what they add up to."""
    if not hasattr(run, "__click_params__"):
        run.__click_params__ = []       # type: ignore[attr-defined]

    @wraps(run)
    def found(*, url: str | None, token: str | None, profile: str | None, **given: Any) -> Any:
        return run(at=find_connection(profile, url, token), **given)

    found.__click_params__ = [*GATE[::-1], *run.__click_params__]       # type: ignore[attr-defined]
    return found        # type: ignore[return-value]


def find_connection(profile: str | None, url: str | None, token: str | None) -> Connection:
    """Return where to go, or end the program."""
    try:
        return profiles.choose_connection(profile, url, token)
    except ValueError as wrong:
        raise exit_with(str(wrong), EXIT_WRONG) from None


# Calls.


@contextmanager
def gate_at(at: Connection) -> Iterator[Http]:
    """Call a gate; a refusal ends the program with its class as exit status."""
    with exit_on_refusal(), Http(at.url, at.token) as gate:
        yield gate


@contextmanager
def exit_on_refusal() -> Iterator[None]:
    """Make of each no, and of a gate that is not there, the end of the program."""
    try:
        yield
    except Refusal as no:
        again = f" (try again in {no.retry_after:g} s)" if no.retry_after is not None else ""
        login = "; `asyncgate login` keeps a credential" * (no.status == 401)
        raise exit_with(f"{no.code} ({no.status}): {escape_text(no.message)}{again}{login}",
                    EXIT_OF_STATUS.get(no.status, EXIT_BROKEN)) from None
    except Unreachable as none:
        raise exit_with(str(none), EXIT_NO_GATE) from None
    except ValueError as wrong:
        raise exit_with(str(wrong), EXIT_WRONG) from None


def exit_with(message: str, status: int) -> click.exceptions.Exit:
    """Print what went wrong; return what ends the program with this exit status."""
    click.echo(f"Error: {message}", err=True)
    return click.exceptions.Exit(status)


def exit_for(wrong: Exception) -> click.exceptions.Exit:
    """End the program because of settings, or of what they name."""
    return exit_with(escape_text(str(wrong)), getattr(wrong, "exit_status", EXIT_WRONG))


# Names of commands.


class CommandGroup(click.Group):
    """A group that tells which command may have been meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one is near."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as unknown:
            raise click.UsageError(unknown.message + suggest_names(args[0], self.list_commands(ctx)), ctx) from None


def suggest_names(said: str, names: list[str]) -> str:
    """Ask for the names that are near to what was said."""
    said = said.replace("_", "-")
    near = get_close_matches(said, names, 3) or [name for name in names if said in name][:3]
    return f" Did you mean {' or '.join(near)}?" if near else ""
