"""What output joins to the gate."""

from starlette.routing import Route

from asyncgate.extras.output import rules, stream
from asyncgate.extras.output.pruning import OutputPruner
from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.process.duties import Duty


def join_stream(gate: Opening) -> list[Route]:
    """Let the endpoint of the output also answer with a stream; there are no further routes."""
    path = stream.PATH.replace("{task_id}", "{}")
    if path in gate.endpoints:
        gate.endpoints[path] = stream.OutputStream(gate, gate.endpoints[path].operations, stream.PATH)
    return []


EXTRA = Extra(operations=rules.OPERATIONS, extensions=lambda engine: [rules.Outputs(engine)], routes=join_stream,
              duties=lambda engine: {"output": Duty(3600.0, OutputPruner(engine).run)})
