"""What the world speaks to: REST, MCP, OpenAPI, the lease protocol, and the HTTP server under them."""
