"""Shared by every command that calls a gate: the connection options, the call, and the exit status.

The exit status tells the kind of answer: 0 success, 1 internal error, 2 invalid request or configuration, 3 not
allowed, 4 not found, 5 conflict with the current state, 6 too many requests, 7 the gate does not answer; when waiting
for a task: 8 it failed, 9 it was canceled, 10 it has not ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import click
import msgspec

from asyncgate.clients import http
from asyncgate.commands import profiles
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import escape_text
from asyncgate.parts.model import durations, errors
from asyncgate.parts.model.words import say_length

F = TypeVar("F", bound=Callable[..., Any])

EXIT_BROKEN, EXIT_WRONG, EXIT_DENIED, EXIT_NOT_FOUND, EXIT_CONFLICT = range(1, 6)
EXIT_TOO_MANY, EXIT_NO_GATE, EXIT_FAILED, EXIT_CANCELED, EXIT_NOT_ENDED = range(6, 11)
EXIT_INTERRUPTED = 130       # by Ctrl-C, as in a shell
EXIT_OF_STATUS = {400: EXIT_WRONG, 413: EXIT_WRONG, 415: EXIT_WRONG, 401: EXIT_DENIED, 403: EXIT_DENIED,
                  404: EXIT_NOT_FOUND, 409: EXIT_CONFLICT, 429: EXIT_TOO_MANY}
EXIT_STATUS = ("Exit status: 0 success, 1 internal error, 2 invalid request or configuration, 3 not allowed, "
               "4 not found, 5 conflict, 6 too many requests, 7 no answer from the gate; run-task and wait: 8 task "
               "failed, 9 task canceled, 10 task not ended.")
WHOLE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SHORTEST = 4        # letters of a part of an id
PART_OF_ID = re.compile(r"[0-9a-fA-F][0-9a-fA-F-]{3,35}")
NO_UTF8 = "has a byte that is not UTF-8; the gate takes UTF-8 only"


# Options.


class ShortId(str):
    """A part of an id, or the name of a schedule: the gate is asked for the whole one when it is called."""

    kind: str


class Id(click.ParamType[str]):
    """An id, whole or shortened: its last 12 digits, how it begins, or the name of a schedule."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the id, marked if it is not whole."""
        text, name = str(value), param.name or "" if param else ""
        may_be_part = len(text) >= SHORTEST and (name.endswith("schedule_id") or PART_OF_ID.fullmatch(text))
        if WHOLE_ID.fullmatch(text) or not may_be_part:
            return text
        short = ShortId(text)
        short.kind = next((kind for kind in ("receipt", "schedule") if f"{kind}_id" in name), "task")
        return short


class Duration(click.ParamType[float]):
    """A number of seconds, or a duration with a unit."""

    name = "duration"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds, as an integer if possible."""
        if isinstance(value, int | float):
            return value
        try:
            seconds = durations.parse_duration(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a duration: use seconds, or numbers with ms, s, m, h, d or w, such as 90d or "
                      "1h30m", param, ctx)
        if not self.least <= seconds <= durations.LONGEST_SECONDS:      # a longer pause is an OverflowError
            self.fail(f"{value!r} is not between {self.least:g} seconds and 100 years", param, ctx)
        return int(seconds) if seconds == int(seconds) else seconds


class Moment(click.ParamType[str]):
    """A date, a time or a duration from now."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the time in RFC 3339 format."""
        try:
            return durations.parse_moment(str(value).strip('"'), datetime.now(UTC)).isoformat()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time: use a date such as 2026-12-31, a time such as 2026-12-31T18:00 (UTC "
                      "unless it has an offset), or a duration from now such as 90d", param, ctx)


class Past(click.ParamType[str]):
    """A date, a time or a duration back from now."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the time in RFC 3339 format."""
        try:
            now, seconds = datetime.now(UTC), durations.parse_seconds(str(value))
            then = durations.parse_moment(str(value), now) if seconds is None else now - timedelta(seconds=seconds)
            return then.isoformat()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time: use a duration back from now such as 1h, a date such as 2026-12-31 or "
                      "a time such as 2026-12-31T18:00", param, ctx)


class Credential(click.ParamType[str]):
    """A credential, or @FILE that contains it: all users of a machine can see its command lines."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the credential; read it from the file if one is given."""
        if not str(value).startswith("@"):
            return str(value)
        try:
            return http.read_token_file(str(value)[1:], param.opts[0] if param else "the credential")
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


ID_TYPE, DURATION, MOMENT, PAST, CREDENTIAL = Id(), Duration(), Moment(), Past(), Credential()
GATE = [
    click.Option(["--url"], help=f"URL of the gate; default ASYNCGATE_URL, else {http.DEFAULT_URL}."),
    click.Option(["--token"], type=CREDENTIAL, metavar="TOKEN | @FILE",
                 help="Credential; default ASYNCGATE_API_KEY. `asyncgate login` stores one safely."),
    click.Option(["--profile"], metavar="NAME", help="Profile of `asyncgate login`, instead of --url and --token."),
]
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def add_gate_options(run: F) -> F:
    """Add --url, --token and --profile to a command, and pass it the connection."""
    if not hasattr(run, "__click_params__"):
        run.__click_params__ = []       # type: ignore[attr-defined]

    @wraps(run)
    def run_at_gate(*, url: str | None, token: str | None, profile: str | None, **given: Any) -> Any:
        return run(at=find_connection(profile, url, token), **given)

    run_at_gate.__click_params__ = [*GATE[::-1], *run.__click_params__]       # type: ignore[attr-defined]
    return run_at_gate      # type: ignore[return-value]


def find_connection(profile: str | None, url: str | None, token: str | None) -> Connection:
    """Return the connection to use, or exit with an error."""
    try:
        return profiles.choose_connection(profile, url, token)
    except ValueError as wrong:
        raise exit_with(str(wrong), EXIT_WRONG) from None


# Calls.


@contextmanager
def connect_to_gate(at: Connection) -> Iterator[http.Http]:
    """Connect to a gate; a refusal ends the program with an exit status for its kind."""
    with exit_on_refusal(), CommandHttp(at.url, at.token) as gate:
        yield gate


class CommandHttp(http.Http):
    """The connection of a command, which asks the gate for the whole of each shortened id."""

    def send(self, operation: str, fields: Mapping[str, Any]) -> http.CheckedReply:
        """Call an operation with whole ids."""
        return super().send(operation, self._with_whole_ids(fields))

    def open_stream(self, path: str, query: Mapping[str, Any], last_id: str = "") -> Any:
        """Open a stream with whole ids."""
        return super().open_stream(path, self._with_whole_ids(query), last_id)

    def _with_whole_ids(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._find_whole(value) if isinstance(value, ShortId) else value
                for name, value in fields.items()}

    def _find_whole(self, short: ShortId) -> str:
        """Return the id that is meant; exits if several are.  If none is, the gate refuses the call that follows."""
        try:
            matches = msgspec.json.decode(super().send("find_id", {"part": str(short)}).content)["found"]
        except http.Refusal:         # an older gate, or a credential that may read no tasks
            return str(short)
        ids = [match["id"] for match in matches if match["kind"] == short.kind]
        if len(ids) > 1 and short not in ids:
            candidates = ", ".join(map(escape_text, ids))
            raise exit_with(f"{escape_text(short)} fits more than one {short.kind}, such as {candidates}; give more "
                            "digits", EXIT_WRONG)
        return ids[0] if len(ids) == 1 else str(short)


@contextmanager
def exit_on_refusal() -> Iterator[None]:
    """End the program on a refusal, or if the gate does not answer."""
    try:
        yield
    except http.Refusal as refusal:
        again = f" (try again in {say_length(refusal.retry_after)})" if refusal.retry_after is not None else ""
        login = "; `asyncgate login` stores a credential" * (refusal.status == 401)
        raise exit_with(f"{refusal.code} ({refusal.status}): {escape_text(refusal.message)}{again}{login}",
                        find_status(refusal)) from None
    except http.Unreachable as away:
        raise exit_with(escape_text(str(away)), EXIT_NO_GATE) from None
    except UnicodeEncodeError:
        raise exit_with(f"an argument of this command {NO_UTF8}", EXIT_WRONG) from None
    except ValueError as wrong:
        raise exit_with(escape_text(str(wrong)), EXIT_WRONG) from None


def find_status(refusal: http.Refusal) -> int:
    """Return the exit status of a refusal; such an answer of a proxy means that its gate gives none."""
    if refusal.code == "unexpected_answer" and refusal.status in (502, 503, 504):
        return EXIT_NO_GATE
    return EXIT_OF_STATUS.get(refusal.status, EXIT_BROKEN)


class Outage:
    """A block that may fail because the gate does not answer now: whoever follows something goes on behind it."""

    def __init__(self, *fatal: type[http.Unreachable]) -> None:
        self.fatal = fatal
        self.times, self.pause_seconds, self.text = 0, 0.0, ""      # failures in a row, until the caller sets 0

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> bool:
        if isinstance(error, self.fatal) or not isinstance(error, http.Unreachable | http.Refusal) or (
                isinstance(error, http.Refusal) and error.status not in http.AWAY_STATUSES):
            return False
        self.times, self.text = self.times + 1, f"{escape_text(str(error))}; trying again"
        self.pause_seconds = max(http.pause_after(self.times, 0.5), getattr(error, "retry_after", None) or 0.0)
        return True


def exit_with(message: str, status: int) -> click.exceptions.Exit:
    """Print an error; return the exception that ends the program with this exit status."""
    click.echo(f"Error: {message}", err=True)
    return click.exceptions.Exit(status)


@contextmanager
def exit_on_error(path: str = "", *, unanswered: str = "", interrupted: str = "run the same command to resume",
                  ) -> Iterator[None]:
    """Report in one line why a command cannot go on, and exit.

    `path` is the file that it reads or writes; the other texts say what to know when nobody answers, and after Ctrl-C.
    """
    try:
        yield
    except errors.Stopped as stop:
        known = f"; {unanswered}" if unanswered and isinstance(stop, errors.NoAnswer) else ""
        raise exit_with(escape_text(str(stop)) + known, stop.exit_status) from None
    except errors.GateError as refusal:
        raise exit_with(escape_text(str(refusal)), EXIT_OF_STATUS.get(refusal.status, EXIT_BROKEN)) from None
    except OSError as error:
        if not path:
            raise
        raise exit_for_file(path, error) from None
    except KeyboardInterrupt:
        raise exit_with(f"interrupted; {interrupted}", EXIT_INTERRUPTED) from None


WRONG_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)   # another one may be right


def exit_for_file(path: str, error: OSError) -> click.exceptions.Exit:
    """Print why a file cannot be used; return the exception that ends the program: the file is wrong, or the disk."""
    return exit_with(escape_text(f"{path}: {error.strerror or error}"),
                     EXIT_WRONG if isinstance(error, WRONG_FILE) else EXIT_BROKEN)


# Names of commands.


WHOLE = 200     # letters of a sentence of help


class CommandGroup(click.Group):
    """A group that suggests similar names for an unknown command, and lists its commands without breaking off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands: there are few, so each has its whole sentence."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, shorten_help(self.commands[name], WHOLE)) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest similar names."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as unknown:
            raise click.UsageError(unknown.message + suggest_names(args[0], self.list_commands(ctx)), ctx) from None


def shorten_help(command: click.Command, most: int) -> str:
    """Return the help of a command in one short line."""
    text = re.split(r"[:;]|\.(?: |$)", re.sub(r" \([^)]*\)", "", command.get_short_help_str(WHOLE)))[0].strip()
    begun, _, rest = text.rpartition(", ")
    return begun if len(text) > most and begun and not rest.startswith(("and ", "or ")) else text


def suggest_names(word: str, names: list[str]) -> str:
    """Return a hint with the names that are similar to an unknown one."""
    word = word.replace("_", "-")
    near = get_close_matches(word, names, 3) or [name for name in names if word in name][:3]
    return f" Did you mean {' or '.join(near)}?" if near else ""
