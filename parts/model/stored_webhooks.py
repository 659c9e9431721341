"""The rows of webhooks: where a tenant is told of its events, and what became of each delivery."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.wire_webhooks import DeliveryState, WebhookState


class Webhook(Struct, frozen=True):
    """An endpoint of a tenant, and how far its events are delivered."""

    webhook_id: str
    url: str                            # where events are posted
    description: str                    # for people
    types: str                          # JSON array of event types; empty: every receipt
    principals: str                     # JSON array: only receipts to these ids; empty: to anybody
    secret_id: str                      # from it the signing secret is derived; also keeps earlier ones that still sign
    previous_id: str | None             # the same for the signing secret before, which signs too
    previous_until: float | None        # until then
    position: str                       # the last receipt up to which each one is delivered, or has a delivery row
    state: WebhookState                 # parked: it failed for days; removing: being deleted
    reason: str | None                  # why it is not active, or why it fails
    created_at: float                   # when
    created_by: str                     # by which principal
    updated_at: float                   # when an admin last changed it
    failing_since: float | None = None  # since when no delivery has succeeded
    noticed_at: float | None = None     # when admins were last told of a parked delivery
    succeeded_at: float | None = None   # the last success
    reached: str | None = None          # JSON, of an endpoint for all tenants: by tenant, the position in its usage


class WebhookHead(Struct, frozen=True):
    """How many endpoints a tenant has: the row makes those who add one take turns."""

    number: int


class WebhookDelivery(Struct, frozen=True):
    """One event for one endpoint: what was tried, and what is still to be done."""

    webhook_id: str
    delivery_id: str                    # the id of the event, the webhook-id header of each attempt
    type: str                           # of the event
    task_id: str                        # events of one task are delivered in order; empty: it has none
    state: DeliveryState                # parked: given up until somebody replays it
    tries: int
    first_at: float                     # when it was first due
    last_at: float | None               # the last attempt
    next_at: float | None               # the next attempt, while it waits
    http_status: int | None = None      # of the last answer
    reason: str | None = None           # why the last attempt failed
    took_ms: float | None = None        # how long the last attempt took
    of_tenant: str | None = None        # whose event it is, unless the endpoint's own tenant's
