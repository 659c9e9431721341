"""Members that nobody knows are named, and items of a batch that cannot be read are refused by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from asyncgate.parts.model.errors import InvalidRequest
from asyncgate.parts.model.members import Reader, Unreadable, add_warnings, describe_problem, find_struct, walk_type
from asyncgate.parts.model.wire import CreateTask
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio

DEMO = {"type": "demo", "payload": None, "agent_id": "ada"}
MEANT = "unknown member reslt; did you mean result?"
HEADER = "x-asyncgate-warning"


async def bare(served: Any, name: str, /, **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask in the dialect of peers; return what it answers, and the headers."""
    call = {"name": f"asyncgate.{name}", "arguments": fields}
    answer = await served.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    return answer.json(), answer.headers


async def tool(served: Any, name: str, /, **fields: Any) -> dict[str, Any]:
    """Ask as an MCP client does."""
    call = {"name": f"asyncgate.{name}", "arguments": fields}
    headers = [("accept", "application/json, text/event-stream"), ("mcp-protocol-version", "2025-11-25"),
               ("content-type", "application/json")]
    answer = await served.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
                               headers=headers)
    told: dict[str, Any] = answer.json()["result"]
    return told


async def test_rest_names_a_misspelt_member_in_the_reply_and_in_a_header(served: Any) -> None:
    under = await served.leased()

    answer = await served.call("POST", f"/v1/tasks/{under['task_id']}/complete", {
        "lease_id": under["lease_id"], "worker_id": "w1", "reslt": {"n": 1}})

    assert answer.json() | {"warnings": [MEANT], "ok": True} == answer.json()
    assert answer.headers[HEADER] == MEANT


async def test_bare_json_rpc_names_it_too(served: Any) -> None:
    under = await served.leased()

    answer, headers = await bare(served, "complete", task_id=under["task_id"], lease_id=under["lease_id"],
                                 worker_id="w1", reslt={"n": 1})

    assert answer["result"]["warnings"] == [MEANT]
    assert json.loads(answer["result"]["content"][0]["text"])["warnings"] == [MEANT]
    assert headers[HEADER] == MEANT


async def test_a_refusal_names_them_as_well(served: Any) -> None:
    fields = {"lease_id": "x", "worker_id": "w1", "errror": "no", "error": "yes"}

    answer = await served.call("POST", "/v1/tasks/none/fail", fields)
    told, headers = await bare(served, "fail", task_id="none", **fields)

    assert answer.status == 404
    assert answer.json()["warnings"] == told["error"]["data"]["warnings"] == [
        "unknown member errror; did you mean error?"]
    assert answer.headers[HEADER] == headers[HEADER]


async def test_a_request_without_any_has_neither(served: Any) -> None:
    answer = await served.call("POST", "/v1/tasks", DEMO)

    assert set(answer.json()) == {"task_id", "status"}
    assert HEADER not in answer.headers


async def test_mcp_refuses_what_its_schema_does_not_have_also_inside(served: Any) -> None:
    async with served.unchanged():
        top = await tool(served, "create_task", **DEMO, prioritty=1)
        inner = await tool(served, "create_task", **DEMO, timeouts={"lease_tll": 5})

    for told, text in ((top, "unknown member prioritty; did you mean priority?"),
                       (inner, "unknown member timeouts.lease_tll; did you mean timeouts.lease_ttl?")):
        assert told["isError"]
        assert text in told["content"][0]["text"]


@pytest.mark.parametrize("members", [
    {"timeouts": {"lease_tll": 5}}, {"created_by": {"kind": "agent", "id": "ada", "idd": "x"}}, {"prio": 3}])
async def test_nested_ones_are_named_with_their_place(served: Any, members: dict[str, Any]) -> None:
    answer = await served.call("POST", "/v1/tasks", {**DEMO, **members})

    (name, inner), = members.items()
    place = f"{name}.{list(inner)[-1]}" if isinstance(inner, dict) else name
    assert answer.status == 200
    assert answer.json()["warnings"][0].startswith(f"unknown member {place}")


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/leases/claim", "/v1/tasks/batch"])
async def test_a_member_without_a_name_is_named_like_any_other(served: Any, path: str) -> None:
    known: Any = {"/v1/tasks": DEMO, "/v1/leases/claim": {"worker_id": "w"}, "/v1/tasks/batch": {"tasks": [DEMO]}}[path]

    answer = await served.call("POST", path, {**known, "": []})

    assert answer.status == 200, answer
    assert answer.json()["warnings"][0].startswith("unknown member")


@pytest.mark.parametrize("name", ["capabilites", "Capabilities", "capability"])
async def test_a_misspelt_requirement_is_named_or_refused_as_any_other_member(served: Any, name: str) -> None:
    asked = {**DEMO, "requirements": {name: ["ocr"], "gpu": True}}

    answer = (await served.call("POST", "/v1/tasks", asked)).json()
    batch = await served.post("/v1/tasks/batch", {"agent_id": "ada", "tasks": [DEMO, asked]})
    peers, _ = await bare(served, "create_task", **asked)
    strict = await tool(served, "create_task", **asked)

    meant = f"unknown member requirements.{name}; did you mean requirements.capabilities?"
    assert answer["warnings"] == peers["result"]["warnings"] == [meant]
    assert batch["warnings"] == [f"tasks[1]: {meant}"]
    assert strict["isError"]
    assert meant in strict["content"][0]["text"]


@pytest.mark.parametrize("requirements", [
    {"tags": ["urgent"], "gpu": {"memory": 8}}, {"capabilities": ["ocr"], "capability": "ocr"},
    {f"capabilitie{n}": n for n in range(9)}])
async def test_other_requirements_are_kept_and_nothing_is_said(serve: Any, requirements: dict[str, Any]) -> None:
    served = await serve(unknown_members="refuse")

    made = await tool(served, "create_task", **DEMO, requirements=requirements)
    task = (await served.call("GET", f"/v1/tasks/{made['structuredContent']['task_id']}")).json()

    assert "warnings" not in made["structuredContent"]
    assert task["requirements"] == requirements


@pytest.mark.parametrize("path", [
    "/v1/tasks?statuss=queued", "/v1/receipts?from_id=ada", "/v1/leases?worker_id=w1&staus=live",
    "/v1/obligations/open?agent_id=ada&limitt=1", "/v1/keys?rol=admin", "/v1/audit?severty=critical",
    "/v1/tenants?nam=x"])
async def test_the_filters_of_lists_are_refused(served: Any, path: str) -> None:
    answer = await served.call("GET", path)

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")
    assert "unknown member" in answer.json()["message"]


async def test_members_are_named_below_names_that_the_caller_chooses(served: Any) -> None:
    claim = await served.call("POST", "/v1/leases/claim", {
        "worker_id": "w1", "types": {"ocr.scan": {"descripton": "reads"}, "demo": {"description": "fine"}}})
    rules = [{"42": {"weight": 0}}, {"42": {"wieght": 3}}]
    refused = [await served.call("POST", "/v1/task-limits", {"name": "customer", "overrides": each}) for each in rules]

    assert claim.json()["warnings"] == ["unknown member types.ocr.scan.descripton; did you mean "
                                        "types.ocr.scan.description?"]
    assert "overrides[...].weight" in refused[0].json()["message"]
    assert "unknown" not in refused[0].json()["message"]
    assert refused[1].json()["message"] == "unknown member overrides.42.wieght; did you mean overrides.42.weight?"


async def test_administration_refuses(served: Any) -> None:
    key = {"name": "reader", "principal_kind": "worker", "principal_id": "w1"}

    async with served.unchanged():
        answer = await served.call("POST", "/v1/keys", {**key, "expires_in": 60})
        told, _ = await bare(served, "issue_key", **key, expires_in=60)

    assert answer.status == 400
    assert "unknown member expires_in" in answer.json()["message"]
    assert told["error"]["data"]["code"] == "invalid_request"


def test_every_list_and_all_administration_refuse() -> None:
    refusing = {name for name, op in OPERATIONS.items() if op.reader.refuses}

    assert {name for name in OPERATIONS if name.startswith("list_")} <= refusing
    assert {"issue_key", "set_limits", "run_archive", "import_receipts", "get_task_history"} <= refusing
    assert not {"create_task", "complete", "lease_next", "renew_lease", "fail", "get_task", "bootstrap"} & refusing


async def test_a_setting_refuses_them_everywhere_or_ignores_them(serve: Any) -> None:
    refusing, ignoring = await serve(unknown_members="refuse"), await serve(unknown_members="ignore")
    asked = {**DEMO, "prioritty": 1}

    refused, taken = await refusing.call("POST", "/v1/tasks", asked), await ignoring.call("POST", "/v1/tasks", asked)

    assert (refused.status, taken.status) == (400, 200)
    assert "warnings" not in taken.json()
    assert HEADER not in taken.headers
    assert (await bare(refusing, "create_task", **asked))[0]["error"]["data"]["code"] == "invalid_request"
    assert (await ignoring.call("GET", "/v1/tasks?statuss=queued")).status == 400


async def test_a_query_beside_a_body_is_heard_or_named(served: Any) -> None:
    answer = await served.call("POST", "/v1/tasks?principal_id=ada&wait=3", {"type": "demo", "payload": None})

    assert answer.json()["warnings"] == ["unknown member wait"]


async def test_a_null_says_nothing_so_it_is_not_named(served: Any) -> None:
    answer = await served.call("POST", "/v1/tasks", {**DEMO, "trace": None})

    assert "warnings" not in answer.json()


async def test_names_cannot_break_out_of_the_header_and_are_bounded(served: Any) -> None:
    strange = {"a\r\nset-cookie: x": 1, "é" * 5000: 1, **{f"member-{n}": n for n in range(50)}}

    answer = await served.call("POST", "/v1/tasks", {**DEMO, **strange})

    header = answer.headers[HEADER]
    assert answer.status == 200
    assert len(answer.json()["warnings"]) == 10
    assert header.isascii()
    assert header.isprintable()
    assert len(header) <= 1000


async def test_the_token_that_a_peer_sends_as_an_argument_is_known(served: Any) -> None:
    told, headers = await bare(served, "create_task", **DEMO, auth_token="anything")

    assert "warnings" not in told.get("result", {})
    assert HEADER not in headers


def test_a_reply_that_has_warnings_keeps_them() -> None:
    assert json.loads(add_warnings(b'{"warnings":["one"]}', ("two",))) == {"warnings": ["one", "two"]}


def test_what_is_missing_is_told_beside_what_is_unknown() -> None:
    with pytest.raises(InvalidRequest, match="missing required field `type`; unknown member typ; did you mean type"):
        Reader(CreateTask).body(b'{"typ":"demo"}')


BAD: list[Any] = [7, None, "x", [], {"type": 5}, {}, {"type": "demo", "payload": None, "max_attempts": 0},
       {"type": "demo", "payload": None, "timeouts": {"deadline": "soon"}}]


@pytest.mark.parametrize("bad", BAD)
async def test_an_item_of_a_bad_shape_is_refused_by_itself(served: Any, bad: Any) -> None:
    good = {"type": "demo", "payload": None}
    asked = {"agent_id": "ada", "tasks": [good, bad, good]}

    replies = [await served.post("/v1/tasks/batch", asked),
               (await bare(served, "create_tasks", **asked))[0]["result"],
               (await tool(served, "create_tasks", **asked))["structuredContent"]]

    for reply in replies:
        first, second, third = reply["results"]
        assert first["status"] == third["status"] == "queued"
        assert second["error"]["error"] == "invalid_request"
        assert "tasks[1]" in second["error"]["message"]


async def test_an_item_that_cannot_be_read_says_which_task_it_named(served: Any) -> None:
    good, bad = await served.leased(), await served.leased()
    done = {"task_id": good["task_id"], "lease_id": good["lease_id"]}

    reply = await served.post("/v1/tasks/complete-batch", {"worker_id": "w1", "tasks": [
        done, {"task_id": bad["task_id"], "lease_id": bad["lease_id"], "result_summary": 5}]})

    first, second = reply["results"]
    assert first["status"] == "succeeded"
    assert (second["task_id"], second["error"]["error"]) == (bad["task_id"], "invalid_request")


async def test_unknown_members_of_items_are_named_with_their_place(served: Any) -> None:
    item = {"type": "demo", "payload": None}

    reply = await served.post("/v1/tasks/batch", {"agent_id": "ada", "tasks": [item, {**item, "prioritty": 2}]})
    strict = await tool(served, "create_tasks", agent_id="ada", tasks=[item, {**item, "prioritty": 2}])

    assert reply["warnings"] == ["tasks[1]: unknown member prioritty; did you mean priority?"]
    assert [item.get("status") for item in reply["results"]] == ["queued", "queued"]
    assert [item.get("status") for item in strict["structuredContent"]["results"]] == ["queued", None]


@pytest.mark.parametrize("name", [" ada", "a\u200bda", "a\U000e0041da", "a\nda"])
async def test_a_name_that_is_none_is_refused_in_words(served: Any, name: str) -> None:
    rest = (await served.call("POST", "/v1/tasks", DEMO | {"type": name})).json()
    batch = (await served.call("POST", "/v1/tasks/batch", {"tasks": [DEMO | {"type": name}]})).json()
    peers, _ = await bare(served, "create_task", **DEMO | {"type": name})
    told = [rest["message"], json.dumps(batch), peers["error"]["message"]]

    assert [text for text in told if "Expected a name without invisible characters" not in text or "x00" in text] == []


@pytest.mark.parametrize("tasks", [[], None, {}, "x", [{"type": "demo", "payload": None}] * 501])
async def test_what_is_no_batch_is_refused_as_a_whole(served: Any, tasks: Any) -> None:
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks/batch", {"agent_id": "ada", "tasks": tasks})

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")


async def test_a_schedule_that_cannot_be_read_spares_the_others(served: Any) -> None:
    reply = await served.post("/v1/schedules/report", {"worker_id": "clock", "schedules": [
        {"schedule_id": "nightly"}, {"schedule_id": "hourly", "interval_seconds": "often"}]})

    assert reply["unknown"] == ["nightly"]
    assert "schedules[1]" in reply["refused"][0]["message"]


# Words of which there are few.


def spoil_words(kind: type[msgspec.Struct]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield objects of a type that have one member alone, with a word that does not exist; and those that do."""
    hints = get_type_hints(kind)
    for name, written in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        hint = hints[name]
        kinds, inner = {get_origin(part) for part in walk_type(hint)}, find_struct(hint)
        words = [str(word) for part in walk_type(hint) if get_origin(part) is Literal for word in get_args(part)]
        if words:
            yield {written: "nonsense"}, words
        for spoilt, known in spoil_words(inner) if inner else ():
            yield {written: [spoilt] if list in kinds else {"x": spoilt} if dict in kinds else spoilt}, known


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_word_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    takes = OPERATIONS[name].takes
    for body, words in spoil_words(takes):
        try:
            read, _ = Reader(takes).body(json.dumps(body).encode())
            [unreadable] = next(iter(filter(None, (getattr(read, member, None) for member in body))))
            assert isinstance(unreadable, Unreadable), body
            message = str(unreadable.problem)
        except msgspec.ValidationError as wrong:
            message = describe_problem(wrong, takes)

        assert f": one of {', '.join(words)}" in message, (body, message)
