"""The operations of webhooks: endpoints, their secrets, what became of deliveries, and doing them again.

An admin looks after the endpoints of its own tenant, the operator after those of any.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from asyncgate import RECEIPT_TYPES, Caller, Engine, Needs, Operation, Work, forbid
from asyncgate.extras.webhooks import Webhooks as Sender
from asyncgate.extras.webhooks import events, wire_webhooks
from asyncgate.extras.webhooks.sources import find_position
from asyncgate.parts.identity import admin
from asyncgate.parts.model import errors, queries, stored, stored_webhooks, wire
from asyncgate.parts.model.ids import first_id
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.model.walking import walk, walk_rows

AT_ONCE = 200       # deliveries that one transaction changes
T = TypeVar("T")
RowKeys = Iterable[tuple[type[Any], tuple[str, ...]]]


async def create_webhook(engine: Engine, caller: Caller,
                         ask: wire_webhooks.CreateWebhook) -> wire_webhooks.CreatedWebhook:
    """Add an endpoint to which events of the tenant are posted from now on; only this answer shows its secret.

    Each request is signed as Standard Webhooks say, and its webhook-id is the id of the event, the same at each
    attempt.  A success is any 2xx.  Refused above webhooks.max_per_tenant.
    """
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)
    check_endpoint(engine, ask.endpoint, ask.types)
    check_principals(ask.types, ask.principals)
    if ask.all_tenants:
        check_all_tenants(engine, caller, tenant_id, ask.types)
    newest = await find_beginning(engine, tenant_id, ask.types, ask.all_tenants)
    most = engine.settings.webhooks.max_per_tenant

    def create(work: Work) -> stored_webhooks.Webhook:
        head = work.find_record(stored_webhooks.WebhookHead) or stored_webhooks.WebhookHead(0)
        if head.number >= most:
            raise errors.QuotaExceeded(
                f"this tenant has {head.number} endpoints for webhooks, and the limit is {most}; "
                "remove_webhook removes one", quota="webhooks", limit=most)
        new = stored_webhooks.Webhook(
            work.new_id(), ask.endpoint, ask.description or "", encode(ask.types), encode(ask.principals),
            secrets.token_hex(16), None, None, newest, "active", None, work.now, str(caller.principal), work.now,
            reached="{}" if ask.all_tenants else None)
        work.keep_record(replace(head, number=head.number + 1))
        work.keep_record(new)
        admin.audit_change(engine, work, "webhook_created", "warning", caller, webhook_id=new.webhook_id,
                           endpoint=new.url,
                           types=sorted(ask.types), **({"all_tenants": True} if ask.all_tenants else {}))
        return new
    new = await change_rows(engine, caller, tenant_id, [(stored_webhooks.WebhookHead, ())], create)
    look_soon(engine, tenant_id)
    return wire_webhooks.CreatedWebhook(secret_of(engine, tenant_id, new), as_webhook_record(tenant_id, new))


async def list_webhooks(engine: Engine, caller: Caller, ask: wire_webhooks.ListWebhooks) -> wire_webhooks.Webhooks:
    """List the endpoints of the tenant, without their secrets: what they are told, whether they fail, and why."""
    tenant_id = await admin.target_tenant(engine, caller, ask.tenant)
    return wire_webhooks.Webhooks([
        as_webhook_record(tenant_id, row) async for row in walk_rows(engine.backend, tenant_id, queries.OpenWebhooks())
        if row.state != "removing" and not row.task_id])


async def change_webhook(engine: Engine, caller: Caller,
                         ask: wire_webhooks.ChangeWebhook) -> wire_webhooks.WebhookRecord:
    """Change an endpoint; what is absent stays as it is.

    While it is not active nothing is delivered, and nothing is lost: with active: true it goes on where it stopped, or
    with skip_missed at what happens from now on.
    """
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)
    check_endpoint(engine, ask.endpoint, ask.types or frozenset())
    there = await find_webhook(engine, tenant_id, ask.webhook_id)
    types = events.read_names(there.types) if ask.types is None else ask.types
    check_principals(types, events.read_names(there.principals) if ask.principals is None else ask.principals)
    if there.reached is not None:
        check_all_tenants(engine, caller, tenant_id, types)
    newest = await find_beginning(engine, tenant_id, types, there.reached is not None)

    def change(work: Work) -> stored_webhooks.Webhook:
        if (old := require_webhook(work, ask.webhook_id)).state == "ended":
            raise errors.InvalidTransition(f"webhook {ask.webhook_id} has ended with its task; create_task_webhook "
                                           "makes another one")
        new = apply_changes(old, ask, newest, str(caller.principal))
        if old.headers is not None and new.url != old.url:      # Security: an admin is not shown them, nor is its host
            raise errors.InvalidTransition(f"webhook {ask.webhook_id} has headers that only its receiver is to see, so "
                                           "it keeps its endpoint; create_task_webhook makes another one")
        if new != old:
            work.keep_record(replace(new, updated_at=work.now))
            changed = [name for name in stored_webhooks.Webhook.__struct_fields__ if getattr(old, name)
                       != getattr(new, name)]
            admin.audit_change(engine, work, "webhook_changed", "warning", caller, webhook_id=old.webhook_id,
                               changed=changed, **({"endpoint": new.url} if new.url != old.url else {}))
        return work.find_record(stored_webhooks.Webhook, old.webhook_id) or new
    new = await change_rows(engine, caller, tenant_id, [(stored_webhooks.Webhook, (ask.webhook_id,))], change)
    if ask.skip_missed:
        await change_deliveries(engine, caller, tenant_id, ask.webhook_id, "waiting", park_missed)
    look_soon(engine, tenant_id)
    return as_webhook_record(tenant_id, new)


async def remove_webhook(engine: Engine, caller: Caller, ask: wire_webhooks.RemoveWebhook) -> wire.Ok:
    """Remove an endpoint, its secrets and the list of its deliveries; a request on its way may still arrive."""
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)

    def stop(work: Work) -> None:
        begin_removal(work, old := require_webhook(work, ask.webhook_id))
        admin.audit_change(engine, work, "webhook_removed", "warning", caller, webhook_id=old.webhook_id,
                           endpoint=old.url,
                           reason=ask.reason)
    # Order: from here on nothing is delivered; upkeep removes the rest if this process dies.
    await change_rows(engine, caller, tenant_id, keys_of(ask.webhook_id), stop)
    await finish_removal(engine, tenant_id, ask.webhook_id)
    look_soon(engine, tenant_id)
    return wire.Ok(True)


async def rotate_webhook_secret(engine: Engine, caller: Caller,
                                ask: wire_webhooks.RotateWebhookSecret) -> wire_webhooks.CreatedWebhook:
    """Replace the signing secret of an endpoint; until the overlap is over, each request is signed with both.

    Only this answer shows the new secret.  The three secrets before it sign, each until its own overlap is over;
    overlap_seconds 0 withdraws all of them at once.
    """
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)

    def rotate(work: Work) -> stored_webhooks.Webhook:
        old = require_webhook(work, ask.webhook_id)
        secret, overlaps = engine.backend.secret, ask.overlap_seconds > 0
        earlier = events.find_previous(secret, tenant_id, old, work.now)[:events.MOST_EARLIER] if overlaps else []
        new = replace(old, secret_id=events.make_secret_id(secret, old.webhook_id, earlier),
                      previous_id=old.secret_id if overlaps else None,
                      previous_until=work.now + ask.overlap_seconds if overlaps else None, updated_at=work.now)
        work.keep_record(new)
        admin.audit_change(engine, work, "webhook_secret_rotated", "warning", caller, webhook_id=old.webhook_id,
                           overlap_seconds=ask.overlap_seconds)
        return new
    new = await change_rows(engine, caller, tenant_id, [(stored_webhooks.Webhook, (ask.webhook_id,))], rotate)
    look_soon(engine, tenant_id)
    return wire_webhooks.CreatedWebhook(secret_of(engine, tenant_id, new), as_webhook_record(tenant_id, new))


async def test_webhook(engine: Engine, caller: Caller, ask: wire_webhooks.TestWebhook) -> wire_webhooks.TestedWebhook:
    """Post an event of the type webhook.test to an endpoint now, once, and tell what became of it.

    It works for an endpoint that is not active, too; a success does not make it active.
    """
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)
    webhook = await find_webhook(engine, tenant_id, ask.webhook_id)
    now = engine.backend.now()
    event_id, body = engine.backend.ids.new(now), events.render_test(tenant_id, webhook.webhook_id, now)
    headers = events.sign(events.secrets_of(engine.backend.secret, tenant_id, webhook, now), event_id, now, body)
    sender = engine.find_extension(Sender)
    post = (sender or Sender(engine)).open_post()
    try:
        attempt = await post.send(webhook.url, headers, body, tenant_id)
    finally:
        if sender is None:
            await post.close()
    return wire_webhooks.TestedWebhook(attempt.reason is None, event_id, attempt.status, attempt.reason,
                                       attempt.took_ms)


test_webhook.__test__ = False       # type: ignore[attr-defined]  # for pytest: it is not a test


async def list_deliveries(engine: Engine, caller: Caller,
                          ask: wire_webhooks.ListDeliveries) -> wire_webhooks.Deliveries:
    """List what became of the events of an endpoint, the newest event first: attempts, answers, the next attempt.

    A delivery is listed for webhooks.log_days after its last attempt.
    """
    tenant_id = await admin.target_tenant(engine, caller, ask.tenant)
    webhook = await find_webhook(engine, tenant_id, ask.webhook_id)
    mark, limit = ("deliveries", tenant_id, webhook.webhook_id, ask.state), engine.limit_page(ask.limit)
    after = engine.open_cursor(caller, ask.cursor, *mark)
    rows = await engine.backend.page(
        tenant_id, queries.DeliveryFilter(webhook.webhook_id, ask.state, after, limit + 1, newest=True))
    ends = engine.seal_cursors(caller, [row.delivery_id for row in rows], limit, ask.cursor, *mark)
    return wire_webhooks.Deliveries([wire_webhooks.DeliveryRecord(
        row.webhook_id, row.delivery_id, row.type, row.state, row.tries, to_utc(row.first_at), row.task_id or None,
        to_utc_or_none(row.last_at), to_utc_or_none(row.next_at), row.http_status, row.reason, row.took_ms,
        row.of_tenant) for row in rows[:limit]], *ends)


async def replay_deliveries(engine: Engine, caller: Caller,
                            ask: wire_webhooks.ReplayDeliveries) -> wire_webhooks.Replayed:
    """Deliver events again, under the ids that they had: those named, all since a time, or all that are parked.

    It also lets an endpoint that fails be tried again at once.
    """
    tenant_id = await tenant_for_webhooks(engine, caller, ask.tenant)
    if ask.delivery_ids is not None and ask.since is not None:
        raise errors.InvalidRequest("name delivery_ids or since, not both")
    number = 0
    if ask.delivery_ids is not None:
        number = await replay_named(engine, caller, tenant_id, ask.webhook_id, sorted(ask.delivery_ids))
    elif (await find_webhook(engine, tenant_id, ask.webhook_id)).reached is not None and ask.since is not None:
        raise errors.InvalidRequest("since: an endpoint for all tenants delivers again only what delivery_ids name, as "
                                    "list_deliveries shows them; get_usage with all_tenants has the rest")
    elif ask.since is None:
        number = await change_deliveries(engine, caller, tenant_id, ask.webhook_id, "parked", make_due)

    def close_circuit(work: Work) -> None:
        old = require_active(work, ask.webhook_id)
        place = first_id(ask.since.timestamp()) if ask.since else old.position
        work.keep_record(replace(old, position=min(old.position, place), failing_since=None, reason=None))
        admin.audit_change(engine, work, "webhook_replayed", "info", caller, webhook_id=old.webhook_id, number=number,
                           since=ask.since)
    await change_rows(engine, caller, tenant_id, [(stored_webhooks.Webhook, (ask.webhook_id,))], close_circuit)
    look_soon(engine, tenant_id)
    return wire_webhooks.Replayed(number if ask.since is None else None, ask.since)


# Deliveries.


async def replay_named(engine: Engine, caller: Caller, tenant_id: str, webhook_id: str, ids: list[str]) -> int:
    """Let some events be delivered again; raises InvalidRequest if one of them is not listed."""
    def replay(work: Work) -> int:
        require_active(work, webhook_id)
        for id in ids:
            if (row := work.find_record(stored_webhooks.WebhookDelivery, webhook_id, id)) is None:
                raise errors.InvalidRequest(f"delivery_ids: {id} is not among the deliveries of this endpoint; "
                                            "list_deliveries shows them, and since replays older ones")
            work.keep_record(make_due(row, work.now))
        return len(ids)
    keys: RowKeys = [(stored_webhooks.Webhook, (webhook_id,)),
                     *((stored_webhooks.WebhookDelivery, (webhook_id, id)) for id in ids)]
    return await change_rows(engine, caller, tenant_id, keys, replay)


async def change_deliveries(engine: Engine, caller: Caller, tenant_id: str, webhook_id: str, state: str,
                            change: Callable[[stored_webhooks.WebhookDelivery, float],
                                             stored_webhooks.WebhookDelivery | None]) -> int:
    """Change all deliveries of a state, in small transactions; return how many they were."""
    number = 0
    async for rows in walk(engine.backend, tenant_id, queries.DeliveryFilter(webhook_id, state, None, AT_ONCE)):
        keys: list[tuple[type[Any], tuple[str, ...]]] = [(stored_webhooks.WebhookDelivery, stored.key_of(row))
                                                         for row in rows]

        def run(work: Work, keys: list[tuple[type[Any], tuple[str, ...]]] = keys) -> int:
            deliveries = [row for _, key in keys if (row := work.find_record(stored_webhooks.WebhookDelivery, *key))
                          and row.state == state]
            for row in deliveries:
                new = change(row, work.now)
                work.keep_record(new) if new is not None else work.drop_record(stored_webhooks.WebhookDelivery,
                                                                               *stored.key_of(row))
            return len(deliveries)
        number += await change_rows(engine, caller, tenant_id, keys, run)
    return number


def make_due(row: stored_webhooks.WebhookDelivery, now: float) -> stored_webhooks.WebhookDelivery:
    """Return a delivery that is to be tried now, as if for the first time."""
    return replace(row, state="waiting", tries=0, first_at=now, next_at=now)


def park_missed(row: stored_webhooks.WebhookDelivery, now: float) -> stored_webhooks.WebhookDelivery:
    """Return a delivery that is given up because an admin skips what was missed."""
    return replace(row, state="parked", next_at=None, last_at=now, reason="skipped by an admin")


async def finish_removal(engine: Engine, tenant_id: str, webhook_id: str) -> None:
    """Delete the deliveries of an endpoint that is being removed, and then itself."""
    caller = engine.make_own_caller(tenant_id)
    for state in ("waiting", "delivered", "parked"):
        await change_deliveries(engine, caller, tenant_id, webhook_id, state, lambda row, now: None)

    def drop(work: Work) -> None:
        if (row := work.find_record(stored_webhooks.Webhook, webhook_id)) is not None:
            head = work.find_record(stored_webhooks.WebhookHead) or stored_webhooks.WebhookHead(1)
            work.keep_record(replace(head, number=max(head.number - (not row.task_id), 0)))
            work.drop_record(stored_webhooks.Webhook, webhook_id)
    await change_rows(engine, caller, tenant_id, keys_of(webhook_id), drop)


def keys_of(webhook_id: str) -> list[tuple[type[Any], tuple[str, ...]]]:
    """Return what is loaded to count an endpoint in or out."""
    return [(stored_webhooks.Webhook, (webhook_id,)), (stored_webhooks.WebhookHead, ())]


# What they share.


def begin_removal(work: Work, row: stored_webhooks.Webhook) -> None:
    """Deliver nothing to an endpoint any more; `finish_removal` deletes it."""
    end_of_task(work, row, "removing")
    if not row.task_id:
        work.keep_record(replace(row, state="removing"))


def end_of_task(work: Work, row: stored_webhooks.Webhook, state: wire_webhooks.WebhookState) -> None:
    """End the webhook of a task: it is not counted any more, and what its receiver trusts is forgotten."""
    if row.task_id:
        head = work.find_record(stored_webhooks.WebhookHead) or stored_webhooks.WebhookHead(0)
        counted = row.state not in ("ended", "removing")
        work.keep_record(replace(head, tasks=max(head.tasks - counted, 0)))
        work.keep_record(replace(row, state=state, headers=None, updated_at=work.now))


async def change_rows(engine: Engine, caller: Caller, tenant_id: str, keys: RowKeys, run: Callable[[Work], T]) -> T:
    """Let `run` change some records of a tenant, in the tenant's next batch."""
    wanted = set(keys)

    def load(needs: Needs, caller: Caller, ask: wire.Ask) -> None:
        needs.records |= wanted
    return await admin.write_audited(engine, caller, tenant_id, load, run)


async def tenant_for_webhooks(engine: Engine, caller: Caller, named: str | None) -> str:
    """Return the tenant whose endpoints a caller may change; a limited key would see more by them than it may."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot administer webhooks")
    return await admin.target_tenant(engine, caller, named)


def check_endpoint(engine: Engine, url: str | None, types: frozenset[str]) -> None:
    """Refuse a URL that could never be called, and types that there are not."""
    if unknown := types - {*RECEIPT_TYPES, events.USAGE}:
        raise errors.InvalidRequest(f"types: no event has the type {min(unknown)}; there are "
                                    f"{', '.join([*RECEIPT_TYPES, events.USAGE])}")
    if events.USAGE in types and len(types) > 1:
        raise errors.InvalidRequest(
            f"types: an endpoint is told of {events.USAGE} alone, or of receipts; add another endpoint")
    if url is not None:
        from asyncgate.extras.webhooks.post import check_url  # the HTTP client is large, and few gates need it
        check_url(engine.settings, url)


def check_principals(types: frozenset[str], principals: frozenset[str]) -> None:
    """Refuse to choose usage events by inbox: they are in none."""
    if events.USAGE in types and principals:
        raise errors.InvalidRequest(f"principals: {events.USAGE} is in nobody's inbox; leave principals out")


def check_all_tenants(engine: Engine, caller: Caller, tenant_id: str, types: frozenset[str]) -> None:
    """Refuse an endpoint for all tenants to everybody but the operator, and for anything but usage."""
    admin.require_operator(engine, caller)
    if tenant_id != engine.settings.default_tenant_id:
        raise errors.InvalidRequest("all_tenants: such an endpoint belongs to the default tenant; leave tenant out")
    if types != {events.USAGE}:
        raise errors.InvalidRequest(
            f"all_tenants: an endpoint for all tenants receives usage events only; set types: {events.USAGE}")


async def find_beginning(engine: Engine, tenant_id: str, types: frozenset[str], everybody: bool) -> str:
    """Return the position behind which all happens from now on; for all tenants it is a time, at which usage ends."""
    return first_id(engine.backend.now()) if everybody else await find_position(engine, tenant_id, types)


async def find_webhook(engine: Engine, tenant_id: str, webhook_id: str) -> stored_webhooks.Webhook:
    """Return an endpoint; raises WebhookNotFound."""
    return require_found(await engine.backend.record(tenant_id, stored_webhooks.Webhook, webhook_id), webhook_id)


def require_webhook(work: Work, webhook_id: str) -> stored_webhooks.Webhook:
    """Return an endpoint within a batch; raises WebhookNotFound."""
    return require_found(work.find_record(stored_webhooks.Webhook, webhook_id), webhook_id)


def require_active(work: Work, webhook_id: str) -> stored_webhooks.Webhook:
    """Return an endpoint to which events are delivered; raises InvalidTransition for another one."""
    webhook = require_webhook(work, webhook_id)
    if webhook.state != "active":
        raise errors.InvalidTransition(
            f"webhook {webhook_id} is {webhook.state}, so nothing is delivered; change_webhook "
            "with active: true first")
    return webhook


def require_found(webhook: stored_webhooks.Webhook | None, webhook_id: str) -> stored_webhooks.Webhook:
    """Return an endpoint, unless there is none or it is being removed."""
    if webhook is None or webhook.state == "removing":
        raise errors.WebhookNotFound(f"no webhook {webhook_id}; list_webhooks shows all")
    return webhook


def apply_changes(old: stored_webhooks.Webhook, ask: wire_webhooks.ChangeWebhook, newest: str,
                  by: str) -> stored_webhooks.Webhook:
    """Return an endpoint with the changes that were asked for."""
    new = replace(
        old, url=ask.endpoint or old.url, description=old.description if ask.description is None else ask.description,
        types=old.types if ask.types is None else encode(ask.types),
        principals=old.principals if ask.principals is None else encode(ask.principals),
        position=old.position)
    # the position of one kind is none of the other
    if ask.skip_missed or events.tells_usage(new) != events.tells_usage(old):
        new = replace(new, position=newest)
    if ask.active:
        return replace(new, state="active", reason=None, failing_since=None)
    if ask.active is False and old.state != "disabled":
        return replace(new, state="disabled", reason=f"disabled by {by}")
    return new if new.url == old.url else replace(new, failing_since=None, reason=None)     # try the new URL at once


def look_soon(engine: Engine, tenant_id: str) -> None:
    """Let the sender of this process look at the endpoints of a tenant; that of another one looks soon by itself."""
    if (sender := engine.find_extension(Sender)) is not None:
        sender.look_soon(tenant_id)


def encode(names: frozenset[str]) -> str:
    """Store names, sorted."""
    return msgspec.json.encode(sorted(names)).decode()


def secret_of(engine: Engine, tenant_id: str, webhook: stored_webhooks.Webhook) -> str:
    """Return the signing secret of an endpoint as text."""
    return events.show_secret(events.derive_secret(engine.backend.secret, tenant_id, webhook.webhook_id,
                                                   webhook.secret_id))


def as_webhook_record(tenant_id: str, row: stored_webhooks.Webhook) -> wire_webhooks.WebhookRecord:
    """Show an endpoint without its secret."""
    return wire_webhooks.WebhookRecord(
        row.webhook_id, tenant_id, row.url, sorted(events.read_names(row.types)),
        sorted(events.read_names(row.principals)),
        row.state, to_utc(row.created_at), row.created_by, to_utc(row.updated_at), row.description, row.reason,
        to_utc_or_none(row.failing_since), to_utc_or_none(row.succeeded_at),
        to_utc_or_none(events.find_end_of_overlap(row)),
        row.reached is not None)


OPERATIONS = [
    Operation(create_webhook, "POST /v1/webhooks", "A", "admin:write", "W"),
    Operation(list_webhooks, "GET /v1/webhooks", "A", "admin:read", "R"),
    Operation(change_webhook, "POST /v1/webhooks/{webhook_id}", "A", "admin:write", "W", idempotent=True),
    Operation(remove_webhook, "POST /v1/webhooks/{webhook_id}/remove", "A", "admin:write", "W"),
    Operation(rotate_webhook_secret, "POST /v1/webhooks/{webhook_id}/rotate", "A", "admin:write", "W"),
    Operation(test_webhook, "POST /v1/webhooks/{webhook_id}/test", "A", "admin:write", "W"),
    Operation(list_deliveries, "GET /v1/webhooks/{webhook_id}/deliveries", "A", "admin:read", "R"),
    Operation(replay_deliveries, "POST /v1/webhooks/{webhook_id}/replay", "A", "admin:write", "W"),
]
