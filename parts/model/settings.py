"""The settings: what an operator may change, and where each value comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from ipaddress import ip_network
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, convert

from asyncgate.parts.model import errors
from asyncgate.parts.model.durations import parse_seconds

__all__ = [
    "Configured", "DatabaseSettings", "Settings", "SettingsError", "Tier", "list_idle", "list_settings", "list_values",
    "load_settings"]


IDLE = "Has no effect: "
READING_MS = 30_000     # for reads that no caller waits for


def says(text: str, *, secret: bool = False) -> Meta:
    """Describe a setting in one sentence; a secret is never shown, and may come from a file or a command."""
    return Meta(description=text, extra={"secret": secret, "in_file": secret} if secret else {})


def decides_nothing(because: str) -> Meta:
    """Describe a setting that the spec names and no code reads: a gate warns at its start when somebody sets it."""
    return Meta(description=f"{IDLE}{because}", extra={"idle": True})


def span(low: float, high: float, what: str = "a whole number") -> Meta:
    return Meta(ge=low, le=high, title=f"{what} from {low} to {high}")


Positive = Annotated[int, span(1, 2**31 - 1)]
Natural = Annotated[int, span(0, 2**31 - 1)]
Size = Annotated[int, span(1, 2**30)]
Class = Annotated[int, span(0, 1_000_000)]
PageSize = Annotated[int, span(1, 10_000)]
Days = Annotated[int, span(1, 36_500)]
Ttl = Annotated[int, span(1, 604_800)]
Quota = Annotated[int, span(-1, 2**53 - 1)]
Duration = Annotated[float, span(0, 86_400, "a number")]
Timer = Annotated[float, span(0.01, 86_400, "a number")]
Url = Annotated[str, Meta(pattern=r"\A([a-z][a-z0-9+.-]*://.*)?\Z", title="a URL, as scheme://rest",
                          extra={"in_file": True})]     # it may hold a password
Uuid = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", title="a UUID in lower case")]
OneTenant = Annotated[str, Meta(pattern=r"\A([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\Z",
                                title="a UUID in lower case, or empty")]
Label = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{0,100}\Z", title="up to 100 letters, digits, dots, - and _")]
LedgerProfile = Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9_]*\Z",
                                title="memorygate, receiptgate, or the name of a sink")]
Filled = Annotated[str, Meta(min_length=1, title="text that is not empty")]
Texts = Annotated[tuple[str, ...], Meta(title="a list of text, split by commas or in JSON")]
TypeLimits = Annotated[tuple[Annotated[str, Meta(pattern="^[^=]+=[^:]{1,64}(:[^\\x00]{0,200})?$")], ...],
                       Meta(title="a list of text, split by commas or in JSON")]
OwnerKind = Literal["agent", "worker", "service", "system", "human", "asyncgate"]
ReceiptMode = Literal["standalone", "memorygate_integrated", "receiptgate_integrated"]
Locatability = Literal["lenient", "strict"]
Mismatch = Literal["return", "refuse"]
Unknown = Literal["warn", "refuse", "ignore"]
Consistency = Literal["eventual", "strict"]
StoreFailure = Literal["local", "deny"]
ToolNames = Literal["dotted", "underscore"]
Dialect = Literal["auto", "1.0", "1.1"]
Contents = Literal["clear", "digests"]
TlsVersion = Literal["TLSv1.2", "TLSv1.3"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that belong together: one mapping of the YAML file."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # values stay out of logs and tracebacks: some are secret


class DatabaseSettings(Group, frozen=True):
    """Where tasks and receipts are stored."""

    url: Annotated[Url, Meta(min_length=1), says(
        "Where to store everything; the scheme picks the backend")] = "sqlite:///asyncgate.db"
    # Spec 20.2 names the three stores; one URL opens them all.
    tasks: Annotated[str, decides_nothing("database.url says where tasks are stored")] = ""
    leases: Annotated[str, decides_nothing("database.url says where leases are stored")] = ""
    receipts: Annotated[str, decides_nothing("receipt_mode says where receipts are kept")] = ""
    pool_size: Annotated[int, span(1, 1000), says("Most database connections held at once")] = 10
    pgbouncer: Annotated[bool, says("Whether database.url leads to a transaction-pooling PgBouncer")] = False
    direct_url: Annotated[Url, says("Postgres address beside PgBouncer, for locks and notifications")] = ""
    archive_url: Annotated[Url, says("Postgres address of asyncgate_archivist; default: the same, no password")] = ""
    timeout_seconds: Annotated[Timer, says("Longest wait for the database before a call is answered with 503")] = 10.0
    notify: Annotated[bool, says("Whether processes that share the database wake each other")] = True
    poll_seconds: Annotated[Timer, says("Seconds between polls of a waiting call on a shared database")] = 1.0
    trusted_role: Annotated[bool, says("Whether a superuser, owner or BYPASSRLS role is allowed; for trials")] = False

class EmissionRetry(Group, frozen=True):
    """How receipts that the ledger does not have yet are sent again."""

    buffer_size: Annotated[Positive, says("Receipts waiting for the ledger before an anomaly is raised")] = 10000
    retry_interval_seconds: Annotated[Timer, says("Seconds between attempts to deliver a waiting receipt")] = 30.0
    max_retries: Annotated[Natural, says("Quick attempts before a waiting receipt moves to the slow lane")] = 10

class CircuitBreaker(Group, frozen=True):
    """When sending to an unresponsive ledger is paused, and how the ledger is probed."""

    enabled: Annotated[bool, says("Whether a circuit breaker pauses sending to an unresponsive ledger")] = True
    failure_threshold: Annotated[Positive, says("Failures in a row that open the circuit breaker")] = 5
    timeout_seconds: Annotated[Timer, says("Seconds before an open circuit breaker probes the ledger")] = 10.0
    half_open_max_calls: Annotated[Positive, says("Receipts that probe the ledger at once")] = 3
    success_threshold: Annotated[Positive, says("Probes in a row that close the circuit breaker")] = 2

class LedgerSettings(Group, frozen=True):
    """The ledger: the other system that keeps receipts in integrated mode, and how the gate calls it."""

    url: Annotated[Url, says("Address of the receipt ledger in integrated mode")] = ""
    auth_token: Annotated[str, says("The gate's token at the ledger", secret=True)] = ""
    auth_token_env: Annotated[str, says("Name of the environment variable that holds the ledger's token")] = ""
    worker_tokens: Annotated[bool, says("Whether each worker gets its own short-lived key at the ledger")] = True
    tenant_id: Annotated[str, says("Tenant under which the ledger files the gate's receipts")] = ""
    timeout_ms: Annotated[Natural, says(
        "Longest wait for the ledger's answer, in milliseconds; 0 means 500, or 10000 for a ReceiptGate")] = 0
    emission_retry: EmissionRetry = EmissionRetry()
    parallel: Annotated[int, span(0, 1000), says("Most receipts of different tasks that are sent at once; 0 is 16, and "
                                                 "4 to a ReceiptGate")] = 0
    circuit_breaker: CircuitBreaker = CircuitBreaker()
    profile: Annotated[LedgerProfile, says("Which protocol the ledger speaks")] = "memorygate"
    dialect: Annotated[Dialect, says("ReceiptGate's receipt schema, with obligation_id or without")] = "auto"
    source_system: Annotated[Filled, says("The gate's name at ReceiptGate: its token's principal there")] = "asyncgate"
    contents: Annotated[Contents, says("Whether ReceiptGate is sent payloads and results, or their hashes")] = "clear"
    adopt_seconds: Annotated[Duration, says("Seconds between polls for workers' receipts there; 0 is never")] = 10.0
    compare_interval_seconds: Annotated[Duration, says(
        "Seconds between comparisons of the gate's receipts with the ledger's; 0 is never")] = 21_600.0

    @property
    def address(self) -> str:
        """Return the base address, also if `url` is written with its path, as H.6 does."""
        return self.url.rstrip("/").removesuffix("/v1/receipts").removesuffix("/mcp")

class WorkerBootstrap(Group, frozen=True):
    include_memorygate_routing: Annotated[bool, says("Whether bootstrap tells workers where the ledger is")] = True

class TrustedIssuer(Group, frozen=True):
    """Another issuer whose access tokens are accepted, and what it may assert."""

    issuer: Annotated[Filled, says("The issuer, iss of its tokens")]
    jwks: Annotated[Filled, says("Its keys: a JWKS file, or the URL of one")]
    audience: Annotated[Texts, says("Audiences of its accepted tokens; aud must name one")] = ("asyncgate-api",)
    tenants: Annotated[Texts, says("Tenants that it may speak for, as ids; empty is any")] = ()
    roles: Annotated[Texts, says("Roles that it may give")] = ("agent", "worker")
    scopes: Annotated[Texts, says("Scopes that it may give; empty is any")] = ()
    max_lifetime_days: Annotated[int, span(1, 90), says("Longest lifetime of its tokens")] = 90

class Jwt(Group, frozen=True):
    """How access tokens are signed and checked, and how long they are valid."""

    algorithm: Annotated[Literal["RS256"], says("How access tokens are signed")] = "RS256"
    private_key_path: Annotated[str, says("PEM file of the key that signs access tokens")] = ""
    public_key_path: Annotated[str, says("PEM file of the key that checks access tokens")] = ""
    jwks: Annotated[str, says("Further keys that check access tokens: a JWKS file, or the issuer's URL of one")] = ""
    issuer: Annotated[Filled, says("Who issues the access tokens that are accepted, their iss")] = "asyncgate"
    audience: Annotated[Texts, says("Audiences of accepted access tokens; aud must name one")] = ("asyncgate-api",)
    tenants: Annotated[Texts, says("Tenants that the issuer may speak for, as ids; empty is any")] = ()
    roles: Annotated[Texts, says("Roles that the issuer may give")] = ("agent", "worker", "admin")
    leeway_seconds: Annotated[int, span(0, 300), says("Seconds by which the issuer's clock may be off")] = 30
    max_lifetime_days: Annotated[int, span(1, 90), says("Longest lifetime of an accepted access token")] = 90
    access_token_ttl_days: Annotated[int, span(5, 90), says("Days an access token of this gate is valid")] = 30
    refresh_token_ttl_days: Annotated[Days, says("Days after which a person has to sign in again")] = 90
    issuers: Annotated[tuple[TrustedIssuer, ...], says("Further issuers whose access tokens are accepted")] = ()

    @property
    def has_keys(self) -> bool:
        """Whether the gate has a key to check access tokens."""
        return bool(self.private_key_path or self.public_key_path or self.jwks or self.issuers)

class IdentityProvider(Group, frozen=True):
    """An identity provider through which people sign in."""

    name: Annotated[Label, says("Name of the identity provider, such as google; part of its callback URL")]
    client_id: Annotated[str, says("The gate's client id at the provider")]
    client_secret: Annotated[str, says("The gate's client secret at the provider", secret=True)] = ""
    discovery_url: Annotated[Url, says("The provider's OpenID Connect discovery document; GitHub has none")] = ""
    kind: Annotated[Literal["oidc", "github"], says("The protocol that it speaks")] = "oidc"
    title: Annotated[str, says("What the button says; empty is the name")] = ""
    scopes: Annotated[Texts, says("What the gate asks the provider for")] = ("openid", "email", "profile")
    groups_claim: Annotated[str, says("Claim of the ID token that lists a person's groups")] = "groups"
    enterprise_managed: Annotated[bool, says("Whether its identity assertions (ID-JAG) let people in")] = False

class AdmissionRule(Group, frozen=True):
    """Who may sign in, and as whom; the first rule that fits decides."""

    provider: Annotated[Label, says("Name of the identity provider; empty is any")] = ""
    email: Annotated[str, says("A verified e-mail address; empty is any")] = ""
    email_domain: Annotated[str, says("Domain of a verified e-mail address; empty is any")] = ""
    group: Annotated[str, says("A group of the person at the provider; empty is any")] = ""
    tenant: Annotated[OneTenant, says("The tenant that the person belongs to; empty is the default tenant")] = ""
    role: Annotated[Literal["agent", "worker", "admin"], says("The role that the person gets")] = "agent"
    scopes: Annotated[Texts, says("The scopes that the person may grant; empty is those of the role")] = ()

class OAuth(Group, frozen=True):
    """The authorization server: whether it is on, who may sign in, and which clients may ask."""

    enabled: Annotated[bool, says("Whether the gate issues access tokens to clients that people allow in")] = False
    providers: Annotated[tuple[IdentityProvider, ...], says("Identity providers through which people sign in")] = ()
    admit: Annotated[tuple[AdmissionRule, ...], says("Who may sign in without an invitation, and as whom")] = ()
    open_invitations: Annotated[Quota, says(
        "Invited people of a tenant who have not signed in yet; -1 is unlimited")] = 500
    clients_per_tenant: Annotated[Quota, says(
        "Programs that may be registered for the people of a tenant; -1 is unlimited")] = 100
    open_login_links: Annotated[Quota, says(
        "Unused sign-in links that a tenant may have at once; -1 is unlimited")] = 100
    login_links: Annotated[bool, says("Whether one-time links that an admin makes sign people in")] = True
    client_documents: Annotated[bool, says("Whether a client may be named by the URL of its metadata")] = True
    dynamic_registration: Annotated[bool, says("Whether clients may register themselves (RFC 7591)")] = False
    session_retention_days: Annotated[Days, says("Days that ended sessions and used sign-in links are kept")] = 7
    client_retention_days: Annotated[Days, says(
        "Days to keep a client that registered itself and that nobody has signed in with")] = 7
    refresh_grace_seconds: Annotated[float, span(0, 300, "a number"), says(
        "Seconds a used refresh token still returns its successor; 0 is never")] = 30.0

class ApiKeys(Group, frozen=True):
    """How issued keys are kept."""

    hash_algorithm: Annotated[Literal["argon2id"], says("How issued API keys are hashed at rest")] = "argon2id"
    hash_time_cost: Annotated[int, span(1, 100), says("Argon2id passes over memory")] = 2
    hash_memory_cost: Annotated[int, span(8, 2**22), says("Argon2id memory, in KiB")] = 65536
    hash_parallelism: Annotated[int, span(1, 64), says("Argon2id lanes")] = 1
    keys_per_tenant: Annotated[Quota, says("Valid keys that a tenant may have at once; -1 is unlimited")] = 1000

class RateLimiting(Group, frozen=True):
    """Whether, where and up to what limits calls are counted."""

    enabled: Annotated[bool | None, Meta(title="true, false, or null: beyond loopback and with several tenants"), says(
        "Whether rate limits and quotas are enforced")] = None
    storage: Annotated[Literal["memory", "redis"], says("Where rate-limit counters live")] = "memory"
    redis_url: Annotated[Url, says("Redis that holds the counters when several gates share them")] = ""
    default_tier: Annotated[Literal["free", "paid", "enterprise"], says("Tier of a tenant that has none")] = "free"
    address_calls_per_minute: Annotated[Quota, says("Calls an address may make per minute; -1 is unlimited")] = 6000
    anonymous_calls_per_minute: Annotated[Quota, says("The same, without a valid credential; -1 is unlimited")] = 300
    server_calls_per_minute: Annotated[Quota, says("Calls per minute of everybody together; -1 is unlimited")] = 600_000
    principal_percent: Annotated[int, span(1, 100), says("Share of its tenant's calls that a principal may use")] = 80
    heartbeat_factor: Annotated[int, span(1, 1000), says("Heartbeats allowed for each call; counted apart")] = 5
    store_timeout_seconds: Annotated[Timer, says("Longest wait for Redis before it counts as down")] = 0.25
    on_store_failure: Annotated[StoreFailure, says("Without Redis: count locally, or answer 503")] = "local"
    gates: Annotated[Positive, says("Gates that share the limits; each gets its part without Redis")] = 1

class AuditLogging(Group, frozen=True):
    """Which security events are kept, and how long."""

    enabled: Annotated[bool, says("Whether security events are kept in the audit log")] = True
    retention_days: Annotated[int, span(90, 36500), says("Days before a line of the audit log is deleted")] = 90
    sensitive_fields: Annotated[Texts, says("Fields whose values no log holds")] = ("password", "token", "api_key")

class Tls(Group, frozen=True):
    """The gate's own certificate; without one it speaks plain HTTP, on loopback or to a proxy."""

    certificate_path: Annotated[str, says("PEM file of the certificate and its chain; empty is plain HTTP")] = ""
    private_key_path: Annotated[str, says("PEM file of its private key; empty is the certificate's own file")] = ""
    private_key_password: Annotated[str, says("Password of the private key; empty is none", secret=True)] = ""
    minimum_version: Annotated[TlsVersion, says("Oldest version of TLS that is accepted")] = "TLSv1.2"

class Outgoing(Group, frozen=True):
    """Where the gate's own calls may go."""

    allow: Annotated[Texts, says("Hosts and networks that may be called although they are not public")] = ()
    deny: Annotated[Texts, says("Hosts and networks that may not be called, such as this machine's address at its "
                                "NAT")] = ()

class SecuritySettings(Group, frozen=True):
    """Everything about credentials, limits and audit."""

    jwt: Jwt = Jwt()
    oauth: OAuth = OAuth()
    api_keys: ApiKeys = ApiKeys()
    rate_limiting: RateLimiting = RateLimiting()
    audit_logging: AuditLogging = AuditLogging()
    outgoing: Outgoing = Outgoing()
    tls: Tls = Tls()

class Tier(Group, frozen=True):
    """What a tenant of one tier may use."""

    tasks_per_hour: Annotated[Quota, says("Tasks a tenant may create per hour; -1 is unlimited")] = -1
    concurrent_leases: Annotated[Quota, says("Leases a tenant may hold at once; -1 is unlimited")] = -1
    api_calls_per_hour: Annotated[Quota, says("Calls a tenant may make per hour; -1 is unlimited")] = -1
    receipt_storage_gb: Annotated[Quota, says("Gigabytes of receipts a tenant may keep; -1 is unlimited")] = -1
    step_storage_gb: Annotated[Quota, says("Gigabytes of recorded steps a tenant may keep; -1 is unlimited")] = -1
    active_tasks: Annotated[Quota, says("Unfinished tasks a tenant may have at once; -1 is unlimited")] = -1
    terminal_tasks: Annotated[Quota, says("Tasks a tenant may keep, ended or not; -1 is unlimited")] = -1
    receipts_per_task: Annotated[Quota, says("Receipts a task may have before its end; -1 is unlimited")] = -1

class RateLimits(Group, frozen=True):
    """The tiers."""

    free_tier: Tier = Tier(tasks_per_hour=100, concurrent_leases=10, api_calls_per_hour=1_000, receipt_storage_gb=1,
                           step_storage_gb=1, active_tasks=1_000)
    paid_tier: Tier = Tier(tasks_per_hour=10_000, concurrent_leases=100, api_calls_per_hour=100_000,
                           receipt_storage_gb=10, step_storage_gb=10, active_tasks=100_000)
    enterprise_tier: Tier = Tier()

class BootstrapSettings(Group, frozen=True):
    use_obligations_endpoint: Annotated[bool, decides_nothing("list_open_obligations is always served")] = True
    deprecate_legacy_endpoint: Annotated[bool, says("Whether bootstrap answers carry deprecation headers")] = True

class ReceiptSettings(Group, frozen=True):
    """How large a receipt may be (PH.5), and how soon it is sealed."""

    max_body_size_bytes: Annotated[Size, says("Largest receipt body, in bytes of JSON")] = 65536
    max_parents: Annotated[int, span(1, 1000), says("Most parents of a receipt")] = 10
    max_artifacts: Annotated[PageSize, says("Most artifacts of a receipt")] = 100
    seal_interval_seconds: Annotated[Timer, says("Seconds between seals over what is new; kept locally only")] = 60.0

class ArchiveSettings(Group, frozen=True):
    """Where old receipts go (H.11)."""

    enabled: Annotated[bool, says("Whether upkeep moves old receipts to the archive and prunes old tasks")] = False
    directory: Annotated[str, says("Folder of the archive, the same for all gates of a database; empty is none")] = ""
    terminal_days: Annotated[Days, says("Days a task must have ended before its receipts are archived")] = 7
    interval_seconds: Annotated[Timer, says("Seconds between looks for what is old enough")] = 3600.0

class LeaseSettings(Group, frozen=True):
    requeue_on_expiry_no_increment: Annotated[bool, says("Always true: a lost lease spends no attempt (PH.4)")] = True

class MetricsSettings(Group, frozen=True):
    """What the gate counts for Prometheus, and where it shows that."""

    enabled: Annotated[bool, says("Whether the gate counts what it does, and shows it at /metrics")] = False
    host: Annotated[Filled, says("Address of the second listener")] = "127.0.0.1"
    port: Annotated[int, span(0, 65535), says(
        "Port of a second listener, for /metrics alone; of several processes the first one; 0 is none")] = 0
    most_types: Annotated[Class, says("Task types with numbers of their own; later ones are counted as other")] = 50

class WebhookSettings(Group, frozen=True):
    """How tenants are told of their events by HTTP."""

    allow: Annotated[Texts, says("Private hosts and networks, or hosts without TLS, to which webhooks may go")] = ()
    max_per_tenant: Annotated[Natural, says("Most endpoints of a tenant; 0 is none")] = 10
    max_per_task: Annotated[int, span(0, 100), says("Most webhooks of one task; 0 is none")] = 5
    max_of_tasks: Annotated[Natural, says("Most webhooks of a tenant's tasks that have not ended")] = 1000
    parallel: Annotated[int, span(1, 100), says("Most deliveries on their way to an endpoint at once")] = 4
    timeout_seconds: Annotated[Timer, says("Seconds for a delivery, from the look-up of the host to the answer")] = 10.0
    retry_seconds: Annotated[Timer, says("Seconds before the first retry; then doubled, with jitter")] = 5.0
    max_retry_seconds: Annotated[Timer, says("Longest pause between two attempts, before jitter")] = 900.0
    park_after_days: Annotated[float, span(0, 30, "a number"), says("Days until a failing delivery is parked")] = 3.0
    log_days: Annotated[Days, says("Days a delivery is listed after its last attempt")] = 14

class A2ASettings(Group, frozen=True):
    """Which types of tasks are offered as agents to clients of A2A."""

    agents: Annotated[Texts, says("Types of tasks that are agents, each at /a2a/TYPE/; empty is none")] = ()
    root: Annotated[str, says("The agent whose card is at the root of the host, too; empty is none")] = ""
    public_card: Annotated[bool, says("Whether cards are shown without a credential")] = True
    modes: Annotated[Texts, says("Media types that an agent takes whose type declares no schema")] = (
        "text/plain", "application/json", "application/octet-stream", "application/pdf", "image/jpeg", "image/png")
    max_wait_seconds: Annotated[Duration, says("Longest that SendMessage waits for a task to end or to ask")] = 600.0
    deduplicate_messages: Annotated[bool, says("Whether a messageId is as good as an Idempotency-Key")] = False

class ConsoleSettings(Group, frozen=True):
    """The console: the page for people that the gate serves at /console."""

    enabled: Annotated[bool, says("Whether the gate serves the console; `asyncgate dev` does by default")] = False
    session_seconds: Annotated[int, span(60, 2_592_000), says("Seconds until a person has to sign in again")] = 43_200

class EscalationTarget(Group, frozen=True):
    """The principal to whom tasks of a class are escalated."""

    escalation_class: Annotated[Class, says("The escalation class")] = msgspec.field(name="class")
    to_kind: Annotated[OwnerKind, says("Kind of the principal")]
    to_id: Annotated[Filled, says("Id of the principal")]
    tenant_id: Annotated[OneTenant, says("The only tenant of this target; empty is all")] = ""

class EscalationSettings(Group, frozen=True):
    """Who is told when a worker is lost, or the last attempt has failed."""

    enabled: Annotated[bool, says("Whether lost leases and spent attempts are escalated")] = False
    targets: Annotated[tuple[EscalationTarget, ...], says("Who receives escalations, as {class, to_kind, to_id}")] = ()
    lease_expiry_class: Annotated[Class, says("Class of a lost lease; payload.escalation_class comes first")] = 1
    attempts_spent_class: Annotated[Class, says("Class of spent attempts; payload.escalation_class comes first")] = 1

    def target(self, tenant_id: str, escalation_class: int) -> EscalationTarget | None:
        """Return the target of a class; a target for one tenant overrides a target for all."""
        fit = [target for target in self.targets if target.escalation_class == escalation_class
               and target.tenant_id in ("", tenant_id)]
        return max(fit, key=lambda target: len(target.tenant_id), default=None)


class Settings(Group, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold everything an operator may change; the names of spec 19 are in lower case."""

    instance_id: Annotated[Label, says("Name of this gate in receipts; empty is automatic")] = ""
    environment: Annotated[str, says("Name of this deployment in answers and logs")] = "development"
    host: Annotated[Filled, says("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, span(0, 65535), says("Port to listen on; 0 takes any free one")] = 8080
    log_level: Annotated[LogLevel, says("Least severity that is logged")] = "info"
    log_format: Annotated[Literal["console", "json"], says("How a log line is written")] = "console"
    api_key: Annotated[str, says("Shared token, admin of the default tenant; empty is none", secret=True)] = ""
    allow_insecure_dev: Annotated[bool, says("Whether callers on loopback need no credential")] = False
    allowed_hosts: Annotated[Texts, says("Host headers that are answered; empty is automatic")] = ()
    allowed_origins: Annotated[Texts, says("Origin headers that are answered; empty is automatic")] = ()
    public_url: Annotated[Url, says("URL of the gate as its clients type it; with OAuth also the issuer")] = ""
    trusted_proxies: Annotated[Texts, says("Addresses and networks whose X-Forwarded-… are believed")] = ()
    default_tenant_id: Annotated[Uuid, says("Tenant of the shared token")] = "00000000-0000-0000-0000-000000000000"
    default_fallback_owner_kind: Annotated[OwnerKind, says("Kind of the owner of tasks that name nobody")] = "system"
    default_fallback_owner_id: Annotated[Filled, says("Id of the owner of tasks that name nobody")] = "asyncgate"
    default_lease_ttl_seconds: Annotated[Ttl, says("Seconds a lease lives when a claim names none")] = 300
    max_lease_ttl_seconds: Annotated[Ttl, says("Longest lease in seconds, of any tenant; more is clamped")] = 1800
    lease_sweep_interval_seconds: Annotated[Timer, says("Longest pause between two sweeps for lost leases")] = 10.0
    lease_grace_seconds: Annotated[Duration, says("Seconds a lease outlives its expiry")] = 0.0
    max_lease_renewals: Annotated[Natural, says("Renewals a lease may have; 0 means no limit")] = 0
    max_lease_lifetime_seconds: Annotated[Natural, says("Seconds a lease may live with renewals; 0 means no limit")] = 0
    max_lanes: Annotated[Natural, says("Most kinds (type and capabilities) of a tenant's waiting tasks; 0: any")] = 2000
    type_limits: Annotated[TypeLimits, says("Limits of tasks that name none: TYPE=LIMIT, or TYPE=LIMIT:KEY")] = ()
    max_expiries: Annotated[Natural, says("Lost leases after which a task is put on hold; 0 is never")] = 10
    max_parks: Annotated[Natural, says("Times a task may be parked before it is put on hold; 0 is any number")] = 1000
    starvation_factor: Annotated[float, span(0, 1e6, "a number"), says(
        "How many times the usual wait of its queue a task waits before its owner is told; 0 is never")] = 10.0
    restart_grace_seconds: Annotated[Duration, says("Extra seconds for leases after a time without a gate")] = 5.0
    expiry_jitter_seconds: Annotated[Duration, says("Longest random delay before lost tasks are offered again")] = 5.0
    max_claim_tasks: Annotated[int, span(1, 1000), says("Most tasks one claim may lease")] = 100
    max_wait_seconds: Annotated[float, span(0, 60, "a number"), says("Longest a claim or read may wait")] = 30.0
    max_waiting_claims: Annotated[Natural, says("Most claims that may wait at once")] = 4096
    max_waiting_readers: Annotated[Natural, says("Most reads and streams of receipts that may wait at once")] = 4096
    max_waiting_per_tenant: Annotated[Positive, says("Most calls of a tenant that may wait at once")] = 2048
    max_waiting_per_principal: Annotated[Positive, says("Most calls of a principal that may wait at once")] = 256
    default_max_attempts: Annotated[int, span(1, 1000), says("Attempts of a task that names none")] = 3
    default_retry_backoff_seconds: Annotated[Natural, says("Seconds before the first retry; then doubled")] = 30
    max_retry_backoff_seconds: Annotated[Ttl, says("Longest delay before a retry, in seconds")] = 900
    default_priority: Annotated[int, span(1 - 2**31, 2**31 - 1), says("Priority of a task that names none")] = 0
    unknown_members: Annotated[Unknown, says("How unknown members are treated; lists and admin calls refuse")] = "warn"
    idempotency_mismatch: Annotated[Mismatch, says("Answer to a used idempotency key with another body")] = "return"
    locatability: Annotated[Locatability, says("Whether a success without artifact or proof is refused")] = "lenient"
    progress_receipts: Annotated[bool, says("Whether each progress report writes a receipt")] = False
    default_list_limit: Annotated[PageSize, says("Items on a page that names no limit")] = 50
    max_list_limit: Annotated[PageSize, says("Most items on a page")] = 200
    default_bootstrap_max_items: Annotated[PageSize, says("Items in a bootstrap by default")] = 50
    max_bootstrap_max_items: Annotated[PageSize, says("Most items in a bootstrap")] = 200
    receipt_retention_days: Annotated[Days, says("Days a receipt is active before it may be archived (H.11)")] = 30
    task_retention_days: Annotated[Days, says("Days a finished task is kept before it may be pruned")] = 30
    usage_retention_days: Annotated[Days, says("Days that usage events are kept")] = 400
    presence_retention_days: Annotated[Days, says("Days after its last call that a principal is forgotten")] = 400
    bulk_retention_days: Annotated[Days, says("Days that an ended bulk is kept")] = 90
    max_step_bytes: Annotated[Size, says("Largest value of a recorded step, in bytes of JSON")] = 2**18
    max_task_steps: Annotated[Positive, says("Most steps that a task may record")] = 10_000
    max_task_step_bytes: Annotated[Size, says("Most bytes of all the steps of a task")] = 2**26
    max_task_output_bytes: Annotated[Size, says("Most bytes of all the output of a task")] = 2**24
    output_retention_days: Annotated[Days, says("Days after the end of a task that its output is kept")] = 7
    max_request_bytes: Annotated[Size, says("Largest request body, in bytes")] = 4 * 2**20
    max_request_values: Annotated[Size, says("Most values in the lists and objects of a request body")] = 100_000
    max_payload_bytes: Annotated[Size, says("Largest task payload of any tenant, in bytes of JSON")] = 2**20
    max_result_bytes: Annotated[Size, says("Largest result, in bytes of JSON")] = 2**20
    max_progress_bytes: Annotated[Size, says("Largest progress report, in bytes of JSON")] = 64 * 2**10
    inline_result_bytes: Annotated[Natural, says("Largest result copied into its receipt, in bytes of JSON")] = 16384
    batch_size: Annotated[PageSize, says("Most writes that share one transaction")] = 256
    limit_concurrency: Annotated[Positive, says("Most connections served at once; more are answered 503")] = 4096
    max_connections_per_address: Annotated[Natural, says("Most connections of an address; 0 means no limit")] = 1024
    header_timeout_seconds: Annotated[Timer, says("Seconds a client has to send its headers")] = 10.0
    body_timeout_seconds: Annotated[Timer, says("Seconds a client has to send its body")] = 30.0
    shutdown_seconds: Annotated[Duration, says("Seconds open requests have to finish at shutdown")] = 4.0
    drain_seconds: Annotated[Duration, says("Seconds a stopping gate still serves: load balancers notice")] = 0.0
    mcp_tool_names: Annotated[ToolNames, says("Spelling of MCP tool names in lists; both spellings work")] = "dotted"
    receipt_mode: Annotated[ReceiptMode, says("Whether receipts are kept here or sent to a ledger")] = "standalone"
    receipt_consistency_mode: Annotated[Consistency, says("Whether a change waits for the ledger")] = "eventual"
    database: DatabaseSettings = DatabaseSettings()
    ledger: LedgerSettings = LedgerSettings()
    escalation: EscalationSettings = EscalationSettings()
    worker_bootstrap: WorkerBootstrap = WorkerBootstrap()
    bootstrap: BootstrapSettings = BootstrapSettings()
    receipts: ReceiptSettings = ReceiptSettings()
    archive: ArchiveSettings = ArchiveSettings()
    leases: LeaseSettings = LeaseSettings()
    metrics: MetricsSettings = MetricsSettings()
    webhooks: WebhookSettings = WebhookSettings()
    a2a: A2ASettings = A2ASettings()
    console: ConsoleSettings = ConsoleSettings()
    security: SecuritySettings = SecuritySettings()
    rate_limits: RateLimits = RateLimits()


class SettingsError(errors.Stopped):
    """The gate does not start: one line names the invalid setting, the reason and its origin."""

    exit_status = 2


class Configured(Struct, frozen=True):
    """The settings in force, and the origin of each by dotted name."""

    settings: Settings
    origins: dict[str, str]
    without_effect: tuple[str, ...] = ()        # variables of NO_EFFECT that are set


class Setting(Struct, frozen=True):
    """One setting, as `asyncgate config` and docs/reference.md show it; `form` is its type.

    The value of one that is `in_file` may be kept in a file, which the environment names as `<environment>_FILE`, or be
    what a command prints, which it names as `<environment>_COMMAND`.
    One that is `idle` decides nothing: the spec names it, so it stays readable.
    """

    name: str
    kind: str
    default: Any
    says: str
    secret: bool
    environment: str
    form: Any
    in_file: bool = False
    idle: bool = False


ENV_PREFIX, TEST_PREFIX = "ASYNCGATE_", "ASYNCGATE_TEST_"
NOT_SETTINGS = {  # for the programs around a gate
    "ASYNCGATE_CONFIG", "ASYNCGATE_URL", "ASYNCGATE_WORKER_KEY", "ASYNCGATE_WORKER_KEY_FILE", "ASYNCGATE_AGENT_KEY",
    "ASYNCGATE_AGENT_KEY_FILE", "ASYNCGATE_PROFILE", "ASYNCGATE_PLAIN_HTTP"}
NO_EFFECT = {  # variables of the family's deployments that no gate needs; each is told of in one line
    "ASYNCGATE_METAGATE_ENDPOINT": "a gate does not register anywhere: give its URL to those who need it",
    "ASYNCGATE_METAGATE_API_KEY": "a gate calls no MetaGate, so it needs no key for one",
    "ASYNCGATE_METAGATE_COMPONENT_KEY": "a gate calls no MetaGate",
    "ASYNCGATE_METAGATE_BOOTSTRAP_TIMEOUT_SECONDS": "a gate calls no MetaGate",
    "ASYNCGATE_DEBUG": "log_level says how much is logged",
    "ASYNCGATE_RECEIPTGATE_EMISSION_BUFFER_PATH": "receipts wait for the ledger in the database",
    **dict.fromkeys(("ASYNCGATE_RATE_LIMIT_DEFAULT_CALLS", "ASYNCGATE_RATE_LIMIT_DEFAULT_WINDOW_SECONDS"),
                    "rate_limits has the calls of each tier"),
    **dict.fromkeys((f"ASYNCGATE_CORS_{what}" for what in ("ALLOW_CREDENTIALS", "ALLOWED_HEADERS", "ALLOWED_METHODS")),
                    "pages of allowed_origins may send what the gate reads, and no cookies")}
ALIASES = {  # other deployments' names for the same settings
    "ENV": "environment", "RATE_LIMIT_ENABLED": "security.rate_limiting.enabled",
    "RATE_LIMIT_ACTIVE": "security.rate_limiting.enabled", "RATE_LIMIT_BACKEND": "security.rate_limiting.storage",
    "REDIS_URL": "security.rate_limiting.redis_url", "CORS_ALLOWED_ORIGINS": "allowed_origins",
    **{f"JWT_{name.upper()}": f"security.jwt.{name}" for name in (
        "algorithm", "private_key_path", "public_key_path", "access_token_ttl_days", "refresh_token_ttl_days")},
    "RECEIPTGATE_ENDPOINT": "ledger.url", "RECEIPTGATE_URL": "ledger.url",
    "RECEIPTGATE_AUTH_TOKEN": "ledger.auth_token", "RECEIPTGATE_API_KEY": "ledger.auth_token",
    "RECEIPTGATE_TENANT_ID": "ledger.tenant_id",
    "RECEIPTGATE_EMISSION_TIMEOUT_MS": "ledger.timeout_ms",
    "RECEIPTGATE_EMISSION_BUFFER_SIZE": "ledger.emission_retry.buffer_size",
    "RECEIPTGATE_EMISSION_RETRY_INTERVAL_SECONDS": "ledger.emission_retry.retry_interval_seconds",
    "RECEIPTGATE_EMISSION_MAX_RETRIES": "ledger.emission_retry.max_retries",
    **{f"RECEIPTGATE_CIRCUIT_BREAKER_{name.upper()}": f"ledger.circuit_breaker.{name}"
       for name in ("enabled", "failure_threshold", "timeout_seconds", "half_open_max_calls", "success_threshold")}}
UNPREFIXED = {  # spec 19.1 to 19.8
    "ALLOW_INSECURE_DEV", "DEFAULT_LEASE_TTL_SECONDS", "MAX_LEASE_TTL_SECONDS", "LEASE_SWEEP_INTERVAL_SECONDS",
    "LEASE_GRACE_SECONDS", "DEFAULT_MAX_ATTEMPTS", "DEFAULT_RETRY_BACKOFF_SECONDS", "MAX_RETRY_BACKOFF_SECONDS",
    "DEFAULT_PRIORITY", "DEFAULT_LIST_LIMIT", "MAX_LIST_LIMIT", "DEFAULT_BOOTSTRAP_MAX_ITEMS",
    "MAX_BOOTSTRAP_MAX_ITEMS", "DEFAULT_FALLBACK_OWNER_KIND", "DEFAULT_FALLBACK_OWNER_ID",
    "RECEIPTGATE_ENDPOINT", "RECEIPTGATE_URL", "RECEIPTGATE_AUTH_TOKEN", "RECEIPTGATE_API_KEY"}
SPEC_NAMES = {  # what the spec calls a setting (20.2, 20.12, 20.14, H.6); its names are read in every layer, for good
    **{f"memorygate.{name}": f"ledger.{name}" for name in (
        "url", "auth_token", "auth_token_env", "worker_tokens", "tenant_id", "timeout_ms", "parallel",
        *(f"emission_retry.{name}" for name in EmissionRetry.__struct_fields__),
        *(f"circuit_breaker.{name}" for name in CircuitBreaker.__struct_fields__))},
    "memorygate.emission_timeout_ms": "ledger.timeout_ms",
    "memorygate.failure_mode": "receipt_consistency_mode"}
VALUE_PLACES = ("_FILE", "_COMMAND")       # ends of variables that say where a value is
COMMAND_SECONDS = 30.0
SETTING_UNITS = {"_seconds": 1.0, "_days": 86_400.0, "_ms": 0.001}   # what the end of a name counts
PLAIN_KINDS = {"boolean": "true or false", "string": "text", "array": "a list of objects"}
VARIABLE = re.compile(r"\$\{([^}]*)\}")
# In a URL, with or without its scheme; in a query or key=value list; a pasted PEM file.
CREDENTIAL = re.compile(
    r"(https?://|(?:^|://)[^/?#:@]*:(?!//)).*(?=@)|((?:password|token|secret|key)=)[^&#\s]*|(-----BEGIN )[\s\S]*", re.I)
# The same in prose, where a URL ends with its word: an e-mail address later in the line is not a part of it.
CREDENTIAL_IN_PROSE = re.compile(
    r"""(https?://|(?:(?<![^\s"'(\[{=,])|://)[^/?#:@\s"]*:(?!//))[^\s"]*(?=@)"""
    r"|((?:password|token|secret|key)=)[^&#\s]*|(-----BEGIN )[\s\S]*", re.I)


def load_settings(
    config: str | None = None, environ: Mapping[str, str] = os.environ, flags: Mapping[str, str] = {}
) -> Configured:
    """Read the settings: defaults, then the YAML file, then the environment, then flags; the last one wins."""
    known = {setting.name: setting for setting in list_settings(Settings)}
    values, origins = {name: known[name].default for name in known}, dict.fromkeys(known, "default")
    spelled: dict[str, str] = {}
    path, flagged = config or environ.get("ASYNCGATE_CONFIG"), ((name, flags[name], f"flag --{name}") for name in flags)
    in_file = read_settings_file(path, environ) if path else ()
    for spelling, raw, origin in chain(in_file, read_environment(environ), flagged):
        name = SPEC_NAMES.get(spelling, spelling)
        if name not in known:
            raise make_unknown_setting_error(name, origin)
        value = convert_value(msgspec.structs.replace(known[name], name=spelling), raw, origin)
        if origins[name].split()[0] == origin.split()[0] and values[name] != value:
            twice = f"{spelled[name]} ({origins[name]}) and {spelling} ({origin})"
            raise SettingsError(f"{name}: given twice, and differently: {twice}; keep one of them")
        values[name], origins[name], spelled[name] = value, origin, spelling
    check_consistency(values, origins)
    return Configured(build_group(Settings, values), origins, tuple(name for name in NO_EFFECT if name in environ))


def strip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what settings are read from, for a program that gets its own."""
    return {name: value for name, value in environ.items()
            if not name.startswith(ENV_PREFIX) and name not in UNPREFIXED}


def allow_slow_reads(settings: Settings) -> Settings:
    """Return the settings with a timeout of the ledger that is long enough for a whole page."""
    ours = settings.ledger
    patient = msgspec.structs.replace(ours, timeout_ms=max(ours.timeout_ms, READING_MS))
    return msgspec.structs.replace(settings, ledger=patient)


def list_values(configured: Configured) -> list[tuple[str, str, str]]:
    """List every setting with its value, secrets masked, and its origin."""
    value = {setting.name: attrgetter(setting.name)(configured.settings) for setting in list_settings(Settings)}
    return [(setting.name, format_value(setting, value[setting.name]), configured.origins[setting.name])
            for setting in list_settings(Settings)]


def list_idle(configured: Configured) -> list[str]:
    """Say of each setting that somebody has set and that decides nothing: its name, why, and its origin."""
    others = [f"{name} has no effect: {NO_EFFECT[name]} (environment {name})" for name in configured.without_effect]
    idle = [setting for setting in list_settings(Settings) if setting.idle
            and configured.origins[setting.name] != "default"]
    return others + [f"{setting.name} decides nothing: {setting.says.removeprefix(IDLE)}; remove it "
                     f"({configured.origins[setting.name]})" for setting in idle]


def format_value(setting: Setting, value: Any) -> str:
    """Write a value as an environment variable would hold it; secrets are masked."""
    value = mask_secrets(setting, value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def mask_secrets(setting: Setting, value: Any) -> Any:
    """Mask the secrets in a value."""
    if setting.secret and value:
        return "***"
    if isinstance(value, str):
        return mask_credentials(value)
    if isinstance(value, Struct):
        named = zip(list_settings(type(value)), read_fields(type(value)), strict=True)
        return {field.encode_name: mask_secrets(part, getattr(value, part.name)) for part, field in named}
    return [mask_secrets(setting, item) for item in value] if isinstance(value, tuple) else value


def mask_credentials(value: str) -> str:
    """Mask the credentials in a value, such as a URL."""
    return CREDENTIAL.sub(hide_match, value)


def mask_credentials_in_prose(text: str) -> str:
    """Mask the credentials in the words of a text, such as a line of a log."""
    return CREDENTIAL_IN_PROSE.sub(hide_match, text)


def hide_match(match: re.Match[str]) -> str:
    """Return what stands before a credential, and asterisks in its place."""
    return f"{match[match.lastindex or 0]}***"


read_fields = cache(msgspec.structs.fields)     # they evaluate the annotations each time


@cache
def list_settings(group: type[Struct], prefix: str = "", preset: Struct | None = None) -> list[Setting]:
    """List the settings of a group and of its nested groups, by dotted name."""
    settings: list[Setting] = []
    for field in read_fields(group):
        name, default = f"{prefix}{field.name}", getattr(preset, field.name) if preset else field.default
        group_here = is_group(field.type)
        settings += (list_settings(field.type, f"{name}.", default) if group_here else
                     [describe_setting(name, field, default)])
    return settings


def is_group(form: Any) -> bool:
    return isinstance(form, type) and issubclass(form, Group)


def describe_setting(name: str, field: msgspec.structs.FieldInfo, default: Any) -> Setting:
    """Make the description of one setting from its declaration."""
    schema = msgspec.json.schema(field.type)
    choice = f"one of {', '.join(schema['enum'])}" if "enum" in schema else ""
    kind = schema.get("title") or choice or PLAIN_KINDS[schema["type"]]
    extra = {key: value for meta in get_args(field.type)[1:] for key, value in (meta.extra or {}).items()}
    return Setting(name, kind, default, schema["description"], extra.get("secret", False), name_variable(name),
                   field.type, extra.get("in_file", False), extra.get("idle", False))


def name_variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return ENV_PREFIX + name.upper().replace(".", "_")


def list_spellings() -> list[str]:
    """List the names that a file or a flag may use."""
    return [*(setting.name for setting in list_settings(Settings)), *SPEC_NAMES]


def build_group(group: type[Struct], values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a group from values by dotted name."""
    return group(**{
        field.name: build_group(field.type, values, f"{prefix}{field.name}.") if is_group(field.type) else
        values[prefix + field.name]
        for field in read_fields(group)
    })


def convert_value(setting: Setting, raw: Any, origin: str) -> Any:
    """Convert the value from one source to the setting's type, or refuse it."""
    try:
        return convert(parse_value(setting, raw), setting.form, strict=not isinstance(raw, str))
    except ValueError as error:  # msgspec's errors are ValueErrors
        listed = isinstance(setting.default, tuple) or isinstance(raw, list | dict)
        wrong = f"{error}; it takes" if listed else f"{mask_secrets(setting, raw)!r:.80} is not"
        raise SettingsError(f"{setting.name}: {wrong} {setting.kind} ({origin})") from None


def parse_value(setting: Setting, raw: Any) -> Any:
    """Parse a text for its setting: split lists, read durations, find choices in any case."""
    form = get_args(setting.form)[0]
    if isinstance(raw, str) and get_origin(form) is tuple:
        parts = [part.strip() for part in raw.split(",")]
        return msgspec.json.decode(raw) if parts[0].startswith("[") else [part for part in parts if part]
    if isinstance(raw, str) and (seconds := parse_seconds(raw)) is not None and form in (int, float):
        unit = next((unit for ending, unit in SETTING_UNITS.items() if setting.name.endswith(ending)), None)
        return raw if unit is None else convert_seconds(seconds, unit)
    if isinstance(raw, float) and get_origin(form) is Literal:      # YAML reads 1.0 as a number
        return str(raw)
    if isinstance(raw, str) and get_origin(form) is Literal:
        return next((choice for choice in get_args(form) if choice.lower() == raw.lower()), raw)
    return raw


def convert_seconds(seconds: float, unit: float) -> float:
    """Convert seconds to a setting's unit, as a whole number if possible."""
    number = round(seconds / unit, 9)
    return int(number) if number == int(number) else number


def check_consistency(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuse values that contradict each other."""
    for low in values:
        high = low.replace("default_", "max_", 1)
        if low.startswith("default_") and high in values and values[low] > values[high]:
            wrong = f"{values[low]} is more than {high}, which is {values[high]}"
            raise SettingsError(f"{low}: {wrong} ({origins[low]}; {origins[high]})")
    if not values[name := "leases.requeue_on_expiry_no_increment"]:
        raise SettingsError(f"{name}: must be true, a lost lease spends no attempt (PH.4) ({origins[name]})")
    for proxy in values[name := "trusted_proxies"]:
        if not is_network(proxy):
            raise SettingsError(f"{name}: {proxy!r} is neither an address nor a network ({origins[name]})")


def is_network(text: str) -> bool:
    """Whether a text names an IP address, or a network as in 10.0.0.0/8."""
    try:
        return bool(ip_network(text))
    except ValueError:
        return False


def read_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings in the environment."""
    known = {setting.name: setting for setting in list_settings(Settings)}
    names = {setting.environment: name for name, setting in known.items()}
    names |= {ENV_PREFIX + alias: name for alias, name in ALIASES.items()}
    names |= {name_variable(alias): name for alias, name in SPEC_NAMES.items()}
    elsewhere = {variable + end: known[name] for variable, name in names.items() if known[name].in_file
                 for end in VALUE_PLACES}
    for variable in sorted(environ):
        full = ENV_PREFIX + variable if variable in UNPREFIXED and ENV_PREFIX + variable not in environ else variable
        if full in elsewhere:
            yield elsewhere[full].name, read_elsewhere(elsewhere[full], environ, full), f"environment {full}"
        elif full.startswith(ENV_PREFIX) and not full.startswith(TEST_PREFIX) and full not in (
                NOT_SETTINGS | NO_EFFECT.keys()):
            yield names.get(full, variable), environ[variable], f"environment {variable}"


def read_elsewhere(setting: Setting, environ: Mapping[str, str], variable: str) -> str:
    """Read a value, such as a secret, from the file or the command that a variable names."""
    bases = {variable.removesuffix("_FILE").removesuffix("_COMMAND"), setting.environment}
    others = {spelling for base in bases for spelling in (base, *(base + end for end in VALUE_PLACES))} - {variable}
    if itself := min((spelling for spelling in others if spelling in environ), default=None):
        both = f"environment {itself}; environment {variable}"
        raise SettingsError(f"{setting.name}: given twice, {name_way(itself)} and {name_way(variable)} ({both})")
    return read_place(setting.name, environ[variable], variable)


def name_way(variable: str) -> str:
    """Say how a variable gives a value."""
    ways = {"_FILE": "in a file", "_COMMAND": "by a command"}
    return next((way for end, way in ways.items() if variable.endswith(end)), "by itself")


def read_place(name: str, place: str, variable: str) -> str:
    """Return what is in a file, or what a command prints; a newline at the end is not part of it."""
    origin = f"environment {variable}"
    text = run_command(name, place, origin) if variable.endswith("_COMMAND") else read_text(place, origin)
    if not (text := text.removesuffix("\n").removesuffix("\r")):
        raise SettingsError(f"{name}: {mask_credentials(place)!r} is empty ({origin})")
    return text


def run_command(name: str, command: str, origin: str) -> str:
    """Return what a command prints, such as a look into a vault (spec 21.14); no shell reads it.

    Security: neither what it prints nor its arguments, which may hold a token, are in the error.
    """
    import shlex
    import subprocess

    try:
        words = shlex.split(command)
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              timeout=COMMAND_SECONDS, check=True)
        return done.stdout.decode()
    except subprocess.CalledProcessError as error:
        why = f"exit status {error.returncode}"
    except subprocess.TimeoutExpired:
        why = f"no end within {COMMAND_SECONDS:g} seconds"
    except (OSError, IndexError) as error:
        why = getattr(error, "strerror", None) or "it is empty"
    except ValueError:
        why = "its quotes are not closed, or it prints no UTF-8"
    raise SettingsError(f"{name}: the command has failed: {why} ({origin})")


def read_settings_file(path: str, environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings in a YAML file."""
    origin, tree = f"file {path}", read_yaml(path)
    if isinstance(tree, dict) and list(tree) == ["asyncgate"]:  # 20.14
        tree = tree["asyncgate"]
    if not isinstance(tree, dict | None):
        raise SettingsError(f"the file must hold names with values ({origin})")
    for name, raw in iterate_leaves(tree or {}):
        yield name, expand_variables(raw, name, environ, origin), origin


def iterate_leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a mapping by dotted name."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if value and isinstance(value, dict):
            yield from iterate_leaves(value, f"{name}.")
        elif value not in (None, {}) or not any(spelling.startswith(f"{name}.") for spelling in list_spellings()):
            yield name, value


def expand_variables(raw: Any, name: str, environ: Mapping[str, str], origin: str) -> Any:
    """Replace ${NAME} in a text by the environment variable."""
    if isinstance(raw, list):
        return [expand_variables(item, name, environ, origin) for item in raw]
    if isinstance(raw, dict):
        return {key: expand_variables(item, name, environ, origin) for key, item in raw.items()}
    if not isinstance(raw, str):
        return raw
    return VARIABLE.sub(lambda match: find_variable(match[1], name, environ, origin), raw)


def find_variable(variable: str, name: str, environ: Mapping[str, str], origin: str) -> str:
    """Return the value of an environment variable: its own, or what is in its _FILE, or what its _COMMAND prints."""
    given = [spelling for spelling in (variable, *(variable + end for end in VALUE_PLACES)) if spelling in environ]
    if not given:
        raise SettingsError(f"{name}: the environment variable {variable!r} is not set ({origin})")
    if len(given) > 1:
        raise SettingsError(
            f"{name}: given twice ({'; '.join(f'environment {spelling}' for spelling in given)}; {origin})")
    return environ[variable] if given == [variable] else read_place(name, environ[given[0]], given[0])


def make_unknown_setting_error(name: str, origin: str) -> SettingsError:
    """Return the refusal of an unknown setting, with the most similar known name."""
    prefix = ENV_PREFIX if name.startswith(ENV_PREFIX) else ""
    known = [name_variable(spelling).removeprefix(prefix) if prefix else spelling for spelling in list_spellings()]
    near = get_close_matches(name.removeprefix(prefix), known, 1)
    hint = f"; did you mean {prefix}{near[0]}?" if near else ""
    return SettingsError(f"{name!r} is not a setting ({origin}){hint}")


def read_text(path: str, origin: str) -> str:
    """Read a file, or raise the reason why not."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path!r} cannot be read: {getattr(error, 'strerror', error)} ({origin})") from None


def read_yaml(path: str) -> Any:
    """Read a YAML mapping, or raise where it is invalid."""
    import yaml  # most gates run without a file

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if keys.count(key.value) > 1:  # YAML would silently let the last value win
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is set twice", key.start_mark)
            return super().construct_mapping(node, deep)

    text = read_text(path, f"file {path}")
    try:
        return yaml.load(text, Loader)  # noqa: S506  # a SafeLoader that also refuses duplicate keys
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Show the problem and its line, but never the text around it, which may be a secret.
        problem, mark = getattr(error, "problem", None) or "not valid YAML", getattr(error, "problem_mark", None)
        raise SettingsError(f"{problem} (file {path}{f', line {mark.line + 1}' if mark else ''})") from None
