"""What the outbox of applications joins to the gate: a command."""

from asyncgate.parts.extras import Extra

EXTRA = Extra(commands={"relay": "asyncgate.extras.outbox.command"})
