"""What limits join to the gate; what claims obey is in parts/model/limiting.py."""

from asyncgate.extras.limits import rules
from asyncgate.parts.extras import Extra

EXTRA = Extra(operations=rules.OPERATIONS, extensions=lambda engine: [rules.RoomCalls(engine)])
