"""A gate that has seen three days of work: all that a console must show, and texts that try to break it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from asyncgate.backends import open_backend
from asyncgate.clients.http import Http
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import EscalationSettings, EscalationTarget
from asyncgate.parts.upkeep import Upkeep
from tests.conftest import TOKEN, Live, Served

HOUR, DAY = 3600.0, 86_400.0
OTHER_TENANT = "3c9d1f52-7a3e-4d0b-9f43-5b1e6c2a8d70"
FOREIGN = "only-the-other-tenant-knows"     # is in every name and text of the other tenant
# Each of them runs `ran(…)`, or breaks the page, where a text is taken for markup, for an address, or for a pattern.
MARKUP = "<img src=x onerror=alert('ran')>"
HOSTILE = {
    "markup": MARKUP,
    "closing": "</script></textarea></title></style><script>alert('ran')</script>",
    "attribute": "\" onmouseover=\"alert('ran')\" autofocus onfocus='alert(1)' x='",
    "svg": "<svg/onload=alert('ran')><a href=\"javascript:alert('ran')\">go</a>",
    "address": "javascript:alert('ran')",
    "template": "{{constructor.constructor('alert(1)')()}} ${alert('ran')} <%= 1 %> %00 %s %n",
    "marks": "\u202eoslaf si siht\u202c \u2066\u200f\u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627\u2069 \ufeff",
    "faces": "👩🏽‍🚀🏳️‍🌈 Z͑ͫ̓a͂l̈́g͓̅o e\u0301 \ud7ff \U0001d518\U0001d52b\U0001d526 ﷽",
    "word": "antidisestablishmentarianism" * 7,
    "lines": "one\r\ntwo\n\n\tthree\u2028four\u0085five\x1b[31mred\x07",
    "formula": "=HYPERLINK(\"http://127.0.0.1:9\",\"x\")",
    "path": "../../etc/passwd?a=b&c=d#e",
}
UNSEEN = {"marks", "faces", "lines"}
NUMBERS = """{"int64": 9223372036854775807, "uint64": 18446744073709551615, "odd": 9007199254740993,
 "forty": 1234567890123456789012345678901234567890, "small": -0.0, "long": 3.14159265358979323846264338327950288419,
 "same": 1.0, "__proto__": {"polluted": true}, "constructor": null, "": "no name"}"""
DEEP = '{"a":' * 40 + "[1,[2,[3]]]" + "}" * 40
LONG_LIST = json.dumps([{"number": number, "text": f"row {number}"} for number in range(300)])


class Story:
    """What happens at a gate, told over REST; its clock is the database's, moved."""

    def __init__(self, served: Served, upkeep: Upkeep) -> None:
        self.served, self.upkeep = served, upkeep
        self.ids: dict[str, str] = {}       # of tasks, by what they are for the tests

    async def ago(self, seconds: float) -> None:
        """Let it be so long ago, and the gate look for what was lost meanwhile."""
        self.served.backend.skew = -seconds
        await self.upkeep.once("sweep")

    async def create(self, type: str, owner: str = "ada", payload: str = "null", name: str = "", **more: Any) -> str:
        """Create a task with a payload that is JSON already."""
        ask = json.dumps({"type": type, "agent_id": owner, **more})
        made = await self.served.post("/v1/tasks", f'{ask[:-1]}, "payload": {payload}}}'.encode())
        self.ids[name or type] = made["task_id"]
        return str(made["task_id"])

    async def lease(self, worker: str, type: str, ttl: int = 1800, count: int = 1, able: tuple[str, ...] = ()) -> Any:
        """Lease tasks of a type; return what is asked under the lease of the last one."""
        offers = (await self.served.post("/v1/leases/claim", {
            "worker_id": worker, "accept_types": [type], "capabilities": able, "lease_ttl_seconds": ttl,
            "max_tasks": count}))["tasks"]
        assert len(offers) == count, f"{worker} finds no {type}"
        return offers[-1]["task_id"], {"worker_id": worker, "lease_id": offers[-1]["lease_id"]}

    async def under(self, lease: Any, verb: str, **more: Any) -> None:
        """Do something with a lease."""
        await self.served.post(f"/v1/tasks/{lease[0]}/{verb}", {**lease[1], **more})

    async def finish(self, worker: str, type: str, result: Any = "done", **more: Any) -> None:
        """Lease a task of a type and complete it, where its result can be found."""
        lease = await self.lease(worker, type)
        await self.under(lease, "complete", result=result, **{"artifacts": [{"type": "file", "uri": "file:///out/a.md"}],
                                                              **more})

    # The three days.

    async def tell(self) -> None:
        """Tell all of it; at the end it is now."""
        await self.ago(3 * DAY)
        await self.old_successes()
        await self.ago(2 * DAY)
        await self.failures()
        await self.ago(DAY)
        await self.holds_and_ends()
        await self.ago(5 * HOUR)
        await self.approved()
        await self.schedules()
        await self.ago(2 * HOUR)
        await self.waiting()
        await self.hostile()
        await self.ago(10 * 60)
        await self.running()
        await self.stranger()
        await self.ago(0)

    async def old_successes(self) -> None:
        """Tasks that succeeded, one of them where nobody can find its result: its duty stays open."""
        for number in range(6):
            await self.create("report.monthly", "grace" if number % 2 else "ada", json.dumps({"month": number + 1}),
                              task_summary=f"The report of month {number + 1}")
            await self.finish("reader-1", "report.monthly", {"pages": 10 + number})
        await self.create("report.lost", "ada", name="unlocatable", task_summary="The report that nobody can find")
        await self.finish("reader-2", "report.lost", "somewhere", artifacts=None)

    async def failures(self) -> None:
        """A task that failed at its third attempt, one that failed at once, and one whose worker was lost twice."""
        await self.create("page.summarize", "ada", '{"url": "https://example.org/a"}', "failed", max_attempts=3,
                          retry_backoff_seconds=1, task_summary="Summarize the page on rivers")
        for attempt in range(3):
            lease = await self.lease(f"reader-{attempt + 1}", "page.summarize")
            await self.under(lease, "progress", progress={"pages_done": attempt})
            self.served.backend.skew += 30
            error = {"message": f"the page does not answer ({attempt + 1})"}
            await self.under(lease, "fail", error=error, retryable=True)
            self.served.backend.skew += 600
        await self.create("mail.send", "grace", name="refused", max_attempts=5)
        lease = await self.lease("mailer", "mail.send")
        await self.under(lease, "fail", error={"message": "no such address", "code": 550}, retryable=False)
        await self.create("video.render", "ada", '{"frames": 9000}', "lost")
        for worker in ("gpu-1", "gpu-2"):
            lease = await self.lease(worker, "video.render", ttl=60)
            await self.under(lease, "progress", progress={"frame": 400})
            await self.ago(-self.served.backend.skew - 120)
            await self.ago(-self.served.backend.skew - 300)
        await self.finish("gpu-3", "video.render", {"file": "a.mp4"})

    async def approved(self) -> None:
        """A task whose worker has recorded steps, and has asked somebody who has answered."""
        await self.create("site.publish", "ada", '{"version": 7}', "approved", task_summary="Publish version 7")
        lease = await self.lease("deployer", "site.publish")
        for seq, value in enumerate(({"built": 7}, HOSTILE["markup"], "x" * 30_000), 1):
            await self.under(lease, "steps", seq=seq, name=f"step {HOSTILE['markup']} {seq}", value=value)
        await self.under(lease, "inputs", key="publish", message=f"Publish version 7? {HOSTILE['marks']}",
                         to={"kind": "human", "id": "grace"})
        await self.served.post(f"/v1/tasks/{lease[0]}/inputs/answer", {
            "principal_kind": "human", "principal_id": "grace", "key": "publish", "action": "accept",
            "content": {"window": "tonight", "note": HOSTILE["markup"]}})
        await self.finish("deployer", "site.publish")

    async def holds_and_ends(self) -> None:
        """A task on hold because it loses its workers, canceled ones, and a pause."""
        await self.create("ocr.scan", "ada", '{"page": 7}', "held", max_expiries=1, task_summary="Read page 7")
        await self.lease("gpu-1", "ocr.scan", ttl=60)
        await self.ago(DAY - 120)
        await self.ago(DAY - 300)
        for owner in ("ada", "grace"):
            task_id = await self.create("page.translate", owner, name="canceled")
            await self.served.post(f"/v1/tasks/{task_id}/cancel", {"reason": "no longer wanted"})
        await self.served.post("/v1/pauses", {"type": "mail.send", "reason": "the mail server moves house"})

    PLANS: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("nightly-report", 24, {"interval_seconds": DAY}), ("hourly-scan", -1, {"interval_seconds": HOUR}),
        ("weekly-clean", 90, {"interval_seconds": 7 * DAY, "enabled": False}))

    async def schedules(self) -> None:
        """A schedule that runs every day, one that is late, and one that is switched off."""
        for name, hours, more in self.PLANS:
            await self.create("schedule.create", "ada", json.dumps({"schedule_id": name}))
            lease = await self.lease("clock-1", "schedule.create")
            await self.served.post("/v1/receipts", {"receipt_type": "schedule.created", "schedule_id": name,
                                                    "task_id": lease[0], **lease[1]})
            await self.under(lease, "complete", artifacts=[{"schedule_id": name}])
            run_at = datetime.fromtimestamp(self.served.backend.now(), UTC) + timedelta(hours=hours)
            await self.served.post("/v1/schedules/report", {"worker_id": "clock-1", "schedules": [
                {"schedule_id": name, "next_run_at": run_at.isoformat(), **more}]})

    async def waiting(self) -> None:
        """Queues with work that waits: some of it needs what no worker has, some is delayed."""
        for number in range(30):
            await self.create("page.summarize", ("ada", "grace", "linus")[number % 3],
                              json.dumps({"url": f"https://example.org/{number}"}), priority=number % 3,
                              task_summary=f"Summarize page {number}")
        for number in range(8):
            await self.create("ocr.scan", "ada", json.dumps({"page": number}), "stuck",
                              requirements={"capabilities": ["gpu", "ocr"]}, task_summary=f"Read page {number}")
        await self.create("report.yearly", "grace", delay_seconds=DAY, name="delayed")
        await self.create("mail.send", "ada", name="paused", task_summary="Tell grace that it is done")

    async def hostile(self) -> None:
        """Texts that try to break the page, wherever a stranger may write one."""
        for name, text in HOSTILE.items():
            called = f"hostile.{name}" if name in UNSEEN else text      # the gate refuses names with what nobody sees
            await self.create(called, called, json.dumps({text: text}), f"hostile {name}", task_summary=text,
                              instructions=text * 3, success_criteria=text, principal_ai=called,
                              requirements={"capabilities": [called[:100]], "tags": [text]})
        markup = HOSTILE["markup"]
        lease = await self.lease(markup, markup, able=(markup,))
        await self.under(lease, "progress", progress={markup: markup})
        await self.under(lease, "complete", result={markup: [markup]}, result_summary=markup, artifacts=[
            {"type": markup, "uri": HOSTILE["address"]}, {"type": "url", "uri": "https://example.org/" + markup}])
        closing = HOSTILE["closing"]
        lease = await self.lease(closing, closing, able=(closing[:100],))
        await self.under(lease, "fail", error={"message": closing, "trace": closing * 20}, retryable=False)
        for name, payload in (("numbers", NUMBERS), ("deep", DEEP), ("long", LONG_LIST)):
            await self.create("data.check", "ada", payload, name)
        await self.served.post("/v1/pauses", {"type": markup, "reason": HOSTILE["attribute"]})
        await self.served.post("/v1/keys", {"name": markup, "principal_kind": "worker", "principal_id": closing})

    async def running(self) -> None:
        """Tasks that workers hold now, one with progress; and workers that found nothing."""
        await self.lease("reader-1", "page.summarize", count=3)
        lease = await self.lease("reader-2", "page.summarize")
        self.ids["running"] = lease[0]
        await self.under(lease, "running")
        await self.under(lease, "progress", progress={"pages_done": 2, "of": 3})
        await self.served.post("/v1/leases/claim", {"worker_id": "reader-3", "accept_types": ["page.read"]})

    async def stranger(self) -> None:
        """Another tenant with work of its own; each text holds `FOREIGN`, but for the name that operators see."""
        await self.served.post("/v1/tenants", {"tenant": OTHER_TENANT, "name": "Northwind", "tier": "paid"})
        made = await self.served.post("/v1/keys", {"tenant": OTHER_TENANT, "name": FOREIGN, "role": "admin",
                                                   "principal_kind": "human", "principal_id": FOREIGN})
        for number in range(3):
            await self.served.post("/v1/tasks", {"type": FOREIGN, "payload": FOREIGN, "agent_id": FOREIGN,
                                                 "task_summary": f"{FOREIGN} {number}"}, token=made["api_key"])
        await self.served.post("/v1/leases/claim", {"worker_id": FOREIGN}, token=made["api_key"])


def list_weekdays(hour: int) -> list[str]:
    """Return the next seven weekdays at an hour."""
    days = (datetime.now(UTC).replace(hour=hour, minute=30, second=0, microsecond=0) + timedelta(days=at)
            for at in range(1, 12))
    return [day.isoformat() for day in days if day.weekday() < 5][:7]


class Presentable(Story):
    """The three days without what tries to break a page, and without the other tenant: to be shown to people."""

    PLANS = (*Story.PLANS, ("sched-01a21870-1b3e-7cea-912f-3e6328847c37", 24, {
        "name": "weekday-digest", "task_type": "mail.digest", "cron_expr": "30 7 * * MON-FRI", "timezone": "UTC",
        "interval_seconds": 3 * DAY, "late_after_seconds": 300, "next_runs": list_weekdays(7),
        "last_run_at": datetime.now(UTC).isoformat(), "last_status": "created"}))

    async def hostile(self) -> None:
        """Nobody is hostile."""

    async def stranger(self) -> None:
        """There is nobody else."""

    async def running(self) -> None:
        """Tasks that ended in the last hour, those that workers hold now, and their signs of life."""
        for minute in range(50, 10, -1):
            await self.ago(60 * minute)
            for number in range((5, 3, 2, 0, 1, 4, 2)[minute % 7]):
                await self.create("page.read", "linus", json.dumps({"doc": 100 * minute + number}))
                await self.finish(f"reader-{number % 3 + 1}", "page.read")
        await super().running()
        await self.ago(0)
        for number in (1, 2):
            await self.served.post("/v1/leases/claim", {
                "worker_id": f"reader-{number}", "accept_types": ["page.read"], "process": f"web-{number}:4711"})


async def fill_gate(url: str, tell: type[Story] = Story) -> None:
    """Fill an empty database."""
    escalation = EscalationSettings(enabled=True, targets=(EscalationTarget(1, "human", "grace"),))
    settings = settings_for_tests(api_key=TOKEN, lease_sweep_interval_seconds=3600.0, escalation=escalation)
    gate = Gate(settings, await open_backend(url))
    async with gate.app.router.lifespan_context(gate.app):
        story = tell(Served(gate), Upkeep(gate.engine))
        await story.tell()
        for duty in ("presence", "traffic", "beat"):
            await story.upkeep.once(duty)


class Filled:
    """A filled gate in a process of its own, and what its tests ask it for over the wire."""

    def __init__(self, live: Live, *, guarded: bool = False) -> None:
        self.live, self.url, self.guarded = live, live.url, guarded

    def call(self, operation: str, *, token: str = TOKEN, **fields: Any) -> Any:
        """Call an operation."""
        with Http(self.url, token) as gate:
            return gate.call(operation, **fields)

    def find(self, **filters: Any) -> str:
        """Return the id of the first task that the filters of `list_tasks` find."""
        tasks = self.call("list_tasks", limit=1, **filters)["tasks"]
        assert tasks, f"no task: {filters}"
        return str(tasks[0]["task_id"])

    def issue(self, role: str = "admin", **more: Any) -> str:
        """Issue a key; return its text."""
        return str(self.call("issue_key", **{"name": "a test", "role": role, "principal_kind": "human",
                                             "principal_id": "grace", **more})["api_key"])
