"""What export and erasure join to the gate."""

from asyncgate.extras.privacy import erasure, export
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

ERASURES_SECONDS = 600.0        # between looks for erasures that were interrupted, or had to wait for other processes
EXTRA = Extra(operations=[*export.OPERATIONS, *erasure.OPERATIONS],
              duties=lambda engine: {"erasures": Duty(ERASURES_SECONDS, erasure.ErasureFinisher(engine).run)})
