"""What types join to the gate."""

from starlette.routing import Route

from asyncgate import Engine
from asyncgate.extras.types import rules, served, tools
from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.identity.guard import Guard


def join(gate: Opening) -> list[Route]:
    """Let a gate warn of types that nobody serves, and offer those that are declared as tools; there are no routes."""
    def begin(engine: Engine, guard: Guard) -> None:
        engine.extend(served.TypeWarnings(engine))
        gate.typed_tools = tools.DeclaredTools(engine, gate.operations)
    gate.when_opened.append(begin)
    return []


EXTRA = Extra(operations=rules.OPERATIONS, extensions=lambda engine: [rules.Typed(engine)], routes=join)
