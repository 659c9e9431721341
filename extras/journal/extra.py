"""What the step journal joins to the gate."""

from asyncgate.extras import journal
from asyncgate.parts.extras import Extra

EXTRA = Extra(operations=journal.OPERATIONS)
