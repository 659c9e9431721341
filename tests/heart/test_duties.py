"""Jobs that run every so often, or when something is due."""

from __future__ import annotations

import asyncio

import pytest

from asyncgate.parts.process.duties import Alarm, Duties, Duty
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_an_alarm_ends_a_pause_at_the_earliest_time_that_was_named() -> None:
    alarm, loop = Alarm(), asyncio.get_running_loop()
    alarm.REST_SECONDS = 0.0
    alarm.set(loop.time() + 3600)
    pause = asyncio.create_task(alarm.pause(7200))
    await asyncio.sleep(0)

    assert alarm.set(loop.time())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await pause

    assert alarm.set(loop.time() + 3600), "an alarm that rang is not set any more"


async def test_a_later_time_changes_nothing() -> None:
    alarm = Alarm()
    alarm.set(100.0)

    assert not alarm.set(200.0)
    assert alarm.rings_at == 100.0


async def test_duties_end_though_an_alarm_is_set_in_the_moment_they_are_told_to() -> None:
    async def run() -> int:
        return 0
    duties = Duties({"job": Duty(3600.0, run)})
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(20):
            async with duties:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                duties.duties["job"].alarm.set(0.0)
