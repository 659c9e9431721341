"""Ask a model: chat completions of any OpenAI-compatible endpoint, with retries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from asyncgate.clients.http import read_retry_after
from asyncgate.extras.ai_worker.profile import Profile, Secrets
from asyncgate.parts.process.spans import find_tracing

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("asyncgate.worker.ai")
MOST_ANSWER_BYTES = 8 * 2**20      # the largest accepted answer
BUSY_STATUSES = frozenset({408, 409, 425, 429})      # temporary, like any 5xx: the endpoint may be ready later
UNAUTHORIZED_STATUSES = frozenset({401, 403, 404})      # the key or the name of the model is wrong, not the task
QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})     # a 429 that waiting does not solve
ChatMessage = dict[str, Any]


class JobFailed(Exception):
    """The job failed: the error that the task fails with, and whether another attempt may succeed."""

    def __init__(self, code: str, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retryable, self.retry_after = code, message, retryable, retry_after


class Trouble(Exception):
    """One try gave no usable answer; `wait` is the pause that the endpoint asks for, `at_once` forbids another try."""

    def __init__(self, says: str, *, code: str = "model_unavailable", wait: float | None = None,
                 at_once: bool = False) -> None:
        super().__init__(says)
        self.code, self.wait, self.at_once = code, wait, at_once


# The fields of an answer that this worker uses; it ignores all others.


class Function(Struct):
    """The name and the arguments of a tool call."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str | dict[str, Any] | None = None      # some endpoints send the object itself


class ToolCall(Struct):
    """One tool call of an answer."""

    function: Function
    id: str | None = None


class Said(Struct):
    """The message of an answer."""

    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None


class Choice(Struct):
    """The single choice of an answer."""

    message: Said
    finish_reason: str | None = None


class Usage(Struct):
    """The tokens that an answer used."""

    total_tokens: Annotated[int, Meta(ge=0)] | None = None


class Completion(Struct):
    """A chat completion."""

    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: Usage | None = None


class Complaint(Struct):
    """The error of an endpoint; only its text and code are shown."""

    message: str = ""
    code: str | int | None = None
    type: str | None = None


class ToolRequest(Struct, frozen=True):
    """A tool call that the model asks for; `wrong` says why it is invalid."""

    id: str
    name: str
    arguments: dict[str, Any]
    wrong: str = ""


class ModelAnswer(Struct, frozen=True):
    """A model's answer: text, tool calls, or both; `message` is its entry in the conversation."""

    text: str
    calls: list[ToolRequest]
    tokens: int
    message: ChatMessage = field(default_factory=dict)


class Model:
    """A client of one model."""

    def __init__(self, profile: Profile, secrets: Secrets, http: httpx2.AsyncClient) -> None:
        self.profile, self.limits, self.secrets, self.http = profile, profile.limits, secrets, http
        self.url = profile.endpoint.rstrip("/") + "/chat/completions"
        key = secrets[profile.api_key_env] if profile.api_key_env else ""
        self.tracing = find_tracing()
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    async def ask(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage]) -> ModelAnswer:
        """Return the model's answer; raises JobFailed if no try succeeds."""
        request = {**self.profile.parameters, "model": self.profile.model, "messages": messages,
                   **({"tools": tools} if tools else {})}
        body = msgspec.json.encode(request)
        for tried in range(1, self.limits.answer_tries + 1):
            try:
                with self.tracing.ask_model(self.url, self.profile.model) if self.tracing else nullcontext():
                    return self._answer(await self._send(body), len(body))
            except Trouble as trouble:
                await self._wait(trouble, tried)
        raise AssertionError("unreachable")     # the last try raises

    async def _wait(self, trouble: Trouble, tried: int) -> None:
        """Wait before the next try; raise JobFailed if none is left or the pause is too long."""
        backoff = self.limits.retry_seconds * 2 ** (tried - 1) * random.uniform(0.5, 1.0)
        pause = backoff if trouble.wait is None else trouble.wait
        log.warning("the model gave no answer (try %d of %d): %s", tried, self.limits.answer_tries, trouble)
        if tried >= self.limits.answer_tries or trouble.at_once or pause > self.limits.longest_wait_seconds:
            raise JobFailed(trouble.code, f"the model gave no answer in {tried} tries: {trouble}", retryable=True,
                            retry_after=trouble.wait) from None
        await asyncio.sleep(pause)

    async def _send(self, body: bytes) -> bytes:
        import httpx2

        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                async with self.http.stream("POST", self.url, content=body, headers=self.headers) as response:
                    content = await read_bounded(response)
        except TimeoutError:
            raise Trouble(f"no complete answer within {self.limits.answer_seconds:g} s") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise Trouble(f"the connection failed ({type(error).__name__})") from None
        if response.status_code != 200:
            self._refused(response, content)
        return content

    def _refused(self, response: httpx2.Response, content: bytes) -> None:
        """Raise the error that a status other than 200 means."""
        status, complaint = response.status_code, read_complaint(content)
        text = self.secrets.hidden(" ".join(complaint.message.split()))[:500]
        if status in UNAUTHORIZED_STATUSES:    # the endpoint's text may quote a part of the key
            raise JobFailed("model_unauthorized", f"the endpoint refuses the key or the model (status {status})",
                            retryable=True)
        if status in BUSY_STATUSES or status >= 500:
            spent = complaint.code in QUOTA_CODES or complaint.type in QUOTA_CODES
            asked = read_retry_after(response.headers.get("retry-after"))
            raise Trouble(f"status {status}: {text}", wait=asked, at_once=spent)
        raise JobFailed("model_rejected_request", f"the endpoint refuses the request (status {status}): {text}")

    def _answer(self, content: bytes, asked: int) -> ModelAnswer:
        """Read an answer; an invalid one is worth another try."""
        try:
            completion, raw = msgspec.json.decode(content, type=Completion), msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            raise Trouble(f"the answer is not a chat completion: {wrong}", code="model_malformed_answer") from None
        choice, usage = completion.choices[0], completion.usage
        text, calls = join_text(choice.message.content), read_calls(choice.message.tool_calls or [])
        if choice.message.refusal or choice.finish_reason == "content_filter":
            raise JobFailed("model_refused", "the model refuses to answer")
        if choice.finish_reason == "length" and not calls:
            raise JobFailed("answer_cut_off", "the endpoint cut off the answer at its length limit; raise max_tokens "
                                              "or max_completion_tokens in parameters")
        if not text.strip() and not calls:
            raise Trouble("the answer is empty", code="model_malformed_answer")
        # If the endpoint gives no count: four bytes are about one token.
        counted = usage.total_tokens if usage and usage.total_tokens is not None else (asked + len(content)) // 4
        asks = raw["choices"][0]["message"].get("tool_calls") or []
        return ModelAnswer(text, calls, counted, self.secrets.hidden(make_assistant_message(text, calls, asks)))


async def read_bounded(response: httpx2.Response) -> bytes:
    """Read a body, up to the limit of an answer."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MOST_ANSWER_BYTES:
            raise Trouble(f"the answer is larger than {MOST_ANSWER_BYTES} bytes", code="model_malformed_answer")
    return b"".join(parts)


def read_complaint(content: bytes) -> Complaint:
    """Read the error of an endpoint, whatever its shape."""
    try:
        told = msgspec.json.decode(content)
        error = told.get("error", told) if isinstance(told, dict) else told
        return msgspec.convert(error, Complaint, strict=False) if isinstance(error, dict) else Complaint(str(error))
    except (ValueError, RecursionError):
        return Complaint(content[:300].decode(errors="replace"))


def join_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message; join it if it comes in parts."""
    if not isinstance(content, list):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if part.get("type", "text") in ("text", "output_text"))


def read_calls(asked: Sequence[ToolCall]) -> list[ToolRequest]:
    """Read the tool calls of an answer; give each a unique id."""
    calls: list[ToolRequest] = []
    for at, call in enumerate(asked):
        ids = {call.id for call in calls}
        id = call.id if call.id and call.id not in ids else f"{call.id or 'call'}_{at}"
        arguments, wrong = read_arguments(call.function.arguments)
        calls.append(ToolRequest(id, call.function.name, arguments, wrong))
    return calls


def read_arguments(arguments: str | dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Read the arguments of a call; return them, and a text that says what is wrong (empty if nothing is)."""
    if not isinstance(arguments, str):
        return arguments or {}, ""
    try:
        told = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as wrong:
        return {}, f"the arguments are not JSON: {wrong}"
    return (told, "") if isinstance(told, dict) else ({}, "the arguments are not a JSON object")


def make_assistant_message(text: str, calls: Sequence[ToolRequest], asked: Sequence[Mapping[str, Any]]) -> ChatMessage:
    """Return the message that represents an answer in the conversation.

    Extra fields of a call are kept, because some endpoints require them.  Invalid arguments are not sent back, because
    they break the templates of some models.
    """
    wanted = [{**request, "id": call.id, "type": "function", "function": {
        "name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}}
        for call, request in zip(calls, asked, strict=True)]
    return {"role": "assistant", "content": text or None, **({"tool_calls": wanted} if wanted else {})}
