"""Upkeep: the gate's own work, in loops over stored state.

It sweeps expired leases, reports that this process is alive, and stores presences.  The sweep runs when the next lease
expires, and at least every `lease_sweep_interval_seconds`, in case nobody announced an expiry.

Time in which no gate served does not count against leases: after a gap in the heartbeat, of a process that was frozen,
asleep or without its database, nothing is decided before the leases have got that time back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import inf

from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, Needs, News, Sweep, Transact, Work
from asyncgate.parts.extras import find_extras
from asyncgate.parts.identity import metering
from asyncgate.parts.identity.audit import prune_audit
from asyncgate.parts.identity.budgets import BUDGET_SECONDS, Budgets
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.counted import PERIOD_SECONDS
from asyncgate.parts.model.database import MemberBackend
from asyncgate.parts.model.heartbeat import BEAT_SECONDS, Heartbeat
from asyncgate.parts.model.overdue import alive, prolong_lease
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.operating.retention import RETENTION_SECONDS, RowPruner
from asyncgate.parts.operating.traffic import TrafficCounter
from asyncgate.parts.process.duties import Duties, Duty
from asyncgate.parts.process.presence import STORED_EVERY_SECONDS, Sighting, add_sighting
from asyncgate.parts.receipts.schedules import load_overdue, sweep
from asyncgate.parts.receipts.upkeep import duties

log = logging.getLogger("asyncgate")


class Sighted(wire.Ask, kw_only=True):
    """Upkeep's own request: store these presences."""

    sightings: list[tuple[wire.Principal, Sighting]] = []


class Upkeep(Duties, Extension):
    """The gate's own work: loops over stored state, never over workers (spec 15)."""

    SLICE = 100             # expired leases swept in one transaction
    PAGE = 1000             # leases found by one read
    SHARED_SECONDS = 1.0    # between sweeps beside other processes: one may die before it announces a lease
    LATER_SECONDS = 0.02    # after a lease's expiry, so that no clock still calls it live
    NEAR_SECONDS = 60.0     # a lease that lives as long after a short silence is renewed in time

    def __init__(self, engine: Engine) -> None:
        self.engine, self.closer = engine, metering.Closer(engine)
        self.heart, self.recovering = Heartbeat(), asyncio.Lock()
        interval = engine.settings.lease_sweep_interval_seconds
        super().__init__({"heartbeat": Duty(BEAT_SECONDS, self.pulse),
                          "sweep": Duty(interval, self.sweep), "beat": Duty(interval, self.beat),
                          "presence": Duty(STORED_EVERY_SECONDS, self.store_presences),
                          "traffic": Duty(STORED_EVERY_SECONDS, self.store_traffic),
                          "calls": Duty(metering.CALLS_SECONDS, self.store_calls),
                          "usage": Duty(PERIOD_SECONDS, self.close_usage),
                          "budgets": Duty(BUDGET_SECONDS, self.check_budgets),
                          "audit": Duty(3600.0, partial(prune_audit, engine)),
                          "retention": Duty(RETENTION_SECONDS, RowPruner(engine).run),
                          "lanes": Duty(60.0, engine.backend.drop_lanes),
                          **token_duties(engine), **duties(engine), **extra_duties(engine)})

    async def __aenter__(self) -> Upkeep:
        self.engine.extend(self)
        self.heart.resume()
        await super().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        self.engine.withdraw(self)
        for store in (self.store_presences, self.store_traffic, self.store_calls):
            with contextlib.suppress(Exception):    # what the last half minute has seen is not worth a failed stop
                await store()

    async def begin(self, silent_since: float | None) -> None:
        """Prolong leases by the time in which no gate served, before the first sweep and the first call."""
        if silent_since is not None:
            await self._prolong_leases(silent_since, inf, self.engine.settings.restart_grace_seconds)
        await self.beat()

    async def pulse(self) -> int:
        """Beat; after a gap in the heartbeat, first give back the time that nobody served."""
        await self.recover()
        self.heart.beat()
        return 1

    async def recover(self) -> None:
        """Prolong leases by a gap in the heartbeat, less the time in which another process served.

        The grace is at most the gap, for which workers have backed off; else a machine that often stalls would keep the
        leases of dead workers.
        """
        if not self.heart.measure():
            return
        async with self.recovering:
            if not (gap := self.heart.measure()):       # another task has done it
                return
            backend = self.engine.backend
            now, others = backend.now(), await backend.last_served() if isinstance(backend, MemberBackend) else 0.0
            since = max(now - gap, others)
            grace = min(self.engine.settings.restart_grace_seconds, now - since)
            number = await self._prolong_leases(since, now + max(gap, self.NEAR_SECONDS), grace)
            self.heart.resume()
            log.warning("nobody was served for %.1f s; %d leases got that time back", now - since, number)

    def wrap_transact(self, transact: Transact) -> Transact:
        """Decide no batch between a gap in the heartbeat and the prolonging of leases."""
        return self.heart.guard(transact, self.recover)

    async def _prolong_leases(self, since: float, until: float, grace: float) -> int:
        """Prolong the leases that lived at `since` and end before `until`; return how many.

        All tasks are found before any is changed: a prolonged lease would be found again.  Past the batches, which wait
        for this.
        """
        number = 0
        for tenant_id, tasks in (await self._find_leased(since, until)).items():
            for at in range(0, len(tasks), self.SLICE):
                some, decided = tasks[at:at + self.SLICE], list[Work]()
                await self.engine.backend.transact(
                    tenant_id, Needs(tasks=set(some)), partial(self._prolong, decided, some, since, grace))
                number += sum(len(work.leased) for work in decided)
                self.engine.batches.after_commit(*decided)
        return number

    def _prolong(self, decided: list[Work], tasks: list[str], since: float, grace: float, work: Work) -> None:
        prolong(self.engine, work, tasks, since, grace)
        decided[:] = [work]         # a repeated attempt starts from nothing

    async def _find_leased(self, since: float, until: float) -> dict[str, list[str]]:
        """Return the tasks, by tenant, whose leases expire between two moments."""
        tenants: defaultdict[str, dict[str, None]] = defaultdict(dict)
        since, limit = since - self.engine.settings.lease_grace_seconds, self.PAGE
        while page := await self.engine.backend.lapses(since, limit):
            for moment, tenant_id, task_id in page:
                if moment <= until:
                    tenants[tenant_id][task_id] = None
            if len(page) < limit or page[-1][0] > until:
                break
            limit = 2 * limit if page[-1][0] == since else self.PAGE    # more than a page expire at one moment
            since = page[-1][0]
        return {tenant_id: list(tasks) for tenant_id, tasks in tenants.items()}

    def after_grant(self, tenant_id: str, first_end: float) -> None:
        """Schedule a sweep for the expiry of a lease that was just granted, and tell the other processes."""
        if self._plan_sweep(first_end) and (shared := self.engine.shared) and not shared.is_alone():
            shared.tell(News(tenant_id, lapse=first_end))

    def hear_news(self, news: News) -> None:
        """Schedule a sweep for the expiry of a lease that another process granted."""
        if news.lapse is not None:
            self._plan_sweep(news.lapse)

    async def describe_health(self, health: wire.Healthy) -> None:
        """Describe the state of every job."""
        health.upkeep = self.report()

    def _plan_sweep(self, moment: float) -> bool:
        """Schedule a sweep at a time of the database's clock; return whether it is earlier than the planned one."""
        wait = moment + self.engine.settings.lease_grace_seconds - self.engine.backend.now()
        now = asyncio.get_running_loop().time()
        return self.duties["sweep"].alarm.set(now + max(wait, 0.0) + self.LATER_SECONDS)

    async def sweep(self) -> int:
        """Sweep expired leases and overdue schedules, and plan the next sweep for the next expiry."""
        done = await self._sweep_overdue()
        now = self.engine.backend.now()
        grace = self.engine.settings.lease_grace_seconds
        for moment, _, _ in await self.engine.backend.lapses(now - grace, 1):
            self._plan_sweep(moment)
        if not self.engine.is_alone():
            self._plan_sweep(now - grace + self.SHARED_SECONDS)
        return done

    async def _sweep_overdue(self) -> int:
        """Sweep in small transactions until nothing new is overdue."""
        done, stuck, seen = 0, 0, set[tuple[str, str]]()
        while True:
            limit, now = self.SLICE + stuck, self.engine.backend.now()
            overdue = await self.engine.backend.overdue(now, self.engine.settings.lease_grace_seconds, limit)
            fresh = {(tenant, id) for tenant, tasks, schedules in overdue for id in (*tasks, *schedules)} - seen
            for tenant, tasks, schedules in overdue:
                done += await self._sweep(tenant, [id for id in tasks if (tenant, id) in fresh],
                                          [id for id in schedules if (tenant, id) in fresh])
            sizes = [len(ids) for _, *both in overdue for ids in both]
            if not fresh and max(sizes, default=0) < limit:
                return done
            # Rows found again are lasting anomalies or cannot be swept: read past them.
            stuck, seen = sum(sizes) - len(fresh) if fresh else stuck + self.SLICE, seen | fresh

    async def _sweep(self, tenant_id: str, tasks: list[str], schedules: list[str]) -> int:
        """Sweep rows together; if that fails, one by one, so that one bad row never blocks the others."""
        size = len(tasks) + len(schedules)
        try:
            if size:
                await self._write(tenant_id, Sweep(tasks=tasks, schedules=schedules))
            return size
        except errors.GateError:
            if size == 1:
                log.exception("upkeep: cannot sweep %s", (tasks or schedules)[0])
                return 0
        alone = [await self._sweep(tenant_id, [task], []) for task in tasks]
        return sum(alone) + sum([await self._sweep(tenant_id, [], [schedule]) for schedule in schedules])

    async def beat(self) -> int:
        """Report that this process is alive, so that others do not take over its tasks."""
        if self.engine.lasting is None:
            return 0
        await self.recover()        # first: the sign would say that this process has served meanwhile
        await self.engine.lasting.beat()
        return 1

    async def store_presences(self) -> int:
        """Store the callers seen since the last run."""
        seen = self.engine.sightings.take()
        for tenant_id, sightings in seen.items():
            await self._write(tenant_id, Sighted(sightings=sightings))
        self.engine.sightings.forget_taken()
        return sum(map(len, seen.values()))

    async def store_traffic(self) -> int:
        """Store what happened in queues since the last run."""
        counter = self.engine.find_extension(TrafficCounter)
        return await counter.store() if counter else 0

    async def store_calls(self) -> int:
        """Store the calls of tenants since the last run."""
        meter = self.engine.find_extension(metering.CallMeter)
        return await meter.store() if meter else 0

    async def check_budgets(self) -> int:
        """Look at what tenants have used of their budgets."""
        budgets = self.engine.find_extension(Budgets)
        return await budgets.look_around() if budgets else 0

    async def close_usage(self) -> int:
        """Write usage events, soon after each mark of five minutes."""
        now = self.engine.backend.now()
        mark = metering.floor_to(now - metering.SETTLE_SECONDS,
                                 PERIOD_SECONDS) + PERIOD_SECONDS + metering.SETTLE_SECONDS
        self.duties["usage"].alarm.set(asyncio.get_running_loop().time() + mark - now)
        return await self.closer.run()

    async def _write(self, tenant_id: str, ask: Sweep | Sighted) -> None:
        run, loads = WRITES[type(ask)]
        await self.engine.write(run, loads, self.engine.make_own_caller(tenant_id), ask)


def token_duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs of a gate that accepts access tokens."""
    if not engine.settings.security.jwt.has_keys:
        return {}
    from asyncgate.parts.identity.revocations import prune_revocations
    return {"revocations": Duty(3600.0, partial(prune_revocations, engine))}


def extra_duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs of the extras."""
    jobs = [(name, duty) for extra in find_extras().values() for name, duty in extra.duties(engine).items()]
    assert len(dict(jobs)) == len(jobs), "two extras have a job of the same name"
    return dict(jobs)


def its_presences(needs: Needs, caller: Caller, ask: Sighted) -> None:
    """Load the presences of the callers seen."""
    needs.records.update((stored.Presence, (who.kind, who.id)) for who, _ in ask.sightings)


def note_presences(engine: Engine, work: Work, caller: Caller, ask: Sighted) -> None:
    """Store the presences of the callers seen."""
    for who, sighting in ask.sightings:
        work.keep_record(add_sighting(work.find_record(stored.Presence, who.kind, who.id), who, sighting))


def prolong(engine: Engine, work: Work, tasks: list[str], since: float, grace: float) -> None:
    """Prolong leases by the time in which no gate served: their workers could neither renew nor complete."""
    for task_id in tasks:
        lease = work.leases.get(task_id)
        if lease is None or not alive(lease, since, engine.settings.lease_grace_seconds):
            continue
        until = prolong_lease(lease, since, work.now, grace)
        work.set_lease(replace(lease, expires_at=until))
        work.add_event(task_id, "lease.prolonged", lease_id=lease.lease_id, worker_id=lease.worker_id,
                       expires_at=to_utc(until).isoformat(), silent_since=to_utc(since).isoformat())


WRITES: dict[type[wire.Ask], tuple[Callable[..., None], Callable[..., None]]] = {
    Sweep: (sweep, load_overdue), Sighted: (note_presences, its_presences)}
