"""What a scheduler has written is on the disk, whatever calls on its file have failed before."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate.conformance.disks import Did, Disk, NoShim, compile_shim, fill_folder, read_trace
from asyncgate.extras.scheduler.store import Store, StoreError

LIVES_OF_A_ROUND, CUTS = 4, 12
# The calls of a scheduler on its file fail now and then, in some way; it notes each run whose writing succeeded.
LIFE = """
import errno, random, sqlite3, sys
from asyncgate.extras.scheduler.plan import Plan, TaskTemplate
from asyncgate.extras.scheduler.store import Firing, Schedule, Store
from asyncgate.conformance.disks import Did, FaultRule, Shim
folder, trace, seed, first = sys.argv[1:]
shim, draw = Shim(), random.Random(seed + first)
shim.watch(folder, trace, True)
store = Store(folder + "/plan.db")
schedule = Schedule(
    schedule_id="s", plan=Plan(name="s", mode="interval", interval_seconds=60, task_template=TaskTemplate(type="t")),
    owner_kind="agent", owner_id="ada", task_id="t", created_at=0, since=0.0)
for number in range(int(first), int(first) + draw.choice([5, 60])):
    if number % 6 == 2:
        shim.set_rules([FaultRule(draw.choice([1 << Did.SYNC, 1 << Did.WRITE]), "",
                                  draw.choice([errno.EIO, errno.ENOSPC]), draw.choice([1, 1, 2, 8]),
                                  draw.randrange(4), draw.randrange(4))])
    try:
        store.decide([(schedule, [Firing("s", number, {"filler": "x" * 3000})])])
    except sqlite3.Error:
        continue
    text = b"%d" % number
    shim.library.disk_note(text, len(text))
shim.kill()
"""


def test_after_failed_calls_on_its_file_a_scheduler_confirms_only_what_a_power_cut_leaves(
        tmp_path: Path, rounds: int) -> None:
    try:
        environment = {**os.environ, "LD_PRELOAD": str(compile_shim(tmp_path))}
    except NoShim as why:
        pytest.skip(str(why))
    lost = list[str]()
    for life in range(LIVES_OF_A_ROUND * rounds):
        seed = str(random.randrange(10**9))
        world, trace, draw = tmp_path / f"world{life}", tmp_path / f"trace{life}", random.Random(seed)
        world.mkdir()
        for first in (0, 100):      # after a kill the next one reads what the kernel shows, and the disk may not have
            subprocess.run([sys.executable, "-c", LIFE, str(world), str(trace), seed, str(first)], env=environment,
                           check=False)
        records, disk, confirmed = list(read_trace(trace)), Disk({}), set[int]()
        places = {draw.randrange(len(records)) for _ in range(CUTS)} | {len(records) - 1}
        for at, record in enumerate(records):
            if record.operation == Did.NOTE:
                confirmed.add(int(record.data))
            else:
                disk.take(record)
            if at in places and confirmed:
                fill_folder(left := tmp_path / "left", disk.cut(draw))
                try:
                    with contextlib.closing(Store(str(left / "plan.db"))) as store:
                        runs = {firing.run_at for firing in store.firings()}
                except (sqlite3.Error, StoreError) as broken:
                    lost.append(f"{seed}@{at}: {broken}")
                    continue
                lost += [f"{seed}@{at}: {sorted(confirmed - runs)}"] if confirmed - runs else []
        assert confirmed
    assert lost == []
