// The gate's public operations, as the page calls them.  What a credential may not call, the page does not offer.

import {readJson, writeJson} from "./exact.js";

const BASE = new URL("../", document.baseURI);      // the page is at …/console/, whatever the prefix
const SESSION = "asyncgate-session";                // this half of the session; the other one is a cookie
const ACTOR = "asyncgate-actor";

/** Operation: method and path.  `{name}` is taken from the request. */
export const OPERATIONS = {
  ack_receipt: "POST /v1/receipts/{receipt_id}/ack",
  answer_input: "POST /v1/tasks/{task_id}/inputs/answer",
  attach_artifacts: "POST /v1/tasks/{task_id}/artifacts",
  cancel_task: "POST /v1/tasks/{task_id}/cancel",
  create_task: "POST /v1/tasks",
  drain_work: "POST /v1/pauses/drain",
  end_session: "POST /v1/sessions/end",
  examine_gate: "GET /v1/examination",
  explain_task: "GET /v1/tasks/{task_id}/explain",
  get_budgets: "GET /v1/budgets",
  get_bulk: "GET /v1/bulks/{bulk_id}",
  get_config: "GET /v1/config",
  get_limit: "GET /v1/task-limits/{name}",
  get_limits: "GET /v1/limits",
  get_queue: "GET /v1/queues/{queue_id}",
  get_receipt: "GET /v1/receipts/{receipt_id}",
  get_task: "GET /v1/tasks/{task_id}",
  get_task_history: "GET /v1/tasks/{task_id}/history",
  get_traffic: "GET /v1/traffic",
  get_usage: "GET /v1/usage",
  health: "GET /v1/health",
  invite_user: "POST /v1/users",
  issue_key: "POST /v1/keys",
  list_archived_receipts: "GET /v1/archive/receipts",
  list_audit: "GET /v1/audit",
  list_clients: "GET /v1/clients",
  list_inputs: "GET /v1/tasks/{task_id}/inputs",
  list_keys: "GET /v1/keys",
  list_leases: "GET /v1/leases",
  list_limits: "GET /v1/task-limits",
  list_obligations: "GET /v1/obligations",
  list_open_obligations: "GET /v1/obligations/open",
  list_pauses: "GET /v1/pauses",
  list_queues: "GET /v1/queues",
  list_receipts: "GET /v1/receipts",
  find_id: "GET /v1/ids/{part}",
  list_schedules: "GET /v1/schedules",
  pause_schedule: "POST /v1/schedules/{schedule_id}/pause",
  resume_schedule: "POST /v1/schedules/{schedule_id}/resume",
  run_schedule: "POST /v1/schedules/{schedule_id}/run",
  search_tasks: "GET /v1/search",
  list_seals: "GET /v1/seals",
  list_sessions: "GET /v1/sessions",
  list_steps: "GET /v1/tasks/{task_id}/steps",
  list_tasks: "GET /v1/tasks",
  list_tenants: "GET /v1/tenants",
  list_types: "GET /v1/types",
  list_users: "GET /v1/users",
  list_workers: "GET /v1/workers",
  pause_work: "POST /v1/pauses",
  preview_bulk: "POST /v1/bulks/preview",
  read_output: "GET /v1/tasks/{task_id}/output",
  ready: "GET /v1/ready",
  release_hold: "POST /v1/tasks/{task_id}/release",
  remove_limit: "POST /v1/task-limits/{name}/remove",
  rerun_task: "POST /v1/tasks/{task_id}/rerun",
  restore_archive: "POST /v1/archive/{task_id}/restore",
  resume_work: "POST /v1/pauses/resume",
  revoke_key: "POST /v1/keys/{key_id}/revoke",
  rotate_key: "POST /v1/keys/{key_id}/rotate",
  run_archive: "POST /v1/archive/run",
  run_bulk: "POST /v1/bulks",
  seal_receipts: "POST /v1/seals",
  set_budget: "POST /v1/budgets",
  set_limit: "POST /v1/task-limits",
  set_limits: "POST /v1/tenants/{tenant}/limits",
  sign_out_everywhere: "POST /v1/sign-out",
  suspend_tenant: "POST /v1/tenants/{tenant}/suspend",
  whoami: "GET /v1/whoami",
};

/** What the gate has refused, or why it cannot be reached (`status` 0). */
export class Refused extends Error {
  constructor(status, body) {
    super(body.message ?? "the gate gave an answer that cannot be read");
    this.status = status;
    this.error = body.error ?? "";
    this.body = body;
  }
}

/** The session of this browser: what the page has of it, and whom it stands for. */
export const session = {
  you: null,          // the answer of whoami
  actor: null,        // {kind, id}: in whose name the page acts, if the credential is nobody's own
  skew: 0,            // what the gate's clock is ahead of this one, in milliseconds
  onLost: () => {},   // the session has ended
  onAnswer: () => {}, // the gate has answered, or (with an error) could not be reached

  /** Whether the credential may call an operation. */
  may(operation) {
    return this.you?.operations.includes(operation) ?? false;
  },

  /** Return the gate's time, in milliseconds. */
  now() {
    return Date.now() + this.skew;
  },

  get half() {
    return localStorage.getItem(SESSION);
  },

  set half(text) {
    if (text) localStorage.setItem(SESSION, text);
    else localStorage.removeItem(SESSION);
  },
};

/** Call `hear` when another tab has begun or ended a session: all tabs of a browser share one. */
export function onOtherSession(hear) {
  addEventListener("storage", ({key}) => (key === SESSION || key === null) && hear());
}

/** Read in whose name this browser acts, if somebody has said so. */
export function readActor() {
  try {
    return JSON.parse(localStorage.getItem(ACTOR));
  } catch {
    return null;
  }
}

/** Keep in whose name this browser acts; null is nobody's. */
export function keepActor(actor) {
  session.actor = actor;
  if (actor) localStorage.setItem(ACTOR, JSON.stringify(actor));
  else localStorage.removeItem(ACTOR);
}

/** Return the address of a path of the gate. */
export function addressOf(path) {
  return new URL(path.replace(/^\//, ""), BASE);
}

/** Return the fields of a request that stand in the path. */
export function namesInPath(operation) {
  return [...OPERATIONS[operation].matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
}

/** Return how an operation is called: `{method, path, query, body}`. */
export function describeCall(operation, ask = {}) {
  const [method, template] = OPERATIONS[operation].split(" ");
  const rest = {...ask};
  const path = template.replace(/\{(\w+)\}/g, (whole, name) => {
    const value = rest[name];
    delete rest[name];
    return encodeURIComponent(value);
  });
  const given = Object.entries(rest).filter(([, value]) => value !== undefined && value !== null && value !== "");
  if (method !== "GET") return {method, path, query: "", body: Object.fromEntries(given)};
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return {method, path, query: query && `?${query}`, body: null};
}

// The operations that are done in somebody's name; the others take none, and note the credential.
const IN_NAME = new Set([
  "ack_receipt", "answer_input", "attach_artifacts", "cancel_task", "create_task", "release_hold", "rerun_task",
  "pause_schedule", "resume_schedule", "run_schedule"]);

/** Whether an operation must be told in whose name it is done: the credential is nobody's own. */
export function needsName(operation) {
  return IN_NAME.has(operation) && session.you?.bound === false;
}

/** Add in whose name something is done, where it is needed. */
export function inName(operation, ask = {}) {
  if (!needsName(operation) || !session.actor) return ask;
  return {principal_kind: session.actor.kind, principal_id: session.actor.id, ...ask};
}

/** Send a request with the session; network failures are refusals of status 0. */
export async function send(path, {headers: more, ...options} = {}) {
  const half = session.half;
  const headers = {...(half && {"x-asyncgate-session": half}), ...more};
  try {
    return await fetch(addressOf(path), {credentials: "same-origin", cache: "no-store", ...options, headers});
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    session.onAnswer(problem);
    throw new Refused(0, {message: "the gate cannot be reached"});
  }
}

/** Call an operation and return its reply; raises Refused. */
export async function call(operation, ask = {}, {signal} = {}) {
  const {method, path, query, body} = describeCall(operation, ask);
  return await answerOf(await send(path + query, {
    method, signal, ...(body && {body: writeJson(body), headers: {"content-type": "application/json"}})}));
}

/** Read the pages of a list, up to `most` rows: `{rows, more}`. */
export async function callAll(page, operation, name, ask = {}, most = 1000) {
  const rows = [];
  let cursor = null;
  do {
    const reply = await page.call(operation, {limit: 200, ...ask, cursor});
    rows.push(...reply[name]);
    cursor = reply.next_cursor;
  } while (cursor && rows.length < most);
  return {rows, more: Boolean(cursor)};
}

/** Call one of the page's own paths, such as sign-in. */
export async function callPage(path, body) {
  return await answerOf(await send(`console/${path}`, body === undefined ? {} : {
    method: "POST", body: JSON.stringify(body), headers: {"content-type": "application/json"}}));
}

async function answerOf(response) {
  const text = await response.text();
  noteClock(response.headers.get("date"));
  let body = null;
  try {
    body = text ? readJson(text) : null;
  } catch {
    body = {message: `the gate answered ${response.status} with something that is not JSON`};
  }
  session.onAnswer(response.status >= 502 ? new Error("unavailable") : null);
  if (response.ok) return body;
  const refused = new Refused(response.status, body ?? {});
  if (response.status === 401) session.onLost(refused);
  throw refused;
}

function noteClock(date) {
  const ahead = date ? Date.parse(date) - Date.now() : NaN;
  if (!Number.isNaN(ahead)) session.skew = Math.abs(ahead) < 2000 ? 0 : ahead;     // the header has whole seconds
}
