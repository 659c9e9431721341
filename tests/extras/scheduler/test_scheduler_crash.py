"""The scheduler is killed at random over simulated days: each run is created once, and each order is carried out once.

The gate is a real process.  The clock of the scheduler is moved by hand, over changes of summer time; what it should
have done is told by a plain model, which looks at every minute of every clock.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from asyncgate.clients.http import Http
from asyncgate.conformance.plugin import ROUNDS
from asyncgate.extras.scheduler.calendar import CHOICES, Every, Timing
from tests.conftest import TOKEN, Live
from tests.extras.scheduler.test_scheduler_calendar import Plain
from tests.support.patience import PATIENCE_SECONDS

DAY, DAYS = 86_400, 16
KILLS_PER_ROUND = 4         # --rounds 50 is 200 kills
STEPS = 600                 # of the longest life that is cut short
TRIES = 4                   # lives in a row that are cut short; the next one is not
STARTS = ["2027-03-13T20:00", "2027-10-30T20:00"]       # New York and Berlin change within two weeks after either
MODES: list[dict[str, Any]] = [
    {"mode": "interval", "interval_seconds": 2500},
    {"mode": "interval", "interval_seconds": 7200, "jitter_seconds": 3600},
    {"mode": "cron", "cron_expr": "*/20 1-3 * * *", "timezone": "Europe/Berlin"},
    {"mode": "cron", "cron_expr": "30 2 * * *", "timezone": "America/New_York"},
    {"mode": "cron", "cron_expr": "0,30 0-4 * * *", "timezone": "Europe/Berlin", "jitter_seconds": 600},
]


# The plain model.


class World(Struct, frozen=True):
    """What may be true of one schedule: up to when its runs are settled, whether it is on, and what it has created."""

    since: int
    on: bool = True
    ran: tuple[int, ...] = ()


class Model:
    """One schedule as it should be; as long as nobody knows how far a life got, several worlds are possible."""

    def __init__(self, schedule_id: str, plan: dict[str, Any], made_at: int, end: int) -> None:
        self.schedule_id, self.plan = schedule_id, plan
        self.worlds = {World(made_at)}
        self.runs = list(self._runs(made_at, end))

    def _runs(self, made_at: int, end: int) -> Iterator[tuple[int, float]]:
        """Yield all run times, and when they are due: how long jitter delays one does not matter to this test."""
        runs = (range(made_at + self.plan["interval_seconds"], end, self.plan["interval_seconds"])
                if self.plan["mode"] == "interval"
                else Plain(self.plan["cron_expr"]).between(self.plan["timezone"], made_at, end))
        if not (jitter := self.plan.get("jitter_seconds", 0)):
            return (yield from ((run, float(run)) for run in runs))
        for run, following in zip(runs, [*runs[1:], end], strict=True):
            yield next(Timing(self.schedule_id, Every(run - (following - run), following - run), jitter).after(run - 1))

    def look(self, world: World, now: int) -> World:
        """H.5 to the letter: what was expected, without the last, is a misfire."""
        expected = [run for run, due in self.runs if world.since < run and due <= now] if world.on else []
        if not expected:
            return world
        missed = {"skip": [], "catch_up_one": expected[-2:-1], "catch_up_all": expected[:-1]}
        return World(expected[-1], True, (*world.ran, *missed[self.plan["misfire_policy"]], expected[-1]))

    def surely(self, now: int) -> None:
        """A life at this time went through."""
        self.worlds = {self.look(world, now) for world in self.worlds}

    def perhaps(self, now: int) -> None:
        """A life at this time was cut short, and nobody knows where."""
        self.worlds |= {self.look(world, now) for world in self.worlds}

    def turned(self, on: bool, now: int) -> None:
        """It was paused or resumed; what passes during a pause is not missed."""
        self.worlds = {World(now if on and not world.on else world.since, on, world.ran) for world in self.worlds}

    def saw(self, ran: list[int]) -> None:
        """Leave the worlds in which this has run, and nothing else, and nothing twice."""
        fitting = {world for world in self.worlds if sorted(world.ran) == sorted(ran)}
        assert fitting, (self.schedule_id, self.plan, sorted(ran)[-5:], [sorted(w.ran)[-5:] for w in self.worlds])
        self.worlds = fitting


# The real thing.


class Lives:
    """A scheduler and its lives, and the agent that gives it orders."""

    def __init__(self, gate: Http, url: str, path: Path) -> None:
        self.gate, self.seen = gate, dict[str, tuple[str, int]]()
        keys = [self._key("worker", "clockwork"), self._key("agent", "clockwork-agent")]
        program = Path(__file__).parents[2].joinpath("support", "scheduler_lives.py")
        self.process = subprocess.Popen([sys.executable, program, path, url, *keys], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)

    def _key(self, kind: str, name: str) -> str:
        return str(self.gate.call("issue_key", name=name, principal_kind=kind, principal_id=name)["api_key"])

    def live(self, now: int, **end: float) -> bool:
        """Let the scheduler live at this time; return whether it died."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"now": now, **end}) + "\n")
        assert select.select([self.process.stdout], [], [], PATIENCE_SECONDS)[0], "it lives for ever"
        told = json.loads(self.process.stdout.readline())
        assert told["died"] or told["status"] == 0, told
        return bool(told["died"])

    def order(self, what: str, payload: dict[str, Any]) -> str:
        """Give an order as an agent."""
        made = self.gate.call("create_task", type=f"schedule.{what}", agent_id="ada", payload=payload)
        return str(made["task_id"])

    def answer(self, task_id: str) -> dict[str, Any]:
        """Return the answer to an order that has been carried out."""
        task = self.gate.call("get_task", task_id=task_id)
        assert task["status"] == "succeeded", task
        result: dict[str, Any] = task["result"]["result"]
        return result

    def ran(self) -> dict[str, list[int]]:
        """Return the runs that were created, by schedule; a task that is there twice is there twice in the list."""
        for task in self._tasks():
            at = datetime.fromisoformat(task["payload"]["at"]).astimezone(UTC).timestamp()
            self.seen[task["task_id"]] = task["payload"]["of"], int(at)
        runs: dict[str, list[int]] = {}
        for schedule_id, run in self.seen.values():
            runs.setdefault(schedule_id, []).append(run)
        return runs

    def _tasks(self) -> Iterator[dict[str, Any]]:
        """Yield tasks that were not seen yet, newest first."""
        cursor = None
        while True:
            page = self.gate.call("list_tasks", type="tick", limit=200, cursor=cursor)
            yield from (fresh := [task for task in page["tasks"] if task["task_id"] not in self.seen])
            if not fresh or not (cursor := page["next_cursor"]):
                return


class Story:
    """What happens, in the order of a seed."""

    def __init__(self, lives: Lives, start: int, kills: int, seed: int) -> None:
        self.lives, self.now, self.wanted, self.kills = lives, start, kills, 0
        self.random, self.models = random.Random(seed), dict[str, Model]()
        self.end = start + (DAYS + 30) * DAY
        self.pace = DAYS * DAY / kills      # of the clock, from one kill to the next

    def pass_time(self) -> None:
        """Move the clock: by minutes or by days."""
        self.now += int(self.random.expovariate(1 / self.pace)) + 1

    def cut_short(self) -> Iterator[None]:
        """Live at this time again and again, each time killed at some step or moment, until a life goes through."""
        for tried in range(TRIES + 1):
            steps, seconds = int(STEPS ** self.random.random()), self.random.uniform(0.001, 0.3)
            ends = {"dies_at": steps} if self.random.random() < 0.7 else {"dies_after": seconds}
            if not self.lives.live(self.now, **(ends if tried < TRIES else {})):
                return
            self.kills += 1
            yield

    def run(self) -> None:
        """Give orders and kill, until it is enough; then let a last life go through."""
        for number, policy in enumerate(CHOICES):
            for mode in MODES[number % 2::2]:
                self.give("create", {"name": policy, "misfire_policy": policy, **mode, "task_template": {
                    "type": "tick", "payload_template": {"of": "{{schedule_id}}", "at": "{{run_at_local}}"}}})
        while self.kills < self.wanted:
            self.pass_time()
            self.give(*self.idea()) if self.random.random() < 0.3 else self.look()
        self.pass_time()
        self.look()

    def look(self) -> None:
        """Let lives be cut short, at one time or at several, until one goes through."""
        for _ in self.cut_short():
            if self.random.random() < 0.5:
                for model in self.models.values():
                    model.perhaps(self.now)
                self.pass_time()
        self.went_through()

    def went_through(self) -> None:
        """Compare with the model after a life that has done all there was to do."""
        ran = self.lives.ran()
        assert ran.keys() <= self.models.keys()
        for schedule_id, model in self.models.items():
            model.surely(self.now)
            model.saw(ran.get(schedule_id, []))

    def idea(self) -> tuple[str, dict[str, Any]]:
        """Think of an order."""
        model = self.random.choice(list(self.models.values()))
        if self.random.random() < 0.1:
            return "create", model.plan
        paused = [model for model in self.models.values() if not all(world.on for world in model.worlds)]
        if paused and self.random.random() < 0.5:
            return "resume", {"schedule_id": paused[0].schedule_id}
        return self.random.choice(["pause", "pause", "resume", "status"]), {"schedule_id": model.schedule_id}

    def give(self, what: str, payload: dict[str, Any]) -> None:
        """Give an order, and kill as long as it is not carried out."""
        task_id = self.lives.order(what, payload)
        for _ in self.cut_short():
            pass
        answer = self.lives.answer(task_id)
        if what == "create":
            made = Model(answer["schedule_id"], payload, self.now, self.end)
            assert self.models.setdefault(made.schedule_id, made) is made
        self.went_through()
        if what in ("pause", "resume"):
            self.models[payload["schedule_id"]].turned(what == "resume", self.now)

    def put_away(self) -> None:
        """Delete every schedule, with as many kills as that takes."""
        orders = [self.lives.order("delete", {"schedule_id": schedule_id}) for schedule_id in self.models]
        for _ in self.cut_short():
            pass
        for order in orders:
            assert self.lives.answer(order) == {"ok": True}


@pytest.fixture
def lives(start: Callable[..., Live], tmp_path: Path) -> Iterator[Lives]:
    """Return a scheduler with a gate of its own."""
    live = start("idempotency_mismatch=refuse", database=f"sqlite:///{tmp_path}/gate.db")
    with Http(live.url, TOKEN) as gate:
        lives = Lives(gate, live.url, tmp_path / "schedules.db")
        yield lives
        lives.process.kill()
        lives.process.communicate()


@pytest.mark.parametrize("start_at", STARTS)
def test_a_scheduler_that_is_killed_at_any_moment_creates_each_run_once(
        lives: Lives, start_at: str, rounds: int, record_property: Callable[[str, Any], None]) -> None:
    seed, begin = random.randrange(2**32), int(datetime.fromisoformat(start_at).replace(tzinfo=UTC).timestamp())
    record_property("seed", seed)
    print(f"seed {seed}")
    story = Story(lives, begin, rounds * KILLS_PER_ROUND, seed)

    story.run()
    story.put_away()

    assert story.kills >= ROUNDS
    assert sum(map(len, lives.ran().values())) > 0
    owed = lives.gate.call("list_open_obligations", principal_kind="agent", principal_id="ada")
    assert owed["open_obligations"] == []
    for receipt in ("schedule.created", "schedule.deleted"):
        told = lives.gate.call("list_receipts", receipt_type=receipt, limit=200)["receipts"]
        assert sorted(notice["schedule_id"] for notice in told) == sorted(story.models)
