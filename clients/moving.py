"""`asyncgate receipts push` and `home`: from a gate's own database into a ledger, and back (spec 20.9)."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, closing
from importlib import import_module
from typing import Any

import click
from msgspec.structs import replace

from asyncgate import Engine, GateError, StartupError, configured
from asyncgate.clients import carry, cli, recovery
from asyncgate.clients.receipts import receipts, said_of
from asyncgate.parts.settings import Configured, Settings, SettingsError, discreet


def integrated(settings: Settings) -> Settings:
    """Return the settings as they are once receipts go to the ledger, with time for large calls."""
    mode = "memorygate_integrated" if settings.receipt_mode == "standalone" else settings.receipt_mode
    return recovery.patient(replace(settings, receipt_mode=mode))


# To the ledger.


@receipts.command()
@click.option("--file", metavar="FILE", help="A file of `asyncgate receipts export`, instead of the database.")
@click.option("--tenant", "tenants", metavar="ID", multiple=True,
              help="Only this tenant; may be given several times.  With --file: whose receipts they become there.")
@click.option("--after", metavar="TENANT:ID", default="", help="Begin behind this receipt, where an earlier push was.")
@configured
def push(configured: Configured, file: str | None, tenants: tuple[str, ...], after: str) -> None:
    """Send all receipts of a gate, or of an exported FILE, to the ledger of the settings.

    The way from standalone into a ledger: memorygate.url says where it is, whatever receipt_mode still says.  All
    tenants go, oldest receipts first, with those in the archive; the database is only read, and the gate may go on
    meanwhile.  What it writes then is not sent: stop it for the last push.

    Sending a receipt again changes nothing, so after an interruption the same command goes on; --after saves the way
    to where it stood.  A receipt that the ledger refuses is listed, and the others go on.

    Exit status 0: the ledger has them all.  5: some it has not.  7: it does not answer.
    """
    settings, part = integrated(configured.settings), import_module("asyncgate.backends.receipts_push")
    tally = part.Tally()
    try:
        with said_of(file or "the database"):
            verified = file and verified_file(file)
        with closing(cli.Counter("sent {:,} receipts")) as counter:
            asyncio.run(pushed(settings, file, verified, tenants, after, tally, counter))
    except part.Away as away:
        report(tally)
        raise cli.ended(f"{cli.plain(str(away))}; {further(tally)}", cli.NO_GATE) from None
    except KeyboardInterrupt:
        report(tally)
        raise cli.ended(f"stopped before the end; {further(tally)}", cli.BROKEN) from None
    except (GateError, SettingsError, StartupError) as wrong:
        raise click.ClickException(cli.plain(str(wrong))) from None
    report(tally)
    sys.exit(cli.CONFLICT if tally.refused or tally.lost else 0)


def verified_file(file: str) -> str:
    """See that a file is as it was written; return whose receipts it has."""
    with closing(cli.Counter("checked {:,} receipts")) as counter:
        header = carry.required(file, counter.add).header
    assert header is not None
    return header.tenant_id


async def pushed(settings: Settings, file: str | None, of_file: str | None, tenants: tuple[str, ...], after: str,
                 tally: Any, counter: cli.Counter) -> None:
    """Send what was asked for."""
    part = import_module("asyncgate.backends.receipts_push")
    sink = import_module("asyncgate.backends.receipts_sinks").open_sink(settings)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(sink.close)
        push = part.Push(sink, settings, tally, counter.add, refused)
        first, _, behind = after.partition(":")
        if file is not None:
            if not sink.reads:
                raise StartupError("this ledger wants to know of tasks, too: push from the database")
            (tenant_id,) = tenants if len(tenants) == 1 else (of_file,)
            await push.send(tenant_id, part.from_file(push, tenant_id, carry.batches(file), behind))
            return
        backend = await recovery.beside(opened, cli.existing(settings.database.url), settings)
        source = part.FromDatabase(Engine(backend, settings), push)
        for tenant_id in sorted(tenants or await backend.tenants()):
            if tenant_id >= first:
                await push.send(tenant_id, source.pages(tenant_id, behind if tenant_id == first else ""))


def refused(receipt_id: str, why: str) -> None:
    """Name a receipt that the ledger does not have now."""
    click.echo(cli.plain(f"{receipt_id}: {why}"))


def further(tally: Any) -> str:
    """Say how to go on."""
    return f"what went is there, and the same command goes on{f' with --after {tally.after}' * bool(tally.after)}"


def report(tally: Any) -> None:
    """Say what became of the receipts."""
    more = f", {tally.passed_over} are none of its business" * bool(tally.passed_over)
    lost = f", {tally.lost} are lost" * bool(tally.lost)
    click.echo(f"the ledger has {tally.taken} of the receipts and refuses {tally.refused}{lost}{more}")


# And back.


@receipts.command()
@click.argument("target", metavar="TARGET")
@click.option("--leave-lost", is_flag=True, help="Go on without what the ledger lost or changed; hashes of it stay.")
@configured
def home(configured: Configured, target: str, leave_lost: bool) -> None:
    """Bring the receipts of a gate home from its ledger: a copy of the gate at TARGET has them whole.

    The way from a ledger back to standalone.  The settings are still those of integrated mode and name the gate's
    database; TARGET is the URL of a fresh one, as for `asyncgate copy`.  Stop the gate first.  Everything comes along
    as with `asyncgate copy`, and each receipt gets its body from the ledger, or from the outbox where it still waits;
    one that does not have its own hash then is refused.  Gate and ledger are compared first, and only read.

    What others stated in the ledger stays there.  Serve TARGET, with receipt_mode standalone, only after exit status 0.
    The same command goes on after an interruption.

    Exit status 5: gate and ledger differ, or TARGET is in use; 7: the ledger cannot be read.  Nothing was written then.
    """
    copying, part = import_module("asyncgate.clients.copy"), import_module("asyncgate.backends.receipts_home")
    try:
        status = asyncio.run(brought(recovery.patient(configured.settings), target, leave_lost))
    except import_module("asyncgate.backends.receipts_collected").Unreadable as away:
        raise cli.ended(f"{cli.plain(str(away))}; nothing was written", cli.NO_GATE) from None
    except (copying.TargetUsed, part.InTheWay, part.NoBody) as no:
        raise cli.ended(cli.plain(str(no)), cli.CONFLICT) from None
    except (copying.CopyFailed, copying.Served, GateError, SettingsError, StartupError) as wrong:
        raise click.ClickException(cli.plain(str(wrong))) from None
    except KeyboardInterrupt:
        raise cli.ended("stopped before the end; the same command goes on from here", cli.BROKEN) from None
    sys.exit(status)


async def brought(settings: Settings, target: str, leave_lost: bool) -> int:
    """Compare, then copy with bodies, and say what came; return the exit status."""
    source, copying = settings.database.url, import_module("asyncgate.clients.copy")
    if cli.place(source) == cli.place(target):
        raise StartupError("TARGET is the database of the gate itself; name a fresh one")
    part = import_module("asyncgate.backends.receipts_home")
    async with AsyncExitStack() as opened:
        sink = recovery.sink_of(settings)
        opened.push_async_callback(sink.close)
        backend = await cli.alone(copying, opened, "database", cli.existing(source))
        there = part.Home(backend, sink, lenient=leave_lost)
        opened.callback(there.close)
        with closing(cli.Counter("read {:,} rows")) as counter:
            findings = await there.collect({Engine(backend, settings).instance, backend.instance}, counter.add)
        with closing(findings):
            part.in_the_way(findings, leave_lost)
            waiting, foreign = findings.waiting + findings.counts["parked"], findings.foreign
        new = await cli.alone(copying, opened, "target", target)
        with closing(cli.Counter()) as counter:
            found = await copying.survey(there, new, counter.add)
        status = await cli.carried(copying, there, new, found, discreet(target))
        came(there.brought.values(), waiting, foreign)
        return status


def came(brought: Any, waiting: int, foreign: int) -> None:
    """Say what has come home."""
    filled, own, bare = (sum(getattr(one, name) for one in brought) for name in ("filled", "own", "bare"))
    click.echo(f"{filled} receipts have come home, {own} were whole here")
    if bare:
        click.echo(f"{bare} are hashes only: the ledger lost or changed what they said")
    if waiting:
        click.echo(f"{waiting} of them the ledger does not have yet; they go there if the gate is integrated again")
    if foreign:
        click.echo(f"{foreign} receipts that others stated stay at the ledger")
