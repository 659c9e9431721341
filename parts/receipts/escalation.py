"""Escalation: whom a task is proposed to when its worker is lost, or its last attempt has failed.

Task.escalated answers the duty, and opens, closes and moves nothing.  Its cause is the end of one lease, told once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncgate import ESCALATED, Extension
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.model.views import decode_terms
from asyncgate.parts.model.wire import Principal

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.parts.model.settings import Settings
    from asyncgate.parts.model.stored import Lease, Task


class Escalation(Extension):
    """Tells whoever the class of a task names; nobody is told of a class that names nobody."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings

    def given_up(self, work: Work, task: Task, lease: Lease, reason: str) -> None:
        """Propose a task to somebody else whose worker was lost, or whose last attempt has failed."""
        chosen = class_of(self.settings, task, reason)
        if (target := self.settings.escalation.target(work.tenant_id, chosen)) is None:
            return
        to, terms = Principal(target.to_kind, target.to_id), decode_terms(task.terms)
        body: dict[str, Any] = {
            "escalation_class": chosen, "escalation_reason": reason, "escalation_to": to, "type": task.type,
            "attempt": task.attempt, "expiries": task.expiries, "previous_worker_id": lease.worker_id,
            "expected_outcome_kind": terms.expected_outcome_kind,
            "expected_artifact_mime": terms.expected_artifact_mime}
        self.engine.write_receipt(work, ESCALATED, task, body, to=to, lease=lease, mark=reason)


def class_of(settings: Settings, task: Task, reason: str) -> int:
    """Return the class that a task's payload asks for, or else the one of the settings."""
    payload, usual = decode_json(task.payload), settings.escalation
    wished = payload.get("escalation_class") if isinstance(payload, dict) else None
    if type(wished) is int:     # a bool is no class
        return wished
    return usual.lease_expiry_class if reason == "lease_expired" else usual.attempts_spent_class
