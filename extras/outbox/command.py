"""`asyncgate relay`: move the rows of an application's outbox to a gate."""

from __future__ import annotations

import contextlib
import logging
import signal
import sqlite3
from typing import Any

import click

from asyncgate.clients import http
from asyncgate.clients.worker.program import start_logging
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.extras.outbox.relay import NoOutbox, OutboxRelay, find_errors, open_outbox


@click.command()
@click.argument("dsn", metavar="DSN")
@click.option("--as", "agent", metavar="AGENT", help="Who creates the tasks, if the credential names nobody.")
@click.option("--once", is_flag=True, help="Move what waits now, then end.")
@calling.add_gate_options
def relay(at: Connection, dsn: str, agent: str | None, once: bool) -> None:
    """Move tasks from the outbox of an application's database to the gate, each once.

    DSN is sqlite:///FILE or postgresql://…: where the application calls asyncgate.extras.outbox.enqueue.  A row is
    deleted when the gate has its task, and keeps its problem if the gate refuses it for good.
    """
    start_logging(logging.INFO)
    broken: tuple[type[Exception], ...] = (NoOutbox, sqlite3.Error, *find_errors("Error"))
    try:
        outbox = open_outbox(dsn)
    except broken as wrong:
        raise calling.exit_with(f"the database cannot be opened: {wrong}", calling.EXIT_WRONG) from None
    with contextlib.closing(outbox), calling.connect_to_gate(at) as gate:
        moving = OutboxRelay(outbox, gate, {"agent_id": agent} if agent else {})

        def stop(*signals: Any) -> None:
            moving.stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            moving.run(once)
        except http.Refusal as refusal:
            raise calling.exit_with(str(refusal), calling.EXIT_WRONG) from None
        except broken as wrong:
            raise calling.exit_with(f"the database cannot be used: {wrong}", calling.EXIT_WRONG) from None
    click.echo(f"moved {moving.moved}, parked {moving.parked}")
