"""`asyncgate rebuild` from a file in which receipts have no content, because an erasure took it away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.test_carry import exported
from asyncgate.conformance.test_erasure import problems_of
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Event
from asyncgate.parts.receipts.files import Header, pack_receipts
from asyncgate.parts.receipts.seals import receipt_digest

pytestmark = pytest.mark.anyio
ARTIFACTS = [{"uri": "s3://bucket/result"}]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_what_was_erased_is_rebuilt_as_erased(
        gate: Gate, fresh: Callable[[str], Awaitable[str]], tmp_path: Path, kind: str) -> None:
    gone = (await gate.finished()).task_id              # ada's, who is erased, as is worker zq, who worked for bob
    theirs, failing = [await gate.create(by="bob", type="of bob", max_attempts=1) for _ in range(2)]
    done, failed = [await gate.claim("zq", accept_types=["of bob"]) for _ in range(2)]
    assert done is not None
    assert failed is not None
    await gate.as_worker("zq").complete(**under(done), result={"n": 1}, artifacts=ARTIFACTS)
    await gate.as_worker("zq").fail(**under(failed), error="no")
    for who, id in (("agent", "ada"), ("worker", "zq")):
        await gate.as_admin().erase_principal(principal_kind=who, principal_id=id, confirm=id)
    receipts = await exported(gate)
    (file := tmp_path / "out.jsonl.gz").write_bytes(
        pack_receipts(Header("asyncgate-receipts", gate.tenant_id), receipts))
    arguments = ["rebuild", "--database", target := await fresh(kind), "--file", str(file), "--all-instances", "--json"]

    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="asyncgate")

    assert result.exit_code == 0, result.output
    erased = {receipt.receipt_id for receipt in receipts if read_note(receipt.body)}
    assert len(erased) > 5
    assert json.loads(result.stdout)["rebuilt"]["erased"] == len(erased)
    backend = await open_backend(target, serving=True)
    try:
        new = Gate(Engine(backend, Settings()), gate.tenant_id)
        kept = await exported(new)
        assert {receipt.receipt_id for receipt in kept if read_note(receipt.body)} == erased
        assert [receipt_digest(receipt) for receipt in kept] == [receipt_digest(receipt) for receipt in receipts]
        assert await problems_of(new) == []
        assert [receipt.receipt_id for receipt in await new.owed()] == [receipt.receipt_id
                                                                        for receipt in await gate.owed()]
        assert ((await new.task(theirs)).status, (await new.task(failing)).status) == ("succeeded", "failed")
        assert await backend.task(gate.tenant_id, gone) is None
        told = [event for event in await backend.page(gate.tenant_id, Rows(Event))
                if event.event_type == "task.rebuilt"]
        assert [("result" in event.payload, "error" in event.payload) for event in told] == [(True, False),
                                                                                             (False, True)]
    finally:
        await backend.close()
