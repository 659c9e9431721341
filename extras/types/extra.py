"""What types join to the gate."""

from starlette.routing import Route

from asyncgate import Engine
from asyncgate.extras.types import described, rules, served, tools
from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.faces.rest import Endpoint
from asyncgate.parts.identity.guard import Guard


def join(gate: Opening) -> list[Route]:
    """Let a gate warn of types that nobody serves, and offer those that are declared as tools and over REST."""
    def begin(engine: Engine, guard: Guard) -> None:
        engine.extend(served.TypeWarnings(engine))
        gate.typed_tools = tools.DeclaredTools(engine, gate.operations)
    gate.when_opened.append(begin)
    if (run := gate.operations.get("run_task")) is not None:
        path, listed = described.DOCUMENT_PATH, {"GET": gate.operations["list_types"]}
        gate.endpoints[path] = described.TypesDocument(gate, listed, path)
        path, run = described.RUN_PATH, described.take_from_path(run)
        gate.endpoints[path.replace("{type}", "{}")] = Endpoint(gate, {"POST": run}, path)
    return []


EXTRA = Extra(operations=rules.OPERATIONS, extensions=lambda engine: [rules.Typed(engine)], routes=join)
