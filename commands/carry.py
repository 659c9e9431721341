"""Move receipts between a gate and a file: `asyncgate receipts export`, `import` and `verify`."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, Any

import msgspec
from msgspec import Struct

from asyncgate.clients.http import Http, Refusal
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.walking import batches
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.folders import fsync_folder, open_private, replacing
from asyncgate.parts.receipts import files
from asyncgate.parts.receipts.incoming import computed_hash

IMPORT_BATCH, BATCH_BYTES = 250, 2 * 2**20     # limits of one import call: receipts, bytes
RECEIPTS_PER_PAGE = 1000

to_receipt = msgspec.json.Decoder(list[stored.Receipt]).decode


class ExportSpoiled(errors.Stopped):
    """A change during the export made the file incomplete."""


# From a gate to a file.


class PartialFile:
    """An unfinished file beside its target; a restarted export resumes it.

    Privacy: if anything was erased at the gate since, what is written may hold it, so the export begins anew.
    """

    def __init__(self, target: str, header: files.Header) -> None:
        self.target, self.path = target, f"{target}.partial"
        self.header, self.last = header, ""
        if os.path.isdir(self.path):
            raise ExportSpoiled(f"{self.path} is a folder, as an export of everything leaves it; move it away, or name "
                                "another file")
        self.file: IO[bytes] = open(  # noqa: SIM115
            self.path, "r+b" if os.path.exists(self.path) else "w+b", opener=open_private)
        self.writer, there = files.Writer(self.file), 0
        for text, line in self._read_earlier():
            self.writer.take(text, line, there=True)
            self.header = line.header or self.header
            self.last = line.receipt.receipt_id if line.receipt else self.last
            there += len(text)
        self.file.seek(there)
        self.file.truncate()
        self.is_new = there == 0

    def _read_earlier(self) -> Iterator[tuple[bytes, files.Line]]:
        """Yield the complete lines of an earlier attempt, if it was for this tenant and nothing was erased since."""
        for number, text in enumerate(self.file):
            try:
                line = files.decode_line(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            ours = line.header is not None and (line.header.tenant_id, line.header.erasures) == (
                self.header.tenant_id, self.header.erasures)
            if not text.endswith(b"\n") or line.trailer is not None or (number == 0 and not ours):
                return
            yield text, line

    def finish(self) -> None:
        """Write the trailer, sync the file to disk, and rename it to its target."""
        self.writer.end()
        self.file.flush()
        os.fsync(self.file.fileno())
        if not self.target.endswith(".gz"):
            self.file.close()
            os.replace(self.path, self.target)
            return fsync_folder(os.path.dirname(os.path.abspath(self.target)))
        self.file.seek(0)
        with replacing(self.target, f"{self.path}.gz") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            shutil.copyfileobj(self.file, packed)
        self.remove()

    def remove(self) -> None:
        """Remove the unfinished file."""
        self.file.close()
        os.remove(self.path)


def export_receipts(gate: Http, target: str, count: Any, set_total: Any = lambda total: None) -> PartialFile:
    """Write all receipts of the gate's tenant into a file, with their seals.

    `count` is called with the number of receipts of each page, `set_total` with the expected total.
    """
    end = gate.call("seal_receipts")
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    config = gate.call("get_config")
    header = files.Header("asyncgate-receipts", end["tenant_id"], 1, config["instance_id"], end["number"], end["hash"],
                          begun,
                          count_erasures(gate))
    partial = PartialFile(target, header)
    if partial.is_new:
        partial.writer.put(files.Line(header=partial.header))
    sealed = 0
    for seal in fetch_seals(gate, partial.writer.seals, partial.header.seals):
        partial.writer.put(files.Line(seal=seal))
        sealed += seal.count
    set_total(max(sealed, partial.writer.receipts) or None)
    count(partial.writer.receipts)
    while page := fetch_page(gate, partial.last):
        for receipt in page:
            partial.writer.put(files.Line(receipt=receipt))
        partial.last = page[-1].receipt_id
        partial.file.flush()
        count(len(page))
    if any(seal.late for seal in fetch_seals(gate, partial.header.seals, None)):
        partial.remove()
        raise ExportSpoiled("older receipts were imported into the gate during the export, so the file would be "
                            "incomplete and was removed; export again")
    if was_erased_since(gate, partial.header):
        partial.remove()
        raise ExportSpoiled("data was erased at the gate during the export, so the file could still hold it and was "
                            "removed; export again")
    partial.finish()
    return partial


def count_erasures(gate: Http) -> int:
    """Return how many erasures of the tenant have ended; raises ExportSpoiled while one is under way."""
    if "list_erasures" not in OPERATIONS:
        return 0        # neither here nor, it is supposed, at the gate is the extra that erases
    try:
        erasures = [row for page in gate.pages("list_erasures", limit=200) for row in page["erasures"]]
    except Refusal as refusal:
        if refusal.code != "not_found":
            raise
        return 0        # the gate lacks that extra
    if not all(row["ended"] for row in erasures):
        raise ExportSpoiled("an erasure is under way at the gate; export again when it has ended: "
                            "`asyncgate list-erasures` shows it")
    return len(erasures)


def was_erased_since(gate: Http, header: files.Header) -> bool:
    """Whether anything of the tenant was erased, or is being erased, since an export began."""
    try:
        return count_erasures(gate) != header.erasures
    except ExportSpoiled:
        return True


def fetch_page(gate: Http, after: str) -> list[stored.Receipt]:
    """Return the next page of stored receipts."""
    reply = gate.send("export_receipts", {"after": after or None, "limit": RECEIPTS_PER_PAGE}).content
    return to_receipt(msgspec.json.decode(reply, type=dict[str, msgspec.Raw])["receipts"])


def fetch_seals(gate: Http, after: int, up_to: int | None) -> Iterator[stored.Seal]:
    """Yield the stored seals between two numbers."""
    for page in gate.pages("list_seals", after=after or None, limit=200):
        for seal in page["seals"]:
            if up_to is not None and seal["number"] > up_to:
                return
            yield stored.Seal(f"{seal['number']:012d}", seal["number"], seal["last_receipt_id"], seal["count"],
                              seal["digest"], seal["marks"],
                              msgspec.json.encode(seal["late"]).decode() if seal.get("late") else "",
                              datetime.fromisoformat(seal["sealed_at"]).timestamp(), seal["hash"])


# From a file to a gate.


class ImportTally(Struct):
    """The outcome of an import."""

    imported: int = 0
    present: int = 0
    refused: list[dict[str, Any]] = []


def import_file(gate: Http, path: str, told: Any) -> ImportTally:
    """Send a sound file to a gate in atomic batches; receipts that are there already stay unchanged."""
    tally = ImportTally()
    for batch in encode_batches(path):
        reply = gate.call("import_receipts", receipts=batch)
        tally.imported, tally.present = tally.imported + reply["imported"], tally.present + reply["present"]
        tally.refused += reply["refused"]
        told(len(batch))
    return tally


def encode_batches(path: str) -> Iterator[list[msgspec.Raw]]:
    """Yield the receipts of a file as they are sent, in batches that fit into one request."""
    texts = (msgspec.Raw(msgspec.json.encode(row)) for row in files.Reading(path).rows())
    return batches(texts, IMPORT_BATCH, BATCH_BYTES, lambda text: len(bytes(text)))


# A file by itself.


def verify_file(path: str, count: Any = lambda rows: None) -> files.SealedReading:
    """Check a file without a database: its checksum, its chain of seals, each receipt's hash and parents.

    An erased receipt has no content that its hash could match, only the digest that its seal covers.
    """
    file, wrong = files.SealedReading(path), list[str]()
    for row in file.rows():
        count(1)
        if read_note(row.body) is None and row.hash != computed_hash(row):
            wrong.append(f"receipt {row.receipt_id} does not match its hash")
    file.problems += wrong
    return file


def require_sound(path: str, count: Any) -> files.SealedReading:
    """Check a file; raises Damaged if it is not sound."""
    verdict = verify_file(path, count)
    if verdict.problems:
        more = f" (and {len(verdict.problems) - 1} more; `asyncgate receipts verify` names them)" * (
            len(verdict.problems) > 1)
        raise files.Damaged(f"{path} is damaged, nothing was imported: {verdict.problems[0]}{more}")
    return verdict


