// Tasks: live counts, a text filter, a list of any length, and what is done to one task, to some, or to all of them.

import {callAll} from "../api.js";
import {bulkItems, showUnended} from "../bulk.js";
import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {readAge, readFilter, readMoment, readWho, withWord} from "../filter.js";
import {Pages} from "../pages.js";
import {endOf, filterChips, say, searchField, shortId, taskBadge, taskLink, tile, who} from "../parts.js";
import {writeJson} from "../exact.js";
import {link} from "../route.js";
import {asCommand, copyMenu, FIRST_TASK, menu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {CANCEL_REASON, CANCEL_SAYS} from "../task_questions.js";
import {when} from "../time.js";
import {keepTypes, mayBulk, stopType, typeChips} from "../types.js";
import {isReleasable, sayNumber} from "../say.js";

const PAGE = 200;
const SHORTEST_END = 6;    // all ids of a tenant have the last five letters in common
const MOST_ENDS = 8;
const WHOLE_ID = 36;
const LIVE = ["queued", "leased", "running"];
const ENDED = ["succeeded", "failed", "canceled"];
const WORDS = "type: status: owner: age: held: id: created: tag: payload.NAME:";
const NOT_IN_BULK = {type_prefix: "type:…*", summary_prefix: "summary:", payload: "payload.", tag: "tag:"};
const PREVIEW_LETTERS = 120;

/** The words of the filter; each gives fields of list_tasks. */
export function wordsAt(now) {
  const moment = (seconds) => new Date(now - seconds * 1000).toISOString();
  const choose = (name, choices) => (text) => {
    if (!choices.includes(text)) throw new Error(`say one of ${choices.join(", ")}`);
    return {[name]: text};
  };
  return {
    type: (text) => text.endsWith("*") && text.length > 1 ? {type_prefix: text.slice(0, -1)} : {type: text},
    status: choose("status", [...LIVE, ...ENDED]),
    owner: (text) => {
      const {kind, id} = readWho(text);
      return {created_by: id, created_by_kind: kind};
    },
    age: (text) => {
      const {over, seconds} = readAge(text);
      return {[over ? "created_before" : "created_after"]: moment(seconds)};
    },
    held: (text) => ({held: choose("held", ["yes", "no"])(text).held === "yes"}),
    id: (text) => ({id_prefix: text.toLowerCase()}),
    summary: (text) => ({summary_prefix: text}),
    tag: (text) => ({tag: text}),
    "payload.": (text, member) => ({payload: `${member}:${text}`}),
    created: (text) => {
      const limit = readMoment(text);
      return {[limit.after ? "created_after" : "created_before"]: limit.moment};
    },
    "": (text) => /^[0-9a-f-]{4,36}$/i.test(text) ? {id_prefix: text.toLowerCase()} : {summary_prefix: text},
  };
}

/** Read what the view shows. */
export async function load(page) {
  const q = page.params.q ?? "";
  const {values: given, problems} = readFilter(q, wordsAt(page.now()));
  const local = page.local;
  const ends = problems.length ? [] : await findEnds(page, given);
  const values = ends.length === 1 ? {...given, id_prefix: ends[0]} : given;
  const same = problems.length || local.q === q;
  const pages = same ? local.pages : new Pages(reader(page), (row) => row.task_id, true);
  const [queues, pauses] = await Promise.all([
    page.may("list_queues") ? callAll(page, "list_queues", "queues", {type: values.type}) : null,
    values.type && page.may("list_pauses") ? page.call("list_pauses") : null,
    !problems.length && pages.look(values, same ? local["table tasks"] : {})]);
  if (!same) Object.assign(local, {q, pages, picked: new Set()});     // what was shown stays until the new rows come
  const types = keepTypes(local, queues?.rows, values.type);
  return {values, problems, queues, pauses: pauses?.pauses ?? [], pages, types, ends};
}

// People see how ids end: the gate tells whose end it is.
async function findEnds(page, {id_prefix: end}) {
  if (!end || end.length < SHORTEST_END || end.length >= WHOLE_ID || !page.may("find_id")) return [];
  const {found: matches} = await page.call("find_id", {part: end});
  return matches.filter(({kind, id}) => kind === "task" && !id.startsWith(end)).map(({id}) => id);
}

function reader(page) {
  return async (ask, cursor) => {
    const {tasks, next_cursor: next, searched} = await page.call(operationFor(ask), {...ask, limit: PAGE, cursor});
    if (searched !== undefined) page.local.searched = (cursor ? page.local.searched ?? 0 : 0) + searched;
    return {rows: tasks.map(slim), next};
  };
}

// Members of a payload and labels stand in no index: the gate looks at some tasks with each call.
function operationFor({payload, tag}) {
  return payload || tag ? "search_tasks" : "list_tasks";
}

// A hundred thousand rows fit into the memory only without what the list does not show.
function slim({payload, progress, requirements, result, ...rest}) {
  return {...rest, preview: previewOf(payload), tags: requirements?.tags,
    result: result && {outcome: result.outcome, completed_at: result.completed_at}};
}

/** Return a payload as one short line, by which people tell tasks apart. */
function previewOf(payload) {
  if (payload === null || payload === undefined) return "";
  const text = typeof payload === "string" ? payload : writeJson(payload);
  return text.length > PREVIEW_LETTERS ? `${text.slice(0, PREVIEW_LETTERS)}…` : text;
}

function showName({task_summary: summary, type, preview, tags}) {
  const labels = Array.isArray(tags) ? tags : tags && typeof tags === "object"
    ? Object.entries(tags).map((pair) => pair.join(":")) : [];
  return [summary ? say(summary) : preview ? [h("span", {class: "narrow-only"}, say(type), " "),
    h("span", {class: "preview"}, say(preview))] : say(type),
    labels.slice(0, 3).map((label) => h("span", {class: "badge plain", key: label}, say(String(label))))];
}

export function concerns(event) {
  return event.type !== "worker.seen" && event.type !== "progress";
}

const columns = [
  {name: "task_summary", title: "Task", grow: true, show: showName},
  {name: "type", title: "Type", wide: true, show: (task) => say(task.type)},
  {name: "status", title: "Status", value: (task) => task.status, show: (task) => taskBadge(task)},
  {name: "created_by", title: "Owner", value: (task) => `${task.created_by.kind}:${task.created_by.id}`,
    show: (task) => who(task.created_by)},
  {name: "leased_to", title: "Leased to", wide: true, value: (task) => task.leased_to?.id,
    show: (task) => task.leased_to ? who(task.leased_to) : "–"},
  {name: "fence", title: "Attempts", number: true, wide: true, show: (task) => task.fence},
  {name: "priority", title: "Priority", number: true, widest: true, show: (task) => task.priority},
];
const more = [{name: "attempt"}, {name: "max_attempts"}, {name: "task_id", title: "Id"},
  {name: "created_at", title: "Created"}, {name: "preview"}, {name: "tags"},
  {name: "next_eligible_at"}, {name: "lease_expires_at"}, {name: "held"},
  {name: "obligation_open"}];

/** Show the tasks. */
export function show({values, problems, queues, pauses, pages, types, ends}, page) {
  const rows = pages?.rows ?? [];
  const q = page.params.q ?? "";
  const {type} = values;
  const isStoppable = type && (rows.length > 0 || pauses.some((pause) => pause.type === type));
  return [
    h("div", {class: "head", key: "head"}, h("h1", null, "Tasks"), h("div", {class: "actions"},
      mayBulk(page) && !problems.length && allMenu(page, values),
      exportMenu("tasks", [...columns, ...more], rows, {more: pages && !pages.done}),
      copyMenu(operationFor(values), {...values, limit: PAGE}),
      page.may("create_task") && h("button", {class: "first", onclick: () => askForTask(page, values.type)},
        "New task …"))),
    queues && showCounts(queues, values),
    h("div", {class: "stack", key: "filter"}, searchField(page, {problems,
      says: `${WORDS} summary:, or the beginning or the end of an id`,
      hint: "type:ocr* status:queued owner:ada age:>1h held:yes id:01ab summary:\"…\" created:>2026-11-01"}),
    showChips(page, q, values), !values.type_prefix && typeChips(page, q, type, types),
    sayCounted(values, queues || types.length)),
    showUnended(page),
    problems.length ? h("p", {class: "empty", key: "rows"}, "Correct the filter to see tasks.") : [
      isStoppable && stopType(page, type, pauses, fitsBulk(values) ? values : undefined),
      showPicked(page, rows), showRows(page, pages, q, ends)]];
}

function showCounts({rows, more}, {type}) {
  const sum = (read) => `${sayNumber(rows.reduce((total, queue) => total + read(queue), 0))}${more ? "+" : ""}`;
  const word = type ? `${withWord("", "type", type)} ` : "";
  const to = (rest) => ({href: link(["tasks"], {q: word + rest})});
  const held = sum((queue) => queue.held);
  const failed = sum((queue) => queue.last_hour.failed);
  return h("div", {class: "tiles", key: "tiles"},
    tile(sum((queue) => queue.claimable), "waiting", to("status:queued held:no")),
    tile(sum((queue) => queue.leased), "leased", to("status:leased")), tile(sum((queue) => queue.delayed), "delayed"),
    tile(held, "on hold", {...to("held:yes"), tone: held === "0" ? "" : "warning"}),
    tile(sum((queue) => queue.last_hour.ended), "ended in 1 h"),
    tile(failed, "failed in 1 h", {...to("status:failed age:<1h"), tone: failed === "0" ? "" : "danger"}));
}

// The gate counts by types alone.
function sayCounted({type, ...rest}, counts) {
  return counts && Object.keys(rest).length > 0 && h("p", {class: "quiet"},
    `The tiles count all tasks${type ? " of this type" : ""}, and the types all that have not ended, `
    + "whatever else the filter says.");
}

function showChips(page, q, {status, held}) {
  const plain = withWord(withWord(q, "status", null), "held", null);
  return filterChips(page, "Status", [["all", plain, !status && held === undefined],
    ...[...LIVE, ...ENDED].map((state) => [state, withWord(plain, "status", state), status === state]),
    ["on hold", withWord(plain, "held", "yes"), held === true]]);
}

function fitsBulk(values) {
  return !Object.keys(NOT_IN_BULK).some((name) => name in values);
}

function allMenu(page, values) {
  const unfit = Object.keys(NOT_IN_BULK).filter((name) => name in values).map((name) => NOT_IN_BULK[name]);
  if (!unfit.length) return menu("Do to all", bulkItems(page, values));
  return menu("Do to all", [h("p", {class: "quiet"},
    `${unfit.join(" and ")} cannot choose what something is done to: `
    + "leave it out, or use type:, status:, owner:, age:, created:, id: or held:")]);
}

// A word without a name looks for how a summary begins, and a type is its whole name: what else could be meant.
function suggest(page, q, ends) {
  if (ends.length > 1) {
    return [`${ends.length} ids end so: `,
      ends.slice(0, MOST_ENDS).map((id) => [taskLink(id, id), " · "])];
  }
  const word = q.trim();
  const isId = /^id:|^[0-9a-f-]{6,36}$/i.test(word);
  const unknown = isId && "No id begins or ends so. ";
  const name = /^(?:(?:type|summary):)?([^\s:"*]+)$/.exec(word)?.[1];
  if (!name) return unknown;
  const types = (page.local.types ?? []).map(([type]) => type);
  const known = types.find((type) => type.startsWith(name) || type.endsWith(name));
  const offers = [known && withWord("", "type", known), `type:${name}*`, `summary:${name}`, `owner:${name}`]
    .filter((filter) => filter && filter !== word);
  const show = (filter) => [h("a", {key: filter, href: link(["tasks"], {q: filter})}, say(filter)), " · "];
  return [unknown, "Did you mean ", offers.map(show)];
}

function showRows(page, pages, q, ends) {
  const read = () => {
    const reading = pages.more();
    if (reading) reading.then(() => page.redraw(), (problem) => note(problem.message, "bad"));
  };
  const shown = [...columns,
    {name: "created_at", title: "Created", show: (task) => [when(task.created_at, page.now()),
      h("span", {class: "id-below"}, shortId(task.task_id))]},
    {name: "task_id", title: "Id", widest: true, show: (task) => shortId(task.task_id)},
    {name: "actions", title: "", show: (task) => h("span", {class: "actions row-actions"}, rowActions(page, task))}];
  const {rows, done} = pages;
  const showAll = h("a", {href: link(["tasks"])}, "Show all tasks");
  const empty = q ? ["No task fits this filter. ", suggest(page, q, ends), showAll]
    : ["There are no tasks yet. Create one here, or: ", offerCommand(asCommand("create_task", FIRST_TASK))];
  return h("div", {key: "rows"},
    table(page, {name: "tasks", columns: shown, rows, key: (task) => task.task_id,
      open: (task) => link(["task", task.task_id]), more: read,
      selected: page.may("cancel_task") ? page.local.picked : undefined, empty}),
    h("p", {class: "quiet list-end", "aria-live": "polite"},
      done ? `${sayNumber(rows.length)} ${rows.length === 1 ? "task" : "tasks"}`
        : [`${sayNumber(rows.length)} read so far. `, h("button", {onclick: read}, "Read more")],
      page.local.searched && operationFor(page.data.values) === "search_tasks"
        && ` · ${sayNumber(page.local.searched)} searched`));
}

async function askForTask(page, type) {
  const {askForTask: ask} = await import("../new_task.js");
  return ask(page, type, (page.local.types ?? []).map(([name]) => name));
}

const DEEDS = {
  cancel_task: {title: "Cancel", fits: (task) => LIVE.includes(task.status), danger: true,
    says: CANCEL_SAYS},
  release_hold: {title: "Release", fits: (task) => isReleasable(task.held), says: "It is offered to workers again."},
  rerun_task: {title: "Run again", fits: (task) => ENDED.includes(task.status), says: "It is run again as a new task."},
};

function deedsFor(page, tasks) {
  return Object.entries(DEEDS).filter(([name, {fits}]) => page.may(name) && tasks.some(fits));
}

function rowActions(page, task) {
  return deedsFor(page, [task]).map(([name, {title, danger}]) => h("button",
    {class: danger ? "danger small" : "small", key: name, "aria-label": `${title} ${task.task_summary || task.type}`,
      onclick: () => doTo(page, name, [task])}, title));
}

function showPicked(page, rows) {
  const picked = rows.filter((row) => page.local.picked?.has(row.task_id));
  if (!picked.length) return null;
  const selectNone = () => {
    page.local.picked.clear();
    page.redraw();
  };
  const offer = ([name, {title, danger, fits}]) => {
    const fitting = picked.filter(fits);
    return h("button", {key: name, class: danger ? "danger" : "", onclick: () => doTo(page, name, fitting)},
      `${title} ${fitting.length} …`);
  };
  return h("div", {class: "busy banner head picked", key: "picked"},
    h("p", {role: "status"}, `${picked.length} selected`),
    h("div", {class: "actions"}, deedsFor(page, picked).map(offer), h("button", {onclick: selectNone}, "Select none")));
}

function doTo(page, name, tasks) {
  const {title, says, danger} = DEEDS[name];
  const alone = tasks.length === 1;
  const [{task_id: id, task_summary: summary, type}] = tasks;
  const what = alone ? summary || type : `${tasks.length} tasks`;
  return askForm(`${title}: ${what}`, {
    says: alone ? `Task ${endOf(id)}. ${says}` : says.replace(/^It ends/, "Each ends").replace(/^It is/, "Each is"),
    button: name === "cancel_task" ? `Cancel ${alone ? "it" : "them"}` : title, danger,    // Cancel alone means Back
    fields: name === "cancel_task" ? [CANCEL_REASON] : [],
    run: async ({reason}) => {
      const refused = [];
      for (const {task_id} of tasks) {
        try {
          await page.act(name, {task_id, ...(reason && {reason})});
          page.local.picked.delete(task_id);
        } catch (problem) {
          if (alone) throw problem;
          refused.push(problem.message);
        }
      }
      if (refused.length) {
        const done = tasks.length - refused.length;
        throw new Error(`${done} done, ${refused.length} refused, the first because: ${refused[0]}`);
      }
      note(`${title}: ${alone ? "done" : `${tasks.length} done`}`);
    }});
}
