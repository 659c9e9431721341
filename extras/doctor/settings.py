"""Settings that the server refuses, that open a door, that contradict each other, or that decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import ip_network
from typing import NamedTuple

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.identity.startup import require_strong_token
from asyncgate.parts.model import errors, findings, settings
from asyncgate.parts.model.connection import is_loopback

LATE_ADOPTION_SECONDS = 300.0       # a pause between beats after which the tasks of a dead gate wait for long
RANDOM_KEY = "set ASYNCGATE_API_KEY to a random text: `openssl rand -hex 32` prints one"


class Rule(NamedTuple):
    """What is wrong with settings, and its cure."""

    holds: Callable[[settings.Settings], object]
    make: Callable[[str, str], findings.Finding]
    seen: str
    cure: str


def on_postgres(settings: settings.Settings) -> bool:
    """Whether the database is Postgres."""
    return settings.database.url.startswith("postgres")


def is_reached(settings: settings.Settings) -> bool:
    """Whether others than this machine reach the gate."""
    return not is_loopback(settings.host)


RULES = [
    Rule(lambda s: s.allow_insecure_dev and (is_reached(s) or on_postgres(s)), findings.alarm,
         "allow_insecure_dev is on, off loopback or over Postgres: `serve` refuses to start",
         f"unset allow_insecure_dev, and {RANDOM_KEY}"),
    Rule(lambda s: s.allow_insecure_dev and not is_reached(s) and not on_postgres(s), findings.warn,
         "allow_insecure_dev is on: everybody on this machine is an admin without a credential",
         f"unset allow_insecure_dev, and {RANDOM_KEY}"),
    Rule(lambda s: is_reached(s) and not (s.security.tls.certificate_path or s.trusted_proxies), findings.warn,
         "others reach the gate over plain HTTP: tokens travel readable",
         "set security.tls.certificate_path, or name the TLS proxy in front of the gate in trusted_proxies"),
    Rule(lambda s: is_reached(s) and s.security.rate_limiting.enabled is False and not s.allow_insecure_dev,
         findings.warn,
         "others reach the gate, and limits are off: one caller can use up the time and the disk of all",
         findings.LIMIT_CURE),
    Rule(lambda s: any(ip_network(network).prefixlen == 0 for network in s.trusted_proxies if "/" in network),
         findings.warn,
         "trusted_proxies holds every address: anybody may say which address a call is from",
         "name only the addresses of your proxies in trusted_proxies"),
    Rule(lambda s: s.security.oauth.enabled and not s.public_url, findings.alarm,
         "security.oauth.enabled is on, and public_url is not set: `serve` refuses to start",
         "set public_url to the gate's URL as its clients type it, such as https://gate.example.com"),
    Rule(lambda s: s.security.oauth.enabled and not s.security.jwt.private_key_path, findings.alarm,
         "security.oauth.enabled is on, and there is no key to sign access tokens with: `serve` refuses to start",
         "`asyncgate keys signing make` makes one; name it in security.jwt.private_key_path"),
    Rule(lambda s: not s.security.tls.certificate_path and (
        s.security.tls.private_key_path or s.security.tls.private_key_password), findings.alarm,
         "a private key is set, and no certificate: `serve` refuses to start",
         "set security.tls.certificate_path, or unset the key"),
    Rule(lambda s: s.archive.enabled and not s.archive.directory, findings.alarm,
         "archive.enabled is on, and there is no folder for the archive: `serve` refuses to start",
         "set archive.directory to a folder that only the gate's user may read"),
    Rule(lambda s: s.security.rate_limiting.enabled and s.security.rate_limiting.storage == "redis"
         and not s.security.rate_limiting.redis_url, findings.alarm,
         "the limits are counted in redis, whose address is not set: `serve` refuses to start",
         "set security.rate_limiting.redis_url, or security.rate_limiting.storage=memory"),
    Rule(lambda s: on_postgres(s) and s.database.pgbouncer and not s.database.direct_url, findings.alarm,
         "database.pgbouncer is on without database.direct_url: `serve` refuses to start, because locks need a session",
         "set database.direct_url to the address of Postgres itself"),
    Rule(lambda s: on_postgres(s) and s.database.trusted_role, findings.warn,
         "database.trusted_role is on: the gate may log in as a role that can take down the wall between tenants",
         "connect as asyncgate_app, and unset database.trusted_role"),
    Rule(lambda s: on_postgres(s) and s.lease_sweep_interval_seconds > LATE_ADOPTION_SECONDS, findings.warn,
         "lease_sweep_interval_seconds is long: the tasks of a gate that died wait for three times as long",
         "set lease_sweep_interval_seconds to 10"),
    Rule(lambda s: s.escalation.enabled and not s.escalation.targets, findings.warn,
         "escalation.enabled is on, and escalations have no recipient", "name somebody in escalation.targets"),
    Rule(lambda s: not s.security.audit_logging.enabled, findings.warn,
         "the audit log is off: nobody can tell later who used which credential",
         "set security.audit_logging.enabled=true"),
    Rule(lambda s: s.security.rate_limiting.enabled and s.security.rate_limiting.storage == "memory"
         and s.security.rate_limiting.gates == 1 and on_postgres(s), findings.note,
         "each gate of this database counts the limits alone, so a tenant has them once for each gate",
         "set security.rate_limiting.gates to their number, or security.rate_limiting.storage=redis"),
]


class Idle(NamedTuple):
    """When settings decide nothing, and why."""

    holds: Callable[[settings.Settings], object]
    names: str                  # of settings or groups
    why: str


LIMITING = "security.rate_limiting"
IDLE_GROUPS = [
    Idle(lambda s: s.receipt_mode == "standalone", "ledger receipt_consistency_mode", "receipt_mode is standalone"),
    Idle(lambda s: s.receipt_mode == "receiptgate_integrated", "ledger.profile",
         "receipt_mode names the protocol already"),
    Idle(lambda s: s.receipt_mode == "memorygate_integrated" and s.ledger.profile == "memorygate",
         "ledger.dialect ledger.source_system ledger.contents", "the ledger is not a ReceiptGate"),
    Idle(lambda s: not s.ledger.circuit_breaker.enabled,
         " ".join(f"ledger.circuit_breaker.{name}" for name in (
             "failure_threshold", "timeout_seconds", "half_open_max_calls", "success_threshold")),
         "ledger.circuit_breaker.enabled is false"),
    Idle(lambda s: s.security.rate_limiting.enabled is False,
         f"{LIMITING}.storage {LIMITING}.redis_url {LIMITING}.address_calls_per_minute "
         f"{LIMITING}.anonymous_calls_per_minute {LIMITING}.server_calls_per_minute {LIMITING}.principal_percent "
         f"{LIMITING}.heartbeat_factor {LIMITING}.gates rate_limits", f"{LIMITING}.enabled is false"),
    Idle(lambda s: s.security.rate_limiting.enabled and s.security.rate_limiting.storage == "memory",
         f"{LIMITING}.redis_url {LIMITING}.store_timeout_seconds {LIMITING}.on_store_failure",
         f"{LIMITING}.storage is memory"),
    Idle(lambda s: not s.escalation.enabled,
         "escalation.targets escalation.lease_expiry_class escalation.attempts_spent_class",
         "escalation.enabled is false"),
    Idle(lambda s: not s.archive.enabled, "archive.interval_seconds", "archive.enabled is false"),
    Idle(lambda s: not s.security.audit_logging.enabled, "security.audit_logging.retention_days",
         "security.audit_logging.enabled is false"),
    Idle(lambda s: not s.security.tls.certificate_path, "security.tls.minimum_version",
         "security.tls.certificate_path is not set"),
    Idle(lambda s: not on_postgres(s),
         "database.pool_size database.pgbouncer database.direct_url database.archive_url database.notify "
         "database.poll_seconds database.trusted_role", "the database is not Postgres"),
]


def check_settings(at: Installation) -> Iterator[findings.Finding]:
    """Look for open doors, contradictions, and settings that decide nothing."""
    broken = [rule.make(rule.seen, rule.cure) for rule in RULES if rule.holds(at.settings)]
    yield from [*broken, *find_weak_tokens(at.settings), *find_idle_settings(at)] or [findings.all_well(
        f"{len(settings.list_settings(settings.Settings))} settings, which agree with each other")]


def find_weak_tokens(settings: settings.Settings) -> Iterator[findings.Finding]:
    """Yield the tokens that are easy to guess; none of them is shown."""
    # `serve` refuses it only where strangers can try
    makes = findings.alarm if is_reached(settings) else findings.warn
    if settings.api_key and is_weak(settings.api_key):
        yield makes("api_key is easy to guess: a placeholder, fewer than 16 characters, or a short text repeated",
                    RANDOM_KEY)
    if settings.receipt_mode != "standalone" and settings.ledger.auth_token and is_weak(settings.ledger.auth_token):
        yield findings.warn(
            "ledger.auth_token is easy to guess: a placeholder, fewer than 16 characters, or a text repeated",
            "give the gate its own key there: `asyncgate issue-key --url LEDGER`")


def is_weak(token: str) -> bool:
    """Whether a token is easy to guess."""
    try:
        require_strong_token(token, "")
    except errors.StartupError:
        return True
    return False


def find_idle_settings(at: Installation) -> Iterator[findings.Finding]:
    """Yield the settings that somebody has set and that decide nothing, in this release or beside other settings."""
    yield from (findings.note(f"{setting.name} decides nothing: {setting.says.removeprefix(settings.IDLE)}",
                              f"unset {setting.name}")
                for setting in settings.list_settings(settings.Settings) if setting.idle and at.is_set(setting))
    for idle in IDLE_GROUPS:
        names = [name for prefix in idle.names.split() for name in at.changed(prefix)]
        if names and idle.holds(at.settings):
            does = "decides" if len(names) == 1 else "decide"
            yield findings.note(f"{', '.join(names)} {does} nothing: {idle.why}", f"unset {names[0]}" + (
                f" and {len(names) - 1} more" if len(names) > 1 else ""))


def check_log(at: Installation) -> Iterator[findings.Finding]:
    """Look for a log that says too little or too much."""
    missing = {*settings.AuditLogging().sensitive_fields} - {*at.settings.security.audit_logging.sensitive_fields}
    if at.settings.log_level in ("error", "critical"):
        yield findings.warn(
            f"log_level is {at.settings.log_level}: refused credentials and a lost ledger are not logged",
            "set log_level=info")
    if at.settings.log_level == "debug":
        yield findings.note("log_level is debug: each call writes lines, which costs time and space",
                            "set log_level=info")
    if missing:
        yield findings.warn(
            f"security.audit_logging.sensitive_fields lacks {', '.join(sorted(missing))}: their values can "
            "reach the log", "add them to security.audit_logging.sensitive_fields")
    if at.settings.log_level in ("info", "warning") and not missing:
        yield findings.all_well(f"log_level {at.settings.log_level}, in the format {at.settings.log_format}, on stderr")
