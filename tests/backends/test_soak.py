"""A soak measures a gate under everything at once, and its judge sees what grows and not what only wavers."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.drift import LEAST_SAMPLES, MIB, Sample, find_trends, judge_samples
from asyncgate.conformance.load import serving
from asyncgate.conformance.recording import Recorded, read_record, write_record
from asyncgate.conformance.soak import VIEWS, fetch, judge_runs, run_soak, settings_of
from asyncgate.conformance.torture import Round, TorturePlan
from asyncgate.parts.model import stored

pytestmark = pytest.mark.anyio
Make = Callable[[float, random.Random], float]      # a value, by the share of the run that is over
SOUND: dict[str, Make] = {
    # It fills until a third is over, then it goes up and down.
    "memory": lambda at, draw: 80 * MIB + min(at, 0.33) * 90 * MIB + draw.gauss(0, 3 * MIB),
    "descriptors": lambda at, draw: 40 + draw.choice([0, 0, 1, 4, 9]),
    "threads": lambda at, draw: 12 + draw.choice([0, 1, 2]),
    "connections": lambda at, draw: 20 + draw.choice([0, 1, 5]),
    # A reader of an old state keeps the log from beginning anew.
    "log": lambda at, draw: 4 * MIB + (at * 20 % 1) * 30 * MIB,
    "p50 ms": lambda at, draw: 4 * draw.lognormvariate(0, 0.3),
    "p99 ms": lambda at, draw: 40 * draw.lognormvariate(0, 0.8),
    "cpu": lambda at, draw: 2.0 * draw.lognormvariate(0, 0.3),     # milliseconds a call
    "disk": lambda at, draw: 9000 * draw.lognormvariate(0, 0.5),    # bytes a task
    "work": lambda at, draw: 5 * draw.lognormvariate(0, 0.2)}
LEAKS: dict[str, Make] = {
    "memory": lambda at, draw: 80 * MIB + at * 30 * MIB + draw.gauss(0, 3 * MIB),
    "descriptors": lambda at, draw: 40 + at * 40 + draw.choice([0, 0, 1, 4, 9]),
    "threads": lambda at, draw: 12 + int(at * 20) + draw.choice([0, 1]),
    "connections": lambda at, draw: 20 + at * 30 + draw.choice([0, 1, 5]),
    "log": lambda at, draw: 4 * MIB + at * 90 * MIB + draw.gauss(0, 3 * MIB),
    "p50 ms": lambda at, draw: 4 * exp(2 * at) * draw.lognormvariate(0, 0.3),
    "p99 ms": lambda at, draw: 40 * exp(3 * at) * draw.lognormvariate(0, 0.5),
    "cpu": lambda at, draw: 1.6 * exp(2 * at) * draw.lognormvariate(0, 0.3),
    "disk": lambda at, draw: 9000 * exp(2 * at) * draw.lognormvariate(0, 0.3)}
CALLED = {"cpu": "cpu ms a call", "disk": "disk a task"}


def made_up(seed: int, count: int, **other: Make) -> list[Sample]:
    """Return the samples of half an hour that never was."""
    draw, makes, samples = random.Random(seed), {**SOUND, **other}, list[Sample]()
    cpu = calls = tasks = disk = 0.0
    for number in range(count):
        values = {name: make(number / count, draw) for name, make in makes.items()}
        calls, tasks = calls + 400, tasks + 60
        cpu, disk = cpu + 0.4 * values.pop("cpu"), disk + 60 * values.pop("disk")
        work = values.pop("work")
        values |= {"disk": disk, "work ms": work, "work cpu ms": work}
        samples.append(Sample(1800.0 * number / (count - 1), values, {"cpu": cpu, "calls": calls, "tasks": tasks}))
    return samples


@pytest.mark.parametrize("count", [LEAST_SAMPLES, 60, 150])
def test_a_run_that_only_wavers_is_not_blamed(count: int) -> None:
    assert [judge_samples(made_up(seed, count)) for seed in range(40)] == [[]] * 40


@pytest.mark.parametrize("name", LEAKS)
def test_what_grows_slowly_is_found_and_nothing_else(name: str) -> None:
    for seed in range(10):
        [problem] = judge_samples(made_up(seed, 150, **{name: LEAKS[name]}))

        assert problem.startswith(f"SOAK: {CALLED.get(name, name)} ")


def test_a_machine_that_others_make_slow_is_not_blamed_on_the_gate() -> None:
    slow = {name: lambda at, draw, make=SOUND[name]: make(at, draw) * (1 + 3 * (at > 0.5))
            for name in ("cpu", "p50 ms", "p99 ms", "work")}

    assert [judge_samples(made_up(seed, 100, **slow)) for seed in range(10)] == [[]] * 10
    assert judge_samples(made_up(0, 100, **{**slow, "work": SOUND["work"]})) != []


def test_a_run_too_short_to_be_judged_is_not_judged() -> None:
    assert find_trends(made_up(0, LEAST_SAMPLES - 1, memory=LEAKS["memory"])) == []


def test_samples_are_kept_with_the_history_and_judged_again(tmp_path: Path) -> None:
    record = Recorded(tenant="t", samples=made_up(1, 50, memory=LEAKS["memory"]))

    write_record(tmp_path / "soak.jsonl", record)
    again = read_record(tmp_path / "soak.jsonl")

    assert again.samples == record.samples
    assert [text.partition(" grows")[0] for text in again.judge()] == ["SOAK: memory"]


async def test_the_console_of_a_soak_asks_what_the_gate_answers(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()

    async with serving(f"sqlite:///{tmp_path}/gate.db", **settings_of(tmp_path / "archive", 60.0)) as server:
        for view in VIEWS:
            assert await fetch(server, "GET", f"/v1/{view}")


def test_runs_of_schedules_that_are_there_twice_or_too_seldom_are_found() -> None:
    plain: dict[str, Any] = dict.fromkeys(stored.Task.__struct_fields__)
    tasks = [stored.Task(**{**plain, "task_id": f"t{number}", "type": "echo", "status": "succeeded",
                            "idempotency_key": f"schedule:s{number % 3}:{number}"}) for number in range(9)]

    assert judge_runs(tasks) == []
    assert judge_runs([*tasks, tasks[4]]) == ["CREW: run 4 of schedule s1 was created twice"]
    assert judge_runs(tasks[:2]) == ["CREW: only 2 of 3 schedules ran"]


async def test_a_soak_of_seconds_does_all_that_a_soak_does() -> None:
    told = list[Round]()

    await run_soak(TorturePlan("sqlite:", (), seed=7), 2.0, 200.0, told.append)

    [done] = told
    assert done.violations == []
    assert done.operations > 100
    assert {name for name, count in done.faults.items() if count} == {
        "archived", "console", "events", "scrapes", "snapshots"}
    assert done.record is not None
    assert {trend.name for trend in find_trends(done.record.samples)} == {
        "memory", "worker memory", "scheduler memory", "descriptors", "threads", "connections", "log", "cpu ms a call",
        "p50 ms", "p99 ms", "disk a task"}
