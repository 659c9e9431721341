"""The interfaces for clients: REST, MCP, OpenAPI, the lease protocol, and the HTTP server under them."""
