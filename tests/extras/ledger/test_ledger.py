"""`asyncgate ledger`: the gate in MemoryGate's role files receipts as they come (spec 20.12, 20.13, H.6)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.backends import Around, open_backend
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.extras.ledger.server.app import LedgerGate
from asyncgate.parts.model.queries import EntryFilter, Query, Rows
from asyncgate.parts.model.stored import Entry
from asyncgate.parts.receipts.sealing import Sealer
from tests.conftest import TOKEN, Served

pytestmark = pytest.mark.anyio
OTHER = "3c9d1f52-7a3e-4d0b-9f43-5b1e6c2a8d70"


@pytest.fixture
async def shelf(backend_url: str) -> AsyncIterator[Served]:
    """A ledger over an empty database."""
    gate = LedgerGate(settings_for_tests(api_key=TOKEN, instance_id="ledger-1"), await open_backend(backend_url))
    async with gate.app.router.lifespan_context(gate.app):
        yield Served(gate)


def receipt(receipt_id: str = "r-1", **more: Any) -> dict[str, Any]:
    return {"receipt_id": receipt_id, "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00Z",
            "from": {"kind": "agent", "id": "delegate"}, "to": {"kind": "agent", "id": "ada"}, "task_id": "T-1",
            "lease_id": None, "parents": [], "body": {"n": 1.0, "text": "é\u0001"}, **more}


def many(*receipts: dict[str, Any]) -> bytes:
    return json.dumps(receipts).encode()


async def ids(shelf: Served, query: str = "") -> list[str]:
    page = await shelf.get(f"/v1/receipts{query}")
    return [row["receipt_id"] for row in page["receipts"]]


async def test_a_receipt_comes_back_byte_by_byte(shelf: Served) -> None:
    text = json.dumps(receipt(), indent=3).encode()

    stored = await shelf.post("/v1/receipts", text)

    answer = await shelf.call("GET", "/v1/receipts/r-1")
    assert answer.content == text
    assert (stored["receipt_id"], stored["tenant_id"]) == ("r-1", shelf.tenant_id)
    assert text in (await shelf.call("GET", "/v1/receipts")).content


@pytest.mark.one_store
async def test_a_ledger_names_its_own_operations_and_no_others(shelf: Served) -> None:
    you = await shelf.get("/v1/whoami")

    assert you["operations"] == sorted(shelf.gate.operations)
    assert "store_receipt" in you["operations"]
    assert "create_task" not in you["operations"]


async def test_storing_again_writes_nothing_and_other_content_is_refused(shelf: Served) -> None:
    await shelf.post("/v1/receipts", receipt())
    rows = await shelf.backend.page(shelf.tenant_id, Rows(Entry))

    again = await shelf.post("/v1/receipts", {**receipt(), "tenant_id": "default", "delivered_at": None})
    other = await shelf.call("POST", "/v1/receipts", receipt(body={"n": 2}))

    assert again["replay"] is True
    assert (other.status, other.json()["error"]) == (409, "receipt_id_collision")
    assert await shelf.backend.page(shelf.tenant_id, Rows(Entry)) == rows


async def test_many_are_stored_at_once_and_each_has_its_own_answer(shelf: Served) -> None:
    await shelf.post("/v1/receipts", receipt("r-2", body={"another": True}))

    sent = many(receipt("r-1"), receipt("r-2"), {"receipt_id": "r-3"}, receipt("r-4"))
    answer = await shelf.post("/v1/receipts", sent)

    told = [(outcome["receipt_id"], outcome.get("error", {}).get("error")) for outcome in answer["results"]]
    assert told == [("r-1", None), ("r-2", "receipt_id_collision"), ("r-3", "invalid_request"), ("r-4", None)]
    assert await ids(shelf) == ["r-2", "r-1", "r-4"]


async def test_a_reader_that_follows_the_cursor_sees_each_receipt_once_although_ids_run_backwards(
        shelf: Served) -> None:
    seen: list[str] = []
    cursor = None
    for n in range(30, 0, -1):
        await shelf.post("/v1/receipts", receipt(f"r-{n:02}"))
        if n % 7 == 0:
            page = await shelf.get("/v1/receipts?limit=5" + (f"&since_receipt_id={cursor}" if cursor else ""))
            seen += [row["receipt_id"] for row in page["receipts"]]
            cursor = page["cursor"]
    while (page := await shelf.get(f"/v1/receipts?limit=5&since_receipt_id={cursor}"))["receipts"]:
        seen += [row["receipt_id"] for row in page["receipts"]]
        cursor = page["cursor"]

    assert seen == [f"r-{n:02}" for n in range(30, 0, -1)]
    assert page["cursor"] == cursor     # an empty page keeps the place
    unknown = await shelf.call("GET", "/v1/receipts?since_receipt_id=nobody")
    assert (unknown.status, unknown.json()["error"]) == (400, "invalid_cursor")


async def test_a_list_is_of_an_inbox_a_task_a_type_or_a_gate(shelf: Served) -> None:
    await shelf.post("/v1/receipts", many(
        receipt("r-1"), receipt("r-2", to={"kind": "worker", "id": "w1"}), receipt("r-3", task_id="T-2"),
        receipt("r-4", asyncgate_instance="asyncgate-7"), receipt("r-5", receipt_type="task.completed")))

    assert await ids(shelf, "?to_kind=worker&to_id=w1") == ["r-2"]
    assert await ids(shelf, "?task_id=T-2") == ["r-3"]
    assert await ids(shelf, "?asyncgate_instance=asyncgate-7") == ["r-4"]
    assert await ids(shelf, "?receipt_type=task.completed&to_id=ada") == ["r-5"]
    assert await ids(shelf, "?limit=2") == ["r-1", "r-2"]


async def test_a_chain_leads_from_a_receipt_to_all_that_caused_it(shelf: Served) -> None:
    await shelf.post("/v1/receipts", many(
        receipt("plan"), receipt("assigned", parents=["plan"]), receipt("accepted", parents=["assigned"]),
        receipt("completed", parents=["accepted", "assigned", "lost"]), receipt("beside", parents=["plan"])))

    chain = await shelf.get("/v1/receipts/completed/chain")

    assert [row["receipt_id"] for row in chain["chain"]] == ["completed", "accepted", "assigned", "plan"]
    assert chain["missing"] == ["lost"]
    assert (await shelf.call("GET", "/v1/receipts/lost/chain")).status == 404


async def test_a_receipt_belongs_to_one_tenant_and_only_the_operator_may_name_another(shelf: Served) -> None:
    key = (await shelf.post("/v1/keys", {"name": "x", "principal_kind": "agent", "principal_id": "delegate",
                                         "role": "agent"}))["api_key"]
    await shelf.post("/v1/receipts", receipt("r-1", tenant_id=OTHER))

    foreign = await shelf.call("POST", "/v1/receipts", receipt("r-2", tenant_id=OTHER), token=key)
    looked = await shelf.call("GET", f"/v1/receipts?tenant={OTHER}", token=key)

    assert (foreign.status, foreign.json()["error"]) == (403, "tenant_mismatch")
    assert (looked.status, looked.json()["error"]) == (403, "tenant_mismatch")
    assert await ids(shelf) == []
    assert await ids(shelf, f"?tenant={OTHER}") == ["r-1"]
    assert (await shelf.call("GET", "/v1/receipts/r-1")).status == 404


async def test_a_tenant_is_named_by_its_id_or_its_name(shelf: Served) -> None:
    """Spec 20.14 files receipts under `tenant-123`."""
    unknown = await shelf.call("POST", "/v1/receipts", receipt("r-0", tenant_id="tenant-123"))
    made = (await shelf.post("/v1/tenants", {"name": "tenant-123"}))["tenant"]
    await shelf.post("/v1/tenants", {"name": "tenant-456"})
    key = (await shelf.post("/v1/keys", {"name": "x", "principal_kind": "agent", "principal_id": "delegate",
                                         "role": "agent", "tenant": "tenant-123"}))["api_key"]

    await shelf.post("/v1/receipts", receipt("r-1", tenant_id="tenant-123"))
    await shelf.post("/v1/receipts", receipt("r-2", tenant_id="tenant-123"), token=key)
    foreign = await shelf.call("POST", "/v1/receipts", receipt("r-3", tenant_id="tenant-456"), token=key)
    both = await shelf.post("/v1/receipts", many(*(receipt("r-4", tenant_id=name) for name in ("tenant-123", made))))

    assert (unknown.status, unknown.json()["error"]) == (404, "tenant_not_found")
    assert (foreign.status, foreign.json()["error"]) == (403, "tenant_mismatch")
    assert {outcome["receipt_id"] for outcome in both["results"]} == {"r-4"}
    assert await ids(shelf, "?tenant=tenant-123") == await ids(shelf, f"?tenant={made}") == ["r-1", "r-2", "r-4"]
    assert (await shelf.get("/v1/receipts/r-1?tenant=tenant-123"))["tenant_id"] == "tenant-123"
    assert await ids(shelf) == await ids(shelf, "?tenant=default") == []


async def test_a_credential_states_its_own_receipts_and_reads_its_own_inbox(shelf: Served) -> None:
    async def key(kind: str, id: str, role: str) -> str:
        made = await shelf.post("/v1/keys", {"name": id, "principal_kind": kind, "principal_id": id, "role": role})
        return str(made["api_key"])
    worker, ada = await key("worker", "w1", "worker"), await key("agent", "ada", "agent")
    mine = receipt("r-1", **{"from": {"kind": "worker", "id": "w1"}})

    await shelf.post("/v1/receipts", mine, token=worker)
    forged = await shelf.call("POST", "/v1/receipts", receipt("r-2"), token=worker)

    assert (forged.status, forged.json()["error"]) == (403, "forbidden")
    inbox = await shelf.get("/v1/receipts", token=ada)
    assert [row["receipt_id"] for row in inbox["receipts"]] == ["r-1"]
    assert (await shelf.get("/v1/receipts", token=worker))["receipts"] == []
    assert (await shelf.call("GET", "/v1/receipts?to_id=bob", token=ada)).status == 403
    assert (await shelf.call("GET", "/v1/receipts", token=None)).status == 401


@pytest.mark.one_store
@pytest.mark.parametrize(("wrong", "code"), [
    ({"receipt_id": "a/b"}, "invalid_request"), ({"receipt_id": ""}, "invalid_request"),
    ({"from": {"kind": "agent"}}, "invalid_request"), ({"created_at": "yesterday"}, "invalid_request"),
    ({"to": {"kind": "agent", "id": "ada", "instance_id": 5}}, "invalid_request"), ({"hash": 5}, "invalid_request"),
    ({"lease_id": 5}, "invalid_request"), ({"schedule_id": []}, "invalid_request"), ({"parents": 5}, "invalid_request"),
    ({"receipt_key": {}}, "invalid_request"), ({"delivered_at": "soon"}, "invalid_request"),
    ({"parents": [f"p{n}" for n in range(11)]}, "too_many_parents"),
    ({"body": {"text": "x" * 70_000}}, "receipt_too_large")])
async def test_what_is_no_receipt_is_refused(shelf: Served, wrong: dict[str, Any], code: str) -> None:
    answer = await shelf.call("POST", "/v1/receipts", receipt(**wrong))

    assert (answer.status, answer.json()["error"]) == (400, code)
    assert await ids(shelf) == []


@pytest.mark.one_store
@pytest.mark.parametrize("body", [b"", b"[", b"[]", b"7", b'{"receipts": 7}', b"\xff"])
async def test_a_body_that_is_none_is_refused(shelf: Served, body: bytes) -> None:
    assert (await shelf.call("POST", "/v1/receipts", body)).status == 400


@pytest.mark.one_store
async def test_a_ledger_has_no_tasks(shelf: Served) -> None:
    assert (await shelf.call("POST", "/v1/tasks", {"type": "demo", "payload": None})).status == 404
    assert (await shelf.get("/v1/health"))["status"] == "healthy"


async def test_a_ledger_seals_what_it_has_filed_and_names_what_was_changed(shelf: Served) -> None:
    sealer = Sealer(shelf.gate.engine)
    await sealer.run()
    await shelf.post("/v1/receipts", many(*(receipt(f"r-{n}") for n in (3, 1, 2))))
    assert await sealer.run() == 1
    assert (await verify_ledger(shelf.backend)).problems == []
    [entry] = [row for row in await shelf.backend.page(shelf.tenant_id, Rows(Entry)) if row.receipt_id == "r-1"]

    class Tampered(Around):
        """The same database, and somebody has changed one word in it."""

        async def page(self, tenant_id: str, query: Query[Any]) -> list[Any]:
            rows = await shelf.backend.page(tenant_id, query)
            if not isinstance(query, EntryFilter):
                return rows
            return [replace(row, content=row.content.replace("plan", "plot")) if row == entry else row for row in rows]

    report = await verify_ledger(Tampered(shelf.backend))

    assert (report.seals, report.receipts, report.unsealed) == (1, 3, 0)
    assert [entry.arrival in problem for problem in report.problems] == [True]


async def key(shelf: Served, kind: str, id: str, role: str) -> str:
    made = await shelf.post("/v1/keys", {"name": id, "principal_kind": kind, "principal_id": id, "role": role})
    return str(made["api_key"])


async def test_a_ledger_says_who_stated_a_receipt_whatever_the_receipt_says(shelf: Served) -> None:
    worker = await key(shelf, "worker", "w1", "worker")
    mine = receipt("r-1", **{"from": {"kind": "worker", "id": "w1"}})
    forged = receipt("r-2", **{"from": {"kind": "worker", "id": "w1"}, "stated_by": {"kind": "worker", "id": "w1"}})

    await shelf.post("/v1/receipts", mine, token=worker)
    await shelf.post("/v1/receipts", forged)

    page = await shelf.get("/v1/receipts")
    assert [row["receipt_id"] for row in page["receipts"]] == ["r-1", "r-2"]
    assert page["stated_by"] == [{"kind": "worker", "id": "w1"}, {"kind": "system", "id": "asyncgate"}]


async def test_with_task_id_who_takes_part_in_a_task_reads_its_whole_story(shelf: Served) -> None:
    """20.13: an agent queries across all components; but nobody lets himself in by naming a task."""
    ada, eve, bob = [await key(shelf, "agent", name, "agent") for name in ("ada", "eve", "bob")]
    await shelf.post("/v1/receipts", many(
        receipt("r-1"), receipt("r-2", to={"kind": "worker", "id": "w1"}),
        receipt("r-3", **{"from": {"kind": "agent", "id": "bob"}, "to": {"kind": "agent", "id": "bob"}})))
    for name, token in (("eve", eve), ("bob", bob)):
        await shelf.post("/v1/receipts", receipt(f"let-{name}-in", task_id="T-1", **{
            "from": {"kind": "agent", "id": name}, "to": {"kind": "agent", "id": "eve"}}), token=token)

    async def seen(token: str, query: str) -> list[str]:
        page = await shelf.get(f"/v1/receipts{query}", token=token)
        return [row["receipt_id"] for row in page["receipts"]]

    assert await seen(ada, "?task_id=T-1") == ["r-1", "r-2", "r-3", "let-eve-in", "let-bob-in"]
    assert await seen(ada, "") == ["r-1"]
    assert await seen(eve, "?task_id=T-1") == ["let-eve-in", "let-bob-in"]      # stated by agents: her inbox, no more
    assert await seen(ada, "?task_id=T-2") == []


@pytest.mark.one_store
async def test_a_ledger_is_described_as_a_ledger(shelf: Served) -> None:
    about = await shelf.get("/v1/config")

    assert (about["receipt_mode"], about["instance_id"]) == ("ledger", "ledger-1")
    assert "lease_based_execution" not in about["capabilities"]
    assert "stated_by" in about["capabilities"]


@pytest.mark.one_store
@pytest.mark.parametrize("spelling", ["memorygate.", "memorygate_"])
async def test_a_ledger_has_tools_under_memorygates_name(shelf: Served, spelling: str) -> None:
    async def called(tool: str, token: str | None = TOKEN, **arguments: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
            "name": spelling + tool, "arguments": arguments}}
        return (await shelf.call("POST", "/mcp", body, token=token)).json()
    worker = await key(shelf, "worker", "w1", "worker")
    mine, other = receipt("r-1", body={}, **{"from": {"kind": "worker", "id": "w1"}}), receipt("r-2", body={"n": 1})

    stored = await called("store_receipt", worker, receipt=mine)
    again = await called("store_receipt", receipts=[mine, other])
    forged = await called("store_receipt", worker, receipt=receipt("r-3", body={}))
    listed = await called("list_receipts", task_id="T-1")

    assert stored["result"]["results"][0]["receipt_id"] == "r-1"
    assert [outcome.get("replay", False) for outcome in again["result"]["results"]] == [True, False]
    assert forged["result"]["results"][0]["error"]["error"] == "forbidden"
    assert listed["result"]["receipts"] == [mine, other]
    assert listed["result"]["stated_by"][0] == {"kind": "worker", "id": "w1"}
    chain = await called("get_receipt_chain", receipt_id="r-1")
    assert chain["result"]["receipt_id"] == "r-1"
    assert (await called("store_receipt", None, receipt=mine))["error"]["data"]["error"] == "unauthenticated"


@pytest.mark.one_store
@pytest.mark.parametrize("value", [b'"a\\u0000"', b'"\\ud800"', b'"\xff"', b"[" * 100 + b"]" * 100, b'{"\\u0000":1}'])
@pytest.mark.parametrize("way", ["list", "member", "tool"])
async def test_what_cannot_be_stored_refuses_its_receipt_alone_and_the_refusal_names_the_member(
        shelf: Served, way: str, value: bytes) -> None:
    good, bad = json.dumps(receipt("r-1")).encode(), json.dumps(receipt("r-2", body="here")).encode()
    both = b"[%b,%b]" % (bad.replace(b'"here"', value), good)
    if way == "tool":
        call = (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"memorygate.store_receipt",'
                b'"arguments":{"receipts":%b}}}' % both)
        answer = (await shelf.call("POST", "/mcp", call)).json()["result"]
    else:
        answer = await shelf.post("/v1/receipts", both if way == "list" else b'{"receipts":%b}' % both)

    wrong, right = answer["results"]
    assert (wrong["receipt_id"], right["receipt_id"], "error" in right) == ("r-2", "r-1", False)
    assert wrong["error"]["message"].startswith("receipts[0].body")
    assert await ids(shelf) == ["r-1"]


@pytest.mark.one_store
async def test_an_mcp_client_finds_the_tools_of_a_ledger(shelf: Served) -> None:
    headers = [("accept", "application/json, text/event-stream"), ("content-type", "application/json")]
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    hello = await shelf.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin},
                             headers=headers)
    tools = await shelf.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
                             headers=[*headers, ("mcp-protocol-version", "2025-06-18")])

    assert hello.json()["result"]["serverInfo"]["name"] == "asyncgate-ledger"
    assert {tool["name"] for tool in tools.json()["result"]["tools"]} == {
        "memorygate.store_receipt", "memorygate.list_receipts", "memorygate.get_receipt_chain"}
