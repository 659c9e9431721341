"""The scheduler's orders, runs and receipts, with a gate that knows it by two keys (spec 8, H.5, H.7.4)."""

from __future__ import annotations

import re
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from asyncgate.clients.http import Refusal, Unreachable
from asyncgate.extras.scheduler.loop import Scheduler
from asyncgate.extras.scheduler.store import Store, StoreError
from asyncgate.parts.upkeep import Upkeep
from tests.conftest import Served
from tests.support.identity_tools import House, security

pytestmark = pytest.mark.anyio
ECHO = {"type": "echo", "payload_template": {"at": "{{run_at}}"}}
MINUTELY = {"name": "beat", "mode": "interval", "interval_seconds": 60, "task_template": ECHO}


class Key:
    """A gate, called with one key; some replies are lost on the way."""

    def __init__(self, house: House, token: str) -> None:
        self.house, self.token = house, token
        self.called: list[str] = []
        self.lost, self.misled = set[str](), set[str]()

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call the gate."""
        self.called.append(operation)
        if operation in self.misled:
            raise Refusal(404, {"message": "a proxy says that there is no such page"})
        told = await self.house.ask(operation, fields, token=self.token)
        if told.code:
            raise Refusal(told.status, told.body)
        if operation in self.lost:
            raise Unreachable(f"the reply to {operation} is lost")
        return told.body


class World:
    """A gate, a scheduler of it that may be started anew, and ada, who gives it orders."""

    def __init__(self, house: House, served: Served, path: Path, keys: dict[str, str]) -> None:
        self.house, self.served, self.path, self.keys = house, served, path, keys
        self.worker, self.agent = Key(house, keys["worker"]), Key(house, keys["agent"])
        self.messages: list[str] = []
        self.start()

    def start(self) -> None:
        """Begin a life of the scheduler."""
        self.store = Store(str(self.path))
        self.scheduler = Scheduler(self.store, self.worker, self.agent, clock=self.now, say=self.messages.append)

    def now(self) -> float:
        """Return the time, which is the gate's too."""
        return float(self.served.backend.now())

    def die(self) -> None:
        """End a life of the scheduler."""
        self.store.close()

    async def skip(self, seconds: float, *, tick: bool = True) -> None:
        """Let time pass for all; the gate sweeps, and then the scheduler looks at the clock."""
        self.served.backend.skew += seconds
        await Upkeep(self.served.engine).once("sweep")
        if tick:
            await self.scheduler.tick()

    async def ordered(self, what: str, payload: Any, *, by: str = "ada") -> str:
        """Give an order that nobody has carried out yet; return its task."""
        made = await self.house.good("create_task", {"type": f"schedule.{what}", "payload": payload},
                                     token=self.keys[by])
        return str(made["task_id"])

    async def task(self, task_id: str) -> Any:
        """Return a task as it is now."""
        return await self.house.good("get_task", {"task_id": task_id})

    async def answer(self, what: str, payload: Any, *, by: str = "ada") -> Any:
        """Give an order, let it be carried out, and return the answer."""
        task_id = await self.ordered(what, payload, by=by)
        assert await self.scheduler.obey(0)
        task = await self.task(task_id)
        assert task["status"] == "succeeded", task
        assert not task["obligation_open"], "the answer is in the record of the task"
        return task["result"]["result"]

    async def refusal(self, what: str, payload: Any, *, by: str = "ada") -> Any:
        """Give an order that must fail, and return the error."""
        task_id = await self.ordered(what, payload, by=by)
        assert await self.scheduler.obey(0)
        task = await self.task(task_id)
        assert (task["status"], task["attempt"]) == ("failed", 0), task
        return task["result"]["error"]

    async def made(self, **plan: Any) -> str:
        """Make a schedule; return its id."""
        return str((await self.answer("create", {**MINUTELY, **plan}))["schedule_id"])

    async def status(self, schedule_id: str) -> Any:
        """Ask how a schedule fares."""
        return await self.answer("status", {"schedule_id": schedule_id})

    async def runs(self, type: str = "echo") -> list[Any]:
        """Return the tasks that were created, oldest first."""
        tasks = (await self.house.good("list_tasks", {"type": type, "limit": 200}))["tasks"]
        return sorted(tasks, key=lambda task: str(task["task_id"]))

    async def receipts(self, type: str) -> list[Any]:
        """Return the receipts of a type."""
        receipts: list[Any] = (await self.house.good("list_receipts", {"receipt_type": type, "limit": 200}))["receipts"]
        return receipts

    async def owed(self) -> list[str]:
        """Return the types of the receipts that are owed to ada."""
        owed = await self.house.good("list_open_obligations", {}, token=self.keys["ada"])
        return [obligation["receipt_type"] for obligation in owed["open_obligations"]]


@pytest.fixture
async def world(serve: Callable[..., Any], tmp_path: Path) -> AsyncIterator[World]:
    served = await serve(security=security(), expiry_jitter_seconds=0.0)
    house = House(served)
    keys = {"worker": await house.key("worker", "clockwork"), "agent": await house.key("agent", "clockwork-agent"),
            "ada": await house.key("agent", "ada"), "bob": await house.key("agent", "bob")}
    world = World(house, served, tmp_path / "schedules.db", keys)
    yield world
    world.die()


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# The five control tasks.


async def test_a_schedule_is_made_and_says_when_it_runs(world: World) -> None:
    answer = await world.answer("create", MINUTELY)

    assert answer.keys() == {"schedule_id", "next_run_at"}
    assert 30 < moment(answer["next_run_at"]) - world.now() <= 60


async def test_the_owner_of_a_schedule_is_told_and_owed_its_end(world: World) -> None:
    schedule_id = await world.made()
    [created] = await world.receipts("schedule.created")
    assert created["to"] == {"kind": "agent", "id": "ada"}
    assert created["from"]["id"] == "clockwork"
    assert created["schedule_id"] == schedule_id
    assert created["body"].items() >= {"name": "beat", "mode": "interval", "interval_seconds": 60}.items()
    assert await world.owed() == ["schedule.created"]

    assert await world.answer("delete", {"schedule_id": schedule_id}) == {"ok": True}
    await world.scheduler.tick()

    [deleted] = await world.receipts("schedule.deleted")
    assert deleted["parents"] == [created["receipt_id"]]
    assert await world.owed() == []


async def test_a_deleted_schedule_creates_nothing_and_is_not_found(world: World) -> None:
    schedule_id = await world.made()
    await world.answer("delete", {"schedule_id": schedule_id})

    await world.skip(3600)

    assert await world.runs() == []
    for what in ("status", "pause", "resume", "delete"):
        error = await world.refusal(what, {"schedule_id": schedule_id})
        assert (error["code"], error["field"]) == ("schedule_not_found", "schedule_id")


async def test_status_tells_what_was_and_what_comes(world: World) -> None:
    schedule_id = await world.made()
    fresh = await world.status(schedule_id)
    assert (fresh["enabled"], fresh["last_run_at"], fresh["last_status"]) == (True, None, None)

    await world.skip(61)

    status, [run] = await world.status(schedule_id), await world.runs()
    assert status == {"schedule_id": schedule_id, "name": "beat", "enabled": True,
                      "next_run_at": status["next_run_at"], "last_run_at": fresh["next_run_at"],
                      "last_status": "created", "last_task_id": run["task_id"]}
    assert moment(status["next_run_at"]) == moment(fresh["next_run_at"]) + 60


async def test_what_passes_during_a_pause_is_not_made_up_for(world: World) -> None:
    schedule_id = await world.made(misfire_policy="catch_up_all")
    assert await world.answer("pause", {"schedule_id": schedule_id}) == {"ok": True}
    paused = await world.status(schedule_id)
    assert (paused["enabled"], paused["next_run_at"]) == (False, None)
    await world.skip(600)
    assert await world.runs() == []

    resumed = await world.answer("resume", {"schedule_id": schedule_id})

    assert resumed["ok"]
    assert 0 < moment(resumed["next_run_at"]) - world.now() <= 60
    await world.skip(60)
    assert [run["payload"]["at"] for run in await world.runs()] == [resumed["next_run_at"]]


async def test_to_pause_or_resume_twice_is_to_do_it_once(world: World) -> None:
    schedule_id = await world.made()
    before = await world.status(schedule_id)

    assert (await world.answer("resume", {"schedule_id": schedule_id}))["next_run_at"] == before["next_run_at"]
    for _ in range(2):
        assert await world.answer("pause", {"schedule_id": schedule_id}) == {"ok": True}


async def test_what_was_due_before_a_pause_still_runs(world: World) -> None:
    schedule_id = await world.made()
    await world.skip(61, tick=False)

    await world.answer("pause", {"schedule_id": schedule_id})

    assert len(await world.runs()) == 1


@pytest.mark.parametrize("paused", [False, True])
async def test_a_run_that_is_ordered_comes_at_once_beside_those_of_the_plan(world: World, paused: bool) -> None:
    schedule_id = await world.made()
    if paused:
        await world.answer("pause", {"schedule_id": schedule_id})
    before = await world.status(schedule_id)

    answer = await world.answer("run", {"schedule_id": schedule_id})
    await world.skip(0)
    [run] = await world.runs()
    after = await world.status(schedule_id)

    assert answer["ok"]
    assert run["idempotency_key"] == f"schedule:{schedule_id}:{answer['run_at']}"
    assert (after["next_run_at"], after["enabled"]) == (before["next_run_at"], not paused)
    assert (after["last_run_at"], after["last_task_id"]) == (answer["run_at"], run["task_id"])


async def test_the_gate_lists_what_the_scheduler_knows_of_a_schedule(world: World) -> None:
    plan = {"mode": "cron", "interval_seconds": None, "cron_expr": "30 7 * * MON-FRI", "timezone": "Europe/Berlin"}
    schedule_id = await world.made(**plan)
    await world.answer("run", {"schedule_id": schedule_id})
    await world.skip(0)

    [listed] = (await world.house.good("list_schedules", {"runs": 200}))["schedules"]
    runs = [datetime.fromisoformat(run).astimezone(ZoneInfo("Europe/Berlin")) for run in listed["next_runs"]]

    assert (listed["name"], listed["task_type"], listed["cron_expr"], listed["timezone"], listed["last_status"]) == (
        "beat", "echo", plan["cron_expr"], plan["timezone"], "created")
    assert {(run.hour, run.minute, run.weekday() < 5) for run in runs} == {(7, 30, True)}
    assert 5 <= len(runs) <= 6
    assert listed["next_runs"][0] == listed["next_run_at"]


@pytest.mark.parametrize("what", ["status", "pause", "resume", "delete"])
async def test_nobody_else_has_a_say_in_a_schedule(world: World, what: str) -> None:
    schedule_id = await world.made()

    error = await world.refusal(what, {"schedule_id": schedule_id}, by="bob")

    assert (error["code"], error["field"]) == ("schedule_not_found", "schedule_id")
    assert (await world.status(schedule_id))["enabled"]


@pytest.mark.parametrize(("wrong", "field"), [
    ({"mode": "cron", "interval_seconds": None, "cron_expr": "61 * * * *"}, "cron_expr"),
    ({"mode": "cron", "interval_seconds": None, "cron_expr": "0 3 30 2 *"}, "cron_expr"),
    ({"mode": "cron", "interval_seconds": None}, "cron_expr"),
    ({"mode": "cron", "cron_expr": "0 3 * * *"}, "interval_seconds"),
    ({"cron_expr": "0 3 * * *"}, "cron_expr"),
    ({"mode": "hourly"}, "mode"),
    ({"timezone": "Europe/Atlantis"}, "timezone"),
    ({"interval_seconds": 0}, "interval_seconds"),
    ({"interval_seconds": "60"}, "interval_seconds"),
    ({"interval_seconds": None}, "interval_seconds"),
    ({"jitter_seconds": -1}, "jitter_seconds"),
    ({"misfire_policy": "panic"}, "misfire_policy"),
    ({"name": None}, "name"),
    ({"name": "two\nlines"}, "name"),
    ({"cron": "0 3 * * *"}, "cron"),
    ({"task_template": None}, "task_template"),
    ({"task_template": {}}, "task_template.type"),
    ({"task_template": {"type": ""}}, "task_template.type"),
    ({"task_template": {"type": "echo", "payload": 1}}, "task_template.payload"),
    ({"task_template": {"type": "echo", "priority": "high"}}, "task_template.priority"),
    ({"task_template": {"type": "echo", "requirements": {"capabilities": "gpu"}}},
     "task_template.requirements.capabilities"),
    ({"task_template": {"type": "echo", "idempotency_key": "mine"}}, "task_template.idempotency_key"),
    ({"task_template": {"type": "echo", "payload_template": {"pages": [{"of": "{{run}}"}]}}},
     "task_template.payload_template.pages[0].of"),
], ids=lambda value: value if isinstance(value, str) else None)
async def test_what_makes_no_sense_is_refused_by_the_name_of_its_field(world: World, wrong: Any, field: str) -> None:
    error = await world.refusal("create", {**MINUTELY, **wrong})

    assert (error["code"], error["field"]) == ("invalid_schedule", field)
    assert error["message"]
    assert await world.receipts("schedule.created") == []


@pytest.mark.parametrize("payload", [None, [], "beat", 7])
async def test_a_payload_that_is_no_object_is_refused(world: World, payload: Any) -> None:
    for what in ("create", "pause"):
        assert (await world.refusal(what, payload))["field"] == "payload"


# What a run is.


async def test_a_run_is_the_task_of_the_template_under_its_own_key(world: World) -> None:
    template = {"type": "report", "requirements": {"capabilities": ["pdf"], "tags": ["night"]}, "priority": 7,
                "max_attempts": 5, "result_delivery": "inline", "payload_template": {
                    "for": "{{ schedule_id }} ({{name}})", "at": ["{{run_at}}", "{{run_at_local}}", "{{now}}"],
                    "kept": ["\\{{run_at}}", "{run_at}", 1, None, {"{{name}}": True}]}}
    answer = await world.answer("create", {**MINUTELY, "timezone": "Asia/Kathmandu", "task_template": template})

    await world.skip(61)

    [run] = await world.runs("report")
    at, schedule_id = answer["next_run_at"], answer["schedule_id"]
    local = run["payload"]["at"][1]
    assert run["payload"]["for"] == f"{schedule_id} (beat)"
    assert run["payload"]["kept"] == ["{{run_at}}", "{run_at}", 1, None, {"{{name}}": True}]
    assert (run["payload"]["at"][0], moment(local), local[-6:]) == (at, moment(at), "+05:45")
    assert moment(at) <= moment(run["payload"]["at"][2])
    assert (run["requirements"], run["priority"], run["max_attempts"]) == (template["requirements"], 7, 5)
    assert (run["created_by"]["id"], run["principal_ai"]) == ("clockwork-agent", "ada")
    again = await world.agent.call("create_task", type="report", payload=None,
                                   idempotency_key=f"schedule:{schedule_id}:{at}")
    assert again["task_id"] == run["task_id"]


@pytest.mark.parametrize(("policy", "made_up"), [("skip", 0), ("catch_up_one", 1), ("catch_up_all", 9), (None, 1)])
async def test_each_policy_makes_up_for_what_was_missed_while_the_scheduler_was_away(
        world: World, policy: str | None, made_up: int) -> None:
    answer = await world.answer("create", {**MINUTELY, "misfire_policy": policy})
    world.die()
    await world.skip(600, tick=False)

    world.start()
    for _ in range(2):
        await world.scheduler.tick()

    first = moment(answer["next_run_at"])
    expected = [first + 60 * count for count in range(10)]
    assert [moment(run["payload"]["at"]) for run in await world.runs()] == expected[9 - made_up:]


@pytest.mark.parametrize("restarted", [False, True])
async def test_runs_go_on_when_a_clock_that_was_ahead_is_set_back(world: World, restarted: bool) -> None:
    await world.made()
    world.scheduler.clock = lambda: world.now() + 365 * 86_400
    await world.scheduler.tick()
    ahead = await world.runs()
    if restarted:
        world.die()
        world.start()
    world.scheduler.clock = world.now

    await world.skip(1)
    await world.skip(61)
    await world.skip(60)

    runs = await world.runs()
    assert len(runs) == len(ahead) + 2
    assert moment(runs[-1]["payload"]["at"]) <= world.now()
    assert sum("set back" in text for text in world.messages) == 1


async def test_more_than_a_batch_is_made_up_for_over_several_ticks(world: World) -> None:
    await world.made(misfire_policy="catch_up_all", interval_seconds=1)
    await world.skip(600, tick=False)

    for _ in range(3):
        await world.scheduler.tick()

    status = await world.house.good("list_tasks", {"type": "echo", "limit": 200})
    assert status["next_cursor"]
    assert world.store.next_due_at() > world.now() - 1      # type: ignore[operator]
    assert world.store.firings() == []


async def test_a_run_with_jitter_is_created_late_but_named_on_time(world: World) -> None:
    answer = await world.answer("create", {**MINUTELY, "interval_seconds": 3600, "jitter_seconds": 3000})
    [schedule] = world.store.live()
    assert schedule.due_at is not None
    assert schedule.due_at > moment(answer["next_run_at"]) + 1
    await world.skip(schedule.due_at - world.now() - 1)
    assert await world.runs() == []

    await world.skip(1.1)

    assert [run["payload"]["at"] for run in await world.runs()] == [answer["next_run_at"]]


async def test_a_run_that_the_gate_will_never_take_is_told_by_status_and_the_next_one_goes_on(world: World) -> None:
    growing = {"type": "echo", "payload_template": ["{{now}}"] * 60_000}
    schedule_id = await world.made(task_template=growing)

    await world.skip(61)

    assert (await world.status(schedule_id))["last_status"].startswith("refused: payload_too_large")
    assert world.store.firings() == []


async def test_a_zone_that_is_no_more_stops_one_schedule_and_no_other(world: World) -> None:
    broken, whole = await world.made(), await world.made()
    schedule = world.store.schedule(broken)
    assert schedule
    plan = msgspec.structs.replace(schedule.plan, mode="cron", cron_expr="* * * * *", timezone="Mars/Olympus")
    world.store.keep(msgspec.structs.replace(schedule, plan=plan))

    await world.skip(61)

    assert "Mars/Olympus" in (await world.status(broken))["last_status"]
    assert (await world.status(whole))["last_status"] == "created"
    assert [line for line in world.messages if "Mars/Olympus" in line]

    await world.answer("pause", {"schedule_id": broken})
    refusal = await world.refusal("resume", {"schedule_id": broken})
    assert (refusal["field"], "Mars/Olympus" in refusal["message"]) == ("timezone", True)
    assert await world.answer("delete", {"schedule_id": broken}) == {"ok": True}


# What may break in between.


async def test_an_order_whose_answer_is_lost_is_answered_again(world: World) -> None:
    world.worker.lost = {"complete"}
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)
    world.die()
    world.worker.lost = set()

    world.start()
    await world.scheduler.tick()

    assert world.store.unanswered() == []
    [schedule] = world.store.live()
    assert (await world.task(task_id))["result"]["result"]["schedule_id"] == schedule.schedule_id
    assert len(await world.receipts("schedule.created")) == 1


async def test_an_order_that_comes_again_after_a_lost_lease_makes_no_second_schedule(world: World) -> None:
    world.worker.lost = {"emit_receipt"}
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)
    world.worker.lost = set()
    await world.skip(61)        # the lease has run out; the gate does not take the answer under it
    assert world.store.live() == []

    assert await world.scheduler.obey(0)

    assert (await world.task(task_id))["status"] == "succeeded"
    assert len(world.store.live()) == len(await world.receipts("schedule.created")) == 1


async def test_an_old_order_that_comes_again_does_not_undo_a_newer_one(world: World) -> None:
    schedule_id = await world.made()
    world.worker.lost = {"get_config", "complete"}
    world.scheduler.instance = ""
    pause = await world.ordered("pause", {"schedule_id": schedule_id})
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)       # paused, but nobody was told
    world.worker.lost = set()
    resume = await world.ordered("resume", {"schedule_id": schedule_id})
    assert await world.scheduler.obey(0)
    await world.skip(61, tick=False)

    assert await world.scheduler.obey(0)

    assert [(await world.task(task))["status"] for task in (pause, resume)] == ["succeeded"] * 2
    assert (await world.status(schedule_id))["enabled"]


async def test_a_schedule_whose_order_was_canceled_does_not_run(world: World) -> None:
    world.worker.lost = {"emit_receipt"}
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)
    world.worker.lost = set()
    await world.house.good("cancel_task", {"task_id": task_id}, token=world.keys["ada"])

    await world.skip(61)
    await world.skip(61)

    assert await world.runs() == []
    assert (world.store.live(), world.store.deleted(), world.store.unanswered()) == ([], [], [])
    assert len(await world.receipts("schedule.created")) == len(await world.receipts("schedule.deleted")) == 1
    assert await world.owed() == []


async def test_a_schedule_that_was_canceled_before_it_was_announced_leaves_no_receipt(world: World) -> None:
    task_id = await world.ordered("create", MINUTELY)
    [offer] = (await world.worker.call("lease_next", accept_types=["schedule.create"]))["tasks"]
    await world.house.good("cancel_task", {"task_id": task_id}, token=world.keys["ada"])

    await world.scheduler.carry_out(offer)
    await world.scheduler.tick()

    assert (world.store.live(), world.store.deleted()) == ([], [])
    assert await world.receipts("schedule.created") == []


async def test_a_run_whose_answer_is_lost_is_created_once(world: World) -> None:
    await world.made()
    world.agent.lost = {"create_task"}
    await world.skip(61)
    assert len(world.store.firings()) == 1
    world.die()
    world.agent.lost = set()

    world.start()
    await world.scheduler.tick()

    assert (len(await world.runs()), world.store.firings()) == (1, [])


async def test_a_gate_that_is_away_is_told_of_once_and_nothing_piles_up(world: World) -> None:
    await world.made(misfire_policy="skip")
    world.agent.lost = {"create_task"}

    for _ in range(5):
        await world.skip(600)

    assert len(world.store.firings()) == 1
    assert len([line for line in world.messages if "lost" in line]) == 1


async def test_a_second_scheduler_with_a_file_of_its_own_does_not_run_what_the_first_has_announced(
        world: World, tmp_path: Path) -> None:
    world.worker.lost = {"emit_receipt"}
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)
    world.worker.lost = set()
    await world.skip(61, tick=False)
    other = Key(world.house, await world.house.key("worker", "other"))

    with closing(Store(str(tmp_path / "other.db"))) as store:
        second = Scheduler(store, other, world.agent, clock=world.now)
        assert await second.obey(0)
        await second.tick()
        assert (store.live(), store.deleted(), store.unanswered()) == ([], [], [])

    task = await world.task(task_id)
    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "invalid_request")
    await world.scheduler.tick()
    assert (world.store.live(), world.store.unanswered()) == ([], []), "the first one gives it up, too"
    assert await world.owed() == []


async def test_a_schedule_that_the_gate_has_forgotten_can_be_deleted(world: World) -> None:
    schedule_id = await world.made()
    schedule = world.store.schedule(schedule_id)
    assert schedule
    world.store.keep(msgspec.structs.replace(schedule, receipt_id="of-another-gate"))

    await world.answer("delete", {"schedule_id": schedule_id})
    await world.scheduler.tick()

    assert world.store.deleted() == []
    assert [line for line in world.messages if schedule_id in line and "receipt" in line]


async def test_an_order_that_the_gate_has_forgotten_is_let_go(world: World) -> None:
    world.worker.lost = {"emit_receipt"}
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Unreachable):
        await world.scheduler.obey(0)
    world.worker.lost = set()
    control = world.store.control(task_id)
    assert control
    with closing(world.store.db.cursor()) as cursor:
        cursor.execute("DELETE FROM controls")
    world.store.carry_out(msgspec.structs.replace(control, task_id="of-another-gate"))

    for _ in range(2):
        await world.scheduler.tick()

    assert (world.store.live(), world.store.deleted(), world.store.unanswered()) == ([], [], [])


async def test_answers_are_forgotten_when_nobody_can_ask_for_them_again(world: World) -> None:
    task_id = await world.ordered("create", MINUTELY)
    await world.scheduler.obey(0)
    world.store.forget(world.now() - 1)
    assert world.store.control(task_id)

    world.store.forget(world.now() + 1)

    assert world.store.control(task_id) is None
    assert len(world.store.live()) == 1


async def test_what_a_proxy_says_while_the_gate_is_away_is_no_answer(world: World) -> None:
    schedule_id = await world.made()
    world.agent.misled, world.worker.misled = {"create_task"}, {"complete"}
    await world.skip(61)
    task_id = await world.ordered("create", MINUTELY)
    with pytest.raises(Refusal):
        await world.scheduler.obey(0)
    assert (await world.runs(), len(world.store.unanswered())) == ([], 1)
    world.die()
    world.agent.misled, world.worker.misled = set(), set()

    world.start()
    await world.scheduler.tick()

    assert (await world.status(schedule_id))["last_status"] == "created"
    assert (await world.task(task_id))["status"] == "succeeded"


# Two credentials.


async def test_each_key_is_used_for_what_it_may_do(world: World) -> None:
    await world.made()
    await world.skip(61)

    assert set(world.agent.called) == {"create_task"}
    assert set(world.worker.called) == {"lease_next", "emit_receipt", "get_config", "complete", "report_schedule"}


async def test_neither_key_may_do_what_the_other_is_for(world: World) -> None:
    for key, operation, fields in ((world.worker, "create_task", {"type": "echo"}), (world.agent, "lease_next", {})):
        with pytest.raises(Refusal) as refusal:
            await key.call(operation, **fields)
        assert (refusal.value.status, refusal.value.code) == (403, "forbidden")


async def test_an_agents_key_that_may_not_create_is_named_and_the_run_waits_for_a_better_one(world: World) -> None:
    schedule_id = await world.made()
    world.die()
    world.agent.token = world.keys["worker"]
    world.start()

    await world.skip(61)

    assert [line for line in world.messages if "the agent's key" in line]
    assert (await world.status(schedule_id))["last_status"].startswith("waiting: forbidden")
    world.die()
    world.agent.token = world.keys["agent"]
    world.start()
    await world.scheduler.tick()
    assert len(await world.runs()) == 1


async def test_a_workers_key_that_may_not_report_is_named(world: World) -> None:
    await world.made()
    world.worker.token = world.keys["agent"]

    await world.skip(61)

    assert [line for line in world.messages if line.startswith("report: ") and "the worker's key" in line]
    assert len(await world.runs()) == 1


# What the gate watches over.


async def late(world: World) -> list[Any]:
    """Return what the gate said about schedules that are late."""
    bodies = [receipt["body"] for receipt in await world.receipts("system.anomaly")]
    return [body["details"] for body in bodies if body["kind"] == "schedule_late"]


@pytest.mark.parametrize("plan", [{}, {"mode": "cron", "interval_seconds": None, "cron_expr": "* * * * *"}], ids=str)
async def test_the_silence_of_a_scheduler_is_told_to_the_owner(world: World, plan: dict[str, Any]) -> None:
    schedule_id = await world.made(**plan)
    await world.scheduler.tick()
    for _ in range(3):
        await world.skip(60)
    assert await late(world) == []
    world.die()

    await world.skip(200, tick=False)

    assert [(schedule["schedule_id"], schedule["interval_seconds"])
            for schedule in await late(world)] == [(schedule_id, 60)]
    world.start()


async def test_a_schedule_that_is_paused_is_not_late(world: World) -> None:
    schedule_id = await world.made()
    await world.scheduler.tick()
    await world.answer("pause", {"schedule_id": schedule_id})
    await world.scheduler.tick()

    await world.skip(600, tick=False)

    assert await late(world) == []


async def test_a_schedule_that_hardly_ever_runs_can_be_reported(world: World) -> None:
    rare = "0 0 29 2 MON#5"     # every 28 years
    await world.made(mode="cron", interval_seconds=None, cron_expr=rare)

    await world.scheduler.tick()

    assert world.messages == []
    assert world.worker.called.count("report_schedule") == 1


async def test_only_what_has_changed_is_reported(world: World) -> None:
    await world.made()
    for _ in range(3):
        await world.scheduler.tick()
    assert world.worker.called.count("report_schedule") == 1

    await world.skip(61)

    assert world.worker.called.count("report_schedule") == 2


# The file.


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "schedules.db"
    with closing(Store(str(path))):
        yield path


async def test_one_scheduler_has_the_file_and_others_are_told(file: Path) -> None:
    with pytest.raises(StoreError, match="another scheduler has it open"):
        Store(str(file))


def test_the_file_is_for_its_owner_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_file_of_a_newer_version_or_of_something_else_is_refused(tmp_path: Path) -> None:
    newer, other = tmp_path / "newer.db", tmp_path / "other.db"
    with closing(sqlite3.connect(newer)) as db:
        db.execute("PRAGMA user_version = 99")
    other.write_text("this is not a database, but a text of some length" * 9)

    for path, says in ((newer, "newer AsyncGate"), (other, "not a database"), (tmp_path / "no" / "x.db", "No such")):
        with pytest.raises(StoreError, match=re.escape(says)):
            Store(str(path))
