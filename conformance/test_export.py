"""Export: everything about a tenant or a principal, nothing of others, no secret; on every database."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import SCOPES, Needs, Work
from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored, stored_oauth
from asyncgate.parts.model.cards import CARDS, Form, list_columns
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import ArchiveSettings

pytest.importorskip("asyncgate.extras.privacy", reason="what it tries is an extra, and none is installed")
from asyncgate.extras.privacy import wire_privacy
from asyncgate.extras.privacy.export import PAGE_BYTES
from asyncgate.extras.privacy.rows import TABLE_OF_KIND, list_proofs
from asyncgate.extras.privacy.subjects import may_name

pytestmark = pytest.mark.anyio
# Rows of these come from what a gate does, because a database or a rule checks them.
MADE = {stored.Archived, stored.AuditHead, stored.Seal, stored.SealHead, stored.Usage}
Exported = dict[str, list[dict[str, Any]]]


@pytest.fixture
def gate(make_gate: Callable[..., harness.Gate], tmp_path: Path) -> harness.Gate:
    """Return the gate of the default tenant, with an archive."""
    made = make_gate()
    return made.beside(default_tenant_id=made.tenant_id, archive=ArchiveSettings(directory=str(tmp_path / "archive")))


async def nothing(page: wire_privacy.ExportPage) -> None:
    """Let nothing happen between two pages."""


async def export(view: harness.View, operation: str = "export_tenant",
                 between: Callable[[wire_privacy.ExportPage], Awaitable[None]] = nothing, **ask: Any) -> tuple[Exported,
                                                                                                               bytes]:
    """Export everything; return the rows by kind, and all text that came, with what the cursors hold."""
    tables: Exported = {}
    text, cursor = b"", None
    while True:
        page = await getattr(view, operation)(cursor=cursor, **ask)
        rows = [bytes(row) for row in page.rows]
        assert page.left_out == list_proofs(TABLE_OF_KIND[page.kind])
        assert b"\n" not in b"".join(rows)
        assert page.is_first or page.kind in tables
        tables[page.kind] = [*([] if page.is_first else tables[page.kind]), *map(msgspec.json.decode, rows)]
        text += b"\n".join(rows)
        if (cursor := page.next_cursor) is None:
            assert list(tables) == page.kinds
            return tables, text
        text += base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        await between(page)


def mark_of(mark: str, table: type[Struct], field: str) -> str:
    """Return the text that is planted into a field; fields that join tables have the same one in all."""
    return f"{mark} {field}" if field in ("user_id", "client_id") else f"{mark} {table.__name__}.{field}"


def make_row(table: type[Struct], mark: str, tenant: str, now: float) -> Struct:
    """Make a row with a marker in each text; a row of the authorization server is for the tenant."""
    def fill(name: str, type: Any) -> Any:
        kinds = get_args(type) if get_origin(type) is not Literal else ()
        literal = type if get_origin(type) is Literal else next((k for k in kinds if get_origin(k) is Literal), None)
        if name == "tenant":
            return tenant
        if (table, name) == (stored_oauth.Revocation, "subject"):
            return f"{tenant} {mark}"       # of a token
        if literal is not None:
            return get_args(literal)[0]
        for kind, value in ((bool, True), (int, 7), (float, now)):
            if kind in (type, *kinds):
                return value
        return f'["{mark_of(mark, table, name)}"]' if name in nested else mark_of(mark, table, name)
    nested = [column.name for column in list_columns(table) if column.form is Form.JSON]
    return table(**{name: fill(name, hint) for name, hint in get_type_hints(table).items()})


async def plant(gate: harness.Gate, mark: str, tenant: str, tables: set[type[Struct]]) -> list[Struct]:
    """Store a row of each table, as they are for a tenant."""
    past = round(gate.now()) - 1        # an erasure since an export began would end it
    rows = [make_row(table, mark, tenant, past) for table in sorted(tables, key=lambda kind: kind.__name__)]

    def keep(work: Work) -> None:
        for row in rows:
            work.keep_record(row)
    await gate.backend.transact(gate.tenant_id, Needs(), keep)
    return rows


async def let_all_happen(gate: harness.Gate, mark: str) -> None:
    """Let a gate store a row of each kind that only it may store."""
    await gate.finished(payload={"text": mark})
    await gate.as_admin().seal_receipts()
    gate.skip(31 * DAY_SECONDS)
    assert (await gate.as_admin().run_archive()).receipts
    assert await gate.backend.page(gate.tenant_id, queries.Rows(stored.Archived))
    offer = await gate.leased(payload=mark)
    await gate.as_worker().report_progress(**harness.under(offer), progress=mark)
    await gate.create(type="delayed", delay_seconds=3600)
    shown = await gate.as_admin().preview_bulk(action="prioritize", priority=5, type="delayed")     # writes an event
    await gate.as_admin().run_bulk(confirmation=shown.confirmation)


async def fill(gate: harness.Gate, mark: str, *, directory: harness.Gate | None = None) -> list[Struct]:
    """Store rows of all kinds, with a marker in each text; return those that were made up."""
    await let_all_happen(gate, mark)
    made_up = {*stored.RECORDS} - MADE
    of_operator = {kind for kind in made_up if CARDS[kind].of_operator}
    return [*await plant(gate, mark, gate.tenant_id, made_up - of_operator),
            *await plant(directory or gate, mark, gate.tenant_id, of_operator)]


async def test_every_field_of_every_kind_is_exported_and_no_proof(gate: harness.Gate) -> None:
    planted = await fill(gate, "ours")

    tables, text = await export(gate.as_admin())

    assert {*tables} == {*stored.TABLES.values()}
    for kind, rows in tables.items():
        shown = [name for name in TABLE_OF_KIND[kind].__struct_fields__ if name not in list_proofs(TABLE_OF_KIND[kind])]
        assert rows or kind == "usage", kind        # usage is kept where limits are enforced
        assert all(list(row) == [*shown, *["receipt"] * (kind == "archived")] for row in rows), kind
    for row in planted:
        for name, value in zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True):
            if isinstance(value, str) and value.strip('[]"').startswith("ours"):
                mark = value.strip('[]"').encode()
                assert (mark in text) is (name not in list_proofs(type(row))), (type(row), name)
    assert all(row["receipt"]["body"] for row in tables["archived"])


async def test_an_export_has_nothing_of_another_tenant(gate: harness.Gate) -> None:
    there = harness.Gate(gate.engine, gate.stranger().tenant_id)
    await fill(gate, "ours")
    await fill(there, "theirs", directory=gate)

    _, ours = await export(gate.as_admin())
    _, theirs = await export(there.as_admin())

    assert (b"ours" in ours, b"theirs" in ours) == (True, False)
    assert (b"theirs" in theirs, b"ours" in theirs) == (True, False)
    assert (await export(gate.as_admin(), tenant=there.tenant_id))[0]["oauth_users"] != []     # by the operator
    with harness.refused("tenant_not_found"):
        await there.as_admin().export_tenant(tenant=gate.tenant_id)
    with harness.refused("tenant_not_found"):
        await gate.as_admin().export_tenant(tenant="00000000-0000-4000-8000-00000000dead")


async def test_pages_of_any_size_have_the_same_rows(gate: harness.Gate) -> None:
    await fill(gate, "ours")

    whole, _ = await export(gate.as_admin())
    by_three, _ = await export(gate.as_admin(), limit=3)

    assert {kind: rows for kind, rows in by_three.items() if kind not in ("audit", "audit_heads")} == {
        kind: rows for kind, rows in whole.items() if kind not in ("audit", "audit_heads")}
    assert by_three["audit"][:len(whole["audit"])] == whole["audit"]


@pytest.mark.parametrize("moves", [{1}, {2}, {0, 1}, {1, 2}, {0, 3}, {*range(9)}], ids=str)
async def test_no_receipt_is_missed_that_comes_back_from_the_archive_or_goes_there_between_two_pages(
        gate: harness.Gate, moves: set[int]) -> None:
    admin = gate.as_admin()
    task_id = (await gate.finished()).task_id
    gate.skip(31 * DAY_SECONDS)
    await gate.finished()       # young: it stays
    written = {row.receipt_id for row in await gate.backend.page(gate.tenant_id, queries.Rows(stored.Receipt))}
    await admin.run_archive()
    number, moved = count(), set[int]()

    async def move(page: wire_privacy.ExportPage) -> None:
        if page.kind not in ("receipts", "archived") or (now := next(number)) not in moves:
            return
        moved.add(now)
        if await gate.backend.page(gate.tenant_id, queries.Rows(stored.Archived)):
            await admin.restore_archive(task_id=task_id)
        else:
            assert (await admin.run_archive()).receipts

    tables, _ = await export(admin, between=move, limit=3)

    assert moved == moves
    assert {row["receipt_id"] for row in (*tables["receipts"], *tables["archived"])} == written
    assert len(tables["receipts"]) == len({row["receipt_id"] for row in tables["receipts"]})


async def test_a_page_ends_when_it_is_large(gate: harness.Gate) -> None:
    for _ in range(6):
        await gate.create(payload="x" * (PAGE_BYTES // 5))

    page = await gate.as_admin().export_tenant()

    assert (page.kind, len(page.rows)) == ("tasks", 5)
    assert len((await gate.as_admin().export_tenant(cursor=page.next_cursor)).rows) == 1


async def test_one_audit_line_says_that_an_export_began(gate: harness.Gate) -> None:
    await gate.create()

    await export(gate.as_admin(), limit=1)
    await export(gate.as_admin(), "export_principal", principal_id="ada", limit=1)

    lines: list[stored.Audit] = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Audit))
    assert [line.event for line in lines] == ["tenant_export_begun", "principal_export_begun"]
    assert '"about":"agent ada"' in lines[1].body


async def test_a_cursor_is_good_for_its_export_and_seven_days(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    first = await admin.export_tenant()
    of_ada = await admin.export_principal(principal_id="ada")

    for operation, ask in (("export_principal", {"principal_id": "bob", "cursor": of_ada.next_cursor}),
                           ("export_principal", {"principal_id": "ada", "cursor": first.next_cursor}),
                           ("export_tenant", {"cursor": of_ada.next_cursor})):
        with harness.refused("invalid_cursor"):
            await getattr(admin, operation)(**ask)
    gate.skip(7 * DAY_SECONDS - 60)
    assert (await admin.export_tenant(cursor=first.next_cursor)).kind == "leases"
    gate.skip(120)
    with harness.refused("invalid_cursor"):
        await admin.export_tenant(cursor=first.next_cursor)


# Principals.


async def test_an_export_does_not_go_on_after_an_erasure(gate: harness.Gate) -> None:
    """What was read before may have what the erasure has taken away."""
    await gate.finished()
    admin = gate.as_admin()
    page = await admin.export_tenant(limit=1)
    page = await admin.export_tenant(limit=1, cursor=page.next_cursor)

    await admin.erase_principal(principal_kind="agent", principal_id="ada", confirm="ada")

    with harness.refused("invalid_cursor"):
        await admin.export_tenant(limit=1, cursor=page.next_cursor)
    await gate.wait(1.0)
    exported, _ = await export(admin, limit=1)
    assert exported["erasures"]


async def test_a_principal_is_exported_with_its_tasks_and_all_that_belongs_to_them(gate: harness.Gate) -> None:
    offer = await gate.leased("w1", payload="hers")
    await gate.as_worker("w1").report_progress(**harness.under(offer), progress="half")
    await gate.as_agent("ada").bootstrap()
    bobs = await gate.create(by="bob", payload="his")
    await gate.as_admin().issue_key(name="k", principal_id="ada")
    await gate.as_admin().issue_key(name="k", principal_id="bob")

    ada, text = await export(gate.as_admin(), "export_principal", principal_kind="agent", principal_id="ada")
    w1, _ = await export(gate.as_admin(), "export_principal", principal_kind="worker", principal_id="w1")
    human, _ = await export(gate.as_admin(), "export_principal", principal_kind="human", principal_id="nobody")

    for tables in (ada, w1):
        assert [row["task_id"] for row in tables["tasks"]] == [offer.task_id]
        assert [row["lease_id"] for row in tables["leases"]] == [offer.lease_id]
        assert [row["progress"] for row in tables["progress"]] == ["half"]
    assert {row["receipt_type"] for row in ada["receipts"]} == {"task.assigned"}
    assert {row["receipt_type"] for row in w1["receipts"]} >= {"task.accepted"}
    assert [row["principal_id"] for row in ada["api_keys"]] == ["ada"]
    assert [row["event"] for row in ada["audit"]] == ["key_issued", "principal_export_begun"]
    assert not any(human[kind] for kind in human if kind != "audit")
    assert bobs.encode() not in text
    assert b"hash" not in b"".join(map(encode_json, ada["api_keys"]))
    assert {*ada} == {stored.TABLES[table] for table in stored.TABLES if may_name(table)}


@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_the_tasks_of_a_worker_are_found_among_those_of_others_in_pages_of_any_size(
        gate: harness.Gate, limit: int) -> None:
    tasks = [await gate.create(by="ada" if number % 5 else "bob") for number in range(40)]
    for number in range(30):
        assert await gate.claim(f"w{number % 3}")
    leases = [row for row in await gate.backend.page(gate.tenant_id, queries.Rows(stored.Lease)) if row.worker_id
              == "w1"]

    ask: dict[str, Any] = {"principal_kind": "worker", "principal_id": "w1", "limit": limit}
    w1, _ = await export(gate.as_admin(), "export_principal", **ask)
    bob, _ = await export(gate.as_admin(), "export_principal", principal_id="bob", limit=limit)

    assert [row["task_id"] for row in w1["tasks"]] == [row.task_id for row in leases] != []
    assert [row["task_id"] for row in bob["tasks"]] == tasks[::5]
    assert {row["task_id"] for row in bob["leases"]} < {*tasks[::5]}


async def test_a_principal_is_exported_with_the_people_who_act_as_it(gate: harness.Gate) -> None:
    there = harness.Gate(gate.engine, gate.stranger().tenant_id)
    for tenant, mark in ((gate, "ours"), (there, "theirs")):
        await plant(gate, mark, tenant.tenant_id,
                    {stored_oauth.User, stored_oauth.Consent, stored_oauth.Grant, stored_oauth.SignInLink})

    def name(work: Work) -> None:
        for mark in ("ours", "theirs"):
            for table, key in ((stored_oauth.User, (f"{mark} user_id",)),
                               (stored_oauth.Grant, (f"{mark} Grant.grant_id",)),
                               (stored_oauth.SignInLink, (f"{mark} SignInLink.link_hash",))):
                row: Any = work.find_record(table, *key)
                work.keep_record(replace(row, principal_kind="human", principal_id="ada"))
    await gate.backend.transact(gate.tenant_id, Needs(records={
        (table, (f"{mark} {key}",)) for mark in ("ours", "theirs") for table, key in (
            (stored_oauth.User, "user_id"), (stored_oauth.Grant, "Grant.grant_id"),
            (stored_oauth.SignInLink, "SignInLink.link_hash"))}), name)

    ada, text = await export(gate.as_admin(), "export_principal", principal_kind="human", principal_id="ada")
    agent, _ = await export(gate.as_admin(), "export_principal", principal_kind="agent", principal_id="ada")

    assert [len(ada[f"oauth_{kind}"]) for kind in ("users", "consents", "grants", "links")] == [1, 1, 1, 1]
    assert [len(agent[f"oauth_{kind}"]) for kind in ("users", "consents", "grants", "links")] == [0, 0, 0, 0]
    assert b"theirs" not in text


async def test_who_has_the_scope_exports_itself_and_an_admin_anybody(gate: harness.Gate) -> None:
    await gate.create(by="ada")
    reader = gate.as_caller("agent", "ada", "agent", scopes=frozenset({"admin:read"}))

    own, _ = await export(reader, "export_principal")

    assert len(own["tasks"]) == 1
    with harness.refused("forbidden"):
        await reader.export_principal(principal_id="bob")
    with harness.refused("forbidden"):
        await reader.export_tenant()
    with harness.refused("forbidden"):
        await gate.as_caller("agent", "ada", "agent", scopes=SCOPES - {"admin:read", "admin:write"}).export_principal()
    with harness.refused("tenant_not_found"):
        await reader.export_principal(tenant="00000000-0000-4000-8000-00000000dead")
