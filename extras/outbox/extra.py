"""What the outbox of applications joins to the gate: a command, and the courier of what is handed over in SQL."""

from asyncgate.extras.outbox import courier
from asyncgate.parts.extras import Extra

EXTRA = Extra(commands={"relay": "asyncgate.extras.outbox.command"}, extensions=courier.make_couriers,
              duties=courier.find_duties, families=courier.HANDOVER_FAMILIES)
