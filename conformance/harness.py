"""A gate for tests: an engine over one backend, callers of every role, and a clock that the test moves.

No test sleeps: `await gate.wait(300)` moves the backend's clock forward and lets upkeep sweep.  Every operation is a
method, and its arguments go through the same decoder as a request:
`await gate.as_agent("ada").create_task(type="demo")`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import fields, replace

from asyncgate import SCOPES, Caller, Engine, Operation
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.extras import find_extras
from asyncgate.parts.model import errors, queries, stored, stored_limits, wire
from asyncgate.parts.model.counted import place_of
from asyncgate.parts.model.database import Around
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.limiting import read_limits
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.walking import walk_rows
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.upkeep import Upkeep

if TYPE_CHECKING:
    from asyncgate.extras.ledger.outbox import Ledger

PATIENCE = 120      # seconds after which a missing event counts as a failure; a busy machine may need as many for some
STORED = (stored.Task, stored.Lease, stored.Progress, stored.Receipt, stored.Event, stored.Schedule, stored.Obligation,
          stored.Account, stored.Key, stored.Audit, stored.AuditHead)


def ask_of(op: Operation, fields: dict[str, Any]) -> wire.Ask:
    """Decode a request as if it came over the wire; msgspec.Raw is passed verbatim."""
    try:
        return op.reader.body(msgspec.json.encode(fields), "warn")[0]
    except msgspec.DecodeError as wrong:
        raise errors.InvalidRequest(f"{op.name}: {wrong}") from None


def settings_for_tests(**given: Any) -> Settings:
    """Return settings with cheap hashing of keys; the default takes 0.1 s per hash."""
    settings = Settings(**given)
    cheap = replace(settings.security.api_keys, hash_time_cost=1, hash_memory_cost=8)
    return replace(settings, security=replace(settings.security, api_keys=cheap))


# Required fields of some operations, besides the ids.
NEEDED: dict[str, dict[str, Any]] = {
    name: needed for name, op in OPERATIONS.items()
    if (needed := {field.name: op.takes.example[0][field.name] for field in fields(op.takes) if field.required})}


def least(operation: str) -> dict[str, Any]:
    """Return the minimal request of an operation, with ids that do not exist."""
    return {**dict.fromkeys(OPERATIONS[operation].takes.needed, "none"), **NEEDED.get(operation, {})}


def under(offer: wire.Offer, **more: Any) -> dict[str, Any]:
    """Return the fields that identify a worker's lease."""
    return {"task_id": offer.task_id, "lease_id": offer.lease_id, **more}


def body(receipt: wire.ReceiptRecord) -> dict[str, Any]:
    """Decode the body of a receipt."""
    read: dict[str, Any] = msgspec.json.decode(receipt.body)
    return read


@contextlib.contextmanager
def refused(code: str, **more: Any) -> Iterator[pytest.ExceptionInfo[errors.GateError]]:
    """Expect a refusal with this code and these further members."""
    with pytest.raises(errors.GateError) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    assert {name: caught.value.more.get(name) for name in more} == more, str(caught.value)


class Numbered(Ids):
    """Sequential ids, so that equal programs get equal ids."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def new(self, now: float, mark: int = 0, name: object = None) -> str:
        """Return the next id."""
        self.given += 1
        return f"00000000-0000-7000-8000-{self.given:012x}"

    def lease(self, mark: int = 0, name: object = None) -> str:
        """Return the next lease id."""
        return self.new(0)


class OwnTenants(Around):
    """A backend whose upkeep sees only the tenants of this test, because tests may share a database."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.own = set[str]()

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the overdue rows of this test's tenants."""
        return [entry for entry in await self.backend.overdue(now, grace, limit) if entry[0] in self.own]

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return the expiry times of leases of this test's tenants."""
        return [lapse for lapse in await self.backend.lapses(since, 10**6) if lapse[1] in self.own][:limit]

    async def unsent(self) -> list[str]:
        """Return the tenants of this test with unsent receipts."""
        return [tenant_id for tenant_id in await self.backend.unsent() if tenant_id in self.own]

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants of this test that have endpoints for webhooks."""
        return [tenant_id for tenant_id in await self.backend.webhook_tenants() if tenant_id in self.own]

    async def cut_cascades(self, before: float, limit: int) -> list[tuple[str, str]]:
        """Return the cascades of this test's tenants that are not finished."""
        return [row for row in await self.backend.cut_cascades(before, limit) if row[0] in self.own]

    async def aclose(self) -> None:
        """Close the backend."""
        await self.backend.close()


async def break_off(call: Coroutine[Any, Any, Any], gate: Gate, turns: int = 1) -> Gate:
    """Break off a call whose outcome nobody learns, some turns of the loop after its begin; return another gate."""
    begun = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    begun.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await begun
    await gate.engine.batches.wait_for_all()
    return gate.beside()


def are_here(names: Iterable[str]) -> list[str]:
    """Return names of operations, without those of extras where none is installed."""
    return [name for name in names if name in OPERATIONS or find_extras()]


class View:
    """The gate as one caller sees it."""

    def __init__(self, engine: Engine, caller: Caller) -> None:
        self.engine, self.caller = engine, caller

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name not in OPERATIONS and not find_extras():
            pytest.skip(f"{name} is an operation of an extra, and none is installed")
        if name not in OPERATIONS:
            raise AttributeError(name)
        return partial(self.perform, OPERATIONS[name])

    async def perform(self, op: Operation, /, **fields: Any) -> Any:
        """Perform one operation as this caller."""
        return await self.engine.perform(op, self.caller, ask_of(op, fields))


class Gate(View):
    """One tenant's gate; by default it calls with the shared token: as admin, and the request names the caller."""

    def __init__(self, engine: Engine, tenant_id: str) -> None:
        super().__init__(engine, Caller(tenant_id, wire.Principal("agent", "ada"), "admin", SCOPES, bound=False))
        self.tenant_id, self.backend = tenant_id, engine.backend
        self.own: set[str] = getattr(self.backend, "own", set())
        self.own.add(tenant_id)

    # Callers.

    def as_caller(self, kind: str, id: str, role: str, *, instance: str | None = None,
                  scopes: frozenset[str] = SCOPES) -> View:
        """Return the gate as one credential sees it."""
        who = wire.Principal(kind, id, instance)
        return View(self.engine, Caller(self.tenant_id, who, role, scopes))     # type: ignore[arg-type]

    def as_agent(self, id: str = "ada", instance: str | None = None) -> View:
        """Return the gate as an agent sees it."""
        return self.as_caller("agent", id, "agent", instance=instance)

    def as_worker(self, id: str = "w1", instance: str | None = None) -> View:
        """Return the gate as a worker sees it."""
        return self.as_caller("worker", id, "worker", instance=instance)

    def as_admin(self, id: str = "root") -> View:
        """Return the gate as an admin sees it."""
        return self.as_caller("human", id, "admin")

    def stranger(self) -> Gate:
        """Return another tenant's gate on the same engine."""
        return Gate(self.engine, str(uuid.uuid4()))

    def beside(self, **settings: Any) -> Gate:
        """Return this tenant's gate through another engine, as another process or after a restart."""
        return Gate(engine_over(self.backend, settings_for_tests(**settings)), self.tenant_id)

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of this gate; only a gate in integrated mode has one."""
        from asyncgate.extras.ledger.outbox import Ledger  # it imports the HTTP client, which is large
        ledger = self.engine.find_extension(Ledger)
        assert ledger is not None
        return ledger

    # The clock.

    def now(self) -> float:
        """Return the backend's time."""
        return self.backend.now()

    def skip(self, seconds: float) -> None:
        """Move the clock forward without a sweep."""
        real = getattr(self.backend, "backend", self.backend)
        real.skew += seconds

    async def sweep(self) -> None:
        """Let upkeep sweep once; fail if it could not."""
        upkeep = Upkeep(self.engine)
        async with asyncio.timeout(PATIENCE):
            await upkeep.once("sweep")
        assert upkeep.duties["sweep"].failures == 0, upkeep.duties["sweep"].last_error

    async def wait(self, seconds: float) -> None:
        """Move the clock forward, then sweep."""
        self.skip(seconds)
        await self.sweep()

    # Common steps.

    async def create(self, type: str = "demo", *, by: str = "ada", **fields: Any) -> str:
        """Create a task as an agent; return its id."""
        made = await self.as_agent(by).create_task(**{"type": type, "payload": None, **fields})
        return str(made.task_id)

    async def claim(self, worker: str = "w1", **fields: Any) -> wire.Offer | None:
        """Claim one task as a worker; return None if there is none."""
        offers = await self.as_worker(worker).lease_next(**fields)
        assert len(offers.tasks) <= 1
        return offers.tasks[0] if offers.tasks else None

    async def leased(self, worker: str = "w1", **fields: Any) -> wire.Offer:
        """Create a task as ada and claim it as a worker."""
        task_id = await self.create(**fields)
        offer = await self.claim(worker)
        assert offer is not None
        assert offer.task_id == task_id
        return offer

    async def finished(self, worker: str = "w1", **fields: Any) -> wire.Offer:
        """Create a task, claim it, and complete it with an artifact; return the offer."""
        offer = await self.leased(worker, **fields)
        await self.as_worker(worker).complete(**under(offer), result={"ok": True}, artifacts=[{"uri": "file:///out"}])
        return offer

    async def lose(self, offer: wire.Offer) -> None:
        """Let a lease expire, sweep it, and wait until the task is claimable again."""
        await self.wait(offer.expires_at.timestamp() - self.now() + 0.001)
        await self.wait(5.0)

    # Stored data.

    async def task(self, task_id: str) -> wire.TaskRecord:
        """Return a task."""
        record: wire.TaskRecord = await self.as_admin().get_task(task_id=task_id)
        return record

    async def receipts(self, task_id: str | None = None, type: str | None = None,
                       **fields: Any) -> list[wire.ReceiptRecord]:
        """Return all receipts of a task, or of the tenant, oldest first."""
        fields |= {"task_id": task_id, "receipt_type": type, "limit": 200}
        receipts: list[wire.ReceiptRecord] = []
        while True:
            page = await self.as_admin().list_receipts(**fields)
            receipts += page.receipts
            if page.next_cursor is None:
                return receipts
            fields["cursor"] = page.next_cursor

    async def receipt(self, task_id: str | None, type: str) -> wire.ReceiptRecord:
        """Return the only receipt of a type of a task."""
        receipts = await self.receipts(task_id, type)
        assert len(receipts) == 1, f"{len(receipts)} receipts of type {type}"
        return receipts[0]

    async def anomalies(self, task_id: str | None = None) -> list[dict[str, Any]]:
        """Return the bodies of all anomalies so far."""
        return [body(receipt) for receipt in await self.receipts(task_id, "system.anomaly")]

    async def owed(self, id: str = "ada", kind: str = "agent") -> list[wire.ReceiptRecord]:
        """Return the open obligations of a principal."""
        answer = await self.as_admin().list_open_obligations(principal_kind=kind, principal_id=id, limit=200)
        return list(answer.open_obligations)

    async def events(self, task_id: str) -> list[str]:
        """Return the types of a task's events, in order."""
        history = await self.as_admin().get_task_history(task_id=task_id, limit=200)
        return [event.event_type for event in history.events]

    async def everything(self) -> dict[str, list[Any]]:
        """Return all stored rows of the tenant."""
        return {table.__name__: [row async for row in walk_rows(self.backend, self.tenant_id, queries.Rows(table))]
                for table in STORED}

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Expect that the block writes nothing."""
        before = await self.everything()
        yield
        assert await self.everything() == before


def list_questions(row: stored.Progress) -> list[stored.Question]:
    """Return what a task has asked, and the answers, without times."""
    return [replace(question, asked_at=0.0, expires_at=None, answered_at=None)
            for question in stored.read_questions(row).values()]


async def miscounted(gate: Gate) -> list[str]:
    """Return the lanes of which the counted numbers differ from the tasks, and what counts wrongly against limits."""
    there: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for task in (await gate.everything())["Task"]:
        if (place := place_of(task)) is not None:
            there[task.lane][place] += 1
    rows = await gate.backend.page(gate.tenant_id, queries.QueueFilter(None, None, None, 10_000))
    counted = {row.lane: [row.queued, row.held, row.leased] for row in rows if row.queued or row.held or row.leased}
    holds = await gate.backend.page(gate.tenant_id, queries.Rows(stored_limits.Hold, "", 10_000))
    held = {(row.limit_name, row.limit_key, row.task_id) for row in holds}
    leased = {(*pair, task.task_id) for task in (await gate.everything())["Task"] if task.status in stored.ACTIVE
              for pair in read_limits(task.limits)}
    return [*(f"lane {lane} counts {counted.get(lane)}, its tasks are {there.get(lane)}"
              for lane in {*counted, *there} if counted.get(lane) != there.get(lane)),
            *(f"{hold} counts, or does not, against the facts" for hold in held ^ leased)]
