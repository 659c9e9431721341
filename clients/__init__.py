"""Programs that reach the gate over the wire: Python client, worker, AI worker, scheduler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncgate.clients.client import AsyncGate as AsyncGate
    from asyncgate.clients.client import Handle as Handle
    from asyncgate.clients.client import TaskCanceled as TaskCanceled
    from asyncgate.clients.client import TaskFailed as TaskFailed
    from asyncgate.clients.http import NotAGate as NotAGate
    from asyncgate.clients.http import Refusal as Refusal
    from asyncgate.clients.http import Unreachable as Unreachable
    from asyncgate.clients.sync import SyncGate as SyncGate
    from asyncgate.clients.sync import SyncHandle as SyncHandle
    from asyncgate.clients.worker import Answer as Answer
    from asyncgate.clients.worker import Done as Done
    from asyncgate.clients.worker import Fail as Fail
    from asyncgate.clients.worker import Job as Job
    from asyncgate.clients.worker import Lost as Lost
    from asyncgate.clients.worker import Park as Park
    from asyncgate.clients.worker import Question as Question
    from asyncgate.clients.worker import Retry as Retry
    from asyncgate.clients.worker import StepMismatch as StepMismatch
    from asyncgate.clients.worker import StepsLost as StepsLost
    from asyncgate.clients.worker import TooLarge as TooLarge
    from asyncgate.clients.worker import Unanswered as Unanswered
    from asyncgate.clients.worker import Worker as Worker

# The module of each name.  Names are imported on first use: the gate's own programs import this package and use none.
MODULE_OF_NAME = {"AsyncGate": "client", "Handle": "client", "TaskCanceled": "client", "TaskFailed": "client",
           "Refusal": "http", "Unreachable": "http", "NotAGate": "http", "SyncGate": "sync", "SyncHandle": "sync",
           **dict.fromkeys(("Answer", "Done", "Fail", "Job", "Lost", "Park", "Question", "Retry", "StepMismatch",
                           "StepsLost", "TooLarge", "Unanswered", "Worker"), "worker")}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULE_OF_NAME[name]}"), name)
