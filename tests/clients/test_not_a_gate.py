"""What answers is not a gate: a wrong URL, a captive portal, another product."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients import AsyncGate, NotAGate, SyncGate, Unreachable
from asyncgate.clients.http import AsyncHttp, CheckedReply, find_reply_flaw
from asyncgate.clients.operations import CALLS
from asyncgate.clients.worker import Worker
from asyncgate.conformance.forks import read_at_start
from asyncgate.parts.operations import OPERATIONS
from tests.clients.test_worker import at_work, ended, gate, until_so
from tests.conftest import TOKEN
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS
from tests.support.portal import FOREIGN, PAGE, Portal, open_portal

__all__ = ["gate"]
pytestmark = pytest.mark.anyio
AT_START = read_at_start(os.environ)        # with another one a command starts in no fork, and takes ten times as long
SAYING = "is not an AsyncGate, or is another version: "
# These replies are so short that another product may send the same; so the headers of their answers tell.
SHORT_REPLIES = {name for name, op in OPERATIONS.items() if op.gives.__name__ in ("Ok", "Acked", "Replayed")}


@pytest.fixture
def portal() -> Iterator[Portal]:
    with open_portal() as portal:
        yield portal


@pytest.mark.parametrize(("via", "what"), [*(("rest", what) for what in FOREIGN), ("mcp", "a page"),
                                           ("mcp", "the JSON of another product"), ("mcp", "no such path")])
async def test_a_client_says_at_once_that_no_gate_answers(portal: Portal, what: str, via: Any) -> None:
    portal.answer = FOREIGN[what]
    async with AsyncGate(portal.url, TOKEN, via=via, agent_id="ada") as client:
        with pytest.raises(NotAGate, match=f"what answers at {portal.url} {SAYING}.+") as error:
            await client.get_task("t1")

    assert isinstance(error.value, Unreachable)
    assert "\n" not in str(error.value)


@each("operation", sorted(CALLS.keys() - SHORT_REPLIES))
def test_the_reply_of_another_product_is_no_reply_of_any_operation(operation: str) -> None:
    for body in (b"{}", b'{"ok":true}', b'{"status":"ok","message":"hello"}', b'{"data":[],"tasks":{}}'):
        assert find_reply_flaw(body, CALLS[operation].reply)


@pytest.mark.parametrize("body", [b'{"ok":true}', b'{"ok":true,"status":"succeeded"}'])
async def test_a_short_reply_without_a_header_of_a_gate_is_of_another_product(portal: Portal, body: bytes) -> None:
    portal.answer = (200, "application/json", body)
    async with AsyncGate(portal.url, TOKEN, agent_id="ada") as client:
        for operation in sorted(SHORT_REPLIES & CALLS.keys()):
            ids = dict.fromkeys(re.findall(r"{(\w+)}", CALLS[operation].path), "x")
            with pytest.raises(NotAGate, match=f"its answer to {operation} lacks the header X-AsyncGate"):
                await client.call(operation, **ids)


async def end_behind_a_portal(gate: AsyncHttp, state: Path, body: bytes, is_seen: Callable[[int], bool]) -> Any:
    """Let a worker end its task while a portal answers this, until that `is_seen`; return the task as it ended.

    `is_seen` is given how often the portal has answered since.
    """
    with open_portal(gate.url) as portal:
        worker, begun, finish = Worker(portal.url, "w", token=TOKEN, state=state), asyncio.Event(), asyncio.Event()

        @worker.task("t")
        async def work(page: int) -> int:
            begun.set()
            await finish.wait()
            return page + 1

        async with at_work(worker):
            task = await gate.call("create_task", type="t", payload=1)
            await begun.wait()
            portal.answer, before = (200, "application/json", body), portal.answered
            finish.set()
            await until_so(lambda: is_seen(portal.answered - before))
            portal.answer = None

            return await ended(gate, task["task_id"])


async def test_what_a_portal_took_is_delivered_to_the_gate(gate: AsyncHttp, tmp_path: Path) -> None:
    done = await end_behind_a_portal(gate, tmp_path, b'{"ok":true}', lambda answers: answers >= 2)

    assert (done["status"], done["result"]["result"]) == ("succeeded", 2)


@pytest.mark.parametrize("header", ["x-asyncgate", "content-security-policy"])
async def test_a_gate_is_known_by_its_mark_or_by_the_policy_of_those_before_it(gate: AsyncHttp, header: str) -> None:
    with open_portal(gate.url) as portal:
        portal.kept = (header,)
        async with AsyncGate(portal.url, TOKEN, agent_id="ada") as client:
            made = await client.create_task("t", payload=1)

            assert (await client.cancel_task(made.task_id)).ok


async def test_a_wait_for_a_result_ends_at_once_if_no_gate_has_ever_answered(portal: Portal) -> None:
    async with AsyncGate(portal.url, TOKEN, agent_id="ada") as client:
        with pytest.raises(NotAGate, match="its answer to get_task is HTML"):
            await client.handle("t1").result()


class Watched(AsyncGate):
    """A client that keeps the reply of its last call."""

    async def send(self, operation: str, fields: Mapping[str, Any]) -> CheckedReply:
        self.last = await super().send(operation, fields)
        return self.last


@pytest.mark.parametrize("via", ["rest", "mcp"])
async def test_a_caller_gets_what_the_check_of_the_reply_decoded(gate: AsyncHttp, via: Any) -> None:
    async with Watched(gate.url, TOKEN, via=via, agent_id="ada") as client:
        made = await client.create_task("t", payload=1)

        assert made is client.last.decoded
        assert (await client.call("get_task", task_id=made.task_id))["payload"] == 1


def test_a_blocking_client_says_the_same(portal: Portal) -> None:
    with SyncGate(portal.url, TOKEN, agent_id="ada") as client, pytest.raises(NotAGate, match=SAYING):
        client.submit("ocr.page")


# Workers.


async def test_a_worker_at_work_outlasts_a_portal_and_delivers_its_result_to_the_gate(
        gate: AsyncHttp, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    done = await end_behind_a_portal(gate, tmp_path, b'{"status":"ok"}',
                                     lambda answers: f"{SAYING}its answer to lease_next" in caplog.text)

    assert (done["status"], done["result"]["result"]) == ("succeeded", 2)
    assert caplog.text.count("; retrying") == 1


@pytest.mark.parametrize("what", FOREIGN)
async def test_a_worker_that_begins_at_something_else_ends(portal: Portal, what: str) -> None:
    portal.answer = FOREIGN[what]
    worker = Worker(portal.url, "w", token=TOKEN, state=None)
    worker.task("t")(lambda page: page)

    with pytest.raises(NotAGate, match=SAYING):
        await worker.serve()


def test_the_command_of_a_worker_that_begins_at_something_else_ends(portal: Portal, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "asyncgate", "worker", "echo", "--url", portal.url],
                          env={"HOME": str(tmp_path), **AT_START}, capture_output=True, text=True, check=False)

    begun, last = done.stderr.splitlines()
    assert (done.returncode, f"takes echo of {portal.url}" in begun) == (7, True)
    assert last == f"Error: what answers at {portal.url} {SAYING}its answer to whoami is HTML"


# Commands.

COMMANDS = ["list-tasks", "get-task t1", "create-task --type echo --payload 1", "run-task --type echo --payload 1",
            "wait t1", "tail", "top", "list-tasks --watch 1s", "usage", "lease-next --worker-id w", "login-link",
            "bulk cancel --type x"]


@pytest.mark.parametrize("what", ["a page", "lists of another shape"])
def test_each_command_ends_in_one_line_with_its_exit_status(portal: Portal, what: str, tmp_path: Path) -> None:
    portal.answer = FOREIGN[what]
    running = [subprocess.Popen([sys.executable, "-m", "asyncgate", *command.split(), "--url", portal.url],
                                env={"HOME": str(tmp_path), **AT_START}, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
               for command in COMMANDS]

    for command, process in zip(COMMANDS, running, strict=True):
        output = process.communicate(timeout=2 * PATIENCE_SECONDS)[1]
        assert (process.returncode, output.count("\n"), SAYING in output) == (7, 1, True), f"{command}: {output}"


def test_events_of_something_else_are_no_receipts(portal: Portal, tmp_path: Path) -> None:
    portal.answer = FOREIGN["events of something else"]

    done = subprocess.run([sys.executable, "-m", "asyncgate", "tail", "--url", portal.url],
                          env={"HOME": str(tmp_path), **AT_START}, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr.count("\n"), SAYING in done.stderr) == (7, 1, True), done.stderr


def test_what_a_portal_says_cannot_steer_the_terminal(portal: Portal, tmp_path: Path) -> None:
    portal.answer = (200, "application/json", b'{"task_id":"t","status":"\\u001b[2J"}')

    done = subprocess.run([sys.executable, "-m", "asyncgate", "get-task", "t1", "--url", portal.url],
                          env={"HOME": str(tmp_path), **AT_START}, capture_output=True, text=True, check=False)

    assert done.returncode == 7
    assert "\x1b" not in done.stderr


async def test_a_page_behind_a_gate_that_was_seen_is_an_outage(gate: AsyncHttp) -> None:
    with open_portal(gate.url) as portal:
        async with AsyncGate(portal.url, TOKEN, agent_id="ada") as client:
            handle = await client.submit("t", 1)
            waiting = asyncio.create_task(handle.result())
            await until_so(lambda: portal.passed >= 2)
            portal.answer = PAGE
            await until_so(lambda: portal.answered >= 2)
            portal.answer = None
            [offer] = (await gate.call("lease_next", worker_id="w", accept_types=["t"]))["tasks"]
            await gate.call("complete", worker_id="w", task_id=offer["task_id"], lease_id=offer["lease_id"], result=3)

            assert await waiting == 3
