"""Traces with the real SDK of OpenTelemetry: over a client, a gate in a process of its own, and a worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from asyncgate.clients import AsyncGate, SyncGate
from asyncgate.clients.worker import Fail, Job, Retry, Worker
from asyncgate.parts.model.wire import Created
from asyncgate.parts.process.spans import OPT_IN_VARIABLE, PROVIDER_VARIABLE, find_tracing
from tests.conftest import TOKEN, Live, Served
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Via = Literal["rest", "mcp"]


class NotOfTheSdk(TracerProvider):
    """No spans of the SDK of MCP: it keeps the first tracer that it gets, and would trace for later tests, too."""

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **named: Any) -> trace.Tracer:
        """Return a tracer, which makes nothing for the SDK."""
        if instrumenting_module_name == "mcp-python-sdk":
            return trace.NoOpTracer()
        return super().get_tracer(instrumenting_module_name, *args, **named)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A provider of spans in this process: what it keeps."""
    kept, provider = InMemorySpanExporter(), NotOfTheSdk(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)   # the public way sets it for good
    yield kept
    provider.shutdown()


class TracedGate:
    """A gate with a provider of its own, and the spans that it has ended."""

    def __init__(self, start: Any, file: Path) -> None:
        os.environ["SPANS_FILE"] = str(file)
        self.file = file
        self.live: Live = start(program=(str(ROOT / "tests" / "support" / "traced_gate.py"),))

    def spans(self, trace_id: str = "") -> list[dict[str, Any]]:
        """Return the spans of a trace."""
        told = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [span for span in told if trace_id in span["context"]["trace_id"]]


@pytest.fixture
def traced(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TracedGate:
    monkeypatch.setenv("SPANS_FILE", "")
    return TracedGate(start, tmp_path / "spans")


@asynccontextmanager
async def working(url: str, **tasks: Any) -> AsyncIterator[Worker]:
    """Run a worker with these functions."""
    worker = Worker(url, "w", token=TOKEN, state=None)
    for type, function in tasks.items():
        worker.task(type)(function)
    serving = asyncio.create_task(worker.serve())
    try:
        yield worker
    finally:
        worker.stop()
        await serving


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Return the trace and the id of a span."""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def header_of(span: ReadableSpan) -> str:
    """Return the traceparent of a span."""
    return "-".join(("00", *ids(span), f"{span.context.trace_flags:02x}"))


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def links_of(span: ReadableSpan) -> list[str]:
    return [f"{link.context.trace_id:032x}" for link in span.links]


def operations(told: list[dict[str, Any]]) -> set[str]:
    return {span["attributes"].get("asyncgate.operation", "") for span in told}


@pytest.mark.parametrize("via", ["rest", "mcp"])
async def test_a_trace_goes_from_the_creator_over_the_gate_to_the_first_run_and_a_retry_links_to_it(
        traced: TracedGate, spans: InMemorySpanExporter, via: Via) -> None:
    runs: list[int] = []

    def flaky(payload: Any) -> Any:
        runs.append(1)
        if len(runs) == 1:
            raise Retry(after=0, code="once")
        return payload

    async with asyncio.timeout(PATIENCE_SECONDS), AsyncGate(traced.live.url, TOKEN, via=via, agent_id="ada") as gate:
        with trace.get_tracer("test").start_as_current_span("caller") as caller:
            handle = await gate.submit("flaky", 7)
        async with working(traced.live.url, flaky=flaky):
            assert await handle.result() == 7
        task = await handle.task()

    root = f"{caller.get_span_context().trace_id:032x}"
    (created,), (first, second) = named(spans, "asyncgate create_task flaky"), named(spans, "asyncgate process flaky")
    assert (created.kind, first.kind, second.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CONSUMER)
    assert ids(created)[0] == ids(first)[0] == root
    assert parent_of(created) == f"{caller.get_span_context().span_id:016x}"
    assert task.traceparent is not None
    assert task.traceparent.split("-")[1:3] == [root, parent_of(first)]
    if via == "rest":
        assert parent_of(first) == ids(created)[1]
    assert (ids(second)[0] != root, parent_of(second), links_of(second)) == (True, "", [root])
    assert [(span.status.is_ok, (span.attributes or {})["asyncgate.task_id"]) for span in (first, second)] == [
        (False, handle.task_id), (True, handle.task_id)]
    # What the gate did for each of them is in the same trace.
    assert {"create_task", "fail"} <= operations(traced.spans(root))
    assert "complete" in operations(traced.spans(ids(second)[0]))
    (claimed, *_) = [span for span in traced.spans() if span["links"]]
    assert claimed["attributes"]["asyncgate.operation"] == "lease_next"
    assert root in claimed["links"][0]["context"]["trace_id"]


async def test_what_a_function_calls_is_below_its_run(live: Live, spans: InMemorySpanExporter) -> None:
    async def outer(payload: Any, job: Job) -> Any:
        async with AsyncGate(live.url, TOKEN, agent_id="ada") as gate:
            return (await gate.submit("inner", None)).task_id, job.trace

    async with asyncio.timeout(PATIENCE_SECONDS), AsyncGate(live.url, TOKEN, agent_id="ada") as gate:
        async with working(live.url, outer=outer):
            inner, passed_on = await (await gate.submit("outer", None)).result()
        kept = (await gate.get_task(inner)).traceparent

    (run,), (created,) = named(spans, "asyncgate process outer"), named(spans, "asyncgate create_task inner")
    assert parent_of(created) == ids(run)[1]
    assert ids(created)[0] == ids(run)[0]
    assert kept == header_of(created)
    assert passed_on == {"traceparent": header_of(run)}


async def test_a_failed_run_and_a_refused_call_are_marked_and_no_text_of_an_error_is_in_a_span(
        live: Live, spans: InMemorySpanExporter) -> None:
    def bad(payload: Any) -> Any:
        raise Fail("a secret of the payload", code="no_such_page")

    async with asyncio.timeout(PATIENCE_SECONDS), AsyncGate(live.url, TOKEN, agent_id="ada") as gate:
        async with working(live.url, bad=bad):
            await (await gate.submit("bad", None)).ended()
        with pytest.raises(Exception, match="no task"):
            await gate.get_task("none")

    (run,), refused = named(spans, "asyncgate process bad"), named(spans, "asyncgate get_task")[-1]
    assert [(span.status.is_ok, (span.attributes or {})["error.type"]) for span in (run, refused)] == [
        (False, "no_such_page"), (False, "task_not_found")]
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_a_program_gets_the_trace_of_its_task_in_its_environment(live: Live) -> None:
    made = httpx_post(live, "/v1/tasks", {"type": "show", "payload": None, "agent_id": "ada"}, traceparent=PARENT,
                      tracestate="a=1")
    command = [sys.executable, "-m", "asyncgate", "worker", "--url", live.url, "--worker-id", "w", "--type", "show",
               "--forget", "--", "sh", "-c", 'echo "\\"$TRACEPARENT $TRACESTATE\\""']
    worker = subprocess.Popen(command, env={**os.environ, "ASYNCGATE_API_KEY": TOKEN}, stderr=subprocess.DEVNULL)
    try:
        with SyncGate(live.url, TOKEN) as gate:
            assert gate.handle(made["task_id"]).result(PATIENCE_SECONDS) == f"{PARENT} a=1"
    finally:
        worker.terminate()
        worker.wait(PATIENCE_SECONDS)


def httpx_post(live: Live, path: str, body: Any, **headers: str) -> Any:
    """Post as a client does that knows nothing of OpenTelemetry."""
    import httpx2

    answer = httpx2.post(live.url + path, json=body, headers={"authorization": f"Bearer {TOKEN}", **headers})
    return answer.raise_for_status().json()


# Without a provider.


@pytest.mark.parametrize(("headers", "meta", "expected"), [
    ({"traceparent": PARENT, "tracestate": "a=1"}, {}, (PARENT, "a=1")),
    ({}, {"traceparent": PARENT, "tracestate": "a=1"}, (PARENT, "a=1")),
    ({"traceparent": PARENT.replace("0af", "0bf")}, {"traceparent": PARENT}, (PARENT, None)),
    ({"traceparent": "00-zz"}, {}, (None, None)), ({}, {"traceparent": "00-zz"}, (None, None)),
    ({}, {"traceparent": 7, "tracestate": []}, (None, None)), ({}, {"traceparent": {"a": 1}}, (None, None)),
    ({}, {"tracestate": "a=1"}, (None, None)), ({}, {"traceparent": PARENT + "\n"}, (None, None))])
@pytest.mark.parametrize("face", ["rest", "mcp", "bare"])
async def test_a_gate_keeps_the_trace_of_a_creator_without_a_provider(
        served: Served, face: str, headers: dict[str, str], meta: dict[str, Any],
        expected: tuple[str | None, str | None]) -> None:
    if face == "rest" and meta:
        headers, expected = {**headers}, (PARENT.replace("0af", "0bf"), None) if headers else (None, None)
    lines = list(headers.items())
    task: dict[str, Any] = {"type": "demo", "payload": None, "agent_id": "ada"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "asyncgate.create_task", "arguments": task, "_meta": meta}}
    if face == "rest":
        await served.post("/v1/tasks", task, headers=lines)
    else:
        accept = [("accept", "application/json, text/event-stream")] if face == "mcp" else []
        answer = await served.post("/mcp", message, headers=[*lines, *accept])
        assert "error" not in answer, answer

    (offer,) = (await served.post("/v1/leases/claim", {"worker_id": "w1"}))["tasks"]

    assert (offer.get("traceparent"), offer.get("tracestate")) == expected


@pytest.mark.parametrize("variables", [{}, {PROVIDER_VARIABLE: "no_such_provider"}])
def test_without_a_provider_nothing_is_imported_and_a_broken_one_keeps_nobody_from_work(
        variables: dict[str, str]) -> None:
    script = ("import sys; from asyncgate import Gate, Settings; gate = Gate(Settings(api_key='x'));"
              "print(gate.tracing, 'opentelemetry' in sys.modules)")

    ran = subprocess.run([sys.executable, "-c", script], env={**os.environ, **variables}, cwd=ROOT, check=True,
                         capture_output=True, text=True)

    assert ran.stdout.split() == ["None", str(bool(variables))]
    assert ("OpenTelemetry's provider cannot be used" in ran.stderr) == bool(variables)


def test_a_provider_that_only_the_environment_names_is_loaded() -> None:
    script = "from asyncgate.parts.process.spans import find_tracing; print(find_tracing() is not None)"

    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True,
                         env={**os.environ, PROVIDER_VARIABLE: "sdk_tracer_provider"})

    assert ran.stdout.strip() == "True"


# Conventions.


async def test_the_conventions_that_may_change_are_used_where_they_are_asked_for(
        spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    monkeypatch.setenv(OPT_IN_VARIABLE, "http, messaging ,gen_ai_latest_experimental")
    served = await serve()
    tracing = find_tracing()
    assert tracing
    with tracing.call("create_task", {"type": "demo"}) as span:
        tracing.note_created(span, Created("t1", "queued"))
    tracing.begin_run({"task_id": "t1", "type": "demo", "attempt": 0, "fence": 1}).end()
    await served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "asyncgate.list_tasks", "arguments": {}}})

    about = {span.name: dict(span.attributes or {}) for span in spans.get_finished_spans()}
    assert about["create_task demo"] == {
        "asyncgate.operation": "create_task", "asyncgate.task_type": "demo", "asyncgate.task_id": "t1",
        "messaging.system": "asyncgate", "messaging.operation.name": "create_task", "messaging.operation.type": "send",
        "messaging.destination.name": "demo", "messaging.message.id": "t1"}
    assert about["process demo"]["messaging.operation.type"] == "process"
    assert about["tools/call asyncgate.list_tasks"]["mcp.method.name"] == "tools/call"
    assert about["tools/call asyncgate.list_tasks"]["gen_ai.tool.name"] == "asyncgate.list_tasks"


async def test_without_being_asked_for_they_are_not_used(spans: InMemorySpanExporter, serve: Any) -> None:
    served = await serve()
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    await served.call("GET", "/v1/tasks/none")

    about = {span.name: dict(span.attributes or {}) for span in spans.get_finished_spans()}
    assert set(about) == {"POST /v1/tasks", "GET /v1/tasks/{task_id}"}
    assert about["GET /v1/tasks/{task_id}"] == {
        "http.request.method": "GET", "http.route": "/v1/tasks/{task_id}", "http.response.status_code": 404,
        "asyncgate.operation": "get_task", "asyncgate.task_id": "none", "asyncgate.refusal": "task_not_found"}


async def test_a_creator_without_a_trace_belongs_to_that_of_the_gate(spans: InMemorySpanExporter, serve: Any) -> None:
    served = await serve()
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})

    (span,) = named(spans, "POST /v1/tasks")
    kept = (await served.get(f"/v1/tasks/{made['task_id']}"))["traceparent"]
    assert kept == header_of(span)
