// Workers: who claims, what each offers, holds and did; who is silent or paused; who did the last attempts.

import {callAll} from "../api.js";
import {h} from "../dom.js";
import {readFilter, withWord} from "../filter.js";
import {findLack, stateOf, toneOf} from "../fit.js";
import {badge, endOf, facts, say, sayThereAreMore, searchField, section, taskBadge, tile} from "../parts.js";
import {pauseButtons, showPauses} from "../pausing.js";
import {link} from "../route.js";
import {commandHere, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {when} from "../time.js";

const STATES = ["working", "idle", "paused", "silent"];
const SHOWN_ATTEMPTS = 20;
const READ_ATTEMPTS = 200;      // of all workers, among which those of one are looked for
const noWorkers = () => ["Nobody has asked for tasks yet. Start a worker: ",
  offerCommand(commandHere("asyncgate worker"))];
const words = {
  type: (text) => ({type: text}), can: (text) => ({can: text}), "": (text) => ({name: text.toLowerCase()}),
  is: (text) => {
    if (!STATES.includes(text)) throw new Error(`say one of ${STATES.join(", ")}`);
    return {is: text};
  }};

/** Read what the view shows: all workers, or one. */
export async function load(page) {
  const [kind, id] = page.parts;
  const [{pauses}, attempts] = await Promise.all([
    page.may("list_pauses") ? page.call("list_pauses") : {pauses: []}, readAttempts(page)]);
  if (!id) return {...await callAll(page, "list_workers", "workers"), pauses, attempts};
  const [{workers: [worker]}, leases, queues] = await Promise.all([
    page.call("list_workers", {worker_kind: kind, worker_id: id}),
    page.may("list_leases") ? page.call("list_leases", {worker_kind: kind, worker_id: id, resume: false}) : null,
    page.may("list_queues") ? callAll(page, "list_queues", "queues") : null]);
  return {chosen: {worker, leases: leases?.leases, queues: queues?.rows}, pauses, attempts};
}

/** Read the last attempts of all workers or of one, newest first: a lease that is granted writes a receipt. */
async function readAttempts(page) {
  if (!page.may("list_receipts") || !page.may("get_task")) return null;
  const [kind, id] = page.parts;
  try {
    const {receipts} = await page.call("list_receipts",
      {receipt_type: "task.accepted", newest: true, limit: id ? READ_ATTEMPTS : SHOWN_ATTEMPTS});
    const rows = receipts.reverse().filter(({from: by}) => !id || (by.kind === kind && by.id === id))
      .slice(0, SHOWN_ATTEMPTS);
    const tasks = await readTasks(page, rows.map((receipt) => receipt.task_id));
    return {rows: rows.map((receipt) => ({id: receipt.receipt_id, by: receipt.from, at: receipt.created_at,
      fence: receipt.body?.fence, task_id: receipt.task_id, task: tasks.get(receipt.task_id)}))};
  } catch (problem) {
    if (problem.status === undefined || problem.status === 401) throw problem;
    return {rows: [], problem: problem.message};
  }
}

// An ended task changes no more, so it is read once.
async function readTasks(page, ids) {
  const known = page.local.ended ??= new Map();
  const read = async (id) => {
    const task = known.get(id) ?? await page.call("get_task", {task_id: id}).catch((problem) => {
      if (problem.status !== 404) throw problem;      // it is archived or pruned
    });
    if (["succeeded", "failed", "canceled"].includes(task?.status)) known.set(id, task);
    return [id, task];
  };
  return new Map(await Promise.all([...new Set(ids)].map(read)));
}

/** The worker's id stands in the title of its page. */
export function title(page) {
  return page.parts[1] ?? "Workers";
}

/** Show the workers, or one of them. */
export function show(data, page) {
  if (!data.chosen) return showWorkers(data, page);
  return data.chosen.worker ? showOne(data, page) : missing(page);
}

/** Name capabilities, or say that there are none. */
export function nameCapabilities(names) {
  return names.length ? names.map((name, at) => [at > 0 && ", ", say(name)]) : h("span", {class: "quiet"}, "nothing");
}

/** Name a worker, with its kind unless that is worker. */
export function showWorker({kind, id}) {
  return [kind !== "worker" && h("span", {class: "quiet"}, `${kind}:`), say(id)];
}

// All workers.

const nameOf = ({worker}) => `${worker.kind}:${worker.id}`;

const columns = (page) => [
  {name: "worker", title: "Worker", value: nameOf, show: ({worker}) => showWorker(worker)},
  {name: "state", title: "State", show: ({state}) => badge(state, toneOf(state))},
  {name: "process", title: "Runs on", wide: true, value: (row) => row.process, show: (row) => sayProcess(row.process)},
  {name: "holding", title: "Holds", number: true, show: (row) => row.holding},
  {name: "accepts", title: "Accepts", grow: true, value: (row) => acceptsOf(row).join(" "),
    show: (row) => nameAccepted(acceptsOf(row))},
  {name: "can", title: "Can do", wide: true, value: (row) => canOf(row).join(" "),
    show: (row) => nameAbilities(canOf(row))},
  {name: "completed", title: "Done", number: true, show: (row) => row.completed},
  {name: "failed", title: "Failed", number: true, wide: true, show: (row) => row.failed},
  {name: "expired", title: "Lost", number: true, show: (row) => row.expired},
  {name: "last_seen_at", title: "Last seen", show: (row) => when(row.last_seen_at, page.now())}];

function sayProcess(process) {
  return process ? h("span", {class: "code"}, say(process)) : h("span", {class: "quiet"}, "–");
}

function acceptsOf({claims}) {
  if (claims.some((claim) => !claim.accept_types.length)) return [];      // any type
  return [...new Set(claims.flatMap((claim) => claim.accept_types))];
}

function canOf({claims}) {
  return [...new Set(claims.flatMap((claim) => claim.capabilities))];
}

function nameAbilities(names) {
  return names.length ? nameCapabilities(names) : h("span", {class: "quiet"}, "–");
}

function nameAccepted(types) {
  return types.length ? nameCapabilities(types) : h("span", {class: "quiet"}, "any type");
}

function fits(worker, {type, can, name, is}, state) {
  return (!type || findLack(worker, {type, capabilities: []})?.type !== true)
    && (!can || canOf(worker).includes(can))
    && (!name || worker.worker.id.toLowerCase().includes(name))
    && (!is || is === state);
}

function showWorkers({rows, more, pauses, attempts}, page) {
  const q = page.params.q ?? "";
  const {values, problems} = readFilter(q, words);
  const known = rows.map((row) => ({...row, state: stateOf(row, pauses)}));
  const workers = known.filter((row) => fits(row, values, row.state))
    .sort((row, other) => STATES.indexOf(row.state) - STATES.indexOf(other.state));
  const count = (state) => known.filter((row) => fits(row, {...values, is: state}, row.state)).length;
  const shown = columns(page);
  return [
    h("div", {class: "head"}, h("h1", null, "Workers"),
      h("div", {class: "actions"}, exportMenu("workers", shown, workers, {more}),
        copyMenu("list_workers", {limit: 200}))),
    searchField(page, {hint: "type:ocr can:gpu is:silent", problems}),
    h("div", {class: "tiles"}, STATES.map((state) => tile(count(state), state, {
      href: link(["workers"], {q: withWord(q, "is", state)}),
      tone: state === "paused" && count(state) ? "warning" : ""}))),
    showPauses(pauses.filter((pause) => pause.worker || pause.whole_tenant), page),
    table(page, {name: "workers", caption: h("span", {class: "off-screen"}, "Workers"), columns: shown, rows: workers,
      key: nameOf, open: ({worker}) => link(["workers", worker.kind, worker.id]),
      mark: ({state}) => state === "silent" && "dim",
      empty: page.params.q ? "No worker fits this filter." : noWorkers()}),
    more && sayThereAreMore(rows, "workers"),
    h("p", {class: "quiet"},
      "Silent: it hung up, lost a lease, or has not asked for tasks for two minutes. Lost: leases that ran out."),
    attempts && showAttempts(attempts, page)];
}

const byColumn = {name: "by", title: "Worker",
  show: ({by}) => h("a", {href: link(["workers", by.kind, by.id])}, showWorker(by))};

const attemptColumns = (page, alone) => [
  {name: "task", title: "Task", grow: true, show: ({task, task_id: id}) => task
    ? [say(task.type), task.task_summary && h("span", {class: "quiet"}, " ", say(task.task_summary))] : endOf(id)},
  ...(alone ? [] : [byColumn]),
  {name: "fence", title: "Attempt", number: true, show: ({fence}) => fence},
  {name: "at", title: "Leased", show: ({at}) => when(at, page.now())},
  {name: "status", title: "The task is now", whole: true, show: ({task, fence}) => task
    ? [taskBadge(task), task.fence > fence && h("span", {class: "quiet"}, " by a later attempt")] : "–"}];

function showAttempts({rows, problem}, page, {alone = false} = {}) {
  const none = alone ? `None of the last ${READ_ATTEMPTS} leases was its.` : "No lease was granted yet.";
  const caption = h("span", {class: "off-screen"}, "Last attempts, newest first");
  return section("Last attempts", {}, problem && h("p", {class: "problem"}, problem),
    table(page, {name: "attempts", caption, columns: attemptColumns(page, alone), rows,
      key: ({id}) => id, open: ({task_id: id}) => link(["task", id]), empty: problem ? "" : none}));
}

// One worker.

function missing(page) {
  return [h("h1", null, say(page.parts[1])), h("p", {class: "empty"}, "No worker of this name has asked for tasks. ",
    h("a", {href: link(["workers"])}, "All workers"))];
}

function showOne({chosen: {worker: row, leases, queues}, pauses, attempts}, page) {
  const {worker} = row;
  const state = stateOf(row, pauses);
  const asked = {worker_kind: worker.kind, worker_id: worker.id};
  return [
    h("div", {class: "head"}, h("h1", null, showWorker(worker)), badge(state, toneOf(state)),
      h("div", {class: "actions"},
        pauseButtons(page, {worker: worker.id}, pauses), copyMenu("list_workers", asked))),
    h("p", null, h("a", {href: link(["workers"])}, "Workers"), " · last seen ", when(row.last_seen_at, page.now()),
      ", last asked for tasks ", when(row.last_claim_at, page.now()),
      row.process && [", on ", sayProcess(row.process)]),
    h("div", {class: "tiles"}, tile(row.holding, "holds now"), tile(row.leased, "leases granted"),
      tile(row.completed, "done"), tile(row.failed, "failed"),
      tile(row.expired, "lost: expired", {tone: row.expired ? "warning" : ""}), tile(row.released, "given back")),
    showPauses(pauses.filter((pause) => pause.worker === worker.id || pause.whole_tenant), page),
    leases && section("Holds now", {}, listLeases(leases, page)),
    section("Offers", {}, listClaims(row.claims, page), nameQueues(queues?.filter((queue) => !findLack(row, queue)))),
    attempts && showAttempts(attempts, page, {alone: true}),
    section("Who it is", {}, facts([["Kind", worker.kind], ["Id", say(worker.id)],
      ["Runs on", sayProcess(row.process)], ["Instance", worker.instance_id && say(worker.instance_id)],
      ["First seen", when(row.first_seen_at, page.now())], ["Sessions", row.sessions]]))];
}

function listLeases(leases, page) {
  const columns = [
    {name: "task", title: "Task", grow: true, show: (lease) => say(lease.type)},
    {name: "fence", title: "Attempt", number: true, show: (lease) => lease.fence},
    {name: "acquired_at", title: "Leased", show: (lease) => when(lease.acquired_at, page.now())},
    {name: "expires_at", title: "Expires", show: (lease) => when(lease.expires_at, page.now())},
    {name: "renewals", title: "Renewed", number: true, show: (lease) => lease.renewals}];
  return table(page, {name: "leases", columns, rows: leases, key: (lease) => lease.lease_id,
    open: (lease) => link(["task", lease.task_id]), empty: "It holds no lease."});
}

function listClaims(claims, page) {
  const columns = [
    {name: "accepts", title: "Accepts", show: (claim) => nameAccepted(claim.accept_types)},
    {name: "can", title: "Can do", show: (claim) => nameAbilities(claim.capabilities)},
    {name: "claimed_at", title: "Asked", show: (claim) => when(claim.claimed_at, page.now())},
    {name: "tasks", title: "Got", number: true, show: (claim) => claim.tasks},
    {name: "why_none", title: "Answer", grow: true, wide: true, show: (claim) => say(claim.why_none ?? "–")}];
  return table(page, {name: "claims", columns, rows: claims,
    key: (claim) => `${claim.accept_types.join()} ${claim.capabilities.join()}`});
}

function nameQueues(queues) {
  return queues?.length > 0 && h("p", null, "Queues that it can take from: ", queues.map((queue, at) => [at > 0 && ", ",
    h("a", {href: link(["queues", queue.queue_id])}, say(queue.type)),
    queue.capabilities.length > 0 && [" requiring ", nameCapabilities(queue.capabilities)],
    ` (${queue.claimable} waiting)`]));
}
