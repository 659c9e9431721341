"""The rows of limits: the limits themselves, who counts against them, and whose turn it is."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import Actor, Content, IdText, Json, Plain, stored


@stored("limits", "how much of something may run at once", "until it is removed", "`remove_limit`")
class Limit(Struct, frozen=True):
    """A limit with a name, which tasks name too; loaded with every claim that may get one of them."""

    name: IdText                        # as tasks name it
    rules: Content[Json]                # JSON of limiting.Rules
    since: float                        # when it was last set
    by_kind: Actor[str]                 # the principal that set it
    by_id: Actor[str]                   # its id
    stopped_until: float | None = None  # nothing of it is leased before
    stopped_by: Plain[str | None] = None  # the task whose worker has stopped it


@stored("holds", "which task counts against which limit", "as long as the lease", "the end of the lease",
        key="limit_name limit_key task_id", left_alone="goes with its lease")
class Hold(Struct, frozen=True):
    """A task that counts against a limit, because somebody has leased it."""

    limit_name: Content[IdText]         # of the limit
    limit_key: Content[IdText]          # of the task, under that limit
    task_id: IdText                     # which task
    since: float                        # when it was leased


@stored("turns", "whose turn it is where tasks have limits", "an hour after its last waiting task", "upkeep",
        key="lane limits", left_alone="goes when none of its tasks waits any more", indexes=(
            "turns_open (tenant_id, lane, served, limits) WHERE stage = 'open'",
            "turns_blocked (tenant_id, blocked_by, blocked_key, served) WHERE stage = 'blocked'",
            "turns_until (tenant_id, until) WHERE stage = 'blocked' AND until IS NOT NULL"))
class Turn(Struct, frozen=True):
    """The waiting tasks of one lane that have the same limits: a claim reads the first few that are open."""

    lane: IdText                        # number of the lane
    limits: Content[IdText]             # as on the tasks: JSON
    served: float                       # how much it has got, by its weight; who has got least is next
    stage: Plain[str]                   # open; blocked; idle: no task of it waits
    blocked_by: Content[IdText] = ""    # the limit that it waits for
    blocked_key: Content[IdText] = ""   # and the key
    until: float | None = None          # when it is open again by itself


class LimitDepth(Struct, frozen=True):
    """What a limit has now, over all tenants; or what waits for limits that are named and that nobody has set."""

    name: str                           # of those that nobody has set, the first
    is_set: bool
    held: int                           # leases that count against it
    waiting: int                        # tasks that name it and wait, for it or for anything else
    stopped_until: float | None = None


@stored("rate_uses", "how much of a rate is used up", "an hour after its time is over", "upkeep, hourly",
        key="limit_name limit_key", left_alone="numbers under a key, for the length of the rate")
class RateUse(Struct, frozen=True):
    """What has been used of a rate, by one key, in the window that runs."""

    limit_name: Content[IdText]         # of the limit
    limit_key: Content[IdText]          # whose use
    began: float                        # when the window began
    used: float                         # the costs of all tasks that were leased in it
