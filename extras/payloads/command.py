"""`asyncgate clean-payloads`: delete from a store what no task of the gate names any more."""

from __future__ import annotations

import time
from typing import Any

import click

from asyncgate.clients import http
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.verdicts import print_answer
from asyncgate.extras.payloads import NotInStore, find_results, open_store, read_pointer


@click.command("clean-payloads")
@click.argument("store", metavar="STORE")
@click.option("--older-than-hours", type=click.FloatRange(min=1), default=24.0, show_default=True,
              help="Keep what was stored since: its task may not be created yet.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@calling.as_json
@calling.add_gate_options
def clean_payloads(at: Connection, store: str, older_than_hours: float, dry_run: bool, as_json: bool) -> None:
    """Delete from a store what no task of the gate names any more, such as tasks that retention has deleted.

    STORE is file:///FOLDER or s3://BUCKET/PREFIX. The credential must see all tasks of every tenant that uses the
    store: a store belongs to one tenant, or each tenant has a prefix of its own.
    """
    before = time.time() - 3600.0 * older_than_hours      # first: what is stored while tasks are read stays
    try:
        opened = open_store(store)
        old = {kept.name for kept in opened.list() if kept.changed_at <= before}
    except (ValueError, ImportError, NotInStore) as wrong:
        raise calling.exit_with(str(wrong), calling.EXIT_WRONG) from None
    with calling.connect_to_gate(at) as gate:
        try:
            named = list_named(gate) if old else set()
        except http.Refusal as refusal:
            raise calling.exit_with(str(refusal), calling.EXIT_WRONG) from None
    gone = old - named
    deleted = len(gone) if dry_run else sum(opened.delete(name, before) for name in sorted(gone))
    print_answer(as_json, {"deleted": deleted, "kept": len(old) - len(gone), "dry_run": dry_run},
        f"{'would delete' if dry_run else 'deleted'} {deleted}, kept {len(old) - len(gone)} that tasks name")


def list_named(gate: Any) -> set[str]:
    """Return the hashes of all values that some task names."""
    if gate.call("whoami")["role"] != "admin":
        raise click.UsageError("this credential sees only its own tasks, and would delete what others name: use an "
                               "admin's")
    named, cursor = set[str](), None
    while True:
        page = gate.call("list_tasks", limit=200, cursor=cursor)
        for task in page["tasks"]:
            payload, artifacts = read_pointer(task["payload_pointer"]), (task["result"] or {}).get("artifacts")
            pointers = [*([] if payload is None else [payload]), *find_results(artifacts)]
            named |= {pointer.sha256 for pointer in pointers}
        if (cursor := page["next_cursor"]) is None:
            return named
