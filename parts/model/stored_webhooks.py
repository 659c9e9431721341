"""The rows of webhooks: where a tenant is told of its events, and what became of each delivery."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model import cards, wire_webhooks


@cards.stored("webhooks", "where a tenant is told of its events", "until an admin removes it", "that admin", rowid=True)
class Webhook(Struct, frozen=True):
    """An endpoint of a tenant, and how far its events are delivered."""

    webhook_id: cards.IdText                  # UUIDv7
    url: cards.Content[str]                   # where events are posted
    description: cards.Content[str]           # for people
    types: cards.Plain[cards.Json]                  # JSON array of event types; empty: every receipt
    principals: cards.Actor[cards.Json]             # JSON array: only receipts to these ids; empty: to anybody
    # from it the signing secret is derived; also keeps earlier ones that still sign
    secret_id: cards.Proof[str]
    previous_id: cards.Proof[str | None]      # the same for the signing secret before, which signs too
    previous_until: float | None        # until then
    # the last receipt up to which each one is delivered, or has a delivery row
    position: cards.IdText
    state: wire_webhooks.WebhookState                 # parked: it failed for days; removing: being deleted
    reason: cards.Content[str | None]         # why it is not active, or why it fails
    created_at: float                   # when
    created_by: cards.Actor[str]              # by which principal
    updated_at: float                   # when an admin last changed it
    failing_since: float | None = None  # since when no delivery has succeeded
    noticed_at: float | None = None     # when admins were last told of a parked delivery
    succeeded_at: float | None = None   # the last success
    # JSON, of an endpoint for all tenants: by tenant, the position in its usage
    reached: cards.Plain[str | None] = None


@cards.stored("webhook_heads", "how many such endpoints a tenant has", cards.OF_TENANT, "nobody: it is a count",
              single=True)
class WebhookHead(Struct, frozen=True):
    """How many endpoints a tenant has: the row makes those who add one take turns."""

    number: int                         # of endpoints


@cards.stored("webhook_deliveries", "what became of each event that was posted",
              "`webhooks.log_days` after its last attempt",
              cards.HOURLY, key="webhook_id delivery_id",
              indexes=("webhook_deliveries_state (tenant_id, webhook_id, state, delivery_id)",))
class WebhookDelivery(Struct, frozen=True):
    """One event for one endpoint: what was tried, and what is still to be done."""

    webhook_id: cards.IdText                  # the endpoint
    delivery_id: cards.IdText                 # the id of the event, the webhook-id header of each attempt
    type: cards.Plain[str]                    # of the event
    task_id: cards.IdText                     # events of one task are delivered in order; empty: it has none
    state: wire_webhooks.DeliveryState                # parked: given up until somebody replays it
    tries: int                          # attempts
    first_at: float                     # when it was first due
    last_at: float | None               # the last attempt
    next_at: float | None               # the next attempt, while it waits
    http_status: int | None = None      # of the last answer
    reason: cards.Content[str | None] = None  # why the last attempt failed
    took_ms: float | None = None        # how long the last attempt took
    of_tenant: cards.Plain[str | None] = None  # whose event it is, unless the endpoint's own tenant's
