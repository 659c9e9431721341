"""What families join to the gate."""

from asyncgate import Operation
from asyncgate.extras.families import rules
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

EXTRA = Extra(
    extensions=lambda engine: [rules.Families(engine)], operations=[
        Operation(rules.wait_tasks, "POST /v1/tasks/wait", "a w A s", "tasks:read tasks:lease", "R")],
    duties=lambda engine: {"cascades": Duty(rules.RESUME_SECONDS, lambda: rules.resume_cascades(engine))})
