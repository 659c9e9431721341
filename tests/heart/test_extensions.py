"""What works beside the rules joins the engine in one way: each hook is called when its turn comes, and only then."""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Caller, Engine, Extension, Needs, News, Operation, Transact, Work
from asyncgate.backends.memory import Memory
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.parts.model.errors import Forbidden, QuotaExceeded
from asyncgate.parts.model.stored import Account, Lease, Receipt, Task
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.wire import Ask, GateConfig, GetConfig, Healthy, Principal
from asyncgate.parts.process.hooks import Hooks
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]


class Notes(Extension):
    """Notes what it is called for."""

    def __init__(self, name: str, told: list[Any]) -> None:
        self.name, self.told = name, told

    def name_needs(self, needs: Needs, caller: Caller, ask: Ask) -> None:
        self.told.append((self.name, "load", type(ask).__name__))
        needs.records.add((Account, ()))

    def after_decision(self, work: Work, ask: Ask, receipts: tuple[Receipt, ...]) -> None:
        self.told.append((self.name, "decided", [receipt.receipt_type for receipt in receipts]))

    def wrap_transact(self, transact: Transact) -> Transact:
        async def around(tenant_id: str, needs: Needs, decide: Any) -> None:
            self.told.append((self.name, "begins", (Account, ()) in needs.records))
            await transact(tenant_id, needs, decide)
            self.told.append((self.name, "has committed", True))
        return around

    def after_commit(self, work: Work) -> None:
        self.told.append((self.name, "committed", sorted(work.added)))


class Rules(Extension):
    """Refuses, and answers for others."""

    def check_new_task(self, work: Work) -> None:
        if len(work.added) > 1:
            raise QuotaExceeded("two at once", quota="two", limit=1, retry_after=1)

    def why_no_lease(self, work: Work, worker: Principal) -> str | None:
        return "no lease today" if work.tasks and any(task.type == "never" for task in work.tasks.values()) else None

    def why_hold(self, work: Work, task: Task) -> str | None:
        return "enough"

    def check_optional_receipt(self, work: Work, task_id: str) -> None:
        raise QuotaExceeded("no receipt beside", quota="beside", limit=0, retry_after=1)

    def substitutes(self) -> Mapping[str, Any]:
        return {"get_config": self.get_config}

    async def get_config(self, engine: Engine, caller: Caller, ask: GetConfig) -> GateConfig:
        reply = await Engine.get_config(engine, caller, ask)
        reply.version = "another"
        return reply

    async def list_warnings(self, caller: Caller) -> list[str]:
        return [f"beware, {caller.principal.id}"]

    async def check_caller(self, caller: Caller) -> None:
        raise Forbidden("not any more")

    async def describe_health(self, health: Healthy) -> None:
        health.upkeep = {"rules": 1}


class GivenUp(Extension):
    """Notes what was given up, and what others have committed."""

    def __init__(self) -> None:
        self.reasons, self.news = list[tuple[str, str]](), list[News]()

    def report_loss(self, work: Work, task: Task, lease: Lease, reason: str) -> None:
        self.reasons.append((task.task_id, reason))

    def hear_news(self, news: News) -> None:
        self.news.append(news)


class Beside(Extension):
    """Notes what stands around a call, and what a commit concerns."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def after_grant(self, tenant_id: str, first_end: float) -> None:
        self.told.append(("granted", tenant_id, first_end))

    def after_record_change(self, work: Work) -> None:
        self.told.append(("changed", *work.kept))

    async def count_creation(self, caller: Caller, ask: Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        if len(getattr(ask, "tasks", [ask])) > 2:
            raise QuotaExceeded("three at once", quota="three", limit=2, retry_after=1)
        return await create(caller)

    async def after_call(self, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
        self.told.append(("performed", op.name))


def gate_with(*extensions: Extension, **settings: Any) -> Gate:
    """Return a gate whose engine was given these."""
    from asyncgate.parts.model.settings import Settings
    return Gate(Engine(Memory(), Settings(**settings), extensions), "t")


async def test_hooks_are_called_in_order_around_a_batch_and_the_last_transact_is_outermost() -> None:
    told: list[Any] = []
    gate = gate_with(Notes("a", told), Notes("b", told))

    task_id = await gate.create()

    assert told == [
        ("a", "load", "CreateTask"), ("b", "load", "CreateTask"),
        ("b", "begins", True), ("a", "begins", True),
        ("a", "decided", ["task.assigned"]), ("b", "decided", ["task.assigned"]),
        ("a", "has committed", True), ("b", "has committed", True),
        ("a", "committed", [task_id]), ("b", "committed", [task_id])]


async def test_an_extension_joins_once_and_is_not_called_after_it_has_left() -> None:
    told: list[Any] = []
    gate, notes = gate_with(), Notes("a", told)

    gate.engine.extend(notes)
    gate.engine.extend(notes)
    await gate.create()
    assert [what for _, what, _ in told] == ["load", "begins", "decided", "has committed", "committed"]
    assert gate.engine.find_extension(Notes) is notes
    gate.engine.withdraw(notes)
    told.clear()
    await gate.create()

    assert told == []
    assert gate.engine.find_extension(Notes) is None


async def test_an_extension_may_refuse_what_an_operation_adds_and_the_others_of_the_batch_go_on() -> None:
    gate = gate_with(Rules())

    made = await gate.create_tasks(tasks=[{"type": "demo", "payload": None}] * 2)

    assert [item.error.error if item.error else None for item in made.results] == [None, "quota_exceeded"]


async def test_an_extension_says_why_there_is_no_lease_and_why_a_task_is_on_hold() -> None:
    gate = gate_with(Rules(), progress_receipts=True)
    offer = await gate.leased()
    await gate.create(type="never")

    assert (await gate.as_worker("w2").lease_next()).warnings == ["no lease today"]
    with refused("quota_exceeded"):
        await gate.as_worker().report_progress(**under(offer), progress={"at": 1})
    await gate.as_worker().release_lease(**under(offer))

    assert (await gate.get_task(task_id=offer.task_id)).held == "enough"


async def test_an_extension_answers_instead_of_the_engine_and_beside_it() -> None:
    gate = gate_with(Rules())

    assert (await gate.get_config()).version == "another"
    assert (await gate.as_agent("ada").bootstrap()).warnings == ["beware, ada"]
    assert (await gate.health()).upkeep == {"rules": 1}
    with refused("forbidden"):
        await gate.engine.check_caller(gate.caller)


async def test_an_extension_learns_of_lost_leases_spent_attempts_and_of_other_processes() -> None:
    lost = GivenUp()
    gate = gate_with(lost)
    expired, spent = await gate.leased(), await gate.leased("w2", max_attempts=1)
    await gate.as_worker("w2").fail(**under(spent, worker_id="w2"), error="no", retryable=True)
    await gate.wait(10_000)
    gate.engine.hear_news(news := News("elsewhere"))

    assert lost.reasons == [(spent.task_id, "max_retries_exceeded"), (expired.task_id, "lease_expired")]
    assert lost.news == [news]


async def test_an_extension_learns_of_granted_leases_and_of_changed_records_only_where_there_are_some() -> None:
    gate = gate_with(beside := Beside())

    offer = await gate.leased()
    granted = [told for told in beside.told if told[0] == "granted"]
    assert [(tenant, to_utc(end)) for _, tenant, end in granted] == [("t", offer.expires_at)]
    beside.told.clear()
    await gate.as_worker().complete(**under(offer), result={}, artifacts=[{"uri": "file:///a"}])
    assert beside.told == [("performed", "complete")]

    await Upkeep(gate.engine).once("presence")
    assert {told[0] for told in beside.told[1:]} == {"changed"}


async def test_an_extension_stands_around_a_call_and_may_refuse_a_creation_before_it_begins() -> None:
    gate = gate_with(beside := Beside())
    task: dict[str, Any] = {"type": "demo", "payload": None}

    await gate.create_tasks(tasks=[task] * 2)
    with refused("quota_exceeded"):
        await gate.create_tasks(tasks=[task] * 3)
    with refused("invalid_request"):
        await gate.complete(lease_id="", task_id="")

    assert beside.told == [("performed", "create_tasks")]
    assert len((await gate.list_tasks()).tasks) == 2


def test_what_an_extension_does_not_override_is_not_called() -> None:
    hooks = Hooks(Extension, (Extension(), Notes("a", [])))

    assert [name for name, hook in vars(hooks).items() if hook] == [
        "name_needs", "after_decision", "wrap_transact", "after_commit"]


def test_every_hook_of_an_extension_is_collected() -> None:
    assert vars(Hooks(Extension, ())).keys() == {name for name in vars(Extension) if not name.startswith("_")}


def outside(path: Path) -> list[str]:
    """Return where a module reaches into an engine: what it assigns there, and what it calls that is private."""
    places = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("engine", "Engine"):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private or isinstance(node.ctx, ast.Store):
                places.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    return places


def test_nobody_assigns_into_an_engine_or_calls_its_private_methods() -> None:
    rooms = ("parts", "commands", "clients", "backends", "conformance", "bench", "extras")

    assert [line for room in rooms for path in sorted((ROOT / room).rglob("*.py")) for line in outside(path)] == []
