"""`asyncgate ledger`: serve a ledger."""

from __future__ import annotations

import sys

import click

from asyncgate.parts.identity.startup import require_safe_start, warn_of_idle_settings
from asyncgate.parts.model.settings import Configured
from asyncgate.parts.process.logs import start_logging
from asyncgate.parts.process.options import add_settings_options


@click.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=int, metavar="NUMBER", help="Port to listen on; default 8080, 0 for any free port.")
@add_settings_options
def ledger(configured: Configured) -> None:
    """Serve a receipt ledger for gates in integrated mode, in the role of MemoryGate, with its own database."""
    start_logging(configured.settings)
    require_safe_start(configured.settings)
    warn_of_idle_settings(configured)
    from asyncgate.extras.ledger.server.app import serve_ledger
    sys.exit(serve_ledger(configured.settings))
