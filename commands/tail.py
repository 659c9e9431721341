"""`asyncgate tail`: receipts as they come, one line each, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import click
import msgspec

from asyncgate import RECEIPT_TYPES
from asyncgate.clients import http
from asyncgate.clients.events import StreamEvent
from asyncgate.clients.operations import ReceiptRecord
from asyncgate.commands import calling, terminal
from asyncgate.commands.profiles import Connection
from asyncgate.parts.faces.stream import STREAM
from asyncgate.parts.model import wire

PATH = STREAM.rest[0][1]
LONGEST_TYPE = max(map(len, RECEIPT_TYPES))


@click.command()
@click.option("--to", "to_id", metavar="NAME", help="Only what is addressed to this principal; an admin sees all.")
@click.option("--to-kind", type=click.Choice(get_args(wire.Kind)), help="Kind of that principal; default: any.")
@click.option("--task", "task_id", type=calling.ID_TYPE, metavar="TASK_ID", help="Only the receipts of this task.")
@click.option("--type", "receipt_type", metavar="TYPE", help="Only receipts of this type, such as task.failed.")
@click.option("--since", type=calling.Duration(), metavar="DURATION", default=0.0,
              help="Begin with the receipts of the last DURATION, such as 10m; default: only new ones.")
@click.option("--all", "from_start", is_flag=True, help="Begin with the first receipt.")
@calling.as_json
@calling.add_gate_options
def tail(at: Connection, since: float, from_start: bool, as_json: bool, **filter: Any) -> None:
    """Show receipts as they arrive, until Ctrl-C: each exactly once, even if the gate restarts.

    An agent sees what is addressed to it, an admin all receipts of the tenant.  With --json each line is one receipt.
    """
    query = {name: value for name, value in filter.items() if value is not None}
    if not from_start:
        query["created_after"] = (datetime.now(UTC) - timedelta(seconds=since)).isoformat()
    try:
        with calling.connect_to_gate(at) as gate:
            Tail(gate, query, as_json).follow()
    except KeyboardInterrupt:
        raise click.exceptions.Exit(calling.EXIT_INTERRUPTED) from None


class Tail:
    """Follows one stream of receipts across interruptions."""

    def __init__(self, gate: http.Http, query: dict[str, Any], as_json: bool) -> None:
        self.gate, self.query, self.as_json = gate, query, as_json
        # Until a receipt has come, what answers may be no gate at all.
        self.last, self.outage = "", calling.Outage(http.WrongAddress, http.NotAGate)

    def follow(self) -> None:
        """Show receipts for ever; after an interruption go on behind the last one shown."""
        while True:
            with self.outage:
                self._read()
                # The gate ended the stream: it stops, or the credential does, which the next try says.
                time.sleep(http.pause_after(1))
                continue
            if self.outage.times == 1:
                click.echo(self.outage.text, err=True)
            time.sleep(max(self.outage.pause_seconds, http.pause_after(1)))

    def _read(self) -> None:
        with self.gate.open_stream(PATH, self.query, self.last) as events:
            for event in events:
                if why := http.find_reply_flaw(event.data.encode(), ReceiptRecord):
                    raise http.NotAGate(self.gate.url, f"an event of its stream {why}")
                self.outage.times, self.outage.fatal = 0, (http.WrongAddress,)
                self._show(event)

    def _show(self, event: StreamEvent) -> None:
        if event.id:
            self.last = event.id
        if self.as_json:
            click.echo(event.data)
        elif terminal.is_terminal(sys.stdout):
            draw_receipt(msgspec.json.decode(event.data))
        else:
            click.echo("  ".join(list_words(msgspec.json.decode(event.data))))
        sys.stdout.flush()


def list_words(receipt: dict[str, Any]) -> list[str]:
    """Return what a line says: when, what, about which task or schedule, and from whom to whom."""
    about = receipt.get("task_id") or receipt.get("schedule_id") or receipt["receipt_id"]
    who = f"{terminal.format_cell(receipt['from'])} to {terminal.format_cell(receipt['to'])}"
    return [terminal.format_cell(receipt["created_at"]),
            f"{terminal.escape_text(receipt['receipt_type']):{LONGEST_TYPE}}",
            terminal.escape_text(about), who]


def draw_receipt(receipt: dict[str, Any]) -> None:
    """Draw a line on a terminal: the time of day, a shortened id, colour by type."""
    from rich.text import Text

    moment, type, about, who = list_words(receipt)
    line = Text.assemble((f"{moment[11:]}  ", "dim"), (type, terminal.STYLES.get(type.strip(), "")),
                         f"  {terminal.shorten_id(about)}  {who}")
    terminal.console().print(line, no_wrap=True, overflow="ellipsis")
