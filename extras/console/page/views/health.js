// Health: what the gate finds about itself with the cure for each, its jobs of upkeep, and its numbers.

import {send, session} from "../api.js";
import {h} from "../dom.js";
import {badge, facts, say, section, tile} from "../parts.js";
import {copyMenu} from "../share.js";
import {sayLength, when} from "../time.js";

const ORDER = ["error", "warning", "note", "ok"];
const LINE = /^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)/;
const seen = new Map();         // the last answer of each process behind this address

/** Read health, findings and numbers. */
export async function load(page) {
  const [health, ready, examination, numbers] = await Promise.all([
    page.call("health"), page.call("ready").catch((problem) => ({ready: false, problem})),
    page.may("examine_gate") ? page.call("examine_gate").catch((problem) => ({problem})) : null,
    page.local.wantsNumbers && readNumbers()]);
  seen.set(health.instance_id, {health, at: page.now()});
  return {health, ready, examination, numbers};
}

/** Whether an event is a reason to look again: none is, for health has its own pace. */
export function concerns() {
  return false;
}

async function readNumbers() {
  if (!session.you.scopes.includes("metrics:read")) return null;
  const response = await send("metrics");
  if (!response.ok) return null;      // the setting metrics.enabled is off, or the numbers are at another port
  const numbers = [];
  for (const line of (await response.text()).split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (name && !/_(bucket|created)$/.test(name)) numbers.push({name, labels, value});
  }
  return numbers;
}

/** Show the health of the gate. */
export function show({health, ready, examination, numbers}, page) {
  const bad = Object.values(health.upkeep).filter((job) => job.last_error).length;
  return [
    h("div", {class: "head"}, h("h1", null, "Health"), h("div", {class: "actions"}, copyMenu("health", {}),
      examination && copyMenu("examine_gate", {}, "Copy findings as"))),
    h("div", {class: "tiles"},
      tile(badge(health.status, health.status === "healthy" ? "ok" : "error"), "this process"),
      tile(badge(health.database, health.database === "ok" ? "ok" : "error"), "database"),
      tile(badge(ready.draining ? "draining" : ready.ready ? "yes" : "no", ready.ready ? "ok" : "warning"),
        "takes new callers"),
      tile(sayLength(health.uptime), "up"), tile(bad, "jobs that failed", {tone: bad ? "danger" : ""})),
    examination && section("Findings", {}, showFindings(examination)),
    section("Upkeep", {}, showUpkeep(health.upkeep, page)),
    section("Processes", {}, h("p", {class: "quiet"}, "Those that have answered this page, behind one address."),
      [...seen.values()].map(({health: process, at}) => h("div", {key: process.instance_id}, facts([
        ["Process", h("span", {class: "code"}, process.instance_id)], ["Version", process.version],
        ["Up", sayLength(process.uptime)], ["Answered", when(new Date(at).toISOString(), page.now())]])))),
    section("Numbers", {}, numbers ? showNumbers(numbers, page) : numbers !== null ? askForNumbers(page)
      : h("p", {class: "quiet"}, "The gate shows its numbers at /metrics if the setting metrics.enabled is on "
        + "and the credential has the scope metrics:read."))];
}

function showUpkeep(upkeep, page) {
  return h("table", {class: "rows"},
    h("thead", null, h("tr", null,
      ["Job", "Last run", "Runs", "Failures", "Did"].map((title) => h("th", {scope: "col"}, title)))),
    h("tbody", null, Object.entries(upkeep).map(([name, job]) => h("tr", {key: name, "data-row": ""},
      h("td", {"data-title": "Job"}, h("strong", null, name)),
      h("td", {"data-title": "Last run"}, when(job.last_run_at, page.now()),
        job.last_error && [" ", badge(job.last_error, "error")]),
      h("td", {"data-title": "Runs"}, job.runs), h("td", {"data-title": "Failures"}, job.failures),
      h("td", {"data-title": "Did"}, job.last_done)))));
}

function showFindings({problem, findings = []}) {
  if (problem) return h("p", {class: "quiet"}, problem.message);
  const sorted = [...findings].sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity));
  const row = (finding, at) => h("li", {key: `${finding.check} ${at}`}, badge(finding.severity),
    h("div", null, h("p", null, say(finding.seen)), finding.cure && h("p", {class: "quiet"}, say(finding.cure))));
  const good = sorted.filter((finding) => finding.severity === "ok");
  return [
    h("ul", {class: "findings"}, sorted.filter((finding) => finding.severity !== "ok").map(row)),
    h("details", null, h("summary", null, `${good.length} checks found nothing wrong`),
      h("ul", {class: "findings"}, good.map(row)))];
}

/** Offer the numbers: many gates have none, and a request for what is not there is an error in the browser's log. */
function askForNumbers(page) {
  return h("button", {onclick: () => {
    page.local.wantsNumbers = true;
    page.refresh();
  }}, "Read what the gate counts");
}

function showNumbers(numbers, page) {
  const wanted = (page.params.find ?? "").toLowerCase();
  const hits = numbers.filter(({name, labels}) => `${name}${labels}`.toLowerCase().includes(wanted));
  return [
    h("div", {class: "filter"}, h("input", {type: "search", "aria-label": "Find numbers",
      placeholder: "such as commit, or queue", value: page.params.find ?? "",
      oninput: (event) => page.go({find: event.target.value}, {replace: true})})),
    h("table", {class: "rows"},
      h("thead", null, h("tr", null,
        h("th", {scope: "col"}, "Name"), h("th", {scope: "col", class: "number"}, "Value"))),
      h("tbody", null, hits.slice(0, 100).map(({name, labels, value}) => h("tr", {key: name + labels, "data-row": ""},
        h("td", {class: "code grow", "data-title": "Name"},
          name.replace("asyncgate_", ""), h("span", {class: "quiet"}, labels)),
        h("td", {class: "number", "data-title": "Value"}, value))))),
    hits.length > 100 && h("p", {class: "quiet"}, `${hits.length - 100} more: search for a part of the name`)];
}
