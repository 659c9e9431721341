"""What the examination joins to the gate."""

from asyncgate.extras.doctor import running
from asyncgate.parts.extras import Extra

EXTRA = Extra(operations=running.OPERATIONS, commands={"doctor": "asyncgate.extras.doctor.command"})
