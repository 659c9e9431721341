"""Deletes what the authorization server does not need any more: ended sessions, used links, consents without sessions.

Each row stays for some days after its end, so that people and admins can see what happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from asyncgate import Engine, Work
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model import stored, stored_oauth
from asyncgate.parts.model.durations import DAY_SECONDS

R = TypeVar("R", bound=Struct)

MOST_PRUNED = 500           # rows that one transaction deletes


def end_of_grant(grant: stored_oauth.Grant) -> float:
    """Return when a session has ended or will end; one whose code nobody used ends with its code."""
    if grant.ended_at is not None:
        return grant.ended_at
    return grant.code_until if grant.code_used_at is None else grant.ends_at


class SessionPruner:
    """Deletes old rows, in the one process that leads."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.directory = engine, Directory(engine)
        self.kept_seconds = engine.settings.security.oauth.session_retention_days * DAY_SECONDS

    async def run(self) -> int:
        """Delete what has ended days ago; return how many rows."""
        if not await self.engine.leads("sessions"):
            return 0
        done = await self._prune(stored_oauth.SignInLink, lambda row, now: (
            (row.ends_at if row.used_at is None else row.used_at) + self.kept_seconds <= now))
        done += await self._prune(stored_oauth.Grant, lambda row, now: end_of_grant(row) + self.kept_seconds <= now)
        # Order: after the sessions.  A consent lasts as long as a session of it is kept, and some days to begin with.
        kept = {(row.user_id, row.client_id) async for row in self.directory.read(stored_oauth.Grant)}
        return done + await self._prune(stored_oauth.Consent, lambda row, now: (
            row.given_at + self.kept_seconds <= now and (row.user_id, row.client_id) not in kept))

    async def _prune(self, kind: type[R], is_old: Callable[[R, float], bool]) -> int:
        now, done = self.engine.backend.now(), 0
        old = [stored.key_of(row) async for row in self.directory.read(kind) if is_old(row, now)]
        for at in range(0, len(old), MOST_PRUNED):
            keys = old[at:at + MOST_PRUNED]

            def drop(work: Work, keys: list[tuple[str, ...]] = keys) -> int:
                # A row may have changed since it was read: a person may just have given the consent again.
                rows = [row for key in keys if (row := work.find_record(kind, *key)) and is_old(row, work.now)]
                for row in rows:
                    work.drop_record(kind, *stored.key_of(row))
                return len(rows)
            done += await self.directory.change(drop, *((kind, key) for key in keys))
        return done
