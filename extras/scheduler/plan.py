"""The payloads of the control tasks (spec 8.1, 8.2), with all checks.

An invalid plan is refused when it is created, not when it should run; the refusal names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from asyncgate.extras.scheduler import calendar
from asyncgate.parts.model import wire

PLACEHOLDERS = ("schedule_id", "name", "run_at", "run_at_local", "now")
PLACEHOLDER = re.compile(r"(\\?)\{\{([^{}]*)\}\}")
FIELD_NAME, FIELD_PATH = re.compile(r"field `(\w+)`"), re.compile(r"- at `\$\.?([^`]*)`$")


class InvalidOrder(Exception):
    """The order is invalid: `field` says where, the text says why."""

    def __init__(self, field: str, message: str, code: str = "invalid_schedule") -> None:
        super().__init__(message)
        self.field, self.code = field, code


class TaskTemplate(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The task that each run creates; every field but the payload goes unchanged to create_task, which checks it."""

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
    limits: Any = None
    cost: Any = None
    unique: Any = None
    debounce: Any = None


class Plan(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The payload of schedule.create."""

    name: wire.Name
    mode: Literal["interval", "cron"]
    task_template: TaskTemplate
    interval_seconds: Annotated[int, Meta(ge=1, le=wire.LONGEST_PAUSE_SECONDS)] | None = None
    cron_expr: wire.Name | None = None
    timezone: wire.Name = "UTC"
    misfire_policy: calendar.MisfirePolicy = "catch_up_one"
    jitter_seconds: Annotated[int, Meta(ge=0, le=wire.LONGEST_PAUSE_SECONDS)] = 0

    def timing(self, schedule_id: str, anchor: int) -> calendar.Timing:
        """Return the run times of a schedule of this plan that was created at `anchor`."""
        runs: calendar.Calendar = (calendar.Cron(self.cron_expr or "", self.timezone) if self.mode == "cron" else
                                   calendar.Every(anchor, self.interval_seconds or 0))
        return calendar.Timing(schedule_id, runs, self.jitter_seconds)

    def task(self, schedule_id: str, owner_id: str, run_at: int, now: float) -> dict[str, Any]:
        """Return the create_task request of one run, with the key by which the gate deduplicates it (8.3)."""
        local = msgspec.to_builtins(self.task_template)
        payload = render(local.pop("payload_template", None), {
            "schedule_id": schedule_id, "name": self.name, "run_at": calendar.format_time(run_at),
            "now": calendar.format_time(now),
            "run_at_local": calendar.format_time(run_at, calendar.load_zone(self.timezone))})
        return {**local, "payload": payload, "principal_ai": owner_id,
                "idempotency_key": f"schedule:{schedule_id}:{calendar.format_time(run_at)}"}


class ScheduleRef(Struct, forbid_unknown_fields=True):
    """The payload of the other control tasks."""

    schedule_id: wire.Name


class TemplateRequirements(Struct):
    """The field of a template that create_task decodes separately."""

    requirements: wire.Requirements | None


T = TypeVar("T", Plan, ScheduleRef)


def read_payload(payload: Any, kind: type[T]) -> T:
    """Decode a payload; raises InvalidOrder.  Null means absent."""
    try:
        return msgspec.convert(drop_payload_nulls(payload), kind)
    except msgspec.ValidationError as wrong:
        raise InvalidOrder(find_field(str(wrong)), str(wrong)) from None


def drop_payload_nulls(payload: Any) -> Any:
    """Leave out null fields, but keep those of the payload template."""
    if not isinstance(payload, dict):
        return payload
    terms = {name: value for name, value in payload.items() if value is not None}
    if isinstance(template := terms.get("task_template"), dict):
        terms["task_template"] = {name: value for name, value in template.items() if value is not None}
    return terms


def find_field(message: str, within: str = "") -> str:
    """Return the field that an error message of msgspec is about."""
    path, name = FIELD_PATH.search(message), FIELD_NAME.search(message)
    return ".".join(part for part in (within, path and path[1], name and name[1]) if part) or "payload"


def read_plan(payload: Any, now: float) -> Plan:
    """Decode the payload of schedule.create, and check its times and its task; raises InvalidOrder."""
    plan = read_payload(payload, Plan)
    wanted, other = ("interval_seconds", "cron_expr")[::1 if plan.mode == "interval" else -1]
    if getattr(plan, wanted) is None:
        raise InvalidOrder(wanted, f"mode {plan.mode} needs {wanted}")
    if getattr(plan, other) is not None:
        raise InvalidOrder(other, f"mode {plan.mode} takes no {other}; leave it out")
    check_times(plan)
    check_task(plan, now)
    return plan


def check_times(plan: Plan) -> None:
    """Refuse an unknown time zone, and a cron expression that is invalid or never runs."""
    try:
        calendar.load_zone(plan.timezone)
    except ValueError as wrong:
        raise InvalidOrder("timezone", str(wrong)) from None
    try:
        plan.timing("", 0)
    except ValueError as wrong:
        raise InvalidOrder("cron_expr", str(wrong)) from None


def check_task(plan: Plan, now: float) -> None:
    """Refuse a template with an unknown placeholder, and a task that the gate would refuse."""
    for path, text in find_texts(plan.task_template.payload_template, "task_template.payload_template"):
        for escaped, place in PLACEHOLDER.findall(text):
            if not escaped and place.strip() not in PLACEHOLDERS:
                raise InvalidOrder(path, f"{{{{{place}}}}} is not a placeholder; use one of "
                                         f"{', '.join(PLACEHOLDERS)}, or write \\{{{{...}}}} for literal braces")
    task = plan.task("0" * 36, "x", 0, now)
    try:
        msgspec.json.decode(msgspec.json.encode(task), type=wire.CreateTask)
        msgspec.convert({"requirements": task.get("requirements")}, TemplateRequirements)
    except msgspec.ValidationError as wrong:
        raise InvalidOrder(find_field(str(wrong), "task_template"), str(wrong)) from None


def find_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value with its path, but not the names of members."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from find_texts(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from find_texts(inner, f"{path}[{at}]")


def render(template: Any, known: Mapping[str, str]) -> Any:
    """Replace the {{placeholders}} in every text of a JSON value."""
    if isinstance(template, str):
        return PLACEHOLDER.sub(lambda match: match[0][1:] if match[1] else known[match[2].strip()], template)
    if isinstance(template, dict):
        return {name: render(inner, known) for name, inner in template.items()}
    if isinstance(template, list):
        return [render(inner, known) for inner in template]
    return template
