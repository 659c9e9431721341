"""Two servers of Postgres that Patroni looks after, with etcd, as many operators run them: strictly synchronous."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from asyncgate.conformance.ledgers import PROCESS_SECONDS
from asyncgate.conformance.postgres_server import PostgresServer, choose_programs, free_port, open_temp
from tests.support.patience import poll

PROGRAMS = ("patroni", "etcd")
HERE = "127.0.0.1"
LOCAL = f"host all all {HERE}/32 trust", f"host replication all {HERE}/32 trust"
# `ttl` is the shortest that Patroni takes: so long nobody takes over from a leader whose Patroni has died, too.
SHARED = {"ttl": 20, "loop_wait": 1, "retry_timeout": 3, "synchronous_mode": True, "synchronous_mode_strict": True,
          "postgresql": {"use_pg_rewind": True, "parameters": {"fsync": "off", "max_connections": 100}}}


def find_missing() -> str:
    """Return which program is missing here; empty if none is."""
    return next((f"{name} is not installed" for name in PROGRAMS if shutil.which(name) is None), "")


class Node:
    """A Postgres server, and the Patroni that starts, promotes, demotes and rewinds it."""

    def __init__(self, name: str, folder: Path, etcd: int, programs: Path, user: dict[str, Any]) -> None:
        self.data, self.log, self.user = folder / name, folder / f"{name}.log", user
        self.port, self.api, self.config = free_port(), free_port(), folder / f"{name}.json"
        roles = {role: {"username": name, "password": "unused"} for role, name in {
            "superuser": "postgres", "replication": "replicator", "rewind": "postgres"}.items()}
        self.config.write_text(json.dumps({
            "scope": "gate", "name": name, "etcd3": {"host": f"{HERE}:{etcd}"},
            "restapi": {"listen": f"{HERE}:{self.api}", "connect_address": f"{HERE}:{self.api}"},
            "bootstrap": {"dcs": SHARED, "pg_hba": LOCAL,
                          "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}, "no-sync"]},
            "postgresql": {"listen": f"{HERE}:{self.port}", "connect_address": f"{HERE}:{self.port}",
                           "data_dir": str(self.data), "bin_dir": str(programs), "authentication": roles,
                           "pgpass": str(folder / f"{name}.pgpass"), "parameters": {"unix_socket_directories": ""}}}))

    def start(self) -> None:
        """Start Patroni, which starts its server."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(shutil.which("patroni")), str(self.config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.config.parent, env={"PATH": os.environ["PATH"], "LC_ALL": "C"}, start_new_session=True,
                **self.user)

    def read(self) -> dict[str, Any]:
        """Return what Patroni says of its server; empty if it says nothing."""
        try:
            with urllib.request.urlopen(f"http://{HERE}:{self.api}/patroni", timeout=PROCESS_SECONDS) as answer:
                told: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as answer:        # a server that is not ready has a status of its own
            told = json.load(answer)
        except OSError:
            told = {}
        return told

    def kill_server(self) -> None:
        """Let the server die as in a crash."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.data / "postmaster.pid").read_text().split("\n")[0]), signal.SIGQUIT)

    def kill(self) -> None:
        """Let Patroni and its server die, as with their machine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.kill_server()


class PatroniPair(PostgresServer):
    """Two nodes and their etcd; the superuser's URL names both."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="asyncgate-patroni-", dir=open_temp()))
        self.folder.chmod(0o777)        # the servers run as nobody where the tests run as root
        programs, user = choose_programs()
        client, peer = (f"http://{HERE}:{free_port()}" for _ in range(2))
        with (self.folder / "etcd.log").open("ab") as log:
            self.etcd = subprocess.Popen(
                ["etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", client,
                 "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"default={peer}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **user)
        self.nodes = [Node(name, self.folder, int(client.rpartition(":")[2]), programs.bin, user)
                      for name in ("one", "two")]
        for node in self.nodes:
            node.start()
        hosts = ",".join(f"{HERE}:{node.port}" for node in self.nodes)
        super().__init__(f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write")
        self.await_standby()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        self.etcd.kill()
        self.etcd.wait()
        poll(lambda: not any((node.data / "postmaster.pid").exists() for node in self.nodes))
        shutil.rmtree(self.folder)

    def find_leader(self) -> Node | None:
        """Return the node whose server takes writes, if Patroni knows one."""
        return next((node for node in self.nodes if node.read().get("role") in ("master", "primary")), None)

    def await_standby(self) -> Node:
        """Wait until each COMMIT of the leader waits for the other server; return the leader."""
        poll(lambda: any(node.read().get("sync_standby") for node in self.nodes))
        leader = poll(self.find_leader)
        assert isinstance(leader, Node)
        return leader

    def await_other_leader(self, old: Node) -> None:
        """Wait until the other server has taken over."""
        poll(lambda: self.find_leader() not in (None, old))
