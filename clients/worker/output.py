"""What task functions print and stream: sent in the background, in order, each chunk once."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from asyncgate.clients import http
from asyncgate.clients.finite import encode_finite
from asyncgate.clients.values import dump_model
from asyncgate.clients.worker.heart import GONE, is_temporary
from asyncgate.clients.worker.journal import PAUSE_SECONDS, Recorder

if TYPE_CHECKING:
    from asyncgate.clients.worker.job import Job

GATHER_SECONDS = 0.05       # for which texts are gathered before they are sent
MOST_WAITING_BYTES = 2**20  # that wait for a slow gate; then the function waits, too
MOST_CALL_BYTES, MOST_CALL_CHUNKS = 100_000, 100
LONGEST_TEXT = 16_000       # letters of one chunk of printed text
FLUSH_SECONDS = 30.0        # that the end of a task waits for its output
ESCAPE, LONE = re.compile(rb"\\(ud[89ab]..\\ud[c-f]..|u0000|ud[89a-f]..|.)"), 5

log = logging.getLogger("asyncgate.worker")


class Printer:
    """Sends the output of one task; its thread begins with the first chunk and ends with the task."""

    def __init__(self, job: Job, recorder: Recorder, position: int) -> None:
        self.job, self.recorder, self.position = job, recorder, position
        self.waiting = deque[tuple[str, bytes]]()       # the stream and the encoded chunk
        self.size, self.sending, self.most, self.closed = 0, 0, MOST_CALL_CHUNKS, False
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def print(self, text: str, stream: str = "output") -> None:
        """Append text; pieces that are printed within a moment are one chunk."""
        text = clean_text(text)
        for at in range(0, len(text), LONGEST_TEXT):
            self._add(msgspec.json.encode(text[at:at + LONGEST_TEXT]), joins=True, stream=stream)

    def append(self, chunk: Any) -> None:
        """Append one chunk."""
        self._add(encode_storable(chunk), joins=False)

    def _add(self, chunk: bytes, *, joins: bool, stream: str = "output") -> None:
        self.job.check()
        with self.changed:
            while self.size > MOST_WAITING_BYTES and not self.closed and not self.job.lost.is_set():
                self.changed.wait(1.0)
            if self.closed:
                return
            before, last = self.waiting[-1] if joins and len(self.waiting) > self.sending else ("", b"")
            if before == stream and last.startswith(b'"') and len(last) + len(chunk) <= LONGEST_TEXT:
                self.waiting[-1] = (stream, last[:-1] + chunk[1:])
                self.size += len(chunk) - 2
            else:
                self.waiting.append((stream, chunk))
                self.size += len(chunk)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="output", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def flush(self, timeout_seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything is sent; return whether it is."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.waiting or self.closed or self.job.lost.is_set(),
                                         timeout_seconds)

    def close(self) -> None:
        """Send nothing more."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.waiting) or self.closed or self.job.lost.is_set())
                if self.closed or self.job.lost.is_set():
                    return
            threading.Event().wait(GATHER_SECONDS)
            with self.changed:
                stream, chunks = self.waiting[0][0], self._choose()
                self.sending = len(chunks)
            try:
                self._insist(chunks, stream)
            except Exception as flaw:       # output is for those who watch, and must not end the work
                if getattr(flaw, "status", 0) not in (400, 413):
                    log.warning("%s: its further output is not sent: %s", self.job, flaw)
                    return self.close()
                self.most = 1 if len(chunks) > 1 else MOST_CALL_CHUNKS      # which of them does the gate not take?
                if len(chunks) > 1:
                    continue
                log.warning("%s: a chunk of its output is not sent: %s", self.job, flaw)
            with self.changed:
                self.size -= sum(len(self.waiting.popleft()[1]) for _ in chunks)
                self.sending = 0
                self.changed.notify_all()

    def _choose(self) -> list[msgspec.Raw]:
        chosen, size = list[msgspec.Raw](), 0
        for stream, chunk in self.waiting:
            if stream != self.waiting[0][0]:
                break
            if chosen and (size + len(chunk) > MOST_CALL_BYTES or len(chosen) == self.most):
                break
            chosen.append(msgspec.Raw(chunk))
            size += len(chunk)
        return chosen

    def _insist(self, chunks: list[msgspec.Raw], stream: str) -> None:
        """Append chunks until the gate has answered; a repetition appends nothing twice."""
        failures = 0
        while not self.job.lost.is_set():
            try:
                reply = self.recorder.open().call("append_output", **self.recorder.me, **self.job.under, chunks=chunks,
                                                  position=self.position,
                                                  stream=None if stream == "output" else stream)
                self.position = reply["chunks"]
                return
            except http.Unreachable:
                pause = 0.0
            except http.Refusal as refusal:
                if refusal.code == GONE:
                    return self.job.lose(str(refusal.more.get("reason", "unknown")))
                if not is_temporary(refusal):
                    raise
                pause = refusal.retry_after or 0.0
            failures += 1
            self.job.lost.wait(max(pause, http.pause_after(failures, PAUSE_SECONDS)))


def clean_text(text: str, most: int | None = None) -> str:
    """Return a text, cut to a length, without NUL and halves of surrogate pairs, which no gate stores."""
    return text[:most].encode(errors="replace").decode().replace("\0", "\ufffd")


def encode_storable(value: Any) -> bytes:
    """Encode JSON without them."""
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=dump_model)
    try:
        text = encode_finite(plain, "chunk")
    except UnicodeEncodeError:
        text = json.dumps(plain, allow_nan=False).encode()
    return ESCAPE.sub(lambda escape: rb"\ufffd" if len(escape[1]) == LONE else escape[0], text)


def to_part(value: Any) -> dict[str, Any]:
    """Return a value as a part of a message or an artifact of A2A."""
    if isinstance(value, dict) and sum(name in value for name in ("text", "raw", "url", "data")) == 1:
        return value
    return {"text": value} if isinstance(value, str) else {"data": value}


def stream_plain(printer: Printer, chunks: Any) -> Iterator[Any]:
    """Append each chunk, and yield it."""
    for chunk in chunks:
        printer.append(chunk)
        yield chunk


async def stream_async(printer: Printer, chunks: Any) -> AsyncIterator[Any]:
    """Append each chunk, and yield it."""
    async for chunk in chunks:
        printer.append(chunk)
        yield chunk
