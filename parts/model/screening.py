"""Check the bytes of a JSON body before it is decoded: its encoding, its depth, and its number of values.

A decoder makes an object of every value: 16 MiB of `[],` are five million lists, 400 MiB and many seconds.  So a
body is checked as bytes first, in slices, with a constant number of native passes over each; other requests run
between two slices.  A body that passes has so few values that decoding it takes milliseconds.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Iterator

from asyncgate.parts.model.errors import GateError, InvalidRequest, PayloadTooDeep, PayloadTooLarge

MAX_DEPTH = 64      # of a request's JSON
MOST_MEMBERS = 1000     # of a request: naming or dropping members makes an object of each
SLICE = 2**15       # bytes that are checked in one turn of the event loop
LARGE = 8 * SLICE   # for larger bodies the event loop rests between two turns
REST_SECONDS = 0.002
QUOTE, OPENS, COMMA = b'"', ord("["), ord(",")
BLANK, MOST_BLANKS = b" \t\r\n", 2**20       # between values; a decoder scans them repeatedly, a byte at a time
_rest = bytes(set(range(256)) - set(b'"[]{},' + BLANK))    # bytes without structure, once escapes are removed
_brackets = bytes.maketrans(b"{}", b"[]")
_marks = re.compile(rb"[\[\]]|,+").findall     # a run of commas lies at one depth


class BodyScreen:
    """Checks one body, slice by slice; each slice raises the errors found so far.

    `around` is the number of levels around the request, which MCP puts into a message.
    """

    def __init__(self, most_values: int, most_depth: int = MAX_DEPTH, around: int = 0) -> None:
        self.most_values, self.most_depth, self.outer = most_values, most_depth + around, around + 1
        self.values = self.depth = self.blanks = self.members = 0
        self.inside = False         # a string
        self.before = b""           # the end of the previous slice: an escape may span two slices
        self.decode = codecs.getincrementaldecoder("utf-8")().decode

    def look(self, slice: bytes) -> None:
        """Check the next slice, which must not end in the middle of an escape (see `cut_slices`)."""
        if not slice.isascii():
            self.decode(slice)      # msgspec does not check the text that it keeps raw or skips
        text = slice.replace(b"\\\\", b"  ")
        if b"\\u0000" in (joined := self.before + text):
            raise InvalidRequest("strings may not contain the NUL character")
        self.before = joined[-5:]
        self._count(self._outside(text.replace(b'\\"', b"  ")))

    def end(self) -> None:
        """Check the end: a character may be cut off there."""
        self.decode(b"", True)

    def _outside(self, text: bytes) -> bytes:
        """Return the brackets, commas and blanks outside strings."""
        parts = text.translate(None, _rest).split(QUOTE)
        outside = b"".join(parts[self.inside::2])
        self.inside ^= len(parts) % 2 == 0
        return outside

    def _count(self, outside: bytes) -> None:
        structure = outside.translate(None, BLANK)
        self.blanks += len(outside) - len(structure)
        if self.blanks > MOST_BLANKS:
            raise PayloadTooLarge(f"the request has more than {MOST_BLANKS} bytes of white space between its values")
        alike = structure.translate(_brackets)
        self.values += alike.count(b",") + alike.count(b"[")
        if self.values > self.most_values:
            raise PayloadTooLarge(f"the request has more than {self.most_values} values in its lists and objects; "
                                  "send fewer at a time, or store them elsewhere and send a pointer")
        for mark in _marks(alike):      # few: commas and opening brackets are counted as values
            self._step(mark)
        if self.members > MOST_MEMBERS:
            raise PayloadTooLarge(f"a request may have at most {MOST_MEMBERS} members")

    def _step(self, mark: bytes) -> None:
        """Follow one bracket, or the commas between two brackets."""
        if mark[0] == COMMA:
            self.members += len(mark) if self.depth <= self.outer else 0
            return
        self.depth += 1 if mark[0] == OPENS else -1
        if self.depth > self.most_depth:
            raise PayloadTooDeep(f"JSON may be nested {MAX_DEPTH} deep at most")
        if self.depth < 0:
            raise InvalidRequest("the JSON closes a list or an object that it never opened")


def cut_slices(body: bytes, size: int = SLICE) -> Iterator[bytes]:
    """Cut a body into slices, none of which ends with a backslash that begins an escape."""
    cut = 0
    while cut < len(body):
        piece = body[cut:cut + size]
        run = len(piece) - len(piece.rstrip(b"\\"))
        if run % 2 and cut + size < len(body):
            piece = piece[:-1]
        cut += len(piece)
        yield piece


def is_light(body: bytes, most_values: int) -> bool:
    """Whether a body is too short, too flat and too plain to be refused, so that it needs no check in slices."""
    return (len(body) <= min(SLICE, 2 * most_values) and body.count(b"{") + body.count(b"[") <= MAX_DEPTH
            and body.count(b",") <= MOST_MEMBERS
            and body.isascii() and b"\\u0000" not in body)


async def screen_body(body: bytes, most_values: int, most_depth: int = MAX_DEPTH, around: int = 0) -> None:
    """Refuse a body that some database or reader cannot handle; block the event loop for one slice at a time.

    Raises PayloadTooLarge for too many values, PayloadTooDeep, InvalidRequest for NUL characters, and
    UnicodeDecodeError.
    """
    if is_light(body, most_values):
        return
    judge = BodyScreen(most_values, most_depth, around)
    for piece in cut_slices(body):
        judge.look(piece)
        await let_others_run(len(body))
    judge.end()


async def let_others_run(size: int) -> None:
    """Let other requests run before the next pass over a large body.

    A pause of zero would let other requests run, but not the threads that read and write for them: an event loop that
    never sleeps takes the interpreter lock back before they wake up.
    """
    if size > SLICE:
        await asyncio.sleep(REST_SECONDS if size > LARGE else 0)


def check_members(body: bytes) -> None:
    """Refuse an item of a batch with too many members; it passed `screen_body` as part of its batch."""
    if body.count(b",") > MOST_MEMBERS:
        BodyScreen(len(body)).look(body)


async def find_refusal(body: bytes, most_values: int, around: int) -> GateError | None:
    """Return why `screen_body` refuses a body, if it does, for a façade with its own form of answers."""
    try:
        await screen_body(body, most_values, around=around)
    except GateError as no:
        return no
    return None
