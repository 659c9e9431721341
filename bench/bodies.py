"""The bodies that cost a gate most, each at the default size limit (`asyncgate bench --bad-bodies`)."""

from __future__ import annotations

from asyncgate.parts.model.settings import Settings

BODY_BYTES = Settings().max_request_bytes
BODY_ENDS = (b'{"type":"bench.bad","payload":', b"}")
NAMES_PER_BODY = 90_000       # of one object: just below the limit of a gate


def fill_body(start: bytes, unit: bytes, end: bytes) -> bytes:
    """Repeat a unit between a start and an end until the body has its full size."""
    return start + unit * ((BODY_BYTES - len(start) - len(end)) // len(unit)) + end


def make_worst() -> list[tuple[bytes, bytes]]:
    """Return paths and bodies: many values, deep nesting, many escapes, many strings, long texts, many names."""
    begin, end = BODY_ENDS
    values = [fill_body(begin + b"[", unit, b"1]" + end) for unit in (b"[],", b"{},", b'"",', b"1,")]
    deep = [fill_body(begin, b"[", b""), fill_body(begin, b'{"a":', b"")]
    texts = [fill_body(begin + b'"', unit, b'"' + end) for unit in (b"\\\\", b'\\"', b"\\u0061", "é".encode(), b"[],")]
    others = [fill_body(b'{"type":"bench.bad","success_criteria":"', b"\\u0061", b'"}'), fill_body(b"", b" ", b"{}"),
              fill_body(b"", b'"', b""), make_many_names(b"payload"), make_many_names(b""), make_many_names(b"", b"1")]
    calls = [make_call(b'{"type":"bench.bad","payload":"', b"\\u0061", b'"}'), make_call(b"[", b"[],", b"1]")]
    return [*((b"/v1/tasks", body) for body in (*values, *deep, *texts, *others)), (b"/v1/receipts", make_long_list()),
            *((b"/mcp", body) for body in calls)]


def make_many_names(member: bytes, value: bytes = b"null") -> bytes:
    """Return a request with very many names, in one member or at the top level."""
    names = b",".join([b'"k%d":%b' % (number, value) for number in range(NAMES_PER_BODY)])
    return b'{"type":"bench.bad","%b":{%b}}' % (member, names) if member else b'{"type":"bench.bad",%b}' % names


def make_long_list() -> bytes:
    """Return a request with a very long list of names."""
    names = b",".join([b'"k%d"' % number for number in range(NAMES_PER_BODY)])
    return b'{"receipt_type":"bench.bad","parents":[%b]}' % names


def make_call(start: bytes, unit: bytes, end: bytes) -> bytes:
    """Return a bare JSON-RPC call with these arguments."""
    around = b'{"method":"tools/call","params":{"name":"asyncgate.create_task","arguments":'
    return fill_body(around + start, unit, end + b"}}")
