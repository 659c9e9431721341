"""A base backup and its log bring a gate back as it was at a moment, by the commands of docs/recovery.md."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from asyncgate.conformance.harness import Gate
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import Cluster, connected, find_programs
from tests.backends.test_postgres_faults import opened, until
from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.anyio
DATABASE = "postgresql://asyncgate_app@db/gate"
MOMENT = "2026-11-23 09:00:00+00"
ALL_ARCHIVED = """
SELECT last_archived_wal IS NOT NULL
       AND NOT EXISTS (SELECT FROM pg_ls_archive_statusdir() WHERE name LIKE '%.ready')
FROM pg_stat_archiver"""


def read_page(part: str) -> str:
    """Return the commands, or settings, that the page has for one step."""
    [block] = blocks("sh", "ini", mark=f"moment:{part}")
    return block.text


def place(text: str, **places: object) -> str:
    """Put the places of a test where the page has its own."""
    for name, path in {"backup": "/backup", "restored": "/var/lib/postgresql/restored",
                       "old": "/var/lib/postgresql/old", "server": "postgresql://postgres@db"}.items():
        text = text.replace(path, str(places[name])) if name in places else text
    return text


def run_commands(server: Cluster, script: str) -> None:
    """Run commands as the server's user, who has its programs on the path."""
    around = {**os.environ, "PATH": f"{server.programs.bin}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-euc", script], cwd=server.folder, env=around, text=True, capture_output=True,
                         check=False, **server.user)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture
def source() -> Iterator[Cluster]:
    """A server that archives its log, with a gate's database."""
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster(durable=True) as running:
        for name in ("pg_basebackup", "pg_verifybackup", "psql"):
            if not (running.programs.bin / name).exists():
                pytest.skip(f"this Postgres has no {name}")
        run_commands(running, "mkdir -p backup/wal")
        with (running.data / "postgresql.conf").open("a") as settings:
            settings.write(place(read_page("settings"), backup=running.folder / "backup"))
        running.restart()
        asyncio.run(running.migrated_database("gate"))
        yield running


async def back_up(source: Cluster, gate: Gate) -> list[str]:
    """Make the base backup while the gate works; return the tasks that were created meanwhile."""
    commands = place(read_page("backup"), backup=source.folder / "backup", server=source.superuser)
    backup = asyncio.create_task(asyncio.to_thread(run_commands, source, commands))
    created: list[str] = []
    while not backup.done() or len(created) < 10:
        created += [await create_later(gate), (await gate.finished()).task_id]
    await backup
    return created


async def create_later(gate: Gate) -> str:
    """Create a task that nobody may claim yet."""
    return await gate.create(delay_seconds=3600)


class Restored(Cluster):
    """A server made of the base backup of another one, and of its log."""

    def __init__(self, source: Cluster, moment: str | None, with_rest: bool = False) -> None:
        super().__init__(durable=True)
        script = read_page("restore") + (read_page("rest") if with_rest else "")
        if moment is None:
            script = re.sub(r"^recovery_target_time.*\n", "", script, flags=re.M)
        self.commands = place(script, backup=source.folder / "backup", restored=self.data, old=source.data)
        assert moment is None or MOMENT in script
        self.commands = self.commands.replace(MOMENT, moment or MOMENT)

    def _initialize(self) -> None:
        if self.user:
            os.chown(self.folder, self.user["user"], self.user["group"])
        run_commands(self, self.commands)


def verify_database(server: Cluster) -> None:
    """Wait and verify as the page says; the server runs already, on a port of its own."""
    start, wait, verify = read_page("start").splitlines()
    assert start.startswith("pg_ctl ")
    run_commands(server, place(wait, server=server.superuser))
    assert DATABASE in verify
    command = verify.replace(DATABASE, server.url("gate")).split()
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@asynccontextmanager
async def restored(source: Cluster, moment: str | None, with_rest: bool = False) -> AsyncIterator[Gate]:
    """Start the new server, verify its database with the command of the page, and open a gate on it."""
    with Restored(source, moment, with_rest) as running:
        await asyncio.to_thread(verify_database, running)
        async with opened(running.url("gate")) as gate:
            yield gate


async def test_a_gate_is_back_as_it_was_at_a_moment(source: Cluster) -> None:
    async with opened(source.url("gate")) as gate:
        await back_up(source, gate)
        lately = [await create_later(gate), (await gate.finished()).task_id, (await gate.leased()).task_id]
        async with connected(source.admin_url()) as db:
            moment = await db.fetchval("SELECT clock_timestamp()::text")
        then = await gate.everything()
        later = [await create_later(gate), (await gate.finished()).task_id]
        await gate.as_agent().cancel_task(task_id=lately[0])
    source.stop()

    async with restored(source, moment) as gate:
        now = await gate.everything()
        tasks = {task.task_id for task in now["Task"]}
        assert tasks >= {*lately}
        assert not tasks & {*later}
        assert now == then
        await gate.finished()


@pytest.mark.parametrize("disk", ["can be read", "is gone"])
async def test_a_server_that_dies_comes_back_but_for_what_is_nowhere_else(source: Cluster, disk: str) -> None:
    async with opened(source.url("gate")) as gate:
        created = await back_up(source, gate)
        async with connected(source.admin_url()) as db:
            await db.execute("SELECT pg_switch_wal()")
            archived = len(created)
            created += [await create_later(gate) for _ in range(20)]
            await until(lambda: db.fetchval(ALL_ARCHIVED))
    source.stop("immediate")

    async with restored(source, None, with_rest=disk == "can be read") as gate:
        tasks = {task.task_id for task in (await gate.everything())["Task"]}
    kept = [task_id in tasks for task_id in created]
    assert kept == sorted(kept, reverse=True), "a hole: an older task is lost, and a newer one is not"
    assert all(kept[:archived])
    assert all(kept) or disk == "is gone"
