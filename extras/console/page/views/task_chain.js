// The chain of receipts: who stated what, which receipt it answers, and which obligations are open.

import {session} from "../api.js";
import {note} from "../dialogs.js";
import {h} from "../dom.js";
import {writeJson} from "../exact.js";
import {endOf, say} from "../parts.js";
import {showFacts} from "../receipt.js";
import {link} from "../route.js";
import {isGivenBack} from "../say.js";
import {copy, copyMenu} from "../share.js";
import {sayWhen, when} from "../time.js";
import {ACROSS, makeGraph, OUTLINE, placeGraph} from "./task_layout.js";

const MOST_LISTED = 200;
const narrow = matchMedia("(max-width: 56rem)");

/** Whether this credential may speak for a principal. */
export function speaksFor(principal) {
  const {role, scopes, bound, principal_kind: kind, principal_id: id} = session.you;
  const self = bound ? {kind, id} : session.actor;
  return (role === "admin" && scopes.includes("admin:write")) || !self
    || (self.kind === principal.kind && self.id === principal.id);
}

/** Show the chain of a task's receipts; the address says which one is looked at. */
export function showChain({task, receipts, strangers, history}, page) {
  if (!receipts.length) return h("p", {class: "empty"},
    "Its receipts are in the archive, or this credential may not see them.");
  const placed = place(task, receipts, history.events.flatMap((event) => event.payload?.rerun_as ?? []), page);
  const open = placed.nodes.filter((node) => node.kind === "owed").length;
  const chosen = receipts.find((receipt) => receipt.receipt_id === page.params.receipt);
  return [
    h("p", {class: "quiet"}, `${receipts.length} receipt${receipts.length > 1 ? "s" : ""}, `,
      open ? h("strong", {class: "warns"}, `${open} open obligation${open > 1 ? "s" : ""}`)
      : "nothing open", ". A line leads to what answers a receipt; a thick one discharges an ",
    "obligation, a dashed one ties receipts of one lease."),
    h("div", {class: "chain-and-receipt"},
      h("div", {class: `chain ${narrow.matches ? "outline" : "across"}`, role: "group", "aria-label": "Receipt chain"},
        h("div", {class: "chain-ground", style: {height: `${placed.height}px`,
          ...(placed.width && {width: `${placed.width}px`})}},
          drawEdges(placed), placed.nodes.map((node) => showNode(node, {task, strangers, chosen}, page)))),
      chosen && showReceipt(chosen, receipts, page),
      page.local.fold && showFold(page.local.fold, receipts, page))];
}

function place(task, receipts, reruns, page) {
  const known = page.local.placed;
  const across = !narrow.matches;
  const mark = `${receipts.length} ${reruns.length} ${task.obligation_open} ${across}`;
  if (known?.mark === mark) return known.placed;
  const isOpen = (receipt) => receipt.receipt_id === task.obligation_receipt_id ? task.obligation_open : null;
  const placed = placeGraph(makeGraph(receipts, isOpen, reruns), across);
  page.local.placed = {mark, placed};
  return placed;
}

function drawEdges({nodes, edges, width, height}) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const path = width ? curve : elbow;
  return h("svg", {"aria-hidden": "true", width: width ?? "100%", height},
    edges.map((edge) => h("path", {key: `${edge.from} ${edge.to}`, class: edge.kind,
      d: path(byId.get(edge.from), byId.get(edge.to))})));
}

function curve(from, to) {
  const [x1, y1, x2, y2] = [from.x + ACROSS.width, from.y + ACROSS.height / 2, to.x, to.y + ACROSS.height / 2];
  const bend = Math.max(20, (x2 - x1) / 2);
  return x2 - x1 <= ACROSS.gapAcross ? `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`
    : `M${x1} ${y1}C${x1 + 22} ${y1} ${x1 + 8} ${y2 - ACROSS.height / 2 - 5} ${x1 + 40} ${y2 - ACROSS.height / 2 - 5}`
      + `H${x2 - 40}C${x2 - 10} ${y2 - ACROSS.height / 2 - 5} ${x2 - 24} ${y2 - 8} ${x2} ${y2 - 8}`;
}

function elbow(from, to) {
  const [x, y] = [from.x + OUTLINE.indent / 2, to.y + OUTLINE.height / 2];
  return `M${x} ${from.y + OUTLINE.height}V${y}H${to.x}`;
}

function showNode(node, shown, page) {
  const at = {left: `${node.x}px`, top: `${node.y}px`};
  if (node.kind === "stub") return showStub(node, shown, at);
  if (node.kind === "owed") return h("a", {key: node.id, class: "node owed", style: at, href: link(["inbox"])},
    h("strong", null, "still open"), h("span", null, "owed to ", say(node.receipt.to.id)));
  if (node.kind === "rerun") return h("a", {key: node.id, class: "node stub", style: at,
    href: link(["task", node.task])},
    h("strong", null, "run again"), h("span", null, "as task ", endOf(node.task)));
  if (node.kind === "fold") return h("button", {key: node.id, class: "node fold", style: at, onclick: () => {
    page.local.fold = page.local.fold?.id === node.id ? null : node;
    page.redraw();
  }}, h("strong", null, `${node.members.length} × ${node.type}`), h("span", null, "alike: show them"));
  const {receipt} = node;
  const chosen = shown.chosen === receipt;
  return h("button", {key: node.id, class: `node ${node.open ? "open" : ""} ${toneOf(receipt)}`, style: at,
    "aria-pressed": String(chosen),
    onclick: () => page.go({receipt: chosen ? "" : receipt.receipt_id}, {replace: true})},
  h("strong", null, receipt.receipt_type, node.discharged && h("span", {class: "tick", title: "discharged"}, " ✓")),
  h("span", null, nameOf(receipt.from), " → ", nameOf(receipt.to), " · ", sayWhen(receipt.created_at, page.now())));
}

function nameOf(principal) {
  return principal.kind === "asyncgate" ? "gate" : say(principal.id);
}

function showStub(node, {strangers}, at) {
  const other = strangers[node.id];
  if (!other?.task_id) return h("div", {key: node.id, class: "node stub", style: at},
    h("strong", null, other?.receipt_type ?? "elsewhere"),
    h("span", null, other ? "of no task" : `receipt ${endOf(node.id)}`));
  return h("a", {key: node.id, class: "node stub", style: at, href: link(["task", other.task_id], {receipt: node.id}),
    title: node.id},
    h("strong", null, other.receipt_type), h("span", null, "of task ", endOf(other.task_id)));
}

function toneOf(receipt) {
  const type = receipt.receipt_type;
  if (isGivenBack(receipt)) return "";
  if (type === "task.failed" || type === "task.canceled") return "bad";
  if (type === "lease.expired" || type === "system.anomaly" || type === "task.escalated") return "warn";
  return type === "task.completed" || type === "task.result_ready" ? "well" : "";
}

/** Whether a receipt waits for somebody to acknowledge it, and this credential may. */
export function canAcknowledge(receipt, receipts, page) {
  return page.may("ack_receipt") && receipt.to.kind !== "asyncgate" && receipt.receipt_type !== "task.assigned"
    && speaksFor(receipt.to)
    && !receipts.some(({receipt_type: type, parents}) => type === "receipt.acknowledged"
      && parents.includes(receipt.receipt_id));
}

/** Acknowledge a receipt. */
export function acknowledge(receipt, page) {
  return page.act("ack_receipt", {receipt_id: receipt.receipt_id}).then(() => note("Acknowledged"),
    (problem) => note(problem.message, "bad"));
}

function showReceipt(receipt, receipts, page) {
  const goTo = (id) => h("button", {class: "id", onclick: () => page.go({receipt: id}, {replace: true})},
    receipts.find((parent) => parent.receipt_id === id)?.receipt_type ?? "elsewhere", " ", endOf(id));
  const answers = receipts.filter((answer) => answer.parents.includes(receipt.receipt_id));
  const lead = (node) => requestAnimationFrame(() => node.scrollIntoView({block: "nearest"}));
  return h("aside", {class: "receipt", key: receipt.receipt_id, "aria-label": `Receipt ${receipt.receipt_type}`,
    ready: lead},
    h("header", {class: "sheet-head"}, h("h3", null, receipt.receipt_type),
      h("div", {class: "actions"},
        canAcknowledge(receipt, receipts, page) && h("button", {onclick: () => acknowledge(receipt, page)},
          "Acknowledge"),
        h("button", {onclick: () => copy(writeJson(receipt, 2), "Receipt copied")}, "Copy"),
        copyMenu("get_receipt", {receipt_id: receipt.receipt_id}),
        h("button", {class: "icon", "aria-label": "Close the receipt",
          onclick: () => page.go({receipt: ""}, {replace: true})}, "✕"))),
    showFacts(receipt, page.now(), [
      ["Answers", receipt.parents.length ? receipt.parents.map(goTo) : null],
      ["Answered by", answers.length ? answers.slice(0, MOST_LISTED).map(({receipt_id: id}) => goTo(id)) : null]]));
}

function showFold({id, members, type}, receipts, page) {
  const listed = receipts.filter((member) => members.includes(member.receipt_id));
  return h("aside", {class: "receipt", key: id, "aria-label": `${members.length} receipts`},
    h("header", {class: "sheet-head"}, h("h3", null, `${members.length} × ${type}`),
      h("button", {class: "icon", "aria-label": "Close the list",
      onclick: () => {
        page.local.fold = null;
        page.redraw();
      }}, "✕")),
    h("ol", {class: "folded"}, listed.slice(0, MOST_LISTED).map((member) => h("li", {key: member.receipt_id},
      h("button", {class: "id", onclick: () => page.go({receipt: member.receipt_id}, {replace: true})},
        endOf(member.receipt_id)), " ",
      nameOf(member.from), " → ", nameOf(member.to), " ", when(member.created_at, page.now())))),
    listed.length > MOST_LISTED && h("p", {class: "quiet"},
      `… ${listed.length - MOST_LISTED} more: the export has them all`));
}
