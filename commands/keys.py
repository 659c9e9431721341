"""`asyncgate keys`: what needs no running gate: its first key, and the keys that sign its access tokens.

`keys issue` opens the database itself, so no gate may serve a SQLite file meanwhile; a running gate issues keys with
`asyncgate issue-key`.  `keys signing` changes files only; running gates notice that.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
import msgspec

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands import calling, cli
from asyncgate.parts.identity.admin import issue_first_key
from asyncgate.parts.model import errors, wire_admin
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Configured, Settings, SettingsError
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.options import add_settings_loader, add_settings_options

ISSUE = OPERATIONS["issue_key"]


@click.group(cls=calling.CommandGroup)
def keys() -> None:
    """Issue the first key of a gate, and look after the keys that sign its access tokens."""


async def write_first_key(settings: Settings, fields: dict[str, Any]) -> Any:
    """Write a new key into the database that the settings name."""
    backend = await open_backend(settings.database.url, serving=True, settings=settings.database)
    try:
        return await issue_first_key(Engine(backend, settings),
                                     msgspec.convert(fields, wire_admin.IssueKey, strict=False))
    finally:
        await backend.close()


@keys.command()
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write the key to a new file that only you can read, instead of standard output.")
@calling.as_json
@add_settings_options
def issue(configured: Configured, out: str | None, as_json: bool, **given: Any) -> None:
    """Issue a key directly in the database; no gate may serve a SQLite file meanwhile.

    The text of the key is shown once, on standard output or in the FILE of --out.  With a running gate use asyncgate
    issue-key.
    """
    with KeyFile(out) as kept:
        made = issue_or_exit(configured, given)
        kept.put(made.api_key)
    key = made.key
    if as_json:
        answer = {"key": key, **({"file": out} if out else {"api_key": made.api_key})}
        return click.echo(msgspec.json.encode(answer))
    if not out:
        click.echo(made.api_key)
    where = f"its text is in {out}" if out else "its text is shown only once"
    click.echo(f"key {key.key_id} for {key.principal_kind} {key.principal_id}, {key.role}; {where}", err=True)


def issue_or_exit(configured: Configured, given: dict[str, Any]) -> Any:
    """Issue the key, or exit with an error."""
    fields = {name: value for name, value in given.items() if value not in (None, (), "")}
    cli.require_fields(ISSUE, fields)
    try:
        return asyncio.run(write_first_key(configured.settings, fields))
    except (errors.GateError, msgspec.ValidationError) as refusal:
        status = calling.EXIT_OF_STATUS.get(getattr(refusal, "status", 400), calling.EXIT_BROKEN)
        raise calling.exit_with(str(refusal), status) from None


class KeyFile:
    """The file of a key; it is created before the key, so that no key is issued that cannot be saved."""

    def __init__(self, path: str | None, option: str = "--out") -> None:
        self.path, self.option, self.is_full = path, option, False

    def __enter__(self) -> KeyFile:
        if self.path:
            try:
                self.file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                raise calling.exit_with(f"{self.path} exists already; give {self.option} a new file",
                                        calling.EXIT_CONFLICT) from None
            except OSError as error:
                raise calling.exit_with(f"cannot write {self.path}: {error.strerror}", calling.EXIT_WRONG) from None
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


@keys.group(cls=calling.CommandGroup)
def signing() -> None:
    """Make, rotate and show the keys that sign access tokens; running gates notice the change."""


def name_key_file(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command the path of the signing key: --file, or else the setting; report what is wrong with the file."""
    @add_settings_loader
    @click.option("--file", metavar="FILE", help="The PEM file of the key; default: security.jwt.private_key_path.")
    @wraps(run)
    def named(load: Callable[[], Configured], file: str | None, **options: Any) -> None:
        try:
            path = file or load().settings.security.jwt.private_key_path
            if not path:
                raise calling.exit_with("name the key by --file, or by the setting security.jwt.private_key_path",
                                        calling.EXIT_WRONG)
            run(path, **options)
        except FileExistsError as taken:
            raise calling.exit_with(
                f"{taken.filename} exists already: another rotation is under way, or was interrupted; "
                "remove it in that case", calling.EXIT_CONFLICT) from None
        except OSError as error:
            raise calling.exit_for_file(error.filename or path, error) from None
        except (SettingsError, errors.StartupError) as wrong:
            raise calling.exit_with(str(wrong), calling.EXIT_WRONG) from None
    return named


SIZES = click.Choice(["2048", "3072", "4096"])


@signing.command()
@name_key_file
@click.option("--bits", type=SIZES, default="3072", help="Size of the RSA key.")
@calling.as_json
def make(path: str, bits: str, as_json: bool) -> None:
    """Make a signing key in a new file that only you can read; an existing file is never replaced."""
    from asyncgate.parts.identity.signing import generate_pem, load_signing_keys

    with KeyFile(path, "--file") as kept:
        kept.put(generate_pem(int(bits)).rstrip())
    kid = load_signing_keys(path).current.key.kid
    click.echo(msgspec.json.encode({"kid": kid, "file": path}) if as_json else kid)
    click.echo(f"the key is in {path}; set security.jwt.private_key_path to it", err=True)


@signing.command()
@name_key_file
@click.option("--bits", type=SIZES, default="3072", help="Size of the new RSA key.")
@click.option("--overlap-days", type=click.IntRange(0, 90), default=90, show_default=True,
              help="Days that tokens of the old key stay valid; 0 if others may have the old key.")
@calling.as_json
def rotate(path: str, bits: str, overlap_days: int, as_json: bool) -> None:
    """Put a new key in the place of the current one; tokens of the old one stay valid for the overlap."""
    from asyncgate.parts.identity.signing import load_signing_keys, rotate_key_file

    old = load_signing_keys(path).current.key.kid
    kid = rotate_key_file(path, time.time(), overlap_days * DAY_SECONDS, int(bits)).key.kid
    click.echo(msgspec.json.encode({"kid": kid, "retired": old, "overlap_days": overlap_days}) if as_json else kid)
    until = f"its tokens stay valid for {overlap_days} more days" if overlap_days else "its tokens are refused now"
    click.echo(f"the old key was {old}; {until}; running gates notice within five seconds", err=True)


@signing.command()
@name_key_file
@calling.as_json
def show(path: str, as_json: bool) -> None:
    """Print the public keys as a key set (JWKS), as a gate publishes them."""
    from asyncgate.parts.identity.signing import load_signing_keys

    text = msgspec.json.encode(load_signing_keys(path).jwks())
    click.echo(text if as_json else msgspec.json.format(text))


@signing.command("verify")
@click.argument("statement")
@click.option("--jwks", "keys_file", type=click.File("rb"), required=True, metavar="FILE",
              help="The gate's public keys: what `keys signing show` printed when it signed; - is standard input.")
@calling.as_json
def verify_statement(statement: str, keys_file: Any, as_json: bool) -> None:
    """Check a statement that a gate has signed, such as the proof of an erasure, and print what it says."""
    from joserfc import jwt
    from joserfc.jwk import KeySet

    from asyncgate.parts.identity.jwt import UNFIT

    try:
        token = jwt.decode(statement.strip(), KeySet.import_key_set(json.load(keys_file)), algorithms=["RS256"])
    except UNFIT as wrong:
        raise calling.exit_with(f"no key in that file has signed this: {wrong}", calling.EXIT_BROKEN) from None
    text = msgspec.json.encode({"type": token.header.get("typ"), **token.claims})
    click.echo(text if as_json else msgspec.json.format(text))


issue.params += [cli.make_option(ISSUE, field) for name,
                 field in cli.list_fields(ISSUE.takes).items() if name != "tenant_id"]
