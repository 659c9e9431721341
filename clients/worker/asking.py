"""Questions of a task function: the answer is there already, or the lease ends until somebody has given it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from asyncgate.clients.worker.job import Job

ASKED = "asked"             # why a lease is gone that its function has given back with a question
POLL_SECONDS = 1.0          # how long one call waits for an answer: a worker that stops is not kept longer


class Unanswered(BaseException):
    """Ends a task function whose question is open: the task is offered again with the answer.  Let it pass.

    It is not an Exception, so that nobody who handles errors takes it for one.
    """


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question of a task, as `job.ask` takes it."""

    key: str
    message: str
    schema: Mapping[str, Any] | None = None
    to: str | Mapping[str, str] | None = None
    expires_in_seconds: float | None = None
    on_expiry: Literal["resume", "fail"] = "resume"


class Answer(msgspec.Struct, frozen=True):
    """How a question has ended: its action is accept, decline or cancel, or expired if nobody has answered in time."""

    action: str
    content: Any = None
    by: dict[str, Any] | None = None
    receipt_id: str | None = None       # the proof

    @property
    def accepted(self) -> bool:
        """Whether somebody has accepted."""
        return self.action == "accept"


class Inquiry:
    """Some questions of one run of a task, until each has its answer, or the lease has ended with them."""

    def __init__(self, job: Job, questions: tuple[Question, ...]) -> None:
        self.job, self.answers = job, dict[str, Answer]()
        self.requests = {question.key: describe_question(question) for question in questions}
        if not questions or len(self.requests) < len(questions):
            raise ValueError("ask_all takes one question or more, each under its own key")

    def ask(self, keep_lease: bool | float) -> dict[str, Answer]:
        """Return the answers by key, or raise Unanswered; meanwhile the lease is kept so long."""
        *others, last = self.requests
        for key in others:      # under the lease, which the next one needs, too
            self._request(key, keep_lease=True)
        self._request(last, keep_lease=keep_lease is not False)
        if keep_lease is not False:
            self._wait(inf if keep_lease is True else keep_lease)
        while unanswered := [key for key in self.requests if key not in self.answers]:
            self._request(unanswered[0], keep_lease=False)
        return {key: self.answers[key] for key in self.requests}

    def _request(self, key: str, *, keep_lease: bool) -> None:
        """Ask under a key; raise Unanswered if the lease has ended by that."""
        fields = {} if keep_lease else self.job.describe_checkpoint()
        reply = self.job.call("request_input", **self.job.under, **self.requests[key], **fields, keep_lease=keep_lease)
        if reply["lease_ended"]:
            self.job.end(ASKED)
            raise Unanswered(f"{self.job} waits for the answer to {key}")
        if reply["input"] is not None:
            self.answers[key] = msgspec.convert(reply["input"], Answer)

    def _wait(self, seconds: float) -> None:
        """Wait for the answers under the lease, so long at most."""
        until = time.monotonic() + seconds
        while len(self.answers) < len(self.requests) and (left := until - time.monotonic()) > 0:
            inputs = self.job.call("list_inputs", task_id=self.job.task_id,
                                   wait_seconds=min(left, POLL_SECONDS))["inputs"]
            self.answers.update({row["key"]: Answer(row["state"], row["content"], row["answered_by"], row["receipt_id"])
                                 for row in inputs if row["key"] in self.requests and row["state"] != "open"})


def describe_question(question: Question) -> dict[str, Any]:
    """Return the fields of a request; raises ValueError if it is not clear who is asked."""
    fields: dict[str, Any] = msgspec.to_builtins(question)
    if isinstance(question.to, str):
        fields["to"] = read_principal(question.to)
    return fields


def read_principal(text: str) -> dict[str, str]:
    """Return the principal that a text names; raises ValueError if it names none."""
    kind, colon, id = text.partition(":")
    if not (kind and colon and id):
        raise ValueError(f"to is {text!r}; it takes a kind and an id, such as human:boss")
    return {"kind": kind, "id": id}
