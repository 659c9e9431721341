"""`asyncgate reconcile` and `asyncgate rebuild`: a gate beside its ledger, and a gate made anew of its receipts."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from asyncgate import FENCES_SKIPPED
from asyncgate.backends import open_backend
from asyncgate.commands import calling, cli, verdicts
from asyncgate.commands.calling import EXIT_BROKEN, EXIT_CONFLICT, EXIT_NO_GATE, as_json, exit_with
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model.errors import GateError, StartupError
from asyncgate.parts.model.settings import Configured, Settings, SettingsError, mask_credentials
from asyncgate.parts.process.configured import configured

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.parts.receipts.collected import Collected
    from asyncgate.parts.receipts.reconcile import Findings, Mend
    from asyncgate.parts.receipts.sinks import Sink

READING_MS = 30_000     # nobody waits for what is read here


def allow_slow_reads(settings: Settings) -> Settings:
    """Return the settings with a wait for the ledger that a whole page may take."""
    ours = settings.ledger
    return replace(settings, ledger=replace(ours, timeout_ms=max(ours.timeout_ms, READING_MS)))


def open_ledger(settings: Settings, *, whole: bool = True) -> Sink:
    """Open the ledger; `whole` is for what needs one that gives our receipts back."""
    from asyncgate.parts.receipts import sinks
    if settings.receipt_mode == "standalone":
        raise StartupError("receipt_mode is standalone: there is no ledger; `asyncgate verify` checks what is stored")
    sink = sinks.open_sink(settings)
    if whole and not sink.reads:
        raise StartupError(
            f"a ledger of the profile {sinks.ledger_profile(settings)} cannot be read back: the whole receipts are in "
            "this gate's database, and those that the ledger refused are in the outbox")
    return sink


# Reconcile.


@click.command()
@click.option("--repair", is_flag=True, help="Do the cures that are safe; nobody may serve the gate meanwhile.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each difference, and one at the end.")
@click.option("--tenant", "tenants", metavar="ID", multiple=True, help="Only this tenant; may be given several times.")
@configured
def reconcile(configured: Configured, repair: bool, as_json: bool, tenants: tuple[str, ...]) -> None:
    """Compare what a gate holds with its ledger, and tell every difference with its cure.

    Tasks, leases, open obligations, the index of receipts and the outbox, against all receipts of the ledger.  Nothing
    is changed, and the gate may go on serving meanwhile.

    With --repair: receipts that the ledger lacks are sent again, those that it refused are offered once more, what it
    knows beyond this gate is taken over, and leases that it does not back are withdrawn; then all is compared again.
    No receipt is written.  A gate that somebody serves is refused: stop it first.

    A ledger that cannot be read to its end changes nothing, and that is exit status 7.  Exit status 5: there are
    differences; 0: there are none.
    """
    from asyncgate.parts.receipts.collected import Unreadable
    try:
        status = asyncio.run(run_reconcile(allow_slow_reads(configured.settings), repair, as_json, tenants))
    except Unreadable as away:
        raise exit_with(f"{escape_text(str(away))}; nothing was compared, and nothing was changed",
                        EXIT_NO_GATE) from None
    except (SettingsError, StartupError) as wrong:
        raise calling.exit_for(wrong) from None
    except GateError as wrong:
        raise exit_with(escape_text(str(wrong)), EXIT_BROKEN) from None
    sys.exit(status)


async def run_reconcile(settings: Settings, repair: bool, as_json: bool, tenants: tuple[str, ...]) -> int:
    """Compare, repair if that is wanted and compare again; return the exit status."""
    url = cli.require_database(settings.database.url)
    async with AsyncExitStack() as opened:
        sink = open_ledger(settings, whole=False)
        opened.push_async_callback(sink.close)
        backend = await (open_database_alone(opened, url) if repair else open_beside(opened, url, settings))
        engine, done, left = engine_over(backend, settings), {}, 0
        names = {engine.instance, backend.instance}
        if repair:
            from asyncgate.parts.receipts.mending import Mender
            from asyncgate.parts.receipts.outbox import Ledger
            ledger = Ledger(engine)
            opened.push_async_callback(ledger.sink.close)
            mender = Mender(engine, ledger)
            (await compare_once(backend, sink, names, tenants, mender)).close()
            left, done = await mender.send(), dict(mender.done)
        findings = await compare_once(backend, sink, names, tenants)
        with closing(findings):
            await add_state(backend, findings)
            (print_json if as_json else print_text)(findings, done, left, mask_credentials(url))
            return EXIT_CONFLICT if findings.wrong or left else 0


async def compare_once(backend: Backend, sink: Sink, names: set[str], tenants: tuple[str, ...],
                       mend: Mend | None = None) -> Findings:
    """Compare once, with a progress bar."""
    from asyncgate.parts.receipts.reconcile import compare_all
    with closing(Bar("comparing")) as bar:
        return await compare_all(backend, sink, set(names), bar.add, tenants, mend)


async def add_state(backend: Backend, findings: Findings) -> None:
    """Add the contradictions between the gate's state and its own receipts."""
    verdict = await verdicts.verify_backend(backend)
    findings.tasks = verdict.tasks
    for problem in verdict.problems:
        findings.add("state", "", str(problem))


async def open_beside(opened: AsyncExitStack, url: str, settings: Settings) -> Backend:
    """Open the database while a gate may be serving it."""
    backend = await open_backend(url, settings=settings.database)
    opened.push_async_callback(backend.close)
    return backend


async def open_database_alone(opened: AsyncExitStack, url: str) -> Backend:
    """Open the database; refuse one that a gate serves."""
    return await cli.open_alone(opened, "database", url)


def print_text(findings: Findings, done: dict[str, int], left: int, url: str) -> None:
    """Print the differences for a person, the cure of each kind once."""
    told: set[str] = set()
    for one in findings.all():
        where = " ".join(filter(None, [one.receipt_id and f"receipt {one.receipt_id}",
                                       one.task_id and f"task {one.task_id}"]))
        click.echo(escape_text(f"{one.kind}: {where}{': ' if where else ''}{one.detail}"))
        if one.kind not in told:
            click.echo(f"    cure: {one.cure}")
            told.add(one.kind)
    for kind, count in done.items():
        click.echo(f"repaired: {count} {kind}")
    if left:
        click.echo(f"{left} receipts still wait: the ledger does not take them now; the gate sends them when it serves")
    elif findings.waiting:
        click.echo(f"{findings.waiting} receipts are on their way; the gate sends them when it serves")
    click.echo(f"{findings.receipts} receipts and {findings.tasks} tasks here, {findings.foreign} receipts of others "
               "at the ledger")
    wrong = findings.wrong
    click.echo(f"{url}: {wrong} difference{'s' * (wrong > 1)}" if wrong else f"{url}: the ledger agrees")


def print_json(findings: Findings, done: dict[str, int], left: int, url: str) -> None:
    """Print a line for each difference, and one that sums them up."""
    for one in findings.all():
        click.echo(msgspec.json.encode(one))
    click.echo(msgspec.json.encode({
        "differences": findings.wrong, "kinds": dict(findings.counts), "repaired": done, "waiting":
        max(left, findings.waiting), "receipts": findings.receipts, "tasks": findings.tasks,
        "foreign": findings.foreign}))


# Rebuild.


@click.command()
@click.option("--file", metavar="FILE", help="A file of `asyncgate receipts export`, instead of the ledger.")
@click.option("--tenant", "tenants", metavar="ID", multiple=True,
              help="Which tenant of the ledger; may be given several times; without it the default one.")
@click.option("--instance", "instances", metavar="NAME", multiple=True,
              help="Which gate, where several wrote to the ledger; may be given several times.")
@click.option("--all-instances", is_flag=True, help="Take what every gate wrote, as where one had several names.")
@click.option("--skip-damaged", is_flag=True,
              help="Leave out receipts without the hash of what they say; take of a damaged FILE what is there.")
@as_json
@configured
def rebuild(configured: Configured, file: str | None, tenants: tuple[str, ...], instances: tuple[str, ...],
            all_instances: bool, skip_damaged: bool, as_json: bool) -> None:
    """Make a gate again after a disaster: from its receipts in the ledger, or in a FILE, into an empty database.

    The obligations that were open are open, tasks have their statuses, and results as far as receipts hold them.  Each
    task gets an event task.rebuilt that names what could not be known: payloads, priorities and other settings that no
    receipt states, idempotency keys, who was at work.

    A task that has not ended is held, with the reason rebuilt: its owner looks at it, then `asyncgate cancel-task` or
    `asyncgate release-hold`.  Fences begin above those of all earlier leases, so whoever still works under one is
    refused.  Where a task.result_ready was lost, it is written now.

    Keys, tenants' limits, the audit log, presences and the key that seals cursors are in no receipt.

    Serve the database only after exit status 0; what an interrupted rebuild leaves is removed, not continued.  Exit
    status 5: the database is not empty, or what is there is unclear; 7: the ledger cannot be read.  Nothing was
    written then.
    """
    from asyncgate.parts.receipts import rebuild as part
    chosen = frozenset(instances) if instances else None
    from asyncgate.parts.receipts import collected
    try:
        status = asyncio.run(run_rebuild(allow_slow_reads(configured.settings), file, tenants, chosen, all_instances,
                                         skip_damaged,
                                     as_json))
    except collected.Unreadable as away:
        raise exit_with(f"{escape_text(str(away))}; nothing was written", EXIT_NO_GATE) from None
    except (part.NotEmpty, part.Damaged, part.SeveralGates) as no:
        raise exit_with(escape_text(str(no)), EXIT_CONFLICT) from None
    except (SettingsError, StartupError) as wrong:
        raise calling.exit_for(wrong) from None
    except (part.RebuildFailed, GateError) as wrong:
        raise exit_with(escape_text(str(wrong)), EXIT_BROKEN) from None
    except KeyboardInterrupt:
        raise exit_with("stopped before the end; remove what is there and begin again", EXIT_BROKEN) from None
    sys.exit(status)


async def run_rebuild(settings: Settings, file: str | None, tenants: tuple[str, ...], instances: frozenset[str] | None,
                  all_instances: bool, skip_damaged: bool, as_json: bool = False) -> int:
    """Read everything, then write it; return the exit status."""
    from asyncgate.parts.receipts import rebuild as part
    async with AsyncExitStack() as opened:
        backend = await open_database_alone(opened, settings.database.url)
        await part.require_empty(backend)
        sources = await read_sources(opened, settings, file, tenants)
        problems: list[str] = []
        for collected in sources.values():
            part.choose(collected, frozenset(collected.instances()) if all_instances else instances)
            problems += part.require_undamaged(collected, skip_damaged)
        tallies = []
        with closing(Bar("writing", "receipts", sum(one.count() for one in sources.values()))) as bar:
            for tenant_id, collected in sources.items():
                job = part.Rebuild(backend, settings, tenant_id, collected, skeletons=file is None, count=bar.add)
                tallies.append(await job.run())
        made, url = part.total_of(tallies), mask_credentials(settings.database.url)
        made["problems"] = [*problems, *made["problems"]]
        if not as_json:
            print_rebuild(made)
        return verdicts.print_verdict(await verdicts.verify_backend(backend), url, as_json, rebuilt=made) or (
            EXIT_BROKEN * bool(made["problems"]))


async def read_sources(opened: AsyncExitStack, settings: Settings, file: str | None,
               tenants: tuple[str, ...]) -> dict[str, Collected]:
    """Read all receipts before anything is written."""
    from asyncgate.parts.receipts.collected import collect_from_file, collect_from_ledger
    sources: dict[str, Collected] = {}
    with closing(Bar("reading", "receipts")) as bar:
        if file is not None:
            tenant_id, collected = collect_from_file(file, bar.add)
            opened.callback(collected.close)
            return {tenant_id: collected}
        sink = open_ledger(settings)
        opened.push_async_callback(sink.close)
        for tenant_id in tenants or (settings.default_tenant_id,):
            sources[tenant_id] = await collect_from_ledger(sink, tenant_id, bar.add)
            opened.callback(sources[tenant_id].close)
    return sources


def print_rebuild(made: dict[str, Any]) -> None:
    """Say what was made."""
    for problem in made["problems"]:
        click.echo(escape_text(problem))
    click.echo(f"{made['tasks']} tasks made anew, {made['held']} of them held until their owners release or cancel "
               f"them, with fences raised by {FENCES_SKIPPED:,}")
    click.echo(f"{made['receipts']} receipts, {made['obligations']} open obligations, {made['schedules']} schedules; "
               f"{made['told']} task.result_ready that were lost are written now")
