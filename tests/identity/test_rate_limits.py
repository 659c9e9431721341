"""Rate limits over a served gate: headers, the refusal, whose budget a call is on, and one store for several gates.

What a bucket lets through is tested in test_limits.py, the store in test_limits_redis.py (spec 21.4; F7, F8, F10).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.backends import open_backend
from asyncgate.conformance.valkey import Valkey
from asyncgate.parts.app import Gate
from asyncgate.parts.faces import front
from asyncgate.parts.identity.limits import LimitVerdict, open_limits
from asyncgate.parts.identity.limits.memory import MemoryLimits
from asyncgate.parts.model import quotas
from asyncgate.parts.model.errors import LimiterUnavailable
from asyncgate.parts.model.settings import ArchiveSettings, RateLimiting, RateLimits, Settings, Tier
from asyncgate.parts.receipts import archive
from tests.conftest import TOKEN, Served
from tests.identity.test_limits_redis import started
from tests.support.identity_tools import (
    FACADES,
    HOME,
    HOUR_MS,
    JSON,
    OTHER,
    START,
    THIRD,
    Clock,
    House,
    Told,
    mcp_call,
    security,
    tiers,
)
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

HOUR_S = 3600
LIMIT_NAMES = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-ratelimit-bucket"}
Limited = Callable[..., Any]


@pytest.fixture
def limited(serve: Any) -> Limited:
    """Return what starts a gate whose free tenants may call so often, with a tenant that is one of them."""
    async def limited(calls: int = 10, tasks: int = -1, active: int = -1, **limiting: Any) -> tuple[House, str, Clock]:
        limits = security(limits=True, **{"default_tier": "enterprise", "address_calls_per_minute": -1,
                                          "anonymous_calls_per_minute": -1, **limiting})
        may = tiers(calls, tasks)
        may = replace(may, free_tier=replace(may.free_tier, active_tasks=active))
        house = House(await serve(security=limits, rate_limits=may))
        clock = house.counting()
        await house.good("create_tenant", {"tenant": OTHER, "name": "free", "tier": "free"})
        return house, await house.key("agent", "ada", tenant=OTHER), clock
    return limited


def standing(told: Told) -> tuple[str, int, int, int]:
    """Read the four headers of spec 21.4.3."""
    assert not LIMIT_NAMES - told.headers.keys(), told.headers
    return (told.headers["x-ratelimit-bucket"], int(told.headers["x-ratelimit-limit"]),
            int(told.headers["x-ratelimit-remaining"]), int(told.headers["x-ratelimit-reset"]))


async def passed(house: House, token: str, times: int, **more: Any) -> int:
    """Return how many of so many calls are not refused for being too many."""
    told = [await house.ask("list_tasks", token=token, **more) for _ in range(times)]
    return sum(answer.code != "rate_limit_exceeded" for answer in told)


@pytest.mark.parametrize("facade", FACADES)
async def test_a_caller_over_its_limit_waits_for_the_refusal_and_the_others_do_not(
        limited: Limited, monkeypatch: pytest.MonkeyPatch, facade: str) -> None:
    house, token, _ = await limited(calls=2)
    assert await passed(house, token, 2) == 2
    monkeypatch.setattr(front, "REFUSAL_PAUSE_SECONDS", 3600)

    refused = asyncio.create_task(house.ask("list_tasks", token=token, facade=facade))
    for _ in range(20):
        assert (await house.ask("list_tasks", facade=facade)).status == 200

    assert not refused.done()
    refused.cancel()



# Headers, on every answer.


@pytest.mark.parametrize("facade", FACADES)
async def test_every_answer_says_how_its_caller_stands(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(10)

    told = [await house.ask(name, fields, token=ada, facade=facade) for name, fields in (
        ("list_tasks", {}), ("lease_next", {}), ("get_task", {"task_id": "x"}), ("list_tasks", {"cursor": "x"}))]

    assert [answer.code for answer in told] == ["", "forbidden", "task_not_found", "invalid_cursor"]
    assert [standing(answer)[:3] for answer in told] == [(f"tenant:{OTHER}:api_calls", 10, left)
                                                         for left in (9, 8, 7, 6)]
    assert standing(told[0])[3] == START // 1000 + HOUR_S // 10


async def test_what_is_refused_on_the_way_says_it_too(limited: Limited) -> None:
    house, ada, _ = await limited(100, anonymous_calls_per_minute=100)
    call = house.served.call
    broken = [
        await call("POST", "/v1/tasks", b"{", headers=[JSON], token=ada),
        await call("POST", "/v1/tasks", b"{}", headers=[("content-type", "text/plain")], token=ada),
        await call("GET", "/v1/tasks", token=None), await call("GET", "/v1/tasks", token="wrong"),
        await call("GET", "/v1/nothing", token=ada), await call("PATCH", "/v1/tasks", token=ada),
        await call("GET", "/mcp", token=ada), await call("POST", "/mcp", b"[", headers=[JSON], token=None),
        await call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "nothing"}, headers=[JSON], token=None),
        await call("GET", "/v1/tasks", headers=[("host", "evil.example")], token=ada),
        await call("GET", "/v1/tasks", headers=[("origin", "https://evil.example")], token=ada)]

    assert [answer.status for answer in broken] == [400, 415, 401, 401, 404, 405, 405, 400, 400, 421, 403]
    assert [answer for answer in broken if not answer.headers.keys() >= LIMIT_NAMES] == []
    names = [answer.headers["x-ratelimit-bucket"] for answer in broken]
    assert names == [f"tenant:{OTHER}:api_calls"] * 2 + ["ip:127.0.0.1:anonymous"] * 9


@pytest.mark.parametrize("facade", FACADES)
async def test_a_call_is_counted_once_over_every_facade(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(10)

    assert await passed(house, ada, 15, facade=facade) == 10


async def test_without_limits_nothing_is_said_and_nothing_refused(serve: Any) -> None:
    house = House(await serve(security=security(), rate_limits=tiers(1)))
    key = await house.key("agent", "ada", tenant=OTHER)

    told = [await house.ask("list_tasks", token=key) for _ in range(5)]

    assert [answer.headers.keys() & LIMIT_NAMES for answer in told] == [set()] * 5
    assert {answer.code for answer in told} == {""}


@pytest.mark.parametrize(("host", "tenants", "enabled", "on"), [
    ("127.0.0.1", 1, None, False), ("127.0.0.1", 2, None, True), ("0.0.0.0", 1, None, True),
    ("0.0.0.0", 2, False, False), ("127.0.0.1", 1, True, True)])
async def test_a_gate_that_is_shared_has_limits_unless_told_otherwise(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, tenants: int, enabled: bool | None,
        on: bool) -> None:
    caplog.set_level(logging.INFO)
    url, told = f"sqlite:///{tmp_path / 'gate.db'}", []
    for settings in (Settings(api_key=TOKEN, security=security()), Settings(
            api_key=TOKEN, host=host, security=security(limits=enabled))):
        gate = Gate(settings, await open_backend(url, serving=True))
        async with gate.app.router.lifespan_context(gate.app):
            house = House(Served(gate))
            for number in range(1, tenants):
                await house.ask("create_tenant", {"tenant": (OTHER, THIRD)[number - 1], "name": "another"})
            await house.good("create_task", {"type": "demo", "payload": None})
            told.append(await house.ask("list_tasks"))

    assert [bool(answer.headers.keys() & LIMIT_NAMES) for answer in told] == [False, on]
    assert ("rate limits and quotas are on" in caplog.text) == (on and enabled is None)


async def test_health_is_never_counted(limited: Limited) -> None:
    house, _, _ = await limited(10, anonymous_calls_per_minute=1)

    told = [await house.served.call("GET", path, token=None) for path in ("/health", "/v1/health") * 5]

    assert {answer.status for answer in told} == {200}
    assert [answer.headers.keys() & LIMIT_NAMES for answer in told] == [set()] * 10
    assert (await house.served.call("GET", "/v1/tasks", token=None)).status == 401
    assert (await house.served.call("GET", "/v1/tasks", token=None)).status == 429


# The refusal, and when it ends (F8).


async def test_the_refusal_is_that_of_the_spec_to_the_byte(limited: Limited) -> None:
    house, ada, _ = await limited(10)
    assert await passed(house, ada, 10) == 10

    told = await house.ask("list_tasks", token=ada)

    message = "Tenant API call limit exceeded (10/hour)"
    assert told.status == 429
    assert json.loads(told.content) == {"error": "rate_limit_exceeded", "message": message, "detail": message,
                                        "retry_after": 3600, "limit": 10, "window": "1h"}
    assert told.headers["retry-after"] == "3600"
    assert standing(told) == (f"tenant:{OTHER}:api_calls", 10, 0, START // 1000 + 3600)
    assert told.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("facade", FACADES)
async def test_who_waits_as_long_as_told_passes_and_a_second_earlier_does_not(limited: Limited, facade: str) -> None:
    house, ada, clock = await limited(10)
    await passed(house, ada, 10)
    told = await house.ask("list_tasks", token=ada, facade=facade)

    clock.now += 1000 * (told.body["retry_after"] - 1)
    early = await house.ask("list_tasks", token=ada, facade=facade)
    clock.now += 1000
    late = await house.ask("list_tasks", token=ada, facade=facade)

    assert (told.code, early.code, late.code) == ("rate_limit_exceeded", "rate_limit_exceeded", "")
    assert early.body["retry_after"] == 1


async def test_over_mcp_the_refusal_is_the_same_and_an_answer_of_the_protocol(limited: Limited) -> None:
    house, ada, _ = await limited(1)
    await passed(house, ada, 1)

    told = {facade: await house.ask("list_tasks", token=ada, facade=facade) for facade in FACADES}

    expected = told["rest"].body
    assert {facade: {name: answer.body[name] for name in expected} for facade, answer in told.items()} == dict.fromkeys(
        FACADES, expected)
    assert [told[facade].status for facade in FACADES] == [429, 200, 200, 200]
    assert {answer.headers["retry-after"] for answer in told.values()} == {str(expected["retry_after"])}


# Ways around (F7).


@pytest.mark.parametrize("path", ["/v1/tasks", "/V1/tasks", "/v1/Tasks", "//v1/tasks", "/v1//tasks", "/v1/tasks/",
                                  "/v1/./tasks", "/v1/x/../tasks",
                                  "/v1/%74asks", "/v1/tasks?x=1", "/v1/tasks%2f", "/v1/tasks;x"])
async def test_another_spelling_of_a_path_opens_no_other_budget(limited: Limited, path: str) -> None:
    house, ada, _ = await limited(3, anonymous_calls_per_minute=3)

    answers = [await house.served.call("GET", path, token=ada) for _ in range(5)]

    assert [answer.status for answer in answers].count(429) == 2
    assert answers[-1].status == 429


async def test_made_up_forwarding_headers_open_no_other_budget(limited: Limited) -> None:
    house, ada, _ = await limited(100, address_calls_per_minute=5, anonymous_calls_per_minute=3)   # two were made
    spoofed = [[(name, f"192.0.2.{n}")] for n in range(3) for name in ("x-forwarded-for", "forwarded", "x-real-ip",
                                                                      "cf-connecting-ip", "true-client-ip")]

    known = [(await house.ask("list_tasks", token=ada, headers=headers)).status for headers in spoofed]
    unknown = [(await house.ask("list_tasks", token="wrong", headers=headers)).status for headers in spoofed]

    assert (known.count(200), unknown.count(401)) == (3, 3)
    assert set(known + unknown) == {200, 401, 429}


async def test_many_keys_of_one_principal_share_its_part(limited: Limited) -> None:
    house, ada, _ = await limited(10, principal_percent=50)
    others = [await house.key("agent", "ada", tenant=OTHER) for _ in range(4)]

    assert sum([await passed(house, key, 3) for key in (ada, *others)]) == 5
    assert await passed(house, await house.key("agent", "bob", tenant=OTHER), 9) == 5, "the rest of the tenant's"


async def test_many_principals_of_one_tenant_share_its_limit(limited: Limited) -> None:
    house, _, _ = await limited(10)
    keys = [await house.key("agent", f"agent-{n}", tenant=OTHER) for n in range(8)]

    assert sum([await passed(house, key, 3) for key in keys]) == 10


async def test_an_admin_that_speaks_for_others_is_on_its_own_budget(limited: Limited) -> None:
    house, _, _ = await limited(100, principal_percent=3)
    root = await house.key("admin", "root", tenant=OTHER)

    told = [await house.ask("list_open_obligations", {"principal_kind": "agent", "principal_id": f"p{n}"}, token=root)
            for n in range(5)]

    assert [answer.code for answer in told].count("rate_limit_exceeded") == 2


async def test_a_batch_of_json_rpc_is_no_way_around(limited: Limited) -> None:
    house, ada, _ = await limited(3)
    method, target, body, headers = mcp_call("list_tasks", {}, "legacy")

    answers = [await house.served.call(method, target, json.dumps([body] * 5).encode(), headers=headers, token=ada)
               for _ in range(5)]

    assert [answer.status for answer in answers] == [400] * 3 + [429] * 2
    assert (await house.ask("list_tasks", token=ada)).code == "rate_limit_exceeded"


async def test_tenants_do_not_use_up_each_others_calls(limited: Limited) -> None:
    house, ada, _ = await limited(3)
    await house.good("create_tenant", {"tenant": THIRD, "name": "another", "tier": "free"})
    bob = await house.key("agent", "bob", tenant=THIRD)

    assert (await passed(house, ada, 9), await passed(house, bob, 9)) == (3, 3)


async def test_wrong_credentials_are_on_the_address_and_not_on_the_tenant(limited: Limited) -> None:
    house, ada, _ = await limited(10, anonymous_calls_per_minute=4)
    wrong = ada[:20] + ("0" if ada[20] != "0" else "1") + ada[21:]

    statuses = [(await house.ask("list_tasks", token=wrong)).status for _ in range(6)]

    assert statuses == [401] * 4 + [429] * 2
    assert await passed(house, ada, 12) == 10


# Tasks, heartbeats and long polls.


@pytest.mark.parametrize("facade", FACADES)
async def test_a_call_with_many_items_is_as_many_calls(limited: Limited, facade: str) -> None:
    house, _, _ = await limited(10)
    root = await house.key("admin", "root", tenant=OTHER)

    told = [await house.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * number}, token=root,
                            facade=facade) for number in (4, 11, 5, 1)]

    assert [answer.code for answer in told] == ["", "rate_limit_exceeded", "", "rate_limit_exceeded"]
    assert [standing(answer)[2] for answer in told] == [6, 5, 0, 0]
    assert told[1].body["message"] == (
        "Tenant API call limit exceeded (10/hour); each item counts as a call, so send at most 10")


@pytest.mark.parametrize("facade", FACADES)
async def test_each_task_of_a_bulk_is_a_call_and_what_fits_is_done(limited: Limited, facade: str) -> None:
    house, _, _ = await limited(20)
    root = await house.key("admin", "root", tenant=OTHER)
    await house.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 12}, token=root, facade=facade)
    seen = await house.ask("preview_bulk", {"action": "cancel"}, token=root, facade=facade)

    ran, again = [await house.ask("run_bulk", {"confirmation": seen.body["confirmation"]}, token=root, facade=facade)
                  for _ in range(2)]

    assert (ran.body["done"], ran.body["ended"]) == (6, False)
    assert (standing(ran)[2], again.code) == (0, "rate_limit_exceeded")


@pytest.mark.parametrize("facade", FACADES)
async def test_each_task_of_a_batch_counts_and_a_refused_batch_costs_none(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=10)

    async def create(number: int) -> Told:
        batch = {"tasks": [{"type": "demo", "payload": None}] * number}
        answer: Told = await house.ask("create_tasks", batch, token=ada, facade=facade)
        return answer

    told = [await create(number) for number in (6, 5, 4, 1)]

    assert [answer.code for answer in told] == ["", "rate_limit_exceeded", "", "rate_limit_exceeded"]
    assert told[1].body["message"] == "Tenant task limit exceeded (10/hour)"
    assert told[1].headers["x-ratelimit-bucket"] == f"tenant:{OTHER}:tasks"
    assert len((await house.good("list_tasks", token=ada))["tasks"]) == 10


@pytest.mark.parametrize("facade", FACADES)
async def test_single_tasks_and_those_that_are_waited_for_count_too(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=3)

    told = [await house.ask(name, {"type": "demo", "payload": None, **more}, token=ada, facade=facade) for name,
            more in (
        ("create_task", {}), ("run_task", {"wait_seconds": 0}), ("create_task", {}), ("create_task", {}),
        ("run_task", {"wait_seconds": 0}))]

    assert [answer.code for answer in told] == ["", "", "", "rate_limit_exceeded", "rate_limit_exceeded"]


@pytest.mark.parametrize("facade", FACADES)
async def test_repeating_a_creation_counts_as_no_new_task(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=6)
    request = {"type": "demo", "payload": None, "idempotency_key": "one"}
    batch = [request, {**request, "idempotency_key": "two"}, {"type": ""}]
    made = await house.good("create_task", request, token=ada)
    await house.good("cancel_task", {"task_id": made["task_id"]}, token=ada)
    again = ("rerun_task", {"task_id": made["task_id"], "idempotency_key": "again"})

    told = [await house.ask(name, ask, token=ada, facade=facade) for name, ask in [
        ("create_task", request), ("run_task", {**request, "wait_seconds": 0}), ("create_tasks", {"tasks": batch}),
        again] * 5]

    assert [answer.code for answer in told] == [""] * 20
    new = [await house.ask("create_task", {"type": "demo", "payload": None}, token=ada) for _ in range(4)]
    assert [answer.code for answer in new] == ["", "", "", "rate_limit_exceeded"]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_repeated_creation_gets_its_task_when_the_limit_of_new_tasks_is_used(
        limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=3)
    request = {"type": "demo", "payload": None, "idempotency_key": "one"}
    first = (await house.good("create_task", request, token=ada))["task_id"]
    await house.good("cancel_task", {"task_id": first}, token=ada)
    rerun = {"task_id": first, "idempotency_key": "again"}
    again = (await house.good("rerun_task", rerun, token=ada))["task_id"]
    await house.good("create_task", {"type": "demo", "payload": None}, token=ada)

    async def ask(name: str, fields: dict[str, Any]) -> Told:
        told: Told = await house.ask(name, fields, token=ada, facade=facade)
        return told

    repeated = [await ask("create_task", request), await ask("run_task", {**request, "wait_seconds": 0}),
                await ask("rerun_task", rerun)]
    listed = await ask("create_tasks", {"tasks": [request, request]})
    new = [await ask("create_task", {**request, "idempotency_key": key}) for key in ("two", None)]
    mixed = await ask("create_tasks", {"tasks": [request, {**request, "idempotency_key": "two"}]})
    none = await ask("create_tasks", {"tasks": [{**request, "idempotency_key": key} for key in ("two", "three")]})

    assert [told.body["task_id"] for told in repeated] == [first, first, again]
    assert [item["task_id"] for item in listed.body["results"]] == [first, first]
    assert [told.code for told in (*new, none)] == ["rate_limit_exceeded"] * 3
    assert none.headers["x-ratelimit-bucket"] == f"tenant:{OTHER}:tasks"
    assert mixed.body["results"][0]["task_id"] == first
    assert mixed.body["results"][1]["error"]["error"] == "rate_limit_exceeded"
    assert mixed.body["results"][1]["error"]["retry_after"] > 0
    assert len((await house.good("list_tasks", token=ada))["tasks"]) == 3


@pytest.mark.parametrize("facade", FACADES)
async def test_of_a_list_only_what_is_new_has_to_fit_into_the_limit_of_new_tasks(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=4)
    orders = [{"type": "demo", "payload": None, "idempotency_key": str(n)} for n in range(5)]
    first = await house.good("create_tasks", {"tasks": orders[:3]}, token=ada)

    more = await house.good("create_tasks", {"tasks": orders[:4]}, token=ada, facade=facade)
    full = await house.good("create_tasks", {"tasks": orders}, token=ada, facade=facade)

    assert more["results"][:3] == first["results"]
    assert [item.get("status") for item in more["results"]] == ["queued"] * 4
    assert [item.get("task_id") for item in full["results"]] == [
        *(item["task_id"] for item in more["results"]), None]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_task_that_is_run_again_counts_as_a_new_one(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=2)
    made = await house.good("create_task", {"type": "demo", "payload": None}, token=ada)
    await house.good("cancel_task", {"task_id": made["task_id"]}, token=ada)

    told = [await house.ask("rerun_task", {"task_id": made["task_id"]}, token=ada, facade=facade) for _ in range(2)]

    assert [answer.code for answer in told] == ["", "rate_limit_exceeded"]


@pytest.mark.parametrize("facade", FACADES)
async def test_each_task_that_a_bulk_runs_again_counts_as_a_new_one(limited: Limited, facade: str) -> None:
    house, ada, clock = await limited(-1, tasks=8)
    root = await house.key("admin", "root", tenant=OTHER)
    made = await house.good("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 5}, token=ada)
    for item in made["results"]:
        await house.good("cancel_task", {"task_id": item["task_id"]}, token=ada)
    order = await house.good("preview_bulk", {"action": "rerun", "status": "canceled"}, token=root)
    asked = {"confirmation": order["confirmation"]}

    full = await house.ask("run_bulk", asked, token=root, facade=facade)
    others = await house.ask("create_task", {"type": "demo", "payload": None}, token=ada)
    among = await house.good("list_tasks", {"status": "queued"}, token=root)
    clock.now += HOUR_MS
    done = (await house.ask("run_bulk", asked, token=root, facade=facade)).body
    left = [await house.ask("create_task", {"type": "demo", "payload": None}, token=ada) for _ in range(7)]

    assert (full.code, others.code, len(among["tasks"])) == ("rate_limit_exceeded", "rate_limit_exceeded", 3)
    assert (done["ended"], done["done"]) == (True, 5)
    assert [answer.code for answer in left] == [""] * 6 + ["rate_limit_exceeded"]


@pytest.mark.parametrize("facade", FACADES)
async def test_who_may_not_create_does_not_use_up_the_tasks_of_others(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(-1, tasks=3)
    worker = await house.key("worker", "w1", tenant=OTHER)

    refused = [(await house.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 3}, token=worker,
                                facade=facade)).code
               for _ in range(5)]
    created = await house.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 3}, token=ada,
                              facade=facade)

    assert (refused, created.code) == (["forbidden"] * 5, "")


@pytest.mark.parametrize("facade", FACADES)
async def test_heartbeats_have_a_budget_of_their_own(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(5, heartbeat_factor=4)
    worker = await house.key("worker", "w1", tenant=OTHER)
    await house.good("create_task", {"type": "demo", "payload": None}, token=ada)
    [offer] = (await house.good("lease_next", token=worker))["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
    await passed(house, ada, 5)

    beats = [(await house.ask(name, {**held, **more}, token=worker, facade=facade)) for _ in range(11)
             for name, more in (("renew_lease", {}), ("report_progress", {"progress": 1}))]
    called = await house.ask("lease_next", token=worker, facade=facade)

    assert [answer.code for answer in beats] == [""] * 20 + ["rate_limit_exceeded"] * 2
    assert standing(beats[0])[:3] == (f"tenant:{OTHER}:heartbeats", 20, 19)
    assert (called.code, called.body["limit"]) == ("rate_limit_exceeded", 5)


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("name", ["complete", "complete_tasks", "fail", "release_lease"])
async def test_the_end_of_a_lease_is_counted_and_no_limit_of_calls_refuses_it(
        limited: Limited, name: str, facade: str) -> None:
    house, ada, _ = await limited(9, principal_percent=50)
    worker = await house.key("worker", "w1", tenant=OTHER)
    for _ in range(2):
        await house.good("create_task", {"type": "demo", "payload": None}, token=ada)
    offers = (await house.good("lease_next", {"max_tasks": 2}, token=worker))["tasks"]
    held = [{"task_id": offer["task_id"], "lease_id": offer["lease_id"]} for offer in offers]
    asks = [{"tasks": [lease]} if name == "complete_tasks" else {**lease, "error": 1} if name == "fail" else lease
            for lease in held]

    counted = await house.ask(name, asks[0], token=worker, facade=facade)
    spent = await passed(house, worker, 5)
    beyond = await house.ask(name, asks[1], token=worker, facade=facade)

    assert (counted.code, spent, beyond.code) == ("", 2, "")
    assert standing(counted)[2] == 2
    assert standing(beyond)[2] == 0
    assert (await house.ask("lease_next", token=worker, facade=facade)).code == "rate_limit_exceeded"


async def test_a_batch_of_more_ends_than_the_limit_has_left_ends_them_all(limited: Limited) -> None:
    house, ada, _ = await limited(30)
    worker = await house.key("worker", "w1", tenant=OTHER)
    await house.good("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 20}, token=ada)
    offers = (await house.good("lease_next", {"max_tasks": 20}, token=worker))["tasks"]
    tasks = [{"task_id": offer["task_id"], "lease_id": offer["lease_id"]} for offer in offers]

    ended = await house.good("complete_tasks", {"tasks": tasks}, token=worker)

    assert [item["status"] for item in ended["results"]] == ["succeeded"] * 20


async def test_without_the_store_of_the_limits_a_lease_can_still_be_ended(limited: Limited) -> None:
    house, ada, _ = await limited(9)
    worker = await house.key("worker", "w1", tenant=OTHER)
    await house.good("create_task", {"type": "demo", "payload": None}, token=ada)
    (offer,) = (await house.good("lease_next", token=worker))["tasks"]

    async def take(buckets: object, cost: int = 1) -> LimitVerdict:
        raise LimiterUnavailable("the store is away")
    house.guard.limits.take = take

    ended = await house.ask("complete", {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}, token=worker)
    assert (ended.code, (await house.ask("lease_next", token=worker)).code) == ("", "rate_limiter_unavailable")


def test_one_principal_cannot_spend_the_calls_of_its_tenant() -> None:
    assert 1 <= RateLimiting().principal_percent < 100


async def test_a_heartbeat_by_the_other_path_is_one_too(limited: Limited) -> None:
    house, _, _ = await limited(5)
    worker = await house.key("worker", "w1", tenant=OTHER)

    answer = await house.served.call("POST", "/v1/leases/none/extend", {}, token=worker)

    assert answer.headers["x-ratelimit-bucket"] == f"tenant:{OTHER}:heartbeats"


@pytest.mark.parametrize("facade", FACADES)
async def test_a_long_poll_counts_once_however_often_it_looks(limited: Limited, facade: str) -> None:
    house, _, _ = await limited(2)
    worker = await house.key("worker", "w1", tenant=OTHER)

    poll = asyncio.ensure_future(house.ask("lease_next", {"wait_seconds": 30}, token=worker, facade=facade))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not house.served.engine.waiting.count:  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0)
    for _ in range(5):
        house.served.engine.waiting._wake_places(OTHER, None)
        await asyncio.sleep(0.01)
    house.served.engine.drain()

    assert (await poll).body == {"tasks": []}
    assert await passed(house, worker, 3) == 1


# Tiers and exemptions (21.4.2, 21.4.5).


@pytest.mark.parametrize("facade", FACADES)
async def test_another_tier_holds_at_once_and_keeps_what_was_used(limited: Limited, facade: str) -> None:
    house, ada, clock = await limited(3)
    assert await passed(house, ada, 5, facade=facade) == 3

    await house.good("set_limits", {"tenant": OTHER, "tier": "paid"})
    clock.now += 36     # in which a paid tenant gains a call
    told = await house.ask("list_tasks", token=ada, facade=facade)

    assert (told.code, standing(told)[1]) == ("", 100_000)
    await house.good("set_limits", {"tenant": OTHER, "tier": "enterprise"})
    free = await house.ask("list_tasks", token=ada, facade=facade)
    assert (free.code, standing(free)[0]) == ("", "server:api_calls")


@pytest.mark.parametrize("facade", FACADES)
async def test_an_exempt_tenant_is_not_limited_until_the_time_is_over(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(3, tasks=1)
    await passed(house, ada, 3, facade=facade)
    assert await passed(house, ada, 2, facade=facade) == 0

    await house.good("set_limits", {"tenant": OTHER, "exempt_until": "2099-01-01T00:00:00Z", "reason": "contract"})
    freely = await passed(house, ada, 20, facade=facade)
    created = await house.ask("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 9}, token=ada,
                              facade=facade)
    house.served.backend.now, now = (lambda: 4_102_444_801.0), house.served.backend.now
    after = await passed(house, ada, 2, facade=facade)
    house.served.backend.now = now

    assert (freely, created.code, after) == (20, "", 0)
    assert [line["details"]["approved_by"] for line in await house.audit(OTHER, "rate_limit_bypass_granted")] == [
        "asyncgate"]


async def test_nobody_exempts_itself(limited: Limited) -> None:
    house, _, _ = await limited(10)
    root = await house.key("admin", "root", tenant=OTHER)

    told = await house.ask("set_limits", {"tenant": OTHER, "exempt_until": "2099-01-01T00:00:00Z", "reason": "mine"},
                           token=root)

    assert told.code == "forbidden"


async def test_the_operator_is_in_a_tier_too(serve: Any) -> None:
    house = House(await serve(security=security(limits=True, default_tier="free"), rate_limits=tiers(3)))
    house.counting()

    told = [(await house.ask("list_tasks")).headers["x-ratelimit-bucket"] for _ in range(3)]

    assert told == [f"tenant:{HOME}:api_calls"] * 3
    assert (await house.ask("list_tasks")).code == "rate_limit_exceeded"


@pytest.mark.parametrize("facade", FACADES)
async def test_an_exempt_tenant_is_told_how_the_server_stands(limited: Limited, facade: str) -> None:
    """21.4.3: all responses have the headers; 21.4.1: nobody is exempt from the limit of the server."""
    house, ada, _ = await limited(3, server_calls_per_minute=20)
    await house.good("set_limits", {"tenant": OTHER, "exempt_until": "2099-01-01T00:00:00Z", "reason": "contract"})

    told = [await house.ask("list_tasks", token=ada, facade=facade) for _ in range(25)]

    assert told[0].headers.keys() & LIMIT_NAMES == LIMIT_NAMES
    assert standing(told[0])[:2] == ("server:api_calls", 20)
    assert {answer.code for answer in told[-5:]} == {"rate_limit_exceeded"}
    assert told[-1].body["message"] == "Server API call limit exceeded (20/minute)"


@pytest.mark.parametrize("facade", FACADES)
async def test_tasks_that_are_refused_do_not_count_as_created(limited: Limited, facade: str) -> None:
    """21.4.2 counts tasks, 21.6.1 refuses them: what was not made was not created."""
    house, ada, _ = await limited(-1, tasks=4, active=2)
    ask: dict[str, Any] = {"token": ada, "facade": facade}
    for _ in range(2):
        await house.good("create_task", {"type": "demo", "payload": None}, **ask)

    alone = [await house.ask("create_task", {"type": "demo", "payload": None}, **ask) for _ in range(5)]
    together = await house.good("create_tasks", {"tasks": [{"type": "demo", "payload": None}] * 2}, **ask)
    wrong = await house.ask("create_task", {"type": ""}, **ask)

    assert {answer.code for answer in alone} == {"quota_exceeded"}
    assert alone[0].body["quota"] == "active_tasks"
    assert alone[0].body["retry_after"] == 60
    errors = [item["error"] for item in together["results"]]
    assert [(error["error"], error["quota"], error["limit"], error["retry_after"]) for error in errors] == [
        ("quota_exceeded", "active_tasks", 2, 60)] * 2
    assert wrong.code == "invalid_request"
    limits = await house.good("get_limits", {"tenant": OTHER})
    assert limits["used"]["tasks_this_hour"] == 2


@pytest.mark.parametrize("facade", FACADES)
async def test_what_is_used_stands_beside_the_limits(limited: Limited, facade: str) -> None:
    house, ada, _ = await limited(50, tasks=10)
    tasks = [(await house.good("create_task", {"type": "demo", "payload": None},
                               token=ada))["task_id"] for _ in range(3)]
    await house.good("cancel_task", {"task_id": tasks[0]}, token=ada)

    limits = await house.good("get_limits", {"tenant": OTHER}, facade=facade)

    size = limits["used"].pop("receipt_storage_bytes")
    assert limits["used"] == {"active_tasks": 2, "concurrent_leases": 0, "terminal_tasks": 1, "step_storage_bytes": 0,
                              "tasks_this_hour": 3, "api_calls_this_hour": 4}
    assert size > 0


async def test_what_is_used_is_told_also_where_nothing_is_enforced(serve: Any) -> None:
    house = House(await serve(security=security()))
    await house.good("create_task", {"type": "demo", "payload": None})

    used = (await house.good("get_limits"))["used"]

    assert (used["active_tasks"], used["tasks_this_hour"]) == (1, 0)


# Stricter limits for a time (21.9.2).


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_may_be_limited_further_for_a_time(serve: Any, facade: str, enforced: bool) -> None:
    house = House(await serve(security=security(limits=enforced, default_tier="enterprise")))
    clock = house.counting()
    await house.good("create_tenant", {"tenant": OTHER, "name": "ours"})
    ada, root = await house.key("agent", "ada", tenant=OTHER), await house.key("admin", "root", tenant=OTHER)
    await house.good("set_limits", {
        "tenant": OTHER, "stricter_calls_per_hour": 5, "stricter_tasks_per_hour": 2,
        "stricter_until": "2099-01-01T00:00:00Z", "reason": "it floods us"}, facade=facade)

    made = [await house.ask("create_task", {"type": "demo", "payload": None}, token=ada,
                            facade=facade) for _ in range(3)]
    told = [await house.ask("list_tasks", token=ada, facade=facade) for _ in range(3)]

    assert [answer.code for answer in made] == ["", "", "rate_limit_exceeded"]
    assert [answer.code for answer in told] == ["", "", "rate_limit_exceeded"]
    clock.now += 2 * HOUR_MS
    limits = await house.good("get_limits", token=root)
    assert (limits["api_calls_per_hour"], limits["tasks_per_hour"], limits["stricter_why"]) == (5, 2, "it floods us")
    line = next(line for line in await house.audit(OTHER) if line["event"] == "rate_limit_tightened")
    assert (line["severity"], line["reason"]) == ("critical", "it floods us")
    await house.good("set_limits", {"tenant": OTHER, "stricter_until": "2020-01-01T00:00:00Z", "reason": "over"})
    assert (await house.good("get_limits", {"tenant": OTHER}))["api_calls_per_hour"] == -1


async def test_stricter_limits_go_before_an_exemption_and_need_all_that_they_are(limited: Limited) -> None:
    house, ada, _ = await limited(100)
    until: dict[str, Any] = {"stricter_until": "2099-01-01T00:00:00Z", "reason": "why"}
    bad: list[dict[str, Any]] = [until, {**until, "stricter_calls_per_hour": 3, "reason": None},
                                 {"stricter_calls_per_hour": 3}]
    told = [await house.ask("set_limits", {"tenant": OTHER, **fields}) for fields in bad]
    await house.good("set_limits", {"tenant": OTHER, "stricter_calls_per_hour": 3, **until})
    await house.good("set_limits", {"tenant": OTHER, "exempt_until": "2099-01-01T00:00:00Z", "reason": "contract"})

    assert [answer.code for answer in told] == ["invalid_request"] * 3
    assert await passed(house, ada, 5) == 3


# Storage (21.6.3).


async def test_when_storage_is_full_the_oldest_receipts_go_to_the_archive(serve: Any, tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "GIGABYTE", 10_000)
    monkeypatch.setattr(archive, "GIGABYTE", 10_000)
    limits = security(limits=True, default_tier="free")
    house = House(await serve(security=limits, rate_limits=RateLimits(free_tier=Tier(receipt_storage_gb=1)),
                              archive=ArchiveSettings(enabled=True, directory=str(tmp_path / "archive"))))
    told = None
    for _ in range(100):
        told = await house.ask("create_task", {"type": "demo", "payload": None, "task_summary": "x" * 500})
        if told.code:
            break
        await house.good("cancel_task", {"task_id": told.body["task_id"]})
    assert told is not None
    assert (told.code, told.body["quota"]) == ("quota_exceeded", "receipt_storage_gb")

    await asyncio.gather(*house.guard.relieving.values())

    assert (await house.ask("create_task", {"type": "demo", "payload": None})).code == ""
    assert (await house.good("list_archived_receipts"))["receipts"]


# Several gates and one store (F10).


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A server that a test may kill."""
    with started() as server:
        yield server


@contextlib.asynccontextmanager
async def gates(
        valkey: Valkey, number: int, limit: int, **limiting: Any) -> AsyncIterator[tuple[list[House], list[str]]]:
    """Serve one database from several gates that share a store, with a key of a tenant that may call so often."""
    limits = security(limits=True, storage="redis", redis_url=valkey.url, store_timeout_seconds=5.0, gates=number,
                      default_tier="free", address_calls_per_minute=-1, **limiting)
    settings = Settings(api_key="a-token-for-tests", security=limits, rate_limits=tiers(limit))
    backend = await open_backend("memory:")
    async with contextlib.AsyncExitStack() as running:
        houses = []
        for _ in range(number):
            gate = Gate(settings, backend)
            await running.enter_async_context(gate.app.router.lifespan_context(gate.app))
            houses.append(House(Served(gate)))
        own = houses[0].guard.limits
        houses[0].guard.limits = MemoryLimits()     # making the keys is not what is counted
        keys = [await houses[0].key("agent", f"a{n}", tenant=OTHER) for n in range(3)]
        houses[0].guard.limits = own
        yield houses, keys


@pytest.mark.parametrize("facade", ["rest", "modern", "bare"])
async def test_gates_that_share_a_store_admit_together_no_more_than_the_limit(valkey: Valkey, facade: str) -> None:
    async with gates(valkey, 2, 40) as (houses, keys):
        for house in houses:
            await house.ask("get_config", token=keys[0], facade=facade)     # the first call learns the key

        told = await asyncio.gather(*[house.ask("list_tasks", token=key, facade=facade)
                                      for _ in range(15) for house in houses for key in keys])

        codes = [answer.code for answer in told]
        assert codes.count("") == 40 - 2
        assert codes.count("rate_limit_exceeded") == 90 - 38
        assert not any(house.guard.limits.degraded for house in houses)


async def test_a_gate_that_loses_the_store_counts_its_part_by_itself(
        valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with gates(valkey, 2, 20) as (houses, keys):
        assert [await passed(house, keys[0], 5) for house in houses] == [5, 5]

        valkey.kill()
        after = [await passed(house, keys[0], 30) for house in houses]

        assert after == [10, 10], "half of the limit each"
        assert all(house.guard.limits.degraded for house in houses)
        told = await houses[0].ask("list_tasks", token=keys[0])
        assert (told.status, standing(told)[1]) == (429, 10)
        assert (await houses[0].served.call("GET", "/v1/health", token=None)).status == 200
        assert len([record for record in caplog.records if "is unreachable" in record.getMessage()]) == 2


async def test_a_gate_that_finds_the_store_again_counts_there(valkey: Valkey) -> None:
    async with gates(valkey, 2, 20) as (houses, keys):
        for house in houses:
            house.guard.limits.retry_seconds = 0.01
        valkey.kill()
        await passed(houses[0], keys[0], 30)
        valkey.start()

        async with asyncio.timeout(PATIENCE_SECONDS):
            while any(house.guard.limits.degraded for house in houses):
                for house in houses:
                    await house.ask("get_config", token=keys[0])
                await asyncio.sleep(0.01)
        told = await houses[1].ask("get_config", token=keys[0])

        assert standing(told)[1] == 20


@pytest.mark.parametrize("facade", ["rest", "modern", "bare"])
async def test_a_gate_told_to_deny_answers_503_while_the_store_is_lost(valkey: Valkey, facade: str) -> None:
    async with gates(valkey, 1, 20, on_store_failure="deny") as ([house], keys):
        valkey.kill()

        told = await house.ask("list_tasks", token=keys[0], facade=facade)
        stranger = await house.served.call("GET", "/v1/nothing", token=None)

        assert told.code == "rate_limiter_unavailable"
        assert "retry-after" in told.headers
        assert stranger.status == 503
        assert (await house.served.call("GET", "/v1/health", token=None)).status == 200


def test_the_limits_are_memory_s_unless_told_otherwise() -> None:
    assert isinstance(open_limits(Settings()), MemoryLimits)
