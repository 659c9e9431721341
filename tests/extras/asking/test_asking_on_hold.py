"""Questions of tasks that are on hold for another reason."""

from __future__ import annotations

from datetime import timedelta

import pytest

from asyncgate.conformance.harness import Gate, under
from asyncgate.parts.model.views import to_utc

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("swept", [False, True])
async def test_a_question_that_expires_under_a_hold_ends_its_task_also_where_its_deadline_is_swept(
        gate: Gate, swept: bool) -> None:
    deadline = to_utc(gate.now()) + timedelta(seconds=120)
    offer = await gate.leased(max_parks=1, timeouts={"deadline": deadline.isoformat()})
    await gate.as_worker().request_input(**under(offer), key="go", message="Go?", expires_in_seconds=60,
                                         on_expiry="fail", keep_lease=True)
    await gate.as_worker().release_lease(**under(offer), after_seconds=600)
    assert (await gate.task(offer.task_id)).held == "max_parks"

    await (gate.wait(121) if swept else gate.wait(61))
    await gate.as_agent().release_hold(task_id=offer.task_id)

    assert (await gate.task(offer.task_id)).status == "failed"
    assert await gate.claim("w2") is None
    assert await gate.owed() == []


@pytest.mark.parametrize("on_time", [False, True])
async def test_a_failure_repeated_after_a_question_has_ended_the_task_carries_no_other_error(
        gate: Gate, on_time: bool) -> None:
    offer = await gate.leased()
    await gate.as_worker().request_input(**under(offer), key="go", message="Go?", expires_in_seconds=60,
                                         on_expiry="fail", keep_lease=True)
    gate.skip(0 if on_time else 61)
    error = {"why": "no luck"}
    first = await gate.as_worker().fail(**under(offer), error=error, retryable=True)
    await gate.wait(61)

    again = await gate.as_worker().fail(**under(offer), error=error, retryable=True)

    assert (first.status, again.status) == ("queued" if on_time else "failed", "failed")
    assert (again.requeued, again.error_differs) == (False, False)
