// Who can take what: the gate's rules of claims, applied to what list_workers and list_pauses say.  Pure.

/** Return what keeps one of a worker's last claims from a queue: null, or `{type, missing}` of the nearest one. */
export function findLack(worker, queue) {
  const lacks = worker.claims.map((claim) => ({
    type: claim.accept_types.length > 0 && !claim.accept_types.includes(queue.type),
    missing: queue.capabilities.filter((capability) => !claim.capabilities.includes(capability))}));
  const rank = (lack) => (lack.type ? 1000 : 0) + lack.missing.length;
  const [nearest] = lacks.sort((first, other) => rank(first) - rank(other));
  return nearest && rank(nearest) === 0 ? null : nearest ?? {type: true, missing: []};
}

/** Whether a pause keeps everybody from a queue. */
export function stopsQueue(pause, queue) {
  return pause.whole_tenant || (pause.type === queue.type
    && (pause.capabilities === null || isSameSet(pause.capabilities, queue.capabilities)));
}

function isSameSet(some, others) {
  return [...some].sort().join("\n") === [...others].sort().join("\n");
}

/** Return the state of a worker: paused, or else as the gate judges it: working, idle or silent. */
export function stateOf(worker, pauses) {
  if (worker.state === "silent") return "silent";
  return pauses.some((pause) => pause.whole_tenant || pause.worker === worker.worker.id) ? "paused" : worker.state;
}

/** Return the tone of the badge that shows a worker's state. */
export function toneOf(state) {
  return {working: "running", idle: "ok"}[state] ?? state;
}

/** Split workers into those that can take a queue's tasks and the others, with what these lack; silent ones last. */
export function splitWorkers(workers, queue, pauses) {
  const order = ["idle", "working", "paused", "silent"];
  const judge = (worker) => ({...worker, state: stateOf(worker, pauses), lack: findLack(worker, queue)});
  const known = workers.map(judge).sort((first, other) => order.indexOf(first.state) - order.indexOf(other.state));
  return {able: known.filter((worker) => !worker.lack), others: known.filter((worker) => worker.lack)};
}

/** Return the rows of a list of queues: before several lanes of one type stands a row with their sums. */
export function groupLanes(queues) {
  const byType = new Map();
  for (const queue of queues) byType.set(queue.type, [...byType.get(queue.type) ?? [], queue]);
  return [...byType].flatMap(([type, lanes]) => lanes.length === 1 ? lanes
    : [sumLanes(type, lanes), ...lanes.map((lane) => ({...lane, lane: true}))]);
}

function sumLanes(type, lanes) {
  const sum = (name) => lanes.reduce((total, lane) => total + lane[name], 0);
  const flow = (time) => Object.fromEntries(["started", "ended", "failed", "expired"].map((name) => [name,
    lanes.reduce((total, lane) => total + lane[time][name], 0)]));
  const waits = lanes.map((lane) => lane.oldest_wait_seconds).filter((wait) => wait !== null);
  return {queue_id: `all ${type}`, type, lanes: lanes.length, capabilities: [], workers: null,
    by_minute: sumMinutes(lanes), claimable: sum("claimable"), leased: sum("leased"), held: sum("held"),
    delayed: sum("delayed"), delayed_at_least: lanes.some((lane) => lane.delayed_at_least),
    oldest_wait_seconds: waits.length ? Math.max(...waits) : null,
    last_minute: flow("last_minute"), last_hour: flow("last_hour")};
}

function sumMinutes(lanes) {
  const all = lanes.map((lane) => lane.by_minute).filter(Boolean);
  return all.length ? Object.fromEntries(Object.keys(all[0]).map((name) => [name,
    all[0][name].map((none, at) => all.reduce((total, minutes) => total + minutes[name][at], 0))])) : undefined;
}

const SAMPLE_MS = 5000;
const MOST_SAMPLES = 120;       // ten minutes

/** Add what was seen to samples, `[{at, …}]`: one for each five seconds, and the latest look always comes last. */
export function addSample(samples, sample) {
  const [before, last] = samples.slice(-2);
  if (last && last.at - before.at < SAMPLE_MS) samples.pop();
  samples.push(sample);
  if (samples.length > MOST_SAMPLES) samples.shift();
  return samples;
}
