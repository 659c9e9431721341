// The types of tasks beside a list: a filter, and how a whole type is stopped at once.

import {h} from "./dom.js";
import {withWord} from "./filter.js";
import {badge, filterChips, say} from "./parts.js";
import {pauseButtons, targetOf} from "./pausing.js";

const MOST_TYPES = 8;

/** Return the types with the most unended tasks, as `[[type, count], …]`; a look at one type leaves them. */
export function keepTypes(local, queues, type) {
  if (queues && !type) {
    const counts = new Map();
    for (const {type: name, claimable, leased, delayed, held} of queues) {
      counts.set(name, (counts.get(name) ?? 0) + claimable + leased + delayed + held);
    }
    const unended = [...counts].filter(([, count]) => count).sort(([, first], [, other]) => other - first);
    local.types = unended.slice(0, MOST_TYPES);
  }
  return local.types ?? [];
}

/** Show buttons that put a type into the filter. */
export function typeChips(page, q, type, types) {
  const choices = types.map(([name, count]) => [
    [say(name), " ", h("span", {class: "quiet"}, count)], withWord(q, "type", name), type === name]);
  const all = ["all types", withWord(q, "type", null), !type];
  return types.length > 1 && filterChips(page, "Type", [all, ...choices]);
}

/** Whether this credential may do things to many tasks. */
export function mayBulk(page) {
  return page.may("preview_bulk") && page.may("run_bulk");
}

/** Offer to stop a type at once: no new leases, or all canceled that fits `cancels`, which is the whole filter. */
export function stopType(page, type, pauses = [], cancels = {type}) {
  const paused = pauses.find((pause) => pause.whole_tenant || (pause.type === type && !pause.capabilities));
  const offers = [pauseButtons(page, paused ? targetOf(paused) : {type}, pauses),
    mayBulk(page) && h("button", {class: "danger", onclick: async () => (await import("./bulk.js")).askBulk(
      page, "cancel", cancels)}, "Cancel all …")];
  if (!page.may("pause_work") && !mayBulk(page) && !paused) return null;
  return h("div", {class: "head stop-type", key: "stop"}, h("p", null, "Type ", h("strong", null, say(type)), " ",
    paused && [badge("paused"), paused.reason && [": ", say(paused.reason)]]), h("div", {class: "actions"}, offers));
}
