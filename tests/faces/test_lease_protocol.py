"""The lease protocol's two calls, as its text has them: offers, heartbeats, 204, and the errors of its own."""

from __future__ import annotations

import http.client
import json
from datetime import datetime
from typing import Any

import pytest

from asyncgate.parts.model.settings import RateLimiting, RateLimits, SecuritySettings, Tier
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from tests.conftest import TOKEN, Live, Served
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ME = {"worker_id": "worker.codegen-aws-i-1234567"}


async def offered(served: Served, **task: Any) -> dict[str, Any]:
    """Create a task and have it offered."""
    await served.post("/v1/tasks", {"type": "code.generate", "payload": None, "agent_id": "ada", **task})
    answer: dict[str, Any] = await served.post("/lease", ME)
    return answer


async def test_no_work_is_204_without_a_body(served: Served) -> None:
    answer = await served.call("POST", "/lease", ME)

    assert (answer.status, answer.content) == (204, b"")
    assert not {"content-length", "content-type"} & set(answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_no_work_is_204_on_the_wire_too_and_the_connection_goes_on(live: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=PATIENCE_SECONDS)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}

    for _ in range(2):
        connection.request("POST", "/lease", json.dumps(ME), headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (204, b"")
        assert answer.getheader("content-length") is None
        assert answer.getheader("transfer-encoding") is None
    connection.close()


async def test_an_offer_has_the_fields_of_the_protocol(served: Served) -> None:
    answer = await offered(served, payload={"language": "python"}, task_summary="a parser", instructions="write it",
                           payload_pointer="depotgate://artifact/1", principal_ai="delegate.root",
                           expected_outcome_kind="artifact_pointer", expected_artifact_mime="text/x-python")

    assert set(answer) == {"lease_id", "lease_expires_at", "task"}
    task = answer["task"]
    assert {name: task[name] for name in (
        "principal_ai", "task_type", "task_summary", "task_body", "payload_pointer", "inputs", "expected_outcome_kind",
        "expected_artifact_mime")} == {
        "principal_ai": "delegate.root", "task_type": "code.generate", "task_summary": "a parser",
        "task_body": "write it", "payload_pointer": "depotgate://artifact/1", "inputs": {"language": "python"},
        "expected_outcome_kind": "artifact_pointer", "expected_artifact_mime": "text/x-python"}
    left = datetime.fromisoformat(answer["lease_expires_at"]).timestamp() - served.backend.now()
    assert 890 < left <= 900


async def test_a_task_without_words_is_offered_by_its_type(served: Served) -> None:
    task = (await offered(served))["task"]

    assert (task["task_summary"], task["task_body"], task["inputs"]) == ("code.generate", None, {})


async def test_one_task_is_offered_and_the_preferred_kind_comes_first(served: Served) -> None:
    for type in ("data.analyze", "code.refactor"):
        await served.post("/v1/tasks", {"type": type, "payload": None, "agent_id": "ada"})

    answer = await served.post("/lease", {**ME, "max_tasks": 5, "preferred_kinds": ["code.refactor"]})

    assert answer["task"]["task_type"] == "code.refactor"
    assert (await served.post("/lease", ME))["task"]["task_type"] == "data.analyze"


async def test_a_worker_is_offered_what_it_is_capable_of(served: Served) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada",
                                    "requirements": {"capabilities": ["gpu"]}})

    assert (await served.call("POST", "/lease", {**ME, "capabilities": ["cpu"]})).status == 204
    assert (await served.call("POST", "/lease", {**ME, "capabilities": ["gpu"]})).status == 200


async def test_a_heartbeat_keeps_the_lease_for_900_seconds_more(served: Served) -> None:
    answer = await offered(served)
    served.backend.skew += 600

    kept = await served.post(f"/lease/{answer['lease_id']}/heartbeat")

    assert set(kept) == {"lease_id", "lease_expires_at"}
    left = datetime.fromisoformat(kept["lease_expires_at"]).timestamp() - served.backend.now()
    assert 890 < left <= 900


async def test_what_was_offered_is_ended_as_every_lease_is(served: Served) -> None:
    answer = await offered(served)
    held = {**ME, "lease_id": answer["lease_id"]}

    done = await served.post(f"/v1/tasks/{answer['task']['task_id']}/complete", {**held, "artifacts": [{"uri": "a:1"}]})
    late = await served.call("POST", f"/lease/{answer['lease_id']}/heartbeat", ME)

    assert done["status"] == "succeeded"
    assert (late.status, late.json()["error"]) == (409, "lease_invalid_or_expired")


@pytest.mark.parametrize("body", [ME, {}, None])
async def test_a_heartbeat_after_the_end_of_the_lease_is_refused(served: Served, body: Any) -> None:
    answer = await offered(served)
    served.backend.skew += 901

    late = await served.call("POST", f"/lease/{answer['lease_id']}/heartbeat", body)

    assert (late.status, late.json()["error"], late.json()["reason"]) == (409, "lease_invalid_or_expired", "expired")


async def test_a_heartbeat_of_another_worker_is_refused(served: Served) -> None:
    answer = await offered(served)

    other = await served.call("POST", f"/lease/{answer['lease_id']}/heartbeat", {"worker_id": "worker.other"})
    unknown = await served.call("POST", "/lease/no-such-lease/heartbeat", ME)

    assert (other.status, unknown.status) == (409, 409)


@pytest.mark.parametrize("worker_id", ["", "worker", ".w", "w.", "w..x", "a b.c", "w.\n", "w.ü", "w.\u200b",
                                       "x." + "y" * 199, None])
async def test_a_worker_is_called_type_dot_instance(served: Served, worker_id: Any) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})

    async with served.unchanged():
        answer = await served.call("POST", "/lease", {} if worker_id is None else {"worker_id": worker_id})

    assert (answer.status, answer.json()["error"]) == (400, "invalid_worker_id")
    assert "must match pattern {type}.{instance}" in answer.json()["detail"]


@pytest.mark.parametrize("worker_id", ["w.1", ME["worker_id"], "a.b.c", "w.host:80/x@y", "x." + "y" * 198])
async def test_a_good_name_is_good(served: Served, worker_id: str) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})

    assert (await served.call("POST", "/lease", {"worker_id": worker_id})).status == 200


async def test_explicit_nulls_and_unknown_members_are_taken_as_everywhere(served: Served) -> None:
    ask = {**ME, "capabilities": None, "preferred_kinds": None, "max_tasks": None, "colour": "red", "tenant_id": None}

    assert (await served.call("POST", "/lease", ask)).status == 204


# The same door as for every other route.


@pytest.mark.parametrize("path", ["/lease", "/lease/some-lease/heartbeat"])
async def test_a_stranger_is_not_let_in(served: Served, path: str) -> None:
    answer = await served.call("POST", path, ME, token=None)

    assert (answer.status, answer.json()["error"]) == (401, "unauthenticated")
    assert "www-authenticate" in answer.headers


@pytest.mark.parametrize("path", ["/lease", "/lease/some-lease/heartbeat"])
async def test_only_post_is_answered(served: Served, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        answer = await served.call(method, path)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_an_agent_s_key_leases_nothing(served: Served) -> None:
    key = await served.post("/v1/keys", {"name": "a", "principal_kind": "agent", "principal_id": "ada"})

    for path in ("/lease", "/lease/some-lease/heartbeat"):
        answer = await served.call("POST", path, ME, token=key["api_key"])
        assert (answer.status, answer.json()["error"]) == (403, "forbidden")


async def test_a_worker_s_key_leases_under_its_own_name_only(served: Served) -> None:
    key = await served.post("/v1/keys", {"name": "w", "principal_kind": "worker", "principal_id": "worker.one"})
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})

    other = await served.call("POST", "/lease", ME, token=key["api_key"])
    own = await served.call("POST", "/lease", {"worker_id": "worker.one"}, token=key["api_key"])
    kept = await served.call("POST", f"/lease/{own.json()['lease_id']}/heartbeat", token=key["api_key"])

    assert (other.status, own.status, kept.status) == (403, 200, 200)
    leases = await served.get("/v1/leases?worker_id=worker.one")
    assert Principal(**leases["leases"][0]["worker"]) == Principal("worker", "worker.one")


async def test_another_tenant_is_refused(served: Served) -> None:
    answer = await served.call("POST", "/lease", {**ME, "tenant_id": "11111111-1111-4111-8111-111111111111"})

    assert (answer.status, answer.json()["error"]) == (403, "tenant_mismatch")


async def test_polls_and_heartbeats_are_counted(serve: Any) -> None:
    limited = SecuritySettings(rate_limiting=RateLimiting(enabled=True, heartbeat_factor=2))
    served = await serve(security=limited, rate_limits=RateLimits(free_tier=Tier(api_calls_per_hour=3)))

    polls = [await served.call("POST", "/lease", ME) for _ in range(4)]
    beats = [await served.call("POST", "/lease/x/heartbeat", ME) for _ in range(7)]

    assert [poll.status for poll in polls] == [204, 204, 204, 429]
    assert [beat.status for beat in beats] == [409] * 6 + [429]
    assert all(any(name.startswith("x-ratelimit") for name in poll.headers) for poll in polls)
    assert "retry-after" in polls[-1].headers


def test_the_protocol_adds_no_tool_and_no_command() -> None:
    assert not {"offer_task", "extend_lease"} & set(OPERATIONS)
