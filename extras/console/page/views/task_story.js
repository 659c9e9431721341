// What happened to a task, told from its history: the attempts, the waits between them, and when each thing was.
//
// Nothing here draws or asks the gate; times are milliseconds.

const ENDS = {"task.completed": "completed", "task.failed": "failed", "task.canceled": "canceled",
  "lease.expired": "expired"};
const LONGEST_BACKOFF_MS = 15 * 60 * 1000;
const TOLD_ELSEWHERE = new Set(["task.assigned", "task.accepted", "task.started", "task.result_ready"]);

/** Tell the story of a task: `{begin, end, attempts, waits, notes}`. */
export function tellStory(task, events, seen = {}) {
  const begin = Date.parse(task.created_at);
  const end = task.result ? Date.parse(task.result.completed_at) : null;
  const story = {begin, end, attempts: [], waits: [], holds: [], notes: []};
  for (const event of events) tellEvent(story, event, Date.parse(event.created_at));
  closeLast(story, task, seen);
  story.waits = tellWaits(story, task);
  return story;
}

function tellEvent(story, {event_type: type, receipt, payload, event_id: key}, at) {
  const last = story.attempts.at(-1);
  const lease = receipt?.lease_id ?? payload?.lease_id;
  const attempt = lease ? story.attempts.findLast((run) => run.lease === lease)
    : payload?.fence ? story.attempts.findLast((run) => run.fence === payload.fence) : last;
  if (type === "task.accepted") story.attempts.push(beginAttempt(story, receipt, at));
  else if (type === "task.started" && attempt) attempt.started = at;
  else if (type in ENDS && attempt && !attempt.until) endAttempt(attempt, type, receipt, at);
  else if (type === "task.held") story.holds.push({from: at, until: null, held: payload.held});
  else if (type === "task.hold_released" && story.holds.length) story.holds.at(-1).until = at;
  if (TOLD_ELSEWHERE.has(type)) return;
  const within = attempt && (lease || !attempt.until) ? attempt.number : null;
  story.notes.push({key, at, type, receipt, payload, attempt: within});
}

function beginAttempt(story, receipt, at) {
  return {number: story.attempts.length + 1, lease: receipt.lease_id, fence: receipt.body?.fence ?? null,
    worker: receipt.from, from: at, started: null, until: null, ending: "going", end: null, error: null, spent: 0,
    expires: null, beat: null, renewals: null};
}

function endAttempt(attempt, type, receipt, at) {
  const body = receipt.body ?? {};
  attempt.until = at;
  attempt.ending = type === "lease.expired" && ["released", "parked"].includes(body.reason) ? body.reason : ENDS[type];
  attempt.error = body.error ?? null;
  attempt.spent = (body.attempt ?? 0) + 1;
  attempt.end = receipt.receipt_id;
}

function closeLast(story, task, {beat = null, renewals = null}) {
  const last = story.attempts.at(-1);
  if (!last || last.until) return;
  if (!task.leased_to) {      // a lease that ended without a receipt that names it
    last.until = story.end ?? Date.parse(task.updated_at);
    last.ending = story.end ? task.status : "ended";
    return;
  }
  last.expires = task.lease_expires_at ? Date.parse(task.lease_expires_at) : null;
  last.beat = Math.max(beat ? Date.parse(beat) : 0, task.progress_at ? Date.parse(task.progress_at) : 0,
    last.started ?? last.from);
  last.renewals = renewals;
}

function tellWaits(story, task) {
  const waits = [];
  let [from, before] = [story.begin, null];
  for (const attempt of story.attempts) {
    waits.push(tellWait(story, task, from, attempt.from, before));
    [from, before] = [attempt.until, attempt];
  }
  if (from && !story.end) waits.push(tellWait(story, task, from, null, before));
  else if (from && !before) waits.push(tellWait(story, task, from, story.end, before));
  return waits;
}

function tellWait(story, task, from, until, before) {
  const eligible = until === null && task.next_eligible_at ? Date.parse(task.next_eligible_at) : null;
  const pause = before?.ending === "failed" ? backoffOf(task, before) : 0;
  const resting = eligible ?? Math.min(from + pause, until ?? Infinity);
  return {from, until, after: before?.ending ?? "creation", resting: resting > from ? resting : null,
    holds: story.holds.filter((hold) => hold.from >= from && (until === null || hold.from < until))};
}

function backoffOf(task, {spent}) {
  return Math.min(task.retry_backoff_seconds * 1000 * 2 ** Math.max(0, spent - 1), LONGEST_BACKOFF_MS);
}

/** Return the moments that a drawing of the story needs, in order. */
export function momentsOf(story, now, more = []) {
  const moments = [story.begin, ...more];
  for (const run of story.attempts) moments.push(run.from, run.started, run.until, run.expires, run.beat);
  for (const wait of story.waits) moments.push(wait.resting);
  for (const hold of story.holds) moments.push(hold.from, hold.until);
  if (!story.end) moments.push(now);
  return [...new Set(moments.filter((moment) => Number.isFinite(moment)))].sort((a, b) => a - b);
}

const MOST_OF_WIDTH = 0.25;     // how much one of many stretches in which nothing happens may take
const FEW_GAPS = 5;             // of so few stretches the longest may be several times the next one
const TIMES_THE_NEXT = 8;
const LEAST_OF_WIDTH = 0.012;   // how far apart two moments are seen as two

/** Scale moments to 0 … 1; long stretches in which nothing happens are compressed and listed as `breaks`. */
export function makeScale(moments) {
  const gaps = moments.slice(1).map((moment, at) => moment - moments[at]);
  const most = findMost(gaps);
  const whole = sum(gaps.map((gap) => Math.min(gap, most))) || 1;
  const lengths = gaps.map((gap) => Math.max(Math.min(gap, most) / whole, LEAST_OF_WIDTH));
  const places = lengths.reduce((list, length) => [...list, list.at(-1) + length], [0]);
  const last = places.at(-1) || 1;
  const at = (moment) => {
    const next = moments.findIndex((other) => other >= moment);
    if (next <= 0) return next < 0 ? 1 : 0;
    const inside = (moment - moments[next - 1]) / (moments[next] - moments[next - 1]);
    return (places[next - 1] + inside * (places[next] - places[next - 1])) / last;
  };
  const breaks = gaps.map((gap, index) => ({from: moments[index], until: moments[index + 1], gap}))
    .filter(({gap}) => gap > 2 * most);
  return {at, breaks};
}

/** Return how long a gap may be that is drawn as it is. */
function findMost(gaps) {
  const [first = 0, second = first] = [...gaps].sort((a, b) => b - a);
  if (gaps.length <= FEW_GAPS) return Math.min(first, second * TIMES_THE_NEXT);
  let most = first;
  for (let turn = 0; turn < 40; turn += 1) most = MOST_OF_WIDTH * sum(gaps.map((gap) => Math.min(gap, most)));
  return most;
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}
