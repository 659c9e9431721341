"""What a running gate keeps of identity: issued keys as a way in, what is agreed with tenants, the auditor."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncgate import (
    Account,
    Ask,
    Caller,
    Engine,
    GateError,
    InvalidToken,
    Items,
    Key,
    Needs,
    News,
    StartupError,
    Terminator,
    Unauthenticated,
    Work,
    tier_of,
)
from asyncgate.backends.identity_audit import Auditor, visit
from asyncgate.backends.identity_keys import IssuedKeys
from asyncgate.backends.identity_keys_stored import PREFIX
from asyncgate.backends.identity_oversight import oversee
from asyncgate.parts.http import Headers, Scope
from asyncgate.parts.limits import Bucket, buckets_for, client_address, exceeded, task_bucket
from asyncgate.parts.limits import headers as limit_headers

if TYPE_CHECKING:
    from asyncgate import Identity, Operation

STATUS_SECONDS = 5.0        # how old an account may be that a request is judged by
NO_WAY_IN = ("no way in: set ASYNCGATE_API_KEY to a secret of your choice, or issue a first key with "
             "`asyncgate keys issue --role admin --name first --principal-id me`, or run `asyncgate dev`")
HEARTBEATS = {"renew_lease", "report_progress", "extend_lease"}


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
        """Read an account again before it counts, though a reading is under way: that may be from before the change."""
        self.read.pop(tenant_id, None)
        self.reading.pop(tenant_id, None)

    async def admit(self, caller: Caller) -> None:
        """Refuse the credentials of a suspended tenant."""
        account = await self.of(caller.tenant_id)
        if account is not None and account.suspended_at is not None:
            raise Unauthenticated("this credential is not good any more")


class Store:
    """Where issued keys find their rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.find_key = engine, engine.backend.find_key

    async def touch_key(self, tenant_id: str, key_id: str, now: float) -> None:
        """Note that a key was used."""
        def touch(engine: Engine, work: Work, caller: Caller, ask: Ask) -> None:
            key = work.found(Key, key_id)
            if key is not None and (key.last_used_at or 0.0) < now:
                work.keep(replace(key, last_used_at=now))

        def load(needs: Needs, caller: Caller, ask: Ask) -> None:
            needs.records.add((Key, (key_id,)))
        caller = self.engine.itself(tenant_id)
        await self.engine.write(touch, load, caller, Ask())


class Keys:
    """The way in for issued keys: what looks like one is never taken for another kind of credential."""

    def __init__(self, keys: IssuedKeys) -> None:
        self.keys = keys

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return whom a key stands for."""
        caller = await self.keys.caller(token, address)
        if caller is None and token is not None and token.startswith(PREFIX):
            raise InvalidToken("this credential is not good")
        return caller


class Guard:
    """Stands at the door of a running gate: who is let in, how often, and what is written down about it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings
        security = engine.settings.security
        self.keys = IssuedKeys(Store(engine), security.api_keys, engine.backend.now)
        self.accounts = Accounts(engine)
        self.auditor = Auditor(engine, security.audit_logging.enabled)
        self.limits = import_module("asyncgate.backends.limits").open_limits(
            engine.settings) if security.rate_limiting.enabled else None

    async def __aenter__(self) -> Guard:
        await self._require_a_way_in()
        self.engine.watchers.add(self.changed)
        self.engine.listeners.add(self.heard)
        self.engine.still_good = self.still_good
        self.auditor.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.auditor.close()
        await self.keys.close()
        if self.limits is not None:
            await self.limits.close()

    async def _require_a_way_in(self) -> None:
        """Refuse to serve a gate that nobody could enter."""
        backend, settings = self.engine.backend, self.settings
        if settings.api_key or settings.allow_insecure_dev or settings.security.jwt.has_keys:
            return
        for tenant_id in await backend.tenants():
            if await backend.export(Key, tenant_id, ""):
                return
        raise StartupError(NO_WAY_IN)

    def changed(self, work: Work) -> None:
        """Learn from a commit of this process."""
        self.auditor.tenants.add(work.tenant_id)
        for kind, key in work.kept:
            if kind is Key:
                self.keys.forget(*key)
            elif kind is Account:
                self._forget(work.tenant_id)

    def heard(self, news: News) -> None:
        """Learn from a commit of another process."""
        for key_id in news.keys:
            self.keys.forget(key_id)
        if news.account:
            self._forget(news.tenant_id)

    def _forget(self, tenant_id: str) -> None:
        self.accounts.forget(tenant_id)
        self.keys.forget_tenant(tenant_id)

    # Every request.

    async def admit(self, scope: Scope, identity: Identity, headers: Headers) -> Caller:
        """Return who a request comes from; note who was not let in."""
        address = self._visited(scope, headers)
        try:
            caller = await identity.caller(headers, address)
            await self.accounts.admit(caller)
        except Unauthenticated as no:
            self.auditor.stranger(no)
            await self._draw(scope, buckets_for(self.settings, "", None, None, address))
            raise
        self.auditor.admitted(caller)
        scope["asyncgate.caller"] = caller
        return caller

    async def still_good(self, caller: Caller) -> None:
        """Refuse a caller whose key or tenant was barred while its call waited."""
        await self.accounts.admit(caller)
        if caller.key_id is not None and not await self.keys.still_good(caller.key_id):
            raise InvalidToken("this credential is not good any more")

    def _visited(self, scope: Scope, headers: Headers) -> str:
        """Note where a request comes from."""
        scope["asyncgate.address"] = address = client_address(scope, headers, self.settings.trusted_proxies)
        visit.set(scope)
        return address

    async def meter(self, scope: Scope, caller: Caller, operation: str) -> None:
        """Count a call; raises RateLimitExceeded."""
        scope["asyncgate.operation"] = operation
        if self.limits is None:
            return
        if not (tier := await self._tier(caller)):
            scope["asyncgate.limits"] = []
            return
        principal = caller.principal if caller.bound else None
        await self._draw(scope, buckets_for(self.settings, tier, caller.tenant_id, principal,
                                            scope["asyncgate.address"], heartbeat=operation in HEARTBEATS))

    async def created(self, caller: Caller, number: int) -> None:
        """Count new tasks, before they are made (21.4.2); the answer tells of that limit only when it refuses."""
        if self.limits is not None and (tier := await self._tier(caller)):     # an empty store counts nothing yet
            verdict = await self.limits.take([task_bucket(self.settings, tier, caller.tenant_id)], number)
            if not verdict.admitted:
                if (scope := visit.get()) is not None:
                    scope["asyncgate.limits"] = limit_headers(verdict)
                raise exceeded(verdict)

    async def performed(self, op: Operation, caller: Caller, ask: Ask, reply: Any) -> None:
        """Write down what the audit log should know of an operation that was carried out."""
        if isinstance(reply, Items):
            self.auditor.parts(caller, op.name, reply)
        elif isinstance(reply, Terminator) and not reply.has_terminator:
            self.auditor.unanswered(caller, reply.parent_receipt_id)
        if caller.role == "admin":
            await oversee(self.auditor, op, caller, ask, reply)

    async def passing(self, scope: Scope) -> GateError | None:
        """Count the answer to a request that nobody has counted: of a stranger, to a path that there is not."""
        if self.limits is None or "asyncgate.limits" in scope:
            return None
        try:
            await self._draw(scope, buckets_for(self.settings, "", None, None, self._visited(scope, scope["headers"])))
        except GateError as no:
            scope.setdefault("asyncgate.limits", [])
            self.refused(scope, no)
            return no
        return None

    async def _tier(self, caller: Caller) -> str:
        """Return the tier of the caller's tenant; empty for one that is exempt (21.4.5)."""
        account = await self.accounts.of(caller.tenant_id)
        if account is not None and (account.exempt_until or 0.0) > self.engine.backend.now():
            return ""
        return tier_of(self.settings, account)

    async def _draw(self, scope: Scope, buckets: list[Bucket]) -> None:
        if self.limits is None:
            return
        verdict = await self.limits.take(buckets)
        scope["asyncgate.limits"] = limit_headers(verdict)
        if not verdict.admitted:
            raise exceeded(verdict)

    def refused(self, scope: Scope, no: GateError, ask: Ask | None = None) -> None:
        """Write down a refusal, where that is a matter of security; each is written once."""
        if "asyncgate.address" not in scope:
            self._visited(scope, scope["headers"])
        if (caller := scope.get("asyncgate.caller")) is None:
            self.auditor.stranger(no)
        else:
            self.auditor.refused(caller, no, scope.get("asyncgate.operation", ""), ask)
