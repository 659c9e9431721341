"""Every operation of the gate as a typed method, and what comes back.

Made by `python -m asyncgate.commands.declare` from the table of operations; change the table, then run it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any, Required, TypedDict, TypeVar

from msgspec import Struct, field

from asyncgate.clients.call import CallSpec
from asyncgate.parts.model.findings import (
    Examination,
)
from asyncgate.parts.model.wire import (
    Created,
    CreatedBy,
    GateConfig,
    GivenKind,
    GivenRole,
    Healthy,
    Items,
    Kind,
    LatestReceipt,
    Leases,
    LedgerLag,
    Ok,
    Owner,
    Principal,
    Relationship,
    Released,
    Renewed,
    Reported,
    Routing,
    ScheduleState,
    Server,
    Status,
    Terminator,
    Timeouts,
    You,
)
from asyncgate.parts.model.wire_admin import (
    Drained,
    IssuedKey,
    Keys,
    Limits,
    Readiness,
    RotatedCredentials,
    Severity,
    TenantRecord,
    Tenants,
    Tier,
)
from asyncgate.parts.model.wire_erasure import (
    ErasureReport,
    Erasures,
)
from asyncgate.parts.model.wire_oauth import (
    Clients,
    Consents,
    MadeSignInLink,
    RegisteredClient,
    RevokedToken,
    Sessions,
    SignedOut,
    SigningKeyRecords,
    UserRecord,
    Users,
)
from asyncgate.parts.model.wire_operating import (
    AllObligations,
    BulkAction,
    BulkPreview,
    BulkRecord,
    FoundIds,
    PauseRecord,
    QueueRecord,
    Queues,
    ResumedWork,
    Schedules,
    WorkPauses,
)
from asyncgate.parts.model.wire_receipts import (
    ArchiveRun,
    Exported,
    Imported,
    Restored,
    SealEnd,
    Seals,
    StoredReceipt,
)
from asyncgate.parts.model.wire_usage import (
    BudgetReport,
    Period,
    Quantity,
    UsageReport,
)
from asyncgate.parts.model.wire_webhooks import (
    CreatedWebhook,
    Deliveries,
    DeliveryState,
    Replayed,
    TestedWebhook,
    WebhookRecord,
    Webhooks,
)
from asyncgate.parts.model.wire_workers import (
    Explanation,
    ServedTypes,
    Workers,
)

R = TypeVar("R")
Names = Set[str] | list[str] | tuple[str, ...]      # a text alone is not a collection of names


class Complete(TypedDict, total=False):
    """End a task as succeeded."""

    tenant_id: str | None
    worker_id: str | None
    worker_kind: Kind | None
    worker_instance_id: str | None
    task_id: Required[str]
    lease_id: Required[str]
    fence: int | None
    result: Any
    result_summary: str | None
    artifacts: Any
    delivery_proof: Mapping[str, Any] | None
    completion_metadata: Mapping[str, Any] | None


class TaskTerms(TypedDict, total=False):
    """Fields of a task, besides its type and payload."""

    tenant_id: str | None
    principal_kind: Kind | None
    principal_id: str | None
    principal_instance_id: str | None
    agent_id: str | None
    agent_instance_id: str | None
    payload_pointer: str | None
    principal_ai: str | None
    priority: int | None
    max_attempts: int | None
    retry_backoff_seconds: int | None
    delay_seconds: float | None
    max_expiries: int | None
    task_summary: str | None
    instructions: str | None
    success_criteria: Any
    expected_outcome_kind: str | None
    expected_artifact_mime: str | None
    result_delivery: str | None
    timeouts: Timeouts | Mapping[str, Any] | None
    created_by: CreatedBy | Mapping[str, Any] | None
    tasker_principal: CreatedBy | Mapping[str, Any] | None


class CreateTask(TaskTerms, total=False):
    """Create one task."""

    type: Required[str]
    payload: Any
    requirements: Mapping[str, Any]
    idempotency_key: str | None


class ReceiptRecord(Struct, kw_only=True):
    """An immutable fact: who said what to whom, and what it answers."""

    receipt_id: str
    tenant_id: str
    receipt_type: str
    created_at: datetime
    sender: Principal = field(name="from")
    to: Principal
    task_id: str | None = None
    lease_id: str | None = None
    schedule_id: str | None = None
    parents: list[str]
    asyncgate_instance: str
    body: Any
    hash: str
    delivered_at: datetime | None = None


class Outcome(Struct, kw_only=True):
    """How a task ended."""

    outcome: Status
    result: Any
    error: Any
    artifacts: Any
    completed_at: datetime


class TaskRecord(Struct, kw_only=True):
    """Everything that the gate knows about a task."""

    task_summary: str | None = None
    instructions: str | None = None
    success_criteria: Any = None
    expected_outcome_kind: str | None = None
    expected_artifact_mime: str | None = None
    result_delivery: str | None = None
    timeouts: Timeouts | None = None
    task_id: str
    tenant_id: str
    type: str
    status: Status
    created_by: Owner
    principal_ai: str
    payload: Any
    payload_pointer: str | None = None
    requirements: Any
    priority: int
    attempt: int
    max_attempts: int
    retry_backoff_seconds: int
    fence: int
    expiries: int
    max_expiries: int
    held: str | None = None
    idempotency_key: str | None = None
    asyncgate_instance: str
    obligation_receipt_id: str
    obligation_open: bool
    created_at: datetime
    updated_at: datetime
    next_eligible_at: datetime | None = None
    started_at: datetime | None = None
    leased_to: Principal | None = None
    lease_expires_at: datetime | None = None
    progress: Any = None
    progress_at: datetime | None = None
    result: Outcome | None = None
    rerun_of: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    trace_link: str | None = None
    warnings: list[str] | None = None


class Attention(Struct, kw_only=True):
    """The lists of the original bootstrap; all but the inbox stay empty (PH.6.3)."""

    inbox_receipts: list[ReceiptRecord]
    assigned_tasks: list[TaskRecord] = []
    waiting_results: list[TaskRecord] = []
    running_or_scheduled: list[TaskRecord] = []
    anomalies: list[ReceiptRecord] = []


class Welcome(Struct, kw_only=True):
    """The bootstrap packet."""

    server: Server
    relationship: Relationship
    attention: Attention
    cursor: LatestReceipt
    environment: str
    receipt_routing: Routing | None = None
    receipt_ledger_lag: LedgerLag | None = None
    warnings: list[str] = []


class ExportPage(Struct, kw_only=True):
    """One page of an export: some rows of one kind."""

    tenant: str
    principal: Principal | None = None
    kind: str
    purpose: str
    begun_at: datetime
    read_at: datetime
    is_first: bool
    looked_at: int
    rows: list[Any]
    left_out: list[str]
    kinds: list[str]
    next_cursor: str | None = None


class HistoryEvent(Struct, kw_only=True):
    """One event in the history of a task, with its receipt if it has one."""

    event_id: str
    event_type: str
    created_at: datetime
    payload: Any = None
    receipt: ReceiptRecord | None = None


class History(Struct, kw_only=True):
    """A page of a task's history, oldest first."""

    task_id: str
    events: list[HistoryEvent]
    next_cursor: str | None = None
    cursor: str | None = None


class Offer(Struct, kw_only=True):
    """A leased task: do the work, renew the lease in time, then complete, fail or release it."""

    task_summary: str | None = None
    instructions: str | None = None
    success_criteria: Any = None
    expected_outcome_kind: str | None = None
    expected_artifact_mime: str | None = None
    result_delivery: str | None = None
    timeouts: Timeouts | None = None
    task_id: str
    lease_id: str
    fence: int
    type: str
    payload: Any
    payload_pointer: str | None = None
    requirements: Any
    principal_ai: str
    created_by: Owner
    tenant_id: str
    attempt: int
    expires_at: datetime
    renew_every_seconds: float
    obligation_receipt_id: str
    caused_by_receipt_id: str
    progress: Any = None
    traceparent: str | None = None
    tracestate: str | None = None
    trace_link: str | None = None


class Offers(Struct, kw_only=True):
    """The tasks of a claim; the list may be empty, with a warning if a limit is the reason."""

    tasks: list[Offer]
    warnings: list[str] | None = None


class Receipts(Struct, kw_only=True):
    """A page of receipts, oldest first."""

    receipts: list[ReceiptRecord]
    next_cursor: str | None = None
    cursor: str | None = None
    warnings: list[str] | None = None


class AuditLine(Struct, kw_only=True):
    """One line of the audit log; each hash covers the line and the previous hash."""

    audit_id: str
    number: int
    tenant_id: str
    timestamp: datetime
    event: str
    severity: str
    principal_id: str | None = None
    ip: str | None = None
    user_agent: str | None = None
    reason: str | None = None
    details: Any
    hash: str


class AuditLines(Struct, kw_only=True):
    """A page of the audit log, oldest first."""

    lines: list[AuditLine]
    next_cursor: str | None = None
    cursor: str | None = None
    broken: str | None = None


class Obligations(Struct, kw_only=True):
    """The open obligations of a principal: the receipts, oldest first, and nothing else (PH.6.2)."""

    server: Server
    relationship: Relationship
    open_obligations: list[ReceiptRecord]
    cursor: str | None = None


class Tasks(Struct, kw_only=True):
    """A page of tasks, newest first."""

    tasks: list[TaskRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class FoundTasks(Struct, kw_only=True):
    """The tasks that were found, newest first, among those that were looked at."""

    tasks: list[TaskRecord]
    next_cursor: str | None = None
    cursor: str | None = None
    searched: int = 0


CALLS = {
    "ack_receipt": CallSpec("ack_receipt", "POST", "/v1/receipts/{receipt_id}/ack", True, "principal", (), Ok),
    "attach_artifacts": CallSpec(
        "attach_artifacts", "POST", "/v1/tasks/{task_id}/artifacts", True, "principal", (), Ok),
    "bootstrap": CallSpec("bootstrap", "GET", "/v1/bootstrap", True, "principal", (), Welcome),
    "cancel_task": CallSpec("cancel_task", "POST", "/v1/tasks/{task_id}/cancel", True, "principal", (), Ok),
    "change_client": CallSpec("change_client", "POST", "/v1/clients/{client_id}", False, "", (), RegisteredClient),
    "change_user": CallSpec("change_user", "POST", "/v1/users/{user_id}", False, "", (), UserRecord),
    "change_webhook": CallSpec("change_webhook", "POST", "/v1/webhooks/{webhook_id}", True, "", (), WebhookRecord),
    "check_terminator": CallSpec("check_terminator", "POST", "/v1/receipts/check-terminator", True, "", (), Terminator),
    "complete": CallSpec("complete", "POST", "/v1/tasks/{task_id}/complete", True, "worker", (), Ok),
    "complete_tasks": CallSpec("complete_tasks", "POST", "/v1/tasks/complete-batch", True, "worker", (), Items),
    "create_task": CallSpec("create_task", "POST", "/v1/tasks", True, "principal", ("idempotency_key",), Created),
    "create_tasks": CallSpec("create_tasks", "POST", "/v1/tasks/batch", True, "principal", (), Items),
    "create_tenant": CallSpec("create_tenant", "POST", "/v1/tenants", False, "", (), TenantRecord),
    "create_webhook": CallSpec("create_webhook", "POST", "/v1/webhooks", False, "", (), CreatedWebhook),
    "drain_gate": CallSpec("drain_gate", "POST", "/v1/gate/drain", True, "", (), Drained),
    "drain_work": CallSpec("drain_work", "POST", "/v1/pauses/drain", True, "", (), PauseRecord),
    "emit_receipt": CallSpec("emit_receipt", "POST", "/v1/receipts", True, "worker", (), Ok),
    "end_session": CallSpec("end_session", "POST", "/v1/sessions/end", True, "", (), Ok),
    "erase_principal": CallSpec("erase_principal", "POST", "/v1/principals/erase", True, "", (), ErasureReport),
    "erase_tenant": CallSpec("erase_tenant", "POST", "/v1/tenants/{tenant}/erase", True, "", (), ErasureReport),
    "examine_gate": CallSpec("examine_gate", "GET", "/v1/examination", True, "", (), Examination),
    "explain_task": CallSpec("explain_task", "GET", "/v1/tasks/{task_id}/explain", True, "principal", (), Explanation),
    "export_principal": CallSpec("export_principal", "GET", "/v1/export/principal", True, "", (), ExportPage),
    "export_receipts": CallSpec("export_receipts", "GET", "/v1/export/receipts", True, "", (), Exported),
    "export_tenant": CallSpec("export_tenant", "GET", "/v1/export/tenant", True, "", (), ExportPage),
    "fail": CallSpec("fail", "POST", "/v1/tasks/{task_id}/fail", True, "worker", (), Released),
    "find_id": CallSpec("find_id", "GET", "/v1/ids/{part}", True, "", (), FoundIds),
    "get_budgets": CallSpec("get_budgets", "GET", "/v1/budgets", True, "", (), BudgetReport),
    "get_bulk": CallSpec("get_bulk", "GET", "/v1/bulks/{bulk_id}", True, "", (), BulkRecord),
    "get_config": CallSpec("get_config", "GET", "/v1/config", True, "", (), GateConfig),
    "get_limits": CallSpec("get_limits", "GET", "/v1/limits", True, "", (), Limits),
    "get_queue": CallSpec("get_queue", "GET", "/v1/queues/{queue_id}", True, "", (), QueueRecord),
    "get_receipt": CallSpec("get_receipt", "GET", "/v1/receipts/{receipt_id}", True, "principal", (), ReceiptRecord),
    "get_task": CallSpec("get_task", "GET", "/v1/tasks/{task_id}", True, "principal", (), TaskRecord),
    "get_task_history": CallSpec(
        "get_task_history", "GET", "/v1/tasks/{task_id}/history", True, "principal", (), History),
    "get_usage": CallSpec("get_usage", "GET", "/v1/usage", True, "principal", (), UsageReport),
    "health": CallSpec("health", "GET", "/v1/health", True, "", (), Healthy),
    "import_receipts": CallSpec("import_receipts", "POST", "/v1/import/receipts", False, "", (), Imported),
    "invite_user": CallSpec("invite_user", "POST", "/v1/users", False, "", (), UserRecord),
    "issue_key": CallSpec("issue_key", "POST", "/v1/keys", False, "", (), IssuedKey),
    "lease_next": CallSpec("lease_next", "POST", "/v1/leases/claim", True, "worker", ("claim_id",), Offers),
    "list_archived_receipts": CallSpec(
        "list_archived_receipts", "GET", "/v1/archive/receipts", True, "principal", (), Receipts),
    "list_audit": CallSpec("list_audit", "GET", "/v1/audit", True, "principal", (), AuditLines),
    "list_clients": CallSpec("list_clients", "GET", "/v1/clients", True, "principal", (), Clients),
    "list_consents": CallSpec("list_consents", "GET", "/v1/consents", True, "principal", (), Consents),
    "list_deliveries": CallSpec(
        "list_deliveries", "GET", "/v1/webhooks/{webhook_id}/deliveries", True, "principal", (), Deliveries),
    "list_erasures": CallSpec("list_erasures", "GET", "/v1/erasures", True, "principal", (), Erasures),
    "list_keys": CallSpec("list_keys", "GET", "/v1/keys", True, "principal", (), Keys),
    "list_leases": CallSpec("list_leases", "GET", "/v1/leases", True, "worker", (), Leases),
    "list_obligations": CallSpec("list_obligations", "GET", "/v1/obligations", True, "principal", (), AllObligations),
    "list_open_obligations": CallSpec(
        "list_open_obligations", "GET", "/v1/obligations/open", True, "principal", (), Obligations),
    "list_pauses": CallSpec("list_pauses", "GET", "/v1/pauses", True, "", (), WorkPauses),
    "list_queues": CallSpec("list_queues", "GET", "/v1/queues", True, "principal", (), Queues),
    "list_receipts": CallSpec("list_receipts", "GET", "/v1/receipts", True, "principal", (), Receipts),
    "list_schedules": CallSpec("list_schedules", "GET", "/v1/schedules", True, "principal", (), Schedules),
    "list_seals": CallSpec("list_seals", "GET", "/v1/seals", True, "principal", (), Seals),
    "list_sessions": CallSpec("list_sessions", "GET", "/v1/sessions", True, "principal", (), Sessions),
    "list_signing_keys": CallSpec("list_signing_keys", "GET", "/v1/signing-keys", True, "", (), SigningKeyRecords),
    "list_tasks": CallSpec("list_tasks", "GET", "/v1/tasks", True, "principal", (), Tasks),
    "list_tenants": CallSpec("list_tenants", "GET", "/v1/tenants", True, "", (), Tenants),
    "list_types": CallSpec("list_types", "GET", "/v1/types", True, "", (), ServedTypes),
    "list_users": CallSpec("list_users", "GET", "/v1/users", True, "principal", (), Users),
    "list_webhooks": CallSpec("list_webhooks", "GET", "/v1/webhooks", True, "", (), Webhooks),
    "list_workers": CallSpec("list_workers", "GET", "/v1/workers", True, "principal", (), Workers),
    "make_sign_in_link": CallSpec("make_sign_in_link", "POST", "/v1/sign-in-links", False, "", (), MadeSignInLink),
    "pause_schedule": CallSpec(
        "pause_schedule", "POST", "/v1/schedules/{schedule_id}/pause", False, "principal", (), Created),
    "pause_work": CallSpec("pause_work", "POST", "/v1/pauses", True, "", (), PauseRecord),
    "preview_bulk": CallSpec("preview_bulk", "POST", "/v1/bulks/preview", True, "", (), BulkPreview),
    "ready": CallSpec("ready", "GET", "/v1/ready", True, "", (), Readiness),
    "register_client": CallSpec("register_client", "POST", "/v1/clients", False, "", (), RegisteredClient),
    "release_hold": CallSpec("release_hold", "POST", "/v1/tasks/{task_id}/release", False, "principal", (), Ok),
    "release_lease": CallSpec("release_lease", "POST", "/v1/leases/release", True, "worker", (), Released),
    "remove_client": CallSpec("remove_client", "POST", "/v1/clients/{client_id}/remove", False, "", (), Ok),
    "remove_user": CallSpec("remove_user", "POST", "/v1/users/{user_id}/remove", False, "", (), Ok),
    "remove_webhook": CallSpec("remove_webhook", "POST", "/v1/webhooks/{webhook_id}/remove", False, "", (), Ok),
    "renew_lease": CallSpec("renew_lease", "POST", "/v1/leases/renew", True, "worker", (), Renewed),
    "replay_deliveries": CallSpec(
        "replay_deliveries", "POST", "/v1/webhooks/{webhook_id}/replay", False, "", (), Replayed),
    "report_progress": CallSpec("report_progress", "POST", "/v1/tasks/{task_id}/progress", False, "worker", (), Ok),
    "report_schedule": CallSpec("report_schedule", "POST", "/v1/schedules/report", True, "worker", (), Reported),
    "rerun_task": CallSpec(
        "rerun_task", "POST", "/v1/tasks/{task_id}/rerun", True, "principal", ("idempotency_key",), Created),
    "restore_archive": CallSpec("restore_archive", "POST", "/v1/archive/{task_id}/restore", False, "", (), Restored),
    "resume_gate": CallSpec("resume_gate", "POST", "/v1/gate/resume", True, "", (), Drained),
    "resume_schedule": CallSpec(
        "resume_schedule", "POST", "/v1/schedules/{schedule_id}/resume", False, "principal", (), Created),
    "resume_work": CallSpec("resume_work", "POST", "/v1/pauses/resume", True, "", (), ResumedWork),
    "revoke_key": CallSpec("revoke_key", "POST", "/v1/keys/{key_id}/revoke", False, "", (), Ok),
    "revoke_token": CallSpec("revoke_token", "POST", "/v1/access-tokens/revoke", True, "", (), RevokedToken),
    "rotate_credentials": CallSpec(
        "rotate_credentials", "POST", "/v1/credentials/rotate", False, "", (), RotatedCredentials),
    "rotate_key": CallSpec("rotate_key", "POST", "/v1/keys/{key_id}/rotate", False, "", (), IssuedKey),
    "rotate_webhook_secret": CallSpec(
        "rotate_webhook_secret", "POST", "/v1/webhooks/{webhook_id}/rotate", False, "", (), CreatedWebhook),
    "run_archive": CallSpec("run_archive", "POST", "/v1/archive/run", False, "", (), ArchiveRun),
    "run_bulk": CallSpec("run_bulk", "POST", "/v1/bulks", True, "", (), BulkRecord),
    "run_schedule": CallSpec(
        "run_schedule", "POST", "/v1/schedules/{schedule_id}/run", False, "principal", (), Created),
    "run_task": CallSpec("run_task", "POST", "/v1/tasks/run", True, "principal", ("idempotency_key",), TaskRecord),
    "seal_receipts": CallSpec("seal_receipts", "POST", "/v1/seals", False, "", (), SealEnd),
    "search_tasks": CallSpec("search_tasks", "GET", "/v1/search", True, "principal", (), FoundTasks),
    "set_budget": CallSpec("set_budget", "POST", "/v1/budgets", True, "", (), BudgetReport),
    "set_limits": CallSpec("set_limits", "POST", "/v1/tenants/{tenant}/limits", False, "", (), Limits),
    "sign_out_everywhere": CallSpec("sign_out_everywhere", "POST", "/v1/sign-out", True, "", (), SignedOut),
    "start_task": CallSpec("start_task", "POST", "/v1/tasks/{task_id}/running", True, "worker", (), Ok),
    "suspend_tenant": CallSpec("suspend_tenant", "POST", "/v1/tenants/{tenant}/suspend", False, "", (), TenantRecord),
    "test_webhook": CallSpec("test_webhook", "POST", "/v1/webhooks/{webhook_id}/test", False, "", (), TestedWebhook),
    "whoami": CallSpec("whoami", "GET", "/v1/whoami", True, "", (), You),
    "withdraw_consent": CallSpec("withdraw_consent", "POST", "/v1/consents/withdraw", True, "", (), SignedOut),
}


class AsyncOperations:
    """All operations, async; the client fills in the caller."""

    async def ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:
        """Call an operation and return its reply; `reply` is its type."""
        raise NotImplementedError

    async def ack_receipt(
        self, receipt_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Acknowledge a receipt: writes a receipt.acknowledged, changes and discharges nothing (H.8)."""
        return await self.ask("ack_receipt", Ok, locals())

    async def attach_artifacts(
        self, task_id: str, *, artifacts: Any = None, delivery_proof: Mapping[str, Any] | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Say where the result of a succeeded task lies, which discharges its obligation (PH.3).

        For the owner, the worker that completed it, or an admin.  Writes nothing when nothing is owed any more.
        """
        return await self.ask("attach_artifacts", Ok, locals())

    async def bootstrap(
        self, *, since_receipt_id: str | None = None, limit: int | None = None, agent_version: str | None = None,
        client_capabilities: Any = None, max_items: int | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Welcome:
        """Begin a session with the receipts in one's inbox; deprecated, call list_open_obligations instead (PH.6.3).

        Without a cursor these are the most recent ones, oldest first (13).
        """
        return await self.ask("bootstrap", Welcome, locals())

    async def cancel_task(
        self, task_id: str, *, reason: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Cancel a task; its worker learns of it from its next call.

        For the owner, or an admin.  A task that has ended stays as it is: the answer is `ok: false` with its status,
        or the first answer again if it was canceled.
        """
        return await self.ask("cancel_task", Ok, locals())

    async def change_client(
        self, client_id: str, *, client_name: str | None = None, redirect_uris: Names | None = None,
        scopes: Names | None = None, trusted: bool | None = None, pinned: bool | None = None,
        disabled: bool | None = None, access_days: int | None = None, new_secret: bool | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> RegisteredClient:
        """Change a program; what is absent stays as it is.

        To disable it ends its sessions and refuses its tokens, within five seconds everywhere; they stay ended.
        """
        return await self.ask("change_client", RegisteredClient, locals())

    async def change_user(
        self, user_id: str, *, reason: str | None = None, role: GivenRole | None = None, scopes: Names | None = None,
        access_days: int | None = None, disabled: bool | None = None, tenant_id: str | None = None,
    ) -> UserRecord:
        """Change a person's role, scopes or token life, or disable the person.

        With other rights, and when disabled, all access tokens of the person are refused within five seconds, and its
        programs have to ask again.
        """
        return await self.ask("change_user", UserRecord, locals())

    async def change_webhook(
        self, webhook_id: str, *, tenant: str | None = None, endpoint: str | None = None, types: Names | None = None,
        principals: Names | None = None, description: str | None = None, active: bool | None = None,
        skip_missed: bool | None = None, tenant_id: str | None = None,
    ) -> WebhookRecord:
        """Change an endpoint; what is absent stays as it is.

        While it is not active nothing is delivered, and nothing is lost: with active: true it goes on where it stopped,
        or
        with skip_missed at what happens from now on.
        """
        return await self.ask("change_webhook", WebhookRecord, locals())

    async def check_terminator(
        self, parent_receipt_id: str, *, tenant_id: str | None = None,
    ) -> Terminator:
        """Tell whether an obligation is discharged, as the receipts prove it."""
        return await self.ask("check_terminator", Terminator, locals())

    async def complete(
        self, task_id: str, lease_id: str, *, fence: int | None = None, result: Any = None,
        result_summary: str | None = None, artifacts: Any = None, delivery_proof: Mapping[str, Any] | None = None,
        completion_metadata: Mapping[str, Any] | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """End a task well, with its result and where it can be found.

        Give artifacts or delivery_proof (or create the task with result_delivery: inline): without them the task
        succeeds but its obligation stays open, and strict gates refuse.  The same call again returns the same answer.
        """
        return await self.ask("complete", Ok, locals())

    async def complete_tasks(
        self, tasks: Sequence[Complete], *, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Items:
        """End up to 500 tasks well; each is completed or refused by itself, and the answer says which.

        When the call answers, every end without an error is durable.
        """
        return await self.ask("complete_tasks", Items, locals())

    async def create_task(
        self, type: str, *, payload: Any = None, payload_pointer: str | None = None, principal_ai: str | None = None,
        requirements: Mapping[str, Any] | None = None, priority: int | None = None, idempotency_key: str | None = None,
        max_attempts: int | None = None, retry_backoff_seconds: int | None = None, delay_seconds: float | None = None,
        max_expiries: int | None = None, task_summary: str | None = None, instructions: str | None = None,
        success_criteria: Any = None, expected_outcome_kind: str | None = None,
        expected_artifact_mime: str | None = None, result_delivery: str | None = None,
        timeouts: Timeouts | Mapping[str, Any] | None = None, created_by: CreatedBy | Mapping[str, Any] | None = None,
        tasker_principal: CreatedBy | Mapping[str, Any] | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None,
    ) -> Created:
        """Queue one task for any worker that has the capabilities it requires.

        The same idempotency key from the same creator again returns the first task and writes nothing.  Next:
        get_task with wait_seconds, or list_open_obligations later.  One transaction.  Spec 6.1, 14.1, PH.6.
        """
        return await self.ask("create_task", Created, locals())

    async def create_tasks(
        self, tasks: Sequence[CreateTask], *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Items:
        """Queue up to 500 tasks; each is created or refused by itself, and the answer says which.

        When the call answers, every task without an error is durable.  Who gets no answer repeats the call with the
        same idempotency keys.
        """
        return await self.ask("create_tasks", Items, locals())

    async def create_tenant(
        self, name: str, *, tenant: str | None = None, tier: Tier | None = None, tenant_id: str | None = None,
    ) -> TenantRecord:
        """Create a tenant with a unique name and a tier; a repeated call returns the tenant unchanged.

        For the operator.  Then issue_key makes its first key.  One transaction.  Spec 21.3.1.
        """
        return await self.ask("create_tenant", TenantRecord, locals())

    async def create_webhook(
        self, endpoint: str, *, tenant: str | None = None, types: Names | None = None, principals: Names | None = None,
        description: str | None = None, all_tenants: bool | None = None, tenant_id: str | None = None,
    ) -> CreatedWebhook:
        """Add an endpoint to which events of the tenant are posted from now on; only this answer shows its secret.

        Each request is signed as Standard Webhooks say, and its webhook-id is the id of the event, the same at each
        attempt.  A success is any 2xx.  Refused above webhooks.max_per_tenant.
        """
        return await self.ask("create_webhook", CreatedWebhook, locals())

    async def drain_gate(
        self, *, instance_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Drained:
        """Empty this process before it is stopped: /ready answers 503, waiting calls are answered, all others go on.

        It concerns the one process that answers, until it stops or resume_gate is called.  Call it again to see what is
        left.  For the operator.
        """
        return await self.ask("drain_gate", Drained, locals())

    async def drain_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, until: datetime | None = None,
        reason: str | None = None, wait_seconds: float | None = None, tenant_id: str | None = None,
    ) -> PauseRecord:
        """Pause, and wait up to wait_seconds until no lease of it is left; leases_left says how many are.

        Call it again until leases_left is 0.  The pause stays until resume_work; what is paused already keeps its
        until.
        """
        return await self.ask("drain_work", PauseRecord, locals())

    async def emit_receipt(
        self, receipt_type: str, *, task_id: str | None = None, lease_id: str | None = None, fence: int | None = None,
        schedule_id: str | None = None, parents: Names | None = None, body: Mapping[str, Any] | None = None,
        tenant_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Offer a receipt of one's own: a scheduler's schedule.created or schedule.deleted.

        schedule.created needs the live lease of a schedule.create task and goes to that task's creator;
        schedule.deleted names the schedule.created among its parents and discharges it.  Spec 8, PH.1.3, PH.2.
        """
        return await self.ask("emit_receipt", Ok, locals())

    async def end_session(
        self, session_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """End a session; its tokens are refused within five seconds.

        A program can end its own session only.
        """
        return await self.ask("end_session", Ok, locals())

    async def erase_principal(
        self, principal_id: str, *, tenant: str | None = None, principal_kind: Kind | None = None,
        plan: bool | None = None, confirm: str | None = None, vacuum: bool | None = None, tenant_id: str | None = None,
    ) -> ErasureReport:
        """Erase everything that is kept of a principal: first with plan, which changes nothing, then with confirm.

        Credentials go first, work in flight is canceled, obligations are discharged; receipts stay without content, so
        that
        seals and the chains of others stay sound.  An interrupted erasure goes on when it is called again.  Spec
        21.12.1.
        """
        return await self.ask("erase_principal", ErasureReport, locals())

    async def erase_tenant(
        self, tenant: str, *, plan: bool | None = None, confirm: str | None = None, vacuum: bool | None = None,
        tenant_id: str | None = None,
    ) -> ErasureReport:
        """Erase everything that is kept of a tenant: first with plan, which changes nothing, then with confirm.

        For the operator.  The tenant is suspended at once and stays so, without a name.  Receipts stay without content,
        so
        that its seals stay sound.  An interrupted erasure goes on when it is called again.  Spec 21.12.1.
        """
        return await self.ask("erase_tenant", ErasureReport, locals())

    async def examine_gate(
        self, *, tenant_id: str | None = None,
    ) -> Examination:
        """Examine the gate: settings, files, disk, clock, database, ledger, limits, upkeep; each finding has its cure.

        For the operator.  It changes nothing.  `asyncgate doctor` asks it too, and sees what it cannot: files that the
        settings came from, and a gate that does not run.
        """
        return await self.ask("examine_gate", Examination, locals())

    async def explain_task(
        self, task_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Explanation:
        """Tell why a task is not done: the cause, its evidence, the next call to make, and other causes that apply.

        For the owner, or an admin.  From what is stored; what other processes have seen of workers in the last half
        minute
        may be missing.
        """
        return await self.ask("explain_task", Explanation, locals())

    async def export_principal(
        self, *, principal_kind: Kind | None = None, principal_id: str | None = None, tenant: str | None = None,
        limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
    ) -> ExportPage:
        """Export everything about a principal, page by page; without principal_id, about the caller itself.

        That is what names it, the tasks that it owns or was the last to work on, and what belongs to these.  An admin
        may
        name any principal of its tenant; others export themselves, and need the scope admin:read for it.  `asyncgate
        export
        principal FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid for seven days.
        Spec 21.12.1.
        """
        return await self.ask("export_principal", ExportPage, locals())

    async def export_receipts(
        self, *, after: str | None = None, limit: int | None = None, tenant_id: str | None = None,
    ) -> Exported:
        """Export the tenant's receipts as they are stored, oldest first, up to 1,000 at a time.

        `asyncgate receipts export FILE` writes all of them into a file, with their seals.  Spec 20.9.
        """
        return await self.ask("export_receipts", Exported, locals())

    async def export_tenant(
        self, *, tenant: str | None = None, limit: int | None = None, cursor: str | None = None,
        tenant_id: str | None = None,
    ) -> ExportPage:
        """Export everything about a tenant, page by page, without secrets and their hashes.

        `asyncgate export tenant FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid
        for
        seven days.  Each page says when it was read.  Spec 21.12.1.
        """
        return await self.ask("export_tenant", ExportPage, locals())

    async def fail(
        self, task_id: str, lease_id: str, error: Any, *, fence: int | None = None, retryable: bool | None = None,
        retry_after_seconds: float | None = None, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Released:
        """End an attempt badly: the task waits and is offered again if retryable and attempts remain, else it failed.

        The first retry waits retry_backoff_seconds, each further one twice as long, up to 15 minutes.
        """
        return await self.ask("fail", Released, locals())

    async def find_id(
        self, part: str, *, tenant_id: str | None = None,
    ) -> FoundIds:
        """Find the whole id of a task, receipt or schedule from its last 12 digits, or from how it begins.

        Ends are looked for among the newest 200,000.  A schedule is found by its name, too.  Whoever is not an admin
        finds
        what they may read.
        """
        return await self.ask("find_id", FoundIds, locals())

    async def get_budgets(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> BudgetReport:
        """Return a tenant's monthly budgets, and how much of each it has used in this month (UTC)."""
        return await self.ask("get_budgets", BudgetReport, locals())

    async def get_bulk(
        self, bulk_id: str, *, tenant_id: str | None = None,
    ) -> BulkRecord:
        """Return how far a bulk is."""
        return await self.ask("get_bulk", BulkRecord, locals())

    async def get_config(
        self, *, tenant_id: str | None = None,
    ) -> GateConfig:
        """Return how this gate is set up: receipt mode, instance, version and what it can do."""
        return await self.ask("get_config", GateConfig, locals())

    async def get_limits(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> Limits:
        """Return a tenant's limits, its usage, and whether the limits are enforced; -1 is unlimited.

        Spec 21.4.2.
        """
        return await self.ask("get_limits", Limits, locals())

    async def get_queue(
        self, queue_id: str, *, minutes: int | None = None, tenant_id: str | None = None,
    ) -> QueueRecord:
        """Return how many tasks of one queue wait and how long, are on hold or leased, and what happened lately.

        The numbers of tasks are exact; what another process has seen in the last half minute may be missing from
        workers,
        last_minute and last_hour.
        """
        return await self.ask("get_queue", QueueRecord, locals())

    async def get_receipt(
        self, receipt_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> ReceiptRecord:
        """Return one receipt."""
        return await self.ask("get_receipt", ReceiptRecord, locals())

    async def get_task(
        self, task_id: str, *, wait_seconds: float | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> TaskRecord:
        """Return the full record of a task, with its result or error once it has ended.

        With wait_seconds the answer comes when the task ends, or when the time is over, whichever is first.
        """
        return await self.ask("get_task", TaskRecord, locals())

    async def get_task_history(
        self, task_id: str, *, limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> History:
        """Return what happened to a task, oldest first: its receipts, and the events that have none."""
        return await self.ask("get_task_history", History, locals())

    async def get_usage(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        all_tenants: bool | None = None, period: Period | None = None, since: datetime | None = None,
        until: datetime | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> UsageReport:
        """Return what a tenant used: tasks, lease-hours, stored bytes × hours and calls, by period.

        It is counted up to now; calls come up to a minute late.  A tenant's admin sees its own; the operator may name a
        tenant, or ask for all.  Spec 21.6.4.
        """
        return await self.ask("get_usage", UsageReport, locals())

    async def health(
        self, *, tenant_id: str | None = None,
    ) -> Healthy:
        """Tell whether the gate works: its database answers, and its upkeep jobs run."""
        return await self.ask("health", Healthy, locals())

    async def import_receipts(
        self, receipts: Sequence[StoredReceipt | Mapping[str, Any]], *, tenant_id: str | None = None,
    ) -> Imported:
        """Import up to 250 receipts of another gate unchanged, and open and close their obligations.

        Each is stored or refused by itself.  A repeated import is a no-op: a stored receipt stays, and one that differs
        is
        reported.  Parents must come before the receipts that answer them.  `asyncgate receipts import FILE` sends a
        whole
        file.  Spec 20.9.
        """
        return await self.ask("import_receipts", Imported, locals())

    async def invite_user(
        self, email: str, *, tenant: str | None = None, name: str | None = None, role: GivenRole | None = None,
        scopes: Names | None = None, access_days: int | None = None, tenant_id: str | None = None,
    ) -> UserRecord:
        """Invite a person by e-mail address: who signs in with it, verified by an identity provider, may come in.

        The person acts as the human principal with that address.  A repeated call changes an invitation that nobody has
        accepted yet.  Nothing is sent to the person.  An address that a rule of the operator gives to another tenant,
        by
        itself or by its domain, cannot be invited.  Refused above security.oauth.open_invitations.
        """
        return await self.ask("invite_user", UserRecord, locals())

    async def issue_key(
        self, name: str, principal_id: str, *, tenant: str | None = None, principal_kind: GivenKind | None = None,
        principal_instance_id: str | None = None, role: GivenRole | None = None, scopes: Names | None = None,
        capabilities: Names | None = None, task_types: Names | None = None, not_before: datetime | None = None,
        expires_at: datetime | None = None, tenant_id: str | None = None,
    ) -> IssuedKey:
        """Issue a key for a worker, an agent or a service; only this answer shows its text.

        The key identifies one principal of one tenant, with a role and scopes.  It can be limited to some capabilities
        and
        task types.  Refused above security.api_keys.keys_per_tenant.  Spec 21.2.2.
        """
        return await self.ask("issue_key", IssuedKey, locals())

    async def lease_next(
        self, *, capabilities: Names | None = None, accept_types: Names | None = None,
        preferred_kinds: Names | None = None, max_tasks: int | None = None, lease_ttl_seconds: int | None = None,
        wait_seconds: float | None = None, claim_id: str | None = None, process: str | None = None,
        tenant_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Offers:
        """Lease the next tasks that this worker can do: highest priority first, then oldest.

        Always answers with a list, empty when there is nothing; wait_seconds keeps the call open until work arrives.
        A lease runs out after lease_ttl_seconds: renew it every renew_every_seconds, then complete, fail or release it.
        Each lease is exclusive and atomic.  Spec 6.2, 18.8.
        """
        return await self.ask("lease_next", Offers, locals())

    async def list_archived_receipts(
        self, *, limit: int | None = None, cursor: str | None = None, task_id: str | None = None,
        receipt_id: str | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Receipts:
        """List archived receipts, oldest first: of a task, one by its id, or all; no other list shows them.

        Whoever could read a receipt before can read it here: the owner of its task, the worker that had its last lease,
        its
        sender and its recipient, and an admin, who alone may list all.  Spec H.11.
        """
        return await self.ask("list_archived_receipts", Receipts, locals())

    async def list_audit(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        event: str | None = None, severity: Severity | None = None, key_id: str | None = None,
        session_id: str | None = None, token_id: str | None = None, last: int | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> AuditLines:
        """List the tenant's audit log, oldest first; its lines never change.

        Lines are kept for security.audit_logging.retention_days, 90 at least.  Spec 21.7.4.
        """
        return await self.ask("list_audit", AuditLines, locals())

    async def list_clients(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Clients:
        """List the programs that may ask people for access: registered ones, and those that somebody signed in with."""
        return await self.ask("list_clients", Clients, locals())

    async def list_consents(
        self, *, limit: int | None = None, cursor: str | None = None, user_id: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Consents:
        """List what you let programs do; an admin sees all of its tenant.

        Not for a program that acts for a person.
        """
        return await self.ask("list_consents", Consents, locals())

    async def list_deliveries(
        self, webhook_id: str, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        state: DeliveryState | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Deliveries:
        """List what became of the events of an endpoint, the newest event first: attempts, answers, the next attempt.

        A delivery is listed for webhooks.log_days after its last attempt.
        """
        return await self.ask("list_deliveries", Deliveries, locals())

    async def list_erasures(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Erasures:
        """List the tenant's erasures, the oldest first, with their counts and proofs."""
        return await self.ask("list_erasures", Erasures, locals())

    async def list_keys(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Keys:
        """List the tenant's keys, also revoked ones, without their secret texts."""
        return await self.ask("list_keys", Keys, locals())

    async def list_leases(
        self, *, resume: bool | None = None, resumption_id: str | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Leases:
        """List the live leases of a worker, so that it can go on after a restart.

        Asking is resuming, unless resume is false: each process that resumes a lease counts as a loss of the one before
        it, and after max_expiries losses the task is on hold.  A repeated resumption_id counts once.
        """
        return await self.ask("list_leases", Leases, locals())

    async def list_obligations(
        self, *, limit: int | None = None, cursor: str | None = None, count: bool | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> AllObligations:
        """List what is still owed to anybody in the tenant, oldest first: to whom, how old, and for which task.

        With principal_id it is what is owed to that principal.
        """
        return await self.ask("list_obligations", AllObligations, locals())

    async def list_open_obligations(
        self, *, since_receipt_id: str | None = None, limit: int | None = None, wait_seconds: float | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Obligations:
        """List what is still owed to a principal: obligations that no receipt has discharged, oldest first.

        This is the call to begin with after forgetting everything.  Go on with cursor as since_receipt_id.  PH.6.
        """
        return await self.ask("list_open_obligations", Obligations, locals())

    async def list_pauses(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> WorkPauses:
        """List what is paused: since when, until when, by whom, why, and how many leases are left of each."""
        return await self.ask("list_pauses", WorkPauses, locals())

    async def list_queues(
        self, *, limit: int | None = None, cursor: str | None = None, type: str | None = None,
        minutes: int | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Queues:
        """List queues, by type: how many tasks wait in each and for how long, are on hold, or are leased.

        A queue is what has one type and requires the same capabilities.  One without a task for an hour is not listed.
        The numbers of tasks are exact; what another process has seen in the last half minute may be missing from
        workers,
        last_minute and last_hour.
        """
        return await self.ask("list_queues", Queues, locals())

    async def list_receipts(
        self, *, limit: int | None = None, cursor: str | None = None, to_kind: Kind | None = None,
        to_id: str | None = None, task_id: str | None = None, receipt_type: str | None = None,
        since_receipt_id: str | None = None, wait_seconds: float | None = None, newest: bool | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Receipts:
        """List receipts, oldest first: an inbox, or those of one task.

        Without a recipient it is the caller's own inbox; an admin who names nobody sees the whole tenant's.  Follow
        next_cursor, or since_receipt_id later on: every receipt comes exactly once.  With newest it is the last page.
        """
        return await self.ask("list_receipts", Receipts, locals())

    async def list_schedules(
        self, *, limit: int | None = None, cursor: str | None = None, runs: int | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Schedules:
        """List schedules as their schedulers last reported them: an agent's own, or any in the tenant for an admin.

        late_since is set once the next run is overdue.  In the order of their ids.
        """
        return await self.ask("list_schedules", Schedules, locals())

    async def list_seals(
        self, *, limit: int | None = None, cursor: str | None = None, after: int | None = None,
        last: int | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Seals:
        """List the seals over the tenant's receipts, oldest first."""
        return await self.ask("list_seals", Seals, locals())

    async def list_sessions(
        self, *, limit: int | None = None, cursor: str | None = None, user_id: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Sessions:
        """List your sessions with programs; an admin sees all of its tenant.  Ended ones are listed for some days.

        A program sees its own session only.
        """
        return await self.ask("list_sessions", Sessions, locals())

    async def list_signing_keys(
        self, *, tenant_id: str | None = None,
    ) -> SigningKeyRecords:
        """List the keys that sign access tokens, as the process that answers has them: the current one first.

        Retired keys verify until their time.  Without an authorization server there are none.  `asyncgate keys signing`
        makes and rotates them.
        """
        return await self.ask("list_signing_keys", SigningKeyRecords, locals())

    async def list_tasks(
        self, *, limit: int | None = None, cursor: str | None = None, status: Status | None = None,
        type: str | None = None, created_by: str | None = None, created_by_kind: Kind | None = None,
        created_after: datetime | None = None, created_before: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, type_prefix: str | None = None, summary_prefix: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Tasks:
        """List tasks, newest first: an agent's own, or any in the tenant for an admin."""
        return await self.ask("list_tasks", Tasks, locals())

    async def list_tenants(
        self, *, tenant_id: str | None = None,
    ) -> Tenants:
        """List all tenants, with their names and tiers.

        For the operator.
        """
        return await self.ask("list_tenants", Tenants, locals())

    async def list_types(
        self, *, tenant_id: str | None = None,
    ) -> ServedTypes:
        """List the types of tasks that workers have asked for in the last hour, and what those workers can do.

        A task requires at most the capabilities of one row.  A row without a type takes any.
        """
        return await self.ask("list_types", ServedTypes, locals())

    async def list_users(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        email: str | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Users:
        """List the people who may sign in or are invited, also disabled ones."""
        return await self.ask("list_users", Users, locals())

    async def list_webhooks(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> Webhooks:
        """List the endpoints of the tenant, without their secrets: what they are told, whether they fail, and why."""
        return await self.ask("list_webhooks", Webhooks, locals())

    async def list_workers(
        self, *, limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Workers:
        """List those who claim tasks: what they offer, what they hold and did, and when they were last seen.

        In the order of their kinds and ids.  What they hold is exact; what another process has seen in the last half
        minute
        may be missing from all else.
        """
        return await self.ask("list_workers", Workers, locals())

    async def make_sign_in_link(
        self, principal_id: str, *, tenant: str | None = None, principal_kind: GivenKind | None = None,
        role: GivenRole | None = None, scopes: Names | None = None, tenant_id: str | None = None,
    ) -> MadeSignInLink:
        """Make a link that signs somebody in once, within ten minutes; only this answer shows it.

        For teams without an identity provider.  The person opens it in the browser where a program has asked for
        access,
        or types its code there.  Refused above security.oauth.open_login_links.  Spec 21.2.1.
        """
        return await self.ask("make_sign_in_link", MadeSignInLink, locals())

    async def pause_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler pause it: for its owner, or an admin.  The answer is the task that does it."""
        return await self.ask("pause_schedule", Created, locals())

    async def pause_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, until: datetime | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> PauseRecord:
        """Pause a type, a lane (a type and capabilities), a worker, or the whole tenant: no new leases, also elsewhere.

        Running leases go on; leases_left says how many.  The same again changes until and reason.  Processes that share
        the database obey at once.
        """
        return await self.ask("pause_work", PauseRecord, locals())

    async def preview_bulk(
        self, action: BulkAction, *, priority: int | None = None, reason: str | None = None,
        status: Status | None = None, type: str | None = None, created_by: str | None = None,
        created_by_kind: Kind | None = None, created_after: datetime | None = None,
        created_before: datetime | None = None, ended_after: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, tenant_id: str | None = None,
    ) -> BulkPreview:
        """Count the tasks that a filter finds and show some; change nothing.  run_bulk then does it.

        It counts up to 1,000, and reads up to 5,000; at_least says whether there may be more.  A filter by held,
        status, type or created_by is the fastest.
        """
        return await self.ask("preview_bulk", BulkPreview, locals())

    async def ready(
        self, *, tenant_id: str | None = None,
    ) -> Readiness:
        """Tell a load balancer whether the gate takes new callers."""
        return await self.ask("ready", Readiness, locals())

    async def register_client(
        self, client_name: str, redirect_uris: Names, *, tenant: str | None = None, client_id: str | None = None,
        scopes: Names | None = None, trusted: bool | None = None, access_days: int | None = None,
        with_secret: bool | None = None, tenant_id: str | None = None,
    ) -> RegisteredClient:
        """Register a program that may ask people for access; a program on a server may get a secret, shown only now.

        An admin of a tenant registers it for the people of that tenant, the operator for everybody.  A tenant has
        security.oauth.clients_per_tenant at most.  Spec 21.8.2.
        """
        return await self.ask("register_client", RegisteredClient, locals())

    async def release_hold(
        self, task_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Offer a task that is on hold again; the count of its lost leases starts at zero.

        A task that has ended stays as it is: the answer is `ok: false` with its status.
        """
        return await self.ask("release_hold", Ok, locals())

    async def release_lease(
        self, task_id: str, lease_id: str, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Released:
        """Give a task back unfinished: it is offered again at once and costs neither attempt nor expiry."""
        return await self.ask("release_lease", Released, locals())

    async def remove_client(
        self, client_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Remove a program; that ends its sessions and refuses its tokens, within five seconds everywhere.

        One that registered itself may register again; one with a metadata document comes back when it asks again, so
        disable that one instead.
        """
        return await self.ask("remove_client", Ok, locals())

    async def remove_user(
        self, user_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Forget a person or an invitation, with all that the person has allowed; its access tokens are refused.

        Whoever still fits a rule of security.oauth.admit can come in again; to keep a person out, disable it instead.
        A
        repeated call is refused: the person is unknown.
        """
        return await self.ask("remove_user", Ok, locals())

    async def remove_webhook(
        self, webhook_id: str, *, tenant: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Remove an endpoint, its secrets and the list of its deliveries; a request on its way may still arrive."""
        return await self.ask("remove_webhook", Ok, locals())

    async def renew_lease(
        self, lease_id: str, *, task_id: str | None = None, fence: int | None = None,
        extend_by_seconds: int | None = None, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Renewed:
        """Keep a lease that is still alive; it runs extend_by_seconds from now, or as long as it was granted for.

        A renewal never shortens a lease: release_lease gives it back.  A lease that has run out cannot be renewed, even
        before the sweep has seen it (H.4).
        """
        return await self.ask("renew_lease", Renewed, locals())

    async def replay_deliveries(
        self, webhook_id: str, *, tenant: str | None = None, delivery_ids: Names | None = None,
        since: datetime | None = None, tenant_id: str | None = None,
    ) -> Replayed:
        """Deliver events again, under the ids that they had: those named, all since a time, or all that are parked.

        It also lets an endpoint that fails be tried again at once.
        """
        return await self.ask("replay_deliveries", Replayed, locals())

    async def report_progress(
        self, task_id: str, lease_id: str, progress: Any, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Report progress; if this worker is lost, the next one is handed it as a checkpoint."""
        return await self.ask("report_progress", Ok, locals())

    async def report_schedule(
        self, schedules: Sequence[ScheduleState | Mapping[str, Any]], *, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Reported:
        """Report when schedules run next, so that the gate notices when they do not (H.7.4)."""
        return await self.ask("report_schedule", Reported, locals())

    async def rerun_task(
        self, task_id: str, *, payload: Any = None, idempotency_key: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Created:
        """Run an ended task again: a new task with its contract and payload, for the same owner.

        For the owner, or an admin.  The ended task stays as it is; its history names the new task, whose rerun_of names
        it.
        A deadline is not taken over, and no delay.  The same idempotency key again returns the first task.
        """
        return await self.ask("rerun_task", Created, locals())

    async def restore_archive(
        self, task_id: str, *, tenant_id: str | None = None,
    ) -> Restored:
        """Restore a task's receipts from the archive, byte for byte, with those of the tasks joined to it.

        They stay in the database until the archive runs again.  One transaction.  Spec H.11.
        """
        return await self.ask("restore_archive", Restored, locals())

    async def resume_gate(
        self, *, instance_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Drained:
        """Take new callers again after drain_gate.  For the operator."""
        return await self.ask("resume_gate", Drained, locals())

    async def resume_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler resume it from now on: for its owner, or an admin.

        The answer is the task that does it.  Runs during the pause do not count as missed.
        """
        return await self.ask("resume_schedule", Created, locals())

    async def resume_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, reason: str | None = None,
        tenant_id: str | None = None,
    ) -> ResumedWork:
        """End a pause; claims that wait are called at once.

        whole_tenant ends only the pause of the whole tenant: types and workers that are paused stay so.
        """
        return await self.ask("resume_work", ResumedWork, locals())

    async def revoke_key(
        self, key_id: str, *, tenant: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Revoke a key: this process refuses it at once, others within five seconds; a repeated call is a no-op.

        A credential revokes only keys that it could issue: those without scopes that it lacks.  Spec 21.9.1.
        """
        return await self.ask("revoke_key", Ok, locals())

    async def revoke_token(
        self, *, tenant: str | None = None, token_id: str | None = None, access_token: str | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> RevokedToken:
        """Revoke one access token, of the gate or of another issuer, by its id (jti) or its text.

        This process refuses it at once, others within five seconds.  To end a session or all that a person has, see
        list_sessions and change_user; for all tokens of a tenant call rotate_credentials.  Spec 21.9.1.
        """
        return await self.ask("revoke_token", RevokedToken, locals())

    async def rotate_credentials(
        self, *, tenant: str | None = None, overlap_seconds: float | None = None,
        issued_before: datetime | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> RotatedCredentials:
        """Replace all valid keys of a tenant, end all its sessions, and refuse access tokens issued before now.

        People have to sign in again: their refresh tokens are refused, too.  Only this answer shows the new texts.  The
        old
        keys, also your own, stay valid for overlap_seconds, by default 0.
        While the answer has more, call again with its issued_before.  Spec 21.9.1.
        """
        return await self.ask("rotate_credentials", RotatedCredentials, locals())

    async def rotate_key(
        self, key_id: str, *, tenant: str | None = None, overlap_seconds: float | None = None,
        tenant_id: str | None = None,
    ) -> IssuedKey:
        """Replace a key by a new one with the same rights; the old one stays valid for overlap_seconds.

        Only this answer shows the new text.
        """
        return await self.ask("rotate_key", IssuedKey, locals())

    async def rotate_webhook_secret(
        self, webhook_id: str, *, tenant: str | None = None, overlap_seconds: float | None = None,
        tenant_id: str | None = None,
    ) -> CreatedWebhook:
        """Replace the signing secret of an endpoint; until the overlap is over, each request is signed with both.

        Only this answer shows the new secret.  The three secrets before it sign, each until its own overlap is over;
        overlap_seconds 0 withdraws all of them at once.
        """
        return await self.ask("rotate_webhook_secret", CreatedWebhook, locals())

    async def run_archive(
        self, *, most: int | None = None, vacuum: bool | None = None, tenant_id: str | None = None,
    ) -> ArchiveRun:
        """Move old receipts to the archive, and prune tasks that ended long ago; the operator does it for all tenants.

        With archive.enabled upkeep does it every hour.  Call again while the answer has more.  Spec H.11.
        """
        return await self.ask("run_archive", ArchiveRun, locals())

    async def run_bulk(
        self, confirmation: str, *, max_tasks: int | None = None, tenant_id: str | None = None,
    ) -> BulkRecord:
        """Do it to the tasks that preview_bulk has found: up to max_tasks of them, or for five seconds.

        While ended is false, call it again with the same confirmation; it goes on where it was, also after a crash, and
        does nothing twice.  Each task gets the receipts or the event that the single call would write.  A task that is
        run
        again counts as a new one: where the limit of new tasks is reached, what fits is done before the refusal.
        """
        return await self.ask("run_bulk", BulkRecord, locals())

    async def run_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler run it now, beside its plan and even if it is paused: for its owner, or an admin.

        The answer is the task that does it.
        """
        return await self.ask("run_schedule", Created, locals())

    async def run_task(
        self, type: str, *, payload: Any = None, payload_pointer: str | None = None, principal_ai: str | None = None,
        requirements: Mapping[str, Any] | None = None, priority: int | None = None, idempotency_key: str | None = None,
        max_attempts: int | None = None, retry_backoff_seconds: int | None = None, delay_seconds: float | None = None,
        max_expiries: int | None = None, task_summary: str | None = None, instructions: str | None = None,
        success_criteria: Any = None, expected_outcome_kind: str | None = None,
        expected_artifact_mime: str | None = None, result_delivery: str | None = None,
        timeouts: Timeouts | Mapping[str, Any] | None = None, created_by: CreatedBy | Mapping[str, Any] | None = None,
        tasker_principal: CreatedBy | Mapping[str, Any] | None = None, wait_seconds: float | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
    ) -> TaskRecord:
        """Queue one task and wait up to wait_seconds (30 at most) for its outcome.

        The answer is the task's record; when its status is not terminal yet, go on with get_task.
        """
        return await self.ask("run_task", TaskRecord, locals())

    async def seal_receipts(
        self, *, tenant_id: str | None = None,
    ) -> SealEnd:
        """Seal all unsealed receipts, and return the last seal's number and hash; upkeep does it every minute.

        Keep the number and the hash elsewhere: `asyncgate verify --ledger --seal NUMBER:HASH` proves later that no
        receipt
        up to last_receipt_id was rewritten.
        """
        return await self.ask("seal_receipts", SealEnd, locals())

    async def search_tasks(
        self, *, limit: int | None = None, cursor: str | None = None, status: Status | None = None,
        type: str | None = None, created_by: str | None = None, created_by_kind: Kind | None = None,
        created_after: datetime | None = None, created_before: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, type_prefix: str | None = None, summary_prefix: str | None = None,
        payload: str | None = None, tag: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> FoundTasks:
        """Search tasks by a member of their payload or by a label, newest first: an agent's own, or any for an admin.

        Each call looks at up to 2,000 of the tasks that the other filters leave, and stops once it has found limit of
        them
        or a few more: repeat it with next_cursor to look further, also if it has found none.
        """
        return await self.ask("search_tasks", FoundTasks, locals())

    async def set_budget(
        self, quantity: Quantity, *, tenant: str | None = None, monthly: int | None = None,
        tenant_id: str | None = None,
    ) -> BudgetReport:
        """Set how much of one quantity a tenant may use in each month (UTC), or remove that budget.

        Admins are told at 80 %.  At 100 % no task can be created until the month ends, or the budget is raised; at 100
        %
        of lease_hours no claim gets a lease either.  Running leases go on, and tasks that exist can end.  A tenant's
        admin
        sets its own; the operator may name a tenant.  Spec 21.6.4.
        """
        return await self.ask("set_budget", BudgetReport, locals())

    async def set_limits(
        self, tenant: str, *, tier: Tier | None = None, exempt_until: datetime | None = None,
        stricter_calls_per_hour: int | None = None, stricter_tasks_per_hour: int | None = None,
        stricter_until: datetime | None = None, max_payload_bytes: int | None = None,
        max_lease_ttl_seconds: int | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Limits:
        """Set a tenant's tier or own limits, exempt it from all for a time (21.4.5), or set stricter ones (21.9.2).

        For the operator.  An exemption and stricter limits need a reason.  Stricter limits, and a tenant's own ones of
        payloads and leases (21.6), are enforced even where other limits are not.  Other processes apply the change
        within
        five seconds; leases that are longer already go on to their end.
        """
        return await self.ask("set_limits", Limits, locals())

    async def sign_out_everywhere(
        self, *, user_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> SignedOut:
        """End all your sessions, in the console too, or as an admin those of a user.

        Not for a program that acts for a person.
        """
        return await self.ask("sign_out_everywhere", SignedOut, locals())

    async def start_task(
        self, task_id: str, lease_id: str, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Say that work on a leased task has begun; optional."""
        return await self.ask("start_task", Ok, locals())

    async def suspend_tenant(
        self, tenant: str, *, suspended: bool | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> TenantRecord:
        """Suspend a tenant, or end its suspension; within five seconds its credentials are refused or accepted again.

        For the operator.  Its tasks stay as they are; its leases run out.  Spec 21.9.
        """
        return await self.ask("suspend_tenant", TenantRecord, locals())

    async def test_webhook(
        self, webhook_id: str, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> TestedWebhook:
        """Post an event of the type webhook.test to an endpoint now, once, and tell what became of it.

        It works for an endpoint that is not active, too; a success does not make it active.
        """
        return await self.ask("test_webhook", TestedWebhook, locals())

    async def whoami(
        self, *, tenant_id: str | None = None,
    ) -> You:
        """Tell who the credential belongs to, and what it may do.

        With bound: false it belongs to nobody in particular: each request names its caller (principal_id, worker_id).
        """
        return await self.ask("whoami", You, locals())

    async def withdraw_consent(
        self, client_id: str, *, user_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> SignedOut:
        """Stop letting a program act for you, and end your sessions with it.

        Not for a program that acts for a person.
        """
        return await self.ask("withdraw_consent", SignedOut, locals())


class SyncOperations:
    """All operations, for synchronous code; the client fills in the caller."""

    def ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:
        """Call an operation and return its reply; `reply` is its type."""
        raise NotImplementedError

    def ack_receipt(
        self, receipt_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Acknowledge a receipt: writes a receipt.acknowledged, changes and discharges nothing (H.8)."""
        return self.ask("ack_receipt", Ok, locals())

    def attach_artifacts(
        self, task_id: str, *, artifacts: Any = None, delivery_proof: Mapping[str, Any] | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Say where the result of a succeeded task lies, which discharges its obligation (PH.3).

        For the owner, the worker that completed it, or an admin.  Writes nothing when nothing is owed any more.
        """
        return self.ask("attach_artifacts", Ok, locals())

    def bootstrap(
        self, *, since_receipt_id: str | None = None, limit: int | None = None, agent_version: str | None = None,
        client_capabilities: Any = None, max_items: int | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Welcome:
        """Begin a session with the receipts in one's inbox; deprecated, call list_open_obligations instead (PH.6.3).

        Without a cursor these are the most recent ones, oldest first (13).
        """
        return self.ask("bootstrap", Welcome, locals())

    def cancel_task(
        self, task_id: str, *, reason: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Cancel a task; its worker learns of it from its next call.

        For the owner, or an admin.  A task that has ended stays as it is: the answer is `ok: false` with its status,
        or the first answer again if it was canceled.
        """
        return self.ask("cancel_task", Ok, locals())

    def change_client(
        self, client_id: str, *, client_name: str | None = None, redirect_uris: Names | None = None,
        scopes: Names | None = None, trusted: bool | None = None, pinned: bool | None = None,
        disabled: bool | None = None, access_days: int | None = None, new_secret: bool | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> RegisteredClient:
        """Change a program; what is absent stays as it is.

        To disable it ends its sessions and refuses its tokens, within five seconds everywhere; they stay ended.
        """
        return self.ask("change_client", RegisteredClient, locals())

    def change_user(
        self, user_id: str, *, reason: str | None = None, role: GivenRole | None = None, scopes: Names | None = None,
        access_days: int | None = None, disabled: bool | None = None, tenant_id: str | None = None,
    ) -> UserRecord:
        """Change a person's role, scopes or token life, or disable the person.

        With other rights, and when disabled, all access tokens of the person are refused within five seconds, and its
        programs have to ask again.
        """
        return self.ask("change_user", UserRecord, locals())

    def change_webhook(
        self, webhook_id: str, *, tenant: str | None = None, endpoint: str | None = None, types: Names | None = None,
        principals: Names | None = None, description: str | None = None, active: bool | None = None,
        skip_missed: bool | None = None, tenant_id: str | None = None,
    ) -> WebhookRecord:
        """Change an endpoint; what is absent stays as it is.

        While it is not active nothing is delivered, and nothing is lost: with active: true it goes on where it stopped,
        or
        with skip_missed at what happens from now on.
        """
        return self.ask("change_webhook", WebhookRecord, locals())

    def check_terminator(
        self, parent_receipt_id: str, *, tenant_id: str | None = None,
    ) -> Terminator:
        """Tell whether an obligation is discharged, as the receipts prove it."""
        return self.ask("check_terminator", Terminator, locals())

    def complete(
        self, task_id: str, lease_id: str, *, fence: int | None = None, result: Any = None,
        result_summary: str | None = None, artifacts: Any = None, delivery_proof: Mapping[str, Any] | None = None,
        completion_metadata: Mapping[str, Any] | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """End a task well, with its result and where it can be found.

        Give artifacts or delivery_proof (or create the task with result_delivery: inline): without them the task
        succeeds but its obligation stays open, and strict gates refuse.  The same call again returns the same answer.
        """
        return self.ask("complete", Ok, locals())

    def complete_tasks(
        self, tasks: Sequence[Complete], *, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Items:
        """End up to 500 tasks well; each is completed or refused by itself, and the answer says which.

        When the call answers, every end without an error is durable.
        """
        return self.ask("complete_tasks", Items, locals())

    def create_task(
        self, type: str, *, payload: Any = None, payload_pointer: str | None = None, principal_ai: str | None = None,
        requirements: Mapping[str, Any] | None = None, priority: int | None = None, idempotency_key: str | None = None,
        max_attempts: int | None = None, retry_backoff_seconds: int | None = None, delay_seconds: float | None = None,
        max_expiries: int | None = None, task_summary: str | None = None, instructions: str | None = None,
        success_criteria: Any = None, expected_outcome_kind: str | None = None,
        expected_artifact_mime: str | None = None, result_delivery: str | None = None,
        timeouts: Timeouts | Mapping[str, Any] | None = None, created_by: CreatedBy | Mapping[str, Any] | None = None,
        tasker_principal: CreatedBy | Mapping[str, Any] | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None,
    ) -> Created:
        """Queue one task for any worker that has the capabilities it requires.

        The same idempotency key from the same creator again returns the first task and writes nothing.  Next:
        get_task with wait_seconds, or list_open_obligations later.  One transaction.  Spec 6.1, 14.1, PH.6.
        """
        return self.ask("create_task", Created, locals())

    def create_tasks(
        self, tasks: Sequence[CreateTask], *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Items:
        """Queue up to 500 tasks; each is created or refused by itself, and the answer says which.

        When the call answers, every task without an error is durable.  Who gets no answer repeats the call with the
        same idempotency keys.
        """
        return self.ask("create_tasks", Items, locals())

    def create_tenant(
        self, name: str, *, tenant: str | None = None, tier: Tier | None = None, tenant_id: str | None = None,
    ) -> TenantRecord:
        """Create a tenant with a unique name and a tier; a repeated call returns the tenant unchanged.

        For the operator.  Then issue_key makes its first key.  One transaction.  Spec 21.3.1.
        """
        return self.ask("create_tenant", TenantRecord, locals())

    def create_webhook(
        self, endpoint: str, *, tenant: str | None = None, types: Names | None = None, principals: Names | None = None,
        description: str | None = None, all_tenants: bool | None = None, tenant_id: str | None = None,
    ) -> CreatedWebhook:
        """Add an endpoint to which events of the tenant are posted from now on; only this answer shows its secret.

        Each request is signed as Standard Webhooks say, and its webhook-id is the id of the event, the same at each
        attempt.  A success is any 2xx.  Refused above webhooks.max_per_tenant.
        """
        return self.ask("create_webhook", CreatedWebhook, locals())

    def drain_gate(
        self, *, instance_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Drained:
        """Empty this process before it is stopped: /ready answers 503, waiting calls are answered, all others go on.

        It concerns the one process that answers, until it stops or resume_gate is called.  Call it again to see what is
        left.  For the operator.
        """
        return self.ask("drain_gate", Drained, locals())

    def drain_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, until: datetime | None = None,
        reason: str | None = None, wait_seconds: float | None = None, tenant_id: str | None = None,
    ) -> PauseRecord:
        """Pause, and wait up to wait_seconds until no lease of it is left; leases_left says how many are.

        Call it again until leases_left is 0.  The pause stays until resume_work; what is paused already keeps its
        until.
        """
        return self.ask("drain_work", PauseRecord, locals())

    def emit_receipt(
        self, receipt_type: str, *, task_id: str | None = None, lease_id: str | None = None, fence: int | None = None,
        schedule_id: str | None = None, parents: Names | None = None, body: Mapping[str, Any] | None = None,
        tenant_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Offer a receipt of one's own: a scheduler's schedule.created or schedule.deleted.

        schedule.created needs the live lease of a schedule.create task and goes to that task's creator;
        schedule.deleted names the schedule.created among its parents and discharges it.  Spec 8, PH.1.3, PH.2.
        """
        return self.ask("emit_receipt", Ok, locals())

    def end_session(
        self, session_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """End a session; its tokens are refused within five seconds.

        A program can end its own session only.
        """
        return self.ask("end_session", Ok, locals())

    def erase_principal(
        self, principal_id: str, *, tenant: str | None = None, principal_kind: Kind | None = None,
        plan: bool | None = None, confirm: str | None = None, vacuum: bool | None = None, tenant_id: str | None = None,
    ) -> ErasureReport:
        """Erase everything that is kept of a principal: first with plan, which changes nothing, then with confirm.

        Credentials go first, work in flight is canceled, obligations are discharged; receipts stay without content, so
        that
        seals and the chains of others stay sound.  An interrupted erasure goes on when it is called again.  Spec
        21.12.1.
        """
        return self.ask("erase_principal", ErasureReport, locals())

    def erase_tenant(
        self, tenant: str, *, plan: bool | None = None, confirm: str | None = None, vacuum: bool | None = None,
        tenant_id: str | None = None,
    ) -> ErasureReport:
        """Erase everything that is kept of a tenant: first with plan, which changes nothing, then with confirm.

        For the operator.  The tenant is suspended at once and stays so, without a name.  Receipts stay without content,
        so
        that its seals stay sound.  An interrupted erasure goes on when it is called again.  Spec 21.12.1.
        """
        return self.ask("erase_tenant", ErasureReport, locals())

    def examine_gate(
        self, *, tenant_id: str | None = None,
    ) -> Examination:
        """Examine the gate: settings, files, disk, clock, database, ledger, limits, upkeep; each finding has its cure.

        For the operator.  It changes nothing.  `asyncgate doctor` asks it too, and sees what it cannot: files that the
        settings came from, and a gate that does not run.
        """
        return self.ask("examine_gate", Examination, locals())

    def explain_task(
        self, task_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Explanation:
        """Tell why a task is not done: the cause, its evidence, the next call to make, and other causes that apply.

        For the owner, or an admin.  From what is stored; what other processes have seen of workers in the last half
        minute
        may be missing.
        """
        return self.ask("explain_task", Explanation, locals())

    def export_principal(
        self, *, principal_kind: Kind | None = None, principal_id: str | None = None, tenant: str | None = None,
        limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
    ) -> ExportPage:
        """Export everything about a principal, page by page; without principal_id, about the caller itself.

        That is what names it, the tasks that it owns or was the last to work on, and what belongs to these.  An admin
        may
        name any principal of its tenant; others export themselves, and need the scope admin:read for it.  `asyncgate
        export
        principal FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid for seven days.
        Spec 21.12.1.
        """
        return self.ask("export_principal", ExportPage, locals())

    def export_receipts(
        self, *, after: str | None = None, limit: int | None = None, tenant_id: str | None = None,
    ) -> Exported:
        """Export the tenant's receipts as they are stored, oldest first, up to 1,000 at a time.

        `asyncgate receipts export FILE` writes all of them into a file, with their seals.  Spec 20.9.
        """
        return self.ask("export_receipts", Exported, locals())

    def export_tenant(
        self, *, tenant: str | None = None, limit: int | None = None, cursor: str | None = None,
        tenant_id: str | None = None,
    ) -> ExportPage:
        """Export everything about a tenant, page by page, without secrets and their hashes.

        `asyncgate export tenant FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid
        for
        seven days.  Each page says when it was read.  Spec 21.12.1.
        """
        return self.ask("export_tenant", ExportPage, locals())

    def fail(
        self, task_id: str, lease_id: str, error: Any, *, fence: int | None = None, retryable: bool | None = None,
        retry_after_seconds: float | None = None, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Released:
        """End an attempt badly: the task waits and is offered again if retryable and attempts remain, else it failed.

        The first retry waits retry_backoff_seconds, each further one twice as long, up to 15 minutes.
        """
        return self.ask("fail", Released, locals())

    def find_id(
        self, part: str, *, tenant_id: str | None = None,
    ) -> FoundIds:
        """Find the whole id of a task, receipt or schedule from its last 12 digits, or from how it begins.

        Ends are looked for among the newest 200,000.  A schedule is found by its name, too.  Whoever is not an admin
        finds
        what they may read.
        """
        return self.ask("find_id", FoundIds, locals())

    def get_budgets(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> BudgetReport:
        """Return a tenant's monthly budgets, and how much of each it has used in this month (UTC)."""
        return self.ask("get_budgets", BudgetReport, locals())

    def get_bulk(
        self, bulk_id: str, *, tenant_id: str | None = None,
    ) -> BulkRecord:
        """Return how far a bulk is."""
        return self.ask("get_bulk", BulkRecord, locals())

    def get_config(
        self, *, tenant_id: str | None = None,
    ) -> GateConfig:
        """Return how this gate is set up: receipt mode, instance, version and what it can do."""
        return self.ask("get_config", GateConfig, locals())

    def get_limits(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> Limits:
        """Return a tenant's limits, its usage, and whether the limits are enforced; -1 is unlimited.

        Spec 21.4.2.
        """
        return self.ask("get_limits", Limits, locals())

    def get_queue(
        self, queue_id: str, *, minutes: int | None = None, tenant_id: str | None = None,
    ) -> QueueRecord:
        """Return how many tasks of one queue wait and how long, are on hold or leased, and what happened lately.

        The numbers of tasks are exact; what another process has seen in the last half minute may be missing from
        workers,
        last_minute and last_hour.
        """
        return self.ask("get_queue", QueueRecord, locals())

    def get_receipt(
        self, receipt_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> ReceiptRecord:
        """Return one receipt."""
        return self.ask("get_receipt", ReceiptRecord, locals())

    def get_task(
        self, task_id: str, *, wait_seconds: float | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> TaskRecord:
        """Return the full record of a task, with its result or error once it has ended.

        With wait_seconds the answer comes when the task ends, or when the time is over, whichever is first.
        """
        return self.ask("get_task", TaskRecord, locals())

    def get_task_history(
        self, task_id: str, *, limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> History:
        """Return what happened to a task, oldest first: its receipts, and the events that have none."""
        return self.ask("get_task_history", History, locals())

    def get_usage(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        all_tenants: bool | None = None, period: Period | None = None, since: datetime | None = None,
        until: datetime | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> UsageReport:
        """Return what a tenant used: tasks, lease-hours, stored bytes × hours and calls, by period.

        It is counted up to now; calls come up to a minute late.  A tenant's admin sees its own; the operator may name a
        tenant, or ask for all.  Spec 21.6.4.
        """
        return self.ask("get_usage", UsageReport, locals())

    def health(
        self, *, tenant_id: str | None = None,
    ) -> Healthy:
        """Tell whether the gate works: its database answers, and its upkeep jobs run."""
        return self.ask("health", Healthy, locals())

    def import_receipts(
        self, receipts: Sequence[StoredReceipt | Mapping[str, Any]], *, tenant_id: str | None = None,
    ) -> Imported:
        """Import up to 250 receipts of another gate unchanged, and open and close their obligations.

        Each is stored or refused by itself.  A repeated import is a no-op: a stored receipt stays, and one that differs
        is
        reported.  Parents must come before the receipts that answer them.  `asyncgate receipts import FILE` sends a
        whole
        file.  Spec 20.9.
        """
        return self.ask("import_receipts", Imported, locals())

    def invite_user(
        self, email: str, *, tenant: str | None = None, name: str | None = None, role: GivenRole | None = None,
        scopes: Names | None = None, access_days: int | None = None, tenant_id: str | None = None,
    ) -> UserRecord:
        """Invite a person by e-mail address: who signs in with it, verified by an identity provider, may come in.

        The person acts as the human principal with that address.  A repeated call changes an invitation that nobody has
        accepted yet.  Nothing is sent to the person.  An address that a rule of the operator gives to another tenant,
        by
        itself or by its domain, cannot be invited.  Refused above security.oauth.open_invitations.
        """
        return self.ask("invite_user", UserRecord, locals())

    def issue_key(
        self, name: str, principal_id: str, *, tenant: str | None = None, principal_kind: GivenKind | None = None,
        principal_instance_id: str | None = None, role: GivenRole | None = None, scopes: Names | None = None,
        capabilities: Names | None = None, task_types: Names | None = None, not_before: datetime | None = None,
        expires_at: datetime | None = None, tenant_id: str | None = None,
    ) -> IssuedKey:
        """Issue a key for a worker, an agent or a service; only this answer shows its text.

        The key identifies one principal of one tenant, with a role and scopes.  It can be limited to some capabilities
        and
        task types.  Refused above security.api_keys.keys_per_tenant.  Spec 21.2.2.
        """
        return self.ask("issue_key", IssuedKey, locals())

    def lease_next(
        self, *, capabilities: Names | None = None, accept_types: Names | None = None,
        preferred_kinds: Names | None = None, max_tasks: int | None = None, lease_ttl_seconds: int | None = None,
        wait_seconds: float | None = None, claim_id: str | None = None, process: str | None = None,
        tenant_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Offers:
        """Lease the next tasks that this worker can do: highest priority first, then oldest.

        Always answers with a list, empty when there is nothing; wait_seconds keeps the call open until work arrives.
        A lease runs out after lease_ttl_seconds: renew it every renew_every_seconds, then complete, fail or release it.
        Each lease is exclusive and atomic.  Spec 6.2, 18.8.
        """
        return self.ask("lease_next", Offers, locals())

    def list_archived_receipts(
        self, *, limit: int | None = None, cursor: str | None = None, task_id: str | None = None,
        receipt_id: str | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Receipts:
        """List archived receipts, oldest first: of a task, one by its id, or all; no other list shows them.

        Whoever could read a receipt before can read it here: the owner of its task, the worker that had its last lease,
        its
        sender and its recipient, and an admin, who alone may list all.  Spec H.11.
        """
        return self.ask("list_archived_receipts", Receipts, locals())

    def list_audit(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        event: str | None = None, severity: Severity | None = None, key_id: str | None = None,
        session_id: str | None = None, token_id: str | None = None, last: int | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> AuditLines:
        """List the tenant's audit log, oldest first; its lines never change.

        Lines are kept for security.audit_logging.retention_days, 90 at least.  Spec 21.7.4.
        """
        return self.ask("list_audit", AuditLines, locals())

    def list_clients(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Clients:
        """List the programs that may ask people for access: registered ones, and those that somebody signed in with."""
        return self.ask("list_clients", Clients, locals())

    def list_consents(
        self, *, limit: int | None = None, cursor: str | None = None, user_id: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Consents:
        """List what you let programs do; an admin sees all of its tenant.

        Not for a program that acts for a person.
        """
        return self.ask("list_consents", Consents, locals())

    def list_deliveries(
        self, webhook_id: str, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        state: DeliveryState | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Deliveries:
        """List what became of the events of an endpoint, the newest event first: attempts, answers, the next attempt.

        A delivery is listed for webhooks.log_days after its last attempt.
        """
        return self.ask("list_deliveries", Deliveries, locals())

    def list_erasures(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Erasures:
        """List the tenant's erasures, the oldest first, with their counts and proofs."""
        return self.ask("list_erasures", Erasures, locals())

    def list_keys(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Keys:
        """List the tenant's keys, also revoked ones, without their secret texts."""
        return self.ask("list_keys", Keys, locals())

    def list_leases(
        self, *, resume: bool | None = None, resumption_id: str | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Leases:
        """List the live leases of a worker, so that it can go on after a restart.

        Asking is resuming, unless resume is false: each process that resumes a lease counts as a loss of the one before
        it, and after max_expiries losses the task is on hold.  A repeated resumption_id counts once.
        """
        return self.ask("list_leases", Leases, locals())

    def list_obligations(
        self, *, limit: int | None = None, cursor: str | None = None, count: bool | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> AllObligations:
        """List what is still owed to anybody in the tenant, oldest first: to whom, how old, and for which task.

        With principal_id it is what is owed to that principal.
        """
        return self.ask("list_obligations", AllObligations, locals())

    def list_open_obligations(
        self, *, since_receipt_id: str | None = None, limit: int | None = None, wait_seconds: float | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Obligations:
        """List what is still owed to a principal: obligations that no receipt has discharged, oldest first.

        This is the call to begin with after forgetting everything.  Go on with cursor as since_receipt_id.  PH.6.
        """
        return self.ask("list_open_obligations", Obligations, locals())

    def list_pauses(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> WorkPauses:
        """List what is paused: since when, until when, by whom, why, and how many leases are left of each."""
        return self.ask("list_pauses", WorkPauses, locals())

    def list_queues(
        self, *, limit: int | None = None, cursor: str | None = None, type: str | None = None,
        minutes: int | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Queues:
        """List queues, by type: how many tasks wait in each and for how long, are on hold, or are leased.

        A queue is what has one type and requires the same capabilities.  One without a task for an hour is not listed.
        The numbers of tasks are exact; what another process has seen in the last half minute may be missing from
        workers,
        last_minute and last_hour.
        """
        return self.ask("list_queues", Queues, locals())

    def list_receipts(
        self, *, limit: int | None = None, cursor: str | None = None, to_kind: Kind | None = None,
        to_id: str | None = None, task_id: str | None = None, receipt_type: str | None = None,
        since_receipt_id: str | None = None, wait_seconds: float | None = None, newest: bool | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Receipts:
        """List receipts, oldest first: an inbox, or those of one task.

        Without a recipient it is the caller's own inbox; an admin who names nobody sees the whole tenant's.  Follow
        next_cursor, or since_receipt_id later on: every receipt comes exactly once.  With newest it is the last page.
        """
        return self.ask("list_receipts", Receipts, locals())

    def list_schedules(
        self, *, limit: int | None = None, cursor: str | None = None, runs: int | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Schedules:
        """List schedules as their schedulers last reported them: an agent's own, or any in the tenant for an admin.

        late_since is set once the next run is overdue.  In the order of their ids.
        """
        return self.ask("list_schedules", Schedules, locals())

    def list_seals(
        self, *, limit: int | None = None, cursor: str | None = None, after: int | None = None,
        last: int | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Seals:
        """List the seals over the tenant's receipts, oldest first."""
        return self.ask("list_seals", Seals, locals())

    def list_sessions(
        self, *, limit: int | None = None, cursor: str | None = None, user_id: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Sessions:
        """List your sessions with programs; an admin sees all of its tenant.  Ended ones are listed for some days.

        A program sees its own session only.
        """
        return self.ask("list_sessions", Sessions, locals())

    def list_signing_keys(
        self, *, tenant_id: str | None = None,
    ) -> SigningKeyRecords:
        """List the keys that sign access tokens, as the process that answers has them: the current one first.

        Retired keys verify until their time.  Without an authorization server there are none.  `asyncgate keys signing`
        makes and rotates them.
        """
        return self.ask("list_signing_keys", SigningKeyRecords, locals())

    def list_tasks(
        self, *, limit: int | None = None, cursor: str | None = None, status: Status | None = None,
        type: str | None = None, created_by: str | None = None, created_by_kind: Kind | None = None,
        created_after: datetime | None = None, created_before: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, type_prefix: str | None = None, summary_prefix: str | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Tasks:
        """List tasks, newest first: an agent's own, or any in the tenant for an admin."""
        return self.ask("list_tasks", Tasks, locals())

    def list_tenants(
        self, *, tenant_id: str | None = None,
    ) -> Tenants:
        """List all tenants, with their names and tiers.

        For the operator.
        """
        return self.ask("list_tenants", Tenants, locals())

    def list_types(
        self, *, tenant_id: str | None = None,
    ) -> ServedTypes:
        """List the types of tasks that workers have asked for in the last hour, and what those workers can do.

        A task requires at most the capabilities of one row.  A row without a type takes any.
        """
        return self.ask("list_types", ServedTypes, locals())

    def list_users(
        self, *, limit: int | None = None, cursor: str | None = None, tenant: str | None = None,
        email: str | None = None, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Users:
        """List the people who may sign in or are invited, also disabled ones."""
        return self.ask("list_users", Users, locals())

    def list_webhooks(
        self, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> Webhooks:
        """List the endpoints of the tenant, without their secrets: what they are told, whether they fail, and why."""
        return self.ask("list_webhooks", Webhooks, locals())

    def list_workers(
        self, *, limit: int | None = None, cursor: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Workers:
        """List those who claim tasks: what they offer, what they hold and did, and when they were last seen.

        In the order of their kinds and ids.  What they hold is exact; what another process has seen in the last half
        minute
        may be missing from all else.
        """
        return self.ask("list_workers", Workers, locals())

    def make_sign_in_link(
        self, principal_id: str, *, tenant: str | None = None, principal_kind: GivenKind | None = None,
        role: GivenRole | None = None, scopes: Names | None = None, tenant_id: str | None = None,
    ) -> MadeSignInLink:
        """Make a link that signs somebody in once, within ten minutes; only this answer shows it.

        For teams without an identity provider.  The person opens it in the browser where a program has asked for
        access,
        or types its code there.  Refused above security.oauth.open_login_links.  Spec 21.2.1.
        """
        return self.ask("make_sign_in_link", MadeSignInLink, locals())

    def pause_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler pause it: for its owner, or an admin.  The answer is the task that does it."""
        return self.ask("pause_schedule", Created, locals())

    def pause_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, until: datetime | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> PauseRecord:
        """Pause a type, a lane (a type and capabilities), a worker, or the whole tenant: no new leases, also elsewhere.

        Running leases go on; leases_left says how many.  The same again changes until and reason.  Processes that share
        the database obey at once.
        """
        return self.ask("pause_work", PauseRecord, locals())

    def preview_bulk(
        self, action: BulkAction, *, priority: int | None = None, reason: str | None = None,
        status: Status | None = None, type: str | None = None, created_by: str | None = None,
        created_by_kind: Kind | None = None, created_after: datetime | None = None,
        created_before: datetime | None = None, ended_after: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, tenant_id: str | None = None,
    ) -> BulkPreview:
        """Count the tasks that a filter finds and show some; change nothing.  run_bulk then does it.

        It counts up to 1,000, and reads up to 5,000; at_least says whether there may be more.  A filter by held,
        status, type or created_by is the fastest.
        """
        return self.ask("preview_bulk", BulkPreview, locals())

    def ready(
        self, *, tenant_id: str | None = None,
    ) -> Readiness:
        """Tell a load balancer whether the gate takes new callers."""
        return self.ask("ready", Readiness, locals())

    def register_client(
        self, client_name: str, redirect_uris: Names, *, tenant: str | None = None, client_id: str | None = None,
        scopes: Names | None = None, trusted: bool | None = None, access_days: int | None = None,
        with_secret: bool | None = None, tenant_id: str | None = None,
    ) -> RegisteredClient:
        """Register a program that may ask people for access; a program on a server may get a secret, shown only now.

        An admin of a tenant registers it for the people of that tenant, the operator for everybody.  A tenant has
        security.oauth.clients_per_tenant at most.  Spec 21.8.2.
        """
        return self.ask("register_client", RegisteredClient, locals())

    def release_hold(
        self, task_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None, worker_id: str | None = None, worker_kind: Kind | None = None,
        worker_instance_id: str | None = None,
    ) -> Ok:
        """Offer a task that is on hold again; the count of its lost leases starts at zero.

        A task that has ended stays as it is: the answer is `ok: false` with its status.
        """
        return self.ask("release_hold", Ok, locals())

    def release_lease(
        self, task_id: str, lease_id: str, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Released:
        """Give a task back unfinished: it is offered again at once and costs neither attempt nor expiry."""
        return self.ask("release_lease", Released, locals())

    def remove_client(
        self, client_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Remove a program; that ends its sessions and refuses its tokens, within five seconds everywhere.

        One that registered itself may register again; one with a metadata document comes back when it asks again, so
        disable that one instead.
        """
        return self.ask("remove_client", Ok, locals())

    def remove_user(
        self, user_id: str, *, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Forget a person or an invitation, with all that the person has allowed; its access tokens are refused.

        Whoever still fits a rule of security.oauth.admit can come in again; to keep a person out, disable it instead.
        A
        repeated call is refused: the person is unknown.
        """
        return self.ask("remove_user", Ok, locals())

    def remove_webhook(
        self, webhook_id: str, *, tenant: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Remove an endpoint, its secrets and the list of its deliveries; a request on its way may still arrive."""
        return self.ask("remove_webhook", Ok, locals())

    def renew_lease(
        self, lease_id: str, *, task_id: str | None = None, fence: int | None = None,
        extend_by_seconds: int | None = None, tenant_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Renewed:
        """Keep a lease that is still alive; it runs extend_by_seconds from now, or as long as it was granted for.

        A renewal never shortens a lease: release_lease gives it back.  A lease that has run out cannot be renewed, even
        before the sweep has seen it (H.4).
        """
        return self.ask("renew_lease", Renewed, locals())

    def replay_deliveries(
        self, webhook_id: str, *, tenant: str | None = None, delivery_ids: Names | None = None,
        since: datetime | None = None, tenant_id: str | None = None,
    ) -> Replayed:
        """Deliver events again, under the ids that they had: those named, all since a time, or all that are parked.

        It also lets an endpoint that fails be tried again at once.
        """
        return self.ask("replay_deliveries", Replayed, locals())

    def report_progress(
        self, task_id: str, lease_id: str, progress: Any, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Report progress; if this worker is lost, the next one is handed it as a checkpoint."""
        return self.ask("report_progress", Ok, locals())

    def report_schedule(
        self, schedules: Sequence[ScheduleState | Mapping[str, Any]], *, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Reported:
        """Report when schedules run next, so that the gate notices when they do not (H.7.4)."""
        return self.ask("report_schedule", Reported, locals())

    def rerun_task(
        self, task_id: str, *, payload: Any = None, idempotency_key: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Created:
        """Run an ended task again: a new task with its contract and payload, for the same owner.

        For the owner, or an admin.  The ended task stays as it is; its history names the new task, whose rerun_of names
        it.
        A deadline is not taken over, and no delay.  The same idempotency key again returns the first task.
        """
        return self.ask("rerun_task", Created, locals())

    def restore_archive(
        self, task_id: str, *, tenant_id: str | None = None,
    ) -> Restored:
        """Restore a task's receipts from the archive, byte for byte, with those of the tasks joined to it.

        They stay in the database until the archive runs again.  One transaction.  Spec H.11.
        """
        return self.ask("restore_archive", Restored, locals())

    def resume_gate(
        self, *, instance_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Drained:
        """Take new callers again after drain_gate.  For the operator."""
        return self.ask("resume_gate", Drained, locals())

    def resume_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler resume it from now on: for its owner, or an admin.

        The answer is the task that does it.  Runs during the pause do not count as missed.
        """
        return self.ask("resume_schedule", Created, locals())

    def resume_work(
        self, *, tenant: str | None = None, type: str | None = None, capabilities: Names | None = None,
        worker: str | None = None, whole_tenant: bool | None = None, reason: str | None = None,
        tenant_id: str | None = None,
    ) -> ResumedWork:
        """End a pause; claims that wait are called at once.

        whole_tenant ends only the pause of the whole tenant: types and workers that are paused stay so.
        """
        return self.ask("resume_work", ResumedWork, locals())

    def revoke_key(
        self, key_id: str, *, tenant: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Ok:
        """Revoke a key: this process refuses it at once, others within five seconds; a repeated call is a no-op.

        A credential revokes only keys that it could issue: those without scopes that it lacks.  Spec 21.9.1.
        """
        return self.ask("revoke_key", Ok, locals())

    def revoke_token(
        self, *, tenant: str | None = None, token_id: str | None = None, access_token: str | None = None,
        reason: str | None = None, tenant_id: str | None = None,
    ) -> RevokedToken:
        """Revoke one access token, of the gate or of another issuer, by its id (jti) or its text.

        This process refuses it at once, others within five seconds.  To end a session or all that a person has, see
        list_sessions and change_user; for all tokens of a tenant call rotate_credentials.  Spec 21.9.1.
        """
        return self.ask("revoke_token", RevokedToken, locals())

    def rotate_credentials(
        self, *, tenant: str | None = None, overlap_seconds: float | None = None,
        issued_before: datetime | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> RotatedCredentials:
        """Replace all valid keys of a tenant, end all its sessions, and refuse access tokens issued before now.

        People have to sign in again: their refresh tokens are refused, too.  Only this answer shows the new texts.  The
        old
        keys, also your own, stay valid for overlap_seconds, by default 0.
        While the answer has more, call again with its issued_before.  Spec 21.9.1.
        """
        return self.ask("rotate_credentials", RotatedCredentials, locals())

    def rotate_key(
        self, key_id: str, *, tenant: str | None = None, overlap_seconds: float | None = None,
        tenant_id: str | None = None,
    ) -> IssuedKey:
        """Replace a key by a new one with the same rights; the old one stays valid for overlap_seconds.

        Only this answer shows the new text.
        """
        return self.ask("rotate_key", IssuedKey, locals())

    def rotate_webhook_secret(
        self, webhook_id: str, *, tenant: str | None = None, overlap_seconds: float | None = None,
        tenant_id: str | None = None,
    ) -> CreatedWebhook:
        """Replace the signing secret of an endpoint; until the overlap is over, each request is signed with both.

        Only this answer shows the new secret.  The three secrets before it sign, each until its own overlap is over;
        overlap_seconds 0 withdraws all of them at once.
        """
        return self.ask("rotate_webhook_secret", CreatedWebhook, locals())

    def run_archive(
        self, *, most: int | None = None, vacuum: bool | None = None, tenant_id: str | None = None,
    ) -> ArchiveRun:
        """Move old receipts to the archive, and prune tasks that ended long ago; the operator does it for all tenants.

        With archive.enabled upkeep does it every hour.  Call again while the answer has more.  Spec H.11.
        """
        return self.ask("run_archive", ArchiveRun, locals())

    def run_bulk(
        self, confirmation: str, *, max_tasks: int | None = None, tenant_id: str | None = None,
    ) -> BulkRecord:
        """Do it to the tasks that preview_bulk has found: up to max_tasks of them, or for five seconds.

        While ended is false, call it again with the same confirmation; it goes on where it was, also after a crash, and
        does nothing twice.  Each task gets the receipts or the event that the single call would write.  A task that is
        run
        again counts as a new one: where the limit of new tasks is reached, what fits is done before the refusal.
        """
        return self.ask("run_bulk", BulkRecord, locals())

    def run_schedule(
        self, schedule_id: str, *, tenant_id: str | None = None, principal_kind: Kind | None = None,
        principal_id: str | None = None, principal_instance_id: str | None = None, agent_id: str | None = None,
        agent_instance_id: str | None = None,
    ) -> Created:
        """Let a schedule's scheduler run it now, beside its plan and even if it is paused: for its owner, or an admin.

        The answer is the task that does it.
        """
        return self.ask("run_schedule", Created, locals())

    def run_task(
        self, type: str, *, payload: Any = None, payload_pointer: str | None = None, principal_ai: str | None = None,
        requirements: Mapping[str, Any] | None = None, priority: int | None = None, idempotency_key: str | None = None,
        max_attempts: int | None = None, retry_backoff_seconds: int | None = None, delay_seconds: float | None = None,
        max_expiries: int | None = None, task_summary: str | None = None, instructions: str | None = None,
        success_criteria: Any = None, expected_outcome_kind: str | None = None,
        expected_artifact_mime: str | None = None, result_delivery: str | None = None,
        timeouts: Timeouts | Mapping[str, Any] | None = None, created_by: CreatedBy | Mapping[str, Any] | None = None,
        tasker_principal: CreatedBy | Mapping[str, Any] | None = None, wait_seconds: float | None = None,
        tenant_id: str | None = None, principal_kind: Kind | None = None, principal_id: str | None = None,
        principal_instance_id: str | None = None, agent_id: str | None = None, agent_instance_id: str | None = None,
    ) -> TaskRecord:
        """Queue one task and wait up to wait_seconds (30 at most) for its outcome.

        The answer is the task's record; when its status is not terminal yet, go on with get_task.
        """
        return self.ask("run_task", TaskRecord, locals())

    def seal_receipts(
        self, *, tenant_id: str | None = None,
    ) -> SealEnd:
        """Seal all unsealed receipts, and return the last seal's number and hash; upkeep does it every minute.

        Keep the number and the hash elsewhere: `asyncgate verify --ledger --seal NUMBER:HASH` proves later that no
        receipt
        up to last_receipt_id was rewritten.
        """
        return self.ask("seal_receipts", SealEnd, locals())

    def search_tasks(
        self, *, limit: int | None = None, cursor: str | None = None, status: Status | None = None,
        type: str | None = None, created_by: str | None = None, created_by_kind: Kind | None = None,
        created_after: datetime | None = None, created_before: datetime | None = None, id_prefix: str | None = None,
        held: bool | None = None, type_prefix: str | None = None, summary_prefix: str | None = None,
        payload: str | None = None, tag: str | None = None, tenant_id: str | None = None,
        principal_kind: Kind | None = None, principal_id: str | None = None, principal_instance_id: str | None = None,
        agent_id: str | None = None, agent_instance_id: str | None = None, worker_id: str | None = None,
        worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> FoundTasks:
        """Search tasks by a member of their payload or by a label, newest first: an agent's own, or any for an admin.

        Each call looks at up to 2,000 of the tasks that the other filters leave, and stops once it has found limit of
        them
        or a few more: repeat it with next_cursor to look further, also if it has found none.
        """
        return self.ask("search_tasks", FoundTasks, locals())

    def set_budget(
        self, quantity: Quantity, *, tenant: str | None = None, monthly: int | None = None,
        tenant_id: str | None = None,
    ) -> BudgetReport:
        """Set how much of one quantity a tenant may use in each month (UTC), or remove that budget.

        Admins are told at 80 %.  At 100 % no task can be created until the month ends, or the budget is raised; at 100
        %
        of lease_hours no claim gets a lease either.  Running leases go on, and tasks that exist can end.  A tenant's
        admin
        sets its own; the operator may name a tenant.  Spec 21.6.4.
        """
        return self.ask("set_budget", BudgetReport, locals())

    def set_limits(
        self, tenant: str, *, tier: Tier | None = None, exempt_until: datetime | None = None,
        stricter_calls_per_hour: int | None = None, stricter_tasks_per_hour: int | None = None,
        stricter_until: datetime | None = None, max_payload_bytes: int | None = None,
        max_lease_ttl_seconds: int | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> Limits:
        """Set a tenant's tier or own limits, exempt it from all for a time (21.4.5), or set stricter ones (21.9.2).

        For the operator.  An exemption and stricter limits need a reason.  Stricter limits, and a tenant's own ones of
        payloads and leases (21.6), are enforced even where other limits are not.  Other processes apply the change
        within
        five seconds; leases that are longer already go on to their end.
        """
        return self.ask("set_limits", Limits, locals())

    def sign_out_everywhere(
        self, *, user_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> SignedOut:
        """End all your sessions, in the console too, or as an admin those of a user.

        Not for a program that acts for a person.
        """
        return self.ask("sign_out_everywhere", SignedOut, locals())

    def start_task(
        self, task_id: str, lease_id: str, *, fence: int | None = None, tenant_id: str | None = None,
        worker_id: str | None = None, worker_kind: Kind | None = None, worker_instance_id: str | None = None,
    ) -> Ok:
        """Say that work on a leased task has begun; optional."""
        return self.ask("start_task", Ok, locals())

    def suspend_tenant(
        self, tenant: str, *, suspended: bool | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> TenantRecord:
        """Suspend a tenant, or end its suspension; within five seconds its credentials are refused or accepted again.

        For the operator.  Its tasks stay as they are; its leases run out.  Spec 21.9.
        """
        return self.ask("suspend_tenant", TenantRecord, locals())

    def test_webhook(
        self, webhook_id: str, *, tenant: str | None = None, tenant_id: str | None = None,
    ) -> TestedWebhook:
        """Post an event of the type webhook.test to an endpoint now, once, and tell what became of it.

        It works for an endpoint that is not active, too; a success does not make it active.
        """
        return self.ask("test_webhook", TestedWebhook, locals())

    def whoami(
        self, *, tenant_id: str | None = None,
    ) -> You:
        """Tell who the credential belongs to, and what it may do.

        With bound: false it belongs to nobody in particular: each request names its caller (principal_id, worker_id).
        """
        return self.ask("whoami", You, locals())

    def withdraw_consent(
        self, client_id: str, *, user_id: str | None = None, reason: str | None = None, tenant_id: str | None = None,
    ) -> SignedOut:
        """Stop letting a program act for you, and end your sessions with it.

        Not for a program that acts for a person.
        """
        return self.ask("withdraw_consent", SignedOut, locals())
