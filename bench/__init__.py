"""What measures a gate beyond its own commands: attacks, a slow disk, other queues. It is not in the wheel."""
