"""Programs of this package start in a fork of a process that has imported it: imports are most of what a start costs.

It has served a gate of its own, too: the first session of MCP builds what the models of the SDK are checked with, and
takes a second, more than all else that a program of a test does.  `asyncgate torture` kills thousands of gates.

It takes the command `asyncgate` and scripts that begin with FORKED, and only where nothing could tell: with another
environment of the interpreter, another checkout in its folder, a terminal or more than three streams it starts as
everywhere.  Its parent is this process.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click

from asyncgate import main
from asyncgate.parts.model import ids

ROOT = Path(__file__).parent.parent
REQUEST_BYTES = 200_000     # below the least that a socket of Linux takes at once
PLAIN_START = {"executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "gid": None, "gids": None,
               "uid": None, "umask": -1, "close_fds": True, "restore_signals": True}
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OPENSSL_", "OTEL_", "TZ")
MODULE = ["-m", "asyncgate"]
FORKED = "# may run in a fork of a process that has imported asyncgate\n"
CODES = ("from asyncgate import main; main()", "import sys; from asyncgate import main; sys.exit(main())")
PR_SET_CHILD_SUBREAPER = 36
INHERITED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
IMPORTED = ("asyncgate.parts.app", "asyncgate.backends.memory",
            "asyncgate.backends.sqlite", "asyncgate.backends.postgres", "uvicorn.protocols.http.httptools_impl",
            "uvicorn.lifespan.on", "uvicorn.loops.auto", "uvloop", "httpx2", "httpcore2._sync.http11",
            "encodings.idna", "h11", "anyio.streams.tls", "rich.console")


class Unforkable(Exception):
    """There is no process to fork, or it has no room for the request."""


class Nursery:
    """The process that has imported the package; it ends with this one."""

    def __init__(self) -> None:
        self.ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = read_at_start(os.environ)
        start = (f"import {', '.join(IMPORTED)}\nfrom asyncgate.conformance.forks import run_nursery\n"
                 f"exec(run_nursery({its.fileno()}))")
        self.process = START_ANEW([sys.executable, "-c", start], cwd=ROOT, pass_fds=[its.fileno()],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        its.close()
        self.adopt = ctypes.CDLL(None, use_errno=True).prctl

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a program; return its process id, which is one of a child of this process."""
        message = json.dumps(request).encode()
        if len(message) > REQUEST_BYTES:
            raise Unforkable
        # Whoever starts it ends at once, and the nearest process that adopts becomes its parent.  For this moment only:
        # what else loses its parent belongs to nobody here.
        self.adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self.ours.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
            answer = self.ours.recv(20)
        except OSError:
            raise Unforkable from None
        finally:
            self.adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise Unforkable
        return int(answer)

    def close(self) -> None:
        """End the process, and what it has started."""
        self.ours.close()
        self.process.wait()


class ForkingPopen(subprocess.Popen):       # type: ignore[type-arg]
    """A Popen that forks what it can, on Linux."""

    nursery: Nursery | None = None
    lock = threading.Lock()

    @classmethod
    def close_nursery(cls) -> None:
        """End what the programs of this process have started from."""
        if cls.nursery is not None:
            cls.nursery.close()
            cls.nursery = None

    def _execute_child(self, *given: Any) -> None:
        asked = dict(zip(NAMES, given, strict=True))
        with self.lock:
            pid = self._fork(asked)
        if pid is None:
            START_ANEW._execute_child(self, *given)      # type: ignore[attr-defined]
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*(asked[name] for name in STREAMS))    # type: ignore[attr-defined]

    def _fork(self, asked: dict[str, Any]) -> int | None:
        environment = asked["env"] if asked["env"] is not None else os.environ
        ends = [at if at != -1 else number for number, at in enumerate(asked[name] for name in PROGRAM_ENDS)]
        command = [str(part) for part in asked["args"]] if isinstance(asked["args"], list | tuple) else []
        cwd = Path(asked["cwd"] or ".").absolute()
        if (sys.platform != "linux" or not is_forkable(command) or not is_plain_folder(cwd)
                or any(os.isatty(end) for end in ends)
                or any(asked[name] != value for name, value in PLAIN_START.items())
                or asked["process_group"] not in (-1, 0) or "COVERAGE_PROCESS_CONFIG" in environment):
            return None
        nursery = ForkingPopen.nursery = ForkingPopen.nursery or Nursery()
        if read_at_start(environment) != nursery.environment:
            return None
        with contextlib.suppress(Unforkable):
            return nursery.fork({"command": command, "environment": dict(environment), "cwd": str(cwd),
                                 "session": asked["start_new_session"], "group": asked["process_group"],
                                 "ignored": [number for number in INHERITED
                                             if signal.getsignal(number) is signal.SIG_IGN]}, ends)
        return None


START_ANEW = subprocess.Popen
NAMES = [*inspect.signature(START_ANEW._execute_child).parameters][1:]      # type: ignore[attr-defined]
STREAMS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PROGRAM_ENDS = ("p2cread", "c2pwrite", "errwrite")      # the program's


def is_forkable(command: list[str]) -> bool:
    """Whether this is the command `asyncgate`, or a script that may be forked, run by this interpreter."""
    return command[:1] == [sys.executable] and (command[1:3] == MODULE or is_script(command) or (
        command[1:2] == ["-c"] and "; ".join(command[2].strip().splitlines()) in CODES))


def is_script(command: list[str]) -> bool:
    """Whether this is a script that may be forked."""
    path = Path(*command[1:2])
    return path.suffix == ".py" and path.is_absolute() and path.is_file() and path.read_text().startswith(FORKED)


def is_plain_folder(folder: Path) -> bool:
    """Whether a program can start there and finds no other package of this name."""
    return os.access(folder, os.X_OK) and (
        folder == ROOT or not any((folder / name).exists() for name in ("asyncgate.py", "asyncgate")))


def read_at_start(environment: Any) -> dict[str, str]:
    """Return the variables that an interpreter reads when it starts, but for a path that leads here."""
    return {name: value for name, value in environment.items()
            if str(name).startswith(READ_AT_START) and (name != "PYTHONPATH" or value not in ("", str(ROOT)))}


def run_nursery(number: int) -> str:
    """Fork when the socket of this number asks for it; return what runs in a fork, or nothing at the end."""
    main.list_commands(click.Context(main))      # which imports the commands
    its, warm, programs = socket.socket(fileno=number), False, list[int]()
    while True:
        if not warm and not select.select([its], [], [], 0)[0]:     # the first program does not wait for it
            asyncio.run(warm_up())
            asyncio.set_event_loop_policy(None)     # a thread that had a loop does not get another one by itself
            gc.collect()
            gc.freeze()
            warm = True
        message, streams, _, _ = socket.recv_fds(its, REQUEST_BYTES, len(PROGRAM_ENDS))
        programs = drop_ended(programs)
        if not message:
            end_programs(programs)
            return ""
        request = json.loads(message)
        pid = fork_orphan()
        if pid == 0:
            its.close()
            for program in programs:
                os.close(program)
            become(streams, **request)
            return "from asyncgate.conformance.forks import run_program; run_program()"
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):      # a kernel without such files
            programs.append(os.pidfd_open(pid))
        its.send(str(pid).encode())


def fork_orphan() -> int:
    """Fork a process of which this one is not the parent; return its id, or 0 in it."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    pid = int(os.read(reading, 20))
    os.close(reading)
    os.waitpid(middle, 0)
    return pid


def drop_ended(programs: list[int]) -> list[int]:
    """Close the files of programs that have ended; return those of the others."""
    ended = select.select(programs, [], [], 0)[0]
    for program in ended:
        os.close(program)
    return [program for program in programs if program not in ended]


def end_programs(programs: list[int]) -> None:
    """Kill what runs on without whoever started it: a signal between a start and its note leaves such a program."""
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(program, signal.SIGKILL)


def run_program() -> None:
    """Run a program and end as an interpreter does, but do not take apart what was imported: that costs a start."""
    status: Any = None
    try:
        runpy.run_path(sys.argv[0], run_name="__main__") if is_script(sys.orig_argv) else main()
    except SystemExit as end:
        status = end.code
    threading._shutdown()       # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        if status is None or isinstance(status, int):
            os._exit((status or 0) & 0xFF)
    sys.exit(status)


async def warm_up() -> None:
    """Serve a session of each era of MCP, and forget it; what was imported and built for it stays."""
    import httpx2
    from mcp.client import Client
    from mcp.client.streamable_http import streamable_http_client

    from asyncgate.backends import open_backend
    from asyncgate.parts.app import Gate
    from asyncgate.parts.model.settings import Settings, load_settings

    load_settings(environ={})
    httpx2.Client().close()
    gate = Gate(Settings(api_key="of-nobody"), await open_backend("memory:"))
    async with gate.app.router.lifespan_context(gate.app):
        for mode in ("legacy", "auto"):
            async with (httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), trust_env=False,
                                           headers={"authorization": "Bearer of-nobody"}) as http,
                        Client(streamable_http_client("http://localhost/mcp", http_client=http), mode=mode) as client):
                tools = await client.list_tools()
                await client.call_tool(next(tool.name for tool in tools.tools if "list_tasks" in tool.name), {})


def become(streams: list[int], command: list[str], environment: dict[str, str], cwd: str, session: bool,
           group: int, ignored: list[int]) -> None:
    """Take on what a program is started with."""
    for signal_number in INHERITED:     # whether it is ignored may have changed since this process began
        begins = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
        signal.signal(signal_number, signal.SIG_IGN if signal_number in ignored else begins)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    ids._salts.clear()      # each fork would draw the same ones
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if session:
        os.setsid()
    elif group == 0:
        os.setpgid(0, 0)
    sys.orig_argv[:], sys.argv[:] = command, ["-c", *command[3:]]
    if command[1:3] == MODULE:
        script: Any = sys.modules["__main__"]
        script.__package__, sys.argv[0] = "", str(ROOT / "asyncgate.py")      # its usage calls it by these
    elif is_script(command):
        sys.argv[:], sys.path[0] = command[1:], str(Path(command[1]).parent)
    if environment.get("PYTHONPATH") == str(ROOT):
        sys.path.insert(1, str(ROOT))
