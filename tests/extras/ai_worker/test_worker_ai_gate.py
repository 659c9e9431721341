"""`asyncgate worker --ai` at a real gate: the whole lease-to-receipt flow, every part in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http, Unreachable
from asyncgate.conformance.postgres_server import free_port
from tests.support.ai_tools import KEY, ModelProgram, notes, profile_with, stdio, until
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-for-tests"
COMMAND = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())"]
HASTY = ("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0")
Json = dict[str, Any]
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
WAIT: Json = {"name": "wait", "arguments": {}}
HOLD: Json = {"name": "hold", "arguments": {}}
FAIL: Json = {"name": "fail", "arguments": {}}
END = {"finish": {"summary": "counted", "result": 5}}


@pytest.fixture(scope="module")
def model() -> Iterator[ModelProgram]:
    """Return a model that does what the payload says."""
    running = ModelProgram()
    yield running
    running.kill()


class House:
    """A gate that can be killed and started again, and AI workers of it."""

    def __init__(self, folder: Path, model: ModelProgram, *settings: str) -> None:
        self.folder, self.model, self.settings = folder, model, settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[Any]] = []
        self.open()
        self.gate = Http(self.url, TOKEN).__enter__()

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[Any]:
        """Start a command of this package."""
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_API_KEY": TOKEN, "STAND_IN_KEY": KEY,
                        "ASYNCGATE_URL": self.url}
        self.processes.append(subprocess.Popen([*COMMAND, *arguments], cwd=self.folder, env=surroundings, **more))
        return self.processes[-1]

    def open(self) -> None:
        """Start the gate, and wait until it serves."""
        sets = [part for setting in (*HASTY, *self.settings) for part in ("--set", setting)]
        self.server = self.start("serve", "--port", str(self.port), "--database", "sqlite:///gate.db", *sets,
                                 stderr=subprocess.DEVNULL)
        until(self.serves, "the gate")

    def serves(self) -> bool:
        """Whether the gate answers."""
        assert self.server.poll() is None, "the gate ended"
        with contextlib.suppress(Unreachable), Http(self.url, TOKEN) as gate:
            return bool(gate.call("get_config"))
        return False

    def worker(self, worker_id: str = "clerk-1", *arguments: str, **profile: Any) -> subprocess.Popen[Any]:
        """Start an AI worker, and wait until it takes tasks."""
        profile = {"servers": {"sums": stdio(self.folder)}, **profile}
        path = self.folder / f"{worker_id}.yaml"
        path.write_text(json.dumps(profile_with(self.model.url, **profile)))       # JSON is YAML
        log = self.folder / f"{worker_id}.log"
        with log.open("w") as file:
            worker = self.start("worker", "--ai", str(path), "--worker-id", worker_id, "--state",
                                str(self.folder / worker_id), *arguments, stderr=file)
        until(lambda: "takes count of" in log.read_text() or worker.poll(), f"{worker_id} to take tasks")
        assert worker.poll() is None, log.read_text()
        return worker

    def create(self, *script: Json, **more: Any) -> str:
        """Hand over a task."""
        made = self.gate.call("create_task", type="count", payload={"script": list(script)}, agent_id="ada",
                              **{"retry_backoff_seconds": 0, **more})
        return str(made["task_id"])

    def task(self, task_id: str) -> Json:
        """Return the record of a task."""
        task: Json = self.gate.call("get_task", task_id=task_id)
        return task

    def ended(self, task_id: str) -> Json:
        """Wait for the end of a task."""
        task: Json = until(lambda: (task := self.task(task_id))["result"] and task, f"the end of {task_id}")
        return task

    def receipts(self, task_id: str) -> list[str]:
        """Return what happened to a task."""
        rows = self.gate.call("list_receipts", task_id=task_id)["receipts"]
        return sorted(row["receipt_type"] for row in rows)

    def close(self) -> None:
        """End everything."""
        self.gate.__exit__(None, None, None)
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def house(tmp_path: Path, model: ModelProgram) -> Iterator[House]:
    """Return a gate with the usual settings."""
    running = House(tmp_path, model)
    yield running
    running.close()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, model: ModelProgram) -> Iterator[House]:
    """Return a gate with a worker, for all tests that kill neither."""
    running = House(tmp_path_factory.mktemp("busy"), model)
    gate = {"url": f"{running.url}/mcp", "token_env": "ASYNCGATE_API_KEY", "tools": ["asyncgate.create_task"]}
    running.worker(servers={"sums": stdio(running.folder), "gate": gate},
                   limits={"answer_tries": 2, "retry_seconds": 0.001, "steps": 4})
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _afresh(request: pytest.FixtureRequest) -> None:
    if "busy" in request.fixturenames:
        request.getfixturevalue("busy").folder.joinpath("notes").unlink(missing_ok=True)


def test_a_model_does_a_task_with_tools_and_the_obligation_is_discharged(busy: House) -> None:
    task_id = busy.create({"call": [ADD, FAIL]}, {"call": [ADD]}, END, instructions="Count.", task_summary="Counting")
    task = busy.ended(task_id)

    assert (task["status"], task["obligation_open"]) == ("succeeded", False)
    answer = {"summary": "counted", "result": 5}
    assert task["result"]["result"] == {**answer, "model": "stand-in", "steps": 3, "tokens": 300}
    assert [artifact["type"] for artifact in task["result"]["artifacts"]] == ["inline"]
    assert (task["progress"]["step"], task["progress"]["summary"]) == (2, "step 2 of 4: add")
    assert busy.receipts(task_id) == ["task.accepted", "task.assigned", "task.completed", "task.result_ready"]
    assert notes(busy.folder).count("call fail") == 1
    assert "[begin task_instructions " in busy.model.seen()[-1]["messages"][0]["content"]


def test_artifacts_that_the_model_names_are_those_of_the_task(busy: House) -> None:
    artifacts = [{"type": "s3", "uri": "s3://counts/5", "mime": "text/plain"}]

    task = busy.ended(busy.create({"finish": {"summary": "stored", "artifacts": artifacts}}))

    assert (task["result"]["artifacts"], task["obligation_open"]) == (artifacts, False)


def test_canceling_a_task_reaches_its_running_tool_and_the_worker_goes_on(busy: House) -> None:
    task_id = busy.create({"call": [WAIT]}, END)
    until(lambda: "call wait" in notes(busy.folder), "the tool to be called")

    busy.gate.call("cancel_task", task_id=task_id, agent_id="ada")
    until(lambda: "cancelled" in notes(busy.folder), "the tool to hear of it")

    assert busy.ended(busy.create({"call": [ADD]}, END))["status"] == "succeeded"
    assert busy.task(task_id)["status"] == "canceled"
    assert "start" not in notes(busy.folder)


def test_another_worker_goes_on_from_the_checkpoint_of_one_that_was_killed(house: House) -> None:
    lost = house.worker("clerk-1", "--ttl", "2")
    task_id = house.create({"call": [ADD]}, {"call": [HOLD]}, {"say": "{last}"})
    until(lambda: "call hold" in notes(house.folder), "the second step")
    lost.kill()
    (house.folder / "go").touch()
    house.worker("clerk-2")

    task = house.ended(task_id)

    assert task["result"]["result"]["result"] == "let go"
    assert (task["result"]["result"]["steps"], task["attempt"]) == (3, 0)
    assert notes(house.folder).count("call add") == 1
    assert notes(house.folder).count("call hold") == 2


def test_a_gate_that_is_killed_and_started_again_costs_the_job_nothing(house: House) -> None:
    house.worker()
    task_id = house.create({"call": [HOLD]}, {"call": [ADD]}, END)
    until(lambda: "call hold" in notes(house.folder), "the first step")

    house.server.kill()
    house.server.wait()
    (house.folder / "go").touch()
    until(lambda: "call add" in notes(house.folder), "the job to go on without a gate")
    house.open()
    task = house.ended(task_id)

    assert (task["status"], task["attempt"], task["expiries"], task["fence"]) == ("succeeded", 0, 0, 1)
    assert [notes(house.folder).count(f"call {name}") for name in ("hold", "add")] == [1, 1]
    assert house.receipts(task_id).count("task.completed") == 1


def test_what_was_done_while_the_gate_is_away_is_a_dead_letter_that_the_next_start_delivers(house: House) -> None:
    worker = house.worker("clerk-1", "--drain", "3")
    task_id = house.create({"call": [HOLD]}, END)
    until(lambda: "call hold" in notes(house.folder), "the first step")
    house.server.kill()
    house.server.wait()
    before = len(house.model.seen())
    (house.folder / "go").touch()
    until(lambda: len(house.model.seen()) > before, "the last answer of the model")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_SECONDS) == 0

    house.open()
    assert house.task(task_id)["result"] is None
    house.worker()
    task = house.ended(task_id)

    assert (task["status"], task["result"]["result"]["result"], task["fence"]) == ("succeeded", 5, 1)
    assert len(house.model.seen()) == before + 1
    assert notes(house.folder).count("call hold") == 1


def test_a_model_that_is_away_costs_an_attempt_and_the_next_goes_on_from_the_checkpoint(busy: House) -> None:
    task_id = busy.create({"call": [ADD]}, {"status": 503, "times": 3, **END})
    task = busy.ended(task_id)

    assert (task["status"], task["attempt"]) == ("succeeded", 1)
    assert notes(busy.folder).count("call add") == 1
    assert busy.receipts(task_id).count("task.failed") == 1


@pytest.mark.parametrize(("script", "code"), [
    ([{"status": 400, "message": "too long"}], "model_rejected_request"),
    ([{"call": [ADD]}] * 5, "step_limit"),
    ([{"finish": {"outcome": "failed", "summary": "there is nothing to count"}}], "gave_up"),
])
def test_what_no_other_attempt_would_mend_fails_the_task(busy: House, script: list[Json], code: str) -> None:
    task = busy.ended(busy.create(*script))

    assert (task["status"], task["attempt"], task["result"]["error"]["code"]) == ("failed", 0, code)


def test_attempts_run_out_when_the_model_stays_away(busy: House) -> None:
    task_id = busy.create({"raw": "<html>"}, max_attempts=2)
    task = busy.ended(task_id)

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "model_malformed_answer")
    assert busy.receipts(task_id).count("task.failed") == 2


def test_a_gate_that_takes_little_progress_gets_a_smaller_checkpoint(tmp_path: Path, model: ModelProgram) -> None:
    house = House(tmp_path, model, "max_progress_bytes=1500")
    try:
        house.worker()
        task = house.ended(house.create(*[{"call": [{"name": "big", "arguments": {"bytes": 900}}]}] * 3, END))
    finally:
        house.close()

    assert (task["status"], task["progress"]["step"]) == ("succeeded", 3)
    assert "dropped from the checkpoint" in json.dumps(task["progress"])


def test_no_secret_leaves_the_worker(busy: House) -> None:
    task_id = busy.create({"call": [ADD]}, {"finish": {"summary": f"{KEY} and {TOKEN}", "result": [KEY]}})
    task = busy.ended(task_id)
    log = (busy.folder / "clerk-1.log").read_text()

    told = json.dumps([task["progress"], task["result"], busy.gate.call("get_task_history", task_id=task_id)]) + log
    assert task["result"]["result"]["summary"] == "[secret] and [secret]"
    assert KEY not in told
    assert TOKEN not in told


def test_the_gate_itself_is_an_mcp_server_so_a_model_can_hand_over_work(busy: House) -> None:
    call = {"name": "asyncgate_create_task", "arguments": {"type": "sub", "payload": 7, "idempotency_key": "sub-7"}}

    task = busy.ended(busy.create({"call": [call]}, {"say": "{last}"}))

    made = json.loads(task["result"]["result"]["result"])
    assert busy.task(made["task_id"])["payload"] == 7


def shown(name: str) -> str:
    """Return the commands of the documentation that stand below a mark."""
    [block] = blocks("sh", mark=name)
    return block.text


def test_the_example_of_the_documentation_does_what_it_says(house: House) -> None:
    prices = [{"name": "price", "arguments": {"product": product}} for product in ("pen", "ink")]
    finish = {"summary": "10 pens at 1.20 and 2 of ink at 4.50", "result": {"total": 21.0}}
    model = ModelProgram([{"call": prices}, {"finish": finish}])
    command = house.folder / "asyncgate"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom asyncgate import main\nsys.exit(main())\n")
    command.chmod(0o755)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_API_KEY": TOKEN, "ASYNCGATE_URL": house.url,
                    "OPENAI_API_KEY": KEY, "XDG_STATE_HOME": str(house.folder / "state"),
                    "PATH": os.pathsep.join([str(house.folder), str(Path(sys.executable).parent), os.environ["PATH"]])}
    start = shown("ai-worker:start").replace("https://api.openai.com/v1", model.url).replace("gpt-5-mini", "stand-in")
    start = start.replace("asyncgate worker", "exec asyncgate worker")
    try:
        house.processes.append(subprocess.Popen(["bash", "-ec", start], cwd=house.folder, env=surroundings))
        ran = subprocess.run(["bash", "-ec", shown("ai-worker:ask").rstrip() + " --json"], cwd=house.folder,
                             env=surroundings, capture_output=True, text=True, timeout=PATIENCE_SECONDS * 2)
        told = [message["content"] for message in model.seen()[-1]["messages"] if message["role"] == "tool"]
    finally:
        model.kill()

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["result"]["result"]["result"] == {"total": 21.0}
    assert told == ["1.2", "4.5"]


def test_a_profile_that_is_wrong_stops_the_start_and_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "clerk.yaml"
    path.write_text(json.dumps(profile_with("http://127.0.0.1:1/v1", limits={"steps": 0})))

    ran = subprocess.run([*COMMAND, "worker", "--ai", str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    assert ran.returncode == 2
    assert "limits.steps: Expected `int` >= 1" in ran.stderr
    assert str(path) in ran.stderr


def test_a_tool_that_does_not_exist_stops_the_start(busy: House) -> None:
    path = busy.folder / "clerk.yaml"
    path.write_text(json.dumps(profile_with(busy.model.url, {"sums": stdio(busy.folder, "subtract")})))

    worker = busy.start("worker", "--ai", str(path), stderr=subprocess.PIPE, text=True)
    log = worker.communicate(timeout=PATIENCE_SECONDS)[1]

    assert worker.returncode == 2
    assert "servers.sums.tools: the server has no tool 'subtract'" in log
