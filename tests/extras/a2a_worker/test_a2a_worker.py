"""Agents of A2A as workers: a server of a2a-sdk over each binding, and the gate's own face."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from functools import partial
from typing import Any

import httpx2
import pytest

from asyncgate.extras.a2a_worker.remote import Away, Refused, read_answer
from tests.conftest import TOKEN
from tests.extras.a2a_worker.conftest import Bridge
from tests.support.patience import poll

pytest.importorskip("a2a.server", reason="a2a-sdk is not installed: pip install 'asyncgate[test]'")
WAYS = [("JSONRPC", "1.0"), ("HTTP+JSON", "1.0"), ("JSONRPC", "0.3")]
OWN_WORKER = """
import pathlib, sys, time
from asyncgate.clients import Fail, Worker
url, token, folder = sys.argv[1:]
worker = Worker(url, "own", token=token, state=None, ttl_seconds=1, concurrency=3)

@worker.task("scan")
def scan(payload, job):
    with open(pathlib.Path(folder) / "calls", "a") as calls:
        print(job.task_id, payload["text"], file=calls, flush=True)
    if "slow" in payload["text"]:
        while not (pathlib.Path(folder) / "go").exists():
            time.sleep(0.02)
    if "ask" in payload["text"]:
        where = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
        answer = job.ask("page", "Which page?", schema=where)
        return {"parts": [{"text": f"{answer.action} {answer.content}"}]}
    return payload["text"].upper()

worker.run()
"""


def end(task: Any) -> tuple[str, Any]:
    """Return how a task has ended."""
    error = task["result"]["error"]
    return task["status"], task["result"]["result"] if error is None else error


def steps_of(bridge: Bridge, task_id: str) -> Any:
    """Return what a task has recorded."""
    return bridge.gate.call("list_steps", task_id=task_id)["steps"]


@pytest.fixture
def opened(bridge: Bridge) -> Bridge:
    """A gate in memory."""
    bridge.open()
    return bridge


@pytest.mark.parametrize(("binding", "version"), WAYS)
def test_an_agent_does_tasks_asks_and_refuses(opened: Bridge, binding: str, version: str) -> None:
    opened.agent(binding, version)
    opened.work("--concurrency", "4")
    asking, signing = opened.create({"text": "ask"}), opened.create("auth")

    assert end(opened.run("read it")) == ("succeeded", "READ IT")
    assert end(opened.run({"page": 3})) == ("succeeded", {"page": 3})
    assert end(opened.run("talk")) == ("succeeded", "just words")
    two = end(opened.run("two"))[1]["artifacts"]
    assert [[next(part[name] for name in ("text", "url") if name in part) for part in artifact["parts"]]
            for artifact in two] == [["1"], ["2", "https://x.example.com/a.pdf"]]
    assert end(opened.run("reject"))[1] == {"code": "rejected", "message": "not my job"}

    assert opened.question(asking)["message"] == "Which page?"
    assert opened.task(asking)["leased_to"] is None
    opened.answer(asking, {"text": "7"})
    assert end(opened.ended(asking)) == ("succeeded", "page 7")

    assert opened.question(signing)["key"].startswith("auth-")
    opened.answer(signing)
    assert end(opened.ended(signing))[0] == "succeeded"
    assert len([line for line in opened.lines("calls") if line.endswith("read it")]) == 1


@pytest.mark.parametrize(("binding", "version"), WAYS)
def test_the_end_comes_over_a_stream_and_nothing_is_asked_for_meanwhile(
        opened: Bridge, binding: str, version: str) -> None:
    opened.agent(binding, version)
    opened.work()
    task_id = opened.create("slow")
    poll(lambda: any(line.startswith("text/event-stream") for line in opened.lines("answers")))
    asked = len(opened.lines("answers"))
    opened.go()

    assert end(opened.ended(task_id)) == ("succeeded", "SLOW")
    assert (asked, len(opened.lines("answers"))) == (3, 4)     # sent, read, followed; read again


def test_an_agent_that_streams_nothing_is_asked_now_and_then(opened: Bridge) -> None:
    opened.agent(streams="no")
    opened.work()
    task_id = opened.create("slow")
    opened.called("answers", 4)
    opened.go()

    assert end(opened.ended(task_id)) == ("succeeded", "SLOW")
    assert {line.partition(";")[0] for line in opened.lines("answers")} == {"application/json"}


def test_what_has_failed_is_sent_again_by_the_next_attempt_and_only_then(opened: Bridge) -> None:
    opened.agent()
    opened.work()
    task = opened.run("fail", max_attempts=2)

    assert end(task) == ("succeeded", "second try")
    assert task["attempt"] == 1
    assert len({line.split()[0] for line in opened.lines("calls")}) == 2


@pytest.mark.parametrize(("binding", "version"), WAYS)
def test_a_killed_worker_takes_the_same_remote_task_up_again(opened: Bridge, binding: str, version: str) -> None:
    opened.agent(binding, version)
    opened.work()
    task_id = opened.create("slow")
    step = poll(lambda: opened.gate.call("list_steps", task_id=task_id)["steps"])[0]
    opened.kill("worker")
    opened.work()
    opened.go()

    assert end(opened.ended(task_id)) == ("succeeded", "SLOW")
    assert [line.split()[0] for line in opened.lines("calls")] == [step["value"]["task_id"]]


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
def test_what_a_worker_has_sent_before_it_died_is_found_although_nothing_is_recorded(
        opened: Bridge, binding: str) -> None:
    address, task_id = opened.agent(binding), opened.create("read it")
    holder = {"worker_id": "dead"}
    [offer] = opened.gate.call("lease_next", **holder, accept_types=["read"])["tasks"]
    sent = {"messageId": f"asyncgate-{task_id}-1", "role": "ROLE_USER", "parts": [{"text": "read it"}],
            "contextId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"asyncgate task {task_id}"))}
    body: dict[str, Any] = {"message": sent}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": body}
    httpx2.post(f"{address}/a2a" if binding == "JSONRPC" else f"{address}/a2a/message:send", trust_env=False,
                json=rpc if binding == "JSONRPC" else body,
                headers={"authorization": "Bearer s3cret", "a2a-version": "1.0"}).raise_for_status()
    opened.gate.call("release_lease", **holder, task_id=task_id, lease_id=offer["lease_id"])
    opened.work()

    assert end(opened.ended(task_id)) == ("succeeded", "READ IT")
    assert len(opened.lines("calls")) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.anyio
async def test_a_gate_is_an_agent_of_a_gate_and_both_may_die(bridge: Bridge, fresh: Any, kind: str) -> None:
    database = await fresh(kind)
    bridge.open(database)

    def begin_own() -> None:
        bridge.begin("own", [sys.executable, "-c", OWN_WORKER, bridge.live.url, TOKEN, str(bridge.folder)])

    begin_own()
    address = f"{bridge.live.url}/a2a/scan"
    bridge.work("--concurrency", "3", address=address, ASYNCGATE_A2A_KEY=TOKEN)
    slow, asking, declined = [bridge.create(text) for text in ("slow", "ask 1", "ask 2")]
    bridge.called("calls", 3)
    bridge.question(asking)
    for name in ("worker", "own"):
        bridge.kill(name)
    bridge.live.kill()
    bridge.open(database, bridge.live.port)
    begin_own()
    bridge.work("--concurrency", "3", address=address, ASYNCGATE_A2A_KEY=TOKEN)
    bridge.go()
    question = bridge.question(asking)
    bridge.answer(asking, {"page": 7})
    bridge.answer(declined, action="decline")

    assert end(bridge.ended(slow)) == ("succeeded", "SLOW")
    assert end(bridge.ended(asking)) == ("succeeded", "accept {'page': 7}")
    assert end(bridge.ended(declined)) == ("succeeded", "decline None")
    assert question["schema"]["required"] == ["page"]
    assert len(bridge.gate.call("list_tasks", type="scan")["tasks"]) == 3       # nothing was sent twice


@pytest.mark.parametrize("text", ["slow", "ask"])
def test_a_canceled_task_cancels_the_remote_one(opened: Bridge, text: str) -> None:
    opened.agent()
    opened.work()
    task_id = opened.create(text)
    [line] = opened.called("calls")
    if text == "ask":
        opened.question(task_id)
    opened.gate.call("cancel_task", task_id=task_id)

    assert opened.called("canceled") == [line.split()[0]]


def test_an_odd_answer_to_one_cancellation_keeps_no_later_one_from_the_agent(opened: Bridge) -> None:
    (opened.folder / "odd").touch()
    opened.agent()
    opened.work()
    for number in (1, 2):
        task_id = opened.create("slow")
        line = opened.called("calls", number)[-1]
        poll(partial(steps_of, opened, task_id))
        opened.gate.call("cancel_task", task_id=task_id)
        poll(lambda: not (opened.folder / "odd").exists())

    assert opened.called("canceled") == [line.split()[0]]


def test_what_is_canceled_while_the_worker_is_dead_is_canceled_when_it_is_back(opened: Bridge) -> None:
    opened.agent()
    opened.work()
    task_id = opened.create("slow")
    [line] = opened.called("calls")
    poll(lambda: opened.gate.call("list_steps", task_id=task_id)["steps"])
    opened.kill("worker")
    opened.gate.call("cancel_task", task_id=task_id)
    opened.work()

    assert opened.called("canceled") == [line.split()[0]]


def test_a_worker_that_stops_leaves_the_remote_task_to_the_next_one(opened: Bridge) -> None:
    opened.agent()
    worker = opened.work("--drain", "0s")
    task_id = opened.create("slow")
    opened.called("calls")
    poll(lambda: opened.gate.call("list_steps", task_id=task_id)["steps"])
    worker.terminate()
    assert worker.wait() == 0
    opened.work("--worker-id", "another")
    opened.go()

    assert end(opened.ended(task_id)) == ("succeeded", "SLOW")
    assert (len(opened.lines("calls")), opened.lines("canceled")) == (1, [])


def test_a_remote_task_that_its_agent_has_lost_is_sent_again(opened: Bridge) -> None:
    address = opened.agent()
    opened.work()
    task_id = opened.create("slow")
    opened.called("calls")
    poll(lambda: opened.gate.call("list_steps", task_id=task_id)["steps"])
    opened.kill("agent")
    opened.agent(port=address.rpartition(":")[2])
    opened.go()

    assert end(opened.ended(task_id)) == ("succeeded", "SLOW")
    assert len(opened.lines("calls")) == 2


def test_a_type_of_a_gate_says_what_its_agent_says(opened: Bridge) -> None:
    opened.agent()
    opened.work()

    # A type is there as soon as somebody claims tasks of it.
    assert poll(lambda: [known["description"] for known in opened.gate.call("list_types")["types"]
                         if "description" in known]) == ["Reads pages."]


# What guards the calls.


def failure(bridge: Bridge, *more: str, **around: str) -> str:
    """Return why a worker does not start."""
    worker = bridge.work(*more, **around)
    text = worker.communicate()[1]
    assert worker.returncode == 2, text
    return text


def serve(bridge: Bridge, card: Any) -> str:
    """Serve a card at an address of its own."""
    (bridge.folder / "card.json").write_text(json.dumps(card))
    files = bridge.begin("files", [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.2",
                                   "--directory", str(bridge.folder)],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert files.stdout
    port = files.stdout.readline().partition(" port ")[2].split()[0]
    return f"http://127.0.0.2:{port}/card.json"


def test_without_an_agent_it_does_not_start(opened: Bridge) -> None:
    opened.agent()

    assert "does not answer" in failure(opened, address="http://127.0.0.1:9")
    assert "names no interface" in failure(opened, address=serve(opened, {"name": "it"}))
    assert "no redirect is followed" in failure(opened, address=f"{opened.address}/moved.json")
    assert "--type" in failure(opened, "--ai", "x")


def test_a_card_leads_neither_a_credential_nor_a_call_to_another_host(opened: Bridge) -> None:
    opened.agent()
    way = {"url": f"{opened.address}/a2a", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
    address = serve(opened, {"supportedInterfaces": [way]})

    assert "would get the credential: --allow 127.0.0.1" in failure(opened, address=address)
    opened.work(address=address, ASYNCGATE_A2A_KEY="")
    assert end(opened.run("read"))[1]["code"] == "barred"
    assert opened.lines("strangers") == []
    opened.kill("worker")
    opened.work("--allow", "127.0.0.1", address=address)
    assert end(opened.run("read")) == ("succeeded", "READ")


@pytest.mark.parametrize("status", [200, 500])
def test_an_error_inside_an_agent_refuses_nothing(status: int) -> None:
    error = {"code": -32603, "message": "a bug", "data": [{
        "@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "INTERNAL_ERROR"}]}      # as a2a-sdk says it
    answer = httpx2.Response(status, json={"error": error}, request=httpx2.Request("POST", "http://agent.example/rpc"))

    with pytest.raises(Away, match="cannot do it now: a bug"):
        read_answer(answer)


@pytest.mark.parametrize("code", [[], {}, None, True, "x", 10**30])
def test_an_error_with_an_odd_code_is_a_refusal(code: Any) -> None:
    answer = httpx2.Response(200, json={"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "no"}},
                             request=httpx2.Request("POST", "https://agent.example.com/rpc"))

    with pytest.raises(Refused, match="no"):
        read_answer(answer)
