"""What the gate is made of and nobody must read to understand it; nothing here imports the gate."""
