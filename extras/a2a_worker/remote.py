"""The agent behind a card: its calls, over JSON-RPC of A2A 1.0 or 0.3, or over HTTP+JSON of 1.0."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit

import msgspec
from msgspec import Struct

from asyncgate.clients import http
from asyncgate.extras.a2a import v03
from asyncgate.extras.a2a.refusals import KINDS
from asyncgate.extras.a2a.requests import Members

if TYPE_CHECKING:
    import httpx2

CARD = ".well-known/agent-card.json"
# The bindings and versions that are spoken here, the best first.
WAYS = (("JSONRPC", "1"), ("HTTP+JSON", "1"), ("JSONRPC", "0"))
PATHS = {"SendMessage": ("POST", "message:send"), "GetTask": ("GET", "tasks/{id}"), "ListTasks": ("GET", "tasks"),
         "CancelTask": ("POST", "tasks/{id}:cancel"), "SubscribeToTask": ("POST", "tasks/{id}:subscribe")}
STREAM_SECONDS = 600.0      # that a stream lasts at most
OLD_NAMES = {new: old for old, new in v03.OLD_NAMES.items()}
REASONS = {str(kind.code): reason for reason, kind in KINDS.items()}
# After these the same call may succeed.
LATER = frozenset({"INTERNAL", "INTERNAL_ERROR", "UNAVAILABLE", "RESOURCE_EXHAUSTED"})
LATER_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
is_key_header = re.compile(r"[Xx]-[A-Za-z0-9-]{1,100}|[Aa]uthorization").fullmatch


class NotAnAgent(ValueError):
    """What is at an address is not the card of an agent that this worker can call."""


class Refused(Exception):
    """The agent refuses a call; `reason` is the name that A2A has for it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"the agent refuses it: {text[:2000]} ({reason})")
        self.reason = reason


class Away(Exception):
    """The agent has not answered, or cannot yet.  `sent`: it may have done what it was asked."""

    def __init__(self, text: str, *, sent: bool, after: float | None = None) -> None:
        super().__init__(text)
        self.sent, self.after = sent, after


class Interface(Struct, frozen=True):
    """How an agent is called."""

    url: str
    binding: str
    major: str
    tenant: str = ""        # a routing key, which the agent wants back


class Remote:
    """An agent, as its card describes it."""

    def __init__(self, client: httpx2.AsyncClient, card: Members, way: Interface, secret: Mapping[str, str]) -> None:
        self.client, self.way, self.is_old = client, way, way.major == "0"
        self.name, self.words = str(card.get("name", "")), str(card.get("description", ""))
        self.headers = {**secret, **({} if self.is_old else {"a2a-version": "1.0"})}
        can = card.get("capabilities")
        self.streams = isinstance(can, dict) and can.get("streaming") is True

    async def call(self, method: str, params: Members, headers: Mapping[str, str]) -> Members:
        """Call a method; raises Refused, or Away if the agent gives no answer."""
        verb, url, query, body = self._aim(method, params)
        return self._read(await fetch(self.client, verb, url, {**self.headers, **headers}, query, body))

    async def follow(self, task_id: str, headers: Mapping[str, str]) -> AsyncGenerator[Members]:
        """Yield the statuses of a task as they come; raises Refused, or Away when the stream breaks."""
        verb, url, query, body = self._aim("SubscribeToTask", {"id": task_id})
        headers, until = {**self.headers, **headers}, asyncio.get_running_loop().time() + STREAM_SECONDS
        async with calling(self.client, verb, url, headers, query, body, extensions={"deadline": until}) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.aread()
                read_answer(answer)
                raise Refused("UNSUPPORTED_OPERATION", "it does not answer with a stream")
            async for event in read_stream(answer):
                if isinstance(event.get("error"), dict):
                    raise Refused(*read_refusal(event, answer.status_code))
                told = self._read(event)
                task = told.get("task", told.get("statusUpdate"))
                if isinstance(task, dict) and isinstance(status := task.get("status"), dict):
                    yield status

    def _aim(self, method: str, params: Members) -> tuple[str, str, Members | None, Members | None]:
        """Return the verb, the address, the query and the body of a call."""
        params = {**params, "tenant": self.way.tenant} if self.way.tenant else params
        if self.way.binding == "JSONRPC":
            name, asked = (OLD_NAMES[method], ask_old(params)) if self.is_old else (method, params)
            verb, url, query = "POST", self.way.url, None
            body: Members | None = {"jsonrpc": "2.0", "id": 1, "method": name, "params": asked}
        else:
            verb, path = PATHS[method]
            rest = {name: value for name, value in params.items() if name not in ("id", "tenant")}
            path = path.replace("{id}", quote(str(params.get("id", "")), safe=""))
            url = "/".join([self.way.url.rstrip("/"), *filter(None, [quote(self.way.tenant, safe="")]), path])
            query, body = (rest, None) if verb == "GET" else (None, rest)
        return verb, url, query, body

    def _read(self, answer: Members) -> Members:
        if self.way.binding == "JSONRPC" and "result" in answer:
            result = answer["result"]
            return read_old(result) if self.is_old else dict(result) if isinstance(result, dict) else {}
        return answer


@contextlib.asynccontextmanager
async def calling(client: httpx2.AsyncClient, verb: str, url: str, headers: Mapping[str, str],
                  query: Members | None, body: Members | None, **more: Any) -> AsyncIterator[httpx2.Response]:
    """Call an address, and read the answer in the block; raises Refused or Away, also in the middle."""
    import httpx2

    from asyncgate.parts.process import outgoing

    content = None if body is None else msgspec.json.encode(body)
    headers = {**headers, "accept": "application/json, text/event-stream",
               **({"content-type": "application/json"} if content else {})}
    try:
        async with client.stream(verb, url, params=query, content=content, headers=headers, **more) as answer:
            yield answer
    except (outgoing.Barred, outgoing.Oversized, httpx2.InvalidURL, httpx2.UnsupportedProtocol,
            httpx2.LocalProtocolError) as barred:
        raise Refused("BARRED" if isinstance(barred, outgoing.Barred) else "INVALID_AGENT_RESPONSE",
                      str(barred)) from None
    except httpx2.TransportError as error:
        sent = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        raise Away(f"the agent at {url} does not answer: {str(error) or type(error).__name__}", sent=sent) from None


async def fetch(client: httpx2.AsyncClient, verb: str, url: str, headers: Mapping[str, str],
                query: Members | None = None, body: Members | None = None) -> Members:
    """Return the object that an address answers with; raises Refused or Away."""
    async with calling(client, verb, url, headers, query, body) as answer:
        await answer.aread()
    return read_answer(answer)


def read_answer(answer: httpx2.Response) -> Members:
    """Return the object of an answer that was read; raises Refused or Away if it is not a good one."""
    url, status, reply = answer.request.url, answer.status_code, http.read_object(answer.content)
    if answer.is_success and reply and reply.get("error") is None:
        return reply
    if answer.is_redirect:
        raise Refused("REDIRECTED", f"{url} leads to {answer.headers.get('location', '')[:500]}, and no redirect is "
                      "followed: name that address")
    reason, text = read_refusal(reply, status)
    if status in LATER_STATUSES or reason in LATER:
        raise Away(f"the agent at {url} cannot do it now: {text} ({reason})", sent=True,
                   after=http.read_retry_after(answer.headers.get("retry-after")))
    raise Refused(reason, text)


async def read_stream(answer: httpx2.Response) -> AsyncIterator[Members]:
    """Yield the objects of server-sent events; only a line feed ends a line, as others may stand within JSON."""
    rest, data = b"", list[bytes]()
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:"))
            elif data and not line.strip():
                yield http.read_object(b"\n".join(data))
                data = []


def read_refusal(reply: Members, status: int) -> tuple[str, str]:
    """Return the reason and the text of an error of either binding."""
    error = reply.get("error")
    if not isinstance(error, dict):
        return {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}.get(status, "INVALID_AGENT_RESPONSE"), (
            f"the answer has the status {status} and is not one of A2A")
    details = error.get("details", error.get("data"))
    named = [detail["reason"] for detail in details if isinstance(detail, dict) and detail.get("reason")
             ] if isinstance(details, list) else []
    reason = str(named[0]) if named else REASONS.get(str(error.get("code"))) or str(
        error.get("status") or error.get("code"))
    return reason, str(error.get("message") or reason)


# The card.


async def open_agent(client: httpx2.AsyncClient, address: str, key: str, allow: Collection[str]) -> Remote:
    """Read the card at an address, or below the address of an agent; raises NotAnAgent, Refused or Away."""
    url = address if address.endswith(".json") else f"{address.rstrip('/')}/{CARD}"
    try:
        card = await fetch(client, "GET", url, {})
    except Refused as refused:
        if refused.reason not in ("UNAUTHENTICATED", "PERMISSION_DENIED") or not key:
            raise
        http.require_private(key, url)
        card = await fetch(client, "GET", url, {"authorization": f"Bearer {key}"})
    ways = list_ways(card, url)
    way = next((way for want in WAYS for way in ways if (way.binding, way.major) == want), None)
    if way is None:
        raise NotAnAgent(f"the card at {url} names no interface that is spoken here: JSON-RPC of A2A 1.0 or 0.3, or "
                         "HTTP+JSON of 1.0")
    if key:
        http.require_private(key, way.url)
        host = urlsplit(way.url).hostname or ""
        if host != urlsplit(url).hostname and host not in allow:
            raise NotAnAgent(f"the card at {url} leads to the host {host}, which would get the credential: --allow "
                             f"{host} permits that")
    return Remote(client, card, way, make_secret(card, key) if key else {})


def list_ways(card: Members, url: str) -> list[Interface]:
    """Return how an agent can be called: as a card of 1.0 has it, else as one of 0.3."""
    if isinstance(ways := card.get("supportedInterfaces"), list):
        rows = [(way.get("url"), way.get("protocolBinding"), way.get("protocolVersion"), way.get("tenant"))
                for way in ways if isinstance(way, dict)]
    else:
        more, version = card.get("additionalInterfaces"), card.get("protocolVersion")
        rows = [(card.get("url"), card.get("preferredTransport", "JSONRPC"), version, None)]
        rows += [(way.get("url"), way.get("transport"), version, None)
                 for way in (more if isinstance(more, list) else []) if isinstance(way, dict)]
    return [Interface(urljoin(url, at), str(binding), str(version or "0").partition(".")[0], str(tenant or ""))
            for at, binding, version, tenant in rows if isinstance(at, str)]


def make_secret(card: Members, key: str) -> dict[str, str]:
    """Return the header of a credential: that of an API key if the card names this alone, else a bearer token."""
    schemes = card.get("securitySchemes")
    match list(schemes.values()) if isinstance(schemes, dict) else []:
        case [{"apiKeySecurityScheme": {"location": "header", "name": str(name)}} | {
                "type": "apiKey", "in": "header", "name": str(name)}] if is_key_header(name):
            return {name.lower(): key}
    return {"authorization": f"Bearer {key}"}


# A2A 0.3.


def ask_old(params: Members) -> Members:
    """Return the parameters of a call as 0.3 has them."""
    if "message" not in params:
        return params
    return {**params, "message": v03.show_nested(params["message"]), "configuration": {"blocking": False}}


def read_old(result: Any) -> Members:
    """Return an answer or an event of 0.3 as one of 1.0: a message, or what a task is, or its status."""
    if not isinstance(result, dict):
        return {}
    return {"message" if result.get("kind") == "message" else "task": v03.read_nested(result)}
