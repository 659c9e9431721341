"""How long a test waits for what must come."""

from typing import Any

PATIENCE_SECONDS = 120.0        # a machine may be busy; only a test that fails waits that long


def patient_mcp_client() -> Any:
    """Return the client class of the official SDK, which asks a gate that answers late for its era all the same.

    It would give up after ten seconds and take the gate for one of an older era, without handles and subscriptions.
    """
    from mcp.client import Client, session
    session.DISCOVER_TIMEOUT_SECONDS = PATIENCE_SECONDS
    return Client
