"""The outbox: receipts are stored for the ledger in the transaction of their change, and sent after the commit.

State > Receipt > Delivery (spec 20.12): a caller never waits for the ledger, and a crash at any moment loses no
receipt, because each stays in the outbox until the ledger has answered.

The receipts of one task are sent in their order, those of different tasks concurrently, and each retry sends the same
bytes.  A receipt that the ledger refuses is parked, and its owner is told.  A receipt without an answer is retried: a
few times quickly, then at a fixed interval without end.  Of several gates on one database one sends for all; when it
dies, another takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from asyncgate import ACCEPTED, ANOMALY, COMPLETED, FAILED, Caller, Engine, Extension, News
from asyncgate.extras.ledger import settling, sinks
from asyncgate.extras.ledger.adoption import JOB, Adopter, write_anomaly
from asyncgate.extras.ledger.noticing import Noticer
from asyncgate.extras.ledger.pacing import Wires, pace_of
from asyncgate.extras.ledger.reading import Reading
from asyncgate.extras.ledger.routing import Routes
from asyncgate.extras.ledger.strict import Strict
from asyncgate.parts.model import queries, stored, wire
from asyncgate.parts.model.settings import CircuitBreaker
from asyncgate.parts.process.kit import take_error
from asyncgate.parts.process.rounds import Rounds, store_meanwhile

if TYPE_CHECKING:
    from asyncgate import Instead, Work
    from asyncgate.parts.model import stored

log = logging.getLogger("asyncgate.ledger")

ENDS = {COMPLETED.type, FAILED.type}
ROWS_PER_BATCH = 500        # receipts that are read, sent and removed together
MANY, FEW = 100, 20         # if more than FEW receipts wait, one call sends up to MANY
SOON_SECONDS = 0.1          # the pause before the first retry; each further pause is twice as long
SETTLE_SECONDS = 1.0        # how often receipts sent so far are removed from the outbox
FRESH_SECONDS = 1.0         # how old the numbers of `health` may be
MEASURE_SECONDS = 1.0       # that a health check waits for the lag; orchestrators wait for two seconds or more
SINGLY_SECONDS = 60.0       # how long receipts go one per call after a call with many failed
STOP_SECONDS = 5.0          # how long a stopping gate waits for answers to sent receipts


# What a comparison with the ledger may find; each has a line in the metrics from the start.
DIFFERENCES = ("missing_at_ledger", "lost_by_ledger", "end_unproven", "tampered", "never_granted", "ended_there")


class Compared(Struct):
    """How much was compared with the ledger, and what differed."""

    receipts: int = 0
    sent_again: int = 0
    differences: Counter[str] = field(default_factory=Counter)


class Ledger(Extension):
    """The extension of a gate in integrated mode: stores receipts in the outbox, sends them, and reads the ledger."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sink = engine, sinks.open_sink(engine.settings)
        self.sender, self.is_strict = Sender(engine, self.sink), engine.settings.receipt_consistency_mode == "strict"
        # Reading and strict commits have circuit breakers of their own: when one opens, the sender still delivers.
        circuit = engine.settings.ledger.circuit_breaker
        self.reading_breaker, self.strict_breaker = Breaker(circuit), Breaker(circuit)
        self.routes = Routes(engine, self.sink, self.lag)
        self.adopting: asyncio.Task[None] | None = None
        self.settling: asyncio.Task[None] | None = None
        self.measuring: asyncio.Task[wire.LedgerLag] | None = None
        self.known_lag: wire.LedgerLag | UnsetType = UNSET
        self.strict: Strict | None = None
        self.compared: Compared = Compared(differences=Counter(dict.fromkeys(DIFFERENCES, 0)))
        self.last_comparison: wire.LedgerComparison | None = None

    async def __aenter__(self) -> Ledger:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self) -> None:
        """Start sending receipts and reading the ledger."""
        if self.sink.reads:
            reading = Reading(self.engine, self.sink, self.reading_breaker, self.routes)
            self.engine.extend(reading)
            self.adopting = asyncio.create_task(Adopter(self.engine, reading).run())
        else:
            self.engine.extend(self.routes)
            noticer = Noticer(self.engine, Reading(self.engine, self.sink, self.reading_breaker))
            self.adopting = asyncio.create_task(noticer.run())
        self.strict = Strict(self.engine, self.sink, self.strict_breaker, Wires(pace_of(self.engine.settings)),
                             self.sender.call)
        self.engine.extend(self.strict)
        self.settling = asyncio.create_task(self.strict.run())
        self.sender.open()

    async def close(self) -> None:
        """Wait a moment for answers to sent receipts, then close the connections."""
        for task in filter(None, (self.adopting, self.settling, self.measuring)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.sender.close()
        await self.sink.close()

    @property
    def adopts(self) -> bool:
        """Whether workers may end their tasks by receipts in the ledger."""
        return bool(self.sink.binds) and self.engine.settings.ledger.adopt_seconds > 0

    def after_decision(self, work: Work, ask: wire.Ask, receipts: tuple[stored.Receipt, ...]) -> None:
        """Store the receipts of an operation in the outbox."""
        for receipt in receipts:
            if not receipt.body or (getattr(ask, "whole", False) and receipt.receipt_type in ENDS):
                continue                # the ledger has it: it was adopted from there
            task, lease = work.tasks.get(receipt.task_id), work.leases.get(receipt.task_id)
            content = self.sink.render(work.tenant_id, receipt, task, lease)
            by_worker = receipt.receipt_type == ACCEPTED.type and getattr(ask, "accepts_itself", False)
            if by_worker:
                content = self.sink.handover(content) if content is not None else None
            if task is not None and (back := self.sink.handed(receipt, task, lease, by_worker)) is not None:
                work.change_task(task, handed=back)      # the task's next receipts are rendered with it
            if content is not None:
                row = stored.Outgoing(receipt.receipt_id, receipt.task_id, content.decode(), work.now,
                                      reason=settling.keep_rest(ask, receipt) if self.is_strict else None)
                work.post_receipt(row, skeleton=self.sink.reads)

    def substitutes(self) -> Mapping[str, Instead]:
        """Return the operation that tells where workers may end their tasks."""
        return {"get_config": self.get_config}

    async def get_config(self, engine: Engine, caller: Caller, ask: wire.GetConfig) -> wire.GateConfig:
        """Return how this gate is set up."""
        reply = await Engine.get_config(engine, caller, ask)
        reply.worker_completion = "gate_or_ledger" if self.adopts else "gate"
        return reply

    async def describe_health(self, health: wire.Healthy) -> None:
        """Add to a health reply how far the ledger lags, and what the last comparison with it has found."""
        if health.database == "ok":
            health.receipt_ledger_lag = await self._find_lag()
        if self.last_comparison is not None:
            health.ledger_comparison = self.last_comparison

    async def _find_lag(self) -> wire.LedgerLag | UnsetType:
        """Return how far the ledger lags for all tenants; if the database takes long to count, as it was last known."""
        if self.measuring is None or self.measuring.done():
            self.measuring = asyncio.create_task(self.lag())
            self.measuring.add_done_callback(take_error)
        await asyncio.wait([measuring := self.measuring], timeout=MEASURE_SECONDS)
        self.known_lag = measuring.result() if measuring.done() else self.known_lag
        return self.known_lag

    async def lag(self, tenant_id: str | None = None) -> wire.LedgerLag:
        """Return how far the ledger lags, for one tenant or all."""
        lag = await self.sender.lag(tenant_id)
        unsettled = 0
        if self.strict is not None and self.strict.lasting:
            tenants = [tenant_id] if tenant_id is not None else await self.engine.backend.unsent()
            unsettled = await self.strict.count_unsettled(tenants)
        age = max(self.engine.backend.now() - lag.oldest_at, 0.0) if lag.oldest_at is not None else 0.0
        return wire.LedgerLag(lag.waiting, lag.parked, round(age, 3), self.circuit, unsettled)

    @property
    def circuit(self) -> Literal["closed", "open", "half_open"]:
        """Return the worse of the states of two circuit breakers: the sender's, and that of strict commits."""
        states = self.sender.breaker.state, self.strict_breaker.state
        return "open" if "open" in states else "half_open" if "half_open" in states else "closed"


class Breaker:
    """Circuit breaker: pause an unresponsive ledger, then probe it with a few receipts."""

    def __init__(self, settings: CircuitBreaker, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.clock = settings, clock
        self.failures, self.probes, self.taken = 0, 0, 0
        self.opened_at: float | None = None

    @property
    def state(self) -> Literal["closed", "open", "half_open"]:
        """Return the state: closed sends all receipts, open none, half_open a few as probes."""
        if self.opened_at is None:
            return "closed"
        return "open" if self.wait() > 0 else "half_open"

    def wait(self) -> float:
        """Return the seconds until the ledger is probed."""
        return 0.0 if self.opened_at is None else self.opened_at + self.settings.timeout_seconds - self.clock()

    def let_through(self) -> bool:
        """Return whether one more call may be made now; the caller must then report the result to this breaker."""
        if self.state == "half_open" and self.probes < self.settings.half_open_max_calls:
            self.probes += 1
            return True
        return self.state == "closed"

    def note_answer(self) -> bool:
        """Note that the ledger answered; return whether that closed the circuit."""
        self.failures = 0
        if self.state == "half_open":
            self.probes, self.taken = max(self.probes - 1, 0), self.taken + 1
            if self.taken >= self.settings.success_threshold:
                self.opened_at = None
                return True
        return False

    def cancel_probe(self) -> None:
        """Free the place of a probe that was canceled before the ledger answered."""
        self.probes = max(self.probes - 1, 0)

    def note_outage(self) -> None:
        """Note that the ledger did not answer."""
        self.failures += 1
        due = self.failures >= self.settings.failure_threshold or self.state == "half_open"
        if self.settings.enabled and due and self.state != "open":
            self.opened_at, self.probes, self.taken = self.clock(), 0, 0


class Outcome(Struct):
    """The results of sending a page of the outbox."""

    sent: list[str] = field(default_factory=list)
    tried: list[stored.Outgoing] = field(default_factory=list)
    parked: list[stored.Outgoing] = field(default_factory=list)
    stuck: dict[str, float] = field(default_factory=dict)      # by task: seconds until the next retry

    def take(self) -> Outcome:
        """Remove and return the results so far, to be stored."""
        taken = replace(self, stuck={})
        self.sent, self.tried, self.parked = [], [], []
        return taken


class Sender(Extension):
    """Sends the receipts in the outbox, in one background task for each tenant."""

    def __init__(self, engine: Engine, sink: Any) -> None:
        self.engine, self.sink = engine, sink
        ours = engine.settings.ledger
        self.retry, self.breaker = ours.emission_retry, Breaker(ours.circuit_breaker)
        self.wires = Wires(pace_of(engine.settings))
        self.rounds: dict[str, Rounds] = {}                     # by tenant
        self.later: dict[tuple[str, str], float] = {}           # receipts, and the time of their next retry
        self.overflown: set[str] = set()
        self.answers = {"stored": 0, "refused": 0, "unanswered": 0}     # of the ledger, by receipts
        self.singly_until = 0.0                                 # until then, one receipt per call
        self.measured: tuple[float, stored.Lag] = (-FRESH_SECONDS, stored.Lag())
        self.following_until = 0.0                              # until then, another process sends
        self.polling: asyncio.Task[None] | None = None
        self.closed = True

    def open(self) -> None:
        """Start sending, first the receipts that an earlier process left."""
        self.closed = False
        self.engine.extend(self)
        self.polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Wait a moment for answers to sent receipts; the next process sends the others."""
        self.closed = True
        self.engine.withdraw(self)
        if self.polling is not None:
            self.polling.cancel()
            await asyncio.gather(self.polling, return_exceptions=True)
        await asyncio.gather(*(rounds.close(STOP_SECONDS) for rounds in self.rounds.values()))

    # When to send.

    def after_commit(self, work: Work) -> None:
        """Start sending the receipts that a batch put into the outbox."""
        if work.posted:
            self.call(work.tenant_id)

    def hear_news(self, news: News) -> None:
        """Start sending the receipts that another process put into the outbox."""
        if news.posted:
            self.call(news.tenant_id)

    def call(self, tenant_id: str) -> None:
        """Start sending a tenant's receipts, or note that its outbox must be read again."""
        if not self.closed and self._time() >= self.following_until:
            if tenant_id not in self.rounds:
                self.rounds[tenant_id] = Rounds(partial(self._drain, tenant_id))
            self.rounds[tenant_id].call()

    async def _poll(self) -> None:
        """Poll for receipts that a dead process left or that another process wrote."""
        alone, poll = self.engine.is_alone(), self.engine.settings.database.poll_seconds
        while True:
            with contextlib.suppress(Exception):    # the database is unavailable: already logged, and polled again
                for tenant_id in await self.engine.backend.unsent():
                    self.call(tenant_id)
            await asyncio.sleep(self.retry.retry_interval_seconds if alone else poll)
            alone = self.engine.is_alone()

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    # Sending.

    async def _drain(self, tenant_id: str) -> None:
        """Send all waiting receipts of a tenant, page by page.

        Order: each page starts at the oldest receipt again.  Another process may have committed an older receipt
        meanwhile, and later receipts of its task must not overtake it.  One query never returns a receipt without the
        earlier receipts of its task.
        """
        try:
            if not await self.engine.leads(JOB):
                self.following_until = self._time() + self.engine.settings.database.poll_seconds
                return
            left, stuck = 0, dict[str, float]()
            while True:
                rows = await self.engine.backend.page(tenant_id, queries.OutboxFilter("", ROWS_PER_BATCH + left))
                gone = await self._send_and_settle(tenant_id, rows, stuck)
                if self.closed or self.breaker.state == "open" or (not gone and len(rows) < ROWS_PER_BATCH + left):
                    break
                left = len(rows) - gone
            if stuck:
                self.rounds[tenant_id].call_later(max(min(stuck.values()), 0.01))
            await self._warn_of_backlog(tenant_id, bool(stuck))
        except Exception:
            log.exception("receipts of tenant %s are not sent now: the outbox cannot be read or written", tenant_id)
            self.rounds[tenant_id].call_later(self.engine.settings.database.poll_seconds)

    async def _send_and_settle(self, tenant_id: str, rows: list[stored.Outgoing], stuck: dict[str, float]) -> int:
        """Send a page, and store the results every second; return how many receipts have left the outbox."""
        outcome, gone = Outcome(), 0

        async def settle_part() -> None:
            nonlocal gone
            part = outcome.take()
            await self._settle(tenant_id, part)
            gone += len(part.sent) + len(part.parked)
        await store_meanwhile(self._send_page(tenant_id, rows, stuck, outcome), settle_part, SETTLE_SECONDS)
        stuck |= outcome.stuck
        return gone

    async def _send_page(self, tenant_id: str, rows: list[stored.Outgoing], stuck: dict[str, float],
                         outcome: Outcome) -> None:
        """Send a page: the receipts of one task one after another, those of different tasks concurrently."""
        chains = defaultdict[str, list[stored.Outgoing]](list)
        retried = {id for tenant, id in self.later if tenant == tenant_id}
        behind = {chain_of(row) for row in rows if row.receipt_id in retried}
        due = [row for row in rows if chain_of(row) not in stuck]
        left = await self._send_many(tenant_id, [row for row in due if chain_of(row) not in behind], outcome)
        for row in (*left, *(row for row in due if chain_of(row) in behind)):
            chains[chain_of(row)].append(row)
        await asyncio.gather(*(self._send_chain(tenant_id, key, chain, outcome) for key, chain in chains.items()))

    async def _send_many(self, tenant_id: str, rows: list[stored.Outgoing], outcome: Outcome) -> list[stored.Outgoing]:
        """Send many receipts per call while the ledger accepts that; return the rest, to be sent one by one."""
        send_many: Callable[..., Any] | None = getattr(self.sink, "send_many", None)
        while send_many and len(rows) > FEW and self.breaker.state == "closed" and not (
                self._time() < self.singly_until or self.closed):
            try:
                refusals = await send_many(tenant_id, [row.content.encode() for row in rows[:MANY]])
            except sinks.Singly as why:
                log.info("the ledger accepts only one receipt per call: %s", why)
                self.singly_until = self._time() + SINGLY_SECONDS
                break
            except sinks.Outage as away:      # the first receipt that is sent alone will show the reason
                if not isinstance(away, sinks.Unanswered | sinks.Garbled):
                    self.breaker.note_outage()
                self.answers["unanswered"] += len(rows[:MANY])
                log.warning("the ledger did not accept %d receipts: %s", len(rows[:MANY]), away)
                break
            for row, refusal in zip(rows, refusals, strict=False):
                self._note_answer(row, refusal, tenant_id, outcome)
            rows = rows[MANY:]
        return rows

    def _note_answer(self, row: stored.Outgoing, refusal: sinks.Refusal | None, tenant_id: str,
                     outcome: Outcome) -> None:
        """Note that the ledger stored or refused a receipt; either answer shows that the ledger works."""
        self.answers["stored" if refusal is None else "refused"] += 1
        if refusal is None:
            outcome.sent.append(row.receipt_id)
        else:
            log.error("the ledger refuses receipt %s of tenant %s: %s", row.receipt_id, tenant_id, refusal)
            outcome.parked.append(replace(row, state="parked", reason=str(refusal)))
        self.later.pop((tenant_id, row.receipt_id), None)
        self._note_alive()

    def _note_alive(self) -> None:
        """Tell the circuit breaker that the ledger answers; if that closes it, send everything that waits."""
        if self.breaker.note_answer():
            log.info("the ledger answers again")
            for rounds in self.rounds.values():
                if rounds.timer is not None:
                    rounds.call_later(0.0)

    async def _send_chain(self, tenant_id: str, key: str, rows: list[stored.Outgoing], outcome: Outcome) -> None:
        """Send the receipts of one task, until one of them must wait."""
        for row in rows:
            async with self.wires:
                pause = self.later.get((tenant_id, row.receipt_id), 0.0) - self._time()
                if self.closed or pause > 0 or not self.breaker.let_through():
                    outcome.stuck[key] = max(pause, self.breaker.wait(), SOON_SECONDS)
                    return
                if not await self._send(tenant_id, key, row, outcome):
                    return

    async def _send(self, tenant_id: str, key: str, row: stored.Outgoing, outcome: Outcome) -> bool:
        """Send one receipt; return whether the next one may follow."""
        try:
            await self.wires.send(self.sink, tenant_id, row.content.encode())
            self._note_answer(row, None, tenant_id, outcome)
        except sinks.Refusal as refusal:
            self._note_answer(row, refusal, tenant_id, outcome)
        except asyncio.CancelledError:
            self.breaker.cancel_probe()
            raise
        except sinks.Outage as away:
            self._note_alive() if isinstance(away, sinks.Unanswered | sinks.Garbled) else self.breaker.note_outage()
            self.answers["unanswered"] += 1
            outcome.tried.append(row := replace(row, tries=row.tries + 1, reason=str(away)))
            pause = max(self._pause(row.tries), away.retry_after)
            self.later[tenant_id, row.receipt_id] = self._time() + pause
            outcome.stuck[key] = max(pause, self.breaker.wait())
            log.warning("the ledger did not accept receipt %s (attempt %d): %s", row.receipt_id, row.tries, away)
            return False
        return True

    def _pause(self, tries: int) -> float:
        """Return the pause after a number of attempts: short and doubling at first, then the fixed interval."""
        slow = self.retry.retry_interval_seconds
        quick = SOON_SECONDS * 2 ** min(tries - 1, 30)
        return min(quick, slow) if tries <= self.retry.max_retries else slow

    # Results.

    async def _settle(self, tenant_id: str, outcome: Outcome) -> None:
        """Delete delivered receipts, store the error of each other one, and tell the owners of parked ones."""
        if outcome.sent or outcome.tried or outcome.parked:
            await self.engine.change(
                tenant_id, partial(settle, self.engine, outcome), receipts=[row.receipt_id for row in outcome.parked],
                tasks=[row.task_id for row in outcome.parked if row.task_id])

    async def _warn_of_backlog(self, tenant_id: str, behind: bool) -> None:
        """Warn once if more receipts wait than the settings expect; none is dropped (H.7.5, 20.10)."""
        if not behind:
            self.overflown.discard(tenant_id)
            return
        waiting = (await self.engine.backend.lag(tenant_id)).waiting
        if waiting > self.retry.buffer_size and tenant_id not in self.overflown:
            self.overflown.add(tenant_id)
            log.critical("%d receipts of tenant %s wait for the ledger; at most %d are expected; none is dropped",
                         waiting, tenant_id, self.retry.buffer_size)
            await self.engine.change(tenant_id, lambda work: write_anomaly(
                self.engine, work, None, "receipt_backlog", str(work.now), "Find out why the ledger does not answer.",
                waiting=waiting, buffer_size=self.retry.buffer_size))

    async def lag(self, tenant_id: str | None) -> stored.Lag:
        """Return the lag of one tenant, or that of all tenants, which may be a second old."""
        if tenant_id is not None:
            return await self.engine.backend.lag(tenant_id)
        if self._time() - self.measured[0] >= FRESH_SECONDS:
            lags = [await self.engine.backend.lag(tenant) for tenant in await self.engine.backend.unsent()]
            self.measured = self._time(), add_lags(lags)
        return self.measured[1]


def chain_of(row: stored.Outgoing) -> str:
    """Return the id of the receipts that are sent in order: the task's, or the receipt's own if it has no task."""
    return row.task_id or row.receipt_id


def add_lags(lags: Iterable[stored.Lag]) -> stored.Lag:
    """Add up the lags of several tenants."""
    lags = list(lags)
    return stored.Lag(sum(lag.waiting for lag in lags), sum(lag.parked for lag in lags),
                      min((lag.oldest_at for lag in lags if lag.oldest_at is not None), default=None))


def settle(engine: Engine, outcome: Outcome, work: Work) -> None:
    """Store the results of sending; tell the owners of parked receipts."""
    for receipt_id in outcome.sent:
        work.drop_record(stored.Outgoing, receipt_id)
    for row in (*outcome.tried, *outcome.parked):
        work.keep_record(row)
    for row in outcome.parked:
        if (receipt := work.receipts.get(row.receipt_id)) and receipt.receipt_type != ANOMALY.type:
            write_anomaly(engine, work, receipt, "receipt_refused", row.receipt_id,
                          "Find out why the ledger refuses it; `asyncgate reconcile` shows which receipts it lacks.",
                          receipt_id=row.receipt_id, receipt_type=receipt.receipt_type, reason=row.reason)
