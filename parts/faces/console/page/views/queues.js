// Queues: how deep, how long the oldest waits, what happens, who can take it; pause, drain, resume.

import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {badge, say, section, tile, who} from "../parts.js";
import {link} from "../route.js";
import {copyMenu} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayLength, when} from "../time.js";

/** Read what the view shows. */
export async function load(page) {
  const [{queues}, pauses] = await Promise.all([
    page.call("list_queues", {limit: 200, type: page.params.type}),
    page.may("list_pauses") ? page.call("list_pauses") : {pauses: []}]);
  return {queues, pauses: pauses.pauses};
}

const columns = [
  {name: "type", title: "Type", grow: true, show: (queue) => say(queue.type)},
  {name: "capabilities", title: "Requires", wide: true, show: (queue) => queue.capabilities.join(", ") || "–"},
  {name: "claimable", title: "Waiting", number: true, show: (queue) => queue.claimable},
  {name: "oldest_wait_seconds", title: "Oldest waits", number: true,
    show: (queue) => queue.oldest_wait_seconds === null ? "–" : sayLength(queue.oldest_wait_seconds)},
  {name: "leased", title: "Leased", number: true, show: (queue) => queue.leased},
  {name: "delayed", title: "Delayed", number: true, wide: true, show: (queue) => `${queue.delayed}${queue.delayed_at_least ? "+" : ""}`},
  {name: "held", title: "On hold", number: true, wide: true, show: (queue) => queue.held},
  {name: "workers", title: "Workers", number: true, show: (queue) => queue.workers || badge("nobody", "warning")},
  {name: "last_hour", title: "Ended in 1 h", number: true, wide: true, show: (queue) => queue.last_hour.ended},
];

/** Show the queues. */
export function show({queues, pauses}, page) {
  const sum = (name) => queues.reduce((total, queue) => total + queue[name], 0);
  const paused = (queue) => pauses.some((one) => one.whole_tenant || one.type === queue.type);
  return [
    h("div", {class: "head"}, h("h1", null, "Queues"), h("div", {class: "actions"},
      page.may("pause_work") && h("button", {onclick: () => pause(page, {})}, "Pause …"),
      exportMenu("queues", columns, queues), copyMenu("list_queues", {limit: 200}))),
    h("div", {class: "tiles"}, tile(sum("claimable"), "waiting", {href: link(["tasks"], {q: "status:queued"})}),
      tile(sum("leased"), "leased", {href: link(["tasks"], {q: "status:leased"})}), tile(sum("delayed"), "delayed"),
      tile(sum("held"), "on hold", {tone: sum("held") ? "warning" : "", href: link(["tasks"], {q: "held:yes"})})),
    pauses.length > 0 && section("Paused", {}, pauses.map((one) => showPause(one, page))),
    table(page, {name: "queues", columns: [...columns, {name: "actions", title: "", show: (queue) => paused(queue)
      ? badge("paused") : page.may("pause_work") && h("button", {onclick: () => pause(page, {type: queue.type})}, "Pause")}],
    rows: queues, key: (queue) => queue.queue_id, open: (queue) => link(["tasks"], {q: `type:${queue.type}`}),
    empty: "No queue has a task."})];
}

function showPause(one, page) {
  const target = one.whole_tenant ? {whole_tenant: true} : one.worker ? {worker: one.worker} : {type: one.type, capabilities: one.capabilities};
  return h("div", {class: "head", key: JSON.stringify(target)},
    h("p", null, badge("paused"), " ", h("strong", null, say(one.whole_tenant ? "everything" : one.worker ? `worker ${one.worker}` : one.type)),
      " ", when(one.since, page.now()), " by ", who(one.paused_by), one.reason && [": ", say(one.reason)],
      one.leases_left > 0 && `; ${one.leases_left} leases are left`),
    page.may("resume_work") && h("button", {onclick: () => page.act("resume_work", target).then(() => note("Resumed"))}, "Resume"));
}

function pause(page, {type = ""}) {
  return askForm("Pause work", {
    says: "Workers get no new leases of it. Leases that they have go on.",
    fields: [{name: "type", label: "Task type", value: type, hint: "Empty: everything in this tenant"},
      {name: "reason", label: "Why", hint: "Workers are told, and it is audited"}],
    button: "Pause", danger: true,
    run: ({type: named, reason}) => page.act("pause_work", named ? {type: named, reason} : {whole_tenant: true, reason})});
}
