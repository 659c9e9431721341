"""`asyncgate bench`: loads, servers to measure, and what goes on beside a measurement."""
