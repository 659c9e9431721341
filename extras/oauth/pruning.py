"""Deletes what the authorization server does not need any more: ended sessions, used links, consents without sessions.

Each row stays for some days after its end, so that people and admins can see what happened.
"""

from __future__ import annotations

from asyncgate import Engine
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.durations import DAY_SECONDS


def end_of_grant(grant: stored_oauth.Grant) -> float:
    """Return when a session has ended or will end; one whose code nobody used ends with its code."""
    if grant.ended_at is not None:
        return grant.ended_at
    return grant.code_until if grant.code_used_at is None else grant.ends_at


async def prune_sessions(engine: Engine) -> int:
    """Delete what has ended days ago, in the one process that leads; return how many rows."""
    if not await engine.leads("sessions"):
        return 0
    directory, kept_seconds = Directory(engine), engine.settings.security.oauth.session_retention_days * DAY_SECONDS
    done = await directory.drop(stored_oauth.SignInLink, lambda row, now: (
        (row.ends_at if row.used_at is None else row.used_at) + kept_seconds <= now))
    done += await directory.drop(stored_oauth.Grant, lambda row, now: end_of_grant(row) + kept_seconds <= now)
    # Order: after the sessions.  A consent lasts as long as a session of it is kept, and some days to begin with.
    kept = {(row.user_id, row.client_id) async for row in directory.read(stored_oauth.Grant)}
    return done + await directory.drop(stored_oauth.Consent, lambda row, now: (
        row.given_at + kept_seconds <= now and (row.user_id, row.client_id) not in kept))
