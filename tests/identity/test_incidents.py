"""What to do when a credential may be in wrong hands (spec 21.9), over every façade."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncgate import Caller
from asyncgate.parts.identity.admin import NewKeys, extend_once
from asyncgate.parts.identity.incidents import KEYS_PER_CALL
from asyncgate.parts.identity.keys import MOST_HASHING, MOST_WAITING, place_of
from asyncgate.parts.identity.notices import write_notice
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.wire import Principal
from tests.identity.test_keys import until
from tests.support.identity_tools import FACADES, HOME, OTHER, House, security

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(serve: Any) -> House:
    """A gate behind a proxy, which says who its client is."""
    return House(await serve(security=security(), trusted_proxies=("127.0.0.1",)))


def from_where(address: str) -> list[tuple[str, str]]:
    return [("x-forwarded-for", address)]


async def notices(house: House, token: str) -> list[dict[str, Any]]:
    """Return what the gate has told an admin."""
    while house.guard.auditor.telling:
        await asyncio.gather(*house.guard.auditor.telling)
    mine = {"to_kind": "human", "to_id": "root", "receipt_type": "system.anomaly"}
    return [receipt["body"] for receipt in (await house.good("list_receipts", mine, token=token))["receipts"]]


@pytest.mark.parametrize("facade", FACADES)
async def test_all_keys_of_a_tenant_are_replaced_at_once(house: House, facade: str) -> None:
    """21.9.1: force token rotation for tenant."""
    root = await house.admin_of(OTHER)
    ada, worker = await house.key("agent", "ada", tenant=OTHER), await house.key("worker", "w1", tenant=OTHER)
    gone, ours = await house.key("agent", "gone", tenant=OTHER), await house.key("agent", "ours")
    await house.good("revoke_key", {"tenant": OTHER, "key_id": house.ids[gone]})

    reply = await house.good("rotate_credentials", {"tenant": OTHER, "reason": "leaked"}, facade=facade)

    for token in (root, ada, worker, gone):
        assert (await house.ask("list_receipts", token=token)).code == "unauthenticated"
    assert (await house.ask("list_tasks", token=ours)).code == ""
    fresh = {key["key"]["principal_id"]: key["api_key"] for key in reply["keys"]}
    assert fresh.keys() == {"root", "ada", "w1"}
    assert not reply["more"]
    for token in fresh.values():
        assert (await house.ask("list_receipts", token=token)).code == ""
    line = next(line for line in await house.audit(OTHER) if line["event"] == "credentials_rotated")
    assert (line["severity"], line["reason"], line["details"]["keys"]) == ("critical", "leaked", 3)
    [told] = [notice for notice in await notices(house, fresh["root"]) if notice["kind"] == "credentials_rotated"]
    assert told["details"] == {"reason": "leaked", "keys": 3, "by": "system asyncgate"}


@pytest.mark.parametrize("facade", FACADES)
async def test_an_admin_rotates_its_own_tenant_only_and_old_keys_may_overlap(house: House, facade: str) -> None:
    root, ours = await house.admin_of(OTHER), await house.key("agent", "ours")

    foreign = await house.ask("rotate_credentials", {"tenant": HOME}, token=root, facade=facade)
    by_agent = await house.ask("rotate_credentials", token=ours, facade=facade)
    own = await house.good("rotate_credentials", {"overlap_seconds": 60}, token=root, facade=facade)

    assert (foreign.code, by_agent.code) == ("tenant_not_found", "forbidden")
    assert [key["key"]["principal_id"] for key in own["keys"]] == ["root"]
    assert (await house.ask("list_receipts", token=root)).code == ""


async def test_a_tenant_with_many_keys_is_rotated_in_several_calls(house: House) -> None:
    await house.good("create_tenant", {"tenant": OTHER, "name": "ours"})
    for n in range(KEYS_PER_CALL + 3):
        await house.key("agent", f"a{n}", tenant=OTHER)

    first = await house.good("rotate_credentials", {"tenant": OTHER})
    again = {"tenant": OTHER, "issued_before": first["issued_before"]}
    second = await house.good("rotate_credentials", again)
    third = await house.good("rotate_credentials", again)

    assert [(len(batch["keys"]), batch["more"]) for batch in (first, second, third)] == [
        (KEYS_PER_CALL, True), (3, False), (0, False)]
    names = [key["key"]["principal_id"] for reply in (first, second) for key in reply["keys"]]
    assert len(set(names)) == KEYS_PER_CALL + 3


async def test_new_keys_beyond_those_that_may_wait_are_refused_and_keys_are_checked_meanwhile(house: House) -> None:
    """Threat A10: two are hashed at a time, sixteen wait."""
    other, go = await house.key("agent", "bob"), threading.Event()
    hasher = extend_once(house.guard.engine, NewKeys).hasher
    held = [hasher.executor.submit(go.wait) for _ in range(MOST_HASHING)]
    try:
        issuing = [asyncio.ensure_future(house.key("agent", f"a{n}")) for n in range(MOST_HASHING + MOST_WAITING)]
        await until(lambda: hasher.waiting == MOST_WAITING)

        late = await house.ask("issue_key", {"name": "late", "principal_kind": "agent", "principal_id": "late"})
        known = await house.ask("list_tasks", token=other)
    finally:
        go.set()

    assert (late.status, late.code, late.body["retry_after"]) == (503, "overloaded", 1)
    assert known.code == ""
    assert len(set(await asyncio.gather(*issuing))) == MOST_HASHING + MOST_WAITING
    assert all(future.result() for future in held)


async def test_access_tokens_from_before_a_rotation_are_refused(house: House) -> None:
    await house.good("create_tenant", {"tenant": OTHER, "name": "ours"})
    now = house.served.backend.now()
    before, after = (Caller(OTHER, Principal("agent", "ada"), "agent", frozenset(), issued_at=at)
                     for at in (now - 60, now + 60))
    await house.guard.accounts.require_active(before)

    await house.good("rotate_credentials", {"tenant": OTHER})

    await house.guard.accounts.require_active(after)
    with pytest.raises(Exception, match="no longer valid") as refused:
        await house.guard.accounts.require_active(before)
    assert refused.value.because[0] == "token_revoked"      # type: ignore[attr-defined]


@pytest.mark.parametrize("facade", FACADES)
async def test_what_a_key_was_used_for_is_on_record(house: House, facade: str) -> None:
    """21.9.1: audit all operations with compromised token."""
    ada, bob = await house.key("agent", "ada"), await house.key("agent", "bob")
    demo, by_ada = {"type": "demo", "payload": None}, {"token": ada, "facade": facade}
    tasks = [(await house.good("create_task", demo, **by_ada))["task_id"] for _ in range(2)]
    batch = await house.good("create_tasks", {"tasks": [demo] * 2}, **by_ada)
    await house.good("cancel_task", {"task_id": tasks[0]}, token=ada, facade=facade)
    await house.ask("lease_next", token=ada, facade=facade)
    await house.good("list_tasks", token=bob)
    house.guard.auditor.count()
    await house.audit()

    lines = (await house.good("list_audit", {"key_id": house.ids[ada], "limit": 100}, facade=facade))["lines"]

    assert {line["event"] for line in lines} == {"key_issued", "auth_success", "authorization_failure", "key_used"}
    [used] = [line["details"] for line in lines if line["event"] == "key_used"]
    assert used["operations"] == {"create_task": 2, "create_tasks": 1, "cancel_task": 1}
    assert used["tasks"] == [*tasks, *[item["task_id"] for item in batch["results"]]]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_that_is_used_from_elsewhere_is_noted_and_its_admins_are_told(house: House, facade: str) -> None:
    """21.9.1: token use from unexpected IP/location."""
    root = await house.admin_of(OTHER)
    ada = await house.key("agent", "ada", tenant=OTHER)
    for address in ("192.0.2.7", "192.0.2.99", "192.0.2.7", "203.0.113.5", "203.0.113.6", "192.0.2.8"):
        await house.good("list_tasks", token=ada, facade=facade, headers=from_where(address))

    [line] = [line for line in await house.audit(OTHER) if line["event"] == "unusual_address"]
    assert (line["severity"], line["ip"], line["details"]["key_id"]) == ("warning", "203.0.113.5", house.ids[ada])
    [told] = [notice for notice in await notices(house, root) if notice["kind"] == "unusual_address"]
    assert told["details"]["key_id"] == house.ids[ada]
    assert told["details"]["place"] == place_of("203.0.113.5") == "203.0.113.0/24"


async def test_usual_addresses_outlive_a_restart(house: House) -> None:
    ada = await house.key("agent", "ada")
    await house.good("list_tasks", token=ada, headers=from_where("192.0.2.7"))
    await asyncio.gather(*house.guard.keys.tasks)
    house.guard.keys.proven.clear()         # as a new process begins

    for address in ("192.0.2.7", "203.0.113.5"):
        await house.good("list_tasks", token=ada, headers=from_where(address))

    [line] = [line for line in await house.audit() if line["event"] == "unusual_address"]
    assert line["ip"] == "203.0.113.5"


@pytest.mark.parametrize("facade", FACADES)
async def test_admins_are_told_of_a_revoked_key_and_of_stricter_limits(house: House, facade: str) -> None:
    """21.9.1 and 21.9.2: notify tenant admin."""
    root = await house.admin_of(OTHER)
    ada = await house.key("agent", "ada", tenant=OTHER)

    await house.good("revoke_key", {"key_id": house.ids[ada], "reason": "leaked"}, token=root, facade=facade)
    await house.good("set_limits", {"tenant": OTHER, "stricter_calls_per_hour": 50, "reason": "a flood",
                                    "stricter_until": "2099-01-01T00:00:00Z"}, facade=facade)

    told = {notice["kind"]: notice["details"] for notice in await notices(house, root)}
    assert told["key_revoked"]["reason"] == "leaked"
    assert told["rate_limit_tightened"]["calls_per_hour"] == 50


@pytest.mark.parametrize("facade", FACADES)
async def test_a_key_that_is_no_good_any_more_cannot_be_rotated(house: House, facade: str) -> None:
    ada, bob = await house.key("agent", "ada"), await house.key("agent", "bob")
    await house.good("revoke_key", {"key_id": house.ids[ada]})
    await house.good("rotate_key", {"key_id": house.ids[bob]})

    told = [await house.ask("rotate_key", {"key_id": house.ids[token]}, facade=facade) for token in (ada, bob)]

    assert [answer.code for answer in told] == ["invalid_state_transition"] * 2
    assert facade != "rest" or {answer.status for answer in told} == {409}


async def test_admins_who_cannot_be_told_during_an_outage_are_a_line_in_the_log(
        house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def away(*asked: Any) -> Any:
        raise DatabaseUnavailable("the database does not answer; try again")

    monkeypatch.setattr(house.guard.engine.backend, "page", away)

    await write_notice(house.guard.engine, OTHER, "unusual_address")

    [message] = [record.getMessage() for record in caplog.records if record.name == "asyncgate"]
    assert message == f"the admins of tenant {OTHER} could not be notified of unusual_address"
