// Limits of tasks: what each allows, who holds it, what waits; set, stop, let go on and remove.

import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {readJson, writeJson} from "../exact.js";
import {badge, facts, meter, say, section, taskLink, tile, who} from "../parts.js";
import {readUntil} from "../pausing.js";
import {link} from "../route.js";
import {asCommand, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayLength, when} from "../time.js";
import {sayNumber} from "../say.js";
import {sayRule} from "../words.js";

const RULES = ["concurrency_total", "concurrency_per_key", "rate", "overrides"];
const DEFAULT_STOP = "15m";

/** Read all limits, or one with those who hold it. */
export async function load(page) {
  const [name] = page.parts;
  return name ? {limit: await page.call("get_limit", {name})} : await page.call("list_limits");
}

/** The title of the page. */
export function title(page) {
  return page.parts[0] ?? "Limits";
}

/** Show the limits, or one of them. */
export function show({limits, limit}, page) {
  return limit ? showLimit(limit, page) : showLimits(limits, page);
}

function showLimits(limits, page) {
  const columns = [
    {name: "name", title: "Limit", grow: true, show: (limit) => say(limit.name)},
    {name: "state", title: "State", value: stateOf, show: (limit) => showState(limit)},
    {name: "in_use", title: "In use", number: true, show: (limit) => limit.in_use},
    {name: "waiting", title: "Waiting", number: true, show: (limit) => limit.waiting},
    ...RULES.map((name) => ({name, title: sayRule(name), wide: true, value: (limit) => sayAllowed(name, limit[name]),
      show: (limit) => sayAllowed(name, limit[name]) ?? h("span", {class: "quiet"}, "any")}))];
  const sum = (name) => limits.reduce((total, limit) => total + limit[name], 0);
  const stopped = limits.filter((limit) => limit.stopped_until).length;
  return [
    h("div", {class: "head"}, h("h1", null, "Limits"), h("div", {class: "actions"},
      page.may("set_limit") && h("button", {onclick: () => change(page)}, "Set a limit …"),
      exportMenu("limits", columns, limits), copyMenu("list_limits", {}))),
    h("div", {class: "tiles"}, tile(sum("in_use"), "leases that count"), tile(sum("waiting"), "tasks that wait"),
      tile(stopped, "stopped", {tone: stopped ? "warning" : ""})),
    table(page, {name: "limits", caption: h("span", {class: "off-screen"}, "Limits"), columns, rows: limits,
      key: (limit) => limit.name, open: (limit) => link(["limits", limit.name]), empty: noLimits()}),
    h("p", {class: "quiet"}, "A task that names two limits counts under both.")];
}

const noLimits = () => ["No limit is set. This sets one: ",
  offerCommand(asCommand("set_limit", {name: "openai", concurrency_total: 10}))];

function stateOf(limit) {
  return limit.stopped_until ? "stopped" : "open";
}

function showState(limit) {
  return limit.stopped_until ? badge("stopped", "warning") : badge("open", "ok");
}

/** Say what a rule allows; null is anything. */
function sayAllowed(name, rule) {
  if (name === "rate") return rule && `${sayNumber(rule.count)} in ${sayLength(rule.seconds)}`;
  if (name !== "overrides") return rule === null ? null : sayNumber(rule);
  const keys = Object.keys(rule).length;
  return keys ? `${sayNumber(keys)} key${keys === 1 ? "" : "s"}` : null;
}

// One limit.

function showLimit(limit, page) {
  const stopped = limit.stopped_until;
  return [
    h("div", {class: "head"}, h("h1", null, say(limit.name)), showState(limit), h("div", {class: "actions"},
      page.may("set_limit") && [
        stopped ? h("button", {class: "first", onclick: () => resume(page, limit)}, "Let it go on")
          : h("button", {onclick: () => stop(page, limit)}, "Stop …"),
        h("button", {onclick: () => change(page, limit)}, "Change …")],
      page.may("remove_limit") && h("button", {class: "danger", onclick: () => remove(page, limit)}, "Remove …"),
      copyMenu("get_limit", {name: limit.name}))),
    h("p", null, h("a", {href: link(["limits"])}, "Limits")),
    stopped && h("p", {class: "warning banner"}, h("strong", null, "Nothing of it is leased."),
      " It goes on ", when(stopped, page.now()),
      limit.stopped_by && [", stopped by ", taskLink(limit.stopped_by, "a task")]),
    h("div", {class: "meters"}, meter("In use", limit.in_use, limit.concurrency_total ?? -1)),
    section("What it allows", {}, facts([
      ...RULES.slice(0, 3).map((name) => [sayRule(name), sayAllowed(name, limit[name]) ?? "any"]),
      ["Waiting tasks that name it", sayNumber(limit.waiting)],
      ["Set", [when(limit.since, page.now()), " by ", who(limit.set_by)]]])),
    showOverrides(limit, page), showHolders(limit, page)];
}

function showOverrides({overrides}, page) {
  const rows = Object.entries(overrides).map(([key, rules]) => ({key, weight: 1, ...rules}));
  const rule = (name) => ({name, title: sayRule(name),
    show: (row) => sayAllowed(name, row[name] ?? null) ?? h("span", {class: "quiet"}, "as others")});
  return rows.length > 0 && section("Keys that differ", {}, table(page, {name: "overrides", rows,
    key: (row) => row.key, columns: [
      {name: "key", title: "Key", grow: true, show: (row) => say(row.key)}, rule("concurrency_per_key"), rule("rate"),
      {name: "weight", title: sayRule("weight"), number: true, show: (row) => row.weight}]}));
}

function showHolders({holders, more_holders: more}, page) {
  const columns = [
    {name: "task_id", title: "Task", grow: true, show: (lease) => taskLink(lease.task_id)},
    {name: "key", title: "Key", show: (lease) => lease.key ? say(lease.key) : h("span", {class: "quiet"}, "no key")},
    {name: "since", title: "Leased", show: (lease) => when(lease.since, page.now())}];
  return section("Who holds it", {}, table(page, {name: "holders", columns, rows: holders,
    key: (lease) => `${lease.key} ${lease.task_id}`, empty: "No lease counts against it now."}),
  more && h("p", {class: "quiet"}, `These are the first ${holders.length}; there are more.`));
}

// What an admin may do.

const rulesOf = (limit) => Object.fromEntries(["name", ...RULES].map((name) => [name, limit[name]]));
const readNumber = (text) => String(text).trim() === "" ? null : Number(text);

function readOverrides(text) {
  try {
    return readJson(text.trim() || "{}");
  } catch (problem) {
    throw new Error(`Keys that differ must be JSON: ${problem.message}`);
  }
}

function change(page, limit = null) {
  return askForm(limit ? ["Change ", say(limit.name)] : "Set a limit", {
    says: "It counts from the next claim on. Leases that are too many then go on.", button: "Set",
    fields: [
      ...(limit ? [] : [{name: "name", label: "Name", required: true, hint: "As tasks name it, such as openai"}]),
      ...["concurrency_total", "concurrency_per_key"].map((name) => ({name, label: sayRule(name), type: "number",
        value: limit?.[name] ?? "", hint: "Empty: any number"})),
      {name: "count", label: "May begin in a time", type: "number", value: limit?.rate?.count ?? "",
        hint: "Under each key. Empty: any number"},
      {name: "seconds", label: "That time, in seconds", type: "number", value: limit?.rate?.seconds ?? 60,
        when: ({count}) => String(count).trim() !== ""},
      {name: "overrides", label: "Keys that differ (JSON)", rows: 4, value: writeJson(limit?.overrides ?? {}),
        hint: 'Such as {"42": {"concurrency_per_key": 20, "weight": 3}}'}],
    run: async ({name, concurrency_total, concurrency_per_key, count, seconds, overrides}) => {
      const rate = readNumber(count) === null ? null : {count: Number(count), seconds: Number(seconds)};
      const asked = {name: limit?.name ?? name.trim(), rate, overrides: readOverrides(overrides),
        concurrency_total: readNumber(concurrency_total), concurrency_per_key: readNumber(concurrency_per_key)};
      await page.act("set_limit", asked);
      note("The limit is set");
    }});
}

function stop(page, limit) {
  return askForm(["Stop ", say(limit.name)], {
    says: "Nothing of it is leased until then. What is leased goes on.", button: "Stop", danger: true,
    fields: [{name: "until", label: "Until", value: DEFAULT_STOP, required: true,
      hint: "Such as 30m, 2h, or 2026-12-24T08:00Z"}],
    run: async ({until}) => {
      await page.act("set_limit", {...rulesOf(limit), stopped_until: readUntil(until, page.now())});
      note("The limit is stopped");
    }});
}

function resume(page, limit) {
  const passed = new Date(page.now() - 1000).toISOString();
  return page.act("set_limit", {...rulesOf(limit), stopped_until: passed}).then(() => note("It goes on"));
}

async function remove(page, {name}) {
  const answer = await askForm(["Remove ", say(name)], {
    says: "Tasks that name it wait for nothing of it any more.", button: "Remove", danger: true,
    run: () => page.callLast("remove_limit", {name})});
  if (!answer) return;
  note("The limit is removed");
  location.assign(link(["limits"]));
}
