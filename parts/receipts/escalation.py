"""Escalation: propose a task to another principal when its worker is lost or its last attempt has failed.

A task.escalated names the duty as its parent.  It opens and closes no obligation and does not change the task.  It is
written once for each end of a lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncgate import ESCALATED, Extension
from asyncgate.parts.model import wire
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.model.views import decode_terms

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.parts.model import stored
    from asyncgate.parts.model.settings import Settings


class Escalation(Extension):
    """Escalates tasks to the principal that the settings name for the task's class; a no-op without one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings

    def report_loss(self, work: Work, task: stored.Task, lease: stored.Lease, reason: str) -> None:
        """Write a task.escalated for a task whose worker was lost or whose last attempt has failed."""
        chosen = class_of(self.settings, task, reason)
        if (target := self.settings.escalation.target(work.tenant_id, chosen)) is None:
            return
        to, terms = wire.Principal(target.to_kind, target.to_id), decode_terms(task.terms)
        body: dict[str, Any] = {
            "escalation_class": chosen, "escalation_reason": reason, "escalation_to": to, "type": task.type,
            "attempt": task.attempt, "expiries": task.expiries, "previous_worker_id": lease.worker_id,
            "expected_outcome_kind": terms.expected_outcome_kind,
            "expected_artifact_mime": terms.expected_artifact_mime}
        self.engine.write_receipt(work, ESCALATED, task, body, to=to, lease=lease, discriminator=reason)


def class_of(settings: Settings, task: stored.Task, reason: str) -> int:
    """Return the escalation class that a task's payload names, or else that of the settings."""
    payload, usual = decode_json(task.payload), settings.escalation
    wished = payload.get("escalation_class") if isinstance(payload, dict) else None
    if type(wished) is int:     # not isinstance: a bool is not a class
        return wished
    return usual.lease_expiry_class if reason == "lease_expired" else usual.attempts_spent_class
