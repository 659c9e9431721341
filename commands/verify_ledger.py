"""`asyncgate verify --ledger`: check the receipts of a database against their seals."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from asyncgate.backends import open_backend
from asyncgate.commands import verdicts
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.parts.model import stored
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.words import say_count


async def verify_seals(url: str, settings: Settings, anchors: tuple[str, ...]) -> Any:
    """Verify the seals of the database at a URL; return the findings."""
    backend = await open_backend(url, settings=settings.database)
    from asyncgate.conformance import verify_ledger as part
    with closing(Bar("unsealing", "receipts", await verdicts.count_rows(backend, [stored.Receipt]))) as bar:
        try:
            return await part.verify_ledger(backend, anchors=anchors, directory=settings.archive.directory,
                                            progress=bar.show)
        finally:
            await backend.close()


def make_seal_report(report: Any) -> dict[str, Any]:
    """Return the findings for JSON."""
    heads = {tenant_id: f"{head.number}:{head.hash}" for tenant_id, head in report.heads.items() if head.number}
    return {"sound": not report.problems, "problems": report.problems, "receipts": report.receipts,
            "seals": report.seals,
            "unsealed": report.unsealed, "archived": report.archived, "segments": report.segments, "last_seals": heads,
            "stopped_at": report.stopped}


def print_seal_report(report: Any, what: str) -> None:
    """Print the findings as text."""
    for problem in report.problems:
        click.echo(escape_text(problem))
    for tenant_id, head in report.heads.items():
        if head.number:
            click.echo(f"tenant {tenant_id}: the last seal is {head.number}:{head.hash}")
    for tenant_id, receipt_id in report.stopped.items():
        click.echo(f"tenant {tenant_id}: nothing is sealed from receipt {receipt_id} on, for its body is not here: a "
                   "ledger has it, or somebody took it away")
    wrong = len(report.problems)
    click.echo(f"ledger: {say_count(report.receipts, 'receipt')}, {say_count(report.seals, 'seal')}; "
               f"{say_count(report.unsealed, 'receipt')} since the last seal")
    if report.segments:
        click.echo(f"archive: {say_count(report.archived, 'receipt')} in {say_count(report.segments, 'segment')}")
    click.echo(f"{what}: {say_count(wrong, 'problem')} of the ledger" if wrong else
               f"{what}: the ledger matches its seals")
