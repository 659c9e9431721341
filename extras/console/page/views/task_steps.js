// What a task has recorded: each step with its name, its place, when it was done, how large it is; its value on demand.

import {note} from "../dialogs.js";
import {h} from "../dom.js";
import {jsonTree} from "../exact.js";
import {say, section} from "../parts.js";
import {when} from "../time.js";
import {sayNumber} from "../say.js";
import {sayBytes} from "../words.js";

const PAGE = 200;

/** Read the steps of a task without their values: the first page, and what was read on demand before. */
export async function readSteps(page, {task_id, steps: number}) {
  const known = page.local.steps ??= {rows: [], next: null, number: 0, values: new Map()};
  if (known.number === number) return known;
  const {steps: rows, next_cursor: next} = await page.call("list_steps", {task_id, values: false, limit: PAGE});
  return Object.assign(known, {rows, next, number});
}

/** Show the steps of a task. */
export function showSteps(known, task, page) {
  const more = () => readMore(known, task, page).catch((problem) => note(problem.message, "bad"));
  return section("Steps", {id: "steps",
    actions: h("span", {class: "quiet"}, `${sayNumber(task.steps)} recorded`)},
  h("ol", {class: "steps"}, known.rows.map((step) => showStep(step, known, task, page))),
  known.next && h("p", {class: "list-end"}, h("button", {onclick: more}, "Read more")));
}

async function readMore(known, {task_id}, page) {
  const {steps, next_cursor: next} = await page.call("list_steps",
    {task_id, values: false, limit: PAGE, cursor: known.next});
  Object.assign(known, {rows: [...known.rows, ...steps], next});
  page.redraw();
}

// The value of a step never changes, so it is read once.
function showStep({seq, name, value_bytes: bytes, recorded_at: at}, {values}, {task_id}, page) {
  const read = async (event) => {
    if (!event.target.open || values.has(seq)) return;
    values.set(seq, null);
    try {
      const {steps: [step]} = await page.call("list_steps", {task_id, seq});
      values.set(seq, step);
    } catch (problem) {
      values.delete(seq);
      note(problem.message, "bad");
    }
    page.redraw();
  };
  const step = values.get(seq);
  return h("li", {key: seq}, h("details", {class: "on-demand", ontoggle: read},
    h("summary", null, h("span", {class: "quiet"}, `${sayNumber(seq)} `), say(name), " ",
      h("span", {class: "quiet"}, `${sayBytes(bytes)}, `, when(at, page.now()))),
    step ? jsonTree(step.value) : values.has(seq) && h("p", {role: "status"}, "…")));
}
