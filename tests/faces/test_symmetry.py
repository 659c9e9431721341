"""The same stories over REST, over MCP in both eras and in the bare dialect: equal answers, states and receipts (H.9).

Each tongue has a gate of its own whose ids count, so that equal programs give equal receipts, to the hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import settings

from asyncgate import SCOPES, Caller
from asyncgate.backends import open_backend
from asyncgate.clients.http import Exchange
from asyncgate.conformance.harness import Numbered, OwnTenants, settings_for_tests
from asyncgate.conformance.model import Rules
from asyncgate.conformance.test_programs import OnSides, Run, Side, Who, facts, run_programs, written_out
from asyncgate.parts.app import Gate
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each

pytestmark = pytest.mark.anyio

HOST = "http://localhost"
TENANT = "00000000-0000-0000-0000-000000000000"
MODERN, LEGACY = "2026-07-28", "2025-11-25"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
JSON_TYPE = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
ROLES = {"agent": "agent", "worker": "worker"}
Outcome = tuple[Any, ...]       # "yes" and the reply, or "no" and the code
Tongue = Callable[[httpx2.AsyncClient, str, dict[str, Any]], Coroutine[Any, Any, Outcome]]


class Named:
    """A way in for tests: the token says who comes."""

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return whom the token names."""
        if not token or token.count("|") != 4:
            return None
        tenant, kind, id, role, instance = token.split("|")
        return Caller(tenant, Principal(kind, id, instance or None), role, SCOPES)  # type: ignore[arg-type]


def token_of(tenant: str, kind: str, id: str, instance: str | None = None) -> str:
    """Write who comes as a token."""
    return f"{tenant}|{kind}|{id}|{ROLES.get(kind, 'admin')}|{instance or ''}"


# The four tongues.


def refusal(told: dict[str, Any]) -> Outcome:
    return "no", told["error"], told.get("reason")


async def rest(http: httpx2.AsyncClient, name: str, fields: dict[str, Any]) -> Outcome:
    """Ask over REST."""
    try:
        request = Exchange(HOST, "").request(name, fields)
    except ValueError:      # a path without its id cannot be said at all
        return "no", "invalid_request", None
    request.pop("timeout")
    answer = await http.request(**request)
    return ("yes", answer.json()) if answer.is_success else refusal(answer.json())


async def posted(http: httpx2.AsyncClient, name: str, fields: dict[str, Any], headers: dict[str, str],
                 meta: dict[str, Any]) -> dict[str, Any]:
    """Ask with a JSON-RPC message and return what it answers."""
    params = {"name": f"asyncgate.{name}", "arguments": fields, **meta}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    answer = await http.post(f"{HOST}/mcp?answers=full", content=body, headers=headers)
    if answer.status_code == 401:
        return {"error": {"data": {"code": answer.json().get("error")}}}
    reply: dict[str, Any] = answer.json()
    assert answer.status_code == 200 or "mcp-protocol-version" not in headers, answer.text
    return reply


def tool_outcome(told: dict[str, Any]) -> Outcome:
    """Read the result of a tool."""
    text = json.loads(told["content"][0]["text"])
    if not told["isError"]:
        assert told["structuredContent"] == text
        return "yes", text
    assert told["_meta"]["asyncgate/error"]["code"] == text["error"]
    return refusal(text)


async def modern(http: httpx2.AsyncClient, name: str, fields: dict[str, Any]) -> Outcome:
    """Ask over MCP without a handshake."""
    headers = {**JSON_TYPE, "mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": f"asyncgate.{name}"}
    return tool_outcome((await posted(http, name, fields, headers, {"_meta": META}))["result"])


async def legacy(http: httpx2.AsyncClient, name: str, fields: dict[str, Any]) -> Outcome:
    """Ask over MCP as after a handshake."""
    headers = {**JSON_TYPE, "mcp-protocol-version": LEGACY}
    return tool_outcome((await posted(http, name, fields, headers, {}))["result"])


async def bare(http: httpx2.AsyncClient, name: str, fields: dict[str, Any]) -> Outcome:
    """Ask in the dialect of peers."""
    told = await posted(http, name, fields, {"content-type": "application/json"}, {})
    if "error" in told:
        return "no", told["error"]["data"]["code"], told["error"]["data"].get("reason")
    result = told["result"]
    text = json.loads(result["content"][0]["text"])
    assert {member: result[member] for member in text} == text
    return "yes", text


TONGUES: dict[str, Tongue] = {"rest": rest, "modern": modern, "legacy": legacy, "bare": bare}


# Stories.

Do = Callable[..., Awaitable[Any]]
ADA, BOB, W1, W2, ROOT = ("agent", "ada"), ("agent", "bob"), ("worker", "w1"), ("worker", "w2"), ("human", "root")
FILE = [{"type": "file", "uri": "file:///out"}]


async def leased(do: Do, **fields: Any) -> dict[str, Any]:
    """Create a task and lease it."""
    await do(ADA, "create_task", type="demo", payload={"n": 1.0}, **fields)
    (offer,) = (await do(W1, "lease_next"))["tasks"]
    return {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}


async def done_well(do: Do) -> None:
    """A task is created, claimed, reported on and completed."""
    held = await leased(do, idempotency_key="k", instructions="build it")
    await do(ADA, "create_task", type="demo", payload={"n": 1.0}, idempotency_key="k", instructions="build it")
    await do(W1, "start_task", **held)
    await do(W1, "report_progress", **held, progress={"half": True})
    await do(W1, "renew_lease", **held)
    for _ in range(2):
        await do(W1, "complete", **held, result={"summary": "ü"}, artifacts=FILE)
    assert (await do(ADA, "get_task", task_id=held["task_id"]))["status"] == "succeeded"


async def failed_twice(do: Do) -> None:
    """A task is retried, and fails for good."""
    held = await leased(do, max_attempts=2, retry_backoff_seconds=0)
    await do(W1, "fail", **held, error={"message": "no"}, retryable=True)
    (offer,) = (await do(W2, "lease_next"))["tasks"]
    under = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
    await do(W2, "fail", **under, error="never", retryable=True)
    assert await do(W1, "complete", **held) == "lease_invalid_or_expired"


async def canceled_at_work(do: Do) -> None:
    """A task is canceled under its worker's hands."""
    held = await leased(do)
    await do(ADA, "cancel_task", task_id=held["task_id"], reason="enough")
    await do(ADA, "cancel_task", task_id=held["task_id"])
    assert await do(W1, "report_progress", **held, progress=1) == "lease_invalid_or_expired"


async def located_later(do: Do) -> None:
    """A task succeeds without telling where its result is, and its owner says it."""
    held = await leased(do)
    await do(W1, "complete", **held, result=[1, 2])
    duty = (await do(ADA, "list_open_obligations"))["open_obligations"][0]["receipt_id"]
    assert not (await do(ADA, "check_terminator", parent_receipt_id=duty))["has_terminator"]
    await do(ADA, "attach_artifacts", task_id=held["task_id"], artifacts={"uri": "s3://x"})
    assert (await do(ADA, "check_terminator", parent_receipt_id=duty))["has_terminator"]


async def given_back(do: Do) -> None:
    """A worker gives a task back."""
    held = await leased(do)
    await do(W1, "release_lease", **held)
    await do(W1, "list_leases")
    await do(ADA, "get_task_history", task_id=held["task_id"])


async def in_batches(do: Do) -> None:
    """Several tasks at once, one of them wrong."""
    await do(ADA, "create_tasks", tasks=[{"type": "a", "payload": None}, {"type": "b", "payload": None,
                                                                          "requirements": {"capabilities": 3}}])
    offers = (await do(W1, "lease_next", max_tasks=5))["tasks"]
    tasks = [{"task_id": offer["task_id"], "lease_id": offer["lease_id"], "artifacts": FILE} for offer in offers]
    await do(W1, "complete_tasks", tasks=[*tasks, {"task_id": "nobody", "lease_id": "none"}])


async def scheduled(do: Do) -> None:
    """A scheduler takes a schedule over, reports it, and ends it."""
    await do(ADA, "create_task", type="schedule.create", payload={"cron": "0 3 * * *"})
    (offer,) = (await do(W1, "lease_next"))["tasks"]
    made = await do(W1, "emit_receipt", receipt_type="schedule.created", task_id=offer["task_id"],
                    lease_id=offer["lease_id"], schedule_id="nightly", body={"cron": "0 3 * * *"})
    await do(W1, "report_schedule", schedules=[{"schedule_id": "nightly", "enabled": True}, {"schedule_id": "other"}])
    await do(W1, "emit_receipt", receipt_type="schedule.deleted", parents=[made["receipt_id"]])


async def read_and_acknowledged(do: Do) -> None:
    """An inbox is read page by page and acknowledged."""
    await done_well(do)
    page = await do(ADA, "list_receipts", limit=1)
    await do(ADA, "list_receipts", limit=1, cursor=page["next_cursor"])
    for _ in range(2):
        await do(ADA, "ack_receipt", receipt_id=page["receipts"][0]["receipt_id"])
    seen = page["receipts"][0]["receipt_id"]
    for filter in ({}, {"receipt_type": "task.failed"}):
        await do(ADA, "list_receipts", since_receipt_id=seen, wait_seconds=0.01, **filter)
    await do(ADA, "list_open_obligations", since_receipt_id=seen, wait_seconds=0.01)
    await do(ADA, "list_tasks", status="succeeded")
    await do(ROOT, "run_task", type="demo", payload=None, wait_seconds=0)


async def refused_in_every_way(do: Do) -> None:
    """Every refusal that a request can earn."""
    held = await leased(do)
    deep: Any = []
    for _ in range(64):
        deep = [deep]
    refusals = {
        "task_not_found": (ADA, "get_task", {"task_id": "nobody"}),
        "receipt_not_found": (ADA, "get_receipt", {"receipt_id": "nothing"}),
        "invalid_request": (ADA, "create_task", {"type": ""}),
        "invalid_cursor": (ADA, "list_tasks", {"cursor": "made-up"}),
        "payload_too_deep": (ADA, "create_task", {"type": "demo", "payload": deep}),
        "payload_too_large": (ADA, "create_task", {"type": "demo", "payload": "x" * 2000}),
        "tenant_mismatch": (ADA, "create_task", {"type": "demo", "payload": None, "tenant_id": "another"}),
        "forbidden": (W1, "create_task", {"type": "demo", "payload": None}),
        "lease_invalid_or_expired": (W2, "complete", {**held, "artifacts": FILE}),
        "not_locatable": (W1, "complete", {**held, "result": 1}),
        "too_many_artifacts": (W1, "complete", {**held, "artifacts": FILE * 101}),
        "receipt_too_large": (W1, "complete", {**held, "artifacts": FILE, "completion_metadata": {"x": "x" * 70_000}}),
        "parents_required": (W1, "emit_receipt", {"receipt_type": "schedule.deleted", "schedule_id": "s"}),
        "parent_not_found": (W1, "emit_receipt", {"receipt_type": "schedule.deleted", "parents": ["nothing"]}),
        "invalid_state_transition": (ADA, "attach_artifacts", {"task_id": held["task_id"], "artifacts": FILE}),
        "rate_limit_exceeded": (W2, "lease_next", {"wait_seconds": 1}),
    }
    for code, (who, name, fields) in refusals.items():
        assert await do(who, name, **fields) == code, name
    await do(W1, "renew_lease", **held)
    assert await do(W1, "renew_lease", **held) == "lease_renewal_limit"
    await do(ADA, "create_task", type="demo", payload=None, idempotency_key="k")
    assert await do(ADA, "create_task", type="demo", payload=None, idempotency_key="k",
                    priority=1) == "idempotency_conflict"


async def administered(do: Do) -> None:
    """A tenant is made and limited; a key is issued, rotated and revoked; all of it is in the log."""
    room = "3c9d1f52-7a3e-4d0b-9f43-5b1e6c2a8d70"
    for tenant, name in ((TENANT, "our own"), (room, "Reading Room")):
        await do(ROOT, "create_tenant", tenant=tenant, name=name, tier="free")
    await do(ROOT, "set_limits", tenant=room, tier="paid")
    assert (await do(ROOT, "get_limits", tenant=room))["tier"] == "paid"
    first = await do(ROOT, "issue_key", tenant=room, name="r", principal_id="reader-1", principal_kind="worker")
    second = await do(ROOT, "rotate_key", tenant=room, key_id=first["key"]["key_id"])
    await do(ROOT, "revoke_key", tenant=room, key_id=second["key"]["key_id"], reason="enough")
    assert await do(ROOT, "rotate_key", tenant=room, key_id=second["key"]["key_id"]) == "invalid_state_transition"
    assert await do(ROOT, "revoke_key", tenant=room, key_id="nobody") == "key_not_found"
    assert len((await do(ROOT, "list_keys", tenant=room))["keys"]) == 2
    await do(ROOT, "suspend_tenant", tenant=room, reason="moved out")
    await do(ROOT, "list_tenants")
    log = await do(ROOT, "list_audit", tenant=room, limit=5)
    log = log["lines"] + (await do(ROOT, "list_audit", tenant=room, cursor=log["next_cursor"]))["lines"]
    assert [line["event"] for line in log] == [
        "tenant_created", "tier_changed", "key_issued", "key_rotated", "key_revoked", "tenant_suspended"]
    assert await do(ADA, "list_audit") == "forbidden"


STORIES = [done_well, failed_twice, canceled_at_work, located_later, given_back, in_batches, scheduled,
           read_and_acknowledged, refused_in_every_way, administered]
SETTINGS: dict[str, dict[str, Any]] = {"refused_in_every_way": {
    "locatability": "strict", "max_lease_renewals": 1, "idempotency_mismatch": "refuse", "max_payload_bytes": 1000,
    "max_waiting_claims": 0}}


@contextlib.asynccontextmanager
async def opened(**more: Any) -> AsyncIterator[Gate]:
    """A gate whose ids count, and that knows everybody by name."""
    backend = await open_backend("memory:")
    backend.ids, backend.secret = Numbered(), b"the same for all"       # it seals cursors
    gate = Gate(settings_for_tests(api_key="unused", instance_id="asyncgate-1", **more), backend)
    gate.identity.ways = [Named()]
    async with gate.app.router.lifespan_context(gate.app):
        yield gate


def client_of(gate: Gate) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate))


VARYING = {"uptime", "upkeep", "renew_every_seconds", "issued_before", "since", "findings", "counted_until"}
DRAWN = {  # another one each time
    "api_key", "key_id", "rotated_to", "not_before", "confirmation", "sign_in_code", "secret"}
LOGGED = {"hash", "timestamp", "details"}       # when, from where, and about which key


def untimed(value: Any) -> Any:
    """An answer without what depends on when it was given, and without what was drawn for it."""
    if isinstance(value, dict):
        drawn = DRAWN | {"cursor"} if "keys" in value else DRAWN        # it names the last key
        varying = VARYING | drawn | (LOGGED if "audit_id" in value else set())
        varying |= {"next_cursor"} if "begun_at" in value else set()        # an export's says when it began
        return {name: untimed(held) for name, held in value.items() if name not in varying and name[-3:] != "_at"}
    return [untimed(held) for held in value] if isinstance(value, list) else value


async def stored(gate: Gate) -> list[Any]:
    """Everything that is stored, but for the times."""
    from asyncgate.conformance.harness import STORED

    backend = gate.engine.backend
    return facts({kind.__name__: await backend.page(TENANT, Rows(kind)) for kind in STORED})


async def told(story: Callable[[Do], Awaitable[None]], ask: Any, gate: Gate, http: httpx2.AsyncClient) -> list[Any]:
    """Tell a story and return all answers, and what it left."""
    answers: list[Any] = []

    async def do(who: tuple[str, str], name: str, /, **fields: Any) -> Any:
        http.headers["authorization"] = f"Bearer {token_of(TENANT, *who)}"
        answer = await ask(http, name, fields)
        answers.append((name, untimed(list(answer))))
        return answer[1]

    await story(do)
    return [answers, await stored(gate)]


async def told_raw(story: Callable[[Do], Awaitable[None]], tongue: Tongue) -> list[Any]:
    async with opened(**SETTINGS.get(story.__name__, {})) as gate, client_of(gate) as http:
        return await told(story, tongue, gate, http)


async def told_with_the_sdk(story: Callable[[Do], Awaitable[None]], mode: str) -> list[Any]:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async with opened(**SETTINGS.get(story.__name__, {})) as gate, client_of(gate) as http:
        http.headers["authorization"] = f"Bearer {token_of(TENANT, *ROOT)}"
        async with Client(streamable_http_client(f"{HOST}/mcp?answers=full", http_client=http), mode=mode) as client:
            async def ask(http: httpx2.AsyncClient, name: str, fields: dict[str, Any]) -> Outcome:
                result = await client.call_tool(f"asyncgate.{name}", fields)
                return tool_outcome(result.model_dump(mode="json", by_alias=True))

            return await told(story, ask, gate, http)


@each("story", STORIES)
async def test_a_story_has_the_answers_states_and_receipts_that_it_has_over_rest(
        story: Callable[[Do], Awaitable[None]]) -> None:
    over_rest = await told_raw(story, rest)

    for tongue in (modern, legacy, bare):
        assert await told_raw(story, tongue) == over_rest, tongue
    for mode in ("auto", "legacy"):
        assert await told_with_the_sdk(story, mode) == over_rest, f"the client of the SDK, {mode}"


@each("name", OPERATIONS)
async def test_every_operation_is_there_on_both_sides_and_answers_alike(name: str) -> None:
    async def story(do: Do) -> None:
        patience = {"wait_seconds": 0} if "wait_seconds" in OPERATIONS[name].takes.__struct_fields__ else {}
        for who in (ROOT, ADA, W1):
            await do(who, name, **{**OPERATIONS[name].takes.example[0], **patience})

    answers, left = await told_raw(story, rest)
    for tongue in (modern, legacy, bare):
        assert await told_raw(story, tongue) == [answers, left], tongue
    assert "not_found" not in [answer[1][1] for answer in answers]


# Random programs.


class WireSide(Side):
    """One gate that a program reaches over the wire."""

    def __init__(self, run: Run, gate: Gate, backend: OwnTenants, tongue: Tongue, rules: Rules,
                 tenants: list[str]) -> None:
        super().__init__(run, backend, rules, tenants)
        gate.engine = self.gates[0].engine
        gate.guard = Guard(gate.engine, identity=gate.identity)
        self.tongue, self.http = tongue, client_of(gate)

    def perform(self, who: Who, name: str, fields: dict[str, Any]) -> Outcome:
        tenant, kind, id, instance = who
        self.http.headers["authorization"] = f"Bearer {token_of(self.gates[tenant].tenant_id, kind, id, instance)}"
        known = OPERATIONS[name].takes.__struct_fields__    # a program says more, which MCP refuses and REST ignores
        arguments = {field: value for field, value in self.name_sealed(tenant, written_out(fields)).items()
                     if field in known}
        outcome: Outcome = self.run(self.tongue(self.http, name, arguments))
        if outcome[0] == "yes":
            outcome[1].get("leases", []).sort(key=lambda held: held["lease_id"])
            self.number_sealed(tenant, outcome[1])
            if name == "list_steps":        # sealed with the secret of its database
                outcome[1].pop("cursor")
        return outcome


class OnEveryTongue(OnSides):
    """The same program in all four tongues."""

    def __init__(self, run: Run, gates: dict[str, tuple[Gate, OwnTenants]]) -> None:
        super().__init__()
        self.run, self.gates = run, gates

    def begin(self, rules: Rules) -> None:
        tenants = [str(uuid.uuid4()), str(uuid.uuid4())]
        self.sides = [WireSide(self.run, gate, backend, TONGUES[name], rules, tenants)
                      for name, (gate, backend) in self.gates.items()]
        self.align()

    def perform(self, who: Who, name: str, /, **fields: Any) -> Any:
        outcomes = [side.perform(who, name, fields) for side in self.sides]
        first, *others = [untimed(side.timed(list(outcome)))
                          for side, outcome in zip(self.sides, outcomes, strict=True)]

        for tongue, other in zip(list(TONGUES)[1:], others, strict=True):
            assert other == first, f"{name} over {tongue}"
        self.wrote(who[0], self.sides[0].news(who[0]))
        return outcomes[0][1] if outcomes[0][0] == "yes" else None


@pytest.fixture
def run() -> Iterator[Run]:
    """A loop that lives as long as the test: a program is not a coroutine."""
    with asyncio.Runner() as runner:
        yield runner.run


def test_random_programs_end_alike_in_every_tongue(run: Run, rounds: int) -> None:
    gates: dict[str, tuple[Gate, OwnTenants]] = {}
    for name in TONGUES:
        backend = OwnTenants(run(open_backend("memory:")))
        gate = Gate(settings_for_tests(api_key="unused"), backend)
        gate.identity.ways = [Named()]
        gates[name] = gate, backend
    try:
        run_programs(partial(OnEveryTongue, run, gates), settings=settings(
            max_examples=11 * rounds, stateful_step_count=25, derandomize=True, database=None, deadline=None))
    finally:
        for gate, backend in gates.values():
            run(gate.mcp.close())
            run(backend.aclose())
