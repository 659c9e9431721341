"""Lists and cursors: pages, filters, and a reader that sees every receipt once (spec 17)."""

from __future__ import annotations

import asyncio
import base64
import itertools
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from asyncgate import Needs, Work
from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored, wire

pytestmark = pytest.mark.anyio

LISTS = ["list_tasks", "list_receipts", "get_task_history", "list_open_obligations", "bootstrap"]


async def paged(view: harness.View, operation: str, rows: str, **ask: Any) -> list[Any]:
    """Follow next_cursor to the end."""
    entries: list[Any] = []
    while True:
        page = await getattr(view, operation)(**ask)
        assert page.cursor is not None, "spec 17: the last place seen"
        assert page.next_cursor in (None, page.cursor), "null at the end"
        entries += getattr(page, rows)
        if page.next_cursor is None:
            return entries
        assert len(getattr(page, rows)) == ask["limit"], "a page is full while more remains"
        ask["cursor"] = page.next_cursor


async def test_tasks_are_listed_newest_first(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(5)]

    assert [task.task_id for task in (await gate.as_agent().list_tasks()).tasks] == tasks[::-1]


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
async def test_tasks_are_listed_page_by_page(gate: harness.Gate, limit: int) -> None:
    tasks = [await gate.create() for _ in range(7)]

    assert [task.task_id for task in await paged(gate.as_agent(), "list_tasks", "tasks", limit=limit)] == tasks[::-1]


async def test_filters_apply_before_the_limit(gate: harness.Gate) -> None:
    wanted = [await gate.create(type="a") for _ in range(2)]
    for _ in range(5):
        await gate.create(type="b")
    await gate.as_agent().cancel_task(task_id=wanted[0])

    by_type = await paged(gate.as_agent(), "list_tasks", "tasks", limit=1, type="a")
    by_both = await paged(gate.as_agent(), "list_tasks", "tasks", limit=1, type="a", status="canceled")

    assert [task.task_id for task in by_type] == wanted[::-1]
    assert [task.task_id for task in by_both] == wanted[:1]


async def test_tasks_are_filtered_by_their_age(gate: harness.Gate) -> None:
    made, moments = [], []
    for _ in range(3):
        moments.append(datetime.fromtimestamp(gate.now(), UTC))
        made.append(await gate.create())
        gate.skip(60)

    async def listed(**fields: Any) -> list[str]:
        return [task.task_id for task in (await gate.as_agent().list_tasks(**fields)).tasks]

    assert await listed(created_after=moments[1]) == [made[2], made[1]]
    assert await listed(created_before=moments[1]) == [made[0]]
    assert await listed(created_after=moments[1], created_before=moments[2]) == [made[1]]
    assert await listed(created_after=moments[2], created_before=moments[1]) == []
    assert await listed(created_after=moments[1], type="else") == []


async def test_tasks_are_filtered_by_how_their_id_begins(gate: harness.Gate) -> None:
    made = [await gate.create() for _ in range(3)]

    async def listed(prefix: str, **fields: Any) -> list[str]:
        return [task.task_id for task in (await gate.as_admin().list_tasks(id_prefix=prefix, **fields)).tasks]

    assert await listed(made[1]) == [made[1]]
    assert await listed(made[1][:-1]) == [made[1]]
    assert await listed(made[1][0]) == made[::-1]
    assert await listed(made[1], status="succeeded") == []
    assert await listed("zzz") == []


async def mix(gate: harness.Gate) -> list[Any]:
    """Make tasks that differ in what lists tell apart; return them, newest first."""
    lost = await gate.leased(type="mail.bulk", task_summary="Read the news", max_expiries=1)
    await gate.lose(lost)
    for type, by, summary in [("page.read", "ada", "Read page 1"), ("page.read", "bob", None),
                              ("page.sum", "ada", "Sum up"), ("page", "ada", "read the page"),
                              ("pagf", "bob", "Re\U00010000d"), ("mail", "ada", "Réponse"), ("mail", "bob", "Re")] * 2:
        await gate.create(type, by=by, task_summary=summary)
    for task in (await gate.as_admin().list_tasks()).tasks[::3]:
        if task.task_id != lost.task_id:
            await gate.as_admin().cancel_task(task_id=task.task_id)
    assert (await gate.task(lost.task_id)).held
    return list((await gate.as_admin().list_tasks()).tasks)


async def find(gate: harness.Gate, limit: int, **fields: Any) -> list[str]:
    """Return the tasks that an admin finds, page by page; there may be none."""
    if not (await gate.as_admin().list_tasks(limit=limit, **fields)).tasks:
        return []
    return [task.task_id for task in await paged(gate.as_admin(), "list_tasks", "tasks", limit=limit, **fields)]


FILTERS: dict[str, tuple[Any, ...]] = {
    "status": (None, "queued", "canceled", "failed"), "held": (None, True, False), "created_by": (None, "ada", "bob"),
    "type": (None, "mail", "page.read"), "type_prefix": (None, "page", "page.", "none"),
    "summary_prefix": (None, "Re", "read", "Ré", "%")}


@pytest.mark.parametrize("two", list(itertools.combinations(FILTERS, 2)), ids="-".join)
async def test_filters_pass_what_each_of_them_passes(gate: harness.Gate, two: tuple[str, str]) -> None:
    tasks = await mix(gate)

    def passes(task: Any, status: str | None = None, held: bool | None = None, created_by: str | None = None,
               type: str | None = None, type_prefix: str | None = None, summary_prefix: str | None = None) -> bool:
        return (status in (None, task.status) and held in (None, task.held is not None)
                and created_by in (None, task.created_by.id) and type in (None, task.type)
                and task.type.startswith(type_prefix or "")
                and (summary_prefix is None or (task.task_summary or "").startswith(summary_prefix)))

    for values in itertools.product(*(FILTERS[name] for name in two)):
        asked = dict(zip(two, values, strict=True))
        assert await find(gate, 3, **asked) == [task.task_id for task in tasks if passes(task, **asked)], asked


async def test_filters_pass_the_same_where_many_tasks_have_each_of_them(gate: harness.Gate) -> None:
    rare = await gate.create("job.07", task_summary="All of it")
    await gate.as_agent().cancel_task(task_id=rare)
    made = []
    for number in range(1010 // 101):
        batch = [{"type": f"job.{at % 25:02}", "payload": None, "task_summary": "All that"} for at in range(101)]
        made += [row.task_id for row in (await gate.as_agent(f"a{number % 2}").create_tasks(tasks=batch)).results]

    assert await find(gate, 200, type_prefix="job.") == [*made[::-1], rare]
    assert await find(gate, 200, type_prefix="job.0") == [
        id for at, id in reversed([(0, rare), *enumerate(made)]) if id == rare or at % 101 % 25 < 10]
    assert await find(gate, 200, summary_prefix="All") == [*made[::-1], rare]
    assert await find(gate, 200, summary_prefix="All", type_prefix="job", status="queued") == made[::-1]
    assert await find(gate, 200, summary_prefix="All", type_prefix="job", status="queued", created_by="a1") == [
        id for at, id in reversed([*enumerate(made)]) if at // 101 % 2]
    assert await find(gate, 200, summary_prefix="All", type_prefix="job", status="canceled") == [rare]
    assert await find(gate, 200, summary_prefix="All o") == [rare]
    assert await find(gate, 200, held=True, summary_prefix="All", type_prefix="job.") == []


async def test_a_summary_is_looked_for_by_its_first_hundred_letters(gate: harness.Gate) -> None:
    long = await gate.create(task_summary="é" * 300)

    assert [task.task_id for task in (await gate.as_agent().list_tasks(summary_prefix="é" * 100)).tasks] == [long]
    assert (await gate.as_agent().list_tasks(summary_prefix="é" * 99 + "e")).tasks == []
    with harness.refused("invalid_request"):
        await gate.as_agent().list_tasks(summary_prefix="é" * 101)


async def test_an_agent_finds_no_task_of_others_by_its_summary(gate: harness.Gate) -> None:
    await gate.create(by="bob", task_summary="secret")

    assert (await gate.as_agent("ada").list_tasks(summary_prefix="secret")).tasks == []
    assert (await gate.stranger().as_admin().list_tasks(summary_prefix="secret")).tasks == []


@pytest.mark.parametrize("other", [{"held": True}, {"type_prefix": "d"}, {"summary_prefix": "S"}])
async def test_a_cursor_is_good_for_its_filters_only(gate: harness.Gate, other: dict[str, Any]) -> None:
    for _ in range(2):
        await gate.create(task_summary="Sum")
    page = await gate.as_agent().list_tasks(limit=1)

    with harness.refused("invalid_cursor"):
        await gate.as_agent().list_tasks(cursor=page.next_cursor, **other)


async def test_the_cursor_of_a_list_by_age_is_good_for_that_age_only(gate: harness.Gate) -> None:
    begin, made = datetime.fromtimestamp(gate.now(), UTC), [await gate.create() for _ in range(3)]
    page = await gate.as_agent().list_tasks(limit=1, created_after=begin)

    rest = await gate.as_agent().list_tasks(created_after=begin, cursor=page.next_cursor)

    assert [task.task_id for task in (*page.tasks, *rest.tasks)] == made[::-1]
    for other in ({}, {"created_before": begin}, {"created_after": begin, "id_prefix": "0"}):
        with harness.refused("invalid_cursor"):
            await gate.as_agent().list_tasks(cursor=page.next_cursor, **other)


async def test_a_page_has_fifty_rows_and_two_hundred_at_most(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 210)
    ada = gate.as_agent()

    assert len((await ada.list_tasks()).tasks) == len((await ada.list_receipts()).receipts) == 50
    assert len((await ada.list_tasks(limit=9999)).tasks) == len((await ada.list_receipts(limit=9999)).receipts) == 200


@pytest.mark.parametrize(("large", "sizes"), [
    (range(24), [4, 4, 4, 4, 4, 4]), (range(8), [20, 4]), (range(16, 24), [4, 20]), (range(0), [24])])
async def test_a_page_of_large_tasks_ends_early_and_the_next_goes_on_behind_it(
        gate: harness.Gate, large: range, sizes: list[int]) -> None:
    made = [await gate.create(payload="x" * 1_000_000 if number in large else None) for number in range(24)]
    ada, pages, cursor = gate.as_agent(), list[Any](), None

    while cursor or not pages:
        page = await ada.list_tasks(limit=24, cursor=cursor)
        pages, cursor = [*pages, page.tasks], page.next_cursor

    assert [task.task_id for page in pages for task in page] == made[::-1]
    assert [len(page) for page in pages] == sizes


async def test_a_claim_of_large_tasks_ends_early_and_the_next_gets_the_others(gate: harness.Gate) -> None:
    made = [await gate.create(payload="x" * 1_000_000) for _ in range(6)]
    worker = gate.as_worker()

    first, second = [(await worker.lease_next(max_tasks=100)).tasks for _ in range(2)]

    assert [task.task_id for task in first] == made[:5]
    assert [task.task_id for task in second] == made[5:]


@pytest.mark.one_store
@pytest.mark.parametrize("limit", [0, -1, 1.5, "3"])
@pytest.mark.parametrize("operation", LISTS)
async def test_a_limit_below_one_or_not_an_integer_is_refused(gate: harness.Gate, operation: str, limit: Any) -> None:
    task_id = await gate.create()

    with harness.refused("invalid_request"):
        await getattr(gate.as_agent(), operation)(limit=limit, task_id=task_id)


async def test_receipts_are_listed_oldest_first(gate: harness.Gate) -> None:
    offer = await gate.finished()

    receipts = (await gate.as_admin().list_receipts(task_id=offer.task_id)).receipts
    assert [receipt.receipt_type for receipt in receipts] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
async def test_receipts_are_listed_page_by_page(gate: harness.Gate, limit: int) -> None:
    for _ in range(3):
        await gate.finished()
    everything = await gate.receipts()

    assert await paged(gate.as_admin(), "list_receipts", "receipts", limit=limit) == everything
    assert len(everything) == 12


async def test_receipts_are_filtered_by_inbox_task_and_type(gate: harness.Gate) -> None:
    offer = await gate.finished()
    await gate.finished()
    admin = gate.as_admin()

    async def types(**ask: Any) -> list[str]:
        return [receipt.receipt_type for receipt in (await admin.list_receipts(**ask)).receipts]

    assert await types(to_kind="agent", to_id="ada") == ["task.assigned", "task.result_ready"] * 2
    assert await types(task_id=offer.task_id, receipt_type="task.completed") == ["task.completed"]
    assert await types(receipt_type="task.completed") == ["task.completed"] * 2
    assert await types(to_id="nobody") == []


async def test_a_page_of_receipts_is_full_while_more_remains(gate: harness.Gate) -> None:
    for _ in range(4):
        await gate.finished()

    receipts = await paged(gate.as_admin(), "list_receipts", "receipts", limit=2, receipt_type="task.completed")
    inbox = await paged(gate.as_agent("ada"), "list_receipts", "receipts", limit=3)

    assert (len(receipts), len(inbox)) == (4, 8)


async def test_the_newest_receipts_are_the_last_page_still_oldest_first(gate: harness.Gate) -> None:
    for _ in range(5):
        await gate.finished()
    whole = await paged(gate.as_admin(), "list_receipts", "receipts", limit=50, receipt_type="task.accepted")

    last = await gate.as_admin().list_receipts(receipt_type="task.accepted", limit=2, newest=True)
    await gate.finished()
    later = await gate.as_admin().list_receipts(receipt_type="task.accepted", since_receipt_id=last.cursor)

    assert last.receipts == whole[-2:]
    assert last.next_cursor is None
    assert len(later.receipts) == 1


async def test_an_agent_lists_its_inbox(gate: harness.Gate) -> None:
    await gate.finished()
    await gate.create(by="bob")

    receipts = (await gate.as_agent("ada").list_receipts()).receipts

    assert [receipt.receipt_type for receipt in receipts] == ["task.assigned", "task.result_ready"]


async def test_the_id_of_a_receipt_is_a_cursor(gate: harness.Gate) -> None:
    for _ in range(3):
        await gate.finished()
    everything = await gate.receipts()

    for at in (0, 5, 11):
        page = await gate.as_admin().list_receipts(since_receipt_id=everything[at].receipt_id)
        assert page.receipts == everything[at + 1:]


async def test_a_cursor_is_accepted_as_since_receipt_id(gate: harness.Gate) -> None:
    await gate.finished()
    first = await gate.as_admin().list_receipts(limit=2)

    rest = await gate.as_admin().list_receipts(limit=2, since_receipt_id=first.next_cursor)

    assert first.receipts + rest.receipts == await gate.receipts()


FOLLOWED = [        # list, its rows, and the member to use as a cursor
    ("list_tasks", "tasks", "cursor"), ("list_receipts", "receipts", "cursor"),
    ("list_receipts", "receipts", "since_receipt_id"), ("get_task_history", "events", "cursor"),
    ("list_open_obligations", "open_obligations", "since_receipt_id"),
    ("bootstrap", "attention.inbox_receipts", "since_receipt_id"), ("list_audit", "lines", "cursor"),
    ("list_keys", "keys", "cursor"), ("list_seals", "seals", "cursor")]


def at(page: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for name in path.split("."):
        page = getattr(page, name)
    return page


def name_of(row: Any) -> str:
    """Return the id of a receipt or of an event."""
    return str(getattr(row, "event_id", None) or row.receipt_id)


@pytest.mark.parametrize("limit", [2, 50])
@pytest.mark.parametrize(("operation", "rows", "name"), FOLLOWED)
async def test_a_reader_that_loops_on_the_cursor_reads_nothing_twice(
        gate: harness.Gate, operation: str, rows: str, name: str, limit: int) -> None:
    """Spec 17, PH.6.2: the cursor is the last position, or the given cursor; only next_cursor is null at the end."""
    ask: dict[str, Any] = {"limit": limit}
    for n in range(3):
        task_id = await gate.create(by="root")
        await gate.as_admin().issue_key(name=f"key {n}", principal_id="ada")
        await gate.as_admin().seal_receipts()
    ask |= {"task_id": task_id} if operation == "get_task_history" else {}
    ask |= {"principal_kind": "agent", "principal_id": "root"} if operation in ("list_open_obligations", "bootstrap",
                                                                                "list_receipts") else {}
    root, seen = gate.as_admin(), list[Any]()
    for _ in range(6):
        page = await getattr(root, operation)(**ask)
        cursor = at(page, "cursor.latest_receipt_id" if operation == "bootstrap" else "cursor")
        assert cursor is not None
        if not (entries := at(page, rows)):
            assert cursor == ask[name], "nothing came: the given one"
        assert getattr(page, "next_cursor", None) is None or len(entries) == limit
        seen, ask = [*seen, *entries], {**ask, name: cursor}

    names = [msgspec.json.encode(row) for row in seen]
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(("operation", "name"), [(operation, name) for operation, _, name in FOLLOWED[2:6]])
async def test_a_poller_gets_what_is_new_and_nothing_else(gate: harness.Gate, operation: str, name: str) -> None:
    rows = {operation: rows for operation, rows, _ in FOLLOWED}[operation]
    offer, ada = await gate.leased(), gate.as_agent()
    ask = {"task_id": offer.task_id} if operation == "get_task_history" else {}
    page = await getattr(ada, operation)(**ask)
    old = [name_of(row) for row in at(page, rows)]

    await gate.as_worker().start_task(**harness.under(offer))
    await gate.as_worker().fail(**harness.under(offer, error="no"))
    await gate.create()
    cursor = at(page, "cursor.latest_receipt_id" if operation == "bootstrap" else "cursor")
    new = [name_of(row) for row in at(await getattr(ada, operation)(**ask, **{name: cursor}), rows)]

    everything = [name_of(row) for row in at(await getattr(ada, operation)(**ask), rows)]
    assert new == [row for row in everything if row not in old] != []


async def test_the_cursor_of_an_empty_list_is_null_until_something_was_seen(gate: harness.Gate) -> None:
    eve = gate.as_agent("eve")

    assert ((await eve.list_receipts()).cursor, (await eve.list_open_obligations()).cursor,
            (await eve.bootstrap()).cursor.latest_receipt_id, (await eve.list_tasks()).cursor) == (None,) * 4


async def cursor_of(gate: harness.Gate, operation: str) -> tuple[str, dict[str, Any]]:
    """Return a cursor of a list, and its query."""
    for _ in range(2):
        offer = await gate.finished()
    ask = {"limit": 1, **({"task_id": offer.task_id} if operation == "get_task_history" else {})}
    cursor: str = (await getattr(gate.as_agent(), operation)(**ask)).next_cursor
    return cursor, ask


@pytest.mark.one_store
@pytest.mark.parametrize("operation", LISTS[:3])
async def test_a_cursor_that_was_tampered_with_is_refused(gate: harness.Gate, operation: str) -> None:
    cursor, ask = await cursor_of(gate, operation)
    flipped = bytearray(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    flipped[-1] ^= 1
    forged = base64.urlsafe_b64encode(bytes(flipped)).decode().rstrip("=")

    for wrong in (forged, cursor[:-4], cursor + "AAAA", "x", "é", "!!!", cursor[1:], "0" * 40):
        with harness.refused("invalid_cursor"):
            await getattr(gate.as_agent(), operation)(**ask, cursor=wrong)
    with harness.refused("invalid_request"):    # the schema of every cursor asks for a text
        await getattr(gate.as_agent(), operation)(**ask, cursor="")


async def test_a_cursor_of_another_query_is_refused(gate: harness.Gate) -> None:
    tasks, _ = await cursor_of(gate, "list_tasks")
    receipts, _ = await cursor_of(gate, "list_receipts")
    ada = gate.as_agent()

    for operation, ask in (("list_tasks", {"cursor": tasks, "type": "demo"}), ("list_tasks", {"cursor": receipts}),
                           ("list_receipts", {"cursor": tasks}), ("list_open_obligations", {"since_receipt_id": tasks}),
                           ("list_receipts", {"cursor": receipts, "receipt_type": "task.assigned"})):
        with harness.refused("invalid_cursor"):
            await getattr(ada, operation)(**ask)


async def test_a_cursor_of_another_inbox_is_refused(gate: harness.Gate) -> None:
    cursor, _ = await cursor_of(gate, "list_receipts")

    with harness.refused("invalid_cursor"):
        await gate.as_agent("bob").list_receipts(cursor=cursor)


async def test_a_cursor_or_receipt_of_another_tenant_is_refused(gate: harness.Gate) -> None:
    cursor, _ = await cursor_of(gate, "list_receipts")
    receipt_id = (await gate.receipts())[0].receipt_id
    there = gate.stranger()
    await cursor_of(there, "list_receipts")

    for operation in ("list_receipts", "list_open_obligations", "bootstrap"):
        for wrong in (cursor, receipt_id):
            with harness.refused("invalid_cursor"):
                await getattr(there.as_agent(), operation)(since_receipt_id=wrong)


async def test_new_tasks_do_not_disturb_a_reader_of_tasks(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(4)]
    first = await gate.as_agent().list_tasks(limit=2)
    await gate.create()

    second = await gate.as_agent().list_tasks(limit=2, cursor=first.next_cursor)

    assert [task.task_id for task in first.tasks + second.tasks] == tasks[::-1]


async def test_a_reader_sees_every_receipt_exactly_once_while_writers_commit(gate: harness.Gate) -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def follow() -> None:
        last = None
        while True:
            over = done.is_set()
            page = await gate.as_admin().list_receipts(since_receipt_id=last, limit=3)
            seen.extend(receipt.receipt_id for receipt in page.receipts)
            last = page.receipts[-1].receipt_id if page.receipts else last
            if over and not page.receipts:
                return
            await asyncio.sleep(0)

    async def write(worker: str) -> None:
        for _ in range(5):
            await gate.create()
            if offer := await gate.claim(worker):
                await gate.as_worker(worker).complete(**harness.under(offer, artifacts=[{"uri": "x"}]))

    async with asyncio.timeout(harness.PATIENCE), asyncio.TaskGroup() as readers:
        for _ in range(2):
            readers.create_task(follow())
        await asyncio.gather(*(write(f"w{n}") for n in range(8)))
        done.set()
    written = [receipt.receipt_id for receipt in await gate.receipts()]
    assert sorted(seen) == sorted(written * 2)
    assert len(written) == len(set(written)) >= 40


def stored_rows() -> list[Any]:
    """Return more than two pages of rows, with difficult ids, for each table that is ordered by several fields."""
    ids = ["", "\x01", " ", "~", "é", "\ue000", "\U0001f600"]
    names = [f"n{number}{id}" for number in range(150) for id in ids]
    owners = [wire.Principal(kind, name) for kind in ("agent", "worker") for name in names]
    return [*(stored.Presence(who.kind, who.id, None, 1.0, 2.0, 1) for who in owners),
            *(stored.Obligation(who.kind, who.id, f"{number:04}") for number, who in enumerate(reversed(owners))),
            *(stored.Event(f"{number:04}", f"t{number % 7}", "task.started", "{}", 1.0) for number in range(2100))]


@pytest.mark.parametrize("table", [stored.Presence, stored.Obligation, stored.Event])
async def test_an_export_gives_each_row_once_and_in_order_however_many_pages_it_takes(
        gate: harness.Gate, table: type[Struct]) -> None:
    rows: list[Any] = [row for row in stored_rows() if isinstance(row, table)]

    def keep(work: Work) -> None:
        for row in rows:
            if isinstance(row, stored.Presence):
                work.keep_record(row)
            elif isinstance(row, stored.Obligation):
                work.opened[row.receipt_id] = wire.Principal(row.to_kind, row.to_id)
            else:
                work.events[row.event_id] = row

    await gate.backend.transact(gate.tenant_id, Needs(), keep)
    pages: list[list[Any]] = []
    after = ""
    while page := await gate.backend.page(gate.tenant_id, queries.Rows(table, after)):
        pages.append(page)
        after = stored.export_key(page[-1])

    order = stored.export_order(table)
    assert [row for page in pages for row in page] == sorted(
        rows, key=lambda row: [getattr(row, name).encode() for name in order])
    assert len(pages) >= 3


# From a part of an id to the whole.


async def match_ids(view: harness.View, part: str) -> list[tuple[str, str]]:
    """Return what is found by a part of an id."""
    return [(match.kind, match.id) for match in (await view.find_id(part=part)).found]


async def test_an_id_is_found_by_how_it_ends_and_by_how_it_begins(gate: harness.Gate) -> None:
    ids = [await gate.create() for _ in range(5)]
    [duty] = [receipt.receipt_id for receipt in (await gate.as_admin().list_receipts(task_id=ids[2])).receipts]

    assert await match_ids(gate.as_admin(), ids[2][-12:]) == [("task", ids[2])]
    assert await match_ids(gate.as_admin(), ids[2][:-1].upper()) == [("task", ids[2])]
    assert await match_ids(gate.as_admin(), duty[-12:]) == [("receipt", duty)]
    assert {("task", id) for id in ids} <= {*await match_ids(gate.as_admin(), ids[0][-5:])}   # the mark of the tenant
    assert await match_ids(gate.as_admin(), "deadbeefdead") == []


async def test_who_is_no_admin_finds_the_ids_of_what_they_may_read(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")

    assert await match_ids(gate.as_agent("ada"), task_id[-12:]) == [("task", task_id)]
    assert await match_ids(gate.as_agent("bob"), task_id[-12:]) == []
    assert await match_ids(gate.stranger().as_admin(), task_id[-12:]) == []


# What no index holds.


async def searched(view: harness.View, **ask: Any) -> tuple[list[str], int]:
    """Return the tasks that are found, to the end of the search, and how many were looked at."""
    ids, looked_at = list[str](), 0
    while True:
        page = await view.search_tasks(**ask)
        ids, looked_at = ids + [task.task_id for task in page.tasks], looked_at + page.searched
        if page.next_cursor is None:
            return ids, looked_at
        ask["cursor"] = page.next_cursor


async def test_tasks_are_searched_by_a_member_of_their_payload(gate: harness.Gate) -> None:
    payloads = [{"doc": 7}, {"doc": "7", "order": {"id": "A-7"}}, {"doc": 70}, ["doc", 7], {"doc": [6, 7]}, None]
    ids = [await gate.create(payload=payload) for payload in payloads]

    assert await searched(gate.as_agent(), payload="doc:7") == ([ids[4], ids[1], ids[0]], 6)
    assert (await searched(gate.as_agent(), payload="order.id:A-7"))[0] == [ids[1]]
    assert (await searched(gate.as_agent(), payload="order:7"))[0] == []
    assert (await searched(gate.as_agent(), payload="doc:7", status="failed")) == ([], 0)


async def test_tasks_are_searched_by_a_label(gate: harness.Gate) -> None:
    listed = await gate.create(requirements={"tags": ["night", "urgent"]})
    named = await gate.create(requirements={"tags": {"team": "blue"}})
    await gate.create()

    assert (await searched(gate.as_agent(), tag="night"))[0] == [listed]
    assert (await searched(gate.as_agent(), tag="team:blue"))[0] == [named]
    assert (await searched(gate.as_agent(), tag="team"))[0] == [named]
    assert (await searched(gate.as_agent(), tag="nig"))[0] == []


async def test_a_search_shows_nobody_the_tasks_of_others(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada", payload={"doc": 7})

    assert (await searched(gate.as_admin(), payload="doc:7"))[0] == [task_id]
    assert (await searched(gate.as_agent("bob"), payload="doc:7"))[0] == []
    assert (await searched(gate.stranger().as_admin(), payload="doc:7"))[0] == []
