"""`asyncgate serve --processes N`: real processes on a real Postgres, killed, frozen, replaced and stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from asyncgate.conformance.postgres_server import free_port
from tests.conftest import TOKEN
from tests.support.patience import PATIENCE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="--processes needs Linux")]
Fresh = Callable[[str], Awaitable[str]]
SERVES = re.compile(r"serves \S+:(\d+) with")


class Several:
    """A parent with its processes, and what they log."""

    def __init__(self, database: str, *more: str, number: int = 3, port: int = 0, first: str = "",
                 **environment: str) -> None:
        script = f"{first}\nimport sys\nfrom asyncgate import main\nsys.exit(main())"
        command = [sys.executable, "-c", script, "serve", "--port", str(port), "--processes", str(number), "--database",
                   database, "--set", "lease_sweep_interval_seconds=0.2", *more]
        self.process = subprocess.Popen(command, env={**os.environ, "ASYNCGATE_API_KEY": TOKEN, **environment},
                                        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.log, self.rest = "", b""

    def until(self, text: str) -> str:
        """Read the log until it has a line with a text; return that line."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while True:
            line, newline, self.rest = self.rest.partition(b"\n")
            if newline:
                self.log += line.decode() + "\n"
                if re.search(text, line.decode()):
                    return line.decode()
                continue
            self.rest = line
            assert select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0.0))[0], self.log
            read = os.read(self.process.stderr.fileno(), 65536)
            assert read, f"the gate ended: {self.log}"
            self.rest += read

    def begin(self) -> None:
        """Wait until all serve."""
        match = SERVES.search(self.until("with . processes"))
        assert match
        self.port = int(match[1])

    def children(self) -> list[int]:
        """Return the ids of the processes."""
        told = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return sorted(map(int, told.split()))

    def read_metrics(self, port: int) -> str:
        """Return what a process shows at its second listener."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return answer.read().decode()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make one call on a connection of its own, as a client does that comes back when it was cut."""
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
            with contextlib.closing(connection), contextlib.suppress(ConnectionError, http.client.BadStatusLine):
                connection.request(method, path, None if body is None else json.dumps(body), {
                    "authorization": f"Bearer {TOKEN}", "content-type": "application/json"})
                answer = connection.getresponse()
                assert answer.status == 200, answer.read()
                return json.loads(answer.read())
        raise AssertionError("cut five times")

    def instances(self, enough: int) -> set[str]:
        """Ask until so many processes have answered; return their instance ids."""
        ids: set[str] = set()
        while len(ids) < enough:
            ids.add(self.call("GET", "/v1/config")["instance_id"])
        return ids

    def end(self) -> int:
        """Return the exit status of the parent."""
        with contextlib.suppress(AssertionError):
            self.until("nothing says this")
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
async def several(fresh: Fresh) -> AsyncIterator[Callable[..., Awaitable[Several]]]:
    """Return what starts several processes on a new Postgres."""
    with contextlib.ExitStack() as started:
        async def several(*more: str, **about: Any) -> Several:
            made = Several(await fresh("postgres"), *more, **about)
            started.callback(made.process.communicate)
            started.callback(made.process.kill)         # the others end with it
            return made

        yield several


def is_there(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline


Start = Callable[..., Awaitable[Several]]


async def test_work_goes_on_when_a_process_is_killed_and_another_takes_its_place(several: Start) -> None:
    gate = await several("--set", "instance_id=gate")
    gate.begin()
    before = gate.children()
    assert gate.instances(3) == {"gate-1", "gate-2", "gate-3"}
    tasks = [gate.call("POST", "/v1/tasks", {"type": "demo", "payload": n, "agent_id": "ada"})["task_id"]
             for n in range(10)]
    held = gate.call("POST", "/v1/leases/claim", {"worker_id": "w", "max_tasks": 10})["tasks"]

    os.kill(before[0], signal.SIGKILL)

    for offer in held:      # also while nobody serves at one of the sockets
        done = {"lease_id": offer["lease_id"], "worker_id": "w", "result": 1}
        assert gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", done)["ok"]
    assert {gate.call("GET", f"/v1/tasks/{task_id}")["status"] for task_id in tasks} == {"succeeded"}
    gate.until(r"process \d ended with status -9; another one takes its place")
    assert gate.instances(3) == {"gate-1", "gate-2", "gate-3"}
    after = gate.children()
    assert (len(after), len({*after} & {*before})) == (3, 2)
    gate.process.send_signal(signal.SIGTERM)
    assert gate.end() == 0
    assert not any(map(is_there, after))


async def test_the_others_go_on_while_the_machine_has_no_room_for_another_process(several: Start) -> None:
    gate = await several(number=2)
    gate.begin()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, (3, usual[1]))
    killed, left = gate.children()

    os.kill(killed, signal.SIGKILL)

    gate.until("process . cannot be started: .*Too many open files")
    assert gate.children() == [left]
    resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, usual)
    until(lambda: len(gate.children()) == 2)
    assert len(gate.instances(2)) == 2
    gate.process.send_signal(signal.SIGTERM)
    assert gate.end() == 0


async def test_each_process_has_a_name_of_its_own_and_the_parent_passes_the_end_on(several: Start) -> None:
    gate = await several(number=2)
    gate.begin()
    children = gate.children()

    assert len(gate.instances(2)) == 2
    gate.process.send_signal(signal.SIGINT)

    assert gate.end() == 0
    assert not any(map(is_there, children))


async def test_a_request_is_finished_while_a_gate_that_stops_takes_no_new_connection(several: Start) -> None:
    gate = await several("--set", "shutdown_seconds=30", number=2)
    gate.begin()
    body = json.dumps({"type": "demo", "payload": None, "agent_id": "ada"}).encode()
    head = (f"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n").encode()
    with socket.create_connection(("127.0.0.1", gate.port), PATIENCE_SECONDS) as held:
        held.sendall(head)
        assert held.recv(4096).startswith(b"HTTP/1.1 100 ")

        gate.process.send_signal(signal.SIGTERM)

        until(lambda: is_refused(gate.port))
        assert gate.process.poll() is None
        held.sendall(body)
        assert held.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert gate.end() == 0


def is_refused(port: int) -> bool:
    """Whether nobody listens."""
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:    # the listener closed before it took this one
        return False
    return False


async def test_no_process_outlives_a_parent_that_is_killed(several: Start) -> None:
    gate = await several(number=2)
    gate.begin()
    children = gate.children()

    gate.process.kill()

    until(lambda: not any(map(is_there, children)))


async def test_a_hang_up_replaces_one_process_after_the_other(several: Start) -> None:
    gate = await several(number=2)
    gate.begin()
    before = gate.children()

    gate.process.send_signal(signal.SIGHUP)

    gate.until("all processes have been replaced")
    assert len(gate.children()) == 2
    assert not {*gate.children()} & {*before}
    assert gate.call("GET", "/ready")["ready"]
    assert "ended with status" not in gate.log


FROZEN = """
import signal, time
import asyncgate.commands.processes as processes
processes.FROZEN_SECONDS = 2.0
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
"""


async def test_a_frozen_process_is_killed_and_replaced(several: Start) -> None:
    gate = await several(number=2, first=FROZEN)
    gate.begin()
    frozen = gate.children()[0]

    os.kill(frozen, signal.SIGUSR1)

    gate.until("gave no sign for 2 s; it is killed")
    gate.until("ended with status -9")
    assert len(gate.instances(2)) == 2
    assert frozen not in gate.children()


async def test_what_keeps_the_processes_from_starting_ends_the_parent_with_their_status(several: Start) -> None:
    gate = await several("--set", "security.jwt.public_key_path=/nowhere.pem")

    assert gate.end() == 2


async def test_a_manager_hears_when_all_serve_and_when_they_stop(several: Start) -> None:
    with TemporaryDirectory() as folder, contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sock:
        sock.bind(f"{folder}/notify")
        sock.settimeout(2 * PATIENCE_SECONDS)
        gate = await several(number=2, NOTIFY_SOCKET=f"{folder}/notify")

        first = sock.recv(4096).decode()
        gate.begin()
        gate.process.send_signal(signal.SIGHUP)
        again = [sock.recv(4096).decode().split("\n")[0] for _ in range(2)]
        gate.process.send_signal(signal.SIGTERM)
        last = sock.recv(4096).decode()

    assert first.split("\n") == ["READY=1", f"STATUS=2 processes serve 127.0.0.1:{gate.port}"]
    assert again == ["RELOADING=1", "READY=1"]
    assert last.startswith("STOPPING=1")
    assert gate.end() == 0


def find_free_ports(number: int) -> int:
    """Return the first of so many ports in a row that nobody has."""
    while True:
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            first = free_port()
            for more in range(1, number):
                taken.enter_context(socket.create_server(("127.0.0.1", first + more)))
            return first


async def test_each_process_shows_its_own_metrics_at_a_port_of_its_own(several: Start) -> None:
    first = find_free_ports(2)
    gate = await several("--set", "metrics.enabled=true", "--set", f"metrics.port={first}", number=2)
    gate.begin()
    for n in range(10):
        gate.call("POST", "/v1/tasks", {"type": "demo", "payload": n, "agent_id": "ada"})

    shown = [gate.read_metrics(first + n) for n in range(2)]

    made = [re.findall(r'^asyncgate_requests_total{.*operation="create_task".* (\d+)', page, re.M) for page in shown]
    assert sum(float(number) for numbers in made for number in numbers) == 10, shown


async def test_a_scrape_that_reaches_any_process_is_warned_of(several: Start) -> None:
    gate = await several("--set", "metrics.enabled=true", number=2)

    gate.until("a scrape of /metrics reaches any one of them: set metrics.port")


async def test_two_parents_do_not_share_a_port(several: Start) -> None:
    gate = await several(number=2)
    gate.begin()

    other = await several(port=gate.port, number=2)

    assert other.end() == 1
    assert "cannot listen on" in other.log


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return what a parent says that does not start."""
    def refused(*about: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "asyncgate", "serve", "--processes", "2", *about],
                              env={**os.environ, "ASYNCGATE_API_KEY": TOKEN}, capture_output=True, text=True,
                              timeout=PATIENCE_SECONDS, cwd=tmp_path)
        return done.returncode, done.stderr

    return refused


@pytest.mark.parametrize("database", ["sqlite:///gate.db", "memory://"])
def test_several_processes_need_a_database_that_they_can_share(
        refused: Callable[..., tuple[int, str]], database: str) -> None:
    status, output = refused("--database", database)

    assert status == 2
    assert "--processes needs a database that several processes share: Postgres" in output


def test_a_last_port_of_metrics_that_there_is_not_is_refused(refused: Callable[..., tuple[int, str]]) -> None:
    status, output = refused("--database", "postgresql://127.0.0.1:1/none", "--set", "metrics.port=65535")

    assert status == 2
    assert "set metrics.port to 65534 at most" in output
