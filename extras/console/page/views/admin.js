// Admin: tenants and their limits, usage, keys, people and their sessions, the audit log.

import {h} from "../dom.js";
import {link} from "../route.js";
import * as audit from "./admin_audit.js";
import * as keys from "./admin_keys.js";
import * as people from "./admin_people.js";
import * as tenants from "./admin_tenants.js";
import * as usage from "./admin_usage.js";

const TABS = [
  {name: "keys", title: "Keys", needs: "list_keys", part: keys},
  {name: "people", title: "People", needs: "list_users", part: people},
  {name: "sessions", title: "Sessions", needs: "list_sessions",
    part: {load: people.loadSessions, show: people.showSessions}},
  {name: "tenants", title: "Tenants and limits", needs: "get_limits", part: tenants},
  {name: "usage", title: "Usage", needs: "get_usage", part: usage},
  {name: "audit", title: "Audit", needs: "list_audit", part: audit},
];

function findTab(page) {
  const open = TABS.filter((tab) => page.may(tab.needs));
  return {open, tab: open.find((tab) => tab.name === page.params.tab) ?? open[0]};
}

/** Read what the open tab shows. */
export async function load(page) {
  const {tab} = findTab(page);
  return {tab: tab.name, data: await tab.part.load(page)};
}

/** Whether an event is a reason to look again: no event tells of keys or people. */
export function concerns() {
  return false;
}

/** Show the tabs and the open one. */
export function show({tab: loaded, data}, page) {
  const {open, tab} = findTab(page);
  const {tenant} = page.params;
  return [
    h("div", {class: "head"}, h("h1", null, "Admin"),
      tenant && h("p", null, "of tenant ", h("strong", null, tenant), " ",
        h("a", {href: link(["admin"], {tab: tab.name})}, "all"))),
    h("nav", {class: "tabs", "aria-label": "Admin"}, open.map((other) => h("a",
      {href: link(["admin"], {tab: other.name, tenant}), "aria-current": other === tab ? "page" : null}, other.title))),
    loaded === tab.name ? h("div", {key: tab.name, class: "stack"}, tab.part.show(data, page))
      : h("p", {class: "empty"}, "Loading …")];
}
