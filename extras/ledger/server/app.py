"""The app of `asyncgate ledger`: a gate that serves the operations of a ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.routing import Route

from asyncgate import CORE_OPERATIONS, Caller, Operation, __version__
from asyncgate.backends import Backend
from asyncgate.extras.ledger.server import operations as ledger
from asyncgate.extras.ledger.server import wire_ledger
from asyncgate.parts import service
from asyncgate.parts.app import Gate, serve_forever
from asyncgate.parts.faces.http import read_body, read_claimed_tenants
from asyncgate.parts.faces.rest import Door, Endpoint
from asyncgate.parts.identity import admin, incidents
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.connection import Receive, Scope
from asyncgate.parts.model.screening import mark_body
from asyncgate.parts.model.settings import ConsoleSettings, Settings
from asyncgate.parts.operations import table_of
from asyncgate.parts.receipts.admin import SEALING

if TYPE_CHECKING:
    from asyncgate.parts.faces.mcp.facade import Facade

LEDGER_OPERATIONS = table_of(*ledger.SURFACE, CORE_OPERATIONS["health"], *admin.OPERATIONS, *incidents.OPERATIONS,
                             *SEALING, *service.OPERATIONS)


class ReceiptEndpoint(Endpoint):
    """`/v1/receipts` of a ledger; it stores receipts byte for byte as they arrive."""

    async def _ask(self, op: Operation, caller: Caller, scope: Scope, receive: Receive) -> wire.Ask:
        if op is not ledger.STORE:
            return await super()._ask(op, caller, scope, receive)
        body = (await read_body(scope, receive, self.gate.settings)).strip()
        try:
            body, _ = await mark_body(body, self.gate.settings.max_request_values, most_depth=ledger.STORED_DEPTH)
            if body[:1] == b"[":
                return wire_ledger.StoreReceipts(receipts=ledger.list_of(body))
            if (many := msgspec.json.decode(body, type=dict[str, Raw])).keys() == {"receipts"}:
                return wire_ledger.StoreReceipts(receipts=ledger.list_of(many["receipts"]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            raise errors.InvalidRequest(f"store_receipt: {wrong}") from None
        for named in read_claimed_tenants({}, scope["headers"]):
            self.gate.engine.check_tenant(caller, named)
        return wire_ledger.StoreReceipts(receipts=[Raw(body)], alone=True)


def ledger_facade() -> type[Facade]:
    """Import the MCP façade with the `memorygate.*` tools (spec 20.5, 20.13)."""
    from asyncgate.extras.ledger.server.mcp import LedgerFacade
    return LedgerFacade


class LedgerGate(Gate):
    """A gate that serves the operations of a ledger and its administration."""

    def __init__(self, settings: Settings, backend: Backend | None = None,
                 operations: dict[str, Operation] = LEDGER_OPERATIONS) -> None:
        limiting = settings.security.rate_limiting
        if limiting.enabled is None:        # its callers are gates, which send what they must
            security = replace(settings.security, rate_limiting=replace(limiting, enabled=False))
            settings = replace(settings, security=security)
        super().__init__(settings, backend, operations)

    def _endpoints(self) -> dict[str, Endpoint]:
        endpoints = super()._endpoints()
        receipts = endpoints["/v1/receipts"]
        endpoints["/v1/receipts"] = ReceiptEndpoint(self, receipts.operations, "/v1/receipts")
        return endpoints

    def _routes(self) -> list[Any]:
        self.mcp = Door(self, ledger.TOOLS, __version__, ledger_facade)
        return [Route(path, self.mcp) for path in ("/mcp", "/mcp/u")]


def serve_ledger(settings: Settings) -> int:
    """Serve a ledger until a signal comes; return the exit status."""
    settings = replace(settings, receipt_mode="standalone", console=ConsoleSettings())      # a ledger has no console
    return serve_forever(settings, kind=LedgerGate)
