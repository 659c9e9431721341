"""Programs that reach the gate over the wire: Python client, worker, scheduler, benchmark and web pages."""
