"""`asyncgate mcp`: the official SDK's client starts it as a host does, in both eras."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.clients.http import Exchange
from asyncgate.commands import mcp_stdio
from asyncgate.commands.mcp_stdio import Bridge, encode_header
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS, patient_mcp_client
from tests.support.portal import FOREIGN, open_portal
from tests.support.programs import anyio_backend

__all__ = ["anyio_backend"]
pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-for-tests"
RUN = ["-c", "import sys; from asyncgate import main; sys.exit(main())", "mcp"]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ALONE: dict[str, Any] = {"headers": {"authorization": f"Bearer {TOKEN}"}, "trust_env": False,
                         "timeout": PATIENCE_SECONDS}
eras = pytest.mark.parametrize("mode", ["legacy", "auto"])


def surroundings(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCGATE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@contextlib.asynccontextmanager
async def host(mode: str, *options: str, **more: str) -> AsyncIterator[Any]:
    """A client that has started the program with these options."""
    from mcp import StdioServerParameters

    started = StdioServerParameters(command=sys.executable, args=[*RUN, *options], env=surroundings(**more))
    async with patient_mcp_client()(started, mode=mode) as client:
        yield client


def said_to(lines: list[Any], *options: str, **more: str) -> list[Any]:
    """Write lines to the program, close its input, and return what it wrote."""
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    ran = subprocess.run([sys.executable, *RUN, *options], input=text, env=surroundings(**more), capture_output=True,
                         text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


async def story(client: Any) -> dict[str, Any]:
    """Create, lease and complete a task, and return its record."""
    made = await client.call_tool("asyncgate.create_task", {"type": "demo", "payload": {"word": "zwölf"}})
    offers = await client.call_tool("asyncgate.lease_next", {"worker_id": "w1"})
    (offer,) = offers.structured_content["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
    await client.call_tool("asyncgate.complete", {**held, "artifacts": [{"uri": "file:///x"}]})
    task = await client.call_tool("asyncgate.get_task", {"task_id": made.structured_content["task_id"]})
    content: dict[str, Any] = task.structured_content
    return content


@eras
async def test_a_host_works_with_a_running_gate(live: Any, mode: str) -> None:
    async with host(mode, "--url", live.url, ASYNCGATE_API_KEY=TOKEN) as client:
        task = await story(client)

    assert task["status"] == "succeeded"
    assert task["payload"] == {"word": "zwölf"}


async def test_an_option_names_the_agent_who_calls_and_no_call_may_name_another(live: Any) -> None:
    async with host("auto", "--url", live.url, "--agent", "ada", ASYNCGATE_API_KEY=TOKEN) as client:
        made = await client.call_tool("asyncgate.create_task", {"type": "demo", "payload": None})
        other = await client.call_tool("asyncgate.lease_next", {"worker_id": "w1"})
        task = await client.call_tool("asyncgate.get_task", {"task_id": made.structured_content["task_id"]})

    owner = task.structured_content["created_by"]
    assert (owner["kind"], owner["id"]) == ("agent", "ada")
    assert other.meta["asyncgate/error"]["code"] == "invalid_request"


@eras
async def test_a_host_works_with_a_gate_of_its_own_and_finds_everything_again(tmp_path: Path, mode: str) -> None:
    options = ("--database", f"sqlite:///{tmp_path}/gate.db")

    async with host(mode, *options) as client:
        task = await story(client)
    async with host(mode, *options) as client:
        again = await client.call_tool("asyncgate.get_task", {"task_id": task["task_id"]})

    assert task["status"] == "succeeded"
    assert again.structured_content == task


async def test_names_with_underscores_are_listed_on_demand() -> None:
    async with host("auto", "--database", "memory://", "--underscores") as client:
        assert {tool.name[:10] for tool in (await client.list_tools()).tools} == {"asyncgate_"}


@eras
async def test_refusals_reach_the_host_as_they_are(mode: str) -> None:
    async with host(mode, "--database", "memory://") as client:
        result = await client.call_tool("asyncgate.get_task", {"task_id": "nobody"})

    assert result.is_error
    assert result.meta["asyncgate/error"]["code"] == "task_not_found"


@eras
@pytest.mark.parametrize("where", ["a running gate", "a gate of its own"])
async def test_a_host_is_told_of_progress_while_it_waits(live: Any, mode: str, where: str) -> None:
    options = ("--url", live.url) if where == "a running gate" else ("--database", "memory://")
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def tell(*heard: Any) -> None:
        told.put_nowait(heard)

    async with asyncio.timeout(PATIENCE_SECONDS), host(mode, *options, ASYNCGATE_API_KEY=TOKEN) as client:
        running = asyncio.create_task(client.call_tool(
            "asyncgate.run_task", {"type": "demo", "payload": 1, "agent_id": "ada"}, progress_callback=tell))
        offers = await client.call_tool("asyncgate.lease_next", {"worker_id": "w1", "wait_seconds": 30})
        (offer,) = offers.structured_content["tasks"]
        held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
        await client.call_tool("asyncgate.report_progress", {
            **held, "progress": {"done": 1, "total": 2, "message": "half"}})
        while (await told.get())[1:] != (2, "half"):
            pass
        await client.call_tool("asyncgate.complete", {**held, "result": {"n": 7}})
        result = await running

    assert result.structured_content["result"]["result"] == {"n": 7}


async def test_a_host_may_subscribe_through_a_running_gate(live: Any) -> None:
    options, watched = ("--url", live.url, "--agent", "ada"), ["asyncgate://obligations"]
    async with (asyncio.timeout(PATIENCE_SECONDS), host("auto", *options, ASYNCGATE_API_KEY=TOKEN) as client,
                client.listen(resource_subscriptions=watched) as heard):
        await client.call_tool("asyncgate.create_task", {"type": "demo", "payload": None})
        assert (await anext(heard)).uri == "asyncgate://obligations"


def test_a_gate_of_its_own_offers_no_subscriptions() -> None:
    (answer,) = said_to([{"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen"}], "--database", "memory://")

    assert answer["error"]["code"] == -32601


CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "asyncgate.get_config", "arguments": {}}}


def test_a_wrong_credential_is_an_error_that_says_so(live: Any) -> None:
    (answer,) = said_to([CALL], "--url", live.url, "--token", "wrong")

    assert answer["id"] == 3
    assert (answer["error"]["code"], answer["error"]["data"]["error"]) == (-32001, "unauthenticated")


def test_a_good_call_leaves_nothing_in_the_log_of_the_host() -> None:
    ran = subprocess.run([sys.executable, *RUN, "--database", "memory://"], input=json.dumps(CALL) + "\n",
                         env=surroundings(), capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    assert json.loads(ran.stdout)["id"] == 3
    assert "INFO" not in ran.stderr


def test_a_call_that_the_host_cancels_leaves_nothing_in_its_log() -> None:
    waits = {"name": "asyncgate.lease_next", "arguments": {"worker_id": "w1", "wait_seconds": 30}}
    lines = [{**CALL, "id": 1, "params": waits}, {"jsonrpc": "2.0", "id": 2, "method": "ping"},
             {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}]
    call, ping, cancel = [json.dumps(line) + "\n" for line in lines]

    with subprocess.Popen([sys.executable, *RUN, "--database", "memory://"], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=surroundings()) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(call + ping)
        program.stdin.flush()
        answered = json.loads(program.stdout.readline())        # and the call is under way
        more, log = program.communicate(cancel, timeout=PATIENCE_SECONDS)

    assert (answered["id"], more, program.returncode) == (2, "", 0)
    assert "ERROR" not in log


@pytest.mark.parametrize("options", [["--url", "http://127.0.0.1:9"], ["--database", "memory://"]])
def test_ctrl_c_ends_it_while_the_host_keeps_its_end_open(options: list[str]) -> None:
    with subprocess.Popen([sys.executable, *RUN, *options], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=surroundings()) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("no JSON\n")
        program.stdin.flush()
        program.stdout.readline()       # and it reads on
        program.send_signal(signal.SIGINT)
        try:
            status = program.wait(PATIENCE_SECONDS)
        finally:
            program.kill()      # it would not end with the test
        assert program.stderr is not None
        log = program.stderr.read()

    assert status == 0
    assert "Traceback" not in log


def test_no_gate_is_an_error_that_says_what_to_do() -> None:
    (answer,) = said_to([CALL], "--url", "http://127.0.0.1:9", "--patience", "0.1")

    assert (answer["id"], answer["error"]["code"]) == (3, -32603)
    assert "asyncgate dev" in answer["error"]["message"]


START = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a-host", "version": "1"}}}


async def test_a_host_that_is_started_before_its_gate_and_one_whose_gate_restarts_notice_nothing(start: Any) -> None:
    port = free_port()
    wrote = asyncio.Queue[dict[str, Any]]()
    lines = queue.Queue[bytes]()
    async with httpx2.AsyncClient(**ALONE) as client:
        exchange = Exchange(f"http://127.0.0.1:{port}", TOKEN)
        bridge = Bridge(client, exchange, "/mcp", lambda line: wrote.put_nowait(json.loads(line)), streams=True,
                        patience_seconds=PATIENCE_SECONDS)
        serving = asyncio.create_task(bridge.serve(lines.get))

        lines.put(json.dumps(START).encode())
        first = await asyncio.to_thread(start, port=port)
        assert (await wrote.get())["result"]["protocolVersion"] == "2025-11-25"
        await asyncio.to_thread(first.kill)
        lines.put(json.dumps(CALL).encode())
        await asyncio.to_thread(start, port=port)
        assert (await wrote.get())["result"]["isError"] is False
        lines.put(b"")
        await serving


async def test_while_a_gate_restarts_a_model_is_not_told_to_start_another(start: Any) -> None:
    gate, wrote = await asyncio.to_thread(start), list[bytes]()
    async with httpx2.AsyncClient(**ALONE) as client:
        bridge = Bridge(client, Exchange(gate.url, TOKEN), "/mcp", wrote.append, streams=True)
        for line in (START, CALL):
            left = iter([json.dumps(line).encode(), b""])
            await bridge.serve(lambda left=left: next(left))    # type: ignore[misc]
            if gate.process.returncode is None:
                await asyncio.to_thread(gate.kill)

    message = json.loads(wrote[-1])["error"]["message"]
    assert "may be restarting" in message
    assert "asyncgate dev" not in message


async def test_a_call_that_may_have_been_carried_out_is_repeated_only_if_that_does_no_harm() -> None:
    asked = list[int]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)     # and the connection breaks

    def calling(operation: str, **arguments: Any) -> dict[str, Any]:
        return {**CALL, "params": {"name": f"asyncgate_{operation}", "arguments": arguments}}

    tries = []
    for line in (calling("create_task", type="demo"), calling("create_task", type="demo", idempotency_key="k"),
                 calling("get_task", task_id="t"), START):
        asked.clear()
        [told] = await bridged([line], answer, patience_seconds=0.5)
        assert told["error"]["code"] == -32603
        tries.append(len(asked) > 1)

    assert tries == [False, True, True, True]


async def bridged(lines: list[Any], answer: Answer, patience_seconds: float = 0.0) -> list[Any]:
    """Pass lines, and then the end of the input, to a bridge to a server that answers so; return what it wrote."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await answer(reader, writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, httpx2.AsyncClient() as client:
        exchange = Exchange(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
        wrote = list[bytes]()
        left = iter([*(json.dumps(line).encode() + b"\n" for line in lines), b""])
        bridge = Bridge(client, exchange, "/mcp", wrote.append, streams=True, patience_seconds=patience_seconds)
        await bridge.serve(lambda: next(left))
    return [json.loads(line) for line in wrote]


async def test_a_call_at_the_end_of_the_input_is_answered_however_long_it_takes(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_stdio, "FINISH_SECONDS", 0.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)        # long after the end of the input
        text = json.dumps({"jsonrpc": "2.0", "id": 3, "result": {}})
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())

    assert await bridged([CALL], answer) == [{"jsonrpc": "2.0", "id": 3, "result": {}}]


async def test_a_call_that_waits_for_work_ends_soon_after_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_stdio, "FINISH_SECONDS", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):      # until the client goes
            pass

    waits = {"name": "asyncgate.lease_next", "arguments": {"worker_id": "w1", "wait_seconds": 30}}
    assert await bridged([{**CALL, "params": waits}], answer) == []


async def test_an_answer_that_cannot_be_unpacked_is_an_error_too() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnone")

    (told,) = await bridged([CALL], answer)

    assert (told["id"], told["error"]["code"]) == (3, -32603)


@pytest.mark.parametrize("what", ["a page", "the JSON of another product", "JSON without an end", "no such path"])
def test_what_is_no_gate_is_an_error_that_says_so(what: str) -> None:
    with open_portal() as portal:
        portal.answer = FOREIGN[what]
        [told] = said_to([{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}], "--url", portal.url)

    assert told["id"] == 1
    assert f"what answers at {portal.url} is not an AsyncGate, or is another version:" in told["error"]["message"]


def test_what_is_no_message_is_refused_and_notifications_are_not_answered() -> None:
    lines = ["nonsense\n", "[]\n", {**CALL, "id": 2.0}, "\n", {"jsonrpc": "2.0", "method": "notifications/initialized"},
             {"jsonrpc": "2.0", "id": 1, "result": {}}]

    answers = said_to(lines, "--database", "memory://")

    assert [(answer["id"], answer["error"]["code"]) for answer in answers] == [
        (None, -32700), (None, -32700), (None, -32600)]


def test_two_ways_at_once_are_a_mistake() -> None:
    ran = subprocess.run([sys.executable, *RUN, "--url", "http://x", "--database", "memory://"], env=surroundings(),
                         capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert ran.returncode == 2
    assert "not both" in ran.stderr


@pytest.mark.parametrize(("text", "header"), [
    ("asyncgate.create_task", "asyncgate.create_task"), ("ü", "=?base64?w7w=?="), (" x", "=?base64?IHg=?="),
    ("a\nb", "=?base64?YQpi?=")])
def test_names_fit_into_headers(text: str, header: str) -> None:
    assert encode_header(text) == header
