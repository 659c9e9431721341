"""Limits with names: how many tasks may run at once, of everything and under a key, and whose turn it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncgate import Needs, Work
from asyncgate.conformance import harness, test_waiting
from asyncgate.extras.limits.pruning import TurnPruner
from asyncgate.parts.model import queries, stored_limits, wire
from asyncgate.parts.model.limiting import SPARE_TURNS, Full

pytestmark = pytest.mark.anyio


async def claim(gate: harness.Gate, most: int = 1, **more: Any) -> list[wire.Offer]:
    """Return what a claim gets."""
    offers: list[wire.Offer] = (await gate.as_worker().lease_next(max_tasks=most, **more)).tasks
    return offers


async def held(gate: harness.Gate) -> int:
    """Return how many tasks count against limits."""
    return len(await gate.backend.page(gate.tenant_id, queries.Rows(stored_limits.Hold, "", 1000)))


async def complete(gate: harness.Gate, offer: wire.Offer) -> None:
    """End a task well."""
    await gate.as_worker().complete(**harness.under(offer, artifacts=["x"]))


async def test_no_more_tasks_than_a_limit_allows_are_leased_at_once(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=3)
    for _ in range(10):
        await gate.create(limits={"openai": ""})

    offers = await claim(gate, 10)

    assert len(offers) == 3
    assert await claim(gate, 10) == []
    await complete(gate, offers[0])
    assert len(await claim(gate, 10)) == 1


async def test_a_task_that_names_a_limit_nobody_has_set_waits_for_nothing(gate: harness.Gate) -> None:
    for _ in range(3):
        await gate.create(limits={"openai": ""})

    assert len(await claim(gate, 10)) == 3


async def test_a_full_limit_keeps_no_task_that_does_not_name_it(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=0)
    for _ in range(40):
        await gate.create(limits={"openai": ""}, priority=9)
    free = await gate.create()

    assert [offer.task_id for offer in await claim(gate, 10)] == [free]


async def test_a_full_key_keeps_no_other_key_waiting(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=2)
    for _ in range(200):
        await gate.create(limits={"customer": "a"}, priority=9)
    other = await gate.create(limits={"customer": "b"})

    offers = await claim(gate, 10)

    assert [offer.task_id for offer in offers if offer.task_id == other] == [other]
    assert len(offers) == 3


async def test_large_tasks_of_a_full_key_keep_no_other_key_waiting(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    for _ in range(6):      # more than a claim reads at once
        await gate.create(limits={"customer": "a"}, payload="x" * 1_000_000)
    assert len(await claim(gate)) == 1
    other = await gate.create(limits={"customer": "b"})

    assert [offer.task_id for offer in await claim(gate, 10)] == [other]


async def fill_keys(gate: harness.Gate, keys: int) -> None:
    """Let keys be full that no claim has found full yet."""
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1,
                                    overrides={"last": {"concurrency_per_key": 100}})
    for number in range(2 * keys):
        await gate.create(limits={"customer": f"k{number % keys}"})
    assert [len(await claim(gate)) for _ in range(keys)] == [1] * keys


async def test_a_claim_looks_on_behind_the_keys_that_it_finds_full(gate: harness.Gate) -> None:
    await fill_keys(gate, 1 + SPARE_TURNS)
    behind = await gate.create(limits={"customer": "last"})

    assert [offer.task_id for offer in await claim(gate)] == [behind]


async def test_a_key_of_which_a_claim_read_some_tasks_has_the_others_left(gate: harness.Gate) -> None:
    await fill_keys(gate, 9)
    made = [await gate.create(limits={"customer": "last"}) for _ in range(8)]

    offers = [offer for _ in range(2) for offer in await claim(gate, 10)]

    assert [offer.task_id for offer in offers] == made


async def test_keys_get_turns_and_a_key_with_many_tasks_no_more_than_others(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer")
    for _ in range(30):
        await gate.create(limits={"customer": "a"})
    late = [await gate.create(limits={"customer": "b"}) for _ in range(3)]

    offers = [offer for _ in range(6) for offer in await claim(gate)]

    assert {offer.task_id for offer in offers} >= set(late)


async def test_a_key_gets_turns_by_its_weight(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", overrides={"a": {"weight": 3}})
    for key in ("a", "b"):
        for _ in range(40):
            await gate.create(limits={"customer": key})

    offers = [offer for _ in range(40) for offer in await claim(gate)]

    keys = [((await gate.task(offer.task_id)).limits or {})["customer"] for offer in offers]
    assert keys.count("a") == 30


async def test_within_a_key_tasks_are_leased_by_priority_and_then_by_age(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer")
    low, first, second = [await gate.create(limits={"customer": "a"}, priority=priority) for priority in (0, 5, 5)]

    assert [(await claim(gate))[0].task_id for _ in range(3)] == [first, second, low]


async def test_all_limits_of_a_task_must_allow(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=2)
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    for key in ("a", "a", "b", "c"):
        await gate.create(limits={"openai": "", "customer": key})

    offers = await claim(gate, 10)

    assert len(offers) == 2
    assert await claim(gate, 10) == []
    for offer in offers:
        await complete(gate, offer)
    assert len(await claim(gate, 10)) == 2


@pytest.mark.parametrize("end", ["complete", "fail", "release", "park", "cancel", "lose", "retry", "ask"])
async def test_a_lease_that_ends_however_leaves_its_room_to_the_next(gate: harness.Gate, end: str) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=1)
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    limits = {"openai": "", "customer": "a"}
    await gate.create(limits=limits)
    [offer] = await claim(gate)
    other = await gate.create(limits=limits, priority=9)
    assert await claim(gate) == []
    worker = gate.as_worker()

    if end == "complete":
        await complete(gate, offer)
    elif end in ("fail", "retry"):
        await worker.fail(**harness.under(offer, error="no", retryable=end == "retry"))
    elif end == "release":
        await worker.release_lease(**harness.under(offer))
    elif end == "park":
        await worker.release_lease(**harness.under(offer, delay_seconds=50))
    elif end == "cancel":
        await gate.cancel_task(task_id=offer.task_id)
    elif end == "lose":
        await gate.lose(offer)
    else:
        await worker.request_input(**harness.under(offer, key="k", message="?"))

    assert await held(gate) == 0
    [following] = await claim(gate)
    assert following.task_id == other
    assert await held(gate) == 2


async def test_a_limit_is_changed_at_run_time(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    await admin.set_limit(name="customer", concurrency_per_key=1)
    for _ in range(6):
        await gate.create(limits={"customer": "a"})
    assert len(await claim(gate, 10)) == 1
    assert await claim(gate, 10) == []

    await admin.set_limit(name="customer", concurrency_per_key=3)
    assert len(await claim(gate, 10)) == 2
    assert (await admin.get_limit(name="customer")).in_use == 3
    await admin.remove_limit(name="customer")

    assert len(await claim(gate, 10)) == 3
    assert [row.name for row in (await admin.list_limits()).limits] == []


@pytest.mark.parametrize(("limits", "rules"), [
    ({"openai": ""}, {"concurrency_total": 1}),
    ({"openai": ""}, {"concurrency_per_key": 1}),
    ({"openai": "a"}, {"concurrency_per_key": 1}),
    ({"openai": "a"}, {"overrides": {"a": {"concurrency_per_key": 1}}}),
])
async def test_leases_that_end_make_no_room_below_a_lowered_limit(
        gate: harness.Gate, limits: dict[str, str], rules: dict[str, Any]) -> None:
    for _ in range(9):
        await gate.create(limits=limits)
    offers = await claim(gate, 6)
    await gate.as_admin().set_limit(name="openai", **rules)

    claims = list[Any]()
    for offer in offers[:5]:    # the end of a lease and a claim are decided in one batch
        _, given = await asyncio.gather(complete(gate, offer), claim(gate, 3))
        claims += given

    assert claims == []
    assert await held(gate) == 1


async def test_get_limit_shows_who_holds_it_and_how_many_wait(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    for key in ("a", "a", "b"):
        await gate.create(limits={"customer": key})
    offers = await claim(gate, 10)

    shown = await gate.as_admin().get_limit(name="customer")
    only = await gate.as_admin().get_limit(name="customer", key="b")

    assert (shown.in_use, shown.waiting) == (2, 1)
    assert [holder.task_id for holder in shown.holders] == [offer.task_id for offer in offers]
    assert [holder.key for holder in only.holders] == ["b"]
    with harness.refused("limit_not_found"):
        await gate.as_admin().get_limit(name="nothing")


async def test_a_delayed_task_with_limits_is_leased_when_its_time_comes(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    late = await gate.create(limits={"customer": "a"}, delay_seconds=50)
    assert await claim(gate) == []

    gate.skip(51)

    assert [offer.task_id for offer in await claim(gate)] == [late]


async def test_a_rate_lets_so_many_begin_in_a_window(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 3, "seconds": 60})
    for _ in range(8):
        await gate.create(limits={"api": ""})
    for offer in (offers := await claim(gate, 10)):
        await complete(gate, offer)
    assert len(offers) == 3
    assert await claim(gate, 10) == []

    gate.skip(61)

    assert len(await claim(gate, 10)) == 3


async def test_a_claim_waits_for_the_end_of_a_window_that_others_have_used_up(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 1, "seconds": 0.3})
    made = [await gate.create(limits={"api": "a"}) for _ in range(2)]
    met = [await claim(gate) for _ in range(2)]

    waiting = test_waiting.start(test_waiting.wait(gate, "w2"))

    assert len(met[0]) == 1
    assert await test_waiting.got(waiting) == [task_id for task_id in made if task_id not in {
        offer.task_id for offers in met for offer in offers}]


async def test_a_rate_under_a_key_keeps_that_key_alone(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 1, "seconds": 60}, overrides={
        "big": {"rate": {"count": 2, "seconds": 60}}})
    for key in ("a", "a", "big", "big", "big"):
        await gate.create(limits={"api": key})

    keys = [((await gate.task(offer.task_id)).limits or {})["api"] for offer in await claim(gate, 10)]

    assert sorted(keys) == ["a", "big", "big"]
    assert await claim(gate, 10) == []
    gate.skip(61)
    assert len(await claim(gate, 10)) == 2


async def test_a_task_uses_as_much_of_a_rate_as_it_costs(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 10, "seconds": 60})
    for _ in range(5):
        await gate.create(limits={"api": ""}, cost=5)

    assert len(await claim(gate, 10)) == 2
    gate.skip(61)
    assert len(await claim(gate, 10)) == 2


async def test_a_worker_stops_a_limit_for_all_and_it_goes_on_by_itself(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=5)
    for _ in range(3):
        await gate.create(limits={"openai": ""}, retry_backoff_seconds=0)
    [offer] = await claim(gate)

    await gate.as_worker().fail(**harness.under(
        offer, error={"message": "429"}, retryable=True, retry_after_seconds=30, stop_limit="openai"))

    assert await claim(gate, 10) == []
    assert (await gate.as_admin().get_limit(name="openai")).stopped_by == offer.task_id
    gate.skip(31)
    assert len(await claim(gate, 10)) == 3


async def test_a_limit_that_is_only_stopped_and_let_go_on_keeps_what_was_set(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    was_set = await admin.set_limit(name="openai", concurrency_total=5, overrides={"a": {"weight": 2}})

    stopped = await admin.set_limit(name="openai", stopped_until="2099-01-01T00:00:00Z")
    free = await admin.set_limit(name="openai", stopped_until="2020-01-01T00:00:00Z")
    emptied = await admin.set_limit(name="openai")

    for limit in (stopped, free):
        assert (limit.concurrency_total, limit.overrides) == (was_set.concurrency_total, was_set.overrides)
    assert (stopped.stopped_until is None, free.stopped_until) == (False, None)
    assert emptied.concurrency_total is None


async def test_a_limit_that_is_set_again_stays_stopped_until_somebody_lets_it_go_on(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=5)
    for _ in range(2):
        await gate.create(limits={"openai": ""}, retry_backoff_seconds=0)
    [offer] = await claim(gate)
    await gate.as_worker().fail(**harness.under(
        offer, error="429", retryable=True, retry_after_seconds=30, stop_limit="openai"))

    again = await gate.as_admin().set_limit(name="openai", concurrency_total=6)
    [listed] = (await gate.as_admin().list_limits()).limits
    assert await claim(gate, 10) == []
    free = await gate.as_admin().set_limit(name="openai", concurrency_total=6, stopped_until="2020-01-01T00:00:00Z")

    assert (again.stopped_by, listed.stopped_by) == (offer.task_id, offer.task_id)
    assert again.stopped_until == listed.stopped_until is not None
    assert (free.stopped_by, free.stopped_until) == (None, None)
    assert len(await claim(gate, 10)) == 1, "the other one waits for its own retry"


async def test_get_limit_names_a_hundred_holders_and_says_that_there_are_more(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    for _ in range(2):
        await gate.as_agent().create_tasks(tasks=[
            {"type": "demo", "payload": None, "limits": {"customer": f"k{number}"}} for number in range(101)])
    offers = [offer for _ in range(3) for offer in await claim(gate, 50)]

    shown = await gate.as_admin().get_limit(name="customer")

    assert (len(offers), shown.in_use, len(shown.holders), shown.more_holders) == (101, 101, 100, True)
    assert shown.waiting == 101


async def test_a_worker_stops_no_limit_that_its_task_does_not_have(gate: harness.Gate) -> None:
    await gate.create()
    [offer] = await claim(gate)

    with harness.refused("invalid_request"):
        await gate.as_worker().fail(**harness.under(offer, error="429", stop_limit="openai"))


async def test_a_claim_that_waits_is_called_when_a_lease_makes_room(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=1)
    for _ in range(2):
        await gate.create(limits={"openai": ""})
    [offer] = await claim(gate)

    waiting = test_waiting.start(test_waiting.wait(gate, "w2"))
    await test_waiting.settle(gate, 1)

    await complete(gate, offer)

    assert len(await test_waiting.got(waiting)) == 1


async def test_a_type_has_the_limits_that_the_settings_name(make_gate: Any) -> None:
    gate = make_gate(type_limits=("ocr=openai", "ocr=customer:42"))
    await gate.as_admin().set_limit(name="openai", concurrency_total=1)
    for _ in range(2):
        await gate.create(type="ocr")

    [offer] = await claim(gate, 10)

    assert (await gate.task(offer.task_id)).limits == {"openai": "", "customer": "42"}


async def test_explain_task_names_the_limit_its_holders_and_how_many_come_before(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    holder, _, waiting = [await gate.create(limits={"customer": "a"}) for _ in range(3)]
    await claim(gate)

    told = await gate.as_agent().explain_task(task_id=waiting)

    assert told.cause == "limit_reached"
    assert (told.evidence.limit_name, told.evidence.limit_key) == ("customer", "a")
    assert (told.evidence.holders, told.evidence.in_use, told.evidence.limit) == ([holder], 1, 1)
    assert told.evidence.ahead == 1


async def test_what_turns_and_rates_leave_behind_is_deleted(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", rate={"count": 5, "seconds": 60})
    for number in range(3):
        await gate.create(limits={"customer": str(number)})
    for offer in await claim(gate, 10):
        await complete(gate, offer)
    assert await claim(gate) == []      # which finds the turns empty
    waiting = await gate.create(limits={"customer": "0"})
    gate.skip(61)

    await TurnPruner(gate.engine).run()

    turns = await gate.backend.page(gate.tenant_id, queries.Rows(stored_limits.Turn, "", 10))
    assert [turn.limits for turn in turns] == ['{"customer":"0"}']
    assert await gate.backend.page(gate.tenant_id, queries.Rows(stored_limits.RateUse, "", 10)) == []
    assert [offer.task_id for offer in await claim(gate)] == [waiting]


async def test_turns_of_tasks_that_were_all_canceled_go_with_their_lane_though_nobody_claims(
        gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    first, second = [await gate.create(type="gone", limits={"customer": "a"}) for _ in range(2)]
    await claim(gate)
    assert await claim(gate) == []      # which blocks the turn
    for task_id in (first, second, await gate.create(type="gone", limits={"customer": "b"})):
        await gate.cancel_task(task_id=task_id)
    kept = await gate.create(type="kept", limits={"customer": "a"})

    await gate.backend.drop_lanes(gate.tenant_id)

    turns = await gate.backend.page(gate.tenant_id, queries.Rows(stored_limits.Turn, "", 10))
    assert [turn.limits for turn in turns] == ['{"customer":"a"}']
    assert [offer.task_id for offer in await claim(gate)] == [kept]
    again = await gate.create(type="gone", limits={"customer": "b"})
    assert [offer.task_id for offer in await claim(gate)] == [again]


async def test_the_numbers_of_all_limits_are_those_of_all_tenants(gate: harness.Gate) -> None:
    names = [f"{gate.tenant_id} {kind}" for kind in ("set", "unset")]
    for each in (gate, gate.stranger()):
        await each.as_admin().set_limit(name=names[0], concurrency_per_key=1)
        for key in ("a", "a", "b"):
            await each.create(limits={names[0]: key, names[1]: ""})
        await claim(each, 5)

    before = await gate.backend.limit_depths()

    [depth] = [row for row in before if row.name == names[0]]
    assert (depth.is_set, depth.held, depth.waiting, depth.stopped_until) == (True, 4, 2, None)
    [unset] = [row for row in before if not row.is_set]
    assert unset.waiting >= 2


async def test_the_true_cost_that_a_worker_tells_at_the_end_counts(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="tokens", rate={"count": 100, "seconds": 60})
    for _ in range(3):
        await gate.create(limits={"tokens": ""}, cost=40)
    first, second = await claim(gate), await claim(gate)

    await gate.as_worker().complete(**harness.under(first[0], artifacts=["x"], cost=10))
    await gate.as_worker().fail(**harness.under(second[0], error="x", cost=90))

    assert await claim(gate) == []      # 10 and 90 are all that a window has
    gate.skip(61)
    assert len(await claim(gate)) == 1


async def test_a_task_that_a_batch_leases_without_a_claim_comes_with_what_counts_in_its_limits(
        gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=9, concurrency_per_key=1)
    tasks = {await gate.create(limits={"openai": key}): key for key in ("a", "a", "b")}
    [offer] = await claim(gate, 1)
    kept = dict[str, Any]()

    def look(work: Work) -> None:
        kept.update({task_id: work.limiting.find_keeping(work.tasks[task_id]) for task_id in tasks})
    await gate.backend.transact(gate.tenant_id, Needs(tasks={*tasks}, granted={*tasks}), look)

    full = Full("openai", tasks[offer.task_id], "concurrency_per_key", 1)
    assert kept == {task_id: full if key == full.key else None for task_id, key in tasks.items()}


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_name_that_no_path_can_hold_is_refused(gate: harness.Gate, name: str) -> None:
    with harness.refused("invalid_request"):
        await gate.as_admin().set_limit(name=name, concurrency_total=1)
    assert (await gate.as_admin().list_limits()).limits == []
