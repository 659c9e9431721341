"""What a process tells the others of a batch that it has committed."""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model import stored
from asyncgate.parts.model.content import needs_of
from asyncgate.parts.model.news import News
from asyncgate.parts.model.views import to_raw
from asyncgate.parts.process.readers import is_awaited, list_announced, list_ended, list_families

MOST_QUEUED, MOST_ENDED = 50, 100       # tasks that one News lists: it must fit into what a database passes on


def news_of(work: Any) -> News | None:
    """Return what other processes must learn about a batch, if anything."""
    changed = (*work.added.values(), *work.moved.values())
    queued = [task for task in changed if task.status == "queued" and task.held is None]
    later = [due for task in queued if (due := task.next_eligible_at or 0.0) > work.now]
    now = [task for task in queued if (task.next_eligible_at or 0.0) <= work.now]
    ended, families = list_ended(changed), list_families(changed)
    keys = tuple(key[0] for kind, key in work.kept if kind is stored.Key)
    account, pauses = (stored.Account, ()) in work.kept, (stored.Pauses, ()) in work.kept
    if not (queued or ended or keys or account or pauses or work.posted or is_awaited(work.written.values())):
        return None
    kinds = tuple((task.type, tuple(sorted(needs_of(to_raw(task.requirements))))) for task in now[:MOST_QUEUED])
    return News(work.tenant_id, kinds, tuple(ended[:MOST_ENDED]), min(later, default=None),
                len(now) > MOST_QUEUED or len(ended) > MOST_ENDED, keys, account, bool(work.posted),
                receipts=list_announced(work.written.values()), pauses=pauses,
                families=tuple(families[:MOST_ENDED]))
