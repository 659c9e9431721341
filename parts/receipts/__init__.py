"""What happens to receipts: sinks, outbox, seals, archive, reconciling, rebuilding, the gate as a ledger."""
