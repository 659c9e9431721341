"""The cards of agents: what a client reads first, made of the settings and of declared types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, Struct

from asyncgate import Caller, __version__
from asyncgate.extras.a2a.requests import JSON_MODE, TEXT_MODE
from asyncgate.parts.model.content import decode_json, encode_json

if TYPE_CHECKING:
    from asyncgate.parts.faces.serving import Serving

LONGEST_SCHEMA = 4000       # that the words about an agent show
Form = Literal["message", "text", "data"]       # what becomes the payload: the whole message, its words, a data part


class Described(Struct, frozen=True):
    """What is declared of the type behind an agent."""

    words: str = ""
    payload: Any = None         # the schemas
    result: Any = None

    @property
    def form(self) -> Form:
        """Return what of a message is the payload: a schema that takes any object takes a message."""
        return find_form(self.payload)


def find_form(schema: Any) -> Form:
    """Return what values of a schema are."""
    if not schema or not isinstance(schema, dict) or (schema.get("type") == "object" and "properties" not in schema):
        return "message"
    return "text" if schema.get("type") == "string" else "data"


def list_modes(form: Form, modes: tuple[str, ...]) -> list[str]:
    """Return the media types of a form."""
    return {"message": list(modes), "text": [TEXT_MODE], "data": [JSON_MODE]}[form]


async def describe_agent(gate: Serving, caller: Caller, agent: str) -> Described:
    """Read what the caller's tenant has declared of a type; without the extra of types it is nothing."""
    if "declare_type" not in gate.operations:
        return Described()
    op = gate.operations["list_types"]
    ask = op.takes(type=agent)      # type: ignore[call-arg]  # ListTypes
    reply: Any = await op.run(gate.engine, caller, ask)     # also for those who may see a public card only
    row = next((row for row in reply.types if row.description is not UNSET), None)
    if row is None:
        return Described()
    schemas = [None if text is UNSET else decode_json(bytes(text)) for text in (row.payload_schema, row.result_schema)]
    return Described(row.description, *schemas)


def make_card(agent: str, address: str, about: Described, modes: tuple[str, ...], pushes: bool) -> dict[str, Any]:
    """Return the card of 1.0."""
    words = about.words or f"Does tasks of the type {agent}, and loses none."
    takes, gives = list_modes(about.form, modes), list_modes(find_form(about.result), modes)
    skill, schema = words, encode_json(about.payload).decode() if about.form == "data" else ""
    if 0 < len(schema) < LONGEST_SCHEMA:
        skill = f"{words} Takes one data part that fits the JSON schema {schema}"
    return {
        "name": agent, "description": words, "version": __version__,
        "supportedInterfaces": [
            {"url": f"{address}/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
            {"url": f"{address}/v1", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}],
        "capabilities": {"streaming": True, "pushNotifications": pushes, "extendedAgentCard": True},
        "securitySchemes": {"bearer": {"httpAuthSecurityScheme": {
            "scheme": "Bearer", "description": "a key of the gate, or an access token"}}},
        "securityRequirements": [{"schemes": {"bearer": {"list": []}}}],
        "defaultInputModes": takes, "defaultOutputModes": gives,
        "skills": [{"id": agent, "name": agent, "description": skill, "tags": ["asyncgate"], "inputModes": takes,
                    "outputModes": gives}]}
