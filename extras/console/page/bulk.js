// One thing done to many tasks: counted and shown first, then confirmed by typing, then carried out piece by piece.
// What has not ended can go on later, even after the page was loaded again: the gate knows how far it is.

import {askForm, note, openDialog} from "./dialogs.js";
import {h} from "./dom.js";
import {say, shortId, taskBadge, who} from "./parts.js";
import {when} from "./time.js";
import {mayBulk} from "./types.js";

const UNENDED = "asyncgate-bulk";
const TASKS_AT_ONCE = 200;
const ACTIONS = {
  cancel: {title: "Cancel them all", done: "canceled", danger: true,
    says: "Each task ends as canceled, which cannot be undone. What workers still do is refused."},
  release: {title: "Release them all", done: "released", says: "Each task on hold is offered to workers again."},
  prioritize: {title: "Set their priority", done: "changed", says: "Workers get tasks of a higher priority first."},
  rerun: {title: "Run them all again", done: "run again",
    says: "Each ended task is run again as a new task, unless it was run again before."},
};
const PRIORITY = {name: "priority", label: "New priority", type: "number", value: "0", required: true};
const NO_FILTER = "There is no filter: this is about every task of the tenant.";

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
  if (!answer.done.matches) return note(`No task can be ${ACTIONS[action].done}: nothing was done`);
  await confirmBulk(page, answer.done, {title, danger});
}

function showFilter(filter) {
  const words = Object.entries(filter).filter(([, value]) => value !== undefined);
  if (!words.length) return h("p", {class: "warning banner"}, NO_FILTER);
  return h("dl", {class: "facts"}, words.map(([name, value]) => [
    h("dt", null, name.replaceAll("_", " ")), h("dd", null, say(value))]));
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
  const lead = ` will be ${ACTIONS[action].done}${matches > sample.length ? ". The newest of them:" : ":"}`;
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
  sessionStorage.setItem(UNENDED, JSON.stringify({confirmation: state.confirmation, matches: state.matches}));
  draw();
  try {
    do {
      state.bulk = await page.call("run_bulk", {confirmation: state.confirmation, max_tasks: TASKS_AT_ONCE});
      draw();
    } while (!state.bulk.ended && !state.stopped);
    if (state.bulk.ended) sessionStorage.removeItem(UNENDED);
  } catch (problem) {
    state.problem = problem.message;
    if (problem.error === "invalid_confirmation") sessionStorage.removeItem(UNENDED);
  }
  state.running = false;
  draw();
  page.lookAfterChange();
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
    sessionStorage.removeItem(UNENDED);
    page.redraw();
  };
  return h("div", {class: "busy banner head"}, h("p", null, "A change of many tasks was begun and has not ended."),
    h("div", {class: "actions"},
      h("button", {onclick: goOn}, "Go on"), h("button", {onclick: leaveIt}, "Leave it so")));
}
