// The audit log: the last lines, newest first, and whether their chain is whole.

import {h} from "../dom.js";
import {badge, say} from "../parts.js";
import {asCommand, copyMenu, offerCommand} from "../share.js";
import {jsonTree} from "../exact.js";
import {exportMenu, table} from "../table.js";
import {sayClock, when} from "../time.js";
import {readFilter, withWord} from "../filter.js";

const LAST_LINES = 500;
const MOST_LINES = 200;
const TONES = {info: "note", warning: "warning", critical: "error"};
const plain = (name) => (text) => ({[name]: text});
const WORDS = {event: plain("event"), key: plain("key_id"), session: plain("session_id"), token: plain("token_id"),
  severity: (text) => {
    if (!(text in TONES)) throw new Error("it is info, warning or critical");
    return {severity: text};
  }, last: (text) => {
    if (!/^[1-9]\d{0,5}$/.test(text)) throw new Error("it is a number of lines");
    return {last: Number(text)};
  }};

const ask = ({params}) => ({
  last: LAST_LINES, limit: MOST_LINES, tenant: params.tenant, ...readFilter(params.q ?? "", WORDS).values});

/** Read the last lines. */
export async function load(page) {
  let reply = await page.call("list_audit", ask(page));
  const lines = [...reply.lines];
  while (reply.next_cursor && lines.length < LAST_LINES) {
    reply = await page.call("list_audit", {...ask(page), cursor: reply.next_cursor});
    lines.push(...reply.lines);
  }
  return {lines: lines.reverse(), broken: reply.broken};
}

/** Show the lines. */
export function show({lines, broken}, page) {
  const q = page.params.q ?? "";
  const {problems} = readFilter(q, WORDS);
  const columns = [
    {name: "timestamp", title: "When", show: ({timestamp: time}) => h("time", {datetime: time, title: time},
      sayClock(time, page.now()))},
    {name: "severity", title: "Severity", show: (line) => badge(line.severity, TONES[line.severity])},
    {name: "event", title: "Event", show: (line) => h("a", {href: "", onclick: (event) => {
      event.preventDefault();
      page.go({q: withWord(q, "event", line.event)});
    }}, line.event)},
    {name: "principal_id", title: "Who", show: (line) => say(line.principal_id ?? "–")},
    {name: "ip", title: "Address", wide: true, show: (line) => line.ip ?? "–"},
    {name: "details", title: "Details", grow: true, show: (line) => h("details", {key: line.audit_id},
      h("summary", {class: "quiet"}, say(line.reason ?? "show")), jsonTree(line.details, {open: 1}))},
    {name: "number", title: "Line", wide: true, number: true,
      show: (line) => h("span", {title: line.hash}, line.number)}];
  return [
    broken ? h("p", {class: "problem banner", role: "alert"}, `The chain is broken: ${broken}`)
      : lines.length > 0 && h("p", {class: "quiet"},
        "The chain of hashes is whole in what was read; its last line was written ",
        when(lines[0].timestamp, page.now()), ". ", h("code", null, "asyncgate verify"), " reads all of it."),
    h("div", {class: "head"},
      h("form", {class: "filter", onsubmit: (event) => event.preventDefault()},
        h("input", {type: "search", "aria-label": "Filter", value: q,
          placeholder: "event:key_issued severity:warning key:ID last:1000",
          oninput: (event) => page.go({q: event.target.value}, {replace: true})})),
      h("div", {class: "actions"}, exportMenu("audit", columns, lines), copyMenu("list_audit", ask(page)))),
    problems.map((problem) => h("p", {class: "problem", role: "alert"}, problem)),
    table(page, {name: "audit", columns, rows: lines, key: (line) => line.audit_id, empty: [
      q ? "No line fits this filter. All lines: " : "No line is written yet. To ask again: ",
      offerCommand(asCommand("list_audit", {tenant: page.params.tenant, last: LAST_LINES}))]})];
}
