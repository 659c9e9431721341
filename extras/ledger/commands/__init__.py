"""The commands of a ledger."""
