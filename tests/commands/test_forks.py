"""A child that a program of ours forks obeys SIGTERM by itself, and its parent stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_worker_program import ROOT, TOKEN
from tests.support.patience import PATIENCE_SECONDS

FORKING = '''if True:
    import os, signal, threading, time

    def fork():
        while not callable(signal.getsignal(signal.SIGTERM)):
            time.sleep(0.01)
        if (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=fork, daemon=True).start()
    from asyncgate.commands.main import main
    main()
'''
PROFILE = "types: [ask]\ninstructions: Answer.\nmodel: m\nendpoint: http://127.0.0.1:9/v1\n"
PROGRAMS = {"gate": ["serve", "--port", "0"], "scheduler": ["scheduler"], "worker": ["worker", "echo"],
            "AI worker": ["worker", "--ai", "profile.yaml"]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_forked_child_ends_by_its_own_sigterm_and_its_parent_does_not(
        program: str, start: Any, tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    url = {} if program == "gate" else {"ASYNCGATE_URL": start().url}
    running = subprocess.Popen(
        [sys.executable, "-c", FORKING, *PROGRAMS[program]], cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, **url, "PYTHONPATH": str(ROOT), "ASYNCGATE_API_KEY": TOKEN})
    try:
        told = running.communicate(timeout=PATIENCE_SECONDS)[0]
    finally:
        os.killpg(running.pid, signal.SIGKILL) if running.poll() is None else None

    assert "child -15" in told.splitlines()
    assert running.returncode == 0
