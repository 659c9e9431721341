"""One task of the gate as one task of a remote agent: sent once, followed, asked about, canceled."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from asyncgate.clients import http
from asyncgate.clients.worker import Answer, Fail, Job, Retry
from asyncgate.clients.worker.output import to_part
from asyncgate.extras.a2a import view
from asyncgate.extras.a2a.requests import Members, Part, fit
from asyncgate.extras.a2a_worker.open_tasks import OpenTasks
from asyncgate.extras.a2a_worker.remote import Away, Refused, Remote
from asyncgate.parts.process.kit import take_error

AWAY_SECONDS = 300.0        # that an agent may be away before an attempt fails: longer than a restart
SHORTEST_LOOK, LONGEST_LOOK = 0.1, 3.0      # between two looks at a task that goes on
MOST_SOUGHT = 100               # tasks and messages of a context among which a message is looked for
MOST_WORDS = 16_000             # of a question
END_STATES, ASKS = ({f"TASK_STATE_{state}" for state in states} for states in (view.ENDED_STATES, view.ASKS))
R = TypeVar("R")
SENT, ANSWERED, OVER = "sent", "answered", "ended"         # the steps
SCHEMA_MODE = "application/schema+json"
KEPT = ("artifactId", "name", "description", "parts", "metadata")       # of an artifact


class Errand:
    """One run of a task."""

    def __init__(self, remote: Remote, job: Job, payload: Any, tasks: OpenTasks) -> None:
        self.remote, self.job, self.tasks = remote, job, tasks
        self.context_id, self.metadata = str(uuid.uuid5(uuid.NAMESPACE_URL, f"asyncgate task {job.task_id}")), {}
        if isinstance(payload, dict) and isinstance(parts := payload.get("parts"), list) and parts and all(
                fit(part, Part) for part in parts):       # a message, as the face of A2A makes a payload of one
            self.parts, self.context_id = parts, str(payload.get("context_id") or self.context_id)
            self.metadata = payload["metadata"] if isinstance(payload.get("metadata"), dict) else {}
        else:
            self.parts = [to_part(payload)]
        self.answered, self.streams = set[str](), remote.streams

    metadata: Members
    remote_id = ""          # of its task, as soon as it is known

    async def run(self) -> Any:
        """Return the result of the remote task."""
        with self.tasks.follow(self.job.task_id):
            try:
                return await self._run()
            except Refused as refused:
                raise Fail(str(refused), code="barred" if refused.reason == "BARRED" else "refused") from None

    async def _run(self) -> Any:
        log = await self.job.recall()
        sent, ends = [value for name, value in log if name == SENT], [name for name, _ in log if name == OVER]
        self.answered = {value for name, value in log if name == ANSWERED}
        if len(sent) == len(ends):
            sent.append(await self.job.step(SENT, self._send, f"asyncgate-{self.job.task_id}-{len(sent) + 1}"))
        if "message" in sent[-1]:
            return unwrap_parts(read_parts(sent[-1]["message"]))
        self.remote_id, self.context_id = sent[-1]["task_id"], sent[-1]["context_id"]
        self.tasks.note(self.job.task_id, self.remote_id)
        self.job.report({"remote_task_id": self.remote_id, "context_id": self.context_id})
        try:
            return await self._follow()
        except Refused as refused:
            if refused.reason != "TASK_NOT_FOUND":
                raise
            self.tasks.forget(self.job.task_id)
            await self.job.step(OVER, str, "lost")
            raise Retry(f"the agent has lost its task {self.remote_id}", code="remote_lost") from None

    # Sending.

    async def _insist(self, attempt: Callable[[bool], Awaitable[R]], unsure: bool = False) -> R:
        """Try until the agent answers; raises Retry when it has been away too long.

        An attempt learns whether one before it may have arrived.
        """
        failures, until = 0, time.monotonic() + AWAY_SECONDS
        while True:
            try:
                return await attempt(unsure)
            except Away as away:
                self.job.check()
                failures, unsure = failures + 1, unsure or away.sent
                pause = max(http.pause_after(failures, 0.5), away.after or 0.0)
                if time.monotonic() + pause > until:
                    raise Retry(str(away), code="unreachable", after=away.after) from None
                await asyncio.sleep(pause)

    async def _send(self, message_id: str) -> Members:
        """Send the task, unless it has been; a call that is canceled meanwhile goes on, until the task is known."""
        message = self._make_message(message_id, self.parts, self.metadata)

        async def attempt(unsure: bool) -> Members:
            known = await self._find_sent(message_id) if unsure else None
            return known or await self._call("SendMessage", self._ask(message), message_id)

        async def send() -> Members:
            reply = await self._insist(attempt, unsure=self.job.fence > 1)
            if isinstance(reply.get("message"), dict):
                return {"message": reply["message"]}        # it has answered without a task
            task = reply.get("task")
            if not isinstance(task, dict) or not isinstance(task.get("id"), str):
                raise Refused("INVALID_AGENT_RESPONSE", "its answer to a message has neither a task nor a message")
            self.tasks.note(self.job.task_id, task["id"])
            return {"task_id": task["id"], "context_id": str(task.get("contextId") or self.context_id)}

        sending = asyncio.ensure_future(send())
        sending.add_done_callback(take_error)
        return await asyncio.shield(sending)

    async def _find_sent(self, message_id: str) -> Members | None:
        """Return the task that a message has become, if the agent lists its tasks; 0.3 does not."""
        if self.remote.is_old:
            return None
        try:
            listed = await self._call("ListTasks", {
                "contextId": self.context_id, "pageSize": MOST_SOUGHT, "historyLength": MOST_SOUGHT})
        except Refused:
            return None
        return next(({"task": task} for task in list_objects(listed, "tasks") if any(
            message.get("messageId") == message_id for message in list_objects(task, "history"))), None)

    async def _call(self, method: str, params: Members, message_id: str = "") -> Members:
        keyed = {"idempotency-key": message_id} if message_id else {}
        return await self.remote.call(method, params, {**keyed, **self.job.trace})

    def _make_message(self, message_id: str, parts: list[Any], metadata: Members, **more: str) -> Members:
        return {"messageId": message_id, "role": "ROLE_USER", "parts": parts, "contextId": self.context_id,
                **({"metadata": metadata} if metadata else {}), **more}

    def _ask(self, message: Members) -> Members:
        return {"message": message, "configuration": {"returnImmediately": True}}

    # Following.

    async def _follow(self) -> Any:
        """Look at the remote task whenever there may be news, until it has ended; ask at the gate what it asks."""
        pause, before = SHORTEST_LOOK, None
        while True:
            status = (task := await self._read())["status"]
            if status.get("state") in END_STATES:
                self.tasks.forget(self.job.task_id)
            match state := str(status.get("state")).removeprefix("TASK_STATE_"):
                case "COMPLETED":
                    return make_result(task)
                case "FAILED" | "CANCELED" | "REJECTED":
                    raise await self._fail(state, read_words(status.get("message")))
                case "INPUT_REQUIRED" | "AUTH_REQUIRED" if (key := name_question(status)) not in self.answered:
                    await self._ask_gate(key, status)
                    before = None
            if status != before:
                pause, before = SHORTEST_LOOK, status
                self._tell(status)
            if not await self._listen():
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, LONGEST_LOOK)

    async def _listen(self) -> bool:
        """Follow the stream of the task; return whether it has told of an end or a question, which GetTask shows."""
        if not self.streams:
            return False
        try:
            async with contextlib.aclosing(self.remote.follow(self.remote_id, self.job.trace)) as statuses:
                async for status in statuses:
                    if status.get("state") in END_STATES or (
                            status.get("state") in ASKS and name_question(status) not in self.answered):
                        return True
                    self._tell(status)
        except Refused:     # it streams no task that runs already, or this one has ended
            self.streams = False
        except Away:
            self.job.check()
        return False

    def _tell(self, status: Members) -> None:
        if words := read_words(status.get("message")):
            self.job.report({"message": words, "remote_task_id": self.remote_id})

    async def _read(self) -> Members:
        reply = await self._insist(lambda _: self._call("GetTask", {"id": self.remote_id, "historyLength": 1}))
        task = reply.get("task", reply)
        if not isinstance(task, dict) or not isinstance(task.get("status"), dict):
            raise Refused("INVALID_AGENT_RESPONSE", f"its answer is not the task {self.remote_id}")
        return task

    async def _fail(self, state: str, words: str) -> Fail | Retry:
        """Return how the attempt ends: what has failed is sent again by the next one, if there is one."""
        if state != "FAILED":
            return Fail(words or f"the agent says {state.lower()}", code=(
                "rejected" if state == "REJECTED" else "remote_canceled"))
        await self.job.step(OVER, str, state)
        return Retry(words or f"task {self.remote_id} of the agent has failed", code="remote_failed")

    # Asking.

    async def _ask_gate(self, key: str, status: Members) -> None:
        """Ask at the gate, where the lease ends until there is an answer; then hand that to the agent."""
        message = status.get("message") or {}
        words = read_words(message) or "The agent waits for an answer."
        schema = next((part["data"] for part in read_parts(message) if part.get("mediaType") == SCHEMA_MODE
                       and isinstance(part.get("data"), dict)), None)
        try:
            answer = await self.job.ask(key, words[:MOST_WORDS], schema=schema)
        except http.Refusal as refusal:
            if schema is None or refusal.status != 400:
                raise
            answer = await self.job.ask(key, words[:MOST_WORDS])        # the gate does not understand the schema
        await self.job.step(ANSWERED, self._answer, key, message, answer)
        self.answered.add(key)

    async def _answer(self, key: str, message: Members, answer: Answer) -> str:
        """Send an answer, as long as the question stands; the agent may have gone on by itself."""
        asked, metadata = message.get("metadata"), dict[str, Any]()
        if isinstance(asked, dict) and view.QUESTION_KEY in asked:
            metadata[view.QUESTION_KEY] = asked[view.QUESTION_KEY]    # of a gate
        if not answer.accepted:
            metadata["action"] = answer.action
        message_id = f"asyncgate-{self.job.task_id}-{key}"
        parts = [to_part(answer.content)] if answer.accepted and answer.content is not None else [
            {"text": answer.action}]
        sent = self._make_message(message_id, parts, metadata, taskId=self.remote_id)

        async def attempt(unsure: bool) -> str:
            if not unsure or name_question((await self._read())["status"]) == key:
                try:
                    await self._call("SendMessage", self._ask(sent), message_id)
                except Refused as refused:
                    if refused.reason != "UNSUPPORTED_OPERATION":
                        raise
            return key
        return await self._insist(attempt)


def name_question(status: Mapping[str, Any]) -> str:
    """Return the key of a question: of its message, or of its moment; one for a sign-in begins with auth-."""
    message = status.get("message")
    name = (message.get("messageId") if isinstance(message, dict) else None) or status.get("timestamp")
    digest = hashlib.sha256(msgspec.json.encode(name or message, order="sorted")).hexdigest()[:24]
    return f"{'auth' if status.get('state') == 'TASK_STATE_AUTH_REQUIRED' else 'input'}-{digest}"


def read_parts(message: Any) -> list[Members]:
    """Return the parts of a message or an artifact that are parts."""
    parts = message.get("parts") if isinstance(message, dict) else None
    return [part for part in parts if fit(part, Part)] if isinstance(parts, list) else []


def read_words(message: Any) -> str:
    """Return the words and addresses of a message."""
    return "\n".join(part.get("text") or part.get("url") or "" for part in read_parts(message)
                     if "text" in part or "url" in part)


def list_objects(members: Members, name: str) -> list[Members]:
    """Return the objects of a list."""
    rows = members.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def make_result(task: Members) -> Any:
    """Return the result of a completed task: the value of its only part, else its artifacts.

    An agent that makes no artifact has said its result: as the message of the status, or as its last one.
    """
    artifacts = [artifact for artifact in list_objects(task, "artifacts") if read_parts(artifact)]
    if len(artifacts) == 1 and is_plain(parts := read_parts(artifacts[0])):
        return unwrap_parts(parts)
    if artifacts:
        return {"artifacts": [{name: artifact[name] for name in KEPT if artifact.get(name)} for artifact in artifacts]}
    spoken = [message for message in list_objects(task, "history") if message.get("role") == "ROLE_AGENT"]
    return unwrap_parts(read_parts(task["status"].get("message") or (spoken[-1] if spoken else None)))


def is_plain(parts: list[Members]) -> bool:
    """Whether parts are one text or one value."""
    return len(parts) == 1 and ("text" in parts[0] or "data" in parts[0])


def unwrap_parts(parts: list[Members]) -> Any:
    """Return the value of a single text or data part, else an artifact of the parts."""
    if is_plain(parts):
        return parts[0].get("text", parts[0].get("data"))
    return {"parts": parts} if parts else None
