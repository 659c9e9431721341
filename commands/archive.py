"""`asyncgate archive`: move old receipts out of the database, and back."""

from __future__ import annotations

import click

from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import show_table
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.model import wire
from asyncgate.parts.model.words import say_count


@click.group(cls=calling.CommandGroup)
def archive() -> None:
    """Move old receipts of a gate to its archive; list and restore archived receipts."""


@archive.command("run")
@click.option("--vacuum", is_flag=True, help="On SQLite: return the freed space to the system; writes wait meanwhile.")
@calling.as_json
@calling.add_gate_options
def run_archive(at: Connection, vacuum: bool, as_json: bool) -> None:
    """Move receipts past their retention to the archive, and prune tasks past theirs.

    For admins; the operator's run covers all tenants.  The gate needs archive.directory, and keeps serving meanwhile.
    The settings receipt_retention_days, archive.terminal_days and task_retention_days set the ages.
    """
    receipts = segments = pruned = 0
    with calling.connect_to_gate(at) as gate:
        more = True
        while more:
            done = gate.call("run_archive", vacuum=vacuum or None)
            receipts, segments = receipts + done["receipts"], segments + done["segments"]
            pruned, more = pruned + done["tasks_pruned"], done["more"]
            if more and not as_json:
                click.echo(f"{say_count(receipts, 'receipt')} so far", err=True)
    print_answer(as_json, {"receipts": receipts, "segments": segments, "tasks_pruned": pruned},
        f"{say_count(receipts, 'receipt')} moved to {say_count(segments, 'segment')}, "
        f"{say_count(pruned, 'task')} pruned")


@archive.command("list")
@click.argument("task_id", metavar="[TASK]", type=calling.ID_TYPE, required=False)
@calling.as_json
@calling.add_gate_options
def list_(at: Connection, task_id: str | None, as_json: bool) -> None:
    """List the archived receipts of TASK; an admin may omit TASK to list all."""
    with calling.connect_to_gate(at) as gate:
        pages = gate.pages("list_archived_receipts", task_id=task_id, limit=200)
        rows = [row for page in pages for row in page["receipts"]]
    if as_json:
        return print_answer(True, {"receipts": rows})
    show_table(wire.Receipts.columns.split(), rows) if rows else click.echo("nothing")


@archive.command()
@click.argument("task_id", metavar="TASK", type=calling.ID_TYPE)
@calling.as_json
@calling.add_gate_options
def restore(at: Connection, task_id: str, as_json: bool) -> None:
    """Restore the receipts of TASK, byte for byte, until the archive runs again.  For admins."""
    with calling.connect_to_gate(at) as gate:
        back = gate.call("restore_archive", task_id=task_id)
    print_answer(as_json, back, f"restored: {say_count(back['receipts'], 'receipt')} of "
                                f"{say_count(len(back['task_ids']), 'task')}")
