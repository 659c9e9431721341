// Where the receipts of a task stand in the drawing of their chain.  The same receipts always stand in the same places.

/** Which receipts discharge an obligation that a receipt opens (PH.1.3). */
export const DISCHARGES = {
  "task.assigned": ["task.completed", "task.failed", "task.canceled"],
  "schedule.created": ["schedule.deleted"],
};
const FEW = 5;          // so few that are alike are all drawn
const KEPT_LAST = 2;    // of more, the first and these last ones are drawn, and one stands for the others

/** Make the graph of receipts: `{nodes, edges}`; `isOpen(receipt)` tells what a receipt opened and nothing discharged.
 *
 * `reruns` are tasks that run this one again: their receipts answer the one that ended it.
 * Nodes: {id, kind: receipt | stub | fold | owed | rerun, type, receipt, members, open, discharged}.
 * Edges: {from, to, kind: answers | discharges | lease | owes}.  A receipt that does not answer the task.accepted of
 * its lease is tied to it.
 */
export function makeGraph(receipts, isOpen = () => null, reruns = []) {
  const known = new Map(receipts.map((receipt) => [receipt.receipt_id, receipt]));
  const accepted = receipts.filter((receipt) => receipt.receipt_type === "task.accepted");
  const leases = new Map(accepted.map((receipt) => [receipt.lease_id, receipt.receipt_id]));
  const nodes = receipts.map((row) => ({id: row.receipt_id, kind: "receipt", type: row.receipt_type, receipt: row}));
  const edges = [];
  for (const receipt of receipts) {
    const to = receipt.receipt_id;
    for (const from of receipt.parents) edges.push({from, to, kind: kindOf(known.get(from), receipt)});
    const lease = leases.get(receipt.lease_id);
    const tied = !lease || lease === receipt.receipt_id || receipt.parents.includes(lease);
    if (!tied) edges.push({from: lease, to: receipt.receipt_id, kind: "lease"});
  }
  const ends = new Set(edges.filter((edge) => edge.kind === "discharges").map((edge) => edge.to));
  const end = receipts.findLast((receipt) => ends.has(receipt.receipt_id));
  for (const id of reruns) {
    nodes.push({id: `rerun ${id}`, kind: "rerun", type: "rerun", receipt: null, task: id});
    if (end) edges.push({from: end.receipt_id, to: `rerun ${id}`, kind: "answers"});
  }
  const strangers = new Set(edges.map((edge) => edge.from).filter((id) => !known.has(id)));
  for (const id of [...strangers].sort()) nodes.push({id, kind: "stub", type: "", receipt: null});
  const graph = foldAlike({nodes, edges});
  for (const node of graph.nodes.filter((candidate) => candidate.type in DISCHARGES && candidate.receipt)) {
    node.discharged = edges.some((edge) => edge.from === node.id && edge.kind === "discharges");
    node.open = isOpen(node.receipt) ?? !node.discharged;
    if (!node.open) continue;
    graph.nodes.push({id: `owed ${node.id}`, kind: "owed", type: "owed", receipt: node.receipt});
    graph.edges.push({from: node.id, to: `owed ${node.id}`, kind: "owes"});
  }
  return graph;
}

function kindOf(parent, child) {
  return DISCHARGES[parent?.receipt_type]?.includes(child.receipt_type) ? "discharges" : "answers";
}

/** Let one node stand for many that are alike: of one type, with the same parents, and with the like after them. */
function foldAlike({nodes, edges}) {
  const after = groupBy(edges, (edge) => edge.from);
  const before = groupBy(edges, (edge) => edge.to);
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const shapes = new Map();
  const shapeOf = (id) => {
    if (!shapes.has(id)) {
      shapes.set(id, "");       // a circle, which honest receipts cannot make, ends here
      const next = (after.get(id) ?? []).map((edge) => shapeOf(edge.to)).sort();
      shapes.set(id, `${byId.get(id)?.type}(${[...new Set(next)].join()})`);
    }
    return shapes.get(id);
  };
  const alike = groupBy(nodes,
    (node) => `${(before.get(node.id) ?? []).map((edge) => edge.from).sort().join()} ${shapeOf(node.id)}`);
  const standIn = new Map();
  const folds = [];
  const fold = (ids) => {
    const members = ids.filter((id) => !standIn.has(id));
    if (!members.length) return;
    const id = `fold ${members[0]}`;
    folds.push({id, kind: "fold", type: byId.get(members[0]).type, receipt: null, members});
    for (const member of members) standIn.set(member, id);
    const next = [...new Set(members.flatMap((member) => (after.get(member) ?? []).map((edge) => edge.to)))];
    for (const same of groupBy(next, (member) => byId.get(member).type).values()) fold(same);
  };
  for (const same of alike.values()) {
    const open = same.filter((node) => !standIn.has(node.id) && !(node.type in DISCHARGES));
    if (open.length > FEW) fold(open.slice(1, -KEPT_LAST).map((node) => node.id));
  }
  const tied = new Map();
  for (const edge of edges) {
    const [from, to] = [standIn.get(edge.from) ?? edge.from, standIn.get(edge.to) ?? edge.to];
    const known = tied.get(`${from} ${to}`);
    if (from !== to && (!known || known.kind === "lease")) tied.set(`${from} ${to}`, {...edge, from, to});
  }
  return {nodes: [...nodes.filter((node) => !standIn.has(node.id)), ...folds], edges: [...tied.values()]};
}

function groupBy(list, key) {
  const groups = new Map();
  for (const item of list) groups.has(key(item)) ? groups.get(key(item)).push(item) : groups.set(key(item), [item]);
  return groups;
}

export const ACROSS = {width: 172, height: 48, gapAcross: 36, gapDown: 12};
export const OUTLINE = {height: 48, gapDown: 8, indent: 18};

/** Place a graph: each node gets x, y and layer, from left to right if `across`, or else as an indented list. */
export function placeGraph({nodes, edges}, across) {
  const byId = new Map(nodes.map((node) => [node.id, {...node}]));
  const before = groupBy(edges.filter((edge) => byId.has(edge.from) && byId.has(edge.to)), (edge) => edge.to);
  const layers = findLayers(byId, before);
  const children = new Map();
  const roots = [];
  for (const id of [...byId.keys()].sort(byMoment)) {
    const parents = (before.get(id) ?? []).map((edge) => edge.from)
      .sort((a, b) => layers.get(b) - layers.get(a) || byMoment(a, b));
    if (!parents.length) roots.push(id);
    else children.has(parents[0]) ? children.get(parents[0]).push(id) : children.set(parents[0], [id]);
  }
  const order = [];
  let row = 0;
  const walk = (id) => {
    const node = byId.get(id);
    order.push(node);
    node.layer = layers.get(id);
    const first = row;
    const below = children.get(id) ?? [];
    if (!across) row += 1;
    for (const child of below) if (!order.includes(byId.get(child))) walk(child);
    if (across && !below.length) row += 1;
    node.row = first;
  };
  for (const id of [...roots, ...byId.keys()]) if (!order.includes(byId.get(id))) walk(id);    // a circle has no root
  for (const node of order) Object.assign(node, across
    ? {x: node.layer * (ACROSS.width + ACROSS.gapAcross), y: node.row * (ACROSS.height + ACROSS.gapDown)}
    : {x: node.layer * OUTLINE.indent, y: node.row * (OUTLINE.height + OUTLINE.gapDown)});
  const deepest = Math.max(0, ...order.map((node) => node.layer));
  return {nodes: order, edges: edges.filter((edge) => byId.has(edge.from) && byId.has(edge.to)), rows: row,
    layers: deepest + 1,
    width: across ? (deepest + 1) * (ACROSS.width + ACROSS.gapAcross) - ACROSS.gapAcross : null,
    height: row * (across ? ACROSS.height + ACROSS.gapDown : OUTLINE.height + OUTLINE.gapDown)};
}

function byMoment(a, b) {       // ids begin with their time
  const [first, other] = [a, b].map((id) => id.replace(/^(fold|owed|rerun) /, ""));
  return first < other ? -1 : first > other ? 1 : a < b ? -1 : a > b ? 1 : 0;
}

function findLayers(byId, before) {
  const layers = new Map();
  const find = (id) => {
    if (layers.has(id)) return layers.get(id);
    layers.set(id, 0);
    layers.set(id, Math.max(-1, ...(before.get(id) ?? []).map((edge) => find(edge.from))) + 1);
    return layers.get(id);
  };
  for (const id of byId.keys()) find(id);
  return layers;
}
