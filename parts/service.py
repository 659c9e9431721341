"""Whether this process takes new callers: what a load balancer or an orchestrator asks before it sends some."""

from __future__ import annotations

import asyncio
import logging
import math

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Extension, Operation
from asyncgate.parts.model.database import MemberBackend, VersionedBackend
from asyncgate.parts.model.errors import NotReady
from asyncgate.parts.model.wire_admin import Readiness, Ready
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

    def __init__(self, engine: Engine) -> None:
        self.engine, self.draining = engine, False
        self.found, self.found_at = Findings(), -math.inf
        self.looking: asyncio.Task[None] | None = None

    async def readiness(self) -> Readiness:
        """Tell whether new callers are welcome, as of a moment ago."""
        if asyncio.get_running_loop().time() - self.found_at > self.FRESH_SECONDS:
            self.looking = self.looking or asyncio.create_task(self._look())
            await asyncio.shield(self.looking)      # whoever asked first may hang up, the others still wait
        found = self.found
        well = found.migrated and found.database and found.joined
        return Readiness(well and not self.draining, found.migrated, found.database, found.joined, self.draining)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self.PATIENCE_SECONDS):
                self.found = await look_at(self.engine)
        except Exception as error:
            log.warning("not ready: the database does not answer: %s", str(error) or type(error).__name__, extra=OFTEN)
            self.found = Findings()
        finally:
            self.found_at, self.looking = asyncio.get_running_loop().time(), None


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


async def ready(engine: Engine, caller: Caller, ask: Ready) -> Readiness:
    """Tell a load balancer whether the gate takes new callers."""
    told = await service_of(engine).readiness()
    if not told.ready:
        raise NotReady(f"not ready: {describe_failure(told)}", **msgspec.to_builtins(told))
    return told


def describe_failure(told: Readiness) -> str:
    """Say what keeps a gate from being ready, without a word about its insides."""
    if not told.database:
        return "the database does not answer"
    if not told.migrated:
        return "the schema of the database is not that of this release"
    return "the gate drains" if told.draining else "the gate has lost its place among those that share the database"


OPERATIONS = [Operation(ready, "GET /v1/ready, GET /ready", "", "", "B")]
