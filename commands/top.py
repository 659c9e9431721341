"""`asyncgate top`: queues, workers, schedules and obligations, live on a terminal, with keys to sort and to filter.

What a key does is a pure function of the screen; drawing and calling stand apart.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.clients import http
from asyncgate.commands import calling, terminal
from asyncgate.commands.profiles import Connection
from asyncgate.commands.watching import EVERY_SECONDS
from asyncgate.parts.operations import OPERATIONS

VIEWS = {"queues": "list_queues", "workers": "list_workers", "schedules": "list_schedules",
         "obligations": "list_obligations"}
COLUMNS = {"queues": ["type", "capabilities", "claimable", "delayed", "held", "leased", "oldest_wait_seconds"],
           "workers": ["worker", "holding", "last_seen_at", "leased", "completed", "failed", "expired", "released"]}
COUNTS = ("claimable", "delayed", "held", "leased")
SORTED_FIRST = {"queues": "oldest_wait_seconds"}        # elsewhere the order of the list
MOST_ROWS, PAGE_ROWS = 1000, 200
KEYS = "1-4 or Tab: view   < >: sort by   r: reverse   /: filter   Space: stop   q: quit"
ESCAPE, BACKSPACES, ENTERS = "\x1b", ("\x7f", "\x08"), ("\r", "\n")
LEFT, RIGHT = ("<", "\x1b[D", "\x1bOD"), (">", "\x1b[C", "\x1bOC")
# An arrow is one key of several characters. Esc and the next key are two, also where they come at once.
ONE_KEY = re.compile(r"\x1b\[[0-9;?]*[@-~]|\x1bO[@-~]|.", re.DOTALL)
UNITS = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)]


class Screen(Struct, frozen=True):
    """What somebody has chosen to see."""

    view: str = "queues"
    sort: str | None = None         # a column; None is the order of the list
    descending: bool = True
    wanted: str = ""                # rows that contain this text in any column
    typing: bool = False            # keys are text of the filter
    stopped: bool = False

    @property
    def columns(self) -> list[str]:
        """Return the columns of the view."""
        return COLUMNS.get(self.view) or list(OPERATIONS[VIEWS[self.view]].columns)


class Shot(Struct):
    """What the gate answered last."""

    rows: terminal.Rows = ()
    more: bool = False              # there are more rows than were read
    health: Mapping[str, Any] = {}
    read_at: str = ""
    trouble: str = ""


@click.command()
@click.option("--view", type=click.Choice(list(VIEWS)), default="queues", help="What to show first; default queues.")
@click.option("--sort", metavar="COLUMN", help="Column to sort by; default for queues: oldest_wait_seconds.")
@click.option("--filter", "wanted", metavar="TEXT", default="", help="Only rows that contain this text.")
@click.option("--every", "every_seconds", type=calling.Duration(0.1), default=EVERY_SECONDS, metavar="DURATION",
              help=f"Interval between two readings; default {EVERY_SECONDS:g}s.")
@click.option("--once", is_flag=True, help="Print what is there now, and end; the default if output is not a terminal.")
@calling.add_gate_options
def top(at: Connection, view: str, sort: str | None, wanted: str, every_seconds: float, once: bool) -> None:
    """Show queues, workers, schedules or obligations live, until q.  For admins.

    Keys: 1 to 4 or Tab choose what is shown, < and > the column to sort by, r reverses the order, / filters (Enter ends
    the text, Esc clears it), Space stops and resumes reading, q ends.
    """
    screen = choose_view(Screen(wanted=wanted), view)
    if sort is not None:
        if sort not in screen.columns:
            raise click.BadParameter(f"there are {', '.join(screen.columns)}", param_hint="'--sort'")
        screen = replace(screen, sort=sort)
    with calling.connect_to_gate(at) as gate:
        if once or not terminal.is_terminal(sys.stdout):
            return print_shot(screen, read_shot(gate, screen))
        try:
            run_screen(gate, screen, every_seconds)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(calling.EXIT_INTERRUPTED) from None


# Keys.


def choose_view(screen: Screen, view: str) -> Screen:
    """Return the screen with another view, in the order that this view has first."""
    return replace(screen, view=view, sort=SORTED_FIRST.get(view), descending=True)


def press_key(screen: Screen, key: str) -> Screen | None:
    """Return the screen after a key; None ends."""
    if screen.typing:
        return type_key(screen, key)
    views = list(VIEWS)
    if key in ("q", "\x03"):
        return None
    if key == "\t":
        return choose_view(screen, views[(views.index(screen.view) + 1) % len(views)])
    if key in map(str, range(1, len(views) + 1)):
        return choose_view(screen, views[int(key) - 1])
    if key in (*LEFT, *RIGHT):
        return move_sort(screen, -1 if key in LEFT else 1)
    changes: dict[str, dict[str, Any]] = {
        "r": {"descending": not screen.descending}, "/": {"typing": True}, " ": {"stopped": not screen.stopped},
        ESCAPE: {"wanted": ""}}
    return replace(screen, **changes.get(key, {}))


def type_key(screen: Screen, key: str) -> Screen:
    """Return the screen after a key that belongs to the text of the filter."""
    if key in ENTERS:
        return replace(screen, typing=False)
    if key == ESCAPE:
        return replace(screen, typing=False, wanted="")
    if key in BACKSPACES:
        return replace(screen, wanted=screen.wanted[:-1])
    return replace(screen, wanted=screen.wanted + key) if key.isprintable() else screen


def move_sort(screen: Screen, step: int) -> Screen:
    """Return the screen sorted by a neighbouring column; before the first one comes the order of the list."""
    choices = [None, *screen.columns]
    return replace(screen, sort=choices[(choices.index(screen.sort) + step) % len(choices)])


# Rows.


def read_shot(gate: http.Http, screen: Screen) -> Shot:
    """Ask the gate for the rows of a view, and how it is."""
    rows, more = list[Any](), False
    for reply in gate.pages(VIEWS[screen.view], limit=PAGE_ROWS):
        rows += next(value for value in reply.values() if isinstance(value, list))
        more = reply.get("next_cursor") is not None
        if len(rows) >= MOST_ROWS:
            break
    return Shot(rows, more, gate.call("health"), f"{datetime.now(UTC):%H:%M:%SZ}")


def choose_rows(screen: Screen, rows: terminal.Rows) -> terminal.Rows:
    """Return the rows that contain the wanted text, sorted; a row without a value comes last."""
    wanted = screen.wanted.casefold()
    matches = [row for row in rows if wanted in " ".join(
        terminal.format_cell(terminal.read_path(row, column)) for column in screen.columns).casefold()]
    if screen.sort is None:
        return matches if screen.descending else matches[::-1]
    values = {id(row): terminal.read_path(row, screen.sort) for row in matches}
    known = [row for row in matches if values[id(row)] is not None]
    known.sort(key=lambda row: make_order(values[id(row)]), reverse=screen.descending)
    return [*known, *(row for row in matches if values[id(row)] is None)]


def make_order(value: Any) -> tuple[float, str]:
    """Return what a value is ordered by: numbers by size, anything else as it is shown."""
    return (float(value), "") if isinstance(value, int | float) else (0.0, terminal.format_cell(value).casefold())


def shorten_row(row: Mapping[str, Any], columns: list[str]) -> dict[str, Any]:
    """Return the shown members of a row, with durations in units."""
    return {column: shorten_seconds(value) if column.endswith("_seconds") and isinstance(
        value := terminal.read_path(row, column), int | float) else terminal.read_path(row, column)
            for column in columns}


def shorten_seconds(seconds: float) -> str:
    """Write a duration in its two largest units, such as 3m12s."""
    whole = int(seconds)
    first = next((at for at, (_, size) in enumerate(UNITS) if whole >= size), len(UNITS) - 1)
    parts = []
    for name, size in UNITS[first:first + 2]:
        parts.append(f"{whole // size}{name}")
        whole %= size
    return "".join(parts)


def sum_queues(rows: terminal.Rows) -> str:
    """Return what waits and runs in all queues together."""
    counts = ", ".join(f"{sum(row[name] for row in rows):,} {name}" for name in COUNTS)
    waits = [row["oldest_wait_seconds"] for row in rows if row["oldest_wait_seconds"] is not None]
    oldest = max(waits, default=None)
    return counts + (f"; the oldest waits {shorten_seconds(oldest)}" if oldest is not None else "")


# Output.


def list_head(screen: Screen, shot: Shot, url: str) -> list[str]:
    """Return the lines above the table."""
    health, at = shot.health, f" at {shot.read_at}" if shot.read_at else ""
    gate = (
        f"{terminal.escape_text(str(health['instance_id']))} {health['status']}, up {shorten_seconds(health['uptime'])}"
            if health else "no answer yet")
    order = f"by {terminal.format_title(screen.sort)}" if screen.sort else "as listed"
    order += "" if screen.descending else ", reversed"
    wanted = f", with {terminal.escape_text(screen.wanted)!r}" if screen.wanted or screen.typing else ""
    views = "  ".join(f"[{name}]" if name == screen.view else name for name in VIEWS)
    return [f"{url}  {gate}{at}",
            f"{views}   {'stopped, ' * screen.stopped}{order}{wanted}",
            sum_queues(shot.rows) if screen.view == "queues" and shot.rows else ""]


def print_shot(screen: Screen, shot: Shot) -> None:
    """Print what is there, whole."""
    rows = [shorten_row(row, screen.columns) for row in choose_rows(screen, shot.rows)]
    for line in terminal.format_table(screen.columns, rows) if rows else ["nothing"]:
        click.echo(line)
    if shot.more:
        click.echo(f"only the first {len(shot.rows):,} were read", err=True)


def draw_screen(screen: Screen, shot: Shot, url: str, width: int, height: int) -> Any:
    """Return the whole screen, no larger than the terminal."""
    from rich.console import Group
    from rich.text import Text

    head = [line for line in list_head(screen, shot, url) if line]
    chosen = choose_rows(screen, shot.rows)
    rows = [shorten_row(row, screen.columns) for row in chosen[:max(height - len(head) - 5, 1)]]
    table = terminal.make_table(screen.columns, rows, width) if rows else Text("nothing" if shot.read_at else "reading")
    foot = f"filter: {terminal.escape_text(screen.wanted)}_   Enter: keep   Esc: clear" if screen.typing else KEYS
    lines = [Text(line[:width], "bold" if at == 0 else "") for at, line in enumerate(head)]
    hidden = len(chosen) - len(rows)
    rest = f"{hidden:,} more rows" * (hidden > 0) + f" (only the first {len(shot.rows):,} were read)" * shot.more
    return Group(*lines, table, Text(rest[:width], "dim"),
                 Text(shot.trouble[:width], "red"), Text(foot[:width], "dim"))


def run_screen(gate: http.Http, screen: Screen | None, every_seconds: float) -> None:
    """Read, draw and obey keys until one ends it."""
    from rich.live import Live

    assert screen is not None
    on, shot, due = terminal.console(), read_shot(gate, screen), time.monotonic() + every_seconds
    with read_keys() as wait_for_keys, Live(console=on, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw_screen(screen, shot, gate.url, on.width, on.height), refresh=True)
            view = screen.view
            for key in ONE_KEY.findall(wait_for_keys(max(due - time.monotonic(), 0.0))):
                if (screen := press_key(screen, key)) is None:
                    return
            if screen.view != view:
                shot, due = Shot(), 0.0
            if time.monotonic() >= due:
                if not (screen.stopped and shot.read_at):
                    with (outage := calling.Outage()):
                        shot = read_shot(gate, screen)
                    shot.trouble = outage.text      # what was read last stays
                due = time.monotonic() + every_seconds


@contextmanager
def read_keys() -> Iterator[Callable[[float], str]]:
    """Return what waits for a key, at most so many seconds, and returns it; where there are no keys it only waits."""
    try:
        import termios
        import tty
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (ImportError, OSError, ValueError):      # Windows, or input from elsewhere: Ctrl-C ends
        yield wait_without_keys
        return
    except termios.error:
        yield wait_without_keys
        return
    tty.setcbreak(file)
    try:
        yield lambda seconds: wait_for_input(file, seconds)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def wait_for_input(file: int, seconds: float) -> str:
    """Wait for input of the terminal; one that has gone ends the command as Ctrl-C does."""
    if not select.select([file], [], [], seconds)[0]:
        return ""
    try:
        keys = os.read(file, 64)
    except OSError:
        keys = b""
    if not keys:
        raise KeyboardInterrupt
    return keys.decode(errors="replace")


def wait_without_keys(seconds: float) -> str:
    """Wait, and return no key."""
    time.sleep(seconds)
    return ""
