"""The gate as a ledger, which `asyncgate ledger` serves."""
