"""`asyncgate receipts push` and `home`: move receipts from a gate's database to a ledger, and back (spec 20.9)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict, replace

from asyncgate import Engine
from asyncgate.commands import calling, carry, cli, verdicts
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.extras.ledger.commands import recovery
from asyncgate.parts.identity.admin import derive_tenant, find_tenants
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.settings import Configured, Settings, allow_slow_reads, mask_credentials
from asyncgate.parts.model.words import say_count
from asyncgate.parts.process.options import add_settings_options

if TYPE_CHECKING:
    from asyncgate.extras.ledger.push import PushTally
    from asyncgate.parts.receipts.files import SealedReading


# From the gate to the ledger.


@click.command()
@click.option("--file", metavar="FILE", help="Exported file to send, instead of the database.")
@click.option("--tenant", "tenants", metavar="TENANT", multiple=True,
              help="Only this tenant, by id or name; repeatable.  With --file: the tenant that receives them.")
@click.option("--after", metavar="TENANT:ID", default="", help="Start after this receipt, to resume an earlier push.")
@calling.as_json
@add_settings_options
def push(configured: Configured, file: str | None, tenants: tuple[str, ...], after: str, as_json: bool) -> None:
    """Send all receipts of a gate, or of an exported FILE, to the ledger in the settings.

    This moves a gate from standalone mode to a ledger: ledger.url names the ledger, whatever receipt_mode is.  The push
    covers all tenants, oldest receipts first, including archived ones.  The database is only read, and the gate may
    keep running; stop it before the last push, because receipts written meanwhile are not sent.

    Sending a receipt twice changes nothing, so after an interruption run the same command again; --after skips the
    receipts already sent.  Refused receipts are listed, and the others are sent.

    Exit status 0: the ledger has all receipts.  5: it lacks some.  7: it does not answer.
    """
    from asyncgate.extras.ledger import push as part
    settings = allow_slow_reads(configured.settings)
    if settings.receipt_mode == "standalone":
        settings = replace(settings, receipt_mode="memorygate_integrated")
    tally, refusals, verified = part.PushTally(), list[dict[str, str]](), None

    def refuse(receipt_id: str, why: str) -> None:
        refusals.append({"receipt_id": receipt_id, "why": why})
        if not as_json:
            click.echo(escape_text(f"{receipt_id}: {why}"))
    if file:
        with calling.exit_on_error(file), closing(Bar("checking", "receipts")) as bar:
            verified = carry.require_sound(file, bar.add)
    with calling.exit_on_error():
        try:
            with closing(Bar("sending", "receipts", verified.receipts if verified else None)) as bar:
                asyncio.run(send_receipts(settings, verified, tenants, after, tally, bar, refuse))
        except (part.LedgerAway, KeyboardInterrupt) as stop:
            print_push(tally, refusals, as_json)
            why, status = ("interrupted", calling.EXIT_INTERRUPTED) if isinstance(stop, KeyboardInterrupt) else (
                escape_text(str(stop)), calling.EXIT_NO_GATE)
            again = f"run the same command to resume{f', with --after {tally.after}' * bool(tally.after)}"
            raise calling.exit_with(f"{why}; {again}; sent receipts stay", status) from None
    print_push(tally, refusals, as_json)
    sys.exit(calling.EXIT_CONFLICT if tally.refused or tally.lost else 0)


async def send_receipts(settings: Settings, file: SealedReading | None, tenants: tuple[str, ...], after: str,
                        tally: PushTally, bar: Bar, refused: Callable[[str, str], None]) -> None:
    """Send the receipts of the database or the file."""
    from asyncgate.extras.ledger import push as part
    from asyncgate.extras.ledger import sinks
    sink = sinks.open_sink(settings)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(sink.close)
        push = part.Push(sink, settings, tally, bar.add, refused)
        first, _, behind = after.partition(":")
        if file is not None:
            if not sink.reads:
                raise errors.StartupError("this ledger needs the tasks, too: push from the database instead of --file")
            # A file names its tenant.
            tenant_id = derive_tenant(settings, tenants[0]) if len(tenants) == 1 or file.header is None else (
                file.header.tenant_id)
            await push.send(tenant_id, part.read_exported(push, tenant_id, file.path, behind))
            return
        backend = await recovery.open_beside(opened, cli.require_database(settings.database.url), settings)
        bar.of(None if after or tenants else await verdicts.count_rows(backend, [stored.Receipt]))
        engine = Engine(backend, settings)
        source = part.FromDatabase(engine, push)
        first = (await find_tenants(engine, [first]))[0] if first else ""
        for tenant_id in sorted(await find_tenants(engine, tenants) or await backend.tenants()):
            if tenant_id >= first:
                await push.send(tenant_id, source.pages(tenant_id, behind if tenant_id == first else ""))


def print_push(tally: PushTally, refusals: list[dict[str, str]], as_json: bool) -> None:
    """Print the outcome of a push."""
    more = f", {tally.passed_over} do not concern it" * bool(tally.passed_over)
    lost = f", {tally.lost} are lost" * bool(tally.lost)
    erased = f"; {say_count(tally.erased, 'receipt')} were erased, and went without content" * bool(tally.erased)
    verdicts.print_answer(as_json, {**asdict(tally), "refusals": refusals},
                 f"the ledger has {tally.taken} of the receipts and refuses {tally.refused}{lost}{more}{erased}")


# From the ledger to the gate.


@click.command()
@click.argument("target", metavar="TARGET")
@click.option("--leave-lost", is_flag=True,
              help="Continue without receipts that the ledger lost or changed; keep their hashes.")
@calling.as_json
@add_settings_options
def home(configured: Configured, target: str, leave_lost: bool, as_json: bool) -> None:
    """Copy a gate to TARGET, with its whole receipts from the ledger.

    This moves a gate from a ledger back to standalone mode.  Use the settings of integrated mode, which name the gate's
    database; TARGET is the URL of an empty database, as for `asyncgate copy`.  Stop the gate first.  The command
    compares gate and ledger, then copies everything as `asyncgate copy` does; each receipt gets its body from the
    ledger, or from the outbox, and must match its hash.  Gate and ledger are only read.

    Receipts of other authors stay in the ledger.  Serve TARGET, with receipt_mode standalone, only after exit status 0.
    After an interruption, run the same command to resume.

    Exit status 5: gate and ledger differ, or TARGET is in use; 7: the ledger cannot be read.  Then nothing was written.
    """
    with calling.exit_on_error(unanswered="nothing was written"):
        sys.exit(asyncio.run(bring_home(allow_slow_reads(configured.settings), target, leave_lost, as_json)))


async def bring_home(settings: Settings, target: str, leave_lost: bool, as_json: bool) -> int:
    """Compare, copy with bodies, and print the counts; return the exit status."""
    source = settings.database.url
    if cli.identify_database(source) == cli.identify_database(target):
        raise errors.StartupError("TARGET is the gate's own database; name an empty one")
    from asyncgate.extras.ledger import ledger_backed as part
    async with AsyncExitStack() as opened:
        sink = recovery.open_ledger(settings)
        opened.push_async_callback(sink.close)
        backend = await cli.open_alone(opened, "database", cli.require_database(source))
        there = part.LedgerBackedGate(backend, sink, lenient=leave_lost)
        opened.callback(there.close)
        with closing(Bar("reading")) as bar:
            findings = await there.collect({Engine(backend, settings).instance, backend.instance}, bar.add)
        with closing(findings):
            part.require_settled(findings, leave_lost)
            waiting, foreign = findings.waiting + findings.counts["parked"], findings.foreign
        new = await cli.open_alone(opened, "target", target)
        def totals() -> dict[str, int]:
            brought = {name: sum(getattr(counts, name) for counts in there.brought.values())
                       for name in ("filled", "own", "bare")}
            return {**brought, "waiting": waiting, "foreign": foreign}
        status = await cli.write_and_prove(there, new, mask_credentials(target), as_json, totals)
        if not as_json:
            print_receipts(**totals())
        return status


def print_receipts(*, filled: int, own: int, bare: int, waiting: int, foreign: int) -> None:
    """Print the counts of receipts."""
    click.echo(f"{say_count(filled, 'receipt')} from the ledger or the outbox, {own:,} already whole in the gate")
    if bare:
        click.echo(f"{bare} are hashes only: the ledger lost or changed them")
    if waiting:
        click.echo(f"{waiting} of them are not in the ledger yet; they are sent if the gate returns to integrated mode")
    if foreign:
        click.echo(f"{say_count(foreign, 'receipt')} of other authors left in the ledger")
