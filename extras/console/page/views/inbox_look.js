// What needs a look: queues that nobody can take, pauses, tasks on hold, anomalies, escalations and lost leases.
// One entry tells all of one task, and goes when its receipts are acknowledged or the task is over.
// A filter for one owner keeps the queues and pauses: they concern everybody's tasks.

import {session} from "../api.js";
import {note} from "../dialogs.js";
import {h} from "../dom.js";
import {isType, withWord} from "../filter.js";
import {badge, endOf, say, section, taskLink, tile, who} from "../parts.js";
import {resumeButton} from "../pausing.js";
import {link} from "../route.js";
import {when} from "../time.js";
import {isGivenBack, sayHold} from "../say.js";

const DAY_MS = 86400000;
const PAGES_AT_ONCE = 5;
const FEW = 5;
const LOOKED_UP = 30;
const ACKNOWLEDGED = "receipt.acknowledged";
const KINDS = ["anomaly", "on hold", "escalation", "nobody can", "paused", "lost lease"];       // the gravest first
const RECEIPTS = {"system.anomaly": "anomaly", "task.escalated": "escalation", "lease.expired": "lost lease"};
const TONES = {anomaly: "danger", escalation: "danger", "lost lease": "late"};
const ANOMALIES = {
  success_without_locatability: () => "It succeeded without saying where its result is.",
  deadline_passed: () => "Its deadline has passed.",
  lease_expired_often: ({expiries}) => `Its lease was lost ${times(expiries)}.`,
  lease_renewed_often: ({renewals}) => `Its lease was renewed ${times(renewals)}.`,
  attempts_spent_but_queued: () => "Its attempts are spent, and still it waits.",
  waiting_too_long: ({waits_seconds: waits, usual_seconds: usual}) =>
    `It has been waiting for ${Math.round(waits)} s; others of its queue had waited for ${Math.round(usual)} s.`,
  schedule_late: ({schedule_id: schedule}) => `Schedule ${schedule ?? ""} is late: its scheduler is silent.`,
  task_held: ({expiries, held, workers}) => held === "lease_expiries"
    ? `It was put on hold: its lease was lost ${times(expiries)}, by ${(workers ?? []).join(", ")}.`
    : `It was put on hold: ${sayHold(held)}.`,
};
const seen = new Set();     // what was acknowledged here, until the gate says so

function times(number) {
  return number === 1 ? "once" : `${number} times`;
}

// What is read.

async function readReceipts(page, whose) {
  const local = page.local.receipts ??= {byId: new Map(), ends: {}, since: await findYesterday(page)};
  const types = [...Object.keys(RECEIPTS), ...(session.you.role === "admin" ? [ACKNOWLEDGED] : [])];
  await Promise.all(types.map((type) => readNew(page, local, type, whose)));
  return [...local.byId.values()];
}

// Receipts are read from a given one on, so this finds one that is a day old: that of a task of yesterday.
async function findYesterday(page) {
  if (!page.may("list_tasks")) return undefined;
  const yesterday = new Date(page.now() - DAY_MS).toISOString();
  const {tasks} = await page.call("list_tasks", {created_before: yesterday, limit: 1});
  return tasks[0]?.obligation_receipt_id;
}

async function readNew(page, local, type, whose) {
  for (let at = 0; at < PAGES_AT_ONCE; at++) {
    const ask = {receipt_type: type, limit: 200, since_receipt_id: local.ends[type] ?? local.since};
    const {receipts, cursor, next_cursor: next} = await page.call("list_receipts", {...ask, ...whose});
    for (const receipt of receipts) {
      if (type === ACKNOWLEDGED) seen.add(receipt.body?.receipt_id ?? receipt.parents[0]);
      else if (!isGivenBack(receipt)) local.byId.set(receipt.receipt_id, receipt);
    }
    local.ends[type] = cursor ?? local.ends[type];
    if (!next) return;
  }
}

function knowReceipts(page, known, me) {
  if (!page.may("list_receipts")) return {};
  const whose = session.you.role === "admin" || !me ? {} : {principal_kind: me.kind, principal_id: me.id};
  return known(page, "receipts", () => readReceipts(page, whose), 3000, 120000);
}

function knowHeld(page, known, queues) {
  if (!page.may("list_tasks") || (page.may("list_queues") && !queues?.some((queue) => queue.held))) return [];
  const read = () => page.call("list_tasks", {held: true, limit: 50});
  return known(page, "held", read, 3000, 60000).value?.tasks ?? [];
}

/** Collect what needs a look: mine first, then the gravest. */
function collect(page, {values, me, known, about, queues, pauses}) {
  const receipts = knowReceipts(page, known, me);
  const byTask = new Map();
  for (const task of knowHeld(page, known, queues)) {
    add(byTask, task.task_id, {kind: "on hold", at: task.updated_at, to: task.created_by, task, says: tellHold(task)});
  }
  for (const receipt of receipts.value ?? []) {
    if (seen.has(receipt.receipt_id) || Date.parse(receipt.created_at) < page.now() - DAY_MS) continue;
    add(byTask, receipt.task_id ?? receipt.receipt_id,
      {kind: RECEIPTS[receipt.receipt_type], at: receipt.created_at, to: receipt.to, receipt, says: tell(receipt)});
  }
  const idle = (queues ?? []).filter((queue) => queue.claimable && !queue.workers);
  const isMine = (entry) => Boolean(me && entry.to?.some((to) => to.kind === me.kind && to.id === me.id));
  const entries = [...idle.map(showIdle), ...pauses.map(showPause), ...byTask.values()]
    .map((entry) => ({...entry, mine: isMine(entry)}))
    .filter((entry) => fits(entry, values, about, page)).sort(compare)
    .filter((entry, at) => at >= LOOKED_UP || !isOver(entry, about, page));
  const unread = page.may("list_receipts") && !receipts.value;
  return {problem: receipts.problem, unread, entries};
}

function compare(first, other) {
  return other.mine - first.mine || KINDS.indexOf(first.kinds[0]) - KINDS.indexOf(other.kinds[0])
    || (first.at < other.at ? 1 : -1);
}

function add(byTask, key, {kind, at, to, task, receipt, says}) {
  const entry = byTask.get(key)
    ?? {key, kind, kinds: [], at, to: [], receipts: [], task_id: receipt ? receipt.task_id : key, says};
  if (!entry.kinds.includes(kind)) entry.kinds.push(kind);
  entry.kinds.sort((first, second) => KINDS.indexOf(first) - KINDS.indexOf(second));
  if (KINDS.indexOf(kind) <= KINDS.indexOf(entry.kind)) Object.assign(entry, {says, kind});
  if (to && !entry.to.some((other) => other.kind === to.kind && other.id === to.id)) entry.to.push(to);
  if (receipt) entry.receipts.push(receipt.receipt_id);
  Object.assign(entry, {at: at > entry.at ? at : entry.at, task: task ?? entry.task});
  byTask.set(key, entry);
}

function showIdle({queue_id: key, type, capabilities, claimable}) {
  const needs = capabilities.length ? ` and offers ${capabilities.join(" and ")}` : "";
  const wait = `${claimable} ${claimable === 1 ? "waits" : "wait"}`;
  return {key, kinds: ["nobody can"], type, at: "",
    says: `${wait}: no worker that takes ${type}${needs} has asked for work lately.`,
    href: link(["tasks"], {q: withWord("status:queued", "type", type)})};
}

function showPause(pause) {
  const what = pause.whole_tenant ? "Everything" : pause.worker ? `Worker ${pause.worker}` : pause.type;
  return {key: `pause ${what} ${pause.capabilities}`, kinds: ["paused"], type: pause.type, at: pause.since, title: what,
    pause: pause,
    says: `Workers get none of it${pause.reason ? `: ${pause.reason}` : "."}`, href: link(["queues"])};
}

function tellHold({held, expiries}) {
  return held !== "lease_expiries" ? `It is on hold: ${sayHold(held)}.`
    : `Its lease was lost ${times(expiries)}: nobody gets it until it is released.`;
}

function tell({receipt_type: type, body, to}) {
  if (type === "lease.expired") return `${body?.previous_worker_id ?? "Its worker"} lost its lease.`;
  if (type === "task.escalated") {
    const isLost = body?.escalation_reason === "lease_expired";
    return `It was proposed to ${to.id}: ${isLost ? "its worker lost the lease" : "its attempts are spent"}.`;
  }
  const text = ANOMALIES[body?.kind];
  if (text) return text(body.details ?? {});
  return `${String(body?.kind ?? "An anomaly").replaceAll("_", " ")}. ${body?.recommended_action ?? ""}`;
}

function fits({to, type, task_id: id}, values, about, page) {
  if (values.to && to && !to.some((owner) => owner.id === values.to.id && owner.kind === values.to.kind)) return false;
  return !values.type || isType(type ?? (id && about(page, id).type), values.type);
}

// A task that was canceled, or is done and owed no more, needs nobody's look.
function isOver({task_id: id}, about, page) {
  const {status, obligation_open: owed} = id ? about(page, id) : {};
  return (status === "succeeded" || status === "canceled") && !owed;
}

// What is drawn.

/** Show what needs a look. */
export function look(page, context) {
  const {problem, unread, entries} = page.local.looked = collect(page, context);
  const all = page.params.look === "all";
  const shown = all ? entries : entries.slice(0, FEW);
  return section("Needs a look", {id: "look"}, problem && h("p", {class: "problem"}, problem.message),
    entries.length ? h("ol", {class: "cases"}, shown.map((entry) => showEntry(page, entry, context)))
      : !problem && h("p", {class: "empty"}, unread ? "Loading …" : sayNothing()),
    entries.length > FEW && h("button", {onclick: () => page.go({look: all ? null : "all"})},
      all ? "Show fewer" : `Show all ${entries.length}`));
}

function sayNothing() {
  const whose = session.you.role === "admin" ? "Nothing" : "Nothing of yours";
  return `${whose}: no anomaly, no hold, no escalation, and no lost lease in 24 hours.`;
}

/** Show how much needs a look; it leads there. */
look.tile = (page) => {
  const {entries, unread} = page.local.looked ?? {unread: true};
  const count = unread && !entries?.length ? undefined : entries.length;
  return tile(count ?? "–", count === 1 ? "needs a look" : "need a look", {tone: count ? "warning" : "",
    href: count > 0 && link(["inbox"], {...page.params, look: "all"}), onclick: leap});
};

function leap() {
  const place = document.getElementById("look");
  place.querySelector("a, button")?.focus({preventScroll: true});
  place.scrollIntoView();
}

function showEntry(page, entry, {about, deeds}) {
  const task = entry.task_id ? about(page, entry.task_id) : {};
  const named = task.task_summary || task.type || (entry.task_id && endOf(entry.task_id));
  const name = entry.title ?? entry.type ?? (named || "The gate");
  const title = entry.task_id ? taskLink(entry.task_id, say(name))
    : entry.href ? h("a", {href: entry.href}, say(name)) : say(name);
  return h("li", {key: entry.key},
    h("p", {class: "case-head"}, entry.kinds.map((kind) => [badge(kind, TONES[kind] ?? "warning"), " "]),
      entry.mine && [badge("for you", "note"), " "], h("strong", null, title),
      h("span", {class: "quiet"}, entry.to?.map((to) => [who(to), " "]), entry.at && when(entry.at, page.now()))),
    h("p", null, say(entry.says)),
    h("div", {class: "actions"}, entry.task_id && deeds(page, entry.task_id, name),
      entry.pause && resumeButton(page, entry.pause, name),
      entry.receipts?.length > 0 && page.may("ack_receipt") && h("button",
        {class: "small", "aria-label": `Acknowledge: ${name}`, title: "It changes nothing else",
          onclick: () => acknowledge(page, entry)}, "Acknowledge")));
}

async function acknowledge(page, {receipts}) {
  try {
    for (const id of receipts) {
      await page.act("ack_receipt", {receipt_id: id});
      seen.add(id);
    }
    note("Acknowledged");
  } catch (problem) {
    note(problem.message, "bad");
  }
  page.redraw();
}
