"""The audit log: append-only, one chain of hashes in each tenant (spec 21.7.4).

What an administrator does is written in the transaction that does it.  Everything else is noted beside the request,
logged at once, and written within a second by `Auditor`; equal lines of that second become one with a count, so that
a flood of refusals does not fill the disk.  A process that is killed may lose the notes of its last second.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Raw

from asyncgate import (
    Audit,
    AuditHead,
    Caller,
    Engine,
    Forbidden,
    GateError,
    Principal,
    QuotaExceeded,
    RateLimitExceeded,
    ReceiptNotFound,
    Sweep,
    TaskNotFound,
    TenantMismatch,
    Unauthenticated,
    Work,
    canonical,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncgate import Ask, Needs
    from asyncgate.parts.http import Scope

log = logging.getLogger("asyncgate.audit")

Severity = Literal["info", "warning", "critical"]
Line = tuple[str, Severity, bytes]      # event, severity, canonical JSON of what else there is to say

FLUSH_SECONDS, MOST_NOTED = 1.0, 1000
COUNTED_SECONDS, MOST_COUNTED = 300.0, 10_000   # successes: the first use of a credential, then a count
SUSPECTS, TENANTS_ASKED = 100, 1000
# What a refusal is called in the log; of the others the answer itself is enough.
EVENTS: list[tuple[type[GateError], str, Severity]] = [
    (TenantMismatch, "cross_tenant_attempt", "critical"),
    (Unauthenticated, "auth_failure", "warning"),
    (Forbidden, "authorization_failure", "warning"),
    (RateLimitExceeded, "rate_limit_exceeded", "warning"),
    (QuotaExceeded, "quota_exceeded", "warning"),
]
# The request that the running task answers, for what the log says of where it came from.
visit: ContextVar[Scope | None] = ContextVar("visit", default=None)


def visitor() -> dict[str, str | None]:
    """Return from where the request of the running task came; the text of its client is cut short."""
    if (scope := visit.get()) is None:
        return {}
    agents = [value for name, value in scope["headers"] if name == b"user-agent"]
    return {"ip": scope.get("asyncgate.address"), "user_agent": agents[0][:200].decode("latin-1") if agents else None}


# The chain.


def chained(work: Work, event: str, severity: Severity, said: bytes, at: float | None = None) -> Audit:
    """Add a line to the tenant's log; the batch must have loaded its `head`."""
    head = work.found(AuditHead) or AuditHead(0, "")
    line = link(head, Audit(work.new_id(), head.number + 1, work.now if at is None else at, event, severity,
                            said.decode(), ""))
    work.log(line)
    work.keep(AuditHead(line.number, line.hash))
    return line


def link(head: AuditHead, line: Audit) -> Audit:
    """Return a line with its hash, which covers the line before it."""
    told = canonical((head.hash, line.audit_id, line.number, line.at, line.event, line.severity,
                      Raw(line.body.encode())))
    return Audit(line.audit_id, line.number, line.at, line.event, line.severity, line.body,
                 hashlib.sha256(told).hexdigest())


def head(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load where the log ends, and keep others from adding to it meanwhile."""
    needs.records.add((AuditHead, ()))


def broken(lines: Iterable[Audit], before: AuditHead) -> str | None:
    """Say what is wrong with the next lines of a log, or nothing."""
    for line in lines:
        if line.number != before.number + 1:
            return f"line {before.number + 1} of the audit log is missing: {line.audit_id} is number {line.number}"
        if link(before, line).hash != line.hash:
            return f"line {line.number} of the audit log, {line.audit_id}, is not what was written"
        before = AuditHead(line.number, line.hash)
    return None


# Beside the requests.


def who(caller: Caller) -> dict[str, Any]:
    """Return what the log says of a caller: never what it showed."""
    return {"principal_kind": caller.principal.kind, "principal_id": caller.principal.id, "role": caller.role,
            "key_id": caller.key_id}


class Auditor:
    """Writes down what requests met with, behind their backs."""

    def __init__(self, engine: Engine, enabled: bool) -> None:
        self.engine, self.enabled = engine, enabled
        self.noted: dict[tuple[str, Line], tuple[float, int]] = {}      # since when, how often
        self.missed: defaultdict[str, int] = defaultdict(int)
        self.counted: dict[tuple[str, str | None, Principal], list[Any]] = {}
        self.suspects: asyncio.Queue[tuple[Caller, str, str]] = asyncio.Queue(SUSPECTS)
        self.loops: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to write."""
        self.loops = [asyncio.create_task(loop()) for loop in (self._writing, self._counting, self._asking)]

    async def close(self) -> None:
        """Write down what is noted and stop."""
        for loop in self.loops:
            loop.cancel()
        await asyncio.gather(*self.loops, return_exceptions=True)
        self.count()
        await self.flush()

    def note(self, tenant_id: str, event: str, severity: Severity, **said: Any) -> None:
        """Note that something happened."""
        told = {**visitor(), **said}
        body = canonical({name: value for name, value in told.items() if value is not None})
        level = logging.INFO if severity == "info" else logging.WARNING
        log.log(level, "%s %s tenant=%s %s", severity, event, tenant_id, body.decode())
        key = (tenant_id, (event, severity, body))
        if key in self.noted or len(self.noted) < MOST_NOTED:
            since, times = self.noted.get(key, (self.engine.backend.now(), 0))
            self.noted[key] = since, times + 1
        elif self.enabled:
            self.missed[tenant_id] += 1

    def refused(self, caller: Caller, no: GateError, operation: str, ask: Ask | None = None) -> None:
        """Note a refusal, where that is a matter of security."""
        for kind, event, severity in EVENTS:
            if isinstance(no, kind):
                return self.note(caller.tenant_id, event, severity, **who(caller), operation=operation,
                                 reason=no.code, message=str(no))
        if isinstance(no, TaskNotFound | ReceiptNotFound) and not self.suspects.full():
            name = "task_id" if isinstance(no, TaskNotFound) else "receipt_id"
            self.suspects.put_nowait((caller, name, getattr(ask, name, None) or ""))

    def stranger(self, no: Unauthenticated) -> None:
        """Note that somebody was not let in; whom that concerns nobody knows, so it is in the log of the operator."""
        self.note(self.engine.settings.default_tenant_id, "auth_failure", "warning", reason=no.code, message=str(no))

    def admitted(self, caller: Caller) -> None:
        """Note the first use of a credential by this process; then they are counted."""
        key = (caller.tenant_id, caller.key_id, caller.principal)
        if (count := self.counted.get(key)) is not None:
            count[0] += 1
        elif len(self.counted) < MOST_COUNTED:
            self.counted[key] = [0, caller]
            self.note(caller.tenant_id, "auth_success", "info", **who(caller))

    def count(self) -> None:
        """Note how often credentials were used since the last time; those that were not are forgotten."""
        for key, (uses, caller) in list(self.counted.items()):
            if uses:
                self.note(caller.tenant_id, "auth_success", "info", **who(caller), uses=uses)
                self.counted[key][0] = 0
            else:
                del self.counted[key]

    async def flush(self) -> None:
        """Write down what is noted."""
        noted, self.noted = self.noted, {}
        missed, self.missed = self.missed, defaultdict(int)
        if not self.enabled:
            return
        by_tenant: defaultdict[str, list[tuple[float, Line]]] = defaultdict(list)
        for (tenant_id, (event, severity, body)), (since, times) in noted.items():
            said = body if times == 1 else canonical({**msgspec.json.decode(body), "times": times})
            by_tenant[tenant_id].append((since, (event, severity, said)))
        for tenant_id, times in missed.items():
            by_tenant[tenant_id].append((self.engine.backend.now(), ("audit_overflow", "critical",
                                                                     canonical({"times": times}))))
        for tenant_id, lines in by_tenant.items():
            await self._write(tenant_id, lines)

    async def _write(self, tenant_id: str, lines: list[tuple[float, Line]]) -> None:
        def write(engine: Engine, work: Work, caller: Caller, ask: Ask) -> None:
            for at, (event, severity, said) in lines:
                chained(work, event, severity, said, at)

        caller = Caller(tenant_id, self.engine.gate, "system", frozenset())
        try:
            await self.engine.write(write, head, caller, Sweep())
        except GateError:
            log.exception("%d lines of the audit log of tenant %s were not written", len(lines), tenant_id)

    async def _writing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self.noted or self.missed:
                await self.flush()

    async def _counting(self) -> None:
        while True:
            await asyncio.sleep(COUNTED_SECONDS)
            self.count()

    # An id of another tenant is a 404 like any unknown one; whether it was one is found out afterwards (DESIGN 13).

    async def _asking(self) -> None:
        while True:
            caller, name, id = await self.suspects.get()
            try:
                if id and await self._elsewhere(caller.tenant_id, name, id):
                    self.note(caller.tenant_id, "cross_tenant_attempt", "critical", **who(caller), **{name: id},
                              message="the id belongs to another tenant")
            except GateError:
                log.exception("cannot tell whose id %s is", id)
            await asyncio.sleep(0.01)

    async def _elsewhere(self, tenant_id: str, name: str, id: str) -> bool:
        backend = self.engine.backend
        read = backend.task if name == "task_id" else backend.receipt
        others = [other for other in await backend.tenants() if other != tenant_id][:TENANTS_ASKED]
        for other in others:
            if await read(other, id) is not None:
                return True
        return False
