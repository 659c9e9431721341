"""The README says what the code says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.commands.tables import refreshed, tables
from asyncgate.parts.model.settings import load_settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["operations", "settings"])
def test_the_tables_are_those_of_the_code(name: str) -> None:
    assert f"<!-- {name}:begin -->" in README
    assert refreshed(README, tables()) == README, "run: python -m asyncgate.commands.tables README.md"


def test_every_yaml_example_loads(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", README, re.S)
    assert examples
    for example in examples:
        (tmp_path / "config.yaml").write_text(example)
        load_settings(str(tmp_path / "config.yaml"), environ={"ASYNCGATE_API_KEY": "secret"})


def test_every_json_example_is_json() -> None:
    examples = re.findall(r"```json\n(.*?)```", README, re.S)
    assert examples
    for example in examples:
        json.loads(example)


def test_the_backend_of_the_readme_is_the_one_that_the_suite_runs_against() -> None:
    shown = re.search(r"<!-- third-party -->\n```python\n(.*?)```", README, re.S)
    assert shown
    assert shown[1] == (ROOT / "tests" / "support" / "third_party_backend.py").read_text()


def examples(kind: str) -> list[str]:
    """Return the Python examples that are marked so."""
    return re.findall(rf"<!-- {kind} -->\n```python\n(.*?)```", README, re.S)


@pytest.fixture
def echoing(start: Callable[..., Any]) -> Iterator[dict[str, str]]:
    """Return the surroundings of a program that finds a gate, with the worker of `asyncgate dev`."""
    surroundings = {**os.environ, "ASYNCGATE_URL": start().url, "ASYNCGATE_API_KEY": "a-token-for-tests"}
    worker = subprocess.Popen([sys.executable, "-m", "asyncgate", "worker", "echo", "--forget"], env=surroundings)
    yield surroundings
    worker.terminate()
    worker.wait()


@pytest.mark.parametrize("said", [(0, "{'page': 3}\n"), (1, "0\n1\n2\n")])
def test_the_examples_of_the_client_print_what_they_should(echoing: dict[str, str], said: tuple[int, str]) -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", examples("client:run")[said[0]]], env=echoing,
                         capture_output=True, text=True, timeout=60)

    assert (ran.stdout, ran.stderr) == (said[1], "")


def test_every_example_of_the_client_is_run() -> None:
    assert (len(examples("client:run")), len(examples("client:pytest"))) == (2, 1)
    chapter = README.partition("## The Python client\n")[2].partition("\n## ")[0]
    assert chapter.count("```python") == 3


def test_the_example_of_the_testing_kit_passes(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(examples("client:pytest")[0])

    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", tmp_path],
                         cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.fixture
def working(start: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Http]]:
    """Start a worker with a gate of its own; return a client of it."""
    with contextlib.ExitStack() as stack:
        def work(*command: str) -> Http:
            gate = stack.enter_context(Http(start().url, "a-token-for-tests"))
            around = {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": gate.token,
                      "XDG_STATE_HOME": str(tmp_path)}
            worker = stack.enter_context(subprocess.Popen([sys.executable, *command], env=around))
            stack.callback(worker.kill)
            return gate
        yield work


@pytest.mark.parametrize(("at", "task", "result"), [
    (0, {"type": "greet", "payload": "ada"}, "hello ada"),
    (1, {"type": "ocr.scan", "payload": {"file": "a.png", "pages": 2}, "requirements": {"capabilities": ["ocr"]}},
     ["page 0 of a.png", "page 1 of a.png"])])
def test_the_workers_of_the_readme_work(working: Callable[..., Http], at: int, task: Any, result: Any) -> None:
    gate = working("-W", "error", "-c", examples("worker:run")[at])

    done = gate.call("run_task", **task)

    assert (done["status"], done["result"]["result"]) == ("succeeded", result)


def test_every_worker_of_the_readme_is_run_and_the_first_has_ten_lines() -> None:
    found = examples("worker:run")

    assert len(found) == 2
    assert len([line for line in found[0].splitlines() if line]) <= 10


def test_the_shell_worker_of_the_readme_counts_words(working: Callable[..., Http], tmp_path: Path) -> None:
    [script] = re.findall(r"<!-- worker:sh -->\n```sh\n(.*?)```", README, re.S)
    (tmp_path / "count.sh").write_text(script)
    (tmp_path / "count.sh").chmod(0o755)
    gate = working("-m", "asyncgate", "worker", "--type", "words.count", "--", str(tmp_path / "count.sh"))

    done = gate.call("run_task", type="words.count", payload="to be or not to be")

    assert (done["status"], done["result"]["result"]) == ("succeeded", 6)
    assert done["progress"] in (None, {"doing": "counting"})
