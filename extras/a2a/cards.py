"""The cards of agents: what a client reads first, made of the settings and of declared types."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from asyncgate import __version__
from asyncgate.extras.a2a.requests import JSON_MODE


class Described(Struct):
    """What is known of the type behind an agent."""

    description: str = ""
    takes_data: bool = False        # whether its payload has a schema
    schemas: dict[str, Any] = {}


def make_card(agent: str, address: str, about: Described, modes: tuple[str, ...]) -> dict[str, Any]:
    """Return the card of 1.0."""
    words = about.description or f"Does tasks of the type {agent}, and loses none."
    takes = [JSON_MODE] if about.takes_data else list(modes)
    gives = list(dict.fromkeys(["text/plain", JSON_MODE, *modes]))
    return {
        "name": agent, "description": words, "version": __version__,
        "supportedInterfaces": [
            {"url": f"{address}/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
            {"url": f"{address}/v1", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}],
        "capabilities": {"streaming": True, "pushNotifications": False, "extendedAgentCard": True},
        "securitySchemes": {"bearer": {"httpAuthSecurityScheme": {
            "scheme": "Bearer", "description": "a key of the gate, or an access token"}}},
        "securityRequirements": [{"schemes": {"bearer": {"list": []}}}],
        "defaultInputModes": takes, "defaultOutputModes": gives,
        "skills": [{"id": agent, "name": agent, "description": words, "tags": ["asyncgate"], "inputModes": takes,
                    "outputModes": gives}]}
