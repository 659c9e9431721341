"""What goes over the wire: the request and the reply of every operation, for the gate and its callers.

Plain data, decoded and encoded by msgspec; each field has its description, from which the OpenAPI document, the MCP
tools and the command line are made.  Times are RFC 3339, durations are seconds, ids are opaque strings.  An unknown
member is ignored, and the sender is warned; an explicit null means absent, except for a payload: real peers send both.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from asyncgate.parts.model import errors, examples

V = TypeVar("V")
Status = Literal["queued", "leased", "running", "succeeded", "failed", "canceled"]
Kind = Literal["agent", "worker", "service", "system", "human", "asyncgate"]
GivenKind = Literal["agent", "worker", "service", "human"]     # to a credential; the others are reserved for the gate

Role = Literal["agent", "worker", "admin", "system"]
GivenRole = Literal["agent", "worker", "admin"]     # to a credential; system is the gate's own
Owed = Literal["open", "discharged"]
OnExpiry = Literal["resume", "fail"]
InputAction = Literal["accept", "decline", "cancel"]
InputState = Literal["open", "accept", "decline", "cancel", "expired"]
UntilChildren = Literal["all", "any"]
TaskOrder = Literal["created", "changed"]
OnConflict = Literal["return", "refuse", "replace", "supersede", "keep_latest"]
UniqueOutcome = Literal["returned", "replaced", "superseded", "waits"]


class Principal(Struct, frozen=True, omit_defaults=True):
    """A principal: an agent, a worker, a service, a human, the system, or a gate."""

    kind: str
    id: str
    instance_id: str | None = None

    def same(self, other: Principal) -> bool:
        """Whether both name one principal; an instance is a session, not an identity."""
        return self.kind == other.kind and self.id == other.id

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


# The parts of requests.


def says(text: str, **more: Any) -> Meta:
    """Describe a field for readers of the OpenAPI document and of the MCP tools."""
    return Meta(description=text, extra_json_schema=more or None)


WIDEST = 2**53 - 1          # the largest integer that every JSON reader keeps exact
LONGEST_PAUSE_SECONDS = 315_360_000       # ten years; nobody waits longer
# No control, invisible or direction-changing character, no leading blank: ids appear in logs and on terminals.
PLAIN = ("^(?! )[^\\x00-\\x1f\\x7f-\\x9f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f"
         "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb]"
         "+$(?!\\n)")
# No tag character either; JavaScript needs a flag for such a range, so the OpenAPI document leaves it out.
TAGS = "\U000e0000-\U000e0fff"
UNTAGGED = PLAIN.replace("\\ufffb]", f"\\ufffb{TAGS}]")

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=UNTAGGED)]
Text = Annotated[str, Meta(max_length=16_384)]
Cursor = Annotated[str, Meta(min_length=1)]
Summary = Annotated[str, Meta(max_length=65_536)]       # the limit of a receipt's body (PH.5)
Integer = Annotated[int, Meta(ge=-WIDEST, le=WIDEST)]
Whole = Annotated[int, Meta(ge=1, le=WIDEST)]
Natural = Annotated[int, Meta(ge=0, le=WIDEST)]
Seconds = Annotated[int, Meta(ge=1, le=WIDEST), says("seconds; clamped to the maximum")]
Pause = Annotated[float, Meta(ge=0, le=LONGEST_PAUSE_SECONDS)]
Wait = Annotated[float, Meta(ge=0, le=WIDEST), says("seconds to wait for an answer; clamped to 30")]
Lasting = Annotated[float, Meta(gt=0, le=LONGEST_PAUSE_SECONDS)]
Moment = Annotated[datetime, Meta(tz=True)]
Capabilities = Annotated[frozenset[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=64)]
Types = Annotated[frozenset[Name], Meta(max_length=64)]
LimitName = Annotated[str, Meta(min_length=1, max_length=64, pattern=UNTAGGED)]
LimitKey = Annotated[str, Meta(max_length=200, pattern=UNTAGGED.replace("+$", "*$"))]
TaskLimits = Annotated[dict[LimitName, LimitKey], Meta(max_length=4)]
Cost = Annotated[float, Meta(ge=0, le=WIDEST)]
Batch = Meta(min_length=1, max_length=500)
SummaryPrefix = Annotated[str, Meta(min_length=1, max_length=100, pattern="^[^\\x00]+$(?!\\n)")]
ANY_JSON = {"type": ["object", "array", "string", "number", "boolean", "null"]}
AnyJson = Annotated[Raw, Meta(extra_json_schema=ANY_JSON)]
JSON_NULL = Raw(b"null")
QUOTES = "\"'\u201c\u201d \t\r\n"


def nothing() -> Raw:
    """Return JSON's null, the default of fields that hold any JSON."""
    return JSON_NULL


def absent() -> Raw:
    """Return the mark of JSON that was not sent; a null that was sent differs from it."""
    return Raw(b"")


Artifacts = Annotated[Any, says("pointers to the result: a list, one object, or {\"pointers\": [...]}; at most 100",
                                type=["array", "object", "null"])]


Refusals = tuple[type[errors.GateError], ...]
OF_ARTIFACTS: Refusals = (errors.ReceiptTooLarge, errors.NotLocatable, errors.TooManyArtifacts)


class Ask(Struct, kw_only=True):
    """A request, with facts about its operation."""

    example: ClassVar[examples.Example] = {}, {}         # a request, path fields included, and its reply
    refusals: ClassVar[Refusals] = ()           # those that do not follow from method and path
    next_step: ClassVar[str] = ""               # what a model may call next
    needed: ClassVar[tuple[str, ...]] = ()      # required fields that a REST path may carry
    acts: ClassVar[bool] = True                 # whether the principal that it names is its sender, not its subject
    filters: ClassVar[bool] = False             # whether its members narrow a list; then unknown members are refused
    lists: ClassVar[Literal["", "own", "all"]] = ""     # whose items a list shows by default
    creates: ClassVar[bool] = False             # whether it is counted as new tasks
    paged: ClassVar[bool] = False               # whether callers send many in a row; the audit log then counts them
    items: ClassVar[str] = ""                   # its member with many items, each of which is done or refused by itself
    tenant_id: Annotated[str | None, says("optional; refused unless it is the credential's own tenant")] = None

    def asks_about(self) -> bool:
        """Whether the principal that it names is looked at, and does nothing itself: looking is not a sign of life."""
        return self.lists == "all"

    def weigh(self) -> int:
        """Return how much work it is, in single calls."""
        return max(1, len(getattr(self, self.items))) if self.items else 1


class AsPrincipal(Ask, kw_only=True):
    """A request that may name its sender, for credentials that do not."""

    principal_kind: Annotated[Kind | None, says("kind of the caller; default: agent")] = None
    principal_id: Annotated[Name | None, says("id of the caller, if the credential names nobody")] = None
    principal_instance_id: Annotated[Name | None, says("the session of the caller")] = None
    agent_id: Annotated[Name | None, says("the same as principal_id of kind agent")] = None
    agent_instance_id: Annotated[Name | None, says("the same as principal_instance_id")] = None


class AsWorker(Ask, kw_only=True):
    """A request by a worker."""

    worker_id: Annotated[Name | None, says("the worker; stable across its restarts")] = None
    worker_kind: Annotated[Kind | None, says("kind of the worker; default: worker")] = None
    worker_instance_id: Annotated[Name | None, says("the process of the worker; it holds its leases alone")] = None


class AsEither(AsPrincipal, kw_only=True):
    """A request by a principal or by a worker."""

    worker_id: Annotated[Name | None, says("the worker, if a worker calls")] = None
    worker_kind: Annotated[Kind | None, says("kind of the worker; default: worker")] = None
    worker_instance_id: Annotated[Name | None, says("the process of the worker")] = None


def names_caller(takes: type[Ask], field: str) -> bool:
    """Whether a field of a request says who asks; a field of the same name may say who it is about, as of a key."""
    kinds = [kind for kind in (Ask, AsPrincipal, AsWorker, AsEither) if kind in takes.__mro__]
    return field in AsEither.__struct_fields__ and any(field in kind.__struct_fields__ for kind in kinds)


def choose(name: str, value: V | None, other: V | None) -> V | None:
    """Return the value of a member with two spellings; raises ValueError if they differ."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"{name} has two spellings here, and they say {value} and {other}: send one")
    return other if value is None else value


class Timeouts(Struct, omit_defaults=True):
    """The time limits of a task's creator."""

    lease_ttl_seconds: Seconds | None = None
    lease_ttl: Annotated[Seconds | None, says("the same as lease_ttl_seconds (14.1)")] = None
    deadline: Annotated[Moment | None, says("when it passes, one anomaly is written; nothing else happens")] = None

    def __post_init__(self) -> None:
        self.lease_ttl_seconds, self.lease_ttl = choose("lease_ttl", self.lease_ttl_seconds, self.lease_ttl), None


# The examples of result_delivery in 14.1, and their meaning here.
DELIVERIES = {"return result payload": "inline", "store artifact pointer": "artifact"}


def delivery_of(delivery: str | None) -> str | None:
    """Return how a result is to be delivered; an unknown text is kept and has no effect."""
    plain = " ".join(delivery.lower().strip(QUOTES).split()) if delivery else ""
    return DELIVERIES.get(plain, plain if plain in DELIVERIES.values() else delivery)


class Terms(Struct, omit_defaults=True):
    """The terms of a task, which the gate keeps and passes on.

    CreateTask repeats these fields, because a Struct cannot inherit the fields of two others; a test compares both.
    """

    task_summary: Text | None = None
    instructions: Text | None = None
    success_criteria: Any = None
    expected_outcome_kind: Name | None = None
    expected_artifact_mime: Name | None = None
    result_delivery: Text | None = None
    timeouts: Timeouts | None = None
    max_parks: Natural | None = None
    cost: Cost | None = None


class Unique(Struct, frozen=True, omit_defaults=True):
    """The key of work of which there shall be one task at a time."""

    key: Annotated[Name, says("it belongs to the creator and the type: others may use the same text")]
    lasts: Annotated[Literal["unfinished", "queued"] | Lasting, says(
        "how long its task holds the key: until its end, its first lease, or for so many seconds")] = field(
            default="unfinished", name="while")
    on_conflict: Annotated[OnConflict, says(
        "if another task holds it: return that, refuse, replace its payload, supersede it, or let the latest wait"
    )] = "return"

    def __post_init__(self) -> None:
        if self.on_conflict == "keep_latest" and self.lasts != "unfinished":
            raise ValueError("on_conflict keep_latest waits for an end, so it needs while: unfinished")


class Debounce(Struct, frozen=True, omit_defaults=True):
    """How long a task waits for further calls under its key."""

    seconds: Annotated[Lasting, says("after the last call")]
    at_most_seconds: Annotated[Lasting | None, says("after the first one; default: any")] = None

    def __post_init__(self) -> None:
        if self.at_most_seconds is not None and self.at_most_seconds < self.seconds:
            raise ValueError("debounce has at_most_seconds below seconds, so no call would be waited for")


class Requirements(Struct):
    """The requirements that the gate matches; all other members are kept and returned."""

    capabilities: Capabilities | None = None


class CreatedBy(Struct):
    """A task's creator as peers spell it."""

    kind: Kind | None = None
    id: Name | None = None
    principal_kind: Kind | None = None
    principal_id: Name | None = None
    instance_id: Name | None = None
    principal_instance_id: Name | None = None


class CreateTask(AsPrincipal, kw_only=True):
    """Create one task."""

    example = ({**examples.WORK, "agent_id": "ada", "idempotency_key": "page-a"},
               {"task_id": examples.TASK_ID, "status": "queued"})
    refusals = (errors.ReceiptTooLarge, errors.IdempotencyConflict, errors.QuotaExceeded, errors.TaskNotFound,
                errors.InvalidTransition, errors.PayloadInvalid, errors.UniqueConflict)
    creates = True
    # The fields that the gate keeps and passes on.
    kept: ClassVar[tuple[str, ...]] = (*Terms.__struct_fields__, "unique", "debounce")
    type: Annotated[Name, says("what kind of work it is; a worker takes tasks by their type")]
    payload: Annotated[AnyJson, says(
        "what the worker needs, up to 1 MB; required unless payload_pointer is set; null is a payload, too"
    )] = field(default_factory=absent)
    payload_pointer: Annotated[Annotated[str, Meta(max_length=2000)] | None,
                               says("where the payload is, if it is not in payload")] = None
    principal_ai: Annotated[Name | None, says("a label for peers; has no effect")] = None
    requirements: Annotated[Raw, says("{\"capabilities\": [...]}: a worker needs all of them",
                                      type=["object", "null"])] = field(default_factory=nothing)
    priority: Annotated[Integer | None, says("higher is offered first; default 0")] = None
    idempotency_key: Annotated[Name | None, says("repeating a key returns the first task")] = None
    max_attempts: Annotated[Annotated[int, Meta(ge=1, le=1000)] | None,
                            says("failures after which it ends as failed")] = None
    retry_backoff_seconds: Annotated[Annotated[int, Meta(ge=0, le=LONGEST_PAUSE_SECONDS)] | None,
                                     says("pause before the second attempt; it doubles")] = None
    delay_seconds: Annotated[Pause | None, says("seconds before the task may be leased")] = None
    parent_task_id: Annotated[Name | None, says(
        "its parent: of the same creator, or leased to it; release_lease until_children waits for children")] = None
    max_expiries: Annotated[Natural | None, says("lost leases before a hold; 0: never")] = None
    task_summary: Annotated[Text | None, says("one line for people")] = None
    instructions: Annotated[Text | None, says("what the worker is to do, in words")] = None
    success_criteria: Annotated[Any, says("when it is done; kept and passed on")] = None
    expected_outcome_kind: Annotated[Name | None, says("kept and passed on")] = None
    expected_artifact_mime: Annotated[Name | None, says("kept and passed on")] = None
    result_delivery: Annotated[Text | None, says("inline (or \"return result payload\"): a result in the task record "
                                                 "discharges the task; artifact (or \"store artifact pointer\"); other "
                                                 "text is kept and has no effect")] = None
    timeouts: Annotated[Timeouts | None, says("default lease and a deadline")] = None
    max_parks: Annotated[Natural | None, says("times it may be parked before a hold; 0: any number")] = None
    limits: Annotated[TaskLimits | None, says(
        "its key under each of its limits, such as {\"customer\": \"42\"}; \"\": no key; default: those of its type"
    )] = None
    cost: Annotated[Cost | None, says("how much it uses of the rates of its limits; default 1")] = None
    unique: Annotated[Unique | None, says("work under this key has one task at a time")] = None
    debounce: Annotated[Debounce | None, says("first wait for further calls with the same unique key")] = None
    created_by: Annotated[CreatedBy | None, says("the creator, as peers spell it")] = None
    tasker_principal: Annotated[CreatedBy | None, says("the same as created_by")] = None

    def __post_init__(self) -> None:
        self.result_delivery = delivery_of(self.result_delivery)
        self.created_by, self.tasker_principal = choose("created_by", self.created_by, self.tasker_principal), None
        if self.debounce is not None and (self.unique is None or self.delay_seconds is not None):
            raise ValueError("debounce needs unique, for its key, and takes the place of delay_seconds")


class CreateTasks(AsPrincipal, kw_only=True):
    """Create up to 500 tasks."""

    example = ({"tasks": [{**examples.WORK, "agent_id": "ada"}]},
               {"results": [{"task_id": examples.TASK_ID, "status": "queued"}]})
    next_step = "Each entry of results has a task_id or an error; call get_task for each task."
    creates = True
    items = "tasks"
    tasks: Annotated[list[CreateTask], Batch, says("each as in create_task")]


class RunTask(CreateTask, kw_only=True):
    """Create one task and wait for its end."""

    example = ({**examples.WORK, "agent_id": "ada", "wait_seconds": 30}, examples.TASK_RECORD)
    next_step = ("If the status is queued, leased or running, call get_task with wait_seconds; do not create the "
                 "task again.")
    wait_seconds: Wait = 30.0


class TaskAsk(AsEither, kw_only=True):
    """A request about one task."""

    needed: ClassVar[tuple[str, ...]] = ("task_id",)
    refusals: ClassVar[Refusals] = (errors.TaskNotFound,)
    task_id: Annotated[Name, says("the task")] = ""


class GetTask(TaskAsk, kw_only=True):
    """Read one task."""

    example = ({"task_id": examples.TASK_ID, "wait_seconds": 30}, examples.TASK_RECORD)
    next_step = ("If the task has a result and obligation_open is true, call attach_artifacts to say where the "
                 "result is.")
    wait_seconds: Annotated[Wait, says("seconds to wait for the end of the task; clamped to 30")] = 0.0


class PageAsk(AsEither, kw_only=True):
    """A request for one page of a list."""

    acts: ClassVar[bool] = False
    filters: ClassVar[bool] = True
    limit: Annotated[Whole | None, says("default 50, clamped to 200")] = None
    cursor: Annotated[Cursor | None, says("next_cursor, or cursor to continue later")] = None


class GetTaskHistory(PageAsk, kw_only=True):
    """Read what happened to one task."""

    needed: ClassVar[tuple[str, ...]] = ("task_id",)
    example = ({"task_id": examples.TASK_ID, "limit": 50}, {"task_id": examples.TASK_ID, "events": [{
        "event_id": examples.DUTY, "event_type": "task.assigned", "created_at": examples.NOW,
        "receipt": examples.ASSIGNED}]})
    refusals = (errors.TaskNotFound,)
    next_step = "While next_cursor is not null, repeat with it as cursor."
    task_id: Annotated[Name, says("the task")] = ""


class TaskFilters(PageAsk, kw_only=True):
    """Which tasks a list has."""

    next_step = "While next_cursor is not null, repeat with it as cursor."
    lists = "all"
    status: Annotated[Status | None, says("in this status")] = None
    type: Annotated[Name | None, says("of this type")] = None
    created_by: Annotated[Name | None, says("the creator, as id or kind:id; absent: all, for an admin")] = None
    created_by_kind: Annotated[Kind | None, says("kind of created_by; default: any")] = None
    created_after: Annotated[Moment | None, says("created then or later")] = None
    created_before: Annotated[Moment | None, says("created earlier")] = None
    id_prefix: Annotated[Name | None, says("how the task_id begins")] = None
    held: Annotated[bool | None, says("on hold, or not")] = None
    parent_task_id: Annotated[Name | None, says("children of this task")] = None
    type_prefix: Annotated[Name | None, says("how the type begins")] = None
    summary_prefix: Annotated[SummaryPrefix | None, says("how task_summary begins")] = None


class ListTasks(TaskFilters, kw_only=True):
    """List tasks."""

    example = ({"status": "succeeded", "limit": 20}, {"tasks": [examples.TASK_RECORD]})
    order: Annotated[TaskOrder | None, says("changed: latest change first")] = None
    changed_since: Annotated[Moment | None, says("the last as_of, or a time")] = None
    count: Annotated[bool, says("also return total")] = False


class CancelTask(TaskAsk, kw_only=True):
    """Cancel one task."""

    example = ({"task_id": examples.TASK_ID, **examples.ASKER, "reason": "no longer needed"},
               {"ok": True, "status": "canceled"})
    refusals = (*TaskAsk.refusals, errors.ReceiptTooLarge)
    next_step = "After ok: true nothing is owed any more."
    reason: Annotated[Text | None, says("why; in the receipt")] = None
    cascade: Annotated[bool, says("true: all its descendants that have not ended, too")] = False


class ReleaseHold(TaskAsk, kw_only=True):
    """Offer a task that is on hold again."""

    example = ({"task_id": examples.TASK_ID, **examples.ASKER}, {"ok": True, "status": "queued"})
    next_step = "get_task with wait_seconds waits for the outcome."


class RerunTask(TaskAsk, kw_only=True):
    """Run an ended task again, as a new task."""

    example = ({"task_id": examples.TASK_ID, **examples.ASKER, "idempotency_key": "page-a-again"},
               {"task_id": examples.NEXT_TASK_ID, "status": "queued"})
    refusals = (*TaskAsk.refusals, errors.InvalidTransition, errors.ReceiptTooLarge, errors.IdempotencyConflict,
                errors.QuotaExceeded)
    next_step = "get_task with the new task_id and wait_seconds waits for the outcome."
    creates = True
    payload: Annotated[AnyJson, says("only for a task whose payload was lost")] = field(default_factory=absent)
    idempotency_key: Annotated[Name | None, says("repeating a key returns the first task")] = None


class AttachArtifacts(TaskAsk, kw_only=True):
    """Say where the result of a finished task is."""

    example = ({"task_id": examples.TASK_ID, "artifacts": examples.SUMMARY["artifacts"]},
               {"ok": True, "status": "succeeded"})
    refusals = (*TaskAsk.refusals, *OF_ARTIFACTS, errors.InvalidTransition)
    next_step = "check_terminator with the obligation_receipt_id shows whether the obligation is discharged."
    artifacts: Artifacts = None
    delivery_proof: Annotated[dict[str, Any] | None, says("proof that the result was delivered elsewhere")] = None


class TypeDeclaration(Struct):
    """What a worker says of a type that it takes; what is absent stays as it was declared before."""

    description: Annotated[Text | None, says("what such a task does, for agents")] = None
    payload_schema: Annotated[Raw, says("a JSON schema that each payload must fit", type=["object", "null"])] = field(
        default_factory=absent)
    result_schema: Annotated[Raw, says("the same for each result", type=["object", "null"])] = field(
        default_factory=absent)


class LeaseNext(AsWorker, kw_only=True):
    """Lease the next tasks."""

    example = ({"worker_id": "reader-1", "capabilities": ["web.read"], "max_tasks": 1, "wait_seconds": 20},
               {"tasks": [examples.OFFER]})
    next_step = ("For each task: do the work, call renew_lease in time, then exactly one of complete, fail, "
                 "release_lease, always with its task_id and lease_id. If progress is not null, continue from it.")
    capabilities: Annotated[Capabilities | None, says("what the worker can do; tasks that need more stay")] = None
    accept_types: Annotated[Types | None, says("only tasks of these types")] = None
    preferred_kinds: Annotated[Types | None, says("types that are offered first; other types still follow")] = None
    max_tasks: Annotated[Whole | None, says("default 1, clamped to 100")] = None
    lease_ttl_seconds: Annotated[Seconds | None, says("how long the lease lasts; clamped to the maximum")] = None
    wait_seconds: Annotated[Wait, says("seconds to wait for work; clamped to 30")] = 0.0
    claim_id: Annotated[Name | None, says("repeating a claim_id returns the same leases while they are live")] = None
    process: Annotated[Name | None, says("where the worker runs: its host and pid; list_workers shows it")] = None
    types: Annotated[Annotated[dict[Name, TypeDeclaration], Meta(max_length=64)] | None, says(
        "declares types of tasks, as declare_type does; once for each process is enough")] = None

    def weigh(self) -> int:
        """Return how many leases it may write."""
        return min(max(1, self.max_tasks or 1), 100)


class LeaseAsk(AsWorker, kw_only=True):
    """A request that only the holder of a lease may make."""

    needed: ClassVar[tuple[str, ...]] = ("task_id", "lease_id")
    refusals: ClassVar[Refusals] = (errors.TaskNotFound, errors.LeaseInvalid)
    task_id: Annotated[Name, says("the task")] = ""
    lease_id: Annotated[Name, says("the lease, as lease_next gave it")] = ""
    fence: Annotated[Integer | None, says("checked if it is sent")] = None


class RenewLease(LeaseAsk, kw_only=True):
    """Keep a lease."""

    needed: ClassVar[tuple[str, ...]] = ("lease_id",)    # real workers' heartbeats name only the lease
    example = ({**examples.HOLDER, "extend_by_seconds": 300},
               {"ok": True, "expires_at": examples.LATER, "renew_every_seconds": 100})
    refusals = (*LeaseAsk.refusals, errors.LeaseRenewalLimit, errors.LeaseLifetimeLimit)
    next_step = ("Renew again after renew_every_seconds. On lease_invalid_or_expired drop the work and call "
                 "lease_next: another worker may hold the task now.")
    extend_by_seconds: Annotated[Seconds | None, says("default: the length that the lease was granted for")] = None


class ReleaseLease(LeaseAsk, kw_only=True):
    """Give a lease back."""

    example = ({**examples.HOLDER, "after_seconds": 3600, "reason": "the export is not ready"},
               {"ok": True, "status": "queued", "requeued": True, "next_eligible_at": examples.LATER})
    refusals = (*LeaseAsk.refusals, errors.ReceiptTooLarge, errors.QuotaExceeded)
    next_step = "lease_next leases other work."
    after_seconds: Annotated[Pause | None, says("park it for so long")] = None
    until: Annotated[Moment | None, says("park it until this time")] = None
    until_children: Annotated[UntilChildren | None, says(
        "park it until all its children have ended, or any more; with a time, until that at most")] = None
    checkpoint: Annotated[AnyJson, says("progress for the next worker, as report_progress takes it")] = field(
        default_factory=nothing)
    reason: Annotated[Text | None, says("why")] = None


class ListLeases(AsWorker, kw_only=True):
    """List the leases that a worker holds."""

    acts: ClassVar[bool] = False
    filters: ClassVar[bool] = True
    lists = "own"
    example = ({"worker_id": "reader-1"}, {"leases": [{
        "task_id": examples.TASK_ID, "lease_id": examples.LEASE, "fence": 1, "type": "page.summarize",
        "worker": examples.WORKER,
        "acquired_at": examples.NOW, "expires_at": examples.LATER, "renewals": 0, "renew_every_seconds": 100.0}]})
    next_step = "Continue each task: renew_lease in time, then complete, fail or release_lease."
    resume: Annotated[bool, says("false: only list; no lease.resumed in the history, and no sign of life")] = True
    resumption_id: Annotated[Name | None, says("draw a new one when a process begins; repeated, it counts once")] = None

    def asks_about(self) -> bool:
        return not self.resume


class StartTask(LeaseAsk, kw_only=True):
    """Say that work has begun."""

    example = (examples.HOLDER, {"ok": True, "status": "running", "started_at": examples.NOW})
    next_step = "Call report_progress from time to time, renew_lease in time, then complete or fail."


class ReportProgress(LeaseAsk, kw_only=True):
    """Report progress."""

    example = ({**examples.HOLDER, "progress": {"pages_done": 2}}, {"ok": True, "status": "running"})
    refusals = (*LeaseAsk.refusals, errors.ReceiptTooLarge)
    next_step = "Progress does not renew the lease: call renew_lease."
    progress: Annotated[AnyJson, says("given to the next worker if this one is lost; up to 64 KB")]


class Complete(LeaseAsk, kw_only=True):
    """End a task as succeeded."""

    example = ({**examples.HOLDER, **examples.SUMMARY}, {"ok": True, "status": "succeeded"})
    refusals = (*LeaseAsk.refusals, *OF_ARTIFACTS, errors.ResultInvalid)
    next_step = "lease_next leases more work. On lease_invalid_or_expired drop the work; do not repeat the call."
    result: Annotated[AnyJson,
                      says("the result, up to 1 MB; default: none")] = field(default_factory=nothing)
    result_summary: Annotated[Summary | None, says("the result in a few words")] = None
    artifacts: Artifacts = None
    delivery_proof: Annotated[dict[str, Any] | None,
                              says("proof that the result was delivered elsewhere: its status is succeeded")] = None
    completion_metadata: Annotated[dict[str, Any] | None, says("further facts, for the receipt")] = None
    cost: Annotated[Cost | None, says("what it really used of the rates of its limits, such as tokens")] = None


class CompleteTasks(AsWorker, kw_only=True):
    """End up to 500 tasks as succeeded."""

    example = ({"worker_id": "reader-1",
                "tasks": [{"task_id": examples.TASK_ID, "lease_id": examples.LEASE, **examples.SUMMARY}]},
               {"results": [{"task_id": examples.TASK_ID, "status": "succeeded"}]})
    next_step = "Check each entry of results for an error; lease_next leases more work."
    items = "tasks"
    tasks: Annotated[list[Complete], Batch, says("each as in complete")]


class Fail(LeaseAsk, kw_only=True):
    """End an attempt as failed."""

    example = ({**examples.HOLDER, "error": {"message": "the page does not answer"}, "retryable": True},
               {"ok": True, "status": "queued", "requeued": True, "next_eligible_at": examples.LATER})
    refusals = (*LeaseAsk.refusals, errors.ReceiptTooLarge)
    next_step = "lease_next leases more work; with requeued: true the task is offered again."
    error: Annotated[AnyJson, says("what went wrong, up to 1 MB")]
    retryable: Annotated[bool | None, says("whether another attempt may succeed; default false")] = None
    retry_after_seconds: Annotated[Pause | None, says("pause before another attempt; default: the backoff")] = None
    stop_limit: Annotated[LimitName | None, says(
        "a limit of the task: no task with it is leased for retry_after_seconds (default 60), as after a 429")] = None
    cost: Annotated[Cost | None, says("what it really used of the rates of its limits")] = None


class ListReceipts(PageAsk, kw_only=True):
    """List receipts."""

    example = ({"to_id": "ada", "limit": 50}, {"receipts": [examples.ASSIGNED]})
    refusals = (errors.TaskNotFound,)
    next_step = "ack_receipt says that a receipt was read; it discharges nothing."
    lists = "all"
    to_kind: Annotated[Kind | None, says("kind of to_id; default: any")] = None
    to_id: Annotated[Name | None, says("id of the recipient")] = None
    task_id: Annotated[Name | None, says("only receipts of this task")] = None
    receipt_type: Annotated[Name | None, says("only this type, such as task.completed")] = None
    since_receipt_id: Annotated[Cursor | None, says("a cursor, or the id of the last receipt seen")] = None
    wait_seconds: Annotated[Wait, says("seconds to wait for one if there is none; clamped to 30")] = 0.0
    newest: Annotated[bool, says("the last ones instead of the first; still oldest first")] = False


class ReceiptAsk(AsEither, kw_only=True):
    """A request about one receipt."""

    needed: ClassVar[tuple[str, ...]] = ("receipt_id",)
    refusals = (errors.ReceiptNotFound,)
    receipt_id: Annotated[Name, says("the receipt")] = ""


class GetReceipt(ReceiptAsk, kw_only=True):
    """Read one receipt."""

    example = ({"receipt_id": examples.DUTY}, examples.ASSIGNED)
    next_step = "check_terminator shows whether an obligation is discharged."


class AckReceipt(ReceiptAsk, kw_only=True):
    """Acknowledge one receipt."""

    example = ({"receipt_id": examples.DUTY, **examples.ASKER}, {"ok": True, "receipt_id": examples.DONE})


class EmitReceipt(AsWorker, kw_only=True):
    """Offer a receipt."""

    example = ({"receipt_type": "schedule.created", "task_id": examples.TASK_ID, "lease_id": examples.LEASE,
                "worker_id": "clock-1",
                "schedule_id": "nightly", "body": {"cron": "0 3 * * *"}}, {"ok": True, "receipt_id": examples.DONE})
    refusals = (*LeaseAsk.refusals, errors.ReceiptTooLarge, errors.TooManyParents, errors.ParentsRequired,
                errors.ParentNotFound)
    next_step = "After schedule.created, call report_schedule regularly."
    receipt_type: Annotated[Name, says("receipts of schedulers; the steps of a task write all others",
                                       enum=["schedule.created", "schedule.deleted"])]
    task_id: Annotated[Name | None, says("the task to create the schedule")] = None
    lease_id: Annotated[Name | None, says("the lease of that task")] = None
    fence: Annotated[Integer | None, says("checked if it is sent")] = None
    schedule_id: Annotated[Name | None, says("the schedule")] = None
    parents: Annotated[list[Name] | None, says("ids of the receipts that it answers")] = None
    body: Annotated[dict[str, Any] | None, says("the facts, up to 64 KB")] = None


MOST_RUNS = 200         # next runs in a report


class ScheduleState(Struct):
    """A scheduler's report about one schedule."""

    schedule_id: Name
    enabled: Annotated[bool | None, says("a field that is not sent keeps its value")] = None
    next_run_at: Moment | None = None
    interval_seconds: Annotated[float, Meta(gt=0, le=LONGEST_PAUSE_SECONDS)] | None = None
    name: Name | None = None
    task_type: Name | None = None
    cron_expr: Annotated[Name | None, says("if it runs by one; else by interval_seconds")] = None
    timezone: Annotated[Name | None, says("of cron_expr")] = None
    next_runs: Annotated[Annotated[list[Moment], Meta(max_length=MOST_RUNS)] | None, says(
        "the next runs, the first of them next_run_at; list_schedules shows them")] = None
    late_after_seconds: Annotated[float, Meta(gt=0, le=LONGEST_PAUSE_SECONDS)] | None = None
    last_run_at: Moment | None = None
    last_status: Text | None = None
    last_task_id: Name | None = None


class ReportSchedule(AsWorker, kw_only=True):
    """Report the state of schedules."""

    example = ({"worker_id": "clock-1", "schedules": [{
        "schedule_id": "nightly", "next_run_at": examples.LATER, "interval_seconds": 86400, "name": "report",
        "task_type": "report.make", "late_after_seconds": 300}]}, {"ok": True, "unknown": []})
    next_step = "For a schedule in unknown, emit_receipt schedule.created first."
    schedules: Annotated[list[ScheduleState], Batch, says("what the scheduler knows of each")]


class CheckTerminator(Ask, kw_only=True):
    """Ask whether an obligation is discharged."""

    needed: ClassVar[tuple[str, ...]] = ("parent_receipt_id",)
    example = ({"parent_receipt_id": examples.DUTY}, {"parent_receipt_id": examples.DUTY, "has_terminator": True})
    next_step = "With has_terminator: false the obligation is still open: get_task shows the state of the task."
    parent_receipt_id: Annotated[Name, says("the receipt that opened the obligation")] = ""


class OwedAsk(AsEither, kw_only=True):
    """A request about what is owed to a principal."""

    acts: ClassVar[bool] = False
    lists = "own"
    since_receipt_id: Annotated[Cursor | None, says("cursor of the previous page, or a receipt id")] = None
    limit: Annotated[Whole | None, says("default 50, clamped to 200")] = None


class ListOpenObligations(OwedAsk, kw_only=True):
    """List open obligations."""

    filters: ClassVar[bool] = True
    example = (examples.ASKER, {"server": examples.SERVER, "relationship": examples.SEEN,
                                "open_obligations": [examples.ASSIGNED], "cursor": examples.DUTY})
    next_step = ("get_task for the task_id of each receipt shows what the task waits for; answer_input answers an "
                 "input.requested.")
    wait_seconds: Annotated[Wait, says("seconds to wait for one if there is none; clamped to 30")] = 0.0


class Bootstrap(OwedAsk, kw_only=True):
    """Begin a session."""

    example = ({**examples.ASKER, "max_items": 10}, {
        "server": examples.SERVER, "relationship": examples.SEEN, "attention": {"inbox_receipts": [examples.ASSIGNED]},
        "cursor": {"latest_receipt_id": examples.DUTY}, "environment": "local"})
    next_step = ""
    agent_version: Annotated[Text | None, says("has no effect")] = None
    client_capabilities: Annotated[Any, says("has no effect")] = None
    max_items: Annotated[Whole | None, says("default 50, clamped to 200")] = None


class GetConfig(Ask, kw_only=True):
    """Read the gate's configuration."""

    example = ({}, {"receipt_mode": "standalone", "memorygate_url": None, "capabilities": ["leases"], **examples.SELF})


class WhoAmI(Ask, kw_only=True):
    """Read whom the credential stands for."""

    example = ({}, {
        "tenant_id": examples.TENANT_ID, "bound": True, "role": "worker", "scopes": ["tasks:lease"],
        "operations": ["complete", "fail", "lease_next"], "principal_kind": "worker", "principal_id": "reader-1",
        "principal_instance_id": None, "key_id": "EcTWh2MDGOXC", "capabilities": None, "task_types": None})


class Health(Ask, kw_only=True):
    """Check whether the gate works."""

    example = ({}, {"status": "healthy", "service": "AsyncGate", "uptime": 47, "database": "ok", "upkeep": {},
                    **examples.SELF})


# The parts of replies.


class Owner(Principal, frozen=True, omit_defaults=True, kw_only=True):
    """The owner of a task, in both spellings (spec 3, 19.6)."""

    principal_kind: str
    principal_id: str
    principal_instance_id: str | None = None


class Created(Struct, omit_defaults=True, dict=True):
    """A task that was created now, or existed already."""

    repeats: ClassVar[int] = 0      # how many of its tasks existed already, for those who count new ones; in no answer
    task_id: str
    status: Status
    payload_differs: bool = False
    warnings: Annotated[list[str] | UnsetType, says("such as that nobody serves its type")] = UNSET
    unique: Annotated[UniqueOutcome | UnsetType, says("if another task held its key: what became of that")] = UNSET


class Problem(Struct, omit_defaults=True):
    """A refusal: a stable code, a sentence for people, and details of the code."""

    error: str
    message: str
    detail: str = ""
    reason: str | None = None
    quota: str | None = None        # the quota that is reached, its limit, and the seconds before the next try
    limit: int | None = None
    retry_after: int | None = None
    path: str | None = None         # where a payload or a result does not fit its type
    task_id: str | None = None      # the task that is in the way, such as the one that holds a key
    status: Status | None = None    # of that task, or of the one that the item names


class Item(Struct, omit_defaults=True):
    """The outcome of one item of a batch: a task, or a problem."""

    task_id: str | None = None
    status: Status | None = None
    payload_differs: bool = False
    error: Problem | None = None
    obligation: Owed | None = None
    next: str | None = None
    result_differs: bool = False
    unique: UniqueOutcome | UnsetType = UNSET


class Items(Struct, dict=True):
    """The outcome of each item, in the order of the request."""

    repeats: ClassVar[int] = 0      # as of Created
    columns = "task_id status payload_differs error"
    results: list[Item]
    warnings: list[str] | UnsetType = UNSET

    def __add__(self, more: Items) -> Items:
        both = Items(self.results + more.results)
        vars(both)["repeats"] = self.repeats + more.repeats
        return both


class ChildEnd(Struct, frozen=True):
    """How a child ended."""

    task_id: str
    status: Status


class Children(Struct):
    """How many children a task has, by what became of them; up to 100 ends are named, the last ones."""

    open: int
    succeeded: int
    failed: int
    canceled: int
    ends: list[ChildEnd]


class Outcome(Struct):
    """How a task ended."""

    outcome: Status
    result: AnyJson
    error: AnyJson
    artifacts: AnyJson
    completed_at: datetime


class TaskRecord(Terms, kw_only=True, omit_defaults=False, dict=True):
    """Everything that the gate knows about a task."""

    repeats: ClassVar[int] = 0      # as of Created, if run_task gives it
    task_id: str
    tenant_id: str
    type: str
    status: Status
    created_by: Owner
    principal_ai: str
    payload: AnyJson
    payload_pointer: str | None
    requirements: AnyJson
    priority: int
    attempt: int
    max_attempts: int
    retry_backoff_seconds: int
    fence: int
    expiries: int
    max_expiries: int
    parks: Annotated[int, says("times that a worker has parked it: release_lease with a time")]
    steps: Annotated[int, says("steps recorded for it: list_steps")]
    outputs: Annotated[int, says("entries of its output: read_output")] = 0
    held: str | None
    idempotency_key: str | None
    asyncgate_instance: str
    obligation_receipt_id: str
    obligation_open: bool
    created_at: datetime
    updated_at: datetime
    next_eligible_at: datetime | None
    started_at: datetime | None
    leased_to: Principal | None = None
    lease_expires_at: datetime | None = None
    progress: AnyJson = field(default_factory=nothing)
    progress_at: datetime | None = None
    result: Outcome | None = None
    rerun_of: str | None = None
    limits: Annotated[dict[str, str] | None, says("its key under each of its limits")] = None
    parent_task_id: str | None = None
    children: Annotated[Children | UnsetType, says("if it has any; the last ones that ended are named")] = UNSET
    unique: Annotated[Unique | UnsetType, says("the key under which it is the only task")] = UNSET
    debounce: Debounce | UnsetType = UNSET
    amendments: Annotated[int | UnsetType, says("how often its payload was replaced")] = UNSET
    supersedes: Annotated[str | UnsetType, says("the task that was canceled for it")] = UNSET
    superseded_by: Annotated[str | UnsetType, says("the task for which it was canceled")] = UNSET
    next_task_id: Annotated[str | UnsetType, says("the task that waits for its end, or waited")] = UNSET
    traceparent: Annotated[str | UnsetType, says("the W3C trace context of the task's creator")] = UNSET
    tracestate: str | UnsetType = UNSET
    trace_link: Annotated[str | UnsetType, says("the trace of the task that this one runs again")] = UNSET
    warnings: Annotated[list[str] | UnsetType, says("as create_task gives, of run_task")] = UNSET


class Tasks(Struct):
    """A page of tasks, newest first, or the latest change first."""

    columns = "task_id type status priority attempt created_by created_at held"
    newest_first = True
    tasks: list[TaskRecord]
    next_cursor: str | None = None
    cursor: str | None = None
    as_of: Annotated[datetime | UnsetType, says(
        "by changes only: no earlier change is missing, and no later one is listed; the next changed_since")] = UNSET
    total: Annotated[int | UnsetType, says("if it was asked for: how many tasks the filters leave")] = UNSET
    at_least: Annotated[bool | UnsetType, says("of total: whether there may be more, which were not counted")] = UNSET


class Input(Struct):
    """How a question of a task ended: its answer, or nothing in time."""

    action: Annotated[InputState, says("accept, decline, cancel; or expired: nobody has answered in time")]
    content: AnyJson
    by: Principal | None
    receipt_id: str | None


class Offer(Terms, kw_only=True, omit_defaults=False):
    """A leased task: do the work, renew the lease in time, then complete, fail or release it."""

    task_id: str
    lease_id: str
    fence: int
    type: str
    payload: AnyJson
    payload_pointer: str | None
    requirements: AnyJson
    principal_ai: str
    created_by: Owner
    tenant_id: str
    attempt: int
    expires_at: datetime
    renew_every_seconds: float
    obligation_receipt_id: str
    caused_by_receipt_id: str
    progress: Annotated[AnyJson, says("the last progress of an earlier lease: continue from it")] = field(
        default_factory=nothing)
    steps: Annotated[int | UnsetType, says("steps that earlier workers have recorded: list_steps")] = UNSET
    steps_lost: Annotated[bool | UnsetType, says(
        "true: the gate was rebuilt, and what earlier workers had recorded is lost; check what is done")] = UNSET
    chunks: Annotated[int | UnsetType, says("chunks of output that earlier workers have appended")] = UNSET
    inputs: Annotated[dict[str, Input] | UnsetType, says("the answers to what request_input asked, by key")] = UNSET
    children: Annotated[Children | UnsetType, says("its children, and how the last ones of them ended")] = UNSET
    traceparent: Annotated[str | UnsetType, says("the W3C trace context of the task's creator")] = UNSET
    tracestate: str | UnsetType = UNSET
    trace_link: Annotated[str | UnsetType, says("the trace of the task that this one runs again")] = UNSET


class Offers(Struct, dict=True):
    """The tasks of a claim; the list may be empty, with a warning if a limit is the reason."""

    columns = "task_id lease_id fence type attempt expires_at payload"
    unread: ClassVar[bool] = False      # whether another look may find tasks with limits
    tasks: list[Offer]
    warnings: list[str] | UnsetType = UNSET


class Renewed(Struct):
    """The new end of a renewed lease."""

    expires_at: datetime
    renew_every_seconds: float
    ok: bool = True


class Ok(Struct, omit_defaults=True):
    """The operation succeeded; `status` is the task's new status."""

    ok: bool
    status: Status | None = None
    started_at: datetime | None = None
    receipt_id: str | None = None
    obligation: Annotated[Owed | None, says("after a success: open until the location of the result is known")] = None
    next: Annotated[str | None, says("the call that discharges an open obligation")] = None
    result_differs: Annotated[bool, says("the repeated call carried a different result; the first one stands")] = False
    warnings: Annotated[list[str] | UnsetType, says("such as that a result does not fit its type")] = UNSET
    descendants: Annotated[int | None, says("with cascade: how many of its descendants were canceled now")] = None


class Released(Struct, omit_defaults=True):
    """The state of a task after a failure or a release."""

    ok: bool
    status: Status
    requeued: bool | None = None
    next_eligible_at: datetime | None = None
    open_children: Annotated[int | None, says("children that it waits for; absent: none")] = None
    error_differs: Annotated[bool, says("the repeated call carried a different error; the first one stands")] = False


class LeaseRecord(Struct):
    """A live lease of a worker."""

    task_id: str
    lease_id: str
    fence: int
    type: str
    worker: Principal
    acquired_at: datetime
    expires_at: datetime
    renewals: int
    renew_every_seconds: float


class Leases(Struct):
    """The live leases of one worker."""

    columns = "task_id lease_id fence type worker expires_at renewals"
    leases: list[LeaseRecord]


class ReceiptRecord(Struct, omit_defaults=True):
    """An immutable fact: who said what to whom, and what it answers."""

    receipt_id: str
    tenant_id: str
    receipt_type: str
    created_at: datetime
    sender: Principal = field(name="from")
    to: Principal
    task_id: str | None
    lease_id: str | None
    schedule_id: str | None
    parents: list[str]
    asyncgate_instance: str
    body: AnyJson
    hash: str
    delivered_at: datetime | None = None


class LedgerLag(Struct):
    """How far the ledger is behind: receipts waiting, receipts refused, and the age of the oldest one waiting."""

    waiting: int
    parked: int
    oldest_seconds: float
    circuit: Literal["closed", "open", "half_open"]
    unsettled: int = 0          # stored there, perhaps, by calls that failed; the gate settles them within a minute


class LedgerComparison(Struct):
    """What the last complete comparison of this gate with its ledger has found."""

    finished_at: datetime
    receipts: int               # compared
    sent_again: int             # put into the outbox once more
    differences: dict[str, int]     # by kind; none if both agree


class Receipts(Struct):
    """A page of receipts, oldest first."""

    columns = "receipt_id receipt_type from to task_id created_at"
    receipts: list[ReceiptRecord]
    next_cursor: str | None = None
    cursor: str | None = None
    warnings: list[str] | UnsetType = UNSET


class HistoryEvent(Struct, omit_defaults=True):
    """One event in the history of a task, with its receipt if it has one."""

    event_id: str
    event_type: str
    created_at: datetime
    payload: AnyJson = field(default_factory=nothing)
    receipt: ReceiptRecord | None = None


class History(Struct):
    """A page of a task's history, oldest first."""

    columns = "created_at event_type receipt.from receipt.to receipt.receipt_id payload"
    task_id: str
    events: list[HistoryEvent]
    next_cursor: str | None = None
    cursor: str | None = None


class Terminator(Struct):
    """Whether a receipt discharges the obligation."""

    parent_receipt_id: str
    has_terminator: bool


class Reported(Struct):
    """The answer to a report: the unknown and the refused schedules; the gate watches all others."""

    ok: bool
    unknown: list[str]
    refused: Annotated[list[Problem], says("invalid items of the report; the others are accepted")] = []


class Server(Struct):
    """The gate that answers."""

    name: str
    version: str
    instance_id: str
    environment: str
    uptime: int


class Relationship(Struct):
    """What the gate knows about a principal."""

    principal_kind: str
    principal_id: str
    principal_instance_id: str | None
    first_seen_at: datetime
    last_seen_at: datetime
    sessions_count: int


class Obligations(Struct, forbid_unknown_fields=True, dict=True):
    """The open obligations of a principal: the receipts, oldest first, and nothing else (PH.6.2)."""

    columns = "receipt_id receipt_type task_id from created_at"
    server: Server
    relationship: Relationship
    open_obligations: list[ReceiptRecord]
    cursor: str | None


class Attention(Struct):
    """The lists of the original bootstrap; all but the inbox stay empty (PH.6.3)."""

    inbox_receipts: list[ReceiptRecord]
    assigned_tasks: list[TaskRecord] = []
    waiting_results: list[TaskRecord] = []
    running_or_scheduled: list[TaskRecord] = []
    anomalies: list[ReceiptRecord] = []


class LatestReceipt(Struct):
    """How far the inbox was read."""

    latest_receipt_id: str | None


class Routing(Struct, omit_defaults=True):
    """Where the ledger of integrated mode is, and whether workers may store receipts there (spec 20.5)."""

    mode: str
    memorygate_url: str
    emit_receipts_to: str               # the ledger for such workers: memorygate or receiptgate
    worker_must_emit_to_memorygate: bool    # always false: a call to the gate is enough
    auth_token: str | None = None


class Welcome(Struct, omit_defaults=True):
    """The bootstrap packet."""

    server: Server
    relationship: Relationship
    attention: Attention
    cursor: LatestReceipt
    environment: str
    receipt_routing: Routing | None = None
    receipt_ledger_lag: LedgerLag | None = None
    warnings: list[str] = []


class GateConfig(Struct):
    """How this gate is set up."""

    receipt_mode: str
    memorygate_url: str | None
    instance_id: str
    capabilities: list[str]
    version: str
    worker_completion: Literal["gate", "gate_or_ledger"] = "gate"   # where workers may report the ends of tasks
    max_progress_bytes: Annotated[int, says("of a progress report or a checkpoint")] = 65_536


class You(Struct):
    """The principal of a credential, and what the credential may do."""

    tenant_id: str
    bound: bool                 # whether it names one principal; else each request names its sender
    role: Role
    scopes: list[str]
    operations: list[str]
    principal_kind: str | None
    principal_id: str | None
    principal_instance_id: str | None
    key_id: str | None
    capabilities: list[str] | None      # capabilities that it may claim tasks for; null is any
    task_types: list[str] | None        # types that it may create and claim; null is any


class Healthy(Struct):
    """Whether the gate, its database and its upkeep work."""

    status: Literal["healthy", "unhealthy"]
    service: str
    version: str
    instance_id: str
    uptime: int
    database: Literal["ok", "unavailable"]
    upkeep: dict[str, Any]
    receipt_ledger_lag: LedgerLag | UnsetType = UNSET
    ledger_comparison: LedgerComparison | UnsetType = UNSET     # of the process that compares
