"""Real peers of the second and third generation: bare JSON-RPC at /mcp, byte for byte.

They know no handshake and no session.  They read `result` as the raw reply, take any `error` member for a failure, send
explicit nulls, arguments that nobody declared, and sometimes their token among the arguments.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncgate.parts.operations import OPERATIONS
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
NIL = "00000000-0000-0000-0000-000000000000"
HTTPX = [("content-type", "application/json"), ("accept", "*/*"), ("user-agent", "python-httpx/0.27.0")]
URLLIB = [("content-type", "application/json"), ("accept-encoding", "identity"), ("connection", "close")]
CLAIM = f'{{"worker_id":"cognigate-1","max_tasks":1,"tenant_id":"{NIL}"}}'


async def say(served: Any, tool: str, arguments: str, headers: Any = HTTPX, **more: Any) -> Any:
    """Call a tool as these programs do: with the id 1, always."""
    body = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}'
    return await served.call("POST", "/mcp", body.encode(), headers=headers, **more)


async def ok(served: Any, tool: str, arguments: str, headers: Any = HTTPX, **more: Any) -> Any:
    """Call a tool and read the result as these programs do."""
    answer = await say(served, tool, arguments, headers, **more)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    data = answer.json()
    assert "error" not in data, data
    assert (data["jsonrpc"], data["id"]) == ("2.0", 1)
    return data["result"]


async def refusal(served: Any, tool: str, arguments: str, **more: Any) -> tuple[int, str]:
    """Call a tool that refuses for good, and return the integer and the word of the refusal."""
    answer = await say(served, tool, arguments, **more)
    data = answer.json()
    assert "result" not in data
    error = data["error"]
    assert error["message"] == error["data"]["detail"]
    assert error["data"]["code"] == error["data"]["error"]
    # Real workers repeat what fails with 200 for 15 seconds, and stop at once at 4xx.
    assert answer.status == {-32602: 400, -32003: 403, -32004: 404, -32009: 409}[error["code"]], answer
    return error["code"], error["data"]["code"]


async def leased(served: Any) -> dict[str, Any]:
    await ok(served, "asyncgate.create_task", '{"type":"demo","payload":{"profile":"default"},"agent_id":"ada"}')
    result = await ok(served, "asyncgate.lease_next", CLAIM)
    (offer,) = result["tasks"]
    assert isinstance(offer, dict)
    return offer


def of(offer: dict[str, Any], arguments: str) -> str:
    """Put the ids of this test into arguments that were seen elsewhere."""
    for name, value in {"LEASE": offer["lease_id"], "TASK": offer["task_id"], "TENANT": NIL}.items():
        arguments = arguments.replace(name, value)
    return arguments


WHO = '"worker_id":"cognigate-1","task_id":"TASK","lease_id":"LEASE"'
PROGRESS = (f'{{{WHO},"progress":{{"status":"running","summary":"","artifact_pointers":[],'
            '"timestamp":"2026-02-20T10:00:00+00:00"},"tenant_id":"TENANT"}')
RENEW = ('{"worker_id":"cognigate-1","task_id":null,"lease_id":"LEASE","extend_by_seconds":null,'
         '"tenant_id":"TENANT"}')
COMPLETE = (f'{{{WHO},"result":{{"summary":"done","artifact_pointers":[]}},"artifacts":null,'
            '"tenant_id":"TENANT"}')
POINTED = (f'{{{WHO},"result":{{"summary":"done","artifact_pointers":[]}},"artifacts":{{"pointers":[{{"sink_id":'
           '"local","uri":"file:///out/1.md","metadata":{}}]},"tenant_id":"TENANT"}')
FAIL = (f'{{{WHO},"error":{{"code":"EXECUTION_FAILED","message":"the tool said no"}},"retryable":false,'
        '"tenant_id":"TENANT"}')


async def test_an_empty_claim_is_a_result_with_an_empty_list(served: Any) -> None:
    result = await ok(served, "asyncgate.lease_next", CLAIM)

    assert result["tasks"] == []


async def test_the_worker_claims_reports_renews_and_completes(served: Any) -> None:
    offer = await leased(served)

    await ok(served, "asyncgate.report_progress", of(offer, PROGRESS))
    renewed = await ok(served, "asyncgate.renew_lease", of(offer, RENEW))
    await ok(served, "asyncgate.complete", of(offer, POINTED))

    assert offer["payload"] == {"profile": "default"}
    assert offer["caused_by_receipt_id"] == offer["obligation_receipt_id"]
    assert renewed["expires_at"] >= offer["expires_at"]
    task = await ok(served, "asyncgate.get_task", of(offer, '{"task_id":"TASK"}'))
    assert (task["status"], task["obligation_open"]) == ("succeeded", False)
    assert task["result"]["artifacts"] == [{"sink_id": "local", "uri": "file:///out/1.md", "metadata": {}}]


async def test_the_worker_completes_with_null_artifacts_and_its_retries_get_the_first_answer(served: Any) -> None:
    offer = await leased(served)
    first = await ok(served, "asyncgate.complete", of(offer, COMPLETE))

    async with served.unchanged():
        assert await ok(served, "asyncgate.complete", of(offer, COMPLETE)) == first


async def test_the_worker_fails_for_good(served: Any) -> None:
    offer = await leased(served)

    await ok(served, "asyncgate.fail", of(offer, FAIL))

    task = await ok(served, "asyncgate.get_task", of(offer, '{"task_id":"TASK"}'))
    assert task["status"] == "failed"
    assert task["result"]["error"] == {"code": "EXECUTION_FAILED", "message": "the tool said no"}


async def test_a_lost_lease_is_an_error_with_a_word_and_an_integer(served: Any) -> None:
    offer = await leased(served)
    await ok(served, "asyncgate.cancel_task", of(offer, '{"task_id":"TASK","agent_id":"ada","reason":null}'))

    async with served.unchanged():
        refusals = [await refusal(served, f"asyncgate.{tool}", of(offer, arguments)) for tool, arguments in (
            ("report_progress", PROGRESS), ("complete", COMPLETE), ("fail", FAIL), ("renew_lease", RENEW))]

    assert set(refusals) == {(-32009, "lease_invalid_or_expired")}


async def test_the_demo_client_creates_claims_and_completes_with_a_list_of_artifacts(served: Any) -> None:
    made = await ok(served, "asyncgate.create_task",
                    '{"type":"golden.path","payload":{"goal":"x"},"payload_pointer":null,"expected_outcome_kind":null,'
                    f'"expected_artifact_mime":null,"agent_id":"planner","principal_ai":"planner","tenant_id":"{NIL}",'
                    '"trace_id":"t-1"}', URLLIB)
    result = await ok(served, "asyncgate.lease_next",
                      '{"worker_id":"fallback-worker","capabilities":[],"accept_types":null,"max_tasks":1,'
                      f'"lease_ttl_seconds":5,"tenant_id":"{NIL}"}}', URLLIB)
    (offer,) = result["tasks"]
    await ok(served, "asyncgate.complete", of(offer, '{"worker_id":"fallback-worker","task_id":"TASK",'
             '"lease_id":"LEASE","result":{"ok":true},"artifacts":[{"type":"file","uri":"file:///x","mime":"text/plain","size_bytes":1,'
             '"checksum":"sha256:0","location":"local"}]}'), URLLIB)

    assert offer["task_id"] == made["task_id"]
    duty = json.dumps({"parent_receipt_id": offer["obligation_receipt_id"]})
    assert (await ok(served, "asyncgate.check_terminator", duty, URLLIB))["has_terminator"] is True


async def test_the_result_also_has_what_a_client_of_the_standard_reads(served: Any) -> None:
    result = await ok(served, "asyncgate.create_task", '{"type":"demo","payload":0}')

    plain = {name: result.pop(name) for name in ("task_id", "status")}
    assert result["structuredContent"] == json.loads(result["content"][0]["text"]) == plain
    assert result["isError"] is False


async def test_tools_are_listed_without_a_handshake(served: Any) -> None:
    answer = await served.post("/mcp?tools=all", {"jsonrpc": "2.0", "id": "x", "method": "tools/list"}, headers=HTTPX)

    assert answer["id"] == "x"
    assert {tool["name"] for tool in answer["result"]["tools"]} == {f"asyncgate.{name}" for name in OPERATIONS}


async def test_the_token_may_be_an_argument(served: Any) -> None:
    arguments = f'{{"type":"demo","payload":0,"agent_id":"ada","auth_token":"{TOKEN}"}}'

    alone = await ok(served, "asyncgate.create_task", arguments, token=None)
    twice = await ok(served, "asyncgate.create_task", arguments)

    for made in (alone, twice):
        assert TOKEN not in (await served.call("GET", f"/v1/tasks/{made['task_id']}")).content.decode()


BAD, TWO = 'Bearer error="invalid_token"', 'Bearer error="invalid_request"'


@pytest.mark.parametrize(("arguments", "token", "challenge"), [
    ('{"type":"demo"}', None, "Bearer"), ('{"type":"demo","auth_token":"wrong"}', None, BAD),
    ('{"type":"demo"}', "wrong", BAD), ('{"type":"demo","auth_token":"wrong"}', TOKEN, TWO),
    ('{"type":"demo","auth_token":null}', None, "Bearer")])
async def test_no_token_a_wrong_one_and_two_different_ones_are_nobodys(
        served: Any, arguments: str, token: str | None, challenge: str) -> None:
    async with served.unchanged():
        answer = await say(served, "asyncgate.create_task", arguments, token=token)

    assert (answer.status, answer.headers["www-authenticate"]) == (401, challenge)
    told = answer.json()["error"]       # a token that the headers show is judged before it is known who speaks
    assert told == "unauthenticated" or told["data"]["code"] == "unauthenticated"
    assert ("two different" in answer.content.decode()) is (challenge == TWO)


async def test_what_may_pass_is_no_4xx(serve: Any) -> None:
    served = await serve(max_waiting_per_principal=1)
    claim = asyncio.create_task(ok(served, "asyncgate.lease_next", '{"worker_id":"w1","wait_seconds":20}'))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while served.engine.waiting.count == 0:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)

        answer = await say(served, "asyncgate.lease_next", '{"worker_id":"w1","wait_seconds":20}')
        await ok(served, "asyncgate.create_task", '{"type":"demo","payload":0}')
        await claim

    assert (answer.status, answer.json()["error"]["code"]) == (200, -32010)


async def test_a_stranger_is_not_read_at_length_and_a_wrong_token_not_at_all(served: Any) -> None:
    arguments = f'{{"type":"demo","payload":"{"x" * 300_000}","auth_token":"{TOKEN}"}}'

    long = await say(served, "asyncgate.create_task", arguments, token=None)
    wrong = await say(served, "asyncgate.create_task", arguments, token="wrong")

    assert (long.status, wrong.status) == (413, 401)
    await ok(served, "asyncgate.create_task", arguments)


async def test_health_needs_no_credential(served: Any) -> None:
    assert (await ok(served, "asyncgate.health", "{}", token=None))["service"] == "AsyncGate"


async def test_another_tenant_is_refused_and_the_default_one_is_tolerated(served: Any) -> None:
    other = '{"type":"demo","tenant_id":"11111111-1111-4111-8111-111111111111"}'

    assert await refusal(served, "asyncgate.create_task", other) == (-32003, "tenant_mismatch")
    await ok(served, "asyncgate.create_task", '{"type":"demo","payload":0,"tenant_id":"default"}')


@pytest.mark.parametrize(("tool", "arguments", "expected"), [
    ("asyncgate.get_task", '{"task_id":"nobody"}', (-32004, "task_not_found")),
    ("asyncgate.create_task", "{}", (-32602, "invalid_request")),
    ("asyncgate.create_task", "[]", (-32602, "invalid_request")),
    ("asyncgate.no_such_tool", "{}", (-32602, "invalid_request")),
    ("asyncgate.complete", '{"worker_id":"w"}', (-32602, "invalid_request")),
])
async def test_other_refusals_have_an_integer_by_their_class(
        served: Any, tool: str, arguments: str, expected: tuple[int, str]) -> None:
    async with served.unchanged():
        assert await refusal(served, tool, arguments) == expected


@pytest.mark.parametrize(("body", "expected"), [
    ("nonsense", -32700), ("[]", -32700), ("", -32700), ('{"jsonrpc":"2.0","id":1}', -32601),
    ('{"jsonrpc":"2.0","id":1,"method":"receiptgate.health"}', -32601)])
async def test_what_is_no_call_is_an_error_of_json_rpc(served: Any, body: str, expected: int) -> None:
    answer = await served.call("POST", "/mcp", body.encode(), headers=HTTPX)

    assert answer.json()["error"]["code"] == expected


async def test_a_client_of_the_standard_is_not_taken_for_a_peer(served: Any) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "asyncgate.get_config"}}
    old = await served.post("/mcp", call, headers=[HTTPX[0], ("accept", "application/json, text/event-stream")])
    new = await served.call("POST", "/mcp", call, headers=[("mcp-protocol-version", "2025-11-25"), *HTTPX])

    assert "receipt_mode" not in old["result"]
    assert "receipt_mode" not in new.json().get("result", {})


async def test_a_waiting_claim_is_answered_when_work_arrives(served: Any) -> None:
    claim = asyncio.create_task(ok(served, "asyncgate.lease_next", '{"worker_id":"w1","wait_seconds":20}'))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while served.engine.waiting.count == 0:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)

        made = await ok(served, "asyncgate.create_task", '{"type":"demo","payload":0}')

        assert [offer["task_id"] for offer in (await claim)["tasks"]] == [made["task_id"]]
