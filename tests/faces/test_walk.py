"""The walk of a call: through which rooms `complete` goes, over REST and on SQLite, as docs/design.md shows it.

The words of parts/model are left out: every room uses them, as it uses the standard library.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from tests.conftest import TOKEN, Served

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
MOST_STAYS, MOST_IN_FILES = 24, 37


class Tracer:
    """Notes each function of ours that is entered, on every thread; a coroutine that goes on was entered before."""

    def __init__(self) -> None:
        self.entered, self.seen, self.looks = list[tuple[bool, str]](), set[FrameType](), False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note one entry."""
        if not self.looks or event != "call" or frame in self.seen:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and "tests" not in path.parts:
            self.seen.add(frame)        # which keeps it, so that no other frame can have its place
            on_the_loop = threading.current_thread() is threading.main_thread()
            self.entered.append((on_the_loop, path.relative_to(ROOT).as_posix()))

    def files(self) -> list[str]:
        """Return the files that were entered; the writer may still be coming back from the call before."""
        handed_over = next(at for at, (on_the_loop, file) in enumerate(self.entered)
                           if on_the_loop and room(file) == "backends")
        return [file for at, (on_the_loop, file) in enumerate(self.entered) if on_the_loop or at > handed_over]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Note what is entered meanwhile."""
        self.entered.clear()
        sys.setprofile(self)
        self.looks = True
        try:
            yield
        finally:
            self.looks = False
            sys.setprofile(None)
            self.seen.clear()


def room(file: str) -> str:
    """Return the room of a file."""
    first, *rest = file.split("/")
    if not rest:
        return "heart"
    if first != "parts":
        return first
    return rest[0] if len(rest) > 1 else "app"


def stays(places: list[str]) -> list[str]:
    """Return where one stays, in order: what follows itself is one stay."""
    return [place for place, _ in groupby(places)]


async def walked(tmp_path: Path) -> list[str]:
    """Complete a task twice, the second time watched; return the files that it went through, without the words."""
    tracer = Tracer()
    threading.setprofile(tracer)        # the thread that decides batches begins with the backend
    settings = Settings(api_key=TOKEN, database=DatabaseSettings(url=f"sqlite:///{tmp_path}/gate.db"))
    gate = Gate(settings)
    try:
        async with gate.app.router.lifespan_context(gate.app):
            served = Served(gate)
            await served.end_loops()
            for _ in range(2):
                gate.guard.accounts.forget(served.tenant_id)    # read again by the next call, good for five seconds
                offer = await served.leased()
                completion = {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"pages": 3},
                              "artifacts": [{"type": "file", "uri": "file:///pages"}]}
                await served.engine.batches.wait_for_all()
                with tracer.tracing():
                    answer = await served.call("POST", f"/v1/tasks/{offer['task_id']}/complete", completion)
                assert answer.status == 200
    finally:
        threading.setprofile(None)
    return [file for file in tracer.files() if not file.startswith("parts/model/")]


def shown() -> list[str]:
    """Return the rooms that docs/design.md shows."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    chapter = text.partition("\n## The walk of a call\n")[2].partition("\n## ")[0]
    return [line.split("|")[2].strip() for line in chapter.splitlines() if line.startswith("| ") and line[2].isdigit()]


async def test_a_completion_goes_through_the_rooms_that_the_design_shows(tmp_path: Path) -> None:
    walk = await walked(tmp_path)

    rooms = stays([room(file) for file in walk])
    assert rooms == shown(), json.dumps([rooms, stays(walk)], indent=1)
    assert len(rooms) <= MOST_STAYS
    assert len(stays(walk)) <= MOST_IN_FILES


async def test_who_calls_is_settled_in_one_stay_before_anything_is_read(tmp_path: Path) -> None:
    rooms = stays([room(file) for file in await walked(tmp_path)])

    before = rooms[:rooms.index("backends")]
    assert before.count("identity") == 1
