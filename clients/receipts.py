"""`asyncgate receipts`: look at the receipts of a gate, over the wire."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import click
import msgspec
from msgspec import Struct, field

from asyncgate import TERMINATES
from asyncgate.clients import cli
from asyncgate.clients.http import Http, Refusal, Unreachable

PAGE = 200      # receipts of one call

connection = cli.CONNECTION[1:3]


@click.group()
def receipts() -> None:
    """Look at the receipts of a gate and carry them elsewhere."""


@contextmanager
def gate_at(url: str | None, token: str | None) -> Iterator[Http]:
    """Call a gate; a refusal ends the program with its class as exit status."""
    try:
        with Http(url, token) as gate:
            yield gate
    except Refusal as no:
        raise cli.ended(f"{no.code} ({no.status}): {cli.plain(no.message)}",
                        cli.STATUSES.get(no.status, cli.BROKEN)) from None
    except Unreachable as none:
        raise cli.ended(str(none), cli.NO_GATE) from None
    except ValueError as wrong:
        raise cli.ended(str(wrong), cli.WRONG) from None


# The tree.


class Node(Struct):
    """A receipt in the tree: it stands under the oldest receipt that it answers."""

    receipt: dict[str, Any]
    open: str | None = None             # why this end is open, if it is one
    elsewhere: list[str] = []           # what it answers too
    children: list[Node] = field(default_factory=list)


class Strokes(NamedTuple):
    """What the lines of a tree are drawn with."""

    branch: str
    last: str
    trunk: str
    arrow: str
    open: str
    also: str


BOXES = Strokes("├─ ", "╰─ ", "│  ", "→", "○ open", "↖")
ASCII = Strokes("|- ", "`- ", "|  ", "->", "(open)", "also answers")
COLOURS = {"task.completed": "green", "task.failed": "red", "task.canceled": "magenta", "lease.expired": "yellow",
           "system.anomaly": "red"}


@receipts.command()
@click.argument("task_id", metavar="TASK")
@click.option("--ascii", "as_ascii", is_flag=True, help="Draw with ASCII characters alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each receipt with its children.")
def tree(task_id: str, as_ascii: bool, as_json: bool, url: str | None, token: str | None) -> None:
    """Draw the chain of receipts of a task: who told whom what, when, and what nobody has answered yet."""
    with gate_at(url, token) as gate:
        task = gate.call("get_task", task_id=task_id)
        roots = grown(list(listed(gate, task_id)), discharged(gate))
    if as_json:
        return click.echo(msgspec.json.encode({"task_id": task_id, "status": task["status"], "receipts": roots}))
    strokes = ASCII if as_ascii or not speaks(BOXES) else BOXES
    head = f"task {task_id}  {task['type']}  {task['status']}"
    click.echo(cli.plain(head) + ("" if roots else "  (it has no receipts any more: they are in the archive)"))
    since = moment(roots[0].receipt) if roots else None
    for line in drawn(roots, strokes, since):
        click.echo(line)


tree.params += connection


def listed(gate: Http, task_id: str) -> Iterator[dict[str, Any]]:
    """Yield all receipts of a task, oldest first."""
    cursor = None
    while True:
        page = gate.call("list_receipts", task_id=task_id, limit=PAGE, cursor=cursor)
        yield from page["receipts"]
        if (cursor := page["next_cursor"]) is None:
            return


def discharged(gate: Http) -> Any:
    """Return what asks whether an obligation is discharged by a receipt that may belong to another task."""
    return lambda receipt_id: gate.call("check_terminator", parent_receipt_id=receipt_id)["has_terminator"]


def grown(found: list[dict[str, Any]], is_discharged: Any) -> list[Node]:
    """Put each receipt under the oldest one here that it answers; return those that stand under none."""
    nodes = {receipt["receipt_id"]: Node(receipt) for receipt in found}
    under: defaultdict[str | None, list[Node]] = defaultdict(list)
    for node in nodes.values():
        parents = sorted(node.receipt["parents"], key=lambda parent: (parent not in nodes, parent))
        node.elsewhere = parents[1:] if parents and parents[0] in nodes else parents
        under[parents[0] if parents and parents[0] in nodes else None].append(node)
    for receipt_id, node in nodes.items():
        node.children = under[receipt_id]
    for node in nodes.values():
        node.open = open_end(node, found, is_discharged)
    return under[None]


def open_end(node: Node, found: list[dict[str, Any]], is_discharged: Any) -> str | None:
    """Say why a receipt is an open end: an obligation that nothing has discharged, or a lease that has not ended."""
    receipt = node.receipt
    if (by := TERMINATES.get(receipt["receipt_type"])) is not None:
        here = any(one["receipt_type"] in by and receipt["receipt_id"] in one["parents"] for one in found)
        owed = not here and not is_discharged(receipt["receipt_id"])
        return f"owed to {named(receipt['to'])}" if owed else None
    if receipt["receipt_type"] == "task.accepted":
        over = any(one["receipt_type"] in ENDS and (one["lease_id"] == receipt["lease_id"] or not one["lease_id"])
                   and one["receipt_id"] > receipt["receipt_id"] for one in found)
        return None if over else f"{named(receipt['from'])} is at work"
    return None


ENDS = ("task.completed", "task.failed", "task.canceled", "lease.expired")


def speaks(strokes: Strokes) -> bool:
    """Whether standard output can show these characters."""
    try:
        "".join(strokes).encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def drawn(nodes: list[Node], strokes: Strokes, since: datetime | None, before: str = "") -> Iterator[str]:
    """Yield the lines of a tree; click takes the colours away where no terminal shows them."""
    for node in nodes:
        last = node is nodes[-1]
        yield click.style(before + (strokes.last if last else strokes.branch), dim=True) + written(node, strokes, since)
        yield from drawn(node.children, strokes, since, before + ("   " if last else strokes.trunk))


def written(node: Node, strokes: Strokes, since: datetime | None) -> str:
    """Write one receipt in a line: what, from whom to whom, when, whether something is open."""
    receipt = node.receipt
    what = click.style(cli.plain(label(receipt)), fg=COLOURS.get(receipt["receipt_type"]), bold=True)
    ends = cli.plain(f"{named(receipt['from'])} {strokes.arrow} {named(receipt['to'])}")
    parts = [what, ends, click.style(f"{when(receipt, since)}  {cli.plain(receipt['receipt_id'])}", dim=True)]
    if node.elsewhere:
        parts.append(cli.plain(f"{strokes.also} {', '.join(node.elsewhere)}"))
    if node.open:
        parts.append(click.style(cli.plain(f"{strokes.open}: {node.open}"), fg="yellow", bold=True))
    return "  ".join(parts)


def label(receipt: dict[str, Any]) -> str:
    """Name a receipt: its type, and what tells it from others of the type."""
    body = receipt["body"] if isinstance(receipt["body"], dict) else {}
    more = {"task.failed": "requeued" if body.get("requeued") else "", "system.anomaly": body.get("kind"),
            "lease.expired": body.get("reason")}.get(receipt["receipt_type"])
    return f"{receipt['receipt_type']} ({more})" if more else str(receipt["receipt_type"])


def named(principal: dict[str, Any]) -> str:
    """Name a principal."""
    return f"{principal['kind']} {principal['id']}"


def moment(receipt: dict[str, Any]) -> datetime:
    """Return when a receipt was written."""
    return datetime.fromisoformat(receipt["created_at"])


def when(receipt: dict[str, Any], since: datetime | None) -> str:
    """Say when: the first time whole, later ones by how long after it."""
    at = moment(receipt)
    seconds = (at - since).total_seconds() if since else 0.0
    if since is None or at == since:
        return f"{at:%Y-%m-%d %H:%M:%S}Z"
    return f"+{seconds:.3f} s" if abs(seconds) < 100 else f"+{seconds / 60:.1f} min" if abs(seconds) < 6000 else (
        f"+{seconds / 3600:.1f} h")
