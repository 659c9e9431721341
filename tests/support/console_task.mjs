// The pure modules of the task's page, without a browser: argv is the folder with copies of them.
import assert from "node:assert/strict";

const from = (name) => import(`file://${process.argv[2]}/${name}.js`);
const { makeGraph, placeGraph } = await from("task_layout");
const { makeScale, momentsOf, tellStory } = await from("task_story");

const SECOND = 1000;
const start = Date.parse("2026-02-19T12:00:00Z");
let made = 0;

function receipt(type, parents = [], more = {}) {
  made += 1;
  return { receipt_id: `r${String(made).padStart(4, "0")}`, receipt_type: type, parents, lease_id: null, body: {},
    from: { kind: "worker", id: "w" }, to: { kind: "asyncgate", id: "gate" }, ...more };
}

function attempts(duty, count) {
  return Array.from({ length: count }, (_, at) => {
    const accepted = receipt("task.accepted", [duty], { lease_id: `lease ${at}`, body: { fence: at + 1 } });
    return [accepted, receipt("task.failed", [accepted.receipt_id],
      { lease_id: `lease ${at}`, body: { requeued: true, attempt: at } })];
  }).flat();
}

const rules = {
  "an obligation is open until a receipt discharges it, and the open end is drawn"() {
    const duty = receipt("task.assigned");
    const open = makeGraph([duty]);
    assert.deepEqual(open.edges, [{ from: duty.receipt_id, to: `owed ${duty.receipt_id}`, kind: "owes" }]);
    const failed = receipt("task.failed", [duty.receipt_id]);
    const closed = makeGraph([duty, failed]);
    assert.deepEqual(closed.edges, [{ from: duty.receipt_id, to: failed.receipt_id, kind: "discharges" }]);
    assert.equal(closed.nodes.some((node) => node.kind === "owed"), false);
  },

  "a success that discharges nothing stands beside its lease, and the obligation stays open"() {
    const duty = receipt("task.assigned");
    const accepted = receipt("task.accepted", [duty.receipt_id], { lease_id: "a" });
    const completed = receipt("task.completed", [], { lease_id: "a" });
    const graph = makeGraph([duty, accepted, completed], (one) => one === duty ? true : null);
    assert.ok(graph.edges.some((edge) => edge.from === accepted.receipt_id && edge.to === completed.receipt_id
      && edge.kind === "lease"));
    assert.equal(graph.nodes.filter((node) => node.kind === "owed").length, 1);
  },

  "what a receipt of another task is answered by leads from a stub"() {
    const graph = makeGraph([receipt("task.assigned", ["elsewhere"])]);
    assert.deepEqual(graph.nodes.filter((node) => node.kind === "stub").map((node) => node.id), ["elsewhere"]);
  },

  "hundreds of attempts that are alike are folded, with what follows them, and none is lost"() {
    const duty = receipt("task.assigned");
    const receipts = [duty, ...attempts(duty.receipt_id, 400)];
    const { nodes } = makeGraph(receipts);
    assert.ok(nodes.length < 20, `${nodes.length} nodes`);
    const shown = nodes.flatMap((node) => node.kind === "fold" ? node.members : node.kind === "receipt" ? [node.id]
      : []);
    assert.deepEqual(shown.sort(), receipts.map((one) => one.receipt_id).sort());
  },

  "no two receipts stand in one place, every line goes forward, and the order in which they come changes nothing"() {
    const duty = receipt("task.assigned");
    const receipts = [duty, ...attempts(duty.receipt_id, 4)];
    receipts.push(receipt("task.escalated", [duty.receipt_id], { lease_id: "lease 2" }));
    for (const across of [true, false]) {
      const placed = placeGraph(makeGraph(receipts), across);
      const places = placed.nodes.map((node) => `${node.x} ${node.y}`);
      assert.equal(new Set(places).size, places.length);
      const at = new Map(placed.nodes.map((node) => [node.id, node]));
      for (const { from, to } of placed.edges) assert.ok(at.get(from).layer < at.get(to).layer, `${from} ${to}`);
      const turned = placeGraph(makeGraph([...receipts].reverse()), across);
      assert.deepEqual(new Map(turned.nodes.map((node) => [node.id, [node.x, node.y]])).get(duty.receipt_id),
        [at.get(duty.receipt_id).x, at.get(duty.receipt_id).y]);
      assert.deepEqual(turned.nodes.map((node) => `${node.id} ${node.x} ${node.y}`),
        placed.nodes.map((node) => `${node.id} ${node.x} ${node.y}`));
    }
  },

  "receipts that answer each other in a circle, as no gate writes them, are drawn all the same"() {
    const one = receipt("task.progress");
    const other = receipt("task.progress", [one.receipt_id]);
    one.parents = [other.receipt_id];
    assert.equal(placeGraph(makeGraph([one, other]), true).nodes.length, 2);
  },

  "the story has an attempt for each lease, how it ended, and the waits between"() {
    const duty = receipt("task.assigned");
    const moment = (seconds) => new Date(start + seconds * SECOND).toISOString();
    const event = (seconds, one, payload) =>
      ({ event_id: String(made), created_at: moment(seconds), event_type: one.receipt_type ?? one,
      ...(one.receipt_type ? { receipt: one } : { payload }) });
    const [accepted, failed] = attempts(duty.receipt_id, 1);
    const again = receipt("task.accepted", [duty.receipt_id], { lease_id: "again", body: { fence: 2 } });
    const given = receipt("lease.expired", [again.receipt_id],
      { lease_id: "again", body: { reason: "released", requeued: true } });
    const story = tellStory({ created_at: moment(0), updated_at: moment(30), next_eligible_at: null,
      retry_backoff_seconds: 5, result: null,
      leased_to: null }, [event(0, duty), event(1, accepted), event(2, "task.started", { fence: 1 }), event(4, failed),
        event(20, again), event(30, given)]);
    assert.deepEqual(story.attempts.map((one) => [one.ending, one.until - one.from]),
      [["failed", 3 * SECOND], ["released", 10 * SECOND]]);
    assert.equal(story.attempts[0].started, start + 2 * SECOND);
    assert.deepEqual(story.waits.map((one) => [one.after, one.until && one.until - one.from]),
      [["creation", SECOND], ["failed", 16 * SECOND], ["released", null]]);
    assert.equal(story.waits[1].resting, start + 9 * SECOND);
  },

  "the scale keeps the order of moments and compresses a stretch in which nothing happens"() {
    const moments = [0, 1, 2, 3, 4, 5, 6, 100000].map((one) => one * SECOND);
    const { at, breaks } = makeScale(moments);
    const places = moments.map(at);
    assert.deepEqual(places, [...places].sort((a, b) => a - b));
    assert.equal(places[0], 0);
    assert.equal(places.at(-1), 1);
    assert.ok(1 - places.at(-2) < 0.5);
    assert.deepEqual(breaks.map((one) => one.from), [6 * SECOND]);
    assert.equal(makeScale([5]).at(5), 0);
    assert.deepEqual(momentsOf({ begin: 5, end: 9, attempts: [], waits: [], holds: [] }, 7), [5]);
  },
};

for (const [name, hold] of Object.entries(rules)) {
  try {
    hold();
  } catch (wrong) {
    console.error(`${name}: ${wrong.stack}`);
    process.exitCode = 1;
  }
}
