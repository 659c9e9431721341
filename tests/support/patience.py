"""How long a test waits for what must come."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 120.0        # a machine may be busy; only a test that fails waits that long


def poll(look: Callable[[], Any]) -> Any:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (seen := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return seen


def patient_mcp_client() -> Any:
    """Return the client class of the official SDK, which asks a gate that answers late for its era all the same.

    It would give up after ten seconds and take the gate for one of an older era, without handles and subscriptions.
    """
    from mcp.client import Client, session
    session.DISCOVER_TIMEOUT_SECONDS = PATIENCE_SECONDS
    return Client
