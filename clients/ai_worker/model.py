"""Asking a model: chat completions of any OpenAI-compatible endpoint, tried again where that may help."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from asyncgate.clients.ai_worker.profile import Profile, Secrets
from asyncgate.clients.http import pause_asked

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("asyncgate.worker.ai")
MOST_BYTES = 8 * 2**20      # of an answer
BUSY = frozenset({408, 409, 425, 429})      # the endpoint is not ready; like any 5xx it may be later
BARRED = frozenset({401, 403, 404})         # the key, or the name of the model, is wrong: no fault of the task
SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})     # a 429 that no waiting mends
Message = dict[str, Any]


class JobFailed(Exception):
    """The job cannot be done, or not now: what the task is failed with."""

    def __init__(self, code: str, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retryable, self.retry_after = code, message, retryable, retry_after


class Trouble(Exception):
    """No usable answer this time; `wait` is what the endpoint asks for."""

    def __init__(self, says: str, *, code: str = "model_unavailable", wait: float | None = None,
                 at_once: bool = False) -> None:
        super().__init__(says)
        self.code, self.wait, self.at_once = code, wait, at_once


# The part of an answer that is used; everything else in it is left alone.


class Function(Struct):
    """What a model calls, and with what."""

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
    """The one answer that was asked for."""

    message: Said
    finish_reason: str | None = None


class Usage(Struct):
    """What an answer has cost."""

    total_tokens: Annotated[int, Meta(ge=0)] | None = None


class Completion(Struct):
    """A chat completion."""

    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: Usage | None = None


class Complaint(Struct):
    """The error of an endpoint, of which only the text and the code are told."""

    message: str = ""
    code: str | int | None = None
    type: str | None = None


class Call(Struct, frozen=True):
    """A tool that the model wants called; `wrong` says why it cannot be."""

    id: str
    name: str
    arguments: dict[str, Any]
    wrong: str = ""


class Answer(Struct, frozen=True):
    """What a model said: text, calls of tools, or both; and the message to remember it by."""

    text: str
    calls: list[Call]
    tokens: int
    message: Message = field(default_factory=dict)


class Model:
    """Asks one model."""

    def __init__(self, profile: Profile, secrets: Secrets, http: httpx2.AsyncClient) -> None:
        self.profile, self.limits, self.secrets, self.http = profile, profile.limits, secrets, http
        self.url = profile.endpoint.rstrip("/") + "/chat/completions"
        key = secrets[profile.api_key_env] if profile.api_key_env else ""
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    async def ask(self, messages: Sequence[Message], tools: Sequence[Message]) -> Answer:
        """Return the model's answer; raises JobFailed when there is none to be had."""
        said = {**self.profile.parameters, "model": self.profile.model, "messages": messages,
                **({"tools": tools} if tools else {})}
        body = msgspec.json.encode(said)
        for tried in range(1, self.limits.answer_tries + 1):
            try:
                return self._answer(await self._send(body), len(body))
            except Trouble as trouble:
                await self._wait(trouble, tried)
        raise AssertionError("unreachable")     # the last try raises

    async def _wait(self, trouble: Trouble, tried: int) -> None:
        """Wait before the next try, unless it is not worth holding the task for."""
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
                    content = await bounded(response)
        except TimeoutError:
            raise Trouble(f"no complete answer within {self.limits.answer_seconds:g} s") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise Trouble(f"the connection failed ({type(error).__name__})") from None
        if response.status_code != 200:
            self._refused(response, content)
        return content

    def _refused(self, response: httpx2.Response, content: bytes) -> None:
        """Raise what a status other than 200 means."""
        status, complaint = response.status_code, complaint_of(content)
        text = self.secrets.hidden(" ".join(complaint.message.split()))[:500]
        if status in BARRED:    # what the endpoint says here may repeat a part of the key
            raise JobFailed("model_unauthorized", f"the endpoint refuses this worker or its model (status {status})",
                            retryable=True)
        if status in BUSY or status >= 500:
            spent = complaint.code in SPENT or complaint.type in SPENT
            asked = pause_asked(response.headers.get("retry-after"))
            raise Trouble(f"status {status}: {text}", wait=asked, at_once=spent)
        raise JobFailed("model_rejected_request", f"the endpoint refuses the request (status {status}): {text}")

    def _answer(self, content: bytes, asked: int) -> Answer:
        """Read an answer; one that makes no sense is asked for once more."""
        try:
            completion, raw = msgspec.json.decode(content, type=Completion), msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            raise Trouble(f"the answer is no chat completion: {wrong}", code="model_malformed_answer") from None
        choice, usage = completion.choices[0], completion.usage
        text, calls = text_of(choice.message.content), calls_of(choice.message.tool_calls or [])
        if choice.message.refusal or choice.finish_reason == "content_filter":
            raise JobFailed("model_refused", "the model refuses to answer")
        if choice.finish_reason == "length" and not calls:
            raise JobFailed("answer_cut_off", "the answer is longer than the endpoint lets it be; raise max_tokens or "
                                              "max_completion_tokens in parameters")
        if not text.strip() and not calls:
            raise Trouble("the answer is empty", code="model_malformed_answer")
        # Without a count of the endpoint's: four bytes are about a token.
        counted = usage.total_tokens if usage and usage.total_tokens is not None else (asked + len(content)) // 4
        asks = raw["choices"][0]["message"].get("tool_calls") or []
        return Answer(text, calls, counted, self.secrets.hidden(remembered(text, calls, asks)))


async def bounded(response: httpx2.Response) -> bytes:
    """Read a body that is no larger than an answer can be."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise Trouble(f"the answer is larger than {MOST_BYTES} bytes", code="model_malformed_answer")
    return b"".join(parts)


def complaint_of(content: bytes) -> Complaint:
    """Read the error of an endpoint, of whatever shape."""
    try:
        told = msgspec.json.decode(content)
        found = told.get("error", told) if isinstance(told, dict) else told
        return msgspec.convert(found, Complaint, strict=False) if isinstance(found, dict) else Complaint(str(found))
    except (ValueError, RecursionError):
        return Complaint(content[:300].decode(errors="replace"))


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message, which may come in parts."""
    if not isinstance(content, list):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if part.get("type", "text") in ("text", "output_text"))


def calls_of(asked: Sequence[ToolCall]) -> list[Call]:
    """Read the calls of an answer; each has an id of its own in the end."""
    calls: list[Call] = []
    for at, one in enumerate(asked):
        ids = {call.id for call in calls}
        id = one.id if one.id and one.id not in ids else f"{one.id or 'call'}_{at}"
        arguments, wrong = arguments_of(one.function.arguments)
        calls.append(Call(id, one.function.name, arguments, wrong))
    return calls


def arguments_of(said: str | dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Read the arguments of a call; return also what is wrong with them."""
    if not isinstance(said, str):
        return said or {}, ""
    try:
        told = msgspec.json.decode(said) if said.strip() else {}
    except (ValueError, RecursionError) as wrong:
        return {}, f"the arguments are not JSON: {wrong}"
    return (told, "") if isinstance(told, dict) else ({}, "the arguments are no JSON object")


def remembered(text: str, calls: Sequence[Call], asked: Sequence[Mapping[str, Any]]) -> Message:
    """Return the message that stands for an answer in the conversation.

    What an endpoint adds to a call is kept, some want it back.  Arguments that were no JSON are not sent back: the
    templates of some models break over them.
    """
    wanted = [{**one, "id": call.id, "type": "function", "function": {
        "name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}}
        for call, one in zip(calls, asked, strict=True)]
    return {"role": "assistant", "content": text or None, **({"tool_calls": wanted} if wanted else {})}
