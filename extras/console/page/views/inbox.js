// Inbox: what is owed to whom, oldest first, why the oldest waits, what waits for me, and what needs a look.

import {callAll, session} from "../api.js";
import {note, openDialog} from "../dialogs.js";
import {h} from "../dom.js";
import {isType, readAge, readFilter, readWho, withWord} from "../filter.js";
import {Pages} from "../pages.js";
import {endOf, filterChips, say, searchField, section, taskBadge, taskLink, tile, who} from "../parts.js";
import {link} from "../route.js";
import {asCommand, copyMenu, FIRST_TASK, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayLength, secondsSince, when} from "../time.js";
import {keepTypes, stopType, typeChips} from "../types.js";
import {isReleasable, sayNumber} from "../say.js";
import {look} from "./inbox_look.js";

const PAGE = 200;
const PAGE_ASKING = 50;
const PAGES_FOR_TYPE = 5;
const EXPLAINED = 4;
const LOOKED_THROUGH = 100;
const ABOUT_MS = 120000;     // how long what is known of a task stays good if nothing happens
const CALM_MS = 4000;
const FEW_TASKS = 5;        // so few are read one by one
const NEIGHBOUR_MS = 10000;
const PAGES_OF_SPAN = 3;
const ID = /^(?=.*\d)[0-9a-f-]{6,36}$/i;
const LIVE = ["queued", "leased", "running"];
const KINDS = ["agent", "human", "service", "worker", "system"];

/** Return whom the page stands for, if that is known. */
function me() {
  const {bound, principal_kind: kind, principal_id: id} = session.you;
  return bound ? {kind, id} : session.actor;
}

// Whoever sees only what is owed to one principal has nobody to choose.
function wordsFor(page) {
  return {
    ...(page.may("list_obligations") && {to: (text) => ({to: text === "me" ? me() ?? {id: "me"} : readWho(text)})}),
    type: (text) => ({type: text}),
    "": (text) => {
      if (ID.test(text)) throw new Error("ids are found in the view Tasks");
      throw new Error(`say to:${text} for whom something is owed to, or type:${text}`);
    },
    age: (text) => {
      const {over, seconds} = readAge(text);
      if (!over) throw new Error("what is owed begins with the oldest: say age:>1h");
      return {olderThan: seconds};
    },
  };
}

const MORE = [{name: "task_id"}, {name: "schedule_id"}, {name: "receipt_id"}];     // columns that only an export has
const nameOf = ({kind, id}) => `${kind}:${id}`;

/** Read what is owed; everything beside it is read in the background. */
export async function load(page) {
  const local = page.local;
  const q = page.params.q ?? "";
  const {values, problems} = readFilter(q, wordsFor(page));
  if (!problems.length && values.to && !values.to.kind) Object.assign(values, {to: await findKind(page, values.to.id)});
  const key = JSON.stringify(values);
  if (!problems.length) {
    const same = local.key === key;
    const pages = same ? local.pages : new Pages(reader(page, values), (row) => row.receipt_id);
    await pages.look({}, same ? local["table owed"] : {});
    if (values.type) await readType(page, pages, values.type);
    Object.assign(local, {key, values, pages});     // what was shown stays until the new rows are there
  }
  return {values: local.values ?? {}, problems};
}

// A name without its kind is found among those to whom something is owed.
async function findKind(page, id) {
  if (!page.may("list_obligations")) return {kind: "agent", id};
  const known = page.local[`kind of ${id}`];
  if (known) return known;
  const owed = await Promise.all(KINDS.map((kind) => page.call("list_obligations",
    {principal_kind: kind, principal_id: id, limit: 1})));
  const kinds = KINDS.filter((kind, at) => owed[at].obligations.length);
  if (kinds.length) page.local[`kind of ${id}`] = {kind: kinds[0], id, others: kinds.slice(1)};
  return page.local[`kind of ${id}`] ?? {kind: "agent", id};
}

function reader(page, {to, olderThan}) {
  return async (ask, cursor) => {
    const {rows, next} = page.may("list_obligations") ? await readAll(page, to, cursor) : await readOwn(page, cursor);
    const isOld = (row) => olderThan === undefined || secondsSince(row.created_at, page.now()) > olderThan;
    const old = rows.filter(isOld);
    return {rows: old.map(nameSchedule), next: old.length === rows.length ? next : null};
  };
}

// What a schedule owes is not over with the task that ordered it, so the row is not that task's.
function nameSchedule(row) {
  return row.schedule_id ? {...row, task_id: null} : row;
}

async function readAll(page, to, cursor) {
  const {obligations, next_cursor: next} = await page.call("list_obligations", {...callOf(to), limit: PAGE, cursor});
  return {rows: obligations, next};
}

function callOf(to) {
  return to ? {principal_kind: to.kind, principal_id: to.id} : {};
}

async function readOwn(page, cursor) {
  if (!me()) return {rows: [], next: null};
  const ask = {...callOf(me()), limit: PAGE, since_receipt_id: cursor};
  const {open_obligations: rows, cursor: next} = await page.call("list_open_obligations", ask);
  return {rows, next: rows.length === PAGE ? next : null};
}

// Obligations do not say the type of their task, but the tasks of a type in the same time do.
async function readType(page, pages, type) {
  for (let at = 1; at < PAGES_FOR_TYPE && !pages.done; at++) await pages.more();
  const rows = pages.rows.filter((row) => row.task_id);
  if (!rows.length) return;
  const ask = {...(type.endsWith("*") ? {type_prefix: type.slice(0, -1)} : {type}), limit: PAGE,
    created_after: rows[0].created_at,
    created_before: new Date(Date.parse(rows.at(-1).created_at) + 2).toISOString()};
  let cursor;
  for (let at = 0; at < PAGES_FOR_TYPE; at++) {
    const {tasks, next_cursor: next} = await page.call("list_tasks", {...ask, cursor});
    for (const task of tasks) keepTask(page, task.task_id, task);
    if (!(cursor = next)) return;
  }
}

function sayOwed(some) {
  const sum = some.reduce((total, owed) => total + owed.open, 0);
  return `${sayNumber(sum)}${some.some((owed) => owed.at_least) ? "+" : ""}`;
}

// The gate counts what is owed to whom: a list has only its beginning.
function readOwed(page) {
  const read = () => page.call("list_obligations", {limit: 1, count: true});
  return page.may("list_obligations") ? known(page, "owed", read).value?.owed_to : null;
}

export function concerns(event, page) {
  if (event.type === "worker.seen" || event.type === "progress") return false;
  page.local.heard = performance.now();
  return true;
}

// What is read in the background.

/** Return what is known, and read it again in the background if it is old.
 *
 * It is old after `calm` ms if something has happened since it was read, or else after `idle` ms.
 */
function known(page, name, read, calm = CALM_MS, idle = 60000) {
  const entry = (page.local.known ??= new Map()).get(name) ?? {at: -Infinity};
  page.local.known.set(name, entry);
  const age = performance.now() - entry.at;
  if (entry.busy || (age < idle && !(age > calm && (page.local.heard ?? 0) > entry.at))) return entry;
  Object.assign(entry, {busy: true, at: performance.now()});
  read().then((value) => Object.assign(entry, {value, problem: null}), (problem) => Object.assign(entry, {problem}))
    .finally(() => {
      entry.busy = false;
      page.redraw();
    });
  return entry;
}

/** Take everything that is known for old. */
export function forget(page) {
  page.local.heard = performance.now();
  for (const entry of page.local.known?.values() ?? []) entry.at = -Infinity;
}

/** Return a task as far as it is known; what is missing or may have changed is read, together with others. */
function about(page, id) {
  const local = page.local;
  const entry = (local.about ??= new Map()).get(id);
  const age = performance.now() - (entry?.at ?? -Infinity);
  if (page.may("get_task") && (age > ABOUT_MS || (age > CALM_MS && (local.heard ?? 0) > entry.at))) {
    local.wanted ??= new Set();
    if (!local.wanted.size) queueMicrotask(() => readWanted(page));
    local.wanted.add(id);
  }
  return entry?.task ?? {};
}

// Payloads and results would be too much to keep.
function keepTask(page, id, task) {
  const {type, status, held, task_summary, obligation_open, problem} = task ?? {};
  const kept = task && {type, status, held, task_summary, obligation_open, problem};
  (page.local.about ??= new Map()).set(id, {task: kept, at: performance.now()});
}

async function readWanted(page) {
  const ids = [...page.local.wanted].sort();
  page.local.wanted = new Set();
  for (const id of ids) keepTask(page, id, page.local.about.get(id)?.task);     // asked for once
  const missing = new Set(ids);
  try {
    if (page.may("list_tasks")) for (const span of listSpans(ids)) await readSpan(page, missing, span);
    await Promise.all([...missing].map((id) => page.call("get_task", {task_id: id})
      .then((task) => keepTask(page, id, task), (problem) => keepTask(page, id, {problem}))));
  } catch (problem) {
    if (problem.name !== "AbortError") note(problem.message, "bad");
  }
  page.redraw();
}

// The ids of tasks tell when they were made.
const timeOf = (id) => parseInt(id.slice(0, 8) + id.slice(9, 13), 16);

/** Return the ids of neighbouring tasks together, where there are enough of them to read a list. */
export function listSpans(ids) {
  const spans = [];
  for (const id of ids) {
    const span = spans.at(-1);
    if (span && timeOf(id) - timeOf(span.at(-1)) < NEIGHBOUR_MS) span.push(id);
    else spans.push([id]);
  }
  return spans.filter((span) => span.length > FEW_TASKS);
}

async function readSpan(page, missing, span) {
  const ask = {created_after: new Date(timeOf(span[0])).toISOString(),
    created_before: new Date(timeOf(span.at(-1)) + 2).toISOString()};
  let cursor;
  for (let at = 0; at < PAGES_OF_SPAN && span.some((id) => missing.has(id)); at++) {
    const {tasks, next_cursor: next} = await page.call("list_tasks", {...ask, limit: PAGE, cursor});
    for (const task of tasks) {
      missing.delete(task.task_id);
      keepTask(page, task.task_id, task);
    }
    if (!(cursor = next)) return;
  }
}

function readQueues(page) {
  const read = () => callAll(page, "list_queues", "queues");
  return page.may("list_queues") ? known(page, "queues", read, CALM_MS, 30000).value : null;
}

function readPauses(page) {
  const read = () => page.call("list_pauses");
  return page.may("list_pauses") ? known(page, "pauses", read).value?.pauses ?? [] : [];
}

function why(page, id) {
  return known(page, `why ${id}`, () => page.call("explain_task", {task_id: id}), 5000, 120000);
}

// What is drawn.

/** Show the inbox. */
export function show({values, problems}, page) {
  const local = page.local;
  const {type} = values;
  const rows = rowsOf(local, values);
  const queues = readQueues(page)?.rows;
  const pauses = readPauses(page);
  const looked = look(page, {values, me: me(), known, about, deeds: taskDeeds, queues, pauses});
  const q = page.params.q ?? "";
  const exported = [...columnsOf(page).filter(({name}) => name !== "why"), ...MORE];
  const hint = `${page.may("list_obligations") ? "to:ada " : ""}type:ocr* age:>1h`;
  return [
    h("div", {class: "head", key: "head"}, h("h1", null, "Inbox"),
      h("div", {class: "actions"}, exportMenu("owed", exported, rows, {more: local.pages && !local.pages.done}),
        copyMenu(...callShown(page, values)))),
    showTiles(page, rows),
    showQuestions(page, rows),
    h("div", {class: "stack", key: "filter"}, searchField(page, {hint, problems}),
      showPeople(page, q, values), typeChips(page, q, type, keepTypes(local, queues)),
    q && h("p", {class: "quiet"}, "The numbers in these buttons count everything, whatever the filter says.")),
    rows.length > 0 && type && !type.endsWith("*") && stopType(page, type, pauses, tasksOf(page, values)),
    h("div", {class: "columns", key: "why"}, showOldest(page, rows), looked),
    showOwed(page, rows, values)];
}

// What is owed to somebody are the tasks that they created.
function tasksOf(page, {type, to, olderThan}) {
  return {type, ...(to && {created_by: to.id, created_by_kind: to.kind}),
    ...(olderThan !== undefined && {created_before: new Date(page.now() - olderThan * 1000).toISOString()})};
}

function rowsOf({pages, about: tasks}, {type}) {
  const rows = pages?.rows ?? [];
  return type ? rows.filter((row) => isType(tasks?.get(row.task_id)?.task?.type, type)) : rows;
}

function callShown(page, {to}) {
  return page.may("list_obligations") ? ["list_obligations", {...callOf(to), limit: PAGE}]
    : ["list_open_obligations", {...callOf(me()), limit: PAGE}];
}

function showTiles(page, rows) {
  const {pages} = page.local;
  const mine = me();
  const age = rows.length ? secondsSince(rows[0].created_at, page.now()) : null;
  const owed = readOwed(page);
  const isWhole = owed && !page.params.q;
  const held = readQueues(page);
  const count = held && held.rows.reduce((sum, queue) => sum + queue.held, 0);
  return h("div", {class: "tiles", key: "tiles"},
    tile(isWhole ? sayOwed(owed) : `${sayNumber(rows.length)}${pages && !pages.done ? "+" : ""}`,
      page.params.q ? "owed, as filtered" : sayWhose(page)),
    tile(age === null ? "–" : sayLength(age), "the oldest", {tone: age > 3600 ? "warning" : ""}),
    owed && mine && tile(sayOwed(owed.filter(({to}) => nameOf(to) === nameOf(mine))), `owed to ${mine.id}`,
      {href: link(["inbox"], {q: withWord("", "to", nameOf(mine))})}),
    held && tile(`${sayNumber(count)}${held.more ? "+" : ""}`, page.params.q ? "on hold in all" : "on hold",
      {href: link(["tasks"], {q: "held:yes"}), tone: count ? "warning" : ""}),
    look.tile(page));
}

// Whoever sees only what is owed to one principal cannot tell what is owed to others.
function sayWhose(page) {
  return page.may("list_obligations") ? "owed in all" : me() ? `owed to ${me().id}` : "owed";
}

function showPeople(page, q, {to}) {
  const people = (readOwed(page) ?? []).map((owed) => [nameOf(owed.to), sayOwed([owed])]);
  if (!page.may("list_obligations") || (!people.length && !to)) return null;
  const named = to ? nameOf(to) : null;
  const shown = people.slice(0, 8);
  const isShown = ([name]) => shown.some(([other]) => other === name);
  if (to && !isShown([named])) shown.unshift([named, ""]);
  const others = (to?.others ?? []).map((kind) => [`${kind}:${to.id}`, ""]).filter((choice) => !isShown(choice));
  const showCount = (count) => count !== "" && h("span", {class: "quiet"}, ` ${count}`);
  const choices = [...shown, ...others].map(([name, count]) => [
    [say(name), showCount(count)], withWord(q, "to", name), name === named]);
  return filterChips(page, "Owed to", [["everybody", withWord(q, "to", null), !to], ...choices]);
}

// One case for all that wait alike: of the same type, in the same state.
function listCases(page, rows) {
  const cases = new Map();
  for (const row of rows.slice(0, LOOKED_THROUGH)) {
    const {type, status, held} = row.task_id ? aboutRow(page, row) : {};
    if (!status) continue;
    const key = `${type} ${status} ${held}`;
    const match = cases.get(key);
    if (match) match.more += 1;
    else cases.set(key, {key, row, type, status, held, more: 0});
  }
  return [...cases.values()].slice(0, EXPLAINED);
}

function showOldest(page, rows) {
  const cases = page.may("explain_task") ? listCases(page, rows) : [];
  if (!cases.length) return null;
  return section("Why the oldest are still owed", {},
    h("ol", {class: "cases"}, cases.map((example) => showCase(page, example))));
}

function showCase(page, {key, row, type, status, held, more}) {
  const {value, problem} = why(page, row.task_id);
  const name = nameTask(page, row);
  const alike = [withWord("", "type", type), `status:${status}`, held && "held:yes"].filter(Boolean).join(" ");
  return h("li", {key},
    h("p", {class: "case-head"}, taskBadge({status, held}), h("strong", null, taskLink(row.task_id, say(name))),
      h("span", {class: "quiet"}, who(row.to), " for ", sayLength(secondsSince(row.created_at, page.now())))),
    h("p", {class: problem ? "problem" : ""}, value ? say(value.summary) : problem ? problem.message : "…"),
    h("div", {class: "actions"}, taskDeeds(page, row.task_id, name),
      more > 0 && h("a", {href: link(["tasks"], {q: alike})}, `and ${sayNumber(more)} more of `, say(type))));
}

function nameTask(page, row) {
  if (!row.task_id) return `schedule ${row.schedule_id}`;
  if (isQuestion(row) && row.body?.message) return row.body.message;
  const {task_summary: summary, type, problem} = about(page, row.task_id);
  return summary || type || row.body?.task_summary || row.body?.type
    || (problem ? problem.message : endOf(row.task_id));
}

function columnsOf(page) {
  const task = (row) => row.task_id ? aboutRow(page, row) : {};
  const kept = (row) => page.local.about?.get(row.task_id)?.task ?? {};     // an export reads nothing more
  const typeOf = (row) => task(row).type ?? row.body?.type ?? (row.task_id ? "–" : "schedule");
  return [
    {name: "task_summary", title: "What", grow: true, value: (row) => kept(row).task_summary,
      show: (row) => say(nameTask(page, row))},
    {name: "to", title: "Owed to", value: (row) => nameOf(row.to), show: (row) => who(row.to)},
    {name: "type", title: "Type", wide: true, value: (row) => kept(row).type, show: (row) => say(typeOf(row))},
    {name: "status", title: "Status", value: (row) => kept(row).status,
      show: (row) => task(row).status ? taskBadge(task(row)) : "–"},
    {name: "created_at", title: "Since", show: (row) => when(row.created_at, page.now())},
    {name: "why", title: "Why", wide: true, value: () => undefined,
      show: (row) => row.task_id && page.may("explain_task") && h("button",
        {class: "small", "aria-label": `Why ${nameTask(page, row)} waits`, onclick: () => explain(page, row)}, "Why?")},
  ];
}

function showOwed(page, rows, {to, type}) {
  const {pages} = page.local;
  if (!pages) return null;
  const read = () => pages.more()?.then(() => page.redraw(), (problem) => note(problem.message, "bad"));
  const columns = [...columnsOf(page),
    {name: "deeds", title: "", show: (row) => h("span", {class: "actions row-actions"}, deeds(page, row))}];
  return h("div", {key: "owed"}, h("h2", {class: "list-title"}, "Owed, the oldest first"),
    table(page, {name: "owed", columns, rows, key: (row) => row.receipt_id, more: read,
      open: (row) => !row.task_id ? link(["schedules", row.schedule_id])
      : !isQuestion(row) || reads(page, row.task_id) ? link(["task", row.task_id]) : null,
      empty: sayEmpty(page, to, type)}),
    !pages.done && h("p", {class: "list-end quiet"},
      type ? `Of the ${sayNumber(pages.rows.length)} oldest that are owed. `
        : `${sayNumber(rows.length)} read so far. `,
      h("button", {onclick: read}, "Read more")));
}

function sayEmpty(page, to, type) {
  if (!page.may("list_obligations") && !me()) {
    return "This credential is nobody's own. Say in whose name you look: the button on the top right.";
  }
  if (to || type) return ["Nothing is owed that fits this filter. ", suggestType(page, type)];
  const whom = page.may("list_obligations") ? "anybody" : me().id;
  return [`Nothing is owed to ${whom}. Whoever creates a task is owed its outcome: `,
    offerCommand(asCommand("create_task", FIRST_TASK))];
}

function suggestType(page, type) {
  const isNear = (name) => name !== type && (name.startsWith(type) || name.endsWith(type));
  const known = type && page.local.types?.map(([name]) => name).find(isNear);
  if (!known) return null;
  const q = withWord(page.params.q, "type", known);
  return ["Did you mean ", h("a", {href: link(["inbox"], {q})}, say(`type:${known}`)), "?"];
}

function explain(page, row) {
  return openDialog("Why it waits", (close, draw) => {
    const {value, problem} = why(page, row.task_id);
    if (!value && !problem) setTimeout(draw, 100);
    return h("div", {class: "stack"}, h("p", null, h("strong", null, say(nameTask(page, row)))),
      problem ? h("p", {class: "problem"}, problem.message)
        : h("p", {role: "status"}, value ? say(value.summary) : "…"),
      value?.also.map((cause) => h("p", {class: "quiet"}, "Also: ", say(cause.summary))),
      h("div", {class: "actions end"}, deeds(page, row),
        h("a", {class: "button", href: link(["task", row.task_id]), onclick: () => close()}, "Open the task")));
  });
}

// What answers a question is fetched when there is one: most inboxes have none, and the first view is light.
function answers(page) {
  return page.may("answer_input") ? known(page, "answers", () => import("../answers.js")).value : null;
}

function answering(page) {
  return {known, mine: me(), reads: (id) => reads(page, id), act: (operation, ask) => page.act(operation, ask)};
}

// Whoever is asked something may answer, but not always read the task: only what is owed to it says that it may.
function reads(page, id) {
  return page.may("list_obligations") || page.local.about?.get(id)?.task?.status !== undefined;
}

function aboutRow(page, row) {
  const isMine = !isQuestion(row) || page.may("list_obligations");
  return isMine ? about(page, row.task_id) : page.local.about?.get(row.task_id)?.task ?? {};
}

// A list of what is owed begins with the oldest, and a question may be far behind: the tasks on hold tell it, too.
function showQuestions(page, rows) {
  const read = () => page.call("list_tasks", {held: true, limit: PAGE_ASKING});
  const tasks = page.may("list_tasks") ? known(page, "held", read).value?.tasks ?? [] : [];
  const asking = [...rows.filter(isQuestion), ...tasks.filter(({held}) => held === "input_required")];
  const ids = [...new Set(asking.map((row) => row.task_id))].slice(0, PAGE_ASKING);
  const loaded = page.local.known?.has("answers");
  return (ids.length > 0 || loaded) && answers(page)?.showQuestions(page, ids, answering(page));
}

function isQuestion({receipt_type: type}) {
  return type === "input.requested";
}

/** Describe the buttons of what can be done about an obligation. */
function deeds(page, row) {
  if (isQuestion(row)) return answers(page)?.answerOwed(page, row, answering(page));
  return [row.task_id && taskDeeds(page, row.task_id, nameTask(page, row)), acknowledge(page, row)];
}

function taskDeeds(page, id, name) {
  const {status, held} = about(page, id);
  const button = (title, operation, run, danger) => page.may(operation) && h("button",
    {key: title, class: danger ? "danger small" : "small", "aria-label": `${title}: ${name}`, onclick: run}, title);
  const run = (operation, ask) => page.act(operation, ask);
  const ask = (which) => import("../task_questions.js").then((asks) => asks[which]({id, name}, run), fail);
  const release = () => page.act("release_hold", {task_id: id}).then(() => note("Released"), fail);
  return [
    isReleasable(held) && button("Release", "release_hold", release),
    status === "succeeded" && button("Say where it is", "attach_artifacts", () => ask("askToAttach")),
    LIVE.includes(status) && button("Cancel", "cancel_task", () => ask("askToCancel"), true)];
}

function acknowledge(page, row) {
  const run = () => page.act("ack_receipt", {receipt_id: row.receipt_id})
    .then(() => note("Acknowledged: it was seen, and stays owed"), fail);
  return page.may("ack_receipt") && h("button", {key: "ack", class: "small",
    title: "Note that you have seen it; it stays owed", "aria-label": `Acknowledge: ${nameTask(page, row)}`,
    onclick: run}, "Acknowledge");
}

function fail(problem) {
  note(problem.message, "bad");
}
