// One task: why it is not done, what happened to it, what its receipts prove, and what goes in and comes out.

import {OPERATIONS} from "../api.js";
import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {writeWord} from "../filter.js";
import {jsonTree, readPayload, writeJson} from "../exact.js";
import {badge, contextOf, endOf, facts, say, section, shortId, taskLink, who} from "../parts.js";
import {go, link} from "../route.js";
import {copy, copyMenu, download, menu} from "../share.js";
import {askToAttach, askToCancel} from "../task_questions.js";
import {sayLength, when} from "../time.js";
import {isReleasable, sayHold} from "../say.js";
import {sayBytes} from "../words.js";
import {acknowledge, canAcknowledge, showChain, speaksFor} from "./task_chain.js";
import {showEvidence} from "./task_evidence.js";
import {readFamily, showFamily} from "./task_family.js";
import {TaskOutput} from "./task_output.js";
import {tellStory} from "./task_story.js";
import {sayError, showTimeline} from "./task_timeline.js";

const PAGE = 200;               // how many events one call returns
const MOST_EVENTS = 5000;       // how many events of a history are read
const MOST_STRANGERS = 12;      // how many receipts of other tasks are looked up
const LONGEST_EDITED = 100000;  // how many letters of a payload a field holds well
const WHOLE_ID = 36;
const ENDED = ["succeeded", "failed", "canceled"];
const ENDS = {succeeded: "good", failed: "problem", canceled: "calm"};
const TONES = {claimable: "good", leased: "busy", delay: "busy", backoff: "busy", parked: "busy", jitter: "busy",
  behind: "busy", workers_busy: "busy"};

await addSheet("task.css");

/** Add the sheet of this view, which no other view waits for. */
function addSheet(name) {
  const sheet = document.createElement("link");
  return new Promise((resolve) => {
    Object.assign(sheet, {rel: "stylesheet", href: new URL(name, import.meta.url).href, onload: resolve,
      onerror: resolve});
    document.head.append(sheet);
  });
}

/** Read what the view shows. */
export async function load(page) {
  const [task_id] = page.parts;
  if (!task_id) return {};
  const [task, explanation, history] = await Promise.all([page.call("get_task", {task_id}),
    page.may("explain_task") ? mayBeRefused(page.call("explain_task", {task_id})) : null,
    page.may("get_task_history") ? mayBeRefused(readHistory(page, task_id)) : null]);
  const receipts = (history?.events ?? []).flatMap((event) => event.receipt ?? []);
  tick(page, !task.result);
  if (page.may("read_output")) page.local.output ??= new TaskOutput(page, task_id);
  const [strangers, family, asked, steps] = await Promise.all([readStrangers(page, receipts),
    mayBeRefused(readFamily(page, task)), mayBeRefused(readAsked(page, task, receipts)),
    mayBeRefused(readSteps(page, task))]);
  return {task, explanation, history, receipts, strangers, family: family ?? [], asked, steps};
}

// Most tasks have asked nothing and have no steps: what shows them is fetched for those that do.
async function readAsked(page, task, receipts) {
  const asks = task.held === "input_required" || receipts.some((receipt) => receipt.receipt_type === "input.requested");
  if (!asks || !page.may("list_inputs")) return null;
  const [view, {inputs}] = await Promise.all([import("./task_asked.js"),
    page.call("list_inputs", {task_id: task.task_id})]);
  return () => view.showAsked(inputs, task, page);
}

async function readSteps(page, task) {
  if (!task.steps || !page.may("list_steps")) return null;
  const view = await import("./task_steps.js");
  const known = await view.readSteps(page, task);
  return () => view.showSteps(known, task, page);
}

/** The title of the page. */
export function title(page) {
  const task = page.data?.task;
  return task ? `${task.task_summary ?? task.type} (${task.status})` : "Task";
}

/** Whether an event is about this task, or about what keeps all tasks waiting. */
export function concerns({type, about}, page) {
  return type === "work.pauses" || about.task_id === page.parts[0];
}

async function mayBeRefused(asked) {
  try {
    return await asked;
  } catch (problem) {
    if (problem.status === 403) return null;
    throw problem;
  }
}

/** Read the history on from where the last look ended. */
async function readHistory(page, task_id) {
  const known = page.local.history ??= {events: [], cursor: null, more: false};
  const ids = new Set(known.events.map((event) => event.event_id));
  for (;;) {
    const reply = await page.call("get_task_history", {task_id, limit: PAGE, cursor: known.cursor});
    known.events.push(...reply.events.filter((event) => !ids.has(event.event_id)));
    known.cursor = reply.cursor;
    known.more = Boolean(reply.next_cursor) && known.events.length >= MOST_EVENTS;
    if (!reply.next_cursor || known.more) break;
  }
  known.events.sort((a, b) => a.event_id < b.event_id ? -1 : 1);
  return known;
}

/** Read receipts of other tasks that this one's receipts answer; they never change, so each is asked for once. */
async function readStrangers(page, receipts) {
  const known = page.local.strangers ??= {};
  const own = new Set(receipts.map((receipt) => receipt.receipt_id));
  const asked = [...new Set(receipts.flatMap(({parents}) => parents))].filter((id) => !own.has(id) && !(id in known));
  if (page.may("get_receipt")) await Promise.all(asked.slice(0, MOST_STRANGERS).map(async (receipt_id) => {
    known[receipt_id] = await page.call("get_receipt", {receipt_id}).catch(() => null);
  }));
  return known;
}

const TICK_MS = 1000;

/** Draw once a second while the task is not done, so that its lease and its waits are seen to go on. */
function tick(page, goesOn) {
  if (!goesOn || page.local.ticking) return;
  page.local.ticking = setInterval(() => !document.hidden && getSelection().isCollapsed && page.redraw(), TICK_MS);
  page.leaving.signal.addEventListener("abort", () => clearInterval(page.local.ticking));
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main details:not([open], .menu, .on-demand)")) {
    details.open = true;
    details.dataset.printed = "";
  }
});
addEventListener("afterprint", () => {
  for (const details of document.querySelectorAll("details[data-printed]")) {
    details.open = false;
    delete details.dataset.printed;
  }
});

/** Show the task. */
export function show(data, page) {
  if (!data.task) return askWhich();
  const {task, explanation, history} = data;
  const seen = {beat: explanation?.evidence.workers?.[0]?.last_seen_at, renewals: explanation?.evidence.renewals};
  const story = history && tellStory(task, history.events, explanation?.cause === "leased" ? seen : {});
  return [
    showHead(data, page),
    explanation ? showExplanation(data, page) : h("p", {class: "quiet"},
      "Only its owner and admins are told why it is not done."),
    data.asked?.(),
    showContents(data, page),
    page.local.output?.show(),
    data.steps?.(),
    showFamily(task, data.family),
    section("Timeline", {id: "timeline"}, story ? showTimeline(story, task, page) : showNoHistory()),
    section("Receipts", {id: "receipts", actions: history?.more
      && h("span", {class: "quiet"}, `the first ${MOST_EVENTS} events`)},
      history ? showChain(data, page) : showNoHistory()),
    showContract(data, page)];
}

function showNoHistory() {
  return h("p", {class: "empty"}, "This credential may not read its history.");
}

function askWhich() {
  return [h("h1", null, "Task"), h("form", {class: "filter", onsubmit: (event) => {
    event.preventDefault();
    const id = event.target.elements.task.value.trim();
    if (id.length < WHOLE_ID) go(["tasks"], {q: id});      // where a part of an id is found
    else go(["task", id], {});
  }}, h("input", {type: "search", name: "task", required: true, "aria-label": "Id of a task",
    placeholder: "Id of a task"}),
  h("button", {class: "first"}, "Show"))];
}

// The head: what it is, and what can be done.

function showHead(data, page) {
  const {task} = data;
  return h("header", {class: "task-head"},
    h("div", {class: "head"}, h("h1", null, say(task.task_summary ?? task.type)), badge(task.status),
      task.held && badge("on hold", "held"),
      task.obligation_open && task.status === "succeeded" && badge("still owed", "warning")),
    h("p", {class: "dotted"}, page.may("list_tasks")
      ? h("a", {href: link(["tasks"], {q: writeWord("type", task.type)}), class: "code"}, say(task.type))
      : h("span", {class: "code"}, say(task.type)),
      h("span", null, "owned by ", who(task.created_by),
        contextOf(task.created_by) && [", over A2A in the context ", say(contextOf(task.created_by))]),
      h("span", null, "created ", when(task.created_at, page.now())),
      task.result && h("span", null, "ended ", when(task.result.completed_at, page.now())),
      task.leased_to && h("span", null, "leased to ", who(task.leased_to)),
      h("span", {class: "code"}, task.task_id, " ", shortId(task.task_id))),
    h("div", {class: "actions"}, listActions(data, page),
      menu("Export", [
        h("button", {role: "menuitem", onclick: () => download(`task-${task.task_id}.json`, "application/json",
          writeJson({task, history: data.history?.events ?? null}, 2))}, "JSON with history"),
        h("button", {role: "menuitem", onclick: () => print()}, "Print")]),
      copyMenu("get_task", {task_id: task.task_id})));
}

/** What can be done with a task in this state by this credential: names of operations, and how to do them. */
const ACTIONS = {
  release_hold: {title: "Release", first: true, run: release,
    fits: (task) => isReleasable(task.held) && !isEnded(task)},
  attach_artifacts: {title: "Attach artifacts …", first: true, fits: isOwed, run: attach},
  rerun_task: {title: "Run again …", fits: isEnded, run: runAgain},
  cancel_task: {title: "Cancel …", danger: true, fits: (task) => !isEnded(task), run: cancel},
};

function isOwed(task) {
  return task.status === "succeeded" && task.obligation_open;
}

function isEnded(task) {
  return ENDED.includes(task.status);
}

/** Return an action if it is legal now: the owner's or an admin's, and attaching also for the worker that did it. */
function offers(operation, {task, receipts}, page) {
  const action = ACTIONS[operation];
  if (!action || !page.may(operation) || !action.fits(task)) return null;
  const worker = receipts.findLast((receipt) => receipt.receipt_type === "task.accepted")?.from;
  const may = speaksFor(task.created_by) || (operation === "attach_artifacts" && worker && speaksFor(worker));
  return may ? action : null;
}

function listActions(data, page) {
  const {task, receipts} = data;
  const unread = receipts.findLast((receipt) => receipt.receipt_type === "task.result_ready");
  return [
    Object.keys(ACTIONS).map((name) => offers(name, data, page)).filter(Boolean)
      .map((action) => showAction(action, task, page)),
    unread && canAcknowledge(unread, receipts, page)
      && h("button", {onclick: () => acknowledge(unread, page)}, "Acknowledge the result")];
}

function showAction({title: name, danger, first, run}, task, page) {
  return h("button", {class: danger ? "danger" : first ? "first" : null, onclick: () => run(task, page)}, name);
}

function release({task_id}, page) {
  return page.act("release_hold", {task_id}).then(() => note("Released: workers can lease it"),
    (problem) => note(problem.message, "bad"));
}

function cancel(task, page) {
  return askToCancel(nameOf(task), (...ask) => page.act(...ask));
}

function attach(task, page) {
  return askToAttach(nameOf(task), (...ask) => page.act(...ask));
}

function nameOf({task_id: id, task_summary: summary, type}) {
  return {id, name: summary || type};
}

/** Run it again; with another payload it is a new task with the same terms. */
async function runAgain(task, page) {
  const text = writeJson(task.payload, 2);
  const edits = page.may("create_task") && text.length <= LONGEST_EDITED;
  const answer = await askForm("Run again", {
    says: "A new task with the same terms begins; this one stays as it is.", button: "Run again",
    fields: edits ? [{name: "payload", label: "Payload (JSON)", value: text, rows: 10,
      hint: "With another payload it is a new task of yours; its receipts do not name this one"}] : [],
    run: ({payload = text}) => payload.trim() === text.trim() ? page.act("rerun_task", {task_id: task.task_id})
      : page.act("create_task", {...termsOf(task), payload: readPayload(payload)})});
  if (!answer) return;
  note("It runs again, as a new task");
  go(["task", answer.done.task_id], {});
}

const TERMS = ["type", "payload_pointer", "requirements", "priority", "max_attempts", "retry_backoff_seconds",
  "max_expiries", "principal_ai", "task_summary", "instructions", "success_criteria", "expected_outcome_kind",
  "expected_artifact_mime", "result_delivery"];

function termsOf(task) {
  const length = task.timeouts?.lease_ttl_seconds;       // a deadline was meant for the first run
  return {...Object.fromEntries(TERMS.map((name) => [name, task[name]])),
    ...(length && {timeouts: {lease_ttl_seconds: length}})};
}

// The explanation.

function showExplanation(data, page) {
  const {task, explanation} = data;
  const done = explanation.cause === "ended";
  const tone = done ? ENDS[task.status] : TONES[explanation.cause] ?? "warning";
  return h("section", {class: `banner why ${tone}`, "aria-label": "Why"},
    showCause(explanation, data, page, "h2"),
    explanation.also.length > 0 && h("div", {class: "also"}, h("h3", null, "Also"),
      explanation.also.map((cause) => showCause(cause, data, page, "p"))));
}

function showCause(cause, data, page, tag) {
  const {task, receipts} = data;
  const evidence = Object.keys(cause.evidence).length > 0;
  return h("div", {class: "cause", key: cause.cause},
    h(tag, {class: "summary"}, say(cause.summary)),
    showNext(cause.next, data, page),
    evidence && h("details", null, h("summary", null, "Evidence"), showEvidence(cause, page),
      cause.evidence.receipt_ids?.filter((id) => receipts.some((receipt) => receipt.receipt_id === id))
        .map((id) => h("a", {href: link(["task", task.task_id], {receipt: id})}, `Show receipt ${endOf(id)}`))));
}

const PLACES = {list_workers: () => link(["workers"]), list_queues: () => link(["queues"]),
  get_limits: () => link(["admin"]),
  list_tasks: () => link(["tasks"])};

function showNext({operation, arguments: ask, why}, data, page) {
  const action = offers(operation, data, page);
  const place = PLACES[operation];
  const known = operation in OPERATIONS;
  const waits = operation.startsWith("get_task");
  return h("div", {class: "actions next"}, h("span", null, waits ? "What to do: " : "Next: ", say(why), "."),
    action ? showAction(action, data.task, page) : place && h("a", {class: "button", href: place()}, "Show"),
    operation === "resume_work" && page.may(operation)
      && h("button", {class: "first", onclick: () => page.act(operation, ask)
      .then(() => note("Resumed"), (problem) => note(problem.message, "bad"))}, "Resume"),
    known && page.may(operation) && !waits && copyMenu(operation, ask));
}

// The contract.

function showContract({task, history, explanation}, page) {
  const {timeouts} = task;
  const reruns = (history?.events ?? []).flatMap((event) => event.payload?.rerun_as ?? []);
  const time = (moment) => moment && when(moment, page.now());
  return section("Terms", {}, h("div", {class: "columns"},
    facts([
      ["Needs", h("span", null, (task.requirements.capabilities ?? []).map((need) => [badge(need, "plain"), " "]),
        !task.requirements.capabilities?.length && "any worker")],
      ["Priority", task.priority],
      ["Failed attempts", `${task.attempt + (task.status === "failed")} of ${task.max_attempts}`],
      ["Lost leases", task.max_expiries ? `${task.expiries} of ${task.max_expiries} before a hold`
        : `${task.expiries}, never held for them`],
      ["Back-off", `${sayLength(task.retry_backoff_seconds)}, then twice as long each time`],
      ["Lease length", timeouts?.lease_ttl_seconds && sayLength(timeouts.lease_ttl_seconds)],
      ["Deadline", time(timeouts?.deadline)],
      ["Offered", time(task.next_eligible_at)], ["Lease ends", time(task.lease_expires_at)],
      ["On hold", task.held && sayHold(task.held)]]),
    facts([
      ["Obligation", h("span", null, task.obligation_open ? badge("open", "warning") : badge("discharged", "ok"), " ",
        h("a", {href: link(["task", task.task_id], {receipt: task.obligation_receipt_id})},
          endOf(task.obligation_receipt_id)))],
      ["Child of", task.parent_task_id && taskLink(task.parent_task_id)],
      ...listKeyFacts(task, explanation),
      ["Runs again", task.rerun_of && taskLink(task.rerun_of)],
      ["Run again as", reruns.length ? reruns.map((id) => [taskLink(id), " "]) : null],
      ["Caused by", typeof task.payload?.caused_by_receipt_id === "string" && page.may("get_receipt")
        ? shortId(task.payload.caused_by_receipt_id) : null],
      ["Idempotency key", task.idempotency_key && say(task.idempotency_key)],
      ["For", task.principal_ai !== task.created_by.id ? say(task.principal_ai) : null],
      ["Result", task.result_delivery && say(task.result_delivery)],
      ["Outcome", task.expected_outcome_kind && say(task.expected_outcome_kind)],
      ["Artifact", task.expected_artifact_mime && say(task.expected_artifact_mime)],
      ["Newest fence", task.fence], ["Gate", say(task.asyncgate_instance)],
      ["Trace", task.traceparent && h("span", {class: "code"}, say(task.traceparent))],
      ["Changed", time(task.updated_at)]])),
  task.instructions && h("div", {class: "prose"}, h("h3", null, "Instructions"), h("p", null, say(task.instructions))),
  task.success_criteria !== null && task.success_criteria !== undefined
    && h("div", {class: "prose"}, h("h3", null, "It succeeds if"), typeof task.success_criteria === "string"
      ? h("p", null, say(task.success_criteria)) : jsonTree(task.success_criteria)));
}

/** Say under which key it is the only task, and which tasks were before it and are behind it. */
function listKeyFacts({unique, ...task}, explanation) {
  const keeper = explanation?.cause === "key_taken" ? explanation.evidence.holders?.[0] : null;
  const lasts = typeof unique?.while === "number" ? `for ${sayLength(unique.while)}`
    : unique?.while === "queued" ? "until its first lease" : "until its end";
  return [
    ["Key of the work", unique && [say(unique.key), " ", h("span", {class: "quiet"}, lasts)]],
    ["Has that key", keeper && taskLink(keeper)],
    ["Waits for its end", task.next_task_id && taskLink(task.next_task_id)],
    ["Supersedes", task.supersedes && taskLink(task.supersedes)],
    ["Superseded by", task.superseded_by && taskLink(task.superseded_by)],
    ["Payload replaced", task.amendments && (task.amendments === 1 ? "once" : `${task.amendments} times`)]];
}

// What goes in and comes out.

function showContents({task, receipts}, page) {
  const {result} = task;
  return [h("div", {class: "columns contents"},
    result?.outcome === "canceled" && showCancellation(receipts),
    result && result.outcome !== "canceled" && (result.outcome === "succeeded"
      ? showJson("Result", result.result, task, page, showArtifacts(result.artifacts))
      : showJson("Error", result.error, task, page,
        result.error !== null && h("p", {class: "error"}, say(sayError(result.error))),
        typeof result.error?.traceback === "string" && h("pre", {class: "traceback"}, say(result.error.traceback)))),
    showJson("Payload", task.payload, task, page,
      task.payload_pointer && h("p", null, "It lies at ", showPlace(task.payload_pointer))),
    task.progress !== null && showJson("Progress", task.progress, task, page,
      h("p", {class: "quiet"}, "reported ", when(task.progress_at, page.now()))))];
}

function showCancellation(receipts) {
  const body = receipts.findLast((receipt) => receipt.receipt_type === "task.canceled")?.body;
  return body && section("Cancellation", {}, facts([["By", body.canceled_by && who(body.canceled_by)],
    ["Why", body.reason ? say(body.reason) : "no reason was given"]]));
}

function showJson(name, value, task, page, ...above) {
  const text = sized(value, page);
  return section(name, {actions: [h("span", {class: "quiet"}, sayBytes(text.bytes)),
    h("button", {"aria-label": `Copy: ${name}`, onclick: () => copy(writeJson(value, 2), `${name} copied`)}, "Copy"),
    h("button", {"aria-label": `Download: ${name}`,
      onclick: () => download(`${name.toLowerCase()}-${task.task_id}.json`, "application/json", writeJson(value, 2))},
      "Download")]}, ...above, jsonTree(value));
}

/** Measure a value once for each time that it was read: the page is drawn more often. */
function sized(value, page) {
  const known = page.local.sizes ??= new Map();
  const key = value !== null && typeof value === "object" ? value : String(value);
  if (known.size > 20) known.clear();
  if (!known.has(key)) known.set(key, {bytes: new TextEncoder().encode(writeJson(value)).length});
  return known.get(key);
}

function showArtifacts(artifacts) {
  const list = Array.isArray(artifacts) ? artifacts : artifacts?.pointers ?? (artifacts ? [artifacts] : []);
  if (!list.length) return null;
  return h("div", {class: "artifacts"}, h("h3", null, "Artifacts"), h("ul", null, list.map((item) => {
    const place = typeof item === "string" ? item : item?.url ?? item?.uri ?? item?.href ?? item?.pointer;
    return h("li", null, typeof place === "string" ? showPlace(place) : jsonTree(item),
      item?.mime && [" · ", h("span", {class: "quiet"}, say(item.mime))]);
  })));
}

/** Show an address from outside: a link only where a browser can do no harm with it, and with its host. */
function showPlace(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  if (!url || !["http:", "https:"].includes(url.protocol)) return h("span", {class: "code"}, say(text));
  return [h("a", {href: url.href, target: "_blank", rel: "noopener noreferrer", class: "code"}, say(text)), " ",
    h("span", {class: "quiet"}, `leads to ${url.host}`)];
}
