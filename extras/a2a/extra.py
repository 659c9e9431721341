"""What A2A joins to the gate: nothing, as long as the settings offer no agent."""

from __future__ import annotations

from starlette.routing import Route

from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.model import errors


def join_face(gate: Opening) -> list[Route]:
    """Return the paths of the agents that the settings offer; that of `a2a.root` has its card at the root, too."""
    settings = gate.settings.a2a
    if not settings.agents:
        return []
    if not all(settings.agents) or any("/" in agent for agent in settings.agents):
        raise errors.StartupError("a2a.agents: each agent is a part of a path, so it needs a name without a slash")
    if settings.root and settings.root not in settings.agents:
        raise errors.StartupError(f"a2a.root names {settings.root}, which is not among a2a.agents")
    from asyncgate.extras.a2a.face import CARD, Face
    from asyncgate.extras.a2a.push import can_push, join_forms
    face = Face(gate)
    if can_push(gate):
        gate.when_opened.append(lambda engine, guard: join_forms(gate, engine))
    roots = [Route(f"/{CARD}", face)] if settings.root else []
    return [*roots, Route("/a2a/{agent}/{rest:path}", face)]


EXTRA = Extra(routes=join_face)
