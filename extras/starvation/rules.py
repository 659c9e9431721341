"""An anomaly for whoever waits too long: the queue is served, and others that came later were served before.

Nothing is reordered by it: a priority means what it says, and who looks at the anomaly decides what to do.
"""

from __future__ import annotations

from functools import partial

from asyncgate import ANOMALY, Engine, Task, Work, receipt_key
from asyncgate.parts.model import queries
from asyncgate.parts.operating.traffic import TrafficCounter
from asyncgate.parts.operating.waits import SERVED_MINUTES, Usual, find_longest, read_usual
from asyncgate.parts.process.kit import Bounded

STARVATION_SECONDS = 60.0
MOST_LATE = 20          # tasks of a tenant, with one look; the longest waits first
MOST_NOTED = 10_000     # that this process has told of, and does not read again
RAISE_PRIORITY = (
    "Start more workers for this type, or raise the task's priority (preview_bulk with action prioritize): tasks of "
    "higher priority are leased first, however long it waits.")


class StarvationWatch:
    """Looks at the queues that this process serves: the oldest task of each priority against what was leased lately."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told: Bounded[tuple[str, str, int], bool] = Bounded(MOST_NOTED)

    async def run(self) -> int:
        """Look at all tenants of which this process has leased tasks lately; return how many anomalies were written."""
        counter = self.engine.find_extension(TrafficCounter)
        if counter is None or not self.engine.settings.starvation_factor:
            return 0
        since = self.engine.backend.now() - SERVED_MINUTES * 60
        return sum([await self.look_at(tenant_id) for tenant_id in counter.list_tenants(since)])

    async def look_at(self, tenant_id: str) -> int:
        """Tell of the tasks of a tenant that wait too long; each once for each time that it waits."""
        engine, now = self.engine, self.engine.backend.now()
        usual = await read_usual(engine, tenant_id, now)
        heads = await engine.backend.page(tenant_id, queries.Heads(tuple(usual))) if usual else []
        late = sorted((head.since, head) for head in heads
                      if now - head.since > find_longest(engine.settings, usual[head.lane])
                      and (tenant_id, head.task_id, head.fence) not in self.told)[:MOST_LATE]
        if not late:
            return 0
        ids = [head.task_id for _, head in late]
        stated = [(head.task_id, receipt_key(ANOMALY, head.task_id, engine.gate, None, (), name_wait(head.fence)))
                  for _, head in late]
        told = await engine.change(tenant_id, partial(self._tell, ids, usual), tasks=ids, stated=stated)
        for _, head in late:
            self.told.put((tenant_id, head.task_id, head.fence), True)
        return told

    def _tell(self, ids: list[str], usual: dict[int, Usual], work: Work) -> int:
        waiting = [task for task_id in ids if (task := work.tasks.get(task_id)) is not None
                   and task.claimable(work.now)]
        return sum(write_anomaly(self.engine, work, task, usual[task.lane]) for task in waiting if task.lane in usual)


def write_anomaly(engine: Engine, work: Work, task: Task, usual: Usual) -> bool:
    """Tell the owner of a task, and return True; False if that was told before."""
    since = max(task.updated_at, task.next_eligible_at or 0.0)
    before = len(work.written)
    engine.write_receipt(work, ANOMALY, task, {
        "kind": "waiting_too_long", "recommended_action": RAISE_PRIORITY,
        "details": {"waits_seconds": round(work.now - since, 3), "usual_seconds": round(usual.seconds, 3),
                    "leased_in_last_hour": usual.leased, "priority": task.priority, "type": task.type},
    }, discriminator=name_wait(task.fence))
    return len(work.written) > before


def name_wait(fence: int) -> str:
    """Return the mark of a wait: the next one, after a lease, is another."""
    return f"waiting_too_long {fence}"
