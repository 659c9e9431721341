"""What the console joins to the gate: its pages. Who may use it is decided with credentials, in parts/identity."""

from asyncgate.extras import console
from asyncgate.parts.extras import Extra

EXTRA = Extra(routes=console.make_routes)
