"""One story for every client: what a task's creator and its worker may rely on, in each language.

The agent and the worker are programs of their own, in Python and in TypeScript; what they say is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

STORY = Path(__file__).parents[1] / "support" / "story"
SETTINGS = ("expiry_jitter_seconds=0", "restart_grace_seconds=0")
LOST = "lease_invalid_or_expired"


class Story:
    """A gate on disk, an agent, and workers, all of one language."""

    def __init__(self, language: str, folder: Path, package: Any) -> None:
        self.folder, self.database = folder, f"sqlite:///{folder}/gate.db"
        self.gate = Live(*SETTINGS, database=self.database)
        self.url, suffix = self.gate.url, "py" if language == "python" else "mjs"
        self.program, environment = sys.executable, {**os.environ}
        if package is not None:
            self.program, environment = package.find("node"), {**package.environment}
            (folder / "node_modules").symlink_to(package.folder / "node_modules")
        for name in ("agent", "worker"):
            (folder / f"{name}.{suffix}").write_text((STORY / f"{name}.{suffix}").read_text())
        self.suffix = suffix
        self.environment = {**environment, "ASYNCGATE_URL": self.url, "ASYNCGATE_API_KEY": TOKEN,
                            "XDG_STATE_HOME": str(folder / "state")}
        self.agent = self.spawn("agent", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.workers: list[subprocess.Popen[Any]] = []
        self.raw = Http(self.url, TOKEN).__enter__()

    def spawn(self, name: str, *arguments: str, **more: Any) -> subprocess.Popen[Any]:
        """Start a program of the story."""
        return subprocess.Popen([self.program, str(self.folder / f"{name}.{self.suffix}"), *arguments],
                                env=self.environment, cwd=self.folder, **more)

    def work(self, name: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a worker; what its functions note is read by `notes`."""
        self.workers.append(self.spawn("worker", name, json.dumps(options), str(self.folder / name)))
        return self.workers[-1]

    def notes(self, name: str, *awaited: str) -> list[str]:
        """Return what the functions of a worker have noted, once the awaited lines are there."""
        path, until = self.folder / name, time.monotonic() + PATIENCE_SECONDS
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if {*awaited} <= {*lines}:
                return lines
            assert time.monotonic() < until, f"{name} has noted {lines}"
            threading.Event().wait(0.02)

    def do(self, verb: str, **told: Any) -> dict[str, Any]:
        """Let the agent do something; return its answer, which may be an error."""
        assert self.agent.stdin
        assert self.agent.stdout
        self.agent.stdin.write(json.dumps({"verb": verb, **told}) + "\n")
        self.agent.stdin.flush()
        answer: dict[str, Any] = json.loads(self.agent.stdout.readline())
        return answer

    def get(self, verb: str, **told: Any) -> Any:
        """Let the agent do something that succeeds."""
        answer = self.do(verb, **told)
        assert "value" in answer, answer
        return answer["value"]

    def submit(self, type: str, payload: Any = None, **told: Any) -> str:
        """Let the agent create a task; return its id."""
        task_id: str = self.get("submit", type=type, payload=payload, **told)["task_id"]
        return task_id

    def run(self, type: str, payload: Any = None, **told: Any) -> Any:
        """Return the result of a task."""
        return self.get("result", task_id=self.submit(type, payload, **told))

    def fail(self, type: str, payload: Any = None, **told: Any) -> Any:
        """Return what a failed task says."""
        answer = self.do("result", task_id=self.submit(type, payload, **told))
        assert answer["error"] == "TaskFailed", answer
        return answer["told"]

    def task(self, task_id: str) -> dict[str, Any]:
        """Return a task as the gate has it."""
        task: dict[str, Any] = self.raw.call("get_task", task_id=task_id)
        return task

    def wait(self, task_id: str, status: str) -> dict[str, Any]:
        """Wait until a task has a status."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (task := self.task(task_id))["status"] != status:
            assert time.monotonic() < until, task
            threading.Event().wait(0.02)
        return task

    def end(self) -> None:
        """End all that was started."""
        for program in (self.agent, *self.workers):
            program.kill()
            program.communicate()
        self.raw.__exit__(None, None, None)
        self.gate.kill()


@pytest.fixture(scope="module", params=["python", "typescript"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Return the story in one language, with a worker that takes what asks for nothing."""
    package = request.getfixturevalue("package") if request.param == "typescript" else None
    story = Story(request.param, tmp_path_factory.mktemp(request.param), package)
    with contextlib.ExitStack() as stack:
        stack.callback(story.end)
        story.work("all", concurrency=8)
        yield story


# Results.


@pytest.mark.parametrize("payload", [None, 0, "", "é 名前 \u2028 😀", [1, [None]], {"a": {"b": 1.5}}], ids=ascii)
def test_a_result_is_the_value_of_the_function_and_a_payload_arrives_as_given(story: Story, payload: Any) -> None:
    assert story.run("echo", payload) == payload


def test_a_result_in_the_gate_discharges_the_task(story: Story) -> None:
    task_id = story.submit("echo", 1)
    story.get("result", task_id=task_id)

    assert (story.task(task_id)["status"], story.task(task_id)["obligation_open"]) == ("succeeded", False)


def test_a_result_elsewhere_is_told_by_its_artifacts(story: Story) -> None:
    task_id = story.submit("stored")

    assert story.get("result", task_id=task_id) == {"pages": 3}
    assert story.task(task_id)["result"]["artifacts"] == [{"type": "file", "uri": "file:///x"}]


def test_a_key_creates_a_task_once(story: Story) -> None:
    first, second = (story.get("submit", type="echo", payload=1, key="once") for _ in range(2))

    assert first == second
    assert first["differs"] is False


def test_a_key_with_another_request_says_so(story: Story) -> None:
    first, second = (story.get("submit", type="echo", payload=n, key="differs") for n in (1, 2))

    assert (first["task_id"], second["differs"]) == (second["task_id"], True)


def test_a_task_that_needs_more_than_a_worker_has_waits_and_waiting_ends_without_it(story: Story) -> None:
    task_id = story.submit("echo", 1, needs=["nobody has it"])

    assert story.do("result", task_id=task_id, timeout=0.1)["error"] == "TimeoutError"
    assert story.task(task_id)["status"] == "queued"


def test_a_delayed_task_comes_later_and_can_be_waited_for(story: Story) -> None:
    assert story.run("echo", "late", delay_seconds=0.3) == "late"


def test_every_page_of_a_list_is_read(story: Story) -> None:
    made = [story.submit("echo", n, task_summary="paged") for n in range(5)]

    listed = story.get("each", operation="list_tasks", limit=2, summary_prefix="paged")

    assert sorted(task["task_id"] for task in listed) == sorted(made)


# Failures.


def test_a_failure_that_is_meant_is_for_good_and_tells_all_that_was_said(story: Story) -> None:
    assert story.fail("fail", max_attempts=5) == {"code": "nope", "message": "no way", "detail": {"page": 3}}


def test_any_error_costs_an_attempt_until_none_is_left(story: Story) -> None:
    task_id = story.submit("error", max_attempts=2, retry_backoff_seconds=0)
    told = story.do("result", task_id=task_id)["told"]

    assert told["message"] == "broken"
    assert "worker" in told["traceback"]
    assert [line for line in story.notes("all") if line.startswith("error")] == ["error 0", "error 1"]


def test_a_second_attempt_may_succeed_and_comes_when_the_worker_says(story: Story) -> None:
    assert story.run("second", retry_backoff_seconds=60) == 1


def test_a_payload_of_another_shape_fails_the_task_at_once(story: Story) -> None:
    assert story.run("typed", "2026-01-02") == 2
    assert story.fail("typed", "tomorrow", max_attempts=5)["code"] == "invalid_payload"


def test_a_result_that_json_cannot_express_fails_the_task(story: Story) -> None:
    assert story.fail("infinite", max_attempts=5)["code"] == "invalid_result"


def test_a_checkpoint_that_is_too_large_fails_the_task(story: Story) -> None:
    assert "max_progress_bytes" in story.fail("large", max_attempts=5)["message"]


# Refusals.


def test_a_refusal_has_a_code_and_a_status(story: Story) -> None:
    answer = story.do("call", operation="get_task", task_id="unknown")

    assert (answer["error"], answer["code"], answer["status"]) == ("Refusal", "task_not_found", 404)


def test_a_wrong_credential_is_refused_at_once(story: Story) -> None:
    answer = story.do("call", operation="whoami", url=story.url, credential="wrong")

    assert (answer["error"], answer["code"], answer["status"]) == ("Refusal", "unauthenticated", 401)


def test_a_field_that_breaks_a_rule_is_named(story: Story) -> None:
    answer = story.do("submit", type="echo", payload=1, priority="high")

    assert (answer["code"], "priority" in answer["text"]) == ("invalid_request", True)


def test_a_gate_that_is_not_there_is_unreachable(story: Story) -> None:
    assert story.do("call", operation="health", url="http://127.0.0.1:9", patience=0.2)["error"] == "Unreachable"


# Cancel.


def test_a_task_that_is_canceled_before_its_work_is_canceled(story: Story) -> None:
    task_id = story.submit("echo", 1, needs=["nobody has it"])

    assert story.get("cancel", task_id=task_id) is True
    assert story.do("result", task_id=task_id)["error"] == "TaskCanceled"


def test_a_function_learns_within_seconds_that_its_task_is_canceled(story: Story) -> None:
    worker = story.work("watched", capabilities=["watched"], ttlSeconds=1800)   # a renewal would come too late
    task_id = story.submit("progress", needs=["watched"])
    story.notes("watched", "saved")

    assert story.get("cancel", task_id=task_id) is True
    story.notes("watched", "lost canceled")

    assert story.run("echo", "free again", needs=["watched"]) == "free again"
    worker.terminate()
    assert worker.wait() == 0


def test_a_task_that_has_ended_is_not_canceled(story: Story) -> None:
    task_id = story.submit("echo", 1)
    story.get("result", task_id=task_id)

    assert story.get("cancel", task_id=task_id) is False


# Progress.


def test_progress_and_checkpoint_are_seen_while_the_work_goes_on(story: Story) -> None:
    task_id = story.submit("progress")

    assert story.get("first", task_id=task_id, progress=True)["progress"] == {"done": 0.5, "checkpoint": {"page": 3}}
    story.get("cancel", task_id=task_id)


def test_updates_end_with_the_task(story: Story) -> None:
    assert story.get("updates", task_id=story.submit("echo", 1))[-1] == "succeeded"


# Output.


def test_what_a_worker_prints_and_streams_stands_before_its_end_and_is_read_from_anywhere(story: Story) -> None:
    task_id = story.submit("talk", "it")

    whole = story.get("stream", task_id=task_id)

    assert whole[:3] == ["thinking about it\n", "a ", "fox"]
    assert "".join(whole[3:]) == "😀" * 9000 + "\n"
    entries = story.raw.call("read_output", task_id=task_id, principal_kind="agent", principal_id="ada")["entries"]
    third = next(entry["offset"] for entry in entries if entry.get("chunk") == "fox")
    assert story.get("stream", task_id=task_id, after=third) == whole[3:]


def test_who_follows_output_sees_each_chunk_once_through_a_restart_of_the_gate(story: Story) -> None:
    task_id = story.submit("talk", "on")
    with ThreadPoolExecutor(1) as beside:
        following = beside.submit(story.get, "stream", task_id=task_id)
        story.notes("all", "talks on")
        port = story.gate.port
        story.gate.kill()
        story.gate = Live(*SETTINGS, database=story.database, port=port)
        (story.folder / "all.go").touch()

        assert "".join(following.result()) == "thinking about on\na fox" + "😀" * 9000 + "\n"


# Limits, families, types.


def test_a_task_waits_while_its_limit_is_reached_and_comes_when_that_ends(story: Story) -> None:
    story.get("call", operation="set_limit", name="seat", concurrency_per_key=1)
    first = story.submit("progress", limits={"seat": "7"})
    assert story.get("first", task_id=first, progress=True)["status"] == "running"
    second, other = (story.submit("echo", seat, limits={"seat": seat}) for seat in ("7", "8"))

    assert story.get("result", task_id=other) == "8"
    assert story.task(second)["status"] == "queued"
    story.get("cancel", task_id=first)
    assert story.get("result", task_id=second) == "7"


def test_a_task_waits_for_its_children_without_a_lease_and_learns_how_each_has_ended(story: Story) -> None:
    task_id = story.submit("family", [1, 2, 0], max_attempts=1)

    assert story.get("result", task_id=task_id) == ["failed", "succeeded", "succeeded"]
    assert story.task(task_id)["children"]["open"] == 0


def test_a_payload_that_does_not_fit_what_its_worker_has_declared_is_refused_when_the_task_is_created(
        story: Story) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not (types := [served for served in story.get("call", operation="list_types")["types"]
                         if served["type"] == "declared" and "description" in served]):
        assert time.monotonic() < until
    refused = story.do("submit", type="declared", payload={"number": "x"})

    assert types[0]["description"] == "Read a page."
    assert (refused["error"], refused["code"]) == ("Refusal", "payload_invalid")
    assert story.run("declared", {"number": 7}) == 7


# Steps, parks, questions.


def test_a_step_is_done_once_whatever_number_of_attempts_there_is(story: Story) -> None:
    task_id = story.submit("steps", retry_backoff_seconds=0)

    assert story.get("result", task_id=task_id) == [{"a": 1}, None]
    assert [line for line in story.notes("all") if line in ("first", "second")] == ["first", "second"]
    assert [step["name"] for step in story.get("each", operation="list_steps", task_id=task_id)] == ["first", "second"]


def test_a_function_that_takes_other_steps_than_before_fails_and_says_which(story: Story) -> None:
    told = story.fail("mismatch", max_attempts=2, retry_backoff_seconds=0)

    assert told["code"] in ("StepMismatch", "step_mismatch")
    assert "step 1" in told["message"]


def test_a_parked_task_comes_back_with_its_checkpoint_and_costs_no_attempt(story: Story) -> None:
    assert story.run("park", max_attempts=1) == [{"seen": 1}, 0]


@pytest.mark.parametrize(("answer", "expected"), [
    ({"action": "accept", "content": {"when": "now"}}, ["accept", {"when": "now"}]),
    ({"action": "decline"}, ["decline", None])],
    ids=["accept", "decline"])
def test_a_question_holds_the_task_until_it_is_answered(story: Story, answer: Any, expected: Any) -> None:
    task_id = story.submit("ask", max_attempts=1)

    assert story.get("first", task_id=task_id, held=True)["held"] == "input_required"
    story.get("call", operation="answer_input", task_id=task_id, key="go", principal_kind="human", principal_id="boss",
              **answer)

    assert story.get("result", task_id=task_id) == expected
    assert story.task(task_id)["expiries"] == 0


# Restarts.


def test_a_worker_that_was_killed_goes_on_under_its_name(story: Story) -> None:
    """With its own lease: neither does it wait for the lease to run out, nor is a step done twice."""
    killed = story.work("phoenix", capabilities=["phoenix"], ttlSeconds=600)
    task_id = story.submit("crash", needs=["phoenix"])
    story.notes("phoenix", "ready")
    before = story.task(task_id)
    killed.send_signal(signal.SIGKILL)
    killed.wait()

    again = story.work("phoenix", capabilities=["phoenix"], ttlSeconds=600)

    assert story.get("result", task_id=task_id) == ["kept", {"page": 7}, 0, before["fence"]]
    assert story.notes("phoenix") == ["once", "ready"]
    again.terminate()
    assert again.wait() == 0


def test_what_a_killed_worker_has_begun_is_done_by_another_one_when_the_lease_runs_out(story: Story) -> None:
    killed = story.work("first", capabilities=["pair"], ttlSeconds=1)
    task_id = story.submit("crash", needs=["pair"])
    story.notes("first", "ready")
    before = story.task(task_id)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    other = story.work("second", capabilities=["pair"])

    assert story.get("result", task_id=task_id) == ["kept", {"page": 7}, 0, before["fence"] + 1]
    assert story.task(task_id)["expiries"] == 1
    other.terminate()
    assert other.wait() == 0


def test_a_lease_that_another_worker_has_taken_over_ends_nothing(story: Story) -> None:
    task_id = story.submit("echo", 1, needs=["fenced"])
    old = story.raw.call("lease_next", worker_id="old", capabilities=["fenced"])["tasks"][0]
    story.raw.call("release_lease", worker_id="old", task_id=task_id, lease_id=old["lease_id"])
    new = story.raw.call("lease_next", worker_id="new", capabilities=["fenced"])["tasks"][0]
    held = {"task_id": task_id, "lease_id": old["lease_id"], "fence": old["fence"], "worker_id": "old"}

    refused = [story.do("call", operation=operation, **held, **more)["code"] for operation, more in (
        ("complete", {"result": 1}), ("fail", {"error": {}}), ("renew_lease", {}),
        ("report_progress", {"progress": {}}),
        ("record_step", {"seq": 1, "name": "a", "value": 1}), ("request_input", {"key": "k", "message": "?"}))]
    wrong = story.do("call", operation="complete", worker_id="new", task_id=task_id, lease_id=new["lease_id"],
                     fence=new["fence"] + 1, result=1)

    assert refused == [LOST] * 6
    assert wrong["code"] == LOST
    assert story.task(task_id)["status"] == "leased"
    story.get("call", operation="complete", worker_id="new", task_id=task_id, lease_id=new["lease_id"],
              fence=new["fence"], result=2, artifacts=[{"uri": "file:///x"}])
    assert story.get("result", task_id=task_id) == 2


def test_a_worker_that_is_told_to_stop_finishes_its_task(story: Story) -> None:
    worker = story.work("drained", capabilities=["drained"])
    task_id = story.submit("slow", 0.5, needs=["drained"])
    story.notes("drained", "began")
    worker.terminate()

    assert worker.wait() == 0
    assert story.task(task_id)["result"]["result"] == "slept"


def test_a_worker_gives_back_what_it_cannot_finish_in_time(story: Story) -> None:
    worker = story.work("hurried", capabilities=["hurried"], drainSeconds=0.2)
    task_id = story.submit("slow", 600, needs=["hurried"])
    story.notes("hurried", "began")
    worker.terminate()

    assert worker.wait() == 0
    task = story.task(task_id)
    assert (task["status"], task["attempt"], task["expiries"]) == ("queued", 0, 0)


def test_an_end_that_could_not_be_delivered_is_delivered_by_the_next_process(story: Story) -> None:
    """And a wait for the result outlives the gate."""
    worker = story.work("postman", capabilities=["postman"], ttlSeconds=600, drainSeconds=0.2)
    task_id = story.submit("slow", 1, needs=["postman"])
    story.notes("postman", "began")
    port = story.gate.port
    story.gate.kill()
    story.notes("postman", "slept")
    worker.terminate()      # it does not wait for a gate that may never come
    assert worker.wait() == 0
    assert [*(story.folder / "state").rglob("*.letters")] != []

    story.gate = Live(*SETTINGS, database=story.database, port=port)
    again = story.work("postman", capabilities=["postman"])

    assert story.get("result", task_id=task_id) == "slept"
    assert story.notes("postman") == ["began", "slept"]
    story.wait(task_id, "succeeded")
    again.terminate()
    assert again.wait() == 0
    assert [*(story.folder / "state").rglob("*.letters")] == []


def test_the_worker_has_lived_through_all_of_it(story: Story) -> None:
    assert story.run("echo", "still here") == "still here"
    assert story.workers[0].poll() is None
