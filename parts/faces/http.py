"""Read HTTP bodies, queries and hosts; refuse invalid ones before the gate sees them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from asyncgate.parts.model import connection, errors, wire
from asyncgate.parts.model.identities import IDENTITY_MEMBERS, check_names, list_identities
from asyncgate.parts.model.members import read_member
from asyncgate.parts.model.screening import LARGE, check_members, let_others_run
from asyncgate.parts.model.settings import Settings

ITEMS = {"tasks", "schedules"}      # members of a batch that contain requests
VALUES = {"payload"}                # members where null is a value
MOST_ITEMS = 500
HAS_NULL = re.compile(rb":[ \t\r\n]*null").search      # as every null member looks, and some texts
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def drop_null_members(body: bytes | msgspec.Raw) -> bytes:
    """Drop null members of an object, except a payload: some clients send null for absent members."""
    if b"null" not in bytes(body) or not HAS_NULL(bytes(body)):
        return bytes(body)
    check_members(bytes(body))
    held = {name: value for name, value in _members(body).items()
            if name in VALUES or bytes(value).strip() != b"null"}
    for name in ITEMS & held.keys():
        with contextlib.suppress(msgspec.DecodeError):      # values of other types are refused when they are decoded
            if len(items := _items(held[name])) > MOST_ITEMS:
                raise errors.InvalidRequest(f"a batch may have at most {MOST_ITEMS} items")
            held[name] = msgspec.Raw(b"[" + b",".join([drop_null_members(item) for item in items]) + b"]")
    return msgspec.json.encode(held)


@lru_cache(1024)
def is_named(value: bytes, names: frozenset[str]) -> bool:
    """Whether a Host or Origin header names one of `names`; scheme and port count only if listed."""
    text = value.decode("latin-1").lower()
    host = re.sub(r":\d*$", "", text.partition("://")[2] or text).strip("[]")
    return bool(names & {text, host, "*"})


AUTHORITY = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-f:.]+\]|[^:/?#@\[\]]+)(?::(?P<port>\d{1,5}))?\Z")


@lru_cache(1024)
def is_own_page(origin: bytes, host: bytes, names: frozenset[str]) -> bool:
    """Whether an Origin belongs to the gate: it equals the request's Host, or one of `names` with the same port.

    Other programs on the same machine serve pages too, on other ports.
    """
    page, authority = (AUTHORITY.match(text.decode("latin-1").lower()) for text in (origin, host))
    if page is None or authority is None or page["scheme"] is None or authority["scheme"] is not None:
        return False
    usual = "443" if page["scheme"] == "https" else "80"
    known = page["host"] == authority["host"] or {page["host"].strip("[]"), authority["host"].strip("[]")} <= names
    return known and int(page["port"] or usual) == int(authority["port"] or usual)


def keep_slashes(scope: connection.Scope) -> None:
    """Keep an encoded slash encoded until the path is divided, because it is part of a name."""
    raw = scope.get("raw_path") or b""
    if b"%25" in raw or b"%2f" in raw.lower():
        kept = re.sub(rb"%(2[fF5])", rb"%25\1", raw.partition(b"?")[0])
        scope["path"] = unquote(kept.decode("ascii"))


def read_name(place: str) -> str:
    """Return the name that a place of a divided path holds."""
    return unquote(place)


def read_query(query: bytes) -> dict[str, str]:
    """Decode a query; if a name repeats, the last value wins."""
    if not query:
        return {}
    pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    if any("\0" in text for pair in pairs for text in pair):
        raise errors.InvalidRequest("the query may not contain the NUL character")
    parameters = dict(pairs)
    if twice := sorted({name for name, value in pairs if name in IDENTITY_MEMBERS and value != parameters[name]}):
        raise errors.InvalidRequest(f"the query says {twice[0]} twice: a request names one principal")
    return parameters


def fill_principal(ask: wire.Ask, query: dict[str, str]) -> None:
    """Take the principal from the query if the body names none; some clients put it there."""
    if query.keys() & IDENTITY_MEMBERS:
        check_names([*list_identities(ask), ("query", query)])
    as_worker = isinstance(ask, wire.AsWorker) and query.get("principal_kind") == "worker"
    for name in ("principal_kind", "principal_id", "principal_instance_id"):
        member = name.replace("principal", "worker") if as_worker else name
        if name in query and getattr(ask, member, "") is None:
            setattr(ask, member, read_member(name, query[name], wire.Kind if name == "principal_kind" else wire.Name))


def read_claimed_tenants(query: dict[str, str], headers: connection.Headers) -> list[str]:
    """Return all tenants that a request names in its headers and its query."""
    named = [value.decode("latin-1") for name, value in headers if name == b"x-tenant-id"]
    return [*named, query["tenant_id"]] if "tenant_id" in query else named


async def read_body(scope: connection.Scope, receive: connection.Receive, settings: Settings) -> bytes:
    """Read a JSON body within the limits of size and time."""
    most, typed = settings.max_request_bytes, False
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise errors.UnsupportedMediaType("send the body without content-encoding")
        if name == b"content-type":
            typed = True
            if value != b"application/json" and not (JSON_LIKE.match(value) and in_utf8(value)):
                raise errors.UnsupportedMediaType(AS_JSON)
        elif name == b"content-length" and int(value) > most:
            raise errors.PayloadTooLarge(f"the request has {int(value)} bytes; the limit is {most}")
    if (whole := connection.find_shortcut(scope)) is not None and (body := whole.body()) is not None:
        if len(body) > most:
            raise errors.PayloadTooLarge(f"the request is larger than {most} bytes")
    else:
        try:
            async with asyncio.timeout(settings.body_timeout_seconds):
                body = await _receive_body(receive, most)
        except TimeoutError:
            raise errors.RequestTimeout("the body did not arrive in time; send it again") from None
    body = body.removeprefix(BOM)
    if body and not typed:      # any page can make a browser send one, but JSON needs a preflight (CORS)
        raise errors.UnsupportedMediaType(AS_JSON)
    return body


BOM = b"\xef\xbb\xbf"      # some programs write it before UTF-8, and RFC 8259 lets a reader ignore it
AS_JSON = "send the body as content-type: application/json, in UTF-8"
CHARSET = re.compile(rb";\s*charset\s*=\s*[\"']?([^\"';\s]*)", re.IGNORECASE)
ENCODINGS = {b"utf-8", b"utf8", b"us-ascii"}
JSON_LIKE = re.compile(rb"\s*(application/([a-z0-9.+-]+\+)?json|\*/\*)\s*(;.*)?$", re.IGNORECASE)


def in_utf8(media: bytes) -> bool:
    """Whether a media type names no other encoding than UTF-8: its bytes would be read as what nobody sent."""
    return all(name.lower() in ENCODINGS for name in CHARSET.findall(media))


async def _receive_body(receive: connection.Receive, most: int) -> bytes:
    pieces, size, more, rest_at = list[bytes](), 0, True, LARGE
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        pieces.append(message.get("body", b""))
        size, more = size + len(pieces[-1]), message.get("more_body", False)
        if size > most:
            raise errors.PayloadTooLarge(f"the request is larger than {most} bytes")
        if size > rest_at:
            rest_at = size + LARGE
            await let_others_run(size)
    return b"".join(pieces)


async def run_while_connected(work: Awaitable[Any], receive: connection.Receive) -> Any:
    """Await a slow reply; cancel it when the client disconnects, which frees its place at once."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        task.cancel()       # no effect if it is done
        return await task
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)    # or asyncio logs an error of theirs


async def wait_for_disconnect(receive: connection.Receive) -> None:
    """Wait until the client disconnects; ignore other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass


def make_refusal_headers(refusal: errors.GateError, challenge: connection.Headers | None = None) -> connection.Headers:
    """Return the additional HTTP headers of a refusal; a gate with an authorization server has its own `challenge`."""
    more = list(challenge or ())
    if isinstance(refusal, errors.Unauthenticated) and not challenge:
        more.append((b"www-authenticate", refusal.challenge.encode()))
    if "allow" in refusal.more:
        more.append((b"allow", ", ".join(refusal.more["allow"]).encode()))
    if "retry_after" in refusal.more:
        more.append((b"retry-after", b"%d" % refusal.more["retry_after"]))
    return more

