"""The history checker passes a true history and catches, for every invariant, one that breaks exactly that one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncgate.conformance.history import Call, Stored, violations
from asyncgate.parts.model.content import sha256
from asyncgate.parts.model.ids import first_id
from asyncgate.parts.model.stored import Bulk, Event, Lease, Progress, Receipt, Task
from asyncgate.parts.model.stored_journal import RecordedStep
from asyncgate.parts.model.stored_output import OutputEntry

HERE, THERE = "tenant here", "tenant there"


class Forgery:
    """A small history of one tenant that is true until somebody meddles with it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.final = {HERE: Stored(), THERE: Stored()}
        self.clock = 1000.0

    @property
    def end(self) -> Stored:
        return self.final[HERE]

    def call(self, operation: str, by: str, reply: Any = None, error: str | None = None, **ask: Any) -> Call:
        self.clock += 1
        self.calls.append(Call(tenant=HERE, operation=operation, ask=ask, by=by, reply=reply, error=error,
                               started=self.clock, ended=self.clock + 0.5))
        return self.calls[-1]

    def receipt(self, name: str, type: str, task_id: str, by: str, to: str = "asyncgate", lease: str | None = None,
                parents: tuple[str, ...] = (), **body: Any) -> None:
        self.end.receipts[name] = Receipt(name, name, type, self.clock, "worker", by, "agent", to, task_id, lease, None,
                                          "asyncgate-1", "", msgspec.json.encode(body).decode(), parents=parents)

    def task(self, task_id: str, **fields: Any) -> None:
        self.end.tasks[task_id] = msgspec.convert(
            {"task_id": task_id, "lane": 0, "type": "demo", "payload": "", "payload_pointer": None, "requirements": "",
             "terms": "", "owner_kind": "agent", "owner_id": "ada", "principal_ai": "", "priority": 0,
             "max_attempts": 3, "retry_backoff_seconds": 0, "max_expiries": 0, "created_at": 0.0,
             "duty": f"{task_id}-1", "idempotency_key": None, "fingerprint": None, "parent_task_id": None,
             "asyncgate_instance": "", "updated_at": 0.0, **fields}, Task)

    def event(self, task_id: str, type: str, **payload: Any) -> None:
        text = msgspec.json.encode(payload).decode()
        self.end.events.append(Event(f"e-{len(self.end.events):03}", task_id, type, text, self.clock))

    def bulk(self, action: str, done: int) -> None:
        """Carry out a bulk that has ended."""
        name = f"bulk {len(self.end.bulks)}"
        self.end.bulks[name] = Bulk(name, action, "{}", "human", "root", done, False, 0.0, 0.0, "", done, ended_at=1.0)
        self.call("run_bulk", "root", None, confirmation=name)
        for _ in range(2):
            self.call("run_bulk", "root", {"bulk_id": name, "done": done, "ended": True}, confirmation=name)

    def moved(self, task_id: str, skipped: int = 1000) -> None:
        self.end.events.append(Event(f"{task_id}-{len(self.end.events)}", task_id, "task.moved",
                                     f'{{"fences_skipped":{skipped}}}', self.clock))
        self.change(task_id, fence=self.end.tasks[task_id].fence + skipped)

    def lease(self, task_id: str, lease_id: str, fence: int, ending: str) -> None:
        self.end.leases[task_id] = Lease(task_id, lease_id, "worker", "w1", None, fence, 0.0, 1e9, 0, "", None, ending)

    def change(self, task_id: str, **fields: Any) -> None:
        self.end.tasks[task_id] = replace(self.end.tasks[task_id], **fields)


def offer(task_id: str, lease_id: str, fence: int, until: float) -> dict[str, Any]:
    return {"task_id": task_id, "lease_id": lease_id, "fence": fence,
            "expires_at": datetime.fromtimestamp(until, UTC).isoformat()}


def truth() -> Forgery:
    """Task t: lost by w2, done by w1.  Task u: failed once, then canceled.  Task v: leased.  A reader saw all."""
    f = Forgery()
    f.call("create_task", "ada", {"task_id": "t", "status": "queued"}, idempotency_key="k")
    f.receipt("t-1", "task.assigned", "t", "ada", "ada")
    f.call("create_task", "ada", None, idempotency_key="nobody knows")
    f.call("lease_next", "w2", {"tasks": [offer("t", "t-a", 1, f.clock + 2)]})
    f.receipt("t-2", "task.accepted", "t", "w2", lease="t-a", parents=("t-1",), fence=1)
    f.clock += 5
    f.call("renew_lease", "w2", error="lease_invalid_or_expired", task_id="t", lease_id="t-a", extend_by_seconds=60)
    f.receipt("t-3", "lease.expired", "t", "asyncgate", "ada", lease="t-a", parents=("t-2",))
    f.call("lease_next", "w1", {"tasks": [offer("t", "t-b", 2, f.clock + 60)]})
    f.receipt("t-4", "task.accepted", "t", "w1", lease="t-b", parents=("t-1",), fence=2)
    f.call("complete", "w1", task_id="t", lease_id="t-b")
    f.call("complete", "w1", {"ok": True, "status": "succeeded"}, task_id="t", lease_id="t-b")
    f.receipt("t-5", "task.completed", "t", "w1", lease="t-b", parents=("t-1",))
    f.receipt("t-6", "task.result_ready", "t", "asyncgate", "ada", parents=("t-5",))
    f.task("t", status="succeeded", fence=2, expiries=1, owed=False, idempotency_key="k")
    f.lease("t", "t-b", 2, "completed")
    f.call("get_task", "ada", {"task_id": "t", "status": "succeeded"}, task_id="t")

    f.call("create_task", "ada", {"task_id": "u", "status": "queued"})
    f.receipt("u-1", "task.assigned", "u", "ada", "ada")
    f.call("lease_next", "w1", {"tasks": [offer("u", "u-a", 1, f.clock + 60)]})
    f.receipt("u-2", "task.accepted", "u", "w1", lease="u-a", parents=("u-1",), fence=1)
    f.call("fail", "w1", {"ok": True, "status": "queued", "requeued": True}, task_id="u", lease_id="u-a")
    f.receipt("u-3", "task.failed", "u", "w1", lease="u-a", parents=("u-2",), requeued=True)
    f.call("cancel_task", "ada", {"ok": True, "status": "canceled"}, task_id="u")
    f.receipt("u-4", "task.canceled", "u", "ada", parents=("u-1",))
    f.receipt("u-5", "task.result_ready", "u", "asyncgate", "ada", parents=("u-4",))
    f.task("u", status="canceled", fence=1, attempt=1, owed=False)
    f.lease("u", "u-a", 1, "failed")

    f.call("create_task", "ada", {"task_id": "v", "status": "queued"})
    f.receipt("v-1", "task.assigned", "v", "ada", "ada")
    f.call("lease_next", "w1", {"tasks": [offer("v", "v-a", 1, f.clock + 60)]})
    f.receipt("v-2", "task.accepted", "v", "w1", lease="v-a", parents=("v-1",), fence=1)
    f.task("v", status="leased", fence=1)
    f.lease("v", "v-a", 1, "live")
    f.end.obligations.add("v-1")
    ask(f)
    operate(f)
    f.call("rerun_task", "ada", {"task_id": "w", "status": "queued"}, task_id="u")
    f.receipt("w-1", "task.assigned", "w", "ada", "ada", parents=("u-4",))
    f.task("w", terms='{"rerun_of":"u"}')
    f.end.obligations.add("w-1")
    f.end.events.append(Event("w-2", "u", "task.rerun", '{"rerun_as":"w","by":{"id":"ada"}}', f.clock))
    for page in (["t-1", "t-3"], [], ["t-6", "u-1"]):
        f.call("list_receipts", "ada", {"receipts": [{"receipt_id": name} for name in page]})
    return f


def ask(f: Forgery) -> None:
    """Task a asks the boss, who answers, and once more, until the gate gives up; task b waits for its answer."""
    for name in "ab":
        f.call("create_task", "ada", {"task_id": name, "status": "queued"})
        f.receipt(f"{name}-1", "task.assigned", name, "ada", "eve")
        f.call("lease_next", "w1", {"tasks": [offer(name, f"{name}-a", 1, f.clock + 60)]})
        f.receipt(f"{name}-2", "task.accepted", name, "w1", lease=f"{name}-a", parents=(f"{name}-1",), fence=1)
        f.call("request_input", "w1", {"receipt_id": f"{name}-3"}, task_id=name, lease_id=f"{name}-a", key="k")
        f.receipt(f"{name}-3", "input.requested", name, "w1", "boss", f"{name}-a", (f"{name}-2",), key="k",
                  lease_ended=True)
    f.task("b", fence=1, held="input_required")
    f.lease("b", "b-a", 1, "asked")
    f.end.obligations |= {"b-1", "b-3"}
    f.call("answer_input", "root", {"receipt_id": "a-4", "action": "accept"}, task_id="a", key="k")
    f.receipt("a-4", "input.answered", "a", "root", parents=("a-3",), key="k", action="accept",
              in_place_of={"kind": "agent", "id": "boss"})
    again = offer("a", "a-b", 2, f.clock + 60)
    f.call("lease_next", "w1", {"tasks": [{**again, "inputs": {"k": {"action": "accept", "receipt_id": "a-4"}}}]})
    f.receipt("a-5", "task.accepted", "a", "w1", lease="a-b", parents=("a-1",), fence=2)
    f.receipt("a-6", "input.requested", "a", "w1", "boss", "a-b", ("a-5",), key="l", lease_ended=True)
    f.receipt("a-7", "input.expired", "a", "asyncgate", "boss", parents=("a-6",), key="l", reason="expired")
    f.receipt("a-8", "task.failed", "a", "asyncgate", parents=("a-1",), requeued=False)
    f.end.receipts["a-8"] = replace(f.end.receipts["a-8"], from_kind="asyncgate")
    f.receipt("a-9", "task.result_ready", "a", "asyncgate", "eve", parents=("a-8",))
    f.task("a", status="failed", fence=2, owed=False)
    f.lease("a", "a-b", 2, "asked")


def changes(f: Forgery, name: str, **fields: Any) -> None:
    f.end.receipts[name] = replace(f.end.receipts[name], **fields)


def answers_what_it_was_not_asked(f: Forgery) -> None:
    changes(f, "a-4", body='{"key":"k","action":"accept"}')


def answers_for_somebody_else(f: Forgery) -> None:
    changes(f, "a-4", body='{"key":"k","action":"accept","in_place_of":{"kind":"agent","id":"eve"}}')


def answers_itself(f: Forgery) -> None:
    changes(f, "a-4", from_id="w1")


def answers_twice(f: Forgery) -> None:
    f.receipt("a-44", "input.expired", "a", "asyncgate", "boss", parents=("a-3",), key="k", reason="expired")


def answers_before_the_question(f: Forgery) -> None:
    f.end.receipts["b-22"] = replace(f.end.receipts["a-4"], receipt_id="b-22", task_id="b", parents=("b-3",))
    f.end.obligations.remove("b-3")
    f.change("b", held=None)


def answers_no_question(f: Forgery) -> None:
    f.receipt("b-4", "input.expired", "b", "asyncgate", "boss", parents=("b-1",), key="k", reason="task_ended")


def asks_twice_under_one_key(f: Forgery) -> None:
    changes(f, "a-6", body='{"key":"k","lease_ended":true}')


def asks_without_the_lease(f: Forgery) -> None:
    changes(f, "b-3", from_id="w2")


def loses_a_question(f: Forgery) -> None:
    f.call("request_input", "w1", {"receipt_id": "b-9"}, task_id="b", lease_id="b-a", key="m")


def loses_an_answer(f: Forgery) -> None:
    f.call("answer_input", "boss", {"receipt_id": "b-9", "action": "accept"}, task_id="b", key="k")


def changes_an_answer(f: Forgery) -> None:
    f.call("answer_input", "boss", {"receipt_id": "a-4", "action": "decline"}, task_id="a", key="k")


def hands_on_an_answer_that_nobody_gave(f: Forgery) -> None:
    made_up = {"k": {"action": "accept", "receipt_id": "b-9"}}
    f.call("lease_next", "w1", {"tasks": [{**offer("b", "b-a", 1, f.clock + 60), "inputs": made_up}]})


def leases_what_waits_for_an_answer(f: Forgery) -> None:
    f.receipt("b-4", "task.accepted", "b", "w1", lease="b-b", parents=("b-1",), fence=2)
    f.change("b", fence=2, status="leased", held=None)
    f.lease("b", "b-b", 2, "live")


def waits_for_nothing(f: Forgery) -> None:
    f.change("v", status="queued", held="input_required")
    f.lease("v", "v-a", 1, "released")
    f.receipt("v-3", "lease.expired", "v", "asyncgate", "eve", lease="v-a", parents=("v-2",))


def ends_with_an_open_question(f: Forgery) -> None:
    f.receipt("t-45", "input.requested", "t", "w1", "boss", "t-b", ("t-4",), key="k", lease_ended=False)
    f.end.obligations.add("t-45")


def gives_up_without_an_expiry(f: Forgery) -> None:
    changes(f, "a-7", body='{"key":"l","reason":"task_ended"}')


def leaves_an_answered_question_open(f: Forgery) -> None:
    f.end.obligations.add("a-3")


def ends_a_lease_that_it_says_is_kept(f: Forgery) -> None:
    changes(f, "b-3", body='{"key":"k","lease_ended":false}')


def operate(f: Forgery) -> None:
    """Pause and resume; tasks p, q and r are there for bulks."""
    f.call("pause_work", "root", {"until": None}, type="demo")
    f.call("lease_next", "w1", {"tasks": []})
    f.call("resume_work", "root", {"resumed": True}, type="demo")
    f.call("pause_work", "root", {"until": datetime.fromtimestamp(f.clock + 1.5, UTC).isoformat()}, worker="w1")
    f.clock += 10
    for name in "pqr":
        f.call("create_task", "ada", {"task_id": name, "status": "queued"}, priority=2)
        f.receipt(f"{name}-1", "task.assigned", name, "ada", "eve")
        f.task(name, priority=2)
        f.end.obligations.add(f"{name}-1")
    f.receipt("p-2", "task.canceled", "p", "root", parents=("p-1",))
    f.receipt("p-3", "task.result_ready", "p", "asyncgate", "eve", parents=("p-2",))
    f.change("p", status="canceled", owed=False)
    f.end.obligations.remove("p-1")
    f.bulk("cancel", 1)
    for before, priority in ((2, 5), (5, 7)):
        f.event("q", "task.reprioritized", before=before, priority=priority, by={"kind": "human", "id": "root"})
        f.bulk("prioritize", 1)
    f.change("q", priority=7)
    f.event("r", "task.hold_released")
    f.bulk("release", 1)
    f.receipt("s-1", "task.assigned", "s", "ada", "eve", parents=("p-2",))
    f.task("s", terms='{"rerun_of":"p"}')
    f.end.obligations.add("s-1")
    f.event("p", "task.rerun", rerun_as="s", by={"kind": "human", "id": "root"})
    f.bulk("rerun", 1)


def leases_under(f: Forgery, to: str, **target: Any) -> None:
    """Pause something, and lease task r to a worker."""
    f.call("pause_work", "root", {"until": None}, **target)
    f.clock += 1
    f.receipt("r-2", "task.accepted", "r", to, lease="r-a", parents=("r-1",), fence=1)
    f.change("r", status="leased", fence=1, requirements='{"capabilities":["gpu"]}')
    f.lease("r", "r-a", 1, "live")


def leases_what_is_paused(f: Forgery) -> None:
    leases_under(f, "w1", type="demo")


def leases_a_paused_lane(f: Forgery) -> None:
    leases_under(f, "w1", type="demo", capabilities=["gpu"])


def leases_to_a_paused_worker(f: Forgery) -> None:
    leases_under(f, "w1", worker="w1")


def leases_in_a_paused_tenant(f: Forgery) -> None:
    leases_under(f, "w1", whole_tenant=True)


def asks_beside(f: Forgery, name: str) -> None:
    """Ask something under a lease that is kept."""
    f.call("request_input", "w1", {"receipt_id": f"{name}-2b"}, task_id=name, lease_id=f"{name}-a", key="k")
    f.receipt(f"{name}-2b", "input.requested", name, "w1", "boss", f"{name}-a", (f"{name}-2",), key="k",
              lease_ended=False)


def is_answered(f: Forgery, name: str, receipt_id: str) -> None:
    f.call("answer_input", "root", {"receipt_id": receipt_id, "action": "accept"}, task_id=name, key="k")
    f.receipt(receipt_id, "input.answered", name, "root", parents=(f"{name}-2b",), key="k", action="accept",
              in_place_of={"kind": "agent", "id": "boss"})


def parks(f: Forgery, again_at: float, parks: int = 1, asked: bool = False) -> None:
    """Park task v for a minute, and lease it again."""
    moment = datetime.fromtimestamp(f.clock + 60, UTC).isoformat()
    if asked:
        asks_beside(f, "v")
    f.receipt("v-3", "lease.expired", "v", "asyncgate", "eve", lease="v-a", parents=("v-2",), reason="parked",
              parked_until=moment, parks=parks)
    f.clock += again_at
    if asked:
        is_answered(f, "v", "v-3b")
    f.receipt("v-4", "task.accepted", "v", "w1", lease="v-b", parents=("v-1",), fence=2)
    f.change("v", fence=2)
    f.lease("v", "v-b", 2, "live")


def family(f: Forgery, early: bool = False, counts: str = '{"canceled":1,"told":1}', held: bool = False,
           asked: bool = False) -> None:
    """Task y waits for its child z, which is canceled, and is leased again."""
    f.call("create_task", "ada", {"task_id": "y", "status": "queued"})
    f.receipt("y-1", "task.assigned", "y", "ada", "ada")
    f.call("lease_next", "w1", {"tasks": [offer("y", "y-a", 1, f.clock + 60)]})
    f.receipt("y-2", "task.accepted", "y", "w1", lease="y-a", parents=("y-1",), fence=1)
    f.call("create_task", "ada", {"task_id": "z", "status": "queued"})
    f.receipt("y-3", "task.assigned", "z", "ada", "ada")
    if asked:
        asks_beside(f, "y")
    f.receipt("y-4", "lease.expired", "y", "asyncgate", "ada", lease="y-a", parents=("y-2",), reason="parked", parks=1,
              until_children="all")
    if asked:
        is_answered(f, "y", "y-4b")
    f.call("cancel_task", "ada", {"ok": True, "status": "canceled"}, task_id="z")
    f.receipt("y-6", "task.canceled", "z", "ada", parents=("y-3",))
    f.receipt("y-7", "task.result_ready", "z", "asyncgate", "ada", parents=("y-6",))
    f.task("z", status="canceled", owed=False, parent_task_id="y", duty="y-3")
    f.lease("y", "y-a", 1, "released")
    f.task("y", fence=1, held="children_open")
    if not held:
        f.receipt("y-5" if early else "y-8", "task.accepted", "y", "w1", lease="y-b", parents=("y-1",), fence=2)
        f.lease("y", "y-b", 2, "live")
        f.change("y", fence=2, held=None, status="leased")
    f.end.obligations.add("y-1")
    f.end.progress["y"] = Progress("y", "null", 3, 1, 0.0, 1, family=counts)


def output(f: Forgery, *, places: tuple[int, ...] = (1, 2, 3), chunks: tuple[str, ...] = ("one", "two"),
           digest: str | None = None, first: int = 0) -> None:
    """Task v gives two chunks, and its worker is told so."""
    entries, state = [], None
    for place, chunk in zip(places, (None, *chunks), strict=False):
        content = "{}" if chunk is None else json.dumps(chunk)
        entries.append(OutputEntry("v", f"{place:010d}", "state" if chunk is None else "chunk", content, 1, 0.0))
        if chunk is not None:
            state = sha256(state, place, hashlib.sha256(content.encode()).hexdigest())
    f.call("append_output", "w1", {"offset": 3, "chunks": first + 2}, task_id="v", lease_id="v-a",
           chunks=["one", "two"])
    f.end.outputs["v"] = entries
    f.end.progress["v"] = Progress("v", "null", 0, 0, 0.0, 0, outputs=len(entries), chunks=len(chunks),
                                   output_sha256=digest or state)


def leaves_a_gap_in_an_output(f: Forgery) -> None:
    output(f, places=(1, 2, 4))


def loses_a_chunk(f: Forgery) -> None:
    output(f, chunks=("one",))


def stores_chunks_twice(f: Forgery) -> None:
    output(f, places=(1, 2, 3, 4, 5), chunks=("one", "two", "one", "two"), first=2)


def changes_a_chunk_behind_its_hash(f: Forgery) -> None:
    output(f, digest="of something else")


def leaves_a_descendant_open(f: Forgery) -> None:
    f.call("cancel_task", "ada", {"ok": True, "status": "canceled", "descendants": 0}, task_id="u", cascade=True)
    f.change("v", parent_task_id="u")
    f.end.progress["u"] = Progress("u", "null", 0, 0, 0.0, 0, family='{"open":1}')


def lets_a_parent_wait_for_what_has_ended(f: Forgery) -> None:
    family(f, held=True)


def leases_a_parent_before_its_child_has_ended(f: Forgery) -> None:
    family(f, early=True)


def forgets_the_end_of_a_child(f: Forgery) -> None:
    family(f, counts='{"open":1}')


def tells_another_end_of_a_child(f: Forgery) -> None:
    family(f, counts='{"failed":1}')


def leases_what_is_parked(f: Forgery) -> None:
    parks(f, again_at=59)


def counts_a_park_twice(f: Forgery) -> None:
    parks(f, again_at=61, parks=2)


def records(f: Forgery, kept: str = "1", place: int = 1, told: int = 1) -> None:
    """Record a step of task t, which was completed."""
    f.call("record_step", "w1", {"seq": 1, "name": "half", "steps": 1}, task_id="t", lease_id="t-b", seq=1, name="half",
           value=1)
    digest = sha256(None, 1, "half", hashlib.sha256(b"1").hexdigest())
    f.end.steps["t"] = {1: RecordedStep("t", f"{1:010d}", "half", kept, place, 2, f.clock, digest)}
    f.end.receipts["t-5"] = replace(f.end.receipts["t-5"], body=msgspec.json.encode(
        {"steps": told, "steps_sha256": digest}).decode())


def keeps_another_value_of_a_step(f: Forgery) -> None:
    records(f, kept="2")


def loses_a_step(f: Forgery) -> None:
    records(f)
    f.end.steps.clear()


def tells_of_more_steps_than_there_are(f: Forgery) -> None:
    records(f, told=2)


def does_less_than_a_bulk_says(f: Forgery) -> None:
    f.bulk("prioritize", 1)


def does_a_step_of_a_bulk_twice(f: Forgery) -> None:
    f.event("r", "task.hold_released")


def runs_a_task_again_twice_in_bulk(f: Forgery) -> None:
    f.receipt("x-1", "task.assigned", "x", "ada", "eve", parents=("p-2",))
    f.task("x", terms='{"rerun_of":"p"}')
    f.end.obligations.add("x-1")
    f.event("p", "task.rerun", rerun_as="x", by={"kind": "human", "id": "root"})
    f.bulk("rerun", 1)


def loses_what_a_bulk_did(f: Forgery) -> None:
    f.call("run_bulk", "root", {"bulk_id": "bulk 0", "done": 2, "ended": False}, confirmation="bulk 0")


def loses_a_bulk(f: Forgery) -> None:
    f.call("run_bulk", "root", {"bulk_id": "unheard of", "done": 0, "ended": False}, confirmation="")


def goes_on_after_its_end(f: Forgery) -> None:
    f.call("run_bulk", "root", {"bulk_id": "bulk 0", "done": 0, "ended": False}, confirmation="bulk 0")


def changes_a_priority_untold(f: Forgery) -> None:
    f.change("r", priority=9)


def tells_of_another_priority(f: Forgery) -> None:
    f.event("r", "task.reprioritized", before=4, priority=2, by={"kind": "human", "id": "somebody"})


def loses_a_task(f: Forgery) -> None:
    f.call("create_task", "ada", {"task_id": "x", "status": "queued"})


def runs_again_what_it_does_not_link(f: Forgery) -> None:
    f.end.receipts["w-1"] = replace(f.end.receipts["w-1"], parents=("u-3",))


def runs_something_else_again(f: Forgery) -> None:
    f.change("w", payload="2")


def tells_nobody_that_it_ran_again(f: Forgery) -> None:
    f.end.events.pop()


def forgets_what_it_ran_again(f: Forgery) -> None:
    f.change("w", terms="{}")
    f.end.events.pop()


def forgets_a_retried_failure(f: Forgery) -> None:
    f.call("fail", "w1", {"ok": True, "status": "queued", "requeued": True}, task_id="v", lease_id="v-a")


def leases_twice(f: Forgery) -> None:
    f.call("lease_next", "w2", {"tasks": [offer("v", "v-b", 2, f.clock + 60)]})
    f.receipt("v-3", "lease.expired", "v", "asyncgate", "eve", lease="v-a", parents=("v-2",))
    f.receipt("v-4", "task.accepted", "v", "w2", lease="v-b", parents=("v-1",), fence=2)
    f.change("v", fence=2)
    f.lease("v", "v-b", 2, "live")


def keeps_a_lease_of_a_finished_task(f: Forgery) -> None:
    f.end.leases["t"] = replace(f.end.leases["t"], lease_id="t-b", ending="live")
    f.change("t", fence=2)
    f.end.receipts["t-3"] = replace(f.end.receipts["t-3"], receipt_type="system.anomaly")


def skips_a_fence(f: Forgery) -> None:
    f.end.receipts["v-2"] = replace(f.end.receipts["v-2"], body='{"fence":2}')


def skips_fences_at_no_move(f: Forgery) -> None:
    f.moved("v")
    f.end.receipts["v-2"] = replace(f.end.receipts["v-2"], body='{"fence":701}')


def gives_a_fence_twice(f: Forgery) -> None:
    f.calls[2] = replace(f.calls[2], reply={"tasks": [offer("t", "t-a", 2, f.calls[2].ended)]})


def lets_a_stranger_start(f: Forgery) -> None:
    f.call("start_task", "w2", {"ok": True}, task_id="v", lease_id="v-a")


def takes_a_stranger_s_completion(f: Forgery) -> None:
    f.end.receipts["t-5"] = replace(f.end.receipts["t-5"], from_id="w2")


def renews_an_expired_lease(f: Forgery) -> None:
    f.clock += 100
    f.call("renew_lease", "w1", {"expires_at": offer("", "", 0, f.clock + 9)["expires_at"]}, task_id="v",
           lease_id="v-a", extend_by_seconds=9)
    f.call("renew_lease", "w2", None, task_id="t", lease_id="t-a", extend_by_seconds=9)


def completes_under_an_expired_lease(f: Forgery) -> None:
    f.end.receipts["t-5"] = replace(f.end.receipts["t-5"], lease_id="t-a", from_id="w2")
    f.end.receipts["t-3"] = replace(f.end.receipts["t-3"], lease_id="t-a")


def spends_an_attempt_on_an_expiry(f: Forgery) -> None:
    f.change("t", attempt=1)


def forgets_the_end(f: Forgery) -> None:
    f.call("get_task", "ada", {"task_id": "t", "status": "queued"}, task_id="t")


def writes_a_receipt_too_many(f: Forgery) -> None:
    f.receipt("t-7", "task.result_ready", "t", "asyncgate", "eve", parents=("t-5",))


def escalates_twice(f: Forgery) -> None:
    for name in ("t-7", "t-8"):
        f.receipt(name, "task.escalated", "t", "asyncgate", "eve", lease="t-a", parents=("t-1",))


def escalates_without_a_cause(f: Forgery) -> None:
    f.receipt("v-3", "task.escalated", "v", "asyncgate", "eve", lease="v-a", parents=("v-1",))


def escalates_beside_the_duty(f: Forgery) -> None:
    f.receipt("t-7", "task.escalated", "t", "asyncgate", "eve", lease="t-a", parents=("t-2",))


def writes_a_receipt_too_few(f: Forgery) -> None:
    del f.end.receipts["u-5"]


def leaves_an_obligation_open(f: Forgery) -> None:
    f.end.obligations.add("u-1")
    f.change("u", owed=True)


def denies_what_it_owes(f: Forgery) -> None:
    f.change("v", owed=False)


def makes_two_tasks_of_one_key(f: Forgery) -> None:
    f.call("create_task", "ada", {"task_id": "v", "status": "queued"}, idempotency_key="k")


def stores_one_key_twice(f: Forgery) -> None:
    f.change("v", idempotency_key="k")


def shows_another_tenant_s_task(f: Forgery) -> None:
    f.final[THERE].tasks["foreign"] = f.end.tasks["v"]
    f.final[THERE] = Stored(receipts={"foreign": replace(f.end.receipts["t-2"], receipt_id="foreign", task_id="")})
    f.call("lease_next", "w2", {"tasks": [], "seen": "foreign"})


def links_to_another_tenant_s_receipt(f: Forgery) -> None:
    f.final[THERE] = Stored(receipts={"foreign": replace(f.end.receipts["t-2"], receipt_id="foreign", task_id="")})
    f.end.receipts["v-2"] = replace(f.end.receipts["v-2"], parents=("foreign", "v-1"))


def shows_a_receipt_twice(f: Forgery) -> None:
    f.call("list_receipts", "ada", {"receipts": [{"receipt_id": "u-1"}]})


def skips_a_receipt(f: Forgery) -> None:
    f.call("list_receipts", "ada", {"receipts": [{"receipt_id": "v-1"}]})


def turns_a_claim_around(f: Forgery) -> None:
    f.call("lease_next", "w1", {"tasks": [offer("v", "v-a", 1, f.clock + 60), offer("t", "t-b", 2, f.clock + 60)]},
           claim_id="again")


def gives_a_task_another_key(f: Forgery) -> None:
    f.change("v", idempotency_key="somebody else's")


def creates_what_nobody_asked_for(f: Forgery) -> None:
    f.calls = [call for call in f.calls
               if call.reply != {"task_id": "v", "status": "queued"} and call.operation != "rerun_task"]


def loses_a_renewal(f: Forgery) -> None:
    f.call("renew_lease", "w1", {"expires_at": datetime.fromtimestamp(f.clock + 60, UTC).isoformat()}, task_id="v",
           lease_id="v-a", extend_by_seconds=60)
    f.end.leases["v"] = replace(f.end.leases["v"], expires_at=f.clock)


FORGERIES: list[tuple[str, Callable[[Forgery], None]]] = [
    ("I1", loses_a_task), ("I1", forgets_a_retried_failure), ("I2", leases_twice), ("I3", skips_a_fence),
    ("I3", skips_fences_at_no_move),
    ("I3", gives_a_fence_twice), ("I4", lets_a_stranger_start), ("I4", takes_a_stranger_s_completion),
    ("I5", renews_an_expired_lease), ("I5", completes_under_an_expired_lease), ("I6", spends_an_attempt_on_an_expiry),
    ("I2", keeps_a_lease_of_a_finished_task), ("I7", forgets_the_end), ("I8", writes_a_receipt_too_many),
    ("I8", writes_a_receipt_too_few), ("I8", escalates_twice), ("I8", escalates_without_a_cause),
    ("RERUNS", runs_again_what_it_does_not_link), ("RERUNS", runs_something_else_again),
    ("RERUNS", tells_nobody_that_it_ran_again), ("RERUNS", forgets_what_it_ran_again),
    ("I8", escalates_beside_the_duty), ("I9", leaves_an_obligation_open), ("I9", denies_what_it_owes),
    ("I10", makes_two_tasks_of_one_key), ("I10", stores_one_key_twice), ("I11", shows_another_tenant_s_task),
    ("I11", links_to_another_tenant_s_receipt), ("I12", shows_a_receipt_twice), ("I12", skips_a_receipt),
    ("ORDER", turns_a_claim_around), ("PARKS", leases_what_is_parked), ("PARKS", counts_a_park_twice),
    ("OUTPUTS", leaves_a_gap_in_an_output), ("OUTPUTS", loses_a_chunk), ("OUTPUTS", stores_chunks_twice),
    ("OUTPUTS", changes_a_chunk_behind_its_hash), ("CASCADES", leaves_a_descendant_open),
    ("FAMILIES", lets_a_parent_wait_for_what_has_ended), ("FAMILIES", leases_a_parent_before_its_child_has_ended),
    ("FAMILIES", forgets_the_end_of_a_child), ("FAMILIES", tells_another_end_of_a_child),
    ("STEPS", keeps_another_value_of_a_step), ("STEPS", loses_a_step), ("STEPS", tells_of_more_steps_than_there_are),
    ("PAUSES", leases_what_is_paused), ("PAUSES", leases_a_paused_lane),
    ("PAUSES", leases_to_a_paused_worker), ("PAUSES", leases_in_a_paused_tenant),
    ("BULKS", does_less_than_a_bulk_says), ("BULKS", does_a_step_of_a_bulk_twice),
    ("BULKS", runs_a_task_again_twice_in_bulk), ("BULKS", loses_what_a_bulk_did), ("BULKS", loses_a_bulk),
    ("BULKS", goes_on_after_its_end), ("PRIORITIES", changes_a_priority_untold),
    ("PRIORITIES", tells_of_another_priority), ("ANSWERS", answers_what_it_was_not_asked),
    ("ANSWERS", answers_for_somebody_else), ("ANSWERS", answers_itself), ("QUESTIONS", answers_twice),
    ("QUESTIONS", answers_before_the_question), ("QUESTIONS", answers_no_question),
    ("QUESTIONS", asks_twice_under_one_key), ("I4", asks_without_the_lease), ("ANSWERS", loses_a_question),
    ("ANSWERS", loses_an_answer), ("ANSWERS", changes_an_answer), ("ANSWERS", hands_on_an_answer_that_nobody_gave),
    ("QUESTIONS", leases_what_waits_for_an_answer), ("QUESTIONS", waits_for_nothing),
    ("QUESTIONS", ends_with_an_open_question), ("I4", gives_up_without_an_expiry),
    ("I9", leaves_an_answered_question_open), ("I8", ends_a_lease_that_it_says_is_kept),
    ("CREATIONS", gives_a_task_another_key), ("CREATIONS", creates_what_nobody_asked_for), ("I1", loses_a_renewal)]
PASSING: list[dict[str, Any]] = [
    {"type": "other"}, {"type": "demo", "capabilities": []}, {"type": "demo", "capabilities": ["cpu", "gpu"]},
    {"worker": "w2"}]


def test_a_true_history_passes() -> None:
    f = truth()

    assert violations(f.calls, f.final) == []


@pytest.mark.parametrize("target", PASSING)
def test_a_pause_of_something_else_is_none_of_its_business(target: dict[str, Any]) -> None:
    f = truth()
    leases_under(f, "w1", **target)

    assert violations(f.calls, f.final) == []


@pytest.mark.parametrize("reply", [{"resumed": True}, None], ids=["answered", "unanswered"])
def test_a_lease_after_a_resume_that_may_have_been_carried_out_is_allowed(reply: Any) -> None:
    f = truth()
    f.call("pause_work", "root", {"until": None}, worker="w1")
    f.call("resume_work", "root", reply, worker="w1")
    leases_under(f, "w1", worker="w2")

    assert violations(f.calls, f.final) == []


def test_a_recorded_step_and_a_park_are_part_of_a_true_history() -> None:
    f = truth()
    records(f)
    parks(f, again_at=61)

    assert violations(f.calls, f.final) == []


def test_a_parent_that_is_leased_after_the_end_of_its_child_is_part_of_a_true_history() -> None:
    f = truth()
    family(f)

    assert violations(f.calls, f.final) == []


def test_an_answer_that_ends_a_park_or_a_wait_for_children_is_part_of_a_true_history() -> None:
    f = truth()
    parks(f, again_at=5, asked=True)
    family(f, early=True, asked=True)

    assert violations(f.calls, f.final) == []


def test_output_in_one_order_is_part_of_a_true_history() -> None:
    f = truth()
    output(f)

    assert violations(f.calls, f.final) == []


def test_an_escalation_of_a_lost_lease_is_part_of_a_true_history() -> None:
    f = truth()
    f.receipt("t-7", "task.escalated", "t", "asyncgate", "eve", lease="t-a", parents=("t-1",))

    assert violations(f.calls, f.final) == []


def test_a_lease_that_was_renewed_and_then_prolonged_by_a_gate_that_starts_is_alive() -> None:
    f = truth()
    f.call("renew_lease", "w1", {"expires_at": offer("", "", 0, f.clock + 3)["expires_at"]}, task_id="v",
           lease_id="v-a", extend_by_seconds=2)
    f.clock += 50
    f.event("v", "lease.prolonged", lease_id="v-a", expires_at=offer("", "", 0, f.clock + 9)["expires_at"])
    f.call("renew_lease", "w1", {"expires_at": offer("", "", 0, f.clock + 9)["expires_at"]}, task_id="v",
           lease_id="v-a", extend_by_seconds=9)

    assert violations(f.calls, f.final) == []


@pytest.mark.parametrize("again", [False, True], ids=["under its lease", "under the next one"])
def test_a_task_that_moved_twice_goes_on(again: bool) -> None:
    f = truth()
    f.moved("v")
    f.moved("v")
    if again:
        f.receipt("v-3", "lease.expired", "v", "asyncgate", "eve", lease="v-a", parents=("v-2",))
        f.receipt("v-4", "task.accepted", "v", "w2", lease="v-b", parents=("v-1",), fence=2002)
        f.change("v", fence=2002)
        f.lease("v", "v-b", 2002, "live")

    assert violations(f.calls, f.final) == []


@pytest.mark.parametrize(("broken", "forge"), FORGERIES, ids=[forge.__name__ for _, forge in FORGERIES])
def test_each_broken_invariant_is_found_and_no_other(broken: str, forge: Callable[[Forgery], None]) -> None:
    f = truth()
    forge(f)

    reported = violations(f.calls, f.final)

    assert reported != []
    assert {violation.partition(":")[0] for violation in reported} == {broken}, reported


@pytest.mark.parametrize("done", [True, False], ids=["carried out", "lost"])
def test_an_unanswered_completion_may_have_been_carried_out_or_not(done: bool) -> None:
    f = truth()
    answered = next(call for call in f.calls if call.operation == "complete" and call.reply)
    f.calls = [call for call in f.calls if call is not answered and call.operation not in ("get_task", "list_receipts")]
    if not done:
        del f.end.receipts["t-5"], f.end.receipts["t-6"]
        f.change("t", status="leased", owed=True)
        f.lease("t", "t-b", 2, "live")
        f.end.obligations.add("t-1")

    assert violations(f.calls, f.final) == []


def test_the_checker_does_not_change_what_it_checks() -> None:
    f = truth()
    before = deepcopy(f.calls)

    violations(f.calls, f.final)

    assert f.calls == before


def test_gates_that_know_the_time_to_some_milliseconds_lease_nothing_too_early() -> None:
    f = truth()
    parks(f, again_at=59.998)

    assert [text for text in violations(f.calls, f.final) if text.startswith("PARKS")] == []


def limited(most: int, *, key: str = "", other: str = "", holds: bool = True, between: bool = False,
            error: str | None = None, tried: bool = False) -> list[str]:
    """Judge two leases of tasks with one limit that live at once, or one after the other."""
    f = Forgery()
    if tried:       # and perhaps granted before there was a limit: the answer was lost
        f.call("lease_next", "w1", claim_id="c-u")
    terms: dict[str, Any] = {"concurrency_per_key" if key else "concurrency_total": most}
    f.call("set_limit", "root", {}, name="openai", **terms)
    for name, of in (("t", key), ("u", other)):
        f.call("create_task", "ada", {"task_id": name, "status": "queued"})
        f.receipt(f"{name}-1", "task.assigned", name, "ada", "ada")
        f.end.obligations.add(f"{name}-1")
        f.call("lease_next", "w1", {"tasks": [offer(name, f"{name}-a", 1, f.clock + 600)]}, claim_id=f"c-{name}")
        f.receipt(f"{name}-2", "task.accepted", name, "w1", lease=f"{name}-a", parents=(f"{name}-1",), fence=1)
        f.task(name, status="leased", fence=1, limits=f'{{"openai":"{of}"}}')
        f.lease(name, f"{name}-a", 1, "live")
        f.end.holds |= {("openai", of, name)} if holds else set()
        if between:
            f.call("set_limit", "root", None if error else {}, error, name="openai", concurrency_total=9)
    return [violation for violation in violations(f.calls, f.final) if violation.startswith("LIMITS")]


def test_leases_beyond_a_limit_and_slots_that_leak_are_found() -> None:
    assert limited(2) == []
    assert [text for text in limited(1) if "allows 1" in text]
    assert [text for text in limited(1, key="a", other="a") if "allows 1" in text]
    assert limited(1, key="a", other="b") == []
    assert limited(1, tried=True) == []
    assert limited(1, between=True) == []       # it was set again meanwhile
    assert limited(1, between=True, error="database_unavailable") == []     # or may have been
    assert [text for text in limited(1, between=True, error="forbidden") if "allows 1" in text]
    assert [text for text in limited(2, holds=False) if "counts against" in text]


def keyed(forge: Callable[[Forgery], None] = lambda f: None, begun: bool = True, **unique: Any) -> list[str]:
    """Judge two tasks under one key: the second one waits for the end of the first, and is leased then."""
    f = Forgery()
    for name, number in (("t", 1), ("u", 3)):
        f.receipt(f"-m{number}", "task.assigned", name, "ada", "ada", payload_sha256=HASHED[0])
        f.task(name, payload="0", terms=msgspec.json.encode({"unique": {
            "key": "k", "on_conflict": "keep_latest", **unique}}).decode())
    if begun:
        f.receipt("-m2", "task.accepted", "t", "w1", lease="t-a", fence=1)
    f.receipt("-m4", "task.completed", "t", "w1", lease="t-a")
    f.receipt("-m5", "task.accepted", "u", "w1", lease="u-a", fence=1)
    f.change("t", status="succeeded")
    f.change("u", status="leased")
    forge(f)
    f.end.receipts = dict(sorted(f.end.receipts.items()))
    return [text for text in violations(f.calls, f.final) if text.startswith("UNIQUE")]


HASHED = [hashlib.sha256(text).hexdigest() for text in (b"0", b"1")]


def leased_before_the_end(f: Forgery) -> None:
    f.receipt("-m3a", "task.accepted", "u", "w1", lease="u-a", fence=1)


def never_ended(f: Forgery) -> None:
    del f.end.receipts["-m4"]
    f.change("t", status="leased")


def superseded(f: Forgery, by: str = "ada", new: str = "u", at: str = "-m2a", told: str = "t") -> None:
    del f.end.receipts["-m4"]
    f.receipt(at, "task.canceled", "t", by, superseded_by=new)
    f.change("t", status="canceled")
    f.change("u", terms=msgspec.json.encode({"supersedes": told, "unique": {
        "key": "k", "on_conflict": "supersede"}}).decode())
    f.end.progress["t"] = Progress("t", "null", 1, 0, 0.0, successor="u")


def amended(f: Forgery, before: int = 0, after: int = 1, now: str = "1", at: str = "-m3b") -> None:
    f.receipt(at, "task.amended", "u", "ada", payload_sha256=HASHED[after], payload_sha256_before=HASHED[before])
    f.change("u", payload=now)


def taken_over(f: Forgery, on_conflict: str = "supersede", end: str = "-m6") -> None:
    """Have the second task begin while the first one, which has ended, still holds the key; and then a third one."""
    del f.end.receipts["-m3"]
    f.receipt("-m4a", "task.assigned", "u", "ada", "ada", payload_sha256=HASHED[0])
    f.change("t", terms=msgspec.json.encode({"unique": {"key": "k", "while": 60, "on_conflict": "return"}}).decode())
    f.change("u", status="succeeded", terms=msgspec.json.encode({"unique": {
        "key": "k", "on_conflict": on_conflict}}).decode())
    f.receipt(end, "task.completed", "u", "w1", lease="u-a")
    f.receipt("-m7", "task.assigned", "v", "ada", "ada", payload_sha256=HASHED[0])
    f.task("v", payload="0", terms=msgspec.json.encode({"unique": {"key": "k", "on_conflict": "return"}}).decode())


def sent_before(f: Forgery, ended_at: float = 1001.0) -> None:
    """Have a strict gate send the creation of the second task, and commit it at 1001; the first one ends at a time."""
    del f.end.receipts["-m4"]
    f.clock = ended_at
    f.receipt(f"{first_id(ended_at)}a", "task.completed", "t", "w1", lease="t-a")
    f.change("u", created_at=1001.0, terms=msgspec.json.encode({"unique": {
        "key": "k", "on_conflict": "refuse"}}).decode())


def waits_for_nothing_with_its_key(f: Forgery) -> None:
    del f.end.receipts["-m5"]
    f.change("u", status="queued", held="key_taken")


def test_what_waits_supersedes_or_replaces_as_it_says_is_part_of_a_true_history() -> None:
    assert keyed() == []
    until_its_lease: dict[str, Any] = {"while": "queued", "on_conflict": "return"}
    assert keyed(never_ended, **until_its_lease) == []
    assert keyed(superseded) == []
    assert keyed(amended) == []
    assert keyed(taken_over) == []
    assert keyed(lambda f: taken_over(f, on_conflict="keep_latest")) == []
    assert keyed(sent_before) == []     # the first one ends in the batch that commits the second


@pytest.mark.parametrize(("forge", "unique"), [
    (lambda f: None, {"on_conflict": "return"}), (lambda f: None, {"begun": False}), (never_ended, {}),
    (leased_before_the_end, {}), (lambda f: None, {"while": 60, "on_conflict": "return"}),
    (lambda f: superseded(f, by="eve"), {}), (lambda f: superseded(f, new="v"), {}),
    (lambda f: superseded(f, at="-m3b"), {}), (lambda f: superseded(f, told="u"), {}),
    (lambda f: amended(f, before=1), {}), (lambda f: amended(f, now="0"), {}), (lambda f: amended(f, at="-m6"), {}),
    (lambda f: taken_over(f, on_conflict="return"), {}), (lambda f: taken_over(f, end="-m8"), {}),
    (waits_for_nothing_with_its_key, {}), (lambda f: sent_before(f, ended_at=1001.5), {})])
def test_a_key_held_twice_and_what_was_not_superseded_or_replaced_as_told_are_found(
        forge: Callable[[Forgery], None], unique: dict[str, Any]) -> None:
    assert keyed(forge, **unique)
