"""The heartbeat of a worker: it renews leases from its own thread and connection.

So a function that blocks the event loop loses no lease.  The same thread notices lost leases and sends progress, so all
calls under one lease go out in order, from one place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from asyncgate.clients.http import Http, Refusal, Unreachable

HEARTBEAT_TIMEOUT_SECONDS = 5.0     # short, so that a hanging gate does not cost a lease that a retry could keep
LOOK_SECONDS = 2.0          # pause between two checks of which leases this worker still holds
GONE = "lease_invalid_or_expired"

log = logging.getLogger("asyncgate.worker")


class Pulse:
    """One lease: when it ends, when to renew it, and which progress is still to be sent."""

    def __init__(self, under: dict[str, Any], every_seconds: float, lost: Callable[[str], None]) -> None:
        now = time.monotonic()
        self.under, self.lost = under, lost
        self.until, self.renew_at, self.rest_until = now + 3 * every_seconds, now + every_seconds, 0.0
        self.grace_seconds = 0.0    # beyond its end, while the gate is away: it may give the time back
        self.news: Any = None       # the newest progress that is not sent yet; it replaces older progress
        self.refused: Exception | None = None   # why the last progress is not with the gate
        self.running = False        # whether the gate has marked the task as running
        self.silent = threading.Event()
        self.silent.set()

    @property
    def end(self) -> float:
        """When the work under this lease ends, unless the gate renews it."""
        return self.until + self.grace_seconds

    @property
    def due(self) -> float:
        """When the next call or check of this lease is due."""
        return min(self.end, max(self.rest_until, 0.0 if self.news is not None else self.renew_at))


class Heart:
    """Renews the leases of one worker, and regularly checks which of them still exist."""

    def __init__(self, url: str, token: str, me: dict[str, Any], ttl_seconds: int, outage_seconds: float) -> None:
        self.http, self.me, self.ttl_seconds, self.outage_seconds = Http(url, token), me, ttl_seconds, outage_seconds
        self.http.patience_seconds = HEARTBEAT_TIMEOUT_SECONDS
        self.pulses: dict[str, Pulse] = {}
        self.changed, self.stopped, self.look_at = threading.Condition(), False, 0.0
        self.thread = threading.Thread(target=self._run, name="asyncgate-heart", daemon=True)

    def start(self) -> None:
        """Start the heartbeat thread."""
        self.thread.start()

    def stop(self) -> None:
        """Stop the heartbeat thread; leases that are not released run out."""
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join()

    def keep(self, pulse: Pulse) -> None:
        """Start to renew a lease."""
        with self.changed:
            if not self.pulses:
                self.look_at = time.monotonic() + LOOK_SECONDS
            self.pulses[pulse.under["lease_id"]] = pulse
            self.changed.notify()

    def drop(self, pulse: Pulse) -> None:
        """Stop renewing a lease."""
        with self.changed:
            self.pulses.pop(pulse.under["lease_id"], None)
            pulse.silent.set()

    def tell(self, pulse: Pulse, progress: dict[str, Any]) -> None:
        """Send progress under a lease as soon as possible; newer progress replaces older."""
        with self.changed:
            if pulse.under["lease_id"] in self.pulses:
                pulse.news, pulse.refused = progress, None
                pulse.silent.clear()
                self.changed.notify()

    # What the thread does.

    def _run(self) -> None:
        with self.http:
            while (due := self._due()) is not None:
                try:
                    for pulse in due:
                        self._beat(pulse)
                    if time.monotonic() >= self.look_at:
                        self._look()
                except Exception:       # keep the thread alive: without it every lease would be lost
                    log.exception("internal error in this worker's heartbeat; retrying in a second")
                    for pulse in due:
                        self._rest(pulse, 1.0)

    def _due(self) -> list[Pulse] | None:
        """Wait until a lease is due; return None when this worker stops."""
        with self.changed:
            while not self.stopped:
                now = time.monotonic()
                due = [pulse for pulse in self.pulses.values() if pulse.due <= now]
                if due or (self.pulses and self.look_at <= now):
                    return due
                moments = [pulse.due for pulse in self.pulses.values()]
                self.changed.wait(min(self.look_at, *moments) - now if moments else None)
        return None

    def _beat(self, pulse: Pulse) -> None:
        if time.monotonic() >= pulse.end:
            return self._end(pulse, "expired")
        if pulse.news is not None:
            self._report(pulse)
        elif time.monotonic() >= pulse.renew_at:
            self._renew(pulse)

    def _report(self, pulse: Pulse) -> None:
        news = pulse.news
        if self._say(pulse, "report_progress", progress=news) is not None:
            pulse.running = True
            self._heard(pulse, news)

    def _heard(self, pulse: Pulse, news: Any, refused: Refusal | None = None) -> None:
        """Mark a report as answered by the gate, unless a newer one waits."""
        with self.changed:
            if pulse.news is news:
                pulse.news, pulse.refused = None, refused
                pulse.silent.set()

    def _renew(self, pulse: Pulse) -> None:
        asked = time.monotonic()    # the gate's lease starts later, so this side ends it first
        if reply := self._say(pulse, "renew_lease", extend_by_seconds=self.ttl_seconds):
            every = float(reply["renew_every_seconds"])
            pulse.until, pulse.renew_at = asked + 3 * every, asked + every

    def _look(self) -> None:
        """Find lost leases long before their renewal, so that the work on a canceled task stops soon."""
        self.look_at = time.monotonic() + LOOK_SECONDS
        with self.changed:
            known = list(self.pulses.values())
        try:
            leases = self.http.call("list_leases", **self.me, resume=False)["leases"]
        except (Unreachable, Refusal):
            return      # the renewals will show it
        live = {lease["lease_id"] for lease in leases}
        for pulse in known:
            if pulse.under["lease_id"] not in live:
                self._renew(pulse)      # the gate refuses, and its refusal says why
            elif not pulse.running:
                pulse.running = self._say(pulse, "start_task") is not None

    def _say(self, pulse: Pulse, operation: str, **fields: Any) -> Any:
        """Call an operation under a lease; return None if it failed."""
        try:
            reply = self.http.call(operation, **self.me, **pulse.under, **fields)
        except Refusal as refusal:
            pulse.grace_seconds = self.outage_seconds if is_away(refusal) else 0.0
            return self._refused(pulse, operation, refusal, fields.get("progress"))
        except Unreachable:
            pulse.grace_seconds = self.outage_seconds
            return self._rest(pulse, 1.0)
        pulse.grace_seconds = 0.0
        return reply

    def _refused(self, pulse: Pulse, operation: str, refusal: Refusal, news: Any) -> None:
        if refusal.code in (GONE, "task_not_found"):
            self._end(pulse, str(refusal.more.get("reason", "unknown")))
        elif is_temporary(refusal):
            self._rest(pulse, refusal.retry_after or 1.0)
        elif operation == "report_progress":
            log.warning("task %s: the gate refused its progress: %s", pulse.under["task_id"], refusal)
            self._heard(pulse, news, refusal)
        else:       # it cannot be renewed any more, but it lasts until its end
            log.warning("task %s: %s", pulse.under["task_id"], refusal)
            pulse.renew_at, pulse.running = pulse.until, True

    def _rest(self, pulse: Pulse, seconds: float) -> None:
        """Pause, but so briefly that several retries fit in before the lease runs out."""
        now = time.monotonic()
        pulse.rest_until = now + min(seconds, max(0.05, (pulse.end - now) / 4))

    def _end(self, pulse: Pulse, reason: str) -> None:
        with self.changed:
            kept = self.pulses.get(pulse.under["lease_id"]) is pulse
        self.drop(pulse)
        if kept:
            pulse.lost(reason)


def is_away(refusal: Refusal) -> bool:
    """Whether a refusal says that the gate serves nobody."""
    return refusal.status >= 500 or refusal.code == "unexpected_answer"


def is_temporary(refusal: Refusal) -> bool:
    """Whether a refusal may go away: it is about the gate's or the credential's state, not about the request."""
    return refusal.status in (401, 403, 408, 425, 429) or is_away(refusal)
