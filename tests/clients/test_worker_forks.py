"""Children that a task forks: they take neither the worker's signals nor its place with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.clients.test_worker_program import ROOT, TOKEN, ended
from tests.support.patience import PATIENCE_SECONDS

WORKER = '''if True:
    import multiprocessing, os, signal, subprocess, sys, time
    from concurrent.futures import ProcessPoolExecutor
    from asyncgate.clients.worker import Worker

    worker, forks = Worker(worker_id="w"), multiprocessing.get_context("fork")

    def terminated(child):
        child.start()
        child.terminate()
        child.join()
        return child.exitcode

    def child_of(fork):
        if (pid := fork()) == 0:
            time.sleep(600)
            os._exit(1)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def in_pool(_):
        with forks.Pool(2) as pool:
            pool.map(abs, [1, 2])
        return -15

    def in_executor(_):
        with ProcessPoolExecutor(1, mp_context=forks) as pool:
            pool.submit(abs, 1).result()
            for child in pool._processes.values():
                child.terminate()
        return -15

    def in_subprocess(prepare):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=prepare)
        child.terminate()
        return child.wait()

    HOW = {"Process": lambda _: terminated(forks.Process(target=time.sleep, args=[600])), "Pool": in_pool,
           "executor": in_executor, "fork": lambda _: child_of(os.fork), "forkpty": lambda _: child_of(
           lambda: os.forkpty()[0]), "subprocess": in_subprocess, "preexec": lambda _: in_subprocess(lambda: None)}

    @worker.task("plain")
    def plain(how: str):
        return [HOW[how](None) for _ in range(5)]

    @worker.task("async")
    async def on_the_loop(how: str):
        return [HOW[how](None) for _ in range(5)]

    @worker.task("outlives")
    def outlives(_: None):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(1)

    worker.run()
'''


@pytest.fixture
def gate(start: Any) -> Iterator[Http]:
    """A client of a gate."""
    with Http(start("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0").url, TOKEN) as gate:
        yield gate


def begin(gate: Http, folder: Path) -> subprocess.Popen[str]:
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": TOKEN,
                    "XDG_STATE_HOME": str(folder)}
    return subprocess.Popen([sys.executable, "-c", WORKER], env=surroundings, text=True, start_new_session=True)


def test_a_child_that_a_task_forks_ends_by_its_own_sigterm_and_the_worker_does_not(gate: Http, tmp_path: Path) -> None:
    worker = begin(gate, tmp_path)
    try:
        for type in ("plain", "async"):
            for how in ("Process", "Pool", "executor", "fork", "forkpty", "subprocess", "preexec"):
                made = gate.call("create_task", type=type, payload=how, max_attempts=1)
                assert ended(gate, made["task_id"])["result"]["result"] == [-15] * 5, (type, how)

        assert worker.poll() is None
        worker.terminate()
        assert worker.wait(PATIENCE_SECONDS) == 0
    finally:
        os.killpg(worker.pid, signal.SIGKILL) if worker.poll() is None else None


def test_a_child_that_outlives_its_killed_worker_does_not_keep_its_place(gate: Http, tmp_path: Path) -> None:
    first = begin(gate, tmp_path)
    ended(gate, gate.call("create_task", type="outlives", payload=None)["task_id"])
    first.kill()
    first.wait()

    second = begin(gate, tmp_path)
    try:
        ended(gate, gate.call("create_task", type="plain", payload="fork")["task_id"])
        places = [path for path in tmp_path.rglob("w.*") if not path.name.endswith(".letters")]
        assert [path.name for path in places] == ["w.1"]
    finally:
        for worker in (first, second):
            os.killpg(worker.pid, signal.SIGKILL)
        second.wait()


@pytest.mark.parametrize("script", ["""
    gate = SyncGate(sys.argv[1], sys.argv[2])
    def use():
        with gate:
            gate.health()
    in_child(use)
    use()
""", """
    gate = SyncGate(sys.argv[1], sys.argv[2])
    def use():
        gate.health()
        gate.health()
        with gate:
            gate.health()
    with gate:
        gate.health()
        in_child(use)
        gate.health()
""", """
    gate = SyncGate(sys.argv[1], sys.argv[2])       # as a web application under a server that forks
    gate.health()
    for _ in range(2):
        in_child(lambda: [gate.health() for _ in range(3)])
        gate.health()
    gate.close()
""", """
    gate = AsyncGate(sys.argv[1], sys.argv[2])
    async def use():
        await gate.health()
        async with gate:
            await gate.health()
    async def main():
        async with gate:
            await gate.health()
            in_child(lambda: asyncio.run(use()))
            await gate.health()
    asyncio.run(main())
"""])
def test_a_client_from_before_a_fork_is_opened_anew_in_the_child(gate: Http, script: str) -> None:
    begin = '''if True:
    import asyncio, os, sys, traceback
    from asyncgate.clients import AsyncGate, SyncGate
    def in_child(use):
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            return
        try:
            use()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
'''
    subprocess.run([sys.executable, "-c", begin + script, gate.url, TOKEN], timeout=PATIENCE_SECONDS, check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_blocking_client_that_is_open_cannot_be_opened_again_and_a_closed_one_can(gate: Http) -> None:
    from asyncgate.clients import SyncGate

    client = SyncGate(gate.url, TOKEN)
    for _ in range(2):
        with client:
            client.health()
            with pytest.raises(RuntimeError, match="open already"):
                client.__enter__()
