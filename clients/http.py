"""Call a gate over HTTP: one small client for threads and one for asyncio, shared by every program here.

    with Http() as gate:                                    # ASYNCGATE_URL, ASYNCGATE_API_KEY
        made = gate.call("create_task", type="echo", payload={"hello": "world"})

A call names the operation and the fields of its request, and returns the reply as plain JSON values.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from asyncgate.clients.events import StreamEvent, read_events
from asyncgate.clients.finite import encode_finite, encode_request
from asyncgate.parts.model.connection import BROWSER_POLICY, GATE_MARK, is_loopback
from asyncgate.parts.process.spans import Tracing, find_tracing

try:
    from asyncgate.clients.operations import CALLS
except ModuleNotFoundError as missing:
    if missing.name != "asyncgate.clients.operations":
        raise
    sys.exit("clients/operations.py is generated, and this checkout does not have it: run "
             "`python -m asyncgate.commands.declare`")

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8080"
# Pauses between retries, for every program here: short ones for at least ten seconds, because a restart is short.
FIRST_PAUSE, SHORT_PAUSE, LONGEST_PAUSE, SHORT_PAUSES = 0.05, 0.5, 5.0, 60
NO_HOST = ("Name or service not known", "nodename nor servname", "No address associated")
AWAY_STATUSES = (408, 429, 502, 503, 504)    # after which a call that only reads may succeed; 502, 504: of a proxy
NO_SUCH_PAGE = (404, 405)    # a gate says with an `error` what it does not know; others send a page
# What a gate's answer has: the mark, or from a gate before that one, its policy for browsers.
MARKS = [(name.decode(), text.decode()) for name, text in (GATE_MARK, BROWSER_POLICY)]
URL_ENDINGS = ("/v1", "/mcp", "/mcp/u", "/docs")
QUIET_SECONDS = 1.0         # how long a gate may be unreachable before a client or a worker logs a warning
ANSWER_SECONDS = 30.0     # how long to wait for an answer, in addition to the request's own `wait_seconds`


class Refusal(Exception):
    """The gate refused a call; `code` is stable, `status` is the HTTP status, `more` has the answer's other fields."""

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float | None = None) -> None:
        super().__init__(str(body.get("message") or body.get("detail") or f"the answer has the status {status}"))
        self.status, self.code, self.retry_after = status, str(body.get("error") or "unexpected_answer"), retry_after
        self.more = {name: value for name, value in body.items() if name not in ("error", "message", "detail")}

    @property
    def message(self) -> str:
        """Return the message for people."""
        return str(self)


class Unreachable(Exception):
    """No gate answered; the one-line text says which and what to do.  `sent`: the gate may have received the call."""

    def __init__(self, message: str, *, sent: bool = True, size: int = 0) -> None:
        super().__init__(message)
        self.sent, self.size = sent, size       # size: bytes of a request during which the connection broke


class WrongAddress(Unreachable):
    """The address is wrong: another try cannot succeed."""


class NotAGate(Unreachable):
    """Something else answered: another product, a captive portal, or a gate of an incompatible version."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"what answers at {url} is not an AsyncGate, or is another version: {why}")


class CheckedReply(NamedTuple):
    """A successful answer of a gate: its JSON, and what that decodes to, of the type in CALLS."""

    content: bytes
    decoded: Any


class Exchange:
    """What both clients share: building the request of an operation and reading its answer."""

    patience_seconds = ANSWER_SECONDS
    answered = False                    # whether something has answered at this address
    tracing: Tracing | None = None      # where an open client has a provider of spans

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self.url = root_of(url or os.environ.get("ASYNCGATE_URL") or DEFAULT_URL)
        self.token = read_token() if token is None else token
        where = split_url(self.url)
        if not fits_header(self.token):        # the HTTP library's error would show the secret
            raise ValueError("the credential holds a character that no HTTP header can (a line break at its end?)")
        require_private(self.token, self.url)
        self.settings: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {self.token}"} if self.token else {},
            "verify": where.scheme == "https",          # else do not load certificates: that takes longer than a call
            "trust_env": not is_loopback(where.hostname or ""),    # use no proxy for this machine
        }

    def request(self, operation: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request that calls an operation: path from the ids, the rest as query or as JSON body."""
        verb, path = CALLS[operation].verb, CALLS[operation].path
        arguments = {name: value for name, value in fields.items() if value is not None or name == "payload"}
        for name in [name for name in arguments if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote_id(name, str(arguments.pop(name))))
        if "{" in path:
            raise ValueError(f"{operation} needs the argument {path.partition('{')[2].partition('}')[0]}")
        wait = float(arguments.get("wait_seconds", 30.0 if operation == "run_task" else 0.0))
        request = {"method": verb, "url": self.url + path, "timeout": self.patience_seconds + wait}
        headers = {} if self.tracing is None else self.tracing.inject({})
        if verb == "GET":
            params = {name: format_query_value(value) for name, value in arguments.items()}
            return {**request, "params": params, "headers": headers}
        headers["content-type"] = "application/json"
        return {**request, "content": encode_request(arguments), "headers": headers}

    def reply(self, operation: str, response: httpx2.Response) -> CheckedReply:
        """Read a successful answer; raise NotAGate for one of another server, Refusal for any other."""
        self.answered = True
        if not response.is_success:
            raise self.refusal(response)
        reply = self.read_reply(operation, response.content)
        if is_short(CALLS[operation].reply) and not any(response.headers.get(name) == text for name, text in MARKS):
            raise NotAGate(self.url, f"its answer to {operation} lacks the header X-AsyncGate")
        return reply

    def read_reply(self, operation: str, content: bytes) -> CheckedReply:
        """Decode a reply; raises NotAGate if it does not have the shape of this operation's replies."""
        try:
            return CheckedReply(content, find_decoder(CALLS[operation].reply).decode(content))
        except (ValueError, RecursionError) as error:
            raise NotAGate(self.url, f"its answer to {operation} {explain_flaw(content, error)}") from None

    def refusal(self, response: httpx2.Response) -> Refusal | NotAGate:
        """Return the error for an unsuccessful answer."""
        body, status = read_object(response.content), response.status_code
        if "error" not in body and (status < 400 or status in NO_SUCH_PAGE):
            to = f" and leads to {where}" if (where := response.headers.get("location", "")) else ""
            return NotAGate(self.url, f"its answer has the status {status}{to}")
        body = body or {"message": f"{self.url} does not answer like a gate (status {status}, no JSON object)"}
        return Refusal(status, body, read_retry_after(body.get("retry_after", response.headers.get("retry-after"))))

    def unreachable(self, error: httpx2.RequestError, asked: float = 0.0) -> Unreachable:
        """Explain in one line why no answer came to a request of that moment."""
        import httpx2

        if why := explain_bad_address(self.url, str(error)):
            return WrongAddress(why, sent=False)
        if any(sign in str(error) for sign in NO_HOST):
            return Unreachable(f"there is no host named {urlsplit(self.url).hostname}", sent=False)
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return Unreachable(f"no gate answers at {self.url}; start one with `asyncgate dev`", sent=False)
        if isinstance(error, httpx2.TimeoutException):
            return Unreachable(f"the gate at {self.url} took the request but did not answer in time")
        why = f"the connection to {self.url} broke before the answer came: {str(error) or type(error).__name__}"
        # A server that speaks TLS hangs up at once; a gate that stops cuts a call off, and has often answered before.
        at_once = not self.answered and time.monotonic() - asked < FIRST_PAUSE
        if at_once and self.url.startswith("http:") and "without sending" in str(error):
            why += f" (if it speaks TLS, its address is {self.url.replace('http', 'https', 1)})"
        return Unreachable(why, size=int(error.request.headers.get("content-length", 0)))


def find_reply_flaw(content: bytes, reply: type[msgspec.Struct]) -> str:
    """Return why some bytes are not a reply of this type; an empty text if they are one."""
    try:
        find_decoder(reply).decode(content)
    except (ValueError, RecursionError) as error:
        return explain_flaw(content, error)
    return ""


@cache
def is_short(reply: type[msgspec.Struct]) -> bool:
    """Whether replies of a type are so short that another product may send the same."""
    return not find_reply_flaw(b'{"ok":true}', reply)


def explain_flaw(content: bytes, error: Exception) -> str:
    """Explain why some bytes could not be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return f"is JSON of another shape: {error}"
    return "is HTML" if content.lstrip()[:1] == b"<" else "is not JSON"


@cache
def find_decoder(reply: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type; making one takes longer than using it."""
    return msgspec.json.Decoder(reply)


def read_object(content: bytes) -> dict[str, Any]:
    """Read a JSON object; return an empty one for anything else."""
    try:
        body = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def quote_id(name: str, id: str) -> str:
    """Quote an id as one segment of a path; raises ValueError for one that leads to another path."""
    if id in ("", ".", ".."):
        raise ValueError(f"{name} is {id!r}, which is not an id")
    return quote(id, safe="")


def root_of(url: str) -> str:
    """Return the gate's base URL; strips /v1, /mcp and /docs from a copied address."""
    url = url.rstrip("/")
    return next((url.removesuffix(ending) for ending in URL_ENDINGS if url.endswith(ending)), url)


def read_token() -> str:
    """Return the credential in ASYNCGATE_API_KEY, or in the file of ASYNCGATE_API_KEY_FILE; raises ValueError."""
    token, path = os.environ.get("ASYNCGATE_API_KEY", ""), os.environ.get("ASYNCGATE_API_KEY_FILE")
    if token and path:
        raise ValueError("ASYNCGATE_API_KEY and ASYNCGATE_API_KEY_FILE are both set; unset one of them")
    return read_token_file(path, "ASYNCGATE_API_KEY_FILE") if path else token


def read_token_file(path: str, origin: str) -> str:
    """Read a credential from a file; raises ValueError."""
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{origin}: {path!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise ValueError(f"{origin}: {path!r} is empty")
    return token


def require_private(token: str, url: str) -> None:
    """Check that nobody on the network can read the credential; raises ValueError."""
    if token and not is_private(urlsplit(url)):
        raise ValueError(f"{url} is plain HTTP, so anybody on the network could read the credential: use https://, or "
                         "set ASYNCGATE_PLAIN_HTTP=true if the network is your own")


def is_private(where: SplitResult) -> bool:
    """Whether the connection is encrypted or local, or the user allows plain HTTP."""
    return (where.scheme == "https" or is_loopback(where.hostname or "")
            or os.environ.get("ASYNCGATE_PLAIN_HTTP", "").lower() in ("1", "true", "yes"))


def explain_bad_address(url: str, text: str) -> str:
    """Explain what is wrong with an address, if the transport's error is about that; else return an empty text."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or "it is not trusted"
        return f"the certificate of {url} is refused: {why}; to trust another authority, name its file in SSL_CERT_FILE"
    if url.startswith("https:") and ("WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower()):
        return f"{url} does not speak TLS; is its address {url.replace('https', 'http', 1)}?"
    return ""


def split_url(url: str) -> SplitResult:
    """Split the URL of a gate into its parts; raise ValueError if it is invalid."""
    with contextlib.suppress(ValueError):       # reading `port` raises if it is invalid
        where = urlsplit(url)
        valid = where.scheme in ("http", "https") and where.hostname and where.port != 0
        if valid and fits_header(url) and " " not in url:
            return where
    raise ValueError(f"a gate's URL is like {DEFAULT_URL}, not {url!r}")


def fits_header(text: str) -> bool:
    """Whether a text is valid in an HTTP header."""
    return text.isascii() and text.isprintable() and text == text.strip()


def name_process() -> str:
    """Name this process for people who look for it: its host and pid."""
    return f"{socket.gethostname()[:200]}:{os.getpid()}"


def pause_after(failures: int, least: float = 0.0) -> float:
    """Return a random pause whose upper bound doubles with each failure, so that clients do not retry all at once.

    `least` is the lower bound, as a share of the upper one.
    """
    return random.uniform(least, 1.0) * longest_after(failures)


def longest_after(failures: int) -> float:
    """Return the longest pause after so many failures: up to half a second at first, later up to five seconds."""
    if failures <= SHORT_PAUSES:
        return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), SHORT_PAUSE)
    return min(SHORT_PAUSE * 2.0 ** min(failures - SHORT_PAUSES, 16), LONGEST_PAUSE)


def read_retry_after(header: Any) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or a date); None if it is invalid."""
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(ValueError):
        seconds = float(str(header))
        return seconds if 0 <= seconds < inf else None
    with contextlib.suppress(ValueError, OverflowError):
        moment = parsedate_to_datetime(str(header))
        return max((moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    return None


def format_query_value(value: Any) -> str:
    """Format a value for a URL query: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else encode_finite(value).decode()


class Http(Exchange):
    """A blocking client of a gate."""

    def __enter__(self) -> Http:
        import httpx2

        self.client, self.tracing = httpx2.Client(**self.settings), find_tracing()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()

    def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation; raises Refusal if the gate refuses it, Unreachable if no gate answers."""
        return msgspec.json.decode(self.send(operation, fields).content)

    def pages(self, operation: str, /, **fields: Any) -> Iterator[Any]:
        """Call the operation of a list for one page after another, to the last one."""
        cursor: str | None = ""
        while cursor is not None:
            page = self.call(operation, **fields, **({"cursor": cursor} if cursor else {}))
            cursor = page.get("next_cursor")
            yield page

    def send(self, operation: str, fields: Mapping[str, Any]) -> CheckedReply:
        """Call an operation and return its reply, checked."""
        import httpx2

        asked = time.monotonic()
        try:
            return self.reply(operation, self.client.request(**self.request(operation, fields)))
        except httpx2.RequestError as error:
            raise self.unreachable(error, asked) from None

    @contextlib.contextmanager
    def open_stream(self, path: str, query: Mapping[str, Any], last_id: str = "") -> Iterator[Iterator[StreamEvent]]:
        """Open a stream of events and yield them; with the id of the last event seen it goes on behind that one."""
        import httpx2

        asked = time.monotonic()
        headers = {"last-event-id": last_id} if last_id else {}
        params = {name: format_query_value(value) for name, value in query.items()}
        try:
            with self.client.stream("GET", self.url + path, params=params, headers=headers,
                                    timeout=self.patience_seconds) as response:
                if response.headers.get("content-type", "") != "text/event-stream":
                    response.read()
                    if response.is_success:
                        raise NotAGate(self.url, "it does not answer with a stream of events")
                    raise self.refusal(response)
                yield read_events(response.iter_bytes())
        except httpx2.RequestError as error:
            raise self.unreachable(error, asked) from None


class AsyncHttp(Exchange):
    """An asyncio client of a gate."""

    def __init__(self, url: str | None = None, token: str | None = None, *,
                 transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(url, token)
        self.settings["transport"] = transport      # tests may use another transport than sockets

    async def __aenter__(self) -> AsyncHttp:
        import httpx2

        self.client, self.tracing = httpx2.AsyncClient(**self.settings), find_tracing()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.client.aclose()

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation; raises Refusal if the gate refuses it, Unreachable if no gate answers."""
        return msgspec.json.decode((await self.send(operation, fields)).content)

    async def send(self, operation: str, fields: Mapping[str, Any]) -> CheckedReply:
        """Call an operation and return its reply, checked."""
        import httpx2

        asked = time.monotonic()
        try:
            return self.reply(operation, await self.client.request(**self.request(operation, fields)))
        except httpx2.RequestError as error:
            raise self.unreachable(error, asked) from None
