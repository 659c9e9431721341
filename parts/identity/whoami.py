"""Who somebody is to this gate: what a worker or an agent asks that was given a credential and nothing else."""

from __future__ import annotations

from msgspec.structs import astuple

from asyncgate import OPERATIONS as EVERY
from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model.wire import WhoAmI, You


async def whoami(engine: Engine, caller: Caller, ask: WhoAmI) -> You:
    """Tell who the credential stands for, and what it may do.

    With bound: false it stands for everybody: each request says who makes it (principal_id, worker_id).
    """
    kind, id, instance_id = astuple(caller.principal) if caller.bound else (None, None, None)
    return You(
        caller.tenant_id, caller.bound, caller.role, sorted(caller.scopes),
        sorted(op.name for op in EVERY.values() if op.fits(caller)), kind, id, instance_id, caller.key_id,
        names(caller.capabilities), names(caller.task_types))


def names(limited: frozenset[str] | None) -> list[str] | None:
    """Return what a key is limited to; None is no limit."""
    return None if limited is None else sorted(limited)


OPERATIONS = [Operation(whoami, "GET /v1/whoami", "a w A", "", "B")]
