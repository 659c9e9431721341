"""The parts of the examples of requests and replies; each request holds its whole example."""

from __future__ import annotations

from typing import Any

Example = tuple[dict[str, Any], dict[str, Any]]     # request and reply

TASK_ID, DUTY = "019a8f3c-51de-7a10-9c6e-0d3a51b7f2c4", "019a8f3c-51de-7a11-8f02-6b9d40e1c7aa"
NEXT_TASK_ID = "019a8f4a-7c02-7b3e-8d15-4a90c7e6b1f3"
DONE, LEASE = "019a8f3d-0b42-7c03-a1de-94c2f07b5e18", "6f1f0c8e-2a5b-4b57-9a0e-3d8f4c1b2a90"
TENANT_ID, NOW, LATER = "00000000-0000-0000-0000-000000000000", "2026-11-21T09:30:00Z", "2026-11-21T09:35:00Z"
FAR = "2099-01-01T00:00:00Z"        # as a time that a request may name
ADA, WORKER = {"kind": "agent", "id": "ada"}, {"kind": "worker", "id": "reader-1"}
OWNER = {**ADA, "principal_kind": "agent", "principal_id": "ada"}      # in both spellings (spec 3)
HOLDER = {"task_id": TASK_ID, "lease_id": LEASE, "worker_id": "reader-1"}
WORK, NEEDS = {"type": "page.summarize", "payload": {"url": "https://example.org/a"}}, {"capabilities": ["web.read"]}
SUMMARY = {"result": {"summary": "Three pages on rivers."}, "artifacts": [{"type": "file", "uri": "file:///out/a.md"}]}
TASK_RECORD = {
    "task_id": TASK_ID, "tenant_id": TENANT_ID, **WORK, "status": "succeeded", "created_by": OWNER,
    "principal_ai": "ada", "payload_pointer": None, "requirements": NEEDS, "priority": 0, "attempt": 0,
    "max_attempts": 3, "retry_backoff_seconds": 30, "fence": 1, "expiries": 0, "max_expiries": 10, "parks": 0,
    "steps": 0, "outputs": 0, "held": None, "idempotency_key": "page-a", "asyncgate_instance": "asyncgate-1",
    "obligation_receipt_id": DUTY, "obligation_open": False, "created_at": NOW, "updated_at": LATER,
    "next_eligible_at": None, "started_at": NOW,
    "result": {"outcome": "succeeded", "error": None, **SUMMARY, "completed_at": LATER}}
OFFER = {name: TASK_RECORD[name] for name in (
    "task_id", "tenant_id", "type", "payload", "payload_pointer", "requirements", "principal_ai", "created_by",
    "attempt", "fence", "obligation_receipt_id")} | {
    "lease_id": LEASE, "expires_at": LATER, "renew_every_seconds": 100.0, "caused_by_receipt_id": DUTY}
ASSIGNED: dict[str, Any] = {
    "receipt_id": DUTY, "tenant_id": TENANT_ID, "receipt_type": "task.assigned", "created_at": NOW, "from": ADA,
    "to": ADA, "task_id": TASK_ID, "lease_id": None, "schedule_id": None, "parents": [],
    "asyncgate_instance": "asyncgate-1", "body": {"type": "page.summarize", "schema_version": "1"},
    "hash": "9b1f5f0f" * 8}
STORED_RECEIPT = {
    "receipt_id": DUTY, "receipt_key": "5d0c1e72" * 8, "receipt_type": "task.assigned", "created_at": 1771502400.0,
    "from_kind": "agent", "from_id": "ada", "to_kind": "agent", "to_id": "ada", "task_id": TASK_ID, "lease_id": None,
    "schedule_id": None, "asyncgate_instance": "asyncgate-1", "parents": [], "hash": "9b1f5f0f" * 8,
    "body": '{"schema_version":"1","type":"page.summarize"}'}
SELF: dict[str, Any] = {"version": "0.1.0", "instance_id": "asyncgate-1"}
SERVER = {"name": "AsyncGate", **SELF, "environment": "local", "uptime": 4711}
ASKER: dict[str, Any] = {"principal_kind": "agent", "principal_id": "ada"}
SEEN = {**ASKER, "principal_instance_id": None, "first_seen_at": NOW, "last_seen_at": LATER, "sessions_count": 2}
OTHER, KEY_ID = "3c9d1f52-7a3e-4d0b-9f43-5b1e6c2a8d70", "4fK8sWq1ZbXe"
ROOM = {"tenant": OTHER, "name": "Reading Room", "tier": "paid", "created_at": NOW}
ALLOWED = {"tenant": TENANT_ID, "tier": "free", "enforced": True, "tasks_per_hour": 100, "api_calls_per_hour": 1000,
           "active_tasks": 1000, "concurrent_leases": 10, "receipt_storage_gb": 1, "step_storage_gb": 1,
           "terminal_tasks": -1, "receipts_per_task": -1, "max_payload_bytes": 1048576,
           "max_lease_ttl_seconds": 1800}
PAUSED = {"type": "page.summarize", "capabilities": None, "worker": None, "whole_tenant": False, "since": NOW,
          "until": FAR, "reason": "the model is down", "paused_by": {"kind": "human", "id": "root"}, "leases_left": 2}
KEY = {"key_id": KEY_ID, "tenant": TENANT_ID, "name": "the reader", "principal_kind": "worker",
       "principal_id": "reader-1", "role": "worker", "scopes": ["receipts:read", "tasks:lease"],
       "task_types": ["page.summarize"], "created_at": NOW, "created_by": "human ada", "not_before": NOW,
       "expires_at": FAR}
CLIENT_ID = "8d1f6f0a-5b7c-4f6e-9a53-2f0c7e4b9d11"
CLIENT = {"client_id": CLIENT_ID, "origin": "registered", "client_name": "My Agent",
          "redirect_uris": ["https://myapp.com/oauth/callback"], "auth_method": "none", "created_at": NOW,
          "created_by": "human ada", "updated_at": NOW, "scopes": ["receipts:read", "tasks:read", "tasks:write"]}
JTI = "0198c5a0-7d7e-7c3f-9a51-2f7b0c6d1e42"
KID = "9TBkpWZTAq6zvY3GXrP8Ad_r1FK9uOEweIdORdMrg8A"
USER_ID = "c1f8f0c4-6a43-5b55-8d1e-0f0a5f1f2a66"
SESSION_ID = "5f0c3a1e-9d24-4a6b-8c57-1e2d3c4b5a69"
SESSION = {"session_id": SESSION_ID, "user_id": USER_ID, "client_id": CLIENT_ID,
           "tenant": TENANT_ID, "principal_kind": "human", "principal_id": "ada", "role": "agent",
           "scopes": ["tasks:read", "tasks:write"], "resource": "https://gate.example.com/mcp", "begun_at": NOW,
           "ends_at": FAR, "client_name": "My Agent", "last_used_at": LATER, "place": "192.0.2.0/24"}
PERSON = {"user_id": USER_ID, "state": "active", "tenant": TENANT_ID, "principal_kind": "human",
          "principal_id": "ada@example.com", "role": "agent", "admitted_by": "human root", "created_at": NOW,
          "email": "ada@example.com", "name": "Ada Lovelace", "issuer": "https://id.example.com", "subject": "24400320",
          "last_seen_at": NOW}
WEBHOOK_ID = "0198c5a0-8b1f-7e52-8d10-6a4e2f9c7b33"
WEBHOOK = {"webhook_id": WEBHOOK_ID, "tenant": TENANT_ID, "endpoint": "https://hooks.example.com/asyncgate",
           "types": ["task.result_ready"], "principals": ["ada"], "state": "active", "created_at": NOW,
           "created_by": "human root", "updated_at": NOW, "description": "results for the mailer",
           "succeeded_at": LATER}
