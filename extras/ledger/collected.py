"""All receipts of a tenant from a ledger or a file, copied to a temporary index.

The copy is a nameless SQLite file that ends with the process.  So commands that compare two sides, such as `asyncgate
reconcile` and `asyncgate rebuild`, need little memory however many receipts there are.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from asyncgate import ANOMALY, TERMINATES
from asyncgate.extras.ledger.restated import body_of
from asyncgate.extras.ledger.sinks import Filed, Outage, Refusal
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.content import decode_json, encode_json, sha256, to_canonical
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.walking import batches
from asyncgate.parts.receipts.files import SealedReading
from asyncgate.parts.receipts.incoming import broken_rule, computed_hash
from asyncgate.parts.receipts.ledger_marks import OVERTAKEN, WITHDRAWN

if TYPE_CHECKING:
    from asyncgate.extras.ledger.sinks import Sink

RECEIPTS_PER_COPY = 200                       # receipts of one page of a ledger
READ_ATTEMPTS, READ_PAUSE_SECONDS = 3, 0.5    # how often a page is requested before the ledger counts as unreadable
SCHEMA_SQL = """
CREATE TABLE receipts (receipt_id TEXT PRIMARY KEY, task_id TEXT, receipt_type TEXT, receipt_key TEXT, instance TEXT,
                       sound INTEGER, known INTEGER DEFAULT 0, content BLOB) WITHOUT ROWID;
CREATE INDEX by_task ON receipts (task_id, receipt_id);
CREATE INDEX unknown ON receipts (task_id) WHERE known = 0;
CREATE TABLE edges (parent TEXT, child_type TEXT, child TEXT, PRIMARY KEY (parent, child)) WITHOUT ROWID;
"""
CountCopied = Callable[[int], None]

decode_receipt = msgspec.json.Decoder(stored.Receipt).decode


class Unreadable(errors.NoAnswer):
    """The ledger or the file cannot be read to its end, so nothing is compared and nothing is changed."""


class TemporaryFile:
    """A nameless database: there may be more rows than fit into memory."""

    def __init__(self, schema: str) -> None:
        self.file = sqlite3.connect("", isolation_level=None)
        self.file.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + schema)

    def close(self) -> None:
        """Delete the file."""
        self.file.close()

    def walk(self, sql: str, first: Any, *values: Any) -> Iterator[Any]:
        """Yield the contents of rows behind the key `first`, a page at a time, so that the reader may write meanwhile.

        `sql` selects key and content of those behind a key.
        """
        while rows := self.file.execute(f"{sql} LIMIT 500", (first, *values)).fetchall():
            yield from (content for _, content in rows)
            first = rows[-1][0]


class Collected(TemporaryFile):
    """The receipts of one tenant, by id and by task."""

    def __init__(self, *, takes_erased: bool = False) -> None:
        super().__init__(SCHEMA_SQL)
        self.takes_erased = takes_erased    # whether receipts without their content count as sound: seals cover them
        self.problems: list[str] = []       # problems of the file that was read
        self.undone = set[str]()            # receipts that, as others say, never counted

    def add(self, receipts: Iterable[stored.Receipt]) -> None:
        """Add receipts; a receipt without a key was not written by a gate."""
        receipts = list(receipts)
        self.undone.update(id for receipt in receipts for id in list_undone(receipt))
        self.file.execute("BEGIN")
        self.file.executemany("INSERT OR IGNORE INTO receipts VALUES (?, ?, ?, ?, ?, ?, 0, ?)", [
            (receipt.receipt_id, receipt.task_id, receipt.receipt_type, receipt.receipt_key, receipt.asyncgate_instance,
             is_sound(receipt) or (self.takes_erased and read_note(receipt.body) is not None), encode_json(receipt))
            for receipt in receipts])
        self.file.executemany("INSERT OR IGNORE INTO edges VALUES (?, ?, ?)", [
            (parent, receipt.receipt_type, receipt.receipt_id) for receipt in receipts for parent in receipt.parents])
        self.file.execute("COMMIT")

    def count(self) -> int:
        """Return how many receipts there are."""
        return int(self.file.execute("SELECT count(*) FROM receipts").fetchone()[0])

    def last(self) -> str:
        """Return the greatest id."""
        return str(self.file.execute("SELECT max(receipt_id) FROM receipts").fetchone()[0] or "")

    def instances(self) -> dict[str, int]:
        """Return the gates that wrote them, and how many each."""
        return dict(self.file.execute(
            "SELECT instance, count(*) FROM receipts WHERE receipt_key != '' GROUP BY instance ORDER BY instance"))

    def keep_only(self, instances: frozenset[str]) -> None:
        """Delete receipts of other gates; receipts that no gate wrote stay."""
        marks = ", ".join("?" * len(instances))
        self.file.execute(f"DELETE FROM receipts WHERE receipt_key != '' AND instance NOT IN ({marks})",
                          tuple(instances))

    def forget(self, receipt_id: str) -> None:
        """Delete one receipt and its links to parents."""
        self.file.execute("DELETE FROM receipts WHERE receipt_id = ?", (receipt_id,))
        self.file.execute("DELETE FROM edges WHERE child = ?", (receipt_id,))

    def replace(self, receipt: stored.Receipt) -> None:
        """Replace a receipt by a changed one."""
        self.forget(receipt.receipt_id)
        self.add([receipt])

    def get(self, receipt_ids: Iterable[str]) -> dict[str, stored.Receipt]:
        """Return the receipts with these ids, as far as they are here."""
        rows = self.file.execute("SELECT content FROM receipts WHERE receipt_id IN (SELECT value FROM json_each(?))",
                                 (encode_json(list(receipt_ids)).decode(),))
        return {receipt.receipt_id: receipt for receipt in (decode_receipt(row[0]) for row in rows)}

    def know(self, receipt_ids: Iterable[str]) -> None:
        """Note that the other side has these receipts."""
        self.file.execute("UPDATE receipts SET known = 1 WHERE receipt_id IN (SELECT value FROM json_each(?))",
                          (encode_json(list(receipt_ids)).decode(),))

    def all(self) -> Iterator[stored.Receipt]:
        """Yield every receipt, in the order of the ids."""
        return self._rows("")

    def unsound(self) -> Iterator[stored.Receipt]:
        """Yield receipts of gates whose hash does not match their content."""
        return self._rows("AND sound = 0")

    def unknown(self) -> Iterator[stored.Receipt]:
        """Yield the receipts that the other side lacks."""
        return self._rows("AND known = 0")

    def of_task(self, task_id: str) -> list[stored.Receipt]:
        """Return the receipts of a task, oldest first."""
        rows = self.file.execute("SELECT content FROM receipts WHERE task_id = ? ORDER BY receipt_id", (task_id,))
        return [decode_receipt(row[0]) for row in rows]

    def tasks(self, which: str = "") -> Iterator[str]:
        """Yield the ids of all tasks that receipts are about."""
        sql = f"SELECT DISTINCT task_id, task_id FROM receipts WHERE task_id > ? {which} ORDER BY task_id"
        return self.walk(sql, "")

    def unknown_tasks(self) -> Iterator[str]:
        """Yield the ids of the tasks of which the other side lacks a receipt."""
        return self.tasks("AND known = 0")

    def answered(self, receipt: stored.Receipt) -> bool:
        """Whether one of these receipts discharges the obligation that `receipt` opened (PH.1.3)."""
        ids = [child for by in sorted(TERMINATES[receipt.receipt_type])
               for child in self.children(receipt.receipt_id, by)]
        return any(broken_rule("rebuilt", child, [receipt]) is None for child in self.get(ids).values())

    def children(self, receipt_id: str, receipt_type: str) -> list[str]:
        """Return the ids of the receipts of a type that have the given parent."""
        rows = self.file.execute("SELECT child FROM edges WHERE parent = ? AND child_type = ? ORDER BY child",
                                 (receipt_id, receipt_type))
        return [row[0] for row in rows]

    def _rows(self, which: str) -> Iterator[stored.Receipt]:
        sql = f"SELECT receipt_id, content FROM receipts WHERE receipt_id > ? {which} ORDER BY receipt_id"
        return map(decode_receipt, self.walk(sql, ""))


def list_undone(receipt: stored.Receipt) -> list[str]:
    """Return the receipts that never counted, as a gate's receipt says: with its own id if it withdraws another one."""
    if receipt.from_kind != "asyncgate" or not is_sound(receipt):
        return []
    if receipt.parents and receipt.receipt_key == sha256(WITHDRAWN, receipt.parents[0]):
        return [receipt.receipt_id, receipt.parents[0]]
    body = body_of(receipt) if receipt.receipt_type == ANOMALY.type else {}
    return [body["details"]["receipt_id"]] if body.get("kind") == OVERTAKEN else []


def is_sound(receipt: stored.Receipt) -> bool:
    """Whether a receipt's hash matches its content; true for one that no gate wrote, which has no hash."""
    return not receipt.receipt_key or computed_hash(receipt) == receipt.hash


def as_stored(filed: Filed) -> stored.Receipt:
    """Return a ledger's receipt as a gate stores it, whatever the order of its JSON members."""
    receipt = stored.Receipt(
        filed.receipt_id, filed.receipt_key, filed.receipt_type, filed.created_at.timestamp(), filed.sender.kind,
        filed.sender.id, filed.to.kind, filed.to.id, filed.task_id or "", filed.lease_id, filed.schedule_id,
        filed.asyncgate_instance, filed.hash, bytes(filed.body).decode() or "null",
        parents=tuple(sorted(filed.parents)))
    if is_sound(receipt):
        return receipt
    return replace(receipt, body=to_canonical(decode_json(receipt.body)).decode())


# Where receipts are read from.


async def collect_from_ledger(sink: Sink, tenant_id: str, count: CountCopied, *,
                              takes_erased: bool = False) -> Collected:
    """Read all of a tenant's receipts from a ledger; raises Unreadable rather than return only a part."""
    collected, after = Collected(takes_erased=takes_erased), None
    try:
        while True:
            page = await retry_read(lambda after=after: sink.page(    # type: ignore[misc]
                tenant_id, queries.EntryFilter(None, None, None, None, after, RECEIPTS_PER_COPY)))
            if page.unread:
                raise Unreadable(f"{page.unread} receipts in the ledger cannot be read; the log names them")
            collected.add([as_stored(receipt) for receipt in page.receipts])
            count(len(page.receipts))
            if page.cursor in (None, after):
                for receipt_id in collected.undone:     # a strict gate offered it, and withdrew or overtook it
                    collected.forget(receipt_id)
                return collected
            after = page.cursor
    except BaseException:
        collected.close()
        raise


async def retry_read(ask: Callable[[], Any]) -> Any:
    """Ask a ledger, again after an outage; raises Unreadable."""
    for left in reversed(range(READ_ATTEMPTS)):
        try:
            return await ask()
        except (Outage, Refusal, msgspec.MsgspecError, UnicodeError) as away:
            if not left or not isinstance(away, Outage):
                raise Unreadable(f"the ledger cannot be read: {away}") from away
        await asyncio.sleep(READ_PAUSE_SECONDS)
    raise AssertionError


def collect_from_file(path: str, count: CountCopied) -> tuple[str, Collected]:
    """Read an exported file; return its tenant, and its receipts with the problems of the file."""
    file, collected = SealedReading(path), Collected(takes_erased=True)
    try:
        for page in batches(file.rows(), RECEIPTS_PER_COPY):
            collected.add([replace(row, parents=tuple(sorted(row.parents))) for row in page])
            count(len(page))
    except OSError as wrong:
        collected.close()
        raise Unreadable(f"{path} cannot be read: {wrong.strerror or wrong}") from wrong
    if file.header is None or file.header.format != "asyncgate-receipts" or file.trailer is None:
        collected.close()
        raise Unreadable(f"{path} is not a complete file of `asyncgate receipts export`")
    collected.problems = file.problems
    return file.header.tenant_id, collected
