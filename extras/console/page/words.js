// Words for the codes of the gate: why a task is not done, the facts behind that, and how a question has ended.

import {HOLDS, plain} from "./say.js";

const CAUSES = {
  leased: "a worker has it",
  instance_gone: "the gate that looked after it is gone",
  lease_overdue: "its lease ran out, and nobody took it back",
  input_required: "it waits for an answer",
  children_open: "it waits for its children",
  key_taken: "it waits for the end of a task with its key",
  on_hold: "it is on hold",
  paused: "work of this kind is paused",
  tenant_suspended: "the tenant is suspended",
  delay: "it was created with a delay",
  backoff: "it rests after a failed attempt",
  parked: "its worker has parked it until a time",
  jitter: "it rests a moment after a lost lease",
  limit_reached: "a limit that it names is reached",
  lease_quota: "the tenant has as many leases as it may have",
  no_worker: "no worker that can take it asks for work",
  waiting_too_long: "it waits much longer than others of its queue",
  behind: "others come before it",
  workers_busy: "those who can take it are busy",
  claimable: "the next worker that can take it gets it",
  owed: "its result is still owed",
  ledger_parked: "the ledger has refused receipts of it",
  ledger_waiting: "receipts of it wait for the ledger",
  ended: "it has ended",
};
const FACTS = {
  since: "Since", until: "Until", attempt: "Failed attempts", max_attempts: "Attempts allowed", held: "Why on hold",
  expiries: "Leases lost", lost_to: "Lost by", type: "A worker must accept", needed: "A worker must have",
  missing: "The nearest worker lacks", searched: "Workers looked at", workers: "Workers", ahead: "Tasks before it",
  usual_seconds: "Seconds that others had waited",
  in_use: "Leases that count", limit: "Leases allowed", limit_name: "Limit",
  limit_key: "Key of the limit", holders: "Tasks that count against it", unique_key: "Key that another task has",
  lease_id: "Lease", renewals: "Renewals of the lease",
  instance_id: "Gate that looks after it", last_beat_at: "Last sign of that gate", swept_at: "This gate last looked",
  sweep_error: "What went wrong then", receipt_ids: "Receipts", reason: "What was said", by: "By", tries: "Tries",
  worker: "Worker", asked_at: "Last asked", accept_types: "Takes", capabilities: "Can do", holding: "Holds",
  last_seen_at: "Last seen", children: "Children",
};
const RULES = {
  concurrency_total: "Leases at once", concurrency_per_key: "Under each key", rate: "May begin", overrides: "Overrides",
  weight: "Turns while others get one",
};
const ANSWERS = {open: "open", accept: "accepted", decline: "declined", cancel: "dismissed", expired: "unanswered"};
const ANY = {accept_types: "any type", capabilities: "nothing", needed: "nothing", missing: "nothing"};

/** Say a cause; a code that is unknown here is said as it is. */
export function sayCause(code) {
  return CAUSES[code] ?? plain(code);
}

/** Say the name of a fact. */
export function sayFact(name) {
  return FACTS[name] ?? plain(name);
}

/** Say the name of what a limit allows. */
export function sayRule(name) {
  return RULES[name] ?? plain(name);
}

/** Say how a question has ended. */
export function sayAnswer(state) {
  return ANSWERS[state] ?? plain(state);
}

/** Say how large something is. */
export function sayBytes(bytes) {
  return bytes < 1000 ? `${bytes} bytes` : bytes < 1e6 ? `${(bytes / 1000).toFixed(1)} kB`
    : `${(bytes / 1e6).toFixed(2)} MB`;
}

/** Say what an empty list of facts means. */
export function sayEmpty(name) {
  return ANY[name] ?? "none";
}

/** Whether a code, or the name of a fact, has words of its own. */
export function hasWords(code) {
  return [CAUSES, FACTS, HOLDS, RULES, ANSWERS].some((words) => Object.hasOwn(words, code));
}
