"""Questions in line: a client that waits for a task, and can ask its user, is asked what the task asks.

A call that waits is answered with the questions (`InputRequiredResult`), and the client repeats it with the answers.
Between the two the gate keeps nothing: the state that the client sends back is the id of the task, and what it was
asked, sealed.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec import Struct, field

from asyncgate import Caller, Engine
from asyncgate.parts.faces.mcp import tasks
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import JsonObject, decode_json, sha256
from asyncgate.parts.process.readers import Wants

SEALED_FOR = "questions in line"


class Seen(Struct):
    """What a waiting call has come to: the task, and what it asks of whoever waits."""

    record: wire.TaskRecord
    questions: JsonObject


def can_ask(ctx: tasks.Context) -> bool:
    """Whether a client can ask its user by a form: it says so in every request, in older revisions only once."""
    can = ctx.session.client_capabilities
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS or can is None or can.elicitation is None:
        return False
    return can.elicitation.form is not None or can.elicitation.url is None


class InLine(Struct):
    """One call that waits for a task."""

    engine: Engine
    caller: Caller
    ctx: tasks.Context
    perform: tasks.Perform
    problems: dict[str, str] = field(default_factory=dict)      # why answers were refused, by the keys of questions

    async def wait(self, task_id: str, seconds: float) -> JsonObject | None:
        """Wait until a task has ended, or asks whoever waits; return what is asked, as the answer to the call."""
        if self.caller.note_wait is not None:
            self.caller.note_wait(task_id)
        ask = wire.GetTask(task_id=task_id, wait_seconds=seconds)

        async def look() -> Seen:
            record = await self.engine.get_task(self.caller, wire.GetTask(task_id=task_id))
            if record.status in stored.TERMINAL or (
                    self.caller.bound and not record.created_by.same(self.caller.principal)):
                return Seen(record, {})
            owner = {"kind": record.created_by.kind, "id": record.created_by.id}
            return Seen(record, tasks.show_requests(
                await self.perform(self.ctx, "list_inputs", self._name_owner(task_id, owner)), owner, self.problems))
        seen = await self.engine.wait_to_read(self.caller, ask, Wants(task_id=task_id), look,
                                              lambda seen: seen.questions or seen.record.status in stored.TERMINAL)
        if not seen.questions:
            return None
        place = f"{task_id} {sha256(*seen.questions)[:16]}"      # another one in each round
        return {"resultType": "input_required", "inputRequests": seen.questions,
                "requestState": self.engine.seal_cursor(self.caller, place, SEALED_FOR)}

    def open_state(self, state: str) -> str:
        """Return the task of a state that a client sends back."""
        try:
            return (self.engine.open_cursor(self.caller, state, SEALED_FOR) or "").partition(" ")[0]
        except errors.InvalidCursor:
            raise MCPError(types.INVALID_PARAMS, "this requestState is not from this gate: send back that of the "
                                                 "last answer, or call the tool again without one") from None

    async def answer(self, task_id: str, responses: JsonObject) -> None:
        """Answer what the user was asked; what somebody else has answered meanwhile stays so.

        An answer that does not match is asked for again: a refusal would end the call, and hide the task's id.
        """
        record = decode_json(await self.perform(self.ctx, "get_task", {"task_id": task_id}))

        async def perform(operation: str, **more: Any) -> bytes:
            try:
                return await self.perform(self.ctx, operation, {
                    **self._name_owner(task_id, record["created_by"]), **more})
            except tasks.IGNORED:
                return b""
            except errors.AnswerInvalid as refused:
                self.problems[more["key"]] = str(refused)
                return b""
        await tasks.answer_all(perform, responses)

    def _name_owner(self, task_id: str, owner: JsonObject) -> dict[str, Any]:
        """Name the task, and its owner where the credential names nobody: who waits for it speaks as its owner."""
        named = {} if self.caller.bound else {"principal_kind": owner["kind"], "principal_id": owner["id"]}
        return {"task_id": task_id, **named}


def read_responses(params: types.CallToolRequestParams) -> JsonObject:
    """Return the answers that come with a repeated call."""
    return {key: response.model_dump(mode="json", by_alias=True)
            for key, response in (params.input_responses or {}).items()}
