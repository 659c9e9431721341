// Tenants and their limits: how much of each is used; suspend, and make limits stricter.

import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {badge, facts, meter, say, section} from "../parts.js";
import {link} from "../route.js";
import {copyMenu} from "../share.js";
import {exportMenu, table} from "../table.js";
import {when} from "../time.js";

const GIGABYTE = 1e9;
// What is limited: the limit's field, what is used of it, and how that is said.
const METERS = [
  ["Active tasks", "active_tasks", (used) => used.active_tasks],
  ["Leases at once", "concurrent_leases", (used) => used.concurrent_leases],
  ["Tasks this hour", "tasks_per_hour", (used) => used.tasks_this_hour],
  ["Calls this hour", "api_calls_per_hour", (used) => used.api_calls_this_hour],
  ["Receipts, GB", "receipt_storage_gb", (used) => Number((used.receipt_storage_bytes / GIGABYTE).toFixed(3))],
  ["Recorded steps, GB", "step_storage_gb", (used) => Number((used.step_storage_bytes / GIGABYTE).toFixed(3))],
  ["Ended tasks kept", "terminal_tasks", (used) => used.terminal_tasks],
];
const OWN_HINT = "Empty: as it is; -1: as the settings say";

/** Read the tenants, if the credential may see them, and the limits of one. */
export async function load(page) {
  const [tenants, limits] = await Promise.all([
    page.may("list_tenants") ? page.call("list_tenants").catch(() => ({tenants: []})) : {tenants: []},
    page.call("get_limits", {tenant: page.params.tenant})]);
  return {tenants: tenants.tenants, limits};
}

/** Show limits, and the tenants. */
export function show({tenants, limits}, page) {
  const columns = [
    {name: "name", title: "Tenant", grow: true, show: (row) => say(row.name || row.tenant)},
    {name: "tier", title: "Tier", show: (row) => row.tier},
    {name: "state", title: "State", value: (row) => row.suspended_at ? "suspended" : "active",
      show: (row) => row.suspended_at ? badge("suspended", "error") : badge("active")},
    {name: "created_at", title: "Created", wide: true, show: (row) => when(row.created_at, page.now())},
    {name: "tenant", title: "Id", wide: true, whole: true, show: (row) => h("span", {class: "code"}, row.tenant)}];
  const actions = {name: "actions", title: "", show: (row) => h("button",
    {class: row.suspended_at ? "" : "danger", onclick: () => suspend(page, row)},
    row.suspended_at ? "Let go on" : "Suspend")};
  const shown = page.may("suspend_tenant") ? [...columns, actions] : columns;
  const offers = [exportMenu("tenants", columns, tenants), copyMenu("list_tenants", {})];
  return [
    showLimits(limits, page),
    tenants.length > 0 && section("Tenants", {actions: offers},
      table(page, {name: "tenants", columns: shown, rows: tenants, key: (row) => row.tenant,
        open: (row) => link(["admin"], {tab: "tenants", tenant: row.tenant})}))];
}

function showLimits(limits, page) {
  const {tier, enforced, used, exempt_until: exempt, stricter_until: stricter, stricter_why: why} = limits;
  const {tenant} = page.params;
  const actions = [page.may("set_limits") && h("button", {onclick: () => change(page, limits)}, "Change …"),
    copyMenu("get_limits", {tenant})];
  return section(`Limits of ${tenant ?? "this tenant"}`, {actions},
    facts([["Tier", tier], ["Counted", enforced ? "yes" : "no: limits are off in the settings"],
      ["Exempt until", exempt && when(exempt, page.now())],
      ["Stricter until", stricter && [when(stricter, page.now()), " ", say(why ?? "")]],
      ["Largest payload", `${limits.max_payload_bytes} bytes`],
      ["Longest lease", `${limits.max_lease_ttl_seconds} seconds`]]),
    used && h("div", {class: "meters"},
      METERS.map(([title, name, read]) => meter(title, read(used), limits[name]))));
}

function change(page, limits) {
  return askForm("Change limits", {
    fields: [{name: "tier", label: "Tier", value: limits.tier, options: ["free", "paid", "enterprise"]},
      {name: "calls", label: "Stricter: calls per hour", type: "number", hint: "Empty: as the tier says"},
      {name: "hours", label: "Stricter for so many hours", type: "number", hint: "Needed with a stricter limit"},
      {name: "payload", label: "Largest payload, in bytes", type: "number", hint: OWN_HINT},
      {name: "lease", label: "Longest lease, in seconds", type: "number", hint: OWN_HINT},
      {name: "reason", label: "Why", hint: "It is audited"}], button: "Change",
    run: async ({tier, calls, hours, payload, lease, reason}) => {
      const own = {...(payload && {max_payload_bytes: Number(payload)}),
        ...(lease && {max_lease_ttl_seconds: Number(lease)})};
      const stricter = calls && {stricter_calls_per_hour: Number(calls),
        stricter_until: new Date(page.now() + Number(hours || 24) * 3600e3).toISOString()};
      await page.act("set_limits", {tenant: limits.tenant, tier, reason, ...own, ...stricter});
      note("Changed");
    }});
}

function suspend(page, tenant) {
  const on = !tenant.suspended_at;
  return askForm(`${on ? "Suspend" : "Let go on"}: ${tenant.name || tenant.tenant}`, {
    says: on ? "All its credentials are refused at once. Nothing is deleted." : "Its credentials are valid again.",
    danger: on,
    fields: [{name: "reason", label: "Why", hint: "It is audited"}], button: on ? "Suspend" : "Let go on",
    run: ({reason}) => page.act("suspend_tenant", {tenant: tenant.tenant, suspended: on, reason})});
}
