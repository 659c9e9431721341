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
from msgspec import Struct

from asyncgate import Caller, Engine, Operation
from asyncgate.backends import open_backend
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.wire import Ask
from asyncgate.parts.operations import OPERATIONS, table_of
from tests.conftest import TOKEN, Served
from tests.support.programs import FEW_PLUGINS

ROOT = Path(__file__).parents[2]
HOUSE = ("asyncgate.py", "backends", "bench", "clients", "commands", "conformance", "extras", "parts", "tests", "docs",
         "pyproject.toml")
NAME = "count_events"
STRUCTS = '''

class CountEvents(TaskAsk, kw_only=True):
    """Count what happened to one task."""

    example = ({"task_id": "t-1"}, {"events": [{"event_type": "task.assigned", "number": 1}]})
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
OWN, TESTS = "test_added_operation", 9     # the tests of this operation alone, and how many they are
# Tests that go through the table; what they say of every operation they say of this one.
EVERY = ("conformance/test_permissions.py", "tests/faces/test_openapi.py", "tests/faces/test_mcp.py",
         "tests/faces/test_mcp_tools.py", "tests/faces/test_symmetry.py", "tests/faces/test_bad_input.py",
         "tests/faces/test_rest.py", "tests/clients/test_client.py", "tests/commands/test_cli.py")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the house with one more operation."""
    copy = copy_house(tmp_path_factory.mktemp("house"))
    add(copy / "parts/model/wire.py", r"\Z", STRUCTS)
    add(copy / "asyncgate.py", r"(?<=from asyncgate.parts.model.wire import \(\n)", IMPORTED)
    add(copy / "asyncgate.py", r"(?=    def cancel_task\()", METHOD)
    add(copy / "asyncgate.py", r"(?<=CORE_OPERATIONS = {op.name: op for op in \(\n)", LINE)
    run(copy, "-m", "asyncgate.commands.declare")
    run(copy, "-m", "asyncgate.commands.tables", "docs/reference.md")
    shutil.copy2(copy / "tests/support/added_operation.py", copy / "tests/heart/test_added_operation.py")
    return copy


def copy_house(folder: Path) -> Path:
    """Copy what a test of the house needs."""
    for name in HOUSE:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, folder / name)
    return folder


def add(file: Path, place: str, text: str) -> None:
    """Add a text to a file, at the one place that fits."""
    text, times = re.subn(place, lambda _: text, file.read_text())
    assert times == 1, (file.name, place)
    file.write_text(text)


def run(house: Path, *arguments: str, **more: str) -> str:
    """Run the Python of the copy, with more in its environment; return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCGATE_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(house), **FEW_PLUGINS, **more}
    done = subprocess.run([sys.executable, *arguments], cwd=house, env=env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_face_has_an_operation_that_was_added_with_nothing_else_touched(house: Path) -> None:
    which = f"{OWN} or for_each or ({NAME} and not postgres)"

    output = run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "verbosity_subtests=1", "-k", which,
                 f"tests/heart/{OWN}.py", *EVERY, TESTS_EACH=NAME)

    match = re.search(r"(\d+) passed.* (\d+) subtests passed", output)
    assert match, output
    assert int(match[1]) > TESTS
    assert int(match[2]) > TESTS


# A gate is given its table, so a program may add to it without touching the house at all.


class Greet(Ask, kw_only=True):
    """Greet somebody."""

    example = ({"name": "ada"}, {"text": "Good morning, ada."})
    name: str


class Greeting(Struct):
    """What is said."""

    text: str


async def greet(engine: Engine, caller: Caller, ask: Greet) -> Greeting:
    """Say good morning."""
    return Greeting(f"Good morning, {ask.name}.")


@pytest.mark.anyio
async def test_a_gate_serves_the_table_that_it_is_given() -> None:
    table = table_of(OPERATIONS["health"], Operation(greet, "POST /v1/greetings", "a w A", "tasks:read", "R"))
    gate = Gate(Settings(api_key=TOKEN), await open_backend("memory:"), table)

    async with gate.app.router.lifespan_context(gate.app):
        served, call = Served(gate), {"name": "asyncgate.greet", "arguments": {"name": "ada"}}
        over_rest = await served.post("/v1/greetings", {"name": "ada"})
        over_mcp = await served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
        described = await served.get("/openapi.json")
        you = await served.get("/v1/whoami")

        assert over_rest == over_mcp["result"]["structuredContent"] == {"text": "Good morning, ada."}
        assert described["paths"].keys() >= {"/v1/greetings", "/v1/health", "/v1/whoami"}
        assert "/v1/tasks" not in described["paths"]
        assert you["operations"] == ["greet", "health", "whoami"]
        assert (await served.call("GET", "/v1/tasks")).status == 404


def test_an_operation_is_what_its_line_and_its_docstring_say() -> None:
    of_agents = Operation(greet, "POST /v1/greetings, PUT /v1/greetings/{name}", "a A", "tasks:read", "W")
    of_admins = Operation(greet, "GET /v1/greetings", "A", "", "R", heartbeat=True, ends_leases=True,
                          successor="health", nothing="nobody is there")

    assert (of_agents.name, of_agents.run, of_agents.takes, of_agents.gives) == ("greet", greet, Greet, Greeting)
    assert of_agents.rest == [("POST", "/v1/greetings"), ("PUT", "/v1/greetings/{name}")]
    assert (of_agents.summary, of_agents.text, of_agents.columns) == ("Say good morning.", "", [])
    assert [op.roles for op in (of_agents, of_admins)] == [("agent", "admin"), ("admin",)]
    assert [(op.scope, sorted(op.scopes), op.open) for op in (of_agents, of_admins)] == [
        ("tasks:read", ["admin:write", "tasks:read"], False), ("", [], False)]
    assert [(op.kind, op.idempotent, op.heartbeat, op.ends_leases, op.successor, op.nothing, op.direct)
            for op in (of_agents, of_admins)] == [
        ("W", False, False, False, "", "", True), ("R", True, True, True, "health", "nobody is there", True)]
    assert [op.reader.refuses for op in (of_agents, of_admins)] == [False, True]
