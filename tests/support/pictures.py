"""Pictures with few colours, so that they are small: what a screenshot of a page needs, and no more."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_COLOURS = 64


def read_size(png: bytes) -> tuple[int, int]:
    """Return the width and the height of a picture."""
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)


def shrink_png(png: bytes) -> bytes:
    """Return a picture with its most frequent colours; each other one becomes the nearest of them."""
    (width, height), size = read_size(png), {2: 3, 6: 4}[png[25]]
    packed = b"".join(body for kind, body in walk_chunks(png) if kind == b"IDAT")
    pixels = [bytes(row[at:at + 3]) for row in unfilter(zlib.decompress(packed), width * size, size)
              for at in range(0, len(row), size)]
    count = Counter(pixels)
    palette = [colour for colour, _ in count.most_common(MOST_COLOURS)]
    nearest = {colour: find_nearest(colour, palette) for colour in count}
    places = bytes(map(nearest.__getitem__, pixels))
    rows = b"".join(b"\0" + places[at:at + width] for at in range(0, len(places), width))
    return SIGNATURE + b"".join(map(write_chunk, (b"IHDR", b"PLTE", b"IDAT", b"IEND"), (
        struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0), b"".join(palette), zlib.compress(rows, 9), b"")))


def walk_chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Walk the kinds and bodies of a picture's chunks."""
    at = len(SIGNATURE)
    while at < len(png):
        [size] = struct.unpack(">I", png[at:at + 4])
        yield png[at + 4:at + 8], png[at + 8:at + 8 + size]
        at += size + 12


def write_chunk(kind: bytes, body: bytes) -> bytes:
    """Write a chunk with its length and its check."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def unfilter(raw: bytes, wide: int, size: int) -> Iterator[bytearray]:
    """Walk the rows of pixels; `size` is that of a pixel, `wide` that of a row in bytes (PNG specification, 9)."""
    above = bytearray(wide)
    for start in range(0, len(raw), wide + 1):
        filter, row = raw[start], bytearray(raw[start + 1:start + 1 + wide])
        for at in range(wide if filter else 0):
            left, corner = (row[at - size], above[at - size]) if at >= size else (0, 0)
            row[at] = (row[at] + predict(filter, left, above[at], corner)) & 255
        yield row
        above = row


def predict(filter: int, left: int, up: int, corner: int) -> int:
    """Return what a filter expects a byte to be."""
    if filter == 4:
        near = left + up - corner
        return min((left, up, corner), key=lambda candidate: abs(near - candidate))
    return (0, left, up, (left + up) // 2)[filter]


def find_nearest(colour: bytes, palette: list[bytes]) -> int:
    """Return the place of the colour that differs least."""
    return min(range(len(palette)), key=lambda at: sum((a - b) ** 2 for a, b in zip(colour, palette[at], strict=True)))
