"""`asyncgate reconcile` and `asyncgate rebuild`: compare a gate with its ledger, or rebuild it from receipts."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING, Any

import click
import msgspec

from asyncgate import FENCES_SKIPPED
from asyncgate.backends import open_backend
from asyncgate.commands import calling, cli, verdicts
from asyncgate.commands.read_only import open_for_reading
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.identity.admin import derive_tenant, find_tenants
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import Configured, Settings, allow_slow_reads, mask_credentials
from asyncgate.parts.model.words import say_count
from asyncgate.parts.process.options import add_settings_options
from asyncgate.parts.receipts.sealing import ledger_profile

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.extras.ledger.collected import Collected
    from asyncgate.extras.ledger.reconcile import Findings, Mend
    from asyncgate.extras.ledger.sinks import Sink

NO_LEDGER = "`asyncgate verify` checks what is stored"


def open_ledger(settings: Settings, *, whole: bool = True, instead: str = NO_LEDGER) -> Sink:
    """Open the ledger; `whole` demands that it can return whole receipts, `instead` helps where there is none."""
    from asyncgate.extras.ledger import sinks
    if settings.receipt_mode == "standalone":
        raise errors.StartupError(f"receipt_mode is standalone: there is no ledger; {instead}")
    sink = sinks.open_sink(settings)
    if whole and not sink.reads:
        raise errors.StartupError(
            f"a ledger with the profile {ledger_profile(settings)} cannot return receipts: they are whole in "
            "this gate's database, and those that the ledger refused are in its outbox")
    return sink


# Reconcile.


@click.command()
@click.option("--repair", is_flag=True, help="Apply the safe repairs; the gate must not be running.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per difference, and a summary.")
@click.option("--tenant", "tenants", metavar="TENANT", multiple=True,
              help="Only this tenant, by id or name; repeatable.")
@add_settings_options
def reconcile(configured: Configured, repair: bool, as_json: bool, tenants: tuple[str, ...]) -> None:
    """Compare a gate with its ledger, and list every difference with its repair.

    The command compares tasks, leases, open obligations, the index of receipts and the outbox with all receipts of the
    ledger.  It changes nothing, and the gate may keep running.

    With --repair it sends receipts that the ledger lacks or refused, adopts receipts that only the ledger has,
    withdraws leases that the ledger does not confirm, and compares again.  It writes no new receipt.  Stop the gate
    first: a database in use is refused.

    Exit status 0: no differences; 5: differences; 7: the ledger could not be read completely, and nothing was changed.
    """
    with calling.exit_on_error(unanswered="nothing was compared, and nothing was changed"):
        sys.exit(asyncio.run(run_reconcile(allow_slow_reads(configured.settings), repair, as_json, tenants)))


async def run_reconcile(settings: Settings, repair: bool, as_json: bool, tenants: tuple[str, ...]) -> int:
    """Compare; with `repair`, repair and compare again; return the exit status."""
    url = cli.require_database(settings.database.url)
    async with AsyncExitStack() as opened:
        sink = open_ledger(settings, whole=False)
        opened.push_async_callback(sink.close)
        backend = await (cli.open_alone(opened, "database", url) if repair else open_beside(opened, url, settings))
        engine, done, left = engine_over(backend, settings), {}, 0
        names, tenants = {engine.instance, backend.instance}, await find_tenants(engine, tenants)
        if repair:
            from asyncgate.extras.ledger.mending import Mender
            from asyncgate.extras.ledger.outbox import Ledger
            ledger = Ledger(engine)
            opened.push_async_callback(ledger.sink.close)
            mender = Mender(engine, ledger)
            (await compare_once(backend, sink, names, tenants, mender)).close()
            left, done = await mender.send(), dict(mender.done)
        findings = await compare_once(backend, sink, names, tenants)
        with closing(findings):
            verdict = await verdicts.verify_backend(backend)    # its state may contradict its own receipts
            findings.tasks = verdict.tasks
            for problem in verdict.problems:
                findings.add("state", "", str(problem))
            (print_json if as_json else print_text)(findings, done, left, mask_credentials(url))
            return calling.EXIT_CONFLICT if findings.wrong or left else 0


async def compare_once(backend: Backend, sink: Sink, names: set[str], tenants: tuple[str, ...],
                       mend: Mend | None = None) -> Findings:
    """Compare once, with a progress bar."""
    from asyncgate.extras.ledger.reconcile import compare_all
    with closing(Bar("comparing")) as bar:
        return await compare_all(backend, sink, set(names), bar.add, tenants, mend)


async def open_beside(opened: AsyncExitStack, url: str, settings: Settings) -> Backend:
    """Open the database while a gate may be serving it."""
    readable = opened.enter_context(open_for_reading(url))
    backend = await open_backend(readable, settings=settings.database)
    opened.push_async_callback(backend.close)
    return backend


def print_text(findings: Findings, done: dict[str, int], left: int, url: str) -> None:
    """Print the differences as text, with the repair of each kind once."""
    told: set[str] = set()
    for finding in findings.all():
        where = " ".join(filter(None, [finding.receipt_id and f"receipt {finding.receipt_id}",
                                       finding.task_id and f"task {finding.task_id}"]))
        click.echo(escape_text(f"{finding.kind}: {where}{': ' if where else ''}{finding.detail}"))
        if finding.kind not in told:
            click.echo(f"    repair: {finding.cure}")
            told.add(finding.kind)
    for kind, count in done.items():
        click.echo(f"repaired: {count} {kind}")
    if left:
        click.echo(f"{left} receipts still wait: the ledger does not accept them now; the gate sends them when it runs")
    elif findings.waiting:
        click.echo(f"{findings.waiting} receipts wait in the outbox; the gate sends them when it runs")
    click.echo(f"{findings.receipts} receipts and {findings.tasks} tasks here, {findings.foreign} receipts of others "
               "in the ledger")
    wrong = findings.wrong
    click.echo(f"{url}: {say_count(wrong, 'difference')}" if wrong else f"{url}: the ledger agrees")


def print_json(findings: Findings, done: dict[str, int], left: int, url: str) -> None:
    """Print a JSON line per difference, and a summary."""
    for finding in findings.all():
        click.echo(msgspec.json.encode(finding))
    click.echo(msgspec.json.encode({
        "differences": findings.wrong, "kinds": dict(findings.counts), "repaired": done, "waiting":
        max(left, findings.waiting), "receipts": findings.receipts, "tasks": findings.tasks,
        "foreign": findings.foreign}))


# Rebuild.


@click.command()
@click.option("--file", metavar="FILE", help="Exported file to read, instead of the ledger.")
@click.option("--tenant", "tenants", metavar="TENANT", multiple=True,
              help="Tenant of the ledger, by id or name; repeatable; default: the default tenant.")
@click.option("--instance", "instances", metavar="NAME", multiple=True,
              help="Gate to rebuild, if several wrote to the ledger; repeatable.")
@click.option("--all-instances", is_flag=True, help="Include the receipts of every gate, such as renamed ones.")
@click.option("--skip-damaged", is_flag=True,
              help="Skip receipts that do not match their hash; read the sound part of a damaged FILE.")
@calling.as_json
@add_settings_options
def rebuild(configured: Configured, file: str | None, tenants: tuple[str, ...], instances: tuple[str, ...],
            all_instances: bool, skip_damaged: bool, as_json: bool) -> None:
    """Rebuild a gate after a disaster, from its receipts in the ledger or in a FILE, into an empty database.

    The command restores open obligations, the statuses of tasks, and the results that receipts contain.  Each task gets
    an event task.rebuilt that names what is lost: payloads, recorded steps, priorities and other settings that no
    receipt contains, idempotency keys, and the worker of a running task.

    Unfinished tasks are put on hold, with the reason rebuilt: their owners check them, then use `asyncgate cancel-task`
    or `asyncgate release-hold`.  Fences start above those of all earlier leases, so workers with such a lease are
    refused.  A lost task.result_ready is written again.

    Keys, tenants' limits, the audit log, presences and the key that signs cursors are not restored, because no receipt
    contains them.

    Serve the database only after exit status 0.  A rebuild cannot resume: after an interruption, remove the database
    and start again.  Exit status 5: the database is not empty, or the receipts are ambiguous; 7: the ledger cannot be
    read.  Then nothing was written.
    """
    chosen = frozenset(instances) if instances else None
    with calling.exit_on_error(file or "the database", unanswered="nothing was written",
                               interrupted="remove the database and start again"):
        with open(file or os.devnull, "rb"):
            pass        # before a database is made for nothing
        sys.exit(asyncio.run(run_rebuild(allow_slow_reads(configured.settings), file, tenants, chosen, all_instances,
                                         skip_damaged, as_json)))


async def run_rebuild(settings: Settings, file: str | None, tenants: tuple[str, ...], instances: frozenset[str] | None,
                  all_instances: bool, skip_damaged: bool, as_json: bool = False) -> int:
    """Read all receipts, then write the gate; return the exit status."""
    from asyncgate.extras.ledger import rebuild as part
    async with AsyncExitStack() as opened:
        backend = await cli.open_alone(opened, "database", settings.database.url)
        await part.require_empty(backend)
        sources = await read_sources(opened, settings, file, tenants)
        problems: list[str] = []
        for collected in sources.values():
            part.choose(collected, frozenset(collected.instances()) if all_instances else instances)
            problems += part.require_undamaged(collected, skip_damaged)
        tallies = []
        with closing(Bar("writing", "receipts", sum(source.count() for source in sources.values()))) as bar:
            for tenant_id, collected in sources.items():
                job = part.Rebuild(backend, settings, tenant_id, collected, skeletons=file is None, count=bar.add)
                tallies.append(await job.run())
        url = mask_credentials(settings.database.url)
        made: dict[str, Any] = {name: sum(getattr(tally, name) for tally in tallies) for name in (
            "tasks", "held", "proven", "resumed", "receipts", "erased", "obligations", "schedules", "told")}
        made["problems"] = [*problems, *(problem for tally in tallies for problem in tally.problems)]
        if not as_json:
            print_rebuild(made)
        return verdicts.print_verdict(await verdicts.verify_backend(backend), url, as_json, rebuilt=made) or (
            calling.EXIT_BROKEN * bool(made["problems"]))


async def read_sources(opened: AsyncExitStack, settings: Settings, file: str | None,
               tenants: tuple[str, ...]) -> dict[str, Collected]:
    """Read all receipts before anything is written."""
    from asyncgate.extras.ledger.collected import collect_from_file, collect_from_ledger
    sources: dict[str, Collected] = {}
    with closing(Bar("reading", "receipts")) as bar:
        if file is not None:
            tenant_id, collected = collect_from_file(file, bar.add)
            opened.callback(collected.close)
            return {tenant_id: collected}
        sink = open_ledger(settings, instead="--file names a file of `asyncgate receipts export`")
        opened.push_async_callback(sink.close)
        for named in tenants or (settings.default_tenant_id,):
            tenant_id = derive_tenant(settings, named)
            sources[tenant_id] = await collect_from_ledger(sink, tenant_id, bar.add, takes_erased=True)
            opened.callback(sources[tenant_id].close)
            if tenants and not sources[tenant_id].count():
                raise errors.StartupError(
                    f"--tenant: the ledger has no receipt of a tenant {named}; one that was renamed is "
                    "found by its id")
    return sources


def print_rebuild(made: dict[str, Any]) -> None:
    """Print the counts of a rebuild."""
    for problem in made["problems"]:
        click.echo(escape_text(problem))
    click.echo(f"{say_count(made['tasks'], 'task')} rebuilt, {made['held']:,} of them on hold until their owners "
               f"release or cancel them, with fences raised by {FENCES_SKIPPED:,}")
    if made["proven"] or made["resumed"]:
        click.echo("no recorded step: receipts have none. The digest in task.completed still proves those of "
                   f"{say_count(made['proven'], 'task')}; {say_count(made['resumed'], 'unfinished task')} had a "
                   "worker: the next one is told that steps are lost (steps_lost), and does not begin anew")
    erased = f" ({made['erased']:,} of them erased)" if made["erased"] else ""
    click.echo(f"{say_count(made['receipts'], 'receipt')}{erased}, "
               f"{say_count(made['obligations'], 'open obligation')}, {say_count(made['schedules'], 'schedule')}; "
               f"{say_count(made['told'], 'lost task.result_ready receipt')} written again")
