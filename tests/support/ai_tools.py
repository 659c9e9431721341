"""Processes around an AI worker under test: the stand-in for the model, a real MCP server, and a profile of both."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_SECONDS

HERE = Path(__file__).parent
KEY = "sk-stand-in-1234567890"
TOKEN = "a-token-of-the-tools"
Json = dict[str, Any]


class Program:
    """A program that prints its address when it is ready."""

    def __init__(self, name: str, *arguments: str, **environment: str) -> None:
        command = [sys.executable, str(HERE / name), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], PATIENCE_SECONDS)[0], f"{name} says nothing"
        self.url = self.process.stdout.readline().strip()
        assert self.url, f"{name} ended"

    def kill(self) -> None:
        """End the program."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


class ModelProgram(Program):
    """The stand-in for the model."""

    def __init__(self, script: list[Json] | None = None) -> None:
        super().__init__("model_stand_in.py", "0", json.dumps(script or []))

    def seen(self) -> list[Json]:
        """Return what it was asked."""
        with urllib.request.urlopen(f"{self.url}/seen", timeout=PATIENCE_SECONDS) as answer:
            seen: list[Json] = json.load(answer)["seen"]
        return seen


def stdio(folder: Path, *tools: str) -> Json:
    """Return the settings of an MCP server that the worker starts itself."""
    return {"command": [sys.executable, str(HERE / "tools_stand_in.py"), "stdio", str(folder)],
            "tools": list(tools or ["*"])}


def profile_with(model_url: str, servers: Json | None = None, limits: Json | None = None, **more: Any) -> Json:
    """Return a profile, as a file would say it."""
    return {"name": "clerk", "instructions": "You are a clerk who counts things.", "types": ["count"],
            "model": "stand-in", "endpoint": model_url, "api_key_env": "STAND_IN_KEY", "servers": servers or {},
            "limits": {"retry_seconds": 0.001, "tool_seconds": 20, "answer_seconds": 20, **(limits or {})}, **more}


def notes(folder: Path) -> list[str]:
    """Return what happened to the MCP server of a folder."""
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def until(look: Callable[[], Any], what: str) -> Any:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return seen
