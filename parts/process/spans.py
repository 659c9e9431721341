"""Spans of OpenTelemetry, made only if this process has a provider of them.

A span that nobody records costs 8 µs as a context manager.  So a program asks once, when it starts, whether there is a
provider, and then makes spans or none.  OpenTelemetry is imported only where a provider can be.

Names and attributes of our own (`asyncgate.*`) and those of HTTP, which are stable, are always there.  Those of the
conventions for messaging, for generative AI and for MCP may still change: OTEL_SEMCONV_STABILITY_OPT_IN asks for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncgate.parts.model import errors
from asyncgate.parts.model.trace import Trace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span

PROVIDER_VARIABLE, OPT_IN_VARIABLE = "OTEL_PYTHON_TRACER_PROVIDER", "OTEL_SEMCONV_STABILITY_OPT_IN"
MESSAGING, GEN_AI = {"messaging", "messaging/dup"}, "gen_ai_latest_experimental"
# What an operation is to the conventions for messaging.
PRODUCERS = ("create_task", "create_tasks", "run_task", "rerun_task")
MESSAGE_OPERATIONS = {**dict.fromkeys(PRODUCERS, "send"), "lease_next": "receive", "process": "process",
                      **dict.fromkeys(("complete", "complete_tasks", "fail", "release_lease"), "settle")}
ATTRIBUTES = {"task_id": "asyncgate.task_id", "type": "asyncgate.task_type"}       # fields of a request
MOST_LINKS = 128            # of one span; SDKs keep no more

log = logging.getLogger("asyncgate")


def find_tracing() -> Tracing | None:
    """Return what makes spans, if this process has a provider; else import nothing."""
    if "opentelemetry.trace" not in sys.modules and not os.environ.get(PROVIDER_VARIABLE):
        return None
    try:
        from opentelemetry import trace
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        return Tracing()
    except Exception as error:      # a provider that cannot be loaded must not keep a gate from its work
        log.warning("no traces: OpenTelemetry's provider cannot be used (%s: %s)", type(error).__name__, error)
        return None


class Tracing:
    """Makes the spans of this process."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api, self.w3c = trace, TraceContextTextMapPropagator()
        self.tracer = trace.get_tracer("asyncgate")
        opted = {name.strip() for name in os.environ.get(OPT_IN_VARIABLE, "").split(",")}
        self.messaging, self.gen_ai = bool(opted & MESSAGING), GEN_AI in opted

    # Contexts.

    def current(self) -> Trace | None:
        """Return the trace of the current span."""
        carrier = self.inject({})
        return Trace(carrier["traceparent"], carrier.get("tracestate")) if carrier else None

    def inject(self, carrier: dict[str, str]) -> dict[str, str]:
        """Add the trace of the current span to headers, and return them."""
        self.w3c.inject(carrier)
        return carrier

    def _context(self, trace: Trace | None) -> Context | None:
        """Return the context of a trace as a parent; None is the current one."""
        return None if trace is None else self.w3c.extract(trace.members)

    def _links(self, parents: Iterable[str | None]) -> list[Link]:
        contexts = [self.api.get_current_span(self._context(Trace(parent))).get_span_context()
                    for parent in parents if parent]
        return [self.api.Link(context) for context in contexts[:MOST_LINKS] if context.is_valid]

    # Spans of a gate.

    def serve_http(self, method: str, route: str, trace: Trace | None) -> AbstractContextManager[Span]:
        """Make the span of a request, below that of its caller or of a server around this app."""
        about = {"http.request.method": method, "http.route": route}
        return self._serve(f"{method} {route}", about, trace)

    def serve_tool(self, operation: str, tool: str, trace: Trace | None) -> AbstractContextManager[Span]:
        """Make the span of a tool call."""
        about = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
        name = f"tools/call {tool}" if self.gen_ai else f"asyncgate {operation}"
        return self._serve(name, about if self.gen_ai else {}, trace)

    def _serve(self, name: str, about: Mapping[str, Any], trace: Trace | None) -> AbstractContextManager[Span]:
        nested = self.api.get_current_span().get_span_context().is_valid
        return self._current(name, self.api.SpanKind.SERVER, about, None if nested else self._context(trace))

    def note_served(self, span: Span, operation: str, ask: Any, reply: Any) -> None:
        """Add to the span of a request what it was about, and link a claim to the traces of its tasks."""
        task_id = getattr(reply, "task_id", None) or getattr(ask, "task_id", None)
        about = {"asyncgate.operation": operation, "asyncgate.task_id": task_id,
                 "asyncgate.task_type": getattr(ask, "type", None)}
        span.set_attributes({name: value for name, value in about.items() if isinstance(value, str) and value})
        offers = getattr(reply, "tasks", ()) if operation == "lease_next" else ()
        for link in self._links(offer.traceparent or None for offer in offers):
            span.add_link(link.context)

    def note_status(self, span: Span, refusal: errors.GateError | None, status: int) -> None:
        """Add the status of an HTTP answer."""
        span.set_attribute("http.response.status_code", refusal.status if refusal else status)
        if refusal is not None:
            self.note_refusal(span, refusal)

    def note_refusal(self, span: Span, refusal: errors.GateError) -> None:
        """Add a refusal to a span; only what the server could not do is an error of the server."""
        span.set_attribute("asyncgate.refusal", refusal.code)
        if refusal.status >= 500:
            self.note_error(span, refusal.code)

    def note_error(self, span: Span, code: str) -> None:
        """Mark a span as failed."""
        span.set_attribute("error.type", code)
        span.set_status(self.api.Status(self.api.StatusCode.ERROR, code))

    # Spans of a client.

    @contextlib.contextmanager
    def call(self, operation: str, fields: Mapping[str, Any]) -> Iterator[Span]:
        """Make the span of a call; an exception marks it as failed."""
        kind = self.api.SpanKind.PRODUCER if operation in PRODUCERS else self.api.SpanKind.CLIENT
        about: dict[str, Any] = {"asyncgate.operation": operation}
        about |= {there: fields[name] for name, there in ATTRIBUTES.items() if isinstance(fields.get(name), str)}
        name, more = self._name_message(operation, about.get("asyncgate.task_type", ""))
        with self._inner(name, kind, about | more) as span:
            yield span

    def note_created(self, span: Span, reply: object) -> None:
        """Add the id of the task that a call created, or their number."""
        if isinstance(task_id := getattr(reply, "task_id", None), str):
            span.set_attribute("asyncgate.task_id", task_id)
            if self.messaging:
                span.set_attribute("messaging.message.id", task_id)
        elif self.messaging and isinstance(results := getattr(reply, "results", None), list):
            span.set_attribute("messaging.batch.message_count", len(results))

    def _name_message(self, operation: str, destination: str) -> tuple[str, dict[str, Any]]:
        """Return the name of a span, and its attributes by the conventions for messaging if those are asked for."""
        name, type = f"{operation} {destination}".strip(), MESSAGE_OPERATIONS.get(operation)
        if not self.messaging or type is None:
            return f"asyncgate {name}", {}
        about = {"messaging.system": "asyncgate", "messaging.operation.name": operation,
                 "messaging.operation.type": type}
        return name, about | ({"messaging.destination.name": destination} if destination else {})

    # Spans of a worker.

    def begin_run(self, offer: Mapping[str, Any]) -> TaskRun:
        """Begin the span of one run of a task: the first is a child of its creator's span, later ones link to it."""
        trace = Trace(offer.get("traceparent"), offer.get("tracestate"))
        first = offer["fence"] == 1 and trace.traceparent is not None
        about = {"asyncgate.task_id": offer["task_id"], "asyncgate.task_type": offer["type"],
                 "asyncgate.attempt": offer["attempt"], "asyncgate.fence": offer["fence"]}
        name, more = self._name_message("process", offer["type"])
        more |= {"messaging.message.id": offer["task_id"]} if self.messaging else {}
        links = self._links([None if first else trace.traceparent, offer.get("trace_link")])
        # An empty context: a run is not a part of the claim that happened to bring it.
        parent = self._context(trace if first else Trace())
        return TaskRun(self, self.tracer.start_span(name, parent, self.api.SpanKind.CONSUMER, about | more, links))

    @contextlib.contextmanager
    def ask_model(self, url: str, model: str) -> Iterator[Span]:
        """Make the span of one question to a model."""
        where = urlsplit(url)
        about = {"server.address": where.hostname or "", "server.port": where.port or 443}
        more = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": model}
        with self._inner(f"chat {model}", self.api.SpanKind.CLIENT, about | (more if self.gen_ai else {})) as span:
            yield span

    @contextlib.contextmanager
    def use_tool(self, name: str) -> Iterator[Span]:
        """Make the span of one tool that a model uses."""
        about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name} if self.gen_ai else {}
        with self._inner(f"execute_tool {name}", self.api.SpanKind.INTERNAL, about) as span:
            yield span

    @contextlib.contextmanager
    def _inner(self, name: str, kind: Any, about: Mapping[str, Any]) -> Iterator[Span]:
        with self._current(name, kind, about, None) as span:
            try:
                yield span
            except Exception as error:
                self.note_error(span, str(getattr(error, "code", type(error).__name__)))
                raise

    def _current(self, name: str, kind: Any, about: Mapping[str, Any],
                 parent: Context | None) -> AbstractContextManager[Span]:
        """Make a span and let it be the current one; texts of exceptions stay out of it, for they may hold data."""
        return self.tracer.start_as_current_span(
            name, parent, kind, about, record_exception=False, set_status_on_exception=False)


class TaskRun:
    """The span of one run of a task."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self.tracing, self.span = tracing, span

    def current(self) -> AbstractContextManager[Span]:
        """Let the span be the current one for what begins in the block."""
        return self.tracing.api.use_span(  # type: ignore[no-any-return]
            self.span, record_exception=False, set_status_on_exception=False)

    def headers(self) -> dict[str, str]:
        """Return the headers that carry this trace on."""
        carrier: dict[str, str] = {}
        self.tracing.w3c.inject(carrier, self.tracing.api.set_span_in_context(self.span))
        return carrier

    def note_failure(self, code: str) -> None:
        """Mark the run as failed."""
        self.tracing.note_error(self.span, code)

    def end(self) -> None:
        """End the span."""
        self.span.end()
