"""The database: each one is asked what only it can know."""

from __future__ import annotations

from collections.abc import AsyncIterator

from asyncgate.backends import look_into
from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import errors
from asyncgate.parts.model.findings import Finding, alarm


async def check_database(at: Installation) -> AsyncIterator[Finding]:
    """Look into the database without changing it."""
    try:
        async for finding in look_into(at.settings, at.clock):
            yield finding
    except errors.StartupError as wrong:
        yield alarm(str(wrong), "correct database.url, or do what the message says")
