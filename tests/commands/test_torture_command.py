"""`asyncgate torture`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate.commands.torture import FAULTS
from asyncgate.conformance.postgres_server import find_programs, free_port
from asyncgate.conformance.recording import read_record
from tests.support.patience import PATIENCE_SECONDS, poll

FORKER = """
import sys, time
from asyncgate.conformance.forks import ForkingPopen
gate = ForkingPopen([sys.executable, "-m", "asyncgate", "serve", "--port", "0", "--database", "memory://"])
time.sleep(600)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "asyncgate", "torture", *map(str, arguments)], capture_output=True,
                          text=True)


def test_a_run_is_reported_with_its_seed_its_numbers_and_its_command(tmp_path: Path) -> None:
    urls = ["sqlite:", *["postgres:"] * (find_programs() is not None)]
    chosen = ("--rounds", "1", "--calls", "100", "--seed", "7", "--report", str(tmp_path))

    done = run(*urls, *chosen)

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "torture.json").read_text())
    assert report["command"] == " ".join(["asyncgate torture", *urls, *chosen])
    assert report["seed"] == 7
    assert [row["database"] for row in report["databases"]] == urls
    for row in report["databases"]:
        assert (row["rounds"], row["violations"], row["done"].keys()) == (1, 0, set(row["faults"]))
        assert row["operations"] > 200
        assert row["unknown"] > 0
    assert "0 violations" in (tmp_path / "torture.html").read_text()
    assert report["databases"][0]["done"] == {"kill": 2, "pause": 2}


def test_a_simulation_is_repeated_by_its_seed_and_reported(tmp_path: Path) -> None:
    first, again = [run("--simulate", "1", "--seed", "11", *more) for more in (("--report", tmp_path), ())]

    assert first.returncode == 0, first.stdout + first.stderr
    assert re.findall("trace [0-9a-f]{16}", first.stdout) == re.findall("trace [0-9a-f]{16}", again.stdout) != []
    [row] = json.loads((tmp_path / "torture.json").read_text())["databases"]
    assert (row["database"], row["rounds"], row["violations"]) == ("simulation", 1, 0)
    assert row["operations"] >= 500
    assert row["done"]["kill"]


@pytest.mark.parametrize(("arguments", "why"), [
    ([], "name the databases"),
    (["sqlite:", "--simulate", "1"], "name the databases"),
    (["memory:"], "keeps nothing when its process ends"),
    (["sqlite:", "--faults", "restart"], "restart is for a bare postgres:"),
    (["postgres:", "--faults", "kill,power"], "power is for a bare sqlite:, whose files this command makes itself"),
    (["sqlite:///gate.db", "--faults", "power"], "power is for a bare sqlite:"),
    (["sqlite:", "--faults", "fire"], f"there is no fault fire; there are {FAULTS}"),
    (["sqlite:", "--gates", "2"], "serves one gate at a time"),
    (["sqlite:", "--soak", "1", "--rounds", "2"], "a soak has no rounds and no faults"),
    (["--judge", __file__], "line 1 of "),
    (["--judge", os.devnull], "/dev/null is not a history"),
    (["mysql://gate@db/gate"], "there is no backend for mysql:"),
    (["sqlite:///no/such/folder/gate.db"], "cannot open no/such/folder/gate.db"),
    (["sqlite:", f"postgresql://gate:secret@127.0.0.1:{free_port()}/gate"], "cannot reach the database: 127.0.0.1")])
def test_what_cannot_be_done_is_refused_in_words(arguments: list[str], why: str) -> None:
    done = run(*arguments)

    assert done.returncode in (1, 2)
    assert why in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("line", "why"), [
    ({"call": 1}, "it has no 'event'"), ({"event": "begin"}, "it has no 'tenant'"),
    ({"event": "ok", "call": 1}, "it has no 1"), ({"event": "hum"}, "there is no event hum"), ([1], "line 1 of ")])
def test_a_file_that_is_not_a_history_is_refused_with_the_line_that_is_wrong(
        line: object, why: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(line))

    with pytest.raises(ValueError, match=re.escape(why)):
        read_record(path)


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_torture_that_is_stopped_ends_its_gates_and_leaves_no_files(
        tmp_path: Path, sign: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "asyncgate", "torture", "sqlite:", "--faults", "ledger", "--seconds", "3600"]
    torture = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        poll(lambda: [*tmp_path.rglob("ledger.db"), *tmp_path.rglob("gate-1.db-wal")][1:])
        torture.send_signal(sign)
        assert torture.wait(PATIENCE_SECONDS) == status
    finally:
        torture.kill()

    assert list(tmp_path.iterdir()) == []
    poll(lambda: str(tmp_path) not in list_programs())


def list_programs() -> str:
    """Return all processes with their environments: what torture forks has the arguments of what it is forked from."""
    return subprocess.run(["ps", "axeww"], capture_output=True, check=True, text=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")
def test_a_gate_that_was_forked_ends_with_whoever_started_it_and_was_killed() -> None:
    forker = subprocess.Popen([sys.executable, "-c", FORKER], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "ASYNCGATE_API_KEY": "of-nobody"}, text=True)
    try:
        assert forker.stdout is not None
        assert any(" serves http://" in line for line in forker.stdout)
    finally:
        forker.kill()
        forker.communicate(timeout=PATIENCE_SECONDS)        # the stream ends when the gate has ended, too


def test_a_simulation_that_is_interrupted_reports_what_it_has_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncgate", "torture", "--simulate", "1000000000", "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as simulation:
        assert simulation.stdout is not None
        assert simulation.stdout.readline().startswith("seed ")
        simulation.send_signal(signal.SIGINT)
        _, stderr = simulation.communicate(timeout=PATIENCE_SECONDS)

    assert (simulation.returncode, stderr.startswith("Error: interrupted")) == (130, True)
    assert json.loads((tmp_path / "torture.json").read_text())["interrupted"] is True
    assert "until the run was interrupted." in (tmp_path / "torture.html").read_text()


def test_settings_of_the_surroundings_are_not_those_of_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the shell of somebody who operates a gate."""
    for name, value in {"ASYNCGATE_LOG_LEVEL": "error", "DEFAULT_PRIORITY": "high", "RECEIPTGATE_URL": "x"}.items():
        monkeypatch.setenv(name, value)

    done = run("sqlite:", "--rounds", "1", "--strikes", "1", "--calls", "30", "--faults", "kill,ledger")

    assert done.returncode == 0, done.stdout + done.stderr


