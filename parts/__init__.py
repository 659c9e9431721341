"""The internals of the gate: model, identity, receipts, faces, process and upkeep."""
