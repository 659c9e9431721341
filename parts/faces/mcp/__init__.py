"""MCP at /mcp: the façade, its tools, its tasks, and what hosts put before a model."""
