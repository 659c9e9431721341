"""The guard of a running gate: it checks credentials, suspensions and rate limits, and feeds the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, News, Work
from asyncgate.parts.identity.audit import Auditor, describe_caller, visit
from asyncgate.parts.identity.buckets import Bucket, buckets_for, call_bucket, limit_error, task_bucket
from asyncgate.parts.identity.buckets import limit_headers as limit_headers
from asyncgate.parts.identity.keys import PLACES, IssuedKeys, places_of
from asyncgate.parts.identity.keys_stored import KEY_PREFIX
from asyncgate.parts.identity.limits import open_limits
from asyncgate.parts.identity.oversight import oversee
from asyncgate.parts.identity.quotas import OwnLimits
from asyncgate.parts.identity.ways import Identity
from asyncgate.parts.model import connection, errors, queries, stored, wire, wire_admin
from asyncgate.parts.model.caller import NOBODY
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.quotas import (
    FULL_OF_LEASES,
    STORAGE_QUOTA,
    apply_stricter_limits,
    find_allowance,
    is_exempt,
    is_throttled,
)
from asyncgate.parts.model.settings import Tier
from asyncgate.parts.process.kit import Flights
from asyncgate.parts.process.turns import LoopTurns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncgate import Operation
    from asyncgate.parts.identity.console import ConsoleSessions
    from asyncgate.parts.identity.revocations import RevocationSet
    from asyncgate.parts.model.console import BegunSession

log = logging.getLogger("asyncgate")

STATUS_SECONDS = 5.0        # how old a cached account may be
OUTDATED = float("-inf")    # when an account was read that has changed since
NO_WAY_IN = ("no credential could be valid: set ASYNCGATE_API_KEY to a secret of your choice, or issue a first key "
             "with `asyncgate keys issue --role admin --name first --principal-id me`, or run `asyncgate dev`")
MOST_ALLOTMENTS = 1000      # buckets of a principal at an address that are remembered, for limits that stay the same
NOT_MADE = {400, 403, 409, 413, 429}        # refusals after which no task was created; after a 503 that is unknown


class Accounts:
    """A cache of tenants' accounts, at most five seconds old; a change in this process shows at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.read: dict[str, tuple[float, stored.Account | None]] = {}
        self.flights: Flights[str, stored.Account | None] = Flights()
        self.tenants, self.tenants_at = frozenset[str](), float("-inf")     # that have stored anything

    async def of(self, tenant_id: str) -> stored.Account | None:
        """Return a tenant's account; concurrent calls share one query."""
        at, account = self.read.get(tenant_id, (OUTDATED, None))
        if 0 <= asyncio.get_running_loop().time() - at < STATUS_SECONDS:
            return account
        return await self.flights.join(tenant_id, lambda: self._read(tenant_id))

    async def _read(self, tenant_id: str) -> stored.Account | None:
        begun = asyncio.get_running_loop().time()
        account = await self.engine.backend.record(tenant_id, stored.Account)
        if self.flights.is_current(tenant_id):      # nobody has changed the account since
            self.read[tenant_id] = begun, account
        return account

    async def _require_known(self, caller: Caller) -> None:
        """Refuse an access token of a tenant that does not exist: an issuer cannot make tenants; raises InvalidToken.

        A tenant without an account exists if it has stored anything.  The answer holds for five seconds, because any
        of an issuer's tokens may name another tenant.
        """
        if caller.issued_at is None or caller.tenant_id == self.engine.settings.default_tenant_id:
            return
        if caller.tenant_id not in self.tenants:
            now = asyncio.get_running_loop().time()
            if now - self.tenants_at >= STATUS_SECONDS:
                self.tenants, self.tenants_at = frozenset(await self.engine.backend.tenants()), now
            if caller.tenant_id not in self.tenants:
                raise errors.refuse_credential("token_tenant", "the tenant of the token does not exist")

    def last_of(self, tenant_id: str) -> stored.Account | None:
        """Return a tenant's account as it was last read or changed: for rules, which never wait."""
        return self.read.get(tenant_id, (OUTDATED, None))[1]

    def forget(self, tenant_id: str) -> None:
        """Read an account again at the next call, and ignore a query that is still running: it may return the old row.

        Rules go by the old one until then.
        """
        self.note_change(tenant_id, self.last_of(tenant_id))

    def note_change(self, tenant_id: str, account: stored.Account | None) -> None:
        """Let rules go by another account until it is read again, at the next call.

        It is read because batches of a tenant may be noted in another order than they were committed in.
        """
        self.read[tenant_id] = OUTDATED, account
        self.flights.forget(tenant_id)

    async def require_active(self, caller: Caller) -> None:
        """Refuse a caller of a suspended tenant, or with a token of before a rotation; raises InvalidToken."""
        account = await self.of(caller.tenant_id)
        if account is None:
            return await self._require_known(caller)
        since, issued = account.tokens_since, caller.issued_at
        if account.suspended_at is not None:
            raise errors.refuse_suspended()
        if since is not None and issued is not None and issued < since:
            raise errors.refuse_credential("token_revoked",
                                           "all access tokens of the tenant issued before that time were revoked")


def list_refusals(reply: Any) -> list[wire.Problem]:
    """Return why items of a batch were refused."""
    return [item.error for item in reply.results if item.error is not None] if isinstance(reply, wire.Items) else []


class KeyStore:
    """The rows of issued keys in the gate's database."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.find_key = engine, engine.backend.find_key

    async def touch_key(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        """Store that a key was used, and the network that it was used from if that is new."""
        def touch(work: Work) -> None:
            key = work.find_record(stored.Key, key_id)
            if key is not None and (key.last_used_at or 0.0) < now:
                key = replace(key, last_used_at=now)
                work.keep_record(key)
            if key is not None and place is not None and place not in (known := places_of(key)):
                work.keep_record(replace(key, places=encode_json([place, *known][:PLACES]).decode()))

        await self.engine.change(tenant_id, touch, (stored.Key, (key_id,)))


class Guard(Extension):
    """Checks every request of a running gate: credential, suspension and rate; notes what the audit log must have."""

    def __init__(self, engine: Engine, relieve: Callable[[Engine, str], Awaitable[int]] | None = None,
                 identity: Identity | None = None) -> None:
        self.engine, self.settings, self.relieve = engine, engine.settings, relieve
        self.identity = identity or Identity(engine.settings)
        security = engine.settings.security
        self.keys = IssuedKeys(KeyStore(engine), engine.backend.now, note_new_place=self.note_new_place)
        self.accounts = Accounts(engine)
        self.auditor = Auditor(engine, security.audit_logging.enabled)
        self.revocations = self._watch_revocations()
        self.sessions = self._open_sessions()
        self.relieving: dict[str, asyncio.Task[None]] = {}
        self.enforced = bool(security.rate_limiting.enabled)     # if not, only tenants with stricter limits are limited
        self.limits = open_limits(engine.settings, shared=self.enforced)
        self.find_buckets = lru_cache(MOST_ALLOTMENTS)(partial(buckets_for, engine.settings))
        self.turns = LoopTurns()

    async def __aenter__(self) -> Guard:
        await self._require_credential()
        self.engine.extend(self)
        if not self.enforced:       # else each batch has loaded the account
            self.engine.extend(OwnLimits(self.settings, self.accounts.last_of))
        if self.revocations is not None:
            self.engine.extend(self.revocations)
        self.auditor.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        while self.relieving:
            await asyncio.gather(*self.relieving.values(), return_exceptions=True)
        await self.auditor.close()
        await self.keys.close()
        await self.limits.close()

    def _watch_revocations(self) -> RevocationSet | None:
        """Let the check of access tokens, if there is one, refuse those that were revoked."""
        if (tokens := self.identity.tokens) is None and not self.settings.console.enabled:
            return None
        from asyncgate.parts.identity.revocations import RevocationSet
        known = RevocationSet(self.engine)
        if tokens is not None:
            tokens.note_revoked, tokens.revocations = self.note_revoked_token, known
        return known

    def _open_sessions(self) -> ConsoleSessions | None:
        """Return the sessions of the console, if it is on."""
        if not self.settings.console.enabled or self.revocations is None:
            return None
        from asyncgate.parts.identity.console import ConsoleSessions
        return ConsoleSessions(self.engine, self.revocations)

    async def _require_credential(self) -> None:
        """Refuse to serve a gate for which no valid credential can exist; raises StartupError."""
        backend, settings = self.engine.backend, self.settings
        if settings.api_key or settings.allow_insecure_dev or settings.security.jwt.has_keys:
            return
        for tenant_id in await backend.tenants():
            if await backend.page(tenant_id, queries.Rows(stored.Key)):
                return
        raise errors.StartupError(NO_WAY_IN)

    def after_record_change(self, work: Work) -> None:
        """Forget the keys and the account that a batch of this process has changed."""
        for kind, key in work.kept:
            if kind is stored.Key:
                self.keys.forget(*key)
            elif kind is stored.Account:
                self.accounts.note_change(work.tenant_id, work.find_record(stored.Account))
                self.keys.forget_tenant(work.tenant_id)

    def hear_news(self, news: News) -> None:
        """Forget the keys and the account that a batch of another process has changed."""
        for key_id in news.keys:
            self.keys.forget(key_id)
        if news.account:
            self.accounts.forget(news.tenant_id)
            self.keys.forget_tenant(news.tenant_id)

    # Every request.

    async def resolve(self, scope: connection.Scope, op: Operation | None = None,
                      headers: connection.Headers | None = None) -> Caller:
        """Return the caller of a request; every façade uses this method.

        Checks that the credential is valid, the tenant is not suspended, and the call is within its rate limits.
        Refusals go to the audit log.  An open operation needs no credential.  A façade that does not know the operation
        yet calls `meter` as soon as it does.
        """
        if op is not None and op.open:
            scope["asyncgate.limits"] = ()      # health is never limited
            return NOBODY
        by_session = op is not None and headers is None     # MCP calls without an operation or with its own headers
        caller = await self._authenticate(scope, scope["headers"] if headers is None else headers, by_session)
        if op is not None:
            await self.meter(scope, caller, op)
        return caller

    async def admit(self, scope: connection.Scope, caller: Caller, op: Operation) -> None:
        """Let a caller in whose credential was checked before and is not sent again; it may have ended since."""
        self._note_visit(scope, scope["headers"])
        await self.check_caller(caller)
        scope["asyncgate.caller"] = caller
        await self.meter(scope, caller, op)

    async def known(self, headers: connection.Headers) -> Caller:
        """Return the caller of a credential without counting the call."""
        return await self.identity.caller(headers)

    async def _authenticate(self, scope: connection.Scope, headers: connection.Headers,
                            by_session: bool = False) -> Caller:
        """Return the caller of a valid credential of an active tenant; count and slow down invalid ones.

        `by_session` says whether a session of the console may take the place of its credential.
        """
        address, caller = self._note_visit(scope, headers), None
        try:
            if b"access_token=" in scope.get("query_string", b""):      # RFC 6750 2.3
                raise errors.TwoCredentials(
                    "a token does not belong in a URL; send it as Authorization: Bearer <token>, and get a "
                    "new one, because logs may have this one now")
            if opened := self.sessions.open(scope, headers, by_session) if self.sessions is not None else None:
                headers = opened.headers
            caller = await self.identity.caller(headers, address)
            await self.accounts.require_active(caller)
            if opened is not None and self.sessions is not None:
                caller = replace(caller, console=opened.shown)
                await self.sessions.require_current(caller)
        except errors.Unauthenticated as refusal:
            if caller is not None:      # a token that is good for itself, of a tenant that is suspended, for instance
                refusal.whose = refusal.whose or (caller.tenant_id, describe_caller(caller))
            self.auditor.note_stranger(refusal, connection.read_token(headers))
            # IssuedKeys counts wrong issued keys
            if not (connection.read_token(headers) or KEY_PREFIX).startswith(KEY_PREFIX):
                await self.keys.note_guess(address)
            await self._draw(scope, self._strangers(address))
            raise
        self.auditor.tally(caller, "auth_success", "info")
        scope["asyncgate.caller"] = caller
        return caller

    async def check_caller(self, caller: Caller) -> None:
        """Refuse a waiting call whose key was revoked or whose tenant was suspended meanwhile; raises InvalidToken."""
        await self.accounts.require_active(caller)
        if caller.key_id is not None and not await self.keys.still_good(caller.key_id):
            raise errors.InvalidToken("this credential is no longer valid")
        if caller.token is not None and self.identity.tokens is not None:
            await self.identity.tokens.recheck(caller)
        if caller.console is not None and self.sessions is not None:
            await self.sessions.require_current(caller)

    # The console.

    async def sign_in(self, scope: connection.Scope, credential: str) -> BegunSession:
        """Begin a session of the console with a credential, which is checked and counted as in any call."""
        assert self.sessions is not None
        headers = self.sessions.read_credential(scope, credential)
        caller = await self.resolve(scope, headers=headers)
        await self.meter(scope, caller, None)
        begun = await self.sessions.begin(scope, caller, credential.strip())
        self.auditor.note(caller.tenant_id, "console_signed_in", "info", **describe_caller(caller),
                          console_began=begun.text.partition(".")[0])
        return begun

    async def sign_out(self, scope: connection.Scope, everywhere: bool) -> connection.Headers:
        """End the session of a request, or all sessions of its credential; return what drops the cookie."""
        assert self.sessions is not None
        caller = await self._authenticate(scope, scope["headers"], by_session=True)
        await self.meter(scope, caller, None)
        return await self.sessions.end(scope, caller, everywhere)

    def _note_visit(self, scope: connection.Scope, headers: connection.Headers) -> str:
        """Note and return the address that a request comes from."""
        scope["asyncgate.address"] = address = connection.find_client_address(scope, headers,
                                                                              self.settings.trusted_proxies)
        visit.set(scope)
        return address

    async def meter(self, scope: connection.Scope, caller: Caller, op: Operation | None) -> None:
        """Count a call against its rate limits, and wait for its turn if it is a large one.

        Raises RateLimitExceeded, but not for the end of a lease.
        """
        scope["asyncgate.operation"] = operation = op.name if op else ""
        await self._meter(scope, caller, op)
        if self.turns.mixed_until or caller.tenant_id != self.turns.last:      # else nobody else has ever been about
            await self.turns.wait(caller.tenant_id, operation, writes=op is not None and op.kind == "W")

    async def charge(self, caller: Caller, op: Operation, more: int) -> None:
        """Count a call with many items as so many more calls: they cost as much as calls of their own."""
        if (scope := visit.get()) is not None:
            await self._meter(scope, caller, op, more)

    async def _meter(self, scope: connection.Scope, caller: Caller, op: Operation | None, cost: int = 1) -> None:
        may, passes = await self._find_limits(caller), op is not None and op.ends_leases
        if self.enforced:
            principal = caller.principal if caller.bound else None
            await self._draw(scope, self.find_buckets(may, caller.tenant_id, principal, scope["asyncgate.address"],
                                                      heartbeat=op is not None and op.heartbeat), cost, passes)
        elif may is not None:
            await self._draw(scope, [call_bucket(may, caller.tenant_id)], cost, passes)

    async def count_creation(self, caller: Caller, ask: wire.Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Count new tasks before they are created (21.4.2); those refused then, or existing already, do not count.

        The rate-limit headers show this limit only if it refuses.
        """
        if (may := await self._find_limits(caller)) is None:
            return await create(caller)
        orders, bucket = getattr(ask, "tasks", [ask]), task_bucket(may, caller.tenant_id)
        verdict = await self.limits.take([bucket], number := len(orders))
        if verdict.admitted:
            return await self._create_counted(caller, bucket, number, number, create)
        try:
            if not any(getattr(order, "idempotency_key", None) for order in orders):
                raise limit_error(verdict)
            return await self._create_beyond(caller, bucket, limit_error(verdict), number, create)
        except errors.RateLimitExceeded:
            if (scope := visit.get()) is not None:
                scope["asyncgate.limits"] = limit_headers(verdict)
            raise

    async def _create_beyond(self, caller: Caller, bucket: Bucket, refusal: errors.RateLimitExceeded, number: int,
                             create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Answer creations that are more than the limit has left: the repeated ones, and if they fit, the new ones."""
        reply = await create(replace(caller, no_new_tasks=refusal))
        if not reply.repeats:
            raise refusal
        new = sum(error.error == refusal.code for error in list_refusals(reply))
        if new and (await self.limits.take([bucket], new)).admitted:
            return await self._create_counted(caller, bucket, number, new, create)
        return reply

    async def _create_counted(self, caller: Caller, bucket: Bucket, number: int, counted: int,
                              create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Create tasks of which so many are counted, and give back what was counted too much."""
        try:
            reply = await create(caller)
        except errors.GateError as refusal:
            if refusal.status in NOT_MADE:
                await self.limits.give_back(bucket, counted)
                self._make_room(caller.tenant_id, refusal.more.get("quota"))
            raise
        refused = list_refusals(reply)
        made = number - getattr(reply, "repeats", 0) - len(refused)
        if made < counted:
            await self.limits.give_back(bucket, counted - made)
        self._make_room(caller.tenant_id, *{error.quota for error in refused})
        return reply

    def _make_room(self, tenant_id: str, *quotas: str | None) -> None:
        """Archive the oldest receipts of a tenant whose storage is full, if the archive is enabled (21.6.3)."""
        if self.relieve is None or STORAGE_QUOTA not in quotas or not self.settings.archive.enabled:
            return
        if tenant_id not in self.relieving:
            relief = self.relieve(self.engine, tenant_id)
            self.relieving[tenant_id] = asyncio.create_task(self._relieve(relief, tenant_id))

    async def _relieve(self, relief: Awaitable[int], tenant_id: str) -> None:
        try:
            moved = await relief
            self.auditor.note(tenant_id, "storage_full", "warning", archived=moved)
        except errors.GateError:
            log.exception("the receipts of tenant %s could not be archived, so its storage stays full", tenant_id)
        finally:
            del self.relieving[tenant_id]

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Note for the audit log that an operation was carried out."""
        if isinstance(reply, wire.Items):
            self.auditor.note_refused_items(caller, op.name, reply)
        if isinstance(reply, wire.Offers) and reply.warnings and FULL_OF_LEASES in reply.warnings:
            self.auditor.tally(caller, "quota_exceeded", "warning", operation=op.name, quota="concurrent_leases")
        elif isinstance(reply, wire.Terminator) and not reply.has_terminator:
            self.auditor.suspect(caller, "receipt_id", reply.parent_receipt_id)
        elif isinstance(reply, wire_admin.Limits) and reply.used is not None:
            await self._add_rates(reply, reply.used)
        if caller.key_id is not None or caller.token is not None:
            self.auditor.count_use(caller, op, ask, reply)
        if caller.role == "admin":
            await oversee(self.auditor, op, caller, ask, reply)

    def note_new_place(self, caller: Caller, place: str) -> None:
        """Note that a key is used from a new network, and tell the tenant's admins (spec 21.9.1)."""
        self.auditor.note(caller.tenant_id, "unusual_address", "warning", **describe_caller(caller), place=place)
        self.auditor.notice(caller.tenant_id, "unusual_address", key_id=caller.key_id, place=place,
                            principal=str(caller.principal))

    def note_revoked_token(self, caller: Caller, kind: str) -> None:
        """Note that a token is used after its revocation, such as after a logout, and tell the tenant's admins."""
        place = connection.group_address((visit.get() or {}).get("asyncgate.address") or "")
        self.auditor.note(caller.tenant_id, "revoked_token_used", "warning", place=place, **describe_caller(caller),
                          revoked=kind)
        self.auditor.notice(caller.tenant_id, "revoked_token_used", revoked=kind, principal=str(caller.principal))

    async def _add_rates(self, reply: wire_admin.Limits, used: wire_admin.Used) -> None:
        """Add to a reply how much of the rate limits is used, which no database counts."""
        account = await self.accounts.of(reply.tenant)
        may = find_allowance(self.settings, account, self.engine.backend.now())
        buckets = task_bucket(may, reply.tenant), call_bucket(may, reply.tenant)
        tasks, calls = [bucket.limit - (await self.limits.take([bucket], 0)).remaining if bucket.limit >= 0 else None
                        for bucket in buckets]
        used.tasks_this_hour, used.api_calls_this_hour = tasks, calls

    async def passing(self, scope: connection.Scope) -> errors.GateError | None:
        """Count a request that no operation counted, such as one to an unknown path."""
        if not self.enforced or "asyncgate.limits" in scope:
            return None
        try:
            await self._draw(scope, self._strangers(self._note_visit(scope, scope["headers"])))
        except errors.GateError as refusal:
            scope.setdefault("asyncgate.limits", [])
            self.refused(scope, refusal)
            return refusal
        return None

    async def _find_limits(self, caller: Caller) -> Tier | None:
        """Return the limits of the caller's tenant; None if it has none (21.4.5)."""
        account = await self.accounts.of(caller.tenant_id)
        if account is None and not self.enforced:
            return None
        now = self.engine.backend.now()
        if self.enforced:
            return None if is_exempt(account, now) else find_allowance(self.settings, account, now)
        if account is None or not is_throttled(account, now):
            return None
        return apply_stricter_limits(Tier(), account, now)

    def _strangers(self, address: str) -> list[Bucket]:
        return buckets_for(self.settings, None, None, None, address) if self.enforced else []

    async def _draw(self, scope: connection.Scope, buckets: list[Bucket], cost: int = 1, passes: bool = False) -> None:
        """Count a call; one that passes is counted where there is room, and never refused."""
        if not buckets:
            return
        if passes:
            scope["asyncgate.limits"] = ()      # known, also without the store: it is not drawn from any other bucket
        with contextlib.suppress(*(errors.LimiterUnavailable,) if passes else ()):
            verdict = await self.limits.take(buckets, cost)
            scope["asyncgate.limits"] = limit_headers(verdict)
            if verdict.admitted:
                return
            if not passes:
                raise limit_error(verdict, cost)
            for bucket in buckets:
                await self.limits.take([bucket], cost)

    def refused_call(self, caller: Caller, refusal: errors.GateError, operation: str,
                     ask: wire.Ask | None = None) -> None:
        """Note the refusal of one call of a request that has several."""
        self.auditor.note_refusal(caller, refusal, operation, ask)

    def refused(self, scope: connection.Scope, refusal: errors.GateError, ask: wire.Ask | None = None) -> None:
        """Note a refusal that concerns security; each is noted once."""
        if "asyncgate.address" not in scope:
            self._note_visit(scope, scope["headers"])
        if (caller := scope.get("asyncgate.caller")) is None:
            self.auditor.note_stranger(refusal)
        else:
            self.auditor.note_refusal(caller, refusal, scope.get("asyncgate.operation", ""), ask)
