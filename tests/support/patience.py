"""How long a test waits for what must come."""

PATIENCE_SECONDS = 120.0        # a machine may be busy; only a test that fails waits that long
