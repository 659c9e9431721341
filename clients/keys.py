"""`asyncgate keys issue`: the first key of a gate, made beside it, because nobody can ask for it yet.

It opens the database itself, so nothing else may serve a SQLite file meanwhile; a running gate issues keys with
`asyncgate issue-key`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import click
import msgspec

from asyncgate import OPERATIONS, Engine, GateError, configured
from asyncgate.clients import cli
from asyncgate.parts.settings import Configured, Settings

ISSUE = OPERATIONS["issue_key"]


@click.group()
def keys() -> None:
    """Issue the first key of a gate, which nobody can ask for yet."""


async def issued(settings: Settings, said: dict[str, Any]) -> Any:
    """Write a new key into the database of the settings."""
    backends, part = (import_module(f"asyncgate.backends{name}") for name in ("", ".identity_admin"))
    backend = await backends.open_backend(settings.database.url, serving=True, settings=settings.database)
    try:
        return await part.first_key(Engine(backend, settings), msgspec.convert(said, ISSUE.takes, strict=False))
    finally:
        await backend.close()


@keys.command()
@configured
def issue(configured: Configured, **given: Any) -> None:
    """Issue a key by writing it into the database itself; nothing may serve a SQLite file meanwhile.

    The text of the key goes to standard output, once.  With a gate that runs: asyncgate issue-key.
    """
    said = {name: value for name, value in given.items() if value not in (None, (), "")}
    try:
        made = asyncio.run(issued(configured.settings, said))
    except (GateError, msgspec.ValidationError) as no:
        raise click.ClickException(str(no)) from None
    click.echo(made.api_key)
    click.echo(f"key {made.key.key_id} for {made.key.principal_kind} {made.key.principal_id}, {made.key.role}; "
               "its text is shown this once", err=True)


issue.params += [cli.option(ISSUE, field) for name, field in cli.fields_of(ISSUE.takes).items() if name != "tenant_id"]
