"""What the scheduler joins to the gate: a program of its own."""

from asyncgate.parts.extras import Extra

EXTRA = Extra(commands={"scheduler": "asyncgate.extras.scheduler.command"})
