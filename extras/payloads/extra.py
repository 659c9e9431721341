"""What payloads join: a command; the gate itself knows nothing of stores."""

from asyncgate.parts.extras import Extra

EXTRA = Extra(commands={"clean-payloads": "asyncgate.extras.payloads.command"})
