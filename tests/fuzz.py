# may run in a fork of a process that has imported asyncgate
"""Mutate inputs and see what breaks: native parsers, the gate's own decoders, requests, the arguments of commands.

    python tests/fuzz.py --seconds 3600             all targets in turn, until the time is over
    python tests/fuzz.py --target request --rounds 100000 --seed 7

Each target runs in a process of its own that writes down each input before it is tried: if the process dies of it, the
input is there.  What a target may raise, it says itself; everything else is a finding, printed so that it can be tried
again.  Exit status 1: something was found.  `tests/faces/test_fuzz.py` runs a few rounds of each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import click  # noqa: E402
import msgspec  # noqa: E402

from asyncgate.backends import open_backend  # noqa: E402
from asyncgate.parts.app import Gate  # noqa: E402
from asyncgate.parts.model.errors import GateError  # noqa: E402
from asyncgate.parts.model.settings import Settings  # noqa: E402
from asyncgate.parts.model.wire import CreateTask  # noqa: E402

Target = tuple[list[bytes], Callable[[bytes], Any]]
TOKEN = "a-token-for-the-fuzzer-alone"
# What has broken parsers before.
WORDS = [b"\0", b"\\u0000", b"\\ud800", b"%2f", b"%00", b"%", b"\r\n", b"\r\n\r\n", b"[" * 70, b"{" * 1100, b'"', b"\\",
         b"null", b"true", b"-0", b"1e400", b"9" * 30, b"9" * 5000, b"NaN", b"\xff\xfe", b"\xef\xbb\xbf", "é".encode(),
         "\u202e".encode(), b"..", b"/", b"?", b"#", b"&a=b", b"chunked", b"content-length: 9\r\n", b"0\r\n\r\n", b"-1",
         b"2099-01-01T00:00:00Z", b"0000-00-00T00:00:00Z", b"*/0", b"@", b"&x *x", b"!!python/object:x", b"<<: *a"]


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Change a seed in a few places."""
    text = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at, size = chance.randrange(len(text) + 1), chance.choice((1, 1, 2, 8, 32))
        what = chance.randrange(6)
        if what == 0 and text:
            text[at % len(text)] ^= 1 << chance.randrange(8)
        elif what == 1:
            text[at:at] = chance.choice(WORDS)
        elif what == 2:
            del text[at:at + size]
        elif what == 3:
            text[at:at] = text[at:at + size] * chance.choice((1, 2, 50))
        elif what == 4:
            other = chance.choice(seeds)
            text[at:at + size] = other[chance.randrange(len(other) + 1):][:size * 4]
        else:
            text[at:at + size] = bytes(chance.randrange(256) for _ in range(size))
    return bytes(text[:200_000])


def may_raise(run: Callable[[bytes], Any], *allowed: type[Exception]) -> Callable[[bytes], None]:
    """Let a target raise what it is meant to raise."""
    def tried(text: bytes) -> None:
        with contextlib.suppress(*allowed):
            run(text)
    return tried


# Decoders.


def keys() -> Target:
    """What looks like an issued key."""
    from asyncgate.parts.identity.keys_stored import generate, parse
    return [generate().encode() for _ in range(3)], lambda text: parse(text.decode("latin-1"))


def cursors() -> Target:
    """What looks like a cursor, at an engine over memory."""
    gate = asyncio.run(opened())
    caller = gate.engine.make_own_caller(gate.settings.default_tenant_id)
    good = [gate.engine.seal_cursor(caller, place, "list").encode() for place in ("", "x" * 40, "é 1")]
    return good, may_raise(lambda text: gate.engine.open_cursor(caller, text.decode("latin-1"), "list"), GateError)


def settings() -> Target:
    """A file of settings."""
    from asyncgate.parts.model.settings import SettingsError, list_settings, load_settings
    some = "\n".join(f"{setting.name}: {json.dumps(setting.default)}" for setting in list(list_settings(Settings))[:60])
    path = Path(tempfile.mkdtemp()) / "config.yaml"

    def load(text: bytes) -> None:
        path.write_bytes(text)
        load_settings(str(path), environ={})
    return [some.encode(), b"asyncgate:\n  port: 8080\n  memorygate: {url: 'http://x', parallel: 3}\n"], may_raise(
        load, SettingsError)


def schedules() -> Target:
    """Plans of a scheduler, with their cron expressions."""
    from asyncgate.extras.scheduler.plan import InvalidOrder, read_plan
    plan = {"name": "n", "mode": "cron", "cron_expr": "*/5 3 * * 1-5", "timezone": "Europe/Berlin",
            "task_template": {"type": "t", "payload_template": {"at": "{{run_at}}"}}}
    every = {"name": "n", "mode": "interval", "interval_seconds": 60, "task_template": {"type": "t"}}
    return [json.dumps(schedule).encode() for schedule in (plan, every)], may_raise(
        lambda text: read_plan(msgspec.json.decode(text), time.time()), InvalidOrder, msgspec.DecodeError,
        UnicodeDecodeError, RecursionError)


def files() -> Target:
    """A file of receipts, packed or not."""
    import gzip

    from asyncgate.parts.receipts.files import Header, SealedReading, pack_receipts
    whole = pack_receipts(Header("asyncgate-receipts", "t"), [])
    path = Path(tempfile.mkdtemp()) / "receipts"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        for _ in SealedReading(str(path)).lines():
            pass
    return [whole, gzip.decompress(whole), gzip.decompress(whole) * 2], read


def ledgers() -> Target:
    """What a ledger answers."""
    from asyncgate.extras.ledger.sinks import Garbled, read_filed
    from asyncgate.extras.ledger.sinks.memorygate import decode_answers, decode_page, decode_with, read_receipts
    from asyncgate.extras.ledger.sinks.receiptgate import call_error
    receipt = {"receipt_id": "r", "receipt_type": "t", "created_at": "2026-11-22T07:00:00Z", "parents": ["p"],
               "from": {"kind": "agent", "id": "a"}, "to": {"kind": "agent", "id": "b"},
               "body": {"n": [1, {"x": None}]}}

    def answered(text: bytes) -> None:
        for decode in (lambda text: read_receipts(decode_page(text)), read_filed, decode_answers):
            may_raise(lambda text, decode=decode: decode_with(decode, text), Garbled)(text)  # type: ignore[misc]
        may_raise(lambda text: call_error(msgspec.json.decode(text)), msgspec.DecodeError, UnicodeDecodeError,
                  RecursionError)(text)
    pages: tuple[dict[str, Any], ...] = (
        {"receipts": [receipt, receipt], "next_cursor": None}, receipt, {"results": [{}]},
        {"code": "x", "message": "y"})
    return [json.dumps(page).encode() for page in pages], answered


def bodies() -> Target:
    """The screen of bodies: what it lets through has the depth and the encoding that it promises."""
    from asyncgate.parts.model.screening import BodyScreen, cut_slices

    def judge(text: bytes) -> None:
        screen = BodyScreen(100_000)
        for piece in cut_slices(text, 7):
            screen.look(piece)
        screen.end()
        text.decode()
        assert b"\\u0000" not in text.replace(b"\\\\", b"")
    return [json.dumps(CreateTask.example[0]).encode(), b'{"a": [[[]]], "b": "\\\\u0000 \\" [{"}'], may_raise(
        judge, GateError, UnicodeDecodeError)


def durations() -> Target:
    """Times as people write them."""
    from asyncgate.parts.model.durations import parse_duration, parse_seconds

    def read(text: bytes) -> None:
        for decode in (parse_duration, parse_seconds):
            may_raise(lambda text, decode=decode: decode(text.decode("utf-8", "replace")), ValueError)(text)  # type: ignore[misc]
    return [b"90d", b"1.5h", b"2026-12-31", b"3600"], read


def commands() -> Target:
    """The arguments of commands, as far as they are read: nothing is carried out."""
    from asyncgate.commands.main import main
    from asyncgate.parts.operations import OPERATIONS
    names = [name.replace("_", "-") for name in OPERATIONS] + ["config", "keys", "verify", "worker", "scheduler"]
    context = click.Context(main)

    def parse(text: bytes) -> None:
        words = [word.decode("utf-8", "replace") for word in text.split(b" ")]
        name = words[0] if words[0] in names else names[len(text) % len(names)]
        command = main.get_command(context, name)
        if command is not None:
            command.make_context(name, words[1:], resilient_parsing=False)
    seeds = [f"{name} --task-id x --limit 5 --payload {{}} --set a=b --since 90d -- x".encode() for name in names]
    return seeds, may_raise(parse, click.ClickException, click.exceptions.Exit)


# Requests.


RUNNING = contextlib.AsyncExitStack()       # what is not kept somewhere ends at once


async def opened() -> Gate:
    """A gate over memory that runs until the process ends."""
    gate = Gate(Settings(api_key=TOKEN, body_timeout_seconds=5.0, max_wait_seconds=0.01), await open_backend("memory:"))
    await RUNNING.enter_async_context(gate.app.router.lifespan_context(gate.app))
    return gate


def requests() -> Target:
    """Bytes on a connection: the parser of HTTP, the routes, the operations and MCP; nothing answers with a 5xx."""
    from asyncgate.parts.faces.server import make_config
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    gate = loop.run_until_complete(opened())
    config = make_config(gate, gate.settings)
    if not config.loaded:
        config.load()
    from uvicorn.server import ServerState
    state = ServerState()

    async def talk(text: bytes) -> None:
        wire = Wire()
        protocol: Any = config.http_protocol_class(config, state, {}, loop)     # type: ignore[call-arg]
        protocol.connection_made(wire)
        for start in range(0, len(text), 1000):
            if not wire.closed:
                protocol.data_received(text[start:start + 1000])
        for _ in range(300):
            await asyncio.sleep(0)
            if not state.tasks:
                break
        protocol.connection_lost(None)
        for task in list(state.tasks):
            await asyncio.wait([task], timeout=5)
        answers = [line for line in bytes(wire.written).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        codes = {line.split(b" ")[1] for line in answers} - {b"505"}      # another version of HTTP
        assert not [code for code in codes if code.startswith(b"5")], answers
    return list(spoken()), lambda text: loop.run_until_complete(talk(text))


class Wire(asyncio.Transport):
    """A connection without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def set_protocol(self, protocol: Any) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def spoken() -> Iterator[bytes]:
    """Yield good requests of every operation, over REST and MCP."""
    from asyncgate.parts.operations import OPERATIONS
    head = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    for number, (name, op) in enumerate(OPERATIONS.items()):
        asked = op.takes.example[0]
        verb, path = op.rest[0]
        for field, value in asked.items():
            path = path.replace(f"{{{field}}}", str(value))
        body = json.dumps(asked).encode()
        call = {"jsonrpc": "2.0", "id": number, "method": "tools/call",
                "params": {"name": f"asyncgate.{name}", "arguments": asked}}
        for line, content in ((f"{verb} {path}", body), ("POST /mcp", json.dumps(call).encode())):
            yield f"{line} HTTP/1.1\r\n{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


TARGETS: dict[str, Callable[[], Target]] = {
    "keys": keys, "cursors": cursors, "settings": settings, "schedules": schedules, "files": files, "ledgers": ledgers,
    "bodies": bodies, "durations": durations, "commands": commands, "requests": requests}


# Running.


def attack(name: str, rounds: int, seed: int, last: str) -> int:
    """Try a target so often; return 1 at the first finding."""
    logging.disable(logging.CRITICAL)
    seeds, run = TARGETS[name]()
    for text in seeds:
        run(text)
    chance = random.Random(seed)      # the same input for the same number
    with open(last, "wb", buffering=0) as file:
        for number in range(rounds):
            text = mutated(chance, seeds)
            os.pwrite(file.fileno(), len(text).to_bytes(8, "big") + text, 0)
            try:
                run(text)
            except Exception as error:
                print(f"{name} --seed {seed}, round {number}: {text!r}"[:5000])
                traceback.print_exception(error)
                return 1
    return 0


def attacked(name: str, rounds: int, seed: int) -> str:
    """Run a target in a process of its own; return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        last = os.path.join(folder, "last")
        command = [sys.executable, __file__, "--target", name, "--rounds", str(rounds), "--seed", str(seed),
                   "--last", last]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            told = Path(last).read_bytes()
            size = int.from_bytes(told[:8], "big")
            return f"{name} --seed {seed}: died of signal {-done.returncode}\n{told[8:8 + size]!r}"
        return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    """Run the targets that are asked for, in turn."""
    parser = argparse.ArgumentParser(description="Mutate inputs and see what breaks.")
    parser.add_argument("--target", choices=sorted(TARGETS))
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with further seeds for so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--last", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.last:
        return attack(asked.target, asked.rounds, asked.seed, asked.last)
    until, seed, status = time.monotonic() + asked.seconds, asked.seed, 0
    while True:
        for name in [asked.target] if asked.target else TARGETS:
            if told := attacked(name, asked.rounds, seed):
                print(told, flush=True)
                status = 1
        seed += 1
        if time.monotonic() >= until:
            return status


if __name__ == "__main__":
    sys.exit(main())
