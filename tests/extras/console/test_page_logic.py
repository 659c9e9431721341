"""What the page works out by itself, without a browser: who can take a queue, when schedules run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "extras" / "console" / "page"
NOW = "2026-11-23T12:00:00Z"
LONGEST_LINE = 120


def run(module: str, script: str) -> Any:
    """Run a script that has a module of the page as `its`, and `now` in milliseconds; return what it returns."""
    if (node := shutil.which("node")) is None:
        pytest.skip("Node is not installed: the page's own reckoning is not tested without a browser")
    code = (f"import * as its from {json.dumps((PAGE / module).as_uri())};\nconst now = Date.parse('{NOW}');\n"
            f"console.log(JSON.stringify((() => {{ {script} }})()));")
    done = subprocess.run([node, "--input-type=module", "-e", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WORKERS = """
const worker = (id, asked, claims, holding = 0) => ({worker: {kind: "worker", id}, holding,
  state: asked > 120 ? "silent" : holding ? "working" : "idle",
  claims: claims.map(([accept_types, capabilities]) => ({accept_types, capabilities}))});
const queue = {type: "ocr", capabilities: ["gpu", "ocr"]};
"""


def test_who_can_take_a_queue_is_told_by_one_of_its_claims_as_the_gate_decides() -> None:
    told = run("fit.js", WORKERS + """
        const offers = [[[[], ["gpu", "ocr", "cpu"]]], [[["ocr"], ["gpu"]]], [[["mail"], ["gpu", "ocr"]]],
          [[["mail"], []], [["ocr"], ["ocr", "gpu"]]], [[["ocr"], ["gpu"]], [[], []]], []];
        return offers.map(claims => its.findLack(worker("w", 0, claims), queue));""")

    assert told == [None, {"type": False, "missing": ["ocr"]}, {"type": True, "missing": []}, None,
                    {"type": False, "missing": ["ocr"]}, {"type": True, "missing": []}]


def test_workers_are_split_into_those_who_can_and_the_others_and_silent_ones_come_last() -> None:
    told = run("fit.js", WORKERS + """
        const all = [worker("gone", 3600, [[[], ["gpu", "ocr"]]]), worker("busy", 1, [[[], ["gpu", "ocr"]]], 2),
          worker("kept", 1, [[[], ["gpu", "ocr"]]]), worker("free", 1, [[[], ["gpu", "ocr"]]]),
          worker("other", 1, [[[], []]])];
        const pauses = [{type: null, capabilities: null, worker: "kept", whole_tenant: false}];
        const {able, others} = its.splitWorkers(all, queue, pauses);
        return [able, others].map(some => some.map(one => `${one.worker.id} ${one.state}`));""")

    assert told == [["free idle", "busy working", "kept paused", "gone silent"], ["other idle"]]


def test_a_pause_stops_its_type_or_exactly_its_lane() -> None:
    told = run("fit.js", WORKERS + """
        const pause = more => ({type: null, capabilities: null, worker: null, whole_tenant: false, ...more});
        return [{type: "ocr"}, {type: "ocr", capabilities: ["ocr", "gpu"]}, {type: "ocr", capabilities: []},
          {type: "mail"}, {worker: "w"}, {whole_tenant: true}].map(more => its.stopsQueue(pause(more), queue));""")

    assert told == [True, True, False, False, False, True]


def test_samples_are_one_for_each_five_seconds_and_the_newest_look_is_always_there() -> None:
    told = run("fit.js", """
        const samples = [];
        for (let at = 0; at <= 12000; at += 1000) its.addSample(samples, {at});
        const many = [];
        for (let at = 0; at < 500; at++) its.addSample(many, {at: at * 5000});
        return [samples.map(one => one.at), many.length, many.at(-1).at];""")

    assert told == [[0, 5000, 10000, 12000], 120, 499 * 5000]


def test_the_runs_of_a_schedule_follow_from_its_next_run_and_its_interval() -> None:
    told = run("plan.js", """
        const at = hours => new Date(now + hours * 3600000).toISOString();
        const plan = (hours, every, more = {}) => its.findRuns(
          {enabled: true, next_run_at: hours === null ? null : at(hours), interval_seconds: every, ...more},
          now, 86400);
        const hours = ({runs, count}) => [count, runs.map(run => (run - now) / 3600000)];
        return [plan(3, 28800), plan(30, 3600), plan(-1, 36000), plan(-1, null), plan(5, null), plan(null, 60),
          plan(1, 3600, {enabled: false}), plan(0.5, 60)].map(hours);""")

    assert told == [[3, [3, 11, 19]], [0, []], [2, [9, 19]], [0, []], [1, [5]], [0, []], [0, []], [1411, []]]


def test_the_runs_of_a_cron_expression_are_those_that_its_scheduler_has_reported() -> None:
    told = run("plan.js", """
        const at = hours => new Date(now + hours * 3600000).toISOString();
        const cron = (hours, more = {}) => ({enabled: true, next_run_at: at(hours[0]), interval_seconds: 3 * 86400,
          cron_expr: "30 7 * * MON-FRI", timezone: "UTC", next_runs: hours.map(at), ...more});
        const hours = ({runs, count}) => [count, runs.map(run => (run - now) / 3600000)];
        const dense = Array.from({length: 200}, (none, minute) => (minute + 1) / 60);
        return [hours(its.findRuns(cron([5, 29, 101]), now, 7 * 86400)),
          hours(its.findRuns(cron([-1, 23]), now, 86400)),
          its.findRuns(cron(dense), now, 86400).count, its.sayPlan(cron([5]), () => ""),
          its.sayPlan(cron([5], {timezone: "Europe/Berlin"}), () => ""),
          its.countMissed(cron([-30, -6, 18], {late_since: at(-30)}), now)];""")

    assert told == [[3, [5, 29, 101]], [1, [23]], 1440, "30 7 * * MON-FRI", "30 7 * * MON-FRI (Europe/Berlin)", 2]


def test_late_schedules_come_first_and_those_that_are_off_last() -> None:
    told = run("plan.js", """
        const one = (schedule_id, more) => ({schedule_id, enabled: true, next_run_at: null, interval_seconds: 3600,
          late_since: null, ...more});
        const past = "2026-11-23T08:30:00Z";
        const all = [one("off", {enabled: false}), one("none"), one("later", {next_run_at: "2026-11-25T00:00:00Z"}),
          one("soon", {next_run_at: "2026-11-24T00:00:00Z"}), one("due", {next_run_at: past}),
          one("late", {next_run_at: past, late_since: past})];
        return [its.orderSchedules(all, now).map(row => `${row.schedule_id} ${its.stateOfSchedule(row, now)}`),
          its.countMissed(all[5], now),
          [60, 3600, 86400, 604800, 300].map(every => its.sayEvery(every, length => `${length} s`))];""")

    assert told == [["late late", "due due", "soon planned", "later planned", "none unplanned", "off off"], 4,
                    ["every minute", "every hour", "every day", "every week", "every 300 s"]]


def test_a_filter_names_a_member_of_a_payload_by_its_path() -> None:
    told = run("filter.js", """
        const words = {type: text => ({type: text}), "payload.": (text, member) => ({payload: `${member}:${text}`})};
        return ["payload.doc:7 type:a", 'payload.order.Id:"A 7"', "payload:7"].map(text => its.readFilter(text, words))
          .map(({values, problems}) => [values, problems.length]);""")

    assert told == [[{"payload": "doc:7", "type": "a"}, 0], [{"payload": "order.Id:A 7"}, 0], [{}, 1]]


def test_no_line_of_the_page_is_longer_than_a_reader_takes_in() -> None:
    modules = sorted(PAGE.rglob("*.js"))
    lines = [(f"{module.relative_to(PAGE)}:{number}", line) for module in modules
             for number, line in enumerate(module.read_text(encoding="utf-8").splitlines(), 1)]
    long = [place for place, line in lines if len(line) > LONGEST_LINE]

    assert modules
    assert not long, f"break these lines, or name a part of them: {long}"
