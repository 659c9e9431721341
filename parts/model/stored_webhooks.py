"""The rows of webhooks: where the events of a tenant, or of one task, are sent, and what became of each delivery."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from asyncgate.parts.model.cards import HOURLY, OF_TENANT, Actor, Content, Form, IdText, Json, Plain, Proof, stored

WebhookState = Literal["active", "disabled", "parked", "removing", "ended"]
DeliveryState = Literal["waiting", "delivered", "parked"]


@stored("webhooks", "where the events of a tenant, or of one task, are sent",
        "until it is removed; that of a task `webhooks.log_days` after its end", f"whoever made it; {HOURLY}",
        rowid=True, indexes=("webhooks_open (tenant_id, webhook_id) WHERE state <> 'ended'",))
class Webhook(Struct, frozen=True):
    """An endpoint of a tenant, or of one task, and how far its events are delivered."""

    webhook_id: IdText                  # UUIDv7; of a task: its id, a dot and a number
    url: Content[str]                   # where events are posted
    description: Content[str]           # for people
    types: Plain[Json]                  # JSON array of event types; empty: every receipt
    principals: Actor[Json]             # JSON array: only receipts to these ids; empty: to anybody
    secret_id: Proof[str]               # from it the signing secret is derived; also keeps earlier ones that still sign
    previous_id: Proof[str | None]      # the same for the signing secret before, which signs too
    previous_until: float | None        # until then
    position: IdText                    # the last receipt up to which each one is delivered, or has a delivery row
    state: WebhookState   # parked: it failed for days; removing: being deleted; ended: as its task
    reason: Content[str | None]         # why it is not active, or why it fails
    created_at: float                   # when
    created_by: Actor[str]              # by which principal
    updated_at: float                   # when an admin last changed it
    failing_since: float | None = None  # since when no delivery has succeeded
    noticed_at: float | None = None     # when admins were last told of a parked delivery
    succeeded_at: float | None = None   # the last success
    reached: Plain[str | None] = None   # JSON, of an endpoint for all tenants: by tenant, the position in its usage
    task_id: IdText = ""                # the task whose events it gets; empty: those of the tenant
    headers: Proof[str | None] = None   # what its requests carry for the receiver, sealed
    form: Plain[str] = "receipt"        # what is posted of an event


@stored("webhook_heads", "how many such endpoints a tenant has", OF_TENANT, "nobody: it is a count", single=True)
class WebhookHead(Struct, frozen=True):
    """How many endpoints a tenant has: the row makes those who add one take turns."""

    number: int                         # of endpoints of the tenant itself
    tasks: int = 0                      # of those of tasks that have not ended


@stored("webhook_deliveries", "what became of each event that was posted", "`webhooks.log_days` after its last attempt",
        HOURLY, key="webhook_id delivery_id",
        indexes=("webhook_deliveries_state (tenant_id, webhook_id, state, delivery_id)",))
class WebhookDelivery(Struct, frozen=True):
    """One event for one endpoint: what was tried, and what is still to be done."""

    webhook_id: IdText                  # the endpoint
    delivery_id: IdText                 # the id of the event, the webhook-id header of each attempt
    type: Plain[str]                    # of the event
    task_id: IdText                     # events of one task are delivered in order; empty: it has none
    state: Annotated[DeliveryState, Form.ID]  # parked: given up until somebody replays it
    tries: int                          # attempts
    first_at: float                     # when it was first due
    last_at: float | None               # the last attempt
    next_at: float | None               # the next attempt, while it waits
    http_status: int | None = None      # of the last answer
    reason: Content[str | None] = None  # why the last attempt failed
    took_ms: float | None = None        # how long the last attempt took
    of_tenant: Plain[str | None] = None  # whose event it is, unless the endpoint's own tenant's
