"""Check the bytes of a JSON body before it is decoded: its encoding, its depth, and its number of values.

A decoder makes an object of every value: 16 MiB of `[],` are five million lists, 400 MiB and many seconds.  So a
body is checked as bytes first, in slices, with a constant number of native passes over each; other requests run
between two slices.  A body that passes has so few values that decoding it takes milliseconds.

Some JSON cannot be stored: a NUL character, half of a surrogate pair, bytes that are not UTF-8, values nested too deep.
A batch is not refused for it: a mark takes the place of each, and the item that holds a mark is refused alone.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Iterator
from typing import Any

from asyncgate.parts.model import errors

MAX_DEPTH = 64      # of a request's JSON
MOST_MEMBERS = 1000     # of a request: naming or dropping members makes an object of each
SLICE = 2**15       # bytes that are checked in one turn of the event loop
LARGE = 8 * SLICE   # for larger bodies the event loop rests between two turns
REST_SECONDS = 0.002
NUL = "\\u0000"     # its escape begins a mark; a letter of SPOILT follows
SPOILT: dict[str, tuple[type[errors.GateError], str]] = {
    "n": (errors.InvalidRequest, "strings may not contain the NUL character"),
    "s": (errors.InvalidRequest, "strings may not contain half of a surrogate pair (U+D800 to U+DFFF)"),
    "b": (errors.InvalidRequest, "strings may not contain bytes that are not UTF-8"),
    "d": (errors.PayloadTooDeep, f"JSON may be nested {MAX_DEPTH} deep at most")}
QUOTE, OPENS, COMMA = b'"', ord("["), ord(",")
BLANK, MOST_BLANKS = b" \t\r\n", 2**20       # between values; a decoder scans them repeatedly, a byte at a time
_rest = bytes(set(range(256)) - set(b'"[]{},' + BLANK))    # bytes without structure, once escapes are removed
_brackets = bytes.maketrans(b"{}", b"[]")
_marks = re.compile(rb"[\[\]]|,+").findall     # a run of commas lies at one depth
_may_be_spoilt = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])").search
_find_sound = re.compile(rb"(?:[^\\]++|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
                         rb"|\\u(?!0000|[dD][89a-fA-F]))*+", re.DOTALL).match
_skip_to_bracket = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL).match


class BodyScreen:
    """Checks one body, slice by slice; each slice raises the errors found so far.

    `around` is the number of levels around the request, which MCP puts into a message.  The first of SPOILT is kept
    instead of raised if the body can be `marked` afterwards, which one that is also too large cannot.
    """

    def __init__(self, most_values: int, most_depth: int = MAX_DEPTH, around: int = 0, marked: bool = False) -> None:
        self.most_values, self.most_depth, self.outer = most_values, most_depth + around, around + 1
        self.marked = marked
        self.spoilt: errors.GateError | UnicodeDecodeError | None = None
        self.values = self.depth = self.blanks = self.members = 0
        self.inside = False         # a string
        self.before = b""           # the end of the previous slice: an escape may span two slices
        self.decode = codecs.getincrementaldecoder("utf-8")().decode

    def look(self, slice: bytes) -> None:
        """Check the next slice, which must not end in the middle of an escape (see `cut_slices`)."""
        if not slice.isascii() and not isinstance(self.spoilt, UnicodeDecodeError):
            self._decode(slice)     # msgspec does not check the text that it keeps raw or skips
        text = slice.replace(b"\\\\", b"  ")
        if NUL.encode() in (joined := self.before + text):
            self.refuse(describe_spoilt("n"))
        self.before = joined[-5:]
        self._count(self._outside(text.replace(b'\\"', b"  ")))

    def end(self) -> None:
        """Check the end: a character may be cut off there."""
        if not isinstance(self.spoilt, UnicodeDecodeError):
            self._decode(b"", True)

    def _decode(self, slice: bytes, final: bool = False) -> None:
        try:
            self.decode(slice, final)
        except UnicodeDecodeError as wrong:
            self.refuse(wrong)

    def refuse(self, why: errors.GateError | UnicodeDecodeError) -> None:
        """Raise why the body cannot be stored, or keep it for the marks."""
        if not self.marked:
            raise why
        self.spoilt = self.spoilt or why

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
            raise self.spoilt or errors.PayloadTooLarge(
                f"the request has more than {MOST_BLANKS} bytes of white space between its values")
        alike = structure.translate(_brackets)
        self.values += alike.count(b",") + alike.count(b"[")
        if self.values > self.most_values:
            raise self.spoilt or errors.PayloadTooLarge(
                f"the request has more than {self.most_values} values in its lists and objects; send fewer at a time, "
                "or store them elsewhere and send a pointer")
        for mark in _marks(alike):      # few: commas and opening brackets are counted as values
            self._step(mark)
        if self.members > MOST_MEMBERS:
            raise self.spoilt or errors.PayloadTooLarge(f"a request may have at most {MOST_MEMBERS} members")

    def _step(self, mark: bytes) -> None:
        """Follow one bracket, or the commas between two brackets."""
        if mark[0] == COMMA:
            self.members += len(mark) if self.depth <= self.outer else 0
            return
        self.depth += 1 if mark[0] == OPENS else -1
        if self.depth > self.most_depth and self.spoilt is None:       # one is enough: a body may have a million
            self.refuse(describe_spoilt("d"))
        if self.depth < 0:
            raise errors.InvalidRequest("the JSON closes a list or an object that it never opened")


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
    return (len(body) <= min(SLICE, 2 * most_values) and body.count(b",") <= MOST_MEMBERS
            and body.isascii() and not (b"\\u" in body and _may_be_spoilt(body))
            and (body.count(b"{") + body.count(b"[") <= MAX_DEPTH or is_shallow(body)))


def is_shallow(body: bytes) -> bool:
    """Whether a short body is nested no deeper than allowed, as lists of a hundred flat items are."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _rest)
    left = b"".join(text.split(QUOTE)[::2]).translate(_brackets, BLANK + b",")
    for _ in range(MAX_DEPTH):      # each pass takes the innermost lists away
        left = left.replace(b"[]", b"")
    return not left


async def screen_body(body: bytes, most_values: int, most_depth: int = MAX_DEPTH, around: int = 0) -> None:
    """Refuse a body that some database or reader cannot handle; block the event loop for one slice at a time.

    Raises PayloadTooLarge for too many values, what is SPOILT, and UnicodeDecodeError.
    """
    await _judge(body, BodyScreen(most_values, most_depth, around))


async def mark_body(body: bytes, most_values: int, around: int = 0, most_depth: int = MAX_DEPTH
                    ) -> tuple[bytes, errors.GateError | UnicodeDecodeError | None]:
    """Put marks in the places of what cannot be stored; return the first reason, too, if there is one."""
    await _judge(body, judge := BodyScreen(most_values, most_depth, around, marked=True))
    if judge.spoilt is not None:
        body = await asyncio.to_thread(mark_spoilt, body, judge.most_depth)
    return body, judge.spoilt


async def _judge(body: bytes, judge: BodyScreen) -> None:
    if is_light(body, judge.most_values):
        return
    for piece in cut_slices(body):
        judge.look(piece)
        await let_others_run(len(body))
    judge.end()
    at = 0 if _may_be_spoilt(body) else len(body)
    while at < len(body):
        begun, at = at, _find_sound(body, at, at + SLICE).end()     # type: ignore[union-attr]
        if at == begun:     # half of a pair, or NUL, which was refused above
            return judge.refuse(describe_spoilt("s"))
        await let_others_run(len(body))


def mark_spoilt(body: bytes, most_depth: int = MAX_DEPTH) -> bytes:
    """Put a mark in the place of each value that cannot be stored; a body that is not JSON stays so."""
    parts, at = list[bytes](), 0
    while (end := _find_sound(body, at).end()) < len(body):     # type: ignore[union-attr]
        bad = body[end:end + 6]
        parts += [body[at:end], (NUL + ("n" if bad == NUL.encode() else "s")).encode()]
        at = end + len(bad)
    text = b"".join([*parts, body[at:]]).decode("utf-8", "surrogateescape")
    # The blank: an escape before it would take the mark apart.
    return _mark_deep(re.sub("[\udc80-\udcff]+", rf" \{NUL}b", text).encode(), most_depth)


def _mark_deep(body: bytes, most_depth: int) -> bytes:
    parts, depth, begun, at = list[bytes](), 0, 0, 0
    while (at := _skip_to_bracket(body, at).end() + 1) <= len(body):    # type: ignore[union-attr]
        depth += 1 if body[at - 1:at] in b"[{" else -1
        if depth == most_depth + 1 and body[at - 1:at] in b"[{":
            parts.append(body[begun:at - 1])
        elif depth == most_depth and body[at - 1:at] in b"]}":
            parts.append(f'"{NUL}d"'.encode())
            begun = at
    return b"".join([*parts, body[begun:]])


def describe_spoilt(letter: str, place: str = "") -> errors.GateError:
    """Return the refusal that a letter of SPOILT stands for."""
    kind, why = SPOILT.get(letter, SPOILT["n"])
    return kind(f"{place}: {why}" if place else why)


def find_mark(value: Any, path: str = "") -> errors.GateError | None:
    """Return the refusal that the first mark in a decoded value stands for, if it has any; it names the place."""
    if isinstance(value, str):
        return describe_spoilt(value.partition("\0")[2][:1], path) if "\0" in value else None
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, held in named:
        refusal = find_mark(name, path and f"{path}, name of a member") or find_mark(
            held, f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}")
        if refusal:
            return refusal
    return None


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
