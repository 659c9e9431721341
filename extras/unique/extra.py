"""What unique work joins to the gate; how long a task holds its key is in parts/model/unique.py."""

from asyncgate.extras.unique.pruning import PRUNE_SECONDS, KeyPruner
from asyncgate.extras.unique.rules import UniqueWork
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

EXTRA = Extra(extensions=lambda engine: [UniqueWork(engine)],
              duties=lambda engine: {"unique": Duty(PRUNE_SECONDS, KeyPruner(engine).run)})
