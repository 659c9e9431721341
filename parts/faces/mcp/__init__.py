"""MCP at /mcp: the façade, its tools and tasks, resources and prompts."""
