"""Parking: a worker gives a lease back until a time; that is neither a failure nor a loss, and has its own count."""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.content import tells_another
from asyncgate.parts.model.families import count_awaited
from asyncgate.parts.model.views import decode_terms, to_utc, to_utc_or_none

PARKS_LIMIT = "max_parks"       # the limit, and why a task that has reached it is on hold
GIVEN_BACK = frozenset({"released", "parked", stored.INPUT_REQUIRED})   # reasons of an end that the worker asked for


def find_park_end(ask: wire.ReleaseLease, now: float) -> float | None:
    """Return until when a task is parked; None if no time is said."""
    if ask.after_seconds is not None and ask.until is not None:
        raise errors.InvalidRequest("release_lease takes after_seconds or until, not both")
    if ask.after_seconds is not None:
        return now + ask.after_seconds
    until = instant(ask.until)
    return None if until is None else max(until, now)


def why_parked_out(task: stored.Task, parks: int, limit: int) -> str | None:
    """Return why a task is put on hold that was parked so often: its own limit, or the gate's; 0 is none."""
    own = decode_terms(task.terms).max_parks
    most = limit if own is None else own
    return PARKS_LIMIT if 0 < most <= parks else None


def describe_park(ask: wire.ReleaseLease, until: float | None, parks: int) -> dict[str, Any]:
    """Return what the receipt says of a lease that was given back."""
    return {"why": ask.reason, "until_children": ask.until_children, "parks": parks or None,
            "parked_until": None if until is None else to_utc(until)}


def answer_return(work: Any, task_id: str, error: Any = wire.JSON_NULL) -> wire.Released:
    """Answer for a task whose lease has ended without a result, the first time or again: from the task as it is."""
    task = work.require_task(task_id)
    if task.status == "failed":     # by this error, or because an answer without which it cannot go on has not come
        return wire.Released(True, "failed", False, error_differs=tells_another(error, task.outcome))
    return wire.Released(True, "queued", True, to_utc_or_none(task.next_eligible_at), count_awaited(work, task_id))
