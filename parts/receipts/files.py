"""Receipts in a file: JSON lines between a header and a trailer, which has the SHA-256 of every byte before it.

An export is such a file, and so is a segment of the archive.  One that is compressed is gzip of the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.screening import BodyScreen, cut_slices
from asyncgate.parts.receipts.seals import SealChain, receipt_digest

MAGIC = b"\x1f\x8b"
MOST_LINE = 4 * 2**20               # the longest line in bytes; a receipt's body has at most 64 KiB by default
MOST_PROBLEMS = 1000                # after so many problems reading stops
MOST_LINE_DEPTH = 128               # the deepest nesting of a line's JSON; a gate accepts half of that
FREELY, TIMES = 64 * 2**20, 100     # any file may unpack to 64 MiB, a larger one to 100 times its size


class Header(Struct, frozen=True):
    """The kind and the source of a file."""

    format: Literal["asyncgate-receipts", "asyncgate-archive"]
    tenant_id: str
    version: int = 1
    instance: str = ""
    seals: int = 0                      # the number of the last seal in the file
    seal_hash: str = ""
    begun_at: str = ""                  # RFC 3339; empty in the archive, whose segments are made of their rows alone
    erasures: int | UnsetType = UNSET   # of the tenant that had ended when the export began; none in the archive


class Trailer(Struct, frozen=True):
    """The counts and the checksum of a file."""

    receipts: int
    seals: int
    sha256: str                         # of every byte before this line


class Line(Struct, frozen=True, omit_defaults=True):
    """One line of a file: exactly one of these."""

    header: Header | None = None
    seal: stored.Seal | None = None
    receipt: stored.Receipt | None = None
    trailer: Trailer | None = None


encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode


class Damaged(errors.Stopped):
    """A file of receipts was changed after it was written."""


class Writer:
    """Writes lines, and the trailer that sums them up."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sum, self.receipts, self.seals = file, hashlib.sha256(), 0, 0

    def put(self, line: Line) -> None:
        """Write one line."""
        self.take(encode_line(line) + b"\n", line)

    def take(self, text: bytes, line: Line, *, there: bool = False) -> None:
        """Write one line unchanged, or only count it if the file already has it."""
        self.sum.update(text)
        self.receipts, self.seals = self.receipts + (line.receipt is not None), self.seals + (line.seal is not None)
        if not there:
            self.file.write(text)

    def end(self) -> None:
        """Write the trailer."""
        self.file.write(encode_line(Line(trailer=Trailer(self.receipts, self.seals, self.sum.hexdigest()))) + b"\n")


def pack_receipts(header: Header, receipts: Iterable[stored.Receipt]) -> bytes:
    """Return a whole file of receipts, compressed; equal receipts make equal bytes."""
    import io

    with io.BytesIO() as plain:
        writer = Writer(plain)
        writer.put(Line(header=header))
        for receipt in receipts:
            writer.put(Line(receipt=receipt))
        writer.end()
        return gzip.compress(plain.getvalue(), 6, mtime=0)


def open_receipts(path: str) -> IO[bytes]:
    """Open a file of receipts, compressed or not."""
    with open(path, "rb") as file:
        compressed = file.read(2) == MAGIC
    return gzip.open(path, "rb") if compressed else open(path, "rb")  # type: ignore[return-value]


def bounded_lines(file: IO[bytes], most: int) -> Iterator[bytes]:
    """Yield the lines of a file within limits, because a small file may decompress to a huge one."""
    size = 0
    while text := file.readline(MOST_LINE + 1):
        size += len(text)
        if len(text) > MOST_LINE:
            raise OSError(f"the line is longer than {MOST_LINE} bytes")
        if size > most:
            raise OSError(f"it unpacks to more than {most} bytes, which is {TIMES} times its size")
        yield text


def require_shallow(text: bytes) -> None:
    """Refuse a line that is nested too deep."""
    if text.count(b"[") + text.count(b"{") > MOST_LINE_DEPTH:
        judge = BodyScreen(len(text), MOST_LINE_DEPTH)
        for piece in cut_slices(text):
            judge.look(piece)


class Reading:
    """One pass through a file that lists all problems and continues as far as it can."""

    def __init__(self, path: str) -> None:
        self.path, self.problems = path, list[str]()
        self.header: Header | None = None
        self.receipts, self.seals = 0, 0
        self.trailer: Trailer | None = None

    def lines(self) -> Iterator[Line]:
        """Yield the lines between header and trailer."""
        sum, number = hashlib.sha256(), 0
        try:
            with open_receipts(self.path) as file:
                for number, text in enumerate(bounded_lines(file, FREELY + TIMES * os.path.getsize(self.path)), 1):
                    if (line := self._line(number, text, sum)) is not None:
                        yield line
                    if len(self.problems) >= MOST_PROBLEMS:
                        self.problems.append(f"reading stopped after line {number}: too many problems")
                        return
        except (OSError, EOFError, zlib.error) as broken:
            if number == 0 and isinstance(broken, FileNotFoundError | PermissionError | IsADirectoryError):
                raise
            self.problems.append(f"the file cannot be read after line {number}: {broken}")
        if self.trailer is None:
            self.problems.append("the file has no trailer: its end is missing")

    def rows(self) -> Iterator[stored.Receipt]:
        """Yield the receipts; the problems are complete behind the last one."""
        return (line.receipt for line in self.lines() if line.receipt is not None)

    def _line(self, number: int, text: bytes, sum: Any) -> Line | None:
        if self.trailer is not None:
            self.problems.append(f"line {number} is after the trailer")
            return None
        try:
            require_shallow(text)
            line = decode_line(text)
        except (errors.GateError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            self.problems.append(f"line {number} cannot be read: {wrong}")
            line = Line()
        if number == 1:
            self._begin(line)
        if line.trailer is not None:
            self._end(line.trailer, sum.hexdigest())
            return None
        sum.update(text)
        self.receipts, self.seals = self.receipts + (line.receipt is not None), self.seals + (line.seal is not None)
        return line

    def _begin(self, line: Line) -> None:
        self.header = line.header
        if line.header is None:
            self.problems.append("line 1 is not the header of a file of receipts")
        elif line.header.version != 1:
            self.problems.append(f"the file has version {line.header.version}, but this release reads only version 1")

    def _end(self, trailer: Trailer, sum: str) -> None:
        self.trailer = trailer
        if trailer.sha256 != sum:
            self.problems.append(f"the lines have the SHA-256 {sum[:16]}…, but the trailer says "
                                 f"{trailer.sha256[:16]}…: some were changed")
        if (trailer.receipts, trailer.seals) != (self.receipts, self.seals):
            self.problems.append(f"the file has {self.receipts} receipts and {self.seals} seals, but the trailer says "
                                 f"{trailer.receipts} and {trailer.seals}")


class SealedReading(Reading):
    """A pass that also checks the receipts against their seals and their parents."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.chain = SealChain()
        self.ids, self.parents = set[str](), dict[str, str]()
        self.erased = 0     # receipts without their content, by their own word: the list is in the gate's database

    def lines(self) -> Iterator[Line]:
        """Yield the lines; the problems are complete behind the last one."""
        for line in super().lines():
            if line.seal is not None:
                self.chain.add(line.seal)
            if line.receipt is not None:
                self.chain.see(line.receipt.receipt_id, receipt_digest(line.receipt))
                self.ids.add(line.receipt.receipt_id)
                self.erased += read_note(line.receipt.body) is not None
                self.parents |= {parent: line.receipt.receipt_id for parent in line.receipt.parents
                                 if parent not in self.ids}
            yield line
        self.problems += self.chain.close()
        if self.header and (self.header.seals, self.header.seal_hash) != (self.chain.head.number, self.chain.head.hash):
            self.problems.append(f"the seals end with number {self.chain.head.number}, but the header says "
                                 f"{self.header.seals}")
        self.problems += [f"receipt {parent}, a parent of {child}, is not in the file"
                          for parent, child in self.parents.items() if parent not in self.ids]
