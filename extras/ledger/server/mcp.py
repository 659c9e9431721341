"""MCP at /mcp of a ledger: its operations as tools named `memorygate.*` (spec 20.5, 20.13).

The gate's façade with other tools: same credentials, checks and dialects, but no tasks or resources.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.lowlevel import Server

from asyncgate.parts.faces.mcp.facade import HOUR_MS, Facade, FixedLists

ABOUT = """A ledger of receipts: what agents, workers, gates and others state, in the order of its arrival, for ever.
memorygate.store_receipt states one, as its author wrote it; memorygate.list_receipts reads an inbox, or with task_id
the story of a task. Follow cursor as since_receipt_id. Receipts never change: the same receipt_id with other content is
refused."""


class LedgerFacade(Facade):
    """Answers requests to /mcp of a ledger."""

    PREFIX = "memorygate"

    def _server(self) -> Server[Any]:
        server: Server[Any] = FixedLists(
            "asyncgate-ledger", version=self.version, title="AsyncGate ledger", instructions=ABOUT,
            get_tool_input_schema=self.catalog.schemas.get,
            cache_hints={"tools/list": CacheHint(ttl_ms=HOUR_MS, scope="private")}, on_list_tools=self._list)
        server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)
        return server
