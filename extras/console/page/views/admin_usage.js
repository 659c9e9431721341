// Usage: what a tenant used in each month, and its budgets.

import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {meter, section} from "../parts.js";
import {asCommand, copyMenu, FIRST_TASK, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {when} from "../time.js";

// What is counted: the field, its title, and its unit if the gate counts a smaller one.
const AMOUNTS = [
  ["tasks", "Tasks"], ["lease_hours", "Lease-hours"], ["receipt_byte_hours", "Receipts, GB-hours", 1e9],
  ["payload_byte_hours", "Payloads, GB-hours", 1e9], ["reads", "Reads"], ["writes", "Writes"],
  ["heartbeats", "Heartbeats"]];

const BUDGET = {quantity: "tasks", monthly: 10000};

/** Read the last twelve months, and the budgets of this one. */
export async function load(page) {
  const {tenant} = page.params;
  const [usage, budgets] = await Promise.all([
    page.call("get_usage", {tenant, period: "month"}),
    page.may("get_budgets") ? page.call("get_budgets", {tenant}) : {budgets: []}]);
  return {usage, budgets: budgets.budgets};
}

/** Show the budgets, and the months. */
export function show({usage, budgets}, page) {
  const {tenant} = page.params;
  const months = [...usage.usage].reverse();
  const columns = [{name: "begins", title: "Month", show: ({begins}) => begins.slice(0, 7)},
    ...AMOUNTS.map(([name, title, unit], place) => ({
      name, title, number: true, wide: place > 3, show: (month) => round(month[name], unit)}))];
  return [
    section(`Budgets of ${tenant ?? "this tenant"}`,
      {actions: [page.may("set_budget") && h("button", {onclick: () => change(page)}, "Change …"),
        copyMenu("get_budgets", {tenant})]},
      budgets.length ? h("div", {class: "meters"}, budgets.map((budget) => meter(
        `${titleOf(budget.quantity)}, this month`, round(budget.used), budget.monthly)))
        : h("p", {class: "quiet"}, "No budget is set: use is counted and never refused. ",
          page.may("set_budget") && offerCommand(asCommand("set_budget", {tenant, ...BUDGET})))),
    section("Usage by month (UTC)", {actions: [exportMenu("usage", columns, months),
      copyMenu("get_usage", {tenant, period: "month"})]},
    h("p", {class: "quiet"}, "Counted until ", when(usage.counted_until, page.now()), "."),
    table(page, {name: "usage", columns, rows: months, key: (month) => month.begins, empty: [
      "Nothing was used yet. ", page.may("create_task") && offerCommand(asCommand("create_task", FIRST_TASK))]}))];
}

const titleOf = (quantity) => AMOUNTS.find(([name]) => name === quantity)?.[1].split(",")[0] ?? quantity;

const round = (amount, unit = 1) => Number((amount / unit).toFixed(2));

function change(page) {
  return askForm("Change a budget", {
    says: "At 80 % the admins are told. At 100 % no task can be created until the month ends or the budget is raised.",
    fields: [{name: "quantity", label: "What", value: "tasks", options: AMOUNTS.map(([name]) => name)},
      {name: "monthly", label: "In a month", type: "number",
        hint: "Storage in byte-hours. Empty: the budget is removed"}], button: "Change",
    run: async ({quantity, monthly}) => {
      await page.act("set_budget", {tenant: page.params.tenant, quantity, monthly: monthly ? Number(monthly) : null});
      note("Changed");
    }});
}
