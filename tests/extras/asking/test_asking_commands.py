"""`asyncgate inbox` and `asyncgate answer`, as whoever is asked meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from asyncgate.clients.http import Http
from asyncgate.conformance.ledgers import LedgerServer
from tests.commands.test_watching import environment
from tests.conftest import TOKEN, Live
from tests.support.patience import poll

BOSS = ["--as", "human:boss"]


def run(gate: Live, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "asyncgate", *arguments], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env=environment(gate))


def ask(gate: Live) -> dict[str, Any]:
    with Http(gate.url, TOKEN) as http:
        task_id = http.call("create_task", type="demo", payload=None, agent_id="ada")["task_id"]
        (offer,) = http.call("lease_next", worker_id="w1")["tasks"]
        http.call("request_input", task_id=task_id, lease_id=offer["lease_id"], worker_id="w1", key="deploy",
                  message="Deploy it?", to={"kind": "human", "id": "boss"},
                  schema={"type": "object", "required": ["when"], "properties": {"when": {"type": "string"}}})
        return dict(offer)


def test_what_one_is_asked_is_listed_and_answered(start: Callable[..., Live]) -> None:
    gate = start()
    nothing = run(gate, "inbox", *BOSS)
    task_id = ask(gate)["task_id"]

    listed, shown = run(gate, "inbox", *BOSS, "--json"), run(gate, "inbox", *BOSS)
    wrong = run(gate, "answer", task_id, "deploy", "accept", *BOSS)
    right = run(gate, "answer", task_id[-12:], "deploy", "accept", *BOSS, "--content", '{"when": "now"}')
    after = run(gate, "inbox", *BOSS)

    assert nothing.stdout == after.stdout == "nobody waits for an answer of yours\n"
    (question,) = json.loads(listed.stdout)["questions"]
    assert (question["task_id"], question["key"], question["message"]) == (task_id, "deploy", "Deploy it?")
    assert shown.stdout.splitlines()[-1] == "answer one: asyncgate answer TASK KEY accept --as human:boss"
    assert wrong.returncode != 0
    assert "answer_invalid" in wrong.stderr
    assert right.stdout.splitlines()[0] == "deploy: accept; the task is queued"
    with Http(gate.url, TOKEN) as http:
        (offer,) = http.call("lease_next", worker_id="w2")["tasks"]
    assert offer["inputs"]["deploy"]["content"] == {"when": "now"}


def test_a_question_is_read_though_the_ledger_that_has_its_text_is_away(start: Callable[..., Live]) -> None:
    with LedgerServer() as ledger:
        gate = start("receipt_mode=memorygate_integrated", f"ledger.url={ledger.url}",
                     f"ledger.auth_token={ledger.token}")
        task_id = ask(gate)["task_id"]
        with Http(gate.url, TOKEN) as http:
            poll(lambda: http.call("health")["receipt_ledger_lag"]["waiting"] == 0)
    with Http(gate.url, TOKEN) as http:
        (receipt,) = http.call("list_open_obligations", principal_kind="human", principal_id="boss")["open_obligations"]

    (question,) = json.loads(run(gate, "inbox", *BOSS, "--json").stdout)["questions"]

    assert receipt["body"] is None
    assert (question["task_id"], question["key"], question["message"]) == (task_id, "deploy", "Deploy it?")


def test_half_a_name_and_what_is_not_json_are_refused(start: Callable[..., Live]) -> None:
    gate = start()

    assert "--as takes a kind and an id" in run(gate, "inbox", "--as", "boss").stderr
    assert "is not JSON" in run(gate, "answer", "t", "k", "accept", *BOSS, "--content", "yes").stderr
