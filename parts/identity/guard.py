"""What a running gate keeps of identity: issued keys as a way in, what is agreed with tenants, the auditor."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, Needs, News, Work
from asyncgate.parts.identity.audit import Auditor, describe_caller, visit
from asyncgate.parts.identity.buckets import Bucket, buckets_for, call_bucket, limit_error, task_bucket
from asyncgate.parts.identity.buckets import limit_headers as limit_headers
from asyncgate.parts.identity.keys import PLACES, IssuedKeys, places_of
from asyncgate.parts.identity.keys_stored import KEY_PREFIX
from asyncgate.parts.identity.limits import open_limits
from asyncgate.parts.identity.oversight import oversee
from asyncgate.parts.identity.ways import Identity
from asyncgate.parts.model.caller import NOBODY
from asyncgate.parts.model.connection import Headers, Scope, find_client_address, read_token
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.errors import GateError, InvalidToken, StartupError, Unauthenticated
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.quotas import STORAGE_QUOTA, apply_stricter_limits, find_allowance, is_exempt, is_throttled
from asyncgate.parts.model.settings import Tier
from asyncgate.parts.model.stored import Account, Key
from asyncgate.parts.model.wire import Ask, Items, Terminator
from asyncgate.parts.model.wire_admin import Limits as LimitsReply
from asyncgate.parts.model.wire_admin import Used

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncgate import Operation

log = logging.getLogger("asyncgate")

STATUS_SECONDS = 5.0        # how old an account may be that a request is judged by
NO_WAY_IN = ("no way in: set ASYNCGATE_API_KEY to a secret of your choice, or issue a first key with "
             "`asyncgate keys issue --role admin --name first --principal-id me`, or run `asyncgate dev`")
NOT_MADE = {400, 403, 409, 413, 429}        # refusals after which there is no task; of a 503 nobody knows


class Accounts:
    """What is agreed with tenants, as of five seconds ago at most, or of the last change in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.read: dict[str, tuple[float, Account | None]] = {}
        self.reading: dict[str, asyncio.Task[Account | None]] = {}

    async def of(self, tenant_id: str) -> Account | None:
        """Return what is agreed with a tenant; many that ask at once cost one query."""
        at, account = self.read.get(tenant_id, (0.0, None))
        if 0 <= asyncio.get_running_loop().time() - at < STATUS_SECONDS:
            return account
        if tenant_id not in self.reading:
            self.reading[tenant_id] = asyncio.create_task(self._read(tenant_id))
        return await asyncio.shield(self.reading[tenant_id])

    async def _read(self, tenant_id: str) -> Account | None:
        begun = asyncio.get_running_loop().time()
        try:
            account = await self.engine.backend.record(tenant_id, Account)
            if self._is_mine(tenant_id):
                self.read[tenant_id] = begun, account
            return account
        finally:
            if self._is_mine(tenant_id):
                del self.reading[tenant_id]

    def _is_mine(self, tenant_id: str) -> bool:
        """Whether nobody has changed the account since this task began to read it."""
        return self.reading.get(tenant_id) is asyncio.current_task()

    def forget(self, tenant_id: str) -> None:
        """Drop a cached account, and ignore a query that is still running: it may return the old row."""
        self.read.pop(tenant_id, None)
        self.reading.pop(tenant_id, None)

    async def admit(self, caller: Caller) -> None:
        """Refuse the credentials of a suspended tenant."""
        account = await self.of(caller.tenant_id)
        if account is None:
            return
        since, issued = account.tokens_since, caller.issued_at
        if account.suspended_at is not None:
            raise unfit("tenant_suspended", "the tenant is suspended")
        if since is not None and issued is not None and issued < since:
            raise unfit("token_revoked", "all access tokens of the tenant issued before that time were taken back")


def unfit(code: str, why: str) -> InvalidToken:
    """Make the refusal of what was good once, with the reason for the log."""
    no = InvalidToken("this credential is not good any more")
    no.because = code, why
    return no


class Store:
    """Where issued keys find their rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.find_key = engine, engine.backend.find_key

    async def touch_key(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        """Note that a key was used, and from where if that is new."""
        def touch(engine: Engine, work: Work, caller: Caller, ask: Ask) -> None:
            key = work.find_record(Key, key_id)
            if key is not None and (key.last_used_at or 0.0) < now:
                key = replace(key, last_used_at=now)
                work.keep_record(key)
            if key is not None and place is not None and place not in (known := places_of(key)):
                work.keep_record(replace(key, places=encode_json([place, *known][:PLACES]).decode()))

        def load(needs: Needs, caller: Caller, ask: Ask) -> None:
            needs.records.add((Key, (key_id,)))
        caller = self.engine.make_own_caller(tenant_id)
        await self.engine.write(touch, load, caller, Ask())


class Guard(Extension):
    """Stands at the door of a running gate: who is let in, how often, and what is written down about it."""

    def __init__(self, engine: Engine, relieve: Callable[[Engine, str], Awaitable[int]] | None = None,
                 identity: Identity | None = None) -> None:
        self.engine, self.settings, self.relieve = engine, engine.settings, relieve
        self.identity = identity or Identity(engine.settings)
        security = engine.settings.security
        self.keys = IssuedKeys(Store(engine), security.api_keys, engine.backend.now, moved=self.moved)
        self.accounts = Accounts(engine)
        self.auditor = Auditor(engine, security.audit_logging.enabled)
        self.relieving: dict[str, asyncio.Task[None]] = {}
        self.enforced = security.rate_limiting.enabled      # else only tenants with temporary limits
        self.limits = open_limits(engine.settings, shared=self.enforced)

    async def __aenter__(self) -> Guard:
        await self._require_a_way_in()
        self.engine.extend(self)
        self.auditor.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        while self.relieving:
            await asyncio.gather(*self.relieving.values(), return_exceptions=True)
        await self.auditor.close()
        await self.keys.close()
        await self.limits.close()

    async def _require_a_way_in(self) -> None:
        """Refuse to serve a gate that nobody could enter."""
        backend, settings = self.engine.backend, self.settings
        if settings.api_key or settings.allow_insecure_dev or settings.security.jwt.has_keys:
            return
        for tenant_id in await backend.tenants():
            if await backend.page(tenant_id, Rows(Key)):
                return
        raise StartupError(NO_WAY_IN)

    def after_record_change(self, work: Work) -> None:
        """Forget the keys and the account that a batch of this process has changed."""
        for kind, key in work.kept:
            if kind is Key:
                self.keys.forget(*key)
            elif kind is Account:
                self._forget(work.tenant_id)

    def hear_news(self, news: News) -> None:
        """Learn from a commit of another process."""
        for key_id in news.keys:
            self.keys.forget(key_id)
        if news.account:
            self._forget(news.tenant_id)

    def _forget(self, tenant_id: str) -> None:
        self.accounts.forget(tenant_id)
        self.keys.forget_tenant(tenant_id)

    # Every request.

    async def resolve(self, scope: Scope, op: Operation | None = None, headers: Headers | None = None) -> Caller:
        """Return who makes a request: the one way in, for every face.

        The credential is good, its tenant is not suspended, and the call is within its rate.  Who is refused is written
        down.  An operation that is open needs no credential.  A face that does not know the operation yet counts the
        call with `meter` as soon as it does.
        """
        if op is not None and op.open:
            scope["asyncgate.limits"] = ()      # how the gate is may be asked at any time
            return NOBODY
        caller = await self._admit(scope, scope["headers"] if headers is None else headers)
        if op is not None:
            await self.meter(scope, caller, op)
        return caller

    async def known(self, headers: Headers) -> Caller:
        """Return whom a credential stands for, and count nothing."""
        return await self.identity.caller(headers)

    async def _admit(self, scope: Scope, headers: Headers) -> Caller:
        address = self._visited(scope, headers)
        try:
            caller = await self.identity.caller(headers, address)
            await self.accounts.admit(caller)
        except Unauthenticated as no:
            self.auditor.stranger(no)
            if not (read_token(headers) or KEY_PREFIX).startswith(KEY_PREFIX):     # wrong issued keys are slowed down
                await self.keys.guessed(address)
            await self._draw(scope, self._strangers(address))
            raise
        self.auditor.admitted(caller)
        scope["asyncgate.caller"] = caller
        return caller

    async def check_caller(self, caller: Caller) -> None:
        """Refuse a caller whose key or tenant was barred while its call waited."""
        await self.accounts.admit(caller)
        if caller.key_id is not None and not await self.keys.still_good(caller.key_id):
            raise InvalidToken("this credential is not good any more")

    def _visited(self, scope: Scope, headers: Headers) -> str:
        """Note where a request comes from."""
        scope["asyncgate.address"] = address = find_client_address(scope, headers, self.settings.trusted_proxies)
        visit.set(scope)
        return address

    async def meter(self, scope: Scope, caller: Caller, op: Operation | None) -> None:
        """Count a call; raises RateLimitExceeded."""
        scope["asyncgate.operation"] = op.name if op else ""
        may = await self._may(caller)
        if self.enforced:
            principal = caller.principal if caller.bound else None
            await self._draw(scope, buckets_for(self.settings, may, caller.tenant_id, principal,
                                                scope["asyncgate.address"], heartbeat=op is not None and op.heartbeat))
        elif may is not None:
            await self._draw(scope, [call_bucket(may, caller.tenant_id)])

    async def count_creation(self, caller: Caller, number: int, create: Callable[[], Awaitable[Any]]) -> Any:
        """Count new tasks before they are made (21.4.2); those that are refused then do not count.

        The answer tells of that limit only when it refuses.
        """
        if (may := await self._may(caller)) is None:
            return await create()
        bucket = task_bucket(may, caller.tenant_id)
        verdict = await self.limits.take([bucket], number)
        if not verdict.admitted:
            if (scope := visit.get()) is not None:
                scope["asyncgate.limits"] = limit_headers(verdict)
            raise limit_error(verdict)
        try:
            reply = await create()
        except GateError as no:
            if no.status in NOT_MADE:
                await self.limits.give_back(bucket, number)
                self._make_room(caller.tenant_id, no.more.get("quota"))
            raise
        if isinstance(reply, Items) and (refused := [item.error for item in reply.results if item.error is not None]):
            await self.limits.give_back(bucket, len(refused))
            self._make_room(caller.tenant_id, *{error.quota for error in refused})
        return reply

    def _make_room(self, tenant_id: str, *quotas: str | None) -> None:
        """Have the oldest receipts archived of a tenant whose storage is full, where there is an archive (21.6.3)."""
        if self.relieve is None or STORAGE_QUOTA not in quotas or not self.settings.archive.enabled:
            return
        if tenant_id not in self.relieving:
            relief = self.relieve(self.engine, tenant_id)
            self.relieving[tenant_id] = asyncio.create_task(self._relieve(relief, tenant_id))

    async def _relieve(self, relief: Awaitable[int], tenant_id: str) -> None:
        try:
            moved = await relief
            self.auditor.note(tenant_id, "storage_full", "warning", archived=moved)
        except GateError:
            log.exception("the archive made no room for tenant %s", tenant_id)
        finally:
            del self.relieving[tenant_id]

    async def after_call(self, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
        """Write down what the audit log should know of an operation that was carried out."""
        if isinstance(reply, Items):
            self.auditor.parts(caller, op.name, reply)
        elif isinstance(reply, Terminator) and not reply.has_terminator:
            self.auditor.unanswered(caller, reply.parent_receipt_id)
        elif isinstance(reply, LimitsReply) and reply.used is not None:
            await self._used(reply, reply.used)
        if caller.key_id is not None:
            self.auditor.used(caller, op, ask, reply)
        if caller.role == "admin":
            await oversee(self.auditor, op, caller, ask, reply)

    def moved(self, caller: Caller, place: str) -> None:
        """Note that a key is used from where it never was (spec 21.9.1)."""
        self.auditor.note(caller.tenant_id, "unusual_address", "warning", **describe_caller(caller), place=place)
        self.auditor.notice(caller.tenant_id, "unusual_address", key_id=caller.key_id, place=place,
                            principal=str(caller.principal))

    async def _used(self, reply: LimitsReply, used: Used) -> None:
        """Say what is used of the rates, which no database counts."""
        account = await self.accounts.of(reply.tenant)
        may = find_allowance(self.settings, account, self.engine.backend.now())
        buckets = task_bucket(may, reply.tenant), call_bucket(may, reply.tenant)
        tasks, calls = [one.limit - (await self.limits.take([one], 0)).remaining if one.limit >= 0 else None
                        for one in buckets]
        used.tasks_this_hour, used.api_calls_this_hour = tasks, calls

    async def passing(self, scope: Scope) -> GateError | None:
        """Count a request that no operation has counted, such as one to an unknown path."""
        if not self.enforced or "asyncgate.limits" in scope:
            return None
        try:
            await self._draw(scope, self._strangers(self._visited(scope, scope["headers"])))
        except GateError as no:
            scope.setdefault("asyncgate.limits", [])
            self.refused(scope, no)
            return no
        return None

    async def _may(self, caller: Caller) -> Tier | None:
        """Return what the caller's tenant may use; None where nothing of it is limited (21.4.5)."""
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

    async def _draw(self, scope: Scope, buckets: list[Bucket]) -> None:
        if not buckets:
            return
        verdict = await self.limits.take(buckets)
        scope["asyncgate.limits"] = limit_headers(verdict)
        if not verdict.admitted:
            raise limit_error(verdict)

    def refused_call(self, caller: Caller, no: GateError, operation: str, ask: Ask | None = None) -> None:
        """Write down the refusal of one call of a request that holds several."""
        self.auditor.refused(caller, no, operation, ask)

    def refused(self, scope: Scope, no: GateError, ask: Ask | None = None) -> None:
        """Write down a refusal, where that is a matter of security; each is written once."""
        if "asyncgate.address" not in scope:
            self._visited(scope, scope["headers"])
        if (caller := scope.get("asyncgate.caller")) is None:
            self.auditor.stranger(no)
        else:
            self.auditor.refused(caller, no, scope.get("asyncgate.operation", ""), ask)
