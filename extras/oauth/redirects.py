"""Redirect URIs: which ones a client may register, and which one it may ask for (RFC 9700 2.1, RFC 8252 7).

A redirect URI is compared as text, never parsed and put together again: parsers disagree about what is equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

MOST_REDIRECTS, MOST_REDIRECT_LENGTH, MOST_DOCUMENT_URL_LENGTH = 20, 2048, 500
# As people write them: browsers take 127.1 and 2130706433 for the same address, other clients do not.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LOOPBACK_URI = re.compile(r"(?P<host>http://(?:localhost|127\.0\.0\.1|\[::1\]))(?::(?P<port>[0-9]{1,5}))?"
                          r"(?P<rest>/[!-~]*)?\Z")
WRITTEN = re.compile(r"[!-~]+\Z")           # visible ASCII
CONFUSING = re.compile(r"[\\\"<>^`{|}*]")   # parsers read these differently, or they are wildcards
ENCODED_PATH = re.compile(r"%(?:2e|2f|5c)", re.IGNORECASE)     # some decode it, and climb out of their folder
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")
# Clients whose scheme is older than the rule that it should be a domain name backwards (RFC 8252 7.1).
KNOWN_APPS = frozenset({
    "antigravity", "claude", "cline", "codex", "cursor", "goose", "kiro", "lmstudio", "raycast", "trae", "vscode",
    "vscode-insiders", "vscodium", "warp", "windsurf", "windsurf-next", "zed"})


def find_redirect_flaw(uri: str) -> str | None:
    """Return why a redirect URI may not be registered; None if it may."""
    if len(uri) > MOST_REDIRECT_LENGTH:
        return f"is longer than {MOST_REDIRECT_LENGTH} characters"
    if not WRITTEN.match(uri) or CONFUSING.search(uri):
        return "has a blank, a wildcard, or a character that must be percent-encoded"
    try:
        parts = urlsplit(uri)
        parts.port      # noqa: B018  it is read for its error alone
    except ValueError:
        return "is not a URI"
    if "#" in uri:
        return "has a fragment"
    if not uri.startswith(parts.scheme + ":") or not SCHEME.match(parts.scheme):
        return "must begin with a scheme in lower case"
    if "@" in parts.netloc:
        return "names a user before its host"
    return find_scheme_flaw(uri, parts.scheme, parts.hostname)


def find_scheme_flaw(uri: str, scheme: str, host: str | None) -> str | None:
    """Return why a redirect URI may not have its scheme."""
    if scheme == "https":
        return None if host and uri.startswith("https://") else "names no host"
    if scheme == "http":
        return None if LOOPBACK_URI.match(uri) else (
            f"is plain http; that is for {', '.join(LOOPBACK)} only, and everything else needs https")
    if "." in scheme or scheme in KNOWN_APPS:   # so javascript:, data:, file: and their like are not allowed
        return None
    return ("has the scheme of no known app; a scheme of your own is a domain name backwards, such as "
            "com.example.app:/callback")


def is_same_redirect(asked: str, registered: str) -> bool:
    """Whether a redirect URI is the registered one; the port of a loopback one may differ (RFC 8252 7.3)."""
    if asked == registered:
        return True
    mine, theirs = LOOPBACK_URI.match(asked), LOOPBACK_URI.match(registered)
    return bool(mine and theirs and (mine["host"], mine["rest"]) == (theirs["host"], theirs["rest"])
                and int(mine["port"] or 80) < 2**16)


def find_document_url_flaw(url: str) -> str | None:
    """Return why a URL cannot be that of a metadata document (client ID metadata documents, draft, 3)."""
    if flaw := find_redirect_flaw(url):
        return flaw
    parts = urlsplit(url)
    if parts.scheme != "https" or len(url) > MOST_DOCUMENT_URL_LENGTH:
        return f"must be an https URL of at most {MOST_DOCUMENT_URL_LENGTH} characters"
    if parts.path in ("", "/") or {".", ".."} & set(parts.path.split("/")):
        return "must have a path, and no . or .. in it"
    if ENCODED_PATH.search(url) or parts.query:
        return "may have no query, and no encoded slash or dot"
    return None


def check_redirects(uris: Sequence[str]) -> str | None:
    """Return why a client may not register these redirect URIs; None if it may."""
    if not 1 <= len(uris) <= MOST_REDIRECTS:
        return f"a client has 1 to {MOST_REDIRECTS} redirect URIs"
    flaws = ((uri, find_redirect_flaw(uri)) for uri in uris)
    return next((f"the redirect URI {shorten(uri)!r} {flaw}" for uri, flaw in flaws if flaw), None)


def shorten(text: str) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= 100 else text[:100] + "…"
