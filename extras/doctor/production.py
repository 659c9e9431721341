"""The checklist before going live (spec 21.14): each line answered by the gate, or with who has to answer it.

It looks at settings and at what the other checks do not judge: a gate on a laptop is sound without TLS and without
limits, a gate on the internet is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import findings
from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.model.settings import Settings, list_settings


class Point(NamedTuple):
    """One answer to a question of the checklist; the first that holds is given."""

    question: str
    holds: Callable[[Installation], object]
    severity: findings.Gravity
    seen: str           # {} is what `holds` has returned
    cure: str = ""


def check_production(at: Installation) -> Iterator[findings.Finding]:
    """Walk the checklist."""
    answered = set[str]()
    for question, holds, severity, seen, cure in CHECKLIST:
        if question not in answered and (held := holds(at)):
            answered.add(question)
            yield findings.Finding("", severity, f"{question}: {seen.format(held)}", cure)


def list_plain_secrets(at: Installation) -> str:
    """Return the secrets whose own text is in a variable of the environment."""
    origins = {setting.name: at.origins.get(setting.name, "") for setting in list_settings(Settings) if setting.secret}
    return ", ".join(name for name, origin in origins.items()
                     if origin.startswith("environment ") and not origin.endswith(("_FILE", "_COMMAND")))


ELSE: Callable[[Installation], object] = lambda at: True  # noqa: E731  # a row of a table
YOU = "only you know"
CHECKLIST = [
    Point("TLS", lambda at: at.settings.security.tls.certificate_path or at.settings.trusted_proxies, "ok",
          "by the gate or by a proxy that it trusts; the check tls looks at the certificate"),
    Point("TLS", lambda at: urlsplit(at.public_url).scheme == "https", "warning",
          "a proxy speaks TLS, and the gate does not trust it", "name it in trusted_proxies"),
    Point("TLS", ELSE, "warning", "no",
          "set security.tls.certificate_path, or name the TLS proxy in trusted_proxies"),
    Point("redirect URIs are listed", lambda at: not at.settings.security.oauth.enabled, "ok",
          "there is no authorization server"),
    Point("redirect URIs are listed", lambda at: at.settings.security.oauth.dynamic_registration, "warning",
          "any program may register itself", "set security.oauth.dynamic_registration=false"),
    Point("redirect URIs are listed", ELSE, "ok", "each program lists its own, and they match exactly"),
    Point("signing keys", lambda at: at.settings.security.jwt.private_key_path, "ok",
          "the check rights looks at the file"),
    Point("signing keys", lambda at: at.settings.security.oauth.enabled, "warning", "there is none",
          "`asyncgate keys signing make` makes one"),
    Point("signing keys", ELSE, "ok", "the gate signs no access tokens"),
    Point("API keys are hashed", ELSE, "ok", "always, with Argon2id"),
    Point("rate limits", lambda at: at.settings.security.rate_limiting.enabled
          and at.settings.security.rate_limiting.storage, "ok", "counted in {}"),
    Point("rate limits", ELSE, "warning", "no",
          "set security.rate_limiting.enabled=true, and look at `asyncgate get-limits`"),
    Point("tenants are apart", ELSE, "note", "the gate's own suite shows it",
          "run `asyncgate conformance` against an empty database like yours"),
    Point("audit log", lambda at: at.settings.security.audit_logging.enabled, "ok", "yes"),
    Point("audit log", ELSE, "warning", "no", "set security.audit_logging.enabled=true"),
    Point("headers of safety", ELSE, "ok", "every answer has them"),
    Point("secrets are in a secrets manager", list_plain_secrets, "warning", "in the environment: {}",
          "let a command print each: <NAME>_COMMAND; or keep it in a file: <NAME>_FILE"),
    Point("secrets are in a secrets manager", ELSE, "ok", "none is in the environment"),
    Point("row-level security", lambda at: not at.settings.database.url.startswith("postgres"), "ok",
          "on SQLite a trigger compares the tenant of every row that is written"),
    Point("row-level security", lambda at: at.settings.database.trusted_role, "warning",
          "the gate's role may take them down", "connect as asyncgate_app, and unset database.trusted_role"),
    Point("row-level security", ELSE, "ok",
          "forced on every table of tenants; the check database looks at the role"),
    Point("monitoring and alerts", lambda at: at.settings.metrics.enabled, "ok",
          "/metrics is there; let Prometheus load the alerts of deploy/"),
    Point("monitoring and alerts", ELSE, "warning", "the gate shows no metrics", "set metrics.enabled=true"),
    Point("plan for incidents", ELSE, "note", YOU, "docs/incidents.md has three; run each once"),
    Point("privacy policy", ELSE, "note", YOU, "docs/privacy-policy.md is a template; publish yours"),
    Point("terms of service", ELSE, "note", YOU, "publish yours"),
    Point("penetration test", ELSE, "note", YOU,
          "let somebody attack a gate like yours; SECURITY.md says how to report"),
    Point("load test", ELSE, "note", YOU, "`asyncgate bench --url URL` against a gate like yours"),
    Point("backup and recovery", ELSE, "note", YOU, "`asyncgate backup`, restore it elsewhere, `asyncgate verify`"),
    Point("protection against floods", lambda at: is_loopback(at.settings.host) and not at.settings.trusted_proxies,
          "ok", "only this machine reaches the gate"),
    Point("protection against floods", ELSE, "note",
          "the gate has limits for addresses; a network in front must stop what fills the line",
          "put the gate behind a provider that does"),
]
