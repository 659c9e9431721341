"""explain_task: why a task is not done, from stored facts, with the evidence and the next legal call.

`read_facts` reads what may matter, each with a bounded query.  Each function of CAUSES takes these facts and returns
its cause if it applies; the first that applies is the answer, the others are told too.  A new cause is its name in
`CauseName`, its function, and its place in CAUSES.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import CANCELED, CORE_OPERATIONS, EXPIRED, FAILED, Caller, Engine, Operation, forbid, matches
from asyncgate.parts.identity import admin
from asyncgate.parts.identity.quotas import Quotas
from asyncgate.parts.model import errors, queries, stored, stored_unique, wire, wire_workers, words
from asyncgate.parts.model.content import decode_json, needs_of
from asyncgate.parts.model.families import count_children, read_family
from asyncgate.parts.model.naming import find_context
from asyncgate.parts.model.overdue import alive, has_passed, is_lost
from asyncgate.parts.model.parking import PARKS_LIMIT
from asyncgate.parts.model.pausing import Pause, find_pauses
from asyncgate.parts.model.quotas import RECEIPTS_QUOTA, find_allowance
from asyncgate.parts.model.unique import find_unique, name_key
from asyncgate.parts.model.views import decode_terms, to_raw, to_utc, to_utc_or_none
from asyncgate.parts.operating import pausing, workers
from asyncgate.parts.operating.listing import LIST_TASKS
from asyncgate.parts.operating.pausing import describe_pause
from asyncgate.parts.operating.reached import Reached, find_reached
from asyncgate.parts.operating.waits import Usual, find_longest, read_usual
from asyncgate.parts.operating.workers import count_holdings, find_patience, find_silence
from asyncgate.parts.process.presence import decode_claims

MOST_AHEAD = 1000           # tasks before it that are counted
MOST_ASKED = 100            # workers looked at, the last that asked
MOST_HELD = 100             # leases of each that are counted
MOST_EVIDENCE = 5           # workers, and receipts, in one evidence
MOST_NAMED = 3              # workers in one sentence
MOST_SAID = 200             # letters of an error or a reason in a summary
MOST_REASON = 8_000         # and in its evidence; get_task has the whole error
WAIT_SECONDS = 30


Claimant = tuple[stored.Presence, list[stored.Claimed]]      # a worker, and its last claims
Able = tuple[stored.Presence, stored.Claimed]


class Facts(Struct, kw_only=True):
    """What is known when a task is explained; what cannot matter to it was not read."""

    task: stored.Task
    needed: frozenset[str]                      # capabilities that a worker needs
    now: float
    instance: str                               # the gate that answers
    grace: float                                # seconds that a lease lives on after its end
    patience: float                             # seconds after which a worker that has not asked again does not ask
    silence: float                              # seconds without a call after which a worker with leases is silent
    lease: stored.Lease | None = None                  # its latest
    progress: stored.Progress | None = None
    holder: stored.Presence | None = None              # who has the live lease
    owner: stored.Instance | None = None               # the gate that sweeps the task, if it is another one
    swept: dict[str, Any] = {}                  # how this gate's last sweep went
    account: stored.Account | None = None
    leases: int = 0                             # of the tenant, as far as they are counted
    most_leases: int = -1                       # that it may have; -1: any number
    ahead: int = 0
    limit: Reached | None = None                # what keeps it of its limits
    usual: Usual | None = None                  # how long others wait in its queue, which is served
    longest: float = 0.0                        # seconds after which its wait is too long
    keeper: str | None = None                   # the task for whose end it waits, which has its key
    asked: list[Claimant] = []                     # the last workers that asked, the latest first
    able: list[Able] = []                       # those of them that can do it, each with the claim that shows it
    resting: list[Able] = []                    # those that could, but are paused
    pauses: tuple[Pause, ...] = ()              # what is paused in the tenant
    holding: dict[tuple[str, str], int] = {}    # live leases of those who can do it
    unsent: list[stored.Outgoing] = []
    receipt: stored.Receipt | None = None              # how its last attempt failed, or who canceled it
    may: frozenset[str] = frozenset()           # operations that the caller may call
    answerable: list[stored.Question] = []      # open questions that the caller may answer

    @property
    def questions(self) -> list[stored.Question]:
        """Return the questions that nobody has answered."""
        return stored.list_open(stored.read_questions(self.progress))

    @property
    def waits(self) -> bool:
        """Whether the queue may offer the task now."""
        return self.task.claimable(self.now)

    @property
    def waits_since(self) -> float:
        """Return since when the queue may offer the task."""
        return max(self.task.updated_at, self.task.next_eligible_at or 0.0)

    @property
    def stopping(self) -> Pause | None:
        """Return the pause that keeps the task from everybody, or from all who could do it."""
        ids = {row.id for row, _ in self.resting if not (self.asking or self.busy)}
        lanes = (pause for pause in self.pauses if pause.stops_lane(self.task.type, self.needed))
        return next(lanes, next((pause for pause in self.pauses if pause.worker in ids), None))

    @property
    def asking(self) -> list[Able]:
        """Return those who can do the task and ask for work."""
        return [(row, claim) for row, claim in self.able if claim.asks(self.now - self.patience)]

    @property
    def busy(self) -> list[Able]:
        """Return those who can do the task and ask for nothing, because they work on what they hold."""
        return [holder for holder in self.holders if holder[0].last_seen_at > self.now - self.silence]

    @property
    def silent(self) -> list[Able]:
        """Return those who can do the task and hold leases, and of whom nothing is heard."""
        return [holder for holder in self.holders if holder[0].last_seen_at <= self.now - self.silence]

    @property
    def holders(self) -> list[Able]:
        """Return those who can do the task, ask for nothing, and hold leases."""
        return [(row, claim) for row, claim in self.able
                if not claim.asks(self.now - self.patience) and self.holding.get((row.kind, row.id))]

    def count_leases(self, workers: list[Able]) -> int:
        """Return how many leases workers have together."""
        return sum(self.holding[row.kind, row.id] for row, _ in workers)


# The causes.  Each is a pure function of the facts.


def explain_leased(at: Facts) -> wire_workers.Cause | None:
    """It is leased, and the lease lives."""
    if at.task.status not in stored.ACTIVE or at.lease is None or not alive(at.lease, at.now, at.grace):
        return None
    heard = last_heard(at, at.lease)
    began = "works on it" if at.task.status == "running" else "has leased it but has not said that it began"
    return make_cause(at, "leased", f"{at.lease.worker} {began}; its last sign of life came "
                      f"{words.say_length(at.now - heard)} ago, and its lease ends in "
                      f"{words.say_length(at.lease.expires_at - at.now)} unless it is renewed.",
                      wire_workers.Evidence(since=to_utc(heard), until=to_utc(at.lease.expires_at),
                                            lease_id=at.lease.lease_id,
                                            renewals=at.lease.renewals, attempt=at.task.attempt,
                                            max_attempts=at.task.max_attempts,
                                            workers=[wire_workers.WorkerFact(at.lease.worker,
                                                                             last_seen_at=to_utc(heard))]),
                      ("get_task", "wait until it ends; if the lease runs out, the task is offered to other workers"))


def last_heard(at: Facts, lease: stored.Lease) -> float:
    """Return the last sign of life of the worker that holds a lease."""
    signs = [lease.acquired_at, at.task.started_at or 0.0]
    if at.progress is not None and at.progress.fence == lease.fence:
        signs.append(at.progress.updated_at)
    if at.holder is not None:
        signs.append(at.holder.last_seen_at)
    return min(max(signs), at.now)


def explain_instance_gone(at: Facts) -> wire_workers.Cause | None:
    """The gate that sweeps it does not live; another one does when the lease has ended."""
    if at.task.status not in stored.ACTIVE or at.lease is None or at.owner is None or at.owner.serves:
        return None
    until, beat = at.lease.expires_at + at.grace, at.owner.last_beat_at
    heard = "" if beat is None else f"; its last sign of life came {words.say_length(at.now - beat)} ago"
    when = f"in {words.say_length(until - at.now)}" if until > at.now else "with its next sweep"
    return make_cause(at, "instance_gone", f"Gate {at.owner.instance_id}, which looked after it, is gone{heard}; gate "
                      f"{at.instance} takes it over {when}.",
                      wire_workers.Evidence(since=to_utc_or_none(beat), until=to_utc(until),
                                            instance_id=at.owner.instance_id,
                                            last_beat_at=to_utc_or_none(beat)),
                      ("get_task", "wait; nothing has to be done"))


def explain_lease_overdue(at: Facts) -> wire_workers.Cause | None:
    """Its lease has run out, and nobody has taken it back."""
    if at.lease is None or not is_lost(at.task, at.lease, at.now, at.grace) or (at.owner and not at.owner.serves):
        return None
    who = at.owner.instance_id if at.owner else at.instance
    error = at.swept.get("last_error")
    return make_cause(at, "lease_overdue", f"The lease of {at.lease.worker} ended "
                      f"{words.say_length(at.now - at.lease.expires_at)} ago, and gate {who} has not taken the task "
                      "back yet"
                      f"{f': its last sweep failed ({error})' * bool(error)}.",
                      wire_workers.Evidence(since=to_utc(at.lease.expires_at), lease_id=at.lease.lease_id,
                                            instance_id=who,
                                            swept_at=at.swept.get("last_run_at"), sweep_error=error,
                                            workers=[wire_workers.WorkerFact(at.lease.worker)]),
                      ("get_task", "wait a minute; if nothing changes, an operator runs `asyncgate doctor`"))


def explain_input(at: Facts) -> wire_workers.Cause | None:
    """It waits for an answer."""
    if at.task.held != stored.INPUT_REQUIRED or not at.questions:
        return None
    first, others = (at.answerable or at.questions)[0], len(at.questions) - 1
    ends = "" if first.expires_at is None else f"; it expires in {words.say_length(first.expires_at - at.now)}"
    wait = f"wait until {first.to} answers, or end it: cancel_task"
    if has_passed(first.expires_at, at.now):
        ends, wait = "; its time is over", "wait: the gate is about to go on without the answer"
    more = f", and {words.say_count(others, 'other question')} of it {'is' if others == 1 else 'are'} open" if (
        others) else ""
    message = words.cut_line(first.message, MOST_SAID)
    return make_cause(at, "input_required", f"{first.asked_by} asked {first.to} "
                      f"{words.say_length(at.now - first.asked_at)} ago: \u201c{message}\u201d ({first.key}). Nobody "
                      f"has answered{ends}{more}.",
                      wire_workers.Evidence(since=to_utc(first.asked_at), until=to_utc_or_none(first.expires_at),
                                            held=at.task.held, by=first.asked_by,
                                            reason=first.message[:MOST_REASON], receipt_ids=[
                                                question.receipt_id for question in at.questions[:MOST_EVIDENCE]]),
                      ("answer_input", "answer it: accept with content, decline, or cancel"),
                      ("get_task", wait))


def explain_children(at: Facts) -> wire_workers.Cause | None:
    """It waits for its children."""
    if at.task.held != stored.CHILDREN_OPEN or (family := read_family(at.progress)) is None:
        return None
    counts = count_children(family)
    how = ", ".join(f"{number} {name}" for name, number in counts.items() if number and name != "open")
    until = "" if family.until == "all" else "the next end of one of "
    return make_cause(at, "children_open", f"It waits for {until}its children: {family.ended} of "
                      f"{family.open + family.ended} {'has' if family.ended == 1 else 'have'} ended"
                      f"{f' ({how})' * bool(how)}.",
                      wire_workers.Evidence(since=to_utc(at.task.updated_at), until=to_utc_or_none(
                          at.task.next_eligible_at), held=at.task.held, children=counts),
                      ("list_tasks", "see what keeps them; wait_tasks waits until they have ended"),
                      ("get_task", "wait until they have ended, or offer it to workers at once: release_hold"))


def explain_key(at: Facts) -> wire_workers.Cause | None:
    """It waits for the end of another task, which has its key."""
    if at.task.held != stored.KEY_TAKEN or at.keeper is None or (unique := find_unique(at.task)) is None:
        return None
    return make_cause(at, "key_taken", f"It waits for the end of task {at.keeper}, which has the key {unique.key}; a "
                      "newer request for this work would take its place.",
                      wire_workers.Evidence(since=to_utc(at.task.updated_at), held=at.task.held, unique_key=unique.key,
                                            holders=[at.keeper]),
                      ("get_task", f"wait; explain_task of {at.keeper} tells what keeps that, cancel_task ends either"))


def explain_hold(at: Facts) -> wire_workers.Cause | None:
    """It is on hold."""
    if at.task.status != "queued" or at.task.held is None or at.task.held in stored.AWAITING:
        return None
    lost_to, parks = sorted(set(decode_json(at.task.lost_to))), at.progress.parks if at.progress else 0
    why = {PARKS_LIMIT: f"it was parked {words.say_times(parks)}, which is the limit (max_parks)",
           "lease_expiries": f"{tell_losses(at.task.expiries, lost_to)}; its limit is {at.task.max_expiries}",
           "rebuilt": "the gate was rebuilt from its receipts, which have neither its payload nor what its workers had "
                      "recorded; release it only if it may begin without them",
           RECEIPTS_QUOTA: "it has as many receipts as its tenant's quota allows"}.get(at.task.held, at.task.held)
    return make_cause(at, "on_hold", f"It is on hold: {why}.",
                      wire_workers.Evidence(since=to_utc(at.task.updated_at), held=at.task.held,
                                            expiries=at.task.expiries,
                                            lost_to=lost_to),
                      ("release_hold", "offer it to workers again"),
                      ("get_task", "wait until its owner or an admin calls release_hold"))


def tell_losses(number: int, workers: list[str]) -> str:
    """Say who lost the lease of a task, and how often."""
    if len(workers) == 1:
        return f"{workers[0]} lost its lease {words.say_times(number)}"
    others = len(workers) - MOST_NAMED
    named = [*workers[:MOST_NAMED], *[f"{others} more"] * (others > 0)]
    return f"its lease was lost {words.say_times(number)}{f', by {words.say_list(named)}' if named else ''}"


def explain_pause(at: Facts) -> wire_workers.Cause | None:
    """Its type, its lane, the tenant, or each worker that could do it is paused."""
    if at.task.status != "queued" or at.task.held is not None or (pause := at.stopping) is None:
        return None
    return make_cause(at, "paused", f"{describe_pause(pause)}.",
                      wire_workers.Evidence(since=to_utc(pause.since), until=to_utc_or_none(pause.until),
                                            reason=pause.reason,
                                            by=wire.Principal(pause.by_kind, pause.by_id),
                                            workers=[show_asked(at, row, claim) for row, claim in at.resting] or None),
                      ("resume_work", "end the pause"), ("get_task", "wait until an admin ends the pause"))


def explain_suspension(at: Facts) -> wire_workers.Cause | None:
    """Its tenant is suspended."""
    if at.task.status != "queued" or at.account is None or at.account.suspended_at is None:
        return None
    return make_cause(at, "tenant_suspended", f"The tenant was suspended "
                      f"{words.say_length(at.now - at.account.suspended_at)} ago: none of its workers is let in.",
                      wire_workers.Evidence(since=to_utc(at.account.suspended_at)),
                      ("get_task", "wait until the operator ends the suspension: suspend_tenant with suspended: false"))


def explain_delay(at: Facts) -> wire_workers.Cause | None:
    """It was created to be offered later."""
    if not is_delayed(at) or at.lease is not None:
        return None
    return make_delay(at, "delay", "It was created with a delay; it is offered to workers")


def explain_backoff(at: Facts) -> wire_workers.Cause | None:
    """Its last attempt failed, and the next one has to wait."""
    if not is_delayed(at) or at.lease is None or at.lease.ending != "failed":
        return None
    error = read_body(at.receipt).get("error") if at.receipt and at.receipt.lease_id == at.lease.lease_id else None
    why = f": {words.cut_line(find_message(error), MOST_SAID)}" if error else ""
    return make_delay(at, "backoff", f"Attempt {at.task.attempt} of {at.task.max_attempts} failed{why}; it is offered "
                      "to workers again", find_message(error) if error else None)


def explain_park(at: Facts) -> wire_workers.Cause | None:
    """Its worker gave it back until a time."""
    if not is_delayed(at) or at.lease is None or at.lease.ending != "released":
        return None
    reason = read_body(at.receipt).get("why") if at.receipt and at.receipt.lease_id == at.lease.lease_id else None
    why = f": {words.cut_line(reason, MOST_SAID)}" if reason else ""
    until = f"{to_utc(at.task.next_eligible_at or at.now):%Y-%m-%d %H:%M:%S} UTC"
    return make_delay(at, "parked", f"{at.lease.worker} parked it until {until}{why}; it is offered to workers again",
                      reason)


def explain_jitter(at: Facts) -> wire_workers.Cause | None:
    """Its lease ran out together with others, which are offered again one after another."""
    if not is_delayed(at) or at.lease is None or at.lease.ending in ("failed", "released"):
        return None
    return make_delay(at, "jitter", "Its lease ran out together with many others, which come back one after another; "
                      "it is offered to workers again")


def is_delayed(at: Facts) -> bool:
    """Whether the time of a queued task has not come."""
    return at.task.status == "queued" and at.task.held is None and (at.task.next_eligible_at or 0.0) > at.now


def make_delay(at: Facts, name: wire_workers.CauseName, why: str, reason: str | None = None) -> wire_workers.Cause:
    """Make the cause of a task whose time has not come."""
    due = at.task.next_eligible_at or at.now
    return make_cause(at, name, f"{why} in {words.say_length(due - at.now)}.",
                      wire_workers.Evidence(since=to_utc(at.task.updated_at), until=to_utc(due),
                                            attempt=at.task.attempt,
                                            max_attempts=at.task.max_attempts, expiries=at.task.expiries,
                                            reason=reason and reason[:MOST_REASON]),
                      ("get_task", "wait until then"))


def explain_no_worker(at: Facts) -> wire_workers.Cause | None:
    """Nobody who can do it asks for work; those who hold leases, if any, give no sign of life."""
    if at.task.status != "queued" or at.task.held is not None or at.asking or at.busy or at.resting:
        return None
    missing = [] if at.able else find_missing(at)
    last_asked = at.able or [(row, claims[0]) for row, claims in at.asked]
    shown = [show_asked(at, row, claim) for row, claim in last_asked[:MOST_EVIDENCE]]
    return make_cause(at, "no_worker", tell_silence(at) if at.able else tell_missing(at, missing),
                      wire_workers.Evidence(since=to_utc(at.able[0][1].at) if at.able else None, type=at.task.type,
                                            needed=sorted(at.needed), missing=missing,
                                            searched=len(at.asked) if len(at.asked) >= MOST_ASKED else None,
                                            workers=shown),
                      ("list_workers", "see who asks, and what they offer; then start a worker that can take it"),
                      ("get_task", "wait until a worker that can take it asks, or end it: cancel_task"))


def name_able(at: Facts) -> str:
    """Say who is looked for, as the subject of a sentence."""
    needs = f", which requires {words.say_list(sorted(at.needed))}," if at.needed else ""
    return f"No worker that can take {at.task.type}{needs} has asked for work"


def tell_silence(at: Facts) -> str:
    """Say since when those who can do the task have not asked, and what they hold."""
    row, claim = at.able[0]
    leases = at.count_leases(at.silent)
    held = f"{words.say_count(leases, 'lease')} {'is' if leases == 1 else 'are'} without a sign of life"
    return (f"{name_able(at)} for {words.say_length(at.now - claim.at)}; "
            f"{held if leases else f'the last one was {name_worker(row)}'}.")


def find_missing(at: Facts) -> list[str]:
    """Return what the worker lacks that comes nearest: capabilities, or the type."""
    gaps = [[*[at.task.type] * (bool(claim.types) and at.task.type not in claim.types),
             *sorted(at.needed - set(claim.capabilities))] for _, claims in at.asked for claim in claims]
    return min(gaps, key=len, default=[])


def tell_missing(at: Facts, missing: list[str]) -> str:
    """Say what those who ask lack."""
    if not at.asked:
        return "No worker has asked for work yet."
    lacking = [name for name in missing if name in at.needed]
    verb = "is" if len(lacking) == 1 else "are"
    why = [*["those who ask take other types"] * (len(lacking) < len(missing)),
           *[f"{words.say_list(lacking)} {verb} missing"] * bool(lacking)]
    return f"{name_able(at)}: {', and '.join(why)}."


def explain_limit(at: Facts) -> wire_workers.Cause | None:
    """A limit that it names is reached."""
    if not at.waits or at.limit is None:
        return None
    why, of = at.limit.why, f"limit {at.limit.why.name}" + (f" (key {at.limit.why.key})" if at.limit.why.key else "")
    until = f" for {words.say_length(why.until - at.now)}" if why.until is not None else ""
    keeps = {"stopped": f"Its {of} is stopped{until}", "rate": f"Its {of} has used up its rate{until}"}.get(
        why.reason, f"Its {of} allows {words.say_count(int(why.most or 0), 'lease')} at once, and has them")
    before = f"; {words.say_count(at.ahead, 'task')} with the same keys {'is' if at.ahead == 1 else 'are'} before it"
    return make_cause(at, "limit_reached", f"{keeps}{before * bool(at.ahead)}.", wire_workers.Evidence(
        until=to_utc_or_none(why.until), in_use=at.limit.in_use, limit=None if why.most is None else int(why.most),
        limit_name=why.name, limit_key=why.key or None, reason=why.reason, ahead=at.ahead,
        holders=at.limit.holders or None),
        ("get_limit", "see who holds it; set_limit changes it"), ("get_task", "wait until it has room"))


def explain_quota(at: Facts) -> wire_workers.Cause | None:
    """Its tenant has as many leases as it may have."""
    if not at.waits or not 0 <= at.most_leases <= at.leases:
        return None
    return make_cause(at, "lease_quota", f"The tenant has {words.say_count(at.leases, 'lease')} and may have "
                      f"{at.most_leases:,} at once: its workers get more tasks when a lease ends.",
                      wire_workers.Evidence(in_use=at.leases, limit=at.most_leases),
                      ("get_limits", "see the limits; the operator can raise them with set_limits"),
                      ("get_task", "wait until a lease ends"))


def explain_busy(at: Facts) -> wire_workers.Cause | None:
    """All who can do it work on other tasks."""
    if not at.waits or at.asking or not (busy := at.busy):
        return None
    last, asked = max(row.last_seen_at for row, _ in busy), max(claim.at for _, claim in busy)
    are = "is" if len(busy) == 1 else "are"
    return make_cause(at, "workers_busy", f"{name_able(at)} for {words.say_length(at.now - asked)}: "
                      f"{words.say_count(len(busy), 'worker')} {are} busy with "
                      f"{words.say_count(at.count_leases(busy), 'lease')}; the last sign of life came "
                      f"{words.say_length(at.now - last)} ago.",
                      wire_workers.Evidence(since=to_utc(asked),
                                            workers=[show_asked(at, row, claim) for row,
                                                     claim in busy[:MOST_EVIDENCE]]),
                      ("list_workers", "see what they hold; start more workers to get more done at once"),
                      ("get_task", "wait until one of them is free"))


def explain_starvation(at: Facts) -> wire_workers.Cause | None:
    """It waits much longer than those that were leased from its queue in the last hour."""
    if not at.waits or at.usual is None or at.now - at.waits_since <= at.longest:
        return None
    others = words.say_count(at.usual.leased, "task")
    return make_cause(at, "waiting_too_long",
                      f"It has been waiting for {words.say_length(at.now - at.waits_since)}; the {others} leased from "
                      f"its queue in the last hour had waited for {words.say_length(at.usual.seconds)} on average.",
                      wire_workers.Evidence(since=to_utc(at.waits_since), ahead=at.ahead, type=at.task.type,
                                            usual_seconds=at.usual.seconds),
                      ("list_workers", "see who serves its queue; more workers or a higher priority help"),
                      ("get_task", "wait for its turn, or ask an admin to raise its priority"))


def explain_queue(at: Facts) -> wire_workers.Cause | None:
    """Other tasks come before it in its queue."""
    if not at.waits or not at.ahead:
        return None
    least = "at least " if at.ahead >= MOST_AHEAD else ""
    come = "comes" if at.ahead == 1 else "come"
    return make_cause(at, "behind",
                      f"{least}{words.say_count(at.ahead, 'task')} {come} before it in its queue, by priority "
                      "or age.",
                      wire_workers.Evidence(ahead=at.ahead, type=at.task.type, needed=sorted(at.needed),
                                            workers=[show_asked(at, row, claim) for row,
                                                     claim in at.able[:MOST_EVIDENCE]]),
                      ("get_task", "wait for its turn"))


def explain_claimable(at: Facts) -> wire_workers.Cause | None:
    """Nothing keeps it: the next claim of somebody who can do it gets it."""
    full = 0 <= at.most_leases <= at.leases
    suspended = at.account is not None and at.account.suspended_at is not None
    if not at.waits or at.ahead or full or suspended or at.stopping or at.limit or not at.asking:
        return None
    row, claim = at.asking[0]
    return make_cause(at, "claimable", f"Nothing keeps it: {name_worker(row)} can take it and asked for work "
                      f"{words.say_length(at.now - claim.at)} ago; the next such worker that asks gets it.",
                      wire_workers.Evidence(since=to_utc(at.waits_since),
                                            workers=[show_asked(at, row, claim) for row,
                                                     claim in at.asking[:MOST_EVIDENCE]]),
                      ("get_task", "wait until it ends"))


def explain_owed(at: Facts) -> wire_workers.Cause | None:
    """It has ended, and its obligation is still open."""
    if at.task.status not in stored.TERMINAL or not at.task.owed:
        return None
    return make_cause(at, "owed", "It succeeded but did not say where its result is, so the result is still owed "
                      "to its creator.",
                      wire_workers.Evidence(since=to_utc_or_none(at.task.completed_at), receipt_ids=[at.task.duty]),
                      ("attach_artifacts", "say where the result is: in artifacts or delivery_proof"),
                      ("get_task", "see it; its owner, its worker or an admin calls attach_artifacts"))


def explain_parked(at: Facts) -> wire_workers.Cause | None:
    """The ledger has refused a receipt of it."""
    if not (parked := [row for row in at.unsent if row.state == "parked"]):
        return None
    why = words.cut_line(parked[0].reason or "it gave no reason", MOST_SAID)
    return make_cause(at, "ledger_parked",
                      f"The ledger refused {words.say_count(len(parked), 'receipt')} of it: {why}. "
                      "What it refused is kept here until an operator offers it again.", tell_unsent(parked),
                      ("get_task_history", "see the receipts; an operator runs `asyncgate reconcile --repair`"))


def explain_waiting(at: Facts) -> wire_workers.Cause | None:
    """Receipts of it are on their way to the ledger."""
    if not (waiting := [row for row in at.unsent if row.state == "waiting"]):
        return None
    many, for_long = len(waiting) > 1, words.say_length(at.now - waiting[0].posted_at)
    last_answer = f"; its last answer: {words.cut_line(waiting[0].reason, MOST_SAID)}" if waiting[0].reason else ""
    been = "have been waiting for the ledger, the oldest" if many else "has been waiting for the ledger"
    return make_cause(at, "ledger_waiting",
                      f"{words.say_count(len(waiting), 'receipt')} of it {been} for {for_long}{last_answer}.",
                      tell_unsent(waiting),
                      ("get_task_history", "see the receipts; the gate sends them automatically"))


def tell_unsent(rows: list[stored.Outgoing]) -> wire_workers.Evidence:
    """Return the evidence of receipts that the ledger does not have."""
    return wire_workers.Evidence(since=to_utc(rows[0].posted_at),
                                 receipt_ids=[row.receipt_id for row in rows[:MOST_EVIDENCE]],
                                 reason=rows[0].reason, tries=rows[0].tries)


def explain_end(at: Facts) -> wire_workers.Cause | None:
    """It has ended, and nothing is owed: with success, in failure, or because somebody canceled it."""
    if at.task.status not in stored.TERMINAL or at.task.owed:
        return None
    ended = at.task.completed_at or at.task.updated_at
    ago, evidence = f"{words.say_length(at.now - ended)} ago", wire_workers.Evidence(since=to_utc(ended))
    if at.task.status == "failed":
        return tell_failure(at, ago, evidence)
    if at.task.status == "canceled":
        return tell_cancellation(at, ago, evidence)
    return make_cause(at, "ended", f"It succeeded {ago}, and nothing is owed.", evidence,
                      ("get_task", "see its result"))


def tell_failure(at: Facts, ago: str, evidence: wire_workers.Evidence) -> wire_workers.Cause:
    """Make the cause of a task that failed: after how many attempts, and why."""
    attempts, most = at.task.attempt + 1, at.task.max_attempts
    error = find_message(decode_json(at.task.outcome)) if at.task.outcome else ""
    message = words.cut_line(error, MOST_SAID) or "no error was given"
    after = "its only attempt" if most == 1 else f"{attempts} of {most} attempts"
    more = "; its worker asked for no other attempt" if attempts < most else ""
    evidence = replace(evidence, attempt=attempts, max_attempts=most, reason=error[:MOST_REASON] or None,
                       workers=[wire_workers.WorkerFact(at.lease.worker)] if at.lease else None)
    return make_cause(at, "ended", f"It failed {ago}, after {after}{more}: {message}.", evidence,
                      ("get_task", "see the whole error"))


def tell_cancellation(at: Facts, ago: str, evidence: wire_workers.Evidence) -> wire_workers.Cause:
    """Make the cause of a task that was canceled: by whom, and why."""
    reason: str | None = read_body(at.receipt).get("reason") if at.receipt else None
    by = f" by {at.receipt.sender}" if at.receipt else ""
    if (newer := read_body(at.receipt).get("superseded_by") if at.receipt else None) is not None:
        by += f", because task {newer} took its place"
    unsaid = "; no reason was given" if at.receipt and at.receipt.body and newer is None else ""
    message = f": {words.cut_line(reason, MOST_SAID)}" if reason else unsaid
    evidence = replace(evidence, by=at.receipt.sender if at.receipt else None, reason=reason and reason[:MOST_REASON],
                       receipt_ids=[at.receipt.receipt_id] if at.receipt else None)
    return make_cause(at, "ended", f"It was canceled {ago}{by}{message}.", evidence,
                      ("get_task_history", "see what happened to it before"))


def read_body(receipt: stored.Receipt) -> dict[str, Any]:
    """Return what a receipt says; nothing if only the ledger has its body."""
    body = decode_json(receipt.body) if receipt.body else {}
    return body if isinstance(body, dict) else {}


def find_message(error: Any) -> str:
    """Return what an error says to people: its message, else all of it."""
    if error is None:
        return ""
    if isinstance(error, dict):
        texts = (error.get(name) for name in ("message", "error", "detail", "code"))
        error = next((text for text in texts if isinstance(text, str) and text.strip()), error)
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()


CAUSES: tuple[Callable[[Facts], wire_workers.Cause | None], ...] = (
    explain_leased, explain_instance_gone, explain_lease_overdue, explain_input, explain_children, explain_key,
    explain_hold,
    explain_pause, explain_suspension, explain_delay, explain_backoff, explain_park, explain_jitter,
    explain_no_worker, explain_limit, explain_quota, explain_starvation, explain_busy, explain_queue, explain_claimable,
    explain_owed, explain_parked, explain_waiting, explain_end)


# Making them.


def make_cause(at: Facts, cause: wire_workers.CauseName, summary: str, evidence: wire_workers.Evidence,
               *calls: tuple[str, str]) -> wire_workers.Cause:
    """Make a cause; of the calls it names the first that the caller may make."""
    operation, why = next((call for call in calls if call[0] in at.may), calls[-1])
    return wire_workers.Cause(cause, words.begin_sentence(summary), evidence,
                              wire_workers.NextCall(operation, list_arguments(at, operation), why))


def list_arguments(at: Facts, operation: str) -> dict[str, Any]:
    """Return with what a call that helps is made."""
    if operation in ("list_workers", "get_limits"):
        return {}
    if operation == "get_limit" and at.limit is not None:
        return {"name": at.limit.why.name}
    if operation == "resume_work" and (pause := at.stopping) is not None:
        named = {"type": pause.type, "capabilities": pause.capabilities, "worker": pause.worker}
        return {name: value for name, value in named.items() if value is not None} or {"whole_tenant": True}
    if operation == "answer_input":
        return {"task_id": at.task.task_id, "key": at.answerable[0].key, "action": "accept"}
    if operation == "list_tasks":
        return {"parent_task_id": at.task.task_id}
    if operation == "get_task" and at.task.status not in stored.TERMINAL:
        return {"task_id": at.task.task_id, "wait_seconds": WAIT_SECONDS}
    return {"task_id": at.task.task_id}


def name_worker(row: stored.Presence) -> str:
    """Return who a presence is of."""
    return f"{row.kind} {row.id}"


def show_asked(at: Facts, row: stored.Presence, claim: stored.Claimed) -> wire_workers.WorkerFact:
    """Show a worker with a claim, and what it holds, if that was read."""
    return wire_workers.WorkerFact(wire.Principal(row.kind, row.id, row.instance_id), to_utc(claim.at), claim.types,
                                   claim.capabilities,
                                   at.holding.get((row.kind, row.id)), to_utc(row.last_seen_at))


# Reading the facts.


async def explain_task(engine: Engine, caller: Caller, ask: wire_workers.ExplainTask) -> wire_workers.Explanation:
    """Tell why a task is not done: the cause, its evidence, the next call to make, and other causes that apply.

    For the owner, or an admin.  What other processes have seen of workers in the last half minute may be missing.
    """
    if (snapshot := await engine.backend.task(caller.tenant_id, ask.task_id)) is None:
        raise errors.no_task(ask.task_id)
    if not caller.sees_all and not snapshot[0].owner.same(caller.principal):
        raise forbid(caller, f"task {ask.task_id} belongs to another principal")
    facts = await read_facts(engine, caller, *snapshot)
    facts.receipt = await read_receipt(engine, caller.tenant_id, facts)
    first, *also = explain(facts)
    return wire_workers.Explanation(ask.task_id, facts.task.status, first.cause, first.summary, first.evidence,
                                    first.next, also, to_utc(facts.now), describe_origin(facts.task))


def describe_origin(task: stored.Task) -> str:
    """Return who has created a task, and in which context of A2A."""
    context = find_context(decode_terms(task.terms).principal_instance_id)
    return f"{task.owner}" if context is None else f"{task.owner}, over A2A in the context {context}"


def explain(facts: Facts) -> list[wire_workers.Cause]:
    """Return the causes that apply, in order of precedence; there always is one."""
    return [cause for find in CAUSES if (cause := find(facts)) is not None]


async def read_facts(engine: Engine, caller: Caller, task: stored.Task, lease: stored.Lease | None,
                     progress: stored.Progress | None) -> Facts:
    """Read what may matter to a task."""
    settings = engine.settings
    helping = (*CORE_OPERATIONS.values(), LIST_TASKS, *workers.OPERATIONS, *pausing.OPERATIONS, *admin.OPERATIONS)
    answers = {"get_limit"} if caller.unlimited else set[str]()
    facts = Facts(task=task, needed=needs_of(to_raw(task.requirements)), lease=lease, progress=progress,
                  now=engine.backend.now(), instance=engine.instance, grace=settings.lease_grace_seconds,
                  may=frozenset(op.name for op in helping if op.fits(caller)) | answers,
                  patience=find_patience(settings), silence=find_silence(settings))
    facts.answerable = [question for question in facts.questions if not has_passed(question.expires_at, facts.now) and (
        caller.unlimited or question.to.same(caller.principal)) and not question.asked_by.same(caller.principal)]
    facts.may |= {"answer_input"} if facts.answerable else set()
    if task.status in stored.ACTIVE and lease is not None:
        await read_holder(engine, caller.tenant_id, facts, lease)
    if task.status == "queued":
        await read_queue(engine, caller.tenant_id, facts)
    if settings.receipt_mode != "standalone":
        rows = await engine.backend.page(caller.tenant_id, queries.UnsentOf(task.task_id, MOST_AHEAD))
        facts.unsent = sorted(rows, key=lambda row: row.receipt_id)
    return facts


async def read_receipt(engine: Engine, tenant_id: str, facts: Facts) -> stored.Receipt | None:
    """Return the receipt that says how the last lease of a waiting task was given up, or who canceled it."""
    last = facts.task.status if facts.task.status != "queued" or facts.lease is None else facts.lease.ending
    type = {"failed": FAILED, "released": EXPIRED, "canceled": CANCELED}.get(last)
    if type is None or facts.task.status not in ("queued", "canceled"):
        return None
    rows = await engine.backend.page(tenant_id,
                                     queries.ReceiptFilter(None, facts.task.task_id, type.type, None, 1, newest=True))
    return rows[0] if rows else None


async def read_holder(engine: Engine, tenant_id: str, facts: Facts, lease: stored.Lease) -> None:
    """Read what is known of the worker that holds a task, and of the gate that sweeps it."""
    worker, task = lease.worker, facts.task
    presence = await engine.backend.record(tenant_id, stored.Presence, worker.kind, worker.id)
    known = engine.sightings.known(tenant_id, worker, presence, facts.now)
    facts.holder = known if known.sessions else None
    if task.asyncgate_instance != engine.instance:
        rows = await engine.backend.page(tenant_id, queries.InstanceOf(task.asyncgate_instance))
        facts.owner = rows[0] if rows else stored.Instance(task.asyncgate_instance, None, False)
    if is_lost(task, lease, facts.now, facts.grace):
        health = wire.Healthy("healthy", "", "", engine.instance, 0, "ok", {})
        for describe_health in engine.on.describe_health:
            await describe_health(health)
        facts.swept = dict(health.upkeep.get("sweep", {}))


async def read_queue(engine: Engine, tenant_id: str, facts: Facts) -> None:
    """Read what keeps a queued task: its tenant's limits, the tasks before it, and the workers."""
    backend, task = engine.backend, facts.task
    if task.held == stored.KEY_TAKEN:
        row = await backend.record(tenant_id, stored_unique.UniqueKey, name_key(task) or "")
        facts.keeper = row.task_id if row is not None else None
    facts.account = await backend.record(tenant_id, stored.Account)
    if engine.find_extension(Quotas) is not None and (usage := await backend.record(tenant_id,
                                                                                    stored.Usage)) is not None:
        facts.leases = usage.leases
        facts.most_leases = find_allowance(engine.settings, facts.account, facts.now).concurrent_leases
    if facts.waits:
        [facts.ahead] = await backend.page(tenant_id,
                                           queries.AheadOf(task.lane, task.priority, task.task_id, MOST_AHEAD,
                                                           task.limits))
        facts.limit = await find_reached(backend, tenant_id, task, facts.now)
        if engine.settings.starvation_factor:
            facts.usual = (await read_usual(engine, tenant_id, facts.now)).get(task.lane)
            facts.longest = find_longest(engine.settings, facts.usual) if facts.usual else 0.0
    facts.asked = await read_asked(engine, tenant_id, facts.now)
    facts.pauses = find_pauses(await backend.record(tenant_id, stored.Pauses), facts.now)
    able, paused = find_able(task.type, facts.needed, facts.asked), {pause.worker for pause in facts.pauses}
    facts.able = [(row, claim) for row, claim in able if row.id not in paused]
    facts.resting = [(row, claim) for row, claim in able if row.id in paused]
    facts.holding = await count_holdings(engine, tenant_id, [row for row, _ in facts.able], MOST_HELD)


def find_able(type: str, needed: frozenset[str], asked: list[Claimant]) -> list[Able]:
    """Return the workers that can do a task, each with its last claim that could have got it."""
    pairs = list[Able]()
    for row, claims in asked:
        fit = (claim for claim in claims if matches(type, needed, wire.LeaseNext(
            capabilities=frozenset(claim.capabilities), accept_types=frozenset(claim.types))))
        if (claim := next(fit, None)) is not None:
            pairs.append((row, claim))
    return sorted(pairs, key=lambda pair: -pair[1].at)


async def read_asked(engine: Engine, tenant_id: str, now: float) -> list[Claimant]:
    """Return the last workers that asked for tasks, the latest first, as stored and as seen since."""
    rows = await engine.backend.page(tenant_id, queries.WorkerFilter(("", ""), MOST_ASKED, latest=True))
    return join_sightings(engine, tenant_id, rows, now)


def join_sightings(engine: Engine, tenant_id: str, rows: list[stored.Presence], now: float) -> list[Claimant]:
    """Return the last workers that asked for tasks, from what is stored and what this process has seen since."""
    kept: dict[tuple[str, str], stored.Presence | None] = {(row.kind, row.id): row for row in rows}
    fresh = engine.sightings.claimants(tenant_id)
    places = kept | {place: kept.get(place) for place in nlargest(MOST_ASKED, fresh, key=fresh.__getitem__)}
    presences = [engine.sightings.known(tenant_id, wire.Principal(*place), row, now) for place, row in places.items()]
    presences.sort(key=lambda row: -(row.claimed_at or 0.0))
    return [(row, decode_claims(row.claims)) for row in presences[:MOST_ASKED]]


OPERATIONS = [
    Operation(explain_task, "GET /v1/tasks/{task_id}/explain", "a A", "tasks:read", "R"),
]
