"""A new operation touches three things: its Structs on the wire, its method, its line in the table.

A copy of the house gets one, and nothing else of it is touched but what the two generators write.  What is then there
is asked by `tests/support/added_operation.py`, and by all tests that go through the table.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ("asyncgate.py", "backends", "clients", "commands", "conformance", "parts", "tests", "docs", "skills",
         "README.md", "CHANGELOG.md", "pyproject.toml")
NAME = "count_events"
STRUCTS = '''

class CountEvents(TaskAsk, kw_only=True):
    """Count what happened to one task."""

    example = ({"task_id": TASK}, {"events": [{"event_type": "task.assigned", "number": 1}]})
    next_step = "get_task_history shows each of them."


class EventCount(Struct):
    """How often something happened."""

    event_type: str
    number: int


class EventCounts(Struct):
    """How often each thing happened."""

    columns = "event_type number"
    events: list[EventCount]
'''
IMPORTED = "    CountEvents, EventCount, EventCounts,\n"
METHOD = '''    async def count_events(self, caller: Caller, ask: CountEvents) -> EventCounts:
        """Count what happened to a task, by the type of event."""
        history = await self.get_task_history(caller, GetTaskHistory(task_id=ask.task_id, limit=200))
        types = [event.event_type for event in history.events]
        return EventCounts([EventCount(type, types.count(type)) for type in sorted({*types})])

'''
LINE = '''\
    Operation(Engine.count_events, "GET /v1/tasks/{task_id}/counts", EVERYONE, "tasks:read tasks:lease", "R"),
'''
# Tests that go through the table; what they say of every operation they say of this one.
EVERY = ("conformance/test_permissions.py", "tests/faces/test_openapi.py", "tests/faces/test_mcp.py",
         "tests/faces/test_mcp_tools.py", "tests/faces/test_symmetry.py", "tests/faces/test_bad_input.py",
         "tests/faces/test_rest.py", "tests/clients/test_client.py", "tests/commands/test_cli.py")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the house with one more operation."""
    copy = tmp_path_factory.mktemp("house")
    for name in HOUSE:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, copy / name)
    add(copy / "parts/model/wire.py", r"\Z", STRUCTS)
    add(copy / "asyncgate.py", r"(?<=from asyncgate.parts.model.wire import \(\n)", IMPORTED)
    add(copy / "asyncgate.py", r"(?=    def cancel_task\()", METHOD)
    add(copy / "asyncgate.py", r"(?<=CORE_OPERATIONS = {op.name: op for op in \(\n)", LINE)
    run(copy, "-m", "asyncgate.commands.declare")
    run(copy, "-m", "asyncgate.commands.tables", "docs/reference.md")
    shutil.copy2(copy / "tests/support/added_operation.py", copy / "tests/heart/test_added_operation.py")
    return copy


def add(file: Path, place: str, text: str) -> None:
    """Add a text to a file, at the one place that fits."""
    text, times = re.subn(place, lambda _: text, file.read_text())
    assert times == 1, (file.name, place)
    file.write_text(text)


def run(house: Path, *arguments: str) -> str:
    """Run the Python of the copy; return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCGATE_", "PYTEST_"))}
    done = subprocess.run([sys.executable, *arguments], cwd=house, env={**env, "PYTHONPATH": str(house)}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def passed(said: str) -> int:
    """Return how many tests passed; none failed, or the run would have."""
    found = re.search(r"(\d+) passed", said)
    assert found, said
    return int(found[1])


def test_every_face_has_an_operation_that_was_added_with_nothing_else_touched(house: Path) -> None:
    assert passed(run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/heart/test_added_operation.py")) == 9


def test_the_tests_of_every_operation_hold_for_one_that_was_added(house: Path) -> None:
    said = run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"{NAME} or table", *EVERY)

    assert passed(said) > len(EVERY)
