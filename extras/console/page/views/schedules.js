// Schedules: what runs next and how often, who is late, and the next day or week as strips.

import {callAll} from "../api.js";
import {note} from "../dialogs.js";
import {h} from "../dom.js";
import {readFilter, readWho, withWord, writeWord} from "../filter.js";
import {badge, endOf, facts, say, sayThereAreMore, searchField, section, tile, who} from "../parts.js";
import {countMissed, findRuns, findTicks, nameOf, orderSchedules, sayPlan, stateOfSchedule} from "../plan.js";
import {link} from "../route.js";
import {asCommand, commandHere, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayClock, sayLength, sayWhen, secondsSince, when} from "../time.js";

const STATES = ["late", "due", "planned", "unplanned", "off"];
const SPANS = {"24h": ["The next 24 hours", 86400], "7d": ["The next 7 days", 7 * 86400]};
const MOST_STRIPS = 40;
const LAST_LABEL = 94;      // per cent of the width of a strip: further right there is no room for a label
const FIRST_SCHEDULE = {type: "schedule.create", payload: {name: "heartbeat", mode: "interval", interval_seconds: 60,
  task_template: {type: "echo", payload_template: {at: "{{run_at}}"}}}};
const noSchedules = () => ["There is no schedule. Start a scheduler: ",
  offerCommand(commandHere("asyncgate scheduler")),
  " and order one: ", offerCommand(asCommand("create_task", FIRST_SCHEDULE))];
const words = {
  owner: (text) => ({owner: readWho(text)}), scheduler: (text) => ({scheduler: text}),
  "": (text) => ({name: text.toLowerCase()}),
  is: (text) => {
    if (!STATES.includes(text)) throw new Error(`say one of ${STATES.join(", ")}`);
    return {is: text};
  }};

/** Read the schedules, or one of them with the order that it began with. */
export async function load(page) {
  const list = await callAll(page, "list_schedules", "schedules", {runs: 200});
  const [id] = page.parts;
  if (!id) return list;
  const schedule = list.rows.find((row) => row.schedule_id === id);
  return {...list, schedule, order: schedule && page.may("get_receipt") ? await readOrder(page, schedule) : null};
}

async function readOrder(page, {created_receipt_id: id}) {
  return await page.call("get_receipt", {receipt_id: id}).catch(() => null);
}

/** The schedule's name stands in the title of its page. */
export function title(page) {
  return page.parts.length ? page.data?.schedule ? nameOf(page.data.schedule) : page.parts[0] : "Schedules";
}

/** Show the schedules, or one of them. */
export function show(data, page) {
  if (!page.parts.length) return showAll(data, page);
  return data.schedule ? showOne(data, page) : [h("h1", null, say(page.parts[0])), h("p", {class: "empty"},
    "No schedule of this name is known. ", h("a", {href: link(["schedules"])}, "All schedules"))];
}

const columns = (page) => [
  {name: "name", title: "Schedule", grow: true, value: nameOf, show: (row) => say(nameOf(row))},
  {name: "task_type", title: "Creates", wide: true, show: (row) => row.task_type ? say(row.task_type) : "–"},
  {name: "state", title: "State", value: (row) => stateOfSchedule(row, page.now()),
    show: (row) => showState(row, page)},
  {name: "next_run_at", title: "Next run", show: (row) => when(row.enabled && row.next_run_at, page.now())},
  {name: "plan", title: "Runs", whole: true, value: (row) => sayPlan(row, sayLength), show: (row) => showPlan(row)},
  {name: "last_status", title: "Last run", whole: true, value: (row) => row.last_status,
    show: (row) => showLast(row, page)},
  {name: "owner", title: "Owner", widest: true, value: (row) => row.owner.id, show: (row) => who(row.owner)},
  {name: "actions", title: "", show: (row) => h("span", {class: "actions row-actions"}, showOrders(row, page, true))}];
const EXPORTED = ["schedule_id", "scheduler", "cron_expr", "timezone", "interval_seconds", "last_run_at",
  "last_task_id"];

function nameScheduler({scheduler}, page) {
  if (!page.may("list_workers")) return who(scheduler);
  return h("a", {href: link(["workers", scheduler.kind, scheduler.id])}, say(scheduler.id));
}

function showPlan(schedule) {
  const text = sayPlan(schedule, sayLength);
  return schedule.cron_expr ? h("span", {class: "code"}, say(text)) : text;
}

function showLast({last_run_at: at, last_status: status, last_task_id: task}, page) {
  if (!at && !status) return h("span", {class: "quiet"}, "–");
  const is = badge(status === "created" ? "created" : status.split(":")[0], status === "created" ? "ok" : "danger");
  return [at && [when(at, page.now()), " "], task ? h("a", {href: link(["task", task]), title: task}, is) : is];
}

const ORDERS = {
  run_schedule: ["Run now", () => true, "its scheduler creates the task"],
  pause_schedule: ["Pause", (schedule) => schedule.enabled, "its scheduler creates no more tasks"],
  resume_schedule: ["Resume", (schedule) => !schedule.enabled, "it goes on from now"]};

function showOrders(schedule, page, small) {
  const fitting = Object.entries(ORDERS).filter(([name, [, fits]]) => page.may(name) && fits(schedule));
  return fitting.map(([name, [word, , says]]) =>
    h("button", {key: name, class: small ? "small" : "", "aria-label": `${word}: ${nameOf(schedule)}`,
      onclick: () => page.act(name, {schedule_id: schedule.schedule_id}).then(() => note(`Ordered: ${says}`),
        (problem) => note(problem.message, "bad"))}, word));
}

function showState(schedule, page) {
  const state = stateOfSchedule(schedule, page.now());
  return badge(state, {late: "danger", due: "warning", planned: "ok"}[state] ?? state);
}

/** Say the next runs in words: "in 3 h, then every day". */
function sayRuns(schedule, page) {
  const {next_run_at: next} = schedule;
  const plan = sayPlan(schedule, sayLength);
  const then = plan === "–" ? "" : `, ${schedule.cron_expr ? "by" : "then"} ${plan}`;
  const says = {
    off: () => "switched off",
    late: () => `late for ${sayLength(secondsSince(schedule.late_since, page.now()))}: its scheduler is silent`,
    unplanned: () => "no run is planned",
    due: () => `was due ${sayWhen(next, page.now())}${then}`,
    planned: () => `${sayWhen(next, page.now())}${then}`};
  return says[stateOfSchedule(schedule, page.now())]();
}

function showAll({rows, more}, page) {
  const q = page.params.q ?? "";
  const {values, problems} = readFilter(q, words);
  const schedules = orderSchedules(rows.filter((schedule) => fits(schedule, values, page)), page.now());
  const count = (state) => rows.filter((schedule) => fits(schedule, {...values, is: state}, page)).length;
  const shown = columns(page);
  const states = STATES.filter((state) => count(state) || ["late", "planned"].includes(state));
  return [
    h("div", {class: "head"}, h("h1", null, "Schedules"), h("div", {class: "actions"},
      exportMenu("schedules", [...shown.filter(({name}) => name !== "actions"), ...EXPORTED.map((name) => ({name}))],
        schedules, {more}), copyMenu("list_schedules", {limit: 200}))),
    searchField(page, {hint: "owner:ada is:late", problems}),
    h("div", {class: "tiles"}, states.map((state) => tile(count(state), state, {
      href: link(["schedules"], {q: withWord(q, "is", state)}),
      tone: state === "late" && count(state) ? "danger" : ""}))),
    schedules.length > 0 && showCalendar(schedules, page),
    table(page, {name: "schedules", caption: h("span", {class: "off-screen"}, "Schedules, late ones first"),
      columns: shown, rows: schedules, key: (schedule) => schedule.schedule_id,
      open: (schedule) => link(["schedules", schedule.schedule_id]), mark: (schedule) => !schedule.enabled && "dim",
      empty: page.params.q ? "No schedule fits this filter." : noSchedules()}),
    more && sayThereAreMore(rows, "schedules")];
}

function fits(schedule, {owner, scheduler, name, is}, page) {
  return (!owner || isSame(schedule.owner, owner))
    && (!scheduler || schedule.scheduler.id === scheduler)
    && (!name || [schedule.schedule_id, schedule.name, schedule.task_type]
      .some((text) => text?.toLowerCase().includes(name)))
    && (!is || stateOfSchedule(schedule, page.now()) === is);
}

// A filter may name a principal without its kind.
function isSame(principal, {kind = principal.kind, id}) {
  return principal.kind === kind && principal.id === id;
}

// The calendar: a strip for each schedule, with a mark for each run.

function showCalendar(schedules, page, {alone = false} = {}) {
  const chosen = page.params.span in SPANS ? page.params.span : "24h";
  const [label, span] = SPANS[chosen];
  const planned = alone ? schedules : schedules.filter((schedule) => schedule.enabled);
  const actions = Object.entries(SPANS).map(([name, [says]]) => h("button",
    {class: "chip", title: says, "aria-pressed": String(name === chosen),
      onclick: () => page.go({span: name === "24h" ? null : name})}, name));
  const hidden = planned.length - MOST_STRIPS;
  return section(label, {actions},
    h("ul", {class: "plain calendar"}, showAxis(page.now(), span),
      planned.slice(0, MOST_STRIPS).map((schedule) => showStrip(schedule, page, span))),
    hidden > 0 && h("p", {class: "quiet"}, `${hidden} more are in the list below.`),
    h("p", {class: "quiet"}, "Left is now. Times are of this browser."));
}

function showAxis(now, span) {
  const ticks = findTicks(now, span).map((tick) => [tick, placeOf(tick, now, span)]);
  return h("li", {class: "axis", "aria-hidden": "true", key: "axis"}, h("span", null), h("div", {class: "strip"},
    ticks.filter(([, place]) => place < LAST_LABEL)
      .map(([tick, place]) => h("span", {style: {left: `${place}%`}}, sayTick(tick, span)))));
}

function placeOf(time, now, span) {
  return (100 * (time - now) / 1000 / span).toFixed(2);
}

function sayTick(tick, span) {
  const time = new Date(tick);
  if (span <= 2 * 86400) return `${String(time.getHours()).padStart(2, "0")}:00`;
  return `${time.toLocaleDateString(undefined, {weekday: "short"})} ${time.getDate()}`;
}

function showStrip(schedule, page, span) {
  const now = page.now();
  const {runs, count, first} = findRuns(schedule, now, span);
  const late = schedule.late_since !== null;
  const bar = count > runs.length;
  const left = bar ? placeOf(first, now, span) : 0;
  return h("li", {key: schedule.schedule_id, class: late ? "late" : null},
    h("a", {href: link(["schedules", schedule.schedule_id])}, say(nameOf(schedule))),
    h("div", {class: "strip", role: "img", "aria-label": sayStrip(schedule, count, page)},
      late && h("span", {class: "missed", title: sayRuns(schedule, page)}),
      bar && h("span", {class: "many", style: {left: `${left}%`, width: `${100 - left}%`}, title: `${count} runs`}),
      runs.map((run) => h("span",
        {class: "mark", style: {left: `${placeOf(run, now, span)}%`}, title: sayClock(run, now)}))),
    h("span", {class: "quiet"}, sayRuns(schedule, page)));
}

function sayStrip(schedule, count, page) {
  return `${sayRuns(schedule, page)}; ${count} run${count === 1 ? "" : "s"} in this time`;
}

// One schedule.

function showOne({schedule, order}, page) {
  const missed = countMissed(schedule, page.now());
  const owned = {principal_kind: schedule.owner.kind, principal_id: schedule.owner.id};
  return [
    h("div", {class: "head"}, h("h1", null, say(nameOf(schedule))), showState(schedule, page),
      h("div", {class: "actions"}, showOrders(schedule, page), copyMenu("list_schedules", owned))),
    h("p", null, h("a", {href: link(["schedules"])}, "Schedules"), " · ", sayRuns(schedule, page)),
    missed > 0 && h("p", {class: "warning banner"}, h("strong", null, `${missed} runs did not come. `),
      "Look whether its scheduler runs: ", nameScheduler(schedule, page), "."),
    schedule.enabled && showCalendar([schedule], page, {alone: true}),
    section("What is known", {}, showFacts(schedule, order, page))];
}

function showFacts(schedule, order, page) {
  const list = (view, word, {kind, id}, text) =>
    h("a", {href: link([view], {q: writeWord(word, `${kind}:${id}`)})}, text);
  const runs = schedule.enabled ? schedule.next_runs.slice(0, 5) : [];
  return facts([["Id", h("span", {class: "code"}, say(schedule.schedule_id))],
    ["Creates", schedule.task_type && h("a", {href: link(["tasks"], {q: writeWord("type", schedule.task_type)})},
      say(schedule.task_type))],
    ["Runs", showPlan(schedule)],
    ["Next runs", runs.length ? h("ul", {class: "plain"}, runs.map((run) => h("li", {key: run},
      sayClock(run, page.now()), h("span", {class: "quiet"}, " ", sayWhen(run, page.now()))))) : null],
    ["Last run", showLast(schedule, page)],
    ["Said", schedule.last_status !== "created" && schedule.last_status ? say(schedule.last_status) : null],
    ["Late since", schedule.late_since && when(schedule.late_since, page.now())],
    ["Owner", who(schedule.owner)], ["Scheduler", nameScheduler(schedule, page)],
    ["Order", order?.task_id && h("a", {href: link(["task", order.task_id])}, `task ${endOf(order.task_id)}`)],
    ["Created", order && when(order.created_at, page.now())],
    ["Receipt", h("span", {class: "code"}, schedule.created_receipt_id)],
    ["Tasks", h("span", null, list("tasks", "owner", schedule.scheduler, "those that the scheduler created"), " · ",
      list("tasks", "owner", schedule.owner, "those of its owner"))],
    ["Owed", page.may("list_obligations") && list("inbox", "to", schedule.owner, "what is owed to its owner")]]);
}
