"""A Celery application served by a gate without a change: its worker is killed in the middle, and its habits stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients import SyncGate
from tests.conftest import TOKEN, Live
from tests.support import hasty
from tests.support.pages import ROOT, blocks
from tests.support.patience import PATIENCE_SECONDS

if find_spec("celery") is None:
    pytest.skip("celery is not installed: its application is not served", allow_module_level=True)

either = hasty.either
# The application, which knows nothing of a gate.
SHOP = '''
import os, time
from celery import Celery, Task, signals

app = Celery("shop")
NOTES = os.environ["SHOP_NOTES"]


def note(*words):
    with open(NOTES, "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


class Noting(Task):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        note("on_failure", exc)


@signals.task_postrun.connect
def tell(task=None, state=None, **more):
    note("postrun", task.name, state)


@app.task
def add(x, y=0):
    return x + y


@app.task(base=Noting)
def broken():
    note("broken")
    raise ValueError("no stock")


@app.task(bind=True, max_retries=2)
def again(self):
    note("again", self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1, exc=OSError("busy"))
    return self.request.retries


@app.task(bind=True, autoretry_for=(OSError,), retry_backoff=False, default_retry_delay=0.1, max_retries=1)
def hopeless(self):
    note("hopeless", self.request.retries)
    raise OSError("down")


@app.task(bind=True)
def slow(self, seconds):
    note("slow", self.request.id)
    if open(NOTES).read().count("slow") == 1:
        time.sleep(seconds)
    return "done"


@app.task
def parent():
    return add.delay(20, y=1).id
'''
HANDS = '''
import json, sys
from celery import chain
from shop import add, app, parent
from asyncgate.extras.celery import use_gate

use_gate(app)
first = add.delay(1, y=2)
{more}
print(json.dumps([first.get(30), first.state, app.send_task("shop.add", [3], countdown=0.1).get(30)]))
'''


@pytest.fixture
def shop(either: Live, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return what runs a program beside the application."""
    (tmp_path / "shop.py").write_text(SHOP)
    around = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "SHOP_NOTES": str(tmp_path / "notes"),
              "ASYNCGATE_URL": either.url, "ASYNCGATE_API_KEY": TOKEN}
    running: list[subprocess.Popen[str]] = []

    def run(text: str) -> subprocess.Popen[str]:
        running.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", text], env=around, cwd=tmp_path,
                                        stdout=subprocess.PIPE, text=True))
        return running[-1]

    run.url = either.url  # type: ignore[attr-defined]
    yield run
    for process in running:
        with process:
            process.kill()


def work(name: str = "w", ttl_seconds: int = 30) -> str:
    """The program of a worker."""
    return ("from shop import app\nfrom asyncgate.extras.celery import serve\n"
            f"serve(app, worker_id={name!r}, ttl_seconds={ttl_seconds}, state=None)")


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def test_delay_get_send_task_and_countdown_go_through_the_gate(shop: Any) -> None:
    shop(work())

    assert json.loads(shop(HANDS.format(more="")).communicate()[0]) == [3, "SUCCESS", 3]


def test_a_chain_hands_each_result_to_the_next_task_and_a_task_may_hand_over_others(shop: Any) -> None:
    shop(work())
    shop(HANDS.format(more="chain(add.s(1), add.s(y=10), add.s(y=100)).apply_async(); parent.delay()")).communicate()

    with SyncGate(shop.url, TOKEN, agent_id="celery") as gate:
        until, results = time.monotonic() + PATIENCE_SECONDS, set[Any]()
        while not {1, 11, 111, 21} <= results:
            assert time.monotonic() < until, results
            results = {task.result.result for task in gate.each("list_tasks", type="shop.add", status="succeeded")}


def test_errors_retries_and_hooks_are_those_of_celery(shop: Any, tmp_path: Path) -> None:
    shop(work())
    with SyncGate(shop.url, TOKEN, agent_id="boss") as gate:
        def send(name: str, **terms: Any) -> Any:
            return gate.submit(f"shop.{name}", {"args": []}, **terms)

        failed = send("broken", max_attempts=5).ended(PATIENCE_SECONDS)
        again = send("again").ended(PATIENCE_SECONDS)
        hopeless = send("hopeless", max_attempts=5).ended(PATIENCE_SECONDS)

    assert (failed.status, failed.result.error["code"], failed.result.error["message"]) == (
        "failed", "ValueError", "no stock")
    assert (again.status, again.result.result) == ("succeeded", 2)
    assert (hopeless.status, hopeless.result.error["message"]) == ("failed", "down")
    assert [line for line in notes(tmp_path) if not line.startswith("postrun")] == [
        "broken", "on_failure no stock", "again 0", "again 1", "again 2", "hopeless 0", "hopeless 1"]
    assert "postrun shop.again RETRY" in notes(tmp_path)


@pytest.mark.parametrize("either", ["sqlite", "postgres"], indirect=True)
def test_a_task_whose_worker_is_killed_is_done_by_another_one_and_what_was_under_way_is_done_again(
        shop: Any, tmp_path: Path) -> None:
    killed = shop(work("first", ttl_seconds=1))
    with SyncGate(shop.url, TOKEN, agent_id="boss") as gate:
        handle = gate.submit("shop.slow", {"id": "order-7", "args": [600]}, max_attempts=1)
        until = time.monotonic() + PATIENCE_SECONDS
        while not notes(tmp_path):
            assert time.monotonic() < until
            threading.Event().wait(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        shop(work("second"))

        assert handle.result(PATIENCE_SECONDS) == "done"
        assert handle.task().expiries == 1
    assert [line for line in notes(tmp_path) if line.startswith("slow")] == ["slow order-7", "slow order-7"]


def test_what_cannot_be_served_says_so(shop: Any) -> None:
    told = shop(HANDS.format(more="""
from celery import chord
try:
    chord([add.s(1), add.s(2)])(add.s())
except NotImplementedError as error:
    print(error, file=sys.stderr) or sys.exit(7)
"""))

    assert told.wait() == 7


def test_the_program_of_the_page_serves_an_application(shop: Any, tmp_path: Path) -> None:
    [page] = [block for block in blocks("python", mark="agent:run") if block.more == "celery"]
    shop(page.text)

    assert json.loads(shop(HANDS.format(more="")).communicate()[0]) == [3, "SUCCESS", 3]
