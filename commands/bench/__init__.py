"""`asyncgate bench`: loads, servers to measure, and background load during a measurement."""
