"""What goes over the wire to tell a tenant of its events by HTTP (webhooks)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, stored_webhooks, wire, wire_admin

WebhookState = stored_webhooks.WebhookState
DeliveryState = stored_webhooks.DeliveryState
EndpointUrl = Annotated[str, Meta(min_length=1, max_length=2000),
                        wire.says("https, without a user and without a fragment")]
EventTypes = Annotated[frozenset[wire.Name], Meta(max_length=50), wire.says(
    "types of receipts, such as task.result_ready; empty is every receipt; or usage.recorded alone")]
Recipients = Annotated[frozenset[wire.Name], Meta(max_length=100), wire.says(
    "only receipts in the inboxes of these principals, by id; empty is all")]
Overlap = Annotated[float, Meta(ge=0, le=30 * 86_400), wire.says("seconds for which the old secret signs, too")]
Headers = Annotated[dict[str, Annotated[str, Meta(max_length=4000)]], Meta(max_length=8), wire.says(
    "for the receiver, such as Authorization; they are sealed, and shown to nobody")]
EventIds = Annotated[frozenset[wire.Name], Meta(max_length=100)]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105  # of an example
DELIVERY = {"webhook_id": examples.WEBHOOK_ID, "delivery_id": examples.DUTY, "type": "task.result_ready",
            "state": "waiting", "tries": 3,
            "first_at": examples.NOW, "task_id": examples.TASK_ID, "last_at": examples.LATER, "next_at": examples.LATER,
            "status": 503,
            "reason": "503: not a success", "took_ms": 12.5}

OF_TASK = {"webhook_id": f"{examples.TASK_ID}.0", "tenant": examples.TENANT_ID,
           "endpoint": "https://agent.example.com/done", "types": ["task.result_ready"], "principals": [],
           "state": "active", "created_at": examples.NOW, "created_by": "agent ada", "updated_at": examples.NOW,
           "task_id": examples.TASK_ID, "form": "receipt", "headers": ["authorization"],
           "authorization_scheme": "Bearer"}


class CreateWebhook(wire.Ask, kw_only=True):
    """Add an endpoint."""

    example = ({"endpoint": "https://hooks.example.com/asyncgate", "types": ["task.result_ready"],
                "principals": ["ada"], "description": "results for the mailer"}, {"secret": SECRET, "webhook": {
                    name: examples.WEBHOOK[name] for name in examples.WEBHOOK if name != "succeeded_at"}})
    refusals = (errors.TenantNotFound, errors.QuotaExceeded)
    next_step = "test_webhook sends a test event; the answer tells whether the receiver took it."
    tenant: wire_admin.Whose = None
    endpoint: EndpointUrl
    types: EventTypes = frozenset()
    principals: Recipients = frozenset()
    description: Annotated[wire.Name | None, wire.says("a name for people")] = None
    all_tenants: Annotated[bool,
                           wire.says("the usage of all tenants; for the operator, of usage.recorded alone")] = False


class ListWebhooks(wire.Ask, kw_only=True):
    """List endpoints."""

    example = ({}, {"webhooks": [examples.WEBHOOK]})
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None


class WebhookAsk(wire.Ask, kw_only=True):
    """A request about one endpoint."""

    needed: ClassVar[tuple[str, ...]] = ("webhook_id",)
    refusals = (errors.TenantNotFound, errors.WebhookNotFound)
    webhook_id: Annotated[wire.Name, wire.says("the endpoint; list_webhooks shows it")] = ""
    tenant: wire_admin.Whose = None


class ChangeWebhook(WebhookAsk, kw_only=True):
    """Change an endpoint."""

    example = ({"webhook_id": examples.WEBHOOK_ID, "active": False}, {**examples.WEBHOOK, "state": "disabled",
                                                                      "reason": "disabled by human root"})
    endpoint: Annotated[EndpointUrl | None, wire.says("its new URL")] = None
    types: Annotated[EventTypes | None, wire.says("the events that it gets; replaces the old ones")] = None
    principals: Annotated[Recipients | None, wire.says("whose events it gets; replaces the old ones")] = None
    description: Annotated[wire.Name | None, wire.says("a name for people")] = None
    active: Annotated[bool | None, wire.says("whether events are delivered; active also ends a parking")] = None
    skip_missed: Annotated[bool, wire.says("go on with events from now, and park those that wait")] = False


class RemoveWebhook(WebhookAsk, kw_only=True):
    """Remove an endpoint."""

    example = ({"webhook_id": examples.WEBHOOK_ID, "reason": "the mailer is gone"}, {"ok": True})
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class RotateWebhookSecret(WebhookAsk, kw_only=True):
    """Replace the signing secret of an endpoint."""

    example = ({"webhook_id": examples.WEBHOOK_ID, "overlap_seconds": 86_400}, {"secret": SECRET, "webhook": {
        **examples.WEBHOOK, "previous_secret_until": examples.LATER}})
    overlap_seconds: Overlap = 86_400.0


class TestWebhook(WebhookAsk, kw_only=True):
    """Send a test event to an endpoint."""

    __test__ = False            # for pytest: it is not a test
    example = ({"webhook_id": examples.WEBHOOK_ID},
               {"delivered": True, "delivery_id": examples.DUTY, "status": 204, "took_ms": 41.5})


class ListDeliveries(wire.PageAsk, kw_only=True):
    """List what became of the events of an endpoint."""

    needed: ClassVar[tuple[str, ...]] = ("webhook_id",)
    example = ({"webhook_id": examples.WEBHOOK_ID, "state": "waiting"}, {"deliveries": [DELIVERY]})
    refusals = (errors.TenantNotFound, errors.WebhookNotFound)
    next_step = "replay_deliveries delivers events again, for example those that are parked."
    webhook_id: Annotated[wire.Name, wire.says("the endpoint; list_webhooks shows it")] = ""
    tenant: wire_admin.Whose = None
    state: Annotated[DeliveryState | None, wire.says("default: any")] = None


class ReplayDeliveries(WebhookAsk, kw_only=True):
    """Deliver events again."""

    example = ({"webhook_id": examples.WEBHOOK_ID, "since": examples.NOW}, {"since": examples.NOW})
    delivery_ids: Annotated[EventIds | None, wire.says("these events, as list_deliveries names them")] = None
    since: Annotated[wire.Moment | None,
                     wire.says("every event since then, as far as receipts are not archived")] = None


class WebhookRecord(Struct, omit_defaults=True):
    """An endpoint, without its secret."""

    webhook_id: str
    tenant: str
    endpoint: str
    types: list[str]                    # of the events; empty: every receipt
    principals: list[str]               # whose inboxes; empty: all
    state: WebhookState
    created_at: datetime
    created_by: str
    updated_at: datetime
    description: str = ""
    reason: str | None = None           # why it is not active, or why it fails
    failing_since: datetime | None = None
    succeeded_at: datetime | None = None            # the last success
    previous_secret_until: datetime | None = None   # until then an earlier secret signs, too
    all_tenants: bool = False           # whether it is told of the usage of all tenants
    task_id: str | None = None          # of the webhook of one task; so are the others
    form: str | None = None             # what is posted of an event
    headers: list[str] | None = None    # the names of those that its requests carry for the receiver
    authorization_scheme: str | None = None         # of the header authorization, such as Bearer


class CreateTaskWebhook(wire.TaskAsk, kw_only=True):
    """Have the events of one task posted."""

    example = ({"task_id": examples.TASK_ID, **examples.ASKER, "endpoint": "https://agent.example.com/done",
                "types": ["task.result_ready"], "headers": {"Authorization": "Bearer of-the-receiver"}},
               {"secret": SECRET, "webhook": OF_TASK})
    refusals = (*wire.TaskAsk.refusals, errors.QuotaExceeded)
    next_step = "list_task_webhooks tells whether its receiver fails."
    endpoint: EndpointUrl
    types: EventTypes = frozenset()
    headers: Headers = {}
    name: Annotated[wire.Name | None, wire.says("of yours; it replaces your webhook of that name at this task")] = None
    past: Annotated[bool, wire.says("false: only what happens from now on")] = True
    form: Annotated[wire.Name, wire.says("what is posted: the receipt, or what another protocol makes of it")] = (
        "receipt")


class ListTaskWebhooks(wire.TaskAsk, kw_only=True):
    """List the webhooks of one task."""

    acts = False
    filters = True
    example = ({"task_id": examples.TASK_ID}, {"webhooks": [OF_TASK]})


class RemoveTaskWebhook(wire.AsEither, kw_only=True):
    """Remove a webhook of one task."""

    needed: ClassVar[tuple[str, ...]] = ("webhook_id",)
    example = ({"webhook_id": OF_TASK["webhook_id"], **examples.ASKER}, {"ok": True})
    refusals = (*wire.TaskAsk.refusals, errors.WebhookNotFound)
    webhook_id: Annotated[wire.Name, wire.says("the webhook; list_task_webhooks shows it")] = ""


class CreatedWebhook(Struct):
    """An endpoint and its signing secret, which only this answer shows."""

    secret: str
    webhook: WebhookRecord


class Webhooks(Struct):
    """The endpoints of a tenant, the oldest first."""

    columns = "webhook_id endpoint types state reason succeeded_at"
    webhooks: list[WebhookRecord]


class TestedWebhook(Struct, omit_defaults=True):
    """What became of a test event."""

    __test__ = False            # for pytest: it is not a test
    delivered: bool
    delivery_id: str
    status: int | None = None           # of the answer
    reason: str | None = None           # why it was not delivered
    took_ms: float | None = None


class DeliveryRecord(Struct, omit_defaults=True):
    """What became of one event."""

    webhook_id: str
    delivery_id: str                    # the id of the event, and the webhook-id header
    type: str
    state: DeliveryState
    tries: int
    first_at: datetime
    task_id: str | None = None
    last_at: datetime | None = None
    next_at: datetime | None = None
    status: int | None = None           # the HTTP status of the last answer
    reason: str | None = None           # why the last attempt failed
    took_ms: float | None = None
    tenant: str | None = None           # whose event it is, unless the endpoint's own tenant's


class Deliveries(Struct):
    """A page of deliveries, the newest event first."""

    columns = "delivery_id type state tries status reason last_at next_at"
    deliveries: list[DeliveryRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class Replayed(Struct, omit_defaults=True):
    """What is delivered again: how many deliveries, or every event since a time."""

    replayed: int | None = None         # absent with since
    since: datetime | None = None
