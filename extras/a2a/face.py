"""The face: JSON-RPC and HTTP+JSON of A2A, both over the same methods."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import sha256
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.extras.a2a import calls, cards, push, requests, streams, v03
from asyncgate.extras.a2a.calls import Visit
from asyncgate.extras.a2a.refusals import TOLD_BY_STATUS, A2AError, translate
from asyncgate.parts.faces import http
from asyncgate.parts.faces.front import JSON_TYPE
from asyncgate.parts.faces.stream import STREAM_HEADERS
from asyncgate.parts.model import connection, errors, screening
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.trace import find_trace

if TYPE_CHECKING:
    from asyncgate import Caller
    from asyncgate.parts.faces.serving import Serving

VERSION, NEW, OLD = b"a2a-version", "1.0", "0.3"
AROUND = 3          # levels of a JSON-RPC request around a message
A2A_TYPE, EVENT_TYPE = (b"content-type", b"application/a2a+json"), (b"content-type", b"text/event-stream")
CARD = ".well-known/agent-card.json"
OLD_CARD = f"{OLD}/{CARD}"
CARD_SECONDS = 300      # how long a client may keep a card
NAME, CONFIGS = r"(?P<id>[^/]+)", r"tasks/(?P<taskId>[^/]+)/pushNotificationConfigs"


class Method(Struct, frozen=True):
    """A method of both bindings, what it is asked, the operation that counts as its call, and its path."""

    run: Callable[[Visit, Any], Awaitable[Any]]
    params: type[Struct]
    operation: str
    path: str       # below the agent and a tenant, behind its verb


# Those whose path has a verb stand before those that a verb would fit.
METHODS = {
    "SendMessage": Method(calls.send_message, requests.Sending, "create_task", "POST message:send"),
    "SendStreamingMessage": Method(streams.stream_message, requests.Sending, "create_task", "POST message:stream"),
    "CancelTask": Method(calls.cancel_task, requests.OfTask, "cancel_task", f"POST tasks/{NAME}:cancel"),
    "SubscribeToTask": Method(streams.subscribe, requests.OfTask, "get_task", f"(?:GET|POST) tasks/{NAME}:subscribe"),
    "ListTasks": Method(calls.list_tasks, requests.Listing, "list_tasks", "GET tasks"),
    "GetTask": Method(calls.get_task, requests.OfTask, "get_task", f"GET tasks/{NAME}"),
    "CreateTaskPushNotificationConfig": Method(push.create_config, requests.Config, "create_task_webhook",
                                               f"POST {CONFIGS}"),
    "ListTaskPushNotificationConfigs": Method(push.list_configs, requests.OfConfigs, "list_task_webhooks",
                                              f"GET {CONFIGS}"),
    "GetTaskPushNotificationConfig": Method(push.get_config, requests.OfConfig, "list_task_webhooks",
                                            f"GET {CONFIGS}/{NAME}"),
    "DeleteTaskPushNotificationConfig": Method(push.delete_config, requests.OfConfig, "remove_task_webhook",
                                               f"DELETE {CONFIGS}/{NAME}"),
    "GetExtendedAgentCard": Method(calls.get_card, requests.Anything, "get_task", "GET extendedAgentCard")}
PATHS = [(re.compile(method.path), method) for method in METHODS.values()]


class Face:
    """Everything below /a2a/{agent}."""

    def __init__(self, gate: Serving) -> None:
        self.gate = gate
        self.tags: dict[tuple[str, bool], tuple[bytes, bytes]] = {}     # of each card, and since when it is that

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer one request."""
        places = scope["path_params"]
        agent, rest = http.read_name(places.get("agent", self.gate.settings.a2a.root)), places.get("rest", CARD)
        if rest in (CARD, OLD_CARD):
            return await self._send_card(scope, send, agent, is_old=rest == OLD_CARD)
        call = AgentCall(self, scope, receive, agent, rest)
        if (tracing := self.gate.tracing) is None:
            await call.answer(send)
            return
        route = "/a2a/{agent}/rpc" if call.is_rpc else "/a2a/{agent}/v1"
        with tracing.serve_http(scope["method"], route, find_trace(scope["headers"])) as span:
            cause = await call.answer(send)
            tracing.note_served(span, call.name, None, None)
            tracing.note_status(span, cause, 200)

    async def _send_card(self, scope: connection.Scope, send: connection.Send, agent: str, is_old: bool) -> None:
        try:
            self.require_agent(agent)
            if scope["method"] not in ("GET", "HEAD"):
                raise errors.MethodNotAllowed(f"{scope['path']} does not support {scope['method']}",
                                              allow=["GET", "HEAD"])
            if not self.gate.settings.a2a.public_card:
                await self.gate.guard.resolve(scope, self.gate.operations["get_task"])
            own = self.gate.engine.make_own_caller(self.gate.settings.default_tenant_id)
            card = await self.make_card(scope, agent, own)
            body = encode_json(v03.show_card(card) if is_old else card)
        except (A2AError, errors.GateError) as refusal:
            return await self.refuse(scope, send, translate(refusal))
        tag = b'"%s"' % sha256(body).hexdigest()[:32].encode()
        kept = b"public" if self.gate.settings.a2a.public_card else b"private"
        if self.tags.get((agent, is_old), (b"", b""))[0] != tag:
            self.tags[agent, is_old] = tag, format_datetime(datetime.now(UTC), usegmt=True).encode()
        more = [(b"etag", tag), (b"cache-control", b"%b, max-age=%d" % (kept, CARD_SECONDS)),
                (b"last-modified", self.tags[agent, is_old][1])]
        known = any(name == b"if-none-match" and tag in value for name, value in scope["headers"])
        await self.gate.send(send, scope, 304 if known else 200, b"" if known else body, more, JSON_TYPE)

    def require_agent(self, agent: str) -> None:
        """Refuse an agent that is not offered."""
        if agent not in self.gate.settings.a2a.agents:
            raise A2AError("METHOD_NOT_FOUND", f"this gate offers no agent {agent}; the setting a2a.agents names those "
                           "that it offers")

    async def make_card(self, scope: connection.Scope, agent: str, caller: Caller) -> dict[str, Any]:
        """Return the card of an agent, with absolute addresses, and what the caller's tenant declares of its type."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost").decode("latin-1")
        base = self.gate.settings.public_url.rstrip("/") or f"{scope['scheme']}://{host}{scope.get('root_path', '')}"
        about = await cards.describe_agent(self.gate, caller, agent)
        return cards.make_card(agent, f"{base}/a2a/{quote(agent, safe='')}", about, self.gate.settings.a2a.modes,
                               push.can_push(self.gate))

    async def refuse(self, scope: connection.Scope, send: connection.Send, refusal: A2AError,
                     id: str | int | None = None, is_rpc: bool = False, is_event: bool = False) -> None:
        """Answer with a refusal, or with a stream whose only event it is, where the status does not tell it."""
        more = list(self.gate.describe_refusal(scope, refusal.cause)) if refusal.cause is not None else []
        status = refusal.kind.status if not is_rpc or refusal.kind.status in TOLD_BY_STATUS else 200
        body = encode_json({"jsonrpc": "2.0", "id": id, "error": refusal.to_rpc()} if is_rpc else refusal.to_http())
        body, type = (b"data: %b\n\n" % body, EVENT_TYPE) if is_event and status == 200 else (body, JSON_TYPE)
        await self.gate.send(send, scope, status, body, more, type)


class AgentCall:
    """One call over one of the bindings."""

    def __init__(self, face: Face, scope: connection.Scope, receive: connection.Receive, agent: str, rest: str) -> None:
        self.face, self.gate, self.scope, self.receive, self.agent = face, face.gate, scope, receive, agent
        binding, _, self.path = rest.partition("/")     # the slash behind /rpc is what some clients append
        self.is_rpc, self.is_http, self.name = binding == "rpc" and not self.path, binding == "v1", "other"
        self.id: str | int | None = None        # of the request, in JSON-RPC
        self.is_old = self.is_notice = self.is_old_stream = False

    async def answer(self, send: connection.Send) -> errors.GateError | None:
        """Answer the request; return the refusal of the gate."""
        begun, first, refusal = perf_counter(), None, None
        try:
            reply = await self._perform()
            if isinstance(reply, AsyncIterator):        # what refuses a stream is one answer
                first = await anext(reply)
        except (A2AError, errors.GateError) as refused:
            refusal = translate(refused)
        except asyncio.CancelledError:
            return None     # the client has disconnected, which ends nothing
        except Exception as bug:
            refusal = translate(errors.log_fault(self.scope["path"], bug))
        cause = refusal.cause if refusal is not None else None
        if cause is not None:
            self.gate.guard.refused(self.scope, cause, None)
        if self.gate.meter is not None:
            self.gate.meter.note_call("a2a", self.name, begun, None, cause)
        if self.is_notice and (refusal is None or refusal.kind.status not in TOLD_BY_STATUS):   # JSON-RPC answers none
            await self.gate.send(send, self.scope, 204, b"", ())
        elif refusal is not None:
            await self.face.refuse(self.scope, send, refusal, self.id, self.is_rpc, self.is_old_stream)
        elif isinstance(reply, AsyncIterator):
            with contextlib.suppress(asyncio.CancelledError):       # the client has disconnected
                await http.run_while_connected(self._send_events(first, reply, send), self.receive)
        else:
            await self.gate.send(send, self.scope, 200, self._frame(reply), (), JSON_TYPE if self.is_rpc else A2A_TYPE)
        return cause

    def _frame(self, reply: Any) -> bytes:
        shown = v03.show_result(reply) if self.is_old else reply
        return encode_json({"jsonrpc": "2.0", "id": self.id, "result": shown} if self.is_rpc else shown)

    async def _send_events(self, first: Any, events: AsyncIterator[Any], send: connection.Send) -> None:
        """Send events until there are no more; a comment keeps a quiet stream open."""
        async def put(line: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": line, "more_body": more})     # JSON has no line ends
        headers = [*STREAM_HEADERS, *self.gate.safety(self.scope, {name for name, _ in STREAM_HEADERS})]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await put(b"data: %b\n\n" % self._frame(first))
        try:
            async for event in events:
                await put(b":\n\n" if event is None else b"data: %b\n\n" % self._frame(event))
        except (A2AError, errors.GateError) as refused:
            refusal = translate(refused)
            error = {"jsonrpc": "2.0", "id": self.id, "error": refusal.to_rpc()} if self.is_rpc else refusal.to_http()
            await put(b"data: %b\n\n" % encode_json(error))
        await put(b"", more=False)

    async def _perform(self) -> Any:
        """Let in, read and carry out a call: who asks is judged first, then the size, and the content last."""
        self.face.require_agent(self.agent)
        caller = await self.gate.guard.resolve(self.scope)
        query = http.read_query(self.scope["query_string"])
        method, asked = await (self._read_rpc(query) if self.is_rpc else self._read_http(query))
        self._check_version(query, (OLD,) if self.is_old else (NEW,))
        if (op := self.gate.operations.get(method.operation)) is None:
            raise A2AError("PUSH_NOTIFICATION_NOT_SUPPORTED", push.NO_PUSH)
        self.name = op.name
        await self.gate.guard.meter(self.scope, caller, op)
        self.gate.engine.permit(op, caller)
        for tenant in (*http.read_claimed_tenants(query, self.scope["headers"]), asked.get("tenant")):
            if tenant:
                self.gate.engine.check_tenant(caller, str(tenant))
        if op.takes.creates:
            trace = find_trace(self.scope["headers"]) or (self.gate.tracing and self.gate.tracing.current())
            caller = replace(caller, trace=trace) if trace else caller
        visit = Visit(self.gate, self.agent, caller, self._read_key(),
                      lambda caller: self.face.make_card(self.scope, self.agent, caller), self.is_old)
        params = requests.read(method.params, asked)
        return await http.run_while_connected(method.run(visit, params), self.receive)

    def _read_key(self) -> str | None:
        keys = {value.strip().decode("latin-1") for name, value in self.scope["headers"] if name == b"idempotency-key"}
        if len(keys) > 1 or any(not 0 < len(key) <= 1000 for key in keys):
            raise A2AError("INVALID_REQUEST", "Idempotency-Key must be one text of 1 to 1000 characters")
        return next(iter(keys), None)

    def _check_version(self, query: dict[str, str], spoken: tuple[str, ...]) -> None:
        """Refuse another version of the protocol; without one the name of the method tells it."""
        named = dict(self.scope["headers"]).get(VERSION, b"").decode("latin-1") or query.get("A2A-Version", "")
        if named and ".".join(named.strip().split(".")[:2]) not in spoken:
            raise A2AError("VERSION_NOT_SUPPORTED", f"this call is of A2A {' and '.join(spoken)}, not of {named[:20]}",
                           supported=", ".join(spoken))

    async def _read_rpc(self, query: dict[str, str]) -> tuple[Method, dict[str, Any]]:
        if self.scope["method"] != "POST":
            raise errors.MethodNotAllowed("JSON-RPC is called with POST", allow=["POST"])
        request = await self._read_body()
        if not isinstance(request, dict) or request.get("jsonrpc") != "2.0" or not isinstance(
                name := request.get("method"), str):
            raise A2AError("INVALID_REQUEST", "the body must be one JSON-RPC 2.0 request")
        if isinstance(id := request.get("id"), bool) or not isinstance(id, str | int | None):
            raise A2AError("INVALID_REQUEST", "the id of a JSON-RPC request must be a text or an integer")
        self.id, self.is_old, self.is_notice = id, name in v03.OLD_NAMES, "id" not in request
        self.is_old_stream = name in ("message/stream", "tasks/resubscribe")    # whose SDK reads nothing but events
        self._check_version(query, (NEW, OLD))
        if (method := METHODS.get(v03.OLD_NAMES.get(name, name))) is None:
            raise A2AError("METHOD_NOT_FOUND", f"A2A has no method {name[:100]}")
        if (params := request.get("params")) is None:
            params = {}
        if not isinstance(params, dict):
            raise A2AError("INVALID_PARAMS", "params must be an object", "params")
        return method, v03.read_params(params, is_push="pushNotification" in name) if self.is_old else params

    async def _read_http(self, query: dict[str, str]) -> tuple[Method, dict[str, Any]]:
        self._check_version(query, (NEW,))
        method, places = self._find_method()
        body = await self._read_body(empty={}) if self.scope["method"] == "POST" else {}
        if not isinstance(body, dict):
            raise A2AError("INVALID_PARAMS", "the body must be an object", "body")
        return method, {**query, **body, **places}

    def _find_method(self) -> tuple[Method, dict[str, str]]:
        """Return the method of a path; a tenant may stand before it."""
        tenant, _, behind = self.path.partition("/")
        for pattern, method in PATHS if self.is_http else ():
            for path, more in ((self.path, {}), (behind, {"tenant": tenant})):
                if fit := pattern.fullmatch(f"{self.scope['method']} {path}"):
                    return method, {name: http.read_name(place) for name, place in {**more, **fit.groupdict()}.items()}
        raise A2AError("METHOD_NOT_FOUND", f"A2A has no {self.scope['method']} {self.scope['path'][:200]}")

    async def _read_body(self, empty: Any = None) -> Any:
        settings = self.gate.settings
        body = await http.read_body(self.scope, self.receive, settings)
        if not body and empty is not None:
            return empty
        try:
            await screening.screen_body(body, settings.max_request_values, around=AROUND)
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise A2AError("PARSE_ERROR", "the body is not JSON") from None
