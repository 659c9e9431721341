// One thing done to many tasks: counted and shown first, then confirmed by typing, then carried out piece by piece.
// What has not ended can go on later, even after the page was loaded again: the gate knows how far it is.

import {askForm, note, openDialog} from "./dialogs.js";
import {h} from "./dom.js";
import {withWord} from "./filter.js";
import {badge, filterChips, say, shortId, taskBadge, who} from "./parts.js";
import {pauseButtons, targetOf} from "./pausing.js";
import {when} from "./time.js";

const UNENDED = "asyncgate-bulk";
const TASKS_AT_ONCE = 200;
const ACTIONS = {
  cancel: {title: "Cancel them all", danger: true,
    says: "Each task ends as canceled, which cannot be undone. What workers still do is refused."},
  release: {title: "Release them all", says: "Each task on hold is offered to workers again."},
  prioritize: {title: "Set their priority", says: "Workers get tasks of a higher priority first."},
  rerun: {title: "Run them all again",
    says: "Each ended task is run again as a new task, unless it was run again before."},
};
const PRIORITY = {name: "priority", label: "New priority", type: "number", value: "0", required: true};
const NO_FILTER = "There is no filter: this is about every task of the tenant.";

/** Whether this credential may do things to many tasks. */
export function mayBulk(page) {
  return page.may("preview_bulk") && page.may("run_bulk");
}

/** Describe the buttons of all that can be done to the tasks of a filter, for a menu. */
export function bulkItems(page, ask) {
  return Object.entries(ACTIONS).map(([action, {title}]) => h("button", {role: "menuitem",
    onclick: () => askBulk(page, action, ask)}, `${title} …`));
}

/** Ask why, count, show some, have it confirmed, and do it. */
export async function askBulk(page, action, filter) {
  const {title, says, danger} = ACTIONS[action];
  const ranks = action === "prioritize";
  const hint = action === "cancel" ? "Their owners are told, and it is audited" : "It is audited";
  const answer = await askForm(title, {
    says: h("div", {class: "stack"}, h("p", null, says), showFilter(filter)),
    fields: [...(ranks ? [PRIORITY] : []), {name: "reason", label: "Why", hint}],
    button: "Count them first",
    run: ({priority, reason}) => page.call("preview_bulk", {action, ...filter, reason: reason.trim() || undefined,
      ...(ranks && {priority: Number(priority)})})});
  if (!answer) return;
  if (!answer.done.matches) return note(`No task can be ${wordOf(action)}: nothing was done`);
  await confirmBulk(page, answer.done, {title, danger});
}

function showFilter(filter) {
  const words = Object.entries(filter).filter(([, value]) => value !== undefined);
  if (!words.length) return h("p", {class: "warning banner"}, NO_FILTER);
  return h("dl", {class: "facts"}, words.map(([name, value]) => [
    h("dt", null, name.replaceAll("_", " ")), h("dd", null, say(value))]));
}

function wordOf(action) {
  return {cancel: "canceled", release: "released", prioritize: "changed", rerun: "run again"}[action];
}

function confirmBulk(page, preview, {title, danger}) {
  const words = `${preview.action} ${preview.matches}`;
  const state = {typed: "", begun: false};
  const isTyped = () => state.typed.trim() === words;
  return openDialog(title, (close, draw) => {
    if (state.begun) return showProgress(state, page, close, draw);
    const begin = (event) => {
      event.preventDefault();
      if (!isTyped()) return;
      Object.assign(state, {begun: true, confirmation: preview.confirmation, matches: preview.matches});
      carryOut(page, state, draw);
    };
    return h("form", {class: "stack", onsubmit: begin}, showPreview(preview, page),
      h("div", {class: "field"}, h("label", {for: "bulk-words"}, "Type ", h("code", null, words), " to go on"),
        h("input", {id: "bulk-words", value: state.typed, autocomplete: "off", spellcheck: "false",
          oninput: (event) => {
            state.typed = event.target.value;
            draw();
          }})),
      h("div", {class: "actions end"}, h("button", {type: "button", onclick: () => close()}, "Back"),
        h("button", {type: "submit", class: danger ? "danger" : "first", disabled: !isTyped()}, title)));
  }, {wide: true}).then(() => (state.stopped = true));
}

function showPreview({action, matches, sample, at_least: atLeast}, page) {
  const count = `${atLeast ? "More than " : ""}${matches} ${matches === 1 ? "task" : "tasks"}`;
  const lead = ` will be ${wordOf(action)}${matches > sample.length ? ". The newest of them:" : ":"}`;
  return [h("p", null, h("strong", null, count), lead),
    h("ul", {class: "sample"}, sample.map((task) => h("li", {key: task.task_id},
      shortId(task.task_id), " ", say(task.task_summary || task.type), " ",
      task.task_summary && h("span", {class: "quiet"}, say(task.type), " "), taskBadge(task), " ",
      who(task.created_by), " ", when(task.created_at, page.now()))))];
}

function showProgress(state, page, close, draw) {
  const {bulk, problem, matches, running} = state;
  const seen = bulk ? bulk.done + bulk.skipped + bulk.refused : 0;
  const most = Math.max(matches, seen);
  const counts = bulk && `${bulk.done} done, ${bulk.skipped} skipped (they had changed), ${bulk.refused} refused.`;
  return h("div", {class: "stack"},
    h("progress", {value: bulk?.ended ? most : seen, max: most, "aria-label": "How far it is"}),
    h("p", {role: "status"}, bulk ? `${bulk.ended ? "Ended" : "So far"}: ${counts}` : "It begins …"),
    bulk?.problem && h("p", {class: "problem"}, say(bulk.problem)),
    problem && h("p", {class: "problem", role: "alert"}, problem),
    h("div", {class: "actions end"},
      running ? h("button", {onclick: () => (state.stopped = true)}, "Stop for now")
        : !bulk?.ended && h("button", {class: "first", onclick: () => carryOut(page, state, draw)}, "Go on"),
      h("button", {onclick: () => close()}, bulk?.ended ? "Done" : "Close")));
}

async function carryOut(page, state, draw) {
  Object.assign(state, {running: true, stopped: false, problem: null});
  keepUnended(state);
  draw();
  try {
    do {
      state.bulk = await page.call("run_bulk", {confirmation: state.confirmation, max_tasks: TASKS_AT_ONCE});
      draw();
    } while (!state.bulk.ended && !state.stopped);
    if (state.bulk.ended) forgetUnended();
  } catch (problem) {
    state.problem = problem.message;
    if (problem.error === "invalid_confirmation") forgetUnended();
  }
  state.running = false;
  draw();
  page.lookAfterChange();
}

function keepUnended({confirmation, matches}) {
  sessionStorage.setItem(UNENDED, JSON.stringify({confirmation, matches}));
}

function forgetUnended() {
  sessionStorage.removeItem(UNENDED);
}

/** Offer to go on with what this tab has begun and has not ended. */
export function showUnended(page) {
  const kept = sessionStorage.getItem(UNENDED);
  if (!kept || !mayBulk(page)) return null;
  const goOn = () => {
    const state = {...JSON.parse(kept), begun: true};
    openDialog("Going on", (close, draw) => {
      state.draw = draw;
      return showProgress(state, page, close, draw);
    }).then(() => (state.stopped = true));
    carryOut(page, state, state.draw);
  };
  const leaveIt = () => {
    forgetUnended();
    page.redraw();
  };
  return h("div", {class: "busy banner head"}, h("p", null, "A change of many tasks was begun and has not ended."),
    h("div", {class: "actions"},
      h("button", {onclick: goOn}, "Go on"), h("button", {onclick: leaveIt}, "Leave it so")));
}

const MOST_TYPES = 8;

/** Return the types with the most unended tasks, as `[[type, count], …]`.
 *
 * Queues that were read for one type alone leave the types as they were.
 */
export function keepTypes(local, queues, type) {
  if (queues && !type) {
    const counts = new Map();
    for (const {type: name, claimable, leased, delayed, held} of queues) {
      counts.set(name, (counts.get(name) ?? 0) + claimable + leased + delayed + held);
    }
    const unended = [...counts].filter(([, count]) => count).sort(([, first], [, other]) => other - first);
    local.types = unended.slice(0, MOST_TYPES);
  }
  return local.types ?? [];
}

/** Show buttons that put a type into the filter. */
export function typeChips(page, q, type, types) {
  const choices = types.map(([name, count]) => [
    [say(name), " ", h("span", {class: "quiet"}, count)], withWord(q, "type", name), type === name]);
  const all = ["all types", withWord(q, "type", null), !type];
  return types.length > 1 && filterChips(page, "Type", [all, ...choices]);
}

/** Offer to stop a type at once: no new leases, or all canceled that fits `cancels`, which is the whole filter. */
export function stopType(page, type, pauses = [], cancels = {type}) {
  const paused = pauses.find((pause) => pause.whole_tenant || (pause.type === type && !pause.capabilities));
  const offers = [pauseButtons(page, paused ? targetOf(paused) : {type}, pauses),
    mayBulk(page) && h("button", {class: "danger", onclick: () => askBulk(page, "cancel", cancels)}, "Cancel all …")];
  if (!page.may("pause_work") && !mayBulk(page) && !paused) return null;
  return h("div", {class: "head stop-type", key: "stop"}, h("p", null, "Type ", h("strong", null, say(type)), " ",
    paused && [badge("paused"), paused.reason && [": ", say(paused.reason)]]), h("div", {class: "actions"}, offers));
}
