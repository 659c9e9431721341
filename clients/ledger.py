"""`asyncgate verify --ledger`: hold the receipts of a database against their seals."""

from __future__ import annotations

from contextlib import closing
from importlib import import_module

import click

from asyncgate.clients import cli
from asyncgate.parts.settings import Settings, discreet


async def held(url: str, settings: Settings, anchors: tuple[str, ...]) -> int:
    """Verify the seals of what is stored at a URL and print what was found; return the exit status."""
    backend = await import_module("asyncgate.backends").open_backend(url, settings=settings.database)
    part = import_module("asyncgate.conformance.verify_ledger")
    with closing(cli.Counter()) as counter:
        try:
            found = await part.verify_ledger(backend, anchors=anchors, directory=settings.archive.directory,
                                             progress=counter.show)
        finally:
            await backend.close()
    for problem in found.problems:
        click.echo(cli.plain(problem))
    for tenant_id, head in found.heads.items():
        if head.number:
            click.echo(f"tenant {tenant_id}: the last seal is {head.number}:{head.hash}")
    wrong = len(found.problems)
    click.echo(f"ledger: {found.receipts} receipts, {found.seals} seals; {found.unsealed} receipts since the last seal")
    if found.segments:
        click.echo(f"archive: {found.archived} receipts in {found.segments} segments")
    click.echo(f"{discreet(url)}: {wrong} problem{'s' * (wrong > 1)} of the ledger" if wrong else
               f"{discreet(url)}: the ledger is as it was sealed")
    return cli.BROKEN if wrong else 0
