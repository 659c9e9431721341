"""Sessions: first and last call of a principal, and the number of its sessions."""

from __future__ import annotations

import pytest

from asyncgate.conformance.harness import Gate
from asyncgate.parts.model import wire
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio


async def meet(gate: Gate, instance: str | None = None, who: str = "ada") -> wire.Relationship:
    """Let a principal call and upkeep store its presence; return the gate's answer about it."""
    view = gate.as_agent(who, instance)
    await view.list_open_obligations()
    await Upkeep(gate.engine).once("presence")
    relationship: wire.Relationship = (await view.list_open_obligations()).relationship
    await Upkeep(gate.engine).once("presence")      # as it would within a minute: the question was a call, too
    return relationship


async def test_a_principal_that_nobody_knows_is_in_its_first_session(gate: Gate) -> None:
    known = (await gate.as_agent("new").list_open_obligations()).relationship

    assert (known.principal_kind, known.principal_id, known.sessions_count) == ("agent", "new", 1)
    assert abs(known.first_seen_at.timestamp() - gate.now()) < 60


async def test_what_upkeep_has_not_written_down_yet_counts_too(gate: Gate) -> None:
    """12: also within the first minute, the first call stays first, and each instance begins a session."""
    began = (await gate.as_agent("new", "one").list_open_obligations()).relationship
    gate.skip(20)
    again = (await gate.as_agent("new", "one").list_open_obligations()).relationship
    other = (await gate.as_agent("new", "two").list_open_obligations()).relationship

    assert [known.sessions_count for known in (began, again, other)] == [1, 1, 2]
    assert began.first_seen_at == again.first_seen_at == other.first_seen_at
    assert (again.last_seen_at - began.last_seen_at).total_seconds() >= 20
    await Upkeep(gate.engine).once("presence")
    written = (await gate.as_agent("new", "two").list_open_obligations()).relationship
    assert (written.sessions_count, written.first_seen_at) == (2, began.first_seen_at)


async def test_who_is_asked_about_has_not_been_here(gate: Gate) -> None:
    asked = (await gate.as_admin("root").list_open_obligations(principal_kind="agent", principal_id="new")).relationship

    assert asked.sessions_count == 0
    assert (await gate.as_agent("new").list_open_obligations()).relationship.sessions_count == 1


async def test_invented_instances_are_noted_up_to_a_bound(gate: Gate) -> None:
    for n in range(150):
        await gate.as_agent("ada", f"instance {n}").get_config()

    gate.engine.sightings.count()
    assert sum(len(sighting.instances) for sighting in gate.engine.sightings.fresh.values()) <= 101


async def test_calls_within_half_an_hour_are_one_session(gate: Gate) -> None:
    first = await meet(gate)
    for _ in range(4):
        gate.skip(1790)
        assert (await meet(gate)).sessions_count == 1

    last = await meet(gate)
    assert abs((last.first_seen_at - first.first_seen_at).total_seconds()) < 1
    assert last.last_seen_at.timestamp() - first.first_seen_at.timestamp() > 4 * 1790 - 1


async def test_thirty_silent_minutes_end_a_session(gate: Gate) -> None:
    await meet(gate)
    gate.skip(1810)

    assert (await meet(gate)).sessions_count == 2


async def test_a_new_instance_begins_a_session(gate: Gate) -> None:
    counts = [(await meet(gate, instance)).sessions_count for instance in ("one", "one", "two", "two")]

    assert counts == [1, 1, 2, 2]


async def test_a_call_that_names_no_instance_begins_no_session(gate: Gate) -> None:
    counts = [(await meet(gate, instance)).sessions_count for instance in ("one", None, "one")]

    assert counts == [1, 1, 1]


async def test_presence_is_kept_per_principal(gate: Gate) -> None:
    await meet(gate, "one", "ada")
    await meet(gate, "two", "ada")

    assert (await meet(gate, "one", "bob")).sessions_count == 1


async def test_presence_survives_a_restart_of_the_gate(gate: Gate) -> None:
    first = await meet(gate)
    gate.skip(2000)

    again = await meet(gate.beside())

    assert again.sessions_count == 2
    assert abs((again.first_seen_at - first.first_seen_at).total_seconds()) < 1


async def test_presence_of_another_tenant_is_not_seen(gate: Gate) -> None:
    await meet(gate, "one")
    gate.skip(5000)
    await meet(gate, "two")

    there = await meet(gate.stranger(), "three")

    assert there.sessions_count == 1
    assert abs(there.first_seen_at.timestamp() - gate.now()) < 60


async def test_presence_writes_no_receipt(gate: Gate) -> None:
    async with gate.unchanged():
        await meet(gate)
