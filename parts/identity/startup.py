"""What keeps a gate from starting: settings under which its secrets, or all it holds, would be anybody's."""

from __future__ import annotations

import logging
import os
import re

from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import Settings, Tls, mask_credentials

log = logging.getLogger("asyncgate")

LEAST = 16      # characters of a token that strangers may try to guess
PLACEHOLDER = re.compile(      # written without what separates words
    r"((change|replace|fill|set|edit)(me|this|it|in|by|with).*|(my|your|the|a)(secret|api|access|shared)*(key|token)?"
    r"(here|please)?"
    r"|((super|top)?secret|password|passwd|api|key|token|default|example|sample|placeholder|asyncgate|admin|root|test"
    r"|testing|demo|dev|development|letmein|qwerty|none|null|x)+)\d*", re.IGNORECASE)


def guard_start(settings: Settings) -> None:
    """Refuse to start what would be open to the world, or promise what this release cannot do."""
    guard(settings)
    if settings.allow_insecure_dev and not is_loopback(settings.host):
        raise StartupError(f"allow_insecure_dev opens the gate to everybody who reaches it: it needs a loopback host, "
                           f"not {settings.host}")
    if settings.security.oauth.enabled:
        raise StartupError("security.oauth.enabled is not part of this release; unset it")
    if settings.allow_insecure_dev:
        log.warning("INSECURE: allow_insecure_dev is on, whoever reaches %s is admin", settings.host)


def guard(settings: Settings) -> None:
    """Refuse to start with what nobody should run; say which setting it is, and what to do."""
    if settings.allow_insecure_dev and settings.database.url.startswith("postgres"):
        raise StartupError("allow_insecure_dev lets everybody in as admin: it is for trials on SQLite or in memory, "
                           "not for a Postgres database; there set ASYNCGATE_API_KEY and run `asyncgate serve`")
    if settings.api_key and not is_loopback(settings.host):
        guard_token(settings.api_key, settings.host)
    guard_certificate(settings.security.tls)
    covered = settings.security.tls.certificate_path or settings.trusted_proxies or settings.allow_insecure_dev
    if not (is_loopback(settings.host) or covered):
        log.warning("plain HTTP on %s: tokens travel readable unless a proxy in front speaks TLS; name that proxy in "
                    "trusted_proxies, or set security.tls.certificate_path", settings.host)


def guard_token(token: str, host: str) -> None:
    """Refuse a shared token that whoever reaches the gate could guess; the text does not repeat it."""
    better = "take a random one, as `openssl rand -hex 32` writes it"
    if PLACEHOLDER.fullmatch(re.sub(r"[\W_]", "", token)):
        raise StartupError(f"api_key is a placeholder, and {host} is reached by others: {better}")
    if (token + token).find(token, 1) < LEAST:      # so long is what it repeats, if it repeats something
        raise StartupError(f"api_key is shorter than {LEAST} characters, or a short text repeated, and {host} is "
                           f"reached by others: {better}")


def guard_certificate(tls: Tls) -> None:
    """Refuse a key without its certificate, and one that others than its owner may read or change."""
    if not tls.certificate_path:
        if tls.private_key_path or tls.private_key_password:
            raise StartupError("security.tls.certificate_path is missing: there is a private key, and no certificate")
        return
    paths = {"certificate_path": tls.certificate_path, "private_key_path": tls.private_key_path}
    modes = {name: mode_of(name, path) for name, path in paths.items() if path}
    name, mode = modes.popitem()        # the key's own file, or else the one that holds both
    if mode & 0o077 and os.name == "posix":
        raise StartupError(f"security.tls.{name}: {paths[name]!r} holds a private key that others than its owner may "
                           "use; chmod 600")


def mode_of(name: str, path: str) -> int:
    """Return who may do what with a file; what was pasted in place of its path is not repeated."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartupError(f"security.tls.{name}: {mask_credentials(path)!r} cannot be read: {why}") from None
