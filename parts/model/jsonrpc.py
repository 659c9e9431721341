"""Error codes of JSON-RPC and names of MCP tools, for both ends of the wire."""

from __future__ import annotations

TOOL_PREFIX = "asyncgate"
DOTTED, UNDERSCORED, UNPREFIXED = ".", "_", ""      # the last is for names without the prefix
# HTTP status to JSON-RPC code; codes of our own lie in the range that MCP leaves to servers.
CODES = {400: -32602, 401: -32001, 403: -32003, 404: -32004, 405: -32601, 408: -32008, 409: -32009, 413: -32602,
         415: -32602, 421: -32003, 429: -32010, 503: -32013}
PARSE_ERROR, INVALID_MESSAGE, UNKNOWN_METHOD, INTERNAL_ERROR = -32700, -32600, -32601, -32603


def spell_tool_name(operation: str, prefix: str = TOOL_PREFIX) -> tuple[str, str]:
    """Return the two spellings of a tool's name, dotted first; both are always accepted."""
    return f"{prefix}{DOTTED}{operation}", f"{prefix}{UNDERSCORED}{operation}"
