"""Whether this process takes new callers, and how it is emptied: what load balancers and orchestrators ask.

A process drains because an admin says so (`drain_gate`), or because it was told to stop and `drain_seconds` gives load
balancers time to notice.  Nothing is refused meanwhile: `ready` answers 503, waiting calls are answered, connections
close behind their next answer, so that their clients come back by way of the load balancer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Extension, News, Operation
from asyncgate.parts.faces.traffic import Traffic
from asyncgate.parts.identity.admin import require_operator
from asyncgate.parts.identity.audit import describe_caller
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.oversight import mark_as_audited
from asyncgate.parts.model import errors, wire_admin
from asyncgate.parts.model.database import MemberBackend, VersionedBackend
from asyncgate.parts.model.views import to_utc_or_none
from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate")


class Findings(Struct, frozen=True):
    """What was found when the database was last asked."""

    migrated: bool = False
    database: bool = False
    joined: bool = False


class Service(Extension):
    """This process as a load balancer sees it."""

    FRESH_SECONDS = 1.0         # a finding serves everybody who asks for so long: a flood costs one query a second
    PATIENCE_SECONDS = 2.0      # with a database, shorter than any prober's own
    BREATH_SECONDS = 1.0        # that a call may wait while the gate drains: who is answered at once asks at once again

    def __init__(self, engine: Engine, traffic: Traffic | None = None,
                 end_streams: Callable[[], None] = lambda: None) -> None:
        self.engine, self.traffic, self.end_streams = engine, traffic or Traffic(), end_streams
        self.since: float | None = None         # when draining began, by the database's clock
        self.findings, self.found_at = Findings(), -math.inf
        self.looking: asyncio.Task[None] | None = None

    def hear_news(self, news: News) -> None:
        """Forget the leases of tasks that have ended in another process."""
        for task_id in news.ended:
            self.engine.granted.ends.pop(task_id, None)

    async def readiness(self) -> wire_admin.Readiness:
        """Tell whether new callers are welcome, as of a moment ago."""
        if asyncio.get_running_loop().time() - self.found_at > self.FRESH_SECONDS:
            self.looking = self.looking or asyncio.create_task(self._look())
            await asyncio.shield(self.looking)      # whoever asked first may hang up, the others still wait
        findings, draining = self.findings, self.since is not None
        well = findings.migrated and findings.database and findings.joined
        return wire_admin.Readiness(well and not draining, findings.migrated, findings.database, findings.joined,
                                    draining)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self.PATIENCE_SECONDS):
                self.findings = await look_at(self.engine)
        except Exception as error:
            why = str(error) or type(error).__name__
            log.warning("not ready: the database does not answer: %s", why, extra=OFTEN)
            self.findings = Findings()
        finally:
            self.found_at, self.looking = asyncio.get_running_loop().time(), None

    def drain(self) -> None:
        """Ask for no new callers, and answer those that wait."""
        if self.since is None:
            self.since = self.engine.backend.now()
            log.info("the gate drains: /ready answers 503, everything else goes on")
        self.traffic.leave()
        self.engine.drain(self.BREATH_SECONDS)
        self.end_streams()

    def resume(self) -> None:
        """Take new callers again."""
        if self.since is not None:
            self.since = None
            log.info("the gate drains no more")
        self.traffic.stay()
        self.engine.drain(self.engine.settings.max_wait_seconds)        # who waits now only waits on

    def left_seconds(self) -> float:
        """Drain, because the process stops; return how long load balancers have left to notice."""
        seconds = self.engine.settings.drain_seconds
        if seconds and self.since is None and (guard := self.engine.find_extension(Guard)) is not None:
            guard.auditor.note(self.engine.settings.default_tenant_id, "gate_draining", "info", reason="told to stop",
                               instance_id=self.engine.instance)
        self.drain()
        passed = self.engine.backend.now() - (self.since or 0.0)
        return max(seconds - max(passed, 0.0), 0.0)

    def report(self) -> wire_admin.Drained:
        """Tell what is left, without the request that asks."""
        now = self.engine.backend.now()
        return wire_admin.Drained(self.engine.instance, self.since is not None, to_utc_or_none(self.since),
                                  max(self.traffic.count() - 1, 0), sum(self.engine.polls.tenants.values()),
                                  self.engine.granted.count(now))


async def look_at(engine: Engine) -> Findings:
    """Ask the database, in one trip."""
    backend = engine.backend
    if isinstance(backend, VersionedBackend):
        migrated = await backend.is_current()
    else:
        migrated = True
        await backend.alive()
    return Findings(migrated, True, not isinstance(backend, MemberBackend) or backend.is_joined())


def service_of(engine: Engine) -> Service:
    """Return the service of an engine; one that nobody serves has none yet."""
    if (service := engine.find_extension(Service)) is None:
        engine.extend(service := Service(engine))
    return service


async def ready(engine: Engine, caller: Caller, ask: wire_admin.Ready) -> wire_admin.Readiness:
    """Tell a load balancer whether the gate takes new callers."""
    readiness = await service_of(engine).readiness()
    if not readiness.ready:
        raise errors.NotReady(f"not ready: {describe_failure(readiness)}", **msgspec.to_builtins(readiness))
    return readiness


def describe_failure(state: wire_admin.Readiness) -> str:
    """Say what keeps a gate from being ready, without a word about its insides."""
    if not state.database:
        return "the database does not answer"
    if not state.migrated:
        return "the schema of the database is not that of this release"
    return "the gate drains" if state.draining else "the gate has lost its place among those that share the database"


async def drain_gate(engine: Engine, caller: Caller, ask: wire_admin.DrainGate) -> wire_admin.Drained:
    """Empty this process before it is stopped: /ready answers 503, waiting calls are answered, all others go on.

    It concerns the one process that answers, until it stops or resume_gate is called.  Call it again to see what is
    left.  For the operator.
    """
    service = require_this_gate(engine, caller, ask)
    service.drain()
    note_change(engine, caller, "gate_draining", ask)
    return service.report()


async def resume_gate(engine: Engine, caller: Caller, ask: wire_admin.ResumeGate) -> wire_admin.Drained:
    """Take new callers again after drain_gate.  For the operator."""
    service = require_this_gate(engine, caller, ask)
    service.resume()
    note_change(engine, caller, "gate_resumed", ask)
    return service.report()


def require_this_gate(engine: Engine, caller: Caller, ask: wire_admin.DrainGate) -> Service:
    """Return the service of the process that is meant; refuse everybody but the operator, and other processes."""
    require_operator(engine, caller)
    if ask.instance_id not in (None, engine.instance):
        raise errors.Misdirected(
            f"this is {engine.instance}, not {ask.instance_id}: call that process at its own address")
    return service_of(engine)


def note_change(engine: Engine, caller: Caller, event: str, ask: wire_admin.DrainGate) -> None:
    """Write into the audit log who drains a process, or ends that."""
    if (guard := engine.find_extension(Guard)) is not None:
        mark_as_audited()
        guard.auditor.note(caller.tenant_id, event, "warning", **describe_caller(caller), reason=ask.reason,
                           instance_id=engine.instance)


OPERATIONS = [
    Operation(ready, "GET /v1/ready, GET /ready", "", "", "B"),
    Operation(drain_gate, "POST /v1/gate/drain", "A", "admin:write", "W", idempotent=True),
    Operation(resume_gate, "POST /v1/gate/resume", "A", "admin:write", "W", idempotent=True),
]
