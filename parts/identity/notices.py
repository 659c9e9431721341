"""Notices to a tenant's admins about its credentials and limits, in their inboxes (spec 21.9.1, 21.9.2).

A notice is a system.anomaly receipt; list_receipts and bootstrap show it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from asyncgate import ANOMALY, Engine, Work, receipt_key
from asyncgate.parts.model import errors, queries, stored, stored_oauth, wire
from asyncgate.parts.model.screening import REST_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


log = logging.getLogger("asyncgate")

R = TypeVar("R", bound=Struct)

FIRST_ROWS, MOST_ROWS, MOST_PAGE_BYTES = 8, 1000, 4 * 2**20     # that are read together: a row may have megabytes
JUDGED_SECONDS = 0.005      # at rows, without a rest for others
MOST_ADMINS = 20        # how many admins of a tenant get a notice; each notice is one receipt
ADVICE = {
    "key_revoked": "Find out how it was used: list_audit with its key_id.",
    "credentials_rotated": "Hand out the new keys; the gate refuses the old ones.",
    "rate_limit_tightened": "Find out what sends so many calls, then ask the operator.",
    "unusual_address": "If nobody of yours uses the key from there, call revoke_key, then list_audit with its key_id.",
    "refresh_replay": "A refresh token was in two hands, so its session has ended: list_audit shows its session_id.",
    "code_replay": "An authorization code was in two hands, so its session has ended: list_audit shows its session_id.",
    "revoked_token_used": "If that was nobody of yours, find out who has the token: list_audit.",
    "budget_warning": "See with get_budgets what is left; set_budget raises it. At 100 % no task can be created.",
    "budget_reached": "No task can be created until the month ends, or set_budget raises the budget.",
    "token_revoked": "Find out what was done with it: list_audit.",
    "data_erased": "Look after what is outside of the gate's reach: erase_principal with plan lists it.",
    "webhook_parked": "Repair the receiver, then change_webhook with active: true; events since then are delivered.",
    "webhook_gone": "The receiver answered 410: remove_webhook, or change_webhook with active: true.",
    "delivery_parked": "See what was given up: list_deliveries with state: parked; replay_deliveries tries it again.",
    "cross_tenant_attempt": "Find out how the key was used: list_audit with its key_id.",
}


async def list_admins(engine: Engine, tenant_id: str) -> list[wire.Principal]:
    """Return the principals of the tenant's valid admin keys, and its admins who have signed in."""
    admins: dict[tuple[str, str], wire.Principal] = {}
    now = engine.backend.now()
    async for key in read_rows(engine, tenant_id, stored.Key):
        if key.role == "admin" and key.revoked_at is None and (key.expires_at is None or key.expires_at > now):
            admins[key.principal_kind, key.principal_id] = wire.Principal(key.principal_kind, key.principal_id)
        if len(admins) >= MOST_ADMINS:
            break
    async for user in read_rows(engine, engine.settings.default_tenant_id, stored_oauth.User):
        if len(admins) >= MOST_ADMINS:
            break
        if (user.role, user.tenant, user.disabled_at) == ("admin", tenant_id, None) and user.last_seen_at is not None:
            admins[user.principal_kind, user.principal_id] = user.principal
    return list(admins.values())


async def read_rows(engine: Engine, tenant_id: str, kind: type[R], after: str = "") -> AsyncIterator[R]:
    """Read all rows of a kind behind a place, in pages of so many bytes; others have a turn between two looks."""
    limit = FIRST_ROWS
    while page := await engine.backend.page(tenant_id, queries.Rows(kind, after, limit)):
        begun = time.monotonic()
        for row in page:
            yield row
            if time.monotonic() - begun > JUDGED_SECONDS:
                await asyncio.sleep(REST_SECONDS)
                begun = time.monotonic()
        after = stored.export_key(page[-1])
        size = sum(len(value) for row in page for value in astuple(row) if isinstance(value, str))
        limit = max(1, min(MOST_ROWS, MOST_PAGE_BYTES * len(page) // max(size, 1)))     # if they are like those so far


def tell_admins(engine: Engine, work: Work, whom: list[wire.Principal], kind: str, once: str | None = None,
                **details: Any) -> None:
    """Write a notice to each admin; each notice is one receipt, and of those about the same `once` there is one."""
    facts = {name: value for name, value in details.items() if value is not None}
    body = {"kind": kind, "details": facts, "recommended_action": ADVICE[kind]}
    for admin in whom:      # each with a mark of its own: receipts with equal marks are one receipt
        mark = f"{kind} {work.new_id()}" if once is None else mark_once(kind, once, admin)
        engine.write_receipt(work, ANOMALY, None, body, to=admin, discriminator=mark)


def mark_once(kind: str, once: str, admin: wire.Principal) -> str:
    """Return the mark of a notice that an admin gets once, whatever process writes it."""
    return f"{kind} {once} {admin}"


async def write_notice(engine: Engine, tenant_id: str, kind: str, once: str | None = None, **details: Any) -> bool:
    """Write a notice in a transaction of its own; return False if that failed, which the log tells."""
    try:
        if whom := await list_admins(engine, tenant_id):
            stated = [] if once is None else [
                ("", receipt_key(ANOMALY, "", engine.gate, None, (), mark_once(kind, once, admin))) for admin in whom]
            await engine.change(tenant_id, lambda work: tell_admins(engine, work, whom, kind, once, **details),
                                stated=stated)
    except errors.GateError:
        log.exception("the admins of tenant %s could not be notified of %s", tenant_id, kind)
        return False
    return True
