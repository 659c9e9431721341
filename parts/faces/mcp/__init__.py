"""MCP at /mcp: the façade, its tools, tasks, resources and prompts."""
