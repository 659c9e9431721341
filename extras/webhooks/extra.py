"""What webhooks join to the gate."""

from asyncgate.extras.webhooks import Webhooks, admin, of_tasks
from asyncgate.extras.webhooks.pruning import DeliveryPruner
from asyncgate.parts.extras import Extra
from asyncgate.parts.process.duties import Duty

EXTRA = Extra(operations=[*admin.OPERATIONS, *of_tasks.OPERATIONS], beside=Webhooks,
              duties=lambda engine: {"deliveries": Duty(3600.0, DeliveryPruner(engine).run)})
