// The ledger: where receipts go and how far behind that is, the seals over them, and the archive.

import {askForm, note} from "../dialogs.js";
import {h} from "../dom.js";
import {badge, facts, say, section, shortId, taskLink, tile, who} from "../parts.js";
import {asCommand, copyMenu, offerCommand} from "../share.js";
import {exportMenu, table} from "../table.js";
import {sayLength, when} from "../time.js";

const LAST_SEALS = 100;

/** Read the mode, the lag, the last seals, and the beginning of the archive. */
export async function load(page) {
  const task = page.params.task || undefined;
  const [config, health, seals, archive] = await Promise.all([
    page.call("get_config"), page.call("health"), page.call("list_seals", {last: LAST_SEALS, limit: LAST_SEALS}),
    page.call("list_archived_receipts", {task_id: task, limit: 100}).catch((problem) => ({problem, receipts: []}))]);
  return {config, lag: health.receipt_ledger_lag, seals: seals.seals.reverse(), archive};
}

/** Whether an event is a reason to look again: none is, for sealing and sending have their own pace. */
export function concerns() {
  return false;
}

const sealColumns = [
  {name: "number", title: "Seal", number: true, show: (seal) => seal.number},
  {name: "count", title: "Receipts", number: true,
    show: (seal) => seal.late ? [seal.count, " ", badge("late", "warning")] : seal.count},
  {name: "sealed_at", title: "Sealed", show: (seal, page) => when(seal.sealed_at, page.now())},
  {name: "last_receipt_id", title: "Last receipt", wide: true, show: (seal) => shortId(seal.last_receipt_id)},
  {name: "hash", title: "Hash", grow: true,
    show: ({hash}) => h("span", {class: "code", title: hash}, hash)},
  {name: "digest", title: "Digest", hidden: true, show: () => null},
];

const archiveColumns = [
  {name: "receipt_id", title: "Receipt", show: (receipt) => shortId(receipt.receipt_id)},
  {name: "receipt_type", title: "Type", grow: true, show: (receipt) => say(receipt.receipt_type)},
  {name: "from", title: "From", wide: true, value: (receipt) => receipt.from.id, show: (receipt) => who(receipt.from)},
  {name: "to", title: "To", value: (receipt) => receipt.to.id, show: (receipt) => who(receipt.to)},
  {name: "task_id", title: "Task", show: (receipt) => receipt.task_id ? taskLink(receipt.task_id) : "–"},
  {name: "created_at", title: "Created", show: (receipt, page) => when(receipt.created_at, page.now())},
];

function withPage(columns, page) {
  return columns.filter(({hidden}) => !hidden).map((column) => ({...column, show: (row) => column.show(row, page)}));
}

/** Show the ledger. */
export function show({config, lag, seals, archive}, page) {
  const last = seals[0];
  return [
    h("div", {class: "head"}, h("h1", null, "Ledger")),
    h("div", {class: "tiles"},
      lag && tile(lag.waiting, "wait for the ledger", {tone: lag.waiting ? "warning" : ""}),
      lag && tile(sayLength(lag.oldest_seconds), "the oldest waits", {tone: lag.oldest_seconds > 60 ? "warning" : ""}),
      lag && tile(lag.parked, "parked", {tone: lag.parked ? "danger" : ""}),
      tile(last ? last.number : 0, "seals"), last && tile(when(last.sealed_at, page.now()), "last seal")),
    section("Where receipts go", {}, showMode(config, lag)),
    section("Seals", {actions: [
      page.may("seal_receipts") && h("button", {onclick: () => seal(page)}, "Seal now"),
      exportMenu("seals", sealColumns, seals), copyMenu("list_seals", {last: LAST_SEALS, limit: LAST_SEALS})]},
    h("p", {class: "quiet"},
      "A seal is a hash over receipts and the seal before. Keep a number with its hash elsewhere; ",
      h("code", null, "asyncgate verify --ledger --seal NUMBER:HASH"), " proves later that nobody rewrote a receipt."),
    table(page, {name: "seals", columns: withPage(sealColumns, page), rows: seals, key: (row) => row.number,
      empty: ["Nothing is sealed yet. The gate seals new receipts every minute. ",
        page.may("seal_receipts") && offerCommand(asCommand("seal_receipts"))]})),
    section("Archive", {actions: [
      page.may("run_archive") && h("button", {onclick: () => archiveNow(page)}, "Archive now …"),
      exportMenu("archive", archiveColumns, archive.receipts)]},
    showArchive(archive, page))];
}

function showMode(config, lag) {
  const standalone = config.receipt_mode === "standalone";
  return [
    lag?.circuit && lag.circuit !== "closed" && h("p", {class: "warning banner"},
      `The circuit breaker is ${lag.circuit.replace("_", " ")}: the ledger does not answer. `,
      "Receipts wait here, in order."),
    lag?.parked > 0 && h("p", {class: "problem banner"},
      "The ledger has refused receipts, and they are parked. The log says why; ",
      h("code", null, "asyncgate receipts"), " shows them and sends them again."),
    facts([["Mode", config.receipt_mode],
      ["Ledger", standalone ? "this gate keeps its receipts itself" : config.memorygate_url],
      ["Circuit breaker", lag?.circuit?.replace("_", " ")],
      ["Workers store receipts", config.worker_completion.replaceAll("_", " ")]])];
}

function showArchive(archive, page) {
  if (archive.problem) return h("p", {class: "problem"}, archive.problem.message);
  const {task} = page.params;
  const find = (event) => {
    event.preventDefault();
    page.go({task: event.currentTarget.elements.task.value.trim()});
  };
  return [
    h("form", {class: "filter", onsubmit: find},
      h("input", {type: "search", name: "task", placeholder: "task id", "aria-label": "Archived receipts of a task",
        value: task ?? ""}),
      h("button", {type: "submit"}, "Find"),
      task && page.may("restore_archive")
        && h("button", {type: "button", onclick: () => restore(page)}, "Restore …")),
    table(page, {name: "archive", columns: withPage(archiveColumns, page), rows: archive.receipts,
      key: (receipt) => receipt.receipt_id, empty: task ? "No archived receipt is of that task."
        : ["Nothing is archived. ", page.may("run_archive") && offerCommand(asCommand("run_archive"))]}),
    archive.next_cursor && h("p", {class: "quiet"}, "These are the oldest 100. Name a task to see its own.")];
}

async function seal(page) {
  try {
    const end = await page.act("seal_receipts", {});
    note(`Sealed up to seal ${end.number}`);
  } catch (problem) {
    note(problem.message, "bad");
  }
}

function archiveNow(page) {
  return askForm("Archive receipts", {
    says: "Old receipts of ended tasks go to the archive, as the settings say. "
      + "Seals stay, and the archive can be read.",
    fields: [{name: "most", label: "At most so many receipts", value: "10000", type: "number", required: true}],
    button: "Archive",
    run: async ({most}) => {
      const done = await page.act("run_archive", {most: Number(most)});
      note(`${done.receipts} receipts archived${done.more ? "; there are more" : ""}`);
    }});
}

function restore(page) {
  return askForm("Restore from the archive", {
    says: "The receipts of this task, and of those that they belong to, come back into the gate.", button: "Restore",
    run: async () => {
      const {receipts} = await page.act("restore_archive", {task_id: page.params.task});
      note(`${receipts} receipts restored`);
    }});
}
