// JSON whose numbers stay exact: a 64-bit id or a decimal with forty digits is shown as the gate has sent it.

import {h} from "./dom.js";

/** A number that JavaScript's own numbers would change. */
export class Exact {
  constructor(text) {
    this.text = text;
  }

  toString() {
    return this.text;
  }
}

/** Read JSON; a number that would not come out as it went in is an Exact. */
export function readJson(text) {
  return JSON.parse(text, (name, value, context) =>
    typeof value === "number" && context?.source !== undefined && !isSame(value, context.source)
      ? new Exact(context.source) : value);
}

function isSame(value, source) {
  if (String(value) === source) return true;
  return Number.isSafeInteger(value) || source.replace(/[^0-9]/g, "").length <= 15;     // 1.0, 1e3
}

/** Write JSON as text, with Exact numbers as they came. */
export function writeJson(value, indent = 0, depth = 0) {
  if (value instanceof Exact) return value.text;
  if (value === null || typeof value !== "object") return JSON.stringify(value) ?? "null";
  const list = Array.isArray(value);
  const write = (inner) => writeJson(inner, indent, depth + 1);
  const colon = indent ? ": " : ":";
  const parts = list ? value.map(write)
    : Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}${colon}${write(inner)}`);
  if (!parts.length) return list ? "[]" : "{}";
  const gap = indent ? `\n${" ".repeat(indent * (depth + 1))}` : "";
  const end = indent ? `\n${" ".repeat(indent * depth)}` : "";
  return `${list ? "[" : "{"}${gap}${parts.join(`,${gap}`)}${end}${list ? "]" : "}"}`;
}

const OPEN_DEPTH = 2;
const MOST_SHOWN = 200;         // members of one object or list; the others are only counted

/** Show JSON as a tree whose parts fold. */
export function jsonTree(value, {name, depth = 0, open = OPEN_DEPTH} = {}) {
  const label = name === undefined ? null : h("span", {class: "json-name"}, h("bdi", null, name), ": ");
  if (value instanceof Exact || value === null || typeof value !== "object") {
    const kind = value instanceof Exact ? "number" : value === null ? "null" : typeof value;
    return h("div", {class: "json-line"}, label, h("bdi", {class: `json-${kind}`}, writeJson(value)));
  }
  const list = Array.isArray(value);
  const members = list ? value.map((inner, at) => [at, inner]) : Object.entries(value);
  const size = list ? `[ ${members.length} ]` : `{ ${members.length} }`;
  const hidden = members.length - MOST_SHOWN;
  if (!members.length) return h("div", {class: "json-line"}, label, list ? "[]" : "{}");
  return h("details", {class: "json", ...(depth < open ? {open: true} : {})},
    h("summary", null, label, h("span", {class: "quiet"}, size)),
    members.slice(0, MOST_SHOWN).map(([key, inner]) => jsonTree(inner, {name: key, depth: depth + 1, open})),
    hidden > 0 && h("p", {class: "quiet"}, `… ${hidden} more: copy or download it`));
}

/** Read a payload that somebody has typed; the error says what is expected. */
export function readPayload(text) {
  try {
    return readJson(text);
  } catch (problem) {
    throw new Error(`The payload must be JSON: ${problem.message}`);
  }
}
