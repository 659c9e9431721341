"""Clients that are named by the URL of their metadata (OAuth client ID metadata documents).

Anybody can name a URL, so a document costs a stranger nothing and must cost the gate little:
- It is fetched through the guard of outgoing calls, small, soon, without redirects, and once for all who wait.
- A failure is remembered for a minute, and new documents are bounded for each address, each host and the gate.
- It is kept in memory.  It becomes a row when somebody has signed in with it, so strangers cannot fill a table.
A row is read again when its document may have changed, seven days later at most.  While its source is down, it stays
good for thirty days; when its document was taken back, for seven.  A pinned row is never read again.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import Work
from asyncgate.extras.oauth.redirects import check_redirects, find_document_url_flaw
from asyncgate.parts.identity.audit import current_visitor
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.connection import group_address
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.process.kit import Bounded, Flights, Rate
from asyncgate.parts.process.lookups import asking

if TYPE_CHECKING:
    import httpx2

    from asyncgate.extras.oauth.server import AuthorizationServer

log = logging.getLogger("asyncgate")

MOST_DOCUMENT_BYTES = 32 * 2**10
DOCUMENT_FETCH_SECONDS = 5.0
SHORTEST_SECONDS, USUAL_SECONDS, LONGEST_SECONDS = 300.0, 1.0 * DAY_SECONDS, 7.0 * DAY_SECONDS
STALE_SECONDS = 30.0 * DAY_SECONDS      # how long a document is good whose source is down
FAILED_SECONDS = 60.0
MOST_KNOWN = 500                        # documents, and failures, that are kept in memory
PER_ADDRESS, PER_HOST, PER_GATE = 10, 10, 60        # new documents in a minute
MOST_NAME_LENGTH = 200
JSON_TYPE = re.compile(r"application/([!-~]+\+)?json\s*(;|\Z)", re.IGNORECASE)
MAX_AGE = re.compile(r"(?:\A|[\s,])max-age=([0-9]{1,9})(?=[\s,]|\Z)", re.IGNORECASE)
FORBIDDEN_AGE = re.compile(r"(?:\A|[\s,])no-(?:store|cache)(?=[\s,]|\Z)", re.IGNORECASE)
SIGNING_ALGORITHMS = ("RS256", "ES256")
TAKEN_BACK = (404, 410)                       # the client has taken its document back


class UnusableDocument(Exception):
    """Why the document of a client cannot be used."""


class SourceDown(UnusableDocument):
    """The document could not be read now; the one that was read before stays good."""


class ClientDocument(Struct):
    """The metadata of a client (RFC 7591 2); members that the gate does not need are ignored."""

    client_id: str
    redirect_uris: list[str]
    client_name: str = ""
    token_endpoint_auth_method: str | None = None               # the one that the client prefers
    token_endpoint_auth_methods_supported: list[str] = []       # all that it can do
    token_endpoint_auth_signing_alg: str | None = None
    jwks: dict[str, Any] | None = None
    jwks_uri: str | None = None
    client_secret: Any = None

    def methods(self) -> list[str]:
        """Return how the client can prove itself here, the preferred way first; without a word it need not."""
        methods = dict.fromkeys([self.token_endpoint_auth_method or "none", *self.token_endpoint_auth_methods_supported]
                                if self.token_endpoint_auth_method or not self.token_endpoint_auth_methods_supported
                                else self.token_endpoint_auth_methods_supported)
        return [method for method in methods if method == "none" or (method == "private_key_jwt" and self.has_keys())]

    def has_keys(self) -> bool:
        """Whether the gate can check what the client signs."""
        return self.token_endpoint_auth_signing_alg in (None, *SIGNING_ALGORITHMS) and (
            self.jwks is not None or self.jwks_uri is not None)


class Known(Struct):
    """A document that was read, and until when it is fresh."""

    client: stored_oauth.OAuthClient
    until: float


class Documents:
    """Reads and remembers metadata documents."""

    def __init__(self, server: AuthorizationServer) -> None:
        self.server, self.clock = server, time.monotonic
        self.known: Bounded[str, Known] = Bounded(MOST_KNOWN)
        self.failed: Bounded[str, tuple[float, UnusableDocument]] = Bounded(MOST_KNOWN)
        self.flights: Flights[str, Known] = Flights()
        self.rates = {name: Rate(most, 60.0, lambda: self.clock())
                        for name, most in (("address", PER_ADDRESS), ("host", PER_HOST), ("gate", PER_GATE))}
        self.http: httpx2.AsyncClient | None = None

    async def find(self, client_id: str, row: stored_oauth.OAuthClient | None) -> stored_oauth.OAuthClient | None:
        """Return the client that a URL names; `row` is what the database has of it.  Raises UnusableDocument."""
        if row is not None and (row.pinned or row.disabled_at is not None):
            return row
        if not self.server.oauth.client_documents:
            return None
        now, known = self.server.engine.backend.now(), self.known.get(client_id)
        if known is not None and now < known.until and (row is None or row.updated_at <= known.client.updated_at):
            self.known.move_to_end(client_id)
            return row or known.client
        if row is not None and now - row.updated_at < SHORTEST_SECONDS:     # another gate has just read it
            return row
        return await self._refresh(client_id, row, now)

    async def _refresh(self, client_id: str, row: stored_oauth.OAuthClient | None,
                       now: float) -> stored_oauth.OAuthClient:
        try:
            fresh = (await self.read(client_id, known=row is not None)).client
        except UnusableDocument as why:
            # One that was taken back has its week, too: a mistake of an hour at its source must end no sessions.
            good_for = STALE_SECONDS if isinstance(why, SourceDown) else LONGEST_SECONDS
            if row is None or now - row.updated_at > good_for:
                raise
            return row
        return fresh if row is None else await self._store(fresh)

    async def _store(self, fresh: stored_oauth.OAuthClient) -> stored_oauth.OAuthClient:
        """Take over into the row what a document says now."""
        def change(work: Work) -> stored_oauth.OAuthClient:
            row = work.find_record(stored_oauth.OAuthClient, fresh.client_id)
            if row is None or row.pinned:
                return row or fresh
            row = replace(row, name=fresh.name, redirect_uris=fresh.redirect_uris, auth_method=fresh.auth_method,
                          document=fresh.document, updated_at=fresh.updated_at)
            work.keep_record(row)
            return row
        return await self.server.directory.change(change, (stored_oauth.OAuthClient, (fresh.client_id,)))

    async def read(self, url: str, known: bool = False) -> Known:
        """Read a document, once for all who wait; raises UnusableDocument, also for a minute after a failure."""
        if (failure := self.failed.get(url)) and self.clock() < failure[0]:
            raise failure[1]
        if not known and url not in self.flights.under_way:
            address = group_address(current_visitor().get("ip") or "")
            for name, key in (("address", address), ("host", urlsplit(url).hostname or ""), ("gate", "")):
                if not self.rates[name].take(key):
                    raise SourceDown("too many new clients have asked just now; try again in a minute")
        return await self.flights.join(url, lambda: self._read(url))

    async def _read(self, url: str) -> Known:
        try:
            text, seconds = await self._fetch(url)
            now = self.server.engine.backend.now()
            known = Known(read_document(url, text, now), now + seconds)
        except UnusableDocument as why:
            self.failed.put(url, (self.clock() + FAILED_SECONDS, why))
            log.info("the metadata document %s cannot be used: %s", url, why)
            raise
        self.known.put(url, known)
        return known

    async def _fetch(self, url: str) -> tuple[bytes, float]:
        """Return the text of a document, and for how many seconds it is fresh."""
        import httpx2

        try:
            answer = await self.fetcher().get(url, headers={"accept": "application/json"})
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            log.info("cannot fetch %s: %s: %s", url, type(error).__name__, error)
            raise SourceDown("its source cannot be reached") from None
        if answer.status_code in TAKEN_BACK:
            raise UnusableDocument("there is none at its URL")
        if answer.status_code != 200:
            raise SourceDown(f"its source answers {answer.status_code}")
        if not JSON_TYPE.match(answer.headers.get("content-type", "")):
            raise UnusableDocument("its source does not call it application/json")
        return answer.content, read_lifetime(answer.headers.get("cache-control", ""))

    def fetcher(self) -> httpx2.AsyncClient:
        """Return the HTTP client that reads documents and key sets; its look-ups count for whoever asks now."""
        asking.set(group_address(current_visitor().get("ip") or ""))
        if self.http is None:
            from asyncgate.parts.process.outgoing import make_client  # a large import, needed only with a URL

            outgoing = self.server.settings.security.outgoing
            self.http = make_client(allow=outgoing.allow, deny=outgoing.deny, timeout_seconds=DOCUMENT_FETCH_SECONDS,
                                    most_bytes=MOST_DOCUMENT_BYTES)
        return self.http


def read_lifetime(cache_control: str) -> float:
    """Return for how long a document is fresh: what its source says, but five minutes to seven days."""
    if FORBIDDEN_AGE.search(cache_control):
        return SHORTEST_SECONDS
    match = MAX_AGE.search(cache_control)
    return min(max(float(match[1]), SHORTEST_SECONDS), LONGEST_SECONDS) if match else USUAL_SECONDS


def read_document(url: str, text: bytes, now: float) -> stored_oauth.OAuthClient:
    """Return the client that a document describes; raises UnusableDocument."""
    document = decode_document(text)
    if document.client_id != url:
        raise UnusableDocument("it is the document of another client_id")
    if document.client_secret is not None:
        raise UnusableDocument("it contains a client_secret, which is public there")
    if why := check_redirects(document.redirect_uris):
        raise UnusableDocument(why)
    if document.jwks_uri is not None and find_document_url_flaw(document.jwks_uri):
        raise UnusableDocument("its jwks_uri is not an https URL that the gate may read")
    if not (methods := document.methods()):
        raise UnusableDocument("it names no way to authenticate at the token endpoint that this gate has: none, or "
                         f"private_key_jwt with {' or '.join(SIGNING_ALGORITHMS)} and its keys")
    name = document.client_name[:MOST_NAME_LENGTH].replace("\0", "") or urlsplit(url).hostname or url
    return stored_oauth.OAuthClient(
        url, "document", name, msgspec.json.encode(document.redirect_uris).decode(), None,
        "private_key_jwt" if "private_key_jwt" in methods else "none", None, text.decode(), None, trusted=False,
        pinned=False, access_days=None, created_at=now, created_by="its metadata document", updated_at=now)


def decode_document(text: bytes) -> ClientDocument:
    """Decode a document; raises UnusableDocument."""
    try:
        text.decode()
        document = msgspec.json.decode(text, type=ClientDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise UnusableDocument(f"it is not the metadata of a client: {wrong}"[:300]) from None
    if b"\0" in text:       # no database keeps it
        raise UnusableDocument("it contains a NUL character")
    return document


def list_methods(client: stored_oauth.OAuthClient) -> list[str]:
    """Return how a client may prove itself at the token endpoint."""
    if client.document is None:
        return [client.auth_method]
    return decode_document(client.document.encode()).methods()
