"""One process of the gate: options, logs, jobs, outgoing calls, waiting calls, presence; imports only the model."""
