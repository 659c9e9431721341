"""Erased receipts in files: an export after an erasure has none of what went, and another gate takes them as erased."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncgate.clients.http import Http
from asyncgate.commands import carry
from tests.conftest import TOKEN, Live
from tests.receipts.test_receipts_files import good, receipts, run


@pytest.fixture
def other(start: Callable[..., Live]) -> Iterator[Http]:
    """An empty gate."""
    with Http(start().url, TOKEN) as gate:
        yield gate


def test_what_was_erased_since_an_export_began_is_not_in_its_file(other: Http, tmp_path: Path) -> None:
    """Not if it is stopped before the erasure and goes on after it, nor if the erasure comes while it runs."""
    for name in ("mallory", "ada"):
        for number in range(3):
            other.call("create_task", type="files", agent_id=name, payload=number)
    good(run("export", before := tmp_path / "before.jsonl", other))
    target = tmp_path / "out.jsonl"
    partial = Path(f"{target}.partial")
    partial.write_bytes(b"".join(before.read_bytes().splitlines(keepends=True)[:5]))
    assert b"mallory" in partial.read_bytes()
    other.call("erase_principal", principal_kind="agent", principal_id="mallory", confirm="mallory")

    good(run("export", target, other))

    assert b"mallory" not in target.read_bytes()
    assert len(receipts(target)) >= 6
    good(run("verify", target))
    assert not partial.exists()

    def erase(rows: int) -> None:
        if rows:
            other.call("erase_principal", principal_kind="agent", principal_id="ada", confirm="ada")
    with pytest.raises(carry.ExportSpoiled, match="export again"):
        carry.export_receipts(other, str(tmp_path / "late.jsonl"), erase)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("late")]


def test_what_was_erased_verifies_and_is_imported_as_erased(
        start: Callable[..., Live], other: Http, tmp_path: Path) -> None:
    with Http(start().url, TOKEN) as gate:
        gate.call("create_task", type="files", agent_id="ada", payload=None)
        gate.call("create_task", type="files", agent_id="bob", payload=None)
        gate.call("seal_receipts")
        gate.call("erase_principal", principal_kind="agent", principal_id="ada", confirm="ada")
        good(run("export", file := tmp_path / "out.jsonl", gate))

    checked, came = good(run("verify", file)), good(run("import", file, other))
    good(run("export", again := tmp_path / "again.jsonl", other))

    assert "3 receipts say that they were erased" in checked.output
    assert "3 receipts of the file were erased, and stay so" in came.output
    assert "3 receipts say that they were erased" in good(run("verify", again)).output
    assert '"ada"' not in again.read_text()     # as a whole word: a digest may have these letters, too
    assert [receipt.parents for receipt in receipts(again)] == [receipt.parents for receipt in receipts(file)]
    [ended] = other.call("list_erasures")["erasures"]
    assert ended["changes"] == [{"table": "receipts", "changed": 3, "deleted": 0}]
