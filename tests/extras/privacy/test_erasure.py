"""Erasure over files: no byte is left, whatever interrupts it, and nothing else takes its ways."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from msgspec.structs import asdict, replace

from asyncgate import Needs, Work
from asyncgate.backends.sqlite import Sqlite
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.load import KEY, GateServer, serving
from asyncgate.conformance.postgres_server import connected
from asyncgate.conformance.test_seals import Only
from asyncgate.conformance.verify import verify
from asyncgate.conformance.verify_erasures import read_all
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.parts.identity.signing import generate_pem, read_signing_keys
from asyncgate.parts.model.cards import CARDS, PERSONAL, list_fields
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.database import Around, FileBackend
from asyncgate.parts.model.erased import place_of_row, write_note
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.settings import Jwt, SecuritySettings
from asyncgate.parts.model.stored import Archived, Audit, Entry, Erased, Erasure, Event
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.seals import receipt_digest
from tests.extras.privacy.conftest import HOME, Opened
from tests.extras.privacy.marking import ADA, DAY, MARKED, Marks, archive_work, keep_books, leave_marks, own_task
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
AWAY = "00000000-0000-4000-8000-00000000000b"
NEIGHBOUR = "00000000-0000-4000-8000-00000000000c"


async def erase(gate: Gate, **more: Any) -> Any:
    return await gate.as_admin().erase_principal(principal_kind="agent", principal_id=ADA, confirm=ADA, **more)


async def problems_of(gate: Gate, folder: Path) -> list[str]:
    return [*(await verify(Only(gate))).problems, *(await verify_ledger(Only(gate), directory=str(folder))).problems]


async def rewrite(gate: Gate, url: str) -> None:
    """Do with the database what the plan says, so that no page keeps old bytes."""
    if isinstance(gate.backend, FileBackend):
        return await gate.backend.compact()
    admin = url.replace("asyncgate_app@", "postgres@")
    async with connected(admin) as db:
        # Samples of a table that is empty now would stay.
        for statement in ("VACUUM FULL", "DELETE FROM pg_statistic", "VACUUM FULL pg_statistic", "ANALYZE"):
            await until_nobody_reads_what_was(db)
            await db.execute(statement)


async def until_nobody_reads_what_was(db: Any) -> None:
    """Wait for transactions from before, such as autovacuum's: rows that they may see stay in the files.

    Also for those of other databases: a snapshot, and so that of VACUUM FULL itself, reaches back to the oldest of all.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    now = await db.fetchval("SELECT pg_current_xact_id()::text::bigint")
    while await db.fetchval("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint <= $1 OR EXISTS ("
                            "SELECT FROM pg_stat_activity WHERE datname = current_database() "
                            "AND pid <> pg_backend_pid() AND backend_xmin::text::bigint <= $1)", now):
        assert time.monotonic() < deadline, "somebody reads for ever"
        await asyncio.sleep(0.05)


async def take_samples(gate: Gate, url: str) -> None:
    """Let Postgres sample the tables, as it does by itself now and then: the samples hold names, too."""
    if not isinstance(gate.backend, FileBackend):
        async with connected(url.replace("asyncgate_app@", "postgres@")) as db:
            await db.execute("ANALYZE")


async def files_of(gate: Gate, url: str) -> list[Path]:
    """Return the files of the database."""
    if isinstance(gate.backend, FileBackend):
        path = Path(url.removeprefix("sqlite:///"))
        return sorted(path.parent.glob(f"{path.name}*"))
    async with connected(url.replace("asyncgate_app@", "postgres@")) as db:
        await db.execute("CHECKPOINT")      # what is in memory alone is in no file yet
        folder, number = await db.fetchval("SHOW data_directory"), await db.fetchval(
            "SELECT oid FROM pg_database WHERE datname = current_database()")
    return sorted((Path(folder) / "base" / str(number)).iterdir())


def segments_in(archive: Path) -> list[Path]:
    return sorted(archive.rglob("*.gz"))


async def marks_in(gate: Gate, url: str, archive: Path) -> set[bytes]:
    """Return the marks in the files of the database and of the archive."""
    texts = [path.read_bytes() for path in await files_of(gate, url) if path.is_file()]
    texts += [gzip.decompress(path.read_bytes()) for path in segments_in(archive)]
    return {mark for text in texts for mark in MARKED.findall(text)}


# Personal fields that cannot hold a mark, or of which the plan says that they stay.
WITHOUT_MARK = {
    *(f"Account.{name}" for name in ("name", "exempt_why", "stricter_why")),        # of a tenant, in the test below
    *(f"Erasure.{name}" for name in ("principal_id", "names", "key")),              # of an erasure itself
    *(f"OAuthClient.{name}" for name in ("document", "secret_hash")),   # stay
    *(f"Webhook.{name}" for name in ("secret_id", "previous_id")),     # stay
    *(f"Revocation.{name}" for name in ("subject", "revoked_by", "reason")), "WebhookDelivery.reason",  # stay
    "User.user_id", "User.accepted_as", "Consent.user_id", "Grant.user_id",     # hashes, which revocations keep
    # Keys of limits go with the lease, the waiting task or the window that they are for.
    *(f"{kind}.{name}" for kind in ("Hold", "RateUse") for name in ("limit_name", "limit_key")),
    *(f"Turn.{name}" for name in ("limits", "blocked_by", "blocked_key")), "Task.limits",
    "Cascade.by_id", "Cascade.reason",      # go as soon as the descendants have ended
    "Receipt.receipt_key", "Key.hash", "Task.held", "Task.handed"}      # hashes, and words of the gate


async def unmarked_fields(gate: Gate) -> set[str]:
    """Return the personal fields that have no mark in any row, but for kinds of principals."""
    names = set[str]()
    for kind in CARDS:
        texts = [asdict(row) for row in await read_all(gate.backend, HOME, kind)]
        names |= {f"{kind.__name__}.{name}" for name in list_fields(kind, *PERSONAL) if not name.endswith("kind")
                  and not any(MARKED.search(str(row[name]).encode()) for row in texts)}
    return names


async def export_of(gate: Gate) -> bytes:
    """Return everything that an export of the tenant has."""
    pages, cursor = [], None
    while True:
        page = await gate.as_admin().export_tenant(cursor=cursor)
        pages.append(encode_json(page))
        if (cursor := page.next_cursor) is None:
            return b"".join(pages)


async def test_no_byte_of_200_marks_is_left_in_the_files(opened: Opened, new_url: str, tmp_path: Path) -> None:
    gate, marks, folder = await opened(), Marks(), tmp_path / "archive"
    neighbour = await opened(tenant_id=NEIGHBOUR)
    await neighbour.finished()
    await leave_marks(gate, marks, HOME)
    await gate.as_admin().seal_receipts()
    await take_samples(gate, new_url)
    theirs = await neighbour.everything()
    assert len(await marks_in(gate, new_url, folder)) >= 200
    assert await unmarked_fields(gate) == WITHOUT_MARK

    report = await erase(gate, vacuum=True)
    await rewrite(gate, new_url)

    assert report.state == "erased"
    assert await marks_in(gate, new_url, folder) == set()
    assert MARKED.findall(await export_of(gate)) == []
    assert await neighbour.everything() == theirs
    assert await problems_of(gate, folder) == []
    async with gate.unchanged():
        assert (await erase(gate)).changes == []


async def test_a_call_that_finds_nothing_more_rewrites_the_file_all_the_same(opened: Opened, new_url: str) -> None:
    """Whoever forgot vacuum, had no room for it, or left the end to upkeep asks for it later."""
    if not isinstance((gate := await opened()).backend, Sqlite):
        pytest.skip("only a file is rewritten by an erasure")
    await leave_marks(gate, Marks(), HOME)
    await erase(gate)
    with contextlib.closing(sqlite3.connect(new_url.removeprefix("sqlite:///"), timeout=0)) as beside:
        beside.isolation_level = None
        assert count_free_pages(beside) > 0
        gate.backend.db.execute("PRAGMA busy_timeout = 0")
        beside.execute("BEGIN IMMEDIATE")

        with pytest.raises(DatabaseUnavailable, match="the rest is done, but the file was not rewritten"):
            await erase(gate, vacuum=True)
        beside.execute("ROLLBACK")
        report = await erase(gate, vacuum=True)

        assert (report.state, count_free_pages(beside)) == ("nothing", 0)


def count_free_pages(db: sqlite3.Connection) -> int:
    pages: int = db.execute("PRAGMA freelist_count").fetchone()[0]
    return pages


async def test_a_file_of_restored_receipts_goes_as_well(opened: Opened, new_url: str, tmp_path: Path) -> None:
    gate, marks, folder = await opened(), Marks(), tmp_path / "archive"
    await archive_work(gate, marks)
    [segment] = segments_in(folder)
    foreign = segment.with_name("01a20eec-0efc-7a04-b37f-eb2446866ef2-f6cc1676d08a5f63.jsonl.gz")
    text = gzip.decompress(segment.read_bytes())
    foreign.write_bytes(gzip.compress(text.replace(b'"receipt_id":"0', b'"receipt_id":"1')))
    for task_id in {row.task_id for row in await read_all(gate.backend, HOME, Archived)}:
        await gate.as_admin().restore_archive(task_id=task_id)
    assert segments_in(folder) == sorted([foreign, segment])

    report = await erase(gate)

    assert report.state == "erased"
    assert segments_in(folder) == [foreign], "the file of another database is not ours"
    assert await problems_of(gate, folder) == []


async def test_nothing_moves_to_the_archive_that_was_read_before_an_erasure(
        opened: Opened, new_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, marks, folder = await opened(), Marks(), tmp_path / "archive"
    await own_task(gate, marks, "completed")
    gate.skip(40 * DAY)
    replace_by_pointers = archive.replace_by_pointers

    async def erase_before(*given: Any) -> int | None:
        monkeypatch.setattr(archive, "replace_by_pointers", replace_by_pointers)
        assert (await erase(gate)).state == "erased"
        return await replace_by_pointers(*given)
    monkeypatch.setattr(archive, "replace_by_pointers", erase_before)

    first = await archive.archive_receipts(gate.engine, gate.tenant_id, 1000)
    assert (first.receipts, first.more) == (0, True)
    again = await archive.archive_receipts(gate.engine, gate.tenant_id, 1000)

    assert again.receipts > 0
    [segment] = segments_in(folder)
    assert MARKED.findall(gzip.decompress(segment.read_bytes())) == []
    assert await problems_of(gate, folder) == []


class Killed(Exception):
    """The process of the gate was killed."""


class Mortal(Around):
    """A backend whose process is killed behind its next commit."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.commits = 0

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Commit once, and die; what changes nothing is not a commit."""
        works: list[Work] = []

        def note(work: Work) -> None:
            decide(work)
            works.append(work)
        if self.commits:
            raise Killed
        await self.backend.transact(tenant_id, needs, note)
        work = works[-1]
        if work.kept or work.written or work.moved or work.erased or work.closed or work.audited or work.leased:
            self.commits += 1
            raise Killed


async def test_killed_behind_each_commit_it_goes_on_to_the_same_end(
        opened: Opened, new_url: str, tmp_path: Path) -> None:
    gate, marks, folder = await opened(tenant_id=AWAY), Marks(), tmp_path / "archive"
    await leave_marks(gate, marks, HOME)
    planned = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=ADA, plan=True)
    deaths = 0
    while True:
        mortal = await opened(wrap=Mortal, tenant_id=AWAY)
        try:
            report = await erase(mortal)
        except Exception:
            deaths += 1
            assert deaths < 300
            continue
        break

    assert deaths > 20
    assert report.changes == [] or report.state == "erased"
    rows = await gate.everything()
    [erasure] = await read_all(gate.backend, AWAY, Erasure)
    assert (erasure.key, erasure.names, erasure.step) == ("", "[]", "ended")
    assert [row.key for row in await read_all(gate.backend, HOME, Erasure)] == [""]
    assert len([row for row in rows["Receipt"] if row.from_id == erasure.principal_id]) > 10
    await rewrite(gate, new_url)
    assert await marks_in(gate, new_url, folder) == set()
    assert await problems_of(gate, folder) == []
    assert planned.state == "planned"


# Nobody else takes these ways.


async def test_a_receipt_that_only_says_that_it_was_erased_is_found_out(opened: Opened, tmp_path: Path) -> None:
    """Who can write the database takes a receipt's content away, and leaves the digest that its seal has."""
    gate = await opened()
    await gate.finished()
    await gate.as_admin().seal_receipts()
    receipt = (await gate.everything())["Receipt"][0]
    note = write_note("00000000-0000-7000-8000-000000000000", receipt_digest(receipt).hex())
    forged = replace(receipt, body=note)

    class Forging(Around):
        async def page(self, tenant_id: str, query: Any) -> list[Any]:
            rows = await self.backend.page(tenant_id, query)
            return [forged if row == receipt else row for row in rows]

    problems = await problems_of(await opened(wrap=Forging), tmp_path)

    assert len([problem for problem in problems if "no erasure lists it" in problem]) == 1
    assert len([problem for problem in problems if "is not what was sealed" in problem]) == 1


CONTENT = '{{"erased":"{id}","sealed":"{digest}"}}'
# What somebody with the gate's own connection could try; {id} is an erasure of another principal that is under way.
FORGERIES = {
    "a body of one's own": ("body", '{{"erased":"{id}","sealed":"{digest}","x":1}}'),
    "another sender": ("from_id", "mallory"), "another recipient": ("to_id", "mallory"),
    "somebody else's receipt": ("body", CONTENT)}


async def refusal_of(gate: Gate, decide: Callable[[Work], None]) -> str:
    """Let a batch be refused by the database, and return what that says."""
    with pytest.raises(Exception, match=r"(?s).") as caught:
        await gate.backend.transact(HOME, Needs(), decide)
    return f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("state", ["none", "of another", "ended"])
async def test_nothing_else_may_change_a_receipt(opened: Opened, new_url: str, forgery: str, state: str) -> None:
    gate = await opened()
    await gate.finished()
    receipt = (await gate.everything())["Receipt"][0]
    id, digest = "00000000-0000-7000-8000-000000000001", receipt_digest(receipt).hex()
    ended = 1.0 if state == "ended" else None
    erasure = Erasure(id, HOME, "agent", "mallory" if state == "of another" else receipt.from_id, "[]", "", "rows",
                      "[]", "{}", 0.0, ended)
    name, value = FORGERIES[forgery]
    change = replace(receipt, **{"body": CONTENT.format(id=id, digest=digest), name: value.format(
        id=id, digest=digest)})
    if forgery == "somebody else's receipt" and state == "none":
        change = replace(change, from_id="erased-0", to_id="erased-0")

    def forge(work: Work) -> None:
        if state != "none":
            work.keep_record(erasure)
        work.keep_record(Erased("receipts", receipt.receipt_id, id, digest, ""))
        work.erase_row(change)

    async with gate.unchanged():
        assert "append-only" in (refusal := await refusal_of(gate, forge)) or "may not be erased" in refusal


async def test_an_erasure_that_has_ended_never_opens_again(opened: Opened) -> None:
    gate, marks = await opened(), Marks()
    await own_task(gate, marks, "canceled")
    await erase(gate)
    [erasure] = await read_all(gate.backend, HOME, Erasure)

    refusal = await refusal_of(gate, lambda work: work.keep_record(replace(erasure, ended_at=None)))

    assert "an erasure that has ended stays as it is" in refusal
    assert await read_all(gate.backend, HOME, Erasure) == [erasure]


async def test_the_proof_is_signed_and_the_receipt_of_the_erasure_is_in_the_inbox_of_who_asked(
        new_url: str, opened: Opened, tmp_path: Path) -> None:
    from joserfc import jwt
    from joserfc.jwk import RSAKey

    gate, marks = await opened(), Marks()
    await own_task(gate, marks, "completed")
    path = tmp_path / "signing.pem"
    path.write_text(generate_pem(2048))
    path.chmod(0o600)
    signing = gate.beside(security=SecuritySettings(jwt=Jwt(private_key_path=str(path))),
                          default_tenant_id=HOME)

    report = await erase(signing)

    [key] = read_signing_keys(str(path))
    token = jwt.decode(report.proof, key.public, algorithms=["RS256"])
    assert token.header["typ"] == "erasure+jwt"
    assert token.claims["digest"] == report.digest
    assert token.claims["counts"]["tasks"] == {"deleted": 1}
    keys = tmp_path / "keys.json"
    keys.write_bytes(encode_json({"keys": [key.public.as_dict(private=False)]}))
    other = tmp_path / "other.json"
    unlike = RSAKey.generate_key(2048, {"kid": str(key.key.kid)})
    other.write_bytes(encode_json({"keys": [unlike.as_dict(private=False)]}))
    assert isinstance(report.proof, str)
    shown = CliRunner().invoke(main, ["keys", "signing", "verify", report.proof, "--jwks", str(keys)])
    assert json.loads(shown.output) == {"type": "erasure+jwt", **token.claims}
    assert CliRunner().invoke(main, ["keys", "signing", "verify", report.proof, "--jwks", str(other)]).exit_code == 1
    [told] = [anomaly for anomaly in await gate.anomalies() if anomaly["kind"] == "data_erased"]
    assert told["details"]["erasure_id"] == report.erasure_id
    assert (await gate.as_admin().list_erasures()).erasures[0].proof == report.proof


async def test_a_tenant_goes_with_its_people_and_the_operators_own_stay(
        opened: Opened, new_url: str, tmp_path: Path) -> None:
    gate, marks, folder = await opened(tenant_id=AWAY), Marks(), tmp_path / "archive"
    operator = await opened()
    await leave_marks(gate, marks, HOME)
    await operator.finished()
    await operator.as_admin().create_tenant(tenant=AWAY, name=f"Acme {marks}")
    await operator.as_admin().set_limits(tenant=AWAY, exempt_until="2100-01-01T00:00:00Z", reason=str(marks))
    theirs = await operator.everything()

    report = await operator.as_admin().erase_tenant(tenant=AWAY, confirm=AWAY, vacuum=True)
    await rewrite(gate, new_url)

    assert report.state == "erased"
    assert await marks_in(gate, new_url, folder) == set()
    assert await problems_of(gate, folder) == []
    rows = await gate.everything()
    assert (rows["Task"], rows["Key"], rows["Schedule"], rows["Obligation"]) == ([], [], [], [])
    assert rows["Account"][0].suspended_at is not None
    stays = {name: rows for name, rows in theirs.items() if name not in ("Receipt", "Audit", "AuditHead")}
    assert {name: rows for name, rows in (await operator.everything()).items() if name in stays} == stays


WORDS: dict[Any, tuple[str, str]] = {
    Audit: ("body", '{"erased":"00000000-0000-7000-8000-000000000001","reason":"made up"}'),
    Event: ("payload", '{"made":"up"}'), Entry: ("content", '{"made":"up"}')}


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.__name__)
async def test_an_open_erasure_lets_nobody_put_other_words_in(opened: Opened, kind: type[Any]) -> None:
    gate = await opened()
    offer = await gate.leased()
    await gate.as_worker().start_task(**under(offer))
    await gate.as_admin().pause_work(type="nothing", reason="because")
    await gate.backend.transact(HOME, Needs(), lambda work: keep_books(work, Marks()))
    [row, *_] = await read_all(gate.backend, HOME, kind)
    id = "00000000-0000-7000-8000-000000000001"
    name, words = WORDS[kind]

    def forge(work: Work) -> None:
        work.keep_record(Erasure(id, HOME, "", "", "[]", "", "rows", "[]", "{}", 0.0))
        if kind is not Event:
            work.keep_record(Erased(*place_of_row(row), id, "", ""))
        work.erase_row(replace(row, **{name: words}))

    refusal = await refusal_of(gate, forge)

    assert "append-only" in refusal or "may not be erased" in refusal
    assert row in await read_all(gate.backend, HOME, kind)


# A real process, killed by a signal.


DIES = """
import os, signal
from asyncgate.extras.privacy import erasing
from asyncgate.extras.privacy.erasing import Eraser
erasing.UNTIL_NOTED_SECONDS = -1.0      # the dead count as living for minutes
step, calls = Eraser.{step}, []
async def die(self, *given, **more):
    calls.append(given)
    if len(calls) == {n}:
        os.kill(os.getpid(), signal.SIGKILL)
    return await step(self, *given, **more)
Eraser.{step} = die
"""


async def erase_over_rest(server: GateServer) -> dict[str, Any] | None:
    """Ask a server for an erasure; None if it died."""
    client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=None)
    async with client as http:
        try:
            answer = await http.post("/v1/principals/erase", headers={"authorization": f"Bearer {KEY}"}, json={
                "principal_kind": "agent", "principal_id": ADA, "confirm": ADA})
        except httpx2.TransportError:
            return None
    erasure: dict[str, Any] = answer.json()
    return erasure


async def test_a_process_killed_while_it_erases_leaves_an_erasure_that_the_next_one_ends(
        opened: Opened, new_url: str, tmp_path: Path) -> None:
    gate, folder = await opened(), tmp_path / "archive"
    gate.skip(-41 * DAY)        # so that what goes to the archive is as old as it must be
    await leave_marks(gate, Marks(), HOME)
    await gate.as_admin().seal_receipts()
    await gate.backend.close()
    sets: dict[str, Any] = {"default_tenant_id": HOME, "archive.directory": folder}

    for step, n in (("end_work", 1), ("delete_files", 1), ("erase", 4), ("close", 1)):
        async with serving(new_url, first=DIES.format(step=step, n=n), **sets) as server:
            assert await erase_over_rest(server) is None
            assert await server.ended() == -signal.SIGKILL
    again = await opened(again=True)
    report = await erase(again)

    assert report.state == "erased"
    await rewrite(again, new_url)
    assert await marks_in(again, new_url, folder) == set()
    assert await problems_of(again, folder) == []
    [erasure] = await read_all(again.backend, HOME, Erasure)
    assert (erasure.key, erasure.names, erasure.step) == ("", "[]", "ended")

