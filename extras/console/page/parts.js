// Small pieces that several views show alike.

import {h} from "./dom.js";
import {link} from "./route.js";
import {copy} from "./share.js";
import {sayNumber} from "./say.js";

/** Show a status with its colour and its word. */
export function badge(status, tone = status) {
  return h("span", {class: `badge ${String(tone).replace(/[^a-z-]/g, "-")}`}, status);
}

/** Show the status of a task, or that it is on hold. */
export function taskBadge({status, held}) {
  return held ? badge("on hold", "held") : badge(status);
}

/** Show a principal: its kind and its id, and its instance for whoever points at it. */
export function who(principal) {
  if (!principal) return h("span", {class: "quiet"}, "–");
  const whole = `${principal.kind}:${principal.id}${principal.instance_id ? ` (${principal.instance_id})` : ""}`;
  return h("span", {class: "who", title: whole},
    h("span", {class: "quiet"}, `${principal.kind}:`), h("bdi", null, principal.id));
}

/** Return the context in which a task came over A2A, or null. */
export function contextOf({instance_id: session}) {
  return session?.startsWith("a2a:") ? session.slice(4) : null;
}

const END_LETTERS = 12;     // the last five say whose tenant's an id is, so fewer tell no two ids apart

/** Return the end of an id, which is what tells it apart. */
export function endOf(id) {
  return id.slice(-END_LETTERS);
}

/** Show the end of an id; a click copies the whole. */
export function shortId(id) {
  return h("button", {class: "id", title: `${id}: copy`, onclick: (event) => {
    event.preventDefault();
    event.stopPropagation();
    copy(id, "Id copied");
  }}, endOf(id));
}

/** Link to a task. */
export function taskLink(id, text = endOf(id)) {
  return h("a", {href: link(["task", id]), title: id}, text);
}

/** Show text from outside without letting its direction change what stands around it. */
export function say(text) {
  return h("bdi", null, text);
}

/** Say below a list that it is not whole. */
export function sayThereAreMore(rows, what) {
  return h("p", {class: "quiet"}, `These are the first ${sayNumber(rows.length)} ${what}; there are more.`);
}

/** Show a number with a word under it. */
export function tile(value, label, {href, tone, onclick} = {}) {
  const content = [h("strong", null, sayNumber(value)), h("span", null, label)];
  const shown = `tile ${tone ?? ""}`;
  return href ? h("a", {class: shown, href, onclick}, content) : h("div", {class: shown}, content);
}

/** Show a section with a title and what can be done beside it. */
export function section(title, {actions, id} = {}, ...content) {
  return h("section", {class: "sheet", "aria-label": title, id},
    h("header", {class: "sheet-head"}, h("h2", null, title), actions && h("div", {class: "actions"}, actions)),
    content);
}

/** Show pairs of names and values; pairs whose value is null are left out. */
export function facts(pairs) {
  return h("dl", {class: "facts"}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

/** Show how much of an amount is used; a negative one means no limit. */
export function meter(title, used, most) {
  if (used === null || used === undefined) return null;
  const bounded = most >= 0;
  return h("div", {key: title},
    h("span", null, title), h("span", null, bounded ? `${sayNumber(used)} of ${sayNumber(most)}`
      : `${sayNumber(used)}, no limit`),
    bounded && h("meter", {"aria-label": title, min: 0, max: most || 1, high: most * 0.8, optimum: 0,
      value: Math.min(used, most)}));
}

/** Show the text filter of a view; it is the parameter `q` of the address. */
export function searchField(page, {hint, says, problems = []}) {
  return h("form", {class: "filter", role: "search", onsubmit: (event) => event.preventDefault()},
    h("input", {type: "search", "aria-label": "Filter", placeholder: hint, title: says, value: page.params.q ?? "",
      spellcheck: "false", autocomplete: "off", "aria-describedby": problems.length ? "filter-problem" : null,
      oninput: (event) => page.go({q: event.target.value}, {replace: true})}),
    problems.length > 0 && h("p", {class: "problem", id: "filter-problem", role: "alert"}, problems.join(". ")));
}

/** Show buttons that each put something into the filter: `[[words, filter, whether it is so now], …]`. */
export function filterChips(page, label, choices) {
  return h("div", {class: "chips", role: "group", "aria-label": label}, choices.map(([words, q, is]) => h("button",
    {class: "chip", key: q, "aria-pressed": String(Boolean(is)), onclick: () => page.go({q})}, words)));
}
