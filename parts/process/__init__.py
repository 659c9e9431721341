"""One process of the gate: options, logs, loops, outgoing calls, waiting calls, presence; imports only the model."""
