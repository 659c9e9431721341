"""What the watch over long waits joins to the gate."""

from asyncgate.extras.starvation import rules
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

EXTRA = Extra(duties=lambda engine: {"starvation": Duty(rules.STARVATION_SECONDS, rules.StarvationWatch(engine).run)})
