"""The live leases that a process has granted, counted in memory."""

from __future__ import annotations

from collections.abc import Mapping

from asyncgate.parts.model import stored


class GrantedLeases:
    """The live leases that this process has granted or renewed; another process may have ended some."""

    TIDY = 1000         # leases, above which those that have run out are forgotten

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}        # by task
        self.most = self.TIDY

    def note(self, leased: Mapping[str, stored.Lease], now: float) -> float | None:
        """Take in the leases that a batch has changed; return when the first of its live ones runs out."""
        first = None
        for task_id, lease in leased.items():
            if lease.ending == "live":
                self.ends[task_id] = lease.expires_at
                first = min(first or lease.expires_at, lease.expires_at)
            else:
                self.ends.pop(task_id, None)
        if len(self.ends) > self.most:
            self.most = 2 * self.count(now) + self.TIDY
        return first

    def count(self, now: float) -> int:
        """Return how many still live."""
        self.ends = {task_id: end for task_id, end in self.ends.items() if end > now}
        return len(self.ends)
