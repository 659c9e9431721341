"""Calling a gate over HTTP: one small caller for every program here, for threads and for asyncio.

    with Http() as gate:                                    # ASYNCGATE_URL, ASYNCGATE_API_KEY
        made = gate.call("create_task", type="echo", payload={"hello": "world"})

An operation is called by its name with the fields of its request, and answers with its reply as plain JSON values.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from asyncgate.clients.operations import CALLS
from asyncgate.parts.model.connection import is_loopback

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8080"
# Between two tries, of every program here: who is only being restarted is asked often, for ten seconds at least.
FIRST_PAUSE, SHORT_PAUSE, LONGEST_PAUSE, SHORT_PAUSES = 0.05, 0.5, 5.0, 60
NO_HOST = ("Name or service not known", "nodename nor servname", "No address associated")
ENDINGS = ("/v1", "/mcp", "/mcp/u", "/docs")
PATIENCE_SECONDS = 30.0     # for an answer, beyond what the request itself asks the gate to wait


class Refusal(Exception):
    """The gate said no; `code` is stable, `status` is HTTP's, `more` is whatever else the answer says."""

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float | None = None) -> None:
        super().__init__(str(body.get("message") or body.get("detail") or f"the answer has the status {status}"))
        self.status, self.code, self.retry_after = status, str(body.get("error") or "unexpected_answer"), retry_after
        self.more = {name: said for name, said in body.items() if name not in ("error", "message", "detail")}

    @property
    def message(self) -> str:
        """Return the sentence for people."""
        return str(self)


class Unreachable(Exception):
    """No gate answered: the text is one line that says which, and what to do; `sent` when it may have heard us."""

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class WrongAddress(Unreachable):
    """Somebody is there, or nobody can be, and trying again changes nothing."""


class Exchange:
    """What both callers share: which request an operation is, and what its answer means."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self.url = root_of(url or os.environ.get("ASYNCGATE_URL") or DEFAULT_URL)
        self.token = token_of_environment() if token is None else token
        where = place_of(self.url)
        if not fit(self.token):        # the libraries below would name it, and it is a secret
            raise ValueError("the gate's credential holds a character that no header can (a line break at its end?)")
        keep_private(self.token, self.url)
        self.settings: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {self.token}"} if self.token else {},
            "verify": where.scheme == "https",          # loading certificates takes longer than a call
            "trust_env": not is_loopback(where.hostname or ""),    # no proxy leads to this machine
        }

    def request(self, operation: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request that calls an operation: path from the ids, the rest as query or as JSON body."""
        verb, path = CALLS[operation].verb, CALLS[operation].path
        said = {name: value for name, value in fields.items() if value is not None or name == "payload"}
        for name in [name for name in said if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote(str(said.pop(name)), safe=""))
        if "{" in path:
            raise ValueError(f"{operation} needs {path.partition('{')[2].partition('}')[0]}")
        wait = float(said.get("wait_seconds", 30.0 if operation == "run_task" else 0.0))
        request = {"method": verb, "url": self.url + path, "timeout": self.patience_seconds + wait}
        if verb == "GET":
            return {**request, "params": {name: in_query(value) for name, value in said.items()}}
        return {**request, "content": msgspec.json.encode(said), "headers": {"content-type": "application/json"}}

    def reply(self, response: httpx2.Response) -> bytes:
        """Return the JSON of an answer, or raise the refusal that it is."""
        try:
            body = msgspec.json.decode(response.content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            body = {"message": f"{self.url} does not answer like a gate "
                               f"(status {response.status_code}, no JSON object)"}
        elif response.is_success:
            return response.content
        asked = body.get("retry_after", response.headers.get("retry-after"))
        raise Refusal(response.status_code, body, pause_asked(asked))

    def unreachable(self, error: httpx2.TransportError) -> Unreachable:
        """Say in one line why there was no answer."""
        import httpx2

        if why := misunderstood(self.url, str(error)):
            return WrongAddress(why, sent=False)
        if any(sign in str(error) for sign in NO_HOST):
            return Unreachable(f"there is no host named {urlsplit(self.url).hostname}", sent=False)
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return Unreachable(f"no gate answers at {self.url}; start one with `asyncgate dev`", sent=False)
        if isinstance(error, httpx2.TimeoutException):
            return Unreachable(f"the gate at {self.url} took the request but did not answer in time")
        tls = f" (if it speaks TLS, its address is {self.url.replace('http', 'https', 1)})"
        return Unreachable(f"the connection to {self.url} broke before the answer came: "
                           f"{str(error) or type(error).__name__}"
                           f"{tls * (self.url.startswith('http:') and 'without sending' in str(error))}")


def root_of(url: str) -> str:
    """Return the address of the gate itself, also where that of its REST interface, of MCP or of a page was copied."""
    url = url.rstrip("/")
    return next((url.removesuffix(ending) for ending in ENDINGS if url.endswith(ending)), url)


def token_of_environment() -> str:
    """Return the credential that the environment has, or names the file of; raises ValueError."""
    token, path = os.environ.get("ASYNCGATE_API_KEY", ""), os.environ.get("ASYNCGATE_API_KEY_FILE")
    if token and path:
        raise ValueError("ASYNCGATE_API_KEY and ASYNCGATE_API_KEY_FILE are both set; one of them is enough")
    return token_in(path, "ASYNCGATE_API_KEY_FILE") if path else token


def token_in(path: str, origin: str) -> str:
    """Read a credential from a file; raises ValueError."""
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{origin}: {path!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise ValueError(f"{origin}: {path!r} is empty")
    return token


def keep_private(token: str, url: str) -> None:
    """See that a credential can be read by nobody on its way; raises ValueError."""
    if token and not is_private(urlsplit(url)):
        raise ValueError(f"{url} is plain HTTP, and everybody on the way could read the credential: use https://, or "
                         "set ASYNCGATE_PLAIN_HTTP=true if the network is your own")


def is_private(where: SplitResult) -> bool:
    """Whether nobody on the way can read what is sent there, or the user has said that it does not matter."""
    return (where.scheme == "https" or is_loopback(where.hostname or "")
            or os.environ.get("ASYNCGATE_PLAIN_HTTP", "").lower() in ("1", "true", "yes"))


def misunderstood(url: str, said: str) -> str:
    """Say what is wrong with an address, if that is what an error of the transport says."""
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or "it is not trusted"
        return f"the certificate of {url} is refused: {why}; SSL_CERT_FILE names a file of other authorities"
    if url.startswith("https:") and ("WRONG_VERSION_NUMBER" in said or "record layer failure" in said.lower()):
        return f"{url} does not speak TLS; is its address {url.replace('https', 'http', 1)}?"
    return ""


def place_of(url: str) -> SplitResult:
    """Take the URL of a gate apart; raise ValueError where it is none."""
    with contextlib.suppress(ValueError):       # a port that is none is noticed when it is looked at
        where = urlsplit(url)
        if where.scheme in ("http", "https") and where.hostname and where.port != 0 and fit(url) and " " not in url:
            return where
    raise ValueError(f"a gate's URL is like {DEFAULT_URL}, not {url!r}")


def fit(text: str) -> bool:
    """Whether a text goes into a header as it is."""
    return text.isascii() and text.isprintable() and text == text.strip()


def pause_after(failures: int, least: float = 0.0) -> float:
    """Draw a pause from what doubles with each failure, so that those who fail together do not return together.

    `least` is the share of it that is not left to chance.
    """
    return random.uniform(least, 1.0) * longest_after(failures)


def longest_after(failures: int) -> float:
    """Return the longest pause after so many failures: below half a second for a while, then up to five."""
    if failures <= SHORT_PAUSES:
        return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), SHORT_PAUSE)
    return min(SHORT_PAUSE * 2.0 ** min(failures - SHORT_PAUSES, 16), LONGEST_PAUSE)


def pause_asked(said: Any) -> float | None:
    """Return the seconds that a Retry-After asks for, which is a number of them or a date; None if it is neither."""
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(ValueError):
        seconds = float(str(said))
        return seconds if 0 <= seconds < inf else None
    with contextlib.suppress(ValueError, OverflowError):
        moment = parsedate_to_datetime(str(said))
        return max((moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    return None


def in_query(value: Any) -> str:
    """Write a value as a query takes it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class Http(Exchange):
    """Calls a gate and waits for the answer."""

    def __enter__(self) -> Http:
        import httpx2

        self.client = httpx2.Client(**self.settings)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()

    def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation; raise Refusal when the gate says no, Unreachable when there is none."""
        return msgspec.json.decode(self.send(operation, fields))

    def send(self, operation: str, fields: Mapping[str, Any]) -> bytes:
        """Call an operation and return its reply as it came."""
        import httpx2

        try:
            return self.reply(self.client.request(**self.request(operation, fields)))
        except httpx2.TransportError as error:
            raise self.unreachable(error) from None


class AsyncHttp(Exchange):
    """Calls a gate from asyncio."""

    def __init__(self, url: str | None = None, token: str | None = None, *,
                 transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(url, token)
        self.settings["transport"] = transport      # another way than sockets, such as into this process

    async def __aenter__(self) -> AsyncHttp:
        import httpx2

        self.client = httpx2.AsyncClient(**self.settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.client.aclose()

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation; raise Refusal when the gate says no, Unreachable when there is none."""
        return msgspec.json.decode(await self.send(operation, fields))

    async def send(self, operation: str, fields: Mapping[str, Any]) -> bytes:
        """Call an operation and return its reply as it came."""
        import httpx2

        try:
            return self.reply(await self.client.request(**self.request(operation, fields)))
        except httpx2.TransportError as error:
            raise self.unreachable(error) from None
