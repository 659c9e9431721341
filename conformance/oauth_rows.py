"""Rows of the authorization server, for tests of what happens to every table."""

from __future__ import annotations

from asyncgate import Work
from asyncgate.parts.model import stored_oauth

ISSUER = "https://id.example.com"
REDIRECT = "https://app.example.com/callback"


def keep_sign_ins(work: Work, mark: str) -> None:
    """Store a row of each kind: a program, a person, a session, and what was revoked."""
    tenant, now = work.tenant_id, work.now
    work.keep_record(stored_oauth.OAuthClient(
        "client", "registered", mark, f'["{REDIRECT}"]', None, "none", None, None, None, False, False, None, now, mark,
        now))
    work.keep_record(stored_oauth.User("user", ISSUER, "1", "ada@example.com", mark, tenant, "human", "ada", "agent",
                                       None, None,
                                       mark, now))
    work.keep_record(stored_oauth.Consent("user", "client", '["tasks:read"]', REDIRECT, now))
    work.keep_record(stored_oauth.Grant(
        "grant", "user", "client", tenant, "human", "ada", "agent", '["tasks:read"]', "https://gate.example.com/mcp",
        REDIRECT, mark, mark, now, 3600, now, now + 3600))
    work.keep_record(stored_oauth.SignInLink("link", tenant, "human", "ada", "agent", None, now, now + 600))
    work.keep_record(stored_oauth.Revocation("00000001", 1, "session", "grant", now, now + 3600, now, mark, None))
    work.keep_record(stored_oauth.RevocationHead(1))
