"""Real peers, byte for byte: the bodies that existing workers and clients send, and the answers that they need.

Each request is what one generation of these programs puts on the wire, in its order of members, with its explicit
nulls and its spelling of artifacts.  They stop working on anything but what is expected here: a 204 for an empty claim,
another status than 200 for a heartbeat, a 5xx that they repeat for ever.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
NIL = "00000000-0000-0000-0000-000000000000"
# What these programs send: the first two speak through httpx, which names the type; the last is a bare urllib.
HTTPX = [("content-type", "application/json"), ("accept", "*/*"), ("user-agent", "python-httpx/0.27.0")]
URLLIB = [("content-type", "application/json"), ("accept-encoding", "identity"), ("connection", "close")]


def of(offer: dict[str, Any], body: str, tenant: str = NIL) -> str:
    """Put the ids of this test into a body that was seen elsewhere."""
    for name, value in {"LEASE": offer["lease_id"], "TASK": offer["task_id"], "TENANT": tenant}.items():
        body = body.replace(name, value)
    return body


async def say(served: Any, path: str, body: str, headers: Any = HTTPX) -> Any:
    """POST a body as it is, and return the answer with its JSON."""
    answer = await served.call("POST", path, body.encode(), headers=headers)
    assert answer.headers["content-type"] == "application/json"
    return answer


async def ok(served: Any, path: str, body: str, headers: Any = HTTPX) -> Any:
    """POST a body as it is and expect what every peer takes for success: 200 with an object."""
    answer = await say(served, path, body, headers)
    assert answer.status == 200, answer
    reply = answer.json()
    assert isinstance(reply, dict)
    return reply


async def state(served: Any, task_id: str) -> dict[str, Any]:
    task: dict[str, Any] = await served.get(f"/v1/tasks/{task_id}")
    return task


async def queued(served: Any, body: str = '{"type":"demo","payload":{"profile":"default"},"agent_id":"ada"}') -> str:
    return str((await ok(served, "/v1/tasks", body))["task_id"])


# The REST worker of the first generation: no capabilities, no task id in its bodies, heartbeats without a body.

CLAIM = '{"worker_id":"cognigate-1","max_tasks":1}'
WHO = '"worker_kind":"worker","worker_id":"cognigate-1","lease_id":"LEASE"'
POINTER = '{"sink_id":"local","uri":"file:///out/1.md","metadata":{}}'
PROGRESS = (f'{{{WHO},"progress":{{"status":"running","summary":"","artifact_pointers":[],'
            '"timestamp":"2026-01-20T10:00:00.000000+00:00"}}')
COMPLETE = (f'{{{WHO},"result":{{"summary":"done","artifact_pointers":[{POINTER}]}},'
            f'"artifacts":{{"pointers":[{POINTER}]}}}}')
BARE_COMPLETE = f'{{{WHO},"result":{{"summary":"done","artifact_pointers":[]}}}}'
FAIL = f'{{{WHO},"error":{{"code":"EXECUTION_FAILED","message":"the tool said no"}},"retryable":false}}'


async def first_lease(served: Any) -> dict[str, Any]:
    await queued(served)
    (offer,) = (await ok(served, "/v1/leases/claim", CLAIM))["tasks"]
    assert isinstance(offer, dict)
    return offer


async def test_an_empty_claim_is_200_with_an_empty_list(served: Any) -> None:
    assert await ok(served, "/v1/leases/claim", CLAIM) == {"tasks": []}


async def test_the_first_generation_claims_reports_and_completes_with_pointers(served: Any) -> None:
    offer = await first_lease(served)
    task = f"/v1/tasks/{offer['task_id']}"

    assert offer["payload"] == {"profile": "default"}
    assert isinstance(offer["requirements"], dict | None)
    assert (await ok(served, f"{task}/progress", of(offer, PROGRESS)))["ok"] is True
    assert (await state(served, offer["task_id"]))["status"] == "running"
    assert (await ok(served, f"{task}/complete", of(offer, COMPLETE)))["ok"] is True

    ended = await state(served, offer["task_id"])
    assert (ended["status"], ended["obligation_open"]) == ("succeeded", False)
    assert ended["result"]["artifacts"] == [{"sink_id": "local", "uri": "file:///out/1.md", "metadata": {}}]
    assert ended["result"]["result"]["summary"] == "done"


async def test_its_completion_without_artifacts_succeeds_and_stays_owed(served: Any) -> None:
    offer = await first_lease(served)

    await ok(served, f"/v1/tasks/{offer['task_id']}/complete", of(offer, BARE_COMPLETE))

    ended = await state(served, offer["task_id"])
    assert (ended["status"], ended["obligation_open"]) == ("succeeded", True)


async def test_its_retries_after_a_lost_answer_get_the_first_answer_again(served: Any) -> None:
    offer = await first_lease(served)
    path = f"/v1/tasks/{offer['task_id']}/complete"
    first = await ok(served, path, of(offer, COMPLETE))

    async with served.unchanged():
        for _ in range(4):
            assert await ok(served, path, of(offer, COMPLETE)) == first


async def test_it_fails_a_task_for_good(served: Any) -> None:
    offer = await first_lease(served)

    assert (await ok(served, f"/v1/tasks/{offer['task_id']}/fail", of(offer, FAIL)))["ok"] is True

    ended = await state(served, offer["task_id"])
    assert ended["status"] == "failed"
    assert ended["result"]["error"] == {"code": "EXECUTION_FAILED", "message": "the tool said no"}


async def test_its_heartbeat_without_a_body_is_exactly_200(served: Any) -> None:
    offer = await first_lease(served)

    answer = await served.call("POST", f"/v1/leases/{offer['lease_id']}/extend", None, headers=HTTPX[1:])

    assert answer.status == 200
    assert answer.json()["expires_at"] >= offer["expires_at"]
    (held,) = (await served.get("/v1/leases?worker_id=cognigate-1"))["leases"]
    assert held["renewals"] == 1


async def test_a_lost_lease_is_a_4xx_with_a_text_so_that_it_stops_at_once(served: Any) -> None:
    offer = await first_lease(served)
    await ok(served, f"/v1/tasks/{offer['task_id']}/cancel", '{"reason":"enough"}')

    async with served.unchanged():
        answers = [await say(served, f"/v1/tasks/{offer['task_id']}/{verb}", of(offer, body))
                   for verb, body in (("progress", PROGRESS), ("complete", COMPLETE), ("fail", FAIL))]
        answers.append(await say(served, f"/v1/leases/{offer['lease_id']}/extend", ""))

    assert {answer.status for answer in answers} == {409}
    assert {answer.json()["error"] for answer in answers} == {"lease_invalid_or_expired"}
    assert all(isinstance(answer.json()["detail"], str) for answer in answers)


async def test_its_health_check_has_no_version_in_its_path_and_no_credential(served: Any) -> None:
    for path in ("/health", "/v1/health"):
        answer = await served.call("GET", path, token=None, headers=HTTPX)
        assert (answer.status, answer.json()["status"], answer.json()["service"]) == (200, "healthy", "AsyncGate")


# The same worker, second generation, on REST: task and tenant in the bodies, nulls where it has nothing to say.


@pytest.mark.parametrize("tenant", [NIL, "default"])
async def test_the_second_generation_names_task_and_tenant_everywhere(served: Any, tenant: str) -> None:
    await queued(served)
    claim = f'{{"worker_id":"cognigate-1","max_tasks":1,"tenant_id":"{tenant}"}}'
    (offer,) = (await ok(served, "/v1/leases/claim", claim))["tasks"]
    task_id, lease_id = offer["task_id"], offer["lease_id"]
    who = '"worker_id":"cognigate-1","task_id":"TASK","lease_id":"LEASE"'
    progress = (f'{{{who},"progress":{{"status":"running","summary":"","artifact_pointers":[],'
                '"timestamp":"2026-02-20T10:00:00+00:00"},"tenant_id":"TENANT"}')
    heartbeat = f'{{{who},"extend_by_seconds":null,"tenant_id":"TENANT"}}'
    complete = f'{{{who},"result":{{"summary":"done","artifact_pointers":[]}},"artifacts":null,"tenant_id":"TENANT"}}'

    await ok(served, f"/v1/tasks/{task_id}/progress", of(offer, progress, tenant))
    await ok(served, f"/v1/leases/{lease_id}/extend", of(offer, heartbeat, tenant))
    await ok(served, f"/v1/tasks/{task_id}/complete", of(offer, complete, tenant))

    assert (await state(served, task_id))["status"] == "succeeded"
    assert offer["tenant_id"] == NIL
    assert offer["caused_by_receipt_id"] == offer["obligation_receipt_id"]
    assert {"payload_pointer", "principal_ai", "type", "expected_outcome_kind", "expected_artifact_mime"} <= set(offer)


async def test_its_heartbeat_may_know_the_lease_only(served: Any) -> None:
    offer = await first_lease(served)

    body = ('{"worker_id":"cognigate-1","task_id":null,"lease_id":"LEASE","extend_by_seconds":null,'
            '"tenant_id":"default"}')
    await ok(served, f"/v1/leases/{offer['lease_id']}/extend", of(offer, body))


async def test_its_heartbeat_for_another_tenant_is_refused(served: Any) -> None:
    offer = await first_lease(served)

    other = "11111111-1111-4111-8111-111111111111"
    body = f'{{"worker_id":"cognigate-1","task_id":null,"extend_by_seconds":null,"tenant_id":"{other}"}}'
    async with served.unchanged():
        answer = await say(served, f"/v1/leases/{offer['lease_id']}/extend", body)

    assert (answer.status, answer.json()["error"]) == (403, "tenant_mismatch")


async def test_its_failure_names_the_task_too(served: Any) -> None:
    offer = await first_lease(served)

    body = ('{"worker_id":"cognigate-1","task_id":"TASK","lease_id":"LEASE",'
            '"error":{"code":"TIMEOUT","message":"too slow"},"retryable":false,"tenant_id":"TENANT"}')
    await ok(served, f"/v1/tasks/{offer['task_id']}/fail", of(offer, body))

    assert (await state(served, offer["task_id"]))["status"] == "failed"


# The worker that runs commands: capabilities, an explicit start, and artifacts as one flat object.


COMMAND = ('{"type":"command.execute","payload":{"command":"date","output_path":"/tmp/out.txt"},'
           '"requirements":{"capabilities":["command.execute"],"tags":["shell"]},"principal_ai":"ada"}')
EXECUTOR = '{"worker_id":"command-executor-1","capabilities":["command.execute"],"max_tasks":1}'


async def test_the_command_executor_starts_and_completes_with_one_object_as_artifacts(served: Any) -> None:
    task_id = await queued(served, COMMAND)
    (offer,) = (await ok(served, "/v1/leases/claim", EXECUTOR))["tasks"]
    who = f'"worker_id":"command-executor-1","lease_id":"{offer["lease_id"]}"'

    started = await ok(served, f"/v1/tasks/{task_id}/running", f"{{{who}}}")
    await ok(served, f"/v1/tasks/{task_id}/complete",
             f'{{{who},"result":{{"exit_code":0,"output_path":"/tmp/out.txt"}},"artifacts":{{"output_path":'
             '"/tmp/out.txt","content_type":"text/plain","description":"Command output"}}')

    assert (started["status"], bool(started["started_at"])) == ("running", True)
    ended = await state(served, task_id)
    assert (ended["status"], ended["obligation_open"]) == ("succeeded", False)
    assert [artifact["output_path"] for artifact in ended["result"]["artifacts"]] == ["/tmp/out.txt"]
    assert ended["requirements"]["tags"] == ["shell"]


async def test_the_command_executor_fails_with_a_message_only(served: Any) -> None:
    task_id = await queued(served, COMMAND)
    (offer,) = (await ok(served, "/v1/leases/claim", EXECUTOR))["tasks"]

    body = '{"worker_id":"command-executor-1","lease_id":"LEASE","error":{"message":"exit 1"},"retryable":false}'
    await ok(served, f"/v1/tasks/{task_id}/fail", of(offer, body))

    assert (await state(served, task_id))["result"]["error"] == {"message": "exit 1"}


async def test_a_worker_without_the_capability_gets_an_empty_list(served: Any) -> None:
    await queued(served, COMMAND)

    assert await ok(served, "/v1/leases/claim", CLAIM) == {"tasks": []}


# Clients: who creates stands in the query, and what they do not know is null.


async def test_a_creator_in_the_query_owns_its_task_and_finds_it_among_its_obligations(served: Any) -> None:
    who = "principal_kind=agent&principal_id=planner"
    made = await ok(served, f"/v1/tasks?{who}",
                    '{"type":"demo","principal_ai":"planner","payload":{},"payload_pointer":null,"requirements":'
                    '{"capabilities":[],"tags":[]},"expected_outcome_kind":null,"expected_artifact_mime":null,"priority":0,'
                    '"idempotency_key":null,"max_attempts":2,"retry_backoff_seconds":15,"delay_seconds":0}', URLLIB)

    assert set(made) == {"task_id", "status"}
    answer = await served.get(f"/v1/obligations/open?{who}")
    assert [receipt["task_id"] for receipt in answer["open_obligations"]] == [made["task_id"]]
    assert set(answer["server"]) >= {"name", "version", "instance_id", "environment"}
    assert set(answer["relationship"]) >= {"principal_kind", "principal_id", "principal_instance_id", "sessions_count"}


async def test_a_demo_client_creates_and_claims_with_nulls_and_a_short_lease(served: Any) -> None:
    await ok(served, "/v1/tasks",
             '{"type":"golden.path","payload":{"goal":"x"},"payload_pointer":null,"expected_outcome_kind":null,'
             '"expected_artifact_mime":null,"agent_id":"planner","principal_ai":"planner",'
             f'"tenant_id":"{NIL}"}}', URLLIB)
    (offer,) = (await ok(served, "/v1/leases/claim",
                         '{"worker_id":"fallback-worker","capabilities":[],"accept_types":null,"max_tasks":1,'
                         f'"lease_ttl_seconds":5,"tenant_id":"{NIL}"}}', URLLIB))["tasks"]

    body = ('{"worker_id":"fallback-worker","lease_id":"LEASE","result":{"ok":true},"artifacts":[{"type":"file","uri":'
            '"file:///x","mime":"text/plain","size_bytes":1,"checksum":"sha256:0","location":"local"}]}')
    await ok(served, f"/v1/tasks/{offer['task_id']}/complete", of(offer, body), URLLIB)

    assert round(offer["renew_every_seconds"] * 3) == 5
    assert (await state(served, offer["task_id"]))["created_by"]["id"] == "planner"


async def test_clients_cancel_twice_and_acknowledge_with_the_principal_in_the_query(served: Any) -> None:
    task_id = await queued(served)
    duty = (await state(served, task_id))["obligation_receipt_id"]
    body = '{"principal_kind":"agent","principal_id":"ada","reason":null}'

    first, second = [await ok(served, f"/v1/tasks/{task_id}/cancel", body, URLLIB) for _ in range(2)]
    acked = await ok(served, f"/v1/receipts/{duty}/ack?principal_kind=agent&principal_id=ada", "", URLLIB)

    assert (first["ok"], second["ok"], second["status"]) == (True, True, "canceled")
    assert acked["ok"] is True


async def test_receipts_have_the_members_that_clients_read(served: Any) -> None:
    await queued(served)

    page = await served.get("/v1/receipts?to_kind=agent&to_id=ada&limit=10")

    (receipt,) = page["receipts"]
    assert {"receipt_id", "receipt_type", "created_at", "from", "to", "task_id", "lease_id", "parents"} <= set(receipt)
    assert isinstance(receipt["body"], dict)
    assert receipt["to"] == {"kind": "agent", "id": "ada"}
    assert page["next_cursor"] is None


@pytest.mark.parametrize("headers", [[("x-api-key", TOKEN)], [("x-api-key", TOKEN), ("x-tenant-id", NIL)],
                                     [("authorization", f"Bearer {TOKEN}"), ("x-trace-id", "abc")]], ids=str)
async def test_the_credentials_of_old_clients_are_known(served: Any, headers: list[tuple[str, str]]) -> None:
    answer = await served.call("POST", "/v1/leases/claim", CLAIM.encode(), token=None, headers=[*HTTPX, *headers])

    assert (answer.status, answer.json()) == (200, {"tasks": []})
