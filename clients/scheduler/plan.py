"""What an agent asks of a scheduler (spec 8.1, 8.2): the payloads of the control tasks, checked to the last field.

A plan that cannot be carried out is refused when it is made and not when it should run; the refusal names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from asyncgate.clients.scheduler.calendar import Calendar, Cron, Every, MisfirePolicy, Timing, iso, zone_of
from asyncgate.parts.model.wire import LONGEST_PAUSE_SECONDS, CreateTask, Name, Requirements

PLACES = ("schedule_id", "name", "run_at", "run_at_local", "now")
PLACE = re.compile(r"(\\?)\{\{([^{}]*)\}\}")
NAMED, PATH = re.compile(r"field `(\w+)`"), re.compile(r"- at `\$\.?([^`]*)`$")


class Invalid(Exception):
    """What was asked for makes no sense: `field` says where, the text says why."""

    def __init__(self, field: str, message: str, code: str = "invalid_schedule") -> None:
        super().__init__(message)
        self.field, self.code = field, code


class TaskTemplate(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The task that each run creates; all but the payload goes to create_task as it is, which knows what it may be."""

    type: Any
    payload_template: Any = None
    requirements: Any = None
    priority: Any = None
    max_attempts: Any = None
    retry_backoff_seconds: Any = None
    max_expiries: Any = None
    task_summary: Any = None
    instructions: Any = None
    success_criteria: Any = None
    expected_outcome_kind: Any = None
    expected_artifact_mime: Any = None
    result_delivery: Any = None
    timeouts: Any = None


class Plan(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The payload of schedule.create."""

    name: Name
    mode: Literal["interval", "cron"]
    task_template: TaskTemplate
    interval_seconds: Annotated[int, Meta(ge=1, le=LONGEST_PAUSE_SECONDS)] | None = None
    cron_expr: Name | None = None
    timezone: Name = "UTC"
    misfire_policy: MisfirePolicy = "catch_up_one"
    jitter_seconds: Annotated[int, Meta(ge=0, le=LONGEST_PAUSE_SECONDS)] = 0

    def timing(self, schedule_id: str, anchor: int) -> Timing:
        """Return when a schedule of this plan runs that began at `anchor`."""
        return Timing(schedule_id, self._calendar(anchor), self.jitter_seconds)

    def _calendar(self, anchor: int) -> Calendar:
        if self.mode == "cron":
            return Cron(self.cron_expr or "", self.timezone)
        return Every(anchor, self.interval_seconds or 0)

    def task(self, schedule_id: str, owner_id: str, run_at: int, now: float) -> dict[str, Any]:
        """Return the create_task of one run, under the key that makes it one task however often it is sent (8.3)."""
        local = msgspec.to_builtins(self.task_template)
        payload = render(local.pop("payload_template", None), {
            "schedule_id": schedule_id, "name": self.name, "run_at": iso(run_at), "now": iso(now),
            "run_at_local": iso(run_at, zone_of(self.timezone))})
        return {**local, "payload": payload, "principal_ai": owner_id,
                "idempotency_key": f"schedule:{schedule_id}:{iso(run_at)}"}


class OfSchedule(Struct, forbid_unknown_fields=True):
    """The payload of the other control tasks."""

    schedule_id: Name


class Demanding(Struct):
    """What of a template the gate reads apart."""

    requirements: Requirements | None


T = TypeVar("T", Plan, OfSchedule)


def read(payload: Any, kind: type[T]) -> T:
    """Read a payload; an explicit null means absent."""
    try:
        return msgspec.convert(given(payload), kind)
    except msgspec.ValidationError as wrong:
        raise Invalid(field_in(str(wrong)), str(wrong)) from None


def given(payload: Any) -> Any:
    """Leave out the fields that are null, but none of the payload that is to be rendered."""
    if not isinstance(payload, dict):
        return payload
    said = {name: value for name, value in payload.items() if value is not None}
    if isinstance(template := said.get("task_template"), dict):
        said["task_template"] = {name: value for name, value in template.items() if value is not None}
    return said


def field_in(message: str, within: str = "") -> str:
    """Find in a complaint of msgspec which field it is about."""
    path, name = PATH.search(message), NAMED.search(message)
    return ".".join(part for part in (within, path and path[1], name and name[1]) if part) or "payload"


def read_plan(payload: Any, now: float) -> Plan:
    """Read the payload of schedule.create, and see that its times and its task are possible."""
    plan = read(payload, Plan)
    wanted, other = ("interval_seconds", "cron_expr")[::1 if plan.mode == "interval" else -1]
    if getattr(plan, wanted) is None:
        raise Invalid(wanted, f"mode {plan.mode} needs {wanted}")
    if getattr(plan, other) is not None:
        raise Invalid(other, f"mode {plan.mode} takes no {other}")
    check_times(plan)
    check_task(plan, now)
    return plan


def check_times(plan: Plan) -> None:
    """Refuse a zone that is none, and a cron expression that is none or never comes true."""
    try:
        zone_of(plan.timezone)
    except ValueError as wrong:
        raise Invalid("timezone", str(wrong)) from None
    try:
        plan.timing("", 0)
    except ValueError as wrong:
        raise Invalid("cron_expr", str(wrong)) from None


def check_task(plan: Plan, now: float) -> None:
    """Refuse a template with a place that nothing fills, and a task that no gate would take."""
    for path, text in texts(plan.task_template.payload_template, "task_template.payload_template"):
        for escaped, place in PLACE.findall(text):
            if not escaped and place.strip() not in PLACES:
                raise Invalid(path, f"{{{{{place}}}}} is nothing that a schedule knows; it fills in "
                                    f"{', '.join(PLACES)}, and \\{{{{...}}}} stands for itself")
    task = plan.task("0" * 36, "x", 0, now)
    try:
        msgspec.json.decode(msgspec.json.encode(task), type=CreateTask)
        msgspec.convert({"requirements": task.get("requirements")}, Demanding)
    except msgspec.ValidationError as wrong:
        raise Invalid(field_in(str(wrong), "task_template"), str(wrong)) from None


def texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value with its path; names of members are no texts."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from texts(inner, f"{path}[{at}]")


def render(template: Any, known: Mapping[str, str]) -> Any:
    """Fill in the {{places}} of every text in a JSON value."""
    if isinstance(template, str):
        return PLACE.sub(lambda found: found[0][1:] if found[1] else known[found[2].strip()], template)
    if isinstance(template, dict):
        return {name: render(inner, known) for name, inner in template.items()}
    if isinstance(template, list):
        return [render(inner, known) for inner in template]
    return template
