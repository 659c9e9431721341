"""The bodies that cost a gate most, each as large as a gate accepts by default (`asyncgate bench --bad-bodies`)."""

from __future__ import annotations

from asyncgate.parts.model.settings import Settings

SIZE = Settings().max_request_bytes
ENDS = (b'{"type":"bench.bad","payload":', b"}")
KEYS = 90_000       # of one object: below what a gate refuses


def filled(start: bytes, unit: bytes, end: bytes) -> bytes:
    """Repeat a unit between a start and an end until the body has its size."""
    return start + unit * ((SIZE - len(start) - len(end)) // len(unit)) + end


def worst() -> list[tuple[bytes, bytes]]:
    """Return paths and bodies: many values, deep ones, many escapes, many strings, long texts, many names."""
    begin, end = ENDS
    values = [filled(begin + b"[", unit, b"1]" + end) for unit in (b"[],", b"{},", b'"",', b"1,")]
    deep = [filled(begin, b"[", b""), filled(begin, b'{"a":', b"")]
    texts = [filled(begin + b'"', unit, b'"' + end) for unit in (b"\\\\", b'\\"', b"\\u0061", "é".encode(), b"[],")]
    others = [filled(b'{"type":"bench.bad","success_criteria":"', b"\\u0061", b'"}'), filled(b"", b" ", b"{}"),
              filled(b"", b'"', b""), named(b"payload"), named(b""), named(b"", b"1")]
    calls = [called(b'{"type":"bench.bad","payload":"', b"\\u0061", b'"}'), called(b"[", b"[],", b"1]")]
    return [*((b"/v1/tasks", body) for body in (*values, *deep, *texts, *others)), (b"/v1/receipts", listed()),
            *((b"/mcp", body) for body in calls)]


def named(member: bytes, value: bytes = b"null") -> bytes:
    """Return a request one of whose members has very many names, or which itself has them."""
    names = b",".join([b'"k%d":%b' % (number, value) for number in range(KEYS)])
    return b'{"type":"bench.bad","%b":{%b}}' % (member, names) if member else b'{"type":"bench.bad",%b}' % names


def listed() -> bytes:
    """Return a request with a very long list of names."""
    names = b",".join([b'"k%d"' % number for number in range(KEYS)])
    return b'{"receipt_type":"bench.bad","parents":[%b]}' % names


def called(start: bytes, unit: bytes, end: bytes) -> bytes:
    """Return a bare JSON-RPC call with such arguments."""
    around = b'{"method":"tools/call","params":{"name":"asyncgate.create_task","arguments":'
    return filled(around + start, unit, end + b"}}")
