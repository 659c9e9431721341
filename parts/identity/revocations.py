"""Revocations: access tokens that are refused although they have not expired (spec 21.9.1).

The rows are numbered without a gap, in the order of their commits, so a gate reads only those after the last one that
it has read.  It does so when it checks a token and its last look is five seconds old, and never in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from asyncgate import Caller, Engine, Extension, Work
from asyncgate.parts.identity.directory import Directory, RecordKey
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.process.kit import Flights

REVOCATIONS_SECONDS = 5.0       # how old the set in memory may be
LONGEST_VALID_SECONDS = 90 * DAY_SECONDS + 300.0    # an access token lives 90 days at most, and the longest leeway
LONGEST_SESSION_SECONDS = 30 * DAY_SECONDS          # of the console: what its setting allows at most
REVOCATION_KEYS: tuple[RecordKey, ...] = ((stored_oauth.RevocationHead, ()),)     # what `revoke` needs loaded
# A revocation by its id ends every token with that id; the others end those that were issued before it.
BY_ID = ("token", "session")


def revoke(work: Work, kind: stored_oauth.RevocationKind, subject: str, expires_at: float, by: str,
           reason: str | None, since: float | None = None) -> stored_oauth.Revocation:
    """Refuse access tokens from now until they have expired; the batch must have loaded REVOCATION_KEYS.

    Of a client, a user and a principal these are the tokens that were issued before now.  An `iat` may have fractions
    of a second, so that a token that is issued at once afterwards is good.
    """
    number = (work.find_record(stored_oauth.RevocationHead) or stored_oauth.RevocationHead()).number + 1
    row = stored_oauth.Revocation(f"{number:012d}", number, kind, subject, since or work.now, expires_at, work.now, by,
                                  reason)
    work.keep_record(row)
    work.keep_record(stored_oauth.RevocationHead(number))
    return row


def name_principal(tenant_id: str, kind: str, id: str) -> str:
    """Return the subject of the revocation of a principal."""
    return f"{tenant_id} {kind} {id}"


def name_token(tenant_id: str, jti: str) -> str:
    """Return the subject of the revocation of a token of one tenant; another tenant's issuer may use the same jti."""
    return f"{tenant_id} {jti}"


def end_console_sessions(work: Work, caller: Caller, everywhere: bool, reason: str | None = None) -> None:
    """Refuse the caller's session of the console from now on, or all sessions of its credential.

    The batch must have loaded REVOCATION_KEYS.
    """
    shown = caller.console
    since = max(work.now, shown.begun_at if shown else 0.0)     # another process may have begun it, by another clock
    name = name_credential(caller) if everywhere or shown is None else name_console_session(shown.id)
    revoke(work, "console", name, since + LONGEST_SESSION_SECONDS, str(caller.principal), reason, since)


def name_console_session(id: str) -> str:
    """Return the subject of the revocation of one session of the console."""
    return f"session {id}"


def name_credential(caller: Caller) -> str:
    """Return the subject of the revocation of all sessions of the console that a credential has begun."""
    if caller.key_id is not None:
        return f"key {caller.key_id}"
    if (token := caller.token) is None:
        return "shared token"
    return f"token {caller.tenant_id} {token.session_id or token.token_id or token.subject}"


class Ended(Struct, frozen=True):
    """What the set in memory knows of one subject."""

    since: float
    until: float


class RevocationSet(Extension):
    """The revocations in memory, as they were five seconds ago at most; those of this process at once."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self.now, self.clock = Directory(engine), engine.backend.now, clock
        self.known: dict[tuple[str, str], Ended] = {}
        self.last, self.read_at, self.version = "", float("-inf"), 0
        self.flights: Flights[str, None] = Flights()

    def is_fresh(self) -> bool:
        """Whether the set may be used as it is."""
        return 0 <= self.clock() - self.read_at < REVOCATIONS_SECONDS

    async def freshen(self) -> None:
        """Read what is new, if the last look is too old; raises DatabaseUnavailable.  Concurrent calls share one read.

        Security: a token that cannot be checked is not accepted.
        """
        while not self.is_fresh():
            await self.flights.join("", self._read)

    async def _read(self) -> None:
        begun = self.clock()
        while page := await self.directory.page(stored_oauth.Revocation, self.last):
            for row in page:
                self._add(row)
            self.last = page[-1].revocation_id
        self.read_at, now = begun, self.now()
        self.known = {key: ended for key, ended in self.known.items() if ended.until > now}

    def _add(self, row: stored_oauth.Revocation) -> None:
        self.version += 1
        key = row.kind, row.subject
        old = self.known.get(key, Ended(row.since, row.expires_at))
        self.known[key] = Ended(max(old.since, row.since), max(old.until, row.expires_at))

    def after_record_change(self, work: Work) -> None:
        """Take over what this process has revoked; `last` stays, because another process may have the number before."""
        for (kind, _), row in work.kept.items():
            if kind is stored_oauth.Revocation and row is not None:
                self._add(row)

    def has(self, kind: stored_oauth.RevocationKind, subject: str | None) -> bool:
        """Whether something was revoked."""
        return (kind, subject) in self.known

    def was_ended(self, kind: stored_oauth.RevocationKind, subject: str, begun_at: float) -> bool:
        """Whether what had begun at a time was ended since."""
        ended = self.known.get((kind, subject))
        return ended is not None and begun_at <= ended.since

    def find(self, caller: Caller) -> stored_oauth.RevocationKind | None:
        """Return what of a caller's token was revoked; None if nothing was."""
        if not self.known or (token := caller.token) is None:
            return None
        who, issued_at = caller.principal, caller.issued_at or 0.0
        subjects: tuple[tuple[stored_oauth.RevocationKind, str | None], ...] = (
            ("token", token.token_id), ("token", token.token_id and name_token(caller.tenant_id, token.token_id)),
            ("session", token.session_id), ("client", token.client_id), ("user", token.subject),
            ("principal", name_principal(caller.tenant_id, who.kind, who.id)))
        for kind, subject in subjects:
            ended = self.known.get((kind, subject)) if subject else None
            if ended is not None and (kind in BY_ID or issued_at < ended.since):
                return kind
        return None


async def drop_expired(engine: Engine) -> int:
    """Delete revocations whose tokens have all expired; return how many.

    The number of the last one stays in the head, so that no number is given twice.
    """
    return await Directory(engine).drop(stored_oauth.Revocation, lambda row, now: row.expires_at <= now)


async def prune_revocations(engine: Engine) -> int:
    """Delete what has expired, in the one process that leads; return how much."""
    return await drop_expired(engine) if await engine.leads("revocations") else 0
