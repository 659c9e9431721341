"""`asyncgate receipts`: show the receipts of a gate, and move them to and from files."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

import click
import msgspec
from msgspec import Struct, field

from asyncgate import TERMINATES
from asyncgate.clients.http import Http, Refusal
from asyncgate.commands import calling, carry
from asyncgate.commands.new_file import hold_new_file
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import STYLES, Bar, escape_text
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.extras import find_extras
from asyncgate.parts.model.words import say_count

RECEIPTS_PER_CALL = 200      # receipts per call


@click.group(cls=calling.CommandGroup)
def receipts() -> None:
    """Show the receipts of a gate, and move them to and from files and ledgers."""


# The tree.


class Node(Struct):
    """A receipt in the tree; its parent is the oldest receipt that it answers."""

    receipt: dict[str, Any]
    open: str | None = None             # why it is open, if it is
    elsewhere: list[str] = []           # other receipts that it answers
    children: list[Node] = field(default_factory=list)


class Strokes(NamedTuple):
    """The characters that draw a tree."""

    branch: str
    last: str
    trunk: str
    arrow: str
    open: str
    also: str


BOXES = Strokes("├─ ", "╰─ ", "│  ", "→", "○ open", "↖")
ASCII = Strokes("|- ", "`- ", "|  ", "->", "(open)", "also answers")


@receipts.command()
@click.argument("task_id", metavar="TASK", type=calling.ID_TYPE)
@click.option("--ascii", "as_ascii", is_flag=True, help="Draw with ASCII characters only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each receipt with its children.")
@calling.add_gate_options
def tree(at: Connection, task_id: str, as_ascii: bool, as_json: bool) -> None:
    """Draw the receipts of a task as a tree: sender, recipient, time, and what is still open."""
    with calling.connect_to_gate(at) as gate:
        task = fetch_task(gate, task_id)
        pages = gate.pages("list_receipts", task_id=task_id, limit=RECEIPTS_PER_CALL)
        roots = build_tree([row for page in pages for row in page["receipts"]], gate)
    if as_json:
        return click.echo(msgspec.json.encode({"task_id": task_id, "status": task["status"], "receipts": roots}))
    strokes = ASCII if as_ascii or not can_print(BOXES) else BOXES
    head = "  ".join(word for word in (f"task {task_id}", task["type"], task["status"]) if word)
    click.echo(escape_text(head) + ("" if roots else "  (no receipts: they are in the archive)"))
    since = read_time(roots[0].receipt) if roots else None
    for line in draw_lines(roots, strokes, since):
        click.echo(line)


def fetch_task(gate: Http, task_id: str) -> dict[str, Any]:
    """Return a task; a pruned task, or one of another gate, may still have receipts."""
    try:
        return dict(gate.call("get_task", task_id=task_id))
    except Refusal as refusal:
        if refusal.code != "task_not_found":
            raise
        return {"type": "", "status": "not here"}


def build_tree(chain: list[dict[str, Any]], gate: Http) -> list[Node]:
    """Put each receipt under the oldest receipt that it answers; return the roots."""
    nodes = {receipt["receipt_id"]: Node(receipt) for receipt in chain}
    under: defaultdict[str | None, list[Node]] = defaultdict(list)
    for node in nodes.values():
        parents = sorted(node.receipt["parents"], key=lambda parent: (parent not in nodes, parent))
        node.elsewhere = parents[1:] if parents and parents[0] in nodes else parents
        under[parents[0] if parents and parents[0] in nodes else None].append(node)
    for receipt_id, node in nodes.items():
        node.children = under[receipt_id]
    for node in nodes.values():
        node.open = explain_open_end(node, chain, gate)
    return under[None]


def explain_open_end(node: Node, chain: list[dict[str, Any]], gate: Http) -> str | None:
    """Return why a receipt is open: an undischarged obligation, or a live lease; empty if it is not."""
    receipt = node.receipt
    if (by := TERMINATES.get(receipt["receipt_type"])) is not None:
        here = any(child["receipt_type"] in by and receipt["receipt_id"] in child["parents"] for child in chain)
        owed = not here and not gate.call(      # a receipt of another task may discharge it, too
            "check_terminator", parent_receipt_id=receipt["receipt_id"])["has_terminator"]
        return f"owed to {format_principal(receipt['to'])}" if owed else None
    if receipt["receipt_type"] == "task.accepted":
        over = any((other["receipt_type"] in LEASE_ENDS or is_final_question(other))
                   and (other["lease_id"] == receipt["lease_id"] or not other["lease_id"])
                   and other["receipt_id"] > receipt["receipt_id"] for other in chain)
        return None if over else f"{format_principal(receipt['from'])} is at work"
    return None


def is_final_question(receipt: dict[str, Any]) -> bool:
    """Whether a question ended the lease under which it was asked."""
    return receipt["receipt_type"] == "input.requested" and bool((receipt["body"] or {}).get("lease_ended"))


LEASE_ENDS = ("task.completed", "task.failed", "task.canceled", "lease.expired")


def can_print(strokes: Strokes) -> bool:
    """Whether standard output can encode these characters."""
    try:
        "".join(strokes).encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def draw_lines(nodes: list[Node], strokes: Strokes, since: datetime | None, before: str = "") -> Iterator[str]:
    """Yield the lines of a tree; click removes colours if the output is not a terminal."""
    for node in nodes:
        last = node is nodes[-1]
        yield click.style(before + (strokes.last if last else strokes.branch), dim=True) + format_node(node, strokes,
                                                                                                       since)
        yield from draw_lines(node.children, strokes, since, before + ("   " if last else strokes.trunk))


def format_node(node: Node, strokes: Strokes, since: datetime | None) -> str:
    """Format a receipt in one line: type, sender, recipient, time, and whether it is open."""
    receipt = node.receipt
    what = click.style(escape_text(format_type(receipt)), fg=STYLES.get(receipt["receipt_type"]), bold=True)
    ends = escape_text(f"{format_principal(receipt['from'])} {strokes.arrow} {format_principal(receipt['to'])}")
    parts = [what, ends, click.style(f"{format_when(receipt, since)}  {escape_text(receipt['receipt_id'])}", dim=True)]
    if node.elsewhere:
        parts.append(escape_text(f"{strokes.also} {', '.join(node.elsewhere)}"))
    if node.open:
        parts.append(click.style(escape_text(f"{strokes.open}: {node.open}"), fg="yellow", bold=True))
    return "  ".join(parts)


def format_type(receipt: dict[str, Any]) -> str:
    """Return the type of a receipt, with a distinguishing detail."""
    body = receipt["body"] if isinstance(receipt["body"], dict) else {}
    more = {"task.failed": "requeued" if body.get("requeued") else "", "system.anomaly": body.get("kind"),
            "lease.expired": body.get("reason")}.get(receipt["receipt_type"])
    return f"{receipt['receipt_type']} ({more})" if more else str(receipt["receipt_type"])


def format_principal(principal: dict[str, Any]) -> str:
    """Return the kind and id of a principal."""
    return f"{principal['kind']} {principal['id']}"


def read_time(receipt: dict[str, Any]) -> datetime:
    """Return the time of a receipt."""
    return datetime.fromisoformat(receipt["created_at"])


def format_when(receipt: dict[str, Any], since: datetime | None) -> str:
    """Format a time: the first in full, later ones as the time since the first."""
    at = read_time(receipt)
    seconds = (at - since).total_seconds() if since else 0.0
    if since is None or at == since:
        return f"{at:%Y-%m-%d %H:%M:%S}Z"
    return f"+{seconds:.3f} s" if abs(seconds) < 100 else f"+{seconds / 60:.1f} min" if abs(seconds) < 6000 else (
        f"+{seconds / 3600:.1f} h")


# Files.


@receipts.command("export")
@click.argument("file", type=click.Path(dir_okay=False))
@calling.as_json
@calling.add_gate_options
def export_file(at: Connection, file: str, as_json: bool) -> None:
    """Write all receipts of the tenant into FILE, with their seals; compressed if its name ends with .gz.

    For admins.  The gate keeps running.  FILE appears when it is complete; after an interruption, the same command
    resumes.  Archived receipts are included.
    """
    with calling.exit_on_error(file), hold_new_file(file), closing(Bar("exporting", "receipts")) as bar, (
            calling.connect_to_gate(at)) as gate:
        done = carry.export_receipts(gate, file, bar.add, bar.of)
    written, sum = done.writer, done.writer.sum.hexdigest()
    print_answer(as_json, {"file": file, "receipts": written.receipts, "seals": written.seals, "sha256": sum},
        f"{file}: {say_count(written.receipts, 'receipt')} under {say_count(written.seals, 'seal')}, SHA-256 {sum}")


@receipts.command("import")
@click.argument("file", type=click.Path(dir_okay=False))
@calling.as_json
@calling.add_gate_options
def import_file(at: Connection, file: str, as_json: bool) -> None:
    """Import the receipts of FILE unchanged into the tenant; FILE is verified first.

    For admins.  Existing receipts stay unchanged, so after an interruption run the same command again.  A receipt that
    exists with other content is reported and not overwritten.  Exit status 5: some receipts were refused.
    """
    with closing(Bar("checking", "receipts")) as bar, calling.exit_on_error(file):
        verdict = carry.require_sound(file, bar.add)
    with (calling.exit_on_error(file), calling.connect_to_gate(at) as gate,
          closing(Bar("importing", "receipts", verdict.receipts)) as bar):
        tally = carry.import_file(gate, file, bar.add)
    print_answer(as_json,
                 {"file": file, "imported": tally.imported, "present": tally.present, "refused": tally.refused,
                  "erased": verdict.erased},
        *(escape_text(f"{refusal['receipt_id']}: {refusal['reason']}: {refusal['message']}")
          for refusal in tally.refused),
        *([f"{verdict.erased} receipts of the file were erased, and stay so: they have no content"] if verdict.erased
          else []),
        f"{file}: {tally.imported} imported, {tally.present} existed already, {len(tally.refused)} refused")
    sys.exit(calling.EXIT_CONFLICT if tally.refused else 0)


@receipts.command("verify")
@click.argument("file", type=click.Path(dir_okay=False))
@calling.as_json
def verify_file(file: str, as_json: bool) -> None:
    """Verify an exported FILE, without a database or a gate.

    Checks the checksum, every receipt's hash and parents, and the chain of seals, and names every changed byte, wrong
    order or gap.  Exit status 1 if a check fails.
    """
    with closing(Bar("checking", "receipts")) as bar, calling.exit_on_error(file):
        verdict = carry.verify_file(file, bar.add)
    wrong, header = len(verdict.problems), verdict.header
    seal = f"{header.seals}:{header.seal_hash}" if header and header.seals else None
    of_tenant = [f"tenant {header.tenant_id}{f': the last seal is {seal}' if seal else ''}"] if header else []
    print_answer(as_json, {"file": file, "sound": not wrong, "problems": verdict.problems, "receipts": verdict.receipts,
                  "seals": verdict.seals, "unsealed": verdict.chain.unsealed, "erased": verdict.erased,
                  "tenant_id": header.tenant_id if header else None, "last_seal": seal},
        *map(escape_text, verdict.problems), *of_tenant,
        f"{say_count(verdict.receipts, 'receipt')}, {say_count(verdict.seals, 'seal')}; "
        f"{say_count(verdict.chain.unsealed, 'receipt')} since the last seal",
        *([f"{verdict.erased} receipts say that they were erased: `asyncgate verify` checks that in the database"]
          if verdict.erased else []),
        f"{file}: {say_count(wrong, 'problem')}" if wrong else f"{file}: sound")
    sys.exit(calling.EXIT_BROKEN if wrong else 0)


# What extras add.

for extra in find_extras().values():
    for group, _, name in (words.partition(" ") for words in extra.commands):
        if group == "receipts":
            receipts.add_command(getattr(import_module(extra.commands[f"receipts {name}"]), name))
