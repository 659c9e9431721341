"""Output: chunks of a task in one stored order with the changes of its state, the same for each reader."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncgate.conformance import harness
from asyncgate.extras.output.pruning import OutputPruner
from asyncgate.parts.model import errors, queries, stored_output
from asyncgate.parts.model.content import decode_json, sha256

pytestmark = pytest.mark.anyio
DAY = 86_400


async def append(gate: harness.Gate, offer: Any, *chunks: Any, worker: str = "w1", **more: Any) -> Any:
    """Append chunks."""
    return await gate.as_worker(worker).append_output(**harness.under(offer), chunks=list(chunks), **more)


async def entries(gate: harness.Gate, task_id: str, **more: Any) -> list[Any]:
    """Return the entries of a task: the chunk, or the state."""
    page = await gate.as_agent().read_output(task_id=task_id, **more)
    assert [entry.offset for entry in page.entries] == [*range(more.get("after", 0) + 1, page.after + 1)]
    return [msgspec.json.decode(entry.chunk) if entry.chunk is not msgspec.UNSET else (
        entry.status if entry.held is msgspec.UNSET else f"{entry.status} {entry.held}") for entry in page.entries]


async def test_chunks_stand_in_one_order_with_the_states_of_their_task(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    assert (await gate.task(offer.task_id)).outputs == 0

    assert (await append(gate, offer, "a", {"page": 1})).offset == 3
    await gate.lose(offer)
    again = await gate.claim("w2")
    assert again is not None
    assert again.chunks == 2
    await append(gate, again, "b", worker="w2")
    await gate.as_worker("w2").complete(**harness.under(again), result=1, artifacts=[{"uri": "x"}])

    assert await entries(gate, offer.task_id) == ["running", "a", {"page": 1}, "queued", "leased", "running", "b",
                                                  "succeeded"]
    assert await entries(gate, offer.task_id, after=6) == ["b", "succeeded"]
    page = await gate.as_agent().read_output(task_id=offer.task_id)
    assert ([entry.fence for entry in page.entries], page.ended) == ([1, 1, 1, 1, 2, 2, 2, 2], True)
    assert (await gate.task(offer.task_id)).outputs == 8


async def test_each_way_to_end_is_the_last_entry(gate: harness.Gate) -> None:
    ends: list[tuple[Callable[[Any], Any], str]] = [
        (lambda o: gate.as_worker().fail(**harness.under(o), error="no"), "failed"),
        (lambda o: gate.as_agent().cancel_task(task_id=o.task_id), "canceled"),
        (lambda o: gate.as_worker().complete(**harness.under(o), artifacts=[{"uri": "x"}]), "succeeded")]
    for end, status in ends:
        offer = await gate.leased("w1")
        await append(gate, offer, 1)
        await end(offer)
        assert await entries(gate, offer.task_id) == ["running", 1, status]
        with pytest.raises(errors.LeaseInvalid):
            await append(gate, offer, 2)


async def test_a_release_a_retry_and_a_question_are_entries_too(gate: harness.Gate) -> None:
    offer = await gate.leased("w1", max_attempts=3, retry_backoff_seconds=0)
    await append(gate, offer, 1)
    await gate.as_worker().release_lease(**harness.under(offer))
    second = await gate.claim("w1")
    assert second is not None
    await gate.as_worker().fail(**harness.under(second), error="no", retryable=True)
    third = await gate.claim("w1")
    assert third is not None
    await gate.as_worker().request_input(**harness.under(third), key="k", message="?")

    assert await entries(gate, offer.task_id) == ["running", 1, "queued", "leased", "queued", "leased",
                                                  "queued input_required"]


async def test_a_task_without_output_has_its_end_and_nothing_is_stored(gate: harness.Gate) -> None:
    task_id = (await gate.finished()).task_id

    page = await gate.as_agent().read_output(task_id=task_id)

    assert ([(entry.offset, entry.status) for entry in page.entries], page.ended) == ([(1, "succeeded")], True)
    page = await gate.as_agent().read_output(task_id=task_id, after=1)
    assert (page.entries, page.after, page.ended) == ([], 1, True)


async def test_a_repeated_call_appends_nothing_twice(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    first = await append(gate, offer, "a", "b", position=0)

    assert await append(gate, offer, "a", "b", position=0) == first
    assert (await append(gate, offer, "b", "c", position=1)).chunks == 3
    with pytest.raises(errors.OutputConflict) as refused:
        await append(gate, offer, "e", position=4)
    assert refused.value.more["chunks"] == 3
    assert await entries(gate, offer.task_id) == ["running", "a", "b", "c"]


async def test_only_the_holder_of_the_lease_appends_and_only_who_may_read_the_task_reads(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    await append(gate, offer, "secret")

    with pytest.raises(errors.LeaseInvalid):
        await append(gate, offer, "x", worker="w2")
    with pytest.raises(errors.Forbidden):
        await gate.as_agent("eve").read_output(task_id=offer.task_id)
    with pytest.raises(errors.TaskNotFound):
        await gate.stranger().as_admin().read_output(task_id=offer.task_id)
    assert len((await gate.as_worker("w1").read_output(task_id=offer.task_id)).entries) == 2


async def test_output_is_bounded(gate: harness.Gate) -> None:
    small = gate.beside(max_task_output_bytes=100)
    offer = await small.leased("w1")

    with pytest.raises(errors.PayloadTooLarge):
        await append(small, offer, "x" * 70_000)
    with pytest.raises(errors.PayloadTooLarge):
        await append(small, offer, *["x" * 60_000] * 5)
    await append(small, offer, "x" * 90)
    with pytest.raises(errors.OutputFull):
        await append(small, offer, "x" * 20)
    assert await entries(small, offer.task_id) == ["running", "x" * 90]


async def test_a_page_goes_on_behind_the_one_before(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    for first in range(0, 90, 30):
        await append(gate, offer, *range(first, first + 30))

    seen, after = list[Any](), 0
    while len(seen) < 91:
        page = await gate.as_agent().read_output(task_id=offer.task_id, after=after, limit=25)
        seen += page.entries
        after = page.after

    assert [entry.offset for entry in seen] == [*range(1, 92)]
    assert not page.ended


async def test_a_waiting_read_is_answered_by_the_next_chunk_and_by_the_end(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    async def read(after: int) -> Any:
        return await gate.as_agent().read_output(task_id=offer.task_id, after=after, wait_seconds=30)
    acts: list[tuple[int, Callable[[], Any]]] = [
        (0, lambda: append(gate, offer, "a")), (2, lambda: append(gate, offer, "b")),
        (3, lambda: gate.as_agent().cancel_task(task_id=offer.task_id))]
    for after, act in acts:
        waiting = asyncio.ensure_future(read(after))
        while not gate.engine.readers.list_seats():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await act()
        page = await asyncio.wait_for(waiting, harness.PATIENCE)
        assert page.after > after
    assert page.ended


async def test_the_end_of_a_task_has_the_digest_of_its_output(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    await append(gate, offer, "a")
    await append(gate, offer, "b")
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "x"}])

    [receipt] = (await gate.as_agent().list_receipts(task_id=offer.task_id, receipt_type="task.completed")).receipts
    body = decode_json(receipt.body)
    digest = None
    for offset, chunk in ((2, b'"a"'), (3, b'"b"')):
        digest = sha256(digest, offset, hashlib.sha256(chunk).hexdigest())
    assert (body["output_chunks"], body["output_sha256"]) == (2, digest)


async def test_output_writes_no_receipt(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    before = len((await gate.as_admin().list_receipts(task_id=offer.task_id)).receipts)

    await append(gate, offer, "a", "b")

    assert len((await gate.as_admin().list_receipts(task_id=offer.task_id)).receipts) == before


async def test_the_output_of_a_task_goes_some_days_after_its_end(gate: harness.Gate) -> None:
    ended, lives = await gate.leased("w1"), await gate.leased("w1", lease_ttl_seconds=1800)
    for offer in (ended, lives):
        await append(gate, offer, "a")
    await gate.as_agent().cancel_task(task_id=ended.task_id)
    pruner = OutputPruner(gate.engine)
    gate.skip(6 * DAY)
    assert await pruner.run() == 0

    gate.skip(2 * DAY)
    assert await pruner.run() == 3

    page = await gate.as_agent().read_output(task_id=ended.task_id)
    assert (page.entries, page.ended) == ([], True)
    assert len((await gate.as_agent().read_output(task_id=lives.task_id)).entries) == 2
    kept = await gate.engine.backend.page(gate.tenant_id, queries.Rows(stored_output.OutputEntry))
    assert {row.task_id for row in kept} == {lives.task_id}
