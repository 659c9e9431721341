"""What the gate is made of and a user never opens: words, identity, receipts, faces, a process and its upkeep."""
