"""What goes over the wire for limits: how much of something may run at once."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, wire, wire_admin
from asyncgate.parts.model.limiting import Count, KeyRules, Rate

ALLOWED: dict[str, Any] = {
    "concurrency_total": 200, "concurrency_per_key": 5, "rate": {"count": 100.0, "seconds": 60.0},
    "overrides": {"42": {"concurrency_per_key": 20, "weight": 3.0}}}
LIMIT: dict[str, Any] = {
    "name": "customer", **ALLOWED, "stopped_until": None, "stopped_by": None, "since": examples.NOW,
    "set_by": {"kind": "human", "id": "root"}, "in_use": 17, "waiting": 340}


class LimitAsk(wire.Ask, kw_only=True):
    """A request about one limit."""

    needed: ClassVar[tuple[str, ...]] = ("name",)
    refusals: ClassVar[wire.Refusals] = (errors.TenantNotFound, errors.LimitNotFound)
    name: Annotated[wire.LimitName, wire.says("the limit, as tasks name it")] = ""
    tenant: wire_admin.Whose = None


class SetLimit(LimitAsk, kw_only=True):
    """Set a limit."""

    example = ({"name": "customer", **ALLOWED}, LIMIT)
    refusals = (errors.TenantNotFound,)
    next_step = "Tasks name it: create_task with limits {\"customer\": \"42\"}. get_limit shows who holds it."
    concurrency_total: Annotated[Count | None, wire.says("leases at once, of all keys together; default: any")] = None
    concurrency_per_key: Annotated[Count | None, wire.says("leases at once under each key; default: any")] = None
    rate: Annotated[Rate | None, wire.says("how much may begin in a time, under each key; default: any")] = None
    overrides: Annotated[Annotated[dict[wire.LimitKey, KeyRules], Meta(max_length=1000)] | None, wire.says(
        "what differs for single keys, and how many turns they get")] = None
    stopped_until: Annotated[wire.Moment | None, wire.says(
        "no task with it is leased before then; a past time ends the stop; default: unchanged")] = None


class GetLimit(LimitAsk, kw_only=True):
    """Show a limit."""

    filters = True
    example = ({"name": "customer", "key": "42"}, {**LIMIT, "holders": [
        {"key": "42", "task_id": examples.TASK_ID, "since": examples.NOW}], "more_holders": False})
    next_step = "explain_task of a waiting task tells what it waits for; set_limit changes the limit."
    key: Annotated[wire.LimitKey | None, wire.says("only holders of this key; default: of all")] = None


class ListLimits(wire.Ask, kw_only=True):
    """List the limits."""

    filters: ClassVar[bool] = True
    example = ({}, {"limits": [LIMIT]})
    refusals = (errors.TenantNotFound,)
    next_step = "get_limit shows who holds one of them."
    tenant: wire_admin.Whose = None


class RemoveLimit(LimitAsk, kw_only=True):
    """Remove a limit."""

    example = ({"name": "customer"}, {"removed": True, "limits_left": 2})
    refusals = (errors.TenantNotFound,)
    next_step = "Tasks that name it wait for nothing of it any more."


class LimitRecord(Struct, kw_only=True):
    """A limit, and how much of it is in use."""

    name: str
    concurrency_total: int | None
    concurrency_per_key: int | None
    rate: Rate | None
    overrides: dict[str, KeyRules]
    stopped_until: Annotated[datetime | None, wire.says("no task with it is leased before then")]
    stopped_by: Annotated[str | None, wire.says("the task whose worker has stopped it")]
    since: datetime
    set_by: wire.Principal
    in_use: Annotated[int, wire.says("live leases that count against it; 10,000 at most")]
    waiting: Annotated[int, wire.says("tasks that name it and wait, for it or for anything else")]


class LimitHolder(Struct):
    """A task that counts against a limit."""

    key: str
    task_id: str
    since: datetime


class HeldLimit(LimitRecord, kw_only=True):
    """A limit, and the tasks that count against it."""

    holders: Annotated[list[LimitHolder], wire.says("the first hundred, in the order of keys")]
    more_holders: bool


class LimitRecords(Struct):
    """The limits of a tenant, in the order of their names."""

    columns = "name concurrency_total concurrency_per_key in_use waiting stopped_until since set_by"
    limits: list[LimitRecord]


class RemovedLimit(Struct):
    """Whether there was such a limit, and how many others there are."""

    removed: bool
    limits_left: int
