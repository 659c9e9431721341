"""The checklist before going live (spec 21.14): each line answered by the gate, or with who has to answer it.

It looks at settings and at what the other checks do not judge: a gate on a laptop is sound without TLS and without
limits, a gate on the internet is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import findings
from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.model.settings import Settings, list_settings


def check_production(at: Installation) -> Iterator[findings.Finding]:
    """Walk the checklist."""
    for question, answer in CHECKLIST:
        yield answer(at, question)


def ask_tls(at: Installation, question: str) -> findings.Finding:
    """TLS certificate valid and configured."""
    settings = at.settings
    if settings.security.tls.certificate_path or settings.trusted_proxies:
        return findings.all_well(
            f"{question}: by the gate or by a proxy that it trusts; the check tls looks at the certificate")
    if urlsplit(at.public_url).scheme == "https":
        return findings.warn(f"{question}: a proxy speaks TLS, and the gate does not trust it",
                             "name it in trusted_proxies")
    return findings.warn(f"{question}: no",
                         "set security.tls.certificate_path, or name the TLS proxy in trusted_proxies")


def ask_redirects(at: Installation, question: str) -> findings.Finding:
    """OAuth redirect URIs allowlisted."""
    oauth = at.settings.security.oauth
    if not oauth.enabled:
        return findings.all_well(f"{question}: there is no authorization server")
    if oauth.dynamic_registration:
        return findings.warn(f"{question}: any program may register itself",
                             "set security.oauth.dynamic_registration=false")
    return findings.all_well(f"{question}: each program lists its own, and they match exactly")


def ask_signing(at: Installation, question: str) -> findings.Finding:
    """JWT signing keys generated and secured."""
    jwt = at.settings.security.jwt
    if at.settings.security.oauth.enabled and not jwt.private_key_path:
        return findings.warn(f"{question}: there is none", "`asyncgate keys signing make` makes one")
    return findings.all_well(f"{question}: the check rights looks at the file" if jwt.private_key_path else
                             f"{question}: the gate signs no access tokens")


def ask_hashes(at: Installation, question: str) -> findings.Finding:
    """API keys hashed in database."""
    return findings.all_well(f"{question}: always, with Argon2id")


def ask_limits(at: Installation, question: str) -> findings.Finding:
    """Rate limiting enabled and tested."""
    limiting = at.settings.security.rate_limiting
    return findings.all_well(f"{question}: counted in {limiting.storage}") if limiting.enabled else findings.warn(
        f"{question}: no", "set security.rate_limiting.enabled=true, and look at `asyncgate get-limits`")


def ask_isolation(at: Installation, question: str) -> findings.Finding:
    """Multi-tenant isolation verified."""
    return findings.note(f"{question}: the gate's own suite shows it",
                         "run `asyncgate conformance` against an empty database like yours")


def ask_audit(at: Installation, question: str) -> findings.Finding:
    """Audit logging enabled."""
    return findings.all_well(f"{question}: yes") if at.settings.security.audit_logging.enabled else findings.warn(
        f"{question}: no", "set security.audit_logging.enabled=true")


def ask_headers(at: Installation, question: str) -> findings.Finding:
    """Security headers configured."""
    return findings.all_well(f"{question}: every answer has them")


def ask_secrets(at: Installation, question: str) -> findings.Finding:
    """Secrets in secrets manager (not env vars)."""
    plain = [one.name for one in list_settings(Settings) if one.secret and is_in_environment(at, one.name)]
    if plain:
        return findings.warn(f"{question}: in the environment: {', '.join(plain)}",
                             "let a command print each: <NAME>_COMMAND; or keep it in a file: <NAME>_FILE")
    return findings.all_well(f"{question}: none is in the environment")


def is_in_environment(at: Installation, name: str) -> bool:
    """Whether a setting's own text is in a variable of the environment."""
    origin = at.origins.get(name, "")
    return origin.startswith("environment ") and not origin.endswith(("_FILE", "_COMMAND"))


def ask_walls(at: Installation, question: str) -> findings.Finding:
    """Database RLS policies enabled."""
    url = at.settings.database.url
    if not url.startswith("postgres"):
        return findings.all_well(f"{question}: on SQLite a trigger compares the tenant of every row that is written")
    if at.settings.database.trusted_role:
        return findings.warn(f"{question}: the gate's role may take them down",
                             "connect as asyncgate_app, and unset database.trusted_role")
    return findings.all_well(f"{question}: forced on every table of tenants; the check database looks at the role")


def ask_monitoring(at: Installation, question: str) -> findings.Finding:
    """Monitoring and alerting configured."""
    return findings.all_well(f"{question}: /metrics is there; let Prometheus load the alerts of deploy/") if (
        at.settings.metrics.enabled) else findings.warn(f"{question}: the gate shows no metrics",
                                                        "set metrics.enabled=true")


def ask_backup(at: Installation, question: str) -> findings.Finding:
    """Backup and recovery tested."""
    return findings.note(f"{question}: only you know", "`asyncgate backup`, restore it elsewhere, `asyncgate verify`")


def ask_floods(at: Installation, question: str) -> findings.Finding:
    """DDoS protection configured."""
    if is_loopback(at.settings.host) and not at.settings.trusted_proxies:
        return findings.all_well(f"{question}: only this machine reaches the gate")
    return findings.note(
        f"{question}: the gate has limits for addresses; a network in front must stop what fills the line",
                         "put the gate behind a provider that does")


def ask_people(cure: str) -> Callable[[Installation, str], findings.Finding]:
    """Return the answer to a question that only people can answer."""
    return lambda at, question: findings.note(f"{question}: only you know", cure)


CHECKLIST: list[tuple[str, Callable[[Installation, str], findings.Finding]]] = [
    ("TLS", ask_tls),
    ("redirect URIs are listed", ask_redirects),
    ("signing keys", ask_signing),
    ("API keys are hashed", ask_hashes),
    ("rate limits", ask_limits),
    ("tenants are apart", ask_isolation),
    ("audit log", ask_audit),
    ("headers of safety", ask_headers),
    ("secrets are in a secrets manager", ask_secrets),
    ("row-level security", ask_walls),
    ("monitoring and alerts", ask_monitoring),
    ("plan for incidents", ask_people("docs/incidents.md has three; run each once")),
    ("privacy policy", ask_people("docs/privacy-policy.md is a template; publish yours")),
    ("terms of service", ask_people("publish yours")),
    ("penetration test", ask_people("let somebody attack a gate like yours; SECURITY.md says how to report")),
    ("load test", ask_people("`asyncgate bench --url URL` against a gate like yours")),
    ("backup and recovery", ask_backup),
    ("protection against floods", ask_floods),
]
