"""Workers, answerers and gates that are killed at every step of a question: none is lost, none is answered twice.

A round is one task that asks once, and whose worker, answerer or gate is killed at one of its steps.  By default there
are eight of them; `--rounds 63` makes more than five hundred.  Postgres serves two gates, a file only one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.backends import is_lasting
from asyncgate.clients.http import Http, Refusal, Unreachable
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
MAIN = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())"]
pytestmark = pytest.mark.databases(fits=is_lasting)
TOKEN = "a-token-for-tests"
KILLS_PER_ROUND = 8
HASTY = ("lease_sweep_interval_seconds=0.2", "expiry_jitter_seconds=0", "max_expiries=0", "lease_grace_seconds=0")
WHO = {"worker": ("worker", "w", "worker"), "answerer": ("human", "boss", "agent"), "owner": ("agent", "ada", "agent"),
       "thief": ("agent", "eve", "agent")}
# What both programs do: they call any gate until one answers, and die, or kill a gate, at the steps in their folder.
SHARED = """
import json, os, random, sys, threading, time
from pathlib import Path
from asyncgate.backends import is_lasting
from asyncgate.clients.http import Http, Refusal, Unreachable

folder, name, urls = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
gates = [Http(url, sys.argv[4]).__enter__() for url in urls]


def strike(step):
    # Take what is planned for a step of this program, and let it happen: the gate dies while the call is under way.
    for plan in sorted(folder.glob(f"plans/{name}-{step}-*")):
        try:
            plan.rename(folder / "done" / plan.name)
        except FileNotFoundError:
            continue
        victim = plan.name.split("-")[2]
        if victim == "self":
            os.kill(os.getpid(), 9)
        pids = [int(path.read_text()) for path in folder.glob("gate*.pid")]

        def kill(pid=random.choice(pids), pause=random.uniform(0, 0.006)):
            time.sleep(pause)
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        threading.Thread(target=kill).start()
        return


def insist(operation, **fields):
    strike("before_" + operation)
    while True:
        try:
            reply = random.choice(gates).call(operation, **fields)
        except Unreachable:
            time.sleep(0.02)
            continue
        except Refusal as refusal:
            if refusal.status >= 500:
                time.sleep(0.02)
                continue
            raise
        strike("after_" + operation)
        return reply
"""
WORKER = SHARED + """
import uuid
while True:
    for offer in insist("lease_next", worker_id="w", claim_id=uuid.uuid4().hex, lease_ttl_seconds=2,
                        wait_seconds=1)["tasks"]:
        under = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w"}
        try:
            asked = insist("request_input", **under, key="may", message="May I " + offer["task_id"] + "?",
                           to={"kind": "human", "id": "boss"}, checkpoint={"asked": True})
            if not asked["lease_ended"]:
                insist("complete", **under, result={"told": asked["input"]["content"], "offer": offer.get("inputs")},
                       artifacts=[{"uri": "file:///out"}])
        except Refusal as refusal:
            if refusal.code not in ("lease_invalid_or_expired", "invalid_transition", "task_not_found"):
                raise
"""
ANSWERER = SHARED + """
said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    owed = insist("list_open_obligations", wait_seconds=1)["open_obligations"]
    for receipt in owed:
        told = {"task_id": receipt["task_id"], "key": receipt["body"]["key"], "action": "accept",
                "content": receipt["receipt_id"]}
        answered = insist("answer_input", **told)
        os.write(said, json.dumps({**told, "receipt_id": answered["receipt_id"]}).encode() + b"\\n")
        os.fsync(said)
"""
PROGRAMS = {"worker": WORKER, "answerer": ANSWERER}
STEPS = {"worker": ("lease_next", "request_input", "complete"), "answerer": ("list_open_obligations", "answer_input")}
KILLS = [(name, f"{when}_{step}", victim) for name, steps in STEPS.items() for step in steps
         for when in ("before", "after") for victim in ("self", "gate")]


class Stage:
    """The gates, a worker and an answerer, which are started again whenever one has died."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database = folder, database
        self.ports = [free_port() for _ in range(2 if database.startswith("postgres") else 1)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.around = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_API_KEY": TOKEN}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.deaths: Counter[str] = Counter()
        self.keys: dict[str, str] = {}
        for name in ("plans", "done"):
            (folder / name).mkdir()

    def command(self, name: str) -> list[str]:
        """Return how a process is started."""
        if name in PROGRAMS:
            return [sys.executable, "-c", PROGRAMS[name], str(self.folder), name, ",".join(self.urls), self.keys[name]]
        sets = [part for setting in HASTY for part in ("--set", setting)]
        return [*MAIN, "serve", "--port", str(self.ports[int(name[4:])]), "--database", self.database, *sets]

    def keep_alive(self) -> None:
        """Start each process that is not there; whoever has died of anything else than a kill has failed."""
        for name in [f"gate{number}" for number in range(len(self.ports))] + [*PROGRAMS.keys() & self.keys.keys()]:
            if (process := self.processes.get(name)) is not None:
                if (status := process.poll()) is None:
                    continue
                assert status == -signal.SIGKILL, (self.folder / f"{name}.log").read_text()[-3000:]
                self.deaths[name.rstrip("01")] += 1
            with (self.folder / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(self.command(name), env=self.around, stdout=log, stderr=log)
            if name.startswith("gate"):
                (self.folder / f"{name}.pid").write_text(str(self.processes[name].pid))

    def until(self, look: Callable[[], Any]) -> Any:
        """Keep all processes alive until something is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (seen := look()):
            assert time.monotonic() < deadline, [path.read_text()[-1500:] for path in self.folder.glob("*.log")]
            self.keep_alive()
            time.sleep(0.02)
        return seen

    def ask(self, operation: str, by: str = "admin", **fields: Any) -> Any:
        """Ask any gate; nothing if it is not there."""
        try:
            with Http(random.choice(self.urls), self.keys.get(by, TOKEN)) as gate:
                return gate.call(operation, **fields)
        except Unreachable:
            return None

    def insist(self, operation: str, **fields: Any) -> Any:
        """Ask until a gate answers."""
        return self.until(lambda: self.ask(operation, **fields))

    def close(self) -> None:
        """End everything for certain."""
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def stage(tmp_path: Path, database: str) -> Iterator[Stage]:
    """A stage whose processes are gone at the end."""
    stage = Stage(tmp_path, database)
    yield stage
    stage.close()


def test_no_question_is_lost_and_none_is_answered_twice_whoever_is_killed_at_whichever_step(
        stage: Stage, rounds: int, record_property: Any) -> None:
    seed = random.randrange(2**32)
    draw, number = random.Random(seed), rounds * KILLS_PER_ROUND
    print(f"seed {seed}, {number} rounds, {len(stage.urls)} gates")
    order, made = draw.sample(KILLS, len(KILLS)), []
    for name, (kind, id, role) in WHO.items():
        about = {"name": name, "principal_kind": kind, "principal_id": id, "role": role}
        stage.keys[name] = stage.insist("issue_key", **about)["api_key"]
    for at in range(number):
        (stage.folder / "plans" / "-".join((*order[at % len(order)], str(at)))).touch()
        task = stage.insist("create_task", by="owner", type="t", payload=at, idempotency_key=f"round-{at}")
        made.append(task["task_id"])
        with pytest.raises(Refusal, match="has not asked"):     # nobody else may answer, whatever happens meanwhile
            stage.insist("answer_input", by="thief", task_id=task["task_id"], key="may", action="accept", content="no")
        stage.until(lambda task=task: (stage.ask("get_task", task_id=task["task_id"]) or {}).get(     # type: ignore[misc]
            "status") == "succeeded")

    told = [json.loads(line) for line in (stage.folder / "said").read_text().splitlines()]
    for task_id in made:
        check_task(stage, task_id, [answer for answer in told if answer["task_id"] == task_id])
    owed = [stage.insist("list_open_obligations", by=name)["open_obligations"] for name in ("answerer", "owner")]
    struck = len([*(stage.folder / "done").iterdir()])
    numbers = f"{number} rounds, {struck} kills: {dict(stage.deaths)}"
    record_property("asking", numbers)
    print(numbers)
    assert owed == [[], []]
    stage.close()
    subprocess.run([*MAIN, "verify", "--database", stage.database], env=stage.around, check=True, capture_output=True)


def check_task(stage: Stage, task_id: str, told: list[dict[str, Any]]) -> None:
    """Check that a task was asked and answered once, by whoever was asked, and ended with just that answer."""
    events = stage.insist("get_task_history", task_id=task_id, limit=200)["events"]
    receipts = [event["receipt"] for event in events if event["event_type"].startswith("input.")]
    requested, answered = receipts
    assert (requested["receipt_type"], answered["receipt_type"]) == ("input.requested", "input.answered")
    assert answered["parents"] == [requested["receipt_id"]]
    assert (answered["from"]["kind"], answered["from"]["id"]) == ("human", "boss")
    task = stage.insist("get_task", task_id=task_id)
    assert task["result"]["result"]["told"] == requested["receipt_id"]
    assert {answer["receipt_id"] for answer in told} <= {answered["receipt_id"]}
    assert (task["status"], task["attempt"]) == ("succeeded", 0)
