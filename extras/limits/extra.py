"""What limits join to the gate; what claims obey is in parts/model/limiting.py."""

from asyncgate.extras.limits import counted, rules
from asyncgate.extras.limits.pruning import PRUNE_SECONDS, TurnPruner
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

EXTRA = Extra(operations=rules.OPERATIONS, beside=counted.watch, families=counted.LIMIT_FAMILIES,
              extensions=lambda engine: [rules.RoomCalls(engine)],
              duties=lambda engine: {"turns": Duty(PRUNE_SECONDS, TurnPruner(engine).run)})
