"""Format answers: complete and plain for programs; on a terminal in colour, fitted to the window.

If a table is too wide for the window, its ids are shortened to their last twelve digits, which every command accepts in
place of the whole id.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from asyncgate.parts.model.words import UNSAFE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

Rows = Sequence[Mapping[str, Any]]

OPENED = ("result", "server", "relationship", "upkeep", "key")     # objects whose members are shown on separate lines
MOST_SHOWN = 4000           # characters of a value on a terminal
LEAST_WIDTH = 8             # least width of a narrowed column
PRINCIPAL = {prefix + name for prefix in ("", "principal_") for name in ("kind", "id", "instance_id")}
WORDS = ("receipt_type", "event_type", "status")      # columns that are narrowed last
TIME = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)")
LONG_ID, SHORT_DIGITS = re.compile(r"(sched-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), 12
STYLES = {
    "queued": "yellow", "leased": "cyan", "running": "cyan", "succeeded": "green", "failed": "red",
    "canceled": "magenta", "task.completed": "green", "task.failed": "red", "task.canceled": "magenta",
    "lease.expired": "yellow", "system.anomaly": "red", "critical": "red", "warning": "yellow"}


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal."""
    return stream.isatty()


def console(*, err: bool = False) -> Console:
    """Return a console that draws on the terminal; it honours NO_COLOR and TERM=dumb."""
    from rich.console import Console

    return Console(stderr=err, highlight=False, markup=False, emoji=False)


# Tables.


def show_table(columns: Sequence[str], rows: Rows) -> None:
    """Print rows under the names of their columns; omit empty columns."""
    if is_terminal(sys.stdout):
        return draw_table(columns, rows, console())
    for line in format_table(columns, rows):
        click.echo(line)


def format_table(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Format complete rows in columns."""
    cells = fill_cells(columns, rows)
    wide = {name: max(len(format_title(name)), *map(len, held)) for name, held in cells.items()}
    yield "  ".join(f"{format_title(name):{width}}" for name, width in wide.items()).rstrip()
    for at in range(len(rows)):
        yield "  ".join(f"{cells[name][at]:{width}}" for name, width in wide.items()).rstrip()


def fill_cells(columns: Sequence[str], rows: Rows) -> dict[str, list[str]]:
    """Return the cells of each column that is not empty."""
    cells = {column: [format_cell(read_path(row, column)) for row in rows] for column in columns}
    return {column: held for column, held in cells.items() if any(held)}


def format_title(column: str) -> str:
    """Return the title of a column."""
    return column.rpartition(".")[2].upper()


def draw_table(columns: Sequence[str], rows: Rows, on: Console) -> None:
    """Draw a table that fits the window."""
    on.print(make_table(columns, rows, on.width))


def make_table(columns: Sequence[str], rows: Rows, width: int) -> Table:
    """Return a table that fits into a width."""
    from rich.table import Table
    from rich.text import Text

    cells = fill_cells(columns, rows)
    widths = fit_widths(cells, width)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, width in widths.items():
        drawn.add_column(format_title(name), width=width, no_wrap=True, overflow="ellipsis")
    for at in range(len(rows)):
        drawn.add_row(*(Text(cells[name][at], STYLES.get(cells[name][at], "")) for name in widths))
    return drawn


def fit_widths(cells: dict[str, list[str]], room: int) -> dict[str, int]:
    """Return the widths of the columns that fit.

    If they do not fit, ids are shortened, then times, then the widest texts; finally columns are omitted.
    """
    for shorter in (None, short_ids, short_times):
        if shorter:
            shorter(cells)
        widths = {name: max(measure_text(format_title(name)), *map(measure_text, held)) for name, held in cells.items()}
        if sum(widths.values()) + 2 * len(widths) <= room:
            return widths
    for words in ({*filter(is_id, widths), *WORDS}, {*filter(is_id, widths)}):
        narrow_columns(widths, room, [name for name in widths if name not in words])
    while len(widths) > 1 and sum(widths.values()) + 2 * len(widths) > room:
        widths.popitem()        # the most important columns are first
    return widths


def narrow_columns(widths: dict[str, int], room: int, names: list[str]) -> None:
    """Narrow the widest of some columns until all fit, or none can be narrowed."""
    while sum(widths.values()) + 2 * len(widths) > room:
        name = max(names, key=widths.__getitem__, default="")
        if not name or widths[name] <= LEAST_WIDTH:
            return
        widths[name] -= 1


def measure_text(text: str) -> int:
    """Return the width of a text on a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def is_id(column: str) -> bool:
    """Whether a column contains ids of tasks or receipts; ids of leases grant rights and are not shortened."""
    return column.rpartition(".")[2].endswith(("task_id", "receipt_id", "schedule_id"))


def short_ids(cells: dict[str, list[str]]) -> None:
    """Shorten ids, and remember them."""
    for name in filter(is_id, cells):
        cells[name] = [shorten_id(text) for text in cells[name]]


def shorten_id(text: str) -> str:
    """Shorten an id to its last 12 digits, which the gate finds it by; return other texts unchanged."""
    return text[-SHORT_DIGITS:] if LONG_ID.fullmatch(text) else text


def short_times(cells: dict[str, list[str]]) -> None:
    """Shorten times: of today to the time, of other days to the date."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for held in cells.values():
        for at, text in enumerate(held):
            if match := TIME.fullmatch(text):
                held[at] = f"{match[2]}Z" if match[1] == today else match[1]


def read_path(row: Any, path: str) -> Any:
    """Return the value at a dotted path in an object."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


# Single objects.


def show_block(reply: Mapping[str, Any]) -> None:
    """Print names and values; omit nulls."""
    rows = [(name, value) for name, value in flatten_reply(reply) if value is not None]
    if is_terminal(sys.stdout):
        return draw_block(rows, console())
    longest = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{name:{longest}}  {format_cell(value, shows_false=True)}")


def draw_block(rows: Iterable[tuple[str, Any]], on: Console) -> None:
    """Draw names and values; wrap long values below themselves."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        text = format_cell(value, shows_false=True)
        grid.add_row(name, Text(cut_text(text), STYLES.get(text, "")))
    on.print(grid)


def cut_text(text: str) -> str:
    """Cut a very long text, and add a note about the rest."""
    more = len(text) - MOST_SHOWN
    return text if more <= 0 else f"{text[:MOST_SHOWN]}… ({more:,} characters more; --json shows them)"


def flatten_reply(reply: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """List the members of a reply and of its important parts; sentences get a line each."""
    for name, value in reply.items():
        if isinstance(value, list) and value and all(isinstance(part, str) and " " in part for part in value):
            yield from ((name if at == 0 else "", part) for at, part in enumerate(value))
            continue
        if name in OPENED and isinstance(value, dict):
            for inner, held in value.items():
                yield from split_traceback(f"{name}.{inner}", held)
        else:
            yield name, value


def split_traceback(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """List a value; the traceback of a task's error gets a line for each of its own."""
    trace = value.get("traceback") if isinstance(value, dict) else None
    if not isinstance(trace, str):
        yield name, value
        return
    yield name, {inner: held for inner, held in value.items() if inner != "traceback"}
    yield from ((f"{name}.traceback" if at == 0 else "", line) for at, line in enumerate(trace.split("\n")))


def format_cell(value: Any, *, shows_false: bool = False) -> str:
    """Format a value in one line: a principal as its name, other objects as JSON, false only if asked."""
    if value is None or (value is False and not shows_false):
        return ""
    if isinstance(value, str):
        moment = TIME.fullmatch(value)
        return f"{moment[1]}T{moment[2]}Z" if moment else escape_text(value)
    if isinstance(value, dict) and {"kind", "id"} <= value.keys() <= PRINCIPAL:
        return escape_text(f"{value['kind']} {value['id']}")
    if isinstance(value, dict) and {"error", "message"} <= value.keys():
        return escape_text(f"{value['error']}: {value['message']}")
    return escape_text(msgspec.json.encode(value).decode())


def escape_text(text: str) -> str:
    """Escape foreign characters that would move the cursor, or hide or reverse text on a terminal."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


# Progress.


class Bar:
    """A progress line on a terminal, with a bar if the total is known; silent elsewhere."""

    def __init__(self, doing: str, what: str = "rows", total: int | None = None) -> None:
        self.doing, self.what, self.total, self.done = doing, what, total, 0
        self.drawn: Progress | None = None

    def add(self, count: int = 1) -> None:
        """Count further items."""
        self.show(self.done + count)

    def show(self, done: int) -> None:
        """Show the number of items done."""
        self.done = done
        if self.drawn is None and is_terminal(sys.stderr):
            self._open()
        if self.drawn is not None:
            self.drawn.update(self.line, completed=done, total=self.total)

    def of(self, total: int | None) -> None:
        """Set the total."""
        self.total = total

    def reach(self, done: int, total: int) -> None:
        """Show the number of items done and the total."""
        self.total = total
        self.show(done)

    def _open(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        count = TextColumn("{task.completed:,.0f}") if self.total is None else TextColumn(
            "{task.completed:,.0f} of {task.total:,.0f}")
        left = [] if self.total is None else [TextColumn("left"), TimeRemainingColumn(compact=True)]
        self.drawn = Progress(TextColumn(self.doing), BarColumn(24), count, TextColumn(self.what),
                              TimeElapsedColumn(), *left, console=console(err=True), transient=True)
        self.line = self.drawn.add_task(self.doing, total=self.total)
        self.drawn.start()

    def close(self) -> None:
        """Remove the line."""
        if self.drawn is not None:
            self.drawn.stop()
            self.drawn = None
