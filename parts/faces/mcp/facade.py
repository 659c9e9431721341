"""MCP at /mcp: the operations as tools of the official SDK, both eras of the protocol from one stateless endpoint.

A request is read, authenticated and checked here, exactly as in REST, before the SDK sees it.  The arguments of a
tool call never pass through the SDK: they are cut out of the message and decoded by the operation's own reader, so
that every façade stores a payload byte for byte.  Requests of JSON-RPC peers, which are not MCP clients, are answered
in their dialect (`_bare`).

Imported on the first request for /mcp: the SDK costs 0.6 s and 40 MB.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import cache, partial
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mcp_types as types
import msgspec
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace

from asyncgate.parts.faces import http
from asyncgate.parts.faces.mcp import in_line, tasks, tools
from asyncgate.parts.faces.mcp.context import Library
from asyncgate.parts.faces.mcp.progress import ProgressStream
from asyncgate.parts.faces.mcp.summaries import limit_page, summarize
from asyncgate.parts.model import connection, errors, jsonrpc, members, wire
from asyncgate.parts.model.challenges import lacks_scopes
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.model.naming import names_nobody
from asyncgate.parts.model.screening import let_others_run, mark_body
from asyncgate.parts.model.trace import Trace, find_trace, read_trace

if TYPE_CHECKING:
    from asyncgate import Caller, Operation
    from asyncgate.parts.faces.serving import Serving

Members = dict[str, msgspec.Raw]

HOUR_MS, MINUTE_MS = 3_600_000, 60_000
TYPED_MEANS = "run_task"        # what a call of the tool of a declared type is
ENVELOPE_BYTES = 64 * 2**10         # of a message that the SDK reads and turns into models
STRANGERS_BYTES = 256 * 2**10       # limit for a request without a token in its headers
SAME_FOR_ALL: tuple[CacheableMethod, ...] = ("prompts/list", "resources/list", "resources/templates/list")
AROUND = 2      # levels of a message around the arguments of its call
PASSING = (408, 429)        # statuses of refusals after which a retry may succeed
NULL, EMPTY_OBJECT = msgspec.Raw(b"null"), msgspec.Raw(b"{}")
VISIT = "asyncgate.visit"       # key in the ASGI scope that passes a visit through the SDK
MESSAGE = "asyncgate.message"   # key in the ASGI scope of the message of a request, once it is read
NO_TOOLS = b"[]"
COMPLETE = {"resultType": "complete"}       # required by the newest revision, not sent to older ones
WITH_BATCHES, BEFORE_BATCHES = "2025-03-26", "2024-11-05"
HANDSHAKE = {"initialize", "ping", "server/discover"}

logging.getLogger("mcp").setLevel(logging.WARNING)      # at info it logs every request

_members = msgspec.json.Decoder(Members).decode
_text = msgspec.json.Decoder(str).decode
_id = msgspec.json.Decoder(str | int).decode


class Catalog:
    """Built once from the operations: the tools by both names, their input schemas, and their listings."""

    def __init__(self, operations: tuple[Operation, ...], prefix: str = jsonrpc.TOOL_PREFIX) -> None:
        self.tools = {name: op for op in operations for name in (*jsonrpc.spell_tool_name(op.name, prefix), op.name)}
        self.prefix = prefix
        schemas = {op.name: tools.make_input_schema(op) for op in operations}
        self.schemas = {name: schemas[op.name] for name, op in self.tools.items()}
        self.shelves: dict[tuple[str, tools.ToolForm], list[ListedTool]] = {}
        for separator in (jsonrpc.DOTTED, jsonrpc.UNDERSCORED):
            self.shelf(separator, tools.BRIEF_NAMED)

    def shelf(self, separator: str, form: tools.ToolForm) -> list[ListedTool]:
        """Return all tools by name, in one form of listing."""
        if (separator, form) not in self.shelves:
            listed = tools.describe_tools({op.name: op for op in self.tools.values()}.values(), separator, form,
                                          self.prefix)
            self.shelves[separator, form] = [
                ListedTool(self.tools[tool["name"]], msgspec.Raw(encode_json(tool))) for tool in listed]
        return self.shelves[separator, form]


class ListedTool(msgspec.Struct):
    """A tool as it is listed, in JSON: making models and texts of all tools takes as long as 30 creations."""

    op: Operation
    text: msgspec.Raw


make_catalog = cache(Catalog)


class ToolCall(msgspec.Struct):
    """A call of an operation: its request, or its refusal."""

    op: Operation
    ask: wire.Ask | None = None
    refusal: errors.GateError | None = None
    unknown: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()        # warnings that do not fit into the reply
    trace: Trace | None = None          # to which the call belongs
    brief: bool = False                 # whether a model reads the answer


class Visit(msgspec.Struct):
    """A request inside the SDK: its caller, and the call cut out of it."""

    caller: Caller
    query: dict[str, str]
    call: ToolCall | None = None
    listed: bytes = b""     # the tools to list, in JSON


class JsonRpcMessage(msgspec.Struct):
    """A JSON-RPC message, parsed no further than necessary."""

    members: Members
    params: Members
    method: str = ""
    name: str = ""
    refusal: errors.GateError | None = None        # the error in its JSON, if any
    standard: bool = False      # whether it is MCP, not the dialect of peers
    means: str = ""             # the tool that is meant by the name, if it is that of a declared type

    @property
    def asks_nothing(self) -> bool:
        """Whether it is a notification or an answer, to which there is no reply."""
        return not self.method or self.method.startswith("notifications/")

    @property
    def arguments_are_an_object(self) -> bool:
        """Whether the arguments are a JSON object."""
        return bytes(self.arguments).lstrip()[:1] == b"{"

    @property
    def arguments(self) -> msgspec.Raw:
        """Return the raw arguments of a tool call."""
        given = self.params.get("arguments", NULL)
        return EMPTY_OBJECT if bytes(given).strip() == b"null" else given

    def emptied(self) -> bytes:
        """Return the message without its arguments."""
        if "arguments" not in self.params:
            return encode_json(self.members)
        return encode_json({**self.members, "params": {**self.params, "arguments": EMPTY_OBJECT}})


class FixedLists(Server[Any]):
    """The SDK's server, without the capability to announce new lists that it declares because of subscriptions."""

    def get_capabilities(self, *given: Any, **named: Any) -> types.ServerCapabilities:
        """Return the capabilities: lists of tools, prompts and resources never change while a gate runs."""
        can = super().get_capabilities(*given, **named)
        for part in (can.tools, can.prompts, can.resources):
            if part is not None:
                part.list_changed = False
        return can


class Facade:
    """Answers requests to /mcp."""

    PREFIX = jsonrpc.TOOL_PREFIX        # of the names of its tools

    def __init__(self, gate: Serving, operations: dict[str, Operation], version: str) -> None:
        self.gate, self.settings, self.operations, self.version = gate, gate.settings, operations, version
        self.catalog = make_catalog(tuple(operations.values()), self.PREFIX)
        self.stranger = msgspec.structs.replace(
            gate.settings, max_request_bytes=min(STRANGERS_BYTES, gate.settings.max_request_bytes))
        self.can_ask = "list_inputs" in operations      # whether the extra is there
        self.library = Library(self._do, self._whose, lambda: gate.engine, self.settings.max_waiting_claims,
                               lambda ctx: find_visit(ctx).caller)
        self.manager = StreamableHTTPSessionManager(
            self._server(), stateless=True, json_response=True, max_request_body_size=self.settings.max_request_bytes)
        self.over = asyncio.Event()

    def _server(self) -> Server[Any]:
        server: Server[Any] = FixedLists(
            "asyncgate", version=self.version, title="AsyncGate", instructions=tools.INSTRUCTIONS,
            get_tool_input_schema=self.catalog.schemas.get,      # otherwise the SDK lists all tools on every call
            cache_hints={**dict.fromkeys(SAME_FOR_ALL, CacheHint(ttl_ms=HOUR_MS, scope="public")),
                         "tools/list": CacheHint(ttl_ms=HOUR_MS, scope="private")},      # by role and scopes
            on_list_tools=self._list)
        server.middleware.clear()       # the SDK's own spans, which cost 10 µs where nobody takes them
        server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)
        tasks.Tasks(partial(self._do, brief=True), self.can_ask).join(server)
        self.library.join(server)
        return server

    # Start and stop.

    @classmethod
    def prepare(cls, operations: tuple[Operation, ...]) -> None:
        """Build the catalog of tools in advance, on a thread: it takes a third of a second."""
        make_catalog(operations, cls.PREFIX)

    async def open(self) -> Facade:
        """Start the SDK's manager in its own task, because the same task must end it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running = asyncio.create_task(self._run(ready))
        await ready
        return self

    async def _run(self, ready: asyncio.Future[None]) -> None:
        async with self.manager.run():
            ready.set_result(None)
            await self.over.wait()

    async def close(self) -> None:
        """Stop the manager."""
        self.over.set()
        await self.running

    # One request.

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer one request: refuse it, pass it to the SDK, or answer it in the dialect of peers."""
        try:
            await self._answer(scope, receive, send)
        except errors.GateError as refusal:
            self.gate.guard.refused(scope, refusal)
            if self.gate.meter is not None:
                self.gate.meter.note_refusal("mcp", refusal)
            await self._refuse(scope, send, refusal)
        except asyncio.CancelledError:
            return      # the client has disconnected
        except Exception as bug:
            await self._refuse(scope, send, errors.log_fault(scope["path"], bug))

    async def _refuse(self, scope: connection.Scope, send: connection.Send, refusal: errors.GateError) -> None:
        """Answer a refusal: in JSON-RPC if the message is known, except one that asks for another credential.

        A client of MCP ends its session at other statuses than 200, or shows nobody the body.
        """
        message: JsonRpcMessage | None = scope.get(MESSAGE)
        if message is None or (message.standard and asks_for_credential(refusal)):
            return await self.gate.send(send, scope, refusal.status, encode_json(refusal.body()),
                                        self.gate.describe_refusal(scope, refusal))
        refusal = await self.gate.guard.passing(scope) or refusal       # which `send` would tell as REST does
        scope["asyncgate.over_limit"] = refusal.status == HTTPStatus.TOO_MANY_REQUESTS
        headers = self.gate.describe_refusal(scope, refusal)
        if message.standard and message.asks_nothing:
            return await self.gate.send(send, scope, HTTPStatus.ACCEPTED, b"", headers)
        id = message.members.get("id", NULL)
        if not message.standard or self._called(message) is None:
            return await self._error(scope, send, id, jsonrpc.CODES.get(refusal.status, jsonrpc.INTERNAL_ERROR),
                                     refusal,
                                     HTTPStatus.OK if message.standard else None)
        modern = any(name == b"mcp-protocol-version" and value.decode("latin-1").strip() in MODERN_PROTOCOL_VERSIONS
                     for name, value in scope["headers"])
        result = tools.make_refusal_result(refusal) | (COMPLETE if modern else {})
        await self.gate.send(send, scope, HTTPStatus.OK,
                             encode_json({"jsonrpc": "2.0", "id": id, "result": result}), headers)

    async def _answer(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        if scope["method"] != "POST":       # no streams and no sessions: every POST stands alone
            raise errors.MethodNotAllowed(f"{scope['path']} does not support {scope['method']}; POST JSON-RPC",
                                          allow=["POST"])
        headers = scope["headers"]      # an MCP client accepts event streams in every revision
        standard = accepts_stream(headers) or any(name.startswith(b"mcp-") for name, _ in headers)
        caller, refusal = await self._known(scope, standard)
        try:
            body = await http.read_body(scope, receive, self.settings if caller else self.stranger)
            scope[MESSAGE] = message = await self._read_apart(body)
        except errors.GateError as unread:
            raise refusal or unread from None
        if message is not None:
            message.standard = standard = standard or is_mcp_message(message)
        if refusal is not None:
            raise refusal
        if not standard:
            return await self._bare(scope, receive, send, message)
        caller = caller or await self.gate.guard.resolve(scope)
        op = self._called(message) if message else None
        if message is not None and op is None and message.method == "tools/call":
            await self._read_type(scope, message, caller)
            op = self._called(message)
        await self.gate.guard.meter(scope, caller, op)
        if fault := find_fault(body, message):
            return await self._error(scope, send, NULL, jsonrpc.INVALID_MESSAGE, errors.InvalidRequest(fault))
        await self._sdk(scope, receive, send, body, message, caller)

    async def _read_apart(self, body: bytes) -> JsonRpcMessage | None:
        """Check and parse a message; keep errors in the arguments alone for the answer to the call."""
        wrong: errors.GateError | UnicodeDecodeError | None = None
        try:
            body, wrong = await mark_body(body, self.settings.max_request_values, AROUND)   # else it is not parsed
            message = await parse_message(body)
        except RecursionError:
            raise errors.PayloadTooDeep("the JSON of the message is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as broken:
            if flaw := members.find_no_number(broken, body):       # the SDK would take such a message
                raise errors.InvalidRequest(flaw) from None
            message = None
        await let_others_run(len(body))
        op = self._called(message) if message else None
        if wrong is None or (op is not None and op.reader.is_batch):
            return message      # an item that holds a mark is refused by itself
        if isinstance(wrong, UnicodeDecodeError):
            return None
        if message is None or op is None:
            raise wrong
        message.refusal = wrong
        return message

    async def _known(self, scope: connection.Scope, standard: bool) -> tuple[Caller | None, errors.GateError | None]:
        """Return the caller from the headers, or a refusal that waits for the message which it answers.

        Only a peer may omit the token in the headers, and only in a small message.
        """
        try:
            if "asyncgate.overloaded" in scope:
                raise errors.Overloaded("the server is at its limit of connections; repeat the call", retry_after=1)
            if not standard and connection.read_token(scope["headers"]) is None:
                try:
                    await self.gate.guard.known(scope["headers"])
                except errors.Unauthenticated:
                    return None, None
            return await self.gate.guard.resolve(scope), None
        except errors.GateError as refusal:
            if asks_for_credential(refusal):
                raise
            return None, refusal

    async def _sdk(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send, body: bytes,
                   message: JsonRpcMessage | None,
                   caller: Caller) -> None:
        """Let the SDK answer the message without its arguments."""
        visit = Visit(caller, read_query_of(scope))
        tools.read_sets(visit.query.get("tools"))       # refuse an unknown set at once, for every method
        if message and (op := self._called(message)) and message.arguments_are_an_object:   # else the SDK refuses them
            visit.call = self._read(scope, op, "refuse", message, caller)      # as its schema says
            # A program, unlike a model, reads all of an answer, or checks it against its schema.
            if "full" not in (visit.query.get("answers"), visit.query.get("schemas")):
                visit.call.brief = True
                limit_page(op.name, visit.call.ask)
            if self.gate.challenges and visit.call.refusal and lacks_scopes(visit.call.refusal, caller):
                raise visit.call.refusal        # the program is told by a header what token it needs
            body = message.emptied()
        elif message and message.method == "initialize":
            # The one revision with batches of messages is not served; its clients know the revision before.
            revision = decode_or_none(_text, message.params.get("protocolVersion", NULL))
            params = {**message.params, **({"protocolVersion": BEFORE_BATCHES} if revision == WITH_BATCHES else {})}
            body = encode_json({**message.members, "params": params})
        if len(body) > ENVELOPE_BYTES:
            raise errors.PayloadTooLarge(
                f"a message may have at most {ENVELOPE_BYTES} bytes besides its call's arguments")
        # Not every HTTP parser strips the whitespace around a header's value.
        stripped = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        if not any(name == b"accept" for name, _ in stripped):      # then any type is good (RFC 9110 12.5.1)
            stripped.append((b"accept", b"*/*"))
        waits = visit.call is not None and getattr(visit.call.ask, "wait_seconds", 0) > 0
        stream = self._make_stream(scope, send, visit, message) if waits and message else None
        answer: Awaitable[None] = self.manager.handle_request(
            {**scope, "headers": stripped, VISIT: visit}, replay_body(body),
            stream.send if stream else self._safe(scope, send, visit))
        if waits or (message and message.method == "subscriptions/listen"):
            return await http.run_while_connected(  # type: ignore[no-any-return]
                stream.run(answer) if stream else answer, receive)
        await answer

    def _make_stream(self, scope: connection.Scope, send: connection.Send, visit: Visit,
                     message: JsonRpcMessage) -> ProgressStream | None:
        """Return a stream for the answer to a waiting call, if its client wants to know its progress."""
        meta = decode_or_none(_members, message.params.get("_meta", NULL)) or {}
        token = decode_or_none(_id, meta.get("progressToken", NULL))
        if token is None or not accepts_stream(scope["headers"]):
            return None
        stream = ProgressStream(self.gate.engine, visit.caller, token, self._safe(scope, send, visit))
        visit.caller = replace(visit.caller, note_wait=stream.note_wait)
        return stream

    def _safe(self, scope: connection.Scope, send: connection.Send, visit: Visit) -> connection.Send:
        """Add the security headers, and the tools of a list, to the SDK's answers."""
        begun: list[Any] = []       # the beginning of a list, held back until the length of its body is known

        async def safe(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                message = {**message, "headers": [*message["headers"], *self.gate.safety(scope, own)]}
                if visit.listed:
                    return begun.append(message)
            if begun:
                start, name = begun.pop(), b'"tools":'
                body = message["body"].replace(name + NO_TOOLS, name + visit.listed, 1)
                grown, message = len(body) - len(message["body"]), {**message, "body": body}
                await send({**start, "headers": [
                    (header, b"%d" % (int(value) + grown) if header == b"content-length" else value)
                    for header, value in start["headers"]]})
            await send(message)
        return safe

    def _read(self, scope: connection.Scope, op: Operation, rule: members.Rule, message: JsonRpcMessage,
              caller: Caller) -> ToolCall:
        """Read the request of a call, or keep the refusal for the answer."""
        query = read_query_of(scope)
        try:
            self.gate.engine.permit(op, caller)
            if message.refusal is not None:
                raise message.refusal
            arguments = http.drop_null_members(drop_token(message.arguments) if rule != "refuse" else message.arguments)
            ask, unknown = op.reader.body(arguments, rule)
            http.fill_principal(ask, query)
            for tenant in http.read_claimed_tenants(query, scope["headers"]):
                self.gate.engine.check_tenant(caller, tenant)
        except errors.GateError as refused:
            return ToolCall(op, refusal=refused)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as wrong:
            return ToolCall(op,
                            refusal=errors.InvalidRequest(f"{op.name}: {members.describe_problem(wrong, op.takes)}"))
        return ToolCall(op, ask, unknown=unknown, trace=self._find_trace(scope, op, message))

    def _find_trace(self, scope: connection.Scope, op: Operation, message: JsonRpcMessage) -> Trace | None:
        """Return the trace of a call, from its `_meta` or from the headers, if somebody will use it."""
        if not op.takes.creates and self.gate.tracing is None:
            return None
        held = decode_or_none(_members, message.params.get("_meta", NULL)) or {}
        named = [decode_or_none(_text, held.get(name, NULL)) for name in ("traceparent", "tracestate")]
        return read_trace([named[0]], [named[1] or ""]) if named[0] else find_trace(scope["headers"])

    async def _perform(self, call: ToolCall, caller: Caller) -> bytes:
        """Perform a call, inside a span if somebody takes them."""
        if (tracing := self.gate.tracing) is None:
            return await self._perform_now(call, caller)
        tool = jsonrpc.spell_tool_name(call.op.name, self.PREFIX)[0]
        with tracing.serve_tool(call.op.name, tool, call.trace) as span:
            if call.op.takes.creates and call.trace is None:
                call.trace = tracing.current()
            try:
                return await self._perform_now(call, caller, partial(tracing.note_served, span, call.op.name, call.ask))
            except errors.GateError as refused:
                tracing.note_refusal(span, refused)
                raise

    async def _perform_now(self, call: ToolCall, caller: Caller, note: Callable[[Any], None] | None = None) -> bytes:
        """Perform a call and return its reply as JSON; an unexpected exception becomes a refusal, too."""
        begun, reply, refusal = perf_counter(), None, None
        try:
            if call.refusal is not None:
                raise call.refusal
            assert call.ask is not None
            if call.op.takes.creates and call.trace is not None:
                caller = replace(caller, trace=call.trace)
            reply = await self.gate.engine.perform(call.op, caller, call.ask)
            call.beside = members.read_warnings(reply)
            if note is not None:
                note(reply)
            return summarize(call.op.name, reply) if call.brief else encode_json(reply)
        except errors.GateError as refused:
            refusal = refused
            self.gate.guard.refused_call(caller, refused, call.op.name, call.ask)
            raise
        except Exception as bug:
            refusal = errors.log_fault(call.op.name, bug)
            raise refusal from bug
        finally:
            if self.gate.meter is not None:
                self.gate.meter.note_call("mcp", call.op.name, begun, reply, refusal)

    def _called(self, message: JsonRpcMessage) -> Operation | None:
        """Return the operation that a message calls, if any."""
        return self.catalog.tools.get(message.means or message.name) if message.method == "tools/call" else None

    async def _read_type(self, scope: connection.Scope, message: JsonRpcMessage, caller: Caller) -> None:
        """Let a call of the tool of a declared type mean run_task."""
        if (typed := self.gate.typed_tools) is None or tools.TYPES not in tools.read_sets(
                read_query_of(scope).get("tools")) or not message.arguments_are_an_object:
            return
        if (arguments := await typed.find_arguments(caller, message.name, message.arguments)) is not None:
            message.means, message.params = TYPED_MEANS, {**message.params, "arguments": arguments}

    # Handlers of the SDK.

    async def _list(self, ctx: tasks.Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        assert ctx.request is not None
        visit = find_visit(ctx)
        shown = self._shown(ctx.request.url.path, visit.caller, visit.query)
        if self.gate.typed_tools is not None and tools.TYPES in tools.read_sets(visit.query.get("tools")):
            shown += await self.gate.typed_tools.list_tools(visit.caller)
            visit.listed = encode_json(shown)
            return types.ListToolsResult(tools=[], ttl_ms=MINUTE_MS)        # workers declare types meanwhile
        visit.listed = encode_json(shown)
        return types.ListToolsResult(tools=[])      # `_safe` puts them in

    def _shown(self, path: str, caller: Caller, query: dict[str, str]) -> list[msgspec.Raw]:
        """Return the tools to list: the caller may use them, and the query asks for their set."""
        separator = jsonrpc.UNDERSCORED if path.endswith(
            "/u") or self.settings.mcp_tool_names == "underscore" else jsonrpc.DOTTED
        separator = jsonrpc.UNPREFIXED if query.get("names") == "short" else separator
        named = (caller.bound and not caller.sees_all) or "principal_id" in query
        # A worker needs its own tools, and the host of a model whose credential names nobody no administration.
        as_worker = caller.role == "worker" if caller.bound else query.get("principal_kind") == "worker"
        usual = ("work",) if as_worker else () if caller.bound else ("delegate",)
        sets = tools.read_sets(query.get("tools"), *usual)
        form = tools.FULL_FORM if query.get("schemas") == "full" else (
            tools.BRIEF_NAMED if named else tools.choose_brief(sets))
        return [tool.text for tool in self.catalog.shelf(separator, form)
                if tool.op.fits(caller) and tools.is_in(tool.op, sets)]

    async def _call(self, ctx: tasks.Context, params: types.CallToolRequestParams) -> dict[str, Any]:
        visit = find_visit(ctx)
        if visit.call is None:
            raise MCPError(types.INVALID_PARAMS, describe_no_tool(params.name))
        ask = visit.call.ask
        if by_handle := isinstance(ask, wire.RunTask) and tasks.wants_handle(ctx):
            ask.wait_seconds = 0.0      # the client polls the handle itself
        waits = isinstance(ask, wire.RunTask | wire.GetTask) and ask.wait_seconds > 0
        try:
            if waits and self.can_ask and in_line.can_ask(ctx) and self.operations["list_inputs"].fits(visit.caller):
                reply = await self._wait_in_line(ctx, visit, params)
            else:
                reply = await self._perform(visit.call, visit.caller)
        except errors.GateError as refused:
            return COMPLETE | tools.make_refusal_result(refused)
        if isinstance(reply, dict):
            return reply
        meta = {"_meta": {"asyncgate/warnings": visit.call.beside}} if visit.call.beside else {}
        if by_handle:
            return tasks.make_handle(reply)
        return COMPLETE | tools.make_result(reply, once=visit.call.brief) | meta

    async def _wait_in_line(self, ctx: tasks.Context, visit: Visit,
                            params: types.CallToolRequestParams) -> bytes | dict[str, Any]:
        """Carry out a call that waits for a task, and whose client is asked what the task asks."""
        assert visit.call is not None
        assert isinstance(visit.call.ask, wire.RunTask | wire.GetTask)
        ask, brief = visit.call.ask, visit.call.brief
        line = in_line.InLine(self.gate.engine, visit.caller, ctx, self._do)
        seconds, ask.wait_seconds = ask.wait_seconds, 0.0
        if params.request_state is None:
            reply = await self._perform(visit.call, visit.caller)
            task_id = decode_json(reply)["task_id"]
        else:       # it is the same call, whose task there is already
            task_id = line.open_state(params.request_state)
            await line.answer(task_id, in_line.read_responses(params))
        question = await line.wait(task_id, seconds)
        return question or await self._do(ctx, "get_task", {"task_id": task_id}, brief=brief)

    async def _do(self, ctx: tasks.Context, operation: str, fields: dict[str, Any], brief: bool = False) -> bytes:
        """Perform an operation for a request that is not a tool call."""
        assert ctx.request is not None
        op, visit = self.operations[operation], find_visit(ctx)
        meant = JsonRpcMessage({}, {"arguments": msgspec.Raw(encode_json(fields))})
        call = self._read(ctx.request.scope, op, "ignore", meant, visit.caller)
        call.brief = brief
        return await self._perform(call, visit.caller)

    def _whose(self, ctx: tasks.Context) -> tuple[str, wire.Principal]:
        """Return the tenant and the principal of a request without an operation."""
        visit, ask = find_visit(ctx), wire.ListOpenObligations()
        http.fill_principal(ask, visit.query)
        try:
            who = visit.caller.principal if names_nobody(ask) else self.gate.engine.require_subject(visit.caller, ask)
            return visit.caller.tenant_id, who
        except errors.GateError as refused:
            self.gate.guard.refused_call(visit.caller, refused, "subscriptions/listen")
            raise

    # The dialect of peers: JSON-RPC without a handshake; the result is the raw reply.

    async def _bare(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send,
                    message: JsonRpcMessage | None) -> None:
        if message is None:
            wrong = errors.InvalidRequest("the body is not a JSON-RPC message")
            return await self._error(scope, send, NULL, jsonrpc.PARSE_ERROR, wrong)
        id = message.members.get("id", NULL)
        if message.method not in ("tools/list", "tools/call"):
            refusal = errors.InvalidRequest(f"no method {message.method!r}; the methods are tools/list and tools/call")
            return await self._error(scope, send, id, jsonrpc.UNKNOWN_METHOD, refusal)
        result = await self._bare_result(scope, receive, message)
        reply = encode_json({"jsonrpc": "2.0", "id": id, "result": result})
        await self.gate.send(send, scope, 200, reply, make_warning_headers(scope))

    async def _bare_result(self, scope: connection.Scope, receive: connection.Receive, message: JsonRpcMessage) -> Any:
        op = self._called(message)
        caller = await self.gate.guard.resolve(scope, op, read_credentials(scope, message))
        if op is None:
            await self.gate.guard.meter(scope, caller, None)
        await let_others_run(len(message.arguments))
        if message.method == "tools/list":
            return {"tools": self._shown(scope["path"], caller, read_query_of(scope))}
        if op is None:
            raise errors.InvalidRequest(describe_no_tool(message.name))
        if not message.arguments_are_an_object:
            raise errors.InvalidRequest("arguments must be an object")
        call = self._read(scope, op, self.settings.unknown_members, message, caller)
        if call.unknown:
            scope["asyncgate.unknown"] = call.unknown
        work: Awaitable[bytes] = self._perform(call, caller)
        reply = await (http.run_while_connected(work, receive) if getattr(call.ask, "wait_seconds", 0) > 0 else work)
        reply = members.add_warnings(reply, call.unknown) if call.unknown else reply
        if call.beside:
            scope["asyncgate.beside"] = call.beside
        return {**_members(reply), **tools.make_result(reply)}

    async def _error(self, scope: connection.Scope, send: connection.Send, id: msgspec.Raw, code: int,
                     refusal: errors.GateError,
                     status: int | None = None) -> None:
        """Answer a failure: an integer code for JSON-RPC, and in `data` the error code that every façade uses."""
        unknown = {"warnings": scope["asyncgate.unknown"]} if "asyncgate.unknown" in scope else {}
        error = {"code": code, "message": str(refusal), "data": {**tools.make_refusal_data(refusal), **unknown}}
        # Some workers ignore the body: they stop at 4xx and retry other failures, even with status 200.
        status = status or (refusal.status if 400 <= refusal.status < 500 and refusal.status not in PASSING else 200)
        await self.gate.send(send, scope, status, encode_json({"jsonrpc": "2.0", "id": id, "error": error}),
                             [*self.gate.describe_refusal(scope, refusal), *make_warning_headers(scope)])


async def parse_message(body: bytes) -> JsonRpcMessage:
    """Parse a message, except its arguments, which stay raw; let other requests run between two passes over it."""
    members = _members(body)
    await let_others_run(len(body))
    params = decode_or_none(_members, members.get("params", EMPTY_OBJECT)) or {}
    method = decode_or_none(_text, members.get("method", NULL)) or ""
    name = decode_or_none(_text, params.get("name", NULL)) or ""
    return JsonRpcMessage(members, params, method, name)


def describe_no_tool(name: str) -> str:
    return f"no tool {name!r}; tools/list shows the tools, with ?tools=all in the address all of them"


def read_query_of(scope: connection.Scope) -> dict[str, str]:
    """Decode the query of a request."""
    try:
        return http.read_query(scope["query_string"])
    except ValueError as wrong:
        raise errors.InvalidRequest(f"invalid query: {wrong}") from None


def decode_or_none(decode: Callable[[msgspec.Raw], Any], raw: msgspec.Raw) -> Any:
    """Decode a part; return None if it has another type."""
    try:
        return decode(raw)
    except msgspec.DecodeError:
        return None


def accepts_stream(headers: connection.Headers) -> bool:
    """Whether a client says that it takes a stream of events."""
    return any(name == b"accept" and b"text/event-stream" in value.lower() for name, value in headers)


def asks_for_credential(refusal: errors.GateError) -> bool:
    """Whether a client can mend a refusal by authorization: it learns that from the HTTP status and its headers."""
    suspended = refusal.because is not None and refusal.because[0] == "tenant_suspended"
    return isinstance(refusal, errors.Unauthenticated | errors.Forbidden) and not suspended


def is_mcp_message(message: JsonRpcMessage) -> bool:
    """Whether a message is MCP: part of the handshake, or with a protocol version."""
    meta = decode_or_none(_members, message.params.get("_meta", NULL)) or {}
    shakes = message.method in HANDSHAKE or message.method.startswith("notifications/")
    return shakes or any(name.endswith("protocolVersion") for name in meta)


def find_fault(body: bytes, message: JsonRpcMessage | None) -> str | None:
    """Say what is wrong with the envelope of a message; None if nothing is, or if it is not JSON.

    The SDK takes a request without a valid id for a notification: it answers 202 and does nothing.
    """
    if message is None:
        batch = body.lstrip()[:1] == b"["
        return "send each message in a separate request; batches are not accepted" if batch else None
    members = message.members
    if decode_or_none(_text, members.get("jsonrpc", NULL)) != "2.0":
        return "jsonrpc must be \"2.0\""
    if not message.method and members.keys().isdisjoint(("result", "error")):
        return "method must be the name of a method"
    if bytes(members.get("params", NULL)).lstrip()[:1] not in (b"{", b"n"):
        return "params must be an object"
    asks = message.method and not message.method.startswith("notifications/")
    if asks and decode_or_none(_id, members.get("id", NULL)) is None:
        return f"{message.method} needs an id, a string or an integer; without it nobody gets the answer"
    return None


def make_warning_headers(scope: connection.Scope) -> connection.Headers:
    """Return a header with the unknown members of a call and the warnings that do not fit into its reply."""
    warnings = (*scope.get("asyncgate.unknown", ()), *scope.get("asyncgate.beside", ()))
    return [members.make_warning_header(warnings)] if warnings else []


def drop_token(arguments: msgspec.Raw) -> msgspec.Raw:
    """Remove the token that a peer may send as an argument."""
    if b'"auth_token"' not in bytes(arguments):
        return arguments
    return msgspec.Raw(encode_json({name: held for name, held in _members(arguments).items() if name != "auth_token"}))


def read_credentials(scope: connection.Scope, message: JsonRpcMessage) -> connection.Headers:
    """Return the headers, plus the token that a peer may send as an argument."""
    headers: connection.Headers = scope["headers"]
    if b'"auth_token"' not in bytes(message.arguments):
        return headers
    held = decode_or_none(_members, message.arguments) or {}
    token = decode_or_none(_text, held.get("auth_token", NULL))
    if not token or connection.read_token(headers) == token:
        return headers
    return [*headers, (b"x-api-key", token.encode())]


def find_visit(ctx: tasks.Context) -> Visit:
    """Return the visit of a request of the SDK."""
    assert ctx.request is not None
    visit: Visit = ctx.request.scope[VISIT]
    return visit


def replay_body(body: bytes) -> connection.Receive:
    """Return an ASGI receive that yields a body once, then waits forever."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Event().wait()
    return receive
