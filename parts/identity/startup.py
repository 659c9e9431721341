"""Checks before a gate starts: refuse settings that expose its secrets or its contents to strangers."""

from __future__ import annotations

import logging
import os
import re

from msgspec.structs import replace

from asyncgate.parts.model import errors, settings
from asyncgate.parts.model.connection import is_loopback

log = logging.getLogger("asyncgate")

LEAST = 16      # the shortest allowed token, in characters, if strangers can try to guess it
PLACEHOLDER = re.compile(      # matched against the token without separators of words
    r"((change|replace|fill|set|edit)(me|this|it|in|by|with).*|(my|your|the|a)(secret|api|access|shared)*(key|token)?"
    r"(here|please)?"
    r"|((super|top)?secret|password|passwd|api|key|token|default|example|sample|placeholder|asyncgate|admin|root|test"
    r"|testing|demo|dev|development|letmein|qwerty|none|null|x)+)\d*", re.IGNORECASE)


def require_safe_start(settings: settings.Settings) -> None:
    """Refuse settings that open the gate to strangers, or that this release does not support; raises StartupError."""
    require_safe_setting(settings)
    if settings.allow_insecure_dev and not is_loopback(settings.host):
        raise errors.StartupError(
            f"allow_insecure_dev makes everybody who reaches the gate an admin: set host to loopback, "
            f"not {settings.host}")
    if settings.allow_insecure_dev:
        log.warning("INSECURE: allow_insecure_dev is on, so everybody who reaches %s is an admin", settings.host)


def settle_limits(settings: settings.Settings, tenants: int) -> settings.Settings:
    """Return the settings with limits where strangers or several tenants share the gate, unless they say otherwise."""
    limiting = settings.security.rate_limiting
    why = "" if is_loopback(settings.host) else f"others reach {settings.host}"
    why = f"{tenants} tenants share this gate" if tenants > 1 else why
    if limiting.enabled is not None or settings.allow_insecure_dev or not why:
        return settings
    log.info("rate limits and quotas are on, because %s: a tenant has the tier %s until `asyncgate set-limits TENANT "
             "--tier TIER` gives it another; security.rate_limiting.enabled decides it for all", why,
             limiting.default_tier)
    security = replace(settings.security, rate_limiting=replace(limiting, enabled=True))
    return replace(settings, security=security)


def warn_of_idle_settings(configured: settings.Configured) -> None:
    """Warn of each setting that is set and decides nothing."""
    for warning in settings.list_idle(configured):
        log.warning("%s", warning)


def require_safe_setting(settings: settings.Settings) -> None:
    """Refuse one unsafe setting; the error names the setting and the remedy."""
    if settings.allow_insecure_dev and settings.database.url.startswith("postgres"):
        raise errors.StartupError("allow_insecure_dev makes everybody an admin: use it only for trials on SQLite or in "
                                  "memory; for a Postgres database set ASYNCGATE_API_KEY and run `asyncgate serve`")
    if settings.api_key and not is_loopback(settings.host):
        require_strong_token(settings.api_key, settings.host)
    require_private_certificate(settings.security.tls)
    covered = settings.security.tls.certificate_path or settings.trusted_proxies or settings.allow_insecure_dev
    if not (is_loopback(settings.host) or covered):
        log.warning("plain HTTP on %s: others can read tokens on the network unless a proxy in front speaks TLS; name "
                    "that proxy in trusted_proxies, or set security.tls.certificate_path", settings.host)


def require_strong_token(token: str, host: str) -> None:
    """Refuse a shared token that is easy to guess; the error does not repeat the token."""
    better = "set a random one; `openssl rand -hex 32` prints one"
    if PLACEHOLDER.fullmatch(re.sub(r"[\W_]", "", token)):
        raise errors.StartupError(f"api_key is a placeholder, and others can reach {host}: {better}")
    if (token + token).find(token, 1) < LEAST:      # the length of the shortest text that the token repeats
        raise errors.StartupError(
            f"api_key is shorter than {LEAST} characters, or repeats a shorter text, and others can "
            f"reach {host}: {better}")


def require_private_certificate(tls: settings.Tls) -> None:
    """Refuse a private key without its certificate, and a key file that other users may read or change."""
    if not tls.certificate_path:
        if tls.private_key_path or tls.private_key_password:
            raise errors.StartupError("security.tls.certificate_path is not set, but a private key is; set both")
        return
    paths = {"certificate_path": tls.certificate_path, "private_key_path": tls.private_key_path}
    modes = {name: mode_of(name, path) for name, path in paths.items() if path}
    name, mode = modes.popitem()        # the key's own file, or else the file with certificate and key
    if mode & 0o077 and os.name == "posix":
        raise errors.StartupError(
            f"security.tls.{name}: {paths[name]!r} holds a private key that other users can access; run "
            "chmod 600 on it")


def mode_of(name: str, path: str) -> int:
    """Return a file's permissions; the error does not repeat a secret that was pasted in place of the path."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise errors.StartupError(
            f"security.tls.{name}: {settings.mask_credentials(path)!r} cannot be read: {why}") from None
