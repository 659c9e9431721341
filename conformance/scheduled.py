"""A real scheduler in torture: what it is asked to run, how it dies and stops, and whether each run is there once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from datetime import datetime
from pathlib import Path

from asyncgate.conformance.forks import ForkingPopen
from asyncgate.conformance.ledgers import PROCESS_SECONDS, Program
from asyncgate.conformance.load import KEY, SERVE, Client, Gates, Load
from asyncgate.parts.model import stored

WORKER_ID, AGENT_ID, ORDERING = "w-scheduler", "a-scheduler", "a-orders"
TICK = "tick"                       # the type of the tasks that schedules make
INTERVALS = (1, 2, 3)               # seconds between the runs of each schedule


class ScheduledRuns(Program):
    """`asyncgate scheduler` in a process of its own, and the schedules that it was given at first."""

    def __init__(self, load: Load, port: int, folder: Path) -> None:
        self.load, self.log = load, folder / "scheduler.log"
        self.command = [sys.executable, "-c", SERVE, "scheduler", "--url", f"http://127.0.0.1:{port}",
                        "--file", str(folder / "schedules.db"), "--worker-key", KEY, "--agent-key", KEY,
                        "--worker-id", WORKER_ID, "--agent-id", AGENT_ID]
        self.ordered: dict[str, tuple[int, int]] = {}       # first run and interval, by schedule
        self.until = 0                                      # up to this second each of them has run

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = ForkingPopen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                        start_new_session=True)

    async def order(self) -> None:
        """Order schedules that make up for every run that they miss, and wait until the scheduler has them."""
        # No worker of the load can what these tasks need, so that only the scheduler takes them.
        asks = {"type": "schedule.create", "requirements": {"capabilities": ["scheduler"]}}
        async with (aclosing(Client(self.load.server, ORDERING, self.load.write)) as client,
                    asyncio.timeout(PROCESS_SECONDS)):
            for seconds in INTERVALS:
                plan = {"name": f"every {seconds}", "mode": "interval", "interval_seconds": seconds,
                        "misfire_policy": "catch_up_all", "task_template": {"type": TICK}}
                made = await client.insist("create_task", **asks, payload=plan, idempotency_key=f"order-{seconds}")
                assert made.reply, made.error
                task = await client.insist("get_task", task_id=made.reply["task_id"])
                while task.reply is None or task.reply["status"] != "succeeded":
                    await asyncio.sleep(0.05)
                    task = await client.insist("get_task", task_id=made.reply["task_id"])
                answer = task.reply["result"]["result"]
                self.ordered[answer["schedule_id"]] = read_moment(answer["next_run_at"]), seconds

    async def finish(self, gates: Gates) -> list[str]:
        """Wait until all runs that are due now have their tasks, then end the process; return what is wrong."""
        self.until, late, before = int(time.time()), dict[str, str](), dict[str, list[int]]()
        deadline = time.monotonic() + PROCESS_SECONDS
        async with aclosing(Client(gates, AGENT_ID)) as client:
            while self.process.poll() is None and time.monotonic() < deadline:
                page = await client.insist("list_tasks", type=TICK, limit=200)
                runs = list_runs(task["idempotency_key"] for task in page.reply["tasks"]) if page.reply else {}
                if runs != before:      # it makes up for them, which takes a busy machine its time
                    before, deadline = runs, time.monotonic() + PROCESS_SECONDS
                late = {schedule: f"SCHEDULER: {schedule} is late, and nothing was run for {PROCESS_SECONDS:g} s"
                        for schedule, (first, seconds) in self.ordered.items()
                        if max(runs.get(schedule, [first - seconds])) + seconds <= self.until}
                if not late:
                    break
                await asyncio.sleep(0.1)
        if self.process.poll() is None:
            self.process.terminate()
        if status := await asyncio.to_thread(self.process.wait, PROCESS_SECONDS):
            late["process"] = f"SCHEDULER: it ended with {status}: {self.log.read_text()[-500:]}"
        return [*late.values()]

    def judge(self, tasks: list[stored.Task]) -> list[str]:
        """Return which runs are missing, are there twice, or were never due: of these schedules, and of later ones."""
        known = {**list_schedules(tasks), **self.ordered}       # an order that was run again is another schedule
        runs, problems = list_runs(task.idempotency_key for task in tasks if task.type == TICK), list[str]()
        for schedule, moments in runs.items():
            if schedule not in known:
                problems.append(f"SCHEDULER: {schedule} has runs, and nobody has ordered it")
                continue
            first, seconds = known[schedule]
            last = max(*moments, self.until if schedule in self.ordered else 0)
            due, times = set(range(first, last + 1, seconds)), Counter(moments)
            run = f"SCHEDULER: run {{}} of {schedule} "
            problems += [f"{run.format(moment)}has no task" for moment in sorted(due - times.keys())]
            problems += [f"{run.format(moment)}was never due" for moment in sorted(times.keys() - due)]
            problems += [f"{run.format(moment)}has {count} tasks" for moment, count in times.items() if count > 1]
        return problems + [f"SCHEDULER: {schedule} has never run" for schedule in self.ordered.keys() - runs.keys()
                           if self.ordered[schedule][0] <= self.until]


def list_schedules(tasks: list[stored.Task]) -> dict[str, tuple[int, int]]:
    """Return the first run and the interval of each schedule, as the answers to their orders say."""
    answers = [(json.loads(task.outcome or "{}"), json.loads(task.payload)) for task in tasks
               if task.type == "schedule.create" and task.status == "succeeded"]
    return {answer["schedule_id"]: (read_moment(answer["next_run_at"]), plan["interval_seconds"])
            for answer, plan in answers}


def list_runs(keys: Iterable[str | None]) -> dict[str, list[int]]:
    """Return the moments of the runs by their schedules, as the keys of their tasks tell them."""
    runs: dict[str, list[int]] = {}
    for key in keys:
        if key and key.startswith("schedule:"):
            _, schedule, moment = key.split(":", 2)
            runs.setdefault(schedule, []).append(read_moment(moment))
    return runs


def read_moment(text: str) -> int:
    """Return the second that a text names."""
    return int(datetime.fromisoformat(text).timestamp())
