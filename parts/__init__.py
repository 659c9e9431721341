"""What the gate is made of and nobody must read to understand it; only MCP, at its first use, imports the gate."""
