// Small pieces that several views show alike.

import {h} from "./dom.js";
import {link} from "./route.js";
import {copy} from "./share.js";

/** Show a status with its colour and its word. */
export function badge(status, tone = status) {
  return h("span", {class: `badge ${String(tone).replace(/[^a-z-]/g, "-")}`}, status);
}

/** Show a principal: ada, with its kind for whoever asks. */
export function who(principal) {
  if (!principal) return h("span", {class: "quiet"}, "–");
  const whole = `${principal.kind}:${principal.id}${principal.instance_id ? ` (${principal.instance_id})` : ""}`;
  return h("span", {class: "who", title: whole}, h("span", {class: "quiet"}, `${principal.kind}:`), h("bdi", null, principal.id));
}

/** Show the end of an id, which is what tells it apart; a click copies the whole. */
export function shortId(id) {
  return h("button", {class: "id", title: `${id}: copy`, onclick: (event) => {
    event.preventDefault();
    event.stopPropagation();
    copy(id, "Id copied");
  }}, id.slice(-8));
}

/** Link to a task. */
export function taskLink(id, text = id.slice(-8)) {
  return h("a", {href: link(["task", id]), title: id}, text);
}

/** Show text from outside without letting its direction change what stands around it. */
export function say(text) {
  return h("bdi", null, text);
}

/** Show a number with a word under it. */
export function tile(value, label, {href, tone} = {}) {
  const content = [h("strong", null, value), h("span", null, label)];
  return href ? h("a", {class: `tile ${tone ?? ""}`, href}, content) : h("div", {class: `tile ${tone ?? ""}`}, content);
}

/** Show a section with a title and what can be done beside it. */
export function section(title, {actions, id} = {}, ...content) {
  return h("section", {class: "sheet", "aria-label": title, id}, h("header", {class: "sheet-head"}, h("h2", null, title),
    actions && h("div", {class: "actions"}, actions)), content);
}

/** Show pairs of names and values; pairs whose value is null are left out. */
export function facts(pairs) {
  return h("dl", {class: "facts"}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

/** Draw a small chart of values; the numbers are in its text. */
export function sparkline(values, label) {
  const most = Math.max(1, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(23 - 22 * value / most).toFixed(1)}`).join(" ");
  return h("svg", {class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label},
    h("polyline", {points, fill: "none"}));
}
