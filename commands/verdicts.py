"""What `asyncgate verify` and the commands that end with it say of a database."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import click
import msgspec

from asyncgate.backends import open_backend
from asyncgate.commands.calling import BROKEN
from asyncgate.commands.terminal import Bar, plain
from asyncgate.parts.model.database import FileBackend


async def checked(url: str, database: Any = None) -> Any:
    """Verify what is stored at a URL; return the verdict."""
    backend = await open_backend(url, settings=database)
    try:
        return await verdict_on(backend)
    finally:
        await backend.close()


async def verdict_on(backend: Any) -> Any:
    """Verify what a backend has, with a bar that tells how far that is."""
    from asyncgate.conformance import verify as part
    with closing(Bar("checking", total=await rows_of(backend, part.READ))) as bar:
        return await part.verify(backend, progress=bar.show)


async def rows_of(backend: Any, tables: Any) -> int | None:
    """Ask about how many rows tables have, where the backend knows; nobody waits long for a bar."""
    with suppress(Exception):
        if isinstance(backend, FileBackend):
            return await backend.count_rows(tables) or None
    return None


def report(verdict: Any, what: str) -> dict[str, Any]:
    """Return a verdict as JSON has it."""
    return {"database": what, "sound": not verdict.problems, "problems": [str(one) for one in verdict.problems],
            "tasks": verdict.tasks, "receipts": verdict.receipts, "archived": verdict.archived,
            "audited": verdict.audited, "obligations": {
                "created": verdict.created, "discharged": verdict.discharged, "open": verdict.open}}


def told(verdict: Any, what: str, as_json: bool = False, **more: Any) -> int:
    """Print a verdict; return the exit status."""
    if as_json:
        click.echo(msgspec.json.encode({**report(verdict, what), **more}))
    else:
        written(verdict, what)
    return BROKEN if verdict.problems else 0


def written(verdict: Any, what: str) -> None:
    """Print a verdict for people."""
    for problem in verdict.problems:
        click.echo(plain(str(problem)))
    click.echo(counts(verdict))
    click.echo(f"audit logs: {verdict.audited} lines")
    if verdict.archived:
        click.echo(f"archive: {verdict.archived} receipts")
    wrong = len(verdict.problems)
    click.echo(f"{what}: {wrong} problem{'s' * (wrong > 1)}" if wrong else f"{what}: sound")


def counts(verdict: Any) -> str:
    """Put the conservation law in one line."""
    return (f"{verdict.tasks} tasks, {verdict.receipts} receipts; obligations: {verdict.created} created = "
            f"{verdict.discharged} discharged + {verdict.open} open")


def put(as_json: bool, said: Mapping[str, Any], *lines: str) -> None:
    """Print an answer: as JSON, or as lines for people."""
    if as_json:
        return click.echo(msgspec.json.encode(said))
    for line in lines:
        click.echo(line)
