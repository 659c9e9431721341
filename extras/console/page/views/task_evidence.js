// The evidence of a cause: its facts in words, and the same as the gate has said it.

import {h} from "../dom.js";
import {jsonTree} from "../exact.js";
import {facts, say, shortId, who} from "../parts.js";
import {when} from "../time.js";
import {sayHold} from "../say.js";
import {sayCause, sayEmpty, sayFact} from "../words.js";
import {sayChildren} from "./task_family.js";

/** Show what a cause rests on. */
export function showEvidence({cause, evidence}, page) {
  return h("div", {class: "stack evidence"},
    facts([["Cause", [sayCause(cause), " ", showCode(cause)]], ...listFacts(evidence, page)]),
    h("details", null, h("summary", null, "As the gate says it"), jsonTree(evidence)));
}

function showCode(code) {
  return h("span", {class: "quiet code"}, code);
}

function listFacts(evidence, page) {
  return Object.entries(evidence).map(([name, value]) => [sayFact(name), showFact(name, value, page)]);
}

function showFact(name, value, page) {
  if (name === "held") return [sayHold(value), " ", showCode(value)];
  if (name === "workers") return h("ul", {class: "plain"}, value.map((row) => h("li", null, showWorker(row, page))));
  if (name === "receipt_ids") return value.map((id) => [shortId(id), " "]);
  if (name.endsWith("_id")) return shortId(value);
  if (name === "by") return who(value);
  if (name === "children") return sayChildren(value);
  if (Array.isArray(value)) return value.length ? say(value.join(", ")) : sayEmpty(name);
  return isMoment(name) ? when(value, page.now()) : say(value);
}

function isMoment(name) {
  return name === "since" || name === "until" || name.endsWith("_at");
}

function showWorker({worker, ...known}, page) {
  return [who(worker), Object.entries(known).map(([name, value]) => [" · ", h("span", {class: "quiet"},
    sayFact(name).toLowerCase(), ": "), showFact(name, value, page)])];
}
