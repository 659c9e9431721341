"""What the authorization server joins to the gate; its operations are there while it is off, too."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from asyncgate import Engine
from asyncgate.extras.oauth import client_admin, links, revoking, sessions, users
from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.model.challenges import Challenges
from asyncgate.parts.process.duties import Duty


def join_server(gate: Opening) -> list[Route]:
    """Have a gate issue access tokens, and accept them; return the paths for that, none if the settings say no."""
    if not gate.settings.security.oauth.enabled:
        return []
    from asyncgate.extras.oauth.server import AuthorizationServer
    gate.joined["oauth"] = server = AuthorizationServer(gate.settings, gate.send)
    assert gate.identity.tokens is not None     # the server has a signing key
    gate.challenges = Challenges(server.issuer)
    server.accept_own_tokens(gate.identity.tokens)
    gate.when_opened.append(server.open)
    routes = server.routes()
    gate.open_paths = {route.path for route in routes if getattr(route.app, "open", False)}
    return routes


def list_duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs of a gate that issues access tokens."""
    if not engine.settings.security.oauth.enabled:
        return {}
    from asyncgate.extras.oauth.pruning import prune_sessions
    from asyncgate.extras.oauth.registration import prune_clients
    return {"sessions": Duty(3600.0, partial(prune_sessions, engine)),
            "clients": Duty(3600.0, partial(prune_clients, engine))}


EXTRA = Extra(routes=join_server, duties=list_duties,
              operations=[*client_admin.OPERATIONS, *users.OPERATIONS, *links.OPERATIONS, *sessions.OPERATIONS,
                          *revoking.OPERATIONS])
