"""The audit log: append-only, one chain of hashes in each tenant (spec 21.7.4).

A change by an administrator writes its line in the same transaction.  Everything else is noted after the request,
logged at once, and written within a second by `Auditor`.  Equal lines of one second become one line with a count, and
lines beyond a tenant's limit per second are only counted, so a flood of refusals fills neither memory nor disk.  A
killed process may lose the notes of its last second; a stopped one loses none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import defaultdict
from contextvars import ContextVar
from functools import lru_cache
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from asyncgate import Caller, Engine, Work, its_lease
from asyncgate.parts.identity.keys_stored import ID_END, ID_START, KEY_PREFIX
from asyncgate.parts.identity.notices import write_notice
from asyncgate.parts.model import errors, queries, stored, wire, wire_admin
from asyncgate.parts.model.caller import NOBODY
from asyncgate.parts.model.connection import group_address
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.erased import SALT, is_erased_line
from asyncgate.parts.model.ids import make_salt, mark_in, mark_of
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.logs import Redaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncgate import Needs, Operation
    from asyncgate.parts.model import wire
    from asyncgate.parts.model.connection import Scope

log = logging.getLogger("asyncgate.audit")

Line = tuple[str, wire_admin.Severity, bytes]      # event, severity, canonical JSON of the details

LEVELS: dict[wire_admin.Severity, int] = {"info": logging.INFO, "warning": logging.WARNING,
                                          "critical": logging.CRITICAL}
FLUSH_SECONDS, MOST_NOTED = 1.0, 100            # different lines of one tenant; more are only counted
COUNTED_SECONDS, MOST_COUNTED = 300.0, 10_000   # events other than refusals: the first is noted, the next are counted
LINES_OF_PLACE, LINES_OF_STRANGERS = 20, 100    # lines in a minute that callers without a valid credential may cause
MOST_TASKS, USES_SECONDS, NOTICE_SECONDS = 200, 60.0, 3600.0
PRUNED = "audit_pruned"
SUSPECTS, TENANTS_SECONDS, LAST_FLUSH_SECONDS = 100, 60.0, 1.0
# The event and severity of each refusal that is noted; other refusals are not noted.
EVENTS: dict[str, tuple[str, wire_admin.Severity]] = {
    "tenant_mismatch": ("cross_tenant_attempt", "critical"),
    "tenant_not_found": ("cross_tenant_attempt", "critical"),       # the request named another tenant
    "forbidden": ("authorization_failure", "warning"),
    "rate_limit_exceeded": ("rate_limit_exceeded", "warning"),
    "quota_exceeded": ("quota_exceeded", "warning"),
    "unauthenticated": ("auth_failure", "warning"),
}
# Ids that may belong to another tenant; security: the refusal itself must not tell (docs/design.md, 21.9.3).
FOREIGN = {"task_not_found": "task_id", "receipt_not_found": "receipt_id", "key_not_found": "key_id",
           "lease_invalid_or_expired": "lease_id", "bulk_not_found": "bulk_id"}
# The request that the running task answers; audit lines take its address from here.
visit: ContextVar[Scope | None] = ContextVar("visit", default=None)


def current_visitor() -> dict[str, str | None]:
    """Return the address and the client of the running task's request; the client's text is truncated."""
    if (scope := visit.get()) is None:
        return {}
    agents = [value for name, value in scope["headers"] if name == b"user-agent"]
    return {"ip": scope.get("asyncgate.address"), "user_agent": agents[0][:200].decode("latin-1") if agents else None}


def body_of_line(settings: Settings, details: dict[str, Any]) -> bytes:
    """Encode the details of a line; secrets in the wrong place are masked."""
    redaction = redactor_of(tuple(settings.security.audit_logging.sensitive_fields))
    return to_canonical(redaction.tree({name: value for name, value in details.items() if value is not None}))


@lru_cache(8)
def redactor_of(fields: tuple[str, ...]) -> Redaction:
    """Return a redactor for these fields; it is cached, because it is costly to make."""
    return Redaction(fields)


def log_line(severity: wire_admin.Severity, event: str, tenant_id: str, body: bytes) -> None:
    """Write a line to the process's own log; in JSON logs the details are top-level members (21.7.4)."""
    fields = {"event": event, "severity": severity, "tenant_id": tenant_id, **msgspec.json.decode(body)}
    log.log(LEVELS[severity], "%s %s tenant=%s %s", severity, event, tenant_id, body.decode(),
            extra={"fields": fields})


def changed_tasks(ask: Any, reply: Any) -> list[str]:
    """Return the tasks that an operation changed."""
    named = [getattr(reply, "task_id", None) or getattr(ask, "task_id", None)]
    named += [task.task_id for task in getattr(reply, "results", None) or getattr(reply, "tasks", None) or ()]
    return [task_id for task_id in named if isinstance(task_id, str) and task_id]


# The chain.


def add_line(work: Work, event: str, severity: wire_admin.Severity, details: bytes,
             at: float | None = None) -> stored.Audit:
    """Add a line to the tenant's log; the batch must have loaded its `head`.

    Its id is its number: lines sort as they are chained whatever process wrote them, and no number is given twice.
    """
    head = work.find_record(stored.AuditHead) or stored.AuditHead(0, "")
    number = head.number + 1
    line = link_line(head, stored.Audit(
        f"{number:012d}", number, work.now if at is None else at, event, severity, add_salt(details), ""))
    work.add_audit(line)
    work.keep_record(stored.AuditHead(line.number, line.hash))
    return line


def add_salt(details: bytes) -> str:
    """Add something random, so that the hash of a line confirms no guess of what an erasure has taken from it."""
    return f'{details[:-1].decode()}{"," if details != b"{}" else ""}"{SALT}":"{make_salt()}"}}'


def link_line(head: stored.AuditHead, line: stored.Audit) -> stored.Audit:
    """Return a line with its hash, which covers the line before it."""
    content = to_canonical((head.hash, line.audit_id, line.number, line.at, line.event, line.severity,
                            Raw(line.body.encode())))
    return stored.Audit(line.audit_id, line.number, line.at, line.event, line.severity, line.body,
                        hashlib.sha256(content).hexdigest())


def load_head(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load and lock the end of the log, so that nobody else adds a line meanwhile."""
    needs.records.add((stored.AuditHead, ()))


def find_break(lines: Iterable[stored.Audit], before: stored.AuditHead) -> str | None:
    """Describe the first break in the next lines of a log; None if there is none."""
    for line in lines:
        if line.number != before.number + 1:
            return f"line {before.number + 1} of the audit log is missing: {line.audit_id} is number {line.number}"
        if link_line(before, line).hash != line.hash and not is_erased_line(line):
            return f"line {line.number} of the audit log, {line.audit_id}, is not what was written"
        before = stored.AuditHead(line.number, line.hash)
    return None


# Pruning old lines (21.7.4: they are kept for 90 days at least).


async def prune_lines(engine: Engine, tenant_id: str) -> int:
    """Delete one page of lines that are too old; a new line records the number and hash of the last deleted one.

    So the rest of the chain can still be verified: its first line covers that hash.
    """
    now = engine.backend.now()
    page = await engine.backend.page(tenant_id, queries.Rows(stored.Audit))
    oldest = now - DAY_SECONDS * engine.settings.security.audit_logging.retention_days
    old: list[stored.Audit] = list(takewhile(lambda line: line.at < oldest, page))
    if not old or old[0].at > oldest - DAY_SECONDS:     # prune once a day at most
        return 0

    def drop(work: Work) -> None:
        for line in old:
            work.drop_record(stored.Audit, line.audit_id)
        details = {"up_to": old[-1].number, "hash": old[-1].hash, "lines": len(old)}
        add_line(work, PRUNED, "info", to_canonical(details))
    await engine.change(tenant_id, drop, (stored.AuditHead, ()))
    return len(old)


def last_pruned(line: stored.Audit) -> stored.AuditHead | None:
    """Return the last deleted line that a pruning line records; None for other lines."""
    if line.event != PRUNED:
        return None
    details = msgspec.json.decode(line.body)
    return stored.AuditHead(details["up_to"], details["hash"])


async def prune_audit(engine: Engine) -> int:
    """Delete lines of all tenants that are too old, in the one process that leads; return how many."""
    gone = 0
    for tenant_id in await engine.backend.tenants() if await engine.leads("audit") else ():
        while lines := await prune_lines(engine, tenant_id):
            gone += lines
    return gone


# Lines of requests.


def describe_caller(caller: Caller) -> dict[str, Any]:
    """Return a caller's kind, id and role for the log, and the ids of its key, or of its token and session.

    Never its credential.
    """
    token, console = caller.token, caller.console
    return {"principal_kind": caller.principal.kind, "principal_id": caller.principal.id, "role": caller.role,
            "key_id": caller.key_id, "session_id": token and token.session_id, "token_id": token and token.token_id,
            "console_session": console and console.id}


def find_use_id(caller: Caller) -> str | None:
    """Return the id by which the uses of a credential are counted: of its key, its token, or the token's session."""
    if caller.key_id is not None or caller.token is None:
        return caller.key_id
    return caller.token.token_id or caller.token.session_id or str(caller.principal)


Noted = dict[Line, tuple[float, int]]       # since when, how often


class Uses(Struct):
    """The uses of a key or a token since they were last written."""

    caller: Caller
    operations: dict[str, int] = {}
    tasks: dict[str, None] = {}         # the tasks that it changed, in order
    more: int = 0                       # how many more tasks it changed


class Counted(Struct):
    """A frequent event: its first line, and how often it happened since."""

    tenant_id: str
    event: str
    severity: wire_admin.Severity
    facts: dict[str, Any]
    uses: int = 0


class Strangers:
    """The lines that callers without a valid credential may cause per minute, by address and in total.

    Further events are only counted, in one line a minute, so a stranger cannot fill the disk.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.minute = clock, -1
        self.told: dict[str, int] = {}      # lines by place
        self.untold: dict[str, int] = {}    # by event

    def take_line(self, place: str, event: str) -> bool:
        """Return whether an address may cause another line; count the event either way."""
        if (minute := int(self.clock() // 60)) != self.minute:
            self.minute, self.told = minute, {}
        lines = self.told.get(place, 0)
        if lines < LINES_OF_PLACE and sum(self.told.values()) < LINES_OF_STRANGERS:
            self.told[place] = lines + 1
            return True
        self.untold[event] = self.untold.get(event, 0) + 1
        return False


class Auditor:
    """Writes the audit lines of requests, after they were answered."""

    def __init__(self, engine: Engine, enabled: bool) -> None:
        self.engine, self.enabled = engine, enabled
        self.noted: defaultdict[str, Noted] = defaultdict(dict)
        self.bodies: dict[bytes, bytes] = {}    # masked details, by unmasked ones
        self.missed: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.counted: dict[tuple[Any, ...], Counted] = {}
        self.uses: dict[tuple[str, str], Uses] = {}     # by tenant, and key or token
        self.strangers = Strangers(engine.backend.now)
        self.noticed: dict[tuple[str, str], float] = {}     # by tenant and kind, when its admins were last told
        self.telling: set[asyncio.Task[bool]] = set()
        self.tenants: set[str] = set()          # known tenants, as of `asked_at`
        self.asked_at = -inf
        self.suspects: asyncio.Queue[tuple[Caller, str, str, dict[str, Any]]] = asyncio.Queue(SUSPECTS)
        self.asked: asyncio.Task[None] | None = None
        self.loops: list[asyncio.Task[None]] = []
        self.flushing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start writing."""
        self.loops = [asyncio.create_task(loop()) for loop in (self._writing, self._counting, self._looking_up)]

    async def close(self) -> None:
        """Write the noted lines and stop."""
        for loop in self.loops:
            loop.cancel()
        await asyncio.gather(*self.loops, return_exceptions=True)
        if self.telling:
            await asyncio.wait(self.telling)
        if self.flushing is not None:
            await asyncio.wait([self.flushing])     # what it has taken is not among the notes any more
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_FLUSH_SECONDS):
                await self.look_up_all()
        self.count()
        await self.flush()

    def note(self, tenant_id: str, event: str, severity: wire_admin.Severity, *, place: str | None = None,
             **facts: Any) -> None:
        """Note an event; events of strangers have a budget for each address."""
        raw = to_canonical(details := {**current_visitor(), **facts})
        if (body := self.bodies.get(raw)) is None:      # kept for a second, because in a flood most lines are equal
            body = body_of_line(self.engine.settings, details)
            if len(self.bodies) < MOST_NOTED:
                self.bodies[raw] = body
        line = (event, severity, body)
        noted = self.noted[tenant_id]
        if place is not None and line not in noted and not self.strangers.take_line(place, event):
            return
        if line not in noted and len(noted) >= MOST_NOTED:
            self.missed[tenant_id][event] += 1
            return
        since, times = noted.get(line, (self.engine.backend.now(), 0))
        noted[line] = since, times + 1
        if not times:       # repeats go to the process's own log when the line is written
            log_line(severity, event, tenant_id, body)

    def note_refusal(self, caller: Caller, refusal: errors.GateError, operation: str,
                     ask: wire.Ask | None = None) -> None:
        """Note a refusal that concerns security."""
        if not refusal.noted:
            refusal.noted = True
            self._judge(caller, operation, refusal.code, str(refusal), refusal.more.get("reason"), ask)

    def note_refused_items(self, caller: Caller, operation: str, reply: wire.Items) -> None:
        """Note the refused items of a batch."""
        for item in reply.results:
            if item.error is not None:
                self._judge(caller, operation, item.error.error, item.error.message, item.error.reason, item)

    def _judge(self, caller: Caller, operation: str, code: str, message: str, reason: str | None, ask: Any) -> None:
        if code == "lease_invalid_or_expired" and reason != "unknown":
            return      # the worker's own lease has ended; "unknown" is another's lease or an invented one
        if code == "lease_invalid_or_expired":
            self.note(caller.tenant_id, "lease_refused", "warning", **describe_caller(caller), operation=operation,
                      reason=code, message=message)
        if code in EVENTS:
            event, severity = EVENTS[code]
            self.note(caller.tenant_id, event, severity, **describe_caller(caller), operation=operation,
                      reason=code, message=message)
        elif code == "parent_not_found":
            for parent in ask.parents:
                self.suspect(caller, "receipt_id", parent)
        elif code in FOREIGN and not (FOREIGN[code] == "lease_id" and getattr(ask, "task_id", None)):
            self.suspect(caller, FOREIGN[code], getattr(ask, FOREIGN[code], None) or "")

    def note_stranger(self, refusal: errors.GateError, shown: str | None = None) -> None:
        """Note a refused credential in the operator's audit log, and in that of its tenant if it is known."""
        if refusal.code in EVENTS and not refusal.noted:
            refusal.noted = True
            reason, message = refusal.because or (refusal.code, str(refusal))
            place = group_address((visit.get() or {}).get("asyncgate.address") or "")
            tenant_id, facts = refusal.whose or (self.engine.settings.default_tenant_id, {})
            if refusal.whose is None and shown is not None and shown.startswith(KEY_PREFIX):
                self.suspect(NOBODY, "shown_key", shown[ID_START:ID_END])
            for log_of in {self.engine.settings.default_tenant_id: None, tenant_id: None}:
                self.note(log_of, *EVENTS[refusal.code], place=place, reason=reason, message=message,
                          **(facts if log_of == tenant_id else {}))

    def tally(self, caller: Caller, event: str, severity: wire_admin.Severity, **details: Any) -> None:
        """Note the first of equal events; count further ones."""
        key = (caller.tenant_id, event, find_use_id(caller), caller.principal, *details.items())
        if (counted := self.counted.get(key)) is not None:
            counted.uses += 1
        elif len(self.counted) < MOST_COUNTED:
            self.counted[key] = Counted(caller.tenant_id, event, severity, {**describe_caller(caller), **details})
            self.note(caller.tenant_id, event, severity, **describe_caller(caller), **details)
        else:       # too many different events: count the rest together
            rest = self.counted.setdefault((caller.tenant_id, event), Counted(caller.tenant_id, event, severity, {}))
            rest.uses += 1

    def count_use(self, caller: Caller, op: Operation, ask: Any, reply: Any) -> None:
        """Count an operation of a key or a token, and remember the tasks that it changed (spec 21.9.1)."""
        key = caller.tenant_id, find_use_id(caller) or ""
        if (uses := self.uses.get(key)) is None:
            if len(self.uses) >= MOST_COUNTED:
                self._note_uses()
            uses = self.uses[key] = Uses(caller)
        uses.operations[op.name] = uses.operations.get(op.name, 0) + 1
        for task_id in changed_tasks(ask, reply) if op.kind == "W" else ():
            if len(uses.tasks) < MOST_TASKS:
                uses.tasks[task_id] = None
            elif task_id not in uses.tasks:
                uses.more += 1

    def tell_strangers(self) -> None:
        """Note how many events of strangers got no line of their own."""
        if self.strangers.untold:
            untold, self.strangers.untold = self.strangers.untold, {}
            self.note(self.engine.settings.default_tenant_id, "strangers_refused", "warning", times=untold)

    def _note_uses(self) -> None:
        """Note the operations of each key and token, without the address of the current request, which is unrelated."""
        uses, self.uses = self.uses, {}
        for use in uses.values():
            details = {**describe_caller(use.caller), "operations": use.operations, "tasks": list(use.tasks) or None,
                       "more_tasks": use.more or None}
            event = "key_used" if use.caller.key_id is not None else "token_used"
            self.note(use.caller.tenant_id, event, "info", **details)

    def notice(self, tenant_id: str, kind: str, **details: Any) -> None:
        """Send the admins of a tenant a notice, at most once an hour for each kind."""
        now = self.engine.backend.now()
        if now - self.noticed.get((tenant_id, kind), -inf) < NOTICE_SECONDS or len(self.noticed) >= MOST_COUNTED:
            return
        self.noticed[tenant_id, kind] = now
        task = asyncio.create_task(write_notice(self.engine, tenant_id, kind, **details))
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)

    def count(self) -> None:
        """Note the counts of repeated events since the last call; forget events that did not repeat."""
        visit.set(None)
        self._note_uses()
        self.tell_strangers()
        now = self.engine.backend.now()
        self.noticed = {key: at for key, at in self.noticed.items() if now - at < NOTICE_SECONDS}
        for key, counted in list(self.counted.items()):
            if counted.uses:
                self.note(counted.tenant_id, counted.event, counted.severity, **counted.facts, uses=counted.uses)
                counted.uses = 0
            else:
                del self.counted[key]

    async def flush(self) -> None:
        """Write the noted lines; a failed write is repeated with the next lines."""
        self.bodies.clear()
        noted, self.noted = self.noted, defaultdict(dict)
        missed, self.missed = self.missed, defaultdict(lambda: defaultdict(int))
        for tenant_id in [*noted, *(missed.keys() - noted.keys())]:
            lines = noted[tenant_id]
            if not await self._write(tenant_id, self._lines(tenant_id, lines, missed[tenant_id])):
                self._take_back(tenant_id, lines, missed[tenant_id])

    def _lines(self, tenant_id: str, noted: Noted, missed: dict[str, int]) -> list[tuple[float, Line]]:
        lines = []
        for (event, severity, body), (since, times) in noted.items():
            if times > 1:
                body = to_canonical({**msgspec.json.decode(body), "times": times})
                log_line(severity, event, tenant_id, body)
            lines.append((since, (event, severity, body)))
        if missed:
            body = to_canonical({"times": missed})
            log_line("critical", "audit_overflow", tenant_id, body)
            lines.append((self.engine.backend.now(), ("audit_overflow", "critical", body)))
        return lines

    def _take_back(self, tenant_id: str, lines: Noted, missed: dict[str, int]) -> None:
        noted = self.noted[tenant_id]
        for line, (since, times) in lines.items():
            if line in noted or len(noted) < MOST_NOTED:
                noted[line] = since, times + noted.get(line, (since, 0))[1]
            else:
                self.missed[tenant_id][line[0]] += times
        for event, times in missed.items():
            self.missed[tenant_id][event] += times

    async def _write(self, tenant_id: str, lines: list[tuple[float, Line]]) -> bool:
        def write(work: Work) -> None:
            for at, (event, severity, details) in lines:
                add_line(work, event, severity, details, at)

        try:
            if self.enabled:
                await self.engine.change(tenant_id, write, (stored.AuditHead, ()))
            return True
        except errors.GateError:
            log.exception("%d lines of the audit log of tenant %s could not be written; the gate tries again",
                          len(lines), tenant_id)
            return False

    async def _writing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self.noted or self.missed:
                self.flushing = asyncio.create_task(self.flush())
                await asyncio.shield(self.flushing)

    async def _counting(self) -> None:
        while True:
            for _ in range(round(COUNTED_SECONDS / USES_SECONDS)):
                await asyncio.sleep(USES_SECONDS)
                self._note_uses()
                self.tell_strangers()
            self.count()

    # Security: an id of another tenant gets the same 404 as an unknown id; the difference is looked up later (21.9.3).

    def suspect(self, caller: Caller, name: str, id: str) -> None:
        """Queue an id for a look-up of its tenant, unless it has the caller's own mark, or no mark."""
        if name not in ("key_id", "shown_key") and mark_in(id) in (None, mark_of(caller.tenant_id)):
            return
        if self.suspects.full():
            self.missed[caller.tenant_id]["unknown_id"] += 1
        elif id:
            self.suspects.put_nowait((caller, name, id, current_visitor()))

    async def _looking_up(self) -> None:
        while True:
            self.asked = asyncio.create_task(self._look_up(*await self.suspects.get()))
            await asyncio.shield(self.asked)
            await asyncio.sleep(0.01)

    async def look_up_all(self) -> None:
        """Look up the tenants of all queued ids."""
        while not self.suspects.empty():
            await self._look_up(*self.suspects.get_nowait())
        if self.asked is not None:
            await asyncio.wait([self.asked])

    async def _look_up(self, caller: Caller, name: str, id: str, where: dict[str, Any]) -> None:
        try:
            if name == "shown_key":
                if (issued := await self.engine.backend.find_key(id)) is not None:
                    place = group_address(str(where.get("ip") or ""))
                    self.note(issued[0], *EVENTS["unauthenticated"], place=place, **where, about_key=id,
                              reason="wrong_secret", message="a key of this tenant was shown with a wrong secret")
            elif await self._is_foreign(caller.tenant_id, name, id):
                self.note(caller.tenant_id, "cross_tenant_attempt", "critical", **where, **describe_caller(caller),
                          **{f"foreign_{name}": id}, reason=f"{name.removesuffix('_id')}_not_found",
                          message="the id belongs to another tenant")
                self.notice(caller.tenant_id, "cross_tenant_attempt", key_id=caller.key_id,
                            principal=str(caller.principal), **{f"foreign_{name}": id})
        except Exception:
            log.exception("cannot find out to which tenant id %s belongs", id)

    async def _is_foreign(self, tenant_id: str, name: str, id: str) -> bool:
        """Whether another tenant has an id; only tenants with the id's mark are searched."""
        backend = self.engine.backend
        if name == "key_id":
            row = await backend.find_key(id)
            return row is not None and row[0] != tenant_id
        mark, now = mark_in(id), self.engine.backend.now()
        if not 0 <= now - self.asked_at < TENANTS_SECONDS:      # others, of other processes, may have come since
            self.tenants, self.asked_at = {*await self.engine.backend.tenants()}, now
        admitted = {key[0] for key in self.counted}     # some of them may have stored their first task since
        for other in self.tenants | admitted:
            if mark_of(other) == mark and other != tenant_id and await self._has(other, name, id):
                return True
        return False

    async def _has(self, tenant_id: str, name: str, id: str) -> bool:
        if name == "lease_id":
            def is_live(engine: Engine, work: Work, caller: Caller, ask: wire.RenewLease) -> bool:
                return work.holders.get(ask.lease_id, "") != ""
            ask = wire.RenewLease(lease_id=id)
            return bool(await self.engine.write(is_live, its_lease, self.engine.make_own_caller(tenant_id), ask))
        read = self.engine.backend.task if name == "task_id" else self.engine.backend.receipt
        return await read(tenant_id, id) is not None
