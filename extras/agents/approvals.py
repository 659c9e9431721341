"""How a framework's request for approval is asked at the gate."""

from __future__ import annotations

from typing import Any

from asyncgate.clients.finite import encode_finite
from asyncgate.clients.worker import Answer, Question

REASON = {"type": "object", "properties": {"reason": {"type": "string", "title": "Reason"}}}


def ask_for_approval(call_id: str, tool: str, given: Any, to: str | None) -> Question:
    """Return the question whether a tool may be called with something."""
    shown = given if isinstance(given, str) else encode_finite(given, tool).decode()
    return Question(key=f"approve {call_id}", message=f"May {tool} be called with {shown}?", schema=REASON, to=to)


def describe_refusal(answer: Answer) -> str:
    """Return why a tool may not be called, as its model is told."""
    if answer.action != "decline" or answer.by is None:
        return "Nobody has approved this call."
    reason = answer.content.get("reason") if isinstance(answer.content, dict) else None
    return f"{answer.by['kind']} {answer.by['id']} has declined this call" + (f": {reason}" if reason else ".")
