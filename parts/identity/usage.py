"""What a tenant used, by period: `get_usage` sums up the usage events, and what is not in one yet (spec 21.6.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, get_args

from msgspec.structs import astuple

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.identity.admin import require_operator, target_tenant
from asyncgate.parts.identity.metering import DAY_SECONDS, Book, floor_to
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import errors, stored, wire_usage
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.counted import PERIOD_SECONDS, write_period
from asyncgate.parts.model.views import to_utc

SECONDS = {"5-minute": PERIOD_SECONDS, "hour": 3600, "day": DAY_SECONDS}
USUAL = {"5-minute": 3600, "hour": DAY_SECONDS, "day": 31 * DAY_SECONDS, "month": 365 * DAY_SECONDS}
MOST_PERIODS = 1000         # of one answer
MOST_LOOKS = 5              # for one that nobody has closed a period in between
AMOUNTS = stored.UsageEvent.__struct_fields__[4:]
Amounts = tuple[int, ...]


async def get_usage(engine: Engine, caller: Caller, ask: wire_usage.GetUsage) -> wire_usage.UsageReport:
    """Return what a tenant used: tasks, lease-hours, stored bytes × hours and calls, by period.

    Usage is counted up to now; calls appear up to a minute late.  A tenant's admin sees its own; the operator may name
    a tenant, or ask for all.  Spec 21.6.4.
    """
    now = engine.backend.now()
    until = min(instant(ask.until) or now, now) if ask.until else now
    since = begin_of_period(ask.period, instant(ask.since) or until - USUAL[ask.period])
    if len(list(list_periods(ask.period, since, until, MOST_PERIODS + 1))) > MOST_PERIODS:
        raise errors.InvalidRequest(
            f"these are more than {MOST_PERIODS} periods: ask for a larger period, or a later since")
    tenants, ends = await choose_tenants(engine, caller, ask)
    lines = [line for tenant_id in tenants for line in sum_up(
        tenant_id, ask.period, since, end_of_period(ask.period, until),
        chain(*await read_use(engine, tenant_id, since)))]
    return wire_usage.UsageReport(ask.period, lines, to_utc(now), *ends)


async def choose_tenants(engine: Engine, caller: Caller, ask: wire_usage.GetUsage) -> tuple[list[str],
                                                                                            list[str | None]]:
    """Return whose usage is meant, and the cursors of a page of all."""
    if not ask.all_tenants:
        if ask.cursor is not None:
            raise errors.InvalidCursor("this cursor was not given for one tenant; begin again without one")
        return [await target_tenant(engine, caller, ask.tenant)], [None, None]
    require_operator(engine, caller)
    if ask.tenant is not None:
        raise errors.InvalidRequest("say tenant for one tenant, or all_tenants for all, but not both")
    after = engine.open_cursor(caller, ask.cursor, "usage") or ""
    tenant_ids = [tenant_id for tenant_id in sorted(await engine.backend.tenants()) if tenant_id > after]
    limit = engine.limit_page(ask.limit)
    return tenant_ids[:limit], [*engine.seal_cursors(caller, tenant_ids[:limit + 1], limit, ask.cursor, "usage")]


async def read_use(engine: Engine, tenant_id: str, since: int,
                   longest: int = DAY_SECONDS) -> tuple[list[stored.UsageEvent], list[stored.UsageEvent]]:
    """Return the events of a tenant that end after a time, and what has no event yet, as if it had.

    An event is a day long at most; where no event crosses `since`, a `longest` of five minutes reads fewer rows.
    """
    after = write_period(max(since - longest, 0) // PERIOD_SECONDS)
    for _ in range(MOST_LOOKS):
        head = await engine.backend.record(tenant_id, stored.UsageHead)
        meters = [row async for row in read_rows(engine, tenant_id, stored.Meter)]
        events = [row async for row in read_rows(engine, tenant_id, stored.UsageEvent, after) if row.ends > since]
        if head == await engine.backend.record(tenant_id, stored.UsageHead):
            break
    if head is None and not meters:
        return events, []
    now = int(engine.backend.now())
    book = Book(tenant_id, head, meters)
    return events, [*book.close(now + PERIOD_SECONDS, now, now)]


def sum_up(tenant_id: str, period: str, since: int, until: int,
           events: Iterable[stored.UsageEvent]) -> Iterator[wire_usage.UsageLine]:
    """Yield a line for each period in which something was used."""
    sums: dict[int, Amounts] = {}
    for event in events:
        for begins, amounts in spread(event, period):
            if since <= begins < until:
                sums[begins] = sum_amounts(sums.get(begins, ()), amounts)
    for begins, amounts in sorted(sums.items()):
        yield wire_usage.UsageLine(tenant_id, to_utc(begins), to_utc(end_of_period(period, begins)),
                                   **show_amounts(amounts))


def amounts_of(event: stored.UsageEvent) -> Amounts:
    """Return what was used, without when."""
    return astuple(event)[4:]


def sum_amounts(*several: Amounts) -> Amounts:
    """Return the sum; an empty one counts as nothing."""
    return tuple(map(sum, zip(*filter(None, several), strict=True))) or (0,) * len(AMOUNTS)


def show_amounts(amounts: Amounts) -> dict[str, Any]:
    """Return amounts as they are shown, by quantity."""
    tasks, lease_ms, receipts, payloads, *calls = amounts
    return dict(zip(get_args(wire_usage.Quantity),
                    (tasks, hours(lease_ms / 1000), hours(receipts), hours(payloads), *calls),
                    strict=True))


def hours(seconds: float) -> float:
    """Return seconds as hours; rounding of the last moment never shows less than nothing."""
    return max(round(seconds / 3600, 6), 0.0)


def spread(event: stored.UsageEvent, period: str) -> Iterator[tuple[int, Amounts]]:
    """Yield what an event adds to each period; a long one is even, so each period has its share of the time."""
    amounts, length, at = amounts_of(event), event.ends - event.begins, event.begins
    if length == 0:     # it began in this second: its tasks and calls count, and no time has passed
        yield begin_of_period(period, at), amounts
    while at < event.ends:
        until = min(end_of_period(period, at), event.ends)
        share = until - at
        yield begin_of_period(period, at), tuple(amount * share // length for amount in amounts)
        at = until


def begin_of_period(period: str, moment: float) -> int:
    """Return when the period of a moment began."""
    if period in SECONDS:
        return floor_to(moment, SECONDS[period])
    return int(datetime.fromtimestamp(moment, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0).timestamp())


def end_of_period(period: str, moment: float) -> int:
    """Return when the period of a moment ends."""
    begins = begin_of_period(period, moment)
    if period in SECONDS:
        return begins + SECONDS[period]
    return begin_of_period(period, (datetime.fromtimestamp(begins, UTC) + timedelta(days=32)).timestamp())


def list_periods(period: str, since: float, until: float, most: int) -> Iterator[int]:
    """Yield when the periods of a time begin, `most` at most."""
    at = begin_of_period(period, since)
    while at < until and most > 0:
        yield at
        at, most = end_of_period(period, at), most - 1


OPERATIONS = [Operation(get_usage, "GET /v1/usage", "A", "admin:read", "R")]
