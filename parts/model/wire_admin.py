"""What goes over the wire to administer the gate: tenants, issued keys, limits, audit (spec 21)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, wire

Tier = Literal["free", "paid", "enterprise"]
# The schema lists the scopes; the gate refuses others with a better message than msgspec's.
Scope = Annotated[str, Meta(max_length=50, extra_json_schema={"enum": [
    "tasks:read", "tasks:write", "tasks:lease", "receipts:read", "receipts:ack", "admin:read", "admin:write"]})]
Scopes = Annotated[frozenset[Scope], Meta(max_length=20)]
Severity = Literal["info", "warning", "critical"]
Uuid = Annotated[str, Meta(pattern="^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$(?!\\n)")]
Whose = Annotated[wire.Name | None,
                  wire.says("the tenant, by id or name; only an operator may name another than its own")]
Amount = Annotated[int, Meta(ge=0, le=2**53 - 1)]
OwnLimit = Annotated[int, Meta(ge=-1, le=2**53 - 1)]
Overlap = Annotated[float, Meta(ge=0, le=30 * 86_400), wire.says("seconds that the old key stays valid; default a day")]


class CreateTenant(wire.Ask, kw_only=True):
    """Create a tenant."""

    example = ({"tenant": examples.OTHER, "name": "Reading Room", "tier": "paid"}, examples.ROOM)
    tenant: Annotated[Uuid | None, wire.says("a UUID; generated if absent")] = None
    name: Annotated[wire.Name, wire.says("a unique name, accepted wherever the id is")]
    tier: Annotated[Tier | None, wire.says("default: security.rate_limiting.default_tier")] = None


class ListTenants(wire.Ask, kw_only=True):
    """List the tenants."""

    example = ({}, {"tenants": [examples.ROOM]})


class TenantAsk(wire.Ask, kw_only=True):
    """A request about one tenant."""

    needed: ClassVar[tuple[str, ...]] = ("tenant",)
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None


class SuspendTenant(TenantAsk, kw_only=True):
    """Suspend a tenant, or end its suspension."""

    example = ({"tenant": examples.OTHER, "reason": "a key of theirs was published"},
               {**examples.ROOM, "suspended_at": examples.LATER})
    suspended: Annotated[bool, wire.says("false lets it in again")] = True
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class GetLimits(wire.Ask, kw_only=True):
    """Read the limits of a tenant."""

    example = ({"tenant": examples.TENANT_ID}, examples.ALLOWED)
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None


class SetLimits(TenantAsk, kw_only=True):
    """Change the limits of a tenant."""

    example = ({"tenant": examples.TENANT_ID, "tier": "free", "exempt_until": examples.LATER,
                "reason": "the move of all their tasks"},
               {**examples.ALLOWED, "exempt_until": examples.LATER})
    tier: Annotated[Tier | None, wire.says("the limits that apply unless others are set")] = None
    exempt_until: Annotated[wire.Moment | None,
                            wire.says("no limits until then; a past time ends the exemption")] = None
    stricter_calls_per_hour: Annotated[Amount | None, wire.says("limit of calls an hour until stricter_until")] = None
    stricter_tasks_per_hour: Annotated[Amount | None,
                                       wire.says("limit of new tasks an hour until stricter_until")] = None
    stricter_until: Annotated[wire.Moment | None,
                              wire.says("end of the stricter limits; a past time ends them now")] = None
    max_payload_bytes: Annotated[OwnLimit | None, wire.says(
        "largest payload of a task; at most the gate's own limit, which -1 brings back")] = None
    max_lease_ttl_seconds: Annotated[OwnLimit | None, wire.says(
        "longest lease, to which claims and renewals are clamped; at most the gate's own, which -1 brings back")] = None
    reason: Annotated[wire.Text | None,
                      wire.says("why; required for an exemption or stricter limits, and audited")] = None


class IssueKey(wire.Ask, kw_only=True):
    """Issue a key."""

    example = ({"name": "the reader", "principal_kind": "worker", "principal_id": "reader-1", "task_types": [
        "page.summarize"], "expires_at": "2099-01-01T00:00:00Z"},
               {"api_key": f"aga_{examples.KEY_ID}…", "key": examples.KEY})
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None
    name: Annotated[wire.Name, wire.says("a name for people")]
    principal_kind: Annotated[wire.GivenKind, wire.says("kind of whom the key stands for")] = "agent"
    principal_id: Annotated[wire.Name, wire.says("the principal of the key")]
    principal_instance_id: Annotated[wire.Name | None,
                                     wire.says("the session that the key is for; default: any")] = None
    role: Annotated[wire.GivenRole | None, wire.says("default worker for a worker, agent for others")] = None
    scopes: Annotated[Scopes | None, wire.says("default: those of the role")] = None
    capabilities: Annotated[wire.Capabilities | None,
                            wire.says("capabilities that it may claim tasks for; default any")] = None
    task_types: Annotated[wire.Types | None, wire.says("types that it may create and claim; default any")] = None
    not_before: Annotated[wire.Moment | None, wire.says("from when it is valid")] = None
    expires_at: Annotated[wire.Moment | None, wire.says("until when it is valid")] = None


class ListKeys(wire.PageAsk, kw_only=True):
    """List issued keys."""

    example = ({"limit": 20}, {"keys": [examples.KEY]})
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None


class KeyAsk(wire.Ask, kw_only=True):
    """A request about one key."""

    needed: ClassVar[tuple[str, ...]] = ("key_id",)
    refusals = (errors.TenantNotFound, errors.KeyNotFound)
    key_id: Annotated[wire.Name, wire.says("the key; list_keys shows it")] = ""
    tenant: Whose = None


class RotateKey(KeyAsk, kw_only=True):
    """Replace a key."""

    example = ({"key_id": examples.KEY_ID, "overlap_seconds": 3600}, {"api_key": "aga_7dRtQ0cLZx2u…", "key": {
        **examples.KEY, "key_id": "7dRtQ0cLZx2u"}})
    overlap_seconds: Overlap = 86_400.0


class RotateCredentials(wire.Ask, kw_only=True):
    """Replace all credentials of a tenant."""

    example = ({"overlap_seconds": 0, "reason": "a laptop was stolen"}, {
        "keys": [{"api_key": "aga_7dRtQ0cLZx2u…", "key": {**examples.KEY, "key_id": "7dRtQ0cLZx2u"}}],
        "issued_before": examples.NOW,
        "more": False, "sessions": 3})
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None
    overlap_seconds: Annotated[float, Meta(ge=0, le=30 * 86_400),
                               wire.says("seconds that the old keys stay valid")] = 0.0
    issued_before: Annotated[wire.Moment | None, wire.says("only replace keys issued before then; default now")] = None
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class RevokeKey(KeyAsk, kw_only=True):
    """Revoke a key."""

    example = ({"key_id": examples.KEY_ID, "reason": "published by mistake"}, {"ok": True})
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class ListAudit(wire.PageAsk, kw_only=True):
    """Read the audit log."""

    example = ({"severity": "warning", "limit": 20}, {"lines": [{
        "audit_id": "000000000007", "tenant_id": examples.TENANT_ID, "number": 7, "timestamp": examples.NOW,
        "event": "key_revoked", "severity": "warning", "principal_id": "ada", "ip": "192.0.2.7",
        "user_agent": "asyncgate-client/0.1.0", "reason": None,
        "details": {"principal_kind": "human", "principal_id": "ada", "revoked": examples.KEY_ID},
        "hash": "5d0c1e72" * 8}]})
    refusals = (errors.TenantNotFound,)
    tenant: Whose = None
    event: Annotated[wire.Name | None, wire.says("only this event")] = None
    severity: Annotated[Severity | None, wire.says("only this severity")] = None
    key_id: Annotated[wire.Name | None, wire.says("only lines about this key or its calls")] = None
    session_id: Annotated[wire.Name | None, wire.says("only lines about this session or calls with its tokens")] = None
    token_id: Annotated[wire.Name | None, wire.says("only lines about calls with this access token, its jti")] = None
    last: Annotated[wire.Whole | None,
                    wire.says("begin with the last so many lines; those asked for are among them")] = None


class TenantRecord(Struct, omit_defaults=True):
    """A tenant."""

    tenant: str
    name: str
    tier: str
    created_at: datetime | None = None
    suspended_at: datetime | None = None
    exempt_until: datetime | None = None
    exempt_why: str | None = None


class Tenants(Struct):
    """All tenants."""

    columns = "tenant name tier suspended_at exempt_until"
    tenants: list[TenantRecord]


class Used(Struct):
    """A tenant's use of its limits, now and within the last hour; null if it is not counted."""

    active_tasks: int
    concurrent_leases: int
    receipt_storage_bytes: int
    terminal_tasks: int
    step_storage_bytes: int
    tasks_this_hour: int | None = None
    api_calls_this_hour: int | None = None


class Limits(Struct):
    """The limits of a tenant; -1 is unlimited."""

    tenant: str
    tier: str
    enforced: bool
    tasks_per_hour: int
    api_calls_per_hour: int
    active_tasks: int
    concurrent_leases: int
    receipt_storage_gb: int
    step_storage_gb: int
    terminal_tasks: int
    receipts_per_task: int
    max_payload_bytes: int
    max_lease_ttl_seconds: int
    exempt_until: datetime | None = None
    stricter_until: datetime | None = None
    stricter_why: str | None = None
    used: Used | None = None


class KeyRecord(Struct, omit_defaults=True):
    """An issued key, without its text."""

    key_id: str
    tenant: str
    name: str
    principal_kind: str
    principal_id: str
    role: str
    scopes: list[str]
    created_at: datetime
    created_by: str
    not_before: datetime
    principal_instance_id: str | None = None
    capabilities: list[str] | None = None
    task_types: list[str] | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    rotated_to: str | None = None
    last_used_at: datetime | None = None


class IssuedKey(Struct):
    """A new key; its text is shown only now and stored nowhere."""

    api_key: str
    key: KeyRecord


class RotatedCredentials(Struct):
    """New keys that replace old ones; their texts are shown only now and stored nowhere."""

    keys: list[IssuedKey]
    issued_before: datetime     # keys from before were replaced; access tokens from before are refused
    more: bool                  # whether to call again with this issued_before
    sessions: int = 0           # of people, which were ended


class Keys(Struct):
    """A page of keys."""

    columns = "key_id name principal_kind principal_id role expires_at revoked_at rotated_to last_used_at"
    keys: list[KeyRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class AuditLine(Struct):
    """One line of the audit log; each hash covers the line and the previous hash."""

    audit_id: str
    number: int
    tenant_id: str
    timestamp: datetime
    event: str
    severity: str
    principal_id: str | None    # who did it, if known
    ip: str | None
    user_agent: str | None
    reason: str | None
    details: wire.AnyJson       # all known facts, including the four fields above
    hash: str


class AuditLines(Struct):
    """A page of the audit log, oldest first."""

    columns = "number timestamp severity event details"
    lines: list[AuditLine]
    next_cursor: str | None = None
    cursor: str | None = None
    broken: str | None = None       # where the chain of hashes breaks among the lines that were read; null: nowhere


class Ready(wire.Ask, kw_only=True):
    """Check whether the gate takes new callers."""

    example = ({}, {"ready": True, "migrated": True, "database": True, "joined": True, "draining": False})
    refusals = (errors.NotReady,)


class Readiness(Struct):
    """Whether the gate takes new callers, and each check by itself; a refusal has the same members."""

    ready: bool
    migrated: bool      # the schema is one that this process knows how to use
    database: bool      # it has answered
    joined: bool        # the process has its place among those that share the database
    draining: bool      # it is being emptied: by an admin, or because it stops


class DrainGate(wire.Ask, kw_only=True):
    """Empty one process."""

    example = ({"reason": "release 0.2"},
               {"instance_id": "asyncgate-1", "draining": True, "since": examples.NOW, "requests": 2,
                "waiting": 1, "leases": 7})
    refusals = (errors.Misdirected,)
    instance_id: Annotated[wire.Name | None, wire.says("the process that is meant; any other one refuses")] = None
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class ResumeGate(DrainGate, kw_only=True):
    """Take new callers again."""

    example = ({"reason": "release 0.2 waits"}, {"instance_id": "asyncgate-1", "draining": False, "since": None,
                                                 "requests": 2, "waiting": 9, "leases": 7})


class Drained(Struct):
    """What is left of a process that is being emptied."""

    instance_id: str
    draining: bool
    since: datetime | None
    requests: int       # under way, without this one
    waiting: int        # calls and subscriptions among them that wait for something
    leases: int         # that this process has granted or renewed and that live; they outlive it
