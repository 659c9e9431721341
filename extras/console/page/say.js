// What every view says: numbers, and why a task is on hold.  words.js has the rest, which the first view does without.

/** Words for the reasons of holds. */
export const HOLDS = {
  lease_expiries: "its lease was lost too often",
  input_required: "it waits for an answer",
  children_open: "it waits for its children",
  key_taken: "it waits for the end of a task with its key",
  rebuilt: "the gate was rebuilt from its receipts",
  receipts_per_task: "it has as many receipts as it may have",
};

const numbers = new Intl.NumberFormat();

/** Say a number with the separators of the reader's language; other values stay as they are. */
export function sayNumber(value) {
  return typeof value === "number" ? numbers.format(value) : value;
}

/** Say a code that has no words as it is. */
export const plain = (code) => String(code).replaceAll("_", " ");

/** Say why a task is on hold. */
export function sayHold(code) {
  return HOLDS[code] ?? plain(code);
}

/** Whether somebody may release a hold: others end with an answer, or with another task. */
export function isReleasable(held) {
  return Boolean(held) && held !== "input_required" && held !== "key_taken";
}

/** Whether a lease ended because its worker gave the task back; else it was lost. */
export function isGivenBack({receipt_type: type, body}) {
  return type === "lease.expired" && ["released", "parked", "input_required"].includes(body?.reason);
}
