"""What is wrong is told beside the obligations: PH.6.2's readers forbid every other member of that reply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncgate.parts.model.settings import LedgerSettings

pytestmark = pytest.mark.anyio
WHO = {"principal_kind": "agent", "principal_id": "ada"}


@pytest.mark.parametrize("tongue", ["rest", "mcp", "bare"])
async def test_an_outage_of_the_ledger_is_told_in_a_header_of_the_obligations(serve: Any, tongue: str) -> None:
    """PH.6.2: `extra: forbid`; over MCP without a handshake the header too, over standard MCP _meta."""
    served = await serve(receipt_mode="memorygate_integrated", ledger=LedgerSettings(url="http://127.0.0.1:9"))
    if tongue == "rest":
        answer = await served.call("GET", "/v1/obligations/open?principal_kind=agent&principal_id=ada")
        reply = answer.json()
    else:
        ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
               "params": {"name": "asyncgate.list_open_obligations", "arguments": WHO}}
        headers = [("content-type", "application/json")] + [
            ("mcp-protocol-version", "2025-11-25"), ("accept", "application/json, text/event-stream")] * (
            tongue == "mcp")
        answer = await served.call("POST", "/mcp", ask, headers=headers)
        result = answer.json()["result"]
        reply = msgspec.json.decode(result["content"][0]["text"])
        assert tongue == "bare" or "cannot be read" in result["_meta"]["asyncgate/warnings"][0]

    assert set(reply) == {"server", "relationship", "open_obligations", "cursor"}
    assert tongue == "mcp" or "cannot be read" in answer.headers["x-asyncgate-warning"]
