"""Random programs on a real backend and on the oracle: all answers, receipts and states must be equal.

All durations in a program, and the steps of its clock, are multiples of half a minute (the first retry waits 30
seconds).  So the running time of a program decides nothing, and times are compared by the half minute.  A program that
has itself run for so long, on a machine that stood still, is given up: its times are those of the next half minute.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from asyncgate.backends import open_backend
from asyncgate.conformance import harness
from asyncgate.conformance.model import ESCALATES_TO, PROSE, SEALED, Model, ModelRefusal, Rules
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors, queries, wire
from asyncgate.parts.model.settings import EscalationSettings, EscalationTarget
from asyncgate.parts.operations import OPERATIONS

EXAMPLES_PER_ROUND, STEPS = 15, 35
MINUTE, TICK = 60, 30
MOMENTARY = {"renew_every_seconds", "uptime"}
TIMES = {"since", "until", "at"}      # besides those that end in _at
T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, Any]], Any]
Who = tuple[int, str, str, str | None]      # tenant, kind, id, instance

AGENTS: list[Who] = [(0, "agent", "ada", None), (0, "agent", "bob", None), (1, "agent", "ada", None)]
WORKERS: list[Who] = [(0, "worker", "w1", None), (0, "worker", "w2", "here"), (0, "worker", "w2", "there"),
                      (1, "worker", "w1", None)]
ADMINS: list[Who] = [(0, "human", "root", None)]
TYPES, SKILLS = ["demo", "test"], ["cpu", "gpu"]
LARGE = "large"             # stands for a value too long for a receipt, so that reports stay short
JSON: list[Any] = [None, {"n": 1, "a": [1.5, "ü"]}, {"summary": "done"}, [], LARGE]
PAYLOADS: list[Any] = [*JSON, {"escalation_class": 2}, {"escalation_class": 3}, {"escalation_class": True}]
ANY_N = {"type": "object", "properties": {"n": {"type": "integer"}}}
ARTIFACTS: list[Any] = [None, None, [], {}, {"pointers": []}, [{"uri": "file:///out"}], {"uri": "s3://one"},
                        {"pointers": [{"uri": "a"}, {"uri": "b"}]}, [None], {"pointers": [{"type": "file"}]}]
PROOFS = [None, None, None, {}, {"mode": "push"}, {"mode": "push", "status": "succeeded"}]
ORDINARY: dict[str, Any] = {"type": "demo", "payload": None, "lease_minutes": None, "deadline_minutes": None}
VERBS = ["renew_lease", "start_task", "report_progress", "release_lease", "complete", "fail"]
ENDINGS = ["release_lease", "complete", "fail"]
ENDED_BY = ["waits", "is leased", "is held", "is canceled", "succeeds", "fails", "fails"]
PAST = 5        # a pick that selects an ended lease
CAN_ASK = bool(harness.are_here(["request_input"]))
CAN_WAIT = bool(harness.are_here(["wait_tasks"]))
CAN_APPEND = bool(harness.are_here(["append_output"]))
NOBODY = "00000000-0000-4000-8000-000000000000"
NO_OFFER = {"task_id": NOBODY, "lease_id": NOBODY, "fence": 1}

agents, workers, admins = (st.sampled_from(some) for some in (AGENTS, WORKERS, ADMINS))
any_owner = st.sampled_from([*AGENTS, *ADMINS])
anybody = st.sampled_from([*AGENTS, *WORKERS, *ADMINS])
picks = st.sampled_from([*range(24)])
skills = st.sets(st.sampled_from(SKILLS)).map(sorted)


def maybe(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """Return a value or None."""
    return st.none() | strategy


def rarely(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """Return a value rarely: frequent restrictions would leave no work."""
    return st.none() | st.none() | st.none() | strategy


def minutes(*choice: int) -> st.SearchStrategy[int]:
    """Return minutes in seconds."""
    return st.sampled_from([minute * MINUTE for minute in choice])


creations = st.fixed_dictionaries({
    "type": st.sampled_from(TYPES), "payload": st.sampled_from(PAYLOADS), "requirements": rarely(
        st.builds(lambda named: {"capabilities": named, "tags": ["x"]}, skills)),
    "priority": maybe(st.integers(-1, 1)), "idempotency_key": st.sampled_from([None, None, "k1", "k2"]),
    "max_attempts": maybe(st.integers(1, 3)), "retry_backoff_seconds": maybe(minutes(0, 1, 4)),
    "delay_seconds": rarely(minutes(0, 1, 10)), "max_expiries": st.sampled_from([None, 0, 1, 2, 4]),
    "max_parks": st.sampled_from([None, 0, 1, 2]),
    "result_delivery": st.sampled_from([None, "inline", "artifact"]),
    "success_criteria": st.sampled_from([None, ["ok"]]),
    "instructions": st.sampled_from([None, "build it"]), "payload_pointer": st.sampled_from([None, "s3://in"]),
    "lease_minutes": st.sampled_from([None, None, 2]), "deadline_minutes": st.sampled_from([None, None, 1, 30])})
claims = st.fixed_dictionaries({
    "capabilities": st.just(SKILLS) | skills, "accept_types": rarely(st.sets(st.sampled_from(TYPES)).map(sorted)),
    "preferred_kinds": rarely(st.sets(st.sampled_from(TYPES)).map(sorted)), "max_tasks": maybe(st.integers(1, 3)),
    "lease_ttl_seconds": maybe(minutes(1, 90, 90)), "claim_id": st.sampled_from([None, None, "c1", "c2"])})
operators = st.sampled_from([*ADMINS * 6, (0, "human", "eve", None), AGENTS[0], WORKERS[0]])
targets = st.sampled_from([
    {"type": "demo"}, {"type": "test"}, {"type": "demo", "capabilities": []}, {"type": "demo", "capabilities": ["gpu"]},
    {"worker": "w1"}, {"worker": "w2"}, {"whole_tenant": True}, {}, {"capabilities": ["gpu"], "worker": "w1"}])
bulks = st.fixed_dictionaries({
    "action": st.sampled_from(["cancel", "release", "prioritize", "rerun", "rerun"]),
    "status": rarely(st.sampled_from(["queued", "leased", "failed", "canceled"])),
    "type": maybe(st.sampled_from(TYPES)), "created_by": rarely(st.sampled_from(["ada", "bob"])),
    "held": rarely(st.booleans()), "reason": st.sampled_from([None, "a mistake"]), "priority": st.none()}).flatmap(
        lambda order: st.just(order) if order["action"] != "prioritize" else st.sampled_from([2, 0, None]).map(
            lambda priority: {**order, "priority": priority}))
turned = st.builds(Rules, strict=st.booleans(), progress_receipts=st.booleans(), refuse_mismatch=st.booleans(),
                   max_lease_renewals=st.sampled_from([0, 0, 2]),
                   max_lease_lifetime=st.sampled_from([0, 0, 10 * MINUTE]), escalation=st.booleans())
questions = st.fixed_dictionaries({
    "key": st.sampled_from(["a", "a", "b", "c"]), "message": st.sampled_from(["May I?", "May I?", "May I?", "Which?"]),
    "schema": st.sampled_from([None, ANY_N]), "on_expiry": st.sampled_from(["resume", "fail"]),
    "to": st.sampled_from([None, None, {"kind": "agent", "id": "bob"}, {"kind": "human", "id": "eve"},
                           {"kind": "worker", "id": "w1"}]),
    "expires_in_seconds": maybe(minutes(1, 1, 10, 90)), "keep_lease": st.sampled_from([False, False, True])})
answers = st.fixed_dictionaries({
    "action": st.sampled_from(["accept", "accept", "decline", "cancel"]),
    "content": st.sampled_from([{"n": 1}, {"n": 1}, {"n": "x"}, None, LARGE])})
# The possible errors of a request with a lease; most requests have none.
lies = st.sampled_from(["none"] * 12 + ["worker", "lease", "instance", "older fence", "newer fence", "task"])


class Programs(RuleBasedStateMachine):
    """The steps of a program; subclasses decide where it runs."""

    epoch, clock = 0, 0     # the start of the program in Unix seconds, and the time since

    def perform(self, who: Who, name: str, /, **fields: Any) -> Any:
        """Perform one operation on all sides and compare; return the reply, or None if it was refused."""
        raise NotImplementedError

    def pass_time(self, seconds: int) -> None:
        """Move every clock forward."""
        raise NotImplementedError

    def sweep(self) -> None:
        """Let every gate sweep."""
        raise NotImplementedError

    def begin(self, rules: Rules) -> None:
        """Set up all sides."""
        raise NotImplementedError

    @initialize(rules=turned)
    def start(self, rules: Rules) -> None:
        self.tasks, self.receipts = [NOBODY], [(NOBODY, AGENTS[0])]
        self.owners: dict[str, Who] = {}
        self.live: list[tuple[Who, dict[str, Any]]] = []    # leases that may be live
        self.past: list[tuple[Who, dict[str, Any]]] = []
        self.done: list[str] = [NOBODY]                     # completed tasks
        self.bulks = ["confirmation -1"]                    # their confirmations
        self.fields = ORDINARY
        self.begin(rules)

    # Agents.

    @rule(who=agents, fields=creations)
    def create(self, who: Who, fields: dict[str, Any]) -> None:
        self.fields = fields
        fields = {**fields, "timeouts": self.timeouts(fields["lease_minutes"], fields["deadline_minutes"])}
        if made := self.perform(who, "create_task", **fields):
            self.tasks.append(made["task_id"])
            self.owners.setdefault(made["task_id"], who)

    @rule(who=agents, fields=creations, pick=picks)
    def create_again(self, who: Who, fields: dict[str, Any], pick: int) -> None:
        self.create(who, {**fields, "idempotency_key": "k1"})
        self.create(who, {**fields, "idempotency_key": "k1", "priority": (fields["priority"] or 0) + pick % 2})

    def timeouts(self, lease: int | None, deadline: int | None) -> dict[str, Any] | None:
        """Return the timeouts of a task; a deadline counts from the start of the program."""
        if lease is None and deadline is None:
            return None
        at = None if deadline is None else datetime.fromtimestamp(self.epoch + deadline * MINUTE, UTC)
        return {"lease_ttl_seconds": lease and lease * MINUTE, "deadline": at}

    @rule(who=rarely(any_owner), pick=picks, reason=st.sampled_from([None, "no longer needed"]), cascade=st.booleans())
    def cancel(self, who: Who | None, pick: int, reason: str | None, cascade: bool) -> None:
        task_id = self.some_task(pick)
        self.perform(who or self.owner_of(task_id), "cancel_task", task_id=task_id, reason=reason,
                     cascade=cascade and CAN_WAIT)

    # Families.

    @rule(who=rarely(agents), pick=picks, fields=creations)
    def beget(self, who: Who | None, pick: int, fields: dict[str, Any]) -> None:
        parent = self.some_task(pick)
        self.create(who or self.owner_of(parent), {**fields, "parent_task_id": parent})

    @rule(who=agents, fields=creations, until=st.sampled_from(["all", "all", "any"]), before=st.integers(0, 2),
          ends=st.lists(st.sampled_from(["cancel", "complete", "fail"]), max_size=2),
          minute=st.sampled_from([None, None, None, 1, 9]), waited=st.booleans())
    def wait_for_children(self, who: Who, fields: dict[str, Any], until: str, before: int, ends: list[str],
                          minute: int | None, waited: bool) -> None:
        self.take_up(who, {**fields, "idempotency_key": None}, 90 * MINUTE)
        parent, (worker, offer) = self.tasks[-1], self.live[-1] if self.live else (WORKERS[0], NO_OFFER)
        plain = {**fields, "idempotency_key": None, "requirements": None, "delay_seconds": None}
        for _ in range(2):
            self.create(who, {**plain, "parent_task_id": parent})
        at = None if minute is None else datetime.fromtimestamp(self.epoch + self.clock + minute * MINUTE, UTC)
        for number, how in enumerate([*ends[:before], "park", *ends[before:]]):
            if how == "park":
                self.perform(worker, "release_lease", task_id=offer["task_id"], lease_id=offer["lease_id"],
                             until_children=until, until=at)
            elif how == "cancel":
                self.perform(who, "cancel_task", task_id=self.tasks[-1 - number % 2])
            else:
                self.hold(how, 0, "none")
        if waited:
            self.wait(5 * MINUTE, swept=True)
        self.claim((who[0], "worker", "w1", None), {"lease_ttl_seconds": 90 * MINUTE, "max_tasks": 3, "claim_id": None},
                   again=False)
        if CAN_WAIT:
            self.perform(who, "wait_tasks", parent_task_id=parent, until=until)

    @rule(who=anybody, picked=st.lists(picks, min_size=1, max_size=3), until=st.sampled_from(["all", "any"]))
    def look_at_several(self, who: Who, picked: list[int], until: str) -> None:
        if CAN_WAIT:
            self.perform(who, "wait_tasks", ids=[self.some_task(pick) for pick in picked], until=until)

    @rule(who=rarely(any_owner), pick=picks)
    def release_hold(self, who: Who | None, pick: int) -> None:
        task_id = self.some_task(pick)
        self.perform(who or self.owner_of(task_id), "release_hold", task_id=task_id)

    @rule(who=rarely(any_owner), pick=picks, key=st.sampled_from([None, None, "k1", "k2", "again"]),
          payload=rarely(st.sampled_from(PAYLOADS)), done=st.booleans())
    def rerun(self, who: Who | None, pick: int, key: str | None, payload: Any, done: bool) -> None:
        task_id = self.done[-1 - pick % len(self.done)] if done else self.some_task(pick)
        owner = self.owner_of(task_id)
        given = {} if payload is None else {"payload": payload}
        if made := self.perform(who or owner, "rerun_task", task_id=task_id, idempotency_key=key, **given):
            self.tasks.append(made["task_id"])
            self.owners.setdefault(made["task_id"], owner)

    @rule(who=rarely(anybody), pick=picks, done=st.booleans(), artifacts=st.sampled_from(ARTIFACTS),
          proof=st.sampled_from(PROOFS))
    def attach(self, who: Who | None, pick: int, done: bool, artifacts: Any, proof: Any) -> None:
        task_id = self.done[-1 - pick % len(self.done)] if done else self.some_task(pick)
        self.perform(who or self.owner_of(task_id), "attach_artifacts", task_id=task_id, artifacts=artifacts,
                     delivery_proof=proof)

    def owner_of(self, task_id: str) -> Who:
        """Return the owner of a task."""
        return self.owners.get(task_id, AGENTS[0])

    @rule(who=anybody, pick=picks)
    def look(self, who: Who, pick: int) -> None:
        self.perform(who, "get_task", task_id=self.some_task(pick))

    @rule(who=rarely(anybody), pick=picks, again=st.booleans())
    def acknowledge(self, who: Who | None, pick: int, again: bool) -> None:
        receipt_id, to = self.receipts[-1 - pick % len(self.receipts)]
        for _ in range(1 + again):
            self.perform(who or to, "ack_receipt", receipt_id=receipt_id)

    def wrote(self, tenant: int, rows: list[Any]) -> None:
        """Remember receipts and the principals that may acknowledge them."""
        self.receipts += [(row.receipt_id, (tenant, "agent", row.to_id, None)) for row in rows]

    @rule(who=agents, pick=st.integers(0, 100))
    def what_is_owed(self, who: Who, pick: int) -> None:
        reached = self.perform(who, "list_open_obligations", limit=2)["cursor"]
        self.perform(who, "list_open_obligations", limit=200, since_receipt_id=reached, wait_seconds=0.001)
        self.perform(who, "check_terminator", parent_receipt_id=self.receipts[pick % len(self.receipts)][0])

    # Workers.

    @rule(who=workers, fields=claims, again=st.booleans())
    def claim(self, who: Who, fields: dict[str, Any], again: bool) -> None:
        for _ in range(1 + (again and fields["claim_id"] is not None)):
            reply = self.perform(who, "lease_next", **fields)
            self.live += [(who, offer) for offer in reply["tasks"] if (who, offer) not in self.live]
        self.perform(who, "list_leases")

    @rule(pick=picks, lie=lies, times=st.sampled_from([1, 1, 1, 12]), by=maybe(minutes(1, 5, 90)), named=st.booleans())
    def renew(self, pick: int, lie: str, times: int, by: int | None, named: bool) -> None:
        for _ in range(times):
            self.hold("renew_lease", pick, lie, extend_by_seconds=by, named=named)

    @rule(pick=picks, lie=lies)
    def begin_work(self, pick: int, lie: str) -> None:
        self.hold("start_task", pick, lie)

    @rule(pick=picks, lie=lies, progress=st.sampled_from(JSON))
    def progress(self, pick: int, lie: str, progress: Any) -> None:
        self.hold("report_progress", pick, lie, progress=progress)

    @rule(pick=picks, lie=lies, seq=st.integers(1, 3), name=st.sampled_from(["fetch", "fetch", "send"]),
          value=st.integers(1, 2), who=anybody)
    def record(self, pick: int, lie: str, seq: int, name: str, value: int, who: Who) -> None:
        self.hold("record_step", pick, lie, seq=seq, name=name, value=value)
        if self.tasks:
            self.perform(who, "list_steps", task_id=self.tasks[pick % len(self.tasks)])

    @rule(who=agents, fields=creations, reader=rarely(anybody), after=st.integers(0, 3),
          limit=st.sampled_from([None, None, 2]), ending=st.sampled_from([None, "complete", *ENDINGS]),
          calls=st.lists(st.tuples(st.lists(st.sampled_from(JSON[:4]), min_size=1, max_size=2),
                                   st.sampled_from([0, 0, 1, None, 5]), lies), min_size=2, max_size=4))
    def give_output(self, who: Who, fields: dict[str, Any], reader: Who | None, after: int, limit: int | None,
                    ending: str | None, calls: list[tuple[list[Any], int | None, str]]) -> None:
        if not CAN_APPEND:
            return
        self.take_up(who, {**fields, "idempotency_key": None}, 90 * MINUTE)
        task_id = self.live[-1][1]["task_id"] if self.live else NOBODY
        for chunks, position, lie in calls:
            self.hold("append_output", 0, lie, chunks=chunks, position=position)
        if ending:
            self.hold(ending, 0, "none")
        self.perform(reader or self.owner_of(task_id), "read_output", task_id=task_id, after=after, limit=limit)

    @rule(pick=picks, lie=lies, minute=st.sampled_from([None, None, 1, 20]), why=st.sampled_from([None, "no answer"]),
          checkpoint=st.sampled_from([None, {"page": 2}]))
    def release(self, pick: int, lie: str, minute: int | None, why: str | None, checkpoint: Any) -> None:
        until = None if minute is None else datetime.fromtimestamp(self.epoch + self.clock + minute * MINUTE, UTC)
        self.hold("release_lease", pick, lie, until=until, reason=why, checkpoint=checkpoint)

    @rule(pick=picks, lie=lies, result=st.sampled_from(JSON), artifacts=st.sampled_from(ARTIFACTS),
          proof=st.sampled_from(PROOFS), summary=st.sampled_from([None, "all done"]),
          meta=st.sampled_from([None, {"ms": 5}]))
    def complete(self, pick: int, lie: str, result: Any, artifacts: Any, proof: Any, summary: Any, meta: Any) -> None:
        self.hold("complete", pick, lie, result=result, artifacts=artifacts, delivery_proof=proof,
                  result_summary=summary, completion_metadata=meta)

    @rule(pick=picks, lie=lies, error=st.sampled_from(JSON), retryable=st.sampled_from([None, False, True, True]),
          after=maybe(minutes(0, 1, 90)))
    def fail(self, pick: int, lie: str, error: Any, retryable: bool | None, after: int | None) -> None:
        self.hold("fail", pick, lie, error=error, retryable=retryable, retry_after_seconds=after)

    def hold(self, verb: str, pick: int, lie: str, named: bool = True, **fields: Any) -> None:
        """Call a verb with a granted lease, or with a slightly wrong one."""
        held = self.some_lease(pick)
        (tenant, kind, id, instance), offer = held
        under = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
        under["fence"] = offer["fence"] if pick % 2 else None
        if lie == "worker":
            id = "w2" if id == "w1" else "w1"
        elif lie == "instance":
            instance = "elsewhere"
        elif lie == "lease":
            under["lease_id"] = NOBODY
        elif lie == "task":
            under["task_id"] = self.some_task(pick)
        elif lie != "none":
            under["fence"] = offer["fence"] + (1 if lie == "newer fence" else -1)
        if not named:
            del under["task_id"]
        fields = {**harness.NEEDED.get(verb, {}), **fields}
        reply = self.perform((tenant, kind, id, instance), verb, **under, **fields)
        if held in self.live and lie == "none" and (reply is None or verb in ENDINGS):
            self.past.append(held)
            self.live.remove(held)
        if reply is not None and verb == "complete":
            self.done.append(offer["task_id"])

    def some_lease(self, pick: int) -> tuple[Who, dict[str, Any]]:
        """Return a lease that should be live, or sometimes an ended one."""
        now = self.epoch + self.clock + TICK
        dead = [held for held in self.live if datetime.fromisoformat(held[1]["expires_at"]).timestamp() < now]
        self.past += dead
        self.live = [held for held in self.live if held not in dead]
        if not self.live and pick % 6 != PAST:
            self.take_up(AGENTS[0], self.fields, 90 * MINUTE)
        some = self.past if self.past and (pick % 6 == PAST or not self.live) else self.live
        return some[-1 - pick // 6 % len(some)] if some else (WORKERS[0], NO_OFFER)

    def take_up(self, who: Who, fields: dict[str, Any], lease_ttl_seconds: int | None) -> None:
        """Create a task and lease one, so that there is work."""
        self.create(who, {**fields, "requirements": None, "delay_seconds": None})
        worker = [worker for worker in WORKERS if worker[0] == who[0]][len(self.tasks) % 3 if who[0] == 0 else 0]
        self.claim(worker, {"lease_ttl_seconds": lease_ttl_seconds, "max_tasks": 3, "claim_id": None}, again=False)

    @rule(who=agents, fields=creations)
    def begin_task(self, who: Who, fields: dict[str, Any]) -> None:
        self.take_up(who, fields, 90 * MINUTE)

    @rule(who=agents, fields=creations, swept=st.booleans(), verb=st.sampled_from(VERBS))
    def come_late(self, who: Who, fields: dict[str, Any], swept: bool, verb: str) -> None:
        self.take_up(who, fields, MINUTE)
        self.wait(MINUTE, swept)
        self.hold(verb, PAST, "none")

    @rule(who=agents, fields=creations, times=st.integers(1, 5), verb=maybe(st.sampled_from(VERBS)))
    def lose_again_and_again(self, who: Who, fields: dict[str, Any], times: int, verb: str | None) -> None:
        self.take_up(who, fields, MINUTE)
        for _ in range(times):
            if verb in ("start_task", "report_progress"):
                self.hold(verb, 0, "none")
            self.wait(MINUTE, swept=True)
            self.claim((who[0], "worker", "w1", None), {"lease_ttl_seconds": MINUTE, "max_tasks": 3, "claim_id": None},
                       again=False)

    @rule(pick=picks, attached=st.booleans(), result=st.sampled_from(JSON), artifacts=st.sampled_from(ARTIFACTS),
          proof=st.sampled_from(PROOFS))
    def locate_later(self, pick: int, attached: bool, result: Any, artifacts: Any, proof: Any) -> None:
        self.fields = {**self.fields, "result_delivery": None}
        held = self.some_lease(pick)
        self.hold("complete", pick, "none", result=result)
        where = {"task_id": held[1]["task_id"], "artifacts": artifacts, "delivery_proof": proof}
        if attached:
            self.perform(self.owner_of(held[1]["task_id"]), "attach_artifacts", **where)
        else:
            self.perform(held[0], "complete", lease_id=held[1]["lease_id"], **where)

    # Who looks after the gate.

    @rule(who=operators, what=targets, drained=st.booleans(), reason=st.sampled_from([None, "a leak"]))
    def pause(self, who: Who, what: dict[str, Any], drained: bool, reason: str | None) -> None:
        self.perform(who, "drain_work" if drained else "pause_work", **what, reason=reason)
        self.perform(who, "list_pauses")
        if not drained:
            self.resume(who, what)

    @rule(who=operators, what=targets)
    def resume(self, who: Who, what: dict[str, Any]) -> None:
        self.perform(who, "resume_work", **what)

    @rule(fields=creations, needs=skills, kind=st.sampled_from(["type", "lane", "other lane", "worker", "tenant"]),
          minute=st.sampled_from([None, None, 0, 1]), waits=st.booleans(), drained=st.booleans(),
          worker=st.sampled_from(WORKERS[:3]))
    def pause_what_is_wanted(self, fields: dict[str, Any], needs: list[str], kind: str, minute: int | None,
                             waits: bool, drained: bool, worker: Who) -> None:
        fields = {**fields, "requirements": {"capabilities": needs}, "delay_seconds": None}
        whats: dict[str, dict[str, Any]] = {
            "worker": {"worker": worker[2]}, "tenant": {"whole_tenant": True}, "type": {"type": fields["type"]},
            "lane": {"type": fields["type"], "capabilities": needs},
            "other lane": {"type": fields["type"], "capabilities": ["tpu"]}}
        what = whats[kind]
        claim = {"lease_ttl_seconds": 90 * MINUTE, "max_tasks": 3, "claim_id": None, "capabilities": SKILLS}
        until = None if minute is None else datetime.fromtimestamp(self.epoch + self.clock + minute * MINUTE, UTC)
        self.create(AGENTS[0], fields)
        self.perform(ADMINS[0], "drain_work" if drained else "pause_work", **what, until=until)
        self.claim(worker, claim, again=False)
        if waits:
            self.wait(MINUTE, swept=False)
            self.claim(worker, claim, again=False)
        self.perform(ADMINS[0], "list_pauses")
        self.resume(ADMINS[0], what)
        self.claim(worker, claim, again=False)

    @rule(who=operators, order=bulks, fields=creations, times=st.integers(1, 3), end=st.sampled_from(ENDED_BY),
          most=st.sampled_from([1, 2, 500]), late=st.sampled_from([False, False, False, True]))
    def begin_bulk(self, who: Who, order: dict[str, Any], fields: dict[str, Any], times: int, end: str,
                   most: int, late: bool) -> None:
        for _ in range(times):
            self.bring_about(fields, end)
        if preview := self.perform(who, "preview_bulk", **order):
            self.bulks.append(preview["confirmation"])
            self.wait(15 * MINUTE * late, swept=late)
            self.perform(who, "run_bulk", confirmation=self.bulks[-1], max_tasks=most)
            self.claim(WORKERS[0], {"max_tasks": 3, "claim_id": None}, again=False)

    def bring_about(self, fields: dict[str, Any], end: str) -> None:
        """Create a task, and let it be as a bulk may find it."""
        fields = {**fields, "idempotency_key": None, "requirements": None, "delay_seconds": None}
        if end in ("waits", "is canceled"):
            self.create(AGENTS[0], fields)
            if end == "is canceled":
                self.perform(AGENTS[0], "cancel_task", task_id=self.tasks[-1])
            return
        self.take_up(AGENTS[0], {**fields, "max_expiries": 1}, MINUTE if end == "is held" else 90 * MINUTE)
        if end == "is held":
            self.wait(MINUTE, swept=True)
        elif end != "is leased":
            self.hold("complete" if end == "succeeds" else "fail", 0, "none")

    @rule(who=operators, pick=picks, most=st.sampled_from([None, 1, 3]))
    def go_on_with_a_bulk(self, who: Who, pick: int, most: int | None) -> None:
        self.perform(who, "run_bulk", confirmation=self.bulks[-1 - pick % len(self.bulks)], max_tasks=most)

    # Questions.

    @rule(pick=picks, lie=lies, fields=questions, checkpoint=rarely(st.sampled_from(JSON)), again=st.booleans())
    def ask(self, pick: int, lie: str, fields: dict[str, Any], checkpoint: Any, again: bool) -> None:
        if CAN_ASK:
            given = {} if checkpoint is None else {"checkpoint": checkpoint}
            for _ in range(1 + again):
                self.hold("request_input", pick, lie, **fields, **given)

    @rule(who=rarely(anybody), pick=picks, key=st.sampled_from(["a", "a", "b", "c"]), given=answers,
          again=st.booleans())
    def answer(self, who: Who | None, pick: int, key: str, given: dict[str, Any], again: bool) -> None:
        task_id = self.some_task(pick)
        if CAN_ASK:
            for _ in range(1 + again):
                self.perform(who or self.owner_of(task_id), "answer_input", task_id=task_id, key=key, **given)
            self.perform(who or self.owner_of(task_id), "list_inputs", task_id=task_id)

    @rule(who=agents, fields=creations, asked=questions, answered=maybe(answers), minute=st.sampled_from([0, 0, 1, 10]),
          swept=st.booleans(), verb=maybe(st.sampled_from(VERBS)))
    def wait_for_an_answer(self, who: Who, fields: dict[str, Any], asked: dict[str, Any],
                           answered: dict[str, Any] | None, minute: int, swept: bool, verb: str | None) -> None:
        self.take_up(who, fields, 90 * MINUTE)
        if not CAN_ASK:
            return
        self.hold("request_input", 0, "none", **asked)
        if verb is not None:
            self.hold(verb, 0, "none")
        self.wait(minute * MINUTE, swept)
        for admin in (who, ADMINS[0]) if answered is not None and who[0] == 0 else ():
            self.perform(admin, "answer_input", task_id=self.tasks[-1], key=asked["key"], **(answered or {}))
        self.claim((who[0], "worker", "w1", None), {"lease_ttl_seconds": 90 * MINUTE, "max_tasks": 3, "claim_id": None},
                   again=False)

    # The clock.

    @rule(seconds=minutes(1, 1, 1, 5, 40), swept=st.booleans())
    def wait(self, seconds: int, swept: bool) -> None:
        self.pass_time(seconds)
        if swept:
            self.sweep()

    def some_task(self, pick: int) -> str:
        """Return an existing task, preferably a new one; sometimes an unknown one."""
        return self.tasks[-1 - pick // 2 % len(self.tasks)]


def settings_of(rules: Rules) -> dict[str, Any]:
    """Return the rules as settings of a gate."""
    return {"locatability": "strict" if rules.strict else "lenient", "progress_receipts": rules.progress_receipts,
            "idempotency_mismatch": "refuse" if rules.refuse_mismatch else "return", "instance_id": "asyncgate-1",
            "max_lease_renewals": rules.max_lease_renewals, "max_lease_lifetime_seconds": rules.max_lease_lifetime,
            "escalation": EscalationSettings(enabled=rules.escalation, targets=tuple([
                EscalationTarget(escalation_class=number, to_kind=to.kind, to_id=to.id)  # type: ignore[arg-type]
                for number, to in ESCALATES_TO.items()])),
            "expiry_jitter_seconds": 0.0}       # an oracle cannot predict random times


class Side:
    """One gate that runs a program."""

    def __init__(self, run: Run, backend: harness.OwnTenants, rules: Rules, tenants: list[str]) -> None:
        self.run, self.backend = run, backend
        backend.backend.ids = harness.Numbered()        # so that failures are reproducible, and twins are equal
        engine = engine_over(backend, harness.settings_for_tests(**settings_of(rules)))
        backend.own.clear()
        self.gates = [harness.Gate(engine, tenant) for tenant in tenants]
        self.seen = [""] * len(tenants)
        self.confirmations = [list[str]() for _ in tenants]     # programs call them by number: each gate seals its own
        self.epoch = math.floor(self.gates[0].now())

    def perform(self, who: Who, name: str, fields: dict[str, Any]) -> tuple[Any, ...]:
        """Perform an operation; return the reply or the refusal as plain data."""
        tenant, kind, id, instance = who
        role = {"agent": "agent", "worker": "worker"}.get(kind, "admin")
        view = self.gates[tenant].as_caller(kind, id, role, instance=instance)
        try:
            reply = plain(self.run(getattr(view, name)(**self.name_sealed(tenant, written_out(fields)))))
        except errors.GateError as refusal:
            return "no", refusal.code, refusal.more.get("reason")
        self.number_sealed(tenant, reply)
        if name == "list_steps":        # sealed with the secret of its database
            reply.pop("cursor")
        reply.get("leases", []).sort(key=lambda held: held["lease_id"])     # rows of the same time have no fixed order
        return "yes", reply

    def name_sealed(self, tenant: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a request with the confirmation that was sealed for its number."""
        number = int(fields["confirmation"].split()[1]) if "confirmation" in fields else -1
        known = self.confirmations[tenant]
        return {**fields, "confirmation": known[number]} if 0 <= number < len(known) else fields

    def number_sealed(self, tenant: int, reply: dict[str, Any]) -> None:
        """Put a number in the place of a sealed confirmation."""
        if "confirmation" in reply:
            known = self.confirmations[tenant]
            known.append(reply["confirmation"])
            reply["confirmation"] = f"confirmation {len(known) - 1}"

    def news(self, tenant: int) -> list[Any]:
        """Return the receipts written since the last call."""
        of = queries.ReceiptFilter(None, None, None, self.seen[tenant] or None, 1000)
        rows = self.run(self.backend.page(self.gates[tenant].tenant_id, of))
        self.seen[tenant] = rows[-1].receipt_id if rows else self.seen[tenant]
        return list(rows)

    def tick(self, moment: str | None) -> int | None:
        """Convert a time of an answer to the program's time, rounded down to half a minute."""
        if moment is None:
            return None
        return math.floor((datetime.fromisoformat(moment).timestamp() - self.epoch + 0.01) / TICK) * TICK

    def assume_in_time(self, clock: int) -> None:
        """Give a program up that has itself run for half a minute: its times cannot be foreseen."""
        assume(self.gates[0].now() < self.epoch + clock + TICK)

    def timed(self, value: Any, name: str = "") -> Any:
        """Convert the times of an answer to the program's time, and remove members that depend on the real time."""
        if isinstance(value, dict):
            return {name: self.timed(held, name) for name, held in value.items() if name not in MOMENTARY}
        if isinstance(value, list):
            return [self.timed(held) for held in value]
        return self.tick(value) if name.endswith("_at") or name in TIMES else value


def plain(reply: Any) -> dict[str, Any]:
    """Return a reply as a client decodes it, including omitted defaults."""
    held = msgspec.structs.asdict(reply)
    return {name: msgspec.json.decode(msgspec.json.encode(value)) for name, value in held.items()
            if value is not msgspec.UNSET}


def like(expected: Any, got: Any) -> Any:
    """Return the members of an answer that the oracle predicts."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return {name: like(value, got.get(name)) for name, value in expected.items()}
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return [like(*pair) for pair in zip(expected, got, strict=True)]
    return got


class AgainstTheOracle(Programs):
    """A gate compared with the oracle."""

    def __init__(self, run: Run, backend: harness.OwnTenants) -> None:
        super().__init__()
        self.run, self.backend = run, backend

    def begin(self, rules: Rules) -> None:
        self.side = Side(self.run, self.backend, rules, [str(uuid.uuid4()), str(uuid.uuid4())])
        self.epoch = self.side.epoch
        self.models = [Model(rules, self.epoch) for _ in self.side.gates]

    def perform(self, who: Who, name: str, /, **fields: Any) -> Any:
        reply = self.side.perform(who, name, fields)
        self.side.assume_in_time(self.clock)
        expected = self.expect(who, name, harness.ask_of(OPERATIONS[name], written_out(fields)))
        got = like(expected, self.side.timed(list(reply)))

        assert got == expected, f"{name}: the gate says {got}, the oracle {expected}"
        return reply[1] if reply[0] == "yes" else None

    def expect(self, who: Who, name: str, ask: Any) -> list[Any]:
        """Let the oracle perform the same with the gate's ids, and compare the receipts."""
        tenant, kind, id, instance = who
        model, written = self.models[tenant], self.side.news(tenant)
        before = len(model.receipts)
        self.wrote(tenant, written)
        try:
            reply = model.perform(name, wire.Principal(kind, id, instance), ask, self.clock, ids_of(written),
                                  admin=kind == "human")
            answer: list[Any] = ["yes", reply]
        except ModelRefusal as refusal:
            answer = ["no", refusal.code, refusal.reason]
        facts = sorted(model.receipts[before:], key=lambda fact: fact.receipt_id)

        steps = [(row.receipt_type, row.task_id) for row in written]
        assert [(fact.type, fact.task_id) for fact in facts] == steps, name
        for fact, row in zip(facts, written, strict=True):
            self.equal(fact, row)
        return answer

    def equal(self, fact: Any, row: Any) -> None:
        """Compare one receipt of the oracle with the gate's receipt."""
        body = msgspec.json.decode(row.body)
        unknown = {name: told for name, told in body.items() if name == PROSE or fact.body.get(name) == SEALED}

        assert {**fact.body, **unknown} == body, fact.type
        assert (fact.receipt_id, fact.sender, fact.to, fact.lease_id, tuple(sorted(fact.parents))) == (
            row.receipt_id, row.sender, row.to, row.lease_id, row.parents), fact.type
        assert fact.hash(body) == row.hash, row.body

    @rule(who=agents, limit=st.sampled_from([2, 200]), type=st.sampled_from([None, "task.assigned", "lease.expired"]))
    def what_has_come(self, who: Who, limit: int, type: str | None) -> None:
        page = self.perform(who, "list_receipts", limit=limit, receipt_type=type, wait_seconds=0.001)["receipts"]
        seen = page[-1]["receipt_id"] if page else None
        self.perform(who, "list_receipts", limit=limit, receipt_type=type, since_receipt_id=seen, wait_seconds=0.001)

    def pass_time(self, seconds: int) -> None:
        self.side.gates[0].skip(seconds)
        self.clock += seconds

    def sweep(self) -> None:
        self.run(self.side.gates[0].sweep())
        self.side.assume_in_time(self.clock)
        for tenant in range(len(self.models)):
            self.expect((tenant, "asyncgate", "asyncgate-1", None), "sweep", None)

    def teardown(self) -> None:
        """Compare the final states: every task, and every open obligation in the index."""
        for tenant, model in enumerate(getattr(self, "models", ())):
            self.side.assume_in_time(self.clock)
            for task_id in model.tasks:
                self.perform((tenant, "human", "root", None), "get_task", task_id=task_id)
            stored = self.run(self.side.gates[tenant].everything())
            assert self.run(harness.miscounted(self.side.gates[tenant])) == []
            assert sorted(task.task_id for task in stored["Task"]) == sorted(model.tasks)
            assert sorted(row.receipt_id for row in stored["Obligation"]) == sorted(
                [*(task.duty for task in model.tasks.values() if task.owed),
                 *(question.request for task in model.tasks.values() for question in task.open_questions)])
            assert [row.receipt_id for row in stored["Receipt"]] == sorted(
                fact.receipt_id for fact in model.receipts)


def written_out(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request with its abbreviations expanded."""
    return {name: "x" * 16_400 if value == LARGE else value for name, value in fields.items()}


def ids_of(written: list[Any]) -> Callable[[str, str, str], str]:
    """Return a source of ids that gives the gate's ids to the oracle."""
    stock: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in written:
        stock["receipt", row.task_id, row.receipt_type].append(row.receipt_id)
        if row.receipt_type == "task.assigned":
            stock["task", "", ""].append(row.task_id)
        if row.receipt_type == "task.accepted":
            stock["lease", row.task_id, ""].append(row.lease_id)

    def new_id(what: str, task_id: str, type: str) -> str:
        left = stock[what, task_id, type]
        return left.pop(0) if left else f"a {what} that the gate does not have"
    return new_id


class InOrder(harness.OwnTenants):
    """A backend that sweeps in order of ids, because databases may use any order."""

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        tenants = await super().overdue(now, grace, limit)
        return sorted((tenant, sorted(tasks), sorted(schedules)) for tenant, tasks, schedules in tenants)


class OnSides(Programs):
    """The same program on several sides, with the same clock and sweeps."""

    run: Run
    sides: Sequence[Side]

    def align(self) -> None:
        """Begin at the same time on all sides, far from where a tick ends: the machine's clock may be set meanwhile."""
        self.epoch = max(math.ceil(side.gates[0].now()) for side in self.sides)
        for side in self.sides:
            side.epoch = self.epoch
            side.gates[0].skip(self.epoch + TICK / 3 - side.gates[0].now())

    def pass_time(self, seconds: int) -> None:
        self.clock += seconds
        for side in self.sides:
            side.gates[0].skip(seconds)

    def sweep(self) -> None:
        for side in self.sides:
            self.run(side.gates[0].sweep())

    def assume_in_time(self) -> None:
        for side in getattr(self, "sides", ()):
            side.assume_in_time(self.clock)

    def teardown(self) -> None:
        """Compare the final data, except for times."""
        self.assume_in_time()
        left = [[facts(self.run(gate.everything())) for gate in side.gates] for side in getattr(self, "sides", ())]
        assert [self.run(harness.miscounted(gate)) for side in getattr(self, "sides", ()) for gate in side.gates
                ] == [[]] * sum(map(len, left))
        for other in left[1:]:
            assert other == left[0]


class OnTwoBackends(OnSides):
    """The same program on two backends that give the same ids."""

    def __init__(self, run: Run, backends: list[harness.OwnTenants]) -> None:
        super().__init__()
        self.run, self.backends = run, backends

    def begin(self, rules: Rules) -> None:
        tenants = [str(uuid.uuid4()), str(uuid.uuid4())]
        self.sides = [Side(self.run, backend, rules, tenants) for backend in self.backends]
        self.align()

    def perform(self, who: Who, name: str, /, **fields: Any) -> Any:
        first, second = [side.perform(who, name, fields) for side in self.sides]
        self.assume_in_time()

        assert self.sides[0].timed(list(first)) == self.sides[1].timed(list(second)), name
        self.wrote(who[0], self.sides[0].news(who[0]))
        return first[1] if first[0] == "yes" else None


def facts(stored: dict[str, list[Any]]) -> list[Any]:
    """Return all data of a tenant that does not depend on the time."""
    return [*((row.receipt_id, row.receipt_key, row.hash, row.body, row.parents) for row in stored["Receipt"]),
            *((row.task_id, row.status, row.attempt, row.fence, row.expiries, row.held, row.owed, row.duty,
               row.outcome, row.artifacts, row.lost_to, row.parent_task_id) for row in stored["Task"]),
            *((row.lease_id, row.ending, row.renewals) for row in stored["Lease"]),
            *((row.task_id, row.progress, row.sequence, row.parks, row.steps, row.steps_sha256, row.family,
                harness.list_questions(row))
              for row in stored["Progress"]),
            *((row.event_id, row.event_type, row.payload) for row in stored["Event"]),
            *((row.receipt_id, row.to_kind, row.to_id) for row in stored["Obligation"])]


@pytest.fixture
def run() -> Iterator[Run]:
    """Return a loop for the whole test, because a program is not a coroutine."""
    with asyncio.Runner() as runner:
        yield runner.run


def run_programs(machine: Callable[[], Programs], settings: settings) -> None:
    """Run random programs; Hypothesis expects a class, but only calls it."""
    run_state_machine_as_test(machine, settings=settings)  # type: ignore[arg-type]


def budget(rounds: int) -> settings:
    """Return the settings of Hypothesis: a CI always runs the same programs, other runs differ."""
    return settings(max_examples=EXAMPLES_PER_ROUND * rounds, stateful_step_count=STEPS, print_blob=True,
                    derandomize="CI" in os.environ, database=None,
                    deadline=None, suppress_health_check=[HealthCheck.filter_too_much])     # slowness is not a failure


def test_random_programs_have_the_answers_states_and_receipts_of_the_oracle(
        backend_url: str, run: Run, rounds: int) -> None:
    backend = harness.OwnTenants(run(open_backend(backend_url, serving=True)))
    try:
        run_programs(partial(AgainstTheOracle, run, backend), settings=budget(rounds))
    finally:
        run(backend.aclose())


def test_the_same_program_has_the_same_receipt_hashes_in_memory(backend_url: str, run: Run, rounds: int) -> None:
    backends: list[harness.OwnTenants] = [InOrder(run(open_backend(url))) for url in ("memory:", backend_url)]
    try:
        run_programs(partial(OnTwoBackends, run, backends), settings=budget(rounds))
    finally:
        for backend in backends:
            run(backend.aclose())
