"""What a run of torture has shown, as JSON and as a page; and a history, drawn."""

from __future__ import annotations

import os
import platform
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from asyncgate.conformance import drift
from asyncgate.conformance.faults import FAULTS
from asyncgate.conformance.history import Call
from asyncgate.conformance.minimizing import minimize
from asyncgate.conformance.postgres_server import find_programs
from asyncgate.conformance.recording import Recorded, write_record
from asyncgate.conformance.torture import Round, TorturePlan

NOT_COVERED = (
    "power cuts and failing disks under Postgres, whose server looks after its files; its fsync was off, so that only "
    "the process died",
    "fail-over by a cluster manager: a standby was promoted by this command")
LISTED_VIOLATIONS = 20        # violations of a round that are listed
MOST_MINIMIZED = 20_000       # calls: delta debugging of a longer history takes hours
TREND_HEADS = ("measured", "second quarter", "last quarter", "change in the second half, or times", "allowed", "judged")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { border: 1px solid #d0d7de; padding: .3rem .6rem }
th { text-align: left; background: #f6f8fa } td.n { text-align: right } pre { overflow-x: auto; background: #f6f8fa }
.good { color: #116329 } .bad { color: #a40e26 } svg text { font: 11px system-ui, sans-serif; fill: #57606a }
"""
COLORS = {"ok": "#2da44e", "fail": "#bf8700", "unknown": "#cf222e"}
LANE, LABEL, WIDTH = 22, 90, 1000


class Violation(Struct):
    """A violation, and where its history is."""

    database: str
    round: int
    text: str
    history: str = ""           # files beside the report
    smallest: str = ""
    drawing: str = ""


class Tortured(Struct):
    """What was done to one database."""

    database: str
    faults: list[str]
    rounds: int = 0
    operations: int = 0
    unknown: int = 0
    tasks: int = 0
    seconds: float = 0.0
    violations: int = 0
    done: Counter[str] = field(default_factory=Counter)
    trends: list[drift.Trend] = field(default_factory=list)         # of a soak
    samples: str = ""           # the file of its measurements, beside the report


class TortureReport(Struct):
    """What a run has shown."""

    command: str
    seed: int
    gates: int
    began: str
    versions: dict[str, str]
    machine: dict[str, Any]
    databases: list[Tortured] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    not_covered: tuple[str, ...] = NOT_COVERED
    interrupted: bool = False       # by Ctrl-C

    @contextmanager
    def ending_when_interrupted(self) -> Iterator[None]:
        """End the block at Ctrl-C, and note that."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    @contextmanager
    def noting_interrupt(self) -> Iterator[None]:
        """Note the first Ctrl-C in a block, which ends itself then; the second one ends the program.

        Where gates are simulated, an exception would look like one of their deaths.
        """
        def note(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def count(self, plan: TorturePlan, done: Round, folder: Path | None) -> None:
        """Count a round, and keep its history if it went wrong."""
        name = mask(plan.url)
        if not self.databases or self.databases[-1].database != name:
            self.databases.append(Tortured(name, list(plan.faults)))
        row = self.databases[-1]
        if done.record is not None and done.record.samples:
            row.trends = drift.find_trends(done.record.samples)
            if folder is not None:
                row.samples = f"soak-{name.partition(':')[0]}.jsonl"
                write_record(folder / row.samples, Recorded(tenant=done.record.tenant, samples=done.record.samples))
        row.rounds += 1
        row.done += done.faults
        for field_name in ("operations", "unknown", "tasks", "seconds"):
            setattr(row, field_name, getattr(row, field_name) + getattr(done, field_name))
        row.violations += len(done.violations)
        for number, text in enumerate(done.violations[:LISTED_VIOLATIONS]):
            violation = Violation(name, done.number, text)
            if folder is not None and done.record is not None:
                keep_history(folder, f"{name.partition(':')[0]}-{done.number}", number, violation, done.record)
            self.violations.append(violation)


def begin_evidence(command: str, plan_seed: int, gates: int) -> TortureReport:
    """Return what is known before the first round."""
    programs = find_programs()
    versions = {"asyncgate": version("asyncgate"), "python": platform.python_version(),
                "sqlite": sqlite3.sqlite_version, **({"postgres": programs.version()} if programs else {})}
    machine = {"system": f"{platform.system()} {platform.release()}", "architecture": platform.machine(),
               "processors": os.cpu_count()}
    return TortureReport(command, plan_seed, gates, datetime.now(UTC).isoformat(timespec="seconds"), versions, machine)


def mask(url: str) -> str:
    """Return a URL without the user and the password in it."""
    return re.sub(r"//[^@/]*@", "//***@", url)


def keep_history(folder: Path, name: str, number: int, violation: Violation, record: Recorded) -> None:
    """Write the history of a violation, its smallest part, and a drawing of that."""
    violation.history, part = f"{name}.jsonl", f"{name}-{number}"
    violation.smallest, violation.drawing = f"{part}.jsonl", f"{part}.html"
    if not (folder / violation.history).exists():
        write_record(folder / violation.history, record)
    if len(record.calls) > MOST_MINIMIZED:
        violation.smallest = violation.drawing = ""
        return
    smallest = minimize(record, violation.text) if violation.text not in record.others else record
    write_record(folder / violation.smallest, smallest)
    (folder / violation.drawing).write_text(draw_history(smallest, violation.text), encoding="utf-8")


def write_evidence(folder: Path, evidence: TortureReport) -> None:
    """Write the report."""
    (folder / "torture.json").write_bytes(msgspec.json.format(msgspec.json.encode(evidence), indent=2) + b"\n")
    (folder / "torture.html").write_text(show_evidence(evidence), encoding="utf-8")


def show_evidence(evidence: TortureReport) -> str:
    """Return the report as a page."""
    wrong = sum(row.violations for row in evidence.databases)
    known = {**evidence.versions, **evidence.machine, "seed": evidence.seed, "gates": evidence.gates,
             "began": evidence.began}
    heads = ("database", "rounds", "faults", "operations", "unknown outcomes", "tasks", "seconds", "violations")
    rows = [[row.database, row.rounds, ", ".join(f"{count:,} {name}" for name, count in sorted(row.done.items())),
             row.operations, row.unknown, row.tasks, round(row.seconds), row.violations] for row in evidence.databases]
    faults = sorted({fault for row in evidence.databases for fault in row.faults})
    came = {name for row in evidence.databases for name in row.done}
    parts = [
        f"<h1>AsyncGate under torture</h1><p class={'bad' if wrong else 'good'}>{wrong} violations"
        f"{', until the run was interrupted' if evidence.interrupted else ''}.</p>",
        f"<pre>{escape(evidence.command)}</pre>", write_table(heads, rows), write_table(known, [[*known.values()]]),
        *(f"<h2>Soak of {escape(row.database)}</h2>{write_table(TREND_HEADS, drift.list_rows(row.trends))}"
          for row in evidence.databases if row.trends),
        "<h2>Faults</h2><ul>" + "".join(f"<li>{fault}: {escape(FAULTS[fault].about)}</li>" for fault in faults)
        + "</ul>",
        "<h2>Violations</h2><ul>" + "".join(map(show_violation, evidence.violations)) + "</ul>" if wrong else "",
        "<h2>Not covered</h2><ul>" + "".join(f"<li>{escape(text)}</li>" for text in (
            f"faults that did not come in this run: {', '.join(sorted({*FAULTS} - came)) or 'none'}",
            *evidence.not_covered)) + "</ul>"]
    return make_page("AsyncGate under torture", "".join(parts))


def show_violation(violation: Violation) -> str:
    """Return a violation as an item of a list."""
    links = "".join(f' <a href="{escape(name)}">{escape(name)}</a>'
                    for name in (violation.history, violation.smallest, violation.drawing) if name)
    return f"<li class=bad>{escape(violation.database)}, round {violation.round}: {escape(violation.text)}{links}</li>"


def write_table(heads: Any, rows: list[list[Any]]) -> str:
    """Return a table of HTML."""
    cells = "".join("<tr>" + "".join(
        f"<td class=n>{value:,}</td>" if isinstance(value, int) else f"<td>{escape(str(value))}</td>" for value in row)
        + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{cells}</table>"


def make_page(title: str, body: str) -> str:
    """Return a page of HTML that loads nothing."""
    return (f'<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>'
            f"<body>{body}</body></html>\n")


# A history, drawn.


def draw_history(record: Recorded, text: str) -> str:
    """Return a page with a lane for each client: its calls, by outcome, and the faults across all lanes."""
    body = (f"<h1>A history</h1><p class=bad>{escape(text)}</p><p>" + ", ".join(
        f'<b style="color:{color}">{name}</b>' for name, color in COLORS.items())
        + "; red lines are faults. A call tells what was asked and answered when the pointer is on it.</p>")
    rows = "".join(f"<tr><td>{escape(kind)}</td><td>{escape(msgspec.json.encode(row).decode())}</td></tr>"
                   for kind, of_kind in record.rows.items() for row in of_kind[:100])
    return make_page(text, f"{body}{draw_calls(record)}<h2>Stored at the end</h2><table>{rows}</table>")


def draw_calls(record: Recorded) -> str:
    """Return the calls as a drawing: time goes from left to right, but for pauses in which nothing happens."""
    lanes = {name: at for at, name in enumerate(dict.fromkeys(call.by for call in record.calls))}
    moments = sorted({moment for call in record.calls for moment in (call.started, call.ended)})
    places = {moment: LABEL + at * (WIDTH - LABEL) / max(len(moments) - 1, 1) for at, moment in enumerate(moments)}
    height = LANE * len(lanes) + LANE
    parts = [f'<text x="0" y="{LANE * at + 15}">{escape(name)}</text>' for name, at in lanes.items()]
    parts += [draw_call(call, lanes[call.by], places) for call in record.calls]
    for mark in record.marks:
        if moments and moments[0] <= mark.at <= moments[-1]:
            x = next(places[moment] for moment in moments if moment >= mark.at)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#cf222e">'
                         f"<title>{escape(mark.what)}</title></line>")
    return f'<svg viewBox="0 0 {WIDTH + LABEL} {height}" width="100%">{"".join(parts)}</svg>'


def draw_call(call: Call, lane: int, places: dict[float, float]) -> str:
    """Return one call as a bar with its operation."""
    outcome = "unknown" if call.unknown else "fail" if call.error is not None else "ok"
    left, right = places[call.started], places[call.ended]
    told = msgspec.json.encode({"ask": call.ask, "reply": call.reply, "error": call.error}).decode()
    return (f'<rect x="{left:.1f}" y="{LANE * lane + 4}" width="{max(right - left, 3):.1f}" height="{LANE - 8}" rx="3" '
            f'fill="{COLORS[outcome]}"><title>{escape(f"{call.by}: {call.operation} {outcome} {told}")}</title></rect>'
            f'<text x="{left:.1f}" y="{LANE * lane + 15}" style="fill:#fff">{escape(call.operation)}</text>')
