"""What the gate calls: the ledger, and the store of the limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.identity.limits.redis import connect_redis
from asyncgate.parts.model import errors, findings, queries
from asyncgate.parts.model.settings import mask_credentials

if TYPE_CHECKING:
    from asyncgate.extras.ledger import sinks

REFUSED = re.compile(r"40[13]\b|.*\b(UNAUTHORIZED|UNAUTHENTICATED|FORBIDDEN)\b")
NEW_TOKEN = "set ledger.auth_token to a key that the ledger has issued for this gate"    # noqa: S105  # what to do


async def check_ledger(at: Installation) -> AsyncIterator[findings.Finding]:
    """Read from the ledger: it answers, and takes the gate's credential."""
    if at.settings.receipt_mode == "standalone":
        return
    from asyncgate.extras.ledger import sinks  # a gate with these settings has that extra
    from asyncgate.extras.ledger.sinks.receiptgate import ReceiptGate
    try:
        sink = sinks.open_sink(at.settings)
    except errors.StartupError as wrong:
        yield findings.alarm(str(wrong), "correct the settings of the ledger; `asyncgate config` shows them")
        return
    where = f"the ledger at {mask_credentials(at.settings.ledger.url)}"
    try:
        if isinstance(sink, ReceiptGate):       # it lists the receipts of one task only
            await sink.of_task(at.settings.default_tenant_id, "asyncgate-doctor")
        else:
            await sink.page(at.settings.default_tenant_id, queries.EntryFilter(None, None, None, None, None, 1))
        yield findings.all_well(f"{where} answers, and takes the credential")
    except (sinks.Outage, sinks.Refusal) as refusal:
        for finding in judge_answer(where, refusal):
            yield finding
    finally:
        await sink.close()


def judge_answer(where: str, failure: sinks.Outage | sinks.Refusal) -> Iterator[findings.Finding]:
    """Yield what it means that the ledger gave no receipts."""
    from asyncgate.extras.ledger import sinks
    if REFUSED.match(str(failure)):
        yield findings.alarm(f"{where} refuses the gate's credential: {failure}", NEW_TOKEN)
    elif isinstance(failure, sinks.Garbled | sinks.Refusal):
        yield findings.alarm(f"{where} does not answer like a ledger: {failure}",
                             "correct ledger.url, or receipt_mode and ledger.profile, which name its protocol")
    else:
        yield findings.alarm(f"{where} does not answer: {failure}",
                             "start the ledger, or correct ledger.url; receipts wait in the outbox meanwhile")


async def check_limits(at: Installation) -> AsyncIterator[findings.Finding]:
    """Ask the store of the limits whether it is there."""
    limiting = at.settings.security.rate_limiting
    if not limiting.enabled or limiting.storage != "redis" or not limiting.redis_url:
        return
    makes = findings.alarm if limiting.on_store_failure == "deny" else findings.warn
    instead = "every call is refused" if limiting.on_store_failure == "deny" else "each gate counts alone"
    where = f"the store of the limits at {mask_credentials(limiting.redis_url)}"
    try:
        store = connect_redis(limiting.redis_url, limiting.store_timeout_seconds)
    except errors.StartupError as wrong:
        yield findings.alarm(str(wrong), "pip install 'asyncgate[redis]', and check security.rate_limiting.redis_url")
        return
    from redis import RedisError
    try:
        async with asyncio.timeout(limiting.store_timeout_seconds):
            await store.echo("asyncgate doctor")
        yield findings.all_well(f"{where} answers")
    except (RedisError, OSError) as error:      # a TimeoutError is an OSError
        yield makes(f"{where} does not answer, so {instead}: {str(error) or 'no answer in time'}",
                    "start it, or correct security.rate_limiting.redis_url")
    finally:
        await store.aclose()
