"""Examine an installation: `asyncgate doctor` from outside, `examine_gate` from inside a running gate.

A check is a small function that looks at one thing and yields findings; it changes nothing.  CHECKS has those that
need no running gate, `running` the others.  What a database can be asked is in its own module, in `backends`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from msgspec.structs import replace

from asyncgate.extras.doctor.database import check_database
from asyncgate.extras.doctor.files import check_archive, check_rights
from asyncgate.extras.doctor.installation import Installation
from asyncgate.extras.doctor.machine import check_clock, check_disk, check_packages
from asyncgate.extras.doctor.services import check_ledger, check_limits
from asyncgate.extras.doctor.settings import check_log, check_settings
from asyncgate.extras.doctor.tls import check_certificates
from asyncgate.parts.model.findings import Finding, alarm
from asyncgate.parts.model.settings import mask_credentials

log = logging.getLogger("asyncgate")

Check = Callable[[Installation], Iterator[Finding] | AsyncIterator[Finding]]
CHECKS: dict[str, Check] = {
    "settings": check_settings,
    "log": check_log,
    "rights": check_rights,
    "disk": check_disk,
    "clock": check_clock,
    "versions": check_packages,
    "tls": check_certificates,
    "archive": check_archive,
    "database": check_database,
    "ledger": check_ledger,
    "limits": check_limits,
}


async def examine(at: Installation, checks: Mapping[str, Check], told: Callable[[str], object] = str) -> list[Finding]:
    """Carry out checks one after the other; `told` learns the name of each before it begins."""
    findings: list[Finding] = []
    for name, check in checks.items():
        told(name)
        findings += [replace(finding, check=name, seen=mask_credentials(finding.seen))
                     for finding in await carry_out(check, at)]
    return findings


async def carry_out(check: Check, at: Installation) -> list[Finding]:
    """Carry out one check, one that does not await on a thread; one that breaks is a finding, and stops no other."""
    try:
        if inspect.isasyncgenfunction(check):
            return [finding async for finding in check(at)]
        return await asyncio.to_thread(lambda: list(check(at)))     # type: ignore[arg-type]  # it is not async
    except Exception as error:
        log.exception("a check of the examination broke")
        return [alarm(f"this check broke ({type(error).__name__}: {error})", "report this as a defect of the gate")]
