"""Where `Note` is found, which tests/heart/test_adding_a_kind.py adds to a copy of the house."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine, Needs
from asyncgate.backends import open_backend, sqlite
from asyncgate.backends.postgres.migrations import migrations
from asyncgate.commands import copy
from asyncgate.conformance.harness import Gate
from asyncgate.parts.model import stored
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.operating.retention import KEPT, RowPruner

pytestmark = pytest.mark.anyio
Note: Any = vars(stored).get("Note")


@pytest.fixture
async def gate(tmp_path: Path) -> Any:
    """A gate with one note."""
    backend: Any = await open_backend(f"sqlite:///{tmp_path / 'gate.db'}")
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    note = Note("n-1", '["milk"]', "kitchen", "s3cret", gate.now())
    await backend.transact(gate.tenant_id, Needs(), lambda work: work.keep_record(note))
    yield gate
    await backend.close()


def test_both_schemas_have_its_table_its_index_and_its_rights() -> None:
    (first, *_), postgres = sqlite.migrations(), migrations()[0].sql

    assert "CREATE TABLE notes (\n    tenant_id TEXT NOT NULL,\n    note_id TEXT" in sqlite.read_migration(first)
    assert "CREATE TABLE asyncgate.notes (\n    tenant_id uuid NOT NULL,\n    note_id asyncgate.id" in postgres
    assert "CREATE INDEX notes_place ON asyncgate.notes (tenant_id, place);" in postgres
    assert "GRANT UPDATE, DELETE ON asyncgate.notes TO asyncgate_app;" in postgres


def test_the_data_map_has_it() -> None:
    text = (Path(__file__).parents[2] / "docs/data-map.md").read_text()

    assert "| `notes` | what people have noted | – | `text` | `place` | `secret` |" in text
    assert "| `notes` | `bulk_retention_days` after it was written | 90 days |" in text


async def test_another_tenant_sees_none(gate: Any) -> None:
    assert await gate.backend.page(str(uuid.uuid4()), Rows(Note)) == []


async def test_it_is_exported_but_for_its_proof(gate: Any) -> None:
    rows, cursor = list[bytes](), None
    while True:
        page = await gate.as_admin().export_tenant(cursor=cursor)
        rows += map(bytes, page.rows)
        if (cursor := page.next_cursor) is None:
            break

    (row,) = [row for row in rows if b"milk" in row]
    assert b'"text":["milk"]' in row
    assert b"s3cret" not in row


async def test_it_is_copied(gate: Any, tmp_path: Path) -> None:
    target: Any = await open_backend(f"sqlite:///{tmp_path / 'other.db'}")

    await copy.traverse(gate.backend, target, lambda rows: None, write=True)

    assert await target.page(gate.tenant_id, Rows(Note)) == await gate.backend.page(gate.tenant_id, Rows(Note)) != []
    await target.close()


async def test_upkeep_deletes_it_when_its_time_has_come(gate: Any) -> None:
    assert Note in KEPT
    gate.skip(91 * 86_400)

    assert await RowPruner(gate.engine).prune(gate.tenant_id, Note) == 1
    assert await gate.backend.page(gate.tenant_id, Rows(Note)) == []


async def test_an_erasure_of_the_tenant_leaves_it_as_its_card_says(gate: Any) -> None:
    await gate.as_admin().erase_principal(principal_kind="agent", principal_id="ada", confirm="ada")

    assert await gate.backend.page(gate.tenant_id, Rows(Note)) != []
