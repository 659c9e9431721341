"""Tenants that `asyncgate bench` makes for itself, each with a key of its own."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from asyncgate.commands.bench.wire import Failed, LoadGate

NOT_ALONE = "this credential may create no tenants: --tenants needs the shared token, or a key of the system"


async def make_tenant(gate: LoadGate, name: str, tier: str | None = None) -> str:
    """Create a tenant; return a key of its admin."""
    async with gate.connected(1) as [wire]:
        tenant: dict[str, Any] = {"name": name} | ({"tier": tier} if tier else {})
        made = await wire.ask(gate.post(b"/v1/tenants", msgspec.json.encode(tenant)))
        fields = {"name": name, "principal_kind": "agent", "principal_id": name, "role": "admin",
                  "tenant": msgspec.json.decode(made)["tenant"]}
        answer = await wire.ask(gate.post(b"/v1/keys", msgspec.json.encode(fields)))
    key: str = msgspec.json.decode(answer)["api_key"]
    return key


async def make_tenants(gate: LoadGate, number: int) -> LoadGate:
    """Return the same gate for clients that go from one to the next of so many new tenants, step by step."""
    prefix = f"bench-{uuid.uuid4().hex[:8]}"
    spread = LoadGate(gate.url, gate.token, ", ".join(filter(None, [gate.name, f"{number} tenants"])))
    spread.written = gate.written
    try:
        spread.tenants = [LoadGate(gate.url, await make_tenant(gate, f"{prefix}-{at + 1}")) for at in range(number)]
        for tenant in spread.tenants:       # a key is slow at its first use (Argon2), which is not what is measured
            async with tenant.connected(1) as [wire]:
                await wire.ask(tenant.get(b"/v1/obligations/open"))
    except Failed as refusal:
        raise (Failed(NOT_ALONE, 403) if refusal.status == 403 else refusal) from None
    return spread
