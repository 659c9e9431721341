"""REST: from the router to the engine; also opens the MCP façade on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec.structs import replace

from asyncgate.parts.faces import http
from asyncgate.parts.model import errors, members, screening, wire
from asyncgate.parts.model.connection import Receive, Scope, Send
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.trace import find_trace

if TYPE_CHECKING:
    from asyncgate import Caller, Operation
    from asyncgate.parts.faces.mcp.facade import Facade
    from asyncgate.parts.faces.serving import Serving

DEPRECATED = [(b"deprecation", b"true"), (b"x-asyncgate-deprecated", b"true")]


class Endpoint:
    """All operations of one path, as an ASGI application."""

    heads: ClassVar[bool] = True        # whether HEAD is answered as GET is, without the body

    def __init__(self, gate: Serving, operations: dict[str, Operation], path: str) -> None:
        self.gate, self.operations = gate, operations
        self.path, self.names = path, path.partition("{")[2].partition("}")[0]      # the field that it carries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if (tracing := self.gate.tracing) is None:
            await self._answer(scope, receive, send)
            return
        with tracing.serve_http(scope["method"], self.path, find_trace(scope["headers"])) as span:
            refusal, reply = await self._answer(scope, receive, send)
            tracing.note_served(span, self._name_called(scope), scope.get("asyncgate.ask"), reply)
            tracing.note_status(span, refusal, 204 if reply is None else 200)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> tuple[errors.GateError | None, Any]:
        """Answer one request; return its refusal, or its reply."""
        more: list[tuple[bytes, bytes]] = []
        begun, reply, refusal = perf_counter(), None, None
        try:
            reply = await self._perform(scope, receive, more)
            more += [members.make_warning_header(warnings)] if (warnings := members.read_warnings(reply)) else []
            status, body = (204, b"") if reply is None else (200, encode_json(reply))
        except errors.GateError as refused:     # without its frames, which would hold it until a garbage collection
            refusal, status, body = refused.with_traceback(None), refused.status, encode_json(refused.body())
            more += self.gate.describe_refusal(scope, refused)
            self.gate.guard.refused(scope, refused, scope.get("asyncgate.ask"))
        except asyncio.CancelledError:
            return None, None       # the client has disconnected
        except Exception as bug:
            refusal = errors.log_fault(scope["path"], bug)
            status, body = refusal.status, encode_json(refusal.body())
        if self.gate.meter is not None:
            self.gate.meter.note_call("rest", self._name_called(scope), begun, reply, refusal)
        if "asyncgate.unknown" in scope:
            more.append(members.make_warning_header(scope["asyncgate.unknown"]))
            body = members.add_warnings(body, scope["asyncgate.unknown"]) if body else body
        await self.gate.send(send, scope, status, body, more)
        return refusal, reply

    def _name_called(self, scope: Scope) -> str:
        op = self._find_operation(scope["method"])
        return op.name if op else "other"

    def _find_operation(self, verb: str) -> Operation | None:
        return self.operations.get("GET" if verb == "HEAD" and self.heads else verb)

    async def _perform(self, scope: Scope, receive: Receive, more: list[tuple[bytes, bytes]]) -> Any:
        if (op := self._find_operation(scope["method"])) is None:
            allow = sorted({*self.operations, *({"HEAD"} if "GET" in self.operations and self.heads else ())})
            raise errors.MethodNotAllowed(f"{scope['path']} does not support {scope['method']}", allow=allow)
        caller = await self.gate.guard.resolve(scope, op)
        self.gate.engine.permit(op, caller)
        if op.takes.creates:        # the creator's trace is the one that the request names, else that of its own span
            trace = find_trace(scope["headers"]) or (self.gate.tracing and self.gate.tracing.current())
            caller = replace(caller, trace=trace) if trace else caller
        scope["asyncgate.ask"] = ask = await self._ask(op, caller, scope, receive)
        if op.successor and self.gate.settings.bootstrap.deprecate_legacy_endpoint:
            _, path = self.gate.operations[op.successor].rest[0]
            more += [*DEPRECATED, (b"link", b"<%b>; rel=\"successor-version\"" % path.encode())]
        work = self.gate.engine.perform(op, caller, ask)
        return await (http.run_while_connected(work, receive) if getattr(ask, "wait_seconds", 0) > 0 else work)

    async def _ask(self, op: Operation, caller: Caller, scope: Scope, receive: Receive) -> wire.Ask:
        """Read a request: a GET from its query, others from the body; path parameters override both."""
        rule, body = self.gate.settings.unknown_members, b""
        try:
            query = http.read_query(scope["query_string"])
            reads = scope["method"] in ("GET", "HEAD")
            if not reads or op.kind == "W":
                body = await http.read_body(scope, receive, self.gate.settings)
            if reads and not body:      # 18.5: a bootstrap is a GET that writes and may have a body
                ask, unknown = op.reader.query(query, rule)
            else:
                if heavy := not screening.is_light(body, most := self.gate.settings.max_request_values):
                    if op.reader.is_batch:
                        body, _ = await screening.mark_body(body, most)
                    else:
                        await screening.screen_body(body, most)
                body = http.drop_null_members(body) if body else b"{}"
                if heavy:
                    await screening.let_others_run(len(body))
                ask, unknown = op.reader.body(body, rule)
                if query:
                    http.fill_principal(ask, query)
                    unknown += op.reader.beside(query, rule)
            for name, value in scope["path_params"].items():
                setattr(ask, name, members.read_member(name, value, op.reader.fields[name]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as wrong:
            raise errors.InvalidRequest(f"{op.name}: {members.describe_problem(wrong, op.takes, body)}") from None
        for named in http.read_claimed_tenants(query, scope["headers"]):
            self.gate.engine.check_tenant(caller, named)
        if unknown:
            scope["asyncgate.unknown"] = unknown
        return ask


def mcp_facade() -> type[Facade]:
    """Import the MCP façade."""
    from asyncgate.parts.faces.mcp.facade import Facade
    return Facade


class Door:
    """Opens the MCP façade on the first request, because its import takes 0.6 s and 40 MB."""

    def __init__(self, gate: Serving, operations: dict[str, Operation], version: str,
                 kind: Callable[[], type[Facade]] = mcp_facade) -> None:
        self.gate, self.operations, self.version, self.kind = gate, operations, version, kind
        self.opening = asyncio.Lock()
        self.facade: Facade | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        facade = self.facade or await self._open()
        await facade(scope, receive, send)

    async def _open(self) -> Facade:
        async with self.opening:
            if self.facade is None:     # another request may have opened it meanwhile
                kind = await asyncio.to_thread(self.kind)
                await asyncio.to_thread(kind.prepare, tuple(self.operations.values()))      # 0.3 s
                self.facade = await kind(self.gate, self.operations, self.version).open()
            return self.facade

    def drain(self) -> None:
        """End the subscriptions."""
        if self.facade is not None:
            self.facade.library.close()

    async def close(self) -> None:
        """Close the façade."""
        if self.facade is not None:
            await self.facade.close()
