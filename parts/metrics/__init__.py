"""Numbers for Prometheus: counted beside the work, shown at /metrics."""
