"""`asyncgate archive`: old receipts out of the database, and back."""

from __future__ import annotations

import click

from asyncgate.clients import cli
from asyncgate.clients.receipts import connection, gate_at


@click.group()
def archive() -> None:
    """Move old receipts of a gate to its archive, look into it, and bring something back."""


@archive.command()
@click.option("--vacuum", is_flag=True, help="On SQLite: give the space back to the system; writes wait meanwhile.")
def run(vacuum: bool, url: str | None, token: str | None) -> None:
    """Move all receipts that are old enough to the archive, and prune the tasks that are.

    For an admin; the operator's run is for all tenants.  The gate needs archive.directory, and goes on meanwhile.
    What is old enough: receipt_retention_days, archive.terminal_days, task_retention_days.
    """
    receipts = segments = pruned = 0
    with gate_at(url, token) as gate:
        more = True
        while more:
            done = gate.call("run_archive", vacuum=vacuum or None)
            receipts, segments = receipts + done["receipts"], segments + done["segments"]
            pruned, more = pruned + done["tasks_pruned"], done["more"]
            if more:
                click.echo(f"{receipts:,} receipts so far", err=True)
    click.echo(f"{receipts} receipts moved to {segments} segments, {pruned} tasks pruned")


@archive.command("list")
@click.argument("task_id", metavar="[TASK]", required=False)
def list_(task_id: str | None, url: str | None, token: str | None) -> None:
    """List the receipts of TASK that are in the archive; an admin may list all of it."""
    cursor, rows = None, []
    with gate_at(url, token) as gate:
        while True:
            page = gate.call("list_archived_receipts", task_id=task_id, limit=200, cursor=cursor)
            rows += page["receipts"]
            if (cursor := page["next_cursor"]) is None:
                break
    for line in cli.table(cli.TABLES["list_archived_receipts"].split(), rows) if rows else ["nothing"]:
        click.echo(line)


@archive.command()
@click.argument("task_id", metavar="TASK")
def restore(task_id: str, url: str | None, token: str | None) -> None:
    """Bring the receipts of TASK back, byte for byte; they stay until the archive runs again.  For an admin."""
    with gate_at(url, token) as gate:
        back = gate.call("restore_archive", task_id=task_id)
    click.echo(f"{back['receipts']} receipts of {len(back['task_ids'])} tasks are back")


for _command in (run, list_, restore):
    _command.params += connection
