"""`asyncgate doctor`: examine an installation, and the gate that runs it if there is one."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import click
import msgspec

from asyncgate import __version__
from asyncgate.backends.sqlite_examination import Holder, read_holder
from asyncgate.clients.http import Http, Refusal, Unreachable
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import console, escape_text, is_terminal
from asyncgate.extras.doctor import CHECKS, Check, examine
from asyncgate.extras.doctor.installation import Installation
from asyncgate.extras.doctor.production import check_production
from asyncgate.parts.model import findings
from asyncgate.parts.model.settings import Configured, SettingsError
from asyncgate.parts.model.words import say_count
from asyncgate.parts.process.options import add_settings_loader

GATE_CHECK = "gate"
HEALTH_SECONDS = 10.0       # a gate that takes longer to say that it is healthy hangs
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@click.command()
@click.option("--production", is_flag=True, help="Also walk the checklist before going live.")
@calling.as_json
@calling.add_gate_options
@add_settings_loader
def doctor(load: Callable[[], Configured], at: Connection, as_json: bool, production: bool) -> None:
    """Examine an installation: settings, file rights, disk, clock, database, TLS, ledger, limits, and a running gate.

    Each finding has its cure: the next command or setting.  Nothing is changed; the gate may run or not.  The gate
    that serves the SQLite file, or that --url or --profile names, is asked what only it can tell.  With --production it
    walks the checklist before going live, too.

    Exit status: 0 nothing worse than a note, 1 warnings or errors, 2 the settings cannot be read.
    """
    try:
        configured = load()
    except SettingsError as wrong:
        unread = msgspec.structs.replace(findings.alarm(str(wrong),
                                                        "correct it; docs/reference.md lists every setting"),
                                         check="settings")
        print_examination([unread], as_json)
        sys.exit(calling.EXIT_WRONG)
    checks = {**CHECKS, **({"production": check_production} if production else {})}
    results = run_checks(Installation(configured.settings, configured.origins, os.environ, name_public_url(at)), checks)
    results += ask_gate(configured, at, results)
    print_examination(results, as_json)
    sys.exit(calling.EXIT_BROKEN if findings.worst_of(results) in ("warning", "error") else 0)


def name_public_url(at: Connection) -> str:
    """Return the address under which others reach the gate, if somebody has said it."""
    return at.url or os.environ.get("ASYNCGATE_URL", "")


def run_checks(at: Installation, checks: Mapping[str, Check]) -> list[findings.Finding]:
    """Carry out checks that need no running gate; a terminal shows which one is under way."""
    with ExitStack() as opened:
        told: Callable[[str], object] = str
        if is_terminal(sys.stderr):
            line = opened.enter_context(console(err=True).status("examining"))
            told = lambda name: line.update(f"examining: {name}")  # noqa: E731  # one line, used here
        return asyncio.run(examine(at, checks, told))


# The running gate.


def ask_gate(configured: Configured, at: Connection, known: list[findings.Finding]) -> list[findings.Finding]:
    """Return what the running gate says of itself and what is not known yet."""
    url, token, holder = find_gate(configured, at)
    if not url:
        hint = "name it with --url or --profile, if one runs" if holder is None else ""
        return [of_gate(findings.note("no running gate was asked", hint))]
    try:
        with Http(url, token) as gate:
            patience, gate.patience_seconds = gate.patience_seconds, HEALTH_SECONDS
            health = gate.call("health")
            gate.patience_seconds = patience
            return [judge_version(url, health), *add_unknown(known, examine_there(gate, url))]
    except (Unreachable, Refusal, ValueError) as none:
        return [of_gate(judge_silence(url, none, holder))]


def find_gate(configured: Configured, at: Connection) -> tuple[str, str | None, Holder | None]:
    """Return address and credential of the gate to ask, and who serves the SQLite file."""
    path = configured.settings.database.url.removeprefix("sqlite:///")
    is_file = path not in (configured.settings.database.url, ":memory:")
    holder = read_holder(path) if is_file else None
    if url := name_public_url(at):
        return url, at.token, holder
    if holder is None or not holder.lives:
        return "", None, holder
    mine = configured.settings.api_key if is_private(f"{path}.lock") else ""
    return reach(holder.url), at.token or mine or None, holder


def is_private(path: str) -> bool:
    """Whether nobody else can have written a file: what it names is given a credential."""
    return not os.stat(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def reach(url: str) -> str:
    """Return the address of this machine where a gate listens on all of them."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def examine_there(gate: Http, url: str) -> list[findings.Finding]:
    """Return what the gate has found."""
    try:
        return msgspec.convert(gate.call("examine_gate"), findings.Examination).findings
    except Refusal as refusal:
        return [of_gate(
            findings.note(f"the gate at {url} answers, and does not let this credential examine it ({refusal.code})",
                          "give an operator's credential: --token @FILE, or --profile"))]


def add_unknown(known: list[findings.Finding], theirs: list[findings.Finding]) -> Iterator[findings.Finding]:
    """Yield what the gate has found that was not found from here: other checks, and other cures."""
    checks, cures = {finding.check for finding in known}, {(finding.check, finding.cure) for finding in known}
    for finding in theirs:
        if finding.check not in checks or (finding.severity != "ok" and (finding.check, finding.cure) not in cures):
            yield finding


def judge_version(url: str, health: Mapping[str, Any]) -> findings.Finding:
    """Return which release runs."""
    if health["version"] == __version__:
        return of_gate(findings.all_well(f"the gate at {url} is healthy, version {health['version']}"))
    return of_gate(findings.note(f"the gate at {url} is {health['version']}, and this program is {__version__}",
                                 "restart the gate after an upgrade, or use the program of the gate"))


def judge_silence(url: str, none: Exception, holder: Holder | None) -> findings.Finding:
    """Return what it means that a gate gives no good answer."""
    if isinstance(none, Refusal):
        return findings.alarm(f"the gate at {url} is not healthy: {none.message}",
                              "see the other findings, and the gate's log")
    if holder and holder.lives and reach(holder.url) == url:
        return findings.alarm(f"process {holder.pid} serves the file and does not answer: {none}",
                              f"look into its log; if it hangs, stop it (kill {holder.pid}) and start it again")
    if isinstance(none, ValueError):
        return findings.warn(f"the gate at {url} was not asked: {none}", "correct --url, --token or --profile")
    return findings.alarm(str(none), "start it with `asyncgate serve`, or correct --url")


def of_gate(finding: findings.Finding) -> findings.Finding:
    """Return a finding of this command's own check."""
    return msgspec.structs.replace(finding, check=GATE_CHECK)


# Printing.


def print_examination(results: list[findings.Finding], as_json: bool) -> None:
    """Print findings, as JSON or for people."""
    if as_json:
        return click.echo(msgspec.json.encode(findings.Examination(findings.worst_of(results), results)))
    wide = max(len(finding.check) for finding in results)
    for finding in results:
        print_finding(finding, wide)
    counts = [say_count(number, name) for name in ("error", "warning", "note")
              if (number := sum(finding.severity == name for finding in results))]
    click.echo(", ".join(counts) or "all well")


def print_finding(finding: findings.Finding, wide: int) -> None:
    """Print one finding, with its cure below."""
    lines = [f"{finding.check:{wide}}  {escape_text(finding.seen)}"]
    if finding.cure:
        lines.append(f"{'':{wide}}  → {escape_text(finding.cure)}")
    for at, line in enumerate(lines):
        word = f"{finding.severity if at == 0 else '':7}  "
        if is_terminal(sys.stdout):
            console().print(word, style=STYLES[finding.severity], end="")
        else:
            click.echo(word, nl=False)
        click.echo(line)
