"""`asyncgate worker`: its small tasks, and programs, each in processes of their own."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.clients.worker.program import Run
from tests.support.patience import PATIENCE_SECONDS, poll

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())", "worker"]
TOKEN = "a-token-for-tests"
PICTURE = b"\x89PNG\xff"
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def gate(start: Any) -> Iterator[Http]:
    """A client of a gate that sweeps fast."""
    with Http(start("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0").url, TOKEN) as gate:
        yield gate


@pytest.fixture
def begin(gate: Http, tmp_path: Path) -> Iterator[Begin]:
    """Start workers; they are gone at the end."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str) -> subprocess.Popen[str]:
            surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_URL": gate.url,
                            "ASYNCGATE_API_KEY": TOKEN, "XDG_STATE_HOME": str(tmp_path / "state"), "MINE": "kept"}
            worker = stack.enter_context(subprocess.Popen(
                [*WORKER, "--worker-id", "w", *arguments], cwd=tmp_path, env=surroundings, stderr=subprocess.PIPE,
                text=True, process_group=0))
            stack.callback(worker.kill)
            return worker

        yield begin


def ended(gate: Http, task_id: str) -> Any:
    return poll(lambda: (task := gate.call("get_task", task_id=task_id, wait_seconds=30))["result"] and task)


def run(gate: Http, type: str, payload: Any = None, **more: Any) -> Any:
    """Create a task and wait for its end."""
    return ended(gate, create(gate, type, payload, **more))


def create(gate: Http, type: str, payload: Any = None, **more: Any) -> str:
    return str(gate.call("create_task", type=type, payload=payload, retry_backoff_seconds=0, **more)["task_id"])


@pytest.mark.parametrize(("text", "message"), [
    ('printf \'{"loss": [0.5, NaN]}\'', "result.loss[1] is nan: JSON has no such number"),
    ('printf \'{"loss": -Infinity}\\n\' >&3', "progress.loss is -inf: JSON has no such number")])
def test_a_program_that_writes_a_number_that_json_does_not_have_fails_its_task(
        gate: Http, begin: Begin, tmp_path: Path, text: str, message: str) -> None:
    begin(*script(tmp_path, text))

    task = run(gate, "t", max_attempts=1)

    assert (task["status"], task["result"]["error"]) == ("failed", {"code": "invalid_result", "message": message})


def test_words_that_are_no_json_are_a_text(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, "echo NaN"))

    assert run(gate, "t")["result"]["result"] == "NaN"


def script(folder: Path, text: str) -> tuple[str, ...]:
    """Write a shell script and return the arguments that make a worker of it."""
    path = folder / "task.sh"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return "--type", "t", "--", str(path)


# Programs.


def test_a_program_reads_the_payload_and_writes_the_result(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, 'printf \'{"seen": %s, "type": "%s"}\' "$(cat)" "$ASYNCGATE_TASK_TYPE"'))

    task = run(gate, "t", {"page": [1, "zwei"]})

    assert (task["status"], task["obligation_open"]) == ("succeeded", False)
    assert task["result"]["result"] == {"seen": {"page": [1, "zwei"]}, "type": "t"}


@pytest.mark.parametrize(("text", "result"), [
    ("echo hello; echo world", "hello\nworld"), ("true", None), ("printf 17", 17), ("exec <&-; echo '[]'", []),
    ("yes 012345 | head -c 70000", "012345\n" * 9999 + "012345")],
    ids=["text", "nothing", "number", "empty list", "more than a pipe holds"])
def test_what_is_no_json_is_text(gate: Http, begin: Begin, tmp_path: Path, text: str, result: Any) -> None:
    begin(*script(tmp_path, text))

    task = run(gate, "t", "x" * 80_000)    # more than a pipe holds, which nobody reads

    assert (task["status"], task["result"]["result"]) == ("succeeded", result)


def test_a_program_knows_its_task_and_not_the_workers_credential(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, "env"))

    task = run(gate, "t")

    told = dict(line.split("=", 1) for line in task["result"]["result"].splitlines() if "=" in line)
    mine = {name.removeprefix("ASYNCGATE_"): value for name, value in told.items() if name.startswith("ASYNCGATE_")}
    lease_id, pid = mine.pop("LEASE_ID"), mine.pop("WORKER_PID")
    assert mine == {"URL": gate.url, "WORKER_ID": "w", "TASK_ID": task["task_id"], "TASK_TYPE": "t", "FENCE": "1",
                    "ATTEMPT": "0"}
    assert lease_id
    assert pid.isdecimal()
    assert told["MINE"] == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of others")
def test_a_program_finds_no_credential_in_the_environment_of_its_worker(
        gate: Http, begin: Begin, tmp_path: Path) -> None:
    """Where the worker keeps it in memory, /proc shows zeros; and whoever is not root may not look at all."""
    look = "printf '%s' \"$(tr '\\0' ' ' < /proc/$PPID/environ 2>&1)\"; ps -o args= -p $PPID 2>/dev/null || true"
    begin("--type", "look", "--", "sh", "-c", look)

    task = run(gate, "look")

    assert task["status"] == "succeeded", task
    assert TOKEN not in str(task["result"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts orphans")
@pytest.mark.parametrize("leaves", ["setsid SLEEP &", "(setsid sh -c 'SLEEP & SLEEP' &)", "env -i setsid SLEEP &"])
def test_what_leaves_its_session_ends_with_the_run_all_the_same(gate: Http, begin: Begin, leaves: str) -> None:
    sleep = f"sleep 600.{os.getpid()}"
    leaves = leaves.replace("SLEEP", sleep)
    begin("--type", "leave", "--", "sh", "-c", f"{leaves}\nuntil pgrep -fx '{sleep}'; do :; done")

    task = run(gate, "leave")

    assert (task["status"], bool(task["result"]["result"])) == ("succeeded", True), "it was there"
    assert subprocess.run(["pgrep", "-fx", sleep], check=False, capture_output=True).stdout == b""


@pytest.mark.parametrize(("text", "status", "attempt", "code"), [
    ("echo bad scan >&2; exit 3", "failed", 0, "exit_3"), ("exit 75", "failed", 1, "exit_75"),
    ("kill -9 $$", "failed", 1, "signal_9")])
def test_the_exit_status_says_whether_another_attempt_may_succeed(
        gate: Http, begin: Begin, tmp_path: Path, text: str, status: str, attempt: int, code: str) -> None:
    begin(*script(tmp_path, text))

    task = run(gate, "t", max_attempts=2)

    error = task["result"]["error"]
    assert (task["status"], task["attempt"], error["code"]) == (status, attempt, code)
    assert error["message"].endswith("ended with status 3: bad scan") is ("bad scan" in text)


def test_a_program_parks_its_task(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, """\
        [ "$ASYNCGATE_CHECKPOINT" = 1 ] && echo '"after the rest"' && exit 0
        echo '{"checkpoint": 1, "park": 0.1}' >&3
        exit 75
    """))

    task = run(gate, "t", max_attempts=1)

    assert (task["status"], task["parks"], task["attempt"]) == ("succeeded", 1, 0)
    assert task["result"]["result"] == "after the rest"


def test_a_program_that_parks_its_task_without_a_time_fails_it(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, """echo '{"park": "soon"}' >&3; exit 75"""))

    task = run(gate, "t")

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "invalid_park")


def test_lines_on_descriptor_3_are_progress_and_say_where_artifacts_are(
        gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, """\
        echo '{"page": 1}' >&3
        while [ ! -e go ]; do sleep 0.05; done
        echo '{"artifacts": [{"uri": "file:///out.png"}]}' >&3
        echo half done >&3
    """))
    task_id = create(gate, "t")

    first = poll(lambda: gate.call("get_task", task_id=task_id)["progress"])
    (tmp_path / "go").touch()
    task = ended(gate, task_id)

    assert first == {"page": 1}
    assert task["result"]["artifacts"] == [{"uri": "file:///out.png"}]


def test_a_program_goes_on_from_the_checkpoint_of_one_that_was_lost(
        gate: Http, begin: Begin, tmp_path: Path) -> None:
    arguments = script(tmp_path, """\
        if [ -n "$ASYNCGATE_CHECKPOINT" ]; then echo "{\\"from\\": $ASYNCGATE_CHECKPOINT}"; exit 0; fi
        echo '{"checkpoint": {"page": 7}, "pages": 9}' >&3
        exec sleep 600
    """)
    worker = begin("--ttl", "1", *arguments)
    task_id = create(gate, "t")
    progress = poll(lambda: gate.call("get_task", task_id=task_id)["progress"])
    pids = children_of(worker)      # none, if a busy machine has lost the lease before, and the worker went on itself

    worker.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begin("--ttl", "1", *arguments)
    task = ended(gate, task_id)

    assert progress == {"checkpoint": {"page": 7}, "pages": 9}
    assert task["result"]["result"] == {"from": {"page": 7}}


def test_a_task_that_kills_its_worker_is_on_hold_although_the_worker_is_restarted_each_time(
        gate: Http, begin: Begin, tmp_path: Path) -> None:
    arguments = ("--ttl", "600", *script(tmp_path, 'case $(cat) in *deadly*) kill -9 $PPID;; esac'))
    task_id, after = create(gate, "t", "deadly", max_expiries=3), create(gate, "t")

    for _ in range(3):
        assert begin(*arguments).wait(PATIENCE_SECONDS) == -signal.SIGKILL
    begin(*arguments)

    assert ended(gate, after)["status"] == "succeeded"
    assert gate.call("get_task", task_id=task_id)["held"] == "lease_expiries"
    told = gate.call("get_task_history", task_id=task_id)["events"]
    assert [event["payload"]["expiries"] for event in told if event["event_type"] == "lease.resumed"] == [1, 2, 3]
    assert "w lost its lease 3 times" in gate.call("explain_task", task_id=task_id)["summary"]


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("group", [False, True], ids=["the worker", "its group"])
def test_a_program_and_its_descendants_end_when_their_worker_is_killed(
        gate: Http, begin: Begin, tmp_path: Path, group: bool) -> None:
    worker = begin("--concurrency", "2", *script(tmp_path, """\
        sleep 600 &
        setsid sleep 601 &
        echo $$ $! $(jobs -p) > pids.$$
        trap '' TERM
        while true; do sleep 0.1; done
    """))
    for _ in range(2):
        create(gate, "t")
    files = poll(lambda: len(some := [path for path in tmp_path.glob("pids.*") if path.read_text()]) == 2 and some)
    pids = [pid for path in files for pid in path.read_text().split()]
    assert all(map(is_alive, pids))

    os.killpg(worker.pid, signal.SIGKILL) if group else worker.kill()

    poll(lambda: not any(map(is_alive, pids)))


def test_a_worker_that_ends_leaves_no_guardian(gate: Http, begin: Begin, tmp_path: Path) -> None:
    worker = begin(*script(tmp_path, "cat"))
    run(gate, "t")
    guardians = children_of(worker)

    worker.terminate()
    worker.wait(PATIENCE_SECONDS)

    assert len(guardians) == 1
    poll(lambda: not any(is_alive(str(pid)) for pid in guardians))


def children_of(worker: subprocess.Popen[str]) -> list[int]:
    """The processes that a worker has started."""
    tasks = Path(f"/proc/{worker.pid}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


@pytest.mark.parametrize("stubborn", [False, True])
def test_the_whole_process_group_ends_with_the_lease(
        gate: Http, begin: Begin, tmp_path: Path, stubborn: bool) -> None:
    begin(*script(tmp_path, f"""\
        {"trap '' TERM" if stubborn else "trap 'echo politely > told; exit 1' TERM"}
        sleep 600 &
        echo $$ $! > pids
        while true; do sleep 0.1; done
    """))
    task_id = create(gate, "t")
    pids = poll(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split())

    gate.call("cancel_task", task_id=task_id)

    poll(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert (tmp_path / "told").exists() is not stubborn


def test_what_a_program_leaves_running_ends_with_it(gate: Http, begin: Begin, tmp_path: Path) -> None:
    begin(*script(tmp_path, "sleep 600 &\necho $!"))

    task = run(gate, "t")

    poll(lambda: not Path(f"/proc/{task['result']['result']}").exists())
    assert task["status"] == "succeeded"


def test_sigterm_lets_a_program_end_and_takes_no_more(gate: Http, begin: Begin, tmp_path: Path) -> None:
    worker = begin(*script(tmp_path, "touch begun; while [ ! -e go ]; do sleep 0.05; done; echo done"))
    first, second = create(gate, "t"), create(gate, "t")
    poll((tmp_path / "begun").exists)

    worker.terminate()
    (tmp_path / "go").touch()
    worker.communicate(timeout=PATIENCE_SECONDS)

    assert worker.returncode == 0
    assert ended(gate, first)["result"]["result"] == "done"
    assert gate.call("get_task", task_id=second)["status"] == "queued"


def test_a_second_signal_ends_at_once_and_gives_the_task_back(gate: Http, begin: Begin, tmp_path: Path) -> None:
    worker = begin(*script(tmp_path, "echo $$ > pid; exec sleep 600"))
    task_id = create(gate, "t")
    poll(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())

    worker.terminate()
    assert worker.stderr
    while "stopping; jobs running: 1" not in (line := worker.stderr.readline()):
        assert line, "it ended at once"
    worker.terminate()
    worker.communicate(timeout=PATIENCE_SECONDS)

    assert worker.returncode == 0
    task = gate.call("get_task", task_id=task_id)
    assert (task["status"], task["attempt"], task["expiries"]) == ("queued", 0, 0)


# The command.


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "name the tasks"), (("--type", "t"), "name the tasks"), (("--", "true"), "name the tasks"),
    (("echo", "--", "true"), "name the tasks"), (("echo", "nothing"), "is not one of echo"),
    (("echo", "http_get", "--type", "t"), "--type gives other names to one task"),
    (("--type", "t", "--", "no-such-program"), "there is no program 'no-such-program'"),
    (("http_get", "--allow", "ten/8"), "--allow: 'ten/8' is neither a host nor a network"),
    (("http_get", "--timeout", "0"), "not between 0.001 seconds"), (("echo", "--state", "/dev/null/x"), "--forget)"),
    (("echo", "--url", "http://gate:99999"), "a gate's URL is like")])
def test_a_command_that_makes_no_sense_says_why(begin: Begin, arguments: tuple[str, ...], says: str) -> None:
    _, errors = begin(*arguments).communicate(timeout=PATIENCE_SECONDS)

    assert says in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("type", ["", " t"])
def test_a_claim_that_the_gate_cannot_understand_ends_it(begin: Begin, type: str) -> None:
    worker = begin("--type", type, "--", "true")

    _, errors = worker.communicate(timeout=PATIENCE_SECONDS)

    assert worker.returncode == 2
    assert errors.splitlines()[-1].startswith("Error: invalid_request (400): lease_next: ")


def test_a_gate_that_does_not_let_it_in_ends_it(begin: Begin) -> None:
    worker = begin("echo", "--token", "wrong")

    _, errors = worker.communicate(timeout=PATIENCE_SECONDS)

    assert worker.returncode == 3
    assert errors.splitlines()[-1].startswith("Error: unauthenticated (401)")


# Small tasks.


def test_one_worker_takes_all_built_in_types_and_refuses_members_that_it_does_not_know(
        gate: Http, begin: Begin) -> None:
    begin("echo", "sleep_then_return", "http_get")

    assert run(gate, "echo", {"any": 1})["result"]["result"] == {"any": 1}
    for type, payload, wrong in (("sleep_then_return", {"duration": 0.1}, "duration"),
                                 ("http_get", {"url": "https://a.example", "header": {}}, "header")):
        error = run(gate, type, payload)["result"]["error"]
        assert (error["code"], f"unknown field `{wrong}`" in error["message"]) == ("invalid_payload", True)
    for url in ("file:///etc/passwd", "ftp://a.example", "a.example"):
        error = run(gate, "http_get", {"url": url})["result"]["error"]
        assert error == {"code": "barred", "message": "only http and https URLs with a host may be called"}


def test_sleep_then_return_sleeps_and_returns(gate: Http, begin: Begin) -> None:
    begin("sleep_then_return")

    task = run(gate, "sleep_then_return", {"seconds": 0.2, "result": ["rested"]})

    assert task["result"]["result"] == ["rested"]
    assert run(gate, "sleep_then_return", {"seconds": "long"})["result"]["error"]["code"] == "invalid_payload"


class Site(BaseHTTPRequestHandler):
    """A site with a page, a picture, a redirect inward, and a door that is shut for now."""

    def do_GET(self) -> None:
        """Answer."""
        self.server.asked.append(self.path)     # type: ignore[attr-defined]
        status = {"/busy": 503, "/away": 302}.get(self.path, 200)
        body = PICTURE if self.path == "/picture" else b"hello " + self.headers.get("x-who", "").encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "0")
        if status == 302:
            self.send_header("location", "http://[::1]:9/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[Any]:
    """A site on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.asked = []   # type: ignore[attr-defined]
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_http_get_fetches_what_it_may_and_tries_again_what_is_busy(gate: Http, begin: Begin, site: Any) -> None:
    begin("http_get", "--allow", "127.0.0.1")
    url = f"http://127.0.0.1:{site.server_port}"

    page = run(gate, "http_get", {"url": f"{url}/page", "headers": {"x-who": "ada"}})["result"]["result"]
    picture = run(gate, "http_get", {"url": f"{url}/picture"})["result"]["result"]
    busy = run(gate, "http_get", {"url": f"{url}/busy"}, max_attempts=3)

    assert (page["status"], page["text"]) == (200, "hello ada")
    assert picture["base64"] == base64.b64encode(PICTURE).decode()
    assert (busy["attempt"], busy["result"]["error"]["code"], site.asked.count("/busy")) == (2, "later", 3)


@pytest.mark.parametrize("target", ["http://127.0.0.1:{port}/page", "https://localhost:{port}/", "file:///etc/passwd",
                                    "http://169.254.169.254/latest/meta-data/", "http://ada@127.0.0.1:{port}/page",
                                    "gopher://127.0.0.1:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "nonsense"])
def test_http_get_reaches_nothing_but_the_public_internet(
        gate: Http, begin: Begin, site: Any, target: str) -> None:
    begin("http_get", "--plain-http")

    task = run(gate, "http_get", {"url": target.format(port=site.server_port)}, max_attempts=2)

    assert (task["status"], task["attempt"], site.asked) == ("failed", 0, [])
    error = task["result"]["error"]
    assert error["code"] in ("barred", "not_fetched")
    assert "security.outgoing" not in error["message"]      # a setting of the gate, which no worker reads


def test_http_get_follows_no_redirect_inward(gate: Http, begin: Begin, site: Any) -> None:
    begin("http_get", "--allow", "127.0.0.1")

    task = run(gate, "http_get", {"url": f"http://127.0.0.1:{site.server_port}/away"}, max_attempts=2)

    assert (task["attempt"], task["result"]["error"]["code"]) == (0, "barred")
    assert "--allow" in task["result"]["error"]["message"]


@pytest.mark.parametrize("call", ["pipe", "dup", "spawn"])
def test_a_program_that_cannot_be_started_leaves_no_pipe_open(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A worker at its limit of open files would never get below it again."""
    module, name = {"pipe": (os, "pipe"), "dup": (fcntl, "fcntl"), "spawn": (os, "posix_spawn")}[call]
    calls, real = 0, getattr(module, name)

    def fail_late(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 or call == "spawn":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*given, **more)
    monkeypatch.setattr(module, name, fail_late)
    before = os.listdir("/proc/self/fd")

    with pytest.raises(OSError, match="open files"):
        Run(None).begin("/bin/true", ["true"], {})  # type: ignore[arg-type]  # it needs no job yet

    assert os.listdir("/proc/self/fd") == before
