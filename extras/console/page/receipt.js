// What a receipt says and proves, wherever it is shown.

import {h} from "./dom.js";
import {jsonTree} from "./exact.js";
import {facts, say, shortId, who} from "./parts.js";
import {when} from "./time.js";

/** Show the facts of a receipt, its hash and its body; `more` are further pairs of facts. */
export function showFacts(receipt, now, more = []) {
  return [facts([
    ["From", who(receipt.from)], ["To", who(receipt.to)], ["When", when(receipt.created_at, now)],
    ["Id", h("span", {class: "code"}, receipt.receipt_id, " ", shortId(receipt.receipt_id))], ...more,
    ["Lease", receipt.lease_id && shortId(receipt.lease_id)],
    ["Schedule", receipt.schedule_id && say(receipt.schedule_id)],
    ["Delivered", receipt.delivered_at && when(receipt.delivered_at, now)],
    ["Gate", say(receipt.asyncgate_instance)], ["Hash", h("span", {class: "code"}, receipt.hash)]]),
  h("h4", null, "Body"), jsonTree(receipt.body)];
}
