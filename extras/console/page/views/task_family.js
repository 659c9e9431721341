// The family of a task: its parent, its children and theirs, as a tree, with how each does.

import {h} from "../dom.js";
import {say, section, taskBadge, taskLink} from "../parts.js";
import {sayNumber} from "../say.js";

const MOST_SHOWN = 50;          // children of one task
const MOST_BRANCHES = 12;       // of them, whose own children are read
const DEEPEST = 3;

/** Read the children of a task, and theirs, as far as there is room for them. */
export async function readFamily(page, task, depth = 1) {
  if (!task.children || !page.may("list_tasks")) return [];
  const {tasks} = await page.call("list_tasks", {parent_task_id: task.task_id, limit: MOST_SHOWN});
  const branches = depth < DEEPEST ? tasks.filter((child) => child.children).slice(0, MOST_BRANCHES) : [];
  const below = new Map(await Promise.all(branches.map(async (child) =>
    [child.task_id, await readFamily(page, child, depth + 1)])));
  return tasks.map((child) => ({task: child, below: below.get(child.task_id) ?? []})).reverse();
}

/** Show a task between its parent and its descendants; null for a task that has neither. */
export function showFamily(task, family) {
  if (!task.children && !task.parent_task_id) return null;
  const own = h("li", {"aria-current": "true"}, h("strong", null, say(task.task_summary ?? task.type)), " ",
    taskBadge(task), " ", sayChildren(task.children), showChildren(task, family));
  const tree = task.parent_task_id
    ? h("li", null, taskLink(task.parent_task_id, "its parent"), h("ul", null, own)) : own;
  return section("Family", {id: "family"}, h("ul", {class: "family"}, tree));
}

function showChildren({children}, below) {
  if (!children) return null;
  const left = children.open + children.succeeded + children.failed + children.canceled - below.length;
  return h("ul", null, below.map(({task, below}) => h("li", null,
    taskLink(task.task_id, say(task.task_summary ?? task.type)), " ", taskBadge(task), " ", sayChildren(task.children),
    showChildren(task, below))),
  left > 0 && h("li", {class: "quiet"}, `${sayNumber(left)} more`));
}

/** Say how many children there are, by what became of them. */
export function sayChildren(children) {
  if (!children) return null;
  const counts = ["open", "succeeded", "failed", "canceled"].filter((name) => children[name]);
  return h("span", {class: "quiet"}, counts.map((name) => `${sayNumber(children[name])} ${name}`).join(", "));
}
