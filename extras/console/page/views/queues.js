// Queues: how deep, how long the oldest waits, what happens, who can take it; pause, drain, resume.

import {callAll, session} from "../api.js";
import {h} from "../dom.js";
import {isType, readFilter, writeWord} from "../filter.js";
import {addSample, groupLanes, splitWorkers, stopsQueue, toneOf} from "../fit.js";
import {chart, sparkline} from "../charts.js";
import {badge, say, sayThereAreMore, searchField, section, tile} from "../parts.js";
import {askPause, pauseButtons, showPauses} from "../pausing.js";
import {link} from "../route.js";
import {asCommand, copyMenu, FIRST_TASK, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayClock, sayLength, when} from "../time.js";
import {nameCapabilities, showWorker} from "./workers.js";

const noQueues = () => ["No queue has had a task in the last hour. Tasks make queues: ",
  offerCommand(asCommand("create_task", FIRST_TASK))];
const words = {
  type: (text) => ({type: text}), needs: (text) => ({needs: text}), "": (text) => ({name: text.toLowerCase()}),
  is: (text) => {
    if (!(text in STANDINGS)) throw new Error(`say one of ${Object.keys(STANDINGS).join(", ")}`);
    return {is: text};
  }};
const STANDINGS = {
  waiting: (queue) => queue.claimable > 0, stuck: isStuck, paused: (queue, pauses) => isPaused(queue, pauses),
  held: (queue) => queue.held > 0, leased: (queue) => queue.leased > 0};

const LIST_MINUTES = 30;     // that a line of the list draws
const MINUTES = 60;
const MINUTE_MS = 60000;
const FEW = 5;      // how many queues that nobody can take the warning names

// What this page has seen of each queue.  It outlives a visit, so that a look at one queue does not begin anew.
const seen = new Map();

/** Read what the view shows: all queues, or one. */
export async function load(page) {
  const [id] = page.parts;
  const {pauses} = page.may("list_pauses") ? await page.call("list_pauses") : {pauses: []};
  if (!id) {
    const list = await callAll(page, "list_queues", "queues", {minutes: LIST_MINUTES});
    for (const queue of list.rows) note(queue, page.now());
    return {...list, pauses};
  }
  const queue = await page.call("get_queue", {queue_id: id, minutes: MINUTES});
  note(queue, page.now());
  const [{queues}, workers] = await Promise.all([page.call("list_queues", {limit: 200, type: queue.type}),
    page.may("list_workers") ? callAll(page, "list_workers", "workers") : null]);
  return {queue, lanes: queues.filter((lane) => lane.queue_id !== id), workers, pauses};
}

function note(queue, now) {
  addSample(samplesOf(queue), {at: now, claimable: queue.claimable});
}

function samplesOf({queue_id: id}) {
  const key = `${session.you.tenant_id} ${id}`;
  if (!seen.has(key)) seen.set(key, []);
  return seen.get(key);
}

/** The queue's type stands in the title of its page. */
export function title(page) {
  return page.parts.length ? page.data?.queue.type ?? "Queue" : "Queues";
}

/** Show the queues, or one of them. */
export function show(data, page) {
  return data.queue ? showQueue(data, page) : showQueues(data, page);
}

// All queues.

const isPaused = (queue, pauses) => pauses.some((pause) => stopsQueue(pause, queue));

function isStuck(queue, pauses) {
  return queue.claimable > 0 && queue.workers === 0 && !isPaused(queue, pauses);
}

function listColumns(pauses) {
  return [
    {name: "type", title: "Type", grow: true, show: (queue) => nameQueue(queue)},
    {name: "claimable", title: "Waiting", number: true, show: (queue) => queue.claimable},
    {name: "chart", title: "Ended by minute", wide: true, value: () => null, show: (queue) => drawEnded(queue)},
    {name: "oldest_wait_seconds", title: "Oldest waits", number: true, show: (queue) => sayWait(queue)},
    {name: "leased", title: "Leased", number: true, show: (queue) => queue.leased},
    {name: "delayed", title: "Delayed", number: true, wide: true, show: (queue) => sayDelayed(queue)},
    {name: "held", title: "On hold", number: true, wide: true, show: (queue) => queue.held},
    {name: "workers", title: "Workers", show: (queue) => queue.lanes ? null : showStanding(queue, pauses)},
    hourColumn("ended", "Ended in 1 h"), hourColumn("failed", "Failed in 1 h")];
}

function hourColumn(name, title) {
  const read = (queue) => queue.last_hour[name];
  return {name, title, number: true, wide: true, value: read, show: read};
}

/** Name a queue in the list: a lane among others of its type by what it requires. */
function nameQueue(queue) {
  const requires = ["requires ", nameCapabilities(queue.capabilities)];
  if (queue.lane) return h("span", {class: "lane"}, requires);
  const says = queue.lanes ? `${queue.lanes} lanes` : queue.capabilities.length > 0 && requires;
  return [say(queue.type), says && h("span", {class: "quiet"}, " ", says)];
}

function sayWait({oldest_wait_seconds: wait}) {
  return wait === null ? "–" : sayLength(wait);
}

function sayDelayed(queue) {
  return `${queue.delayed}${queue.delayed_at_least ? "+" : ""}`;
}

function showStanding(queue, pauses) {
  if (isPaused(queue, pauses)) return badge("paused");
  return queue.workers || (queue.claimable ? badge("nobody", "warning") : h("span", {class: "quiet"}, "nobody"));
}

function drawEnded({by_minute: minutes}) {
  return minutes?.ended.some(Boolean) && sparkline(minutes.ended,
    `Ended in each of the last ${LIST_MINUTES} minutes: ${minutes.ended.join(", ")}`);
}

function showQueues({rows, more, pauses}, page) {
  const {values, problems} = readFilter(page.params.q ?? "", words);
  const queues = rows.filter((queue) => fits(queue, values, pauses));
  const sum = (name) => queues.reduce((total, queue) => total + queue[name], 0);
  const columns = listColumns(pauses);
  const exported = [{name: "queue_id"}, {name: "capabilities"}, ...columns.filter((column) => column.name !== "chart")];
  return [
    h("div", {class: "head"}, h("h1", null, "Queues"),
      h("div", {class: "actions"}, page.may("pause_work") && h("button", {onclick: () => askPause(page)}, "Pause …"),
        exportMenu("queues", exported, queues, {more}), copyMenu("list_queues", {limit: 200}))),
    searchField(page, {hint: "type:ocr* needs:gpu is:stuck", problems}),
    warnOfStuck(queues.filter((queue) => isStuck(queue, pauses))),
    h("div", {class: "tiles"}, tile(sum("claimable"), "waiting", {href: linkTasks(values, "status:queued")}),
      tile(sum("leased"), "leased", {href: linkTasks(values, "status:leased")}), tile(sum("delayed"), "delayed"),
      tile(sum("held"), "on hold", {tone: sum("held") ? "warning" : "", href: linkTasks(values, "held:yes")})),
    showPauses(pauses, page),
    table(page, {name: "queues", caption: h("span", {class: "off-screen"}, "Queues"), columns, rows: groupLanes(queues),
      key: (queue) => queue.queue_id,
      open: ({queue_id: id, type, lanes}) => lanes ? link(["queues"], {q: writeWord("type", type)}) : linkQueue(id),
      empty: page.params.q ? "No queue fits this filter." : noQueues()}),
    more && sayThereAreMore(rows, "queues"),
    queues.length > 0 && h("p", {class: "quiet"},
      `The small charts show how many tasks ended in each of the last ${LIST_MINUTES} minutes, from 0 to the most.`)];
}

// Only a type is chosen alike in both views: other words choose queues, and no tasks.
function linkTasks({type, ...rest}, q) {
  return Object.keys(rest).length ? null : link(["tasks"], {q: type ? `${writeWord("type", type)} ${q}` : q});
}

function linkQueue(id) {
  return link(["queues", id]);
}

function fits(queue, {type, needs, name, is}, pauses) {
  return (!type || isType(queue.type, type)) && (!needs || queue.capabilities.includes(needs))
    && (!name || queue.type.toLowerCase().includes(name)) && (!is || STANDINGS[is](queue, pauses));
}

function warnOfStuck(queues) {
  if (!queues.length) return null;
  const tasks = queues.reduce((total, queue) => total + queue.claimable, 0);
  const more = queues.length - FEW;
  return h("div", {class: "warning banner"},
    h("strong", null, `Nobody can take ${tasks} waiting task${tasks === 1 ? "" : "s"}: `),
    queues.slice(0, FEW).map((row, at) => [at > 0 && ", ", h("a", {href: linkQueue(row.queue_id)}, say(row.type))]),
    more > 0 && [" and ", h("a", {href: link(["queues"], {q: "is:stuck"})}, `${more} more queues`)], ".");
}

// One queue.

function showQueue({queue, lanes, workers, pauses}, page) {
  const lane = {type: queue.type, capabilities: queue.capabilities};
  const mine = pauses.filter((pause) => stopsQueue(pause, queue));
  const split = splitWorkers(workers?.rows ?? [], queue, pauses);
  const waiting = link(["tasks"], {q: `${writeWord("type", queue.type)} status:queued`});
  return [
    h("div", {class: "head"}, h("h1", null, say(queue.type)), mine.length > 0 && badge("paused"),
      h("div", {class: "actions"}, pauseButtons(page, lane, pauses),
        page.may("create_task") && h("button", {onclick: () => askForTask(page, queue.type)}, "New task …"),
        page.may("pause_work") && lanes.length > 0
          && h("button", {onclick: () => askPause(page, {type: queue.type})}, "Pause all lanes …"),
        copyMenu("get_queue", {queue_id: queue.queue_id}))),
    h("p", null, h("a", {href: link(["queues"])}, "Queues"), " · requires ", nameCapabilities(queue.capabilities),
      " · ", h("a", {href: waiting}, "its waiting tasks")),
    workers && warnOfNobody(queue, split, mine),
    h("div", {class: "tiles"}, tile(queue.claimable, "waiting"), tile(sayWait(queue), "the oldest waits"),
      tile(queue.leased, "leased"), tile(sayDelayed(queue), "delayed"),
      tile(queue.held, "on hold", {tone: queue.held ? "warning" : ""})),
    showPauses(mine, page),
    showFlow(queue, page),
    workers && showWhoCan(split, page),
    lanes.length > 0 && section("Other lanes of this type", {}, h("ul", {class: "plain"}, lanes.map(showLane)))];
}

async function askForTask(page, type) {
  return (await import("../new_task.js")).askForTask(page, type);
}

function showWhoCan({able, others}, page) {
  return section("Who can take it", {},
    able.length ? listWorkers(able, page, "able")
      : h("p", {class: "empty"}, "Nobody who has asked for tasks can take these."),
    others.length > 0 && h("details", {key: "others"},
      h("summary", null, `${others.length} who cannot`), listWorkers(others, page, "others")));
}

function showLane({queue_id: id, capabilities, claimable, leased}) {
  return h("li", {key: id}, h("a", {href: linkQueue(id)}, "requires ", nameCapabilities(capabilities)),
    ` ${claimable} waiting, ${leased} leased`);
}

/** Say why waiting tasks are taken by nobody, and what helps. */
function warnOfNobody(queue, {able, others}, mine) {
  if (!queue.claimable || mine.length) return null;
  const states = new Set(able.map((worker) => worker.state));
  if (states.has("idle")) return null;
  if (states.has("working")) {
    return h("p", {class: "busy banner"}, "Everybody who can take these tasks is working on others.");
  }
  const says = able.length === 0 ? sayLack(queue, others)
    : states.has("paused") ? "Those who can take them are paused."
      : "Those who could take them ask for tasks no more: start one of them.";
  return h("p", {class: "warning banner"}, h("strong", null, "Nobody takes these tasks. "), says);
}

function sayLack({type, capabilities}, others) {
  const active = others.filter((worker) => worker.state !== "silent");
  const [nearest] = (active.length ? active : others).filter((worker) => !worker.lack.type)
    .sort((first, other) => first.lack.missing.length - other.lack.missing.length);
  if (nearest) {
    return ["The nearest is ", say(nearest.worker.id), ", which lacks ", nameCapabilities(nearest.lack.missing), "."];
  }
  const has = capabilities.length > 0 && [" and has ", nameCapabilities(capabilities)];
  return ["Start a worker that accepts ", say(type), has, "."];
}

const CHARTS = [["started", "Leases granted in a minute"], ["ended", "Ended in a minute"],
  ["lost", "Failed or expired in a minute"]];
const FLOWS = [["Leases granted", "started"], ["Ended", "ended"], ["Attempts failed", "failed"],
  ["Leases expired", "expired"]];

function showFlow(queue, page) {
  const samples = samplesOf(queue);
  const hour = {...queue.last_hour, lost: queue.last_hour.failed + queue.last_hour.expired};
  const {started, ended, failed, expired} = queue.by_minute;
  const counted = {started, ended, lost: failed.map((count, at) => count + expired[at])};
  const timed = (numbers) => numbers.map((number, at) => [page.now() - (MINUTES - 1 - at) * MINUTE_MS, number]);
  return section("What happens", {},
    h("div", {class: "charts"}, chart(samples.map(({at, claimable}) => [at, claimable]), "Waiting", {key: "claimable"}),
      CHARTS.map(([name, label]) => chart(timed(counted[name]), label, {key: name, usual: hour[name] / 60}))),
    h("p", {class: "quiet"}, `Waiting is drawn from ${sayClock(samples[0].at, page.now())} on, when this page began `
      + "to look; all else is what the gate counted in the last hour. The dashed line is the mean."),
    h("table", {class: "rows"}, h("caption", {class: "off-screen"}, "What happened lately"),
      h("thead", null, h("tr", null,
        ["", ...FLOWS.map(([label]) => label)].map((label) => h("th", {scope: "col"}, label)))),
      h("tbody", null, showLately("Last minute", queue.last_minute), showLately("Last hour", queue.last_hour))));
}

function showLately(name, flow) {
  return h("tr", {"data-row": ""}, h("th", {scope: "row"}, name),
    FLOWS.map(([label, member]) => h("td", {"data-title": label}, flow[member])));
}

const toldColumn = {name: "why", title: "Answer", grow: true, wide: true,
  show: (worker) => say(worker.claims[0]?.why_none ?? "–")};

const workerColumns = (page, kind) => [
  {name: "worker", title: "Worker", show: ({worker}) => showWorker(worker)},
  {name: "state", title: "State", show: ({state}) => badge(state, toneOf(state))},
  kind === "able" ? {name: "holding", title: "Holds", number: true, show: (worker) => worker.holding}
    : {name: "lack", title: "Lacks", grow: true, show: ({lack}) => [lack.type && "does not accept the type",
      lack.type && lack.missing.length > 0 && "; ", lack.missing.length > 0 && nameCapabilities(lack.missing)]},
  {name: "asked", title: "Last asked", show: (worker) => when(worker.last_claim_at, page.now())},
  ...(kind === "able" ? [toldColumn] : [])];

function listWorkers(workers, page, kind) {
  return table(page, {name: kind, columns: workerColumns(page, kind), rows: workers,
    key: ({worker}) => `${worker.kind}:${worker.id}`, open: ({worker}) => link(["workers", worker.kind, worker.id])});
}
