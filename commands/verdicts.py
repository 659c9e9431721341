"""Run `verify` on a database and print its verdict, for `asyncgate verify` and commands that end with it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import click
import msgspec

from asyncgate.backends import open_backend
from asyncgate.commands.calling import EXIT_BROKEN
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.words import say_count


async def verify_url(url: str, database: Any = None) -> Any:
    """Verify the database at a URL; return the verdict."""
    backend = await open_backend(url, settings=database)
    try:
        return await verify_backend(backend)
    finally:
        await backend.close()


async def verify_backend(backend: Any) -> Any:
    """Verify the data of a backend, with a progress bar."""
    from asyncgate.conformance import verify as part
    with closing(Bar("checking", total=await count_rows(backend, part.READ))) as bar:
        return await part.verify(backend, progress=bar.show)


async def count_rows(backend: Any, tables: Any) -> int | None:
    """Estimate the number of rows in tables if the backend can do so fast; it is only for a progress bar."""
    with suppress(Exception):
        if isinstance(backend, FileBackend):
            return await backend.count_rows(tables) or None
    return None


def make_report(verdict: Any, what: str) -> dict[str, Any]:
    """Return a verdict for JSON."""
    return {"database": what, "sound": not verdict.problems, "problems": [str(problem) for problem in verdict.problems],
            "tasks": verdict.tasks, "receipts": verdict.receipts, "archived": verdict.archived,
            "audited": verdict.audited, "obligations": {
                "created": verdict.created, "discharged": verdict.discharged, "open": verdict.open}}


def print_verdict(verdict: Any, what: str, as_json: bool = False, **more: Any) -> int:
    """Print a verdict; return the exit status."""
    if as_json:
        click.echo(msgspec.json.encode({**make_report(verdict, what), **more}))
    else:
        print_verdict_text(verdict, what)
    return EXIT_BROKEN if verdict.problems else 0


def print_verdict_text(verdict: Any, what: str) -> None:
    """Print a verdict as text."""
    for problem in verdict.problems:
        click.echo(escape_text(str(problem)))
    click.echo(format_counts(verdict))
    click.echo(f"audit logs: {say_count(verdict.audited, 'line')}")
    if verdict.archived:
        click.echo(f"archive: {say_count(verdict.archived, 'receipt')}")
    wrong = len(verdict.problems)
    click.echo(f"{what}: {say_count(wrong, 'problem')}" if wrong else f"{what}: sound")


def format_counts(verdict: Any) -> str:
    """Return the counts of a verdict in one line."""
    return (f"{say_count(verdict.tasks, 'task')}, {say_count(verdict.receipts, 'receipt')}; obligations: "
            f"{verdict.created:,} created = {verdict.discharged:,} discharged + {verdict.open:,} open")


def print_answer(as_json: bool, answer: Mapping[str, Any], *lines: str) -> None:
    """Print an answer: as JSON, or as lines of text."""
    if as_json:
        return click.echo(msgspec.json.encode(answer))
    for line in lines:
        click.echo(line)
