"""`asyncgate keys issue`: issue the first key of a gate, before any credential for it exists.

The command opens the database itself, so nobody may serve a SQLite file meanwhile; a running gate issues keys with
`asyncgate issue-key`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click
import msgspec

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands import cli
from asyncgate.commands.calling import (
    EXIT_BROKEN,
    EXIT_CONFLICT,
    EXIT_OF_STATUS,
    EXIT_WRONG,
    CommandGroup,
    as_json,
    exit_with,
)
from asyncgate.parts.identity.admin import issue_first_key
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.settings import Configured, Settings
from asyncgate.parts.model.wire_admin import IssueKey
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.options import add_settings_options

ISSUE = OPERATIONS["issue_key"]


@click.group(cls=CommandGroup)
def keys() -> None:
    """Issue the first key of a gate, before any credential for it exists."""


async def write_first_key(settings: Settings, said: dict[str, Any]) -> Any:
    """Write a new key into the database that the settings name."""
    backend = await open_backend(settings.database.url, serving=True, settings=settings.database)
    try:
        return await issue_first_key(Engine(backend, settings), msgspec.convert(said, IssueKey, strict=False))
    finally:
        await backend.close()


@keys.command()
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write the key to a new file that only you can read, instead of standard output.")
@as_json
@add_settings_options
def issue(configured: Configured, out: str | None, as_json: bool, **given: Any) -> None:
    """Issue a key directly in the database; nobody may serve a SQLite file meanwhile.

    The text of the key is shown once, on standard output or in the FILE of --out.  With a running gate use asyncgate
    issue-key.
    """
    with KeyFile(out) as kept:
        made = issue_or_exit(configured, given)
        kept.put(made.api_key)
    key = made.key
    if as_json:
        said = {"key": key, **({"file": out} if out else {"api_key": made.api_key})}
        return click.echo(msgspec.json.encode(said))
    if not out:
        click.echo(made.api_key)
    where = f"its text is in {out}" if out else "its text is shown only once"
    click.echo(f"key {key.key_id} for {key.principal_kind} {key.principal_id}, {key.role}; {where}", err=True)


def issue_or_exit(configured: Configured, given: dict[str, Any]) -> Any:
    """Issue the key, or exit with an error."""
    said = {name: value for name, value in given.items() if value not in (None, (), "")}
    try:
        return asyncio.run(write_first_key(configured.settings, said))
    except (GateError, msgspec.ValidationError) as no:
        raise exit_with(str(no), EXIT_OF_STATUS.get(getattr(no, "status", 400), EXIT_BROKEN)) from None


class KeyFile:
    """The file of a key; it is created before the key, so that no key is issued that cannot be saved."""

    def __init__(self, path: str | None) -> None:
        self.path, self.is_full = path, False

    def __enter__(self) -> KeyFile:
        if self.path:
            try:
                self.file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                raise exit_with(f"{self.path} exists already; give --out a new file", EXIT_CONFLICT) from None
            except OSError as error:
                raise exit_with(f"cannot write {self.path}: {error.strerror}", EXIT_WRONG) from None
        return self

    def put(self, text: str) -> None:
        """Write the key."""
        if self.path:
            os.write(self.file, f"{text}\n".encode())
            os.fsync(self.file)
            self.is_full = True

    def __exit__(self, *error: object) -> None:
        if self.path:
            os.close(self.file)
            if not self.is_full:
                os.remove(self.path)


issue.params += [cli.make_option(ISSUE, field) for name,
                 field in cli.list_fields(ISSUE.takes).items() if name != "tenant_id"]
