"""`--watch` of the lists: the same call again and again, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from asyncgate import Operation
from asyncgate.commands import terminal
from asyncgate.commands.calling import EXIT_INTERRUPTED, Duration, Outage, connect_to_gate
from asyncgate.commands.profiles import Connection

EVERY_SECONDS = 2.0
WATCH = click.Option(["--watch", "every_seconds"], type=Duration(0.1), is_flag=False, flag_value=EVERY_SECONDS,
                     metavar="[DURATION]", help=f"List again at intervals, until Ctrl-C; default {EVERY_SECONDS:g}s.")
Show = Callable[[bytes], None]


def watch_list(op: Operation, at: Connection, body: Mapping[str, Any], every_seconds: float, as_json: bool) -> None:
    """Call and show until Ctrl-C; a gate that does not answer meanwhile is asked again."""
    try:
        with connect_to_gate(at) as gate, open_view(op, every_seconds, as_json) as show:
            show(gate.send(op.name, body).content)      # a call that is wrong ends here
            outage = Outage()
            while True:
                time.sleep(every_seconds)
                with outage:
                    show(gate.send(op.name, body).content)
                    continue
                click.echo(outage.text, err=True)       # what was shown stays
    except KeyboardInterrupt:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def open_view(op: Operation, every_seconds: float, as_json: bool) -> Iterator[Show]:
    """Return what shows a reply: in place on a terminal, one after the other elsewhere."""
    if as_json:
        yield click.echo
    elif terminal.is_terminal(sys.stdout):
        from rich.live import Live
        on = terminal.console()
        with Live(console=on, auto_refresh=False, vertical_overflow="ellipsis") as live:
            yield lambda reply: live.update(draw_reply(op, read_rows(reply), every_seconds, on.width), refresh=True)
    else:
        yield lambda reply: print_reply_below(op, read_rows(reply))


def read_rows(reply: bytes) -> terminal.Rows:
    """Return the rows of a reply."""
    return next((value for value in msgspec.json.decode(reply).values() if isinstance(value, list)), [])


def draw_reply(op: Operation, rows: terminal.Rows, every_seconds: float, width: int) -> Any:
    """Return a table below a line that says when it was read."""
    from rich.console import Group
    from rich.text import Text

    title = f"{op.name.replace('_', '-')}, every {every_seconds:g} s, {datetime.now(UTC):%H:%M:%SZ}; Ctrl-C ends"
    return Group(Text(title, "dim"), terminal.make_table(op.columns, rows, width) if rows else Text("nothing"))


def print_reply_below(op: Operation, rows: terminal.Rows) -> None:
    """Print a table, and an empty line before the next one."""
    for line in terminal.format_table(op.columns, rows) if rows else ["nothing"]:
        click.echo(line)
    click.echo()
