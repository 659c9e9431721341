"""Other durable queues, which `asyncgate bench --beside` measures beside a gate: a small driver for each of them."""
